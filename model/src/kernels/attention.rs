//! Grouped-query attention of some rows of one sequence over its cache.
//!
//! The cache is walked in blocks of [`BLOCK`] positions that begin at fixed positions; within a block the softmax is
//! taken relative to the largest score seen so far, and blocks are merged in rising order (online softmax, Milakov and
//! Gimelshein 2018, arXiv:1805.02867). A row sees its own position and those before it. So what a row becomes depends on
//! its position and on the cache, not on the rows beside it.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::disjoint::Disjoint;
use super::rowwise::{LANES, exp, sum_lanes};
use super::team::Team;
use std::sync::{Mutex, PoisonError};

/// Positions of a block.
pub(crate) const BLOCK: usize = 256;
/// Rows of one piece of work: a block of the cache is widened to f32 once for all of them.
const TILE_ROWS: usize = 16;

/// The shape of the heads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    /// Query heads; a multiple of `kv_heads`.
    pub(crate) heads: usize,
    /// Key and value heads.
    pub(crate) kv_heads: usize,
    /// Width of a head; a multiple of 8.
    pub(crate) dim: usize,
}

/// Consecutive rows of one sequence.
pub(crate) struct Sequence<'a> {
    /// The position of the first row.
    pub(crate) pos: usize,
    /// The first row within the batch.
    pub(crate) first_row: usize,
    /// How many.
    pub(crate) rows: usize,
    /// The keys of the sequence: for each KV head, rows of `dim` by position. All rows' own ones are written already.
    pub(crate) keys: &'a [f16],
    /// The values, likewise.
    pub(crate) values: &'a [f16],
    /// Positions for which there is room in the cache, for each head.
    pub(crate) context: usize,
}

/// What each thread needs for itself.
pub(crate) struct AttentionScratch {
    threads: Vec<Mutex<ThreadScratch>>,
}

struct ThreadScratch {
    keys: Vec<f32>,
    values: Vec<f32>,
    scores: Vec<f32>,
    /// Of each (row of the tile, head of the group): sums of values.
    sums: Vec<f32>,
    /// Likewise: the largest score and the sum of weights.
    totals: Vec<(f32, f32)>,
}

impl AttentionScratch {
    /// Scratch for a team of `threads`.
    pub(crate) fn new(heads: Heads, threads: usize) -> Self {
        let group = heads.heads / heads.kv_heads;
        let threads = (0..threads).map(|_| {
            Mutex::new(ThreadScratch {
                keys: vec![0.0; BLOCK * heads.dim],
                values: vec![0.0; BLOCK * heads.dim],
                scores: vec![0.0; BLOCK],
                sums: vec![0.0; TILE_ROWS * group * heads.dim],
                totals: vec![(0.0, 0.0); TILE_ROWS * group],
            })
        });
        AttentionScratch { threads: threads.collect() }
    }

    /// Bytes for each thread.
    pub(crate) fn bytes_per_thread(heads: Heads) -> usize {
        let group = heads.heads / heads.kv_heads;
        4 * (2 * BLOCK * heads.dim + BLOCK + TILE_ROWS * group * (heads.dim + 2))
    }
}

/// Attends with the queries of all `sequences` and writes the results to `out`; both hold rows of `heads * dim`.
/// Queries are turned by their positions already.
pub(crate) fn attend(
    team: &mut Team,
    scratch: &AttentionScratch,
    heads: Heads,
    sequences: &[Sequence<'_>],
    queries: &[f32],
    out: &mut [f32],
) {
    let tiles = sequences.iter().flat_map(|sequence| {
        let starts = (0..sequence.rows).step_by(TILE_ROWS);
        starts.map(move |start| (sequence, start..sequence.rows.min(start + TILE_ROWS)))
    });
    let tiles: Vec<_> = tiles.collect();
    let out = Disjoint::new(out);
    let width = heads.heads * heads.dim;
    let group = heads.heads / heads.kv_heads;
    team.for_each(tiles.len() * heads.kv_heads, &|item, thread| {
        let (sequence, rows) = &tiles[item / heads.kv_heads];
        let kv_head = item % heads.kv_heads;
        // A lock that is never waited for: each thread has its own.
        let mut scratch = scratch.threads[thread].lock().unwrap_or_else(PoisonError::into_inner);
        let row_width = group * heads.dim;
        let of_row = |row: usize| (sequence.first_row + row) * width + kv_head * row_width;
        let tile = Tile {
            dim: heads.dim,
            group,
            pos: sequence.pos + rows.start,
            keys: &sequence.keys[kv_head * sequence.context * heads.dim..][..sequence.context * heads.dim],
            values: &sequence.values[kv_head * sequence.context * heads.dim..]
                [..sequence.context * heads.dim],
        };
        scratch.attend(&tile, rows.len(), &|row| {
            let at = of_row(rows.start + row);
            &queries[at..at + row_width]
        });
        for (row, sums) in rows.clone().zip(scratch.sums.chunks_exact(row_width)) {
            let at = of_row(row);
            // SAFETY: a (row, KV head) belongs to one item, so no two threads take the same part.
            unsafe { out.part(at..at + row_width) }.copy_from_slice(sums);
        }
    });
}

/// Consecutive rows and one KV head.
struct Tile<'a> {
    dim: usize,
    group: usize,
    pos: usize,
    keys: &'a [f16],
    values: &'a [f16],
}

