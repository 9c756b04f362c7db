//! What `shoal plan` shows: the placement that a request would get, what else would fit, and each node's part.

use serde::{Deserialize, Serialize};

use super::cost::{LinkCosts, Predictor};
use super::load::Loads;
use super::pool::Pool;
use super::search::Search;
use super::{Placed, Placement, Stage, choice, explain, place, search, stages};
use crate::{Footprint, NoPlacement, NodeFit, Parallel, PlanRequest, Topology};

/// Most alternatives that are listed.
const MAX_ALTERNATIVES: usize = 8;

/// The answer to a request, without anything being done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Preview {
    /// What the model needs in all.
    pub needs: Needs,
    /// Where it would go, or why nowhere.
    pub outcome: Result<Placed, NoPlacement>,
    /// Seconds that it is predicted to take for a token, where rates and links are known.
    pub predicted_s: Option<f64>,
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// How to ask for it.
    pub parallel: Parallel,
    /// Its stages, at the same context and slots.
    pub stages: Vec<Stage>,
    /// Seconds that it is predicted to take for a token, where rates and links are known.
    pub predicted_s: Option<f64>,
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
pub fn preview(
    topology: &Topology,
    costs: &dyn LinkCosts,
    others: &[&Placement],
    request: &PlanRequest,
) -> Preview {
    let outcome = place(topology, costs, others, request);
    let pool = Pool::new(topology, others, request);
    let predictor = Predictor::new(topology, costs);
    match &outcome {
        Ok(placed) => Preview {
            needs: Needs::of(&request.footprint, placed.context, placed.slots),
            alternatives: alternatives(&pool, &predictor, request, placed),
            predicted_s: predictor.seconds(&request.footprint, placed.context, &placed.stages),
            nodes: explain::rows_of(&pool, placed),
            outcome,
        },
        Err(why) => Preview {
            needs: Needs::of(&request.footprint, search::contexts(request).0, request.slots),
            alternatives: Vec::new(),
            predicted_s: None,
            nodes: why.nodes.clone(),
            outcome,
        },
    }
}

fn alternatives(
    pool: &Pool<'_>,
    predictor: &Predictor<'_>,
    request: &PlanRequest,
    placed: &Placed,
) -> Vec<Alternative> {
    let ranks = placed.stages.first().map_or(1, |stage| stage.ranks.len());
    let loads = Loads::new(&request.footprint, placed.context, placed.slots);
    let search = Search::new(pool, request, predictor);
    let of = |parallel: Parallel, stages_wanted: usize| {
        let ranks = usize::from(parallel.ranks());
        let shape = search.of_stages(&loads, stages_wanted, ranks)?;
        let stages = match parallel {
            Parallel::Tensor { .. } => choice::nearest(search, predictor, &loads, &shape, ranks),
            _ => stages(pool, &shape),
        };
        let predicted_s = predictor.seconds(&request.footprint, placed.context, &stages);
        Some(Alternative { parallel, stages, predicted_s })
    };
    let any = PlanRequest { parallel: Parallel::Auto, ..request.clone() };
    let pipelines = search::stage_counts(pool, &any)
        .filter(|count| ranks > 1 || *count != placed.stages.len())
        .filter_map(|count| of(Parallel::Pipeline(u16::try_from(count).ok()?), count));
    let most_ranks = usize::from(request.footprint.most_ranks()).min(pool.largest_team());
    let tensors = (2..=most_ranks)
        .filter(|count| placed.stages.len() > 1 || *count != ranks)
        .filter_map(|count| of(Parallel::Tensor { stages: 1, ranks: u16::try_from(count).ok()? }, 1));
    let mixed = (2..=most_ranks)
        .filter(|count| placed.stages.len() != 2 || *count != ranks)
        .filter_map(|count| of(Parallel::Tensor { stages: 2, ranks: u16::try_from(count).ok()? }, 2));
    let each = MAX_ALTERNATIVES / 4;
    pipelines.take(2 * each).chain(tensors.take(each)).chain(mixed.take(each)).collect()
}
