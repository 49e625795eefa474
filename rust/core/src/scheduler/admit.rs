//! The walk over prefills: residents go on, and newcomers enter, in the order of (band, resident first, key).

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use super::Scheduler;
use super::forecast::Outlook;
use super::pass::MAX_BLOCKED;
use super::victim::Need;
use crate::cost::Size;
use crate::event::EventKind;
use crate::ids::{BlockId, Seat, Slot};
use crate::kv::Kv;
use crate::policy::{Admission, KeyPolicy, share};
use crate::prefix_cache::ChainHasher;
use crate::queue::Turn;
use crate::sequence::{Sequence, State};

/// What came of a try to admit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Entry {
    /// It has a seat.
    Taken,
    /// Its blocks are not there: others of its band may pass it.
    Blocked,
    /// It waits for the tier of the aged, and not in line.
    Passed,
    /// Nobody behind it may enter in this plan.
    Closed,
}

impl Scheduler {
    pub(super) fn walk_prefills(&mut self) {
        let mut next_resident = 0;
        let mut cursor = None;
        // While the pool shrinks, what comes free in it is for those who must move there.
        let mut is_open = !self.config.admission.is_static()
            && (!self.is_shrinking() || self.quarantine.active().is_some());
        while self.pass.num_left > 0 {
            let resident = self.pass.prefills.get(next_resident).copied();
            let newcomer = if is_open {
                self.next_candidate(cursor)
            } else {
                None
            };
            let is_resident_first = |slot: Slot| {
                newcomer.is_none_or(|turn: Turn| self.arena[slot].key.band <= turn.band)
            };
            match (resident, newcomer) {
                (Some(slot), _) if is_resident_first(slot) => {
                    next_resident += 1;
                    // It may have made room for a better one, or ended its prompt and owe padding alone.
                    if self.arena[slot].seat().is_some() {
                        self.continue_prefill(slot, self.pass.prefills.len() - next_resident);
                    }
                }
                (_, Some(turn)) => {
                    cursor = Some(turn);
                    is_open = self.may_pass(&turn) && {
                        let num_behind = self.pass.prefills.len() - next_resident;
                        let entry = self.try_admit(&turn, num_behind);
                        self.line_stays_open(&turn, entry)
                    };
                }
                (_, None) => break,
            }
        }
        self.top_up();
    }

    /// The next in line behind `after`: of the queue, or of the group in quarantine.
    fn next_candidate(&mut self, after: Option<Turn>) -> Option<Turn> {
        if self.quarantine.active().is_none() {
            self.place_lines();
            return self.queue.next_after(after.as_ref());
        }
        let turn_of = |slot: Slot| {
            let (key, standing) = (self.arena[slot].key, &self.arena[slot].standing);
            Turn {
                band: key.band,
                place: 0,
                score: key.score,
                arrival: key.arrival,
                account: self.line_account(standing.account),
                slot,
            }
        };
        self.quarantine
            .active_members()
            .iter()
            .map(|handle| turn_of(handle.slot()))
            .find(|turn| {
                let is_waiting = self.arena[turn.slot].state == State::Waiting;
                is_waiting && after.is_none_or(|after| *turn > after)
            })
    }

    /// Whether the request at `turn` may enter before those that are blocked.
    fn may_pass(&self, turn: &Turn) -> bool {
        self.pass.blocked.first().is_none_or(|&first| {
            self.arena[first].key.band == turn.band && !self.free_seats.is_empty()
        })
    }

    /// Whether those behind `turn` may be tried, after what came of it.
    fn line_stays_open(&mut self, turn: &Turn, entry: Entry) -> bool {
        match entry {
            Entry::Closed => return false,
            Entry::Passed => return true,
            Entry::Taken => {
                for i in 0..self.pass.blocked.len() {
                    let slot = self.pass.blocked[i];
                    self.arena[slot].standing.num_bypasses += 1;
                }
            }
            Entry::Blocked => self.pass.blocked.push(turn.slot),
        }
        let may_be_passed = |&slot: &Slot| {
            let sequence = &self.arena[slot];
            sequence.standing.num_bypasses < self.config.max_bypasses && !sequence.key.is_aged()
        };
        self.pass.blocked.is_empty()
            || self.config.key.may_bypass()
                && self.quarantine.active().is_none()
                && self.pass.blocked.len() < MAX_BLOCKED
                && self.pass.blocked.iter().all(may_be_passed)
    }

