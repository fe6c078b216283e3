//! What is told of models and plans: what a model is made of, how two plans differ, whether a plan
//! still holds, where a weight lives. Figures are added up here by hand.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

mod support;

use std::sync::LazyLock;

use support::{Checkpoint, Form};
use tierkeep_doctor::{Fact, Facts, GpuFact};
use tierkeep_plans::budget::EmbeddingResidency;
use tierkeep_plans::catalogue::{Catalogue, Outline};
use tierkeep_plans::compare::{self, Group, Quantity};
use tierkeep_plans::explain::{self, ExplainError, Explanation, Subject, Tier};
use tierkeep_plans::inspect::{Inspection, Part, Reads};
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::{self, Options, PinRule};
use tierkeep_plans::stale::{self, Finding, Weight};
use tierkeep_plans::units::{Bytes, SizeRequest};
use tierkeep_plans::usage::{History, Session};

fn open(checkpoint: &Checkpoint) -> Catalogue {
    let dir = tempfile::tempdir().unwrap();
    checkpoint.write(dir.path());
    Catalogue::open(dir.path()).unwrap()
}

static GLM: LazyLock<Catalogue> = LazyLock::new(|| {
    let mut checkpoint = Checkpoint::glm(Form::INT4);
    checkpoint.add_mtp_layer(Form::INT8);
    open(&checkpoint)
});

/// A machine with room for everything, every rate known.
fn machine() -> Facts {
    let mut facts = Facts::default();
    facts.cpu.model_name = Fact::read("a processor".to_owned(), "");
    facts.cpu.usable_threads = Fact::read(4, "4 cores");
    facts.cpu.instruction_sets = Fact::read(vec!["avx2".to_owned(), "f16c".to_owned()], "");
    facts.memory.usable_bytes = Fact::read(1_000_000_000, "MemAvailable");
    facts.memory.limit = Fact::read(None, "no group");
    facts.memory.read_bandwidth_bytes_per_s = Fact::measured(20e9, "");
    facts.disk.device = Fact::read("nvme0n1".to_owned(), "");
    facts.disk.filesystem = Fact::read("ext4".to_owned(), "");
    facts
}

/// A plan that does not hold every expert.
fn tight() -> Plan {
    planned(&Options { slots: Some(2), ..Options::default() })
}

fn planned(options: &Options) -> Plan {
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(100_000_000))),
        context: Some(64),
        ..options.clone()
    };
    planner::plan(&GLM, &machine(), &options, None).unwrap()
}

// ---- inspect -------------------------------------------------------------------------------------

#[test]
fn every_byte_of_a_model_is_in_one_line() {
    let inspection = Inspection::of(&GLM);
    let weights: u64 = inspection.weights.iter().map(|line| line.bytes.0).sum();
    assert_eq!(weights + inspection.header_bytes.0, inspection.total_bytes.0);
    assert_eq!(inspection.total_bytes, GLM.total_bytes());
    let bytes = |part| {
        let lines = inspection.weights.iter().filter(|line| line.part == part);
        lines.map(|line| line.bytes.0).sum::<u64>()
    };
    // An expert: gate and up of 8 rows of 16, down of 16 rows of 8, nibbles and a scale a row.
    let expert = 2 * (8 * 8 + 8 * 4) + (16 * 4 + 16 * 4);
    assert_eq!(bytes(Part::RoutedExperts), 2 * 6 * expert);
    // The same in bytes.
    let expert = 2 * (8 * 16 + 8 * 4) + (16 * 8 + 16 * 4);
    assert_eq!(bytes(Part::MtpExperts), 6 * expert);
    assert!(bytes(Part::MtpDense) > 0);
    assert_eq!(bytes(Part::Unrecognised), 0);
    // 40 rows of 16 nibbles, a scale each.
    assert_eq!(bytes(Part::Embedding), 40 * 8 + 40 * 4);
    assert_eq!(bytes(Part::Head), bytes(Part::Embedding));
}

