//! How a plan is made: arguments that `plan` shares with verbs that plan first.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tierkeep_plans::budget::KvElement;
use tierkeep_plans::place::DenseRule;
use tierkeep_plans::plan::{IoMode, Numerics, Policy, Prefetch};
use tierkeep_plans::planner::PinRule;
use tierkeep_plans::units::SizeRequest;

/// Heading of what a plan is made from.
const PLANNING: &str = "Planning";

/// How a plan is made: for `plan`, and for verbs that plan first.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = PLANNING)]
pub(crate) struct PlanningArgs {
    /// The budget: 20GB, 20GiB, 512MB or 90% (of what is available). Default: what is available
    /// less the larger of 1 GB and 8 %.
    #[arg(long, value_name = "SIZE")]
    pub(crate) ram: Option<SizeRequest>,
    /// What the graphics cards may give together: 24GB, 90% (of what is free) or 0. Default: all
    /// that is free, for another machine or a what-if; none here, for this build cannot use them.
    #[arg(long, value_name = "SIZE")]
    pub(crate) vram: Option<SizeRequest>,
    /// Tokens that a sequence may hold. Default: 4096, or what the model has; for verify, its
    /// longest case.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) ctx: Option<u64>,
    /// Sequences that are held at once, each with caches of its own. Default: 1.
    #[arg(long, value_name = "N")]
    pub(crate) sessions: Option<u64>,
    /// Experts of each layer that have a slot in memory. Default: as many as fit.
    #[arg(long, value_name = "N")]
    pub(crate) slots: Option<u32>,
    /// Which expert gives way when a slot is needed: recency, frequency or static (every slot is a
    /// pin). Default: chosen by what the slots hold of a token's experts.
    #[arg(long, value_name = "RULE")]
    pub(crate) policy: Option<Policy>,
    /// Pinned experts: auto (as many as a replay of the usage history supports), none, or a share
    /// of the slots such as 50%.
    #[arg(long, value_name = "RULE", default_value = "auto")]
    pub(crate) pins: PinRule,
    /// How the weights that every token touches live in memory. Default: auto.
    #[arg(long, value_name = "RULE")]
    pub(crate) dense: Option<Dense>,
    /// Threads that compute. Default: the physical cores that this process may use.
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<u64>,
    /// How activations are computed: exact (floats: the reference's tokens) or fast (8 bits an activation
    /// against packed integers, caches of 16 bits: faster, and close to the reference's tokens, not equal).
    /// Default: exact.
    #[arg(long, value_name = "HOW")]
    pub(crate) numerics: Option<Numerics>,
    /// Type of the KV cache and of the indexer's keys. Default: f32, with fast numerics f16.
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
    /// Reads that are under way at once, each by a thread that sleeps meanwhile; 0: the threads that compute
    /// read one after another. Default: as many as this disk was measured to want.
    #[arg(long, value_name = "N")]
    pub(crate) io_depth: Option<u64>,
    /// About how much one read brings; larger experts are read in such pieces, several at once. Default: the
    /// size at which this disk was measured fastest.
    #[arg(long, value_name = "SIZE")]
    pub(crate) read_size: Option<SizeRequest>,
    /// Which experts are read before they are needed: exact (those of a layer that knows them a sub-block
    /// early: their reads run under what is computed meanwhile) or off. Default: exact where there are any.
    #[arg(long, value_name = "WHICH")]
    pub(crate) prefetch: Option<PrefetchRule>,
    /// Accept a budget above what the machine has available.
    #[arg(long)]
    pub(crate) allow_overcommit: bool,
    /// The usage history. Default: .usage in the model's folder, or the user's data folder where
    /// that cannot be written.
    #[arg(long, value_name = "FILE")]
    pub(crate) usage: Option<PathBuf>,
}

impl PlanningArgs {
    /// The first flag that was given and that a plan file already answers; the usage history is not
    /// part of a plan.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let flags = [
            ("--ram", self.ram.is_some()),
            ("--vram", self.vram.is_some()),
            ("--ctx", self.ctx.is_some()),
            ("--sessions", self.sessions.is_some()),
            ("--slots", self.slots.is_some()),
            ("--policy", self.policy.is_some()),
            ("--pins", self.pins != PinRule::Judged),
            ("--dense", self.dense.is_some()),
            ("--threads", self.threads.is_some()),
            ("--numerics", self.numerics.is_some()),
            ("--kv", self.kv.is_some()),
            ("--batch", self.batch.is_some()),
            ("--isa", self.isa.is_some()),
            ("--io", self.io.is_some()),
            ("--io-depth", self.io_depth.is_some()),
            ("--read-size", self.read_size.is_some()),
            ("--prefetch", self.prefetch.is_some_and(|rule| rule != PrefetchRule::Auto)),
            ("--allow-overcommit", self.allow_overcommit),
        ];
        flags.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }
}

/// How the weights that every token touches live in memory.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Dense {
    /// Resident; as many layers as must be are read for every token where they do not fit.
    Auto,
    /// Resident, or the model does not fit.
    Resident,
    /// Pages of the files, mapped: instant where they are cached, shared with other processes, and the
    /// system may take them back.
    Mapped,
    /// All of them are read for every token.
    Streamed,
}

impl From<Dense> for DenseRule {
    fn from(dense: Dense) -> Self {
        match dense {
            Dense::Auto => Self::Auto,
            Dense::Resident => Self::Resident,
            Dense::Mapped => Self::Mapped,
            Dense::Streamed => Self::Streamed,
        }
    }
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

/// Which experts are read before they are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PrefetchRule {
    /// Exact where a layer knows its experts early.
    Auto,
    /// Those that are known for certain, or there is no plan.
    Exact,
    /// None.
    Off,
}

impl PrefetchRule {
    /// What is asked for; `None` where it is left to the planner.
    pub(crate) fn asked(self) -> Option<Prefetch> {
        match self {
            Self::Auto => None,
            Self::Exact => Some(Prefetch::Exact),
            Self::Off => Some(Prefetch::Off),
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Io {
    /// Past the page cache, straight into the slot (O_DIRECT).
    Direct,
    /// Pages are dropped from the page cache after each read.
    Dropped,
    /// The page cache keeps what it likes.
    Buffered,
}

impl From<Io> for IoMode {
    fn from(io: Io) -> Self {
        match io {
            Io::Direct => Self::Direct,
            Io::Dropped => Self::Dropped,
            Io::Buffered => Self::Buffered,
        }
    }
}
