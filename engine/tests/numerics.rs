//! Fast numerics: the same bits whatever computes them and however it is placed, and near the exact ones.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::ops::ControlFlow;

use tempfile::TempDir;
use tierkeep_engine::convert::{Bits, ConvertOptions, Execution, convert};
use tierkeep_engine::report::BOUND_LINES;
use tierkeep_engine::verify::read_oracle;
use tierkeep_engine::{Engine, EngineError, Phase, Unobserved};
use tierkeep_kernels::Isa;
use tierkeep_plans::budget::{KvElement, Line, Numerics};
use tierkeep_plans::catalogue::{Catalogue, PackedBits};
use tierkeep_plans::plan::Plan;

#[path = "support/models.rs"]
mod models;
use models::{logits, oracle};

const FAMILIES: [&str; 5] =
    ["olmoe", "glm_moe_dsa-shared-indexer", "longcat_flash", "qwen3_moe", "deepseek_v3"];

/// An oracle with every class in 4 bits, and the beginning of its prompt.
fn packed(family: &str) -> (TempDir, Catalogue, Vec<u32>) {
    let source = Catalogue::open(&oracle(family)).unwrap();
    let four = || Bits::Packed(PackedBits::Four).into();
    let options = ConvertOptions {
        experts: four(),
        dense: four(),
        embedding: four(),
        mtp: four(),
        ..ConvertOptions::default()
    };
    let out = tempfile::tempdir().unwrap();
    let mut go_on = |_| ControlFlow::Continue(());
    convert(&source, out.path(), &options, &Execution::default(), &mut go_on).unwrap();
    let model = Catalogue::open(out.path()).unwrap();
    let prompt = read_oracle(&oracle(family)).unwrap().remove(0).prompt;
    (out, model, prompt.into_iter().take(16).collect())
}

/// Fast numerics with other threads, batches and slots.
fn fast(threads: u64, batch: u64, slots: u32) -> impl FnOnce(&mut Plan) {
    move |plan| {
        plan.engine.numerics = Numerics::Fast;
        plan.engine.kv = KvElement::F16;
        plan.engine.threads = threads;
        plan.engine.prefill_batch = batch;
        for cap in &mut plan.placement.slots.caps {
            *cap = if *cap == 0 { 0 } else { slots };
        }
    }
}

#[test]
fn placement_changes_no_bit_of_fast_numerics() {
    for family in FAMILIES {
        let (_folder, model, tokens) = packed(family);
        let expected = logits(&model, &tokens, Isa::Scalar, fast(1, 1, 1));
        for isa in Isa::supported() {
            for (threads, batch, slots) in [(1, 16, 0), (2, 5, 3), (3, 64, 4)] {
                assert!(
                    logits(&model, &tokens, isa, fast(threads, batch, slots)) == expected,
                    "{family}: {isa}, {threads} threads, batches of {batch}, {slots} slots"
                );
            }
        }
    }
}

/// Rounding to 8 bits moves a logit by a few hundredths of what logits vary by.
#[test]
fn fast_is_near_exact_and_not_equal() {
    for family in FAMILIES {
        let (_folder, model, tokens) = packed(family);
        let of = |bits: Vec<u32>| bits.into_iter().map(f32::from_bits).collect::<Vec<_>>();
        let exact = of(logits(&model, &tokens, Isa::best(), |_| {}));
        let fast = of(logits(&model, &tokens, Isa::best(), fast(2, 16, 3)));
        let n = exact.len() as f32;
        let mean = exact.iter().sum::<f32>() / n;
        let spread = (exact.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / n).sqrt();
        let apart = exact.iter().zip(&fast).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / n;
        let apart = apart.sqrt() / spread;
        assert!(apart > 0.0 && apart < 0.15, "{family}: {apart} of the spread of logits");
    }
}

/// What fast numerics keep is on the activations line, to the byte.
#[test]
fn rounded_activations_are_bound_as_planned() {
    for family in FAMILIES {
        let (_folder, model, tokens) = packed(family);
        let mut seen = None;
        logits(&model, &tokens, Isa::best(), |plan| {
            fast(2, 7, 2)(plan);
            plan.settle(&model);
            seen = Some(plan.clone());
        });
        let plan = seen.unwrap();
        let mut engine = Engine::open(&plan, &model, &mut |_, _, _| {}).unwrap();
        engine.run(&tokens, Phase::Prefill, &mut Unobserved).unwrap();
        for line in BOUND_LINES {
            assert_eq!(engine.bound(line), plan.ledger.bytes(line), "{family}: {line}");
        }
        // A plan that promises less is refused.
        let mut exact = plan.clone();
        exact.engine.numerics = Numerics::Exact;
        exact.settle(&model);
        let less = plan.ledger.bytes(Line::Activations).0 - exact.ledger.bytes(Line::Activations).0;
        assert!(less > 0, "{family}");
        let mut short = plan;
        short.ledger = exact.ledger;
        let refused = Engine::open(&short, &model, &mut |_, _, _| {}).unwrap_err();
        assert!(matches!(refused, EngineError::Plan(_)), "{refused}");
    }
}
