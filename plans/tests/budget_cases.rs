//! Cases from the field about the budget, by their number.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

mod support;

use std::sync::LazyLock;

use support::hollow::glm_5_2_int4;
use support::{Checkpoint, Form};
use tierkeep_doctor::{Fact, Facts};
use tierkeep_plans::budget::{self, KvElement, Line, ModelBytes};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::place::DenseRule;
use tierkeep_plans::plan::{Abilities, ExpertTier, IoMode, Need, Plan, Policy};
use tierkeep_plans::planner::{self, Options, PinRule, PlanRefusal};
use tierkeep_plans::units::{Bytes, LayerId, SizeRequest};
use tierkeep_plans::usage::{History, Session};

const GB: u64 = 1_000_000_000;

static GLM_FULL: LazyLock<Catalogue> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    glm_5_2_int4(dir.path());
    Catalogue::open(dir.path()).unwrap()
});

fn machine(ram: u64) -> Facts {
    let mut facts = Facts::default();
    facts.memory.usable_bytes = Fact::read(ram, "MemAvailable of this test");
    facts.cpu.usable_threads = Fact::read(8, "affinity of this test");
    facts
}

fn ram(bytes: u64) -> Options {
    let ram = Some(SizeRequest::Absolute(Bytes(bytes)));
    Options { ram, context: Some(4096), ..Options::default() }
}

fn plan(available: u64, options: &Options) -> Result<Plan, PlanRefusal> {
    let plan = planner::plan(&GLM_FULL, &machine(available), options, None)?;
    plan.check(&GLM_FULL).unwrap();
    Ok(plan)
}

fn slots(plan: &Plan) -> u64 {
    plan.placement.slots.caps.iter().map(|&cap| u64::from(cap)).sum()
}

/// A history of `n_tokens` tokens that always go to experts 40 to 47 of every layer.
fn history(n_tokens: usize) -> History {
    let layers: Vec<LayerId> = (3..78).map(LayerId).collect();
    let mut session = Session::new(&GLM_FULL.fingerprint, &layers, 256, 8);
    let token: Vec<u16> = (0..75).flat_map(|_| 40..48).collect();
    for _ in 0..n_tokens {
        session.record_token(&token);
    }
    let mut history = History::new(session.shape().clone());
    history.merge(&session).unwrap();
    history
}

/// 3 GB asked for, or 3 GB there: a budget of 3 GB, and "does not fit" with its ledger.
#[test]
fn b1_a_small_budget_stays_small() {
    let resident = |options: Options| Options { dense: DenseRule::Resident, ..options };
    let asked = resident(ram(3 * GB));
    let there = resident(Options { context: Some(4096), ..Options::default() });
    for (available, options, budget) in [(64 * GB, asked, 3 * GB), (4 * GB, there, 3 * GB)] {
        let PlanRefusal::DoesNotFit { result, .. } = plan(available, &options).unwrap_err() else {
            panic!("it fits")
        };
        assert_eq!(result.budget, Bytes(budget));
        assert_eq!(result.ledger.total(), result.smallest_budget);
        assert_eq!(result.ledger.0.len(), Line::ALL.len());
        assert!(result.smallest_budget > Bytes(10 * GB));
    }
    // With dense weights streamed it fits, within the same 3 GB.
    let streamed = plan(64 * GB, &ram(3 * GB)).unwrap();
    assert_eq!(streamed.request.budget_bytes, Bytes(3 * GB));
    assert!(streamed.ledger.total() <= Bytes(3 * GB));
}

#[test]
fn b2_more_than_the_machine_has_is_refused_unless_insisted_on() {
    let refusal = plan(24 * GB, &ram(500 * GB)).unwrap_err();
    assert!(matches!(refusal, PlanRefusal::OverMachine { .. }));
    assert!(refusal.to_string().contains("24.00 GB"), "{refusal}");
    let insisted = Options { allow_overcommit: true, ..ram(500 * GB) };
    assert_eq!(plan(24 * GB, &insisted).unwrap().request.budget_bytes, Bytes(500 * GB));
}

/// Rows of mixed width are each priced at their own; a multi-token-prediction layer at 8 bits that is
/// not loaded makes nothing dearer.
#[test]
fn b3_experts_are_priced_in_the_type_they_are_held_in() {
    let held = plan(64 * GB, &ram(40 * GB)).unwrap();
    assert_eq!(held.ledger.bytes(Line::ExpertsInFlight).0, 8 * 18_915_328);
    assert_eq!(held.ledger.bytes(Line::ExpertCache).0, slots(&held) * 18_915_328);
    let mut mixed = Checkpoint::olmoe(Form::Bf16);
    let int4 = Checkpoint::olmoe(Form::INT4);
    let in_layer_1 = |name: &str| name.contains("layers.1.mlp.experts");
    mixed.tensors.retain(|t| !in_layer_1(&t.name));
    mixed.tensors.extend(int4.tensors.into_iter().filter(|t| in_layer_1(&t.name)));
    let dir = tempfile::tempdir().unwrap();
    mixed.write(dir.path());
    let model = Catalogue::open(dir.path()).unwrap();
    // bf16: three matrices of 8 x 16. int4: half a byte each, and 8, 8 and 16 scales.
    let (wide, narrow) = (3 * 8 * 16 * 2, 3 * 64 + 4 * (8 + 8 + 16));
    assert_eq!(
        [0, 1].map(|layer| budget::slot_bytes(&model, layer, IoMode::Dropped)),
        [Bytes(wide), Bytes(narrow)]
    );
    let options = Options { slots: Some(3), context: Some(20), ..ram(GB) };
    let plan = planner::plan(&model, &machine(2 * GB), &options, None).unwrap();
    assert_eq!(plan.ledger.bytes(Line::ExpertCache), Bytes(3 * wide + 3 * narrow));
}

