//! What every request must have got by now, kept by rules of its own; the core's events are held against it.

use std::collections::BTreeMap;

use noria_core::{Config, Event, EventKind, FinishReason, flags};

use super::truth::{Ask, Truth};
use super::view::StepView;

/// Where events say that a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    New,
    Running,
    Preempted,
    Ended(FinishReason, u32),
}

#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) ask: Ask,
    pub(crate) max_output: u32,
    pub(crate) is_parked: bool,
    /// Output tokens that commits gave it.
    pub(crate) num_output: u32,
    pub(crate) end: Option<(FinishReason, u32)>,
    /// The same as events told it.
    pub(crate) phase: Phase,
    pub(crate) num_reported: u32,
    pub(crate) num_preemptions: u32,
    /// Output tokens that it had when it was preempted, each time.
    pub(crate) num_tokens_when_preempted: Vec<u32>,
    pub(crate) num_hit_tokens: u32,
    /// It was in a failed step, and must get past this position to be trusted again.
    pub(crate) suspect_until: Option<u32>,
}

impl Account {
    pub(crate) fn num_tokens(&self) -> u32 {
        self.ask.prompt.len() as u32 + self.num_output
    }

    pub(crate) fn is_live(&self) -> bool {
        self.end.is_none()
    }
}

/// What a commit must have done in all.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct CommitTotals {
    pub(crate) output: i64,
    pub(crate) wasted: i64,
    pub(crate) finished: i64,
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) accounts: BTreeMap<u64, Account>,
}

impl Ledger {
    pub(crate) fn open(&mut self, handle: u64, ask: &Ask, config: &Config) {
        let room = i64::from(config.max_model_len) - ask.prompt.len() as i64;
        let account = Account {
            ask: ask.clone(),
            max_output: ask.max_tokens.min(room) as u32,
            is_parked: ask.parked,
            num_output: 0,
            end: None,
            phase: Phase::New,
            num_reported: 0,
            num_preemptions: 0,
            num_tokens_when_preempted: Vec::new(),
            num_hit_tokens: 0,
            suspect_until: None,
        };
        assert!(
            self.accounts.insert(handle, account).is_none(),
            "a handle is never reused"
        );
    }

    pub(crate) fn live(&self) -> impl Iterator<Item = (u64, &Account)> {
        self.accounts
            .iter()
            .filter(|(_, account)| account.is_live())
            .map(|(&handle, account)| (handle, account))
    }

    pub(crate) fn end(&mut self, handle: u64, reason: FinishReason, num_output: u32) {
        let account = self.accounts.get_mut(&handle).expect("handle is known");
        assert!(account.end.replace((reason, num_output)).is_none());
        account.suspect_until = None;
    }

    /// Ends those whose time has come.
    pub(crate) fn expire(&mut self, now_us: u64) {
        for account in self.accounts.values_mut() {
            if account.is_live() && account.ask.expires_us.is_some_and(|at| at <= now_us) {
                account.end = Some((FinishReason::Expired, account.num_output));
                account.suspect_until = None;
            }
        }
    }

    /// Some request was in a failed step, and is not cleared yet.
    pub(crate) fn has_suspects(&self) -> bool {
        self.accounts
            .values()
            .any(|account| account.suspect_until.is_some())
    }

    pub(crate) fn commit(&mut self, view: &StepView, num_ids: &[i32], ids: &[i32]) -> CommitTotals {
        let mut totals = CommitTotals::default();
        let mut rest = ids;
        for (row, &num) in view.rows.iter().zip(num_ids) {
            let (ids, behind) = rest.split_at(num as usize);
            rest = behind;
            if row.has(flags::PADDING) || row.has(flags::GHOST) {
                continue;
            }
            let account = self.accounts.get_mut(&row.handle).expect("handle is known");
            let num_before = account.num_output;
            if account.is_live() {
                if row.max_ids() > 0 && ids.is_empty() {
                    account.end = Some((FinishReason::Error, account.num_output));
                    account.suspect_until = None;
                }
                if !ids.is_empty() || account.suspect_until <= Some(row.start + row.count) {
                    account.suspect_until = None;
                }
                account.take(ids);
                totals.finished += i64::from(!account.is_live());
            }
            let num_used = i64::from(account.num_output - num_before);
            totals.output += num_used;
            totals.wasted += i64::from(num) - num_used;
        }
        totals
    }

