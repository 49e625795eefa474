//! `CpuBuilder` and `CpuProgram`: a model's forward, recorded op by op, and run a step at a time.
//!
//! The one unsafe place of the binding: the KV cache is a tensor's memory, which the program reads and writes.

use std::time::Duration;

use noria_cpu::{
    AttentionOptions, Builder, Format, Heads, ISA_NAMES, ISA_VARIABLE, Isa, IsaError, KvFormat,
    KvView, Matrix, MatrixId, Program, StageKind, Step, TableId, Value, VectorId, fma_rate,
    int8_rate, is_bound, read_bandwidth,
};
use numpy::{Ix1, Ix2, IxDyn, PyReadwriteArrayDyn, PyUntypedArrayMethods};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::arrays;
use crate::errors;
use crate::expander::Expander;

/// The instruction set that the CPU backend uses here.
#[pyfunction]
pub(crate) fn cpu_isa(py: Python<'_>) -> PyResult<&'static str> {
    Ok(chosen(py)?.name())
}

/// Whether each of so many threads of a program runs on a CPU of its own.
#[pyfunction]
pub(crate) fn cpu_is_bound(num_threads: usize) -> bool {
    is_bound(num_threads)
}

/// Bytes that threads read from memory, in GB/s.
#[pyfunction]
#[pyo3(signature = (seconds, num_threads=None))]
pub(crate) fn measure_bandwidth(
    py: Python<'_>,
    seconds: f64,
    num_threads: Option<usize>,
) -> PyResult<f64> {
    measured(py, read_bandwidth, seconds, num_threads)
}

/// float32 operations in multiply-adds, in GFLOP/s.
#[pyfunction]
#[pyo3(signature = (seconds, num_threads=None))]
pub(crate) fn measure_fma(
    py: Python<'_>,
    seconds: f64,
    num_threads: Option<usize>,
) -> PyResult<f64> {
    measured(py, fma_rate, seconds, num_threads)
}

/// Whole-number operations of products with 8-bit weights, in GOP/s.
#[pyfunction]
#[pyo3(signature = (seconds, num_threads=None))]
pub(crate) fn measure_int8(
    py: Python<'_>,
    seconds: f64,
    num_threads: Option<usize>,
) -> PyResult<f64> {
    measured(py, int8_rate, seconds, num_threads)
}

fn measured(
    py: Python<'_>,
    measure: fn(Isa, usize, Duration) -> f64,
    seconds: f64,
    num_threads: Option<usize>,
) -> PyResult<f64> {
    let isa = chosen(py)?;
    let Ok(time) = Duration::try_from_secs_f64(seconds) else {
        let expected = "a number of seconds from 0 on";
        return Err(errors::named(py, "seconds", seconds.to_string(), expected));
    };
    let num_threads = match num_threads {
        Some(0) => {
            return Err(errors::named(
                py,
                "num_threads",
                "0".to_owned(),
                "1 or more",
            ));
        }
        Some(count) => count,
        None => std::thread::available_parallelism()?.get(),
    };
    Ok(py.detach(|| measure(isa, num_threads, time)) / 1e9)
}

fn chosen(py: Python<'_>) -> PyResult<Isa> {
    Isa::chosen().map_err(|error| isa_error(py, error))
}

fn isa_error(py: Python<'_>, error: IsaError) -> PyErr {
    let (value, expected) = match error {
        IsaError::Unknown(name) => (name, ISA_NAMES.to_owned()),
        IsaError::Missing(isa) => (
            isa.name().to_owned(),
            format!("one that this CPU has: {} at most", Isa::widest().name()),
        ),
    };
    errors::named(py, ISA_VARIABLE, value, &expected)
}

/// Parameters, and the ops on them in order.
#[pyclass(module = "noria._core")]
pub(crate) struct CpuBuilder {
    builder: Option<Builder>,
}

impl CpuBuilder {
    fn get(&mut self) -> PyResult<&mut Builder> {
        self.builder
            .as_mut()
            .ok_or_else(|| PyRuntimeError::new_err("The program is built already."))
    }
}

#[pymethods]
impl CpuBuilder {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        let builder = Builder::new(chosen(py)?).map_err(|error| isa_error(py, error))?;
        Ok(Self {
            builder: Some(builder),
        })
    }

    fn table(&mut self, numbers: &Bound<'_, PyAny>) -> PyResult<usize> {
        let numbers = arrays::read::<f32, Ix2>("numbers", numbers)?;
        let width = numbers.shape()[1];
        Ok(self.get()?.table(numbers.as_slice()?.to_vec(), width).0)
    }

    fn vector(&mut self, numbers: &Bound<'_, PyAny>) -> PyResult<usize> {
        let numbers = arrays::read::<f32, Ix1>("numbers", numbers)?;
        Ok(self.get()?.vector(numbers.as_slice()?.to_vec()).0)
    }

    #[pyo3(signature = (weight, bias, *, storage))]
    fn matrix(
        &mut self,
        py: Python<'_>,
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        storage: &str,
    ) -> PyResult<usize> {
        let format = match storage {
            "float32" => Format::F32,
            "bfloat16" => Format::Bf16,
            "int8" => Format::Int8,
            other => {
                let expected = "float32, bfloat16 or int8";
                return Err(errors::named(py, "storage", other.to_owned(), expected));
            }
        };
        let weight = arrays::read::<f32, Ix2>("weight", weight)?;
        let bias = bias.map(|bias| arrays::read::<f32, Ix1>("bias", bias));
        let bias = bias.transpose()?;
        let num_in = weight.shape()[1];
        let (weight, bias) = (
            weight.as_slice()?,
            bias.as_ref().map(|bias| bias.as_slice()),
        );
        let (bias, isa) = (bias.transpose()?, self.get()?.isa());
        let matrix = py.detach(|| Matrix::pack(isa, format, weight, num_in, bias));
        Ok(self.get()?.matrix(matrix).0)
    }

    #[pyo3(signature = (rows, in_features, bias, *, storage))]
    fn matrix_of_blocks(
        &mut self,
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        in_features: usize,
        bias: Option<&Bound<'_, PyAny>>,
        storage: &str,
    ) -> PyResult<usize> {
        let format = match storage {
            "Q8_0" => Format::Q8_0,
            "Q4_0" => Format::Q4_0,
            "Q4_1" => Format::Q4_1,
            other => {
                return Err(errors::named(
                    py,
                    "format",
                    other.to_owned(),
                    "Q8_0, Q4_0 or Q4_1",
                ));
            }
        };
        let rows = arrays::read::<u8, Ix2>("rows", rows)?;
        let bias = bias.map(|bias| arrays::read::<f32, Ix1>("bias", bias));
        let bias = bias.transpose()?;
        let isa = self.get()?.isa();
        let (rows, bias) = (rows.as_slice()?, bias.as_ref().map(|bias| bias.as_slice()));
        let bias = bias.transpose()?;
        let matrix = py.detach(|| Matrix::pack_blocks(isa, format, rows, in_features, bias));
        Ok(self.get()?.matrix(matrix).0)
    }

    fn embed(&mut self, table: usize) -> PyResult<usize> {
        Ok(self.get()?.embed(TableId(table)).0)
    }

    fn linear(&mut self, x: usize, matrix: usize) -> PyResult<usize> {
        Ok(self.get()?.linear(Value(x), MatrixId(matrix)).0)
    }

    fn rms_norm(&mut self, x: usize, weight: usize, eps: f32) -> PyResult<usize> {
        Ok(self.get()?.rms_norm(Value(x), VectorId(weight), eps).0)
    }

    fn add(&mut self, x: usize, y: usize) -> PyResult<usize> {
        Ok(self.get()?.add(Value(x), Value(y)).0)
    }

    fn scale(&mut self, x: usize, factor: f32) -> PyResult<usize> {
        Ok(self.get()?.scale(Value(x), factor).0)
    }

    fn softcap(&mut self, x: usize, cap: f32) -> PyResult<usize> {
        Ok(self.get()?.softcap(Value(x), cap).0)
    }

    fn qk_norm(
        &mut self,
        qkv: usize,
        q_weight: usize,
        k_weight: usize,
        eps: f32,
        heads: (usize, usize, usize),
    ) -> PyResult<usize> {
        let (q_weight, k_weight) = (VectorId(q_weight), VectorId(k_weight));
        Ok(self
            .get()?
            .qk_norm(Value(qkv), q_weight, k_weight, eps, as_heads(heads))
            .0)
    }

    fn rope(
        &mut self,
        qkv: usize,
        frequencies: usize,
        scale: f32,
        heads: (usize, usize, usize),
    ) -> PyResult<usize> {
        Ok(self
            .get()?
            .rope(Value(qkv), VectorId(frequencies), scale, as_heads(heads))
            .0)
    }

    #[pyo3(signature = (qkv, layer, heads, *, scale, window, softcap))]
    fn attention(
        &mut self,
        qkv: usize,
        layer: usize,
        heads: (usize, usize, usize),
        scale: f32,
        window: Option<usize>,
        softcap: Option<f32>,
    ) -> PyResult<usize> {
        let options = AttentionOptions {
            scale,
            window,
            softcap,
        };
        Ok(self
            .get()?
            .attention(Value(qkv), layer, as_heads(heads), options)
            .0)
    }

    fn silu_mul(&mut self, gate_up: usize) -> PyResult<usize> {
        Ok(self.get()?.silu_mul(Value(gate_up)).0)
    }

    fn gelu_mul(&mut self, gate_up: usize) -> PyResult<usize> {
        Ok(self.get()?.gelu_mul(Value(gate_up)).0)
    }

    fn logits(&mut self, x: usize, head: usize) -> PyResult<usize> {
        Ok(self.get()?.logits(Value(x), MatrixId(head)).0)
    }

    #[pyo3(signature = (result, *, num_threads))]
    fn build(&mut self, result: usize, num_threads: usize) -> PyResult<CpuProgram> {
        self.get()?;
        let builder = self.builder.take().expect("looked at just now");
        Ok(CpuProgram {
            program: builder.build(Value(result), num_threads)?,
        })
    }
}

