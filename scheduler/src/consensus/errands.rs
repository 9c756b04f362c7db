//! What takes several messages: handing the group's state to a greater group, and a leader's care for its own: who is
//! taken in, who votes, who is told to come again.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::join_all;
use openraft::ChangeMembers;
use openraft::error::{ClientWriteError, RaftError};
use tokio::time::{Instant, timeout};

use super::core::{Core, Peer, Standing};
use super::group::Group;
use super::lock;
use super::network::{Beat, Message, Yield};
use super::raft::RaftNode;
use super::rules::{self, Candidate};
use crate::{Command, NodeId, Outcome, State, state};

/// A learner that lags by more entries may not vote yet.
const READY_LAG: u64 = 32;

/// How long a message to a node that should go elsewhere may take. It hears soon enough if the message is lost.
const NOTICE: Duration = Duration::from_millis(500);

/// Says that a `Yield` is out for as long as it lives.
struct YieldOut<'a>(&'a Core);

impl<'a> YieldOut<'a> {
    /// `None` if one is out already.
    fn begin(core: &'a Core) -> Option<Self> {
        let was_out = core.yielding.swap(true, Ordering::SeqCst);
        (!was_out).then(|| Self(core))
    }
}

impl Drop for YieldOut<'_> {
    fn drop(&mut self) {
        self.0.yielding.store(false, Ordering::SeqCst);
    }
}

impl Core {
    /// Offers the group's state to the leader of a greater group, and leaves the own one on `Yes`. A node without a leader
    /// (`stranded`) yields for itself alone. Returns whether it has left.
    pub(super) async fn yield_to(&self, to: &NodeId, group: &Arc<Group>, stranded: bool) -> bool {
        let Some(_out) = YieldOut::begin(self) else {
            return false;
        };
        // A leader's group writes nothing from here until the answer. A node that is stranded can write nothing anyway, and
        // its writes may hang until their deadlines.
        let writes = async { if stranded { None } else { Some(group.writes.write().await) } };
        let Ok(_whole) = timeout(self.config.timing.attempt, writes).await else {
            return false;
        };
        let standing = self.standing(group);
        let state = if stranded { group.known() } else { (*group.progress().state).clone() };
        let fresh = self.fresh(&state);
        let size = if stranded { 0 } else { self.weight(group, &standing, &state).0 };
        let offer = Yield {
            size,
            number: state.number,
            group: group.id,
            obeyed: self.highest_obeyed(group.id, &state).number,
            alive: fresh.into_keys().chain([self.me().clone()]).collect(),
            state: Box::new(State { unplaced: BTreeMap::new(), ..state }),
        };
        // Longer than the other side may take to commit, so that its Yes is not missed.
        let deadline = self.config.timing.attempt + NOTICE;
        let call = self.ground.network.call(to, Message::Yield(offer), deadline);
        if !matches!(timeout(deadline, call).await, Ok(Ok(Message::Yes))) {
            return false;
        }
        tracing::info!(%to, group = %group.id, "the group has yielded");
        if standing.leads {
            let others = standing.nodes().map(|(_, node)| node).filter(|node| *node != self.me());
            let moved = others.map(|node| self.notify(node, Message::Moved { group: group.id }));
            join_all(moved).await;
        }
        self.leave(group).await;
        true
    }

    async fn notify(&self, node: &NodeId, message: Message) {
        // Whoever misses it finds out by the beats.
        let _ = timeout(NOTICE, self.ground.network.call(node, message, NOTICE)).await;
    }

    /// One round of a leader's care for its group. Ends early when something fails; the next round begins from what is
    /// then.
    pub(super) async fn tend(&self, group: &Arc<Group>) {
        if let Err(e) = self.try_tend(group).await {
            tracing::debug!(group = %group.id, "left off tending the group: {e}");
        }
    }

