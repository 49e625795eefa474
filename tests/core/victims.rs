//! Who leaves when the pool is full, and who may push whom aside: chapter 3 of DESIGN.md, rule by rule.

use noria_core::{Admission, Config, EventKind, FinishReason, KeyPolicy};

use crate::support::{Ask, World};

fn config(num_blocks: u32, num_seats: u32) -> Config {
    Config {
        num_blocks,
        block_size: 2,
        max_num_seqs: num_seats,
        max_num_batched_tokens: 64,
        max_model_len: 64,
        vocab_size: 100,
        depth: 1,
        key: KeyPolicy::Priority,
        admission: Admission::Optimistic,
        ..Config::default()
    }
}

/// Handles with an event of `kind` from the last plan or commit.
fn told(world: &World, kind: EventKind) -> Vec<u64> {
    let events = world.core.events().iter();
    events
        .filter(|event| event.kind == kind)
        .map(|event| event.handle.to_bits())
        .collect()
}

fn preempted(world: &World) -> Vec<u64> {
    told(world, EventKind::Preempted)
}

/// Turns until a plan preempts; who left in it. That step stays in flight.
fn first_preempted(world: &mut World) -> Vec<u64> {
    for _ in 0..200 {
        world.plan();
        let gone = preempted(world);
        if !gone.is_empty() {
            return gone;
        }
        world.run();
        world.commit();
    }
    panic!("nothing was preempted");
}

#[test]
fn growth_takes_the_worst_band_first() {
    let mut world = World::new(&config(12, 4));
    let urgent = world.submit(&Ask::sized(1, 4, 20).priority(-1));
    let low = world.submit(&Ask::sized(2, 4, 20).priority(2));
    let _older = world.submit(&Ask::sized(3, 6, 18).priority(0));
    let _younger = world.submit(&Ask::sized(4, 2, 20).priority(0));
    assert_eq!(first_preempted(&mut world), [low]);
    world.drain();
    assert_eq!(
        world.account(urgent).num_preemptions,
        0,
        "the best key never leaves"
    );
}

#[test]
fn in_a_band_the_least_to_recompute_leaves_first() {
    let mut world = World::new(&config(10, 3));
    let _best = world.submit(&Ask::sized(1, 4, 14));
    let short = world.submit(&Ask::sized(2, 3, 14));
    let _long = world.submit(&Ask::sized(3, 9, 11));
    assert_eq!(
        first_preempted(&mut world),
        [short],
        "though another came later"
    );
}

#[test]
fn of_as_much_to_recompute_the_one_that_came_last_leaves() {
    let mut world = World::new(&config(9, 3));
    let _best = world.submit(&Ask::sized(1, 5, 14));
    let _second = world.submit(&Ask::sized(2, 5, 14));
    let third = world.submit(&Ask::sized(3, 5, 14));
    assert_eq!(first_preempted(&mut world), [third]);
}

#[test]
fn one_that_ends_in_the_blocks_that_it_holds_leaves_last() {
    let mut world = World::new(&config(9, 3));
    let _best = world.submit(&Ask::sized(1, 4, 14));
    let other = world.submit(&Ask::sized(2, 7, 12));
    // Five tokens of prompt and two of output: its third block has room for all it will compute.
    let ending = world.submit(&Ask::sized(3, 5, 2));
    assert_eq!(
        first_preempted(&mut world),
        [other],
        "though it has more to recompute"
    );
    world.drain();
    assert_eq!(world.account(ending).num_preemptions, 0);
    assert_eq!(world.account(ending).end, Some((FinishReason::Length, 2)));
}

#[test]
fn the_best_key_is_never_a_victim_even_of_its_own_growth() {
    let mut world = World::new(&config(8, 4));
    let best = world.submit(&Ask::sized(1, 6, 10));
    let others: Vec<u64> = (2..5)
        .map(|seed| world.submit(&Ask::sized(seed, 2, 12)))
        .collect();
    world.drain();
    assert_eq!(world.account(best).num_preemptions, 0);
    assert!(
        others
            .iter()
            .any(|&other| world.account(other).num_preemptions > 0)
    );
}

#[test]
fn the_one_that_grows_may_leave_itself() {
    let mut world = World::new(&config(8, 2));
    let best = world.submit(&Ask::sized(1, 7, 9));
    let grower = world.submit(&Ask::sized(2, 4, 12));
    assert_eq!(first_preempted(&mut world), [grower]);
    assert_eq!(world.account(best).num_preemptions, 0);
    let view = &world.runner.queue[0].view;
    assert!(
        view.row_of(best).is_some() && view.row_of(grower).is_none(),
        "no preempted row is in a plan"
    );
}

