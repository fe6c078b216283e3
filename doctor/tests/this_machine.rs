//! The machine that the tests run on: plausible values, disk reads, saved facts.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use tierkeep_doctor::{
    CgroupLimit, CgroupVersion, DiskReadSpeed, Fact, Facts, FilesystemKind, GpuFact, Probe, Source,
    process,
};

/// A folder in the build directory: the usual one for temporary files may lie in memory.
fn folder() -> tempfile::TempDir {
    tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A file of `mebibytes` of bytes that do not compress.
fn data_file(folder: &tempfile::TempDir, mebibytes: usize) -> PathBuf {
    let path = folder.path().join("data");
    let mut file = File::create(&path).unwrap();
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for _ in 0..mebibytes {
        let mut block = Vec::with_capacity(1 << 20);
        for _ in 0..(1 << 20) / 8 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            block.extend_from_slice(&state.to_le_bytes());
        }
        file.write_all(&block).unwrap();
    }
    file.sync_all().unwrap();
    path
}

#[test]
fn values_are_plausible() {
    let folder = folder();
    let mut parts = Vec::new();
    let probe = Probe::new().measure(false).directory(Some(folder.path().to_path_buf()));
    let facts = probe.run(&mut |part| parts.push(part.to_owned()));
    assert!(!parts.is_empty());
    let logical = *facts.cpu.logical_cores.value().unwrap();
    let threads = *facts.cpu.usable_threads.value().unwrap();
    assert!((1..=logical).contains(&threads), "{threads} of {logical}");
    // The standard library rounds a CPU quota down, this crate rounds it up.
    assert!(threads <= std::thread::available_parallelism().unwrap().get() as u64 + 1);
    let total = *facts.memory.total_bytes.value().unwrap();
    let usable = *facts.memory.usable_bytes.value().unwrap();
    assert!(total > 256 << 20 && usable > 0 && usable <= total);
    assert!(usable <= *facts.memory.available_bytes.value().unwrap());
    assert_eq!(facts.memory.limit.source(), Source::Read);
    let disk = &facts.disk;
    assert!(disk.free_bytes.value().unwrap() <= disk.total_bytes.value().unwrap());
    assert!(folder.path().starts_with(disk.mount_point.value().unwrap()));
    assert!(facts.disk.read.detail().contains("not measured"));
    assert!(facts.memory.read_bandwidth_bytes_per_s.detail().contains("not measured"));
    assert!(!facts.platform.kernel.is_unknown());
    #[cfg(target_arch = "x86_64")]
    assert!(facts.cpu.instruction_sets.value().unwrap().iter().any(|set| set == "sse4.1"));
    assert!(process::cgroup_peak().value().is_none_or(|&peak| peak > 0));
}

#[test]
fn measured_facts_say_so_and_are_saved_whole() {
    let folder = folder();
    let data = data_file(&folder, 16);
    let probe = Probe::new().directory(Some(folder.path().to_path_buf())).files(vec![data]);
    let facts = probe.read_bytes(65_000).queue_depths(vec![2]).run(&mut |_| {});
    for speed in [
        &facts.memory.read_bandwidth_bytes_per_s,
        &facts.memory.read_bandwidth_one_thread_bytes_per_s,
    ] {
        match speed.value() {
            // Whole numbers are what both formats keep exactly.
            Some(&speed) => assert!(speed.fract() == 0.0 && speed > 1e6),
            None => assert!(!speed.detail().is_empty()),
        }
    }
    match facts.disk.read.value() {
        Some(speed) => {
            assert_eq!(facts.disk.read.source(), Source::Measured);
            assert_eq!((speed.read_bytes, speed.queue_depth), (65_536, 2));
            assert!(speed.bytes_per_s > 0.0 && speed.bytes_per_s < 30e9);
        }
        // Filesystems that refuse direct reads, or compress, are allowed to be not measurable.
        None => assert!(!facts.disk.read.detail().is_empty()),
    }
    // Every size was timed, the one that matters most first; 64 KiB is one of the others too.
    if let Some(reads) = facts.disk.reads.value() {
        let points: Vec<_> = reads.iter().map(|read| (read.read_bytes, read.queue_depth)).collect();
        assert_eq!(points, [(65_536, 2), (1 << 20, 2)]);
    }
    round_trip(&facts);
}

