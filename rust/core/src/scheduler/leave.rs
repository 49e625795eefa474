//! How a sequence leaves its seat, or the queue: the verb `finish`, other ends, and preemption. O(its blocks).

use super::Scheduler;
use crate::event::EventKind;
use crate::ids::{Handle, Seat, Slot};
use crate::policy::{Admission, Key};
use crate::request::FinishReason;
use crate::sequence::State;

impl Scheduler {
    /// Ends a request for a reason that was found outside; `false` if it had ended. Idempotent.
    /// `num_output_tokens` is where its text ends, which may be before what was committed; more than that is cut to it.
    pub fn finish(
        &mut self,
        handle: Handle,
        num_output_tokens: u32,
        reason: FinishReason,
        now_us: u64,
    ) -> bool {
        if let Some(recorder) = &mut self.recorder {
            recorder.finish(handle, num_output_tokens, reason, now_us);
        }
        self.events.begin_silent();
        let Some(slot) = self.live(handle) else {
            return false;
        };
        let num_output = num_output_tokens.min(self.arena[slot].num_output());
        self.end(slot, reason, num_output);
        true
    }

    /// Update: a request waited too long. `false` if it had ended.
    pub fn expire(&mut self, handle: Handle, now_us: u64) -> bool {
        let num_output = self
            .live(handle)
            .map_or(0, |slot| self.arena[slot].num_output());
        self.finish(handle, num_output, FinishReason::Expired, now_us)
    }

    /// Ends a live sequence wherever it is.
    pub(super) fn end(&mut self, slot: Slot, reason: FinishReason, num_output: u32) {
        let handle = self.arena.handle(slot);
        self.events.push(
            handle,
            EventKind::Finished,
            reason as i64,
            num_output.into(),
        );
        let sequence = &self.arena[slot];
        let num_output = num_output.min(sequence.num_output());
        let (account, wanted_no_more) = (sequence.standing.account, reason == FinishReason::Stop);
        self.accounts.close(account);
        self.drop_deadline(slot);
        if num_output > 0 && self.predicts() {
            self.accounts.learn(account, num_output, wanted_no_more);
        }
        let sequence = &mut self.arena[slot];
        match sequence.state {
            State::Parked => {
                self.num_parked -= 1;
                self.num_queued_tokens -= u64::from(sequence.num_prompt);
            }
            State::Waiting => {
                self.dequeue(slot);
                self.drop_swapped(slot);
            }
            State::Running(seat) if self.config.admission == Admission::StaticPadded => {
                sequence.state = State::Ghost(seat);
                sequence.plain_until = 0;
                sequence.quiet_until = 0;
                sequence.confinement = None;
                self.note_exit(slot);
                if self.num_running == 0 {
                    self.release_ghosts();
                }
                return;
            }
            State::Running(seat) => {
                let key = sequence.key;
                self.note_exit(slot);
                self.give_up(seat, key);
            }
            State::Ghost(_) => unreachable!("a ghost has ended"),
        }
        self.arena.remove(slot);
    }

    /// Takes a running sequence's seat and blocks in a plan; it waits again, in its old place.
    pub(super) fn preempt(&mut self, slot: Slot) {
        self.displace(slot, self.config.num_swap_blocks > 0);
    }

    /// The same; if it `is_swapped`, its KV is copied to the host where there is room.
    pub(super) fn displace(&mut self, slot: Slot, is_swapped: bool) {
        let sequence = &mut self.arena[slot];
        let State::Running(seat) = sequence.state else {
            unreachable!("only a running sequence is preempted");
        };
        if sequence.decodes_in(self.pass.serial) {
            sequence.withdraw();
            self.pass.num_left += 1 + sequence.row.num_drafts;
            self.pass.has_withdrawn = true;
        }
        let (key, mut num_lost) = (sequence.key, sequence.num_planned);
        self.pass.debt -= sequence.row.debt;
        if is_swapped {
            num_lost -= self.try_swap_out(slot, seat);
        }
        let sequence = &mut self.arena[slot];
        sequence.end_residency();
        sequence.state = State::Waiting;
        sequence.num_preemptions += 1;
        sequence.preempted_in = self.pass.serial;
        self.note_exit(slot);
        self.forecast.remove(self.arena.handle(slot));
        self.note_wait(slot);
        self.enqueue(slot);
        self.note_wear(slot);
        self.tally.num_preempted += 1;
        self.tally.num_preempted_tokens += i64::from(num_lost);
        self.events.push(
            self.arena.handle(slot),
            EventKind::Preempted,
            num_lost.into(),
            self.next_step as i64,
        );
        self.give_up(seat, key);
    }

    /// A sequence runs no more.
    fn note_exit(&mut self, slot: Slot) {
        self.num_running -= 1;
        self.num_limit_blocks -= u64::from(self.limit_blocks(slot));
        self.leave_band(slot);
        self.adapters.leave(self.arena[slot].standing.adapter);
    }

    fn give_up(&mut self, seat: Seat, key: Key) {
        self.kv.release(seat);
        self.free_seats.push(seat);
        self.lost.push(seat);
        self.residents.note_departure(key);
    }

    /// The padded gang has ended: its finished rows leave.
    pub(super) fn release_ghosts(&mut self) {
        for i in 0..self.residents.len() {
            let resident = *self.residents.get(i);
            if resident.has_left() {
                continue;
            }
            let slot = resident.handle.slot();
            if let State::Ghost(seat) = self.arena[slot].state {
                self.give_up(seat, resident.key);
                self.arena.remove(slot);
            }
        }
    }
}
