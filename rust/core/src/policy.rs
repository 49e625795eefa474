//! The five questions' choices. A policy mutates nothing: it maps what is known to a key, a verdict or an order.

use core::fmt::Debug;

use crate::ids::Handle;

/// Who is next: lower first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Key {
    /// The band: a request of a better (lower) one is always before one of a worse. That of aged requests is before all
    /// that a priority can give.
    pub(crate) band: i64,
    /// The policy's own order in a band.
    pub(crate) score: u64,
    /// Submission order; unique, so keys are.
    pub(crate) arrival: u64,
}

impl Key {
    /// Of the `promotion`th request that aged.
    pub(crate) fn aged(promotion: u64, arrival: u64) -> Self {
        Self {
            band: AGED_BAND,
            score: promotion,
            arrival,
        }
    }

    /// Of a request that has not been in line yet.
    pub(crate) fn first_come(arrival: u64) -> Self {
        Self {
            band: 0,
            score: 0,
            arrival,
        }
    }

    pub(crate) fn is_aged(self) -> bool {
        self.band == AGED_BAND
    }
}

/// Before every band that a priority gives.
pub(crate) const AGED_BAND: i64 = i64::MIN;

/// The order in a band, as a pure function of what is known of a request. The built-in ones are [`KeyPolicy`]'s; one's own
/// is given to [`Scheduler::with_policy`](crate::Scheduler::with_policy).
pub trait Policy: Debug + Send + Sync {
    /// Facts that take work to find; the others are always given, these only if asked for.
    fn reads(&self) -> Reads {
        Reads {
            num_remaining: true,
            num_uncached: true,
        }
    }

    /// The place in its band of a request that gets in line: lower goes first, and of equals the first come.
    fn score(&self, facts: &Facts) -> i64;
}

/// Which of the facts that take work a policy reads; the others are 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reads {
    /// [`Facts::num_remaining`].
    pub num_remaining: bool,
    /// [`Facts::num_uncached`].
    pub num_uncached: bool,
}

