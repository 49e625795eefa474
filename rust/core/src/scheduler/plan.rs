//! `plan`: decodes first, then one walk over prefills, then the rows are written.

use super::window::release_unseen;
use super::write::size_of;
use super::{Drafts, Planned, Scheduler};
use crate::cost::Size;
use crate::ids::Slot;
use crate::policy::{Admission, MAX_PAUSED_STEPS, Share};
use crate::step::RowInFlight;

impl Scheduler {
    /// Decides the next step, reserves its blocks and writes it to `buffer`.
    ///
    /// # Panics
    /// `buffer` is not [`StepLayout::size`](crate::StepLayout) long.
    pub fn plan(&mut self, now_us: u64, drafts: &Drafts<'_>, buffer: &mut [i32]) -> Planned {
        assert_eq!(
            buffer.len(),
            self.layout.size,
            "the buffer's length is the layout's"
        );
        self.score_changed(now_us);
        if let Some(recorder) = &mut self.recorder {
            recorder.plan(now_us, drafts);
        }
        self.events.begin();
        self.end_expired(now_us);
        if self.steps.is_full() {
            return self.nothing();
        }
        self.settle_tier();
        self.residents.settle();
        self.settle_quarantine();
        if self.quarantine.active().is_some() && self.steps.len() > 0 {
            // One step at a time, so that a failure names its rows and no others.
            return self.nothing();
        }
        self.pass.begin(self.config.max_num_batched_tokens);
        self.forecast.begin();
        self.refresh_scores();
        if self.config.admission.is_static() {
            self.admit_gang();
        }
        if self.is_shrinking() {
            self.shed();
        }
        let prefills_go_first = self.prefills_go_first();
        if prefills_go_first {
            self.list_prefills();
        } else {
            self.plan_decodes::<false>(buffer);
            if !drafts.handles.is_empty() {
                self.extend_by_drafts(drafts);
            }
        }
        if self.config.step_target_us > 0 {
            self.budget_time(prefills_go_first);
        }
        self.walk_prefills();
        if prefills_go_first {
            self.plan_decodes_late(buffer, drafts);
        }
        self.drop_withdrawn();
        if self.pass.rows.is_empty() && self.pass.prefill_rows.is_empty() {
            self.clear_rows();
            self.drop_unwritten_swaps();
            return self.nothing();
        }
        if self.wants_moves() {
            self.plan_moves();
        }
        Planned::Step(self.write_step(now_us, drafts, buffer))
    }

    /// A static gang that has got past its failure keeps the batch until it ends; only then the next group enters.
    fn settle_quarantine(&mut self) {
        let is_confined = self.quarantine.settle(&self.arena).is_some();
        if is_confined && self.config.admission.is_static() && !self.residents.is_empty() {
            let has_member = self
                .residents
                .iter()
                .any(|resident| self.is_free_to_run(resident.handle.slot()));
            if !has_member {
                self.quarantine.suspend();
            }
        }
    }

    fn nothing(&self) -> Planned {
        self.steps.oldest().map_or(Planned::Idle, Planned::Waiting)
    }

    /// Every resident that decodes gets a row of one token, best key first; prefills are listed for the walk.
    /// Where prefills went first, those get one for whom tokens are left; how often in a row some did not is counted.
    fn plan_decodes<const PREFILLS_WENT_FIRST: bool>(&mut self, buffer: &mut [i32]) {
        let is_padded = self.config.admission == Admission::StaticPadded;
        let holds_decodes = is_padded && self.has_unfinished_prefill();
        let is_confined = self.quarantine.active().is_some();
        let all_run = !holds_decodes && !is_confined;
        let (serial, num_residents) = (self.pass.serial, self.residents.len());
        let mut rows = core::mem::take(&mut self.pass.rows);
        if rows.len() < num_residents {
            rows.resize(num_residents, RowInFlight::NONE);
        }
        let (row_seat, row_start) = self.layout.plain_columns(buffer);
        let (mut next, mut num_rows) = (0, 0);
        // The budget holds a token a seat, so it is only prefills that can leave fewer.
        let max_rows = if PREFILLS_WENT_FIRST {
            num_residents.min(self.pass.num_left as usize)
        } else {
            rows.len()
        };
        while !PREFILLS_WENT_FIRST || num_rows < max_rows {
            if all_run {
                let num_plain = self.plan_plain_rows(
                    next,
                    &mut rows[num_rows..max_rows],
                    &mut row_seat[num_rows..],
                    &mut row_start[num_rows..],
                );
                next += num_plain;
                num_rows += num_plain;
            }
            if next == num_residents || PREFILLS_WENT_FIRST && num_rows == max_rows {
                break;
            }
            let resident = *self.residents.get(next);
            next += 1;
            let (handle, slot) = (resident.handle, resident.handle.slot());
            // Most that are not plain only need a block, or have one behind their window: that is looked up once.
            if all_run
                && !PREFILLS_WENT_FIRST
                && let Some(sequence) = self.arena.get_mut(handle)
                && let Some(seat) = sequence.seat_of_plain()
                && sequence.max_output_in_flight() < sequence.max_output
            {
                let start = sequence.num_planned;
                if self.config.window > 0 {
                    release_unseen(&mut self.kv, &self.config, &mut self.tally, seat, start);
                }
                let num_blocks = start / self.config.block_size + 1;
                if self.kv.try_reserve(seat, num_blocks).is_some() {
                    let row = sequence.decode(handle, serial);
                    row_seat[num_rows] = seat.0 as i32;
                    row_start[num_rows] = start as i32;
                    self.pass.max_context = self.pass.max_context.max(row.end);
                    self.pass.grown.push(slot);
                    rows[num_rows] = row;
                    num_rows += 1;
                    continue;
                }
            }
            let is_out = resident.has_left() || PREFILLS_WENT_FIRST && self.has_prefill(slot);
            if !is_out
                && (!is_confined || self.is_free_to_run(slot))
                && self.decodes_next(slot, holds_decodes)
            {
                let sequence = &mut self.arena[slot];
                let row = sequence.decode(handle, serial);
                self.pass.special_rows.push(num_rows);
                rows[num_rows] = row;
                num_rows += 1;
            }
        }
        self.num_paused_steps = if PREFILLS_WENT_FIRST && self.is_decode_left(next) {
            self.num_paused_steps + 1
        } else {
            0
        };
        rows.truncate(num_rows);
        self.pass.num_left -= num_rows as u32;
        self.pass.rows = rows;
    }

