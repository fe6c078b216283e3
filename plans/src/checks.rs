//! Checks of a model: each has a stable id, a status, one line of finding and one of remedy. Made
//! from the catalogue or from the reason why there is none.

use serde::Serialize;

use tierkeep_doctor::{Facts, FilesystemKind};

use crate::catalogue::{Catalogue, CatalogueError, ConfigError, StoredType};
use crate::units::Bytes;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Nothing to say.
    Ok,
    /// It works, and there is something to know.
    Warn,
    /// It does not work.
    Fail,
    /// Could not be checked, because an earlier check failed.
    Skip,
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Stable name.
    pub id: &'static str,
    /// How it came out.
    pub status: Status,
    /// What was found.
    pub finding: String,
    /// What to do about it; empty where there is nothing.
    pub remedy: String,
}

impl Check {
    /// A check that passed.
    #[must_use]
    pub fn ok(id: &'static str, finding: impl Into<String>) -> Self {
        Self { id, status: Status::Ok, finding: finding.into(), remedy: String::new() }
    }

    /// A check that passed with something to know.
    #[must_use]
    pub fn warn(id: &'static str, finding: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { id, status: Status::Warn, finding: finding.into(), remedy: remedy.into() }
    }

    /// A check that failed.
    #[must_use]
    pub fn fail(id: &'static str, finding: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { id, status: Status::Fail, finding: finding.into(), remedy: remedy.into() }
    }

    /// A check that an earlier failure makes impossible.
    #[must_use]
    pub fn skip(id: &'static str) -> Self {
        Self {
            id,
            status: Status::Skip,
            finding: "not checked: an earlier check failed".to_owned(),
            remedy: String::new(),
        }
    }
}

/// Config, files, tensors and stored types of a model, from its catalogue.
#[must_use]
pub fn model_checks(catalogue: &Result<Catalogue, CatalogueError>) -> Vec<Check> {
    match catalogue {
        Ok(model) => whole_model_checks(model),
        Err(error) => broken(error),
    }
}

/// The same for a model that could be catalogued.
#[must_use]
pub fn whole_model_checks(model: &Catalogue) -> Vec<Check> {
    let spec = &model.spec;
    let mut checks = vec![
        Check::ok(
            "model.config",
            format!(
                "{}, {} layers, {} experts of which {} a token",
                spec.family.model_type(),
                spec.n_layers,
                spec.router.n_experts,
                spec.router.n_experts_active
            ),
        ),
        Check::ok(
            "model.files",
            format!("{} files, {}, all whole", model.shards.len(), model.total_bytes()),
        ),
        Check::ok(
            "model.tensors",
            format!("{} tensors, every one that the architecture needs", model.n_tensors),
        ),
        Check::ok("model.types", stored_types(model)),
    ];
    checks.extend(
        model
            .warnings
            .iter()
            .map(|w| Check::warn("model.notes", w.finding.clone(), w.remedy.clone())),
    );
    if spec.stop_tokens.is_empty() {
        checks.push(Check::warn(
            "model.stop_tokens",
            "neither config.json nor generation_config.json names a stop token",
            "limit the answer with -n",
        ));
    } else {
        checks.push(Check::ok("model.stop_tokens", format!("{:?}", spec.stop_tokens)));
    }
    checks
}

/// Bytes by stored type, of dense weights and of routed experts.
fn stored_types(model: &Catalogue) -> String {
    let mut parts = Vec::new();
    for stored in StoredType::ALL {
        let dense: u64 =
            model.tensors.iter().filter(|t| t.stored == stored).map(|t| t.bytes().0).sum();
        let experts = model.experts.iter().filter(|e| e.gate.stored == stored).count();
        if dense > 0 || experts > 0 {
            let dense = Bytes(dense);
            parts.push(format!("{} ({dense} dense, {experts} experts)", stored.name()));
        }
    }
    parts.join(", ")
}

