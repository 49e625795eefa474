//! What a plan knows while it is being made; its vectors are reused.

use alloc::vec::Vec;

use crate::host_pool::Swapped;
use crate::ids::{BlockId, Handle, Seat, Slot};
use crate::layout::StepLayout;
use crate::policy::VictimOrder;
use crate::step::RowInFlight;

/// Waiting requests that a plan tries in vain, at most.
pub(crate) const MAX_BLOCKED: usize = 8;

#[derive(Debug)]
pub(crate) struct Pass {
    /// A number of this plan's own, and none of a plan that is over.
    pub(crate) serial: u64,
    /// Rows of residents that decode, in key order; those withdrawn are dropped at the end. Until `plan_decodes` has
    /// written them they are what an earlier plan left.
    pub(crate) rows: Vec<RowInFlight>,
    /// Whether one of those is withdrawn.
    pub(crate) has_withdrawn: bool,
    /// Rows of decodes that are not plain, but for those of `grown`.
    pub(crate) special_rows: Vec<usize>,
    /// Whose row would be plain if the runner knew the block that it goes on in.
    pub(crate) grown: Vec<Slot>,
    /// The longest context of a plain row, or of those of `grown`.
    pub(crate) max_context: u32,
    /// Residents with prompt tokens to go, in key order.
    pub(crate) prefills: Vec<Slot>,
    /// Prefills that got a row, in the order of the walk.
    pub(crate) prefill_rows: Vec<Slot>,
    /// Seats gained.
    pub(crate) gained: Vec<Slot>,
    /// Blocks that this step fills and that can be found already.
    pub(crate) filled: Vec<BlockId>,
    /// Blocks that it moves, from and to. Like the three below, it is empty, or zero, but at the end of a plan.
    pub(crate) moves: Vec<(BlockId, BlockId)>,
    /// Whose blocks those are, and in which residency.
    pub(crate) moved: Vec<(Handle, u32)>,
    /// Table entries that the runner knows and that those moves change.
    pub(crate) changes: Vec<(Seat, u32, BlockId)>,
    /// Such entries that moves noted so far may change.
    pub(crate) num_move_changes: usize,
    /// An admission found enough free blocks, but no run of them.
    pub(crate) wants_run: bool,
    /// Contiguous mode: the runs held, by their first block.
    pub(crate) runs: Vec<(BlockId, Slot)>,
    /// Cached or planned blocks with which the prefill at hand could go on.
    pub(crate) hits: Vec<BlockId>,
    /// The first of those, which are block 0: they lie behind the window.
    pub(crate) num_behind: u32,
    /// Of the others, those that were found; the rest, block 0 too, are copied back from the host.
    pub(crate) num_found: u32,
    /// Where the prefill at hand goes on behind its hits.
    pub(crate) resume_at: u32,
    /// Blocks that this step copies to the host, and where to; like the three below, empty but in a plan.
    pub(crate) swap_out: Vec<(BlockId, u32)>,
    /// Whose those are.
    pub(crate) swapped_out: Vec<Handle>,
    /// Host blocks that it copies back, and where to.
    pub(crate) swap_in: Vec<(u32, BlockId)>,
    /// Whose those are, with all that they had in the host's memory.
    pub(crate) swapped_in: Vec<(Handle, Swapped)>,
    /// Tokens left of the budget.
    pub(crate) num_left: u32,
    /// What is left of the step's target for its time, where it has one.
    pub(crate) cost_left: i128,
    /// Blocks that resident prefills still need.
    pub(crate) debt: u32,
    pub(crate) num_partial: u32,
    pub(crate) num_gained_blocks: usize,
    /// Waiting requests that did not fit, and that others of their band may pass.
    pub(crate) blocked: Vec<Slot>,
    /// Requests that could have entered, and wait for a block that another computes.
    pub(crate) num_let_wait: usize,
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
            rows: Vec::with_capacity(layout.max_rows),
            has_withdrawn: false,
            special_rows: Vec::with_capacity(seats),
            grown: Vec::with_capacity(seats),
            max_context: 0,
            prefills: Vec::with_capacity(seats),
            prefill_rows: Vec::with_capacity(seats),
            gained: Vec::with_capacity(seats),
            filled: Vec::with_capacity(max_filled),
            moves: Vec::new(),
            moved: Vec::new(),
            changes: Vec::new(),
            num_move_changes: 0,
            wants_run: false,
            runs: Vec::new(),
            hits: Vec::with_capacity(layout.max_blocks_per_seq),
            num_behind: 0,
            num_found: 0,
            resume_at: 0,
            swap_out: Vec::new(),
            swapped_out: Vec::new(),
            swap_in: Vec::new(),
            swapped_in: Vec::new(),
            num_left: 0,
            cost_left: 0,
            debt: 0,
            num_partial: 0,
            num_gained_blocks: 0,
            blocked: Vec::with_capacity(MAX_BLOCKED),
            num_let_wait: 0,
            num_hit_changes: 0,
            victims: None,
            victim_list: Vec::with_capacity(seats),
            best: None,
            num_certain: None,
        }
    }

    /// The plan is made: from here on a row that it gave is in flight.
    pub(crate) fn end(&mut self) {
        self.serial += 1;
    }

    pub(crate) fn begin(&mut self, budget: u32) {
        self.serial += 1;
        self.has_withdrawn = false;
        self.special_rows.clear();
        self.grown.clear();
        self.max_context = 0;
        self.prefills.clear();
        self.prefill_rows.clear();
        self.gained.clear();
        self.filled.clear();
        self.wants_run = false;
        self.num_left = budget;
        self.debt = 0;
        self.num_partial = 0;
        self.num_gained_blocks = 0;
        self.blocked.clear();
        self.num_let_wait = 0;
        self.num_hit_changes = 0;
        self.victims = None;
        self.best = None;
        self.num_certain = None;
    }
}
