//! How long outputs get: a streaming histogram of lengths, and what it says of a request that has some tokens already.
//!
//! Lengths fall into eight buckets an octave. A request that was cut (by its limit, a client, an error) counts as *at
//! least* as long as it got. The prior: as if one request in [`PRIOR`] had no end, so that before any history the
//! prediction is the limit. Old lengths fade: the counts are halved when there are [`WINDOW`] of them. All of it is integer
//! arithmetic, so that a replay agrees on every machine.
//!
//! Costs: O(1) an observation, but that the table is made anew, O(buckets up to the longest seen), when an eighth of what
//! it was made of has come in; O(log buckets) a prediction.

use alloc::boxed::Box;
use alloc::vec;

/// Buckets below 2^30 tokens, and one past them.
const NUM_BUCKETS: usize = 8 * 28 + 2;
/// Parts that a request is counted in.
const UNIT: u64 = 16;
/// The prior's weight, in parts of a request that never ends.
const PRIOR: u64 = 4;
/// Requests, when counts are halved.
const WINDOW: u64 = 2048;
/// A share of 1, as the table holds shares.
const ONE: u64 = 1 << 30;

/// The lengths of one tenant's outputs.
#[derive(Debug)]
pub(crate) struct Lengths {
    /// By bucket: that ended in it, and that left in it in any way; in parts.
    ended: Box<[u64]>,
    left: Box<[u64]>,
    /// The sum of `left`.
    num_left: u64,
    /// Past the last bucket that anything was counted in.
    num_used: usize,
    num_seen: u64,
    num_since_made: u64,
    /// The share that gets past the start of each bucket, up to `last_made`; behind it none was seen to end.
    survival: Box<[u64]>,
    last_made: usize,
}

/// Where `num_tokens` falls.
fn bucket(num_tokens: u32) -> usize {
    if num_tokens < 8 {
        return num_tokens as usize;
    }
    let octave = num_tokens.ilog2() as usize;
    (octave - 2) * 8 + ((num_tokens >> (octave - 3)) & 7) as usize
}

/// The shortest length of a bucket.
fn start(bucket: usize) -> u64 {
    if bucket < 8 {
        bucket as u64
    } else {
        (8 + (bucket as u64 & 7)) << ((bucket >> 3) - 1)
    }
}

impl Lengths {
    pub(crate) fn new() -> Self {
        let zeros = || vec![0; NUM_BUCKETS].into_boxed_slice();
        let mut lengths = Self {
            ended: zeros(),
            left: zeros(),
            num_left: 0,
            num_used: 0,
            num_seen: 0,
            num_since_made: 0,
            survival: zeros(),
            last_made: 0,
        };
        lengths.make_table();
        lengths
    }

    /// A request got `num_output` tokens; `has_ended` says that it wanted no more.
    pub(crate) fn observe(&mut self, num_output: u32, has_ended: bool) {
        let at = bucket(num_output);
        self.num_used = self.num_used.max(at + 1);
        self.left[at] += UNIT;
        self.num_left += UNIT;
        self.ended[at] += if has_ended { UNIT } else { 0 };
        self.num_seen += 1;
        self.num_since_made += 1;
        if self.num_seen >= WINDOW {
            for parts in self.ended.iter_mut().chain(&mut *self.left) {
                *parts /= 2;
            }
            self.num_left = self.left.iter().sum();
            self.num_seen /= 2;
        }
        if self.num_since_made * 8 > self.num_seen {
            self.make_table();
        }
    }

    /// Output tokens in all of a request that has `num_output` and may have `max_output` (more than that): the length that
    /// half of those that got as far get past. The median: lengths are skewed, and a mean would keep the many short ones
    /// in the forecast long after they have ended.
    pub(crate) fn predict(&self, num_output: u32, max_output: u32) -> u32 {
        let half = self.survival_at(num_output) / 2;
        // The first bucket at whose end no more than half are left.
        let made = &self.survival[..=self.last_made];
        let bucket = made[1..].partition_point(|&share| share > half);
        if bucket == self.last_made {
            return max_output;
        }
        let (from, to) = (made[bucket], made[bucket + 1]);
        let (low, high) = (start(bucket), start(bucket + 1));
        let num_tokens = low + ((from - half) * (high - low)).div_ceil(from - to);
        num_tokens.clamp(u64::from(num_output) + 1, max_output.into()) as u32
    }

    /// The share that gets past `num_tokens`, between two buckets' starts by the rule of three.
    fn survival_at(&self, num_tokens: u32) -> u64 {
        let bucket = bucket(num_tokens);
        if bucket >= self.last_made {
            return self.survival[self.last_made];
        }
        let (low, high) = (start(bucket), start(bucket + 1));
        let part = u64::from(num_tokens) - low;
        let (from, to) = (self.survival[bucket], self.survival[bucket + 1]);
        (from * (high - low - part) + to * part) / (high - low)
    }

    /// Kaplan and Meier: of those that reach a bucket, the share that ends in it.
    fn make_table(&mut self) {
        let mut at_risk = self.num_left + PRIOR;
        let mut survival = ONE;
        let counts = self.ended.iter().zip(&*self.left).take(self.num_used);
        for (share, (ended, left)) in self.survival.iter_mut().zip(counts) {
            *share = survival;
            survival -= survival * ended / at_risk;
            at_risk -= left;
        }
        self.last_made = self.num_used;
        self.survival[self.last_made] = survival;
        self.num_since_made = 0;
    }
}
