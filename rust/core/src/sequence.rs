//! A request's executing state. A step moves `num_planned` toward the tokens there are; a commit moves `num_computed`.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::accounts::AccountId;
use crate::host_pool::Swapped;
use crate::ids::{Handle, Seat};
use crate::policy::Key;
use crate::prefix_cache::{BlockHash, ChainHasher};
use crate::request::{FinishReason, Request};
use crate::step::{RowInFlight, RowKind};

/// Where a sequence is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// Out of line until unparked.
    Parked,
    /// In the queue: new, or preempted.
    Waiting,
    /// Has a seat.
    Running(Seat),
    /// Finished, but the padded baseline still computes its row.
    Ghost(Seat),
}

/// A group in quarantine, and the tokens that must be computed again to leave it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Confinement {
    pub(crate) group: u64,
    pub(crate) until: u32,
}

/// What a sequence's place in line is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    pub(crate) account: AccountId,
    pub(crate) arrival: u64,
    pub(crate) priority: i32,
    /// Output tokens that its sender thinks it will want; 0 for no idea.
    pub(crate) num_expected: u32,
    pub(crate) submitted_us: u64,
    pub(crate) ttft_target_us: u64,
    pub(crate) itl_target_us: u64,
    /// The next step when this wait began.
    pub(crate) since: u64,
    /// Requests of its band that entered before it in this wait, while it was blocked.
    pub(crate) num_bypasses: u32,
    /// Preemptions since it last left the tier of the aged, or ever.
    pub(crate) num_recent_preemptions: u32,
    /// Which of all promotions to the tier of the aged was its own, while it is there.
    pub(crate) promotion: Option<u64>,
    /// Blocks that it can ever need.
    pub(crate) num_limit_blocks: u32,
    /// Tokens that it had when it got in line.
    pub(crate) num_queued_tokens: u32,
    /// Blocks of this residency that others held when it found them.
    pub(crate) num_shared_blocks: u32,
    /// While it waits: its leading blocks that could be found, when that was last asked, and of those the leading ones
    /// that others held.
    pub(crate) num_found_blocks: u32,
    pub(crate) num_held_blocks: u32,
    /// Plans of this wait in which another computed its next block.
    pub(crate) num_prefix_waits: u32,
    /// What a policy of one's own said of it.
    pub(crate) score: i64,
    pub(crate) adapter: u64,
    pub(crate) expires_us: Option<u64>,
}

impl Standing {
    pub(crate) fn new(
        request: &Request<'_>,
        account: AccountId,
        arrival: u64,
        now_us: u64,
    ) -> Self {
        Self {
            account,
            arrival,
            priority: request.priority,
            num_expected: request.expected_tokens.unwrap_or(0),
            submitted_us: now_us,
            ttft_target_us: request.ttft_target_us,
            itl_target_us: request.itl_target_us,
            since: 0,
            num_bypasses: 0,
            num_recent_preemptions: 0,
            promotion: None,
            num_limit_blocks: 0,
            num_queued_tokens: 0,
            num_shared_blocks: 0,
            num_found_blocks: 0,
            num_held_blocks: 0,
            num_prefix_waits: 0,
            score: 0,
            adapter: request.adapter,
            expires_us: request.expires_us,
        }
    }

    /// When the token behind `num_output` others is due.
    pub(crate) fn due_us(&self, num_output: u32) -> u64 {
        self.submitted_us
            .saturating_add(self.ttft_target_us)
            .saturating_add(self.itl_target_us.saturating_mul(num_output.into()))
    }
}

#[derive(Debug)]
pub(crate) struct Sequence {
    /// While it waits: as it stands in its line. While it runs: as it was when it took its seat.
    pub(crate) key: Key,
    pub(crate) standing: Standing,
    pub(crate) state: State,
    /// Prompt, then committed output, then, once it was seated, room for all that there can be.
    tokens: Vec<i32>,
    num_tokens: u32,
    pub(crate) num_prompt: u32,
    /// Output tokens, at most.
    pub(crate) max_output: u32,
    stop_ids: Box<[i32]>,
    /// A bit for each stop id, by its low six bits: an id whose bit is 0 is none of them.
    stop_filter: u64,
    pub(crate) salt: BlockHash,
    /// Of full blocks, as far as anyone has asked.
    hashes: Vec<BlockHash>,
    pub(crate) host_masked: bool,
    pub(crate) reads_prefix_cache: bool,

