//! Which rank sends what to which: the algorithms.
//!
//! Almost all of them are the same thing over different trees. The elements are cut into chunks; each chunk has a tree over all
//! ranks, whose root is the chunk's owner. Up the tree each rank sends what is summed of its subtree, and the owner finishes the
//! sum; down the tree the sum is spread. An all-reduce goes up and down, a reduce-scatter up, a broadcast and an all-gather
//! down. Only the direct exchange and the doubling, in which all ranks finish the sum, are something else.

use std::fmt;
use std::ops::Range;

use super::span::{Ranks, Span};
use super::wiring::Wiring;

/// How an operation is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// All-reduce: everybody sends everything to everybody. Other operations: straight from and to the owner.
    Direct,
    /// All-reduce: a chunk for each rank, straight to its owner and straight back.
    Scatter,
    /// All-reduce: each half of a node of the tree exchanges its sum with the other half, from the pairs upwards.
    Doubling,
    /// A chunk for each rank, from both sides along a ring to its owner, and back.
    Ring,
    /// The cheapest routes to the rank in the middle.
    Tree,
    /// The same in pieces, one behind the other.
    Pipeline,
    /// A chunk for each rank, over the cheapest routes to its owner.
    Forest,
    /// A tree that halves the ranks again and again, whatever the wiring.
    Binomial,
    /// Groups of ranks that are cheap to each other, and one of each group that speaks to the others.
    TwoLevel,
    /// The same with a chunk for each rank.
    TwoLevelScatter,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 10] = [
        Algorithm::Direct,
        Algorithm::Scatter,
        Algorithm::Doubling,
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::Pipeline,
        Algorithm::Forest,
        Algorithm::Binomial,
        Algorithm::TwoLevel,
        Algorithm::TwoLevelScatter,
    ];

    /// Its name in documents: one word.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Direct => "direct",
            Algorithm::Scatter => "scatter",
            Algorithm::Doubling => "doubling",
            Algorithm::Ring => "ring",
            Algorithm::Tree => "tree",
            Algorithm::Pipeline => "pipeline",
            Algorithm::Forest => "forest",
            Algorithm::Binomial => "binomial",
            Algorithm::TwoLevel => "two_level",
            Algorithm::TwoLevelScatter => "two_level_scatter",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the ranks do together. Lengths are counts of `f32`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Every rank gets the sum of what all have.
    AllReduce {
        /// Elements.
        len: usize,
    },
    /// Every rank gets its part of the sum of what all have, see [`part_of`].
    ReduceScatter {
        /// Elements of the whole sum.
        len: usize,
    },
    /// Every rank gets what all have, in the order of the ranks.
    AllGather {
        /// Elements of each rank.
        lens: Vec<usize>,
    },
    /// Every rank gets what one has.
    Broadcast {
        /// The one.
        root: usize,
        /// Elements.
        len: usize,
    },
    /// One rank gets what another has.
    Send {
        /// The other.
        from: usize,
        /// The one.
        to: usize,
        /// Elements.
        len: usize,
    },
}

/// The elements of a sum of `len` that are rank `rank`'s after a reduce-scatter over `ranks` ranks.
pub fn part_of(len: usize, ranks: usize, rank: usize) -> Range<usize> {
    let bound = |rank: usize| (len as u128 * rank as u128 / ranks.max(1) as u128) as usize;
    bound(rank)..bound(rank + 1)
}

/// One message: of a chunk, the sum over these ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) ranks: Ranks,
}

/// Elements that travel together, and how; no move comes before one that it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) range: Range<usize>,
    pub(super) moves: Vec<Move>,
    /// The ranks whose values are added up.
    pub(super) summed: Ranks,
    /// The ranks that end with the result.
    pub(super) wanted: Ranks,
}

/// For each rank the one it sends to on the way to the root, which has itself.
type Parents = Vec<usize>;

/// Pieces of a pipeline at most, and elements of a piece at least.
const PIECES: usize = 8;
const PIECE_LEN: usize = 4096;

