//! How experts are read: which mode is planned from which facts, and what it does to the ledger.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::sync::LazyLock;

use tempfile::TempDir;
use tierkeep_doctor::{Fact, Facts};
use tierkeep_plans::budget::{self, IoMode, Line};
use tierkeep_plans::catalogue::{Catalogue, DIRECT_ALIGN};
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

mod support;
use support::hollow::glm_5_2_int4;
use support::{Checkpoint, Form};

static GLM_FULL: LazyLock<Catalogue> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    glm_5_2_int4(directory.path());
    Catalogue::open(directory.path()).unwrap()
});

/// Experts of a few hundred bytes: whole blocks are many times as much.
static TINY: LazyLock<(TempDir, Catalogue)> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    Checkpoint::olmoe(Form::INT8).write_sharded(directory.path(), 1);
    let model = Catalogue::open(directory.path()).unwrap();
    (directory, model)
});

fn plan(model: &Catalogue, direct: Option<bool>, io: Option<IoMode>) -> Plan {
    let mut facts = Facts::default();
    if let Some(direct) = direct {
        facts.disk.direct_reads = Fact::measured(direct, "");
    }
    let ram = Some(SizeRequest::Absolute(Bytes(20_000_000_000)));
    let options = Options { ram, context: Some(16), slots: Some(2), io, ..Options::default() };
    planner::plan(model, &facts, &options, None).unwrap()
}

#[test]
fn reads_are_direct_where_the_disk_was_measured_so_and_blocks_cost_little() {
    let cases = [
        (&*GLM_FULL, Some(true), None, IoMode::Direct, "measured, this disk takes direct reads"),
        (&*GLM_FULL, Some(false), None, IoMode::Dropped, "for it takes no direct reads"),
        (&*GLM_FULL, None, None, IoMode::Dropped, "is unknown"),
        (&TINY.1, Some(true), None, IoMode::Dropped, "takes direct reads, but whole blocks"),
        (&TINY.1, None, Some(IoMode::Direct), IoMode::Direct, "given with --io direct"),
        (&*GLM_FULL, Some(true), Some(IoMode::Dropped), IoMode::Dropped, "--io dropped"),
        (&*GLM_FULL, Some(true), Some(IoMode::Buffered), IoMode::Buffered, "--io buffered"),
    ];
    for (model, direct, io, expected, why) in cases {
        let plan = plan(model, direct, io);
        assert_eq!(plan.engine.io, expected, "{direct:?} {io:?}");
        assert!(plan.engine.io_evidence.contains(why), "{}", plan.engine.io_evidence);
        plan.check(model).unwrap();
    }
}

/// GLM-5.2 in 4 bits: an expert is 4618 blocks to the byte, and at most two of its reads begin inside
/// one.
#[test]
fn whole_blocks_cost_a_large_expert_nearly_nothing() {
    assert_eq!(18_915_328 % DIRECT_ALIGN, 0);
    assert!(budget::direct_padding_share(&GLM_FULL) < 0.0005);
    for layer in GLM_FULL.spec.expert_layers() {
        let slot = budget::slot_bytes(&GLM_FULL, layer, IoMode::Direct).0;
        assert!((18_915_328..=18_915_328 + 4 * DIRECT_ALIGN).contains(&slot), "{slot}");
    }
}

#[test]
fn the_ledger_follows_the_mode() {
    let [direct, dropped] =
        [IoMode::Direct, IoMode::Dropped].map(|io| plan(&GLM_FULL, None, Some(io)));
    let bytes = |plan: &Plan, line| plan.ledger.bytes(line).0;
    // Reads past the page cache need no pages, and a buffer for what is no expert.
    assert_eq!(bytes(&direct, Line::PageCacheReserve), 0);
    // Experts of 18.9 MB are read in pieces of about 4 MiB, never one and a half times that, four at once.
    assert_eq!(bytes(&dropped, Line::PageCacheReserve), 4 * ((6 << 20) + DIRECT_ALIGN));
    assert_eq!(bytes(&direct, Line::IoBuffers) - bytes(&dropped, Line::IoBuffers), 4 << 20);
    let slot = budget::largest_slot_bytes(&GLM_FULL, IoMode::Direct);
    assert_eq!(bytes(&direct, Line::ExpertsInFlight), 8 * slot);
    for line in [Line::ExpertCache, Line::ExpertsInFlight] {
        let (more, less) = (bytes(&direct, line), bytes(&dropped, line));
        assert!(less <= more && more - less <= less / 2000, "{line}: {less} {more}");
    }
    // A plan that is edited to another mode is held to that mode's ledger.
    let mut edited = dropped;
    edited.engine.io = IoMode::Direct;
    assert!(edited.check(&GLM_FULL).is_err());
    edited.settle(&GLM_FULL);
    edited.check(&GLM_FULL).unwrap();
    assert_eq!(edited.ledger, direct.ledger);
}
