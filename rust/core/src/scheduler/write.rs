//! The end of a plan: its rows are written to the step buffer, and remembered for their commit.

use super::{Drafts, Scheduler};
use crate::cost::Size;
use crate::ids::{BlockId, Seat, Slot, StepId};
use crate::layout::{CHANGE_WORDS, GAINED_WORDS, Sections, StepLayout, flags, header};
use crate::record::StepRecord;
use crate::sequence::{PlannedRow, Sequence};
use crate::step::{RowInFlight, RowKind, StepInFlight};

/// Fills a buffer's sections, and counts what they hold.
struct Writer<'a> {
    to: Sections<'a>,
    num_gained_blocks: usize,
    num_changes: usize,
    num_moves: usize,
    num_swap_out: usize,
    num_swap_in: usize,
    num_rows: usize,
    num_tokens: usize,
    num_listed: usize,
    num_sample_rows: usize,
    num_logits: usize,
    num_seat_rows: usize,
    num_host_masked: usize,
    max_context: u32,
    max_count: u32,
}

impl<'a> Writer<'a> {
    fn new(buffer: &'a mut [i32], layout: &StepLayout) -> Self {
        let to = layout.cut(buffer);
        to.cu_seqlens_q[0] = 0;
        Self {
            to,
            num_gained_blocks: 0,
            num_changes: 0,
            num_moves: 0,
            num_swap_out: 0,
            num_swap_in: 0,
            num_rows: 0,
            num_tokens: 0,
            num_listed: 0,
            num_sample_rows: 0,
            num_logits: 0,
            num_seat_rows: 0,
            num_host_masked: 0,
            max_context: 0,
            max_count: 0,
        }
    }

    fn row(&mut self, seat: Seat, start: u32, count: u32, row_flags: i32, ids: usize) {
        let row = self.num_rows;
        self.to.row_seat[row] = seat.0 as i32;
        self.to.row_start[row] = start as i32;
        self.to.row_count[row] = count as i32;
        self.to.row_flags[row] = row_flags;
        self.to.row_ids[row] = ids as i32;
        self.num_rows += 1;
        self.num_tokens += count as usize;
        self.to.cu_seqlens_q[row + 1] = self.num_tokens as i32;
        self.max_count = self.max_count.max(count);
        if row_flags & flags::PADDING == 0 {
            self.max_context = self.max_context.max(start + count);
        }
        if row_flags & flags::SAMPLES != 0 {
            self.num_sample_rows += 1;
            self.num_logits += 1;
        }
        if row_flags & flags::HOST_MASKED != 0 {
            self.num_host_masked += 1;
        }
    }

    /// Begins with `num` rows of plain decodes, whose seats and starts have been written.
    fn plain_rows(&mut self, num: usize) {
        // Whole vectors, where there is room behind the last row; what follows writes over it.
        let num_filled = num.next_multiple_of(8).min(self.to.row_count.len());
        self.to.row_count[..num_filled].fill(1);
        self.to.row_flags[..num_filled].fill(flags::SAMPLES);
        // In pieces: a long fill is one `rep stos`, which is slow to start, and which callgrind counts by the byte.
        for ids in self.to.row_ids[..num_filled].chunks_mut(256) {
            ids.fill(0);
        }
        for (place, end) in self.to.cu_seqlens_q[..=num_filled].iter_mut().zip(0..) {
            *place = end;
        }
        self.num_rows = num;
        self.num_seat_rows = num;
        self.num_tokens = num;
        self.num_sample_rows = num;
        self.num_logits = num;
        self.max_count = u32::from(num > 0);
    }

    /// Says of the decode in `row`, which is not plain, what it is.
    fn amend(&mut self, row: usize, seat: Seat, start: u32, row_flags: i32) {
        self.to.row_seat[row] = seat.0 as i32;
        self.to.row_start[row] = start as i32;
        self.to.row_flags[row] = row_flags;
        self.max_context = self.max_context.max(start + 1);
        self.num_host_masked += usize::from(row_flags & flags::HOST_MASKED != 0);
    }

