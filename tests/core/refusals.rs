//! What is refused, with its numbers, and that nothing of it stays.

use noria_core::{
    Admission, CommitError, Config, EventKind, FinishReason, Handle, Planned, Reject, Request, Scheduler, StepId,
};

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
fn a_request_that_can_never_run_is_refused_with_the_numbers() {
    let mut world = World::new(&config());
    let long = vec![1; 64];
    let cases = [
        (Ask::new(&[], 1), Reject::EmptyPrompt),
        (Ask::new(&[1], 0), Reject::MaxTokens { value: 0 }),
        (Ask::new(&[1], i64::MIN), Reject::MaxTokens { value: i64::MIN }),
        (Ask::new(&[1, 2, 100], 1), Reject::TokenOutOfRange { token: 100, position: 2, vocab_size: 100 }),
        (Ask::new(&[-1], 1), Reject::TokenOutOfRange { token: -1, position: 0, vocab_size: 100 }),
        (Ask::new(&[i32::MIN], 1), Reject::TokenOutOfRange { token: i32::MIN, position: 0, vocab_size: 100 }),
        (Ask::new(&long, 1), Reject::PromptTooLong { num_tokens: 64, limit: 63 }),
        (Ask::new(&long[..40], 2), Reject::NeverFits { num_blocks: 11, limit: 10 }),
        (Ask::new(&[1], i64::MAX), Reject::NeverFits { num_blocks: 16, limit: 10 }),
    ];
    for (ask, expected) in cases {
        assert_eq!(world.try_submit(&ask), Err(expected));
    }
    assert_eq!(world.core.num_waiting(), 0);
    // The last output token needs no slot, so forty and one fit in forty slots.
    let widest = world.submit(&Ask::new(&long[..40], 1));
    world.drain();
    assert_eq!(world.account(widest).end, Some((FinishReason::Length, 1)));
}

#[test]
fn max_tokens_is_cut_to_what_the_context_leaves() {
    let mut world = World::new(&Config { num_blocks: 16, ..config() });
    let handle = world.submit(&Ask::new(&[1; 60], i64::MAX));
    world.drain();
    assert_eq!(world.account(handle).end, Some((FinishReason::Length, 4)));
}

