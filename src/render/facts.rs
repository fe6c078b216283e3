//! Facts of a machine by group, one a row: what it is, its value, and where that came from.

use std::fmt::Display;

use tierkeep_doctor::{
    Cache, CacheKind, CoreKind, CoreSpeed, DiskReadSpeed, Fact, Facts, FailedSet, GpuFact,
    GpuVendor, HugePagePool, NumaNode,
};
use tierkeep_plans::units::Bytes;

use super::Style;
use super::style::whole_words;

/// Columns of a fact's name, the blanks around it included.
const NAME_WIDTH: usize = 24;
/// Lines longer than this are hard to follow.
const MOST_WIDTH: usize = 130;

/// The machine, group by group.
pub(crate) fn facts_text(facts: &Facts, style: Style) -> String {
    let groups = [
        ("processor", processor(facts)),
        ("memory", memory(facts)),
        ("disk", disk(facts)),
        ("graphics processors", gpus(facts)),
        ("platform", platform(facts)),
    ];
    let mut text = String::new();
    for (title, rows) in groups {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&style.heading(title));
        for row in rows {
            text.push_str(&row.text(style));
        }
    }
    text
}

/// One fact as it is shown.
struct Row {
    name: String,
    value: String,
    source: String,
}

impl Row {
    fn new<T: Display>(name: &str, fact: &Fact<T>) -> Self {
        let (value, source) = match fact.value() {
            Some(value) => {
                let source = match fact.detail() {
                    "" => fact.source().to_string(),
                    detail => format!("{}: {detail}", fact.source()),
                };
                (value.to_string(), source)
            }
            None => ("unknown".to_owned(), fact.detail().to_owned()),
        };
        Self { name: name.to_owned(), value, source }
    }

    fn bytes(name: &str, fact: &Fact<u64>) -> Self {
        Self::new(name, &fact.clone().map(Bytes))
    }

    fn rate(name: &str, fact: &Fact<f64>) -> Self {
        Self::new(name, &fact.clone().map(rate))
    }