    /// Lengthens the decode in `row` by drafts; `cu_seqlens_q` is mended by `mend_offsets`.
    fn lengthen(&mut self, row: usize, num_drafts: u32) {
        let count = 1 + num_drafts;
        self.to.row_count[row] = count as i32;
        self.num_tokens += num_drafts as usize;
        self.num_logits += num_drafts as usize;
        self.max_count = self.max_count.max(count);
        let end = self.to.row_start[row] as u32 + count;
        self.max_context = self.max_context.max(end);
    }

    fn mend_offsets(&mut self) {
        let mut end = 0;
        for (place, count) in self.to.cu_seqlens_q[1..]
            .iter_mut()
            .zip(&self.to.row_count[..self.num_rows])
        {
            end += count;
            *place = end;
        }
    }

    /// Lists ids, and says where.
    fn list(&mut self, ids: &[i32]) -> usize {
        let at = self.num_listed;
        self.to.listed_ids[at..][..ids.len()].copy_from_slice(ids);
        self.num_listed += ids.len();
        at
    }

    /// Tells the runner the blocks of a sequence that it does not know yet: `table` is all that `seat` holds.
    #[inline] // for the loop over those that grew
    fn send_table(
        &mut self,
        sequence: &mut Sequence,
        seat: Seat,
        table: &[BlockId],
        block_size: u32,
        next_release: u32,
    ) {
        for (column, block) in table.iter().enumerate().skip(sequence.num_sent as usize) {
            self.change(seat, column, block.0);
        }
        sequence.num_sent = table.len() as u32;
        sequence.settle_plain(block_size, next_release);
    }

    fn change(&mut self, seat: Seat, column: usize, block: u32) {
        let at = self.num_changes * CHANGE_WORDS;
        // One KV group until more are built.
        self.to.table_changes[at..at + CHANGE_WORDS].copy_from_slice(&[
            seat.0 as i32,
            0,
            column as i32,
            block as i32,
        ]);
        self.num_changes += 1;
    }

    fn moves(&mut self, moves: &[(BlockId, BlockId)]) {
        for (place, &(from, to)) in self.to.moves.chunks_exact_mut(2).zip(moves) {
            place.copy_from_slice(&[from.0 as i32, to.0 as i32]);
        }
        self.num_moves = moves.len();
    }

    fn swaps(&mut self, out: &[(BlockId, u32)], back: &[(u32, BlockId)]) {
        for (place, &(block, host)) in self.to.swap_out.chunks_exact_mut(2).zip(out) {
            place.copy_from_slice(&[block.0 as i32, host as i32]);
        }
        for (place, &(host, block)) in self.to.swap_in.chunks_exact_mut(2).zip(back) {
            place.copy_from_slice(&[host as i32, block.0 as i32]);
        }
        (self.num_swap_out, self.num_swap_in) = (out.len(), back.len());
    }

    fn finish(self, step: StepId, num_lost: usize, num_gained: usize) {
        let header = self.to.header;
        header.fill(0);
        header[header::MAGIC] = header::MAGIC_VALUE;
        header[header::STEP_LOW] = step.0 as i32;
        header[header::STEP_HIGH] = (step.0 >> 32) as i32;
        header[header::NUM_LOST] = num_lost as i32;
        header[header::NUM_GAINED] = num_gained as i32;
        header[header::NUM_GAINED_BLOCKS] = self.num_gained_blocks as i32;
        header[header::NUM_TABLE_CHANGES] = self.num_changes as i32;
        header[header::NUM_MOVES] = self.num_moves as i32;
        header[header::NUM_ROWS] = self.num_rows as i32;
        header[header::NUM_TOKENS] = self.num_tokens as i32;
        header[header::NUM_LISTED_IDS] = self.num_listed as i32;
        header[header::NUM_SAMPLE_ROWS] = self.num_sample_rows as i32;
        header[header::NUM_LOGITS] = self.num_logits as i32;
        header[header::NUM_SEAT_ROWS] = self.num_seat_rows as i32;
        header[header::MAX_CONTEXT] = self.max_context as i32;
        header[header::NUM_HOST_MASKED] = self.num_host_masked as i32;
        header[header::MAX_COUNT] = self.max_count as i32;
        header[header::NUM_SWAP_OUT] = self.num_swap_out as i32;
        header[header::NUM_SWAP_IN] = self.num_swap_in as i32;
    }
}

