//! The naive core's walk over prefills, its admissions and its victims.

use std::cmp::Reverse;

use noria_core::{Admission, KeyPolicy};

use super::line::Outlook;
use super::{Key, Naive, Sequence, State, Told};

/// What a sequence that goes on finds of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hit {
    Found(usize),
    /// Its next row does not see it.
    Behind,
    /// It is copied back from the host.
    Copied,
}

impl Hit {
    fn found(&self) -> Option<usize> {
        match *self {
            Self::Found(at) => Some(at),
            Self::Behind | Self::Copied => None,
        }
    }
}

/// Blocks without which a sequence need not compute, and where it goes on.
#[derive(Debug)]
struct Way {
    hits: Vec<Hit>,
    start: u32,
}

impl Way {
    fn num(&self, is_counted: impl Fn(&Hit) -> bool) -> u32 {
        self.hits.iter().filter(|hit| is_counted(hit)).count() as u32
    }

    fn num_found(&self) -> u32 {
        self.num(|hit| hit.found().is_some())
    }

    fn num_copied(&self) -> u32 {
        self.num(|&hit| hit == Hit::Copied)
    }

    fn num_behind(&self) -> u32 {
        self.num(|&hit| hit == Hit::Behind)
    }
}

/// What came of a try to admit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Taken,
    Blocked,
    Closed,
}

impl Naive {
    fn num_exclusive(&self, handle: u64) -> u32 {
        let table = &self.sequence(handle).table;
        table
            .iter()
            .flatten()
            .filter(|&&at| self.blocks[at].num_holders == 1)
            .count() as u32
    }

    fn is_reached(&self, handle: u64) -> bool {
        self.plan.prefills.iter().any(|row| row.0 == handle)
    }

    /// `true`: a block is available now; `false`: wait, or the sequence itself had to leave.
    pub(super) fn make_room(&mut self, grower: u64) -> bool {
        let num_certain = self.plan.num_certain.unwrap_or_else(|| {
            let running = self.handles(State::Running).into_iter();
            let ending = running.filter(|&handle| self.sequence(handle).ends_in_flight());
            ending.map(|handle| self.num_exclusive(handle)).sum()
        });
        self.plan.num_certain = Some(num_certain.saturating_sub(1));
        if num_certain > 0 {
            return false;
        }
        let best = self.handles(State::Running)[0];
        let victim = self
            .ranking()
            .into_iter()
            .find(|&handle| handle != best && (handle == grower || self.may_leave(handle)));
        if let Some(victim) = victim {
            self.preempt(victim);
        }
        victim.is_some_and(|victim| victim != grower)
    }

    fn may_leave(&self, handle: u64) -> bool {
        let is_running = self.sequence(handle).state == State::Running;
        is_running && !self.is_reached(handle) && !self.plan.gone.contains(&handle)
    }

    /// Who leaves first, as it was when it was first asked in this plan; newcomers of the plan apart.
    fn ranking(&mut self) -> Vec<u64> {
        if let Some(ranking) = &self.plan.ranking {
            return ranking.clone();
        }
        let mut residents = self.handles(State::Running);
        residents.retain(|&handle| !self.has_entered_now(handle));
        let is_band_best = |handle: u64| {
            let band = self.key(handle).0;
            residents.iter().find(|&&other| self.key(other).0 == band) == Some(&handle)
        };
        let order = |handle: u64| {
            let sequence = self.sequence(handle);
            let most = sequence.ask.prompt.len() as u32 + sequence.max_output - 1;
            let ends_soon = most - sequence.planned <= self.config.block_size
                || sequence.table.len() as u32 >= self.blocks_for(most);
            let num_behind = sequence.table.len() as u32 - sequence.num_held();
            let num_recomputed =
                (self.num_exclusive(handle) + num_behind).min(self.blocks_for(sequence.planned));
            let key = sequence.key;
            (
                Reverse(key.0),
                is_band_best(handle),
                ends_soon,
                num_recomputed,
                Reverse(key),
            )
        };
        let mut ranking = residents.clone();
        ranking.retain(|&handle| !self.sequence(handle).ends_in_flight());
        ranking.sort_by_key(|&handle| order(handle));
        self.plan.ranking = Some(ranking.clone());
        ranking
    }

