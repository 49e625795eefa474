//! Small scenarios with a failure, an abort or a late finish at every point that there is, at every depth.

use noria_core::{Admission, Config, Drafts, FinishReason, Handle, KeyPolicy, Planned};

use crate::support::{Ask, Breakage, World};

#[derive(Clone)]
struct Scenario {
    config: Config,
    asks: Vec<Ask>,
    num_drafts: i32,
}

fn asks() -> Vec<Ask> {
    let stopping = Ask {
        stop_ids: vec![2],
        ..Ask::new(&[0, 1, 0, 1, 1], 6)
    };
    vec![
        Ask::new(&[0, 1, 0, 1, 0, 1, 0], 4).priority(1),
        stopping,
        Ask {
            flavour: 3,
            ..Ask::new(&[0, 1, 0], 5).priority(1)
        },
        Ask::new(&[0, 1, 0, 1, 0, 1, 0, 1], 2),
    ]
}

fn scenarios() -> Vec<(&'static str, Scenario)> {
    let config = |depth: u32| Config {
        num_blocks: 40,
        block_size: 2,
        max_num_seqs: 4,
        max_num_batched_tokens: 10,
        max_model_len: 20,
        vocab_size: 3,
        depth,
        max_drafts: 2,
        num_records: 8,
        ..Config::default()
    };
    let mut all = Vec::new();
    for depth in 1..=3 {
        let ample = config(depth);
        let tight = Config {
            num_blocks: 7,
            key: KeyPolicy::Priority,
            ..ample.clone()
        };
        let few_seats = Config {
            max_num_seqs: 2,
            key: KeyPolicy::Priority,
            ..ample.clone()
        };
        let padded = Config {
            admission: Admission::StaticPadded,
            max_num_seqs: 3,
            ..ample.clone()
        };
        let gang = Config {
            admission: Admission::StaticGang,
            max_num_seqs: 3,
            ..ample.clone()
        };
        for (name, config) in [
            ("ample", ample),
            ("tight", tight),
            ("few seats", few_seats),
            ("padded", padded),
            ("gang", gang),
        ] {
            all.push((
                name,
                Scenario {
                    config: config.clone(),
                    asks: asks(),
                    num_drafts: 0,
                },
            ));
            all.push((
                name,
                Scenario {
                    config,
                    asks: asks(),
                    num_drafts: 2,
                },
            ));
        }
    }
    all
}

impl Scenario {
    fn plan(&self, world: &mut World) -> bool {
        let handles: Vec<Handle> = world
            .ledger
            .live()
            .map(|(handle, _)| Handle::from_bits(handle))
            .collect();
        let counts = vec![self.num_drafts; handles.len()];
        let drafts = Drafts {
            handles: &handles,
            counts: &counts,
            ids: None,
        };
        matches!(world.plan_with(&drafts), Planned::Step(_))
    }

    /// Plans as far ahead as it may, then runs and commits one step, again and again; `inject` is asked at every point
    /// between two verbs. What is left when it is done ends without it.
    fn drive(&self, inject: &mut dyn FnMut(&mut World, usize)) -> (World, usize) {
        let mut world = World::new(&self.config);
        for ask in &self.asks {
            world.submit(ask);
        }
        let mut point = 0;
        let mut visit = |world: &mut World| {
            inject(world, point);
            point += 1;
            assert!(point < 2000, "the work ends");
        };
        loop {
            visit(&mut world);
            while self.plan(&mut world) {
                visit(&mut world);
            }
            if !world.run() && world.sampled.is_empty() {
                break;
            }
            visit(&mut world);
            world.commit();
        }
        world.drain();
        (world, point)
    }

    /// What there is at each point where nothing is injected.
    fn watch<T>(&self, look: impl Fn(&World) -> T) -> (World, Vec<T>) {
        let mut seen = Vec::new();
        let (world, _) = self.drive(&mut |world, _| seen.push(look(world)));
        (world, seen)
    }
}

/// A request, in the order in which they were submitted.
fn nth(world: &World, which: usize) -> u64 {
    let handles = &world.ledger.accounts;
    *handles.keys().nth(which).expect("all are submitted")
}

fn ends(world: &World) -> Vec<Option<(FinishReason, u32)>> {
    world
        .ledger
        .accounts
        .values()
        .map(|account| account.end)
        .collect()
}

