//! Sixteen lanes in one register, and dot products of bytes in one instruction (AVX-512 with VNNI).

use std::arch::x86_64::*;

use half::f16;

use super::{Kernel, LANES, Lanes};

/// The proof that the processor has AVX-512 F, BW, DQ, VL, VNNI, and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn is_available() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }
}

/// # Safety
/// [`Avx512::is_available`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

/// An instruction of the path.
macro_rules! instruction {
    ($call:expr) => {
        // SAFETY: `self` is the proof that the processor has it; pointers are those of references.
        unsafe { $call }
    };
}

impl Lanes for Avx512 {
    type F32 = __m512;
    type I32 = __m512i;
    type Bytes = __m512i;
    type Sums = __m512i;

    const ACCUMULATORS: usize = 16;
    const NARROW: bool = false;

    #[inline(always)]
    fn splat(self, number: f32) -> Self::F32 {
        instruction!(_mm512_set1_ps(number))
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F32 {
        instruction!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], numbers: Self::F32) {
        instruction!(_mm512_storeu_ps(to.as_mut_ptr(), numbers))
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F32 {
        instruction!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F32 {
        instruction!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))))
    }

    #[inline(always)]
    fn store_f16(self, to: &mut [f16; LANES], numbers: Self::F32) {
        instruction!(_mm256_storeu_si256(
            to.as_mut_ptr().cast(),
            _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(numbers)
        ))
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        instruction!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn first(self, count: usize, a: Self::F32, b: Self::F32) -> Self::F32 {
        let mask = if count >= LANES { u16::MAX } else { (1 << count) - 1 };
        instruction!(_mm512_mask_blend_ps(mask, b, a))
    }

    #[inline(always)]
    fn round(self, numbers: Self::F32) -> Self::I32 {
        instruction!(_mm512_cvtps_epi32(numbers))
    }

    #[inline(always)]
    fn number(self, integers: Self::I32) -> Self::F32 {
        instruction!(_mm512_cvtepi32_ps(integers))
    }

    #[inline(always)]
    fn power_of_2(self, exponents: Self::I32) -> Self::F32 {
        instruction!(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(
            exponents,
            _mm512_set1_epi32(127)
        ))))
    }

    #[inline(always)]
    fn store_i32(self, to: &mut [i32; LANES], integers: Self::I32) {
        instruction!(_mm512_storeu_si512(to.as_mut_ptr().cast(), integers))
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; 4 * LANES]) -> Self::Bytes {
        instruction!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn low(self, bytes: Self::Bytes) -> Self::Bytes {
        instruction!(_mm512_and_si512(bytes, _mm512_set1_epi8(0x0f)))
    }

    #[inline(always)]
    fn high(self, bytes: Self::Bytes) -> Self::Bytes {
        instruction!(_mm512_and_si512(_mm512_srli_epi16::<4>(bytes), _mm512_set1_epi8(0x0f)))
    }

    #[inline(always)]
    fn shifted(self, bytes: Self::Bytes, shift: u32, mask: u8) -> Self::Bytes {
        let shift = instruction!(_mm_cvtsi32_si128(shift as i32));
        instruction!(_mm512_and_si512(_mm512_srl_epi16(bytes, shift), _mm512_set1_epi8(mask as i8)))
    }

    #[inline(always)]
    fn raised(self, bytes: Self::Bytes) -> Self::Bytes {
        instruction!(_mm512_andnot_si512(_mm512_set1_epi8(0x0f), _mm512_slli_epi16::<4>(bytes)))
    }

    #[inline(always)]
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes {
        instruction!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn sums(self, start: i32) -> Self::Sums {
        instruction!(_mm512_set1_epi32(start))
    }

    #[inline(always)]
    fn dot(self, sums: Self::Sums, weights: Self::Bytes, activations: i32) -> Self::Sums {
        instruction!(_mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(activations)))
    }

    #[inline(always)]
    fn flush(self, sums: Self::Sums) -> Self::Sums {
        sums
    }

    #[inline(always)]
    fn total(self, sums: Self::Sums) -> Self::I32 {
        sums
    }

    /// The instruction takes unsigned weights, so they are raised by 128, and what that adds is taken off at the start.
    #[inline(always)]
    fn signed_sums(self, activations: i32) -> Self::I32 {
        instruction!(_mm512_set1_epi32(activations * -128))
    }

    #[inline(always)]
    fn dot_signed(self, sums: Self::I32, weights: Self::Bytes, activations: i32) -> Self::I32 {
        let raised = instruction!(_mm512_xor_si512(weights, _mm512_set1_epi8(i8::MIN)));
        self.dot(sums, raised, activations)
    }

    #[inline(always)]
    fn sum(self, numbers: Self::F32) -> f32 {
        instruction!({
            let eight = _mm256_add_ps(_mm512_castps512_ps256(numbers), _mm512_extractf32x8_ps::<1>(numbers));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn largest(self, numbers: Self::F32) -> f32 {
        instruction!({
            let eight = _mm256_max_ps(_mm512_castps512_ps256(numbers), _mm512_extractf32x8_ps::<1>(numbers));
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        instruction!(_mm_prefetch::<_MM_HINT_T0>(at.cast()))
    }
}
