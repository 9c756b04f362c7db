//! The agent's data folder: who holds it, and what a client may read there.
//!
//! One agent at a time: it holds `lock` (flock) for its whole life, so a killed one never leaves a stale lock. `agent.json`
//! says where the running agent answers; it is written once the agent listens and removed when it ends, and a client that
//! finds one left behind by a kill simply gets no answer at that address.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The lock file in the data folder.
const LOCK: &str = "lock";
/// The file in which a running agent says where it answers.
const AGENT: &str = "agent.json";
/// An `agent.json` is never longer; a longer one is not ours.
const MAX_AGENT_BYTES: u64 = 64 << 10;

/// Why the data folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// Another agent has it (exit code 6).
    #[error(
        "the data folder {} is in use by another agent{}; stop that one, or give this one its own with --data-dir",
        path.display(),
        holder.as_ref().map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    InUse {
        /// The folder.
        path: PathBuf,
        /// The process that says it has it.
        holder: Option<u32>,
    },
    /// It cannot be written: permissions, a read-only mount, a full disk.
    #[error("the data folder {} cannot be written ({reason}); {}choose another with --data-dir", path.display(), match source.kind() { io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "make room on its disk, or ", _ => "" })]
    NotWritable {
        /// The folder.
        path: PathBuf,
        /// The cause in words.
        reason: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Anything else that the file system says.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

impl DataDirError {
    /// Whether another agent holds the folder, which is exit code 6 and not 1.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        matches!(self, Self::InUse { .. })
    }

    fn of(action: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        let reason = match source.kind() {
            io::ErrorKind::ReadOnlyFilesystem => "it is on a read-only file system",
            io::ErrorKind::PermissionDenied => "permission denied",
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "no space is left",
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => "a file is in its place",
            _ => return Self::Io { action, path, source },
        };
        Self::NotWritable { path, reason, source }
    }
}

/// What `agent.json` says: where the agent of a data folder answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentFile {
    /// The agent's process id.
    pub pid: u32,
    /// Its node id.
    pub node: String,
    /// Where its HTTP answers.
    pub http: SocketAddr,
    /// The libp2p addresses it listens on.
    pub p2p: Vec<String>,
    /// Where its data listener is.
    pub data: SocketAddr,
    /// The agent's version.
    pub version: String,
}

/// A data folder that this process holds. Dropping it removes `agent.json` and gives the folder free.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    announced: bool,
    // Held, not read: closing it ends the lock.
    _lock: File,
}

impl DataDir {
    /// Makes the folder if it is not there (0700), proves that it can be written, and takes its lock.
    ///
    /// # Errors
    /// [`DataDirError`]: in use, not writable, or what the file system says.
    pub fn open(path: &Path) -> Result<Self, DataDirError> {
        create_private(path).map_err(|error| DataDirError::of("create", path, error))?;
        let lock_path = path.join(LOCK);
        let lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&lock_path)
            .map_err(|error| DataDirError::of("open", path, error))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = Self::agent(path).ok().flatten().map(|agent| agent.pid);
                return Err(DataDirError::InUse { path: path.to_owned(), holder });
            }
            Err(TryLockError::Error(source)) => return Err(DataDirError::of("lock", &lock_path, source)),
        }
        // An existing lock file can be opened on a folder that takes no new file.
        tempfile::tempfile_in(path).map_err(|error| DataDirError::of("write to", path, error))?;
        let _ = fs::remove_file(path.join(AGENT));
        Ok(Self { path: path.to_owned(), announced: false, _lock: lock })
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the identity key is.
    #[must_use]
    pub fn identity(&self) -> PathBuf {
        self.path.join(crate::identity::FILE)
    }

    /// Writes `agent.json`, whole or not at all.
    ///
    /// # Errors
    /// [`DataDirError`] as of any write.
    pub fn announce(&mut self, agent: &AgentFile) -> Result<(), DataDirError> {
        let path = self.path.join(AGENT);
        let fail = |source| DataDirError::of("write", &path, source);
        let bytes = serde_json::to_vec_pretty(agent).map_err(|error| fail(error.into()))?;
        let mut file = tempfile::Builder::new().prefix(".agent").tempfile_in(&self.path).map_err(fail)?;
        file.write_all(&bytes).map_err(fail)?;
        file.persist(&path).map_err(|error| fail(error.error))?;
        self.announced = true;
        Ok(())
    }

    /// What the agent of the folder at `path` said of itself; `None` if none did. It may be of an agent that was killed.
    ///
    /// # Errors
    /// [`DataDirError::Io`] if the file is there and cannot be read, or is not ours.
    pub fn agent(path: &Path) -> Result<Option<AgentFile>, DataDirError> {
        let path = path.join(AGENT);
        let fail = |source| DataDirError::Io { action: "read", path: path.clone(), source };
        match fs::metadata(&path) {
            Ok(facts) if facts.len() > MAX_AGENT_BYTES => {
                return Err(fail(io::Error::new(io::ErrorKind::InvalidData, "it is too long")));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(fail(error)),
        }
        let bytes = fs::read(&path).map_err(fail)?;
        serde_json::from_slice(&bytes).map(Some).map_err(|error| fail(error.into()))
    }
}

