//! What would make a model fit that does not: every change that is listed is enough, by itself and to
//! the byte, and none that would be is left out.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

mod support;

use std::sync::LazyLock;

use support::{Checkpoint, Form};
use tierkeep_doctor::{Fact, Facts, GpuFact};
use tierkeep_plans::budget::KvElement;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::place::DenseRule;
use tierkeep_plans::plan::{Abilities, Need};
use tierkeep_plans::planner::{
    self, FittingChange, FittingChangeKind as Kind, Options, PlanRefusal, WouldFit,
};
use tierkeep_plans::units::{Bytes, SizeRequest};

static GLM: LazyLock<Catalogue> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::glm(Form::INT8).write(dir.path());
    Catalogue::open(dir.path()).unwrap()
});

/// An engine of main memory and one sequence.
const PLAIN: Abilities = Abilities {
    vram: false,
    mapped_dense: false,
    streamed_dense: false,
    sessions: false,
    frequency: false,
    prefetch: false,
};

fn machine() -> Facts {
    let card = GpuFact {
        memory_free_bytes: Fact::read(2_000_000_000, ""),
        name: Fact::read("A Card".to_owned(), ""),
        ..GpuFact::default()
    };
    let mut facts = Facts::default();
    facts.memory.usable_bytes = Fact::read(24_000_000_000, "");
    facts.gpus.nvidia = Fact::read(vec![card], "");
    facts
}

/// Much of everything.
fn asked() -> Options {
    Options {
        context: Some(512),
        sessions: Some(8),
        prefill_batch: Some(256),
        slots: Some(6),
        engine: PLAIN,
        ..Options::default()
    }
}

fn within(options: &Options, budget: u64) -> Options {
    Options { ram: Some(SizeRequest::Absolute(Bytes(budget))), ..options.clone() }
}

fn fits(options: &Options) -> bool {
    planner::plan(&GLM, &machine(), options, None).is_ok()
}

fn refused(options: &Options, budget: u64) -> WouldFit {
    match planner::plan(&GLM, &machine(), &within(options, budget), None) {
        Err(PlanRefusal::DoesNotFit { would_fit, .. }) => *would_fit,
        other => panic!("{other:?}"),
    }
}

fn number(change: &FittingChange) -> u64 {
    change.flag.split_once(' ').unwrap().1.parse().unwrap()
}

/// What was asked for with the change, and with a little less of it, where there is less.
fn with(options: &Options, change: &FittingChange) -> (Options, Option<Options>) {
    let of = |set: &dyn Fn(&mut Options, u64)| {
        let mut both = [options.clone(), options.clone()];
        set(&mut both[0], number(change));
        set(&mut both[1], number(change) + 1);
        let [exact, less] = both;
        (exact, (number(change) > 1).then_some(less))
    };
    match change.change {
        Kind::Context => of(&|options, n| options.context = Some(n)),
        // One sequence is listed for engines that hold no more.
        Kind::Sessions => of(&|options, n| options.sessions = Some(n)),
        Kind::Batch => of(&|options, n| options.prefill_batch = Some(n)),
        Kind::Slots => of(&|options, n| options.slots = Some(n as u32)),
        Kind::Kv => (Options { kv: Some(KvElement::F16), ..options.clone() }, None),
        Kind::Streaming => (Options { dense: DenseRule::Streamed, ..options.clone() }, None),
        Kind::Vram => {
            let vram = Some(SizeRequest::Absolute(Bytes(number(change))));
            (Options { vram, ..options.clone() }, None)
        }
    }
}

#[test]
fn every_change_is_enough_by_itself_and_needs_what_it_says() {
    let options = asked();
    let full = refused(&options, 1).resident_budget.unwrap().0;
    let mut seen = Vec::new();
    // From next to nothing to a byte too little.
    for budget in [1, full / 2, full * 3 / 4, full * 9 / 10, full * 97 / 100, full - 1] {
        for change in &refused(&options, budget).changes {
            let what = format!("{change:?} within {budget}");
            assert!(change.needs_bytes.0 <= budget, "{what}");
            let (exact, less) = with(&options, change);
            assert!(fits(&within(&exact, budget)), "{what}");
            assert!(fits(&within(&exact, change.needs_bytes.0)), "{what}");
            assert!(!fits(&within(&exact, change.needs_bytes.0 - 1)), "{what}");
            if let Some(less) = less {
                assert!(!fits(&within(&less, budget)), "more would fit than {what}");
            }
            seen.push(change.change);
        }
    }
    for kind in [
        Kind::Context,
        Kind::Kv,
        Kind::Sessions,
        Kind::Batch,
        Kind::Slots,
        Kind::Streaming,
        Kind::Vram,
    ] {
        assert!(seen.contains(&kind), "{kind:?} is never offered: {seen:?}");
    }
}

#[test]
fn budgets_are_the_least_with_and_without_streaming() {
    let options = asked();
    let would = refused(&options, 1);
    let (resident, streamed) = (would.resident_budget.unwrap().0, would.streamed_budget.unwrap().0);
    assert!(streamed < resident);
    assert!(fits(&within(&options, resident)) && !fits(&within(&options, resident - 1)));
    let streaming = Options { dense: DenseRule::Auto, engine: Abilities::ALL, ..options };
    let streaming = Options { vram: Some(SizeRequest::Absolute(Bytes(0))), ..streaming };
    assert!(fits(&within(&streaming, streamed)) && !fits(&within(&streaming, streamed - 1)));
}

#[test]
fn what_needs_more_than_main_memory_says_so() {
    let full = refused(&asked(), 1).resident_budget.unwrap().0;
    for change in refused(&asked(), full - 1).changes {
        let expected = match change.change {
            Kind::Streaming => Some(Need::StreamedDense),
            Kind::Vram => Some(Need::Vram),
            Kind::Sessions if number(&change) > 1 => Some(Need::Sessions(number(&change))),
            Kind::Sessions | Kind::Context | Kind::Kv | Kind::Batch | Kind::Slots => None,
        };
        assert_eq!(change.needs, expected, "{change:?}");
    }
}

#[test]
fn nothing_is_offered_that_was_not_asked_for() {
    let options = Options { engine: PLAIN, kv: Some(KvElement::F16), ..Options::default() };
    let full = refused(&options, 1).resident_budget.unwrap().0;
    let kinds: Vec<Kind> = refused(&options, full - 1).changes.iter().map(|c| c.change).collect();
    assert_eq!(kinds, [Kind::Context, Kind::Streaming, Kind::Vram]);
}