    pub(super) fn walk(&mut self) {
        let (mut num_passed, mut after, mut is_open) = (0, None::<Key>, true);
        while self.plan.left > 0 {
            let resident = self.plan.owing.get(num_passed).copied();
            let newcomer = self
                .handles(State::Waiting)
                .into_iter()
                .find(|&handle| is_open && after.is_none_or(|after| self.key(handle) > after));
            match (resident, newcomer) {
                (Some(resident), newcomer)
                    if newcomer
                        .is_none_or(|newcomer| self.key(resident).0 <= self.key(newcomer).0) =>
                {
                    num_passed += 1;
                    if self.sequence(resident).state == State::Running {
                        self.go_on(resident, self.plan.owing.len() - num_passed);
                    }
                }
                (_, Some(newcomer)) => {
                    after = Some(self.key(newcomer));
                    let num_behind = self.plan.owing.len() - num_passed;
                    is_open = self.may_pass(newcomer) && self.try_entry(newcomer, num_behind);
                }
                (_, None) => break,
            }
        }
        for i in 0..self.plan.prefills.len() {
            let (handle, start, count) = self.plan.prefills[i];
            let sequence = self.sequence(handle);
            let remaining = sequence.num_tokens() - sequence.planned;
            if self.plan.left > 0 && remaining > 0 && self.cached(handle).is_empty() {
                let way = Way {
                    hits: Vec::new(),
                    start: sequence.planned,
                };
                let num = self.chunk(sequence, way.start, self.plan.left, count);
                self.advance(handle, &way, num, Some((i, start, count)));
            }
        }
    }

    fn num_free_seats(&self) -> u32 {
        self.config.max_num_seqs - self.handles(State::Running).len() as u32
    }

    /// What one of `num_others + 1` prefills may take.
    fn share(&self, num_others: u32) -> u32 {
        let num_open = self
            .config
            .max_partial_prefills
            .saturating_sub(self.plan.num_partial);
        let part = self.plan.left / num_open.min(num_others + 1).max(1);
        let block_size = self.config.block_size;
        if part >= block_size {
            part / block_size * block_size
        } else {
            self.plan.left.min(block_size)
        }
    }

    fn num_newcomers(&self) -> u32 {
        (self.handles(State::Waiting).len() as u32).min(self.num_free_seats())
    }

    fn chunk(&self, sequence: &Sequence, start: u32, max_tokens: u32, num_taken: u32) -> u32 {
        let block_size = self.config.block_size;
        let remaining = sequence.num_tokens() - start;
        let most = match self.config.long_prefill_token_threshold {
            0 => self.plan.left,
            threshold => self.plan.left.min(threshold.saturating_sub(num_taken)),
        };
        if remaining <= most.min(max_tokens) {
            return remaining;
        }
        let may_be_partial =
            num_taken > 0 || self.plan.num_partial < self.config.max_partial_prefills;
        if !may_be_partial {
            return if remaining <= most { remaining } else { 0 };
        }
        let most = most.min(max_tokens);
        let whole = (start + most) / block_size * block_size;
        if whole > start { whole - start } else { most }
    }

    /// How `handle` can go on: by the cache, or by what it has on the host where that reaches further.
    fn way(&self, handle: u64) -> Way {
        let sequence = self.sequence(handle);
        let block_size = self.config.block_size;
        let hits = self.cached(handle);
        let start = sequence.planned + hits.len() as u32 * block_size;
        let Some((_, num_tokens, _)) = sequence.swapped else {
            return Way { hits, start };
        };
        let end = num_tokens.min(sequence.num_tokens() - 1);
        if end <= start {
            return Way { hits, start };
        }
        let finds = self.config.enable_prefix_caching && sequence.ask.reads_prefix_cache;
        let hit = |column: u32| {
            if column < self.behind(end) {
                return Hit::Behind;
            }
            let is_full = (column + 1) * block_size <= end;
            let found = (finds && is_full)
                .then(|| self.find(&self.content(handle, column)))
                .flatten();
            found.map_or(Hit::Copied, Hit::Found)
        };
        Way {
            hits: (0..self.blocks_for(end)).map(hit).collect(),
            start: end,
        }
    }

    /// Blocks of the cache with which `handle` can go on.
    fn cached(&self, handle: u64) -> Vec<Hit> {
        let sequence = self.sequence(handle);
        let held = sequence.table.len() as u32;
        let is_at_edge = sequence.planned == held * self.config.block_size;
        if !self.config.enable_prefix_caching || !sequence.ask.reads_prefix_cache || !is_at_edge {
            return Vec::new();
        }
        let last = (sequence.num_tokens() - 1) / self.config.block_size;
        let found = |column: u32| self.find(&self.content(handle, column));
        if self.config.window == 0 {
            return (held..last)
                .map_while(|column| found(column).map(Hit::Found))
                .collect();
        }
        (held..=last)
            .rev()
            .find_map(|end| {
                let low = self.behind(end * self.config.block_size).max(held);
                let seen = (low..end).map(found).collect::<Option<Vec<usize>>>()?;
                let behind = (held..low).map(|_| Hit::Behind);
                Some(behind.chain(seen.into_iter().map(Hit::Found)).collect())
            })
            .unwrap_or_default()
    }

