//! What is refused, with its numbers, and that nothing of it stays.

use noria_core::{
    Config, Drafts, EventKind, FinishReason, Handle, Planned, Reject, Request, Scheduler, StepId,
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
        (
            Ask::new(&[1], i64::MIN),
            Reject::MaxTokens { value: i64::MIN },
        ),
        (
            Ask::new(&[1, 2, 100], 1),
            Reject::TokenOutOfRange {
                token: 100,
                position: 2,
                vocab_size: 100,
            },
        ),
        (
            Ask::new(&[-1], 1),
            Reject::TokenOutOfRange {
                token: -1,
                position: 0,
                vocab_size: 100,
            },
        ),
        (
            Ask::new(&[i32::MIN], 1),
            Reject::TokenOutOfRange {
                token: i32::MIN,
                position: 0,
                vocab_size: 100,
            },
        ),
        (
            Ask::new(&long, 1),
            Reject::PromptTooLong {
                num_tokens: 64,
                limit: 63,
            },
        ),
        (
            Ask::new(&long[..40], 2),
            Reject::NeverFits {
                num_blocks: 11,
                limit: 10,
            },
        ),
        (
            Ask::new(&[1], i64::MAX),
            Reject::NeverFits {
                num_blocks: 16,
                limit: 10,
            },
        ),
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
    let mut world = World::new(&Config {
        num_blocks: 16,
        ..config()
    });
    let handle = world.submit(&Ask::new(&[1; 60], i64::MAX));
    world.drain();
    assert_eq!(world.account(handle).end, Some((FinishReason::Length, 4)));
}

#[test]
fn a_full_queue_refuses_and_parked_requests_count() {
    let mut world = World::new(&config());
    let parked = world.submit(&Ask {
        parked: true,
        ..Ask::new(&[1], 1)
    });
    world.submit(&Ask::new(&[1], 1));
    world.submit(&Ask::new(&[1], 1));
    assert_eq!(
        world.try_submit(&Ask::new(&[1], 1)),
        Err(Reject::QueueFull { limit: 3 })
    );
    world.abort(parked);
    world.submit(&Ask::new(&[1], 1));
    assert_eq!(
        world.try_submit(&Ask::new(&[1], 1)),
        Err(Reject::QueueFull { limit: 3 })
    );
    world.plan();
    world.submit(&Ask::new(&[1], 1));
    world.drain();
}

#[test]
fn a_sampling_row_without_an_id_finishes_its_request_and_no_other() {
    let mut world = World::new(&config());
    let masked = world.submit(&Ask {
        host_masked: true,
        ..Ask::sized(1, 4, 4)
    });
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
        assert!(
            !world
                .core
                .finish(Handle::from_bits(bits), 0, FinishReason::Abort, 0)
        );
        assert!(!world.core.unpark(Handle::from_bits(bits), 0));
        assert!(!world.core.expire(Handle::from_bits(bits), 0));
        world.core.check();
    }
    world.drain();
    assert_eq!(world.account(second).end, Some((FinishReason::Length, 2)));
}

#[test]
fn a_finish_reports_no_more_output_tokens_than_there_are() {
    for (given, reported) in [(0, 0), (1, 1), (2, 2), (3, 2), (u32::MAX, 2)] {
        let mut core = Scheduler::new(config()).expect("the configuration is good");
        let mut buffer = vec![0; core.layout().size];
        let handle = core
            .submit(0, &Request::new(&[1, 2], 9))
            .expect("it is accepted");
        for _ in 0..2 {
            let Planned::Step(step) = core.plan(0, &Drafts::none(), &mut buffer) else {
                panic!("there is a step to plan");
            };
            core.commit(step, &[1], &[7], 0, 0).expect("one id a row");
        }
        // A token in flight is none yet.
        core.plan(0, &Drafts::none(), &mut buffer);
        assert!(core.finish(handle, given, FinishReason::Abort, 0));
        let end = core.events().last().expect("its end is reported");
        assert_eq!((end.handle, end.kind), (handle, EventKind::Finished));
        assert_eq!(end.second, reported);
        core.check();
    }
}

#[test]
fn a_parked_request_waits_out_of_line_and_then_takes_the_place_of_its_arrival() {
    let mut world = World::new(&Config {
        max_num_seqs: 1,
        depth: 1,
        ..config()
    });
    let parked = world.submit(&Ask {
        parked: true,
        ..Ask::new(&[1], 2)
    });
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

type Spoil = fn(&mut Config);

#[test]
fn a_configuration_out_of_range_is_refused_by_name() {
    let cases: [(&str, Spoil); 15] = [
        ("num_blocks", |config| config.num_blocks = 0),
        ("block_size", |config| config.block_size = 0),
        ("max_num_seqs", |config| config.max_num_seqs = 0),
        ("max_num_batched_tokens", |config| {
            config.max_num_batched_tokens = 3;
        }),
        ("max_model_len", |config| config.max_model_len = 1),
        ("vocab_size", |config| config.vocab_size = 0),
        ("depth", |config| config.depth = 0),
        ("depth", |config| config.depth = 4),
        ("max_drafts", |config| config.max_drafts = 65),
        ("max_partial_prefills", |config| {
            config.max_partial_prefills = 0;
        }),
        ("max_queued", |config| config.max_queued = 0),
        ("num_records", |config| config.num_records = u32::MAX),
        ("watermark_blocks", |config| config.watermark_blocks = 10),
        // Each is in its range, and what they ask for together is not.
        ("num_blocks", |config| {
            (config.num_blocks, config.block_size) = (1 << 19, 4096);
        }),
        ("max_num_seqs", |config| {
            (config.max_num_seqs, config.max_num_batched_tokens) = (1 << 20, 1 << 20);
            config.max_model_len = 1 << 30;
        }),
    ];
    for (name, spoil) in cases {
        let mut config = config();
        assert!(Scheduler::new(config.clone()).is_ok());
        spoil(&mut config);
        let error = Scheduler::new(config).expect_err(name);
        assert_eq!(error.name, name);
    }
}

#[test]
fn a_step_that_is_not_in_flight_cannot_fail() {
    let mut core = Scheduler::new(config()).expect("the configuration is good");
    let mut buffer = vec![0; core.layout().size];
    core.submit(0, &Request::new(&[1, 2], 1))
        .expect("it is accepted");
    core.fail(StepId(1), 0);
    core.fail(StepId(u64::MAX), 0);
    let planned = core.plan(0, &noria_core::Drafts::none(), &mut buffer);
    assert_eq!(planned, Planned::Step(StepId(1)));
    core.commit(StepId(1), &[1], &[5], 0, 0)
        .expect("the ids match");
    assert_eq!(
        core.events().last().map(|event| event.kind),
        Some(EventKind::Finished)
    );
    core.fail(StepId(1), 0);
    core.check();
    assert_eq!(
        core.plan(0, &noria_core::Drafts::none(), &mut buffer),
        Planned::Idle
    );
    assert!(core.events().is_empty());
}
