//! What this machine can do at most: reading memory, and multiplying. What kernels reach is a share of it.
//!
//! Each measurement runs rounds for a time on some threads that begin together, and takes the best round: whatever else
//! the machine does only adds to a round.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "kernels: arithmetic, and loads inside of a slice"
)]

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::Isa;
use crate::cpus::Cpus;
use crate::kernels::Kernels;
use crate::memory::Buffer;
use crate::simd::{Quads, Simd};

/// Bytes that are read in a round, by all threads together: far beyond any cache that a process has for itself.
const READ_BYTES: usize = 256 << 20;
/// Multiply-adds of a sum in a round of a thread.
const CHAIN: usize = 1 << 20;
/// Sums side by side: enough that none waits for itself, and they fit in registers.
const NUM_SUMS: usize = 12;
/// Parts of a thread's memory that it reads side by side: so more lines are on the way than by one.
const STREAMS: usize = 4;
/// Numbers ahead of a read for which memory is asked.
const AHEAD: usize = 256;

/// Bytes a second that threads read from memory, each its own part, in order.
///
/// # Panics
/// This CPU does not have the instruction set, or there is no thread.
pub fn read_bandwidth(isa: Isa, num_threads: usize, time: Duration) -> f64 {
    let kernels = Kernels::of(isa);
    // Ones: pages of zeros need not be memory.
    let mut buffer = Buffer::zeroed(READ_BYTES / size_of::<f32>());
    buffer.as_mut_slice().fill(1.0);
    let numbers = buffer.as_slice();
    let part = numbers.len() / num_threads;
    let best = best_round(num_threads, time, |thread| {
        // SAFETY: the CPU has the instructions.
        black_box(unsafe { (kernels.read)(&numbers[thread * part..][..part]) });
    });
    (part * num_threads * size_of::<f32>()) as f64 / best
}

/// float32 operations a second in fused multiply-adds, two in each.
///
/// # Panics
/// As `read_bandwidth`.
pub fn fma_rate(isa: Isa, num_threads: usize, time: Duration) -> f64 {
    let kernels = Kernels::of(isa);
    let best = best_round(num_threads, time, |_| {
        // SAFETY: the CPU has the instructions.
        black_box(unsafe { (kernels.chains)(black_box(0.5), CHAIN) });
    });
    (2 * kernels.lanes * NUM_SUMS * CHAIN * num_threads) as f64 / best
}

/// Whole-number operations a second, of the instruction that 8-bit weights are multiplied by: two in each of a lane's two
/// products.
///
/// # Panics
/// As `read_bandwidth`.
pub fn int8_rate(isa: Isa, num_threads: usize, time: Duration) -> f64 {
    let kernels = Kernels::of(isa);
    let best = best_round(num_threads, time, |_| {
        // SAFETY: the CPU has the instructions.
        black_box(unsafe { (kernels.chains_of_whole)(black_box([3, 5]), CHAIN) });
    });
    (4 * kernels.lanes * NUM_SUMS * CHAIN * num_threads) as f64 / best
}

/// Seconds of the best of all rounds that fit in a time; at least two.
fn best_round(num_threads: usize, time: Duration, work: impl Fn(usize) + Sync) -> f64 {
    assert!(num_threads > 0, "a thread at least");
    let barrier = Barrier::new(num_threads);
    let is_over = AtomicBool::new(false);
    let cpus = Cpus::of(num_threads);
    let rounds = |thread: usize| {
        let _stay = cpus.as_ref().and_then(|cpus| cpus.stay(thread));
        let (started, mut best, mut num_rounds) = (Instant::now(), f64::INFINITY, 0);
        loop {
            barrier.wait();
            let round = Instant::now();
            work(thread);
            barrier.wait();
            best = best.min(round.elapsed().as_secs_f64());
            num_rounds += 1;
            if thread == 0 {
                // The next barrier comes before anybody looks.
                is_over.store(
                    num_rounds > 1 && started.elapsed() >= time,
                    Ordering::Relaxed,
                );
            }
            barrier.wait();
            if is_over.load(Ordering::Relaxed) {
                return best;
            }
        }
    };
    std::thread::scope(|scope| {
        for thread in 1..num_threads {
            scope.spawn(move || rounds(thread));
        }
        rounds(0)
    })
}

/// Reads all of it.
#[inline(always)]
pub(crate) unsafe fn read<S: Simd>(numbers: &[f32]) -> f32 {
    const LINE: usize = 16;
    let stream = numbers.len() / (STREAMS * LINE) * LINE;
    let mut sums = [[S::splat(0.0); 2]; STREAMS];
    for at in (0..stream).step_by(LINE) {
        for (s, sums) in sums.iter_mut().enumerate() {
            let line = numbers.as_ptr().add(s * stream + at);
            S::prefetch_near(line.wrapping_add(AHEAD).cast());
            for place in (0..LINE).step_by(S::LANES) {
                let sum = &mut sums[place / S::LANES % 2];
                *sum = S::max(*sum, S::load(line.add(place)));
            }
        }
    }
    sums.as_flattened()
        .iter()
        .fold(0.0, |largest, sum| S::largest(*sum).max(largest))
}

/// Chains of multiply-adds, side by side.
#[inline(always)]
pub(crate) unsafe fn chains<S: Simd>(factor: f32, length: usize) -> f32 {
    let factor = S::splat(factor);
    let mut sums = [S::splat(1.0); NUM_SUMS];
    for _ in 0..length {
        for sum in &mut sums {
            *sum = S::fma(*sum, factor, factor);
        }
    }
    sums.into_iter().fold(0.0, |total, sum| total + S::sum(sum))
}

/// Chains of sums of products of 16-bit pairs, side by side.
#[inline(always)]
pub(crate) unsafe fn chains_of_pairs<S: Simd>(pair: [i16; 2], length: usize) -> f32 {
    let pair = S::splat_pair(pair.as_ptr());
    let mut sums = [S::zero_i32(); NUM_SUMS];
    for _ in 0..length {
        for sum in &mut sums {
            // What is multiplied hangs on the sum, so that nothing can be computed once for all.
            *sum = S::dot_pairs(*sum, *sum, pair);
        }
    }
    sums.into_iter()
        .fold(0.0, |total, sum| total + S::sum(S::to_f32(sum)))
}

/// The same of fours of bytes, two of which are what two pairs of 16-bit numbers are multiplied by.
#[inline(always)]
pub(crate) unsafe fn chains_of_quads<S: Quads>(pair: [i16; 2], length: usize) -> f32 {
    let quad = S::splat_pair(pair.as_ptr());
    let mut sums = [S::zero_i32(); NUM_SUMS];
    for _ in 0..length {
        for sum in &mut sums {
            *sum = S::dot_quads(*sum, *sum, quad);
        }
    }
    sums.into_iter()
        .fold(0.0, |total, sum| total + S::sum(S::to_f32(sum)))
}
