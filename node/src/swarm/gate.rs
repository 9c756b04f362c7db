//! Who may come in. The swarm speaks the protocol; the agent, who knows the membership and the window, decides.

use serde::{Deserialize, Serialize};
use shoal_scheduler::{GroupId, NodeId};

use super::hello::Hello;

/// The agent's decision about a peer that speaks our protocol under our swarm's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is a member, or becomes one.
    Admit,
    /// It is told `not_member` with this text, which should say what would admit it.
    Refuse(String),
}

/// What a node says of itself, as far as the agent knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// Whether the node that is spoken to is in the speaker's membership list.
    pub member: bool,
    /// Whether the speaker's formation window is open.
    pub window_open: bool,
    /// The speaker's Raft group.
    pub group: GroupId,
    /// The count of re-formings in the speaker's state.
    pub number: u64,
    /// How many nodes the speaker's group has.
    pub size: u32,
    /// Whom the speaker holds for the scheduler.
    pub leader: Option<NodeId>,
}

/// Decides about peers. Called by the swarm's task: it must answer at once, from what is in memory.
pub trait Gate: Send + Sync + 'static {
    /// Whether it can judge yet. Until it can, hellos are neither said nor answered, so that nobody is refused for a minute
    /// only because this node is still starting. [`super::Swarm::poke`] tells that it has changed.
    fn ready(&self) -> bool {
        true
    }

    /// What we say of ourselves to `peer`.
    fn standing(&self, peer: &NodeId) -> Standing {
        let _ = peer;
        Standing::default()
    }

    /// Whether `node`, whom we are not connected with, counts as one of the swarm. Members that let each other in vouch for
    /// it; a node that was removed is no member whoever says so.
    fn admits_far(&self, node: &NodeId) -> bool {
        let _ = node;
        true
    }

    /// Whether `peer`, who said `hello`, may come in. `local` is true for an agent of the same user on this machine, as
    /// proved by the secret that both can read.
    fn judge(&self, peer: &NodeId, hello: &Hello, local: bool) -> Verdict;
}
