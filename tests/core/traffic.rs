//! Random verbs on tiny pools and alphabets, and how a run of them is made.

use noria_core::{
    Admission, Config, Drafts, FinishReason, Handle, KeyPolicy, PinId, Reject, Share,
};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use crate::support::{Ask, Breakage, World};

/// One verb; its numbers are read as what there is to choose from.
#[derive(Clone, Debug)]
pub(crate) enum Verb {
    Submit(Ask),
    Plan,
    PlanDrafts {
        chosen: u8,
        count: i32,
        right: u8,
        has_ids: bool,
        is_spoiled: bool,
    },
    Run,
    Commit {
        supplied: u8,
    },
    Turn,
    Fail {
        num_before: u8,
        breakage: u8,
    },
    PokeDiscarded,
    Finish {
        which: u8,
        cut: u8,
        reason: u8,
    },
    Expire {
        which: u8,
    },
    Unpark {
        which: u8,
    },
    Reset,
    Resize {
        num_blocks: u32,
    },
    /// What one request begins with.
    Pin {
        which: u8,
        num_tokens: u8,
    },
    Unpin {
        which: u8,
    },
}

const KEYS: [KeyPolicy; 7] = [
    KeyPolicy::Fcfs,
    KeyPolicy::Priority,
    KeyPolicy::Sjf,
    KeyPolicy::Deadline,
    KeyPolicy::Fair,
    KeyPolicy::Prefix,
    KeyPolicy::Own,
];

/// Which parts of the core a run exercises.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scope {
    pub(crate) is_static: bool,
    pub(crate) has_drafts: bool,
    pub(crate) has_failures: bool,
    /// The pool is resized, and sequences may be contiguous.
    pub(crate) has_resizes: bool,
}

prop_compose! {
    pub(crate) fn configs(scope: Scope)(
        (num_blocks, block_size, max_num_seqs) in (2u32..=24, 1u32..=4, 1u32..=6),
        (spare_tokens, max_model_len, vocab_size) in (0u32..=12, 4u32..=40, 2u32..=3),
        (depth, max_drafts) in (1u32..=3, prop_oneof![1 => Just(0u32), 8 => 1u32..=3]),
        (max_partial_prefills, threshold) in (1u32..=3, prop_oneof![2 => Just(0u32), 1 => 1u32..=6]),
        enable_prefix_caching in prop::bool::weighted(0.8),
        watermark in prop_oneof![2 => Just(0u32), 1 => 0u32..=3],
        key in prop::sample::select(&KEYS[..]),
        admission in prop::sample::select(&[Admission::Peak, Admission::Reserve, Admission::Optimistic][..]),
        peak_percent in prop_oneof![3 => Just(100u32), 1 => 100u32..=300],
        (share, step_target_us) in (
            prop::sample::select(&[Share::DecodeFirst, Share::DecodeFirst, Share::PrefillFirst][..]),
            prop_oneof![3 => Just(0u32), 1 => 1u32..=20],
        ),
        (max_adapters, max_prefix_waits) in (0u32..=2, 0u32..=3),
        ageing_steps in prop_oneof![1 => Just(0u32), 2 => 1u32..=12],
        (max_bypasses, max_preemptions) in (0u32..=4, 0u32..=3),
        is_padded in any::<bool>(),
        max_queued in prop_oneof![4 => Just(64u32), 1 => 1u32..=4],
        (max_moves, forced_moves) in (prop_oneof![1 => Just(0u32), 4 => 1u32..=3, 4 => Just(64u32)], 0u32..=3),
        is_contiguous in prop::bool::weighted(0.3),
        window in prop_oneof![3 => Just(0u32), 2 => 1u32..=12],
        num_swap_blocks in prop_oneof![2 => Just(0u32), 1 => 1u32..=6, 1 => Just(64u32)],
    ) -> Config {
        let contiguous = is_contiguous && scope.has_resizes && !scope.is_static;
        Config {
            num_blocks,
            block_size,
            max_num_seqs,
            max_num_batched_tokens: max_num_seqs + spare_tokens,
            max_model_len,
            vocab_size,
            depth,
            max_drafts: if scope.has_drafts { max_drafts } else { 0 },
            max_partial_prefills,
            long_prefill_token_threshold: threshold,
            enable_prefix_caching: enable_prefix_caching && !contiguous,
            watermark_blocks: watermark.min(num_blocks - 1),
            key,
            admission: match (scope.is_static, is_padded) {
                (false, _) => admission,
                (true, false) => Admission::StaticGang,
                (true, true) => Admission::StaticPadded,
            },
            peak_percent,
            share,
            step_target_us,
            max_adapters,
            max_prefix_waits,
            max_queued,
            max_queued_tokens: 1 << 40,
            ageing_steps,
            max_bypasses,
            max_preemptions,
            fair_input_weight: 1,
            fair_output_weight: 2,
            hash_seed: 5,
            num_records: 4,
            max_moves,
            forced_moves: if contiguous { 0 } else { forced_moves.min(max_moves) },
            contiguous,
            num_kv_events: 1024,
            window: if contiguous || scope.is_static { 0 } else { window },
            num_swap_blocks: if contiguous || scope.is_static { 0 } else { num_swap_blocks },
        }
    }
}

