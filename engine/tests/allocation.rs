//! The decode path allocates nothing after warm-up: counted by the allocator of this test program,
//! which holds this one test so that nothing else allocates meanwhile.
#![expect(unsafe_code, reason = "an allocator that counts has to be an allocator")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use tierkeep_doctor::Facts;
use tierkeep_engine::{Engine, Phase, Unobserved};
use tierkeep_plans::budget::{DenseResidency, Streamed};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::{IoMode, Plan};
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

#[path = "support/faults.rs"]
mod faults;
use faults::{maps_files, takes_direct_reads};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, SeqCst);
        // SAFETY: the caller's promises are those of `GlobalAlloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those of `GlobalAlloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn decode_allocates_nothing_after_warm_up() {
    let modes = [IoMode::Dropped, IoMode::Buffered, IoMode::Direct];
    let families = [
        "olmoe",
        "glm_moe_dsa-shared-indexer",
        "qwen3_moe",
        "glm4_moe",
        "mixtral",
        "longcat_flash",
        "gpt_oss",
    ];
    for (family, io) in families.iter().flat_map(|family| modes.map(|io| (family, io))) {
        let directory =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles").join(family);
        let model = Catalogue::open(&directory).unwrap();
        if io == IoMode::Direct && !takes_direct_reads(&model.shards[0].path) {
            continue;
        }
        let everything = planner::plan(
            &model,
            &Facts::default(),
            &Options {
                ram: Some(SizeRequest::Absolute(Bytes(1 << 30))),
                context: Some(64),
                io: Some(IoMode::Direct),
                ..Options::default()
            },
            None,
        )
        .unwrap();
        // Few experts have a slot, so that hits, misses and evictions all happen.
        let half = everything.ledger.total().0;
        let options = Options {
            // Experts in pieces that are read side by side.
            io_depth: Some(3),
            ram: Some(SizeRequest::Absolute(Bytes(half))),
            context: Some(64),
            threads: Some(2),
            slots: Some(model.spec.router.n_experts as u32 / 2),
            io: Some(io),
            ..Options::default()
        };
        let resident = planner::plan(&model, &Facts::default(), &options, None).unwrap();
        check(&model, &resident);
        // Mapped where that is possible, and every other layer and the head streamed.
        let mut other = resident;
        other.request.budget_bytes = Bytes(1 << 30);
        if maps_files() {
            other.placement.dense = DenseResidency::Mapped;
        }
        let layers = (0..model.spec.n_layers as u32).step_by(2).collect();
        other.placement.streamed = Streamed { layers, head: true };
        other.engine.read_bytes = Some(Bytes(4096));
        other.settle(&model);
        check(&model, &other);
    }
}

fn check(model: &Catalogue, plan: &Plan) {
    let family = format!("{}, {}", plan.model.family, plan.engine.io.name());
    let mut engine = Engine::open(plan, model, &mut |_, _, _| {}).unwrap();
    for token in 0..30 {
        engine.run(&[token], Phase::Decode, &mut Unobserved).unwrap();
    }
    let misses = engine.counters().total(Phase::Decode).misses;
    let before = ALLOCATIONS.load(SeqCst);
    for token in 30..60 {
        engine.run(&[token * 5], Phase::Decode, &mut Unobserved).unwrap();
    }
    let allocations = ALLOCATIONS.load(SeqCst) - before;
    assert!(before > 0, "the allocator counts");
    assert!(engine.counters().total(Phase::Decode).misses > misses, "{family}: no expert missed");
    assert_eq!(allocations, 0, "{family}: {:?}", plan.placement);
}
