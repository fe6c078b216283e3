//! What is fuzzed of the doctor crate: one function for each kind of file, used by the fuzz targets
//! and by the test that replays their corpus. Besides not panicking, each holds what its callers
//! rely on.

use std::path::Path;

use tierkeep_doctor::{Facts, SavedFactsError, filesystem_kind, parse};

/// A file of machine facts. What is read can be written, and reads back the same.
pub(crate) fn facts(bytes: &[u8]) -> Result<Facts, SavedFactsError> {
    let text = String::from_utf8_lossy(bytes);
    let facts = Facts::from_toml(&text, Path::new("facts.toml"))?;
    let written = facts.to_toml()?;
    let again = Facts::from_toml(&written, Path::new("facts.toml"))?;
    assert_eq!(facts, again, "{written}");
    Ok(facts)
}

/// `/proc/meminfo`, and the files of a process that look like it.
pub(crate) fn meminfo(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let _ = parse::parse_meminfo(&text);
    let _ = parse::parse_process_status(&text);
    let _ = parse::parse_thread_count(&text);
    assert!(parse::parse_smaps(&text).len() <= text.lines().count());
    let _ = parse::parse_process_io(&text);
    let _ = parse::parse_cpus_allowed_list(&text);
}

/// `/proc/cpuinfo`, and the short files below `/sys/devices/system/cpu`.
pub(crate) fn cpuinfo(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let info = parse::parse_cpuinfo(&text);
    assert!(info.processors.len() <= text.lines().count());
    let _ = parse::parse_cache_size(&text);
    if let Ok(cpus) = parse::parse_cpu_list(&text) {
        assert!(cpus.windows(2).all(|pair| pair[0] < pair[1]), "{cpus:?}");
    }
}

/// `/proc/self/mountinfo`.
pub(crate) fn mounts(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    for mount in parse::parse_mountinfo(&text) {
        let _ = filesystem_kind(&mount.filesystem);
    }
}

/// `/proc/self/cgroup` and the files of a control group.
pub(crate) fn cgroup(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    assert!(parse::parse_cgroup(&text).iter().all(|group| group.path.starts_with('/')));
    let _ = parse::parse_cgroup_limit(&text);
    let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
    for quota in [parse::parse_cpu_max(&text), parse::parse_cfs_quota(first, rest)] {
        if let Ok(Some(cpus)) = quota {
            assert!(cpus.is_finite() && cpus >= 0.0, "{cpus}");
        }
    }
    let _ = parse::parse_memory_stat(&text).reclaimable_bytes();
}
