//! Sixteen lanes in two registers (AVX2 with FMA and F16C). Dot products of bytes are summed in 16 bits as long as they
//! fit, which halves the instructions for each.

use std::arch::x86_64::*;

use half::f16;

use super::{Kernel, LANES, Lanes};

/// The proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn is_available() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }
}

/// # Safety
/// [`Avx2::is_available`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
}

/// An instruction of the path.
macro_rules! instruction {
    ($call:expr) => {
        // SAFETY: `self` is the proof that the processor has it; pointers are those of references and stay within them.
        unsafe { $call }
    };
}

/// 32-bit sums, and 16-bit ones that are added to them by a flush.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    wide: [__m256i; 2],
    narrow: [__m256i; 2],
}

impl Lanes for Avx2 {
    type F32 = [__m256; 2];
    type I32 = [__m256i; 2];
    type Bytes = [__m256i; 2];
    type Sums = Sums;

    const ACCUMULATORS: usize = 5;
    const NARROW: bool = true;

    #[inline(always)]
    fn splat(self, number: f32) -> Self::F32 {
        [instruction!(_mm256_set1_ps(number)); 2]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F32 {
        let at = from.as_ptr();
        instruction!([_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))])
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], [a, b]: Self::F32) {
        let at = to.as_mut_ptr();
        instruction!({
            _mm256_storeu_ps(at, a);
            _mm256_storeu_ps(at.add(8), b)
        })
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F32 {
        let at = from.as_ptr().cast::<__m128i>();
        instruction!([_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at.add(1)))])
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F32 {
        let at = from.as_ptr();
        instruction!([
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.add(8).cast())))
        ])
    }

    #[inline(always)]
    fn store_f16(self, to: &mut [f16; LANES], [a, b]: Self::F32) {
        let at = to.as_mut_ptr().cast::<__m128i>();
        instruction!({
            _mm_storeu_si128(at, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a));
            _mm_storeu_si128(at.add(1), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(b))
        })
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        instruction!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }

    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn first(self, count: usize, a: Self::F32, b: Self::F32) -> Self::F32 {
        instruction!({
            let count = _mm256_set1_epi32(count as i32);
            let low = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
            let high = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
            [
                _mm256_blendv_ps(b[0], a[0], _mm256_castsi256_ps(low)),
                _mm256_blendv_ps(b[1], a[1], _mm256_castsi256_ps(high)),
            ]
        })
    }

    #[inline(always)]
    fn round(self, numbers: Self::F32) -> Self::I32 {
        instruction!(numbers.map(|half| _mm256_cvtps_epi32(half)))
    }

    #[inline(always)]
    fn number(self, integers: Self::I32) -> Self::F32 {
        instruction!([_mm256_cvtepi32_ps(integers[0]), _mm256_cvtepi32_ps(integers[1])])
    }

    #[inline(always)]
    fn power_of_2(self, exponents: Self::I32) -> Self::F32 {
        instruction!({
            let bias = _mm256_set1_epi32(127);
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(exponents[0], bias))),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(exponents[1], bias))),
            ]
        })
    }

    #[inline(always)]
    fn store_i32(self, to: &mut [i32; LANES], [a, b]: Self::I32) {
        let at = to.as_mut_ptr().cast::<__m256i>();
        instruction!({
            _mm256_storeu_si256(at, a);
            _mm256_storeu_si256(at.add(1), b)
        })
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; 4 * LANES]) -> Self::Bytes {
        let at = from.as_ptr().cast::<__m256i>();
        instruction!([_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))])
    }

    #[inline(always)]
    fn low(self, bytes: Self::Bytes) -> Self::Bytes {
        instruction!({
            let mask = _mm256_set1_epi8(0x0f);
            [_mm256_and_si256(bytes[0], mask), _mm256_and_si256(bytes[1], mask)]
        })
    }

    #[inline(always)]
    fn high(self, bytes: Self::Bytes) -> Self::Bytes {
        instruction!({
            let mask = _mm256_set1_epi8(0x0f);
            [
                _mm256_and_si256(_mm256_srli_epi16::<4>(bytes[0]), mask),
                _mm256_and_si256(_mm256_srli_epi16::<4>(bytes[1]), mask),
            ]
        })
    }

    #[inline(always)]
    fn shifted(self, bytes: Self::Bytes, shift: u32, mask: u8) -> Self::Bytes {
        instruction!({
            let mask = _mm256_set1_epi8(mask as i8);
            let shift = _mm_cvtsi32_si128(shift as i32);
            [
                _mm256_and_si256(_mm256_srl_epi16(bytes[0], shift), mask),
                _mm256_and_si256(_mm256_srl_epi16(bytes[1], shift), mask),
            ]
        })
    }

    #[inline(always)]
    fn raised(self, bytes: Self::Bytes) -> Self::Bytes {
        instruction!({
            let mask = _mm256_set1_epi8(0x0f);
            [
                _mm256_andnot_si256(mask, _mm256_slli_epi16::<4>(bytes[0])),
                _mm256_andnot_si256(mask, _mm256_slli_epi16::<4>(bytes[1])),
            ]
        })
    }

    #[inline(always)]
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes {
        instruction!([_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])])
    }

    #[inline(always)]
    fn sums(self, start: i32) -> Self::Sums {
        instruction!(Sums { wide: [_mm256_set1_epi32(start); 2], narrow: [_mm256_setzero_si256(); 2] })
    }

    #[inline(always)]
    fn dot(self, Sums { wide, narrow }: Sums, weights: Self::Bytes, activations: i32) -> Sums {
        instruction!({
            let activations = _mm256_set1_epi32(activations);
            let narrow = [
                _mm256_add_epi16(narrow[0], _mm256_maddubs_epi16(weights[0], activations)),
                _mm256_add_epi16(narrow[1], _mm256_maddubs_epi16(weights[1], activations)),
            ];
            Sums { wide, narrow }
        })
    }

    #[inline(always)]
    fn flush(self, Sums { wide, narrow }: Sums) -> Sums {
        instruction!({
            let one = _mm256_set1_epi16(1);
            let wide = [
                _mm256_add_epi32(wide[0], _mm256_madd_epi16(narrow[0], one)),
                _mm256_add_epi32(wide[1], _mm256_madd_epi16(narrow[1], one)),
            ];
            Sums { wide, narrow: [_mm256_setzero_si256(); 2] }
        })
    }

    #[inline(always)]
    fn total(self, sums: Sums) -> Self::I32 {
        self.flush(sums).wide
    }

    #[inline(always)]
    fn signed_sums(self, _activations: i32) -> Self::I32 {
        [instruction!(_mm256_setzero_si256()); 2]
    }

    /// The instruction takes unsigned numbers on its left, so the signs of the activations go to the weights.
    #[inline(always)]
    fn dot_signed(self, sums: Self::I32, weights: Self::Bytes, activations: i32) -> Self::I32 {
        instruction!({
            let activations = _mm256_set1_epi32(activations);
            let sizes = _mm256_abs_epi8(activations);
            let one = _mm256_set1_epi16(1);
            let a = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(weights[0], activations));
            let b = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(weights[1], activations));
            [
                _mm256_add_epi32(sums[0], _mm256_madd_epi16(a, one)),
                _mm256_add_epi32(sums[1], _mm256_madd_epi16(b, one)),
            ]
        })
    }

    #[inline(always)]
    fn sum(self, [a, b]: Self::F32) -> f32 {
        instruction!({
            let eight = _mm256_add_ps(a, b);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn largest(self, [a, b]: Self::F32) -> f32 {
        instruction!({
            let eight = _mm256_max_ps(a, b);
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
