//! noria-cpu against plain double-precision references, on each instruction set that the machine has.

#![allow(clippy::cast_precision_loss, reason = "small counts")]
#![allow(
    clippy::float_cmp,
    reason = "bits are compared where bits are promised"
)]

mod attention;
mod choices;
mod kv_formats;
mod products;
mod programs;
mod support;
