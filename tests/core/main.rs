//! The core under a null runner: tables, enumerations and random traffic.

mod bounds;
mod buffer_limits;
mod commit_errors;
mod compaction;
mod enumerated;
mod naive;
mod naive_plans;
mod pins;
mod policies;
mod pool;
mod prefix_cache;
mod random_traffic;
mod recordings;
mod refusals;
mod scenarios;
mod static_batches;
mod support;
mod swaps;
mod traffic;
mod victims;
mod windows;
