//! What the scheduler knows of the machines when it places: made from the nodes' records by whoever calls.
//! `routes` are the ways between nodes that have no address for each other.

use std::borrow::Cow;
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::NodeId;

pub mod routes;

use routes::{Graph, round_trip_class};

/// The nodes of the swarm and what each offers. The order of `nodes` never matters to a decision.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Every member, present or not.
    pub nodes: Vec<NodeOffer>,
    /// The links between them. Their order never matters to a decision.
    pub links: Vec<Link>,
    /// Those that take nothing new, and keep what they have.
    pub closed: BTreeSet<NodeId>,
}

/// What a link runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum LinkKind {
    /// Inside a machine.
    Loopback,
    /// A Thunderbolt cable.
    Thunderbolt,
    /// A wired network.
    Ethernet,
    /// A wireless network.
    Wifi,
    /// Made by software, and declared to carry data.
    Virtual,
}

/// One way between two neighbours: there may be several, each its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// The end of the smaller id.
    pub a: NodeId,
    /// The other end.
    pub b: NodeId,
    /// What it runs over.
    pub kind: LinkKind,
    /// Whether it carries.
    pub up: bool,
    /// Round trip of a small message in nanoseconds, median and what 99 % stay under, once measured.
    pub rtt_ns: Option<(u64, u64)>,
    /// Bytes that it carries in a second, once measured.
    pub bytes_per_s: Option<u64>,
}

/// One node as placement sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeOffer {
    /// The node.
    pub id: NodeId,
    /// Its name, for reports.
    pub name: String,
    /// It has not been judged gone and may be given work. A node that a new scheduler has yet to hear of is alive until
    /// its silence has lasted, else each election would tear down what runs.
    pub alive: bool,
    /// Memory that it gives to shards, in bytes; 0 = none.
    pub offered_bytes: u64,
    /// All the memory it has, in bytes, where that is known: no offer beyond it is suggested.
    pub memory_bytes: Option<u64>,
    /// Who it can open a data channel to.
    pub reach: Reach,
    /// How fast it computes, once measured.
    pub speed: Option<Speed>,
}

/// How fast a node computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Speed {
    /// Bytes that it reads from memory in a second.
    pub memory_read_bytes_per_s: u64,
    /// What it spends on each layer of a token beside reading weights and cache, in nanoseconds.
    pub layer_ns: u64,
    /// What its device needs to hand a vector to the network or to take one, in nanoseconds; 0 where the processor computes.
    pub sync_ns: u64,
}

/// The nodes that a node can open a data channel to, by an address or over others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reach {
    /// Everyone: the usual case, one LAN or one machine.
    #[default]
    All,
    /// Only these.
    Only(BTreeSet<NodeId>),
}

impl Reach {
    /// Whether `node` is among them.
    pub fn includes(&self, node: &NodeId) -> bool {
        match self {
            Self::All => true,
            Self::Only(nodes) => nodes.contains(node),
        }
    }
}

impl NodeOffer {
    /// Whether both nodes can open a channel to the other, or are the same node.
    pub fn joins(&self, other: &Self) -> bool {
        self.id == other.id || (self.reach.includes(&other.id) && other.reach.includes(&self.id))
    }
}

impl Topology {
    /// The neighbours, as far as links between nodes that are alive carry, for routes between all of them.
    pub fn graph(&self) -> Graph {
        let alive: BTreeSet<&NodeId> =
            self.nodes.iter().filter(|node| node.alive).map(|node| &node.id).collect();
        let carries = |link: &&Link| link.up && alive.contains(&link.a) && alive.contains(&link.b);
        Graph::of(self.links.iter().filter(carries).map(|link| {
            let rtt = link.rtt_ns.map(|(p50, _)| std::time::Duration::from_nanos(p50));
            (link.a.clone(), link.b.clone(), round_trip_class(rtt))
        }))
    }

    /// As it is for what is to be placed: those that take nothing new offer nothing, and no larger offer of theirs would help.
    pub fn for_new(&self) -> Cow<'_, Topology> {
        let mut topology = Cow::Borrowed(self);
        if !self.closed.is_empty() {
            let nodes = &mut topology.to_mut().nodes;
            for node in nodes.iter_mut().filter(|node| self.closed.contains(&node.id)) {
                (node.offered_bytes, node.memory_bytes) = (0, Some(0));
            }
        }
        topology
    }

    /// The node of this id.
    pub fn node(&self, id: &NodeId) -> Option<&NodeOffer> {
        self.nodes.iter().find(|node| node.id == *id)
    }
}
