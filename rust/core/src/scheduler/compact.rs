//! Moves of blocks, and the pool's size. A plan's moves are run before anything else of its step: steps in flight read the
//! old places before, rows of this step and all after it the new ones. So a source is free for the next plan.
//!
//! A plan that moves nothing costs a comparison; one that does costs a look at every table entry that is held.

use super::Scheduler;
use crate::ids::{BlockId, Handle, Seat, Slot};
use crate::sequence::State;

/// Why the pool cannot have another size. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResizeError {
    /// There are too few or too many blocks.
    NumBlocks {
        /// What was asked for.
        value: u32,
        /// The least.
        low: u32,
        /// The most.
        high: u32,
    },
    /// A request that was accepted needs more.
    RequestNeeds {
        /// Whose.
        handle: Handle,
        /// Its blocks, at its longest, and those that are pinned.
        num_blocks: u32,
        /// What was asked for.
        value: u32,
    },
    /// A block beyond is pinned.
    Pinned {
        /// The last such block.
        block: BlockId,
        /// What was asked for.
        value: u32,
    },
    /// A static gang reserves blocks of the pool that it was counted for.
    Static,
}

impl Scheduler {
    /// Update: the pool has `num_blocks` blocks from now on. Cached blocks beyond are forgotten at once, held ones are
    /// moved by the next plans, and nobody is admitted until then; where those in use do not fit, residents are
    /// preempted, the best key never. What is pinned stays. O(requests + blocks gained or lost).
    ///
    /// # Errors
    /// An accepted request would never fit, a block beyond is pinned, or the number is out of range; nothing has changed.
    pub fn resize(&mut self, num_blocks: u32, now_us: u64) -> Result<(), ResizeError> {
        if let Some(recorder) = &mut self.recorder {
            recorder.resize(num_blocks, now_us);
        }
        self.events.begin_silent();
        if self.config.admission.is_static() {
            return Err(ResizeError::Static);
        }
        let (low, high) = (
            self.config.watermark_blocks + 1 + self.num_pinned_blocks(),
            self.config.max_num_blocks(),
        );
        if num_blocks < low || num_blocks > high {
            return Err(ResizeError::NumBlocks {
                value: num_blocks,
                low,
                high,
            });
        }
        if let Some(block) = self.pins.last()
            && block.0 > num_blocks
        {
            return Err(ResizeError::Pinned {
                block,
                value: num_blocks,
            });
        }
        for (slot, sequence) in self.arena.iter() {
            let needed = sequence.standing.num_limit_blocks + self.num_pinned_blocks();
            if needed > num_blocks {
                return Err(ResizeError::RequestNeeds {
                    handle: self.arena.handle(slot),
                    num_blocks: needed,
                    value: num_blocks,
                });
            }
        }
        self.kv.set_limit(num_blocks);
        self.config.num_blocks = num_blocks;
        self.layout.num_blocks = num_blocks as usize;
        Ok(())
    }

    /// Whether a block beyond the pool's new size is still in use; a plan that says otherwise moves the last of them.
    pub fn is_shrinking(&self) -> bool {
        self.kv.pool.is_shrinking()
    }

    /// While the pool shrinks: residents leave until those who stay fit.
    #[cold]
    pub(super) fn shed(&mut self) {
        while self.is_shrinking() && self.num_held_blocks() > self.config.num_blocks {
            let start = self.rank_victims();
            let best = self.best_resident();
            let victim = self.pass.victim_list[start..]
                .iter()
                .map(|&(_, victim)| victim)
                .find(|&victim| Some(victim) != best && self.may_leave(victim));
            let Some(victim) = victim else {
                return;
            };
            self.preempt(victim);
        }
    }

    /// Whether this plan has a reason to move blocks.
    pub(super) fn wants_moves(&self) -> bool {
        (self.is_shrinking() || self.pass.wants_run || self.config.forced_moves > 0)
            && self.layout.capacity_moves > 0
    }

    /// Decides the plan's moves, once all else of it is decided.
    #[cold] // few plans have a reason to
    pub(super) fn plan_moves(&mut self) {
        if self.config.contiguous {
            self.slide_runs();
            return;
        }
        if self.is_shrinking() {
            self.evacuate();
        }
        if self.config.forced_moves > 0 {
            self.force_moves();
        }
        if !self.pass.moves.is_empty() {
            self.finish_moves();
        }
    }

    /// Moves held blocks from beyond the limit.
    fn evacuate(&mut self) {
        let limit = self.config.num_blocks;
        for i in 0..self.residents.num_entries() {
            let Some(seat) = self.seat_of_resident(i) else {
                continue;
            };
            let mut last = None;
            for column in self.kv.num_behind(seat) as usize..self.kv.len(seat) as usize {
                let block = self.kv.table(seat)[column];
                if block.0 > limit {
                    // Even where it cannot be moved now, others are not tried: they would be no better off.
                    let Some(to) = self.try_move(block, last) else {
                        return;
                    };
                    last = Some(to);
                } else {
                    last = Some(block);
                }
            }
        }
    }

    fn seat_of_resident(&self, i: usize) -> Option<Seat> {
        let resident = self.residents.entry(i);
        if resident.has_left() {
            return None;
        }
        self.arena[resident.handle.slot()].seat()
    }

