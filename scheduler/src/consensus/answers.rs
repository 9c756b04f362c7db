//! Answers to the messages of other nodes.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::ProposeError;
use super::core::{Core, chain};
use super::group::Group;
use super::moves::Place;
use super::network::{Message, RaftCall, Yield};
use crate::{Absorb, Command, GroupId, NodeId};

impl Core {
    pub(super) async fn receive(&self, from: &NodeId, message: Message) -> Message {
        match message {
            Message::Raft { group, to, call } => self.answer_raft(group, to, call).await,
            Message::Propose { command, deadline_ms } => {
                let longest = self.config.timing.propose;
                let deadline = Instant::now() + Duration::from_millis(deadline_ms).min(longest);
                // What only a leader may propose it proposes itself.
                let internal =
                    matches!(command, Command::Absorb(_) | Command::GiveRaftId | Command::RaiseAbove { .. });
                let proposed = if internal {
                    Err(ProposeError::NotLeader)
                } else {
                    self.propose_here(command, deadline).await
                };
                Message::Proposed(proposed)
            }
            Message::Yield(offer) => self.answer_yield(from, offer).await,
            Message::Take { group, raft_id, applied } => match self.take(group, raft_id, applied).await {
                Ok(true) => Message::Taken,
                Ok(false) => Message::No,
                Err(e) => {
                    tracing::error!("cannot join group {group}: {}", chain(&e));
                    Message::No
                }
            },
            Message::Moved { group } => {
                self.leave_if(|now| now.id == group && self.leads_here(from, now)).await;
                Message::Done
            }
            Message::Outcast { group, raft_id } => {
                self.leave_if(|now| now.id == group && now.raft_id == raft_id).await;
                Message::Done
            }
            Message::RaftAnswer(_)
            | Message::NotHere
            | Message::Proposed(_)
            | Message::Yes
            | Message::No
            | Message::Taken
            | Message::Done => Message::No,
        }
    }

    async fn answer_raft(&self, group: GroupId, to: u64, call: RaftCall) -> Message {
        match self.place() {
            Place::In(now) if now.id == group && now.raft_id == to => {
                Message::RaftAnswer(now.answer(call).await)
            }
            _ => Message::NotHere,
        }
    }

    async fn leave_if(&self, condition: impl Fn(&Group) -> bool) {
        if let Place::In(group) = self.place()
            && condition(&group)
        {
            self.leave(&group).await;
        }
    }

    /// Whether Raft, as known here, says that `node` leads the group.
    fn leads_here(&self, node: &NodeId, group: &Group) -> bool {
        let standing = self.standing(group);
        let leader = standing.metrics.current_leader.and_then(|raft_id| standing.node(raft_id));
        leader == Some(node)
    }

    async fn answer_yield(&self, from: &NodeId, offer: Yield) -> Message {
        let Place::In(group) = self.place() else {
            return Message::No;
        };
        let (standing, state) = (self.standing(&group), group.progress().state);
        let busy = self.yielding.load(Ordering::SeqCst);
        if !standing.leads || busy || offer.group == group.id || state.removed.contains_key(from) {
            return Message::No;
        }
        if self.weight(&group, &standing, &state) <= (offer.size, offer.number, offer.group) {
            return Message::No;
        }
        let mut alive = offer.alive;
        alive.extend(self.fresh(&state).into_keys());
        alive.extend([from.clone(), self.me().clone()]);
        let absorb = Absorb { state: offer.state, obeyed: offer.obeyed, alive };
        let deadline = Instant::now() + self.config.timing.attempt;
        match self.propose_here(Command::Absorb(absorb), deadline).await {
            Ok(_) => {
                tracing::info!(%from, group = %offer.group, "took over the state of a group that yielded");
                Message::Yes
            }
            Err(e) => {
                tracing::info!(%from, "did not take over the state of a group that yielded: {e}");
                Message::No
            }
        }
    }
}
