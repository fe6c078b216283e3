//! What a token takes in main memory, worked out by hand: the kernels have a speed for each way of storing
//! weights, and numerics and instruction set choose it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail as tests do")]

mod support;

use std::sync::LazyLock;

use serde_json::json;
use support::geometry::{Geometry, Storage};
use tierkeep_doctor::{Fact, Facts};
use tierkeep_plans::budget::{IoMode, KernelClass, KvElement, ModelBytes, Numerics, Touched};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};
use tierkeep_plans::what_if::WhatIf;

/// OLMoE of two layers: attention and experts of 4 bits, head of 8, router and norms of 32.
static PACKED: LazyLock<Catalogue> = LazyLock::new(|| {
    let config = json!({
        "model_type": "olmoe", "vocab_size": 4000, "hidden_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 512,
        "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512,
        "eos_token_id": 3,
    });
    Geometry::new(config, Storage::Int4, 0).open().unwrap()
});

/// Weights of 4 bits that a token is multiplied with: queries, keys, values, output; two experts.
const INT4_WEIGHTS: u64 = 2 * (4 * 1024 * 1024 + 2 * 3 * 512 * 1024);
/// Their bytes, a scale of 32 bits a row.
const INT4_BYTES: u64 = INT4_WEIGHTS / 2 + 2 * 4 * (4 * 1024 + 2 * (512 + 512 + 1024));
const INT8_WEIGHTS: u64 = 4000 * 1024;
const INT8_BYTES: u64 = INT8_WEIGHTS + 4 * 4000;
/// Routers, four norms a layer, the last norm.
const F32_WEIGHTS: u64 = 2 * (4 * 1024 + 4 * 1024) + 1024;
/// Keys and values of two layers at half of a context of 128 tokens.
const CACHE_BYTES: u64 = 2 * 2 * 1024 * 64 * 4;

/// A machine that reads memory at 10 GB/s.
fn machine() -> Facts {
    let mut facts = Facts::default();
    facts.memory.usable_bytes = Fact::read(64_000_000_000, "of this test");
    facts.cpu.usable_threads = Fact::read(2, "of this test");
    facts.memory.read_bandwidth_bytes_per_s = Fact::measured(10e9, "of this test");
    facts
}

/// Two threads, and a slot for every expert.
fn plan(facts: &Facts, isa: &str, numerics: Numerics) -> Plan {
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(1_000_000_000))),
        context: Some(128),
        kv: Some(KvElement::F32),
        isa: Some(isa.to_owned()),
        numerics: Some(numerics),
        ..Options::default()
    };
    let plan = planner::plan(&PACKED, facts, &options, None).unwrap();
    plan.check(&PACKED).unwrap();
    plan
}

fn seconds(plan: &Plan, name: &str) -> f64 {
    plan.prediction.terms.iter().filter(|term| term.name == name).map(|term| term.seconds).sum()
}

/// The terms of memory and of the kernels are these, and the rest is overhead.
fn check(plan: &Plan, memory: f64, kernels: f64) {
    let found = (seconds(plan, "memory bandwidth"), seconds(plan, "kernels"));
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b;
    assert!(close(found.0, memory) && close(found.1, kernels), "{found:?} {memory} {kernels}");
    let all: f64 = plan.prediction.terms.iter().map(|term| term.seconds).sum();
    assert!(close(all, memory + kernels + 2.0 * 40e-6), "{:?}", plan.prediction.terms);
    let binds = if memory > kernels { "memory bandwidth" } else { "kernels" };
    assert_eq!(plan.prediction.binding, binds);
}

fn says(plan: &Plan, text: &str) {
    assert!(plan.prediction.evidence.iter().any(|e| e == text), "{:?}", plan.prediction.evidence);
}

