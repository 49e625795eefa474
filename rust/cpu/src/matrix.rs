//! Linear maps, packed once in the order in which a product reads them: one layout for every number of rows.
//!
//! A matrix is cut in *panels* of as many output columns as a tile of the product has (with AVX2 24); a panel
//! lies in one piece, its inputs in order, the columns of an input side by side. What is missing of the last panel is
//! zero. So a product streams each panel once, in order, whatever the number of rows.

use crate::Isa;
use crate::memory::{LargePages, Piece};
use crate::simd::{Bf16, Weight};

/// How the numbers of a panel are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// 4 bytes a weight.
    F32,
    /// 2 bytes a weight: a bfloat16, expanded in registers. Inputs lie in pairs.
    Bf16,
    /// 1 byte a weight, and a scale for each output; activations are rounded to whole numbers too, with a scale for each
    /// row.
    Int8,
    /// GGUF's blocks of 32: 1 byte a weight, a float16 scale. Activations are rounded to 16-bit whole numbers, with a scale
    /// for each row, for this and the next two.
    Q8_0,
    /// GGUF's blocks of 32: 4 bits a weight, a float16 scale.
    Q4_0,
    /// GGUF's blocks of 32: 4 bits a weight, a float16 scale and minimum.
    Q4_1,
}

/// Matrices of fewer bytes share large pages with others.
const SHARES_PAGES: usize = 16 << 20;

/// Weights of a GGUF block.
pub(crate) const BLOCK: usize = 32;

impl Format {
    /// Bytes of a block in a GGUF file; `None` where it is no such format.
    pub fn block_bytes(self) -> Option<usize> {
        match self {
            Format::F32 | Format::Bf16 | Format::Int8 => None,
            Format::Q8_0 => Some(2 + BLOCK),
            Format::Q4_0 => Some(2 + BLOCK / 2),
            Format::Q4_1 => Some(4 + BLOCK / 2),
        }
    }

    /// Whether what is multiplied are whole numbers.
    pub(crate) fn is_whole(self) -> bool {
        !matches!(self, Format::F32 | Format::Bf16)
    }

    /// Bytes of a block's scale, and minimum where it has one.
    pub(crate) fn head_bytes(self) -> usize {
        if self == Format::Q4_1 { 4 } else { 2 }
    }
}

/// A packed linear map.
pub struct Matrix {
    pub(crate) format: Format,
    /// Output features.
    pub(crate) num_out: usize,
    /// Input features.
    pub(crate) num_in: usize,
    /// Columns of a panel.
    pub(crate) width: usize,
    panel_bytes: usize,
    data: Piece,
    /// In the order of the panels.
    pub(crate) bias: Option<Vec<f32>>,
    /// Panels that lie and are multiplied together: 1, or 2 where each of the first half of the outputs, gates, has its
    /// one of the second beside it.
    pub(crate) group: usize,
}

/// Columns of a panel: the vectors that `kernels!` gives.
pub(crate) fn panel_width(isa: Isa, format: Format) -> usize {
    match isa {
        Isa::Portable => 16,
        Isa::Avx2 | Isa::AvxVnni if format.is_whole() => 16,
        Isa::Avx2 | Isa::AvxVnni => 24,
        Isa::Avx512 | Isa::Avx512Vnni => 48,
    }
}

/// Inputs that whole numbers are multiplied by together: pairs of 16 bits, or fours of bytes where the CPU multiplies those.
pub(crate) fn together(isa: Isa) -> usize {
    match isa {
        Isa::Portable | Isa::Avx2 | Isa::Avx512 => 2,
        Isa::AvxVnni | Isa::Avx512Vnni => 4,
    }
}

/// What 8-bit weights have added where they are stored without sign.
pub(crate) const ADDED: i32 = 128;

impl Matrix {
    /// Packs `[num_out, num_in]` numbers, given row by row.
    ///
    /// # Panics
    /// The numbers are not so many.
    pub fn pack(
        isa: Isa,
        format: Format,
        weight: &[f32],
        num_in: usize,
        bias: Option<&[f32]>,
    ) -> Matrix {
        assert!(
            num_in > 0 && weight.len().is_multiple_of(num_in),
            "rows of {num_in}"
        );
        let num_out = weight.len() / num_in;
        assert!(
            bias.is_none_or(|bias| bias.len() == num_out),
            "a bias for each output"
        );
        match format {
            Format::F32 => pack::<f32>(isa, format, weight, num_in, bias),
            Format::Bf16 => pack::<Bf16>(isa, format, weight, num_in, bias),
            Format::Int8 => pack_int8(isa, weight, num_in, bias),
            Format::Q8_0 | Format::Q4_0 | Format::Q4_1 => panic!("blocks come from a file"),
        }
    }

