//! The kernels of each instruction set, as a table of functions.

use crate::Isa;
use crate::attention::{self, Attend, ChunkTile, Scratch};
use crate::gemm::{self, Panel};
use crate::kv::KvFormat;
use crate::limits;
use crate::matrix::Format;
use crate::program::Gate;
use crate::rowwise;
use crate::simd::{self, Simd};
use crate::tile;

/// Makes a row of numbers of gates and as many more behind them.
pub(crate) type GateRow = unsafe fn(&[f32], &mut [f32]);

/// Of two rows, a weight and its `eps`: the sum, and its norm.
type AddRmsNorm = unsafe fn([&[f32]; 2], &[f32], f32, &mut [f32], &mut [f32]);

/// One instruction set's kernels. Each may only be called where the CPU has the instructions: [`Kernels::of`] sees to
/// it.
pub(crate) struct Kernels {
    /// f32 in a vector.
    pub(crate) lanes: usize,
    /// The most rows of a tile of numbers, of one of whole numbers, and of one of blocks of them.
    tile_rows: [usize; 3],
    /// Multiplies with one panel.
    pub(crate) panel: unsafe fn(&Panel),
    /// Attends with one unit of work.
    pub(crate) attend: unsafe fn(&Attend<'_>, &mut Scratch),
    /// Attends with one tile of keys of a unit of several queries.
    pub(crate) attend_chunk: unsafe fn(&mut ChunkTile<'_>),
    /// Stores heads of a token, each of so many numbers, in the cache.
    pub(crate) store: unsafe fn(&[f32], usize, KvFormat, *mut u8),
    /// Of as many numbers as the weight has.
    pub(crate) rms_norm: unsafe fn(*const f32, &[f32], f32, *mut f32),
    pub(crate) add_rms_norm: AddRmsNorm,
    pub(crate) add: unsafe fn(&[f32], &[f32], &mut [f32]),
    pub(crate) scale: unsafe fn(f32, &mut [f32]),
    pub(crate) softcap: unsafe fn(f32, &mut [f32]),
    silu_mul: GateRow,
    gelu_mul: GateRow,
    /// Lays a tile's rows, so many numbers apart, of so many words, side by side.
    pub(crate) pack: unsafe fn(*const f32, usize, usize, usize, *mut f32),
    pub(crate) quantise: unsafe fn(&[f32], f32, &mut [f32]),
    /// Rotates heads of a token, each of so many numbers.
    pub(crate) rotate: unsafe fn(&mut [f32], usize, &[f32], &[f32]),
    /// What the machine's limits are measured by.
    pub(crate) read: unsafe fn(&[f32]) -> f32,
    pub(crate) chains: unsafe fn(f32, usize) -> f32,
    pub(crate) chains_of_whole: unsafe fn([i16; 2], usize) -> f32,
}

/// Compiles every kernel for one instruction set: `$vectors` is the number of vectors in a panel's width, `$pairs` the one in
/// the width of a panel of whole numbers.
macro_rules! kernels {
    ($name:ident, $simd:ty, $vectors:literal, $pairs:literal $(, $features:literal)?) => {
        mod $name {
            use super::*;

            type S = $simd;

            pub(super) static KERNELS: Kernels = Kernels {
                lanes: S::LANES,
                tile_rows: [
                    tile::max_rows::<S, $vectors>(),
                    tile::max_rows::<S, $pairs>(),
                    tile::max_rows_with_totals::<S, $pairs>(),
                ],
                panel,
                attend,
                attend_chunk,
                store,
                rms_norm,
                add_rms_norm,
                add,
                scale,
                softcap,
                silu_mul,
                gelu_mul,
                pack,
                quantise,
                rotate,
                read,
                chains,
                chains_of_whole,
            };

            // SAFETY (of all): the caller has checked for the features, and keeps the generic kernel's contract.
            $(#[target_feature(enable = $features)])?
            unsafe fn panel(panel: &Panel) {
                // SAFETY: as above.
                unsafe { gemm::panel::<S, $vectors, $pairs>(panel) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn attend(attend: &Attend<'_>, scratch: &mut Scratch) {
                // SAFETY: as above.
                unsafe { attention::attend::<S>(attend, scratch) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn attend_chunk(tile: &mut ChunkTile<'_>) {
                // SAFETY: as above.
                unsafe { attention::attend_chunk::<S>(tile) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn store(x: &[f32], head_dim: usize, format: KvFormat, to: *mut u8) {
                // SAFETY: as above.
                unsafe { rowwise::store::<S>(x, head_dim, format, to) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn rms_norm(x: *const f32, weight: &[f32], eps: f32, out: *mut f32) {
                // SAFETY: as above.
                unsafe { rowwise::rms_norm::<S>(x, weight, eps, out) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn add_rms_norm(
                added: [&[f32]; 2],
                weight: &[f32],
                eps: f32,
                sum: &mut [f32],
                out: &mut [f32],
            ) {
                // SAFETY: as above.
                unsafe { rowwise::add_rms_norm::<S>(added, weight, eps, sum, out) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn add(x: &[f32], y: &[f32], out: &mut [f32]) {
                // SAFETY: as above.
                unsafe { rowwise::add::<S>(x, y, out) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn scale(factor: f32, x: &mut [f32]) {
                // SAFETY: as above.
                unsafe { rowwise::scale::<S>(factor, x) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn softcap(cap: f32, x: &mut [f32]) {
                // SAFETY: as above.
                unsafe { rowwise::softcap::<S>(cap, x) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn silu_mul(gate_up: &[f32], out: &mut [f32]) {
                // SAFETY: as above.
                unsafe { rowwise::silu_mul::<S>(gate_up, out) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn gelu_mul(gate_up: &[f32], out: &mut [f32]) {
                // SAFETY: as above.
                unsafe { rowwise::gelu_mul::<S>(gate_up, out) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn pack(
                x: *const f32,
                stride: usize,
                num_rows: usize,
                num_words: usize,
                to: *mut f32,
            ) {
                // SAFETY: as above.
                unsafe { tile::pack::<S>(x, stride, num_rows, num_words, to) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn quantise(x: &[f32], limit: f32, out: &mut [f32]) {
                // SAFETY: as above.
                unsafe { rowwise::quantise::<S>(x, limit, out) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn rotate(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
                // SAFETY: as above.
                unsafe { rowwise::rotate::<S>(x, head_dim, cos, sin) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn read(numbers: &[f32]) -> f32 {
                // SAFETY: as above.
                unsafe { limits::read::<S>(numbers) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn chains(factor: f32, length: usize) -> f32 {
                // SAFETY: as above.
                unsafe { limits::chains::<S>(factor, length) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn chains_of_whole(pair: [i16; 2], length: usize) -> f32 {
                // SAFETY: as above.
                unsafe { limits::chains_of_pairs::<S>(pair, length) }
            }
        }
    };
}

/// The kernels that multiply whole numbers again, with instructions that `$like` lacks; the others are its own.
#[cfg(target_arch = "x86_64")]
macro_rules! whole_kernels {
    ($name:ident, $like:ident, $simd:ty, $quads:literal, $features:literal) => {
        mod $name {
            use super::*;

            pub(super) static KERNELS: Kernels = Kernels {
                tile_rows: [
                    $like::KERNELS.tile_rows[0],
                    tile::max_rows_of_halves::<$simd, $quads>(),
                    tile::max_rows::<$simd, $quads>(),
                ],
                panel,
                quantise,
                chains_of_whole,
                ..$like::KERNELS
            };

            // SAFETY (of all): as above.
            #[target_feature(enable = $features)]
            unsafe fn panel(panel: &Panel) {
                // SAFETY: as above.
                unsafe {
                    if panel.format.is_whole() {
                        gemm::panel_of_quads::<$simd, $quads>(panel);
                    } else {
                        ($like::KERNELS.panel)(panel);
                    }
                }
            }
            #[target_feature(enable = $features)]
            unsafe fn quantise(x: &[f32], limit: f32, out: &mut [f32]) {
                // SAFETY: as above.
                unsafe { rowwise::quantise::<$simd>(x, limit, out) }
            }
            #[target_feature(enable = $features)]
            unsafe fn chains_of_whole(pair: [i16; 2], length: usize) -> f32 {
                // SAFETY: as above.
                unsafe { limits::chains_of_quads::<$simd>(pair, length) }
            }
        }
    };
}

kernels!(portable, simd::portable::Portable, 2, 2);
#[cfg(target_arch = "x86_64")]
kernels!(avx2, simd::avx2::Avx2<false>, 3, 2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
kernels!(
    avx512,
    simd::avx512::Avx512<false>,
    3,
    3,
    "avx512f,avx512bw,avx2,fma,f16c"
);
#[cfg(target_arch = "x86_64")]
whole_kernels!(
    avx_vnni,
    avx2,
    simd::avx2::Avx2<true>,
    2,
    "avxvnni,avx2,fma,f16c"
);
#[cfg(target_arch = "x86_64")]
whole_kernels!(
    avx512_vnni,
    avx512,
    simd::avx512::Avx512<true>,
    3,
    "avx512vnni,avx512f,avx512bw,avx2,fma,f16c"
);

impl Kernels {
    /// The most rows of a tile of a product with such a matrix.
    pub(crate) fn tile_rows(&self, format: Format) -> usize {
        let kind = match format {
            Format::F32 | Format::Bf16 => 0,
            Format::Int8 => 1,
            Format::Q8_0 | Format::Q4_0 | Format::Q4_1 => 2,
        };
        self.tile_rows[kind]
    }

    /// What gates a row.
    pub(crate) fn gate(&self, gate: Gate) -> GateRow {
        match gate {
            Gate::Silu => self.silu_mul,
            Gate::Gelu => self.gelu_mul,
        }
    }

    /// The kernels of an instruction set.
    ///
    /// # Panics
    /// This CPU does not have it.
    pub(crate) fn of(isa: Isa) -> &'static Kernels {
        assert!(isa.is_here(), "this CPU has no {}", isa.name());
        match isa {
            Isa::Portable => &portable::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => &avx_vnni::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => &avx512_vnni::KERNELS,
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("not on this architecture"),
        }
    }
}
