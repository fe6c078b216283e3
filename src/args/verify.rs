//! Arguments of `verify`.

use clap::Args;

use super::{ModelArg, PlanningArgs};

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// The model: a folder, or OWNER/NAME in the hub client's cache, with oracle.json beside the
    /// weights.
    pub(crate) model: ModelArg,
    /// Compare the output of each decoder layer too.
    #[arg(long)]
    pub(crate) layers: bool,
    /// Slots of each layer, instead of as many as fit.
    #[arg(long, value_name = "N")]
    pub(crate) cap: Option<u32>,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
}
