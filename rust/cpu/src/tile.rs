//! The inner product of everything: a tile of rows × columns, accumulated in registers over all inputs, in order.
//!
//! Each number of the result is one chain of multiply-adds over the inputs from first to last, whatever the tile it
//! lies in: a row gives the same bits alone and beside any others, on any number of threads.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "kernels: their one contract is that the tile's pointers are valid for its sizes"
)]

use crate::simd::{Element, Simd};

/// Inputs between two looks at what is to be prefetched.
const CHUNK: usize = 32;
/// Places from which what is needed next is asked for side by side: memory answers several streams faster than one.
const STREAMS: usize = 4;
/// The most rows of a tile: with two registers a row, 12 of AVX2's 16 hold sums.
const MAX_ROWS: usize = 6;

/// What is needed next, asked for in even steps beside the work on what is there.
#[derive(Clone, Copy)]
pub(crate) struct Prefetch {
    next: *const u8,
    /// Of each stream, in lines.
    stream: usize,
    asked: usize,
    /// Of each stream in a step.
    lines: usize,
}

impl Prefetch {
    /// `num_bytes` at `next`, in so many steps.
    #[inline(always)]
    pub(crate) fn new(next: *const u8, num_bytes: usize, num_steps: usize) -> Prefetch {
        let stream = num_bytes.div_ceil(64 * STREAMS);
        let lines = stream.div_ceil(num_steps.max(1));
        Prefetch {
            next,
            stream,
            asked: 0,
            lines,
        }
    }

    #[inline(always)]
    pub(crate) unsafe fn step<S: Simd>(&mut self) {
        let end = self.stream.min(self.asked + self.lines);
        while self.asked < end {
            for stream in 0..STREAMS {
                let line = stream * self.stream + self.asked;
                S::prefetch(self.next.wrapping_add(line * 64));
            }
            self.asked += 1;
        }
    }
}

/// `out[r][c] (+)= Σ x[r][p] · w[p][c]`.
pub(crate) struct Product<E> {
    pub(crate) x: *const f32,
    /// From a row of `x` to the next; where `x` is turned, from an input to the next, and rows lie side by side.
    pub(crate) x_stride: usize,
    pub(crate) w: *const E,
    /// From an input's columns to the next one's.
    pub(crate) w_stride: usize,
    pub(crate) num_in: usize,
    pub(crate) out: *mut f32,
    pub(crate) out_stride: usize,
    /// Whether what `out` holds is added to.
    pub(crate) adds: bool,
    /// What is needed next.
    pub(crate) next: *const u8,
    pub(crate) next_bytes: usize,
}

impl<E> Clone for Product<E> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E> Copy for Product<E> {}

#[inline(always)]
unsafe fn tile<S: Simd, E: Element, const R: usize, const N: usize, const TURNED: bool>(
    t: Product<E>,
    prefetch: &mut Prefetch,
) {
    let mut sums = [[S::splat(0.0); N]; R];
    if t.adds {
        for r in 0..R {
            for n in 0..N {
                sums[r][n] = S::load(t.out.add(r * t.out_stride + n * S::LANES));
            }
        }
    }
    let mut done = 0;
    while done < t.num_in {
        let end = t.num_in.min(done + CHUNK);
        prefetch.step::<S>();
        for p in done..end {
            let mut w = [S::splat(0.0); N];
            for n in 0..N {
                w[n] = E::load::<S>(t.w.add(p * t.w_stride + n * S::LANES));
            }
            for r in 0..R {
                let place = if TURNED {
                    p * t.x_stride + r
                } else {
                    r * t.x_stride + p
                };
                let x = S::splat(*t.x.add(place));
                for n in 0..N {
                    sums[r][n] = S::fma(x, w[n], sums[r][n]);
                }
            }
        }
        done = end;
    }
    for r in 0..R {
        for n in 0..N {
            S::store(t.out.add(r * t.out_stride + n * S::LANES), sums[r][n]);
        }
    }
}

/// Some rows of `N` vectors of columns.
#[inline(always)]
pub(crate) unsafe fn rows<S: Simd, E: Element, const N: usize, const TURNED: bool>(
    t: Product<E>,
    num_rows: usize,
) {
    let num_tiles = num_rows.div_ceil(MAX_ROWS);
    let num_chunks = t.num_in.div_ceil(CHUNK);
    let mut prefetch = Prefetch::new(t.next, t.next_bytes, num_tiles * num_chunks);
    let mut row = 0;
    for index in 0..num_tiles {
        // Even tiles: 8 rows are 4 and 4, for a tile of 2 would wait for its own sums.
        let count = (num_rows - row).div_ceil(num_tiles - index);
        let part = Product {
            x: t.x.add(if TURNED { row } else { row * t.x_stride }),
            out: t.out.add(row * t.out_stride),
            ..t
        };
        match count {
            1 => tile::<S, E, 1, N, TURNED>(part, &mut prefetch),
            2 => tile::<S, E, 2, N, TURNED>(part, &mut prefetch),
            3 => tile::<S, E, 3, N, TURNED>(part, &mut prefetch),
            4 => tile::<S, E, 4, N, TURNED>(part, &mut prefetch),
            5 => tile::<S, E, 5, N, TURNED>(part, &mut prefetch),
            _ => tile::<S, E, MAX_ROWS, N, TURNED>(part, &mut prefetch),
        }
        row += count;
    }
}

/// Any numbers of rows and columns, `x` turned.
#[inline(always)]
pub(crate) unsafe fn block<S: Simd>(t: Product<f32>, num_rows: usize, num_columns: usize) {
    let mut column = 0;
    let from = |column: usize| Product {
        w: t.w.add(column),
        out: t.out.add(column),
        ..t
    };
    while column + 2 * S::LANES <= num_columns {
        rows::<S, f32, 2, true>(from(column), num_rows);
        column += 2 * S::LANES;
    }
    if column + S::LANES <= num_columns {
        rows::<S, f32, 1, true>(from(column), num_rows);
        column += S::LANES;
    }
    for row in 0..num_rows {
        for column in column..num_columns {
            let out = t.out.add(row * t.out_stride + column);
            let mut sum = if t.adds { *out } else { 0.0 };
            for p in 0..t.num_in {
                sum += *t.x.add(p * t.x_stride + row) * *t.w.add(p * t.w_stride + column);
            }
            *out = sum;
        }
    }
}
