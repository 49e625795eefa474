//! Core, runner and ledger together: every verb is applied to all three, and everything is recounted after each.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use noria_core::{
    Admission, BlockHash, BlockId, CommitError, Config, Drafts, Facts, FinishReason, Handle,
    KeyPolicy, KvEventKind, PinError, PinId, Planned, Reads, Reject, ResizeError, Scheduler,
    StepId, flags,
};

use super::ledger::{Account, Ledger};
use super::runner::{Breakage, NullRunner, Sampled};
use super::seen::Seen;
use super::truth::{Ask, Truth};
use super::view::StepView;

/// A policy of one's own, with many ties.
pub(crate) fn own_score(facts: &Facts) -> i64 {
    let numbers = [
        facts.num_uncached,
        facts.num_remaining,
        facts.num_output_tokens,
    ];
    let sum: u32 = numbers.iter().sum();
    i64::from(sum % 5) - 2 - i64::from(facts.num_preemptions)
}

/// What a pin holds.
#[derive(Clone, Debug)]
pub(crate) struct Pinned {
    pub(crate) tokens: Vec<i32>,
    /// Salt and adapter.
    pub(crate) domain: (u128, u64),
    pub(crate) blocks: Vec<BlockId>,
    /// What their slots hold.
    contents: Vec<u64>,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) core: Scheduler,
    pub(crate) config: Config,
    pub(crate) runner: NullRunner,
    pub(crate) ledger: Ledger,
    /// Steps that ran and are not committed.
    pub(crate) sampled: VecDeque<Sampled>,
    /// Whether a step in flight was planned for a quarantine group alone.
    pub(super) is_confined: BTreeMap<u64, bool>,
    /// Who holds which seat, as the buffers say.
    pub(super) holders: Vec<Option<u64>>,
    /// By seat, as the buffers say.
    pub(super) tables: Vec<Vec<u32>>,
    pub(super) buffer: Vec<i32>,
    pub(crate) digests: Vec<u64>,
    pub(crate) num_steps: u64,
    pub(crate) num_failures: u64,
    /// The core asks a policy itself.
    pub(crate) has_policy: bool,
    /// How long the device takes for a step.
    pub(crate) device_us: fn(&StepView) -> u64,
    pub(super) seen: Seen,
    pub(super) last_step: u64,
    discarded: Vec<StepId>,
    now_us: u64,
    /// Of so many verbs one is followed by a recount: one in a test that is about invariants.
    pub(crate) verbs_a_check: u64,
    num_verbs: u64,
    /// KV events read so far, and what they say can be found: by block, the hash and the block's tokens.
    num_heard: u64,
    pub(crate) pins: BTreeMap<PinId, Pinned>,
    findable: BTreeMap<u32, (BlockHash, Vec<i32>)>,
}

impl World {
    pub(crate) fn new(config: &Config) -> Self {
        Self::around(Scheduler::new(config.clone()).expect("the configuration is good"))
    }

    pub(crate) fn recorded(config: &Config) -> Self {
        Self::around(Scheduler::recorded(config.clone()).expect("the configuration is good"))
    }

    /// Around a core that somebody has made.
    pub(crate) fn around(core: Scheduler) -> Self {
        let (config, layout) = (core.config().clone(), *core.layout());
        Self {
            runner: NullRunner::new(&config, &layout),
            ledger: Ledger::default(),
            sampled: VecDeque::new(),
            is_confined: BTreeMap::new(),
            holders: vec![None; layout.max_num_seqs],
            tables: vec![Vec::new(); layout.max_num_seqs],
            buffer: vec![-1; layout.size],
            digests: Vec::new(),
            num_steps: 0,
            num_failures: 0,
            has_policy: false,
            device_us: |_| 7,
            seen: Seen::default(),
            last_step: 0,
            discarded: Vec::new(),
            now_us: 0,
            verbs_a_check: 1,
            num_verbs: 0,
            num_heard: 0,
            pins: BTreeMap::new(),
            findable: BTreeMap::new(),
            config,
            core,
        }
    }

    fn now(&mut self) -> u64 {
        self.now_us += 1;
        self.now_us
    }