#[test]
fn equals_never_push_one_another_aside() {
    let mut world = World::new(&config(40, 2));
    let asks: Vec<Ask> = (1..9).map(|seed| Ask::sized(seed, 6, 6)).collect();
    let handles: Vec<u64> = asks.iter().map(|ask| world.submit(ask)).collect();
    world.drain();
    assert!(
        handles
            .iter()
            .all(|&handle| world.account(handle).num_preemptions == 0)
    );
}

#[test]
fn equals_that_outgrow_the_pool_take_turns_and_not_each_others_blocks() {
    let mut world = World::new(&config(10, 4));
    let handles: Vec<u64> = (1..5)
        .map(|seed| world.submit(&Ask::sized(seed, 4, 12)))
        .collect();
    world.drain();
    let counts: Vec<u32> = handles
        .iter()
        .map(|&handle| world.account(handle).num_preemptions)
        .collect();
    assert_eq!(counts[0], 0, "the first goes through");
    assert!(counts.iter().sum::<u32>() > 0);
    assert!(
        counts.iter().all(|&count| count <= 3),
        "no one is thrown out more often than others end: {counts:?}"
    );
}

#[test]
fn a_shortage_of_tokens_never_preempts() {
    let mut world = World::new(&Config {
        max_num_batched_tokens: 3,
        ..config(60, 3)
    });
    for seed in 1..3 {
        world.submit(&Ask::sized(seed, 2, 12).priority(5));
    }
    while world
        .ledger
        .live()
        .any(|(_, account)| account.num_output == 0)
    {
        assert!(world.turn());
    }
    let urgent = world.submit(&Ask::sized(7, 20, 2).priority(0));
    // Two decodes leave one token a step, and so the prompt takes long; yet nobody leaves for it.
    while world.account(urgent).is_live() && world.turn() {
        assert!(preempted(&world).is_empty());
    }
    assert!(
        world
            .ledger
            .accounts
            .values()
            .all(|account| account.num_preemptions == 0)
    );
}

#[test]
fn an_urgent_request_enters_at_once_when_lesser_ones_hold_all_seats() {
    let mut world = World::new(&config(60, 4));
    for seed in 1..5 {
        world.submit(&Ask::sized(seed, 4, 30).priority(5));
    }
    world.turn();
    world.turn();
    let urgent = world.submit(&Ask::sized(9, 4, 4).priority(0));
    let view = world.plan().expect("there is work");
    assert_eq!(preempted(&world).len(), 1);
    assert_eq!(
        told(&world, EventKind::Admitted),
        [urgent],
        "a step that preempts also admits"
    );
    assert!(view.row_of(urgent).is_some());
    assert_eq!(view.rows.len(), 4, "the other three decode on");
}

#[test]
fn an_urgent_request_enters_at_once_when_lesser_ones_hold_the_blocks() {
    // 76 of 160 blocks are free, four lesser ones hold 21 each, and 100 are needed.
    let config = Config {
        num_blocks: 160,
        block_size: 2,
        max_num_batched_tokens: 4096,
        max_model_len: 1024,
        ..config(160, 8)
    };
    let mut world = World::new(&config);
    for seed in 1..5 {
        world.submit(&Ask::sized(seed, 41, 200).priority(5));
    }
    world.turn();
    assert_eq!(world.core.num_held_blocks(), 84);
    let urgent = world.submit(&Ask::sized(9, 200, 4).priority(0));
    let view = world.plan().expect("there is work");
    assert_eq!(preempted(&world).len(), 2, "no more leave than must");
    assert_eq!(view.row_of(urgent).expect("it runs").count, 200);
}

#[test]
fn nobody_leaves_for_an_urgent_request_that_would_still_not_fit() {
    let mut world = World::new(&config(30, 3));
    world.submit(&Ask::sized(1, 40, 10).priority(0));
    world.submit(&Ask::sized(2, 8, 10).priority(5));
    world.turn();
    // 26 blocks are needed; 20 of 30 are held by one that is no worse.
    world.submit(&Ask::sized(3, 51, 4).priority(0));
    world.plan();
    assert!(preempted(&world).is_empty(), "a failed try leaves no trace");
    assert_eq!(world.core.num_running(), 2);
}

