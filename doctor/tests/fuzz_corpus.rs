//! The corpus of the fuzz targets, replayed as it is and damaged: nothing leads to a panic.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail as tests do")]

#[path = "../../fuzz/targets/replay.rs"]
mod replay;
#[path = "../../fuzz/targets/doctor.rs"]
mod targets;

/// Damaged copies of each file: a few seconds in a debug build.
const N_COPIES: usize = 150;

#[test]
fn no_damage_leads_to_a_panic() {
    let targets: [(&str, replay::Target<'_>); 5] = [
        ("facts", &mut |bytes| drop(targets::facts(bytes))),
        ("meminfo", &mut targets::meminfo),
        ("cpuinfo", &mut targets::cpuinfo),
        ("mounts", &mut targets::mounts),
        ("cgroup", &mut targets::cgroup),
    ];
    for (name, target) in targets {
        replay::with_damage(name, N_COPIES, target);
    }
}
