//! Attention over the paged cache, straight from the block tables: nothing is gathered for a step, nothing is padded.
//!
//! The unit of work is some queries of one row, with one KV head and a range of the row's keys. All query heads of a
//! KV head are attended together, so each key is read once for all of them. Keys go by in tiles of 64 with a running
//! softmax; a tile begins at a multiple of 64, wherever the query is, so what a query gets depends on its row alone.
//! `decode` has the tiles of one query, and `chunk` those of several.
//!
//! A long row is cut in ranges of keys: the last worker to finish one of them combines the parts, always in order.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "kernels: their one contract is that the step was checked against the sizes of cache and buffers"
)]

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::kernels::Kernels;
use crate::memory::{Buffer, Rows};
use crate::simd::{Bf16, Element, Simd};

mod chunk;
mod decode;

/// Keys of a tile.
pub(crate) const TILE: usize = 64;
/// Query heads × queries that are attended together, at most, unless one query has more heads.
const MAX_ROWS: usize = 192;
/// Rows that lie side by side fill whole vectors of any instruction set.
const ROW_STEP: usize = 16;
/// Keys of a range: a row with more is shared among workers.
pub(crate) const RANGE: usize = 512;

/// How attention looks at keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// What scores are multiplied by.
    pub scale: f32,
    /// A token sees so many tokens, itself included; `None`: all before it.
    pub window: Option<usize>,
    /// Scores become `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
}

/// How K and V are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFormat {
    /// 4 bytes a number.
    F32,
    /// bfloat16: 2 bytes.
    Bf16,
}

/// Heads of a fused q, k, v row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads; a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Heads of K and V.
    pub num_kv_heads: usize,
    /// Numbers of a head; even.
    pub head_dim: usize,
}

impl Heads {
    pub(crate) fn group(self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Numbers of a fused row.
    pub(crate) fn qkv_width(self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }

    /// Queries of one row that are attended together.
    pub(crate) fn max_queries(self) -> usize {
        (MAX_ROWS / self.group()).max(1)
    }
}

/// Some queries of a row, and some of its keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit {
    /// The first query's token.
    pub(crate) token: usize,
    pub(crate) num_queries: usize,
    /// The first query's position in its sequence.
    pub(crate) position: usize,
    pub(crate) seat: usize,
    pub(crate) keys_from: usize,
    pub(crate) keys_to: usize,
    /// Where it is one of several ranges of the same queries.
    pub(crate) part: Option<Part>,
}

/// One of several ranges of keys of one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Its place among all parts of the step.
    pub(crate) index: usize,
    /// The first of the same row.
    pub(crate) first: usize,
    pub(crate) num_parts: usize,
    /// Its row's place among the rows that are cut.
    pub(crate) cut_row: usize,
}

/// What a worker computes in.
pub(crate) struct Scratch {
    buffer: Buffer,
}

impl Scratch {
    /// For heads of these shapes.
    pub(crate) fn new(heads: impl Iterator<Item = Heads>) -> Scratch {
        let size = heads.map(|heads| Layout::of(heads).size).max().unwrap_or(0);
        Scratch {
            buffer: Buffer::zeroed(size),
        }
    }
}

/// Offsets in a worker's scratch, in numbers.
#[derive(Clone, Copy)]
struct Layout {
    queries: usize,
    sums: usize,
    scores: usize,
    keys: usize,
    values: usize,
    maxima: usize,
    totals: usize,
    keeps: usize,
    size: usize,
}

impl Layout {
    fn of(heads: Heads) -> Layout {
        let dim = heads.head_dim.next_multiple_of(16);
        let rows = (heads.max_queries() * heads.group()).next_multiple_of(ROW_STEP);
        let sums = rows * dim;
        let scores = sums + rows * dim;
        let keys = scores + rows * TILE;
        let values = keys + dim * TILE;
        let maxima = values + dim * TILE;
        let totals = maxima + rows;
        let keeps = totals + rows;
        Layout {
            queries: 0,
            sums,
            scores,
            keys,
            values,
            maxima,
            totals,
            keeps,
            size: keeps + rows,
        }
    }
}

