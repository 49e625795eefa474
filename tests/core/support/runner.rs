//! The null runner: runs steps in stream order, as late as the test likes, on a KV memory whose every slot holds the hash
//! of the whole prefix that was stored there. A row that reads anything but its own sequence's prefix is caught.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use noria_core::expand::{SeatState, StepArrays, apply, expand};
use noria_core::{Config, StepId, StepLayout, flags};

use super::truth::{Truth, mixed, stored};
use super::view::{RowView, StepView};

/// How much of a step a failing runner had done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Breakage {
    /// Nothing: not even its seats were gained.
    Untouched,
    /// Its seats were gained, and its slots are left with garbage.
    Garbage,
    /// All but the sampled ids.
    Whole,
}

/// A planned step on its way.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) id: StepId,
    pub(crate) view: StepView,
    buffer: Vec<i32>,
    /// Behind its moves, blocks beyond are given back to the system.
    extent: Option<u32>,
}

/// What a step sampled.
#[derive(Debug)]
pub(crate) struct Sampled {
    pub(crate) id: StepId,
    pub(crate) view: StepView,
    pub(crate) num_ids: Vec<i32>,
    pub(crate) ids: Vec<i32>,
}

#[derive(Debug)]
struct Arrays {
    input_ids: Vec<i64>,
    positions: Vec<i64>,
    slot_mapping: Vec<i64>,
    cu_seqlens_q: Vec<i32>,
    context_lens: Vec<i32>,
    row_seats: Vec<i64>,
    logits_indices: Vec<i64>,
    sample_rows: Vec<i64>,
}

#[derive(Debug)]
pub(crate) struct NullRunner {
    layout: StepLayout,
    vocab_size: u32,
    window: usize,
    has_drafts: bool,
    block_tables: Vec<i32>,
    last_token: Vec<i64>,
    num_computed_tokens: Vec<i64>,
    num_prompt_tokens: Vec<i64>,
    arrays: Arrays,
    /// By slot; 0 where nothing was stored.
    kv: Vec<u64>,
    /// The same, of the host's memory.
    host: Vec<u64>,
    /// By handle, ended requests included: their rows in flight still run.
    pub(crate) truths: BTreeMap<u64, Truth>,
    pub(crate) queue: VecDeque<Pending>,
}

impl NullRunner {
    pub(crate) fn new(config: &Config, layout: &StepLayout) -> Self {
        let (seats, tokens) = (layout.max_num_seqs, layout.max_num_batched_tokens);
        Self {
            layout: *layout,
            vocab_size: config.vocab_size,
            window: config.window as usize,
            has_drafts: config.max_drafts > 0,
            block_tables: vec![0; seats * layout.max_blocks_per_seq],
            last_token: vec![-1; seats],
            num_computed_tokens: vec![-1; seats],
            num_prompt_tokens: vec![-1; seats],
            arrays: Arrays {
                input_ids: vec![0; tokens],
                positions: vec![0; tokens],
                slot_mapping: vec![0; tokens],
                cu_seqlens_q: vec![0; layout.max_rows + 1],
                context_lens: vec![0; layout.max_rows],
                row_seats: vec![0; layout.max_rows],
                logits_indices: vec![0; layout.max_logits],
                sample_rows: vec![0; layout.max_rows],
            },
            kv: vec![0; (layout.num_blocks + 1) * layout.block_size],
            host: vec![0; config.num_swap_blocks as usize * layout.block_size],
            truths: BTreeMap::new(),
            queue: VecDeque::new(),
        }
    }

    pub(crate) fn push(&mut self, id: StepId, view: StepView, buffer: &[i32], extent: Option<u32>) {
        self.queue.push_back(Pending {
            id,
            view,
            buffer: buffer.to_vec(),
            extent,
        });
    }

    /// Whether the next step holds a row that fails always.
    pub(crate) fn next_breaks(&self) -> bool {
        self.queue.front().is_some_and(|pending| {
            pending.view.sequence_rows().any(|row| {
                let breaks_at = self.truths[&row.handle].ask.breaks_at;
                breaks_at.is_some_and(|position| row.start + row.count > position)
            })
        })
    }

    /// Runs the next step.
    pub(crate) fn run(&mut self) -> Sampled {
        let pending = self.queue.pop_front().expect("a step is planned");
        self.expand(&pending.buffer);
        self.swap_blocks(&pending.view);
        self.move_blocks(&pending);
        self.store(&pending.view);
        self.sample(pending)
    }

    /// Breaks in the next step; those behind it never run.
    pub(crate) fn fail(&mut self, breakage: Breakage) -> Pending {
        let pending = self.queue.pop_front().expect("a step is planned");
        self.queue.clear();
        if breakage != Breakage::Untouched {
            self.expand(&pending.buffer);
            self.swap_blocks(&pending.view);
            self.move_blocks(&pending);
            self.store(&pending.view);
        }
        if breakage == Breakage::Garbage {
            for &(_, to) in &pending.view.swap_out {
                let slots = self.slots(to);
                self.host[slots].fill(0xdead);
            }
            for &(_, to) in &pending.view.swap_in {
                self.spoil(to);
            }
            for &(_, to) in &pending.view.moves {
                self.spoil(to);
            }
            for at in 0..pending.view.num_tokens as usize {
                if let Ok(slot) = usize::try_from(self.arrays.slot_mapping[at]) {
                    self.kv[slot] = mixed(pending.id.0 ^ slot as u64);
                }
            }
            for row in pending.view.sequence_rows() {
                self.last_token[row.seat] = -1;
            }
        }
        pending
    }