    /// Recounts the core, and holds the stream of KV events against what can be found.
    fn check(&mut self) {
        self.num_verbs += 1;
        if !self.num_verbs.is_multiple_of(self.verbs_a_check) {
            return;
        }
        self.core.check();
        self.check_adapters();
        self.check_pins();
        if self.config.num_kv_events == 0 {
            return;
        }
        let events = self.core.kv().events();
        assert!(events.first() <= self.num_heard, "no KV event is missed");
        for (event, tokens) in events.since(self.num_heard) {
            let (block, from) = (event.block.0, event.from.0);
            let before = self.findable.remove(&from);
            match event.kind {
                KvEventKind::Stored => {
                    assert_eq!(before, None, "{event:?}");
                    self.findable.insert(block, (event.hash, tokens.to_vec()));
                }
                KvEventKind::Removed => assert_eq!(before.map(|it| it.0), Some(event.hash)),
                KvEventKind::Moved => {
                    let before = before.expect("what is moved could be found");
                    assert_eq!(before.0, event.hash);
                    assert!(self.findable.insert(block, before).is_none(), "{event:?}");
                }
            }
        }
        self.num_heard = events.num_events();
        let cache = self.core.kv().cache();
        assert_eq!(self.findable.len(), cache.num_registered() as usize);
        for (&block, (hash, tokens)) in &self.findable {
            assert_eq!(cache.find(*hash, tokens), Some(BlockId(block)));
        }
    }

    /// What is pinned lies where it lay, with what it held, whatever has run since.
    fn check_pins(&self) {
        for (&pin, pinned) in &self.pins {
            assert_eq!(self.core.pinned(pin), pinned.blocks);
            let blocks = pinned.blocks.iter();
            let held = blocks.flat_map(|block| self.runner.held(block.0));
            assert!(held.eq(&pinned.contents), "what was pinned is as it was");
        }
    }

    /// No step can need more adapters than the configuration allows.
    fn check_adapters(&self) {
        let running = self
            .ledger
            .live()
            .filter(|(_, account)| account.phase == super::Phase::Running);
        let adapters: BTreeSet<u64> = running
            .map(|(_, account)| account.ask.adapter)
            .filter(|&adapter| adapter != 0)
            .collect();
        let max = self.config.max_adapters as usize;
        assert!(max == 0 || adapters.len() <= max, "{adapters:?}");
    }

    /// When the last verb was applied.
    pub(crate) fn time_us(&self) -> u64 {
        self.now_us
    }

    pub(crate) fn account(&self, handle: u64) -> &Account {
        &self.ledger.accounts[&handle]
    }

    pub(crate) fn try_submit(&mut self, ask: &Ask) -> Result<u64, Reject> {
        let now = self.now();
        let result = self.core.submit(now, &ask.request());
        self.check();
        let handle = result?.to_bits();
        self.ledger.open(handle, ask, &self.config);
        self.runner
            .truths
            .insert(handle, Truth::new(ask, self.config.vocab_size));
        Ok(handle)
    }

    pub(crate) fn submit(&mut self, ask: &Ask) -> u64 {
        self.try_submit(ask).expect("the request is accepted")
    }

    /// Plans without drafts; the step, if there is one.
    pub(crate) fn plan(&mut self) -> Option<StepView> {
        match self.plan_with(&Drafts::none()) {
            Planned::Step(_) => self.runner.queue.back().map(|pending| pending.view.clone()),
            Planned::Idle | Planned::Waiting(_) => None,
        }
    }

    pub(crate) fn plan_with(&mut self, drafts: &Drafts<'_>) -> Planned {
        let now = self.now();
        if self.config.key == KeyPolicy::Own && !self.has_policy {
            self.tell_scores(now);
        }
        self.ledger.expire(now);
        // As in a ring: a step counts on nothing that an earlier one left in its buffer.
        self.buffer.fill(-(now as i32));
        let planned = self.core.plan(now, drafts, &mut self.buffer);
        self.check();
        self.ledger
            .hear(self.core.events(), &mut self.runner.truths);
        self.ledger.check_reported();
        match planned {
            Planned::Step(id) => self.take_step(id),
            Planned::Waiting(id) => assert_eq!(Some(id), self.oldest(), "the oldest is waited for"),
            Planned::Idle => {
                assert_eq!(self.oldest(), None, "nothing is idle with steps in flight");
                let num_open = self.core.num_waiting() + self.core.num_running();
                assert_eq!(num_open, 0, "nothing is idle while a request could run");
            }
        }
        planned
    }