    /// Writes rows, their seats and starts for the residents from `next` on, up to the first that is not a plain decode;
    /// returns how many. Most rows of most steps are written here, and need nothing else.
    #[inline(never)] // its registers are wanted by its loop
    fn plan_plain_rows(
        &mut self,
        next: usize,
        rows: &mut [RowInFlight],
        row_seat: &mut [i32],
        row_start: &mut [i32],
    ) -> usize {
        let (arena, serial) = (&mut self.arena, self.pass.serial);
        let places = rows.iter_mut().zip(row_seat.iter_mut().zip(row_start));
        let residents = self.residents.settled_from(next);
        let (mut num_plain, mut max_context) = (0, self.pass.max_context);
        for (resident, (row, (to_seat, to_start))) in residents.iter().zip(places) {
            // Who has left has no slot.
            let Some(sequence) = arena.at_mut(resident.handle.slot()) else {
                break;
            };
            let Some(seat) = sequence.seat_if_plain() else {
                break;
            };
            *to_seat = seat.0 as i32;
            *to_start = sequence.num_planned as i32;
            *row = sequence.decode(resident.handle, serial);
            max_context = max_context.max(row.end);
            num_plain += 1;
        }
        self.pass.max_context = max_context;
        num_plain
    }

    /// Whether resident `slot` decodes in this step, with a block reserved for it; if it has prompt tokens to go, it is
    /// listed.
    #[inline(always)]
    #[allow(
        clippy::inline_always,
        reason = "it is in the loop over residents, in both of its forms"
    )]
    fn decodes_next(&mut self, slot: Slot, holds_decodes: bool) -> bool {
        let sequence = &self.arena[slot];
        let seat = sequence.seat().expect("a resident has a seat");
        if !sequence.has_sampled || sequence.num_padding_owed > 0 {
            self.list_prefill(slot);
            return false;
        }
        if holds_decodes {
            return false;
        }
        let num_wanted = sequence.num_planned + 1;
        if sequence.is_ghost() {
            // Its reservation is used up only while the gang's last token is in flight.
            return self.config.blocks_for(num_wanted) <= self.kv.len(seat);
        }
        sequence.max_output_in_flight() < sequence.max_output && self.try_grow(slot, num_wanted)
    }

    /// Resident `slot` has prompt tokens to go.
    fn list_prefill(&mut self, slot: Slot) {
        let sequence = &self.arena[slot];
        let seat = sequence.seat().expect("a resident has a seat");
        let debt = self.num_blocks_to_go(slot, seat);
        self.arena[slot].row.debt = debt;
        self.pass.debt += debt;
        self.pass.prefills.push(slot);
    }

    /// Whether prefills come before decodes in this plan.
    fn prefills_go_first(&self) -> bool {
        self.config.share == Share::PrefillFirst
            && self.num_paused_steps < MAX_PAUSED_STEPS
            && !self.config.admission.is_static()
            && self.quarantine.active().is_none()
    }

    #[cold] // off the path of the common share
    fn plan_decodes_late(&mut self, buffer: &mut [i32], drafts: &Drafts<'_>) {
        self.plan_decodes::<true>(buffer);
        self.extend_by_drafts(drafts);
    }

    #[cold]
    fn list_prefills(&mut self) {
        for i in 0..self.residents.len() {
            let resident = *self.residents.get(i);
            let slot = resident.handle.slot();
            if !resident.has_left() && !self.arena[slot].has_sampled {
                self.list_prefill(slot);
            }
        }
    }

    /// Whether one of the residents from `next` on could decode.
    fn is_decode_left(&self, next: usize) -> bool {
        self.residents.settled_from(next).iter().any(|resident| {
            let slot = resident.handle.slot();
            !resident.has_left() && !self.has_prefill(slot) && {
                let sequence = &self.arena[slot];
                sequence.max_output_in_flight() < sequence.max_output
            }
        })
    }

    /// Whether resident `slot` is among the prefills of this plan, whatever came of it.
    fn has_prefill(&self, slot: Slot) -> bool {
        let sequence = &self.arena[slot];
        !sequence.has_sampled || sequence.row.count > 0
    }

    /// What is left of the step's target beside the rows that were planned; before any step was seen, that is the first
    /// prefill's block alone.
    #[cold]
    fn budget_time(&mut self, prefills_go_first: bool) {
        let size = if prefills_go_first {
            Size::default()
        } else {
            size_of(&self.pass.rows)
        };
        let left = self.cost.left_of(self.config.step_target_us, size);
        self.pass.cost_left = left.unwrap_or(0);
    }

    /// Drops the rows of those that made room for others since.
    fn drop_withdrawn(&mut self) {
        if self.pass.has_withdrawn {
            let (arena, serial) = (&self.arena, self.pass.serial);
            self.pass
                .rows
                .retain(|row| arena[row.handle.slot()].decodes_in(serial));
        }
    }

    /// The padded baseline decodes only when its whole gang is through its prompts.
    fn has_unfinished_prefill(&self) -> bool {
        self.residents.iter().any(|resident| {
            let sequence = &self.arena[resident.handle.slot()];
            sequence.is_running() && (!sequence.has_sampled || sequence.num_padding_owed > 0)
        })
    }

    /// Reserves blocks for `num_tokens` tokens of resident `slot`, if need be at the cost of another; `false` if it must
    /// wait, or had to leave itself.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "as `decodes_next`")]
    fn try_grow(&mut self, slot: Slot, num_tokens: u32) -> bool {
        let seat = self.arena[slot].seat().expect("a resident has a seat");
        self.release_behind(slot, seat, num_tokens - 1);
        if num_tokens <= self.kv.len(seat) * self.config.block_size {
            return true;
        }
        let num_blocks = self.config.blocks_for(num_tokens);
        while self.kv.try_reserve(seat, num_blocks).is_none() {
            if !self.make_room(slot) {
                return false;
            }
        }
        true
    }

    /// Lengthens decodes by drafts, as far as budget, limits and blocks that nobody holds allow.
    fn extend_by_drafts(&mut self, drafts: &Drafts<'_>) {
        let mut next_id = 0;
        for (&handle, &count) in drafts.handles.iter().zip(drafts.counts) {
            let count = count.max(0) as usize;
            let first_id = next_id;
            next_id += count;
            let Some(slot) = self.live(handle) else {
                continue;
            };
            let ids = drafts
                .ids
                .map(|ids| ids.get(first_id..next_id).unwrap_or(&[]));
            let is_valid = ids.is_none_or(|ids| {
                ids.len() == count && ids.iter().all(|&id| (id as u32) < self.config.vocab_size)
            });
            let sequence = &self.arena[slot];
            // Ids were guessed from tokens that the host knew, so nothing may be in flight behind them.
            let is_usable = is_valid
                && sequence.decodes_in(self.pass.serial)
                && sequence.row.num_drafts == 0
                && !sequence.host_masked
                && (ids.is_none() || sequence.num_pending == 1);
            if !is_usable {
                continue;
            }
            let seat = sequence.seat().expect("a row has a seat");
            let room = sequence.max_output - sequence.max_output_in_flight();
            let wanted = (count as u32)
                .min(self.config.max_drafts)
                .min(room)
                .min(self.pass.num_left);
            let num_drafts = (0..=wanted)
                .rev()
                .find(|&num| {
                    let num_blocks = self.config.blocks_for(sequence.num_planned + num);
                    self.kv.try_reserve(seat, num_blocks).is_some()
                })
                .unwrap_or(0);
            let sequence = &mut self.arena[slot];
            sequence.row.num_drafts = num_drafts;
            sequence.row.draft_ids =
                (drafts.ids.is_some() && num_drafts > 0).then_some(first_id as u32);
            self.pass.num_left -= num_drafts;
        }
    }

    /// Undoes marks of a pass that ended without a step.
    fn clear_rows(&mut self) {
        for i in 0..self.pass.prefills.len() {
            let slot = self.pass.prefills[i];
            self.arena[slot].row = crate::sequence::PlannedRow::default();
        }
    }
}
