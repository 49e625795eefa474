//! Instructions a sequence-step in steady decode, and a block of the pool, counted by callgrind: the same in every run, on
//! every machine of a kind.
//!
//! `cargo bench --bench instructions [-- SIZE...]` runs itself under valgrind once a size, prints what each verb costs
//! beside the limits, and fails where one is exceeded. `-- --test` counts only the two sizes that the limits need.

mod pool;
mod pressure;
mod workload;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, ExitCode};

use noria_core::KeyPolicy;
use workload::{Meter, SteadyDecode, Verb};

const SIZES: [u32; 4] = [64, 256, 1024, 4096];
/// Instructions a sequence-step, at most; all verbs together.
const MAX_PER_ROW: f64 = 250.0;
/// What a step of the second size may cost, in steps of the first.
const GROWTH_SIZES: [u32; 2] = [256, 4096];
const MAX_GROWTH: f64 = 17.0;
const NUM_TURNS: u32 = 50;
/// Instructions that a block costs, at most: reserved among others in a row and released, and reserved by an eviction.
const MAX_PER_BLOCK: [f64; 2] = [40.0, 150.0];
/// The first argument of a run that is to be counted.
const COUNTED: &str = "--counted";
/// In place of a size: the run is the pool's, or that of a case under pressure and its size.
const POOL: &str = "pool";
const PRESSURE: &str = "pressure";
/// Every order of the line, counted at this size, for 64 tenants.
const POLICY_SIZE: u32 = 256;
const POLICIES: [(&str, KeyPolicy); 6] = [
    ("fcfs", KeyPolicy::Fcfs),
    ("priority", KeyPolicy::Priority),
    ("sjf", KeyPolicy::Sjf),
    ("deadline", KeyPolicy::Deadline),
    ("prefix", KeyPolicy::Prefix),
    ("fair", KeyPolicy::Fair),
];

/// Each verb in a function of its own, which callgrind knows by its name.
struct Counted;

impl Meter for Counted {
    fn measure<T>(&mut self, verb: Verb, call: impl FnOnce() -> T) -> T {
        match verb {
            Verb::Submit => counted_submit(call),
            Verb::Plan => counted_plan(call),
            Verb::Commit => counted_commit(call),
        }
    }
}

#[inline(never)]
fn counted_submit<T>(call: impl FnOnce() -> T) -> T {
    call()
}

#[inline(never)]
fn counted_plan<T>(call: impl FnOnce() -> T) -> T {
    call()
}

#[inline(never)]
fn counted_commit<T>(call: impl FnOnce() -> T) -> T {
    call()
}

const COUNTED_VERBS: [&str; 3] = ["counted_submit", "counted_plan", "counted_commit"];
const COUNTED_RESERVATIONS: [&str; 2] = ["counted_in_runs", "counted_evicting"];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|arg| arg == COUNTED) {
        if args[1] == POOL {
            println!("{}", pool::run_counted());
            return ExitCode::SUCCESS;
        }
        if args[1] == PRESSURE {
            let [case, size] = [&args[2], &args[3]].map(|arg| arg.parse().expect("a number"));
            println!("{}", pressure::run_counted(case as usize, size));
            return ExitCode::SUCCESS;
        }
        let [running, num_tenants]: [u32; 2] =
            [&args[1], &args[2]].map(|arg| arg.parse().expect("a number"));
        run_counted(running, num_tenants.into(), &args[3]);
        return ExitCode::SUCCESS;
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("valgrind is not installed: instructions are not counted");
        return ExitCode::SUCCESS;
    }
    // `cargo bench` adds an argument of its own.
    let given: Vec<u32> = args
        .iter()
        .filter(|arg| !arg.starts_with("--"))
        .map(|arg| arg.parse().expect("a size is a number"))
        .collect();
    let is_trial = args.iter().any(|arg| arg == "--test");
    let are_within = [
        report(match given.is_empty() {
            false => &given,
            true if is_trial => &GROWTH_SIZES,
            true => &SIZES,
        }),
        report_policies(if is_trial { &POLICIES[4..] } else { &POLICIES }),
        report_pool(),
        report_pressure(),
    ];
    if are_within == [true; 4] {
        ExitCode::SUCCESS
    } else {
        println!("over the limit");
        ExitCode::FAILURE
    }
}

/// The run under valgrind: only what `Counted` measures is counted.
fn run_counted(running: u32, num_tenants: u64, policy: &str) {
    let key = POLICIES.iter().find(|known| known.0 == policy);
    let mut steady = SteadyDecode::new(running, num_tenants, key.expect("the policy is known").1);
    let num_rows: u32 = (0..NUM_TURNS).map(|_| steady.turn(&mut Counted)).sum();
    steady.assert_steady();
    println!("{num_rows}");
}

fn report_pool() -> bool {
    let (num_blocks, counts) = count(&[POOL], COUNTED_RESERVATIONS);
    let [in_runs, evicting] = counts.map(|count| f64::from(count) / f64::from(num_blocks));
    let [max_in_runs, max_evicting] = MAX_PER_BLOCK;
    println!(
        "instructions a block, of a pool of {}: reserved in runs and released {in_runs:.1}, the limit is \
         {max_in_runs}; reserved by eviction {evicting:.1}, the limit is {max_evicting}",
        pool::NUM_BLOCKS
    );
    in_runs <= max_in_runs && evicting <= max_evicting
}