    /// Packs GGUF's blocks, given row by row: the same numbers, in another order.
    ///
    /// # Panics
    /// The format has no blocks, or the bytes are no whole rows of them.
    pub fn pack_blocks(
        isa: Isa,
        format: Format,
        rows: &[u8],
        num_in: usize,
        bias: Option<&[f32]>,
    ) -> Matrix {
        let block_bytes = format.block_bytes().expect("a format of blocks");
        assert!(
            num_in > 0 && num_in.is_multiple_of(BLOCK),
            "rows of whole blocks"
        );
        let row_bytes = num_in / BLOCK * block_bytes;
        assert!(rows.len().is_multiple_of(row_bytes), "whole rows");
        let num_out = rows.len() / row_bytes;
        let (width, together) = (panel_width(isa, format), together(isa));
        let head = format.head_bytes();
        let mut matrix = empty(isa, format, num_out, num_in, row_bytes * width, bias);
        let panel_bytes = matrix.panel_bytes;
        for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
            let column = row % width;
            let panel = &mut matrix.data.as_bytes_mut()[row / width * panel_bytes..][..panel_bytes];
            let blocks = panel.chunks_exact_mut(block_bytes * width);
            for (to, from) in blocks.zip(bytes.chunks_exact(block_bytes)) {
                // Scales of all columns, minima of all columns, then weights.
                for half in 0..head / 2 {
                    to[2 * (half * width + column)..][..2].copy_from_slice(&from[2 * half..][..2]);
                }
                let (from, to) = (&from[head..], &mut to[head * width..]);
                for input in 0..BLOCK {
                    if format == Format::Q8_0 {
                        let (place, byte) = byte_of(together, width, column, input, from[input]);
                        to[place] = byte;
                        continue;
                    }
                    let number = if input < BLOCK / 2 {
                        from[input] & 15
                    } else {
                        from[input - BLOCK / 2] >> 4
                    };
                    let group = (input / 8 * width + column) * 4;
                    if together == 4 {
                        // Two fours of inputs are four bytes: their lower and their upper halves.
                        to[group + input % 4] |= number << (input % 8 / 4 * 4);
                    } else {
                        // Four pairs of inputs are a pair of 16-bit numbers, from their lowest bits on.
                        let pair = input % 8 / 2;
                        to[group + input % 2 * 2 + pair / 2] |= number << (pair % 2 * 4);
                    }
                }
            }
        }
        matrix
    }

    /// The same, beside others where it fills few pages of its own.
    pub(crate) fn kept_in(mut self, pages: &mut LargePages) -> Matrix {
        let bytes = self.data.as_bytes();
        if bytes.len() < SHARES_PAGES {
            let mut data = pages.take(bytes.len());
            data.as_bytes_mut().copy_from_slice(bytes);
            self.data = data;
        }
        self
    }

    /// Whether the halves of its outputs are whole panels, so that they can lie side by side.
    pub(crate) fn has_halves(&self) -> bool {
        self.num_out.is_multiple_of(2 * self.width)
    }

    /// Lays each panel of the second half of the outputs behind its one of the first; once is enough.
    pub(crate) fn lay_halves_together(&mut self) {
        assert!(self.has_halves(), "two halves of whole panels");
        if self.group == 2 {
            return;
        }
        self.group = 2;
        let half = self.num_panels() / 2;
        turn_halves(self.data.as_bytes_mut(), half, self.panel_bytes);
        if let Some(bias) = &mut self.bias {
            turn_halves(bias, half, self.width);
        }
    }

    /// Output features.
    pub fn num_out(&self) -> usize {
        self.num_out
    }

    pub(crate) fn num_panels(&self) -> usize {
        self.num_out.div_ceil(self.width)
    }

    pub(crate) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// The first byte of a panel.
    pub(crate) fn panel(&self, index: usize) -> *const u8 {
        self.data.as_ptr().wrapping_add(index * self.panel_bytes)
    }

    /// Bytes of the packed weights.
    pub fn num_bytes(&self) -> usize {
        self.num_panels() * self.panel_bytes
    }
}

/// Puts each of so many pieces behind the one that is as many before it.
fn turn_halves<T: Copy>(all: &mut [T], num_pieces: usize, len: usize) {
    let before = all.to_vec();
    for (place, piece) in all.chunks_exact_mut(len).enumerate() {
        let from = (place / 2 + place % 2 * num_pieces) * len;
        piece.copy_from_slice(&before[from..][..len]);
    }
}

