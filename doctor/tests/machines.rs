//! Recorded and made-up machines: memory, disks and what cannot be read, by the rows M1 to M3 and M8 to
//! M12 of the project's list of cases. Processors are in `processors.rs`, GPUs in `gpus.rs`.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod support;

use std::path::PathBuf;

use support::{facts, made, recorded};
use tierkeep_doctor::{
    CgroupLimit, CgroupVersion, DiskFacts, Fact, Facts, FilesystemKind, HugePagePool, Measuring,
    Probe, Source,
};

const GIB: u64 = 1 << 30;

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

#[test]
fn m3_zfs_gives_back_all_but_its_minimum() {
    let root = made(&[
        ("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 20971520 kB\n"),
        ("proc/self/cgroup", "0::/\n"),
        (
            "proc/spl/kstat/zfs/arcstats",
            "13 1 0x01 147 39984 1 2\nname type data\nc_min 4 2147483648\nsize 4 34359738368\n",
        ),
    ]);
    let memory = facts(root.path()).memory;
    assert_eq!(memory.zfs_arc_bytes.value(), Some(&(32 * GIB)));
    assert_eq!(memory.available_bytes.value(), Some(&(50 * GIB)));
    assert_eq!(memory.available_bytes.source(), Source::Estimated);
    assert!(memory.available_bytes.detail().contains("c_min"), "{memory:?}");
    assert_eq!(memory.usable_bytes.value(), Some(&(50 * GIB)));
    // A cache at its minimum gives nothing, and none is known to be none.
    support::write(root.path(), "proc/spl/kstat/zfs/arcstats", "c_min 4 2000\nsize 4 1000\n");
    assert_eq!(facts(root.path()).memory.available_bytes.value(), Some(&(20 * GIB)));
    std::fs::remove_dir_all(root.path().join("proc/spl")).unwrap();
    assert_eq!(facts(root.path()).memory.zfs_arc_bytes.value(), Some(&0));
    support::write(root.path(), "proc/spl/kstat/zfs/arcstats", "nonsense\n");
    assert!(facts(root.path()).memory.zfs_arc_bytes.is_unknown());
}

