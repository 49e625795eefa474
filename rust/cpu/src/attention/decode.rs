//! One query with a tile of keys: K and V are read where they lie, each key once for all heads of a group.

use std::ops::Range;

use super::{Ahead, Attend, TILE, Tile, Work};
use crate::kv::Stored;
use crate::simd::Simd;

/// Keys that are turned together.
const KEYS: usize = 8;

/// # Safety
/// As for `attend`; the unit has one query.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, E: Stored>(
    a: &Attend<'_>,
    w: &Work,
    tile: &Tile,
    ahead: &mut Ahead<'_>,
) {
    // For each key once as it is turned, once as it is scored, and twice as its V is weighed.
    let num_lines = ahead.lines_at_each(4 * tile.len() * a.unit.num_kv_heads);
    let values: *const E = w.first(a.values, a.format);
    let num_places = tile.place::<S>() + tile.len();
    for place in (0..num_places).step_by(4 * S::LANES) {
        let end = num_places.min(place + 4 * S::LANES);
        turn::<S, E>(a, w, tile, place..end, ahead, num_lines);
        let mut row = 0;
        while row < w.num_rows {
            // What is left goes in threes; four as two and two, so that one of them does not wait for its own sums.
            let count = match w.num_rows - row {
                count @ 1..=3 => count,
                4 => 2,
                _ => 3,
            };
            let num_lines = if row == 0 { num_lines } else { 0 };
            match count {
                1 => scores::<S, 1>(w, row, place..end, ahead, num_lines),
                2 => scores::<S, 2>(w, row, place..end, ahead, num_lines),
                _ => scores::<S, 3>(w, row, place..end, ahead, num_lines),
            }
            row += count;
        }
    }
    for row in 0..w.num_rows {
        softmax::<S>(a, w, row, tile);
    }
    let mut row = 0;
    while row < w.num_rows {
        let num_lines = if row == 0 { 2 * num_lines } else { 0 };
        match w.num_rows - row {
            1 => weigh::<S, E, 1>(w, row, values, tile, ahead, num_lines),
            2 => weigh::<S, E, 2>(w, row, values, tile, ahead, num_lines),
            _ => weigh::<S, E, 3>(w, row, values, tile, ahead, num_lines),
        }
        row += 3;
    }
}

/// Lays the keys of some places side by side, `[dim, 4 vectors]`: a score is then one chain of multiply-adds over the dimensions, as in a chunk,
/// with keys in the lanes.
#[inline(always)]
unsafe fn turn<S: Simd, E: Stored>(
    a: &Attend<'_>,
    w: &Work,
    tile: &Tile,
    places: Range<usize>,
    ahead: &mut Ahead<'_>,
    num_lines: usize,
) {
    let keys: *const E = w.first(a.keys, a.format);
    let (skip, n) = (tile.place::<S>(), tile.len());
    let num_whole = w.dim / S::LANES * S::LANES;
    let stride = 4 * S::LANES;
    for place in places.clone().step_by(KEYS) {
        ahead.ask::<S>(num_lines * KEYS);
        let mut k = [keys; KEYS];
        let mut scales = [1.0; KEYS];
        for j in 0..KEYS {
            // Places before the first key and behind the last are hidden later.
            let key = (place + j).saturating_sub(skip).min(n - 1);
            k[j] = keys.byte_add(tile.offsets[key]);
            scales[j] = E::scale(k[j]);
        }
        let to = w.keys.add(place - places.start);
        for d in (0..num_whole).step_by(S::LANES) {
            let mut numbers = [S::splat(0.0); KEYS];
            for j in 0..KEYS {
                numbers[j] = E::load::<S>(k[j].add(d));
                if E::SCALE_BYTES > 0 {
                    numbers[j] = S::mul(numbers[j], S::splat(scales[j]));
                }
            }
            S::turn(numbers, to.add(d * stride), stride);
        }
        for d in num_whole..w.dim {
            for j in 0..KEYS {
                *to.add(d * stride + j) = (*k[j].add(d)).get() * scales[j];
            }
        }
    }
}

/// Scores of some heads with the keys that were turned.
#[inline(always)]
unsafe fn scores<S: Simd, const R: usize>(
    w: &Work,
    row: usize,
    places: Range<usize>,
    ahead: &mut Ahead<'_>,
    num_lines: usize,
) {
    if places.len() > 2 * S::LANES {
        scores_of::<S, R, 4>(w, row, places.start, ahead, num_lines);
    } else {
        scores_of::<S, R, 2>(w, row, places.start, ahead, num_lines);
    }
}

#[inline(always)]
unsafe fn scores_of<S: Simd, const R: usize, const N: usize>(
    w: &Work,
    row: usize,
    place: usize,
    ahead: &mut Ahead<'_>,
    num_lines: usize,
) {
    let queries = w.queries.add(row * w.dim);
    let mut sums = [[S::splat(0.0); N]; R];
    let num_lines = (num_lines * N * S::LANES).div_ceil(w.dim);
    for d in 0..w.dim {
        ahead.ask::<S>(num_lines);
        let mut q = [S::splat(0.0); R];
        for r in 0..R {
            q[r] = S::splat(*queries.add(r * w.dim + d));
        }
        for n in 0..N {
            let key = S::load(w.keys.add((4 * d + n) * S::LANES));
            for r in 0..R {
                sums[r][n] = S::fma(q[r], key, sums[r][n]);
            }
        }
    }
    for r in 0..R {
        for n in 0..N {
            let to = w.scores.add((row + r) * TILE + place);
            S::store(to.add(n * S::LANES), sums[r][n]);
        }
    }
}

