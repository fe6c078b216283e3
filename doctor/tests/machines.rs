//! Recorded and made-up machines, by the rows M1 to M11 of the project's list of cases.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use tierkeep_doctor::{CgroupLimit, CgroupVersion, Fact, Facts, FilesystemKind, Probe, Source};

const GIB: u64 = 1 << 30;

fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn made(files: &[(&str, &str)]) -> TempDir {
    let root = TempDir::new().unwrap();
    for (path, text) in files {
        write(root.path(), path, text);
    }
    root
}

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn facts(root: &Path) -> Facts {
    Probe::new().root(root.to_path_buf()).measure(false).run(&mut |_| {})
}

fn binding(facts: &Facts) -> &CgroupLimit {
    match facts.memory.limit.value() {
        Some(Some(limit)) => limit,
        _ => panic!("no limit found: {:?}", facts.memory.limit),
    }
}

#[test]
fn m1_v2_limit_of_an_ancestor_binds_and_its_cache_counts_as_free() {
    let facts = facts(&recorded("cgroup-v2-systemd"));
    let limit = binding(&facts);
    assert_eq!(limit.group, "/user.slice");
    assert_eq!(limit.version, CgroupVersion::V2);
    assert_eq!(limit.file, "memory.max");
    assert_eq!(limit.limit_bytes, 16 * GIB);
    assert_eq!(limit.used_bytes, 10 * GIB);
    assert_eq!(limit.reclaimable_bytes, 6 * GIB);
    assert_eq!(limit.headroom_bytes, 12 * GIB);
    assert_eq!(facts.memory.usable_bytes.value(), Some(&(12 * GIB)));
    let detail = facts.memory.usable_bytes.detail();
    assert!(detail.contains("/user.slice") && detail.contains("binds"), "{detail}");
    assert_eq!(facts.memory.total_bytes.value(), Some(&(64 * GIB)));
    assert_eq!(facts.memory.swap_free_bytes.value(), Some(&(8_126_464 * 1024)));
}

#[test]
fn m1_v1_in_a_container_that_sees_only_its_own_part() {
    let facts = facts(&recorded("cgroup-v1-docker"));
    let limit = binding(&facts);
    assert_eq!(limit.group, "/docker/4f5c");
    assert_eq!(limit.version, CgroupVersion::V1);
    assert_eq!(limit.reclaimable_bytes, 6 * GIB);
    assert_eq!(limit.headroom_bytes, 14 * GIB);
    assert_eq!(facts.memory.usable_bytes.value(), Some(&(14 * GIB)));
    assert_eq!(facts.platform.container.value().map(String::as_str), Some("docker"));
}

#[test]
fn m1_v1_limit_of_an_ancestor_that_is_not_mounted() {
    let facts = facts(&recorded("cgroup-v1-hidden-ancestor"));
    let limit = binding(&facts);
    assert!(limit.group.contains("not visible from here"), "{}", limit.group);
    assert_eq!(limit.limit_bytes, 12 * GIB);
    assert_eq!(limit.headroom_bytes, 10 * GIB);
    assert_eq!(facts.platform.container.value().map(String::as_str), Some("kubernetes"));
}

#[test]
fn m1_v2_in_a_namespace_has_its_limit_at_the_root() {
    let facts = facts(&recorded("cgroup-v2-namespace"));
    let limit = binding(&facts);
    assert_eq!((limit.group.as_str(), limit.headroom_bytes), ("/", 14 * GIB));
    assert_eq!(facts.platform.container.value().map(String::as_str), Some("podman"));
}

#[test]
fn m1_the_group_with_the_least_left_binds_not_the_smallest_limit() {
    let root = made(&[
        ("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\n"),
        ("proc/self/cgroup", "4:memory:/outer/inner\n"),
        (
            "proc/self/mountinfo",
            "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        ),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/memory/outer/memory.limit_in_bytes", "21474836480\n"),
        ("sys/fs/cgroup/memory/outer/memory.usage_in_bytes", "20401094656\n"),
        ("sys/fs/cgroup/memory/outer/memory.stat", "total_inactive_file 0\ntotal_active_file 0\n"),
        ("sys/fs/cgroup/memory/outer/inner/memory.limit_in_bytes", "4294967296\n"),
        ("sys/fs/cgroup/memory/outer/inner/memory.usage_in_bytes", "0\n"),
        ("sys/fs/cgroup/memory/outer/inner/memory.stat", "total_inactive_file 0\n"),
    ]);
    let facts = facts(root.path());
    assert_eq!(binding(&facts).group, "/outer");
    assert_eq!(facts.memory.usable_bytes.value(), Some(&GIB));
}

