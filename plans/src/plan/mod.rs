//! The plan file: its schema, its reading and writing, and whether an edited or an old plan still
//! makes sense for a model. Sizes are never computed here; `budget` does that.

mod check;
mod need;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tierkeep_doctor::Facts;

pub(crate) use self::check::tiers;
pub use self::need::{Abilities, Need};
use crate::budget::{
    CardLine, CardPlacement, DenseResidency, EmbeddingResidency, KvElement, Ledger, Line, Slots,
    Streamed,
};
pub use crate::budget::{IoMode, Numerics};
use crate::units::Bytes;
use crate::whole_file;

/// Version of the plan format that this build writes and reads.
pub const PLAN_VERSION: u32 = 5;

/// Largest plan file that is read, bytes.
const PLAN_CAP_BYTES: u64 = 64 << 20;

/// What a slot does when it is needed for another expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The least recently used unpinned expert gives way.
    Recency,
    /// The least often used unpinned expert gives way, and a newcomer that is asked for less often
    /// than all of them passes through.
    Frequency,
    /// None does: every slot is a pin.
    Static,
}

impl Policy {
    /// Its name in plans and options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Recency => "recency",
            Self::Frequency => "frequency",
            Self::Static => "static",
        }
    }
}

impl std::str::FromStr for Policy {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        [Self::Recency, Self::Frequency, Self::Static]
            .into_iter()
            .find(|policy| policy.name() == text)
            .ok_or_else(|| PolicyError { text: text.to_owned() })
    }
}

/// Why a policy could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read {text:?} as a policy: write recency, frequency or static")]
pub struct PolicyError {
    /// What was given.
    pub text: String,
}

/// Which experts are read before they are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prefetch {
    /// None: each is read when it is asked for, the missing ones of a layer together.
    Off,
    /// Those of a layer that knows its experts a sub-block early: their reads run under what is computed
    /// until they are needed. They are asked for in the same order either way, so that hits, evictions and
    /// bytes read do not change.
    Exact,
}

impl Prefetch {
    /// Its name in plans and options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Exact => "exact",
        }
    }
}

/// Which model a plan is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelRef {
    /// Its folder.
    pub directory: PathBuf,
    /// Hash of its headers and sizes.
    pub fingerprint: String,
    /// Its family.
    pub family: String,
    /// Bytes of its files.
    pub total_bytes: Bytes,
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    /// The budget.
    pub budget_bytes: Bytes,
    /// Where the budget comes from, in words.
    pub budget_source: String,
    /// What the graphics cards may give together; 0 where none is used.
    pub vram_bytes: Bytes,
    /// Where that comes from, in words.
    pub vram_source: String,
    /// Tokens that a sequence may hold.
    pub context: u64,
    /// Sequences that are held at once, each with caches of its own.
    pub sessions: u64,
    /// The budget may be above what the machine had available.
    #[serde(default)]
    pub allow_overcommit: bool,
}

/// Settings of the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineSettings {
    /// Threads that compute.
    pub threads: u64,
    /// The processor that each thread is held to; empty where the system moves them.
    pub cpus: Vec<u32>,
    /// Instruction set of the kernels: `scalar`, `avx2`, `avx512`.
    pub isa: String,
    /// How activations are computed.
    pub numerics: Numerics,
    /// Type of the KV cache and the indexer keys.
    pub kv: KvElement,
    /// Most tokens of one prefill batch.
    pub prefill_batch: u64,
    /// Where the embedding lives.
    pub embedding: EmbeddingResidency,
    /// How experts are read.
    pub io: IoMode,
    /// Why they are read so.
    pub io_evidence: String,
    /// Which experts are read before they are needed.
    pub prefetch: Prefetch,
    /// Reads that are under way at once, each by a thread of its own; 0 where the threads that compute read
    /// what they ask for.
    pub read_depth: u64,
    /// About how much one read brings; what is larger is cut. Absent where nothing is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<Bytes>,
}

/// Where weights live.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// What happens when a slot is needed.
    pub policy: Policy,
    /// Why this policy.
    pub policy_evidence: String,
    /// Why there are these pins, or none.
    pub pins_evidence: String,
    /// Why experts are kept by the engine or by the kernel's page cache, never by both.
    pub cache_evidence: String,
    /// Left to the kernel to keep experts in its page cache; 0 where they have slots.
    pub page_cache_bytes: Bytes,
    /// How dense weights that stay in main memory are held.
    pub dense: DenseResidency,
    /// Slots and pins of every layer, in main memory.
    pub slots: Slots,
    /// Dense weights that do not stay in memory.
    pub streamed: Streamed,
    /// What each graphics card that is used is given.
    pub cards: Vec<CardPlacement>,
}

