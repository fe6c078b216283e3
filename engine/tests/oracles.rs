//! Every family against the reference: greedy tokens, teacher-forced positions and logits, under
//! every placement; and the bytes bound against the bytes planned.
//!
//! The oracles are committed under `tests/oracles` of the workspace; a missing one is a failure.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::path::PathBuf;

use tierkeep_doctor::Facts;
use tierkeep_engine::generate::generate;
use tierkeep_engine::report::BOUND_LINES;
use tierkeep_engine::verify::{CaseReport, LOGIT_TOLERANCE, read_oracle, verify_case};
use tierkeep_engine::{Engine, EngineError, Phase, Unobserved};
use tierkeep_plans::budget::{DenseResidency, EmbeddingResidency, Line, Streamed};
use tierkeep_plans::catalogue::{Catalogue, LayerTensor, Role};
use tierkeep_plans::plan::{IoMode, Plan, Prefetch};
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::spec::Family;
use tierkeep_plans::units::{Bytes, SizeRequest};

#[path = "support/faults.rs"]
mod faults;
use faults::{maps_files, takes_direct_reads};

const FAMILIES: &[&str] = &[
    "olmoe",
    "glm_moe_dsa",
    "glm_moe_dsa-shared-indexer",
    "glm_moe_dsa-fp8",
    "deepseek_v3",
    "deepseek_v3-no-q-lora",
    "longcat_flash",
    "longcat_flash-fp8",
    "qwen3_moe",
    "glm4_moe",
    "mixtral",
    "gpt_oss",
    "gpt_oss-mxfp4",
];

fn model(family: &str) -> Catalogue {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles").join(family);
    Catalogue::open(&directory).unwrap()
}

/// How a plan differs from the default.
#[derive(Clone, Copy, Debug)]
struct Placing {
    threads: u64,
    /// Slots of each layer; `None` for all.
    slots: Option<u32>,
    /// Pinned experts of each layer.
    pins: u32,
    batch: u64,
    isa: &'static str,
    io: IoMode,
    dense: DenseResidency,
    streaming: Streaming,
    /// Reads at once, and bytes of one.
    reads: (u64, Option<u64>),
}

/// Which dense weights are streamed.
#[derive(Clone, Copy, Debug)]
enum Streaming {
    Nothing,
    /// The first layer and every other one after it.
    Some,
    Last,
    AllLayers,
    AllLayersAndHead,
}

impl Streaming {
    fn of(self, n_layers: usize) -> Streamed {
        let n_layers = n_layers as u32;
        let layers = match self {
            Self::Nothing => Vec::new(),
            Self::Some => (0..n_layers).step_by(2).collect(),
            Self::Last => vec![n_layers - 1],
            Self::AllLayers | Self::AllLayersAndHead => (0..n_layers).collect(),
        };
        Streamed { layers, head: matches!(self, Self::AllLayersAndHead) }
    }
}

const PLAIN: Placing = Placing {
    threads: 1,
    slots: None,
    pins: 0,
    batch: 64,
    isa: "scalar",
    io: IoMode::Buffered,
    dense: DenseResidency::Resident,
    streaming: Streaming::Nothing,
    reads: (0, None),
};

const MAPPED: Placing = Placing { dense: DenseResidency::Mapped, ..PLAIN };

fn plan(model: &Catalogue, placing: Placing) -> Plan {
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(1 << 30))),
        context: Some(64),
        threads: Some(placing.threads),
        prefill_batch: Some(placing.batch),
        isa: Some(placing.isa.to_owned()),
        io: Some(placing.io),
        io_depth: Some(placing.reads.0),
        prefetch: (placing.reads.0 == 0).then_some(Prefetch::Off),
        ..Options::default()
    };
    let mut plan = planner::plan(model, &Facts::default(), &options, None).unwrap();
    let slots = &mut plan.placement.slots;
    for layer in model.spec.expert_layers() {
        if let Some(cap) = placing.slots {
            slots.caps[layer] = cap;
        }
        let step = (model.spec.router.n_experts as u32 / 5).min(3);
        slots.pins[layer] = (0..placing.pins).map(|i| i * step + layer as u32 % 3).collect();
    }
    plan.placement.dense = placing.dense;
    plan.engine.read_bytes = placing.reads.1.map(Bytes);
    plan.placement.streamed = placing.streaming.of(model.spec.n_layers);
    if placing.streaming.of(model.spec.n_layers).head && model.spec.tied_embeddings {
        plan.engine.embedding = EmbeddingResidency::RowRead;
    }
    plan.settle(model);
    plan
}

