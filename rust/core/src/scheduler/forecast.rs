//! Admission by the peak that KV use will reach: who runs, how much longer, and what they then hold.
//!
//! When sequence `j` has `rest_j` tokens to go, all that run are in use until each has gone: between two ends use only
//! grows, so the peak is at an end. A block shared by several counts once, and as kept while anyone is left who found it.
//! All is looked at only where not even the largest sizes of all fit: O(running) for each request that is tried then.

use alloc::vec;
use alloc::vec::Vec;

use super::Scheduler;
use super::victim::Need;
use crate::ids::{Handle, Slot};
use crate::policy::{Admission, KeyPolicy};

/// One that runs, or would; its band is that of its priority until it has a seat.
#[derive(Clone, Copy, Debug)]
struct Member {
    handle: Handle,
    band: i64,
    /// Tokens that it will still add.
    rest: u32,
    /// Tokens of KV that it has, and that its known tokens will need.
    num_tokens: u32,
    /// Blocks for them, but for those that others held when it found them.
    num_own: u32,
    num_shared: u32,
}

#[derive(Debug)]
pub(crate) struct Forecast {
    /// The longest rest first.
    members: Vec<Member>,
    is_made: bool,
    /// Counts of places left in last blocks, as sums over ranges (a Fenwick tree).
    slack: Vec<u32>,
    /// When the next of those that would end together may enter; in sixty-fourths of a step.
    next_entry: u64,
}

/// Parts of a step in which entries are spaced.
const PARTS: u64 = 64;

impl Forecast {
    pub(crate) fn new(block_size: u32) -> Self {
        Self {
            members: Vec::new(),
            is_made: false,
            slack: vec![0; block_size as usize + 1],
            next_entry: 0,
        }
    }

    pub(crate) fn begin(&mut self) {
        self.is_made = false;
    }

    pub(crate) fn remove(&mut self, handle: Handle) {
        if self.is_made {
            self.members.retain(|member| member.handle != handle);
        }
    }

    fn insert(&mut self, member: Member) {
        let at = self
            .members
            .partition_point(|other| other.rest >= member.rest);
        self.members.insert(at, member);
    }

    /// The most blocks in use at any end, with `newcomer`, of those in bands up to `band`; `num_held` are in use when it
    /// has come.
    fn peak(&mut self, newcomer: &Member, band: i64, num_held: u32, block_size: u32) -> u32 {
        self.slack.fill(0);
        let counted = |member: &&Member| member.band <= band;
        let all_own = newcomer.num_own
            + self
                .members
                .iter()
                .filter(counted)
                .map(|member| member.num_own)
                .sum::<u32>();
        let at = self
            .members
            .partition_point(|other| other.rest >= newcomer.rest);
        let (longer, shorter) = self.members.split_at(at);
        let members = longer
            .iter()
            .filter(counted)
            .chain([newcomer])
            .chain(shorter.iter().filter(counted));
        let (mut num_present, mut num_own, mut num_shared) = (0, 0, 0);
        let mut peak = num_held;
        for member in members {
            num_present += 1;
            num_own += member.num_own;
            num_shared += member.num_shared;
            let slack = member.num_tokens.next_multiple_of(block_size) - member.num_tokens;
            count(&mut self.slack, slack);
            let (whole, part) = (member.rest / block_size, member.rest % block_size);
            let num_grown = num_present * whole + num_below(&self.slack, part);
            let num_gone = (all_own - num_own).saturating_sub(num_shared);
            peak = peak.max((num_held + num_grown).saturating_sub(num_gone));
        }
        peak
    }
}

/// Counts one with `slack` places left.
fn count(tree: &mut [u32], slack: u32) {
    let mut at = slack as usize + 1;
    while at < tree.len() {
        tree[at] += 1;
        at += at & at.wrapping_neg();
    }
}

/// Those with fewer than `part` places left.
fn num_below(tree: &[u32], part: u32) -> u32 {
    let (mut at, mut sum) = (part as usize, 0);
    while at > 0 {
        sum += tree[at];
        at &= at - 1;
    }
    sum
}

/// What a forecast says of a newcomer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outlook {
    /// All that run stay, and it fits.
    Fits,
    /// It would fit, but would end when others do: it waits its turn.
    Later,
    /// It does not fit beside all that run.
    Exceeds,
}

impl Scheduler {
    /// Blocks that `slot` can ever need.
    pub(crate) fn limit_blocks(&self, slot: Slot) -> u32 {
        self.arena[slot].standing.num_limit_blocks
    }

