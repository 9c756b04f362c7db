//! Ways through the swarm: from who is whose neighbour, as all nodes know it from the records, to the route between two
//! nodes. A pure function, so nodes that know the same edges compute the same routes.
//!
//! A route is the one with the fewest hops; among those the one with the least round-trip classes on it; among those a
//! choice that follows from the ids alone. That last is a sum over the edges too, so routes are shortest paths under one
//! measure of edges: the end of a route is the route of whoever stands there (no loops hop by hop), and the way back is the
//! way there reversed. Different pairs get different choices, so equal ways share the load.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use crate::NodeId;

/// The class of an edge by its round trip: a worse one costs as much as several better ones, but never as much as a hop.
/// Coarse, so that a measurement that wavers does not move a route.
#[must_use]
pub fn round_trip_class(rtt: Option<Duration>) -> u8 {
    match rtt.map(|rtt| rtt.as_micros()) {
        Some(0..1_000) => 0,
        Some(1_000..10_000) | None => 1,
        Some(10_000..100_000) => 2,
        Some(_) => 3,
    }
}

/// Who is whose neighbour.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Graph {
    /// Ascending; the others name nodes by their place here.
    nodes: Vec<NodeId>,
    /// The neighbours of each node, ascending, with the class of the edge.
    edges: Vec<Vec<(usize, u8)>>,
    version: u64,
}

impl Graph {
    /// A graph of these edges: two ends and the class of [`round_trip_class`]. The order of edges, and of an edge's ends,
    /// changes nothing; of several between the same ends the one of the least class counts.
    pub fn of(joined: impl IntoIterator<Item = (NodeId, NodeId, u8)>) -> Self {
        let mut least: BTreeMap<(NodeId, NodeId), u8> = BTreeMap::new();
        for (a, b, class) in joined {
            if a != b {
                let ends = if a < b { (a, b) } else { (b, a) };
                least.entry(ends).and_modify(|known| *known = class.min(*known)).or_insert(class);
            }
        }
        let mut nodes: Vec<NodeId> = least.keys().flat_map(|(a, b)| [a.clone(), b.clone()]).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let mut edges = vec![Vec::new(); nodes.len()];
        let mut version = FNV_BASIS;
        for ((a, b), class) in &least {
            version =
                [a.as_str().as_bytes(), b.as_str().as_bytes(), &[*class]].into_iter().fold(version, fnv);
            if let (Ok(a), Ok(b)) = (nodes.binary_search(a), nodes.binary_search(b)) {
                for (from, to) in [(a, b), (b, a)] {
                    if let Some(out) = edges.get_mut(from) {
                        out.push((to, *class));
                    }
                }
            }
        }
        Self { nodes, edges, version }
    }

    /// The same without the edges that `left_out` says yes to; it is asked once for each, the smaller id first.
    #[must_use]
    pub fn without(&self, left_out: impl Fn(&NodeId, &NodeId) -> bool) -> Self {
        let edges = self.nodes.iter().zip(&self.edges).flat_map(|(a, out)| {
            let named = out.iter().filter_map(|(to, class)| Some((self.nodes.get(*to)?, *class)));
            named.filter(move |(b, _)| a < *b).map(move |(b, class)| (a, b, class))
        });
        let kept = edges.filter(|(a, b, _)| !left_out(a, b));
        Self::of(kept.map(|(a, b, class)| (a.clone(), b.clone(), class)))
    }

    /// Names the content: equal graphs, on whichever node, have the same version.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Whether the two are neighbours.
    #[must_use]
    pub fn joins(&self, a: &NodeId, b: &NodeId) -> bool {
        let place = |node: &NodeId| self.nodes.binary_search(node).ok();
        let (Some(a), Some(b)) = (place(a), place(b)) else { return false };
        self.edges.get(a).is_some_and(|out| out.binary_search_by_key(&b, |(to, _)| *to).is_ok())
    }

