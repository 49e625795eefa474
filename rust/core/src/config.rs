//! The configuration, checked once.

use crate::policy::{Admission, KeyPolicy, Share};

/// What a [`Scheduler`](crate::Scheduler) is built from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// KV blocks that sequences can use; block 0 (padding) is not one of them.
    pub num_blocks: u32,
    /// Tokens a block.
    pub block_size: u32,
    /// Seats: sequences that run at once.
    pub max_num_seqs: u32,
    /// Tokens a step; at least one a seat.
    pub max_num_batched_tokens: u32,
    /// Tokens a sequence, prompt and output together.
    pub max_model_len: u32,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Steps in flight, 1 to 3.
    pub depth: u32,
    /// Draft tokens a row, at most.
    pub max_drafts: u32,
    /// Prefills that may be left unfinished in one step.
    pub max_partial_prefills: u32,
    /// Prompt tokens that one request may take of a step; 0 for no such limit.
    pub long_prefill_token_threshold: u32,
    /// Whether filled blocks can be found again.
    pub enable_prefix_caching: bool,
    /// Blocks that an admission leaves unused while something runs.
    pub watermark_blocks: u32,
    /// Who is next.
    pub key: KeyPolicy,
    /// Who may enter.
    pub admission: Admission,
    /// Under [`Admission::Peak`]: how high the peak may be for a request's first admission, in hundredths of the pool.
    /// More than 100 trades tokens computed again for fewer steps; ends then are not spaced.
    pub peak_percent: u32,
    /// Who gets a step's tokens first.
    pub share: Share,
    /// Microseconds that a step should take at most, as learned from the steps before; prompts are cut to it. 0 for no
    /// such target.
    pub step_target_us: u32,
    /// Distinct adapters among those that run, at most; 0 for no limit.
    pub max_adapters: u32,
    /// Under [`KeyPolicy::Prefix`]: plans that a request lets pass, in a wait, while another computes its next block.
    pub max_prefix_waits: u32,
    /// Requests that may wait.
    pub max_queued: u32,
    /// Tokens of theirs that may wait.
    pub max_queued_tokens: u64,
    /// Steps after which a request that waits is due for the tier of the aged; 0 for never.
    pub ageing_steps: u32,
    /// Times that requests of its band may enter before a blocked one; 0 for never.
    pub max_bypasses: u32,
    /// Preemptions after which a request is due for the tier of the aged; 0 for never.
    pub max_preemptions: u32,
    /// What a computed prompt token weighs in a tenant's account.
    pub fair_input_weight: u32,
    /// What an output token weighs in it.
    pub fair_output_weight: u32,
    /// Seeds the prefix cache's hash.
    pub hash_seed: u64,
    /// Step records kept.
    pub num_records: u32,
    /// Blocks that a step moves, at most; with 0 none is ever moved.
    pub max_moves: u32,
    /// For tests: blocks that each step moves though nothing is gained by it.
    pub forced_moves: u32,
    /// Whether each sequence is one run of blocks, reserved whole when it enters.
    pub contiguous: bool,
    /// KV events kept; 0 for none.
    pub num_kv_events: u32,
    /// Tokens that a token sees in every layer, itself included: KV behind them is given back. 0 where some layer sees all.
    pub window: u32,
    /// Blocks of the host's memory, to which the KV of preempted sequences is copied; 0: it is computed again.
    pub num_swap_blocks: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            num_blocks: 1024,
            block_size: 16,
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            max_model_len: 2048,
            vocab_size: i32::MAX as u32,
            depth: 2,
            max_drafts: 0,
            max_partial_prefills: 1,
            long_prefill_token_threshold: 0,
            enable_prefix_caching: true,
            watermark_blocks: 0,
            key: KeyPolicy::Fcfs,
            admission: Admission::Peak,
            peak_percent: 100,
            share: Share::DecodeFirst,
            step_target_us: 0,
            max_adapters: 0,
            max_prefix_waits: 4,
            max_queued: 1 << 20,
            max_queued_tokens: 1 << 40,
            ageing_steps: 1024,
            max_bypasses: 64,
            max_preemptions: 4,
            fair_input_weight: 1,
            fair_output_weight: 2,
            hash_seed: 0,
            num_records: 4096,
            max_moves: 64,
            forced_moves: 0,
            contiguous: false,
            num_kv_events: 0,
            window: 0,
            num_swap_blocks: 0,
        }
    }
}

