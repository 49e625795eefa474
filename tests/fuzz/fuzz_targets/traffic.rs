//! The random traffic of tests/core, chosen by libFuzzer: in this folder, `cargo +nightly fuzz run traffic --fuzz-dir .`
//!
//! The first byte says of which kind, the next four of which sizes, and then each two are a verb: a change of a byte changes
//! one verb, and what is cut out or put in leaves the others as they are.

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

const MAX_VERBS: usize = 150;

/// What a strategy gives for a number.
fn drawn<S: Strategy>(strategy: &S, number: u64) -> Option<S::Value> {
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&mixed(number).to_le_bytes());
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), random);
    let tree = strategy.new_tree(&mut runner).ok()?;
    Some(tree.current())
}

fuzz_target!(|data: &[u8]| {
    let Some((&[kind, sizes @ ..], bytes)) = data.split_first_chunk::<5>() else {
        return;
    };
    let scope = Scope {
        is_static: kind & 1 > 0,
        has_drafts: kind & 2 > 0,
        has_failures: kind & 4 > 0,
        has_resizes: kind & 8 > 0,
    };
    let Some(config) = drawn(&configs(scope), u32::from_le_bytes(sizes).into()) else {
        return;
    };
    let strategy = verbs(scope);
    let verbs: Vec<_> = bytes
        .chunks_exact(2)
        .take(MAX_VERBS)
        .filter_map(|pair| drawn(&strategy, u16::from_le_bytes([pair[0], pair[1]]).into()))
        .collect();
    let is_twin = kind & 16 > 0 && !(scope.is_static || scope.has_drafts || scope.has_failures);
    if is_twin && !scope.has_resizes {
        naive_plans::play_twins(&config, &verbs);
    } else {
        traffic::play(&config, &verbs);
    }
});
