//! Arguments of `plan`.

use std::path::PathBuf;

use clap::Args;

use super::PlanningArgs;

#[derive(Debug, Args)]
pub(crate) struct PlanVerbArgs {
    /// The model's folder.
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
    /// Read facts only; speeds are then assumed and said to be.
    #[arg(long)]
    pub(crate) no_measure: bool,
    /// Write the plan here as TOML.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}