    /// What an engine does for a policy of its user's.
    fn tell_scores(&mut self, now: u64) {
        let reads = Reads {
            num_remaining: true,
            num_uncached: true,
        };
        let facts = self.core.take_changed(reads);
        let handles: Vec<Handle> = facts.iter().map(|facts| facts.handle).collect();
        let scores: Vec<i64> = facts.iter().map(own_score).collect();
        self.core.set_scores(&handles, &scores, now);
        self.check();
        assert_eq!(self.core.num_changed(), 0, "each is asked about once");
    }

    /// What happened so far.
    pub(crate) fn seen(&self) -> Seen {
        let mut seen = self.seen;
        for account in self.ledger.accounts.values() {
            seen.preemptions += u64::from(account.num_preemptions);
            seen.hit_tokens += u64::from(account.num_hit_tokens);
            seen.errors += u64::from(matches!(account.end, Some((FinishReason::Error, _))));
        }
        seen
    }

    /// The oldest step in flight.
    pub(crate) fn oldest(&self) -> Option<StepId> {
        let sampled = self.sampled.front().map(|sampled| sampled.id);
        sampled.or_else(|| self.runner.queue.front().map(|pending| pending.id))
    }

    /// The runner runs its next step, or fails in it where a request breaks it; `false` where none is planned.
    pub(crate) fn run(&mut self) -> bool {
        if self.runner.queue.is_empty() {
            return false;
        }
        if self.runner.next_breaks() {
            self.fail(0, Breakage::Garbage);
        } else {
            let sampled = self.runner.run();
            self.sampled.push_back(sampled);
        }
        true
    }

    /// Fails the step that is `num_before` behind the next to run; those before it run.
    pub(crate) fn fail(&mut self, num_before: usize, breakage: Breakage) {
        for _ in 0..num_before {
            if self.runner.next_breaks() {
                break;
            }
            let sampled = self.runner.run();
            self.sampled.push_back(sampled);
        }
        let lost: Vec<StepId> = self.runner.queue.iter().map(|pending| pending.id).collect();
        let pending = self.runner.fail(breakage);
        self.discarded = lost;
        let is_confined = self.is_confined[&pending.id.0];
        self.ledger.fail(&pending.view, is_confined);
        self.num_failures += 1;
        self.seen.late_failures += u64::from(!self.sampled.is_empty());
        let now = self.now();
        self.core.fail(pending.id, now);
        self.check();
    }

    /// A commit and a fail of every step that the last failure discarded: nothing happens.
    pub(crate) fn poke_discarded(&mut self) {
        for id in core::mem::take(&mut self.discarded) {
            let now = self.now();
            self.core.fail(id, now);
            self.check();
            self.core
                .commit(id, &[], &[], 0, now)
                .expect("a discarded step is ignored");
            self.check();
            self.ledger
                .hear(self.core.events(), &mut self.runner.truths);
            self.ledger.check_reported();
        }
    }

    /// Commits the oldest step that ran; `false` where none did.
    pub(crate) fn commit(&mut self) -> bool {
        self.commit_with(|_, _| true)
    }

    /// The same; rows whose logits wait for a mask sample nothing where `is_supplied` says so.
    pub(crate) fn commit_with(&mut self, is_supplied: impl Fn(u64, usize) -> bool) -> bool {
        let Some(mut sampled) = self.sampled.pop_front() else {
            return false;
        };
        let mut at = 0;
        for (row, of) in sampled.view.rows.iter().enumerate() {
            let num = sampled.num_ids[row] as usize;
            if of.has(flags::HOST_MASKED) && !is_supplied(of.handle, row) {
                sampled.ids.drain(at..at + num);
                sampled.num_ids[row] = 0;
            } else {
                at += num;
            }
        }
        let now = self.now();
        self.core
            .commit(
                sampled.id,
                &sampled.num_ids,
                &sampled.ids,
                (self.device_us)(&sampled.view),
                now,
            )
            .expect("the ids match the step");
        self.check();
        let totals = self
            .ledger
            .commit(&sampled.view, &sampled.num_ids, &sampled.ids);
        self.ledger
            .hear(self.core.events(), &mut self.runner.truths);
        self.ledger.check_reported();
        let record = *self
            .core
            .records()
            .last()
            .expect("a commit leaves a record");
        assert_eq!(record.step, sampled.id.0 as i64);
        assert_eq!(record.num_rows, sampled.view.rows.len() as i64);
        assert_eq!(record.num_tokens, i64::from(sampled.view.num_tokens));
        assert_eq!(record.num_output_tokens, totals.output);
        assert_eq!(record.num_wasted_tokens, totals.wasted);
        assert_eq!(record.num_finished, totals.finished);
        self.seen.wasted_tokens += totals.wasted as u64;
        self.seen.window_blocks += record.num_window_blocks as u64;
        self.seen.swap_misses += record.num_swap_misses as u64;
        assert_eq!(record.num_swapped_out, sampled.view.swap_out.len() as i64);
        assert_eq!(record.num_swapped_in, sampled.view.swap_in.len() as i64);
        self.seen.swapped_out += record.num_swapped_out as u64;
        self.seen.swapped_in += record.num_swapped_in as u64;
        true
    }

