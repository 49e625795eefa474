//! Who has a seat, in key order. Departures are marked at once; they and the newcomers are settled once a plan.

use alloc::vec::Vec;

use crate::ids::Handle;
use crate::policy::Key;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Resident {
    pub(crate) key: Key,
    pub(crate) handle: Handle,
    /// It gave up its seat since the last `settle`.
    pub(crate) has_left: bool,
}

#[derive(Debug)]
pub(crate) struct Residents {
    /// In key order, as the newcomers are.
    order: Vec<Resident>,
    newcomers: Vec<Resident>,
    has_departures: bool,
}

impl Residents {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self {
            // Who has left stays until it is settled, beside the newcomer that took the seat.
            order: Vec::with_capacity(2 * capacity),
            newcomers: Vec::with_capacity(capacity),
            has_departures: false,
        }
    }

    /// Takes in who was seated, or has another key; most come in key order, each at the end.
    pub(crate) fn add(&mut self, key: Key, handle: Handle) {
        let resident = Resident {
            key,
            handle,
            has_left: false,
        };
        if self.newcomers.last().is_none_or(|last| last.key <= key) {
            self.newcomers.push(resident);
        } else {
            let place = self.newcomers.partition_point(|other| other.key <= key);
            self.newcomers.insert(place, resident);
        }
    }

    /// Marks that the resident with this key has left. O(log residents).
    pub(crate) fn note_departure(&mut self, key: Key) {
        let find = |list: &[Resident]| {
            list.binary_search_by_key(&key, |resident| resident.key)
                .ok()
        };
        let resident = if let Some(place) = find(&self.order) {
            &mut self.order[place]
        } else {
            let place = find(&self.newcomers).expect("who leaves was a resident");
            &mut self.newcomers[place]
        };
        resident.has_left = true;
        self.has_departures = true;
    }

    /// Drops who left and takes in who came.
    pub(crate) fn settle(&mut self) {
        if self.has_departures {
            self.order.retain(|resident| !resident.has_left);
            self.newcomers.retain(|resident| !resident.has_left);
            self.has_departures = false;
        }
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

    /// Entries, of those that have left included; newcomers since the last `settle` are not among them.
    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    pub(crate) fn get(&self, i: usize) -> &Resident {
        &self.order[i]
    }

    /// No settled resident's band is worse.
    pub(crate) fn worst_band(&self) -> Option<i64> {
        self.order.last().map(|resident| resident.key.band)
    }

    /// No settled resident's band is better.
    pub(crate) fn best_band(&self) -> Option<i64> {
        let best = self.order.iter().find(|resident| !resident.has_left);
        best.map(|resident| resident.key.band)
    }

    /// Those with a seat now.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Resident> {
        self.order
            .iter()
            .chain(&self.newcomers)
            .filter(|resident| !resident.has_left)
    }
}
