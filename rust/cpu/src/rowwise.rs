//! Ops on one row at a time: norms, gates, rotations.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "kernels: slices carry their sizes, and vectors are read and written inside them"
)]

use crate::kv::{KvFormat, Stored};
use crate::simd::{Bf16, Element, F16, MAX_LANES, Simd};

// Macros, not functions of closures: a closure is compiled without the instruction set of the kernel that it is in.

/// `x[i] = f(x[i])` by vectors; a last part that is no whole vector goes through one.
macro_rules! map {
    ($S:ty, $x:expr, |$v:ident| $f:expr) => {{
        let x: &mut [f32] = $x;
        let mut vectors = x.chunks_exact_mut(<$S>::LANES);
        for vector in &mut vectors {
            let $v = <$S>::load(vector.as_ptr());
            <$S>::store(vector.as_mut_ptr(), $f);
        }
        let rest = vectors.into_remainder();
        if !rest.is_empty() {
            let mut last = [0.0f32; MAX_LANES];
            last[..rest.len()].copy_from_slice(rest);
            let $v = <$S>::load(last.as_ptr());
            <$S>::store(last.as_mut_ptr(), $f);
            rest.copy_from_slice(&last[..rest.len()]);
        }
    }};
}

/// `to[i] = f(a[i], b[i])`, likewise.
macro_rules! map2 {
    ($S:ty, $a:expr, $b:expr, $to:expr, |$x:ident, $y:ident| $f:expr) => {{
        let (a, to): (&[f32], &mut [f32]) = ($a, $to);
        let b = &$b[..a.len()];
        let num_whole = a.len() / <$S>::LANES * <$S>::LANES;
        for at in (0..num_whole).step_by(<$S>::LANES) {
            let $x = <$S>::load(a[at..].as_ptr());
            let $y = <$S>::load(b[at..].as_ptr());
            <$S>::store(to[at..].as_mut_ptr(), $f);
        }
        let rest = a.len() - num_whole;
        if rest > 0 {
            let (mut first, mut second) = ([0.0f32; MAX_LANES], [0.0f32; MAX_LANES]);
            first[..rest].copy_from_slice(&a[num_whole..]);
            second[..rest].copy_from_slice(&b[num_whole..]);
            let $x = <$S>::load(first.as_ptr());
            let $y = <$S>::load(second.as_ptr());
            <$S>::store(first.as_mut_ptr(), $f);
            to[num_whole..].copy_from_slice(&first[..rest]);
        }
    }};
}

/// `x / sqrt(mean(x²) + eps) · weight`, of as many numbers as `weight` has; `out` may be `x`.
#[inline(always)]
pub(crate) unsafe fn rms_norm<S: Simd>(x: *const f32, weight: &[f32], eps: f32, out: *mut f32) {
    let num_whole = weight.len() / S::LANES * S::LANES;
    let mut squares = S::splat(0.0);
    for at in (0..num_whole).step_by(S::LANES) {
        let v = S::load(x.add(at));
        squares = S::fma(v, v, squares);
    }
    let mut rest = 0.0;
    for at in num_whole..weight.len() {
        rest += *x.add(at) * *x.add(at);
    }
    norm_by::<S>(x, weight, S::sum(squares) + rest, eps, out);
}

/// `sum = x + y`, and its [`rms_norm`], to the same bits.
#[inline(always)]
pub(crate) unsafe fn add_rms_norm<S: Simd>(
    [x, y]: [&[f32]; 2],
    weight: &[f32],
    eps: f32,
    sum: &mut [f32],
    out: &mut [f32],
) {
    let len = weight.len();
    let (x, y, sum, out) = (&x[..len], &y[..len], &mut sum[..len], &mut out[..len]);
    let num_whole = len / S::LANES * S::LANES;
    let mut squares = S::splat(0.0);
    for at in (0..num_whole).step_by(S::LANES) {
        let v = S::add(S::load(x[at..].as_ptr()), S::load(y[at..].as_ptr()));
        S::store(sum[at..].as_mut_ptr(), v);
        squares = S::fma(v, v, squares);
    }
    let mut rest = 0.0;
    for at in num_whole..len {
        sum[at] = x[at] + y[at];
        rest += sum[at] * sum[at];
    }
    let squares = S::sum(squares) + rest;
    norm_by::<S>(sum.as_ptr(), weight, squares, eps, out.as_mut_ptr());
}

