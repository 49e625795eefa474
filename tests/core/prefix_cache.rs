//! What is computed once, and who may find it.

use noria_core::{ChainHasher, Config, EventKind, flags};

use crate::support::{Ask, Breakage, World};

fn config() -> Config {
    Config {
        num_blocks: 60,
        block_size: 4,
        max_num_seqs: 8,
        max_num_batched_tokens: 256,
        max_model_len: 128,
        vocab_size: 100,
        depth: 1,
        ..Config::default()
    }
}

fn prompt(num_tokens: i32) -> Vec<i32> {
    (0..num_tokens).map(|i| i % 90).collect()
}

/// Prompt tokens found, of each admission that the last plan made.
fn found(world: &World) -> Vec<i64> {
    let events = world.core.events().iter();
    events
        .filter(|event| event.kind == EventKind::Admitted)
        .map(|event| event.first)
        .collect()
}

/// Runs one request to its end, and says how many of its prompt tokens were found.
fn found_by(world: &mut World, ask: &Ask) -> i64 {
    world.submit(ask);
    world.plan();
    let found = found(world)[0];
    world.drain();
    found
}

#[test]
fn every_token_of_a_prefix_and_what_it_goes_on_from_are_part_of_its_hash() {
    let hasher = ChainHasher::new(3);
    for num_tokens in [1, 2, 5, 6, 15, 16, 17, 32, 40] {
        let tokens = prompt(num_tokens);
        let hash = hasher.chain(7, &tokens);
        assert_eq!(hasher.chain(7, &tokens), hash);
        assert_ne!(hasher.chain(7 + (1 << 100), &tokens), hash);
        assert_ne!(ChainHasher::new(4).chain(7, &tokens), hash);
        for position in 0..tokens.len() {
            let mut other = tokens.clone();
            other[position] = 99;
            assert_ne!(hasher.chain(7, &other), hash, "{position} of {num_tokens}");
        }
        for next in [0, 1] {
            let longer = [&tokens[..], &[next]].concat();
            assert_ne!(hasher.chain(7, &longer), hash, "{num_tokens} and {next}");
        }
    }
}

#[test]
fn many_requests_with_one_long_prompt_compute_it_once_together() {
    for (max_partial_prefills, depth) in [(1, 1), (1, 2), (2, 1), (4, 3)] {
        let config = Config {
            num_blocks: 1024,
            block_size: 16,
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            max_model_len: 4200,
            vocab_size: 100,
            depth,
            max_partial_prefills,
            ..Config::default()
        };
        let mut world = World::new(&config);
        for flavour in 0..64 {
            world.submit(&Ask {
                flavour,
                ..Ask::new(&prompt(4003), 3)
            });
        }
        let mut num_listed = 0;
        while world.ledger.live().count() > 0 {
            while let Some(view) = world.plan() {
                let listed = view.rows.iter().filter(|row| row.has(flags::LISTED));
                num_listed += listed.map(|row| row.count).sum::<u32>();
            }
            world.run();
            world.commit();
        }
        // All but the last, unfinished block is found: 4003 = 250 · 16 + 3.
        assert_eq!(num_listed, 4003 + 63 * 3, "{max_partial_prefills}, {depth}");
    }
}

#[test]
fn a_prompt_in_the_same_step_finds_blocks_that_the_step_itself_fills() {
    let mut world = World::new(&config());
    world.submit(&Ask::new(&prompt(10), 1));
    world.submit(&Ask::new(&prompt(13), 1));
    let view = world.plan().expect("there is work");
    assert_eq!(found(&world), [0, 8]);
    let rows: Vec<(u32, u32)> = view.rows.iter().map(|row| (row.start, row.count)).collect();
    assert_eq!(rows, [(0, 10), (8, 5)]);
    assert_eq!(
        view.gained[0].blocks[..2],
        view.gained[1].blocks[..2],
        "they hold the same blocks"
    );
    world.drain();
}

#[test]
fn a_hit_stops_before_the_last_token_whose_logits_are_wanted() {
    for num_tokens in 1..=17 {
        let mut world = World::new(&config());
        world.submit(&Ask::new(&prompt(num_tokens), 1));
        world.drain();
        let found = found_by(&mut world, &Ask::new(&prompt(num_tokens), 1));
        assert_eq!(found, i64::from((num_tokens - 1) / 4 * 4), "{num_tokens}");
    }
}

#[test]
fn nothing_is_found_across_salts() {
    let mut world = World::new(&config());
    let ask = |salt: u128| Ask {
        salt,
        ..Ask::new(&prompt(12), 1)
    };
    assert_eq!(found_by(&mut world, &ask(0)), 0);
    assert_eq!(found_by(&mut world, &ask(1)), 0);
    assert_eq!(
        found_by(&mut world, &ask(1 << 64)),
        0,
        "all of a salt counts"
    );
    for salt in [0, 1, 1 << 64] {
        assert_eq!(found_by(&mut world, &ask(salt)), 8);
    }
}

#[test]
fn one_that_does_not_read_the_cache_fills_it_all_the_same() {
    let mut world = World::new(&config());
    let unread = Ask {
        reads_prefix_cache: false,
        ..Ask::new(&prompt(12), 1)
    };
    assert_eq!(found_by(&mut world, &unread), 0);
    assert_eq!(found_by(&mut world, &unread), 0);
    assert_eq!(found_by(&mut world, &Ask::new(&prompt(12), 1)), 8);
}

