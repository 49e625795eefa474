//! Products with packed matrices.
//!
//! The unit of work is a panel: all rows of the input times the panel's columns. Each worker takes panels of a part of its
//! own, then of what others have left of theirs, and asks for the next one's lines while it multiplies: weights come from
//! memory once a step, in order.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "kernels: their one contract is that the panel's pointers are valid for its sizes"
)]

use std::hint::black_box;

use crate::kernels::Kernels;
use crate::matrix::{BLOCK, Format, Matrix};
use crate::memory::Rows;
use crate::program::Units;
use crate::simd::{Bf16, Simd, Weight};
use crate::tile::{self, Prefetch, STREAMS, Tiles, store_tile};

/// Rows that are multiplied with a panel before the next: more do not stay near the core, and come from further away for
/// each panel.
const MAX_ROWS: usize = 512;
/// Bytes that stay near the core while as many come.
const NEAR_BYTES: usize = 64 << 10;
/// Bytes that a worker takes at once for one row: enough that what a new stream costs is little.
const STREAMED_BYTES: usize = 96 << 10;
/// Bytes of a stream from what is multiplied to what is asked for.
const AHEAD: usize = 512;
/// Pairs of inputs between two looks at what is to be asked for.
const PAIRS: usize = 32;
/// The same for one row.
const ROW_PAIRS: usize = 8;

/// Some panels of a product, side by side.
#[derive(Clone, Copy)]
pub(crate) struct Panel {
    /// Rows by tiles: `[word][row of the tile]`, tile after tile.
    pub(crate) x: *const f32,
    /// Words of a row.
    pub(crate) num_words: usize,
    pub(crate) tiles: Tiles,
    /// Those to multiply.
    pub(crate) first_tile: usize,
    pub(crate) last_tile: usize,
    pub(crate) num_in: usize,
    pub(crate) format: Format,
    pub(crate) num_panels: usize,
    /// Bytes from a panel to the next.
    pub(crate) stride: usize,
    pub(crate) weights: *const u8,
    /// What comes next.
    pub(crate) next: *const u8,
    pub(crate) next_bytes: usize,
    /// Of all the panels' columns, those that the matrix has.
    pub(crate) num_columns: usize,
    /// For each of these, or null.
    pub(crate) bias: *const f32,
    pub(crate) out: *mut f32,
    pub(crate) out_stride: usize,
    /// A whole panel's numbers fit here.
    pub(crate) scratch: *mut f32,
}

impl Panel {
    /// Some of the panels.
    #[inline(always)]
    unsafe fn part(&self, first: usize, num_panels: usize, width: usize) -> Panel {
        let column = first * width;
        Panel {
            num_panels,
            weights: self.weights.add(first * self.stride),
            num_columns: (self.num_columns - column).min(num_panels * width),
            out: self.out.add(column),
            ..*self
        }
    }

    fn num_rows(&self) -> usize {
        self.tiles.first(self.last_tile) - self.tiles.first(self.first_tile)
    }

    fn prefetch(&self, num_steps: usize) -> Prefetch {
        Prefetch::new(self.next, self.next_bytes, num_steps)
    }

    /// Asks for so many bytes of `J` panels that lie `stride` bytes from one another, some time before they are read. At a
    /// panel's end it is the next one's beginning.
    #[inline(always)]
    unsafe fn ask<S: Simd, const J: usize>(&self, stride: usize, done: usize, num_bytes: usize) {
        let from = self.weights.wrapping_add(done + AHEAD);
        for line in (0..num_bytes).step_by(64) {
            for j in 0..J {
                S::prefetch(from.wrapping_add(j * stride + line));
            }
        }
    }
}

/// One row times panels, in streams: each of panels that lie one after another.
macro_rules! row {
    ($p:ident, $width:expr, $row:ident($($generic:ident),*)) => {{
        let length = $p.num_panels / STREAMS;
        for first in 0..length {
            let part = $p.part(first, $p.num_panels - first, $width);
            $row::<$($generic,)* STREAMS>(&part, length);
        }
        for first in length * STREAMS..$p.num_panels {
            $row::<$($generic,)* 1>(&$p.part(first, 1, $width), 1);
        }
    }};
}

