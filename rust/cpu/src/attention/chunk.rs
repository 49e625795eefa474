//! Several queries with a tile of keys: two products, with a softmax between.
//!
//! Scores lie key by key, with the rows (queries × heads) side by side: so maxima and totals of rows are vectors, and what
//! causality or the window hides from rows is a range of them. A score is summed as one query's is: dimensions in lanes.
//!
//! A strip of rows is scored, turned into weights and summed while all it needs is in the first level of the cache, and only
//! with the keys that one of its rows sees.

use super::{Ahead, Attend, Tile, Work, scored_at_once};
use crate::kv::Stored;
use crate::simd::{MAX_LANES, Simd};
use crate::tile::{self, Product};

/// Rows of a strip: whole vectors and whole tiles of any instruction set.
const STRIP: usize = 48;
/// Rows that are scored together.
const ROWS: usize = 4;

/// A tile of keys that are expanded: what remains is the same for any format of the cache.
pub(crate) struct ChunkTile<'t> {
    attend: &'t Attend<'t>,
    work: &'t Work,
    tile: &'t Tile,
    ahead: &'t mut Ahead,
    /// Whether K and V have scales.
    is_scaled: bool,
}

/// Some rows, with the keys of a tile that one of them sees.
#[derive(Clone, Copy)]
struct Strip {
    row: usize,
    num_rows: usize,
    num_keys: usize,
}

impl Strip {
    /// Where a row lies in it, or would.
    fn place(self, row: usize) -> usize {
        row.saturating_sub(self.row).min(self.num_rows)
    }
}

/// # Safety
/// As for `attend`; the unit has several queries.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, E: Stored>(
    a: &Attend<'_>,
    w: &Work,
    tile: &Tile,
    ahead: &mut Ahead,
) {
    let keys: *const E = w.first(a.keys, a.format);
    let values: *const E = w.first(a.values, a.format);
    gather::<S, E>(keys, w.keys, w.key_scales, w.dim, tile);
    gather::<S, E>(values, w.values, w.scales, w.dim, tile);
    (a.kernels.attend_chunk)(&mut ChunkTile {
        attend: a,
        work: w,
        tile,
        ahead,
        is_scaled: E::SCALE_BYTES > 0,
    });
}

/// # Safety
/// As for `tile`.
#[inline(always)]
pub(crate) unsafe fn attend_chunk<S: Simd>(c: &mut ChunkTile<'_>) {
    let (a, w) = (c.attend, c.work);
    c.ahead.spread_over(w.num_rows);
    for row in (0..w.num_rows).step_by(STRIP) {
        let num_rows = STRIP.min(w.num_rows - row);
        let last = a.unit.position + (row + num_rows - 1) / w.group;
        let strip = Strip {
            row,
            num_rows,
            num_keys: c.tile.to.min(last + 1).saturating_sub(c.tile.from),
        };
        if strip.num_keys == 0 {
            continue;
        }
        score::<S>(c, strip);
        softmax::<S>(c, strip);
        if c.is_scaled {
            scale_weights::<S>(w, strip);
        }
        let sums = Product {
            x: w.scores.cast_const(),
            x_stride: STRIP,
            w: w.values.cast_const(),
            w_stride: w.dim,
            num_in: strip.num_keys,
            out: w.sums.of(row, w.dim),
            out_stride: w.dim,
        };
        tile::block::<S>(&sums, num_rows, w.dim);
    }
}

/// The heads of a tile's keys, or values, one after another, and their scales.
#[inline(always)]
unsafe fn gather<S: Simd, E: Stored>(
    from: *const E,
    to: *mut f32,
    scales: *mut f32,
    dim: usize,
    tile: &Tile,
) {
    let num_whole = dim / S::LANES * S::LANES;
    for i in 0..tile.len() {
        let (head, to) = (from.byte_add(tile.offsets[i]), to.add(i * dim));
        *scales.add(i) = E::scale(head);
        for d in (0..num_whole).step_by(S::LANES) {
            S::store(to.add(d), E::load::<S>(head.add(d)));
        }
        for d in num_whole..dim {
            *to.add(d) = (*head.add(d)).get();
        }
    }
}

/// All scores of a strip, key by key with the rows side by side.
#[inline(always)]
unsafe fn score<S: Simd>(c: &mut ChunkTile<'_>, strip: Strip) {
    for row in (0..strip.num_rows).step_by(ROWS) {
        c.ahead.ask::<S>(ROWS);
        let mut key = 0;
        while key < strip.num_keys {
            let count = scored_at_once(strip.num_keys - key);
            match count {
                1 => score_keys::<S, 1>(c, strip, row, key),
                2 => score_keys::<S, 2>(c, strip, row, key),
                _ => score_keys::<S, 3>(c, strip, row, key),
            }
            key += count;
        }
    }
}

