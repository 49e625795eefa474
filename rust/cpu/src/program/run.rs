//! One worker's part of each stage.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

use super::{Stage, Units, WorkerScratch};
use crate::attention::{Attend, AttentionOptions, Heads, Scratch, Unit};
use crate::builder::{Shape, Table, Value, VectorId};
use crate::gemm;
use crate::kernels::Kernels;
use crate::kv::KvView;
use crate::matrix::Matrix;
use crate::memory::{Buffer, Rows};
use crate::step::Step;
use crate::tile::Tiles;

/// Numbers of a unit of rows, at least: less is not worth sharing.
const MIN_NUMBERS: usize = 4096;

/// What all workers see of a running step.
pub(super) struct Running<'a> {
    pub(super) kernels: &'static Kernels,
    pub(super) stages: &'a [Stage],
    pub(super) tables: &'a [Table],
    pub(super) vectors: &'a [Vec<f32>],
    pub(super) matrices: &'a [Matrix],
    pub(super) shapes: &'a [Shape],
    pub(super) is_passed_on: &'a [bool],
    /// By value.
    pub(super) rows: &'a [Rows],
    /// By stage.
    pub(super) shared_units: &'a [Units],
    pub(super) attention_units: &'a [Unit],
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
        Shares {
            base: all.as_mut_ptr(),
            len: all.len(),
        }
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

    /// The next product's matrix.
    fn product_after(&self, index: usize) -> Option<&Matrix> {
        self.stages[index + 1..]
            .iter()
            .find_map(|stage| match stage {
                Stage::Multiply { matrix, .. } => Some(&self.matrices[matrix.0]),
                _ => None,
            })
    }

    /// Units of a stage in this step, each of so many rows (or tiles, or panels, or attention's own).
    pub(super) fn units_of(&self, stage: &Stage) -> (usize, usize) {
        match *stage {
            Stage::Multiply { matrix, out, .. } => {
                let (num_rows, matrix) = (self.num_rows(out), &self.matrices[matrix.0]);
                (gemm::num_units(self.kernels, num_rows, matrix), 1)
            }
            Stage::Pack { x, tile_rows, .. } => {
                if self.num_rows(x) > 1 {
                    self.units_of_tiles(x, tile_rows)
                } else {
                    (0, 1)
                }
            }
            Stage::Attend { .. } => (self.attention_units.len(), 1),
            _ => {
                let value = stage.rows_of();
                self.units_of_tiles(value, self.packed(value).map_or(1, |(rows, ..)| rows))
            }
        }
    }

    /// Units of tiles of a value, and tiles in each.
    fn units_of_tiles(&self, value: Value, tile_rows: usize) -> (usize, usize) {
        let num_tiles = Tiles::new(self.num_rows(value), tile_rows).len();
        let tiles = num_tiles
            .div_ceil(2 * self.num_workers)
            .max(MIN_NUMBERS / (tile_rows * self.width(value)))
            .max(1);
        (num_tiles.div_ceil(tiles), tiles)
    }

    /// What is laid out by the stage that makes a value, it or what it is rounded to, and in what: one row needs none.
    fn packed(&self, value: Value) -> Option<(usize, Value, Value)> {
        let from = self.shapes[value.0].quantised.map_or(value, |(_, to)| to);
        self.shapes[from.0]
            .packed
            .filter(|_| self.num_rows(value) > 1)
            .map(|(rows, packed)| (rows, from, packed))
    }

    /// Does units of a stage until none is left.
    ///
    /// # Safety
    /// The step was checked against program and cache, and slots have its rows. Workers come here for each stage in
    /// order, once all units of the one before are done, and nobody else uses slots or cache.
    pub(super) unsafe fn stage(&self, index: usize, stage: &Stage, scratch: &mut WorkerScratch) {
        let units = &self.shared_units[index];
        match *stage {
            Stage::Multiply {
                x,
                packed,
                matrix,
                gate,
                out,
            } => {
                let num_rows = self.num_rows(out);
                let gate = gate.map(|gate| self.kernels.gate(gate));
                let x = if num_rows > 1 { packed } else { x };
                if num_rows > 0 {
                    // SAFETY: the caller's; `x` and `out` lie in different slots.
                    unsafe {
                        gemm::multiply(
                            self.kernels,
                            (self.at(x).at(0), self.width(x)),
                            num_rows,
                            (&self.matrices[matrix.0], gate, self.product_after(index)),
                            self.at(out),
                            (units, scratch.worker),
                            scratch.panel.as_mut_ptr(),
                        );
                    }
                }
            }
            Stage::Pack { x, tile_rows, out } => {
                let tiles = Tiles::new(self.num_rows(x), tile_rows);
                let (num_units, at_once) = self.units_of(stage);
                let from = (self.at(x), self.width(x));
                while let Some(unit) = units.take_of_share(scratch.worker, num_units, 1) {
                    for tile in unit.start * at_once..tiles.len().min(unit.end * at_once) {
                        let rows = tiles.first(tile)..tiles.first(tile + 1);
                        // SAFETY: the caller's; the tile's rows are this worker's.
                        unsafe { self.pack(from, rows, out) };
                    }
                    units.finish();
                }
            }
            Stage::Attend {
                qkv,
                layer,
                heads,
                options,
                out,
            } => {
                // SAFETY: the caller's.
                unsafe {
                    self.attend(
                        units,
                        layer,
                        heads,
                        options,
                        (qkv, out),
                        &mut scratch.attention,
                    );
                };
            }
            _ => {
                let value = stage.rows_of();
                let num_tiles = self.tiles_of(value).len();
                let (num_units, at_once) = self.units_of(stage);
                while let Some(unit) = units.take_of_share(scratch.worker, num_units, 1) {
                    for tile in unit.start * at_once..num_tiles.min(unit.end * at_once) {
                        // SAFETY: the caller's; the unit's rows are this worker's.
                        unsafe { self.tile(stage, tile, &mut scratch.tile) };
                    }
                    units.finish();
                }
            }
        }
    }

    /// Tiles that a value's rows are made in: without a layout to make, a row is one.
    fn tiles_of(&self, value: Value) -> Tiles {
        let rows = self.packed(value).map_or(1, |(rows, ..)| rows);
        Tiles::new(self.num_rows(value), rows)
    }

    /// A tile's rows, and what is made of them beside.
    ///
    /// # Safety
    /// As for `stage`; the rows are this worker's.
    unsafe fn tile(&self, stage: &Stage, tile: usize, scratch: &mut [Buffer; 2]) {
        let value = stage.rows_of();
        let (packed, tiles) = (self.packed(value), self.tiles_of(value));
        let rows = tiles.first(tile)..tiles.first(tile + 1);
        // What is read only as it is laid out stays near this worker.
        let [first, second] = scratch;
        let place = |value: Value, near: &mut Buffer| {
            if packed.is_some() && self.is_passed_on[value.0] {
                let stride = self.at(value).stride();
                let base = near.as_mut_ptr().wrapping_sub(rows.start * stride);
                Rows::new(base, stride)
            } else {
                self.at(value)
            }
        };
        let made = place(value, first);
        let quantised = self.shapes[value.0]
            .quantised
            .map(|(limit, to)| (limit, place(to, second), self.width(to)));
        // SAFETY: the rows are this worker's, and so is the scratch.
        unsafe {
            for row in rows.clone() {
                self.row(stage, made, row);
                if let Some((limit, to, width)) = quantised {
                    let from = made.row(row, self.width(value));
                    (self.kernels.quantise)(from, limit, to.row_mut(row, width));
                }
            }
            if let Some((_, from, out)) = packed {
                let at = quantised.map_or(made, |(_, to, _)| to);
                self.pack((at, self.width(from)), rows, out);
            }
        }
    }

    /// # Safety
    /// As for `stage`; the rows are this worker's, and a tile.
    unsafe fn pack(&self, (x, width): (Rows, usize), rows: Range<usize>, out: Value) {
        let (from, stride) = (x.at(rows.start), x.stride());
        // SAFETY: the rows are this worker's; a value by tiles takes no more place than one by rows.
        unsafe {
            let to = self.at(out).at(0).add(rows.start * width);
            (self.kernels.pack)(from, stride, rows.len(), width, to);
        }
    }

    /// One row of a stage that goes row by row.
    ///
    /// # Safety
    /// As for `stage`; the row is this worker's.
    unsafe fn row(&self, stage: &Stage, made: Rows, row: usize) {
        // SAFETY: the row is this worker's, and a stage's inputs and outputs lie in different slots (or are the same row,
        // read before it is written). Kernels are those of a CPU that was found to have them.
        unsafe {
            match *stage {
                Stage::Rotate {
                    qkv,
                    cos,
                    sin,
                    heads,
                    stored_layer,
                } => {
                    self.rotate(qkv, cos, sin, heads, row);
                    if let Some(layer) = stored_layer {
                        self.store(qkv, layer, heads, row);
                    }
                }
                Stage::Store { qkv, layer, heads } => self.store(qkv, layer, heads, row),
                Stage::QkNorm {
                    qkv,
                    weights,
                    eps,
                    heads,
                } => {
                    self.norm_heads(qkv, weights, eps, heads, row);
                }
                Stage::Angles {
                    frequencies,
                    scale,
                    cos,
                    sin,
                } => {
                    let frequencies = &self.vectors[frequencies.0];
                    let position = self.step.positions[row] as f32;
                    let cos = self.at(cos).row_mut(row, frequencies.len());
                    let sin = self.at(sin).row_mut(row, frequencies.len());
                    for (place, frequency) in frequencies.iter().enumerate() {
                        let (s, c) = (position * frequency).sin_cos();
                        (sin[place], cos[place]) = (s * scale, c * scale);
                    }
                }
                _ => self.rowwise(stage, made, row),
            }
        }
    }

    /// One row of a stage that makes a row of one row, or of two.
    ///
    /// # Safety
    /// As for `row`.
    unsafe fn rowwise(&self, stage: &Stage, made: Rows, row: usize) {
        let out = stage.rows_of();
        let width = self.width(out);
        let kernels = self.kernels;
        // SAFETY: as in `stage`.
        unsafe {
            let to = made.row_mut(row, width);
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
                    let weight = &self.vectors[weight.0];
                    (kernels.rms_norm)(of(x).as_ptr(), weight, eps, to.as_mut_ptr());
                }
                Stage::AddNorm {
                    x,
                    y,
                    sum,
                    weight,
                    eps,
                    ..
                } => {
                    let sum = self.at(sum).row_mut(row, width);
                    let weight = &self.vectors[weight.0];
                    (kernels.add_rms_norm)([of(x), of(y)], weight, eps, sum, to);
                }
                Stage::Add { x, y, .. } => (kernels.add)(of(x), of(y), to),
                Stage::Quantise { x, limit, .. } => (kernels.quantise)(of(x), limit, to),
                Stage::Gate { x, gate, .. } => kernels.gate(gate)(of(x), to),
                Stage::Scale { x, factor, .. } => {
                    self.copy_unless_in_place(x, made, row);
                    (kernels.scale)(factor, to);
                }
                Stage::Softcap { x, cap, .. } => {
                    self.copy_unless_in_place(x, made, row);
                    (kernels.softcap)(cap, to);
                }
                _ => unreachable!("no stage of one row to one row"),
            }
        }
    }

    /// # Safety
    /// As for `stage`; the row is this worker's.
    unsafe fn copy_unless_in_place(&self, x: Value, out: Rows, row: usize) {
        let (from, to) = (self.at(x).at(row), out.at(row));
        if from != to {
            // SAFETY: two slots; the row is this worker's.
            unsafe { to.copy_from_nonoverlapping(from, self.width(x)) };
        }
    }

    /// # Safety
    /// As for `stage`; the row is this worker's.
    unsafe fn rotate(&self, qkv: Value, cos: Value, sin: Value, heads: Heads, row: usize) {
        let dim = heads.head_dim;
        let num_rotated = heads.num_heads + heads.num_kv_heads;
        // SAFETY: the row is this worker's, and its rotation was made in an earlier stage.
        unsafe {
            let half = self.width(cos);
            let cos = self.at(cos).row(row, half);
            let sin = self.at(sin).row(row, half);
            let rotated = self.at(qkv).row_mut(row, num_rotated * dim);
            (self.kernels.rotate)(rotated, dim, cos, sin);
        }
    }

    /// # Safety
    /// As for `stage`; the row is this worker's.
    unsafe fn norm_heads(
        &self,
        qkv: Value,
        [q_weight, k_weight]: [VectorId; 2],
        eps: f32,
        heads: Heads,
        row: usize,
    ) {
        let dim = heads.head_dim;
        // SAFETY: the row is this worker's.
        let normed = unsafe {
            self.at(qkv)
                .row_mut(row, (heads.num_heads + heads.num_kv_heads) * dim)
        };
        let (q, k) = normed.split_at_mut(heads.num_heads * dim);
        for (part, weight) in [(q, q_weight), (k, k_weight)] {
            let weight = &self.vectors[weight.0];
            for head in part.chunks_exact_mut(dim) {
                let head = head.as_mut_ptr();
                // SAFETY: kernels are those of a CPU that was found to have them; a weight has as many numbers as a head.
                unsafe { (self.kernels.rms_norm)(head, weight, eps, head) };
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
        let (keys, values) = self.kv.layer(layer);
        let at = slot as usize * self.kv.token_bytes();
        // SAFETY: the slot lies in the cache and is no other token's; the row is this worker's.
        unsafe {
            let from = self.at(qkv).row(row, heads.qkv_width());
            let kv = &from[heads.num_heads * heads.head_dim..];
            let (key, value) = kv.split_at(heads.num_kv_heads * heads.head_dim);
            let store = self.kernels.store;
            store(key, heads.head_dim, self.kv.format, keys.add(at));
            store(value, heads.head_dim, self.kv.format, values.add(at));
        }
    }

    /// # Safety
    /// As for `stage`.
    unsafe fn attend(
        &self,
        units: &Units,
        layer: usize,
        heads: Heads,
        options: AttentionOptions,
        (qkv, out): (Value, Value),
        scratch: &mut Scratch,
    ) {
        let (keys, values) = self.kv.layer(layer);
        let mut index = units.take();
        while let Some(&unit) = self.attention_units.get(index) {
            index = units.take();
            let next = self.attention_units.get(index);
            let attend = Attend {
                kernels: self.kernels,
                unit,
                table: self.step.table(unit.seat),
                next: next.map(|&next| (next, self.step.table(next.seat))),
                heads,
                options,
                qkv: self.at(qkv),
                out: self.at(out),
                keys,
                values,
                format: self.kv.format,
                block_size: self.kv.block_size,
                parts: self.parts,
                num_done: self.num_done,
            };
            // SAFETY: the unit is this worker's with this head; K and V were stored in an earlier stage.
            unsafe { (self.kernels.attend)(&attend, scratch) };
            units.finish();
        }
    }
}
