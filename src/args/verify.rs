//! Arguments of `verify`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tierkeep_plans::plan::Numerics;

use super::PlanningArgs;

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// The model's folder, with oracle.json beside the weights.
    pub(crate) model: PathBuf,
    /// Compare the output of each decoder layer too.
    #[arg(long)]
    pub(crate) layers: bool,
    /// How activations are computed.
    #[arg(long, default_value = "exact")]
    pub(crate) numerics: NumericsName,
    /// Slots of each layer, instead of as many as fit.
    #[arg(long, value_name = "N")]
    pub(crate) cap: Option<u32>,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum NumericsName {
    /// Float activations on stored weights.
    Exact,
}

impl From<NumericsName> for Numerics {
    fn from(name: NumericsName) -> Self {
        match name {
            NumericsName::Exact => Self::Exact,
        }
    }
}
