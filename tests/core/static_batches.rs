//! The static baselines are honest: what a gang reserves, when it enters, what padding and ghosts cost.

use noria_core::{Admission, Config, FinishReason, KeyPolicy, flags};

use crate::support::{Ask, StepView, World};

fn config(admission: Admission) -> Config {
    Config {
        num_blocks: 200,
        block_size: 4,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_model_len: 128,
        vocab_size: 100,
        depth: 1,
        admission,
        ..Config::default()
    }
}

const PADDED: Admission = Admission::StaticPadded;
const GANG: Admission = Admission::StaticGang;

/// Runs to the end at this depth of planning, with every step that was planned.
fn steps(world: &mut World) -> Vec<StepView> {
    let mut views = Vec::new();
    loop {
        while let Some(view) = world.plan() {
            views.push(view);
        }
        if !world.run() {
            return views;
        }
        world.commit();
    }
}

fn count(views: &[StepView], flag: i32) -> usize {
    views
        .iter()
        .flat_map(|view| &view.rows)
        .filter(|row| row.has(flag))
        .count()
}

#[test]
fn a_gang_enters_only_an_empty_batch() {
    for admission in [GANG, PADDED] {
        for depth in 1..=3 {
            let mut world = World::new(&Config {
                depth,
                ..config(admission)
            });
            let handles: Vec<u64> = (0..10)
                .map(|seed| world.submit(&Ask::sized(seed, 3, 2 + i64::from(seed) % 5)))
                .collect();
            for (i, view) in steps(&mut world).iter().enumerate() {
                let gained: Vec<u64> = view.gained.iter().map(|gain| gain.handle).collect();
                if gained.is_empty() {
                    continue;
                }
                let gang = handles
                    .chunks(4)
                    .find(|gang| gang[0] == gained[0])
                    .expect("in order of arrival");
                assert_eq!(gained, gang, "step {i}: a whole gang enters, and at once");
                assert!(
                    view.rows.iter().all(|row| gained.contains(&row.handle)),
                    "the batch was empty"
                );
            }
            assert!(
                world
                    .ledger
                    .accounts
                    .values()
                    .all(|account| account.num_preemptions == 0)
            );
        }
    }
}

#[test]
fn a_gang_reserves_for_each_the_longest_prompt_and_the_longest_limit_of_any() {
    for admission in [GANG, PADDED] {
        // Prompts of 10 and 2, limits of 3 and 15: each reserves 10 + 15 - 1 slots, six blocks.
        let asks = [
            Ask::sized(1, 10, 3),
            Ask::sized(2, 2, 15),
            Ask::sized(3, 4, 4),
            Ask::sized(4, 4, 4),
        ];
        for (num_blocks, num_in_gang) in [(24, 4), (23, 3), (18, 3), (17, 2), (12, 2), (11, 1)] {
            let mut world = World::new(&Config {
                num_blocks,
                ..config(admission)
            });
            for ask in &asks {
                world.submit(ask);
            }
            let view = world.plan().expect("there is work");
            assert_eq!(view.gained.len(), num_in_gang, "{num_blocks}");
            let reserved = if num_in_gang == 1 { 3 } else { 6 };
            assert!(
                view.gained.iter().all(|gain| gain.blocks.len() == reserved),
                "{num_blocks}"
            );
            world.drain();
            assert!(
                world
                    .ledger
                    .accounts
                    .values()
                    .all(|account| account.num_preemptions == 0)
            );
        }
    }
}

#[test]
fn padding_brings_every_prompt_to_the_longest_of_its_gang() {
    let mut world = World::new(&config(PADDED));
    let lens = [9, 4, 1, 6];
    for (seed, len) in lens.into_iter().enumerate() {
        world.submit(&Ask::sized(seed as i32, len, 3));
    }
    let views = steps(&mut world);
    let padding: u32 = views
        .iter()
        .flat_map(|view| &view.rows)
        .filter(|row| row.has(flags::PADDING))
        .map(|row| row.count)
        .sum();
    assert_eq!(
        padding as usize,
        lens.iter().map(|len| 9 - len).sum::<usize>()
    );
    assert_eq!(
        world
            .core
            .records()
            .map(|record| record.num_padding_tokens)
            .sum::<i64>(),
        padding.into()
    );
    assert_eq!(views[0].num_tokens, 4 * 9);
}

#[test]
fn padding_is_paid_over_as_many_steps_as_it_takes() {
    for depth in 1..=3 {
        let mut world = World::new(&Config {
            max_num_batched_tokens: 5,
            depth,
            ..config(PADDED)
        });
        for (seed, len) in [9, 4, 1, 6].into_iter().enumerate() {
            world.submit(&Ask::sized(seed as i32, len, 3));
        }
        let views = steps(&mut world);
        let of_prompts = views.iter().take_while(|view| {
            view.rows
                .iter()
                .all(|row| row.has(flags::LISTED | flags::PADDING))
        });
        let num_tokens: u32 = of_prompts.map(|view| view.num_tokens).sum();
        assert_eq!(
            num_tokens,
            4 * 9,
            "no decode before the whole gang is through its prompts"
        );
    }
}

