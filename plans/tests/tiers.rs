//! Plans over several tiers: graphics cards, main memory, disk. What must hold for every machine, and
//! what GLM-5.2 at full size must come to.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

mod support;

use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;
use support::hollow::glm_5_2_int4;
use support::{Checkpoint, Form};
use tierkeep_doctor::{DiskReadSpeed, Fact, Facts, GpuFact};
use tierkeep_plans::budget::{
    CardLine, CardPlacement, ExpertList, Holding, LayerExperts, Line, ModelBytes, Slots, Streamed,
};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::estimate::{self, Compute, ExpectedHits, Rates, View};
use tierkeep_plans::place::DenseRule;
use tierkeep_plans::plan::{Abilities, EngineSettings, ExpertTier, IoMode, Need, Plan, Range};
use tierkeep_plans::planner::{self, Change, Options, PlanRefusal};
use tierkeep_plans::units::{Bytes, SizeRequest};

const GB: u64 = 1_000_000_000;
/// A routed expert of GLM-5.2 at 4 bits: two of 2048 x 6144 and one of 6144 x 2048, a scale a row.
const EXPERT: u64 = 3 * 2048 * 6144 / 2 + 4 * (2048 + 2048 + 6144);

fn open(checkpoint: &Checkpoint) -> Catalogue {
    let dir = tempfile::tempdir().unwrap();
    checkpoint.write(dir.path());
    Catalogue::open(dir.path()).unwrap()
}

static GLM_FULL: LazyLock<Catalogue> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    glm_5_2_int4(dir.path());
    Catalogue::open(dir.path()).unwrap()
});

static OLMOE: LazyLock<Catalogue> = LazyLock::new(|| open(&Checkpoint::olmoe(Form::Bf16)));
static GLM: LazyLock<Catalogue> = LazyLock::new(|| open(&Checkpoint::glm(Form::INT8)));

fn card(free: u64) -> GpuFact {
    GpuFact {
        name: Fact::read("card of this test".to_owned(), "test"),
        memory_total_bytes: Fact::read(free + GB, "test"),
        memory_free_bytes: Fact::read(free, "test"),
        ..GpuFact::default()
    }
}

fn machine(ram: u64, cards: &[u64]) -> Facts {
    let mut facts = Facts::default();
    facts.memory.usable_bytes = Fact::read(ram, "MemAvailable of this test");
    facts.cpu.usable_threads = Fact::read(16, "affinity of this test");
    facts.gpus.nvidia = Fact::read(cards.iter().map(|&free| card(free)).collect(), "test");
    facts
}

fn ram(bytes: u64) -> Options {
    Options { ram: Some(SizeRequest::Absolute(Bytes(bytes))), ..Options::default() }
}

fn experts_in_vram(plan: &Plan) -> u64 {
    plan.placement.cards.iter().map(CardPlacement::n_experts).sum()
}

fn slots(plan: &Plan) -> u64 {
    plan.placement.slots.caps.iter().map(|&cap| u64::from(cap)).sum()
}

/// What the issue asks of 20 GB: every line printed with their sum, at least 375 experts, and a word on
/// the multi-token-prediction layer.
#[test]
fn glm_5_2_in_20_gb_holds_more_than_375_experts() {
    assert_eq!(EXPERT, 18_915_328);
    let options = Options { context: Some(4096), ..ram(20 * GB) };
    let plan = planner::plan(&GLM_FULL, &machine(24 * GB, &[]), &options, None).unwrap();
    plan.check(&GLM_FULL).unwrap();
    assert!(slots(&plan) >= 375, "{}", slots(&plan));
    let lines: u64 = plan.ledger.0.iter().map(|l| l.bytes.0).sum();
    assert_eq!(lines + plan.unused_bytes.0, 20 * GB);
    assert!(plan.unused_bytes.0 < EXPERT, "{}", plan.unused_bytes);
    let dense = plan.ledger.0.iter().find(|l| l.line == Line::DenseWeights).unwrap();
    assert!(dense.note.contains("1 MTP layer present, not loaded"), "{}", dense.note);
    let held: u64 = plan.tiers.iter().map(|t| t.experts).sum();
    assert_eq!(held, 75 * 256);
}

