//! What `auto` takes of everything that fits: the least predicted time for a token.
//!
//! Looked at are each single node, and up to [`MAX_TOGETHER`] nodes as a pipeline, as ranks of one stage, and as groups of ranks with
//! a pipeline between. Nodes are taken those with most memory first, and those that read fastest first; a group is the first that
//! is left and whoever is nearest to it. So the work is bounded by the number of nodes times a constant, not by their subsets.

use std::ops::RangeInclusive;

use super::cost::Predictor;
use super::load::Loads;
use super::pool::Pool;
use super::search::{Search, Shape};
use super::{Stage, stages};

/// Most nodes that are put together because that is faster; more only because the memory is needed.
const MAX_TOGETHER: usize = 32;
/// Most sets of nodes that reach each other in which is looked for groups.
const MAX_TEAMS: usize = 8;
/// What more nodes, or another one, must take at most of the time of what was found before: less is within what measured
/// rates drift.
const WORTH_IT: f64 = 0.95;
/// Bytes by which nodes are near each other: a row of a model of middling width.
const NEAR_BYTES: u64 = 8192;

/// The shape to take at this context, given the one that fits on the fewest nodes, with the pool that it is of: these where
/// nothing is faster, or where it is not known how fast they are.
pub(super) fn fastest(
    search: Search<'_>,
    predictor: &Predictor<'_>,
    context: u32,
    fewest: &Shape,
) -> Vec<Stage> {
    let loads = Loads::new(&search.request.footprint, context, search.request.slots);
    better(search, predictor, fewest, |searches, best| {
        for search in searches {
            single(search, &loads, best);
        }
        for search in searches {
            together(search, &loads, best);
        }
    })
}

/// The same where stages of so many ranks are asked for, `found` of nodes in the order of their memory: groups of nodes that are near
/// each other, where that is faster.
pub(super) fn nearest(
    search: Search<'_>,
    predictor: &Predictor<'_>,
    loads: &Loads<'_>,
    found: &Shape,
    ranks: usize,
) -> Vec<Stage> {
    let count = found.groups.len();
    better(search, predictor, found, |searches, best| {
        for search in searches {
            for team in search.pool.teams().take(MAX_TEAMS) {
                of_groups(search, loads, team, ranks, count..=count, best);
            }
        }
    })
}

/// The stages of the fastest shape that `look` considers, of the candidates in the order of memory and of speed.
fn better(
    search: Search<'_>,
    predictor: &Predictor<'_>,
    found: &Shape,
    look: impl FnOnce(&[Search<'_>], &mut Best<'_>),
) -> Vec<Stage> {
    let found_stages = stages(search.pool, found);
    let Some(seconds) = predictor.seconds_of(search.pool, found) else { return found_stages };
    let mut best = Best { predictor, seconds, stages: found_stages };
    match search.pool.fastest_first() {
        Some(pool) => look(&[search, search.among(&pool)], &mut best),
        None => look(&[search], &mut best),
    }
    best.stages
}

/// The fastest so far.
struct Best<'a> {
    predictor: &'a Predictor<'a>,
    seconds: f64,
    stages: Vec<Stage>,
}

impl Best<'_> {
    fn consider(&mut self, pool: &Pool<'_>, shape: &Shape) {
        let seconds = self.predictor.seconds_of(pool, shape);
        if let Some(seconds) = seconds.filter(|seconds| *seconds < self.seconds * WORTH_IT) {
            (self.seconds, self.stages) = (seconds, stages(pool, shape));
        }
    }
}

/// Each node alone.
fn single(search: &Search<'_>, loads: &Loads<'_>, best: &mut Best<'_>) {
    for (index, candidate) in search.pool.candidates.iter().enumerate() {
        // What nodes of one machine measured beside each other differs by chance, and before their link is known nobody knows
        // whether they are on one.
        let head = best.stages.first().and_then(|stage| stage.ranks.first());
        let comparable = head.is_some_and(|head| {
            best.predictor.costs().send_s(head, &candidate.node.id, NEAR_BYTES).is_some()
                && !best.predictor.share_machine(head, &candidate.node.id)
        });
        if best.stages.len() == 1 && !comparable {
            continue;
        }
        for shape in search.shapes(loads, &[index], 1) {
            best.consider(search.pool, &shape);
        }
    }
}

/// Several nodes.
fn together(search: &Search<'_>, loads: &Loads<'_>, best: &mut Best<'_>) {
    let footprint = &search.request.footprint;
    let layers = footprint.layer_bytes.len();
    let most_ranks = usize::from(footprint.most_ranks()).min(MAX_TOGETHER);
    for team in search.pool.teams().take(MAX_TEAMS) {
        for ranks in 1..=most_ranks.min(team.len()) {
            let most_groups = (MAX_TOGETHER.min(team.len()) / ranks).min(layers);
            of_groups(search, loads, team, ranks, 1..=most_groups, best);
        }
    }
}

/// So many groups of nodes of a team.
fn of_groups(
    search: &Search<'_>,
    loads: &Loads<'_>,
    team: &[usize],
    ranks: usize,
    counts: RangeInclusive<usize>,
    best: &mut Best<'_>,
) {
    let groups = groups(search.pool, best.predictor, team, ranks, *counts.end());
    for count in counts.filter(|count| *count <= groups.len()) {
        let members: Vec<usize> = groups.iter().take(count).flatten().copied().collect();
        if members.len() < 2 {
            continue;
        }
        for shape in search.shapes(loads, &members, ranks) {
            best.consider(search.pool, &shape);
        }
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
