//! The scheduler's durable map, in one file of redb.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use shoal_scheduler::consensus::{Change, Store, StoreError};

const TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("scheduler");
/// What is written, and taken back, to find out whether there is room again.
const TRIAL: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("trial");
/// Bytes of it: more than a decision takes, so that what is decided next is not the next to fail.
const TRIAL_BYTES: usize = 64 << 10;
/// How often that is tried.
const TRIAL_EVERY: Duration = Duration::from_secs(1);

/// A [`Store`] on disk. Writes are on disk (fsync) when they return.
///
/// After a write that failed, as on a full disk, redb answers nothing more until its file is opened anew. That is done with the
/// next call, so whoever tries again is served as soon as there is room; [`RaftStore::mend`] tries where nobody else does.
#[derive(Clone)]
pub struct RaftStore(Arc<Inner>);

struct Inner {
    path: PathBuf,
    open: Box<dyn Fn() -> Result<Database, redb::Error> + Send + Sync>,
    /// None after a failure, until the file is opened anew.
    database: Mutex<Option<Arc<Database>>>,
    trouble: Mutex<Option<String>>,
}

impl RaftStore {
    /// Opens the file, or makes it.
    pub fn open(path: &Path) -> Result<Self, redb::Error> {
        let file = path.to_owned();
        Self::with(path, Box::new(move || Ok(Database::create(&file)?)))
    }

    fn with(
        path: &Path,
        open: Box<dyn Fn() -> Result<Database, redb::Error> + Send + Sync>,
    ) -> Result<Self, redb::Error> {
        let (database, trouble) = (Mutex::default(), Mutex::default());
        let store = RaftStore(Arc::new(Inner { path: path.to_owned(), open, database, trouble }));
        let transaction = store.database()?.begin_write()?;
        transaction.open_table(TABLE)?;
        transaction.commit()?;
        Ok(store)
    }

    /// Why the last write failed, with the file; none while all is well.
    pub fn trouble(&self) -> Option<String> {
        lock(&self.0.trouble).clone()
    }

    /// Tries again and again to write as long as something is amiss. A node in trouble gets nothing to do, so that nothing
    /// else would be written that could show that it is over. Runs until it is dropped.
    pub async fn mend(self) {
        loop {
            tokio::time::sleep(TRIAL_EVERY).await;
            if self.trouble().is_some() {
                // How it went is noted.
                let _ = self.attempt().await;
            }
        }
    }

    async fn attempt(&self) -> Result<(), StoreError> {
        let store = self.clone();
        off_thread("try", move || store.note(store.try_now())).await
    }

    fn try_now(&self) -> Result<(), redb::Error> {
        let database = self.database()?;
        let transaction = database.begin_write()?;
        transaction.open_table(TRIAL)?.insert("room", [0; TRIAL_BYTES].as_slice())?;
        transaction.commit()?;
        let transaction = database.begin_write()?;
        transaction.delete_table(TRIAL)?;
        transaction.commit()?;
        Ok(())
    }

    fn database(&self) -> Result<Arc<Database>, redb::Error> {
        let mut database = lock(&self.0.database);
        match &*database {
            Some(open) => Ok(open.clone()),
            None => Ok(database.insert(Arc::new((self.0.open)()?)).clone()),
        }
    }

    /// Notes how a write went; of each change of that the log has one line.
    fn note<T>(&self, done: Result<T, redb::Error>) -> Result<T, redb::Error> {
        let mut trouble = lock(&self.0.trouble);
        match &done {
            Ok(_) => {
                if trouble.take().is_some() {
                    tracing::info!(path = %self.0.path.display(), "the scheduler's state can be written again");
                }
            }
            Err(error) => {
                *lock(&self.0.database) = None;
                let text =
                    format!("cannot write the scheduler's state in {}: {error}", self.0.path.display());
                if trouble.is_none() {
                    tracing::error!(
                        "{text}; until that is mended (is the disk full?) this node takes no part in decisions and gets nothing new"
                    );
                }
                *trouble = Some(text);
            }
        }
        done
    }

    fn scan_now(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, redb::Error> {
        let table = self.database()?.begin_read()?.open_table(TABLE)?;
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
        let transaction = self.database()?.begin_write()?;
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        // A read says nothing of what can be written.
        off_thread("read", move || store.scan_now(&prefix)).await
    }

    async fn write(&self, batch: Vec<Change>) -> Result<(), StoreError> {
        let store = self.clone();
        off_thread("write", move || store.note(store.write_now(batch))).await
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicBool, Ordering};

    use redb::StorageBackend;
    use redb::backends::FileBackend;

    use super::*;

    /// A file on a disk that may be full.
    #[derive(Debug)]
    struct Filled(FileBackend, Arc<AtomicBool>);

    impl Filled {
        fn room(&self) -> io::Result<()> {
            match self.1.load(Ordering::SeqCst) {
                true => Err(io::ErrorKind::StorageFull.into()),
                false => Ok(()),
            }
        }
    }

    impl StorageBackend for Filled {
        fn len(&self) -> io::Result<u64> {
            self.0.len()
        }
        fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.0.read(offset, out)
        }
        fn set_len(&self, len: u64) -> io::Result<()> {
            self.room().and_then(|()| self.0.set_len(len))
        }
        fn sync_data(&self) -> io::Result<()> {
            self.0.sync_data()
        }
        fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
            self.room().and_then(|()| self.0.write(offset, data))
        }
        fn close(&self) -> io::Result<()> {
            self.0.close()
        }
    }

    #[tokio::test]
    async fn a_disk_that_was_full_is_written_again_once_there_is_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("scheduler.redb");
        let full = Arc::new(AtomicBool::new(false));
        let (file, filled) = (path.clone(), full.clone());
        let open = move || {
            let options = std::fs::OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&file)?;
            let backend = FileBackend::new(options)?;
            Ok(Database::builder().create_with_backend(Filled(backend, filled.clone()))?)
        };
        let store = RaftStore::with(&path, Box::new(open)).unwrap();
        let put = |key: &str| vec![Change::Put(key.into(), vec![7; 1000])];
        store.write(put("before")).await.unwrap();
        assert_eq!(store.trouble(), None);
        full.store(true, Ordering::SeqCst);
        for _ in 0..3 {
            store.write(put("lost")).await.unwrap_err();
            let trouble = store.trouble().unwrap();
            assert!(trouble.contains("scheduler.redb"), "{trouble}");
        }
        store.attempt().await.unwrap_err();
        assert!(store.trouble().is_some());
        full.store(false, Ordering::SeqCst);
        // A node in trouble decides nothing, and so writes nothing else: it was in trouble for ever.
        store.attempt().await.unwrap();
        assert_eq!(store.trouble(), None);
        store.write(put("after")).await.unwrap();
        let keys: Vec<String> = store.scan("").await.unwrap().into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys, ["after", "before"]);
    }

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
