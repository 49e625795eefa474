//! A second core, written to be read: continuous batching without drafts or failures, every question answered by a scan.
//! Blocks are contents, the cache is a search, keys are sorted anew. It shares no code with the first.

use std::collections::{BTreeMap, BTreeSet};

use noria_core::{Config, FinishReason, KeyPolicy, MAX_PAUSED_STEPS, Share};

use crate::support::Ask;

/// `(band, score, arrival)`.
pub(crate) type Key = (i64, u64, u64);

/// What a block holds: its salt and adapter, and all tokens up to its end.
type Content = ((u128, u64), Vec<i32>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Parked,
    Waiting,
    Running,
}

/// A row of a plan: handle, start, count, whether it samples.
pub(crate) type Row = (u64, u32, u32, bool);

/// What a plan tells: handle, what, prompt tokens found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    Preempted(u64),
    Entered(u64, u32),
}

#[derive(Debug)]
struct Block {
    num_holders: u32,
    content: Option<Content>,
    /// The step that fills it with what was known when it was planned.
    filled_by: u64,
}

#[derive(Debug)]
struct Sequence {
    /// Once it runs.
    key: Key,
    arrival: u64,
    score: u64,
    submitted_us: u64,
    since: u64,
    num_bypasses: u32,
    num_preemptions: u32,
    num_recent_preemptions: u32,
    promotion: Option<u64>,
    aged_until: Option<u32>,
    num_final_blocks: u32,
    num_shared: u32,
    /// Leading blocks that others hold, and that can be found, as last seen.
    num_held: u32,
    num_findable: u32,
    num_prefix_waits: u32,
    was_admitted: bool,
    state: State,
    ask: Ask,
    tokens: Vec<i32>,
    max_output: u32,
    /// By column; none where a block was given back.
    table: Vec<Option<usize>>,
    planned: u32,
    computed: u32,
    /// Leading blocks that were offered to the cache.
    offered: u32,
    has_sampled: bool,
    residency: u32,
    /// On the host: blocks, tokens, and the step that copied them.
    swapped: Option<(u32, u32, u64)>,
    /// Rows in flight: residency, whether it samples.
    in_flight: Vec<(u32, bool)>,
}

impl Sequence {
    fn num_tokens(&self) -> u32 {
        self.tokens.len() as u32
    }

    fn num_output(&self) -> u32 {
        self.num_tokens() - self.ask.prompt.len() as u32
    }

    fn num_pending(&self) -> u32 {
        self.in_flight.iter().filter(|row| row.1).count() as u32
    }

    fn max_output_in_flight(&self) -> u32 {
        self.num_output() + self.num_pending()
    }

    fn num_held(&self) -> u32 {
        self.table.iter().flatten().count() as u32
    }

    fn ends_in_flight(&self) -> bool {
        self.num_pending() > 0 && self.max_output_in_flight() >= self.max_output
    }
}

/// What is decided anew in each plan.
#[derive(Debug, Default)]
struct Plan {
    left: u32,
    num_partial: u32,
    decodes: Vec<u64>,
    /// Handle, start, count.
    prefills: Vec<(u64, u32, u32)>,
    /// Residents with a prompt to go.
    owing: Vec<u64>,
    gone: Vec<u64>,
    told: Vec<Told>,
    num_swapped_out: u32,
    num_swapped_in: u32,
    num_certain: Option<u32>,
    ranking: Option<Vec<u64>>,
    members: Option<Vec<line::Member>>,
    blocked: Vec<u64>,
    /// Those that wait for a block that another computes.
    num_let_wait: usize,
    /// Decodes that got a row, those that lost it since included.
    num_given: u32,
}

#[derive(Debug)]
pub(crate) struct Naive {
    config: Config,
    blocks: Vec<Block>,
    /// Blocks without a holder, with content; the next to be evicted first.
    cached: Vec<usize>,
    sequences: BTreeMap<u64, Sequence>,
    /// Handles and residencies of each step's rows.
    steps: Vec<Vec<(u64, u32, u32, bool)>>,
    /// Host blocks that a step copies back: the step, how many.
    pinned: Vec<(u64, u32)>,
    /// By pin, in order of position.
    pins: BTreeMap<u64, Vec<usize>>,
    is_planning: bool,
    next_arrival: u64,
    next_step: u64,
    tenants: BTreeMap<u64, line::Tenant>,
    last_counter: u64,
    tier: Vec<u64>,
    waits: Vec<(u64, u64)>,
    worn: Vec<u64>,
    num_promotions: u64,
    next_entry: u64,
    refreshed: Option<Key>,
    /// Those whose score is asked for before the next plan.
    changed: Vec<u64>,
    num_paused: u32,
    plan: Plan,
}