prop_compose! {
    pub(crate) fn asks(scope: Scope)(
        pattern in 0u8..4,
        len in 1usize..=14,
        flip in prop_oneof![2 => Just(None), 1 => (0usize..14).prop_map(Some)],
        max_tokens in prop_oneof![3 => 1i64..=10, 1 => 1i64..=40],
        priority in -1i32..=2,
        (tenant, expected_tokens) in (0u64..=2, prop_oneof![2 => Just(None), 1 => (0u32..=12).prop_map(Some)]),
        (ttft_target_us, itl_target_us) in (0u64..=60, 0u64..=8),
        (stops, salt, flavour) in (0u8..8, 0u128..=1, 0u64..=2),
        adapter in prop_oneof![2 => Just(0u64), 1 => 0u64..=3],
        expires_us in prop_oneof![8 => Just(None), 1 => (0u64..300).prop_map(Some)],
        (parked, host_masked, reads_prefix_cache) in
            (prop::bool::weighted(0.1), prop::bool::weighted(0.15), prop::bool::weighted(0.9)),
        breaks_at in prop_oneof![6 => Just(None), 1 => (0u32..20).prop_map(Some)],
    ) -> Ask {
        // Few patterns, so that prompts share prefixes of many lengths.
        let mut prompt: Vec<i32> = (0..len).map(|i| ((u32::from(pattern) >> (i % 2)) & 1) as i32).collect();
        if let Some(token) = flip.and_then(|at| prompt.get_mut(at)) {
            *token = 1 - *token;
        }
        Ask {
            prompt,
            max_tokens,
            priority,
            tenant,
            expected_tokens,
            ttft_target_us,
            itl_target_us,
            stop_ids: match stops { 0 => vec![1], 1 => vec![2, 0], _ => vec![] },
            salt,
            adapter,
            expires_us,
            parked,
            host_masked,
            reads_prefix_cache,
            flavour,
            breaks_at: breaks_at.filter(|_| scope.has_failures),
        }
    }
}

