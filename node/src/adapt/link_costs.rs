//! What links cost, for placement: the transport crate's own schedules and predictions, over the links that are known.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use shoal_scheduler::{Link, LinkCosts, LinkKind, NodeId, Stage, Topology, Wire};
use shoal_transport::collective::{
    self, MAX_RANKS, MESSAGE_S, Operation, REDUCE_BYTES_PER_S, Wiring, WiringError, pick,
};

use crate::engine::pipe::STEP_FRAME_BYTES;

/// Bytes of a number in a sum.
const NUMBER_BYTES: u64 = 4;

/// What one link between two nodes does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Edge {
    /// Seconds from the call that sends a small message until it is there: half a round trip.
    pub one_way_s: f64,
    /// Bytes a second in each direction.
    pub bytes_per_s: f64,
}

/// A link of which nothing is known: what picks a schedule then.
const NOMINAL: Edge = Edge { one_way_s: 20e-6, bytes_per_s: 1e9 };

/// The known links of some nodes. What was predicted is remembered.
#[derive(Debug, Default)]
pub struct KnownLinks {
    /// By ends, the lesser first; of several the one with the least latency.
    edges: BTreeMap<(NodeId, NodeId), Edge>,
    /// The least node of each one's machine, of those that share one.
    machines: BTreeMap<NodeId, NodeId>,
    known: RefCell<BTreeMap<Question, Option<f64>>>,
}

/// Both, the lesser first.
fn ends(a: &NodeId, b: &NodeId) -> (NodeId, NodeId) {
    if a < b { (a.clone(), b.clone()) } else { (b.clone(), a.clone()) }
}

/// How so many ranks are wired by these links. `None` where not all are connected.
fn wired(ranks: usize, edges: Vec<(usize, usize, Edge)>) -> Option<Wiring> {
    // A link's figure holds what both machines do for a message, which the wiring counts apart.
    let least = edges.iter().map(|(.., edge)| edge.one_way_s).fold(f64::INFINITY, f64::min);
    let message_s = MESSAGE_S.min(least / 4.0);
    let link = |(a, b, edge): (usize, usize, Edge)| collective::Link {
        a,
        b,
        latency_s: (edge.one_way_s - 2.0 * message_s).max(0.0),
        bytes_per_s: edge.bytes_per_s,
    };
    let wiring = Wiring::new(ranks, edges.into_iter().map(link).collect()).ok()?;
    Some(wiring.with_machine(message_s, REDUCE_BYTES_PER_S).with_frames(STEP_FRAME_BYTES as usize))
}

/// How the ranks of a stage are wired, as its placement says; all alike where it says nothing. Each has a channel to each other:
/// where no link joins two, that goes over nodes between.
pub fn wiring_of(stage: &Stage) -> Result<Wiring, WiringError> {
    let edge = |(a, b, wire): &(u16, u16, Wire)| {
        let edge = Edge { one_way_s: wire.one_way_ns as f64 * 1e-9, bytes_per_s: wire.bytes_per_s as f64 };
        (usize::from(*a), usize::from(*b), edge)
    };
    let known = wired(stage.ranks.len(), stage.wires.iter().map(edge).collect());
    match known.filter(|_| !stage.wires.is_empty()) {
        Some(wiring) => Ok(wiring),
        None => Wiring::mesh(stage.ranks.len(), NOMINAL.one_way_s, NOMINAL.bytes_per_s)
            .map(|wiring| wiring.with_frames(STEP_FRAME_BYTES as usize)),
    }
}

/// Each node by the least that it is connected with by these pairs (the lesser first).
fn machines(inside: impl Iterator<Item = (NodeId, NodeId)>) -> BTreeMap<NodeId, NodeId> {
    let mut least: BTreeMap<NodeId, NodeId> = BTreeMap::new();
    let pairs: BTreeSet<(NodeId, NodeId)> = inside.collect();
    for (a, b) in pairs {
        let machine = least.get(&a).cloned().unwrap_or_else(|| a.clone());
        let other = least.get(&b).cloned().unwrap_or_else(|| b.clone());
        let (machine, joined) = ends(&machine, &other);
        least.values_mut().filter(|of| **of == joined).for_each(|of| of.clone_from(&machine));
        for node in [a, b, joined] {
            least.insert(node, machine.clone());
        }
    }
    least
}

/// Nodes, and elements of a sum or, with a first and last node, of a message.
type Question = (Vec<NodeId>, usize, Option<(NodeId, NodeId)>);

