//! The core's plans are the naive core's, row by row, on random traffic.

use std::cell::Cell;
use std::collections::BTreeMap;

use noria_core::{Config, EventKind, FinishReason, PinId, flags};
use proptest::prelude::*;

use crate::naive::{Naive, Row, Told};
use crate::support::{Pinned, Seen, World};
use crate::traffic::{Scope, Verb, apply, check, configs, verbs};

struct Twins {
    world: World,
    naive: Naive,
}

impl Twins {
    fn check_pool(&self) {
        let pool = self.world.core.kv().pool();
        let of_core = (
            pool.num_free(),
            pool.num_cached(),
            self.world.core.num_held_blocks(),
        );
        assert_eq!(of_core, self.naive.pool(), "free, cached and held blocks");
    }

    fn plan(&mut self) -> bool {
        let view = self.world.plan();
        let (rows, told) = self.naive.plan(self.world.time_us());
        let told_by_core: Vec<Told> = self
            .world
            .core
            .events()
            .iter()
            .filter_map(|event| {
                let handle = event.handle.to_bits();
                match event.kind {
                    EventKind::Admitted | EventKind::Resumed => {
                        Some(Told::Entered(handle, event.first as u32))
                    }
                    EventKind::Preempted => Some(Told::Preempted(handle)),
                    EventKind::Token | EventKind::Finished => None,
                }
            })
            .collect();
        let rows_of_core: Vec<Row> = view
            .iter()
            .flat_map(|view| &view.rows)
            .map(|row| (row.handle, row.start, row.count, row.has(flags::SAMPLES)))
            .collect();
        assert_eq!(rows_of_core, rows, "rows");
        assert_eq!(told_by_core, told, "admissions and preemptions");
        self.check_pool();
        !rows.is_empty()
    }

    fn commit(&mut self) {
        if let Some(sampled) = self.world.sampled.front() {
            self.naive.commit(&sampled.num_ids, &sampled.ids);
            self.world.commit();
            self.check_pool();
        }
    }

    /// The naive core pins and unpins what the other did.
    fn follow_pins(&mut self, before: &BTreeMap<PinId, Pinned>) {
        for pin in before.keys() {
            if !self.world.pins.contains_key(pin) {
                self.naive.unpin(pin.0);
            }
        }
        for (pin, pinned) in &self.world.pins {
            if !before.contains_key(pin) {
                let num_blocks = pinned.blocks.len();
                let num_found = self
                    .naive
                    .pin(pin.0, pinned.domain, &pinned.tokens, num_blocks);
                // A block that a step in flight still moves is not pinned.
                let is_still = self.world.config.forced_moves == 0;
                assert!(num_blocks <= num_found && (!is_still || num_blocks == num_found));
            }
        }
    }

    fn apply(&mut self, verb: &Verb) {
        let before: Vec<(u64, bool)> = self
            .world
            .ledger
            .live()
            .map(|(handle, account)| (handle, account.is_parked))
            .collect();
        match verb {
            Verb::Plan => {
                self.plan();
            }
            Verb::Commit { .. } => self.commit(),
            Verb::Turn => {
                while self.plan() {}
                self.world.run();
                self.commit();
            }
            Verb::PlanDrafts { .. } | Verb::Fail { .. } | Verb::PokeDiscarded => {}
            Verb::Pin { .. } | Verb::Unpin { .. } => {
                let before = self.world.pins.clone();
                apply(&mut self.world, verb);
                self.follow_pins(&before);
                self.check_pool();
            }
            verb => {
                let known: Vec<u64> = self.world.ledger.accounts.keys().copied().collect();
                apply(&mut self.world, verb);
                let accounts = &self.world.ledger.accounts;
                for (&handle, account) in accounts
                    .iter()
                    .filter(|(handle, _)| !known.contains(handle))
                {
                    self.naive
                        .submit(handle, &account.ask, self.world.time_us());
                }
                for (handle, was_parked) in before {
                    if let Some((reason, num_output)) = accounts[&handle].end {
                        self.naive.end(handle, reason, num_output);
                    } else if was_parked && !accounts[&handle].is_parked {
                        self.naive.unpark(handle);
                    }
                }
                if matches!(verb, Verb::Reset) {
                    self.naive.reset();
                }
                self.check_pool();
            }
        }
    }
}

/// A core and its naive twin through the same verbs, until nothing is left that could run.
pub(crate) fn play_twins(config: &Config, verbs: &[Verb]) -> World {
    // What it costs in time is not for a model that knows no costs.
    let config = Config {
        step_target_us: 0,
        ..config.clone()
    };
    let mut twins = Twins {
        naive: Naive::new(&config),
        world: World::new(&config),
    };
    for verb in verbs {
        twins.apply(verb);
    }
    let num_open = |world: &World| {
        world.core.num_waiting() + world.core.num_running() + world.core.num_in_flight()
    };
    while num_open(&twins.world) > 0 {
        twins.apply(&Verb::Turn);
    }
    twins.world
}

#[test]
fn plans_are_those_of_a_naive_model() {
    let scope = Scope {
        is_static: false,
        has_drafts: false,
        has_failures: false,
        has_resizes: false,
    };
    let strategy = (configs(scope), prop::collection::vec(verbs(scope), 1..150));
    let seen = Cell::new(Seen::default());
    check(220, &strategy, |(config, verbs)| {
        let world = play_twins(&config, &verbs);
        let mut sum = seen.get();
        sum.add(&world.seen());
        seen.set(sum);
    });
    let seen = seen.get();
    assert!(
        seen.preemptions > 0 && seen.hit_tokens > 0 && seen.chunks > 0 && seen.pins > 0,
        "{seen:?}"
    );
}

#[test]
fn a_finish_found_outside_ends_a_request_for_both_models() {
    let config = Config {
        num_blocks: 8,
        block_size: 2,
        ..Config::default()
    };
    let mut twins = Twins {
        naive: Naive::new(&config),
        world: World::new(&config),
    };
    twins.apply(&Verb::Submit(crate::support::Ask::new(&[1, 2, 3], 5)));
    twins.apply(&Verb::Turn);
    twins.apply(&Verb::Finish {
        which: 0,
        cut: 0,
        reason: 0,
    });
    let account = twins
        .world
        .ledger
        .accounts
        .values()
        .next()
        .expect("one was submitted");
    assert_eq!(account.end, Some((FinishReason::Stop, 1)));
    assert_eq!(twins.naive.pool(), (7, 1, 0));
}
