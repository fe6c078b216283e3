//! This process's own memory at the end of a run, as the system counts it.

use serde::Serialize;
use tierkeep_doctor::{Fact, Probe, process};
use tierkeep_plans::units::Bytes;

/// Three views of how much was held.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Memory {
    /// Anonymous and shared pages now: what the plan's footprint is compared with.
    pub(crate) footprint_bytes: Fact<u64>,
    /// Largest resident set so far, pages of the binary included (VmHWM).
    pub(crate) peak_rss_bytes: Fact<u64>,
    /// Peak of the control group that this process is in, everything in it included.
    pub(crate) group_peak_bytes: Fact<u64>,
}

impl Memory {
    pub(crate) fn now() -> Self {
        let memory = process::memory();
        // The peak of a group without a limit is that of everything else on the machine.
        let limit = Probe::new().measure(false).run(&mut |_| {}).memory.limit;
        let group_peak_bytes = match limit.value() {
            Some(None) => Fact::unknown("no control group of this process has a limit"),
            _ => process::cgroup_peak(),
        };
        Self {
            footprint_bytes: memory.clone().map(|m| m.rss_anon_bytes + m.rss_shmem_bytes),
            peak_rss_bytes: memory.map(|m| m.peak_rss_bytes),
            group_peak_bytes,
        }
    }

    /// Whether the peak is over a budget; `false` where it is unknown.
    pub(crate) fn is_over(&self, budget: Bytes) -> bool {
        self.peak_rss_bytes.value().is_some_and(|&peak| peak > budget.0)
    }
}