/// A matrix of zeros.
fn empty(
    isa: Isa,
    format: Format,
    num_out: usize,
    num_in: usize,
    panel_bytes: usize,
    bias: Option<&[f32]>,
) -> Matrix {
    let width = panel_width(isa, format);
    let num_bytes = num_out.div_ceil(width) * panel_bytes;
    Matrix {
        format,
        num_out,
        num_in,
        width,
        panel_bytes,
        data: LargePages::new(num_bytes).take(num_bytes),
        bias: bias.map(<[f32]>::to_vec),
        group: 1,
    }
}

fn pack<E: Weight>(
    isa: Isa,
    format: Format,
    weight: &[f32],
    num_in: usize,
    bias: Option<&[f32]>,
) -> Matrix {
    let width = panel_width(isa, format);
    let panel_bytes = num_in.next_multiple_of(E::TOGETHER) * width * size_of::<E>();
    let mut matrix = empty(
        isa,
        format,
        weight.len() / num_in,
        num_in,
        panel_bytes,
        bias,
    );
    for (panel, bytes) in panels(&mut matrix) {
        // SAFETY: elements have no invalid bits, and the buffer is aligned for them.
        let (before, numbers, _) = unsafe { bytes.align_to_mut::<E>() };
        assert!(before.is_empty(), "panels begin at an element");
        let rows = weight[panel * width * num_in..]
            .chunks_exact(num_in)
            .take(width);
        for (column, row) in rows.enumerate() {
            for (input, &number) in row.iter().enumerate() {
                let (first, place) = (input / E::TOGETHER * E::TOGETHER, input % E::TOGETHER);
                numbers[first * width + column * E::TOGETHER + place] = E::of(number);
            }
        }
    }
    matrix
}

/// Each panel's bytes.
fn panels(matrix: &mut Matrix) -> impl Iterator<Item = (usize, &mut [u8])> {
    let panel_bytes = matrix.panel_bytes;
    matrix
        .data
        .as_bytes_mut()
        .chunks_exact_mut(panel_bytes)
        .enumerate()
}

/// The largest whole number of an 8-bit weight.
const INT8_LIMIT: f32 = 127.0;

/// The largest that is two signed bytes, the lower one rounded to.
const MAX_ACTIVATION: usize = 127 * 256 + 127;

/// The largest whole number of an activation that is multiplied with so many weights: their sum fits in 32 bits. Sums of
/// blocks always do.
pub(crate) fn activation_limit(format: Format, num_in: usize) -> f32 {
    let num_summed = if format == Format::Int8 {
        num_in
    } else {
        BLOCK
    };
    (i32::MAX as usize / 128 / num_summed).min(MAX_ACTIVATION) as f32
}

/// Where an input's 8-bit weight lies, and as what.
fn byte_of(together: usize, width: usize, column: usize, input: usize, weight: u8) -> (usize, u8) {
    let place = (input / together * width + column) * together + input % together;
    let byte = if together == 4 {
        weight.wrapping_add(ADDED as u8)
    } else {
        weight
    };
    (place, byte)
}

/// Inputs that are multiplied together side by side for each column, then a scale for each column.
fn pack_int8(isa: Isa, weight: &[f32], num_in: usize, bias: Option<&[f32]>) -> Matrix {
    assert!(
        activation_limit(Format::Int8, num_in) >= 1.0,
        "{num_in} inputs do not fit in 32 bits"
    );
    let (width, together) = (panel_width(isa, Format::Int8), together(isa));
    let scales_at = num_in.next_multiple_of(together) * width;
    let num_out = weight.len() / num_in;
    let mut matrix = empty(
        isa,
        Format::Int8,
        num_out,
        num_in,
        scales_at + 4 * width,
        bias,
    );
    for (panel, bytes) in panels(&mut matrix) {
        let rows = weight[panel * width * num_in..]
            .chunks_exact(num_in)
            .take(width);
        for (column, row) in rows.enumerate() {
            let largest = row.iter().fold(0.0f32, |largest, w| largest.max(w.abs()));
            let scale = if largest > 0.0 {
                largest / INT8_LIMIT
            } else {
                1.0
            };
            for (place, &w) in row.iter().enumerate() {
                let whole = (w / scale).round_ties_even().clamp(-INT8_LIMIT, INT8_LIMIT) as i8;
                let (place, byte) = byte_of(together, width, column, place, whole as u8);
                bytes[place] = byte;
            }
            bytes[scales_at + 4 * column..][..4].copy_from_slice(&scale.to_ne_bytes());
        }
    }
    matrix
}
