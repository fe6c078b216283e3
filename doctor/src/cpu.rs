//! The processor: its name, its cores and how many of them this process may keep busy.
//!
//! Owns the rule for usable threads. Refuses to promise an instruction set that the operating system
//! has not enabled: on the running machine the standard library's detection decides, and only for a
//! recorded tree the flags of `/proc/cpuinfo`.

use std::collections::{BTreeMap, BTreeSet};

use crate::cgroup;
use crate::fact::Fact;
use crate::facts::CpuFacts;
use crate::parse::{self, CpuInfo};
use crate::tree::Tree;

/// CPU facts. `affinity` replaces the mask of this process.
pub(crate) fn probe(tree: &Tree, affinity: Option<&[usize]>) -> CpuFacts {
    let info = tree.read("/proc/cpuinfo").map(|text| parse::parse_cpuinfo(&text));
    let info = info.map_err(|error| error.to_string());
    let model_name = match &info {
        Ok(info) => match &info.model_name {
            Some(name) => Fact::read(name.clone(), "/proc/cpuinfo"),
            None => Fact::unknown("/proc/cpuinfo names no model"),
        },
        Err(reason) => Fact::unknown(reason.clone()),
    };
    let online = online(tree, &info);
    let info_or_none = info.as_ref().ok();
    let physical_cores = match &online {
        Ok((cpus, _)) => match cores(tree, info_or_none, cpus) {
            Some((count, detail)) => Fact::read(count, detail),
            None => {
                Fact::unknown("neither /sys nor /proc/cpuinfo tells which threads share a core")
            }
        },
        Err(reason) => Fact::unknown(reason.clone()),
    };
    let logical_cores = match &online {
        Ok((cpus, detail)) => Fact::read(cpus.len() as u64, *detail),
        Err(reason) => Fact::unknown(reason.clone()),
    };
    let online = online.ok().map(|(cpus, _)| cpus);
    CpuFacts {
        model_name,
        physical_cores,
        logical_cores,
        usable_threads: usable_threads(tree, info_or_none, online.as_deref(), affinity),
        instruction_sets: instruction_sets(tree, &info),
        ..CpuFacts::default()
    }
}

/// The CPUs that are online and where that is written.
fn online(
    tree: &Tree,
    info: &Result<CpuInfo, String>,
) -> Result<(Vec<usize>, &'static str), String> {
    const FILE: &str = "/sys/devices/system/cpu/online";
    let from_sysfs = tree.read_value(FILE).map_err(|error| error.to_string());
    let from_sysfs =
        from_sysfs.and_then(|text| parse::parse_cpu_list(&text).map_err(|error| error.to_string()));
    match (from_sysfs, info) {
        (Ok(cpus), _) if !cpus.is_empty() => Ok((cpus, FILE)),
        (_, Ok(info)) if !info.processors.is_empty() => {
            let cpus = info.processors.iter().map(|processor| processor.id).collect();
            Ok((cpus, "processors of /proc/cpuinfo"))
        }
        (Ok(_), Ok(_)) => Err(format!("{FILE} and /proc/cpuinfo list no CPU")),
        (Ok(_), Err(reason)) => Err(reason.clone()),
        (Err(reason), _) => Err(reason),
    }
}

/// How many cores `cpus` lie on, siblings counted once, and where that is written.
fn cores(tree: &Tree, info: Option<&CpuInfo>, cpus: &[usize]) -> Option<(u64, &'static str)> {
    let core_of = |&cpu: &usize| {
        let read = |file: &str| {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/{file}");
            tree.read_value(path).ok().filter(|text| !text.is_empty())
        };
        // The list of siblings is unique to a core even where core numbers repeat in each die or
        // cluster; the numbers serve where the list is missing.
        read("core_cpus_list")
            .or_else(|| read("thread_siblings_list"))
            .or_else(|| Some(format!("{}:{}", read("physical_package_id")?, read("core_id")?)))
    };
    let from_sysfs: Option<BTreeSet<String>> = cpus.iter().map(core_of).collect();
    if let Some(cores) = from_sysfs {
        return Some((cores.len() as u64, "/sys/devices/system/cpu/cpu*/topology"));
    }
    let processors = &info?.processors;
    let core_of = |&cpu: &usize| {
        let processor = processors.iter().find(|processor| processor.id == cpu)?;
        Some((processor.package?, processor.core?))
    };
    let cores: Option<BTreeSet<(u64, u64)>> = cpus.iter().map(core_of).collect();
    Some((cores?.len() as u64, "physical id and core id of /proc/cpuinfo"))
}

/// The CPUs that this process may run on and who says so.
fn allowed(tree: &Tree, affinity: Option<&[usize]>) -> Result<(Vec<usize>, &'static str), String> {
    if let Some(cpus) = affinity {
        return Ok((cpus.to_vec(), "the given affinity mask"));
    }
    #[cfg(target_os = "linux")]
    if tree.is_live()
        && let Ok(set) = rustix::thread::sched_getaffinity(None)
    {
        let cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
        return Ok((cpus, "the affinity mask"));
    }
    let status = tree.read("/proc/self/status").map_err(|error| error.to_string())?;
    let list = parse::parse_cpus_allowed_list(&status)
        .ok_or("/proc/self/status has no Cpus_allowed_list")?;
    let cpus = parse::parse_cpu_list(list).map_err(|error| error.to_string())?;
    Ok((cpus, "Cpus_allowed_list of /proc/self/status"))
}

