//! The tier of the aged: a request that has waited too long, or was preempted too often, is first in line, before all bands,
//! and then keeps its seat until it has made some progress. It displaces nobody whom its own band would not. The tier is a
//! quarter of the seats, so that it never replaces the order that was asked for.
//!
//! Costs: O(tier) a plan, O(1) a wait that begins.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::Scheduler;
use crate::ids::{Handle, Slot};
use crate::sequence::State;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Aged {
    pub(crate) handle: Handle,
    /// Tokens whose KV it must have to leave the tier; known once it has a seat.
    pub(crate) until: Option<u32>,
}

#[derive(Debug, Default)]
pub(crate) struct Ageing {
    /// Waits by the step in which they began; some are over.
    waits: VecDeque<(u64, Handle)>,
    /// Those preempted too often; some run again.
    worn: VecDeque<Handle>,
    pub(crate) tier: Vec<Aged>,
    num_promotions: u64,
}

impl Scheduler {
    /// A wait begins.
    pub(super) fn note_wait(&mut self, slot: Slot) {
        let since = self.next_step;
        self.arena[slot].standing.since = since;
        let standing = &mut self.arena[slot].standing;
        standing.num_bypasses = 0;
        standing.num_prefix_waits = 0;
        standing.num_found_blocks = 0;
        standing.num_held_blocks = 0;
        let may_age = self.config.key.may_starve() && !self.config.admission.is_static();
        if self.config.ageing_steps > 0 && may_age {
            let handle = self.arena.handle(slot);
            self.ageing.waits.push_back((since, handle));
        }
    }

    /// A preemption, but not by a failure, is one that wears.
    pub(super) fn note_wear(&mut self, slot: Slot) {
        self.arena[slot].standing.num_recent_preemptions += 1;
        if self.is_worn(slot) {
            let handle = self.arena.handle(slot);
            self.ageing.worn.push_back(handle);
        }
    }

    /// Whether `slot` was preempted so often that it runs again only in the tier.
    pub(super) fn is_worn(&self, slot: Slot) -> bool {
        let standing = &self.arena[slot].standing;
        self.config.max_preemptions > 0
            && standing.num_recent_preemptions >= self.config.max_preemptions
            && standing.promotion.is_none()
            && !self.config.admission.is_static()
    }

    /// Lets those leave the tier that got on, and those in whose time has come.
    pub(super) fn settle_tier(&mut self) {
        let mut at = 0;
        while at < self.ageing.tier.len() {
            if self.stays_aged(at) {
                at += 1;
            } else {
                self.ageing.tier.remove(at);
            }
        }
        while self.ageing.tier.len() < self.config.max_aged() {
            let Some(slot) = self.next_due() else {
                return;
            };
            self.ageing.num_promotions += 1;
            self.arena[slot].standing.promotion = Some(self.ageing.num_promotions);
            self.requeue(slot);
            self.ageing.tier.push(Aged {
                handle: self.arena.handle(slot),
                until: None,
            });
        }
    }

    fn stays_aged(&mut self, at: usize) -> bool {
        let Aged { handle, until } = self.ageing.tier[at];
        let Some(slot) = self.arena.slot(handle) else {
            return false;
        };
        let sequence = &self.arena[slot];
        if !sequence.is_running() {
            return true;
        }
        let Some(until) = until else {
            let until =
                (sequence.num_tokens() + self.config.block_size).min(sequence.most_tokens());
            self.ageing.tier[at].until = Some(until);
            return true;
        };
        if sequence.num_computed < until {
            return true;
        }
        let old = sequence.key;
        let standing = &mut self.arena[slot].standing;
        standing.promotion = None;
        standing.num_recent_preemptions = 0;
        let key = self.turn(slot).key();
        self.leave_band(slot);
        self.arena[slot].key = key;
        self.join_band(slot);
        self.residents.note_departure(old);
        self.residents.add(key, handle);
        false
    }

    /// The next that is due for the tier.
    fn next_due(&mut self) -> Option<Slot> {
        while let Some(handle) = self.ageing.worn.pop_front() {
            let slot = self.waiting_outside_tier(handle);
            if slot.is_some() {
                return slot;
            }
        }
        let now = self.next_step;
        while let Some(&(since, handle)) = self.ageing.waits.front() {
            if since + u64::from(self.config.ageing_steps) > now {
                return None;
            }
            self.ageing.waits.pop_front();
            let Some(slot) = self.waiting_outside_tier(handle) else {
                continue;
            };
            if self.arena[slot].standing.since != since {
                continue;
            }
            // An account's turn comes by itself, so under a fair policy only a band can hold a request back for ever.
            if self.is_fair() && !self.is_held_by_band(slot) {
                self.arena[slot].standing.since = now;
                self.ageing.waits.push_back((now, handle));
                continue;
            }
            return Some(slot);
        }
        None
    }

    fn waiting_outside_tier(&self, handle: Handle) -> Option<Slot> {
        let slot = self.arena.slot(handle)?;
        let sequence = &self.arena[slot];
        (sequence.state == State::Waiting && sequence.standing.promotion.is_none()).then_some(slot)
    }

    /// Whether a better band than that of `slot` runs or waits.
    fn is_held_by_band(&self, slot: Slot) -> bool {
        let band = self.arena[slot].key.band;
        let running = self.residents.best_band();
        running
            .into_iter()
            .chain(self.queue.best_band())
            .any(|best| best < band)
    }
}
