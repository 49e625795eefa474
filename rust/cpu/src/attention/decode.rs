//! One query with a tile of keys: K and V are read where they lie, each key once for all heads of a group.

use super::{Ahead, Attend, TILE, Tile, Work, scored_at_once};
use crate::kv::Stored;
use crate::simd::{Simd, no_load_moves_up};

/// Keys whose scores are computed side by side.
const KEYS: usize = 4;

/// # Safety
/// As for `attend`; the unit has one query.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, E: Stored>(
    a: &Attend<'_>,
    w: &Work,
    tile: &Tile,
    ahead: &mut Ahead,
) {
    let (place, n) = (tile.place::<S>(), tile.len());
    // Once for each key's score, and once for its V.
    if w.kv_head == a.unit.kv_head {
        ahead.spread_over(2 * n * a.unit.num_kv_heads);
    }
    let keys: *const E = w.first(a.keys, a.format);
    let values: *const E = w.first(a.values, a.format);
    for i in (0..n).step_by(KEYS) {
        let mut k = [keys; KEYS];
        for j in 0..KEYS {
            k[j] = keys.byte_add(tile.offsets[(i + j).min(n - 1)]);
        }
        ahead.ask::<S>(KEYS.min(n - i));
        let mut r = 0;
        while r < w.num_rows {
            let count = scored_at_once(w.num_rows - r);
            match count {
                1 => scores::<S, E, 1>(w, r, place + i, k),
                2 => scores::<S, E, 2>(w, r, place + i, k),
                _ => scores::<S, E, 3>(w, r, place + i, k),
            }
            r += count;
        }
    }
    for row in 0..w.num_rows {
        softmax::<S>(a, w, row, tile);
    }
    if E::SCALE_BYTES > 0 {
        scale_weights::<S, E>(w, values, tile);
    }
    let mut r = 0;
    while r < w.num_rows {
        let num_times = usize::from(r == 0);
        match w.num_rows - r {
            1 => weigh::<S, E, 1>(w, r, values, tile, ahead, num_times),
            2 => weigh::<S, E, 2>(w, r, values, tile, ahead, num_times),
            _ => weigh::<S, E, 3>(w, r, values, tile, ahead, num_times),
        }
        r += 3;
    }
}

/// Scores of some heads with four keys.
#[inline(always)]
unsafe fn scores<S: Simd, E: Stored, const R: usize>(
    w: &Work,
    row: usize,
    place: usize,
    k: [*const E; KEYS],
) {
    let queries = w.queries.add(row * w.dim);
    let mut sums = [[S::splat(0.0); KEYS]; R];
    let num_whole = w.dim / S::LANES * S::LANES;
    // Two keys at a time, as sums of four would leave no register for a key.
    for pair in (0..KEYS).step_by(2) {
        let mut two = [[S::splat(0.0); 2]; R];
        for d in (0..num_whole).step_by(S::LANES) {
            let mut q = [S::splat(0.0); R];
            for r in 0..R {
                q[r] = S::load(queries.add(r * w.dim + d));
            }
            for j in 0..2 {
                let key = E::load::<S>(k[pair + j].add(d));
                for r in 0..R {
                    two[r][j] = S::fma(q[r], key, two[r][j]);
                }
            }
            no_load_moves_up();
        }
        for r in 0..R {
            sums[r][pair] = two[r][0];
            sums[r][pair + 1] = two[r][1];
        }
    }
    for r in 0..R {
        // In memory: numbers of one vector are not to be taken apart where nothing is done with each.
        let to = w.scores.add((row + r) * TILE + place);
        to.cast::<[f32; KEYS]>().write_unaligned(S::sums(sums[r]));
        for d in num_whole..w.dim {
            let q = *queries.add(r * w.dim + d);
            for j in 0..KEYS {
                *to.add(j) += q * (*k[j].add(d)).get();
            }
        }
        if E::SCALE_BYTES > 0 {
            for j in 0..KEYS {
                *to.add(j) *= E::scale(k[j]);
            }
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

/// Multiplies all heads' weights by the scales of the tile's V, whose numbers are then taken as they are.
#[inline(always)]
unsafe fn scale_weights<S: Simd, E: Stored>(w: &Work, values: *const E, tile: &Tile) {
    for i in 0..tile.len() {
        *w.scales.add(i) = E::scale(values.byte_add(tile.offsets[i]));
    }
    for r in 0..w.num_rows {
        let weights = w.scores.add(r * TILE + tile.place::<S>());
        for i in 0..tile.len() {
            *weights.add(i) *= *w.scales.add(i);
        }
    }
}

/// Adds the tile's V, weighted, to the sums of some heads.
#[inline(always)]
unsafe fn weigh<S: Simd, E: Stored, const R: usize>(
    w: &Work,
    row: usize,
    values: *const E,
    tile: &Tile,
    ahead: &mut Ahead,
    num_times: usize,
) {
    // The first columns ask for all of them.
    let times_at = |d: usize| if d == 0 { num_times } else { 0 };
    let mut d = 0;
    // With 16 registers, sums of more columns would leave none to expand V in.
    let num_vectors = if S::NUM_REGISTERS > 16 { 4 } else { 3 };
    while d + num_vectors * S::LANES <= w.dim {
        if S::NUM_REGISTERS > 16 {
            weigh_columns::<S, E, R, 4>(w, row, d, values, tile, ahead, times_at(d));
        } else {
            weigh_columns::<S, E, R, 3>(w, row, d, values, tile, ahead, times_at(d));
        }
        d += num_vectors * S::LANES;
    }
    while d + 2 * S::LANES <= w.dim {
        weigh_columns::<S, E, R, 2>(w, row, d, values, tile, ahead, times_at(d));
        d += 2 * S::LANES;
    }
    while d + S::LANES <= w.dim {
        weigh_columns::<S, E, R, 1>(w, row, d, values, tile, ahead, times_at(d));
        d += S::LANES;
    }
    for r in row..row + R {
        for d in d..w.dim {
            let sum = w.sums.of(r, w.dim).add(d);
            let weights = w.scores.add(r * TILE + tile.place::<S>());
            for i in 0..tile.len() {
                let value = (*values.byte_add(tile.offsets[i]).add(d)).get();
                *sum += *weights.add(i) * value;
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
    ahead: &mut Ahead,
    num_times: usize,
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
        ahead.ask::<S>(num_times);
        let value = values.byte_add(tile.offsets[i]).add(column);
        let mut share = [S::splat(0.0); R];
        for r in 0..R {
            share[r] = S::splat(*weights.add(r * TILE + i));
        }
        for n in 0..N {
            let v = E::load::<S>(value.add(n * S::LANES));
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
