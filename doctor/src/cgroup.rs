//! The control groups of this process and what they allow.
//!
//! Owns the walk from this process's group to the root that is visible from here, in both versions,
//! and the choice of the group that binds. Refuses to treat an unreadable limit as none.

use std::path::{Component, Path, PathBuf};

use crate::facts::{CgroupLimit, CgroupVersion};
use crate::parse::{self, Mount};
use crate::tree::{ReadError, Tree};

/// One group: its name in the hierarchy and the directory of its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) version: CgroupVersion,
    pub(crate) name: String,
    directory: PathBuf,
}

impl Group {
    fn read(&self, tree: &Tree, file: &str) -> Result<String, ReadError> {
        tree.read_value(self.directory.join(file))
    }

    /// The text of a file that not every kernel or group has.
    fn read_optional(&self, tree: &Tree, file: &str) -> Result<Option<String>, ReadError> {
        match self.read(tree, file) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// The groups of this process that have files for `controller`, from its own outwards, both versions.
pub(crate) fn groups(tree: &Tree, controller: &str) -> Result<Vec<Group>, ReadError> {
    let memberships = parse::parse_cgroup(&tree.read("/proc/self/cgroup")?);
    let mounts = match tree.read("/proc/self/mountinfo") {
        Ok(text) => parse::parse_mountinfo(&text),
        Err(_) => customary_mounts(controller),
    };
    let mut groups = Vec::new();
    for membership in &memberships {
        let version = if membership.controllers.iter().any(|name| name == controller) {
            CgroupVersion::V1
        } else if membership.hierarchy == 0 && membership.controllers.is_empty() {
            CgroupVersion::V2
        } else {
            continue;
        };
        let is_of = |mount: &&Mount| match version {
            CgroupVersion::V1 => {
                mount.filesystem == "cgroup"
                    && mount.super_options.iter().any(|option| option == controller)
            }
            CgroupVersion::V2 => mount.filesystem == "cgroup2",
        };
        // A mount whose root holds the group shows its true ancestors; any other is second best.
        let mount = mounts
            .iter()
            .filter(is_of)
            .max_by_key(|mount| below(&membership.path, &mount.root).is_some());
        if let Some(mount) = mount {
            walk(tree, version, mount, &membership.path, &mut groups);
        }
    }
    Ok(groups)
}

/// Where the hierarchies are mounted when the list of mounts cannot be read.
fn customary_mounts(controller: &str) -> Vec<Mount> {
    let mount = |mount_point: String, filesystem: &str, option: &str| Mount {
        device_number: (0, 0),
        root: "/".to_owned(),
        mount_point,
        filesystem: filesystem.to_owned(),
        source: filesystem.to_owned(),
        super_options: vec![option.to_owned()],
    };
    vec![
        mount(format!("/sys/fs/cgroup/{controller}"), "cgroup", controller),
        mount("/sys/fs/cgroup".to_owned(), "cgroup2", ""),
    ]
}

/// `path` relative to `root`, if it lies below it and neither climbs.
fn below(path: &str, root: &str) -> Option<PathBuf> {
    let climbs = |path: &Path| path.components().any(|part| part == Component::ParentDir);
    let relative = Path::new(path).strip_prefix(root).ok()?;
    (!climbs(relative)).then(|| relative.to_path_buf())
}

/// Adds the group at `path` and its ancestors up to the root of `mount`, as far as they exist.
///
/// In a container the path may be that of the host while only the container's part is mounted, or it
/// may be `/` of a namespace. What the mount's root holds is then the best that can be seen.
fn walk(tree: &Tree, version: CgroupVersion, mount: &Mount, path: &str, groups: &mut Vec<Group>) {
    let (relative, root_name) = match below(path, &mount.root) {
        Some(relative) => (relative, mount.root.as_str()),
        None => (below(path, "/").unwrap_or_default(), "/"),
    };
    for ancestor in relative.ancestors() {
        let directory = Path::new(&mount.mount_point).join(ancestor);
        if tree.exists(&directory) {
            let name = Path::new(root_name).join(ancestor);
            let name = name.to_string_lossy().trim_end_matches('/').to_owned();
            let name = if name.is_empty() { "/".to_owned() } else { name };
            groups.push(Group { version, name, directory });
        }
    }
}

/// The memory limits of this process.
#[derive(Debug, Default)]
pub(crate) struct MemoryLimits {
    /// The group that leaves least, among those whose use is known.
    pub(crate) binding: Option<CgroupLimit>,
    /// Limits of groups whose use could not be read: limit, and what is to be said of it.
    pub(crate) use_unknown: Vec<(u64, String)>,
    /// What could not be read of groups whose limit is thus not known.
    pub(crate) problems: Vec<String>,
}

/// Reads the memory limits of this process's group and every ancestor that is visible. A limit of the
/// host's memory or more is none.
pub(crate) fn memory_limits(
    tree: &Tree,
    host_total_bytes: Option<u64>,
) -> Result<MemoryLimits, ReadError> {
    let mut limits = MemoryLimits::default();
    let mut smallest_v1 = u64::MAX;
    let groups = groups(tree, "memory")?;
    let is_limit = |limit: &u64| host_total_bytes.is_none_or(|total| *limit < total);
    for group in &groups {
        match own_limit(tree, group) {
            Ok(Some((file, limit))) if is_limit(&limit) => {
                if group.version == CgroupVersion::V1 {
                    smallest_v1 = smallest_v1.min(limit);
                }
                limits.add(tree, group, group.name.clone(), file, limit);
            }
            Ok(_) => {}
            Err(problem) => limits.problems.push(problem),
        }
    }
    // Version 1 also tells the smallest limit of ancestors above what a container sees. Their use is
    // not visible; it is at least that of the outermost group that is.
    let outermost = groups.iter().rfind(|group| group.version == CgroupVersion::V1);
    if let Some(group) = outermost {
        let stat = group.read_optional(tree, "memory.stat").ok().flatten();
        let limit = stat.and_then(|text| parse::parse_memory_stat(&text).hierarchical_limit_bytes);
        if let Some(limit) = limit.filter(is_limit).filter(|&limit| limit < smallest_v1) {
            let name = format!("{} (an ancestor that is not visible from here)", group.name);
            limits.add(tree, group, name, "memory.stat: hierarchical_memory_limit", limit);
        }
    }
    Ok(limits)
}

impl MemoryLimits {
    fn add(&mut self, tree: &Tree, group: &Group, name: String, file: &str, limit_bytes: u64) {
        match usage(tree, group) {
            Ok((used_bytes, reclaimable_bytes)) => {
                let held_bytes = used_bytes.saturating_sub(reclaimable_bytes);
                let headroom_bytes = limit_bytes.saturating_sub(held_bytes);
                if self.binding.as_ref().is_none_or(|other| headroom_bytes < other.headroom_bytes) {
                    self.binding = Some(CgroupLimit {
                        group: name,
                        version: group.version,
                        file: file.to_owned(),
                        limit_bytes,
                        used_bytes,
                        reclaimable_bytes,
                        headroom_bytes,
                    });
                }
            }
            Err(reason) => {
                let said =
                    format!("control group {name} has a limit but its use is unknown: {reason}");
                self.use_unknown.push((limit_bytes, said));
            }
        }
    }
}

/// The limit set on one group itself and the file that sets it.
///
/// `memory.high` counts as a limit: above it the kernel throttles the group to near standstill.
fn own_limit(tree: &Tree, group: &Group) -> Result<Option<(&'static str, u64)>, String> {
    let files: &[&'static str] = match group.version {
        CgroupVersion::V1 => &["memory.limit_in_bytes"],
        CgroupVersion::V2 => &["memory.max", "memory.high"],
    };
    let mut smallest: Option<(&'static str, u64)> = None;
    for &file in files {
        let text = group.read_optional(tree, file).map_err(|error| error.to_string())?;
        // The root of the unified hierarchy, and groups without the controller, have no such file.
        let Some(text) = text else { continue };
        let limit = parse::parse_cgroup_limit(&text)
            .map_err(|error| format!("{file} of control group {}: {error}", group.name))?;
        if let Some(limit) = limit
            && smallest.is_none_or(|(_, other)| limit < other)
        {
            smallest = Some((file, limit));
        }
    }
    Ok(smallest)
}

/// What a group uses and how much of that the kernel can reclaim. An unreadable `memory.stat` means
/// that nothing is counted as reclaimable, which errs on the safe side.
fn usage(tree: &Tree, group: &Group) -> Result<(u64, u64), String> {
    let file = match group.version {
        CgroupVersion::V1 => "memory.usage_in_bytes",
        CgroupVersion::V2 => "memory.current",
    };
    let text = group.read(tree, file).map_err(|error| error.to_string())?;
    let used = text.parse().map_err(|_| format!("{file} is not a number"))?;
    let stat = group.read(tree, "memory.stat").unwrap_or_default();
    let reclaimable = parse::parse_memory_stat(&stat).reclaimable_bytes().unwrap_or(0);
    Ok((used, reclaimable.min(used)))
}

/// The most memory that this process's own group has held, and the file that says so.
pub(crate) fn memory_peak(tree: &Tree) -> Result<(u64, String), String> {
    for group in groups(tree, "memory").map_err(|error| error.to_string())? {
        let file = match group.version {
            CgroupVersion::V1 => "memory.max_usage_in_bytes",
            CgroupVersion::V2 => "memory.peak",
        };
        let text = group.read_optional(tree, file).map_err(|error| error.to_string())?;
        if let Some(text) = text {
            let peak = text.parse().map_err(|_| format!("{file} is not a number"))?;
            return Ok((peak, format!("{file} of control group {}", group.name)));
        }
    }
    Err("no control group of this process counts its peak memory".to_owned())
}

/// CPU quotas of this process's groups.
#[derive(Debug, Default)]
pub(crate) struct Quota {
    /// The smallest, in CPUs, and the group that has it.
    pub(crate) smallest: Option<(f64, String)>,
    /// What could not be read of groups whose quota is thus not known.
    pub(crate) problems: Vec<String>,
}

/// The CPU quotas of this process's group and every ancestor that is visible.
pub(crate) fn cpu_quota(tree: &Tree) -> Result<Quota, String> {
    let mut quota = Quota::default();
    for group in groups(tree, "cpu").map_err(|error| error.to_string())? {
        match own_quota(tree, &group) {
            Ok(Some(cpus)) if quota.smallest.as_ref().is_none_or(|(other, _)| cpus < *other) => {
                quota.smallest = Some((cpus, group.name));
            }
            Ok(_) => {}
            Err(problem) => quota.problems.push(problem),
        }
    }
    Ok(quota)
}

/// The quota set on one group itself, in CPUs.
fn own_quota(tree: &Tree, group: &Group) -> Result<Option<f64>, String> {
    let optional =
        |file| group.read_optional(tree, file).map_err(|error: ReadError| error.to_string());
    let quota = match group.version {
        CgroupVersion::V1 => {
            match (optional("cpu.cfs_quota_us")?, optional("cpu.cfs_period_us")?) {
                (Some(quota), Some(period)) => parse::parse_cfs_quota(&quota, &period),
                _ => Ok(None),
            }
        }
        CgroupVersion::V2 => {
            optional("cpu.max")?.map_or(Ok(None), |text| parse::parse_cpu_max(&text))
        }
    };
    quota.map_err(|error| format!("control group {}: {error}", group.name))
}

/// The CPUs of this process's own cpuset and the group that they belong to. Not every group has one.
pub(crate) fn cpuset(tree: &Tree) -> Option<(String, Vec<usize>)> {
    groups(tree, "cpuset").ok()?.into_iter().find_map(|group| {
        // The effective list is what is left of the one that was set; version 1 names it otherwise.
        let files: &[&str] = match group.version {
            CgroupVersion::V1 => &["cpuset.effective_cpus", "cpuset.cpus"],
            CgroupVersion::V2 => &["cpuset.cpus.effective", "cpuset.cpus"],
        };
        let cpus = files.iter().find_map(|file| {
            let cpus = parse::parse_cpu_list(&group.read(tree, file).ok()?).ok()?;
            Some(cpus).filter(|cpus| !cpus.is_empty())
        })?;
        Some((group.name, cpus))
    })
}
