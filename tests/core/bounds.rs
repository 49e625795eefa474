//! The numbers that policies promise (DESIGN.md, 3), held on random traffic.

use std::cell::Cell;
use std::collections::BTreeMap;

use noria_core::{Admission, Config, EventKind, KeyPolicy};
use proptest::prelude::*;

use crate::support::{Ask, World};
use crate::traffic::check;

/// What a request waits for, counted in steps.
#[derive(Clone, Copy, Debug)]
struct Wait {
    since: u64,
    priority: i32,
    arrival: usize,
    num_passed_by: u32,
}

/// A world, with what its requests wait for.
struct Watch {
    world: World,
    waits: BTreeMap<u64, Wait>,
    arrivals: BTreeMap<u64, usize>,
    longest: u64,
    most_passed_by: u32,
    most_waiting: usize,
}

impl Watch {
    fn new(config: &Config) -> Self {
        Self {
            world: World::new(config),
            waits: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            longest: 0,
            most_passed_by: 0,
            most_waiting: 0,
        }
    }

    fn submit(&mut self, ask: &Ask) {
        let handle = self.world.submit(ask);
        let wait = Wait {
            since: self.world.num_steps,
            priority: ask.priority,
            arrival: self.arrivals.len(),
            num_passed_by: 0,
        };
        self.arrivals.insert(handle, self.arrivals.len());
        self.waits.insert(handle, wait);
        self.most_waiting = self.most_waiting.max(self.waits.len());
    }

    fn turn(&mut self) {
        while self.world.plan().is_some() {
            let events = self.world.core.events().to_vec();
            for event in events {
                let handle = event.handle.to_bits();
                match event.kind {
                    EventKind::Admitted | EventKind::Resumed => self.enter(handle),
                    EventKind::Preempted => {
                        let wait = Wait {
                            since: self.world.num_steps,
                            priority: self.world.account(handle).ask.priority,
                            arrival: self.arrivals[&handle],
                            num_passed_by: 0,
                        };
                        self.waits.insert(handle, wait);
                    }
                    EventKind::Token | EventKind::Finished => {}
                }
            }
        }
        self.world.run();
        self.world.commit();
        let ledger = &self.world.ledger;
        self.waits
            .retain(|handle, _| ledger.accounts[handle].is_live());
    }

    fn enter(&mut self, handle: u64) {
        let Some(entered) = self.waits.remove(&handle) else {
            return;
        };
        self.longest = self.longest.max(self.world.num_steps - entered.since);
        self.most_passed_by = self.most_passed_by.max(entered.num_passed_by);
        for wait in self.waits.values_mut() {
            if wait.priority == entered.priority && wait.arrival < entered.arrival {
                wait.num_passed_by += 1;
            }
        }
    }
}

prop_compose! {
    fn configs()(
        (num_blocks, block_size, max_num_seqs) in (6u32..=24, 1u32..=4, 1u32..=6),
        (spare_tokens, depth) in (0u32..=8, 1u32..=3),
        admission in prop::sample::select(&[Admission::Peak, Admission::Reserve, Admission::Optimistic][..]),
        (ageing_steps, max_bypasses, max_preemptions) in (1u32..=20, 0u32..=6, 1u32..=3),
    ) -> Config {
        Config {
            num_blocks,
            block_size,
            max_num_seqs,
            max_num_batched_tokens: max_num_seqs + spare_tokens,
            max_model_len: (num_blocks * block_size).clamp(4, 30),
            vocab_size: 100,
            depth,
            key: KeyPolicy::Priority,
            admission,
            ageing_steps,
            max_bypasses,
            max_preemptions,
            ..Config::default()
        }
    }
}

/// Lengths and priorities, and turns between one request and the next.
fn loads() -> impl Strategy<Value = Vec<(usize, i64, i32, u8)>> {
    prop::collection::vec((1usize..=12, 1i64..=12, 0i32..=2, 0u8..=3), 10..80)
}