    /// Memory for blocks up to `num_blocks`.
    pub(crate) fn reach(&mut self, num_blocks: u32) {
        let num_blocks = num_blocks as usize;
        if num_blocks > self.layout.num_blocks {
            self.layout.num_blocks = num_blocks;
            self.kv.resize((num_blocks + 1) * self.layout.block_size, 0);
        }
    }

    fn slots(&self, block: u32) -> core::ops::Range<usize> {
        let block_size = self.layout.block_size;
        block as usize * block_size..(block as usize + 1) * block_size
    }

    /// What the slots of a block hold.
    pub(crate) fn held(&self, block: u32) -> &[u64] {
        &self.kv[self.slots(block)]
    }

    /// To the host first, then back.
    fn swap_blocks(&mut self, view: &StepView) {
        for &(from, to) in &view.swap_out {
            let (from, to) = (self.slots(from), self.slots(to));
            self.host[to].copy_from_slice(&self.kv[from]);
        }
        for &(from, to) in &view.swap_in {
            let (from, to) = (self.slots(from), self.slots(to));
            self.kv[to].copy_from_slice(&self.host[from]);
        }
    }

    /// Reads every source before it writes.
    fn move_blocks(&mut self, pending: &Pending) {
        let block_size = self.layout.block_size;
        let slots = |block: u32| block as usize * block_size..(block as usize + 1) * block_size;
        let contents: Vec<Vec<u64>> = pending
            .view
            .moves
            .iter()
            .map(|&(from, _)| self.kv[slots(from)].to_vec())
            .collect();
        for (&(_, to), content) in pending.view.moves.iter().zip(contents) {
            self.kv[slots(to)].copy_from_slice(&content);
        }
        if let Some(extent) = pending.extent {
            for block in extent + 1..=self.layout.num_blocks as u32 {
                self.spoil(block);
            }
        }
    }

    fn spoil(&mut self, block: u32) {
        let block_size = self.layout.block_size;
        for slot in block as usize * block_size..(block as usize + 1) * block_size {
            self.kv[slot] = mixed(slot as u64 ^ 0xdead);
        }
    }

    fn expand(&mut self, buffer: &[i32]) {
        let mut seats = SeatState {
            block_tables: &mut self.block_tables,
            last_token: &self.last_token,
            num_computed_tokens: &mut self.num_computed_tokens,
            num_prompt_tokens: &mut self.num_prompt_tokens,
        };
        let arrays = &mut self.arrays;
        let mut out = StepArrays {
            input_ids: &mut arrays.input_ids,
            positions: &mut arrays.positions,
            slot_mapping: &mut arrays.slot_mapping,
            cu_seqlens_q: &mut arrays.cu_seqlens_q,
            context_lens: &mut arrays.context_lens,
            row_seats: &mut arrays.row_seats,
            logits_indices: &mut arrays.logits_indices,
            sample_rows: &mut arrays.sample_rows,
        };
        apply(&self.layout, buffer, &mut seats);
        expand(&self.layout, buffer, &mut seats, &mut out);
    }

    fn slot(&self, seat: usize, position: usize) -> usize {
        let block_size = self.layout.block_size;
        let block =
            self.block_tables[seat * self.layout.max_blocks_per_seq + position / block_size];
        assert!(
            block >= 1 && block as usize <= self.layout.num_blocks,
            "position {position} has a block"
        );
        block as usize * block_size + position % block_size
    }

    /// Stores every row's tokens, as a layer does before it attends.
    fn store(&mut self, view: &StepView) {
        let mut written = BTreeSet::new();
        let mut token = 0;
        for (row, of) in view.rows.iter().enumerate() {
            let tokens = token..token + of.count as usize;
            token = tokens.end;
            assert_eq!(self.arrays.row_seats[row], of.seat as i64);
            assert_eq!(self.arrays.cu_seqlens_q[row + 1], token as i32);
            if of.has(flags::PADDING) {
                assert_eq!(
                    self.arrays.context_lens[row], 0,
                    "padding has an empty context"
                );
                for at in tokens {
                    assert_eq!(
                        self.arrays.slot_mapping[at], -1,
                        "padding is stored nowhere"
                    );
                    assert_eq!(
                        (self.arrays.input_ids[at], self.arrays.positions[at]),
                        (0, 0)
                    );
                }
                continue;
            }
            let start = self.true_start(row, of);
            let mut held = self.truth(of).kv_before(start);
            for (i, at) in tokens.enumerate() {
                if of.has(flags::DRAFTS) && !of.has(flags::DRAFT_IDS) && i > 0 {
                    self.arrays.input_ids[at] = self.device_draft(of, start, i);
                }
                let id = self.arrays.input_ids[at] as i32;
                if i == 0 || !of.has(flags::DRAFTS) {
                    let truth = self.truth(of).token(start + i);
                    assert_eq!(id, truth, "the row's ids are its sequence's: {of:?}");
                }
                assert_eq!(self.arrays.positions[at], (start + i) as i64);
                let slot = self.slot(of.seat, start + i);
                assert_eq!(self.arrays.slot_mapping[at], slot as i64);
                assert!(written.insert(slot), "slot {slot} is written once a step");
                held = stored(held, id);
                self.kv[slot] = held;
            }
        }
        self.check_contexts(view);
    }

