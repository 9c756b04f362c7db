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

use std::collections::BTreeMap;

use super::Stage;
use crate::{Footprint, NodeId, Speed, Topology};

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

    /// Whether both nodes run on one machine, and so read from the same memory.
    fn share_machine(&self, a: &NodeId, b: &NodeId) -> bool;
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

    fn share_machine(&self, _: &NodeId, _: &NodeId) -> bool {
        false
    }
}

/// Predicts for one model on the nodes of one topology.
pub struct Predictor<'a> {
    speeds: BTreeMap<&'a NodeId, Speed>,
    costs: &'a dyn LinkCosts,
}

impl<'a> Predictor<'a> {
    /// From what is known of the nodes and the links between them.
    pub fn new(topology: &'a Topology, costs: &'a dyn LinkCosts) -> Self {
        let speeds = topology.nodes.iter().filter_map(|node| Some((&node.id, node.speed?))).collect();
        Self { speeds, costs }
    }

    pub(super) fn speed(&self, node: &NodeId) -> Option<Speed> {
        self.speeds.get(node).copied()
    }

    pub(super) fn costs(&self) -> &'a dyn LinkCosts {
        self.costs
    }

    /// Seconds for a token of a model (`footprint` is the whole model's) with half of `context` tokens before it. `None` where
    /// something needed for it is not known.
    pub fn seconds(&self, footprint: &Footprint, context: u32, stages: &[Stage]) -> Option<f64> {
        let shares = |stage: &Stage| vec![1; stage.ranks.len()];
        let of_stages =
            stages.iter().map(|stage| self.stage_s(&footprint.shared(&shares(stage))?, context, stage));
        let computed = of_stages.sum::<Option<f64>>()?;
        Some(computed + self.hops_s(footprint, stages)?)
    }

    /// The same where `rank` is already that of the rank with most.
    pub(super) fn seconds_of_rank(&self, rank: &Footprint, context: u32, stages: &[Stage]) -> Option<f64> {
        let computed = stages.iter().map(|stage| self.stage_s(rank, context, stage)).sum::<Option<f64>>()?;
        Some(computed + self.hops_s(rank, stages)?)
    }

    fn stage_s(&self, rank: &Footprint, context: u32, stage: &Stage) -> Option<f64> {
        let speeds = stage.ranks.iter().map(|node| self.speed(node)).collect::<Option<Vec<_>>>()?;
        let layers = stage.layers.end.saturating_sub(stage.layers.start);
        let bytes = rank.read_bytes(&stage.layers, context / 2) as f64;
        let of_rank = |(node, speed): (&NodeId, &Speed)| {
            let beside = stage.ranks.iter().filter(|other| self.costs.share_machine(node, other)).count();
            let readers = if stage.ranks.len() > 1 { beside.max(1) } else { 1 };
            let read = bytes * readers as f64 / speed.memory_read_bytes_per_s.max(1) as f64;
            read + f64::from(layers) * seconds(speed.layer_ns)
        };
        let slowest = stage.ranks.iter().zip(&speeds).map(of_rank).fold(0.0, f64::max);
        if stage.ranks.len() < 2 {
            return Some(slowest);
        }
        let sync = seconds(speeds.iter().map(|speed| speed.sync_ns).max().unwrap_or_default());
        let sums = SUMS_PER_LAYER * layers + u32::from(stage.layers.start == 0);
        let sum = self.costs.all_reduce_s(&stage.ranks, known(rank.hidden)?)? + sync;
        let sampling = if stage.layers.end == rank.layers() {
            self.costs.all_reduce_s(&stage.ranks, SAMPLING_NUMBERS)? + sync
        } else {
            0.0
        };
        Some(slowest + f64::from(sums) * sum + sampling)
    }

    /// From the first rank of each stage to all of the next, and from the last stage to the head.
    fn hops_s(&self, footprint: &Footprint, stages: &[Stage]) -> Option<f64> {
        let (Some(first), Some(last)) = (stages.first(), stages.last()) else { return Some(0.0) };
        if stages.len() < 2 {
            return Some(0.0);
        }
        let row = known(footprint.hidden)? as u64 * 4;
        let hop = |pair: &[Stage]| {
            let [before, after] = pair else { return None };
            let from = before.ranks.first()?;
            let each = after.ranks.iter().map(|to| self.costs.send_s(from, to, row));
            let slowest = each.collect::<Option<Vec<_>>>()?.into_iter().fold(0.0, f64::max);
            let sync = before.ranks.iter().chain(&after.ranks).filter_map(|node| self.speed(node));
            Some(slowest + seconds(sync.map(|speed| speed.sync_ns).max().unwrap_or_default()))
        };
        let hops = stages.windows(2).map(hop).sum::<Option<f64>>()?;
        Some(hops + self.costs.send_s(last.ranks.first()?, first.ranks.first()?, ANSWER_BYTES)?)
    }
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 * 1e-9
}

fn known(hidden: u32) -> Option<usize> {
    (hidden > 0).then_some(hidden as usize)
}
