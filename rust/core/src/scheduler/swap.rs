//! Preemption by swap: the KV of who leaves is copied to the host's memory, and copied back when it resumes.
//!
//! Both are lists of a step, run in stream order at its start: to the host, back, then moves. So device blocks are free at
//! once, as on any preemption. Host blocks are pinned longer: a sequence is resumed only when its copy is confirmed, that
//! is, its step committed, and keeps its host blocks until the step that copies them back is committed too; if that fails,
//! they are there for the next try. O(blocks) a preemption or resume.

use super::Scheduler;
use super::admit::register_known;
use crate::host_pool::Swapped;
use crate::ids::{BlockId, Seat, Slot};
use crate::step::StepInFlight;

impl Scheduler {
    /// Notes that this plan copies the blocks of `slot`, which is about to leave, to the host; the tokens that it keeps so,
    /// 0 where there is no room, or nothing to copy.
    #[cold]
    pub(super) fn try_swap_out(&mut self, slot: Slot, seat: Seat) -> u32 {
        let num_tokens = self.arena[slot].num_planned;
        let first = self.kv.num_behind(seat);
        let end = self.config.blocks_for(num_tokens);
        if end <= first {
            return 0;
        }
        let num_blocks = end - first;
        let room = self.layout.capacity_swaps - self.pass.swap_out.len();
        let has_room = num_blocks <= self.host.num_free() && num_blocks as usize <= room;
        // What lies beyond a smaller pool's end may be given back to the system.
        if !has_room || self.is_shrinking() {
            self.tally.num_swap_misses += 1;
            return 0;
        }
        let mut blocks = core::mem::take(&mut self.arena[slot].swapped.blocks);
        for column in first..end {
            let host = self.host.allocate();
            let block = self.kv.table(seat)[column as usize];
            self.pass.swap_out.push((block, host));
            blocks.push(host);
        }
        self.pass.swapped_out.push(self.arena.handle(slot));
        self.arena[slot].swapped = Swapped {
            blocks,
            first,
            num_tokens,
            step: None,
        };
        num_tokens
    }

    /// Gives up what `slot` has in the host's memory.
    pub(super) fn drop_swapped(&mut self, slot: Slot) {
        let swapped = core::mem::take(&mut self.arena[slot].swapped);
        self.host.release(swapped);
    }

    /// A plan that came to nothing copies nothing.
    pub(super) fn drop_unwritten_swaps(&mut self) {
        self.pass.swap_out.clear();
        for i in 0..self.pass.swapped_out.len() {
            self.tally.num_swap_misses += 1;
            self.drop_swapped(self.pass.swapped_out[i].slot());
        }
        self.pass.swapped_out.clear();
    }

    /// Whether the copy of `slot` is still on its way to the host.
    pub(super) fn is_being_swapped(&self, slot: Slot) -> bool {
        let swapped = &self.arena[slot].swapped;
        swapped.step.is_some()
    }

    /// Completes `pass.hits` for `slot`: if what it has in the host's memory reaches further, it is copied back, but for
    /// full blocks that are found.
    #[inline]
    pub(super) fn find_swapped(&mut self, slot: Slot) {
        let block_size = self.config.block_size;
        self.pass.num_found = self.pass.hits.len() as u32 - self.pass.num_behind;
        let sequence = &self.arena[slot];
        self.pass.resume_at = sequence.num_planned + self.pass.hits.len() as u32 * block_size;
        // Its last token is computed, for its logits; drafts may have been rejected behind it.
        let end = sequence.swapped.num_tokens.min(sequence.num_tokens() - 1);
        if !sequence.swapped.is_empty() && end > self.pass.resume_at {
            self.list_swapped(slot, end);
        }
    }

    #[cold]
    fn list_swapped(&mut self, slot: Slot, end: u32) {
        let (block_size, sequence) = (self.config.block_size, &self.arena[slot]);
        let finds = self.config.enable_prefix_caching && sequence.reads_prefix_cache;
        self.pass.hits.clear();
        self.pass.resume_at = end;
        self.pass.num_behind = self.config.num_blocks_behind(end);
        self.pass.num_found = 0;
        for column in 0..self.config.blocks_for(end) {
            let may_be_found =
                finds && column >= self.pass.num_behind && (column + 1) * block_size <= end;
            let found = if may_be_found {
                self.find_block(slot, column)
            } else {
                None
            };
            self.pass.num_found += u32::from(found.is_some());
            self.pass.hits.push(found.unwrap_or(BlockId(0)));
        }
    }

