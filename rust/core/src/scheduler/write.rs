//! The end of a plan: its rows are written to the step buffer, and remembered for their commit.

use super::{Drafts, Scheduler};
use crate::ids::{Seat, Slot, StepId};
use crate::layout::{CHANGE_WORDS, GAINED_WORDS, StepLayout, flags, header};
use crate::record::StepRecord;
use crate::sequence::{PlannedRow, Sequence};
use crate::step::{RowInFlight, RowKind, StepInFlight};

/// Fills a buffer's sections, and counts what they hold.
struct Writer<'a> {
    buffer: &'a mut [i32],
    layout: &'a StepLayout,
    num_gained_blocks: usize,
    num_changes: usize,
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
    fn new(buffer: &'a mut [i32], layout: &'a StepLayout) -> Self {
        buffer[layout.offset_cu_seqlens_q] = 0;
        Self {
            buffer,
            layout,
            num_gained_blocks: 0,
            num_changes: 0,
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
        let (row, layout) = (self.num_rows, self.layout);
        self.buffer[layout.offset_row_seat + row] = seat.0 as i32;
        self.buffer[layout.offset_row_start + row] = start as i32;
        self.buffer[layout.offset_row_count + row] = count as i32;
        self.buffer[layout.offset_row_flags + row] = row_flags;
        self.buffer[layout.offset_row_ids + row] = ids as i32;
        self.num_rows += 1;
        self.num_tokens += count as usize;
        self.buffer[layout.offset_cu_seqlens_q + row + 1] = self.num_tokens as i32;
        self.max_count = self.max_count.max(count);
        if row_flags & flags::PADDING == 0 {
            self.max_context = self.max_context.max(start + count);
        }
        if row_flags & flags::SAMPLES != 0 {
            self.num_sample_rows += 1;
            self.num_logits += if row_flags & flags::DRAFTS != 0 {
                count as usize
            } else {
                1
            };
        }
        if row_flags & flags::HOST_MASKED != 0 {
            self.num_host_masked += 1;
        }
    }

    /// Lists ids, and says where.
    fn list(&mut self, ids: &[i32]) -> usize {
        let at = self.num_listed;
        self.buffer[self.layout.offset_listed_ids + at..][..ids.len()].copy_from_slice(ids);
        self.num_listed += ids.len();
        at
    }

    fn change(&mut self, seat: Seat, column: usize, block: u32) {
        assert!(
            self.num_changes < self.layout.capacity_table_changes,
            "table changes fit"
        );
        let at = self.layout.offset_table_changes + self.num_changes * CHANGE_WORDS;
        // One KV group until more are built.
        self.buffer[at..at + CHANGE_WORDS].copy_from_slice(&[
            seat.0 as i32,
            0,
            column as i32,
            block as i32,
        ]);
        self.num_changes += 1;
    }

    fn finish(self, step: StepId, num_lost: usize, num_gained: usize) {
        let header = &mut self.buffer[..header::LEN];
        header.fill(0);
        header[header::MAGIC] = header::MAGIC_VALUE;
        header[header::STEP_LOW] = step.0 as i32;
        header[header::STEP_HIGH] = (step.0 >> 32) as i32;
        header[header::NUM_LOST] = num_lost as i32;
        header[header::NUM_GAINED] = num_gained as i32;
        header[header::NUM_GAINED_BLOCKS] = self.num_gained_blocks as i32;
        header[header::NUM_TABLE_CHANGES] = self.num_changes as i32;
        header[header::NUM_ROWS] = self.num_rows as i32;
        header[header::NUM_TOKENS] = self.num_tokens as i32;
        header[header::NUM_LISTED_IDS] = self.num_listed as i32;
        header[header::NUM_SAMPLE_ROWS] = self.num_sample_rows as i32;
        header[header::NUM_LOGITS] = self.num_logits as i32;
        header[header::NUM_SEAT_ROWS] = self.num_seat_rows as i32;
        header[header::MAX_CONTEXT] = self.max_context as i32;
        header[header::NUM_HOST_MASKED] = self.num_host_masked as i32;
        header[header::MAX_COUNT] = self.max_count as i32;
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
        step.record = core::mem::take(&mut self.tally);
        core::mem::swap(&mut step.filled, &mut self.pass.filled);

        let layout = self.layout; // a copy, beside which the scheduler can change
        let mut writer = Writer::new(buffer, &layout);
        for (i, seat) in self.lost.iter().enumerate() {
            writer.buffer[layout.offset_lost + i] = seat.0 as i32;
        }
        for i in 0..self.pass.gained.len() {
            self.write_gained(&mut writer, i);
        }
        for i in 0..self.pass.decodes.len() {
            self.write_decode(&mut writer, &mut step, drafts, self.pass.decodes[i]);
        }
        writer.num_seat_rows = writer.num_rows;
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
        writer.finish(id, self.lost.len(), self.pass.gained.len());
        self.lost.clear();
        self.steps.push(step);
        id
    }

    fn write_gained(&mut self, writer: &mut Writer<'_>, i: usize) {
        let slot = self.pass.gained[i];
        let handle = self.arena.handle(slot).to_bits();
        let sequence = &mut self.arena[slot];
        let seat = sequence.seat().expect("a gained seat is held");
        let table = self.kv.table(seat);
        sequence.num_sent = table.len() as u32;
        let at = writer.layout.offset_gained + i * GAINED_WORDS;
        writer.buffer[at..at + GAINED_WORDS].copy_from_slice(&[
            seat.0 as i32,
            handle as i32,
            (handle >> 32) as i32,
            sequence.num_prompt as i32,
            sequence.num_tokens() as i32,
            sequence.num_computed as i32,
            table.len() as i32,
            writer.num_gained_blocks as i32,
        ]);
        let start = writer.layout.offset_gained_blocks + writer.num_gained_blocks;
        for (place, block) in writer.buffer[start..start + table.len()]
            .iter_mut()
            .zip(table)
        {
            *place = block.0 as i32;
        }
        writer.num_gained_blocks += table.len();
        assert!(
            writer.num_gained_blocks <= writer.layout.capacity_gained_blocks,
            "gained tables fit"
        );
    }

    fn write_decode(
        &mut self,
        writer: &mut Writer<'_>,
        step: &mut StepInFlight,
        drafts: &Drafts<'_>,
        slot: Slot,
    ) {
        let sequence = &self.arena[slot];
        let row = sequence.row;
        if row.count == 0 {
            return; // withdrawn: it made room for another
        }
        let seat = sequence.seat().expect("a row has a seat");
        let (mut row_flags, kind) = flags_and_kind(sequence, &mut step.record);
        if sequence.num_draft_rows_in_flight > 0 {
            row_flags |= flags::DEVICE_START;
        }
        let mut ids = 0;
        if row.num_drafts > 0 {
            row_flags |= flags::DRAFTS;
            step.record.num_draft_tokens += i64::from(row.num_drafts);
            if let (Some(first), Some(list)) = (row.draft_ids, drafts.ids) {
                row_flags |= flags::DRAFT_IDS;
                ids = writer.list(&list[first as usize..][..row.num_drafts as usize]);
            }
        }
        writer.row(seat, row.start, row.count, row_flags, ids);
        self.arena[slot].num_planned = row.start + row.count;
        self.depart(writer, step, slot, seat, kind, 1 + row.num_drafts);
    }

    fn write_prefill(&mut self, writer: &mut Writer<'_>, step: &mut StepInFlight, slot: Slot) {
        let sequence = &self.arena[slot];
        let row = sequence.row;
        if row.count == 0 {
            return; // padding alone
        }
        let seat = sequence.seat().expect("a row has a seat");
        let (row_flags, kind) = flags_and_kind(sequence, &mut step.record);
        let row_flags = row_flags | flags::LISTED;
        let ids = writer.list(&sequence.tokens[row.start as usize..][..row.count as usize]);
        writer.row(seat, row.start, row.count, row_flags, ids);
        step.record.num_prefill_tokens += i64::from(row.count);
        let max_ids = u32::from(sequence.has_sampled);
        let num_padding = row.num_padding;
        self.depart(writer, step, slot, seat, kind, max_ids);
        self.arena[slot].row.num_padding = num_padding;
    }

    fn write_padding(&mut self, writer: &mut Writer<'_>, step: &mut StepInFlight, slot: Slot) {
        let handle = self.arena.handle(slot);
        let sequence = &mut self.arena[slot];
        let num_padding = sequence.row.num_padding;
        let seat = sequence.seat().expect("a row has a seat");
        sequence.row = PlannedRow::default();
        if num_padding == 0 {
            return;
        }
        writer.row(seat, 0, num_padding, flags::PADDING, 0);
        step.record.num_padding_tokens += i64::from(num_padding);
        step.rows.push(RowInFlight {
            handle,
            residency: 0,
            count: num_padding,
            end: 0,
            max_ids: 0,
            kind: RowKind::Padding,
        });
    }

    /// What every row of a sequence leaves behind when it is written.
    fn depart(
        &mut self,
        writer: &mut Writer<'_>,
        step: &mut StepInFlight,
        slot: Slot,
        seat: Seat,
        kind: RowKind,
        max_ids: u32,
    ) {
        let handle = self.arena.handle(slot);
        let sequence = &mut self.arena[slot];
        let row = core::mem::take(&mut sequence.row);
        let table = self.kv.table(seat);
        for (column, block) in table.iter().enumerate().skip(sequence.num_sent as usize) {
            writer.change(seat, column, block.0);
        }
        sequence.num_sent = table.len() as u32;
        sequence.num_pending += max_ids;
        sequence.num_rows_in_flight += 1;
        sequence.num_draft_rows_in_flight += u32::from(row.num_drafts > 0);
        step.rows.push(RowInFlight {
            handle,
            residency: sequence.residency,
            count: row.count,
            end: row.start + row.count,
            max_ids,
            kind,
        });
    }
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