#[test]
fn finished_rows_stay_as_ghosts_until_the_gang_ends() {
    for depth in 1..=3 {
        let mut world = World::new(&Config {
            depth,
            ..config(PADDED)
        });
        let limits = [2, 7, 3, 5];
        for (seed, limit) in limits.into_iter().enumerate() {
            world.submit(&Ask::sized(seed as i32, 4, limit));
        }
        let views = steps(&mut world);
        // One prefill, then as many decodes as the longest still needs. A row whose last token is in flight is no ghost
        // yet, and has nothing to compute.
        let rows: Vec<usize> = views.iter().map(|view| view.rows.len()).collect();
        assert!(depth > 1 || rows == [4; 7], "{rows:?}");
        let num_ghosts = count(&views[..7], flags::GHOST);
        let latest = limits
            .iter()
            .map(|limit| 7 - *limit as usize)
            .sum::<usize>();
        let delayed = limits.iter().filter(|limit| **limit < 7).count() * (depth as usize - 1);
        assert!(
            num_ghosts <= latest && num_ghosts + delayed >= latest,
            "depth {depth}: {num_ghosts} ghosts"
        );
        let recorded: i64 = world
            .core
            .records()
            .map(|record| record.num_ghost_rows)
            .sum();
        assert_eq!(recorded as usize, count(&views, flags::GHOST));
    }
}

#[test]
fn a_gang_without_padding_computes_no_padding_and_no_ghosts() {
    let mut world = World::new(&config(GANG));
    let limits = [2, 7, 3, 5];
    for (seed, limit) in limits.into_iter().enumerate() {
        world.submit(&Ask::sized(seed as i32, 4 + seed, limit));
    }
    let views = steps(&mut world);
    assert_eq!(
        count(&views, flags::GHOST) + count(&views, flags::PADDING),
        0
    );
    let rows: Vec<usize> = views.iter().map(|view| view.rows.len()).collect();
    assert_eq!(
        rows,
        [4, 4, 3, 2, 2, 1, 1],
        "seats empty, and nobody takes them"
    );
}

#[test]
fn a_gang_whose_last_live_member_is_aborted_ends_with_its_ghosts() {
    let mut world = World::new(&Config {
        depth: 3,
        ..config(PADDED)
    });
    let short = world.submit(&Ask::sized(1, 4, 1));
    let long = world.submit(&Ask::sized(2, 4, 40));
    for _ in 0..3 {
        world.turn();
    }
    assert!(!world.account(short).is_live());
    assert_eq!(world.core.num_running(), 1);
    assert!(
        world.core.num_held_blocks() > 11,
        "the ghost holds its reservation"
    );
    world.abort(long);
    assert_eq!(world.core.num_held_blocks(), 0);
    let next = world.submit(&Ask::sized(3, 4, 2));
    world.drain();
    assert_eq!(world.account(next).end, Some((FinishReason::Length, 2)));
}

#[test]
fn part_of_a_failed_gang_that_enters_first_does_not_lock_out_the_rest() {
    for admission in [GANG, PADDED] {
        // Three fail together; the memory of the next gang has room for two of them.
        let mut world = World::new(&Config {
            num_blocks: 12,
            depth: 2,
            ..config(admission)
        });
        let asks = [
            Ask::sized(1, 4, 4),
            Ask::sized(2, 4, 4),
            Ask::sized(3, 4, 4),
            Ask::sized(4, 4, 30),
        ];
        let handles: Vec<u64> = asks.iter().map(|ask| world.submit(ask)).collect();
        world.plan();
        world.fail(0, crate::support::Breakage::Whole);
        world.drain();
        for (handle, ask) in handles.iter().zip(&asks) {
            assert_eq!(
                world.account(*handle).end,
                Some((FinishReason::Length, ask.max_tokens as u32))
            );
        }
    }
}

#[test]
fn a_gang_of_several_tenants_is_padded_to_its_own_longest_prompt() {
    let mut world = World::new(&Config {
        num_blocks: 18,
        block_size: 2,
        max_num_batched_tokens: 3,
        max_num_seqs: 2,
        max_model_len: 19,
        key: KeyPolicy::Fair,
        ..config(Admission::StaticPadded)
    });
    // Who enters first is charged, so that the line behind it changes.
    world.submit(&Ask::sized(1, 1, 8).tenant(1));
    world.submit(&Ask::sized(2, 12, 1).tenant(1));
    world.submit(&Ask::sized(3, 3, 2).tenant(0));
    for seed in 4..10 {
        world.submit(&Ask::sized(seed, 1, 1).tenant(0));
    }
    world.submit(&Ask::sized(10, 5, 2).tenant(2));
    world.drain();
    assert!(world.num_steps < 80, "{}", world.num_steps);
}