impl Naive {
    pub(crate) fn new(config: &Config) -> Self {
        let blocks = (0..config.num_blocks)
            .map(|_| Block {
                num_holders: 0,
                content: None,
                filled_by: 0,
            })
            .collect();
        Self {
            config: config.clone(),
            blocks,
            cached: Vec::new(),
            sequences: BTreeMap::new(),
            steps: Vec::new(),
            pinned: Vec::new(),
            pins: BTreeMap::new(),
            is_planning: false,
            next_arrival: 0,
            next_step: 1,
            tenants: BTreeMap::new(),
            last_counter: 0,
            tier: Vec::new(),
            waits: Vec::new(),
            worn: Vec::new(),
            num_promotions: 0,
            next_entry: 0,
            refreshed: None,
            changed: Vec::new(),
            num_paused: 0,
            plan: Plan::default(),
        }
    }

    pub(crate) fn submit(&mut self, handle: u64, ask: &Ask, now_us: u64) {
        let room = i64::from(self.config.max_model_len) - ask.prompt.len() as i64;
        let sequence = Sequence {
            key: (0, 0, 0),
            arrival: self.next_arrival,
            score: 0,
            submitted_us: now_us,
            since: 0,
            num_bypasses: 0,
            num_preemptions: 0,
            num_recent_preemptions: 0,
            promotion: None,
            aged_until: None,
            num_final_blocks: 0,
            num_shared: 0,
            num_held: 0,
            num_findable: 0,
            num_prefix_waits: 0,
            was_admitted: false,
            state: if ask.parked {
                State::Parked
            } else {
                State::Waiting
            },
            ask: ask.clone(),
            tokens: ask.prompt.clone(),
            max_output: ask.max_tokens.min(room) as u32,
            table: Vec::new(),
            planned: 0,
            computed: 0,
            offered: 0,
            has_sampled: false,
            residency: 0,
            swapped: None,
            in_flight: Vec::new(),
        };
        self.next_arrival += 1;
        self.tenants.entry(ask.tenant).or_default();
        self.sequences.insert(handle, sequence);
        if !ask.parked {
            self.wait(handle);
        }
    }

    pub(crate) fn unpark(&mut self, handle: u64) {
        self.sequence_mut(handle).state = State::Waiting;
        self.wait(handle);
    }

    fn wait(&mut self, handle: u64) {
        self.join(handle);
        let num_blocks = self.final_blocks(handle);
        self.sequence_mut(handle).num_final_blocks = num_blocks;
    }

    pub(crate) fn end(&mut self, handle: u64, reason: FinishReason, num_output: u32) {
        let num_output = num_output.min(self.sequence(handle).num_output());
        self.learn(handle, num_output, reason == FinishReason::Stop);
        if self.sequence(handle).state == State::Waiting {
            self.leave(handle);
        }
        self.release(handle);
        self.sequences.remove(&handle);
    }

    pub(crate) fn reset(&mut self) {
        self.cached.clear();
        for block in &mut self.blocks {
            block.content = None;
        }
    }

    /// Pins up to `num_wanted` of the blocks that `tokens` begin with, as far as no step in flight fills them; how many.
    pub(crate) fn pin(
        &mut self,
        pin: u64,
        domain: (u128, u64),
        tokens: &[i32],
        num_wanted: usize,
    ) -> usize {
        let num_committed = self.num_committed();
        let ends =
            (1..=tokens.len()).filter(|end| end.is_multiple_of(self.config.block_size as usize));
        let mut blocks: Vec<usize> = ends
            .map_while(|end| self.find(&(domain, tokens[..end].to_vec())))
            .take_while(|&at| self.blocks[at].filled_by <= num_committed)
            .collect();
        let num_found = blocks.len();
        blocks.truncate(num_wanted);
        for &at in &blocks {
            self.cached.retain(|&cached| cached != at);
            self.blocks[at].num_holders += 1;
        }
        self.pins.insert(pin, blocks);
        num_found
    }

    pub(crate) fn unpin(&mut self, pin: u64) {
        for at in self.pins.remove(&pin).into_iter().flatten().rev() {
            self.drop_holder(at);
        }
    }

    /// Blocks that are not pinned.
    fn num_unpinned(&self) -> u32 {
        let pinned: BTreeSet<usize> = self.pins.values().flatten().copied().collect();
        self.config.num_blocks - pinned.len() as u32
    }

