//! noria-cpu against plain double-precision references, on each instruction set that the machine has.

mod attention;
mod products;
mod programs;
mod support;
