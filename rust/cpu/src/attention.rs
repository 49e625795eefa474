//! Attention over the paged cache, straight from the block tables: nothing is gathered for a step, nothing is padded.
//!
//! The unit of work is some queries of one row, with one KV head and a range of the row's keys. All query heads of a
//! KV head are attended together, so each key is read once for all of them. Keys go by in tiles of 64 with a running
//! softmax; tiles end at multiples of 64 and ranges at multiples of 512, wherever the query is. Both kernels add up in one
//! order, `decode` with one query and `chunk` with several, so what a query gets depends on its keys alone: the same bits
//! in any chunk, beside any others.
//!
//! A long row that decodes is cut in ranges of keys: the last worker to finish one of them combines them, in order.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "kernels: their one contract is that the step was checked against the sizes of cache and buffers"
)]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::kernels::Kernels;
use crate::kv::{KvFormat, Stored};
use crate::memory::{Buffer, Rows};
use crate::simd::{Bf16, F16, Simd};

mod chunk;
mod decode;

pub(crate) use chunk::{ChunkTile, attend_chunk};

/// Keys of a tile.
pub(crate) const TILE: usize = 64;
/// Query heads × queries that are attended together, at most, unless one query has more heads.
const MAX_ROWS: usize = 192;
/// Rows of a strip of a chunk, which there is room for wholly: they fill vectors and tiles of any instruction set.
const STRIP: usize = 48;
/// Keys of a range, which is summed by itself: a row that decodes with more is shared among workers.
pub(crate) const RANGE: usize = 512;
/// The largest score of no keys: finite, so that its distance to itself is a number.
const NOTHING_SEEN: f32 = f32::MIN;

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

/// Some queries of a row, some of its keys, and some of its heads.
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
    /// The first of its KV heads, and how many; one where there are several queries.
    pub(crate) kv_head: usize,
    pub(crate) num_kv_heads: usize,
    /// Where it is one of several ranges of the same queries.
    pub(crate) part: Option<Part>,
}

impl Unit {
    /// The keys that any of its queries sees; there may be none.
    fn keys(&self, options: AttentionOptions) -> Range<usize> {
        let last = self.position + self.num_queries; // one beyond what the last query sees
        let from = match options.window {
            Some(window) => self
                .keys_from
                .max((self.position + 1).saturating_sub(window)),
            None => self.keys_from,
        };
        from..self.keys_to.min(last)
    }
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

/// How many rows, or keys, are scored next of so many: threes, but four as two and two, so that one of them does not wait
/// for its own sums.
#[inline(always)]
fn scored_at_once(rest: usize) -> usize {
    match rest {
        0..=3 => rest,
        4 => 2,
        _ => 3,
    }
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
    /// Rows that there is room for.
    rows: usize,
    queries: usize,
    sums: usize,
    whole: usize,
    scores: usize,
    keys: usize,
    values: usize,
    scales: usize,
    key_scales: usize,
    keeps: usize,
    size: usize,
}

impl Layout {
    fn of(heads: Heads) -> Layout {
        let dim = heads.head_dim.next_multiple_of(16);
        let rows = (heads.max_queries() * heads.group())
            .max(heads.num_heads)
            .next_multiple_of(STRIP);
        let sums = rows * dim;
        let whole = sums + rows * (dim + 2);
        let scores = whole + rows * (dim + 2);
        // There are more rows than MAX_ROWS / 2, so a strip of a chunk has room for its scores too.
        let keys = scores + rows * TILE;
        let values = keys + dim * TILE;
        let scales = values + dim * TILE;
        let key_scales = scales + TILE;
        let keeps = key_scales + TILE;
        Layout {
            rows,
            queries: 0,
            sums,
            whole,
            scores,
            keys,
            values,
            scales,
            key_scales,
            keeps,
            size: keeps + rows,
        }
    }
}

/// One unit's work.
pub(crate) struct Attend<'a> {
    /// Of the same instruction set.
    pub(crate) kernels: &'static Kernels,
    pub(crate) unit: Unit,
    /// The row's blocks.
    pub(crate) table: &'a [i32],
    /// The unit that this worker does next, and its row's blocks.
    pub(crate) next: Option<(Unit, &'a [i32])>,
    pub(crate) heads: Heads,
    pub(crate) options: AttentionOptions,
    /// Fused rows.
    pub(crate) qkv: Rows,
    pub(crate) out: Rows,
    /// This layer's K and V, from block 0 on.
    pub(crate) keys: *const u8,
    pub(crate) values: *const u8,
    pub(crate) format: KvFormat,
    pub(crate) block_size: usize,
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
        KvFormat::F16 => attend_in::<S, F16>(a, scratch),
        KvFormat::Int8 => attend_in::<S, i8>(a, scratch),
    }
}

