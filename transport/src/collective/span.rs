//! The one association that every sum has: a balanced binary tree over the ranks.
//!
//! Floating-point addition is not associative, so bits depend on how a sum is bracketed. Here the brackets depend on the number
//! of ranks and on nothing else: the sum over ranks `[first, past)` is the sum over its left half (the larger one, if they
//! differ) plus the sum over its right half. A schedule may choose which rank adds, when, and what travels over which link; it
//! moves and adds only nodes of this tree, so every schedule on every wiring gives the same bits.

/// Ranks of a group at most.
pub const MAX_RANKS: usize = 32;

/// A set of ranks, a bit each.
pub(super) type Ranks = u64;

/// A node of the tree: the sum over the ranks `[first, past)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Span {
    pub(super) first: u8,
    pub(super) past: u8,
}

impl Span {
    /// The sum over all of `ranks` ranks, which are at least 1 and at most [`MAX_RANKS`].
    pub(super) fn root(ranks: usize) -> Span {
        Span { first: 0, past: ranks.min(MAX_RANKS) as u8 }
    }

    /// What one rank brings along.
    pub(super) fn leaf(rank: usize) -> Span {
        let first = rank.min(MAX_RANKS - 1) as u8;
        Span { first, past: first + 1 }
    }

    /// What it is the sum of, unless one rank brings it along.
    pub(super) fn children(self) -> Option<(Span, Span)> {
        let ranks = self.past - self.first;
        let middle = self.first + ranks.div_ceil(2);
        (ranks > 1).then_some((Span { past: middle, ..self }, Span { first: middle, ..self }))
    }

    /// Its ranks.
    pub(super) fn ranks(self) -> Ranks {
        (1 << self.past) - (1 << self.first)
    }

    /// The fewest nodes under this one whose ranks together are `ranks`, in rising order.
    pub(super) fn cover(self, ranks: Ranks) -> Vec<Span> {
        let mut spans = Vec::new();
        let mut left = vec![self];
        while let Some(span) = left.pop() {
            let own = span.ranks();
            if own & ranks == own {
                spans.push(span);
            } else if own & ranks != 0
                && let Some((low, high)) = span.children()
            {
                left.extend([high, low]);
            }
        }
        spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_left_half_is_the_larger_one() {
        let (left, right) = Span::root(5).children().unwrap();
        assert_eq!((left, right), (Span { first: 0, past: 3 }, Span { first: 3, past: 5 }));
        assert_eq!(left.children().unwrap().0, Span { first: 0, past: 2 });
        assert_eq!(Span::leaf(4).children(), None);
    }

    #[test]
    fn a_cover_has_the_ranks_asked_for_and_no_two_nodes_that_could_be_one() {
        for ranks in 1..=12 {
            let root = Span::root(ranks);
            for set in 0..(1u64 << ranks) {
                let cover = root.cover(set);
                assert_eq!(cover.iter().fold(0, |sum, span| sum | span.ranks()), set);
                assert_eq!(cover.iter().map(|span| span.ranks().count_ones()).sum::<u32>(), set.count_ones());
                assert!(cover.windows(2).all(|two| two[0].past <= two[1].first));
            }
        }
        assert_eq!(
            Span::root(8).cover(0b1111_0111),
            [(0, 2), (2, 3), (4, 8)].map(|(first, past)| Span { first, past })
        );
        assert_eq!(Span::root(32).cover((1 << 32) - 1), [Span::root(32)]);
    }
}
