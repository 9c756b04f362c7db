//! What a placement is predicted to take for one token of one sequence.
//!
//! ```text
//! token  = stages, one after the other + what is sent between them + the answer back to the head
//! stage  = slowest rank: bytes read / its rate  +  layers * what a layer costs beside  +  sums * (all-reduce + device)
//! sums   = 2 a layer, 1 for the embedding, 1 small one for sampling; none where a rank is alone
//! ```
//!
//! Decoding reads every weight that a token needs once, so memory is what it waits for; products are not counted. What a layer
//! costs beside ([`Speed::layer_ns`]) is not divided by ranks: launches, norms, barriers are the same on each.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::Stage;
use super::load::{Group, Load, Loads};
use super::pool::Pool;
use super::search::Shape;
use crate::{Footprint, NodeId, NodeOffer, Speed, Topology};

/// Sums of a rank that shares layers: after attention and after the MLP.
pub const SUMS_PER_LAYER: u32 = 2;
/// Numbers of 32 bits that ranks tell each other to choose a token: 64 best with their logits, a maximum and a sum.
const SAMPLING_NUMBERS: usize = 130;
/// Bytes of the answer to the head: the token and what goes with it.
const ANSWER_BYTES: u64 = 64;

/// What links cost: supplied by whoever knows how tensors are moved.
pub trait LinkCosts {
    /// Seconds until `bytes` from one node are at another; `None` where that is not known.
    fn send_s(&self, from: &NodeId, to: &NodeId, bytes: u64) -> Option<f64>;

    /// Seconds in which every one of `ranks` gets the sum of `numbers` numbers of 32 bits; `None` where that is not known.
    fn all_reduce_s(&self, ranks: &[NodeId], numbers: usize) -> Option<f64>;

    /// The link between two neighbours that messages take; `None` where there is none, or it was not measured.
    fn wire(&self, a: &NodeId, b: &NodeId) -> Option<Wire>;

    /// The machine that a node runs on, named by one of the nodes there: nodes of one machine read from the same memory.
    fn machine(&self, node: &NodeId) -> NodeId;
}

/// What a link between two neighbours does, as measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wire {
    /// Nanoseconds from the call that sends a small message until it is there: half a round trip.
    pub one_way_ns: u64,
    /// Bytes that it carries in a second in each direction.
    pub bytes_per_s: u64,
}

/// Nothing is known of any link.
#[derive(Debug, Clone, Copy)]
pub struct NoLinks;

impl LinkCosts for NoLinks {
    fn send_s(&self, _: &NodeId, _: &NodeId, _: u64) -> Option<f64> {
        None
    }

    fn all_reduce_s(&self, _: &[NodeId], _: usize) -> Option<f64> {
        None
    }

    fn wire(&self, _: &NodeId, _: &NodeId) -> Option<Wire> {
        None
    }

    fn machine(&self, node: &NodeId) -> NodeId {
        node.clone()
    }
}

/// What is known of a node.
#[derive(Debug, Clone)]
struct Known {
    speed: Speed,
    /// The node's machine, as [`LinkCosts::machine`] names it.
    machine: NodeId,
}

/// Predicts on the nodes of one topology.
pub struct Predictor<'a> {
    nodes: BTreeMap<&'a NodeId, Known>,
    costs: &'a dyn LinkCosts,
}

/// How long a stage takes for a token, whatever its layers.
pub(super) struct Pace {
    ranks: Vec<RankPace>,
    layers: usize,
    /// Seconds for a sum over its ranks; 0 where a rank is alone.
    sum_s: f64,
    /// Seconds for what ranks tell each other to choose a token.
    sampling_s: f64,
}

struct RankPace {
    load: Rc<Load>,
    byte_s: f64,
    layer_s: f64,
}

