//! `StepLayout`: offsets and capacities, as plain attributes.

use pyo3::prelude::*;

macro_rules! step_layout {
    ($($field:ident),* $(,)?) => {
        /// Where each section of a step buffer lies; in int32 words.
        #[pyclass(frozen, get_all, module = "noria._core")]
        #[derive(Clone, Copy)]
        pub(crate) struct StepLayout {
            $($field: usize,)*
        }

        impl From<noria_core::StepLayout> for StepLayout {
            fn from(layout: noria_core::StepLayout) -> Self {
                Self { $($field: layout.$field,)* }
            }
        }

        impl From<StepLayout> for noria_core::StepLayout {
            fn from(layout: StepLayout) -> Self {
                Self { $($field: layout.$field,)* }
            }
        }
    };
}

step_layout! {
    size,
    max_num_seqs,
    max_rows,
    max_num_batched_tokens,
    max_blocks_per_seq,
    block_size,
    num_blocks,
    max_drafts,
    window,
    max_logits,
    max_events,
    offset_lost,
    offset_gained,
    offset_gained_blocks,
    offset_table_changes,
    offset_moves,
    offset_swap_out,
    offset_swap_in,
    offset_row_seat,
    offset_row_start,
    offset_row_count,
    offset_row_flags,
    offset_row_ids,
    offset_cu_seqlens_q,
    offset_listed_ids,
    capacity_gained_blocks,
    capacity_table_changes,
    capacity_moves,
    capacity_swaps,
}
