//! The random traffic of `random_traffic` and `naive_plans`, for as many verbs as one likes:
//!
//! `cargo test --release -p noria-core --test endless -- --ops 10000000 [--seed 1]`
//!
//! Every verb is followed by a full recount. A failure is shrunk, and printed with the seed that leads to it.

#![allow(
    dead_code,
    unused_imports,
    reason = "it uses parts of what the suite is made of"
)]

use std::cell::Cell;
use std::time::Instant;

use proptest::prelude::*;

mod naive;
mod naive_plans;
mod support;
mod traffic;

use naive_plans::play_twins;
use support::Seen;
use traffic::{Scope, check_from, configs, play, verbs};

/// Cases of one kind, before the next kind has its turn.
const NUM_CASES: u32 = 50;

fn number_behind(name: &str) -> Option<u64> {
    let mut arguments = std::env::args().skip_while(|argument| argument != name);
    arguments.nth(1).and_then(|text| text.parse().ok())
}

fn main() {
    let num_wanted = number_behind("--ops").unwrap_or(20_000);
    let first_seed = number_behind("--seed").unwrap_or(0);
    let began = Instant::now();
    let (num_verbs, seen) = (Cell::new(0), Cell::new(Seen::default()));
    let mut seed = first_seed;
    while num_verbs.get() < num_wanted {
        for kind in 0..=16 {
            run(kind, seed, &num_verbs, &seen);
        }
        seed += 1;
        if (seed - first_seed).is_multiple_of(20) {
            let seconds = began.elapsed().as_secs();
            println!(
                "{} verbs in {seconds} s, seeds up to {seed}",
                num_verbs.get()
            );
        }
    }
    let seconds = began.elapsed().as_secs();
    println!(
        "{} verbs, seeds {first_seed} to {}, in {seconds} s: {:#?}",
        num_verbs.get(),
        seed - 1,
        seen.get()
    );
}

/// Some cases of a kind: one of the sixteen scopes, or twins.
fn run(kind: u8, seed: u64, num_verbs: &Cell<u64>, seen: &Cell<Seen>) {
    let scope = Scope {
        is_static: kind & 1 > 0,
        has_drafts: kind & 2 > 0,
        has_failures: kind & 4 > 0,
        has_resizes: kind & 8 > 0,
    };
    let strategy = (configs(scope), prop::collection::vec(verbs(scope), 1..150));
    check_from(seed, NUM_CASES, &strategy, |(config, verbs)| {
        let world = if kind == 16 {
            play_twins(&config, &verbs)
        } else {
            play(&config, &verbs)
        };
        let mut sum = seen.get();
        sum.add(&world.seen());
        seen.set(sum);
        num_verbs.set(num_verbs.get() + verbs.len() as u64);
    });
}
