//! Steady decode allocates nothing: not in a plan, not in a commit, not where a sequence crosses into a new block.

use allocation_counter::measure;
use noria_core::{Config, Drafts, Planned, Request, Scheduler, StepId};

const NUM_SEQUENCES: usize = 32;
const NUM_STEPS: u64 = 300;

fn config(enable_prefix_caching: bool, num_records: u32) -> Config {
    Config {
        num_blocks: 4096,
        block_size: 4,
        max_num_seqs: NUM_SEQUENCES as u32,
        max_num_batched_tokens: 4096,
        max_model_len: 512,
        vocab_size: 1000,
        depth: 2,
        enable_prefix_caching,
        num_records,
        ..Config::default()
    }
}

struct Engine {
    core: Scheduler,
    buffer: Vec<i32>,
    num_ids: Vec<i32>,
    ids: Vec<i32>,
    oldest: StepId,
}

impl Engine {
    /// All prompts are through, and two steps are in flight.
    fn decoding(config: Config) -> Self {
        let core = Scheduler::new(config).expect("the configuration is good");
        let mut engine = Self {
            buffer: vec![0; core.layout().size],
            core,
            num_ids: vec![1; NUM_SEQUENCES],
            ids: vec![0; NUM_SEQUENCES],
            oldest: StepId(1),
        };
        for i in 0..NUM_SEQUENCES as i32 {
            let prompt: Vec<i32> = (0..7 + i % 5).map(|position| i + position).collect();
            engine
                .core
                .submit(0, &Request::new(&prompt, 400))
                .expect("it is accepted");
        }
        engine.plan();
        engine.turn();
        engine
    }

    fn plan(&mut self) {
        let planned = self.core.plan(0, &Drafts::none(), &mut self.buffer);
        assert!(matches!(planned, Planned::Step(_)));
    }

    fn turn(&mut self) {
        self.plan();
        for (i, id) in self.ids.iter_mut().enumerate() {
            *id = ((self.oldest.0 as usize * 7 + i * 3) % 1000) as i32;
        }
        self.core
            .commit(self.oldest, &self.num_ids, &self.ids, 5, 0)
            .expect("one id a row");
        assert_eq!(self.core.events().len(), NUM_SEQUENCES);
        self.oldest = StepId(self.oldest.0 + 1);
    }
}

#[test]
fn steady_decode_allocates_nothing() {
    for (enable_prefix_caching, num_records) in [(true, 4096), (true, 16), (false, 4096)] {
        let mut engine = Engine::decoding(config(enable_prefix_caching, num_records));
        let held = engine.core.num_held_blocks();
        let found = engine.core.kv().cache().num_registered();
        let counted = measure(|| {
            for _ in 0..NUM_STEPS {
                engine.turn();
            }
        });
        assert_eq!(
            counted.count_total, 0,
            "allocations in {NUM_STEPS} steps of {NUM_SEQUENCES} rows"
        );
        let num_new = engine.core.num_held_blocks() - held;
        assert_eq!(
            u64::from(num_new),
            NUM_STEPS / 4 * NUM_SEQUENCES as u64,
            "block edges were crossed"
        );
        assert_eq!(
            engine.core.kv().cache().num_registered() > found,
            enable_prefix_caching
        );
        engine.core.check();
    }
}

#[test]
fn what_is_counted_is_every_allocation() {
    let counted = measure(|| drop(std::hint::black_box(vec![0_u8; 100])));
    assert_eq!(counted.count_total, 1);
}