/// The report's machine: 200 GB and four cards of 48 GB, 185 GB of them usable.
#[test]
fn glm_5_2_on_four_cards_is_no_slower_than_the_report_s_own_placement() {
    let machine = machine(200 * GB, &[46_250_000_000; 4]);
    let options = Options { context: Some(4096), ..ram(200 * GB) };
    let plan = planner::plan(&GLM_FULL, &machine, &options, None).unwrap();
    plan.check(&GLM_FULL).unwrap();
    assert_eq!(plan.placement.cards.len(), 4);
    assert_eq!(plan.request.vram_bytes, Bytes(185 * GB));
    let mut next = 0;
    for card in &plan.placement.cards {
        let named: Vec<CardLine> = card.ledger.0.iter().map(|l| l.line).collect();
        assert_eq!(named, CardLine::ALL);
        assert!(card.ledger.bytes(CardLine::DriverReserve) > Bytes(0));
        let lines: u64 = card.ledger.0.iter().map(|l| l.bytes.0).sum();
        assert_eq!(lines + card.unused_bytes.0, 46_250_000_000);
        // The experts are the remainder.
        let others = lines - card.ledger.bytes(CardLine::Experts).0;
        assert_eq!(card.n_experts(), (46_250_000_000 - others) / EXPERT);
        // What every token touches came first, in layers one after another.
        assert_eq!(card.first_layer, next);
        next = card.end_layer;
        assert!((15..=25).contains(&card.layers().len()), "{:?}", card.layers());
    }
    assert_eq!(next, 78);
    assert!(plan.placement.cards[3].head);
    assert_eq!(plan.ledger.bytes(Line::KvCache), Bytes(0));
    // Cold without the multi-token-prediction layer.
    let cold = plan.tiers.iter().find(|t| t.tier == ExpertTier::Disk).unwrap();
    assert!(cold.bytes < Bytes(5 * GB), "{}", cold.bytes);
    let speed = plan.prediction.decode_tokens_per_s.p50;
    let theirs = reports_speed(&machine, &plan);
    assert!(speed >= theirs, "{speed} {theirs}");
    assert_eq!(plan.needs_beyond(&Abilities { vram: false, ..Abilities::ALL }), [Need::Vram]);
}

/// The speed of 9,780 experts on cards, 125 slots a layer and all dense weights in main memory, by the
/// same estimate.
fn reports_speed(machine: &Facts, plan: &Plan) -> f64 {
    let sums = ModelBytes::of(&GLM_FULL, IoMode::Dropped);
    let on_cards = 9780 / 75;
    let mut slots = Slots::none(78);
    let mut experts = Vec::new();
    for layer in 3..78 {
        // 30 layers have one more.
        let n = on_cards + u32::from(layer < 33);
        experts.push(LayerExperts { layer, experts: ExpertList((0..n).collect()) });
        slots.caps[layer as usize] = 125;
    }
    let card = CardPlacement {
        card: 0,
        name: "all four".to_owned(),
        budget_bytes: Bytes(185 * GB),
        unused_bytes: Bytes(0),
        first_layer: 0,
        end_layer: 0,
        head: false,
        ledger: tierkeep_plans::budget::CardLedger::default(),
        experts,
    };
    assert_eq!(card.n_experts(), 9780);
    let cards = [card];
    let streamed = Streamed::default();
    let holding = Holding { cards: &cards, streamed: &streamed, ..Holding::in_memory(&slots) };
    // Nearly everything is somewhere in memory: what they miss is taken as nothing, to be fair to them.
    let hits = ExpectedHits {
        vram: 9780.0 / 19200.0,
        hit_rate: Range { p10: 1.0, p50: 1.0, p90: 1.0 },
        page_cache: 0.0,
    };
    let workload = plan.workload();
    let view = View { sums: &sums, workload: &workload, holding, hits };
    let EngineSettings { isa, threads, numerics, .. } = &plan.engine;
    let compute = Compute { isa, threads: *threads, numerics: *numerics };
    let rates = Rates::of(machine, compute, (EXPERT, plan.reads()), EXPERT);
    estimate::tokens_per_s(&view, &rates, 1.0)
}