    /// Free, cached and held blocks.
    pub(crate) fn pool(&self) -> (u32, u32, u32) {
        let held = self
            .blocks
            .iter()
            .filter(|block| block.num_holders > 0)
            .count();
        let cached = self.cached.len();
        (
            (self.blocks.len() - held - cached) as u32,
            cached as u32,
            held as u32,
        )
    }

    fn available(&self) -> u32 {
        let (free, cached, _) = self.pool();
        free + cached
    }

    fn blocks_for(&self, num_tokens: u32) -> u32 {
        num_tokens.div_ceil(self.config.block_size)
    }

    fn sequence(&self, handle: u64) -> &Sequence {
        &self.sequences[&handle]
    }

    fn sequence_mut(&mut self, handle: u64) -> &mut Sequence {
        self.sequences.get_mut(&handle).expect("it lives")
    }

    fn handles(&self, state: State) -> Vec<u64> {
        let mut handles: Vec<u64> = self.sequences.keys().copied().collect();
        handles.retain(|&handle| self.sequence(handle).state == state);
        handles.sort_by_key(|&handle| self.key(handle));
        handles
    }

    fn release(&mut self, handle: u64) {
        let table = core::mem::take(&mut self.sequence_mut(handle).table);
        for at in table.into_iter().rev().flatten() {
            self.drop_holder(at);
        }
    }

    fn drop_holder(&mut self, at: usize) {
        let block = &mut self.blocks[at];
        block.num_holders -= 1;
        if block.num_holders == 0 && block.content.is_some() {
            self.cached.push(at);
        }
    }

    /// Leading blocks that a row from position `start` on does not see.
    fn behind(&self, start: u32) -> u32 {
        let block_size = self.config.block_size;
        let is_seen = |column: u32| (column + 1) * block_size + self.config.window > start + 1;
        match self.config.window {
            0 => 0,
            _ => (0..start).take_while(|&column| !is_seen(column)).count() as u32,
        }
    }

    fn give_back(&mut self, handle: u64, start: u32) {
        for column in 0..self.behind(start) as usize {
            let table = &mut self.sequence_mut(handle).table;
            if let Some(at) = table.get_mut(column).and_then(Option::take) {
                self.drop_holder(at);
            }
        }
    }

    /// The most blocks that `num_tokens` tokens are held in at once.
    fn held_for(&self, num_tokens: u32) -> u32 {
        let config = &self.config;
        match config.window {
            0 => self.blocks_for(num_tokens),
            window => {
                let most = self.blocks_for(window - 1 + config.max_num_batched_tokens) + 1;
                self.blocks_for(num_tokens).min(most)
            }
        }
    }

    /// Blocks that the known tokens of `handle` need beside those that it holds.
    fn to_go(&self, handle: u64) -> u32 {
        let sequence = self.sequence(handle);
        let num_more = self.blocks_for(sequence.num_tokens()) - sequence.table.len() as u32;
        match self.config.window {
            0 => num_more,
            _ => num_more.min(self.held_for(u32::MAX / 2) - sequence.num_held()),
        }
    }

    fn num_committed(&self) -> u64 {
        self.next_step - 1 - self.steps.len() as u64
    }

    /// What a step copies to the host, or back, at most.
    fn max_swaps(&self) -> u32 {
        let config = &self.config;
        let columns = self.blocks_for(config.max_model_len);
        let gained = (columns + 64 * config.max_num_seqs).min(config.max_num_seqs * columns);
        gained.min(config.num_swap_blocks)
    }

    fn swap_out(&mut self, handle: u64) {
        let sequence = self.sequence(handle);
        let num_tokens = sequence.planned;
        let columns = &sequence.table[..self.blocks_for(num_tokens) as usize];
        let num_blocks = columns.iter().flatten().count() as u32;
        let waiting = self.sequences.values().filter_map(|other| other.swapped);
        let num_taken = waiting.map(|swapped| swapped.0).sum::<u32>()
            + self.pinned.iter().map(|pin| pin.1).sum::<u32>();
        let room = self.max_swaps() - self.plan.num_swapped_out;
        let fits = num_blocks <= room && num_taken + num_blocks <= self.config.num_swap_blocks;
        if num_blocks > 0 && fits {
            self.plan.num_swapped_out += num_blocks;
            self.sequence_mut(handle).swapped = Some((num_blocks, num_tokens, self.next_step));
        }
    }