fn report(sizes: &[u32]) -> bool {
    println!("instructions a sequence-step; the limit is {MAX_PER_ROW}");
    println!("running   submit     plan   commit    total   instructions a step");
    let mut is_within = true;
    let mut per_step = BTreeMap::new();
    for &running in sizes {
        let (num_rows, counts) = count(&[&running.to_string(), "1", "fcfs"], COUNTED_VERBS);
        let total: f64 = counts.iter().copied().map(f64::from).sum();
        let [submit, plan, commit] = counts.map(|count| f64::from(count) / f64::from(num_rows));
        let per_row = total / f64::from(num_rows);
        let step = total / f64::from(NUM_TURNS);
        println!("{running:7} {submit:8.1} {plan:8.1} {commit:8.1} {per_row:8.1} {step:21.0}");
        is_within &= per_row <= MAX_PER_ROW;
        per_step.insert(running, step);
    }
    if let [Some(small), Some(large)] = GROWTH_SIZES.map(|running| per_step.get(&running)) {
        let growth = large / small;
        let [small, large] = GROWTH_SIZES;
        println!(
            "{large} running cost {growth:.2} times {small} running; the limit is {MAX_GROWTH}"
        );
        is_within &= growth <= MAX_GROWTH;
    }
    is_within
}

/// A sequence-step under each policy, at the size that the limit is for.
fn report_policies(policies: &[(&str, KeyPolicy)]) -> bool {
    println!("instructions a sequence-step with {POLICY_SIZE} running and 64 tenants, by policy");
    let mut is_within = true;
    for &(name, _) in policies {
        let (num_rows, counts) = count(&[&POLICY_SIZE.to_string(), "64", name], COUNTED_VERBS);
        let [submit, plan, commit] = counts.map(|count| f64::from(count) / f64::from(num_rows));
        let per_row = submit + plan + commit;
        println!("{name:>8} {submit:8.1} {plan:8.1} {commit:8.1} {per_row:8.1}");
        is_within &= per_row <= MAX_PER_ROW;
    }
    is_within
}

/// Each case at its size, and at half of it.
fn report_pressure() -> bool {
    println!("instructions a call under pressure: at half the size, at the size, and growth");
    let mut is_within = true;
    for (case, (what, size, max_growth)) in pressure::CASES.into_iter().enumerate() {
        let [half, whole] = [size / 2, size].map(|size| {
            let args = [PRESSURE, &case.to_string(), &size.to_string()];
            let (num_calls, [sum]) = count(&args, pressure::COUNTED);
            f64::from(sum) / f64::from(num_calls)
        });
        let growth = whole / half;
        println!("{half:9.0} {whole:9.0} {growth:5.2} (limit {max_growth}): {what}: {size}");
        is_within &= growth <= max_growth;
    }
    is_within
}

/// The rows or blocks of a counted run, and the instructions of each of the functions that are counted in it.
fn count<const N: usize>(what: &[&str], functions: [&str; N]) -> (u32, [u32; N]) {
    let name = what.join("-");
    let profile =
        std::env::temp_dir().join(format!("noria-{}-{name}.callgrind", std::process::id()));
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet", "--collect-atstart=no"])
        .args(functions.map(|function| format!("--toggle-collect=*{function}*")))
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(std::env::current_exe().expect("this program has a path"))
        .arg(COUNTED)
        .args(what)
        .output()
        .expect("valgrind runs");
    assert!(
        run.status.success(),
        "the counted run failed: {}",
        String::from_utf8_lossy(&run.stderr)
    );
    let num = String::from_utf8_lossy(&run.stdout).trim().parse();
    let counts = inclusive(&profile, functions);
    if std::env::var_os("NORIA_KEEP_PROFILE").is_some() {
        println!("{}", profile.display());
    } else {
        std::fs::remove_file(&profile).expect("the profile was written");
    }
    (num.expect("the run prints its rows or blocks"), counts)
}

/// Inclusive instructions of each counted function: after a call's `cfn=` and `calls=` lines stands what the call cost.
fn inclusive<const N: usize>(profile: &Path, functions: [&str; N]) -> [u32; N] {
    let text = std::fs::read_to_string(profile).expect("callgrind wrote its profile");
    let mut names = BTreeMap::new();
    let mut counts = [0; N];
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        // A name stands beside its number once, and is its number from then on.
        for prefix in ["fn=", "cfn="] {
            if let Some((number, name)) = line
                .strip_prefix(prefix)
                .and_then(|rest| rest.split_once(' '))
            {
                names.insert(number, name);
            }
        }
        let Some(callee) = line.strip_prefix("cfn=") else {
            continue;
        };
        let number = callee
            .split(' ')
            .next()
            .expect("split gives one part at least");
        let function = functions.iter().position(|function| {
            names
                .get(number)
                .is_some_and(|name| name.contains(function))
        });
        let cost = lines
            .find(|line| !line.starts_with("calls="))
            .and_then(|line| line.split(' ').nth(1))
            .expect("a call has a cost");
        if let Some(function) = function {
            counts[function] += cost.parse::<u32>().expect("a cost is a number");
        }
    }
    counts
}
