//! The inner product of everything: a tile of rows × columns, accumulated in registers over all inputs, in order.
//!
//! Each number of the result is one chain of multiply-adds over the inputs from first to last, whatever the tile it
//! lies in: a row gives the same bits alone and beside any others, on any number of threads.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "kernels: their one contract is that the tile's pointers are valid for its sizes"
)]

use std::hint::black_box;

use crate::simd::{self, INPUTS, Simd, TURNED, Weight};

/// The most units of work between two looks at what is to be prefetched.
const MAX_UNITS: usize = 32;
/// Weights are expanded for whole chunks of inputs.
pub(crate) const CHUNK: usize = 16;
/// Places that are read, or asked for, side by side: memory answers several streams faster than one.
pub(crate) const STREAMS: usize = 4;
/// The most rows of a tile of attention: with two registers a row, 12 of AVX2's 16 hold sums; with four, 24 of AVX-512's 32.
const MAX_ROWS: usize = 6;
/// The most columns of a panel.
const MAX_WIDTH: usize = 48;

/// What is needed next, asked for evenly beside the work on what is there: in bursts, answers would come in each other's way.
#[derive(Clone, Copy)]
pub(crate) struct Prefetch {
    next: *const u8,
    /// Of each stream, in bytes.
    stream: usize,
    /// In each stream, in 2^-32 lines, and by so much an ask.
    at: u64,
    rate: u64,
    /// Of a step.
    asks: usize,
    /// Units of work from a step to the next.
    pub(crate) every: usize,
}

impl Prefetch {
    /// `num_bytes` at `next`, beside so many units of work.
    #[inline(always)]
    pub(crate) fn new(next: *const u8, num_bytes: usize, num_units: usize) -> Prefetch {
        let lines = num_bytes.div_ceil(64 * STREAMS);
        let every = (num_units / lines.max(1)).clamp(1, MAX_UNITS);
        let num_steps = (num_units / every).max(1);
        let asks = lines.div_ceil(num_steps);
        Prefetch {
            next,
            stream: lines * 64,
            at: 0,
            rate: ((lines as u64) << 32) / (num_steps * asks.max(1)) as u64,
            asks,
            every,
        }
    }

    #[inline(always)]
    pub(crate) unsafe fn step<S: Simd>(&mut self) {
        for _ in 0..self.asks {
            let line = self.next.wrapping_add((self.at >> 32) as usize * 64);
            for stream in 0..STREAMS {
                S::prefetch(line.wrapping_add(stream * self.stream));
            }
            self.at += self.rate;
        }
    }
}

/// The most rows of a tile of `N` vectors: sums, the columns' weights and an input fit in registers.
pub(crate) const fn max_rows<S: Simd, const N: usize>() -> usize {
    let fit = (S::NUM_REGISTERS - 1 - N) / N;
    if fit > 8 { 8 } else { fit }
}

/// The same where each number has two sums.
pub(crate) const fn max_rows_of_halves<S: Simd, const N: usize>() -> usize {
    (S::NUM_REGISTERS - 1 - N) / (2 * N)
}

/// The same where each block of inputs has sums of its own, beside their totals. AVX2's sixteen registers would hold too few
/// sums to keep its multipliers busy: there totals go through memory.
pub(crate) const fn max_rows_with_totals<S: Simd, const N: usize>() -> usize {
    if S::NUM_REGISTERS < 32 {
        return max_rows::<S, N>();
    }
    max_rows_of_halves::<S, N>()
}

/// How rows are cut in tiles: as evenly as can be, for the sums of a tile of few rows would wait for themselves.
#[derive(Clone, Copy)]
pub(crate) struct Tiles {
    num_rows: usize,
    num_tiles: usize,
}

impl Tiles {
    pub(crate) fn new(num_rows: usize, max_rows: usize) -> Tiles {
        Tiles {
            num_rows,
            num_tiles: num_rows.div_ceil(max_rows),
        }
    }

    pub(crate) fn len(self) -> usize {
        self.num_tiles
    }

    /// A tile's first row.
    pub(crate) fn first(self, tile: usize) -> usize {
        let rest = self.num_rows % self.num_tiles;
        tile * (self.num_rows / self.num_tiles) + tile.min(rest)
    }
}

