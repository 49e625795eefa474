//! What this machine can do at most, by instruction set and threads: every share that other benches print is one of these.
//!
//! `--test`, as CI runs each bench, measures for an instant.

use std::time::Duration;

use noria_cpu::{Isa, fma_rate, int8_rate, read_bandwidth};

fn main() {
    let is_test = std::env::args().any(|argument| argument == "--test");
    let time = Duration::from_millis(if is_test { 1 } else { 1000 });
    let num_cpus = std::thread::available_parallelism().map_or(1, usize::from);
    println!("| instructions | threads | read GB/s | float32 GFLOP/s | int8 GOP/s |");
    println!("|---|---|---|---|---|");
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_here()) {
        for num_threads in if num_cpus > 1 {
            vec![1, num_cpus]
        } else {
            vec![1]
        } {
            println!(
                "| {} | {num_threads} | {:.1} | {:.0} | {:.0} |",
                isa.name(),
                read_bandwidth(isa, num_threads, time) / 1e9,
                fma_rate(isa, num_threads, time) / 1e9,
                int8_rate(isa, num_threads, time) / 1e9,
            );
        }
    }
}
