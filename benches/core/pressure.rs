//! What the core does under pressure, each at a size and at half of it: an abort among many that wait, plans while many are
//! blocked or while a long cached prompt is, and a plan that preempts nearly half of all that run.

use noria_core::{Config, Drafts, FinishReason, Handle, KeyPolicy, Planned, Request, Scheduler};

use crate::workload::Ids;

const BLOCK_SIZE: u32 = 16;
const NUM_TURNS: u32 = 20;

/// A case: its name, its size, and what it may cost there, in costs at half the size. The first three are constant or
/// logarithmic, the last is linear, with a logarithm for places in line.
pub(crate) const CASES: [(&str, u32, f64); 4] = [
    ("abort one of so many that wait", 100_000, 1.3),
    ("plan while so many are blocked", 5_000, 1.3),
    (
        "plan while a cached prompt of so many tokens is blocked",
        32_768,
        1.3,
    ),
    ("plan that preempts 7 of 16 of so many that run", 1024, 2.3),
];

#[inline(never)]
fn counted_pressure(call: &mut dyn FnMut()) {
    call();
}

/// The function that is counted.
pub(crate) const COUNTED: [&str; 1] = ["counted_pressure"];

struct Core {
    scheduler: Scheduler,
    buffer: Vec<i32>,
    ids: Ids,
}

impl Core {
    fn new(config: Config) -> Self {
        let scheduler = Scheduler::new(config).expect("the configuration is valid");
        Self {
            buffer: vec![0; scheduler.layout().size],
            scheduler,
            ids: Ids::new(1),
        }
    }

    fn prompt(&mut self, num_tokens: u32) -> Vec<i32> {
        (0..num_tokens).map(|_| self.ids.draw()).collect()
    }

    fn submit(&mut self, num_prompt: u32, max_tokens: i64, priority: i32) -> Handle {
        let prompt = self.prompt(num_prompt);
        self.submit_prompt(&prompt, max_tokens, priority)
    }

    fn submit_prompt(&mut self, prompt: &[i32], max_tokens: i64, priority: i32) -> Handle {
        let request = Request {
            priority,
            ..Request::new(prompt, max_tokens)
        };
        self.scheduler
            .submit(0, &request)
            .expect("the request fits")
    }

    /// A step of which each row samples; `true` where the plan is counted.
    fn turn(&mut self, is_counted: bool) {
        let (scheduler, buffer) = (&mut self.scheduler, &mut self.buffer);
        let mut planned = Planned::Idle;
        let mut plan = || planned = scheduler.plan(0, &Drafts::none(), buffer);
        if is_counted {
            counted_pressure(&mut plan);
        } else {
            plan();
        }
        let Planned::Step(step) = planned else {
            panic!("there is work");
        };
        let num_rows = self.buffer[noria_core::header::NUM_ROWS] as usize;
        let flags = &self.buffer[self.scheduler.layout().offset_row_flags..][..num_rows];
        let num_ids: Vec<i32> = flags
            .iter()
            .map(|flag| flag & noria_core::flags::SAMPLES)
            .collect();
        let ids = vec![3; num_ids.iter().sum::<i32>() as usize];
        self.scheduler
            .commit(step, &num_ids, &ids, 0, 0)
            .expect("the ids match the step");
    }
}

/// Runs a case at a size; the calls that are counted.
pub(crate) fn run_counted(case: usize, size: u32) -> u32 {
    match case {
        0 => abort(size),
        1 => blocked(size),
        2 => cached_head(size),
        _ => storm(size),
    }
}

fn abort(num_waiting: u32) -> u32 {
    let mut core = Core::new(Config::default());
    let handles: Vec<Handle> = (0..num_waiting).map(|_| core.submit(8, 8, 0)).collect();
    for &handle in handles[handles.len() / 2..].iter().take(NUM_TURNS as usize) {
        let (scheduler, mut has_ended) = (&mut core.scheduler, false);
        counted_pressure(&mut || {
            has_ended = scheduler.finish(handle, 0, FinishReason::Abort, 0);
        });
        assert!(has_ended);
    }
    NUM_TURNS
}

fn config(num_blocks: u32, max_num_batched_tokens: u32) -> Config {
    Config {
        num_blocks,
        block_size: BLOCK_SIZE,
        max_num_batched_tokens,
        max_model_len: (num_blocks * BLOCK_SIZE).min(1 << 16),
        depth: 1,
        ..Config::default()
    }
}

fn blocked(num_waiting: u32) -> u32 {
    let mut core = Core::new(config(2200, 40_000));
    core.submit(34_000, 1000, 0);
    core.turn(false);
    for _ in 0..num_waiting {
        core.submit(2000, 2000, 0);
    }
    for turn in 0..=NUM_TURNS {
        core.turn(turn > 0);
    }
    assert_eq!(core.scheduler.num_waiting(), num_waiting);
    NUM_TURNS
}

/// The prompt alone would fit, but neither it nor what runs could end.
fn cached_head(num_tokens: u32) -> u32 {
    let mut core = Core::new(config(2 * num_tokens / BLOCK_SIZE + 70, num_tokens));
    let prompt = core.prompt(num_tokens);
    core.submit_prompt(&prompt, 1, 0);
    core.turn(false);
    core.submit(num_tokens, 1000, 0);
    core.turn(false);
    core.submit_prompt(&prompt, 2000, 0);
    for turn in 0..=NUM_TURNS {
        core.turn(turn > 0);
    }
    let cached = core.scheduler.kv().pool().num_cached();
    assert!(cached >= num_tokens / BLOCK_SIZE, "{cached} cached blocks");
    assert_eq!(core.scheduler.num_waiting(), 1);
    NUM_TURNS
}

fn storm(num_running: u32) -> u32 {
    let mut core = Core::new(Config {
        max_num_seqs: num_running,
        key: KeyPolicy::Priority,
        ..config(num_running * 8, num_running * 9)
    });
    for _ in 0..num_running {
        core.submit(8, 112, 5);
    }
    for _ in 0..3 {
        core.turn(false);
    }
    for _ in 0..num_running * 7 / 16 {
        core.submit(16, 8, 0);
    }
    core.turn(true);
    let last = core.scheduler.records().last().expect("a step was made");
    assert_eq!(last.num_preempted, i64::from(num_running * 7 / 16));
    1
}
