//! Who this node is: an ed25519 key in the data folder, made once.
//!
//! The node's id is the libp2p peer id of the key, in base58. The file holds the key in libp2p's own encoding; it is
//! created whole or not at all, and only its owner may read it.

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use libp2p::identity::{Keypair, PublicKey};
use libp2p::multihash::Multihash;
use shoal_scheduler::NodeId;

/// The name of the key file in the data folder.
pub const FILE: &str = "identity.key";
/// A key file is never longer; a longer one is not read.
const MAX_FILE_BYTES: u64 = 4096;
/// The multihash code of a peer id that holds the public key itself, as those of ed25519 keys do.
const IDENTITY_HASH: u64 = 0;

/// Why there is no identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file system said no.
    #[error("cannot {action} the identity key {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The file is there and is not a key of ours.
    #[error(
        "{} is not an ed25519 key ({reason}); move it away to be given a new identity, which the swarm will have to admit",
        path.display()
    )]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// A key pair and the node id that follows from it.
#[derive(Clone)]
pub struct Identity {
    keypair: Keypair,
    id: NodeId,
}

impl Identity {
    /// A new identity that is kept nowhere: for tests, and for what needs none that lasts.
    #[must_use]
    pub fn generate() -> Self {
        Self::of(Keypair::generate_ed25519())
    }

    /// Reads the key at `path`, or makes one there. Two processes that do this at once end up with the same key.
    ///
    /// # Errors
    /// [`IdentityError`]; a file that is not a key is never overwritten.
    pub fn load_or_create(path: &Path) -> Result<Self, IdentityError> {
        if let Some(found) = Self::load(path)? {
            return Ok(found);
        }
        let fail = |source| IdentityError::Io { action: "create", path: path.to_owned(), source };
        let made = Self::generate();
        let bytes =
            made.keypair.to_protobuf_encoding().map_err(|error| fail(io::Error::other(error.to_string())))?;
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // A temporary file is made with mode 0600; linking it to its name cannot replace a file that is there.
        let mut file = tempfile::Builder::new().prefix(".identity").tempfile_in(folder).map_err(fail)?;
        file.write_all(&bytes).and_then(|()| file.as_file().sync_all()).map_err(fail)?;
        match file.persist_noclobber(path) {
            Ok(_) => {
                sync_folder(folder);
                Ok(made)
            }
            Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {
                Self::load(path)?.ok_or_else(|| fail(io::ErrorKind::NotFound.into()))
            }
            Err(error) => Err(fail(error.error)),
        }
    }

    /// Moves the key at `path` aside and makes a new one: what a node does that learns that another machine has the same
    /// key. The old file is kept under the name it is moved to.
    ///
    /// # Errors
    /// [`IdentityError`]; then the old key is still in place or moved, never lost.
    pub fn replace(path: &Path) -> Result<(Self, PathBuf), IdentityError> {
        let mut number = 1;
        let aside = loop {
            let candidate = path.with_extension(format!("duplicate-{number}"));
            if !candidate.exists() {
                break candidate;
            }
            number += 1;
        };
        fs::rename(path, &aside).map_err(|source| IdentityError::Io {
            action: "move aside",
            path: path.to_owned(),
            source,
        })?;
        Ok((Self::load_or_create(path)?, aside))
    }

    fn load(path: &Path) -> Result<Option<Self>, IdentityError> {
        let fail = |action, source| IdentityError::Io { action, path: path.to_owned(), source };
        let malformed = |reason: String| IdentityError::Malformed { path: path.to_owned(), reason };
        let facts = match fs::metadata(path) {
            Ok(facts) => facts,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(fail("read", error)),
        };
        if !facts.is_file() || facts.len() > MAX_FILE_BYTES {
            return Err(malformed(format!("{} bytes", facts.len())));
        }
        close_to_others(path, &facts).map_err(|error| fail("close to other users", error))?;
        let bytes = fs::read(path).map_err(|error| fail("read", error))?;
        let keypair =
            Keypair::from_protobuf_encoding(&bytes).map_err(|error| malformed(error.to_string()))?;
        Ok(Some(Self::of(keypair)))
    }

    fn of(keypair: Keypair) -> Self {
        let id = node_id(&keypair.public().to_peer_id());
        Self { keypair, id }
    }

    /// The key pair, for libp2p.
    #[must_use]
    pub fn keypair(&self) -> &Keypair {
        &self.keypair
    }

