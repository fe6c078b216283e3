//! M1-M12: what is said of machines in odd situations, from facts made by hand. That such facts are
//! found where the machine is so is tested where they are probed.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

use tierkeep_doctor::{
    CgroupLimit, CgroupVersion, CoreKind, CoreSpeed, DiskReadSpeed, Fact, Facts, FailedSet,
    FilesystemKind, GpuFact, GpuVendor, HugePagePool, NumaNode,
};
use tierkeep_plans::checks::{Check, IDS, Status, machine_checks, worst};

const GIB: u64 = 1 << 30;

fn read<T>(value: T) -> Fact<T> {
    Fact::read(value, "")
}

/// A machine with nothing to say about.
fn plain() -> Facts {
    let mut facts = Facts::default();
    let cpu = &mut facts.cpu;
    cpu.model_name = read("Some CPU".to_owned());
    cpu.physical_cores = read(8);
    cpu.logical_cores = read(16);
    cpu.sockets = read(1);
    cpu.smt = read(true);
    cpu.usable_threads = read(8);
    cpu.allowed_cpus = read("0-15".to_owned());
    cpu.quota_cores = read(None);
    let kind = CoreKind { kind: CoreSpeed::Fast, cores: 8, threads: 16, cpus: "0-15".to_owned() };
    cpu.core_kinds = read(vec![kind]);
    let cpus = "0-15".to_owned();
    cpu.numa_nodes = read(vec![NumaNode { id: 0, cpus, memory_bytes: Some(64 * GIB) }]);
    cpu.instruction_sets = read(vec!["avx2".to_owned(), "f16c".to_owned()]);
    let memory = &mut facts.memory;
    memory.total_bytes = read(64 * GIB);
    memory.available_bytes = read(60 * GIB);
    memory.usable_bytes = Fact::read(60 * GIB, "host memory binds");
    memory.limit = read(None);
    memory.swap_total_bytes = read(8 * GIB);
    memory.swap_free_bytes = read(8 * GIB);
    memory.locked_limit_bytes = read(None);
    memory.huge_pages = read(Vec::new());
    memory.zfs_arc_bytes = read(0);
    let disk = &mut facts.disk;
    disk.path = read("/models/m".to_owned());
    disk.filesystem = read("ext4".to_owned());
    disk.kind = read(FilesystemKind::Local);
    disk.mount_point = read("/models".to_owned());
    disk.free_bytes = read(900 * GIB);
    disk.rotational = read(false);
    disk.read = Fact::measured(speed(3.2e9), "");
    facts.gpus.nvidia = Fact::unknown("no NVIDIA driver: libnvidia-ml.so.1 not found");
    facts.gpus.others = read(Vec::new());
    facts.platform.os = read("Some Linux".to_owned());
    facts.platform.kernel = read("6.8".to_owned());
    facts.platform.container = read("none".to_owned());
    facts.platform.virtual_machine = read("none".to_owned());
    facts.platform.wsl = read(false);
    facts
}

fn speed(bytes_per_s: f64) -> DiskReadSpeed {
    DiskReadSpeed { bytes_per_s, read_bytes: 18_915_328, queue_depth: 8 }
}

fn limit(version: CgroupVersion, file: &str) -> CgroupLimit {
    CgroupLimit {
        group: "/user.slice".to_owned(),
        version,
        file: file.to_owned(),
        limit_bytes: 16 * GIB,
        used_bytes: 9 * GIB,
        reclaimable_bytes: 6 * GIB,
        headroom_bytes: 13 * GIB,
    }
}

/// The check of an id, which must say all of `parts` in its finding, details or remedy.
fn check(facts: &Facts, id: &str, status: Status, parts: &[&str]) -> Check {
    let all = machine_checks(facts);
    let found: Vec<&Check> = all.iter().filter(|check| check.id == id).collect();
    let [check] = found[..] else { panic!("{id} is there {} times", found.len()) };
    let said = format!("{}\n{}\n{}", check.finding, check.details.join("\n"), check.remedy);
    for part in parts {
        assert!(said.contains(part), "{id} does not say {part:?}: {said}");
    }
    assert_eq!(check.status, status, "{said}");
    check.clone()
}

#[test]
fn a_plain_machine_has_nothing_wrong_and_every_check_once() {
    let checks = machine_checks(&plain());
    assert_eq!(worst(&checks), Status::Ok, "{checks:#?}");
    let ids: Vec<&str> = checks.iter().map(|check| check.id).collect();
    let expected: Vec<&str> = IDS.iter().copied().filter(|id| id.starts_with("machine.")).collect();
    assert_eq!(ids, expected, "in the order of the table");
    assert!(checks.iter().all(|check| check.remedy.is_empty()), "nothing to do about what is fine");
}

