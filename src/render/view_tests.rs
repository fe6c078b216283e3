//! What a person sees of models and plans, in every style: the small model of `examples/` planned for
//! machines whose facts are written down in `testing`, so that no figure is of the machine that runs the
//! test.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::path::Path;

use tierkeep_doctor::{Fact, Facts};
use tierkeep_plans::catalogue::{Catalogue, Outline};
use tierkeep_plans::compare;
use tierkeep_plans::explain::{self, Subject};
use tierkeep_plans::inspect::Inspection;
use tierkeep_plans::place::{DenseRule, DoesNotFit};
use tierkeep_plans::plan::{Abilities, Plan};
use tierkeep_plans::planner::{self, Options, PlanRefusal, WouldFit};
use tierkeep_plans::stale;
use tierkeep_plans::units::{Bytes, SizeRequest};
use tierkeep_plans::what_if::WhatIf;

use super::testing::{machine, nano, snapshot, workstation};
use super::{
    Misfit, PlanView, differences, does_not_fit, explanation, inspection, plan, staleness,
};
use crate::commands::shared::Lack;

fn options(ram: u64) -> Options {
    Options {
        ram: Some(SizeRequest::Absolute(Bytes(ram))),
        context: Some(512),
        ..Options::default()
    }
}

fn planned(model: &Catalogue, facts: &Facts, options: &Options) -> Plan {
    planner::plan(model, facts, options, None).unwrap()
}

#[test]
fn a_model() {
    let view = Inspection::of(&nano());
    snapshot("inspect", |style| inspection(&view, style));
}

#[test]
fn a_model_of_an_unknown_family() {
    let folder = tempfile::tempdir().unwrap();
    let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/glm-nano");
    let config = std::fs::read_to_string(nano.join("config.json")).unwrap();
    let other = config.replace("glm_moe_dsa", "of_tomorrow");
    std::fs::write(folder.path().join("config.json"), other).unwrap();
    let shard = "model-00001-of-00001.safetensors";
    std::fs::copy(nano.join(shard), folder.path().join(shard)).unwrap();
    let outline = Outline::open(folder.path()).unwrap();
    let view = Inspection::outline(Path::new("/models/of-tomorrow"), &outline);
    snapshot("inspect-unknown-family", |style| inspection(&view, style));
}

#[test]
fn a_plan_that_does_not_hold_every_expert() {
    let model = nano();
    let made = planned(&model, &machine(), &options(28_000_000));
    snapshot("plan", |style| plan(&PlanView::bare(&made), &model, style));
}

#[test]
fn a_plan_for_a_machine_that_does_not_exist() {
    let model = nano();
    let mut facts = machine();
    let changes: WhatIf = "ram=64GB,disk=7GB/s".parse().unwrap();
    let replaced = changes.apply(&mut facts);
    let made = planned(&model, &facts, &Options { ram: None, ..options(0) });
    let view = PlanView { replaced: &replaced, ..PlanView::bare(&made) };
    snapshot("plan-what-if", |style| plan(&view, &model, style));
}

#[test]
fn a_plan_with_a_card() {
    let model = nano();
    let made = planned(&model, &workstation(), &options(28_000_000));
    assert_eq!(made.placement.cards.len(), 1, "the busy card is not used");
    let lacks = [Lack {
        what: "weights on graphics cards".to_owned(),
        remedy: "plan without graphics cards: --vram 0".to_owned(),
    }];
    let view = PlanView { lacks: &lacks, ..PlanView::bare(&made) };
    snapshot("plan-card", |style| plan(&view, &model, style));
}

#[test]
fn a_plan_that_streams_dense_weights() {
    let model = nano();
    let options = Options { dense: DenseRule::Streamed, ..options(28_000_000) };
    let made = planned(&model, &machine(), &options);
    snapshot("plan-streamed", |style| plan(&PlanView::bare(&made), &model, style));
}

#[test]
fn what_does_not_fit() {
    let model = nano();
    let refused = |options: &Options| {
        let refusal = planner::plan(&model, &workstation(), options, None).unwrap_err();
        let PlanRefusal::DoesNotFit { result, would_fit, .. } = refusal else {
            panic!("{refusal}")
        };
        (result, would_fit)
    };
    let engine = Abilities {
        vram: false,
        mapped_dense: false,
        streamed_dense: false,
        sessions: false,
        frequency: false,
        prefetch: false,
    };
    let view = |(result, would_fit): &(Box<DoesNotFit>, Box<WouldFit>), style| {
        does_not_fit(&Misfit { model: &model.directory, result, would_fit, engine }, style)
    };
    let nothing = refused(&Options { engine, ..options(1_000_000) });
    snapshot("plan-does-not-fit", |style| view(&nothing, style));
    let much = refused(&Options {
        sessions: Some(4),
        prefill_batch: Some(512),
        slots: Some(20),
        context: Some(1024),
        engine,
        ..options(44_500_000)
    });
    snapshot("plan-does-not-fit-yet", |style| view(&much, style));
}

#[test]
fn two_plans() {
    let model = nano();
    let first = planned(&model, &machine(), &options(24_000_000));
    let second = planned(&model, &machine(), &options(28_000_000));
    let found = compare::compare(&first, &second).unwrap();
    let (before, after) = (Path::new("before.toml"), Path::new("after.toml"));
    snapshot("plan-diff", |style| differences(before, after, &found, style));
    snapshot("plan-diff-none", |style| differences(before, before, &[], style));
}

#[test]
fn a_plan_and_the_machine_of_today() {
    let model = nano();
    let made = planned(&model, &workstation(), &options(28_000_000));
    let mut today = workstation();
    today.memory.usable_bytes = Fact::read(20_000_000, "group /user limits it (memory.max)");
    today.cpu.usable_threads = Fact::read(16, "");
    today.gpus.nvidia = Fact::read(Vec::new(), "");
    let found = stale::check(&made, &model, &today);
    let path = Path::new("plan.toml");
    snapshot("plan-check-stale", |style| staleness(path, &found, style));
    let found = stale::check(&made, &model, &workstation());
    snapshot("plan-check-holds", |style| staleness(path, &found, style));
}

#[test]
fn one_weight() {
    let model = nano();
    let made = planned(&model, &machine(), &options(28_000_000));
    for (name, what) in [
        ("plan-explain-expert", "3:17"),
        ("plan-explain-head", "lm_head.weight"),
        ("plan-explain-embedding", "embedding"),
    ] {
        let found = explain::explain(Subject::find(&model, what).unwrap(), &model, &made, None);
        snapshot(name, |style| explanation(&found, style));
    }
}
