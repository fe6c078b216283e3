//! The schema of saved facts.
//!
//! Owns the types that `doctor` fills in, that are saved, and that a plan is made from. Refuses to
//! know how any of it is obtained. Every field that is missing from a file is unknown, every field
//! that is not known here is refused, so hand-written facts may be partial but not misspelt.

use serde::{Deserialize, Serialize};

use crate::fact::Fact;

/// The version of [`Facts`] that this crate writes. Raised when a field changes its meaning.
pub const SCHEMA_VERSION: u32 = 1;

/// Everything that is known about a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// Version of this schema, [`SCHEMA_VERSION`] when written by this crate.
    pub schema_version: u32,
    /// The processor.
    #[serde(default)]
    pub cpu: CpuFacts,
    /// Main memory and the limits on it.
    #[serde(default)]
    pub memory: MemoryFacts,
    /// The disk under one directory.
    #[serde(default)]
    pub disk: DiskFacts,
    /// Graphics processors.
    #[serde(default)]
    pub gpus: GpuFacts,
    /// Operating system and what it runs in.
    #[serde(default)]
    pub platform: PlatformFacts,
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            cpu: CpuFacts::default(),
            memory: MemoryFacts::default(),
            disk: DiskFacts::default(),
            gpus: GpuFacts::default(),
            platform: PlatformFacts::default(),
        }
    }
}

/// The processor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CpuFacts {
    /// The maker's name for it.
    pub model_name: Fact<String>,
    /// Cores that are online, siblings on one core counted once.
    pub physical_cores: Fact<u64>,
    /// Hardware threads that are online.
    pub logical_cores: Fact<u64>,
    /// Processor packages that hold the online cores.
    pub sockets: Fact<u64>,
    /// Whether any core runs more than one hardware thread now.
    pub smt: Fact<bool>,
    /// Memory nodes, in ascending order.
    pub numa_nodes: Fact<Vec<NumaNode>>,
    /// Kinds of cores, the fast ones first; one entry, [`CoreSpeed::Fast`], where all are alike.
    pub core_kinds: Fact<Vec<CoreKind>>,
    /// Caches by level, each kind of a level once, ascending.
    pub caches: Fact<Vec<Cache>>,
    /// CPUs that this process may run on (affinity and cpuset), as a list such as `0-3,8`.
    pub allowed_cpus: Fact<String>,
    /// The least CPU time that a control group of this process allows, in cores; a known `None` means
    /// that there is no quota. The detail names the group.
    pub quota_cores: Fact<Option<f64>>,
    /// Compute threads that this process can keep busy: allowed hardware threads, one per physical
    /// core, of the fast kind where there are two, and no more than its CPU quota rounded up. At
    /// least 1. The detail says which limit made it so.
    pub usable_threads: Fact<u64>,
    /// Where those threads belong: the first thread of each core that they are counted for, before
    /// any quota, as a list such as `0-15`.
    pub usable_cpus: Fact<String>,
    /// Instruction sets that matter here, by Rust's names (`avx2`, `avx512vnni`, `dotprod`). The
    /// detail says whether they were tried or are only advertised.
    pub instruction_sets: Fact<Vec<String>>,
    /// Sets that are advertised but whose instructions failed when they were run; not among
    /// `instruction_sets`. Unknown where none was run.
    pub failed_sets: Fact<Vec<FailedSet>>,
}

/// An instruction set that is advertised and does not work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailedSet {
    /// Its name, as Rust has it.
    pub name: String,
    /// What became of its trial, such as `ends a process with signal 4 (illegal instruction)`.
    pub how: String,
}

/// A part of memory that is near to some CPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumaNode {
    /// The kernel's number of it.
    pub id: u32,
    /// Its CPUs, as a list such as `0-15,32-47`; empty for a node of memory alone.
    #[serde(default)]
    pub cpus: String,
    /// Its memory, where the kernel tells.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
}

