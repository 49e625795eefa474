//! Sliding windows: KV that no later row sees is given back.

use noria_core::{Admission, Config, FinishReason, Seat};

use crate::support::{Ask, World};

fn config() -> Config {
    Config {
        num_blocks: 12,
        block_size: 2,
        max_num_seqs: 2,
        max_num_batched_tokens: 8,
        max_model_len: 200,
        vocab_size: 100,
        depth: 2,
        admission: Admission::Optimistic,
        window: 5,
        num_kv_events: 4096,
        ..Config::default()
    }
}

#[test]
fn a_sequence_holds_its_window_and_no_more() {
    for (depth, block_size) in [(1, 1), (1, 2), (2, 2), (3, 2), (2, 4)] {
        let config = Config {
            depth,
            block_size,
            num_blocks: 24 / block_size,
            ..config()
        };
        let mut world = World::new(&config);
        let handle = world.submit(&Ask::sized(1, 3, 60));
        let mut most = 0;
        while world.turn() {
            if world.account(handle).num_output > 20 {
                most = most.max(world.core.num_held_blocks());
            }
        }
        assert_eq!(world.account(handle).end, Some((FinishReason::Length, 60)));
        // Five tokens, the new one among them, lie in this many blocks at most.
        assert_eq!(
            most,
            4_u32.div_ceil(block_size) + 1,
            "blocks of {block_size}"
        );
        assert!(world.seen().window_blocks as u32 >= 50 / block_size);
    }
}

#[test]
fn a_request_longer_than_the_pool_runs_where_its_window_fits() {
    let mut world = World::new(&config());
    let handle = world.submit(&Ask::sized(1, 60, 40)); // 50 blocks, of 12
    world.drain();
    assert_eq!(world.account(handle).end, Some((FinishReason::Length, 40)));
    assert_eq!(world.account(handle).num_preemptions, 0);
    let mut wide = World::new(&Config {
        window: 0,
        ..config()
    });
    assert!(wide.try_submit(&Ask::sized(1, 60, 40)).is_err());
}

#[test]
fn what_is_given_back_is_found_again_and_the_last_window_of_a_prefix_is_enough() {
    let mut world = World::new(&config());
    let first = Ask::sized(1, 13, 1);
    world.submit(&first);
    world.drain();
    let mut again = first.clone();
    again.max_tokens = 4;
    // Prompts of others push out what was given back first: the blocks that a later row does not need.
    world.submit(&Ask::sized(2, 13, 1));
    world.drain();
    let handle = world.submit(&again);
    world.plan();
    assert_eq!(world.account(handle).num_hit_tokens, 12);
    let kv = world.core.kv();
    let seat = (0..2).map(Seat).find(|&seat| !kv.is_empty(seat));
    let seat = seat.expect("it has a seat");
    assert_eq!((kv.num_behind(seat), kv.len(seat)), (4, 7));
    world.drain();
}

#[test]
fn a_window_that_no_sequence_outgrows_changes_nothing() {
    let digests = |window: u32| {
        let mut world = World::new(&Config {
            window,
            num_blocks: 100,
            ..config()
        });
        for seed in 0..4 {
            world.submit(&Ask::sized(seed, 9, 20));
        }
        world.drain();
        assert_eq!(world.seen().window_blocks, 0);
        world.digests
    };
    assert_eq!(digests(0), digests(200));
}
