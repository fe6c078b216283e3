//! How the processor is built: cores, sockets, kinds of cores, memory nodes, caches.
//!
//! Owns what of `/sys/devices` says which hardware threads belong together. Refuses to tell kinds of
//! cores by a product's name, and to count a cache or a core twice.

use std::collections::{BTreeMap, BTreeSet};

use crate::fact::Fact;
use crate::facts::{Cache, CacheKind, CoreKind, CoreSpeed, NumaNode};
use crate::parse::{self, CpuInfo};
use crate::tree::Tree;

const CPUS: &str = "/sys/devices/system/cpu";

/// A processor may have more caches on one thread than this only if its tables are nonsense.
const MAX_CACHES_OF_A_THREAD: usize = 16;

/// Cores of less than this share of the best one's capacity or clock are slow. Favoured cores of one
/// kind differ by up to a tenth; the slow cores of hybrid processors reach 80 % at most.
const FAST_SHARE: f64 = 0.85;

/// Which core each hardware thread lies on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cores {
    /// A name of its core, by CPU number.
    by_cpu: BTreeMap<usize, String>,
    /// Where that is written.
    pub(crate) detail: &'static str,
}

impl Cores {
    /// How many cores some threads lie on, siblings counted once. A thread that is not known here is
    /// a core of its own.
    pub(crate) fn count(&self, cpus: &[usize]) -> u64 {
        self.first_threads(cpus).len() as u64
    }

    /// The first thread of each core, in the order given.
    pub(crate) fn first_threads(&self, cpus: &[usize]) -> Vec<usize> {
        let mut seen = BTreeSet::new();
        let is_first = |cpu: &usize| self.by_cpu.get(cpu).is_none_or(|core| seen.insert(core));
        cpus.iter().copied().filter(is_first).collect()
    }
}

/// The cores that threads lie on, if it is known of all of them.
pub(crate) fn cores(tree: &Tree, info: Option<&CpuInfo>, cpus: &[usize]) -> Option<Cores> {
    let core_of = |&cpu: &usize| {
        let read = |file: &str| topology_file(tree, cpu, file);
        // The list of siblings is unique to a core even where core numbers repeat in each die or
        // cluster; the numbers serve where the list is missing.
        let core = read("core_cpus_list")
            .or_else(|| read("thread_siblings_list"))
            .or_else(|| Some(format!("{}:{}", read("physical_package_id")?, read("core_id")?)));
        Some((cpu, core?))
    };
    if let Some(by_cpu) = cpus.iter().map(core_of).collect() {
        return Some(Cores { by_cpu, detail: "/sys/devices/system/cpu/cpu*/topology" });
    }
    let processors = &info?.processors;
    let core_of = |&cpu: &usize| {
        let processor = processors.iter().find(|processor| processor.id == cpu)?;
        Some((cpu, format!("{}:{}", processor.package?, processor.core?)))
    };
    let by_cpu = cpus.iter().map(core_of).collect::<Option<_>>()?;
    Some(Cores { by_cpu, detail: "physical id and core id of /proc/cpuinfo" })
}

fn topology_file(tree: &Tree, cpu: usize, file: &str) -> Option<String> {
    let path = format!("{CPUS}/cpu{cpu}/topology/{file}");
    tree.read_value(path).ok().filter(|text| !text.is_empty())
}

/// Processor packages of the online CPUs.
pub(crate) fn sockets(tree: &Tree, info: Option<&CpuInfo>, online: &[usize]) -> Fact<u64> {
    // Kernels that cannot tell write -1.
    let package =
        |&cpu: &usize| topology_file(tree, cpu, "physical_package_id")?.parse::<u64>().ok();
    let from_sysfs: Option<BTreeSet<u64>> = online.iter().map(package).collect();
    if let Some(packages) = from_sysfs.filter(|packages| !packages.is_empty()) {
        return Fact::read(packages.len() as u64, "physical_package_id of /sys/devices/system/cpu");
    }
    let processors = info.map_or(&[][..], |info| &info.processors);
    let from_cpuinfo: Option<BTreeSet<u64>> =
        processors.iter().map(|processor| processor.package).collect();
    match from_cpuinfo.filter(|packages| !packages.is_empty()) {
        Some(packages) => Fact::read(packages.len() as u64, "physical id of /proc/cpuinfo"),
        None => Fact::unknown("neither /sys nor /proc/cpuinfo tells which socket a core is in"),
    }
}

