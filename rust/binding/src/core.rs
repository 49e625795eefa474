//! `Core` and `Plan`.

use noria_core::{
    Admission, Config, Drafts, Event, FACT_FIELDS, Facts, FinishReason, Handle, KeyPolicy, PinId,
    Planned, RECORD_FIELDS, Reads, Request, Scheduler, Share, StepId,
};
use numpy::{Ix1, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyUntypedArrayMethods};
use pyo3::exceptions::{PyAssertionError, PyValueError};
use pyo3::prelude::*;

use crate::arrays;
use crate::errors;
use crate::kv::{self, KvFigures};
use crate::layout::StepLayout;

/// What `Core.plan` decided.
#[pyclass(frozen, get_all, module = "noria._core")]
pub(crate) struct Plan {
    kind: u8,
    step: u64,
    num_events: usize,
}

#[pymethods]
impl Plan {
    #[classattr]
    const STEP: u8 = 0;
    #[classattr]
    const IDLE: u8 = 1;
    #[classattr]
    const WAITING: u8 = 2;
}

/// The six verbs.
#[pyclass(module = "noria._core")]
pub(crate) struct Core {
    scheduler: Scheduler,
    layout: Py<StepLayout>,
    events: Py<PyArray2<i64>>,
}

impl Core {
    /// Copies what the last verb reported to the array that Python sees.
    fn report(&mut self, py: Python<'_>) -> PyResult<usize> {
        let events = self.scheduler.events();
        let capacity = self.events.bind(py).shape()[0];
        if events.len() > capacity {
            // A burst of `finish` and `fail`: rare, and seldom again.
            let capacity = events.len().next_power_of_two();
            self.events = PyArray2::zeros(py, [capacity, EVENT_WORDS], false).unbind();
        }
        let mut array = self.events.bind(py).try_readwrite()?;
        for (row, event) in array
            .as_slice_mut()?
            .chunks_exact_mut(EVENT_WORDS)
            .zip(events)
        {
            let Event {
                handle,
                kind,
                first,
                second,
            } = *event;
            row.copy_from_slice(&[handle.to_bits() as i64, kind as i64, first, second]);
        }
        Ok(events.len())
    }
}

/// The number that a salt of at most 16 bytes stands for.
fn salt(cache_salt: Option<&[u8]>) -> PyResult<u128> {
    let cache_salt = cache_salt.unwrap_or_default();
    let mut salt = [0; 16];
    let Some(place) = salt.get_mut(..cache_salt.len()) else {
        return Err(PyValueError::new_err(format!(
            "cache_salt has {} bytes, but may have 16; hash a longer one.",
            cache_salt.len()
        )));
    };
    place.copy_from_slice(cache_salt);
    Ok(u128::from_le_bytes(salt))
}

fn ints<'py>(name: &str, array: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArray1<'py, i32>> {
    arrays::read(name, array)
}

fn longs<'py>(name: &str, array: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArray1<'py, i64>> {
    arrays::read(name, array)
}

fn handles_of(bits: &[i64]) -> Vec<Handle> {
    bits.iter()
        .map(|&bits| Handle::from_bits(bits as u64))
        .collect()
}

const EVENT_WORDS: usize = 4;

const KEYS: [(&str, KeyPolicy); 7] = [
    ("fcfs", KeyPolicy::Fcfs),
    ("priority", KeyPolicy::Priority),
    ("sjf", KeyPolicy::Sjf),
    ("deadline", KeyPolicy::Deadline),
    ("fair", KeyPolicy::Fair),
    ("prefix", KeyPolicy::Prefix),
    ("own", KeyPolicy::Own),
];

const SHARES: [(&str, Share); 2] = [
    ("decode-first", Share::DecodeFirst),
    ("prefill-first", Share::PrefillFirst),
];

const ADMISSIONS: [(&str, Admission); 5] = [
    ("peak", Admission::Peak),
    ("reserve", Admission::Reserve),
    ("optimistic", Admission::Optimistic),
    ("gang", Admission::StaticGang),
    ("padded", Admission::StaticPadded),
];

