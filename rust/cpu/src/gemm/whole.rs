//! Products with 8-bit weights, a scale for each output.
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: see the parent module")]

use std::ops::Range;

use super::{Panel, Words, parts_of, store_row};
use crate::simd::Simd;
use crate::tile::{Prefetch, STREAMS, max_rows, store_tile};

/// Weights are widened for whole multiples of so many pairs of inputs.
const PAIRS: usize = 32;
/// Pairs of inputs between two looks at what is to be asked for, for one row.
const ROW_PAIRS: usize = 8;
/// Tiles from which on weights are widened once for all of them.
const WIDENED_FROM: usize = 4;

/// Products of whole numbers: a row of `x` is a scale, then pairs of 16-bit numbers.
#[inline(always)]
pub(super) unsafe fn panels<S: Simd, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    if p.num_rows() == 1 {
        row!(STREAMS, p, width, row_of_pairs(S, N));
        return;
    }
    let (num_tiles, num_pairs) = (p.num_tiles(), p.num_in.div_ceil(2));
    let mut prefetch = p.prefetch(p.num_panels * num_tiles * num_pairs);
    for index in 0..p.num_panels {
        let p = &p.part(index, 1, width);
        if S::WIDENS_BESIDE || num_tiles < WIDENED_FROM {
            let (all, weights) = (0..num_pairs, p.weights);
            tiles!(max_rows::<S, N>(), N, p, |row| tile_of_pairs(S, Narrow)(
                p,
                row,
                all.clone(),
                weights,
                &mut prefetch
            ));
            continue;
        }
        for part in parts_of::<S>(num_pairs, width, PAIRS) {
            for (place, pair) in part.clone().enumerate() {
                for n in 0..N {
                    let to = p.expanded(width).add(place * width + n * S::LANES);
                    S::store_pairs(to.cast(), Narrow::load::<S>(p.weights, pair * N + n));
                }
            }
            let weights = p.expanded(width).cast_const().cast();
            tiles!(max_rows::<S, N>(), N, p, |row| tile_of_pairs(S, Wide)(
                p,
                row,
                part.clone(),
                weights,
                &mut prefetch
            ));
        }
    }
}

/// How pairs of weights lie.
trait Pairs {
    /// The vector of that number, as 16-bit numbers.
    unsafe fn load<S: Simd>(from: *const u8, vector: usize) -> S::I;
}

/// In bytes.
struct Narrow;
/// As 16-bit numbers.
struct Wide;

impl Pairs for Narrow {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8, vector: usize) -> S::I {
        S::widen_i8(from.add(2 * vector * S::LANES).cast())
    }
}

impl Pairs for Wide {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8, vector: usize) -> S::I {
        S::load_pairs(from.add(4 * vector * S::LANES))
    }
}

#[inline(always)]
unsafe fn row_of_pairs<S: Simd, const N: usize, const J: usize>(p: &Panel, step: usize) {
    let stride = step * p.stride;
    let num_pairs = p.num_in.div_ceil(2);
    let x = Words::<1>::of::<S>(p, p.tiles.first(p.first_tile));
    let mut sums = [[S::zero_i32(); N]; J];
    for first in (0..num_pairs).step_by(ROW_PAIRS) {
        p.ask::<S, J>(
            stride,
            2 * first * N * S::LANES,
            2 * ROW_PAIRS * N * S::LANES,
        );
        for pair in first..num_pairs.min(first + ROW_PAIRS) {
            let a = S::splat_pair(x.whole.add(pair).cast());
            for j in 0..J {
                let weights = p.weights.add(j * stride);
                for n in 0..N {
                    let w = Narrow::load::<S>(weights, pair * N + n);
                    sums[j][n] = S::dot_pairs(sums[j][n], a, w);
                }
            }
        }
    }
    let mut products = [[S::splat(0.0); N]; J];
    for j in 0..J {
        let scales = p
            .weights
            .add(j * stride + 2 * num_pairs * N * S::LANES)
            .cast::<f32>();
        for n in 0..N {
            let columns = S::load(scales.add(n * S::LANES));
            let product = S::mul(S::to_f32(sums[j][n]), S::splat(*x.scales));
            products[j][n] = S::mul(product, columns);
        }
    }
    store_row::<S, N, J>(p, step, &products);
}

/// As many rows as a tile has, and some pairs with their weights.
#[inline(always)]
unsafe fn tile_of_pairs<S: Simd, P: Pairs, const R: usize, const N: usize>(
    p: &Panel,
    row: usize,
    pairs: Range<usize>,
    weights: *const u8,
    prefetch: &mut Prefetch,
) {
    let (width, num_pairs) = (N * S::LANES, p.num_in.div_ceil(2));
    let x = Words::<R>::of::<S>(p, row);
    let kept = p.kept(row, width);
    let mut sums = [[S::zero_i32(); N]; R];
    if pairs.start > 0 {
        for r in 0..R {
            for n in 0..N {
                sums[r][n] = S::load_pairs(kept.add((r * N + n) * S::LANES).cast());
            }
        }
    }
    let pairs_of_x = x.whole.add(pairs.start * R);
    let mut done = 0;
    while done < pairs.len() {
        prefetch.step::<S>();
        let end = pairs.len().min(done + prefetch.every);
        while done < end {
            let mut w = [S::zero_i32(); N];
            for n in 0..N {
                w[n] = P::load::<S>(weights, done * N + n);
            }
            S::dot_tile(pairs_of_x.add(done * R), &w, &mut sums);
            done += 1;
        }
    }
    if pairs.end < num_pairs {
        for r in 0..R {
            for n in 0..N {
                S::store_pairs(kept.add((r * N + n) * S::LANES).cast(), sums[r][n]);
            }
        }
        return;
    }
    let scales = p.weights.add(2 * num_pairs * width).cast::<f32>();
    let mut products = [[S::splat(0.0); N]; R];
    for r in 0..R {
        let scale = S::splat(*x.scales.add(r));
        for n in 0..N {
            let columns = S::load(scales.add(n * S::LANES));
            products[r][n] = S::mul(S::mul(S::to_f32(sums[r][n]), scale), columns);
        }
    }
    let out = p.out.add(row * p.out_stride);
    store_tile::<S, R, N>(&products, out, p.out_stride, p.num_columns);
}
