//! `commit`: a step's sampled ids become tokens; what ends, leaves at once.

use super::Scheduler;
use crate::event::{Event, EventKind};
use crate::ids::{Slot, StepId};
use crate::kv::Kv;
use crate::policy::KeyPolicy;
use crate::prefix_cache::ChainHasher;
use crate::request::FinishReason;
use crate::sequence::Sequence;
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
        let mut num_single = match outcome {
            Ok(num_single) => num_single,
            Err(error) => {
                self.steps.push_front(taken);
                return Err(error);
            }
        };
        // Not sooner: a refused commit reports nothing, so what waits to be reported must stay.
        self.events.begin();
        // Where nobody is in line, no line moves.
        let (charges, notes) = (self.is_fair(), self.queue.len() > 0);
        // An event a token, and one for each row that ends.
        self.events.reserve(ids.len() + taken.rows.len());
        let (mut rest, mut tally) = (ids, Tally::default());
        let (mut rows, mut num_ids) = (taken.rows.as_slice(), num_ids);
        loop {
            if num_single == 0 {
                num_single = count_single(num_ids);
            }
            let single = &rows[..num_single];
            let num_appended = match (charges, notes) {
                (false, _) => self.append_ids::<false, false>(single, rest),
                (true, false) => self.append_ids::<true, false>(single, rest),
                (true, true) => self.append_ids::<true, true>(single, rest),
            };
            tally.used += num_appended as u32;
            rest = &rest[num_appended..];
            let ([row, rows_behind @ ..], [count, counts_behind @ ..]) =
                (&rows[num_appended..], &num_ids[num_appended..])
            else {
                break;
            };
            let (ids, ids_behind) = rest.split_at(*count as usize);
            self.commit_row(row, ids, &mut tally);
            num_single = num_single.saturating_sub(num_appended + 1);
            (rows, num_ids, rest) = (rows_behind, counts_behind, ids_behind);
        }
        if self.config.step_target_us > 0 {
            self.cost.learn(taken.size, device_us);
        }
        taken.record.num_output_tokens = tally.used.into();
        taken.record.num_finished = tally.finished.into();
        taken.record.num_wasted_tokens =
            ids.len() as i64 - i64::from(tally.used) - i64::from(tally.of_ghosts);
        taken.record.device_us = device_us as i64;
        taken.record.committed_us = now_us as i64;
        self.records.push(&taken.record);
        if !(taken.swapped_out.is_empty() && taken.swapped_in.is_empty()) {
            self.confirm_swaps(&mut taken);
        }
        self.steps.recycle(taken);
        Ok(())
    }

    /// Checks that the ids are as the step's rows allow; how many of the first rows surely got one each.
    fn matches(
        &self,
        step: &StepInFlight,
        num_ids: &[i32],
        ids: &[i32],
    ) -> Result<usize, CommitError> {
        if num_ids.len() != step.rows.len() {
            return Err(CommitError::NumRows {
                given: num_ids.len(),
                expected: step.rows.len(),
            });
        }
        // Where each row samples, one id each is always right.
        if step.record.num_sample_rows == step.rows.len() as i64
            && num_ids.len() == ids.len()
            && self.are_one_each(num_ids, ids)
        {
            return Ok(num_ids.len());
        }
        let exceeds = |(&given, row): (&i32, &RowInFlight)| given as u32 > row.max_ids.into();
        if let Some(row) = num_ids.iter().zip(&step.rows).position(exceeds) {
            return Err(CommitError::NumIds {
                row,
                given: num_ids[row],
                limit: step.rows[row].max_ids.into(),
            });
        }
        let total = num_ids.iter().sum::<i32>() as usize;
        if total != ids.len() {
            return Err(CommitError::Total {
                given: ids.len(),
                expected: total,
            });
        }
        if let Some(position) = self.config.first_foreign(ids) {
            return Err(CommitError::TokenOutOfRange {
                token: ids[position],
                vocab_size: self.config.vocab_size,
            });
        }
        Ok(0)
    }

    /// Whether each count is 1 and each id is in the vocabulary; without an early exit that is a vector loop.
    fn are_one_each(&self, num_ids: &[i32], ids: &[i32]) -> bool {
        let last = self.config.vocab_size as i32 - 1;
        let (others, signs) =
            num_ids
                .iter()
                .zip(ids)
                .fold((0, 0), |(others, signs), (&given, &id)| {
                    (others | (given ^ 1), signs | id | last.wrapping_sub(id))
                });
        others == 0 && signs >= 0
    }

    /// Appends an id each to the rows' sequences, up to the first row for which there is more to do than to offer a block
    /// that it fills to the prefix cache; returns how many. Most rows of most steps are committed here. Where it `CHARGES`,
    /// the queue is told whose account moves only if it `NOTES` that.
    #[inline(never)] // its registers are wanted by its loop
    fn append_ids<const CHARGES: bool, const NOTES: bool>(
        &mut self,
        rows: &[RowInFlight],
        ids: &[i32],
    ) -> usize {
        let mut num_appended = 0;
        let weight = u64::from(self.config.fair_output_weight);
        let (mut sequences, mut charges) = (self.arena.occupied(), self.accounts.charges());
        for (row, (&id, event)) in rows.iter().zip(ids.iter().zip(self.events.room())) {
            let Some(sequence) = sequences.get_mut(row.handle) else {
                break;
            };
            // In this order the compiler keeps what is rare out of the way: 14 instructions a row.
            #[allow(clippy::if_not_else, reason = "see above")]
            if !sequence.is_quiet(id) {
                if !sequence.is_quiet_at_edge(id) {
                    break;
                }
                *event = append_at_edge(&mut self.kv, &self.hasher, sequence, row, id);
            } else {
                *event = append(sequence, row, id);
            }
            if CHARGES {
                charges.add::<NOTES>(sequence.standing.account, weight);
            }
            num_appended += 1;
        }
        self.events.take_room(num_appended);
        num_appended
    }

    fn commit_row(&mut self, row: &RowInFlight, ids: &[i32], tally: &mut Tally) {
        if row.kind != RowKind::Live {
            tally.of_ghosts += ids.len() as u32;
            self.commit_ghost(row, ids);
            return;
        }
        let Some(sequence) = self.arena.get_mut(row.handle) else {
            return;
        };
        if sequence.is_ghost() {
            self.commit_ghost(row, ids);
            return;
        }
        let slot = row.handle.slot();
        sequence.land(row);
        if self.config.key == KeyPolicy::Fair && !ids.is_empty() {
            let weighted = u64::from(self.config.fair_output_weight) * ids.len() as u64;
            self.accounts.charge(sequence.standing.account, weighted);
        }
        let is_current = sequence.residency == row.residency;
        if row.max_ids > 0 && ids.is_empty() {
            let num_output = sequence.num_output();
            tally.finished += 1;
            self.end(slot, FinishReason::Error, num_output);
            return;
        }
        if let Some(confinement) = sequence.confinement
            && (!ids.is_empty() || row.end >= confinement.until)
        {
            sequence.confinement = None;
        }
        if is_current {
            let num_rejected = u32::from(row.max_ids) - ids.len() as u32;
            sequence.num_computed += row.count - num_rejected;
            sequence.num_planned -= num_rejected;
        }
        for &id in ids {
            let position = sequence.num_output();
            sequence.append(id);
            self.events
                .push(row.handle, EventKind::Token, id.into(), position.into());
            tally.used += 1;
            if let Some(reason) = sequence.reason_to_end(id) {
                tally.finished += 1;
                self.end_committed(slot, reason, position + 1);
                return;
            }
        }
        if is_current {
            self.register_computed(slot);
        }
        let (block_size, registers_blocks) =
            (self.config.block_size, self.config.enable_prefix_caching);
        self.arena[slot].settle_quiet(block_size, registers_blocks);
    }

    /// A row that gives nobody a token: padding, a ghost's, or one planned before its sequence became a ghost.
    fn commit_ghost(&mut self, row: &RowInFlight, ids: &[i32]) {
        if row.kind == RowKind::Padding {
            return;
        }
        let Some(sequence) = self.arena.get_mut(row.handle) else {
            return;
        };
        sequence.land(row);
        if sequence.residency == row.residency {
            // It goes on behind the drafts that were right.
            let max_ids = u32::from(row.max_ids);
            sequence.num_planned -= max_ids.saturating_sub(1).min(max_ids - ids.len() as u32);
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
        if self.config.enable_prefix_caching {
            let sequence = &mut self.arena[slot];
            register_filled(&mut self.kv, &self.hasher, sequence, self.config.block_size);
        }
    }
}

