//! Getting in line and out of it: keys and accounts.

use super::Scheduler;
use crate::accounts::AccountId;
use crate::ids::Slot;
use crate::policy::{Admission, Facts, Key, KeyPolicy, Policy, Reads, rank};
use crate::queue::Turn;

/// Waiting requests whose cached prefix is looked up again in each plan, under [`KeyPolicy::Prefix`].
const NUM_REFRESHED: usize = 3;

impl Scheduler {
    pub(crate) fn is_fair(&self) -> bool {
        self.config.key == KeyPolicy::Fair
    }

    /// Puts a sequence that waits in line, in the place that its policy gives it.
    pub(super) fn enqueue(&mut self, slot: Slot) {
        if self.is_fair() {
            self.place_lines();
            let account = self.arena[slot].standing.account;
            let is_back = self.accounts.get(account).num_waiting == 0;
            let least = if is_back {
                self.queue.least_place()
            } else {
                None
            };
            self.accounts.join(account, least);
        }
        let turn = self.turn(slot);
        self.arena[slot].key = turn.line_key();
        self.insert(slot, &turn);
        self.note_change(slot);
    }

    fn insert(&mut self, slot: Slot, turn: &Turn) {
        self.queue.insert(turn);
        let sequence = &mut self.arena[slot];
        self.num_demanded_blocks += u64::from(sequence.standing.num_limit_blocks);
        sequence.standing.num_queued_tokens = sequence.num_tokens();
        self.num_queued_tokens += u64::from(sequence.standing.num_queued_tokens);
    }

    /// Takes a sequence out of line.
    pub(super) fn dequeue(&mut self, slot: Slot) {
        let sequence = &self.arena[slot];
        let (account, key) = (sequence.standing.account, sequence.key);
        self.num_demanded_blocks -= u64::from(sequence.standing.num_limit_blocks);
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
        let (policy, standing) = (self.config.key, &self.arena[slot].standing);
        let (priority, arrival) = (standing.priority, standing.arrival);
        let account = self.line_account(standing.account);
        if let Some(promotion) = standing.promotion {
            let key = Key::aged(promotion, arrival);
            return Turn {
                band: key.band,
                place: 0,
                score: key.score,
                arrival: key.arrival,
                account,
                slot,
            };
        }
        let score = match policy {
            KeyPolicy::Own => standing.score,
            KeyPolicy::Fcfs | KeyPolicy::Priority | KeyPolicy::Fair => 0,
            policy => policy.score(&self.facts(slot, policy.reads())),
        };
        Turn {
            band: policy.band(priority),
            place: match policy {
                KeyPolicy::Fair => self.accounts.get(account).counter,
                _ => 0,
            },
            score: rank(score),
            arrival,
            account,
            slot,
        }
    }

    /// What a policy that `reads` this may know of `slot`.
    pub(super) fn facts(&mut self, slot: Slot, reads: Reads) -> Facts {
        let sequence = &self.arena[slot];
        let (standing, num_output) = (sequence.standing, sequence.num_output());
        let (num_prompt, max_output) = (sequence.num_prompt, sequence.max_output);
        let num_preemptions = sequence.num_preemptions;
        Facts {
            handle: self.arena.handle(slot),
            priority: standing.priority,
            tenant: self.accounts.get(standing.account).tenant,
            adapter: standing.adapter,
            arrival: standing.arrival,
            submitted_us: standing.submitted_us,
            due_us: standing.due_us(num_output),
            expires_us: standing.expires_us.unwrap_or(i64::MAX as u64),
            num_prompt_tokens: num_prompt,
            num_output_tokens: num_output,
            max_output_tokens: max_output,
            num_expected_tokens: standing.num_expected,
            num_remaining: if reads.num_remaining {
                self.predicted_output(slot, num_output) - num_output
            } else {
                0
            },
            num_uncached: if reads.num_uncached {
                self.num_uncached(slot)
            } else {
                0
            },
            num_preemptions,
        }
    }

    /// Whether lengths are learned, for order or admission.
    pub(super) fn predicts(&self) -> bool {
        self.config.admission == Admission::Peak
            || matches!(self.config.key, KeyPolicy::Sjf | KeyPolicy::Own)
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

    /// Tokens of `slot`, which waits, that the prefix cache does not hold. The search goes on from where the last one
    /// ended, and so costs what has changed since.
    fn num_uncached(&mut self, slot: Slot) -> u32 {
        let last = self.last_findable(slot);
        let mut num_found = self.arena[slot].standing.num_found_blocks.min(last);
        while num_found > 0 && self.find_block(slot, num_found - 1).is_none() {
            num_found -= 1;
        }
        while num_found < last && self.find_block(slot, num_found).is_some() {
            num_found += 1;
        }
        self.arena[slot].standing.num_found_blocks = num_found;
        self.arena[slot].num_tokens() - num_found * self.config.block_size
    }

    /// Leading blocks of `slot`, which waits, that can be found and that others hold: what need not come free for it.
    /// Who holds a block of a prefix holds those before it, so the search goes on from where the last one ended, and
    /// costs what has changed since; not even a long cached prompt that does not fit costs more.
    /// Says as well whether there may be more that can be found. Where there is a window, it is not the leading ones that
    /// matter, and who holds a block may have given back those before it: none is counted.
    pub(super) fn num_held_blocks_of(&mut self, slot: Slot) -> (u32, bool) {
        if self.config.window > 0 {
            return (0, true);
        }
        let last = self.last_findable(slot);
        let mut num_held = self.arena[slot].standing.num_held_blocks.min(last);
        while num_held > 0 && self.held_block(slot, num_held - 1) != Some(true) {
            num_held -= 1;
        }
        let mut edge = None;
        while num_held < last {
            edge = self.held_block(slot, num_held);
            if edge != Some(true) {
                break;
            }
            num_held += 1;
        }
        self.arena[slot].standing.num_held_blocks = num_held;
        (num_held, edge.is_some())
    }

    /// Whether others hold full block `column` of `slot`, if it can be found.
    fn held_block(&mut self, slot: Slot, column: u32) -> Option<bool> {
        self.find_block(slot, column)
            .map(|block| self.kv.pool.num_holders(block) > 0)
    }

    /// Leading blocks that `slot`, which waits, may find. The last token is always computed: its logits are wanted.
    pub(super) fn last_findable(&self, slot: Slot) -> u32 {
        let sequence = &self.arena[slot];
        let may_find = self.config.enable_prefix_caching
            && !self.config.admission.is_static()
            && sequence.reads_prefix_cache;
        if may_find {
            (sequence.num_tokens() - 1) / self.config.block_size
        } else {
            0
        }
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
            if self.turn(turn.slot) != turn {
                self.requeue(turn.slot);
            }
        }
    }
}