/// Turns a row's scores into weights, and rescales what it has summed.
#[inline(always)]
unsafe fn softmax<S: Simd>(a: &Attend<'_>, w: &Work, row: usize, tile: &Tile) {
    let scores = w.scores.add(row * TILE);
    let (skip, end) = (tile.place::<S>(), tile.place::<S>() + tile.len());
    let padded = end.next_multiple_of(S::LANES);
    if let Some(cap) = a.options.softcap {
        for i in (0..padded).step_by(S::LANES) {
            let x = S::div(S::load(scores.add(i)), S::splat(cap));
            S::store(scores.add(i), S::mul(S::tanh(x), S::splat(cap)));
        }
    }
    for i in (0..skip).chain(end..padded) {
        *scores.add(i) = f32::NEG_INFINITY;
    }
    let mut maxima = S::splat(f32::NEG_INFINITY);
    for i in (0..padded).step_by(S::LANES) {
        maxima = S::max(maxima, S::load(scores.add(i)));
    }
    let old = *w.sums.maxima.add(row);
    let new = S::largest(maxima).max(old);
    for i in (0..padded).step_by(S::LANES) {
        let x = S::sub(S::load(scores.add(i)), S::splat(new));
        S::store(scores.add(i), S::exp(x));
    }
    for i in (0..skip).chain(end..padded) {
        *scores.add(i) = 0.0;
    }
    let mut sums = S::splat(0.0);
    for i in (0..padded).step_by(S::LANES) {
        sums = S::add(sums, S::load(scores.add(i)));
    }
    let keep = S::exp(S::splat(old - new));
    let total = w.sums.totals.add(row);
    *total = S::largest(S::fma(S::splat(*total), keep, S::splat(S::sum(sums))));
    *w.sums.maxima.add(row) = new;
    w.sums.keep(row, w.dim, S::largest(keep));
}

/// Adds the tile's V, weighted, to the sums of some heads.
#[inline(always)]
unsafe fn weigh<S: Simd, E: Stored, const R: usize>(
    w: &Work,
    row: usize,
    values: *const E,
    tile: &Tile,
    ahead: &mut Ahead<'_>,
    num_lines: usize,
) {
    // The first columns ask for all of them.
    let lines_at = |d: usize| if d == 0 { num_lines } else { 0 };
    let mut d = 0;
    // With 16 registers, sums of more columns would leave none to expand V in.
    let num_vectors = if S::NUM_REGISTERS > 16 { 4 } else { 3 };
    while d + num_vectors * S::LANES <= w.dim {
        if S::NUM_REGISTERS > 16 {
            weigh_columns::<S, E, R, 4>(w, row, d, values, tile, ahead, lines_at(d));
        } else {
            weigh_columns::<S, E, R, 3>(w, row, d, values, tile, ahead, lines_at(d));
        }
        d += num_vectors * S::LANES;
    }
    while d + 2 * S::LANES <= w.dim {
        weigh_columns::<S, E, R, 2>(w, row, d, values, tile, ahead, lines_at(d));
        d += 2 * S::LANES;
    }
    while d + S::LANES <= w.dim {
        weigh_columns::<S, E, R, 1>(w, row, d, values, tile, ahead, lines_at(d));
        d += S::LANES;
    }
    for r in row..row + R {
        for d in d..w.dim {
            let sum = w.sums.of(r, w.dim).add(d);
            let weights = w.scores.add(r * TILE + tile.place::<S>());
            for i in 0..tile.len() {
                let value = values.byte_add(tile.offsets[i]);
                *sum += *weights.add(i) * ((*value.add(d)).get() * E::scale(value));
            }
        }
    }
}

#[inline(always)]
unsafe fn weigh_columns<S: Simd, E: Stored, const R: usize, const N: usize>(
    w: &Work,
    row: usize,
    column: usize,
    values: *const E,
    tile: &Tile,
    ahead: &mut Ahead<'_>,
    num_lines: usize,
) {
    let to = w.sums.of(row, w.dim).add(column);
    let weights = w.scores.add(row * TILE + tile.place::<S>());
    let mut sums = [[S::splat(0.0); N]; R];
    for r in 0..R {
        for n in 0..N {
            sums[r][n] = S::load(to.add(r * w.dim + n * S::LANES));
        }
    }
    for i in 0..tile.len() {
        ahead.ask::<S>(num_lines);
        let head = values.byte_add(tile.offsets[i]);
        let mut share = [S::splat(0.0); R];
        for r in 0..R {
            share[r] = S::splat(*weights.add(r * TILE + i));
        }
        for n in 0..N {
            let mut v = E::load::<S>(head.add(column + n * S::LANES));
            if E::SCALE_BYTES > 0 {
                v = S::mul(v, S::splat(E::scale(head)));
            }
            for r in 0..R {
                sums[r][n] = S::fma(share[r], v, sums[r][n]);
            }
        }
    }
    for r in 0..R {
        for n in 0..N {
            S::store(to.add(r * w.dim + n * S::LANES), sums[r][n]);
        }
    }
}
