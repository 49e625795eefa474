//! A recording replays to the same plans; one that is damaged is refused.

use noria_core::{Config, ReplayError, replay};
use proptest::prelude::*;

use crate::support::{Ask, World};
use crate::traffic::{Scope, apply, check, configs, verbs, wind_up};

fn scopes() -> impl Strategy<Value = Scope> {
    (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
        |(is_static, has_drafts, has_failures, has_resizes)| Scope {
            is_static,
            has_drafts,
            has_failures,
            has_resizes,
        },
    )
}

#[test]
fn a_replay_of_any_traffic_plans_the_same_steps() {
    let strategy = scopes()
        .prop_flat_map(|scope| (configs(scope), prop::collection::vec(verbs(scope), 1..100)));
    let damage = (any::<prop::sample::Index>(), 1u8..);
    check(100, &(strategy, damage), |((config, verbs), (at, flip))| {
        let mut world = World::recorded(&config);
        for verb in &verbs {
            apply(&mut world, verb);
        }
        wind_up(&mut world);
        assert_eq!(replay(world.core.recording()).as_ref(), Ok(&world.digests));
        let mut damaged = world.core.recording().to_vec();
        *at.get_mut(&mut damaged) ^= flip;
        let _ = replay(&damaged); // whatever it is taken for, nothing panics
    });
}

fn recording() -> (Vec<u8>, Vec<u64>) {
    let config = Config {
        num_blocks: 12,
        block_size: 2,
        max_num_seqs: 3,
        max_num_batched_tokens: 12,
        max_model_len: 24,
        vocab_size: 100,
        ..Config::default()
    };
    let mut world = World::recorded(&config);
    for seed in 0..5 {
        world.submit(&Ask {
            stop_ids: vec![3],
            ..Ask::sized(seed, 5, 6)
        });
    }
    world.turn();
    world.abort(1 << 32 | 1);
    world.fail(0, crate::support::Breakage::Whole);
    world.reset_prefix_cache();
    world.drain();
    (world.core.recording().to_vec(), world.digests)
}

#[test]
fn a_recording_that_was_cut_is_malformed_or_a_shorter_one() {
    let (whole, digests) = recording();
    let mut num_shorter = 0;
    for len in 0..whole.len() {
        match replay(&whole[..len]) {
            Ok(shorter) => {
                assert!(digests.starts_with(&shorter), "cut between two verbs");
                num_shorter += 1;
            }
            Err(ReplayError::Malformed { at }) => assert!(at <= len),
            Err(error @ ReplayError::Config(_)) => panic!("{error:?}"),
        }
    }
    assert!(
        num_shorter > 20 && num_shorter < whole.len() / 10,
        "{num_shorter} of {}",
        whole.len()
    );
    assert_eq!(replay(&whole), Ok(digests));
}

#[test]
fn a_recording_with_a_wrong_byte_never_panics() {
    let (whole, _) = recording();
    let mut num_refused = 0;
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= [1, 0x80, 0xff][at % 3];
        num_refused += usize::from(replay(&bytes).is_err());
    }
    assert!(num_refused > 200, "{num_refused} of {}", whole.len());
}

#[test]
fn a_recording_whose_head_was_changed_is_refused_before_anything_is_built_from_it() {
    let (whole, _) = recording();
    // Its magic, and sixteen numbers, a seed and their checksum, of eight bytes each.
    for at in 0..8 * 19 {
        for flip in [1, 0x40, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            assert!(
                matches!(replay(&bytes), Err(ReplayError::Malformed { .. })),
                "byte {at}"
            );
        }
    }
}

#[test]
fn what_is_no_recording_is_refused() {
    for bytes in [&b""[..], b"noria", b"noria\0r1", &[0; 400], &[0xff; 400]] {
        assert!(
            matches!(replay(bytes), Err(ReplayError::Malformed { .. })),
            "{bytes:?}"
        );
    }
    let config = Config::default();
    let world = World::new(&config);
    assert!(
        world.core.recording().is_empty(),
        "it is not recorded unless asked for"
    );
    assert_eq!(
        replay(World::recorded(&config).core.recording()),
        Ok(Vec::new())
    );
}
