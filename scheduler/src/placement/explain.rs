//! Saying why not: each node's part in a request, and the least single change after which it would fit.

use super::load::{Load, Loads, Sharing};
use super::pool::{Candidate, Pool, Unfit};
use super::search::{self, Search, Shape, largest, narrow};
use super::split::split;
use super::{Placed, Placement, Stage, stages};
use crate::{
    Change, Nearest, NoPlacement, NoPlacementCode, NodeFit, NodeFitCode, NodeId, NodeOffer, Parallel,
    PlanRequest, Reach, Topology,
};

/// Numbers of stages that are tried, from one up, to find the cut that misses least; the largest possible is tried too.
const MAX_ATTEMPTS: usize = 8;

/// Nodes whose offer is tried for the nearest change: those with most free.
const MAX_OFFERS_TRIED: usize = 3;

/// Offers are suggested in whole steps: of this many bytes, or of about a thousandth of what could be needed.
const OFFER_STEP_BYTES: u64 = 1 << 20;

/// What no choice of nodes could change: a request that makes no sense for the model, or that is not built yet.
pub(super) fn refusal(pool: &Pool<'_>, request: &PlanRequest) -> Option<NoPlacement> {
    let footprint = &request.footprint;
    let (layers, longest) = (footprint.layers(), footprint.max_context);
    let mut nearest = Vec::new();
    let mut code = NoPlacementCode::Unsupported;
    let text = match (request.parallel, request.context) {
        _ if layers == 0 => "The model has no layers.".to_owned(),
        _ if request.slots == 0 => "An instance has at least one slot.".to_owned(),
        (_, Some(0)) => "A context has at least one token.".to_owned(),
        (Parallel::Tensor { ranks, .. }, _) if ranks > footprint.most_ranks() => {
            code = NoPlacementCode::Stages;
            let most = footprint.most_ranks();
            format!(
                "{} asks for {ranks} ranks, and at most {most} can share this model's layers.",
                request.parallel
            )
        }
        (Parallel::Pipeline(stages) | Parallel::Tensor { stages, .. }, _) if u32::from(stages) > layers => {
            code = NoPlacementCode::Stages;
            format!("{} is more stages than the model has layers ({layers}).", request.parallel)
        }
        (_, Some(context)) if context > longest => {
            let text = format!("Ask for a context of at most {longest} tokens, the model's longest.");
            nearest.push(Nearest { change: Change::Context, node: None, value: longest.into(), text });
            format!("A context of {context} tokens is longer than the model's own {longest}.")
        }
        _ => return None,
    };
    Some(NoPlacement { code, text, nodes: rows(pool, None, &[]), nearest })
}

/// The rows of a request that fits.
pub(super) fn rows_of(pool: &Pool<'_>, placed: &Placed) -> Vec<NodeFit> {
    rows(pool, None, &placed.stages)
}

/// Why a sound request cannot be placed.
pub(super) fn no_placement<'t>(
    topology: &'t Topology,
    others: &[&Placement],
    pool: &Pool<'t>,
    request: &PlanRequest,
) -> NoPlacement {
    let context = search::contexts(request).0;
    let there = pool.candidates.len();
    let open = pool.without_walls();
    let (code, text) = match request.parallel {
        _ if there == 0 => {
            let text = if pool.unfit.is_empty() && pool.unknown.is_empty() {
                "The swarm has no nodes.".to_owned()
            } else {
                "No node that may be used is there and offers memory.".to_owned()
            };
            (NoPlacementCode::NoNodes, text)
        }
        Parallel::Pipeline(stages) | Parallel::Tensor { stages, .. }
            if usize::from(stages) * usize::from(request.parallel.ranks()) > there =>
        {
            let needed = usize::from(stages) * usize::from(request.parallel.ranks());
            let text = format!("{} needs {needed} nodes, and only {there} can be used.", request.parallel);
            (NoPlacementCode::Stages, text)
        }
        _ if Search::by_memory(&open, request).best().is_some() => {
            let text = "The memory would do, but only on nodes between which no route leads.";
            (NoPlacementCode::NoRoute, text.to_owned())
        }
        _ => (NoPlacementCode::Memory, memory_text(pool, request, context)),
    };
    let attempt = attempt(pool, request, context);
    let parts = attempt.as_ref().map(|shape| stages(pool, shape)).unwrap_or_default();
    let nearest = nearest(topology, others, pool, request, context);
    NoPlacement { code, text, nodes: rows(pool, attempt.as_ref(), &parts), nearest }
}