    async fn try_tend(&self, group: &Arc<Group>) -> Result<(), TendError> {
        let (standing, state) = (self.standing(group), group.progress().state);
        if !standing.leads {
            return Ok(());
        }
        self.keep_member(&state, self.me(), &self.config.name).await?;
        for (node, peer) in self.in_sight() {
            let Beat { raft_id, group: its_group, .. } = peer.beat;
            if raft_id != 0 && its_group == group.id && standing.node(raft_id) != Some(&node) {
                self.notify(&node, Message::Outcast { group: group.id, raft_id }).await;
            }
        }
        let fresh = self.fresh(&state);
        for (node, peer) in &fresh {
            let raft_id = peer.beat.raft_id;
            if raft_id == 0 && self.may_ask(node) {
                self.take_in(group, &state, node, &peer.beat.name).await?;
            } else if raft_id != 0 && peer.beat.group == group.id && standing.node(raft_id) == Some(node) {
                self.keep_member(&state, node, &peer.beat.name).await?;
            }
        }
        let obeyed = self.highest_obeyed_in(group, &fresh);
        if obeyed.0 >= state.number && obeyed.1 {
            self.lead(Command::RaiseAbove { number: obeyed.0 }).await?;
        }
        self.tend_votes(group, &state, &fresh).await
    }

    /// The highest number of a token that a node of this group has obeyed from another, and whether there is one.
    fn highest_obeyed_in(&self, group: &Group, fresh: &BTreeMap<NodeId, Peer>) -> (u64, bool) {
        let ours = fresh.values().filter(|peer| peer.beat.group == group.id).map(|peer| peer.beat.obeyed);
        let others = ours
            .chain([self.beat().obeyed])
            .filter(|token| token.group != group.id && token.group != crate::GroupId::default());
        others.map(|token| (token.number, true)).max().unwrap_or_default()
    }

    /// Whether a node may be asked to be a learner; not again within the time that its last beat counts.
    fn may_ask(&self, node: &NodeId) -> bool {
        let now = Instant::now();
        let mut asked = lock(&self.asked);
        asked.retain(|_, then| now - *then < self.config.timing.fresh);
        let may = !asked.contains_key(node);
        if may {
            asked.insert(node.clone(), now);
        }
        may
    }

    async fn keep_member(&self, state: &State, node: &NodeId, name: &str) -> Result<(), TendError> {
        let name = state::cut(name);
        let named = state.members.get(node).is_some_and(|member| member.name == name);
        if named || state.removed.contains_key(node) {
            return Ok(());
        }
        let command = Command::AddMember { node: node.clone(), name };
        match self.lead(command).await {
            // A list that is full, say: the node works, it is only not kept.
            Err(TendError::Propose(super::ProposeError::Refused(e))) => {
                tracing::warn!(%node, "cannot add the node to the members: {e}");
                Ok(())
            }
            other => other.map(drop),
        }
    }

    /// Makes a node that waits a learner of this group, under a new id.
    async fn take_in(
        &self,
        group: &Arc<Group>,
        state: &State,
        node: &NodeId,
        name: &str,
    ) -> Result<(), TendError> {
        let Outcome::RaftId(raft_id) = self.lead(Command::GiveRaftId).await? else {
            return Err(TendError::Answer);
        };
        let applied = group.progress().last.map_or(0, |last| last.index);
        let take = Message::Take { group: group.id, raft_id, applied };
        let deadline = self.config.timing.attempt;
        let call = self.ground.network.call(node, take, deadline);
        if !matches!(timeout(deadline, call).await, Ok(Ok(Message::Taken))) {
            // It is elsewhere by now; its next beat tells where.
            return Ok(());
        }
        let learner = BTreeMap::from([(raft_id, RaftNode { node: Some(node.clone()) })]);
        self.change(group, ChangeMembers::AddNodes(learner)).await?;
        tracing::info!(%node, raft_id, group = %group.id, "took the node in");
        self.keep_member(state, node, name).await
    }