fn fitted(
    config: &Config,
    seed: usize,
    (len, max_tokens, priority, _): (usize, i64, i32, u8),
) -> Ask {
    let room = config
        .max_model_len
        .min(config.num_blocks * config.block_size) as usize;
    let len = len.min(room / 2).max(1);
    let ask = Ask::sized(seed as i32, len, max_tokens.min((room - len) as i64).max(1));
    ask.priority(priority)
}

fn drive(config: &Config, load: &[(usize, i64, i32, u8)]) -> Watch {
    let mut watch = Watch::new(config);
    for (seed, &item) in load.iter().enumerate() {
        watch.submit(&fitted(config, seed, item));
        for _ in 0..item.3 {
            watch.turn();
        }
    }
    while watch.world.core.num_waiting() + watch.world.core.num_running() > 0 {
        watch.turn();
    }
    watch
}

#[test]
fn nobody_waits_longer_than_the_ageing_bound() {
    let promoted = Cell::new(0);
    check(80, &(configs(), loads()), |(config, load)| {
        let watch = drive(&config, &load);
        let tier = u64::from((config.max_num_seqs / 4).max(1));
        let stay = u64::from(config.max_model_len + config.block_size + config.depth);
        let bound = u64::from(config.ageing_steps) + (watch.most_waiting as u64 + tier) * stay;
        assert!(
            watch.longest <= bound,
            "{} steps, not {bound}",
            watch.longest
        );
        if watch.longest > u64::from(config.ageing_steps) {
            promoted.set(promoted.get() + 1);
        }
    });
    assert!(promoted.get() > 0, "somebody aged");
}

#[test]
fn a_blocked_request_is_passed_no_more_often_than_the_bound_says() {
    let passed = Cell::new(0);
    check(90, &(configs(), loads()), |(config, load)| {
        let config = Config {
            ageing_steps: 0,
            max_preemptions: 0,
            ..config
        };
        let watch = drive(&config, &load);
        assert!(
            watch.most_passed_by <= config.max_bypasses,
            "{} passed, not {}",
            watch.most_passed_by,
            config.max_bypasses
        );
        passed.set(passed.get() + watch.most_passed_by);
    });
    assert!(passed.get() > 0, "somebody was passed");
}

#[test]
fn a_request_is_preempted_no_more_often_than_the_bound_says() {
    let most = Cell::new(0);
    check(90, &(configs(), loads()), |(config, load)| {
        let config = Config {
            admission: Admission::Optimistic,
            ..config
        };
        let watch = drive(&config, &load);
        for account in watch.world.ledger.accounts.values() {
            let num_blocks = 1 + account.max_output.div_ceil(config.block_size);
            let bound = config.max_preemptions * num_blocks;
            assert!(
                account.num_preemptions <= bound,
                "{} preemptions, not {bound}",
                account.num_preemptions
            );
            most.set(most.get().max(account.num_preemptions));
        }
    });
    assert!(
        most.get() > 2,
        "somebody was preempted often: {}",
        most.get()
    );
}

#[test]
fn reserved_requests_are_never_preempted_to_grow() {
    check(90, &(configs(), loads()), |(config, load)| {
        let config = Config {
            admission: Admission::Reserve,
            key: KeyPolicy::Fcfs,
            ..config
        };
        let watch = drive(&config, &load);
        for account in watch.world.ledger.accounts.values() {
            assert_eq!(account.num_preemptions, 0);
        }
    });
}

/// Weighted tokens that two tenants were served, while both have requests in line.
#[derive(Default)]
struct Gap {
    served: [i64; 2],
    /// Least and most of the difference since both are in line.
    range: Option<(i64, i64)>,
    widest: i64,
}

impl Gap {
    fn hear(&mut self, world: &World, config: &Config) {
        for event in world.core.events() {
            let account = world.account(event.handle.to_bits());
            let served = &mut self.served[account.ask.tenant as usize];
            match event.kind {
                EventKind::Admitted => {
                    *served += (account.ask.prompt.len() as i64 - event.first)
                        * i64::from(config.fair_input_weight);
                }
                EventKind::Token => *served += i64::from(config.fair_output_weight),
                _ => {}
            }
        }
    }