/// Rows by tiles, two at least in each.
macro_rules! tiles {
    ($S:ident, $N:ident, $panel:expr, |$row:ident| $tile:ident($($generic:ident),*)($($argument:expr),*)) => {
        for tile in $panel.first_tile..$panel.last_tile {
            let $row = $panel.tiles.first(tile);
            match $panel.tiles.first(tile + 1) - $row {
                2 => $tile::<$($generic,)* 2, $N>($($argument),*),
                3 => $tile::<$($generic,)* 3, $N>($($argument),*),
                4 => $tile::<$($generic,)* 4, $N>($($argument),*),
                5 if const { tile::max_rows::<$S, $N>() >= 5 } => $tile::<$($generic,)* 5, $N>($($argument),*),
                6 if const { tile::max_rows::<$S, $N>() >= 6 } => $tile::<$($generic,)* 6, $N>($($argument),*),
                7 if const { tile::max_rows::<$S, $N>() >= 7 } => $tile::<$($generic,)* 7, $N>($($argument),*),
                8 if const { tile::max_rows::<$S, $N>() >= 8 } => $tile::<$($generic,)* 8, $N>($($argument),*),
                _ => unreachable!("no tile of so many rows"),
            }
        }
    };
}

/// Writes one row of panels that lie so many from one another.
#[inline(always)]
unsafe fn store_row<S: Simd, const N: usize, const J: usize>(
    p: &Panel,
    step: usize,
    row: &[[S::V; N]; J],
) {
    for j in 0..J {
        let part = p.part(j * step, 1, N * S::LANES);
        store_tile::<S, 1, N>(&[row[j]], part.out, 0, part.num_columns);
    }
}

/// Multiplies with panels of `N` vectors, or of `M` where they are of whole numbers.
#[inline(always)]
pub(crate) unsafe fn panel<S: Simd, const N: usize, const M: usize>(p: &Panel) {
    match p.format {
        Format::F32 => stored::<S, f32, N>(p),
        Format::Bf16 => stored::<S, Bf16, N>(p),
        Format::Int8 => whole_numbers::<S, M>(p),
        Format::Q8_0 => blocks::<S, Q8_0, M>(p),
        Format::Q4_0 => blocks::<S, Q4_0, M>(p),
        Format::Q4_1 => blocks::<S, Q4_1, M>(p),
    }
    if !p.bias.is_null() {
        for r in p.tiles.first(p.first_tile)..p.tiles.first(p.last_tile) {
            for c in 0..p.num_columns {
                *p.out.add(r * p.out_stride + c) += *p.bias.add(c);
            }
        }
    }
}

#[inline(always)]
unsafe fn stored<S: Simd, E: Weight, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    if p.num_rows() == 1 {
        // So many bytes go through the registers that what comes next is on the way by itself.
        row!(p, width, row_of_stored(S, E, N));
        return;
    }
    let num_steps = (p.last_tile - p.first_tile) * p.num_in.div_ceil(tile::CHUNK);
    let mut prefetch = p.prefetch(p.num_panels * num_steps);
    for index in 0..p.num_panels {
        let p = &p.part(index, 1, width);
        tiles!(S, N, p, |row| tile_of_stored(S, E)(p, row, &mut prefetch));
    }
}

