//! Where everything lies in a step buffer: a header, then sections of fixed capacity at fixed offsets.

use crate::config::Config;
use crate::policy::Admission;

/// Words of the header.
pub mod header {
    /// Words in all.
    pub const LEN: usize = 32;
    /// Tells a step buffer from other memory.
    pub const MAGIC: usize = 0;
    /// Low half of the step's id.
    pub const STEP_LOW: usize = 1;
    /// High half of the step's id.
    pub const STEP_HIGH: usize = 2;
    /// Seats lost.
    pub const NUM_LOST: usize = 3;
    /// Seats gained.
    pub const NUM_GAINED: usize = 4;
    /// Blocks in the tables of gained seats.
    pub const NUM_GAINED_BLOCKS: usize = 5;
    /// Table changes.
    pub const NUM_TABLE_CHANGES: usize = 6;
    /// Block moves.
    pub const NUM_MOVES: usize = 7;
    /// Rows.
    pub const NUM_ROWS: usize = 8;
    /// Tokens in all rows.
    pub const NUM_TOKENS: usize = 9;
    /// Ids listed.
    pub const NUM_LISTED_IDS: usize = 10;
    /// Rows that sample.
    pub const NUM_SAMPLE_ROWS: usize = 11;
    /// Tokens whose logits are wanted.
    pub const NUM_LOGITS: usize = 12;
    /// Rows whose source is the seat; they come first.
    pub const NUM_SEAT_ROWS: usize = 13;
    /// The longest start + count.
    pub const MAX_CONTEXT: usize = 14;
    /// Rows edited on the host.
    pub const NUM_HOST_MASKED: usize = 15;
    /// The longest count.
    pub const MAX_COUNT: usize = 16;
    /// Blocks copied to the host.
    pub const NUM_SWAP_OUT: usize = 17;
    /// Blocks copied back.
    pub const NUM_SWAP_IN: usize = 18;
    /// What `MAGIC` holds: "NRA1".
    pub const MAGIC_VALUE: i32 = i32::from_le_bytes(*b"NRA1");
}

/// Flags of a row.
pub mod flags {
    /// The last token is sampled (with drafts, the last K + 1).
    pub const SAMPLES: i32 = 1;
    /// Its logits are edited on the host.
    pub const HOST_MASKED: i32 = 2;
    /// Its ids are listed; else the first is the seat's last sampled token.
    pub const LISTED: i32 = 4;
    /// Padding: empty context, stored nowhere.
    pub const PADDING: i32 = 8;
    /// A finished row that is still computed; its token is dropped.
    pub const GHOST: i32 = 16;
    /// A draft of this seat is in flight: the runner's own count is the start.
    pub const DEVICE_START: i32 = 32;
    /// `count - 1` drafts follow the first token.
    pub const DRAFTS: i32 = 64;
    /// Those drafts are listed; else the device makes them.
    pub const DRAFT_IDS: i32 = 128;
}

/// Words of an entry of `gained`.
pub(crate) const GAINED_WORDS: usize = 8;
/// Words of an entry of `table_changes`: seat, KV group, column, block.
pub(crate) const CHANGE_WORDS: usize = 4;

/// Offsets are in words of an `i32` buffer, capacities in entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "each field is the section or limit that its name says"
)]
pub struct StepLayout {
    pub size: usize,
    pub max_num_seqs: usize,
    pub max_rows: usize,
    pub max_num_batched_tokens: usize,
    pub max_blocks_per_seq: usize,
    pub block_size: usize,
    pub num_blocks: usize,
    pub max_drafts: usize,
    /// Tokens that a token sees; 0 for all.
    pub window: usize,
    pub max_logits: usize,
    /// Events that one `plan` or `commit` reports at most, beside those of `finish` and `fail` before it.
    pub max_events: usize,
    pub offset_lost: usize,
    pub offset_gained: usize,
    pub offset_gained_blocks: usize,
    pub offset_table_changes: usize,
    pub offset_moves: usize,
    pub offset_swap_out: usize,
    pub offset_swap_in: usize,
    pub offset_row_seat: usize,
    pub offset_row_start: usize,
    pub offset_row_count: usize,
    pub offset_row_flags: usize,
    pub offset_row_ids: usize,
    pub offset_cu_seqlens_q: usize,
    pub offset_listed_ids: usize,
    pub capacity_gained_blocks: usize,
    pub capacity_table_changes: usize,
    pub capacity_moves: usize,
    /// Of each of both.
    pub capacity_swaps: usize,
}

