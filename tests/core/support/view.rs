//! A step buffer, read by its documentation, with all that can be checked of it alone.

use noria_core::{Config, StepLayout, flags, header};

/// One row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowView {
    pub(crate) handle: u64,
    pub(crate) seat: usize,
    pub(crate) start: u32,
    pub(crate) count: u32,
    pub(crate) flags: i32,
}

impl RowView {
    pub(crate) fn has(&self, flag: i32) -> bool {
        self.flags & flag != 0
    }

    /// Ids that it may sample.
    pub(crate) fn max_ids(&self) -> u32 {
        match (self.has(flags::SAMPLES), self.has(flags::DRAFTS)) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => self.count,
        }
    }
}

/// One gained seat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GainedView {
    pub(crate) seat: usize,
    pub(crate) handle: u64,
    pub(crate) num_prompt_tokens: u32,
    pub(crate) num_tokens: u32,
    pub(crate) num_computed_tokens: u32,
    pub(crate) blocks: Vec<u32>,
}

/// A step.
#[derive(Clone, Debug)]
pub(crate) struct StepView {
    pub(crate) id: u64,
    pub(crate) gained: Vec<GainedView>,
    /// Seat, column, block.
    pub(crate) changes: Vec<(usize, usize, u32)>,
    /// From block, to block.
    pub(crate) moves: Vec<(u32, u32)>,
    /// From block, to host block.
    pub(crate) swap_out: Vec<(u32, u32)>,
    /// From host block, to block.
    pub(crate) swap_in: Vec<(u32, u32)>,
    pub(crate) rows: Vec<RowView>,
    pub(crate) num_tokens: u32,
}

fn words(buffer: &[i32], offset: usize, len: usize) -> &[i32] {
    &buffer[offset..offset + len]
}

impl StepView {
    /// Reads `buffer`; `holders` says who has which seat, and is brought up to date.
    pub(crate) fn read(layout: &StepLayout, buffer: &[i32], holders: &mut [Option<u64>]) -> Self {
        let count = |word: usize| buffer[word] as usize;
        assert_eq!(buffer[header::MAGIC], header::MAGIC_VALUE);
        for &seat in words(buffer, layout.offset_lost, count(header::NUM_LOST)) {
            let holder = holders[seat as usize].take();
            assert!(holder.is_some(), "lost seat {seat} was held");
        }
        let gained = Self::read_gained(layout, buffer);
        for gain in &gained {
            let before = holders[gain.seat].replace(gain.handle);
            assert_eq!(before, None, "gained seat {} was free", gain.seat);
        }
        let changes = words(
            buffer,
            layout.offset_table_changes,
            4 * count(header::NUM_TABLE_CHANGES),
        )
        .chunks_exact(4)
        .map(|entry| {
            assert_eq!(entry[1], 0, "there is one KV group");
            (entry[0] as usize, entry[2] as usize, entry[3] as u32)
        })
        .collect();
        let pairs = |offset: usize, num: usize| -> Vec<(u32, u32)> {
            words(buffer, offset, 2 * count(num))
                .chunks_exact(2)
                .map(|entry| (entry[0] as u32, entry[1] as u32))
                .collect()
        };
        let num_rows = count(header::NUM_ROWS);
        let column = |offset: usize, row: usize| buffer[offset..][row];
        let rows = (0..num_rows)
            .map(|row| {
                let seat = column(layout.offset_row_seat, row) as usize;
                RowView {
                    handle: holders[seat].expect("a row's seat is held"),
                    seat,
                    start: column(layout.offset_row_start, row) as u32,
                    count: column(layout.offset_row_count, row) as u32,
                    flags: column(layout.offset_row_flags, row),
                }
            })
            .collect();
        let id =
            u64::from(buffer[header::STEP_LOW] as u32) | (buffer[header::STEP_HIGH] as u64) << 32;
        Self {
            id,
            gained,
            changes,
            moves: pairs(layout.offset_moves, header::NUM_MOVES),
            swap_out: pairs(layout.offset_swap_out, header::NUM_SWAP_OUT),
            swap_in: pairs(layout.offset_swap_in, header::NUM_SWAP_IN),
            rows,
            num_tokens: count(header::NUM_TOKENS) as u32,
        }
    }

    fn read_gained(layout: &StepLayout, buffer: &[i32]) -> Vec<GainedView> {
        let mut next_block = 0;
        let gained: Vec<GainedView> = words(
            buffer,
            layout.offset_gained,
            8 * buffer[header::NUM_GAINED] as usize,
        )
        .chunks_exact(8)
        .map(|entry| {
            assert_eq!(
                entry[7], next_block,
                "tables of gained seats lie one behind another"
            );
            next_block += entry[6];
            let blocks = words(
                buffer,
                layout.offset_gained_blocks + entry[7] as usize,
                entry[6] as usize,
            );
            GainedView {
                seat: entry[0] as usize,
                handle: u64::from(entry[1] as u32) | (entry[2] as u64) << 32,
                num_prompt_tokens: entry[3] as u32,
                num_tokens: entry[4] as u32,
                num_computed_tokens: entry[5] as u32,
                blocks: blocks.iter().map(|&block| block as u32).collect(),
            }
        })
        .collect();
        assert_eq!(buffer[header::NUM_GAINED_BLOCKS], next_block);
        gained
    }

    /// Rows that are some sequence's: all but padding.
    pub(crate) fn sequence_rows(&self) -> impl Iterator<Item = &RowView> {
        self.rows.iter().filter(|row| !row.has(flags::PADDING))
    }

