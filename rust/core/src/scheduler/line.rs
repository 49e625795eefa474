//! Getting in line and out of it: keys and accounts.

use super::Scheduler;
use crate::accounts::AccountId;
use crate::ids::Slot;
use crate::policy::{Admission, Facts, Key, KeyPolicy, score};
use crate::queue::Turn;
use crate::step::RowInFlight;

/// Waiting requests whose cached prefix is looked up again in each plan, under [`KeyPolicy::Prefix`].
const NUM_REFRESHED: usize = 4;

impl Scheduler {
    pub(crate) fn is_fair(&self) -> bool {
        self.config.key == KeyPolicy::Fair
    }

    /// Puts a sequence that waits in line, in the place that its policy gives it.
    pub(super) fn enqueue(&mut self, slot: Slot) {
        self.arena[slot].standing.num_final_blocks = self.num_final_blocks(slot);
        if self.is_fair() {
            self.place_lines();
            let least = self.queue.least_place();
            self.accounts.join(self.arena[slot].standing.account, least);
        }
        let turn = self.turn(slot);
        self.arena[slot].key = turn.line_key();
        self.insert(slot, &turn);
    }

    fn insert(&mut self, slot: Slot, turn: &Turn) {
        self.queue.insert(turn);
        let sequence = &mut self.arena[slot];
        sequence.standing.num_queued_tokens = sequence.num_tokens();
        self.num_demanded_blocks += u64::from(sequence.standing.num_final_blocks);
        self.num_queued_tokens += u64::from(sequence.standing.num_queued_tokens);
    }

    /// Takes a sequence out of line.
    pub(super) fn dequeue(&mut self, slot: Slot) {
        let sequence = &self.arena[slot];
        let (account, key) = (sequence.standing.account, sequence.key);
        self.num_demanded_blocks -= u64::from(sequence.standing.num_final_blocks);
        self.num_queued_tokens -= u64::from(sequence.standing.num_queued_tokens);
        self.queue.remove(self.line_account(account), key, slot);
        if self.is_fair() {
            self.accounts.leave(account);
        }
    }

    /// Moves a sequence that waits to where its standing puts it now.
    pub(super) fn requeue(&mut self, slot: Slot) {
        let sequence = &self.arena[slot];
        let old = self.line_account(sequence.standing.account);
        self.queue.remove(old, sequence.key, slot);
        let turn = self.turn(slot);
        self.arena[slot].key = turn.line_key();
        self.queue.insert(&turn);
    }

    /// Whose line it is: only the fair policy has one an account.
    pub(crate) fn line_account(&self, account: AccountId) -> AccountId {
        if self.is_fair() {
            account
        } else {
            AccountId(0)
        }
    }

    /// The band that the priority of `slot` gives it, aged or not.
    pub(super) fn own_band(&self, slot: Slot) -> i64 {
        self.config.key.band(self.arena[slot].standing.priority)
    }

    /// Where the standing of `slot` puts it.
    pub(super) fn turn(&mut self, slot: Slot) -> Turn {
        let (policy, sequence) = (self.config.key, &self.arena[slot]);
        let standing = sequence.standing;
        let account = self.line_account(standing.account);
        if let Some(promotion) = standing.promotion {
            let key = Key::aged(promotion, standing.arrival);
            return Turn {
                band: key.band,
                place: 0,
                score: key.score,
                arrival: key.arrival,
                account,
                slot,
            };
        }
        let num_output = sequence.num_output();
        let facts = Facts {
            num_remaining: match policy {
                KeyPolicy::Sjf => self.predicted_output(slot, num_output) - num_output,
                _ => 0,
            },
            num_uncached: match policy {
                KeyPolicy::Prefix => self.num_uncached(slot),
                _ => 0,
            },
            due_us: standing.due_us(num_output),
        };
        Turn {
            band: policy.band(standing.priority),
            place: match policy {
                KeyPolicy::Fair => self.accounts.get(account).counter,
                _ => 0,
            },
            score: score(policy, &facts),
            arrival: standing.arrival,
            account,
            slot,
        }
    }