#[test]
fn m2_max_and_the_largest_number_are_no_limit() {
    let meminfo = ("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 50000000 kB\n");
    let v1_mount = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
    let v2_mount = "27 22 0:24 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
    let v1 = |limit| {
        made(&[
            meminfo,
            ("proc/self/cgroup", "4:memory:/a\n"),
            ("proc/self/mountinfo", v1_mount),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", limit),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "5\n"),
            (
                "sys/fs/cgroup/memory/a/memory.stat",
                "hierarchical_memory_limit 9223372036854771712\n",
            ),
        ])
    };
    let v2 = |limit| {
        made(&[
            meminfo,
            ("proc/self/cgroup", "0::/a\n"),
            ("proc/self/mountinfo", v2_mount),
            ("sys/fs/cgroup/a/memory.max", limit),
            ("sys/fs/cgroup/a/memory.current", "5\n"),
        ])
    };
    // A limit of the host's memory or more is none either.
    for root in [v1("9223372036854771712\n"), v2("max\n"), v1("68719476736\n"), v2("68719476736\n")]
    {
        let facts = facts(root.path());
        assert_eq!(facts.memory.limit.value(), Some(&None));
        assert_eq!(facts.memory.limit.source(), Source::Read);
        assert_eq!(facts.memory.usable_bytes.value(), Some(&(50_000_000 * 1024)));
        assert!(facts.memory.usable_bytes.detail().contains("host memory binds"));
    }
    // And one page less is one: the tests above do not pass because nothing is found at all.
    for root in [v1("68719472640\n"), v2("68719472640\n")] {
        assert_eq!(binding(&facts(root.path())).limit_bytes, 64 * GIB - 4096);
    }
}

