//! How a plan is made: arguments that `plan` shares with verbs that plan first.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tierkeep_plans::budget::KvElement;
use tierkeep_plans::plan::IoMode;
use tierkeep_plans::planner::PinRule;
use tierkeep_plans::units::SizeRequest;

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
