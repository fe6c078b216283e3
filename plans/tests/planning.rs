//! Budget, placement and plans: arithmetic to the byte on models small enough to add up by hand, and
//! what must hold for every budget.
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
use serde_json::{Value, json};
use support::{Checkpoint, Form};
use tempfile::TempDir;
use tierkeep_doctor::{Fact, Facts};
use tierkeep_plans::budget::{
    self, EmbeddingResidency, KvElement, Ledger, Line, ModelBytes, Numerics, Reads, Slots, Workload,
};
use tierkeep_plans::catalogue::{Catalogue, config};
use tierkeep_plans::place::{CacheRule, DenseRule, DoesNotFit, Placed, Request, place};
use tierkeep_plans::plan::{IoMode, IoMode::Dropped, Plan};
use tierkeep_plans::planner::{self, Options, PlanRefusal};
use tierkeep_plans::units::{Bytes, SizeRequest};

fn open(checkpoint: &Checkpoint) -> Catalogue {
    let dir: TempDir = tempfile::tempdir().unwrap();
    checkpoint.write(dir.path());
    Catalogue::open(dir.path()).unwrap()
}

/// A config with some fields replaced.
fn with(config: &Value, fields: &Value) -> Value {
    let both = [config, fields].map(|value| value.as_object().unwrap().clone());
    both.into_iter().flatten().collect::<serde_json::Map<_, _>>().into()
}

static OLMOE: LazyLock<Catalogue> = LazyLock::new(|| open(&Checkpoint::olmoe(Form::Bf16)));
static GLM: LazyLock<Catalogue> = LazyLock::new(|| open(&Checkpoint::glm(Form::INT8)));

/// Models in which something is out of the ordinary.
static MODELS: LazyLock<Vec<Catalogue>> = LazyLock::new(|| {
    let wide = json!({ "hidden_size": 64, "intermediate_size": 64, "num_experts": 16, "num_hidden_layers": 4 });
    let wide = with(&Checkpoint::olmoe(Form::Bf16).config, &wide);
    // Layers whose experts differ in size.
    let mut mixed = Checkpoint::from_config(wide.clone(), Form::Bf16);
    for form in [Form::INT8, Form::INT4] {
        let other = Checkpoint::from_config(wide.clone(), form);
        let layer =
            if form == Form::INT8 { "layers.2.mlp.experts" } else { "layers.1.mlp.experts" };
        mixed.tensors.retain(|t| !t.name.contains(layer));
        mixed.tensors.extend(other.tensors.into_iter().filter(|t| t.name.contains(layer)));
    }
    let tied = with(&wide, &json!({ "tie_word_embeddings": true }));
    // One layer that routes every token to every expert, and an embedding of next to nothing.
    let all_active = json!({ "num_hidden_layers": 1, "num_experts_per_tok": 16, "vocab_size": 5 });
    let all_active = with(&wide, &all_active);
    let mut with_mtp = Checkpoint::glm(Form::INT4);
    with_mtp.add_mtp_layer(Form::INT8);
    vec![
        open(&Checkpoint::from_config(wide, Form::F32)),
        open(&mixed),
        open(&Checkpoint::from_config(tied, Form::INT8)),
        open(&Checkpoint::from_config(all_active, Form::Bf16)),
        open(&Checkpoint::glm(Form::Bf16)),
        open(&with_mtp),
    ]
});

const WORKLOAD: Workload = Workload {
    context: 100,
    prefill_batch: 3,
    threads: 2,
    numerics: Numerics::Exact,
    kv: KvElement::F32,
    embedding: EmbeddingResidency::Resident,
    sessions: 1,
    reads: Reads { depth: 0, bytes: None, begins_early: false },
};

