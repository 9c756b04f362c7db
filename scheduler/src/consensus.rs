//! Who leads: the one scheduler of a group, elected by Raft, and the state that all its nodes share.
//!
//! A node starts as a group of one and leads it at once. Groups that hear each other become one: the leader of the lesser
//! group hands its state to the greater one's (`Yield`), and only after the answer `Yes` do its nodes wait to be taken in
//! as learners under new Raft ids. Up to five nodes of a group vote, always an odd number. A node that has had no leader
//! for three seconds, and sees that the quorum is lost, begins anew with the others in that plight: one of them founds a
//! group of one on what it has applied, the rest yield to it. So a swarm goes on in each part that it is torn into, and
//! heals when the parts meet.
//!
//! Every write has a deadline. [`Consensus::propose`] may be called on any node and goes to the leader.
//!
//! Commands of a scheduler to the nodes carry its [`Token`]; each node keeps on disk the highest that it has obeyed
//! ([`Consensus::obey`]) and obeys none that is lower.
//!
//! This is the only place that runs openraft. It works over a [`Network`], a [`Store`], a clock and a source of random
//! numbers that it is given, and measures intervals with tokio's clock, which tests can pause.
//!
//! | file | subject |
//! |---|---|
//! | `consensus/rules.rs` | the decisions, as functions |
//! | `consensus/core.rs` | what a node knows: its group, its peers, the fence, the view |
//! | `consensus/moves.rs` | how it changes its group |
//! | `consensus/answers.rs` | what it answers to messages |
//! | `consensus/driver.rs` | what happens by the clock: elections, beginning anew, who is yielded to |
//! | `consensus/errands.rs` | what takes several messages: yielding, taking nodes in, changing who votes |
//! | `consensus/propose.rs` | the way of a command to the leader |
//! | `consensus/group.rs`, `raft.rs`, `log.rs`, `machine.rs`, `link.rs` | one Raft group, for openraft |
//! | `consensus/network.rs`, `store.rs` | what the node supplies |

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::{Command, GroupId, NodeId, Outcome, Refusal, State, Token};

mod answers;
mod core;
mod driver;
mod errands;
mod group;
mod link;
mod log;
mod machine;
mod moves;
pub mod network;
mod propose;
pub mod raft;
mod rules;
pub mod store;
#[cfg(test)]
mod tests;

pub use network::{Beat, Gone, Message, Network, Unreachable};
pub use store::{Change, MemoryStore, Store, StoreError};

/// What a node is told when it starts.
#[derive(Clone)]
pub struct Config {
    /// The node.
    pub node: NodeId,
    /// Its name, for people.
    pub name: String,
    /// How long everything takes.
    pub timing: Timing,
    /// The clock, in milliseconds since 1970 UTC: for stamps only, never for intervals.
    pub unix_ms: Arc<dyn Fn() -> u64 + Send + Sync>,
    /// Random numbers, for the ids of new groups and for pauses before another attempt. Not for secrets.
    pub random: Arc<dyn Fn() -> u64 + Send + Sync>,
}

/// How long everything takes. The defaults are those of DESIGN section 4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Between two heartbeats of a leader.
    pub heartbeat: Duration,
    /// Least time without a leader, after its lease, before a voter asks for votes.
    pub election_min: Duration,
    /// Most of that, and the lease itself: so long after a heartbeat no voter votes for another.
    pub election_max: Duration,
    /// A node whose last beat is older does not count towards its group's size, nor towards a quorum in sight.
    pub fresh: Duration,
    /// So long without a leader or quorum, and a node begins anew if the quorum is out of sight; as long again, and it
    /// does so even if others should.
    pub strand: Duration,
    /// A voter not heard for so long loses its vote.
    pub lose_vote: Duration,
    /// Deadline of [`Consensus::propose`].
    pub propose: Duration,
    /// Deadline of one attempt within it, and of every message and change that the leader makes by itself.
    pub attempt: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(300),
            election_min: Duration::from_millis(1400),
            election_max: Duration::from_millis(1500),
            fresh: Duration::from_secs(1),
            strand: Duration::from_secs(3),
            lose_vote: Duration::from_secs(10),
            propose: Duration::from_secs(10),
            attempt: Duration::from_secs(3),
        }
    }
}

/// What a node knows of its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// The replicated state, as far as it is applied here. While the node waits to be taken into a group, and until it has
    /// caught up there, the state that it brings along, under a token that is no longer obeyed: so nothing is unloaded.
    pub state: Arc<State>,
    /// The group; while the node waits to be taken into another, the one that it was in.
    pub group: GroupId,
    /// The group's number.
    pub number: u64,
    /// Raft's election round.
    pub term: u64,
    /// The leader, if one was heard lately; the node itself if it leads.
    pub leader: Option<NodeId>,
    /// What the node is.
    pub role: Role,
    /// The nodes that vote, in the order of their ids.
    pub voters: Vec<NodeId>,
    /// What goes with the commands of this group's scheduler, and with everything that follows from `state`.
    pub token: Token,
    /// The node is the scheduler and may command: it leads with a quorum, and no node is known to have obeyed a higher
    /// token.
    pub commands: bool,
}