#[test]
fn experts_are_told_by_size_and_by_whether_they_are_loaded() {
    let kinds = Inspection::of(&GLM).experts;
    let told: Vec<_> = kinds
        .iter()
        .map(|k| (k.n_experts, k.bytes.0, k.stored.as_str(), k.layers.as_slice(), k.is_mtp))
        .collect();
    assert_eq!(told, [(12, 320, "int4", &[1, 2][..], false), (6, 512, "int8", &[3][..], true)]);
}

#[test]
fn sums_are_of_what_is_dense_and_what_is_routed() {
    let sums = Inspection::of(&GLM).sums.unwrap();
    let of = |is_dense: fn(Part) -> bool| {
        let lines = Inspection::of(&GLM).weights.into_iter().filter(|line| is_dense(line.part));
        lines.map(|line| line.bytes).sum::<Bytes>()
    };
    let is_routed = |part| matches!(part, Part::RoutedExperts | Part::MtpExperts);
    assert_eq!(sums.routed_bytes, of(is_routed));
    assert_eq!((sums.routed_bytes, sums.n_routed_experts), (Bytes(12 * 320 + 6 * 512), 18));
    let is_no_filler = |part| !matches!(part, Part::Ignored | Part::Unrecognised);
    let all = of(is_no_filler);
    assert_eq!(sums.dense_with_mtp_bytes, all.saturating_sub(sums.routed_bytes));
    let mtp = of(|part| part == Part::MtpDense);
    assert_eq!(sums.dense_with_mtp_bytes, sums.dense_bytes + mtp);
}

/// Experts that differ only in how many reads bring them are of one kind.
#[test]
fn experts_that_two_files_share_are_no_kind_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::olmoe(Form::INT8).write_sharded(dir.path(), 7);
    let model = Catalogue::open(dir.path()).unwrap();
    let split = model.experts.iter().filter(|expert| expert.extents().len() == 2).count() as u64;
    let all = model.experts.len() as u64;
    assert!(split > 0, "no border lies within an expert");
    let kinds = Inspection::of(&model).experts;
    let [kind] = kinds.as_slice() else { panic!("{kinds:?}") };
    let reads =
        [(1, all - split), (2, split)].map(|(n_reads, n_experts)| Reads { n_reads, n_experts });
    assert_eq!((kind.n_experts, kind.reads.as_slice()), (all, &reads[..]));
}

#[test]
fn caches_are_those_of_the_longest_context() {
    let inspection = Inspection::of(&GLM);
    let [half, single] = inspection.caches.as_slice() else { panic!("{:?}", inspection.caches) };
    assert_eq!((half.bits, single.bits, half.context), (16, 32, 512));
    // 3 layers of a latent of 10 and a rotary key of 4; 2 layers have an indexer of their own, 8 wide.
    assert_eq!((half.kv_bytes_per_token.0, half.kv_bytes.0), (3 * 14 * 2, 512 * 3 * 14 * 2));
    assert_eq!((single.indexer_bytes_per_token.0, single.indexer_bytes.0), (64, 512 * 64));
    let touched = inspection.touched.unwrap();
    // 2 experts of 320 bytes in 2 layers.
    assert_eq!(touched.routed_bytes.0, 2 * 2 * 320);
}

#[test]
fn an_unknown_family_has_sizes_by_role_and_says_so() {
    let mut checkpoint = Checkpoint::olmoe(Form::Bf16);
    checkpoint.config["model_type"] = "mamba".into();
    let dir = tempfile::tempdir().unwrap();
    checkpoint.write(dir.path());
    assert!(Catalogue::open(dir.path()).is_err());
    let outline = Outline::open(dir.path()).unwrap();
    let inspection = Inspection::outline(dir.path(), &outline);
    assert!(inspection.caveat.as_deref().unwrap().contains("unknown family"));
    let weights: u64 = inspection.weights.iter().map(|line| line.bytes.0).sum();
    assert_eq!(weights + inspection.header_bytes.0, inspection.total_bytes.0);
    assert!(inspection.weights.iter().any(|line| line.part == Part::RoutedExperts));
}

// ---- compare -------------------------------------------------------------------------------------

#[test]
fn a_plan_does_not_differ_from_itself() {
    assert_eq!(compare::compare(&tight(), &tight()).unwrap(), []);
}

