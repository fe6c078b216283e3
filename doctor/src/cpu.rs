//! The processor: its name, its cores and how many of them this process may keep busy.
//!
//! Owns the rule for usable threads. How the processor is built is in `topology`, what it can execute
//! in `instructions`.

use crate::cgroup::{self, Quota};
use crate::fact::Fact;
use crate::facts::{CoreKind, CoreSpeed, CpuFacts};
use crate::instructions;
use crate::parse::{self, CpuInfo};
use crate::topology::{self, Cores};
use crate::tree::Tree;
use crate::trial::TrialCommand;

/// With this many fast cores the slow ones are left out: so many read as fast as memory delivers, and
/// work that is divided evenly would wait for the slow ones. With fewer, all are used.
const ENOUGH_FAST_CORES: u64 = 4;

/// CPU facts. `affinity` replaces the mask of this process; `trial` is what tries instructions.
pub(crate) fn probe(
    tree: &Tree,
    affinity: Option<&[usize]>,
    trial: Option<&TrialCommand>,
) -> CpuFacts {
    let info = tree.read("/proc/cpuinfo").map(|text| parse::parse_cpuinfo(&text));
    let info = info.map_err(|error| error.to_string());
    let model_name = match &info {
        Ok(info) => match &info.model_name {
            Some(name) => Fact::read(name.clone(), "/proc/cpuinfo"),
            None => Fact::unknown("/proc/cpuinfo names no model"),
        },
        Err(reason) => Fact::unknown(reason.clone()),
    };
    let quota = cgroup::cpu_quota(tree);
    let sets = instructions::probe(tree, &info, trial);
    let facts = CpuFacts {
        model_name,
        instruction_sets: sets.usable,
        failed_sets: sets.failed,
        quota_cores: quota_cores(&quota),
        numa_nodes: topology::numa_nodes(tree),
        ..CpuFacts::default()
    };
    let allowed = allowed(tree, affinity);
    match online(tree, &info) {
        Ok((online, by)) => {
            let of_machine = with_online(facts, tree, info.as_ref().ok(), &online, by);
            with_allowed(of_machine, tree, info.as_ref().ok(), Some(&online), &allowed, &quota)
        }
        Err(reason) => {
            let of_machine = CpuFacts {
                physical_cores: Fact::unknown(reason.clone()),
                logical_cores: Fact::unknown(reason.clone()),
                sockets: Fact::unknown(reason.clone()),
                smt: Fact::unknown(reason.clone()),
                core_kinds: Fact::unknown(reason.clone()),
                caches: Fact::unknown(reason),
                ..facts
            };
            with_allowed(of_machine, tree, info.as_ref().ok(), None, &allowed, &quota)
        }
    }
}

/// Facts about all CPUs that are online.
fn with_online(
    facts: CpuFacts,
    tree: &Tree,
    info: Option<&CpuInfo>,
    online: &[usize],
    by: &'static str,
) -> CpuFacts {
    let cores = topology::cores(tree, info, online);
    CpuFacts {
        physical_cores: match &cores {
            Some(cores) => Fact::read(cores.count(online), cores.detail),
            None => {
                Fact::unknown("neither /sys nor /proc/cpuinfo tells which threads share a core")
            }
        },
        logical_cores: Fact::read(online.len() as u64, by),
        sockets: topology::sockets(tree, info, online),
        smt: topology::smt(tree, online, cores.as_ref()),
        core_kinds: topology::core_kinds(tree, online, cores.as_ref()),
        caches: topology::caches(tree, online),
        ..facts
    }
}