/// Lays a tile's rows of words of 32 bits side by side: `to[word][row]`.
///
/// It goes by four rows. Of more, the last four may have some of the ones before among them; of fewer, the last one stands
/// for what is missing, and the next words are written over it.
#[inline(always)]
pub(crate) unsafe fn pack<S: Simd>(
    x: *const f32,
    stride: usize,
    num_rows: usize,
    num_words: usize,
    to: *mut f32,
) {
    let num_missing = 4usize.saturating_sub(num_rows);
    let num_turned = num_words.saturating_sub(num_missing) / TURNED * TURNED;
    for first in (0..num_rows).step_by(4) {
        let first = first.min(num_rows.saturating_sub(4));
        let mut rows = [x; 4];
        for (place, row) in rows.iter_mut().enumerate() {
            *row = x.add((first + place).min(num_rows - 1) * stride);
        }
        for word in (0..num_turned).step_by(TURNED) {
            S::turn(rows, word, to.add(word * num_rows + first), num_rows);
        }
    }
    for word in num_turned..num_words {
        for row in 0..num_rows {
            to.add(word * num_rows + row)
                .write(x.add(row * stride + word).read());
        }
    }
}

/// Adds to `sums` a tile's rows, side by side in `x`, times a panel of `N` vectors, and writes those as numbers at
/// `widened`, where that is.
#[inline(always)]
pub(crate) unsafe fn multiply<S: Simd, E: Weight, const R: usize, const N: usize>(
    x: *const f32,
    w: *const E,
    num_in: usize,
    sums: &mut [[S::V; N]; R],
    widened: Option<*mut f32>,
    prefetch: &mut Prefetch,
) {
    let width = N * S::LANES;
    let num_whole = num_in / INPUTS * INPUTS;
    let mut done = 0;
    while done < num_whole {
        prefetch.step::<S>();
        let end = num_whole.min(done + prefetch.every * INPUTS);
        while done < end {
            let (x, w) = (x.add(done * R), w.add(done * width));
            if let Some(to) = widened {
                let to = Some(to.add(done * width));
                simd::add_products::<S, E, R, N>(x, w, INPUTS, sums, to);
            } else {
                S::add_products::<E, R, N>(x, w, sums);
            }
            done += INPUTS;
        }
    }
    // A count that the compiler does not see: unrolled, the few would not fit in registers.
    let rest = black_box(num_in - num_whole);
    simd::add_products::<S, E, R, N>(
        x.add(num_whole * R),
        w.add(num_whole * width),
        rest,
        sums,
        widened.map(|to| to.add(num_whole * width)),
    );
}

/// Reads a tile whose columns all have a place.
#[inline(always)]
pub(crate) unsafe fn load_tile<S: Simd, const R: usize, const N: usize>(
    from: *const f32,
    stride: usize,
) -> [[S::V; N]; R] {
    let mut tile = [[S::splat(0.0); N]; R];
    for r in 0..R {
        for n in 0..N {
            tile[r][n] = S::load(from.add(r * stride + n * S::LANES));
        }
    }
    tile
}

/// Writes a tile, whose last columns may have no place.
#[inline(always)]
pub(crate) unsafe fn store_tile<S: Simd, const R: usize, const N: usize>(
    tile: &[[S::V; N]; R],
    out: *mut f32,
    stride: usize,
    num_columns: usize,
) {
    let is_whole = num_columns == N * S::LANES;
    let mut beside = [0.0f32; MAX_WIDTH];
    for r in 0..R {
        let row = out.add(r * stride);
        let to = if is_whole { row } else { beside.as_mut_ptr() };
        for n in 0..N {
            S::store(to.add(n * S::LANES), tile[r][n]);
        }
        if !is_whole {
            row.copy_from_nonoverlapping(beside.as_ptr(), num_columns);
        }
    }
}

/// `out[r][c] += Σ x[p][r] · w[p][c]`: rows of `x` lie side by side.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub(crate) x: *const f32,
    /// From an input's rows to the next one's.
    pub(crate) x_stride: usize,
    pub(crate) w: *const f32,
    /// From an input's columns to the next one's.
    pub(crate) w_stride: usize,
    pub(crate) num_in: usize,
    pub(crate) out: *mut f32,
    pub(crate) out_stride: usize,
}

