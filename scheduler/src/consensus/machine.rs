//! Raft's state machine: applies committed commands to the [`State`]. On disk are its snapshots; after a restart openraft
//! applies the entries from the last snapshot to the last one known to be committed.

use std::io::Cursor;
use std::sync::Arc;

use openraft::storage::RaftStateMachine;
use openraft::{
    AnyError, Entry, EntryPayload, OptionalSend, RaftSnapshotBuilder, Snapshot, SnapshotMeta, StorageError,
    StorageIOError, StoredMembership,
};
use tokio::sync::{Mutex, Notify, watch};

use super::raft::{LogId, RaftNode, Types};
use super::store::{Change, Store, StoreError, parse, put};
use crate::state::At;
use crate::{Outcome, State};

/// What has been applied so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress {
    pub(super) state: Arc<State>,
    pub(super) last: Option<LogId>,
}

/// The state machine of one seat.
pub(super) struct Machine {
    state: State,
    last: Option<LogId>,
    membership: StoredMembership<u64, RaftNode>,
    snapshots: Snapshots,
    progress: watch::Sender<Progress>,
    /// Woken after each change, so that the view follows at once.
    wake: Arc<Notify>,
}

/// The last snapshot, in memory and on disk. Clones share it.
#[derive(Clone)]
struct Snapshots {
    store: Arc<dyn Store>,
    prefix: String,
    last: Arc<Mutex<Option<Kept>>>,
}

#[derive(Clone)]
struct Kept {
    meta: SnapshotMeta<u64, RaftNode>,
    data: Vec<u8>,
}

/// Builds a snapshot of the state as it was when the builder was made.
pub(super) struct Builder {
    state: State,
    last: Option<LogId>,
    membership: StoredMembership<u64, RaftNode>,
    snapshots: Snapshots,
}

/// The changes that put down `state` as the snapshot of a new group under `prefix`, in which `membership` stands and
/// `last` is the last entry.
pub(super) fn first_snapshot(
    prefix: &str,
    state: &State,
    last: LogId,
    membership: StoredMembership<u64, RaftNode>,
) -> Result<Vec<Change>, StoreError> {
    let meta =
        SnapshotMeta { last_log_id: Some(last), last_membership: membership, snapshot_id: id_of(Some(last)) };
    Ok(vec![put(format!("{prefix}snapshot/meta"), &meta)?, put(format!("{prefix}snapshot/data"), state)?])
}

fn id_of(last: Option<LogId>) -> String {
    last.map_or_else(|| "none".to_owned(), |last| format!("{}-{}", last.leader_id, last.index))
}

impl Machine {
    /// Reads the last snapshot under `prefix`. The receiver follows what is applied.
    pub(super) async fn open(
        store: Arc<dyn Store>,
        prefix: &str,
        wake: Arc<Notify>,
    ) -> Result<(Self, watch::Receiver<Progress>), StoreError> {
        let (mut meta, mut data) = (None, None);
        for (key, bytes) in store.scan(&format!("{prefix}snapshot/")).await? {
            if key.ends_with("/meta") {
                meta = Some(parse::<SnapshotMeta<u64, RaftNode>>(&key, &bytes)?);
            } else {
                data = Some((key, bytes));
            }
        }
        let kept = match (meta, data) {
            (Some(meta), Some((key, data))) => Some((parse::<State>(&key, &data)?, Kept { meta, data })),
            _ => None,
        };
        let (state, kept) = kept.map_or((State::default(), None), |(state, kept)| (state, Some(kept)));
        let meta = kept.as_ref().map(|kept| kept.meta.clone()).unwrap_or_default();
        let (progress, receiver) =
            watch::channel(Progress { state: Arc::new(state.clone()), last: meta.last_log_id });
        let last = Arc::new(Mutex::new(kept));
        let snapshots = Snapshots { store, prefix: prefix.to_owned(), last };
        let (last, membership) = (meta.last_log_id, meta.last_membership);
        Ok((Self { state, last, membership, snapshots, progress, wake }, receiver))
    }

