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
}

/// What came of a try to admit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Taken,
    Blocked,
    Passed,
    Closed,
}

/// What an admission needs, and what there is.
#[derive(Clone, Copy, Debug)]
struct Need {
    num_new: u32,
    num_shared: u32,
    debt: u32,
    num_available: u32,
    has_seat: bool,
    has_adapter: bool,
    num_running: usize,
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

    pub(super) fn is_reached(&self, handle: u64) -> bool {
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
        let num_shared = self.num_shared(way);
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
            sequence.num_shared += num_shared;
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
            Entry::Passed => return true,
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
        let need = self.need(handle);
        let in_vain = if need.has_seat && !self.sequence(handle).was_admitted {
            Entry::Blocked
        } else {
            Entry::Closed
        };
        let displaces = match self.look_out(handle, &need) {
            Outlook::Fits => false,
            Outlook::Later => return Entry::Closed,
            Outlook::Exceeds => {
                let band = self.band(handle);
                let is_worse =
                    |&other: &u64| self.key(other).0 > band && !self.has_entered_now(other);
                let may_displace = self.handles(State::Running).iter().any(is_worse);
                if !may_displace || !self.fits_beside_equals(handle, need.num_shared) {
                    return in_vain;
                }
                true
            }
        };
        let way = self.way(handle);
        if !self.begins_with_shared(&way, need.num_shared) {
            self.sequence_mut(handle).num_held = 0;
            return Entry::Closed;
        }
        if way.num_copied() == 0 && self.may_wait_for_block(handle, way.hits.len() as u32) {
            return Entry::Passed;
        }
        let max_tokens = self.share(num_behind as u32 + self.num_newcomers().saturating_sub(1));
        let num = self.chunk(self.sequence(handle), way.start, max_tokens, 0);
        let has_room = self.plan.num_swapped_in + way.num_copied() <= self.max_swaps();
        if num == 0 || !has_room {
            return Entry::Closed;
        }
        if displaces && !self.displace(handle, &way, need) {
            return in_vain;
        }
        self.note_entry(handle, self.num_shared(&way));
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

    fn num_shared(&self, way: &Way) -> u32 {
        way.num_found() - self.num_unheld(way)
    }

    fn begins_with_shared(&self, way: &Way, num_shared: u32) -> bool {
        let is_shared = |hit: &Hit| {
            hit.found()
                .is_some_and(|at| self.blocks[at].num_holders > 0)
        };
        let num_leading = way.hits.iter().take_while(|hit| is_shared(hit)).count();
        num_leading as u32 >= num_shared
    }

    /// Whether a prefill of this plan goes on with the very block that `handle` would begin with.
    fn may_wait_for_block(&mut self, handle: u64, column: u32) -> bool {
        let sequence = self.sequence(handle);
        let block_size = self.config.block_size;
        let may_wait = self.config.key == KeyPolicy::Prefix
            && sequence.num_prefix_waits < self.config.max_prefix_waits
            && sequence.promotion.is_none()
            && self.plan.num_let_wait < 8
            && column < self.last_findable(handle);
        let goes_on_with_it = |&(other, ..): &(u64, u32, u32)| {
            let prefill = self.sequence(other);
            !prefill.has_sampled
                && prefill.planned / block_size == column
                && (column + 1) * block_size <= prefill.num_tokens()
                && self.content(other, column) == self.content(handle, column)
        };
        let waits = may_wait && self.plan.prefills.iter().any(goes_on_with_it);
        if waits {
            self.sequence_mut(handle).num_prefix_waits += 1;
            self.plan.num_let_wait += 1;
        }
        waits
    }

    fn need(&mut self, handle: u64) -> Need {
        // Where there is a window, all that it sees counts, shared or not.
        let num_shared = match self.config.window {
            0 => self.num_held_by_others(handle),
            _ => 0,
        };
        let is_reserved = self.config.admission == Admission::Reserve;
        let num_wanted = if is_reserved {
            self.limit_blocks(handle)
        } else {
            self.held_for(self.sequence(handle).num_tokens())
        };
        Need {
            num_new: num_wanted - num_shared,
            num_shared,
            debt: if is_reserved {
                self.outstanding()
            } else {
                self.debt()
            },
            num_available: self.available(),
            has_seat: self.num_free_seats() > 0,
            has_adapter: self.has_adapter_room(handle, &[]),
            num_running: self.handles(State::Running).len(),
        }
    }

    fn is_met(&self, need: &Need) -> bool {
        let is_reserved = self.config.admission == Admission::Reserve;
        let watermark = if need.num_running == 0 || is_reserved {
            0
        } else {
            self.config.watermark_blocks
        };
        let num_wanted = need.num_new + need.debt + watermark;
        need.has_seat && need.has_adapter && num_wanted <= need.num_available
    }

    fn look_out(&mut self, handle: u64, need: &Need) -> Outlook {
        if !self.is_met(need) {
            return Outlook::Exceeds;
        }
        let Need {
            num_new,
            num_shared,
            debt,
            num_available,
            ..
        } = *need;
        self.outlook(handle, num_shared, num_new, debt, num_available)
    }

    /// Whether `handle` may run beside all but `leaving`.
    fn has_adapter_room(&self, handle: u64, leaving: &[u64]) -> bool {
        let mut running = self.handles(State::Running);
        running.retain(|other| !leaving.contains(other));
        let mut adapters: Vec<u64> = running
            .iter()
            .map(|&other| self.sequence(other).ask.adapter)
            .chain([self.sequence(handle).ask.adapter])
            .filter(|&adapter| adapter != 0)
            .collect();
        adapters.sort_unstable();
        adapters.dedup();
        let (adapter, max) = (
            self.sequence(handle).ask.adapter,
            self.config.max_adapters as usize,
        );
        adapter == 0 || max == 0 || adapters.len() <= max
    }

    /// Makes seat, adapter and blocks available at the cost of worse bands; all or nothing.
    fn displace(&mut self, handle: u64, way: &Way, mut need: Need) -> bool {
        let band = self.band(handle);
        let ranking = self.ranking();
        let may_go =
            |naive: &Self, victim: u64| naive.key(victim).0 > band && naive.may_leave(victim);
        let mut leaving: Vec<u64> = Vec::new();
        if !need.has_adapter {
            let of = |adapter: u64| {
                let mut all = self.handles(State::Running);
                all.retain(|&other| self.sequence(other).ask.adapter == adapter);
                all
            };
            let adapters = ranking
                .iter()
                .map(|&victim| self.sequence(victim).ask.adapter)
                .filter(|&adapter| adapter != 0)
                .filter(|&adapter| {
                    let goes = |other: &u64| ranking.contains(other) && may_go(self, *other);
                    let all = of(adapter);
                    !all.is_empty() && all.iter().all(goes)
                });
            let Some(emptied) = adapters.min_by_key(|&adapter| (of(adapter).len(), adapter)) else {
                return false;
            };
            let all = of(emptied);
            leaving.clone_from(&ranking);
            leaving.retain(|victim| all.contains(victim));
            for &victim in &leaving {
                self.count_out(&mut need, &way.hits, victim);
            }
            need.has_adapter = true;
        }
        while !self.is_met(&need) {
            let next = ranking
                .iter()
                .find(|&&victim| may_go(self, victim) && !leaving.contains(&victim));
            let Some(&victim) = next else {
                return false;
            };
            self.count_out(&mut need, &way.hits, victim);
            leaving.push(victim);
        }
        for victim in ranking {
            if leaving.contains(&victim) {
                self.preempt(victim);
            }
        }
        true
    }

    /// What comes free with `victim`, but for what was counted as shared already.
    fn count_out(&self, need: &mut Need, hits: &[Hit], victim: u64) {
        let sequence = self.sequence(victim);
        let shared = &hits[..need.num_shared as usize];
        let freed =
            |at: &&usize| self.blocks[**at].num_holders == 1 && !shared.contains(&Hit::Found(**at));
        need.num_available += sequence.table.iter().flatten().filter(freed).count() as u32;
        if self.config.admission == Admission::Reserve {
            need.debt -= self.limit_blocks(victim) - sequence.num_held();
        } else if !sequence.has_sampled {
            need.debt -= self.to_go(victim);
        }
        need.has_seat = true;
        need.num_running -= 1;
    }
}