impl ThreadScratch {
    /// Leaves the results in `sums`, by row and head of the group.
    fn attend<'q>(&mut self, tile: &Tile<'_>, rows: usize, queries: &dyn Fn(usize) -> &'q [f32]) {
        let Tile { dim, group, pos, .. } = *tile;
        let scale = 1.0 / (dim as f32).sqrt();
        self.sums[..rows * group * dim].fill(0.0);
        self.totals[..rows * group].fill((f32::NEG_INFINITY, 0.0));
        // One past the last position that any row sees.
        let end = pos + rows;
        for start in (0..end).step_by(BLOCK) {
            let seen = BLOCK.min(end - start);
            tile.keys[start * dim..(start + seen) * dim].convert_to_f32_slice(&mut self.keys[..seen * dim]);
            tile.values[start * dim..(start + seen) * dim]
                .convert_to_f32_slice(&mut self.values[..seen * dim]);
            for row in 0..rows {
                let Some(seen) = (pos + row + 1).checked_sub(start).filter(|&seen| seen > 0) else {
                    continue;
                };
                let seen = seen.min(BLOCK);
                for (head, query) in queries(row).chunks_exact(dim).enumerate() {
                    let index = row * group + head;
                    let total = &mut self.totals[index];
                    let sums = &mut self.sums[index * dim..(index + 1) * dim];
                    let (keys, values) = (&self.keys[..seen * dim], &self.values[..seen * dim]);
                    merge(&Block { query, scale, keys, values }, &mut self.scores[..seen], total, sums);
                }
            }
        }
        for (&(_, weight), sums) in self.totals.iter().zip(self.sums.chunks_exact_mut(dim)).take(rows * group)
        {
            sums.iter_mut().for_each(|sum| *sum /= weight);
        }
    }
}

/// What one head's query meets in one block of the cache.
struct Block<'a> {
    query: &'a [f32],
    scale: f32,
    keys: &'a [f32],
    values: &'a [f32],
}

/// Merges one block into a (largest score, sum of weights) and the sums of values. `scores` has room for one number for
/// each position.
fn merge(block: &Block<'_>, scores: &mut [f32], total: &mut (f32, f32), sums: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { merge_avx2(block, scores, total, sums) };
    }
    merge_lanes(block, scores, total, sums);
}

/// The same operations in the same order, so the same bits, in wider registers.
///
/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn merge_avx2(block: &Block<'_>, scores: &mut [f32], total: &mut (f32, f32), sums: &mut [f32]) {
    merge_lanes(block, scores, total, sums);
}

#[inline(always)]
fn merge_lanes(block: &Block<'_>, scores: &mut [f32], total: &mut (f32, f32), sums: &mut [f32]) {
    let dim = block.query.len();
    let mut largest = total.0;
    for (score, key) in scores.iter_mut().zip(block.keys.chunks_exact(dim)) {
        *score = dot(block.query, key) * block.scale;
        largest = if *score > largest { *score } else { largest };
    }
    // e^(-inf - x) is not needed: the first block has nothing to merge with.
    let keep = if total.1 == 0.0 { 0.0 } else { exp(total.0 - largest) };
    let mut lanes = [0f32; LANES];
    for scores in scores.chunks_mut(LANES) {
        for (score, lane) in scores.iter_mut().zip(&mut lanes) {
            *score = exp(*score - largest);
            *lane += *score;
        }
    }
    *total = (largest, total.1 * keep + sum_lanes(lanes));
    sums.iter_mut().for_each(|sum| *sum *= keep);
    for (&weight, value) in scores.iter().zip(block.values.chunks_exact(dim)) {
        for (sum, &value) in sums.iter_mut().zip(value) {
            *sum += weight * value;
        }
    }
}

