//! Who runs which layers: the rules by which a model is cut into stages and the stages are given to nodes.
//!
//! Memory is the hard limit on every rank. Candidates are the nodes that are there, offer memory and may be used, those
//! with most memory free first; [`place`] takes the first 1, 2, 3... of them until the model fits (or exactly as many as
//! `pipeline=N` says), and cuts the layers in proportion to what each can use. Where rates and links were measured, `auto`
//! then takes what is predicted to be fastest of everything that fits at that context (`choice`, by [`cost`]). Each decision is
//! a function of its arguments and of nothing else, and the order of nodes in the topology changes none.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use self::cost::{LinkCosts, Predictor};
use self::pool::Pool;
use self::search::Shape;
use crate::{Epoch, Footprint, InstanceId, KvType, NoPlacement, NodeId, Parallel, PlanRequest, Topology};

mod choice;
pub mod cost;
mod explain;
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
}

/// Consecutive layers that run as one step of the pipeline. The byte figures are for each of its ranks, of the one with
/// most where they differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Layers `[start, end)`.
    pub layers: Range<u32>,
    /// The nodes that share the stage, by rank.
    pub ranks: Vec<NodeId>,
    /// What each rank computes of every layer, in proportion to the others.
    #[serde(default)]
    pub shares: Vec<u32>,
    /// Weights, in bytes, the embedding and output head included where the stage holds them.
    pub weights_bytes: u64,
    /// KV cache, in bytes.
    pub kv_bytes: u64,
    /// Scratch, in bytes.
    pub scratch_bytes: u64,
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
        let on_node = self.stages.iter().filter(|stage| stage.ranks.contains(node));
        on_node.fold(0, |sum, stage| sum.saturating_add(stage.total_bytes()))
    }
}

impl Stage {
    /// Everything that each rank of it allocates, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.weights_bytes.saturating_add(self.kv_bytes).saturating_add(self.scratch_bytes)
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
}

impl Placed {
    /// As a placement of `instance` under `epoch`.
    pub fn under(self, instance: InstanceId, epoch: Epoch) -> Placement {
        let Placed { context, slots, kv_type, stages } = self;
        Placement { instance, epoch, context, slots, kv_type, stages }
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
    let request = &of_a_rank(request);
    match search::best(&pool, request) {
        Some((context, shape)) => {
            let mut stages = stages(&pool, &shape, &request.footprint, context, request.slots);
            if request.parallel == Parallel::Auto {
                let predictor = Predictor::new(topology, costs);
                stages = choice::fastest(&pool, &predictor, request, context, stages);
            }
            Ok(Placed { context, slots: request.slots, kv_type: request.kv_type, stages })
        }
        None => Err(explain::no_placement(topology, others, &pool, request)),
    }
}

/// The request in terms of what a rank takes. One that cannot be shared out stays as it is; it is refused by name.
fn of_a_rank(request: &PlanRequest) -> PlanRequest {
    let shares = vec![1; request.parallel.ranks().into()];
    let footprint = request.footprint.shared(&shares).unwrap_or_else(|| request.footprint.clone());
    PlanRequest { footprint, ..request.clone() }
}

/// The stages of a shape, with the bytes that each takes; `footprint` is that of a rank.
fn stages(pool: &Pool<'_>, shape: &Shape, footprint: &Footprint, context: u32, slots: u16) -> Vec<Stage> {
    let id = |index: &usize| pool.candidates.get(*index).map(|candidate| candidate.node.id.clone());
    let stage = |(members, layers): (&[usize], &Range<u32>)| Stage {
        layers: layers.clone(),
        ranks: members.iter().filter_map(id).collect(),
        shares: vec![1; members.len()],
        weights_bytes: footprint.weights_bytes(layers),
        kv_bytes: footprint
            .kv_bytes_per_layer(context, slots)
            .saturating_mul(u64::from(layers.end.saturating_sub(layers.start))),
        scratch_bytes: footprint.scratch_bytes(context, slots),
    };
    shape.members.chunks(shape.ranks).zip(&shape.split.layers).map(stage).collect()
}
