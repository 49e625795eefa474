//! Blocks that move: why, where to, and at what cost.

use noria_core::{Admission, BlockId, Config, FinishReason, Handle, ResizeError, Seat};

use crate::support::{Ask, World};

fn config() -> Config {
    Config {
        num_blocks: 40,
        block_size: 2,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_model_len: 64,
        vocab_size: 100,
        depth: 2,
        admission: Admission::Optimistic,
        num_kv_events: 4096,
        ..Config::default()
    }
}

/// Whether each block of `seat` is followed by its next.
fn is_run(world: &World, seat: u32) -> bool {
    let table = world.core.kv().table(Seat(seat));
    table.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0)
}

#[test]
fn sequences_that_grow_side_by_side_stay_in_one_run_each() {
    let config = Config {
        num_blocks: 200,
        ..config()
    };
    let mut world = World::new(&config);
    for seed in 0..4 {
        world.submit(&Ask::sized(seed, 5, 40));
    }
    for _ in 0..30 {
        world.turn();
    }
    let figures = world.core.kv_figures();
    assert_eq!((figures.num_sequences, figures.num_runs), (4, 4));
    assert!(figures.num_table_blocks > 4 * 15, "{figures:?}");
    assert_eq!(figures.num_table_blocks, figures.num_held);
    assert!(figures.num_unused_slots <= 2 * 4, "{figures:?}");
    world.drain();
    let figures = world.core.kv_figures();
    assert_eq!(figures.num_blocks, figures.num_free + figures.num_cached);
    world.reset_prefix_cache();
    let figures = world.core.kv_figures();
    assert_eq!((figures.num_free_runs, figures.longest_free_run), (1, 200));
}

#[test]
fn a_pool_shrinks_under_its_requests_which_do_not_notice() {
    for (depth, max_moves) in [(1, 1), (2, 2), (2, 64), (3, 3), (3, 64)] {
        let config = Config {
            num_blocks: 80,
            depth,
            max_moves,
            ..config()
        };
        let mut world = World::new(&config);
        let handles: Vec<u64> = (0..4)
            .map(|seed| world.submit(&Ask::sized(seed, 9, 14)))
            .collect();
        world.turn();
        world.resize(48).expect("all of them fit");
        assert!(world.core.is_shrinking());
        let mut num_turns = 0;
        while world.core.is_shrinking() {
            world.turn();
            num_turns += 1;
            assert!(num_turns <= 20, "at {max_moves} a step");
        }
        for handle in &handles {
            let account = world.account(*handle);
            assert!(account.is_live(), "it moved while it ran");
            assert_eq!(account.num_preemptions, 0, "there was room");
        }
        assert!(world.seen().moves > 2);
        world.drain();
        world.resize(60).expect("any size does");
        world.submit(&Ask::sized(9, 9, 12));
        world.drain();
        assert_eq!(world.core.kv().pool().num_blocks(), 60);
    }
}

#[test]
fn what_is_cached_within_a_smaller_pool_is_still_found() {
    let mut world = World::new(&config());
    world.submit(&Ask::sized(1, 10, 1));
    world.drain();
    assert_eq!(world.core.kv().cache().num_registered(), 5); // blocks 1 to 5
    world.resize(5).expect("nobody needs more");
    assert_eq!(world.core.kv().cache().num_registered(), 5);
    let again = world.submit(&Ask::sized(1, 10, 1));
    world.drain();
    assert_eq!(world.account(again).num_hit_tokens, 8);
    world.resize(4).expect("nobody needs more");
    assert_eq!(world.core.kv().cache().num_registered(), 4);
}

#[test]
fn nobody_leaves_a_pool_that_is_made_as_small_as_what_is_held() {
    let mut world = World::new(&config());
    let handles = [1, 2, 3].map(|seed| world.submit(&Ask::sized(seed, 9, 6)));
    world.plan();
    assert_eq!(world.core.num_held_blocks(), 15);
    world.resize(15).expect("each fits by itself");
    assert!(world.core.is_shrinking());
    world.plan();
    for handle in handles {
        assert_eq!(world.account(handle).num_preemptions, 0);
    }
    world.drain();
}

