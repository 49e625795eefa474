//! Who leaves, when a resident cannot grow or a better band wants in.

use core::cmp::Reverse;

use super::Scheduler;
use crate::ids::{BlockId, Slot};
use crate::policy::{Admission, VictimOrder};
use crate::sequence::Sequence;

/// What an admission needs, and what there is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    /// Blocks for all tokens that it has, but for those that others hold already; one that is only cached has to be
    /// available like any other.
    pub(super) num_blocks: u32,
    /// Its leading blocks that others hold.
    pub(super) num_shared: u32,
    /// Blocks that resident prefills still need.
    pub(super) debt: u32,
    /// Blocks left unused while others run.
    pub(super) watermark: u32,
    pub(super) num_available: u32,
    pub(super) has_seat: bool,
    /// One more with its adapter may run.
    pub(super) has_adapter: bool,
}

impl Need {
    /// Whether it fits beside `num_running` others.
    pub(super) fn is_met(&self, num_running: u32) -> bool {
        let watermark = if num_running == 0 { 0 } else { self.watermark };
        self.has_seat
            && self.has_adapter
            && Admission::fits(self.num_blocks, self.debt, watermark, self.num_available)
    }
}

impl Scheduler {
    /// Blocks certain to come free at a commit in flight, less those that others already wait for.
    fn num_certain(&mut self) -> u32 {
        if let Some(num) = self.pass.num_certain {
            return num;
        }
        let num = self
            .residents
            .iter()
            .map(|resident| &self.arena[resident.handle.slot()])
            .filter(|sequence| sequence.is_running() && sequence.ends_in_flight(self.pass.serial))
            .filter_map(Sequence::seat)
            .map(|seat| self.kv.num_exclusive(seat))
            .sum();
        self.pass.num_certain = Some(num);
        num
    }

    /// Tries to make a block available for resident `slot`: `true` if it should try again, `false` if it must wait
    /// (or was the victim itself).
    pub(super) fn make_room(&mut self, slot: Slot) -> bool {
        let num_certain = self.num_certain();
        if num_certain > 0 {
            self.pass.num_certain = Some(num_certain - 1);
            return false;
        }
        let Some(victim) = self.next_victim_to_grow(slot) else {
            return false;
        };
        self.preempt(victim);
        victim != slot
    }

    /// The resident that leaves so that `slot` can grow; never the best key.
    fn next_victim_to_grow(&mut self, slot: Slot) -> Option<Slot> {
        let start = self.rank_victims();
        let best = self.best_resident();
        self.pass.victim_list[start..]
            .iter()
            .map(|&(_, victim)| victim)
            .find(|&victim| Some(victim) != best && (victim == slot || self.may_leave(victim)))
    }

    /// The best key of those that may run now.
    pub(super) fn best_resident(&mut self) -> Option<Slot> {
        if self
            .pass
            .best
            .is_some_and(|slot| self.arena[slot].is_running())
        {
            return self.pass.best;
        }
        self.pass.best = self
            .residents
            .iter()
            .filter(|resident| self.is_free_to_run(resident.handle.slot()))
            .min_by_key(|resident| resident.key)
            .map(|resident| resident.handle.slot());
        self.pass.best
    }

    /// Whether quarantine lets `slot` run now.
    pub(super) fn is_free_to_run(&self, slot: Slot) -> bool {
        self.quarantine.active().is_none_or(|group| {
            self.arena[slot]
                .confinement
                .is_some_and(|confinement| confinement.group == group)
        })
    }

    /// Whether `slot` can still be a victim in this plan.
    pub(super) fn may_leave(&self, slot: Slot) -> bool {
        let sequence = &self.arena[slot];
        sequence.is_running()
            && !sequence.row.is_reached
            && sequence.preempted_in != self.pass.serial
    }

    /// Ranks the residents as victims, once a plan; where the list of those still there starts.
    pub(super) fn rank_victims(&mut self) -> usize {
        let Some(mut start) = self.pass.victims else {
            self.pass.victim_list.clear();
            let mut band = None;
            for i in 0..self.residents.len() {
                let resident = *self.residents.get(i);
                let slot = resident.handle.slot();
                if resident.has_left() {
                    continue;
                }
                let is_band_best = band.replace(resident.key.band) != Some(resident.key.band);
                let sequence = &self.arena[slot];
                // One that ends in flight gives its blocks back anyway, with its last token sampled.
                if !sequence.is_running() || sequence.ends_in_flight(self.pass.serial) {
                    continue;
                }
                self.pass
                    .victim_list
                    .push((self.victim_order(slot, is_band_best), slot));
            }
            self.pass.victim_list.sort_unstable();
            self.pass.victims = Some(0);
            return 0;
        };
        let list = &self.pass.victim_list;
        while start < list.len() && !self.arena[list[start].1].is_running() {
            start += 1;
        }
        self.pass.victims = Some(start);
        start
    }

