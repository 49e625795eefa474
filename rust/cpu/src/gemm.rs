//! Products with packed matrices.
//!
//! The unit of work is a panel: all rows of the input times the panel's columns. Workers take panels as they come to
//! them, and ask for the next one's lines while they multiply: weights come from memory once a step, in order.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "kernels: their one contract is that the panel's pointers are valid for its sizes"
)]

use crate::kernels::Kernels;
use crate::matrix::{BLOCK, Format, Matrix};
use crate::memory::Rows;
use crate::program::Units;
use crate::simd::{Bf16, Element, Simd};
use crate::tile::{self, Product};

/// Rows that are multiplied with a panel before the next: more do not stay near the core, and come from further away for
/// each panel.
const MAX_ROWS: usize = 512;
/// The most columns of a panel.
pub(crate) const MAX_WIDTH: usize = 48;

/// One panel of a product.
pub(crate) struct Panel {
    pub(crate) x: *const f32,
    pub(crate) x_stride: usize,
    pub(crate) num_rows: usize,
    pub(crate) num_in: usize,
    pub(crate) format: Format,
    pub(crate) weights: *const u8,
    pub(crate) next: *const u8,
    pub(crate) num_bytes: usize,
    /// Of the panel's columns, those that the matrix has.
    pub(crate) num_columns: usize,
    /// For each of these, or null.
    pub(crate) bias: *const f32,
    pub(crate) out: *mut f32,
    pub(crate) out_stride: usize,
    /// A whole panel's numbers fit here.
    pub(crate) scratch: *mut f32,
}

/// Multiplies with one panel of `N` vectors.
#[inline(always)]
pub(crate) unsafe fn panel<S: Simd, const N: usize>(p: &Panel) {
    match p.format {
        Format::F32 => stored::<S, f32, N>(p, p.weights.cast()),
        Format::Bf16 => stored::<S, Bf16, N>(p, p.weights.cast()),
        Format::Int8 => whole_numbers::<S, N>(p),
        Format::Q8_0 | Format::Q4_0 | Format::Q4_1 => {
            // Expanded once for all rows: it then lies near the core, and the product is that of float32.
            expand::<S, N>(p);
            stored::<S, f32, N>(p, p.scratch);
        }
    }
    if !p.bias.is_null() {
        for r in 0..p.num_rows {
            for c in 0..p.num_columns {
                *p.out.add(r * p.out_stride + c) += *p.bias.add(c);
            }
        }
    }
}

#[inline(always)]
unsafe fn stored<S: Simd, E: Element, const N: usize>(p: &Panel, weights: *const E) {
    let width = N * S::LANES;
    let whole = Product {
        x: p.x,
        x_stride: p.x_stride,
        w: weights,
        w_stride: width,
        num_in: p.num_in,
        out: p.out,
        out_stride: p.out_stride,
        adds: false,
        next: p.next,
        next_bytes: p.num_bytes,
    };
    // The last panel's columns beyond the matrix have no place in `out`: there, a row is made beside it.
    let is_whole = p.num_columns == width;
    let rows_at_once = if is_whole { p.num_rows } else { 1 };
    let mut beside = [0.0f32; MAX_WIDTH];
    for first in (0..p.num_rows).step_by(rows_at_once) {
        let to = p.out.add(first * p.out_stride);
        let part = Product {
            x: p.x.add(first * p.x_stride),
            out: if is_whole { to } else { beside.as_mut_ptr() },
            ..whole
        };
        tile::rows::<S, E, N, false>(part, rows_at_once);
        if !is_whole {
            to.copy_from_nonoverlapping(beside.as_ptr(), p.num_columns);
        }
    }
}

/// GGUF's blocks as float32, in the order of a panel: the numbers that the file's own formula gives, bit for bit.
#[inline(always)]
unsafe fn expand<S: Simd, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    let (head, bytes) = (p.format.head_bytes(), p.format.block_bytes().unwrap_or(0));
    for block in 0..p.num_in / BLOCK {
        let from = p.weights.add(block * bytes * width);
        let to = p.scratch.add(block * BLOCK * width);
        for n in 0..N {
            let at = n * S::LANES;
            let scale = S::load_f16(from.cast::<u16>().add(at));
            let data = from.add(head * width + at);
            let out = to.add(at);
            match p.format {
                Format::Q8_0 => {
                    for k in 0..BLOCK {
                        let w = S::load_i8(data.add(k * width).cast());
                        S::store(out.add(k * width), S::mul(w, scale));
                    }
                }
                Format::Q4_0 => {
                    for k in 0..BLOCK / 2 {
                        let (low, high) = S::load_nibbles(data.add(k * width));
                        let middle = S::splat(8.0);
                        let high_at = out.add((k + BLOCK / 2) * width);
                        S::store(out.add(k * width), S::mul(S::sub(low, middle), scale));
                        S::store(high_at, S::mul(S::sub(high, middle), scale));
                    }
                }
                _ => {
                    let minimum = S::load_f16(from.cast::<u16>().add(width + at));
                    for k in 0..BLOCK / 2 {
                        let (low, high) = S::load_nibbles(data.add(k * width));
                        let high_at = out.add((k + BLOCK / 2) * width);
                        S::store(out.add(k * width), S::add(S::mul(low, scale), minimum));
                        S::store(high_at, S::add(S::mul(high, scale), minimum));
                    }
                }
            }
        }
    }
}