/// The dot product of two rows of a multiple of 8 elements.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    for (a, b) in a.chunks_exact(LANES).zip(b.chunks_exact(LANES)) {
        for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    sum_lanes(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: Heads = Heads { heads: 6, kv_heads: 2, dim: 16 };
    const CONTEXT: usize = 700;

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let next = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(next).collect()
    }

    fn cache(seed: u32) -> Vec<f16> {
        noise(HEADS.kv_heads * CONTEXT * HEADS.dim, seed).into_iter().map(f16::from_f32).collect()
    }

    fn run(threads: usize, pos: usize, rows: usize, queries: &[f32]) -> Vec<f32> {
        let (keys, values) = (cache(1), cache(2));
        let mut team = Team::new(threads).unwrap();
        let scratch = AttentionScratch::new(HEADS, threads);
        let mut out = vec![f32::NAN; queries.len()];
        let sequence = Sequence { pos, first_row: 0, rows, keys: &keys, values: &values, context: CONTEXT };
        attend(&mut team, &scratch, HEADS, &[sequence], queries, &mut out);
        out
    }

    #[test]
    fn agrees_with_softmax_in_f64() {
        let (pos, rows) = (500, 40);
        let width = HEADS.heads * HEADS.dim;
        let queries: Vec<f32> = noise(rows * width, 3).iter().map(|x| x * 4.0).collect();
        let (keys, values) = (cache(1), cache(2));
        let out = run(2, pos, rows, &queries);
        for row in 0..rows {
            for head in 0..HEADS.heads {
                let kv_head = head / (HEADS.heads / HEADS.kv_heads);
                let of = |cache: &[f16], pos: usize, d: usize| {
                    cache[(kv_head * CONTEXT + pos) * HEADS.dim + d].to_f64()
                };
                let at = row * width + head * HEADS.dim;
                let scores: Vec<f64> = (0..=pos + row)
                    .map(|p| {
                        (0..HEADS.dim).map(|d| f64::from(queries[at + d]) * of(&keys, p, d)).sum::<f64>()
                            / 4.0
                    })
                    .collect();
                let total: f64 = scores.iter().map(|s| s.exp()).sum();
                for d in 0..HEADS.dim {
                    let sum: f64 = scores.iter().enumerate().map(|(p, s)| s.exp() * of(&values, p, d)).sum();
                    let error = (sum / total - f64::from(out[at + d])).abs();
                    assert!(error < 1e-5, "row {row} head {head} dim {d}: {error}");
                }
            }
        }
    }

    #[test]
    fn wider_registers_give_the_same_bits() {
        let (keys, values) = (noise(100 * 24, 5), noise(100 * 24, 6));
        let query = noise(24, 7);
        let block = Block { query: &query, scale: 0.3, keys: &keys, values: &values };
        let mut plain = ((0.1, 2.0), vec![0.5; 24]);
        let mut wide = plain.clone();
        merge_lanes(&block, &mut [0.0; 100], &mut plain.0, &mut plain.1);
        merge(&block, &mut [0.0; 100], &mut wide.0, &mut wide.1);
        assert_eq!(wide, plain);
    }

    #[test]
    fn bits_do_not_depend_on_chunk_or_threads() {
        let (pos, rows) = (230, 60);
        let width = HEADS.heads * HEADS.dim;
        let queries = noise(rows * width, 4);
        let whole = run(1, pos, rows, &queries);
        assert_eq!(whole, run(3, pos, rows, &queries));
        for row in 0..rows {
            let alone = run(1, pos + row, 1, &queries[row * width..(row + 1) * width]);
            assert_eq!(alone, whole[row * width..(row + 1) * width], "row {row}");
        }
    }
}