impl Product {
    unsafe fn at_column(&self, column: usize) -> Product {
        Product {
            w: self.w.add(column),
            out: self.out.add(column),
            ..*self
        }
    }
}

/// Any numbers of rows and columns.
#[inline(always)]
pub(crate) unsafe fn block<S: Simd>(t: &Product, num_rows: usize, num_columns: usize) {
    let tiles = Tiles::new(num_rows, MAX_ROWS);
    for index in 0..tiles.len() {
        let row = tiles.first(index);
        let part = Product {
            x: t.x.add(row),
            out: t.out.add(row * t.out_stride),
            ..*t
        };
        match tiles.first(index + 1) - row {
            1 => columns::<S, 1>(&part, num_columns),
            2 => columns::<S, 2>(&part, num_columns),
            3 => columns::<S, 3>(&part, num_columns),
            4 => columns::<S, 4>(&part, num_columns),
            5 => columns::<S, 5>(&part, num_columns),
            _ => columns::<S, MAX_ROWS>(&part, num_columns),
        }
    }
}

/// All columns of `R` rows.
#[inline(always)]
unsafe fn columns<S: Simd, const R: usize>(t: &Product, num_columns: usize) {
    let mut column = 0;
    while S::NUM_REGISTERS > 16 && column + 4 * S::LANES <= num_columns {
        tile::<S, R, 4>(&t.at_column(column));
        column += 4 * S::LANES;
    }
    while column + 2 * S::LANES <= num_columns {
        tile::<S, R, 2>(&t.at_column(column));
        column += 2 * S::LANES;
    }
    if column + S::LANES <= num_columns {
        tile::<S, R, 1>(&t.at_column(column));
        column += S::LANES;
    }
    for row in 0..R {
        for column in column..num_columns {
            let out = t.out.add(row * t.out_stride + column);
            for p in 0..t.num_in {
                *out += *t.x.add(p * t.x_stride + row) * *t.w.add(p * t.w_stride + column);
            }
        }
    }
}

#[inline(always)]
unsafe fn tile<S: Simd, const R: usize, const N: usize>(t: &Product) {
    let mut sums = load_tile::<S, R, N>(t.out, t.out_stride);
    for p in 0..t.num_in {
        let mut w = [S::splat(0.0); N];
        for n in 0..N {
            w[n] = S::load(t.w.add(p * t.w_stride + n * S::LANES));
        }
        for r in 0..R {
            let x = S::splat(*t.x.add(p * t.x_stride + r));
            for n in 0..N {
                sums[r][n] = S::fma(x, w[n], sums[r][n]);
            }
        }
    }
    for r in 0..R {
        for n in 0..N {
            S::store(t.out.add(r * t.out_stride + n * S::LANES), sums[r][n]);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::Isa;
    use crate::kernels::Kernels;

    #[test]
    fn rows_of_any_bits_lie_side_by_side() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_here()) {
            for num_rows in 1..=8 {
                for num_words in (0..40).chain([289]) {
                    let stride = num_words + 3;
                    // Many are no number, and have a payload to lose.
                    let x: Vec<f32> = (0..num_rows * stride)
                        .map(|place| f32::from_bits((place as u32).wrapping_mul(0x9e37_79b1)))
                        .chain([f32::from_bits(0x7f80_0001), f32::from_bits(0xff9a_bcde)])
                        .collect();
                    let mut wanted = vec![7; num_rows * num_words + 8];
                    for word in 0..num_words {
                        for row in 0..num_rows {
                            let from = row * stride + word + 2;
                            wanted[word * num_rows + row] = x[from].to_bits();
                        }
                    }
                    let mut found = vec![f32::from_bits(7); wanted.len()];
                    // SAFETY: this CPU has the instructions, and the rows lie in `x`, and in `found`.
                    unsafe {
                        (Kernels::of(isa).pack)(
                            x.as_ptr().add(2),
                            stride,
                            num_rows,
                            num_words,
                            found.as_mut_ptr(),
                        );
                    }
                    let found: Vec<u32> = found.into_iter().map(f32::to_bits).collect();
                    assert_eq!(found, wanted, "{} {num_rows} {num_words}", isa.name());
                }
            }
        }
    }
}
