//! Reduces one split of the cache for some queries, and merges what was reduced.

use std::ops::Range;

use super::super::cache::{FACTOR_DIMS, Kept};
use super::super::lanes::{Kernel, LANES, Lanes};
use super::super::tiles::LINE;
use super::{Attention, Page, SPLIT, View};
use crate::kv::PAGE;

/// Queries whose scores are computed together: each element of the cache that is read serves all of them.
pub(super) const QUERIES: usize = 4;
/// Pages that are asked for before they are read. Two were measured to bring no more.
const AHEAD: usize = 1;
/// Groups of sixteen positions in a page.
const POSITION_GROUPS: usize = PAGE / LANES;

/// For each of some queries: the largest score, the sum of the weights e^(score - largest), and the values times their
/// weights.
pub(crate) struct Partial {
    /// Largest and sum.
    totals: Vec<(f32, f32)>,
    values: Vec<f32>,
    padded: usize,
}

impl Partial {
    /// Room for so many queries of heads of `padded` dimensions.
    pub(super) fn new(queries: usize, padded: usize) -> Partial {
        Partial { totals: vec![NOTHING; queries], values: vec![0.0; queries * padded], padded }
    }

    /// What [`Partial::new`] allocates, and itself.
    pub(super) fn bytes(queries: usize, padded: usize) -> usize {
        size_of::<Partial>() + queries * (size_of::<(f32, f32)>() + padded * size_of::<f32>())
    }

    /// Nothing seen, for so many queries; not more than there is room for.
    pub(super) fn clear(&mut self, queries: usize) {
        self.totals.truncate(queries);
        self.totals.fill(NOTHING);
        self.totals.resize(queries, NOTHING);
    }

    /// The sum of a query's weights.
    pub(super) fn weight(&self, query: usize) -> f32 {
        self.totals[query].1
    }

    /// The sums of a query's values.
    pub(super) fn values(&self, query: usize) -> &[f32] {
        &self.values[query * self.padded..(query + 1) * self.padded]
    }
}

/// Of no position: what is merged with it stays as it is.
const NOTHING: (f32, f32) = (f32::NEG_INFINITY, 0.0);

/// Reduces one split for all queries of an attention.
pub(super) struct Reduce<'a, 'b, E> {
    pub(super) attention: &'a Attention<'b, E>,
    pub(super) split: usize,
    pub(super) scores: &'a mut [[f32; SPLIT]],
    pub(super) partial: &'a mut Partial,
}

impl<E: Kept> Kernel for Reduce<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let queries = self.attention.queries();
        self.partial.clear(queries);
        let mut query = 0;
        while query < queries {
            query += match queries - query {
                1 => self.reduce::<L, 1>(lanes, query),
                2 => self.reduce::<L, 2>(lanes, query),
                3 => self.reduce::<L, 3>(lanes, query),
                _ => self.reduce::<L, 4>(lanes, query),
            };
        }
    }
}

