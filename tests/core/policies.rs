//! A policy of one's own, deadlines, adapters, shares and targets: what each promises.

use std::cell::Cell;

use noria_core::{
    Config, EventKind, Facts, FinishReason, KeyPolicy, MAX_PAUSED_STEPS, Policy, Scheduler, Share,
    flags, replay,
};
use proptest::prelude::*;

use crate::support::{Ask, Phase, StepView, World, own_score};
use crate::traffic::{Scope, apply, check, configs, verbs, wind_up};

const ANY: Scope = Scope {
    is_static: false,
    has_drafts: false,
    has_failures: true,
    has_resizes: false,
};

#[derive(Debug)]
struct OwnScore;

impl Policy for OwnScore {
    fn score(&self, facts: &Facts) -> i64 {
        own_score(facts)
    }
}

/// The core asks a policy at the same moments at which an engine is to ask its user's.
#[test]
fn a_policy_that_the_core_asks_plans_what_scores_from_outside_do() {
    let strategy = (configs(ANY), prop::collection::vec(verbs(ANY), 1..80));
    let num_steps = Cell::new(0);
    check(30, &strategy, |(config, verbs)| {
        let config = Config {
            key: KeyPolicy::Own,
            ..config
        };
        let asked = Scheduler::with_policy(config.clone(), Box::new(OwnScore));
        let mut asked = World::around(asked.expect("the configuration is good"));
        asked.has_policy = true;
        let mut told = World::recorded(&config);
        for world in [&mut asked, &mut told] {
            for verb in &verbs {
                apply(world, verb);
            }
            wind_up(world);
        }
        assert_eq!(asked.digests, told.digests);
        assert_eq!(replay(told.core.recording()).as_ref(), Ok(&told.digests));
        num_steps.set(num_steps.get() + told.num_steps);
    });
    assert!(num_steps.get() > 300, "{} steps", num_steps.get());
}

/// The longest prompt first.
#[derive(Debug)]
struct LongestPrompt;

impl Policy for LongestPrompt {
    fn score(&self, facts: &Facts) -> i64 {
        -i64::from(facts.num_prompt_tokens)
    }
}

#[test]
fn the_lowest_score_enters_first_in_its_band() {
    let config = Config {
        max_num_seqs: 1,
        max_num_batched_tokens: 64,
        ..Config::default()
    };
    let core = Scheduler::with_policy(config, Box::new(LongestPrompt)).expect("it is good");
    let mut world = World::around(core);
    world.has_policy = true;
    let requests = [(5, 0), (9, 0), (7, 0), (2, -1)];
    let handles: Vec<u64> = (0..)
        .zip(requests)
        .map(|(seed, (len, priority))| world.submit(&Ask::sized(seed, len, 2).priority(priority)))
        .collect();
    let mut order = Vec::new();
    while world.turn() {
        for (handle, account) in &world.ledger.accounts {
            if account.num_output > 0 && !order.contains(handle) {
                order.push(*handle);
            }
        }
    }
    assert_eq!(order, [3, 1, 2, 0].map(|i| handles[i]));
}

#[test]
fn a_request_expires_in_the_first_plan_at_its_time_wherever_it_is() {
    let config = Config {
        max_num_seqs: 1,
        max_num_batched_tokens: 64,
        depth: 1,
        ..Config::default()
    };
    let mut world = World::new(&config);
    let expiring = |seed, parked| Ask {
        expires_us: Some(12),
        parked,
        ..Ask::sized(seed, 5, 100)
    };
    let running = world.submit(&expiring(0, false));
    let waiting = world.submit(&expiring(1, false));
    let parked = world.submit(&expiring(2, true));
    let other = world.submit(&Ask::sized(3, 5, 4));
    assert_eq!(world.core.next_expiry_us(), Some(12));
    while world.time_us() < 11 {
        assert!(world.account(running).is_live());
        world.turn();
    }
    let num_output = world.account(running).num_output;
    let view = world.plan().expect("another may run now");
    assert!(view.row_of(other).is_some(), "in the same plan");
    for (handle, num_output) in [(running, num_output), (waiting, 0), (parked, 0)] {
        let end = world.account(handle).end;
        assert_eq!(end, Some((FinishReason::Expired, num_output)));
    }
    assert_eq!(world.core.next_expiry_us(), None);
    world.drain();
}

