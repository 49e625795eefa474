//! `Expander`: a runner's seat state and a model's input arrays, allocated once and shared with Python.

use noria_core::expand::{SeatState, StepArrays, apply, expand};
use noria_core::header;
use numpy::{Ix1, PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays;
use crate::layout::StepLayout;

/// A runner's seat state, and the arrays that a model reads.
#[pyclass(frozen, get_all, module = "noria._core")]
pub(crate) struct Expander {
    input_ids: Py<PyArray1<i64>>,
    positions: Py<PyArray1<i64>>,
    slot_mapping: Py<PyArray1<i64>>,
    cu_seqlens_q: Py<PyArray1<i32>>,
    context_lens: Py<PyArray1<i32>>,
    row_seats: Py<PyArray1<i64>>,
    logits_indices: Py<PyArray1<i64>>,
    sample_rows: Py<PyArray1<i64>>,
    block_tables: Py<PyArray2<i32>>,
    last_token: Py<PyArray1<i64>>,
    num_computed_tokens: Py<PyArray1<i64>>,
    num_prompt_tokens: Py<PyArray1<i64>>,
    layout: Py<StepLayout>,
}

#[pymethods]
impl Expander {
    #[new]
    fn new(py: Python<'_>, layout: Py<StepLayout>) -> Self {
        let sizes: noria_core::StepLayout = (*layout.get()).into();
        let long = |len: usize| PyArray1::<i64>::zeros(py, len, false).unbind();
        let int = |len: usize| PyArray1::<i32>::zeros(py, len, false).unbind();
        Self {
            input_ids: long(sizes.max_num_batched_tokens),
            positions: long(sizes.max_num_batched_tokens),
            slot_mapping: long(sizes.max_num_batched_tokens),
            cu_seqlens_q: int(sizes.max_rows + 1),
            context_lens: int(sizes.max_rows),
            row_seats: long(sizes.max_rows),
            logits_indices: long(sizes.max_logits),
            sample_rows: long(sizes.max_rows),
            block_tables: PyArray2::zeros(
                py,
                [sizes.max_num_seqs, sizes.max_blocks_per_seq],
                false,
            )
            .unbind(),
            last_token: long(sizes.max_num_seqs),
            num_computed_tokens: long(sizes.max_num_seqs),
            num_prompt_tokens: long(sizes.max_num_seqs),
            layout,
        }
    }

    /// Applies lost and gained seats and table changes, then expands the rows.
    fn expand(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let layout: noria_core::StepLayout = (*self.layout.get()).into();
        let buffer = arrays::read::<i32, Ix1>("buffer", buffer)?;
        let buffer = buffer.as_slice()?;
        if buffer.len() != layout.size || buffer[header::MAGIC] != header::MAGIC_VALUE {
            return Err(PyValueError::new_err(format!(
                "The buffer is no planned step: it has {} words, and the layout {}.",
                buffer.len(),
                layout.size
            )));
        }
        let mut input_ids = self.input_ids.bind(py).try_readwrite()?;
        let mut positions = self.positions.bind(py).try_readwrite()?;
        let mut slot_mapping = self.slot_mapping.bind(py).try_readwrite()?;
        let mut cu_seqlens_q = self.cu_seqlens_q.bind(py).try_readwrite()?;
        let mut context_lens = self.context_lens.bind(py).try_readwrite()?;
        let mut row_seats = self.row_seats.bind(py).try_readwrite()?;
        let mut logits_indices = self.logits_indices.bind(py).try_readwrite()?;
        let mut sample_rows = self.sample_rows.bind(py).try_readwrite()?;
        let mut block_tables = self.block_tables.bind(py).try_readwrite()?;
        let last_token = self.last_token.bind(py).try_readonly()?;
        let mut num_computed_tokens = self.num_computed_tokens.bind(py).try_readwrite()?;
        let mut num_prompt_tokens = self.num_prompt_tokens.bind(py).try_readwrite()?;
        let mut seats = SeatState {
            block_tables: block_tables.as_slice_mut()?,
            last_token: last_token.as_slice()?,
            num_computed_tokens: num_computed_tokens.as_slice_mut()?,
            num_prompt_tokens: num_prompt_tokens.as_slice_mut()?,
        };
        let mut out = StepArrays {
            input_ids: input_ids.as_slice_mut()?,
            positions: positions.as_slice_mut()?,
            slot_mapping: slot_mapping.as_slice_mut()?,
            cu_seqlens_q: cu_seqlens_q.as_slice_mut()?,
            context_lens: context_lens.as_slice_mut()?,
            row_seats: row_seats.as_slice_mut()?,
            logits_indices: logits_indices.as_slice_mut()?,
            sample_rows: sample_rows.as_slice_mut()?,
        };
        apply(&layout, buffer, &mut seats);
        expand(&layout, buffer, &mut seats, &mut out);
        Ok(())
    }
}
