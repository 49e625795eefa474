//! Pins: what is pinned stays where it is, is found, and counts as held; what accepted requests may need is never pinned.

use noria_core::{Config, PinError, PinId, Reject, ResizeError};

use crate::support::{Ask, World};

fn config() -> Config {
    Config {
        num_blocks: 10,
        block_size: 2,
        max_num_seqs: 2,
        max_num_batched_tokens: 20,
        max_model_len: 21,
        vocab_size: 100,
        num_kv_events: 1024,
        ..Config::default()
    }
}

fn prompt(seed: i32) -> Ask {
    Ask::sized(seed, 6, 1)
}

/// A world in which the three full blocks of `prompt(1)` are cached, and whose they are.
fn cached(config: &Config) -> (World, u64) {
    let mut world = World::new(config);
    let first = world.submit(&prompt(1));
    world.drain();
    assert_eq!(world.core.kv().pool().num_cached(), 3);
    (world, first)
}

fn only_pin(world: &World) -> PinId {
    *world.pins.keys().next().expect("there is one")
}

#[test]
fn what_is_pinned_is_found_after_everything_else_was_evicted() {
    for (is_pinned, num_found) in [(false, 0), (true, 4)] {
        let (mut world, first) = cached(&config());
        if is_pinned {
            assert_eq!(world.pin(first, 6), Ok(3));
        }
        for seed in 2..6 {
            world.submit(&Ask::sized(seed, 10, 4));
        }
        world.drain();
        let again = world.submit(&prompt(1));
        world.drain();
        // The last token is always computed, so the last block is.
        assert_eq!(world.account(again).num_hit_tokens, num_found);
    }
}

#[test]
fn pinned_blocks_count_as_held_until_they_are_unpinned_and_are_cached_then() {
    let (mut world, first) = cached(&config());
    assert_eq!(world.pin(first, 5), Ok(2), "full blocks alone");
    let pool = world.core.kv().pool();
    assert_eq!((pool.num_free(), pool.num_cached()), (7, 1));
    assert_eq!(world.core.num_held_blocks(), 2);
    assert_eq!(world.core.num_pinned_blocks(), 2);
    assert_eq!(world.core.kv_figures().num_held, 2);
    let pin = only_pin(&world);
    assert!(world.unpin(pin));
    assert!(!world.unpin(pin), "a pin is given up once");
    let pool = world.core.kv().pool();
    assert_eq!((pool.num_free(), pool.num_cached()), (7, 3));
    assert_eq!(world.core.num_held_blocks(), 0);
    // Of a chain the tail goes first: what hangs on a block that is gone is not found.
    let longest = world.submit(&Ask::sized(7, 18, 1));
    world.drain();
    assert_eq!(world.account(longest).num_hit_tokens, 0);
    let again = world.submit(&prompt(1));
    world.drain();
    assert_eq!(world.account(again).num_hit_tokens, 2, "its first block");
}

#[test]
fn a_block_that_is_pinned_twice_stays_until_both_are_unpinned() {
    let (mut world, first) = cached(&config());
    assert_eq!(world.pin(first, 6), Ok(3));
    assert_eq!(world.pin(first, 2), Ok(1));
    assert_eq!(world.core.num_pinned_blocks(), 3, "distinct ones");
    let longer = only_pin(&world);
    assert!(world.unpin(longer));
    assert_eq!(world.core.num_pinned_blocks(), 1);
    assert_eq!(world.core.num_held_blocks(), 1);
    let shorter = only_pin(&world);
    assert!(world.unpin(shorter));
    assert_eq!(world.core.num_held_blocks(), 0);
}

#[test]
fn what_is_not_cached_or_of_another_domain_is_not_pinned() {
    let (mut world, first) = cached(&config());
    let tokens = prompt(1).prompt;
    for (tokens, salt, adapter) in [
        (&tokens[..1], 0, 0),
        (&tokens[1..], 0, 0),
        (&tokens[..], 1, 0),
        (&tokens[..], 0, 1),
        (&[][..], 0, 0),
    ] {
        let num_tokens = tokens.len();
        let pinned = world.core.pin(tokens, salt, adapter, 1000);
        assert_eq!(pinned, Err(PinError::NotCached { num_tokens }));
    }
    world.reset_prefix_cache();
    assert!(matches!(
        world.pin(first, 6),
        Err(PinError::NotCached { .. })
    ));
}

#[test]
fn what_a_step_in_flight_fills_is_pinned_only_once_it_is_committed() {
    let mut world = World::new(&config());
    let first = world.submit(&Ask::sized(1, 6, 3));
    world.plan();
    assert_eq!(
        world.core.kv().cache().num_registered(),
        3,
        "it can be found at once"
    );
    assert!(matches!(
        world.pin(first, 6),
        Err(PinError::NotCached { .. })
    ));
    world.run();
    world.commit();
    assert_eq!(world.pin(first, 6), Ok(3));
}

