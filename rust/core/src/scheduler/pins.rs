//! Pins: blocks of the prefix cache that stay where they are, held, until they are unpinned. Whoever reads KV from outside
//! (an export, a prompt that all requests begin with) so finds it in place: it is not evicted and not moved.
//!
//! A pin is one more holder of each of its blocks. What accepted requests may need is never pinned away from them, and the
//! pool is not made smaller than the last pinned block. O(blocks of the pin and of steps in flight, and requests) a pin.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::Scheduler;
use crate::ids::{BlockId, PinId};
use crate::prefix_cache::BlockHash;

/// Why nothing was pinned. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinError {
    /// Not even the first block of the tokens can be found, or a step in flight still fills it.
    NotCached {
        /// Tokens given.
        num_tokens: usize,
    },
    /// The pool cannot spare as many blocks.
    TooMany {
        /// Blocks that would be pinned in all.
        num_blocks: u32,
        /// Blocks that may be: others are kept for the watermark and the largest accepted request.
        limit: u32,
    },
}

/// What is pinned.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    /// Each pin's blocks, in order of position.
    blocks: BTreeMap<PinId, Vec<BlockId>>,
    /// How many pins each block has; one at least.
    counts: BTreeMap<BlockId, u32>,
    num_ever: u64,
}

impl Pins {
    /// Distinct blocks that are pinned.
    pub(crate) fn num_blocks(&self) -> u32 {
        self.counts.len() as u32
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.counts.contains_key(&block)
    }

    /// The highest pinned block.
    pub(crate) fn last(&self) -> Option<BlockId> {
        self.counts.last_key_value().map(|(&block, _)| block)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &[BlockId]> {
        self.blocks.values().map(Vec::as_slice)
    }

    fn add(&mut self, blocks: Vec<BlockId>) -> PinId {
        for &block in &blocks {
            *self.counts.entry(block).or_default() += 1;
        }
        self.num_ever += 1;
        let pin = PinId(self.num_ever);
        self.blocks.insert(pin, blocks);
        pin
    }

    fn remove(&mut self, pin: PinId) -> Option<Vec<BlockId>> {
        let blocks = self.blocks.remove(&pin)?;
        for block in &blocks {
            let count = self.counts.get_mut(block).expect("a pinned block counts");
            *count -= 1;
            if *count == 0 {
                self.counts.remove(block);
            }
        }
        Some(blocks)
    }
}

impl Scheduler {
    /// Update: pins the leading full blocks of `token_ids`, as far as committed steps have filled them and the prefix cache
    /// of `cache_salt` and `adapter` holds them. They stay held, in place, until `unpin`.
    ///
    /// # Errors
    /// There are none, or the pool cannot spare them; nothing has changed.
    pub fn pin(
        &mut self,
        token_ids: &[i32],
        cache_salt: BlockHash,
        adapter: u64,
        now_us: u64,
    ) -> Result<PinId, PinError> {
        if let Some(recorder) = &mut self.recorder {
            recorder.pin(token_ids, cache_salt, adapter, now_us);
        }
        self.events.begin_silent();
        let blocks = self.pinnable(token_ids, self.root(cache_salt, adapter));
        if blocks.is_empty() {
            return Err(PinError::NotCached {
                num_tokens: token_ids.len(),
            });
        }
        let is_new = |block: &&BlockId| !self.pins.contains(**block);
        let num_blocks = self.pins.num_blocks() + blocks.iter().filter(is_new).count() as u32;
        let limit = self.num_sparable_blocks();
        if num_blocks > limit {
            return Err(PinError::TooMany { num_blocks, limit });
        }
        for &block in &blocks {
            self.kv.pool.retain(block);
        }
        Ok(self.pins.add(blocks))
    }

    /// The blocks that `token_ids` begin with, as far as they are cached, filled and within the pool.
    fn pinnable(&self, token_ids: &[i32], root: BlockHash) -> Vec<BlockId> {
        let destination = |&(_, to): &(BlockId, BlockId)| to;
        let in_flight: BTreeSet<BlockId> = self
            .steps
            .iter()
            .flat_map(|step| {
                let moved = step.moves.iter().map(destination);
                step.filled.iter().copied().chain(moved)
            })
            .collect();
        let mut hash = root;
        token_ids
            .chunks_exact(self.config.block_size as usize)
            .map_while(|tokens| {
                hash = self.hasher.chain(hash, tokens);
                self.kv.cache.find(hash, tokens)
            })
            .take_while(|block| block.0 <= self.config.num_blocks && !in_flight.contains(block))
            .collect()
    }

    /// Blocks that may be pinned: what is left of the pool by the largest request, and by the watermark.
    fn num_sparable_blocks(&self) -> u32 {
        let requests = self.arena.iter();
        let largest = requests.map(|(_, sequence)| sequence.standing.num_limit_blocks);
        let num_kept = largest.max().unwrap_or(0);
        self.config.num_blocks - num_kept.max(self.config.watermark_blocks + 1)
    }

    /// The blocks of `pin`, in order of position; none once it is unpinned.
    pub fn pinned(&self, pin: PinId) -> &[BlockId] {
        self.pins.blocks.get(&pin).map_or(&[], Vec::as_slice)
    }

    /// Distinct blocks that are pinned. They count as held.
    pub fn num_pinned_blocks(&self) -> u32 {
        self.pins.num_blocks()
    }

    /// Update: gives up a pin; `false` if there is none of the kind. What nobody else holds is cached again, its last block
    /// as the first to be evicted.
    pub fn unpin(&mut self, pin: PinId, now_us: u64) -> bool {
        if let Some(recorder) = &mut self.recorder {
            recorder.unpin(pin, now_us);
        }
        self.events.begin_silent();
        let Some(blocks) = self.pins.remove(pin) else {
            return false;
        };
        for &block in blocks.iter().rev() {
            self.kv.give_up(block);
        }
        true
    }
}
