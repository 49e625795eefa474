//! Who waits, in key order. Insert, remove and "the next after" are O(log n).

use alloc::collections::BTreeSet;
use core::ops::Bound;

use crate::ids::Slot;
use crate::policy::Key;

#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    line: BTreeSet<(Key, Slot)>,
}

impl WaitQueue {
    pub(crate) fn insert(&mut self, key: Key, slot: Slot) {
        let is_new = self.line.insert((key, slot));
        assert!(is_new, "a request waits once");
    }

    pub(crate) fn remove(&mut self, key: Key, slot: Slot) {
        let was_there = self.line.remove(&(key, slot));
        assert!(was_there, "a waiting request is in the queue");
    }

    /// The first with a key behind `after`, or the first of all.
    pub(crate) fn next_after(&self, after: Option<(Key, Slot)>) -> Option<(Key, Slot)> {
        match after {
            None => self.line.first().copied(),
            Some(after) => self
                .line
                .range((Bound::Excluded(after), Bound::Unbounded))
                .next()
                .copied(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.line.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, Slot)> {
        self.line.iter().copied()
    }
}