impl Scheduler {
    pub(super) fn write_step(
        &mut self,
        now_us: u64,
        drafts: &Drafts<'_>,
        buffer: &mut [i32],
    ) -> StepId {
        let id = StepId(self.next_step);
        self.next_step += 1;
        let mut step = self.steps.take_spare();
        step.id = id;
        step.group = self.quarantine.active();
        step.record = self.tally;
        self.tally = StepRecord::default();
        core::mem::swap(&mut step.filled, &mut self.pass.filled);
        core::mem::swap(&mut step.rows, &mut self.pass.rows);

        let mut writer = Writer::new(buffer, &self.layout);
        for (place, seat) in writer.to.lost.iter_mut().zip(&self.lost) {
            *place = seat.0 as i32;
        }
        for i in 0..self.pass.gained.len() {
            self.write_gained(&mut writer, i);
        }
        if !(self.pass.moves.is_empty() && self.pass.moved.is_empty()) {
            self.write_moves(&mut writer, &mut step);
        }
        if !(self.pass.swap_out.is_empty() && self.pass.swap_in.is_empty()) {
            self.write_swaps(&mut writer, &mut step);
        }
        self.write_decodes(&mut writer, &mut step, drafts);
        for i in 0..self.pass.prefill_rows.len() {
            self.write_prefill(&mut writer, &mut step, self.pass.prefill_rows[i]);
        }
        for i in 0..self.pass.prefill_rows.len() {
            self.write_padding(&mut writer, &mut step, self.pass.prefill_rows[i]);
        }
        for i in 0..self.pass.prefills.len() {
            // Those that got no row may still be marked.
            let slot = self.pass.prefills[i];
            self.arena[slot].row = PlannedRow::default();
        }

        let record = &mut step.record;
        record.step = id.0 as i64;
        record.planned_us = now_us as i64;
        record.num_in_flight = self.steps.len() as i64;
        record.num_rows = writer.num_rows as i64;
        record.num_seat_rows = writer.num_seat_rows as i64;
        record.num_sample_rows = writer.num_sample_rows as i64;
        record.num_tokens = writer.num_tokens as i64;
        record.num_waiting = self.num_waiting().into();
        record.num_running = self.num_running.into();
        record.num_free_blocks = self.kv.pool.num_free().into();
        record.num_cached_blocks = self.kv.pool.num_cached().into();
        record.num_held_blocks = self.num_held_blocks().into();
        if self.config.step_target_us > 0 {
            step.size = size_of(&step.rows);
        }
        writer.finish(id, self.lost.len(), self.pass.gained.len());
        self.lost.clear();
        self.steps.push(step);
        self.pass.end();
        id
    }

    #[cold]
    fn write_moves(&mut self, writer: &mut Writer<'_>, step: &mut StepInFlight) {
        for &(seat, column, block) in &self.pass.changes {
            writer.change(seat, column as usize, block.0);
        }
        writer.moves(&self.pass.moves);
        step.record.num_moves = writer.num_moves as i64;
        core::mem::swap(&mut step.moves, &mut self.pass.moves);
        core::mem::swap(&mut step.moved, &mut self.pass.moved);
        self.pass.changes.clear();
        self.pass.num_move_changes = 0;
    }

