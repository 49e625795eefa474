//! Recording a model's forward: each op checks its inputs, and gives the value that it makes.

use crate::attention::{AttentionOptions, Heads};
use crate::kernels::Kernels;
use crate::matrix::{BLOCK, Matrix, activation_limit, together};
use crate::memory::LargePages;
use crate::program::{Gate, Program, Stage};
use crate::{Isa, isa::IsaError};

/// What an op makes: a row for each token, or for each token whose logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Value(pub usize);

/// An embedding table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableId(pub usize);

/// A vector of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorId(pub usize);

/// A packed linear map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixId(pub usize);

/// `[num_rows, width]` numbers, row by row.
pub(crate) struct Table {
    pub(crate) width: usize,
    pub(crate) numbers: Vec<f32>,
}

/// A value's shape.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) width: usize,
    /// A row for each wanted token; else for each token.
    pub(crate) is_logits: bool,
    /// The largest whole number, and the value that the stage which makes this one rounds to whole numbers beside it.
    pub(crate) quantised: Option<(f32, Value)>,
    /// The rows of a tile, and the value that the stage which makes this one lays by such tiles beside it.
    pub(crate) packed: Option<(usize, Value)>,
}

/// Cosines and sines of the step's positions, which layers share.
struct Rotation {
    frequencies: VectorId,
    scale: f32,
    cos: Value,
    sin: Value,
}

/// Parameters, and the ops on them in order.
///
/// # Panics
/// Every op panics on a value, an id or a width that does not fit: the caller is a model's forward, and such a model
/// is wrong.
pub struct Builder {
    pub(crate) isa: Isa,
    pub(crate) tables: Vec<Table>,
    pub(crate) vectors: Vec<Vec<f32>>,
    pub(crate) matrices: Vec<Matrix>,
    pages: LargePages,
    pub(crate) shapes: Vec<Shape>,
    pub(crate) stages: Vec<Stage>,
    rotations: Vec<Rotation>,
    /// What was last laid by tiles, the rows of one, and what came of it.
    last_packed: Option<(Value, usize, Value)>,
    num_layers: usize,
    kv_shape: Option<(usize, usize)>,
}

impl Builder {
    /// For the kernels of an instruction set, and matrices packed for it.
    ///
    /// # Errors
    /// This CPU does not have it.
    pub fn new(isa: Isa) -> Result<Builder, IsaError> {
        if !isa.is_here() {
            return Err(IsaError::Missing(isa));
        }
        Ok(Builder {
            isa,
            tables: Vec::new(),
            vectors: Vec::new(),
            matrices: Vec::new(),
            pages: LargePages::new(0),
            shapes: Vec::new(),
            stages: Vec::new(),
            rotations: Vec::new(),
            last_packed: None,
            num_layers: 0,
            kv_shape: None,
        })
    }

    /// Which instruction set matrices are to be packed for.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Takes an embedding table, `[num_rows, width]`.
    pub fn table(&mut self, numbers: Vec<f32>, width: usize) -> TableId {
        assert!(
            width > 0 && numbers.len().is_multiple_of(width),
            "a table of rows of {width}"
        );
        self.tables.push(Table { width, numbers });
        TableId(self.tables.len() - 1)
    }

    /// Takes a vector.
    pub fn vector(&mut self, numbers: Vec<f32>) -> VectorId {
        self.vectors.push(numbers);
        VectorId(self.vectors.len() - 1)
    }

    /// Takes a linear map, packed for this builder's instruction set.
    pub fn matrix(&mut self, matrix: Matrix) -> MatrixId {
        assert_eq!(
            matrix.width,
            crate::matrix::panel_width(self.isa, matrix.format),
            "packed for another CPU"
        );
        self.matrices.push(matrix.kept_in(&mut self.pages));
        MatrixId(self.matrices.len() - 1)
    }

    fn value(&mut self, width: usize, is_logits: bool) -> Value {
        self.shapes.push(Shape {
            width,
            is_logits,
            quantised: None,
            packed: None,
        });
        Value(self.shapes.len() - 1)
    }

    fn shape(&self, x: Value) -> Shape {
        self.shapes[x.0]
    }

    fn like(&mut self, x: Value) -> Value {
        let shape = self.shape(x);
        self.value(shape.width, shape.is_logits)
    }

    /// The table's rows of the step's tokens.
    pub fn embed(&mut self, table: TableId) -> Value {
        let out = self.value(self.tables[table.0].width, false);
        self.stages.push(Stage::Embed { table, out });
        out
    }

    /// `x · matrixᵀ + bias`.
    pub fn linear(&mut self, x: Value, matrix: MatrixId) -> Value {
        let num_out = self.checked_matrix(x, matrix);
        let x = self.operand(x, matrix);
        let packed = self.packed(x, matrix);
        let out = self.value(num_out, self.shape(x).is_logits);
        self.stages.push(Stage::Multiply {
            x,
            packed,
            matrix,
            gate: None,
            out,
        });
        out
    }

