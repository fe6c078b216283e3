//! Processors of recorded and made-up machines, by the rows M4, M5 and M11 of the project's list of cases.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod support;

use support::{facts, made, recorded, write};
use tempfile::TempDir;
use tierkeep_doctor::{
    Cache, CacheKind, CoreKind, CoreSpeed, Fact, Facts, NumaNode, Probe, Source,
};

const GIB: u64 = 1 << 30;

/// Two sockets of 16 cores; threads 32 to 63 are the siblings of 0 to 31. Core numbers repeat in each
/// socket.
fn two_sockets() -> TempDir {
    let root = made(&[
        ("sys/devices/system/cpu/online", "0-63\n"),
        ("proc/self/status", "Cpus_allowed_list:\t0-63\n"),
        ("proc/self/cgroup", "0::/a/b\n"),
        ("proc/self/mountinfo", "27 22 0:24 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
        ("sys/fs/cgroup/a/b/cpu.max", "max 100000\n"),
    ]);
    for cpu in 0..64 {
        let folder = format!("sys/devices/system/cpu/cpu{cpu}/topology");
        write(
            root.path(),
            &format!("{folder}/physical_package_id"),
            &format!("{}\n", cpu % 32 / 16),
        );
        write(root.path(), &format!("{folder}/core_id"), &format!("{}\n", cpu % 16));
    }
    root
}

#[test]
fn m4_siblings_are_not_planned_for() {
    let root = two_sockets();
    let cpu = facts(root.path()).cpu;
    assert_eq!(cpu.logical_cores.value(), Some(&64));
    assert_eq!(cpu.physical_cores.value(), Some(&32));
    assert_eq!(cpu.usable_threads.value(), Some(&32));
    assert!(cpu.usable_threads.detail().contains("32 physical cores"), "{cpu:?}");
}

#[test]
fn m4_a_mask_of_eight_gives_eight() {
    let root = two_sockets();
    let probe = Probe::new().root(root.path().to_path_buf()).measure(false);
    for (mask, threads) in [
        ((0..8).collect::<Vec<_>>(), 8),
        // Four cores with both threads each.
        (vec![0, 1, 2, 3, 32, 33, 34, 35], 4),
        // Numbers beyond what is online are not counted.
        (vec![62, 63, 64, 65], 2),
    ] {
        let facts = probe.clone().affinity(mask.clone()).run(&mut |_| {});
        assert_eq!(facts.cpu.usable_threads.value(), Some(&threads), "{mask:?}");
        assert_eq!(facts.cpu.physical_cores.value(), Some(&32));
    }
    write(root.path(), "proc/self/status", "Cpus_allowed_list:\t8-15\n");
    assert_eq!(facts(root.path()).cpu.usable_threads.value(), Some(&8));
}

#[test]
fn m4_a_cpu_quota_of_an_ancestor_is_rounded_up() {
    let root = two_sockets();
    write(root.path(), "sys/fs/cgroup/a/cpu.max", "250000 100000\n");
    let threads = facts(root.path()).cpu.usable_threads;
    assert_eq!(threads.value(), Some(&3));
    assert!(threads.detail().contains("/a allows 2.50 CPUs"), "{}", threads.detail());
    write(root.path(), "sys/fs/cgroup/a/cpu.max", "1000 100000\n");
    assert_eq!(facts(root.path()).cpu.usable_threads.value(), Some(&1));
}

#[test]
fn m4_version_1_quota_is_found_too() {
    let root = two_sockets();
    write(root.path(), "proc/self/cgroup", "2:cpu,cpuacct:/docker/x\n");
    let mount = "1 2 0:3 /docker/x /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";
    write(root.path(), "proc/self/mountinfo", mount);
    write(root.path(), "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "400000\n");
    write(root.path(), "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    assert_eq!(facts(root.path()).cpu.usable_threads.value(), Some(&4));
}

#[test]
fn recorded_instruction_sets_and_threads() {
    let cpu = facts(&recorded("cgroup-v2-systemd")).cpu;
    assert_eq!(
        cpu.instruction_sets.value().unwrap(),
        &["sse4.1", "avx2", "fma", "f16c", "avxvnni"]
    );
    assert_eq!(cpu.model_name.value().unwrap(), "12th Gen Intel(R) Core(TM) i5-12400");
    // No topology in /sys: the ids in /proc/cpuinfo serve; the quota of 1.5 CPUs is rounded up.
    assert_eq!(cpu.physical_cores.value(), Some(&2));
    assert_eq!(cpu.usable_threads.value(), Some(&2));
}

#[test]
fn m4_sockets_nodes_and_caches_are_told() {
    let root = two_sockets();
    let at = |path: &str, text: &str| write(root.path(), path, text);
    at("sys/devices/system/node/online", "0-1\n");
    for (node, cpus) in [(0, "0-15,32-47"), (1, "16-31,48-63")] {
        at(&format!("sys/devices/system/node/node{node}/cpulist"), &format!("{cpus}\n"));
        let meminfo =
            format!("Node {node} MemTotal:       33554432 kB\nNode {node} MemFree: 1 kB\n");
        at(&format!("sys/devices/system/node/node{node}/meminfo"), &meminfo);
    }
    for cpu in 0..64_usize {
        let core = cpu % 32;
        let socket = if core < 16 { "0-15,32-47" } else { "16-31,48-63" };
        let own = format!("{core},{}", core + 32);
        for (index, level, kind, size, shared) in [
            (0, 1, "Data", "32K", own.as_str()),
            (1, 1, "Instruction", "32K", own.as_str()),
            (2, 2, "Unified", "1024K", own.as_str()),
            (3, 3, "Unified", "22528K", socket),
        ] {
            let folder = format!("sys/devices/system/cpu/cpu{cpu}/cache/index{index}");
            at(&format!("{folder}/level"), &format!("{level}\n"));
            at(&format!("{folder}/type"), &format!("{kind}\n"));
            at(&format!("{folder}/size"), &format!("{size}\n"));
            at(&format!("{folder}/shared_cpu_list"), &format!("{shared}\n"));
        }
    }
    let cpu = facts(root.path()).cpu;
    assert_eq!(cpu.sockets.value(), Some(&2));
    assert_eq!(cpu.smt.value(), Some(&true));
    let node =
        |id, cpus: &str| NumaNode { id, cpus: cpus.to_owned(), memory_bytes: Some(32 * GIB) };
    let nodes = [node(0, "0-15,32-47"), node(1, "16-31,48-63")];
    assert_eq!(cpu.numa_nodes.value().unwrap(), &nodes);
    let cache = |level, kind, kib: u64, shared_by_threads, instances| Cache {
        level,
        kind,
        bytes: kib << 10,
        shared_by_threads,
        instances,
    };
    let caches = [
        cache(1, CacheKind::Data, 32, 2, 32),
        cache(1, CacheKind::Instruction, 32, 2, 32),
        cache(2, CacheKind::Unified, 1024, 2, 32),
        cache(3, CacheKind::Unified, 22528, 32, 2),
    ];
    assert_eq!(cpu.caches.value().unwrap(), &caches);
    assert_eq!(cpu.allowed_cpus.value().unwrap(), "0-63");
    // One thread of each core, the siblings left out.
    assert_eq!(cpu.usable_cpus.value().unwrap(), "0-31");
    assert_eq!(cpu.quota_cores.value(), Some(&None));
}

#[test]
fn m4_a_cpuset_of_eight_is_named() {
    let root = two_sockets();
    write(root.path(), "proc/self/status", "Cpus_allowed_list:\t8-15\n");
    write(root.path(), "sys/fs/cgroup/a/b/cpuset.cpus.effective", "8-15\n");
    let cpu = facts(root.path()).cpu;
    assert_eq!(cpu.usable_threads.value(), Some(&8));
    let detail = cpu.usable_threads.detail();
    assert!(detail.contains("the cpuset of /a/b"), "{detail}");
    assert_eq!(cpu.usable_cpus.value().unwrap(), "8-15");
    // The cpuset serves where the mask cannot be read.
    std::fs::remove_file(root.path().join("proc/self/status")).unwrap();
    let cpu = facts(root.path()).cpu;
    assert_eq!(cpu.usable_threads.value(), Some(&8));
    assert_eq!(cpu.allowed_cpus.value().unwrap(), "8-15");
    // A wider cpuset is not what restricts, and both are said.
    write(root.path(), "proc/self/status", "Cpus_allowed_list:\t8-9\n");
    let cpu = facts(root.path()).cpu;
    assert_eq!(cpu.usable_threads.value(), Some(&2));
    assert!(cpu.allowed_cpus.detail().contains("the cpuset of /a/b is 8-15"), "{cpu:?}");
}

#[test]
fn m4_quotas_are_facts_and_name_their_group() {
    let root = two_sockets();
    write(root.path(), "sys/fs/cgroup/a/cpu.max", "250000 100000\n");
    let quota = facts(root.path()).cpu.quota_cores;
    assert_eq!(quota, Fact::read(Some(2.5), "control group /a"));
    // One that cannot be read may be smaller, and does not hide the other.
    write(root.path(), "sys/fs/cgroup/a/b/cpu.max", "lots\n");
    let cpu = facts(root.path()).cpu;
    assert_eq!(cpu.quota_cores.value(), Some(&Some(2.5)));
    assert!(cpu.quota_cores.detail().contains("others unknown: control group /a/b"), "{cpu:?}");
    assert_eq!(cpu.usable_threads.value(), Some(&3));
    write(root.path(), "sys/fs/cgroup/a/cpu.max", "max 100000\n");
    let cpu = facts(root.path()).cpu;
    assert!(cpu.quota_cores.is_unknown(), "{cpu:?}");
    assert_eq!(cpu.usable_threads.value(), Some(&32));
    assert!(cpu.usable_threads.detail().contains("CPU quota unknown"), "{cpu:?}");
}

/// `fast` cores with two threads each, then `slow` ones with one.
fn hybrid(fast: usize, slow: usize) -> TempDir {
    let root = made(&[]);
    let n_threads = 2 * fast + slow;
    write(root.path(), "sys/devices/system/cpu/online", &format!("0-{}\n", n_threads - 1));
    let allowed = format!("Cpus_allowed_list:\t0-{}\n", n_threads - 1);
    write(root.path(), "proc/self/status", &allowed);
    for cpu in 0..n_threads {
        let siblings = match cpu {
            cpu if cpu >= 2 * fast => cpu.to_string(),
            cpu => format!("{}-{}", cpu / 2 * 2, cpu / 2 * 2 + 1),
        };
        let file = format!("sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list");
        write(root.path(), &file, &format!("{siblings}\n"));
    }
    root
}

fn kinds(facts: &Facts) -> Vec<(CoreSpeed, u64, u64, &str)> {
    let kinds = facts.cpu.core_kinds.value().unwrap();
    let of = |kind: &'_ CoreKind| (kind.kind, kind.cores, kind.threads);
    kinds.iter().map(|kind| (of(kind).0, of(kind).1, of(kind).2, kind.cpus.as_str())).collect()
}

#[test]
fn m5_fast_and_slow_cores_by_the_counters_of_each() {
    let root = hybrid(8, 12);
    write(root.path(), "sys/devices/cpu_core/cpus", "0-15\n");
    write(root.path(), "sys/devices/cpu_atom/cpus", "16-25\n");
    write(root.path(), "sys/devices/cpu_lowpower/cpus", "26-27\n");
    let facts = facts(root.path());
    let expected = [(CoreSpeed::Fast, 8, 16, "0-15"), (CoreSpeed::Slow, 12, 12, "16-27")];
    assert_eq!(kinds(&facts), expected);
    assert_eq!(facts.cpu.core_kinds.source(), Source::Read);
    assert_eq!(facts.cpu.physical_cores.value(), Some(&20));
    // Which are used, and why.
    let threads = &facts.cpu.usable_threads;
    assert_eq!((threads.value(), threads.source()), (Some(&8), Source::Estimated));
    assert!(threads.detail().contains("8 fast cores"), "{}", threads.detail());
    assert!(threads.detail().contains("12 slow cores (CPUs 16-27) would"), "{}", threads.detail());
    assert_eq!(facts.cpu.usable_cpus.value().unwrap(), "0,2,4,6,8,10,12,14");
}

#[test]
fn m5_where_fast_cores_are_few_or_not_allowed_slow_ones_work_too() {
    let root = hybrid(2, 8);
    write(root.path(), "sys/devices/cpu_core/cpus", "0-3\n");
    write(root.path(), "sys/devices/cpu_atom/cpus", "4-11\n");
    let all = facts(root.path()).cpu.usable_threads;
    assert_eq!(all.value(), Some(&10));
    assert!(all.detail().contains("all are used, 2 fast and 8 slow"), "{}", all.detail());
    let probe = Probe::new().root(root.path().to_path_buf()).measure(false);
    let slow = probe.affinity(vec![8, 9, 10, 11]).run(&mut |_| {}).cpu;
    assert_eq!(slow.usable_threads.value(), Some(&4));
    assert_eq!(slow.usable_threads.source(), Source::Read);
    assert_eq!(slow.usable_cpus.value().unwrap(), "8-11");
}

#[test]
fn m5_fast_and_slow_cores_by_capacity_or_clock() {
    let root = hybrid(4, 4);
    for cpu in 0..12 {
        let (capacity, clock) = if cpu < 8 { (1024, 5_100_000) } else { (446, 3_300_000) };
        // A favoured core is no kind of its own.
        let clock = if cpu < 2 { clock + 300_000 } else { clock };
        let folder = format!("sys/devices/system/cpu/cpu{cpu}");
        write(root.path(), &format!("{folder}/cpu_capacity"), &format!("{capacity}\n"));
        write(root.path(), &format!("{folder}/cpufreq/cpuinfo_max_freq"), &format!("{clock}\n"));
    }
    let expected = [(CoreSpeed::Fast, 4, 8, "0-7"), (CoreSpeed::Slow, 4, 4, "8-11")];
    let by_capacity = facts(root.path());
    assert_eq!(kinds(&by_capacity), expected);
    assert_eq!(by_capacity.cpu.core_kinds.source(), Source::Read);
    for cpu in 0..12 {
        let file = format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity");
        std::fs::remove_file(root.path().join(file)).unwrap();
    }
    let by_clock = facts(root.path());
    assert_eq!(kinds(&by_clock), expected);
    assert_eq!(by_clock.cpu.core_kinds.source(), Source::Estimated);
    assert_eq!(by_clock.cpu.usable_threads.value(), Some(&4));
}

#[test]
fn m5_cores_that_are_alike_are_one_kind() {
    let root = two_sockets();
    assert!(facts(root.path()).cpu.core_kinds.is_unknown());
    write(root.path(), "sys/devices/cpu/type", "4\n");
    let facts = facts(root.path());
    assert_eq!(kinds(&facts), [(CoreSpeed::Fast, 32, 64, "0-63")]);
}

#[test]
fn m11_tables_that_are_partly_there_say_what_they_can() {
    let root = two_sockets();
    let cpu = facts(root.path()).cpu;
    assert!(cpu.caches.is_unknown() && cpu.caches.detail().contains("cache"), "{:?}", cpu.caches);
    assert!(cpu.numa_nodes.detail().contains("/sys/devices/system/node/online"), "{cpu:?}");
    // A node whose memory is not told is still a node; nonsense in a cache's table is skipped.
    write(root.path(), "sys/devices/system/node/online", "0\n");
    write(root.path(), "sys/devices/system/node/node0/cpulist", "0-63\n");
    let folder = "sys/devices/system/cpu/cpu0/cache/index0";
    for (file, text) in
        [("level", "1"), ("type", "Data"), ("size", "many"), ("shared_cpu_list", "0")]
    {
        write(root.path(), &format!("{folder}/{file}"), text);
    }
    let cpu = facts(root.path()).cpu;
    assert!(cpu.caches.is_unknown());
    let nodes = cpu.numa_nodes.value().unwrap();
    assert_eq!(nodes, &[NumaNode { id: 0, cpus: "0-63".to_owned(), memory_bytes: None }]);
    // Kernels that cannot tell the socket write -1.
    for cpu in 0..64 {
        let file = format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id");
        write(root.path(), &file, "-1\n");
    }
    assert!(facts(root.path()).cpu.sockets.is_unknown());
}