impl StepLayout {
    pub(crate) fn new(config: &Config) -> Self {
        let seats = config.max_num_seqs as usize;
        let tokens = config.max_num_batched_tokens as usize;
        let columns = config.max_blocks_per_seq() as usize;
        let block_size = config.block_size as usize;
        let num_drafts = config.max_drafts as usize;
        let is_padded = config.admission == Admission::StaticPadded;
        let max_rows = if is_padded { 2 * seats } else { seats };
        // One whole table always fits, so a newcomer waits a step at most for room. A gang enters in one step.
        let gained_blocks = if config.admission.is_static() {
            columns.max(config.num_blocks as usize)
        } else {
            columns + 64 * seats
        }
        .min(seats * columns);
        // A decode crosses into at most this many new blocks; a prefill may add a whole table of hits.
        let per_row = 1 + (num_drafts + 1).div_ceil(block_size);
        let table_changes = seats * per_row + columns + tokens.div_ceil(block_size);
        let num_moves = match config.max_moves as usize {
            _ if config.admission.is_static() => 0,
            0 => 0,
            // A run slides whole.
            most if config.contiguous => most.max(columns),
            most => most,
        };
        let table_changes = table_changes + move_changes(num_moves, seats);
        // Whatever a table holds that can be gained.
        let num_swaps = gained_blocks.min(config.num_swap_blocks as usize);

        let mut end = header::LEN;
        let mut section = |words: usize| {
            let start = end;
            end += words;
            start
        };
        Self {
            offset_lost: section(seats),
            offset_gained: section(seats * GAINED_WORDS),
            offset_gained_blocks: section(gained_blocks),
            offset_table_changes: section(table_changes * CHANGE_WORDS),
            offset_moves: section(num_moves * 2),
            offset_swap_out: section(num_swaps * 2),
            offset_swap_in: section(num_swaps * 2),
            offset_row_seat: section(max_rows),
            offset_row_start: section(max_rows),
            offset_row_count: section(max_rows),
            offset_row_flags: section(max_rows),
            offset_row_ids: section(max_rows),
            offset_cu_seqlens_q: section(max_rows + 1),
            offset_listed_ids: section(tokens),
            capacity_gained_blocks: gained_blocks,
            capacity_table_changes: table_changes,
            capacity_moves: num_moves,
            capacity_swaps: num_swaps,
            size: end,
            max_num_seqs: seats,
            max_rows,
            max_num_batched_tokens: tokens,
            max_blocks_per_seq: columns,
            block_size,
            num_blocks: config.num_blocks as usize,
            max_drafts: num_drafts,
            window: config.window as usize,
            max_logits: seats * (num_drafts + 1),
            max_events: seats * (num_drafts + 4) + 64,
        }
    }
}

/// Table changes that moves may make: one each, and more for those that many sequences hold.
fn move_changes(num_moves: usize, num_seats: usize) -> usize {
    if num_moves == 0 {
        0
    } else {
        num_moves + num_seats
    }
}

impl StepLayout {
    /// Table changes that the moves of a step may make.
    pub(crate) fn max_move_changes(&self) -> usize {
        move_changes(self.capacity_moves, self.max_num_seqs)
    }
}