/// Scores of four rows with some keys.
#[inline(always)]
unsafe fn score_keys<S: Simd, const K: usize>(
    c: &ChunkTile<'_>,
    strip: Strip,
    row: usize,
    key: usize,
) {
    let w = c.work;
    let queries = w.queries.add((strip.row + row) * w.dim);
    let keys = w.keys.add(key * w.dim);
    let mut sums = [[S::splat(0.0); ROWS]; K];
    let num_whole = w.dim / S::LANES * S::LANES;
    for d in (0..num_whole).step_by(S::LANES) {
        let mut k = [S::splat(0.0); K];
        for j in 0..K {
            k[j] = S::load(keys.add(j * w.dim + d));
        }
        for r in 0..ROWS {
            let q = S::load(queries.add(r * w.dim + d));
            for j in 0..K {
                sums[j][r] = S::fma(q, k[j], sums[j][r]);
            }
        }
    }
    for j in 0..K {
        // In memory: numbers of one vector are not to be taken apart where nothing is done with each.
        let to = w.scores.add((key + j) * STRIP + row);
        to.cast::<[f32; ROWS]>().write_unaligned(S::sums(sums[j]));
        for d in num_whole..w.dim {
            let k = *keys.add(j * w.dim + d);
            for r in 0..ROWS {
                *to.add(r) += *queries.add(r * w.dim + d) * k;
            }
        }
        if c.is_scaled {
            for r in 0..ROWS {
                *to.add(r) *= *w.key_scales.add(key + j);
            }
        }
    }
}

/// Multiplies weights by the scales of the tile's V, whose numbers are then taken as they are.
#[inline(always)]
unsafe fn scale_weights<S: Simd>(w: &Work, strip: Strip) {
    for i in 0..strip.num_keys {
        let scale = S::splat(*w.scales.add(i));
        for column in (0..strip.num_rows).step_by(S::LANES) {
            let weights = w.scores.add(i * STRIP + column);
            S::store(weights, S::mul(S::load(weights), scale));
        }
    }
}

/// Turns scores into weights, and rescales what was summed.
#[inline(always)]
unsafe fn softmax<S: Simd>(c: &ChunkTile<'_>, strip: Strip) {
    let (a, w, n) = (c.attend, c.work, strip.num_keys);
    hide(c, strip, f32::NEG_INFINITY);
    let (maxima, keeps) = (w.sums.maxima.add(strip.row), w.keeps.add(strip.row));
    for column in (0..strip.num_rows).step_by(S::LANES) {
        let scores = w.scores.add(column);
        if let Some(cap) = a.options.softcap {
            let cap = S::splat(cap);
            for i in 0..n {
                let score = scores.add(i * STRIP);
                S::store(score, S::mul(S::tanh(S::div(S::load(score), cap)), cap));
            }
        }
        let old = S::load(maxima.add(column));
        let mut new = old;
        for i in 0..n {
            new = S::max(new, S::load(scores.add(i * STRIP)));
        }
        for i in 0..n {
            let score = scores.add(i * STRIP);
            S::store(score, S::exp(S::sub(S::load(score), new)));
        }
        S::store(maxima.add(column), new);
        // Where nothing was seen before, sums and total are 0, whatever they are multiplied by.
        S::store(keeps.add(column), S::exp(S::sub(old, new)));
    }
    hide(c, strip, 0.0);
    for column in (0..strip.num_rows).step_by(S::LANES) {
        let total = w.sums.totals.add(strip.row + column);
        let sum = sum_of_keys::<S>(c, strip, column);
        let keep = S::load(keeps.add(column));
        S::store(total, S::fma(S::load(total), keep, sum));
    }
    for r in 0..strip.num_rows {
        w.sums.keep(strip.row + r, w.dim, *keeps.add(r));
    }
}

/// Some rows' weights added up, in the order of one query's, whose keys lie in lanes: each lane's by itself, then halves.
#[inline(always)]
unsafe fn sum_of_keys<S: Simd>(c: &ChunkTile<'_>, strip: Strip, column: usize) -> S::V {
    let mut lanes = [S::splat(0.0); MAX_LANES];
    let skip = c.tile.place::<S>();
    for lane in 0..S::LANES {
        let first = (lane + S::LANES - skip) % S::LANES;
        for i in (first..strip.num_keys).step_by(S::LANES) {
            let weight = S::load(c.work.scores.add(i * STRIP + column));
            lanes[lane] = S::add(lanes[lane], weight);
        }
    }
    let mut half = S::LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = S::add(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Overwrites the scores of keys that rows of a strip do not see.
#[inline(always)]
unsafe fn hide(c: &ChunkTile<'_>, strip: Strip, with: f32) {
    let (unit, group, window) = (&c.attend.unit, c.work.group, c.attend.options.window);
    for i in 0..strip.num_keys {
        let key = c.tile.from + i;
        let scores = c.work.scores.add(i * STRIP);
        // Queries before the key, and those whose window begins behind it.
        let before = key.saturating_sub(unit.position) * group;
        let behind = match window {
            Some(window) => (key + window).saturating_sub(unit.position) * group,
            None => c.work.num_rows,
        };
        for r in (0..strip.place(before)).chain(strip.place(behind)..strip.num_rows) {
            *scores.add(r) = with;
        }
    }
}
