//! The plan file: its schema, its reading and writing, and whether an edited or an old plan still
//! makes sense for a model. Sizes are never computed here; `budget` does that.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tierkeep_doctor::Facts;

use crate::budget::{self, EmbeddingResidency, KvElement, Ledger, Line, Slots, Workload};
use crate::catalogue::Catalogue;
use crate::planner::MAX_THREADS;
use crate::units::Bytes;
use crate::whole_file;

/// Version of the plan format that this build writes and reads.
pub const PLAN_VERSION: u32 = 1;

/// Largest plan file that is read, bytes.
const PLAN_CAP_BYTES: u64 = 64 << 20;

/// How activations are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Numerics {
    /// Float activations on stored weights: tokens equal the reference's.
    Exact,
}

/// How experts are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoMode {
    /// Through the page cache, pages dropped after each read: an expert is never cached twice.
    Dropped,
    /// Through the page cache, which may keep what it likes.
    Buffered,
}

/// What a slot does when it is needed for another expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The least recently used unpinned expert gives way.
    Recency,
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
    /// Tokens that a sequence may hold.
    pub context: u64,
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
}

/// Which experts have slots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// What happens when a slot is needed.
    pub policy: Policy,
    /// Why there are these pins, or none.
    pub pins_evidence: String,
    /// Slots and pins of every layer.
    pub slots: Slots,
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
    /// The term that takes most of a token's time.
    pub binding: String,
    /// The factor that earlier runs on this machine put on the speed; 1 without any.
    pub calibration: f64,
    /// What the figures rest on, one source a line.
    pub evidence: Vec<String>,
}

