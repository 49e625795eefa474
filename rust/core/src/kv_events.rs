//! What the prefix cache can find, as a stream for a router that sends requests to where their prefix is: a block was
//! stored, moved or removed. The last `capacity` events are kept; who reads too late is told how many it missed, and
//! starts over.
//!
//! O(block size) an event; nothing is allocated after construction, and nothing is done where the capacity is 0.

use alloc::boxed::Box;
use alloc::vec;

use crate::ids::BlockId;
use crate::prefix_cache::{BlockHash, PrefixCache};

/// What an event tells of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum KvEventKind {
    /// It can be found from now on.
    Stored = 0,
    /// It can no longer be found.
    Removed = 1,
    /// It is found in another place.
    Moved = 2,
}

/// One thing that happened to a block that can be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvEvent {
    /// What.
    pub kind: KvEventKind,
    /// Where its content is now, or was.
    pub block: BlockId,
    /// Where it was before a move; else the same.
    pub from: BlockId,
    /// Of the prefix that it ends.
    pub hash: BlockHash,
    /// Of the prefix before it, or the salt of a first block; 0 where the event is no `Stored`.
    pub parent: BlockHash,
}

const NO_EVENT: KvEvent = KvEvent {
    kind: KvEventKind::Removed,
    block: BlockId(0),
    from: BlockId(0),
    hash: 0,
    parent: 0,
};

/// The last events.
#[derive(Debug)]
pub struct KvEvents {
    /// A ring; event `n` lies at `n % capacity`.
    events: Box<[KvEvent]>,
    /// `[capacity, block_size]`: of stored blocks.
    tokens: Box<[i32]>,
    block_size: usize,
    num_events: u64,
}

impl KvEvents {
    pub(crate) fn new(capacity: u32, block_size: u32) -> Self {
        let (capacity, block_size) = (capacity as usize, block_size as usize);
        Self {
            events: vec![NO_EVENT; capacity].into_boxed_slice(),
            tokens: vec![0; capacity * block_size].into_boxed_slice(),
            block_size,
            num_events: 0,
        }
    }

    /// Events ever.
    pub fn num_events(&self) -> u64 {
        self.num_events
    }

    /// The number of the first event that is kept.
    pub fn first(&self) -> u64 {
        self.num_events - self.num_events.min(self.events.len() as u64)
    }

    /// Events from number `first` on that are kept, each with the tokens of a block that was stored (else none).
    pub fn since(&self, first: u64) -> impl Iterator<Item = (&KvEvent, &[i32])> {
        (first.max(self.first())..self.num_events).map(|number| {
            let at = (number % self.events.len() as u64) as usize;
            let event = &self.events[at];
            let num_tokens = match event.kind {
                KvEventKind::Stored => self.block_size,
                KvEventKind::Removed | KvEventKind::Moved => 0,
            };
            (event, &self.tokens[at * self.block_size..][..num_tokens])
        })
    }

    #[cold] // where it is asked for
    fn push_event(&mut self, event: KvEvent) -> usize {
        let at = (self.num_events % self.events.len() as u64) as usize;
        self.events[at] = event;
        self.num_events += 1;
        at
    }

    /// `block`, if it can be found, is about to be unregistered.
    #[inline]
    pub(crate) fn push_removed(&mut self, block: BlockId, cache: &PrefixCache) {
        if !self.events.is_empty() && cache.is_registered(block) {
            self.push_event(KvEvent {
                kind: KvEventKind::Removed,
                block,
                from: block,
                hash: cache.hash(block),
                parent: 0,
            });
        }
    }

    /// Whether any are kept.
    pub(crate) fn are_kept(&self) -> bool {
        !self.events.is_empty()
    }

    /// `block` was just registered; events are kept.
    pub(crate) fn push_stored(&mut self, block: BlockId, parent: BlockHash, cache: &PrefixCache) {
        let at = self.push_event(KvEvent {
            kind: KvEventKind::Stored,
            block,
            from: block,
            hash: cache.hash(block),
            parent,
        });
        self.tokens[at * self.block_size..][..self.block_size].copy_from_slice(cache.tokens(block));
    }

    /// What was found in `from` is found in `block`.
    pub(crate) fn push_moved(&mut self, from: BlockId, block: BlockId, cache: &PrefixCache) {
        if !self.events.is_empty() {
            self.push_event(KvEvent {
                kind: KvEventKind::Moved,
                block,
                from,
                hash: cache.hash(block),
                parent: 0,
            });
        }
    }
}
