//! Reference counts of KV blocks. Each block is *free* (its content is nobody's), *cached* (no holder, but its content
//! can be found; least recently released is evicted first) or *held*: `free + cached + held = total`, always. Blocks
//! beyond a limit that was lowered are *retired* once nobody holds them: they are outside the total.
//!
//! Free blocks are kept as runs, tagged at both ends so that neighbours merge, in lists by the power of two of their
//! length. Every operation but a change of the limit is O(1) a run, plus a store a block, and allocates nothing.

use alloc::vec;
use alloc::vec::Vec;

use crate::ids::BlockId;
use crate::prefix_cache::PrefixCache;

/// Where the ring of cached blocks and the lists of runs begin and end; no block of the pool.
const RING: BlockId = BlockId(0);
const NUM_CLASSES: usize = 32;
/// A run this many times as long as what is taken of it is cut in its middle, so that whoever ends in front of it and
/// whoever is given its middle can both go on in place.
const SPLIT_FACTOR: u32 = 4;

/// What is known of a block.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// Tables that hold it.
    num_holders: u32,
    /// The length of the free run that it begins or ends; 0 for a block that is not free.
    run_len: u32,
    /// Its neighbours among the cached blocks, if it is one; among the runs of a class, if it begins a free run. Of a
    /// held one, `next` is where it is being moved.
    next: BlockId,
    previous: BlockId,
}

const HELD_ONCE: Account = Account {
    num_holders: 1,
    run_len: 0,
    next: RING,
    previous: RING,
};

/// The pool's accounts. It does not know what a block contains; [`Kv`](crate::Kv) tells it.
#[derive(Debug)]
pub struct BlockPool {
    /// By block. The cached ones are a ring through block 0: its `next` is the oldest, its `previous` the newest.
    accounts: Vec<Account>,
    /// The last block that may be allocated.
    limit: u32,
    /// Free, cached and held.
    num_blocks: u32,
    num_cached: u32,
    num_free: u32,
    /// The first run of each class, whose lengths have the class as their logarithm.
    classes: [BlockId; NUM_CLASSES],
    /// A bit for each class that has a run.
    nonempty: u32,
}

impl BlockPool {
    /// Blocks 1 to `num_blocks`, all free.
    pub fn new(num_blocks: u32) -> Self {
        let mut pool = Self {
            accounts: vec![Account::default(); num_blocks as usize + 1],
            limit: num_blocks,
            num_blocks,
            num_cached: 0,
            num_free: 0,
            classes: [RING; NUM_CLASSES],
            nonempty: 0,
        };
        pool.add_run(BlockId(1), num_blocks);
        pool
    }

    /// Blocks in all: those up to the limit, and those beyond it that are still held.
    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// The last block that may be allocated.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Whether a block beyond the limit is still held.
    pub fn is_shrinking(&self) -> bool {
        self.num_blocks > self.limit
    }

    /// Blocks whose content is nobody's.
    pub fn num_free(&self) -> u32 {
        self.num_free
    }

    /// Blocks without a holder whose content can be found.
    pub fn num_cached(&self) -> u32 {
        self.num_cached
    }

    /// Tables that hold `block`.
    pub fn num_holders(&self, block: BlockId) -> u32 {
        self.accounts[block.index()].num_holders
    }

    fn capacity(&self) -> u32 {
        self.accounts.len() as u32 - 1
    }

    /// The last block that there ever was.
    pub(crate) fn num_ever(&self) -> u32 {
        self.capacity()
    }

    /// Up to `num_wanted` (at least 1) free blocks in a row, now held once each: those behind block `last`, if the next
    /// one is free, or else some of a run that no other is more than twice as long as.
    pub fn allocate(&mut self, last: Option<BlockId>, num_wanted: u32) -> Option<(BlockId, u32)> {
        if let Some(last) = last
            && let Some(next) = self.accounts.get(last.index() + 1)
            && next.run_len > 0
        {
            // It begins its run: the block before it is held.
            let num = next.run_len.min(num_wanted);
            let first = BlockId(last.0 + 1);
            self.take(first, first, num);
            return Some((first, num));
        }
        if self.nonempty == 0 {
            return None;
        }
        let start = self.classes[self.nonempty.ilog2() as usize];
        let len = self.accounts[start.index()].run_len;
        let num = len.min(num_wanted);
        let skip = if start.0 == 1 || len / SPLIT_FACTOR < num {
            0
        } else {
            len / 2
        };
        let first = BlockId(start.0 + skip);
        self.take(start, first, num);
        Some((first, num))
    }

