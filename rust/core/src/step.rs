//! Steps in flight: a ring of at most `depth`, each with what a commit or a failure needs.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::cost::Size;
use crate::host_pool::Swapped;
use crate::ids::{BlockId, Handle, StepId};
use crate::record::StepRecord;

/// What a step remembers of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowInFlight {
    pub(crate) handle: Handle,
    pub(crate) residency: u32,
    /// Where the row ends; an upper bound behind drafts.
    pub(crate) end: u32,
    pub(crate) count: u32,
    /// Ids that it may sample; at most `max_drafts + 1`.
    pub(crate) max_ids: u16,
    pub(crate) kind: RowKind,
}

impl RowInFlight {
    /// What is where no row has been written yet.
    pub(crate) const NONE: Self = Self {
        handle: Handle::NONE,
        residency: 0,
        end: 0,
        count: 0,
        max_ids: 0,
        kind: RowKind::Padding,
    };
}

/// What a row is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)] // fills up its place in a row, so that a constant row is written at once
pub(crate) enum RowKind {
    /// A live sequence's.
    Live,
    /// A finished one's, still computed.
    Ghost,
    /// No one's.
    Padding,
}

#[derive(Debug)]
pub(crate) struct StepInFlight {
    pub(crate) id: StepId,
    pub(crate) rows: Vec<RowInFlight>,
    /// Blocks that the step fills and that can be found already.
    pub(crate) filled: Vec<BlockId>,
    /// Where it moves blocks from, and to.
    pub(crate) moves: Vec<(BlockId, BlockId)>,
    /// Whose blocks those are, and in which residency.
    pub(crate) moved: Vec<(Handle, u32)>,
    /// Whose blocks it copies to the host.
    pub(crate) swapped_out: Vec<Handle>,
    /// Host blocks that it copies back, pinned until it has.
    pub(crate) swapped_in: Vec<(Handle, Swapped)>,
    /// The quarantine group that it runs, if it runs one.
    pub(crate) group: Option<u64>,
    /// Its size, where its time is learned from.
    pub(crate) size: Size,
    pub(crate) record: StepRecord,
}

/// Steps planned and not yet committed, oldest first; their vectors are recycled.
#[derive(Debug)]
pub(crate) struct StepRing {
    in_flight: VecDeque<Box<StepInFlight>>,
    #[allow(
        clippy::vec_box,
        reason = "a step's life is four moves, of a pointer each"
    )]
    spare: Vec<Box<StepInFlight>>,
    depth: usize,
}

impl StepRing {
    pub(crate) fn new(depth: usize, max_rows: usize, max_filled: usize) -> Self {
        let spare = (0..=depth)
            .map(|_| {
                Box::new(StepInFlight {
                    id: StepId(0),
                    rows: Vec::with_capacity(max_rows),
                    filled: Vec::with_capacity(max_filled),
                    moves: Vec::new(),
                    moved: Vec::new(),
                    swapped_out: Vec::new(),
                    swapped_in: Vec::new(),
                    group: None,
                    size: Size::default(),
                    record: StepRecord::default(),
                })
            })
            .collect();
        Self {
            in_flight: VecDeque::with_capacity(depth + 1),
            spare,
            depth,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.in_flight.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len() == self.depth
    }

    pub(crate) fn oldest(&self) -> Option<StepId> {
        self.in_flight.front().map(|step| step.id)
    }

    pub(crate) fn contains(&self, id: StepId) -> bool {
        self.in_flight.iter().any(|step| step.id == id)
    }

    /// An empty step to fill and `push`.
    pub(crate) fn take_spare(&mut self) -> Box<StepInFlight> {
        self.spare.pop().expect("one more than depth are made")
    }

    pub(crate) fn push(&mut self, step: Box<StepInFlight>) {
        self.in_flight.push_back(step);
    }

    pub(crate) fn pop_oldest(&mut self) -> Option<Box<StepInFlight>> {
        self.in_flight.pop_front()
    }

    pub(crate) fn push_front(&mut self, step: Box<StepInFlight>) {
        self.in_flight.push_front(step);
    }

    /// The first of those from `id` on.
    pub(crate) fn pop_first_from(&mut self, id: StepId) -> Option<Box<StepInFlight>> {
        let at = self.in_flight.iter().position(|step| step.id >= id)?;
        self.in_flight.remove(at)
    }

    pub(crate) fn recycle(&mut self, mut step: Box<StepInFlight>) {
        // The rows stay as room: `plan` overwrites them.
        step.filled.clear();
        step.moves.clear();
        step.moved.clear();
        step.swapped_out.clear();
        debug_assert!(step.swapped_in.is_empty(), "host blocks are released first");
        self.spare.push(step);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &StepInFlight> {
        self.in_flight.iter().map(AsRef::as_ref)
    }
}
