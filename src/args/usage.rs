//! Arguments of `usage`: what is remembered of a model's use, shown, taken in and put away.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::ModelArg;

const SHOW_EXAMPLES: &str = "\
Examples:
  tierkeep usage show examples/glm-nano
  tierkeep usage show MODEL --layer 3
  tierkeep usage show MODEL --counts > counts.txt";

const IMPORT_EXAMPLES: &str = "\
Examples:
  tierkeep usage import MODEL counts.txt --dry-run
  tierkeep usage import MODEL counts.txt
  tierkeep usage show OTHER --counts | tierkeep usage import MODEL -
Each line is `layer expert count`, numbers from 0, dense layers counted; # starts a comment.";

const RESET_EXAMPLES: &str = "\
Examples:
  tierkeep usage reset MODEL
  tierkeep usage reset MODEL --usage work.usage --delete";

#[derive(Debug, Args)]
pub(crate) struct UsageArgs {
    #[command(subcommand)]
    pub(crate) verb: UsageVerb,
}

/// What to do with a history.
#[derive(Debug, Subcommand)]
pub(crate) enum UsageVerb {
    /// Say what the usage history of a model holds; changes nothing.
    #[command(after_help = SHOW_EXAMPLES)]
    Show(UsageShowArgs),
    /// Take in counts of another engine, as one session.
    #[command(after_help = IMPORT_EXAMPLES)]
    Import(UsageImportArgs),
    /// Put the usage history of a model out of the way, a damaged one too.
    #[command(after_help = RESET_EXAMPLES)]
    Reset(UsageResetArgs),
}

/// Whose history.
#[derive(Debug, Args)]
pub(crate) struct HistoryArgs {
    /// A folder, or OWNER/NAME in the hub cache.
    pub(crate) model: ModelArg,
    /// The usage history. Default: .usage in the model's folder, or the user's data folder where
    /// that cannot be written.
    #[arg(long, value_name = "FILE")]
    pub(crate) usage: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct UsageShowArgs {
    #[command(flatten)]
    pub(crate) history: HistoryArgs,
    /// List the experts of this layer, the most used first.
    #[arg(long, value_name = "N")]
    pub(crate) layer: Option<u32>,
    /// Print lines of `layer expert count`, which `usage import` reads.
    #[arg(long, conflicts_with_all = ["layer", "json"])]
    pub(crate) counts: bool,
}

#[derive(Debug, Args)]
pub(crate) struct UsageImportArgs {
    #[command(flatten)]
    pub(crate) history: HistoryArgs,
    /// Lines of `layer expert count`; - reads standard input.
    pub(crate) file: PathBuf,
    /// Only say what would be taken.
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
pub(crate) struct UsageResetArgs {
    #[command(flatten)]
    pub(crate) history: HistoryArgs,
    /// Delete it instead of moving it aside.
    #[arg(long)]
    pub(crate) delete: bool,
}