    /// `x` by tiles of the product's rows.
    fn packed(&mut self, x: Value, matrix: MatrixId) -> Value {
        let tile_rows = Kernels::of(self.isa).tile_rows(self.matrices[matrix.0].format);
        if let Some((last, rows, packed)) = self.last_packed
            && (last, rows) == (x, tile_rows)
        {
            return packed;
        }
        let out = self.like(x);
        match self.stages.last() {
            // Rows that have just been made are laid out while they are there.
            Some(stage) if self.is_made_by(stage, x) => {
                self.shapes[x.0].packed = Some((tile_rows, out));
            }
            _ => self.stages.push(Stage::Pack { x, tile_rows, out }),
        }
        self.last_packed = Some((x, tile_rows, out));
        out
    }

    /// Whether a stage makes a value row by row, or what it is quantised from.
    fn is_made_by(&self, stage: &Stage, x: Value) -> bool {
        let made = stage.rows_of();
        let is_beside = self
            .shape(made)
            .quantised
            .is_some_and(|(_, quantised)| quantised == x);
        stage.makes_rows_of(if is_beside { made } else { x })
    }

    /// What a product reads: `x`, or `x` in whole numbers.
    fn operand(&mut self, x: Value, matrix: MatrixId) -> Value {
        let format = self.matrices[matrix.0].format;
        if !format.is_whole() {
            return x;
        }
        let shape = self.shape(x);
        let together = together(self.isa);
        let num_sums = match format.block_bytes() {
            Some(_) => shape.width / BLOCK,
            // Weights are stored with 128 added: what that adds is taken off by the sum of all inputs.
            None if together == 4 => 1,
            None => 0,
        };
        let num_words = 1 + shape.width.next_multiple_of(together) / 2 + num_sums;
        let limit = activation_limit(format, shape.width);
        if let Some((known, out)) = shape.quantised
            && known.to_bits() == limit.to_bits()
            && self.shape(out).width == num_words
        {
            return out;
        }
        let out = self.value(num_words, shape.is_logits);
        match self.stages.last() {
            // Rows that have just been made are rounded while they are there.
            Some(stage) if stage.makes_rows_of(x) && shape.quantised.is_none() => {
                self.shapes[x.0].quantised = Some((limit, out));
            }
            _ => self.stages.push(Stage::Quantise { x, limit, out }),
        }
        out
    }

    fn checked_matrix(&self, x: Value, matrix: MatrixId) -> usize {
        let matrix = &self.matrices[matrix.0];
        assert_eq!(
            matrix.num_in,
            self.shape(x).width,
            "a matrix of as many inputs as x has columns"
        );
        matrix.num_out
    }

    /// `x / sqrt(mean(x²) + eps) · weight`.
    pub fn rms_norm(&mut self, x: Value, weight: VectorId, eps: f32) -> Value {
        assert_eq!(
            self.vectors[weight.0].len(),
            self.shape(x).width,
            "a weight for each column"
        );
        let out = self.like(x);
        // A sum that has just been made is normed while it is there.
        if let Some(&Stage::Add {
            x: a,
            y: b,
            out: sum,
        }) = self.stages.last()
            && sum == x
        {
            self.stages.pop();
            self.stages.push(Stage::AddNorm {
                x: a,
                y: b,
                sum,
                weight,
                eps,
                out,
            });
        } else {
            self.stages.push(Stage::Norm {
                x,
                weight,
                eps,
                out,
            });
        }
        out
    }

    /// `x + y`.
    pub fn add(&mut self, x: Value, y: Value) -> Value {
        assert_eq!(
            self.shape(x).width,
            self.shape(y).width,
            "as many columns in both"
        );
        let out = self.like(x);
        self.stages.push(Stage::Add { x, y, out });
        out
    }

    /// `x · factor`.
    pub fn scale(&mut self, x: Value, factor: f32) -> Value {
        let out = self.like(x);
        self.stages.push(Stage::Scale { x, factor, out });
        out
    }

    /// `cap · tanh(x / cap)`.
    pub fn softcap(&mut self, x: Value, cap: f32) -> Value {
        let out = self.like(x);
        self.stages.push(Stage::Softcap { x, cap, out });
        out
    }

    /// `rms_norm` of each head of q and of k, in place.
    pub fn qk_norm(
        &mut self,
        qkv: Value,
        q_weight: VectorId,
        k_weight: VectorId,
        eps: f32,
        heads: Heads,
    ) -> Value {
        assert_eq!(
            self.shape(qkv).width,
            heads.qkv_width(),
            "columns of q, k and v"
        );
        let weights = [q_weight, k_weight];
        for weight in weights {
            assert_eq!(
                self.vectors[weight.0].len(),
                heads.head_dim,
                "a weight for each dimension"
            );
        }
        self.last_packed = None; // it is changed in place
        self.stages.push(Stage::QkNorm {
            qkv,
            weights,
            eps,
            heads,
        });
        qkv
    }

