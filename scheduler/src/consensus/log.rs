//! Raft's log and vote: kept on disk, read from memory (a log holds some hundred entries between snapshots).

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex};

use openraft::storage::{LogFlushed, RaftLogStorage};
use openraft::{AnyError, Entry, LogState, OptionalSend, RaftLogReader, StorageError, StorageIOError, Vote};

use super::lock;
use super::raft::{LogId, Types};
use super::store::{Change, Store, StoreError, parse, put};

/// Most bytes of entries in one call, as JSON (bincode is shorter): half of the mailbox's frame of 1 MiB.
const MAX_CALL_BYTES: usize = 512 * 1024;

/// The log of one seat. Clones share it.
#[derive(Clone)]
pub(super) struct Log {
    store: Arc<dyn Store>,
    prefix: String,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Default)]
struct Kept {
    /// Entry and its length as JSON, by index.
    entries: BTreeMap<u64, (Entry<Types>, usize)>,
    vote: Option<Vote<u64>>,
    committed: Option<LogId>,
    purged: Option<LogId>,
}

impl Log {
    /// Reads the log under `prefix`.
    pub(super) async fn open(store: Arc<dyn Store>, prefix: &str) -> Result<Self, StoreError> {
        let mut kept = Kept::default();
        for (key, bytes) in store.scan(prefix).await? {
            match key.strip_prefix(prefix).unwrap_or_default() {
                "vote" => kept.vote = parse(&key, &bytes)?,
                "committed" => kept.committed = parse(&key, &bytes)?,
                "purged" => kept.purged = parse(&key, &bytes)?,
                rest if rest.starts_with("log/") => {
                    let entry: Entry<Types> = parse(&key, &bytes)?;
                    kept.entries.insert(entry.log_id.index, (entry, bytes.len()));
                }
                _ => {}
            }
        }
        Ok(Self { store, prefix: prefix.to_owned(), kept: Arc::new(Mutex::new(kept)) })
    }

    fn entry_key(&self, index: u64) -> String {
        format!("{}log/{index:020}", self.prefix)
    }

    async fn keep<T: serde::Serialize>(&self, name: &str, value: &T) -> Result<(), StoreError> {
        self.store.write(vec![put(format!("{}{name}", self.prefix), value)?]).await
    }
}

fn write_logs(e: StoreError) -> StorageError<u64> {
    StorageIOError::write_logs(AnyError::new(&e)).into()
}

impl RaftLogReader<Types> for Log {
    async fn try_get_log_entries<R: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: R,
    ) -> Result<Vec<Entry<Types>>, StorageError<u64>> {
        Ok(lock(&self.kept).entries.range(range).map(|(_, (entry, _))| entry.clone()).collect())
    }

    async fn limited_get_log_entries(
        &mut self,
        start: u64,
        end: u64,
    ) -> Result<Vec<Entry<Types>>, StorageError<u64>> {
        let kept = lock(&self.kept);
        let mut sum = 0;
        let mut fits = |bytes: usize| {
            let first = sum == 0;
            sum += bytes;
            first || sum <= MAX_CALL_BYTES
        };
        let within = kept.entries.range(start..end).map(|(_, kept)| kept);
        Ok(within.take_while(|(_, bytes)| fits(*bytes)).map(|(entry, _)| entry.clone()).collect())
    }
}

impl RaftLogStorage<Types> for Log {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<Types>, StorageError<u64>> {
        let kept = lock(&self.kept);
        let last = kept.entries.last_key_value().map(|(_, (entry, _))| entry.log_id);
        Ok(LogState { last_purged_log_id: kept.purged, last_log_id: last.or(kept.purged) })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote<u64>) -> Result<(), StorageError<u64>> {
        let saved = self.keep("vote", vote).await;
        saved.map_err(|e| StorageError::from(StorageIOError::write_vote(AnyError::new(&e))))?;
        lock(&self.kept).vote = Some(*vote);
        Ok(())
    }

    async fn read_vote(&mut self) -> Result<Option<Vote<u64>>, StorageError<u64>> {
        Ok(lock(&self.kept).vote)
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), StorageError<u64>> {
        self.keep("committed", &committed).await.map_err(write_logs)?;
        lock(&self.kept).committed = committed;
        Ok(())
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, StorageError<u64>> {
        Ok(lock(&self.kept).committed)
    }

    async fn append<I>(&mut self, entries: I, callback: LogFlushed<Types>) -> Result<(), StorageError<u64>>
    where
        I: IntoIterator<Item = Entry<Types>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut batch = Vec::new();
        let mut added = Vec::new();
        for entry in entries {
            let change = put(self.entry_key(entry.log_id.index), &entry).map_err(write_logs)?;
            let bytes = if let Change::Put(_, bytes) = &change { bytes.len() } else { 0 };
            added.push((entry.log_id.index, (entry, bytes)));
            batch.push(change);
        }
        let written = self.store.write(batch).await;
        if written.is_ok() {
            lock(&self.kept).entries.extend(added);
        }
        callback.log_io_completed(written.map_err(std::io::Error::other));
        Ok(())
    }

    async fn truncate(&mut self, log_id: LogId) -> Result<(), StorageError<u64>> {
        let gone: Vec<u64> =
            lock(&self.kept).entries.range(log_id.index..).map(|(index, _)| *index).collect();
        let batch = gone.iter().map(|index| Change::Delete(self.entry_key(*index))).collect();
        self.store.write(batch).await.map_err(write_logs)?;
        lock(&self.kept).entries.split_off(&log_id.index);
        Ok(())
    }

    async fn purge(&mut self, log_id: LogId) -> Result<(), StorageError<u64>> {
        let gone: Vec<u64> =
            lock(&self.kept).entries.range(..=log_id.index).map(|(index, _)| *index).collect();
        let mut batch = vec![put(format!("{}purged", self.prefix), &Some(log_id)).map_err(write_logs)?];
        batch.extend(gone.iter().map(|index| Change::Delete(self.entry_key(*index))));
        self.store.write(batch).await.map_err(write_logs)?;
        let mut kept = lock(&self.kept);
        kept.entries = kept.entries.split_off(&log_id.index.saturating_add(1));
        kept.purged = Some(log_id);
        Ok(())
    }
}