#[inline(always)]
unsafe fn row_of_stored<S: Simd, E: Weight, const N: usize, const J: usize>(
    p: &Panel,
    step: usize,
) {
    let stride = step * p.stride;
    let mut sums = [[S::splat(0.0); N]; J];
    for first in (0..p.num_in).step_by(E::TOGETHER) {
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

/// As many rows as a tile has.
#[inline(always)]
unsafe fn tile_of_stored<S: Simd, E: Weight, const R: usize, const N: usize>(
    p: &Panel,
    row: usize,
    prefetch: &mut Prefetch,
) {
    let mut sums = [[S::splat(0.0); N]; R];
    tile::multiply::<S, E, R, N>(
        p.x.add(row * p.num_in),
        p.weights.cast(),
        p.num_in,
        &mut sums,
        prefetch,
    );
    let out = p.out.add(row * p.out_stride);
    store_tile::<S, R, N>(&sums, out, p.out_stride, p.num_columns);
}

/// How a GGUF block of a column is stored, and what becomes of the sum of its products.
trait Kind {
    /// Bytes of a block.
    const BYTES: usize;
    /// Bytes of its scale, and minimum where it has one.
    const HEAD: usize;
    /// The weights of four pairs of inputs, as 16-bit numbers; `bytes` are the first vector's of a group of four pairs.
    unsafe fn pairs<S: Simd>(bytes: *const u8, width: usize) -> [S::I; 4];
    /// `total` and the block's part: `sum` of weights times inputs, `inputs` the sum of inputs alone.
    unsafe fn add<S: Simd>(total: S::V, sum: S::I, inputs: S::V, head: &Head<S>) -> S::V;
}

/// Scales and minima of a vector of columns.
struct Head<S: Simd> {
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

struct Q8_0;
struct Q4_0;
struct Q4_1;

impl Kind for Q8_0 {
    const BYTES: usize = 2 + BLOCK;
    const HEAD: usize = 2;
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
unsafe fn heads_of<S: Simd, K: Kind, const N: usize>(block: *const u8) -> [Head<S>; N] {
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
unsafe fn blocks<S: Simd, K: Kind, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    let num_blocks = p.num_in / BLOCK;
    if p.num_rows() == 1 {
        row!(p, width, row_of_blocks(S, K, N));
        return;
    }
    let num_passes = 1 + p.last_tile - p.first_tile;
    let mut prefetch = p.prefetch(p.num_panels * num_passes * num_blocks);
    for index in 0..p.num_panels {
        let p = &p.part(index, 1, width);
        // Expanded once for all rows: registers do not hold the sums of two and what a block is expanded with.
        expand::<S, K, N>(p, &mut prefetch);
        tiles!(S, N, p, |row| tile_of_expanded(S, K)(p, row, &mut prefetch));
    }
}

#[inline(always)]
unsafe fn row_of_blocks<S: Simd, K: Kind, const N: usize, const J: usize>(p: &Panel, step: usize) {
    let stride = step * p.stride;
    let width = N * S::LANES;
    let x = Words::<1>::of(p, p.tiles.first(p.first_tile));
    // A count that the compiler does not see, one at least: a block unrolled whole would not fit in registers.
    let num_groups = black_box(BLOCK_PAIRS / GROUP);
    let mut totals = [[S::splat(0.0); N]; J];
    for block in 0..p.num_in / BLOCK {
        p.ask::<S, J>(stride, block * K::BYTES * width, K::BYTES * width);
        let inputs = S::splat(*x.sums.add(block));
        for j in 0..J {
            let from = p.weights.add(j * stride + block * K::BYTES * width);
            let mut sums = [S::zero_i32(); N];
            let mut group = 0;
            loop {
                let pairs_of_x = x.pairs.add(block * BLOCK_PAIRS + group * GROUP);
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

/// A panel's weights as 16-bit numbers, pair after pair.
#[inline(always)]
unsafe fn expand<S: Simd, K: Kind, const N: usize>(p: &Panel, prefetch: &mut Prefetch) {
    let width = N * S::LANES;
    for block in 0..p.num_in / BLOCK {
        prefetch.step::<S>();
        let from = p.weights.add(block * K::BYTES * width);
        let to = p.scratch.add(block * BLOCK_PAIRS * width);
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

/// As many rows as a tile has; weights are expanded, and the same numbers come of it.
#[inline(always)]
unsafe fn tile_of_expanded<S: Simd, K: Kind, const R: usize, const N: usize>(
    p: &Panel,
    row: usize,
    prefetch: &mut Prefetch,
) {
    let width = N * S::LANES;
    let x = Words::<R>::of(p, row);
    let num_pairs = black_box(BLOCK_PAIRS); // as above
    let mut totals = [[S::splat(0.0); N]; R];
    for block in 0..p.num_in / BLOCK {
        prefetch.step::<S>();
        let mut sums = [[S::zero_i32(); N]; R];
        let first = block * BLOCK_PAIRS;
        let (x_pairs, w) = (x.pairs.add(first * R), p.scratch.add(first * width));
        let mut rest = num_pairs;
        loop {
            rest -= 1;
            let pair = num_pairs - 1 - rest;
            let mut columns = [S::zero_i32(); N];
            for n in 0..N {
                columns[n] = S::load_pairs(w.add(pair * width + n * S::LANES).cast());
            }
            S::dot_tile(x_pairs.add(pair * R), &columns, &mut sums);
            if rest == 0 {
                break;
            }
        }
        let heads = heads_of::<S, K, N>(p.weights.add(block * K::BYTES * width));
        for r in 0..R {
            let inputs = S::splat(*x.sums.add(block * R + r));
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

/// A tile's rows in whole numbers, side by side.
struct Words<const R: usize> {
    scales: *const f32,
    pairs: *const f32,
    /// Of blocks.
    sums: *const f32,
}

impl<const R: usize> Words<R> {
    #[inline(always)]
    unsafe fn of(p: &Panel, row: usize) -> Words<R> {
        let scales = p.x.add(row * p.num_words);
        let pairs = scales.add(R);
        Words {
            scales,
            pairs,
            sums: pairs.add(p.num_in.div_ceil(2) * R),
        }
    }
}

/// Products of whole numbers: a row of `x` is a scale, then pairs of 16-bit numbers.
#[inline(always)]
unsafe fn whole_numbers<S: Simd, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    if p.num_rows() == 1 {
        row!(p, width, row_of_pairs(S, N));
        return;
    }
    let num_tiles = p.last_tile - p.first_tile;
    let num_steps = num_tiles * p.num_in.div_ceil(2).div_ceil(PAIRS);
    let mut prefetch = p.prefetch(p.num_panels * num_steps);
    for index in 0..p.num_panels {
        let p = &p.part(index, 1, width);
        tiles!(S, N, p, |row| tile_of_pairs(S)(p, row, &mut prefetch));
    }
}

#[inline(always)]
unsafe fn row_of_pairs<S: Simd, const N: usize, const J: usize>(p: &Panel, step: usize) {
    let stride = step * p.stride;
    let num_pairs = p.num_in.div_ceil(2);
    let x = Words::<1>::of(p, p.tiles.first(p.first_tile));
    let mut sums = [[S::zero_i32(); N]; J];
    for first in (0..num_pairs).step_by(ROW_PAIRS) {
        p.ask::<S, J>(
            stride,
            2 * first * N * S::LANES,
            2 * ROW_PAIRS * N * S::LANES,
        );
        for pair in first..num_pairs.min(first + ROW_PAIRS) {
            let a = S::splat_pair(x.pairs.add(pair).cast());
            for j in 0..J {
                let weights = p.weights.add(j * stride);
                for n in 0..N {
                    let w = S::widen_i8(weights.add(2 * (pair * N + n) * S::LANES).cast());
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

#[inline(always)]
unsafe fn tile_of_pairs<S: Simd, const R: usize, const N: usize>(
    p: &Panel,
    row: usize,
    prefetch: &mut Prefetch,
) {
    let width = N * S::LANES;
    let num_pairs = p.num_in.div_ceil(2);
    let x = Words::<R>::of(p, row);
    let mut sums = [[S::zero_i32(); N]; R];
    let mut done = 0;
    while done < num_pairs {
        prefetch.step::<S>();
        let end = num_pairs.min(done + PAIRS);
        while done < end {
            let mut w = [S::zero_i32(); N];
            for n in 0..N {
                w[n] = S::widen_i8(p.weights.add(2 * (done * width + n * S::LANES)).cast());
            }
            S::dot_tile(x.pairs.add(done * R), &w, &mut sums);
            done += 1;
        }
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

/// Units of a product: each panel with some of the tiles.
pub(crate) fn num_units(kernels: &Kernels, num_rows: usize, matrix: &Matrix) -> usize {
    let tile_rows = kernels.tile_rows(matrix.format);
    let num_tiles = num_rows.div_ceil(tile_rows);
    num_tiles.div_ceil(MAX_ROWS / tile_rows) * matrix.num_panels()
}

/// Panels that a worker takes at once: for one row whole streams, else no more bytes than stay near the core until they are
/// needed.
fn panels_at_once(num_rows: usize, matrix: &Matrix) -> usize {
    if num_rows == 1 {
        let length = STREAMED_BYTES / (STREAMS * matrix.panel_bytes());
        return STREAMS * length.max(1);
    }
    (NEAR_BYTES / matrix.panel_bytes()).clamp(1, 4)
}

/// A worker's part of `out = x · matrixᵀ + bias`; all workers call it with the same arguments.
///
/// # Safety
/// `x` points to `num_rows` rows of so many words, by tiles: of the matrix's inputs (quantised for an 8-bit one); `out` has
/// as many rows of its outputs; they do not overlap, and nobody else uses `out` before all units are done. A panel's
/// numbers fit in `scratch`, this worker's. The kernels are of the matrix's instruction set. `after` is what the next product is
/// with.
pub(crate) unsafe fn multiply(
    kernels: &Kernels,
    (x, num_words): (*const f32, usize),
    num_rows: usize,
    (matrix, after): (&Matrix, Option<&Matrix>),
    out: Rows,
    (units, worker): (&Units, usize),
    scratch: *mut f32,
) {
    let bias = matrix.bias.as_ref().map_or(std::ptr::null(), Vec::as_ptr);
    let num_panels = matrix.num_panels();
    let num_units = num_units(kernels, num_rows, matrix);
    let tiles = Tiles::new(num_rows, kernels.tile_rows(matrix.format));
    let tiles_at_once = tiles.len().div_ceil(num_units / num_panels);
    let at_once = panels_at_once(num_rows, matrix);
    let mut num_done = 0;
    let mut taken = units.take_of_share(worker, num_units, at_once);
    while let Some(some) = taken {
        taken = units.take_of_share(worker, num_units, at_once);
        let (next, next_bytes) = match (&taken, after) {
            (Some(next), _) => (
                matrix.panel(next.start % num_panels),
                next.len() * matrix.panel_bytes(),
            ),
            (None, Some(after)) => {
                let units_after = self::num_units(kernels, num_rows, after);
                let first = units.first_of_share(worker, units_after);
                let num_bytes = panels_at_once(num_rows, after) * after.panel_bytes();
                (after.panel(first % after.num_panels()), num_bytes)
            }
            (None, None) => (matrix.panel(0), 0),
        };
        num_done += some.len();
        let mut unit = some.start;
        while unit < some.end {
            let index = unit % num_panels;
            let count = (some.end - unit).min(num_panels - index);
            let first = index * matrix.width;
            let first_tile = tiles.len().min(unit / num_panels * tiles_at_once);
            let panel = Panel {
                x,
                num_words,
                tiles,
                first_tile,
                last_tile: tiles.len().min(first_tile + tiles_at_once),
                num_in: matrix.num_in,
                format: matrix.format,
                num_panels: count,
                stride: matrix.panel_bytes(),
                weights: matrix.panel(index),
                next,
                next_bytes,
                num_columns: (count * matrix.width).min(matrix.num_out - first),
                bias: if bias.is_null() {
                    bias
                } else {
                    bias.add(first)
                },
                out: out.at(0).add(first),
                out_stride: out.stride(),
                scratch,
            };
            (kernels.panel)(&panel);
            unit += count;
        }
    }
    units.finish_all(num_done);
}
