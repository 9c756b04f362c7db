//! Grouped-query attention of the rows of a step over their sequences' cache.
//!
//! The cache is walked in splits of [`SPLIT`] positions that begin at fixed positions. A split is reduced on its own
//! (largest score, sum of weights, weighted values), and splits are merged in rising order (online softmax, Milakov and
//! Gimelshein 2018, arXiv:1805.02867). A row sees its own position and those before it, of a window if there is one. So
//! what a row becomes depends on its position and on the cache, not on the rows beside it, nor on how the work is cut:
//! several rows at once read keys and values once (prompts), or the splits of one row are shared out (decoding).

mod split;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::cache::{FACTOR_DIMS, Kept, LayerNumbers, LayerView, page_factors};
use super::disjoint::Disjoint;
use super::lanes::LANES;
use super::team::Team;
use crate::kv::{KvCache, PAGE};
use split::{Merge, Partial, Reduce};

/// Positions of a split.
pub(crate) const SPLIT: usize = 4 * PAGE;
/// Rows of one piece of work, where a sequence has several.
const TILE_ROWS: usize = 4;
/// Splits that are shared out before they are merged.
const SHARED_SPLITS: usize = 64;

/// The shape of the heads: some consecutive query heads, and the KV heads that they share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    /// Query heads.
    pub(crate) heads: usize,
    /// Key and value heads that they need.
    pub(crate) kv_heads: usize,
    /// Query heads of a KV head in the whole model.
    group: usize,
    /// Of the first KV head, those that are not among these.
    lead: usize,
    /// Width of a head.
    pub(crate) dim: usize,
}

impl Heads {
    /// The query heads in `range` of a model that has `group` of them for each KV head.
    pub(crate) fn new(range: Range<usize>, group: usize, dim: usize) -> Heads {
        let kv_heads = range.end.div_ceil(group) - range.start / group;
        Heads { heads: range.len(), kv_heads, group, lead: range.start % group, dim }
    }

    /// The most query heads of a KV head.
    pub(crate) fn group(self) -> usize {
        self.group.min(self.heads)
    }

    /// The query heads of a KV head.
    fn of_kv_head(self, kv_head: usize) -> Range<usize> {
        let start = (kv_head * self.group).saturating_sub(self.lead);
        start..((kv_head + 1) * self.group - self.lead).min(self.heads)
    }

    /// The KV head of a query head.
    pub(crate) fn kv_head_of(self, head: usize) -> usize {
        (self.lead + head) / self.group
    }

    /// Width of a head in the cache.
    pub(crate) fn padded(self) -> usize {
        self.dim.next_multiple_of(LANES)
    }

    /// Blocks of dimensions that share a factor in a cache of integers.
    pub(crate) fn factor_blocks(self) -> usize {
        self.dim.div_ceil(FACTOR_DIMS)
    }

    /// Elements of one head in a page.
    pub(crate) fn page_elements(self) -> usize {
        PAGE * self.padded()
    }
}

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    /// Its place in the cache.
    pub(crate) place: usize,
    /// The position of the first row.
    pub(crate) pos: usize,
    /// The first row within the batch.
    pub(crate) first_row: usize,
    /// How many.
    pub(crate) rows: usize,
}

/// One piece of work but for the KV head: some rows of one span.
#[derive(Debug, Clone, Copy)]
struct Tile {
    span: Span,
    /// The first of the span's rows, and how many.
    start: usize,
    rows: usize,
}

/// What attention needs beside cache and queries, allocated once.
pub(crate) struct AttentionScratch {
    threads: Vec<Mutex<Reduction>>,
    /// Totals of the (tile of one row, KV head) pairs of which the splits are shared out, and these splits.
    shared: Vec<Partial>,
    splits: Vec<Partial>,
    tiles: Vec<Tile>,
}

/// What a thread reduces: a tile's totals and the split that is merged into them next.
struct Reduction {
    total: Partial,
    partial: Partial,
    scores: Box<[[f32; SPLIT]]>,
}

impl AttentionScratch {
    /// Scratch for a team of `threads`, steps of up to `rows` rows and sequences of up to `context` positions.
    pub(crate) fn new(heads: Heads, threads: usize, rows: usize, context: usize) -> Self {
        let tile = || Partial::new(TILE_ROWS * heads.group(), heads.padded());
        let row = || Partial::new(heads.group(), heads.padded());
        let reduction = || Reduction {
            total: tile(),
            partial: tile(),
            scores: vec![[0.0; SPLIT]; split::QUERIES].into(),
        };
        let splits = context.div_ceil(SPLIT).min(SHARED_SPLITS);
        AttentionScratch {
            threads: (0..threads).map(|_| Mutex::new(reduction())).collect(),
            shared: (0..shared_items(threads)).map(|_| row()).collect(),
            splits: (0..shared_items(threads) * splits).map(|_| row()).collect(),
            tiles: Vec::with_capacity(rows),
        }
    }