/// The second half of `rms_norm`: `squares` is the sum of all numbers' squares.
#[inline(always)]
unsafe fn norm_by<S: Simd>(x: *const f32, weight: &[f32], squares: f32, eps: f32, out: *mut f32) {
    let len = weight.len();
    let num_whole = len / S::LANES * S::LANES;
    let scale = 1.0 / (squares / len as f32 + eps).sqrt();
    for at in (0..num_whole).step_by(S::LANES) {
        let normed = S::mul(S::load(x.add(at)), S::splat(scale));
        S::store(out.add(at), S::mul(normed, S::load(weight[at..].as_ptr())));
    }
    for at in num_whole..len {
        *out.add(at) = *x.add(at) * scale * weight[at];
    }
}

/// `x + y`.
#[inline(always)]
pub(crate) unsafe fn add<S: Simd>(x: &[f32], y: &[f32], out: &mut [f32]) {
    map2!(S, x, y, out, |a, b| S::add(a, b));
}

/// `x · factor`, in place.
#[inline(always)]
pub(crate) unsafe fn scale<S: Simd>(factor: f32, x: &mut [f32]) {
    map!(S, x, |v| S::mul(v, S::splat(factor)));
}

/// `cap · tanh(x / cap)`, in place.
#[inline(always)]
pub(crate) unsafe fn softcap<S: Simd>(cap: f32, x: &mut [f32]) {
    let cap = S::splat(cap);
    map!(S, x, |v| S::mul(S::tanh(S::div(v, cap)), cap));
}

/// `silu(gate) · up` of the two halves.
#[inline(always)]
pub(crate) unsafe fn silu_mul<S: Simd>(gate_up: &[f32], out: &mut [f32]) {
    let (gate, up) = gate_up.split_at(out.len());
    map2!(S, gate, up, out, |g, u| {
        let e = S::exp(S::sub(S::splat(0.0), g));
        S::mul(S::div(g, S::add(S::splat(1.0), e)), u)
    });
}

/// `gelu(gate) · up` of the two halves, gelu by its tanh approximation.
#[inline(always)]
pub(crate) unsafe fn gelu_mul<S: Simd>(gate_up: &[f32], out: &mut [f32]) {
    let (gate, up) = gate_up.split_at(out.len());
    map2!(S, gate, up, out, |g, u| {
        // sqrt(2 / π) · (g + 0.044715 · g³)
        let cube = S::mul(S::mul(g, g), g);
        let inner = S::mul(S::fma(cube, S::splat(0.044_715), g), S::splat(0.797_884_6));
        let half = S::mul(g, S::splat(0.5));
        S::mul(S::fma(half, S::tanh(inner), half), u)
    });
}

/// Rotates, in each head, the first half of its rotary part with the second.
#[inline(always)]
pub(crate) unsafe fn rotate<S: Simd>(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    for head in x.chunks_exact_mut(head_dim) {
        rotate_head::<S>(head, cos, sin);
    }
}

#[inline(always)]
unsafe fn rotate_head<S: Simd>(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    let (a, b) = head[..2 * half].split_at_mut(half);
    let sin = &sin[..half];
    let num_whole = half / S::LANES * S::LANES;
    for at in (0..num_whole).step_by(S::LANES) {
        let (x, y) = (S::load(a[at..].as_ptr()), S::load(b[at..].as_ptr()));
        let (c, s) = (S::load(cos[at..].as_ptr()), S::load(sin[at..].as_ptr()));
        S::store(a[at..].as_mut_ptr(), S::sub(S::mul(x, c), S::mul(y, s)));
        S::store(b[at..].as_mut_ptr(), S::add(S::mul(y, c), S::mul(x, s)));
    }
    for at in num_whole..half {
        let (x, y) = (a[at], b[at]);
        a[at] = x * cos[at] - y * sin[at];
        b[at] = y * cos[at] + x * sin[at];
    }
}

