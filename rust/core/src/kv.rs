//! Block tables by seat, over the pool and the prefix cache. A failed reservation changes nothing.
//!
//! Costs: O(1) a block, nothing is allocated after construction.

use alloc::boxed::Box;
use alloc::vec;

use crate::block_pool::BlockPool;
use crate::ids::{BlockId, Seat};
use crate::prefix_cache::{BlockHash, PrefixCache};

/// Which blocks each seat holds, in order of position.
#[derive(Debug)]
pub struct Kv {
    pub(crate) pool: BlockPool,
    pub(crate) cache: PrefixCache,
    /// `[num_seats, num_columns]`.
    tables: Box<[BlockId]>,
    lens: Box<[u32]>,
    /// Entries of all tables.
    num_entries: u32,
    num_columns: usize,
}

impl Kv {
    /// Empty tables over a pool of `num_blocks`.
    pub fn new(num_blocks: u32, block_size: u32, num_seats: u32, num_columns: u32) -> Self {
        Self {
            pool: BlockPool::new(num_blocks),
            cache: PrefixCache::new(num_blocks, block_size),
            tables: vec![BlockId(0); num_seats as usize * num_columns as usize].into_boxed_slice(),
            lens: vec![0; num_seats as usize].into_boxed_slice(),
            num_entries: 0,
            num_columns: num_columns as usize,
        }
    }

    /// The pool's accounts.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The prefix cache.
    pub fn cache(&self) -> &PrefixCache {
        &self.cache
    }

    /// Blocks that a reservation can take: free and cached.
    pub fn num_available(&self) -> u32 {
        self.pool.num_free() + self.pool.num_cached()
    }

    /// Blocks that `seat` holds.
    pub fn len(&self, seat: Seat) -> u32 {
        self.lens[seat.index()]
    }

    /// Entries of all tables; a block that several hold counts for each.
    pub(crate) fn num_entries(&self) -> u32 {
        self.num_entries
    }

    /// Whether `seat` holds none.
    pub fn is_empty(&self, seat: Seat) -> bool {
        self.len(seat) == 0
    }

    /// The blocks of `seat`.
    pub fn table(&self, seat: Seat) -> &[BlockId] {
        &self.tables[seat.index() * self.num_columns..][..self.len(seat) as usize]
    }

    fn push(&mut self, seat: Seat, block: BlockId) {
        let len = &mut self.lens[seat.index()];
        self.tables[seat.index() * self.num_columns + *len as usize] = block;
        *len += 1;
        self.num_entries += 1;
    }

    /// Gives `seat` new blocks until it holds `num_blocks`; `None`, and no change, where there are too few.
    pub fn try_reserve(&mut self, seat: Seat, num_blocks: u32) -> Option<()> {
        let num_new = num_blocks.saturating_sub(self.len(seat));
        if num_new > self.num_available() {
            return None;
        }
        let len = &mut self.lens[seat.index()];
        let start = seat.index() * self.num_columns + *len as usize;
        *len += num_new;
        self.num_entries += num_new;
        for place in &mut self.tables[start..][..num_new as usize] {
            let block = self.pool.allocate_free().or_else(|| {
                let block = self.pool.evict()?;
                self.cache.unregister(block);
                Some(block)
            });
            *place = block.expect("available blocks were counted");
        }
        Some(())
    }

    /// Appends a block found in the cache to the table of `seat`.
    pub fn push_hit(&mut self, seat: Seat, block: BlockId) {
        self.pool.retain(block);
        self.push(seat, block);
    }

    /// Gives up the blocks of `seat`, last first: so of a chain the tail is evicted before what it hangs on.
    pub fn release(&mut self, seat: Seat) {
        let start = seat.index() * self.num_columns;
        let len = core::mem::take(&mut self.lens[seat.index()]);
        self.num_entries -= len;
        for &block in self.tables[start..][..len as usize].iter().rev() {
            self.pool.release(block, self.cache.is_registered(block));
        }
    }

    /// Makes the full block in `column` of `seat` findable; the block, if it now is by this call.
    pub fn register(
        &mut self,
        seat: Seat,
        column: u32,
        hash: BlockHash,
        tokens: &[i32],
    ) -> Option<BlockId> {
        let block = self.table(seat)[column as usize];
        self.cache.register(block, hash, tokens).then_some(block)
    }

    /// Makes `block` unfindable, if it can be found.
    pub fn unregister(&mut self, block: BlockId) {
        if self.cache.unregister(block) {
            self.pool.forget(block);
        }
    }

    /// Blocks that only `seat` holds, and so come free with it.
    pub fn num_exclusive(&self, seat: Seat) -> u32 {
        self.table(seat)
            .iter()
            .filter(|&&block| self.pool.num_holders(block) == 1)
            .count() as u32
    }
}
