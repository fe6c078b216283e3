//! The kernel counts what it fetches for this process: it agrees with what the engine says it read. A
//! program of its own with this one test, for the count is of the whole process.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::path::{Path, PathBuf};

use tierkeep_doctor::Facts;
use tierkeep_engine::disk::{Access, Disk as _, SystemDisk};
use tierkeep_engine::{Engine, Phase, Unobserved};
use tierkeep_plans::catalogue::{Catalogue, DIRECT_ALIGN};
use tierkeep_plans::plan::{IoMode, Policy};
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

#[path = "support/faults.rs"]
mod faults;
use faults::takes_direct_reads;

const BLOCK: usize = DIRECT_ALIGN as usize;

/// `read_bytes` of `/proc/self/io`: fetched from storage. `None` on a kernel that does not count.
fn kernel_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("read_bytes: "))?.trim().parse().ok()
}

/// Whether the kernel counts what is read past the page cache of this file: filesystems that keep theirs in
/// memory, and those of a network or of another process, fetch nothing from a device of this machine.
fn counts_reads(path: &Path) -> bool {
    let file = SystemDisk.open(path, Access::Direct).unwrap();
    // Any memory that begins where a block does.
    let mut memory = vec![0_u8; 3 * BLOCK];
    let start = memory.as_ptr().align_offset(BLOCK);
    let Some(before) = kernel_bytes() else { return false };
    let read = file.read_at(&mut memory[start..start + BLOCK], 0).unwrap();
    kernel_bytes().is_some_and(|now| read == BLOCK && now - before >= BLOCK as u64)
}

#[test]
fn the_kernel_counts_what_we_count() {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/glm-nano");
    let model = Catalogue::open(&directory).unwrap();
    let shard = &model.shards[0].path;
    if !takes_direct_reads(shard) || !counts_reads(shard) {
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
    let (kernel, bytes, brought) =
        (kernel_bytes().unwrap(), counter.bytes(), counter.brought_bytes());
    let misses = engine.counters().total(Phase::Decode).misses;
    for token in 2..40 {
        engine.run(&[token], Phase::Decode, &mut Unobserved).unwrap();
    }
    let kernel = kernel_bytes().unwrap() - kernel;
    let misses = engine.counters().total(Phase::Decode).misses - misses;
    let expert = model.experts[0].read_bytes();
    assert!(misses > 100);
    assert_eq!(counter.bytes() - bytes, misses * expert);
    let brought = counter.brought_bytes() - brought;
    let difference = (brought as f64 - kernel as f64).abs() / brought as f64;
    assert!(difference < 0.01, "{brought} bytes were brought, the kernel fetched {kernel}");
}