    fn go_on(&mut self, handle: u64, num_behind: usize) {
        let max_tokens = self.share(num_behind as u32 + self.num_newcomers());
        loop {
            let way = self.way(handle);
            let num = self.chunk(self.sequence(handle), way.start, max_tokens, 0);
            if num == 0 {
                return;
            }
            if self.advance(handle, &way, num, None) {
                self.refund(handle, way.hits.len() as u32 * self.config.block_size);
                return;
            }
            if !self.make_room(handle) {
                return;
            }
        }
    }

    fn num_unheld(&self, way: &Way) -> u32 {
        way.num(|hit| {
            hit.found()
                .is_some_and(|at| self.blocks[at].num_holders == 0)
        })
    }

    fn advance(
        &mut self,
        handle: u64,
        way: &Way,
        num: u32,
        row: Option<(usize, u32, u32)>,
    ) -> bool {
        let block_size = self.config.block_size;
        let start = way.start;
        self.give_back(handle, row.map_or(start, |(_, start, _)| start));
        let num_given = way.hits.len() as u32 - way.num_copied();
        let most_blocks = self.sequence(handle).table.len() as u32 + num_given + self.available()
            - self.num_unheld(way);
        if most_blocks * block_size <= start {
            return false;
        }
        let end = (start + num).min(most_blocks * block_size);
        for at in way.hits.iter().filter_map(Hit::found) {
            self.cached.retain(|&cached| cached != at);
            self.blocks[at].num_holders += 1;
        }
        for hit in &way.hits {
            match hit {
                Hit::Copied => self.take_block(handle),
                hit => self.sequence_mut(handle).table.push(hit.found()),
            }
        }
        if let Some((num_blocks, ..)) = self.sequence_mut(handle).swapped.take()
            && way.num_copied() > 0
        {
            self.pinned.push((self.next_step, num_blocks));
            self.plan.num_swapped_in += way.num_copied();
        }
        // Full blocks that are copied back can be found by others at once.
        self.offer(handle, start);
        while (self.sequence(handle).table.len() as u32) < self.blocks_for(end) {
            self.take_block(handle);
        }
        let sequence = self.sequence_mut(handle);
        if !way.hits.is_empty() {
            sequence.num_found += way.num_found();
            sequence.offered = start / block_size;
            sequence.computed += start - sequence.planned;
        }
        sequence.planned = end;
        let is_partial = end < sequence.num_tokens();
        sequence.has_sampled = !is_partial;
        if let Some((i, start, count)) = row {
            self.plan.prefills[i] = (handle, start, count + num.min(end - start - count));
        } else {
            self.plan.prefills.push((handle, start, end - start));
            self.plan.num_partial += u32::from(is_partial);
        }
        self.plan.left -= end - start;
        self.offer(handle, end);
        true
    }

    /// Blocks that the known tokens of running prefills still need.
    fn debt(&self) -> u32 {
        let mut owing = self.handles(State::Running);
        owing.retain(|&handle| !self.sequence(handle).has_sampled);
        owing.into_iter().map(|handle| self.to_go(handle)).sum()
    }

    /// Those that are blocked let only their own band pass, and only if a seat is left.
    fn may_pass(&self, handle: u64) -> bool {
        let is_of_band = |&blocked: &u64| self.key(blocked).0 == self.key(handle).0;
        self.plan.blocked.first().is_none_or(is_of_band)
            && (self.plan.blocked.is_empty() || self.num_free_seats() > 0)
    }

    /// `false` closes the line behind.
    fn try_entry(&mut self, handle: u64, num_behind: usize) -> bool {
        if self.is_worn(handle) {
            return true;
        }
        match self.admit(handle, num_behind) {
            Entry::Closed => return false,
            Entry::Blocked => self.plan.blocked.push(handle),
            Entry::Taken => {
                for blocked in self.plan.blocked.clone() {
                    self.sequence_mut(blocked).num_bypasses += 1;
                }
            }
        }
        let blocked = &self.plan.blocked;
        let max_bypasses = self.config.max_bypasses;
        blocked.is_empty()
            || self.config.key != KeyPolicy::Fair
                && blocked.len() < 8
                && blocked.iter().all(|&blocked| {
                    let sequence = self.sequence(blocked);
                    sequence.num_bypasses < max_bypasses && sequence.promotion.is_none()
                })
    }