/// The moves of `operation` by `algorithm`; `None` where it makes no sense for this operation or this wiring.
pub(super) fn chunks(operation: &Operation, algorithm: Algorithm, wiring: &Wiring) -> Option<Vec<Chunk>> {
    let ranks = wiring.ranks();
    let all = Span::root(ranks).ranks();
    let ways = Ways { wiring, groups: wiring.groups(), ring: Vec::new() };
    let ways = if algorithm == Algorithm::Ring { Ways { ring: ring(wiring)?, ..ways } } else { ways };
    let mut chunks = match operation {
        Operation::AllReduce { len } => match algorithm {
            Algorithm::Direct | Algorithm::Doubling => {
                let moves = if algorithm == Algorithm::Direct { exchange(ranks) } else { doubling(ranks) };
                vec![Chunk { range: 0..*len, moves, summed: all, wanted: all }]
            }
            _ => ways
                .owners(algorithm, *len)?
                .into_iter()
                .map(|(range, parents)| {
                    let moves = up(&parents).into_iter().chain(down(&parents, all)).collect();
                    Chunk { range, moves, summed: all, wanted: all }
                })
                .collect(),
        },
        Operation::ReduceScatter { len } => (0..ranks)
            .map(|rank| {
                let moves = up(&ways.to(algorithm, rank)?);
                Some(Chunk { range: part_of(*len, ranks, rank), moves, summed: all, wanted: 1 << rank })
            })
            .collect::<Option<_>>()?,
        Operation::AllGather { lens } => {
            let mut at = 0usize;
            let parts = lens.iter().enumerate().map(|(rank, len)| {
                let range = at..at.checked_add(*len)?;
                at = range.end;
                let moves = down(&ways.to(algorithm, rank)?, 1 << rank);
                Some(Chunk { range, moves, summed: 1 << rank, wanted: all })
            });
            parts.collect::<Option<_>>()?
        }
        Operation::Broadcast { root, len } => {
            let pieces = if algorithm == Algorithm::Pipeline { pieces(*len) } else { 1 };
            let parents = match algorithm {
                Algorithm::Pipeline => ways.to(Algorithm::Tree, *root)?,
                algorithm => ways.to(algorithm, *root)?,
            };
            let moves = down(&parents, 1 << root);
            (0..pieces)
                .map(|piece| Chunk {
                    range: part_of(*len, pieces, piece),
                    moves: moves.clone(),
                    summed: 1 << root,
                    wanted: all & !(1 << root),
                })
                .collect()
        }
        Operation::Send { from, to, len } => {
            if algorithm != Algorithm::Direct || from == to || *from >= ranks || *to >= ranks {
                return None;
            }
            let moves = vec![Move { from: *from, to: *to, ranks: 1 << from }];
            vec![Chunk { range: 0..*len, moves, summed: 1 << from, wanted: 1 << to }]
        }
    };
    chunks.retain(|chunk| !chunk.range.is_empty());
    let allowed = |chunk: &Chunk| chunk.moves.iter().all(|one| wiring.allows(one.from, one.to));
    chunks.iter().all(allowed).then_some(chunks)
}

/// The trees of a wiring.
struct Ways<'a> {
    wiring: &'a Wiring,
    groups: Option<Vec<usize>>,
    ring: Vec<usize>,
}

