//! Slots for requests. A slot that is emptied gets a new generation, so an old handle finds nothing.
//!
//! Every operation is O(1); memory grows to the most requests that lived at once and is then reused.

use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

use crate::ids::{Handle, Slot};

#[derive(Debug)]
struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

#[derive(Debug)]
pub(crate) struct Arena<T> {
    entries: Vec<Entry<T>>,
    vacant: Vec<Slot>,
}

/// The slots of an arena whose number does not change meanwhile.
pub(crate) struct Occupied<'a, T>(&'a mut [Entry<T>]);

impl<'a, T> Occupied<'a, T> {
    /// The value of a live handle.
    #[inline]
    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        Occupied(self.0).into_mut(handle)
    }

    fn into_mut(self, handle: Handle) -> Option<&'a mut T> {
        let entry = self.0.get_mut(handle.slot().0 as usize)?;
        // An emptied slot's next generation is in no handle yet.
        if entry.generation != handle.generation() {
            return None;
        }
        entry.value.as_mut()
    }
}

impl<T> Arena<T> {
    pub(crate) fn new() -> Self {
        Self {
            entries: Vec::new(),
            vacant: Vec::new(),
        }
    }

    pub(crate) fn insert(&mut self, value: T) -> Handle {
        if let Some(slot) = self.vacant.pop() {
            let entry = &mut self.entries[slot.0 as usize];
            entry.value = Some(value);
            return Handle::new(slot, entry.generation);
        }
        let slot = Slot(self.entries.len() as u32);
        self.entries.push(Entry {
            generation: 1,
            value: Some(value),
        });
        Handle::new(slot, 1)
    }

    /// Drops the value where it is: it is large, and nobody wants it.
    pub(crate) fn remove(&mut self, slot: Slot) {
        let entry = &mut self.entries[slot.0 as usize];
        assert!(entry.value.is_some(), "slot is occupied");
        entry.value = None;
        entry.generation = if entry.generation == Handle::MAX_GENERATION {
            1
        } else {
            entry.generation + 1
        };
        self.vacant.push(slot);
    }

    /// The slot of a live handle.
    pub(crate) fn slot(&self, handle: Handle) -> Option<Slot> {
        let entry = self.entries.get(handle.slot().0 as usize)?;
        (entry.generation == handle.generation() && entry.value.is_some()).then(|| handle.slot())
    }

    /// The value of a live handle.
    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        self.occupied().into_mut(handle)
    }

    /// For a loop over handles, which so keeps in registers where they lie.
    pub(crate) fn occupied(&mut self) -> Occupied<'_, T> {
        Occupied(&mut self.entries)
    }

    /// The value in a slot, if there is such a slot and it is occupied.
    pub(crate) fn at_mut(&mut self, slot: Slot) -> Option<&mut T> {
        self.entries.get_mut(slot.0 as usize)?.value.as_mut()
    }

    pub(crate) fn handle(&self, slot: Slot) -> Handle {
        Handle::new(slot, self.entries[slot.0 as usize].generation)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Slot, &T)> {
        self.entries
            .iter()
            .enumerate()
            .filter_map(|(i, entry)| entry.value.as_ref().map(|value| (Slot(i as u32), value)))
    }
}

impl<T> Index<Slot> for Arena<T> {
    type Output = T;

    fn index(&self, slot: Slot) -> &T {
        self.entries[slot.0 as usize]
            .value
            .as_ref()
            .expect("slot is occupied")
    }
}

impl<T> IndexMut<Slot> for Arena<T> {
    fn index_mut(&mut self, slot: Slot) -> &mut T {
        self.entries[slot.0 as usize]
            .value
            .as_mut()
            .expect("slot is occupied")
    }
}