fn open(model: &Catalogue, plan: &Plan) -> Engine {
    Engine::open(plan, model, &mut |_, _, _| {}).unwrap()
}

fn verify(model: &Catalogue, placing: Placing, with_layers: bool) -> CaseReport {
    let oracle = read_oracle(&model.directory).unwrap();
    assert_eq!(oracle.len(), 1);
    assert_eq!(oracle[0].layers.len(), model.spec.n_layers, "the oracle has every layer");
    let mut engine = open(model, &plan(model, placing));
    verify_case(&mut engine, &oracle[0], with_layers).unwrap()
}

#[test]
fn every_family_equals_the_reference() {
    for &family in FAMILIES {
        let model = model(family);
        let report = verify(&model, PLAIN, true);
        println!("{family}: {report:?}");
        assert!(report.positions + report.positions_under_margin == 40, "{family}");
        assert_eq!(report.positions_equal, report.positions, "{family}: {report:?}");
        assert_eq!((report.greedy_equal, report.greedy), (24, 24), "{family}: {report:?}");
        let difference = report.logit_difference.unwrap();
        assert!(difference > 0.0 && difference <= LOGIT_TOLERANCE, "{family}: {difference}");
        assert_eq!(report.layer_differences.len(), model.spec.n_layers);
        assert!(report.layer_differences.iter().all(|d| *d <= LOGIT_TOLERANCE), "{report:?}");
    }
}

/// Kimi-K2 is published in DeepSeek-V3's tensors and in the older form of its config: the same model under
/// that name gives the same bits.
#[test]
fn kimi_k2_is_deepseek_v3_under_another_name() {
    let whole = model("deepseek_v3");
    let directory = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(&whole.directory).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), directory.path().join(file.file_name())).unwrap();
    }
    let path = directory.path().join("config.json");
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let fields = config.as_object_mut().unwrap();
    let mut scaling = fields.remove("rope_parameters").unwrap();
    let theta = scaling.as_object_mut().unwrap().remove("rope_theta").unwrap();
    let kind = scaling.as_object_mut().unwrap().remove("rope_type").unwrap();
    scaling["type"] = kind;
    for derived in ["rope_interleave", "head_dim", "qk_head_dim"] {
        fields.remove(derived).unwrap();
    }
    for (field, value) in [
        ("model_type", "kimi_k2".into()),
        ("num_nextn_predict_layers", 0.into()),
        ("rope_theta", theta),
        ("rope_scaling", scaling),
        ("scoring_func", "sigmoid".into()),
        ("topk_method", "noaux_tc".into()),
    ] {
        fields.insert(field.to_owned(), value);
    }
    std::fs::write(&path, config.to_string()).unwrap();
    let kimi = Catalogue::open(directory.path()).unwrap();
    assert_eq!(kimi.spec.family, Family::KimiK2);
    assert!(all_logits(&kimi, PLAIN) == all_logits(&whole, PLAIN));
}