impl Ways<'_> {
    /// The chunks of an all-reduce, each with its tree.
    fn owners(&self, algorithm: Algorithm, len: usize) -> Option<Vec<(Range<usize>, Parents)>> {
        let ranks = self.wiring.ranks();
        let each = |algorithm| {
            let tree = |rank| Some((part_of(len, ranks, rank), self.to(algorithm, rank)?));
            (0..ranks).map(tree).collect()
        };
        match algorithm {
            Algorithm::Scatter => each(Algorithm::Direct),
            Algorithm::Ring | Algorithm::Forest | Algorithm::TwoLevelScatter => each(algorithm),
            Algorithm::Tree | Algorithm::TwoLevel => Some(vec![(0..len, self.to(algorithm, self.middle())?)]),
            Algorithm::Binomial => Some(vec![(0..len, self.to(algorithm, 0)?)]),
            Algorithm::Pipeline => {
                let (pieces, tree) = (pieces(len), self.to(Algorithm::Tree, self.middle())?);
                (pieces > 1)
                    .then(|| (0..pieces).map(|piece| (part_of(len, pieces, piece), tree.clone())).collect())
            }
            Algorithm::Direct | Algorithm::Doubling => None,
        }
    }

    /// The rank from which the farthest is nearest.
    fn middle(&self) -> usize {
        let ranks = self.wiring.ranks();
        let farthest = |from: usize| (0..ranks).map(|to| self.wiring.cost(from, to)).fold(0.0, f64::max);
        (0..ranks).min_by(|&a, &b| farthest(a).total_cmp(&farthest(b))).unwrap_or(0)
    }

    /// A tree with this root.
    fn to(&self, algorithm: Algorithm, root: usize) -> Option<Parents> {
        let ranks = self.wiring.ranks();
        match algorithm {
            Algorithm::Direct => Some(vec![root; ranks]),
            Algorithm::Tree | Algorithm::Forest => {
                Some((0..ranks).map(|rank| self.wiring.towards(root, rank)).collect())
            }
            Algorithm::Ring => arms(&self.ring, root),
            Algorithm::Binomial => {
                let mut parents = vec![0; ranks];
                halve(Span::root(ranks), &mut parents);
                // Over ranks counted from the root on, which keeps the halves together where the root is rank 0.
                Some((0..ranks).map(|rank| (parents[(rank + ranks - root) % ranks] + root) % ranks).collect())
            }
            Algorithm::TwoLevel | Algorithm::TwoLevelScatter => self.two_levels(root),
            Algorithm::Scatter | Algorithm::Doubling | Algorithm::Pipeline => None,
        }
    }

    /// Everybody to one of the own group, and these to the root.
    fn two_levels(&self, root: usize) -> Option<Parents> {
        let groups = self.groups.as_ref()?;
        let own = |rank: usize| groups.get(rank).copied().unwrap_or(0);
        let speaker = |group: usize| {
            let members: Vec<usize> = (0..groups.len()).filter(|&rank| own(rank) == group).collect();
            // With a chunk for each rank the speakers take turns.
            if own(root) == group {
                root
            } else {
                members.get(root % members.len().max(1)).copied().unwrap_or(root)
            }
        };
        let parent = |rank: usize| {
            let speaker = speaker(own(rank));
            if rank == speaker { root } else { speaker }
        };
        Some((0..groups.len()).map(parent).collect())
    }
}

fn pieces(len: usize) -> usize {
    (len / PIECE_LEN).clamp(1, PIECES)
}

/// The first rank of the right half sends to that of the left half.
fn halve(span: Span, parents: &mut [usize]) {
    if let Some((left, right)) = span.children() {
        parents[usize::from(right.first)] = usize::from(left.first);
        halve(left, parents);
        halve(right, parents);
    }
}

/// The ranks below each, itself included, and how deep it lies.
fn subtrees(parents: &Parents) -> (Vec<Ranks>, Vec<usize>) {
    let (mut below, mut depth) = (vec![0; parents.len()], vec![0; parents.len()]);
    for (rank, depth) in depth.iter_mut().enumerate() {
        let mut at = rank;
        below[at] |= 1 << rank;
        while parents[at] != at {
            at = parents[at];
            below[at] |= 1 << rank;
            *depth += 1;
        }
    }
    (below, depth)
}

/// The deepest first.
fn up(parents: &Parents) -> Vec<Move> {
    let (below, depth) = subtrees(parents);
    let mut order: Vec<usize> = (0..parents.len()).filter(|&rank| parents[rank] != rank).collect();
    order.sort_by_key(|&rank| std::cmp::Reverse(depth[rank]));
    order.into_iter().map(|from| Move { from, to: parents[from], ranks: below[from] }).collect()
}

/// The nearest to the root first; of these, those with most below them.
fn down(parents: &Parents, ranks: Ranks) -> Vec<Move> {
    let (below, depth) = subtrees(parents);
    let mut order: Vec<usize> = (0..parents.len()).filter(|&rank| parents[rank] != rank).collect();
    order.sort_by_key(|&rank| (depth[rank], std::cmp::Reverse(below[rank].count_ones())));
    order.into_iter().map(|to| Move { from: parents[to], to, ranks }).collect()
}

fn exchange(ranks: usize) -> Vec<Move> {
    // Each begins with the next one, so that not all send to the same at first.
    let to =
        |step: usize| (0..ranks).map(move |from| Move { from, to: (from + step) % ranks, ranks: 1 << from });
    (1..ranks).flat_map(to).collect()
}

fn doubling(ranks: usize) -> Vec<Move> {
    let mut moves = Vec::new();
    join(Span::root(ranks), &mut moves);
    moves
}

/// All ranks of a node get its sum: both halves first, then each rank with one of the other half. The left one may have one rank
/// more; it has the last of the right half for partner too, and only listens.
fn join(span: Span, moves: &mut Vec<Move>) {
    let Some((left, right)) = span.children() else { return };
    join(left, moves);
    join(right, moves);
    for rank in left.first..left.past {
        let partner = (right.first + (rank - left.first)).min(right.past - 1);
        let (rank, twin) = (usize::from(rank), left.first + (partner - right.first));
        moves.push(Move { from: usize::from(partner), to: rank, ranks: right.ranks() });
        if usize::from(twin) == rank {
            moves.push(Move { from: rank, to: usize::from(partner), ranks: left.ranks() });
        }
    }
}

