//! AVX2 with FMA and F16C: Intel from Haswell on, AMD from Zen on; with AVX-VNNI, Intel from Alder Lake on.
#![allow(unsafe_op_in_unsafe_fn, reason = "see the parent module")]
#![allow(
    clippy::wildcard_imports,
    reason = "the instructions, which have long names of their own"
)]

use std::arch::x86_64::*;

use super::{Bf16, INPUTS, Quads, Simd, UPPER_HALF, Weight};

/// Eight lanes. With `VNNI`, whole numbers are multiplied in fours of bytes, to the same bits.
pub(crate) struct Avx2<const VNNI: bool>;

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    const LANES: usize = 8;
    const NUM_REGISTERS: usize = 16;
    const WIDENS_BESIDE: bool = true;
    const AHEAD: usize = 512;
    type V = __m256;
    type I = __m256i;
    const TOGETHER: usize = if VNNI { 4 } else { 2 };

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
    unsafe fn add_products<W: Weight, const R: usize, const N: usize>(
        x: *const f32,
        w: *const W,
        sums: &mut [[__m256; N]; R],
    ) {
        // float32 lie alone, bfloat16 in pairs.
        match (R, N, W::TOGETHER) {
            (4, 3, 1) => four_by_three_f32(x, w.cast(), sums),
            (4, 3, 2) => four_by_three_bf16(x, w.cast(), sums),
            _ => super::add_products::<Self, W, R, N>(x, w, INPUTS, sums, None),
        }
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
    unsafe fn turn([a, b, c, d]: [*const f32; 4], word: usize, to: *mut f32, stride: usize) {
        // Each half of a register holds a square of its own. Shuffles leave bits as they are.
        let (a, b) = (_mm256_loadu_ps(a.add(word)), _mm256_loadu_ps(b.add(word)));
        let (c, d) = (_mm256_loadu_ps(c.add(word)), _mm256_loadu_ps(d.add(word)));
        let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let words = [
            _mm256_shuffle_ps::<0b01_00_01_00>(ab_low, cd_low),
            _mm256_shuffle_ps::<0b11_10_11_10>(ab_low, cd_low),
            _mm256_shuffle_ps::<0b01_00_01_00>(ab_high, cd_high),
            _mm256_shuffle_ps::<0b11_10_11_10>(ab_high, cd_high),
        ];
        for word in 0..4 {
            _mm_storeu_ps(to.add(word * stride), _mm256_castps256_ps128(words[word]));
        }
        for word in 0..4 {
            let upper = _mm256_extractf128_ps::<1>(words[word]);
            _mm_storeu_ps(to.add((4 + word) * stride), upper);
        }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[inline(always)]
    unsafe fn prefetch_near(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[inline(always)]
    unsafe fn zero_i32() -> __m256i {
        _mm256_setzero_si256()
    }
    #[inline(always)]
    unsafe fn add_i32(a: __m256i, b: __m256i) -> __m256i {
        _mm256_add_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn sum_i32(x: __m256i) -> i32 {
        let half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
        let pair = _mm_add_epi32(half, _mm_shuffle_epi32::<0b01_00_11_10>(half));
        _mm_cvtsi128_si32(_mm_add_epi32(
            pair,
            _mm_shuffle_epi32::<0b00_00_00_01>(pair),
        ))
    }
    #[inline(always)]
    unsafe fn widen_i8(from: *const i8) -> __m256i {
        _mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const u8) -> __m256i {
        _mm256_loadu_si256(from.cast())
    }
    #[inline(always)]
    unsafe fn store_pairs(to: *mut u8, x: __m256i) {
        _mm256_storeu_si256(to.cast(), x);
    }
    #[inline(always)]
    unsafe fn lower_bf16(x: __m256i) -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x))
    }
    #[inline(always)]
    unsafe fn upper_bf16(x: __m256i) -> __m256 {
        _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(UPPER_HALF)))
    }
    #[inline(always)]
    unsafe fn nibbles(x: __m256i) -> [__m256i; 4] {
        let mask = _mm256_set1_epi16(15);
        [
            _mm256_and_si256(x, mask),
            _mm256_and_si256(_mm256_srli_epi16::<4>(x), mask),
            _mm256_and_si256(_mm256_srli_epi16::<8>(x), mask),
            _mm256_srli_epi16::<12>(x),
        ]
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
    unsafe fn dot_tile<const R: usize, const N: usize>(
        x: *const f32,
        w: &[__m256i; N],
        sums: &mut [[__m256i; N]; R],
    ) {
        if R == 6 && N == 2 {
            six_by_two(x, w, sums);
        } else {
            super::dot_tile::<Self, R, N>(x, w, sums);
        }
    }
    #[inline(always)]
    unsafe fn to_f32(x: __m256i) -> __m256 {
        _mm256_cvtepi32_ps(x)
    }
    #[inline(always)]
    unsafe fn round(x: __m256) -> __m256i {
        _mm256_cvtps_epi32(x)
    }
    #[inline(always)]
    unsafe fn store_whole(to: *mut u8, x: __m256i) {
        let bytes = if VNNI {
            // A number's lower byte is rounded to, so the upper one may be one more than its bits.
            let upper = _mm256_srai_epi32::<8>(_mm256_add_epi32(x, _mm256_set1_epi32(128)));
            let first =
                _mm256_set1_epi64x(i64::from_le_bytes([0, 4, 8, 12, NONE, NONE, NONE, NONE]));
            let then =
                _mm256_set1_epi64x(i64::from_le_bytes([NONE, NONE, NONE, NONE, 0, 4, 8, 12]));
            let fours = _mm256_or_si256(
                _mm256_shuffle_epi8(x, first),
                _mm256_shuffle_epi8(upper, then),
            );
            _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b10_00>(fours))
        } else {
            let low = _mm256_castsi256_si128(x);
            let high = _mm256_extracti128_si256::<1>(x);
            _mm_packs_epi32(low, high)
        };
        _mm_storeu_si128(to.cast(), bytes);
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

/// In `shuffle_epi8`: a zero.
const NONE: u8 = 0x80;

impl Quads for Avx2<true> {
    #[inline(always)]
    unsafe fn splat_i32(x: i32) -> __m256i {
        _mm256_set1_epi32(x)
    }
    #[inline(always)]
    unsafe fn dot_quads(sums: __m256i, w: __m256i, x: __m256i) -> __m256i {
        _mm256_dpbusd_avx_epi32(sums, w, x)
    }
    #[inline(always)]
    unsafe fn shift_up(x: __m256i) -> __m256i {
        _mm256_slli_epi32::<8>(x)
    }
    #[inline(always)]
    unsafe fn halves(x: __m256i) -> [__m256i; 2] {
        let mask = _mm256_set1_epi8(15);
        [
            _mm256_and_si256(x, mask),
            _mm256_and_si256(_mm256_srli_epi16::<4>(x), mask),
        ]
    }
}

/// `add_products` of four rows and three vectors: it takes all registers, and the compiler, which moves loads up, would find
/// none for a sum. `$load` reads the vectors of weights of an even input, and of the odd one after it.
macro_rules! four_by_three {
    ($name:ident, $weight:ty, [$($even:literal),*], [$($odd:literal),*]) => {
        #[inline]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn $name<const R: usize, const N: usize>(
            x: *const f32,
            w: *const $weight,
            sums: &mut [[__m256; N]; R],
        ) {
            const { assert!(INPUTS == 4) };
            std::arch::asm!(
                ".irp p, 0, 2",
                $($even,)*
                four_rows!("16*\\p"),
                $($odd,)*
                four_rows!("16*\\p + 16"),
                ".endr",
                from = in(reg) x,
                weights = in(reg) w,
                x = out(ymm_reg) _,
                w0 = out(ymm_reg) _,
                w1 = out(ymm_reg) _,
                w2 = out(ymm_reg) _,
                s00 = inout(ymm_reg) sums[0][0],
                s01 = inout(ymm_reg) sums[0][1],
                s02 = inout(ymm_reg) sums[0][2],
                s10 = inout(ymm_reg) sums[1][0],
                s11 = inout(ymm_reg) sums[1][1],
                s12 = inout(ymm_reg) sums[1][2],
                s20 = inout(ymm_reg) sums[2][0],
                s21 = inout(ymm_reg) sums[2][1],
                s22 = inout(ymm_reg) sums[2][2],
                s30 = inout(ymm_reg) sums[3][0],
                s31 = inout(ymm_reg) sums[3][1],
                s32 = inout(ymm_reg) sums[3][2],
                options(pure, readonly, nostack, preserves_flags),
            );
        }
    };
}