#[test]
fn the_best_stays_though_its_room_is_taken_by_one_that_ends_in_flight() {
    let mut world = World::new(&config());
    let best = world.submit(&Ask::sized(1, 9, 3));
    world.submit(&Ask::sized(2, 13, 2));
    world.turn(); // the second's last token is in flight
    world.resize(7).expect("each fits by itself");
    assert!(world.core.num_held_blocks() > 7 && world.core.num_in_flight() == 1);
    world.plan();
    assert_eq!(world.account(best).num_preemptions, 0);
    world.drain();
    assert_eq!(world.account(best).num_preemptions, 0);
}

#[test]
fn where_all_do_not_fit_the_worst_leave_and_come_back() {
    let mut world = World::new(&config());
    let handles: Vec<u64> = (0..4)
        .map(|seed| world.submit(&Ask::sized(seed, 9, 20)))
        .collect();
    for _ in 0..4 {
        world.turn();
    }
    world.resize(15).expect("each fits by itself");
    world.drain();
    let preemptions = |handle: u64| world.account(handle).num_preemptions;
    assert_eq!(preemptions(handles[0]), 0, "never the best key");
    assert!(
        handles
            .iter()
            .map(|&handle| preemptions(handle))
            .sum::<u32>()
            > 0
    );
    for &handle in &handles {
        assert_eq!(world.account(handle).end, Some((FinishReason::Length, 20)));
    }
}

#[test]
fn a_size_that_an_accepted_request_may_outgrow_is_refused() {
    let mut world = World::new(&config());
    let handle = world.submit(&Ask::sized(1, 9, 20));
    let refusal = ResizeError::RequestNeeds {
        handle: Handle::from_bits(handle),
        num_blocks: 14,
        value: 13,
    };
    assert_eq!(world.resize(13), Err(refusal));
    assert_eq!(world.resize(14), Ok(()));
    let too_few = ResizeError::NumBlocks {
        value: 0,
        low: 1,
        high: (1 << 30) - 1, // slots are counted in an i32
    };
    assert_eq!(world.resize(0), Err(too_few));
    world.drain();
}

#[test]
fn blocks_that_requests_share_move_once_for_all_of_them_and_are_found_where_they_are() {
    let config = Config {
        forced_moves: 3,
        ..config()
    };
    let mut world = World::new(&config);
    let prompt: Vec<i32> = (0..13).collect();
    let ask = |flavour: u64| Ask {
        flavour,
        ..Ask::new(&prompt, 6)
    };
    for flavour in 0..3 {
        world.submit(&ask(flavour));
    }
    let mut num_shared = 0;
    while world.ledger.live().count() > 0 {
        while let Some(view) = world.plan() {
            for (from, _) in &view.moves {
                assert!(*from > 0);
            }
            num_shared += usize::from(view.changes.len() > view.moves.len() + 4);
        }
        world.run();
        world.commit();
    }
    assert!(num_shared > 0, "a move changed more tables than one");
    let found = world.submit(&ask(5));
    world.drain();
    assert_eq!(world.account(found).num_hit_tokens, 12);
}

#[test]
fn the_moves_of_a_step_change_as_many_tables_as_there_is_room_for() {
    // One change for each move, and one for each seat: six.
    let mut world = World::new(&Config {
        max_num_seqs: 3,
        max_moves: 3,
        forced_moves: 3,
        ..config()
    });
    let prompt: Vec<i32> = (0..13).collect();
    for flavour in 0..3 {
        world.submit(&Ask {
            flavour,
            ..Ask::new(&prompt, 6)
        });
    }
    let mut most = 0;
    while world.ledger.live().count() > 0 {
        while let Some(view) = world.plan() {
            let is_destination = |block: u32| view.moves.iter().any(|&(_, to)| to == block);
            let changed = view.changes.iter();
            most = most.max(changed.filter(|change| is_destination(change.2)).count());
        }
        world.run();
        world.commit();
    }
    assert_eq!(most, 6, "two blocks of three tables each");
}

fn contiguous(max_moves: u32) -> World {
    World::new(&Config {
        max_moves,
        contiguous: true,
        enable_prefix_caching: false,
        ..config()
    })
}

