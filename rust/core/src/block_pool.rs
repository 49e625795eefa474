//! Reference counts of KV blocks. Each block is *free* (its content is nobody's), *cached* (no holder, but its content
//! can be found; least recently released is evicted first) or *held*: `free + cached + held = total`, always.
//!
//! Every operation is O(1) and allocates nothing.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use crate::ids::BlockId;

/// Where the ring of cached blocks begins and ends; no block of the pool.
const RING: BlockId = BlockId(0);

/// What is known of a block.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// Tables that hold it.
    num_holders: u32,
    /// Its neighbours among the cached blocks, if it is one.
    next: BlockId,
    previous: BlockId,
}

/// The pool's accounts. It does not know what a block contains; [`Kv`](crate::Kv) tells it.
#[derive(Debug)]
pub struct BlockPool {
    /// By block. The cached ones are a ring through block 0: its `next` is the oldest, its `previous` the newest.
    accounts: Box<[Account]>,
    num_cached: u32,
    free: Vec<BlockId>,
}

impl BlockPool {
    /// Blocks 1 to `num_blocks`, all free; the lowest is allocated first.
    pub fn new(num_blocks: u32) -> Self {
        let len = num_blocks as usize + 1;
        Self {
            accounts: vec![Account::default(); len].into_boxed_slice(),
            num_cached: 0,
            free: (1..=num_blocks).rev().map(BlockId).collect(),
        }
    }

    /// Blocks in all.
    pub fn num_blocks(&self) -> u32 {
        self.accounts.len() as u32 - 1
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
        self.accounts[block.index()].num_holders
    }

    /// A free block, now held once.
    pub fn allocate_free(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.accounts[block.index()].num_holders = 1;
        Some(block)
    }

    /// The block cached longest, now held once; its content is lost.
    pub fn evict(&mut self) -> Option<BlockId> {
        let block = self.accounts[RING.index()].next;
        if block == RING {
            return None;
        }
        let account = &mut self.accounts[block.index()];
        account.num_holders = 1;
        let next = account.next;
        self.accounts[RING.index()].next = next;
        self.accounts[next.index()].previous = RING;
        self.num_cached -= 1;
        Some(block)
    }

    /// One more table holds `block`, which is held or cached.
    pub fn retain(&mut self, block: BlockId) {
        if self.num_holders(block) == 0 {
            self.unlink(block);
        }
        self.accounts[block.index()].num_holders += 1;
    }

    /// One table fewer holds `block`; without a holder it is cached or free.
    pub fn release(&mut self, block: BlockId, is_findable: bool) {
        let account = &mut self.accounts[block.index()];
        assert!(
            account.num_holders > 0,
            "block {} is released more than held",
            block.0
        );
        account.num_holders -= 1;
        if account.num_holders > 0 {
            return;
        }
        if is_findable {
            let newest = self.accounts[RING.index()].previous;
            self.accounts[newest.index()].next = block;
            self.accounts[RING.index()].previous = block;
            let account = &mut self.accounts[block.index()];
            (account.previous, account.next) = (newest, RING);
            self.num_cached += 1;
        } else {
            self.free.push(block);
        }
    }

    /// A block's content can no longer be found: a cached one becomes free.
    pub fn forget(&mut self, block: BlockId) {
        if self.num_holders(block) == 0 {
            self.unlink(block);
            self.free.push(block);
        }
    }

    fn unlink(&mut self, block: BlockId) {
        let Account { next, previous, .. } = self.accounts[block.index()];
        self.accounts[previous.index()].next = next;
        self.accounts[next.index()].previous = previous;
        self.num_cached -= 1;
    }

    /// The cached blocks, the next to be evicted first.
    pub(crate) fn cached(&self) -> impl Iterator<Item = BlockId> {
        let next_of = |block: BlockId| {
            let next = self.accounts[block.index()].next;
            (next != RING).then_some(next)
        };
        core::iter::successors(next_of(RING), move |&block| next_of(block))
    }

    pub(crate) fn free(&self) -> &[BlockId] {
        &self.free
    }
}