/// One input of four rows, at `$at`, times three vectors.
macro_rules! four_rows {
    ($at:literal) => {
        concat!(
            four_rows!($at, " + 0", "s00", "s01", "s02"),
            four_rows!($at, " + 4", "s10", "s11", "s12"),
            four_rows!($at, " + 8", "s20", "s21", "s22"),
            four_rows!($at, " + 12", "s30", "s31", "s32"),
        )
    };
    ($at:literal, $row:literal, $s0:literal, $s1:literal, $s2:literal) => {
        concat!(
            "vbroadcastss {x}, dword ptr [{from} + ",
            $at,
            $row,
            "]\n",
            "vfmadd231ps {",
            $s0,
            "}, {x}, {w0}\n",
            "vfmadd231ps {",
            $s1,
            "}, {x}, {w1}\n",
            "vfmadd231ps {",
            $s2,
            "}, {x}, {w2}\n",
        )
    };
}

four_by_three!(
    four_by_three_f32,
    f32,
    [
        "vmovups {w0}, ymmword ptr [{weights} + 96*\\p]",
        "vmovups {w1}, ymmword ptr [{weights} + 96*\\p + 32]",
        "vmovups {w2}, ymmword ptr [{weights} + 96*\\p + 64]"
    ],
    [
        "vmovups {w0}, ymmword ptr [{weights} + 96*\\p + 96]",
        "vmovups {w1}, ymmword ptr [{weights} + 96*\\p + 128]",
        "vmovups {w2}, ymmword ptr [{weights} + 96*\\p + 160]"
    ]
);
four_by_three!(
    four_by_three_bf16,
    Bf16,
    [
        "vmovdqu {w0}, ymmword ptr [{weights} + 48*\\p]",
        "vmovdqu {w1}, ymmword ptr [{weights} + 48*\\p + 32]",
        "vmovdqu {w2}, ymmword ptr [{weights} + 48*\\p + 64]",
        "vpslld {w0}, {w0}, 16",
        "vpslld {w1}, {w1}, 16",
        "vpslld {w2}, {w2}, 16"
    ],
    [
        "vpxor {x}, {x}, {x}",
        "vpblendw {w0}, {x}, ymmword ptr [{weights} + 48*\\p], 0xaa",
        "vpblendw {w1}, {x}, ymmword ptr [{weights} + 48*\\p + 32], 0xaa",
        "vpblendw {w2}, {x}, ymmword ptr [{weights} + 48*\\p + 64], 0xaa"
    ]
);

