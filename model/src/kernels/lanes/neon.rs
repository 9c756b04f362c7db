//! Sixteen lanes in four registers (64-bit ARM, which always has NEON). Dot products of bytes take one instruction where
//! the processor has it (`dotprod`, in all of Apple's and those since ARMv8.4), else four.

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use half::f16;

use super::{Kernel, LANES, Lanes};

/// With `DOTPROD` the proof that the processor has dot products of bytes; NEON itself is in the name of the target.
#[derive(Clone, Copy)]
pub(super) struct Neon<const DOTPROD: bool>(());

impl Neon<true> {
    pub(super) fn is_available() -> bool {
        std::arch::is_aarch64_feature_detected!("dotprod")
    }
}

/// # Safety
/// [`Neon::is_available`].
#[target_feature(enable = "dotprod")]
pub(super) unsafe fn run_dotprod<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon::<true>(()))
}

pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon::<false>(()))
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

impl<const DOTPROD: bool> Lanes for Neon<DOTPROD> {
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
