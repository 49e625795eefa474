//! An independent recount: every invariant from scratch, trusting no counter that it verifies.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;

use crate::accounts::AccountId;
use crate::ids::{BlockId, Seat, Slot};
use crate::kv::Kv;
use crate::policy::{Admission, KeyPolicy};
use crate::scheduler::Scheduler;
use crate::sequence::{PlannedRow, Sequence, State};

impl Scheduler {
    /// Recounts everything. O(pool + requests).
    ///
    /// # Panics
    /// An invariant is broken; the message names it.
    pub fn check(&self) {
        self.check_seats();
        self.check_queue();
        self.check_pool();
        self.check_in_flight();
        self.check_host_pool();
        for (slot, sequence) in self.arena.iter() {
            self.check_sequence(slot, sequence);
        }
    }

    fn check_seats(&self) {
        let mut taken = BTreeSet::new();
        let mut num_running = 0;
        for (_, sequence) in self.arena.iter() {
            num_running += u32::from(sequence.is_running());
            if let Some(seat) = sequence.seat() {
                assert!(taken.insert(seat.0), "seat {} has two holders", seat.0);
            }
        }
        assert_eq!(num_running, self.num_running, "running sequences");
        let mut listed = BTreeSet::new();
        for resident in self.residents.iter() {
            let slot = self
                .arena
                .slot(resident.handle)
                .expect("a resident has not ended");
            let sequence = &self.arena[slot];
            assert!(sequence.seat().is_some(), "a resident has a seat");
            assert_eq!(
                sequence.key, resident.key,
                "a resident's key is its sequence's"
            );
            assert!(listed.insert(slot), "a resident is listed once");
        }
        assert_eq!(listed.len(), taken.len(), "who has a seat is a resident");
        for seat in &self.free_seats {
            assert!(
                taken.insert(seat.0),
                "seat {} is free and held, or free twice",
                seat.0
            );
            assert!(self.kv.is_empty(*seat), "free seat {} holds blocks", seat.0);
        }
        assert_eq!(
            taken.len(),
            self.config.max_num_seqs as usize,
            "every seat is free or held"
        );
        assert!(
            self.lost.len() <= self.config.max_num_seqs as usize,
            "a seat is lost once a step"
        );
    }

    fn check_queue(&self) {
        let queued: BTreeSet<Slot> = self
            .queue
            .iter()
            .map(|turn| {
                let sequence = &self.arena[turn.slot];
                assert_eq!(
                    (sequence.key, self.line_account(sequence.standing.account)),
                    (turn.line_key(), turn.account),
                    "the queue's key is the sequence's"
                );
                turn.slot
            })
            .collect();
        let waiting: BTreeSet<Slot> = self
            .arena
            .iter()
            .filter(|(_, sequence)| sequence.state == State::Waiting)
            .map(|(slot, _)| slot)
            .collect();
        assert_eq!(queued, waiting, "the queue holds who waits");
        let num_parked = self
            .arena
            .iter()
            .filter(|(_, sequence)| sequence.state == State::Parked)
            .count();
        assert_eq!(num_parked, self.num_parked as usize, "parked sequences");
        self.check_sums();
        self.check_tier();
        self.check_adapters();
        let deadlines = self
            .arena
            .iter()
            .filter(|(_, sequence)| !sequence.is_ghost());
        let first = deadlines
            .filter_map(|(_, sequence)| sequence.standing.expires_us)
            .min();
        assert_eq!(self.next_expiry_us(), first, "the next to expire");
    }

    /// What admission and accounts add up.
    fn check_sums(&self) {
        let (mut num_limits, mut num_demanded, mut num_queued) = (0, 0, 0);
        let mut band_limits: BTreeMap<i64, u64> = BTreeMap::new();
        let mut open = alloc::vec![(0, 0); self.accounts.len()];
        for (slot, sequence) in self.arena.iter() {
            let standing = &sequence.standing;
            let most_tokens = sequence.num_prompt + sequence.max_output - 1;
            assert_eq!(
                standing.num_limit_blocks,
                self.config.held_blocks_for(most_tokens),
                "blocks that a request can need"
            );
            let is_waiting = sequence.state == State::Waiting;
            if sequence.is_running() {
                num_limits += u64::from(self.limit_blocks(slot));
                if self.config.key != KeyPolicy::Fcfs {
                    let band = band_limits.entry(sequence.key.band).or_default();
                    *band += u64::from(self.limit_blocks(slot));
                }
            }
            if is_waiting {
                num_demanded += u64::from(self.limit_blocks(slot));
                num_queued += u64::from(standing.num_queued_tokens);
            }
            if sequence.state == State::Parked {
                num_queued += u64::from(sequence.num_prompt);
            }
            let account = &mut open[standing.account.0 as usize];
            account.0 += u32::from(!sequence.is_ghost());
            account.1 += u32::from(is_waiting && self.is_fair());
        }
        assert_eq!(num_limits, self.num_limit_blocks, "limits of those running");
        let band_limits: Vec<(i64, u64)> = band_limits.into_iter().collect();
        assert_eq!(band_limits, self.band_limits, "limits by band");
        assert_eq!(
            num_demanded, self.num_demanded_blocks,
            "demand of the queue"
        );
        assert_eq!(num_queued, self.num_queued_tokens, "tokens of the queue");
        for (id, &(num_live, num_waiting)) in open.iter().enumerate() {
            let account = self.accounts.get(AccountId(id as u32));
            assert_eq!(account.num_live, num_live, "live requests of an account");
            assert_eq!(
                account.num_waiting, num_waiting,
                "an account's requests in line"
            );
        }
    }