fn memory_text(pool: &Pool<'_>, request: &PlanRequest, context: u32) -> String {
    let counts = search::stage_counts(pool, request);
    let needed = largest_rank(request, context).total(*counts.start());
    let free = pool.candidates.iter().fold(0u64, |sum, candidate| sum.saturating_add(candidate.free));
    let at_least = if request.context.is_none() { "even " } else { "" };
    let on = if *counts.start() == 1 { "one node".to_owned() } else { format!("{} nodes", counts.start()) };
    let (nodes, have) = if pool.candidates.len() == 1 { ("node", "has") } else { ("nodes", "have") };
    format!(
        "The model does not fit: {at_least}with a context of {context} tokens and {} it takes {} on {on}, more on \
         several; the {} {nodes} that can be used {have} {} free in all.",
        plural(request.slots.into(), "slot"),
        bytes(u64::try_from(needed).unwrap_or(u64::MAX)),
        pool.candidates.len(),
        bytes_down(free),
    )
}

/// What the rank takes that has most, where ranks share evenly. A model that cannot be shared out was refused by name.
fn largest_rank(request: &PlanRequest, context: u32) -> Load {
    let shares = vec![1; request.parallel.ranks().into()];
    let footprint = request.footprint.shared(&shares).unwrap_or_else(|| request.footprint.clone());
    Load::new(footprint, context, request.slots)
}

/// The cut that misses least.
fn attempt(pool: &Pool<'_>, request: &PlanRequest, context: u32) -> Option<Shape> {
    let loads = Loads::new(&request.footprint, context, request.slots);
    let counts = search::stage_counts(pool, request);
    let ranks = usize::from(request.parallel.ranks()).max(1);
    let most = *counts.end();
    let shapes = counts.take(MAX_ATTEMPTS).chain([most]).filter_map(|count| {
        let members = pool.teams_of(count * ranks).next()?;
        let groups = loads.groups(pool, None, &members, ranks, Sharing::Even)?;
        let split = split(&groups)?;
        Some(Shape { groups, split })
    });
    shapes.min_by_key(|shape| (shape.split.missing_bytes(), shape.groups.len()))
}

/// A row for every node, sorted by name and id. `attempt` is a cut that does not fit, with its stages in `parts`; without
/// one, `parts` fit.
fn rows(pool: &Pool<'_>, attempt: Option<&Shape>, parts: &[Stage]) -> Vec<NodeFit> {
    let part =
        |candidate: &Candidate<'_>| parts.iter().find(|stage| stage.ranks.contains(&candidate.node.id));
    let walled = |candidate: &Candidate<'_>| {
        let groups = attempt.iter().flat_map(|shape| &shape.groups);
        groups
            .flat_map(|group| &group.members)
            .filter_map(|index| pool.candidates.get(*index))
            .any(|member| !member.node.joins(candidate.node))
    };
    let mut rows: Vec<NodeFit> = pool
        .candidates
        .iter()
        .map(|candidate| match part(candidate) {
            Some(stage) => part_row(candidate, stage),
            None if walled(candidate) => row(
                candidate.node,
                candidate.used,
                NodeFitCode::NoRoute,
                "is not reached by the other nodes that would be used: no route leads there, or its network interfaces are virtual (`shoal \
                 up --interface NAME=ethernet` lets one carry data).",
            ),
            None => {
                let text = format!("has no part in it; {}.", free_text(candidate));
                row(candidate.node, candidate.used, NodeFitCode::Spare, &text)
            }
        })
        .collect();
    rows.extend(pool.unfit.iter().map(|(node, used, why)| {
        let (code, text) = match why {
            Unfit::Gone => (NodeFitCode::Gone, "is gone: nothing has been heard of it for some seconds."),
            Unfit::NotSelected => (NodeFitCode::NotSelected, "is not among the nodes that were asked for."),
            Unfit::NoShards => {
                (NodeFitCode::NoShards, "offers no memory for shards (it was started with --offer 0, or `shoal status` says what ails it).")
            }
        };
        row(node, *used, code, text)
    }));
    rows.sort_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
    rows.extend(pool.unknown.iter().map(|id| NodeFit {
        id: id.clone(),
        name: id.to_string(),
        offered_bytes: 0,
        used_bytes: 0,
        needed_bytes: 0,
        missing_bytes: 0,
        code: NodeFitCode::Gone,
        text: format!("{id} is no member of this swarm."),
    }));
    rows
}

