//! Products with packed matrices.
//!
//! The unit of work is a panel: all rows of the input times the panel's columns. Each worker takes panels of a part of its
//! own, then of what others have left of theirs, and asks for the next one's lines while it multiplies: weights come from
//! memory once a step, in order.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "kernels: their one contract is that the panel's pointers are valid for its sizes"
)]

use std::ops::Range;

use crate::kernels::{GateRow, Kernels};
use crate::matrix::{BLOCK, Format, Matrix};
use crate::memory::Rows;
use crate::program::Units;
use crate::simd::{Bf16, Quads, Simd};
use crate::tile::{Prefetch, STREAMS, Tiles, store_tile};

use blocks::{Q4_0, Q4_1, Q8_0};

/// Rows that are multiplied with a panel before the next: more do not stay near the core, and come from further away for
/// each panel.
const MAX_ROWS: usize = 512;
/// Bytes that stay near the core while as many come.
const NEAR_BYTES: usize = 64 << 10;
/// Bytes that a worker takes at once for one row: enough that what a new stream costs is little.
const STREAMED_BYTES: usize = 96 << 10;
/// Words of weights that several tiles are multiplied with before the next ones, where the first level holds them.
const PART_WORDS: usize = 6144;

/// Words that a product with such a matrix takes beside its input and output.
pub(crate) fn scratch_words(matrix: &Matrix) -> usize {
    let gated = match matrix.group {
        1 => 0,
        group => {
            let panels =
                |num_rows| units_at_once(num_rows, matrix).min(matrix.num_panels()) * group;
            panels(1).max(MAX_ROWS * panels(MAX_ROWS)) * matrix.width
        }
    };
    words_of_panels(matrix) + gated
}

/// Of these, what panels take.
fn words_of_panels(matrix: &Matrix) -> usize {
    (MAX_ROWS + matrix.num_in.next_multiple_of(BLOCK)) * matrix.width
}

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
    /// The worker's own: sums of the inputs so far, then weights of a part of them, expanded.
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

    fn num_tiles(&self) -> usize {
        self.last_tile - self.first_tile
    }

    /// Where a tile's sums are kept between two parts of the inputs.
    #[inline(always)]
    unsafe fn kept(&self, row: usize, width: usize) -> *mut f32 {
        let row = row - self.tiles.first(self.first_tile);
        self.scratch.add(row * width)
    }

    /// Where a part's weights are expanded.
    #[inline(always)]
    unsafe fn expanded(&self, width: usize) -> *mut f32 {
        self.scratch.add(MAX_ROWS * width)
    }

    fn prefetch(&self, num_steps: usize) -> Prefetch {
        Prefetch::new(self.next, self.next_bytes, num_steps)
    }

    /// Asks for so many bytes of `J` panels that lie `stride` bytes from one another, some time before they are read. At a
    /// panel's end it is the next one's beginning.
    #[inline(always)]
    unsafe fn ask<S: Simd, const J: usize>(&self, stride: usize, done: usize, num_bytes: usize) {
        let from = self.weights.wrapping_add(done + S::AHEAD);
        for line in (0..num_bytes).step_by(64) {
            for j in 0..J {
                S::prefetch_near(from.wrapping_add(j * stride + line));
            }
        }
    }
}

/// One row times panels, in so many streams: each of panels that lie one after another.
macro_rules! row {
    ($streams:expr, $p:ident, $width:expr, $row:ident($($generic:ident),*)) => {{
        let length = $p.num_panels / $streams;
        for first in 0..length {
            let part = $p.part(first, $p.num_panels - first, $width);
            $row::<$($generic,)* { $streams }>(&part, length);
        }
        let first = length * $streams;
        match $p.num_panels - first {
            0 => {}
            1 => $row::<$($generic,)* 1>(&$p.part(first, 1, $width), 1),
            2 => $row::<$($generic,)* 2>(&$p.part(first, 2, $width), 1),
            _ => $row::<$($generic,)* 3>(&$p.part(first, 3, $width), 1),
        }
    }};
}

