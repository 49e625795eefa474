//! Who has a seat, in key order. Departures are marked at once; newcomers are merged in once a plan, and who has left is
//! dropped when it is worth a pass: O(1) a departure.

use alloc::vec::Vec;

use crate::ids::Handle;
use crate::policy::Key;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Resident {
    pub(crate) key: Key,
    /// No one's once it gave up its seat.
    pub(crate) handle: Handle,
}

impl Resident {
    pub(crate) fn has_left(&self) -> bool {
        self.handle == Handle::NONE
    }
}

#[derive(Debug)]
pub(crate) struct Residents {
    /// In key order, as the newcomers are. A resumed one stands behind the entries that it left.
    order: Vec<Resident>,
    newcomers: Vec<Resident>,
    /// Entries of `order` that have left.
    num_left: usize,
    has_left_newcomers: bool,
}

impl Residents {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self {
            // Those with a seat, those that have left and are not dropped yet, and the newcomers.
            order: Vec::with_capacity(3 * capacity),
            newcomers: Vec::with_capacity(capacity),
            num_left: 0,
            has_left_newcomers: false,
        }
    }

    /// Takes in who was seated, or has another key; most come in key order, each at the end.
    pub(crate) fn add(&mut self, key: Key, handle: Handle) {
        let resident = Resident { key, handle };
        if self.newcomers.last().is_none_or(|last| last.key <= key) {
            self.newcomers.push(resident);
        } else {
            let place = self.newcomers.partition_point(|other| other.key <= key);
            self.newcomers.insert(place, resident);
        }
    }

    /// Marks that the resident with this key has left. O(log residents).
    pub(crate) fn note_departure(&mut self, key: Key) {
        if let Some(resident) = last_with(&mut self.order, key) {
            resident.handle = Handle::NONE;
            self.num_left += 1;
        } else {
            let resident = last_with(&mut self.newcomers, key).expect("who leaves was a resident");
            resident.handle = Handle::NONE;
            self.has_left_newcomers = true;
        }
    }

    /// Takes in who came.
    pub(crate) fn settle(&mut self) {
        if self.num_left * 16 > self.order.len() {
            self.order.retain(|resident| !resident.has_left());
            self.num_left = 0;
        }
        if self.has_left_newcomers {
            self.newcomers.retain(|resident| !resident.has_left());
            self.has_left_newcomers = false;
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

    /// Settled entries, those that have left included.
    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    pub(crate) fn get(&self, i: usize) -> &Resident {
        &self.order[i]
    }

    /// Settled entries from the `i`th on, those that have left included.
    pub(crate) fn settled_from(&self, i: usize) -> &[Resident] {
        &self.order[i..]
    }

    /// Entries in all, newcomers and those that have left included.
    pub(crate) fn num_entries(&self) -> usize {
        self.order.len() + self.newcomers.len()
    }

    /// One of them, newcomers last.
    pub(crate) fn entry(&self, i: usize) -> &Resident {
        self.order
            .get(i)
            .unwrap_or_else(|| &self.newcomers[i - self.order.len()])
    }

    /// Whether nobody has a seat.
    pub(crate) fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// No settled resident's band is worse.
    pub(crate) fn worst_band(&self) -> Option<i64> {
        let worst = self.order.iter().rfind(|resident| !resident.has_left());
        worst.map(|resident| resident.key.band)
    }

    /// Nobody's band is better.
    pub(crate) fn best_band(&self) -> Option<i64> {
        let best_of = |list: &[Resident]| {
            let best = list.iter().find(|resident| !resident.has_left());
            best.map(|resident| resident.key.band)
        };
        match (best_of(&self.order), best_of(&self.newcomers)) {
            (Some(settled), Some(newcomer)) => Some(settled.min(newcomer)),
            (settled, newcomer) => settled.or(newcomer),
        }
    }

    /// Those with a seat now.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Resident> {
        self.order
            .iter()
            .chain(&self.newcomers)
            .filter(|resident| !resident.has_left())
    }
}

/// The entry of the resident with this key, if it has a seat.
fn last_with(list: &mut [Resident], key: Key) -> Option<&mut Resident> {
    let end = list.partition_point(|resident| resident.key <= key);
    list[..end]
        .last_mut()
        .filter(|last| last.key == key && !last.has_left())
}
