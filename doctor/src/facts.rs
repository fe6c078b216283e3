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
    /// Compute threads that this process can keep busy: allowed hardware threads, one per physical
    /// core, and no more than its CPU quota rounded up. At least 1.
    pub usable_threads: Fact<u64>,
    /// Instruction sets that matter here, by Rust's names (`avx2`, `avx512vnni`, `dotprod`).
    pub instruction_sets: Fact<Vec<String>>,
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
    /// Random reads past the page cache.
    pub read: Fact<DiskReadSpeed>,
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
}

/// One graphics processor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuFact {
    /// The driver's index of it.
    pub index: u32,
    /// The maker's name for it.
    #[serde(default)]
    pub name: Fact<String>,
    /// Its memory.
    #[serde(default)]
    pub memory_total_bytes: Fact<u64>,
    /// Its memory that no process holds.
    #[serde(default)]
    pub memory_free_bytes: Fact<u64>,
    /// CUDA compute capability, such as `9.0`.
    #[serde(default)]
    pub compute_capability: Fact<String>,
    /// Version of the driver.
    #[serde(default)]
    pub driver_version: Fact<String>,
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
