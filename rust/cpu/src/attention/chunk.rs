//! Several queries with a tile of keys: two products, with a softmax between.
//!
//! Scores lie key by key, with the rows (queries × heads) side by side: so maxima and totals of rows are vectors, and what
//! causality or the window hides from rows is a range of them. A score is summed as one query's is: dimensions in lanes.
//!
//! A strip of rows is scored, turned into weights and summed while all it needs is in the first level of the cache, and only
//! with the keys that one of its rows sees.

use super::{Ahead, Attend, STRIP, TILE, Tile, Work, scored_at_once};
use crate::kv::Stored;
use crate::simd::{MAX_LANES, Simd, no_load_moves_up};
use crate::tile::{self, Product};

/// Rows that are scored together.
const ROWS: usize = 4;
/// Lanes of a quarter of a vector.
const QUARTER: usize = 4;

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
    c.ahead.spread_over(w.num_rows * TILE);
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
        if lays_rows_in_lanes::<S>() {
            score_lanes::<S>(c, strip);
        } else {
            score::<S>(c, strip);
        }
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

/// Whether queries lie dimension by dimension, with a strip's rows side by side: then no score is a sum over lanes, for which
/// sixteen registers would hold too little.
#[inline(always)]
pub(super) fn lays_rows_in_lanes<S: Simd>() -> bool {
    S::NUM_REGISTERS > 16
}

/// Lays the queries of a unit so, scaled.
#[inline(always)]
pub(super) unsafe fn lay_queries(a: &Attend<'_>, w: &Work) {
    let num_whole = w.dim / ROWS * ROWS;
    for row in (0..w.num_rows).step_by(ROWS) {
        let strip = w.queries.add(row / STRIP * STRIP * w.dim + row % STRIP);
        let mut from = [w.query(a, row); ROWS];
        for r in 1..ROWS.min(w.num_rows - row) {
            from[r] = w.query(a, row + r);
        }
        // Squares, which vectors turn.
        for d in (0..num_whole).step_by(ROWS) {
            let mut square = [[0.0f32; ROWS]; ROWS];
            for r in 0..ROWS {
                square[r] = from[r].add(d).cast::<[f32; ROWS]>().read_unaligned();
            }
            let mut turned = [[0.0f32; ROWS]; ROWS];
            for place in 0..ROWS {
                for r in 0..ROWS {
                    turned[place][r] = square[r][place] * a.options.scale;
                }
            }
            for place in 0..ROWS {
                let to = strip.add((d + place) * STRIP);
                to.cast::<[f32; ROWS]>().write_unaligned(turned[place]);
            }
        }
        for d in num_whole..w.dim {
            for r in 0..ROWS {
                *strip.add(d * STRIP + r) = *from[r].add(d) * a.options.scale;
            }
        }
    }
}

/// All scores of a strip whose rows lie in lanes.
#[inline(always)]
unsafe fn score_lanes<S: Simd>(c: &mut ChunkTile<'_>, strip: Strip) {
    for key in (0..strip.num_keys).step_by(2) {
        let is_pair = key + 1 < strip.num_keys;
        c.ahead.ask::<S>(2 * strip.num_rows);
        match (strip.num_rows.div_ceil(S::LANES), is_pair) {
            (1, true) => score_lanes_of::<S, 1, 2>(c, strip, key),
            (2, true) => score_lanes_of::<S, 2, 2>(c, strip, key),
            (_, true) => score_lanes_of::<S, 3, 2>(c, strip, key),
            (1, false) => score_lanes_of::<S, 1, 1>(c, strip, key),
            (2, false) => score_lanes_of::<S, 2, 1>(c, strip, key),
            (_, false) => score_lanes_of::<S, 3, 1>(c, strip, key),
        }
    }
}