#[test]
fn m1_the_group_that_binds_is_named_with_its_limit_and_what_is_left() {
    for (version, file) in
        [(CgroupVersion::V1, "memory.limit_in_bytes"), (CgroupVersion::V2, "memory.max")]
    {
        let mut facts = plain();
        facts.memory.limit = read(Some(limit(version, file)));
        let parts = ["/user.slice", "17.18 GB", file, "13.96 GB left", "9.66 GB", "6.44 GB"];
        check(&facts, "machine.memory_limit", Status::Warn, &parts);
        // The host may have less than the group leaves: then nothing is to be done about the group.
        facts.memory.available_bytes = read(4 * GIB);
        let parts = ["/user.slice", "the host has less, 4.29 GB"];
        check(&facts, "machine.memory_limit", Status::Ok, &parts);
    }
}

#[test]
fn m2_no_limit_is_none_and_an_unknown_one_is_a_warning() {
    check(&plain(), "machine.memory_limit", Status::Ok, &["no control group"]);
    let mut facts = plain();
    facts.memory.limit = Fact::unknown("memory.max of control group /a: permission denied");
    check(&facts, "machine.memory_limit", Status::Warn, &["permission denied", "--ram"]);
}

#[test]
fn m3_page_cache_counts_as_free() {
    let mut facts = plain();
    facts.memory.total_bytes = read(32 * GIB);
    facts.memory.available_bytes = read(30 * GIB);
    facts.memory.usable_bytes = Fact::read(30 * GIB, "MemAvailable of /proc/meminfo");
    check(&facts, "machine.memory", Status::Ok, &["32.21 GB", "MemAvailable"]);
}

#[test]
fn m4_sockets_and_smt_are_shown_and_a_mask_is_named() {
    let mut facts = plain();
    facts.cpu.physical_cores = read(32);
    facts.cpu.logical_cores = read(64);
    facts.cpu.sockets = read(2);
    facts.cpu.usable_threads = Fact::read(32, "one thread a core");
    facts.cpu.allowed_cpus = read("0-63".to_owned());
    let node =
        |id: u32, cpus: &str| NumaNode { id, cpus: cpus.to_owned(), memory_bytes: Some(128 * GIB) };
    facts.cpu.numa_nodes = read(vec![node(0, "0-15,32-47"), node(1, "16-31,48-63")]);
    let parts = ["32 cores in 2 sockets", "64 hardware threads (SMT", "32 threads to compute"];
    check(&facts, "machine.cpu", Status::Ok, &parts);
    let parts = ["2 nodes", "node 1: 137.4 GB, CPUs 16-31,48-63", "numactl"];
    check(&facts, "machine.numa", Status::Warn, &parts);
    check(&facts, "machine.cpu_limits", Status::Ok, &["neither a mask nor a quota"]);

    facts.cpu.allowed_cpus = read("0-7".to_owned());
    facts.cpu.usable_threads = Fact::read(8, "8 allowed by the affinity mask");
    let parts = ["8 of 64 hardware threads (0-7)", "--threads"];
    check(&facts, "machine.cpu_limits", Status::Warn, &parts);
    check(&facts, "machine.cpu", Status::Ok, &["8 threads to compute", "affinity mask"]);

    facts.cpu.quota_cores = Fact::read(Some(2.5), "control group /docker/x");
    let parts = ["2.5 of 8", "/docker/x"];
    check(&facts, "machine.cpu_limits", Status::Warn, &parts);
}

#[test]
fn m5_fast_and_slow_cores_are_told_apart() {
    let mut facts = plain();
    let fast = CoreKind { kind: CoreSpeed::Fast, cores: 8, threads: 16, cpus: "0-15".to_owned() };
    let slow = CoreKind { kind: CoreSpeed::Slow, cores: 12, threads: 12, cpus: "16-27".to_owned() };
    facts.cpu.core_kinds = read(vec![fast, slow]);
    facts.cpu.physical_cores = read(20);
    facts.cpu.logical_cores = read(28);
    let parts = ["8 fast (CPUs 0-15) and 12 slow (CPUs 16-27)", "the fast ones compute"];
    check(&facts, "machine.cpu", Status::Ok, &parts);
}

fn gpu(index: u32, free: u64, total: u64) -> GpuFact {
    GpuFact {
        index,
        name: read(format!("Card {index}")),
        memory_total_bytes: read(total),
        memory_free_bytes: read(free),
        ..GpuFact::default()
    }
}

#[test]
fn m6_of_two_cards_the_busy_one_is_named() {
    let mut facts = plain();
    facts.gpus.nvidia = read(vec![gpu(0, 47 * GIB, 48 * GIB), gpu(1, 3 * GIB, 48 * GIB)]);
    let check = check(
        &facts,
        "machine.gpu",
        Status::Warn,
        &["most of the memory of NVIDIA GPU 1 (Card 1) is in use", "3.22 GB of 51.54 GB free"],
    );
    assert!(!check.finding.contains("Card 0"), "the idle one is not blamed: {check:?}");
    facts.gpus.nvidia = read(vec![gpu(0, 47 * GIB, 48 * GIB), gpu(1, 46 * GIB, 48 * GIB)]);
    self::check(&facts, "machine.gpu", Status::Ok, &["2 graphics processors"]);
}

