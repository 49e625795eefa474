//! Products with GGUF's blocks of whole numbers.
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: see the parent module")]

use std::hint::black_box;
use std::ops::Range;

use super::{Panel, Words, parts_of, store_row};
use crate::matrix::{ADDED, BLOCK};
use crate::simd::Simd;
use crate::tile::{Prefetch, STREAMS, load_tile, max_rows_with_totals, store_tile};

/// How a GGUF block of a column is stored, and what becomes of the sum of its products.
pub(super) trait Kind {
    /// Bytes of a block.
    const BYTES: usize;
    /// Bytes of its scale, and minimum where it has one.
    const HEAD: usize;
    /// Fours of inputs whose weights a vector of bytes holds.
    const QUADS: usize;
    /// What is added to weights that are stored as bytes without sign.
    const ADDED: i32;
    /// The weights of four pairs of inputs, as 16-bit numbers; `bytes` are the first vector's of a group of four pairs.
    unsafe fn pairs<S: Simd>(bytes: *const u8, width: usize) -> [S::I; 4];
    /// `total` and the block's part: `sum` of weights times inputs, `inputs` the sum of inputs alone.
    unsafe fn add<S: Simd>(total: S::V, sum: S::I, inputs: S::V, head: &Head<S>) -> S::V;
}

/// Scales and minima of a vector of columns.
pub(super) struct Head<S: Simd> {
    scale: S::V,
    minimum: S::V,
}

impl<S: Simd> Clone for Head<S> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S: Simd> Copy for Head<S> {}

/// Pairs of inputs of a block.
const BLOCK_PAIRS: usize = BLOCK / 2;
/// Pairs of inputs of a group.
const GROUP: usize = 4;

pub(super) struct Q8_0;
pub(super) struct Q4_0;
pub(super) struct Q4_1;

impl Kind for Q8_0 {
    const BYTES: usize = 2 + BLOCK;
    const HEAD: usize = 2;
    const QUADS: usize = 1;
    const ADDED: i32 = ADDED;
    #[inline(always)]
    unsafe fn pairs<S: Simd>(bytes: *const u8, width: usize) -> [S::I; 4] {
        let mut pairs = [S::zero_i32(); GROUP];
        for pair in 0..GROUP {
            pairs[pair] = S::widen_i8(bytes.add(2 * pair * width).cast());
        }
        pairs
    }
    #[inline(always)]
    unsafe fn add<S: Simd>(total: S::V, sum: S::I, _inputs: S::V, head: &Head<S>) -> S::V {
        S::fma(S::to_f32(sum), head.scale, total)
    }
}

impl Kind for Q4_0 {
    const BYTES: usize = 2 + BLOCK / 2;
    const HEAD: usize = 2;
    const QUADS: usize = 2;
    const ADDED: i32 = 0; // see `add`
    #[inline(always)]
    unsafe fn pairs<S: Simd>(bytes: *const u8, _width: usize) -> [S::I; 4] {
        S::nibbles(S::load_pairs(bytes))
    }
    #[inline(always)]
    unsafe fn add<S: Simd>(total: S::V, sum: S::I, inputs: S::V, head: &Head<S>) -> S::V {
        // Weights are stored with 8 added; all of these whole numbers have fewer than 24 bits.
        let sum = S::sub(S::to_f32(sum), S::mul(inputs, S::splat(8.0)));
        S::fma(sum, head.scale, total)
    }
}

impl Kind for Q4_1 {
    const BYTES: usize = 4 + BLOCK / 2;
    const HEAD: usize = 4;
    const QUADS: usize = 2;
    const ADDED: i32 = 0;
    #[inline(always)]
    unsafe fn pairs<S: Simd>(bytes: *const u8, _width: usize) -> [S::I; 4] {
        S::nibbles(S::load_pairs(bytes))
    }
    #[inline(always)]
    unsafe fn add<S: Simd>(total: S::V, sum: S::I, inputs: S::V, head: &Head<S>) -> S::V {
        S::fma(
            inputs,
            head.minimum,
            S::fma(S::to_f32(sum), head.scale, total),
        )
    }
}

#[inline(always)]
pub(super) unsafe fn heads_of<S: Simd, K: Kind, const N: usize>(block: *const u8) -> [Head<S>; N] {
    let mut heads = [Head {
        scale: S::splat(0.0),
        minimum: S::splat(0.0),
    }; N];
    for n in 0..N {
        let halves = block.cast::<u16>().add(n * S::LANES);
        heads[n].scale = S::load_f16(halves);
        if K::HEAD == 4 {
            heads[n].minimum = S::load_f16(halves.add(N * S::LANES));
        }
    }
    heads
}

/// A group's bytes of a vector of columns.
#[inline(always)]
unsafe fn group_of<S: Simd, K: Kind>(
    block: *const u8,
    width: usize,
    group: usize,
    n: usize,
) -> *const u8 {
    let group_bytes = (K::BYTES - K::HEAD) / (BLOCK_PAIRS / GROUP);
    let vector_bytes = if K::BYTES > BLOCK { 2 } else { 4 } * S::LANES;
    block.add((K::HEAD + group * group_bytes) * width + n * vector_bytes)
}

