//! Parsers of the kernel's text files.
//!
//! Owns the reading of text that others wrote. Every function here is pure, and none panics or
//! allocates more than a small multiple of its input whatever the text: lines that make no sense
//! are skipped, single values that make no sense are a [`ParseError`].

mod cgroup;
mod cpu;
mod kfd;
mod memory;
mod memory_pools;
mod mount;
mod pcie;
mod smaps;
mod trial;

pub use cgroup::{
    CgroupMembership, MemoryStat, parse_cfs_quota, parse_cgroup, parse_cgroup_limit, parse_cpu_max,
    parse_memory_stat,
};
pub use cpu::{
    CpuInfo, Processor, format_cpu_list, parse_cache_size, parse_cpu_list, parse_cpuinfo,
};
pub use kfd::{parse_kfd_property, parse_pci_location};
pub use memory::{
    IoCounters, MemInfo, StatusMemory, parse_cpus_allowed_list, parse_load, parse_meminfo,
    parse_node_total, parse_process_io, parse_process_status,
};
pub use memory_pools::{
    ArcStats, can_lock_all, parse_arcstats, parse_choice, parse_huge_page_folder,
    parse_locked_limit,
};
pub use mount::{Mount, parse_mountinfo};
pub use pcie::{link_bytes_per_s, parse_link_generation, parse_link_width};
pub use smaps::{MappedFile, parse_smaps, parse_thread_count};
pub use trial::{TrialReport, parse_trial};

use thiserror::Error;

/// A value in a kernel file that is not what it should be.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ParseError {
    /// Not a number of bytes, microseconds or the like.
    #[error("{what}: expected a number, found \"{found}\"")]
    NotANumber {
        /// What was being read.
        what: &'static str,
        /// The beginning of what was found.
        found: String,
    },
    /// Not a list of CPUs such as `0-3,8`.
    #[error("expected a list of CPUs such as 0-3,8, found \"{found}\"")]
    NotACpuList {
        /// The beginning of what was found.
        found: String,
    },
    /// A CPU number beyond any machine.
    #[error("CPU number {found} is beyond {limit}")]
    CpuOutOfRange {
        /// The number found.
        found: usize,
        /// The highest that is believed.
        limit: usize,
    },
}

/// The beginning of a text, short enough for a message.
fn excerpt(text: &str) -> String {
    text.trim().chars().take(40).collect()
}

fn number(what: &'static str, text: &str) -> Result<u64, ParseError> {
    text.trim().parse().map_err(|_| ParseError::NotANumber { what, found: excerpt(text) })
}
