//! Requests that end at a time of their own, whatever they have by then. O(log requests) each; O(1) where none is due.

use alloc::collections::BTreeSet;

use super::Scheduler;
use crate::ids::Slot;
use crate::request::FinishReason;

#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    by_time: BTreeSet<(u64, Slot)>,
}

impl Deadlines {
    pub(crate) fn first(&self) -> Option<(u64, Slot)> {
        self.by_time.first().copied()
    }
}

impl Scheduler {
    pub(super) fn note_deadline(&mut self, slot: Slot) {
        if let Some(at) = self.arena[slot].standing.expires_us {
            self.deadlines.by_time.insert((at, slot));
        }
    }

    pub(super) fn drop_deadline(&mut self, slot: Slot) {
        if let Some(at) = self.arena[slot].standing.expires_us {
            self.deadlines.by_time.remove(&(at, slot));
        }
    }

    /// Ends those whose time has come.
    pub(super) fn end_expired(&mut self, now_us: u64) {
        while let Some((at, slot)) = self.deadlines.first() {
            if at > now_us {
                return;
            }
            let num_output = self.arena[slot].num_output();
            self.end(slot, FinishReason::Expired, num_output);
        }
    }

    /// When the next request expires, if any may.
    pub fn next_expiry_us(&self) -> Option<u64> {
        self.deadlines.first().map(|(at, _)| at)
    }
}