    /// The row of `handle`, if it has one.
    pub(crate) fn row_of(&self, handle: u64) -> Option<&RowView> {
        self.sequence_rows().find(|row| row.handle == handle)
    }

    fn check_moves(&self, config: &Config) {
        let (mut from, mut to): (Vec<u32>, Vec<u32>) = self.moves.iter().copied().unzip();
        from.sort_unstable();
        to.sort_unstable();
        for ends in [&from, &to] {
            assert!(
                ends.windows(2).all(|pair| pair[0] < pair[1]),
                "a block is moved once, and moved to once: {:?}",
                self.moves
            );
            assert!(!ends.contains(&0), "block 0 is never moved");
        }
        if !config.contiguous {
            assert!(self.moves.len() <= config.max_moves as usize);
            assert!(
                to.iter().all(|block| from.binary_search(block).is_err()),
                "no block is both source and destination: {:?}",
                self.moves
            );
        }
    }

    /// What is copied to the host, and back, each once, and nothing to a block that is read by the other list.
    fn check_swaps(&self, config: &Config) {
        let ends = |pairs: &[(u32, u32)]| -> (Vec<u32>, Vec<u32>) { pairs.iter().copied().unzip() };
        let (out_from, out_to) = ends(&self.swap_out);
        let (in_from, in_to) = ends(&self.swap_in);
        for (blocks, first, end) in [
            (&out_from, 1, u32::MAX),
            (&in_to, 1, u32::MAX),
            (&out_to, 0, config.num_swap_blocks),
            (&in_from, 0, config.num_swap_blocks),
        ] {
            let mut sorted = blocks.clone();
            sorted.sort_unstable();
            sorted.dedup();
            // One that several sequences hold is copied for each that leaves.
            assert!(sorted.len() == blocks.len() || core::ptr::eq(blocks, &raw const out_from));
            assert!(blocks.iter().all(|block| (first..end).contains(block)));
        }
        assert!(
            out_to.iter().all(|host| !in_from.contains(host)),
            "a host block that is copied back is pinned"
        );
    }

    /// Checks what holds for every step, whatever was decided.
    pub(crate) fn check(&self, config: &Config, layout: &StepLayout, buffer: &[i32]) {
        let kind = |row: &RowView| match (row.has(flags::PADDING), row.has(flags::LISTED)) {
            (true, _) => 2,
            (false, true) => 1,
            (false, false) => 0,
        };
        let kinds: Vec<i32> = self.rows.iter().map(kind).collect();
        assert!(
            kinds.is_sorted(),
            "seat rows, then listed rows, then padding: {kinds:?}"
        );
        assert!(!self.rows.is_empty(), "a step has rows");
        self.check_swaps(config);
        let num = |predicate: &dyn Fn(&RowView) -> bool| {
            self.rows.iter().filter(|row| predicate(row)).count() as i32
        };
        assert_eq!(buffer[header::NUM_SEAT_ROWS], num(&|row| kind(row) == 0));
        assert_eq!(
            buffer[header::NUM_SAMPLE_ROWS],
            num(&|row| row.has(flags::SAMPLES))
        );
        assert_eq!(
            buffer[header::NUM_HOST_MASKED],
            num(&|row| row.has(flags::HOST_MASKED))
        );
        let num_logits: u32 = self.rows.iter().map(RowView::max_ids).sum();
        assert_eq!(buffer[header::NUM_LOGITS] as u32, num_logits);
        let max_context = self
            .sequence_rows()
            .map(|row| row.start + row.count)
            .max()
            .unwrap_or(0);
        assert_eq!(buffer[header::MAX_CONTEXT] as u32, max_context);
        let max_count = self.rows.iter().map(|row| row.count).max().unwrap_or(0);
        assert_eq!(buffer[header::MAX_COUNT] as u32, max_count);

        self.check_moves(config);
        let mut sum = 0;
        for (row, view) in self.rows.iter().enumerate() {
            assert_eq!(buffer[layout.offset_cu_seqlens_q + row], sum);
            assert!(view.count > 0, "no row is empty");
            sum += view.count as i32;
        }
        assert_eq!(buffer[layout.offset_cu_seqlens_q + self.rows.len()], sum);
        assert_eq!(self.num_tokens as i32, sum);
        assert!(
            self.num_tokens <= config.max_num_batched_tokens,
            "the token budget is kept"
        );
        let num_listed: u32 = self
            .rows
            .iter()
            .map(
                |row| match (row.has(flags::LISTED), row.has(flags::DRAFT_IDS)) {
                    (true, _) => row.count,
                    (false, true) => row.count - 1,
                    (false, false) => 0,
                },
            )
            .sum();
        assert_eq!(buffer[header::NUM_LISTED_IDS] as u32, num_listed);

        let mut seats: Vec<usize> = self.sequence_rows().map(|row| row.seat).collect();
        seats.sort_unstable();
        assert!(
            seats.windows(2).all(|pair| pair[0] < pair[1]),
            "a seat has one row"
        );
        for row in &self.rows {
            let is_draft = row.has(flags::DRAFTS);
            assert!(!row.has(flags::DRAFT_IDS) || is_draft);
            assert!(!is_draft || (2..=config.max_drafts + 1).contains(&row.count));
            assert!(
                !(is_draft && row.has(flags::HOST_MASKED)),
                "masked rows get no drafts"
            );
            assert!(
                kind(row) != 0 || is_draft || row.count == 1,
                "a decode is one token"
            );
            assert!(
                kind(row) != 0 || row.has(flags::SAMPLES),
                "a decode samples"
            );
        }
    }
}
