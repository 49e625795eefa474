//! The decision core of noria: which sequences run in the next step, and which KV blocks they use.
//!
//! [`Scheduler`] is a pure state machine of six verbs, driven by its caller: `submit`, `plan`, `commit`, `fail`,
//! `finish`, `update`. It knows no clock, thread, file or device, and the same verbs give the same plans on every
//! machine. A plan is written to a flat `i32` buffer ([`StepLayout`] says where everything lies), which
//! [`expand`](crate::expand::expand) turns into the arrays that a model reads.
//!
//! ```
//! use noria_core::{Config, Drafts, Planned, Request, Scheduler};
//!
//! let mut core = Scheduler::new(Config { num_blocks: 8, ..Config::default() }).unwrap();
//! let mut buffer = vec![0; core.layout().size];
//! let handle = core.submit(0, &Request::new(&[5, 6, 7], 2)).unwrap();
//! let Planned::Step(step) = core.plan(1, &Drafts::none(), &mut buffer) else { panic!() };
//! core.commit(step, &[1], &[42], 100, 2).unwrap();
//! assert_eq!(core.events().last().unwrap().handle, handle);
//! ```
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod accounts;
mod arena;
mod block_pool;
mod check;
mod config;
mod cost;
mod event;
pub mod expand;
mod host_pool;
mod ids;
mod kv;
mod kv_events;
mod kv_figures;
mod layout;
mod policy;
mod predict;
mod prefix_cache;
mod queue;
mod record;
mod recording;
mod request;
mod scheduler;
mod sequence;
mod step;

pub use block_pool::BlockPool;
pub use config::{Config, ConfigError};
pub use event::{Event, EventKind};
pub use ids::{BlockId, Handle, PinId, Seat, StepId};
pub use kv::Kv;
pub use kv_events::{KvEvent, KvEventKind, KvEvents};
pub use kv_figures::KvFigures;
pub use layout::{StepLayout, digest, flags, header};
pub use policy::{
    Admission, FACT_FIELDS, Facts, KeyPolicy, MAX_PAUSED_STEPS, Policy, Reads, Share,
};
pub use prefix_cache::{BlockHash, ChainHasher, PrefixCache};
pub use record::{RECORD_FIELDS, StepRecord};
pub use recording::{ReplayError, replay};
pub use request::{FinishReason, Reject, Request};
pub use scheduler::{CommitError, Drafts, PinError, Planned, ResizeError, Scheduler};