/// Rows by tiles, two at least and `$max` at most in each.
macro_rules! tiles {
    ($max:expr, $N:ident, $panel:expr, |$row:ident| $tile:ident($($generic:ident),*)($($argument:expr),*)) => {
        for tile in $panel.first_tile..$panel.last_tile {
            let $row = $panel.tiles.first(tile);
            match $panel.tiles.first(tile + 1) - $row {
                2 => $tile::<$($generic,)* 2, $N>($($argument),*),
                3 => $tile::<$($generic,)* 3, $N>($($argument),*),
                4 if const { $max >= 4 } => $tile::<$($generic,)* 4, $N>($($argument),*),
                5 if const { $max >= 5 } => $tile::<$($generic,)* 5, $N>($($argument),*),
                6 if const { $max >= 6 } => $tile::<$($generic,)* 6, $N>($($argument),*),
                7 if const { $max >= 7 } => $tile::<$($generic,)* 7, $N>($($argument),*),
                8 if const { $max >= 8 } => $tile::<$($generic,)* 8, $N>($($argument),*),
                _ => unreachable!("no tile of so many rows"),
            }
        }
    };
}

mod blocks;
mod quads;
mod stored;
mod whole;

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

/// Parts of so many inputs, or pairs or blocks of them, each of so many words: about as long, and whole `multiple`s. AVX2
/// multiplies so slowly that the second level keeps up: all is one part there.
fn parts_of<S: Simd>(
    num: usize,
    words: usize,
    multiple: usize,
) -> impl Iterator<Item = Range<usize>> {
    let num_parts = if S::WIDENS_BESIDE {
        1
    } else {
        (num * words).div_ceil(PART_WORDS)
    };
    let size = num.div_ceil(num_parts).next_multiple_of(multiple);
    (0..num)
        .step_by(size)
        .map(move |first| first..num.min(first + size))
}

/// A tile's rows in whole numbers, side by side: of each row a scale, the numbers, two of them in a word, and sums of them.
struct Words<const R: usize> {
    scales: *const f32,
    whole: *const f32,
    /// Of blocks, or of all.
    sums: *const i32,
}

impl<const R: usize> Words<R> {
    #[inline(always)]
    unsafe fn of<S: Simd>(p: &Panel, row: usize) -> Words<R> {
        let scales = p.x.add(row * p.num_words);
        let whole = scales.add(R);
        Words {
            scales,
            whole,
            sums: whole
                .add(p.num_in.next_multiple_of(S::TOGETHER) / 2 * R)
                .cast(),
        }
    }
}

/// Multiplies with panels of `N` vectors, or of `M` where they are of whole numbers.
#[inline(always)]
pub(crate) unsafe fn panel<S: Simd, const N: usize, const M: usize>(p: &Panel) {
    match p.format {
        Format::F32 => stored::panels::<S, f32, N>(p),
        Format::Bf16 => stored::panels::<S, Bf16, N>(p),
        Format::Int8 => whole::panels::<S, M>(p),
        Format::Q8_0 => blocks::panels::<S, Q8_0, M>(p),
        Format::Q4_0 => blocks::panels::<S, Q4_0, M>(p),
        Format::Q4_1 => blocks::panels::<S, Q4_1, M>(p),
    }
    add_bias(p);
}

/// The same of whole numbers, in fours.
#[inline(always)]
pub(crate) unsafe fn panel_of_quads<S: Quads, const M: usize>(p: &Panel) {
    match p.format {
        Format::F32 | Format::Bf16 => unreachable!("no whole numbers"),
        Format::Int8 => quads::panels::<S, M>(p),
        Format::Q8_0 => quads::panels_of_blocks::<S, Q8_0, M>(p),
        Format::Q4_0 => quads::panels_of_blocks::<S, Q4_0, M>(p),
        Format::Q4_1 => quads::panels_of_blocks::<S, Q4_1, M>(p),
    }
    add_bias(p);
}

unsafe fn add_bias(p: &Panel) {
    if !p.bias.is_null() {
        for r in p.tiles.first(p.first_tile)..p.tiles.first(p.last_tile) {
            for c in 0..p.num_columns {
                *p.out.add(r * p.out_stride + c) += *p.bias.add(c);
            }
        }
    }
}

/// Units of a product: each panel, or each with the one beside it, with some of the tiles.
pub(crate) fn num_units(kernels: &Kernels, num_rows: usize, matrix: &Matrix) -> usize {
    let tile_rows = kernels.tile_rows(matrix.format);
    let num_tiles = num_rows.div_ceil(tile_rows);
    num_tiles.div_ceil(MAX_ROWS / tile_rows) * (matrix.num_panels() / matrix.group)
}

