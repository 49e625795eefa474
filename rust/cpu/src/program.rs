//! A recorded forward, and running a step of it.
//!
//! Values live in *slots*, which are reused as soon as a value is read for the last time; slots grow to the largest step
//! seen, and then nothing is allocated any more. The result's slot is the caller's memory.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use crate::attention::{AttentionOptions, Heads, Scratch, Unit};
use crate::builder::{Builder, MatrixId, Shape, Table, TableId, Value, VectorId};
use crate::gemm;
use crate::kernels::Kernels;
use crate::kv::KvView;
use crate::matrix::Matrix;
use crate::memory::{Buffer, Rows};
use crate::pool::Pool;
use crate::step::{Step, StepError};

mod plan;
mod run;

/// The most rows of a tile.
const MAX_TILE_ROWS: usize = 8;

/// What workers do together, before any of them goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stage {
    Embed {
        table: TableId,
        out: Value,
    },
    Norm {
        x: Value,
        weight: VectorId,
        eps: f32,
        out: Value,
    },
    AddNorm {
        x: Value,
        y: Value,
        sum: Value,
        weight: VectorId,
        eps: f32,
        out: Value,
    },
    Add {
        x: Value,
        y: Value,
        out: Value,
    },
    Scale {
        x: Value,
        factor: f32,
        out: Value,
    },
    Softcap {
        x: Value,
        cap: f32,
        out: Value,
    },
    /// Lays rows by tiles, for a product; one row needs none of it.
    Pack {
        x: Value,
        tile_rows: usize,
        out: Value,
    },
    /// `packed` is `x` by tiles, where there is more than one row. With a gate, `out` is what it makes of the product's
    /// halves.
    Multiply {
        x: Value,
        packed: Value,
        matrix: MatrixId,
        gate: Option<Gate>,
        out: Value,
    },
    QkNorm {
        qkv: Value,
        weights: [VectorId; 2],
        eps: f32,
        heads: Heads,
    },
    Angles {
        frequencies: VectorId,
        scale: f32,
        cos: Value,
        sin: Value,
    },
    Rotate {
        qkv: Value,
        cos: Value,
        sin: Value,
        heads: Heads,
        stored_layer: Option<usize>,
    },
    Store {
        qkv: Value,
        layer: usize,
        heads: Heads,
    },
    Attend {
        qkv: Value,
        layer: usize,
        heads: Heads,
        options: AttentionOptions,
        out: Value,
    },
    Gate {
        x: Value,
        gate: Gate,
        out: Value,
    },
    Choose {
        x: Value,
        out: Value,
    },
    Quantise {
        x: Value,
        limit: f32,
        out: Value,
    },
}

/// What the first half of a row is turned into before it is multiplied by the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    Silu,
    Gelu,
}

impl Stage {
    /// What it reads.
    fn inputs(&self) -> Vec<Value> {
        match *self {
            Stage::Embed { .. } | Stage::Angles { .. } => vec![],
            Stage::Norm { x, .. }
            | Stage::Scale { x, .. }
            | Stage::Softcap { x, .. }
            | Stage::Pack { x, .. }
            | Stage::Gate { x, .. }
            | Stage::Quantise { x, .. }
            | Stage::Choose { x, .. } => vec![x],
            Stage::Multiply { x, packed, .. } => vec![x, packed],
            Stage::AddNorm { x, y, .. } | Stage::Add { x, y, .. } => vec![x, y],
            Stage::Rotate { qkv, cos, sin, .. } => vec![qkv, cos, sin],
            Stage::QkNorm { qkv, .. } | Stage::Store { qkv, .. } | Stage::Attend { qkv, .. } => {
                vec![qkv]
            }
        }
    }

    /// What it makes.
    fn outputs(&self) -> Vec<Value> {
        match *self {
            Stage::QkNorm { .. } | Stage::Rotate { .. } | Stage::Store { .. } => vec![],
            Stage::AddNorm { sum, out, .. } => vec![sum, out],
            Stage::Angles { cos, sin, .. } => vec![cos, sin],
            _ => vec![self.rows_of()],
        }
    }

