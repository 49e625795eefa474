//! A commit that does not fit its step is refused, and nothing has changed.

use noria_core::{CommitError, Config, EventKind, StepId};

use crate::support::{Ask, World};

fn config() -> Config {
    Config {
        num_blocks: 10,
        block_size: 4,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_model_len: 64,
        vocab_size: 100,
        depth: 2,
        max_queued: 3,
        ..Config::default()
    }
}

#[test]
fn a_commit_that_does_not_match_its_step_is_refused_and_changes_nothing() {
    let mut world = World::new(&config());
    world.submit(&Ask::sized(1, 4, 4));
    world.submit(&Ask::sized(2, 4, 4));
    let late = world.submit(&Ask::sized(3, 4, 4));
    world.plan();
    world.plan();
    // The event of this end waits for a verb that reports; a refused commit is none.
    world.abort(late);
    let (step, next) = (StepId(1), StepId(2));
    let out_of_range = |token| CommitError::TokenOutOfRange {
        token,
        vocab_size: 100,
    };
    let num_rows = |given| CommitError::NumRows { given, expected: 3 };
    let total = |given, expected| CommitError::Total { given, expected };
    let num_ids = |row, given| CommitError::NumIds {
        row,
        given,
        limit: 1,
    };
    let late_step = CommitError::OutOfOrder {
        step: next,
        oldest: step,
    };
    let unknown = |step| CommitError::Unknown { step };
    let (ones, never) = (vec![1; 3], StepId(u64::MAX));
    let cases = [
        (StepId(0), ones.clone(), ones.clone(), unknown(StepId(0))),
        (StepId(3), ones.clone(), ones.clone(), unknown(StepId(3))),
        (never, vec![], vec![], unknown(never)),
        (next, ones.clone(), ones.clone(), late_step),
        (step, vec![1, 1], vec![1, 1], num_rows(2)),
        (step, vec![1, 1, 1, 0], ones.clone(), num_rows(4)),
        (step, vec![1, 2, 0], ones.clone(), num_ids(1, 2)),
        (step, vec![1, 1, -1], vec![1], num_ids(2, -1)),
        (step, ones.clone(), vec![1, 1], total(2, 3)),
        (step, vec![1, 0, 0], vec![1, 1], total(2, 1)),
        (step, ones.clone(), vec![1, 100, 1], out_of_range(100)),
        (step, ones, vec![1, 1, -1], out_of_range(-1)),
    ];
    for (step, num_ids, ids, expected) in cases {
        let before = format!("{:?}", world.core);
        assert_eq!(world.commit_wrongly(step, &num_ids, &ids), expected);
        assert_eq!(format!("{:?}", world.core), before, "{expected:?}");
    }
    assert!(world.run());
    assert!(world.commit());
    let ended: Vec<u64> = world
        .core
        .events()
        .iter()
        .filter(|event| event.kind == EventKind::Finished)
        .map(|event| event.handle.to_bits())
        .collect();
    assert_eq!(ended, [late]);
    world.drain();
}

#[test]
fn a_prompt_that_is_not_through_gives_no_id() {
    let mut world = World::new(&Config {
        max_num_batched_tokens: 8,
        ..config()
    });
    world.submit(&Ask::sized(1, 12, 4));
    world.plan();
    let error = world.commit_wrongly(StepId(1), &[1], &[1]);
    assert_eq!(
        error,
        CommitError::NumIds {
            row: 0,
            given: 1,
            limit: 0
        }
    );
    world.drain();
}
