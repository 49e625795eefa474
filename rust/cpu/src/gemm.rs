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
use crate::tile::{self, Prefetch, Product};

/// Rows that are multiplied with a panel before the next: more do not stay near the core, and come from further away for
/// each panel.
const MAX_ROWS: usize = 512;
/// Pairs of inputs between two looks at what is to be asked for.
const PAIRS: usize = 32;
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
        Format::Q8_0 => blocks::<S, Q8_0, N>(p),
        Format::Q4_0 => blocks::<S, Q4_0, N>(p),
        Format::Q4_1 => blocks::<S, Q4_1, N>(p),
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

/// How a GGUF block of a column gives its numbers: the ones of the file's own formula, bit for bit.
trait Kind {
    /// Bytes of a block.
    const BYTES: usize;
    /// Bytes of its scale, and minimum where it has one.
    const HEAD: usize;
    /// Numbers of a byte.
    const PER_BYTE: usize;
    /// The numbers of the bytes' `half`, low or high, times scale and plus minimum.
    unsafe fn numbers<S: Simd>(bytes: *const u8, half: usize, head: &Head<S>) -> S::V;
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

struct Q8_0;
struct Q4_0;
struct Q4_1;

impl Kind for Q8_0 {
    const BYTES: usize = 2 + BLOCK;
    const HEAD: usize = 2;
    const PER_BYTE: usize = 1;
    #[inline(always)]
    unsafe fn numbers<S: Simd>(bytes: *const u8, _half: usize, head: &Head<S>) -> S::V {
        S::mul(S::load_i8(bytes.cast()), head.scale)
    }
}

impl Kind for Q4_0 {
    const BYTES: usize = 2 + BLOCK / 2;
    const HEAD: usize = 2;
    const PER_BYTE: usize = 2;
    #[inline(always)]
    unsafe fn numbers<S: Simd>(bytes: *const u8, half: usize, head: &Head<S>) -> S::V {
        S::mul(S::sub(nibbles::<S>(bytes, half), S::splat(8.0)), head.scale)
    }
}

impl Kind for Q4_1 {
    const BYTES: usize = 4 + BLOCK / 2;
    const HEAD: usize = 4;
    const PER_BYTE: usize = 2;
    #[inline(always)]
    unsafe fn numbers<S: Simd>(bytes: *const u8, half: usize, head: &Head<S>) -> S::V {
        S::add(S::mul(nibbles::<S>(bytes, half), head.scale), head.minimum)
    }
}

#[inline(always)]
unsafe fn nibbles<S: Simd>(bytes: *const u8, half: usize) -> S::V {
    let (low, high) = S::load_nibbles(bytes);
    if half == 0 { low } else { high }
}

#[inline(always)]
unsafe fn head_of<S: Simd, K: Kind>(block: *const u8, width: usize, column: usize) -> Head<S> {
    let halves = block.cast::<u16>().add(column);
    Head {
        scale: S::load_f16(halves),
        minimum: if K::HEAD == 4 {
            S::load_f16(halves.add(width))
        } else {
            S::splat(0.0)
        },
    }
}

/// Products with GGUF's blocks.
#[inline(always)]
unsafe fn blocks<S: Simd, K: Kind, const N: usize>(p: &Panel) {
    match p.num_rows {
        1 => tile_of_blocks::<S, K, 1, N>(p),
        2 => tile_of_blocks::<S, K, 2, N>(p),
        3 => tile_of_blocks::<S, K, 3, N>(p),
        _ => {
            // Expanded once for all rows: it then lies near the core, and the product is that of float32.
            expand::<S, K, N>(p);
            stored::<S, f32, N>(p, p.scratch);
        }
    }
}

/// Blocks as float32, in the order of a panel.
#[inline(always)]
unsafe fn expand<S: Simd, K: Kind, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    for block in 0..p.num_in / BLOCK {
        let from = p.weights.add(block * K::BYTES * width);
        let to = p.scratch.add(block * BLOCK * width);
        for n in 0..N {
            let at = n * S::LANES;
            let head = head_of::<S, K>(from, width, at);
            let bytes = from.add(K::HEAD * width + at);
            for half in 0..K::PER_BYTE {
                for k in 0..BLOCK / K::PER_BYTE {
                    let numbers = K::numbers::<S>(bytes.add(k * width), half, &head);
                    let place = half * (BLOCK / K::PER_BYTE) + k;
                    S::store(to.add(place * width + at), numbers);
                }
            }
        }
    }
}