/// Files are named from the folder as root, which also skips the measurement of memory.
fn read_speed(folder: &tempfile::TempDir, files: &[&str]) -> Fact<DiskReadSpeed> {
    let files = files.iter().map(PathBuf::from).collect();
    Probe::new().root(folder.path().to_path_buf()).files(files).run(&mut |_| {}).disk.read
}

#[test]
fn holes_small_files_and_missing_files_are_not_measured() {
    let folder = folder();
    File::create(folder.path().join("hole")).unwrap().set_len(1 << 30).unwrap();
    File::create(folder.path().join("small")).unwrap().write_all(&[1; 5000]).unwrap();
    std::fs::create_dir(folder.path().join("folder")).unwrap();
    for (files, reason) in [
        (vec!["/hole"], "not measurable: /hole"),
        (vec!["/small"], "too small to measure"),
        (vec!["/missing"], "cannot open /missing"),
        (vec!["/folder"], "/folder is not a regular file"),
        (vec![], "no file"),
    ] {
        let speed = read_speed(&folder, &files);
        assert!(speed.is_unknown(), "{files:?}: {speed:?}");
        // Where direct reads are refused that is said first.
        let found = speed.detail();
        assert!(found.contains(reason) || found.contains("refuses reads"), "{files:?}: {found}");
    }
}

#[test]
fn files_that_are_nearly_all_holes_are_not_measured() {
    use std::os::unix::fs::FileExt;
    let folder = folder();
    // The headers of a model without its data.
    let header = vec![1; 1 << 20];
    for name in ["one", "two"] {
        let file = File::create(folder.path().join(name)).unwrap();
        file.set_len(1 << 30).unwrap();
        file.write_all_at(&header, 0).unwrap();
        file.sync_all().unwrap();
    }
    let speed = read_speed(&folder, &["/one", "/two"]);
    assert!(speed.detail().contains("not measurable: the files are holes"), "{speed:?}");
    // A file among them that is stored is enough to measure with.
    data_file(&folder, 200);
    let speed = read_speed(&folder, &["/one", "/missing", "/data"]);
    assert!(!speed.is_unknown() || !speed.detail().contains("holes"), "{speed:?}");
}

#[test]
fn a_temporary_file_serves_only_where_it_is_allowed() {
    let folder = folder();
    let probe = Probe::new().root(folder.path().to_path_buf()).queue_depths(vec![1]);
    let without = probe.run(&mut |_| {}).disk.read;
    assert!(without.detail().contains("no file"), "{without:?}");
    let with = probe.scratch(Some(PathBuf::from("/"))).run(&mut |_| {}).disk.read;
    match with.value() {
        Some(speed) => assert!(speed.bytes_per_s > 0.0 && with.detail().contains("temporary file")),
        None => {
            assert!(with.detail().starts_with("no file to measure with was given; "), "{with:?}")
        }
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "something was left behind");
}

#[test]
fn relative_paths_are_those_of_the_caller() {
    let disk =
        Probe::new().measure(false).directory(Some(PathBuf::from("."))).run(&mut |_| {}).disk;
    let here = std::env::current_dir().unwrap().canonicalize().unwrap();
    assert_eq!(disk.path.value().map(PathBuf::from), Some(here));
}