fn broken(error: &CatalogueError) -> Vec<Check> {
    let ids = ["model.config", "model.files", "model.tensors", "model.types", "model.stop_tokens"];
    let failed = match error {
        CatalogueError::NotAModel { .. }
        | CatalogueError::Config { .. }
        | CatalogueError::Io { .. } => 0,
        CatalogueError::NoShards { .. }
        | CatalogueError::MissingShard { .. }
        | CatalogueError::Header { .. } => 1,
        CatalogueError::TensorTwice { .. }
        | CatalogueError::MissingTensor { .. }
        | CatalogueError::WrongShape { .. } => 2,
        CatalogueError::UnknownContainer { .. } | CatalogueError::UnsupportedType { .. } => 3,
    };
    let remedy = match error {
        CatalogueError::Config { source: ConfigError::UnknownFamily { .. }, .. } => {
            "this build cannot run it; see README for the families that it runs"
        }
        CatalogueError::Config { .. } => "fetch config.json again, or see README for what runs",
        CatalogueError::NotAModel { .. } => "name the folder that holds config.json",
        CatalogueError::Io { .. } => "check the path and its permissions",
        CatalogueError::Header { source, .. } => source.remedy(),
        CatalogueError::NoShards { .. } | CatalogueError::MissingShard { .. } => {
            "fetch the named file again"
        }
        CatalogueError::TensorTwice { .. } => "remove the stale file",
        CatalogueError::MissingTensor { .. } | CatalogueError::WrongShape { .. } => {
            "fetch config.json and the weights from one place again"
        }
        CatalogueError::UnknownContainer { .. } => "use a newer tierkeep, or convert it again",
        CatalogueError::UnsupportedType { .. } => {
            "fetch the model in bf16, f16, f32, or packed at 8 or 4 bits"
        }
    };
    ids.iter()
        .enumerate()
        .map(|(at, id)| match at.cmp(&failed) {
            std::cmp::Ordering::Less => Check::ok(id, "nothing wrong found"),
            std::cmp::Ordering::Equal => Check::fail(id, error.to_string(), remedy),
            std::cmp::Ordering::Greater => Check::skip(id),
        })
        .collect()
}

/// Checks of the machine, from its facts.
#[must_use]
pub fn machine_checks(facts: &Facts) -> Vec<Check> {
    vec![memory_check(facts), swap_check(facts), disk_check(facts), gpu_check(facts)]
}

fn memory_check(facts: &Facts) -> Check {
    let usable = &facts.memory.usable_bytes;
    match usable.value() {
        Some(&bytes) => Check::ok(
            "machine.memory",
            format!("{} can be given: {}", Bytes(bytes), usable.detail()),
        ),
        None => Check::warn(
            "machine.memory",
            format!("what can be given is unknown: {}", usable.detail()),
            "give a budget with --ram SIZE",
        ),
    }
}

fn swap_check(facts: &Facts) -> Check {
    let memory = &facts.memory;
    match (memory.swap_total_bytes.value(), memory.swap_free_bytes.value()) {
        (Some(&total), Some(&free)) if free < total => Check::warn(
            "machine.swap",
            format!("{} of swap is in use", Bytes(total - free)),
            "weights in swap are read twice: end what takes the memory, or lower --ram",
        ),
        (Some(0), _) => Check::ok("machine.swap", "there is none"),
        (Some(_), Some(_)) => Check::ok("machine.swap", "none in use"),
        _ => Check::ok("machine.swap", format!("unknown: {}", memory.swap_total_bytes.detail())),
    }
}

fn disk_check(facts: &Facts) -> Check {
    let disk = &facts.disk;
    let id = "machine.disk";
    let name = disk.filesystem.value().map_or("an unknown filesystem", String::as_str);
    let mount = disk.mount_point.value().map_or("?", String::as_str);
    let speed = match disk.read.value() {
        Some(read) => {
            format!("{:.1} GB/s in reads of {}", read.bytes_per_s / 1e9, Bytes(read.read_bytes))
        }
        None => format!("speed unknown: {}", disk.read.detail()),
    };
    match disk.kind.value() {
        Some(FilesystemKind::Network | FilesystemKind::Fuse) => Check::warn(
            id,
            format!("{name} on {mount} is not a local disk; {speed}"),
            "missed experts are read from it: copy the model to a local disk",
        ),
        _ => Check::ok(id, format!("{name} on {mount}; {speed}")),
    }
}

fn gpu_check(facts: &Facts) -> Check {
    let id = "machine.gpu";
    match facts.gpus.nvidia.value() {
        None => Check::ok(id, facts.gpus.nvidia.detail().to_owned()),
        Some(gpus) => {
            let one = |gpu: &tierkeep_doctor::GpuFact| {
                let name = gpu.name.value().map_or("unnamed", String::as_str);
                match (gpu.memory_free_bytes.value(), gpu.memory_total_bytes.value()) {
                    (Some(&free), Some(&total)) => {
                        format!("{name}: {} of {} free", Bytes(free), Bytes(total))
                    }
                    _ => format!("{name}: memory unknown"),
                }
            };
            let all: Vec<String> = gpus.iter().map(one).collect();
            Check::ok(id, format!("{}; this build does not use it yet", all.join(", ")))
        }
    }
}
