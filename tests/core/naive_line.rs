//! The naive core's line: keys, accounts, the tier of the aged, predictions and peaks, each by a scan of all there is.

use noria_core::{Admission, KeyPolicy};

use super::{Key, Naive, State, Told};

/// What is known of a tenant.
#[derive(Debug, Default)]
pub(super) struct Tenant {
    counter: u64,
    /// Lengths of outputs that ended, and whether they wanted no more.
    seen: Vec<(u32, bool)>,
    /// Of those, the ones that predictions are made of.
    num_used: usize,
}

/// One that runs, as a forecast sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub(super) handle: u64,
    band: i64,
    rest: u32,
    num_tokens: u32,
    num_own: u32,
    num_shared: u32,
}

/// Whether a newcomer fits beside all that run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outlook {
    Fits,
    Later,
    Exceeds,
}

const ONE: u64 = 1 << 30;

/// Where buckets of lengths start: at each number up to 8, then at each eighth of an octave.
fn starts() -> Vec<u64> {
    let mut starts: Vec<u64> = (0..8).collect();
    for octave in 0..8 {
        starts.extend((8..16).map(|eighth| eighth << octave));
    }
    starts
}

impl Tenant {
    fn learn(&mut self, num_output: u32, is_whole: bool) {
        self.seen.push((num_output, is_whole));
        if (self.seen.len() - self.num_used) * 8 > self.seen.len() {
            self.num_used = self.seen.len();
        }
    }

    /// The length that half of those that get past `num_output` get past, as if a quarter of one more had no end.
    fn predict(&self, num_output: u32, max_output: u32) -> u32 {
        let starts = starts();
        let seen = &self.seen[..self.num_used];
        let mut survival = vec![ONE];
        for bucket in 0..starts.len() - 1 {
            let is_in = |length: u32| (starts[bucket]..starts[bucket + 1]).contains(&length.into());
            let at_risk = seen
                .iter()
                .filter(|&&(len, _)| u64::from(len) >= starts[bucket])
                .count() as u64;
            let ended = seen
                .iter()
                .filter(|&&(len, is_whole)| is_whole && is_in(len))
                .count() as u64;
            let before = survival[bucket];
            survival.push(before - before * (16 * ended) / (16 * at_risk + 4));
        }
        let tokens = u64::from(num_output);
        let bucket = starts
            .iter()
            .rposition(|&start| start <= tokens)
            .expect("one starts at 0");
        let (width, part) = (starts[bucket + 1] - starts[bucket], tokens - starts[bucket]);
        let half = (survival[bucket] * (width - part) + survival[bucket + 1] * part) / width / 2;
        let Some(bucket) = (0..starts.len() - 1).find(|&bucket| survival[bucket + 1] <= half)
        else {
            return max_output;
        };
        let width = starts[bucket + 1] - starts[bucket];
        let drop = survival[bucket] - survival[bucket + 1];
        let length = starts[bucket] + ((survival[bucket] - half) * width).div_ceil(drop);
        length.clamp(tokens + 1, max_output.into()) as u32
    }
}

impl Naive {
    fn is_fair(&self) -> bool {
        self.config.key == KeyPolicy::Fair
    }

    pub(super) fn band(&self, handle: u64) -> i64 {
        match self.config.key {
            KeyPolicy::Fcfs => 0,
            _ => self.sequence(handle).ask.priority.into(),
        }
    }

    pub(super) fn key(&self, handle: u64) -> Key {
        let sequence = self.sequence(handle);
        if sequence.state == State::Running {
            return sequence.key;
        }
        match sequence.promotion {
            Some(promotion) => (i64::MIN, promotion, sequence.arrival),
            None => (self.band(handle), self.placed(handle), sequence.arrival),
        }
    }

    /// What stands between band and arrival of one that waits.
    fn placed(&self, handle: u64) -> u64 {
        let sequence = self.sequence(handle);
        if self.is_fair() {
            self.tenants[&sequence.ask.tenant].counter
        } else {
            sequence.score
        }
    }

