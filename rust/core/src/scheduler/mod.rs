//! The scheduler: six verbs over sequences, queue and KV memory.
//!
//! Owns: no preempted row is in a plan; bounded work a plan; progress or an explicit reject; budgets never exceeded.
//! `plan` walks residents once, `commit` its step's rows once; what leaves or enters costs its own rows and blocks.

mod adapters;
mod admit;
mod ageing;
mod commit;
mod compact;
mod deadlines;
mod fail;
mod forecast;
mod line;
mod own;
mod pass;
mod pins;
mod plan;
mod quarantine;
mod residents;
mod swap;
mod victim;
mod window;
mod write;

use alloc::vec::Vec;

pub use commit::CommitError;
pub use compact::ResizeError;
pub use pins::PinError;

use crate::accounts::Accounts;
use crate::arena::Arena;
use crate::config::{Config, ConfigError};
use crate::cost::CostModel;
use crate::event::{Event, EventKind, EventLog};
use crate::host_pool::HostPool;
use crate::ids::{Handle, Seat, Slot, StepId};
use crate::kv::Kv;
use crate::kv_events::KvEvents;
use crate::layout::StepLayout;
use crate::policy::{Admission, Key, KeyPolicy};
use crate::prefix_cache::{BlockHash, ChainHasher};
use crate::queue::{Turn, WaitQueue};
use crate::record::{RecordRing, StepRecord};
use crate::recording::Recorder;
use crate::request::{FinishReason, Reject, Request};
use crate::sequence::{Sequence, Standing, State};
use crate::step::StepRing;
use adapters::Adapters;
use ageing::Ageing;
use deadlines::Deadlines;
use forecast::Forecast;
use own::Own;
use pass::Pass;
use pins::Pins;
use quarantine::Quarantine;
use residents::Residents;

/// What [`Scheduler::plan`] decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planned {
    /// A step: its buffer is written.
    Step(StepId),
    /// Nothing to do until a submit or an update.
    Idle,
    /// Nothing to do until this step is committed, or fails.
    Waiting(StepId),
}

/// Draft tokens for rows of the next step; see DESIGN.md 2.6. Those that cannot be used are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drafts<'a> {
    /// For whom.
    pub handles: &'a [Handle],
    /// How many for each.
    pub counts: &'a [i32],
    /// Their ids, one after another; `None` where the device makes them.
    pub ids: Option<&'a [i32]>,
}

impl Drafts<'_> {
    /// No drafts.
    pub fn none() -> Self {
        Self {
            handles: &[],
            counts: &[],
            ids: None,
        }
    }
}

/// The decision core. See the crate's documentation.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: Config,
    pub(crate) layout: StepLayout,
    pub(crate) arena: Arena<Sequence>,
    pub(crate) queue: WaitQueue,
    pub(crate) kv: Kv,
    pub(crate) host: HostPool,
    pub(crate) pins: Pins,
    hasher: ChainHasher,
    pub(crate) free_seats: Vec<Seat>,
    pub(crate) residents: Residents,
    pub(crate) steps: StepRing,
    /// Seats given up since the last step was written.
    pub(crate) lost: Vec<Seat>,
    pub(crate) num_running: u32,
    pub(crate) num_parked: u32,
    pub(crate) accounts: Accounts,
    pub(crate) ageing: Ageing,
    forecast: Forecast,
    pub(crate) adapters: Adapters,
    pub(crate) deadlines: Deadlines,
    own: Own,
    cost: CostModel,
    /// Steps in a row that left out a sequence that could decode.
    num_paused_steps: u32,
    /// Where the round of scores that are looked up again has got to.
    refreshed: Option<Turn>,
    /// Blocks that those running can ever need; and by the bands of their keys, in order.
    pub(crate) num_limit_blocks: u64,
    pub(crate) band_limits: Vec<(i64, u64)>,
    /// Blocks that those waiting can ever need.
    pub(crate) num_demanded_blocks: u64,
    /// Tokens of those that wait or are parked, as they had them when they came.
    pub(crate) num_queued_tokens: u64,
    quarantine: Quarantine,
    pass: Pass,
    /// Counts for the next step's record.
    tally: StepRecord,
    events: EventLog,
    records: RecordRing,
    recorder: Option<Recorder>,
    next_step: u64,
    next_arrival: u64,
    /// For tests: the block that was moved last without need.
    next_forced: u32,
}