/// A configuration value out of its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The option.
    pub name: &'static str,
    /// What was given.
    pub value: u64,
    /// What would have been accepted, as a phrase.
    pub expected: &'static str,
}

/// Counts stay below this, so that every sum of two fits an `i32`.
const MAX_COUNT: u32 = 1 << 30;

const MAX_SLOTS: u64 = i32::MAX as u64;

const NUM_RANGES: usize = 19;

impl Config {
    pub(crate) fn validated(self) -> Result<Self, ConfigError> {
        for (name, value, low, high, expected) in self.ranges() {
            if value < low || value > high {
                return Err(ConfigError {
                    name,
                    value: value.into(),
                    expected,
                });
            }
        }
        self.validate_sizes()?;
        Ok(self)
    }

    /// Of each number: its name, itself, the least and the most it may be, and these in words.
    #[allow(clippy::too_many_lines, reason = "a table")]
    fn ranges(&self) -> [(&'static str, u32, u32, u32, &'static str); NUM_RANGES] {
        [
            (
                "num_blocks",
                self.num_blocks,
                1,
                MAX_COUNT,
                "from 1 to 2^30",
            ),
            ("block_size", self.block_size, 1, 4096, "from 1 to 4096"),
            (
                "max_num_seqs",
                self.max_num_seqs,
                1,
                1 << 20,
                "from 1 to 2^20",
            ),
            (
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                self.max_num_seqs,
                MAX_COUNT,
                "at least max_num_seqs (each running sequence decodes one token a step)",
            ),
            (
                "max_model_len",
                self.max_model_len,
                2,
                MAX_COUNT,
                "from 2 to 2^30",
            ),
            (
                "vocab_size",
                self.vocab_size,
                1,
                i32::MAX as u32,
                "from 1 to 2^31 - 1",
            ),
            ("depth", self.depth, 1, 3, "1, 2 or 3"),
            ("max_drafts", self.max_drafts, 0, 64, "from 0 to 64"),
            (
                "max_partial_prefills",
                self.max_partial_prefills,
                1,
                MAX_COUNT,
                "at least 1",
            ),
            (
                "max_queued",
                self.max_queued,
                1,
                MAX_COUNT,
                "from 1 to 2^30",
            ),
            (
                "peak_percent",
                self.peak_percent,
                100,
                1000,
                "from 100 to 1000",
            ),
            (
                "fair_input_weight",
                self.fair_input_weight,
                1,
                1 << 16,
                "from 1 to 65536",
            ),
            (
                "fair_output_weight",
                self.fair_output_weight,
                1,
                1 << 16,
                "from 1 to 65536",
            ),
            (
                "num_records",
                self.num_records,
                1,
                1 << 20,
                "from 1 to 2^20",
            ),
            ("max_moves", self.max_moves, 0, 1 << 16, "from 0 to 2^16"),
            (
                "forced_moves",
                self.forced_moves,
                0,
                if self.contiguous { 0 } else { self.max_moves },
                "from 0 to max_moves, and 0 where sequences are contiguous",
            ),
            (
                "num_kv_events",
                self.num_kv_events,
                0,
                1 << 20,
                "from 0 to 2^20",
            ),
            ("window", self.window, 0, MAX_COUNT, "from 0 to 2^30"),
            (
                "num_swap_blocks",
                self.num_swap_blocks,
                0,
                if self.contiguous || self.admission.is_static() {
                    0
                } else {
                    MAX_COUNT
                },
                "from 0 to 2^30, and 0 where sequences are contiguous or batches are static",
            ),
        ]
    }