#[test]
fn a_reset_hides_what_is_pinned_and_frees_it_only_when_it_is_unpinned() {
    let (mut world, first) = cached(&config());
    assert_eq!(world.pin(first, 6), Ok(3));
    world.reset_prefix_cache();
    assert_eq!(world.core.num_held_blocks(), 3);
    let again = world.submit(&prompt(1));
    world.drain();
    assert_eq!(world.account(again).num_hit_tokens, 0);
    let pin = only_pin(&world);
    world.unpin(pin);
    assert_eq!(world.core.kv().pool().num_free(), 7);
}

#[test]
fn what_an_accepted_request_may_need_is_not_pinned() {
    let (mut world, first) = cached(&config());
    // It may come to hold eight of the ten blocks.
    let largest = world.submit(&Ask::sized(2, 10, 7));
    let refused = PinError::TooMany {
        num_blocks: 3,
        limit: 2,
    };
    assert_eq!(world.pin(first, 6), Err(refused));
    assert_eq!(world.core.num_held_blocks(), 0, "nothing has changed");
    assert_eq!(world.pin(first, 5), Ok(2));
    world.drain();
    assert_eq!(world.account(largest).num_output, 7);
}

#[test]
fn the_watermark_and_a_block_are_not_pinned() {
    let config = Config {
        watermark_blocks: 7,
        ..config()
    };
    let (mut world, first) = cached(&config);
    let refused = PinError::TooMany {
        num_blocks: 3,
        limit: 2,
    };
    assert_eq!(world.pin(first, 6), Err(refused));
    assert_eq!(world.pin(first, 5), Ok(2));
}

#[test]
fn a_request_that_does_not_fit_beside_what_is_pinned_is_rejected() {
    let (mut world, first) = cached(&config());
    assert_eq!(world.pin(first, 6), Ok(3));
    let reject = Reject::NeverFits {
        num_blocks: 8,
        limit: 7,
    };
    assert_eq!(world.try_submit(&Ask::sized(2, 10, 7)), Err(reject));
    world.submit(&Ask::sized(2, 8, 7));
    world.drain();
    let pin = only_pin(&world);
    world.unpin(pin);
    world.submit(&Ask::sized(2, 10, 7));
    world.drain();
}

#[test]
fn a_pool_is_not_made_smaller_than_what_is_pinned() {
    let mut world = World::new(&config());
    world.submit(&Ask::sized(9, 10, 1)); // lies in front of it
    let pinned = world.submit(&prompt(1));
    world.drain();
    assert_eq!(world.pin(pinned, 6), Ok(3));
    let pin = only_pin(&world);
    let last = *world.core.pinned(pin).iter().max().expect("there are some");
    world.resize(last.0).expect("what is pinned stays in it");
    assert_eq!(world.pin(pinned, 6), Ok(3), "up to the last block of all");
    let again = *world.pins.keys().last().expect("there are two");
    world.unpin(again);
    world.resize(20).expect("any larger size does");
    let value = last.0 - 1;
    let refused = ResizeError::Pinned { block: last, value };
    assert_eq!(world.resize(value), Err(refused));
    assert!(matches!(
        world.resize(3),
        Err(ResizeError::NumBlocks { low: 4, .. })
    ));
    world.unpin(pin);
    world.resize(value).expect("nothing is pinned");
    world.drain();
}

#[test]
fn a_request_and_what_is_pinned_must_both_fit_a_smaller_pool() {
    let (mut world, first) = cached(&config());
    assert_eq!(world.pin(first, 4), Ok(2));
    world.submit(&Ask::sized(2, 8, 5)); // six blocks
    assert!(matches!(
        world.resize(7),
        Err(ResizeError::RequestNeeds { num_blocks: 8, .. })
    ));
    world.resize(8).expect("both fit");
    world.drain();
}

#[test]
fn moves_leave_what_is_pinned_where_it_is() {
    let config = Config {
        forced_moves: 3,
        ..config()
    };
    let (mut world, first) = cached(&config);
    assert_eq!(world.pin(first, 6), Ok(3));
    for seed in 2..5 {
        world.submit(&Ask::sized(seed, 4, 8));
    }
    world.drain(); // after each verb the world looks at what is pinned
    assert!(world.seen().moves > 10);
    let again = world.submit(&prompt(1));
    world.drain();
    assert_eq!(world.account(again).num_hit_tokens, 4);
}
