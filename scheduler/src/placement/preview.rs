//! What `shoal plan` shows: the placement that a request would get, what else would fit, and each node's part.

use serde::{Deserialize, Serialize};

use super::pool::Pool;
use super::split::Load;
use super::{Placed, Placement, Stage, explain, of_a_rank, place, search, stages};
use crate::{Footprint, NoPlacement, NodeFit, Parallel, PlanRequest, Topology};

/// Most alternatives that are listed.
const MAX_ALTERNATIVES: usize = 8;

/// The answer to a request, without anything being done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preview {
    /// What the model needs in all.
    pub needs: Needs,
    /// Where it would go, or why nowhere.
    pub outcome: Result<Placed, NoPlacement>,
    /// Other ways to spread it that would fit too.
    pub alternatives: Vec<Alternative>,
    /// Every node's part in it.
    pub nodes: Vec<NodeFit>,
}

/// What a model needs at some context and slots, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needs {
    /// Tokens of context per slot that the figures are for.
    pub context: u32,
    /// Slots that the figures are for.
    pub slots: u16,
    /// Weights of all layers.
    pub layer_bytes: u64,
    /// The embedding table, on the first stage.
    pub embedding_bytes: u64,
    /// Norm and output matrix, on the last stage. A tied table is in both figures; one node that is both holds it once.
    pub head_bytes: u64,
    /// KV cache of all layers.
    pub kv_bytes: u64,
    /// Scratch, on every rank.
    pub scratch_bytes: u64,
}

/// Another way to spread the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alternative {
    /// How to ask for it.
    pub parallel: Parallel,
    /// Its stages, at the same context and slots.
    pub stages: Vec<Stage>,
}

impl Needs {
    /// What `footprint` needs in all.
    pub fn of(footprint: &Footprint, context: u32, slots: u16) -> Self {
        let layers = u64::from(footprint.layers());
        Self {
            context,
            slots,
            layer_bytes: footprint.layer_bytes.iter().fold(0u64, |sum, bytes| sum.saturating_add(*bytes)),
            embedding_bytes: footprint.embedding_bytes,
            head_bytes: footprint.head_bytes,
            kv_bytes: footprint.kv_bytes_per_layer(context, slots).saturating_mul(layers),
            scratch_bytes: footprint.scratch_bytes(context, slots),
        }
    }
}

/// What [`place`] would do, with everything that a person wants to know about it.
pub fn preview(topology: &Topology, others: &[&Placement], request: &PlanRequest) -> Preview {
    let outcome = place(topology, others, request);
    let pool = Pool::new(topology, others, request);
    match &outcome {
        Ok(placed) => Preview {
            needs: Needs::of(&request.footprint, placed.context, placed.slots),
            alternatives: alternatives(&pool, request, placed),
            nodes: explain::rows_of(&pool, placed),
            outcome,
        },
        Err(why) => Preview {
            needs: Needs::of(&request.footprint, search::contexts(request).0, request.slots),
            alternatives: Vec::new(),
            nodes: why.nodes.clone(),
            outcome,
        },
    }
}

fn alternatives(pool: &Pool<'_>, request: &PlanRequest, placed: &Placed) -> Vec<Alternative> {
    let ranks = placed.stages.first().map_or(1, |stage| stage.ranks.len());
    let of = |parallel: Parallel, stages_wanted: usize| {
        let request = of_a_rank(&PlanRequest { parallel, ..request.clone() });
        let load = Load::new(&request.footprint, placed.context, placed.slots);
        let shape = search::of_stages(pool, &load, stages_wanted, parallel.ranks().into())?;
        let stages = stages(pool, &shape, &request.footprint, placed.context, placed.slots);
        Some(Alternative { parallel, stages })
    };
    let any = PlanRequest { parallel: Parallel::Auto, ..request.clone() };
    let pipelines = search::stage_counts(pool, &any)
        .filter(|count| ranks > 1 || *count != placed.stages.len())
        .filter_map(|count| of(Parallel::Pipeline(u16::try_from(count).ok()?), count));
    let most_ranks = usize::from(request.footprint.most_ranks()).min(pool.largest_team());
    let tensors = (2..=most_ranks)
        .filter(|count| placed.stages.len() > 1 || *count != ranks)
        .filter_map(|count| of(Parallel::Tensor { stages: 1, ranks: u16::try_from(count).ok()? }, 1));
    pipelines.take(MAX_ALTERNATIVES / 2).chain(tensors.take(MAX_ALTERNATIVES / 2)).collect()
}
