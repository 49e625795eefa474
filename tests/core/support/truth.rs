//! What a request's tokens must be: a pure function of its own prefix, so that nothing that shares its batch can show.

use noria_core::Request;

/// A request as a test asks for it.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) prompt: Vec<i32>,
    pub(crate) max_tokens: i64,
    pub(crate) priority: i32,
    pub(crate) tenant: u64,
    pub(crate) expected_tokens: Option<u32>,
    pub(crate) ttft_target_us: u64,
    pub(crate) itl_target_us: u64,
    pub(crate) stop_ids: Vec<i32>,
    pub(crate) salt: u128,
    pub(crate) adapter: u64,
    pub(crate) expires_us: Option<u64>,
    pub(crate) parked: bool,
    pub(crate) host_masked: bool,
    pub(crate) reads_prefix_cache: bool,
    /// Requests of one flavour go on alike after the same tokens.
    pub(crate) flavour: u64,
    /// A step with a row of it that reaches this position fails, always.
    pub(crate) breaks_at: Option<u32>,
}

impl Ask {
    pub(crate) fn new(prompt: &[i32], max_tokens: i64) -> Self {
        Self {
            prompt: prompt.to_vec(),
            max_tokens,
            priority: 0,
            tenant: 0,
            expected_tokens: None,
            ttft_target_us: 1_000_000,
            itl_target_us: 100_000,
            stop_ids: Vec::new(),
            salt: 0,
            adapter: 0,
            expires_us: None,
            parked: false,
            host_masked: false,
            reads_prefix_cache: true,
            flavour: 0,
            breaks_at: None,
        }
    }

    /// A prompt of `num_tokens` that no other `seed` shares a block with.
    pub(crate) fn sized(seed: i32, num_tokens: usize, max_tokens: i64) -> Self {
        let prompt: Vec<i32> = (0..num_tokens as i32)
            .map(|i| 1 + (seed * 31 + i) % 97)
            .collect();
        Self {
            flavour: seed as u64,
            ..Self::new(&prompt, max_tokens)
        }
    }

    pub(crate) fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    pub(crate) fn tenant(mut self, tenant: u64) -> Self {
        self.tenant = tenant;
        self
    }

    pub(crate) fn adapter(mut self, adapter: u64) -> Self {
        self.adapter = adapter;
        self
    }

    pub(crate) fn request(&self) -> Request<'_> {
        Request {
            prompt_token_ids: &self.prompt,
            max_tokens: self.max_tokens,
            priority: self.priority,
            tenant: self.tenant,
            expected_tokens: self.expected_tokens,
            ttft_target_us: self.ttft_target_us,
            itl_target_us: self.itl_target_us,
            stop_token_ids: &self.stop_ids,
            cache_salt: self.salt,
            adapter: self.adapter,
            expires_us: self.expires_us,
            parked: self.parked,
            host_masked: self.host_masked,
            reads_prefix_cache: self.reads_prefix_cache,
        }
    }
}

/// splitmix64's finaliser.
pub(crate) fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// What a KV slot holds: all tokens up to its own, within a salt.
pub(crate) fn stored(before: u64, token: i32) -> u64 {
    mixed(before ^ mixed(token as u64))
}

/// A request's whole true stream of tokens, as far as anyone has asked.
#[derive(Debug)]
pub(crate) struct Truth {
    pub(crate) ask: Ask,
    vocab_size: u32,
    tokens: Vec<i32>,
    /// Of each token: what its KV slot must hold.
    kv: Vec<u64>,
    /// The same whatever the salt.
    prefix: u64,
}

impl Truth {
    pub(crate) fn new(ask: &Ask, vocab_size: u32) -> Self {
        let mut truth = Self {
            ask: ask.clone(),
            vocab_size,
            tokens: Vec::new(),
            kv: Vec::new(),
            prefix: 1,
        };
        for &token in &ask.prompt {
            truth.push(token);
        }
        truth
    }

    fn push(&mut self, token: i32) {
        let before = self.kv.last().copied().unwrap_or_else(|| self.root());
        self.kv.push(stored(before, token));
        self.prefix = stored(self.prefix, token);
        self.tokens.push(token);
    }

    fn root(&self) -> u64 {
        mixed(mixed(self.ask.salt as u64 ^ 0x5a17) ^ self.ask.adapter)
    }

    fn reach(&mut self, len: usize) {
        while self.tokens.len() < len {
            let token = mixed(self.prefix ^ self.ask.flavour) % u64::from(self.vocab_size);
            self.push(token as i32);
        }
    }

    pub(crate) fn num_prompt(&self) -> u32 {
        self.ask.prompt.len() as u32
    }

    /// The token at `position`, prompt first.
    pub(crate) fn token(&mut self, position: usize) -> i32 {
        self.reach(position + 1);
        self.tokens[position]
    }

    /// What the slot of the token at `position` holds.
    pub(crate) fn kv(&mut self, position: usize) -> u64 {
        self.reach(position + 1);
        self.kv[position]
    }

    /// What is stored before `position`.
    pub(crate) fn kv_before(&mut self, position: usize) -> u64 {
        if position == 0 {
            self.root()
        } else {
            self.kv(position - 1)
        }
    }
}