    /// Moves resident prefill `slot` forward, if there is a share for it; `num_behind` residents are behind it.
    fn continue_prefill(&mut self, slot: Slot, num_behind: usize) {
        let max_tokens = self.share_of(num_behind + self.num_open_newcomers());
        if !self.arena[slot].has_sampled {
            loop {
                self.find_hits(slot);
                let num_tokens = self.chunk(slot, max_tokens);
                if num_tokens == 0 || self.try_advance(slot, num_tokens) {
                    break;
                }
                if !self.make_room(slot) {
                    return;
                }
            }
        }
        self.pad(slot);
    }

    fn num_open_newcomers(&self) -> usize {
        if self.config.admission.is_static() {
            0
        } else {
            self.queue.len().min(self.free_seats.len())
        }
    }

    /// What one prefill may take of the budget while `num_behind` others may want some.
    fn share_of(&self, num_behind: usize) -> u32 {
        let open = self
            .config
            .max_partial_prefills
            .saturating_sub(self.pass.num_partial);
        let num_contenders = open.min(num_behind as u32 + 1).max(1);
        share(self.pass.num_left, num_contenders, self.config.block_size)
    }

    /// How many tokens `slot` computes next, behind `pass.hits`: all it has, or whole blocks of its share, or none.
    fn chunk(&self, slot: Slot, max_tokens: u32) -> u32 {
        let sequence = &self.arena[slot];
        let start = self.pass.resume_at;
        let num_tokens = sequence.num_tokens();
        let remaining = num_tokens - start;
        let most = match self.config.long_prefill_token_threshold {
            0 => self.pass.num_left,
            threshold => self
                .pass
                .num_left
                .min(threshold.saturating_sub(sequence.row.count)),
        };
        let most = if self.config.step_target_us > 0 {
            self.affordable(start, most)
        } else {
            most
        };
        if remaining <= most.min(max_tokens) {
            return remaining;
        }
        if self.pass.num_partial >= self.config.max_partial_prefills && sequence.row.count == 0 {
            return if remaining <= most { remaining } else { 0 };
        }
        let most = most.min(max_tokens);
        let aligned = (start + most) / self.config.block_size * self.config.block_size;
        if aligned > start {
            aligned - start
        } else {
            most
        }
    }

    /// Of up to `most` tokens from `start` on, as many as the step's target leaves time for; the first prefill of a step
    /// gets a block's worth in any case.
    #[cold] // as everything that only a target asks for
    fn affordable(&self, start: u32, most: u32) -> u32 {
        let least = if self.pass.prefill_rows.is_empty() {
            self.config.block_size.min(most)
        } else {
            0
        };
        let left = self.pass.cost_left;
        self.cost.affordable(start, most, left).max(least)
    }

    /// A row of `count` tokens that ends at `end` takes its part of the step's target.
    #[cold]
    fn spend_time(&mut self, count: u32, end: u32) {
        let cost = self.cost.cost(Size::of(count, end));
        self.pass.cost_left = (self.pass.cost_left - cost).max(0);
    }

    /// Lists in `pass.hits` the blocks with which `slot` can go on without computing.
    fn find_hits(&mut self, slot: Slot) {
        self.look_up(slot);
        self.find_swapped(slot);
    }

    fn clear_hits(&mut self) {
        self.pass.hits.clear();
        self.pass.num_behind = 0;
    }