#[test]
fn m7_unified_memory_is_one_pool() {
    let mut facts = plain();
    let mut unified = gpu(0, 0, 0);
    unified.memory_total_bytes = Fact::unknown("the driver reports none");
    unified.memory_free_bytes = Fact::unknown("the driver reports none");
    unified.is_unified = read(true);
    facts.gpus.nvidia = read(vec![unified]);
    let parts = ["Card 0", "its memory is the system's, and is counted once"];
    check(&facts, "machine.gpu", Status::Ok, &parts);
    // The same of an integrated one of another maker, which has a total: all of the system's memory.
    let mut integrated = gpu(0, GIB, 64 * GIB);
    integrated.vendor = GpuVendor::Intel;
    integrated.is_unified = read(true);
    facts.gpus.nvidia = read(Vec::new());
    facts.gpus.others = read(vec![integrated]);
    check(&facts, "machine.gpu", Status::Ok, &["Intel GPU 0", "counted once"]);
}

#[test]
fn m8_no_driver_is_said_and_changes_no_verdict() {
    let checks = machine_checks(&plain());
    let gpu = checks.iter().find(|check| check.id == "machine.gpu").unwrap();
    assert_eq!(gpu.status, Status::Skip);
    assert!(gpu.finding.contains("no NVIDIA driver: libnvidia-ml.so.1 not found"), "{gpu:?}");
    assert_eq!(worst(&checks), Status::Ok);
}

#[test]
fn m9_what_is_no_local_disk_is_named_with_its_mount_and_speed() {
    for (filesystem, kind, what) in [
        ("nfs4", FilesystemKind::Network, "another machine"),
        ("9p", FilesystemKind::Network, "another machine"),
        ("fuse.sshfs", FilesystemKind::Fuse, "FUSE"),
    ] {
        let mut facts = plain();
        facts.disk.filesystem = read(filesystem.to_owned());
        facts.disk.kind = read(kind);
        facts.disk.mount_point = read("/mnt/share".to_owned());
        facts.disk.read = Fact::measured(speed(110e6), "");
        let parts = [filesystem, "/mnt/share", what, "110 MB/s measured", "local disk"];
        check(&facts, "machine.disk", Status::Warn, &parts);
        check(&facts, "machine.disk_speed", Status::Warn, &["110 MB/s", "18.92 MB", "8 at once"]);
    }
    let mut facts = plain();
    facts.platform.wsl = read(true);
    facts.disk.filesystem = read("9p".to_owned());
    facts.disk.kind = read(FilesystemKind::Network);
    facts.disk.mount_point = read("/mnt/c".to_owned());
    check(&facts, "machine.disk", Status::Warn, &["9p", "/mnt/c", "Windows", "WSL's own"]);
    check(&facts, "machine.platform", Status::Warn, &["WSL", ".wslconfig"]);

    let mut facts = plain();
    facts.disk.filesystem = read("tmpfs".to_owned());
    facts.disk.kind = read(FilesystemKind::Memory);
    check(&facts, "machine.disk", Status::Warn, &["tmpfs", "in memory"]);
}

#[test]
fn m10_a_speed_that_no_disk_has_is_not_a_speed() {
    let mut facts = plain();
    facts.disk.read =
        Fact::unknown("not measurable: 65.0 GB/s is no disk's speed, a cache answered");
    let parts = ["not measurable", "65.0 GB/s", "a cache answered", "what-if disk="];
    check(&facts, "machine.disk_speed", Status::Warn, &parts);
    // What nobody asked for is no warning.
    facts.disk.read = Fact::unknown("not measured (--no-measure)");
    check(&facts, "machine.disk_speed", Status::Skip, &["--no-measure"]);
}

#[test]
fn m11_what_cannot_be_read_is_named_and_the_rest_goes_on() {
    let mut facts = plain();
    facts.memory.total_bytes = Fact::unknown("/proc/meminfo: permission denied");
    facts.cpu.physical_cores = Fact::unknown("/sys/devices/system/cpu: no such directory");
    let parts = [
        "2 facts",
        "total memory: /proc/meminfo: permission denied",
        "physical cores: /sys/devices/system/cpu",
    ];
    check(&facts, "machine.unknown", Status::Warn, &parts);
    check(&facts, "machine.swap", Status::Ok, &["none of 8.59 GB in use"]);
    check(&facts, "machine.cpu", Status::Ok, &["8 threads to compute"]);
    // Of a machine of which nothing is known at all every check still says something.
    let nothing = machine_checks(&Facts::default());
    assert_eq!(nothing.len(), machine_checks(&plain()).len());
    assert!(nothing.iter().all(|check| !check.finding.is_empty()));
    assert_eq!(worst(&nothing), Status::Warn, "what is unknown is no failure");
}

