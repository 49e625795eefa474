//! Steady decode, as every bench of the scheduler sees it: each running sequence decodes a token a step, 1% of the rows
//! end in each step, and requests with new prompts take their places.

use std::collections::VecDeque;

use noria_core::{Config, Drafts, KeyPolicy, Planned, Request, Scheduler, StepId, flags, header};

/// Tokens of each prompt; no two prompts share a block.
pub(crate) const PROMPT_TOKENS: usize = 128;
/// Output tokens of each request, so that 1% of the rows end in each step.
pub(crate) const OUTPUT_TOKENS: u32 = 100;
const BLOCK_SIZE: u32 = 16;
const DEPTH: u32 = 2;
const VOCAB_SIZE: i32 = 49_152;
/// Checked on every token, and never sampled.
const STOP_ID: i32 = 2;
/// Turns until evictions, finishes and admissions are the same in each.
const WARM_TURNS: u32 = 3 * OUTPUT_TOKENS;

/// What a turn asks of the core.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verb {
    Submit,
    Plan,
    Commit,
}

/// Measures the core's part of a turn; what the caller does in between is not in it.
pub(crate) trait Meter {
    fn measure<T>(&mut self, verb: Verb, call: impl FnOnce() -> T) -> T;
}

/// Measures nothing.
pub(crate) struct Unmeasured;

impl Meter for Unmeasured {
    fn measure<T>(&mut self, _verb: Verb, call: impl FnOnce() -> T) -> T {
        call()
    }
}

/// `SplitMix64`: ids that look like no pattern, the same in every run.
pub(crate) struct Ids(u64);

impl Ids {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// An id that stops nothing.
    pub(crate) fn draw(&mut self) -> i32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let first = i64::from(STOP_ID) + 1;
        let span = i64::from(VOCAB_SIZE) - first;
        (first + (mixed >> 33) as i64 % span) as i32
    }
}

/// A core in steady decode, at the depth and block size of the engine's defaults.
pub(crate) struct SteadyDecode {
    pub(crate) core: Scheduler,
    num_wanted: u32,
    num_submitted: u64,
    num_tenants: u64,
    ids: Ids,
    /// Steps planned and their buffers, oldest first.
    pub(crate) in_flight: VecDeque<(StepId, Vec<i32>)>,
    spare: Vec<Vec<i32>>,
    num_ids: Vec<i32>,
    sampled: Vec<i32>,
}

impl SteadyDecode {
    /// A core with `running` sequences, warm.
    pub(crate) fn new(running: u32, num_tenants: u64, key: KeyPolicy) -> Self {
        let longest = PROMPT_TOKENS as u32 + OUTPUT_TOKENS;
        let core = Scheduler::new(Config {
            // Every table fits at its longest, so nobody is preempted; the rest fills with cached blocks, so that
            // each new block is an eviction.
            num_blocks: running * longest.div_ceil(BLOCK_SIZE) + 64,
            block_size: BLOCK_SIZE,
            max_num_seqs: running,
            // Room for twice the newcomers of a step, so that no prompt is cut.
            max_num_batched_tokens: running + PROMPT_TOKENS as u32 * (running / 50).max(4),
            vocab_size: VOCAB_SIZE as u32,
            depth: DEPTH,
            key,
            ..Config::default()
        })
        .expect("the configuration is valid");
        let spare = (0..=DEPTH).map(|_| vec![0; core.layout().size]).collect();
        let mut steady = Self {
            core,
            num_wanted: 0,
            num_submitted: 0,
            num_tenants,
            ids: Ids::new(running.into()),
            in_flight: VecDeque::new(),
            spare,
            num_ids: Vec::new(),
            sampled: Vec::new(),
        };
        for turn in 1..=WARM_TURNS {
            // As many join in each step of the first lives, so that as many end in each step for ever.
            steady.num_wanted = (running * turn).div_ceil(OUTPUT_TOKENS).min(running);
            steady.turn(&mut Unmeasured);
        }
        steady
    }

    /// Replaces what ended, plans up to the depth, and commits the oldest step; the rows committed.
    pub(crate) fn turn(&mut self, meter: &mut impl Meter) -> u32 {
        while self.core.num_running() + self.core.num_waiting() < self.num_wanted {
            self.submit(meter);
        }
        while self.plan(meter) {}
        self.commit(meter)
    }

    /// Panics unless the last steps were what this bench is about.
    pub(crate) fn assert_steady(&self) {
        let records: Vec<_> = self.core.records().collect();
        let last = &records[records.len() - OUTPUT_TOKENS as usize..];
        let sum = |field: fn(&noria_core::StepRecord) -> i64| -> i64 {
            last.iter().map(|record| field(record)).sum()
        };
        let num_rows = sum(|record| record.num_rows);
        assert_eq!(sum(|record| record.num_preempted), 0, "nobody is preempted");
        assert_eq!(
            sum(|record| record.num_prefix_hit_tokens),
            0,
            "no prompt is known"
        );
        assert_eq!(
            sum(|record| record.num_sample_rows),
            num_rows,
            "each row samples"
        );
        assert_eq!(
            sum(|record| record.num_free_blocks),
            0,
            "each new block is an eviction"
        );
        let num_finished = sum(|record| record.num_finished);
        assert!(
            (num_finished * 100 - num_rows).abs() * 50 <= num_rows,
            "1% of the rows end: {num_finished} of {num_rows}"
        );
    }

    fn submit(&mut self, meter: &mut impl Meter) {
        let prompt: [i32; PROMPT_TOKENS] = std::array::from_fn(|_| self.ids.draw());
        let request = Request {
            stop_token_ids: &[STOP_ID],
            tenant: self.num_submitted % self.num_tenants,
            ..Request::new(&prompt, OUTPUT_TOKENS.into())
        };
        self.num_submitted += 1;
        let core = &mut self.core;
        meter
            .measure(Verb::Submit, || core.submit(0, &request))
            .expect("the request fits");
    }

    /// Plans a step, unless the depth is reached.
    fn plan(&mut self, meter: &mut impl Meter) -> bool {
        let Some(mut buffer) = self.spare.pop() else {
            return false;
        };
        let core = &mut self.core;
        if core.num_in_flight() == DEPTH {
            self.spare.push(buffer);
            return false;
        }
        let planned = meter.measure(Verb::Plan, || core.plan(0, &Drafts::none(), &mut buffer));
        let Planned::Step(step) = planned else {
            panic!("steady decode always has a step to plan")
        };
        self.in_flight.push_back((step, buffer));
        true
    }

    fn commit(&mut self, meter: &mut impl Meter) -> u32 {
        let (step, buffer) = self.in_flight.pop_front().expect("a step is in flight");
        let num_rows = buffer[header::NUM_ROWS] as usize;
        let row_flags = &buffer[self.core.layout().offset_row_flags..][..num_rows];
        self.num_ids.clear();
        self.num_ids
            .extend(row_flags.iter().map(|flag| flag & flags::SAMPLES));
        let num_sampled = self.num_ids.iter().sum::<i32>();
        self.sampled.clear();
        self.sampled
            .extend((0..num_sampled).map(|_| self.ids.draw()));
        let (core, num_ids, sampled) = (&mut self.core, &self.num_ids, &self.sampled);
        meter
            .measure(Verb::Commit, || core.commit(step, num_ids, sampled, 0, 0))
            .expect("the ids match the step");
        self.spare.push(buffer);
        num_rows as u32
    }
}