/// Which kind of core a hybrid processor's core is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CoreSpeed {
    /// The fastest kind, or the only one.
    Fast,
    /// Any slower kind.
    Slow,
}

/// The cores of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoreKind {
    /// Which kind.
    pub kind: CoreSpeed,
    /// Physical cores of it.
    pub cores: u64,
    /// Hardware threads on them.
    pub threads: u64,
    /// Those threads, as a list such as `0-15`.
    pub cpus: String,
}

/// What a cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheKind {
    /// Data alone.
    Data,
    /// Instructions alone.
    Instruction,
    /// Both.
    Unified,
}

/// All caches of one level, kind and size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// Its level, 1 being nearest to the core.
    pub level: u32,
    /// What it holds.
    pub kind: CacheKind,
    /// Size of one.
    pub bytes: u64,
    /// Hardware threads that share one.
    pub shared_by_threads: u64,
    /// How many there are.
    pub instances: u64,
}

/// Main memory and the limits on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryFacts {
    /// Memory of the host.
    pub total_bytes: Fact<u64>,
    /// What the host could give to new work without swapping; its page cache counts as free.
    pub available_bytes: Fact<u64>,
    /// Swap space of the host.
    pub swap_total_bytes: Fact<u64>,
    /// Swap space of the host that is not in use.
    pub swap_free_bytes: Fact<u64>,
    /// The control group that leaves this process least; a known `None` means that there is no limit.
    pub limit: Fact<Option<CgroupLimit>>,
    /// What this process may take: the smaller of the host's available memory and the headroom of
    /// the binding group. The detail names which of the two binds.
    pub usable_bytes: Fact<u64>,
    /// Sequential reading by all usable threads from buffers past the last-level cache.
    pub read_bandwidth_bytes_per_s: Fact<f64>,
    /// The same by one thread.
    pub read_bandwidth_one_thread_bytes_per_s: Fact<f64>,
    /// Pools of explicit huge pages, by page size. What a pool holds is not available to others.
    pub huge_pages: Fact<Vec<HugePagePool>>,
    /// The kernel's setting for transparent huge pages: `always`, `madvise` or `never`.
    pub transparent_huge_pages: Fact<String>,
    /// What ZFS's own cache (ARC) holds; the kernel does not count it as available.
    pub zfs_arc_bytes: Fact<u64>,
    /// Memory that this process may lock; a known `None` means as much as it likes.
    pub locked_limit_bytes: Fact<Option<u64>>,
}

/// Explicit huge pages of one size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HugePagePool {
    /// Size of one page.
    pub page_bytes: u64,
    /// Pages in the pool.
    pub total: u64,
    /// Pages that nobody holds.
    pub free: u64,
}

/// Which control group interface a limit was found in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CgroupVersion {
    /// One hierarchy per controller.
    V1,
    /// The unified hierarchy.
    V2,
}

/// A memory limit set on a control group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CgroupLimit {
    /// Path of the group in its hierarchy, `/` being the root that is visible from here.
    pub group: String,
    /// Interface that it was found in.
    pub version: CgroupVersion,
    /// File that holds the limit, such as `memory.max`.
    pub file: String,
    /// The limit.
    pub limit_bytes: u64,
    /// What the group and its descendants hold now, page cache included.
    pub used_bytes: u64,
    /// The part of `used_bytes` that is page cache which the kernel can drop.
    pub reclaimable_bytes: u64,
    /// `limit_bytes` less what is used and cannot be reclaimed.
    pub headroom_bytes: u64,
}