    /// The node's name: the peer id in base58.
    #[must_use]
    pub fn id(&self) -> &NodeId {
        &self.id
    }

    /// A signature over `bytes` (64 bytes, ed25519). Whoever signs puts the purpose in front of the bytes, so that one
    /// signature never serves for another.
    #[must_use]
    pub fn sign(&self, bytes: &[u8]) -> Vec<u8> {
        // Signing fails for RSA keys only, of which there are none; an empty signature verifies for nobody.
        self.keypair.sign(bytes).unwrap_or_default()
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Whether `signature` over `bytes` was made by the key of `node`. The key is in the id itself.
#[must_use]
pub fn verify(node: &NodeId, bytes: &[u8], signature: &[u8]) -> bool {
    public_key(node).is_some_and(|key| key.verify(bytes, signature))
}

fn public_key(node: &NodeId) -> Option<PublicKey> {
    let peer = peer_id(node)?;
    let hash: &Multihash<64> = peer.as_ref();
    (hash.code() == IDENTITY_HASH).then(|| PublicKey::try_decode_protobuf(hash.digest()).ok()).flatten()
}

/// The node id of a libp2p peer id.
#[must_use]
pub fn node_id(peer: &libp2p::PeerId) -> NodeId {
    match NodeId::try_from(peer.to_base58()) {
        Ok(id) => id,
        // Base58 has letters and digits only, and no multihash of libp2p has more than 100 of them.
        Err(error) => unreachable!("a peer id is always a node id: {error}"),
    }
}

/// The libp2p peer id of a node id, if it is one.
#[must_use]
pub fn peer_id(node: &NodeId) -> Option<libp2p::PeerId> {
    node.as_str().parse().ok()
}

#[cfg(unix)]
fn close_to_others(path: &Path, facts: &fs::Metadata) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mode = facts.permissions().mode();
    if mode & 0o077 != 0 {
        tracing::warn!(path = %path.display(), mode = format!("{:o}", mode & 0o777), "the identity key was open to others; closed it");
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    }
    Ok(())
}

#[cfg(not(unix))]
fn close_to_others(_: &Path, _: &fs::Metadata) -> io::Result<()> {
    Ok(())
}

/// Makes the new name last over a power cut, where the file system can; where it cannot, a new key is made again.
fn sync_folder(folder: &Path) {
    if let Ok(handle) = fs::File::open(folder) {
        let _ = handle.sync_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_made_once_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        let first = Identity::load_or_create(&path).unwrap();
        let again = Identity::load_or_create(&path).unwrap();
        assert_eq!(first.id(), again.id());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[cfg(unix)]
    #[test]
    fn only_the_owner_may_read_it() {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        Identity::load_or_create(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        Identity::load_or_create(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
    }

    #[test]
    fn many_at_once_agree_on_one_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        let ids: Vec<NodeId> = std::thread::scope(|scope| {
            let racers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| Identity::load_or_create(&path).unwrap().id().clone()))
                .collect();
            racers.into_iter().map(|racer| racer.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| id == &ids[0]), "{ids:?}");
    }

    #[test]
    fn a_broken_file_is_named_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        for bytes in [&b""[..], b"not a key", &[0; 10_000]] {
            fs::write(&path, bytes).unwrap();
            let error = Identity::load_or_create(&path).unwrap_err();
            assert!(error.to_string().contains("identity.key"), "{error}");
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
    }

    #[test]
    fn a_replaced_key_is_kept_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        let old = Identity::load_or_create(&path).unwrap();
        let (new, aside) = Identity::replace(&path).unwrap();
        assert_ne!(old.id(), new.id());
        assert_eq!(Identity::load_or_create(&path).unwrap().id(), new.id());
        assert_eq!(Identity::load(&aside).unwrap().unwrap().id(), old.id());
    }

    #[test]
    fn a_signature_is_checked_by_the_id_alone() {
        let (one, other) = (Identity::generate(), Identity::generate());
        let signature = one.sign(b"text");
        assert!(verify(one.id(), b"text", &signature));
        assert!(!verify(one.id(), b"texu", &signature));
        assert!(!verify(other.id(), b"text", &signature));
        assert!(!verify(one.id(), b"text", &[]));
        let no_key = NodeId::try_from("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N".to_owned()).unwrap();
        assert!(!verify(&no_key, b"text", &signature));
    }
}