#[test]
fn the_ledger_of_a_grouped_attention_model_to_the_byte() {
    let slots = Slots { caps: vec![3, 2], pins: vec![vec![1, 4], vec![]] };
    let ledger = budget::ledger(&OLMOE, Dropped, &WORKLOAD, &slots);
    let expected = [
        // bf16: embedding and head 40 x 16; a layer's q and o 16 x 16, k and v 8 x 16. f32: router
        // of 6 x 16 in bf16, norms of 16 (input, post, q) and 8 (k), the final norm of 16.
        (Line::DenseWeights, 2 * 1280 + 2 * (2 * 512 + 2 * 256 + 192 + 3 * 64 + 64) + 64),
        // 2 layers of keys and values of 100 x 8 x 4 bytes.
        (Line::KvCache, 2 * 2 * 3200),
        (Line::IndexerKeys, 0),
        // Elements: 3 tokens of 4 x 16 + 6 + 2 x 2, 48 of attention and 8 angles; 3 rows of 2 x 8 + 16;
        // for each thread 16 queries of 8 with 100 scores; a norm of 16 and 40 logits.
        (Line::Activations, 4 * (3 * (74 + 56) + 3 * 32 + 2 * 16 * 108 + 56)),
        // An expert is three matrices of 8 x 16 in bf16.
        (Line::ExpertsInFlight, 2 * 768),
        (Line::IoBuffers, 0),
        (Line::PageCacheReserve, 768),
        (Line::PinnedExperts, 2 * 768),
        (Line::ExpertCache, 3 * 768),
    ];
    check_lines(&ledger, &expected);
}

/// The base of this line is a measurement; what is added to it follows from threads and files.
#[test]
fn the_runtime_grows_with_threads_tensors_and_tokenizer() {
    let runtime = |model: &Catalogue, threads| {
        let workload = Workload { threads, ..WORKLOAD };
        let slots = Slots::none(model.spec.n_layers);
        budget::ledger(model, Dropped, &workload, &slots).bytes(Line::Runtime).0
    };
    let least = runtime(&OLMOE, 1);
    assert_eq!(runtime(&OLMOE, 4), least + 3 * 100_000);
    let mut larger = OLMOE.clone();
    larger.n_tensors += 10;
    larger.tokenizer_bytes = Bytes(1000);
    assert_eq!(runtime(&larger, 1), least + 10 * 400 + 12 * 1000);
    // 2 layers of 9 dense tensors and 18 of experts; embedding, head and final norm.
    assert_eq!(OLMOE.n_tensors, 2 * (9 + 18) + 3);
}

#[test]
fn the_ledger_of_a_latent_attention_model_to_the_byte() {
    let workload = Workload { prefill_batch: 1, threads: 1, ..WORKLOAD };
    let slots = Slots { caps: vec![0, 6, 5], pins: vec![vec![]; 3] };
    let ledger = budget::ledger(&GLM, Dropped, &workload, &slots);
    let expected = [
        // Latents of 100 x 10 x 4, aligned to 4032, and rotary keys of 100 x 4 x 4 in 3 layers.
        (Line::KvCache, 3 * (4032 + 1600)),
        // 100 x 8 x 4 in the two layers with an indexer of their own.
        (Line::IndexerKeys, 2 * 3200),
        // Elements: 4 x 16 + 2 x 24 + 6 + 2 x 2 of the layer; 12 + 20 + 10 + 4 + 16 of attention;
        // 16 + 8 + 2 of the indexer; a selection of 5 and its count; 4 angles; 2 rows of 2 x 8 + 16; 16
        // x (10 + 4 + 5) and 64 x 2 for the thread; 2 heads of 2 x 10; 2 x 100 scores; 56 as above.
        (Line::Activations, 4 * (122 + 62 + 26 + 10 + 2 * 32 + 304 + 128 + 40 + 200 + 56)),
        // int8: three matrices of 128 bytes, scales of 8, 8 and 16 rows.
        (Line::ExpertsInFlight, 2 * (3 * 128 + 4 * 32)),
        (Line::PageCacheReserve, 512),
        (Line::ExpertCache, 11 * 512),
    ];
    check_lines(&ledger, &expected);
    let half = Workload { kv: KvElement::F16, ..workload };
    let ledger = budget::ledger(&GLM, Dropped, &half, &slots);
    check_lines(&ledger, &[(Line::KvCache, 3 * (2048 + 832)), (Line::IndexerKeys, 2 * 1600)]);
}

fn check_lines(ledger: &Ledger, expected: &[(Line, u64)]) {
    for (line, bytes) in expected {
        assert_eq!(ledger.bytes(*line), Bytes(*bytes), "{line}");
    }
    assert_eq!(ledger.0.len(), Line::ALL.len());
    let sum: u64 = ledger.0.iter().map(|l| l.bytes.0).sum();
    assert_eq!(ledger.total(), Bytes(sum));
    assert_eq!(ledger.footprint().0, sum - ledger.bytes(Line::PageCacheReserve).0);
}