macro_rules! facts {
    ($($(#[$doc:meta])* $field:ident: $kind:ty,)*) => {
        /// What a policy knows of a request that gets in line.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub struct Facts {
            /// The request.
            pub handle: Handle,
            $($(#[$doc])* pub $field: $kind,)*
        }

        /// The names of a request's facts, in the order of [`Facts::values`].
        pub const FACT_FIELDS: &[&str] = &["handle", $(stringify!($field)),*];

        impl Facts {
            /// The facts in order; those above 2^63 as the bits that they are.
            #[allow(clippy::cast_lossless, reason = "fields are of several widths")]
            pub fn values(&self) -> [i64; FACT_FIELDS.len()] {
                [self.handle.to_bits() as i64, $(self.$field as i64),*]
            }
        }
    };
}

facts! {
    /// Its band.
    priority: i32,
    /// Whose it is.
    tenant: u64,
    /// Which adapter it runs with; 0 for none.
    adapter: u64,
    /// How many came before it.
    arrival: u64,
    /// When it was submitted.
    submitted_us: u64,
    /// When its next token is due, by its targets.
    due_us: u64,
    /// When it expires; 2^63 - 1 for never.
    expires_us: u64,
    /// Tokens of its prompt.
    num_prompt_tokens: u32,
    /// Output tokens that it has: more than 0 where it was preempted.
    num_output_tokens: u32,
    /// Output tokens, at most.
    max_output_tokens: u32,
    /// Output tokens that its sender thinks it will want; 0 for no idea.
    num_expected_tokens: u32,
    /// Output tokens to go, as predicted.
    num_remaining: u32,
    /// Tokens that the prefix cache does not hold.
    num_uncached: u32,
    /// Times that it was preempted.
    num_preemptions: u32,
}

/// How keys are made. All but `Fcfs` put bands of `priority` (lower runs first) before their own order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyPolicy {
    /// First come, first served; `priority` is ignored.
    Fcfs,
    /// First come, first served in each band.
    Priority,
    /// The fewest output tokens to go first: as the request's hint says, else as its tenant's lengths teach.
    Sjf,
    /// The earliest deadline of the next token first.
    Deadline,
    /// The tenant first that was served least: a virtual token counter.
    Fair,
    /// The fewest tokens that are not in the prefix cache first.
    Prefix,
    /// The lowest score first, as a policy of one's own gives it: a [`Policy`], or the caller by
    /// [`Scheduler::set_scores`](crate::Scheduler::set_scores).
    Own,
}

impl KeyPolicy {
    /// Those that there are, by number.
    pub(crate) const ALL: [Self; 7] = [
        Self::Fcfs,
        Self::Priority,
        Self::Sjf,
        Self::Deadline,
        Self::Fair,
        Self::Prefix,
        Self::Own,
    ];

    pub(crate) fn band(self, priority: i32) -> i64 {
        match self {
            Self::Fcfs => 0,
            _ => priority.into(),
        }
    }

    /// Whether a request may wait for ever while others come; in order of arrival it may not.
    pub(crate) fn may_starve(self) -> bool {
        self != Self::Fcfs
    }

    /// Whether a request behind a blocked one may enter. Under `Fair` that would let a tenant run ahead of its account.
    pub(crate) fn may_bypass(self) -> bool {
        self != Self::Fair
    }
}

/// That of `Fair` is its line's, not the request's; that of `Own` is told.
impl Policy for KeyPolicy {
    fn reads(&self) -> Reads {
        Reads {
            num_remaining: *self == Self::Sjf,
            num_uncached: *self == Self::Prefix,
        }
    }

    fn score(&self, facts: &Facts) -> i64 {
        match self {
            Self::Fcfs | Self::Priority | Self::Fair | Self::Own => 0,
            Self::Sjf => facts.num_remaining.into(),
            Self::Deadline => i64::try_from(facts.due_us).unwrap_or(i64::MAX),
            Self::Prefix => facts.num_uncached.into(),
        }
    }
}

/// A score as a key holds it: in the same order.
pub(crate) fn rank(score: i64) -> u64 {
    score as u64 ^ 1 << 63
}

/// Which of decodes and prefills a step's tokens go to first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Share {
    /// Every sequence that decodes gets its token, and prefills share what is left.
    DecodeFirst,
    /// Prefills take what they can use; decodes that are left over pause, for at most [`MAX_PAUSED_STEPS`] steps in a row.
    PrefillFirst,
}

impl Share {
    /// Those that there are, by number.
    pub(crate) const ALL: [Self; 2] = [Self::DecodeFirst, Self::PrefillFirst];
}

/// Under [`Share::PrefillFirst`]: steps in a row that leave out a sequence that could decode.
pub const MAX_PAUSED_STEPS: u32 = 8;

/// When a waiting request may enter the running set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// When the peak that the KV use of all that run will reach, by the lengths predicted for them, fits; those whose
    /// peaks would coincide enter one after another.
    Peak,
    /// When all that it may ever need fits beside all that those running may ever need: growth never preempts.
    Reserve,
    /// Whenever its prompt fits beside what resident prefills still need and a watermark; output growth is met by
    /// preemption.
    Optimistic,
    /// A baseline: a gang enters only an empty batch, with the most memory that any of it can need reserved for each.
    StaticGang,
    /// The same, with prompts padded to the longest, and finished rows computed until the gang ends.
    StaticPadded,
}

impl Admission {
    /// Those that there are, by number.
    pub(crate) const ALL: [Self; 5] = [
        Self::Peak,
        Self::Reserve,
        Self::Optimistic,
        Self::StaticGang,
        Self::StaticPadded,
    ];

    pub(crate) fn is_static(self) -> bool {
        matches!(self, Self::StaticGang | Self::StaticPadded)
    }

    /// Whether `num_needed` new blocks fit in `num_available`.
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
    pub(crate) band: core::cmp::Reverse<i64>,
    /// A band's best key goes last of it.
    pub(crate) is_band_best: bool,
    /// One that can end in the blocks that it holds, or has no more than a block's tokens to go, goes last.
    pub(crate) ends_soon: bool,
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