#[test]
fn an_urgent_prompt_is_not_behind_a_lesser_one_that_has_begun() {
    let mut world = World::new(&Config {
        max_num_batched_tokens: 8,
        ..config(60, 4)
    });
    let long = world.submit(&Ask::sized(1, 60, 2).priority(5));
    world.turn();
    let urgent = world.submit(&Ask::sized(2, 6, 2).priority(0));
    let view = world.plan().expect("there is work");
    assert_eq!(
        view.row_of(urgent).expect("it runs").count,
        6,
        "whole, in the next step"
    );
    assert_eq!(
        view.row_of(long).map(|row| row.count),
        Some(2),
        "the rest goes on as before"
    );
}

#[test]
fn growth_that_makes_room_admits_a_better_one_in_the_same_step() {
    // Three seats, three tokens: the token of the row that is withdrawn goes to the newcomer.
    let mut world = World::new(&Config {
        max_num_batched_tokens: 3,
        ..config(7, 3)
    });
    let best = world.submit(&Ask::sized(1, 2, 13).priority(0));
    let lesser: Vec<u64> = (2..4)
        .map(|seed| world.submit(&Ask::sized(seed, 3, 9).priority(5)))
        .collect();
    let mut urgent = None;
    for _ in 0..60 {
        if urgent.is_none() && world.core.kv().num_available() == 0 && world.core.num_running() == 3
        {
            urgent = Some(world.submit(&Ask::sized(9, 1, 1).priority(-1)));
        }
        let view = world.plan().expect("there is work");
        let gone = preempted(&world);
        if !gone.is_empty() {
            let urgent = urgent.expect("the pool filled up first");
            assert!(lesser.contains(&gone[0]));
            assert!(
                view.row_of(urgent).is_some(),
                "a step that preempts also admits"
            );
            assert!(view.row_of(best).is_some());
            return;
        }
        world.run();
        world.commit();
    }
    panic!("nothing was preempted");
}

#[test]
fn a_block_that_is_certain_to_come_free_is_waited_for() {
    for depth in 2..=3 {
        let mut world = World::new(&Config {
            depth,
            ..config(6, 2)
        });
        // It ends with the token of its sixth position, in three blocks; the other then wants a fourth.
        let ending = world.submit(&Ask::sized(1, 4, 3).priority(5));
        let growing = world.submit(&Ask::sized(2, 4, 8).priority(0));
        world.drain();
        for handle in [ending, growing] {
            assert_eq!(world.account(handle).num_preemptions, 0, "depth {depth}");
        }
    }
}

#[test]
fn a_preempted_request_gets_its_token_in_flight_and_then_resumes_in_its_place() {
    let mut world = World::new(&Config {
        depth: 2,
        ..config(60, 1)
    });
    let low = world.submit(&Ask::sized(1, 4, 6).priority(5));
    world.plan();
    world.plan(); // both in flight: its prompt, and a decode behind it
    world.run();
    world.commit();
    let urgent = world.submit(&Ask::sized(2, 4, 1).priority(0));
    world.plan();
    assert_eq!(preempted(&world), [low]);
    let later = world.submit(&Ask::sized(3, 4, 1).priority(5));
    world.run();
    world.commit(); // the decode: its token counts, its place in KV memory does not
    assert_eq!(world.account(low).num_output, 2);
    world.run();
    world.commit();
    assert_eq!(world.account(urgent).end, Some((FinishReason::Length, 1)));
    let view = world.plan().expect("there is work");
    let row = view
        .row_of(low)
        .expect("it is before the one that came later");
    assert_eq!((row.start + row.count, view.gained.len()), (6, 1));
    assert!(view.row_of(later).is_none());
    world.drain();
}

#[test]
fn a_preempted_request_is_not_resumed_before_its_last_step_in_flight_is_committed() {
    let mut world = World::new(&Config {
        depth: 3,
        ..config(60, 2)
    });
    let low = world.submit(&Ask::sized(1, 4, 9).priority(5));
    world.plan();
    world.plan();
    let urgent: Vec<u64> = (2..4)
        .map(|seed| world.submit(&Ask::sized(seed, 4, 1).priority(0)))
        .collect();
    world.plan();
    assert_eq!(preempted(&world), [low]);
    world.run();
    world.commit();
    assert!(world.abort(urgent[0]));
    assert!(world.abort(urgent[1]));
    assert!(
        world.plan().is_none(),
        "seats and blocks are free, yet one of its rows is in flight"
    );
    world.run();
    world.commit();
    let view = world.plan().expect("now it resumes");
    assert_eq!(
        view.row_of(low).map(|row| (row.start, row.count)),
        Some((4, 2)),
        "behind the blocks that it filled"
    );
    world.drain();
}
