//! Files of control groups, version 1 and 2.
//!
//! Owns what a limit file may say, including the ways of saying "no limit". Refuses to know where the
//! files lie.

use super::{ParseError, excerpt, number};

/// Version 1 says "no limit" by the largest multiple of the page size that fits a signed 64-bit
/// number (9223372036854771712 with 4 KiB pages); any limit of 2^62 and above is taken for none.
const NO_LIMIT_FROM: u64 = 1 << 62;

/// One line of `/proc/<pid>/cgroup`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupMembership {
    /// Number of the hierarchy; 0 is the unified one.
    pub hierarchy: u64,
    /// Controllers of the hierarchy; empty for the unified one.
    pub controllers: Vec<String>,
    /// Path of the group in the hierarchy, as seen from this process's namespace.
    pub path: String,
}

/// Reads `/proc/<pid>/cgroup`.
pub fn parse_cgroup(text: &str) -> Vec<CgroupMembership> {
    text.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let hierarchy = fields.next()?.parse().ok()?;
            let controllers = fields.next()?.split(',').filter(|name| !name.is_empty());
            let controllers = controllers.map(str::to_owned).collect();
            let path = fields.next().filter(|path| path.starts_with('/'))?.to_owned();
            Some(CgroupMembership { hierarchy, controllers, path })
        })
        .collect()
}

/// Reads a limit file: `memory.max`, `memory.high` or `memory.limit_in_bytes`. `None` is no limit.
///
/// # Errors
///
/// Anything but a number of bytes or `max`. Version 1 writes -1 for no limit on old kernels.
pub fn parse_cgroup_limit(text: &str) -> Result<Option<u64>, ParseError> {
    match text.trim() {
        "max" | "-1" => Ok(None),
        text => Ok(Some(number("limit in bytes", text)?).filter(|&limit| limit < NO_LIMIT_FROM)),
    }
}

/// Reads `cpu.max`, as CPUs: quota over period. `None` is no limit.
///
/// # Errors
///
/// Anything but `max` or a quota, and a period that is not 0.
pub fn parse_cpu_max(text: &str) -> Result<Option<f64>, ParseError> {
    let mut words = text.split_whitespace();
    let quota = words.next().unwrap_or_default();
    let period = words.next().unwrap_or("100000");
    if quota == "max" { Ok(None) } else { cpus(quota, period).map(Some) }
}

/// Reads `cpu.cfs_quota_us` and `cpu.cfs_period_us`, as CPUs. `None` is no limit.
///
/// # Errors
///
/// Anything but numbers, and a period of 0.
pub fn parse_cfs_quota(quota: &str, period: &str) -> Result<Option<f64>, ParseError> {
    if quota.trim().starts_with('-') { Ok(None) } else { cpus(quota, period).map(Some) }
}

fn cpus(quota: &str, period: &str) -> Result<f64, ParseError> {
    // The kernel takes no quota of 0; a group that had one could never run.
    let quota = match number("CPU quota", quota)? {
        0 => return Err(ParseError::NotANumber { what: "CPU quota", found: "0".to_owned() }),
        quota => quota,
    };
    match number("CPU period", period)? {
        0 => Err(ParseError::NotANumber { what: "CPU period", found: excerpt(period) }),
        period => Ok(quota as f64 / period as f64),
    }
}

/// The figures of `memory.stat` that matter for what can be reclaimed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStat {
    /// File pages in the group and below it: `file` (v2) or `total_cache` (v1), shared memory included.
    pub file_bytes: Option<u64>,
    /// Shared memory in the group and below it: `shmem` or `total_shmem`.
    pub shmem_bytes: Option<u64>,
    /// `inactive_file` or `total_inactive_file`.
    pub inactive_file_bytes: Option<u64>,
    /// `active_file` or `total_active_file`.
    pub active_file_bytes: Option<u64>,
    /// `hierarchical_memory_limit` (v1): the smallest limit of the group and its ancestors, those
    /// that are not visible from a container included. `None` is no limit.
    pub hierarchical_limit_bytes: Option<u64>,
}

