//! What would help: the same request planned again for a machine or a model that differs in one thing.

use serde::Serialize;
use tierkeep_doctor::{Fact, Facts, GpuFact};

use super::{Options, Solved};
use crate::budget::ModelBytes;
use crate::catalogue::Catalogue;
use crate::plan::Plan;
use crate::units::{Bytes, SizeRequest};
use crate::usage::History;

/// One thing that could be different.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// 8 GB more main memory, in the machine and in the budget.
    MoreRam,
    /// 8 GB more graphics memory: on the first card, or on a card that is not there yet.
    MoreVram,
    /// A disk of twice the speed.
    FasterDisk,
    /// Routed experts stored at 4 bits.
    FewerBits,
    /// Half the context.
    HalfContext,
}

/// What one change would bring.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// The change.
    pub change: Change,
    /// In words, for people.
    pub what: String,
    /// Tokens/s at the median as planned.
    pub tokens_per_s_before: f64,
    /// Tokens/s at the median with the change.
    pub tokens_per_s_after: f64,
    /// After over before.
    pub ratio: f64,
    /// What else is to be known.
    pub note: String,
}

/// Placeholder until the changes are computed.
#[must_use]
pub fn what_would_help(
    model: &Catalogue,
    plan: &Plan,
    options: &Options,
    history: Option<&History>,
) -> Vec<Advice> {
    let _ = (model, plan, options, history, ModelBytes::of(model));
    let _: Option<(Fact<u64>, Facts, GpuFact, SizeRequest, Bytes, Solved)> = None;
    Vec::new()
}