/// Every line is there, and with what is unused they sum to the budget.
#[test]
fn b4_every_byte_of_the_budget_is_accounted_for() {
    for budget in [3, 9, 12, 20, 100, 390, 500] {
        let plan = plan(600 * GB, &ram(budget * GB)).unwrap();
        let lines: Vec<Line> = plan.ledger.0.iter().map(|l| l.line).collect();
        assert_eq!(lines, Line::ALL);
        let sum: u64 = plan.ledger.0.iter().map(|l| l.bytes.0).sum();
        assert_eq!(sum + plan.unused_bytes.0, budget * GB);
        let mut hidden = plan.clone();
        hidden.unused_bytes.0 += 64;
        assert!(hidden.check(&GLM_FULL).unwrap_err().to_string().contains("unused_bytes"));
    }
}

/// Nothing that is decided after the budget is divided changes how much is used: not pins, not a
/// policy, not an estimate.
#[test]
fn b5_one_budget_has_one_owner() {
    let history = history(120);
    let with = |options: Options| {
        planner::plan(&GLM_FULL, &machine(64 * GB), &options, Some(&history)).unwrap()
    };
    let plain = with(Options { pins: PinRule::None, ..ram(30 * GB) });
    for options in [
        Options { pins: PinRule::Share(0.5), ..ram(30 * GB) },
        Options { policy: Some(Policy::Static), ..ram(30 * GB) },
        Options { policy: Some(Policy::Frequency), ..ram(30 * GB) },
        ram(30 * GB),
    ] {
        let plan = with(options);
        plan.check(&GLM_FULL).unwrap();
        assert_eq!(plan.placement.slots.caps, plain.placement.slots.caps);
        assert_eq!(plan.ledger.total(), plain.ledger.total());
        let sums = ModelBytes::of(&GLM_FULL, IoMode::Dropped);
        assert_eq!(plan.ledger, budget::host_ledger(&sums, &plan.workload(), &plan.holding()));
        // What is at hand is what the tiers say, and no more.
        let at_hand: u64 = [ExpertTier::Vram, ExpertTier::Pinned, ExpertTier::Cache]
            .map(|tier| plan.tiers.iter().find(|t| t.tier == tier).unwrap().experts)
            .iter()
            .sum();
        assert_eq!(at_hand, slots(&plan));
    }
}

/// Below a third of one token's routed bytes the plan says that replacement cannot help, and pins.
#[test]
fn b6_below_one_token_the_policy_changes() {
    // 600 experts a token; some 100 slots.
    let options = ram(13_400_000_000);
    let bare = plan(64 * GB, &options).unwrap();
    assert!((20..200).contains(&slots(&bare)), "{}", slots(&bare));
    let evidence = &bare.placement.policy_evidence;
    assert!(evidence.contains("replacement cannot help"), "{evidence}");
    assert!(evidence.contains("no usage history"), "{evidence}");
    assert_eq!(bare.placement.policy, Policy::Recency);
    let history = history(120);
    let with =
        |options: &Options| planner::plan(&GLM_FULL, &machine(64 * GB), options, Some(&history));
    let pinned = with(&options).unwrap();
    pinned.check(&GLM_FULL).unwrap();
    assert_eq!(pinned.placement.policy, Policy::Static);
    assert!(pinned.placement.policy_evidence.contains("replacement cannot help"));
    let slots = &pinned.placement.slots;
    for (cap, pins) in slots.caps.iter().zip(&slots.pins) {
        assert_eq!(pins.len(), *cap as usize);
        assert!(pins.iter().all(|pin| (40..48).contains(pin)), "{pins:?}");
    }
    assert_eq!(pinned.ledger.bytes(Line::ExpertCache), Bytes(0));
    assert!(pinned.prediction.hit_rate.p50 > bare.prediction.hit_rate.p50);
    // The engine of today has pins, but no frequency.
    let today = Abilities { frequency: false, ..Abilities::ALL };
    assert_eq!(pinned.needs_beyond(&today), []);
    let around = Options { engine: today, ..ram(20 * GB) };
    let around = with(&around).unwrap();
    assert_eq!(around.placement.policy, Policy::Recency);
    assert!(around.placement.policy_evidence.contains("frequency wins"));
    let able = with(&ram(20 * GB)).unwrap();
    assert_eq!(able.placement.policy, Policy::Frequency);
    assert_eq!(able.needs_beyond(&today), [Need::Policy(Policy::Frequency)]);
    assert_eq!(with(&ram(30 * GB)).unwrap().placement.policy, Policy::Recency);
}

