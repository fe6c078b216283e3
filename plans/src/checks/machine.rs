//! Checks of a machine's memory and of what it runs in; those of its processor and its devices are
//! beside it.

use tierkeep_doctor::{CgroupLimit, Fact, Facts};

use super::{Check, devices, processor};
use crate::units::Bytes;

/// Less than this to give is too little for any model that this program is for.
const LITTLE_MEMORY_BYTES: u64 = 1_000_000_000;
/// A limit on locked memory under this is a little one: the buffers of one layer's experts.
const LITTLE_LOCKED_BYTES: u64 = 64 << 20;
/// Less than this in ZFS's cache is not worth a word.
const LITTLE_ARC_BYTES: u64 = 1_000_000_000;

/// Checks of the machine, from its facts.
#[must_use]
pub fn machine_checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![
        memory(facts),
        memory_limit(facts),
        swap(facts),
        locked_memory(facts),
        huge_pages(facts),
        zfs_arc(facts),
    ];
    checks.extend(processor::checks(facts));
    checks.extend(devices::checks(facts));
    checks.extend([platform(facts), unknown(facts)]);
    checks
}

fn memory(facts: &Facts) -> Check {
    let id = "machine.memory";
    let usable = &facts.memory.usable_bytes;
    match usable.value() {
        Some(&bytes) => {
            let finding = format!("{} can be given: {}", Bytes(bytes), usable.detail());
            if bytes < LITTLE_MEMORY_BYTES {
                Check::warn(id, finding, "end what takes the memory, or raise the limit on it")
            } else {
                Check::ok(id, finding)
            }
        }
        None => Check::warn(
            id,
            format!("what can be given is unknown: {}", usable.detail()),
            "give a budget with --ram SIZE",
        ),
    }
}

fn memory_limit(facts: &Facts) -> Check {
    let id = "machine.memory_limit";
    let limit = &facts.memory.limit;
    match limit.value() {
        None => Check::warn(
            id,
            format!("limits of control groups are unknown: {}", limit.detail()),
            "a limit that is not seen ends a run without a message: give a budget with --ram SIZE",
        ),
        Some(None) => Check::ok(id, "no control group of this process limits memory"),
        Some(Some(group)) => {
            let CgroupLimit { group: name, file, .. } = group;
            let said = format!(
                "control group {name} limits memory to {} ({file}); {} in use, of which {} is page \
                 cache that can be dropped: {} left",
                Bytes(group.limit_bytes),
                Bytes(group.used_bytes),
                Bytes(group.reclaimable_bytes),
                Bytes(group.headroom_bytes),
            );
            match facts.memory.available_bytes.value() {
                Some(&host) if host <= group.headroom_bytes => {
                    Check::ok(id, format!("{said}; the host has less, {}", Bytes(host)))
                }
                host => {
                    let host = host.map_or_else(String::new, |&host| {
                        format!("; the host has {} available", Bytes(host))
                    });
                    Check::warn(
                        id,
                        format!("{said}{host}"),
                        format!("plans stay within it; for more, raise {file} of that group"),
                    )
                }
            }
        }
    }
}

fn swap(facts: &Facts) -> Check {
    let id = "machine.swap";
    let memory = &facts.memory;
    match (memory.swap_total_bytes.value(), memory.swap_free_bytes.value()) {
        (Some(&total), Some(&free)) if free < total => Check::warn(
            id,
            format!("{} of {} of swap is in use", Bytes(total - free), Bytes(total)),
            "weights that are swapped out are read from disk twice: end what takes the memory, or \
             lower --ram",
        ),
        (Some(0), _) => Check::ok(id, "there is none"),
        (Some(&total), Some(_)) => Check::ok(id, format!("none of {} in use", Bytes(total))),
        (None, _) => unknown_is_no_matter(id, &memory.swap_total_bytes),
        (Some(_), None) => unknown_is_no_matter(id, &memory.swap_free_bytes),
    }
}

fn locked_memory(facts: &Facts) -> Check {
    let id = "machine.locked_memory";
    let limit = &facts.memory.locked_limit_bytes;
    match limit.value() {
        None => unknown_is_no_matter(id, limit),
        Some(None) => Check::ok(id, "a process may lock as much memory as it likes"),
        Some(Some(bytes)) if *bytes < LITTLE_LOCKED_BYTES => Check::warn(
            id,
            format!(
                "a process may lock {} of memory: under pressure the kernel may take the rest away, \
                 weights included",
                Bytes(*bytes)
            ),
            "leave room in --ram, or raise the limit: ulimit -l, memlock in limits.conf, \
             LimitMEMLOCK of a service",
        ),
        Some(Some(bytes)) => Check::ok(id, format!("a process may lock {}", Bytes(*bytes))),
    }
}

