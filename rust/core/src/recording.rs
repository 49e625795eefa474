//! A recording is the configuration with its checksum, and every verb in order, as little-endian bytes; replaying one
//! gives the same plans.

use alloc::vec;
use alloc::vec::Vec;

use xxhash_rust::xxh3::xxh3_64;

use crate::config::{Config, ConfigError};
use crate::ids::{Handle, PinId, StepId};
use crate::layout::digest;
use crate::policy::{Admission, KeyPolicy, Share};
use crate::request::{FinishReason, Request};
use crate::scheduler::{Drafts, Planned, Scheduler};

const MAGIC: [u8; 8] = *b"noria\0r5";

const SUBMIT: u8 = 1;
const PLAN: u8 = 2;
const COMMIT: u8 = 3;
const FAIL: u8 = 4;
const FINISH: u8 = 5;
const UNPARK: u8 = 6;
const RESET_PREFIX_CACHE: u8 = 7;
const SCORES: u8 = 8;
const PIN: u8 = 9;
const UNPIN: u8 = 10;
const RESIZE: u8 = 32;

/// Writes verbs as they come.
#[derive(Debug)]
pub(crate) struct Recorder {
    bytes: Vec<u8>,
}

impl Recorder {
    pub(crate) fn new(config: &Config) -> Self {
        let mut recorder = Self {
            bytes: MAGIC.to_vec(),
        };
        for value in [
            config.num_blocks,
            config.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            config.vocab_size,
            config.depth,
            config.max_drafts,
            config.max_partial_prefills,
            config.long_prefill_token_threshold,
            u32::from(config.enable_prefix_caching),
            config.watermark_blocks,
            config.key as u32,
            config.admission as u32,
            config.peak_percent,
            config.share as u32,
            config.step_target_us,
            config.max_adapters,
            config.max_prefix_waits,
            config.max_queued,
            config.ageing_steps,
            config.max_bypasses,
            config.max_preemptions,
            config.fair_input_weight,
            config.fair_output_weight,
            config.num_records,
            config.max_moves,
            config.forced_moves,
            u32::from(config.contiguous),
            config.num_kv_events,
            config.window,
            config.num_swap_blocks,
        ] {
            recorder.u64(value.into());
        }
        recorder.u64(config.max_queued_tokens);
        recorder.u64(config.hash_seed);
        recorder.u64(xxh3_64(&recorder.bytes));
        recorder
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    fn list(&mut self, values: &[i32]) {
        self.u64(values.len() as u64);
        for value in values {
            self.bytes.extend_from_slice(&value.to_le_bytes());
        }
    }

    fn verb(&mut self, verb: u8, now_us: u64) {
        self.bytes.push(verb);
        self.u64(now_us);
    }

    pub(crate) fn submit(&mut self, now_us: u64, request: &Request<'_>) {
        self.verb(SUBMIT, now_us);
        self.list(request.prompt_token_ids);
        self.u64(request.max_tokens as u64);
        self.u64(i64::from(request.priority) as u64);
        self.u64(request.tenant);
        self.u64(request.expected_tokens.map_or(0, |num| 1 + u64::from(num)));
        self.u64(request.ttft_target_us);
        self.u64(request.itl_target_us);
        self.list(request.stop_token_ids);
        self.bytes
            .extend_from_slice(&request.cache_salt.to_le_bytes());
        self.u64(request.adapter);
        self.u64(request.expires_us.unwrap_or(u64::MAX));
        self.bytes.extend(
            [
                request.parked,
                request.host_masked,
                request.reads_prefix_cache,
            ]
            .map(u8::from),
        );
    }

    pub(crate) fn plan(&mut self, now_us: u64, drafts: &Drafts<'_>) {
        self.verb(PLAN, now_us);
        self.u64(drafts.handles.len() as u64);
        for handle in drafts.handles {
            self.u64(handle.to_bits());
        }
        self.list(drafts.counts);
        self.bytes.push(u8::from(drafts.ids.is_some()));
        self.list(drafts.ids.unwrap_or(&[]));
    }

    pub(crate) fn commit(
        &mut self,
        step: StepId,
        num_ids: &[i32],
        ids: &[i32],
        device_us: u64,
        now_us: u64,
    ) {
        self.verb(COMMIT, now_us);
        self.u64(step.0);
        self.list(num_ids);
        self.list(ids);
        self.u64(device_us);
    }

    pub(crate) fn fail(&mut self, step: StepId, now_us: u64) {
        self.verb(FAIL, now_us);
        self.u64(step.0);
    }

    pub(crate) fn finish(
        &mut self,
        handle: Handle,
        num_output_tokens: u32,
        reason: FinishReason,
        now_us: u64,
    ) {
        self.verb(FINISH, now_us);
        self.u64(handle.to_bits());
        self.u64(num_output_tokens.into());
        self.bytes.push(reason as u8);
    }

    pub(crate) fn unpark(&mut self, handle: Handle, now_us: u64) {
        self.verb(UNPARK, now_us);
        self.u64(handle.to_bits());
    }

    pub(crate) fn reset_prefix_cache(&mut self, now_us: u64) {
        self.verb(RESET_PREFIX_CACHE, now_us);
    }

    pub(crate) fn scores(&mut self, handles: &[Handle], scores: &[i64], now_us: u64) {
        self.verb(SCORES, now_us);
        self.u64(handles.len() as u64);
        for (handle, score) in handles.iter().zip(scores) {
            self.u64(handle.to_bits());
            self.u64(*score as u64);
        }
    }

    pub(crate) fn pin(&mut self, token_ids: &[i32], cache_salt: u128, adapter: u64, now_us: u64) {
        self.verb(PIN, now_us);
        self.list(token_ids);
        self.bytes.extend_from_slice(&cache_salt.to_le_bytes());
        self.u64(adapter);
    }

    pub(crate) fn unpin(&mut self, pin: PinId, now_us: u64) {
        self.verb(UNPIN, now_us);
        self.u64(pin.0);
    }

    pub(crate) fn resize(&mut self, num_blocks: u32, now_us: u64) {
        self.verb(RESIZE, now_us);
        self.u64(num_blocks.into());
    }
}

/// Why a recording cannot be replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayError {
    /// It is not one, or was cut.
    Malformed {
        /// The byte where it stops making sense.
        at: usize,
    },
    /// Its configuration is out of range.
    Config(ConfigError),
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn malformed<T>(&self) -> Result<T, ReplayError> {
        Err(ReplayError::Malformed { at: self.at })
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], ReplayError> {
        let end = self.at.checked_add(len);
        let Some(taken) = end.and_then(|end| self.bytes.get(self.at..end)) else {
            return self.malformed();
        };
        self.at += len;
        Ok(taken)
    }