/// Scores of `N` vectors of rows with some keys. They add up as [`Simd::sums`] does: what it has in one lane is summed by
/// itself, then come a quarter's lanes, then the quarters.
#[inline(always)]
unsafe fn score_lanes_of<S: Simd, const N: usize, const K: usize>(
    c: &ChunkTile<'_>,
    strip: Strip,
    key: usize,
) {
    let w = c.work;
    let queries = w.queries.add(strip.row * w.dim).cast_const();
    let keys = w.keys.add(key * w.dim).cast_const();
    let num_whole = w.dim / S::LANES * S::LANES;
    let mut quarters = [[[S::splat(0.0); N]; K]; QUARTER];
    for quarter in 0..QUARTER {
        let lane = quarter * QUARTER;
        let even = sum_of_two::<S, N, K>((queries, keys), w.dim, (lane, num_whole));
        let odd = sum_of_two::<S, N, K>((queries, keys), w.dim, (lane + 1, num_whole));
        for k in 0..K {
            for n in 0..N {
                quarters[quarter][k][n] = S::add(even[k][n], odd[k][n]);
            }
        }
    }
    for k in 0..K {
        let scale = S::splat(if c.is_scaled {
            *w.key_scales.add(key + k)
        } else {
            1.0
        });
        for n in 0..N {
            let mut score = S::add(
                S::add(quarters[0][k][n], quarters[2][k][n]),
                S::add(quarters[1][k][n], quarters[3][k][n]),
            );
            for d in num_whole..w.dim {
                let q = S::load(queries.add(d * STRIP + n * S::LANES));
                let product = S::mul(q, S::splat(*keys.add(k * w.dim + d)));
                score = S::add(score, product);
            }
            let to = w.scores.add((key + k) * STRIP + n * S::LANES);
            S::store(to, S::mul(score, scale));
        }
    }
}

/// Sums of a lane's products, and of the next but one's, added up.
#[inline(always)]
unsafe fn sum_of_two<S: Simd, const N: usize, const K: usize>(
    (queries, keys): (*const f32, *const f32),
    dim: usize,
    (lane, num_whole): (usize, usize),
) -> [[S::V; N]; K] {
    let mut sums = [[[S::splat(0.0); N]; K]; 2];
    for d in (lane..num_whole).step_by(S::LANES) {
        for place in 0..2 {
            let d = d + 2 * place;
            let mut q = [S::splat(0.0); N];
            for n in 0..N {
                q[n] = S::load(queries.add(d * STRIP + n * S::LANES));
            }
            for k in 0..K {
                let key = S::splat(*keys.add(k * dim + d));
                for n in 0..N {
                    sums[place][k][n] = S::fma(q[n], key, sums[place][k][n]);
                }
            }
        }
        no_load_moves_up();
    }
    let mut sum = sums[0];
    for k in 0..K {
        for n in 0..N {
            sum[k][n] = S::add(sums[0][k][n], sums[1][k][n]);
        }
    }
    sum
}

/// All scores of a strip, key by key with the rows side by side.
#[inline(always)]
unsafe fn score<S: Simd>(c: &mut ChunkTile<'_>, strip: Strip) {
    for row in (0..strip.num_rows).step_by(ROWS) {
        c.ahead.ask::<S>(ROWS * TILE);
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
        // Side by side: one would wait for itself.
        let mut largest = [old; 4];
        for first in (0..n).step_by(4) {
            for j in 0..4 {
                let score = S::load(scores.add((first + j).min(n - 1) * STRIP));
                largest[j] = S::max(largest[j], score);
            }
        }
        let [a, b, c, d] = largest;
        let new = S::max(S::max(a, b), S::max(c, d));
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
    let first = unit.position + strip.row / group;
    let last = unit.position + (strip.row + strip.num_rows - 1) / group;
    let all_see = c.tile.from + strip.num_keys <= first + 1
        && window.is_none_or(|window| c.tile.from + window > last);
    if all_see {
        return;
    }
    for i in 0..strip.num_keys {
        let key = c.tile.from + i;
        let scores = c.work.scores.add(i * STRIP);
        // Queries before the key, and those whose window begins behind it.
        let before = key.saturating_sub(unit.position) * group;
        let behind = match window {
            Some(window) => (key + window).saturating_sub(unit.position) * group,
            None => c.work.num_rows,
        };
        let scores = std::slice::from_raw_parts_mut(scores, strip.num_rows);
        scores[..strip.place(before)].fill(with);
        scores[strip.place(behind)..].fill(with);
    }
}
