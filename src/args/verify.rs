//! Arguments of `verify`.

use clap::{Args, ValueEnum};
use tierkeep_plans::plan::Numerics;

use super::{ModelArg, PlanningArgs};

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// The model: a folder, or OWNER/NAME in the hub client's cache, with oracle.json beside the
    /// weights.
    pub(crate) model: ModelArg,
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