/// Where a routed expert can be when it is asked for, the fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExpertTier {
    /// On a graphics card.
    Vram,
    /// In main memory, never evicted.
    Pinned,
    /// In main memory, as the policy decides.
    Cache,
    /// In main memory, as the kernel decides.
    PageCache,
    /// On disk.
    Disk,
}

impl ExpertTier {
    /// Every tier, the fastest first.
    pub const ALL: [Self; 5] = [Self::Vram, Self::Pinned, Self::Cache, Self::PageCache, Self::Disk];

    /// Its name as users see it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Vram => "vram",
            Self::Pinned => "pinned",
            Self::Cache => "cache",
            Self::PageCache => "page-cache",
            Self::Disk => "disk",
        }
    }
}

/// One tier of routed experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierShare {
    /// Which tier.
    pub tier: ExpertTier,
    /// Experts that it can hold at once.
    pub experts: u64,
    /// Bytes of these.
    pub bytes: Bytes,
    /// Share of accesses in decode that it is expected to serve at the median, 0 to 1.
    pub access_share: f64,
}

/// A range: one run in ten is expected below `p10`, one in ten above `p90`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Range {
    /// Tenth percentile.
    pub p10: f64,
    /// Median.
    pub p50: f64,
    /// Ninetieth percentile.
    pub p90: f64,
}

/// One term of a token's time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TermSeconds {
    /// What takes it.
    pub name: String,
    /// How long, at the median.
    pub seconds: f64,
}

/// What is expected of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// Tokens per second in decode.
    pub decode_tokens_per_s: Range,
    /// Share of routed-expert accesses in decode that find their expert resident, 0 to 1.
    pub hit_rate: Range,
    /// Weight bytes touched per token.
    pub touched_bytes_per_token: Bytes,
    /// Expert bytes read from disk per token.
    pub read_bytes_per_token: Bytes,
    /// Dense bytes read from disk per token, because they do not stay in memory.
    pub streamed_bytes_per_token: Bytes,
    /// Seconds of a token at the median in which experts are read while others compute; part of no term.
    pub hidden_read_seconds: f64,
    /// Seconds of a token at the median, by term, before calibration; they sum to its time.
    pub terms: Vec<TermSeconds>,
    /// The term that takes most of a token's time.
    pub binding: String,
    /// The factor that earlier runs on this machine put on the speed; 1 without any.
    pub calibration: f64,
    /// What the figures rest on, one source a line.
    pub evidence: Vec<String>,
}

impl Prediction {
    /// The speed of reads of missed experts that the estimate reckons with, bytes/s: what a token
    /// misses over the time of that term and what of it is hidden. `None` where nothing is missed.
    #[must_use]
    pub fn expert_read_bytes_per_s(&self) -> Option<f64> {
        let term = self.terms.iter().find(|term| term.name == crate::estimate::term::MISSES)?;
        let seconds = term.seconds + self.hidden_read_seconds;
        let per_s = self.read_bytes_per_token.as_f64() / seconds;
        (per_s.is_finite() && per_s > 0.0).then_some(per_s)
    }
}

/// A plan: everything that the engine needs to know, and everything that it was derived from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Version of the format.
    pub version: u32,
    /// What no line of the ledger takes: the ledger and this sum to the budget.
    pub unused_bytes: Bytes,
    /// The model.
    pub model: ModelRef,
    /// What was asked for.
    pub request: PlanRequest,
    /// How the engine is set.
    pub engine: EngineSettings,
    /// Where experts go.
    pub placement: Placement,
    /// What is expected.
    pub prediction: Prediction,
    /// Where every byte of the budget goes.
    pub ledger: Ledger,
    /// Routed experts by tier.
    pub tiers: Vec<TierShare>,
    /// The machine that it was made on.
    pub machine: Facts,
}

