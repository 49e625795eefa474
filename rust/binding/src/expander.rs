//! `Expander`: a runner's seat state and a model's input arrays, allocated once and shared with Python.

use noria_core::expand::{SeatState, StepArrays, apply, expand};
use noria_core::header;
use noria_cpu::{Step, most_likely};
use numpy::{Ix1, Ix2, PyArray1, PyArray2, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays;
use crate::layout::StepLayout;

/// How many ids each row samples, and the ids in row order.
type ChosenIds<'py> = (Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<i32>>);

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

    /// Each sampling row's most likely token, where all of them are plain.
    fn choose_greedy<'py>(
        &self,
        py: Python<'py>,
        logits: &Bound<'py, PyAny>,
        num_rows: usize,
        num_sample_rows: usize,
        is_plain: &Bound<'py, PyAny>,
    ) -> PyResult<Option<ChosenIds<'py>>> {
        let is_plain = arrays::read::<bool, Ix1>("is_plain", is_plain)?;
        let is_plain = is_plain.as_slice()?;
        let row_seats = self.row_seats.bind(py).try_readonly()?;
        let row_seats = row_seats.as_slice()?;
        let rows = self.sample_rows.bind(py).try_readonly()?;
        let rows = first("num_sample_rows", num_sample_rows, rows.as_slice()?)?;
        let seat_of = |row: i64| row_seats[row as usize] as usize;
        if !rows.iter().all(|&row| is_plain[seat_of(row)]) {
            return Ok(None);
        }
        let logits = arrays::read::<f32, Ix2>("logits", logits)?;
        if logits.shape()[0] != rows.len() || logits.shape()[1] == 0 {
            return Err(PyValueError::new_err(format!(
                "logits has shape {:?}, but {} rows sample.",
                logits.shape(),
                rows.len()
            )));
        }
        let (numbers, width) = (logits.as_slice()?, logits.shape()[1]);
        let chosen: Vec<Option<usize>> =
            py.detach(|| numbers.chunks_exact(width).map(most_likely).collect());
        let mut last_token = self.last_token.bind(py).try_readwrite()?;
        let last_token = last_token.as_slice_mut()?;
        let mut num_ids = vec![0; num_rows];
        for (&row, id) in rows.iter().zip(&chosen) {
            last_token[seat_of(row)] = id.map_or(0, |id| id as i64);
            num_ids[row as usize] = i32::from(id.is_some());
        }
        let ids = chosen.into_iter().flatten().map(|id| id as i32);
        let ids = PyArray1::from_iter(py, ids);
        Ok(Some((PyArray1::from_vec(py, num_ids), ids)))
    }
}

impl Expander {
    /// Calls `run` with the step that was expanded last, which has so many tokens, rows and wanted logits.
    pub(crate) fn with_step(
        &self,
        py: Python<'_>,
        num_tokens: usize,
        num_rows: usize,
        num_logits: usize,
        run: impl FnOnce(&Step<'_>) -> PyResult<()>,
    ) -> PyResult<()> {
        let input_ids = self.input_ids.bind(py).try_readonly()?;
        let positions = self.positions.bind(py).try_readonly()?;
        let slot_mapping = self.slot_mapping.bind(py).try_readonly()?;
        let cu_seqlens_q = self.cu_seqlens_q.bind(py).try_readonly()?;
        let context_lens = self.context_lens.bind(py).try_readonly()?;
        let row_seats = self.row_seats.bind(py).try_readonly()?;
        let block_tables = self.block_tables.bind(py).try_readonly()?;
        let logits_indices = self.logits_indices.bind(py).try_readonly()?;
        run(&Step {
            input_ids: first("num_tokens", num_tokens, input_ids.as_slice()?)?,
            positions: first("num_tokens", num_tokens, positions.as_slice()?)?,
            slot_mapping: first("num_tokens", num_tokens, slot_mapping.as_slice()?)?,
            cu_seqlens_q: first("num_rows", num_rows + 1, cu_seqlens_q.as_slice()?)?,
            context_lens: first("num_rows", num_rows, context_lens.as_slice()?)?,
            row_seats: first("num_rows", num_rows, row_seats.as_slice()?)?,
            max_blocks: block_tables.shape()[1],
            block_tables: block_tables.as_slice()?,
            logits_indices: first("num_logits", num_logits, logits_indices.as_slice()?)?,
        })
    }
}

fn first<'a, T>(name: &str, count: usize, array: &'a [T]) -> PyResult<&'a [T]> {
    array.get(..count).ok_or_else(|| {
        PyValueError::new_err(format!(
            "{name} is too large for an array of {} entries.",
            array.len()
        ))
    })
}