#[test]
fn plans_differ_in_what_was_asked_for_and_what_follows() {
    let (first, second) = (tight(), planned(&Options { slots: Some(3), ..Options::default() }));
    let found = compare::compare(&first, &second).unwrap();
    let of = |group| found.iter().filter(move |d| d.group == group).collect::<Vec<_>>();
    let slots = of(Group::Slots);
    assert_eq!(slots[1].name, "each of layers 1-2");
    assert_eq!(slots[1].was, Some(Quantity::Number(2.0)));
    assert_eq!(slots[1].is, Some(Quantity::Number(3.0)));
    let cache = of(Group::Ledger).into_iter().find(|d| d.name == "expert cache").unwrap();
    // One more expert of 320 bytes in each of 2 layers.
    assert_eq!(cache.was, Some(Quantity::Bytes(2 * 2 * 320)));
    assert_eq!(cache.is, Some(Quantity::Bytes(2 * 3 * 320)));
    assert_eq!(cache.delta().as_deref(), Some("+640 B (+50.0 %)"));
    assert_eq!(of(Group::Machine), Vec::<&compare::Difference>::new());
    assert!(found.iter().any(|d| d.name.starts_with("decode_tokens_per_s")), "{found:?}");
    assert!(found.is_sorted_by_key(|d| d.group));
}

#[test]
fn a_difference_of_machines_is_told_by_its_facts() {
    let (first, mut second) = (tight(), tight());
    second.machine.memory.usable_bytes = Fact::assumed(2_000_000_000, "what if");
    second.machine.cpu.usable_threads = Fact::read(4, "said in other words");
    let found = compare::compare(&first, &second).unwrap();
    let [only] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!((only.group, only.name.as_str()), (Group::Machine, "memory.usable_bytes"));
    assert_eq!(only.delta().as_deref(), Some("+1.00 GB (+100.0 %)"));
}

// ---- stale ---------------------------------------------------------------------------------------

fn found(plan: &Plan, change: impl FnOnce(&mut Facts)) -> Vec<Finding> {
    let mut today = machine();
    change(&mut today);
    stale::check(plan, &GLM, &today)
}

fn ids(findings: &[Finding]) -> Vec<(&'static str, Weight)> {
    findings.iter().map(|finding| (finding.id, finding.weight)).collect()
}

#[test]
fn a_plan_holds_where_nothing_has_changed() {
    assert_eq!(found(&tight(), |_| {}), []);
}

#[test]
fn what_takes_the_ground_from_a_plan_makes_it_stale() {
    use Weight::{Note, Stale};
    type Change = fn(&mut Facts);
    let cases: [(Change, &str, Weight); 9] = [
        (|f| f.memory.usable_bytes = Fact::read(99_000_000, ""), "memory.available", Stale),
        (|f| f.memory.usable_bytes = Fact::unknown("no file"), "memory.available", Note),
        (|f| f.memory.read_bandwidth_bytes_per_s = Fact::measured(15e9, ""), "memory.rate", Stale),
        (|f| f.memory.read_bandwidth_bytes_per_s = Fact::measured(30e9, ""), "memory.rate", Note),
        (|f| f.cpu.usable_threads = Fact::read(2, ""), "cpu.threads", Stale),
        (|f| f.cpu.usable_threads = Fact::read(8, ""), "cpu.threads", Note),
        (
            |f| f.cpu.instruction_sets = Fact::read(vec!["avx2".to_owned()], ""),
            "cpu.instruction_sets",
            Stale,
        ),
        (|f| f.disk.device = Fact::read("sda".to_owned(), ""), "disk.device", Stale),
        (|f| f.cpu.model_name = Fact::read("another".to_owned(), ""), "cpu.model", Note),
    ];
    for (change, id, weight) in cases {
        let findings = found(&tight(), change);
        assert_eq!(ids(&findings), [(id, weight)], "{findings:?}");
        assert_eq!(stale::is_stale(&findings), weight == Stale);
        assert!(!findings[0].effect.is_empty() && findings[0].was != findings[0].is);
    }
    // What was measured then and is not now is no change.
    let findings = found(&tight(), |f| {
        f.memory.read_bandwidth_bytes_per_s = Fact::unknown("not measured");
    });
    assert_eq!(findings, []);
}

