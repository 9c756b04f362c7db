//! Rows of activations in the forms that the weights are multiplied with.

use super::lanes::{LANES, Lanes};
use super::tiles::COLUMNS;

/// 32 numbers as integers times one factor.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub(crate) struct Int8Block {
    /// From -127 to 127.
    pub(super) values: [i8; COLUMNS],
    /// What they are multiplied with.
    pub(super) factor: f32,
    /// The factor times the sum of the values, for weights that have a minimum.
    pub(super) sum: f32,
    /// Sums of the first and the last 16 values, for weights that have an offset.
    pub(super) halves: [i32; 2],
}

impl Int8Block {
    /// Of zeros.
    pub(super) const ZERO: Int8Block =
        Int8Block { values: [0; COLUMNS], factor: 0.0, sum: 0.0, halves: [0; 2] };

    /// The values of four neighbouring columns, the first one lowest.
    #[inline(always)]
    pub(super) fn group(&self, group: usize) -> i32 {
        i32::from_le_bytes(self.values.as_chunks::<4>().0[group].map(|value| value as u8))
    }

    /// Stores 32 numbers, rounded to the nearest, ties to even. If one of them is not finite, the factor is not a number,
    /// and so is every product with the block.
    #[inline(always)]
    pub(super) fn of<L: Lanes>(lanes: L, numbers: &[f32; COLUMNS]) -> Int8Block {
        let halves = numbers.as_chunks::<LANES>().0;
        let (a, b) = (lanes.load(&halves[0]), lanes.load(&halves[1]));
        let factor = match finite(numbers) {
            true => lanes.largest(lanes.max(lanes.abs(a), lanes.abs(b))) / 127.0,
            false => f32::NAN,
        };
        let inverse = lanes.splat(inverse(factor));
        let mut block = Int8Block { factor, ..Int8Block::default() };
        let places = block.values.as_chunks_mut::<LANES>().0;
        for ((numbers, values), sum) in [a, b].into_iter().zip(places).zip(&mut block.halves) {
            let mut integers = [0; LANES];
            lanes.store_i32(&mut integers, lanes.round(lanes.mul(numbers, inverse)));
            *values = integers.map(|integer| integer as i8);
            *sum = values.iter().map(|&value| i32::from(value)).sum();
        }
        block.sum = factor * (block.halves[0] + block.halves[1]) as f32;
        block
    }
}

/// What numbers are multiplied with to become the integers that have this factor: nothing is left of them where it is not a
/// number, and where it is so small that its inverse might be infinite.
#[inline(always)]
pub(super) fn inverse(factor: f32) -> f32 {
    if factor >= f32::MIN_POSITIVE { 1.0 / factor } else { 0.0 }
}

/// In which form weights want the activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// [`Int8Block`]s, for quantised weights.
    Int8,
    /// As they are, for weights that are floating-point numbers.
    F32,
}

/// Room for some rows in both forms; which of them are filled is for the matrices to say that come next.
pub(crate) struct Activations {
    pub(super) int8: Box<[Int8Block]>,
    pub(super) f32: Box<[f32]>,
    width: usize,
}

impl Activations {
    /// Room for `rows` of up to `width` numbers in the forms that are needed.
    pub(crate) fn new(rows: usize, width: usize, forms: &[Form]) -> Activations {
        let room = |form, per_row| if forms.contains(&form) { rows * per_row } else { 0 };
        Activations {
            int8: vec![Int8Block::default(); room(Form::Int8, width.div_ceil(COLUMNS))].into(),
            f32: vec![0.0; room(Form::F32, width)].into(),
            width,
        }
    }

    /// Bytes of a row in a form.
    pub(crate) fn row_bytes(width: usize, form: Form) -> usize {
        match form {
            Form::Int8 => width.div_ceil(COLUMNS) * size_of::<Int8Block>(),
            Form::F32 => width * size_of::<f32>(),
        }
    }

    /// Width of the rows from now on; what was there is lost.
    pub(crate) fn set_width(&mut self, width: usize) {
        self.width = width;
    }

    /// All places in both forms, and the blocks of a row.
    pub(crate) fn places(&mut self) -> (&mut [Int8Block], &mut [f32], usize) {
        (&mut self.int8, &mut self.f32, self.width / COLUMNS)
    }

    /// Width of the rows.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    pub(super) fn int8_row(&self, row: usize) -> &[Int8Block] {
        let blocks = self.width / COLUMNS;
        &self.int8[row * blocks..(row + 1) * blocks]
    }

    pub(super) fn f32_row(&self, row: usize) -> &[f32] {
        &self.f32[row * self.width..(row + 1) * self.width]
    }
}

/// Stores a row of a multiple of 32 numbers.
#[inline(always)]
pub(crate) fn quantise<L: Lanes>(lanes: L, row: &[f32], blocks: &mut [Int8Block]) {
    for (numbers, block) in row.as_chunks::<COLUMNS>().0.iter().zip(blocks) {
        *block = Int8Block::of(lanes, numbers);
    }
}

/// Whether all numbers are. Without an early end, so it becomes vector code.
#[inline(always)]
pub(crate) fn finite(row: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    row.iter().fold(true, |finite, number| finite & (number.to_bits() & EXPONENT != EXPONENT))
}
