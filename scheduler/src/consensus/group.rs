//! One Raft group as this node is in it: founded here, found again on disk, or taken into.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use openraft::error::{Fatal, InstallSnapshotError, RaftError};
use openraft::{CommittedLeaderId, Membership, Raft, RaftMetrics, ServerState, StoredMembership};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, RwLock, watch};
use tokio::time::Instant;

use super::link::Links;
use super::log::Log;
use super::machine::{Machine, Progress, first_snapshot};
use super::network::{Network, RaftAnswer, RaftCall};
use super::raft::{self, LogId, RaftNode, Types};
use super::store::{Change, Store, StoreError, get, put};
use super::{StartError, Timing, lock};
use crate::{GroupId, NodeId, State};

/// Key of the [`Seat`].
const SEAT: &str = "seat";

/// Key of the state from before the node was taken in.
const FORMER: &str = "former";

/// The Raft id of a group's founder.
const FOUNDER: u64 = 1;

/// Largest snapshot that is accepted, in bytes: far beyond any state with [`MAX_MEMBERS`](crate::state::MAX_MEMBERS)
/// and [`MAX_INSTANCES`](crate::state::MAX_INSTANCES).
const MAX_SNAPSHOT_BYTES: u64 = 64 * 1024 * 1024;

/// Which group the node is in, as kept on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Seat {
    group: GroupId,
    raft_id: u64,
    /// The node has missed nothing of what it knew before once it has applied this entry.
    catch_up: u64,
}

impl Seat {
    fn prefix(&self) -> String {
        format!("raft/{}/{}/", self.group, self.raft_id)
    }
}

/// What a group needs of the node.
pub(super) struct Ground {
    pub(super) node: NodeId,
    pub(super) timing: Timing,
    pub(super) network: Arc<dyn Network>,
    pub(super) store: Arc<dyn Store>,
    pub(super) wake: Arc<Notify>,
}

/// The group that the node is in.
pub(super) struct Group {
    pub(super) id: GroupId,
    pub(super) raft_id: u64,
    pub(super) raft: Raft<Types>,
    /// Held shared by each write, and whole by who hands the state to another group: no write is in between.
    pub(super) writes: RwLock<()>,
    progress: watch::Receiver<Progress>,
    catch_up: u64,
    former: Option<State>,
    /// When a leader or, on the leader, a quorum was last heard; the start counts as such.
    contact: Mutex<Instant>,
    /// When the node came into the group, or back to it after a restart.
    pub(super) opened: Instant,
}

impl Group {
    /// Founds a group of one on `state`, whose group id and number say which, and forgets every other.
    pub(super) async fn found(ground: &Ground, mut state: State) -> Result<Self, StartError> {
        (state.last_raft_id, state.last_epoch) = (FOUNDER, 0);
        let seat = Seat { group: state.group, raft_id: FOUNDER, catch_up: 0 };
        let node = RaftNode { node: Some(ground.node.clone()) };
        let nodes = BTreeMap::from([(FOUNDER, node)]);
        let first = LogId::new(CommittedLeaderId::default(), 0);
        let membership = Membership::new(vec![BTreeSet::from([FOUNDER])], nodes);
        let mut batch = vec![Change::DeletePrefix("raft/".to_owned()), Change::Delete(FORMER.to_owned())];
        batch.extend(first_snapshot(
            &seat.prefix(),
            &state,
            first,
            StoredMembership::new(Some(first), membership),
        )?);
        batch.push(put(SEAT, &seat)?);
        ground.store.write(batch).await?;
        let group = Self::open(ground, seat, None).await?;
        // The only voter need not wait for a tick; if this fails the tick does it.
        let _ = group.raft.trigger().elect().await;
        Ok(group)
    }

    /// The group that the store tells of.
    pub(super) async fn find(ground: &Ground) -> Result<Option<Self>, StartError> {
        let Some(seat) = get::<Seat>(&*ground.store, SEAT).await? else {
            return Ok(None);
        };
        let former = get::<State>(&*ground.store, FORMER).await?;
        Self::open(ground, seat, former).await.map(Some)
    }

    /// Becomes a learner of a group with nothing in its log. `former` is what the node knew until now.
    pub(super) async fn join(
        ground: &Ground,
        group: GroupId,
        raft_id: u64,
        catch_up: u64,
        former: State,
    ) -> Result<Self, StartError> {
        let seat = Seat { group, raft_id, catch_up };
        let drop = Change::DeletePrefix("raft/".to_owned());
        ground.store.write(vec![drop, put(SEAT, &seat)?, put(FORMER, &former)?]).await?;
        Self::open(ground, seat, Some(former)).await
    }