/// One unit's work with one KV head.
pub(crate) struct Attend<'a> {
    /// Of the same instruction set.
    pub(crate) kernels: &'static Kernels,
    pub(crate) unit: Unit,
    pub(crate) heads: Heads,
    pub(crate) kv_head: usize,
    pub(crate) options: AttentionOptions,
    /// Fused rows.
    pub(crate) qkv: Rows,
    pub(crate) out: Rows,
    /// This layer's K and V, from block 0 on.
    pub(crate) keys: *const u8,
    pub(crate) values: *const u8,
    pub(crate) format: KvFormat,
    pub(crate) block_size: usize,
    /// The row's blocks.
    pub(crate) table: &'a [i32],
    /// `[num_parts · num_kv_heads]` rows of `group · (head_dim + 2)` numbers.
    pub(crate) parts: Rows,
    /// `[num cut rows · num_kv_heads]`: parts that are done.
    pub(crate) num_done: &'a [AtomicUsize],
}

/// # Safety
/// Table entries lie in the cache, tokens in the buffers; the scratch is of these heads; nobody else writes the unit's
/// queries' output with this head, and K and V are stored.
#[inline(always)]
pub(crate) unsafe fn attend<S: Simd>(a: &Attend<'_>, scratch: &mut Scratch) {
    match a.format {
        KvFormat::F32 => attend_in::<S, f32>(a, scratch),
        KvFormat::Bf16 => attend_in::<S, Bf16>(a, scratch),
    }
}

/// A unit's pieces, as pointers.
struct Work {
    num_rows: usize,
    /// As many as whole vectors have.
    row_stride: usize,
    group: usize,
    dim: usize,
    queries: *mut f32,
    sums: *mut f32,
    scores: *mut f32,
    keys: *mut f32,
    values: *mut f32,
    maxima: *mut f32,
    totals: *mut f32,
    keeps: *mut f32,
}

#[inline(always)]
unsafe fn attend_in<S: Simd, E: Element>(a: &Attend<'_>, scratch: &mut Scratch) {
    let layout = Layout::of(a.heads);
    let base = scratch.buffer.as_mut_ptr();
    let (group, dim) = (a.heads.group(), a.heads.head_dim);
    let w = Work {
        num_rows: a.unit.num_queries * group,
        row_stride: (a.unit.num_queries * group).next_multiple_of(ROW_STEP),
        group,
        dim,
        queries: base.add(layout.queries),
        sums: base.add(layout.sums),
        scores: base.add(layout.scores),
        keys: base.add(layout.keys),
        values: base.add(layout.values),
        maxima: base.add(layout.maxima),
        totals: base.add(layout.totals),
        keeps: base.add(layout.keeps),
    };
    // A chunk's queries lie dimension by dimension.
    let (row_step, dim_step) = if a.unit.num_queries == 1 {
        (dim, 1)
    } else {
        (1, w.row_stride)
    };
    for r in 0..w.num_rows {
        let from = a
            .qkv
            .at(a.unit.token + r / group)
            .add((a.kv_head * group + r % group) * dim);
        for d in 0..dim {
            *w.queries.add(r * row_step + d * dim_step) = *from.add(d) * a.options.scale;
            *w.sums.add(r * dim + d) = 0.0;
        }
    }
    for r in 0..w.row_stride {
        *w.maxima.add(r) = f32::NEG_INFINITY;
        *w.totals.add(r) = 0.0;
    }
    let last = a.unit.position + a.unit.num_queries; // one beyond what the last query sees
    let to = a.unit.keys_to.min(last);
    let from = match a.options.window {
        Some(window) => a
            .unit
            .keys_from
            .max((a.unit.position + 1).saturating_sub(window)),
        None => a.unit.keys_from,
    };
    let mut tile = Tile::at(a, from, to);
    while tile.from < to {
        let next = Tile::at(a, tile.to, to);
        if a.unit.num_queries == 1 {
            decode::tile::<S, E>(a, &w, &tile, &next);
        } else {
            chunk::tile::<S, E>(a, &w, &tile, &next);
        }
        tile = next;
    }
    finish(a, &w);
}

