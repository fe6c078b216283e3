//! Arguments of `convert`.

use std::path::PathBuf;

use clap::Args;
use tierkeep_plans::catalogue::{Group, ScaleType};
use tierkeep_plans::units::SizeRequest;

use super::ModelArg;

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The model: a folder, or OWNER/NAME in the hub client's cache.
    pub(crate) model: ModelArg,
    /// The folder to write; it must be new or empty.
    pub(crate) out: PathBuf,
    /// Bits of routed experts: 8, 4, 2 or keep.
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
    /// Columns of a row that share a scale: row (all of them), 128, 64 or 32.
    #[arg(long, default_value = "row", value_parser = tierkeep_engine::convert::group_from_text)]
    pub(crate) group: Group,
    /// How scales are stored: f32, or f16, rounded before the weights are divided by it.
    #[arg(long, default_value = "f32", value_parser = tierkeep_engine::convert::scale_from_text)]
    pub(crate) scales: ScaleType,
    /// Size of an output file at most.
    #[arg(long, value_name = "SIZE")]
    pub(crate) shard: Option<SizeRequest>,
    /// Say how large the output would be; write nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
}