/// Whether cores run more than one thread.
pub(crate) fn smt(tree: &Tree, online: &[usize], cores: Option<&Cores>) -> Fact<bool> {
    const FILE: &str = "/sys/devices/system/cpu/smt/active";
    match (tree.read_value(FILE).as_deref(), cores) {
        (Ok("0"), _) => Fact::read(false, FILE),
        (Ok("1"), _) => Fact::read(true, FILE),
        (_, Some(cores)) => Fact::read(cores.count(online) < online.len() as u64, cores.detail),
        (Ok(other), None) => Fact::unknown(format!("{FILE}: expected 0 or 1, found {other}")),
        (Err(error), None) => Fact::unknown(error.to_string()),
    }
}

/// Memory nodes. A kernel that knows none has no folder of them.
pub(crate) fn numa_nodes(tree: &Tree) -> Fact<Vec<NumaNode>> {
    const FOLDER: &str = "/sys/devices/system/node";
    let list = tree.read_value(format!("{FOLDER}/online")).map_err(|error| error.to_string());
    let list =
        list.and_then(|text| parse::parse_cpu_list(&text).map_err(|error| error.to_string()));
    let ids = match list {
        Ok(ids) if !ids.is_empty() => ids,
        Ok(_) => return Fact::unknown(format!("{FOLDER}/online lists no node")),
        Err(reason) => return Fact::unknown(reason),
    };
    let node = |id: &usize| {
        let read = |file: &str| tree.read(format!("{FOLDER}/node{id}/{file}")).ok();
        Some(NumaNode {
            id: u32::try_from(*id).ok()?,
            cpus: read("cpulist").unwrap_or_default().trim().to_owned(),
            memory_bytes: read("meminfo").and_then(|text| parse::parse_node_total(&text)),
        })
    };
    Fact::read(ids.iter().filter_map(node).collect(), FOLDER)
}

/// Fast and slow cores.
pub(crate) fn core_kinds(
    tree: &Tree,
    online: &[usize],
    cores: Option<&Cores>,
) -> Fact<Vec<CoreKind>> {
    let Some(cores) = cores else {
        return Fact::unknown("which threads share a core is unknown");
    };
    let kind = |kind, cpus: &[usize]| CoreKind {
        kind,
        cores: cores.count(cpus),
        threads: cpus.len() as u64,
        cpus: parse::format_cpu_list(cpus),
    };
    let split = |is_slow: &dyn Fn(&usize) -> bool| {
        let (slow, fast): (Vec<usize>, Vec<usize>) = online.iter().partition(|cpu| is_slow(cpu));
        let mut kinds = Vec::new();
        if !fast.is_empty() {
            kinds.push(kind(CoreSpeed::Fast, &fast));
        }
        if !slow.is_empty() {
            // Where the fast ones are all offline, the rest are the fastest that there are.
            let speed = if fast.is_empty() { CoreSpeed::Fast } else { CoreSpeed::Slow };
            kinds.push(kind(speed, &slow));
        }
        kinds
    };
    // Intel's hybrid processors have a folder for the counters of each kind.
    if let Some((slow, detail)) = slow_by_counters(tree) {
        return Fact::read(split(&|cpu| slow.contains(cpu)), detail);
    }
    let per_cpu = |file: &str| -> Option<BTreeMap<usize, u64>> {
        let value = |&cpu: &usize| {
            let text = tree.read_value(format!("{CPUS}/cpu{cpu}/{file}")).ok()?;
            Some((cpu, text.parse().ok()?))
        };
        online.iter().map(value).collect()
    };
    let by_share = |values: &BTreeMap<usize, u64>| {
        let best = values.values().copied().max().unwrap_or(0) as f64;
        let is_slow =
            |cpu: &usize| values.get(cpu).is_some_and(|&own| (own as f64) < FAST_SHARE * best);
        split(&is_slow)
    };
    if let Some(capacities) = per_cpu("cpu_capacity") {
        return Fact::read(by_share(&capacities), "cpu_capacity of /sys/devices/system/cpu");
    }
    if let Some(clocks) = per_cpu("cpufreq/cpuinfo_max_freq") {
        let kinds = by_share(&clocks);
        let file = "cpuinfo_max_freq of /sys/devices/system/cpu";
        return match kinds.len() {
            0 | 1 => Fact::read(kinds, format!("{file}: all alike")),
            _ => Fact::estimated(kinds, format!("{file}: under 85 % of the highest is slow")),
        };
    }
    // The counters of a processor with one kind of cores have one folder.
    if tree.exists("/sys/devices/cpu") {
        return Fact::read(split(&|_| false), "/sys/devices/cpu: one kind of counters");
    }
    Fact::unknown("nothing in /sys/devices tells kinds of cores apart")
}