/// Four of ten blocks each; the second and the fourth leave, so that half of the pool is free, in two pieces.
fn riddled(max_moves: u32) -> World {
    let mut world = contiguous(max_moves);
    let handles: Vec<u64> = (0..4)
        .map(|seed| world.submit(&Ask::sized(seed, 5, 16)))
        .collect();
    world.turn();
    world.abort(handles[1]);
    world.abort(handles[3]);
    let figures = world.core.kv_figures();
    assert_eq!((figures.num_free, figures.longest_free_run), (20, 10));
    world
}

#[test]
fn half_of_a_contiguous_cache_is_free_and_no_run_fits_until_runs_move_together() {
    for (max_moves, is_admitted) in [(0, false), (64, true)] {
        let mut world = riddled(max_moves);
        let handle = world.submit(&Ask::sized(7, 9, 30)); // 19 blocks
        for _ in 0..3 {
            world.turn();
        }
        let has_run = world.account(handle).num_output > 0;
        assert_eq!(has_run, is_admitted, "max_moves {max_moves}");
        let missed: i64 = world.core.records().map(|it| it.num_run_misses).sum();
        assert!(missed > 0, "an admission failed for want of a run");
        for seat in 0..4 {
            assert!(is_run(&world, seat));
        }
        world.drain();
        assert_eq!(world.account(handle).end, Some((FinishReason::Length, 30)));
    }
}

#[test]
fn only_what_is_filled_is_copied_when_a_run_slides() {
    let mut world = riddled(64);
    world.submit(&Ask::sized(7, 9, 30));
    let mut num_moves = 0;
    for _ in 0..3 {
        while let Some(view) = world.plan() {
            num_moves += view.moves.len();
        }
        world.run();
        world.commit();
    }
    // One run of ten blocks, three or four of which hold something.
    assert!((3..=5).contains(&num_moves), "{num_moves}");
    world.drain();
}

#[test]
fn contiguous_runs_that_do_not_all_fit_a_smaller_pool_stay_until_one_leaves() {
    for depth in 1..=3 {
        let mut world = World::new(&Config {
            num_blocks: 12,
            depth,
            contiguous: true,
            enable_prefix_caching: false,
            ..config()
        });
        let handles = [1, 2, 3].map(|seed| world.submit(&Ask::sized(seed, 4, 5))); // four blocks each
        world.turn();
        world.plan();
        world.resize(5).expect("each of them fits");
        world.drain();
        for handle in handles {
            assert_eq!(world.account(handle).end, Some((FinishReason::Length, 5)));
        }
        assert!(world.seen().preemptions > 0);
    }
}

#[test]
fn a_shared_block_beyond_a_smaller_pool_moves_once_for_all() {
    let mut world = World::new(&config());
    world.submit(&Ask::sized(9, 12, 8)); // lies in front
    let prompt: Vec<i32> = (0..13).collect();
    for flavour in 0..3 {
        world.submit(&Ask {
            flavour,
            ..Ask::new(&prompt, 4)
        });
    }
    world.plan();
    let shared: Vec<BlockId> = world.core.kv().table(Seat(1))[..6].to_vec();
    assert_eq!(world.core.kv().table(Seat(2))[..6], shared);
    world.resize(shared[0].0).expect("all of them fit");
    let view = world.plan().expect("they go on");
    let mut from: Vec<u32> = view.moves.iter().map(|pair| pair.0).collect();
    let has_moved = |block: &BlockId| from.contains(&block.0);
    assert!(shared[1..].iter().all(has_moved));
    assert!(!has_moved(&shared[0]), "the last of all lies well");
    from.sort_unstable();
    let num_moves = from.len();
    from.dedup();
    assert_eq!(from.len(), num_moves, "each once");
    world.drain();
}

/// Of three runs in a row of four blocks each the first leaves, and the pool shrinks to the other two. The moves of the next
/// step, and whether that was not enough.
fn slid_to_the_new_end(max_moves: u32) -> (usize, bool) {
    let mut world = World::new(&Config {
        num_blocks: 12,
        max_model_len: 9, // a step has room for the longest run at least
        max_moves,
        contiguous: true,
        enable_prefix_caching: false,
        ..config()
    });
    let handles = [1, 2, 3].map(|seed| world.submit(&Ask::sized(seed, 4, 5)));
    world.turn();
    world.abort(handles[0]);
    world.resize(8).expect("two fit");
    let view = world.plan().expect("they go on");
    let is_shrinking = world.core.is_shrinking();
    world.drain();
    for handle in &handles[1..] {
        assert_eq!(world.account(*handle).num_preemptions, 0);
    }
    (view.moves.len(), is_shrinking)
}

