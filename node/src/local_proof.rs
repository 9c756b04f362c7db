//! Proof that two agents belong to the same user of the same machine, so that they may join without asking.
//!
//! A secret lies where only this user can read it: `$XDG_RUNTIME_DIR/shoal`, else `shoal-<uid>` in the temporary folder;
//! the folder is 0700 and its owner is checked. An agent that dials another over loopback sends a MAC of both peer ids
//! under that secret. The receiver's id is part of it, so a proof given to one agent is worth nothing to any other.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use ring::hmac;
use shoal_scheduler::NodeId;

/// The secret's file in the runtime folder.
const FILE: &str = "secret";
/// Bytes of the secret.
const SECRET_BYTES: usize = 32;
/// What stands in front of every MAC, so that the secret serves one purpose.
const PURPOSE: &[u8] = b"shoal local proof 0\0";

/// Why no proof can be made. The agent goes on without: then agents of this machine are admitted like any others.
#[derive(Debug, thiserror::Error)]
pub enum LocalProofError {
    /// The file system said no.
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
    /// Somebody else could have put the secret there.
    #[error("{} is not private to this user ({reason})", path.display())]
    NotPrivate {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// The secret that agents of this user on this machine share.
#[derive(Clone)]
pub struct LocalSecret {
    key: hmac::Key,
}

impl std::fmt::Debug for LocalSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LocalSecret")
    }
}

impl LocalSecret {
    /// The secret of this user and machine, made if there is none yet.
    ///
    /// # Errors
    /// [`LocalProofError`].
    pub fn load() -> Result<Self, LocalProofError> {
        Self::load_from(&runtime_folder())
    }

    /// The secret in `folder`, made if there is none yet.
    ///
    /// # Errors
    /// [`LocalProofError`].
    pub fn load_from(folder: &Path) -> Result<Self, LocalProofError> {
        let fail =
            |action, path: &Path, source| LocalProofError::Io { action, path: path.to_owned(), source };
        let mut builder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        match builder.create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(fail("create", folder, error));
            }
            _ => {}
        }
        require_private(folder, true)?;
        let path = folder.join(FILE);
        if !path.exists() {
            let mut secret = [0; SECRET_BYTES];
            getrandom::fill(&mut secret)
                .map_err(|error| fail("draw", &path, io::Error::other(error.to_string())))?;
            let mut file = tempfile::Builder::new()
                .prefix(".secret")
                .tempfile_in(folder)
                .map_err(|error| fail("create", &path, error))?;
            file.write_all(&secret).map_err(|error| fail("write", &path, error))?;
            match file.persist_noclobber(&path) {
                Err(error) if error.error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(fail("create", &path, error.error));
                }
                _ => {}
            }
        }
        require_private(&path, false)?;
        let secret = fs::read(&path).map_err(|error| fail("read", &path, error))?;
        if secret.len() != SECRET_BYTES {
            let reason = format!("{} bytes instead of {SECRET_BYTES}", secret.len());
            return Err(LocalProofError::NotPrivate { path, reason });
        }
        Ok(Self { key: hmac::Key::new(hmac::HMAC_SHA256, &secret) })
    }

    /// What `from` shows to `to`.
    #[must_use]
    pub fn prove(&self, from: &NodeId, to: &NodeId) -> [u8; 32] {
        let tag = hmac::sign(&self.key, &message(from, to));
        let mut proof = [0; 32];
        proof.copy_from_slice(tag.as_ref());
        proof
    }

    /// Whether `proof` was made by an agent that knows the secret, to be shown by `from` to `to`.
    #[must_use]
    pub fn holds(&self, from: &NodeId, to: &NodeId, proof: &[u8]) -> bool {
        hmac::verify(&self.key, &message(from, to), proof).is_ok()
    }
}

fn message(from: &NodeId, to: &NodeId) -> Vec<u8> {
    let mut bytes = PURPOSE.to_vec();
    for id in [from, to] {
        // Ids hold no zero byte, so the two cannot run into each other.
        bytes.extend_from_slice(id.as_str().as_bytes());
        bytes.push(0);
    }
    bytes
}

fn runtime_folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(folder) if Path::new(&folder).is_dir() => Path::new(&folder).join("shoal"),
        _ => std::env::temp_dir().join(format!("shoal-{}", user().unwrap_or_default())),
    }
}

/// This user's number, read off a file that we make.
#[cfg(unix)]
fn user() -> io::Result<u32> {
    Ok(std::os::unix::fs::MetadataExt::uid(&tempfile::tempfile()?.metadata()?))
}

#[cfg(not(unix))]
fn user() -> io::Result<u32> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(unix)]
fn require_private(path: &Path, folder: bool) -> Result<(), LocalProofError> {
    use std::os::unix::fs::MetadataExt;
    let fail = |source| LocalProofError::Io { action: "look at", path: path.to_owned(), source };
    let user = user().map_err(fail)?;
    // Not following links: another user could have laid one here.
    let facts = fs::symlink_metadata(path).map_err(fail)?;
    let not_private = |reason: String| Err(LocalProofError::NotPrivate { path: path.to_owned(), reason });
    if facts.is_dir() != folder || facts.is_symlink() {
        return not_private("it is not a plain file or folder".into());
    }
    if facts.uid() != user {
        return not_private(format!("it belongs to user {}", facts.uid()));
    }
    if facts.mode() & 0o077 != 0 {
        return not_private(format!("its mode is {:o}", facts.mode() & 0o777));
    }
    Ok(())
}

#[cfg(not(unix))]
fn require_private(path: &Path, _: bool) -> Result<(), LocalProofError> {
    Err(LocalProofError::NotPrivate {
        path: path.to_owned(),
        reason: "owners are not checked on this system yet".into(),
    })
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::identity::Identity;

    #[test]
    fn the_same_secret_proves_and_another_does_not() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (a, b, c) = (Identity::generate(), Identity::generate(), Identity::generate());
        let here = LocalSecret::load_from(&folder.path().join("shoal")).unwrap();
        let again = LocalSecret::load_from(&folder.path().join("shoal")).unwrap();
        let elsewhere = LocalSecret::load_from(&other.path().join("shoal")).unwrap();
        let proof = here.prove(a.id(), b.id());
        assert!(again.holds(a.id(), b.id(), &proof));
        assert!(!again.holds(b.id(), a.id(), &proof), "not the other way round");
        assert!(!again.holds(a.id(), c.id(), &proof), "not to a third");
        assert!(!elsewhere.holds(a.id(), b.id(), &proof));
        assert!(!again.holds(a.id(), b.id(), &[]));
    }

    #[test]
    fn a_folder_open_to_others_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shoal");
        LocalSecret::load_from(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(matches!(LocalSecret::load_from(&path), Err(LocalProofError::NotPrivate { .. })));
    }

    #[test]
    fn a_link_or_a_short_secret_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("shoal"), folder.path().join("link"));
        LocalSecret::load_from(&path).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(LocalSecret::load_from(&link), Err(LocalProofError::NotPrivate { .. })));
        fs::write(path.join(FILE), b"short").unwrap();
        assert!(matches!(LocalSecret::load_from(&path), Err(LocalProofError::NotPrivate { .. })));
    }
}