/// The reference with its own cache kept from token to token, where ties of the sparse indexer fall
/// otherwise than when it computes every token anew: what a run is to equal.
#[test]
fn a_run_equals_the_reference_with_its_cache() {
    let path =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles/cached_greedy.json");
    let cached: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for &family in FAMILIES {
        let expected: Vec<u32> = serde_json::from_value(cached["greedy"][family].clone()).unwrap();
        assert_eq!(expected.len(), 24);
        let model = model(family);
        let prompt = read_oracle(&model.directory).unwrap().remove(0).prompt;
        for placing in [PLAIN, Placing { batch: 7, slots: Some(2), ..PLAIN }] {
            let mut engine = open(&model, &plan(&model, placing));
            let run = generate(&mut engine, &prompt, 24, &[], None, &mut |_| {
                std::ops::ControlFlow::Continue(())
            });
            assert_eq!(run.unwrap().tokens, expected, "{family}: {placing:?}");
        }
    }
}

/// Logits after each of 40 prompt tokens and 24 greedy ones, bit for bit.
fn all_logits(model: &Catalogue, placing: Placing) -> Vec<u32> {
    struct Keep(Vec<u32>);
    impl tierkeep_engine::Observer for Keep {
        fn wants_all_logits(&self) -> bool {
            true
        }
        fn logits(&mut self, _: usize, logits: &[f32]) {
            self.0.extend(logits.iter().map(|l| l.to_bits()));
        }
    }
    let oracle = read_oracle(&model.directory).unwrap();
    let mut engine = open(model, &plan(model, placing));
    let mut keep = Keep(Vec::new());
    engine.run(&oracle[0].prompt, Phase::Prefill, &mut keep).unwrap();
    for (token, _) in &oracle[0].greedy {
        engine.run(&[*token], Phase::Decode, &mut keep).unwrap();
    }
    keep.0
}

#[test]
fn placement_changes_no_bit() {
    let placings = [
        Placing { threads: 2, ..PLAIN },
        Placing { threads: 3, slots: Some(5), ..PLAIN },
        Placing { slots: Some(1), ..PLAIN },
        Placing { slots: Some(0), batch: 7, ..PLAIN },
        Placing { slots: Some(1), pins: 1, ..PLAIN },
        Placing { slots: Some(6), pins: 4, threads: 2, ..PLAIN },
        Placing { batch: 1, ..PLAIN },
        Placing { batch: 9, slots: Some(3), ..PLAIN },
        Placing { batch: 1, slots: Some(2), pins: 2, io: IoMode::Dropped, ..PLAIN },
        Placing { slots: Some(2), pins: 1, io: IoMode::Direct, ..PLAIN },
        Placing { slots: Some(0), batch: 7, io: IoMode::Direct, ..PLAIN },
        Placing { reads: (1, None), slots: Some(3), ..PLAIN },
        Placing { reads: (4, None), slots: Some(1), threads: 2, ..PLAIN },
        Placing { reads: (16, None), slots: Some(0), batch: 7, ..PLAIN },
        Placing { reads: (3, Some(4096)), slots: Some(2), pins: 2, batch: 1, ..PLAIN },
        Placing { reads: (4, Some(4096)), slots: Some(4), io: IoMode::Direct, ..PLAIN },
        Placing { reads: (2, Some(8192)), batch: 9, slots: Some(5), io: IoMode::Dropped, ..PLAIN },
        Placing { reads: (4, Some(4096)), streaming: Streaming::AllLayersAndHead, ..MAPPED },
        Placing { isa: "avx2", threads: 2, ..PLAIN },
        Placing { isa: "avx512", batch: 5, ..PLAIN },
        MAPPED,
        Placing { threads: 3, batch: 9, slots: Some(2), io: IoMode::Dropped, ..MAPPED },
        Placing { streaming: Streaming::Some, ..MAPPED },
        Placing { streaming: Streaming::Some, ..PLAIN },
        Placing { streaming: Streaming::Last, threads: 2, batch: 1, ..PLAIN },
        Placing { streaming: Streaming::AllLayers, batch: 7, ..PLAIN },
        Placing { streaming: Streaming::AllLayersAndHead, slots: Some(1), ..PLAIN },
        Placing { streaming: Streaming::AllLayersAndHead, threads: 2, batch: 5, ..MAPPED },
    ];
    let supported = tierkeep_kernels::Isa::supported();
    for &family in FAMILIES {
        let model = model(family);
        let expected = all_logits(&model, PLAIN);
        assert_eq!(expected.len(), 64 * model.spec.vocab_size);
        for placing in placings {
            let is_possible = (placing.io != IoMode::Direct
                || takes_direct_reads(&model.shards[0].path))
                && (placing.dense != DenseResidency::Mapped || maps_files());
            if is_possible && supported.iter().any(|isa| isa.to_string() == placing.isa) {
                assert!(all_logits(&model, placing) == expected, "{family}: {placing:?}");
            }
        }
    }
}

