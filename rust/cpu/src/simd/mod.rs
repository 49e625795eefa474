//! What a kernel needs of a CPU's vectors. Each kernel is written once over [`Simd`], and compiled once for each
//! instruction set.
//!
//! An implementation's functions may only run on a CPU that has its instructions: [`Isa`](crate::Isa) finds out.
//! They are inlined into functions that enable those instructions (`kernels!` makes them), never called by themselves.
#![allow(
    clippy::missing_safety_doc,
    reason = "the safety of all of them is the module's: the instructions exist, and pointers are valid for the lanes"
)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each is one instruction or a few, and the contract is the module's"
)]

use std::sync::atomic::{Ordering, compiler_fence};

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod portable;

/// The most lanes of a vector.
pub(crate) const MAX_LANES: usize = 16;

/// Words of a row that are laid beside other rows' in one go.
pub(crate) const TURNED: usize = 8;

/// Of a pair, the second number.
const UPPER_HALF: i32 = -1 << 16;

/// Vectors of `LANES` f32.
pub(crate) trait Simd: Sized {
    /// f32 in a vector; a power of two.
    const LANES: usize;
    /// Vectors that fit in registers.
    const NUM_REGISTERS: usize;
    /// Whether weights are widened beside multiplications, and not instead of some.
    const WIDENS_BESIDE: bool;
    /// Bytes of a stream of weights from what is multiplied to what is asked for.
    const AHEAD: usize;
    /// A vector.
    type V: Copy;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, x: Self::V);
    /// bfloat16, widened: exact.
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    /// float16, widened: exact.
    unsafe fn load_f16(from: *const u16) -> Self::V;
    /// Signed bytes as numbers.
    unsafe fn load_i8(from: *const i8) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN, as x86 has it.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller, as `max`.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `sums[r][n] + x[p][r] * w[p][n]` over [`INPUTS`].
    #[inline(always)]
    unsafe fn add_products<W: Weight, const R: usize, const N: usize>(
        x: *const f32,
        w: *const W,
        sums: &mut [[Self::V; N]; R],
    ) {
        add_products::<Self, W, R, N>(x, w, INPUTS, sums, None);
    }
    /// The nearest whole number, and two to its power. `|x|` is at most 126.
    unsafe fn round_exp2(x: Self::V) -> (Self::V, Self::V);
    /// The lower half of the lanes with the upper half, and so on with what that leaves.
    unsafe fn sum(x: Self::V) -> f32;
    /// The sums of four vectors, each in one order.
    unsafe fn sums(x: [Self::V; 4]) -> [f32; 4];
    unsafe fn largest(x: Self::V) -> f32;
    /// Lays [`TURNED`] words of four rows, from one on, side by side: the first words at `to`, the next ones `stride` on. They
    /// are bits, and written in order: with a stride below 4, over the end of what is before them.
    #[inline(always)]
    unsafe fn turn(rows: [*const f32; 4], word: usize, to: *mut f32, stride: usize) {
        for first in (0..TURNED).step_by(4) {
            // Squares, which the compiler has instructions for.
            let mut words = [[0.0f32; 4]; 4];
            for row in 0..4 {
                let row_words = rows[row].add(word + first).cast::<[f32; 4]>().read();
                for place in 0..4 {
                    words[place][row] = row_words[place];
                }
            }
            for place in 0..4 {
                let to = to.add((first + place) * stride);
                to.cast::<[f32; 4]>().write(words[place]);
            }
        }
    }
    /// Asks for a cache line: for the second level, or the first where that comes sooner.
    unsafe fn prefetch(at: *const u8);
    /// As `prefetch`, for the first level.
    unsafe fn prefetch_near(at: *const u8);

    /// `LANES` 32-bit sums.
    type I: Copy;
    /// Whole numbers that are multiplied together: pairs of 16 bits, or where the set is of [`Quads`] fours.
    const TOGETHER: usize;
    unsafe fn zero_i32() -> Self::I;
    unsafe fn add_i32(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn sum_i32(x: Self::I) -> i32;
    /// `2 * LANES` signed bytes as 16-bit numbers.
    unsafe fn widen_i8(from: *const i8) -> Self::I;
    /// A pair of 16-bit numbers for each lane.
    unsafe fn load_pairs(from: *const u8) -> Self::I;
    unsafe fn store_pairs(to: *mut u8, x: Self::I);
    /// The first numbers of pairs of bfloat16, widened: exact.
    unsafe fn lower_bf16(x: Self::I) -> Self::V;
    /// The second ones.
    unsafe fn upper_bf16(x: Self::I) -> Self::V;
    /// Of 16-bit numbers the lowest four bits, the next, the next, and the highest.
    unsafe fn nibbles(x: Self::I) -> [Self::I; 4];
    /// One pair of 16-bit numbers in every lane.
    unsafe fn splat_pair(from: *const i16) -> Self::I;
    /// `sums + a0 * b0 + a1 * b1` by lane, of pairs of 16-bit numbers.
    unsafe fn dot_pairs(sums: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// `sums[r][n]` and the products of the pair `x[r]` with `w[n]`.
    #[inline(always)]
    unsafe fn dot_tile<const R: usize, const N: usize>(
        x: *const f32,
        w: &[Self::I; N],
        sums: &mut [[Self::I; N]; R],
    ) {
        dot_tile::<Self, R, N>(x, w, sums);
    }
    unsafe fn to_f32(x: Self::I) -> Self::V;
    /// The nearest whole numbers, ties to even; those beyond 32 bits are anything.
    unsafe fn round(x: Self::V) -> Self::I;
    /// `LANES` whole numbers as they are multiplied: 16 bits each, or of four the lower bytes and then the upper ones, so that
    /// a number is `256 · upper + lower`, both signed. Those beyond are anything.
    unsafe fn store_whole(to: *mut u8, x: Self::I);

    // What the KV cache needs.
    /// The nearest float16, ties to even; infinite beyond 65,504.
    unsafe fn store_f16(to: *mut u16, x: Self::V);
    /// `LANES` nearest whole numbers, ties to even; those beyond 8 bits are anything.
    unsafe fn store_i8(to: *mut i8, x: Self::V);

    /// `e` to the power of `x`, within 2 units in the last place; inputs are held within ±87. A NaN stays one.
    #[inline(always)]
    unsafe fn exp(x: Self::V) -> Self::V {
        // e^x = 2^n · e^r with |r| ≤ ln(2) / 2. Coefficients: Cephes' expf.
        let x = Self::max(Self::splat(-87.0), Self::min(Self::splat(87.0), x));
        let (n, power) = Self::round_exp2(Self::mul(x, Self::splat(std::f32::consts::LOG2_E)));
        let r = Self::fma(n, Self::splat(-0.693_359_4), x);
        let r = Self::fma(n, Self::splat(2.121_944_4e-4), r);
        let mut p = Self::splat(1.987_569_1e-4);
        for c in [
            1.398_199_9e-3,
            8.333_452e-3,
            4.166_579_6e-2,
            0.166_666_66,
            0.5,
        ] {
            p = Self::fma(p, r, Self::splat(c));
        }
        let one = Self::splat(1.0);
        Self::mul(Self::add(Self::fma(p, Self::mul(r, r), r), one), power)
    }

    /// The hyperbolic tangent: `1 − 2 / (e^2x + 1)`.
    #[inline(always)]
    unsafe fn tanh(x: Self::V) -> Self::V {
        let e = Self::exp(Self::add(x, x));
        let one = Self::splat(1.0);
        Self::sub(one, Self::div(Self::splat(2.0), Self::add(e, one)))
    }
}

/// Keeps loads after it from coming before, where they would take registers that sums need. It is no instruction.
#[inline(always)]
pub(crate) fn no_load_moves_up() {
    compiler_fence(Ordering::SeqCst);
}

/// Inputs of a tile that are multiplied in one go: else counting takes the place of multiplying.
pub(crate) const INPUTS: usize = 4;

/// An instruction set that multiplies fours of bytes and adds them up.
pub(crate) trait Quads: Simd {
    unsafe fn splat_i32(x: i32) -> Self::I;
    /// `sums + x0 * w0 + ... + x3 * w3` by lane: `w` without sign, `x` with one.
    unsafe fn dot_quads(sums: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// Times 256.
    unsafe fn shift_up(x: Self::I) -> Self::I;
    /// The lower four bits of each byte, and the upper ones.
    unsafe fn halves(x: Self::I) -> [Self::I; 2];
}

/// `sums[r][n] + x[p][r] * w[p][n]` over some inputs, as the compiler makes it. Where `widened` is, the weights
/// are written there as they are multiplied, input after input: that takes no unit that multiplies.
#[inline(always)]
pub(crate) unsafe fn add_products<S: Simd, E: Weight, const R: usize, const N: usize>(
    x: *const f32,
    w: *const E,
    num_in: usize,
    sums: &mut [[S::V; N]; R],
    widened: Option<*mut f32>,
) {
    for first in (0..num_in).step_by(E::TOGETHER) {
        for place in 0..E::TOGETHER.min(num_in - first) {
            let columns = E::columns::<S, N>(w.add(first * N * S::LANES), place);
            if let Some(to) = widened {
                for n in 0..N {
                    S::store(to.add(((first + place) * N + n) * S::LANES), columns[n]);
                }
            }
            for r in 0..R {
                let x = S::splat(*x.add((first + place) * R + r));
                for n in 0..N {
                    sums[r][n] = S::fma(x, columns[n], sums[r][n]);
                }
            }
            no_load_moves_up();
        }
    }
}

/// [`Simd::dot_tile`], as the compiler makes it.
#[inline(always)]
pub(crate) unsafe fn dot_tile<S: Simd, const R: usize, const N: usize>(
    x: *const f32,
    w: &[S::I; N],
    sums: &mut [[S::I; N]; R],
) {
    for r in 0..R {
        let x = S::splat_pair(x.add(r).cast());
        for n in 0..N {
            sums[r][n] = S::dot_pairs(sums[r][n], x, w[n]);
        }
    }
}

/// How a weight, or a part of the KV cache, is stored: read as f32.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
    fn get(self) -> f32;
    fn of(x: f32) -> Self;
}

/// How weights are stored in a panel: inputs one after another, or some together for each column.
pub(crate) trait Weight: Element {
    /// Inputs that lie together.
    const TOGETHER: usize;
    /// The weights of one of the inputs that lie together at `from`.
    unsafe fn columns<S: Simd, const N: usize>(from: *const Self, place: usize) -> [S::V; N];
}

impl Weight for f32 {
    const TOGETHER: usize = 1;
    #[inline(always)]
    unsafe fn columns<S: Simd, const N: usize>(from: *const f32, _place: usize) -> [S::V; N] {
        let mut columns = [S::splat(0.0); N];
        for n in 0..N {
            columns[n] = S::load(from.add(n * S::LANES));
        }
        columns
    }
}

/// In pairs: one read and one instruction make numbers of it, as bfloat16 are the upper halves of float32.
impl Weight for Bf16 {
    const TOGETHER: usize = 2;
    #[inline(always)]
    unsafe fn columns<S: Simd, const N: usize>(from: *const Bf16, place: usize) -> [S::V; N] {
        let mut columns = [S::splat(0.0); N];
        for n in 0..N {
            let pairs = S::load_pairs(from.add(2 * n * S::LANES).cast());
            columns[n] = if place == 0 {
                S::lower_bf16(pairs)
            } else {
                S::upper_bf16(pairs)
            };
        }
        columns
    }
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const f32) -> S::V {
        S::load(from)
    }
    #[inline(always)]
    fn get(self) -> f32 {
        self
    }
    #[inline(always)]
    fn of(x: f32) -> f32 {
        x
    }
}

