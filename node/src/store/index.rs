//! `index.json`: the names that the user gave, and which files were checked when.
//!
//! It is shared by all nodes of a user: each change is made under a lock, on what is in the file then, and replaces it
//! whole. It only remembers; losing it costs names of added models and another check of each file.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::StoreError;

const FILE: &str = "index.json";
const LOCK: &str = "index.lock";
const SCHEMA: &str = "shoal.index/0";
/// An index is never longer; a longer one is not read.
const MAX_BYTES: u64 = 16 << 20;

/// What is remembered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Index {
    schema: String,
    /// The models that were added by the user, by name.
    #[serde(default)]
    pub models: BTreeMap<String, AddedModel>,
    /// The state in which each file was when its digest was found right.
    #[serde(default)]
    pub checked: BTreeMap<PathBuf, Checked>,
}

/// A model that the user added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AddedModel {
    /// SHA-256 of the file, lower-case hexadecimal.
    pub digest: String,
    /// Size of the file.
    pub bytes: u64,
    /// Where it is read in place; none: from `blobs/`.
    #[serde(default)]
    pub path: Option<PathBuf>,
    /// Where it came from.
    pub origin: String,
    /// Its layers.
    pub layers: Option<u32>,
    /// Its longest context in tokens.
    pub max_context: Option<u32>,
}

/// A file's digest and the marks by which a later change of it shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Checked {
    pub digest: String,
    bytes: u64,
    inode: u64,
    modified_ns: i128,
    changed_ns: i128,
}

impl Checked {
    pub(super) fn of(digest: &str, meta: &fs::Metadata) -> Self {
        let ns = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        Checked {
            digest: digest.to_owned(),
            bytes: meta.len(),
            inode: meta.ino(),
            modified_ns: ns(meta.mtime(), meta.mtime_nsec()),
            changed_ns: ns(meta.ctime(), meta.ctime_nsec()),
        }
    }
}

impl Default for Index {
    fn default() -> Self {
        Index { schema: SCHEMA.to_owned(), models: BTreeMap::new(), checked: BTreeMap::new() }
    }
}

impl Index {
    /// What `index.json` in `root` says; nothing if it is not there, or is no index of ours.
    pub(super) fn read(root: &Path) -> Result<Index, StoreError> {
        let path = root.join(FILE);
        match fs::metadata(&path) {
            Ok(meta) if meta.len() > MAX_BYTES => {
                tracing::warn!(path = %path.display(), "the model index is too long and is not read");
                return Ok(Index::default());
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Index::default()),
            Err(error) => return Err(StoreError::io("read", &path)(error)),
        }
        let bytes = fs::read(&path).map_err(StoreError::io("read", &path))?;
        match serde_json::from_slice::<Index>(&bytes) {
            Ok(index) if index.schema == SCHEMA => Ok(index),
            Ok(_) | Err(_) => {
                tracing::warn!(path = %path.display(), "the model index is not readable and is started anew");
                Ok(Index::default())
            }
        }
    }

    /// Changes the index under its lock. The folder must be there.
    pub(super) fn change(root: &Path, change: impl FnOnce(&mut Index)) -> Result<(), StoreError> {
        let lock = File::options().create(true).truncate(false).write(true).open(root.join(LOCK));
        let lock = lock.map_err(StoreError::write("write to", root))?;
        lock.lock().map_err(StoreError::io("lock", &root.join(LOCK)))?;
        let before = Index::read(root)?;
        let mut index = before.clone();
        change(&mut index);
        index.checked.retain(|path, _| path.exists());
        if index == before {
            return Ok(());
        }
        let write = || -> io::Result<()> {
            let mut file = tempfile::Builder::new().prefix(".index").tempfile_in(root)?;
            file.write_all(&serde_json::to_vec_pretty(&index)?)?;
            file.persist(root.join(FILE)).map_err(|error| error.error)?;
            Ok(())
        };
        write().map_err(StoreError::write("write to", root))
    }
}
