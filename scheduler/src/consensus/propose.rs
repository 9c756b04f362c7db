//! The way of a command to the leader.

use std::time::Duration;

use openraft::error::{ClientWriteError, RaftError};
use tokio::time::{Instant, timeout_at};

use super::core::Core;
use super::moves::Place;
use super::network::Message;
use super::raft::Proposal;
use super::{Applied, ProposeError};
use crate::{Command, NodeId, Outcome};

/// Pause before another attempt where nothing is heard of a leader meanwhile.
const RETRY: Duration = Duration::from_millis(100);

/// How long a node that forwarded a command waits until it has applied it itself.
const FOLLOW: Duration = Duration::from_secs(1);

impl Core {
    pub(super) async fn propose(&self, command: Command) -> Result<Applied, ProposeError> {
        let deadline = Instant::now() + self.config.timing.propose;
        let mut view = self.view();
        loop {
            view.mark_unchanged();
            let attempt = deadline.min(Instant::now() + self.config.timing.attempt);
            let proposed = match self.place() {
                Place::Stopped => return Err(ProposeError::Stopped),
                Place::Waiting(_) => Err(ProposeError::NotLeader),
                Place::In(group) => match self.standing(&group).leader {
                    Some(leader) if leader == *self.me() => self.propose_here(command.clone(), attempt).await,
                    Some(leader) => {
                        let applied = self.forward(&leader, command.clone(), attempt).await;
                        if let Ok(applied) = &applied {
                            group.applied(applied.index, deadline.min(Instant::now() + FOLLOW)).await;
                            self.publish();
                        }
                        applied
                    }
                    None => Err(ProposeError::NotLeader),
                },
            };
            match proposed {
                Err(ProposeError::NotLeader | ProposeError::Deadline) if Instant::now() < deadline => {
                    // A leader that is heard of is asked at once.
                    let _ = timeout_at(deadline.min(Instant::now() + RETRY), view.changed()).await;
                }
                Err(ProposeError::NotLeader) => return Err(ProposeError::Deadline),
                proposed => return proposed,
            }
        }
    }

    async fn forward(
        &self,
        leader: &NodeId,
        command: Command,
        deadline: Instant,
    ) -> Result<Applied, ProposeError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let deadline_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let call = Message::Propose { command, deadline_ms };
        match timeout_at(deadline, self.ground.network.call(leader, call, left)).await {
            Ok(Ok(Message::Proposed(Err(ProposeError::Stopped)))) => Err(ProposeError::NotLeader),
            Ok(Ok(Message::Proposed(proposed))) => proposed,
            _ => Err(ProposeError::NotLeader),
        }
    }

    /// Has a command carried out by this node, which must lead.
    pub(super) async fn propose_here(
        &self,
        command: Command,
        deadline: Instant,
    ) -> Result<Applied, ProposeError> {
        let Place::In(group) = self.place() else {
            return Err(ProposeError::NotLeader);
        };
        if !self.standing(&group).leads {
            return Err(ProposeError::NotLeader);
        }
        let Ok(_shared) = timeout_at(deadline, group.writes.read()).await else {
            return Err(ProposeError::Deadline);
        };
        // The group may have yielded while we waited.
        if !self.is_in(&group) {
            return Err(ProposeError::NotLeader);
        }
        let proposal = Proposal { command, unix_ms: (self.config.unix_ms)() };
        match timeout_at(deadline, group.raft.client_write(proposal)).await {
            Err(_) => Err(ProposeError::Deadline),
            Ok(Ok(written)) => {
                self.publish();
                match written.data {
                    Outcome::Refused(refusal) => Err(ProposeError::Refused(refusal)),
                    outcome => Ok(Applied { index: written.log_id.index, outcome }),
                }
            }
            Ok(Err(RaftError::APIError(
                ClientWriteError::ForwardToLeader(_) | ClientWriteError::ChangeMembershipError(_),
            )))
            | Ok(Err(RaftError::Fatal(_))) => Err(ProposeError::NotLeader),
        }
    }
}