/// Facts about the CPUs that this process may use.
fn with_allowed(
    facts: CpuFacts,
    tree: &Tree,
    info: Option<&CpuInfo>,
    online: Option<&[usize]>,
    allowed: &Result<(Vec<usize>, String), String>,
    quota: &Result<Quota, String>,
) -> CpuFacts {
    let (cpus, by) = match (allowed, online) {
        (Ok((allowed, by)), Some(online)) => {
            let both: Vec<usize> =
                allowed.iter().copied().filter(|cpu| online.contains(cpu)).collect();
            // A container may show fewer CPUs as online than the mask names, or number them anew.
            if both.is_empty() {
                (online.to_vec(), "online CPUs".to_owned())
            } else {
                (both, by.clone())
            }
        }
        (Ok((allowed, by)), None) => (allowed.clone(), by.clone()),
        (Err(_), Some(online)) => (online.to_vec(), "online CPUs".to_owned()),
        (Err(reason), None) => {
            let unknown = || Fact::unknown(reason.clone());
            let (usable_threads, allowed_cpus) = (Fact::unknown(reason.clone()), unknown());
            return CpuFacts { usable_threads, usable_cpus: unknown(), allowed_cpus, ..facts };
        }
    };
    let cores = topology::cores(tree, info, &cpus);
    let chosen = chosen(&cpus, &by, cores.as_ref(), &facts.core_kinds);
    let allowed_cpus = match allowed {
        Ok((cpus, by)) => Fact::read(parse::format_cpu_list(cpus), by.clone()),
        Err(reason) => Fact::unknown(reason.clone()),
    };
    CpuFacts {
        usable_cpus: with_value(
            chosen.rule.as_ref(),
            parse::format_cpu_list(&chosen.cpus),
            chosen.detail.clone(),
        ),
        usable_threads: usable_threads(&chosen, quota),
        allowed_cpus,
        ..facts
    }
}

/// The CPUs that compute threads belong on.
struct Chosen {
    /// One thread of each core.
    cpus: Vec<usize>,
    /// How they were come by.
    detail: String,
    /// A rule of ours that chose among what is allowed.
    rule: Option<String>,
}

/// A value that was read, or, where a rule of ours had a part in it, estimated.
fn with_value<T>(rule: Option<&String>, value: T, detail: String) -> Fact<T> {
    match rule {
        None => Fact::read(value, detail),
        Some(rule) => Fact::estimated(value, format!("{detail}; {rule}")),
    }
}

/// One thread of each core that may be used; of the fast ones alone where there are enough.
fn chosen(cpus: &[usize], by: &str, cores: Option<&Cores>, kinds: &Fact<Vec<CoreKind>>) -> Chosen {
    let mut detail = format!("{} threads allowed by {by}", cpus.len().max(1));
    let Some(cores) = cores else {
        detail.push_str("; which of them share a core is unknown");
        return Chosen { cpus: cpus.to_vec(), detail, rule: None };
    };
    let all = cores.first_threads(cpus);
    if all.len() < cpus.len() {
        detail.push_str(&format!(" on {} physical cores", all.len()));
    }
    let of_kind = |speed: CoreSpeed| -> Vec<usize> {
        let kinds = kinds.value().into_iter().flatten().filter(|kind| kind.kind == speed);
        kinds.filter_map(|kind| parse::parse_cpu_list(&kind.cpus).ok()).flatten().collect()
    };
    let (fast, slow) = (of_kind(CoreSpeed::Fast), of_kind(CoreSpeed::Slow));
    let within = |kind: &[usize]| -> Vec<usize> {
        all.iter().copied().filter(|cpu| kind.contains(cpu)).collect()
    };
    let (fast, slow) = (within(&fast), within(&slow));
    if fast.is_empty() || slow.is_empty() {
        return Chosen { cpus: all, detail, rule: None };
    }
    if fast.len() as u64 >= ENOUGH_FAST_CORES {
        let rule = format!(
            "the {} fast cores (CPUs {}) are used: work is divided evenly, and {} slow cores (CPUs \
             {}) would hold them up",
            fast.len(),
            parse::format_cpu_list(&fast),
            slow.len(),
            parse::format_cpu_list(&slow),
        );
        return Chosen { cpus: fast, detail, rule: Some(rule) };
    }
    let rule = format!(
        "all are used, {} fast and {} slow: so few fast cores do not read as fast as memory delivers",
        fast.len(),
        slow.len(),
    );
    Chosen { cpus: all, detail, rule: Some(rule) }
}