#[test]
fn m12_little_lockable_memory_and_swap_in_use_say_figure_and_effect() {
    let mut facts = plain();
    facts.memory.locked_limit_bytes = read(Some(8 << 20));
    let parts = ["may lock 8.39 MB", "weights included", "ulimit -l"];
    check(&facts, "machine.locked_memory", Status::Warn, &parts);
    facts.memory.locked_limit_bytes = read(Some(32 * GIB));
    check(&facts, "machine.locked_memory", Status::Ok, &["34.36 GB"]);
    facts.memory.swap_free_bytes = read(5 * GIB);
    let parts = ["3.22 GB of 8.59 GB of swap is in use", "read from disk twice"];
    check(&facts, "machine.swap", Status::Warn, &parts);
}

#[test]
fn memory_that_others_hold_back_is_named() {
    let mut facts = plain();
    facts.memory.huge_pages = read(vec![
        HugePagePool { page_bytes: 2 << 20, total: 4096, free: 4000 },
        HugePagePool { page_bytes: 1 << 30, total: 0, free: 0 },
    ]);
    let parts = ["8.59 GB", "8.39 GB is used by nobody", "4096 pages of 2.10 MB", "nr_hugepages"];
    check(&facts, "machine.huge_pages", Status::Warn, &parts);
    facts.memory.huge_pages = read(vec![HugePagePool { page_bytes: 2 << 20, total: 9, free: 0 }]);
    check(&facts, "machine.huge_pages", Status::Ok, &["0 B is used by nobody"]);
    facts.memory.zfs_arc_bytes = read(20 * GIB);
    check(&facts, "machine.zfs_arc", Status::Warn, &["21.47 GB", "zfs_arc_max"]);
}

#[test]
fn moving_parts_are_believed_unless_the_speed_says_otherwise() {
    let mut facts = plain();
    facts.disk.rotational = read(true);
    check(&facts, "machine.rotational", Status::Ok, &["faster than any that has"]);
    facts.disk.read = Fact::measured(speed(90e6), "");
    check(&facts, "machine.rotational", Status::Warn, &["solid-state"]);
    facts.disk.read = Fact::unknown("not measured (--no-measure)");
    check(&facts, "machine.rotational", Status::Warn, &["moving parts"]);
    facts.platform.virtual_machine = read("kvm".to_owned());
    check(&facts, "machine.rotational", Status::Ok, &["as virtual disks do"]);
}

/// Hand-written facts may hold any figure.
#[test]
fn impossible_figures_do_no_harm() {
    let mut facts = plain();
    facts.memory.huge_pages =
        read(vec![HugePagePool { page_bytes: u64::MAX, total: u64::MAX, free: u64::MAX }; 3]);
    facts.memory.swap_free_bytes = read(u64::MAX);
    facts.cpu.quota_cores = read(Some(f64::NAN));
    facts.cpu.allowed_cpus = read("9-2,x".to_owned());
    facts.cpu.logical_cores = read(u64::MAX);
    facts.disk.read = Fact::measured(speed(f64::INFINITY), "");
    facts.gpus.nvidia = read(vec![gpu(u32::MAX, u64::MAX, 0)]);
    assert!(machine_checks(&facts).iter().all(|check| !check.finding.is_empty()));
}

#[test]
fn an_instruction_set_that_fails_is_named() {
    let find = |facts: &Facts| {
        let checks = machine_checks(facts);
        checks.into_iter().find(|check| check.id == "machine.instruction_sets").unwrap()
    };
    let mut facts = plain();
    facts.cpu.failed_sets = Fact::measured(Vec::new(), "run in a child process");
    assert_eq!(find(&facts).status, Status::Ok);
    let how = "ends a process with signal 4 (illegal instruction)".to_owned();
    let set = |name: &str| FailedSet { name: name.to_owned(), how: how.clone() };
    facts.cpu.failed_sets = Fact::measured(vec![set("amx-tile")], "run in a child process");
    let check = find(&facts);
    assert_eq!(check.status, Status::Warn);
    assert_eq!(check.finding, "amx-tile is advertised but fails when run; usable are avx2, f16c");
    assert_eq!(check.details, [format!("amx-tile {how}")]);
    facts.cpu.failed_sets = Fact::measured(vec![set("avx2"), set("amx-tile")], "");
    facts.cpu.instruction_sets = Fact::measured(Vec::new(), "");
    let finding = "avx2, amx-tile are advertised but fail when run; no other is known to work";
    assert_eq!(find(&facts).finding, finding);
}