#[test]
fn slots_for_everything_need_no_flight_and_rows_of_the_embedding_one_buffer() {
    let all = budget::ledger(&GLM, Dropped, &WORKLOAD, &Slots::all(&GLM.spec));
    let expected =
        [(Line::ExpertsInFlight, 0), (Line::PageCacheReserve, 0), (Line::ExpertCache, 12 * 512)];
    check_lines(&all, &expected);
    let row_read = Workload { embedding: EmbeddingResidency::RowRead, ..WORKLOAD };
    let rows = budget::ledger(&GLM, Dropped, &row_read, &Slots::all(&GLM.spec));
    // A row of 16 bytes and its scale, aligned each; 40 rows and 40 scales are not resident.
    check_lines(&rows, &[(Line::IoBuffers, 64 + 64)]);
    let saved = all.bytes(Line::DenseWeights).0 - rows.bytes(Line::DenseWeights).0;
    assert_eq!(saved, 640 + 192);
}

/// Cases F7 to F9 for the families of this build: latent keys are one latent and one rotary key a
/// token, and the indexer's keys are a line of their own.
#[test]
fn the_cache_of_glm_5_at_its_longest_context() {
    let config = json!({
        "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144,
        "num_hidden_layers": 78, "num_attention_heads": 64, "q_lora_rank": 2048,
        "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
        "intermediate_size": 12288, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "max_position_embeddings": 202752,
    });
    let spec = config::arch_spec(config.to_string().as_bytes()).unwrap();
    let kv = budget::kv_cache_bytes(&spec, 202_752, KvElement::Bf16);
    assert_eq!(kv, 78 * 202_752 * (512 + 64) * 2);
    assert_eq!(format!("{:.2}", kv as f64 / f64::from(1 << 30)), "16.97");
    assert_eq!(budget::indexer_key_bytes(&spec, 202_752, KvElement::Bf16), 78 * 202_752 * 128 * 2);
}

/// A plain request.
fn request_of(budget: Bytes) -> Request {
    Request {
        budget,
        cards: Vec::new(),
        context: 100,
        sessions: 1,
        threads: 2,
        reads: Reads { depth: 0, bytes: None, begins_early: false },
        numerics: Numerics::Exact,
        kv: KvElement::F32,
        prefill_batch: None,
        slots: None,
        dense: DenseRule::Auto,
        cache: CacheRule::Slots,
    }
}

fn placed(model: &Catalogue, request: &Request) -> Result<Placed, DoesNotFit> {
    place(&ModelBytes::of(model, Dropped), request, None)
}

/// Any budget, from too little to more than enough, and any request.
fn request() -> impl Strategy<Value = (usize, Request, u64)> {
    let kv = prop_oneof![Just(KvElement::F32), Just(KvElement::F16), Just(KvElement::Bf16)];
    let batch = prop_oneof![3 => Just(None), 1 => (1_u64..600).prop_map(Some)];
    (
        0..6_usize,
        0.0..1.1_f64,
        1_u64..512,
        1_u64..9,
        kv,
        batch,
        prop_oneof![1 => Just(1), 4 => 0_u64..60_000],
    )
        .prop_map(|(model, share, context, threads, kv, prefill_batch, more)| {
            let request = |budget| Request {
                budget,
                context,
                threads,
                kv,
                prefill_batch,
                ..request_of(Bytes(0))
            };
            let nothing = placed(&MODELS[model], &request(Bytes(0))).unwrap_err();
            let everything = placed(&MODELS[model], &request(Bytes(1 << 40))).unwrap();
            let low = nothing.smallest_budget.0 as f64 - 4_000.0;
            let high = everything.ledger.total().0 as f64;
            let budget = Bytes((low + (high - low) * share) as u64);
            (model, request(budget), more)
        })
}

