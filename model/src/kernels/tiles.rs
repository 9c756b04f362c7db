//! Weights as they are stored for the kernels: tiles of 16 rows and 32 columns.
//!
//! A file keeps one row after the other; a kernel that reads it so has to add up across a register for each output. Here
//! a lane is a row, four neighbouring columns of it are one 32-bit element, and one activation serves sixteen
//! outputs. The tiles of the same sixteen rows follow each other along the columns, so a product reads one stream.
//!
//! A weight is `factor * (integer - OFFSET)`, or `factor * integer + minimum`. All types of ggml become one of seven
//! tiles; those of K-quants whose factors are products (a super-block's times a sub-block's) get them multiplied out,
//! rounded to f16, which changes a weight by at most 1/2048 of itself.

pub(super) mod pack;

use half::f16;

use super::activations::Int8Block;
use super::lanes::{LANES, Lanes};

/// Columns of a tile.
pub(crate) const COLUMNS: usize = 32;
/// Groups of four columns in a tile.
pub(super) const GROUPS: usize = COLUMNS / 4;

/// Four columns of sixteen rows: byte `4 * row + column`.
type Quads = [u8; 4 * LANES];
/// A number for each row.
type PerRow = [f16; LANES];

/// Sixteen rows of 32 weights.
///
/// # Safety
/// Made of integers and `f16` without padding, so that every pattern of bits is a value.
pub(crate) unsafe trait Tile: Sized + Send + Sync + 'static {
    /// Is taken off every integer.
    const OFFSET: i32 = 0;
    /// The bytes are from -127 to 127 and not from 0 to 63.
    const SIGNED: bool = false;
    /// Products of so many groups fit the 16-bit sums of [`Lanes::dot`].
    const GROUPS_PER_FLUSH: usize;
    /// Whether the first and the last 16 columns have a factor each.
    const HALVES: bool = false;

    /// The integers of a group of columns.
    fn integers<L: Lanes>(&self, lanes: L, group: usize) -> L::Bytes;

    /// Of a half (the first where there are none).
    fn factors(&self, half: usize) -> &PerRow;

    /// Of a half, if the type has minima.
    #[inline(always)]
    fn minima(&self, _half: usize) -> Option<&PerRow> {
        None
    }
}

/// Q4_0.
#[repr(C)]
pub(super) struct Nibbles {
    factors: PerRow,
    /// Group j in the low bits, group j + 4 in the high ones.
    nibbles: [Quads; 4],
}

/// Q4_1, Q4_K.
#[repr(C)]
pub(super) struct NibblesMinimum {
    factors: PerRow,
    minima: PerRow,
    nibbles: [Quads; 4],
}

/// Q5_0.
#[repr(C)]
pub(super) struct Fives {
    factors: PerRow,
    nibbles: [Quads; 4],
    /// Bit j is the fifth bit of group j.
    fifth: Quads,
}

/// Q5_1, Q5_K.
#[repr(C)]
pub(super) struct FivesMinimum {
    factors: PerRow,
    minima: PerRow,
    nibbles: [Quads; 4],
    fifth: Quads,
}

/// Q6_K.
#[repr(C)]
pub(super) struct Sixes {
    factors: [PerRow; 2],
    nibbles: [Quads; 4],
    /// Bits 2j and 2j + 1 are the fifth and sixth bit of group j, or j + 4.
    upper: [Quads; 2],
}

/// Q2_K and Q3_K: the integers have fewer bits, but the two halves of a tile a factor each.
#[repr(C)]
pub(super) struct NibbleHalves<const OFFSET: i32> {
    factors: [PerRow; 2],
    minima: [PerRow; 2],
    nibbles: [Quads; 4],
}

/// Q8_0. The integer -128, which no quantiser makes, becomes -127.
#[repr(C)]
pub(super) struct Bytes {
    factors: PerRow,
    integers: [Quads; GROUPS],
}

#[inline(always)]
fn nibble<L: Lanes>(lanes: L, nibbles: &[Quads; 4], group: usize) -> L::Bytes {
    let both = lanes.bytes(&nibbles[group % 4]);
    if group < 4 { lanes.low(both) } else { lanes.high(both) }
}

#[inline(always)]
fn five<L: Lanes>(lanes: L, nibbles: &[Quads; 4], fifth: &Quads, group: usize) -> L::Bytes {
    let fifth = lanes.bytes(fifth);
    // Where the bit would have to move left, all bits do first, and then it moves right.
    let bit = match group {
        0..4 => lanes.shifted(lanes.raised(fifth), group as u32, 0x10),
        _ => lanes.shifted(fifth, group as u32 - 4, 0x10),
    };
    lanes.or(nibble(lanes, nibbles, group), bit)
}