    async fn open(ground: &Ground, seat: Seat, former: Option<State>) -> Result<Self, StartError> {
        let prefix = seat.prefix();
        let log = Log::open(ground.store.clone(), &prefix).await?;
        let (machine, progress) = Machine::open(ground.store.clone(), &prefix, ground.wake.clone()).await?;
        let links = Links { network: ground.network.clone(), group: seat.group };
        let config = raft::config(&ground.timing)?;
        let raft = Raft::new(seat.raft_id, config, links, log, machine)
            .await
            .map_err(|e| StartError::Raft(e.to_string()))?;
        Ok(Self {
            id: seat.group,
            raft_id: seat.raft_id,
            raft,
            writes: RwLock::new(()),
            progress,
            catch_up: seat.catch_up,
            former,
            contact: Mutex::new(Instant::now()),
            opened: Instant::now(),
        })
    }

    /// What has been applied so far.
    pub(super) fn progress(&self) -> Progress {
        self.progress.borrow().clone()
    }

    /// Waits until the entry at `index` is applied, at most until `deadline`.
    pub(super) async fn applied(&self, index: u64, deadline: Instant) {
        let mut progress = self.progress.clone();
        let reached = progress.wait_for(|progress| progress.last.is_some_and(|last| last.index >= index));
        // A node that lags has done nothing wrong; its view follows later.
        let _ = tokio::time::timeout_at(deadline, reached).await;
    }

    /// What the node knew before it was taken in, until it has applied as much as the leader had then: so long the group's
    /// state here is one of the past, in which what this node brought along is missing.
    pub(super) fn before(&self) -> Option<&State> {
        let caught_up = self.progress.borrow().last.is_some_and(|last| last.index >= self.catch_up);
        self.former.as_ref().filter(|_| !caught_up)
    }

    /// What the node knows: the group's state, with what it knew before until it has caught up.
    pub(super) fn known(&self) -> State {
        let progress = self.progress();
        match self.before() {
            Some(former) if progress.last.is_none() => former.clone(),
            Some(former) => progress.state.joined_with(former),
            None => (*progress.state).clone(),
        }
    }

    /// Raft's own account of itself.
    pub(super) fn metrics(&self) -> RaftMetrics<u64, RaftNode> {
        self.raft.metrics().borrow().clone()
    }

    /// When a leader or, on the leader, a quorum was last heard.
    pub(super) fn contact(&self) -> Instant {
        *lock(&self.contact)
    }

    /// A leader or a quorum was heard then.
    pub(super) fn heard_at(&self, then: Instant) {
        let mut contact = lock(&self.contact);
        *contact = then.max(*contact);
    }

    /// On the leader: how long ago a quorum last acknowledged it; `None` on every other node.
    pub(super) fn quorum_age(metrics: &RaftMetrics<u64, RaftNode>) -> Option<Duration> {
        let leads = metrics.state == ServerState::Leader && metrics.running_state.is_ok();
        let millis = metrics.millis_since_quorum_ack.filter(|_| leads);
        millis.map(Duration::from_millis)
    }

    /// Answers a call of Raft.
    pub(super) async fn answer(&self, call: RaftCall) -> RaftAnswer {
        match call {
            RaftCall::Append(rpc) => match self.raft.append_entries(rpc).await {
                Ok(answer) => {
                    let refused = matches!(answer, openraft::raft::AppendEntriesResponse::HigherVote(_));
                    if !refused {
                        self.heard_at(Instant::now());
                    }
                    RaftAnswer::Append(answer)
                }
                Err(e) => RaftAnswer::Failed(e.to_string()),
            },
            RaftCall::Vote(rpc) => match self.raft.vote(rpc).await {
                Ok(answer) => RaftAnswer::Vote(answer),
                Err(e) => RaftAnswer::Failed(e.to_string()),
            },
            RaftCall::Snapshot(rpc) => {
                let end = rpc.offset.saturating_add(rpc.data.len() as u64);
                if end > MAX_SNAPSHOT_BYTES {
                    let why = format!("a snapshot may have at most {MAX_SNAPSHOT_BYTES} bytes");
                    return RaftAnswer::Failed(why);
                }
                match self.raft.install_snapshot(rpc).await {
                    Ok(answer) => {
                        self.heard_at(Instant::now());
                        RaftAnswer::Snapshot(answer)
                    }
                    Err(RaftError::APIError(InstallSnapshotError::SnapshotMismatch(mismatch))) => {
                        RaftAnswer::SnapshotMismatch {
                            expect: (mismatch.expect.id, mismatch.expect.offset),
                            got: (mismatch.got.id, mismatch.got.offset),
                        }
                    }
                    Err(e) => RaftAnswer::Failed(e.to_string()),
                }
            }
        }
    }

    /// Stops Raft here. What is on disk stays.
    pub(super) async fn shutdown(&self) {
        if let Err(e) = self.raft.shutdown().await {
            tracing::warn!(group = %self.id, "raft did not stop in order: {e}");
        }
    }
}

impl From<StoreError> for StartError {
    fn from(e: StoreError) -> Self {
        Self::Store(e)
    }
}

impl From<Fatal<u64>> for StartError {
    fn from(e: Fatal<u64>) -> Self {
        Self::Raft(e.to_string())
    }
}