    /// Changes who votes, and drops the ids that nobody sits at any more.
    async fn tend_votes(
        &self,
        group: &Arc<Group>,
        state: &State,
        fresh: &BTreeMap<NodeId, Peer>,
    ) -> Result<(), TendError> {
        let standing = self.standing(group);
        let candidates = self.candidates(group, &standing, state, fresh);
        let votes: BTreeSet<u64> = standing.metrics.membership_config.voter_ids().collect();
        let wanted = rules::voters(&candidates);
        let joint = standing.metrics.membership_config.membership().get_joint_config().len() > 1;
        if !wanted.is_empty() && (joint || wanted != votes) {
            tracing::info!(group = %group.id, ?votes, ?wanted, "changing who votes");
            self.change(group, ChangeMembers::ReplaceAllVoters(wanted.clone())).await?;
        }
        let dropped = candidates.iter().filter(|c| !c.belongs && !wanted.contains(&c.raft_id) && !c.leads);
        let dropped: BTreeSet<u64> = dropped.map(|c| c.raft_id).collect();
        if !dropped.is_empty() {
            self.change(group, ChangeMembers::RemoveNodes(dropped)).await?;
        }
        Ok(())
    }

    fn candidates(
        &self,
        group: &Group,
        standing: &Standing,
        state: &State,
        fresh: &BTreeMap<NodeId, Peer>,
    ) -> Vec<Candidate> {
        let votes: BTreeSet<u64> = standing.metrics.membership_config.voter_ids().collect();
        let last = standing.metrics.last_log_index.unwrap_or(0);
        let replication = standing.metrics.replication.clone().unwrap_or_default();
        let mut latest = BTreeMap::new();
        for (raft_id, node) in standing.nodes() {
            let id = latest.entry(node).or_insert(raft_id);
            *id = raft_id.max(*id);
        }
        let candidate = |(raft_id, node): (u64, &NodeId)| {
            let leads = raft_id == group.raft_id;
            let matched = replication.get(&raft_id).copied().flatten().map_or(0, |log_id| log_id.index);
            let sits = fresh.get(node).is_some_and(|peer| peer.sits(group.id, raft_id));
            Candidate {
                raft_id,
                node: node.clone(),
                leads,
                votes: votes.contains(&raft_id),
                ready: leads || (sits && matched + READY_LAG >= last),
                lost: !leads && self.is_lost(group, raft_id, node),
                belongs: latest.get(node) == Some(&raft_id) && !state.removed.contains_key(node),
            }
        };
        standing.nodes().map(candidate).collect()
    }

    /// Whether the node has not been heard at this id for so long that it loses its vote.
    fn is_lost(&self, group: &Group, raft_id: u64, node: &NodeId) -> bool {
        let since = match self.peer(node) {
            // Ids are never used again: who sits elsewhere does not come back to this one.
            Some(peer) if !peer.sits(group.id, raft_id) => return true,
            Some(peer) => peer.heard.max(group.opened),
            None => group.opened,
        };
        Instant::now() - since > self.config.timing.lose_vote
    }

    async fn lead(&self, command: Command) -> Result<Outcome, TendError> {
        let deadline = Instant::now() + self.config.timing.attempt;
        Ok(self.propose_here(command, deadline).await?.outcome)
    }

    async fn change(&self, group: &Group, change: ChangeMembers<u64, RaftNode>) -> Result<(), TendError> {
        self.within(group.raft.change_membership(change, true)).await
    }

    async fn within<T>(
        &self,
        change: impl Future<Output = Result<T, RaftError<u64, ClientWriteError<u64, RaftNode>>>>,
    ) -> Result<(), TendError> {
        match timeout(self.config.timing.attempt, change).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(e)) => Err(TendError::Change(e.to_string())),
            Err(_) => Err(TendError::Change("no quorum has acknowledged it in time".to_owned())),
        }
    }
}

/// Why a round of tending ended early.
#[derive(Debug, thiserror::Error)]
enum TendError {
    #[error(transparent)]
    Propose(#[from] super::ProposeError),
    #[error("the membership did not change: {0}")]
    Change(String),
    #[error("a command had an outcome of another kind")]
    Answer,
}