#[test]
fn a_failure_at_any_point_changes_no_tokens() {
    let mut num_late = 0;
    for (name, scenario) in scenarios() {
        let (calm, num_queued) = scenario.watch(|world| world.runner.queue.len());
        let mut num_failures = 0;
        for (at, &num_queued) in num_queued.iter().enumerate() {
            for num_before in 0..num_queued {
                for breakage in [Breakage::Untouched, Breakage::Garbage, Breakage::Whole] {
                    let (world, _) = scenario.drive(&mut |world, point| {
                        if point == at {
                            num_late += usize::from(num_before > 0);
                            world.fail(num_before, breakage);
                            world.poke_discarded();
                        }
                    });
                    num_failures += world.num_failures;
                    assert_eq!(
                        ends(&world),
                        ends(&calm),
                        "{name}: {at}, {num_before}, {breakage:?}"
                    );
                }
            }
        }
        assert!(num_failures >= 10, "{name}: {num_failures}");
    }
    assert!(
        num_late > 200,
        "{num_late} failures had steps in flight before them"
    );
}

#[test]
fn a_second_failure_at_any_point_behind_the_first_changes_no_tokens_but_of_one_that_failed_alone() {
    let mut num_second = 0;
    for (name, scenario) in scenarios()
        .into_iter()
        .filter(|(name, _)| ["tight", "padded"].contains(name))
    {
        let (calm, num_queued) = scenario.watch(|world| world.runner.queue.len());
        let points = num_queued.iter().enumerate();
        for (first, _) in points.filter(|&(_, &num_queued)| num_queued > 0) {
            for second in first + 1..first + 12 {
                let (world, _) = scenario.drive(&mut |world, point| {
                    if (point == first || point == second) && !world.runner.queue.is_empty() {
                        world.fail(world.runner.queue.len() - 1, Breakage::Garbage);
                    }
                });
                num_second += usize::from(world.num_failures > 1);
                for (end, calm) in ends(&world).iter().zip(ends(&calm)) {
                    let is_error = matches!(end, Some((FinishReason::Error, _)));
                    assert!(is_error || *end == calm, "{name}: {first}, {second}");
                }
            }
        }
    }
    assert!(num_second > 500, "{num_second}");
}

#[test]
fn an_abort_at_any_point_changes_no_other_tokens() {
    let mut num_aborted = 0;
    for (name, scenario) in scenarios() {
        let (calm, ended) = scenario.watch(ends);
        for (at, ended) in ended.iter().enumerate() {
            for which in (0..scenario.asks.len()).filter(|&which| ended[which].is_none()) {
                let (world, _) = scenario.drive(&mut |world, point| {
                    if point == at {
                        let handle = nth(world, which);
                        assert!(world.abort(handle));
                        assert!(!world.abort(handle), "it has ended");
                        num_aborted += 1;
                    }
                });
                for (i, (end, calm)) in ends(&world).into_iter().zip(ends(&calm)).enumerate() {
                    if i == which {
                        assert!(matches!(end, Some((FinishReason::Abort, _))));
                    } else {
                        assert_eq!(end, calm, "{name}: {at}, {which}");
                    }
                }
            }
        }
    }
    assert!(num_aborted > 500, "{num_aborted}");
}

#[test]
fn a_stop_found_late_at_any_point_ends_its_request_where_its_text_ends() {
    let mut num_late = 0;
    for (name, scenario) in scenarios() {
        // Whose text ended two tokens ago, and where.
        let (calm, late) = scenario.watch(|world| {
            let accounts = world.ledger.accounts.values();
            accounts
                .map(|account| {
                    let num_output = account.num_output.checked_sub(2);
                    num_output.filter(|&num| num > 0 && account.is_live())
                })
                .collect::<Vec<_>>()
        });
        for (at, late) in late.iter().enumerate() {
            for (which, num_output) in late.iter().enumerate() {
                let Some(num_output) = *num_output else {
                    continue;
                };
                let mut expected = ends(&calm);
                expected[which] = Some((FinishReason::Stop, num_output));
                let (world, _) = scenario.drive(&mut |world, point| {
                    if point == at {
                        let handle = nth(world, which);
                        assert!(world.finish(handle, num_output, FinishReason::Stop));
                        num_late += 1;
                    }
                });
                assert_eq!(ends(&world), expected, "{name}: {at}, {which}");
            }
        }
    }
    assert!(num_late > 200, "{num_late}");
}

