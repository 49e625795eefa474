//! `commit`: a step's sampled ids become tokens; what ends, leaves at once.

use super::Scheduler;
use crate::event::EventKind;
use crate::ids::{Slot, StepId};
use crate::request::FinishReason;
use crate::step::{RowInFlight, RowKind, StepInFlight};

/// Why a commit was refused. Nothing of it was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitError {
    /// The step was never planned.
    Unknown {
        /// The step.
        step: StepId,
    },
    /// An earlier step is still in flight.
    OutOfOrder {
        /// The step.
        step: StepId,
        /// The one that comes first.
        oldest: StepId,
    },
    /// There is not one count a row.
    NumRows {
        /// Counts given.
        given: usize,
        /// Rows of the step.
        expected: usize,
    },
    /// A row gave more ids than it sampled.
    NumIds {
        /// The row.
        row: usize,
        /// Ids given.
        given: i32,
        /// Ids that it may give.
        limit: u32,
    },
    /// The counts do not add up to the ids.
    Total {
        /// Ids given.
        given: usize,
        /// The counts' sum.
        expected: usize,
    },
    /// A sampled id is not in the vocabulary.
    TokenOutOfRange {
        /// The id.
        token: i32,
        /// The vocabulary's size.
        vocab_size: u32,
    },
}

impl Scheduler {
    /// Takes what `step` sampled: `num_ids[row]` ids a row, one after another in `ids`. A step that was discarded by a
    /// failure is ignored.
    ///
    /// # Errors
    /// The ids do not match the oldest step in flight; nothing has changed.
    pub fn commit(
        &mut self,
        step: StepId,
        num_ids: &[i32],
        ids: &[i32],
        device_us: u64,
        now_us: u64,
    ) -> Result<(), CommitError> {
        if let Some(recorder) = &mut self.recorder {
            recorder.commit(step, num_ids, ids, device_us, now_us);
        }
        if step.0 == 0 || step.0 >= self.next_step {
            return Err(CommitError::Unknown { step });
        }
        if !self.steps.contains(step) {
            self.events.begin();
            return Ok(());
        }
        let mut taken = self.steps.pop_oldest().expect("a step is in flight");
        let outcome = if taken.id == step {
            self.matches(&taken, num_ids, ids)
        } else {
            Err(CommitError::OutOfOrder {
                step,
                oldest: taken.id,
            })
        };
        if let Err(error) = outcome {
            self.steps.push_front(taken);
            return Err(error);
        }
        // Not sooner: a refused commit reports nothing, so what waits to be reported must stay.
        self.events.begin();
        let mut rest = ids;
        for (row, &count) in taken.rows.iter().zip(num_ids) {
            let (ids, behind) = rest.split_at(count as usize);
            rest = behind;
            let num_used = self.commit_row(row, ids);
            taken.record.num_output_tokens += i64::from(num_used.used);
            taken.record.num_finished += i64::from(num_used.has_finished);
            if row.kind == RowKind::Live {
                taken.record.num_wasted_tokens += i64::from(count) - i64::from(num_used.used);
            }
        }
        taken.record.device_us = device_us as i64;
        taken.record.committed_us = now_us as i64;
        self.records.push(taken.record);
        self.steps.recycle(taken);
        Ok(())
    }

    /// Whether the ids are as the step's rows allow.
    fn matches(
        &self,
        step: &StepInFlight,
        num_ids: &[i32],
        ids: &[i32],
    ) -> Result<(), CommitError> {
        if num_ids.len() != step.rows.len() {
            return Err(CommitError::NumRows {
                given: num_ids.len(),
                expected: step.rows.len(),
            });
        }
        let mut total = 0;
        for (row, (&given, planned)) in num_ids.iter().zip(&step.rows).enumerate() {
            if given as u32 > planned.max_ids {
                return Err(CommitError::NumIds {
                    row,
                    given,
                    limit: planned.max_ids,
                });
            }
            total += given as usize;
        }
        if total != ids.len() {
            return Err(CommitError::Total {
                given: ids.len(),
                expected: total,
            });
        }
        let vocab_size = self.config.vocab_size;
        match ids.iter().find(|&&id| id as u32 >= vocab_size) {
            Some(&token) => Err(CommitError::TokenOutOfRange { token, vocab_size }),
            None => Ok(()),
        }
    }