    /// Admits or resumes.
    fn admit(&mut self, handle: u64, num_behind: usize) -> Entry {
        let num_committed = self.num_committed();
        let is_copied = |copied: (u32, u32, u64)| copied.2 <= num_committed;
        if !self.sequence(handle).in_flight.is_empty()
            || self.plan.gone.contains(&handle)
            || !self.sequence(handle).swapped.is_none_or(is_copied)
        {
            return Entry::Closed;
        }
        let way = self.way(handle);
        let max_tokens = self.share(num_behind as u32 + self.num_newcomers().saturating_sub(1));
        let num = self.chunk(self.sequence(handle), way.start, max_tokens, 0);
        let has_room = self.plan.num_swapped_in + way.num_copied() <= self.max_swaps();
        if num == 0 || !has_room {
            return Entry::Closed;
        }
        if let Err(entry) = self.clear_the_way(handle, &way) {
            return entry;
        }
        self.note_entry(handle, way.num_found());
        self.leave(handle);
        let key = self.key(handle);
        let num_hit_tokens = way.start;
        if !self.sequence(handle).was_admitted {
            let num_charged = self.sequence(handle).num_tokens() - num_hit_tokens;
            let weight = u64::from(self.config.fair_input_weight);
            self.charge(handle, weight * u64::from(num_charged));
        }
        let sequence = self.sequence_mut(handle);
        (sequence.state, sequence.key, sequence.was_admitted) = (State::Running, key, true);
        self.plan.told.push(Told::Entered(handle, num_hit_tokens));
        assert!(self.advance(handle, &way, num, None));
        Entry::Taken
    }

    /// Makes seat and blocks available for a newcomer, at the cost of worse bands; all or nothing.
    fn clear_the_way(&mut self, handle: u64, way: &Way) -> Result<(), Entry> {
        let is_reserved = self.config.admission == Admission::Reserve;
        let (num_hits, num_behind) = (way.num_found(), way.num_behind());
        let num_columns = self.blocks_for(self.sequence(handle).num_tokens());
        let num_wanted = match (is_reserved, self.config.window) {
            (true, _) => self.limit_blocks(handle),
            (false, 0) => num_columns,
            (false, _) => (num_columns - num_behind).min(self.held_for(u32::MAX / 2)),
        };
        let num_new = num_wanted.saturating_sub(num_hits);
        let mut num_available = self.available() - self.num_unheld(way);
        let mut debt = if is_reserved {
            self.outstanding()
        } else {
            self.debt()
        };
        let was_seat_free = self.num_free_seats() > 0;
        let mut has_seat = was_seat_free;
        let mut num_running = self.handles(State::Running).len();
        let watermark = |num_running: usize| {
            if num_running == 0 || is_reserved {
                0
            } else {
                self.config.watermark_blocks
            }
        };
        let band = self.band(handle);
        if has_seat && num_new + debt + watermark(num_running) <= num_available {
            match self.outlook(handle, num_hits, num_new, debt, num_available) {
                Outlook::Fits => return Ok(()),
                Outlook::Later => return Err(Entry::Closed),
                Outlook::Exceeds => {}
            }
        }
        let stuck = if was_seat_free && !self.sequence(handle).was_admitted {
            Entry::Blocked
        } else {
            Entry::Closed
        };
        let is_worse = |&other: &u64| self.key(other).0 > band && !self.has_entered_now(other);
        if !self.handles(State::Running).iter().any(is_worse)
            || !self.fits_beside_equals(handle, num_hits)
        {
            return Err(stuck);
        }
        let mut leaving = Vec::new();
        loop {
            let watermark = if num_running == 0 || is_reserved {
                0
            } else {
                self.config.watermark_blocks
            };
            if has_seat && num_new + debt + watermark <= num_available {
                break;
            }
            let next = self.ranking().into_iter().find(|&victim| {
                self.key(victim).0 > band && self.may_leave(victim) && !leaving.contains(&victim)
            });
            let Some(victim) = next else {
                return Err(stuck);
            };
            let sequence = self.sequence(victim);
            let freed = |at: &&usize| {
                self.blocks[**at].num_holders == 1 && !way.hits.contains(&Hit::Found(**at))
            };
            num_available += sequence.table.iter().flatten().filter(freed).count() as u32;
            if is_reserved {
                debt -= self.limit_blocks(victim) - sequence.num_held();
            } else if !sequence.has_sampled {
                debt -= self.to_go(victim);
            }
            has_seat = true;
            num_running -= 1;
            leaving.push(victim);
        }
        for victim in leaving {
            self.preempt(victim);
        }
        Ok(())
    }
}