    /// The routes from one node to all that it reaches.
    #[must_use]
    pub fn routes_from(&self, from: &NodeId) -> Routes {
        let mut routes = Routes { version: self.version, from: from.clone(), reached: BTreeMap::new() };
        let Ok(start) = self.nodes.binary_search(from) else { return routes };
        let mut best: Vec<Option<(Cost, usize)>> = vec![None; self.nodes.len()];
        let mut due = BinaryHeap::from([Reverse((Cost::default(), start, start))]);
        while let Some(Reverse((cost, at, before))) = due.pop() {
            match best.get_mut(at) {
                // Popped in rising order, ties by the id of the node before: the first is the best.
                Some(place @ None) => *place = Some((cost, before)),
                _ => continue,
            }
            for (next, class) in self.edges.get(at).into_iter().flatten() {
                if best.get(*next).is_some_and(Option::is_none) {
                    due.push(Reverse((cost.over(self.choice(at, *next), *class), *next, at)));
                }
            }
        }
        let named = |at: usize| self.nodes.get(at).cloned();
        for (at, found) in best.iter().enumerate().filter(|(at, _)| *at != start) {
            let Some((cost, before)) = found else { continue };
            if let (Some(node), Some(before)) = (named(at), named(*before)) {
                routes.reached.insert(node, Reached { before, hops: cost.hops });
            }
        }
        routes
    }

    /// The route between two nodes, both included; `None` where there is none. The reverse of the way back.
    #[must_use]
    pub fn route(&self, from: &NodeId, to: &NodeId) -> Option<Vec<NodeId>> {
        self.routes_from(from).route(to)
    }

    /// What decides between equal ways that differ in this edge.
    fn choice(&self, a: usize, b: usize) -> u64 {
        let ends = [self.nodes.get(a.min(b)), self.nodes.get(a.max(b))];
        ends.into_iter().flatten().fold(FNV_BASIS, |hash, node| fnv(hash, node.as_str().as_bytes()))
    }
}

/// What a way costs, compared in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    hops: u32,
    classes: u32,
    choices: u128,
}

impl Cost {
    fn over(self, choice: u64, class: u8) -> Self {
        Self {
            hops: self.hops + 1,
            classes: self.classes + u32::from(class),
            choices: self.choices + u128::from(choice),
        }
    }
}

/// How a node is reached from another.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Reached {
    before: NodeId,
    hops: u32,
}

/// All routes from one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routes {
    version: u64,
    from: NodeId,
    reached: BTreeMap<NodeId, Reached>,
}

impl Routes {
    /// The version of the graph that they are of.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The nodes that are reached, without the one that the routes begin at.
    pub fn reached(&self) -> impl Iterator<Item = &NodeId> {
        self.reached.keys()
    }

    /// How many hops it is to `to`.
    #[must_use]
    pub fn hops(&self, to: &NodeId) -> Option<u32> {
        self.reached.get(to).map(|reached| reached.hops)
    }

    /// The route to `to`, both ends included; `None` where there is none.
    #[must_use]
    pub fn route(&self, to: &NodeId) -> Option<Vec<NodeId>> {
        let mut route = vec![to.clone()];
        while let Some(last) = route.last().filter(|last| **last != self.from) {
            let before = self.reached.get(last)?.before.clone();
            route.push(before);
        }
        route.reverse();
        Some(route)
    }

    /// The neighbour by which `to` is reached; `to` itself where that is the neighbour.
    #[must_use]
    pub fn next(&self, to: &NodeId) -> Option<NodeId> {
        let mut at = to;
        loop {
            let before = &self.reached.get(at)?.before;
            if *before == self.from {
                return Some(at.clone());
            }
            at = before;
        }
    }
}