    fn score(&self, handle: u64) -> u64 {
        let sequence = self.sequence(handle);
        let num_output = sequence.num_output();
        match self.config.key {
            KeyPolicy::Fcfs | KeyPolicy::Priority | KeyPolicy::Fair => 0,
            KeyPolicy::Sjf => u64::from(self.predicted(handle, num_output) - num_output),
            KeyPolicy::Deadline => {
                let ask = &sequence.ask;
                sequence.submitted_us
                    + ask.ttft_target_us
                    + ask.itl_target_us * u64::from(num_output)
            }
            KeyPolicy::Prefix => {
                u64::from(sequence.num_tokens() - sequence.num_findable * self.config.block_size)
            }
            KeyPolicy::Own => sequence.score,
        }
    }

    /// As its user's policy has it; the same as the world's.
    pub(super) fn own_score(&mut self, handle: u64) -> u64 {
        self.look_up(handle);
        let sequence = self.sequence(handle);
        let num_output = sequence.num_output();
        let num_uncached = sequence.num_tokens() - sequence.num_findable * self.config.block_size;
        let num_remaining = self.predicted(handle, num_output) - num_output;
        let sum = num_uncached + num_remaining + num_output;
        let score = i64::from(sum % 5) - 2 - i64::from(sequence.num_preemptions);
        (score + (1 << 40)) as u64
    }

    /// Leading blocks that `handle` may find.
    pub(super) fn last_findable(&self, handle: u64) -> u32 {
        let sequence = self.sequence(handle);
        if self.config.enable_prefix_caching && sequence.ask.reads_prefix_cache {
            (sequence.num_tokens() - 1) / self.config.block_size
        } else {
            0
        }
    }

    /// How far `is_there` goes, searched for from `num` on, back or forth.
    fn edge(&self, handle: u64, num: u32, is_there: impl Fn(usize) -> bool) -> u32 {
        let last = self.last_findable(handle);
        let has = |column: u32| {
            let found = self.find(&self.content(handle, column));
            found.is_some_and(&is_there)
        };
        let mut num = num.min(last);
        while num > 0 && !has(num - 1) {
            num -= 1;
        }
        while num < last && has(num) {
            num += 1;
        }
        num
    }

    /// Notes how much of `handle` can be found.
    pub(super) fn look_up(&mut self, handle: u64) {
        let num = self.edge(handle, self.sequence(handle).num_findable, |_| true);
        self.sequence_mut(handle).num_findable = num;
    }

    /// The same, where the place in line hangs on it. It matters when: behind a window the first blocks may be lost first.
    fn look_up_in_line(&mut self, handle: u64) {
        if self.config.key == KeyPolicy::Prefix && self.sequence(handle).promotion.is_none() {
            self.look_up(handle);
        }
    }

    /// Leading blocks that others hold.
    pub(super) fn num_held_by_others(&mut self, handle: u64) -> u32 {
        let is_held = |at: usize| self.blocks[at].num_holders > 0;
        let num = self.edge(handle, self.sequence(handle).num_held, is_held);
        self.sequence_mut(handle).num_held = num;
        num
    }

    pub(super) fn predicted(&self, handle: u64, num_output: u32) -> u32 {
        let sequence = self.sequence(handle);
        let hint = sequence.ask.expected_tokens.unwrap_or(0);
        if num_output >= sequence.max_output {
            num_output
        } else if hint > num_output {
            hint.min(sequence.max_output)
        } else {
            self.tenants[&sequence.ask.tenant].predict(num_output, sequence.max_output)
        }
    }

    /// A wait begins.
    pub(super) fn join(&mut self, handle: u64) {
        let since = self.next_step;
        let sequence = self.sequence_mut(handle);
        (sequence.since, sequence.num_bypasses) = (since, 0);
        (sequence.num_prefix_waits, sequence.num_held) = (0, 0);
        sequence.num_findable = 0;
        self.look_up_in_line(handle);
        let score = self.score(handle);
        let sequence = self.sequence_mut(handle);
        sequence.score = score;
        self.changed.push(handle);
        let sequence = self.sequence(handle);
        let tenant = sequence.ask.tenant;
        if self.config.ageing_steps > 0 && self.config.key != KeyPolicy::Fcfs {
            self.waits.push((since, handle));
        }
        let mut others = self.handles(State::Waiting);
        others.retain(|&other| other != handle);
        if self.is_fair()
            && !others
                .iter()
                .any(|&other| self.sequence(other).ask.tenant == tenant)
        {
            let places = others
                .iter()
                .filter(|&&other| self.sequence(other).promotion.is_none())
                .map(|&other| self.placed(other));
            let floor = places.min().unwrap_or(self.last_counter);
            let counter = &mut self.tenants.entry(tenant).or_default().counter;
            *counter = (*counter).max(floor);
        }
    }

