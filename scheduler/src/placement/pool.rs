//! Which nodes may be used, in which order, and which of them can be used together.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::Placement;
use crate::{NodeId, NodeOffer, PlanRequest, Reach, Topology};

/// A node that may hold a shard.
#[derive(Debug, Clone)]
pub(super) struct Candidate<'a> {
    pub(super) node: &'a NodeOffer,
    /// Taken by other instances, in bytes.
    pub(super) used: u64,
    /// What is left of its offer, in bytes.
    pub(super) free: u64,
}

/// Why a node is no candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unfit {
    Gone,
    NotSelected,
    NoShards,
}

/// The candidates in the order of stages (most free first, ties by id), and the teams among them.
#[derive(Debug, Clone)]
pub(super) struct Pool<'a> {
    pub(super) candidates: Vec<Candidate<'a>>,
    /// Everyone else, by id.
    pub(super) unfit: Vec<(&'a NodeOffer, u64, Unfit)>,
    /// Nodes that were asked for by name but are not in the swarm.
    pub(super) unknown: Vec<NodeId>,
    /// Sets of candidates (by index) of which each can reach each other: the first `n` of a team are the `n` nodes to
    /// try from it. One team with everybody where nothing is known to be out of reach.
    teams: Vec<Vec<usize>>,
}

impl<'a> Pool<'a> {
    /// Sorts the nodes of a topology by what the request may do with them.
    pub(super) fn new(topology: &'a Topology, others: &[&Placement], request: &PlanRequest) -> Self {
        let selected: BTreeSet<&NodeId> = request.nodes.iter().collect();
        let used = used_bytes(others);
        let by_id: BTreeMap<&NodeId, &NodeOffer> =
            topology.nodes.iter().map(|node| (&node.id, node)).collect();
        let (mut candidates, mut unfit) = (Vec::new(), Vec::new());
        for node in by_id.values() {
            let used = used.get(&node.id).copied().unwrap_or_default();
            let why = if !selected.is_empty() && !selected.contains(&node.id) {
                Some(Unfit::NotSelected)
            } else if !node.alive {
                Some(Unfit::Gone)
            } else if node.offered_bytes == 0 {
                Some(Unfit::NoShards)
            } else {
                None
            };
            match why {
                Some(why) => unfit.push((*node, used, why)),
                None => {
                    candidates.push(Candidate { node, used, free: node.offered_bytes.saturating_sub(used) })
                }
            }
        }
        candidates.sort_by(|a, b| b.free.cmp(&a.free).then_with(|| a.node.id.cmp(&b.node.id)));
        let unknown = selected.into_iter().filter(|id| !by_id.contains_key(*id)).cloned().collect();
        let teams = teams(&candidates);
        Self { candidates, unfit, unknown, teams }
    }

    /// The size of the largest team: the most stages that can be placed together.
    pub(super) fn largest_team(&self) -> usize {
        self.teams.iter().map(Vec::len).max().unwrap_or_default()
    }

    /// The sets of `size` candidates to try, the best first; each in the order of stages.
    pub(super) fn teams_of(&self, size: usize) -> impl Iterator<Item = Vec<usize>> {
        self.teams.iter().filter_map(move |team| {
            let mut members = team.get(..size)?.to_vec();
            members.sort_unstable();
            Some(members)
        })
    }

    /// What the candidates have free, in the order of `members`.
    pub(super) fn free(&self, members: &[usize]) -> Vec<u64> {
        members
            .iter()
            .filter_map(|index| self.candidates.get(*index))
            .map(|candidate| candidate.free)
            .collect()
    }

    /// The ids of `members`, in their order.
    pub(super) fn ids(&self, members: &[usize]) -> Vec<&'a NodeId> {
        members.iter().filter_map(|index| self.candidates.get(*index)).map(|c| &c.node.id).collect()
    }

    /// The sets of candidates of which each can reach each other.
    pub(super) fn teams(&self) -> impl Iterator<Item = &[usize]> {
        self.teams.iter().map(Vec::as_slice)
    }

    /// The same pool with those first that read memory fastest; `None` where that is the order it has.
    pub(super) fn fastest_first(&self) -> Option<Self> {
        let rate =
            |candidate: &Candidate<'_>| candidate.node.speed.map_or(0, |speed| speed.memory_read_bytes_per_s);
        if self.candidates.is_sorted_by(|a, b| rate(a) >= rate(b)) {
            return None;
        }
        let mut candidates = self.candidates.clone();
        // Stable: of those equally fast the one with most free.
        candidates.sort_by_key(|candidate| std::cmp::Reverse(rate(candidate)));
        let teams = teams(&candidates);
        Some(Self { candidates, teams, ..self.clone() })
    }

    /// The same pool as if everyone could reach everyone.
    pub(super) fn without_walls(&self) -> Self {
        Self { teams: vec![(0..self.candidates.len()).collect()], ..self.clone() }
    }
}

