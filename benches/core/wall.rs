//! Wall-clock time of the core, by criterion. Each group prints its peer or limit first, or times the limit beside it.
//!
//! `cargo bench --bench wall [-- FILTER]`; `-- --test` runs each bench once, at its smallest size.

mod memory;
mod verbs;
mod workload;

use criterion::{Criterion, criterion_group, criterion_main};

/// All of `sizes`, or in a trial run only the first.
fn sizes(sizes: &[u32]) -> &[u32] {
    let is_trial = std::env::args().any(|arg| arg == "--test");
    &sizes[..if is_trial { 1 } else { sizes.len() }]
}

fn configured() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_millis(500))
        .measurement_time(std::time::Duration::from_secs(2))
}

criterion_group! {
    name = core;
    config = configured();
    targets = memory::block_pool, memory::prefix_lookup, verbs::scheduler, verbs::submit_and_finish, verbs::expand
}
criterion_main!(core);