/// The pieces of one KV head's work, as pointers.
struct Work {
    kv_head: usize,
    num_rows: usize,
    group: usize,
    dim: usize,
    queries: *mut f32,
    /// Of the range.
    sums: Sums,
    /// Of the ranges before, where the unit has several.
    whole: Sums,
    scores: *mut f32,
    keys: *mut f32,
    values: *mut f32,
    /// Of the tile's V.
    scales: *mut f32,
    /// Of its K.
    key_scales: *mut f32,
    keeps: *mut f32,
}

/// What rows have summed up so far.
#[derive(Clone, Copy)]
struct Sums {
    /// `[rows, dim]`: V, weighted.
    weighted: *mut f32,
    /// `[rows]`: the largest score.
    maxima: *mut f32,
    /// `[rows]`: of weights, the largest being 1.
    totals: *mut f32,
}

impl Sums {
    /// Rows from `first` on, of all that lie at a place.
    unsafe fn at(place: *mut f32, num_rows: usize, dim: usize, first: usize) -> Sums {
        let maxima = place.add(num_rows * dim);
        Sums {
            weighted: place.add(first * dim),
            maxima: maxima.add(first),
            totals: maxima.add(num_rows + first),
        }
    }

    unsafe fn of(&self, row: usize, dim: usize) -> *mut f32 {
        self.weighted.add(row * dim)
    }

    #[inline(always)]
    unsafe fn clear(&self, num_rows: usize, dim: usize) {
        for i in 0..num_rows * dim {
            *self.weighted.add(i) = 0.0;
        }
        for r in 0..num_rows {
            *self.maxima.add(r) = NOTHING_SEEN;
            *self.totals.add(r) = 0.0;
        }
    }

    /// Keeps a share of a row's weighted sums, for its largest score has grown.
    #[inline(always)]
    unsafe fn keep(&self, row: usize, dim: usize, share: f32) {
        if share < 1.0 {
            let weighted = self.of(row, dim);
            for d in 0..dim {
                *weighted.add(d) *= share;
            }
        }
    }

    /// Adds a range's sums of one row: its weighted V, its largest score, its total.
    #[inline(always)]
    unsafe fn add_range<S: Simd>(
        &self,
        row: usize,
        dim: usize,
        (weighted, maximum, total): (*const f32, f32, f32),
    ) {
        if maximum == NOTHING_SEEN {
            return; // outside of the window
        }
        let old = *self.maxima.add(row);
        let new = old.max(maximum);
        let share_of = |of: f32| S::largest(S::exp(S::splat(of - new)));
        let (keep, share) = (share_of(old), share_of(maximum));
        let (sums, sum) = (self.of(row, dim), self.totals.add(row));
        for d in 0..dim {
            *sums.add(d) = *sums.add(d) * keep + *weighted.add(d) * share;
        }
        *sum = *sum * keep + total * share;
        *self.maxima.add(row) = new;
    }
}

impl Work {
    /// Of the unit's KV head with this index; rows of each have their place in the scratch.
    #[inline(always)]
    unsafe fn of(a: &Attend<'_>, scratch: *mut f32, index: usize) -> Work {
        let layout = Layout::of(a.heads);
        let (group, dim) = (a.heads.group(), a.heads.head_dim);
        let num_rows = a.unit.num_queries * group;
        let first = index * num_rows;
        Work {
            kv_head: a.unit.kv_head + index,
            num_rows,
            group,
            dim,
            queries: scratch.add(layout.queries + first * dim),
            sums: Sums::at(scratch.add(layout.sums), layout.rows, dim, first),
            whole: Sums::at(scratch.add(layout.whole), layout.rows, dim, first),
            scores: scratch.add(layout.scores),
            keys: scratch.add(layout.keys),
            values: scratch.add(layout.values),
            scales: scratch.add(layout.scales),
            key_scales: scratch.add(layout.key_scales),
            keeps: scratch.add(layout.keeps + first),
        }
    }

    /// Its head's numbers in the first token of K or V.
    unsafe fn first<E: Stored>(&self, layer: *const u8, format: KvFormat) -> *const E {
        let head = self.kv_head * format.head_bytes(self.dim);
        layer.add(head + E::SCALE_BYTES).cast()
    }

    /// A row's query.
    #[inline(always)]
    unsafe fn query(&self, a: &Attend<'_>, row: usize) -> *const f32 {
        let head = self.kv_head * self.group + row % self.group;
        let token = a.unit.token + row / self.group;
        a.qkv.at(token).add(head * self.dim)
    }