    /// A request leaves the line.
    pub(super) fn leave(&mut self, handle: u64) {
        let tenant = self.sequence(handle).ask.tenant;
        let waiting = self.handles(State::Waiting);
        if self.is_fair()
            && !waiting
                .iter()
                .any(|&other| other != handle && self.sequence(other).ask.tenant == tenant)
        {
            self.last_counter = self.tenants[&tenant].counter;
        }
    }

    pub(super) fn charge(&mut self, handle: u64, weighted: u64) {
        if self.is_fair() {
            let tenant = self.sequence(handle).ask.tenant;
            self.tenants.entry(tenant).or_default().counter += weighted;
        }
    }

    pub(super) fn refund(&mut self, handle: u64, num_tokens: u32) {
        let sequence = self.sequence(handle);
        if self.is_fair() && sequence.num_preemptions == 0 {
            let tenant = sequence.ask.tenant;
            let weighted = u64::from(num_tokens) * u64::from(self.config.fair_input_weight);
            let counter = &mut self.tenants.entry(tenant).or_default().counter;
            *counter = counter.saturating_sub(weighted);
        }
    }

    pub(super) fn learn(&mut self, handle: u64, num_output: u32, is_whole: bool) {
        let predicts = self.config.admission == Admission::Peak
            || matches!(self.config.key, KeyPolicy::Sjf | KeyPolicy::Own);
        if num_output > 0 && predicts {
            let tenant = self.sequence(handle).ask.tenant;
            self.tenants
                .entry(tenant)
                .or_default()
                .learn(num_output, is_whole);
        }
    }

    pub(super) fn refresh(&mut self) {
        let num_waiting = self.handles(State::Waiting).len();
        for _ in 0..if self.config.key == KeyPolicy::Prefix {
            num_waiting.min(3)
        } else {
            0
        } {
            let waiting = self.handles(State::Waiting);
            let next = waiting
                .iter()
                .find(|&&handle| self.refreshed.is_none_or(|after| self.key(handle) > after));
            let handle = *next.unwrap_or(&waiting[0]);
            self.refreshed = Some(self.key(handle));
            self.look_up_in_line(handle);
            let score = self.score(handle);
            self.sequence_mut(handle).score = score;
        }
    }

    /// Lets those leave the tier of the aged that got on, and those in whose time has come.
    pub(super) fn settle_tier(&mut self) {
        for handle in core::mem::take(&mut self.tier) {
            if self.sequences.contains_key(&handle) && self.stays_aged(handle) {
                self.tier.push(handle);
            }
        }
        while self.tier.len() < (self.config.max_num_seqs as usize / 4).max(1) {
            let Some(handle) = self.next_due() else {
                return;
            };
            self.num_promotions += 1;
            let promotion = self.num_promotions;
            self.sequence_mut(handle).promotion = Some(promotion);
            self.tier.push(handle);
        }
    }

    fn stays_aged(&mut self, handle: u64) -> bool {
        let block_size = self.config.block_size;
        let sequence = self.sequence_mut(handle);
        if sequence.state != State::Running {
            return true;
        }
        let most = sequence.ask.prompt.len() as u32 + sequence.max_output - 1;
        let Some(until) = sequence.aged_until else {
            sequence.aged_until = Some((sequence.num_tokens() + block_size).min(most));
            return true;
        };
        if sequence.computed < until {
            return true;
        }
        sequence.promotion = None;
        sequence.aged_until = None;
        sequence.num_recent_preemptions = 0;
        self.look_up_in_line(handle);
        let score = self.score(handle);
        self.sequence_mut(handle).score = score;
        let key = (
            self.band(handle),
            self.placed(handle),
            self.sequence(handle).arrival,
        );
        self.sequence_mut(handle).key = key;
        false
    }