/// A row as whole numbers up to `limit`: a scale, then the numbers as they are multiplied, with zeros behind where some are
/// missing, then 32-bit sums of even parts of them, as many as `out` has place for. A row with a number that is not finite has
/// the scale NaN.
#[inline(always)]
pub(crate) unsafe fn quantise<S: Simd>(x: &[f32], limit: f32, out: &mut [f32]) {
    let (scale, out) = out.split_first_mut().expect("a scale comes first");
    let num_whole = x.len() / S::LANES * S::LANES;
    let mut rest = [0.0; MAX_LANES];
    rest[..x.len() - num_whole].copy_from_slice(&x[num_whole..]);
    let (mut high, mut low) = (S::splat(0.0), S::splat(0.0));
    let mut nothing = S::splat(0.0); // 0 · x is NaN where x is not finite
    for at in (0..x.len()).step_by(S::LANES) {
        let from = if at < num_whole { &x[at..] } else { &rest };
        let v = S::load(from.as_ptr());
        (high, low) = (S::max(high, v), S::min(low, v));
        nothing = S::fma(v, S::splat(0.0), nothing);
    }
    let largest = S::largest(high).max(S::largest(S::sub(S::splat(0.0), low)));
    // A normal number, so that its inverse is finite.
    let unit = if largest > 0.0 {
        (largest / limit).max(f32::MIN_POSITIVE)
    } else {
        1.0
    };
    *scale = unit + S::sum(nothing);
    let inverse = S::splat(1.0 / unit);
    let (words, sums) = out.split_at_mut(x.len().next_multiple_of(S::TOGETHER) / 2);
    let part = x.len() / sums.len().max(1);
    let mut total = S::zero_i32();
    for at in (0..num_whole).step_by(S::LANES) {
        let whole = S::round(S::mul(S::load(x[at..].as_ptr()), inverse));
        S::store_whole(words[at / 2..].as_mut_ptr().cast(), whole);
        if !sums.is_empty() {
            total = S::add_i32(total, whole);
            let end = at + S::LANES;
            if end % part == 0 {
                sums[end / part - 1] = f32::from_bits(S::sum_i32(total) as u32);
                total = S::zero_i32();
            }
        }
    }
    if num_whole < x.len() {
        let whole = S::round(S::mul(S::load(rest.as_ptr()), inverse));
        let mut stored = [0.0f32; MAX_LANES / 2];
        S::store_whole(stored.as_mut_ptr().cast(), whole);
        let words = &mut words[num_whole / 2..];
        words.copy_from_slice(&stored[..words.len()]);
        if let Some(sum) = sums.last_mut() {
            *sum = f32::from_bits(S::sum_i32(S::add_i32(total, whole)) as u32);
        }
    }
}

/// Stores heads of a token as the cache has them; `to` has room for them, which nobody else uses.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd>(x: &[f32], head_dim: usize, format: KvFormat, to: *mut u8) {
    match format {
        KvFormat::F32 => to
            .cast::<f32>()
            .copy_from_nonoverlapping(x.as_ptr(), x.len()),
        KvFormat::Bf16 => {
            let to = to.cast::<Bf16>();
            for (place, &number) in x.iter().enumerate() {
                to.add(place).write(Bf16::of(number));
            }
        }
        KvFormat::F16 => {
            let to = to.cast::<F16>();
            let num_whole = x.len() / S::LANES * S::LANES;
            for at in (0..num_whole).step_by(S::LANES) {
                S::store_f16(to.add(at).cast(), S::load(x[at..].as_ptr()));
            }
            for at in num_whole..x.len() {
                to.add(at).write(F16::of(x[at]));
            }
        }
        KvFormat::Int8 => {
            let head_bytes = format.head_bytes(head_dim);
            for (place, head) in x.chunks_exact(head_dim).enumerate() {
                store_whole::<S>(head, to.add(place * head_bytes));
            }
        }
    }
}

/// A head as whole numbers up to 127, behind what they are multiplied by: its largest / 127. A head with a number that is
/// not finite has the scale NaN, and zeros.
#[inline(always)]
unsafe fn store_whole<S: Simd>(head: &[f32], to: *mut u8) {
    let num_whole = head.len() / S::LANES * S::LANES;
    let (mut high, mut low) = (S::splat(0.0), S::splat(0.0));
    let mut nothing = S::splat(0.0); // 0 · x is NaN where x is not finite
    for at in (0..num_whole).step_by(S::LANES) {
        let v = S::load(head[at..].as_ptr());
        (high, low) = (S::max(high, v), S::min(low, v));
        nothing = S::fma(v, S::splat(0.0), nothing);
    }
    let mut largest = S::largest(high).max(S::largest(S::sub(S::splat(0.0), low)));
    let mut nothing = S::sum(nothing);
    for &x in &head[num_whole..] {
        largest = largest.max(x.abs());
        nothing += x * 0.0;
    }
    // A normal number, so that its inverse is finite.
    let scale = (largest * (1.0 / 127.0)).max(f32::MIN_POSITIVE);
    let is_finite = nothing == 0.0;
    let stored = if is_finite { scale } else { f32::NAN };
    to.cast::<f32>().write_unaligned(stored);
    let to = to.add(<i8 as Stored>::SCALE_BYTES).cast::<i8>();
    if !is_finite {
        to.write_bytes(0, head.len());
        return;
    }
    let inverse = 1.0 / scale;
    for at in (0..num_whole).step_by(S::LANES) {
        let v = S::mul(S::load(head[at..].as_ptr()), S::splat(inverse));
        S::store_i8(to.add(at), v);
    }
    for (at, &x) in head.iter().enumerate().skip(num_whole) {
        to.add(at).write(i8::of(x * inverse));
    }
}
