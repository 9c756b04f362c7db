//! Dot products of our own for processors with AVX2, FMA and F16C: candle has none for Q4_1, and its others read the
//! weights once for each row.
//!
//! A product of one weight row with one row of activations is always this: for each block the integers are multiplied
//! and summed exactly, in eight lanes; the lanes are multiplied by both factors and added up over the blocks in f32
//! (fused); minima are added up beside them; at the end the lanes are summed in one order. Which rows are computed
//! together ([`Rows::tile`]) changes only what stays in registers.

use std::arch::x86_64::*;
use std::ops::Range;

use half::f16;

use super::activations::{ActivationBlock, ActivationKind, Activations};
use super::blocks::{Plain, Weights, load as copy};
use super::disjoint::Disjoint;
use super::int8::{BLOCK, Int8Block};
use crate::gguf::TensorType;

/// Rows of activations that stay in the first-level cache while a piece of the weights passes.
const ROWS: usize = 16;

/// Whether a type has a kernel here and the processor can run it.
pub(super) fn supports(kind: TensorType) -> bool {
    matches!(kind, TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q8_0)
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Copies a matrix of a supported type; none if the bytes do not make it.
pub(super) fn load(
    kind: TensorType,
    inputs: usize,
    outputs: usize,
    bytes: &[u8],
    copied: &mut dyn FnMut(usize),
) -> Option<Box<dyn Weights>> {
    match kind {
        TensorType::Q4_0 => Rows::<Q4_0>::load(inputs, outputs, bytes, copied),
        TensorType::Q4_1 => Rows::<Q4_1>::load(inputs, outputs, bytes, copied),
        TensorType::Q8_0 => Rows::<Q8_0>::load(inputs, outputs, bytes, copied),
        _ => None,
    }
}

/// A block of 32 weights as ggml stores it.
trait Block: Plain {
    /// The weights as bytes, and how they are multiplied.
    ///
    /// # Safety
    /// The processor has AVX2.
    unsafe fn values(&self) -> __m256i;

    /// Sums of four products each of `values` with activations, in eight lanes.
    ///
    /// # Safety
    /// The processor has AVX2.
    unsafe fn dot(values: __m256i, activations: __m256i) -> __m256i;

    /// (factor, minimum) in the two lowest lanes.
    ///
    /// # Safety
    /// The processor has F16C.
    unsafe fn factors(&self) -> __m128;

    /// The weights as numbers.
    fn numbers(&self, row: &mut [f32]);
}

#[derive(Clone)]
#[repr(C)]
struct Q4_0 {
    factor: f16,
    nibbles: [u8; 16],
}

#[derive(Clone)]
#[repr(C)]
struct Q4_1 {
    factor: f16,
    minimum: f16,
    nibbles: [u8; 16],
}

#[derive(Clone)]
#[repr(C)]
struct Q8_0 {
    factor: f16,
    values: [i8; 32],
}

const _: () = assert!(size_of::<Q4_0>() == 18 && size_of::<Q4_1>() == 20 && size_of::<Q8_0>() == 34);
// SAFETY: integers and halves of 2 bytes, without padding by the assertion above.
unsafe impl Plain for Q4_0 {}
// SAFETY: as above.
unsafe impl Plain for Q4_1 {}
// SAFETY: as above.
unsafe impl Plain for Q8_0 {}

/// Bytes 0 to 15 are the low nibbles, 16 to 31 the high ones.
#[inline(always)]
unsafe fn unpack(nibbles: &[u8; 16]) -> __m256i {
    // SAFETY: reads the 16 bytes of the array; AVX2 is the caller's promise.
    unsafe {
        let low = _mm_loadu_si128(nibbles.as_ptr().cast());
        let both = _mm256_set_m128i(_mm_srli_epi16::<4>(low), low);
        _mm256_and_si256(both, _mm256_set1_epi8(0x0f))
    }
}

/// Nibbles times activations: sums of two products are at most 2 * 15 * 127, which 16 bits hold.
#[inline(always)]
unsafe fn dot_nibbles(values: __m256i, activations: __m256i) -> __m256i {
    // SAFETY: AVX2 is the caller's promise.
    unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(values, activations), _mm256_set1_epi16(1)) }
}

impl Block for Q4_0 {
    #[inline(always)]
    unsafe fn values(&self) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { unpack(&self.nibbles) }
    }

    #[inline(always)]
    unsafe fn dot(values: __m256i, activations: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { dot_nibbles(values, activations) }
    }

    #[inline(always)]
    unsafe fn factors(&self) -> __m128 {
        // A weight is factor * (nibble - 8), so the minimum is -8 factors.
        // SAFETY: F16C is the caller's promise.
        unsafe {
            let factor = _mm_cvtph_ps(_mm_cvtsi32_si128(self.factor.to_bits().into()));
            _mm_mul_ps(_mm_unpacklo_ps(factor, factor), _mm_setr_ps(1.0, -8.0, 0.0, 0.0))
        }
    }

    fn numbers(&self, row: &mut [f32]) {
        let factor = self.factor.to_f32();
        for (index, number) in row.iter_mut().enumerate() {
            *number = factor * (f32::from(nibble(&self.nibbles, index)) - 8.0);
        }
    }
}