    /// Of an op on rows: what it does.
    fn name(&self) -> &'static str {
        match self {
            Stage::Embed { .. } => "embed",
            Stage::Norm { .. } => "norm",
            Stage::AddNorm { .. } => "add and norm",
            Stage::Add { .. } => "add",
            Stage::Scale { .. } => "scale",
            Stage::Softcap { .. } => "softcap",
            Stage::QkNorm { .. } => "norm of heads",
            Stage::Angles { .. } => "angles",
            Stage::Rotate { .. } => "rotate and store",
            Stage::Store { .. } => "store",
            Stage::Gate {
                gate: Gate::Silu, ..
            } => "silu and multiply",
            Stage::Gate {
                gate: Gate::Gelu, ..
            } => "gelu and multiply",
            Stage::Choose { .. } => "choose",
            Stage::Quantise { .. } => "quantise",
            Stage::Pack { .. } => "pack",
            Stage::Multiply { .. } => "linear",
            Stage::Attend { .. } => "attention",
        }
    }

    /// The value whose rows it makes, or changes.
    pub(crate) fn rows_of(&self) -> Value {
        match *self {
            Stage::Embed { out, .. }
            | Stage::Norm { out, .. }
            | Stage::AddNorm { out, .. }
            | Stage::Add { out, .. }
            | Stage::Scale { out, .. }
            | Stage::Softcap { out, .. }
            | Stage::Pack { out, .. }
            | Stage::Multiply { out, .. }
            | Stage::Attend { out, .. }
            | Stage::Gate { out, .. }
            | Stage::Quantise { out, .. }
            | Stage::Choose { out, .. } => out,
            Stage::Angles { cos, .. } => cos,
            Stage::QkNorm { qkv, .. } | Stage::Rotate { qkv, .. } | Stage::Store { qkv, .. } => qkv,
        }
    }

    /// Whether it makes a value row by row.
    pub(crate) fn makes_rows_of(&self, value: Value) -> bool {
        let is_by_row = match self {
            Stage::Pack { .. }
            | Stage::Multiply { .. }
            | Stage::Attend { .. }
            | Stage::QkNorm { .. }
            | Stage::Angles { .. }
            | Stage::Rotate { .. }
            | Stage::Store { .. } => false,
            Stage::Embed { .. }
            | Stage::Norm { .. }
            | Stage::AddNorm { .. }
            | Stage::Add { .. }
            | Stage::Scale { .. }
            | Stage::Softcap { .. }
            | Stage::Gate { .. }
            | Stage::Choose { .. }
            | Stage::Quantise { .. } => true,
        };
        is_by_row && self.rows_of() == value
    }

    /// Whose slot its output may take, if it is not read any more: row by row, nothing is read after it is written.
    fn in_place(&self) -> Option<(Value, Value)> {
        match *self {
            Stage::Scale { x, out, .. } | Stage::Softcap { x, out, .. } => Some((x, out)),
            _ => None,
        }
    }
}

/// What of a stage is taken, and what is done.
pub(crate) struct Units {
    taken: AtomicUsize,
    done: AtomicUsize,
    /// What is taken of each worker's share.
    shares: Box<[Share]>,
}

/// In a cache line of its own: a worker that counts does not wait for another.
#[derive(Default)]
#[repr(align(64))]
struct Share(AtomicUsize);

impl Units {
    fn new(num_workers: usize) -> Units {
        Units {
            taken: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            shares: (0..num_workers).map(|_| Share::default()).collect(),
        }
    }

    fn reset(&mut self) {
        *self.taken.get_mut() = 0;
        *self.done.get_mut() = 0;
        for share in &mut self.shares {
            *share.0.get_mut() = 0;
        }
    }

    /// Where a worker's share of so many begins.
    pub(crate) fn first_of_share(&self, worker: usize, num_units: usize) -> usize {
        worker * num_units / self.shares.len()
    }