    /// Exactly `num` (at least 1) free blocks in a row, now held once each: of the first run that is long enough.
    pub(crate) fn allocate_run(&mut self, num: u32) -> Option<BlockId> {
        let start = self.find_run(num)?;
        self.take(start, start, num);
        Some(start)
    }

    /// Whether `num` free blocks lie in a row. O(runs of the class of `num`).
    pub(crate) fn has_run(&self, num: u32) -> bool {
        self.find_run(num).is_some()
    }

    /// The `num` blocks from `first` on, which begin a free run, held once each.
    pub(crate) fn allocate_at(&mut self, first: BlockId, num: u32) {
        assert!(
            self.accounts[first.index()].run_len >= num,
            "block {} begins a run",
            first.0
        );
        self.take(first, first, num);
    }

    fn find_run(&self, num: u32) -> Option<BlockId> {
        let class = num.ilog2() as usize;
        let mut start = self.classes[class];
        while start != RING {
            let account = &self.accounts[start.index()];
            if account.run_len >= num {
                return Some(start);
            }
            start = account.next;
        }
        let longer = self.nonempty & !(u32::MAX >> (31 - class));
        (longer != 0).then(|| self.classes[longer.trailing_zeros() as usize])
    }

    /// Gives each of the `num` blocks from `first` on, which lie in the free run from `start` on, a holder.
    #[inline]
    fn take(&mut self, start: BlockId, first: BlockId, num: u32) {
        let len = self.accounts[start.index()].run_len;
        self.unlink_run(start);
        let num_before = first.0 - start.0;
        let num_behind = len - num_before - num;
        // The tag of the end that the run had.
        self.accounts[(start.0 + len - 1) as usize].run_len = 0;
        self.accounts[first.index()..][..num as usize].fill(HELD_ONCE);
        if num_before > 0 {
            self.link_run(start, num_before);
        }
        if num_behind > 0 {
            self.link_run(BlockId(first.0 + num), num_behind);
        }
        self.num_free -= num;
    }

    /// The `num` blocks from `first` on, whose accounts are clear, become free.
    fn add_run(&mut self, first: BlockId, num: u32) {
        let (mut start, mut len) = (first, num);
        let before = self.accounts[first.index() - 1].run_len;
        if before > 0 {
            start = BlockId(first.0 - before);
            self.unlink_run(start);
            self.accounts[first.index() - 1].run_len = 0;
            len += before;
        }
        let behind = first.0 + num;
        let num_behind = self
            .accounts
            .get(behind as usize)
            .map_or(0, |account| account.run_len);
        if num_behind > 0 {
            self.unlink_run(BlockId(behind));
            self.accounts[behind as usize].run_len = 0;
            len += num_behind;
        }
        self.link_run(start, len);
        self.num_free += num;
    }

    #[inline]
    fn link_run(&mut self, start: BlockId, len: u32) {
        let class = len.ilog2() as usize;
        let next = self.classes[class];
        let account = &mut self.accounts[start.index()];
        account.run_len = len;
        (account.previous, account.next) = (RING, next);
        self.accounts[(start.0 + len - 1) as usize].run_len = len;
        if next != RING {
            self.accounts[next.index()].previous = start;
        }
        self.classes[class] = start;
        self.nonempty |= 1 << class;
    }

    #[inline]
    fn unlink_run(&mut self, start: BlockId) {
        let account = &mut self.accounts[start.index()];
        let class = account.run_len.ilog2() as usize;
        let (next, previous) = (account.next, account.previous);
        account.run_len = 0;
        if previous == RING {
            self.classes[class] = next;
            if next == RING {
                self.nonempty &= !(1 << class);
            }
        } else {
            self.accounts[previous.index()].next = next;
        }
        if next != RING {
            self.accounts[next.index()].previous = previous;
        }
    }