    /// A commit that must be refused, and change nothing.
    pub(crate) fn commit_wrongly(
        &mut self,
        step: StepId,
        num_ids: &[i32],
        ids: &[i32],
    ) -> CommitError {
        let now = self.now();
        let error = self
            .core
            .commit(step, num_ids, ids, 0, now)
            .expect_err("it does not match");
        self.check();
        error
    }

    pub(crate) fn finish(&mut self, handle: u64, num_output: u32, reason: FinishReason) -> bool {
        let now = self.now();
        let has_ended = self
            .core
            .finish(Handle::from_bits(handle), num_output, reason, now);
        self.check();
        let is_live = self
            .ledger
            .accounts
            .get(&handle)
            .is_some_and(Account::is_live);
        assert_eq!(has_ended, is_live, "a request ends once");
        if is_live {
            self.ledger.end(handle, reason, num_output);
        }
        has_ended
    }

    pub(crate) fn abort(&mut self, handle: u64) -> bool {
        let num_output = self
            .ledger
            .accounts
            .get(&handle)
            .map_or(0, |account| account.num_output);
        self.finish(handle, num_output, FinishReason::Abort)
    }

    pub(crate) fn expire(&mut self, handle: u64) -> bool {
        let now = self.now();
        let has_ended = self.core.expire(Handle::from_bits(handle), now);
        self.check();
        let account = self
            .ledger
            .accounts
            .get(&handle)
            .filter(|account| account.is_live());
        let num_output = account.map(|account| account.num_output);
        assert_eq!(has_ended, num_output.is_some(), "a request ends once");
        if let Some(num_output) = num_output {
            self.ledger.end(handle, FinishReason::Expired, num_output);
        }
        has_ended
    }

    pub(crate) fn unpark(&mut self, handle: u64) -> bool {
        let now = self.now();
        let was_parked = self.core.unpark(Handle::from_bits(handle), now);
        self.check();
        let account = self
            .ledger
            .accounts
            .get_mut(&handle)
            .filter(|account| account.is_live());
        let expected = account.is_some_and(|account| core::mem::take(&mut account.is_parked));
        assert_eq!(was_parked, expected);
        was_parked
    }

    pub(crate) fn resize(&mut self, num_blocks: u32) -> Result<(), ResizeError> {
        self.runner.reach(num_blocks);
        let now = self.now();
        let before = self.config.num_blocks;
        let result = self.core.resize(num_blocks, now);
        self.check();
        let blocks_at_most = |account: &Account| {
            let num_tokens = account.ask.prompt.len() as u32 + account.max_output - 1;
            let config = &self.config;
            let num_doubtful = match config.max_drafts {
                0 => 0,
                num_drafts => config.depth * (num_drafts + 1),
            };
            let seen = config.window + config.max_num_batched_tokens + num_doubtful - 1;
            let most = match config.window {
                0 => u32::MAX,
                _ => seen.div_ceil(config.block_size) + 1,
            };
            num_tokens.div_ceil(config.block_size).min(most)
        };
        let most = self
            .ledger
            .live()
            .map(|(_, account)| blocks_at_most(account))
            .max();
        match result {
            Ok(()) => {
                assert!(most.unwrap_or(0) + self.core.num_pinned_blocks() <= num_blocks);
                self.config.num_blocks = num_blocks;
                self.seen.shrinks += u64::from(num_blocks < before && self.core.is_shrinking());
                self.seen.growths += u64::from(num_blocks > before);
            }
            Err(ResizeError::RequestNeeds { num_blocks, .. }) => {
                assert!(num_blocks <= most.unwrap_or(0) + self.core.num_pinned_blocks());
            }
            Err(ResizeError::Pinned { block, value }) => {
                assert!(block.0 > value, "what is pinned stays in the pool");
                let is_pinned = |pinned: &Pinned| pinned.blocks.contains(&block);
                assert!(self.pins.values().any(is_pinned));
                self.seen.resizes_refused += 1;
            }
            Err(ResizeError::Static) => {
                assert_ne!(self.config.admission, Admission::Optimistic);
            }
            Err(ResizeError::NumBlocks { low, .. }) => assert!(num_blocks < low),
        }
        result
    }