fn assert_bound_as_planned(model: &Catalogue, plan: &Plan) {
    let engine = open(model, plan);
    for line in BOUND_LINES {
        assert_eq!(engine.bound(line), plan.ledger.bytes(line), "{line}");
    }
}

/// A budget that holds about half of the experts.
fn small_budget(model: &Catalogue) -> Bytes {
    let everything = plan(model, PLAIN).ledger.total();
    Bytes(everything.0 - model.routed_bytes().0 / 2)
}

#[test]
fn bytes_bound_are_bytes_planned() {
    for &family in FAMILIES {
        let model = model(family);
        for slots in [None, Some(0), Some(1), Some(5)] {
            for (threads, batch) in [(1, 1), (2, 40)] {
                let pins = slots.map_or(3, |s| s.min(2));
                assert_bound_as_planned(
                    &model,
                    &plan(&model, Placing { slots, pins, threads, batch, ..PLAIN }),
                );
            }
        }
        for streaming in [Streaming::Nothing, Streaming::Some, Streaming::AllLayersAndHead] {
            assert_bound_as_planned(&model, &plan(&model, Placing { streaming, ..PLAIN }));
            if maps_files() {
                assert_bound_as_planned(&model, &plan(&model, Placing { streaming, ..MAPPED }));
            }
        }
        if takes_direct_reads(&model.shards[0].path) {
            for slots in [None, Some(0), Some(3)] {
                let direct = plan(&model, Placing { slots, pins: 0, io: IoMode::Direct, ..PLAIN });
                let dropped =
                    plan(&model, Placing { slots, pins: 0, io: IoMode::Dropped, ..PLAIN });
                assert_bound_as_planned(&model, &direct);
                assert!(direct.ledger.bytes(Line::IoBuffers) >= Bytes(4 << 20));
                if slots != Some(0) {
                    let cache = |plan: &Plan| plan.ledger.bytes(Line::ExpertCache);
                    assert!(cache(&direct) > cache(&dropped), "whole blocks take more");
                }
            }
        }
        // A budget that does not hold everything reads embedding rows from disk. In half of the experts of the
        // smallest model smaller batches make room for all of them.
        let small = Options {
            ram: Some(SizeRequest::Absolute(small_budget(&model))),
            context: Some(64),
            // As the plan whose budget it is a part of.
            io_depth: Some(0),
            ..Options::default()
        };
        let plan = planner::plan(&model, &Facts::default(), &small, None).unwrap();
        let holds_all = plan.ledger.bytes(Line::ExpertsInFlight) == Bytes(0);
        assert!(!holds_all || family == "gpt_oss-mxfp4", "{family}: {:?}", plan.ledger);
        let reads_rows = plan.ledger.bytes(Line::IoBuffers) > Bytes(0);
        assert_eq!(reads_rows, !holds_all, "{family}: {:?}", plan.ledger);
        assert_bound_as_planned(&model, &plan);
        assert!(plan.ledger.total() <= plan.request.budget_bytes);
    }
}

