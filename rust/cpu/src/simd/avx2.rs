//! AVX2 with FMA and F16C: Intel from Haswell on, AMD from Zen on.
#![allow(unsafe_op_in_unsafe_fn, reason = "see the parent module")]
#![allow(
    clippy::wildcard_imports,
    reason = "the instructions, which have long names of their own"
)]

use std::arch::x86_64::*;

use super::Simd;

/// Eight lanes.
pub(crate) struct Avx2;

impl Simd for Avx2 {
    const LANES: usize = 8;
    const NUM_REGISTERS: usize = 16;
    type V = __m256;
    type I = __m256i;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        _mm256_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m256) {
        _mm256_storeu_ps(to, x);
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m256 {
        let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())))
    }
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8) -> (__m256, __m256) {
        let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
        let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
        let high = _mm256_srli_epi32::<4>(bytes);
        (_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        _mm256_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        _mm256_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        _mm256_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        _mm256_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn round_exp2(x: __m256) -> (__m256, __m256) {
        let n = _mm256_cvtps_epi32(x);
        let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127)));
        (_mm256_cvtepi32_ps(n), _mm256_castsi256_ps(power))
    }
    #[inline(always)]
    unsafe fn sum(x: __m256) -> f32 {
        let half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
        _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
    }
    #[inline(always)]
    unsafe fn sums([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        let pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        let sums = _mm_add_ps(
            _mm256_castps256_ps128(pairs),
            _mm256_extractf128_ps::<1>(pairs),
        );
        std::mem::transmute::<__m128, [f32; 4]>(sums)
    }
    #[inline(always)]
    unsafe fn largest(x: __m256) -> f32 {
        let half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
        _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)))
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }

    #[inline(always)]
    unsafe fn zero_i32() -> __m256i {
        _mm256_setzero_si256()
    }
    #[inline(always)]
    unsafe fn widen_i8(from: *const i8) -> __m256i {
        _mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast()))
    }
    #[inline(always)]
    unsafe fn splat_pair(from: *const i16) -> __m256i {
        _mm256_set1_epi32(from.cast::<i32>().read_unaligned())
    }
    #[inline(always)]
    unsafe fn dot_pairs(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        _mm256_add_epi32(sums, _mm256_madd_epi16(a, b))
    }
    #[inline(always)]
    unsafe fn to_f32(x: __m256i) -> __m256 {
        _mm256_cvtepi32_ps(x)
    }
    #[inline(always)]
    unsafe fn store_i16(to: *mut i16, x: __m256) {
        let whole = _mm256_cvtps_epi32(x);
        let low = _mm256_castsi256_si128(whole);
        let high = _mm256_extracti128_si256::<1>(whole);
        _mm_storeu_si128(to.cast(), _mm_packs_epi32(low, high));
    }

    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: __m256) {
        _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, x: __m256) {
        let whole = _mm256_cvtps_epi32(x);
        let low = _mm256_castsi256_si128(whole);
        let high = _mm256_extracti128_si256::<1>(whole);
        let pairs = _mm_packs_epi32(low, high);
        _mm_storel_epi64(to.cast(), _mm_packs_epi16(pairs, pairs));
    }
}