    /// Blocks that `pass.hits` has copied back.
    pub(super) fn num_copied(&self) -> u32 {
        self.pass.hits.len() as u32 - self.pass.num_behind - self.pass.num_found
    }

    /// Whether this plan has room to copy back what `pass.hits` says.
    pub(super) fn has_room_to_swap_in(&self) -> bool {
        let num_copied = self.num_copied() as usize;
        num_copied == 0 || self.pass.swap_in.len() + num_copied <= self.layout.capacity_swaps
    }

    /// Takes `pass.hits`.
    #[inline]
    pub(super) fn push_hits(&mut self, slot: Slot, seat: Seat) {
        if !(self.pass.hits.is_empty() && self.arena[slot].swapped.is_empty()) {
            self.take_hits(slot, seat);
        }
    }

    fn take_hits(&mut self, slot: Slot, seat: Seat) {
        let swapped = core::mem::take(&mut self.arena[slot].swapped);
        let num_copied = self.num_copied();
        // All of them first: what is copied back takes blocks.
        for &block in &self.pass.hits {
            if block != BlockId(0) {
                self.kv.pool.retain(block);
            }
        }
        for i in 0..self.pass.hits.len() {
            match self.pass.hits[i] {
                BlockId(0) if (i as u32) < self.pass.num_behind => self.kv.push_behind(seat),
                BlockId(0) => self.swap_in(seat, &swapped),
                block => self.kv.push(seat, block),
            }
        }
        if num_copied > 0 {
            if self.config.enable_prefix_caching {
                self.register_copied(slot, seat);
            }
            self.pass
                .swapped_in
                .push((self.arena.handle(slot), swapped));
        } else {
            self.host.release(swapped);
        }
    }

    /// The next block of the table of `seat` is a new one, to which this plan copies its content back.
    #[cold]
    fn swap_in(&mut self, seat: Seat, swapped: &Swapped) {
        let column = self.kv.len(seat);
        self.kv
            .try_reserve(seat, column + 1)
            .expect("what is available was counted");
        let block = self.kv.table(seat)[column as usize];
        let host = swapped.blocks[(column - swapped.first) as usize];
        self.pass.swap_in.push((host, block));
    }

    /// Full blocks that this plan copies back can be found at once.
    #[cold]
    fn register_copied(&mut self, slot: Slot, seat: Seat) {
        let num_full = self.pass.resume_at / self.config.block_size;
        for column in self.pass.num_behind..num_full {
            if self.pass.hits[column as usize] == BlockId(0) {
                let sequence = &mut self.arena[slot];
                let filled = &mut self.pass.filled;
                register_known(&mut self.kv, filled, &self.hasher, sequence, seat, column);
            }
        }
    }

    /// A step is committed: its copies are there.
    #[cold]
    pub(super) fn confirm_swaps(&mut self, step: &mut StepInFlight) {
        for handle in &step.swapped_out {
            if let Some(sequence) = self.arena.get_mut(*handle)
                && sequence.swapped.step == Some(step.id)
            {
                sequence.swapped.step = None;
            }
        }
        for (_, swapped) in step.swapped_in.drain(..) {
            self.host.release(swapped);
        }
    }

    /// A step is discarded, its rows already: what it copied to the host is not there; what it copied back still is.
    #[cold]
    pub(super) fn discard_swaps(&mut self, step: &mut StepInFlight) {
        for handle in &step.swapped_out {
            if self.live(*handle).is_some()
                && self.arena[handle.slot()].swapped.step == Some(step.id)
            {
                self.drop_swapped(handle.slot());
            }
        }
        for (handle, swapped) in step.swapped_in.drain(..) {
            if self.live(handle).is_none() {
                self.host.release(swapped);
                continue;
            }
            // A copy of a step behind this one is not there either.
            self.drop_swapped(handle.slot());
            self.arena[handle.slot()].swapped = swapped;
        }
    }
}
