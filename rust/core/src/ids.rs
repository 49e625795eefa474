//! Ids: one newtype each, so that a seat is never passed for a block.

/// A request, for as long as it lives: `generation << 32 | slot`. A handle whose request has ended is *stale*.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Handle(u64);

impl Handle {
    /// Generations stay below this, so that a handle is never negative as an `i64`.
    pub(crate) const MAX_GENERATION: u32 = i32::MAX as u32;

    /// No request's: there is no such slot.
    pub(crate) const NONE: Self = Self(u32::MAX as u64);

    pub(crate) fn new(slot: Slot, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(slot.0))
    }

    pub(crate) fn slot(self) -> Slot {
        Slot(self.0 as u32)
    }

    pub(crate) fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The handle as one number.
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// The handle that `to_bits` gave; any other number is a stale handle.
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

/// Where the arena keeps a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Slot(pub(crate) u32);

/// A running sequence's fixed row in the runner's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seat(pub u32);

impl Seat {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A unit of KV memory. Block 0 is padding and never in the pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct BlockId(pub u32);

impl BlockId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// An iteration of the engine; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct StepId(pub u64);

/// A pin of cached blocks; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PinId(pub u64);
