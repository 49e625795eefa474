//! The core under a null runner: tables, enumerations and random traffic.

mod enumerated;
mod naive;
mod naive_plans;
mod random_traffic;
mod support;
mod victims;