    /// The block cached longest, now held once; its content is lost.
    pub fn evict(&mut self) -> Option<BlockId> {
        let block = self.accounts[RING.index()].next;
        if block == RING {
            return None;
        }
        let account = &mut self.accounts[block.index()];
        let next = account.next;
        *account = HELD_ONCE;
        self.accounts[RING.index()].next = next;
        self.accounts[next.index()].previous = RING;
        self.num_cached -= 1;
        Some(block)
    }

    /// One more table holds `block`, which is held or cached.
    pub fn retain(&mut self, block: BlockId) {
        if self.num_holders(block) == 0 {
            self.unlink(block);
            self.accounts[block.index()].next = RING;
        }
        self.accounts[block.index()].num_holders += 1;
    }

    /// One table fewer holds `block`; whether it was the last, so that the block must be cached or freed now.
    pub(crate) fn drop_holder(&mut self, block: BlockId) -> bool {
        let account = &mut self.accounts[block.index()];
        assert!(
            account.num_holders > 0,
            "block {} is released more than held",
            block.0
        );
        account.num_holders -= 1;
        account.num_holders == 0
    }

    /// Drops the only holder of the last of `blocks`, and of those before it, as far as each lies behind the one before
    /// it and cannot be found; how many. They must be freed now.
    pub(crate) fn drop_last_holders(&mut self, blocks: &[BlockId], cache: &PrefixCache) -> u32 {
        let accounts = self.accounts.as_mut_slice();
        let mut next = blocks.last().map_or(0, |last| last.0);
        let mut num = 0;
        for &block in blocks.iter().rev() {
            if block.0 != next || cache.is_registered(block) {
                break;
            }
            let account = &mut accounts[block.index()];
            if account.num_holders != 1 {
                break;
            }
            account.num_holders = 0;
            next -= 1;
            num += 1;
        }
        num
    }

    /// Drops the only holder of the last of `blocks`, and of those before it, as far as each can be found: they are
    /// cached, the last as the first to be evicted; how many.
    pub(crate) fn cache_last(&mut self, blocks: &[BlockId], cache: &PrefixCache) -> u32 {
        let limit = self.limit;
        let accounts = self.accounts.as_mut_slice();
        let mut newest = accounts[RING.index()].previous;
        let mut num = 0;
        for &block in blocks.iter().rev() {
            if block.0 > limit || !cache.is_registered(block) {
                break;
            }
            let account = &mut accounts[block.index()];
            if account.num_holders != 1 {
                break;
            }
            *account = Account {
                num_holders: 0,
                run_len: 0,
                next: RING,
                previous: newest,
            };
            accounts[newest.index()].next = block;
            newest = block;
            num += 1;
        }
        accounts[RING.index()].previous = newest;
        self.num_cached += num;
        num
    }

    /// The `num` blocks from `first` on, which nobody holds any more, are free, or retired beyond the limit.
    pub(crate) fn free_run(&mut self, first: BlockId, num: u32) {
        let end = first.0 + num - 1;
        if end > self.limit {
            let num_retired = (end - self.limit).min(num);
            self.num_blocks -= num_retired;
            if num > num_retired {
                self.add_run(first, num - num_retired);
            }
            return;
        }
        self.add_run(first, num);
    }

    /// A block's content can no longer be found: a cached one becomes free.
    pub fn forget(&mut self, block: BlockId) {
        if self.num_holders(block) == 0 {
            self.unlink(block);
            self.free_run(block, 1);
        }
    }

    fn unlink(&mut self, block: BlockId) {
        let Account { next, previous, .. } = self.accounts[block.index()];
        self.accounts[previous.index()].next = next;
        self.accounts[next.index()].previous = previous;
        self.num_cached -= 1;
    }