    /// The runner failed in a step; `is_confined` says whether the step held a quarantine group alone.
    pub(crate) fn fail(&mut self, view: &StepView, is_confined: bool) {
        let is_alone = view.sequence_rows().count() == 1;
        for row in view.sequence_rows() {
            let account = self.accounts.get_mut(&row.handle).expect("handle is known");
            if !account.is_live() {
                continue;
            }
            if is_confined && is_alone {
                account.end = Some((FinishReason::Error, account.num_output));
                account.suspect_until = None;
            } else {
                account.suspect_until = account.suspect_until.max(Some(row.start + row.count));
            }
        }
    }

    /// Takes in events, each of which must be one that its request may have now.
    pub(crate) fn hear(&mut self, events: &[Event], truths: &mut BTreeMap<u64, Truth>) {
        for event in events {
            let handle = event.handle.to_bits();
            let account = self
                .accounts
                .get_mut(&handle)
                .expect("events are of requests");
            let phase = account.phase;
            match event.kind {
                EventKind::Admitted => {
                    assert_eq!(phase, Phase::New, "{event:?}");
                    account.phase = Phase::Running;
                    account.num_hit_tokens += event.first as u32;
                }
                EventKind::Resumed => {
                    assert_eq!(phase, Phase::Preempted, "{event:?}");
                    account.phase = Phase::Running;
                    account.num_hit_tokens += event.first as u32;
                }
                EventKind::Preempted => {
                    assert_eq!(phase, Phase::Running, "{event:?}");
                    account.phase = Phase::Preempted;
                    account.num_preemptions += 1;
                    account.num_tokens_when_preempted.push(account.num_output);
                }
                EventKind::Token => {
                    assert!(
                        matches!(phase, Phase::Running | Phase::Preempted),
                        "{event:?} in {phase:?}"
                    );
                    assert_eq!(event.second, i64::from(account.num_reported), "{event:?}");
                    let position = account.ask.prompt.len() + event.second as usize;
                    let truth = truths
                        .get_mut(&handle)
                        .expect("handle is known")
                        .token(position);
                    assert_eq!(event.first, i64::from(truth), "{event:?}");
                    account.num_reported += 1;
                }
                EventKind::Finished => {
                    assert!(!matches!(phase, Phase::Ended(..)), "{event:?} in {phase:?}");
                    let reason = FinishReason::from_code(event.first as u8).expect("a reason");
                    account.phase = Phase::Ended(reason, event.second as u32);
                }
            }
        }
    }

    /// After a verb that reports: events have told all that is.
    pub(crate) fn check_reported(&self) {
        for (handle, account) in &self.accounts {
            assert_eq!(
                account.num_reported, account.num_output,
                "tokens told of {handle:#x}"
            );
            let told = match account.phase {
                Phase::Ended(reason, num_output) => Some((reason, num_output)),
                _ => None,
            };
            assert_eq!(told, account.end, "the end of {handle:#x}");
        }
    }
}

impl Account {
    /// Appends ids up to a stop.
    fn take(&mut self, ids: &[i32]) {
        for id in ids {
            self.num_output += 1;
            if self.ask.stop_ids.contains(id) {
                self.end = Some((FinishReason::Stop, self.num_output));
            } else if self.num_output == self.max_output {
                self.end = Some((FinishReason::Length, self.num_output));
            }
            if self.end.is_some() {
                self.suspect_until = None;
                return;
            }
        }
    }
}
