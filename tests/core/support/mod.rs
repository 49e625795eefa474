//! A scripted world around the core: a null runner that knows what every KV slot holds, and a ledger of what every
//! request must get.

pub(crate) mod ledger;
pub(crate) mod runner;
pub(crate) mod seen;
mod step_check;
pub(crate) mod truth;
pub(crate) mod view;
pub(crate) mod world;

pub(crate) use ledger::Phase;
pub(crate) use runner::Breakage;
pub(crate) use seen::Seen;
pub(crate) use truth::Ask;
pub(crate) use view::StepView;
pub(crate) use world::{Pinned, World, own_score};
