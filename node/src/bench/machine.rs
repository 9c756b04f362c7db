//! Where and by what it was measured.

use std::path::Path;
use std::process::{Command, Stdio};

use serde::Serialize;

/// The machine.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Machine {
    os: &'static str,
    arch: &'static str,
    cpu: Option<String>,
    cores: Option<usize>,
    memory_bytes: Option<u64>,
}

impl Machine {
    pub(super) fn this() -> Machine {
        let system = sysinfo::System::new().ok().map(|mut system| {
            system.refresh_cpu_list(sysinfo::CpuRefreshKind::nothing());
            system.refresh_memory();
            system
        });
        let brand =
            system.as_ref().and_then(|system| system.cpus().first()).map(|cpu| cpu.brand().trim().to_owned());
        Machine {
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            cpu: brand.filter(|brand| !brand.is_empty()),
            cores: std::thread::available_parallelism().ok().map(usize::from),
            memory_bytes: system.map(|system| system.total_memory()),
        }
    }
}

/// The commit: set when a package is built, else that of the checkout in which the program lies; with `-dirty` where that
/// holds changes.
pub(super) fn commit() -> Option<String> {
    if let Some(commit) = option_env!("SHOAL_COMMIT") {
        return Some(commit.to_owned());
    }
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    // A target folder may lie elsewhere; then the checkout is where we stand.
    [folder, Path::new(".")].into_iter().find_map(describe)
}

fn describe(folder: &Path) -> Option<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(folder)
        .args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned()).filter(|text| !text.is_empty())
}
