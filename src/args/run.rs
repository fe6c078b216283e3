//! Arguments of `run`.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::{ModelArg, PlanningArgs};

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// A plan file, or a model to plan first: a folder, or OWNER/NAME in the hub cache.
    #[arg(value_name = "PLAN|MODEL")]
    pub(crate) target: ModelArg,
    /// The prompt; - reads standard input.
    #[arg(
        short,
        long,
        value_name = "TEXT",
        conflicts_with = "ids",
        required_unless_present = "ids"
    )]
    pub(crate) prompt: Option<String>,
    /// The prompt as token ids, for models without a tokenizer: 1,2,3 or @FILE; - reads standard
    /// input. In a file they stand between commas, blanks or line breaks.
    #[arg(long, value_name = "IDS")]
    pub(crate) ids: Option<Ids>,
    /// Give the prompt to the model as it is, without its chat template.
    #[arg(long, conflicts_with = "ids")]
    pub(crate) raw: bool,
    /// Text of a system message before the prompt.
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["ids", "raw"])]
    pub(crate) system: Option<String>,
    /// Most tokens to generate.
    #[arg(short = 'n', long, default_value_t = 256, value_name = "TOKENS")]
    pub(crate) max_tokens: usize,
    /// Where the model is, if it has moved since the plan was made.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<ModelArg>,
    /// Neither read nor write a usage history.
    #[arg(long, conflicts_with = "usage")]
    pub(crate) no_usage: bool,
    /// Tokens between two savings of the usage history while the run goes on. Default: 256, or as
    /// many as take a minute; saving takes at most a hundredth of the time.
    #[arg(long, value_name = "TOKENS", conflicts_with = "no_usage")]
    pub(crate) save_every: Option<NonZeroU64>,
    /// Generate on after stop tokens.
    #[arg(long)]
    pub(crate) ignore_stop: bool,
    /// Show hits of every layer at the end.
    #[arg(long)]
    pub(crate) layers: bool,
    /// Measure where a token's time goes, by stage of a pass, and show it at the end.
    #[arg(long)]
    pub(crate) profile: bool,
    /// Write the report as JSON to this file too.
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Read facts only; speeds are then assumed and said to be.
    #[arg(long)]
    pub(crate) no_measure: bool,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
}

/// Token ids, or where they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ids {
    List(Vec<u32>),
    File(PathBuf),
    Input,
}

impl FromStr for Ids {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "-" {
            return Ok(Self::Input);
        }
        if text == "@" {
            anyhow::bail!("@ stands before the name of a file, and there is none");
        }
        if let Some(path) = text.strip_prefix('@') {
            return Ok(Self::File(PathBuf::from(path)));
        }
        let ids = text.split(',').map(|id| id.trim().parse());
        Ok(Self::List(ids.collect::<Result<_, _>>()?))
    }
}
