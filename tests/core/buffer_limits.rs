//! A step buffer's sections have fixed capacities: what does not fit waits a step, and is then there.

use noria_core::{Config, FinishReason, KeyPolicy};

use crate::support::{Ask, World};

fn config() -> Config {
    Config {
        num_blocks: 6000,
        block_size: 1,
        max_num_seqs: 4,
        max_num_batched_tokens: 5000,
        max_model_len: 1010,
        vocab_size: 100,
        depth: 2,
        key: KeyPolicy::Priority,
        ..Config::default()
    }
}

#[test]
fn a_newcomer_whose_table_does_not_fit_beside_others_waits_a_step() {
    let mut world = World::new(&config());
    let capacity = world.core.layout().capacity_gained_blocks;
    assert_eq!(capacity, 1010 + 64 * 4);
    let handles: Vec<u64> = (0..4)
        .map(|seed| world.submit(&Ask::sized(seed, 600, 3)))
        .collect();
    let gained: Vec<usize> = (0..2)
        .map(|_| world.plan().expect("there is work").gained.len())
        .collect();
    assert_eq!(gained, [2, 2]);
    world.drain();
    for handle in handles {
        assert_eq!(world.account(handle).end, Some((FinishReason::Length, 3)));
    }
}

#[test]
fn residents_that_find_more_blocks_than_a_step_can_tell_find_the_rest_later() {
    let config = Config {
        max_num_batched_tokens: 100,
        max_partial_prefills: 2,
        depth: 1,
        ..config()
    };
    let mut world = World::new(&config);
    let long = Ask::sized(1, 1000, 3);
    // One a step, for two such tables do not fit in one.
    let mut enter = |ask: &Ask| {
        let handle = world.submit(ask);
        world.turn();
        handle
    };
    let paused = [5, 6].map(|flavour| {
        let ask = Ask {
            flavour,
            ..long.clone()
        };
        enter(&ask.priority(5))
    });
    // Two better ones take both places of unfinished prefills, and one of them computes all that the paused want.
    enter(&long);
    enter(&Ask::sized(2, 1009, 1));
    let mut most_changes = 0;
    while let Some(view) = world.plan() {
        most_changes = most_changes.max(view.changes.len());
        world.run();
        world.commit();
    }
    assert!(
        most_changes > 1010,
        "one whole table of hits, and what rows of a step add"
    );
    for handle in paused {
        assert_eq!(world.account(handle).end, Some((FinishReason::Length, 3)));
    }
    world.drain();
}