fn check_placed(model: &Catalogue, request: &Request, placed: &Placed) {
    assert!(placed.ledger.total() <= request.budget);
    let sums = ModelBytes::of(model, Dropped);
    assert_eq!(placed.ledger, budget::host_ledger(&sums, &placed.workload, &placed.holding()));
    for layer in 0..model.spec.n_layers {
        let most = if model.spec.is_expert_layer(layer) { model.spec.router.n_experts } else { 0 };
        assert!(placed.slots.caps[layer] as usize <= most);
    }
    let batch = placed.workload.prefill_batch;
    match request.prefill_batch {
        Some(asked) => assert_eq!(batch, asked.min(request.context)),
        None => assert!((1..=request.context).contains(&batch)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn a_plan_is_never_over_its_budget_and_more_memory_never_takes_a_slot(
        (model, request, more) in request(),
    ) {
        let model = &MODELS[model];
        let larger = Request { budget: Bytes(request.budget.0 + more), ..request.clone() };
        let small = placed(model, &request);
        let roomier = placed(model, &larger);
        if let Ok(roomier) = &roomier {
            check_placed(model, &larger, roomier);
        }
        if let Ok(placed) = small {
            check_placed(model, &request, &placed);
            let roomier = roomier.expect("a larger budget fits too");
            for (few, many) in placed.slots.caps.iter().zip(&roomier.slots.caps) {
                prop_assert!(few <= many, "{:?} {:?}", placed.slots, roomier.slots);
            }
            let streamed = |placed: &Placed| {
                budget::streamed_bytes_per_token(&ModelBytes::of(model, Dropped), &placed.streamed)
            };
            prop_assert!(streamed(&placed) >= streamed(&roomier));
            if streamed(&placed) > 0 {
                prop_assert!(placed.slots.caps.iter().all(|&cap| cap == 0));
            }
        }
    }

    #[test]
    fn the_smallest_change_is_the_smallest((model, request, less) in request()) {
        let model = &MODELS[model];
        let budget = Bytes(request.budget.0.saturating_sub(less * 20));
        let request = Request { budget, ..request };
        let Err(refused) = placed(model, &request) else { return Ok(()) };
        prop_assert!(refused.smallest_budget > request.budget);
        prop_assert_eq!(refused.ledger.total(), refused.smallest_budget);
        let at = |budget: Bytes| placed(model, &Request { budget, ..request.clone() });
        let smallest = at(refused.smallest_budget);
        prop_assert!(smallest.is_ok());
        check_placed(model, &Request { budget: refused.smallest_budget, ..request.clone() }, &smallest.unwrap());
        prop_assert!(at(Bytes(refused.smallest_budget.0 - 1)).is_err());
        let with_context = |context| placed(model, &Request { context, ..request.clone() });
        match refused.context_that_fits {
            Some(context) => {
                prop_assert!(context < request.context);
                prop_assert!(with_context(context).is_ok());
                prop_assert!(with_context(context + 1).is_err());
            }
            None => prop_assert!(with_context(1).is_err()),
        }
    }
}

fn machine(available: u64) -> Facts {
    let mut facts = Facts::default();
    facts.memory.usable_bytes = Fact::read(available, "MemAvailable of this test");
    facts.cpu.usable_threads = Fact::read(4, "affinity of this test");
    facts
}

fn ram(bytes: u64) -> Options {
    Options { ram: Some(SizeRequest::Absolute(Bytes(bytes))), ..Options::default() }
}

const GB: u64 = 1_000_000_000;

#[test]
fn a_budget_above_the_machine_is_refused_unless_insisted_on() {
    let machine = machine(24 * GB);
    let refusal = planner::plan(&OLMOE, &machine, &ram(500 * GB), None).unwrap_err();
    assert!(matches!(refusal, PlanRefusal::OverMachine { .. }));
    let message = refusal.to_string();
    for part in ["500.0 GB", "24.00 GB", "MemAvailable of this test", "--allow-overcommit"] {
        assert!(message.contains(part), "{message}");
    }
    let options = Options { allow_overcommit: true, ..ram(500 * GB) };
    let plan = planner::plan(&OLMOE, &machine, &options, None).unwrap();
    assert_eq!(plan.request.budget_bytes, Bytes(500 * GB));
    assert!(plan.request.allow_overcommit);
    plan.check(&OLMOE).unwrap();
    assert!(planner::plan(&OLMOE, &machine, &ram(24 * GB), None).is_ok());
}

#[test]
fn unknown_memory_needs_a_budget() {
    let mut machine = Facts::default();
    machine.memory.usable_bytes = Fact::unknown("/proc/meminfo: permission denied");
    for options in [
        Options::default(),
        Options { ram: Some(SizeRequest::Percent(50.0)), ..Options::default() },
    ] {
        let message = planner::plan(&OLMOE, &machine, &options, None).unwrap_err().to_string();
        assert!(message.contains("permission denied"), "{message}");
        assert!(message.contains("--ram SIZE"), "{message}");
    }
    planner::plan(&OLMOE, &machine, &ram(GB), None).unwrap().check(&OLMOE).unwrap();
}

#[test]
fn a_budget_that_is_too_small_is_kept_and_answered_with_the_ledger() {
    let refusal = planner::plan(&GLM, &machine(24 * GB), &ram(1_000_000), None).unwrap_err();
    assert!(refusal.to_string().contains("does not fit in 1.00 MB"), "{refusal}");
    let PlanRefusal::DoesNotFit { result, .. } = refusal else { panic!("{refusal}") };
    assert_eq!(result.budget, Bytes(1_000_000));
    assert_eq!(result.ledger.0.len(), Line::ALL.len());
    assert_eq!(result.ledger.total(), result.smallest_budget);
    assert_eq!(result.context_that_fits, None);
    planner::plan(&GLM, &machine(24 * GB), &ram(result.smallest_budget.0), None).unwrap();
}

#[test]
fn without_a_budget_something_is_spared() {
    for (available, budget) in [(8 * GB, 7 * GB), (100 * GB, 92 * GB)] {
        let plan = planner::plan(&OLMOE, &machine(available), &Options::default(), None).unwrap();
        assert_eq!(plan.request.budget_bytes, Bytes(budget));
        assert!(plan.request.budget_source.contains("MemAvailable of this test"));
    }
    let nothing = planner::plan(&OLMOE, &machine(GB / 2), &Options::default(), None).unwrap_err();
    assert!(matches!(nothing, PlanRefusal::DoesNotFit { .. }), "{nothing}");
    let half = Options { ram: Some(SizeRequest::Percent(50.0)), ..Options::default() };
    let plan = planner::plan(&OLMOE, &machine(8 * GB), &half, None).unwrap();
    assert_eq!(plan.request.budget_bytes, Bytes(4 * GB));
}

/// Case B8: what is set is kept, the rest is solved around it.
#[test]
fn no_option_is_ignored() {
    let machine = machine(24 * GB);
    let plan = |options: &Options| planner::plan(&GLM, &machine, options, None).unwrap();
    let plain = plan(&ram(GB));
    assert_eq!((plain.engine.threads, plain.engine.kv), (4, KvElement::F32));
    let set = plan(&Options {
        context: Some(77),
        threads: Some(3),
        kv: Some(KvElement::Bf16),
        prefill_batch: Some(5),
        isa: Some("scalar".to_owned()),
        io: Some(IoMode::Buffered),
        ..ram(GB)
    });
    assert_eq!((set.request.context, set.engine.threads, set.engine.prefill_batch), (77, 3, 5));
    assert_eq!((set.engine.kv, set.engine.io), (KvElement::Bf16, IoMode::Buffered));
    assert_eq!(set.engine.isa, "scalar");
    assert_eq!(
        set.ledger,
        budget::host_ledger(&ModelBytes::of(&GLM, Dropped), &set.workload(), &set.holding())
    );
    let longer = Options { prefill_batch: Some(500), context: Some(9), ..ram(GB) };
    assert_eq!(plan(&longer).engine.prefill_batch, 9);
    let mut many = machine.clone();
    many.cpu.usable_threads = Fact::read(4096, "a large machine");
    assert_eq!(planner::plan(&GLM, &many, &ram(GB), None).unwrap().engine.threads, 1024);
}

#[test]
fn options_out_of_range_are_named() {
    let bad = [
        (Options { context: Some(0), ..ram(GB) }, "--ctx 0: expected 1 to 512"),
        (Options { context: Some(513), ..ram(GB) }, "--ctx 513: expected 1 to 512"),
        (Options { threads: Some(0), ..ram(GB) }, "--threads 0: expected 1 to 1024"),
        (Options { threads: Some(1025), ..ram(GB) }, "--threads 1025"),
        (Options { prefill_batch: Some(0), ..ram(GB) }, "--batch 0: expected at least 1"),
    ];
    for (options, expected) in bad {
        let refusal = planner::plan(&GLM, &machine(24 * GB), &options, None).unwrap_err();
        assert!(refusal.to_string().contains(expected), "{refusal}");
    }
}

/// A budget within which dense weights stay in memory.
fn resident(bytes: u64) -> Options {
    Options { dense: DenseRule::Resident, ..ram(bytes) }
}

/// A plan with slots for some experts, some of them pinned.
fn some_plan(model: &Catalogue) -> Plan {
    let machine = machine(24 * GB);
    let refusal = planner::plan(model, &machine, &resident(1), None).unwrap_err();
    let PlanRefusal::DoesNotFit { result, .. } = refusal else { panic!("{refusal}") };
    let slots = 5 * budget::largest_slot_bytes(model, Dropped);
    let options = Options { prefill_batch: Some(1), ..resident(result.smallest_budget.0 + slots) };
    let mut plan = planner::plan(model, &machine, &options, None).unwrap();
    for layer in model.spec.expert_layers() {
        let n_pins = plan.placement.slots.caps[layer].min(2) as usize;
        plan.placement.slots.pins[layer] = [1, 3][..n_pins].to_vec();
    }
    plan.settle(model);
    plan.check(model).unwrap();
    plan
}

static PLAN: LazyLock<Plan> = LazyLock::new(|| some_plan(&GLM));
static PLAN_TEXT: LazyLock<String> = LazyLock::new(|| PLAN.to_toml().unwrap());

#[test]
fn plans_are_deterministic_and_round_trip() {
    for model in MODELS.iter().chain([&*OLMOE, &*GLM]) {
        let plan = some_plan(model);
        let text = plan.to_toml().unwrap();
        assert_eq!(text, some_plan(model).to_toml().unwrap());
        let back = Plan::from_toml(&text, Path::new("plan.toml")).unwrap();
        assert_eq!(back, plan);
        assert_eq!(back.to_toml().unwrap(), text);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plan.toml");
    PLAN.write(&path).unwrap();
    assert_eq!(Plan::read(&path).unwrap(), *PLAN);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn files_that_are_no_plan_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plan.toml");
    let message = Plan::read(&path).unwrap_err().to_string();
    assert!(message.contains("plan.toml"), "{message}");
    std::fs::write(&path, [0xff, 0xfe, 0]).unwrap();
    let message = Plan::read(&path).unwrap_err().to_string();
    assert!(message.contains("plan.toml is not a plan: it is not text"), "{message}");
    let nowhere = dir.path().join("nowhere").join("plan.toml");
    assert!(PLAN.write(&nowhere).unwrap_err().to_string().contains("nowhere"));
}

/// What happens to a plan text: refused with this message, or accepted.
fn judged(text: &str) -> Result<(), String> {
    let plan = Plan::from_toml(text, Path::new("plan.toml")).map_err(|e| e.to_string())?;
    plan.check(&GLM).map_err(|e| e.to_string())
}

/// The plan with one value replaced, by the path to it.
fn edited(path: &str, value: impl Into<toml::Value>) -> String {
    let mut plan: toml::Table = toml::from_str(&PLAN_TEXT).unwrap();
    let mut keys: Vec<&str> = path.split('.').collect();
    let last = keys.pop().unwrap();
    let mut table = &mut plan;
    for key in keys {
        table = table.get_mut(key).unwrap().as_table_mut().unwrap();
    }
    table.insert(last.to_owned(), value.into());
    toml::to_string(&plan).unwrap()
}

fn list(values: &[i64]) -> toml::Value {
    values.to_vec().into()
}

fn lists(values: &[&[i64]]) -> toml::Value {
    values.iter().map(|v| list(v)).collect::<Vec<_>>().into()
}

#[test]
fn every_edit_into_nonsense_is_refused_by_name() {
    assert_eq!(judged(&PLAN_TEXT), Ok(()));
    assert_eq!(PLAN.placement.slots.caps, [0, 3, 2]);
    let caps = "placement.slots.caps";
    let pins = "placement.slots.pins";
    let budget = PLAN.request.budget_bytes.0 as i64;
    let cases: Vec<(&str, toml::Value, &[&str])> = vec![
        ("version", 1.into(), &["version 1", "reads version 5", "tierkeep plan"]),
        ("version", "one".into(), &["version"]),
        ("model.fingerprint", "00".into(), &["for model 00", "tierkeep plan"]),
        ("model.family", "olmoe".into(), &["model.family = olmoe", "glm_moe_dsa"]),
        ("model.total_bytes", 7.into(), &["model.total_bytes = 7"]),
        ("request.context", 0.into(), &["request.context = 0", "1 to 512"]),
        ("request.context", 513.into(), &["request.context = 513", "1 to 512"]),
        ("request.context", (-1).into(), &["context", "-1"]),
        ("request.context", 4.5.into(), &["context", "4.5"]),
        ("request.context", 100.into(), &["KV cache"]),
        ("request.budget_bytes", (budget - 100_000).into(), &["over its budget", "budget_bytes"]),
        ("request.budget_bytes", 0.into(), &["over its budget", "raise budget_bytes"]),
        (
            "request.budget_bytes",
            (500 * GB as i64).into(),
            &["request.budget_bytes", "allow_overcommit"],
        ),
        ("request.budget_bytes", i64::MIN.into(), &["budget_bytes"]),
        ("request.budgetbytes", 5.into(), &["unknown field `budgetbytes`", "budget_bytes"]),
        ("prediction.speed", 5.into(), &["unknown field `speed`"]),
        ("engine.threads", 0.into(), &["engine.threads = 0", "1 to 1024"]),
        ("engine.threads", 1025.into(), &["engine.threads = 1025"]),
        ("engine.threads", (-4).into(), &["threads", "-4"]),
        ("engine.isa", "".into(), &["engine.isa", "avx512"]),
        ("engine.threads", 3.into(), &["runtime"]),
        ("engine.prefill_batch", 0.into(), &["engine.prefill_batch = 0"]),
        ("engine.prefill_batch", 513.into(), &["engine.prefill_batch = 513"]),
        ("engine.prefill_batch", 9.into(), &["activations"]),
        ("engine.kv", "f8".into(), &["unknown variant `f8`", "bf16"]),
        ("engine.kv", "f16".into(), &["KV cache"]),
        ("engine.embedding", "resident".into(), &["dense weights"]),
        ("engine.numerics", "loose".into(), &["unknown variant `loose`", "fast"]),
        ("engine.cpus", list(&[0]), &["engine.cpus = [0]", "4 different processors"]),
        ("engine.io", "mapped".into(), &["unknown variant `mapped`"]),
        // Other slots than those that were counted.
        ("engine.io", "direct".into(), &["the plan's ledger has", "its settings need"]),
        ("placement.policy", "random".into(), &["unknown variant `random`"]),
        (caps, list(&[0, 7, 2]), &["placement.slots.caps[1] = 7", "0 to 6"]),
        (caps, list(&[1, 3, 2]), &["placement.slots.caps[0] = 1", "expected 0"]),
        (caps, list(&[0, 3]), &["placement.slots.caps = a list of 2", "3 layers"]),
        (caps, list(&[0, 3, 2, 2]), &["placement.slots.caps = a list of 4"]),
        (caps, list(&[0, -3, 2]), &["caps", "-3"]),
        (caps, list(&[0, 1, 2]), &["placement.slots.pins[1]", "at most 1"]),
        (caps, list(&[0, 4, 2]), &["expert cache"]),
        (pins, lists(&[&[], &[1, 3]]), &["placement.slots.pins = a list of 2"]),
        (pins, lists(&[&[], &[3, 1], &[]]), &["placement.slots.pins[1] = [3, 1]", "ascending"]),
        (pins, lists(&[&[], &[], &[3, 3]]), &["placement.slots.pins[2] = [3, 3]", "different"]),
        (pins, lists(&[&[], &[], &[6]]), &["placement.slots.pins[2] = [6]", "below 6"]),
        (pins, lists(&[&[0], &[], &[]]), &["placement.slots.pins[0] = [0]", "at most 0"]),
        (pins, lists(&[&[], &[0, 1, 2, 3], &[]]), &["placement.slots.pins[1]", "at most 3"]),
        (pins, lists(&[&[], &[1], &[1, 3]]), &["pinned experts"]),
        ("prediction.calibration", f64::NAN.into(), &["prediction.calibration = NaN"]),
        ("prediction.calibration", 0.0.into(), &["prediction.calibration = 0"]),
        ("prediction.calibration", f64::INFINITY.into(), &["prediction.calibration = inf"]),
        ("prediction.hit_rate.p50", f64::NAN.into(), &["prediction.hit_rate", "NaN", "0 to 1"]),
        ("prediction.hit_rate.p90", 1.5.into(), &["prediction.hit_rate", "1.5"]),
        ("prediction.hit_rate.p10", 0.99.into(), &["prediction.hit_rate", "ascending"]),
        ("prediction.decode_tokens_per_s.p10", (-1.0).into(), &["decode_tokens_per_s", "-1"]),
        ("prediction.decode_tokens_per_s.p90", f64::NAN.into(), &["decode_tokens_per_s", "NaN"]),
        ("prediction.decode_tokens_per_s.p90", f64::INFINITY.into(), &["decode_tokens_per_s"]),
        ("prediction.touched_bytes_per_token", (-1).into(), &["touched_bytes_per_token", "-1"]),
        ("machine.memory.usable_bytes", "much".into(), &["usable_bytes"]),
        ("machine.memory.usabel_bytes", 5.into(), &["unknown field `usabel_bytes`"]),
    ];
    for (path, value, expected) in cases {
        let shown = format!("{path} = {value}");
        let message = judged(&edited(path, value)).expect_err(&shown);
        for part in expected {
            assert!(message.contains(part), "{shown}: {message:?} lacks {part:?}");
        }
    }
}

#[test]
fn every_line_of_the_ledger_is_held_to_the_settings() {
    for line in Line::ALL {
        let mut plan = PLAN.clone();
        let entry = plan.ledger.0.iter_mut().find(|l| l.line == line).unwrap();
        entry.bytes = Bytes(entry.bytes.0 + 64);
        let message = judged(&plan.to_toml().unwrap()).unwrap_err();
        assert!(message.contains(&format!("bytes for {line}, its settings need")), "{message}");
        let mut plan = PLAN.clone();
        plan.ledger.0.retain(|l| l.line != line);
        if PLAN.ledger.bytes(line) > Bytes(0) {
            assert!(judged(&plan.to_toml().unwrap()).unwrap_err().contains(line.name()));
        }
    }
}

#[test]
fn a_plan_for_another_model_is_refused_with_both_named() {
    let error = PLAN.check(&OLMOE).unwrap_err().to_string();
    for part in [PLAN.model.fingerprint.as_str(), &OLMOE.fingerprint, "make a plan for it"] {
        assert!(error.contains(part), "{error}");
    }
}

/// The model's folder may be elsewhere, notes and evidence are prose.
#[test]
fn what_is_prose_may_be_edited() {
    for (path, value) in [
        ("model.directory", "/elsewhere"),
        ("request.budget_source", "because"),
        ("placement.pins_evidence", "by hand"),
        ("prediction.binding", "patience"),
    ] {
        assert_eq!(judged(&edited(path, value)), Ok(()), "{path}");
    }
}

/// Plans that once were a worry, or may become one; FINGERPRINT stands for the model's.
#[test]
fn the_corpus_is_refused_without_a_panic() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let deep = [
        ("lines-that-sum-past-64-bits.toml", "the plan's ledger has 9223372036854775807 bytes"),
        ("slots-of-the-largest-number.toml", "placement.slots.caps[1] = 4294967295"),
        ("card-of-the-largest-number.toml", "placement.cards[4294967295].first_layer"),
    ];
    let mut n_files = 0;
    for entry in std::fs::read_dir(corpus).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let text = String::from_utf8_lossy(&bytes).replace("FINGERPRINT", &GLM.fingerprint);
        let message = judged(&text).expect_err(&path.display().to_string());
        assert!(!message.is_empty());
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        // These must come as far as the arithmetic.
        if let Some((_, expected)) = deep.iter().find(|(file, _)| *file == name) {
            assert!(message.contains(expected), "{name}: {message}");
        }
        n_files += 1;
    }
    assert!(n_files >= 5, "{n_files} files");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_text_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = judged(&String::from_utf8_lossy(&bytes));
        let _ = judged(&format!("version = 5\n{}", String::from_utf8_lossy(&bytes)));
    }

    #[test]
    fn mutated_plans_never_panic(
        edits in proptest::collection::vec(
            (any::<prop::sample::Index>(), "[-0-9a-z\\[\\]=\"., \n]{0,5}", 0_usize..4), 1..4),
    ) {
        let mut text = PLAN_TEXT.clone();
        for (at, with, removed) in edits {
            let start = at.index(text.len());
            let end = (start + removed).min(text.len());
            if text.is_char_boundary(start) && text.is_char_boundary(end) {
                text.replace_range(start..end, &with);
            }
        }
        let _ = judged(&text);
    }

    #[test]
    fn numbers_of_any_size_never_panic(
        at in any::<prop::sample::Index>(),
        number in prop_oneof![any::<i64>(), Just(i64::MAX), Just(0), Just(u32::MAX.into())],
    ) {
        let digits: Vec<(usize, &str)> = PLAN_TEXT
            .match_indices(|c: char| c.is_ascii_digit())
            .filter(|(at, _)| *at > 0 && !PLAN_TEXT.as_bytes()[at - 1].is_ascii_digit())
            .collect();
        let start = digits[at.index(digits.len())].0;
        let rest = &PLAN_TEXT[start..];
        let len = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let mut text = PLAN_TEXT.clone();
        text.replace_range(start..start + len, &number.to_string());
        let _ = judged(&text);
    }
}
