//! Two models within one budget: together never above it, and neither short while the other has room.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail as tests do")]

mod support;

use std::sync::LazyLock;

use proptest::prelude::*;
use support::{Checkpoint, Form};
use tierkeep_doctor::{Fact, Facts};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::planner::{self, Options, PairRefusal, PlanRefusal, plan_pair};
use tierkeep_plans::units::{Bytes, SizeRequest};

fn open(form: Form) -> Catalogue {
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::glm(form).write(dir.path());
    Catalogue::open(dir.path()).unwrap()
}

static FLOATS: LazyLock<Catalogue> = LazyLock::new(|| open(Form::Bf16));
static PACKED: LazyLock<Catalogue> = LazyLock::new(|| open(Form::INT4));

const HELD: Bytes = Bytes(100_000);

fn options(ram: u64) -> Options {
    Options {
        ram: Some(SizeRequest::Absolute(Bytes(ram))),
        context: Some(64),
        ..Options::default()
    }
}

/// The least budget that both need, as the refusal says it.
fn least() -> u64 {
    let error =
        plan_pair([&FLOATS, &PACKED], &Facts::default(), [&options(1); 2], HELD).unwrap_err();
    let PairRefusal::DoesNotFit { least, held, needed, .. } = &error else { panic!("{error}") };
    assert_eq!((least[0] + least[1] + *held, *held), (*needed, HELD));
    let said = error.to_string();
    for part in [least[0].to_string(), least[1].to_string(), needed.to_string()] {
        assert!(said.contains(&part), "{said}");
    }
    needed.0
}

#[test]
fn the_least_that_is_named_is_enough() {
    let least = least();
    let pair = |ram| plan_pair([&FLOATS, &PACKED], &Facts::default(), [&options(ram); 2], HELD);
    assert!(matches!(pair(least - 1), Err(PairRefusal::DoesNotFit { .. })));
    let plans = pair(least).unwrap();
    plans[0].check(&FLOATS).unwrap();
    plans[1].check(&PACKED).unwrap();
}

#[test]
fn two_that_fit_have_all_of_theirs() {
    let roomy = options(1 << 32);
    let plans = plan_pair([&FLOATS, &PACKED], &Facts::default(), [&roomy; 2], HELD).unwrap();
    for (plan, model) in plans.iter().zip([&*FLOATS, &*PACKED]) {
        let alone = planner::plan(model, &Facts::default(), &roomy, None).unwrap();
        assert_eq!(plan.placement.slots, alone.placement.slots);
        assert!(plan.request.budget_source.contains("for two"), "{}", plan.request.budget_source);
    }
}

#[test]
fn a_budget_above_the_machine_is_refused_for_both_together() {
    let mut machine = Facts::default();
    machine.memory.usable_bytes = Fact::read(1 << 30, "test");
    let error = plan_pair([&FLOATS, &PACKED], &machine, [&options(1 << 31); 2], HELD).unwrap_err();
    assert!(matches!(error, PairRefusal::Plan(PlanRefusal::OverMachine { .. })), "{error}");
}

proptest! {
    #[test]
    fn together_they_are_never_above_the_budget(above in 0_u64..3_000_000) {
        let budget = least() + above;
        let plans =
            plan_pair([&FLOATS, &PACKED], &Facts::default(), [&options(budget); 2], HELD).unwrap();
        let parts: u64 = plans.iter().map(|plan| plan.request.budget_bytes.0).sum();
        prop_assert!(parts + HELD.0 <= budget);
        for (plan, model) in plans.iter().zip([&*FLOATS, &*PACKED]) {
            prop_assert!(plan.check(model).is_ok());
            prop_assert!(plan.ledger.total() <= plan.request.budget_bytes);
        }
    }
}
