//! The core under a null runner: tables, enumerations and random traffic.

mod enumerated;
mod naive;
mod naive_plans;
mod prefix_cache;
mod random_traffic;
mod refusals;
mod static_batches;
mod support;
mod victims;