impl Block for Q4_1 {
    #[inline(always)]
    unsafe fn values(&self) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { unpack(&self.nibbles) }
    }

    #[inline(always)]
    unsafe fn dot(values: __m256i, activations: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { dot_nibbles(values, activations) }
    }

    #[inline(always)]
    unsafe fn factors(&self) -> __m128 {
        let bits = u32::from(self.factor.to_bits()) | u32::from(self.minimum.to_bits()) << 16;
        // SAFETY: F16C is the caller's promise.
        unsafe { _mm_cvtph_ps(_mm_cvtsi32_si128(bits as i32)) }
    }

    fn numbers(&self, row: &mut [f32]) {
        let (factor, minimum) = (self.factor.to_f32(), self.minimum.to_f32());
        for (index, number) in row.iter_mut().enumerate() {
            *number = factor * f32::from(nibble(&self.nibbles, index)) + minimum;
        }
    }
}

impl Block for Q8_0 {
    #[inline(always)]
    unsafe fn values(&self) -> __m256i {
        // SAFETY: reads the 32 bytes of the array; AVX2 is the caller's promise.
        unsafe { _mm256_loadu_si256(self.values.as_ptr().cast()) }
    }

    #[inline(always)]
    unsafe fn dot(values: __m256i, activations: __m256i) -> __m256i {
        // |w| times a with the sign of w: sums of two are at most 2 * 128 * 127, which 16 bits hold.
        // SAFETY: AVX2 is the caller's promise.
        unsafe {
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(values), _mm256_sign_epi8(activations, values));
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        }
    }

    #[inline(always)]
    unsafe fn factors(&self) -> __m128 {
        // SAFETY: F16C is the caller's promise.
        unsafe { _mm_cvtph_ps(_mm_cvtsi32_si128(self.factor.to_bits().into())) }
    }

    fn numbers(&self, row: &mut [f32]) {
        let factor = self.factor.to_f32();
        for (number, &value) in row.iter_mut().zip(&self.values) {
            *number = factor * f32::from(value);
        }
    }
}

fn nibble(nibbles: &[u8; 16], index: usize) -> u8 {
    if index < 16 { nibbles[index] & 0x0f } else { nibbles[index - 16] >> 4 }
}

struct Rows<B> {
    blocks: Box<[B]>,
    blocks_per_row: usize,
}

impl<B: Block> Rows<B> {
    fn load(
        inputs: usize,
        outputs: usize,
        bytes: &[u8],
        copied: &mut dyn FnMut(usize),
    ) -> Option<Box<dyn Weights>> {
        let blocks = copy::<B>(bytes, copied)?;
        let blocks_per_row = inputs / BLOCK;
        let whole = inputs.is_multiple_of(BLOCK) && blocks_per_row.checked_mul(outputs) == Some(blocks.len());
        whole.then(|| Box::new(Rows { blocks, blocks_per_row }) as Box<dyn Weights>)
    }

    fn blocks(&self, row: usize) -> &[B] {
        &self.blocks[row * self.blocks_per_row..(row + 1) * self.blocks_per_row]
    }