    fn preempt(&mut self, handle: u64) {
        self.swap_out(handle);
        self.release(handle);
        let sequence = self.sequence_mut(handle);
        sequence.state = State::Waiting;
        (sequence.planned, sequence.computed, sequence.offered) = (0, 0, 0);
        sequence.has_sampled = false;
        sequence.residency += 1;
        sequence.num_shared = 0;
        sequence.num_preemptions += 1;
        sequence.num_recent_preemptions += 1;
        let is_worn = self.config.max_preemptions > 0
            && self.sequence(handle).num_recent_preemptions >= self.config.max_preemptions
            && self.sequence(handle).promotion.is_none();
        self.wait(handle);
        if is_worn {
            self.worn.push(handle);
        }
        if let Some(members) = &mut self.plan.members {
            members.retain(|member| member.handle != handle);
        }
        let num_before = self.plan.decodes.len();
        self.plan.decodes.retain(|&decode| decode != handle);
        self.plan.left += (num_before - self.plan.decodes.len()) as u32;
        self.plan.gone.push(handle);
        self.plan.told.push(Told::Preempted(handle));
    }

    fn take_block(&mut self, handle: u64) {
        let is_free = |block: &Block| block.num_holders == 0 && block.content.is_none();
        let at = self
            .blocks
            .iter()
            .position(is_free)
            .unwrap_or_else(|| self.cached.remove(0));
        self.blocks[at] = Block {
            num_holders: 1,
            content: None,
            filled_by: 0,
        };
        self.sequence_mut(handle).table.push(Some(at));
    }

    fn content(&self, handle: u64, column: u32) -> Content {
        let sequence = self.sequence(handle);
        let end = (column + 1) * self.config.block_size;
        let domain = (sequence.ask.salt, sequence.ask.adapter);
        (domain, sequence.tokens[..end as usize].to_vec())
    }

    fn find(&self, content: &Content) -> Option<usize> {
        self.blocks
            .iter()
            .position(|block| block.content.as_ref() == Some(content))
    }

    /// Makes full blocks up to `filled` tokens findable.
    fn offer(&mut self, handle: u64, filled: u32) {
        while self.config.enable_prefix_caching
            && (self.sequence(handle).offered + 1) * self.config.block_size <= filled
        {
            let column = self.sequence(handle).offered;
            let content = self.content(handle, column);
            let at = self.sequence(handle).table[column as usize];
            if self.find(&content).is_none()
                && let Some(at) = at
            {
                let filled_by = if self.is_planning { self.next_step } else { 0 };
                self.blocks[at].content = Some(content);
                self.blocks[at].filled_by = filled_by;
            }
            self.sequence_mut(handle).offered += 1;
        }
    }

    /// Commits the oldest step with what each row sampled; those that ended.
    pub(crate) fn commit(&mut self, num_ids: &[i32], mut ids: &[i32]) {
        let rows = self.steps.remove(0);
        let num_committed = self.num_committed();
        self.pinned.retain(|pin| pin.0 > num_committed);
        for (row, &num) in rows.iter().zip(num_ids) {
            if num > 0 && self.sequences.contains_key(&row.0) {
                let weight = u64::from(self.config.fair_output_weight);
                self.charge(row.0, weight * num as u64);
            }
        }
        for (&(handle, residency, count, samples), &num) in rows.iter().zip(num_ids) {
            let (sampled, rest) = ids.split_at(num as usize);
            ids = rest;
            let Some(sequence) = self.sequences.get_mut(&handle) else {
                continue;
            };
            sequence.in_flight.remove(0);
            if samples && sampled.is_empty() {
                let num_output = sequence.num_output();
                self.end(handle, FinishReason::Error, num_output);
                continue;
            }
            let is_current = sequence.residency == residency && sequence.state == State::Running;
            if is_current {
                sequence.computed += count;
            }
            sequence.tokens.extend(sampled);
            let is_stop = sampled.iter().any(|id| sequence.ask.stop_ids.contains(id));
            let num_output = sequence.tokens.len() - sequence.ask.prompt.len();
            let has_ended = is_stop || num_output as u32 == sequence.max_output;
            let (computed, num_tokens) = (sequence.computed, sequence.num_tokens());
            if is_current {
                self.offer(handle, computed.min(num_tokens));
            }
            if has_ended {
                let reason = if is_stop {
                    FinishReason::Stop
                } else {
                    FinishReason::Length
                };
                self.end(handle, reason, num_output as u32);
            }
        }
    }

    /// The next step's rows and what else the plan did; no rows where there is no step.
    pub(crate) fn plan(&mut self, now_us: u64) -> (Vec<Row>, Vec<Told>) {
        self.is_planning = true;
        let planned = self.decide(now_us);
        self.is_planning = false;
        planned
    }