    fn next_due(&mut self) -> Option<u64> {
        while !self.worn.is_empty() {
            let handle = self.worn.remove(0);
            if self.waits_outside_tier(handle) {
                return Some(handle);
            }
        }
        while let Some(&(since, handle)) = self.waits.first() {
            if since + u64::from(self.config.ageing_steps) > self.next_step {
                return None;
            }
            self.waits.remove(0);
            if !self.waits_outside_tier(handle) || self.sequence(handle).since != since {
                continue;
            }
            let band = self.band(handle);
            let all = [self.handles(State::Running), self.handles(State::Waiting)].concat();
            if self.is_fair() && !all.iter().any(|&other| self.key(other).0 < band) {
                let now = self.next_step;
                self.sequence_mut(handle).since = now;
                self.waits.push((now, handle));
                continue;
            }
            return Some(handle);
        }
        None
    }

    /// One preempted so often that it runs again only in the tier of the aged.
    pub(super) fn is_worn(&self, handle: u64) -> bool {
        let sequence = self.sequence(handle);
        let max = self.config.max_preemptions;
        max > 0 && sequence.num_recent_preemptions >= max && sequence.promotion.is_none()
    }

    fn waits_outside_tier(&self, handle: u64) -> bool {
        self.sequences.get(&handle).is_some_and(|sequence| {
            sequence.state == State::Waiting && sequence.promotion.is_none()
        })
    }

    /// Blocks that `handle` can ever need.
    pub(super) fn limit_blocks(&self, handle: u64) -> u32 {
        let sequence = self.sequence(handle);
        self.held_for(sequence.ask.prompt.len() as u32 + sequence.max_output - 1)
    }

    /// Blocks that those running may ever need beside those that they hold.
    pub(super) fn outstanding(&self) -> u32 {
        self.handles(State::Running)
            .into_iter()
            .map(|handle| self.limit_blocks(handle) - self.sequence(handle).num_held())
            .sum()
    }

    fn member(&self, handle: u64, num_output: u32, num_shared: u32) -> Member {
        let sequence = self.sequence(handle);
        let num_decoded = u32::from(self.plan.decodes.contains(&handle));
        let num_tokens = (sequence.planned + num_decoded).max(sequence.num_tokens());
        let last = sequence.ask.prompt.len() as u32 + self.predicted(handle, num_output) - 1;
        let num_blocks = self.held_for(num_tokens).max(sequence.num_held());
        Member {
            handle,
            band: if sequence.state == State::Running {
                sequence.key.0
            } else {
                self.band(handle)
            },
            rest: last.saturating_sub(num_tokens),
            num_tokens,
            num_own: num_blocks.saturating_sub(num_shared),
            num_shared,
        }
    }

    pub(super) fn newcomer(&self, handle: u64, num_shared: u32) -> Member {
        self.member(handle, self.sequence(handle).num_output(), num_shared)
    }

    /// All that run, as they were when it was first asked in this plan, with those that came since and without those
    /// that left.
    fn members(&mut self) -> Vec<Member> {
        if self.plan.members.is_none() {
            let running = self.handles(State::Running).into_iter();
            let members = running.map(|handle| {
                let sequence = self.sequence(handle);
                let num_decoded = u32::from(self.plan.decodes.contains(&handle));
                let num_output = sequence.max_output_in_flight() + num_decoded;
                self.member(handle, num_output, sequence.num_shared)
            });
            self.plan.members = Some(members.collect());
        }
        self.plan.members.clone().expect("it was made")
    }

    /// The most blocks in use at any time to come, of `members`, `num_held` of them now.
    fn peak(&self, members: &[Member], num_held: u32) -> u32 {
        let longest = members.iter().map(|member| member.rest).max().unwrap_or(0);
        let at = |time: u32| {
            let (present, gone): (Vec<&Member>, Vec<&Member>) =
                members.iter().partition(|member| member.rest >= time);
            let grown: u32 = present
                .iter()
                .map(|member| {
                    self.blocks_for(member.num_tokens + time) - self.blocks_for(member.num_tokens)
                })
                .sum();
            let num_shared: u32 = present.iter().map(|member| member.num_shared).sum();
            let num_gone: u32 = gone.iter().map(|member| member.num_own).sum();
            (num_held + grown).saturating_sub(num_gone.saturating_sub(num_shared))
        };
        (0..=longest).map(at).max().unwrap_or(num_held)
    }