    /// Makes `limit` the last block that may be allocated. No block beyond it is cached. O(blocks gained or lost).
    pub(crate) fn set_limit(&mut self, limit: u32) {
        let before = core::mem::replace(&mut self.limit, limit);
        if limit > self.capacity() {
            self.accounts.resize(limit as usize + 1, Account::default());
        }
        if limit < before {
            self.retire_free(before);
        }
        for block in before + 1..=limit {
            if self.accounts[block as usize].num_holders == 0 {
                self.num_blocks += 1;
                self.accounts[block as usize] = Account::default();
                self.add_run(BlockId(block), 1);
            }
        }
    }

    /// Takes free blocks beyond the limit, and up to `last`, out of their runs.
    fn retire_free(&mut self, last: u32) {
        let mut end = last;
        while end > self.limit {
            let len = self.accounts[end as usize].run_len;
            if len == 0 {
                end -= 1;
                continue;
            }
            let start = end + 1 - len;
            self.unlink_run(BlockId(start));
            self.accounts[end as usize].run_len = 0;
            let num_kept = (self.limit + 1).saturating_sub(start);
            if num_kept > 0 {
                self.link_run(BlockId(start), num_kept);
            }
            self.num_free -= len - num_kept;
            self.num_blocks -= len - num_kept;
            end = start - 1;
        }
    }

    /// The holders of `from` hold `to` instead, which was just allocated. `from` stays out of every list until
    /// `free_run`, so that it is not given out again before then.
    pub(crate) fn move_holders(&mut self, from: BlockId, to: BlockId) {
        let num_holders = core::mem::take(&mut self.accounts[from.index()].num_holders);
        self.accounts[to.index()].num_holders = num_holders;
    }

    /// `to`, which was just allocated, takes the place of cached block `from` in the order of eviction.
    pub(crate) fn move_cached(&mut self, from: BlockId, to: BlockId) {
        let Account { next, previous, .. } = self.accounts[from.index()];
        self.accounts[to.index()] = Account {
            num_holders: 0,
            run_len: 0,
            next,
            previous,
        };
        self.accounts[previous.index()].next = to;
        self.accounts[next.index()].previous = to;
    }

    /// Notes where held block `from` is being moved; block 0 ends it.
    pub(crate) fn set_forward(&mut self, from: BlockId, to: BlockId) {
        self.accounts[from.index()].next = to;
    }

    /// Where held block `from` is being moved, if it is.
    pub(crate) fn forward(&self, from: BlockId) -> Option<BlockId> {
        let to = self.accounts[from.index()].next;
        (to != RING).then_some(to)
    }

    /// The cached blocks, the next to be evicted first.
    pub(crate) fn cached(&self) -> impl Iterator<Item = BlockId> {
        let next_of = |block: BlockId| {
            let next = self.accounts[block.index()].next;
            (next != RING).then_some(next)
        };
        core::iter::successors(next_of(RING), move |&block| next_of(block))
    }

    /// Panics unless the ends of `runs`, and no other blocks, are tagged with their lengths, and each class is marked.
    pub(crate) fn check_tags(&self, runs: &[(BlockId, u32)]) {
        let mut tags = vec![0; self.accounts.len()];
        let mut nonempty = 0;
        for &(first, len) in runs {
            tags[first.index()] = len;
            tags[(first.0 + len - 1) as usize] = len;
            nonempty |= 1 << len.ilog2();
        }
        let are_right = self
            .accounts
            .iter()
            .zip(&tags)
            .all(|(account, &tag)| account.run_len == tag);
        assert!(are_right, "the ends of free runs are tagged");
        assert_eq!(self.nonempty, nonempty, "classes that have a run");
    }

    /// The free runs, as first block and length, the shortest class first.
    pub(crate) fn free_runs(&self) -> impl Iterator<Item = (BlockId, u32)> {
        let len_of = |start: BlockId| self.accounts[start.index()].run_len;
        self.classes.iter().flat_map(move |&first| {
            let next_of = |start: BlockId| (start != RING).then_some(start);
            core::iter::successors(next_of(first), move |start| {
                next_of(self.accounts[start.index()].next)
            })
            .map(move |start| (start, len_of(start)))
        })
    }
}