/// The comparison above is worth something only if it fails when the plan misses a tensor.
#[test]
fn a_tensor_dropped_from_the_catalogue_is_noticed() {
    for &family in FAMILIES {
        let whole = model(family);
        for at in 0..whole.tensors.len() {
            let mut dropped = whole.clone();
            let role = dropped.tensors.remove(at).role;
            let planned = plan(&dropped, PLAIN);
            let bound = Engine::open(&planned, &whole, &mut |_, _, _| {});
            assert!(
                matches!(bound, Err(EngineError::Plan(_))),
                "{family}: {role:?} dropped from the plan's catalogue: {bound:?}"
            );
            let engine = Engine::open(&planned, &dropped, &mut |_, _, _| {});
            assert!(
                matches!(engine, Err(EngineError::Unbound { .. })),
                "{family}: {role:?} dropped from the engine's catalogue: {engine:?}"
            );
        }
    }
}

/// The account itself refuses, even where the plan's own check is not asked.
#[test]
fn bound_differs_from_planned_when_a_tensor_is_not_counted() {
    let whole = model("glm_moe_dsa");
    let plan_of_whole = plan(&whole, PLAIN);
    let mut dropped = whole.clone();
    let norm = Role::Layer { layer: 0, tensor: LayerTensor::InputNorm };
    dropped.tensors.retain(|t| t.role != norm);
    let plan_of_dropped = plan(&dropped, PLAIN);
    let bound = open(&whole, &plan_of_whole).bound(Line::DenseWeights);
    assert_eq!(bound, plan_of_whole.ledger.bytes(Line::DenseWeights));
    assert_ne!(bound, plan_of_dropped.ledger.bytes(Line::DenseWeights));
}

#[test]
fn a_sequence_that_does_not_fit_or_makes_no_sense_is_refused() {
    let model = model("olmoe");
    let mut engine = open(&model, &plan(&model, PLAIN));
    let run = |engine: &mut Engine, tokens: &[u32]| {
        engine.run(tokens, Phase::Prefill, &mut Unobserved).map_err(|e| e.to_string())
    };
    assert!(run(&mut engine, &[]).unwrap_err().contains("no tokens"));
    assert!(run(&mut engine, &[320]).unwrap_err().contains("token id 320 is not below"));
    assert!(run(&mut engine, &[1; 65]).unwrap_err().contains("plan with --ctx 65"));
    run(&mut engine, &[1; 60]).unwrap();
    assert!(run(&mut engine, &[1; 5]).unwrap_err().contains("needs 65 tokens"));
    assert_eq!(engine.len(), 60);
    run(&mut engine, &[1; 4]).unwrap();
}

#[test]
fn counts_are_of_decode_in_order_of_weight() {
    let model = model("olmoe");
    let one_slot = plan(&model, Placing { slots: Some(1), ..PLAIN });
    let mut engine = open(&model, &one_slot);
    engine.run(&[1, 2, 3], Phase::Prefill, &mut Unobserved).unwrap();
    assert_eq!(engine.counters().total(Phase::Decode).accesses(), 0);
    for token in 4..14 {
        engine.run(&[token], Phase::Decode, &mut Unobserved).unwrap();
    }
    let decode = engine.counters().total(Phase::Decode);
    assert_eq!(decode.accesses(), 10 * 4 * 4);
    assert!(decode.misses >= 10 * 4 * 3, "one slot answers at most one access a layer");
    assert_eq!(engine.last_routing().len(), 16);
}

/// Experts without weights are chosen, computed and told; nothing is looked up, read or counted for them.
#[test]
fn experts_without_weights_are_no_accesses() {
    let model = model("longcat_flash");
    let router = model.spec.router;
    let mut engine = open(&model, &plan(&model, Placing { slots: Some(0), ..PLAIN }));
    engine.run(&[1, 2, 3], Phase::Prefill, &mut Unobserved).unwrap();
    let loaded = engine.read_counter().bytes();
    let (mut with_weights, mut without) = (0, 0);
    for token in 4..24 {
        engine.run(&[token], Phase::Decode, &mut Unobserved).unwrap();
        for &chosen in engine.last_routing() {
            assert!((chosen as usize) < router.n_outputs());
            *(if router.is_zero(chosen) { &mut without } else { &mut with_weights }) += 1;
        }
    }
    assert!(without > 0 && with_weights > 0, "{without} without weights, {with_weights} with");
    assert_eq!(without + with_weights, 20 * 3 * router.n_experts_active as u64);
    let decode = engine.counters().total(Phase::Decode);
    assert_eq!((decode.accesses(), decode.misses), (with_weights, with_weights));
    let read = engine.read_counter().bytes() - loaded;
    assert_eq!(read, with_weights * model.experts[0].read_bytes());
}