    /// A worker's next of so many, some at once: of its share, an even part that lies in one piece, then of what others left
    /// of theirs. Not to be mixed with `take`.
    pub(crate) fn take_of_share(
        &self,
        worker: usize,
        num_units: usize,
        at_once: usize,
    ) -> Option<Range<usize>> {
        let num_shares = self.shares.len();
        for place in 0..num_shares {
            let owner = (worker + place) % num_shares;
            let start = self.first_of_share(owner, num_units);
            let len = self.first_of_share(owner + 1, num_units) - start;
            let taken = &self.shares[owner].0;
            // Looked at before: a share that is empty is left alone.
            if taken.load(Ordering::Relaxed) < len {
                let first = taken.fetch_add(at_once, Ordering::Relaxed);
                if first < len {
                    return Some(start + first..start + len.min(first + at_once));
                }
            }
        }
        None
    }

    /// The next one's number; there may be none of it left.
    pub(crate) fn take(&self) -> usize {
        self.taken.fetch_add(1, Ordering::Relaxed)
    }

    /// One is done: what it wrote is seen by who sees the count.
    pub(crate) fn finish(&self) {
        self.finish_all(1);
    }

    /// So many are done.
    pub(crate) fn finish_all(&self, num_units: usize) {
        self.done.fetch_add(num_units, Ordering::AcqRel);
    }

    fn num_done(&self) -> &AtomicUsize {
        &self.done
    }
}

/// What a stage does, and how long it has taken since the program was built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageTime {
    /// What it does.
    pub kind: StageKind,
    /// As the caller's thread saw it, waits included; the first stage's has waking the pool in it.
    pub ns: u64,
}

/// What a stage does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageKind {
    /// A product with a matrix.
    Linear {
        /// Output features.
        num_out: usize,
        /// Input features.
        num_in: usize,
        /// Whether it makes logits.
        is_head: bool,
    },
    /// Attention.
    Attention,
    /// An op on rows, by its name.
    Rows(&'static str),
}

/// A model's forward, with its parameters and its pool.
pub struct Program {
    kernels: &'static Kernels,
    tables: Vec<Table>,
    vectors: Vec<Vec<f32>>,
    matrices: Vec<Matrix>,
    shapes: Vec<Shape>,
    stages: Vec<Stage>,
    /// By value; the result's is the first.
    slot_of: Vec<usize>,
    /// By value: whether products alone read it.
    is_passed_on: Vec<bool>,
    slots: Vec<Slot>,
    /// By value, of the running step.
    rows: Vec<Rows>,
    /// Layers, KV heads, head size that the cache must have.
    kv_shape: [usize; 3],
    vocab_size: usize,
    num_logits_columns: usize,
    /// By stage.
    shared_units: Vec<Units>,
    attention: AttentionPlan,
    scratch: Vec<WorkerScratch>,
    checked_slots: Vec<i64>,
    pool: Pool,
    /// Nanoseconds by stage.
    times: Vec<AtomicU64>,
}

/// What a worker computes in.
struct WorkerScratch {
    /// Whose it is.
    worker: usize,
    attention: Scratch,
    /// What products take.
    panel: Buffer,
    /// A tile's rows, and the same in whole numbers: what is only laid out needs no place of its own.
    tile: [Buffer; 2],
}

/// One buffer that values share, one after another.
struct Slot {
    width: usize,
    is_logits: bool,
    buffer: Buffer,
}

/// How a step's attention is cut; the same for all layers.
#[derive(Default)]
struct AttentionPlan {
    units: Vec<Unit>,
    num_done: Vec<AtomicUsize>,
    parts: Option<Buffer>,
    part_stride: usize,
    max_queries: usize,
}

