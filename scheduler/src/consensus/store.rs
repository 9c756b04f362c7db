//! What a node keeps on disk: a small ordered map of keys to bytes, changed in atomic batches.
//!
//! | key | value |
//! |---|---|
//! | `fence` | the highest command token that the node has obeyed |
//! | `seat` | which group it is in and under which Raft id |
//! | `former` | the state it had before it was taken in, until the new group's has arrived |
//! | `raft/<group>/<raft id>/...` | vote, log and snapshot of that seat |
//!
//! Changing the group is one batch: the new seat in, everything under `raft/` out. The fence stays.

use std::collections::BTreeMap;
use std::sync::Mutex;

use async_trait::async_trait;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::lock;

/// A durable, ordered map. Keys are ASCII text.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Every pair whose key begins with `prefix`, in the order of the keys.
    async fn scan(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, StoreError>;

    /// Carries out the changes in their order, all or none; they are on disk when this returns.
    async fn write(&self, batch: Vec<Change>) -> Result<(), StoreError>;
}

/// One change of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Set a key.
    Put(String, Vec<u8>),
    /// Remove a key; nothing happens if it is not there.
    Delete(String),
    /// Remove every key that begins with this.
    DeletePrefix(String),
}

/// The store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Reading or writing failed.
    #[error("cannot {action} the store of the scheduler")]
    Io {
        /// What was attempted: `read` or `write`.
        action: &'static str,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A value is not what was once written there.
    #[error("the store of the scheduler is damaged at {key:?}")]
    Damaged {
        /// The key.
        key: String,
        /// What does not read.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// A store that is gone with the process, for tests and for nodes that shall forget.
#[derive(Debug, Default)]
pub struct MemoryStore {
    map: Mutex<BTreeMap<String, Vec<u8>>>,
}

#[async_trait]
impl Store for MemoryStore {
    async fn scan(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        let map = lock(&self.map);
        let from = map.range(prefix.to_owned()..).take_while(|(key, _)| key.starts_with(prefix));
        Ok(from.map(|(key, value)| (key.clone(), value.clone())).collect())
    }

    async fn write(&self, batch: Vec<Change>) -> Result<(), StoreError> {
        let mut map = lock(&self.map);
        for change in batch {
            match change {
                Change::Put(key, value) => {
                    map.insert(key, value);
                }
                Change::Delete(key) => {
                    map.remove(&key);
                }
                Change::DeletePrefix(prefix) => map.retain(|key, _| !key.starts_with(&prefix)),
            }
        }
        Ok(())
    }
}

/// A [`Change::Put`] of a value as JSON.
pub(super) fn put<T: Serialize>(key: impl Into<String>, value: &T) -> Result<Change, StoreError> {
    let key = key.into();
    match serde_json::to_vec(value) {
        Ok(bytes) => Ok(Change::Put(key, bytes)),
        Err(e) => Err(StoreError::Damaged { key, source: Box::new(e) }),
    }
}

/// Reads a value written by [`put`].
pub(super) fn parse<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T, StoreError> {
    let damaged = |e| StoreError::Damaged { key: key.to_owned(), source: Box::new(e) };
    serde_json::from_slice(bytes).map_err(damaged)
}

/// The value of one key.
pub(super) async fn get<T: DeserializeOwned>(store: &dyn Store, key: &str) -> Result<Option<T>, StoreError> {
    let pairs = store.scan(key).await?;
    let pair = pairs.iter().find(|(found, _)| found == key);
    pair.map(|(_, bytes)| parse(key, bytes)).transpose()
}