/// FNV-1a, 64 bits.
const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    // The ids' lengths are equal, so nothing need stand between them.
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn id(n: usize) -> NodeId {
        NodeId::try_from(format!("node{n:04}")).unwrap()
    }

    fn graph(edges: &[(usize, usize, u8)]) -> Graph {
        Graph::of(edges.iter().map(|(a, b, class)| (id(*a), id(*b), *class)))
    }

    fn path(graph: &Graph, from: usize, to: usize) -> Option<Vec<usize>> {
        let route = graph.route(&id(from), &id(to))?;
        Some(route.iter().map(|node| node.as_str().trim_start_matches("node").parse().unwrap()).collect())
    }

    #[test]
    fn a_line_and_a_cut_ring_have_one_way() {
        let line = graph(&[(0, 1, 0), (1, 2, 0), (2, 3, 0)]);
        assert_eq!(path(&line, 0, 3), Some(vec![0, 1, 2, 3]));
        assert_eq!(line.routes_from(&id(3)).next(&id(0)), Some(id(2)));
        assert_eq!(line.routes_from(&id(3)).hops(&id(0)), Some(3));
        assert_eq!(path(&line, 0, 7), None);
        assert_eq!(path(&graph(&[(0, 1, 0), (2, 3, 0)]), 0, 3), None, "two islands");
        let cut = graph(&[(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 4, 0)]);
        assert_eq!(path(&cut, 4, 0), Some(vec![4, 3, 2, 1, 0]));
    }

    #[test]
    fn hops_come_first_then_the_round_trip() {
        let direct_but_slow = graph(&[(0, 1, 3), (0, 2, 0), (2, 1, 0)]);
        assert_eq!(path(&direct_but_slow, 0, 1), Some(vec![0, 1]));
        let square = graph(&[(0, 1, 0), (1, 3, 2), (0, 2, 1), (2, 3, 0)]);
        assert_eq!(path(&square, 0, 3), Some(vec![0, 2, 3]));
        assert!(round_trip_class(Some(Duration::from_micros(50))) < round_trip_class(None));
    }

    #[test]
    fn a_way_that_shares_no_edge_is_found_in_what_is_left() {
        let ring = graph(&[(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 0, 0)]);
        let other = ring.without(|a, b| (a, b) == (&id(0), &id(1)));
        assert_eq!(path(&other, 0, 1), Some(vec![0, 3, 2, 1]));
        assert_eq!(other, graph(&[(1, 2, 0), (2, 3, 0), (3, 0, 0)]));
        assert_eq!(path(&ring.without(|_, _| true), 0, 1), None);
    }

    #[test]
    fn neighbours_are_those_of_an_edge() {
        let line = graph(&[(2, 1, 0), (0, 2, 0), (3, 2, 0)]);
        for (a, b, joined) in [(1, 2, true), (2, 1, true), (0, 1, false), (3, 2, true), (0, 9, false)] {
            assert_eq!(line.joins(&id(a), &id(b)), joined, "{a} and {b}");
        }
    }

    #[test]
    fn the_version_is_that_of_the_content() {
        let one = graph(&[(0, 1, 0), (2, 1, 1)]);
        assert_eq!(one, graph(&[(1, 2, 1), (1, 2, 3), (1, 0, 0), (1, 1, 0)]));
        assert_eq!(one.routes_from(&id(0)).version(), one.version());
        assert_ne!(one.version(), graph(&[(0, 1, 0), (2, 1, 2)]).version());
    }

    #[test]
    fn a_thousand_nodes_take_a_moment() {
        // A ring of a thousand with chords; the largest swarm, seen from each tenth node.
        let edges: Vec<_> =
            (0..1000).flat_map(|n| [1, 7, 31, 100].map(|far| (n, (n + far) % 1000, 0))).collect();
        let begun = std::time::Instant::now();
        let graph = graph(&edges);
        for from in (0..1000).step_by(10) {
            assert_eq!(graph.routes_from(&id(from)).reached().count(), 999);
        }
        println!("a graph of 4,000 edges and 100 tables of 999 routes: {:?}", begun.elapsed());
    }

    fn distances(edges: &[(usize, usize, u8)], from: usize) -> BTreeMap<usize, u32> {
        let mut found = BTreeMap::from([(from, 0)]);
        let mut due = VecDeque::from([from]);
        while let Some(at) = due.pop_front() {
            for (a, b, _) in edges.iter().filter(|(a, b, _)| a != b && (*a == at || *b == at)) {
                let next = if *a == at { *b } else { *a };
                if !found.contains_key(&next) {
                    found.insert(next, found[&at] + 1);
                    due.push_back(next);
                }
            }
        }
        found
    }

    proptest! {
        #[test]
        fn routes_are_shortest_symmetric_and_without_loops(
            edges in proptest::collection::vec((0usize..12, 0usize..12, 0u8..4), 0..40)
        ) {
            let graph = graph(&edges);
            let tables: Vec<Routes> = (0..12).map(|n| graph.routes_from(&id(n))).collect();
            for from in 0..12 {
                let distances = distances(&edges, from);
                for to in (0..12).filter(|to| *to != from) {
                    let route = graph.route(&id(from), &id(to));
                    prop_assert_eq!(route.is_some(), distances.contains_key(&to));
                    let Some(route) = route else { continue };
                    prop_assert_eq!(route.len() as u32 - 1, distances[&to]);
                    let mut back = graph.route(&id(to), &id(from)).unwrap();
                    back.reverse();
                    prop_assert_eq!(&back, &route, "the way back is the way there");
                    // Followed hop by hop, by each node's own table, it is the same.
                    let mut at = id(from);
                    let mut walked = vec![at.clone()];
                    while at != id(to) {
                        let place = (0..12).find(|n| id(*n) == at).unwrap();
                        at = tables[place].next(&id(to)).unwrap();
                        walked.push(at.clone());
                        prop_assert!(walked.len() <= 12);
                    }
                    prop_assert_eq!(&walked, &route);
                }
            }
        }
    }
}