/// The disk under one directory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DiskFacts {
    /// The directory asked about, links resolved.
    pub path: Fact<String>,
    /// Type of its filesystem, such as `ext4`.
    pub filesystem: Fact<String>,
    /// What kind of filesystem that is.
    pub kind: Fact<FilesystemKind>,
    /// Where the filesystem is mounted.
    pub mount_point: Fact<String>,
    /// What is mounted there.
    pub device: Fact<String>,
    /// Space that a process without privileges may still fill.
    pub free_bytes: Fact<u64>,
    /// Size of the filesystem.
    pub total_bytes: Fact<u64>,
    /// Whether the kernel takes the device for one with moving parts.
    pub rotational: Fact<bool>,
    /// How the device is attached, such as `PCIe 4.0 x4`, `SATA` or `virtual`.
    pub link: Fact<String>,
    /// Random reads past the page cache, at the caller's size and the best queue depth found.
    pub read: Fact<DiskReadSpeed>,
    /// The same at every size and queue depth that was measured.
    pub reads: Fact<Vec<DiskReadSpeed>>,
    /// Whether all of these were direct reads (`O_DIRECT`); if not, the filesystem takes none, and pages
    /// were dropped from the page cache before each.
    pub direct_reads: Fact<bool>,
}

/// What stands between a file and its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesystemKind {
    /// A filesystem on a device of this machine.
    Local,
    /// A share of another machine, or of the host of this virtual one.
    Network,
    /// A program in user space.
    Fuse,
    /// Memory: what is stored there costs RAM.
    Memory,
    /// A union of other filesystems, as in containers.
    Overlay,
    /// None that this crate knows.
    Unknown,
}

/// Random reads past the page cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskReadSpeed {
    /// Bytes of all threads together over the time that they took.
    pub bytes_per_s: f64,
    /// Size of one read.
    pub read_bytes: u64,
    /// Reads in flight at once.
    pub queue_depth: u32,
}

/// Graphics processors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GpuFacts {
    /// NVIDIA devices in the driver's order; unknown where there is no working driver.
    pub nvidia: Fact<Vec<GpuFact>>,
    /// Devices of other makers, as far as the kernel tells.
    pub others: Fact<Vec<GpuFact>>,
}

/// Who made a graphics processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuVendor {
    /// NVIDIA.
    #[default]
    Nvidia,
    /// AMD.
    Amd,
    /// Intel.
    Intel,
}

/// One graphics processor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GpuFact {
    /// The driver's index of it, from 0 for each vendor.
    pub index: u32,
    /// Who made it.
    pub vendor: GpuVendor,
    /// The maker's name for it.
    pub name: Fact<String>,
    /// The driver's unique name for this very device.
    pub uuid: Fact<String>,
    /// Its own memory, what the driver reserves included. Unknown where it has none.
    pub memory_total_bytes: Fact<u64>,
    /// Its memory that no process holds and the driver does not reserve.
    pub memory_free_bytes: Fact<u64>,
    /// What the driver keeps of its memory for itself.
    pub memory_reserved_bytes: Fact<u64>,
    /// Reading of its own memory. An estimate: clock times bus width.
    pub memory_bandwidth_bytes_per_s: Fact<f64>,
    /// Whether its memory is the system's: then it must not be counted a second time.
    pub is_unified: Fact<bool>,
    /// Generation of the PCIe link at its best.
    pub link_generation: Fact<u32>,
    /// Lanes of the PCIe link.
    pub link_width: Fact<u32>,
    /// What the link carries one way. An estimate: generation times lanes, less encoding.
    pub link_bytes_per_s: Fact<f64>,
    /// CUDA compute capability, such as `9.0`.
    pub compute_capability: Fact<String>,
    /// Version of the driver.
    pub driver_version: Fact<String>,
    /// Whether the device is divided: `enabled`, `disabled`, or `not supported`.
    pub mig: Fact<String>,
}

/// Operating system and what it runs in.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PlatformFacts {
    /// Name of the operating system.
    pub os: Fact<String>,
    /// Release of the kernel.
    pub kernel: Fact<String>,
    /// `docker`, `podman`, `lxc`, `kubernetes`, another manager's own word, or `none`.
    pub container: Fact<String>,
    /// Name of the virtual machine monitor, `unnamed`, or `none`.
    pub virtual_machine: Fact<String>,
    /// Whether this is the Windows Subsystem for Linux.
    pub wsl: Fact<bool>,
}
