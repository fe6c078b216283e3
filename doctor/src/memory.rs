//! How much memory there is and how much of it this process may take.
//!
//! Owns the combination of the host's figures with the limits of control groups. Refuses to add up
//! what a model needs, and leaves timing to `bandwidth`.

use crate::cgroup;
use crate::fact::Fact;
use crate::facts::MemoryFacts;
use crate::parse::{self, MemInfo};
use crate::tree::Tree;

/// Memory facts, bandwidth apart.
pub(crate) fn probe(tree: &Tree) -> MemoryFacts {
    let info = tree.read("/proc/meminfo").map(|text| parse::parse_meminfo(&text));
    let info = info.map_err(|error| error.to_string());
    let field = |name: &str, get: fn(&MemInfo) -> Option<u64>| match &info {
        Ok(info) => match get(info) {
            Some(bytes) => Fact::read(bytes, format!("{name} of /proc/meminfo")),
            None => Fact::unknown(format!("/proc/meminfo has no {name}")),
        },
        Err(reason) => Fact::unknown(reason.clone()),
    };
    let total_bytes = field("MemTotal", |info| info.total_bytes);
    let mut available_bytes = field("MemAvailable", |info| info.available_bytes);
    if available_bytes.is_unknown()
        && let Ok(info) = &info
        && let Some(estimate) = available_without_kernel_help(info)
    {
        available_bytes = estimate;
    }
    let mut facts = MemoryFacts {
        swap_total_bytes: field("SwapTotal", |info| info.swap_total_bytes),
        swap_free_bytes: field("SwapFree", |info| info.swap_free_bytes),
        total_bytes,
        available_bytes,
        ..MemoryFacts::default()
    };
    apply_limits(tree, &mut facts);
    facts
}

/// What kernels before 3.14 do not say: free memory and the page cache without shared memory.
fn available_without_kernel_help(info: &MemInfo) -> Option<Fact<u64>> {
    let cached = info.cached_bytes?.checked_sub(info.shmem_bytes?)?;
    let available = info.free_bytes?.checked_add(info.buffers_bytes?)?.checked_add(cached)?;
    Some(Fact::estimated(
        available,
        "MemFree + Buffers + Cached - Shmem of /proc/meminfo, which has no MemAvailable",
    ))
}

fn apply_limits(tree: &Tree, facts: &mut MemoryFacts) {
    let host = facts.available_bytes.clone();
    let limits = match cgroup::memory_limits(tree, facts.total_bytes.value().copied()) {
        Ok(limits) => limits,
        Err(error) => {
            facts.limit = Fact::unknown(error.to_string());
            facts.usable_bytes =
                with_note(host, "host memory", &format!("limits unknown: {error}"));
            return;
        }
    };
    let note = limits.problems.join("; ");
    if let Some((limit, reason)) = limits.use_unknown.into_iter().min_by_key(|(limit, _)| *limit) {
        let others = limits.binding.map_or(u64::MAX, |binding| binding.headroom_bytes);
        let most = limit.min(others).min(host.value().copied().unwrap_or(u64::MAX));
        facts.usable_bytes = Fact::estimated(most, format!("at most this much: {reason}"));
        facts.limit = Fact::unknown(reason);
        return;
    }
    let Some(binding) = limits.binding else {
        facts.usable_bytes =
            with_note(host, "host memory binds, no control group limits it", &note);
        facts.limit = if note.is_empty() {
            Fact::read(None, "no control group of this process has a memory limit")
        } else {
            Fact::unknown(note)
        };
        return;
    };
    let said = format!(
        "control group {} leaves {} of {} ({})",
        binding.group,
        gigabytes(binding.headroom_bytes),
        gigabytes(binding.limit_bytes),
        binding.file,
    );
    facts.usable_bytes = match host {
        host if host.value().is_some_and(|&available| available <= binding.headroom_bytes) => {
            with_note(host, "host memory binds", &said)
        }
        host => {
            let host = match host.value() {
                Some(&bytes) => format!("the host has {} available", gigabytes(bytes)),
                None => format!("host unknown: {}", host.detail()),
            };
            Fact::read(binding.headroom_bytes, format!("{said} and binds; {host}"))
        }
    };
    facts.limit = Fact::read(Some(binding), if note.is_empty() { said } else { note });
}

/// The same value with the rule that chose it in front of its detail.
fn with_note(fact: Fact<u64>, rule: &str, note: &str) -> Fact<u64> {
    let join = |detail: String| match note {
        "" => format!("{rule} ({detail})"),
        note => format!("{rule} ({detail}); {note}"),
    };
    match fact {
        Fact::Measured { value, detail } => Fact::measured(value, join(detail)),
        Fact::Read { value, detail } => Fact::read(value, join(detail)),
        Fact::Estimated { value, detail } => Fact::estimated(value, join(detail)),
        Fact::Assumed { value, detail } => Fact::assumed(value, join(detail)),
        Fact::Unknown { reason } => Fact::unknown(reason),
    }
}

/// Bytes for people, in units of 1e9.
pub(crate) fn gigabytes(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}
