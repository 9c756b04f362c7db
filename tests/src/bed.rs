//! The folders of one test: data, logs, models.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::agent::{Spec, shoal, target_dir};

/// The model that the beds serve: small, and its package holds its bytes.
pub const MODEL: &str = "smollm2-135m";

/// The folders of one test. Data goes with the test; logs stay under `target/tests/`.
pub struct Bed {
    dir: TempDir,
    logs: PathBuf,
}

impl Bed {
    /// New folders for a test of this name. Logs of an earlier run of it are removed.
    pub fn new(test: &str) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("shoal-test-").tempdir()?;
        let logs =
            std::env::var_os("SHOAL_TEST_LOGS").map_or_else(|| target_dir().join("tests"), PathBuf::from);
        let logs = logs.join(test);
        if logs.exists() {
            fs::remove_dir_all(&logs).with_context(|| format!("removing {}", logs.display()))?;
        }
        fs::create_dir_all(&logs)?;
        Ok(Self { dir, logs })
    }

    /// The folder that goes with the test.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// What an agent of this name is started with: its own folders, and what agents share as those of `machine` do.
    pub fn spec(&self, name: &str, machine: &str) -> Result<Spec> {
        let runtime_dir = self.path().join(format!("run-{machine}"));
        fs::create_dir_all(&runtime_dir)?;
        fs::set_permissions(&runtime_dir, fs::Permissions::from_mode(0o700))?;
        Ok(Spec {
            name: name.to_owned(),
            namespace: None,
            data_dir: self.path().join(format!("data-{name}")),
            model_dir: model_dir()?,
            log: self.logs.join(format!("{name}.log")),
            runtime_dir,
            args: Vec::new(),
        })
    }
}

/// A model folder that holds [`MODEL`]: `SHOAL_TEST_MODEL_DIR`, else one under `target/tests/`, filled once.
pub fn model_dir() -> Result<PathBuf> {
    static DIR: OnceLock<std::result::Result<PathBuf, String>> = OnceLock::new();
    let made = DIR.get_or_init(|| fill_model_dir().map_err(|error| format!("{error:#}")));
    match made {
        Ok(dir) => Ok(dir.clone()),
        Err(error) => bail!("no model folder: {error}"),
    }
}

fn fill_model_dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("SHOAL_TEST_MODEL_DIR") {
        return Ok(dir.into());
    }
    let dir = target_dir().join("tests").join("models");
    fs::create_dir_all(&dir)?;
    let pull = shoal(None).args(["models", "pull", MODEL, "--model-dir"]).arg(&dir).output()?;
    if !pull.status.success() {
        bail!("shoal models pull: {}: {}", pull.status, String::from_utf8_lossy(&pull.stderr));
    }
    Ok(dir)
}
