//! How much memory there is and how much of it this process may take.
//!
//! Owns the combination of the host's figures with the limits of control groups. Refuses to add up
//! what a model needs, and leaves timing to `bandwidth`.

use crate::cgroup;
use crate::fact::Fact;
use crate::facts::{HugePagePool, MemoryFacts};
use crate::parse::{self, ArcStats, MemInfo};
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
    let arc = zfs_arc(tree);
    if let Ok(Some(stats)) = &arc {
        available_bytes = with_arc(available_bytes, stats, total_bytes.value().copied());
    }
    let mut facts = MemoryFacts {
        huge_pages: huge_pages(tree),
        transparent_huge_pages: transparent_huge_pages(tree),
        zfs_arc_bytes: match arc {
            Ok(Some(stats)) => Fact::read(stats.size_bytes, format!("size of {ARCSTATS}")),
            // Without the module there is no such file, but only if /proc is there at all.
            Ok(None) if info.is_ok() => Fact::read(0, format!("no ZFS: there is no {ARCSTATS}")),
            Ok(None) => Fact::unknown(format!("there is no {ARCSTATS}")),
            Err(reason) => Fact::unknown(reason),
        },
        locked_limit_bytes: locked_limit(tree),
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

const ARCSTATS: &str = "/proc/spl/kstat/zfs/arcstats";

/// ZFS's own cache, if there is one.
fn zfs_arc(tree: &Tree) -> Result<Option<ArcStats>, String> {
    match tree.read(ARCSTATS) {
        Ok(text) => match parse::parse_arcstats(&text) {
            Ok(stats) => Ok(Some(stats)),
            Err(error) => Err(format!("{ARCSTATS}: {error}")),
        },
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// What is available with what ZFS gives back: its cache shrinks to its minimum when others need
/// memory, but the kernel does not count it as available. That it does so in time is a rule that can
/// be wrong.
fn with_arc(host: Fact<u64>, stats: &ArcStats, total_bytes: Option<u64>) -> Fact<u64> {
    let spare = stats.size_bytes.saturating_sub(stats.least_bytes);
    let Some(&available) = host.value() else { return host };
    if spare == 0 {
        return host;
    }
    let most = total_bytes.unwrap_or(u64::MAX);
    let detail = format!(
        "{}, and {} of ZFS's cache of {}, which keeps {} (c_min)",
        host.detail(),
        gigabytes(spare),
        gigabytes(stats.size_bytes),
        gigabytes(stats.least_bytes.min(stats.size_bytes)),
    );
    Fact::estimated(available.saturating_add(spare).min(most), detail)
}

/// Pools of explicit huge pages; page sizes whose pool is unreadable are left out.
fn huge_pages(tree: &Tree) -> Fact<Vec<HugePagePool>> {
    const FOLDER: &str = "/sys/kernel/mm/hugepages";
    let names = match tree.list(FOLDER) {
        Ok(names) => names,
        Err(error) => return Fact::unknown(error.to_string()),
    };
    let pool = |name: &String| {
        let count = |file: &str| -> Option<u64> {
            tree.read_value(format!("{FOLDER}/{name}/{file}")).ok()?.parse().ok()
        };
        Some(HugePagePool {
            page_bytes: parse::parse_huge_page_folder(name)?,
            total: count("nr_hugepages")?,
            free: count("free_hugepages")?,
        })
    };
    let mut pools: Vec<HugePagePool> = names.iter().filter_map(pool).collect();
    pools.sort_by_key(|pool| pool.page_bytes);
    Fact::read(pools, FOLDER)
}

fn transparent_huge_pages(tree: &Tree) -> Fact<String> {
    const FILE: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    match tree.read_value(FILE) {
        Ok(text) => match parse::parse_choice(&text) {
            Some(choice) => Fact::read(choice.to_owned(), FILE),
            None => Fact::unknown(format!("{FILE}: expected one choice in brackets")),
        },
        Err(error) => Fact::unknown(error.to_string()),
    }
}

/// What this process may lock: its limit, which does not bind a process with CAP_IPC_LOCK.
fn locked_limit(tree: &Tree) -> Fact<Option<u64>> {
    const FILE: &str = "/proc/self/limits";
    let limit = match tree.read(FILE) {
        Ok(text) => parse::parse_locked_limit(&text).map_err(|error| format!("{FILE}: {error}")),
        Err(error) => Err(error.to_string()),
    };
    let is_privileged =
        tree.read("/proc/self/status").is_ok_and(|status| parse::can_lock_all(&status));
    match limit {
        Ok(Some(limit)) if is_privileged => Fact::read(
            None,
            format!("this process has CAP_IPC_LOCK; its limit would be {limit} bytes"),
        ),
        Ok(limit) => Fact::read(limit, format!("Max locked memory of {FILE}")),
        Err(reason) => Fact::unknown(reason),
    }
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

/// Bytes for people, in units of 1e9, or of 1e6 where those would leave a digit.
pub(crate) fn gigabytes(bytes: u64) -> String {
    if bytes < 1_000_000_000 {
        return format!("{:.1} MB", bytes as f64 / 1e6);
    }
    format!("{:.2} GB", bytes as f64 / 1e9)
}