impl KnownLinks {
    /// These links; one with impossible figures is left out.
    pub fn new(links: impl IntoIterator<Item = (NodeId, NodeId, Edge)>) -> Self {
        let mut edges: BTreeMap<(NodeId, NodeId), Edge> = BTreeMap::new();
        for (a, b, edge) in links {
            let sound = edge.one_way_s.is_finite() && edge.one_way_s >= 0.0 && edge.bytes_per_s > 0.0;
            if a == b || !sound || !edge.bytes_per_s.is_finite() {
                continue;
            }
            let best = edges.entry(ends(&a, &b)).or_insert(edge);
            if edge.one_way_s < best.one_way_s {
                *best = edge;
            }
        }
        Self { edges, ..Self::default() }
    }

    /// The links of a swarm, as far as they carry and were measured.
    pub fn of(topology: &Topology) -> Self {
        let measured = |link: &Link| {
            let one_way_s = link.rtt_ns?.0 as f64 * 0.5e-9;
            Some((link.a.clone(), link.b.clone(), Edge { one_way_s, bytes_per_s: link.bytes_per_s? as f64 }))
        };
        let up = topology.links.iter().filter(|link| link.up);
        let inside = topology.links.iter().filter(|link| link.kind == LinkKind::Loopback);
        let machines = machines(inside.map(|link| ends(&link.a, &link.b)));
        Self { machines, ..Self::new(up.filter_map(measured)) }
    }

    fn edge(&self, a: &NodeId, b: &NodeId) -> Option<&Edge> {
        self.edges.get(&ends(a, b))
    }

    /// The links among these nodes, by their places. `None` where not all are connected.
    fn wiring(&self, nodes: &[NodeId]) -> Option<Wiring> {
        let pairs = (0..nodes.len()).flat_map(|a| (a + 1..nodes.len()).map(move |b| (a, b)));
        let edge = |(a, b)| Some((a, b, *self.edge(nodes.get(a)?, nodes.get(b)?)?));
        // As if ranks without a link would hand on by themselves: what nodes between do is no better by these figures.
        wired(nodes.len(), pairs.filter_map(edge).collect()).map(Wiring::with_neighbours_only)
    }

    fn remembered(&self, question: Question, ask: impl FnOnce(&Question) -> Option<f64>) -> Option<f64> {
        if let Some(known) = self.known.borrow().get(&question) {
            return *known;
        }
        let answer = ask(&question);
        self.known.borrow_mut().insert(question, answer);
        answer
    }

    /// Everybody who has a link.
    fn everybody(&self) -> Vec<NodeId> {
        let ends: BTreeSet<&NodeId> = self.edges.keys().flat_map(|(a, b)| [a, b]).collect();
        ends.into_iter().cloned().collect()
    }
}

impl LinkCosts for KnownLinks {
    fn send_s(&self, from: &NodeId, to: &NodeId, bytes: u64) -> Option<f64> {
        if from == to {
            return Some(0.0);
        }
        if let Some(edge) = self.edge(from, to) {
            return Some(edge.one_way_s + bytes as f64 / edge.bytes_per_s);
        }
        // Nodes between pass it on.
        let len = usize::try_from(bytes.div_ceil(NUMBER_BYTES)).ok()?;
        let question = (Vec::new(), len, Some((from.clone(), to.clone())));
        self.remembered(question, |_| {
            let all = self.everybody();
            if all.len() > MAX_RANKS {
                return None;
            }
            let place = |node: &NodeId| all.iter().position(|other| other == node);
            let operation = Operation::Send { from: place(from)?, to: place(to)?, len };
            Some(pick(&operation, &self.wiring(&all)?)?.seconds)
        })
    }

    fn all_reduce_s(&self, ranks: &[NodeId], numbers: usize) -> Option<f64> {
        if ranks.len() > MAX_RANKS {
            return None;
        }
        let wiring = |nodes: &[NodeId]| self.wiring(nodes);
        self.remembered((ranks.to_vec(), numbers, None), |(ranks, numbers, _)| {
            Some(pick(&Operation::AllReduce { len: *numbers }, &wiring(ranks)?)?.seconds)
        })
    }

    fn wire(&self, a: &NodeId, b: &NodeId) -> Option<Wire> {
        let edge = self.edge(a, b)?;
        Some(Wire { one_way_ns: (edge.one_way_s * 1e9) as u64, bytes_per_s: edge.bytes_per_s as u64 })
    }

    fn machine(&self, node: &NodeId) -> NodeId {
        self.machines.get(node).unwrap_or(node).clone()
    }
}