/// The threads of the chosen cores, within the quota.
fn usable_threads(chosen: &Chosen, quota: &Result<Quota, String>) -> Fact<u64> {
    let mut threads = chosen.cpus.len().max(1) as u64;
    let mut detail = chosen.detail.clone();
    match quota {
        Ok(quota) => {
            if let Some((cpus, group)) = &quota.smallest
                && (cpus.ceil() as u64).max(1) < threads
            {
                threads = (cpus.ceil() as u64).max(1);
                detail
                    .push_str(&format!("; control group {group} allows {cpus:.2} CPUs and binds"));
            }
            for problem in &quota.problems {
                detail.push_str(&format!("; CPU quota unknown: {problem}"));
            }
        }
        Err(reason) => detail.push_str(&format!("; CPU quota unknown: {reason}")),
    }
    with_value(chosen.rule.as_ref(), threads, detail)
}

/// The quota as a fact. One that could not be read may be smaller than the one that was.
fn quota_cores(quota: &Result<Quota, String>) -> Fact<Option<f64>> {
    match quota {
        Err(reason) => Fact::unknown(reason.clone()),
        Ok(Quota { smallest, problems }) => match (smallest, problems.as_slice()) {
            (None, []) => Fact::read(None, "no control group of this process has a CPU quota"),
            (None, problems) => Fact::unknown(problems.join("; ")),
            (Some((cpus, group)), []) => Fact::read(Some(*cpus), format!("control group {group}")),
            (Some((cpus, group)), problems) => Fact::read(
                Some(*cpus),
                format!("control group {group}; others unknown: {}", problems.join("; ")),
            ),
        },
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
            let mut cpus: Vec<usize> =
                info.processors.iter().map(|processor| processor.id).collect();
            cpus.sort_unstable();
            cpus.dedup();
            Ok((cpus, "processors of /proc/cpuinfo"))
        }
        (Ok(_), Ok(_)) => Err(format!("{FILE} and /proc/cpuinfo list no CPU")),
        (Ok(_), Err(reason)) => Err(reason.clone()),
        (Err(reason), _) => Err(reason),
    }
}

/// The CPUs that this process may run on and who says so. The mask of a process lies within its
/// cpuset; the file of the cpuset serves where the mask cannot be read, and tells which of the two it
/// is that restricts.
fn allowed(tree: &Tree, affinity: Option<&[usize]>) -> Result<(Vec<usize>, String), String> {
    if let Some(cpus) = affinity {
        return Ok((cpus.to_vec(), "the given affinity mask".to_owned()));
    }
    let cpuset = cgroup::cpuset(tree);
    let name = |mask: &[usize], by: &str| match &cpuset {
        Some((group, cpus)) if cpus == mask => format!("{by}, which is the cpuset of {group}"),
        Some((group, cpus)) => {
            format!("{by}; the cpuset of {group} is {}", parse::format_cpu_list(cpus))
        }
        None => by.to_owned(),
    };
    #[cfg(target_os = "linux")]
    if tree.is_live()
        && let Ok(set) = rustix::thread::sched_getaffinity(None)
    {
        let cpus: Vec<usize> =
            (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
        let by = name(&cpus, "the affinity mask");
        return Ok((cpus, by));
    }
    let from_status = || -> Result<Vec<usize>, String> {
        let status = tree.read("/proc/self/status").map_err(|error| error.to_string())?;
        let list = parse::parse_cpus_allowed_list(&status)
            .ok_or("/proc/self/status has no Cpus_allowed_list")?;
        parse::parse_cpu_list(list).map_err(|error| error.to_string())
    };
    match (from_status(), cpuset.as_ref()) {
        (Ok(cpus), _) => {
            let by = name(&cpus, "Cpus_allowed_list of /proc/self/status");
            Ok((cpus, by))
        }
        (Err(_), Some((group, cpus))) => Ok((cpus.clone(), format!("the cpuset of {group}"))),
        (Err(reason), None) => Err(reason),
    }
}