    fn publish(&self) {
        self.progress.send_replace(Progress { state: Arc::new(self.state.clone()), last: self.last });
        self.wake.notify_one();
    }
}

impl RaftStateMachine<Types> for Machine {
    type SnapshotBuilder = Builder;

    async fn applied_state(
        &mut self,
    ) -> Result<(Option<LogId>, StoredMembership<u64, RaftNode>), StorageError<u64>> {
        Ok((self.last, self.membership.clone()))
    }

    async fn apply<I>(&mut self, entries: I) -> Result<Vec<Outcome>, StorageError<u64>>
    where
        I: IntoIterator<Item = Entry<Types>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut outcomes = Vec::new();
        for entry in entries {
            self.last = Some(entry.log_id);
            outcomes.push(match entry.payload {
                EntryPayload::Blank => Outcome::Unchanged,
                EntryPayload::Normal(proposal) => {
                    let at = At { index: entry.log_id.index, unix_ms: proposal.unix_ms };
                    self.state.apply(&proposal.command, at)
                }
                EntryPayload::Membership(membership) => {
                    self.membership = StoredMembership::new(Some(entry.log_id), membership);
                    Outcome::Changed
                }
            });
        }
        self.publish();
        Ok(outcomes)
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        Builder {
            state: self.state.clone(),
            last: self.last,
            membership: self.membership.clone(),
            snapshots: self.snapshots.clone(),
        }
    }

    async fn begin_receiving_snapshot(&mut self) -> Result<Box<Cursor<Vec<u8>>>, StorageError<u64>> {
        Ok(Box::default())
    }

    async fn install_snapshot(
        &mut self,
        meta: &SnapshotMeta<u64, RaftNode>,
        snapshot: Box<Cursor<Vec<u8>>>,
    ) -> Result<(), StorageError<u64>> {
        let data = snapshot.into_inner();
        let state = serde_json::from_slice::<State>(&data)
            .map_err(|e| StorageIOError::read_snapshot(Some(meta.signature()), AnyError::new(&e)))?;
        self.snapshots.keep(Kept { meta: meta.clone(), data }).await?;
        self.state = state;
        self.last = meta.last_log_id;
        self.membership = meta.last_membership.clone();
        self.publish();
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot<Types>>, StorageError<u64>> {
        Ok(self.snapshots.last.lock().await.clone().map(Kept::into_snapshot))
    }
}

impl RaftSnapshotBuilder<Types> for Builder {
    async fn build_snapshot(&mut self) -> Result<Snapshot<Types>, StorageError<u64>> {
        let data = serde_json::to_vec(&self.state)
            .map_err(|e| StorageIOError::read_state_machine(AnyError::new(&e)))?;
        let meta = SnapshotMeta {
            last_log_id: self.last,
            last_membership: self.membership.clone(),
            snapshot_id: id_of(self.last),
        };
        let kept = Kept { meta, data };
        self.snapshots.keep(kept.clone()).await?;
        Ok(kept.into_snapshot())
    }
}

impl Snapshots {
    async fn keep(&self, kept: Kept) -> Result<(), StorageError<u64>> {
        let failed =
            |e: &StoreError| StorageIOError::write_snapshot(Some(kept.meta.signature()), AnyError::new(e));
        let mut last = self.last.lock().await;
        // A build that was overtaken by a later snapshot must not bring the older one back.
        if last.as_ref().is_none_or(|last| last.meta.last_log_id <= kept.meta.last_log_id) {
            let meta = put(format!("{}snapshot/meta", self.prefix), &kept.meta).map_err(|e| failed(&e))?;
            let data = Change::Put(format!("{}snapshot/data", self.prefix), kept.data.clone());
            self.store.write(vec![meta, data]).await.map_err(|e| failed(&e))?;
            *last = Some(kept);
        }
        Ok(())
    }
}

impl Kept {
    fn into_snapshot(self) -> Snapshot<Types> {
        Snapshot { meta: self.meta, snapshot: Box::new(Cursor::new(self.data)) }
    }
}
