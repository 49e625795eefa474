//! One worker's part of each stage.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::Stage;
use crate::attention::{Attend, AttentionOptions, Heads, KvFormat, Scratch, Unit};
use crate::builder::{Shape, Table, Value};
use crate::gemm;
use crate::kernels::Kernels;
use crate::kv::KvView;
use crate::matrix::Matrix;
use crate::memory::Rows;
use crate::simd::{Bf16, Element};
use crate::step::Step;

/// What all workers see of a running step.
pub(super) struct Running<'a> {
    pub(super) kernels: &'static Kernels,
    pub(super) tables: &'a [Table],
    pub(super) vectors: &'a [Vec<f32>],
    pub(super) matrices: &'a [Matrix],
    pub(super) shapes: &'a [Shape],
    pub(super) slot_of: &'a [usize],
    /// By value.
    pub(super) rows: &'a [Rows],
    /// By stage.
    pub(super) taken: &'a [AtomicUsize],
    pub(super) units: &'a [Unit],
    pub(super) num_done: &'a [AtomicUsize],
    pub(super) parts: Rows,
    pub(super) num_workers: usize,
    pub(super) step: &'a Step<'a>,
    pub(super) kv: &'a KvView,
}

/// Mutable things, one for each worker.
pub(super) struct Shares<T> {
    base: *mut T,
    len: usize,
}

// SAFETY: `Shares::of` has each worker take its own.
unsafe impl<T: Send> Sync for Shares<T> {}

impl<T> Shares<T> {
    pub(super) fn new(all: &mut [T]) -> Shares<T> {
        Shares { base: all.as_mut_ptr(), len: all.len() }
    }

    /// # Safety
    /// Nobody else holds this one, and the slice that it was made of still lives.
    #[allow(clippy::mut_from_ref, reason = "each worker has its own index")]
    pub(super) unsafe fn of(&self, index: usize) -> &mut T {
        assert!(index < self.len, "a share for each worker");
        // SAFETY: inside of the slice; the rest is the caller's.
        unsafe { &mut *self.base.add(index) }
    }
}

