//! AVX-512 F and BW: Intel servers from Skylake on, AMD from Zen 4 on; with VNNI, Intel's from Cascade Lake on, AMD's all.
#![allow(unsafe_op_in_unsafe_fn, reason = "see the parent module")]
#![allow(
    clippy::wildcard_imports,
    reason = "the instructions, which have long names of their own"
)]

use std::arch::x86_64::*;

use super::avx2::Avx2;
use super::{Quads, Simd, UPPER_HALF};

/// Sixteen lanes. With `VNNI`, whole numbers are multiplied in fours of bytes, to the same bits.
pub(crate) struct Avx512<const VNNI: bool>;

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    const LANES: usize = 16;
    const NUM_REGISTERS: usize = 32;
    const WIDENS_BESIDE: bool = false;
    const AHEAD: usize = 1024;
    type V = __m512;
    type I = __m512i;
    const TOGETHER: usize = if VNNI { 4 } else { 2 };

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        _mm512_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m512) {
        _mm512_storeu_ps(to, x);
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn round_exp2(x: __m512) -> (__m512, __m512) {
        let n = _mm512_cvtps_epi32(x);
        let power = _mm512_slli_epi32::<23>(_mm512_add_epi32(n, _mm512_set1_epi32(127)));
        (_mm512_cvtepi32_ps(n), _mm512_castsi512_ps(power))
    }
    #[inline(always)]
    unsafe fn sum(x: __m512) -> f32 {
        let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x)));
        Avx2::<false>::sum(_mm256_add_ps(_mm512_castps512_ps256(x), upper))
    }
    #[inline(always)]
    unsafe fn sums(x: [__m512; 4]) -> [f32; 4] {
        // In each quarter of a vector, then over the quarters.
        let [a, b, c, d] = x;
        let low = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let high = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let quarters = _mm512_add_ps(
            _mm512_shuffle_ps::<0b01_00_01_00>(low, high),
            _mm512_shuffle_ps::<0b11_10_11_10>(low, high),
        );
        let halves = _mm256_add_ps(
            _mm512_castps512_ps256(quarters),
            _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(quarters))),
        );
        let sums = _mm_add_ps(
            _mm256_castps256_ps128(halves),
            _mm256_extractf128_ps::<1>(halves),
        );
        std::mem::transmute::<__m128, [f32; 4]>(sums)
    }
    #[inline(always)]
    unsafe fn largest(x: __m512) -> f32 {
        _mm512_reduce_max_ps(x)
    }
    #[inline(always)]
    unsafe fn turn(rows: [*const f32; 4], word: usize, to: *mut f32, stride: usize) {
        // Shuffles of twice the width are done half as often.
        Avx2::<false>::turn(rows, word, to, stride);
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[inline(always)]
    unsafe fn prefetch_near(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[inline(always)]
    unsafe fn zero_i32() -> __m512i {
        _mm512_setzero_si512()
    }
    #[inline(always)]
    unsafe fn add_i32(a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn sum_i32(x: __m512i) -> i32 {
        _mm512_reduce_add_epi32(x)
    }
    #[inline(always)]
    unsafe fn widen_i8(from: *const i8) -> __m512i {
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const u8) -> __m512i {
        _mm512_loadu_si512(from.cast())
    }
    #[inline(always)]
    unsafe fn store_pairs(to: *mut u8, x: __m512i) {
        _mm512_storeu_si512(to.cast(), x);
    }
    #[inline(always)]
    unsafe fn lower_bf16(x: __m512i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x))
    }
    #[inline(always)]
    unsafe fn upper_bf16(x: __m512i) -> __m512 {
        _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(UPPER_HALF)))
    }
    #[inline(always)]
    unsafe fn nibbles(x: __m512i) -> [__m512i; 4] {
        let mask = _mm512_set1_epi16(15);
        [
            _mm512_and_si512(x, mask),
            _mm512_and_si512(_mm512_srli_epi16::<4>(x), mask),
            _mm512_and_si512(_mm512_srli_epi16::<8>(x), mask),
            _mm512_srli_epi16::<12>(x),
        ]
    }
    #[inline(always)]
    unsafe fn splat_pair(from: *const i16) -> __m512i {
        _mm512_set1_epi32(from.cast::<i32>().read_unaligned())
    }
    #[inline(always)]
    unsafe fn dot_pairs(sums: __m512i, a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(sums, _mm512_madd_epi16(a, b))
    }
    #[inline(always)]
    unsafe fn to_f32(x: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(x)
    }
    #[inline(always)]
    unsafe fn round(x: __m512) -> __m512i {
        _mm512_cvtps_epi32(x)
    }
    #[inline(always)]
    unsafe fn store_whole(to: *mut u8, x: __m512i) {
        let bytes = if VNNI {
            // A number's lower byte is rounded to, so the upper one may be one more than its bits.
            let upper = _mm512_srai_epi32::<8>(_mm512_add_epi32(x, _mm512_set1_epi32(128)));
            let (lower, upper) = (_mm512_cvtepi32_epi8(x), _mm512_cvtepi32_epi8(upper));
            _mm256_set_m128i(
                _mm_unpackhi_epi32(lower, upper),
                _mm_unpacklo_epi32(lower, upper),
            )
        } else {
            _mm512_cvtsepi32_epi16(x)
        };
        _mm256_storeu_si256(to.cast(), bytes);
    }

    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: __m512) {
        _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, x: __m512) {
        let whole = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
        _mm_storeu_si128(to.cast(), whole);
    }
}

impl Quads for Avx512<true> {
    #[inline(always)]
    unsafe fn splat_i32(x: i32) -> __m512i {
        _mm512_set1_epi32(x)
    }
    #[inline(always)]
    unsafe fn dot_quads(sums: __m512i, w: __m512i, x: __m512i) -> __m512i {
        _mm512_dpbusd_epi32(sums, w, x)
    }
    #[inline(always)]
    unsafe fn shift_up(x: __m512i) -> __m512i {
        _mm512_slli_epi32::<8>(x)
    }
    #[inline(always)]
    unsafe fn halves(x: __m512i) -> [__m512i; 2] {
        let mask = _mm512_set1_epi8(15);
        [
            _mm512_and_si512(x, mask),
            _mm512_and_si512(_mm512_srli_epi16::<4>(x), mask),
        ]
    }
}