    /// Rotates the first dimensions of q's and k's heads by their positions, in place: two for each frequency, in radians
    /// per position. Cosines and sines are multiplied by `scale`.
    pub fn rope(&mut self, qkv: Value, frequencies: VectorId, scale: f32, heads: Heads) -> Value {
        let half = self.vectors[frequencies.0].len();
        assert_eq!(
            self.shape(qkv).width,
            heads.qkv_width(),
            "columns of q, k and v"
        );
        assert!(
            2 * half <= heads.head_dim,
            "a frequency for two dimensions of a head"
        );
        let known = self.rotations.iter().find(|known| {
            known.frequencies == frequencies && known.scale.to_bits() == scale.to_bits()
        });
        let (cos, sin) = if let Some(known) = known {
            (known.cos, known.sin)
        } else {
            let (cos, sin) = (self.value(half, false), self.value(half, false));
            self.rotations.push(Rotation {
                frequencies,
                scale,
                cos,
                sin,
            });
            self.stages.push(Stage::Angles {
                frequencies,
                scale,
                cos,
                sin,
            });
            (cos, sin)
        };
        self.last_packed = None; // it is changed in place
        self.stages.push(Stage::Rotate {
            qkv,
            cos,
            sin,
            heads,
            stored_layer: None,
        });
        qkv
    }

    /// Stores k and v of fused rows in a layer of the cache, then attends.
    pub fn attention(
        &mut self,
        qkv: Value,
        layer: usize,
        heads: Heads,
        options: AttentionOptions,
    ) -> Value {
        assert_eq!(
            self.shape(qkv).width,
            heads.qkv_width(),
            "columns of q, k and v"
        );
        assert!(
            heads.num_heads.is_multiple_of(heads.num_kv_heads),
            "whole groups of heads"
        );
        let kv_shape = (heads.num_kv_heads, heads.head_dim);
        assert_eq!(
            *self.kv_shape.get_or_insert(kv_shape),
            kv_shape,
            "one KV shape for all layers"
        );
        self.num_layers = self.num_layers.max(layer + 1);
        match self.stages.last_mut() {
            // Rotated rows are stored while they are there.
            Some(Stage::Rotate {
                qkv: rotated,
                stored_layer,
                ..
            }) if *rotated == qkv => {
                *stored_layer = Some(layer);
            }
            _ => self.stages.push(Stage::Store { qkv, layer, heads }),
        }
        let out = self.value(heads.num_heads * heads.head_dim, false);
        self.stages.push(Stage::Attend {
            qkv,
            layer,
            heads,
            options,
            out,
        });
        out
    }

    /// `silu(gate) · up` of the two halves of each row.
    pub fn silu_mul(&mut self, gate_up: Value) -> Value {
        self.gated(gate_up, Gate::Silu)
    }

    /// `gelu(gate) · up` of the two halves of each row; gelu by its tanh approximation.
    pub fn gelu_mul(&mut self, gate_up: Value) -> Value {
        self.gated(gate_up, Gate::Gelu)
    }

    fn gated(&mut self, x: Value, gate: Gate) -> Value {
        let out = self.value(self.shape(x).width / 2, false);
        let is_plain = |stage: &Stage, of: MatrixId| match stage {
            Stage::Multiply { matrix, gate, .. } => *matrix == of && gate.is_none(),
            _ => false,
        };
        // Panels of a product that has just been made are gated while they are there, if no other product needs the matrix
        // as it is.
        if let Some((
            Stage::Multiply {
                matrix,
                gate: own,
                out: made,
                ..
            },
            before,
        )) = self.stages.split_last_mut()
            && *made == x
            && self.matrices[matrix.0].has_halves()
            && !before.iter().any(|stage| is_plain(stage, *matrix))
        {
            self.matrices[matrix.0].lay_halves_together();
            (*own, *made) = (Some(gate), out);
        } else {
            self.stages.push(Stage::Gate { x, gate, out });
        }
        out
    }

    /// Logits of the wanted tokens.
    pub fn logits(&mut self, x: Value, head: MatrixId) -> Value {
        let chosen = self.value(self.shape(x).width, true);
        self.stages.push(Stage::Choose { x, out: chosen });
        self.linear(chosen, head)
    }

    /// The program that computes `result`, on a pool of `num_workers`.
    ///
    /// # Errors
    /// The system gives no more threads.
    pub fn build(self, result: Value, num_workers: usize) -> std::io::Result<Program> {
        assert!(self.shape(result).is_logits, "a program's result is logits");
        for stage in &self.stages {
            if let Stage::Multiply {
                matrix, gate: None, ..
            } = stage
            {
                let group = self.matrices[matrix.0].group;
                assert_eq!(group, 1, "a matrix of gated products serves no others");
            }
        }
        let (num_layers, kv_shape) = (self.num_layers, self.kv_shape.unwrap_or((0, 0)));
        Program::new(
            self,
            result,
            [num_layers, kv_shape.0, kv_shape.1],
            num_workers,
        )
    }
}