    /// Whether lengths are learned, for order or admission.
    pub(super) fn predicts(&self) -> bool {
        self.config.admission == Admission::Peak || self.config.key == KeyPolicy::Sjf
    }

    /// Output tokens that `slot` will have in all, if it has `num_output` by now: its hint, while that may be right, or
    /// what its tenant's lengths say.
    pub(super) fn predicted_output(&self, slot: Slot, num_output: u32) -> u32 {
        let sequence = &self.arena[slot];
        let (standing, max_output) = (&sequence.standing, sequence.max_output);
        if num_output >= max_output {
            return num_output;
        }
        if standing.num_expected > num_output {
            return standing.num_expected.min(max_output);
        }
        self.accounts
            .predict(standing.account, num_output, max_output)
    }

    fn num_final_blocks(&self, slot: Slot) -> u32 {
        if self.config.admission != Admission::Peak {
            return 0;
        }
        let num_output = self.arena[slot].num_output();
        let num_more = self.predicted_output(slot, num_output);
        self.config
            .blocks_for(self.arena[slot].num_prompt + num_more - 1)
    }

    /// Tokens of `slot`, which waits, that the prefix cache does not hold.
    fn num_uncached(&mut self, slot: Slot) -> u32 {
        let num_tokens = self.arena[slot].num_tokens();
        if !self.config.enable_prefix_caching || !self.arena[slot].reads_prefix_cache {
            return num_tokens;
        }
        let block_size = self.config.block_size;
        let last = (num_tokens - 1) / block_size;
        let mut num_found = 0;
        while num_found < last && self.find_block(slot, num_found).is_some() {
            num_found += 1;
        }
        num_tokens - num_found * block_size
    }

    /// Tells the queue which accounts have moved.
    pub(super) fn place_lines(&mut self) {
        while let Some(account) = self.accounts.pop_moved() {
            let entry = self.accounts.get(account);
            if entry.num_waiting > 0 {
                self.queue.place(account, entry.counter);
            }
        }
    }

    /// A first admission: what its prompt costs, but for what was found, is charged at once.
    pub(super) fn charge_prompt(&mut self, slot: Slot, num_hit_tokens: u32) {
        if self.is_fair() {
            let sequence = &self.arena[slot];
            let num_tokens = u64::from(sequence.num_tokens() - num_hit_tokens);
            let weighted = num_tokens * u64::from(self.config.fair_input_weight);
            self.accounts.charge(sequence.standing.account, weighted);
        }
    }

    /// Part of a prompt that was charged has been found since.
    pub(super) fn refund_hits(&mut self, slot: Slot, num_hit_tokens: u32) {
        let sequence = &self.arena[slot];
        if self.is_fair() && sequence.num_preemptions == 0 {
            let weighted = u64::from(num_hit_tokens) * u64::from(self.config.fair_input_weight);
            self.accounts.refund(sequence.standing.account, weighted);
        }
    }

    /// Charges the tokens that a step's rows sampled, but for those of requests that have ended.
    pub(super) fn charge_outputs(&mut self, rows: &[RowInFlight], num_ids: &[i32]) {
        let weight = u64::from(self.config.fair_output_weight);
        for (row, &num) in rows.iter().zip(num_ids) {
            let Some(sequence) = self.arena.get_mut(row.handle) else {
                continue;
            };
            if num > 0 && !sequence.is_ghost() {
                let account = sequence.standing.account;
                self.accounts.charge(account, weight * num as u64);
            }
        }
    }

    /// Looks up again what the cache holds of a few that wait, another few in each plan.
    pub(super) fn refresh_scores(&mut self) {
        if self.config.key != KeyPolicy::Prefix {
            return;
        }
        for _ in 0..NUM_REFRESHED.min(self.queue.len()) {
            let next = self.queue.next_after(self.refreshed.as_ref());
            let Some(turn) = next.or_else(|| self.queue.next_after(None)) else {
                return;
            };
            self.refreshed = Some(turn);
            self.requeue(turn.slot);
        }
    }
}