    /// Takes the queries, scaled; nothing is summed yet.
    #[inline(always)]
    unsafe fn begin<S: Simd>(&self, a: &Attend<'_>) {
        if a.unit.num_queries > 1 && chunk::lays_rows_in_lanes::<S>() {
            chunk::lay_queries(a, self);
        } else {
            for r in 0..self.num_rows {
                let (from, to) = (self.query(a, r), self.queries.add(r * self.dim));
                for d in 0..self.dim {
                    *to.add(d) = *from.add(d) * a.options.scale;
                }
            }
        }
        self.sums.clear(self.num_rows, self.dim);
        if a.unit.part.is_some() || a.unit.keys_to > RANGE {
            self.whole.clear(self.num_rows, self.dim);
        }
    }

    /// Takes the range's sums to those of the ranges before.
    #[inline(always)]
    unsafe fn end_range<S: Simd>(&self) {
        for r in 0..self.num_rows {
            let (maximum, total) = (*self.sums.maxima.add(r), *self.sums.totals.add(r));
            let range = (self.sums.of(r, self.dim).cast_const(), maximum, total);
            self.whole.add_range::<S>(r, self.dim, range);
        }
        self.sums.clear(self.num_rows, self.dim);
    }
}

#[inline(always)]
unsafe fn attend_in<S: Simd, E: Stored>(a: &Attend<'_>, scratch: &mut Scratch) {
    let scratch = scratch.buffer.as_mut_ptr();
    for index in 0..a.unit.num_kv_heads {
        Work::of(a, scratch, index).begin::<S>(a);
    }
    let keys = a.unit.keys(a.options);
    let sums_ranges = a.unit.part.is_none() && keys.end > RANGE;
    let mut tile = Tile::at(a, a.table, keys.clone());
    while tile.len() > 0 {
        let next = Tile::at(a, a.table, tile.to..keys.end);
        let mut ahead = Ahead::new(a, &tile, &keys);
        for index in 0..a.unit.num_kv_heads {
            let w = Work::of(a, scratch, index);
            if a.unit.num_queries == 1 {
                decode::tile::<S, E>(a, &w, &tile, &mut ahead);
            } else {
                chunk::tile::<S, E>(a, &w, &tile, &mut ahead);
            }
        }
        if sums_ranges && (next.len() == 0 || next.from.is_multiple_of(RANGE)) {
            for index in 0..a.unit.num_kv_heads {
                Work::of(a, scratch, index).end_range::<S>();
            }
        }
        tile = next;
    }
    for index in 0..a.unit.num_kv_heads {
        let w = Work::of(a, scratch, index);
        match a.unit.part {
            Some(part) => finish_part::<S>(a, &w, part),
            None if sums_ranges => write(a, &w, &w.whole),
            None => write(a, &w, &w.sums),
        }
    }
}

/// Keys that are attended together.
#[derive(Clone, Copy)]
struct Tile {
    from: usize,
    to: usize,
    /// Where each key's token lies, in bytes from the layer's first.
    offsets: [usize; TILE],
}

impl Tile {
    /// The first tile of some keys, which may be none.
    #[inline(always)]
    fn at(a: &Attend<'_>, table: &[i32], keys: Range<usize>) -> Tile {
        let (from, to) = (keys.start, keys.end);
        let to = to.min((from / TILE + 1) * TILE).max(from);
        let mut tile = Tile {
            from,
            to,
            offsets: [0; TILE],
        };
        write_offsets(a, table, from..to, &mut tile.offsets);
        tile
    }

    fn len(&self) -> usize {
        self.to - self.from
    }

    /// Its first key's place where keys lie in lanes: any key has one lane, whatever the window hides before it.
    fn place<S: Simd>(&self) -> usize {
        self.from % S::LANES
    }
}

/// Writes where each key's token lies, in bytes from the layer's first; returns how many keys there are.
#[inline(always)]
fn write_offsets(a: &Attend<'_>, table: &[i32], keys: Range<usize>, to: &mut [usize]) -> usize {
    let token_bytes = a.heads.num_kv_heads * a.format.head_bytes(a.heads.head_dim);
    let mut key = keys.start;
    while key < keys.end {
        let offset = key % a.block_size;
        let count = (a.block_size - offset).min(keys.end - key);
        let slot = table[key / a.block_size] as usize * a.block_size + offset;
        for i in 0..count {
            to[key - keys.start + i] = (slot + i) * token_bytes;
        }
        key += count;
    }
    keys.len()
}

/// What is asked of memory while a tile is computed: as many keys, with their V, [`TILE`] keys on, of the unit or of the next
/// one. Whole tokens in order, evenly, and from several places side by side: memory answers several streams faster than one,
/// and what is asked for faster than it answers is lost.
struct Ahead {
    /// Where each key's token lies, in bytes from the layer's first.
    offsets: [usize; TILE],
    keys: *const u8,
    values: *const u8,
    /// Lines of a token, in K or in V.
    num_lines: usize,
    /// Keys of the first half, and, with the last one again where it is short, of the second.
    half: usize,
    last: usize,
    /// Of the first half, and the line of it, that is asked for next.
    key: usize,
    line: usize,
    /// Times that all steps are spread over.
    num_times: usize,
    /// Steps that are due, in shares of so many times.
    due: usize,
}