impl Drop for DataDir {
    fn drop(&mut self) {
        if self.announced {
            let _ = fs::remove_file(self.path.join(AGENT));
        }
    }
}

/// Makes a folder and those above it; the folder itself only for its owner.
fn create_private(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(above) = path.parent() {
        fs::create_dir_all(above)?;
    }
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    match builder.create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent() -> AgentFile {
        AgentFile {
            pid: std::process::id(),
            node: "12D3KooW".into(),
            http: "127.0.0.1:7711".parse().unwrap(),
            p2p: vec!["/ip4/127.0.0.1/tcp/7710".into()],
            data: "127.0.0.1:9".parse().unwrap(),
            version: "0.1.0".into(),
        }
    }

    #[test]
    fn data_folder_in_use_is_named_with_its_holder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let mut held = DataDir::open(&path).unwrap();
        held.announce(&agent()).unwrap();
        let error = DataDir::open(&path).unwrap_err();
        assert!(error.is_in_use());
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        assert_eq!(DataDir::agent(&path).unwrap(), Some(agent()), "the second leaves the first's file alone");
        drop(held);
        assert_eq!(DataDir::agent(&path).unwrap(), None);
        DataDir::open(&path).unwrap();
    }

    #[test]
    fn a_file_left_by_a_killed_agent_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(AGENT), serde_json::to_vec(&agent()).unwrap()).unwrap();
        let _held = DataDir::open(folder.path()).unwrap();
        assert_eq!(DataDir::agent(folder.path()).unwrap(), None);
    }

    #[test]
    fn data_folder_not_writable_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        let error = DataDir::open(&file.join("below")).unwrap_err();
        assert!(matches!(error, DataDirError::NotWritable { .. }), "{error:?}");
        let error = DataDir::open(&file).unwrap_err();
        assert!(error.to_string().contains("a file is in its place"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn data_folder_on_a_read_only_file_system_says_so() {
        // The kernel's own tree takes no folder of ours, whoever we are.
        for place in ["/proc/shoal-test", "/sys/shoal-test"] {
            let error = DataDir::open(Path::new(place)).unwrap_err();
            assert!(!error.is_in_use());
            assert!(error.to_string().contains(place), "{error}");
        }
        let shown =
            DataDirError::of("create", Path::new("/x"), io::ErrorKind::ReadOnlyFilesystem.into()).to_string();
        assert!(shown.contains("read-only file system") && shown.contains("--data-dir"), "{shown}");
    }

    #[test]
    fn a_broken_agent_file_is_an_error_and_not_a_panic() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(AGENT), b"{\"pid\": -1}").unwrap();
        assert!(DataDir::agent(folder.path()).is_err());
    }
}
