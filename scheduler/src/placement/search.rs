//! Looking for a placement: how many nodes, which context.

use super::pool::Pool;
use super::split::{Load, Split};
use crate::{Parallel, PlanRequest};

/// Context that an instance gets where nobody said otherwise, if model and memory allow, in tokens.
pub const DEFAULT_CONTEXT: u32 = 4096;

/// Least context that is chosen for somebody who named none, in tokens: with less a model answers nothing useful, and
/// "it does not fit" is the better answer. Who asks for less gets less.
pub const LEAST_DEFAULT_CONTEXT: u32 = 128;

/// A way to place a model: the candidates (by index in the pool) in the order of stages and ranks, and the layers of each stage.
pub(super) struct Shape {
    pub(super) members: Vec<usize>,
    /// Of each stage; at least 1.
    pub(super) ranks: usize,
    pub(super) split: Split,
}

/// The contexts to consider: from the least that is acceptable to the one wanted.
pub(super) fn contexts(request: &PlanRequest) -> (u32, u32) {
    match request.context {
        Some(context) => (context, context),
        None => {
            let wanted = request.footprint.max_context.min(DEFAULT_CONTEXT);
            (wanted.min(LEAST_DEFAULT_CONTEXT), wanted)
        }
    }
}

/// The numbers of stages that the request allows, the first to try first.
pub(super) fn stage_counts(pool: &Pool<'_>, request: &PlanRequest) -> std::ops::RangeInclusive<usize> {
    let ranks = usize::from(request.parallel.ranks()).max(1);
    let most = (pool.largest_team() / ranks).min(request.footprint.layer_bytes.len());
    let (least, most) = match request.parallel {
        Parallel::Auto => (1, most),
        Parallel::Pipeline(stages) | Parallel::Tensor { stages, .. } => {
            (stages.into(), most.min(stages.into()))
        }
    };
    least..=most
}

/// A placement at exactly this context and number of slots: on the fewest nodes that fit.
pub(super) fn at(pool: &Pool<'_>, request: &PlanRequest, context: u32, slots: u16) -> Option<Shape> {
    let load = Load::new(&request.footprint, context, slots);
    let ranks = usize::from(request.parallel.ranks()).max(1);
    stage_counts(pool, request).find_map(|stages| of_stages(pool, &load, stages, ranks))
}

/// A placement on exactly this many stages of so many ranks; `load` is that of a rank.
pub(super) fn of_stages(pool: &Pool<'_>, load: &Load<'_>, stages: usize, ranks: usize) -> Option<Shape> {
    let needed = load.total(stages);
    pool.teams_of(stages * ranks).find_map(|members| {
        let free = free(pool, &members, ranks);
        if free.iter().map(|bytes| u128::from(*bytes)).sum::<u128>() < needed {
            return None;
        }
        let split = load.split(&free).filter(Split::fits)?;
        Some(Shape { members, ranks, split })
    })
}

/// What each stage has free on the rank that has least.
pub(super) fn free(pool: &Pool<'_>, members: &[usize], ranks: usize) -> Vec<u64> {
    let free = pool.free(members);
    free.chunks(ranks).map(|ranks| ranks.iter().copied().min().unwrap_or_default()).collect()
}

/// The largest of `values` for which `fits` (which, true for a value, is true for all smaller ones) holds.
pub(super) fn largest(
    values: std::ops::RangeInclusive<u64>,
    mut fits: impl FnMut(u64) -> bool,
) -> Option<u64> {
    let (mut low, mut high) = values.into_inner();
    if low > high || !fits(low) {
        return None;
    }
    while low < high {
        let middle = high - (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    Some(low)
}

/// The context and placement that the request gets.
pub(super) fn best(pool: &Pool<'_>, request: &PlanRequest) -> Option<(u32, Shape)> {
    let (least, wanted) = contexts(request);
    if let Some(shape) = at(pool, request, wanted, request.slots) {
        return Some((wanted, shape));
    }
    let fits = |context: u64| narrow(context).is_some_and(|c| at(pool, request, c, request.slots).is_some());
    let context = narrow(largest(least.into()..=u64::from(wanted).saturating_sub(1), fits)?)?;
    at(pool, request, context, request.slots).map(|shape| (context, shape))
}

pub(super) fn narrow<T: TryFrom<u64>>(value: u64) -> Option<T> {
    T::try_from(value).ok()
}
