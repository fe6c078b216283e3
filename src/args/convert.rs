//! Arguments of `convert`.

use std::path::PathBuf;

use clap::Args;
use tierkeep_engine::convert::{Choices, OptionError, group_from_text, scale_from_text};
use tierkeep_plans::catalogue::container::ContainerClass;
use tierkeep_plans::catalogue::{Group, ScaleType};
use tierkeep_plans::units::SizeRequest;

use super::ModelArg;

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The model: a folder, or OWNER/NAME in the hub client's cache.
    pub(crate) model: ModelArg,
    /// The folder to write: new, empty, or with an unfinished conversion by the same command, which goes
    /// on.
    pub(crate) out: PathBuf,
    /// Bits of routed experts: 8, 4, 2, 16 or keep; parts apart as gate, up or down.
    #[arg(long, default_value = "8", value_name = "BITS", value_parser = experts)]
    pub(crate) experts: Choices,
    /// Bits of attention, dense and shared feed-forward weights; parts apart as attention, indexer,
    /// ffn, shared, or one projection of them such as attention.output or shared.down.
    #[arg(long, default_value = "8", value_name = "BITS", value_parser = dense)]
    pub(crate) dense: Choices,
    /// Bits of the embedding and the head; parts apart as embedding or head.
    #[arg(long, default_value = "8", value_name = "BITS", value_parser = embedding)]
    pub(crate) embedding: Choices,
    /// Bits of multi-token-prediction layers; parts apart as those of the others, as experts or input.
    #[arg(long, default_value = "8", value_name = "BITS", value_parser = mtp)]
    pub(crate) mtp: Choices,
    /// Columns of a row that share a scale: row (all of them), 128, 64 or 32.
    #[arg(long, default_value = "64", value_parser = group_from_text)]
    pub(crate) group: Group,
    /// How scales are stored: f32, or f16, rounded before the weights are divided by it.
    #[arg(long, default_value = "f16", value_parser = scale_from_text)]
    pub(crate) scales: ScaleType,
    /// Size of an output file at most.
    #[arg(long, value_name = "SIZE")]
    pub(crate) shard: Option<SizeRequest>,
    /// Threads that convert, instead of one for each core.
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<std::num::NonZeroUsize>,
    /// Say how large the output would be, how long it would take and how it would run; write nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Delete each weight file of MODEL once everything that needs anything of it is written and read
    /// back. Nothing else of MODEL is deleted.
    #[arg(long)]
    pub(crate) consume: bool,
    /// Read each file back from the disk and compare it before it gets its name; --consume always does.
    #[arg(long)]
    pub(crate) read_back: bool,
    /// Begin anew where OUT holds an unfinished conversion.
    #[arg(long, conflicts_with = "consume")]
    pub(crate) restart: bool,
}

fn experts(text: &str) -> Result<Choices, OptionError> {
    Choices::from_text(ContainerClass::Experts, text)
}

fn dense(text: &str) -> Result<Choices, OptionError> {
    Choices::from_text(ContainerClass::Dense, text)
}

fn embedding(text: &str) -> Result<Choices, OptionError> {
    Choices::from_text(ContainerClass::Embedding, text)
}

fn mtp(text: &str) -> Result<Choices, OptionError> {
    Choices::from_text(ContainerClass::Mtp, text)
}
