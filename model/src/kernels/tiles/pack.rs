//! From the blocks of a file to tiles, and back to numbers.

use half::f16;

use super::{
    Bytes, COLUMNS, Fives, FivesMinimum, GROUPS, NibbleHalves, Nibbles, NibblesMinimum, PerRow, Quads, Sixes,
};
use crate::kernels::lanes::LANES;

/// 32 weights of one row: `factor * integer + minimum`, for each half its own factor and minimum. The integers are those
/// of the tile, before its offset is taken off.
#[derive(Clone, Copy, Default)]
pub(in crate::kernels) struct Cells {
    pub(in crate::kernels) integers: [u8; COLUMNS],
    pub(in crate::kernels) factors: [f16; 2],
    pub(in crate::kernels) minima: [f16; 2],
}

/// A tile that can be made of cells.
pub(in crate::kernels) trait Packed: super::Tile {
    fn pack(rows: &[Cells; LANES]) -> Self;

    /// One integer, before the offset is taken off (signed ones as their bits).
    fn integer(&self, row: usize, column: usize) -> u8;

    /// One row as numbers.
    fn numbers(&self, row: usize, numbers: &mut [f32; COLUMNS]) {
        for (column, number) in numbers.iter_mut().enumerate() {
            let half = if Self::HALVES { column / (COLUMNS / 2) } else { 0 };
            let bits = self.integer(row, column);
            let integer = if Self::SIGNED { i32::from(bits as i8) } else { i32::from(bits) - Self::OFFSET };
            let minimum = self.minima(half).map_or(0.0, |minima| minima[row].to_f32());
            *number = self.factors(half)[row].to_f32() * integer as f32 + minimum;
        }
    }
}

#[inline(always)]
fn nibbles(rows: &[Cells; LANES]) -> [Quads; 4] {
    let mut nibbles = [[0; 4 * LANES]; 4];
    for (row, cells) in rows.iter().enumerate() {
        let (low, high) = cells.integers.split_at(COLUMNS / 2);
        let mut both = [0; COLUMNS / 2];
        for ((both, low), high) in both.iter_mut().zip(low).zip(high) {
            *both = (low & 0x0f) | (high << 4);
        }
        for (quads, four) in nibbles.iter_mut().zip(both.as_chunks::<4>().0) {
            quads.as_chunks_mut::<4>().0[row] = *four;
        }
    }
    nibbles
}

/// Bits of the integers above the nibbles: `width` of them for each group, in groups from `first`.
#[inline(always)]
fn upper(rows: &[Cells; LANES], first: usize, groups: usize, width: usize) -> Quads {
    let mut upper = [0; 4 * LANES];
    for (place, cells) in upper.as_chunks_mut::<4>().0.iter_mut().zip(rows) {
        // Four bytes at a time: no bit reaches the next byte.
        let mut bits = 0;
        for group in 0..groups {
            let integers = u32::from_le_bytes(cells.integers.as_chunks::<4>().0[first + group]);
            bits |= (integers >> 4 & 0x0f0f_0f0f) << (width * group);
        }
        *place = bits.to_le_bytes();
    }
    upper
}

#[inline(always)]
fn factors(rows: &[Cells; LANES], half: usize) -> PerRow {
    rows.each_ref().map(|cells| cells.factors[half])
}

#[inline(always)]
fn minima(rows: &[Cells; LANES], half: usize) -> PerRow {
    rows.each_ref().map(|cells| cells.minima[half])
}

fn nibble(nibbles: &[Quads; 4], row: usize, column: usize) -> u8 {
    let byte = nibbles[column / 4 % 4][4 * row + column % 4];
    if column < COLUMNS / 2 { byte & 0x0f } else { byte >> 4 }
}

impl Packed for Nibbles {
    #[inline(always)]
    fn pack(rows: &[Cells; LANES]) -> Self {
        Nibbles { factors: factors(rows, 0), nibbles: nibbles(rows) }
    }

    fn integer(&self, row: usize, column: usize) -> u8 {
        nibble(&self.nibbles, row, column)
    }
}

impl Packed for NibblesMinimum {
    #[inline(always)]
    fn pack(rows: &[Cells; LANES]) -> Self {
        NibblesMinimum { factors: factors(rows, 0), minima: minima(rows, 0), nibbles: nibbles(rows) }
    }

    fn integer(&self, row: usize, column: usize) -> u8 {
        nibble(&self.nibbles, row, column)
    }
}

impl Packed for Fives {
    #[inline(always)]
    fn pack(rows: &[Cells; LANES]) -> Self {
        Fives { factors: factors(rows, 0), nibbles: nibbles(rows), fifth: upper(rows, 0, GROUPS, 1) }
    }

    fn integer(&self, row: usize, column: usize) -> u8 {
        let fifth = (self.fifth[4 * row + column % 4] >> (column / 4)) & 1;
        nibble(&self.nibbles, row, column) | (fifth << 4)
    }
}

impl Packed for FivesMinimum {
    #[inline(always)]
    fn pack(rows: &[Cells; LANES]) -> Self {
        let fifth = upper(rows, 0, GROUPS, 1);
        FivesMinimum { factors: factors(rows, 0), minima: minima(rows, 0), nibbles: nibbles(rows), fifth }
    }

    fn integer(&self, row: usize, column: usize) -> u8 {
        let fifth = (self.fifth[4 * row + column % 4] >> (column / 4)) & 1;
        nibble(&self.nibbles, row, column) | (fifth << 4)
    }
}

impl Packed for Sixes {
    #[inline(always)]
    fn pack(rows: &[Cells; LANES]) -> Self {
        Sixes {
            factors: [factors(rows, 0), factors(rows, 1)],
            nibbles: nibbles(rows),
            upper: [upper(rows, 0, GROUPS / 2, 2), upper(rows, GROUPS / 2, GROUPS / 2, 2)],
        }
    }

    fn integer(&self, row: usize, column: usize) -> u8 {
        let group = column / 4;
        let upper = (self.upper[group / 4][4 * row + column % 4] >> (2 * (group % 4))) & 3;
        nibble(&self.nibbles, row, column) | (upper << 4)
    }
}

impl<const OFFSET: i32> Packed for NibbleHalves<OFFSET> {
    #[inline(always)]
    fn pack(rows: &[Cells; LANES]) -> Self {
        NibbleHalves {
            factors: [factors(rows, 0), factors(rows, 1)],
            minima: [minima(rows, 0), minima(rows, 1)],
            nibbles: nibbles(rows),
        }
    }

    fn integer(&self, row: usize, column: usize) -> u8 {
        nibble(&self.nibbles, row, column)
    }
}

impl Packed for Bytes {
    #[inline(always)]
    fn pack(rows: &[Cells; LANES]) -> Self {
        let mut integers = [[0; 4 * LANES]; GROUPS];
        for (row, cells) in rows.iter().enumerate() {
            for (group, quads) in integers.iter_mut().enumerate() {
                let four = cells.integers.as_chunks::<4>().0[group];
                quads.as_chunks_mut::<4>().0[row] = four.map(|byte| (byte as i8).max(-127) as u8);
            }
        }
        Bytes { factors: factors(rows, 0), integers }
    }

    fn integer(&self, row: usize, column: usize) -> u8 {
        self.integers[column / 4][4 * row + column % 4]
    }
}
