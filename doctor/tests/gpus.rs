//! Graphics processors: a stand-in for NVIDIA's library that these tests build, and recorded sysfs
//! trees, by the rows M6 to M8 of the project's list of cases.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod support;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::{made, write};
use tempfile::TempDir;
use tierkeep_doctor::{Fact, Facts, GpuFact, GpuVendor, Probe, Source};

const GIB: u64 = 1 << 30;

/// Builds the library of a machine. Where there is cargo there is rustc, beside it or in the path.
fn library(folder: &TempDir, machine: &str) -> PathBuf {
    let beside = Path::new(env!("CARGO")).with_file_name("rustc");
    let rustc = if beside.exists() { beside } else { PathBuf::from("rustc") };
    let path = folder.path().join(format!("lib{machine}.so"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stub/nvml.rs");
    let output = Command::new(rustc)
        .args(["--edition=2024", "--crate-name=nvml", "-Cdebuginfo=0", "-Cpanic=abort"])
        .args(["--cfg", &format!("machine=\"{machine}\"")])
        .arg("-o")
        .arg(&path)
        .arg(source)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    path
}

/// What is found with the library of a machine, on a host of 128 GiB.
fn with_library(machine: &str) -> Facts {
    let folder = TempDir::new().unwrap();
    let root = made(&[("proc/meminfo", "MemTotal: 134217728 kB\nMemAvailable: 125829120 kB\n")]);
    let probe = Probe::new().root(root.path().to_path_buf()).measure(false);
    probe.nvml_library(library(&folder, machine)).run(&mut |_| {})
}

fn cards(facts: &Facts) -> &[GpuFact] {
    facts.gpus.nvidia.value().unwrap_or_else(|| panic!("{:?}", facts.gpus.nvidia))
}

#[test]
fn m6_two_cards_one_of_them_busy() {
    let facts = with_library("two");
    let [idle, busy] = cards(&facts) else { panic!("{facts:?}") };
    assert_eq!((idle.index, idle.name.value().unwrap().as_str()), (0, "NVIDIA L40S"));
    assert_eq!(idle.vendor, GpuVendor::Nvidia);
    assert_eq!(idle.uuid.value().unwrap(), "GPU-00000001");
    assert_eq!(idle.driver_version.value().unwrap(), "570.86.10");
    assert_eq!(idle.compute_capability.value().unwrap(), "8.9");
    // Free memory of each, not total.
    assert_eq!(idle.memory_total_bytes.value(), Some(&48_305_799_168));
    assert_eq!(idle.memory_free_bytes.value(), Some(&47_700_000_000));
    assert_eq!(idle.memory_reserved_bytes.value(), Some(&500_000_000));
    assert_eq!(busy.name.value().unwrap(), "NVIDIA H100 80GB HBM3");
    assert_eq!(busy.memory_total_bytes.value(), Some(&85_520_809_984));
    assert_eq!(busy.memory_free_bytes.value(), Some(&3_000_000_000));
    assert_eq!(busy.is_unified, Fact::read(false, "the driver reports memory of its own"));
}

#[test]
fn links_memory_speed_and_division_are_told() {
    let facts = with_library("two");
    let [l40s, h100] = cards(&facts) else { panic!("{facts:?}") };
    // 9001 MHz x 2 x 384 bits and 2619 MHz x 2 x 5120 bits: the 864 GB/s and 3.35 TB/s of their makers.
    assert_eq!(l40s.memory_bandwidth_bytes_per_s.value(), Some(&864_096_000_000.0));
    assert_eq!(h100.memory_bandwidth_bytes_per_s.value(), Some(&3_352_320_000_000.0));
    assert_eq!(l40s.memory_bandwidth_bytes_per_s.source(), Source::Estimated);
    let link =
        |card: &GpuFact| (card.link_generation.value().copied(), card.link_width.value().copied());
    assert_eq!(link(l40s), (Some(4), Some(16)));
    assert_eq!(l40s.link_bytes_per_s.value(), Some(&31_507_692_308.0));
    // The slot has fewer lanes than the card.
    assert_eq!(link(h100), (Some(5), Some(8)));
    assert_eq!(h100.link_bytes_per_s.value(), Some(&31_507_692_308.0));
    assert_eq!(l40s.mig.value().unwrap(), "not supported");
    assert_eq!(h100.mig.value().unwrap(), "enabled");
    let detail = h100.mig.detail();
    assert!(detail.contains("instances of 20.00 GB, 20.00 GB"), "{detail}");
    assert!(detail.contains("disabled after a reset"), "{detail}");
}

#[test]
fn m7_a_device_without_memory_of_its_own_is_not_counted_again() {
    for machine in ["no_total", "all_of_it"] {
        let facts = with_library(machine);
        let [gpu] = cards(&facts) else { panic!("{facts:?}") };
        assert_eq!(gpu.is_unified.value(), Some(&true), "{machine}");
        assert_eq!(gpu.is_unified.source(), Source::Estimated);
        for memory in [&gpu.memory_total_bytes, &gpu.memory_free_bytes] {
            assert!(memory.is_unknown(), "{machine}: {memory:?}");
            assert!(memory.detail().contains("its memory is the system's"), "{memory:?}");
        }
        // The one pool is the system's.
        assert_eq!(facts.memory.total_bytes.value(), Some(&(128 * GIB)));
        assert!(gpu.link_bytes_per_s.is_unknown() && gpu.memory_bandwidth_bytes_per_s.is_unknown());
    }
}

#[test]
fn m8_a_driver_that_fails_is_a_fact_with_its_reason() {
    let nvidia = with_library("failing").gpus.nvidia;
    assert_eq!(nvidia.detail(), "no NVIDIA driver: NVIDIA driver is not loaded");
    // A device that is lost is listed, and everything about it is unknown with the reason.
    let facts = with_library("broken");
    let [gpu] = cards(&facts) else { panic!("{facts:?}") };
    assert!(gpu.memory_total_bytes.detail().contains("device 0 cannot be opened"), "{gpu:?}");
    assert!(gpu.mig.is_unknown() && gpu.is_unified.is_unknown());
}

#[test]
fn m8_without_a_driver_a_card_on_the_bus_is_named() {
    let root = made(&[
        ("sys/bus/pci/devices/0000:00:1f.0/vendor", "0x8086\n"),
        ("sys/bus/pci/devices/0000:00:1f.0/class", "0x060100\n"),
        ("sys/bus/pci/devices/0000:65:00.0/vendor", "0x10de\n"),
        ("sys/bus/pci/devices/0000:65:00.0/class", "0x030000\n"),
        ("sys/bus/pci/devices/0000:65:00.1/vendor", "0x10de\n"),
        ("sys/bus/pci/devices/0000:65:00.1/class", "0x040300\n"),
    ]);
    let probe = Probe::new().root(root.path().to_path_buf()).measure(false);
    let nvidia = probe.nvml_library(PathBuf::from("/nonexistent.so")).run(&mut |_| {}).gpus.nvidia;
    let detail = nvidia.detail();
    assert!(detail.starts_with("no NVIDIA driver: "), "{detail}");
    assert!(detail.ends_with("; there is an NVIDIA card at 0000:65:00.0"), "{detail}");
}

/// A card whose `device` is a link to its place on the bus, as in sysfs.
fn card(root: &Path, number: u32, address: &str, files: &[(&str, &str)]) {
    let bus = format!("sys/devices/pci0000:00/{address}");
    for (file, text) in files {
        write(root, &format!("{bus}/{file}"), text);
    }
    std::fs::create_dir_all(root.join(format!("sys/class/drm/card{number}"))).unwrap();
    let link = root.join(format!("sys/class/drm/card{number}/device"));
    symlink(root.join(bus), link).unwrap();
}

fn others(root: &Path) -> Vec<GpuFact> {
    support::facts(root).gpus.others.into_value().unwrap()
}

/// A Radeon Pro W7900, an integrated Radeon, and a server's display.
fn radeons() -> TempDir {
    let root = made(&[("sys/class/drm/card0-DP-1/status", "connected\n")]);
    card(
        root.path(),
        0,
        "0000:03:00.0",
        &[
            ("vendor", "0x1002\n"),
            ("device", "0x7448\n"),
            ("product_name", "AMD Radeon PRO W7900\n"),
            ("unique_id", "5a1e2d3c4b\n"),
            ("mem_info_vram_total", "48301604864\n"),
            ("mem_info_vram_used", "1073741824\n"),
            ("mem_info_vram_vendor", "samsung\n"),
            ("max_link_speed", "16.0 GT/s PCIe\n"),
            ("max_link_width", "16\n"),
            ("current_link_speed", "2.5 GT/s PCIe\n"),
            ("current_link_width", "16\n"),
        ],
    );
    card(
        root.path(),
        10,
        "0000:c1:00.0",
        &[
            ("vendor", "0x1002\n"),
            ("device", "0x150e\n"),
            ("product_name", "\n"),
            ("mem_info_vram_total", "536870912\n"),
            ("mem_info_vram_used", "104857600\n"),
            ("max_link_speed", "Unknown\n"),
            ("max_link_width", "255\n"),
        ],
    );
    card(root.path(), 2, "0000:07:00.0", &[("vendor", "0x1a03\n"), ("device", "0x2000\n")]);
    let node = "sys/class/kfd/kfd/topology/nodes";
    for (number, properties) in [
        (0, "cpu_cores_count 24\nsimd_count 0\nlocation_id 0\n"),
        (1, "cpu_cores_count 24\nsimd_count 32\nlocation_id 49408\n"),
    ] {
        write(root.path(), &format!("{node}/{number}/properties"), properties);
    }
    root
}

#[test]
fn amd_cards_and_integrated_graphics_from_sysfs() {
    let root = radeons();
    let all = others(root.path());
    let [own, integrated] = all.as_slice() else { panic!("{all:?}") };
    assert_eq!((own.vendor, own.index), (GpuVendor::Amd, 0));
    assert_eq!(own.name.value().unwrap(), "AMD Radeon PRO W7900");
    assert_eq!(own.memory_total_bytes.value(), Some(&48_301_604_864));
    assert_eq!(own.memory_free_bytes.value(), Some(&(48_301_604_864 - GIB)));
    assert_eq!(own.is_unified.value(), Some(&false));
    // The link's generation is its best, for it falls while the card idles.
    assert_eq!(own.link_generation.value(), Some(&4));
    assert_eq!(own.link_bytes_per_s.value(), Some(&31_507_692_308.0));
    // M7: what the firmware sets aside for it is the system's memory.
    assert_eq!((integrated.vendor, integrated.index), (GpuVendor::Amd, 1));
    assert_eq!(integrated.is_unified.value(), Some(&true));
    assert!(integrated.memory_total_bytes.is_unknown(), "{integrated:?}");
    assert!(integrated.name.detail().contains("PCI id 1002:150e"), "{integrated:?}");
    assert!(integrated.link_generation.detail().contains("Unknown"), "{integrated:?}");
    // Without the compute driver's nodes nothing says whose memory it is.
    std::fs::remove_dir_all(root.path().join("sys/class/kfd")).unwrap();
    let all = others(root.path());
    assert!(all[1].is_unified.is_unknown());
    assert_eq!(all[0].is_unified.value(), Some(&false));
}

#[test]
fn intel_graphics_from_sysfs() {
    let root = made(&[]);
    card(root.path(), 1, "0000:00:02.0", &[("vendor", "0x8086\n"), ("device", "0xa780\n")]);
    card(
        root.path(),
        2,
        "0000:04:00.0",
        &[
            ("vendor", "0x8086\n"),
            ("device", "0xe20b\n"),
            ("tile0/physical_vram_size_bytes", "12884901888\n"),
        ],
    );
    let all = others(root.path());
    let [integrated, card] = all.as_slice() else { panic!("{all:?}") };
    assert_eq!(integrated.is_unified.value(), Some(&true));
    assert_eq!(integrated.is_unified.source(), Source::Estimated);
    assert_eq!((card.vendor, card.index), (GpuVendor::Intel, 1));
    assert_eq!(card.memory_total_bytes.value(), Some(&(12 * GIB)));
    assert!(card.memory_free_bytes.is_unknown());
    assert_eq!(card.is_unified.value(), Some(&false));
}

#[test]
fn no_graphics_and_no_sysfs_are_two_things() {
    let without = support::facts(made(&[("sys/class/net/lo/mtu", "65536\n")]).path()).gpus.others;
    assert_eq!(without.value(), Some(&vec![]));
    assert!(support::facts(made(&[]).path()).gpus.others.is_unknown());
}