#[pymethods]
impl Core {
    #[new]
    #[pyo3(signature = (
        *,
        num_blocks,
        block_size = 16,
        max_num_seqs = 64,
        max_num_batched_tokens = 2048,
        max_model_len = 2048,
        vocab_size = 2_147_483_647,
        depth = 2,
        max_drafts = 0,
        max_partial_prefills = 1,
        long_prefill_token_threshold = 0,
        enable_prefix_caching = true,
        watermark_blocks = 0,
        scheduling_policy = "fcfs",
        admission = "peak",
        peak_percent = 100,
        share = "decode-first",
        step_target_us = 0,
        max_adapters = 0,
        max_prefix_waits = 4,
        max_queued = 1_048_576,
        max_queued_tokens = 1_099_511_627_776,
        ageing_steps = 1024,
        max_bypasses = 64,
        max_preemptions = 4,
        fair_input_weight = 1,
        fair_output_weight = 2,
        hash_seed = 0,
        num_records = 4096,
        max_moves = 64,
        forced_moves = 0,
        contiguous = false,
        num_kv_events = 0,
        window = 0,
        num_swap_blocks = 0,
        record = false,
    ))]
    #[allow(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "keywords in Python, where each is named"
    )]
    fn new(
        py: Python<'_>,
        num_blocks: u32,
        block_size: u32,
        max_num_seqs: u32,
        max_num_batched_tokens: u32,
        max_model_len: u32,
        vocab_size: u32,
        depth: u32,
        max_drafts: u32,
        max_partial_prefills: u32,
        long_prefill_token_threshold: u32,
        enable_prefix_caching: bool,
        watermark_blocks: u32,
        scheduling_policy: &str,
        admission: &str,
        peak_percent: u32,
        share: &str,
        step_target_us: u32,
        max_adapters: u32,
        max_prefix_waits: u32,
        max_queued: u32,
        max_queued_tokens: u64,
        ageing_steps: u32,
        max_bypasses: u32,
        max_preemptions: u32,
        fair_input_weight: u32,
        fair_output_weight: u32,
        hash_seed: u64,
        num_records: u32,
        max_moves: u32,
        forced_moves: u32,
        contiguous: bool,
        num_kv_events: u32,
        window: u32,
        num_swap_blocks: u32,
        record: bool,
    ) -> PyResult<Self> {
        let key = errors::chosen(py, "scheduling_policy", scheduling_policy, &KEYS)?;
        let admission = errors::chosen(py, "admission", admission, &ADMISSIONS)?;
        let share = errors::chosen(py, "share", share, &SHARES)?;
        let config = Config {
            num_blocks,
            block_size,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            vocab_size,
            depth,
            max_drafts,
            max_partial_prefills,
            long_prefill_token_threshold,
            enable_prefix_caching,
            watermark_blocks,
            key,
            admission,
            peak_percent,
            share,
            step_target_us,
            max_adapters,
            max_prefix_waits,
            max_queued,
            max_queued_tokens,
            ageing_steps,
            max_bypasses,
            max_preemptions,
            fair_input_weight,
            fair_output_weight,
            hash_seed,
            num_records,
            max_moves,
            forced_moves,
            contiguous,
            num_kv_events,
            window,
            num_swap_blocks,
        };
        let scheduler = if record {
            Scheduler::recorded(config)
        } else {
            Scheduler::new(config)
        };
        let scheduler = scheduler.map_err(|error| errors::config(py, error))?;
        let layout = *scheduler.layout();
        Ok(Self {
            events: PyArray2::zeros(py, [layout.max_events, EVENT_WORDS], false).unbind(),
            layout: Py::new(py, StepLayout::from(layout))?,
            scheduler,
        })
    }

    #[getter]
    fn layout(&self, py: Python<'_>) -> Py<StepLayout> {
        self.layout.clone_ref(py)
    }

    #[getter]
    fn events(&self, py: Python<'_>) -> Py<PyArray2<i64>> {
        self.events.clone_ref(py)
    }

    #[pyo3(signature = (
        now_us,
        prompt_token_ids,
        max_tokens,
        *,
        priority = 0,
        tenant = 0,
        expected_tokens = None,
        ttft_target_us = 1_000_000,
        itl_target_us = 100_000,
        stop_token_ids = None,
        cache_salt = None,
        adapter = 0,
        expires_us = None,
        parked = false,
        host_masked = false,
        reads_prefix_cache = true,
    ))]
    #[allow(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "keywords in Python, where each is named"
    )]
    fn submit(
        &mut self,
        py: Python<'_>,
        now_us: u64,
        prompt_token_ids: &Bound<'_, PyAny>,
        max_tokens: i64,
        priority: i32,
        tenant: u64,
        expected_tokens: Option<u32>,
        ttft_target_us: u64,
        itl_target_us: u64,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        cache_salt: Option<&[u8]>,
        adapter: u64,
        expires_us: Option<u64>,
        parked: bool,
        host_masked: bool,
        reads_prefix_cache: bool,
    ) -> PyResult<u64> {
        let prompt_token_ids = ints("prompt_token_ids", prompt_token_ids)?;
        let stop_token_ids = stop_token_ids
            .map(|stops| ints("stop_token_ids", stops))
            .transpose()?;
        let request = Request {
            prompt_token_ids: prompt_token_ids.as_slice()?,
            max_tokens,
            priority,
            tenant,
            expected_tokens,
            ttft_target_us,
            itl_target_us,
            stop_token_ids: stop_token_ids
                .as_ref()
                .map_or(Ok(&[][..]), |ids| ids.as_slice())?,
            cache_salt: salt(cache_salt)?,
            adapter,
            expires_us,
            parked,
            host_masked,
            reads_prefix_cache,
        };
        let submitted = self.scheduler.submit(now_us, &request);
        submitted
            .map(Handle::to_bits)
            .map_err(|reject| errors::reject(py, reject))
    }

    #[pyo3(signature = (now_us, buffer, draft_handles = None, draft_counts = None, draft_ids = None))]
    fn plan(
        &mut self,
        py: Python<'_>,
        now_us: u64,
        buffer: &Bound<'_, PyAny>,
        draft_handles: Option<&Bound<'_, PyAny>>,
        draft_counts: Option<&Bound<'_, PyAny>>,
        draft_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        let mut buffer = arrays::write::<i32, Ix1>("buffer", buffer)?;
        let buffer = buffer.as_slice_mut()?;
        let size = self.scheduler.layout().size;
        if buffer.len() != size {
            return Err(PyValueError::new_err(format!(
                "The buffer has {} words, but the layout {size}.",
                buffer.len()
            )));
        }
        let handles = match draft_handles {
            Some(handles) => handles_of(longs("draft_handles", handles)?.as_slice()?),
            None => Vec::new(),
        };
        let draft_counts = draft_counts
            .map(|counts| ints("draft_counts", counts))
            .transpose()?;
        let draft_ids = draft_ids.map(|ids| ints("draft_ids", ids)).transpose()?;
        let drafts = Drafts {
            handles: &handles,
            counts: draft_counts
                .as_ref()
                .map_or(Ok(&[][..]), |counts| counts.as_slice())?,
            ids: draft_ids.as_ref().map(|ids| ids.as_slice()).transpose()?,
        };
        let planned = self.scheduler.plan(now_us, &drafts, buffer);
        let num_events = self.report(py)?;
        let (kind, step) = match planned {
            Planned::Step(StepId(step)) => (Plan::STEP, step),
            Planned::Idle => (Plan::IDLE, 0),
            Planned::Waiting(StepId(step)) => (Plan::WAITING, step),
        };
        Ok(Plan {
            kind,
            step,
            num_events,
        })
    }

    fn commit(
        &mut self,
        py: Python<'_>,
        step: u64,
        num_ids: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
        device_us: u64,
        now_us: u64,
    ) -> PyResult<usize> {
        let (num_ids, ids) = (ints("num_ids", num_ids)?, ints("ids", ids)?);
        self.scheduler
            .commit(
                StepId(step),
                num_ids.as_slice()?,
                ids.as_slice()?,
                device_us,
                now_us,
            )
            .map_err(|error| errors::commit(py, error))?;
        self.report(py)
    }

    fn fail(&mut self, step: u64, now_us: u64) {
        self.scheduler.fail(StepId(step), now_us);
    }

    fn finish(
        &mut self,
        handle: u64,
        num_output_tokens: u32,
        reason: u8,
        now_us: u64,
    ) -> PyResult<bool> {
        let Some(reason) = FinishReason::from_code(reason) else {
            return Err(PyValueError::new_err(format!(
                "The reason is {reason}, but must be 0 to 4."
            )));
        };
        let handle = Handle::from_bits(handle);
        Ok(self
            .scheduler
            .finish(handle, num_output_tokens, reason, now_us))
    }

    fn unpark(&mut self, handle: u64, now_us: u64) -> bool {
        self.scheduler.unpark(Handle::from_bits(handle), now_us)
    }

    fn expire(&mut self, handle: u64, now_us: u64) -> bool {
        self.scheduler.expire(Handle::from_bits(handle), now_us)
    }

    #[getter]
    fn num_changed(&self) -> usize {
        self.scheduler.num_changed()
    }

    fn take_changed<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        let reads = Reads {
            num_remaining: true,
            num_uncached: true,
        };
        let facts = self.scheduler.take_changed(reads);
        let values: Vec<i64> = facts.iter().flat_map(Facts::values).collect();
        PyArray1::from_vec(py, values).reshape([facts.len(), FACT_FIELDS.len()])
    }

    fn set_scores(
        &mut self,
        handles: &Bound<'_, PyAny>,
        scores: &Bound<'_, PyAny>,
        now_us: u64,
    ) -> PyResult<()> {
        let handles = longs("handles", handles)?;
        let scores = longs("scores", scores)?;
        let (handles, scores) = (handles.as_slice()?, scores.as_slice()?);
        if handles.len() != scores.len() {
            return Err(PyValueError::new_err(format!(
                "There are {} scores, but {} handles.",
                scores.len(),
                handles.len()
            )));
        }
        self.scheduler
            .set_scores(&handles_of(handles), scores, now_us);
        Ok(())
    }

    #[getter]
    fn next_expiry_us(&self) -> Option<u64> {
        self.scheduler.next_expiry_us()
    }

    #[getter]
    fn step_cost_ns(&self) -> (u64, u64, u64) {
        self.scheduler.step_cost_ns().into()
    }

    fn reset_prefix_cache(&mut self, now_us: u64) -> u32 {
        self.scheduler.reset_prefix_cache(now_us)
    }

    fn resize(&mut self, py: Python<'_>, num_blocks: u32, now_us: u64) -> PyResult<()> {
        self.scheduler
            .resize(num_blocks, now_us)
            .map_err(|error| errors::resize(py, error))
    }

    #[pyo3(signature = (now_us, token_ids, *, cache_salt = None, adapter = 0))]
    fn pin<'py>(
        &mut self,
        py: Python<'py>,
        now_us: u64,
        token_ids: &Bound<'_, PyAny>,
        cache_salt: Option<&[u8]>,
        adapter: u64,
    ) -> PyResult<(u64, Bound<'py, PyArray1<i32>>)> {
        let token_ids = ints("token_ids", token_ids)?;
        let pin = self
            .scheduler
            .pin(token_ids.as_slice()?, salt(cache_salt)?, adapter, now_us)
            .map_err(|error| errors::pin(py, error))?;
        let blocks = self.scheduler.pinned(pin).iter();
        let blocks = blocks.map(|block| block.0 as i32).collect();
        Ok((pin.0, PyArray1::from_vec(py, blocks)))
    }

    fn unpin(&mut self, pin: u64, now_us: u64) -> bool {
        self.scheduler.unpin(PinId(pin), now_us)
    }

    #[getter]
    fn num_pinned_blocks(&self) -> u32 {
        self.scheduler.num_pinned_blocks()
    }

    #[getter]
    fn is_shrinking(&self) -> bool {
        self.scheduler.is_shrinking()
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.scheduler.config().num_blocks
    }

    fn kv_figures(&self) -> KvFigures {
        KvFigures::of(&self.scheduler)
    }

    #[getter]
    fn num_kv_events(&self) -> u64 {
        self.scheduler.kv().events().num_events()
    }

    fn kv_events<'py>(
        &self,
        py: Python<'py>,
        first: u64,
    ) -> PyResult<(u64, Bound<'py, PyArray2<i64>>)> {
        let events = self.scheduler.kv().events();
        let num_missed = events.first().saturating_sub(first);
        let block_size = self.scheduler.layout().block_size;
        Ok((num_missed, kv::events(py, events, first, block_size)?))
    }

    #[getter]
    fn num_waiting(&self) -> u32 {
        self.scheduler.num_waiting()
    }

    #[getter]
    fn num_parked(&self) -> u32 {
        self.scheduler.num_parked()
    }

    #[getter]
    fn num_running(&self) -> u32 {
        self.scheduler.num_running()
    }

    #[getter]
    fn num_in_flight(&self) -> u32 {
        self.scheduler.num_in_flight()
    }

    #[getter]
    fn num_free_blocks(&self) -> u32 {
        self.scheduler.kv().pool().num_free()
    }

    #[getter]
    fn num_cached_blocks(&self) -> u32 {
        self.scheduler.kv().pool().num_cached()
    }

    #[getter]
    fn num_held_blocks(&self) -> u32 {
        self.scheduler.num_held_blocks()
    }

    fn records<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        let values: Vec<i64> = self
            .scheduler
            .records()
            .flat_map(noria_core::StepRecord::values)
            .collect();
        let num_records = values.len() / RECORD_FIELDS.len();
        PyArray1::from_vec(py, values).reshape([num_records, RECORD_FIELDS.len()])
    }

    fn recording(&self) -> &[u8] {
        self.scheduler.recording()
    }

    fn check(&self) -> PyResult<()> {
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.scheduler.check()));
        outcome.map_err(|panic| {
            let message = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("an invariant is broken");
            PyAssertionError::new_err(message.to_owned())
        })
    }
}