impl Program {
    pub(crate) fn new(
        builder: Builder,
        result: Value,
        kv_shape: [usize; 3],
        num_workers: usize,
    ) -> std::io::Result<Program> {
        let (slot_of, slots) = assign_slots(&builder, result);
        let heads: Vec<Heads> = builder.stages.iter().filter_map(attended).collect();
        let vocab_size = builder
            .tables
            .iter()
            .map(|table| table.numbers.len() / table.width)
            .min()
            .unwrap_or(0);
        let attention = AttentionPlan {
            part_stride: heads
                .iter()
                .map(|h| h.group() * (h.head_dim + 2))
                .max()
                .unwrap_or(0),
            max_queries: heads.iter().map(|h| h.max_queries()).min().unwrap_or(1),
            ..AttentionPlan::default()
        };
        let panel_words = builder.matrices.iter().map(gemm::scratch_words);
        let panel_words = panel_words.max().unwrap_or(0);
        let widest = builder.shapes.iter().map(|shape| row_stride(shape.width));
        let tile_words = MAX_TILE_ROWS * widest.max().unwrap_or(0);
        Ok(Program {
            kernels: Kernels::of(builder.isa),
            num_logits_columns: builder.shapes[result.0].width,
            shared_units: builder
                .stages
                .iter()
                .map(|_| Units::new(num_workers))
                .collect(),
            times: builder.stages.iter().map(|_| AtomicU64::new(0)).collect(),
            scratch: (0..num_workers)
                .map(|worker| WorkerScratch {
                    worker,
                    attention: Scratch::new(heads.iter().copied()),
                    panel: Buffer::zeroed(panel_words),
                    tile: [Buffer::zeroed(tile_words), Buffer::zeroed(tile_words)],
                })
                .collect(),
            tables: builder.tables,
            vectors: builder.vectors,
            matrices: builder.matrices,
            is_passed_on: is_passed_on(&builder.stages, builder.shapes.len()),
            shapes: builder.shapes,
            stages: builder.stages,
            rows: vec![Rows::new(std::ptr::null_mut(), 0); slot_of.len()],
            slot_of,
            slots,
            kv_shape,
            vocab_size,
            attention,
            checked_slots: Vec::new(),
            pool: Pool::new(num_workers)?,
        })
    }

    /// Threads that compute, the caller's included.
    pub fn num_workers(&self) -> usize {
        self.pool.num_workers()
    }

    /// Columns of the result.
    pub fn num_logits_columns(&self) -> usize {
        self.num_logits_columns
    }

    /// Bytes of all parameters.
    pub fn num_bytes(&self) -> usize {
        let numbers = self
            .tables
            .iter()
            .map(|table| table.numbers.len())
            .sum::<usize>()
            + self.vectors.iter().map(Vec::len).sum::<usize>();
        4 * numbers + self.matrices.iter().map(Matrix::num_bytes).sum::<usize>()
    }

    /// Where its time went so far, stage by stage.
    pub fn times(&self) -> impl Iterator<Item = StageTime> {
        let stages = self.stages.iter().zip(&self.times);
        stages.map(|(stage, time)| StageTime {
            kind: self.kind(stage),
            ns: time.load(Ordering::Relaxed),
        })
    }

    fn kind(&self, stage: &Stage) -> StageKind {
        match *stage {
            Stage::Multiply { matrix, out, .. } => StageKind::Linear {
                num_out: self.matrices[matrix.0].num_out,
                num_in: self.matrices[matrix.0].num_in,
                is_head: self.shapes[out.0].is_logits,
            },
            Stage::Attend { .. } => StageKind::Attention,
            _ => StageKind::Rows(stage.name()),
        }
    }