/// M6: free memory drives the plan, not total. M7: memory that is the machine's is counted once.
#[test]
fn only_free_memory_of_a_card_s_own_is_planned_with() {
    let options = Options { context: Some(4096), ..ram(30 * GB) };
    let plan = |facts: &Facts| planner::plan(&GLM_FULL, facts, &options, None).unwrap();
    let busy = plan(&machine(32 * GB, &[46 * GB, 2 * GB]));
    assert_eq!(busy.request.vram_bytes, Bytes(48 * GB));
    for card in &busy.placement.cards {
        assert!(card.ledger.total() <= card.budget_bytes);
    }
    let mut unified = machine(32 * GB, &[46 * GB]);
    let mut own = card(46 * GB);
    own.is_unified = Fact::read(true, "test");
    unified.gpus.nvidia = Fact::read(vec![own], "test");
    let unified = plan(&unified);
    assert!(unified.placement.cards.is_empty());
    assert_eq!(unified.request.vram_bytes, Bytes(0));
    assert!(unified.request.vram_source.contains("counted there once"));
    let mut unknown = machine(32 * GB, &[]);
    let free = Fact::unknown("the driver does not tell");
    unknown.gpus.others = Fact::read(vec![GpuFact { memory_free_bytes: free, ..card(0) }], "test");
    let unknown = plan(&unknown);
    assert!(unknown.placement.cards.is_empty());
    assert!(unknown.request.vram_source.contains("the driver does not tell"));
    // M8: no driver, and its reason.
    let mut facts = machine(32 * GB, &[]);
    facts.gpus.nvidia = Fact::unknown("no NVIDIA driver: libnvidia-ml.so.1 not found");
    assert!(plan(&facts).request.vram_source.contains("no NVIDIA driver"));
}

#[test]
fn vram_is_what_was_asked_for_or_refused() {
    let facts = machine(32 * GB, &[30 * GB, 10 * GB]);
    let with = |vram: SizeRequest, engine: Abilities| {
        let options = Options { vram: Some(vram), engine, ..ram(30 * GB) };
        planner::plan(&GLM_FULL, &facts, &options, None)
    };
    let absolute = |bytes| SizeRequest::Absolute(Bytes(bytes));
    let plan = with(absolute(20 * GB), Abilities::ALL).unwrap();
    let budgets: Vec<u64> = plan.placement.cards.iter().map(|c| c.budget_bytes.0).collect();
    assert_eq!(budgets, [15 * GB, 5 * GB]);
    assert_eq!(
        with(SizeRequest::Percent(50.0), Abilities::ALL).unwrap().request.vram_bytes,
        Bytes(20 * GB)
    );
    assert!(with(absolute(0), Abilities::ALL).unwrap().placement.cards.is_empty());
    assert!(matches!(with(absolute(41 * GB), Abilities::ALL), Err(PlanRefusal::OverCards { .. })));
    assert!(matches!(with(absolute(GB / 10), Abilities::ALL), Err(PlanRefusal::NoVram { .. })));
    // Without cards in the engine they are used only by name.
    let cpu = Abilities { vram: false, ..Abilities::ALL };
    assert_eq!(with(absolute(20 * GB), cpu).unwrap().placement.cards.len(), 2);
    let options = Options { engine: cpu, ..ram(30 * GB) };
    let plan = planner::plan(&GLM_FULL, &facts, &options, None).unwrap();
    assert!(plan.placement.cards.is_empty());
    assert!(plan.request.vram_source.contains("--vram SIZE"), "{}", plan.request.vram_source);
    let none = planner::plan(
        &GLM_FULL,
        &machine(32 * GB, &[]),
        &Options { vram: Some(absolute(GB)), ..ram(30 * GB) },
        None,
    );
    assert!(matches!(none, Err(PlanRefusal::NoVram { .. })));
}

