//! Layers with sliding windows: far beyond the window, in batches of every size, within the memory that
//! the plan gives them, and after a call that failed.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::ops::ControlFlow;
use std::path::PathBuf;

use tierkeep_doctor::Facts;
use tierkeep_engine::report::BOUND_LINES;
use tierkeep_engine::{Engine, EngineError, Observer, Phase, Unobserved};
use tierkeep_plans::budget::Line;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

const WINDOW: usize = 8;
const N_TOKENS: usize = 300;

/// A small model with windows in all layers but the second.
fn model() -> Catalogue {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles/mixtral");
    let mut model = Catalogue::open(&directory).unwrap();
    for layer in [0, 2] {
        model.spec.layers[layer].window = Some(WINDOW);
    }
    model
}

fn open(model: &Catalogue, context: u64, batch: u64, threads: u64) -> Engine {
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(1 << 30))),
        context: Some(context),
        threads: Some(threads),
        prefill_batch: Some(batch),
        ..Options::default()
    };
    let plan = planner::plan(model, &Facts::default(), &options, None).unwrap();
    let engine = Engine::open(&plan, model, &mut |_, _, _| {}).unwrap();
    for line in BOUND_LINES {
        assert_eq!(engine.bound(line), plan.ledger.bytes(line), "{line}, context {context}");
    }
    engine
}

fn prompt(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| i * i % 311).collect()
}

#[derive(Default)]
struct Keep(Vec<u32>);

impl Observer for Keep {
    fn wants_all_logits(&self) -> bool {
        true
    }
    fn logits(&mut self, _: usize, logits: &[f32]) {
        self.0.extend(logits.iter().map(|l| l.to_bits()));
    }
}

fn logits(engine: &mut Engine, tokens: &[u32]) -> Vec<u32> {
    let mut keep = Keep::default();
    engine.run(tokens, Phase::Prefill, &mut keep).unwrap();
    keep.0
}

/// Decode, token by token, far beyond the window equals batches of every size. `grouped_tests` compares
/// one layer with a cache of every position.
#[test]
fn batches_of_every_size_equal_single_tokens_far_beyond_the_window() {
    let model = model();
    let tokens = prompt(N_TOKENS);
    let mut engine = open(&model, N_TOKENS as u64, 1, 1);
    let expected = logits(&mut engine, &tokens);
    for (batch, threads) in [(3, 1), (WINDOW as u64, 2), (64, 3), (N_TOKENS as u64, 2)] {
        let mut engine = open(&model, N_TOKENS as u64, batch, threads);
        assert!(logits(&mut engine, &tokens) == expected, "batch {batch}");
    }
    let without = Catalogue::open(&model.directory).unwrap();
    let mut engine = open(&without, N_TOKENS as u64, 64, 1);
    let vocab = model.spec.vocab_size;
    let everything = logits(&mut engine, &tokens);
    assert!(everything[..WINDOW * vocab] == expected[..WINDOW * vocab], "the window is not full");
    assert!(everything[..(WINDOW + 1) * vocab] != expected[..(WINDOW + 1) * vocab]);
}

#[test]
fn a_window_holds_its_positions_and_no_more() {
    let model = model();
    let bound = |context| open(&model, context, 4, 1).bound(Line::KvCache).0;
    // Four bytes an element: keys and values of two heads of 16.
    let position = 4 * 2 * 2 * 16;
    assert_eq!(bound(4), 3 * 4 * position, "the context is shorter than the window");
    assert_eq!(bound(256), (256 + 2 * WINDOW as u64) * position);
    assert_eq!(bound(512) - bound(256), 256 * position);
}

/// Breaks after the first layer.
struct Break;

impl Observer for Break {
    fn layer(&mut self, _: usize, _: usize, _: &[f32]) -> ControlFlow<()> {
        ControlFlow::Break(())
    }
}

/// What a window has lost is not made up for: the sequence ends where it can no longer be the model's.
#[test]
fn a_batch_that_failed_in_a_full_window_ends_the_sequence() {
    let model = model();
    let tokens = prompt(32);
    let expected = logits(&mut open(&model, 64, 16, 1), &tokens);
    let mut engine = open(&model, 64, 16, 1);
    let vocab = model.spec.vocab_size;
    let fail = |engine: &mut Engine, tokens: &[u32]| {
        let error = engine.run(tokens, Phase::Prefill, &mut Break).unwrap_err();
        assert!(matches!(error, EngineError::Interrupted), "{error}");
    };
    // From the beginning, within the window, and by one token: nothing is lost.
    fail(&mut engine, &tokens[..16]);
    assert!(logits(&mut engine, &tokens[..4]) == expected[..4 * vocab]);
    fail(&mut engine, &[7, 7, 7, 7]);
    assert!(logits(&mut engine, &tokens[4..20]) == expected[4 * vocab..20 * vocab]);
    fail(&mut engine, &[7]);
    assert!(logits(&mut engine, &tokens[20..21]) == expected[20 * vocab..21 * vocab]);
    fail(&mut engine, &[7, 7]);
    for tokens in [&tokens[21..22], &tokens[21..23]] {
        let error = engine.run(tokens, Phase::Decode, &mut Unobserved).unwrap_err();
        assert!(matches!(error, EngineError::WindowLost), "{error}");
    }
    engine.clear();
    assert!(logits(&mut engine, &tokens) == expected);
}
