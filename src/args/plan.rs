//! Arguments of `plan`.

use std::path::PathBuf;

use clap::Args;

use super::{ModelArg, PlanningArgs, RemoteArgs};

#[derive(Debug, Args)]
pub(crate) struct PlanVerbArgs {
    /// A folder, OWNER/NAME in the hub client's cache, hf:OWNER/NAME[@REVISION] or an https URL.
    /// Of the last two only config and headers are fetched.
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
    /// Read facts only; speeds are then assumed and said to be.
    #[arg(long)]
    pub(crate) no_measure: bool,
    /// Write the plan here as TOML.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) remote: RemoteArgs,
}