    fn decide(&mut self, now_us: u64) -> (Vec<Row>, Vec<Told>) {
        self.plan = Plan {
            left: self.config.max_num_batched_tokens,
            ..Plan::default()
        };
        self.score_changed();
        self.expire(now_us);
        if self.steps.len() == self.config.depth as usize {
            return (Vec::new(), Vec::new());
        }
        self.settle_tier();
        self.refresh();
        let prefills_first =
            self.config.share == Share::PrefillFirst && self.num_paused < MAX_PAUSED_STEPS;
        let running = self.handles(State::Running);
        if prefills_first {
            self.plan.owing.clone_from(&running);
            self.plan
                .owing
                .retain(|handle| !self.sequences[handle].has_sampled);
            self.walk();
        }
        let mut has_paused = false;
        let most = self.plan.left;
        for handle in running {
            let has_prefill = self.is_reached(handle) || !self.sequence(handle).has_sampled;
            if prefills_first && has_prefill {
                continue;
            }
            if self.plan.num_given < most {
                self.plan_decode(handle);
            } else {
                let sequence = self.sequence(handle);
                has_paused |= sequence.state == State::Running
                    && sequence.max_output_in_flight() < sequence.max_output;
            }
        }
        self.num_paused = if prefills_first && has_paused {
            self.num_paused + 1
        } else {
            0
        };
        if !prefills_first {
            self.walk();
        }
        let (mut rows, mut step) = (Vec::new(), Vec::new());
        let mut depart = |sequence: &mut Sequence, row: Row| {
            sequence.in_flight.push((sequence.residency, row.3));
            step.push((row.0, sequence.residency, row.2, row.3));
            rows.push(row);
        };
        for handle in core::mem::take(&mut self.plan.decodes) {
            let sequence = self.sequences.get_mut(&handle).expect("it lives");
            sequence.planned += 1;
            let start = sequence.planned - 1;
            depart(sequence, (handle, start, 1, true));
        }
        for (handle, start, count) in core::mem::take(&mut self.plan.prefills) {
            let sequence = self.sequences.get_mut(&handle).expect("it lives");
            let samples = sequence.has_sampled;
            depart(sequence, (handle, start, count, samples));
        }
        if step.is_empty() {
            // What came to nothing copies nothing.
            let next_step = self.next_step;
            for sequence in self.sequences.values_mut() {
                sequence.swapped = sequence.swapped.filter(|swapped| swapped.2 < next_step);
            }
        } else {
            self.steps.push(step);
            self.next_step += 1;
        }
        (rows, core::mem::take(&mut self.plan.told))
    }

    /// Ends those whose time has come.
    fn expire(&mut self, now_us: u64) {
        let mut due: Vec<(u64, u32, u64)> = self
            .sequences
            .iter()
            .filter_map(|(&handle, sequence)| {
                let at = sequence.ask.expires_us?;
                (at <= now_us).then_some((at, handle as u32, handle))
            })
            .collect();
        due.sort_unstable();
        for (_, _, handle) in due {
            let num_output = self.sequence(handle).num_output();
            self.end(handle, FinishReason::Expired, num_output);
        }
    }

    /// A policy of one's own says where those stand that have got in line.
    fn score_changed(&mut self) {
        for handle in core::mem::take(&mut self.changed) {
            let is_waiting = |sequence: &Sequence| sequence.state == State::Waiting;
            if self.config.key == KeyPolicy::Own
                && self.sequences.get(&handle).is_some_and(is_waiting)
            {
                let score = self.own_score(handle);
                self.sequence_mut(handle).score = score;
            }
        }
    }

    fn plan_decode(&mut self, handle: u64) {
        let sequence = self.sequence(handle);
        if sequence.state != State::Running {
            return;
        }
        if !sequence.has_sampled {
            self.plan.owing.push(handle);
            return;
        }
        if sequence.max_output_in_flight() >= sequence.max_output {
            return;
        }
        let start = sequence.planned;
        self.give_back(handle, start);
        if self.blocks_for(start + 1) > self.sequence(handle).table.len() as u32 {
            while self.available() == 0 {
                if !self.make_room(handle) {
                    return;
                }
            }
            self.take_block(handle);
        }
        self.plan.decodes.push(handle);
        self.plan.num_given += 1;
        self.plan.left -= 1;
    }
}

#[path = "naive_line.rs"]
mod line;
#[path = "naive_walk.rs"]
mod walk;