#[test]
fn contiguous_runs_that_just_fit_slide_in_one_step_that_has_just_room_for_it() {
    let (num_moves, is_shrinking) = slid_to_the_new_end(64);
    assert!(num_moves > 4 && !is_shrinking, "{num_moves}");
    let exactly = num_moves as u32;
    assert_eq!(slid_to_the_new_end(exactly), (num_moves, false));
    let (fewer, is_shrinking) = slid_to_the_new_end(exactly - 1);
    assert!(0 < fewer && fewer < num_moves && is_shrinking);
}

#[test]
fn a_group_in_quarantine_is_not_locked_out_by_where_others_lie() {
    for max_moves in [0, 64] {
        let mut world = riddled(max_moves);
        // Nobody who runs can leave a longer run free; the new one fails, and runs alone from then on.
        let handle = world.submit(&Ask {
            breaks_at: Some(10),
            ..Ask::sized(8, 9, 12)
        });
        for _ in 0..40 {
            world.turn();
        }
        assert!(!world.account(handle).is_live(), "max_moves {max_moves}");
        let next = world.submit(&Ask::sized(9, 9, 30));
        world.drain();
        assert_eq!(world.account(next).end, Some((FinishReason::Length, 30)));
    }
}

#[test]
fn forced_moves_take_held_blocks_that_cannot_be_found() {
    let mut world = World::new(&Config {
        forced_moves: 2,
        enable_prefix_caching: false,
        ..config()
    });
    world.submit(&Ask::sized(2, 3, 8));
    world.drain();
    assert!(world.seen().moves >= 8, "{:?}", world.seen());
}

#[test]
fn a_pool_has_at_least_a_block_beside_its_watermark_and_at_most_what_can_be_numbered() {
    let config = Config {
        num_blocks: 10,
        watermark_blocks: 3,
        max_num_seqs: 1,
        max_num_batched_tokens: 1,
        max_model_len: 2,
        enable_prefix_caching: false,
        ..Config::default()
    };
    let mut core = noria_core::Scheduler::new(config).expect("the configuration is good");
    let Err(ResizeError::NumBlocks {
        value: 3,
        low,
        high,
    }) = core.resize(3, 0)
    else {
        panic!("three are too few");
    };
    assert_eq!(low, 4);
    core.resize(low, 1).expect("the least will do");
    assert_eq!(
        core.resize(high + 1, 3),
        Err(ResizeError::NumBlocks {
            value: high + 1,
            low,
            high
        })
    );
    assert_eq!(core.kv().pool().num_free(), low);
    core.check();
}

#[test]
fn a_block_within_a_smaller_pool_is_not_moved() {
    let config = Config {
        num_blocks: 12,
        ..config()
    };
    let mut world = World::new(&config);
    // Blocks 1 to 5, and room for its output in the sixth.
    world.submit(&Ask::sized(1, 10, 3));
    world.turn();
    assert_eq!(world.core.kv().table(Seat(0)).len(), 6);
    world.resize(6).expect("it fits");
    assert!(!world.core.is_shrinking(), "nothing lies beyond");
    world.drain();
    assert_eq!(world.seen().moves, 0);
}

#[test]
fn nothing_moves_without_need_in_contiguous_mode() {
    let config = Config {
        contiguous: true,
        enable_prefix_caching: false,
        num_blocks: 64,
        ..config()
    };
    let mut world = World::new(&config);
    for (seed, num_output) in [(1, 3), (2, 9), (3, 5)] {
        world.submit(&Ask::sized(seed, 6, num_output));
    }
    world.drain();
    assert_eq!(
        world.seen().moves,
        0,
        "one that ends leaves a gap, which hurts nobody"
    );
    let num_misses: i64 = world
        .core
        .records()
        .map(|record| record.num_run_misses)
        .sum();
    assert_eq!(num_misses, 0);
}