fn row(node: &NodeOffer, used: u64, code: NodeFitCode, text: &str) -> NodeFit {
    NodeFit {
        id: node.id.clone(),
        name: node.name.clone(),
        offered_bytes: node.offered_bytes,
        used_bytes: used,
        needed_bytes: 0,
        missing_bytes: 0,
        code,
        text: format!("{} {text}", node.name),
    }
}

fn part_row(candidate: &Candidate<'_>, stage: &Stage) -> NodeFit {
    let needed = stage.bytes_on(&candidate.node.id);
    let missing = needed.saturating_sub(candidate.free);
    let what = match stage.layers.end - stage.layers.start {
        1 => format!("layer {}", stage.layers.start),
        _ => format!("layers {} to {}", stage.layers.start, stage.layers.end - 1),
    };
    let free = free_text(candidate);
    let (code, text) = if missing == 0 {
        (NodeFitCode::Fits, format!("holds {what} in {}; {free}.", bytes(needed)))
    } else {
        let text =
            format!("would hold {what} and need {}; {free}: {} are missing.", bytes(needed), bytes(missing));
        (NodeFitCode::TooSmall, text)
    };
    NodeFit {
        needed_bytes: needed,
        missing_bytes: missing,
        ..row(candidate.node, candidate.used, code, &text)
    }
}

fn free_text(candidate: &Candidate<'_>) -> String {
    let offered = bytes_down(candidate.node.offered_bytes);
    match candidate.used {
        0 => format!("it offers {offered}"),
        used => format!("of the {offered} that it offers, other instances use {}", bytes(used)),
    }
}

/// Single changes that would do, by kind. Each is tried out by placing.
fn nearest<'t>(
    topology: &'t Topology,
    others: &[&Placement],
    pool: &Pool<'t>,
    request: &PlanRequest,
    context: u32,
) -> Vec<Nearest> {
    let fits_at = |context: u32, slots: u16| Search::by_memory(pool, request).at(context, slots).is_some();
    let mut found = Vec::new();
    let shorter = |value| narrow(value).is_some_and(|context| fits_at(context, request.slots));
    let least = u64::from(search::LEAST_DEFAULT_CONTEXT.min(request.footprint.max_context));
    if let Some(value) = largest(least..=u64::from(context).saturating_sub(1), shorter) {
        let text = format!("Ask for a context of at most {value} tokens (--context {value}).");
        found.push(Nearest { change: Change::Context, node: None, value, text });
    }
    let fewer = |value| narrow(value).is_some_and(|slots| fits_at(context, slots));
    if let Some(value) = largest(1..=u64::from(request.slots).saturating_sub(1), fewer) {
        let text = format!("Ask for {} (--slots {value}).", plural(value, "slot"));
        found.push(Nearest { change: Change::Slots, node: None, value, text });
    }
    let fixed = PlanRequest { context: Some(context), ..request.clone() };
    found.extend(larger_offer(topology, others, pool, &fixed, context));
    found.extend(one_more_node(topology, others, &fixed, context));
    found
}

/// Of the nodes with most free (and the first that offers nothing), the one whose offer has to grow least.
fn larger_offer<'t>(
    topology: &'t Topology,
    others: &[&Placement],
    pool: &Pool<'t>,
    request: &PlanRequest,
    context: u32,
) -> Option<Nearest> {
    let candidates =
        pool.candidates.iter().take(MAX_OFFERS_TRIED).map(|candidate| (candidate.node, candidate.used));
    let silent = pool.unfit.iter().filter(|(node, _, why)| {
        // One without memory has nothing to offer, whatever is asked of it.
        *why == Unfit::NoShards && node.memory_bytes != Some(0)
    });
    let silent = silent.map(|(node, used, _)| (*node, *used)).take(1);
    let mut changed = topology.clone();
    let least_of = |(node, used): (&'t NodeOffer, u64)| {
        let most = most_needed(request, context).saturating_add(used);
        let most = node.memory_bytes.map_or(most, |memory| most.min(memory));
        let value = least_offer(node.offered_bytes, most, |offer| {
            if let Some(node) = changed.nodes.iter_mut().find(|other| other.id == node.id) {
                node.offered_bytes = offer;
            }
            Search::by_memory(&Pool::new(&changed, others, request), request).best().is_some()
        });
        changed.clone_from(topology);
        value.map(|value| (value - node.offered_bytes, node, value))
    };
    let (more, node, value) =
        candidates.chain(silent).filter_map(least_of).min_by_key(|(more, node, _)| (*more, &node.id))?;
    let text = format!("Let {} offer {}, that is {} more.", node.name, bytes(value), bytes(more));
    Some(Nearest { change: Change::Offer, node: Some(node.id.clone()), value, text })
}