/// A bfloat16, as its bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bf16(pub(crate) u16);

impl Element for Bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Bf16) -> S::V {
        S::load_bf16(from.cast())
    }
    #[inline(always)]
    fn get(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    /// Rounds to nearest even, as torch does; a NaN stays one.
    #[inline(always)]
    fn of(x: f32) -> Bf16 {
        let bits = x.to_bits();
        if x.is_nan() {
            return Bf16((bits >> 16) as u16 | 0x40);
        }
        Bf16(((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
    }
}

/// A float16, as its bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F16(pub(crate) u16);

impl Element for F16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const F16) -> S::V {
        S::load_f16(from.cast())
    }
    #[inline(always)]
    fn get(self) -> f32 {
        f16_to_f32(self.0)
    }
    #[inline(always)]
    fn of(x: f32) -> F16 {
        F16(f32_to_f16(x))
    }
}

impl Element for i8 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const i8) -> S::V {
        S::load_i8(from)
    }
    #[inline(always)]
    fn get(self) -> f32 {
        f32::from(self)
    }
    /// The nearest whole number, ties to even.
    #[inline(always)]
    fn of(x: f32) -> i8 {
        x.round_ties_even() as i8
    }
}

/// The nearest float16's bits, ties to even; infinite beyond 65,504. A NaN stays one.
pub(crate) fn f32_to_f16(x: f32) -> u16 {
    let sign = (x.to_bits() >> 16) as u16 & 0x8000;
    let magnitude = x.abs();
    let bits = magnitude.to_bits();
    if x.is_nan() {
        return sign | 0x7e00;
    }
    if bits >= 0x477f_f000 {
        return sign | 0x7c00; // 65,520 and more
    }
    if bits < 0x3880_0000 {
        // Below the smallest normal number: whole numbers of 2^−24, which adding 0.5 rounds to in its last places.
        return sign | ((magnitude + 0.5).to_bits() - 0.5f32.to_bits()) as u16;
    }
    // 13 fewer places, rounded, and an exponent less by 112.
    let rounded = bits + 0xfff + ((bits >> 13) & 1);
    sign | ((rounded - (112 << 23)) >> 13) as u16
}

/// A float16's bits as a number: exact.
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits >> 15) << 31;
    let (exponent, fraction) = (u32::from(bits >> 10) & 0x1f, u32::from(bits) & 0x3ff);
    match exponent {
        0 => {
            // Zero, or below the smallest normal number: fraction · 2^−24.
            let magnitude = fraction as f32 * f32::from_bits(0x3380_0000);
            f32::from_bits(magnitude.to_bits() | sign)
        }
        0x1f => f32::from_bits(sign | 0x7f80_0000 | (fraction << 13)),
        _ => f32::from_bits(sign | ((exponent + 112) << 23) | (fraction << 13)),
    }
}
