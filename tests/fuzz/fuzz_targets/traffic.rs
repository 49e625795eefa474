//! The random traffic of tests/core, chosen by libFuzzer: in this folder, `cargo +nightly fuzz run traffic --fuzz-dir .`
//!
//! The first byte says of which kind, the others are what the strategies draw from.

#![no_main]
#![allow(
    dead_code,
    unused_imports,
    reason = "it uses parts of what the suite is made of"
)]

use libfuzzer_sys::fuzz_target;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

#[path = "../../core/naive.rs"]
mod naive;
#[path = "../../core/naive_plans.rs"]
mod naive_plans;
#[path = "../../core/support/mod.rs"]
mod support;
#[path = "../../core/traffic.rs"]
mod traffic;

use support::truth::mixed;
use traffic::{Scope, configs, verbs};

/// What the strategies draw from once the input is used up: of nothing but zeros they would draw for ever.
const NUM_SPARE_BYTES: usize = 1 << 16;

/// The input, and behind it numbers that hang on all of it.
fn lengthened(bytes: &[u8]) -> Vec<u8> {
    let mut state = bytes
        .iter()
        .fold(1, |state, &byte| mixed(state ^ u64::from(byte)));
    let mut stream = bytes.to_vec();
    while stream.len() < bytes.len() + NUM_SPARE_BYTES {
        state = mixed(state);
        stream.extend(state.to_le_bytes());
    }
    stream
}

fuzz_target!(|data: &[u8]| {
    let Some((&kind, bytes)) = data.split_first() else {
        return;
    };
    let scope = Scope {
        is_static: kind & 1 > 0,
        has_drafts: kind & 2 > 0,
        has_failures: kind & 4 > 0,
        has_resizes: kind & 8 > 0,
    };
    let strategy = (configs(scope), prop::collection::vec(verbs(scope), 1..150));
    let random = TestRng::from_seed(RngAlgorithm::PassThrough, &lengthened(bytes));
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), random);
    let Ok(tree) = strategy.new_tree(&mut runner) else {
        return;
    };
    let (config, verbs) = tree.current();
    let is_twin = kind & 16 > 0 && !(scope.is_static || scope.has_drafts || scope.has_failures);
    if is_twin && !scope.has_resizes {
        naive_plans::play_twins(&config, &verbs);
    } else {
        traffic::play(&config, &verbs);
    }
});