    /// Bytes for each thread, at most.
    pub(crate) fn bytes_per_thread(heads: Heads) -> usize {
        let partial = |queries| Partial::bytes(queries, heads.padded());
        2 * partial(TILE_ROWS * heads.group())
            + split::QUERIES * SPLIT * size_of::<f32>()
            + SHARED_ITEMS_PER_THREAD * (SHARED_SPLITS + 1) * partial(heads.group())
    }
}

/// With no more (tile, KV head) pairs than this for each thread, their splits are shared out.
const SHARED_ITEMS_PER_THREAD: usize = 2;

fn shared_items(threads: usize) -> usize {
    if threads == 1 { 0 } else { SHARED_ITEMS_PER_THREAD * threads }
}

/// The layer of a cache.
#[derive(Clone, Copy)]
pub(crate) struct LayerCache<'a> {
    pub(crate) cache: &'a KvCache,
    /// Counted from the shard's first.
    pub(crate) layer: usize,
    /// Positions that a row sees, its own included, if not all.
    pub(crate) window: Option<usize>,
}

/// One KV head of one sequence in one layer.
#[derive(Clone, Copy)]
struct View<'a, E> {
    layer: LayerView<'a, E>,
    pages: &'a [u32],
    heads: Heads,
    kv_head: usize,
}

/// One KV head of one page.
struct Page<'a, E> {
    keys: &'a [E],
    values: &'a [E],
    /// Where numbers have some, else nothing.
    key_factors: &'a [f32],
    value_factors: &'a [f32],
}

impl<'a, E: Kept> View<'a, E> {
    /// A page, by its index in the sequence.
    #[inline(always)]
    fn page(&self, index: usize) -> Page<'a, E> {
        let size = self.heads.page_elements();
        let LayerView { keys, values, factors, at } = self.layer;
        let page = at.of(self.pages[index], self.kv_head);
        let count = page_factors::<E>(self.heads);
        let (key_factors, value_factors) = factors[page * count..(page + 1) * count].split_at(count / 2);
        Page {
            keys: &keys[page * size..(page + 1) * size],
            values: &values[page * size..(page + 1) * size],
            key_factors,
            value_factors,
        }
    }
}

/// Where the results of attention go: those of row r to `numbers[r * stride + at..]`.
pub(crate) struct Attended<'a> {
    pub(crate) numbers: &'a mut [f32],
    pub(crate) stride: usize,
    pub(crate) at: usize,
}

/// Attends with the queries of all spans and writes the results, `heads * dim` numbers for each row, to `out`; row r's
/// queries begin at `queries[r * stride]`, turned by their positions and scaled. Keys and values of all rows are in the
/// cache.
pub(crate) fn attend(
    team: &mut Team,
    scratch: &mut AttentionScratch,
    heads: Heads,
    layer: LayerCache<'_>,
    spans: &[Span],
    queries: (&[f32], usize),
    out: Attended<'_>,
) {
    match layer.cache.layer(layer.layer) {
        LayerNumbers::F16(view) => attend_over(team, scratch, heads, (layer, view), spans, queries, out),
        LayerNumbers::Q8(view) => attend_over(team, scratch, heads, (layer, view), spans, queries, out),
    }
}

/// The same for one type of numbers.
fn attend_over<E: Kept>(
    team: &mut Team,
    scratch: &mut AttentionScratch,
    heads: Heads,
    (layer, view): (LayerCache<'_>, LayerView<'_, E>),
    spans: &[Span],
    (queries, stride): (&[f32], usize),
    Attended { numbers, stride: to_stride, at: to_at }: Attended<'_>,
) {
    let path = team.path();
    let AttentionScratch { threads, shared, splits, tiles } = scratch;
    tiles.clear();
    for &span in spans {
        let starts = (0..span.rows).step_by(TILE_ROWS);
        tiles.extend(starts.map(|start| Tile { span, start, rows: TILE_ROWS.min(span.rows - start) }));
    }
    let items = tiles.len() * heads.kv_heads;
    let attention = |item: usize| {
        let Tile { span, start, rows } = tiles[item / heads.kv_heads];
        let kv_head = item % heads.kv_heads;
        Attention {
            view: View { layer: view, pages: layer.cache.pages().of(span.place), heads, kv_head },
            window: layer.window,
            pos: span.pos + start,
            rows,
            first_row: span.first_row + start,
            heads: heads.of_kv_head(kv_head),
            queries,
            stride,
            to_stride,
            to_at,
        }
    };

    let out = Disjoint::new(numbers);
    let one_row_each = tiles.iter().all(|tile| tile.rows == 1);
    let longest = tiles.iter().map(|tile| tile.span.pos + tile.span.rows).max().unwrap_or(0);
    if one_row_each && items <= shared.len() && longest > SPLIT {
        let shared = &mut shared[..items];
        share_out(team, &attention, shared, splits, threads);
        for (item, total) in shared.iter_mut().enumerate() {
            attention(item).store(total, &out);
        }
        return;
    }
    team.for_each(items, &|item, thread| {
        let attention = attention(item);
        // A lock that is never waited for: each thread has its own.
        let mut reduction = threads[thread].lock().unwrap_or_else(PoisonError::into_inner);
        let Reduction { total, partial, scores } = &mut *reduction;
        total.clear(attention.queries());
        for split in attention.splits() {
            path.run(Reduce { attention: &attention, split, scores, partial });
            path.run(Merge { total, partial });
        }
        attention.store(total, &out);
    });
}