    /// Running `slot` counts in the band of its key from now on; O(bands), and of few. In order of arrival there are no
    /// bands of which one could displace another.
    #[inline]
    pub(super) fn join_band(&mut self, slot: Slot) {
        if self.config.key != KeyPolicy::Fcfs {
            self.add_to_band(slot);
        }
    }

    fn add_to_band(&mut self, slot: Slot) {
        let (band, num) = (self.arena[slot].key.band, self.limit_blocks(slot));
        let at = self.band_limits.partition_point(|limit| limit.0 < band);
        match self.band_limits.get_mut(at) {
            Some(limit) if limit.0 == band => limit.1 += u64::from(num),
            _ => self.band_limits.insert(at, (band, num.into())),
        }
    }

    #[inline]
    pub(super) fn leave_band(&mut self, slot: Slot) {
        if self.config.key != KeyPolicy::Fcfs {
            self.take_from_band(slot);
        }
    }

    fn take_from_band(&mut self, slot: Slot) {
        let (band, num) = (self.arena[slot].key.band, self.limit_blocks(slot));
        let at = self.band_limits.partition_point(|limit| limit.0 < band);
        self.band_limits[at].1 -= u64::from(num);
        if self.band_limits[at].1 == 0 {
            self.band_limits.remove(at);
        }
    }

    /// Blocks that those running may ever need beside those that they hold.
    pub(super) fn num_outstanding_blocks(&self) -> u64 {
        self.num_limit_blocks - u64::from(self.kv.num_entries())
    }

    /// Whether `slot`, with `need`, fits beside all that run, whatever band they are of.
    pub(super) fn outlook(&mut self, slot: Slot, need: &Need) -> Outlook {
        if !need.is_met(self.num_running) {
            return Outlook::Exceeds;
        }
        let is_confined = self.quarantine.active().is_some();
        // Contiguous sequences hold what they may grow to.
        let is_forecast = self.config.admission == Admission::Peak && !self.config.contiguous;
        if !is_forecast || self.num_running == 0 || is_confined {
            return Outlook::Fits;
        }
        let num_new = u64::from(self.limit_blocks(slot) - need.num_shared);
        let fits_at_most = self.num_outstanding_blocks() + num_new <= u64::from(need.num_available);
        if fits_at_most && (!self.is_early() || self.spacing(slot).is_none()) {
            return Outlook::Fits;
        }
        let newcomer = self.member_to_be(slot, need.num_shared);
        let peak = self.peak_with(&newcomer, need, i64::MAX);
        if peak > self.highest_peak(slot) {
            return Outlook::Exceeds;
        }
        if self.must_wait_its_turn(slot, peak) {
            return Outlook::Later;
        }
        Outlook::Fits
    }

    /// Whether `slot` would fit beside those that it may not displace; O(bands) where even their limits fit.
    pub(super) fn fits_beside_equals(&mut self, slot: Slot, need: &Need) -> bool {
        if self.config.admission != Admission::Peak || self.quarantine.active().is_some() {
            return true;
        }
        let band = self.own_band(slot);
        let up_to_band = self.band_limits.iter().take_while(|limit| limit.0 <= band);
        let limits: u64 = up_to_band.map(|limit| limit.1).sum();
        // What is pinned is nobody's, of any band.
        let highest = self
            .highest_peak(slot)
            .saturating_sub(self.num_pinned_blocks());
        if limits == 0 || limits + u64::from(self.limit_blocks(slot)) <= u64::from(highest) {
            return true;
        }
        let newcomer = self.member_to_be(slot, need.num_shared);
        let peak = self.peak_with(&newcomer, need, newcomer.band);
        peak <= highest
    }

    /// The peak up to which `slot` may enter; one that was preempted enters to stay.
    fn highest_peak(&self, slot: Slot) -> u32 {
        let percent = if self.arena[slot].was_admitted {
            100
        } else {
            self.config.peak_percent
        };
        let most = u64::from(self.config.num_blocks - self.config.watermark_blocks);
        (most * u64::from(percent) / 100) as u32
    }

    fn peak_with(&mut self, newcomer: &Member, need: &Need, band: i64) -> u32 {
        self.make_forecast();
        let num_held = if band == i64::MAX {
            self.config.num_blocks - need.num_available + need.debt + need.num_blocks
        } else {
            let counted = |member: &&Member| member.band <= band;
            let held = self.forecast.members.iter().filter(counted);
            held.map(|member| member.num_own).sum::<u32>() + newcomer.num_own
        };
        let block_size = self.config.block_size;
        self.forecast.peak(newcomer, band, num_held, block_size)
    }

    fn member_to_be(&self, slot: Slot, num_shared: u32) -> Member {
        let num_output = self.arena[slot].num_output();
        let predicted = self.predicted_output(slot, num_output);
        self.member(slot, predicted, num_shared)
    }

