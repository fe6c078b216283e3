//! Arguments of `convert`.

use std::path::PathBuf;

use clap::Args;
use tierkeep_plans::units::SizeRequest;

use super::ModelArg;

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The model: a folder, or OWNER/NAME in the hub client's cache.
    pub(crate) model: ModelArg,
    /// The folder to write; it must be new or empty.
    pub(crate) out: PathBuf,
    /// Bits of routed experts: 8, 4 or keep.
    #[arg(long, default_value = "8")]
    pub(crate) experts: tierkeep_engine::convert::Bits,
    /// Bits of attention, dense and shared feed-forward weights.
    #[arg(long, default_value = "8")]
    pub(crate) dense: tierkeep_engine::convert::Bits,
    /// Bits of the embedding and the head.
    #[arg(long, default_value = "8")]
    pub(crate) embedding: tierkeep_engine::convert::Bits,
    /// Bits of multi-token-prediction layers.
    #[arg(long, default_value = "8")]
    pub(crate) mtp: tierkeep_engine::convert::Bits,
    /// Size of an output file at most.
    #[arg(long, value_name = "SIZE")]
    pub(crate) shard: Option<SizeRequest>,
    /// Say how large the output would be; write nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
}
