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
mod leave;
mod line;
mod own;
mod pass;
mod pins;
mod plan;
mod quarantine;
mod residents;
mod submit;
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
use crate::event::{Event, EventLog};
use crate::host_pool::HostPool;
use crate::ids::{Handle, Seat, Slot, StepId};
use crate::kv::Kv;
use crate::kv_events::KvEvents;
use crate::layout::StepLayout;
use crate::policy::KeyPolicy;
use crate::prefix_cache::ChainHasher;
use crate::queue::{Turn, WaitQueue};
use crate::record::{RecordRing, StepRecord};
use crate::recording::Recorder;
use crate::sequence::{Sequence, State};
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
