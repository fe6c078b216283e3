//! Arguments of the hidden verb that executes instructions.

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct TrialArgs {
    /// Instruction sets, by Rust's names.
    #[arg(value_name = "SET")]
    pub(crate) sets: Vec<String>,
}
