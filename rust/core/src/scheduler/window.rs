//! Sliding windows: where every layer has one, blocks that no later row sees are given back as the sequence goes on.
//!
//! Rows in flight read them before any later step writes over them, as steps run in order. A sequence that is preempted
//! computes all its tokens again, but for what the prefix cache still has: there the blocks of one window are enough.

use super::Scheduler;
use crate::config::Config;
use crate::ids::{BlockId, Seat, Slot};
use crate::kv::Kv;
use crate::record::StepRecord;

impl Scheduler {
    /// Gives back blocks of `slot` that a row from position `start` on does not see.
    #[inline]
    pub(super) fn release_behind(&mut self, slot: Slot, seat: Seat, start: u32) {
        if self.config.window == 0 {
            return;
        }
        let sequence = &self.arena[slot];
        // Behind drafts that are rejected the next row starts sooner.
        let start = match sequence.num_draft_rows_in_flight {
            0 => start,
            _ => sequence.num_computed,
        };
        release_unseen(&mut self.kv, &self.config, &mut self.tally, seat, start);
    }

    /// Blocks that the known tokens of `slot` still need, beside those that it holds.
    pub(super) fn num_blocks_to_go(&self, slot: Slot, seat: Seat) -> u32 {
        let num_blocks = self.config.blocks_for(self.arena[slot].num_tokens());
        let num_to_go = num_blocks.saturating_sub(self.kv.len(seat));
        if self.config.window == 0 {
            return num_to_go;
        }
        let room = self.config.max_window_blocks();
        num_to_go.min(room.saturating_sub(self.kv.num_held(seat)))
    }

    /// `slot` holds other blocks than before.
    pub(super) fn settle_debt(&mut self, slot: Slot, seat: Seat) {
        let debt = self.num_blocks_to_go(slot, seat);
        let before = core::mem::replace(&mut self.arena[slot].row.debt, debt);
        self.pass.debt = self.pass.debt + debt - before;
    }

    /// Blocks that a newcomer with `pass.hits` holds at once, of a table of `num_columns`.
    pub(super) fn num_blocks_at_once(&self, num_columns: u32) -> u32 {
        match self.config.window {
            0 => num_columns,
            _ => (num_columns - self.pass.num_behind).min(self.config.max_window_blocks()),
        }
    }

    /// Lists in `pass.hits` what lets `slot`, which holds `held` blocks, go on as late as possible before block `last`:
    /// only what its next row sees must be there. O(blocks).
    pub(super) fn find_window(&mut self, slot: Slot, held: u32, last: u32) {
        let block_size = self.config.block_size;
        let mut start = last.max(held);
        let mut end = start;
        loop {
            let low = self.config.num_blocks_behind(end * block_size).max(held);
            if start <= low {
                break;
            }
            start -= 1;
            if let Some(block) = self.find_block(slot, start) {
                self.pass.hits.push(block);
            } else {
                end = start;
                self.pass.hits.clear();
            }
        }
        self.pass.num_behind = start - held;
        let behind = (held..start).map(|_| BlockId(0));
        self.pass.hits.extend(behind);
        self.pass.hits.reverse();
    }
}

/// Gives back blocks of `seat` that no row from position `start` on sees, and counts them.
pub(super) fn release_unseen(
    kv: &mut Kv,
    config: &Config,
    tally: &mut StepRecord,
    seat: Seat,
    start: u32,
) {
    let end = config.num_blocks_behind(start);
    if end > kv.num_behind(seat) {
        tally.num_window_blocks += i64::from(kv.release_first(seat, end));
    }
}