    /// Its columns side by side, each wrapped in its own width. A value with a word that is wider than
    /// its column, such as a path, has the line for itself, and its source stands below.
    fn text(&self, style: Style) -> String {
        let width = usize::from(style.width).min(MOST_WIDTH);
        let rest = width.saturating_sub(NAME_WIDTH + 2).max(20);
        let value_width = rest * 2 / 5;
        let widest = self.value.split(' ').map(textwrap::core::display_width).max().unwrap_or(0);
        let is_long = widest > value_width;
        let column = |text: &str, width: usize| -> Vec<String> {
            let lines = textwrap::wrap(text, whole_words(width.max(1)));
            lines.into_iter().map(std::borrow::Cow::into_owned).collect()
        };
        let names = column(&self.name, NAME_WIDTH - 4);
        let values = column(&self.value, if is_long { rest } else { value_width });
        let mut sources = column(&self.source, rest - value_width);
        if is_long && !self.source.is_empty() {
            sources.splice(0..0, vec![String::new(); values.len()]);
        }
        let n_lines = names.len().max(values.len()).max(sources.len());
        let mut text = String::new();
        for line in 0..n_lines {
            let at = |column: &[String]| column.get(line).cloned().unwrap_or_default();
            let (name, value) =
                (padded(&at(&names), NAME_WIDTH - 4), padded(&at(&values), value_width));
            let line = format!("  {name}  {value}  {}", at(&sources));
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Text with blanks up to a width as it is displayed.
fn padded(text: &str, width: usize) -> String {
    let blanks = width.saturating_sub(textwrap::core::display_width(text));
    format!("{text}{}", " ".repeat(blanks))
}

fn rate(bytes_per_s: f64) -> String {
    format!("{:.1} GB/s", bytes_per_s / 1e9)
}

fn processor(facts: &Facts) -> Vec<Row> {
    let cpu = &facts.cpu;
    let yes_no = |is: bool| if is { "on" } else { "off" };
    let mut rows = vec![
        Row::new("model", &cpu.model_name),
        Row::new("sockets", &cpu.sockets),
        Row::new("physical cores", &cpu.physical_cores),
        Row::new("hardware threads", &cpu.logical_cores),
        Row::new("SMT", &cpu.smt.clone().map(yes_no)),
        Row::new("kinds of cores", &cpu.core_kinds.clone().map(|kinds| joined(&kinds, core_kind))),
        Row::new("NUMA nodes", &cpu.numa_nodes.clone().map(|nodes| joined(&nodes, numa_node))),
        Row::new("caches", &cpu.caches.clone().map(|caches| joined(&caches, cache))),
        Row::new("allowed CPUs", &cpu.allowed_cpus),
        Row::new(
            "CPU quota",
            &cpu.quota_cores.clone().map(|quota| match quota {
                Some(cores) => format!("{cores:.2} cores"),
                None => "none".to_owned(),
            }),
        ),
        Row::new("threads to compute", &cpu.usable_threads),
        Row::new("instruction sets", &cpu.instruction_sets.clone().map(|sets| sets.join(" "))),
    ];
    // Nothing is the rule, and the sets that work say whether they were tried.
    if cpu.failed_sets.value().is_some_and(|sets| !sets.is_empty()) {
        let names = |sets: Vec<FailedSet>| joined(&sets, |set| set.name.clone());
        rows.push(Row::new("sets that fail", &cpu.failed_sets.clone().map(names)));
    }
    rows
}

fn joined<T>(items: &[T], one: impl Fn(&T) -> String) -> String {
    if items.is_empty() {
        return "none".to_owned();
    }
    items.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn core_kind(kind: &CoreKind) -> String {
    let speed = match kind.kind {
        CoreSpeed::Fast => "fast",
        CoreSpeed::Slow => "slow",
    };
    format!("{} {speed} with {} threads (CPUs {})", kind.cores, kind.threads, kind.cpus)
}

fn numa_node(node: &NumaNode) -> String {
    let memory =
        node.memory_bytes.map_or_else(|| "memory unknown".to_owned(), |b| Bytes(b).to_string());
    let cpus = if node.cpus.is_empty() { "no CPUs" } else { &node.cpus };
    format!("{}: {memory}, CPUs {cpus}", node.id)
}

fn cache(cache: &Cache) -> String {
    let kind = match cache.kind {
        CacheKind::Data => "d",
        CacheKind::Instruction => "i",
        CacheKind::Unified => "",
    };
    format!("L{}{kind} {} x {}", cache.level, cache.instances, binary(cache.bytes))
}

/// Bytes in powers of two, as caches and pages are counted.
fn binary(bytes: u64) -> String {
    let units = [(1_u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit)) {
        Some((unit, name)) => format!("{} {name}", bytes / unit),
        None => Bytes(bytes).to_string(),
    }
}

fn memory(facts: &Facts) -> Vec<Row> {
    let memory = &facts.memory;
    let limit = memory.limit.clone().map(|limit| match limit {
        None => "none".to_owned(),
        Some(limit) => format!(
            "{} in group {}, {} left",
            Bytes(limit.limit_bytes),
            limit.group,
            Bytes(limit.headroom_bytes)
        ),
    });
    let swap = memory.swap_total_bytes.clone().map(|total| match memory.swap_free_bytes.value() {
        Some(&free) => format!("{}, {} free", Bytes(total), Bytes(free)),
        None => format!("{}, how much is free is unknown", Bytes(total)),
    });
    let locked = memory.locked_limit_bytes.clone().map(|limit| match limit {
        None => "no limit".to_owned(),
        Some(bytes) => Bytes(bytes).to_string(),
    });
    vec![
        Row::bytes("total", &memory.total_bytes),
        Row::bytes("available", &memory.available_bytes),
        Row::new("limit of a group", &limit),
        Row::bytes("usable here", &memory.usable_bytes),
        Row::rate("read, all threads", &memory.read_bandwidth_bytes_per_s),
        Row::rate("read, one thread", &memory.read_bandwidth_one_thread_bytes_per_s),
        Row::new("swap", &swap),
        Row::new("may be locked", &locked),
        Row::new("huge pages", &memory.huge_pages.clone().map(|pools| joined(&pools, pool))),
        Row::new("transparent ones", &memory.transparent_huge_pages),
        Row::bytes("ZFS's cache", &memory.zfs_arc_bytes),
    ]
}

fn pool(pool: &HugePagePool) -> String {
    format!("{} of {}, {} free", pool.total, binary(pool.page_bytes), pool.free)
}

fn disk(facts: &Facts) -> Vec<Row> {
    let disk = &facts.disk;
    let moving = |rotational: bool| if rotational { "yes" } else { "no" };
    let mut rows = vec![
        Row::new("folder", &disk.path),
        Row::new("filesystem", &disk.filesystem),
        Row::new("mounted at", &disk.mount_point),
        Row::new("device", &disk.device),
        Row::new("link", &disk.link),
        Row::new("moving parts", &disk.rotational.clone().map(moving)),
        Row::bytes("size", &disk.total_bytes),
        Row::bytes("free", &disk.free_bytes),
        Row::new("random reads", &disk.read.clone().map(|read| speed(&read))),
    ];
    // One speed is that of the row above.
    if let Some(reads) = disk.reads.value().filter(|reads| reads.len() > 1) {
        rows.extend(reads.iter().map(|read| Row {
            name: String::new(),
            value: speed(read),
            source: disk.reads.source().to_string(),
        }));
    }
    rows
}

fn speed(read: &DiskReadSpeed) -> String {
    let DiskReadSpeed { bytes_per_s, read_bytes, queue_depth } = read;
    format!("{} ({}, {queue_depth} at once)", fine_rate(*bytes_per_s), binary(*read_bytes))
}

fn fine_rate(bytes_per_s: f64) -> String {
    if bytes_per_s < 1e9 { format!("{:.0} MB/s", bytes_per_s / 1e6) } else { rate(bytes_per_s) }
}

fn gpus(facts: &Facts) -> Vec<Row> {
    let mut rows = Vec::new();
    for (maker, fact) in [("NVIDIA", &facts.gpus.nvidia), ("others", &facts.gpus.others)] {
        match fact.value() {
            Some(gpus) if !gpus.is_empty() => gpus.iter().for_each(|gpu| gpu_rows(gpu, &mut rows)),
            Some(_) => rows.push(Row::new(maker, &fact.clone().map(|_| "none"))),
            None => rows.push(Row::new(maker, &fact.clone().map(|_| ""))),
        }
    }
    rows
}

fn gpu_rows(gpu: &GpuFact, rows: &mut Vec<Row>) {
    let vendor = match gpu.vendor {
        GpuVendor::Nvidia => "NVIDIA",
        GpuVendor::Amd => "AMD",
        GpuVendor::Intel => "Intel",
    };
    rows.push(Row::new(&format!("{vendor} {}", gpu.index), &gpu.name));
    if gpu.is_unified.value() == Some(&true) {
        rows.push(Row::new("  memory", &gpu.is_unified.clone().map(|_| "the system's")));
    } else {
        rows.push(Row::bytes("  memory", &gpu.memory_total_bytes));
        rows.push(Row::bytes("  free", &gpu.memory_free_bytes));
    }
    let known = |rows: &mut Vec<Row>, row: Row, is_known: bool| {
        if is_known {
            rows.push(row);
        }
    };
    let reserved = &gpu.memory_reserved_bytes;
    known(rows, Row::bytes("  reserved", reserved), !reserved.is_unknown());
    let bandwidth = &gpu.memory_bandwidth_bytes_per_s;
    known(rows, Row::rate("  memory read", bandwidth), !bandwidth.is_unknown());
    let link = &gpu.link_bytes_per_s;
    known(rows, Row::rate("  link, one way", link), !link.is_unknown());
    let capability = &gpu.compute_capability;
    known(rows, Row::new("  compute capability", capability), !capability.is_unknown());
    known(rows, Row::new("  driver", &gpu.driver_version), !gpu.driver_version.is_unknown());
    known(rows, Row::new("  MIG", &gpu.mig), !gpu.mig.is_unknown());
}

fn platform(facts: &Facts) -> Vec<Row> {
    let platform = &facts.platform;
    let yes_no = |is: bool| if is { "yes" } else { "no" };
    vec![
        Row::new("system", &platform.os),
        Row::new("kernel", &platform.kernel),
        Row::new("container", &platform.container),
        Row::new("virtual machine", &platform.virtual_machine),
        Row::new("WSL", &platform.wsl.clone().map(yes_no)),
    ]
}