fn as_heads((num_heads, num_kv_heads, head_dim): (usize, usize, usize)) -> Heads {
    Heads {
        num_heads,
        num_kv_heads,
        head_dim,
    }
}

/// A model's forward over its own parameters and threads.
#[pyclass(module = "noria._core")]
pub(crate) struct CpuProgram {
    program: Program,
}

#[pymethods]
impl CpuProgram {
    #[getter]
    fn num_threads(&self) -> usize {
        self.program.num_workers()
    }

    #[getter]
    fn num_bytes(&self) -> usize {
        self.program.num_bytes()
    }

    #[getter]
    fn num_logits_columns(&self) -> usize {
        self.program.num_logits_columns()
    }

    #[getter]
    fn stage_ns(&self) -> Vec<(String, u64)> {
        let times = self.program.times();
        times.map(|time| (label(time.kind), time.ns)).collect()
    }

    #[pyo3(signature = (
        *, input_ids, positions, slot_mapping, cu_seqlens_q, context_lens, row_seats, block_tables, logits_indices, kv,
        kv_dtype, logits
    ))]
    #[allow(
        clippy::too_many_arguments,
        reason = "the arrays of a step, by their names"
    )]
    fn run(
        &mut self,
        py: Python<'_>,
        input_ids: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        cu_seqlens_q: &Bound<'_, PyAny>,
        context_lens: &Bound<'_, PyAny>,
        row_seats: &Bound<'_, PyAny>,
        block_tables: &Bound<'_, PyAny>,
        logits_indices: &Bound<'_, PyAny>,
        kv: &Bound<'_, PyAny>,
        kv_dtype: &str,
        logits: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let input_ids = arrays::read::<i64, Ix1>("input_ids", input_ids)?;
        let positions = arrays::read::<i64, Ix1>("positions", positions)?;
        let slot_mapping = arrays::read::<i64, Ix1>("slot_mapping", slot_mapping)?;
        let cu_seqlens_q = arrays::read::<i32, Ix1>("cu_seqlens_q", cu_seqlens_q)?;
        let context_lens = arrays::read::<i32, Ix1>("context_lens", context_lens)?;
        let row_seats = arrays::read::<i64, Ix1>("row_seats", row_seats)?;
        let block_tables = arrays::read::<i32, Ix2>("block_tables", block_tables)?;
        let logits_indices = arrays::read::<i64, Ix1>("logits_indices", logits_indices)?;
        let step = Step {
            input_ids: input_ids.as_slice()?,
            positions: positions.as_slice()?,
            slot_mapping: slot_mapping.as_slice()?,
            cu_seqlens_q: cu_seqlens_q.as_slice()?,
            context_lens: context_lens.as_slice()?,
            row_seats: row_seats.as_slice()?,
            max_blocks: block_tables.shape()[1],
            block_tables: block_tables.as_slice()?,
            logits_indices: logits_indices.as_slice()?,
        };
        self.compute(py, &step, kv, kv_dtype, logits)
    }

    #[pyo3(signature = (expander, *, num_tokens, num_rows, num_logits, kv, kv_dtype, logits))]
    #[allow(clippy::too_many_arguments, reason = "a step, by its parts")]
    fn run_expanded(
        &mut self,
        py: Python<'_>,
        expander: &Bound<'_, Expander>,
        num_tokens: usize,
        num_rows: usize,
        num_logits: usize,
        kv: &Bound<'_, PyAny>,
        kv_dtype: &str,
        logits: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        expander
            .get()
            .with_step(py, num_tokens, num_rows, num_logits, |step| {
                self.compute(py, step, kv, kv_dtype, logits)
            })
    }
}

