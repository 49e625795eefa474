//! Tests of noria-cpu.
