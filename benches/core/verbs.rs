//! The verbs in steady decode, and the expansion of the step that they plan.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use noria_core::expand::{SeatState, StepArrays, apply, expand as expand_rows};
use noria_core::{Config, FinishReason, KeyPolicy, Request, Scheduler, StepLayout, header};

use crate::sizes;
use crate::workload::{Ids, Meter, PROMPT_TOKENS, SteadyDecode, Verb};

const SIZES: [u32; 4] = [64, 256, 1024, 4096];
/// vLLM 0.32, prefix cache off, on an AMD EPYC (stored): microseconds a step of schedule, of update, and of the runner's
/// input preparation and bookkeeping.
const VLLM_US: [(u32, [u32; 3]); 4] = [
    (64, [362, 141, 250]),
    (256, [1389, 546, 576]),
    (1024, [5753, 2471, 2078]),
    (4096, [24009, 10893, 10961]),
];

fn print_peer(what: &str, column: usize) {
    for (running, columns) in VLLM_US {
        let us = columns[column];
        let ns = f64::from(us) * 1e3 / f64::from(running);
        println!(
            "{what}/{running}: the peer is vLLM 0.32 (stored, AMD EPYC): {us} us a step, {ns:.0} ns a sequence"
        );
    }
}

/// A clock on one verb.
struct Clock {
    verb: Verb,
    elapsed: Duration,
}

impl Meter for Clock {
    fn measure<T>(&mut self, verb: Verb, call: impl FnOnce() -> T) -> T {
        if verb != self.verb {
            return call();
        }
        let started = Instant::now();
        let result = call();
        self.elapsed += started.elapsed();
        result
    }
}

/// `plan`, `commit` and the submits of a step: 1% of the rows end in each and are replaced.
pub(crate) fn scheduler(criterion: &mut Criterion) {
    for (name, verb, peer) in [
        ("plan", Verb::Plan, Some(0)),
        ("commit", Verb::Commit, Some(1)),
        ("submit", Verb::Submit, None),
    ] {
        if let Some(column) = peer {
            print_peer(name, column);
        }
        let mut group = criterion.benchmark_group(name);
        for &running in sizes(&SIZES) {
            group.throughput(Throughput::Elements(running.into()));
            group.bench_function(BenchmarkId::from_parameter(running), |bencher| {
                let mut steady = SteadyDecode::new(running, 1, KeyPolicy::Fcfs);
                bencher.iter_custom(|num_turns| {
                    let elapsed = Duration::ZERO;
                    let mut clock = Clock { verb, elapsed };
                    for _ in 0..num_turns {
                        steady.turn(&mut clock);
                    }
                    clock.elapsed
                });
                steady.assert_steady();
            });
        }
        group.finish();
    }
}

/// A request that joins a line and quits it, with others waiting behind and before it.
pub(crate) fn submit_and_finish(criterion: &mut Criterion) {
    println!("submit_and_finish: the limit is a copy of the prompt, `copy_prompt`");
    println!(
        "submit_and_finish: the peer is vLLM 0.32 (stored): an abort among 100000 that wait takes 2600 us"
    );
    let mut group = criterion.benchmark_group("submit_and_finish");
    let mut ids = Ids::new(1);
    let prompt: Vec<i32> = (0..PROMPT_TOKENS).map(|_| ids.draw()).collect();
    let request = Request::new(&prompt, 100);
    for &num_waiting in sizes(&[64, 100_000]) {
        group.bench_function(BenchmarkId::from_parameter(num_waiting), |bencher| {
            let mut core = Scheduler::new(Config::default()).expect("the configuration is valid");
            for _ in 0..num_waiting {
                core.submit(0, &request).expect("the line has room");
            }
            bencher.iter(|| {
                let handle = core
                    .submit(0, black_box(&request))
                    .expect("the line has room");
                core.finish(handle, 0, FinishReason::Abort, 0)
            });
        });
    }
    group.bench_function("copy_prompt", |bencher| {
        bencher.iter(|| black_box(&prompt).clone());
    });
    group.finish();
}

/// What a runner owns, as vectors.
struct Arrays {
    tables: Vec<i32>,
    seats: [Vec<i64>; 3],
    tokens: [Vec<i64>; 3],
    cu_seqlens_q: Vec<i32>,
    context_lens: Vec<i32>,
    rows: [Vec<i64>; 3],
}

impl Arrays {
    fn new(layout: &StepLayout) -> Self {
        let i64s = |len: usize| std::array::from_fn(|_| vec![0; len]);
        Self {
            tables: vec![0; layout.max_num_seqs * layout.max_blocks_per_seq],
            seats: i64s(layout.max_num_seqs),
            tokens: i64s(layout.max_num_batched_tokens),
            cu_seqlens_q: vec![0; layout.max_rows + 1],
            context_lens: vec![0; layout.max_rows],
            rows: i64s(layout.max_rows),
        }
    }

    fn fill(&mut self, layout: &StepLayout, buffer: &[i32]) {
        let [last_token, num_computed_tokens, num_prompt_tokens] = &mut self.seats;
        let [input_ids, positions, slot_mapping] = &mut self.tokens;
        let [row_seats, logits_indices, sample_rows] = &mut self.rows;
        let mut seats = SeatState {
            block_tables: &mut self.tables,
            last_token,
            num_computed_tokens,
            num_prompt_tokens,
        };
        apply(layout, buffer, &mut seats);
        let mut out = StepArrays {
            input_ids,
            positions,
            slot_mapping,
            cu_seqlens_q: &mut self.cu_seqlens_q,
            context_lens: &mut self.context_lens,
            row_seats,
            logits_indices,
            sample_rows,
        };
        expand_rows(layout, buffer, &mut seats, &mut out);
    }
}

/// A steady step's buffer becomes the arrays that a model reads.
pub(crate) fn expand(criterion: &mut Criterion) {
    print_peer("expand", 2);
    println!("expand: the limit is a copy of as many bytes as it writes, `copy`");
    let mut group = criterion.benchmark_group("expand");
    for &running in sizes(&SIZES) {
        group.throughput(Throughput::Elements(running.into()));
        let mut steady = SteadyDecode::new(running, 1, KeyPolicy::Fcfs);
        steady.turn(&mut crate::workload::Unmeasured);
        let layout = *steady.core.layout();
        let (_, buffer) = steady.in_flight.back().expect("a step is in flight");
        let mut arrays = Arrays::new(&layout);
        group.bench_function(BenchmarkId::from_parameter(running), |bencher| {
            bencher.iter(|| arrays.fill(&layout, black_box(buffer)));
        });
        let num_words =
            3 * buffer[header::NUM_TOKENS] as usize + 4 * buffer[header::NUM_ROWS] as usize;
        let (source, mut target) = (vec![1i64; num_words], vec![0i64; num_words]);
        group.bench_function(BenchmarkId::new("copy", running), |bencher| {
            bencher.iter(|| target.copy_from_slice(black_box(&source)));
        });
    }
    group.finish();
}