/// The two ways along a ring to the root, as even as can be.
fn arms(ring: &[usize], root: usize) -> Option<Parents> {
    let ranks = ring.len();
    let at = ring.iter().position(|&rank| rank == root)?;
    let mut parents = vec![root; ranks];
    let rank = |place: usize| ring[place % ranks];
    for step in 1..ranks {
        if step <= ranks / 2 {
            parents[rank(at + step)] = rank(at + step - 1);
        } else {
            parents[rank(at + step)] = rank(at + step + 1);
        }
    }
    Some(parents)
}

/// Tries of the search for a ring; a wiring in which none is found soon gets one that takes routes.
const RING_TRIES: usize = 20_000;

/// The ranks in the order of a ring: along links if there is one (that found first), else always to the cheapest next.
/// `None` for fewer than three, which are no ring.
fn ring(wiring: &Wiring) -> Option<Vec<usize>> {
    let ranks = wiring.ranks();
    if ranks < 3 {
        return None;
    }
    let linked = |a: usize, b: usize| wiring.route_of(a, b).len() == 1;
    let mut nearest: Vec<Vec<usize>> =
        (0..ranks).map(|rank| (0..ranks).filter(|&to| to != rank).collect()).collect();
    for (rank, others) in nearest.iter_mut().enumerate() {
        others.sort_by(|&a, &b| wiring.cost(rank, a).total_cmp(&wiring.cost(rank, b)));
    }
    // Depth first: for each place the next choice to try.
    let (mut ring, mut choices, mut tries) = (vec![0], vec![0usize], 0);
    while let Some(choice) = choices.last_mut() {
        let last = ring.last().copied().unwrap_or(0);
        if ring.len() == ranks && linked(last, 0) {
            return Some(ring);
        }
        tries += 1;
        if tries > RING_TRIES {
            break;
        }
        match nearest[last].get(*choice) {
            Some(&next) => {
                *choice += 1;
                if linked(last, next) && !ring.contains(&next) {
                    ring.push(next);
                    choices.push(0);
                }
            }
            None => {
                ring.pop();
                choices.pop();
            }
        }
    }
    let mut ring = vec![0];
    while let Some(next) = nearest[*ring.last()?].iter().copied().find(|next| !ring.contains(next)) {
        ring.push(next);
    }
    Some(ring)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::wiring::Link;

    #[test]
    fn parts_are_even_and_leave_nothing_out() {
        for (len, ranks) in [(0, 3), (1, 3), (10, 3), (7, 7), (5, 32)] {
            let parts: Vec<_> = (0..ranks).map(|rank| part_of(len, ranks, rank)).collect();
            assert_eq!(parts.iter().map(Range::len).sum::<usize>(), len);
            assert!(parts.iter().all(|part| (len / ranks..=len.div_ceil(ranks)).contains(&part.len())));
        }
    }

    #[test]
    fn a_ring_follows_the_links_where_it_can() {
        // 0-2-4-1-3-0
        let links = [(0, 2), (2, 4), (4, 1), (1, 3), (3, 0)];
        let links = links.map(|(a, b)| Link { a, b, latency_s: 1e-5, bytes_per_s: 1e9 });
        let wiring = Wiring::new(5, links.to_vec()).unwrap();
        assert_eq!(ring(&wiring).unwrap(), [0, 2, 4, 1, 3]);
        assert_eq!(arms(&[0, 2, 4, 1, 3], 4).unwrap(), [2, 4, 4, 1, 4].to_vec());
    }

    #[test]
    fn a_doubling_takes_as_many_rounds_as_the_tree_is_deep() {
        assert_eq!(
            doubling(2),
            [Move { from: 1, to: 0, ranks: 0b10 }, Move { from: 0, to: 1, ranks: 0b01 },]
        );
        // Rank 1 of three listens only.
        let last: Vec<_> = doubling(3)[2..].to_vec();
        assert_eq!(
            last,
            [
                Move { from: 2, to: 0, ranks: 0b100 },
                Move { from: 0, to: 2, ranks: 0b011 },
                Move { from: 2, to: 1, ranks: 0b100 },
            ]
        );
    }
}
