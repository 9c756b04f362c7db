//! The scheduler's durable map, in one file of redb.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use shoal_scheduler::consensus::{Change, Store, StoreError};

const TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("scheduler");

/// A [`Store`] on disk. Writes are on disk (fsync) when they return.
#[derive(Clone)]
pub struct RaftStore {
    database: Arc<Database>,
}

impl RaftStore {
    /// Opens the file, or makes it.
    pub fn open(path: &Path) -> Result<Self, redb::Error> {
        let database = Database::create(path)?;
        let transaction = database.begin_write()?;
        transaction.open_table(TABLE)?;
        transaction.commit()?;
        Ok(RaftStore { database: Arc::new(database) })
    }

    fn scan_now(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, redb::Error> {
        let table = self.database.begin_read()?.open_table(TABLE)?;
        let mut found = Vec::new();
        for pair in table.range(prefix..)? {
            let (key, value) = pair?;
            if !key.value().starts_with(prefix) {
                break;
            }
            found.push((key.value().to_owned(), value.value().to_vec()));
        }
        Ok(found)
    }

    fn write_now(&self, batch: Vec<Change>) -> Result<(), redb::Error> {
        let transaction = self.database.begin_write()?;
        {
            let mut table = transaction.open_table(TABLE)?;
            for change in batch {
                match change {
                    Change::Put(key, value) => {
                        table.insert(key.as_str(), value.as_slice())?;
                    }
                    Change::Delete(key) => {
                        table.remove(key.as_str())?;
                    }
                    Change::DeletePrefix(prefix) => {
                        let mut keys = Vec::new();
                        for pair in table.range(prefix.as_str()..)? {
                            let key = pair?.0.value().to_owned();
                            if !key.starts_with(&prefix) {
                                break;
                            }
                            keys.push(key);
                        }
                        for key in keys {
                            table.remove(key.as_str())?;
                        }
                    }
                }
            }
        }
        transaction.commit()?;
        Ok(())
    }
}

/// Runs a transaction where waiting for the disk holds up nobody.
async fn off_thread<T: Send + 'static>(
    action: &'static str,
    work: impl FnOnce() -> Result<T, redb::Error> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(StoreError::Io { action, source: Box::new(error) }),
        Err(error) => Err(StoreError::Io { action, source: Box::new(error) }),
    }
}

#[async_trait]
impl Store for RaftStore {
    async fn scan(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        let (store, prefix) = (self.clone(), prefix.to_owned());
        off_thread("read", move || store.scan_now(&prefix)).await
    }

    async fn write(&self, batch: Vec<Change>) -> Result<(), StoreError> {
        let store = self.clone();
        off_thread("write", move || store.write_now(batch)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn pairs_survive_a_restart_and_prefixes_are_exact() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("scheduler.redb");
        let put = |key: &str, value: u8| Change::Put(key.into(), vec![value]);
        {
            let store = RaftStore::open(&path).unwrap();
            let batch = vec![put("raft/1/a", 1), put("raft/1/b", 2), put("raft/10", 3), put("seat", 4)];
            store.write(batch).await.unwrap();
            let batch = vec![Change::Delete("raft/1/a".into()), Change::DeletePrefix("raft/10".into())];
            store.write(batch).await.unwrap();
        }
        let store = RaftStore::open(&path).unwrap();
        let all = store.scan("").await.unwrap();
        assert_eq!(all, [("raft/1/b".to_owned(), vec![2]), ("seat".to_owned(), vec![4])]);
        assert_eq!(store.scan("raft/").await.unwrap().len(), 1);
        assert!(store.scan("raft/2").await.unwrap().is_empty());
    }
}