/// Why a plan cannot be read or used. Each message names the remedy.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not TOML of this format.
    #[error("{} is not a plan: {reason}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// The plan cannot be written as TOML.
    #[error("the plan cannot be written as TOML: {reason}")]
    Serialize {
        /// What the writer said.
        reason: String,
    },
    /// Another version of the format.
    #[error("{} is a plan of version {found}, this build reads version {PLAN_VERSION}: make it again with `tierkeep plan`", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The model has changed, or it is another one.
    #[error("the plan is for model {planned}, {} is {found}: make a plan for it with `tierkeep plan`", directory.display())]
    OtherModel {
        /// Fingerprint in the plan.
        planned: String,
        /// The model's folder.
        directory: PathBuf,
        /// Its fingerprint.
        found: String,
    },
    /// A value that makes no sense for the model.
    #[error(
        "the plan has {field} = {found}, expected {expected}: edit it or make it again with `tierkeep plan`"
    )]
    Invalid {
        /// The field.
        field: String,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
    },
    /// The lines do not belong to the settings.
    #[error(
        "the plan's ledger has {found} bytes for {line}, its settings need {expected}: edit it or make it again with `tierkeep plan`"
    )]
    LedgerMismatch {
        /// The line.
        line: Line,
        /// What is there.
        found: u64,
        /// What the settings need.
        expected: u64,
    },
    /// The lines of a card do not belong to what is there.
    #[error(
        "the plan's ledger of graphics card {card} has {found} bytes for {line}, what is there needs {expected}: edit it or make it again with `tierkeep plan`"
    )]
    CardLedgerMismatch {
        /// The card.
        card: u32,
        /// The line.
        line: CardLine,
        /// What is there.
        found: u64,
        /// What is needed.
        expected: u64,
    },
    /// The lines of a card sum to more than its budget.
    #[error(
        "the plan's ledger of graphics card {card} sums to {total}, over its budget of {budget}: move layers or experts off it, or make the plan again with `tierkeep plan`"
    )]
    OverCardBudget {
        /// The card.
        card: u32,
        /// Sum of the lines.
        total: Bytes,
        /// Its budget.
        budget: Bytes,
    },
    /// The lines sum to more than the budget.
    #[error(
        "the plan's ledger sums to {total}, over its budget of {budget}: lower caps, context or prefill_batch, or raise budget_bytes"
    )]
    OverBudget {
        /// Sum of the lines.
        total: Bytes,
        /// The budget.
        budget: Bytes,
    },
}

impl Plan {
    /// The plan as TOML, with a comment that says how to use it.
    ///
    /// # Errors
    /// [`PlanError::Serialize`], which would be a bug in the schema.
    pub fn to_toml(&self) -> Result<String, PlanError> {
        let body =
            toml::to_string(self).map_err(|e| PlanError::Serialize { reason: e.to_string() })?;
        Ok(format!("# tierkeep plan: run it with `tierkeep run THIS_FILE -p \"...\"`\n{body}"))
    }

    /// Reads a plan from TOML; `path` is for messages.
    ///
    /// # Errors
    /// [`PlanError::Parse`] or [`PlanError::Version`].
    pub fn from_toml(text: &str, path: &Path) -> Result<Self, PlanError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let parse = |e: toml::de::Error| PlanError::Parse {
            path: path.to_owned(),
            reason: e.to_string().trim_end().to_owned(),
        };
        // The version comes first, so that a plan of another version is told apart from a typo.
        let Versioned { version } = toml::from_str(text).map_err(parse)?;
        if version != PLAN_VERSION {
            return Err(PlanError::Version { path: path.to_owned(), found: version });
        }
        toml::from_str(text).map_err(parse)
    }

    /// Reads a plan file.
    ///
    /// # Errors
    /// [`PlanError::Io`], [`PlanError::Parse`] or [`PlanError::Version`].
    pub fn read(path: &Path) -> Result<Self, PlanError> {
        let io = |source| PlanError::Io { path: path.to_owned(), source };
        // Cut off by what is read, not by the size that is reported: a device has none and no end.
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|file| file.take(PLAN_CAP_BYTES + 1).read_to_end(&mut bytes))
            .map_err(io)?;
        if bytes.len() as u64 > PLAN_CAP_BYTES {
            let reason = format!("more than {PLAN_CAP_BYTES} bytes long, which no plan is");
            return Err(PlanError::Parse { path: path.to_owned(), reason });
        }
        let text = String::from_utf8(bytes).map_err(|_| PlanError::Parse {
            path: path.to_owned(),
            reason: "it is not text".to_owned(),
        })?;
        Self::from_toml(&text, path)
    }

    /// Writes the plan file whole or not at all; a device or a pipe is written to as it is.
    ///
    /// # Errors
    /// [`PlanError::Io`] or [`PlanError::Serialize`].
    pub fn write(&self, path: &Path) -> Result<(), PlanError> {
        let io = |source| PlanError::Io { path: path.to_owned(), source };
        whole_file::write(path, &self.to_toml()?).map_err(io)
    }
}