    /// Those of the prefix cache.
    fn look_up(&mut self, slot: Slot) {
        self.clear_hits();
        let block_size = self.config.block_size;
        let sequence = &mut self.arena[slot];
        let held = sequence.seat().map_or(0, |seat| self.kv.len(seat));
        let is_at_block_edge = sequence.num_planned == held * block_size;
        if !self.config.enable_prefix_caching
            || self.config.admission.is_static()
            || !sequence.reads_prefix_cache
            || !is_at_block_edge
        {
            return;
        }
        // The last token is always computed: its logits are wanted.
        let mut last = (sequence.num_tokens() - 1) / block_size;
        if sequence.seat().is_some() {
            last = last
                .min(held + (self.layout.max_blocks_per_seq - self.pass.num_hit_changes) as u32);
        }
        if self.config.window > 0 {
            self.find_window(slot, held, last);
            return;
        }
        for column in held..last {
            let Some(block) = self.find_block(slot, column) else {
                break;
            };
            self.pass.hits.push(block);
        }
    }

    /// The block in which full block `column` of `slot` can be found.
    pub(super) fn find_block(&mut self, slot: Slot, column: u32) -> Option<BlockId> {
        let block_size = self.config.block_size;
        let sequence = &mut self.arena[slot];
        let hash = sequence.block_hash(column, block_size, &self.hasher);
        let tokens = sequence.block_tokens(column, block_size);
        self.kv.cache.find(hash, tokens)
    }

    /// Blocks that a reservation could take beside `pass.hits`.
    fn num_available_beside_hits(&self) -> u32 {
        let is_cached = |block| block != BlockId(0) && self.kv.pool.num_holders(block) == 0;
        let num_cached_hits = self
            .pass
            .hits
            .iter()
            .filter(|&&block| is_cached(block))
            .count();
        self.kv.num_available() - num_cached_hits as u32
    }

    /// Takes `pass.hits`, and computes up to `num_tokens` behind them, as far as blocks are available; `false`, and no
    /// change, where there are none at all.
    fn try_advance(&mut self, slot: Slot, num_tokens: u32) -> bool {
        let block_size = self.config.block_size;
        let sequence = &self.arena[slot];
        let seat = sequence.seat().expect("a resident has a seat");
        let num_hits = self.pass.hits.len() as u32;
        let num_shared = self.num_shared_hits();
        let start = self.pass.resume_at;
        let first = match sequence.row.count {
            0 => start,
            _ => sequence.row.start,
        };
        if self.config.window > 0 {
            self.release_behind(slot, seat, first);
            self.settle_debt(slot, seat);
        }
        let num_given = num_hits - self.num_copied() + self.num_available_beside_hits();
        let reach = (self.kv.len(seat) + num_given) * block_size;
        if reach <= start {
            return false;
        }
        let end = (start + num_tokens).min(reach);
        self.push_hits(slot, seat);
        self.kv
            .try_reserve(seat, self.config.blocks_for(end))
            .expect("what is available was counted");
        self.settle_debt(slot, seat);
        let num_hit_tokens = (num_hits - self.num_copied()) * block_size;
        self.tally.num_prefix_hit_tokens += i64::from(num_hit_tokens);

        let sequence = &mut self.arena[slot];
        let is_new_row = sequence.row.count == 0;
        if num_hits > 0 {
            sequence.standing.num_shared_blocks += num_shared;
            sequence.num_registered = start / block_size;
            sequence.num_computed += start - sequence.num_planned;
            if sequence.num_sent > 0 {
                self.pass.num_hit_changes += num_hits as usize;
            }
        }
        let is_resident = sequence.num_sent > 0;
        if is_new_row {
            sequence.row.start = start;
            self.pass.prefill_rows.push(slot);
        }
        sequence.row.is_reached = true;
        sequence.row.count += end - start;
        sequence.num_planned = end;
        if sequence.num_unplanned() == 0 {
            sequence.has_sampled = true;
        } else if is_new_row {
            self.pass.num_partial += 1;
        }
        self.pass.num_left -= end - start;
        if self.config.step_target_us > 0 {
            self.spend_time(end - start, end);
        }
        if num_hits > 0 && is_resident {
            self.refund_hits(slot, num_hits * block_size);
        }
        self.register_planned(slot, seat);
        true
    }