    fn member(&self, slot: Slot, predicted_output: u32, num_shared: u32) -> Member {
        let sequence = &self.arena[slot];
        let num_tokens = sequence.num_planned.max(sequence.num_tokens());
        let last = sequence.num_prompt + predicted_output - 1;
        let num_held = sequence.seat().map_or(0, |seat| self.kv.num_held(seat));
        let num_blocks = self.config.held_blocks_for(num_tokens).max(num_held);
        Member {
            handle: self.arena.handle(slot),
            band: if sequence.is_running() {
                sequence.key.band
            } else {
                self.own_band(slot)
            },
            rest: last.saturating_sub(num_tokens),
            num_tokens,
            num_own: num_blocks.saturating_sub(num_shared), // some were given back since
            num_shared,
        }
    }

    /// Lists all that run, once a plan; those admitted since are added one by one.
    fn make_forecast(&mut self) {
        if self.forecast.is_made {
            return;
        }
        self.forecast.is_made = true;
        self.forecast.members.clear();
        for i in 0..self.residents.len() {
            let resident = *self.residents.get(i);
            if !resident.has_left() {
                self.foresee(resident.handle.slot());
            }
        }
        for i in 0..self.pass.gained.len() {
            let slot = self.pass.gained[i];
            if self.arena[slot].is_running() {
                self.foresee(slot);
            }
        }
        self.forecast
            .members
            .sort_by_key(|member| core::cmp::Reverse(member.rest));
    }

    fn foresee(&mut self, slot: Slot) {
        let num_output = self.arena[slot].max_output_in_flight();
        let predicted = self.predicted_output(slot, num_output);
        let num_shared = self.arena[slot].standing.num_shared_blocks;
        let member = self.member(slot, predicted, num_shared);
        self.forecast.members.push(member);
    }

    /// A newcomer has a seat.
    pub(super) fn note_entry(&mut self, slot: Slot, num_shared: u32) {
        if self.config.admission != Admission::Peak {
            return;
        }
        if self.forecast.is_made {
            let mut member = self.member_to_be(slot, num_shared);
            member.band = self.arena[slot].key.band;
            self.forecast.insert(member);
        }
        if let Some(parts) = self.spacing(slot) {
            let now = self.next_step * PARTS;
            self.forecast.next_entry = self.forecast.next_entry.max(now) + parts;
        }
    }

    /// The time that `slot` should have for itself before the next like it enters, where that is worth while: where what
    /// a sequence holds at its end is more than half as much again as what it holds on average. Entries so spaced take as
    /// many blocks in a step as there are, and a tenth fewer.
    fn spacing(&self, slot: Slot) -> Option<u64> {
        let sequence = &self.arena[slot];
        let num_output = sequence.num_output();
        if 2 * sequence.num_tokens() >= sequence.max_output - num_output + 3 {
            return None; // by the rule below, whatever it is predicted to want
        }
        let predicted = u64::from(self.predicted_output(slot, num_output));
        let (num_tokens, life) = (
            u64::from(sequence.num_tokens()),
            predicted - u64::from(num_output),
        );
        let (last, average) = (num_tokens + life, num_tokens + life / 2);
        if 3 * average >= 2 * last {
            return None;
        }
        let num_blocks = self.config.num_blocks - self.num_pinned_blocks();
        let num_places = u64::from(num_blocks) * u64::from(self.config.block_size);
        Some(PARTS * 11 * life * average / (10 * num_places))
    }

    /// Whether the next entry of those that are spaced is not due yet.
    fn is_early(&self) -> bool {
        self.next_step * PARTS < self.forecast.next_entry
    }

    /// Whether `slot` would end together with others, while more wait than ever fit at once.
    fn must_wait_its_turn(&mut self, slot: Slot, peak: u32) -> bool {
        let has_quarter_free = u64::from(peak) * 4 <= u64::from(self.config.num_blocks);
        self.is_early()
            && self.config.peak_percent == 100
            && !has_quarter_free
            && self.exceeds_with_all_that_wait()
            && self.spacing(slot).is_some()
    }

    /// Whether all that run and wait will hold more at their ends than there is.
    fn exceeds_with_all_that_wait(&mut self) -> bool {
        self.make_forecast();
        let running: u64 = self
            .forecast
            .members
            .iter()
            .map(|member| u64::from(self.config.held_blocks_for(member.num_tokens + member.rest)))
            .sum();
        let num_blocks = self.config.num_blocks - self.num_pinned_blocks();
        running + self.num_demanded_blocks > u64::from(num_blocks)
    }
}
