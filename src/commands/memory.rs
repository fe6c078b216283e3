//! This process's own memory and its reads around a run, as the system counts them.

use std::path::PathBuf;

use serde::Serialize;
use tierkeep_doctor::{Fact, Probe, process};
use tierkeep_engine::report::MemorySeen;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::units::Bytes;

/// What was held, from several sides.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Memory {
    /// Resident of any kind before anything of the model was loaded.
    pub(crate) before_loading_bytes: Fact<u64>,
    /// Anonymous and shared pages and mapped pages of the model now: what the plan's footprint is
    /// compared with.
    pub(crate) footprint_bytes: Fact<u64>,
    /// Mapped pages of the model, which are part of the footprint.
    pub(crate) mapped_bytes: Fact<u64>,
    /// Largest resident set so far, pages of the binary included (VmHWM).
    pub(crate) peak_rss_bytes: Fact<u64>,
    /// Peak of the control group that this process is in, everything in it included.
    pub(crate) group_peak_bytes: Fact<u64>,
    /// What the kernel fetched from storage for this process from the end of loading to now: what the
    /// engine read, less what the page cache had, and more where whole blocks were read.
    pub(crate) fetched_bytes: Fact<u64>,
}

/// What the system had counted when a part of a run began.
#[derive(Clone, Debug)]
pub(crate) struct Before {
    /// Resident before anything was loaded.
    pub(crate) loading: Fact<u64>,
    /// Fetched from storage when everything was loaded.
    pub(crate) fetched: Fact<u64>,
}

/// What the kernel has fetched from storage for this process so far.
pub(crate) fn fetched() -> Fact<u64> {
    process::io().map(|io| io.read_bytes)
}

/// What is resident now, of any kind.
pub(crate) fn resident() -> Fact<u64> {
    process::memory().map(|m| m.rss_anon_bytes + m.rss_shmem_bytes + m.rss_file_bytes)
}

impl Memory {
    /// Looks at this process at the end of a run of `model`.
    pub(crate) fn now(model: &Catalogue, before: Before) -> Self {
        let memory = process::memory();
        // The peak of a group without a limit is that of everything else on the machine.
        let limit = Probe::new().measure(false).run(&mut |_| {}).memory.limit;
        let group_peak_bytes = match limit.value() {
            Some(None) => Fact::unknown("no control group of this process has a limit"),
            _ => process::cgroup_peak(),
        };
        let files: Vec<PathBuf> = model.shards.iter().map(|shard| shard.path.clone()).collect();
        let mapped_bytes = process::mapped_bytes(&files);
        let footprint_bytes = match mapped_bytes.value() {
            Some(mapped) => memory.clone().map(|m| m.rss_anon_bytes + m.rss_shmem_bytes + mapped),
            None => Fact::unknown(format!(
                "which pages of the model are mapped is unknown: {}",
                mapped_bytes.detail()
            )),
        };
        let fetched_bytes = match before.fetched.value() {
            Some(&then) => fetched().map(|now| now.saturating_sub(then)),
            None => before.fetched,
        };
        Self {
            before_loading_bytes: before.loading,
            fetched_bytes,
            footprint_bytes,
            mapped_bytes,
            peak_rss_bytes: memory.map(|m| m.peak_rss_bytes),
            group_peak_bytes,
        }
    }

    /// The same without its sources, for the report.
    pub(crate) fn seen(&self) -> MemorySeen {
        let known = |fact: &Fact<u64>| fact.value().copied().map(Bytes);
        MemorySeen {
            before_loading: known(&self.before_loading_bytes),
            footprint: known(&self.footprint_bytes),
            mapped: known(&self.mapped_bytes),
            peak: known(&self.peak_rss_bytes),
        }
    }
}