#[test]
fn a_plan_that_reads_nothing_may_change_its_disk() {
    let all = planned(&Options::default());
    assert_eq!(all.prediction.read_bytes_per_token, Bytes(0), "the budget holds everything");
    let findings = found(&all, |f| f.disk.device = Fact::read("sda".to_owned(), ""));
    assert_eq!(ids(&findings), [("disk.device", Weight::Note)]);
}

#[test]
fn a_budget_that_was_insisted_on_is_not_stale() {
    let mut plan = tight();
    plan.request.allow_overcommit = true;
    let findings = found(&plan, |f| f.memory.usable_bytes = Fact::read(1, ""));
    assert_eq!(ids(&findings), [("memory.available", Weight::Note)]);
}

#[test]
fn another_model_and_an_edited_plan_are_stale() {
    let mut plan = tight();
    plan.model.fingerprint = "00".to_owned();
    assert_eq!(ids(&found(&plan, |_| {})), [("model.fingerprint", Weight::Stale)]);
    let mut plan = tight();
    plan.engine.prefill_batch -= 1;
    let findings = found(&plan, |_| {});
    assert_eq!(ids(&findings), [("plan.consistent", Weight::Stale)]);
    assert!(findings[0].is.contains("activations"), "{findings:?}");
}

/// A card with all of its memory free.
fn card(name: &str, bytes: u64) -> GpuFact {
    GpuFact {
        name: Fact::read(name.to_owned(), ""),
        memory_total_bytes: Fact::read(bytes, ""),
        memory_free_bytes: Fact::read(bytes, ""),
        driver_version: Fact::read("550.1".to_owned(), ""),
        ..GpuFact::default()
    }
}

#[test]
fn cards_that_a_plan_uses_are_looked_at() {
    let with = |cards: Vec<GpuFact>| {
        let mut facts = machine();
        facts.gpus.nvidia = Fact::read(cards, "");
        facts.gpus.others = Fact::read(Vec::new(), "");
        facts
    };
    let before = with(vec![card("a card", 2_000_000_000)]);
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(100_000_000))),
        context: Some(64),
        ..Options::default()
    };
    let plan = planner::plan(&GLM, &before, &options, None).unwrap();
    assert_eq!(plan.placement.cards.len(), 1, "{:?}", plan.placement.cards);
    let of = |cards: Vec<GpuFact>| ids(&stale::check(&plan, &GLM, &with(cards)));
    assert_eq!(of(vec![card("a card", 2_000_000_000)]), []);
    assert_eq!(of(vec![]), [("gpu.card", Weight::Stale)]);
    assert_eq!(of(vec![card("another", 2_000_000_000)]), [("gpu.card", Weight::Stale)]);
    let busy = GpuFact { memory_free_bytes: Fact::read(1_000_000, ""), ..card("a card", 1 << 31) };
    assert_eq!(of(vec![busy]), [("gpu.free", Weight::Stale)]);
    let newer =
        GpuFact { driver_version: Fact::read("560".to_owned(), ""), ..card("a card", 1 << 31) };
    assert_eq!(of(vec![newer]), [("gpu.driver", Weight::Note)]);
}

// ---- explain -------------------------------------------------------------------------------------

fn explained(what: &str, plan: &Plan) -> Explanation {
    explain::explain(Subject::find(&GLM, what).unwrap(), &GLM, plan, None)
}

#[test]
fn an_expert_is_found_by_its_number_and_by_its_tensors() {
    let plan = tight();
    let expected = explained("2:5", &plan);
    assert_eq!(expected.names[1], "model.layers.2.mlp.experts.5.up_proj.weight");
    for name in [
        " 2:5 ",
        "model.layers.2.mlp.experts.5.up_proj.weight",
        "model.layers.2.mlp.experts.5.down_proj",
        "model.layers.2.mlp.experts.5.gate_proj.weight.qs",
    ] {
        assert_eq!(explained(name, &plan), expected, "{name}");
    }
    assert_eq!((expected.tier, expected.bytes), (Tier::Cache, Bytes(320)));
    assert_eq!(expected.places.iter().map(|p| p.bytes.0).sum::<u64>(), 320);
    let cost = expected.cost.unwrap();
    assert_eq!((cost.bytes, cost.n_reads), (Bytes(320), expected.places.len()));
    assert!(cost.seconds > 0.0 && cost.evidence.contains("disk"), "{cost:?}");
    assert!(expected.lives.contains("2 slots of layer 2"), "{}", expected.lives);
}