    fn victim_order(&self, slot: Slot, is_band_best: bool) -> VictimOrder {
        let sequence = &self.arena[slot];
        let seat = sequence.seat().expect("a resident has a seat");
        let most_tokens = sequence.most_tokens();
        let num_computed = sequence.num_planned - u32::from(sequence.decodes_in(self.pass.serial));
        VictimOrder {
            is_member: self.quarantine.active().is_some() && self.is_free_to_run(slot),
            band: Reverse(sequence.key.band),
            is_band_best,
            ends_soon: most_tokens - num_computed <= self.config.block_size
                || self.kv.len(seat) >= self.config.blocks_for(most_tokens),
            // What lies behind the window is computed again for what hangs on it.
            num_recomputed: (self.kv.num_exclusive(seat) + self.kv.num_behind(seat))
                .min(self.config.blocks_for(num_computed)),
            key: Reverse(sequence.key),
        }
    }

    /// Whether anyone may have to leave for `slot`: its age puts it first in line, and displaces nobody.
    pub(super) fn may_displace(&self, slot: Slot) -> bool {
        let band = self.own_band(slot);
        let worst = self.residents.worst_band();
        self.quarantine.active().is_some() || worst.is_some_and(|worst| worst > band)
    }

    /// Makes what `slot` needs available at the cost of residents of a worse band (or outside its quarantine group);
    /// `false`, and no change, where that is not possible.
    pub(super) fn displace_for(&mut self, slot: Slot, mut need: Need) -> bool {
        let band = self.own_band(slot);
        let start = self.rank_victims();
        let emptied = if need.has_adapter {
            None
        } else {
            let Some(adapter) = self.adapter_to_empty(start, band) else {
                return false;
            };
            Some(adapter)
        };
        let (mut num_running, mut end) = (self.num_running, start);
        if emptied.is_some() {
            need.has_adapter = true;
            for i in start..self.pass.victim_list.len() {
                let victim = self.pass.victim_list[i].1;
                if self.goes_with(victim, emptied) && self.may_be_displaced(victim, band) {
                    self.count_out(&mut need, victim);
                    num_running -= 1;
                }
            }
        }
        while !need.is_met(num_running) {
            let Some(&(_, victim)) = self.pass.victim_list.get(end) else {
                return false;
            };
            end += 1;
            if !self.goes_with(victim, emptied) && self.may_be_displaced(victim, band) {
                self.count_out(&mut need, victim);
                num_running -= 1;
            }
        }
        for i in start..self.pass.victim_list.len() {
            if i >= end && emptied.is_none() {
                break;
            }
            let victim = self.pass.victim_list[i].1;
            let leaves = i < end || self.goes_with(victim, emptied);
            if leaves && self.may_be_displaced(victim, band) {
                self.preempt(victim);
            }
        }
        true
    }

    /// Whether `victim` runs with the adapter that is to be emptied.
    fn goes_with(&self, victim: Slot, emptied: Option<u64>) -> bool {
        emptied.is_some_and(|adapter| self.arena[victim].standing.adapter == adapter)
    }

    /// What there is for `need` once `victim` has left.
    fn count_out(&self, need: &mut Need, victim: Slot) {
        // Those of its hits that were not counted as shared have to be available, and are so then.
        let shared = &self.pass.hits[..need.num_shared as usize];
        need.num_available += self.num_freed_by(victim, shared);
        // For a group in quarantine no debt was counted.
        need.debt = need.debt.saturating_sub(self.debt_of(victim));
        need.has_seat = true;
    }

    pub(super) fn may_be_displaced(&self, victim: Slot, band: i64) -> bool {
        let is_worse = match self.quarantine.active() {
            Some(_) => !self.is_free_to_run(victim),
            None => self.arena[victim].key.band > band,
        };
        is_worse && self.may_leave(victim)
    }

    /// What goes with `victim` of the debt that an admission reckons with.
    fn debt_of(&self, victim: Slot) -> u32 {
        match self.config.admission {
            Admission::Reserve => {
                let seat = self.arena[victim].seat().expect("a victim has a seat");
                self.limit_blocks(victim) - self.kv.num_held(seat)
            }
            _ => self.arena[victim].row.debt,
        }
    }

    /// Blocks that come free with `victim`, but for those in `kept`, each of which lies in the column of its own.
    fn num_freed_by(&self, victim: Slot, kept: &[BlockId]) -> u32 {
        let seat = self.arena[victim].seat().expect("a victim has a seat");
        let table = self.kv.table(seat);
        table
            .iter()
            .enumerate()
            .filter(|&(column, block)| {
                self.kv.pool.num_holders(*block) == 1 && kept.get(column) != Some(block)
            })
            .count() as u32
    }
}