    /// Times that a seat was given up: a row planned before is not of this residency.
    pub(crate) residency: u32,
    /// Tokens whose KV is stored by this residency's committed steps and hits.
    pub(crate) num_computed: u32,
    /// The same with steps in flight and the one being planned; an upper bound while drafts are in flight.
    pub(crate) num_planned: u32,
    /// Samples in flight, of any residency; an upper bound likewise.
    pub(crate) num_pending: u32,
    /// Rows in flight, of any residency.
    pub(crate) num_rows_in_flight: u32,
    /// Of those, rows with drafts.
    pub(crate) num_draft_rows_in_flight: u32,
    /// Leading full blocks of this residency that were offered to the prefix cache.
    pub(crate) num_registered: u32,
    /// Leading table entries that the runner was told.
    pub(crate) num_sent: u32,
    /// Whether this residency has planned a sample, so that the seat is a row's source.
    pub(crate) has_sampled: bool,
    /// Below this many planned tokens its next row is a plain decode: one token, its source the seat, into a block that
    /// the runner was told, and not beyond its limit. So one comparison decides most rows.
    pub(crate) plain_until: u32,
    /// Its seat, while `plain_until` is above 0.
    plain_seat: Seat,
    /// Below this many tokens one more of its rows' tokens, unless it is a stop id, is only appended: it fills no block
    /// and is not the last, and its row is of this residency and has no drafts. So one comparison decides most commits.
    pub(crate) quiet_until: u32,
    /// The plan that gave it a decode's row last.
    decoded_in: u64,
    pub(crate) was_admitted: bool,
    pub(crate) num_preemptions: u32,
    /// The plan that preempted it last: it is not resumed in that one.
    pub(crate) preempted_in: u64,
    pub(crate) confinement: Option<Confinement>,
    /// While it waits: its KV in the host's memory.
    pub(crate) swapped: Swapped,
    /// Padding that the padded baseline still owes this prompt.
    pub(crate) num_padding_owed: u32,
    pub(crate) row: PlannedRow,
}

/// A row of the plan that is being made; all zero between plans.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct PlannedRow {
    pub(crate) start: u32,
    pub(crate) count: u32,
    pub(crate) num_drafts: u32,
    /// Where the drafts' ids lie in the caller's list.
    pub(crate) draft_ids: Option<u32>,
    /// Blocks that its known tokens still need; counted in the pass's debt.
    pub(crate) debt: u32,
    /// Padding tokens that follow in a row of their own.
    pub(crate) num_padding: u32,
    /// The walk over prefills has been here: not a victim any more.
    pub(crate) is_reached: bool,
}

impl Sequence {
    /// `salt` is the root of its prefix's hashes.
    pub(crate) fn new(
        request: &Request<'_>,
        standing: Standing,
        max_output: u32,
        salt: BlockHash,
    ) -> Self {
        Self {
            key: Key::first_come(standing.arrival),
            standing,
            state: if request.parked {
                State::Parked
            } else {
                State::Waiting
            },
            tokens: request.prompt_token_ids.to_vec(),
            num_tokens: request.prompt_token_ids.len() as u32,
            num_prompt: request.prompt_token_ids.len() as u32,
            max_output,
            stop_ids: request.stop_token_ids.into(),
            stop_filter: request
                .stop_token_ids
                .iter()
                .fold(0, |filter, &id| filter | stop_bit(id)),
            salt,
            hashes: Vec::new(),
            host_masked: request.host_masked,
            reads_prefix_cache: request.reads_prefix_cache,
            residency: 0,
            num_computed: 0,
            num_planned: 0,
            num_pending: 0,
            num_rows_in_flight: 0,
            num_draft_rows_in_flight: 0,
            num_registered: 0,
            num_sent: 0,
            has_sampled: false,
            plain_until: 0,
            plain_seat: Seat(0),
            quiet_until: 0,
            decoded_in: 0,
            was_admitted: false,
            num_preemptions: 0,
            preempted_in: 0,
            confinement: None,
            swapped: Swapped::default(),
            num_padding_owed: 0,
            row: PlannedRow::default(),
        }
    }

    /// Room for every token and hash that there can be, so that decoding allocates nothing.
    pub(crate) fn allocate_output(&mut self, block_size: u32) {
        let num_tokens = (self.num_prompt + self.max_output) as usize;
        self.tokens.reserve_exact(num_tokens - self.tokens.len());
        self.tokens.resize(num_tokens, 0);
        self.reserve_hashes(block_size);
    }

    fn reserve_hashes(&mut self, block_size: u32) {
        let num_blocks = ((self.num_prompt + self.max_output) / block_size) as usize;
        self.hashes
            .reserve_exact(num_blocks.saturating_sub(self.hashes.len()));
    }

    /// Tokens that the host knows.
    pub(crate) fn num_tokens(&self) -> u32 {
        self.num_tokens
    }

    pub(crate) fn tokens(&self) -> &[i32] {
        &self.tokens[..self.num_tokens as usize]
    }