// SAFETY: integers and f16 only, and no field is aligned to more than the 2 bytes that all sizes are multiples of.
unsafe impl Tile for Nibbles {
    const OFFSET: i32 = 8;
    const GROUPS_PER_FLUSH: usize = 8;

    #[inline(always)]
    fn integers<L: Lanes>(&self, lanes: L, group: usize) -> L::Bytes {
        nibble(lanes, &self.nibbles, group)
    }

    #[inline(always)]
    fn factors(&self, _half: usize) -> &PerRow {
        &self.factors
    }
}

// SAFETY: as above.
unsafe impl Tile for NibblesMinimum {
    const GROUPS_PER_FLUSH: usize = 8;

    #[inline(always)]
    fn integers<L: Lanes>(&self, lanes: L, group: usize) -> L::Bytes {
        nibble(lanes, &self.nibbles, group)
    }

    #[inline(always)]
    fn factors(&self, _half: usize) -> &PerRow {
        &self.factors
    }

    #[inline(always)]
    fn minima(&self, _half: usize) -> Option<&PerRow> {
        Some(&self.minima)
    }
}

// SAFETY: as above.
unsafe impl Tile for Fives {
    const OFFSET: i32 = 16;
    const GROUPS_PER_FLUSH: usize = 4;

    #[inline(always)]
    fn integers<L: Lanes>(&self, lanes: L, group: usize) -> L::Bytes {
        five(lanes, &self.nibbles, &self.fifth, group)
    }

    #[inline(always)]
    fn factors(&self, _half: usize) -> &PerRow {
        &self.factors
    }
}

// SAFETY: as above.
unsafe impl Tile for FivesMinimum {
    const GROUPS_PER_FLUSH: usize = 4;

    #[inline(always)]
    fn integers<L: Lanes>(&self, lanes: L, group: usize) -> L::Bytes {
        five(lanes, &self.nibbles, &self.fifth, group)
    }

    #[inline(always)]
    fn factors(&self, _half: usize) -> &PerRow {
        &self.factors
    }

    #[inline(always)]
    fn minima(&self, _half: usize) -> Option<&PerRow> {
        Some(&self.minima)
    }
}

// SAFETY: as above.
unsafe impl Tile for Sixes {
    const OFFSET: i32 = 32;
    const GROUPS_PER_FLUSH: usize = 2;
    const HALVES: bool = true;

    #[inline(always)]
    fn integers<L: Lanes>(&self, lanes: L, group: usize) -> L::Bytes {
        let upper = lanes.bytes(&self.upper[group / 4]);
        let upper = match group % 4 {
            0 => lanes.shifted(lanes.raised(upper), 0, 0x30),
            1 => lanes.shifted(lanes.raised(upper), 2, 0x30),
            group => lanes.shifted(upper, 2 * (group as u32 - 2), 0x30),
        };
        lanes.or(nibble(lanes, &self.nibbles, group), upper)
    }

    #[inline(always)]
    fn factors(&self, half: usize) -> &PerRow {
        &self.factors[half]
    }
}

// SAFETY: as above.
unsafe impl<const OFFSET: i32> Tile for NibbleHalves<OFFSET> {
    const OFFSET: i32 = OFFSET;
    const GROUPS_PER_FLUSH: usize = 4;
    const HALVES: bool = true;

    #[inline(always)]
    fn integers<L: Lanes>(&self, lanes: L, group: usize) -> L::Bytes {
        nibble(lanes, &self.nibbles, group)
    }

    #[inline(always)]
    fn factors(&self, half: usize) -> &PerRow {
        &self.factors[half]
    }

    #[inline(always)]
    fn minima(&self, half: usize) -> Option<&PerRow> {
        (OFFSET == 0).then_some(&self.minima[half])
    }
}

// SAFETY: as above.
unsafe impl Tile for Bytes {
    const SIGNED: bool = true;
    const GROUPS_PER_FLUSH: usize = 1;

    #[inline(always)]
    fn integers<L: Lanes>(&self, lanes: L, group: usize) -> L::Bytes {
        lanes.bytes(&self.integers[group])
    }

    #[inline(always)]
    fn factors(&self, _half: usize) -> &PerRow {
        &self.factors
    }
}

/// How far ahead of the tile that is multiplied the next ones are asked for.
const PREFETCH_BYTES: usize = 2048;
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

const NO_BLOCK: Int8Block = Int8Block::ZERO;

