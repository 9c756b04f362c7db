//! Activations as 8-bit integers for the kernels of our own.

use crate::gguf::TensorType;

/// Numbers of a block, as in the weights' own blocks.
pub(super) const BLOCK: usize = 32;

/// 32 numbers as integers times one factor.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Int8Block {
    /// From -127 to 127.
    pub(super) values: [i8; BLOCK],
    /// What they are multiplied with. Kept as f32, unlike ggml's f16.
    pub(super) factor: f32,
    /// The factor times the sum of the values, for weights that have a minimum or an offset.
    pub(super) sum: f32,
}

/// Whether weights of a type are multiplied by a kernel of our own on this processor.
pub(super) fn supports(kind: TensorType) -> bool {
    #[cfg(target_arch = "x86_64")]
    return super::avx2::supports(kind);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = kind;
        false
    }
}

/// Stores a row of `32 * blocks` numbers, rounded to the nearest, ties to even.
pub(super) fn store(row: &[f32], blocks: &mut [Int8Block]) {
    // Adding this leaves the rounded integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    for (numbers, block) in row.chunks_exact(BLOCK).zip(blocks) {
        let largest = numbers.iter().fold(0u32, |largest, number| largest.max(number.abs().to_bits()));
        let factor = f32::from_bits(largest) / 127.0;
        let inverse = if factor > 0.0 { 1.0 / factor } else { 0.0 };
        let mut sum = 0;
        for (value, number) in block.values.iter_mut().zip(numbers) {
            let shifted = number * inverse + ROUND;
            let integer = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
            *value = integer as i8;
            sum += i32::from(*value);
        }
        block.factor = factor;
        block.sum = factor * sum as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_within_half_a_step() {
        let row: Vec<f32> = (0..64).map(|i| ((i * 37 % 64) as f32 - 31.5) * 0.3).collect();
        let mut blocks = [Int8Block::default(); 2];
        store(&row, &mut blocks);
        for (numbers, block) in row.chunks(BLOCK).zip(&blocks) {
            let mut sum = 0.0;
            for (number, &value) in numbers.iter().zip(&block.values) {
                let stored = f32::from(value) * block.factor;
                assert!((number - stored).abs() <= block.factor * 0.500_1);
                sum += stored;
            }
            assert!((sum - block.sum).abs() < 1e-3);
            assert!(block.values.iter().any(|value| value.abs() == 127));
        }
        store(&[0.0; 32], &mut blocks[..1]);
        assert_eq!((blocks[0].factor, blocks[0].sum), (0.0, 0.0));
    }
}