fn usable_threads(
    tree: &Tree,
    info: Option<&CpuInfo>,
    online: Option<&[usize]>,
    affinity: Option<&[usize]>,
) -> Fact<u64> {
    let allowed = allowed(tree, affinity);
    let (cpus, by) = match (&allowed, online) {
        (Ok((allowed, by)), Some(online)) => {
            let both: Vec<usize> =
                allowed.iter().copied().filter(|cpu| online.contains(cpu)).collect();
            // A container may show fewer CPUs as online than the mask names, or number them anew.
            if both.is_empty() { (online.to_vec(), "online CPUs") } else { (both, *by) }
        }
        (Ok((allowed, by)), None) => (allowed.clone(), *by),
        (Err(_), Some(online)) => (online.to_vec(), "online CPUs"),
        (Err(reason), None) => return Fact::unknown(reason.clone()),
    };
    let logical = cpus.len().max(1) as u64;
    let mut detail = format!("{logical} allowed by {by}");
    let mut threads = logical;
    match cores(tree, info, &cpus) {
        Some((count, _)) if count < logical => {
            threads = count.max(1);
            detail.push_str(&format!(" on {count} physical cores"));
        }
        Some(_) => {}
        None => detail.push_str("; which of them share a core is unknown"),
    }
    match cgroup::cpu_quota(tree) {
        Ok(Some((cpus, group))) => {
            let quota = (cpus.ceil() as u64).max(1);
            if quota < threads {
                threads = quota;
                detail
                    .push_str(&format!("; control group {group} allows {cpus:.2} CPUs and binds"));
            }
        }
        Ok(None) => {}
        Err(reason) => detail.push_str(&format!("; CPU quota unknown: {reason}")),
    }
    Fact::read(threads, detail)
}

/// Instruction sets that kernels of this product use or will: Rust's name and Linux's flag.
const INSTRUCTION_SETS: &[(&str, &str)] = &[
    ("sse4.1", "sse4_1"),
    ("avx2", "avx2"),
    ("fma", "fma"),
    ("f16c", "f16c"),
    ("avx512f", "avx512f"),
    ("avx512bw", "avx512bw"),
    ("avx512dq", "avx512dq"),
    ("avx512vl", "avx512vl"),
    ("avx512vnni", "avx512_vnni"),
    ("avx512bf16", "avx512_bf16"),
    ("avxvnni", "avx_vnni"),
    ("amx-tile", "amx_tile"),
    ("amx-int8", "amx_int8"),
    ("amx-bf16", "amx_bf16"),
    ("neon", "asimd"),
    ("dotprod", "asimddp"),
    ("i8mm", "i8mm"),
];

fn instruction_sets(tree: &Tree, info: &Result<CpuInfo, String>) -> Fact<Vec<String>> {
    if tree.is_live() {
        return detected();
    }
    match info {
        Ok(info) if !info.flags.is_empty() => {
            let has = |flag: &str| info.flags.iter().any(|found| found == flag);
            let sets = INSTRUCTION_SETS.iter().filter(|(_, flag)| has(flag));
            let sets = sets.map(|(name, _)| (*name).to_owned()).collect();
            Fact::read(sets, "flags of /proc/cpuinfo")
        }
        Ok(_) => Fact::unknown("/proc/cpuinfo lists no flags"),
        Err(reason) => Fact::unknown(reason.clone()),
    }
}

/// What the running processor and its operating system support. The stable standard library cannot
/// tell AMX yet, so it is not listed here.
#[cfg(target_arch = "x86_64")]
fn detected() -> Fact<Vec<String>> {
    macro_rules! detect {
        ($($name:tt),*) => {
            [$(($name, std::arch::is_x86_feature_detected!($name))),*]
        };
    }
    let all = detect!(
        "sse4.1",
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512dq",
        "avx512vl",
        "avx512vnni",
        "avx512bf16",
        "avxvnni"
    );
    let sets = all.iter().filter(|(_, has)| *has).map(|(name, _)| (*name).to_owned()).collect();
    Fact::read(sets, "CPUID and XGETBV; AMX is not looked for")
}

/// What the running processor and its operating system support.
#[cfg(target_arch = "aarch64")]
fn detected() -> Fact<Vec<String>> {
    macro_rules! detect {
        ($($name:tt),*) => {
            [$(($name, std::arch::is_aarch64_feature_detected!($name))),*]
        };
    }
    let all = detect!("neon", "dotprod", "i8mm");
    let sets = all.iter().filter(|(_, has)| *has).map(|(name, _)| (*name).to_owned()).collect();
    Fact::read(sets, "the operating system's report")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detected() -> Fact<Vec<String>> {
    Fact::unknown("no instruction sets are known for this processor yet")
}

/// Size of the last-level caches of all online CPUs together, each instance counted once.
pub(crate) fn last_level_cache_bytes(tree: &Tree) -> Option<u64> {
    let online = parse::parse_cpu_list(&tree.read("/sys/devices/system/cpu/online").ok()?).ok()?;
    let mut last: BTreeMap<u64, BTreeMap<String, u64>> = BTreeMap::new();
    for cpu in online {
        for index in 0..8 {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/cache/index{index}");
            let read = |file: &str| tree.read_value(format!("{path}/{file}")).ok();
            let Some(level) = read("level").and_then(|text| text.parse().ok()) else { break };
            let size = read("size").and_then(|text| parse::parse_cache_size(&text).ok());
            if let (Some(size), Some(shared)) = (size, read("shared_cpu_list")) {
                last.entry(level).or_default().insert(shared, size);
            }
        }
    }
    last.last_key_value()
        .map(|(_, instances)| instances.values().fold(0_u64, |sum, &size| sum.saturating_add(size)))
}
