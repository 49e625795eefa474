//! Several queries with a tile of keys: two products, with a softmax between.
//!
//! Rows (queries × heads) lie in lanes, so maxima and totals are vectors, and what causality or the window hides from rows
//! is a range of them. A score's dimensions are added up in the order of one query's, which has them in lanes: a chain
//! of each lane's dimensions after another, and a tree over the chains. So rows need no sums across lanes.
//!
//! A strip of rows is scored, turned into weights and summed while all it needs is in the first level of the cache, and only
//! with the keys that one of its rows sees.

use std::mem::MaybeUninit;

use super::{Ahead, Attend, Tile, Work};
use crate::kv::Stored;
use crate::simd::{MAX_LANES, Simd};
use crate::tile::{self, Product, Tiles};

/// Rows of a strip: whole vectors and whole tiles of any instruction set.
const STRIP: usize = 48;
/// Keys that are scored together, at most.
const KEYS: usize = 6;
/// Vectors of rows that are scored together, at most.
const VECTORS: usize = 3;
/// Sums that wait while a tile of scores is added up.
const WAITING: usize = (MAX_LANES.ilog2() as usize + 1) * KEYS * VECTORS * MAX_LANES;

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

/// Takes the rows' scaled queries: of each vector of rows, their numbers side by side, one dimension after another.
#[inline(always)]
pub(super) unsafe fn take_queries<S: Simd>(a: &Attend<'_>, w: &Work) {
    for first in (0..w.num_rows).step_by(S::LANES) {
        let num_rows = S::LANES.min(w.num_rows - first);
        for r in 0..num_rows {
            w.copy_query(a, first + r, w.keys.add(r * w.dim));
        }
        // Rows beyond the last are whatever was there: nobody looks at them.
        tile::pack(w.keys, w.dim, S::LANES, w.dim, w.queries.add(first * w.dim));
    }
}

/// # Safety
/// As for `tile`.
#[inline(always)]
pub(crate) unsafe fn attend_chunk<S: Simd>(c: &mut ChunkTile<'_>) {
    let (a, w) = (c.attend, c.work);
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
    let tiles = Tiles::new(strip.num_keys, KEYS);
    let num_strips = c.work.num_rows.div_ceil(STRIP);
    let num_steps = c.ahead.steps_at_each(num_strips * tiles.len());
    for index in 0..tiles.len() {
        c.ahead.ask::<S>(num_steps);
        let key = tiles.first(index);
        match tiles.first(index + 1) - key {
            1 => score_keys::<S, 1>(c, strip, key),
            2 => score_keys::<S, 2>(c, strip, key),
            3 => score_keys::<S, 3>(c, strip, key),
            4 => score_keys::<S, 4>(c, strip, key),
            5 => score_keys::<S, 5>(c, strip, key),
            _ => score_keys::<S, KEYS>(c, strip, key),
        }
    }
}

#[inline(always)]
unsafe fn score_keys<S: Simd, const K: usize>(c: &ChunkTile<'_>, strip: Strip, key: usize) {
    let num_vectors = strip.num_rows.div_ceil(S::LANES);
    let mut vector = 0;
    while vector < num_vectors {
        let left = num_vectors - vector;
        // With 16 registers, sums of two vectors of rows are as many as fit.
        if S::NUM_REGISTERS > 16 && left >= VECTORS {
            score_tile::<S, K, VECTORS>(c, strip, vector, key);
            vector += VECTORS;
        } else if left >= 2 {
            score_tile::<S, K, 2>(c, strip, vector, key);
            vector += 2;
        } else {
            score_tile::<S, K, 1>(c, strip, vector, key);
            vector += 1;
        }
    }
}

/// Scores of some vectors of rows with some keys.
#[inline(always)]
unsafe fn score_tile<S: Simd, const K: usize, const N: usize>(
    c: &ChunkTile<'_>,
    strip: Strip,
    vector: usize,
    key: usize,
) {
    let w = c.work;
    let queries = w.queries.add((strip.row + vector * S::LANES) * w.dim);
    let keys = w.keys.add(key * w.dim);
    let length = w.dim / S::LANES;
    // Sums of 1, 2, 4 chains and so on, that wait for those of as many more; at the end, of all.
    let mut waiting = [MaybeUninit::<f32>::uninit(); WAITING];
    let waiting: *mut f32 = waiting.as_mut_ptr().cast();
    for place in 0..S::LANES {
        let lane = S::SUM_ORDER[place];
        let (queries, keys) = (queries.add(lane * S::LANES), keys.add(lane));
        // A chain is short, so the usual length is written out.
        let mut sums = if length == 8 {
            chain::<S, K, N>(queries, keys, w.dim, 8)
        } else {
            chain::<S, K, N>(queries, keys, w.dim, length)
        };
        let mut level = 0;
        while (place >> level) & 1 == 1 {
            for k in 0..K {
                for n in 0..N {
                    sums[k][n] = S::add(
                        S::load(waiting.add(((level * K + k) * N + n) * S::LANES)),
                        sums[k][n],
                    );
                }
            }
            level += 1;
        }
        for k in 0..K {
            for n in 0..N {
                S::store(
                    waiting.add(((level * K + k) * N + n) * S::LANES),
                    sums[k][n],
                );
            }
        }
    }
    let all = S::LANES.ilog2() as usize;
    for k in 0..K {
        let to = w.scores.add((key + k) * STRIP + vector * S::LANES);
        for n in 0..N {
            let mut sum = S::load(waiting.add(((all * K + k) * N + n) * S::LANES));
            for d in length * S::LANES..w.dim {
                let q = S::load(queries.add((n * w.dim + d) * S::LANES));
                sum = S::add(sum, S::mul(q, S::splat(*keys.add(k * w.dim + d))));
            }
            if c.is_scaled {
                sum = S::mul(sum, S::splat(*w.key_scales.add(key + k)));
            }
            S::store(to.add(n * S::LANES), sum);
        }
    }
}

/// Products over the dimensions that lie in one lane, added up from first to last.
#[inline(always)]
unsafe fn chain<S: Simd, const K: usize, const N: usize>(
    queries: *const f32,
    keys: *const f32,
    dim: usize,
    length: usize,
) -> [[S::V; N]; K] {
    let mut sums = [[S::splat(0.0); N]; K];
    for i in 0..length {
        let mut q = [S::splat(0.0); N];
        for n in 0..N {
            q[n] = S::load(queries.add((n * dim + i * S::LANES) * S::LANES));
        }
        for k in 0..K {
            let x = S::splat(*keys.add(k * dim + i * S::LANES));
            for n in 0..N {
                sums[k][n] = S::fma(x, q[n], sums[k][n]);
            }
        }
    }
    sums
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