    fn note(&mut self, are_both_in_line: bool) {
        let gap = self.served[0] - self.served[1];
        self.range = are_both_in_line.then(|| {
            let (least, most) = self.range.unwrap_or((gap, gap));
            (least.min(gap), most.max(gap))
        });
        if let Some((least, most)) = self.range {
            self.widest = self.widest.max(most - least);
        }
    }
}

/// Feeds two tenants so that each has a request in line, but for turns in which the second is away.
fn share_between(config: &Config, lengths: [(usize, i64); 2], away: &[u8]) -> (Gap, u64) {
    let mut world = World::new(config);
    let (mut gap, mut seed, mut num_shared) = (Gap::default(), 0, 0);
    for turn in 0..150u32 {
        for tenant in 0..2u64 {
            let is_away = tenant == 1 && away.iter().any(|&at| turn / 10 == u32::from(at));
            let in_line = |world: &World| {
                let waiting = world.ledger.live().filter(|(_, account)| {
                    account.ask.tenant == tenant && account.phase != crate::support::Phase::Running
                });
                waiting.count()
            };
            while !is_away && in_line(&world) < 3 {
                seed += 1;
                let (len, max_tokens) = lengths[tenant as usize];
                world.submit(&Ask::sized(seed, len, max_tokens).tenant(tenant));
            }
        }
        while world.plan().is_some() {
            gap.hear(&world, config);
            let in_line = |tenant: u64| {
                world.ledger.live().any(|(_, account)| {
                    account.ask.tenant == tenant && account.phase != crate::support::Phase::Running
                })
            };
            let are_both_in_line = in_line(0) && in_line(1);
            num_shared += u64::from(are_both_in_line);
            gap.note(are_both_in_line);
        }
        world.run();
        world.commit();
        gap.hear(&world, config);
    }
    (gap, num_shared)
}

fn fair_configs() -> impl Strategy<Value = Config> {
    (configs(), 1u32..=4, 1u32..=4, 40u32..=160).prop_map(|(config, input, output, num_blocks)| {
        Config {
            num_blocks,
            max_model_len: 128,
            max_num_batched_tokens: 16 + config.max_num_seqs,
            key: KeyPolicy::Fair,
            enable_prefix_caching: false,
            fair_input_weight: input,
            fair_output_weight: output,
            ..config
        }
    })
}

#[test]
fn two_tenants_in_line_are_served_alike_within_the_bound() {
    let shared = Cell::new(0);
    let away = prop::collection::vec(0u8..15, 0..5);
    let lengths = prop_oneof![
        ((1usize..=20, 1i64..=20), (1usize..=20, 1i64..=20)),
        // A hundred times longer prompts.
        ((Just(1usize), 1i64..=8), (Just(100usize), 1i64..=8)),
    ];
    check(
        60,
        &(fair_configs(), lengths, away),
        |(mut config, (first, second), away)| {
            let longest = first.0.max(second.0) as u32 + first.1.max(second.1) as u32;
            config.num_blocks = config
                .num_blocks
                .max(2 * longest.div_ceil(config.block_size));
            let (gap, num_shared) = share_between(&config, [first, second], &away);
            let longest_input = first.0.max(second.0) as i64;
            let num_places = i64::from(config.num_blocks * config.block_size);
            let unit = (i64::from(config.fair_input_weight) * longest_input)
                .max(i64::from(config.fair_output_weight) * num_places);
            assert!(
                gap.widest <= 2 * unit,
                "{} apart, not {}",
                gap.widest,
                2 * unit
            );
            shared.set(shared.get() + num_shared);
        },
    );
    assert!(
        shared.get() > 1000,
        "both were in line: {} steps",
        shared.get()
    );
}