    /// Notes that held or cached `block` is moved, best behind `last`; where it will be. `None`, and no change, where the
    /// step is full or no block can be had.
    fn try_move(&mut self, block: BlockId, last: Option<BlockId>) -> Option<BlockId> {
        let num_holders = self.kv.pool.num_holders(block);
        if num_holders > 0
            && let Some(to) = self.kv.pool.forward(block)
        {
            return Some(to);
        }
        if self.pass.moves.len() == self.layout.capacity_moves
            || self.pass.num_move_changes + num_holders as usize > self.layout.max_move_changes()
        {
            return None;
        }
        let to = self.kv.take_destination(last)?;
        self.pass.num_move_changes += num_holders as usize;
        self.pass.moves.push((block, to));
        if num_holders > 0 {
            self.kv.pool.set_forward(block, to);
        }
        Some(to)
    }

    /// For tests: moves blocks in use, one after another, whether it pays or not.
    fn force_moves(&mut self) {
        let num_wanted = self.pass.moves.len() + self.config.forced_moves as usize;
        for _ in 0..self.config.num_blocks {
            if self.pass.moves.len() >= num_wanted || self.kv.pool.num_free() == 0 {
                return;
            }
            self.next_forced = self.next_forced % self.config.num_blocks + 1;
            let block = BlockId(self.next_forced);
            let is_used = self.kv.pool.num_holders(block) > 0 || self.kv.cache.is_registered(block);
            let is_destination = self.pass.moves.iter().any(|&(_, to)| to == block);
            if is_used && !is_destination && !self.pins.contains(block) {
                self.try_move(block, None);
            }
        }
    }

    /// Brings tables, pool and cache up to date with the moves that were noted.
    fn finish_moves(&mut self) {
        for i in 0..self.residents.num_entries() {
            let Some(seat) = self.seat_of_resident(i) else {
                continue;
            };
            let handle = self.residents.entry(i).handle;
            let (num_sent, residency) = {
                let sequence = &self.arena[handle.slot()];
                (sequence.num_sent, sequence.residency)
            };
            let mut has_moved = false;
            for column in self.kv.num_behind(seat)..self.kv.len(seat) {
                let block = self.kv.table(seat)[column as usize];
                let Some(to) = self.kv.pool.forward(block) else {
                    continue;
                };
                self.kv.set(seat, column, to);
                has_moved = true;
                if column < num_sent {
                    self.pass.changes.push((seat, column, to));
                }
            }
            if has_moved {
                self.pass.moved.push((handle, residency));
            }
        }
        for i in 0..self.pass.moves.len() {
            let (from, to) = self.pass.moves[i];
            self.kv.relocate(from, to);
        }
        // Not sooner: a source is no destination of the same plan.
        for i in 0..self.pass.moves.len() {
            self.kv.pool.free_run(self.pass.moves[i].0, 1);
        }
    }

    /// Whether `num_blocks` free blocks lie in a row; if not, but there are as many, this plan's moves make it so, or the
    /// next ones'.
    pub(super) fn finds_run(&mut self, num_blocks: u32) -> bool {
        if self.kv.pool.has_run(num_blocks) {
            return true;
        }
        self.tally.num_run_misses += 1;
        if self.quarantine.active().is_some() {
            return self.clear_run(num_blocks);
        }
        self.pass.wants_run = true;
        false
    }

    /// While a group in quarantine has the steps to itself, others stand still: they leave until a run is free, as no
    /// step may come in which they could move.
    fn clear_run(&mut self, num_blocks: u32) -> bool {
        let start = self.rank_victims();
        for i in start..self.pass.victim_list.len() {
            let victim = self.pass.victim_list[i].1;
            if !self.is_free_to_run(victim) && self.may_leave(victim) {
                self.preempt(victim);
                if self.kv.pool.has_run(num_blocks) {
                    return true;
                }
            }
        }
        false
    }

    /// Contiguous mode: slides runs toward block 1, as many as the step holds, so that what is free lies behind them.
    /// A run may slide over itself, or to where another was: every source is read before one is written.
    fn slide_runs(&mut self) {
        let mut runs = core::mem::take(&mut self.pass.runs);
        runs.clear();
        runs.extend(self.residents.iter().filter_map(|resident| {
            let slot = resident.handle.slot();
            let State::Running(seat) = self.arena[slot].state else {
                return None;
            };
            self.kv.table(seat).first().map(|&first| (first, slot))
        }));
        runs.sort_unstable();
        let mut next = BlockId(1);
        for &(first, slot) in &runs {
            if first > next && !self.slide_run(slot, next) {
                break;
            }
            let seat = self.arena[slot].seat().expect("a run has a seat");
            next.0 += self.kv.len(seat);
        }
        self.pass.runs = runs;
    }

    /// Moves the whole run of `slot` down to `to`; `false`, and no change, where the step is full, or the run would still
    /// end beyond a smaller pool: then others must leave first.
    fn slide_run(&mut self, slot: Slot, to: BlockId) -> bool {
        let sequence = &self.arena[slot];
        let seat = sequence.seat().expect("a run has a seat");
        let first = self.kv.table(seat)[0];
        let len = self.kv.len(seat);
        // What lies behind the tokens of earlier steps is nobody's content.
        let num_filled = self
            .config
            .blocks_for(sequence.num_planned - sequence.row.count)
            .min(len);
        let num_sent = sequence.num_sent;
        if to.0 + len - 1 > self.config.num_blocks
            || self.pass.moves.len() + num_filled as usize > self.layout.capacity_moves
            || self.pass.changes.len() + num_sent as usize > self.layout.max_move_changes()
        {
            return false;
        }
        self.pass
            .moves
            .extend((0..num_filled).map(|i| (BlockId(first.0 + i), BlockId(to.0 + i))));
        self.kv.slide_run(seat, to);
        self.pass
            .changes
            .extend((0..num_sent).map(|column| (seat, column, BlockId(to.0 + column))));
        let handle = self.arena.handle(slot);
        self.pass.moved.push((handle, self.arena[slot].residency));
        true
    }
}
