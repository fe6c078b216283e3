//! The engine: executes exactly the plan that it is given, within its ledger.
//!
//! [`Engine`] is a loaded model with one sequence. [`text`] turns text into tokens and back,
//! [`convert`] writes containers. Nothing here prints, probes hardware or reads the environment.
#![forbid(unsafe_code)]

// What tests share names this crate as they do from outside.
#[cfg(test)]
extern crate self as tierkeep_engine;

mod attention;
pub mod bench;
pub mod compare;
mod compute;
pub mod convert;
mod counters;
pub mod disk;
mod engine;
mod error;
mod expert_batch;
mod expert_products;
mod feed_forward;
pub mod generate;
mod kv;
mod lanes;
mod memory;
pub mod payload;
mod profile;
pub mod report;
mod rope;
mod router;
mod shard_io;
mod store;
mod support;
pub mod text;
mod threads;
pub mod verify;
mod weights;
mod window;
mod workspace;

pub use counters::{AccessCounts, Counters, Phase, ReadCounts, Reads, Tier, WindowReads};
pub use engine::{ABILITIES, Engine, Loading, Observer, Unobserved};
pub use error::EngineError;
pub use memory::MemoryError;
pub use profile::{PhaseProfile, ProfileReport, Stage, StageProfile};
pub use shard_io::{ReadCounter, ReadError};
pub use support::{Unsupported, instruction_sets, supports};
pub use tierkeep_kernels::trial;
