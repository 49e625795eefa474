//! Blocks of the host's memory, to which the KV of preempted sequences is copied. Each is free, or of one sequence that
//! waits, or pinned by the step in flight that copies it back.

use alloc::vec::Vec;

use crate::ids::StepId;

/// What a preempted sequence has in the host's memory; no blocks: nothing.
#[derive(Debug, Default)]
pub(crate) struct Swapped {
    /// Host blocks, of the columns from `first` on.
    pub(crate) blocks: Vec<u32>,
    pub(crate) first: u32,
    /// Tokens up to the end of what was copied; an upper bound where drafts were in flight.
    pub(crate) num_tokens: u32,
    /// The step that copies it, until that is committed.
    pub(crate) step: Option<StepId>,
}

impl Swapped {
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

/// The free ones. O(1) a block.
#[derive(Debug)]
pub(crate) struct HostPool {
    num_blocks: u32,
    /// Blocks from here on were never taken.
    num_taken: u32,
    given_back: Vec<u32>,
}

impl HostPool {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self {
            num_blocks,
            num_taken: 0,
            given_back: Vec::new(),
        }
    }

    pub(crate) fn num_free(&self) -> u32 {
        self.num_blocks - self.num_taken + self.given_back.len() as u32
    }

    /// One of the free blocks.
    pub(crate) fn allocate(&mut self) -> u32 {
        if let Some(block) = self.given_back.pop() {
            return block;
        }
        assert!(
            self.num_taken < self.num_blocks,
            "free host blocks are counted first"
        );
        self.num_taken += 1;
        self.num_taken - 1
    }

    pub(crate) fn release(&mut self, swapped: Swapped) {
        self.given_back.extend(swapped.blocks.into_iter().rev());
    }

    /// The free ones, each once.
    pub(crate) fn free(&self) -> impl Iterator<Item = u32> {
        let never_taken = self.num_taken..self.num_blocks;
        self.given_back.iter().copied().chain(never_taken)
    }
}
