//! Arguments of `plan`.

use std::path::PathBuf;

use clap::Args;
use tierkeep_plans::what_if::WhatIf;

use super::{ModelArg, PlanningArgs, RemoteArgs};

/// Heading of what is done instead of planning.
const INSTEAD: &str = "Instead of planning";
/// Heading of which machine is planned for.
const MACHINE: &str = "Machine";

#[derive(Debug, Args)]
pub(crate) struct PlanVerbArgs {
    /// A folder, OWNER/NAME in the hub client's cache, hf:OWNER/NAME[@REVISION] or an https URL; of
    /// the last two only config and headers are fetched. A plan file is shown, or explained.
    #[arg(value_name = "MODEL|PLAN", required_unless_present_any = ["check", "diff"])]
    pub(crate) model: Option<ModelArg>,
    /// Write the plan here as TOML; - is standard output.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Read facts only; speeds are then assumed and said to be.
    #[arg(long, help_heading = MACHINE)]
    pub(crate) no_measure: bool,
    /// Plan for another machine, from the facts that `tierkeep doctor --save FILE` wrote there.
    /// Nothing of this machine is looked at.
    #[arg(long, value_name = "FILE", help_heading = MACHINE)]
    pub(crate) machine: Option<PathBuf>,
    /// Plan for a machine that differs: ram=64GB, vram=24GB or 4x48GB, disk=7GB/s, mem=60GB/s
    /// (reads of memory), vmem=900GB/s (reads of a card's memory), link=25GB/s, cores=16.
    #[arg(long, value_name = "CHANGES", help_heading = MACHINE)]
    pub(crate) what_if: Option<WhatIf>,
    /// Whether a plan still holds for its model (or for MODEL) and this machine as they are now.
    /// Measures nothing. Exit code 1 where it does not.
    #[arg(
        long,
        value_name = "PLAN",
        help_heading = INSTEAD,
        conflicts_with_all = ["diff", "explain", "output", "what_if", "no_measure", "PlanningArgs"]
    )]
    pub(crate) check: Option<PathBuf>,
    /// In what two plans differ. Exit code 0 either way.
    #[arg(
        long,
        num_args = 2,
        value_names = ["A", "B"],
        help_heading = INSTEAD,
        conflicts_with_all = [
            "model", "explain", "output", "what_if", "machine", "no_measure", "PlanningArgs",
        ]
    )]
    pub(crate) diff: Option<Vec<PathBuf>>,
    /// Where an expert (LAYER:EXPERT) or a tensor (its published name) lives in the plan of MODEL or
    /// in PLAN, why, and what it costs when it is not there.
    #[arg(long, value_name = "WHAT", help_heading = INSTEAD, conflicts_with = "output")]
    pub(crate) explain: Option<String>,
    #[command(flatten)]
    pub(crate) remote: RemoteArgs,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
}
