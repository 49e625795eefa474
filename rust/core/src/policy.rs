//! The five questions' choices. A policy mutates nothing: it maps what is known to a key, a verdict or an order.

/// Who is next: lower first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Key {
    /// The band: a request of a better (lower) one is always before one of a worse.
    pub(crate) band: i32,
    /// The policy's own order in a band.
    pub(crate) score: u64,
    /// Submission order; unique, so keys are.
    pub(crate) arrival: u64,
}

/// How keys are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyPolicy {
    /// First come, first served; `priority` is ignored.
    Fcfs,
    /// First come, first served in each band of `priority` (lower runs first).
    Priority,
}

impl KeyPolicy {
    pub(crate) fn key(self, priority: i32, arrival: u64) -> Key {
        let band = match self {
            Self::Fcfs => 0,
            Self::Priority => priority,
        };
        Key {
            band,
            score: 0,
            arrival,
        }
    }
}

/// When a waiting request may enter the running set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// Whenever its prompt fits beside what resident prefills still need and a watermark; output growth is met by
    /// preemption.
    Optimistic,
    /// A baseline: a gang enters only an empty batch, with the most memory that any of it can need reserved for each.
    StaticGang,
    /// The same, with prompts padded to the longest, and finished rows computed until the gang ends.
    StaticPadded,
}

impl Admission {
    pub(crate) fn is_static(self) -> bool {
        self != Self::Optimistic
    }

    /// Optimistic: whether `num_needed` new blocks fit in `num_available`.
    pub(crate) fn fits(num_needed: u32, debt: u32, watermark: u32, num_available: u32) -> bool {
        num_needed.saturating_add(debt).saturating_add(watermark) <= num_available
    }
}

/// Who leaves first when a resident cannot grow: the least of these.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct VictimOrder {
    /// Not of the group in quarantine.
    pub(crate) is_member: bool,
    /// The worst band first.
    pub(crate) band: core::cmp::Reverse<i32>,
    /// A band's best key goes last of it.
    pub(crate) is_band_best: bool,
    /// One that can end in the blocks that it holds goes last.
    pub(crate) ends_in_place: bool,
    /// The least to recompute first.
    pub(crate) num_recomputed: u32,
    /// The worst key first.
    pub(crate) key: core::cmp::Reverse<Key>,
}

/// How many tokens a prefill may take of `left`, with `num_contenders` (at least 1) to share it: whole blocks.
pub(crate) fn share(left: u32, num_contenders: u32, block_size: u32) -> u32 {
    let part = left / num_contenders;
    let whole = part - part % block_size;
    if whole == 0 {
        left.min(block_size)
    } else {
        whole
    }
}
