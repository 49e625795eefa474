//! Products of whole numbers in fours of bytes, where a CPU multiplies those: to the same bits as in pairs.
//!
//! A CPU multiplies bytes without sign by bytes with one. So weights are stored without, 128 larger where they have one, and
//! an input of 16 bits is two bytes: four inputs are four lower bytes, then four upper ones. Nothing is widened.
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: see the parent module")]

use std::hint::black_box;

use super::blocks::{Kind, heads_of};
use super::{Panel, Words, store_row};
use crate::matrix::{ADDED, BLOCK};
use crate::simd::Quads;
use crate::tile::{Prefetch, load_tile, max_rows, max_rows_of_halves, store_tile};

/// Fours of inputs between two looks at what is to be asked for, for one row.
const ROW_QUADS: usize = 4;
/// Fours of inputs of a block.
const BLOCK_QUADS: usize = BLOCK / 4;

/// Products with 8-bit weights, a scale for each output: a row of `x` is a scale, fours of inputs, and the sum of all.
#[inline(always)]
pub(super) unsafe fn panels<S: Quads, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    if p.num_rows() == 1 {
        // A sum of lower and one of upper bytes for each number.
        if S::NUM_REGISTERS < 32 {
            row!(2, p, width, row_of_bytes(S, N));
        } else {
            row!(4, p, width, row_of_bytes(S, N));
        }
        return;
    }
    let num_quads = p.num_in.div_ceil(4);
    let mut prefetch = p.prefetch(p.num_panels * p.num_tiles() * num_quads);
    for index in 0..p.num_panels {
        let p = &p.part(index, 1, width);
        tiles!(max_rows_of_halves::<S, N>(), N, p, |row| tile_of_bytes(S)(
            p,
            row,
            &mut prefetch
        ));
    }
}

/// What sums begin at: what is added to weights times inputs, less.
#[inline(always)]
unsafe fn less_added<S: Quads>(added: i32, inputs: *const i32) -> S::I {
    S::splat_i32((*inputs).wrapping_mul(-added))
}

/// The next vectors of weights.
#[inline(always)]
unsafe fn columns_of<S: Quads, const N: usize>(from: *const u8) -> [S::I; N] {
    let mut columns = [S::zero_i32(); N];
    for n in 0..N {
        columns[n] = S::load_pairs(from.add(4 * n * S::LANES));
    }
    columns
}

#[inline(always)]
unsafe fn row_of_bytes<S: Quads, const N: usize, const J: usize>(p: &Panel, step: usize) {
    let stride = step * p.stride;
    let num_quads = p.num_in.div_ceil(4);
    let quad_bytes = 4 * N * S::LANES;
    let x = Words::<1>::of::<S>(p, p.tiles.first(p.first_tile));
    let mut lower = [[less_added::<S>(ADDED, x.sums); N]; J];
    let mut upper = [[S::zero_i32(); N]; J];
    for first in (0..num_quads).step_by(ROW_QUADS) {
        p.ask::<S, J>(stride, first * quad_bytes, ROW_QUADS * quad_bytes);
        for quad in first..num_quads.min(first + ROW_QUADS) {
            let low = S::splat_pair(x.whole.add(2 * quad).cast());
            let up = S::splat_pair(x.whole.add(2 * quad + 1).cast());
            for j in 0..J {
                let w = columns_of::<S, N>(p.weights.add(j * stride + quad * quad_bytes));
                for n in 0..N {
                    lower[j][n] = S::dot_quads(lower[j][n], w[n], low);
                    upper[j][n] = S::dot_quads(upper[j][n], w[n], up);
                }
            }
        }
    }
    let mut products = [[S::splat(0.0); N]; J];
    for j in 0..J {
        let scales = p.weights.add(j * stride + num_quads * quad_bytes);
        products[j] = scaled::<S, N>(&lower[j], &upper[j], *x.scales, scales.cast());
    }
    store_row::<S, N, J>(p, step, &products);
}

/// A row's sums, times its scale and the columns'.
#[inline(always)]
unsafe fn scaled<S: Quads, const N: usize>(
    lower: &[S::I; N],
    upper: &[S::I; N],
    scale: f32,
    columns: *const f32,
) -> [S::V; N] {
    let mut products = [S::splat(0.0); N];
    for n in 0..N {
        let sum = S::to_f32(S::add_i32(lower[n], S::shift_up(upper[n])));
        let columns = S::load(columns.add(n * S::LANES));
        products[n] = S::mul(S::mul(sum, S::splat(scale)), columns);
    }
    products
}

