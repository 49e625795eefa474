//! Cases that well-known schedulers get wrong, each with its input, the plan that is right, and how far off it may be.
//! The core has its default admission, ageing and bypasses; the policy is the one that the case is about.

use noria_core::{Admission, Config, EventKind, FinishReason, KeyPolicy};

use crate::support::{Ask, World};

fn config(num_blocks: u32, num_seats: u32, max_num_batched_tokens: u32) -> Config {
    Config {
        num_blocks,
        max_num_seqs: num_seats,
        max_num_batched_tokens,
        max_model_len: (num_blocks * 16).min(32_768),
        vocab_size: 100,
        depth: 1,
        key: KeyPolicy::Priority,
        ..Config::default()
    }
}

fn told(world: &World, kind: EventKind) -> Vec<u64> {
    let events = world.core.events().iter();
    events
        .filter(|event| event.kind == kind)
        .map(|event| event.handle.to_bits())
        .collect()
}

/// Turns until nobody's prompt is open.
fn settle(world: &mut World) {
    while world
        .ledger
        .live()
        .any(|(_, account)| account.num_output == 0)
    {
        assert!(world.turn());
    }
}

/// A. Four seats are taken by requests of low priority with hundreds of tokens to go, and one of high priority comes.
/// The next step gives it a seat and computes its prompt, and one of the four waits. Nobody else is touched.
#[test]
fn a_an_urgent_request_takes_a_seat_in_the_next_step() {
    let mut world = World::new(&config(1024, 4, 2048));
    for seed in 0..4 {
        world.submit(&Ask::sized(seed, 64, 300).priority(5));
    }
    settle(&mut world);
    let urgent = world.submit(&Ask::sized(9, 64, 16).priority(0));
    let view = world.plan().expect("there is work");
    assert_eq!(view.row_of(urgent).map(|row| row.count), Some(64));
    assert_eq!(
        (told(&world, EventKind::Preempted).len(), view.rows.len()),
        (1, 4)
    );
}

/// B. 76 blocks are free, one of high priority needs 100, and four of low priority hold 21 each. Two of the four make
/// room, in the same step; the other two decode on.
#[test]
fn b_an_urgent_request_takes_the_blocks_it_needs_in_the_next_step() {
    let mut world = World::new(&config(160, 8, 4096));
    for seed in 0..4 {
        world.submit(&Ask::sized(seed, 21 * 16 - 6, 300).priority(5));
    }
    settle(&mut world);
    assert_eq!(world.core.num_held_blocks(), 84);
    let urgent = world.submit(&Ask::sized(9, 1600, 16).priority(0));
    let view = world.plan().expect("there is work");
    assert_eq!(view.row_of(urgent).map(|row| row.count), Some(1600));
    assert_eq!(
        (told(&world, EventKind::Preempted).len(), view.rows.len()),
        (2, 3)
    );
}

/// C. A prompt of 16,000 tokens of low priority has begun, at 512 tokens a step, and a short one of high priority comes.
/// It is computed whole in the next step, and the long one goes on with what is left.
#[test]
fn c_an_urgent_prompt_passes_one_that_has_begun() {
    let mut world = World::new(&config(2048, 8, 512));
    let long = world.submit(&Ask::sized(1, 16_000, 16).priority(5));
    world.turn();
    let urgent = world.submit(&Ask::sized(2, 100, 16).priority(0));
    let view = world.plan().expect("there is work");
    assert_eq!(view.row_of(urgent).map(|row| row.count), Some(100));
    let rest = view.row_of(long).expect("it goes on").count;
    assert_eq!(rest, 512 - 100, "all that is left");
}

/// D. The first in line needs 60 blocks, of which 52 are free, and ten that need one block each stand behind it, with 31
/// seats free. The ten pass it in that step: no more than `max_bypasses` (64) ever may.
#[test]
fn d_small_requests_pass_one_that_does_not_fit() {
    let mut world = World::new(&config(160, 32, 4096));
    world.submit(&Ask::sized(1, 108 * 16 - 8, 160));
    settle(&mut world);
    assert_eq!(world.core.kv().num_available(), 52, "108 are held");
    let large = world.submit(&Ask::sized(2, 59 * 16 + 8, 8));
    let small: Vec<u64> = (10..20)
        .map(|seed| world.submit(&Ask::sized(seed, 8, 8)))
        .collect();
    let view = world.plan().expect("there is work");
    assert_eq!(told(&world, EventKind::Admitted), small);
    assert!(view.row_of(large).is_none());
    world.drain();
    assert_eq!(world.account(large).end, Some((FinishReason::Length, 8)));
}

/// E. One of low priority comes first, and ever more of high priority than there are seats. It ages: after
/// `ageing_steps` it is first in line, and has the seat that comes free next.
#[test]
fn e_a_request_of_low_priority_is_served_within_the_ageing_bound() {
    let config = Config {
        ageing_steps: 200,
        ..config(1024, 4, 64)
    };
    let mut world = World::new(&config);
    for seed in 0..4 {
        world.submit(&Ask::sized(seed, 16, 20).priority(0));
    }
    settle(&mut world);
    let low = world.submit(&Ask::sized(9, 16, 8).priority(5));
    let submitted = world.num_steps;
    let mut seed = 10;
    while world.account(low).num_output == 0 {
        while world.core.num_waiting() < 5 {
            world.submit(&Ask::sized(seed, 16, 20).priority(0));
            seed += 1;
        }
        assert!(world.turn());
        let most = 200 + 20; // the longest that one with a seat has to go
        assert!(world.num_steps - submitted <= most, "it has aged");
    }
    assert!(world.num_steps - submitted > 200, "and not before");
}

