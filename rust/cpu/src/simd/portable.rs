//! Plain Rust: right on every CPU, and what the others are held against. The compiler makes of it what it can.
#![allow(unsafe_op_in_unsafe_fn, reason = "see the parent module")]

use super::{Bf16, Element, Simd, UPPER_HALF, f16_to_f32, f32_to_f16};

/// Eight lanes.
pub(crate) struct Portable;

const LANES: usize = 8;
type V = [f32; LANES];

#[inline(always)]
fn each(f: impl FnMut(usize) -> f32) -> V {
    std::array::from_fn(f)
}

impl Simd for Portable {
    const LANES: usize = LANES;
    const NUM_REGISTERS: usize = 16;
    const WIDENS_BESIDE: bool = true;
    const AHEAD: usize = 512;
    type V = V;
    type I = [i32; LANES]; // sums, or pairs of 16-bit numbers
    const TOGETHER: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> V {
        from.cast::<V>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: V) {
        to.cast::<V>().write_unaligned(x);
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> V {
        let bits = from.cast::<[u16; LANES]>().read_unaligned();
        each(|i| Bf16(bits[i]).get())
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> V {
        let bits = from.cast::<[u16; LANES]>().read_unaligned();
        each(|i| f16_to_f32(bits[i]))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> V {
        let bytes = from.cast::<[i8; LANES]>().read_unaligned();
        each(|i| f32::from(bytes[i]))
    }
    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        // Two roundings: without the instruction, one rounding is a slow library call.
        each(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn round_exp2(x: V) -> (V, V) {
        // Adding 1.5 · 2^23 leaves the nearest whole number in the low bits.
        const MAGIC: f32 = 12_582_912.0;
        let shifted = each(|i| x[i] + MAGIC);
        let power = each(|i| {
            let n = shifted[i].to_bits().wrapping_sub(MAGIC.to_bits());
            f32::from_bits(n.wrapping_add(127) << 23)
        });
        (each(|i| shifted[i] - MAGIC), power)
    }
    #[inline(always)]
    unsafe fn sum(x: V) -> f32 {
        ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    }
    #[inline(always)]
    unsafe fn sums(x: [V; 4]) -> [f32; 4] {
        x.map(|x| Self::sum(x))
    }
    #[inline(always)]
    unsafe fn largest(x: V) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_near(_at: *const u8) {}

    #[inline(always)]
    unsafe fn zero_i32() -> Self::I {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn add_i32(a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    unsafe fn sum_i32(x: Self::I) -> i32 {
        x.iter().fold(0, |sum: i32, &x| sum.wrapping_add(x))
    }
    #[inline(always)]
    unsafe fn widen_i8(from: *const i8) -> Self::I {
        let bytes = from.cast::<[i8; 2 * LANES]>().read_unaligned();
        std::array::from_fn(|i| pair(bytes[2 * i].into(), bytes[2 * i + 1].into()))
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const u8) -> Self::I {
        from.cast::<Self::I>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store_pairs(to: *mut u8, x: Self::I) {
        to.cast::<Self::I>().write_unaligned(x);
    }
    #[inline(always)]
    unsafe fn lower_bf16(x: [i32; LANES]) -> V {
        each(|i| f32::from_bits((x[i] << 16) as u32))
    }
    #[inline(always)]
    unsafe fn upper_bf16(x: [i32; LANES]) -> V {
        each(|i| f32::from_bits((x[i] & UPPER_HALF) as u32))
    }
    #[inline(always)]
    unsafe fn nibbles(x: Self::I) -> [Self::I; 4] {
        const MASK: i32 = 0x000f_000f;
        [
            x.map(|x| x & MASK),
            x.map(|x| (x >> 4) & MASK),
            x.map(|x| (x >> 8) & MASK),
            x.map(|x| (x >> 12) & MASK),
        ]
    }
    #[inline(always)]
    unsafe fn splat_pair(from: *const i16) -> Self::I {
        let [low, high] = from.cast::<[i16; 2]>().read_unaligned();
        [pair(low, high); LANES]
    }
    #[inline(always)]
    unsafe fn dot_pairs(sums: Self::I, a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| {
            sums[i] + i32::from(a[i] as i16) * i32::from(b[i] as i16) + (a[i] >> 16) * (b[i] >> 16)
        })
    }
    #[inline(always)]
    unsafe fn to_f32(x: Self::I) -> V {
        each(|i| x[i] as f32)
    }
    #[inline(always)]
    unsafe fn round(x: V) -> Self::I {
        x.map(|x| x.round_ties_even() as i32)
    }
    #[inline(always)]
    unsafe fn store_whole(to: *mut u8, x: Self::I) {
        to.cast::<[i16; LANES]>()
            .write_unaligned(x.map(|x| x as i16));
    }

    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: V) {
        to.cast::<[u16; LANES]>().write_unaligned(x.map(f32_to_f16));
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, x: V) {
        to.cast::<[i8; LANES]>()
            .write_unaligned(x.map(|x| x.round_ties_even() as i8));
    }
}

#[inline(always)]
fn pair(low: i16, high: i16) -> i32 {
    i32::from(low as u16) | (i32::from(high) << 16)
}