/// Bytes taken on each node by these placements.
fn used_bytes<'a>(placements: &[&'a Placement]) -> BTreeMap<&'a NodeId, u64> {
    let mut used: BTreeMap<&NodeId, u64> = BTreeMap::new();
    for stage in placements.iter().flat_map(|placement| &placement.stages) {
        for rank in &stage.ranks {
            let bytes = used.entry(rank).or_default();
            *bytes = bytes.saturating_add(stage.bytes_on(rank));
        }
    }
    used
}

/// For each candidate the team that begins with it and then takes, in order, whoever reaches everyone taken so far. The
/// largest set of nodes that all reach each other is a hard problem; this finds it where the swarm falls into islands,
/// which is what happens, and always ends in polynomial time.
fn teams(candidates: &[Candidate<'_>]) -> Vec<Vec<usize>> {
    if candidates.iter().all(|candidate| candidate.node.reach == Reach::All) {
        return vec![(0..candidates.len()).collect()];
    }
    // Only looked up, never walked: its order decides nothing.
    let index: HashMap<&NodeId, usize> =
        candidates.iter().enumerate().map(|(i, c)| (&c.node.id, i)).collect();
    let reached: Vec<Set> = candidates
        .iter()
        .map(|candidate| match &candidate.node.reach {
            Reach::All => Set::of(candidates.len(), 0..candidates.len()),
            Reach::Only(ids) => Set::of(candidates.len(), ids.iter().filter_map(|id| index.get(id).copied())),
        })
        .collect();
    let mutual = |a: usize| {
        let back = |b: &usize| reached.get(*b).is_some_and(|set| set.contains(a));
        Set::of(candidates.len(), reached.get(a).into_iter().flat_map(Set::members).filter(back))
    };
    let joined: Vec<Set> = (0..candidates.len()).map(mutual).collect();
    let mut seen = BTreeSet::new();
    let mut teams = Vec::new();
    for (seed, neighbours) in joined.iter().enumerate() {
        // Nodes with the same neighbours are in the same teams.
        let mut around = neighbours.clone();
        around.add(seed);
        if !seen.insert(around) {
            continue;
        }
        let mut team = vec![seed];
        let mut open = neighbours.clone();
        open.remove(seed);
        while let Some(next) = open.first() {
            team.push(next);
            if let Some(neighbours) = joined.get(next) {
                open.keep(neighbours);
            }
            open.remove(next);
        }
        teams.push(team);
    }
    teams
}

/// A set of small numbers as bits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Set(Vec<u64>);

impl Set {
    fn of(size: usize, members: impl Iterator<Item = usize>) -> Self {
        let mut set = Self(vec![0; size.div_ceil(64)]);
        members.for_each(|member| set.add(member));
        set
    }

    fn add(&mut self, member: usize) {
        if let Some(word) = self.0.get_mut(member / 64) {
            *word |= 1 << (member % 64);
        }
    }

    fn contains(&self, member: usize) -> bool {
        self.0.get(member / 64).is_some_and(|word| word >> (member % 64) & 1 == 1)
    }

    fn remove(&mut self, member: usize) {
        if let Some(word) = self.0.get_mut(member / 64) {
            *word &= !(1 << (member % 64));
        }
    }

    fn keep(&mut self, other: &Self) {
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word &= other;
        }
    }

    fn first(&self) -> Option<usize> {
        self.members().next()
    }

    /// Its members, ascending.
    fn members(&self) -> impl Iterator<Item = usize> {
        self.0.iter().enumerate().flat_map(|(index, word)| {
            let mut left = *word;
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros();
                left &= left.checked_sub(1)?;
                Some(index * 64 + bit as usize)
            })
        })
    }
}
