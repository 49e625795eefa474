//! A policy of one's own: it is asked for a score once for each request that gets in line, before the next plan. The scores
//! enter a recording as an update, so that a replay needs no policy.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::Scheduler;
use crate::config::{Config, ConfigError};
use crate::ids::{Handle, Slot};
use crate::policy::{Facts, KeyPolicy, Policy, Reads};
use crate::sequence::State;

#[derive(Debug, Default)]
pub(crate) struct Own {
    policy: Option<Box<dyn Policy>>,
    /// Requests that have got in line since they were asked about last; some may have left it.
    changed: Vec<Handle>,
}

impl Scheduler {
    /// A scheduler under [`KeyPolicy::Own`], scored by `policy`.
    ///
    /// # Errors
    /// As [`Scheduler::new`].
    pub fn with_policy(mut config: Config, policy: Box<dyn Policy>) -> Result<Self, ConfigError> {
        config.key = KeyPolicy::Own;
        let mut scheduler = Self::new(config)?;
        scheduler.own.policy = Some(policy);
        Ok(scheduler)
    }

    /// A request gets in line.
    pub(super) fn note_change(&mut self, slot: Slot) {
        if self.config.key == KeyPolicy::Own {
            let handle = self.arena.handle(slot);
            self.own.changed.push(handle);
        }
    }

    /// Asks the policy, if there is one, about those that have got in line.
    pub(super) fn score_changed(&mut self, now_us: u64) {
        if self.own.changed.is_empty() {
            return;
        }
        let Some(policy) = self.own.policy.take() else {
            return;
        };
        let facts = self.take_changed(policy.reads());
        let (handles, scores): (Vec<Handle>, Vec<i64>) = facts
            .iter()
            .map(|facts| (facts.handle, policy.score(facts)))
            .unzip();
        self.own.policy = Some(policy);
        self.set_scores(&handles, &scores, now_us);
    }

    /// Under [`KeyPolicy::Own`]: what is known of those that have got in line since this was asked last, and wait still.
    /// Each is to be given a score before the next plan; until then it has 0, or the last one that it was given.
    pub fn take_changed(&mut self, reads: Reads) -> Vec<Facts> {
        let mut told = Vec::with_capacity(self.own.changed.len());
        for handle in core::mem::take(&mut self.own.changed) {
            if let Some(slot) = self.waiting(handle) {
                told.push(self.facts(slot, reads));
            }
        }
        told
    }

    /// Requests that [`Scheduler::take_changed`] would tell of; some may have left the line.
    pub fn num_changed(&self) -> usize {
        self.own.changed.len()
    }

    /// Update: the place in its band of each request that waits; others are ignored, as are all but under
    /// [`KeyPolicy::Own`]. O(log waiting) each.
    ///
    /// # Panics
    /// There is not one score a handle.
    pub fn set_scores(&mut self, handles: &[Handle], scores: &[i64], now_us: u64) {
        assert_eq!(handles.len(), scores.len(), "one score a handle");
        if let Some(recorder) = &mut self.recorder {
            recorder.scores(handles, scores, now_us);
        }
        self.events.begin_silent();
        if self.config.key != KeyPolicy::Own {
            return;
        }
        for (&handle, &score) in handles.iter().zip(scores) {
            if let Some(slot) = self.waiting(handle) {
                self.arena[slot].standing.score = score;
                self.requeue(slot);
            }
        }
    }

    fn waiting(&self, handle: Handle) -> Option<Slot> {
        self.arena
            .slot(handle)
            .filter(|&slot| self.arena[slot].state == State::Waiting)
    }
}
