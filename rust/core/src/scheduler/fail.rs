//! `fail`: the runner raised. The step and all behind it never were, but for what left meanwhile.

use alloc::vec::Vec;

use super::Scheduler;
use crate::ids::{Handle, StepId};
use crate::request::FinishReason;
use crate::step::{RowInFlight, RowKind, StepInFlight};

impl Scheduler {
    /// Discards `step` and every later one in flight; see DESIGN.md 2.4. One that is not in flight is ignored.
    /// O(rows and blocks of the discarded steps).
    pub fn fail(&mut self, step: StepId, now_us: u64) {
        if let Some(recorder) = &mut self.recorder {
            recorder.fail(step, now_us);
        }
        self.events.begin_silent();
        if !self.steps.contains(step) {
            return;
        }
        let mut suspects = Vec::new();
        let (mut group, mut num_sequences) = (None, 0);
        while let Some(mut discarded) = self.steps.pop_first_from(step) {
            for &block in &discarded.filled {
                self.kv.unregister(block);
            }
            self.discard_moves(&discarded);
            for row in &discarded.rows {
                self.discard_row(row);
                if discarded.id == step
                    && row.kind == RowKind::Live
                    && self.live(row.handle).is_some()
                {
                    suspects.push((row.handle, row.end));
                }
            }
            if discarded.id == step {
                group = discarded.group;
                let is_sequence = |row: &&RowInFlight| row.kind != RowKind::Padding;
                num_sequences = discarded.rows.iter().filter(is_sequence).count();
            }
            self.discard_swaps(&mut discarded);
            discarded.record.has_failed = 1;
            discarded.record.committed_us = now_us as i64;
            self.records.push(&discarded.record);
            self.steps.recycle(discarded);
        }
        if self.config.admission.is_static() {
            self.disband_gang();
        }
        self.confine(group, &suspects, num_sequences);
    }

    /// Nobody knows whether its moves were made: neither end of one can be found, and who holds one runs again.
    fn discard_moves(&mut self, discarded: &StepInFlight) {
        for &(from, to) in &discarded.moves {
            self.kv.unregister(from);
            self.kv.unregister(to);
        }
        for &(handle, residency) in &discarded.moved {
            let is_current = self
                .arena
                .get_mut(handle)
                .is_some_and(|sequence| sequence.is_running() && sequence.residency == residency);
            if is_current {
                self.displace(handle.slot(), false);
            }
        }
    }

    fn discard_row(&mut self, row: &RowInFlight) {
        if row.kind == RowKind::Padding {
            return;
        }
        let Some(sequence) = self.arena.get_mut(row.handle) else {
            return;
        };
        sequence.land(row);
        if sequence.is_running() && sequence.residency == row.residency {
            self.displace(row.handle.slot(), false);
        }
    }

    /// The rows of a failed step run again by themselves; one that failed alone ends. Others of the step's
    /// `num_sequences` may have ended since: then it did not fail alone.
    fn confine(&mut self, group: Option<u64>, suspects: &[(Handle, u32)], num_sequences: usize) {
        match (group, suspects) {
            (Some(_), &[(handle, _)]) if num_sequences == 1 => {
                let slot = handle.slot();
                let num_output = self.arena[slot].num_output();
                self.end(slot, FinishReason::Error, num_output);
            }
            (Some(_), _) => self.quarantine.split(&mut self.arena, suspects),
            (None, _) => self.quarantine.confine(&mut self.arena, suspects),
        }
    }

    /// A gang that lost a step starts over as a new one, so that the batch is empty for it.
    fn disband_gang(&mut self) {
        self.residents.settle();
        for i in 0..self.residents.len() {
            let resident = *self.residents.get(i);
            let slot = resident.handle.slot();
            if !resident.has_left() && self.arena[slot].is_running() {
                self.preempt(slot);
            }
        }
        self.release_ghosts();
    }
}