    /// Makes the full blocks that this plan fills with known tokens findable at once.
    fn register_planned(&mut self, slot: Slot, seat: Seat) {
        if !self.config.enable_prefix_caching {
            return;
        }
        let block_size = self.config.block_size;
        let sequence = &mut self.arena[slot];
        let end = sequence.num_planned / block_size;
        if end <= sequence.num_registered {
            return;
        }
        sequence.hash_blocks(end - 1, block_size, &self.hasher);
        for column in sequence.num_registered..end {
            let filled = &mut self.pass.filled;
            register_known(&mut self.kv, filled, &self.hasher, sequence, seat, column);
        }
        sequence.num_registered = end;
    }

    /// The padded baseline: a prompt that is through is followed by padding up to the gang's longest.
    fn pad(&mut self, slot: Slot) {
        let sequence = &mut self.arena[slot];
        if sequence.num_padding_owed == 0 || !sequence.has_sampled {
            return;
        }
        let num_padding = sequence.num_padding_owed.min(self.pass.num_left);
        if num_padding == 0 {
            return;
        }
        sequence.num_padding_owed -= num_padding;
        sequence.row.num_padding = num_padding;
        self.pass.num_left -= num_padding;
        if sequence.row.count == 0 {
            self.pass.prefill_rows.push(slot);
        }
    }

    /// Gives what is left of the budget to prefills that shared it.
    fn top_up(&mut self) {
        for i in 0..self.pass.prefill_rows.len() {
            let slot = self.pass.prefill_rows[i];
            if self.pass.num_left == 0 {
                return;
            }
            if self.arena[slot].has_sampled {
                continue;
            }
            self.find_hits(slot);
            if !self.pass.hits.is_empty() {
                // Another has planned them since: they are found by the next chunk, for this one's row cannot skip them.
                self.pass.hits.clear();
                continue;
            }
            let num_tokens = self.chunk(slot, self.pass.num_left);
            if num_tokens > 0 {
                self.try_advance(slot, num_tokens);
            }
        }
    }

    /// Admits or resumes the request at `turn`, all or nothing.
    fn try_admit(&mut self, turn: &Turn, num_residents_behind: usize) -> Entry {
        let slot = turn.slot;
        if self.is_worn(slot) && self.quarantine.active().is_none() {
            return Entry::Passed;
        }
        let sequence = &self.arena[slot];
        // Its tokens still in flight belong to its prompt now.
        if sequence.num_rows_in_flight > 0
            || sequence.preempted_in == self.pass.serial
            || self.is_being_swapped(slot)
        {
            return Entry::Closed;
        }
        let num_columns = self.config.blocks_for(if self.config.contiguous {
            self.arena[slot].most_tokens()
        } else {
            self.arena[slot].num_tokens()
        });
        let (need, may_find_more) = self.need(slot, num_columns);
        // One that was preempted keeps its place, and so what comes free.
        let in_vain = if need.has_seat && !self.arena[slot].was_admitted {
            Entry::Blocked
        } else {
            Entry::Closed
        };
        let displaces = match self.outlook(slot, &need) {
            Outlook::Fits => false,
            Outlook::Later => return Entry::Closed,
            Outlook::Exceeds if self.may_displace(slot) && self.fits_beside_equals(slot, &need) => {
                true
            }
            Outlook::Exceeds => return in_vain,
        };
        if need.num_shared > 0 || may_find_more {
            self.look_up(slot);
        } else {
            self.clear_hits();
        }
        self.find_swapped(slot);
        if !self.begins_with_shared(need.num_shared) {
            // Something in the middle was lost: the next plan counts from the first block on.
            self.arena[slot].standing.num_held_blocks = 0;
            return Entry::Closed;
        }
        if self.may_wait_for_block(slot) {
            return Entry::Passed;
        }
        let max_tokens =
            self.share_of(num_residents_behind + self.num_open_newcomers().saturating_sub(1));
        let num_tokens = self.chunk(slot, max_tokens);
        let num_table_blocks = self.pass.num_gained_blocks + num_columns as usize;
        if num_tokens == 0
            || num_table_blocks > self.layout.capacity_gained_blocks
            || !self.has_room_to_swap_in()
        {
            return Entry::Closed;
        }
        if displaces && !self.displace_for(slot, need) {
            return in_vain;
        }
        if self.config.contiguous && !self.finds_run(num_columns) {
            return Entry::Closed;
        }
        let num_blocks = self.num_blocks_at_once(num_columns);
        self.note_entry(slot, self.num_shared_hits());
        let seat = self.seat_newcomer(turn, self.pass.resume_at);
        if self.config.contiguous {
            self.kv
                .try_reserve_run(seat, num_blocks)
                .expect("a run was found");
        } else {
            self.arena[slot].row.debt = num_blocks;
            self.pass.debt += num_blocks;
        }
        self.pass.num_gained_blocks += num_columns as usize;
        let has_advanced = self.try_advance(slot, num_tokens);
        assert!(has_advanced, "an admission was counted to fit");
        Entry::Taken
    }

