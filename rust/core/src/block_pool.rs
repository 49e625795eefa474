//! Reference counts of KV blocks. Each block is *free* (its content is nobody's), *cached* (no holder, but its content
//! can be found; least recently released is evicted first) or *held*: `free + cached + held = total`, always.
//!
//! Every operation is O(1) and allocates nothing.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use crate::ids::BlockId;

/// The pool's accounts. It does not know what a block contains; [`Kv`](crate::Kv) tells it.
#[derive(Debug)]
pub struct BlockPool {
    /// Tables that hold a block, by block.
    num_holders: Box<[u32]>,
    /// The cached blocks as a ring through block 0: oldest at `next[0]`, newest at `previous[0]`.
    next: Box<[u32]>,
    previous: Box<[u32]>,
    num_cached: u32,
    free: Vec<BlockId>,
}

impl BlockPool {
    /// Blocks 1 to `num_blocks`, all free; the lowest is allocated first.
    pub fn new(num_blocks: u32) -> Self {
        let len = num_blocks as usize + 1;
        Self {
            num_holders: vec![0; len].into_boxed_slice(),
            next: vec![0; len].into_boxed_slice(),
            previous: vec![0; len].into_boxed_slice(),
            num_cached: 0,
            free: (1..=num_blocks).rev().map(BlockId).collect(),
        }
    }

    /// Blocks in all.
    pub fn num_blocks(&self) -> u32 {
        self.num_holders.len() as u32 - 1
    }

    /// Blocks whose content is nobody's.
    pub fn num_free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Blocks without a holder whose content can be found.
    pub fn num_cached(&self) -> u32 {
        self.num_cached
    }

    /// Tables that hold `block`.
    pub fn num_holders(&self, block: BlockId) -> u32 {
        self.num_holders[block.index()]
    }

    /// A free block, now held once.
    pub fn allocate_free(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.num_holders[block.index()] = 1;
        Some(block)
    }

    /// The block cached longest, now held once; its content is lost.
    pub fn evict(&mut self) -> Option<BlockId> {
        let block = BlockId(self.next[0]);
        (block.0 != 0).then(|| {
            self.unlink(block);
            self.num_holders[block.index()] = 1;
            block
        })
    }

    /// One more table holds `block`, which is held or cached.
    pub fn retain(&mut self, block: BlockId) {
        if self.num_holders[block.index()] == 0 {
            self.unlink(block);
        }
        self.num_holders[block.index()] += 1;
    }

    /// One table fewer holds `block`; without a holder it is cached or free.
    pub fn release(&mut self, block: BlockId, is_findable: bool) {
        let num_holders = &mut self.num_holders[block.index()];
        assert!(
            *num_holders > 0,
            "block {} is released more than held",
            block.0
        );
        *num_holders -= 1;
        if *num_holders > 0 {
            return;
        }
        if is_findable {
            let newest = self.previous[0];
            self.next[newest as usize] = block.0;
            self.previous[block.index()] = newest;
            self.next[block.index()] = 0;
            self.previous[0] = block.0;
            self.num_cached += 1;
        } else {
            self.free.push(block);
        }
    }

    /// A block's content can no longer be found: a cached one becomes free.
    pub fn forget(&mut self, block: BlockId) {
        if self.num_holders[block.index()] == 0 {
            self.unlink(block);
            self.free.push(block);
        }
    }

    fn unlink(&mut self, block: BlockId) {
        let (next, previous) = (self.next[block.index()], self.previous[block.index()]);
        self.next[previous as usize] = next;
        self.previous[next as usize] = previous;
        self.num_cached -= 1;
    }

    /// The cached blocks, the next to be evicted first.
    pub(crate) fn cached(&self) -> impl Iterator<Item = BlockId> {
        let first = self.next[0];
        core::iter::successors((first != 0).then_some(BlockId(first)), |block| {
            let next = self.next[block.index()];
            (next != 0).then_some(BlockId(next))
        })
    }

    pub(crate) fn free(&self) -> &[BlockId] {
        &self.free
    }
}