    fn truth(&mut self, row: &RowView) -> &mut Truth {
        self.truths
            .get_mut(&row.handle)
            .expect("rows are of requests that were submitted")
    }

    /// Where a row starts: what is stored of its sequence.
    fn true_start(&self, row: usize, of: &RowView) -> usize {
        let start = (self.arrays.context_lens[row] as u32 - of.count) as usize;
        if of.has(flags::DEVICE_START) {
            assert!(
                start <= of.start as usize,
                "the planned start is an upper bound"
            );
        } else {
            assert_eq!(start, of.start as usize);
        }
        start
    }

    /// Every slot that a row reads holds its own sequence's prefix.
    fn check_contexts(&mut self, view: &StepView) {
        for (row, of) in view.rows.iter().enumerate() {
            if of.has(flags::PADDING) {
                continue;
            }
            let end = self.arrays.context_lens[row] as usize;
            let num_drafts = if of.has(flags::DRAFTS) {
                of.count as usize - 1
            } else {
                0
            };
            let first = self.first_seen(end - of.count as usize);
            self.check_behind(of.seat, first);
            for position in first..end - num_drafts {
                let slot = self.slot(of.seat, position);
                let expected = self.truth(of).kv(position);
                assert_eq!(
                    self.kv[slot], expected,
                    "step {}: slot {slot} holds position {position} of {of:?}",
                    view.id
                );
            }
        }
    }

    /// The first position that a row sees that begins at `start`.
    fn first_seen(&self, start: usize) -> usize {
        match self.window {
            0 => 0,
            window => (start + 1).saturating_sub(window),
        }
    }

    /// A table's entries wholly before position `first` are nobody's. Where drafts are moved, one that was cleared may be
    /// told again.
    fn check_behind(&self, seat: usize, first: usize) {
        let table = &self.block_tables[seat * self.layout.max_blocks_per_seq..];
        let num_behind = first / self.layout.block_size;
        assert!(
            self.has_drafts || table[..num_behind].iter().all(|&block| block == 0),
            "what is behind the window is block 0"
        );
    }

    /// A guess of the device: now right, now wrong.
    fn device_draft(&mut self, row: &RowView, start: usize, i: usize) -> i64 {
        let truth = i64::from(self.truth(row).token(start + i));
        if mixed(row.handle ^ ((start + i) as u64) << 20).is_multiple_of(3) {
            (truth + 1) % i64::from(self.vocab_size)
        } else {
            truth
        }
    }

    fn sample(&mut self, pending: Pending) -> Sampled {
        let (mut num_ids, mut ids) = (Vec::new(), Vec::new());
        let (mut token, mut num_sampling, mut num_logits) = (0, 0, 0);
        for (row, of) in pending.view.rows.iter().enumerate() {
            let end = token + of.count as usize;
            let first = end - of.max_ids() as usize;
            let sampled = if of.has(flags::SAMPLES) {
                assert_eq!(self.arrays.sample_rows[num_sampling], row as i64);
                num_sampling += 1;
                for at in first..end {
                    assert_eq!(self.arrays.logits_indices[num_logits], at as i64);
                    num_logits += 1;
                }
                self.sample_row(row, of, first..end)
            } else {
                Vec::new()
            };
            token = end;
            num_ids.push(sampled.len() as i32);
            ids.extend(sampled);
        }
        Sampled {
            id: pending.id,
            view: pending.view,
            num_ids,
            ids,
        }
    }

    /// The true next tokens of a row, as far as its drafts were right.
    fn sample_row(
        &mut self,
        row: usize,
        of: &RowView,
        tokens: core::ops::Range<usize>,
    ) -> Vec<i32> {
        let context = self.arrays.context_lens[row] as usize;
        let first_position = context - tokens.len() + 1;
        let num_prompt = self.truth(of).num_prompt();
        assert!(
            first_position as u32 >= num_prompt,
            "nothing is sampled inside a prompt"
        );
        let mut sampled = Vec::new();
        for (i, at) in tokens.clone().enumerate() {
            let next = self.truth(of).token(first_position + i);
            sampled.push(next);
            let is_accepted =
                at + 1 < tokens.end && self.arrays.input_ids[at + 1] == i64::from(next);
            if !is_accepted {
                break;
            }
        }
        self.last_token[of.seat] = i64::from(*sampled.last().expect("a row samples one at least"));
        self.num_computed_tokens[of.seat] = (first_position - 1 + sampled.len()) as i64;
        sampled
    }
}
