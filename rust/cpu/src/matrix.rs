//! Linear maps, packed once in the order in which a product reads them: one layout for every number of rows.
//!
//! A matrix is cut in *panels* of as many output columns as a tile of the product has (16; 48 with AVX-512); a panel
//! lies in one piece, its inputs in order, the columns of an input side by side. What is missing of the last panel is
//! zero. So a product streams each panel once, in order, whatever the number of rows.

use crate::Isa;
use crate::memory::Buffer;
use crate::simd::{Bf16, Element};

/// How the numbers of a panel are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// 4 bytes a weight.
    F32,
    /// 2 bytes a weight: a bfloat16, expanded in registers.
    Bf16,
}

impl Format {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "float32",
            Format::Bf16 => "bfloat16",
        }
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
    data: Buffer,
    pub(crate) bias: Option<Vec<f32>>,
}

/// Columns of a panel.
pub(crate) fn panel_width(isa: Isa) -> usize {
    match isa {
        Isa::Portable | Isa::Avx2 => 16,
        Isa::Avx512 => 48,
    }
}

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
        }
    }

    pub(crate) fn num_panels(&self) -> usize {
        self.num_out.div_ceil(self.width)
    }

    pub(crate) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// The first byte of a panel; beyond the last one, of the first.
    pub(crate) fn panel(&self, index: usize) -> *const u8 {
        let index = if index < self.num_panels() { index } else { 0 };
        self.data
            .as_ptr()
            .cast::<u8>()
            .wrapping_add(index * self.panel_bytes)
    }

    /// Bytes of the packed weights.
    pub fn num_bytes(&self) -> usize {
        self.num_panels() * self.panel_bytes
    }
}

fn pack<E: Element>(
    isa: Isa,
    format: Format,
    weight: &[f32],
    num_in: usize,
    bias: Option<&[f32]>,
) -> Matrix {
    let width = panel_width(isa);
    let num_out = weight.len() / num_in;
    let panel_bytes = num_in * width * size_of::<E>();
    let num_panels = num_out.div_ceil(width);
    let mut data = Buffer::zeroed((num_panels * panel_bytes).div_ceil(4));
    for (panel, bytes) in data.as_bytes_mut()[..num_panels * panel_bytes]
        .chunks_exact_mut(panel_bytes)
        .enumerate()
    {
        // SAFETY: elements have no invalid bits, and the buffer is aligned for them.
        let (before, numbers, _) = unsafe { bytes.align_to_mut::<E>() };
        assert!(before.is_empty(), "panels begin at an element");
        let rows = weight[panel * width * num_in..]
            .chunks_exact(num_in)
            .take(width);
        for (column, row) in rows.enumerate() {
            for (to, &number) in numbers[column..].iter_mut().step_by(width).zip(row) {
                *to = E::of(number);
            }
        }
    }
    Matrix {
        format,
        num_out,
        num_in,
        width,
        panel_bytes,
        data,
        bias: bias.map(<[f32]>::to_vec),
    }
}