#[test]
fn every_kind_of_weight_has_its_tier() {
    let plan = tight();
    let none = planned(&Options { slots: Some(0), ..Options::default() });
    let all = planned(&Options::default());
    let mut by_rows = tight();
    by_rows.engine.embedding = EmbeddingResidency::RowRead;
    let cases = [
        ("1:0", &tight(), Tier::Cache),
        ("1:0", &none, Tier::Disk),
        ("1:0", &all, Tier::Resident),
        // The multi-token-prediction layer follows the last decoder layer.
        ("3:0", &plan, Tier::NotLoaded),
        ("model.layers.3.eh_proj.weight", &plan, Tier::NotLoaded),
        ("lm_head.weight", &plan, Tier::Resident),
        ("head", &plan, Tier::Resident),
        ("model.layers.0.self_attn.o_proj.weight", &plan, Tier::Resident),
        ("embedding", &by_rows, Tier::Disk),
        ("embedding", &all, Tier::Resident),
        ("model.norm.weight", &plan, Tier::Resident),
    ];
    for (what, plan, tier) in cases {
        let explanation = explained(what, plan);
        assert_eq!(explanation.tier, tier, "{what}: {explanation:?}");
        assert!(!explanation.why.is_empty() && !explanation.places.is_empty(), "{explanation:?}");
        let is_read = matches!(tier, Tier::Cache | Tier::Disk);
        assert_eq!(explanation.cost.is_some(), is_read, "{what}");
    }
    let streamed = planned(&Options {
        dense: tierkeep_plans::place::DenseRule::Streamed,
        ..Options::default()
    });
    let explanation = explained("model.layers.0.self_attn.o_proj.weight", &streamed);
    assert_eq!(explanation.tier, Tier::Disk, "{explanation:?}");
    assert_eq!(explanation.cost.unwrap().when, "for every token");
}

#[test]
fn history_says_how_often_an_expert_was_asked_for() {
    let layers = [1, 2].map(tierkeep_plans::units::LayerId);
    let mut session = Session::new(&GLM.fingerprint, &layers, 6, 2);
    for _ in 0..3 {
        session.record_token(&[4, 0, 4, 1]);
    }
    session.record_token(&[0, 1, 4, 1]);
    let mut history = History::new(session.shape().clone());
    history.merge(&session).unwrap();
    let options = Options { slots: Some(2), pins: PinRule::Share(0.5), ..Options::default() };
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(100_000_000))),
        context: Some(64),
        ..options
    };
    let plan = planner::plan(&GLM, &machine(), &options, Some(&history)).unwrap();
    let subject = Subject::find(&GLM, "1:4").unwrap();
    let explanation = explain::explain(subject, &GLM, &plan, Some(&history));
    let usage = explanation.usage.unwrap();
    // Of layer 1: expert 0 four times, 4 three times, 1 once.
    assert_eq!((usage.accesses, usage.rank, usage.n_sessions), (3.0, 2, 1));
    assert_eq!(usage.share_of_layer, 3.0 / 8.0);
    let first = explain::explain(Subject::find(&GLM, "1:0").unwrap(), &GLM, &plan, Some(&history));
    assert_eq!(first.tier, Tier::Pinned, "{first:?}");
}

#[test]
fn what_is_not_there_is_told_with_what_is() {
    let error = |what: &str| Subject::find(&GLM, what).unwrap_err();
    assert_eq!(
        error("0:1"),
        ExplainError::NoExperts { layer: 0, layers: "1-3".to_owned() },
        "layer 0 is dense"
    );
    assert_eq!(error("1:6"), ExplainError::NoExpert { layer: 1, expert: 6, last: 5 });
    for what in ["", "gate", "model.layers.9.input_layernorm.weight", "1:x", "99999999999:1"] {
        let message = error(what).to_string();
        assert!(message.contains("1:0") || message.contains("1-3"), "{what}: {message}");
    }
}
