//! Who waits, in key order. Where order is by account: lines, one a band and account, each in the order of (score, arrival),
//! and the order of lines; else one line of all. Insert, remove and "the next after" are O(log n); an account that moves
//! takes its lines along, O(log lines) each, whatever their length.

use alloc::collections::{BTreeMap, BTreeSet};
use core::ops::Bound;

use crate::accounts::AccountId;
use crate::ids::Slot;
use crate::policy::{AGED_BAND, Key};

/// Where a request waits. Under a fair policy the account places its lines; else all share account 0, at place 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Turn {
    pub(crate) band: i64,
    /// Of the line among those of its band.
    pub(crate) place: u64,
    pub(crate) score: u64,
    pub(crate) arrival: u64,
    pub(crate) account: AccountId,
    pub(crate) slot: Slot,
}

impl Turn {
    /// How the request stands in its line.
    pub(crate) fn line_key(&self) -> Key {
        Key {
            band: self.band,
            score: self.score,
            arrival: self.arrival,
        }
    }

    /// The key with which the request would take a seat.
    pub(crate) fn key(&self) -> Key {
        Key {
            band: self.band,
            // One of them says nothing: a line has a place, or its requests have scores.
            score: self.place.wrapping_add(self.score),
            arrival: self.arrival,
        }
    }
}

#[derive(Debug, Default)]
struct Line {
    place: u64,
    order: BTreeSet<(u64, u64, Slot)>,
}

#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    /// Of all, where accounts have no lines of their own.
    line: BTreeSet<Turn>,
    has_lines: bool,
    lines: BTreeMap<(AccountId, i64), Line>,
    /// The lines by band and place; those of one place by who is first in them.
    order: BTreeSet<(i64, u64, u64, u64, AccountId)>,
    /// Requests in lines of accounts.
    len: usize,
}

impl WaitQueue {
    /// An empty queue; `has_lines` says whether accounts have lines of their own.
    pub(crate) fn new(has_lines: bool) -> Self {
        Self {
            has_lines,
            ..Self::default()
        }
    }

    /// `place` is that of the account, and the same for all its lines.
    pub(crate) fn insert(&mut self, turn: &Turn) {
        if !self.has_lines {
            assert!(self.line.insert(*turn), "a request waits once");
            return;
        }
        let (account, band) = (turn.account, turn.band);
        let line = self.lines.entry((account, band)).or_default();
        let old = entry(account, band, line);
        line.place = turn.place;
        let is_new = line.order.insert((turn.score, turn.arrival, turn.slot));
        assert!(is_new, "a request waits once");
        let new = entry(account, band, line);
        self.relist(old, new);
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, account: AccountId, key: Key, slot: Slot) {
        if !self.has_lines {
            let turn = Turn {
                band: key.band,
                place: 0,
                score: key.score,
                arrival: key.arrival,
                account,
                slot,
            };
            let was_there = self.line.remove(&turn);
            assert!(was_there, "a waiting request is in the queue");
            return;
        }
        let line = self
            .lines
            .get_mut(&(account, key.band))
            .expect("a waiting request has a line");
        let old = entry(account, key.band, line);
        let was_there = line.order.remove(&(key.score, key.arrival, slot));
        assert!(was_there, "a waiting request is in the queue");
        let new = entry(account, key.band, line);
        if new.is_none() {
            self.lines.remove(&(account, key.band));
        }
        self.relist(old, new);
        self.len -= 1;
    }

    /// The account has another place among those of its bands; aged requests keep theirs.
    pub(crate) fn place(&mut self, account: AccountId, place: u64) {
        let mut after = Bound::Excluded((account, AGED_BAND));
        // A line's entry is changed in another map, so the lines are found one after another.
        while let Some((&at, line)) = self
            .lines
            .range_mut((after, Bound::Included((account, i64::MAX))))
            .next()
        {
            after = Bound::Excluded(at);
            if line.place != place {
                let old = entry(account, at.1, line);
                line.place = place;
                let new = entry(account, at.1, line);
                self.relist(old, new);
            }
        }
    }

    fn relist(&mut self, old: Option<ListEntry>, new: Option<ListEntry>) {
        if old == new {
            return;
        }
        if let Some(old) = old {
            self.order.remove(&old);
        }
        if let Some(new) = new {
            self.order.insert(new);
        }
    }

    /// The first behind `after`, or the first of all. Of a line that stands where `after` does, those behind it in turn.
    pub(crate) fn next_after(&self, after: Option<&Turn>) -> Option<Turn> {
        if !self.has_lines {
            return match after {
                None => self.line.first().copied(),
                Some(&after) => {
                    let behind = (Bound::Excluded(after), Bound::Unbounded);
                    self.line.range(behind).next().copied()
                }
            };
        }
        let Some(after) = after else {
            return self.order.first().map(|first| self.head(first));
        };
        let in_line = self
            .lines
            .get(&(after.account, after.band))
            .filter(|line| line.place == after.place)
            .and_then(|line| {
                let at = (after.score, after.arrival, after.slot);
                let next = line
                    .order
                    .range((Bound::Excluded(at), Bound::Unbounded))
                    .next();
                next.map(|&(score, arrival, slot)| Turn {
                    score,
                    arrival,
                    slot,
                    ..*after
                })
            });
        let at = (
            after.band,
            after.place,
            after.score,
            after.arrival,
            after.account,
        );
        let other = self
            .order
            .range((Bound::Excluded(at), Bound::Unbounded))
            .next()
            .map(|first| self.head(first));
        match (in_line, other) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn head(&self, listed: &ListEntry) -> Turn {
        let &(band, place, score, arrival, account) = listed;
        let line = &self.lines[&(account, band)];
        let slot = line.order.first().expect("a listed line is not empty").2;
        Turn {
            band,
            place,
            score,
            arrival,
            account,
            slot,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len + self.line.len()
    }

    /// The band of the first.
    pub(crate) fn best_band(&self) -> Option<i64> {
        let first = self.line.first().map(|first| first.band);
        first.or_else(|| self.order.first().map(|first| first.0))
    }

    /// The least place of a line of a band that a priority gives; O(bands).
    pub(crate) fn least_place(&self) -> Option<u64> {
        // Most often there is one band.
        match (self.order.first()?, self.order.last()?) {
            (first, last) if first.0 == last.0 && first.0 != AGED_BAND => return Some(first.1),
            _ => {}
        }
        let mut least: Option<u64> = None;
        let mut behind = AGED_BAND;
        while let Some(first) = self
            .order
            .range((
                Bound::Excluded((behind, u64::MAX, u64::MAX, u64::MAX, AccountId(u32::MAX))),
                Bound::Unbounded,
            ))
            .next()
        {
            least = Some(least.map_or(first.1, |least| least.min(first.1)));
            behind = first.0;
        }
        least
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Turn> {
        let of_lines = self.lines.iter().flat_map(|(&(account, band), line)| {
            line.order.iter().map(move |&(score, arrival, slot)| Turn {
                band,
                place: line.place,
                score,
                arrival,
                account,
                slot,
            })
        });
        self.line.iter().copied().chain(of_lines)
    }
}

/// Band, place, and the score and arrival of the first.
type ListEntry = (i64, u64, u64, u64, AccountId);

fn entry(account: AccountId, band: i64, line: &Line) -> Option<ListEntry> {
    let &(score, arrival, _) = line.order.first()?;
    Some((band, line.place, score, arrival, account))
}
