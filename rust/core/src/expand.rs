//! From a step buffer to the arrays that a model reads: a pure function of the buffer and the runner's seat state.
//!
//! O(rows + tokens + table entries gained and cleared); allocates nothing.

use crate::config::num_blocks_behind;
use crate::layout::{CHANGE_WORDS, GAINED_WORDS, StepLayout, flags, header};

/// What a runner remembers by seat.
#[derive(Debug)]
pub struct SeatState<'a> {
    /// `[max_num_seqs, max_blocks_per_seq]`; unused entries, and those behind the window, are block 0.
    pub block_tables: &'a mut [i32],
    /// The last token sampled; the runner writes it.
    pub last_token: &'a [i64],
    /// Tokens whose KV is stored once the expanded step has run. The runner corrects it where drafts are rejected.
    pub num_computed_tokens: &'a mut [i64],
    /// Prompt tokens of the seat's request.
    pub num_prompt_tokens: &'a mut [i64],
}

/// What a model reads; lengths are the layout's limits.
#[derive(Debug)]
pub struct StepArrays<'a> {
    /// `[num_tokens]`.
    pub input_ids: &'a mut [i64],
    /// `[num_tokens]`.
    pub positions: &'a mut [i64],
    /// `[num_tokens]`; `block * block_size + offset`, or -1 where nothing is stored.
    pub slot_mapping: &'a mut [i64],
    /// `[num_rows + 1]`.
    pub cu_seqlens_q: &'a mut [i32],
    /// `[num_rows]`; start + count, 0 for padding.
    pub context_lens: &'a mut [i32],
    /// `[num_rows]`.
    pub row_seats: &'a mut [i64],
    /// `[num_logits]`; tokens whose logits are wanted.
    pub logits_indices: &'a mut [i64],
    /// `[num_sample_rows]`; rows that sample.
    pub sample_rows: &'a mut [i64],
}

/// Applies lost and gained seats and table changes.
pub fn apply(layout: &StepLayout, buffer: &[i32], seats: &mut SeatState<'_>) {
    let columns = layout.max_blocks_per_seq;
    let count = |word: usize| buffer[word] as usize;

    for entry in buffer[layout.offset_gained..]
        .chunks_exact(GAINED_WORDS)
        .take(count(header::NUM_GAINED))
    {
        let seat = entry[0] as usize;
        let num_blocks = entry[6] as usize;
        let blocks = &buffer[layout.offset_gained_blocks + entry[7] as usize..][..num_blocks];
        let table = &mut seats.block_tables[seat * columns..][..columns];
        table[..num_blocks].copy_from_slice(blocks);
        // What an earlier holder of the seat left behind is cleared, so that a stray read meets zeros. Where there is a
        // window its first entries may be cleared already.
        let left_behind = table[num_blocks..].iter_mut();
        left_behind
            .take_while(|block| layout.window > 0 || **block != 0)
            .for_each(|block| *block = 0);
        seats.num_prompt_tokens[seat] = entry[3].into();
        seats.num_computed_tokens[seat] = entry[5].into();
    }
    for entry in buffer[layout.offset_table_changes..]
        .chunks_exact(CHANGE_WORDS)
        .take(count(header::NUM_TABLE_CHANGES))
    {
        seats.block_tables[entry[0] as usize * columns + entry[2] as usize] = entry[3];
    }
}

/// Expands the rows; `apply` comes first.
pub fn expand(
    layout: &StepLayout,
    buffer: &[i32],
    seats: &mut SeatState<'_>,
    out: &mut StepArrays<'_>,
) {
    let num_rows = buffer[header::NUM_ROWS] as usize;
    let column = |offset: usize| &buffer[offset..offset + num_rows];
    let row_seat = column(layout.offset_row_seat);
    let row_start = column(layout.offset_row_start);
    let row_count = column(layout.offset_row_count);
    let row_flags = column(layout.offset_row_flags);
    let row_ids = column(layout.offset_row_ids);
    let listed = &buffer[layout.offset_listed_ids..];
    let block_size = layout.block_size;

    out.cu_seqlens_q[..=num_rows]
        .copy_from_slice(&buffer[layout.offset_cu_seqlens_q..][..=num_rows]);
    let (mut token, mut num_logits, mut num_sampling) = (0, 0, 0);
    for row in 0..num_rows {
        let seat = row_seat[row] as usize;
        let count = row_count[row] as usize;
        let row_flags = row_flags[row];
        let end = token + count;
        out.row_seats[row] = seat as i64;
        if row_flags & flags::PADDING != 0 {
            out.input_ids[token..end].fill(0);
            out.positions[token..end].fill(0);
            out.slot_mapping[token..end].fill(-1);
            out.context_lens[row] = 0;
            token = end;
            continue;
        }

        let start = if row_flags & flags::DEVICE_START == 0 {
            row_start[row] as usize
        } else {
            seats.num_computed_tokens[seat] as usize
        };
        if row_flags & flags::LISTED != 0 {
            let ids = &listed[row_ids[row] as usize..][..count];
            for (place, &id) in out.input_ids[token..end].iter_mut().zip(ids) {
                *place = id.into();
            }
        } else {
            out.input_ids[token] = seats.last_token[seat];
            for (i, place) in out.input_ids[token + 1..end].iter_mut().enumerate() {
                // Drafts made on the device are written over this 0 by the runner that makes them.
                let is_listed = row_flags & flags::DRAFT_IDS != 0;
                *place = if is_listed {
                    listed[row_ids[row] as usize + i].into()
                } else {
                    0
                };
            }
        }

        let table = &mut seats.block_tables[seat * layout.max_blocks_per_seq..]
            [..layout.max_blocks_per_seq];
        // Blocks behind the window are another's by now, or will be; no later row sees them either.
        clear_behind(
            layout,
            table,
            seats.num_computed_tokens[seat] as u32,
            start as u32,
        );
        let (mut block, mut offset) = (start / block_size, start % block_size);
        for (i, at) in (token..end).enumerate() {
            out.positions[at] = (start + i) as i64;
            out.slot_mapping[at] = i64::from(table[block]) * block_size as i64 + offset as i64;
            offset += 1;
            if offset == block_size {
                (block, offset) = (block + 1, 0);
            }
        }
        out.context_lens[row] = (start + count) as i32;
        seats.num_computed_tokens[seat] = (start + count) as i64;

        if row_flags & flags::SAMPLES != 0 {
            out.sample_rows[num_sampling] = row as i64;
            num_sampling += 1;
            let num_wanted = if row_flags & flags::DRAFTS != 0 {
                count
            } else {
                1
            };
            for at in end - num_wanted..end {
                out.logits_indices[num_logits] = at as i64;
                num_logits += 1;
            }
        }
        token = end;
    }
}

/// Clears the entries of a table that a row from position `start` on does not see; the row before it ended at `before`.
fn clear_behind(layout: &StepLayout, table: &mut [i32], before: u32, start: u32) {
    let num_behind = |position: u32| {
        num_blocks_behind(layout.window as u32, layout.block_size as u32, position) as usize
    };
    let (known, end) = (num_behind(before.min(start)), num_behind(start));
    table[known..end].fill(0);
    let left = table[..known].iter_mut().rev();
    left.take_while(|block| **block != 0)
        .for_each(|block| *block = 0);
}
