//! What `auto` takes of everything that fits: the least predicted time for a token.
//!
//! Looked at are each single node, and up to [`MAX_TOGETHER`] nodes as a pipeline, as ranks of one stage, and as groups of ranks with
//! a pipeline between. Nodes are taken those with most memory first, and those that read fastest first; a group is the first that
//! is left and whoever is nearest to it. So the work is bounded by the number of nodes times a constant, not by their subsets.

use super::cost::Predictor;
use super::pool::Pool;
use super::search::{self, Shape};
use super::split::{Load, Split};
use super::{Stage, stages};
use crate::PlanRequest;

/// Most nodes that are put together because that is faster; more only because the memory is needed.
const MAX_TOGETHER: usize = 32;
/// Most sets of nodes that reach each other in which is looked for groups.
const MAX_TEAMS: usize = 8;
/// What more nodes, or another one, must take at most of the time of what was found before: less is within what measured
/// rates drift.
const WORTH_IT: f64 = 0.95;
/// Bytes by which nodes are near each other: a row of a model of middling width.
const NEAR_BYTES: u64 = 8192;

/// Something that fits, with what it takes.
struct Found {
    seconds: f64,
    stages: Vec<Stage>,
}

/// The stages to take at this context, given those that fit on the fewest nodes: these where nothing is faster, or where it is
/// not known how fast they are.
pub(super) fn fastest(
    pool: &Pool<'_>,
    predictor: &Predictor<'_>,
    request: &PlanRequest,
    context: u32,
    fewest: Vec<Stage>,
) -> Vec<Stage> {
    let Some(seconds) = predictor.seconds(&request.footprint, context, &fewest) else { return fewest };
    let mut best = Found { seconds, stages: fewest };
    let orders = [Some(pool.clone()), pool.fastest_first()];
    for pool in orders.iter().flatten() {
        single(pool, predictor, request, context, &mut best);
    }
    for pool in orders.iter().flatten() {
        together(pool, predictor, request, context, &mut best);
    }
    best.stages
}

/// Each node alone.
fn single(pool: &Pool<'_>, predictor: &Predictor<'_>, request: &PlanRequest, context: u32, best: &mut Found) {
    let load = Load::new(&request.footprint, context, request.slots);
    for (index, candidate) in pool.candidates.iter().enumerate() {
        // What nodes of one machine measured beside each other differs by chance, and before their link is known nobody knows
        // whether they are on one.
        let head = best.stages.first().and_then(|stage| stage.ranks.first());
        let comparable = head.is_some_and(|head| {
            let costs = predictor.costs();
            costs.send_s(head, &candidate.node.id, NEAR_BYTES).is_some()
                && !costs.share_machine(head, &candidate.node.id)
        });
        if best.stages.len() == 1 && !comparable {
            continue;
        }
        let Some(split) = load.split(&[candidate.free]).filter(Split::fits) else { continue };
        let shape = Shape { members: vec![index], ranks: 1, split };
        let stages = stages(pool, &shape, &request.footprint, context, request.slots);
        consider(predictor.seconds(&request.footprint, context, &stages), stages, best);
    }
}

/// Several nodes.
fn together(
    pool: &Pool<'_>,
    predictor: &Predictor<'_>,
    request: &PlanRequest,
    context: u32,
    best: &mut Found,
) {
    let layers = request.footprint.layer_bytes.len();
    let most_ranks = usize::from(request.footprint.most_ranks()).min(MAX_TOGETHER);
    for team in pool.teams().take(MAX_TEAMS) {
        for ranks in 1..=most_ranks.min(team.len()) {
            let Some(rank) = request.footprint.shared(&vec![1; ranks]) else { continue };
            let load = Load::new(&rank, context, request.slots);
            let most_groups = (MAX_TOGETHER.min(team.len()) / ranks).min(layers);
            let groups = groups(pool, predictor, team, ranks, most_groups);
            for count in 1..=groups.len() {
                let members: Vec<usize> = groups.iter().take(count).flatten().copied().collect();
                if members.len() < 2 {
                    continue;
                }
                let free = search::free(pool, &members, ranks);
                let Some(split) = load.split(&free).filter(Split::fits) else { continue };
                let shape = Shape { members, ranks, split };
                let stages = stages(pool, &shape, &rank, context, request.slots);
                consider(predictor.seconds_of_rank(&rank, context, &stages), stages, best);
            }
        }
    }
}

fn consider(seconds: Option<f64>, stages: Vec<Stage>, best: &mut Found) {
    if let Some(seconds) = seconds.filter(|seconds| *seconds < best.seconds * WORTH_IT) {
        *best = Found { seconds, stages };
    }
}

/// At most `count` groups of `ranks` nodes of a team: each begins with the first that is left and takes those nearest to it.
fn groups(
    pool: &Pool<'_>,
    predictor: &Predictor<'_>,
    team: &[usize],
    ranks: usize,
    count: usize,
) -> Vec<Vec<usize>> {
    let id = |index: usize| pool.candidates.get(index).map(|candidate| &candidate.node.id);
    let mut left = team.to_vec();
    left.sort_unstable();
    let mut groups = Vec::new();
    while groups.len() < count && left.len() >= ranks {
        let first = left.remove(0);
        if ranks > 1 {
            let far = |index: &usize| {
                let known =
                    id(first).zip(id(*index)).and_then(|(a, b)| predictor.costs().send_s(a, b, NEAR_BYTES));
                known.unwrap_or(f64::INFINITY)
            };
            // Stable: of those equally near the first.
            let mut near: Vec<(f64, usize)> = left.iter().map(|index| (far(index), *index)).collect();
            near.sort_by(|a, b| a.0.total_cmp(&b.0));
            let mut group: Vec<usize> = near.into_iter().take(ranks - 1).map(|(_, index)| index).collect();
            left.retain(|index| !group.contains(index));
            group.push(first);
            group.sort_unstable();
            groups.push(group);
        } else {
            groups.push(vec![first]);
        }
    }
    groups
}

#[cfg(test)]
mod tests;