/// Reduces tiles of one row each to `totals`, every split an item of its own. `splits` has as many places for each.
fn share_out<'a, E: Kept>(
    team: &mut Team,
    attention: &(dyn Fn(usize) -> Attention<'a, E> + Sync),
    totals: &mut [Partial],
    splits: &mut [Partial],
    threads: &[Mutex<Reduction>],
) {
    let path = team.path();
    let items = totals.len();
    let most = (0..items).map(|item| attention(item).splits().len()).max().unwrap_or(0);
    let per_wave = splits.len() / items;
    for (item, total) in totals.iter_mut().enumerate() {
        total.clear(attention(item).queries());
    }
    for wave in (0..most).step_by(per_wave) {
        let of_wave = |item: usize| attention(item).splits().skip(wave).take(per_wave);
        let places = Disjoint::new(splits);
        team.for_each(items * per_wave.min(most - wave), &|index, thread| {
            let (item, at) = (index % items, index / items);
            let Some(split) = of_wave(item).nth(at) else { return };
            let mut reduction = threads[thread].lock().unwrap_or_else(PoisonError::into_inner);
            let place = item * per_wave + at;
            // SAFETY: every item of work has a place of its own.
            let partial = &mut unsafe { places.part(place..place + 1) }[0];
            path.run(Reduce { attention: &attention(item), split, scores: &mut reduction.scores, partial });
        });
        for (item, total) in totals.iter_mut().enumerate() {
            for (_, partial) in of_wave(item).zip(&splits[item * per_wave..]) {
                path.run(Merge { total, partial });
            }
        }
    }
}

/// What some rows of one span ask of one KV head.
struct Attention<'a, E> {
    view: View<'a, E>,
    window: Option<usize>,
    /// The position of the first row.
    pos: usize,
    rows: usize,
    /// That row's place in the batch.
    first_row: usize,
    /// The query heads of the KV head.
    heads: Range<usize>,
    queries: &'a [f32],
    stride: usize,
    to_stride: usize,
    to_at: usize,
}

impl<E: Kept> Attention<'_, E> {
    /// Queries: for each row, those of the group's heads.
    fn queries(&self) -> usize {
        self.rows * self.heads.len()
    }

    /// The positions that the first row sees from, to the one that the last sees to.
    fn seen(&self) -> Range<usize> {
        self.row_sees(0).start..self.row_sees(self.rows - 1).end
    }

    fn row_sees(&self, row: usize) -> Range<usize> {
        let end = self.pos + row + 1;
        self.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// The splits that hold something that is seen.
    fn splits(&self) -> Range<usize> {
        let seen = self.seen();
        seen.start / SPLIT..seen.end.div_ceil(SPLIT)
    }

    /// A query.
    #[inline(always)]
    fn query(&self, query: usize) -> &[f32] {
        let Heads { dim, .. } = self.view.heads;
        let row = self.first_row + query / self.heads.len();
        let at = row * self.stride + (self.heads.start + query % self.heads.len()) * dim;
        &self.queries[at..at + dim]
    }

    /// Divides the totals by their weights and stores them in rows of all heads.
    fn store(&self, total: &mut Partial, out: &Disjoint<'_, f32>) {
        let dim = self.view.heads.dim;
        for query in 0..self.queries() {
            let row = self.first_row + query / self.heads.len();
            let head = self.heads.start + query % self.heads.len();
            let at = row * self.to_stride + self.to_at + head * dim;
            // SAFETY: a (row, head) belongs to one tile and KV head, which one thread stores.
            let to = unsafe { out.part(at..at + dim) };
            let inverse = 1.0 / total.weight(query);
            for (to, value) in to.iter_mut().zip(total.values(query)) {
                *to = value * inverse;
            }
        }
    }

    /// The positions within a split that a query sees.
    #[inline(always)]
    fn sees(&self, query: usize, split: usize) -> Range<usize> {
        let seen = self.row_sees(query / self.heads.len());
        let start = split * SPLIT;
        let within = |pos: usize| pos.saturating_sub(start).min(SPLIT);
        within(seen.start)..within(seen.end)
    }
}