/// Too small for the dense weights: as many layers as fit, and no expert before the last of them.
#[test]
fn what_every_token_touches_goes_to_a_card_first() {
    let options = Options { context: Some(4096), ..ram(30 * GB) };
    let plan = planner::plan(&GLM_FULL, &machine(32 * GB, &[8 * GB]), &options, None).unwrap();
    plan.check(&GLM_FULL).unwrap();
    let [card] = plan.placement.cards.as_slice() else { panic!("{:?}", plan.placement.cards) };
    assert!(card.experts.is_empty() && !card.head);
    assert!((40..78).contains(&card.end_layer), "{}", card.end_layer);
    let layer =
        ModelBytes::of(&GLM_FULL, IoMode::Dropped).layers[card.end_layer as usize].dense.resident;
    let caches = (512 + 64 + 128) * 4096 * 4;
    assert!(card.unused_bytes < Bytes(layer + caches), "another layer would have fitted");
    assert_eq!(plan.placement.slots.caps[..3], [0, 0, 0]);
    assert!(slots(&plan) > 0);
}

#[test]
fn disk_is_taken_at_the_read_size_used_and_assumed_where_it_cannot_be_measured() {
    let options = Options { context: Some(4096), ..ram(20 * GB) };
    let mut facts = machine(24 * GB, &[]);
    let point = |read_bytes, queue_depth, bytes_per_s| DiskReadSpeed {
        bytes_per_s,
        read_bytes,
        queue_depth,
    };
    facts.disk.reads = Fact::measured(
        vec![point(65_536, 1, 0.1e9), point(16_000_000, 8, 3e9), point(16_000_000, 1, 2e9)],
        "reads of this test",
    );
    facts.disk.read = Fact::measured(point(16_000_000, 8, 3e9), "best of this test");
    let plan = planner::plan(&GLM_FULL, &facts, &options, None).unwrap();
    let has = |plan: &Plan, text: &str| plan.prediction.evidence.iter().any(|e| e.contains(text));
    assert!(
        has(&plan, "disk bandwidth 3.0 GB/s at reads of 16.00 MB, 8 under way"),
        "{:?}",
        plan.prediction.evidence
    );
    facts.disk.reads = Fact::unknown("not measurable: 65 GB/s is the page cache");
    facts.disk.read = Fact::unknown("not measurable: 65 GB/s is the page cache");
    let plan = planner::plan(&GLM_FULL, &facts, &options, None).unwrap();
    assert!(has(
        &plan,
        "disk bandwidth 1.5 GB/s: assumed, not measurable: 65 GB/s is the page cache"
    ));
    for part in ["per-layer overhead 40 us", "memory bandwidth", "kernel rate", "calibration"] {
        assert!(has(&plan, part), "{part}");
    }
    let sum: f64 = plan.prediction.terms.iter().map(|t| t.seconds).sum();
    assert!((sum * plan.prediction.decode_tokens_per_s.p50 - 1.0).abs() < 1e-9);
}

