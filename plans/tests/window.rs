//! Reads of experts under what else a layer computes: where a plan has them, what they take, and what the
//! estimate makes of them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

mod support;

use std::path::Path;
use std::sync::LazyLock;

use serde_json::json;
use support::geometry::{Geometry, Storage};
use support::{Checkpoint, Form};
use tierkeep_doctor::{DiskReadSpeed, Fact, Facts};
use tierkeep_plans::budget::{Line, ModelBytes};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::{Abilities, IoMode, Need, Plan, Prefetch};
use tierkeep_plans::planner::again::{command, options_of, options_without};
use tierkeep_plans::planner::{self, Options, PlanRefusal};
use tierkeep_plans::units::{Bytes, SizeRequest};

const GB: u64 = 1_000_000_000;

/// LongCat-Flash with fewer experts of a smaller size, so that it is opened fast.
static LONGCAT: LazyLock<Catalogue> = LazyLock::new(|| {
    let config = json!({
        "model_type": "longcat_flash", "vocab_size": 4000, "hidden_size": 1024, "num_layers": 3,
        "num_attention_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64, "v_head_dim": 64, "ffn_hidden_size": 2048, "moe_topk": 4,
        "expert_ffn_hidden_size": 512, "n_routed_experts": 64, "zero_expert_num": 32,
    });
    Geometry::new(config, Storage::Bf16, 0).open().unwrap()
});
static OLMOE: LazyLock<Catalogue> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::olmoe(Form::Bf16).write(dir.path());
    Catalogue::open(dir.path()).unwrap()
});

/// A machine whose memory and disk read at these speeds, bytes/s.
fn machine(memory: f64, disk: f64) -> Facts {
    let mut facts = Facts::default();
    facts.memory.usable_bytes = Fact::read(64 * GB, "of this test");
    facts.cpu.usable_threads = Fact::read(8, "of this test");
    facts.memory.read_bandwidth_bytes_per_s = Fact::measured(memory, "of this test");
    let reads = [(1, disk), (4, 3.0 * disk)].map(|(queue_depth, bytes_per_s)| DiskReadSpeed {
        bytes_per_s,
        read_bytes: 1 << 20,
        queue_depth,
    });
    facts.disk.reads = Fact::measured(reads.into(), "of this test");
    facts
}

/// Half of the experts have a slot.
fn options() -> Options {
    Options {
        ram: Some(SizeRequest::Absolute(Bytes(GB))),
        slots: Some(32),
        context: Some(128),
        ..Options::default()
    }
}

fn plan(facts: &Facts, options: &Options) -> Plan {
    let plan = planner::plan(&LONGCAT, facts, options, None).unwrap();
    plan.check(&LONGCAT).unwrap();
    plan
}

fn off() -> Options {
    Options { prefetch: Some(Prefetch::Off), ..options() }
}

/// Reads by the threads that compute.
fn one_by_one() -> Options {
    Options { io_depth: Some(0), ..off() }
}

fn time(plan: &Plan) -> f64 {
    plan.prediction.terms.iter().map(|term| term.seconds).sum()
}

#[test]
fn it_is_on_where_a_layer_knows_its_experts_early_and_nowhere_else() {
    let facts = machine(20e9, 1e9);
    let on = plan(&facts, &options());
    assert_eq!(on.engine.prefetch, Prefetch::Exact);
    let off = plan(&facts, &off());
    assert_eq!(off.engine.prefetch, Prefetch::Off);
    // Reads side by side are another matter.
    assert_eq!((on.reads().depth, off.reads().depth), (4, 4));
    assert_eq!((on.reads().begins_early, off.reads().begins_early), (true, false));
    let olmoe = |prefetch| {
        let options = Options { prefetch, slots: Some(2), ..options() };
        planner::plan(&OLMOE, &facts, &options, None)
    };
    for asked in [None, Some(Prefetch::Off)] {
        assert_eq!(olmoe(asked).unwrap().engine.prefetch, Prefetch::Off);
    }
    let error = olmoe(Some(Prefetch::Exact)).unwrap_err();
    assert!(matches!(error, PlanRefusal::BadOption { option: "--prefetch", .. }), "{error}");
}

