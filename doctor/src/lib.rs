//! Facts about this machine, each with its source.
//!
//! This crate finds out what processor, memory, disk, GPUs and platform a program runs on, and what
//! limits hold for it there. Every fact says whether it was measured, read, estimated or assumed, or
//! why it is unknown. It knows nothing of models, prints nothing, reads no environment variables,
//! never exits, and cannot fail: see [`Probe::run`].
#![forbid(unsafe_code)]

mod bandwidth;
mod cgroup;
mod cpu;
mod disk;
#[cfg(target_os = "linux")]
mod disk_files;
mod disk_link;
mod disk_read;
mod fact;
mod facts;
mod gpu;
mod gpu_sysfs;
mod instructions;
mod memory;
pub mod parse;
mod platform;
mod probe;
pub mod process;
mod saved;
mod topology;
mod tree;
mod trial;

pub use disk::filesystem_kind;
pub use fact::{Fact, Source};
pub use facts::{
    Cache, CacheKind, CgroupLimit, CgroupVersion, CoreKind, CoreSpeed, CpuFacts, DiskFacts,
    DiskReadSpeed, Facts, FailedSet, FilesystemKind, GpuFact, GpuFacts, GpuVendor, HugePagePool,
    MemoryFacts, NumaNode, PlatformFacts, SCHEMA_VERSION,
};
pub use probe::{Measuring, Probe};
pub use saved::{MAX_FILE_BYTES, SavedFactsError};

/// Reason given for what is only looked for on Linux.
const NOT_SUPPORTED: &str = "not supported on this platform yet";