/// Products with GGUF's blocks: a row of `x` is a scale, pairs of 16-bit numbers, and sums of its blocks.
#[inline(always)]
pub(super) unsafe fn panels<S: Simd, K: Kind, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    let num_blocks = p.num_in / BLOCK;
    if p.num_rows() == 1 {
        row!(STREAMS, p, width, row_of_blocks(S, K, N));
        return;
    }
    let mut prefetch = p.prefetch(p.num_panels * (1 + p.num_tiles()) * num_blocks);
    for index in 0..p.num_panels {
        let p = &p.part(index, 1, width);
        // Expanded once for all rows: registers do not hold the sums of two and what a block is expanded with.
        for part in parts_of::<S>(num_blocks, BLOCK_PAIRS * width, 1) {
            expand::<S, K, N>(p, part.clone(), &mut prefetch);
            tiles!(
                max_rows_with_totals::<S, N>(),
                N,
                p,
                |row| tile_of_expanded(S, K)(p, row, part.clone(), &mut prefetch)
            );
        }
    }
}

#[inline(always)]
unsafe fn row_of_blocks<S: Simd, K: Kind, const N: usize, const J: usize>(p: &Panel, step: usize) {
    let stride = step * p.stride;
    let width = N * S::LANES;
    let x = Words::<1>::of::<S>(p, p.tiles.first(p.first_tile));
    // A count that the compiler does not see, one at least: a block unrolled whole would not fit in registers.
    let num_groups = black_box(BLOCK_PAIRS / GROUP);
    let mut totals = [[S::splat(0.0); N]; J];
    for block in 0..p.num_in / BLOCK {
        p.ask::<S, J>(stride, block * K::BYTES * width, K::BYTES * width);
        let inputs = S::to_f32(S::splat_pair(x.sums.add(block).cast()));
        for j in 0..J {
            let from = p.weights.add(j * stride + block * K::BYTES * width);
            let mut sums = [S::zero_i32(); N];
            let mut group = 0;
            loop {
                let pairs_of_x = x.whole.add(block * BLOCK_PAIRS + group * GROUP);
                for n in 0..N {
                    let pairs = K::pairs::<S>(group_of::<S, K>(from, width, group, n), width);
                    for pair in 0..GROUP {
                        let a = S::splat_pair(pairs_of_x.add(pair).cast());
                        sums[n] = S::dot_pairs(sums[n], a, pairs[pair]);
                    }
                }
                group += 1;
                if group >= num_groups {
                    break;
                }
            }
            let heads = heads_of::<S, K, N>(from);
            for n in 0..N {
                totals[j][n] = K::add::<S>(totals[j][n], sums[n], inputs, &heads[n]);
            }
        }
    }
    for j in 0..J {
        for n in 0..N {
            totals[j][n] = S::mul(totals[j][n], S::splat(*x.scales));
        }
    }
    store_row::<S, N, J>(p, step, &totals);
}

/// Some blocks' weights as 16-bit numbers, pair after pair.
#[inline(always)]
unsafe fn expand<S: Simd, K: Kind, const N: usize>(
    p: &Panel,
    blocks: Range<usize>,
    prefetch: &mut Prefetch,
) {
    let width = N * S::LANES;
    for (place, block) in blocks.enumerate() {
        prefetch.step::<S>();
        let from = p.weights.add(block * K::BYTES * width);
        let to = p.expanded(width).add(place * BLOCK_PAIRS * width);
        for group in 0..BLOCK_PAIRS / GROUP {
            for n in 0..N {
                let pairs = K::pairs::<S>(group_of::<S, K>(from, width, group, n), width);
                for pair in 0..GROUP {
                    let place = (group * GROUP + pair) * width + n * S::LANES;
                    S::store_pairs(to.add(place).cast(), pairs[pair]);
                }
            }
        }
    }
}

/// As many rows as a tile has, and some blocks; weights are expanded, and the same numbers come of it as of one row's.
#[inline(always)]
unsafe fn tile_of_expanded<S: Simd, K: Kind, const R: usize, const N: usize>(
    p: &Panel,
    row: usize,
    blocks: Range<usize>,
    prefetch: &mut Prefetch,
) {
    let width = N * S::LANES;
    let x = Words::<R>::of::<S>(p, row);
    let kept = p.kept(row, width);
    let num_pairs = black_box(BLOCK_PAIRS); // as above
    let mut totals = [[S::splat(0.0); N]; R];
    if blocks.start > 0 {
        totals = load_tile::<S, R, N>(kept, width);
    }
    let is_last = blocks.end == p.num_in / BLOCK;
    for (place, block) in blocks.enumerate() {
        prefetch.step::<S>();
        let mut sums = [[S::zero_i32(); N]; R];
        let pairs_of_x = x.whole.add(block * BLOCK_PAIRS * R);
        let w = p.expanded(width).add(place * BLOCK_PAIRS * width);
        let mut rest = num_pairs;
        loop {
            rest -= 1;
            let pair = num_pairs - 1 - rest;
            let mut columns = [S::zero_i32(); N];
            for n in 0..N {
                columns[n] = S::load_pairs(w.add(pair * width + n * S::LANES).cast());
            }
            S::dot_tile(pairs_of_x.add(pair * R), &columns, &mut sums);
            if rest == 0 {
                break;
            }
        }
        let heads = heads_of::<S, K, N>(p.weights.add(block * K::BYTES * width));
        for r in 0..R {
            let inputs = S::to_f32(S::splat_pair(x.sums.add(block * R + r).cast()));
            for n in 0..N {
                totals[r][n] = K::add::<S>(totals[r][n], sums[r][n], inputs, &heads[n]);
            }
        }
    }
    if !is_last {
        store_tile::<S, R, N>(&totals, kept, width, width);
        return;
    }
    for r in 0..R {
        for n in 0..N {
            totals[r][n] = S::mul(totals[r][n], S::splat(*x.scales.add(r)));
        }
    }
    let out = p.out.add(row * p.out_stride);
    store_tile::<S, R, N>(&totals, out, p.out_stride, p.num_columns);
}