impl<'b, E: Kept> Reduce<'_, 'b, E> {
    /// Reduces `N` queries from `first` on.
    #[inline(always)]
    fn reduce<L: Lanes, const N: usize>(&mut self, lanes: L, first: usize) -> usize {
        let mut sees = [const { 0..0 }; N];
        for (n, sees) in sees.iter_mut().enumerate() {
            *sees = self.attention.sees(first + n, self.split);
        }
        // Rows follow each other, so the first query's range begins first and the last one's ends last. Where one sees
        // nothing its range is empty.
        let seen = sees[0].start.min(sees[N - 1].start)..sees[N - 1].end;
        if seen.is_empty() {
            return N;
        }
        self.score::<L, N>(lanes, first, seen.clone());
        for (n, sees) in sees.into_iter().enumerate() {
            if !sees.is_empty() {
                self.partial.totals[first + n] = weigh(lanes, &mut self.scores[n], sees, seen.clone());
            } else {
                self.scores[n][seen.clone()].fill(0.0);
            }
        }
        self.sum_values::<L, N>(lanes, first, seen);
        N
    }

    /// The scores of the pages that hold `seen`.
    #[inline(always)]
    fn score<L: Lanes, const N: usize>(&mut self, lanes: L, first: usize, seen: Range<usize>) {
        let dim = self.attention.view.heads.dim;
        let mut queries: [&[f32]; N] = [&[]; N];
        for (n, query) in queries.iter_mut().enumerate() {
            *query = &self.attention.query(first + n)[..dim];
        }
        // Positions scored at once, in groups of sixteen: as many sums as fit the registers.
        let at_once = if L::ACCUMULATORS >= 16 { POSITION_GROUPS } else { 1 };
        let pages = seen.start / PAGE..seen.end.div_ceil(PAGE);
        for page in pages.clone() {
            let Page { keys, key_factors, .. } = self.page(page);
            let next = self.ahead(&pages, page - pages.start);
            // A row for each dimension, the positions in groups of sixteen.
            let rows = &keys.as_chunks::<LANES>().0.as_chunks::<POSITION_GROUPS>().0[..dim];
            let factors = key_factors.as_chunks::<LANES>().0.as_chunks::<POSITION_GROUPS>().0;
            let next = next.as_chunks::<LANES>().0;
            let block = if E::FACTORS { FACTOR_DIMS } else { dim };
            for groups in (0..POSITION_GROUPS).step_by(at_once) {
                let mut totals = [[lanes.splat(0.0); POSITION_GROUPS]; N];
                for (index, rows) in rows.chunks(block).enumerate() {
                    let mut sums = [[lanes.splat(0.0); POSITION_GROUPS]; N];
                    for (d, row) in rows.iter().enumerate() {
                        let d = index * block + d;
                        // Evenly over all passes: memory takes only so many requests at a time.
                        let ahead = groups * dim + d * at_once;
                        prefetch(lanes, next[ahead..ahead + at_once].as_flattened());
                        let mut keys = [lanes.splat(0.0); POSITION_GROUPS];
                        for group in 0..at_once {
                            keys[group] = E::load(lanes, &row[groups + group]);
                        }
                        for n in 0..N {
                            let element = lanes.splat(queries[n][d]);
                            for group in 0..at_once {
                                sums[n][group] = lanes.fma(element, keys[group], sums[n][group]);
                            }
                        }
                    }
                    if !E::FACTORS {
                        totals = sums;
                        break;
                    }
                    for group in 0..at_once {
                        let factor = lanes.load(&factors[index][groups + group]);
                        for n in 0..N {
                            totals[n][group] = lanes.fma(sums[n][group], factor, totals[n][group]);
                        }
                    }
                }
                for (totals, scores) in totals.iter().zip(self.scores.iter_mut()) {
                    let places = scores.as_chunks_mut::<LANES>().0;
                    for (group, &score) in totals.iter().enumerate().take(at_once) {
                        lanes.store(&mut places[page * POSITION_GROUPS + groups + group], score);
                    }
                }
            }
        }
    }

    /// What is read [`AHEAD`] pages after the split's `at`-th: its keys come first, then its values, then the keys of the next
    /// split, or of the next head. Where nothing follows, something that is there.
    #[inline(always)]
    fn ahead(&self, pages: &Range<usize>, at: usize) -> &'b [E] {
        let (at, count) = (at + AHEAD, pages.len());
        if at < count {
            return self.page(pages.start + at).keys;
        }
        if at < 2 * count {
            return self.page(pages.start + at - count).values;
        }
        let view = self.attention.view;
        let following = (self.split + 1) * (SPLIT / PAGE) + at - 2 * count;
        if following < view.pages.len() {
            return view.page(following).keys;
        }
        let next_head = (view.kv_head + 1).min(view.heads.kv_heads - 1);
        let first = self.attention.splits().start * (SPLIT / PAGE) + at - 2 * count;
        View { kv_head: next_head, ..view }.page(first.min(view.pages.len() - 1)).keys
    }

    /// A page of the split.
    #[inline(always)]
    fn page(&self, page: usize) -> Page<'b, E> {
        self.attention.view.page(self.split * (SPLIT / PAGE) + page)
    }

    /// The values of `seen`, times their weights.
    #[inline(always)]
    fn sum_values<L: Lanes, const N: usize>(&mut self, lanes: L, first: usize, seen: Range<usize>) {
        let vectors = self.partial.padded / LANES;
        let mut start = 0;
        while start < vectors {
            // As many sums as fit the registers.
            start += match (L::ACCUMULATORS / N).min(vectors - start) {
                4.. => self.sum_vectors::<L, N, 4>(lanes, first, seen.clone(), start),
                2..4 => self.sum_vectors::<L, N, 2>(lanes, first, seen.clone(), start),
                _ => self.sum_vectors::<L, N, 1>(lanes, first, seen.clone(), start),
            };
        }
    }

    /// The same for `W` vectors of dimensions from `start` on.
    #[inline(always)]
    fn sum_vectors<L: Lanes, const N: usize, const W: usize>(
        &mut self,
        lanes: L,
        first: usize,
        seen: Range<usize>,
        start: usize,
    ) -> usize {
        let padded = self.partial.padded;
        let vectors = padded / LANES;
        let mut weights = [&[0.0; SPLIT]; N];
        for (weights, scores) in weights.iter_mut().zip(self.scores.iter()) {
            *weights = scores;
        }
        let mut sums = [[lanes.splat(0.0); W]; N];
        let pages = seen.start / PAGE..seen.end.div_ceil(PAGE);
        for page in pages.clone() {
            let positions = seen.start.max(page * PAGE)..seen.end.min((page + 1) * PAGE);
            let skip = (positions.start - page * PAGE) * vectors + start;
            let Page { values, value_factors, .. } = self.page(page);
            let rows = values.as_chunks::<LANES>().0[skip..].chunks(vectors);
            let blocks = self.attention.view.heads.factor_blocks();
            let next = self.ahead(&pages, pages.len() + page - pages.start);
            let next = next.as_chunks::<LANES>().0[skip..].chunks(vectors);
            for ((position, row), next) in positions.zip(rows).zip(next) {
                let (Some(row), Some(next)) = (row.first_chunk::<W>(), next.first_chunk::<W>()) else {
                    break;
                };
                prefetch(lanes, next.as_flattened());
                let mut values = [lanes.splat(0.0); W];
                for (value, numbers) in values.iter_mut().zip(row) {
                    *value = E::load(lanes, numbers);
                }
                if E::FACTORS {
                    let factors = &value_factors[position % PAGE * blocks..][..blocks];
                    for (vector, value) in values.iter_mut().enumerate() {
                        let factor = factors[(start + vector) * LANES / FACTOR_DIMS];
                        *value = lanes.mul(*value, lanes.splat(factor));
                    }
                }
                for n in 0..N {
                    let weight = lanes.splat(weights[n][position % SPLIT]);
                    for (sum, value) in sums[n].iter_mut().zip(values) {
                        *sum = lanes.fma(weight, value, *sum);
                    }
                }
            }
        }
        for (n, sums) in sums.into_iter().enumerate() {
            let at = (first + n) * padded;
            let places = self.partial.values[at..at + padded].as_chunks_mut::<LANES>().0;
            for (place, sum) in places[start..].iter_mut().zip(sums) {
                lanes.store(place, sum);
            }
        }
        W
    }
}