    #[cold]
    fn write_swaps(&mut self, writer: &mut Writer<'_>, step: &mut StepInFlight) {
        writer.swaps(&self.pass.swap_out, &self.pass.swap_in);
        step.record.num_swapped_out = writer.num_swap_out as i64;
        step.record.num_swapped_in = writer.num_swap_in as i64;
        for handle in &self.pass.swapped_out {
            self.arena[handle.slot()].swapped.step = Some(step.id);
        }
        core::mem::swap(&mut step.swapped_out, &mut self.pass.swapped_out);
        core::mem::swap(&mut step.swapped_in, &mut self.pass.swapped_in);
        self.pass.swap_out.clear();
        self.pass.swap_in.clear();
    }

    fn write_gained(&mut self, writer: &mut Writer<'_>, i: usize) {
        let slot = self.pass.gained[i];
        let handle = self.arena.handle(slot).to_bits();
        let sequence = &mut self.arena[slot];
        let seat = sequence.seat().expect("a gained seat is held");
        let table = self.kv.table(seat);
        sequence.num_sent = table.len() as u32;
        writer.to.gained[i * GAINED_WORDS..][..GAINED_WORDS].copy_from_slice(&[
            seat.0 as i32,
            handle as i32,
            (handle >> 32) as i32,
            sequence.num_prompt as i32,
            sequence.num_tokens() as i32,
            sequence.num_computed as i32,
            table.len() as i32,
            writer.num_gained_blocks as i32,
        ]);
        let places = &mut writer.to.gained_blocks[writer.num_gained_blocks..][..table.len()];
        for (place, block) in places.iter_mut().zip(table) {
            *place = block.0 as i32;
        }
        writer.num_gained_blocks += table.len();
    }

    /// Writes what plain rows have in common, and amends the few that are more than that.
    fn write_decodes(
        &mut self,
        writer: &mut Writer<'_>,
        step: &mut StepInFlight,
        drafts: &Drafts<'_>,
    ) {
        let num_rows = step.rows.len();
        writer.plain_rows(num_rows);
        if self.pass.has_withdrawn || !drafts.handles.is_empty() {
            // Rows have moved up, or any may be longer.
            for row in 0..num_rows {
                self.amend_row(writer, step, drafts, row);
            }
        } else {
            writer.max_context = self.pass.max_context;
            for &slot in &self.pass.grown {
                let sequence = &mut self.arena[slot];
                let seat = sequence.seat().expect("a row has a seat");
                let table = self.kv.table(seat);
                let next_release = self.config.next_release(self.kv.num_behind(seat));
                writer.send_table(sequence, seat, table, self.config.block_size, next_release);
            }
            for i in 0..self.pass.special_rows.len() {
                self.amend_row(writer, step, drafts, self.pass.special_rows[i]);
            }
        }
        if writer.max_count > 1 {
            writer.mend_offsets();
        }
    }

    /// Makes the plain row of a decode what it is: a ghost's, masked on the host, with drafts, or in a new block.
    fn amend_row(
        &mut self,
        writer: &mut Writer<'_>,
        step: &mut StepInFlight,
        drafts: &Drafts<'_>,
        row: usize,
    ) {
        let in_flight = &mut step.rows[row];
        let slot = in_flight.handle.slot();
        let sequence = &mut self.arena[slot];
        let seat = sequence.seat().expect("a row has a seat");
        let planned = core::mem::take(&mut sequence.row);
        let (mut row_flags, kind) = flags_and_kind(sequence, &mut step.record);
        let start = in_flight.end - 1;
        in_flight.kind = kind;
        if sequence.num_draft_rows_in_flight > 0 {
            row_flags |= flags::DEVICE_START;
        }
        if planned.num_drafts > 0 {
            row_flags |= flags::DRAFTS;
            if let (Some(first), Some(list)) = (planned.draft_ids, drafts.ids) {
                row_flags |= flags::DRAFT_IDS;
                let ids = &list[first as usize..][..planned.num_drafts as usize];
                writer.to.row_ids[row] = writer.list(ids) as i32;
            }
            sequence.num_planned += planned.num_drafts;
            sequence.num_pending += planned.num_drafts;
            sequence.num_draft_rows_in_flight += 1;
            sequence.quiet_until = 0;
            in_flight.count += planned.num_drafts;
            in_flight.end += planned.num_drafts;
            in_flight.max_ids += planned.num_drafts as u16;
            step.record.num_draft_tokens += i64::from(planned.num_drafts);
        }
        writer.amend(row, seat, start, row_flags);
        if planned.num_drafts > 0 {
            writer.lengthen(row, planned.num_drafts);
        }
        let table = self.kv.table(seat);
        let next_release = self.config.next_release(self.kv.num_behind(seat));
        writer.send_table(sequence, seat, table, self.config.block_size, next_release);
    }