/// Threads of slow cores, by the counters that the kernel has for each kind: `cpu_atom` and, for those
/// on the die of low power, `cpu_lowpower`.
fn slow_by_counters(tree: &Tree) -> Option<(BTreeSet<usize>, String)> {
    let list = |name: &str| {
        let text = tree.read_value(format!("/sys/devices/{name}/cpus")).ok()?;
        parse::parse_cpu_list(&text).ok()
    };
    list("cpu_core")?;
    let mut slow = BTreeSet::new();
    let mut detail = "/sys/devices/cpu_core".to_owned();
    for name in ["cpu_atom", "cpu_lowpower"] {
        if let Some(cpus) = list(name) {
            slow.extend(cpus);
            detail.push_str(&format!(", {name}"));
        }
    }
    Some((slow, detail))
}

/// Caches of the online CPUs, each counted once.
pub(crate) fn caches(tree: &Tree, online: &[usize]) -> Fact<Vec<Cache>> {
    // By level, kind, size and how many share one: the threads that name each.
    type Key = (u32, CacheKind, u64, u64);
    let mut found: BTreeMap<Key, BTreeSet<Vec<usize>>> = BTreeMap::new();
    // A cache that several threads share has the same place in the list of each.
    let mut known: BTreeSet<(usize, usize)> = BTreeSet::new();
    for &cpu in online {
        for index in 0..MAX_CACHES_OF_A_THREAD {
            if known.contains(&(index, cpu)) {
                continue;
            }
            let folder = format!("{CPUS}/cpu{cpu}/cache/index{index}");
            let read = |file: &str| tree.read_value(format!("{folder}/{file}")).ok();
            let Some(level) = read("level").and_then(|text| text.parse().ok()) else { break };
            let kind = match read("type").as_deref() {
                Some("Data") => CacheKind::Data,
                Some("Instruction") => CacheKind::Instruction,
                Some("Unified") => CacheKind::Unified,
                Some(_) | None => continue,
            };
            let size = read("size").and_then(|text| parse::parse_cache_size(&text).ok());
            let shared = read("shared_cpu_list");
            let shared = shared.and_then(|text| parse::parse_cpu_list(&text).ok());
            if let (Some(size), Some(mut shared)) = (size, shared) {
                shared.retain(|cpu| online.binary_search(cpu).is_ok());
                known.extend(shared.iter().map(|&cpu| (index, cpu)));
                let key = (level, kind, size, shared.len() as u64);
                found.entry(key).or_default().insert(shared);
            }
        }
    }
    if found.is_empty() {
        return Fact::unknown("/sys/devices/system/cpu/cpu*/cache describes no cache");
    }
    let cache = |(&(level, kind, bytes, shared_by_threads), instances): (&Key, &BTreeSet<_>)| {
        Cache { level, kind, bytes, shared_by_threads, instances: instances.len() as u64 }
    };
    Fact::read(found.iter().map(cache).collect(), "/sys/devices/system/cpu/cpu*/cache")
}

/// Size of the last-level caches together.
pub(crate) fn last_level_cache_bytes(caches: &[Cache]) -> Option<u64> {
    let last = caches.iter().map(|cache| cache.level).max()?;
    let all = caches.iter().filter(|cache| cache.level == last);
    Some(all.fold(0, |sum, cache| sum.saturating_add(cache.bytes.saturating_mul(cache.instances))))
}