/// Sub-blocks are streamed one at a time: the buffers hold the larger one, not the layer.
#[test]
fn the_buffers_of_a_stream_hold_a_sub_block() {
    let model = model("longcat_flash");
    let planned = plan(&model, Placing { streaming: Streaming::AllLayers, ..PLAIN });
    let layer = |block: Option<u8>| -> u64 {
        let is_of = |role: Role| match role {
            Role::Layer { layer: 0, .. } => block.is_none_or(|b| b == 0),
            Role::SubBlock { layer: 0, block: own, .. } => block.is_none_or(|b| b == own),
            _ => false,
        };
        model.tensors.iter().filter(|t| is_of(t.role)).map(|t| t.resident_bytes().0).sum()
    };
    let (first, second) = (layer(Some(0)), layer(Some(1)));
    assert_eq!(first + second, layer(None));
    assert!(first > second, "the router is read with the first");
    assert_eq!(planned.ledger.bytes(Line::StreamBuffers), Bytes(2 * first));
}

/// The model in `examples/`, at 8 bits: all six greedy sequences of the reference's bf16 run.
#[test]
fn the_example_speaks_as_the_reference() {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/glm-nano");
    let model = Catalogue::open(&directory).unwrap();
    let oracle = read_oracle(&directory).unwrap();
    assert_eq!(oracle.len(), 6);
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(28_000_000))),
        context: Some(128),
        threads: Some(2),
        isa: Some(tierkeep_kernels::Isa::best().to_string()),
        ..Options::default()
    };
    let plan = planner::plan(&model, &Facts::default(), &options, None).unwrap();
    assert_bound_as_planned(&model, &plan);
    let mut engine = open(&model, &plan);
    for case in &oracle {
        let report = verify_case(&mut engine, case, false).unwrap();
        assert_eq!(report.positions_equal, case.greedy.len(), "{:?}", case.text);
        assert_eq!(report.greedy_equal, case.greedy.len(), "{:?}", case.text);
    }
}

/// Experts of the union of a batch are read once each, however few slots there are, and the bytes
/// read are those of the misses.
#[test]
fn a_batch_reads_each_expert_of_its_union_once() {
    for &family in FAMILIES {
        let model = model(family);
        let prompt = read_oracle(&model.directory).unwrap().remove(0).prompt;
        let expert = model.experts[0].read_bytes();
        let n_layers = model.spec.expert_layers().count();
        let tokens = prompt.len() * n_layers * model.spec.router.n_experts_active;
        let mut unions = Vec::new();
        for slots in [None, Some(0), Some(1), Some(5)] {
            let placing = Placing { slots, io: IoMode::Dropped, ..PLAIN };
            let mut engine = open(&model, &plan(&model, placing));
            let loaded = engine.read_counter().bytes();
            engine.run(&prompt, Phase::Prefill, &mut Unobserved).unwrap();
            let counts = engine.counters().total(Phase::Prefill);
            assert_eq!(counts.misses, counts.accesses(), "{family}: nothing is resident yet");
            assert_eq!(engine.read_counter().bytes() - loaded, counts.misses * expert, "{family}");
            unions.push(counts.misses);
        }
        assert!(unions.iter().all(|u| *u == unions[0]), "{family}: {unions:?}");
        assert!(unions[0] <= (n_layers * model.spec.router.n_experts) as u64);
        assert!(unions[0] < tokens as u64 / 2, "{family}: experts are shared in a batch");
    }
}