    /// Values that are in their ranges may still ask for too much together.
    fn validate_sizes(&self) -> Result<(), ConfigError> {
        // So that every slot, and every place in a table of tables, is an i32.
        let slots = u64::from(self.num_blocks) * u64::from(self.block_size);
        if slots > MAX_SLOTS {
            return Err(ConfigError {
                name: "num_blocks",
                value: self.num_blocks.into(),
                expected: "less than 2^31 tokens in all (num_blocks * block_size)",
            });
        }
        let entries = u64::from(self.max_num_seqs) * u64::from(self.max_blocks_per_seq());
        if entries > MAX_SLOTS {
            return Err(ConfigError {
                name: "max_num_seqs",
                value: self.max_num_seqs.into(),
                expected: "less than 2^31 table entries (max_num_seqs * max_model_len / block_size)",
            });
        }
        if self.contiguous && (self.enable_prefix_caching || self.admission.is_static()) {
            return Err(ConfigError {
                name: "contiguous",
                value: 1,
                expected: "0 where the prefix cache is on or batches are static (blocks of a run are not shared)",
            });
        }
        if self.window > 0 && (self.contiguous || self.admission.is_static()) {
            return Err(ConfigError {
                name: "window",
                value: self.window.into(),
                expected: "0 where sequences are contiguous or batches are static (they keep what they reserve)",
            });
        }
        if self.max_queued_tokens == 0 {
            return Err(ConfigError {
                name: "max_queued_tokens",
                value: 0,
                expected: "at least 1",
            });
        }
        if self.watermark_blocks >= self.num_blocks {
            return Err(ConfigError {
                name: "watermark_blocks",
                value: self.watermark_blocks.into(),
                expected: "less than num_blocks",
            });
        }
        Ok(())
    }

    /// The most blocks that a pool can have.
    pub(crate) fn max_num_blocks(&self) -> u32 {
        MAX_COUNT.min(MAX_SLOTS as u32 / self.block_size)
    }

    /// Where the first of `ids` lies that is not in the vocabulary.
    pub(crate) fn first_foreign(&self, ids: &[i32]) -> Option<usize> {
        let last = (self.vocab_size - 1) as i32;
        // Negative where an id is below 0 or above the last. Without an early exit it is a vector loop.
        let signs = ids
            .iter()
            .fold(0, |signs, &id| signs | id | last.wrapping_sub(id));
        if signs >= 0 {
            return None;
        }
        ids.iter().position(|&id| id < 0 || id > last)
    }

    /// The blocks that `num_tokens` need.
    pub(crate) fn blocks_for(&self, num_tokens: u32) -> u32 {
        num_tokens.div_ceil(self.block_size)
    }

    /// The blocks that a sequence of `num_tokens` holds at once, at most.
    pub(crate) fn held_blocks_for(&self, num_tokens: u32) -> u32 {
        self.held_columns(self.blocks_for(num_tokens))
    }

    /// The blocks that a sequence with a table of `num_columns` holds at once, at most.
    pub(crate) fn held_columns(&self, num_columns: u32) -> u32 {
        match self.window {
            0 => num_columns,
            _ => num_columns.min(self.max_window_blocks()),
        }
    }

    /// Where there is a window: what its tokens and the longest row lie in, and drafts that may be rejected.
    pub(crate) fn max_window_blocks(&self) -> u32 {
        let num_drafted = match self.max_drafts {
            0 => 0,
            num_drafts => self.depth * (num_drafts + 1),
        };
        self.blocks_for(self.window - 1 + self.max_num_batched_tokens + num_drafted) + 1
    }

    /// The first position whose row leaves another block behind than the first `num_behind`.
    pub(crate) fn next_release(&self, num_behind: u32) -> u32 {
        match self.window {
            0 => u32::MAX,
            window => (num_behind + 1) * self.block_size + window - 1,
        }
    }

    /// Leading blocks that a row from position `start` on does not see.
    pub(crate) fn num_blocks_behind(&self, start: u32) -> u32 {
        num_blocks_behind(self.window, self.block_size, start)
    }

    /// Aged requests at once: of the seats, a quarter.
    pub(crate) fn max_aged(&self) -> usize {
        (self.max_num_seqs as usize / 4).max(1)
    }

    /// The longest table a sequence can have.
    pub(crate) fn max_blocks_per_seq(&self) -> u32 {
        self.blocks_for(self.max_model_len)
    }
}

/// Leading blocks of `block_size` that a row from position `start` on does not see; without a window it sees all.
pub(crate) fn num_blocks_behind(window: u32, block_size: u32, start: u32) -> u32 {
    if window == 0 {
        return 0;
    }
    (start + 1).saturating_sub(window) / block_size
}
