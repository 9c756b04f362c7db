//! Who runs which layers: the rules by which a model is cut into stages and the stages are given to nodes.
//!
//! Memory is the hard limit on every rank. Candidates are the nodes that are there, offer memory and may be used, those
//! with most memory free first; [`place`] takes the first 1, 2, 3... of them until the model fits (or exactly as many as
//! `pipeline=N` says), and cuts the layers in proportion to what each can use; where rates were measured, so that the slowest
//! stage is as fast as memory allows (`balance`). Where links were measured too, `auto` then takes what is predicted to be fastest of everything that fits at that context (`choice`, by [`cost`]). Each decision is
//! a function of its arguments and of nothing else, and the order of nodes in the topology changes none.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use self::cost::{LinkCosts, Predictor, Wire};
use self::load::{Group, Loads};
use self::pool::Pool;
use self::search::{Search, Shape};
use crate::{Epoch, InstanceId, KvType, NoPlacement, NodeId, Parallel, PlanRequest, Topology};

mod balance;
mod choice;
pub mod cost;
mod explain;
mod load;
mod pool;
mod preview;
pub mod report;
mod search;
mod split;
#[cfg(test)]
mod tests;

pub use preview::{Alternative, Needs, Preview, preview};
pub use search::{DEFAULT_CONTEXT, LEAST_DEFAULT_CONTEXT};

/// Where one instance runs, under an epoch. Its head is the first rank of the first stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The instance.
    pub instance: InstanceId,
    /// Version of this placement.
    pub epoch: Epoch,
    /// Tokens of context per slot, reserved whole.
    pub context: u32,
    /// Sequences served at a time.
    pub slots: u16,
    /// As what numbers every rank keeps keys and values.
    #[serde(default)]
    pub kv_type: KvType,
    /// The stages in the order that activations pass them; together they hold every layer exactly once.
    pub stages: Vec<Stage>,
    /// Nanoseconds that a token of one request was predicted to take when it was placed, where rates and links were known.
    #[serde(default)]
    pub predicted_ns: Option<u64>,
}

/// Consecutive layers that run as one step of the pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Layers `[start, end)`.
    pub layers: Range<u32>,
    /// The nodes that share the stage, by rank.
    pub ranks: Vec<NodeId>,
    /// What each rank computes of every layer, in proportion to the others.
    #[serde(default)]
    pub shares: Vec<u32>,
    /// Weights of the rank that takes most, in bytes, the embedding and output head included where it holds them.
    pub weights_bytes: u64,
    /// KV cache of that rank, in bytes.
    pub kv_bytes: u64,
    /// Scratch of that rank, in bytes.
    pub scratch_bytes: u64,
    /// The links among the ranks that are measured, by their places; empty = all alike, of nothing known.
    #[serde(default)]
    pub wires: Vec<(u16, u16, Wire)>,
    /// What each rank takes; empty where each takes as much.
    #[serde(default)]
    pub each: Vec<RankBytes>,
}

/// What a rank takes, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankBytes {
    /// Weights, the embedding and output head included where it holds them.
    pub weights_bytes: u64,
    /// KV cache.
    pub kv_bytes: u64,
    /// Scratch.
    pub scratch_bytes: u64,
}

impl RankBytes {
    /// Everything that the rank allocates.
    pub fn total(&self) -> u64 {
        self.weights_bytes.saturating_add(self.kv_bytes).saturating_add(self.scratch_bytes)
    }
}

impl Placement {
    /// The node that drives the steps: rank 0 of stage 0. `None` only in a placement without stages, which nothing here
    /// makes.
    pub fn head(&self) -> Option<&NodeId> {
        self.stages.first().and_then(|stage| stage.ranks.first())
    }

    /// Every node that holds a shard of it, in the order of stages and ranks.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeId> {
        self.stages.iter().flat_map(|stage| stage.ranks.iter())
    }

    /// Bytes that it takes on `node`, 0 where it has no shard there.
    pub fn used_bytes(&self, node: &NodeId) -> u64 {
        self.stages.iter().fold(0, |sum, stage| sum.saturating_add(stage.bytes_on(node)))
    }
}