    /// Computes a step: stores its K and V, and writes the wanted tokens' logits, `[num_logits, columns]`.
    ///
    /// # Errors
    /// The step does not fit the program, the cache or `logits`; nothing was computed.
    pub fn run(
        &mut self,
        step: &Step<'_>,
        kv: &KvView,
        logits: &mut [f32],
    ) -> Result<(), StepError> {
        let found = [kv.num_layers, kv.num_kv_heads, kv.head_dim];
        let attends = self.kv_shape[0] > 0;
        if attends && (found[0] < self.kv_shape[0] || found[1..] != self.kv_shape[1..]) {
            return Err(StepError::Cache {
                found,
                expected: self.kv_shape,
            });
        }
        step.check(self.vocab_size, kv, &mut self.checked_slots)?;
        let expected = step.logits_indices.len() * self.num_logits_columns;
        if logits.len() != expected {
            return Err(StepError::Length {
                name: "logits",
                found: logits.len(),
                expected,
            });
        }
        let num_workers = self.pool.num_workers();
        self.attention.prepare(step, self.kv_shape[1], num_workers);
        for slot in &mut self.slots[1..] {
            slot.reserve(if slot.is_logits {
                step.logits_indices.len()
            } else {
                step.num_tokens()
            });
        }
        self.shared_units.iter_mut().for_each(Units::reset);
        self.compute(step, kv, logits);
        Ok(())
    }

    fn compute(&mut self, step: &Step<'_>, kv: &KvView, logits: &mut [f32]) {
        let logits = logits.as_mut_ptr();
        for (value, rows) in self.rows.iter_mut().enumerate() {
            let (slot, width) = (self.slot_of[value], self.shapes[value].width);
            *rows = match slot {
                UNMADE => Rows::new(std::ptr::null_mut(), 0),
                0 => Rows::new(logits, width),
                _ => Rows::new(self.slots[slot].buffer.as_mut_ptr(), row_stride(width)),
            };
        }
        let parts = self
            .attention
            .parts
            .as_mut()
            .map_or(std::ptr::null_mut(), Buffer::as_mut_ptr);
        let running = run::Running {
            kernels: self.kernels,
            stages: &self.stages,
            tables: &self.tables,
            vectors: &self.vectors,
            matrices: &self.matrices,
            shapes: &self.shapes,
            is_passed_on: &self.is_passed_on,
            rows: &self.rows,
            shared_units: &self.shared_units,
            attention_units: &self.attention.units,
            num_done: &self.attention.num_done,
            parts: Rows::new(parts, self.attention.part_stride),
            num_workers: self.pool.num_workers(),
            step,
            kv,
        };
        let scratch = run::Shares::new(&mut self.scratch);
        let (stages, times) = (&self.stages, &self.times);
        let started = Instant::now();
        self.pool.run(&|worker| {
            // SAFETY: each worker takes its own, once a job.
            let scratch = unsafe { scratch.of(worker.index) };
            let mut last = started;
            for (index, stage) in stages.iter().enumerate() {
                // SAFETY: the step was checked; a stage begins when the one before is done.
                unsafe { running.stage(index, stage, scratch) };
                worker.wait_for(
                    running.shared_units[index].num_done(),
                    running.units_of(stage).0,
                );
                if worker.index == 0 {
                    let now = Instant::now();
                    let ns = (now - last).as_nanos() as u64;
                    times[index].fetch_add(ns, Ordering::Relaxed);
                    last = now;
                }
            }
        });
    }
}

impl Slot {
    fn reserve(&mut self, num_rows: usize) {
        let size = num_rows * row_stride(self.width);
        if self.buffer.capacity() < size {
            self.buffer = Buffer::zeroed(size);
        }
    }
}

/// From one row of a value to the next. Rows begin at a cache line, and never a multiple of 1 KiB apart: a product reads
/// some rows side by side, and at such distances they would take each other's place in the cache.
fn row_stride(width: usize) -> usize {
    let lines = width.div_ceil(16);
    16 * if lines.is_multiple_of(16) {
        lines + 1
    } else {
        lines
    }
}

fn attended(stage: &Stage) -> Option<Heads> {
    match stage {
        Stage::Attend { heads, .. } => Some(*heads),
        _ => None,
    }
}

/// Which values products alone read, if any stage does.
fn is_passed_on(stages: &[Stage], num_values: usize) -> Vec<bool> {
    let mut is_passed_on = vec![true; num_values];
    for stage in stages {
        if !matches!(stage, Stage::Multiply { .. }) {
            for value in stage.inputs() {
                is_passed_on[value.0] = false;
            }
        }
    }
    is_passed_on
}