impl MemoryStat {
    /// Page cache that the kernel can drop: the smaller of the file lists and of file pages that are
    /// not shared memory. The lists leave out locked pages, which cannot be dropped; the second
    /// leaves out freed anonymous pages that the lists hold. The smaller never promises too much.
    pub fn reclaimable_bytes(&self) -> Option<u64> {
        let lists = match (self.inactive_file_bytes, self.active_file_bytes) {
            (Some(inactive), Some(active)) => Some(inactive.saturating_add(active)),
            _ => None,
        };
        let cache = match (self.file_bytes, self.shmem_bytes) {
            (Some(file), Some(shmem)) => Some(file.saturating_sub(shmem)),
            _ => None,
        };
        match (lists, cache) {
            (Some(lists), Some(cache)) => Some(lists.min(cache)),
            (one, other) => one.or(other),
        }
    }
}

/// Reads `memory.stat` of either version. Version 1's `total_` figures, which include descendants,
/// are preferred over those without, which do not.
pub fn parse_memory_stat(text: &str) -> MemoryStat {
    let mut stat = MemoryStat::default();
    let is_v1 = text.lines().any(|line| line.starts_with("total_"));
    for line in text.lines() {
        let Some((name, value)) = line.split_once(' ') else { continue };
        let Ok(value) = value.trim().parse::<u64>() else { continue };
        let total = name.strip_prefix("total_");
        if name == "hierarchical_memory_limit" {
            stat.hierarchical_limit_bytes = Some(value).filter(|&limit| limit < NO_LIMIT_FROM);
            continue;
        }
        let field = match if is_v1 { total } else { Some(name) } {
            Some("cache" | "file") => &mut stat.file_bytes,
            Some("shmem") => &mut stat.shmem_bytes,
            Some("inactive_file") => &mut stat.inactive_file_bytes,
            Some("active_file") => &mut stat.active_file_bytes,
            Some(_) | None => continue,
        };
        *field = Some(value);
    }
    stat
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits() {
        assert_eq!(parse_cgroup_limit("max\n"), Ok(None));
        assert_eq!(parse_cgroup_limit("9223372036854771712\n"), Ok(None));
        assert_eq!(parse_cgroup_limit("17179869184\n"), Ok(Some(16 << 30)));
        assert!(parse_cgroup_limit("").is_err());
        assert!(parse_cgroup_limit("16G").is_err());
    }

    #[test]
    fn quotas() {
        assert_eq!(parse_cpu_max("max 100000\n"), Ok(None));
        assert_eq!(parse_cpu_max("250000 100000\n"), Ok(Some(2.5)));
        assert!(parse_cpu_max("250000 0\n").is_err() && parse_cpu_max("0 100000\n").is_err());
        assert_eq!(parse_cfs_quota("-1\n", "100000\n"), Ok(None));
        assert_eq!(parse_cfs_quota("50000\n", "100000\n"), Ok(Some(0.5)));
    }

    #[test]
    fn memberships_keep_colons_in_paths() {
        let groups = parse_cgroup("4:memory,hugetlb:/a:b\n0::/\nnonsense\n1:name=systemd:\n");
        assert_eq!(groups.len(), 2);
        assert_eq!(groups[0].controllers, ["memory", "hugetlb"]);
        assert_eq!(groups[0].path, "/a:b");
        assert_eq!((groups[1].hierarchy, groups[1].controllers.len()), (0, 0));
    }

    #[test]
    fn version_1_uses_totals() {
        let stat = parse_memory_stat(
            "cache 1\nshmem 0\ninactive_file 1\nactive_file 0\nhierarchical_memory_limit 4000\n\
             total_cache 90\ntotal_shmem 10\ntotal_inactive_file 40\ntotal_active_file 30\n",
        );
        assert_eq!(stat.reclaimable_bytes(), Some(70));
        assert_eq!(stat.hierarchical_limit_bytes, Some(4000));
    }

    #[test]
    fn shared_memory_is_not_reclaimable() {
        let stat = parse_memory_stat("file 100\nshmem 80\ninactive_file 25\nactive_file 5\n");
        assert_eq!(stat.reclaimable_bytes(), Some(20));
        assert_eq!(parse_memory_stat("anon 3").reclaimable_bytes(), None);
    }
}