    fn write_prefill(&mut self, writer: &mut Writer<'_>, step: &mut StepInFlight, slot: Slot) {
        let handle = self.arena.handle(slot);
        let sequence = &mut self.arena[slot];
        let PlannedRow { start, count, .. } = sequence.row;
        if count == 0 {
            return; // padding alone
        }
        let seat = sequence.seat().expect("a row has a seat");
        let (row_flags, kind) = flags_and_kind(sequence, &mut step.record);
        let ids = writer.list(&sequence.tokens()[start as usize..][..count as usize]);
        writer.row(seat, start, count, row_flags | flags::LISTED, ids);
        let max_ids = u16::from(sequence.has_sampled);
        sequence.num_pending += u32::from(max_ids);
        sequence.num_rows_in_flight += 1;
        step.record.num_prefill_tokens += i64::from(count);
        step.rows.push(RowInFlight {
            handle,
            residency: sequence.residency,
            end: start + count,
            count,
            max_ids,
            kind,
        });
        let table = self.kv.table(seat);
        let next_release = self.config.next_release(self.kv.num_behind(seat));
        writer.send_table(sequence, seat, table, self.config.block_size, next_release);
    }

    fn write_padding(&mut self, writer: &mut Writer<'_>, step: &mut StepInFlight, slot: Slot) {
        let handle = self.arena.handle(slot);
        let sequence = &mut self.arena[slot];
        let num_padding = core::mem::take(&mut sequence.row).num_padding;
        if num_padding == 0 {
            return;
        }
        let seat = sequence.seat().expect("a row has a seat");
        writer.row(seat, 0, num_padding, flags::PADDING, 0);
        step.record.num_padding_tokens += i64::from(num_padding);
        step.rows.push(RowInFlight {
            handle,
            residency: 0,
            end: 0,
            count: num_padding,
            max_ids: 0,
            kind: RowKind::Padding,
        });
    }
}

/// What a step's rows ask of the device, by which its time is learned.
#[cold]
pub(super) fn size_of(rows: &[RowInFlight]) -> Size {
    rows.iter().fold(Size::default(), |sum, row| {
        let size = Size::of(row.count, row.end);
        Size {
            num_tokens: sum.num_tokens + size.num_tokens,
            num_attended: sum.num_attended + size.num_attended,
        }
    })
}

/// What every row says of its sequence: whether it samples, on whose behalf, and by whose mask.
fn flags_and_kind(sequence: &Sequence, record: &mut StepRecord) -> (i32, RowKind) {
    let mut row_flags = 0;
    if sequence.has_sampled {
        row_flags |= flags::SAMPLES;
    }
    if sequence.is_ghost() {
        record.num_ghost_rows += 1;
        return (row_flags | flags::GHOST, RowKind::Ghost); // and needs no mask
    }
    if sequence.has_sampled && sequence.host_masked {
        row_flags |= flags::HOST_MASKED;
    }
    (row_flags, RowKind::Live)
}