/// Dense weights that do not fit are read for every token, as few as must be.
#[test]
fn dense_weights_that_do_not_fit_are_streamed() {
    let sums = ModelBytes::of(&GLM_FULL, IoMode::Dropped);
    let plan = |budget: u64, dense| {
        let options = Options { context: Some(4096), dense, ..ram(budget) };
        planner::plan(&GLM_FULL, &machine(24 * GB, &[]), &options, None)
    };
    assert!(matches!(plan(9 * GB, DenseRule::Resident), Err(PlanRefusal::DoesNotFit { .. })));
    let small = plan(9 * GB, DenseRule::Auto).unwrap();
    small.check(&GLM_FULL).unwrap();
    let streamed = &small.placement.streamed;
    assert!(!streamed.layers.is_empty() && !streamed.head && slots(&small) == 0);
    let of = |layers: &[u32]| -> u64 {
        layers.iter().map(|&l| sums.layers[l as usize].dense.stored).sum()
    };
    assert_eq!(small.prediction.streamed_bytes_per_token, Bytes(of(&streamed.layers)));
    let largest = streamed.layers.iter().map(|&l| sums.layers[l as usize].dense.resident).max();
    assert_eq!(small.ledger.bytes(Line::StreamBuffers), Bytes(2 * largest.unwrap()));
    assert!(small.prediction.terms.iter().any(|t| t.name.contains("streamed dense")));
    let line = small.ledger.0.iter().find(|l| l.line == Line::StreamBuffers).unwrap();
    let cost = small.prediction.streamed_bytes_per_token.to_string();
    assert!(line.note.contains(&cost), "{}", line.note);
    let smaller = plan(5 * GB, DenseRule::Auto).unwrap();
    assert!(
        smaller.prediction.streamed_bytes_per_token > small.prediction.streamed_bytes_per_token
    );
    assert!(smaller.prediction.decode_tokens_per_s.p50 < small.prediction.decode_tokens_per_s.p50);
    let all = plan(20 * GB, DenseRule::Streamed).unwrap();
    assert_eq!((all.placement.streamed.layers.len(), all.placement.streamed.head), (78, true));
    let cpu = Abilities { streamed_dense: false, ..Abilities::ALL };
    assert_eq!(all.needs_beyond(&cpu), [Need::StreamedDense]);
    let PlanRefusal::DoesNotFit { result, .. } = plan(GB, DenseRule::Auto).unwrap_err() else {
        panic!("it fits")
    };
    assert!(plan(result.smallest_budget.0, DenseRule::Auto).unwrap().placement.streamed.head);
    assert!(plan(result.smallest_budget.0 - 1, DenseRule::Auto).is_err());
}

#[test]
fn what_would_help_says_so_with_its_gain() {
    let options = Options { context: Some(4096), ..ram(20 * GB) };
    let plan = planner::plan(&GLM_FULL, &machine(64 * GB, &[]), &options, None).unwrap();
    let advice = planner::what_would_help(&GLM_FULL, &plan, &options, None);
    let of = |change| advice.iter().find(|a| a.change == change);
    for change in [Change::MoreRam, Change::MoreVram, Change::FasterDisk, Change::HalfContext] {
        let one = of(change).unwrap_or_else(|| panic!("{change:?} is missing"));
        assert!(one.ratio > 1.0, "{one:?}");
        assert_eq!(one.tokens_per_s_before, plan.prediction.decode_tokens_per_s.p50);
    }
    // Its experts have 4 bits already.
    assert_eq!(of(Change::FewerBits), None);
    // Bound by the disk, which twice its speed nearly halves.
    assert!(of(Change::FasterDisk).unwrap().ratio > 1.5);
    let wide = open(&Checkpoint::olmoe(Form::Bf16));
    let options = ram(wide_budget(&wide));
    let plan = planner::plan(&wide, &machine(GB, &[]), &options, None).unwrap();
    let advice = planner::what_would_help(&wide, &plan, &options, None);
    let fewer = advice.iter().find(|a| a.change == Change::FewerBits).unwrap();
    assert!(fewer.what.ends_with("not 16"), "{}", fewer.what);
    assert!(fewer.ratio >= 1.0, "{fewer:?}");
}

/// A model of a few kilobytes takes longer over a link than in memory: a card is no help to it.
#[test]
fn what_makes_it_slower_is_no_help() {
    let small = open(&Checkpoint::olmoe(Form::Bf16));
    let options = ram(GB);
    let plan = planner::plan(&small, &machine(GB, &[]), &options, None).unwrap();
    let advice = planner::what_would_help(&small, &plan, &options, None);
    assert!(advice.iter().any(|a| a.change == Change::FasterDisk), "{advice:?}");
    assert!(advice.iter().all(|a| a.ratio >= 1.0 && a.change != Change::MoreVram), "{advice:?}");
}

