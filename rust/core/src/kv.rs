//! Block tables by seat, over the pool and the prefix cache. A failed reservation changes nothing. Where there is a window,
//! a table's first entries may be given back: they are block 0 from then on.
//!
//! Costs: O(1) a block, nothing is allocated after construction.

use alloc::boxed::Box;
use alloc::vec;

use crate::block_pool::BlockPool;
use crate::ids::{BlockId, Seat};
use crate::kv_events::KvEvents;
use crate::prefix_cache::{BlockHash, PrefixCache};

/// Which blocks each seat holds, in order of position.
#[derive(Debug)]
pub struct Kv {
    pub(crate) pool: BlockPool,
    pub(crate) cache: PrefixCache,
    pub(crate) events: KvEvents,
    /// `[num_seats, num_columns]`.
    tables: Box<[BlockId]>,
    lens: Box<[u32]>,
    /// Leading entries of each table that were given back, or never were.
    starts: Box<[u32]>,
    /// Entries of all tables that are some block's.
    num_entries: u32,
    num_columns: usize,
}

impl Kv {
    /// Empty tables over a pool of `num_blocks`.
    pub fn new(num_blocks: u32, block_size: u32, num_seats: u32, num_columns: u32) -> Self {
        Self {
            pool: BlockPool::new(num_blocks),
            cache: PrefixCache::new(num_blocks, block_size),
            events: KvEvents::new(0, block_size),
            tables: vec![BlockId(0); num_seats as usize * num_columns as usize].into_boxed_slice(),
            lens: vec![0; num_seats as usize].into_boxed_slice(),
            starts: vec![0; num_seats as usize].into_boxed_slice(),
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

    /// What can be found, and what no longer, as a stream.
    pub fn events(&self) -> &KvEvents {
        &self.events
    }

    /// Blocks that a reservation can take: free and cached.
    pub fn num_available(&self) -> u32 {
        self.pool.num_free() + self.pool.num_cached()
    }

    /// Entries of the table of `seat`, those given back included.
    pub fn len(&self, seat: Seat) -> u32 {
        self.lens[seat.index()]
    }

    /// Leading entries of the table of `seat` that are no block's.
    pub fn num_behind(&self, seat: Seat) -> u32 {
        self.starts[seat.index()]
    }

    /// Blocks that `seat` holds.
    pub(crate) fn num_held(&self, seat: Seat) -> u32 {
        self.len(seat) - self.num_behind(seat)
    }

    /// Entries of all tables; a block that several hold counts for each.
    pub(crate) fn num_entries(&self) -> u32 {
        self.num_entries
    }

    /// Whether the table of `seat` is empty.
    pub fn is_empty(&self, seat: Seat) -> bool {
        self.len(seat) == 0
    }

    /// The blocks of `seat`, by column; block 0 where one was given back.
    pub fn table(&self, seat: Seat) -> &[BlockId] {
        &self.tables[seat.index() * self.num_columns..][..self.len(seat) as usize]
    }

    /// The blocks that `seat` holds.
    pub(crate) fn held(&self, seat: Seat) -> &[BlockId] {
        &self.table(seat)[self.num_behind(seat) as usize..]
    }

    /// Appends a block that was retained for it to the table of `seat`.
    pub(crate) fn push(&mut self, seat: Seat, block: BlockId) {
        let len = &mut self.lens[seat.index()];
        self.tables[seat.index() * self.num_columns + *len as usize] = block;
        *len += 1;
        self.num_entries += 1;
    }

    /// Gives `seat` new blocks until it holds `num_blocks`; `None`, and no change, where there are too few.
    pub fn try_reserve(&mut self, seat: Seat, num_blocks: u32) -> Option<()> {
        let held = self.len(seat);
        let num_new = num_blocks.saturating_sub(held);
        if num_new > self.num_available() {
            return None;
        }
        self.lens[seat.index()] += num_new;
        self.num_entries += num_new;
        let start = seat.index() * self.num_columns;
        let row = &mut self.tables[start..][..(held + num_new) as usize];
        let num_filled = if self.pool.num_free() > 0 {
            fill_from_runs(&mut self.pool, row, held as usize)
        } else {
            held as usize
        };
        for place in &mut row[num_filled..] {
            let block = self.pool.evict().expect("available blocks were counted");
            self.events.push_removed(block, &self.cache);
            self.cache.unregister(block);
            *place = block;
        }
        Some(())
    }

    /// Gives `seat`, which holds none, `num_blocks` blocks that lie in a row; `None`, and no change, where no free run
    /// is as long.
    pub(crate) fn try_reserve_run(&mut self, seat: Seat, num_blocks: u32) -> Option<()> {
        let first = self.pool.allocate_run(num_blocks)?;
        self.lens[seat.index()] = num_blocks;
        self.num_entries += num_blocks;
        let start = seat.index() * self.num_columns;
        for (place, block) in self.tables[start..][..num_blocks as usize]
            .iter_mut()
            .zip(first.0..)
        {
            *place = BlockId(block);
        }
        Some(())
    }

    /// Appends an entry behind the window to the table of `seat`, which holds none.
    pub(crate) fn push_behind(&mut self, seat: Seat) {
        assert_eq!(
            self.num_held(seat),
            0,
            "what is behind the window comes first"
        );
        self.tables[seat.index() * self.num_columns + self.len(seat) as usize] = BlockId(0);
        self.lens[seat.index()] += 1;
        self.starts[seat.index()] += 1;
    }

    /// Gives up the first blocks of `seat`, up to column `end`; how many.
    pub(crate) fn release_first(&mut self, seat: Seat, end: u32) -> u32 {
        let (start, end) = (self.num_behind(seat), end.min(self.len(seat)));
        for column in start..end {
            let block = self.table(seat)[column as usize];
            self.set(seat, column, BlockId(0));
            self.give_up(block);
        }
        self.starts[seat.index()] = start.max(end);
        self.num_entries -= end.saturating_sub(start);
        end.saturating_sub(start)
    }

    /// One holder fewer of `block`; without any it is cached, or free.
    pub(crate) fn give_up(&mut self, block: BlockId) {
        if self.pool.cache_last(&[block], &self.cache) == 0 && self.pool.drop_holder(block) {
            // It cannot be found, or lies beyond the limit.
            self.events.push_removed(block, &self.cache);
            self.cache.unregister(block);
            self.pool.free_run(block, 1);
        }
    }

    /// Gives up the blocks of `seat`, last first: so of a chain the tail is evicted before what it hangs on.
    pub fn release(&mut self, seat: Seat) {
        let start = seat.index() * self.num_columns;
        let len = core::mem::take(&mut self.lens[seat.index()]);
        let num_behind = core::mem::take(&mut self.starts[seat.index()]);
        self.num_entries -= len - num_behind;
        let mut rest = &self.tables[start..][num_behind as usize..len as usize];
        while let Some(&block) = rest.last() {
            let num_cached = self.pool.cache_last(rest, &self.cache);
            rest = &rest[..rest.len() - num_cached as usize];
            // Blocks that come free and lie in a row become so together.
            let num_freed = self.pool.drop_last_holders(rest, &self.cache);
            if num_freed > 0 {
                let last = rest[rest.len() - 1].0;
                self.pool.free_run(BlockId(last + 1 - num_freed), num_freed);
                rest = &rest[..rest.len() - num_freed as usize];
            }
            if num_cached + num_freed > 0 {
                continue;
            }
            // Others hold it too, or it lies beyond the limit.
            rest = &rest[..rest.len() - 1];
            if self.pool.drop_holder(block) {
                self.events.push_removed(block, &self.cache);
                self.cache.unregister(block);
                self.pool.free_run(block, 1);
            }
        }
    }

    /// Makes the full block in `column` of `seat`, if it was not given back, findable, as the end of the prefix `hash`; the
    /// block, if it now is by this call. Where events are kept, `tell_stored` follows.
    pub fn register(
        &mut self,
        seat: Seat,
        column: u32,
        hash: BlockHash,
        tokens: &[i32],
    ) -> Option<BlockId> {
        let block = self.table(seat)[column as usize];
        (block != BlockId(0) && self.cache.register(block, hash, tokens)).then_some(block)
    }

    /// Tells of a block that was just registered, whose prefix goes on from `parent`.
    #[cold] // where events are kept
    pub(crate) fn tell_stored(&mut self, block: BlockId, parent: BlockHash) {
        self.events.push_stored(block, parent, &self.cache);
    }

    /// Makes `block` unfindable, if it can be found.
    pub fn unregister(&mut self, block: BlockId) {
        self.events.push_removed(block, &self.cache);
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

    /// Makes `limit` the last block that may be allocated; cached blocks beyond it are forgotten. O(blocks gained or
    /// lost), and O(cached blocks).
    pub(crate) fn set_limit(&mut self, limit: u32) {
        self.cache.reach(limit);
        for block in (limit + 1..=self.pool.limit()).map(BlockId) {
            if self.pool.num_holders(block) == 0 {
                self.unregister(block);
            }
        }
        self.pool.set_limit(limit);
    }

    /// A block that content can be moved to: best the one behind `last`, or any free one, or the one that is evicted
    /// next.
    pub(crate) fn take_destination(&mut self, last: Option<BlockId>) -> Option<BlockId> {
        if let Some((block, _)) = self.pool.allocate(last, 1) {
            return Some(block);
        }
        let block = self.pool.evict()?;
        self.events.push_removed(block, &self.cache);
        self.cache.unregister(block);
        Some(block)
    }

    /// Block `to`, which was just taken, stands for `from` in pool and cache; tables are the caller's to change. `from`
    /// is nobody's until [`BlockPool::free_run`].
    pub(crate) fn relocate(&mut self, from: BlockId, to: BlockId) {
        if self.pool.num_holders(from) > 0 {
            self.pool.move_holders(from, to);
        } else {
            self.pool.move_cached(from, to);
        }
        if self.cache.relocate(from, to) {
            self.events.push_moved(from, to, &self.cache);
        }
    }

    /// The run that `seat` holds alone begins at `to` from now on; all blocks from there to its old place are free.
    pub(crate) fn slide_run(&mut self, seat: Seat, to: BlockId) {
        let len = self.len(seat);
        let first = self.table(seat)[0];
        for i in 0..len {
            self.pool.drop_holder(BlockId(first.0 + i));
        }
        self.pool.free_run(first, len);
        self.pool.allocate_at(to, len);
        for column in 0..len {
            self.set(seat, column, BlockId(to.0 + column));
        }
    }

    /// Sets one entry of a table.
    pub(crate) fn set(&mut self, seat: Seat, column: u32, block: BlockId) {
        debug_assert!(column < self.len(seat));
        self.tables[seat.index() * self.num_columns + column as usize] = block;
    }
}

/// Fills a table's row from `held` on with free blocks, while there are any; where it is filled to.
fn fill_from_runs(pool: &mut BlockPool, row: &mut [BlockId], held: usize) -> usize {
    let (held, mut places) = row.split_at_mut(held);
    let (mut last, mut num_filled) = (held.last().copied(), held.len());
    while !places.is_empty()
        && let Some((first, num)) = pool.allocate(last, places.len() as u32)
    {
        let (given, rest) = places.split_at_mut(num as usize);
        for (place, block) in given.iter_mut().zip(first.0..) {
            *place = BlockId(block);
        }
        num_filled += num as usize;
        (last, places) = (given.last().copied(), rest);
    }
    num_filled
}