#[test]
fn what_an_engine_lacks_is_planned_where_it_is_asked_for_alone() {
    let facts = machine(20e9, 1e9);
    let engine = Abilities { prefetch: false, ..Abilities::ALL };
    let without = plan(&facts, &Options { engine, ..options() });
    assert_eq!(without.engine.prefetch, Prefetch::Off);
    assert_eq!(without.needs_beyond(&engine), []);
    let asked = Options { engine, prefetch: Some(Prefetch::Exact), ..options() };
    let with = plan(&facts, &asked);
    assert_eq!(with.needs_beyond(&engine), [Need::Prefetch]);
    assert_eq!(Need::Prefetch.remedy(), "plan with --prefetch off");
    assert_eq!(options_without(&with, Need::Prefetch).prefetch, Some(Prefetch::Off));
}

/// A thread, and pages of each read under way where reads leave some.
#[test]
fn what_it_takes_of_the_budget() {
    let facts = machine(20e9, 1e9);
    let slot = ModelBytes::of(&LONGCAT, IoMode::Dropped).largest_slot;
    for (io, pages) in [(IoMode::Dropped, slot), (IoMode::Direct, 0)] {
        let with = |options: Options| plan(&facts, &Options { io: Some(io), ..options });
        let (mut on, off) = (with(options()), with(one_by_one()));
        on.engine.read_bytes = None;
        let grown = |on: &Plan, line| on.ledger.bytes(line).0 - off.ledger.bytes(line).0;
        for depth in [1, 2, 5] {
            on.engine.read_depth = depth;
            on.settle(&LONGCAT);
            on.check(&LONGCAT).unwrap();
            assert_eq!(grown(&on, Line::Runtime), depth * 100_000);
            assert_eq!(grown(&on, Line::PageCacheReserve), (depth - 1) * pages);
            let all: u64 = Line::ALL.iter().map(|&line| grown(&on, line)).sum();
            assert_eq!(all, depth * 100_000 + (depth - 1) * pages);
        }
        // Pieces leave fewer pages: what is under one and a half is not cut, in whole blocks.
        on.engine.read_bytes = Some(Bytes(1 << 20));
        on.settle(&LONGCAT);
        on.check(&LONGCAT).unwrap();
        let piece = (3 << 19) + 4096;
        assert!(piece < slot);
        let reserve = if pages == 0 { 0 } else { 5 * piece };
        assert_eq!(on.ledger.bytes(Line::PageCacheReserve).0, reserve);
    }
}

#[test]
fn what_makes_no_sense_is_named() {
    let facts = machine(20e9, 1e9);
    let message = |edit: fn(&mut Plan)| {
        let mut plan = plan(&facts, &options());
        edit(&mut plan);
        plan.check(&LONGCAT).unwrap_err().to_string()
    };
    let found = message(|plan| plan.engine.read_depth = 0);
    assert!(found.contains("engine.read_depth = 0, expected 1 to 64"), "{found}");
    let found = message(|plan| plan.engine.read_depth = 65);
    assert!(found.contains("engine.read_depth = 65"), "{found}");
    for bytes in [0, 4095, 6000] {
        let mut plan = plan(&facts, &options());
        plan.engine.read_bytes = Some(Bytes(bytes));
        let found = plan.check(&LONGCAT).unwrap_err().to_string();
        assert!(found.contains(&format!("engine.read_bytes = {bytes}")), "{found}");
    }
    // A thread more is a line of the ledger that differs.
    let found = message(|plan| plan.engine.read_depth = 2);
    assert!(found.contains("the plan's ledger has"), "{found}");
    for wrong in [-1.0, f64::NAN, f64::INFINITY] {
        let mut plan = plan(&facts, &options());
        plan.prediction.hidden_read_seconds = wrong;
        let found = plan.check(&LONGCAT).unwrap_err().to_string();
        assert!(found.contains("prediction.hidden_read_seconds"), "{found}");
    }
    let mut olmoe = {
        let options = Options { slots: Some(2), ..options() };
        planner::plan(&OLMOE, &facts, &options, None).unwrap()
    };
    olmoe.engine.prefetch = Prefetch::Exact;
    let found = olmoe.check(&OLMOE).unwrap_err().to_string();
    assert!(found.contains("engine.prefetch = exact, expected off"), "{found}");
}

