//! Preemption by swap: what is copied, when it may come back, and what a failure leaves of it.

use noria_core::{Config, FinishReason, KeyPolicy};

use crate::support::{Ask, Breakage, StepView, World};

fn config(depth: u32, num_swap_blocks: u32) -> Config {
    Config {
        num_blocks: 20,
        block_size: 2,
        max_num_seqs: 1,
        max_num_batched_tokens: 16,
        max_model_len: 40,
        vocab_size: 100,
        depth,
        enable_prefix_caching: false,
        key: KeyPolicy::Priority,
        num_swap_blocks,
        ..Config::default()
    }
}

/// One that has four tokens of output, and an urgent one that takes its seat; the step that it does so in.
fn displaced(config: &Config) -> (World, u64, u64, StepView) {
    let mut world = World::new(config);
    let first = world.submit(&Ask::sized(1, 5, 12).priority(1));
    while world.account(first).num_output < 4 {
        world.turn();
    }
    let urgent = world.submit(&Ask::sized(2, 3, 2));
    let view = world.plan().expect("it enters at once");
    assert!(view.row_of(urgent).is_some());
    (world, first, urgent, view)
}

#[test]
fn what_was_computed_comes_back_and_only_the_last_token_is_computed_again() {
    for depth in 1..=3 {
        let (mut world, first, urgent, view) = displaced(&config(depth, 12));
        let num_copied = view.swap_out.len();
        assert_eq!(num_copied, if depth == 1 { 4 } else { 5 }, "depth {depth}");
        let mut resumed = None;
        while world.account(first).is_live() {
            while let Some(view) = world.plan() {
                if !view.swap_in.is_empty() {
                    resumed = Some(view);
                }
            }
            world.run();
            world.commit();
        }
        let resumed = resumed.expect("it was copied back");
        assert_eq!(resumed.swap_in.len(), num_copied);
        let row = resumed.row_of(first).expect("it goes on at once");
        let gain = &resumed.gained[0];
        assert_eq!((row.start, row.count), (gain.num_tokens - 1, 1));
        assert_eq!(world.account(first).num_preemptions, 1);
        for handle in [first, urgent] {
            let end = world.account(handle).end;
            assert!(matches!(end, Some((FinishReason::Length, _))), "{end:?}");
        }
        let recomputed: i64 = world.core.records().map(|it| it.num_preempted_tokens).sum();
        assert_eq!(recomputed, 0, "nothing was given up");
        world.drain();
    }
}

#[test]
fn a_sequence_waits_until_its_copy_is_confirmed() {
    let (mut world, first, urgent, view) = displaced(&config(2, 12));
    assert!(!view.swap_out.is_empty());
    // Its seat is free again, and its last row has landed, but the step that copies is in flight.
    world.abort(urgent);
    while world.oldest().is_some_and(|oldest| oldest.0 < view.id) {
        world.run();
        world.commit();
    }
    assert!(world.plan().is_none(), "nobody else could run");
    world.run();
    assert!(world.plan().is_none(), "it ran, but nobody said so");
    world.commit();
    let resumed = world.plan().expect("now it is there");
    assert_eq!(resumed.swap_in.len(), view.swap_out.len());
    assert!(resumed.row_of(first).is_some());
    world.drain();
}

#[test]
fn a_copy_that_a_failed_step_should_have_made_is_computed_again() {
    for breakage in [Breakage::Untouched, Breakage::Garbage, Breakage::Whole] {
        let (mut world, first, _, view) = displaced(&config(1, 12));
        assert!(!view.swap_out.is_empty());
        world.fail(0, breakage);
        world.drain();
        assert_eq!(
            world.account(first).end,
            Some((FinishReason::Length, 12)),
            "{breakage:?}"
        );
        assert_eq!(world.seen().swapped_in, 0);
    }
}

#[test]
fn host_blocks_are_pinned_until_a_step_that_copies_them_back_is_committed() {
    for breakage in [Breakage::Untouched, Breakage::Garbage, Breakage::Whole] {
        let (mut world, first, urgent, view) = displaced(&config(1, 4));
        let num_copied = view.swap_out.len();
        while world.account(urgent).is_live() {
            world.run();
            world.commit();
            world.plan();
        }
        let planned = &world.runner.queue.back().expect("it resumes").view;
        assert_eq!(planned.swap_in.len(), num_copied);
        world.fail(0, breakage);
        let again = world.plan().expect("it tries again");
        assert_eq!(again.swap_in.len(), num_copied, "{breakage:?}");
        assert!(again.row_of(first).is_some());
        world.drain();
        assert_eq!(world.account(first).end, Some((FinishReason::Length, 12)));
    }
}

#[test]
fn where_the_host_has_no_room_tokens_are_computed_again_and_that_is_counted() {
    let (mut world, first, _, view) = displaced(&config(1, 3));
    assert!(view.swap_out.is_empty());
    world.drain();
    assert_eq!(world.account(first).end, Some((FinishReason::Length, 12)));
    let seen = world.seen();
    assert_eq!((seen.swapped_out, seen.swap_misses), (0, 1));
    let given_up: i64 = world.core.records().map(|it| it.num_preempted_tokens).sum();
    assert_eq!(given_up, 8);
}

#[test]
fn a_request_that_ends_while_its_kv_is_on_the_host_gives_it_back() {
    for is_confirmed in [false, true] {
        let (mut world, first, urgent, _) = displaced(&config(1, 4));
        if is_confirmed {
            world.run();
            world.commit();
        }
        world.abort(first);
        let third = world.submit(&Ask::sized(3, 5, 8).priority(1));
        world.drain();
        assert!(!world.account(urgent).is_live());
        assert!(!world.account(third).is_live());
    }
}

#[test]
fn full_blocks_that_the_prefix_cache_still_has_are_not_copied_back() {
    let config = Config {
        enable_prefix_caching: true,
        ..config(1, 12)
    };
    let (mut world, first, urgent, view) = displaced(&config);
    assert_eq!(view.swap_out.len(), 4);
    while world.account(urgent).is_live() {
        world.run();
        world.commit();
        world.plan();
    }
    let resumed = &world.runner.queue.back().expect("it resumes").view;
    // Eight tokens are four full blocks, all found.
    assert_eq!(resumed.swap_in.len(), 0);
    assert_eq!(resumed.gained[0].num_computed_tokens, 8);
    assert!(resumed.row_of(first).is_some());
    world.drain();
}
