//! No parser panics, whatever the text, and the corpus of odd texts is replayed.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use proptest::prelude::*;
use tierkeep_doctor::{filesystem_kind, parse};

/// Everything at once: each parser meets the texts of the others too.
fn parse_all(text: &str) {
    let _ = parse::parse_meminfo(text);
    let _ = parse::parse_process_status(text);
    let _ = parse::parse_thread_count(text);
    assert!(parse::parse_smaps(text).len() <= text.lines().count());
    let _ = parse::parse_node_total(text);
    assert!(parse::parse_load(text).is_none_or(|load| load >= 0.0));
    let _ = parse::parse_process_io(text);
    assert!(parse::parse_trial(text).answers.len() <= text.lines().count());
    let _ = parse::parse_cpus_allowed_list(text);
    let info = parse::parse_cpuinfo(text);
    assert!(info.processors.len() <= text.lines().count());
    let _ = parse::parse_cpu_list(text);
    let _ = parse::parse_cache_size(text);
    assert!(parse::parse_cgroup(text).iter().all(|group| group.path.starts_with('/')));
    let _ = parse::parse_cgroup_limit(text);
    if let Ok(Some(cpus)) = parse::parse_cpu_max(text) {
        assert!(cpus.is_finite() && cpus >= 0.0);
    }
    let _ = parse::parse_cfs_quota(text, text);
    let _ = parse::parse_memory_stat(text).reclaimable_bytes();
    let _ = parse::parse_mountinfo(text);
    let _ = parse::parse_huge_page_folder(text);
    assert!(parse::parse_choice(text).is_none_or(|choice| text.contains(choice)));
    let _ = parse::parse_arcstats(text);
    let _ = parse::parse_locked_limit(text);
    let _ = parse::can_lock_all(text);
    let _ = parse::parse_kfd_property(text, "simd_count");
    let _ = parse::parse_pci_location(text);
    let link = (parse::parse_link_generation(text), parse::parse_link_width(text));
    if let (Some(generation), Some(width)) = link {
        assert!(parse::link_bytes_per_s(generation, width).is_some_and(f64::is_finite));
    }
    let _ = filesystem_kind(text);
}

#[test]
fn the_corpus_is_replayed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        parse_all(&String::from_utf8_lossy(&bytes));
        count += 1;
    }
    assert!(count >= 10, "only {count} files in the corpus");
}

/// Lines that look like what the kernel writes, with numbers and words mixed up.
fn almost_right() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        Just("MemTotal:".to_owned()),
        Just("processor\t:".to_owned()),
        Just("core id :".to_owned()),
        Just("flags :".to_owned()),
        Just("0::/".to_owned()),
        Just("4:memory:/a".to_owned()),
        Just("total_cache".to_owned()),
        Just("file".to_owned()),
        Just("hierarchical_memory_limit".to_owned()),
        Just("1 2 8:1 / /\\040".to_owned()),
        Just("Max locked memory ".to_owned()),
        Just("c_min 4 ".to_owned()),
        Just("size 4 ".to_owned()),
        Just("[madvise]".to_owned()),
        Just("16.0 GT/s PCIe".to_owned()),
        Just("0000:c1:00.0".to_owned()),
        Just("avx2 begins".to_owned()),
        Just("avx2 right".to_owned()),
        Just("- ext4 /dev/x".to_owned()),
        Just("kB".to_owned()),
        Just("max".to_owned()),
        Just("\\".to_owned()),
        any::<u64>().prop_map(|number| number.to_string()),
        any::<i64>().prop_map(|number| number.to_string()),
        (any::<u16>(), any::<u16>()).prop_map(|(first, last)| format!("{first}-{last}")),
        "\\PC{0,3}",
    ];
    let space = prop_oneof![Just(" "), Just("\n"), Just(","), Just(":"), Just(""), Just("-")];
    prop::collection::vec((word, space), 0..24).prop_map(|words| {
        words.into_iter().map(|(word, space)| format!("{word}{space}")).collect::<String>()
    })
}

proptest! {
    #[test]
    fn arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        parse_all(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn nearly_right_text(text in almost_right()) {
        parse_all(&text);
    }

    #[test]
    fn cpu_lists_round_trip(cpus in prop::collection::btree_set(0_usize..512, 0..40)) {
        let cpus: Vec<usize> = cpus.into_iter().collect();
        let text = cpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        prop_assert_eq!(&parse::parse_cpu_list(&text).unwrap(), &cpus);
        prop_assert_eq!(parse::parse_cpu_list(&parse::format_cpu_list(&cpus)).unwrap(), cpus);
    }

    #[test]
    fn what_can_be_reclaimed_is_never_more_than_the_file_pages(
        file in 0_u64..1 << 50, shmem in 0_u64..1 << 50, inactive in 0_u64..1 << 50,
        active in 0_u64..1 << 50,
    ) {
        let text = format!(
            "file {file}\nshmem {shmem}\ninactive_file {inactive}\nactive_file {active}\n"
        );
        let reclaimable = parse::parse_memory_stat(&text).reclaimable_bytes().unwrap();
        prop_assert!(reclaimable <= file && reclaimable <= inactive + active);
    }
}