/// What lies between a layer's routing and its experts, to the byte: two feed-forwards of three matrices of
/// 2048 x 1024, the second attention, and its two norms, of two bytes an element.
#[test]
fn the_window_is_what_comes_between_routing_and_experts() {
    let feed_forward = 3 * 2048 * 1024;
    let attention = 256 * 1024                // query down
        + 256                                 // its norm
        + 8 * (64 + 64) * 256                 // query up
        + (128 + 64) * 1024                   // latent down
        + 128                                 // its norm
        + 8 * (64 + 64) * 128                 // latent up
        + 1024 * 8 * 64; // output
    let elements: u64 = 2 * feed_forward + attention + 2 * 1024;
    for layer in ModelBytes::of(&LONGCAT, IoMode::Dropped).layers {
        assert_eq!(layer.window.weights(), elements);
        assert_eq!(layer.window.stored, 2 * elements);
        assert!(layer.window.stored < layer.dense.stored);
    }
    let olmoe = ModelBytes::of(&OLMOE, IoMode::Dropped);
    assert!(olmoe.layers.iter().all(|layer| layer.window.stored == 0));
}

/// For each layer the shorter of the reads and of what is computed meanwhile is hidden: with a slow disk
/// all that is computed, with a fast one all that is read. What is hidden is the whole difference.
#[test]
fn a_token_takes_the_longer_of_both() {
    let sums = ModelBytes::of(&LONGCAT, IoMode::Dropped);
    // Kernels that are never what binds, so that bytes over bandwidth decide.
    let memory = 1e9;
    for disk in [1e7, 1e8, 1e9, 1e10, 1e12] {
        let facts = machine(memory, disk);
        // One at a time either way, so that the disk's rate is the same.
        let with = Options { io_depth: Some(1), ..options() };
        let (on, off) = (plan(&facts, &with), plan(&facts, &one_by_one()));
        let hidden = on.prediction.hidden_read_seconds;
        assert_eq!(off.prediction.hidden_read_seconds, 0.0);
        assert!((time(&off) - time(&on) - hidden).abs() < 1e-9 * time(&off));
        assert_eq!(on.prediction.read_bytes_per_token, off.prediction.read_bytes_per_token);
        let reads = off.prediction.read_bytes_per_token.as_f64() / disk;
        // Windows are equal in all layers; caches at half the context are touched too, half of them in one.
        let window: f64 = sums
            .layers
            .iter()
            .enumerate()
            .map(|(layer, bytes)| {
                let kv = tierkeep_plans::budget::layer_kv_bytes(
                    &LONGCAT.spec,
                    layer,
                    64,
                    tierkeep_plans::budget::KvElement::F32,
                );
                (bytes.window.stored as f64 + kv as f64 / 2.0) / memory
            })
            .sum();
        // The experts that are in memory are computed meanwhile, too.
        let resident = sums.routed_per_token() as f64 * on.prediction.hit_rate.p50 / memory;
        let expected = reads.min(window + resident);
        assert!((hidden - expected).abs() < 1e-3 * expected, "{disk}: {hidden} {expected}");
        // The speed of reads that a run is compared with is the disk's, whatever is hidden.
        let reckoned = on.prediction.expert_read_bytes_per_s().unwrap();
        assert!((reckoned - disk).abs() < 1e-3 * disk, "{reckoned} {disk}");
        let said = on.prediction.evidence.iter().any(|line| {
            line.starts_with("reads of missed experts run under") && line.ends_with("computed")
        });
        assert!(said, "{:?}", on.prediction.evidence);
    }
}

/// A disk so slow that all that is computed meanwhile is hidden, and memory so fast that the kernels alone
/// take time: 5.2 G weights of 16 bits a second and thread. Of the 4 experts that a token is sent to a third
/// have no weights.
#[test]
fn what_the_kernels_take_hides_reads_too() {
    let facts = machine(1e18, 1e6);
    let fixed = Options { isa: Some("avx512".to_owned()), threads: Some(1), ..options() };
    let plan = plan(&facts, &fixed);
    let sums = ModelBytes::of(&LONGCAT, IoMode::Dropped);
    let routed = 4.0 * 64.0 / 96.0 * (3 * 1024 * 512) as f64 * plan.prediction.hit_rate.p50;
    let layers = sums.layers.iter().map(|layer| layer.window.weights() as f64 + routed);
    let expected = layers.sum::<f64>() / 5.2e9;
    let hidden = plan.prediction.hidden_read_seconds;
    assert!((hidden - expected).abs() < 1e-6 * expected, "{hidden} {expected}");
}