    /// # Safety
    /// As [`Weights::multiply`], and the processor has the features.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn multiply_avx2(
        &self,
        outputs: Range<usize>,
        input: &Activations,
        rows: usize,
        products: &Disjoint<'_, f32>,
        stride: usize,
    ) {
        for start in (0..rows).step_by(ROWS) {
            let end = rows.min(start + ROWS);
            let mut output = outputs.start;
            while output < outputs.end {
                let four = output + 4 <= outputs.end;
                let mut row = start;
                while row < end {
                    // SAFETY: the features are the caller's promise, and so is that nobody else writes these products.
                    unsafe {
                        row += match (four, end - row) {
                            (true, 1) => self.tile::<4, 1>(output, row, input, products, stride),
                            (true, _) => self.tile::<4, 2>(output, row, input, products, stride),
                            (false, 1) => self.tile::<1, 1>(output, row, input, products, stride),
                            (false, _) => self.tile::<1, 2>(output, row, input, products, stride),
                        };
                    }
                }
                output += if four { 4 } else { 1 };
            }
        }
    }

    /// Products of `O` weight rows with `R` rows of activations; returns `R`.
    ///
    /// # Safety
    /// As [`Weights::multiply`], and the processor has the features.
    #[inline(always)]
    unsafe fn tile<const O: usize, const R: usize>(
        &self,
        output: usize,
        row: usize,
        input: &Activations,
        products: &Disjoint<'_, f32>,
        stride: usize,
    ) -> usize {
        let weights: [&[B]; O] = std::array::from_fn(|index| self.blocks(output + index));
        let activations: [&[Int8Block]; R] = std::array::from_fn(|index| Int8Block::row(input, row + index));
        let count = self.blocks_per_row;
        assert!(weights.iter().all(|blocks| blocks.len() == count), "whole rows");
        assert!(activations.iter().all(|blocks| blocks.len() == count), "rows of the matrix's inputs");
        // SAFETY: `block` stays below the lengths asserted above. AVX2, FMA and F16C are the caller's promise.
        unsafe {
            let mut lanes = [[_mm256_setzero_ps(); R]; O];
            // The second lane; the first has the factors' sum, which nobody wants.
            let mut minima = [[_mm_setzero_ps(); R]; O];
            for block in 0..count {
                for o in 0..O {
                    let weight = weights[o].get_unchecked(block);
                    if R == 1 {
                        // One row at a time is bound by memory. The next four weight rows follow these; beyond the end
                        // of the matrix the address is never read.
                        let ahead = (&raw const *weight).wrapping_add(O * count);
                        _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                    }
                    let (values, factors) = (weight.values(), weight.factors());
                    for r in 0..R {
                        let activation = activations[r].get_unchecked(block);
                        let dot = B::dot(values, _mm256_loadu_si256(activation.values.as_ptr().cast()));
                        // (factor, sum) of the activations lie side by side.
                        let pair = _mm_castsi128_ps(_mm_loadu_si64((&raw const activation.factor).cast()));
                        let scaled = _mm_mul_ps(factors, pair);
                        lanes[o][r] = _mm256_fmadd_ps(
                            _mm256_cvtepi32_ps(dot),
                            _mm256_broadcastss_ps(scaled),
                            lanes[o][r],
                        );
                        minima[o][r] = _mm_add_ps(minima[o][r], scaled);
                    }
                }
            }
            for r in 0..R {
                let at = (row + r) * stride + output;
                let products = products.part(at..at + O);
                for o in 0..O {
                    let half = _mm_add_ps(
                        _mm256_castps256_ps128(lanes[o][r]),
                        _mm256_extractf128_ps::<1>(lanes[o][r]),
                    );
                    let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
                    let sum = _mm_add_ss(pair, _mm_movehdup_ps(pair));
                    products[o] = _mm_cvtss_f32(sum) + _mm_cvtss_f32(_mm_movehdup_ps(minima[o][r]));
                }
            }
        }
        R
    }
}

impl<B: Block> Weights for Rows<B> {
    fn activation(&self) -> ActivationKind {
        ActivationKind::Int8
    }

    fn row(&self, index: usize, row: &mut [f32]) {
        for (block, numbers) in self.blocks(index).iter().zip(row.chunks_exact_mut(BLOCK)) {
            block.numbers(numbers);
        }
    }

    unsafe fn multiply(
        &self,
        outputs: Range<usize>,
        input: &Activations,
        rows: usize,
        products: &Disjoint<'_, f32>,
        stride: usize,
    ) {
        // SAFETY: a matrix is loaded as this type only where `supports` found the features; the rest is the caller's
        // promise.
        unsafe { self.multiply_avx2(outputs, input, rows, products, stride) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::matmul::{Product, multiply};
    use super::super::team::Team;
    use super::*;
    use crate::kernels::blocks::Matrix;
    use crate::synthetic::encode;

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let next = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(next).collect()
    }

    /// Against f64 with the same weights and the same 8-bit activations, for every number of rows and an odd number of
    /// outputs.
    #[test]
    fn agrees_with_f64() {
        let (inputs, outputs) = (96, 23);
        for kind in [TensorType::Q4_0, TensorType::Q4_1, TensorType::Q8_0] {
            if !supports(kind) {
                println!("SKIPPED: this processor has no AVX2");
                return;
            }
            let bytes = encode(kind, &noise(inputs * outputs, 1));
            let matrix = Matrix::load(kind, inputs, outputs, &bytes, &mut |_| {}).unwrap();
            let mut team = Team::new(2).unwrap();
            for rows in [1, 2, 3, 17, 35] {
                let mut source = noise(rows * inputs, 2);
                let mut activations = Activations::default();
                activations.fill(&mut team, &[ActivationKind::Int8], &mut source, inputs, &|_, _| {});
                let mut out = vec![f32::NAN; rows * outputs];
                multiply(&mut team, &activations, rows, [Product { matrix: &matrix, out: &mut out }]);
                for row in 0..rows {
                    for output in 0..outputs {
                        let mut weights = vec![0.0; inputs];
                        matrix.row(output, &mut weights);
                        let stored = Int8Block::row(&activations, row).iter().flat_map(|block| {
                            block.values.iter().map(|&value| f64::from(value) * f64::from(block.factor))
                        });
                        let terms: Vec<f64> = stored.zip(&weights).map(|(a, &w)| a * f64::from(w)).collect();
                        let exact: f64 = terms.iter().sum();
                        let size: f64 = terms.iter().map(|term| term.abs()).sum();
                        let error = (f64::from(out[row * outputs + output]) - exact).abs() / size;
                        assert!(error < 1e-6, "{kind} {rows} rows, ({row}, {output}): {error}");
                    }
                }
            }
        }
    }
}