    /// Appends an output token.
    pub(crate) fn append(&mut self, id: i32) {
        self.tokens[self.num_tokens as usize] = id;
        self.num_tokens += 1;
    }

    pub(crate) fn num_output(&self) -> u32 {
        self.num_tokens() - self.num_prompt
    }

    /// Tokens that are ever computed, at most: the last output token never is.
    pub(crate) fn most_tokens(&self) -> u32 {
        self.num_prompt + self.max_output - 1
    }

    /// Output tokens once all steps in flight are committed, at most.
    pub(crate) fn max_output_in_flight(&self) -> u32 {
        self.num_output() + self.num_pending
    }

    /// Whether steps in flight bring it to its limit, whatever they sample; that of plan `serial` is not in flight yet.
    pub(crate) fn ends_in_flight(&self, serial: u64) -> bool {
        let num_pending = self.num_pending - u32::from(self.decodes_in(serial));
        num_pending > 0
            && self.num_draft_rows_in_flight == 0
            && self.num_output() + num_pending >= self.max_output
    }

    /// Known tokens that no step has computed yet.
    pub(crate) fn num_unplanned(&self) -> u32 {
        self.num_tokens() - self.num_planned
    }

    pub(crate) fn seat(&self) -> Option<Seat> {
        match self.state {
            State::Running(seat) | State::Ghost(seat) => Some(seat),
            State::Parked | State::Waiting => None,
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state, State::Running(_))
    }

    pub(crate) fn is_ghost(&self) -> bool {
        matches!(self.state, State::Ghost(_))
    }

    /// Its seat, if its next row is a plain decode.
    pub(crate) fn seat_if_plain(&self) -> Option<Seat> {
        (self.num_planned < self.plain_until).then_some(self.plain_seat)
    }

    /// Gives it a row of plan `serial`: a plain decode's, unless it is amended.
    pub(crate) fn decode(&mut self, handle: Handle, serial: u64) -> RowInFlight {
        self.decoded_in = serial;
        self.num_planned += 1;
        self.num_pending += 1;
        self.num_rows_in_flight += 1;
        RowInFlight {
            handle,
            residency: self.residency,
            end: self.num_planned,
            count: 1,
            max_ids: 1,
            kind: RowKind::Live,
        }
    }

    /// Whether plan `serial` gave it a decode's row.
    pub(crate) fn decodes_in(&self, serial: u64) -> bool {
        self.decoded_in == serial
    }

    /// Takes the row that `decode` gave back.
    pub(crate) fn withdraw(&mut self) {
        self.decoded_in = 0;
        self.num_planned -= 1;
        self.num_pending -= 1;
        self.num_rows_in_flight -= 1;
    }

    /// A row has been written, and the runner told the whole table; from position `next_release` on a row leaves a block
    /// behind.
    pub(crate) fn settle_plain(&mut self, block_size: u32, next_release: u32) {
        self.plain_until = 0;
        if let Some(seat) = self.seat_of_plain() {
            self.plain_seat = seat;
            let end = (self.num_sent * block_size).min(self.most_tokens());
            self.plain_until = end.min(next_release);
        }
    }

    /// Its seat, if its next row is a plain decode as soon as the runner knows the block that it goes on in.
    pub(crate) fn seat_of_plain(&self) -> Option<Seat> {
        let is_plain = self.has_sampled
            && !self.host_masked
            && self.num_draft_rows_in_flight == 0
            && self.num_padding_owed == 0;
        match self.state {
            State::Running(seat) if is_plain => Some(seat),
            _ => None,
        }
    }

    /// Whether `id`, the next of its tokens, is only appended.
    pub(crate) fn is_quiet(&self, id: i32) -> bool {
        self.num_tokens() < self.quiet_until && self.goes_on_after(id)
    }

    /// The same, where it may fill a block, if there is a prefix cache.
    pub(crate) fn is_quiet_at_edge(&self, id: i32) -> bool {
        self.quiet_until > 0 && self.num_tokens() < self.most_tokens() && self.goes_on_after(id)
    }

    /// Whether `id` stops nothing: one bit decides for most.
    fn goes_on_after(&self, id: i32) -> bool {
        self.stop_filter & stop_bit(id) == 0 || !self.is_stop(id)
    }

    /// Takes the id that a quiet `row` sampled; its output position.
    pub(crate) fn take(&mut self, row: &RowInFlight, id: i32) -> u32 {
        let num_tokens = self.num_tokens;
        self.num_pending -= 1;
        self.num_rows_in_flight -= 1;
        self.num_computed += row.count;
        self.tokens[num_tokens as usize] = id;
        self.num_tokens = num_tokens + 1;
        num_tokens - self.num_prompt
    }

    /// A block was filled, and offered to the prefix cache; nothing else has changed.
    pub(crate) fn stay_quiet(&mut self, block_size: u32) {
        let filled = (self.num_registered + 1) * block_size;
        self.quiet_until = filled.min(self.most_tokens());
    }