fn huge_pages(facts: &Facts) -> Check {
    let id = "machine.huge_pages";
    let memory = &facts.memory;
    let Some(pools) = memory.huge_pages.value() else {
        return unknown_is_no_matter(id, &memory.huge_pages);
    };
    let transparent = match memory.transparent_huge_pages.value() {
        Some(setting) => format!("; transparent huge pages: {setting}"),
        None => String::new(),
    };
    let sum = |pages: fn(&tierkeep_doctor::HugePagePool) -> u64| -> Bytes {
        pools.iter().map(|pool| Bytes(pool.page_bytes.saturating_mul(pages(pool)))).sum()
    };
    let (total, free) = (sum(|pool| pool.total), sum(|pool| pool.free));
    if total.0 == 0 {
        return Check::ok(id, format!("no pool of them{transparent}"));
    }
    let finding =
        format!("pools of huge pages hold {total}, of which {free} is used by nobody{transparent}");
    if free.0 == 0 {
        return Check::ok(id, finding);
    }
    let sizes: Vec<String> = pools
        .iter()
        .filter(|pool| pool.total > 0)
        .map(|pool| {
            format!(
                "{} pages of {}, {} of them free",
                pool.total,
                Bytes(pool.page_bytes),
                pool.free
            )
        })
        .collect();
    let remedy = "this program does not take from pools, and nobody else can have what is in them: \
                  shrink them (vm.nr_hugepages)";
    Check::warn(id, finding, remedy).with_details(sizes)
}

fn zfs_arc(facts: &Facts) -> Check {
    let id = "machine.zfs_arc";
    let arc = &facts.memory.zfs_arc_bytes;
    match arc.value() {
        None => unknown_is_no_matter(id, arc),
        Some(0) => Check::ok(id, "there is none"),
        Some(&bytes) if bytes < LITTLE_ARC_BYTES => {
            Check::ok(id, format!("ZFS's own cache holds {}", Bytes(bytes)))
        }
        Some(&bytes) => Check::warn(
            id,
            format!(
                "ZFS's own cache holds {}, which counts as used and gives way slowly",
                Bytes(bytes)
            ),
            "lower zfs_arc_max to give it to a run",
        ),
    }
}

fn platform(facts: &Facts) -> Check {
    let id = "machine.platform";
    let platform = &facts.platform;
    let mut parts = vec![
        platform.os.value().map_or("unknown system", String::as_str).to_owned(),
        match platform.kernel.value() {
            Some(kernel) => format!("kernel {kernel}"),
            None => "kernel unknown".to_owned(),
        },
    ];
    let named = |fact: &Fact<String>| fact.value().filter(|name| *name != "none").cloned();
    if let Some(container) = named(&platform.container) {
        parts.push(format!("in a container ({container}): its limits are checked above"));
    }
    if let Some(machine) = named(&platform.virtual_machine) {
        parts.push(format!(
            "in a virtual machine ({machine}): speeds are those of its virtual devices"
        ));
    }
    if platform.wsl.value() == Some(&true) {
        return Check::warn(
            id,
            format!("{}; in WSL, which has half of the machine's memory", parts.join(", ")),
            "give it more with memory= in .wslconfig, and keep the model inside its own filesystem, \
             not below /mnt",
        );
    }
    Check::ok(id, parts.join(", "))
}

/// Facts that a plan rests on. Speeds are left out: that they were not measured has checks of its own.
fn unknown(facts: &Facts) -> Check {
    let id = "machine.unknown";
    let mut unknown = Vec::new();
    fn note<T>(unknown: &mut Vec<String>, name: &str, fact: &Fact<T>) {
        if fact.is_unknown() {
            unknown.push(format!("{name}: {}", fact.detail()));
        }
    }
    note(&mut unknown, "total memory", &facts.memory.total_bytes);
    note(&mut unknown, "available memory", &facts.memory.available_bytes);
    note(&mut unknown, "physical cores", &facts.cpu.physical_cores);
    note(&mut unknown, "usable threads", &facts.cpu.usable_threads);
    note(&mut unknown, "instruction sets", &facts.cpu.instruction_sets);
    if facts.disk.path.value().is_some() {
        note(&mut unknown, "filesystem", &facts.disk.filesystem);
        note(&mut unknown, "free space", &facts.disk.free_bytes);
    }
    if unknown.is_empty() {
        return Check::ok(id, "every fact that a plan rests on is known");
    }
    let finding = match &unknown[..] {
        [one] => format!("unknown: {one}"),
        several => format!("{} facts that a plan rests on are unknown", several.len()),
    };
    let details = if unknown.len() > 1 { unknown } else { Vec::new() };
    Check::warn(
        id,
        finding,
        "plans assume something safe instead, and say so: give what you know with \
         --ram and --threads",
    )
    .with_details(details)
}

/// Something that could not be found out and that no plan rests on.
pub(super) fn unknown_is_no_matter<T>(id: &'static str, fact: &Fact<T>) -> Check {
    Check::skip_because(id, fact.detail())
}
