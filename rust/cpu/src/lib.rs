//! The CPU backend of noria: a model's forward, recorded once as a [`Program`], runs a whole step by one call.
//!
//! A program is a list of ops over buffers, packed weights ([`Matrix`]) and a paged KV cache ([`KvView`]). The workers of
//! its pool walk the list together and take units of an op until all of it is done: no call into another language, no
//! allocation and no wake-up lies between two layers, and no worker is waited for that does nothing.
//!
//! Kernels are written once over a vector type and compiled for each instruction set ([`Isa`]), which is found at run
//! time. A row's result is the same bits alone and beside any others, and for any number of workers.
//!
//! `unsafe` is in kernels, which trust sizes that [`Program::run`] has checked, and in the pool, which lends a closure to
//! threads; each place says why it is sound.
#![warn(clippy::undocumented_unsafe_blocks)]
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_ptr_alignment,
    clippy::many_single_char_names,
    clippy::needless_range_loop,
    clippy::inline_always,
    reason = "kernels: counts far below 2^24, unaligned loads, the field's letters, indices into several arrays"
)]

mod attention;
mod builder;
mod cpus;
mod draw;
mod gemm;
mod greedy;
mod isa;
mod kernels;
mod kv;
mod limits;
mod matrix;
mod memory;
mod pool;
mod program;
mod rowwise;
mod simd;
mod step;
mod tile;

pub use attention::{AttentionOptions, Heads};
pub use builder::{Builder, MatrixId, TableId, Value, VectorId};
pub use cpus::is_bound;
pub use draw::{DRAW_CHUNK, draw, noise};
pub use greedy::most_likely;
pub use isa::{ISA_NAMES, ISA_VARIABLE, Isa, IsaError};
pub use kv::{KvFormat, KvView};
pub use limits::{fma_rate, int8_rate, read_bandwidth};
pub use matrix::{Format, Matrix};
pub use program::{Program, StageKind, StageTime};
pub use step::{Step, StepError};
