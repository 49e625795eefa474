//! Several queries with a tile of keys: two products, with a softmax between.
//!
//! Scores lie key by key, with the rows (queries × heads) side by side: so maxima and totals of rows are vectors, and what
//! causality or the window hides from rows is a range of them. A score is summed as one query's is: dimensions in lanes.

use super::{Ahead, Attend, Tile, Work, scored_at_once};
use crate::kv::Stored;
use crate::simd::{MAX_LANES, Simd};
use crate::tile::Product;

/// Rows that are scored together.
const ROWS: usize = 4;

/// # Safety
/// As for `attend`; the unit has several queries.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, E: Stored>(
    a: &Attend<'_>,
    w: &Work,
    tile: &Tile,
    ahead: &mut Ahead<'_>,
) {
    gather::<S, E>(w.first(a.keys, a.format), w.keys, w.scales, w.dim, tile);
    for row in (0..w.num_rows).step_by(ROWS) {
        let mut key = 0;
        while key < tile.len() {
            let count = scored_at_once(tile.len() - key);
            match count {
                1 => scores::<S, E, 1>(w, row, key),
                2 => scores::<S, E, 2>(w, row, key),
                _ => scores::<S, E, 3>(w, row, key),
            }
            key += count;
        }
    }
    softmax::<S>(a, w, tile, ahead);
    gather::<S, E>(w.first(a.values, a.format), w.values, w.scales, w.dim, tile);
    if E::SCALE_BYTES > 0 {
        scale_weights::<S>(w, tile);
    }
    let sums = Product {
        x: w.scores.cast_const(),
        x_stride: w.row_stride,
        w: w.values.cast_const(),
        w_stride: w.dim,
        num_in: tile.len(),
        out: w.sums.weighted,
        out_stride: w.dim,
    };
    (a.kernels.block)(&sums, w.num_rows, w.dim);
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

/// Scores of four rows with some keys.
#[inline(always)]
unsafe fn scores<S: Simd, E: Stored, const K: usize>(w: &Work, row: usize, key: usize) {
    let (queries, keys) = (w.queries.add(row * w.dim), w.keys.add(key * w.dim));
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
        let to = w.scores.add((key + j) * w.row_stride + row);
        to.cast::<[f32; ROWS]>().write_unaligned(S::sums(sums[j]));
        for d in num_whole..w.dim {
            let k = *keys.add(j * w.dim + d);
            for r in 0..ROWS {
                *to.add(r) += *queries.add(r * w.dim + d) * k;
            }
        }
        if E::SCALE_BYTES > 0 {
            for r in 0..ROWS {
                *to.add(r) *= *w.scales.add(key + j);
            }
        }
    }
}

/// Multiplies weights by the scales of the tile's V, whose numbers are then taken as they are.
#[inline(always)]
unsafe fn scale_weights<S: Simd>(w: &Work, tile: &Tile) {
    for i in 0..tile.len() {
        let scale = S::splat(*w.scales.add(i));
        for column in (0..w.row_stride).step_by(S::LANES) {
            let weights = w.scores.add(i * w.row_stride + column);
            S::store(weights, S::mul(S::load(weights), scale));
        }
    }
}

/// Turns scores into weights, and rescales what was summed.
#[inline(always)]
unsafe fn softmax<S: Simd>(a: &Attend<'_>, w: &Work, tile: &Tile, ahead: &mut Ahead<'_>) {
    let n = tile.len();
    if let Some(cap) = a.options.softcap {
        let cap = S::splat(cap);
        for at in (0..n * w.row_stride).step_by(S::LANES) {
            let x = S::div(S::load(w.scores.add(at)), cap);
            S::store(w.scores.add(at), S::mul(S::tanh(x), cap));
        }
    }
    hide(a, w, tile, f32::NEG_INFINITY);
    let num_lines = ahead.lines_at_each(w.row_stride / S::LANES);
    for column in (0..w.row_stride).step_by(S::LANES) {
        ahead.ask::<S>(num_lines);
        let scores = w.scores.add(column);
        let old = S::load(w.sums.maxima.add(column));
        let mut new = old;
        for i in 0..n {
            new = S::max(new, S::load(scores.add(i * w.row_stride)));
        }
        for i in 0..n {
            let score = scores.add(i * w.row_stride);
            S::store(score, S::exp(S::sub(S::load(score), new)));
        }
        S::store(w.sums.maxima.add(column), new);
        // Where nothing was seen before, sums and total are 0, whatever they are multiplied by.
        S::store(w.keeps.add(column), S::exp(S::sub(old, new)));
    }
    hide(a, w, tile, 0.0);
    for column in (0..w.row_stride).step_by(S::LANES) {
        let total = w.sums.totals.add(column);
        let keep = S::load(w.keeps.add(column));
        let sum = sum_of_keys::<S>(w, tile, column);
        S::store(total, S::fma(S::load(total), keep, sum));
    }
    for r in 0..w.num_rows {
        w.sums.keep(r, w.dim, *w.keeps.add(r));
    }
}

/// Some rows' weights added up, in the order of one query's, whose keys lie in lanes: each lane's by itself, then halves.
#[inline(always)]
unsafe fn sum_of_keys<S: Simd>(w: &Work, tile: &Tile, column: usize) -> S::V {
    let mut lanes = [S::splat(0.0); MAX_LANES];
    let skip = tile.place::<S>();
    for lane in 0..S::LANES {
        let first = (lane + S::LANES - skip) % S::LANES;
        for i in (first..tile.len()).step_by(S::LANES) {
            let weight = S::load(w.scores.add(i * w.row_stride + column));
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

/// Overwrites the scores of keys that rows do not see.
#[inline(always)]
unsafe fn hide(a: &Attend<'_>, w: &Work, tile: &Tile, with: f32) {
    for key in tile.from..tile.to {
        let scores = w.scores.add((key - tile.from) * w.row_stride);
        // Queries before the key, and those whose window begins behind it.
        let before = key.saturating_sub(a.unit.position) * w.group;
        let behind = match a.options.window {
            Some(window) => (key + window).saturating_sub(a.unit.position) * w.group,
            None => w.num_rows,
        };
        for r in (0..before.min(w.num_rows)).chain(behind.min(w.num_rows)..w.num_rows) {
            *scores.add(r) = with;
        }
    }
}
