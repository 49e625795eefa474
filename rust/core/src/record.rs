//! One record a step: what metrics, reports and an explanation of a slow request read.

use alloc::vec::Vec;

macro_rules! step_record {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// What one step did, and the state that it left.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct StepRecord {
            $($(#[$doc])* pub $field: i64,)*
        }

        /// The names of a record's fields, in the order of [`StepRecord::values`].
        pub const RECORD_FIELDS: &[&str] = &[$(stringify!($field)),*];

        impl StepRecord {
            /// The fields' values, in order.
            pub fn values(&self) -> [i64; RECORD_FIELDS.len()] {
                [$(self.$field),*]
            }
        }
    };
}

step_record! {
    /// The step's id.
    step,
    /// When it was planned.
    planned_us,
    /// When it was committed, or failed.
    committed_us,
    /// How long the device took, as its runner says.
    device_us,
    /// 1 if it was discarded by a failure.
    has_failed,
    /// Steps in flight beside it when it was planned.
    num_in_flight,
    /// Rows, padding and ghosts included.
    num_rows,
    /// Rows whose source is the seat: decodes.
    num_seat_rows,
    /// Rows that sample.
    num_sample_rows,
    /// Finished rows computed all the same.
    num_ghost_rows,
    /// Tokens in all rows.
    num_tokens,
    /// Tokens of listed rows: prefill.
    num_prefill_tokens,
    /// Draft tokens planned.
    num_draft_tokens,
    /// Tokens of padding.
    num_padding_tokens,
    /// Tokens found in the prefix cache by this plan.
    num_prefix_hit_tokens,
    /// First admissions by this plan.
    num_admitted,
    /// Resumes by this plan.
    num_resumed,
    /// Preemptions by this plan, and by failures since the one before.
    num_preempted,
    /// Tokens whose KV those preemptions gave up.
    num_preempted_tokens,
    /// Output tokens that its commit gave to requests.
    num_output_tokens,
    /// Tokens sampled for rows whose request had ended, or past its end.
    num_wasted_tokens,
    /// Requests that its commit finished.
    num_finished,
    /// Blocks that it moved.
    num_moves,
    /// Admissions that failed in its plan, and in those since the step before, for want of a run of free blocks.
    num_run_misses,
    /// Requests waiting after its plan.
    num_waiting,
    /// Requests with a seat after its plan.
    num_running,
    /// Free blocks after its plan.
    num_free_blocks,
    /// Cached blocks after its plan.
    num_cached_blocks,
    /// Held blocks after its plan.
    num_held_blocks,
}

/// The last records.
#[derive(Debug)]
pub(crate) struct RecordRing {
    records: Vec<StepRecord>,
    capacity: usize,
    /// The oldest, once there are `capacity`: the next takes its place.
    oldest: usize,
}

impl RecordRing {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            records: Vec::with_capacity(capacity),
            capacity,
            oldest: 0,
        }
    }

    pub(crate) fn push(&mut self, record: &StepRecord) {
        if self.records.len() < self.capacity {
            self.records.push(*record);
            return;
        }
        self.records[self.oldest] = *record;
        self.oldest += 1;
        if self.oldest == self.capacity {
            self.oldest = 0;
        }
    }

    /// Oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &StepRecord> {
        let (newer, older) = self.records.split_at(self.oldest);
        older.iter().chain(newer)
    }
}