/// Asks for a row before it is read.
#[inline(always)]
fn prefetch<L: Lanes, E>(lanes: L, row: &[E]) {
    let at = row.as_ptr().cast::<u8>();
    for offset in (0..size_of_val(row)).step_by(LINE) {
        lanes.prefetch(at.wrapping_add(offset));
    }
}

/// The lanes of a piece of sixteen positions that are seen, and `rest` in the others.
#[inline(always)]
fn only<L: Lanes>(lanes: L, sees: &Range<usize>, piece: usize, numbers: L::F32, rest: L::F32) -> L::F32 {
    let start = sees.start.saturating_sub(piece * LANES).min(LANES);
    let end = sees.end.saturating_sub(piece * LANES).min(LANES);
    lanes.first(end, lanes.first(start, rest, numbers), rest)
}

/// Makes weights of one query's scores: e^(score - largest) where it sees, 0 in the rest of `seen`. Returns the largest
/// score and the sum of the weights.
#[inline(always)]
fn weigh<L: Lanes>(
    lanes: L,
    scores: &mut [f32; SPLIT],
    sees: Range<usize>,
    seen: Range<usize>,
) -> (f32, f32) {
    let places = scores.as_chunks_mut::<LANES>().0;
    let pieces = seen.start / LANES..seen.end.div_ceil(LANES);
    let mut largest = lanes.splat(f32::NEG_INFINITY);
    for piece in pieces.clone() {
        let scores = only(lanes, &sees, piece, lanes.load(&places[piece]), lanes.splat(f32::NEG_INFINITY));
        largest = lanes.max(scores, largest);
    }
    let largest = lanes.largest(largest);
    let mut sum = lanes.splat(0.0);
    for piece in pieces {
        let weights = lanes.exp(lanes.sub(lanes.load(&places[piece]), lanes.splat(largest)));
        let weights = only(lanes, &sees, piece, weights, lanes.splat(0.0));
        sum = lanes.add(sum, weights);
        lanes.store(&mut places[piece], weights);
    }
    (largest, lanes.sum(sum))
}

/// Merges a split into the totals of the splits before it.
pub(super) struct Merge<'a> {
    pub(super) total: &'a mut Partial,
    pub(super) partial: &'a Partial,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let padded = self.partial.padded;
        for (query, &(largest, weight)) in self.partial.totals.iter().enumerate() {
            let total = &mut self.total.totals[query];
            let totals = self.total.values[query * padded..(query + 1) * padded].as_chunks_mut::<LANES>().0;
            let values = self.partial.values[query * padded..(query + 1) * padded].as_chunks::<LANES>().0;
            if weight == 0.0 {
                continue;
            }
            if total.1 == 0.0 {
                *total = (largest, weight);
                totals.copy_from_slice(values);
                continue;
            }
            let both = if largest > total.0 { largest } else { total.0 };
            let (keep, take) = (exp(lanes, total.0 - both), exp(lanes, largest - both));
            *total = (both, total.1 * keep + weight * take);
            for (total, values) in totals.iter_mut().zip(values) {
                let kept = lanes.mul(lanes.load(total), lanes.splat(keep));
                lanes.store(total, lanes.fma(lanes.load(values), lanes.splat(take), kept));
            }
        }
    }
}

/// e^x, with the bits that it has in a vector.
#[inline(always)]
fn exp<L: Lanes>(lanes: L, x: f32) -> f32 {
    let mut lane = [0.0; LANES];
    lanes.store(&mut lane, lanes.exp(lanes.splat(x)));
    lane[0]
}
