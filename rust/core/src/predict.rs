//! How long outputs get: a streaming histogram of lengths, and what it says of a request that has some tokens already.
//!
//! Lengths fall into eight buckets an octave. A request that was cut (by its limit, a client, an error) counts as *at
//! least* as long as it got. The prior: as if one request in [`PRIOR`] had no end, so that before any history the
//! prediction is the limit. Old lengths fade: the counts are halved when there are [`WINDOW`] of them. All of it is integer
//! arithmetic, so that a replay agrees on every machine.
//!
//! Costs: O(1) a prediction and an observation, but that the tables are made anew, O(buckets), when a sixteenth of what
//! they were made of has come in.

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
/// A share of 1, as the tables hold shares.
const ONE: u64 = 1 << 30;

/// The lengths of one tenant's outputs.
#[derive(Debug)]
pub(crate) struct Lengths {
    /// By bucket: that ended in it, and that left in it in any way; in parts.
    ended: Box<[u64]>,
    left: Box<[u64]>,
    num_seen: u64,
    num_since_made: u64,
    /// The share that gets past the start of each bucket.
    survival: Box<[u64]>,
    /// The sum of that share over all tokens before each bucket: the mean length, cut there.
    mean_until: Box<[u64]>,
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
            num_seen: 0,
            num_since_made: 0,
            survival: zeros(),
            mean_until: zeros(),
        };
        lengths.make_tables();
        lengths
    }

    /// A request got `num_output` tokens; `has_ended` says that it wanted no more.
    pub(crate) fn observe(&mut self, num_output: u32, has_ended: bool) {
        let at = bucket(num_output);
        self.left[at] += UNIT;
        self.ended[at] += if has_ended { UNIT } else { 0 };
        self.num_seen += 1;
        self.num_since_made += 1;
        if self.num_seen >= WINDOW {
            for parts in self.ended.iter_mut().chain(&mut *self.left) {
                *parts /= 2;
            }
            self.num_seen /= 2;
        }
        if self.num_since_made * 16 > self.num_seen {
            self.make_tables();
        }
    }

    /// Output tokens in all of a request that has `num_output` and may have `max_output` (more than that): the mean of
    /// those that got as far, rounded up.
    pub(crate) fn predict(&self, num_output: u32, max_output: u32) -> u32 {
        let (share, mean) = self.at(num_output);
        let (_, limit) = self.at(max_output);
        let num_more = (limit - mean).div_ceil(share.max(1)).max(1);
        let room = max_output - num_output;
        num_output + num_more.min(room.into()) as u32
    }

    /// The survival and the cut mean at `num_tokens`, between two buckets' starts by the rule of three.
    fn at(&self, num_tokens: u32) -> (u64, u64) {
        let bucket = bucket(num_tokens);
        let (low, high) = (start(bucket), start(bucket + 1));
        let part = u64::from(num_tokens) - low;
        let between = |table: &[u64]| {
            let (from, to) = (table[bucket], table[bucket + 1]);
            (from * (high - low - part) + to * part) / (high - low)
        };
        // A mean may be 2^60, and a bucket 2^26 wide.
        let (from, to) = (self.mean_until[bucket], self.mean_until[bucket + 1]);
        let mean = from + (to - from) / (high - low) * part;
        (between(&self.survival), mean)
    }

    /// Kaplan and Meier: of those that reach a bucket, the share that ends in it.
    fn make_tables(&mut self) {
        let mut at_risk = self.left.iter().sum::<u64>() + PRIOR;
        let (mut survival, mut mean) = (ONE, 0);
        for bucket in 0..NUM_BUCKETS {
            self.survival[bucket] = survival;
            self.mean_until[bucket] = mean;
            let next = survival - survival * self.ended[bucket] / at_risk;
            mean += (start(bucket + 1) - start(bucket)) * u64::midpoint(survival, next);
            survival = next;
            at_risk -= self.left[bucket];
        }
        self.num_since_made = 0;
    }
}
