//! The verb `submit`: what is refused, with the numbers, and what waits from then on.

use super::Scheduler;
use crate::ids::Handle;
use crate::prefix_cache::BlockHash;
use crate::request::{Reject, Request};
use crate::sequence::{Sequence, Standing};

impl Scheduler {
    /// Queues a request. O(prompt), plus O(log waiting).
    ///
    /// # Errors
    /// The request can never run, or the queue is full; nothing of it is kept.
    pub fn submit(&mut self, now_us: u64, request: &Request<'_>) -> Result<Handle, Reject> {
        if let Some(recorder) = &mut self.recorder {
            recorder.submit(now_us, request);
        }
        self.events.begin_silent();
        let max_output = self.admissible(request)?;
        let account = self.accounts.open(request.tenant);
        let num_tokens = request.prompt_token_ids.len() as u32 + max_output - 1;
        let standing = Standing {
            num_limit_blocks: self.config.held_blocks_for(num_tokens),
            ..Standing::new(request, account, self.next_arrival, now_us)
        };
        self.next_arrival += 1;
        let salt = self.root(request.cache_salt, request.adapter);
        let sequence = Sequence::new(request, standing, max_output, salt);
        let handle = self.arena.insert(sequence);
        self.note_deadline(handle.slot());
        if request.parked {
            self.num_parked += 1;
            self.num_queued_tokens += request.prompt_token_ids.len() as u64;
        } else {
            self.note_wait(handle.slot());
            self.enqueue(handle.slot());
        }
        Ok(handle)
    }

    /// The root of the hashes of a request's prefixes; what another adapter computed is never found.
    pub(super) fn root(&self, cache_salt: BlockHash, adapter: u64) -> BlockHash {
        if adapter == 0 {
            return cache_salt;
        }
        // No token is -1, so no prefix has this hash.
        let words = [-1, adapter as i32, (adapter >> 32) as i32];
        self.hasher.chain(cache_salt, &words)
    }

    /// The output tokens that the request may have, or why it can never run.
    fn admissible(&self, request: &Request<'_>) -> Result<u32, Reject> {
        let prompt = request.prompt_token_ids;
        let config = &self.config;
        if prompt.is_empty() {
            return Err(Reject::EmptyPrompt);
        }
        if request.max_tokens < 1 {
            return Err(Reject::MaxTokens {
                value: request.max_tokens,
            });
        }
        if prompt.len() >= config.max_model_len as usize {
            return Err(Reject::PromptTooLong {
                num_tokens: prompt.len(),
                limit: config.max_model_len - 1,
            });
        }
        if let Some(position) = config.first_foreign(prompt) {
            return Err(Reject::TokenOutOfRange {
                token: prompt[position],
                position,
                vocab_size: config.vocab_size,
            });
        }
        let room = config.max_model_len - prompt.len() as u32;
        let max_output = request.max_tokens.min(room.into()) as u32;
        // The last output token is never computed, so it needs no slot.
        let num_blocks = config.held_blocks_for(prompt.len() as u32 + max_output - 1);
        let limit = config.num_blocks - self.num_pinned_blocks();
        if num_blocks > limit {
            return Err(Reject::NeverFits { num_blocks, limit });
        }
        if self.queue.len() as u64 + u64::from(self.num_parked) >= config.max_queued.into() {
            return Err(Reject::QueueFull {
                limit: config.max_queued,
            });
        }
        let num_tokens = self.num_queued_tokens + prompt.len() as u64;
        if self.num_queued_tokens > 0 && num_tokens > config.max_queued_tokens {
            return Err(Reject::QueueTokensFull {
                num_tokens,
                limit: config.max_queued_tokens,
            });
        }
        Ok(max_output)
    }
}