    /// `num_new`, `debt` and `num_available` as an admission reckons with them.
    pub(super) fn outlook(
        &mut self,
        handle: u64,
        num_shared: u32,
        num_new: u32,
        debt: u32,
        num_available: u32,
    ) -> Outlook {
        if self.config.admission != Admission::Peak || self.handles(State::Running).is_empty() {
            return Outlook::Fits;
        }
        let fits_at_most =
            self.outstanding() + self.limit_blocks(handle) - num_shared <= num_available;
        let spacing = self.spacing(handle);
        let is_early = self.next_step * 64 < self.next_entry;
        if fits_at_most && (!is_early || spacing.is_none()) {
            return Outlook::Fits;
        }
        let mut members = self.members();
        let running: u32 = members
            .iter()
            .map(|member| self.held_for(member.num_tokens + member.rest))
            .sum();
        members.push(self.newcomer(handle, num_shared));
        let num_blocks = self.config.num_blocks;
        let peak = self.peak(&members, num_blocks - num_available + debt + num_new);
        if peak > self.highest_peak(handle) {
            return Outlook::Exceeds;
        }
        let waiting: u32 = self
            .handles(State::Waiting)
            .into_iter()
            .map(|other| self.sequence(other).num_final_blocks)
            .sum();
        let is_spaced = self.config.peak_percent == 100;
        if is_early
            && is_spaced
            && spacing.is_some()
            && peak * 4 > num_blocks
            && running + waiting > self.num_unpinned()
        {
            return Outlook::Later;
        }
        Outlook::Fits
    }

    pub(super) fn fits_beside_equals(&mut self, handle: u64, hits: u32) -> bool {
        if self.config.admission != Admission::Peak {
            return true;
        }
        let band = self.band(handle);
        let mut members = self.members();
        members.retain(|member| member.band <= band);
        if members.is_empty() {
            return true;
        }
        // A forecast lets a window grow without end, but what each may ever hold is a bound as well.
        let limits = members
            .iter()
            .map(|member| self.limit_blocks(member.handle));
        let num_limit = limits.sum::<u32>() + self.limit_blocks(handle);
        // What is pinned is nobody's, of any band.
        let num_pinned = self.config.num_blocks - self.num_unpinned();
        let highest = self.highest_peak(handle).saturating_sub(num_pinned);
        if self.config.window > 0 && num_limit <= highest {
            return true;
        }
        members.push(self.newcomer(handle, hits));
        let num_held = members.iter().map(|member| member.num_own).sum();
        self.peak(&members, num_held) <= highest
    }

    fn highest_peak(&self, handle: u64) -> u32 {
        let most = self.config.num_blocks - self.config.watermark_blocks;
        if self.sequence(handle).was_admitted {
            most
        } else {
            most * self.config.peak_percent / 100
        }
    }

    /// Sixty-fourths of a step until the next like `handle` enters.
    fn spacing(&self, handle: u64) -> Option<u64> {
        let sequence = self.sequence(handle);
        let num_output = sequence.num_output();
        let life = u64::from(self.predicted(handle, num_output) - num_output);
        let num_tokens = u64::from(sequence.num_tokens());
        let average = num_tokens + life / 2;
        let num_places = u64::from(self.num_unpinned() * self.config.block_size);
        (3 * average < 2 * (num_tokens + life))
            .then(|| 64 * 11 * life * average / (10 * num_places))
    }

    /// Before `handle` takes its seat.
    pub(super) fn note_entry(&mut self, handle: u64, hits: u32) {
        if self.config.admission == Admission::Peak {
            let mut member = self.newcomer(handle, hits);
            member.band = self.key(handle).0;
            if let Some(members) = &mut self.plan.members {
                members.push(member);
            }
            if let Some(parts) = self.spacing(handle) {
                self.next_entry = self.next_entry.max(self.next_step * 64) + parts;
            }
        }
    }

    pub(super) fn has_entered_now(&self, handle: u64) -> bool {
        let is_entry =
            |told: &Told| matches!(told, Told::Entered(newcomer, _) if *newcomer == handle);
        self.plan.told.iter().any(is_entry)
    }

    /// Blocks that `handle`, which waits, may hold at its end.
    pub(super) fn final_blocks(&self, handle: u64) -> u32 {
        let sequence = self.sequence(handle);
        self.held_for(sequence.ask.prompt.len() as u32 + sequence.max_output - 1)
    }
}
