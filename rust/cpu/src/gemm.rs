//! Products with packed matrices.
//!
//! The unit of work is a panel: all rows of the input times the panel's columns. Workers take panels as they come to
//! them, and ask for the next one's lines while they multiply: weights come from memory once a step, in order.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "kernels: their one contract is that the panel's pointers are valid for its sizes"
)]

use crate::kernels::Kernels;
use crate::matrix::{Format, Matrix};
use crate::memory::Rows;
use crate::program::Units;
use crate::simd::{Bf16, Element, Simd};
use crate::tile::{self, Product};

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
}

/// Multiplies with one panel of `N` vectors.
#[inline(always)]
pub(crate) unsafe fn panel<S: Simd, const N: usize>(p: &Panel) {
    match p.format {
        Format::F32 => stored::<S, f32, N>(p),
        Format::Bf16 => stored::<S, Bf16, N>(p),
    }
}

#[inline(always)]
unsafe fn stored<S: Simd, E: Element, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    let whole = Product {
        x: p.x,
        x_stride: p.x_stride,
        w: p.weights.cast::<E>(),
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
        tile::rows::<S, E, N>(part, rows_at_once);
        if !is_whole {
            to.copy_from_nonoverlapping(beside.as_ptr(), p.num_columns);
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

/// A worker's part of `out = x · matrixᵀ + bias`; all workers call it with the same arguments.
///
/// # Safety
/// `x` has `num_rows` rows of `num_in` numbers, `out` as many rows of `num_out`; they do not overlap, and nobody else
/// uses `out` before all panels are done. The kernels are of the matrix's instruction set.
pub(crate) unsafe fn multiply(
    kernels: &Kernels,
    x: Rows,
    num_rows: usize,
    matrix: &Matrix,
    out: Rows,
    units: &Units,
) {
    let bias = matrix.bias.as_ref().map_or(std::ptr::null(), Vec::as_ptr);
    let mut index = units.take();
    while index < matrix.num_panels() {
        let following = units.take();
        let first = index * matrix.width;
        let panel = Panel {
            x: x.at(0),
            x_stride: x.stride(),
            num_rows,
            num_in: matrix.num_in,
            format: matrix.format,
            weights: matrix.panel(index),
            next: matrix.panel(following),
            num_bytes: matrix.panel_bytes(),
            num_columns: matrix.width.min(matrix.num_out - first),
            bias: if bias.is_null() {
                bias
            } else {
                bias.add(first)
            },
            out: out.at(0).add(first),
            out_stride: out.stride(),
        };
        (kernels.panel)(&panel);
        units.finish();
        index = following;
    }
}
