//! The kernel counts what it fetches for this process: it agrees with what the engine says it read. A
//! program of its own with this one test, for the count is of the whole process.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::path::PathBuf;

use tierkeep_doctor::Facts;
use tierkeep_engine::{Engine, Phase, Unobserved};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::{IoMode, Policy};
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

#[path = "support/faults.rs"]
mod faults;
use faults::takes_direct_reads;

/// `read_bytes` of `/proc/self/io`: fetched from storage.
fn kernel_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    line.unwrap().trim().parse().unwrap()
}

/// Filesystems that keep their files in memory fetch nothing, whatever is read.
fn is_in_memory(path: &std::path::Path) -> bool {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    rustix::fs::statfs(path).unwrap().f_type as u64 == TMPFS_MAGIC
}

#[test]
fn the_kernel_counts_what_we_count() {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/glm-nano");
    let model = Catalogue::open(&directory).unwrap();
    let shard = &model.shards[0].path;
    if !takes_direct_reads(shard) || is_in_memory(shard) {
        eprintln!("left out: the kernel counts no fetched bytes for {}", shard.display());
        return;
    }
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(1 << 30))),
        context: Some(128),
        threads: Some(1),
        slots: Some(4),
        policy: Some(Policy::Recency),
        io: Some(IoMode::Direct),
        ..Options::default()
    };
    let plan = planner::plan(&model, &Facts::default(), &options, None).unwrap();
    let mut engine = Engine::open(&plan, &model, &mut |_, _, _| {}).unwrap();
    engine.run(&[1], Phase::Decode, &mut Unobserved).unwrap();

    let counter = engine.read_counter();
    let (kernel, bytes, brought) = (kernel_bytes(), counter.bytes(), counter.brought_bytes());
    let misses = engine.counters().total(Phase::Decode).misses;
    for token in 2..40 {
        engine.run(&[token], Phase::Decode, &mut Unobserved).unwrap();
    }
    let kernel = kernel_bytes() - kernel;
    let misses = engine.counters().total(Phase::Decode).misses - misses;
    let expert = model.experts[0].read_bytes();
    assert!(misses > 100);
    assert_eq!(counter.bytes() - bytes, misses * expert);
    let brought = counter.brought_bytes() - brought;
    let difference = (brought as f64 - kernel as f64).abs() / brought as f64;
    assert!(difference < 0.01, "{brought} bytes were brought, the kernel fetched {kernel}");
}