impl Scheduler {
    /// A scheduler with an empty pool.
    ///
    /// # Errors
    /// A value is out of its range.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let config = config.validated()?;
        let layout = StepLayout::new(&config);
        let seats = config.max_num_seqs;
        let max_filled = layout.max_num_batched_tokens / layout.block_size + layout.max_num_seqs;
        let mut kv = Kv::new(
            config.num_blocks,
            config.block_size,
            seats,
            config.max_blocks_per_seq(),
        );
        kv.events = KvEvents::new(config.num_kv_events, config.block_size);
        Ok(Self {
            arena: Arena::new(),
            queue: WaitQueue::new(config.key == KeyPolicy::Fair),
            kv,
            host: HostPool::new(config.num_swap_blocks),
            pins: Pins::default(),
            hasher: ChainHasher::new(config.hash_seed),
            free_seats: (0..seats).rev().map(Seat).collect(),
            residents: Residents::with_capacity(seats as usize),
            steps: StepRing::new(config.depth as usize, layout.max_rows, max_filled),
            lost: Vec::with_capacity(seats as usize),
            num_running: 0,
            num_parked: 0,
            accounts: Accounts::default(),
            ageing: Ageing::default(),
            forecast: Forecast::new(config.block_size),
            adapters: Adapters::default(),
            deadlines: Deadlines::default(),
            own: Own::default(),
            cost: CostModel::default(),
            num_paused_steps: 0,
            refreshed: None,
            num_limit_blocks: 0,
            band_limits: Vec::new(),
            num_demanded_blocks: 0,
            num_queued_tokens: 0,
            quarantine: Quarantine::default(),
            pass: Pass::new(&layout, max_filled),
            tally: StepRecord::default(),
            events: EventLog::with_capacity(layout.max_events),
            records: RecordRing::new(config.num_records as usize),
            recorder: None,
            next_step: 1,
            next_arrival: 0,
            next_forced: 0,
            config,
            layout,
        })
    }

    /// The same, keeping a recording of every verb from here on.
    ///
    /// # Errors
    /// As [`Scheduler::new`].
    pub fn recorded(config: Config) -> Result<Self, ConfigError> {
        let mut scheduler = Self::new(config)?;
        scheduler.recorder = Some(Recorder::new(&scheduler.config));
        Ok(scheduler)
    }

    /// Every verb so far, for [`replay`](crate::replay); empty unless it is recorded.
    pub fn recording(&self) -> &[u8] {
        self.recorder.as_ref().map_or(&[], Recorder::bytes)
    }

    /// Queues a request. O(prompt), plus O(log waiting).
    ///
    /// # Errors
    /// The request can never run, or the queue is full; nothing of it is kept.
    pub fn submit(&mut self, now_us: u64, request: &Request<'_>) -> Result<Handle, Reject> {
        if let Some(recorder) = &mut self.recorder {
            recorder.submit(now_us, request);
        }
        self.events.begin_silent();
        let max_output = self.admissible(request)?;
        let account = self.accounts.open(request.tenant);
        let num_tokens = request.prompt_token_ids.len() as u32 + max_output - 1;
        let standing = Standing {
            num_limit_blocks: self.config.held_blocks_for(num_tokens),
            ..Standing::new(request, account, self.next_arrival, now_us)
        };
        self.next_arrival += 1;
        let salt = self.root(request.cache_salt, request.adapter);
        let sequence = Sequence::new(request, standing, max_output, salt);
        let handle = self.arena.insert(sequence);
        self.note_deadline(handle.slot());
        if request.parked {
            self.num_parked += 1;
            self.num_queued_tokens += request.prompt_token_ids.len() as u64;
        } else {
            self.note_wait(handle.slot());
            self.enqueue(handle.slot());
        }
        Ok(handle)
    }

    /// The root of the hashes of a request's prefixes; what another adapter computed is never found.
    fn root(&self, cache_salt: BlockHash, adapter: u64) -> BlockHash {
        if adapter == 0 {
            return cache_salt;
        }
        // No token is -1, so no prefix has this hash.
        let words = [-1, adapter as i32, (adapter >> 32) as i32];
        self.hasher.chain(cache_salt, &words)
    }

    /// The output tokens that the request may have, or why it can never run.
    fn admissible(&self, request: &Request<'_>) -> Result<u32, Reject> {
        let prompt = request.prompt_token_ids;
        let config = &self.config;
        if prompt.is_empty() {
            return Err(Reject::EmptyPrompt);
        }
        if request.max_tokens < 1 {
            return Err(Reject::MaxTokens {
                value: request.max_tokens,
            });
        }
        if prompt.len() >= config.max_model_len as usize {
            return Err(Reject::PromptTooLong {
                num_tokens: prompt.len(),
                limit: config.max_model_len - 1,
            });
        }
        if let Some(position) = config.first_foreign(prompt) {
            return Err(Reject::TokenOutOfRange {
                token: prompt[position],
                position,
                vocab_size: config.vocab_size,
            });
        }
        let room = config.max_model_len - prompt.len() as u32;
        let max_output = request.max_tokens.min(room.into()) as u32;
        // The last output token is never computed, so it needs no slot.
        let num_blocks = config.held_blocks_for(prompt.len() as u32 + max_output - 1);
        let limit = config.num_blocks - self.num_pinned_blocks();
        if num_blocks > limit {
            return Err(Reject::NeverFits { num_blocks, limit });
        }
        if self.queue.len() as u64 + u64::from(self.num_parked) >= config.max_queued.into() {
            return Err(Reject::QueueFull {
                limit: config.max_queued,
            });
        }
        let num_tokens = self.num_queued_tokens + prompt.len() as u64;
        if self.num_queued_tokens > 0 && num_tokens > config.max_queued_tokens {
            return Err(Reject::QueueTokensFull {
                num_tokens,
                limit: config.max_queued_tokens,
            });
        }
        Ok(max_output)
    }

    /// Ends a request for a reason that was found outside; `false` if it had ended. Idempotent.
    /// `num_output_tokens` is where its text ends, which may be before what was committed; more than that is cut to it.
    pub fn finish(
        &mut self,
        handle: Handle,
        num_output_tokens: u32,
        reason: FinishReason,
        now_us: u64,
    ) -> bool {
        if let Some(recorder) = &mut self.recorder {
            recorder.finish(handle, num_output_tokens, reason, now_us);
        }
        self.events.begin_silent();
        let Some(slot) = self.live(handle) else {
            return false;
        };
        let num_output = num_output_tokens.min(self.arena[slot].num_output());
        self.end(slot, reason, num_output);
        true
    }

    /// Update: a parked request joins the queue, in the place that its arrival gives it. `false` if it is not parked.
    pub fn unpark(&mut self, handle: Handle, now_us: u64) -> bool {
        if let Some(recorder) = &mut self.recorder {
            recorder.unpark(handle, now_us);
        }
        self.events.begin_silent();
        let Some(slot) = self
            .live(handle)
            .filter(|&slot| self.arena[slot].state == State::Parked)
        else {
            return false;
        };
        let sequence = &mut self.arena[slot];
        sequence.state = State::Waiting;
        self.num_queued_tokens -= u64::from(sequence.num_prompt);
        self.num_parked -= 1;
        self.note_wait(slot);
        self.enqueue(slot);
        true
    }

    /// Update: a request waited too long. `false` if it had ended.
    pub fn expire(&mut self, handle: Handle, now_us: u64) -> bool {
        let num_output = self
            .live(handle)
            .map_or(0, |slot| self.arena[slot].num_output());
        self.finish(handle, num_output, FinishReason::Expired, now_us)
    }

    /// Update: nothing computed before can be found again. Returns the blocks that came free. O(blocks).
    pub fn reset_prefix_cache(&mut self, now_us: u64) -> u32 {
        if let Some(recorder) = &mut self.recorder {
            recorder.reset_prefix_cache(now_us);
        }
        self.events.begin_silent();
        let before = self.kv.pool.num_free();
        for block in 1..=self.kv.pool.num_ever() {
            self.kv.unregister(crate::ids::BlockId(block));
        }
        self.kv.pool.num_free() - before
    }

    /// The slot of a request that has not ended.
    fn live(&self, handle: Handle) -> Option<Slot> {
        self.arena
            .slot(handle)
            .filter(|&slot| !self.arena[slot].is_ghost())
    }

    /// Ends a live sequence wherever it is.
    fn end(&mut self, slot: Slot, reason: FinishReason, num_output: u32) {
        let handle = self.arena.handle(slot);
        self.events.push(
            handle,
            EventKind::Finished,
            reason as i64,
            num_output.into(),
        );
        let sequence = &self.arena[slot];
        let num_output = num_output.min(sequence.num_output());
        let (account, wanted_no_more) = (sequence.standing.account, reason == FinishReason::Stop);
        self.accounts.close(account);
        self.drop_deadline(slot);
        if num_output > 0 && self.predicts() {
            self.accounts.learn(account, num_output, wanted_no_more);
        }
        let sequence = &mut self.arena[slot];
        match sequence.state {
            State::Parked => {
                self.num_parked -= 1;
                self.num_queued_tokens -= u64::from(sequence.num_prompt);
            }
            State::Waiting => {
                self.dequeue(slot);
                self.drop_swapped(slot);
            }
            State::Running(seat) if self.config.admission == Admission::StaticPadded => {
                sequence.state = State::Ghost(seat);
                sequence.plain_until = 0;
                sequence.quiet_until = 0;
                sequence.confinement = None;
                self.note_exit(slot);
                if self.num_running == 0 {
                    self.release_ghosts();
                }
                return;
            }
            State::Running(seat) => {
                let key = sequence.key;
                self.note_exit(slot);
                self.give_up(seat, key);
            }
            State::Ghost(_) => unreachable!("a ghost has ended"),
        }
        self.arena.remove(slot);
    }

    /// Takes a running sequence's seat and blocks in a plan; it waits again, in its old place.
    fn preempt(&mut self, slot: Slot) {
        self.displace(slot, self.config.num_swap_blocks > 0);
    }

    /// The same; if it `is_swapped`, its KV is copied to the host where there is room.
    fn displace(&mut self, slot: Slot, is_swapped: bool) {
        let sequence = &mut self.arena[slot];
        let State::Running(seat) = sequence.state else {
            unreachable!("only a running sequence is preempted");
        };
        if sequence.decodes_in(self.pass.serial) {
            sequence.withdraw();
            self.pass.num_left += 1 + sequence.row.num_drafts;
            self.pass.has_withdrawn = true;
        }
        let (key, mut num_lost) = (sequence.key, sequence.num_planned);
        self.pass.debt -= sequence.row.debt;
        if is_swapped {
            num_lost -= self.try_swap_out(slot, seat);
        }
        let sequence = &mut self.arena[slot];
        sequence.end_residency();
        sequence.state = State::Waiting;
        sequence.num_preemptions += 1;
        sequence.preempted_in = self.pass.serial;
        self.note_exit(slot);
        self.forecast.remove(self.arena.handle(slot));
        self.note_wait(slot);
        self.enqueue(slot);
        self.note_wear(slot);
        self.tally.num_preempted += 1;
        self.tally.num_preempted_tokens += i64::from(num_lost);
        self.events.push(
            self.arena.handle(slot),
            EventKind::Preempted,
            num_lost.into(),
            self.next_step as i64,
        );
        self.give_up(seat, key);
    }

    /// A sequence runs no more.
    fn note_exit(&mut self, slot: Slot) {
        self.num_running -= 1;
        self.num_limit_blocks -= u64::from(self.limit_blocks(slot));
        self.leave_band(slot);
        self.adapters.leave(self.arena[slot].standing.adapter);
    }

    fn give_up(&mut self, seat: Seat, key: Key) {
        self.kv.release(seat);
        self.free_seats.push(seat);
        self.lost.push(seat);
        self.residents.note_departure(key);
    }

    /// The padded gang has ended: its finished rows leave.
    fn release_ghosts(&mut self) {
        for i in 0..self.residents.len() {
            let resident = *self.residents.get(i);
            if resident.has_left() {
                continue;
            }
            let slot = resident.handle.slot();
            if let State::Ghost(seat) = self.arena[slot].state {
                self.give_up(seat, resident.key);
                self.arena.remove(slot);
            }
        }
    }

    /// Where everything lies in a step buffer.
    pub fn layout(&self) -> &StepLayout {
        &self.layout
    }

    /// What it was built from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What the last `plan` or `commit` reported.
    pub fn events(&self) -> &[Event] {
        self.events.as_slice()
    }

    /// The last records, oldest first.
    pub fn records(&self) -> impl Iterator<Item = &StepRecord> {
        self.records.iter()
    }

    /// What a step takes, as fitted for [`Config::step_target_us`]: nanoseconds whatever its size, for a token, and for
    /// 1,024 keys that its queries attend to.
    pub fn step_cost_ns(&self) -> [u64; 3] {
        self.cost.figures()
    }

    /// KV memory.
    pub fn kv(&self) -> &Kv {
        &self.kv
    }

    /// Requests in the queue, preempted ones included.
    pub fn num_waiting(&self) -> u32 {
        self.queue.len() as u32
    }

    /// Requests out of line.
    pub fn num_parked(&self) -> u32 {
        self.num_parked
    }

    /// Requests with a seat.
    pub fn num_running(&self) -> u32 {
        self.num_running
    }

    /// Steps planned and not yet committed.
    pub fn num_in_flight(&self) -> u32 {
        self.steps.len() as u32
    }

    /// Blocks held by a table, or pinned.
    pub fn num_held_blocks(&self) -> u32 {
        self.kv.pool.num_blocks() - self.kv.num_available()
    }
}
