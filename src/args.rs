//! The arguments as they are written. Parsed into plain structs; nothing is looked up here.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tierkeep_plans::budget::KvElement;
use tierkeep_plans::plan::{IoMode, Numerics};
use tierkeep_plans::planner::PinRule;
use tierkeep_plans::units::SizeRequest;

/// Runs Mixture-of-Experts models larger than memory, within the memory that you give.
#[derive(Debug, Parser)]
#[command(
    name = "tierkeep",
    version,
    propagate_version = true,
    max_term_width = 100,
    after_help = "Exit codes: 0 fits, works; 1 a verdict (does not fit, damaged, refused, stale, a check failed);\n2 usage, I/O or internal error; 3 works with warnings, under --strict; 130 interrupted.\n\nStart with:  tierkeep demo"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) verb: Verb,
    /// Print JSON on standard output instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Exit with 3 where everything works but there are warnings.
    #[arg(long, global = true)]
    pub(crate) strict: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Look at this machine, and at whether a model is whole.
    #[command(
        after_help = "Examples:\n  tierkeep doctor\n  tierkeep doctor examples/glm-nano\n  tierkeep doctor --no-measure --json"
    )]
    Doctor(DoctorArgs),
    /// Plan a model within a memory budget: every byte, every slot, the expected speed.
    #[command(
        after_help = "Examples:\n  tierkeep plan examples/glm-nano --ram 28MB --ctx 512 -o plan.toml\n  tierkeep plan MODEL --ram 20GB --ctx 4096\n  tierkeep plan MODEL --ram 90% --json"
    )]
    Plan(PlanVerbArgs),
    /// Execute a plan, or plan a model and execute that.
    #[command(
        after_help = "Examples:\n  tierkeep run plan.toml -p \"What is 2+2?\"\n  tierkeep run examples/glm-nano --ram 28MB -p \"Count from 3 to 14.\"\n  tierkeep run MODEL --ids 1,2,3 -n 16 --json\n  echo \"some text to go on with\" | tierkeep run MODEL --raw -p -"
    )]
    Run(RunArgs),
    /// Compare a model's tokens and logits with the reference's answers beside it.
    #[command(
        after_help = "Examples:\n  tierkeep verify examples/glm-nano\n  tierkeep verify tests/oracles/olmoe --layers\n  tierkeep verify MODEL --ram 2GB --batch 16 --isa scalar --json"
    )]
    Verify(VerifyArgs),
    /// Write a model as a packed container: 8- or 4-bit weights, each expert in one read.
    #[command(
        after_help = "Examples:\n  tierkeep convert MODEL OUT --experts 4\n  tierkeep convert MODEL OUT --experts 8 --dense 8 --embedding keep --dry-run"
    )]
    Convert(ConvertArgs),
    /// Show the whole motion on the small model in examples/: doctor, plan, run, learn, run.
    #[command(after_help = "Example:\n  tierkeep demo")]
    Demo(DemoArgs),
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Folder of a model to check as well.
    pub(crate) model: Option<PathBuf>,
    /// Read facts only; measure neither memory nor disk.
    #[arg(long)]
    pub(crate) no_measure: bool,
}

/// How a plan is made: for `plan`, and for verbs that plan first.
#[derive(Clone, Debug, Args)]
pub(crate) struct PlanningArgs {
    /// The budget: 20GB, 20GiB, 512MB or 90% (of what is available). Default: what is available
    /// less the larger of 1 GB and 8 %.
    #[arg(long, value_name = "SIZE")]
    pub(crate) ram: Option<SizeRequest>,
    /// Tokens that a sequence may hold. Default: 4096, or what the model has; for verify, its
    /// longest case.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) ctx: Option<u64>,
    /// Threads that compute. Default: the physical cores that this process may use.
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<u64>,
    /// Type of the KV cache and of the indexer's keys.
    #[arg(long, value_name = "TYPE")]
    pub(crate) kv: Option<Kv>,
    /// Most tokens of one prefill batch. Default: chosen from the budget.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) batch: Option<u64>,
    /// Instruction set of the kernels. Default: the best of this machine.
    #[arg(long, value_name = "NAME")]
    pub(crate) isa: Option<IsaName>,
    /// How experts are read.
    #[arg(long, value_name = "MODE")]
    pub(crate) io: Option<Io>,
    /// Pinned experts: auto (as many as a replay of the usage history supports), none, or a share
    /// of the slots such as 50%.
    #[arg(long, value_name = "RULE", default_value = "auto")]
    pub(crate) pins: PinRule,
    /// Accept a budget above what the machine has available.
    #[arg(long)]
    pub(crate) allow_overcommit: bool,
    /// The usage history. Default: .usage in the model's folder, or the user's data folder where
    /// that cannot be written.
    #[arg(long, value_name = "FILE")]
    pub(crate) usage: Option<PathBuf>,
}

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

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// A plan file, or a model's folder to plan first.
    #[arg(value_name = "PLAN|MODEL")]
    pub(crate) target: PathBuf,
    /// The prompt; - reads standard input.
    #[arg(
        short,
        long,
        value_name = "TEXT",
        conflicts_with = "ids",
        required_unless_present = "ids"
    )]
    pub(crate) prompt: Option<String>,
    /// The prompt as token ids, for models without a tokenizer.
    #[arg(long, value_name = "1,2,3", value_delimiter = ',')]
    pub(crate) ids: Option<Vec<u32>>,
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
    pub(crate) model: Option<PathBuf>,
    /// Neither read nor write a usage history.
    #[arg(long, conflicts_with = "usage")]
    pub(crate) no_usage: bool,
    /// Generate on after stop tokens.
    #[arg(long)]
    pub(crate) ignore_stop: bool,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
    /// Read facts only; speeds are then assumed and said to be.
    #[arg(long)]
    pub(crate) no_measure: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// The model's folder, with oracle.json beside the weights.
    pub(crate) model: PathBuf,
    /// Compare the output of each decoder layer too.
    #[arg(long)]
    pub(crate) layers: bool,
    /// How activations are computed.
    #[arg(long, default_value = "exact")]
    pub(crate) numerics: NumericsName,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
    /// Slots of each layer, instead of as many as fit.
    #[arg(long, value_name = "N")]
    pub(crate) cap: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The model's folder.
    pub(crate) model: PathBuf,
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

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// The model to show it on. Default: examples/glm-nano, looked for beside the binary.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Kv {
    F32,
    F16,
    Bf16,
}

impl From<Kv> for KvElement {
    fn from(kv: Kv) -> Self {
        match kv {
            Kv::F32 => Self::F32,
            Kv::F16 => Self::F16,
            Kv::Bf16 => Self::Bf16,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum IsaName {
    Scalar,
    Avx2,
    Avx512,
}

impl IsaName {
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Io {
    /// Pages are dropped from the page cache after each read.
    Dropped,
    /// The page cache keeps what it likes.
    Buffered,
}

impl From<Io> for IoMode {
    fn from(io: Io) -> Self {
        match io {
            Io::Dropped => Self::Dropped,
            Io::Buffered => Self::Buffered,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum NumericsName {
    /// Float activations on stored weights.
    Exact,
}

impl From<NumericsName> for Numerics {
    fn from(name: NumericsName) -> Self {
        match name {
            NumericsName::Exact => Self::Exact,
        }
    }
}