/// What the first of many such runs costs: steps, and tokens computed beside those that had to be, in thousandths.
fn cost(world: &World) -> (u64, i64) {
    let needed: i64 = world
        .ledger
        .accounts
        .values()
        .map(|account| account.ask.prompt.len() as i64 + i64::from(account.num_output) - 1)
        .sum();
    let computed: i64 = world.core.records().map(|record| record.num_tokens).sum();
    (world.num_steps, (computed - needed) * 1000 / needed)
}

/// 64 requests of 64 tokens that want 512, and room for 16 of them whole.
fn crowd(admission: Admission, peak_percent: u32) -> World {
    let config = Config {
        admission,
        peak_percent,
        ..config(16 * 36, 64, 2048)
    };
    let mut world = World::new(&config);
    world.verbs_a_check = 16;
    for seed in 0..64 {
        world.submit(&Ask::sized(seed, 64, 512));
    }
    world.drain();
    world
}

/// F. 64 requests of 64 tokens that want 512 come at once, with room for 16 whole. Without any preemption batches of 16
/// take 2,048 steps. Entries spaced so that ends do not coincide take fewer, and compute nothing again. Where the peak may be
/// three times the pool it takes fewest, and a part is computed again.
#[test]
fn f_a_crowd_that_does_not_fit_thrashes_no_more_than_it_is_told() {
    let (steps, again) = cost(&crowd(Admission::Peak, 100));
    assert!(
        steps <= 1800 && again < 10,
        "{steps} steps, {again} of 1000"
    );
    let (steps, again) = cost(&crowd(Admission::Peak, 300));
    assert!(
        steps <= 1321 && again <= 300,
        "{steps} steps, {again} of 1000"
    );
}

/// G. The pool is full, and the step in which somebody must leave so that another can grow is also the first in which one
/// of better priority, short enough for what comes free, waits. That step admits it.
#[test]
fn g_a_step_that_preempts_also_admits() {
    let config = Config {
        admission: Admission::Optimistic,
        ..config(40, 8, 64)
    };
    let mut world = World::new(&config);
    for seed in 0..8 {
        world.submit(&Ask::sized(seed, 60, 100).priority(5));
    }
    let mut urgent = None;
    for _ in 0..200 {
        if urgent.is_none() && world.core.kv().num_available() == 0 {
            urgent = Some(world.submit(&Ask::sized(99, 8, 4).priority(0)));
        }
        let view = world.plan().expect("there is work");
        if let Some(urgent) = urgent {
            assert!(!told(&world, EventKind::Preempted).is_empty());
            assert!(view.row_of(urgent).is_some(), "in the step that preempts");
            return;
        }
        world.run();
        world.commit();
    }
    panic!("the pool never filled up");
}

/// N. One has 11 of its 12 tokens when the pool is full and another must grow. Under no policy is it the one that leaves,
/// wherever the end of its last block lies, unless there is no other.
#[test]
fn n_one_that_is_almost_through_never_leaves() {
    let keys = [
        KeyPolicy::Fcfs,
        KeyPolicy::Priority,
        KeyPolicy::Sjf,
        KeyPolicy::Deadline,
        KeyPolicy::Fair,
        KeyPolicy::Prefix,
    ];
    let prompts = || (17..49).flat_map(|num| (52..58).map(move |others| (num, others)));
    let (mut num_preemptions, mut num_full) = (0, 0);
    for (key, (num_prompt, num_others)) in keys
        .into_iter()
        .flat_map(|key| prompts().map(move |lengths| (key, lengths)))
    {
        // Five hold four blocks each, and want a fifth when the sixth is at its end.
        let num_blocks = 20 + (num_prompt as u32 + 10).div_ceil(16);
        let config = Config {
            key,
            admission: Admission::Optimistic,
            enable_prefix_caching: false,
            ..config(num_blocks, 8, 512)
        };
        let mut world = World::new(&config);
        world.verbs_a_check = 16;
        let others: Vec<u64> = (0..5)
            .map(|seed| world.submit(&Ask::sized(seed, num_others, 60)))
            .collect();
        let ending = world.submit(&Ask::sized(9, num_prompt, 12));
        while world.account(ending).is_live() {
            assert!(world.turn());
            num_full += u32::from(world.core.kv().num_available() == 0);
        }
        assert!(
            !was_late(&world, ending),
            "{key:?}, a prompt of {num_prompt} beside {num_others}"
        );
        num_preemptions += others
            .iter()
            .map(|&other| world.account(other).num_preemptions)
            .sum::<u32>();
    }
    assert!(num_preemptions > 0 && num_full > 0, "somebody had to leave");
}

/// Whether `handle` was preempted when it had all but its last token.
fn was_late(world: &World, handle: u64) -> bool {
    let account = world.account(handle);
    account
        .num_tokens_when_preempted
        .iter()
        .any(|&num| num + 1 >= account.max_output)
}