/// The slot of a value that no stage makes: a gate has taken its place.
const UNMADE: usize = usize::MAX;

/// Gives each value a slot; slot 0 is the result's.
fn assign_slots(builder: &Builder, result: Value) -> (Vec<usize>, Vec<Slot>) {
    let num_values = builder.shapes.len();
    let mut last_read = vec![0; num_values];
    for (index, stage) in builder.stages.iter().enumerate() {
        for value in stage.inputs() {
            last_read[value.0] = index;
        }
    }
    // The result, and what it is made of in place, lie in the caller's memory.
    let mut slot_of = vec![UNMADE; num_values];
    slot_of[result.0] = 0;
    for (index, stage) in builder.stages.iter().enumerate().rev() {
        if let Some((x, out)) = stage.in_place()
            && slot_of[out.0] == 0
            && last_read[x.0] == index
        {
            slot_of[x.0] = 0;
        }
    }
    let shape = builder.shapes[result.0];
    let empty = |shape: Shape| Slot {
        width: shape.width,
        is_logits: shape.is_logits,
        buffer: Buffer::zeroed(0),
    };
    let mut slots = vec![empty(shape)];
    let mut free: Vec<usize> = Vec::new();
    for (index, stage) in builder.stages.iter().enumerate() {
        for value in stage.inputs() {
            assert!(
                slot_of[value.0] != UNMADE,
                "a product's halves are read beside what their gate makes"
            );
        }
        let mut made = stage.outputs();
        for place in 0.. {
            let Some(out) = made.get(place) else { break };
            let shape = builder.shapes[out.0];
            made.extend(shape.quantised.map(|(_, quantised)| quantised));
            made.extend(shape.packed.map(|(_, packed)| packed));
        }
        for &out in &made {
            if slot_of[out.0] != UNMADE {
                continue;
            }
            let shape = builder.shapes[out.0];
            let found = free
                .iter()
                .position(|&slot| slots[slot].is_logits == shape.is_logits);
            let slot = found.map_or_else(
                || {
                    slots.push(empty(shape));
                    slots.len() - 1
                },
                |place| free.swap_remove(place),
            );
            slots[slot].width = slots[slot].width.max(shape.width);
            slot_of[out.0] = slot;
        }
        // What no later stage reads, what is quantised where it is made among it, is free again.
        let mut used = stage.inputs();
        used.extend(made);
        used.sort_unstable();
        used.dedup();
        for value in used {
            if last_read[value.0] <= index && slot_of[value.0] != 0 {
                free.push(slot_of[value.0]);
            }
        }
    }
    (slot_of, slots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::matrix::Format;

    #[test]
    fn values_of_more_layers_take_no_more_slots() {
        let num_slots = |format, num_layers| {
            let mut builder = Builder::new(Isa::Portable).expect("portable is everywhere");
            let table = builder.table(vec![1.0; 64], 32);
            let weight = builder.vector(vec![1.0; 32]);
            let mut x = builder.embed(table);
            for _ in 0..num_layers {
                let normed = builder.rms_norm(x, weight, 1e-5);
                let map = Matrix::pack(Isa::Portable, format, &[0.5; 64 * 32], 32, None);
                let map = builder.matrix(map);
                let gate_up = builder.linear(normed, map);
                let made = builder.silu_mul(gate_up);
                let map = Matrix::pack(Isa::Portable, format, &[0.5; 32 * 32], 32, None);
                let map = builder.matrix(map);
                let made = builder.linear(made, map);
                x = builder.add(x, made);
            }
            let head = Matrix::pack(Isa::Portable, format, &[0.5; 32 * 32], 32, None);
            let head = builder.matrix(head);
            let logits = builder.logits(x, head);
            assign_slots(&builder, logits).1.len()
        };
        for format in [Format::F32, Format::Int8] {
            assert_eq!(num_slots(format, 2), num_slots(format, 9), "{format:?}");
        }
    }
}