#[test]
fn an_adapter_that_has_no_room_is_passed_no_more_often_than_the_bound_says() {
    let config = Config {
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_bypasses: 5,
        max_adapters: 1,
        depth: 1,
        ..Config::default()
    };
    let mut world = World::new(&config);
    let mut seed = 0;
    let mut submit = |world: &mut World, adapter| {
        seed += 1;
        // Of several lengths, so that somebody is always there.
        world.submit(&Ask::sized(seed, 4, 4 + i64::from(seed * 7 % 5)).adapter(adapter))
    };
    for _ in 0..3 {
        submit(&mut world, 1);
    }
    world.turn();
    let other = submit(&mut world, 2);
    let without = submit(&mut world, 0);
    let view = world.plan().expect("there is work");
    assert!(
        view.row_of(without).is_some(),
        "one without an adapter needs no room"
    );
    assert!(view.row_of(other).is_none());
    let mut num_turns = 0;
    while world.account(other).phase == Phase::New {
        while world.core.num_waiting() < 4 {
            submit(&mut world, 1);
        }
        world.turn();
        num_turns += 1;
        assert!(num_turns < 40, "its turn comes");
    }
    let passed = world
        .ledger
        .accounts
        .iter()
        .filter(|&(&handle, account)| handle > other && account.phase != Phase::New);
    // The one without an adapter is one of them.
    assert_eq!(passed.count(), 5);
}

#[test]
fn an_urgent_request_empties_the_adapter_that_the_fewest_run_with() {
    let config = Config {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_adapters: 2,
        depth: 1,
        key: KeyPolicy::Priority,
        ..Config::default()
    };
    let mut world = World::new(&config);
    let handles: Vec<u64> = [1, 1, 2, 1, 0]
        .into_iter()
        .zip(0..)
        .map(|(adapter, seed)| world.submit(&Ask::sized(seed, 4, 50).adapter(adapter).priority(3)))
        .collect();
    world.turn();
    let urgent = world.submit(&Ask::sized(9, 4, 5).adapter(3));
    let view = world.plan().expect("there is work");
    assert!(view.row_of(urgent).is_some());
    let events = world.core.events().iter();
    let preempted: Vec<u64> = events
        .filter(|event| event.kind == EventKind::Preempted)
        .map(|event| event.handle.to_bits())
        .collect();
    assert_eq!(preempted, [handles[2]]);
}

#[test]
fn kv_is_not_shared_between_adapters() {
    let config = Config {
        max_num_batched_tokens: 256,
        ..Config::default()
    };
    let mut world = World::new(&config);
    for adapter in [0, 7, 7, 0, 7 << 32] {
        world.submit(&Ask::sized(1, 65, 2).adapter(adapter));
        world.drain();
    }
    let hits = world.ledger.accounts.values();
    let hits: Vec<u32> = hits.map(|account| account.num_hit_tokens).collect();
    assert_eq!(hits, [0, 0, 64, 64, 0]);
}

/// Steps in a row in which somebody who could decode gets no row, at most.
fn longest_pause(world: &mut World, mut submits: impl FnMut(&mut World)) -> u32 {
    let (mut longest, mut pause) = (0, 0);
    loop {
        submits(world);
        let decoding: Vec<u64> = world
            .ledger
            .live()
            .filter(|(_, account)| account.phase == Phase::Running && account.num_output > 0)
            .map(|(handle, _)| handle)
            .collect();
        let Some(view) = world.plan() else {
            return longest;
        };
        let is_left_out = |&handle: &u64| {
            world.account(handle).phase == Phase::Running && view.row_of(handle).is_none()
        };
        pause = if decoding.iter().any(is_left_out) {
            pause + 1
        } else {
            0
        };
        longest = longest.max(pause);
        world.run();
        world.commit();
    }
}

#[test]
fn prefills_that_go_first_let_no_decode_pause_for_longer_than_the_bound_says() {
    let loads = prop::collection::vec((1usize..=60, 1i64..=12, 0u8..=2), 10..40);
    let seats = (2u32..=12, 0u32..=8);
    let longest = Cell::new(0);
    check(20, &(seats, loads), |((max_num_seqs, spare), loads)| {
        let config = Config {
            max_num_seqs,
            max_num_batched_tokens: max_num_seqs + spare,
            max_partial_prefills: 3,
            depth: 1,
            block_size: 4,
            share: Share::PrefillFirst,
            ..Config::default()
        };
        let mut world = World::new(&config);
        let mut loads = loads.into_iter().zip(0..);
        let pause = longest_pause(&mut world, |world| {
            let Some(((len, max_tokens, rest), seed)) = loads.next() else {
                return;
            };
            world.submit(&Ask::sized(seed, len, max_tokens));
            for _ in 0..rest {
                world.submit(&Ask::sized(seed + 1000 * i32::from(rest), 40, 1));
            }
        });
        assert!(pause <= MAX_PAUSED_STEPS, "{pause} steps");
        longest.set(longest.get().max(pause));
    });
    assert_eq!(
        longest.get(),
        MAX_PAUSED_STEPS,
        "somebody paused as long as may be"
    );
}