pub(crate) fn verbs(scope: Scope) -> impl Strategy<Value = Verb> {
    let drafts = (
        any::<u8>(),
        prop_oneof![1 => -1i32..=0, 8 => 1i32..=4],
        any::<u8>(),
        any::<bool>(),
        prop::bool::weighted(0.1),
    )
        .prop_map(
            |(chosen, count, right, has_ids, is_spoiled)| Verb::PlanDrafts {
                chosen,
                count,
                right,
                has_ids,
                is_spoiled,
            },
        );
    let fail = (0u8..3, 0u8..3).prop_map(|(num_before, breakage)| Verb::Fail {
        num_before,
        breakage,
    });
    let finish = (any::<u8>(), 0u8..3, 0u8..3).prop_map(|(which, cut, reason)| Verb::Finish {
        which,
        cut,
        reason,
    });
    prop_oneof![
        10 => asks(scope).prop_map(Verb::Submit),
        if scope.has_drafts { 6 } else { 12 } => Just(Verb::Plan),
        if scope.has_drafts { 20 } else { 1 } => drafts,
        12 => Just(Verb::Run),
        12 => prop_oneof![6 => Just(255u8), 1 => any::<u8>()].prop_map(|supplied| Verb::Commit { supplied }),
        if scope.has_drafts { 3 } else { 10 } => Just(Verb::Turn),
        if scope.has_failures { 3 } else { 1 } => if scope.has_failures { fail.boxed() } else { Just(Verb::Plan).boxed() },
        1 => Just(Verb::PokeDiscarded),
        2 => finish,
        1 => any::<u8>().prop_map(|which| Verb::Expire { which }),
        2 => any::<u8>().prop_map(|which| Verb::Unpark { which }),
        1 => Just(Verb::Reset),
        4 => (any::<u8>(), any::<u8>()).prop_map(|(which, num_tokens)| Verb::Pin { which, num_tokens }),
        2 => any::<u8>().prop_map(|which| Verb::Unpin { which }),
        if scope.has_resizes { 4 } else { 1 } => if scope.has_resizes {
            (1u32..=40).prop_map(|num_blocks| Verb::Resize { num_blocks }).boxed()
        } else {
            Just(Verb::Reset).boxed()
        },
    ]
}

/// The request, cut to what can fit in `num_blocks`.
fn fitted(ask: &Ask, config: &Config, num_blocks: u32) -> Ask {
    let room = config.max_model_len.min(num_blocks * config.block_size + 1) as usize;
    let mut ask = ask.clone();
    ask.prompt.truncate((room / 2).max(1));
    ask.max_tokens = ask.max_tokens.min((room - ask.prompt.len()) as i64);
    ask
}

/// A request, ended ones and (for odd high numbers) such as never were included.
fn handle_at(world: &World, which: u8) -> u64 {
    let accounts = &world.ledger.accounts;
    match accounts
        .keys()
        .nth(usize::from(which) % (accounts.len() + 1))
    {
        Some(&handle) => handle,
        None => u64::from(which) << 32 | u64::from(which),
    }
}

/// A pin, or (one number of many) none.
pub(crate) fn pin_at(world: &World, which: u8) -> PinId {
    let pins = &world.pins;
    let at = usize::from(which) % (pins.len() + 1);
    pins.keys().nth(at).copied().unwrap_or(PinId(u64::MAX))
}

fn plan_drafts(
    world: &mut World,
    chosen: u8,
    count: i32,
    right: u8,
    has_ids: bool,
    is_spoiled: bool,
) {
    let handles: Vec<u64> = world
        .ledger
        .accounts
        .keys()
        .enumerate()
        .filter(|(i, _)| (chosen >> (i % 8)) & 1 == 1)
        .map(|(_, &handle)| handle)
        .collect();
    let counts = vec![count; handles.len()];
    let vocab_size = world.config.vocab_size as i32;
    let mut ids = Vec::new();
    for &handle in &handles {
        let num_tokens = world.account(handle).num_tokens();
        for i in 0..count.max(0) {
            let truth = world
                .runner
                .truths
                .get_mut(&handle)
                .expect("handle is known");
            let next = truth.token((num_tokens as i32 + i) as usize);
            let is_right = (right >> ((i as u32 + handle as u32) % 8)) & 1 == 1;
            ids.push(if is_right {
                next
            } else {
                (next + 1) % vocab_size
            });
        }
    }
    if is_spoiled {
        ids.pop();
        if let Some(id) = ids.first_mut() {
            *id = vocab_size;
        }
    }
    let handles: Vec<Handle> = handles.into_iter().map(Handle::from_bits).collect();
    let drafts = Drafts {
        handles: &handles,
        counts: &counts,
        ids: has_ids.then_some(ids.as_slice()),
    };
    world.plan_with(&drafts);
}

