//! Whatever stands in the files of `/proc` and `/sys`, there are facts, and they can be saved.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use support::{facts, made};
use tierkeep_doctor::{Facts, Probe, SavedFactsError};

/// Files that the probe reads, and a text that each might hold.
const FILES: [(&str, &str); 31] = [
    ("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 1 kB\nSwapTotal: 0 kB\n"),
    ("proc/cpuinfo", "processor : 0\nphysical id : 0\ncore id : 0\nflags : avx2 amx_tile\n"),
    ("proc/self/status", "Cpus_allowed_list:\t0-3\nCapEff:\t0\n"),
    ("proc/self/limits", "Max locked memory 65536 65536 bytes\n"),
    ("proc/self/cgroup", "0::/a\n4:memory,cpu:/b\n"),
    ("proc/self/mountinfo", "27 22 0:24 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
    ("proc/spl/kstat/zfs/arcstats", "size 4 1000\nc_min 4 10\n"),
    ("sys/fs/cgroup/memory.max", "1000000000\n"),
    ("sys/fs/cgroup/a/memory.max", "max\n"),
    ("sys/fs/cgroup/a/memory.current", "500\n"),
    ("sys/fs/cgroup/a/memory.stat", "file 5\nshmem 1\ninactive_file 1\nactive_file 1\n"),
    ("sys/fs/cgroup/a/cpu.max", "150000 100000\n"),
    ("sys/fs/cgroup/a/cpuset.cpus.effective", "0-2\n"),
    ("sys/devices/system/cpu/online", "0-3\n"),
    ("sys/devices/system/cpu/smt/active", "1\n"),
    ("sys/devices/system/cpu/cpu0/topology/core_cpus_list", "0,1\n"),
    ("sys/devices/system/cpu/cpu0/cpu_capacity", "1024\n"),
    ("sys/devices/system/cpu/cpu0/cache/index0/level", "1\n"),
    ("sys/devices/system/cpu/cpu0/cache/index0/type", "Data\n"),
    ("sys/devices/system/cpu/cpu0/cache/index0/size", "48K\n"),
    ("sys/devices/system/cpu/cpu0/cache/index0/shared_cpu_list", "0\n"),
    ("sys/devices/system/node/online", "0\n"),
    ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 5 kB\n"),
    ("sys/devices/cpu_core/cpus", "0-1\n"),
    ("sys/devices/cpu_atom/cpus", "2-3\n"),
    ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "3\n"),
    ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "1\n"),
    ("sys/class/drm/card0/device/vendor", "0x1002\n"),
    ("sys/class/drm/card0/device/mem_info_vram_total", "8589934592\n"),
    ("sys/class/drm/card0/device/mem_info_vram_used", "9589934592\n"),
    ("sys/class/drm/card0/device/max_link_speed", "16.0 GT/s PCIe\n"),
];

/// What may stand in a file instead.
fn other_text() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        Just("max".to_owned()),
        Just("0-4095".to_owned()),
        Just("-1".to_owned()),
        Just("0 100000".to_owned()),
        any::<u64>().prop_map(|number| number.to_string()),
        (0_u64..70).prop_map(|number| number.to_string()),
        "\\PC{0,20}",
        prop::collection::vec(any::<u8>(), 0..40)
            .prop_map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
        prop::sample::select(FILES.map(|(_, text)| text).to_vec()).prop_map(str::to_owned),
    ]
}

/// What is found is saved and read back the same, but for numbers that TOML has no room for.
fn is_saved_whole(facts: &Facts) -> Result<(), TestCaseError> {
    match facts.to_toml() {
        Ok(text) => prop_assert_eq!(&Facts::from_toml(&text, Path::new("x")).unwrap(), facts),
        Err(error) => prop_assert!(matches!(error, SavedFactsError::Unsupported { .. }), "{error}"),
    }
    prop_assert!(facts.cpu.usable_threads.value().is_none_or(|&threads| threads > 0));
    if let (Some(usable), Some(available)) =
        (facts.memory.usable_bytes.value(), facts.memory.available_bytes.value())
    {
        prop_assert!(usable <= available, "{usable} of {available}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn facts_of_any_tree_are_saved(
        changes in prop::collection::vec((0..FILES.len(), prop::option::of(other_text())), 0..8),
    ) {
        let root = made(&FILES);
        for (file, text) in changes {
            let path = root.path().join(FILES[file].0);
            match text {
                Some(text) => std::fs::write(path, text).unwrap(),
                // Two changes may take the same file away.
                None => drop(std::fs::remove_file(path)),
            }
        }
        is_saved_whole(&facts(root.path()))?;
        let probe = Probe::new().root(root.path().to_path_buf()).measure(false);
        let probe = probe.directory(Some(PathBuf::from("/sys"))).affinity(vec![0, 70_000]);
        is_saved_whole(&probe.run(&mut |_| {}))?;
    }
}