/// Appends the id that a quiet row sampled; what is reported of it.
#[inline(always)] // in the loop over rows
#[allow(clippy::inline_always, reason = "it is counted in instructions")]
fn append(sequence: &mut Sequence, row: &RowInFlight, id: i32) -> Event {
    let position = sequence.take(row, id);
    Event {
        handle: row.handle,
        kind: EventKind::Token,
        first: id.into(),
        second: position.into(),
    }
}

/// The same, where the id may fill a block.
#[inline(never)]
fn append_at_edge(
    kv: &mut Kv,
    hasher: &ChainHasher,
    sequence: &mut Sequence,
    row: &RowInFlight,
    id: i32,
) -> Event {
    let event = append(sequence, row, id);
    let block_size = kv.cache.block_size();
    register_filled(kv, hasher, sequence, block_size);
    sequence.stay_quiet(block_size);
    event
}

/// Makes findable what committed steps have filled of `sequence`, if it has a seat; the prefix cache is on.
fn register_filled(kv: &mut Kv, hasher: &ChainHasher, sequence: &mut Sequence, block_size: u32) {
    let Some(seat) = sequence.seat() else {
        return;
    };
    while sequence.has_filled_block(block_size) {
        let column = sequence.num_registered;
        let hash = sequence.block_hash(column, block_size, hasher);
        let tokens = sequence.block_tokens(column, block_size);
        let registered = kv.register(seat, column, hash, tokens);
        if kv.events.are_kept()
            && let Some(block) = registered
        {
            kv.tell_stored(block, sequence.parent_hash(column));
        }
        sequence.num_registered += 1;
    }
}

/// How many of the first rows got one id.
fn count_single(num_ids: &[i32]) -> usize {
    num_ids.iter().take_while(|&&given| given == 1).count()
}

/// What a commit's rows did.
#[derive(Clone, Copy, Default)]
struct Tally {
    /// Ids that became tokens.
    used: u32,
    /// Ids sampled for ghosts, which are dropped by design.
    of_ghosts: u32,
    finished: u32,
}
