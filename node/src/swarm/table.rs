//! What the swarm shows: the nodes it knows, those it refused, and what happens to them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use shoal_scheduler::{Graph, NodeId};
use tokio::time::Instant;

use super::gate::Standing;
use super::hello::{Reason, Refusal};
use super::interfaces::Kind;
use super::record::Record;

/// How a node is, as seen from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NodeState {
    /// Connected, or being dialled, and not yet admitted on both sides.
    Joining,
    /// Connected, admitted, and heard lately.
    Ready,
    /// It was ready; its heartbeats are late, or its connection is lost.
    Suspect,
    /// It was ready and is no more.
    Gone,
}

impl NodeState {
    /// The state's name in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Ready => "ready",
            Self::Suspect => "suspect",
            Self::Gone => "gone",
        }
    }
}

/// How a node that was ready went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gone {
    /// Its side ended the connection and nobody listens there any more: the process is gone. A neighbour of it says so where
    /// there was no connection.
    Closed,
    /// No word of it for 3 s.
    Silent,
    /// It said goodbye.
    Left,
    /// The gate does not admit it any more.
    Refused,
}

/// The connection with a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    /// The other end.
    pub remote: SocketAddr,
    /// The kind of interface it goes over.
    pub kind: Kind,
}

/// One node.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The last record of it that is known.
    pub record: Option<Arc<Record>>,
    /// How it is.
    pub state: NodeState,
    /// How it went, if it is gone.
    pub gone: Option<Gone>,
    /// When it was last heard itself; for ourselves now.
    pub last_heard: Option<Instant>,
    /// The nodes between, in order, by which it is reached: none for a neighbour; `None` where no way leads to it.
    pub route: Option<Vec<NodeId>>,
    /// Since when it is there, if it is.
    pub since: Option<Instant>,
    /// Round trip over the control connection.
    pub rtt: Option<Duration>,
    /// The connection, if there is one.
    pub path: Option<Path>,
    /// Where it may be dialled.
    pub addresses: Vec<SocketAddr>,
    /// The version its agent names (`shoal/0.1.0`).
    pub agent: Option<String>,
    /// What it said of itself in its last hello.
    pub standing: Option<Standing>,
    /// Why its latest record was refused, if it was.
    pub record_refused: Option<String>,
}

/// Who refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusedBy {
    /// This node.
    Us,
    /// The other node.
    Them,
}

/// A node that is there and is not let in, or does not let us in.
#[derive(Debug, Clone)]
pub struct RefusedPeer {
    /// Its id.
    pub node: NodeId,
    /// The name it gave, if it said hello.
    pub name: Option<String>,
    /// When it was last refused.
    pub since: SystemTime,
    /// Where it was met.
    pub address: Option<SocketAddr>,
    /// Why.
    pub refusal: Refusal,
    /// By whom.
    pub by: RefusedBy,
    /// When it is tried again.
    pub until: Instant,
}

/// All nodes known here, ourselves included.
#[derive(Debug, Clone)]
pub struct Table {
    /// This node.
    pub me: NodeId,
    /// By node id.
    pub nodes: BTreeMap<NodeId, Entry>,
    /// Who is whose neighbour, among those that are there.
    pub graph: Graph,
    /// Those refused lately.
    pub refused: Vec<RefusedPeer>,
    /// Rises by one with each new table.
    pub version: u64,
}

impl Table {
    /// The nodes that are ready, without this one.
    pub fn ready(&self) -> impl Iterator<Item = &NodeId> {
        self.nodes
            .iter()
            .filter(|(id, entry)| **id != self.me && entry.state == NodeState::Ready)
            .map(|(id, _)| id)
    }
}

/// What happens in the swarm. A receiver that lags misses some; it then reads the table.
#[derive(Debug, Clone)]
pub enum SwarmEvent {
    /// A node is admitted on both sides, or vouched for by members between, and can be called.
    Ready(NodeId),
    /// A node's word came, by its heartbeat or carried on by members between, with what its consensus put in it.
    Heard {
        /// From whom.
        node: NodeId,
        /// As its beat source gave it.
        beat: Arc<[u8]>,
    },
    /// A node that was ready is no more.
    Gone {
        /// Who.
        node: NodeId,
        /// How.
        how: Gone,
    },
    /// A node was refused, or refused us.
    Refused {
        /// Who.
        node: NodeId,
        /// Why.
        refusal: Refusal,
        /// By whom.
        by: RefusedBy,
    },
    /// Another machine runs with our key and started before us: this node must make a new one
    /// ([`crate::identity::Identity::replace`]) and start again.
    DuplicateId {
        /// What tells it, for people.
        text: String,
    },
}

impl RefusedPeer {
    /// Whether the other is a node of ours but of a version that we do not speak.
    #[must_use]
    pub fn is_incompatible(&self) -> bool {
        self.refusal.reason == Reason::Version
    }
}