    /// What `slot` needs to enter, with a table of `num_columns` for the tokens that it has; and whether it may find more
    /// blocks than others hold. Nothing is looked up for it yet, so where there is a window, all that it sees counts.
    fn need(&mut self, slot: Slot, num_columns: u32) -> (Need, bool) {
        let (num_shared, may_find_more) = self.num_held_blocks_of(slot);
        let is_confined = self.quarantine.active().is_some();
        let is_reserved = self.config.admission == Admission::Reserve && !is_confined;
        let need = Need {
            num_blocks: if is_reserved {
                self.limit_blocks(slot) - num_shared
            } else {
                self.config.held_columns(num_columns) - num_shared
            },
            num_shared,
            debt: if is_confined {
                0
            } else if is_reserved {
                self.num_outstanding_blocks() as u32
            } else {
                self.pass.debt
            },
            watermark: if is_confined || is_reserved {
                0
            } else {
                self.config.watermark_blocks
            },
            num_available: self.kv.num_available(),
            has_seat: !self.free_seats.is_empty(),
            has_adapter: self.has_adapter_room(slot),
        };
        (need, may_find_more)
    }

    /// Of `pass.hits`, the blocks that others hold.
    fn num_shared_hits(&self) -> u32 {
        let held = |&&block: &&BlockId| self.kv.pool.num_holders(block) > 0;
        self.pass.hits.iter().filter(held).count() as u32
    }

    /// Whether others hold the first `num_shared` of `pass.hits`.
    fn begins_with_shared(&self, num_shared: u32) -> bool {
        let first = self.pass.hits.get(..num_shared as usize);
        let is_held = |&block: &BlockId| self.kv.pool.num_holders(block) > 0;
        first.is_some_and(|first| first.iter().all(is_held))
    }

    /// Whether `slot`, which could enter, had better wait: the block behind `pass.hits` is the one that a prefill of this
    /// plan goes on with, and will be found then. Only for so many plans of a wait.
    fn may_wait_for_block(&mut self, slot: Slot) -> bool {
        let column = self.pass.hits.len() as u32;
        let standing = &self.arena[slot].standing;
        let may_wait = self.config.key == KeyPolicy::Prefix
            && standing.num_prefix_waits < self.config.max_prefix_waits
            && self.pass.num_let_wait < MAX_BLOCKED
            && !self.arena[slot].key.is_aged()
            && self.quarantine.active().is_none()
            && self.num_copied() == 0
            && column < self.last_findable(slot);
        if !may_wait {
            return false;
        }
        let block_size = self.config.block_size;
        let wanted = self.arena[slot].block_hash(column, block_size, &self.hasher);
        for i in 0..self.pass.prefill_rows.len() {
            let prefill = &mut self.arena[self.pass.prefill_rows[i]];
            let is_open = !prefill.has_sampled
                && prefill.num_planned / block_size == column
                && (column + 1) * block_size <= prefill.num_tokens();
            if is_open && prefill.block_hash(column, block_size, &self.hasher) == wanted {
                self.arena[slot].standing.num_prefix_waits += 1;
                self.pass.num_let_wait += 1;
                return true;
            }
        }
        false
    }

