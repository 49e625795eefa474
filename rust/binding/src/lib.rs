//! `noria._core`: conversions and delegates; every decision is noria-core's.
#![deny(unsafe_code)]
#![allow(
    clippy::needless_pass_by_value,
    reason = "PyO3 hands arguments over by value"
)]

mod arrays;
mod core;
mod cpu;
mod errors;
mod expander;
mod kv;
mod layout;
mod sampling;

use noria_core::{
    EventKind, FACT_FIELDS, FinishReason, KvEventKind, RECORD_FIELDS, flags, header,
    replay as replay_recording,
};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Runs a recording in a fresh core.
#[pyfunction]
fn replay(py: Python<'_>, recording: &[u8]) -> PyResult<Vec<u64>> {
    py.detach(|| replay_recording(recording))
        .map_err(|error| errors::replay(py, error))
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // NumPy's C interface is looked up by Python code at its first use, where a Ctrl-C would be a panic:
    // better while this is imported than in a core's first call.
    PyArray1::<i32>::zeros(module.py(), 0, false);
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<core::Core>()?;
    module.add_class::<core::Plan>()?;
    module.add_class::<expander::Expander>()?;
    module.add_class::<kv::KvFigures>()?;
    module.add_class::<layout::StepLayout>()?;
    module.add_class::<cpu::CpuBuilder>()?;
    module.add_class::<cpu::CpuProgram>()?;
    module.add_function(wrap_pyfunction!(cpu::cpu_is_bound, module)?)?;
    module.add_function(wrap_pyfunction!(cpu::cpu_isa, module)?)?;
    module.add_function(wrap_pyfunction!(cpu::measure_bandwidth, module)?)?;
    module.add_function(wrap_pyfunction!(cpu::measure_fma, module)?)?;
    module.add_function(wrap_pyfunction!(cpu::measure_int8, module)?)?;
    module.add_function(wrap_pyfunction!(sampling::draw, module)?)?;
    module.add_function(wrap_pyfunction!(replay, module)?)?;
    module.add("RECORD_FIELDS", PyTuple::new(module.py(), RECORD_FIELDS)?)?;
    module.add("FACT_FIELDS", PyTuple::new(module.py(), FACT_FIELDS)?)?;
    for (name, kind) in [
        ("ADMITTED", EventKind::Admitted),
        ("TOKEN", EventKind::Token),
        ("FINISHED", EventKind::Finished),
        ("PREEMPTED", EventKind::Preempted),
        ("RESUMED", EventKind::Resumed),
    ] {
        module.add(name, kind as u8)?;
    }
    for (name, kind) in [
        ("KV_STORED", KvEventKind::Stored),
        ("KV_REMOVED", KvEventKind::Removed),
        ("KV_MOVED", KvEventKind::Moved),
    ] {
        module.add(name, kind as u8)?;
    }
    for (name, reason) in [
        ("STOP", FinishReason::Stop),
        ("LENGTH", FinishReason::Length),
        ("ABORT", FinishReason::Abort),
        ("ERROR", FinishReason::Error),
        ("EXPIRED", FinishReason::Expired),
    ] {
        module.add(name, reason as u8)?;
    }
    for (name, flag) in [
        ("SAMPLES", flags::SAMPLES),
        ("HOST_MASKED", flags::HOST_MASKED),
        ("LISTED", flags::LISTED),
        ("PADDING", flags::PADDING),
        ("GHOST", flags::GHOST),
        ("DEVICE_START", flags::DEVICE_START),
        ("DRAFTS", flags::DRAFTS),
        ("DRAFT_IDS", flags::DRAFT_IDS),
    ] {
        module.add(name, flag)?;
    }
    for (name, word) in [
        ("H_STEP_LOW", header::STEP_LOW),
        ("H_STEP_HIGH", header::STEP_HIGH),
        ("H_NUM_LOST", header::NUM_LOST),
        ("H_NUM_GAINED", header::NUM_GAINED),
        ("H_NUM_GAINED_BLOCKS", header::NUM_GAINED_BLOCKS),
        ("H_NUM_TABLE_CHANGES", header::NUM_TABLE_CHANGES),
        ("H_NUM_MOVES", header::NUM_MOVES),
        ("H_NUM_ROWS", header::NUM_ROWS),
        ("H_NUM_TOKENS", header::NUM_TOKENS),
        ("H_NUM_LISTED_IDS", header::NUM_LISTED_IDS),
        ("H_NUM_SAMPLE_ROWS", header::NUM_SAMPLE_ROWS),
        ("H_NUM_LOGITS", header::NUM_LOGITS),
        ("H_NUM_SEAT_ROWS", header::NUM_SEAT_ROWS),
        ("H_MAX_CONTEXT", header::MAX_CONTEXT),
        ("H_NUM_HOST_MASKED", header::NUM_HOST_MASKED),
        ("H_MAX_COUNT", header::MAX_COUNT),
        ("H_NUM_SWAP_OUT", header::NUM_SWAP_OUT),
        ("H_NUM_SWAP_IN", header::NUM_SWAP_IN),
    ] {
        module.add(name, word)?;
    }
    module.delattr("__all__") // the stub lists the names
}