#[test]
fn memory_is_no_disk() {
    let Ok(folder) = tempfile::TempDir::new_in("/dev/shm") else { return };
    data_file(&folder, 8);
    let probe = Probe::new().directory(Some(folder.path().to_path_buf())).measure(false);
    let disk = probe.run(&mut |_| {}).disk;
    if disk.filesystem.value().map(String::as_str) == Some("tmpfs") {
        assert_eq!(disk.kind.value(), Some(&FilesystemKind::Memory));
        // Linux before 6.6 refuses direct reads here, later kernels answer them from memory.
        let speed = read_speed(&folder, &["/data"]);
        assert!(speed.is_unknown(), "{speed:?}");
    }
}

fn round_trip(facts: &Facts) {
    let json = serde_json::to_string(facts).unwrap();
    assert_eq!(&serde_json::from_str::<Facts>(&json).unwrap(), facts, "{json}");
    let toml = toml::to_string_pretty(facts).unwrap();
    assert_eq!(&toml::from_str::<Facts>(&toml).unwrap(), facts, "{toml}");
}

/// Facts with every variant and every type of value.
fn everything() -> Facts {
    let mut facts = Facts::default();
    facts.cpu.model_name = Fact::read("A \"quoted\" name".to_owned(), "x");
    facts.cpu.usable_threads = Fact::assumed(16, "given");
    facts.cpu.instruction_sets = Fact::read(vec!["avx2".to_owned(), "fma".to_owned()], "x");
    facts.memory.usable_bytes = Fact::estimated(1 << 40, "x");
    facts.memory.limit = Fact::read(
        Some(CgroupLimit {
            group: "/a".to_owned(),
            version: CgroupVersion::V2,
            file: "memory.max".to_owned(),
            limit_bytes: 4,
            used_bytes: 3,
            reclaimable_bytes: 2,
            headroom_bytes: 3,
        }),
        "x",
    );
    facts.memory.read_bandwidth_bytes_per_s = Fact::measured(2e10, "x");
    facts.memory.read_bandwidth_one_thread_bytes_per_s = Fact::measured(12_345_678_901.0, "x");
    facts.disk.kind = Fact::read(FilesystemKind::Overlay, "x");
    facts.disk.rotational = Fact::read(false, "x");
    let speed = DiskReadSpeed { bytes_per_s: 3e9, read_bytes: 1 << 20, queue_depth: 8 };
    facts.disk.read = Fact::measured(speed, "x");
    facts.gpus.nvidia = Fact::read(
        vec![GpuFact {
            index: 0,
            name: Fact::read("GPU".to_owned(), "x"),
            memory_total_bytes: Fact::read(48_000_000_000, "x"),
            memory_free_bytes: Fact::unknown("busy"),
            compute_capability: Fact::read("9.0".to_owned(), "x"),
            driver_version: Fact::read("570.1".to_owned(), "x"),
            ..GpuFact::default()
        }],
        "x",
    );
    facts
}

#[test]
fn every_kind_of_fact_round_trips() {
    let mut facts = everything();
    round_trip(&facts);
    facts.memory.limit = Fact::read(None, "no limit");
    round_trip(&facts);
    round_trip(&Facts::default());
}

#[test]
fn facts_written_by_hand_may_be_partial_but_not_misspelt() {
    let text = "schema_version = 1\n\
                [memory]\n\
                usable_bytes = { source = \"assumed\", value = 200_000_000_000 }\n\
                read_bandwidth_bytes_per_s = { source = \"assumed\", value = 2e11 }\n";
    let facts: Facts = toml::from_str(text).unwrap();
    assert_eq!(facts.memory.usable_bytes, Fact::assumed(200_000_000_000, ""));
    assert_eq!(facts.cpu.usable_threads.detail(), "not recorded");
    let whole = text.replace("2e11", "200000000000");
    assert_eq!(toml::from_str::<Facts>(&whole).unwrap(), facts);
    assert!(toml::from_str::<Facts>(&text.replace("usable_bytes", "useable_bytes")).is_err());
    assert!(toml::from_str::<Facts>("[memory]\n").is_err(), "no schema version");
}
