//! Random traffic: whatever happens, each request gets its own tokens, once, and an end.

use std::cell::Cell;

use proptest::prelude::*;

use crate::support::Seen;
use crate::traffic::{Scope, check, configs, play, verbs};

fn traffic(scope: Scope, num_cases: u32) {
    let strategy = (configs(scope), prop::collection::vec(verbs(scope), 1..120));
    let seen = Cell::new(Seen::default());
    check(num_cases, &strategy, |(config, verbs)| {
        let world = play(&config, &verbs);
        let mut sum = seen.get();
        sum.add(&world.seen());
        seen.set(sum);
    });
    let seen = seen.get();
    assert!(seen.chunks > 0 && seen.wasted_tokens > 0, "{seen:?}");
    assert_eq!(
        seen.preemptions > 0,
        !scope.is_static || scope.has_failures,
        "{seen:?}"
    );
    assert_eq!(seen.hit_tokens > 0, !scope.is_static, "{seen:?}");
    assert_eq!(
        seen.device_starts > 0 && seen.listed_drafts > 0,
        scope.has_drafts,
        "{seen:?}"
    );
    assert_eq!(
        seen.late_failures > 0 && seen.confined_steps > 0,
        scope.has_failures,
        "{seen:?}"
    );
    assert!(seen.errors > 0, "{seen:?}");
    assert_eq!(seen.moves > 0, !scope.is_static, "{seen:?}");
    assert_eq!(
        seen.shrinks > 0 && seen.growths > 0 && seen.slides > 0,
        scope.has_resizes && !scope.is_static,
        "{seen:?}"
    );
    assert!(seen.pins > 0 && seen.pins_refused > 0, "{seen:?}");
    assert_eq!(
        seen.resizes_refused > 0,
        scope.has_resizes && !scope.is_static,
        "{seen:?}"
    );
    assert_eq!(seen.window_blocks > 0, !scope.is_static, "{seen:?}");
    assert_eq!(
        seen.swapped_out > 0 && seen.swapped_in > 0 && seen.swap_misses > 0,
        !scope.is_static,
        "{seen:?}"
    );
    assert_eq!(
        seen.ghosts > 0 && seen.padding > 0,
        scope.is_static,
        "{seen:?}"
    );
    if std::env::var_os("PROPTEST_CASES").is_some() {
        println!("{seen:?}");
    }
}

#[test]
fn every_request_gets_its_own_tokens_in_any_traffic() {
    traffic(
        Scope {
            is_static: false,
            has_drafts: false,
            has_failures: false,
            has_resizes: false,
        },
        150,
    );
}

#[test]
fn every_request_gets_its_own_tokens_with_drafts_in_any_traffic() {
    traffic(
        Scope {
            is_static: false,
            has_drafts: true,
            has_failures: false,
            has_resizes: false,
        },
        150,
    );
}

#[test]
fn every_request_gets_its_own_tokens_with_drafts_and_failures_in_any_traffic() {
    traffic(
        Scope {
            is_static: false,
            has_drafts: true,
            has_failures: true,
            has_resizes: false,
        },
        200,
    );
}

#[test]
fn every_request_gets_its_own_tokens_while_the_pool_is_resized() {
    traffic(
        Scope {
            is_static: false,
            has_drafts: false,
            has_failures: false,
            has_resizes: true,
        },
        200,
    );
}

#[test]
fn every_request_gets_its_own_tokens_while_the_pool_is_resized_and_steps_fail() {
    traffic(
        Scope {
            is_static: false,
            has_drafts: true,
            has_failures: true,
            has_resizes: true,
        },
        200,
    );
}

#[test]
fn every_request_gets_its_own_tokens_in_static_batches() {
    traffic(
        Scope {
            is_static: true,
            has_drafts: true,
            has_failures: false,
            has_resizes: false,
        },
        100,
    );
}

#[test]
fn every_request_gets_its_own_tokens_in_static_batches_with_failures() {
    traffic(
        Scope {
            is_static: true,
            has_drafts: true,
            has_failures: true,
            has_resizes: false,
        },
        150,
    );
}
