//! How KV memory lies: what is lost to fragments, and where.

use crate::ids::BlockId;
use crate::scheduler::Scheduler;

/// Figures of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvFigures {
    /// Blocks in all; while the pool shrinks, also those that are still to be moved.
    pub num_blocks: u32,
    /// Blocks whose content is nobody's.
    pub num_free: u32,
    /// Blocks without a holder whose content can be found.
    pub num_cached: u32,
    /// Blocks that sequences hold, or that are pinned.
    pub num_held: u32,
    /// Runs that the free blocks lie in.
    pub num_free_runs: u32,
    /// The longest of them.
    pub longest_free_run: u32,
    /// Sequences that hold blocks.
    pub num_sequences: u32,
    /// Table entries of all sequences; a shared block counts for each.
    pub num_table_blocks: u32,
    /// Runs that those lie in.
    pub num_runs: u32,
    /// Slots of held blocks in which no token is stored, nor will be by a step in flight.
    pub num_unused_slots: u32,
}

impl Scheduler {
    /// Counts how KV memory lies. O(table entries + free runs).
    pub fn kv_figures(&self) -> KvFigures {
        let pool = &self.kv.pool;
        let mut figures = KvFigures {
            num_blocks: pool.num_blocks(),
            num_free: pool.num_free(),
            num_cached: pool.num_cached(),
            num_held: self.num_held_blocks(),
            ..KvFigures::default()
        };
        for (_, len) in pool.free_runs() {
            figures.num_free_runs += 1;
            figures.longest_free_run = figures.longest_free_run.max(len);
        }
        for resident in self.residents.iter() {
            let sequence = &self.arena[resident.handle.slot()];
            let Some(seat) = sequence.seat() else {
                continue;
            };
            let table = self.kv.held(seat);
            let num_blocks = table.len() as u32;
            if num_blocks == 0 {
                continue;
            }
            let is_break = |pair: &&[BlockId]| pair[0].0 + 1 != pair[1].0;
            figures.num_sequences += 1;
            figures.num_table_blocks += num_blocks;
            figures.num_runs += 1 + table.windows(2).filter(is_break).count() as u32;
            figures.num_unused_slots +=
                (self.kv.len(seat) * self.config.block_size).saturating_sub(sequence.num_planned);
        }
        figures
    }
}