#[test]
fn nothing_is_found_where_prefix_caching_is_off() {
    let mut world = World::new(&Config {
        enable_prefix_caching: false,
        ..config()
    });
    for _ in 0..2 {
        assert_eq!(found_by(&mut world, &Ask::new(&prompt(12), 1)), 0);
    }
    assert_eq!(world.core.kv().pool().num_free(), 60);
}

#[test]
fn only_the_same_prefix_is_found_not_the_same_block_behind_another() {
    let mut world = World::new(&config());
    world.submit(&Ask::new(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 1));
    world.drain();
    assert_eq!(found_by(&mut world, &Ask::new(&[5, 6, 7, 8, 9], 1)), 0);
    assert_eq!(
        found_by(&mut world, &Ask::new(&[1, 2, 3, 9, 5, 6, 7, 8, 9], 1)),
        0
    );
    assert_eq!(
        found_by(&mut world, &Ask::new(&[1, 2, 3, 4, 9, 6, 7, 8, 9], 1)),
        4
    );
}

#[test]
fn blocks_of_sampled_tokens_are_found_once_they_are_committed() {
    let mut world = World::new(&config());
    let first = world.submit(&Ask::new(&prompt(7), 8));
    for _ in 0..4 {
        world.turn();
    }
    let output: Vec<i32> = {
        let truth = world
            .runner
            .truths
            .get_mut(&first)
            .expect("it was submitted");
        (0..12).map(|position| truth.token(position)).collect()
    };
    // Eight tokens are stored when the second output token is sampled; of 11 the third block is not full.
    world.submit(&Ask::new(&output[..9], 1));
    world.plan();
    assert_eq!(found(&world), [8]);
    world.drain();
}

#[test]
fn the_least_recently_used_chain_is_evicted_first_and_from_its_tail() {
    let mut world = World::new(&Config {
        num_blocks: 8,
        ..config()
    });
    let (old, new): (Vec<i32>, Vec<i32>) = ((0..12).collect(), (20..32).collect());
    world.submit(&Ask::new(&old, 1));
    world.drain();
    world.submit(&Ask::new(&new, 1));
    world.drain();
    assert_eq!(world.core.kv().pool().num_cached(), 6);
    // Two blocks are free; four are wanted, so two of the old chain go.
    world.submit(&Ask::new(&(40..55).collect::<Vec<i32>>(), 1));
    world.drain();
    assert_eq!(found_by(&mut world, &Ask::new(&new, 1)), 8);
    assert_eq!(
        found_by(&mut world, &Ask::new(&old, 1)),
        4,
        "its head is left"
    );
}

#[test]
fn a_reset_frees_what_nobody_holds_and_hides_the_rest() {
    let mut world = World::new(&config());
    world.submit(&Ask::new(&prompt(12), 1));
    world.drain();
    let running = world.submit(&Ask::new(&prompt(9), 9));
    world.turn();
    assert_eq!(
        world.reset_prefix_cache(),
        1,
        "two of three blocks are held"
    );
    world.submit(&Ask::new(&prompt(12), 1));
    world.plan();
    assert_eq!(found(&world), [0]);
    world.drain();
    assert_eq!(world.account(running).num_output, 9);
}

#[test]
fn a_block_filled_twice_keeps_its_first_entry() {
    let mut world = World::new(&config());
    let unread = Ask {
        reads_prefix_cache: false,
        ..Ask::new(&prompt(9), 1)
    };
    world.submit(&unread);
    world.submit(&unread);
    world.plan();
    assert_eq!(world.core.kv().cache().num_registered(), 2);
    world.drain();
    assert_eq!(
        world.core.kv().pool().num_cached(),
        2,
        "the second copy is free"
    );
}

#[test]
fn what_a_failed_step_filled_is_not_found() {
    let mut world = World::new(&config());
    world.submit(&Ask::new(&prompt(12), 3));
    world.plan();
    world.fail(0, Breakage::Garbage);
    assert_eq!(world.core.kv().cache().num_registered(), 0);
    assert_eq!(world.core.kv().pool().num_free(), 60);
    world.drain();
}

#[test]
fn what_steps_before_the_failed_one_filled_is_found_again() {
    let mut world = World::new(&Config {
        depth: 3,
        max_num_batched_tokens: 8,
        ..config()
    });
    let handle = world.submit(&Ask::new(&prompt(24), 3));
    for _ in 0..3 {
        world.plan();
    }
    world.fail(1, Breakage::Garbage);
    world.commit();
    let view = world.plan().expect("it runs again");
    assert_eq!(view.row_of(handle).map(|row| row.start), Some(8));
    world.drain();
    assert_eq!(world.account(handle).num_output, 3);
}

#[test]
fn a_preempted_request_finds_its_own_blocks_again() {
    let config = Config {
        max_num_seqs: 1,
        key: noria_core::KeyPolicy::Priority,
        ..config()
    };
    let mut world = World::new(&config);
    let low = world.submit(&Ask::new(&prompt(13), 6).priority(1));
    world.turn();
    world.turn();
    world.submit(&Ask::new(&[50, 51], 1));
    world.turn();
    let view = world.plan().expect("it resumes");
    let row = view.row_of(low).expect("it resumes");
    assert_eq!((row.start, row.count), (12, 3));
    world.drain();
}
