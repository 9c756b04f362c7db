//! Sixteen lanes in four registers (64-bit ARM, which always has NEON). Dot products of bytes take one instruction where
//! the processor has it (`dotprod`, in all of Apple's and those since ARMv8.4), else four; several rows of activations
//! are multiplied two at a time where it has products of small matrices (`i8mm`: ARMv8.6, Apple's since M2).

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use half::f16;

use super::{Kernel, LANES, Lanes};
use crate::kernels::activations::Int8Block;
use crate::kernels::tiles::{Tile, each_row};

/// With `DOTPROD` the proof that the processor has dot products of bytes, with `I8MM` that it has products of matrices of
/// two rows and eight columns of bytes; NEON itself is in the name of the target.
#[derive(Clone, Copy)]
pub(super) struct Neon<const DOTPROD: bool, const I8MM: bool>(());

pub(super) type Dotprod = Neon<true, false>;
pub(super) type I8mm = Neon<true, true>;

impl Dotprod {
    pub(super) fn is_available() -> bool {
        std::arch::is_aarch64_feature_detected!("dotprod")
    }
}

impl I8mm {
    pub(super) fn is_available() -> bool {
        Dotprod::is_available() && std::arch::is_aarch64_feature_detected!("i8mm")
    }
}

/// # Safety
/// [`I8mm::is_available`].
#[target_feature(enable = "dotprod,i8mm")]
pub(super) unsafe fn run_i8mm<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon::<true, true>(()))
}

/// # Safety
/// [`Dotprod::is_available`].
#[target_feature(enable = "dotprod")]
pub(super) unsafe fn run_dotprod<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon::<true, false>(()))
}

pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon::<false, false>(()))
}

/// An instruction of the path.
macro_rules! instruction {
    ($call:expr) => {
        // SAFETY: the processor has it, as the target and `self` say; pointers are those of references and stay within
        // them.
        unsafe { $call }
    };
}

/// Four activations in each lane.
#[inline(always)]
fn repeated(activations: i32) -> int8x16_t {
    instruction!(vreinterpretq_s8_s32(vdupq_n_s32(activations)))
}

/// Adds to each 32-bit lane the dot product of its four bytes, none of which is -128.
#[inline(always)]
fn dot<const DOTPROD: bool>(sums: int32x4_t, weights: int8x16_t, activations: int8x16_t) -> int32x4_t {
    if DOTPROD {
        let mut sums = sums;
        // The intrinsic is not stable. The directive is for builds in which this is not inlined into `run_dotprod`.
        // SAFETY: the caller has a `Neon<true>`; registers only.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {sums:v}.4s, {weights:v}.16b, {activations:v}.16b",
                sums = inout(vreg) sums,
                weights = in(vreg) weights,
                activations = in(vreg) activations,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sums
    } else {
        instruction!({
            let low = vmull_s8(vget_low_s8(weights), vget_low_s8(activations));
            let high = vmull_high_s8(weights, activations);
            // Two products: at most 2 * 127 * 127, which an i16 holds.
            vpadalq_s16(sums, vpaddq_s16(low, high))
        })
    }
}