/// The split between the engine's cache and the kernel's is chosen: never two copies of an expert.
#[test]
fn b7_one_cache_never_two() {
    let io =
        |io, budget: u64| plan(500 * GB, &Options { io: Some(io), ..ram(budget * GB) }).unwrap();
    let buffered = io(IoMode::Buffered, 100);
    assert_eq!(slots(&buffered), 0);
    assert!(buffered.placement.page_cache_bytes > Bytes(80 * GB));
    assert!(buffered.placement.cache_evidence.contains("leaves experts to the kernel"));
    let tier = |plan: &Plan, tier| plan.tiers.iter().find(|t| t.tier == tier).unwrap().clone();
    assert!(tier(&buffered, ExpertTier::PageCache).experts > 4000);
    assert!(tier(&buffered, ExpertTier::PageCache).access_share > 0.3);
    assert_eq!(buffered.prediction.hit_rate.p50, 0.0);
    let dropped = io(IoMode::Dropped, 100);
    assert!(slots(&dropped) > 4000);
    assert_eq!(dropped.placement.page_cache_bytes, Bytes(0));
    assert!(
        dropped.prediction.decode_tokens_per_s.p50 >= buffered.prediction.decode_tokens_per_s.p50
    );
    // More memory than the model: everything has its place, and the rest is not taken.
    for mode in [IoMode::Dropped, IoMode::Buffered] {
        let whole = io(mode, 500);
        assert_eq!(slots(&whole), 19_200);
        assert_eq!(whole.placement.page_cache_bytes, Bytes(0));
        assert!(whole.unused_bytes > Bytes(100 * GB), "{}", whole.unused_bytes);
        assert!(whole.placement.cache_evidence.contains("no cache is needed"));
    }
}

/// One setting by hand, the rest solved around it; none is ever ignored.
#[test]
fn b8_the_rest_is_solved_around_what_is_set() {
    let set = |n| plan(64 * GB, &Options { slots: Some(n), ..ram(20 * GB) });
    let three = set(3).unwrap();
    assert_eq!(three.placement.slots.caps[..4], [0, 0, 0, 3]);
    assert_eq!(slots(&three), 3 * 75);
    assert!(three.unused_bytes > Bytes(GB));
    assert_eq!(slots(&set(0).unwrap()), 0);
    let PlanRefusal::DoesNotFit { result, .. } =
        plan(64 * GB, &Options { slots: Some(12), dense: DenseRule::Resident, ..ram(20 * GB) })
            .unwrap_err()
    else {
        panic!("it fits")
    };
    assert_eq!(result.ledger.bytes(Line::ExpertCache), Bytes(12 * 75 * 18_915_328));
    let fits =
        Options { slots: Some(12), dense: DenseRule::Resident, ..ram(result.smallest_budget.0) };
    assert_eq!(slots(&plan(64 * GB, &fits).unwrap()), 12 * 75);
    // Around slots that take most of the budget, dense weights are streamed.
    let around = set(12).unwrap();
    assert_eq!(slots(&around), 12 * 75);
    assert!(!around.placement.streamed.layers.is_empty());
    assert!(set(257).unwrap_err().to_string().contains("--slots 257: expected 0 to 256"));
    let policy = Options { policy: Some(Policy::Static), ..ram(30 * GB) };
    let policy = plan(64 * GB, &policy).unwrap();
    assert_eq!(policy.placement.policy, Policy::Static);
    assert!(policy.placement.pins_evidence.contains("assumed: there is no usage history"));
}

#[test]
fn b9_four_sessions_are_four_caches() {
    let with = |sessions| {
        let options = Options {
            sessions: Some(sessions),
            context: Some(32_768),
            kv: Some(KvElement::F16),
            ..ram(40 * GB)
        };
        plan(64 * GB, &options).unwrap()
    };
    let (one, four) = (with(1), with(4));
    let of_one = 78 * 32_768 * (512 + 64) * 2;
    assert_eq!(one.ledger.bytes(Line::KvCache), Bytes(of_one));
    assert_eq!(four.ledger.bytes(Line::KvCache), Bytes(4 * of_one));
    assert_eq!(four.ledger.bytes(Line::IndexerKeys).0, 4 * one.ledger.bytes(Line::IndexerKeys).0);
    assert!(slots(&four) < slots(&one));
    let kv = four.ledger.0.iter().find(|l| l.line == Line::KvCache).unwrap();
    assert!(kv.note.contains("4 sequences"), "{}", kv.note);
    let today = Abilities { sessions: false, ..Abilities::ALL };
    assert_eq!(four.needs_beyond(&today), [Need::Sessions(4)]);
    let too_many = Options { sessions: Some(0), ..ram(40 * GB) };
    assert!(plan(64 * GB, &too_many).unwrap_err().to_string().contains("--sessions 0"));
}
