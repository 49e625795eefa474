//! KV memory as Python sees it: figures of how it lies, and the stream of what can be found.

use noria_core::{KvEvents, Scheduler};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

macro_rules! kv_figures {
    ($($field:ident),* $(,)?) => {
        /// How KV memory lies at one moment.
        #[pyclass(frozen, get_all, module = "noria._core")]
        pub(crate) struct KvFigures {
            $($field: u32,)*
        }

        impl KvFigures {
            pub(crate) fn of(scheduler: &Scheduler) -> Self {
                let figures = scheduler.kv_figures();
                Self { $($field: figures.$field,)* }
            }
        }
    };
}

kv_figures! {
    num_blocks,
    num_free,
    num_cached,
    num_held,
    num_free_runs,
    longest_free_run,
    num_sequences,
    num_table_blocks,
    num_runs,
    num_unused_slots,
}

/// Words of an event before its tokens.
const EVENT_WORDS: usize = 8;

/// The events from number `first` on, as rows: kind, block, where it was, hash (low, high), parent (low, high), number of
/// tokens, tokens.
pub(crate) fn events<'py>(
    py: Python<'py>,
    events: &KvEvents,
    first: u64,
    block_size: usize,
) -> PyResult<Bound<'py, PyArray2<i64>>> {
    let width = EVENT_WORDS + block_size;
    let mut words: Vec<i64> = Vec::new();
    let mut num_rows = 0;
    for (event, tokens) in events.since(first) {
        words.extend([
            event.kind as i64,
            event.block.0.into(),
            event.from.0.into(),
            event.hash as i64,
            (event.hash >> 64) as i64,
            event.parent as i64,
            (event.parent >> 64) as i64,
            tokens.len() as i64,
        ]);
        words.extend(tokens.iter().map(|&token| i64::from(token)));
        num_rows += 1;
        words.resize(num_rows * width, -1);
    }
    PyArray1::from_vec(py, words).reshape([num_rows, width])
}
