//! The core under a null runner: tables, enumerations and random traffic.

mod random_traffic;
mod support;