impl Stage {
    /// What the rank takes that takes most.
    pub fn most(&self) -> RankBytes {
        RankBytes {
            weights_bytes: self.weights_bytes,
            kv_bytes: self.kv_bytes,
            scratch_bytes: self.scratch_bytes,
        }
    }

    /// What this rank takes.
    pub fn of_rank(&self, rank: usize) -> RankBytes {
        self.each.get(rank).copied().unwrap_or_else(|| self.most())
    }

    /// Everything that the rank on `node` allocates, in bytes; 0 where that has none.
    pub fn bytes_on(&self, node: &NodeId) -> u64 {
        let rank = self.ranks.iter().position(|rank| rank == node);
        rank.map_or(0, |rank| self.of_rank(rank).total())
    }
}

/// The answer to a request that fits: a placement, but for instance and epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// Tokens of context per slot.
    pub context: u32,
    /// Sequences served at a time.
    pub slots: u16,
    /// As what numbers keys and values are kept.
    pub kv_type: KvType,
    /// The stages in their order.
    pub stages: Vec<Stage>,
    /// Nanoseconds that a token of one request is predicted to take, where rates and links are known.
    #[serde(default)]
    pub predicted_ns: Option<u64>,
}

impl Placed {
    /// As a placement of `instance` under `epoch`.
    pub fn under(self, instance: InstanceId, epoch: Epoch) -> Placement {
        let Placed { context, slots, kv_type, stages, predicted_ns } = self;
        Placement { instance, epoch, context, slots, kv_type, stages, predicted_ns }
    }
}

/// Finds a place for a model beside what runs already (`others`), or says why there is none.
pub fn place(
    topology: &Topology,
    costs: &dyn LinkCosts,
    others: &[&Placement],
    request: &PlanRequest,
) -> Result<Placed, NoPlacement> {
    let pool = Pool::new(topology, others, request);
    if let Some(refusal) = explain::refusal(&pool, request) {
        return Err(refusal);
    }
    let predictor = Predictor::new(topology, costs);
    let search = Search::new(&pool, request, &predictor);
    let Some((context, shape)) = search.best() else {
        return Err(explain::no_placement(topology, others, &pool, request));
    };
    let mut stages = match request.parallel {
        Parallel::Auto => choice::fastest(search, &predictor, context, &shape),
        Parallel::Pipeline(_) => stages(&pool, &shape),
        Parallel::Tensor { ranks, .. } => {
            let loads = Loads::new(&request.footprint, context, request.slots);
            choice::nearest(search, &predictor, &loads, &shape, ranks.into())
        }
    };
    for stage in &mut stages {
        stage.wires = predictor.wires(&stage.ranks.iter().collect::<Vec<_>>());
    }
    let predicted_s = predictor.seconds(&request.footprint, context, &stages);
    let predicted_ns = predicted_s.map(|seconds| (seconds * 1e9) as u64);
    Ok(Placed { context, slots: request.slots, kv_type: request.kv_type, stages, predicted_ns })
}

/// The stages of a shape, with the bytes that each takes.
fn stages(pool: &Pool<'_>, shape: &Shape) -> Vec<Stage> {
    let stage = |(group, layers): (&Group, &Range<u32>)| {
        let each: Vec<RankBytes> = group.loads.iter().map(|load| load.bytes(layers)).collect();
        let most = each.iter().copied().max_by_key(RankBytes::total).unwrap_or_default();
        Stage {
            layers: layers.clone(),
            ranks: pool.ids(&group.members).into_iter().cloned().collect(),
            shares: group.shares.clone(),
            wires: Vec::new(),
            weights_bytes: most.weights_bytes,
            kv_bytes: most.kv_bytes,
            scratch_bytes: most.scratch_bytes,
            each,
        }
    };
    shape.groups.iter().zip(&shape.split.layers).map(stage).collect()
}