#[test]
fn a_prompt_goes_before_decodes_only_where_it_is_told_to() {
    let rows_of = |share| {
        let config = Config {
            max_num_seqs: 4,
            max_num_batched_tokens: 16,
            depth: 1,
            share,
            ..Config::default()
        };
        let mut world = World::new(&config);
        for seed in 0..3 {
            world.submit(&Ask::sized(seed, 5, 20));
        }
        world.turn();
        let prompt = world.submit(&Ask::sized(9, 40, 2));
        let view = world.plan().expect("there is work");
        let count = view.row_of(prompt).map(|row| row.count);
        (view.rows.len(), count)
    };
    assert_eq!(rows_of(Share::DecodeFirst), (4, Some(13)));
    assert_eq!(rows_of(Share::PrefillFirst), (1, Some(16)));
}

/// What a step takes on a device whose time is fixed parts of its size.
fn linear_us(view: &StepView) -> u64 {
    let attended: u64 = view
        .rows
        .iter()
        .map(|row| u64::from(row.count) * u64::from(row.start + row.count))
        .sum();
    2000 + 30 * u64::from(view.num_tokens) + attended / 64
}

#[test]
fn a_step_is_cut_to_its_target_once_its_costs_are_known() {
    let config = Config {
        num_blocks: 4096,
        max_num_seqs: 32,
        max_num_batched_tokens: 2048,
        max_model_len: 8192,
        step_target_us: 12_000,
        ..Config::default()
    };
    let mut world = World::recorded(&config);
    world.verbs_a_check = 16;
    world.device_us = linear_us;
    let (mut longest, mut shortest, mut num_chunks) = (0, u64::MAX, 0);
    for turn in 0..400 {
        if turn % 8 == 0 {
            let len = 40 + turn as usize * 617 % 3000;
            world.submit(&Ask::sized(turn, len, 100));
        }
        while let Some(view) = world.plan() {
            let is_cut = view
                .rows
                .iter()
                .any(|row| row.count > 1 && !row.has(flags::SAMPLES));
            if turn > 100 && is_cut {
                let us = linear_us(&view);
                (longest, shortest) = (longest.max(us), shortest.min(us));
                num_chunks += 1;
            }
        }
        world.run();
        world.commit();
    }
    assert!(
        num_chunks > 100,
        "{num_chunks} steps with a prompt that was cut"
    );
    // A block is 16 tokens, and a chunk is whole blocks.
    assert!(longest <= 12_600, "{longest} us");
    assert!(shortest >= 10_500, "{shortest} us");
    let [fixed, token, keys] = world.core.step_cost_ns();
    assert!((1_500_000..2_500_000).contains(&fixed), "{fixed} ns a step");
    assert!((28_000..33_000).contains(&token), "{token} ns a token");
    assert!((13_000..19_000).contains(&keys), "{keys} ns for 1,024 keys");
    assert_eq!(replay(world.core.recording()), Ok(world.digests));
}

#[test]
fn whatever_a_step_takes_prompts_get_on_by_a_block_a_step() {
    let config = Config {
        max_num_batched_tokens: 512,
        step_target_us: 1,
        depth: 1,
        ..Config::default()
    };
    let mut world = World::new(&config);
    world.device_us = linear_us;
    let handle = world.submit(&Ask::sized(0, 160, 3));
    let mut num_steps = 0;
    while world.account(handle).num_output == 0 {
        world.turn();
        num_steps += 1;
    }
    assert_eq!(num_steps, 10);
}

/// Tokens computed for four prompts that begin alike, with a budget that leaves part of a block open in each step.
fn num_computed(key: KeyPolicy, max_prefix_waits: u32) -> (i64, Vec<u32>) {
    let config = Config {
        num_blocks: 512,
        max_num_seqs: 8,
        max_num_batched_tokens: 24,
        max_partial_prefills: 4,
        long_prefill_token_threshold: 12,
        depth: 1,
        key,
        max_prefix_waits,
        ..Config::default()
    };
    let mut world = World::new(&config);
    for seed in 0..4 {
        let mut ask = Ask::sized(0, 128, 4);
        ask.prompt.extend([90 + seed, 5, 6]);
        ask.flavour = seed as u64;
        world.submit(&ask);
    }
    world.drain();
    let num_prefilled = world
        .core
        .records()
        .map(|record| record.num_prefill_tokens)
        .sum();
    let hits = world.ledger.accounts.values();
    (
        num_prefilled,
        hits.map(|account| account.num_hit_tokens).collect(),
    )
}

#[test]
fn who_begins_with_a_block_that_is_being_computed_waits_for_it_under_prefix() {
    let (least, hits) = num_computed(KeyPolicy::Prefix, 100);
    assert_eq!(least, 128 + 4 * 3, "the common part is computed once");
    assert_eq!(hits, [0, 128, 128, 128]);
    let (bounded, _) = num_computed(KeyPolicy::Prefix, 1);
    let (at_once, _) = num_computed(KeyPolicy::Prefix, 0);
    let (in_order, _) = num_computed(KeyPolicy::Priority, 100);
    assert!(least < bounded, "{least}, {bounded}");
    assert!(
        bounded <= at_once && at_once <= in_order,
        "{bounded}, {at_once}, {in_order}"
    );
}
