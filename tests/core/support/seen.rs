//! What really happened in a run, so that a test that means to exercise something can say that it did.

/// How often what a test is about really happened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) preemptions: u64,
    pub(crate) hit_tokens: u64,
    pub(crate) chunks: u64,
    pub(crate) device_starts: u64,
    pub(crate) listed_drafts: u64,
    pub(crate) wasted_tokens: u64,
    pub(crate) late_failures: u64,
    pub(crate) confined_steps: u64,
    pub(crate) errors: u64,
    pub(crate) ghosts: u64,
    pub(crate) padding: u64,
    pub(crate) moves: u64,
    pub(crate) slides: u64,
    pub(crate) shrinks: u64,
    pub(crate) growths: u64,
    pub(crate) window_blocks: u64,
    pub(crate) swapped_out: u64,
    pub(crate) swapped_in: u64,
    pub(crate) swap_misses: u64,
    pub(crate) pins: u64,
    /// As the pool could not spare them.
    pub(crate) pins_refused: u64,
    /// As a block beyond was pinned.
    pub(crate) resizes_refused: u64,
}

impl Seen {
    pub(crate) fn add(&mut self, other: &Self) {
        self.preemptions += other.preemptions;
        self.hit_tokens += other.hit_tokens;
        self.chunks += other.chunks;
        self.device_starts += other.device_starts;
        self.listed_drafts += other.listed_drafts;
        self.wasted_tokens += other.wasted_tokens;
        self.late_failures += other.late_failures;
        self.confined_steps += other.confined_steps;
        self.errors += other.errors;
        self.ghosts += other.ghosts;
        self.padding += other.padding;
        self.moves += other.moves;
        self.slides += other.slides;
        self.shrinks += other.shrinks;
        self.growths += other.growths;
        self.window_blocks += other.window_blocks;
        self.swapped_out += other.swapped_out;
        self.swapped_in += other.swapped_in;
        self.swap_misses += other.swap_misses;
        self.pins += other.pins;
        self.pins_refused += other.pins_refused;
        self.resizes_refused += other.resizes_refused;
    }
}
