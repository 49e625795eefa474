//! Products with float32 and bfloat16 weights.
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: see the parent module")]

use std::ops::Range;

use super::{Panel, parts_of, store_row};
use crate::simd::{INPUTS, Simd, Weight};
use crate::tile::{self, Prefetch, STREAMS, load_tile, max_rows, store_tile};

#[inline(always)]
pub(super) unsafe fn panels<S: Simd, E: Weight, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    if p.num_rows() == 1 {
        row!(STREAMS, p, width, row_of_stored(S, E, N));
        return;
    }
    let num_tiles = p.num_tiles();
    let num_steps = num_tiles * p.num_in.div_ceil(INPUTS);
    let mut prefetch = p.prefetch(p.num_panels * num_steps);
    for index in 0..p.num_panels {
        let p = &p.part(index, 1, width);
        let weights = p.weights.cast::<E>();
        // float32 are as they are multiplied already.
        if S::WIDENS_BESIDE || E::TOGETHER == 1 || num_tiles == 1 {
            let all = 0..p.num_in;
            tiles!(max_rows::<S, N>(), N, p, |row| tile_of_stored(S, E)(
                p,
                row,
                all.clone(),
                weights,
                None,
                &mut prefetch
            ));
            continue;
        }
        // A part's first tile leaves its weights for the others as they are multiplied.
        let widened = p.expanded(width);
        for part in parts_of::<S>(p.num_in, width, tile::CHUNK) {
            let first = &Panel {
                last_tile: p.first_tile + 1,
                ..*p
            };
            tiles!(max_rows::<S, N>(), N, first, |row| tile_of_stored(S, E)(
                p,
                row,
                part.clone(),
                weights.add(part.start * width),
                Some(widened),
                &mut prefetch
            ));
            let others = &Panel {
                first_tile: p.first_tile + 1,
                ..*p
            };
            tiles!(max_rows::<S, N>(), N, others, |row| tile_of_stored(S, f32)(
                p,
                row,
                part.clone(),
                widened.cast_const(),
                None,
                &mut prefetch
            ));
        }
    }
}

#[inline(always)]
unsafe fn row_of_stored<S: Simd, E: Weight, const N: usize, const J: usize>(
    p: &Panel,
    step: usize,
) {
    let stride = step * p.stride;
    let mut sums = [[S::splat(0.0); N]; J];
    let input_bytes = N * S::LANES * size_of::<E>();
    for first in (0..p.num_in).step_by(E::TOGETHER) {
        p.ask::<S, J>(stride, first * input_bytes, E::TOGETHER * input_bytes);
        for place in 0..E::TOGETHER.min(p.num_in - first) {
            let x = S::splat(*p.x.add(first + place));
            for j in 0..J {
                let weights = p.weights.add(j * stride).cast::<E>();
                let columns = E::columns::<S, N>(weights.add(first * N * S::LANES), place);
                for n in 0..N {
                    sums[j][n] = S::fma(x, columns[n], sums[j][n]);
                }
            }
        }
    }
    store_row::<S, N, J>(p, step, &sums);
}

/// As many rows as a tile has, and some inputs with their weights.
#[inline(always)]
unsafe fn tile_of_stored<S: Simd, E: Weight, const R: usize, const N: usize>(
    p: &Panel,
    row: usize,
    inputs: Range<usize>,
    weights: *const E,
    widened: Option<*mut f32>,
    prefetch: &mut Prefetch,
) {
    let width = N * S::LANES;
    let kept = p.kept(row, width);
    let mut sums = [[S::splat(0.0); N]; R];
    if inputs.start > 0 {
        sums = load_tile::<S, R, N>(kept, width);
    }
    let x = p.x.add(row * p.num_in + inputs.start * R);
    tile::multiply::<S, E, R, N>(x, weights, inputs.len(), &mut sums, widened, prefetch);
    if inputs.end < p.num_in {
        store_tile::<S, R, N>(&sums, kept, width, width);
        return;
    }
    let out = p.out.add(row * p.out_stride);
    store_tile::<S, R, N>(&sums, out, p.out_stride, p.num_columns);
}