/// A step buffer, cut at its sections; each has its whole capacity.
#[derive(Debug)]
pub(crate) struct Sections<'a> {
    pub(crate) header: &'a mut [i32; header::LEN],
    pub(crate) lost: &'a mut [i32],
    pub(crate) gained: &'a mut [i32],
    pub(crate) gained_blocks: &'a mut [i32],
    pub(crate) table_changes: &'a mut [i32],
    pub(crate) moves: &'a mut [i32],
    pub(crate) swap_out: &'a mut [i32],
    pub(crate) swap_in: &'a mut [i32],
    pub(crate) row_seat: &'a mut [i32],
    pub(crate) row_start: &'a mut [i32],
    pub(crate) row_count: &'a mut [i32],
    pub(crate) row_flags: &'a mut [i32],
    pub(crate) row_ids: &'a mut [i32],
    pub(crate) cu_seqlens_q: &'a mut [i32],
    pub(crate) listed_ids: &'a mut [i32],
}

impl StepLayout {
    pub(crate) fn cut<'a>(&self, buffer: &'a mut [i32]) -> Sections<'a> {
        let (mut rest, mut start) = (buffer, 0);
        let mut cut_at = |end: usize| {
            let (section, behind) = core::mem::take(&mut rest).split_at_mut(end - start);
            (rest, start) = (behind, end);
            section
        };
        Sections {
            header: cut_at(self.offset_lost)
                .try_into()
                .expect("the header comes first"),
            lost: cut_at(self.offset_gained),
            gained: cut_at(self.offset_gained_blocks),
            gained_blocks: cut_at(self.offset_table_changes),
            table_changes: cut_at(self.offset_moves),
            moves: cut_at(self.offset_swap_out),
            swap_out: cut_at(self.offset_swap_in),
            swap_in: cut_at(self.offset_row_seat),
            row_seat: cut_at(self.offset_row_start),
            row_start: cut_at(self.offset_row_count),
            row_count: cut_at(self.offset_row_flags),
            row_flags: cut_at(self.offset_row_ids),
            row_ids: cut_at(self.offset_cu_seqlens_q),
            cu_seqlens_q: cut_at(self.offset_listed_ids),
            listed_ids: cut_at(self.size),
        }
    }
}

impl StepLayout {
    /// The sections of `buffer` in which one plain row differs from another: seats and starts.
    pub(crate) fn plain_columns<'a>(
        &self,
        buffer: &'a mut [i32],
    ) -> (&'a mut [i32], &'a mut [i32]) {
        let columns = &mut buffer[self.offset_row_seat..self.offset_row_count];
        columns.split_at_mut(self.offset_row_start - self.offset_row_seat)
    }
}

/// A digest of all that a planned step wrote to `buffer`; what earlier steps left in it does not count.
pub fn digest(layout: &StepLayout, buffer: &[i32]) -> u64 {
    let count = |word: usize| buffer[word] as usize;
    let num_rows = count(header::NUM_ROWS);
    let sections = [
        (0, header::LEN),
        (layout.offset_lost, count(header::NUM_LOST)),
        (
            layout.offset_gained,
            count(header::NUM_GAINED) * GAINED_WORDS,
        ),
        (
            layout.offset_gained_blocks,
            count(header::NUM_GAINED_BLOCKS),
        ),
        (
            layout.offset_table_changes,
            count(header::NUM_TABLE_CHANGES) * CHANGE_WORDS,
        ),
        (layout.offset_moves, count(header::NUM_MOVES) * 2),
        (layout.offset_swap_out, count(header::NUM_SWAP_OUT) * 2),
        (layout.offset_swap_in, count(header::NUM_SWAP_IN) * 2),
        (layout.offset_row_seat, num_rows),
        (layout.offset_row_start, num_rows),
        (layout.offset_row_count, num_rows),
        (layout.offset_row_flags, num_rows),
        (layout.offset_row_ids, num_rows),
        (layout.offset_cu_seqlens_q, num_rows + 1),
        (layout.offset_listed_ids, count(header::NUM_LISTED_IDS)),
    ];
    let mut hasher = xxhash_rust::xxh3::Xxh3::new();
    for (offset, len) in sections {
        for word in &buffer[offset..offset + len] {
            hasher.update(&word.to_le_bytes());
        }
    }
    hasher.digest()
}