/// Units that a worker takes at once: for one row whole streams, else no more bytes than stay near the core until they are
/// needed.
fn units_at_once(num_rows: usize, matrix: &Matrix) -> usize {
    let num_panels = if num_rows == 1 {
        let length = STREAMED_BYTES / (STREAMS * matrix.panel_bytes());
        STREAMS * length.max(1)
    } else {
        (NEAR_BYTES / matrix.panel_bytes()).clamp(1, 4)
    };
    num_panels.div_ceil(matrix.group)
}

/// A worker's part of `out = x · matrixᵀ + bias`, or of what a gate makes of that; all workers call it with the same
/// arguments.
///
/// # Safety
/// `x` points to `num_rows` rows of so many words, by tiles: of the matrix's inputs (quantised for an 8-bit one); `out` has
/// as many rows of its outputs; they do not overlap, and nobody else uses `out` before all units are done. `scratch` has
/// [`scratch_words`], this worker's. The kernels are of the matrix's instruction set. There is a gate where the matrix has
/// groups. `after` is what the next product is with.
pub(crate) unsafe fn multiply(
    kernels: &Kernels,
    (x, num_words): (*const f32, usize),
    num_rows: usize,
    (matrix, gate, after): (&Matrix, Option<GateRow>, Option<&Matrix>),
    out: Rows,
    (units, worker): (&Units, usize),
    scratch: *mut f32,
) {
    let bias = matrix.bias.as_ref().map_or(std::ptr::null(), Vec::as_ptr);
    let (width, group) = (matrix.width, matrix.group);
    let num_groups = matrix.num_panels() / group;
    let num_units = num_units(kernels, num_rows, matrix);
    let tiles = Tiles::new(num_rows, kernels.tile_rows(matrix.format));
    let tiles_at_once = tiles.len().div_ceil(num_units / num_groups);
    let at_once = units_at_once(num_rows, matrix);
    let gated = scratch.add(words_of_panels(matrix));
    let mut num_done = 0;
    let mut taken = units.take_of_share(worker, num_units, at_once);
    while let Some(some) = taken {
        taken = units.take_of_share(worker, num_units, at_once);
        let (next, next_bytes) = match (&taken, after) {
            (Some(next), _) => (
                matrix.panel(next.start % num_groups * group),
                next.len() * group * matrix.panel_bytes(),
            ),
            (None, Some(after)) => {
                let units_after = self::num_units(kernels, num_rows, after);
                let first = units.first_of_share(worker, units_after);
                let num_panels = units_at_once(num_rows, after) * after.group;
                let panel = first * after.group % after.num_panels();
                (after.panel(panel), num_panels * after.panel_bytes())
            }
            (None, None) => (matrix.panel(0), 0),
        };
        num_done += some.len();
        let mut unit = some.start;
        while unit < some.end {
            let index = unit % num_groups;
            let count = (some.end - unit).min(num_groups - index);
            let first = index * group * width;
            let first_tile = tiles.len().min(unit / num_groups * tiles_at_once);
            let last_tile = tiles.len().min(first_tile + tiles_at_once);
            let rows = tiles.first(first_tile)..tiles.first(last_tile);
            let num_columns = (count * group * width).min(matrix.num_out - first);
            // Gates and what they are multiplied with stay near this worker.
            let to = if gate.is_some() {
                Rows::new(gated.wrapping_sub(rows.start * num_columns), num_columns)
            } else {
                Rows::new(out.at(0).add(first), out.stride())
            };
            let panel = Panel {
                x,
                num_words,
                tiles,
                first_tile,
                last_tile,
                num_in: matrix.num_in,
                format: matrix.format,
                num_panels: count * group,
                stride: matrix.panel_bytes(),
                weights: matrix.panel(index * group),
                next,
                next_bytes,
                num_columns,
                bias: if bias.is_null() {
                    bias
                } else {
                    bias.add(first)
                },
                out: to.at(0),
                out_stride: to.stride(),
                scratch,
            };
            (kernels.panel)(&panel);
            if let Some(gate) = gate {
                let made = Rows::new(out.at(0).add(index * width), out.stride());
                for row in rows {
                    let from = to.row(row, num_columns).chunks_exact(2 * width);
                    let made = made.row_mut(row, num_columns / 2).chunks_exact_mut(width);
                    for (pair, made) in from.zip(made) {
                        gate(pair, made);
                    }
                }
            }
            unit += count;
        }
    }
    units.finish_all(num_done);
}