#[inline(always)]
unsafe fn tile_of_bytes<S: Quads, const R: usize, const N: usize>(
    p: &Panel,
    row: usize,
    prefetch: &mut Prefetch,
) {
    let num_quads = p.num_in.div_ceil(4);
    let quad_bytes = 4 * N * S::LANES;
    let x = Words::<R>::of::<S>(p, row);
    let mut lower = [[S::zero_i32(); N]; R];
    for r in 0..R {
        lower[r] = [less_added::<S>(ADDED, x.sums.add(r)); N];
    }
    let mut upper = [[S::zero_i32(); N]; R];
    let mut done = 0;
    while done < num_quads {
        prefetch.step::<S>();
        let end = num_quads.min(done + prefetch.every);
        while done < end {
            let w = columns_of::<S, N>(p.weights.add(done * quad_bytes));
            let x = x.whole.add(2 * done * R);
            for r in 0..R {
                let low = S::splat_pair(x.add(r).cast());
                for n in 0..N {
                    lower[r][n] = S::dot_quads(lower[r][n], w[n], low);
                }
            }
            for r in 0..R {
                let up = S::splat_pair(x.add(R + r).cast());
                for n in 0..N {
                    upper[r][n] = S::dot_quads(upper[r][n], w[n], up);
                }
            }
            done += 1;
        }
    }
    let scales = p.weights.add(num_quads * quad_bytes).cast();
    let mut products = [[S::splat(0.0); N]; R];
    for r in 0..R {
        products[r] = scaled::<S, N>(&lower[r], &upper[r], *x.scales.add(r), scales);
    }
    let out = p.out.add(row * p.out_stride);
    store_tile::<S, R, N>(&products, out, p.out_stride, p.num_columns);
}

/// Products with GGUF's blocks: a row of `x` is a scale, fours of inputs, and sums of its blocks.
#[inline(always)]
pub(super) unsafe fn panels_of_blocks<S: Quads, K: Kind, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    let num_blocks = p.num_in / BLOCK;
    if p.num_rows() == 1 {
        row!(4, p, width, row_of_blocks(S, K, N));
        return;
    }
    let mut prefetch = p.prefetch(p.num_panels * p.num_tiles() * num_blocks);
    for index in 0..p.num_panels {
        let p = &p.part(index, 1, width);
        if K::QUADS > 1 {
            expand::<S, K, N>(p);
        }
        tiles!(max_rows::<S, N>(), N, p, |row| tile_of_blocks(S, K)(
            p,
            row,
            &mut prefetch
        ));
    }
}