    fn check_adapters(&self) {
        let mut running: BTreeMap<u64, u32> = BTreeMap::new();
        for (_, sequence) in self.arena.iter() {
            if sequence.is_running() && sequence.standing.adapter != 0 {
                *running.entry(sequence.standing.adapter).or_default() += 1;
            }
        }
        assert_eq!(&running, self.adapters.running(), "adapters that run");
        let max = self.config.max_adapters as usize;
        assert!(max == 0 || running.len() <= max, "adapters at once");
    }

    fn check_tier(&self) {
        let tier: BTreeSet<Slot> = self
            .ageing
            .tier
            .iter()
            .filter_map(|aged| self.arena.slot(aged.handle))
            .collect();
        let promoted: BTreeSet<Slot> = self
            .arena
            .iter()
            .filter(|(_, sequence)| !sequence.is_ghost() && sequence.standing.promotion.is_some())
            .map(|(slot, _)| slot)
            .collect();
        assert_eq!(tier, promoted, "the tier of the aged is who was promoted");
        assert!(
            self.ageing.tier.len() <= self.config.max_aged(),
            "the tier is a quarter of the seats"
        );
        for &slot in &promoted {
            assert!(self.arena[slot].key.is_aged(), "who is aged goes first");
        }
    }

    fn check_pool(&self) {
        let kv = &self.kv;
        let num_ever = kv.pool.num_ever();
        let mut num_holders = vec![0_u32; num_ever as usize + 1];
        for (_, sequence) in self.arena.iter() {
            let Some(seat) = sequence.seat() else {
                continue;
            };
            let (behind, held) = kv.table(seat).split_at(kv.num_behind(seat) as usize);
            assert!(
                behind.iter().all(|&block| block == BlockId(0)),
                "what was given back is block 0"
            );
            for &block in held {
                assert!(
                    block.0 >= 1 && block.0 <= num_ever,
                    "block {} is in the pool",
                    block.0
                );
                assert!(
                    kv.pool.forward(block).is_none(),
                    "block {} is being moved only in a plan",
                    block.0
                );
                num_holders[block.index()] += 1;
            }
        }
        assert_eq!(
            kv.num_entries(),
            num_holders.iter().sum::<u32>(),
            "entries of tables"
        );
        self.check_pins(&mut num_holders);
        let is_free = check_free_runs(kv);
        let mut is_cached = vec![false; num_holders.len()];
        let mut num_cached = 0;
        for block in kv.pool.cached() {
            assert!(
                !is_cached[block.index()],
                "block {} is cached twice",
                block.0
            );
            is_cached[block.index()] = true;
            num_cached += 1;
        }
        assert_eq!(num_cached, kv.pool.num_cached(), "cached blocks");
        let (mut num_in_all, mut num_beyond) = (0, 0);
        for block in (1..=num_ever).map(BlockId) {
            let at = block.index();
            let held = num_holders[at];
            assert_eq!(
                kv.pool.num_holders(block),
                held,
                "holders of block {}",
                block.0
            );
            let states = [is_free[at], is_cached[at], held > 0];
            let num_states = states.iter().filter(|&&is_so| is_so).count();
            assert!(num_states <= 1, "block {} is free, cached or held", block.0);
            let is_registered = kv.cache.is_registered(block);
            assert!(
                !(is_free[at] && is_registered),
                "free block {} can be found",
                block.0
            );
            assert!(
                is_registered || !is_cached[at],
                "cached block {} cannot be found",
                block.0
            );
            let is_beyond = block.0 > self.config.num_blocks;
            assert!(
                !(is_beyond && is_cached[at]),
                "cached block {} is within the limit",
                block.0
            );
            num_in_all += num_states as u32;
            num_beyond += u32::from(is_beyond && held > 0);
        }
        assert_eq!(
            num_in_all,
            self.config.num_blocks + num_beyond,
            "free + cached + held = total"
        );
        assert_eq!(
            kv.pool.num_blocks(),
            self.config.num_blocks + num_beyond,
            "the total is the limit, and what is held beyond it"
        );
        assert_eq!(kv.pool.limit(), self.config.num_blocks, "the limit");
        check_cache(kv, num_ever);
    }

