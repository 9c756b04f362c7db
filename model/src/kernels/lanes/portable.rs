//! The path of loops: for processors without one of their own, and the one that the others are compared with.

use std::array::from_fn;

use half::f16;

use super::{LANES, Lanes};

#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Lanes for Portable {
    type F32 = [f32; LANES];
    type I32 = [i32; LANES];
    type Bytes = [u8; 4 * LANES];
    type Sums = [i32; LANES];

    const ACCUMULATORS: usize = 4;
    const NARROW: bool = false;

    #[inline(always)]
    fn splat(self, number: f32) -> Self::F32 {
        [number; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F32 {
        *from
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], numbers: Self::F32) {
        *to = numbers;
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F32 {
        from.map(f16::to_f32)
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F32 {
        from.map(f32::from)
    }

    #[inline(always)]
    fn store_f16(self, to: &mut [f16; LANES], numbers: Self::F32) {
        *to = numbers.map(f16::from_f32);
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|lane| a[lane] + b[lane])
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|lane| a[lane] - b[lane])
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|lane| a[lane] * b[lane])
    }

    #[inline(always)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|lane| a[lane] / b[lane])
    }

    #[inline(always)]
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }

    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|lane| if a[lane] > b[lane] { a[lane] } else { b[lane] })
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|lane| if a[lane] < b[lane] { a[lane] } else { b[lane] })
    }

    #[inline(always)]
    fn first(self, count: usize, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|lane| if lane < count { a[lane] } else { b[lane] })
    }

    #[inline(always)]
    fn round(self, numbers: Self::F32) -> Self::I32 {
        numbers.map(|number| number.round_ties_even() as i32)
    }

    #[inline(always)]
    fn number(self, integers: Self::I32) -> Self::F32 {
        integers.map(|integer| integer as f32)
    }

    #[inline(always)]
    fn power_of_2(self, exponents: Self::I32) -> Self::F32 {
        exponents.map(|exponent| f32::from_bits((exponent.wrapping_add(127) as u32) << 23))
    }

    #[inline(always)]
    fn store_i32(self, to: &mut [i32; LANES], integers: Self::I32) {
        *to = integers;
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; 4 * LANES]) -> Self::Bytes {
        *from
    }

    #[inline(always)]
    fn low(self, bytes: Self::Bytes) -> Self::Bytes {
        bytes.map(|byte| byte & 0x0f)
    }

    #[inline(always)]
    fn high(self, bytes: Self::Bytes) -> Self::Bytes {
        bytes.map(|byte| byte >> 4)
    }

    #[inline(always)]
    fn shifted(self, bytes: Self::Bytes, shift: u32, mask: u8) -> Self::Bytes {
        bytes.map(|byte| (byte >> shift) & mask)
    }

    #[inline(always)]
    fn raised(self, bytes: Self::Bytes) -> Self::Bytes {
        bytes.map(|byte| byte << 4)
    }

    #[inline(always)]
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes {
        from_fn(|byte| a[byte] | b[byte])
    }

    #[inline(always)]
    fn sums(self, start: i32) -> Self::Sums {
        [start; LANES]
    }

    #[inline(always)]
    fn dot(self, sums: Self::Sums, weights: Self::Bytes, activations: i32) -> Self::Sums {
        let activations = activations.to_le_bytes();
        from_fn(|lane| {
            let products = (0..4).map(|k| i32::from(weights[4 * lane + k]) * i32::from(activations[k] as i8));
            sums[lane] + products.sum::<i32>()
        })
    }

    #[inline(always)]
    fn flush(self, sums: Self::Sums) -> Self::Sums {
        sums
    }

    #[inline(always)]
    fn total(self, sums: Self::Sums) -> Self::I32 {
        sums
    }

    #[inline(always)]
    fn signed_sums(self, _activations: i32) -> Self::I32 {
        [0; LANES]
    }

    #[inline(always)]
    fn dot_signed(self, sums: Self::I32, weights: Self::Bytes, activations: i32) -> Self::I32 {
        let activations = activations.to_le_bytes();
        from_fn(|lane| {
            let products =
                (0..4).map(|k| i32::from(weights[4 * lane + k] as i8) * i32::from(activations[k] as i8));
            sums[lane] + products.sum::<i32>()
        })
    }

    #[inline(always)]
    fn sum(self, mut lanes: Self::F32) -> f32 {
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
        }
        lanes[0]
    }

    #[inline(always)]
    fn largest(self, lanes: Self::F32) -> f32 {
        lanes.iter().fold(f32::NEG_INFINITY, |largest, &lane| if lane > largest { lane } else { largest })
    }

    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}
}