/// A plan: everything that the engine needs to know, and everything that it was derived from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Version of the format.
    pub version: u32,
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
        let size = std::fs::metadata(path).map_err(io)?.len();
        if size > PLAN_CAP_BYTES {
            let reason = format!("{size} bytes long, more than {PLAN_CAP_BYTES}");
            return Err(PlanError::Parse { path: path.to_owned(), reason });
        }
        let bytes = std::fs::read(path).map_err(io)?;
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

    /// What the engine is asked for.
    #[must_use]
    pub fn workload(&self) -> Workload {
        Workload {
            context: self.request.context,
            prefill_batch: self.engine.prefill_batch,
            threads: self.engine.threads,
            kv: self.engine.kv,
            embedding: self.engine.embedding,
        }
    }

    /// Whether the plan makes sense for `model`: same fingerprint, every value in range, and a
    /// ledger that is what `budget` computes from the settings and is within the budget.
    ///
    /// # Errors
    /// [`PlanError`], naming the first thing that is wrong.
    pub fn check(&self, model: &Catalogue) -> Result<(), PlanError> {
        if self.model.fingerprint != model.fingerprint {
            return Err(PlanError::OtherModel {
                planned: self.model.fingerprint.clone(),
                directory: model.directory.clone(),
                found: model.fingerprint.clone(),
            });
        }
        self.check_model(model)?;
        self.check_budget()?;
        self.check_settings(model)?;
        self.check_slots(model)?;
        self.check_prediction()?;
        self.check_ledger(model)
    }

    fn check_model(&self, model: &Catalogue) -> Result<(), PlanError> {
        let family = model.spec.family.model_type();
        if self.model.family != family {
            return Err(invalid("model.family", &self.model.family, family));
        }
        let bytes = model.total_bytes().0;
        in_range("model.total_bytes", self.model.total_bytes.0, bytes, bytes)
    }

    /// A budget that was raised by hand is held to the machine that the plan was made on.
    fn check_budget(&self) -> Result<(), PlanError> {
        let budget = self.request.budget_bytes.0;
        match self.machine.memory.usable_bytes.value() {
            Some(&available) if budget > available && !self.request.allow_overcommit => {
                Err(invalid(
                    "request.budget_bytes",
                    budget.to_string(),
                    format!(
                        "at most the {available} that its machine has, or allow_overcommit = true"
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    fn check_prediction(&self) -> Result<(), PlanError> {
        let Prediction { decode_tokens_per_s, hit_rate, calibration, .. } = &self.prediction;
        ascending("prediction.decode_tokens_per_s", *decode_tokens_per_s, f64::MAX)?;
        ascending("prediction.hit_rate", *hit_rate, 1.0)?;
        if *calibration > 0.0 && calibration.is_finite() {
            return Ok(());
        }
        Err(invalid("prediction.calibration", calibration.to_string(), "a positive number"))
    }

    fn check_settings(&self, model: &Catalogue) -> Result<(), PlanError> {
        let max_context = model.spec.max_context as u64;
        in_range("request.context", self.request.context, 1, max_context)?;
        in_range("engine.threads", self.engine.threads, 1, MAX_THREADS)?;
        in_range("engine.prefill_batch", self.engine.prefill_batch, 1, self.request.context)?;
        if self.engine.embedding == EmbeddingResidency::RowRead && model.spec.tied_embeddings {
            let expected = "resident, for the head shares its weights";
            return Err(invalid("engine.embedding", "row_read", expected));
        }
        Ok(())
    }

    fn check_slots(&self, model: &Catalogue) -> Result<(), PlanError> {
        let spec = &model.spec;
        let Slots { caps, pins } = &self.placement.slots;
        for (field, len) in [("caps", caps.len()), ("pins", pins.len())] {
            if len != spec.n_layers {
                return Err(invalid(
                    format!("placement.slots.{field}"),
                    format!("a list of {len}"),
                    format!("one entry for each of the {} layers", spec.n_layers),
                ));
            }
        }
        for (layer, (&cap, pins)) in caps.iter().zip(pins).enumerate() {
            let n_experts = if spec.is_expert_layer(layer) { spec.router.n_experts } else { 0 };
            in_range(
                &format!("placement.slots.caps[{layer}]"),
                u64::from(cap),
                0,
                n_experts as u64,
            )?;
            let ascending = pins.windows(2).all(|w| w[0] < w[1]);
            let known = pins.last().is_none_or(|&last| (last as usize) < n_experts);
            if !ascending || !known || pins.len() > cap as usize {
                return Err(invalid(
                    format!("placement.slots.pins[{layer}]"),
                    format!("{pins:?}"),
                    format!("at most {cap} different experts below {n_experts}, ascending"),
                ));
            }
        }
        Ok(())
    }

    fn check_ledger(&self, model: &Catalogue) -> Result<(), PlanError> {
        let expected = budget::ledger(model, &self.workload(), &self.placement.slots);
        for line in Line::ALL {
            let (found, expected) = (self.ledger.bytes(line).0, expected.bytes(line).0);
            if found != expected {
                return Err(PlanError::LedgerMismatch { line, found, expected });
            }
        }
        let total = self.ledger.total();
        if total > self.request.budget_bytes {
            return Err(PlanError::OverBudget { total, budget: self.request.budget_bytes });
        }
        Ok(())
    }
}

fn invalid(
    field: impl Into<String>,
    found: impl Into<String>,
    expected: impl Into<String>,
) -> PlanError {
    PlanError::Invalid { field: field.into(), found: found.into(), expected: expected.into() }
}

fn in_range(field: &str, found: u64, min: u64, max: u64) -> Result<(), PlanError> {
    if (min..=max).contains(&found) {
        return Ok(());
    }
    let expected = if min == max { min.to_string() } else { format!("{min} to {max}") };
    Err(invalid(field, found.to_string(), expected))
}

/// Whether a range is one: numbers from 0 to `max`, none below the one before it.
fn ascending(field: &str, range: Range, max: f64) -> Result<(), PlanError> {
    let Range { p10, p50, p90 } = range;
    if 0.0 <= p10 && p10 <= p50 && p50 <= p90 && p90 <= max {
        return Ok(());
    }
    let expected = if max < f64::MAX {
        format!("ascending numbers from 0 to {max}")
    } else {
        "ascending numbers from 0".to_owned()
    };
    Err(invalid(field, format!("{p10}, {p50}, {p90}"), expected))
}
