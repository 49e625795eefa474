//! Who has a seat, in key order. Departures and newcomers are settled once a plan, in one pass.

use alloc::vec::Vec;

use crate::arena::Arena;
use crate::ids::Handle;
use crate::policy::Key;
use crate::sequence::Sequence;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Resident {
    pub(crate) key: Key,
    pub(crate) handle: Handle,
    pub(crate) residency: u32,
}

impl Resident {
    /// Whether it still has the seat that this entry is for.
    pub(crate) fn is_current(&self, arena: &Arena<Sequence>) -> bool {
        arena.slot(self.handle).is_some_and(|slot| {
            let sequence = &arena[slot];
            sequence.residency == self.residency && sequence.seat().is_some()
        })
    }
}

#[derive(Debug)]
pub(crate) struct Residents {
    order: Vec<Resident>,
    newcomers: Vec<Resident>,
    has_departures: bool,
}

impl Residents {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self {
            // Stale entries stay until they are settled, beside the newcomers that took their seats.
            order: Vec::with_capacity(2 * capacity),
            newcomers: Vec::with_capacity(capacity),
            has_departures: false,
        }
    }

    pub(crate) fn add(&mut self, resident: Resident) {
        self.newcomers.push(resident);
    }

    pub(crate) fn note_departure(&mut self) {
        self.has_departures = true;
    }

    /// Drops who left and takes in who came.
    pub(crate) fn settle(&mut self, arena: &Arena<Sequence>) {
        if self.has_departures {
            self.order.retain(|resident| resident.is_current(arena));
            self.newcomers.retain(|resident| resident.is_current(arena));
            self.has_departures = false;
        }
        if self.newcomers.is_empty() {
            return;
        }
        self.newcomers.sort_unstable_by_key(|resident| resident.key);
        let (mut old, mut new) = (self.order.len(), self.newcomers.len());
        self.order.extend_from_slice(&self.newcomers);
        // Merge from the back, in place, until only old ones are left in front.
        while new > 0 {
            let at = old + new - 1;
            if old > 0 && self.order[old - 1].key > self.newcomers[new - 1].key {
                self.order[at] = self.order[old - 1];
                old -= 1;
            } else {
                self.order[at] = self.newcomers[new - 1];
                new -= 1;
            }
        }
        self.newcomers.clear();
    }

    /// Entries, stale ones included; newcomers since the last `settle` are not among them.
    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    pub(crate) fn get(&self, i: usize) -> Resident {
        self.order[i]
    }

    /// No settled resident's band is worse.
    pub(crate) fn worst_band(&self) -> Option<i32> {
        self.order.last().map(|resident| resident.key.band)
    }

    /// The settled ones, and those that came since.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Resident> {
        self.order.iter().chain(&self.newcomers)
    }
}