#[test]
fn a_full_queue_refuses_and_parked_requests_count() {
    let mut world = World::new(&config());
    let parked = world.submit(&Ask { parked: true, ..Ask::new(&[1], 1) });
    world.submit(&Ask::new(&[1], 1));
    world.submit(&Ask::new(&[1], 1));
    assert_eq!(world.try_submit(&Ask::new(&[1], 1)), Err(Reject::QueueFull { limit: 3 }));
    world.abort(parked);
    world.submit(&Ask::new(&[1], 1));
    assert_eq!(world.try_submit(&Ask::new(&[1], 1)), Err(Reject::QueueFull { limit: 3 }));
    world.plan();
    world.submit(&Ask::new(&[1], 1));
    world.drain();
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
    let cases = [
        (StepId(0), vec![1, 1, 1], vec![1, 1, 1], CommitError::Unknown { step: StepId(0) }),
        (StepId(3), vec![1, 1, 1], vec![1, 1, 1], CommitError::Unknown { step: StepId(3) }),
        (StepId(u64::MAX), vec![], vec![], CommitError::Unknown { step: StepId(u64::MAX) }),
        (next, vec![1, 1, 1], vec![1, 1, 1], CommitError::OutOfOrder { step: next, oldest: step }),
        (step, vec![1, 1], vec![1, 1], CommitError::NumRows { given: 2, expected: 3 }),
        (step, vec![1, 1, 1, 0], vec![1, 1, 1], CommitError::NumRows { given: 4, expected: 3 }),
        (step, vec![1, 2, 0], vec![1, 1, 1], CommitError::NumIds { row: 1, given: 2, limit: 1 }),
        (step, vec![1, 1, -1], vec![1], CommitError::NumIds { row: 2, given: -1, limit: 1 }),
        (step, vec![1, 1, 1], vec![1, 1], CommitError::Total { given: 2, expected: 3 }),
        (step, vec![1, 0, 0], vec![1, 1], CommitError::Total { given: 2, expected: 1 }),
        (step, vec![1, 1, 1], vec![1, 100, 1], CommitError::TokenOutOfRange { token: 100, vocab_size: 100 }),
        (step, vec![1, 1, 1], vec![1, 1, -1], CommitError::TokenOutOfRange { token: -1, vocab_size: 100 }),
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
    let mut world = World::new(&Config { max_num_batched_tokens: 8, ..config() });
    world.submit(&Ask::sized(1, 12, 4));
    world.plan();
    let error = world.commit_wrongly(StepId(1), &[1], &[1]);
    assert_eq!(error, CommitError::NumIds { row: 0, given: 1, limit: 0 });
    world.drain();
}

#[test]
fn a_sampling_row_without_an_id_finishes_its_request_and_no_other() {
    let mut world = World::new(&config());
    let masked = world.submit(&Ask { host_masked: true, ..Ask::sized(1, 4, 4) });
    let other = world.submit(&Ask::sized(2, 4, 4));
    world.plan();
    world.plan(); // its next row is on its way already
    world.run();
    world.commit_with(|_, _| false);
    assert_eq!(world.account(masked).end, Some((FinishReason::Error, 0)));
    world.drain();
    assert_eq!(world.account(other).end, Some((FinishReason::Length, 4)));
}

#[test]
fn a_stale_handle_is_ignored() {
    let mut world = World::new(&config());
    let first = world.submit(&Ask::new(&[1, 2], 1));
    world.drain();
    let second = world.submit(&Ask::new(&[1, 2], 2));
    assert_ne!(first, second);
    assert_eq!(first as u32, second as u32, "the slot is used again");
    assert!(!world.abort(first));
    assert!(!world.expire(first));
    assert!(!world.unpark(first));
    for bits in [0, 1, u64::MAX, 7 << 32, u64::from(u32::MAX)] {
        assert!(!world.core.finish(Handle::from_bits(bits), 0, FinishReason::Abort, 0));
        assert!(!world.core.unpark(Handle::from_bits(bits), 0));
        assert!(!world.core.expire(Handle::from_bits(bits), 0));
        world.core.check();
    }
    world.drain();
    assert_eq!(world.account(second).end, Some((FinishReason::Length, 2)));
}

#[test]
fn a_parked_request_waits_out_of_line_and_then_takes_the_place_of_its_arrival() {
    let mut world = World::new(&Config { max_num_seqs: 1, depth: 1, ..config() });
    let parked = world.submit(&Ask { parked: true, ..Ask::new(&[1], 2) });
    assert!(world.plan().is_none());
    let first = world.submit(&Ask::new(&[2], 2));
    world.turn();
    let later = world.submit(&Ask::new(&[3], 1));
    assert!(world.unpark(parked));
    assert!(!world.unpark(parked));
    world.turn();
    assert!(!world.account(first).is_live());
    let view = world.plan().expect("there is work");
    assert!(view.row_of(parked).is_some() && view.row_of(later).is_none());
    world.drain();
}

#[test]
fn a_configuration_out_of_range_is_refused_by_name() {
    let good = config();
    let refused = |name: &str, config: Config| {
        let error = Scheduler::new(config).expect_err(name);
        assert_eq!(error.name, name);
    };
    refused("num_blocks", Config { num_blocks: 0, ..good.clone() });
    refused("block_size", Config { block_size: 0, ..good.clone() });
    refused("max_num_seqs", Config { max_num_seqs: 0, ..good.clone() });
    refused("max_num_batched_tokens", Config { max_num_batched_tokens: 3, ..good.clone() });
    refused("max_model_len", Config { max_model_len: 1, ..good.clone() });
    refused("vocab_size", Config { vocab_size: 0, ..good.clone() });
    refused("depth", Config { depth: 0, ..good.clone() });
    refused("depth", Config { depth: 4, ..good.clone() });
    refused("max_drafts", Config { max_drafts: 65, ..good.clone() });
    refused("max_partial_prefills", Config { max_partial_prefills: 0, ..good.clone() });
    refused("max_queued", Config { max_queued: 0, ..good.clone() });
    refused("num_records", Config { num_records: 0, ..good.clone() });
    refused("watermark_blocks", Config { watermark_blocks: 10, ..good.clone() });
    let static_one = Config { admission: Admission::StaticPadded, ..good };
    assert!(Scheduler::new(static_one).is_ok());
}

#[test]
fn a_step_that_is_not_in_flight_cannot_fail() {
    let mut core = Scheduler::new(config()).expect("the configuration is good");
    let mut buffer = vec![0; core.layout().size];
    core.submit(0, &Request::new(&[1, 2], 1)).expect("it is accepted");
    core.fail(StepId(1), 0);
    core.fail(StepId(u64::MAX), 0);
    let planned = core.plan(0, &noria_core::Drafts::none(), &mut buffer);
    assert_eq!(planned, Planned::Step(StepId(1)));
    core.commit(StepId(1), &[1], &[5], 0, 0).expect("the ids match");
    assert_eq!(core.events().last().map(|event| event.kind), Some(EventKind::Finished));
    core.fail(StepId(1), 0);
    core.check();
    assert_eq!(core.plan(0, &noria_core::Drafts::none(), &mut buffer), Planned::Idle);
    assert!(core.events().is_empty());
}