    /// A token, or a chunk of the prompt, was committed; a block that it filled was offered to the prefix cache.
    pub(crate) fn settle_quiet(&mut self, block_size: u32, registers_blocks: bool) {
        // A preempted one is not resumed, and so not quiet again, before its rows in flight have landed.
        let is_quiet =
            self.is_running() && self.confinement.is_none() && self.num_draft_rows_in_flight == 0;
        match (is_quiet, registers_blocks) {
            (false, _) => self.quiet_until = 0,
            (true, false) => self.quiet_until = self.most_tokens(),
            (true, true) => self.stay_quiet(block_size),
        }
    }

    #[cold] // behind the filter, for the loop that appends
    #[inline(never)]
    #[allow(
        clippy::manual_contains,
        reason = "`contains` sets up a vector loop; there are a few ids at most"
    )]
    fn is_stop(&self, id: i32) -> bool {
        self.stop_ids.iter().any(|&stop| stop == id)
    }

    /// A row that was in flight is committed, or was discarded.
    pub(crate) fn land(&mut self, row: &RowInFlight) {
        self.num_pending -= u32::from(row.max_ids);
        self.num_rows_in_flight -= 1;
        self.num_draft_rows_in_flight -= u32::from(row.max_ids > 1);
    }

    /// Whether, and why, `id`, the last of its tokens, is the last that it may have.
    pub(crate) fn reason_to_end(&self, id: i32) -> Option<FinishReason> {
        if self.is_stop(id) {
            Some(FinishReason::Stop)
        } else if self.num_output() >= self.max_output {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Whether committed steps have filled a block that was not offered to the prefix cache.
    pub(crate) fn has_filled_block(&self, block_size: u32) -> bool {
        // Accepted drafts behind a stop are computed, but are no tokens.
        let num_filled = self.num_computed.min(self.num_tokens());
        (self.num_registered + 1) * block_size <= num_filled
    }

    /// The tokens of full block `column`.
    pub(crate) fn block_tokens(&self, column: u32, block_size: u32) -> &[i32] {
        &self.tokens[(column * block_size) as usize..][..block_size as usize]
    }

    /// The hash of the prefix that ends with full block `column`.
    pub(crate) fn block_hash(
        &mut self,
        column: u32,
        block_size: u32,
        hasher: &ChainHasher,
    ) -> BlockHash {
        let (column, num_hashed) = (column as usize, self.hashes.len());
        if column < num_hashed {
            return self.hashes[column];
        }
        if column == num_hashed && column < self.hashes.capacity() {
            // A decode's next block: one alone is worth no loop.
            let parent = self.hashes.last().copied().unwrap_or(self.salt);
            let hash = hasher.chain(parent, self.block_tokens(column as u32, block_size));
            self.hashes.push(hash);
            return hash;
        }
        self.hash_blocks(column as u32, block_size, hasher);
        self.hashes[column]
    }

    /// The hash of the prefix before full block `column`, whose own is known; the salt, before the first.
    pub(crate) fn parent_hash(&self, column: u32) -> BlockHash {
        match column {
            0 => self.salt,
            _ => self.hashes[column as usize - 1],
        }
    }

    /// Hashes full blocks up to `last` that are not hashed yet, so that `block_hash` is a comparison and a load.
    #[inline(never)]
    pub(crate) fn hash_blocks(&mut self, last: u32, block_size: u32, hasher: &ChainHasher) {
        if self.hashes.capacity() == 0 {
            self.reserve_hashes(block_size);
        }
        let mut parent = self.hashes.last().copied().unwrap_or(self.salt);
        let block_size = block_size as usize;
        let start = self.hashes.len() * block_size;
        let end = (last as usize + 1) * block_size;
        if end <= start {
            return;
        }
        let blocks = self.tokens[start..end].chunks_exact(block_size);
        self.hashes.extend(blocks.map(|tokens| {
            parent = hasher.chain(parent, tokens);
            parent
        }));
    }

    /// Gives up a residency: rows in flight that it planned no longer count for its KV.
    pub(crate) fn end_residency(&mut self) {
        self.residency = self.residency.wrapping_add(1);
        self.standing.num_shared_blocks = 0;
        self.num_computed = 0;
        self.num_planned = 0;
        self.num_registered = 0;
        self.num_sent = 0;
        self.has_sampled = false;
        self.plain_until = 0;
        self.quiet_until = 0;
        self.num_padding_owed = 0;
        self.row = PlannedRow::default();
    }
}

/// The bit of a sequence's stop filter that stands for `id`.
fn stop_bit(id: i32) -> u64 {
    1 << (id & 63)
}
