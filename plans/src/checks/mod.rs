//! Checks of machine and model: each has a stable id, a status, one line of finding and one of remedy.
//! Pure: machine checks are made from facts, model checks from a catalogue or from the survey of a
//! damaged model. What has to read weights or run a tokenizer is the engine's and uses these types.
//!
//! Every id is in [`IDS`], with what it means in docs/doctor.md.

mod devices;
mod machine;
mod model;
mod planning;
mod processor;
mod text;

use serde::Serialize;

pub use self::machine::machine_checks;
pub use self::model::{damaged_model_checks, outlined, whole_model_checks};
pub use self::planning::{disk_check, download_check, plan_checks};

/// Every id that a check may have, in the order in which they are shown. An id keeps its meaning.
pub const IDS: &[&str] = &[
    "machine.memory",
    "machine.memory_limit",
    "machine.swap",
    "machine.locked_memory",
    "machine.huge_pages",
    "machine.zfs_arc",
    "machine.cpu",
    "machine.numa",
    "machine.cpu_limits",
    "machine.instruction_sets",
    "machine.disk",
    "machine.disk_speed",
    "machine.rotational",
    "machine.gpu",
    "machine.platform",
    "machine.unknown",
    "model.config",
    "model.family",
    "model.shards",
    "model.headers",
    "model.index",
    "model.tensors",
    "model.mtp",
    "model.types",
    "model.container",
    "model.stop_tokens",
    "model.tokenizer",
    "model.chat_template",
    "model.vocabulary",
    "model.holes",
    "model.read",
    "model.values",
    "model.checksums",
    "model.disk",
    "model.budget",
    "model.placement",
];

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Nothing to do about it.
    Ok,
    /// It works, and there is something to know.
    Warn,
    /// It does not work.
    Fail,
    /// Could not be checked, or was not asked for.
    Skip,
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Stable name, one of [`IDS`].
    pub id: &'static str,
    /// How it came out.
    pub status: Status,
    /// What was found, in one line.
    pub finding: String,
    /// What to do about it, in one line; empty where there is nothing.
    pub remedy: String,
    /// One line for each thing that the finding counts, where it counts several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<String>,
}

impl Check {
    fn new(
        id: &'static str,
        status: Status,
        finding: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        debug_assert!(IDS.contains(&id), "{id} is not in the table of ids");
        let (finding, remedy) = (finding.into(), remedy.into());
        Self { id, status, finding, remedy, details: Vec::new() }
    }

    /// A check that passed.
    #[must_use]
    pub fn ok(id: &'static str, finding: impl Into<String>) -> Self {
        Self::new(id, Status::Ok, finding, "")
    }

    /// A check that passed with something to know.
    #[must_use]
    pub fn warn(id: &'static str, finding: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(id, Status::Warn, finding, remedy)
    }

    /// A check that failed.
    #[must_use]
    pub fn fail(id: &'static str, finding: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(id, Status::Fail, finding, remedy)
    }

    /// A check that could not be made, or was not asked for.
    #[must_use]
    pub fn skip_because(id: &'static str, reason: impl AsRef<str>) -> Self {
        Self::new(id, Status::Skip, format!("not checked: {}", reason.as_ref()), "")
    }

    /// The same with a line for each thing that the finding counts.
    #[must_use]
    pub fn with_details(mut self, details: Vec<String>) -> Self {
        self.details = details;
        self
    }
}

/// The worst that a list of checks says: fail, else warn, else ok. What was skipped says nothing.
#[must_use]
pub fn worst(checks: &[Check]) -> Status {
    let any = |status| checks.iter().any(|check| check.status == status);
    if any(Status::Fail) {
        Status::Fail
    } else if any(Status::Warn) {
        Status::Warn
    } else {
        Status::Ok
    }
}

/// Checks in the order of [`IDS`], whoever made them.
pub fn sort(checks: &mut [Check]) {
    checks.sort_by_key(|check| IDS.iter().position(|id| *id == check.id));
}