impl CpuProgram {
    fn compute(
        &mut self,
        py: Python<'_>,
        step: &Step<'_>,
        kv: &Bound<'_, PyAny>,
        kv_dtype: &str,
        logits: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let mut kv = arrays::write::<u8, IxDyn>("kv", kv)?;
        let mut logits = arrays::write::<f32, Ix2>("logits", logits)?;
        let logits = logits.as_slice_mut()?;
        let format = kv_format(py, kv_dtype)?;
        let program = &mut self.program;
        with_kv(&mut kv, format, |view| {
            py.detach(|| program.run(step, &view, logits))
        })?
        .map_err(|error| PyValueError::new_err(error.to_string()))
    }
}

fn label(kind: StageKind) -> String {
    match kind {
        StageKind::Linear {
            num_out,
            num_in,
            is_head,
        } => {
            let name = if is_head { "head" } else { "linear" };
            format!("{name} {num_in} to {num_out}")
        }
        StageKind::Attention => "attention".to_owned(),
        StageKind::Rows(name) => name.to_owned(),
    }
}

fn kv_format(py: Python<'_>, name: &str) -> PyResult<KvFormat> {
    match name {
        "float32" => Ok(KvFormat::F32),
        "bfloat16" => Ok(KvFormat::Bf16),
        "float16" => Ok(KvFormat::F16),
        "int8" => Ok(KvFormat::Int8),
        other => {
            let expected = "float32, bfloat16, float16 or int8";
            Err(errors::named(py, "kv_dtype", other.to_owned(), expected))
        }
    }
}

