//! Ops on one row at a time: norms, gates, rotations.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "kernels: slices carry their sizes, and vectors are read and written inside them"
)]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "closures in kernels: arithmetic on vectors, under the kernel's own contract"
)]

use crate::simd::Simd;

/// The most lanes of a vector.
const MAX_LANES: usize = 16;

/// `x[i] = f(x[i])` by vectors; a last part that is no whole vector goes through one.
#[inline(always)]
unsafe fn map<S: Simd>(x: &mut [f32], f: impl Fn(S::V) -> S::V) {
    let mut vectors = x.chunks_exact_mut(S::LANES);
    for vector in &mut vectors {
        S::store(vector.as_mut_ptr(), f(S::load(vector.as_ptr())));
    }
    let rest = vectors.into_remainder();
    if !rest.is_empty() {
        let mut last = [0.0f32; MAX_LANES];
        last[..rest.len()].copy_from_slice(rest);
        let done = f(S::load(last.as_ptr()));
        S::store(last.as_mut_ptr(), done);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// `to[i] = f(a[i], b[i])`, likewise.
#[inline(always)]
unsafe fn map2<S: Simd>(a: &[f32], b: &[f32], to: &mut [f32], f: impl Fn(S::V, S::V) -> S::V) {
    let b = &b[..a.len()];
    let num_whole = a.len() / S::LANES * S::LANES;
    for at in (0..num_whole).step_by(S::LANES) {
        let (x, y) = (S::load(a[at..].as_ptr()), S::load(b[at..].as_ptr()));
        S::store(to[at..].as_mut_ptr(), f(x, y));
    }
    let rest = a.len() - num_whole;
    if rest > 0 {
        let (mut x, mut y) = ([0.0f32; MAX_LANES], [0.0f32; MAX_LANES]);
        x[..rest].copy_from_slice(&a[num_whole..]);
        y[..rest].copy_from_slice(&b[num_whole..]);
        let done = f(S::load(x.as_ptr()), S::load(y.as_ptr()));
        S::store(x.as_mut_ptr(), done);
        to[num_whole..].copy_from_slice(&x[..rest]);
    }
}

/// `x / sqrt(mean(x²) + eps) · weight`, in place.
#[inline(always)]
pub(crate) unsafe fn rms_norm<S: Simd>(weight: &[f32], eps: f32, x: &mut [f32]) {
    let num_whole = x.len() / S::LANES * S::LANES;
    let mut squares = S::splat(0.0);
    for at in (0..num_whole).step_by(S::LANES) {
        let v = S::load(x[at..].as_ptr());
        squares = S::fma(v, v, squares);
    }
    let sum = S::sum(squares) + x[num_whole..].iter().map(|v| v * v).sum::<f32>();
    let scale = 1.0 / (sum / x.len() as f32 + eps).sqrt();
    let weight = &weight[..x.len()];
    for at in (0..num_whole).step_by(S::LANES) {
        let normed = S::mul(S::load(x[at..].as_ptr()), S::splat(scale));
        S::store(
            x[at..].as_mut_ptr(),
            S::mul(normed, S::load(weight[at..].as_ptr())),
        );
    }
    for at in num_whole..x.len() {
        x[at] = x[at] * scale * weight[at];
    }
}

/// `x + y`.
#[inline(always)]
pub(crate) unsafe fn add<S: Simd>(x: &[f32], y: &[f32], out: &mut [f32]) {
    map2::<S>(x, y, out, |a, b| unsafe { S::add(a, b) });
}

/// `x · factor`, in place.
#[inline(always)]
pub(crate) unsafe fn scale<S: Simd>(factor: f32, x: &mut [f32]) {
    map::<S>(x, |v| unsafe { S::mul(v, S::splat(factor)) });
}

/// `cap · tanh(x / cap)`, in place.
#[inline(always)]
pub(crate) unsafe fn softcap<S: Simd>(cap: f32, x: &mut [f32]) {
    map::<S>(x, |v| unsafe {
        S::mul(S::tanh(S::div(v, S::splat(cap))), S::splat(cap))
    });
}

/// `silu(gate) · up` of the two halves.
#[inline(always)]
pub(crate) unsafe fn silu_mul<S: Simd>(gate_up: &[f32], out: &mut [f32]) {
    let (gate, up) = gate_up.split_at(out.len());
    map2::<S>(gate, up, out, |g, u| unsafe {
        let e = S::exp(S::sub(S::splat(0.0), g));
        S::mul(S::div(g, S::add(S::splat(1.0), e)), u)
    });
}

/// `gelu(gate) · up` of the two halves, gelu by its tanh approximation.
#[inline(always)]
pub(crate) unsafe fn gelu_mul<S: Simd>(gate_up: &[f32], out: &mut [f32]) {
    let (gate, up) = gate_up.split_at(out.len());
    map2::<S>(gate, up, out, |g, u| unsafe {
        // sqrt(2 / π) · (g + 0.044715 · g³)
        let cube = S::mul(S::mul(g, g), g);
        let inner = S::mul(S::fma(cube, S::splat(0.044_715), g), S::splat(0.797_884_6));
        let half = S::mul(g, S::splat(0.5));
        S::mul(S::fma(half, S::tanh(inner), half), u)
    });
}

/// Rotates the first half of a head's rotary part with its second.
#[inline(always)]
pub(crate) unsafe fn rotate<S: Simd>(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    let (a, b) = head.split_at_mut(half);
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

/// A row as whole numbers up to `limit`: a scale, then 16-bit numbers, with a zero behind an odd number of them. A row with
/// a number that is not finite has the scale NaN.
#[inline(always)]
pub(crate) fn quantise(x: &[f32], limit: f32, out: &mut [f32]) {
    let (scale, whole) = out.split_first_mut().expect("a scale comes first");
    let mut largest = 0.0f32;
    let mut nothing = 0.0f32; // 0 · x is NaN where x is not finite
    for &x in x {
        largest = if x.abs() > largest { x.abs() } else { largest };
        nothing += x * 0.0;
    }
    let unit = if largest > 0.0 { largest / limit } else { 1.0 };
    *scale = unit + nothing;
    let inverse = 1.0 / unit;
    // SAFETY: 16-bit numbers have no invalid bits, and need less alignment.
    let (_, whole, _) = unsafe { whole.align_to_mut::<i16>() };
    for (to, &x) in whole.iter_mut().zip(x) {
        *to = (x * inverse).round_ties_even() as i16;
    }
    if !x.len().is_multiple_of(2) {
        whole[x.len()] = 0;
    }
}