/// What a node is in its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// It leads, acknowledged by a quorum.
    Scheduler,
    /// It votes.
    Voter,
    /// It follows without a vote, or waits to be taken into a group.
    Learner,
}

/// A command that was carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// Index of its entry in the log of the group.
    pub index: u64,
    /// What it has done; never [`Outcome::Refused`].
    pub outcome: Outcome,
}

/// A command was not carried out, or it is not known whether it was. [`Consensus::propose`] returns
/// `Refused`, `Deadline` and `Stopped` only; it tries again after the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ProposeError {
    /// The state refused it.
    #[error("{0}")]
    Refused(Refusal),
    /// No leader has confirmed it in time. It may still be carried out.
    #[error("no scheduler confirmed it in time; it may still take effect")]
    Deadline,
    /// The node that was asked does not lead.
    #[error("this node is not the scheduler")]
    NotLeader,
    /// The node is stopping.
    #[error("the node is stopping")]
    Stopped,
}

/// A command's token is not obeyed.
#[derive(Debug, thiserror::Error)]
pub enum NotObeyed {
    /// The node has obeyed this higher token.
    #[error("a scheduler with the higher token {0} was obeyed")]
    Higher(Token),
    /// The token could not be put on disk, so it does not count as obeyed.
    #[error("the token could not be kept")]
    Store(#[source] StoreError),
}

/// A node's part in consensus could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The store does not read or write.
    #[error("the store of the scheduler does not work")]
    Store(#[source] StoreError),
    /// Raft did not start.
    #[error("raft did not start: {0}")]
    Raft(String),
    /// The times of [`Timing`] contradict each other.
    #[error("these times do not go together: {0}")]
    Timing(String),
}

/// A node's part in consensus. Dropping it without [`shutdown`](Self::shutdown) leaves its tasks running.
pub struct Consensus {
    core: Arc<core::Core>,
    stop: watch::Sender<bool>,
    driver: Mutex<Option<JoinHandle<()>>>,
}

impl Consensus {
    /// Goes on with the group that the store tells of, else founds a group of one.
    pub async fn start(
        config: Config,
        network: Arc<dyn Network>,
        store: Arc<dyn Store>,
    ) -> Result<Self, StartError> {
        let core = core::Core::start(config, network, store).await?;
        let (stop, stopping) = watch::channel(false);
        let driver = tokio::spawn(driver::Driver::new(core.clone()).run(stopping));
        Ok(Self { core, stop, driver: Mutex::new(Some(driver)) })
    }

    /// Answers a message of another node, which must be admitted.
    pub async fn receive(&self, from: &NodeId, message: Message) -> Message {
        self.core.receive(from, message).await
    }

    /// Another node, which must be admitted, has sent its beat.
    pub fn heard(&self, from: &NodeId, beat: Beat) {
        self.core.heard(from, beat);
    }

    /// Another node is gone until it is heard again.
    pub fn gone(&self, node: &NodeId, how: Gone) {
        self.core.gone(node, how);
    }

    /// What this node says of itself with its next heartbeat.
    pub fn beat(&self) -> Beat {
        self.core.beat()
    }

    /// Has a command carried out, by whichever node leads. Ends within [`Timing::propose`]; a command whose confirmation is
    /// lost on the way is proposed again, so it may be applied twice (see [`Command`]). When this returns, the view of this
    /// node shows what the command has done, unless the node lags by more than a second.
    pub async fn propose(&self, command: Command) -> Result<Applied, ProposeError> {
        self.core.propose(command).await
    }

    /// What this node knows of its group, now and after each change.
    pub fn view(&self) -> watch::Receiver<Arc<View>> {
        self.core.view()
    }

    /// Asks whether a command with this token is to be obeyed. If so, the token is on disk when this returns, and no lower one
    /// will be obeyed.
    pub async fn obey(&self, token: Token) -> Result<(), NotObeyed> {
        self.core.obey(token).await
    }

    /// Stops all of it. Other nodes notice by themselves.
    pub async fn shutdown(&self) {
        self.stop.send_replace(true);
        let driver = lock(&self.driver).take();
        if let Some(driver) = driver
            && let Err(e) = driver.await
        {
            tracing::error!("the task that drives consensus failed: {e}");
        }
        self.core.stop().await;
    }
}

/// Locks a mutex that is held only for moments and whose content stays sound if its holder panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
