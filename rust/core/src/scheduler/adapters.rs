//! Which adapters run: no more distinct ones than the configuration allows, so that a step never needs more.
//!
//! Costs: O(log adapters) a seat taken or given up; O(victims · log adapters) a displacement that has to empty one.

use alloc::collections::BTreeMap;

use super::Scheduler;
use crate::ids::Slot;

/// Sequences that run with each adapter.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    running: BTreeMap<u64, u32>,
}

impl Adapters {
    pub(crate) fn enter(&mut self, adapter: u64) {
        if adapter != 0 {
            *self.running.entry(adapter).or_default() += 1;
        }
    }

    pub(crate) fn leave(&mut self, adapter: u64) {
        if adapter == 0 {
            return;
        }
        let num = self
            .running
            .get_mut(&adapter)
            .expect("who leaves was counted");
        *num -= 1;
        if *num == 0 {
            self.running.remove(&adapter);
        }
    }

    pub(crate) fn running(&self) -> &BTreeMap<u64, u32> {
        &self.running
    }
}

impl Scheduler {
    /// Whether one more with the adapter of `slot` may run.
    pub(super) fn has_adapter_room(&self, slot: Slot) -> bool {
        let (adapter, running) = (self.arena[slot].standing.adapter, self.adapters.running());
        let max = self.config.max_adapters as usize;
        adapter == 0 || max == 0 || running.len() < max || running.contains_key(&adapter)
    }

    /// The adapter that the fewest run with, of those with which nobody runs who may not be displaced by `band`; `start` is
    /// where the list of victims starts.
    pub(super) fn adapter_to_empty(&self, start: usize, band: i64) -> Option<u64> {
        let mut displaced = BTreeMap::<u64, u32>::new();
        for &(_, victim) in &self.pass.victim_list[start..] {
            if self.may_be_displaced(victim, band) {
                let adapter = self.arena[victim].standing.adapter;
                *displaced.entry(adapter).or_default() += 1;
            }
        }
        let running = self.adapters.running();
        displaced
            .into_iter()
            .filter(|(adapter, num)| running.get(adapter) == Some(num))
            .min_by_key(|&(adapter, num)| (num, adapter))
            .map(|(adapter, _)| adapter)
    }
}
