//! What a plan knows while it is being made; its vectors are reused.

use alloc::vec::Vec;

use crate::ids::{BlockId, Handle, Slot};
use crate::layout::StepLayout;
use crate::policy::VictimOrder;

/// Waiting requests that a plan tries in vain, at most.
pub(crate) const MAX_BLOCKED: usize = 8;

#[derive(Debug)]
pub(crate) struct Pass {
    /// Counts plans.
    pub(crate) serial: u64,
    /// Residents that decode, in key order; until they are dropped, withdrawn ones have a row of count 0.
    pub(crate) decodes: Vec<Handle>,
    /// Whether one of those is withdrawn.
    pub(crate) has_withdrawn: bool,
    /// Rows of decodes that are not plain.
    pub(crate) special_rows: Vec<usize>,
    /// Residents with prompt tokens to go, in key order.
    pub(crate) prefills: Vec<Slot>,
    /// Prefills that got a row, in the order of the walk.
    pub(crate) prefill_rows: Vec<Slot>,
    /// Seats gained.
    pub(crate) gained: Vec<Slot>,
    /// Blocks that this step fills and that can be found already.
    pub(crate) filled: Vec<BlockId>,
    /// Cached or planned blocks with which the prefill at hand could go on.
    pub(crate) hits: Vec<BlockId>,
    /// Tokens left of the budget.
    pub(crate) num_left: u32,
    /// Blocks that resident prefills still need.
    pub(crate) debt: u32,
    pub(crate) num_partial: u32,
    pub(crate) num_gained_blocks: usize,
    /// Waiting requests that did not fit, and that others of their band may pass.
    pub(crate) blocked: Vec<Slot>,
    /// Table changes that hits of residents made.
    pub(crate) num_hit_changes: usize,
    /// Residents as victims, once anyone asked; from `next_victim` on some may still be.
    pub(crate) victims: Option<usize>,
    pub(crate) victim_list: Vec<(VictimOrder, Slot)>,
    /// The best key among residents, once anyone asked.
    pub(crate) best: Option<Slot>,
    /// Blocks certain to come free at a commit in flight, less those already waited for; once anyone asked.
    pub(crate) num_certain: Option<u32>,
}

impl Pass {
    pub(crate) fn new(layout: &StepLayout, max_filled: usize) -> Self {
        let seats = layout.max_num_seqs;
        Self {
            serial: 0,
            decodes: Vec::with_capacity(seats),
            has_withdrawn: false,
            special_rows: Vec::with_capacity(seats),
            prefills: Vec::with_capacity(seats),
            prefill_rows: Vec::with_capacity(seats),
            gained: Vec::with_capacity(seats),
            filled: Vec::with_capacity(max_filled),
            hits: Vec::with_capacity(layout.max_blocks_per_seq),
            num_left: 0,
            debt: 0,
            num_partial: 0,
            num_gained_blocks: 0,
            blocked: Vec::with_capacity(MAX_BLOCKED),
            num_hit_changes: 0,
            victims: None,
            victim_list: Vec::with_capacity(seats),
            best: None,
            num_certain: None,
        }
    }

    pub(crate) fn begin(&mut self, budget: u32) {
        self.serial += 1;
        self.decodes.clear();
        self.has_withdrawn = false;
        self.prefills.clear();
        self.prefill_rows.clear();
        self.gained.clear();
        self.filled.clear();
        self.num_left = budget;
        self.debt = 0;
        self.num_partial = 0;
        self.num_gained_blocks = 0;
        self.blocked.clear();
        self.num_hit_changes = 0;
        self.victims = None;
        self.best = None;
        self.num_certain = None;
    }
}