#[test]
fn m3_page_cache_counts_as_available() {
    let root = made(&[
        (
            "proc/meminfo",
            "MemTotal: 33554432 kB\nMemFree: 3145728 kB\nMemAvailable: 31457280 kB\n\
             Cached: 29360128 kB\n",
        ),
        ("proc/self/cgroup", "0::/\n"),
        ("proc/self/mountinfo", "27 22 0:24 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
    ]);
    let facts = facts(root.path());
    assert_eq!(facts.memory.available_bytes, Fact::read(30 * GIB, "MemAvailable of /proc/meminfo"));
    assert_eq!(facts.memory.usable_bytes.value(), Some(&(30 * GIB)));
}

#[test]
fn m3_without_mem_available_the_figure_is_an_estimate() {
    let root = made(&[(
        "proc/meminfo",
        "MemTotal: 33554432 kB\nMemFree: 3145728 kB\nBuffers: 0 kB\nCached: 29360128 kB\n\
         Shmem: 1048576 kB\n",
    )]);
    let facts = facts(root.path());
    assert_eq!(facts.memory.available_bytes.value(), Some(&(30 * GIB)));
    assert_eq!(facts.memory.available_bytes.source(), Source::Estimated);
}

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
fn m8_no_driver_is_a_fact() {
    // Of the running machine: with a driver there are devices, without one a reason.
    let gpus = Probe::new().measure(false).run(&mut |_| {}).gpus.nvidia;
    if gpus.is_unknown() {
        assert!(gpus.detail().starts_with("no NVIDIA driver: "), "{}", gpus.detail());
        assert!(!gpus.detail().contains('\n'));
    } else {
        assert_eq!(gpus.source(), Source::Read);
    }
    assert!(facts(&recorded("cgroup-v1-docker")).gpus.nvidia.is_unknown());
}

#[test]
fn m9_network_and_fuse_mounts_are_told_from_disks() {
    let root = made(&[
        (
            "proc/self/mountinfo",
            "22 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n\
             30 22 0:50 / /mnt/my\\040share rw - nfs4 server:/export rw\n\
             31 22 0:51 / /mnt/c rw - 9p drvfs rw\n\
             32 22 0:52 / /home/me/remote rw - fuse.sshfs me@host: rw\n",
        ),
        ("sys/dev/block/259:2/partition", "2\n"),
        ("sys/dev/block/queue/rotational", "0\n"),
        ("mnt/my share/model/x", ""),
        ("mnt/c/x", ""),
        ("home/me/remote/x", ""),
        ("mnt/cold/x", ""),
    ]);
    let disk = |directory: &str| {
        let probe = Probe::new().root(root.path().to_path_buf()).measure(false);
        probe.directory(Some(PathBuf::from(directory))).run(&mut |_| {}).disk
    };
    let share = disk("/mnt/my share/model");
    assert_eq!(share.kind.value(), Some(&FilesystemKind::Network));
    assert_eq!(share.mount_point.value().unwrap(), "/mnt/my share");
    assert_eq!(share.device.value().unwrap(), "server:/export");
    assert_eq!(share.path.value().unwrap(), "/mnt/my share/model");
    assert!(share.rotational.is_unknown());
    assert_eq!(disk("/mnt/c").kind.value(), Some(&FilesystemKind::Network));
    assert_eq!(disk("/home/me/remote").kind.value(), Some(&FilesystemKind::Fuse));
    // "/mnt/cold" begins with the letters of "/mnt/c" but does not lie in it.
    let local = disk("/mnt/cold");
    assert_eq!(local.filesystem.value().unwrap(), "ext4");
    assert_eq!(local.kind.value(), Some(&FilesystemKind::Local));
    assert_eq!(local.rotational.value(), Some(&false));
    assert!(disk("/nowhere").free_bytes.detail().contains("/nowhere"));
}

#[test]
fn m11_what_is_unreadable_is_unknown_and_the_rest_goes_on() {
    let nothing = made(&[]);
    let facts_of_nothing = facts(nothing.path());
    let json = serde_json::to_value(&facts_of_nothing).unwrap();
    let known: Vec<&str> = ["cpu", "memory", "disk"]
        .into_iter()
        .flat_map(|part| json[part].as_object().unwrap())
        .filter(|(_, fact)| fact["source"] != "unknown" || fact["reason"] == "")
        .map(|(name, _)| name.as_str())
        .collect();
    assert!(known.is_empty(), "facts from nowhere: {known:?}");
    assert!(facts_of_nothing.memory.total_bytes.detail().contains("/proc/meminfo"));

    // A directory in place of a file cannot be read either, and is not "missing".
    let partly = made(&[
        ("proc/meminfo/x", ""),
        ("proc/cpuinfo", "processor : 0\nmodel name : A\nflags : avx2\n"),
        ("proc/self/cgroup", "0::/\n"),
    ]);
    let facts = facts(partly.path());
    assert!(facts.memory.total_bytes.is_unknown());
    assert!(facts.memory.usable_bytes.is_unknown());
    assert_eq!(facts.cpu.model_name.value().map(String::as_str), Some("A"));
    assert_eq!(facts.cpu.logical_cores.value(), Some(&1));
    assert!(facts.cpu.physical_cores.is_unknown());
    assert_eq!(facts.cpu.usable_threads.value(), Some(&1));
}

#[test]
fn m11_a_limit_whose_use_is_unreadable_is_not_taken_for_free() {
    let root = made(&[
        ("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\n"),
        ("proc/self/cgroup", "0::/a\n"),
        ("proc/self/mountinfo", "27 22 0:24 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
        ("sys/fs/cgroup/a/memory.max", "4294967296\n"),
    ]);
    let memory = facts(root.path()).memory;
    assert!(memory.limit.is_unknown());
    assert!(memory.limit.detail().contains("/a has a limit"), "{}", memory.limit.detail());
    assert_eq!(memory.usable_bytes.value(), Some(&(4 * GIB)));
    assert_eq!(memory.usable_bytes.source(), Source::Estimated);
}

#[test]
fn paths_that_climb_do_not_leave_the_tree() {
    let root = made(&[
        ("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\n"),
        ("proc/self/cgroup", "0::/../../other\n"),
        ("proc/self/mountinfo", "27 22 0:24 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
        ("sys/fs/cgroup/memory.max", "4294967296\n"),
        ("sys/fs/cgroup/memory.current", "0\n"),
    ]);
    assert_eq!(binding(&facts(root.path())).headroom_bytes, 4 * GIB);
}