#[test]
fn a_pin_at_any_point_changes_no_tokens() {
    let mut num_pins = 0;
    for (name, scenario) in scenarios() {
        let (calm, num_cached) = scenario.watch(|world| world.core.kv().cache().num_registered());
        let points = num_cached.iter().enumerate();
        for (at, _) in points.filter(|&(_, &num_cached)| num_cached > 0) {
            for num_points_pinned in [3, usize::MAX] {
                let (mut world, _) = scenario.drive(&mut |world, point| {
                    if point == at && world.pin(nth(world, 0), 6).is_ok() {
                        num_pins += 1;
                    }
                    if point >= at && point - at == num_points_pinned {
                        unpin_all(world);
                    }
                });
                assert_eq!(ends(&world), ends(&calm), "{name}: {at}");
                unpin_all(&mut world);
                assert_eq!(world.core.num_held_blocks(), 0, "{name}: {at}");
            }
        }
    }
    assert!(num_pins > 500, "{num_pins}");
}

fn unpin_all(world: &mut World) {
    while let Some(&pin) = world.pins.keys().next() {
        assert!(world.unpin(pin));
    }
}

fn poisoned(
    num_requests: usize,
    poison: usize,
    breaks_at: u32,
    depth: u32,
    num_seats: u32,
) -> World {
    let config = Config {
        num_blocks: 60,
        block_size: 2,
        max_num_seqs: num_seats,
        max_num_batched_tokens: 200,
        max_model_len: 40,
        vocab_size: 100,
        depth,
        ..Config::default()
    };
    let mut world = World::new(&config);
    for i in 0..num_requests {
        let ask = Ask::sized(i as i32, 3 + i % 4, 6);
        world.submit(&Ask {
            breaks_at: (i == poison).then_some(breaks_at),
            ..ask
        });
    }
    world.drain();
    world
}

#[test]
fn a_request_that_breaks_every_step_of_its_own_is_found_and_ends_alone() {
    for num_requests in 1..=9 {
        for poison in 0..num_requests {
            for breaks_at in [0, 2, 7] {
                for depth in 1..=3 {
                    for num_seats in [num_requests as u32, 3] {
                        let world = poisoned(num_requests, poison, breaks_at, depth, num_seats);
                        let case =
                            format!("{num_requests}, {poison}, {breaks_at}, {depth}, {num_seats}");
                        for (i, end) in ends(&world).into_iter().enumerate() {
                            if i == poison {
                                assert!(matches!(end, Some((FinishReason::Error, _))), "{case}");
                            } else {
                                assert_eq!(end, Some((FinishReason::Length, 6)), "{case}");
                            }
                        }
                        // Once among all, once as a group, then once for each halving.
                        let together = num_requests.min(num_seats as usize);
                        let limit = 2 + u64::from(together.next_power_of_two().ilog2());
                        assert!(
                            world.num_failures <= limit,
                            "{case}: {} failures",
                            world.num_failures
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn two_requests_that_break_their_steps_are_both_found() {
    for (first, second) in [(0, 1), (0, 7), (3, 4), (6, 7)] {
        let config = Config {
            num_blocks: 200,
            max_num_seqs: 8,
            vocab_size: 100,
            ..Config::default()
        };
        let mut world = World::new(&config);
        for i in 0..8 {
            let is_poison = i == first || i == second;
            world.submit(&Ask {
                breaks_at: is_poison.then_some(0),
                ..Ask::sized(i, 5, 6)
            });
        }
        world.drain();
        for (i, end) in ends(&world).into_iter().enumerate() {
            let is_poison = i == first as usize || i == second as usize;
            let expected = if is_poison {
                (FinishReason::Error, 0)
            } else {
                (FinishReason::Length, 6)
            };
            assert_eq!(end, Some(expected));
        }
    }
}

#[test]
fn a_request_whose_step_mate_left_before_the_step_failed_did_not_fail_alone() {
    let config = Config {
        num_blocks: 20,
        vocab_size: 100,
        ..Config::default()
    };
    let mut world = World::new(&config);
    let innocent = world.submit(&Ask::sized(1, 5, 3));
    let poison = world.submit(&Ask {
        breaks_at: Some(0),
        ..Ask::sized(2, 5, 3)
    });
    world.plan();
    world.run(); // fails: both are suspects
    world.plan();
    assert!(world.abort(poison));
    world.run(); // fails again, by the one that is gone
    world.drain();
    assert_eq!(world.num_failures, 2);
    assert_eq!(world.account(innocent).end, Some((FinishReason::Length, 3)));
}