/// Calls `run` with a view of `[num_layers, 2, num_blocks, block_size, num_kv_heads, head bytes]` bytes.
fn with_kv<T>(
    kv: &mut PyReadwriteArrayDyn<'_, u8>,
    format: KvFormat,
    run: impl FnOnce(KvView) -> T,
) -> PyResult<T> {
    let base = kv.as_slice_mut()?.as_mut_ptr();
    Ok(run(view(base, format, kv.shape())?))
}

#[allow(unsafe_code, reason = "the cache is a tensor's memory; see SAFETY")]
fn view(base: *mut u8, format: KvFormat, shape: &[usize]) -> PyResult<KvView> {
    let wrong = |why: &str| {
        Err(PyValueError::new_err(format!(
            "The KV cache has shape {shape:?}, but {why}."
        )))
    };
    let &[
        num_layers,
        2,
        num_blocks,
        block_size,
        num_kv_heads,
        head_bytes,
    ] = shape
    else {
        return wrong("needs [layers, 2, blocks, block size, heads, bytes of a head]");
    };
    let Some(head_dim) = format.head_dim(head_bytes) else {
        return wrong("no head of its number format has so many bytes");
    };
    if base.align_offset(align_of::<f32>()) != 0 {
        return wrong("begins at no multiple of 4 bytes");
    }
    // SAFETY: `with_kv` holds an exclusive borrow of a contiguous array of this shape while the view is used, any bytes
    // are numbers of each format, and the array keeps its memory alive. Nobody else writes the tensor while a step runs:
    // steps, and moves between them, are jobs of one runner thread.
    Ok(unsafe {
        KvView::new(
            base,
            format,
            num_layers,
            num_blocks,
            block_size,
            num_kv_heads,
            head_dim,
        )
    })
}