    /// A pin holds each of its blocks once, in the pool.
    fn check_pins(&self, num_holders: &mut [u32]) {
        let mut pinned = BTreeSet::new();
        for &block in self.pins.iter().flatten() {
            assert!(
                block.0 >= 1 && block.0 <= self.config.num_blocks,
                "pinned block {} is within the limit",
                block.0
            );
            pinned.insert(block);
            num_holders[block.index()] += 1;
        }
        assert_eq!(
            pinned.len() as u32,
            self.num_pinned_blocks(),
            "pinned blocks"
        );
        assert!(
            pinned.iter().all(|&block| self.pins.contains(block)),
            "who is pinned is known"
        );
        assert_eq!(self.pins.last(), pinned.last().copied(), "the last pinned");
    }

    /// Each block of the host's memory is free, or of one sequence that waits, or pinned by one step.
    fn check_host_pool(&self) {
        let mut blocks: Vec<u32> = self.host.free().collect();
        assert_eq!(
            blocks.len(),
            self.host.num_free() as usize,
            "free host blocks"
        );
        for (_, sequence) in self.arena.iter() {
            let swapped = &sequence.swapped;
            blocks.extend(&swapped.blocks);
            assert!(
                swapped.is_empty() || sequence.state == State::Waiting,
                "who has KV on the host waits"
            );
            let is_written = |step| self.steps.contains(step);
            assert!(
                swapped.step.is_none_or(is_written),
                "a copy is there, or in flight"
            );
            let end = self.config.blocks_for(swapped.num_tokens);
            assert!(
                swapped.is_empty() || swapped.blocks.len() as u32 == end - swapped.first,
                "a copy is of whole blocks"
            );
        }
        for (_, swapped) in self.steps.iter().flat_map(|step| &step.swapped_in) {
            blocks.extend(&swapped.blocks);
            assert_eq!(swapped.step, None, "what is copied back was confirmed");
        }
        blocks.sort_unstable();
        assert!(
            blocks.iter().copied().eq(0..self.config.num_swap_blocks),
            "each host block is somewhere, once"
        );
    }

    fn check_in_flight(&self) {
        assert!(
            self.steps.len() <= self.config.depth as usize,
            "steps in flight are at most depth"
        );
        let mut counts: BTreeMap<u64, (u32, u32, u32)> = BTreeMap::new();
        for row in self.steps.iter().flat_map(|step| &step.rows) {
            if row.kind != crate::step::RowKind::Padding {
                let count = counts.entry(row.handle.to_bits()).or_default();
                count.0 += 1;
                count.1 += u32::from(row.max_ids);
                count.2 += u32::from(row.max_ids > 1);
            }
        }
        for (slot, sequence) in self.arena.iter() {
            let expected = counts
                .get(&self.arena.handle(slot).to_bits())
                .copied()
                .unwrap_or_default();
            let actual = (
                sequence.num_rows_in_flight,
                sequence.num_pending,
                sequence.num_draft_rows_in_flight,
            );
            assert_eq!(actual, expected, "rows, samples and draft rows in flight");
        }
    }

    /// What one comparison decides for a plan or a commit, recounted.
    fn check_shortcuts(&self, sequence: &Sequence) {
        let is_current = sequence.is_running() && sequence.num_draft_rows_in_flight == 0;
        if sequence.num_planned < sequence.plain_until {
            assert!(
                is_current && sequence.has_sampled && !sequence.host_masked,
                "a plain decode"
            );
            assert!(
                sequence.max_output_in_flight() < sequence.max_output,
                "a plain decode may have another token"
            );
            assert!(
                sequence.num_planned < sequence.num_sent * self.config.block_size,
                "a plain decode's next token has its place"
            );
        }
        if sequence.num_tokens() < sequence.quiet_until {
            let fills_block = self.config.enable_prefix_caching
                && (sequence.num_registered + 1) * self.config.block_size <= sequence.num_tokens();
            assert!(
                is_current && sequence.confinement.is_none() && !fills_block,
                "a token that is only appended"
            );
            assert!(
                sequence.num_output() + 1 < sequence.max_output,
                "a token that is not the last"
            );
        }
    }

    /// What was given back is seen by no later row, and what is kept is bounded.
    fn check_window(&self, slot: Slot, sequence: &Sequence, seat: Seat) {
        let num_behind = self.kv.num_behind(seat);
        let handle = self.arena.handle(slot);
        // Drafts may all be rejected.
        let num_doubtful: u32 = self
            .steps
            .iter()
            .flat_map(|step| &step.rows)
            .filter(|row| row.handle == handle && row.residency == sequence.residency)
            .map(|row| u32::from(row.max_ids).saturating_sub(1))
            .sum();
        let next = sequence.num_planned - num_doubtful;
        assert!(
            num_behind <= self.config.num_blocks_behind(next),
            "{num_behind} blocks were given back of a sequence that goes on from {next}"
        );
        assert!(
            self.config.window == 0 || self.kv.num_held(seat) <= self.limit_blocks(slot),
            "a sequence holds what its window and a row lie in"
        );
    }