#[test]
fn a_plan_with_it_is_read_back_and_made_again() {
    let facts = machine(20e9, 1e9);
    for (options, flag) in [(options(), false), (off(), true)] {
        let plan = plan(&facts, &options);
        let text = plan.to_toml().unwrap();
        assert_eq!(Plan::from_toml(&text, Path::new("plan.toml")).unwrap(), plan);
        let again = command(Path::new("model"), &options_of(&plan), Path::new("plan.toml"));
        assert_eq!(again.contains("--prefetch off"), flag, "{again}");
    }
    // A model without windows needs no word about them.
    let options = Options { slots: Some(2), ..options() };
    let olmoe = planner::plan(&OLMOE, &facts, &options, None).unwrap();
    assert_eq!(options_of(&olmoe).prefetch, None);
}

/// A point that was measured: bytes, reads at once, GB/s.
fn measured(points: &[(u64, u32, f64)]) -> Facts {
    let mut facts = machine(20e9, 1e9);
    let reads = points.iter().map(|&(read_bytes, queue_depth, gb)| DiskReadSpeed {
        bytes_per_s: gb * 1e9,
        read_bytes,
        queue_depth,
    });
    facts.disk.reads = Fact::measured(reads.collect(), "of this test");
    facts
}

/// An expert of these files is one read of 3 MiB.
#[test]
fn depth_and_size_are_those_that_the_disk_was_fastest_at() {
    const MIB: u64 = 1 << 20;
    let chosen = |points: &[(u64, u32, f64)]| {
        let plan = plan(&measured(points), &options());
        assert!(plan.engine.io_evidence.contains("at once"), "{}", plan.engine.io_evidence);
        (plan.engine.read_depth, plan.engine.read_bytes.map(|bytes| bytes.0 / MIB))
    };
    // One read is as fast as many: no thread more, nothing is cut.
    assert_eq!(chosen(&[(3 * MIB, 1, 2.0), (3 * MIB, 8, 2.05), (MIB, 8, 1.9)]), (1, None));
    // Many are faster, and pieces as well: a single expert comes in three at once.
    let points =
        [(3 * MIB, 1, 1.0), (3 * MIB, 4, 2.0), (MIB, 1, 0.7), (MIB, 2, 1.5), (MIB, 4, 2.0)];
    assert_eq!(chosen(&points), (4, Some(1)));
    // Pieces are slower at any depth: whole experts, as many as it takes.
    let points = [(3 * MIB, 1, 1.0), (3 * MIB, 4, 2.0), (3 * MIB, 8, 2.0), (MIB, 8, 1.5)];
    assert_eq!(chosen(&points), (4, None));
    // Reads that are much larger than an expert say nothing of it.
    assert_eq!(chosen(&[(32 * MIB, 16, 9.0), (3 * MIB, 2, 1.0)]), (2, None));
    // Without a measurement it is said to be assumed.
    let mut facts = machine(20e9, 1e9);
    facts.disk.reads = Fact::unknown("of this test");
    let plan = plan(&facts, &options());
    assert_eq!((plan.engine.read_depth, plan.engine.read_bytes), (4, None));
    assert!(plan.engine.io_evidence.contains("assumed"), "{}", plan.engine.io_evidence);
}

#[test]
fn what_is_asked_of_reads_is_done_or_refused_with_the_fact() {
    let facts = machine(20e9, 1e9);
    let size = |bytes| Some(SizeRequest::Absolute(Bytes(bytes)));
    let asked = plan(&facts, &Options { io_depth: Some(7), read_size: size(500_000), ..options() });
    let found = (asked.engine.read_depth, asked.engine.read_bytes);
    assert_eq!(found, (7, Some(Bytes(122 * 4096))), "whole blocks");
    let again = command(Path::new("model"), &options_of(&asked), Path::new("plan.toml"));
    assert!(again.contains("--io-depth 7") && again.contains("--read-size"), "{again}");
    let chosen = options_of(&plan(&facts, &options()));
    assert_eq!((chosen.io_depth, chosen.read_size), (None, None));
    let refusal = |options: Options| planner::plan(&LONGCAT, &facts, &options, None).unwrap_err();
    for (options, fact) in [
        (Options { io_depth: Some(65), ..off() }, "0 to 64"),
        (Options { io_depth: Some(0), prefetch: Some(Prefetch::Exact), ..options() }, "1 to 64"),
        (Options { read_size: size(1000), ..options() }, "brings 3145728"),
        (Options { read_size: size(1 << 30), ..options() }, "brings 3145728"),
        (Options { read_size: Some(SizeRequest::Percent(5.0)), ..options() }, "a size such as"),
    ] {
        let error = refusal(options).to_string();
        assert!(error.contains(fact), "{error}");
    }
}