    fn commit_row(&mut self, row: &RowInFlight, ids: &[i32]) -> Committed {
        let nothing = Committed::default();
        if row.kind == RowKind::Padding {
            return nothing;
        }
        let Some(slot) = self.arena.slot(row.handle) else {
            return nothing;
        };
        let sequence = &mut self.arena[slot];
        let num_drafts = row.max_ids.saturating_sub(1);
        sequence.num_pending -= row.max_ids;
        sequence.num_rows_in_flight -= 1;
        sequence.num_draft_rows_in_flight -= u32::from(num_drafts > 0);
        if sequence.is_ghost() {
            // It goes on behind the drafts that were right.
            if sequence.residency == row.residency {
                sequence.num_planned -= num_drafts.min(row.max_ids - ids.len() as u32);
            }
            return nothing;
        }
        if row.max_ids > 0 && ids.is_empty() {
            let num_output = sequence.num_output();
            self.end(slot, FinishReason::Error, num_output);
            return Committed {
                used: 0,
                has_finished: true,
            };
        }
        if sequence.confinement.is_some()
            && (!ids.is_empty() || row.end >= sequence.confinement.map_or(0, |c| c.until))
        {
            sequence.confinement = None;
        }
        if sequence.residency == row.residency {
            let num_rejected = row.max_ids - ids.len() as u32;
            sequence.num_computed += row.count - num_rejected;
            sequence.num_planned -= num_rejected;
        }
        let is_current = sequence.residency == row.residency;
        let outcome = self.take_tokens(slot, row, ids);
        if is_current && !outcome.has_finished {
            self.register_computed(slot);
        }
        outcome
    }

    /// Appends the ids up to a stop.
    fn take_tokens(&mut self, slot: Slot, row: &RowInFlight, ids: &[i32]) -> Committed {
        for (i, &id) in ids.iter().enumerate() {
            let sequence = &mut self.arena[slot];
            let position = sequence.num_output();
            sequence.tokens.push(id);
            self.events
                .push(row.handle, EventKind::Token, id.into(), position.into());
            let reason = if sequence.stop_ids.contains(&id) {
                Some(FinishReason::Stop)
            } else if position + 1 >= sequence.max_output {
                Some(FinishReason::Length)
            } else {
                None
            };
            if let Some(reason) = reason {
                self.end_committed(slot, reason, position + 1);
                return Committed {
                    used: i as u32 + 1,
                    has_finished: true,
                };
            }
        }
        Committed {
            used: ids.len() as u32,
            has_finished: false,
        }
    }

    /// A sequence ends by its own token: its full blocks stay findable.
    fn end_committed(&mut self, slot: Slot, reason: FinishReason, num_output: u32) {
        if self.arena[slot].is_running() {
            self.register_computed(slot);
        }
        self.end(slot, reason, num_output);
    }

    /// Makes blocks that committed steps have filled findable: those that hold sampled tokens.
    fn register_computed(&mut self, slot: Slot) {
        let block_size = self.config.block_size;
        let sequence = &mut self.arena[slot];
        // Accepted drafts behind a stop are computed, but are no tokens.
        let num_filled = sequence.num_computed.min(sequence.num_tokens());
        if (sequence.num_registered + 1) * block_size > num_filled
            || !self.config.enable_prefix_caching
        {
            return;
        }
        let Some(seat) = sequence.seat() else {
            return;
        };
        while (sequence.num_registered + 1) * block_size <= num_filled {
            let column = sequence.num_registered;
            let hash = sequence.block_hash(column, block_size, self.config.hash_seed);
            let tokens = sequence.block_tokens(column, block_size);
            self.kv.register(seat, column, hash, tokens);
            sequence.num_registered += 1;
        }
    }
}

/// What a row's commit did.
#[derive(Clone, Copy, Default)]
struct Committed {
    /// Ids that became tokens.
    used: u32,
    has_finished: bool,
}