/// The smallest node whose joining would do.
fn one_more_node(
    topology: &Topology,
    others: &[&Placement],
    request: &PlanRequest,
    context: u32,
) -> Option<Nearest> {
    let id = NodeId::newcomer();
    let mut changed = topology.clone();
    for node in &mut changed.nodes {
        if let Reach::Only(reached) = &mut node.reach {
            reached.insert(id.clone());
        }
    }
    let name = "a new node".to_owned();
    let newcomer = NodeOffer {
        id: id.clone(),
        name,
        alive: true,
        offered_bytes: 0,
        memory_bytes: None,
        reach: Reach::All,
        speed: None,
    };
    changed.nodes.push(newcomer);
    let mut request = request.clone();
    if !request.nodes.is_empty() {
        request.nodes.push(id);
    }
    let most = most_needed(&request, context);
    let value = least_offer(0, most, |offer| {
        if let Some(node) = changed.nodes.last_mut() {
            node.offered_bytes = offer;
        }
        Search::by_memory(&Pool::new(&changed, others, &request), &request).best().is_some()
    })?;
    let text = format!("Add one more node that offers {}.", bytes(value));
    Some(Nearest { change: Change::Node, node: None, value, text })
}

/// No node needs more than this: everything, and the ends twice.
fn most_needed(request: &PlanRequest, context: u32) -> u64 {
    let total = largest_rank(request, context).total(2);
    u64::try_from(total).unwrap_or(u64::MAX).saturating_add(OFFER_STEP_BYTES)
}

/// The least offer above `now` and up to `most`, in whole steps, with which `fits` holds.
fn least_offer(now: u64, most: u64, mut fits: impl FnMut(u64) -> bool) -> Option<u64> {
    let step = (most / 1024 / OFFER_STEP_BYTES).max(1) * OFFER_STEP_BYTES;
    let (mut low, mut high) = (now / step + 1, most / step);
    if low > high || !fits(high * step) {
        return None;
    }
    while low < high {
        let middle = low + (high - low) / 2;
        if fits(middle * step) { high = middle } else { low = middle + 1 }
    }
    Some(low * step)
}

fn plural(count: u64, word: &str) -> String {
    if count == 1 { format!("1 {word}") } else { format!("{count} {word}s") }
}

/// Bytes for people, rounded up to a tenth, so that what is needed is never understated.
fn bytes(count: u64) -> String {
    scaled(count, |tenths, unit| tenths.div_ceil(unit))
}

/// The same rounded down, for what is there.
fn bytes_down(count: u64) -> String {
    scaled(count, |tenths, unit| tenths / unit)
}

fn scaled(count: u64, round: fn(u128, u128) -> u128) -> String {
    // Powers of 1000, as in every other place that people read.
    let (scale, unit) = match count {
        0..1000 => return plural(count, "byte"),
        1000..1_000_000 => (1000, "kB"),
        1_000_000..1_000_000_000 => (1_000_000, "MB"),
        _ => (1_000_000_000, "GB"),
    };
    let tenths = round(u128::from(count) * 10, scale);
    format!("{}.{} {unit}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_round_up_and_offers_round_down() {
        assert_eq!(
            (bytes(1), bytes(999), bytes(1000), bytes(1001)),
            ("1 byte".into(), "999 bytes".into(), "1.0 kB".into(), "1.1 kB".into())
        );
        assert_eq!((bytes(100_000_000), bytes_down(100_000_001)), ("100.0 MB".into(), "100.0 MB".into()));
        assert_eq!(bytes(1_500_000_000), "1.5 GB");
    }

    #[test]
    fn the_least_offer_is_found() {
        assert_eq!(least_offer(0, 10 << 20, |offer| offer >= 7 << 20), Some(7 << 20));
        assert_eq!(least_offer(8 << 20, 10 << 20, |offer| offer >= 7 << 20), Some(9 << 20));
        assert_eq!(least_offer(0, 5 << 20, |offer| offer >= 7 << 20), None);
    }
}