impl Running<'_> {
    fn at(&self, value: Value) -> Rows {
        self.rows[value.0]
    }

    fn width(&self, value: Value) -> usize {
        self.shapes[value.0].width
    }

    fn num_rows(&self, value: Value) -> usize {
        if self.shapes[value.0].is_logits {
            self.step.logits_indices.len()
        } else {
            self.step.num_tokens()
        }
    }

    /// A worker's rows of a value.
    fn share(&self, value: Value, worker: usize) -> std::ops::Range<usize> {
        let num_rows = self.num_rows(value);
        num_rows * worker / self.num_workers..num_rows * (worker + 1) / self.num_workers
    }

    /// Does a worker's part.
    ///
    /// # Safety
    /// The step was checked against program and cache, and slots have its rows. All workers call it for each stage in
    /// order, with a barrier after each, and nobody else uses slots or cache.
    pub(super) unsafe fn stage(
        &self,
        index: usize,
        stage: &Stage,
        worker: usize,
        scratch: &mut Scratch,
    ) {
        // SAFETY: rows are this worker's share, and a stage's inputs and outputs lie in different slots (or are the same
        // row, read before it is written). Kernels are those of a CPU that was found to have them.
        unsafe {
            match *stage {
                Stage::Multiply { x, matrix, out } => gemm::multiply(
                    self.kernels,
                    self.at(x),
                    self.num_rows(out),
                    &self.matrices[matrix.0],
                    self.at(out),
                    &self.taken[index],
                ),
                Stage::Attend { qkv, layer, heads, options, out } => {
                    self.attend(index, layer, heads, options, (qkv, out), scratch);
                }
                Stage::Rotate { qkv, cos, sin, heads, stored_layer } => {
                    for row in self.share(qkv, worker) {
                        self.rotate(qkv, cos, sin, heads, row);
                        if let Some(layer) = stored_layer {
                            self.store(qkv, layer, heads, row);
                        }
                    }
                }
                Stage::Store { qkv, layer, heads } => {
                    for row in self.share(qkv, worker) {
                        self.store(qkv, layer, heads, row);
                    }
                }
                Stage::Angles { frequencies, cos, sin } => {
                    let frequencies = &self.vectors[frequencies.0];
                    for row in self.share(cos, worker) {
                        let position = self.step.positions[row] as f32;
                        let cos = self.at(cos).row_mut(row, frequencies.len());
                        let sin = self.at(sin).row_mut(row, frequencies.len());
                        for (place, frequency) in frequencies.iter().enumerate() {
                            (sin[place], cos[place]) = (position * frequency).sin_cos();
                        }
                    }
                }
                _ => self.rowwise(stage, worker),
            }
        }
    }

    /// Stages that take one row to one row.
    ///
    /// # Safety
    /// As for `stage`.
    unsafe fn rowwise(&self, stage: &Stage, worker: usize) {
        let out = *stage.outputs().last().expect("such a stage has an output");
        let width = self.width(out);
        let kernels = self.kernels;
        for row in self.share(out, worker) {
            // SAFETY: as in `stage`.
            unsafe {
                let to = self.at(out).row_mut(row, width);
                let of = |x: Value| self.at(x).row(row, self.width(x));
                match *stage {
                    Stage::Embed { table, .. } => {
                        let table = &self.tables[table.0];
                        let id = self.step.input_ids[row] as usize;
                        to.copy_from_slice(&table.numbers[id * width..][..width]);
                    }
                    Stage::Choose { x, .. } => {
                        let token = self.step.logits_indices[row] as usize;
                        to.copy_from_slice(self.at(x).row(token, width));
                    }
                    Stage::Norm { x, weight, eps, .. } => {
                        (kernels.rms_norm)(of(x), &self.vectors[weight.0], eps, to);
                    }
                    Stage::AddNorm { x, y, sum, weight, eps, .. } => {
                        let sum = self.at(sum).row_mut(row, width);
                        (kernels.add)(of(x), of(y), sum);
                        (kernels.rms_norm)(sum, &self.vectors[weight.0], eps, to);
                    }
                    Stage::Add { x, y, .. } => (kernels.add)(of(x), of(y), to),
                    Stage::SiluMul { x, .. } => (kernels.silu_mul)(of(x), to),
                    Stage::GeluMul { x, .. } => (kernels.gelu_mul)(of(x), to),
                    Stage::Scale { x, factor, .. } => {
                        self.copy_unless_in_place(x, out, row);
                        (kernels.scale)(factor, to);
                    }
                    Stage::Softcap { x, cap, .. } => {
                        self.copy_unless_in_place(x, out, row);
                        (kernels.softcap)(cap, to);
                    }
                    _ => unreachable!("no stage of one row to one row"),
                }
            }
        }
    }

    /// # Safety
    /// As for `stage`; the row is this worker's.
    unsafe fn copy_unless_in_place(&self, x: Value, out: Value, row: usize) {
        if self.slot_of[x.0] != self.slot_of[out.0] {
            let width = self.width(out);
            // SAFETY: two slots; the row is this worker's.
            unsafe {
                let from = self.at(x).row(row, width);
                self.at(out).row_mut(row, width).copy_from_slice(from);
            }
        }
    }

    /// # Safety
    /// As for `stage`; the row is this worker's.
    unsafe fn rotate(&self, qkv: Value, cos: Value, sin: Value, heads: Heads, row: usize) {
        let dim = heads.head_dim;
        let num_rotated = heads.num_heads + heads.num_kv_heads;
        // SAFETY: the row is this worker's, and its rotation was made in an earlier stage.
        unsafe {
            let cos = self.at(cos).row(row, dim / 2);
            let sin = self.at(sin).row(row, dim / 2);
            let rotated = self.at(qkv).row_mut(row, num_rotated * dim);
            for head in rotated.chunks_exact_mut(dim) {
                (self.kernels.rotate)(head, cos, sin);
            }
        }
    }

    /// # Safety
    /// As for `stage`; the row is this worker's.
    unsafe fn store(&self, qkv: Value, layer: usize, heads: Heads, row: usize) {
        let slot = self.step.slot_mapping[row];
        if slot < 0 {
            return; // padding
        }
        let size = self.kv.token_size();
        let (keys, values) = self.kv.layer(layer);
        // SAFETY: the slot lies in the cache and is no other token's; the row is this worker's.
        unsafe {
            let from = self.at(qkv).row(row, heads.qkv_width());
            let (key, value) = from[heads.num_heads * heads.head_dim..].split_at(size);
            let at = slot as usize * size;
            match self.kv.format {
                KvFormat::F32 => {
                    write::<f32>(key, keys.cast::<f32>().add(at));
                    write::<f32>(value, values.cast::<f32>().add(at));
                }
                KvFormat::Bf16 => {
                    write::<Bf16>(key, keys.cast::<Bf16>().add(at));
                    write::<Bf16>(value, values.cast::<Bf16>().add(at));
                }
            }
        }
    }

    /// # Safety
    /// As for `stage`.
    unsafe fn attend(
        &self,
        index: usize,
        layer: usize,
        heads: Heads,
        options: AttentionOptions,
        (qkv, out): (Value, Value),
        scratch: &mut Scratch,
    ) {
        let (keys, values) = self.kv.layer(layer);
        let num_kv_heads = heads.num_kv_heads;
        loop {
            let taken = self.taken[index].fetch_add(1, Ordering::Relaxed);
            let Some(&unit) = self.units.get(taken / num_kv_heads) else {
                return;
            };
            let attend = Attend {
                unit,
                heads,
                kv_head: taken % num_kv_heads,
                options,
                qkv: self.at(qkv),
                out: self.at(out),
                keys,
                values,
                format: self.kv.format,
                block_size: self.kv.block_size,
                table: self.step.table(unit.seat),
                parts: self.parts,
                num_done: self.num_done,
            };
            // SAFETY: the unit is this worker's with this head; K and V were stored in an earlier stage.
            unsafe { (self.kernels.attend)(&attend, scratch) };
        }
    }
}

/// # Safety
/// `to` has as many places, and nobody else uses them.
unsafe fn write<E: Element>(from: &[f32], to: *mut E) {
    for (place, &number) in from.iter().enumerate() {
        // SAFETY: the caller's.
        unsafe { to.add(place).write(E::of(number)) };
    }
}