/// `dot_tile` of six rows and two vectors: it takes all registers too.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn six_by_two<const R: usize, const N: usize>(
    x: *const f32,
    w: &[__m256i; N],
    sums: &mut [[__m256i; N]; R],
) {
    std::arch::asm!(
        "vpbroadcastd {x}, dword ptr [{from} + 0]",
        "vpmaddwd {y}, {x}, {w0}",
        "vpmaddwd {x}, {x}, {w1}",
        "vpaddd {s00}, {s00}, {y}",
        "vpaddd {s01}, {s01}, {x}",
        "vpbroadcastd {x}, dword ptr [{from} + 4]",
        "vpmaddwd {y}, {x}, {w0}",
        "vpmaddwd {x}, {x}, {w1}",
        "vpaddd {s10}, {s10}, {y}",
        "vpaddd {s11}, {s11}, {x}",
        "vpbroadcastd {x}, dword ptr [{from} + 8]",
        "vpmaddwd {y}, {x}, {w0}",
        "vpmaddwd {x}, {x}, {w1}",
        "vpaddd {s20}, {s20}, {y}",
        "vpaddd {s21}, {s21}, {x}",
        "vpbroadcastd {x}, dword ptr [{from} + 12]",
        "vpmaddwd {y}, {x}, {w0}",
        "vpmaddwd {x}, {x}, {w1}",
        "vpaddd {s30}, {s30}, {y}",
        "vpaddd {s31}, {s31}, {x}",
        "vpbroadcastd {x}, dword ptr [{from} + 16]",
        "vpmaddwd {y}, {x}, {w0}",
        "vpmaddwd {x}, {x}, {w1}",
        "vpaddd {s40}, {s40}, {y}",
        "vpaddd {s41}, {s41}, {x}",
        "vpbroadcastd {x}, dword ptr [{from} + 20]",
        "vpmaddwd {y}, {x}, {w0}",
        "vpmaddwd {x}, {x}, {w1}",
        "vpaddd {s50}, {s50}, {y}",
        "vpaddd {s51}, {s51}, {x}",
        from = in(reg) x,
        x = out(ymm_reg) _,
        y = out(ymm_reg) _,
        w0 = in(ymm_reg) w[0],
        w1 = in(ymm_reg) w[1],
        s00 = inout(ymm_reg) sums[0][0],
        s01 = inout(ymm_reg) sums[0][1],
        s10 = inout(ymm_reg) sums[1][0],
        s11 = inout(ymm_reg) sums[1][1],
        s20 = inout(ymm_reg) sums[2][0],
        s21 = inout(ymm_reg) sums[2][1],
        s30 = inout(ymm_reg) sums[3][0],
        s31 = inout(ymm_reg) sums[3][1],
        s40 = inout(ymm_reg) sums[4][0],
        s41 = inout(ymm_reg) sums[4][1],
        s50 = inout(ymm_reg) sums[5][0],
        s51 = inout(ymm_reg) sums[5][1],
        options(pure, readonly, nostack, preserves_flags),
    );
}