/// Adds to the four sums the products of two rows of weights with two rows of activations, eight columns each: the first
/// weights with the first and the second activations, then the second weights.
#[inline(always)]
fn multiply_matrices(sums: int32x4_t, weights: int8x16_t, activations: int8x16_t) -> int32x4_t {
    let mut sums = sums;
    // As in `dot`.
    // SAFETY: the caller has an `I8mm`; registers only.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "smmla {sums:v}.4s, {weights:v}.16b, {activations:v}.16b",
            sums = inout(vreg) sums,
            weights = in(vreg) weights,
            activations = in(vreg) activations,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// [`Lanes::integers`] for an even number of rows. The sums of two rows of activations with four of weights are two
/// registers, a matrix in each; they become one for each row of activations at the end.
#[inline(always)]
fn by_matrices<T: Tile, const N: usize>(
    lanes: I8mm,
    tile: &T,
    blocks: [&Int8Block; N],
    (first, end): (usize, usize),
    sums: [i32; N],
) -> [[int32x4_t; 4]; N] {
    let zero = instruction!(vdupq_n_s32(0));
    // Of rows n and n + 1 of the activations: with the first half of each four rows of weights, and with the second.
    let mut matrices = [[zero; 4]; N];
    let mut group = first;
    while group < end {
        let [low, high] = [tile.integers(lanes, group), tile.integers(lanes, group + 1)];
        for i in 0..4 {
            let [low, high] = [low[i], high[i]].map(|bytes| instruction!(vreinterpretq_s32_u8(bytes)));
            let weights = [instruction!(vzip1q_s32(low, high)), instruction!(vzip2q_s32(low, high))];
            for (blocks, matrices) in blocks.as_chunks::<2>().0.iter().zip(matrices.as_chunks_mut::<2>().0) {
                let activations = pair(blocks, group);
                for (matrices, weights) in matrices.iter_mut().zip(weights) {
                    let weights = instruction!(vreinterpretq_s8_s32(weights));
                    matrices[i] = multiply_matrices(matrices[i], weights, activations);
                }
            }
        }
        group += 2;
    }
    let mut totals = matrices;
    for (totals, sums) in totals.as_chunks_mut::<2>().0.iter_mut().zip(sums.as_chunks::<2>().0) {
        for i in 0..4 {
            let [a, b] = [totals[0][i], totals[1][i]];
            for (n, sum) in
                [instruction!(vuzp1q_s32(a, b)), instruction!(vuzp2q_s32(a, b))].into_iter().enumerate()
            {
                totals[n][i] = instruction!(vaddq_s32(sum, vdupq_n_s32(-T::OFFSET * sums[n])));
            }
        }
    }
    totals
}

/// The activations of two groups of columns, of both rows.
#[inline(always)]
fn pair([a, b]: &[&Int8Block; 2], group: usize) -> int8x16_t {
    let [a, b] = [a, b].map(|block| &block.values.as_chunks::<8>().0[group / 2]);
    instruction!(vcombine_s8(vld1_s8(a.as_ptr()), vld1_s8(b.as_ptr())))
}

impl<const DOTPROD: bool, const I8MM: bool> Lanes for Neon<DOTPROD, I8MM> {
    type F32 = [float32x4_t; 4];
    type I32 = [int32x4_t; 4];
    type Bytes = [uint8x16_t; 4];
    type Sums = [int32x4_t; 4];

    const ACCUMULATORS: usize = 4;
    const NARROW: bool = false;

    #[inline(always)]
    fn splat(self, number: f32) -> Self::F32 {
        [instruction!(vdupq_n_f32(number)); 4]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F32 {
        from_fn(|i| instruction!(vld1q_f32(from.as_ptr().add(4 * i))))
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], numbers: Self::F32) {
        for (i, numbers) in numbers.into_iter().enumerate() {
            instruction!(vst1q_f32(to.as_mut_ptr().add(4 * i), numbers));
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F32 {
        let at = from.as_ptr().cast::<u16>();
        from_fn(|i| instruction!(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at.add(4 * i))))))
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F32 {
        instruction!({
            let bytes = vld1q_s8(from.as_ptr());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            let quarters = [
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ];
            quarters.map(|quarter| vcvtq_f32_s32(quarter))
        })
    }

    #[inline(always)]
    fn store_f16(self, to: &mut [f16; LANES], numbers: Self::F32) {
        let at = to.as_mut_ptr().cast::<u16>();
        for (i, numbers) in numbers.into_iter().enumerate() {
            instruction!(vst1_u16(at.add(4 * i), vreinterpret_u16_f16(vcvt_f16_f32(numbers))));
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|i| instruction!(vaddq_f32(a[i], b[i])))
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|i| instruction!(vsubq_f32(a[i], b[i])))
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|i| instruction!(vmulq_f32(a[i], b[i])))
    }

    #[inline(always)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|i| instruction!(vdivq_f32(a[i], b[i])))
    }

    #[inline(always)]
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        from_fn(|i| instruction!(vfmaq_f32(c[i], a[i], b[i])))
    }

    /// Not the processor's own maximum, which gives NaN where either is not a number.
    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|i| instruction!(vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i])))
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        from_fn(|i| instruction!(vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i])))
    }

    #[inline(always)]
    fn first(self, count: usize, a: Self::F32, b: Self::F32) -> Self::F32 {
        let numbers: [i32; LANES] = from_fn(|lane| lane as i32);
        from_fn(|i| {
            instruction!({
                let lanes = vld1q_s32(numbers.as_ptr().add(4 * i));
                vbslq_f32(vcltq_s32(lanes, vdupq_n_s32(count as i32)), a[i], b[i])
            })
        })
    }

    #[inline(always)]
    fn round(self, numbers: Self::F32) -> Self::I32 {
        numbers.map(|numbers| instruction!(vcvtnq_s32_f32(numbers)))
    }

    #[inline(always)]
    fn number(self, integers: Self::I32) -> Self::F32 {
        integers.map(|integers| instruction!(vcvtq_f32_s32(integers)))
    }

    #[inline(always)]
    fn power_of_2(self, exponents: Self::I32) -> Self::F32 {
        exponents.map(|exponents| {
            instruction!(vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(exponents, vdupq_n_s32(127)))))
        })
    }

    #[inline(always)]
    fn store_i32(self, to: &mut [i32; LANES], integers: Self::I32) {
        for (i, integers) in integers.into_iter().enumerate() {
            instruction!(vst1q_s32(to.as_mut_ptr().add(4 * i), integers));
        }
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; 4 * LANES]) -> Self::Bytes {
        from_fn(|i| instruction!(vld1q_u8(from.as_ptr().add(16 * i))))
    }

    #[inline(always)]
    fn low(self, bytes: Self::Bytes) -> Self::Bytes {
        bytes.map(|bytes| instruction!(vandq_u8(bytes, vdupq_n_u8(0x0f))))
    }

    #[inline(always)]
    fn high(self, bytes: Self::Bytes) -> Self::Bytes {
        bytes.map(|bytes| instruction!(vshrq_n_u8::<4>(bytes)))
    }

    /// A shift to the left by a negative number is one to the right.
    #[inline(always)]
    fn shifted(self, bytes: Self::Bytes, shift: u32, mask: u8) -> Self::Bytes {
        let shift = instruction!(vdupq_n_s8(-(shift as i8)));
        bytes.map(|bytes| instruction!(vandq_u8(vshlq_u8(bytes, shift), vdupq_n_u8(mask))))
    }

    #[inline(always)]
    fn raised(self, bytes: Self::Bytes) -> Self::Bytes {
        bytes.map(|bytes| instruction!(vshlq_n_u8::<4>(bytes)))
    }

    #[inline(always)]
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes {
        from_fn(|i| instruction!(vorrq_u8(a[i], b[i])))
    }

    #[inline(always)]
    fn sums(self, start: i32) -> Self::Sums {
        [instruction!(vdupq_n_s32(start)); 4]
    }

    #[inline(always)]
    fn dot(self, sums: Self::Sums, weights: Self::Bytes, activations: i32) -> Self::Sums {
        self.dot_signed(sums, weights, activations)
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
        self.sums(0)
    }

    #[inline(always)]
    fn dot_signed(self, sums: Self::I32, weights: Self::Bytes, activations: i32) -> Self::I32 {
        let activations = repeated(activations);
        from_fn(|i| dot::<DOTPROD>(sums[i], instruction!(vreinterpretq_s8_u8(weights[i])), activations))
    }

    #[inline(always)]
    fn integers<T: Tile, const N: usize>(
        self,
        tile: &T,
        blocks: [&Int8Block; N],
        (first, end): (usize, usize),
        sums: [i32; N],
    ) -> [Self::I32; N] {
        if I8MM && N.is_multiple_of(2) {
            by_matrices(Neon(()), tile, blocks, (first, end), sums)
        } else {
            each_row(self, tile, blocks, (first, end), sums)
        }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a hint; the address need not be valid.
        unsafe {
            asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags))
        }
    }

    #[inline(always)]
    fn sum(self, [a, b, c, d]: Self::F32) -> f32 {
        instruction!({
            let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        })
    }

    #[inline(always)]
    fn largest(self, [a, b, c, d]: Self::F32) -> f32 {
        instruction!(vmaxvq_f32(vmaxq_f32(vmaxq_f32(a, c), vmaxq_f32(b, d))))
    }
}