/// A few rows: blocks are expanded in registers, and multiplied in the order of the inputs, as expanded ones are.
#[inline(always)]
unsafe fn tile_of_blocks<S: Simd, K: Kind, const R: usize, const N: usize>(p: &Panel) {
    let width = N * S::LANES;
    let num_blocks = p.num_in / BLOCK;
    let mut prefetch = Prefetch::new(p.next, p.num_bytes, num_blocks);
    // A count that the compiler does not see: a block unrolled whole would not fit in registers.
    let num_bytes = (BLOCK / K::PER_BYTE).min(p.num_in);
    let mut sums = [[S::splat(0.0); N]; R];
    for block in 0..num_blocks {
        prefetch.step::<S>();
        let from = p.weights.add(block * K::BYTES * width);
        let mut heads = [Head {
            scale: S::splat(0.0),
            minimum: S::splat(0.0),
        }; N];
        for n in 0..N {
            heads[n] = head_of::<S, K>(from, width, n * S::LANES);
        }
        for half in 0..K::PER_BYTE {
            for k in 0..num_bytes {
                let bytes = from.add((K::HEAD + k) * width);
                let input = block * BLOCK + half * num_bytes + k;
                let mut w = [S::splat(0.0); N];
                for n in 0..N {
                    w[n] = K::numbers::<S>(bytes.add(n * S::LANES), half, &heads[n]);
                }
                for r in 0..R {
                    let x = S::splat(*p.x.add(r * p.x_stride + input));
                    for n in 0..N {
                        sums[r][n] = S::fma(x, w[n], sums[r][n]);
                    }
                }
            }
        }
    }
    let mut beside = [0.0f32; MAX_WIDTH];
    for r in 0..R {
        for n in 0..N {
            S::store(beside.as_mut_ptr().add(n * S::LANES), sums[r][n]);
        }
        let to = p.out.add(r * p.out_stride);
        to.copy_from_nonoverlapping(beside.as_ptr(), p.num_columns);
    }
}

/// Products of whole numbers: a row of `x` is a scale, then 16-bit numbers.
#[inline(always)]
unsafe fn whole_numbers<S: Simd, const N: usize>(p: &Panel) {
    const MAX_ROWS: usize = 6;
    let num_tiles = p.num_rows.div_ceil(MAX_ROWS);
    let num_pairs = p.num_in.div_ceil(2);
    let mut prefetch = Prefetch::new(p.next, p.num_bytes, num_tiles * num_pairs.div_ceil(PAIRS));
    let mut row = 0;
    for index in 0..num_tiles {
        let count = (p.num_rows - row).div_ceil(num_tiles - index);
        match count {
            1 => tile_of_pairs::<S, 1, N>(p, row, num_pairs, &mut prefetch),
            2 => tile_of_pairs::<S, 2, N>(p, row, num_pairs, &mut prefetch),
            3 => tile_of_pairs::<S, 3, N>(p, row, num_pairs, &mut prefetch),
            4 => tile_of_pairs::<S, 4, N>(p, row, num_pairs, &mut prefetch),
            5 => tile_of_pairs::<S, 5, N>(p, row, num_pairs, &mut prefetch),
            _ => tile_of_pairs::<S, MAX_ROWS, N>(p, row, num_pairs, &mut prefetch),
        }
        row += count;
    }
}

#[inline(always)]
unsafe fn tile_of_pairs<S: Simd, const R: usize, const N: usize>(
    p: &Panel,
    row: usize,
    num_pairs: usize,
    prefetch: &mut Prefetch,
) {
    let width = N * S::LANES;
    let x = p.x.add(row * p.x_stride);
    let mut sums = [[S::zero_i32(); N]; R];
    let mut done = 0;
    while done < num_pairs {
        prefetch.step::<S>();
        let end = num_pairs.min(done + PAIRS);
        for pair in done..end {
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
        done = end;
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
