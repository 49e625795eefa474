//! What was asked, and why it may be refused or end.

/// A request as [`Scheduler::submit`](crate::Scheduler::submit) takes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The prompt; not empty.
    pub prompt_token_ids: &'a [i32],
    /// Output tokens, at most; cut to what the context leaves after the prompt.
    pub max_tokens: i64,
    /// The band, but under [`KeyPolicy::Fcfs`](crate::KeyPolicy::Fcfs); lower runs first.
    pub priority: i32,
    /// Whose it is: for the account under [`KeyPolicy::Fair`](crate::KeyPolicy::Fair), and for the lengths that predict.
    pub tenant: u64,
    /// Output tokens that it will want, as its sender thinks; it moves order and admission, and nothing else.
    pub expected_tokens: Option<u32>,
    /// How long it may wait for its first token, under [`KeyPolicy::Deadline`](crate::KeyPolicy::Deadline).
    pub ttft_target_us: u64,
    /// How long it may wait for each one more.
    pub itl_target_us: u64,
    /// Output ids that end the request; they count as output.
    pub stop_token_ids: &'a [i32],
    /// Requests share KV only within a salt.
    pub cache_salt: u128,
    /// Which of the model's adapters it runs with; 0 for none. KV is shared only within one.
    pub adapter: u64,
    /// When it ends as [`FinishReason::Expired`] if it has not ended by then.
    pub expires_us: Option<u64>,
    /// Waits out of line until unparked.
    pub parked: bool,
    /// Its logits are edited on the host between forward and sample.
    pub host_masked: bool,
    /// Whether blocks that other requests filled may stand for its own.
    pub reads_prefix_cache: bool,
}

impl<'a> Request<'a> {
    /// A plain request.
    pub fn new(prompt_token_ids: &'a [i32], max_tokens: i64) -> Self {
        Self {
            prompt_token_ids,
            max_tokens,
            priority: 0,
            tenant: 0,
            expected_tokens: None,
            ttft_target_us: 1_000_000,
            itl_target_us: 100_000,
            stop_token_ids: &[],
            cache_salt: 0,
            adapter: 0,
            expires_us: None,
            parked: false,
            host_masked: false,
            reads_prefix_cache: true,
        }
    }
}

/// Why a request was refused. Nothing of it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reject {
    /// The prompt has no tokens.
    EmptyPrompt,
    /// A prompt id is not in the vocabulary.
    TokenOutOfRange {
        /// The id.
        token: i32,
        /// Where it stands in the prompt.
        position: usize,
        /// The vocabulary's size.
        vocab_size: u32,
    },
    /// The prompt leaves no room for an output token.
    PromptTooLong {
        /// Its tokens.
        num_tokens: usize,
        /// The most that leave room.
        limit: u32,
    },
    /// `max_tokens` is below 1.
    MaxTokens {
        /// What was given.
        value: i64,
    },
    /// Prompt and output need more blocks than the pool has, but for those that are pinned.
    NeverFits {
        /// What it would need.
        num_blocks: u32,
        /// What there is.
        limit: u32,
    },
    /// As many requests wait as may.
    QueueFull {
        /// How many may.
        limit: u32,
    },
    /// With its prompt, more tokens would wait than may.
    QueueTokensFull {
        /// How many would.
        num_tokens: u64,
        /// How many may.
        limit: u64,
    },
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FinishReason {
    /// It sampled one of its stop ids, or the text side found a stop.
    Stop = 0,
    /// It has all the tokens it may have.
    Length = 1,
    /// The client quit.
    Abort = 2,
    /// The runner failed on it alone, or gave no token where it had to.
    Error = 3,
    /// It waited too long.
    Expired = 4,
}

impl FinishReason {
    /// The reason with this number.
    pub fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            0 => Self::Stop,
            1 => Self::Length,
            2 => Self::Abort,
            3 => Self::Error,
            4 => Self::Expired,
            _ => return None,
        })
    }
}