    /// Pins what `handle` begins with, up to `num_tokens` of its tokens; the blocks.
    pub(crate) fn pin(&mut self, handle: u64, num_tokens: usize) -> Result<usize, PinError> {
        let Some(truth) = self.runner.truths.get_mut(&handle) else {
            return Ok(0);
        };
        let num_known = self.ledger.accounts[&handle].num_tokens() as usize;
        let num_tokens = num_tokens.min(num_known);
        let tokens: Vec<i32> = (0..num_tokens).map(|at| truth.token(at)).collect();
        let contents: Vec<u64> = (0..num_tokens).map(|at| truth.kv(at)).collect();
        let (salt, adapter) = (truth.ask.salt, truth.ask.adapter);
        let now = self.now();
        let pinned = self.core.pin(&tokens, salt, adapter, now);
        if let Ok(pin) = pinned {
            let blocks = self.core.pinned(pin).to_vec();
            assert!(!blocks.is_empty(), "a pin holds a block at least");
            let num_slots = blocks.len() * self.config.block_size as usize;
            self.seen.pins += 1;
            let pinned = Pinned {
                contents: contents[..num_slots].to_vec(),
                domain: (salt, adapter),
                tokens,
                blocks,
            };
            self.pins.insert(pin, pinned);
        }
        self.check();
        match pinned {
            Ok(pin) => Ok(self.core.pinned(pin).len()),
            Err(error) => {
                self.seen.pins_refused += u64::from(error != PinError::NotCached { num_tokens });
                Err(error)
            }
        }
    }

    pub(crate) fn unpin(&mut self, pin: PinId) -> bool {
        let now = self.now();
        let was_pinned = self.core.unpin(pin, now);
        assert_eq!(was_pinned, self.pins.remove(&pin).is_some());
        self.check();
        assert_eq!(self.core.pinned(pin), &[]);
        was_pinned
    }

    pub(crate) fn reset_prefix_cache(&mut self) -> u32 {
        let now = self.now();
        let num_freed = self.core.reset_prefix_cache(now);
        self.check();
        assert_eq!(self.core.kv().cache().num_registered(), 0);
        num_freed
    }

    /// One turn of an engine: plans until it must wait, then runs and commits the oldest step. `false` when idle.
    pub(crate) fn turn(&mut self) -> bool {
        while let Planned::Step(_) = self.plan_with(&Drafts::none()) {}
        if self.sampled.is_empty() && !self.run() {
            return false;
        }
        self.commit();
        true
    }

    /// Turns until nothing is left that could run; everything must have ended by then, in a bounded number of turns.
    pub(crate) fn drain(&mut self) {
        let per_request = |account: &Account| {
            account.ask.prompt.len() as u64 + 2 * u64::from(account.max_output) + 30
        };
        let num_live = self.ledger.live().count() as u64;
        let work: u64 = self
            .ledger
            .live()
            .map(|(_, account)| per_request(account))
            .sum();
        let mut num_left = 20 + work * (4 + num_live);
        while self.turn() {
            num_left -= 1;
            assert!(num_left > 0, "the work ends in a bounded number of steps");
        }
        assert_eq!(self.core.num_in_flight(), 0);
        self.ledger.check_reported();
        let num_parked = self
            .ledger
            .live()
            .filter(|(_, account)| account.is_parked)
            .count();
        assert_eq!(
            self.ledger.live().count(),
            num_parked,
            "all that could run has ended"
        );
        assert_eq!(self.core.num_parked() as usize, num_parked);
        let kv = self.core.kv();
        let num_pinned = self.core.num_pinned_blocks();
        assert_eq!(
            kv.pool().num_free() + kv.pool().num_cached() + num_pinned,
            self.config.num_blocks,
            "no block is held but by a pin"
        );
        assert_eq!(self.core.num_held_blocks(), num_pinned);
    }
}