#[test]
fn weights_are_added_up_by_how_they_are_stored() {
    let sums = ModelBytes::of(&PACKED, IoMode::Dropped);
    let dense = sums.layers.iter().fold(sums.head().and(sums.final_norm), |a, l| a.and(l.dense));
    let routed = |class| sums.layers.iter().map(|l| 2 * l.expert.get(class).bytes).sum::<u64>();
    let int4 = dense.by_class.get(KernelClass::Int4);
    assert_eq!(int4.bytes + routed(KernelClass::Int4), INT4_BYTES);
    assert_eq!(routed(KernelClass::Int8) + routed(KernelClass::F32), 0);
    let int8 = Touched { bytes: INT8_BYTES, weights: INT8_WEIGHTS };
    assert_eq!(dense.by_class.get(KernelClass::Int8), int8);
    let f32 = Touched { bytes: 4 * F32_WEIGHTS, weights: F32_WEIGHTS };
    assert_eq!(dense.by_class.get(KernelClass::F32), f32);
    assert_eq!(dense.by_class.bytes(), dense.stored);
}

/// Two threads multiply 2 x 8.7 G weights of 4 bits a second, for which memory could bring 20 G; of 8 bits
/// 2 x 11.8 G, for which it brings 10 G; of 32 bits 2 x 3.5 G against 2.5 G.
#[test]
fn each_class_takes_the_longer_of_memory_and_kernels() {
    let plan = plan(&machine(), "avx512", Numerics::Exact);
    let memory = (INT8_BYTES + 4 * F32_WEIGHTS + CACHE_BYTES) as f64 / 10e9;
    check(&plan, memory, INT4_WEIGHTS as f64 / 17.4e9);
    says(
        &plan,
        "kernel rate in G weights/s 7.0 over f32, 23.6 over int8, 17.4 over int4: assumed for avx512, \
         2 threads, exact numerics (what one Xeon at 2.3 GHz was measured at)",
    );
}

/// 2 x 20 G weights of 4 bits a second are more than memory brings; floats are as fast as before.
#[test]
fn fast_numerics_have_rates_of_their_own() {
    let bytes = INT4_BYTES + INT8_BYTES + 4 * F32_WEIGHTS + CACHE_BYTES;
    let fast = plan(&machine(), "avx512", Numerics::Fast);
    check(&fast, bytes as f64 / 10e9, 0.0);
    assert_eq!(fast.prediction.touched_bytes_per_token, Bytes(bytes));
    says(
        &fast,
        "kernel rate in G weights/s 7.0 over f32, 34.0 over int8, 40.0 over int4: assumed for avx512, \
         2 threads, fast numerics (what one Xeon at 2.3 GHz was measured at)",
    );
    let exact = plan(&machine(), "avx2", Numerics::Exact);
    let memory = (INT8_BYTES + 4 * F32_WEIGHTS + CACHE_BYTES) as f64 / 10e9;
    check(&exact, memory, INT4_WEIGHTS as f64 / 7.8e9);
    let fast = plan(&machine(), "avx2", Numerics::Fast);
    check(&fast, bytes as f64 / 10e9, 0.0);
    assert!(exact.prediction.decode_tokens_per_s.p50 < fast.prediction.decode_tokens_per_s.p50);
}

/// Plain code is taken to be equally slow over all.
#[test]
fn plain_code_has_one_rate_that_nobody_measured() {
    for numerics in [Numerics::Exact, Numerics::Fast] {
        let plan = plan(&machine(), "scalar", numerics);
        let memory = (4 * F32_WEIGHTS + CACHE_BYTES) as f64 / 10e9;
        check(&plan, memory, (INT4_WEIGHTS + INT8_WEIGHTS) as f64 / 8e9);
        let how = numerics.name();
        says(
            &plan,
            &format!(
                "kernel rate in G weights/s 8.0 over f32, 8.0 over int8, 8.0 over int4: assumed for \
                 scalar, 2 threads, {how} numerics"
            ),
        );
    }
}

/// With four times the bandwidth memory brings 10 G weights of 32 bits, 40 G of 8 and 80 G of 4 bits; four
/// threads multiply 14, 47.2 and 34.8 G.
#[test]
fn what_if_changes_both_sides() {
    let mut facts = machine();
    let changes: WhatIf = "mem=40GB/s,cores=4".parse().unwrap();
    assert_eq!(changes.apply(&mut facts).len(), 2);
    let plan = plan(&facts, "avx512", Numerics::Exact);
    let memory = (INT8_BYTES + 4 * F32_WEIGHTS + CACHE_BYTES) as f64 / 40e9;
    check(&plan, memory, INT4_WEIGHTS as f64 / 34.8e9);
}