pub(crate) fn apply(world: &mut World, verb: &Verb) {
    match *verb {
        Verb::Submit(ref ask) => {
            if let Err(Reject::PromptTooLong { .. } | Reject::NeverFits { .. }) =
                world.try_submit(ask)
            {
                let num_blocks = world.config.num_blocks - world.core.num_pinned_blocks();
                let _ = world.try_submit(&fitted(ask, &world.config, num_blocks));
            }
        }
        Verb::Plan => {
            world.plan();
        }
        Verb::PlanDrafts {
            chosen,
            count,
            right,
            has_ids,
            is_spoiled,
        } => {
            plan_drafts(world, chosen, count, right, has_ids, is_spoiled);
        }
        Verb::Run => {
            world.run();
        }
        Verb::Commit { supplied } => {
            world.commit_with(|_, row| (supplied >> (row % 8)) & 1 == 1);
        }
        Verb::Turn => {
            world.turn();
        }
        Verb::Fail {
            num_before,
            breakage,
        } => {
            let num_queued = world.runner.queue.len();
            if num_queued > 0 {
                let breakage = [Breakage::Untouched, Breakage::Garbage, Breakage::Whole]
                    [usize::from(breakage)];
                world.fail(usize::from(num_before) % num_queued, breakage);
            }
        }
        Verb::PokeDiscarded => world.poke_discarded(),
        Verb::Finish { which, cut, reason } => {
            let handle = handle_at(world, which);
            let num_output = world
                .ledger
                .accounts
                .get(&handle)
                .map_or(0, |account| account.num_output);
            let reason =
                [FinishReason::Stop, FinishReason::Abort, FinishReason::Error][usize::from(reason)];
            world.finish(handle, num_output.saturating_sub(cut.into()), reason);
        }
        Verb::Expire { which } => {
            let handle = handle_at(world, which);
            world.expire(handle);
        }
        Verb::Unpark { which } => {
            let handle = handle_at(world, which);
            world.unpark(handle);
        }
        Verb::Reset => {
            world.reset_prefix_cache();
        }
        Verb::Resize { num_blocks } => {
            let _ = world.resize(num_blocks);
        }
        Verb::Pin { which, num_tokens } => {
            // One of the last, whose blocks are likelier there.
            let handles = world.ledger.accounts.keys().rev();
            if let Some(&handle) = handles.take(4).nth(usize::from(which % 4)) {
                let _ = world.pin(handle, num_tokens.into());
            }
        }
        Verb::Unpin { which } => {
            let pin = pin_at(world, which);
            world.unpin(pin);
        }
    }
}

/// Lets everything come to its end, what was parked last.
pub(crate) fn wind_up(world: &mut World) {
    world.drain();
    let parked: Vec<u64> = world.ledger.live().map(|(handle, _)| handle).collect();
    for handle in parked {
        assert!(world.unpark(handle));
    }
    world.drain();
    assert_eq!(world.ledger.live().count(), 0);
    while let Some(&pin) = world.pins.keys().next() {
        assert!(world.unpin(pin));
    }
    assert_eq!(world.core.num_held_blocks(), 0, "nothing is pinned");
}

/// A world in which all `verbs` were applied and everything has come to its end.
pub(crate) fn play(config: &Config, verbs: &[Verb]) -> World {
    let mut world = World::new(config);
    for verb in verbs {
        apply(&mut world, verb);
    }
    wind_up(&mut world);
    world
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    text.parse().ok()
}

/// `PROPTEST_CASES` makes it longer, `NORIA_TEST_SEED` another.
pub(crate) fn check<S: Strategy>(num_cases: u32, strategy: &S, test: impl Fn(S::Value)) {
    let num_cases = number("PROPTEST_CASES").map_or(num_cases, |cases| cases as u32);
    let seed = number("NORIA_TEST_SEED").unwrap_or(0);
    check_from(seed, num_cases, strategy, test);
}

/// The same cases for the same seed.
pub(crate) fn check_from<S: Strategy>(
    from: u64,
    num_cases: u32,
    strategy: &S,
    test: impl Fn(S::Value),
) {
    let config = ProptestConfig {
        cases: num_cases,
        failure_persistence: None,
        max_shrink_iters: number("PROPTEST_MAX_SHRINK_ITERS").map_or(20_000, |num| num as u32),
        ..ProptestConfig::default()
    };
    let mut seed = [7; 16];
    seed[..8].copy_from_slice(&from.to_le_bytes());
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::XorShift, &seed));
    let result = runner.run(strategy, |value| {
        test(value);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