    /// Gives a waiting sequence a seat.
    fn seat_newcomer(&mut self, turn: &Turn, num_hit_tokens: u32) -> Seat {
        let slot = turn.slot;
        let seat = self.free_seats.pop().expect("a seat was found free");
        let handle = self.arena.handle(slot);
        self.dequeue(slot);
        if !self.arena[slot].was_admitted {
            self.charge_prompt(slot, num_hit_tokens);
        }
        self.num_limit_blocks += u64::from(self.limit_blocks(slot));
        self.adapters.enter(self.arena[slot].standing.adapter);
        let sequence = &mut self.arena[slot];
        sequence.key = turn.key();
        sequence.state = State::Running(seat);
        sequence.allocate_output(self.config.block_size);
        let kind = if sequence.was_admitted {
            self.tally.num_resumed += 1;
            EventKind::Resumed
        } else {
            self.tally.num_admitted += 1;
            sequence.was_admitted = true;
            EventKind::Admitted
        };
        self.events
            .push(handle, kind, num_hit_tokens.into(), self.next_step as i64);
        self.residents.add(sequence.key, handle);
        self.join_band(slot);
        self.num_running += 1;
        self.pass.gained.push(slot);
        seat
    }

    /// The static baselines: a gang enters an empty batch, each with the most blocks that any of it can need.
    pub(super) fn admit_gang(&mut self) {
        if !self.residents.is_empty() {
            return;
        }
        let (mut longest_prompt, mut longest_output, mut num_rows) = (0, 0, 0);
        // Listed first: under the fair policy each that is charged moves those behind it.
        let mut gang = Vec::with_capacity(self.config.max_num_seqs as usize);
        let mut cursor = None;
        let mut adapters = BTreeSet::new();
        while num_rows < self.config.max_num_seqs {
            let Some(at) = self.next_candidate(cursor) else {
                break;
            };
            let sequence = &self.arena[at.slot];
            if sequence.num_rows_in_flight > 0 {
                break;
            }
            let (adapter, max) = (sequence.standing.adapter, self.config.max_adapters as usize);
            if max > 0 && adapter != 0 {
                adapters.insert(adapter);
                if adapters.len() > max {
                    break;
                }
            }
            let prompt = longest_prompt.max(sequence.num_tokens());
            let output = longest_output.max(sequence.max_output - sequence.num_output());
            let num_blocks = self.gang_blocks(prompt, output);
            if u64::from(num_rows + 1) * u64::from(num_blocks) > u64::from(self.kv.num_available())
            {
                break;
            }
            (longest_prompt, longest_output) = (prompt, output);
            num_rows += 1;
            cursor = Some(at);
            gang.push(at);
        }
        let is_padded = self.config.admission == Admission::StaticPadded;
        let num_blocks = self.gang_blocks(longest_prompt, longest_output);
        for at in gang {
            self.seat_newcomer(&at, 0);
            let sequence = &mut self.arena[at.slot];
            if is_padded {
                sequence.num_padding_owed = longest_prompt - sequence.num_tokens();
            }
            let seat = sequence.seat().expect("it was seated");
            self.kv
                .try_reserve(seat, num_blocks)
                .expect("the gang was counted to fit");
        }
        self.residents.settle();
    }

    /// Blocks that each of a gang reserves; the last output token is never computed.
    fn gang_blocks(&self, longest_prompt: u32, longest_output: u32) -> u32 {
        let num_tokens = longest_prompt + longest_output.saturating_sub(1);
        self.config
            .blocks_for(num_tokens)
            .min(self.config.max_blocks_per_seq())
    }
}

/// Makes full block `column`, which a plan fills with known tokens, findable, and notes it in `filled`.
#[inline(always)] // in the loop over a chunk's blocks
#[allow(clippy::inline_always, reason = "it is counted in instructions")]
pub(super) fn register_known(
    kv: &mut Kv,
    filled: &mut Vec<BlockId>,
    hasher: &ChainHasher,
    sequence: &mut Sequence,
    seat: Seat,
    column: u32,
) {
    let block_size = kv.cache.block_size();
    let hash = sequence.block_hash(column, block_size, hasher);
    let tokens = sequence.block_tokens(column, block_size);
    if let Some(block) = kv.register(seat, column, hash, tokens) {
        filled.push(block);
        if kv.events.are_kept() {
            kv.tell_stored(block, sequence.parent_hash(column));
        }
    }
}