/// All blocks' weights as bytes, four inputs after four.
#[inline(always)]
unsafe fn expand<S: Quads, K: Kind, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    for block in 0..p.num_in / BLOCK {
        let from = p.weights.add((block * K::BYTES + K::HEAD) * width);
        let to = p.expanded(width).cast::<u8>().add(block * BLOCK * width);
        for group in 0..BLOCK_QUADS / 2 {
            for n in 0..N {
                let bytes = S::load_pairs(from.add(4 * (group * width + n * S::LANES)));
                for (half, fours) in S::halves(bytes).into_iter().enumerate() {
                    let quad = 2 * group + half;
                    S::store_pairs(to.add(4 * (quad * width + n * S::LANES)), fours);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn row_of_blocks<S: Quads, K: Kind, const N: usize, const J: usize>(p: &Panel, step: usize) {
    let stride = step * p.stride;
    let width = N * S::LANES;
    let x = Words::<1>::of::<S>(p, p.tiles.first(p.first_tile));
    // A count that the compiler does not see, one at least: a block unrolled whole would not fit in registers.
    let num_vectors = black_box(BLOCK_QUADS / K::QUADS);
    // In memory, once a block: the compiler would not keep so many in registers.
    let totals = p.scratch;
    store_tile::<S, J, N>(&[[S::splat(0.0); N]; J], totals, width, width);
    for block in 0..p.num_in / BLOCK {
        let whole = x.whole.add(block * BLOCK / 2);
        let inputs = x.sums.add(block);
        for j in 0..J {
            let done = j * stride + block * K::BYTES * width;
            p.ask::<S, 1>(0, done, K::BYTES * width);
            let from = p.weights.add(done);
            let mut lower = [less_added::<S>(K::ADDED, inputs); N];
            let mut upper = [S::zero_i32(); N];
            let mut vector = 0;
            loop {
                let columns = columns_of::<S, N>(from.add((K::HEAD + 4 * vector) * width));
                for half in 0..K::QUADS {
                    let quad = vector * K::QUADS + half;
                    let low = S::splat_pair(whole.add(2 * quad).cast());
                    let up = S::splat_pair(whole.add(2 * quad + 1).cast());
                    for n in 0..N {
                        let w = if K::QUADS > 1 {
                            S::halves(columns[n])[half]
                        } else {
                            columns[n]
                        };
                        lower[n] = S::dot_quads(lower[n], w, low);
                        upper[n] = S::dot_quads(upper[n], w, up);
                    }
                }
                vector += 1;
                if vector >= num_vectors {
                    break;
                }
            }
            let heads = heads_of::<S, K, N>(from);
            let inputs = S::to_f32(S::splat_i32(*inputs));
            for n in 0..N {
                let sum = S::add_i32(lower[n], S::shift_up(upper[n]));
                let total = totals.add(j * width + n * S::LANES);
                let new = K::add::<S>(S::load(total), sum, inputs, &heads[n]);
                S::store(total, new);
            }
        }
    }
    let mut products = load_tile::<S, J, N>(totals, width);
    for j in 0..J {
        for n in 0..N {
            products[j][n] = S::mul(products[j][n], S::splat(*x.scales));
        }
    }
    store_row::<S, N, J>(p, step, &products);
}

/// As many rows as a tile has; the same numbers come of it as of one row's.
#[inline(always)]
unsafe fn tile_of_blocks<S: Quads, K: Kind, const R: usize, const N: usize>(
    p: &Panel,
    row: usize,
    prefetch: &mut Prefetch,
) {
    let width = N * S::LANES;
    let x = Words::<R>::of::<S>(p, row);
    let num_quads = black_box(BLOCK_QUADS); // as above
    let mut totals = [[S::splat(0.0); N]; R];
    for block in 0..p.num_in / BLOCK {
        prefetch.step::<S>();
        let from = p.weights.add(block * K::BYTES * width);
        let weights = if K::QUADS > 1 {
            p.expanded(width).cast::<u8>().add(block * BLOCK * width)
        } else {
            from.add(K::HEAD * width)
        };
        let inputs = x.sums.add(block * R);
        // The upper bytes' sums first, which are then 256 times as large: the lower ones' are added to them.
        let mut sums = [[S::zero_i32(); N]; R];
        for place in [1, 0] {
            if place == 0 {
                for r in 0..R {
                    let added = less_added::<S>(K::ADDED, inputs.add(r));
                    for n in 0..N {
                        sums[r][n] = S::shift_up(sums[r][n]);
                        if K::ADDED != 0 {
                            sums[r][n] = S::add_i32(sums[r][n], added);
                        }
                    }
                }
            }
            let mut quad = 0;
            loop {
                let w = columns_of::<S, N>(weights.add(4 * quad * width));
                let x = x.whole.add((block * BLOCK / 2 + 2 * quad + place) * R);
                for r in 0..R {
                    let x = S::splat_pair(x.add(r).cast());
                    for n in 0..N {
                        sums[r][n] = S::dot_quads(sums[r][n], w[n], x);
                    }
                }
                quad += 1;
                if quad >= num_quads {
                    break;
                }
            }
        }
        let heads = heads_of::<S, K, N>(from);
        for r in 0..R {
            let inputs = S::to_f32(S::splat_i32(*inputs.add(r)));
            for n in 0..N {
                totals[r][n] = K::add::<S>(totals[r][n], sums[r][n], inputs, &heads[n]);
            }
        }
    }
    for r in 0..R {
        for n in 0..N {
            totals[r][n] = S::mul(totals[r][n], S::splat(*x.scales.add(r)));
        }
    }
    let out = p.out.add(row * p.out_stride);
    store_tile::<S, R, N>(&totals, out, p.out_stride, p.num_columns);
}
