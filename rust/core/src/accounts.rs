//! What is kept of each tenant: its virtual token counter, and the lengths of its outputs.
//!
//! A counter grows by what the tenant was served, in weighted tokens. A tenant that comes back after it had nothing in
//! line is lifted to the least counter of those in line: an absence earns no credit. All operations are O(1), a new
//! tenant O(log tenants) but for the scan that finds an account to use again when there are many.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::predict::Lengths;

/// An account's number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct AccountId(pub(crate) u32);

/// Accounts from which on one that is idle and in nobody's debt is used again.
const MANY: usize = 1024;

#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) tenant: u64,
    /// Weighted tokens served, and lifts.
    pub(crate) counter: u64,
    /// Requests that have not ended.
    pub(crate) num_live: u32,
    /// Of those, requests in line.
    pub(crate) num_waiting: u32,
    /// It is in the list of those that have moved.
    has_moved: bool,
    lengths: Option<Box<Lengths>>,
}

impl Account {
    #[inline]
    fn note_move(&mut self, id: AccountId, moved: &mut Vec<AccountId>) {
        // One that has no lines needs no new places for them.
        if self.num_waiting > 0 && !self.has_moved {
            self.has_moved = true;
            moved.push(id);
        }
    }
}

/// Accounts while nothing but charges comes.
pub(crate) struct Charges<'a> {
    entries: &'a mut [Account],
    moved: &'a mut Vec<AccountId>,
}

impl Charges<'_> {
    /// Adds weighted tokens to what the tenant was served; if it has lines, that they move is noted.
    #[inline]
    pub(crate) fn add<const NOTES: bool>(&mut self, id: AccountId, weighted: u64) {
        let account = &mut self.entries[id.0 as usize];
        account.counter += weighted;
        if NOTES {
            account.note_move(id, self.moved);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Accounts {
    entries: Vec<Account>,
    by_tenant: BTreeMap<u64, AccountId>,
    /// Whose counter has changed since the queue was told.
    moved: Vec<AccountId>,
    /// The counter of the tenant that left the line last, for a lift while nobody is in line.
    last_counter: u64,
}

impl Accounts {
    /// Opens a request of `tenant`.
    pub(crate) fn open(&mut self, tenant: u64) -> AccountId {
        let id = match self.by_tenant.get(&tenant) {
            Some(&id) => id,
            None => self.add(tenant),
        };
        self.entries[id.0 as usize].num_live += 1;
        id
    }

    fn add(&mut self, tenant: u64) -> AccountId {
        let account = Account {
            tenant,
            counter: 0,
            num_live: 0,
            num_waiting: 0,
            has_moved: false,
            lengths: None,
        };
        let floor = self.last_counter;
        let is_spare = |old: &Account| old.num_live == 0 && !old.has_moved && old.counter <= floor;
        let spare = if self.entries.len() < MANY {
            None
        } else {
            self.entries.iter().position(is_spare)
        };
        let id = if let Some(at) = spare {
            self.by_tenant.remove(&self.entries[at].tenant);
            self.entries[at] = account;
            AccountId(at as u32)
        } else {
            self.entries.push(account);
            AccountId(self.entries.len() as u32 - 1)
        };
        self.by_tenant.insert(tenant, id);
        id
    }

    /// A request has ended.
    pub(crate) fn close(&mut self, id: AccountId) {
        self.entries[id.0 as usize].num_live -= 1;
    }

    /// A request had `num_output` tokens, at least one; `has_ended` says that it wanted no more.
    pub(crate) fn learn(&mut self, id: AccountId, num_output: u32, has_ended: bool) {
        let lengths = &mut self.entries[id.0 as usize].lengths;
        let lengths = lengths.get_or_insert_with(|| Box::new(Lengths::new()));
        lengths.observe(num_output, has_ended);
    }

    /// Output tokens in all, as the tenant's lengths say, of a request that has `num_output`.
    pub(crate) fn predict(&self, id: AccountId, num_output: u32, max_output: u32) -> u32 {
        match &self.entries[id.0 as usize].lengths {
            Some(lengths) => lengths.predict(num_output, max_output),
            None => max_output,
        }
    }

    /// Adds weighted tokens to what the tenant was served.
    pub(crate) fn charge(&mut self, id: AccountId, weighted: u64) {
        self.charges().add::<true>(id, weighted);
    }

    /// For a loop over charges.
    #[inline]
    pub(crate) fn charges(&mut self) -> Charges<'_> {
        Charges {
            entries: &mut self.entries,
            moved: &mut self.moved,
        }
    }

    /// Takes back what was charged.
    pub(crate) fn refund(&mut self, id: AccountId, weighted: u64) {
        let account = &mut self.entries[id.0 as usize];
        account.counter = account.counter.saturating_sub(weighted);
        account.note_move(id, &mut self.moved);
    }

    /// One whose counter has changed since it was asked last.
    pub(crate) fn pop_moved(&mut self) -> Option<AccountId> {
        let id = self.moved.pop()?;
        self.entries[id.0 as usize].has_moved = false;
        Some(id)
    }

    /// A request gets in line; `least` is the least counter of those in line, if there are any.
    pub(crate) fn join(&mut self, id: AccountId, least: Option<u64>) {
        let floor = least.unwrap_or(self.last_counter);
        let account = &mut self.entries[id.0 as usize];
        account.num_waiting += 1;
        if account.num_waiting == 1 && account.counter < floor {
            account.counter = floor;
        }
    }

    /// A request leaves the line.
    pub(crate) fn leave(&mut self, id: AccountId) {
        let account = &mut self.entries[id.0 as usize];
        account.num_waiting -= 1;
        if account.num_waiting == 0 {
            self.last_counter = account.counter;
        }
    }

    pub(crate) fn get(&self, id: AccountId) -> &Account {
        &self.entries[id.0 as usize]
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}