/// A budget with slots for some experts of a small model.
fn wide_budget(model: &Catalogue) -> u64 {
    planner::budget_for_share(model, &machine(GB, &[]), &ram(GB), 0.4).unwrap().0
}

/// The machines of the property below do put experts on cards, of layers that are elsewhere too.
#[test]
fn small_cards_hold_experts_of_any_layer() {
    let options = Options { context: Some(20), ..ram(20_000_000) };
    let with = |cards: &[u64]| planner::plan(&GLM, &machine(GB, cards), &options, None).unwrap();
    let some = with(&[600_060_000, 600_060_000]);
    some.check(&GLM).unwrap();
    let n = experts_in_vram(&some);
    assert!(n > 0, "{:?}", some.placement.cards);
    let all = with(&[600_090_000, 600_090_000]);
    assert_eq!(experts_in_vram(&all), 12);
    // One copy: what is on a card has no slot.
    assert_eq!((slots(&all), slots(&some)), (0, 12 - n));
    assert_eq!(all.ledger.bytes(Line::ExpertsInFlight), Bytes(0));
    assert_eq!(all.prediction.hit_rate.p50, 1.0);
}

/// Main memory, cards and what is added to each, from too little to more than enough.
fn machines() -> impl Strategy<Value = (bool, u64, Vec<u64>, u64, usize, u64)> {
    let cards = proptest::collection::vec(600_000_000_u64..600_090_000, 0..4);
    (any::<bool>(), 14_300_000_u64..14_700_000, cards, 0_u64..40_000, 0_usize..4, 0_u64..20_000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Sums hold, nothing is in two places, and more of anything never means less at hand.
    #[test]
    fn more_memory_never_takes_an_expert((is_glm, ram_bytes, cards, more_ram, which, more_vram) in machines()) {
        let model = if is_glm { &*GLM } else { &*OLMOE };
        let plan = |ram_bytes: u64, cards: &[u64]| {
            let options = Options { context: Some(20), prefill_batch: Some(1), ..ram(ram_bytes) };
            planner::plan(model, &machine(GB, cards), &options, None)
        };
        let Ok(first) = plan(ram_bytes, &cards) else { return Ok(()) };
        let checked = |plan: &Plan| {
            plan.check(model).unwrap();
            let text = plan.to_toml().unwrap();
            assert_eq!(&Plan::from_toml(&text, Path::new("plan.toml")).unwrap(), plan);
            assert_eq!(plan.ledger.total().0 + plan.unused_bytes.0, plan.request.budget_bytes.0);
            for card in &plan.placement.cards {
                assert_eq!(card.ledger.total().0 + card.unused_bytes.0, card.budget_bytes.0);
            }
        };
        checked(&first);
        prop_assert_eq!(&plan(ram_bytes, &cards).unwrap(), &first);
        let roomier = plan(ram_bytes + more_ram, &cards).unwrap();
        checked(&roomier);
        prop_assert!(slots(&roomier) >= slots(&first));
        prop_assert!(experts_in_vram(&roomier) >= experts_in_vram(&first));
        prop_assert!(roomier.prediction.streamed_bytes_per_token <= first.prediction.streamed_bytes_per_token);
        if which < cards.len() {
            let mut larger = cards;
            larger[which] += more_vram;
            let larger = plan(ram_bytes, &larger).unwrap();
            checked(&larger);
            let layers = |plan: &Plan| plan.placement.cards.iter().map(|c| c.layers().len() + usize::from(c.head)).sum::<usize>();
            prop_assert!(layers(&larger) >= layers(&first));
            prop_assert!(experts_in_vram(&larger) >= experts_in_vram(&first), "{:?} {:?}", first.placement.cards, larger.placement.cards);
        }
    }
}