    fn check_sequence(&self, slot: Slot, sequence: &Sequence) {
        assert!(
            sequence.standing.num_limit_blocks + self.num_pinned_blocks() <= self.config.num_blocks,
            "an accepted request fits beside what is pinned"
        );
        let num_tokens = sequence.num_tokens();
        assert_eq!(sequence.row, PlannedRow::default(), "no plan is being made");
        // A ghost has ended, perhaps amid drafts that were right.
        assert!(
            sequence.is_ghost() || sequence.num_computed <= num_tokens,
            "computed ≤ tokens"
        );
        assert!(
            sequence.num_computed <= sequence.num_planned,
            "computed ≤ planned"
        );
        assert!(
            sequence.is_ghost() || sequence.num_output() < sequence.max_output,
            "a sequence at its limit has ended"
        );
        self.check_shortcuts(sequence);
        let Some(seat) = sequence.seat() else {
            assert_eq!(
                sequence.num_planned, 0,
                "slot {}: who has no seat has no KV",
                slot.0
            );
            return;
        };
        let num_needed = self.config.blocks_for(sequence.num_planned);
        let num_entries = self.kv.len(seat);
        let num_reserved = match self.config.admission {
            // Blocks for drafts that were rejected stay.
            _ if self.config.contiguous => self.config.max_blocks_per_seq(),
            Admission::Peak | Admission::Reserve | Admission::Optimistic => {
                self.config.max_drafts.div_ceil(self.config.block_size) * self.config.depth
            }
            Admission::StaticGang | Admission::StaticPadded => self.config.max_blocks_per_seq(),
        };
        assert!(
            num_needed <= num_entries && num_entries <= num_needed + num_reserved,
            "ceil(planned / block size) ≤ entries ≤ that + reserved: {num_needed}, {num_entries}, {num_reserved}"
        );
        assert_eq!(
            sequence.num_sent, num_entries,
            "the runner was told the whole table"
        );
        self.check_window(slot, sequence, seat);
        if !sequence.is_ghost() && sequence.has_sampled {
            assert_eq!(
                sequence.num_planned + 1,
                num_tokens + sequence.num_pending,
                "a decode has one token to compute"
            );
        }
        if self.config.contiguous {
            let is_run = |pair: &[BlockId]| pair[0].0 + 1 == pair[1].0;
            assert!(
                self.kv.table(seat).windows(2).all(is_run),
                "a sequence is one run"
            );
        }
        // A block that others can find, and that this sequence claims as its prefix, holds this sequence's tokens.
        for column in self.kv.num_behind(seat)..sequence.num_registered {
            let block = self.kv.table(seat)[column as usize];
            if self.kv.cache.is_registered(block) {
                assert_eq!(
                    self.kv.cache.tokens(block),
                    sequence.block_tokens(column, self.config.block_size),
                    "a registered block's tokens are its holder's"
                );
            }
        }
    }
}

/// Which blocks are free: in runs that do not touch, each listed by its length and tagged at both ends.
fn check_free_runs(kv: &Kv) -> Vec<bool> {
    let mut runs: Vec<(BlockId, u32)> = kv.pool.free_runs().collect();
    runs.sort_unstable();
    for pair in runs.windows(2) {
        assert!(
            pair[0].0.0 + pair[0].1 < pair[1].0.0,
            "free runs do not touch: {pair:?}"
        );
    }
    kv.pool.check_tags(&runs);
    let mut is_free = vec![false; kv.pool.num_ever() as usize + 1];
    let mut num_free = 0;
    for &(first, len) in &runs {
        assert!(
            first.0 + len - 1 <= kv.pool.limit(),
            "free blocks are within the limit"
        );
        is_free[first.index()..][..len as usize].fill(true);
        num_free += len;
    }
    assert_eq!(num_free, kv.pool.num_free(), "free blocks");
    is_free
}

fn check_cache(kv: &Kv, num_blocks: u32) {
    let registered: Vec<BlockId> = (1..=num_blocks)
        .map(BlockId)
        .filter(|&block| kv.cache.is_registered(block))
        .collect();
    assert_eq!(
        registered.len(),
        kv.cache.num_registered() as usize,
        "registered blocks"
    );
    for block in registered {
        let found = kv.cache.find(kv.cache.hash(block), kv.cache.tokens(block));
        assert_eq!(
            found,
            Some(block),
            "a registered block is found by its hash"
        );
    }
}