impl Pace {
    /// Seconds for layers `start..end`.
    pub(super) fn seconds(&self, start: usize, end: usize) -> f64 {
        let layers = end.saturating_sub(start) as f64;
        let of_rank =
            |rank: &RankPace| rank.load.read_bytes(start, end) as f64 * rank.byte_s + layers * rank.layer_s;
        let slowest = self.ranks.iter().map(of_rank).fold(0.0, f64::max);
        let embedding = if start == 0 { 1.0 } else { 0.0 };
        let sums = f64::from(SUMS_PER_LAYER) * layers + embedding;
        let sampling = if end == self.layers { self.sampling_s } else { 0.0 };
        slowest + sums * self.sum_s + sampling
    }
}

impl<'a> Predictor<'a> {
    /// From what is known of the nodes and the links between them. Nodes of one machine measured the same memory beside each
    /// other: it is taken for as fast as the luckiest of them saw it.
    pub fn new(topology: &'a Topology, costs: &'a dyn LinkCosts) -> Self {
        let known = |node: &'a NodeOffer| {
            Some((&node.id, Known { speed: node.speed?, machine: costs.machine(&node.id) }))
        };
        let mut nodes: BTreeMap<&NodeId, Known> = topology.nodes.iter().filter_map(known).collect();
        let mut fastest: BTreeMap<NodeId, u64> = BTreeMap::new();
        for node in nodes.values() {
            let rate = fastest.entry(node.machine.clone()).or_default();
            *rate = node.speed.memory_read_bytes_per_s.max(*rate);
        }
        for node in nodes.values_mut() {
            let rate = fastest.get(&node.machine).copied().unwrap_or_default();
            node.speed.memory_read_bytes_per_s = rate.max(1);
        }
        Self { nodes, costs }
    }

    /// Bytes that a node reads in a second.
    pub(super) fn bytes_per_s(&self, node: &NodeId) -> Option<f64> {
        self.nodes.get(node).map(|known| known.speed.memory_read_bytes_per_s as f64)
    }

    pub(super) fn costs(&self) -> &'a dyn LinkCosts {
        self.costs
    }

    /// Whether both run on one machine.
    pub(super) fn share_machine(&self, a: &NodeId, b: &NodeId) -> bool {
        self.costs.machine(a) == self.costs.machine(b)
    }

    /// Whether all nodes of a shape are on one machine.
    pub(super) fn one_machine(&self, pool: &Pool<'_>, shape: &Shape) -> bool {
        let members = shape.groups.iter().flat_map(|group| pool.ids(&group.members));
        let machines: BTreeSet<NodeId> = members.map(|node| self.costs.machine(node)).collect();
        machines.len() < 2
    }

    /// The links between the nodes of a stage, by pairs of ranks; none where they run on one machine, where what was measured says
    /// more of what ran beside.
    pub(super) fn wires(&self, ranks: &[&NodeId]) -> Vec<(u16, u16, Wire)> {
        let machines: BTreeSet<NodeId> = ranks.iter().map(|node| self.costs.machine(node)).collect();
        if machines.len() < 2 {
            return Vec::new();
        }
        let numbered = || (0u16..).zip(ranks);
        let pairs =
            numbered().flat_map(|(i, a)| numbered().skip(usize::from(i) + 1).map(move |(j, b)| (i, a, j, b)));
        pairs.filter_map(|(i, a, j, b)| Some((i, j, self.costs.wire(a, b)?))).collect()
    }

    /// Seconds for a token of a model (`footprint` is the whole model's) with half of `context` tokens before it. `None` where
    /// something needed for it is not known.
    pub fn seconds(&self, footprint: &Footprint, context: u32, stages: &[Stage]) -> Option<f64> {
        let loads = Loads::new(footprint, context, 1);
        let of_stage = |stage: &Stage| {
            let nodes: Vec<&NodeId> = stage.ranks.iter().collect();
            let pace = self.pace(&nodes, &loads.of(&stage.shares)?)?;
            Some(pace.seconds(stage.layers.start as usize, stage.layers.end as usize))
        };
        let computed = stages.iter().map(of_stage).sum::<Option<f64>>()?;
        let ranks: Vec<Vec<&NodeId>> = stages.iter().map(|stage| stage.ranks.iter().collect()).collect();
        Some(computed + self.hops_s(footprint, &ranks)?)
    }

    /// The same for a shape.
    pub(super) fn seconds_of(&self, pool: &Pool<'_>, shape: &Shape) -> Option<f64> {
        let paces = self.paces(pool, &shape.groups)?;
        let of_stage = |(pace, layers): (&Pace, &std::ops::Range<u32>)| {
            pace.seconds(layers.start as usize, layers.end as usize)
        };
        let computed: f64 = paces.iter().zip(&shape.split.layers).map(of_stage).sum();
        let ranks: Vec<Vec<&NodeId>> = shape.groups.iter().map(|group| pool.ids(&group.members)).collect();
        let footprint = shape.groups.first()?.loads.first()?.footprint();
        Some(computed + self.hops_s(footprint, &ranks)?)
    }

    /// The paces of these stages.
    pub(super) fn paces(&self, pool: &Pool<'_>, groups: &[Group]) -> Option<Vec<Pace>> {
        groups.iter().map(|group| self.pace(&pool.ids(&group.members), &group.loads)).collect()
    }

    fn pace(&self, nodes: &[&NodeId], loads: &[Rc<Load>]) -> Option<Pace> {
        let known = nodes.iter().map(|node| self.nodes.get(*node)).collect::<Option<Vec<_>>>()?;
        let rank = |(node, load): (&&Known, &Rc<Load>)| {
            let readers = known.iter().filter(|other| other.machine == node.machine).count();
            RankPace {
                load: load.clone(),
                byte_s: readers as f64 / node.speed.memory_read_bytes_per_s as f64,
                layer_s: seconds(node.speed.layer_ns),
            }
        };
        let first = loads.first()?;
        let mut pace = Pace {
            ranks: known.iter().zip(loads).map(rank).collect(),
            layers: first.layers(),
            sum_s: 0.0,
            sampling_s: 0.0,
        };
        if nodes.len() > 1 {
            let sync = seconds(known.iter().map(|node| node.speed.sync_ns).max().unwrap_or_default());
            let ids: Vec<NodeId> = nodes.iter().map(|node| (*node).clone()).collect();
            pace.sum_s = self.costs.all_reduce_s(&ids, row(first.footprint())?)? + sync;
            pace.sampling_s = self.costs.all_reduce_s(&ids, SAMPLING_NUMBERS)? + sync;
        }
        Some(pace)
    }

    /// From the first rank of each stage to all of the next, and from the last stage to the head.
    fn hops_s(&self, footprint: &Footprint, stages: &[Vec<&NodeId>]) -> Option<f64> {
        let (Some(first), Some(last)) = (stages.first(), stages.last()) else { return Some(0.0) };
        if stages.len() < 2 {
            return Some(0.0);
        }
        let row = row(footprint)? as u64 * 4;
        let sync_ns = |nodes: &[&NodeId]| {
            let known = nodes.iter().filter_map(|node| self.nodes.get(*node));
            known.map(|node| node.speed.sync_ns).max().unwrap_or_default()
        };
        let hop = |pair: &[Vec<&NodeId>]| {
            let [before, after] = pair else { return None };
            let from = before.first()?;
            let each = after.iter().map(|to| self.costs.send_s(from, to, row));
            let slowest = each.collect::<Option<Vec<_>>>()?.into_iter().fold(0.0, f64::max);
            Some(slowest + seconds(sync_ns(before).max(sync_ns(after))))
        };
        let hops = stages.windows(2).map(hop).sum::<Option<f64>>()?;
        Some(hops + self.costs.send_s(last.first()?, first.first()?, ANSWER_BYTES)?)
    }
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 * 1e-9
}

/// Numbers in the row that goes from layer to layer, where it is known.
fn row(footprint: &Footprint) -> Option<usize> {
    (footprint.hidden > 0).then_some(footprint.hidden as usize)
}