/// Keys that are attended together.
struct Tile {
    from: usize,
    to: usize,
    /// Where each key's head lies, in numbers from the layer's first.
    offsets: [usize; TILE],
}

impl Tile {
    /// The tile that begins with a key; there may be none before `to`.
    #[inline(always)]
    fn at(a: &Attend<'_>, from: usize, to: usize) -> Tile {
        let to = to.min((from / TILE + 1) * TILE).max(from);
        let mut tile = Tile {
            from,
            to,
            offsets: [0; TILE],
        };
        let token_stride = a.heads.num_kv_heads * a.heads.head_dim;
        let mut key = from;
        while key < to {
            let offset = key % a.block_size;
            let count = (a.block_size - offset).min(to - key);
            let slot = a.table[key / a.block_size] as usize * a.block_size + offset;
            for i in 0..count {
                tile.offsets[key - from + i] =
                    (slot + i) * token_stride + a.kv_head * a.heads.head_dim;
            }
            key += count;
        }
        tile
    }

    fn len(&self) -> usize {
        self.to - self.from
    }
}

/// Asks for K and V of a key's head.
#[inline(always)]
unsafe fn ask<S: Simd, E: Element>(a: &Attend<'_>, offset: usize) {
    for cache in [a.keys, a.values] {
        let head = cache.wrapping_add(offset * size_of::<E>());
        for line in 0..(a.heads.head_dim * size_of::<E>()).div_ceil(64) {
            S::prefetch(head.wrapping_add(line * 64));
        }
    }
}

/// Writes the result of a whole unit, or a part's; the last part of a row combines them.
#[inline(always)]
unsafe fn finish(a: &Attend<'_>, w: &Work) {
    let Some(part) = a.unit.part else {
        for r in 0..w.num_rows {
            write(a, w, r, *w.totals.add(r));
        }
        return;
    };
    let num_kv_heads = a.heads.num_kv_heads;
    let stride = w.dim + 2;
    let mine = a.parts.at(part.index * num_kv_heads + a.kv_head);
    for r in 0..w.num_rows {
        let to = mine.add(r * stride);
        to.copy_from_nonoverlapping(w.sums.add(r * w.dim), w.dim);
        *to.add(w.dim) = *w.maxima.add(r);
        *to.add(w.dim + 1) = *w.totals.add(r);
    }
    // What the others wrote is seen by whoever counts last.
    let done = &a.num_done[part.cut_row * num_kv_heads + a.kv_head];
    if done.fetch_add(1, Ordering::AcqRel) + 1 < part.num_parts {
        return;
    }
    done.store(0, Ordering::Relaxed); // for the next layer, which begins when this one is done
    let parts = part.first..part.first + part.num_parts;
    for r in 0..w.num_rows {
        let at = |index: usize| a.parts.at(index * num_kv_heads + a.kv_head).add(r * stride);
        let largest = parts
            .clone()
            .fold(f32::NEG_INFINITY, |m, index| m.max(*at(index).add(w.dim)));
        let sums = w.sums.add(r * w.dim);
        for d in 0..w.dim {
            *sums.add(d) = 0.0;
        }
        let mut total = 0.0;
        for index in parts.clone() {
            let from = at(index);
            let maximum = *from.add(w.dim);
            if maximum == f32::NEG_INFINITY {
                continue; // outside of the window
            }
            let share = (maximum - largest).exp();
            total += *from.add(w.dim + 1) * share;
            for d in 0..w.dim {
                *sums.add(d) += *from.add(d) * share;
            }
        }
        write(a, w, r, total);
    }
}

/// A row's sums over their total; zeros where nothing was seen.
#[inline(always)]
unsafe fn write(a: &Attend<'_>, w: &Work, row: usize, total: f32) {
    let head = a.kv_head * w.group + row % w.group;
    let to = a.out.at(a.unit.token + row / w.group).add(head * w.dim);
    let share = if total == 0.0 { 0.0 } else { 1.0 / total };
    for d in 0..w.dim {
        *to.add(d) = *w.sums.add(row * w.dim + d) * share;
    }
}
