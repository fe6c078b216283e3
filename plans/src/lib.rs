//! The planning half of tierkeep: what a model is made of, what fits, where it goes, how fast it
//! is expected to be, and the two files that carry this from run to run.
//!
//! Owns the catalogue of a model (from headers alone), the budget ledger, placement, replay of
//! routing history, the estimate, and the plan and usage formats. It never probes a machine and
//! never computes on weights: `budget`, `place`, `simulate` and `estimate` are pure functions of
//! facts, so that any plan can be made for any machine.
#![forbid(unsafe_code)]

pub mod budget;
pub mod catalogue;
pub mod checks;
pub mod compare;
pub mod estimate;
pub mod explain;
pub mod inspect;
pub mod place;
pub mod plan;
pub mod planner;
pub mod ready;
pub mod simulate;
pub mod spec;
pub mod stale;
pub mod units;
pub mod usage;
pub mod what_if;
pub mod whole_file;
