//! Checks of the processor: what computes, and what keeps it from computing.

use tierkeep_doctor::{CoreSpeed, Facts};

use super::Check;
use super::machine::unknown_is_no_matter;
use super::text::{count, first_few, listed};

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    vec![topology(facts), numa(facts), limits(facts), instruction_sets(facts)]
}

/// Cores, threads and kinds of cores, and how many of them compute.
fn topology(facts: &Facts) -> Check {
    let id = "machine.cpu";
    let cpu = &facts.cpu;
    let Some(&usable) = cpu.usable_threads.value() else {
        return Check::warn(
            id,
            format!("how many threads can compute is unknown: {}", cpu.usable_threads.detail()),
            "give their number with --threads",
        );
    };
    let mut parts = Vec::new();
    if let Some(&cores) = cpu.physical_cores.value() {
        let mut cores = count(cores as usize, "core");
        if let Some(sockets) = cpu.sockets.value().filter(|sockets| **sockets > 1) {
            cores.push_str(&format!(" in {sockets} sockets"));
        }
        parts.push(cores);
    }
    if let Some(threads) = cpu.logical_cores.value() {
        let smt = match cpu.smt.value() {
            Some(true) => {
                " (SMT: two threads of a core share its arithmetic, so one of them computes)"
            }
            Some(false) | None => "",
        };
        parts.push(format!("{}{smt}", count(*threads as usize, "hardware thread")));
    }
    let kinds = cpu.core_kinds.value().map(Vec::as_slice).unwrap_or_default();
    if kinds.len() > 1 {
        let kind = |kind: &tierkeep_doctor::CoreKind| {
            let speed = match kind.kind {
                CoreSpeed::Fast => "fast",
                CoreSpeed::Slow => "slow",
            };
            format!("{} {speed} (CPUs {})", kind.cores, kind.cpus)
        };
        let kinds: Vec<String> = kinds.iter().map(kind).collect();
        parts.push(format!(
            "{}: the fast ones compute, for all threads wait for the slowest",
            kinds.join(" and ")
        ));
    }
    let detail = match cpu.usable_threads.detail() {
        "" => String::new(),
        detail => format!(" ({detail})"),
    };
    parts.push(format!("{} to compute with{detail}", count(usable as usize, "thread")));
    Check::ok(id, parts.join(", "))
}

/// Whether memory is near to some cores and far from others.
fn numa(facts: &Facts) -> Check {
    let id = "machine.numa";
    let nodes = &facts.cpu.numa_nodes;
    let Some(found) = nodes.value() else { return unknown_is_no_matter(id, nodes) };
    let with_memory = found.iter().filter(|node| node.memory_bytes != Some(0)).count();
    if with_memory <= 1 {
        return Check::ok(id, "all memory is equally near");
    }
    let each = found
        .iter()
        .map(|node| {
            let memory = match node.memory_bytes {
                Some(bytes) => crate::units::Bytes(bytes).to_string(),
                None => "memory unknown".to_owned(),
            };
            let cpus = if node.cpus.is_empty() { "no CPUs" } else { &node.cpus };
            format!("node {}: {memory}, CPUs {cpus}", node.id)
        })
        .collect();
    Check::warn(
        id,
        format!("memory is in {with_memory} nodes: cores read that of other nodes more slowly"),
        "spread it evenly with `numactl --interleave=all tierkeep ...`, or stay in one node that is \
         large enough with `numactl -N 0 -m 0`",
    )
    .with_details(each)
}

/// Masks and quotas that leave fewer CPUs than there are.
fn limits(facts: &Facts) -> Check {
    let id = "machine.cpu_limits";
    let cpu = &facts.cpu;
    let online = cpu.logical_cores.value().copied();
    let allowed = cpu.allowed_cpus.value().and_then(|list| Some((list, listed(list)?)));
    let mut found = Vec::new();
    if let (Some(online), Some((list, n))) = (online, allowed)
        && n < online
    {
        found.push(format!("this process may run on {n} of {online} hardware threads ({list})"));
    }
    if let Some(Some(quota)) = cpu.quota_cores.value() {
        let most = allowed.map(|(_, n)| n).or(online);
        if most.is_none_or(|most| *quota < most as f64) {
            let of = most.map_or_else(String::new, |most| format!(" of {most}"));
            let whose = match cpu.quota_cores.detail() {
                "" => String::new(),
                detail => format!(" ({detail})"),
            };
            found.push(format!(
                "a quota gives it the time of {quota:.1}{of} hardware threads{whose}"
            ));
        }
    }
    if found.is_empty() {
        return match (&cpu.allowed_cpus.value(), &cpu.quota_cores.value()) {
            (None, _) => unknown_is_no_matter(id, &cpu.allowed_cpus),
            (Some(_), None) => unknown_is_no_matter(id, &cpu.quota_cores),
            (Some(_), Some(_)) => Check::ok(id, "neither a mask nor a quota takes CPUs away"),
        };
    }
    Check::warn(
        id,
        found.join("; "),
        "threads beyond that only wait for each other: leave --threads as planned, or raise the limit",
    )
}

/// What the kernels may use.
fn instruction_sets(facts: &Facts) -> Check {
    let id = "machine.instruction_sets";
    let sets = &facts.cpu.instruction_sets;
    let failed = facts.cpu.failed_sets.value().map(Vec::as_slice).unwrap_or_default();
    if !failed.is_empty() {
        let names: Vec<String> = failed.iter().map(|set| set.name.clone()).collect();
        let usable = match sets.value().map(Vec::as_slice) {
            None | Some([]) => "no other is known to work".to_owned(),
            Some(found) => format!("usable are {}", first_few(found, 24)),
        };
        let each = failed.iter().map(|set| format!("{} {}", set.name, set.how)).collect();
        let are =
            if failed.len() == 1 { "is advertised but fails" } else { "are advertised but fail" };
        return Check::warn(
            id,
            format!("{} {are} when run; {usable}", first_few(&names, 24)),
            "kernels do without: it is the hypervisor or the kernel that advertises what it does not \
             give, and only there can it be mended",
        )
        .with_details(each);
    }
    match sets.value() {
        None => Check::warn(
            id,
            format!("unknown: {}", sets.detail()),
            "the slowest kernels are used: give an instruction set with --isa if you know better",
        ),
        Some(found) if found.is_empty() => {
            Check::warn(id, "none that the kernels have a use for", "computing will be slow here")
        }
        Some(found) => {
            let detail = match sets.detail() {
                "" => String::new(),
                detail => format!(": {detail}"),
            };
            Check::ok(id, format!("{}{detail}", first_few(found, 24)))
        }
    }
}