    fn u8(&mut self) -> Result<u8, ReplayError> {
        Ok(self.take(1)?[0])
    }

    fn u64(&mut self) -> Result<u64, ReplayError> {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(self.take(8)?);
        Ok(u64::from_le_bytes(bytes))
    }

    fn u32(&mut self) -> Result<u32, ReplayError> {
        u32::try_from(self.u64()?).or_else(|_| self.malformed())
    }

    fn u128(&mut self) -> Result<u128, ReplayError> {
        let low = self.u64()?;
        Ok(u128::from(self.u64()?) << 64 | u128::from(low))
    }

    fn list(&mut self) -> Result<Vec<i32>, ReplayError> {
        let len = self.u64()?;
        let Some(len) = usize::try_from(len).ok().and_then(|len| len.checked_mul(4)) else {
            return self.malformed();
        };
        let bytes = self.take(len)?;
        Ok(bytes
            .chunks_exact(4)
            .map(|word| i32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect())
    }

    /// One of a few, by its number.
    fn choice<T: Copy>(&mut self, all: &[T]) -> Result<T, ReplayError> {
        let number = self.u32()? as usize;
        all.get(number)
            .copied()
            .map_or_else(|| self.malformed(), Ok)
    }

    fn config(&mut self) -> Result<Config, ReplayError> {
        if self.take(MAGIC.len())? != MAGIC {
            self.at = 0;
            return self.malformed();
        }
        let mut config = Config {
            num_blocks: self.u32()?,
            block_size: self.u32()?,
            max_num_seqs: self.u32()?,
            max_num_batched_tokens: self.u32()?,
            max_model_len: self.u32()?,
            vocab_size: self.u32()?,
            depth: self.u32()?,
            max_drafts: self.u32()?,
            max_partial_prefills: self.u32()?,
            long_prefill_token_threshold: self.u32()?,
            enable_prefix_caching: self.u32()? != 0,
            watermark_blocks: self.u32()?,
            key: self.choice(&KeyPolicy::ALL)?,
            admission: self.choice(&Admission::ALL)?,
            peak_percent: self.u32()?,
            share: self.choice(&Share::ALL)?,
            step_target_us: self.u32()?,
            max_adapters: self.u32()?,
            max_prefix_waits: self.u32()?,
            max_queued: self.u32()?,
            ageing_steps: self.u32()?,
            max_bypasses: self.u32()?,
            max_preemptions: self.u32()?,
            fair_input_weight: self.u32()?,
            fair_output_weight: self.u32()?,
            num_records: self.u32()?,
            max_moves: self.u32()?,
            forced_moves: self.u32()?,
            contiguous: self.u32()? != 0,
            num_kv_events: self.u32()?,
            window: self.u32()?,
            num_swap_blocks: self.u32()?,
            max_queued_tokens: 0,
            hash_seed: 0,
        };
        config.max_queued_tokens = self.u64()?;
        config.hash_seed = self.u64()?;
        // Its numbers size the pool, so a wrong one is not to be tried.
        let checksum = xxh3_64(&self.bytes[..self.at]);
        if self.u64()? != checksum {
            return self.malformed();
        }
        Ok(config)
    }
}

/// Runs a recording in a fresh scheduler.
///
/// Returns a digest of what each planned step wrote to its buffer, in order.
///
/// # Errors
/// The bytes are not a whole recording.
pub fn replay(recording: &[u8]) -> Result<Vec<u64>, ReplayError> {
    let mut reader = Reader {
        bytes: recording,
        at: 0,
    };
    let config = reader.config()?;
    let mut scheduler = Scheduler::new(config).map_err(ReplayError::Config)?;
    let mut buffer = vec![0; scheduler.layout().size];
    let mut digests = Vec::new();
    while reader.at < recording.len() {
        if let Some(digest) = replay_verb(&mut reader, &mut scheduler, &mut buffer)? {
            digests.push(digest);
        }
    }
    Ok(digests)
}

fn replay_verb(
    reader: &mut Reader<'_>,
    scheduler: &mut Scheduler,
    buffer: &mut [i32],
) -> Result<Option<u64>, ReplayError> {
    let verb = reader.u8()?;
    let now_us = reader.u64()?;
    match verb {
        SUBMIT => {
            let prompt = reader.list()?;
            let max_tokens = reader.u64()? as i64;
            let priority = reader.u64()? as i32;
            let tenant = reader.u64()?;
            let expected_tokens = match reader.u64()? {
                0 => None,
                more => match u32::try_from(more - 1) {
                    Ok(num) => Some(num),
                    Err(_) => return reader.malformed(),
                },
            };
            let (ttft_target_us, itl_target_us) = (reader.u64()?, reader.u64()?);
            let stop_ids = reader.list()?;
            let request = Request {
                prompt_token_ids: &prompt,
                max_tokens,
                priority,
                tenant,
                expected_tokens,
                ttft_target_us,
                itl_target_us,
                stop_token_ids: &stop_ids,
                cache_salt: reader.u128()?,
                adapter: reader.u64()?,
                expires_us: Some(reader.u64()?).filter(|&at| at < u64::MAX),
                parked: reader.u8()? != 0,
                host_masked: reader.u8()? != 0,
                reads_prefix_cache: reader.u8()? != 0,
            };
            // A reject was one when it was recorded, and leaves no trace.
            let _ = scheduler.submit(now_us, &request);
        }
        PLAN => {
            let num_handles = reader.u64()?;
            let handles = (0..num_handles)
                .map(|_| reader.u64().map(Handle::from_bits))
                .collect::<Result<Vec<_>, _>>()?;
            let counts = reader.list()?;
            let has_ids = reader.u8()? != 0;
            let ids = reader.list()?;
            let drafts = Drafts {
                handles: &handles,
                counts: &counts,
                ids: has_ids.then_some(ids.as_slice()),
            };
            if let Planned::Step(_) = scheduler.plan(now_us, &drafts, buffer) {
                return Ok(Some(digest(scheduler.layout(), buffer)));
            }
        }
        COMMIT => {
            let step = StepId(reader.u64()?);
            let (num_ids, ids) = (reader.list()?, reader.list()?);
            let device_us = reader.u64()?;
            let _ = scheduler.commit(step, &num_ids, &ids, device_us, now_us);
        }
        FAIL => scheduler.fail(StepId(reader.u64()?), now_us),
        FINISH => {
            let handle = Handle::from_bits(reader.u64()?);
            let num_output_tokens = reader.u32()?;
            let Some(reason) = FinishReason::from_code(reader.u8()?) else {
                return reader.malformed();
            };
            scheduler.finish(handle, num_output_tokens, reason, now_us);
        }
        UNPARK => {
            scheduler.unpark(Handle::from_bits(reader.u64()?), now_us);
        }
        RESET_PREFIX_CACHE => {
            scheduler.reset_prefix_cache(now_us);
        }
        SCORES => {
            let (mut handles, mut scores) = (Vec::new(), Vec::new());
            for _ in 0..reader.u64()? {
                handles.push(Handle::from_bits(reader.u64()?));
                scores.push(reader.u64()? as i64);
            }
            scheduler.set_scores(&handles, &scores, now_us);
        }
        PIN => {
            let token_ids = reader.list()?;
            let (cache_salt, adapter) = (reader.u128()?, reader.u64()?);
            let _ = scheduler.pin(&token_ids, cache_salt, adapter, now_us);
        }
        UNPIN => {
            scheduler.unpin(PinId(reader.u64()?), now_us);
        }
        RESIZE => {
            let num_blocks = reader.u32()?;
            // A refusal was one when it was recorded.
            let _ = scheduler.resize(num_blocks, now_us);
        }
        _ => return reader.malformed(),
    }
    Ok(None)
}