/// Products of whole numbers: a row of `x` is a scale, then 16-bit numbers.
#[inline(always)]
unsafe fn whole_numbers<S: Simd, const N: usize>(p: &Panel) {
    const MAX_ROWS: usize = 6;
    let num_tiles = p.num_rows.div_ceil(MAX_ROWS);
    let num_pairs = p.num_in.div_ceil(2);
    let lines = p.num_bytes.div_ceil(64).div_ceil(num_tiles.max(1));
    let mut row = 0;
    for index in 0..num_tiles {
        let count = (p.num_rows - row).div_ceil(num_tiles - index);
        for line in index * lines..(index + 1) * lines {
            S::prefetch(p.next.wrapping_add(line * 64));
        }
        match count {
            1 => tile_of_pairs::<S, 1, N>(p, row, num_pairs),
            2 => tile_of_pairs::<S, 2, N>(p, row, num_pairs),
            3 => tile_of_pairs::<S, 3, N>(p, row, num_pairs),
            4 => tile_of_pairs::<S, 4, N>(p, row, num_pairs),
            5 => tile_of_pairs::<S, 5, N>(p, row, num_pairs),
            _ => tile_of_pairs::<S, MAX_ROWS, N>(p, row, num_pairs),
        }
        row += count;
    }
}

#[inline(always)]
unsafe fn tile_of_pairs<S: Simd, const R: usize, const N: usize>(
    p: &Panel,
    row: usize,
    num_pairs: usize,
) {
    let width = N * S::LANES;
    let x = p.x.add(row * p.x_stride);
    let mut sums = [[S::zero_i32(); N]; R];
    for pair in 0..num_pairs {
        let mut w = [S::zero_i32(); N];
        for n in 0..N {
            w[n] = S::widen_i8(p.weights.add(2 * (pair * width + n * S::LANES)).cast());
        }
        for r in 0..R {
            let numbers = x.add(r * p.x_stride + 1).cast::<i16>();
            let a = S::splat_pair(numbers.add(2 * pair));
            for n in 0..N {
                sums[r][n] = S::dot_pairs(sums[r][n], a, w[n]);
            }
        }
    }
    let scales = p.weights.add(2 * num_pairs * width).cast::<f32>();
    let mut beside = [0.0f32; MAX_WIDTH];
    for r in 0..R {
        let scale = S::splat(*x.add(r * p.x_stride));
        for n in 0..N {
            let columns = S::load(scales.add(n * S::LANES));
            let product = S::mul(S::mul(S::to_f32(sums[r][n]), scale), columns);
            S::store(beside.as_mut_ptr().add(n * S::LANES), product);
        }
        let to = p.out.add((row + r) * p.out_stride);
        to.copy_from_nonoverlapping(beside.as_ptr(), p.num_columns);
    }
}

/// Units of a product: each panel with some of the rows.
pub(crate) fn num_units(num_rows: usize, matrix: &Matrix) -> usize {
    num_rows.div_ceil(MAX_ROWS) * matrix.num_panels()
}

/// A worker's part of `out = x · matrixᵀ + bias`; all workers call it with the same arguments.
///
/// # Safety
/// `x` has `num_rows` rows of the matrix's inputs (quantised for an 8-bit one), `out` as many rows of its outputs; they do
/// not overlap, and nobody else uses `out` before all units are done. A panel's numbers fit in `scratch`, this worker's. The kernels are of the matrix's instruction set.
pub(crate) unsafe fn multiply(
    kernels: &Kernels,
    x: Rows,
    num_rows: usize,
    matrix: &Matrix,
    out: Rows,
    units: &Units,
    scratch: *mut f32,
) {
    let bias = matrix.bias.as_ref().map_or(std::ptr::null(), Vec::as_ptr);
    let (num_units, num_panels) = (num_units(num_rows, matrix), matrix.num_panels());
    let rows_at_once = num_rows.div_ceil(num_rows.div_ceil(MAX_ROWS).max(1));
    let mut unit = units.take();
    while unit < num_units {
        let following = units.take();
        let index = unit % num_panels;
        let first = index * matrix.width;
        let row = unit / num_panels * rows_at_once;
        let panel = Panel {
            x: x.at(row),
            x_stride: x.stride(),
            num_rows: rows_at_once.min(num_rows - row),
            num_in: matrix.num_in,
            format: matrix.format,
            weights: matrix.panel(index),
            next: matrix.panel(following % num_panels),
            num_bytes: matrix.panel_bytes(),
            num_columns: matrix.width.min(matrix.num_out - first),
            bias: if bias.is_null() {
                bias
            } else {
                bias.add(first)
            },
            out: out.at(row).add(first),
            out_stride: out.stride(),
            scratch,
        };
        (kernels.panel)(&panel);
        units.finish();
        unit = following;
    }
}