/// The products of sixteen rows of weights with `N` rows of activations, one block for each tile. For each output the
/// blocks are added up in their order, whatever `N` is: integers exactly within a block, then
/// `fma(integer sum, factor * factor, total)` and, where there are minima, `fma(minimum, sum, total)`.
#[inline(always)]
pub(super) fn products<L: Lanes, T: Tile, const N: usize>(
    lanes: L,
    tiles: &[T],
    rows: [&[Int8Block]; N],
) -> [L::F32; N] {
    assert!(rows.iter().all(|row| row.len() >= tiles.len()), "a row shorter than the weights");
    let mut totals = [lanes.splat(0.0); N];
    for (at, tile) in tiles.iter().enumerate() {
        let ahead = (&raw const *tile).cast::<u8>().wrapping_add(PREFETCH_BYTES);
        for line in 0..size_of::<T>().div_ceil(LINE) {
            lanes.prefetch(ahead.wrapping_add(line * LINE));
        }
        let mut blocks = [&NO_BLOCK; N];
        for (block, row) in blocks.iter_mut().zip(rows) {
            // SAFETY: every row has a block for each tile, as was asserted.
            *block = unsafe { row.get_unchecked(at) };
        }
        if T::HALVES {
            add_half::<L, T, N>(lanes, tile, blocks, 0, &mut totals);
            add_half::<L, T, N>(lanes, tile, blocks, 1, &mut totals);
        } else {
            add_whole::<L, T, N>(lanes, tile, blocks, &mut totals);
        }
    }
    totals
}

#[inline(always)]
fn add_whole<L: Lanes, T: Tile, const N: usize>(
    lanes: L,
    tile: &T,
    blocks: [&Int8Block; N],
    totals: &mut [L::F32; N],
) {
    let factors = lanes.load_f16(tile.factors(0));
    let mut sums = [0; N];
    for (sum, block) in sums.iter_mut().zip(blocks) {
        *sum = block.halves[0].wrapping_add(block.halves[1]);
    }
    let integers = lanes.integers(tile, blocks, (0, GROUPS), sums);
    let minima = minima(lanes, tile, 0);
    for n in 0..N {
        let scale = lanes.mul(factors, lanes.splat(blocks[n].factor));
        totals[n] = lanes.fma(lanes.number(integers[n]), scale, totals[n]);
        if let Some(minima) = minima {
            totals[n] = lanes.fma(minima, lanes.splat(blocks[n].sum), totals[n]);
        }
    }
}

#[inline(always)]
fn add_half<L: Lanes, T: Tile, const N: usize>(
    lanes: L,
    tile: &T,
    blocks: [&Int8Block; N],
    half: usize,
    totals: &mut [L::F32; N],
) {
    let mut sums = [0; N];
    for (sum, block) in sums.iter_mut().zip(blocks) {
        *sum = block.halves[half];
    }
    let first = half * GROUPS / 2;
    let integers = lanes.integers(tile, blocks, (first, first + GROUPS / 2), sums);
    let factors = lanes.load_f16(tile.factors(half));
    let minima = minima(lanes, tile, half);
    for n in 0..N {
        let scale = lanes.mul(factors, lanes.splat(blocks[n].factor));
        totals[n] = lanes.fma(lanes.number(integers[n]), scale, totals[n]);
        if let Some(minima) = minima {
            let sum = blocks[n].factor * blocks[n].halves[half] as f32;
            totals[n] = lanes.fma(minima, lanes.splat(sum), totals[n]);
        }
    }
}

/// [`Lanes::integers`] with a dot product for each row of activations.
#[inline(always)]
pub(super) fn each_row<L: Lanes, T: Tile, const N: usize>(
    lanes: L,
    tile: &T,
    blocks: [&Int8Block; N],
    (first, end): (usize, usize),
    sums: [i32; N],
) -> [L::I32; N] {
    if T::SIGNED {
        let mut totals = [lanes.signed_sums(0); N];
        for (total, sum) in totals.iter_mut().zip(sums) {
            *total = lanes.signed_sums(sum);
        }
        for group in first..end {
            let weights = tile.integers(lanes, group);
            for (total, block) in totals.iter_mut().zip(blocks) {
                *total = lanes.dot_signed(*total, weights, block.group(group));
            }
        }
        return totals;
    }
    let mut products = [lanes.sums(0); N];
    for (products, sum) in products.iter_mut().zip(sums) {
        *products = lanes.sums(-T::OFFSET * sum);
    }
    for group in first..end {
        if L::NARROW && group > first && (group - first).is_multiple_of(T::GROUPS_PER_FLUSH) {
            for products in &mut products {
                *products = lanes.flush(*products);
            }
        }
        let weights = tile.integers(lanes, group);
        for (products, block) in products.iter_mut().zip(blocks) {
            *products = lanes.dot(*products, weights, block.group(group));
        }
    }
    let mut totals = [lanes.total(products[0]); N];
    for (total, products) in totals.iter_mut().zip(products) {
        *total = lanes.total(products);
    }
    totals
}

#[expect(clippy::manual_map, reason = "a closure would not have the path's instructions")]
#[inline(always)]
fn minima<L: Lanes, T: Tile>(lanes: L, tile: &T, half: usize) -> Option<L::F32> {
    match tile.minima(half) {
        Some(minima) => Some(lanes.load_f16(minima)),
        None => None,
    }
}