impl Ahead {
    /// For a tile of these keys of a unit.
    #[inline(always)]
    fn new(a: &Attend<'_>, tile: &Tile, keys: &Range<usize>) -> Ahead {
        let head_bytes = a.format.head_bytes(a.heads.head_dim);
        let mut ahead = Ahead {
            offsets: [0; TILE],
            keys: a.keys,
            values: a.values,
            num_lines: (a.unit.num_kv_heads * head_bytes).div_ceil(64),
            half: 0,
            last: 0,
            key: 0,
            line: 0,
            num_times: 1,
            due: 0,
        };
        let (from, to) = (tile.from + TILE, tile.to + TILE);
        let ours = from.min(keys.end)..to.min(keys.end);
        let mut num_keys = write_offsets(a, a.table, ours, &mut ahead.offsets);
        let mut first = [a.unit.kv_head; 2];
        let num_ours = num_keys;
        if let Some((unit, table)) = a.next
            && to > keys.end
        {
            let theirs = unit.keys(a.options);
            // A unit asks for these from its last TILE keys on: what the tiles before have asked for is left out.
            let skip = if tile.from == keys.start {
                0
            } else {
                from.saturating_sub(keys.end)
            };
            let to = theirs.end.min(theirs.start + to - keys.end);
            let theirs = (theirs.start + skip).min(to)..to;
            num_keys += write_offsets(a, table, theirs, &mut ahead.offsets[num_ours..]);
            first[1] = unit.kv_head;
        }
        for i in 0..num_keys {
            ahead.offsets[i] += first[usize::from(i >= num_ours)] * head_bytes;
        }
        ahead.half = num_keys.div_ceil(2);
        ahead.last = num_keys.saturating_sub(1);
        ahead
    }

    /// How many times it will be asked, all in all.
    fn spread_over(&mut self, num_times: usize) {
        self.num_times = num_times.max(1);
    }

    /// Asks for what is due at so many times: in each step a line of K, and of V, in either half.
    #[inline(always)]
    unsafe fn ask<S: Simd>(&mut self, num_times: usize) {
        self.due += num_times * self.half * self.num_lines;
        while self.due >= self.num_times {
            self.due -= self.num_times;
            if self.key >= self.half {
                return;
            }
            let line = self.line * 64;
            for key in [self.key, (self.key + self.half).min(self.last)] {
                let at = self.offsets[key] + line;
                S::prefetch_near(self.keys.wrapping_add(at));
                S::prefetch_near(self.values.wrapping_add(at));
            }
            self.line += 1;
            if self.line == self.num_lines {
                (self.key, self.line) = (self.key + 1, 0);
            }
        }
    }
}

/// Leaves a part's sums where the last part of a row combines them.
#[inline(always)]
unsafe fn finish_part<S: Simd>(a: &Attend<'_>, w: &Work, part: Part) {
    let num_kv_heads = a.heads.num_kv_heads;
    let stride = w.dim + 2;
    let mine = a.parts.at(part.index * num_kv_heads + w.kv_head);
    for r in 0..w.num_rows {
        let to = mine.add(r * stride);
        to.copy_from_nonoverlapping(w.sums.of(r, w.dim), w.dim);
        *to.add(w.dim) = *w.sums.maxima.add(r);
        *to.add(w.dim + 1) = *w.sums.totals.add(r);
    }
    // What the others wrote is seen by whoever counts last.
    let done = &a.num_done[part.cut_row * num_kv_heads + w.kv_head];
    if done.fetch_add(1, Ordering::AcqRel) + 1 < part.num_parts {
        return;
    }
    done.store(0, Ordering::Relaxed); // for the next layer, which begins when this one is done
    for index in part.first..part.first + part.num_parts {
        let theirs = a.parts.at(index * num_kv_heads + w.kv_head).cast_const();
        for r in 0..w.num_rows {
            let from = theirs.add(r * stride);
            let range = (from, *from.add(w.dim), *from.add(w.dim + 1));
            w.whole.add_range::<S>(r, w.dim, range);
        }
    }
    write(a, w, &w.whole);
}

/// Writes rows' sums over their totals; zeros where nothing was seen.
#[inline(always)]
unsafe fn write(a: &Attend<'_>, w: &Work, sums: &Sums) {
    for r in 0..w.num_rows {
        let head = w.kv_head * w.group + r % w.group;
        let to = a.out.at(a.unit.token + r / w.group).add(head * w.dim);
        let total = *sums.totals.add(r);
        let share = if total == 0.0 { 0.0 } else { 1.0 / total };
        let weighted = sums.of(r, w.dim);
        for d in 0..w.dim {
            *to.add(d) = *weighted.add(d) * share;
        }
    }
}