#[test]
fn m12_locked_memory_swap_and_pools_are_told() {
    let limits = |soft: &str| {
        format!(
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max locked memory         {soft}              {soft}              bytes     \n"
        )
    };
    let root = made(&[
        (
            "proc/meminfo",
            "MemTotal: 33554432 kB\nMemAvailable: 20971520 kB\nSwapTotal: 8388608 kB\n\
             SwapFree: 1048576 kB\n",
        ),
        ("proc/self/limits", &limits("65536")),
        ("proc/self/status", "CapEff:\t0000000000000000\n"),
        ("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "4\n"),
        ("sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "3\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "0\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
    ]);
    let memory = facts(root.path()).memory;
    assert_eq!(memory.locked_limit_bytes.value(), Some(&Some(65536)));
    assert_eq!(memory.swap_total_bytes.value(), Some(&(8 * GIB)));
    assert_eq!(memory.swap_free_bytes.value(), Some(&GIB));
    let pool = |page_bytes, total, free| HugePagePool { page_bytes, total, free };
    let pools = [pool(2 << 20, 0, 0), pool(1 << 30, 4, 3)];
    assert_eq!(memory.huge_pages.value().unwrap(), &pools);
    assert_eq!(memory.transparent_huge_pages.value().unwrap(), "madvise");
    support::write(root.path(), "proc/self/status", "CapEff:\t0000000000004000\n");
    let locked = facts(root.path()).memory.locked_limit_bytes;
    assert_eq!(locked.value(), Some(&None));
    assert!(locked.detail().contains("CAP_IPC_LOCK"), "{}", locked.detail());
    support::write(root.path(), "proc/self/limits", &limits("unlimited"));
    support::write(root.path(), "proc/self/status", "CapEff:\t0000000000000000\n");
    assert_eq!(facts(root.path()).memory.locked_limit_bytes.value(), Some(&None));
    support::write(root.path(), "proc/self/limits", "Max cpu time unlimited\n");
    assert!(facts(root.path()).memory.locked_limit_bytes.is_unknown());
}

/// A mount of a device and the tree of devices that it lies in, with the links of sysfs.
fn disk_link(device: &str, files: &[(&str, &str)], links: &[(&str, &str)]) -> DiskFacts {
    let root = made(&[
        ("proc/self/mountinfo", "22 1 259:2 / / rw - ext4 /dev/disk rw\n"),
        ("models/x", ""),
    ]);
    for (path, text) in files {
        support::write(root.path(), path, text);
    }
    let link = |at: &str, to: &str| {
        let at = root.path().join(at);
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        std::fs::create_dir_all(root.path().join(to)).unwrap();
        std::os::unix::fs::symlink(root.path().join(to), at).unwrap();
    };
    link("sys/dev/block/259:2", device);
    for (at, to) in links {
        link(at, to);
    }
    let probe = Probe::new().root(root.path().to_path_buf()).measure(false);
    probe.directory(Some(PathBuf::from("/models"))).run(&mut |_| {}).disk
}

#[test]
fn links_of_disks_are_those_of_the_tree_of_devices() {
    let nvme = "sys/devices/pci0000:00/0000:00:1d.0/0000:02:00.0";
    let drive = format!("{nvme}/nvme/nvme0/nvme0n1");
    let speed = format!("{nvme}/current_link_speed");
    let width = format!("{nvme}/current_link_width");
    let rotational = format!("{drive}/queue/rotational");
    let files = [
        (speed.as_str(), "16.0 GT/s PCIe\n"),
        (width.as_str(), "4\n"),
        (rotational.as_str(), "0\n"),
    ];
    let disk = disk_link(&format!("{drive}/nvme0n1p2"), &files, &[]);
    assert_eq!(disk.link.value().unwrap(), "PCIe 4.0 x4");
    assert_eq!(disk.rotational.value(), Some(&false));
    // Encrypted, on a volume of that drive.
    let links = [
        ("sys/devices/virtual/block/dm-1/slaves/dm-0", "sys/devices/virtual/block/dm-0"),
        ("sys/devices/virtual/block/dm-0/slaves/nvme0n1p2", &*format!("{drive}/nvme0n1p2")),
    ];
    let disk = disk_link("sys/devices/virtual/block/dm-1", &files, &links);
    assert_eq!(disk.link.value().unwrap(), "dm-1 over dm-0 over PCIe 4.0 x4");
    let vda = "sys/devices/pci0000:00/0000:00:04.0/virtio1/block/vda";
    let disk = disk_link(vda, &[(&format!("{vda}/queue/rotational"), "1\n")], &[]);
    assert!(disk.rotational.is_unknown(), "{disk:?}");
    for (device, expected) in [
        (vda, "virtual (virtio)"),
        ("sys/devices/pci0000:00/0000:00:17.0/ata3/host2/target2:0:0/2:0:0:0/block/sda", "SATA"),
        ("sys/devices/pci0000:00/0000:00:14.0/usb2/2-1/2-1:1.0/host6/block/sdb", "USB"),
        ("sys/devices/virtual/nvme-fabrics/ctl/nvme1/nvme1n1", "NVMe over a network"),
        ("sys/devices/pci0000:00/0000:00:05.0/nvme/nvme2/nvme2n1", "NVMe"),
    ] {
        assert_eq!(disk_link(device, &[], &[]).link.value().unwrap(), expected, "{device}");
    }
    assert!(disk_link("sys/devices/virtual/block/surprise", &[], &[]).link.is_unknown());
}

#[test]
fn what_need_not_be_measured_is_not() {
    let root = tempfile::tempdir().unwrap();
    let told = |measuring: Measuring| {
        let mut told = Vec::new();
        let probe = Probe::new().root(root.path().to_path_buf()).measure(measuring);
        let facts = probe.run(&mut |what| told.push(what.to_owned()));
        told.retain(|what| what.starts_with("measuring"));
        (told, facts)
    };
    let (memory, disk) = ("measuring memory bandwidth", "measuring disk reads");
    assert_eq!(told(Measuring::ALL).0, [memory, disk]);
    let (progress, facts) = told(Measuring::NONE);
    assert!(progress.is_empty());
    assert!(facts.disk.read.detail().contains("--no-measure"));
    let (progress, facts) = told(Measuring { disk: false, ..Measuring::ALL });
    assert_eq!(progress, [memory]);
    assert_eq!(facts.disk.reads.detail(), "not measured: another figure stands for it");
    let (progress, facts) = told(Measuring { memory: false, ..Measuring::ALL });
    assert_eq!(progress, [disk]);
    let bandwidth = &facts.memory.read_bandwidth_bytes_per_s;
    assert_eq!(bandwidth.detail(), "not measured: another figure stands for it");
}
