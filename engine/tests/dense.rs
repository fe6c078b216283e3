//! Dense weights that are mapped or streamed: that they compute what copies do, what is read and how
//! often, and that nothing is computed on what is not the model.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

#[path = "support/faults.rs"]
mod faults;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use faults::{Fault, FaultyDisk, maps_files};
use tierkeep_doctor::Facts;
use tierkeep_engine::generate::generate;
use tierkeep_engine::{Engine, EngineError, Observer, Phase, ReadError, Unobserved};
use tierkeep_plans::budget::{DenseResidency, EmbeddingResidency, Line, ModelBytes, Streamed};
use tierkeep_plans::budget::{MAP_PAGE_BYTES, streamed_bytes_per_token};
use tierkeep_plans::catalogue::{Catalogue, Role};
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

const PROMPT: [u32; 9] = [1, 17, 200, 5, 99, 4, 301, 12, 77];

fn oracle(family: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles").join(family)
}

/// A copy of a model that may be damaged.
fn copy_of(family: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(oracle(family)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), directory.path().join(entry.file_name())).unwrap();
    }
    directory
}

/// A plan that has every expert read at the start, so that a run reads dense weights alone.
fn plan(model: &Catalogue, dense: DenseResidency, streamed: Streamed) -> Plan {
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(1 << 30))),
        context: Some(64),
        threads: Some(2),
        prefill_batch: Some(4),
        ..Options::default()
    };
    let mut plan = planner::plan(model, &Facts::default(), &options, None).unwrap();
    for layer in model.spec.expert_layers() {
        plan.placement.slots.pins[layer] = (0..model.spec.router.n_experts as u32).collect();
    }
    if streamed.head && model.spec.tied_embeddings {
        plan.engine.embedding = EmbeddingResidency::RowRead;
    }
    plan.placement.dense = dense;
    plan.placement.streamed = streamed;
    plan.settle(model);
    plan
}

fn copies(model: &Catalogue) -> Plan {
    plan(model, DenseResidency::Resident, Streamed::default())
}

fn mapped(model: &Catalogue) -> Plan {
    plan(model, DenseResidency::Mapped, Streamed::default())
}

/// [`mapped`] where files are mapped, and nothing elsewhere.
fn mapped_if_possible(model: &Catalogue) -> Option<Plan> {
    maps_files().then(|| mapped(model))
}

fn streamed(model: &Catalogue, head: bool) -> Plan {
    let layers = (0..model.spec.n_layers as u32).collect();
    plan(model, DenseResidency::Resident, Streamed { layers, head })
}

fn open(model: &Catalogue, plan: &Plan) -> Engine {
    Engine::open(plan, model, &mut |_, _, _| {}).unwrap()
}

fn tokens(engine: &mut Engine) -> Vec<u32> {
    engine.clear();
    let mut go_on = |_| ControlFlow::Continue(());
    generate(engine, &PROMPT, 12, &[], None, &mut go_on).unwrap().tokens
}

/// Every tensor one byte further, at odd addresses all: safetensors promises no alignment.
#[test]
fn tensors_at_odd_places_compute_the_same() {
    for family in ["olmoe", "glm_moe_dsa"] {
        let model = Catalogue::open(&oracle(family)).unwrap();
        let expected = tokens(&mut open(&model, &copies(&model)));
        let directory = copy_of(family);
        for shard in &model.shards {
            let path = directory.path().join(shard.path.file_name().unwrap());
            let whole = fs::read(&path).unwrap();
            let length = u64::from_le_bytes(whole[..8].try_into().unwrap());
            let (header, data) = whole[8..].split_at(length as usize);
            let spaces = if length.is_multiple_of(2) { 1 } else { 2 };
            let shifted =
                [&(length + spaces).to_le_bytes(), header, &b"  "[..spaces as usize], data];
            fs::write(&path, shifted.concat()).unwrap();
        }
        let odd = Catalogue::open(directory.path()).unwrap();
        assert!(odd.tensors.iter().all(|t| t.weight.offset % 2 == 1), "{family}");
        for plan in [copies(&odd), streamed(&odd, true)].into_iter().chain(mapped_if_possible(&odd))
        {
            assert_eq!(tokens(&mut open(&odd, &plan)), expected, "{family}");
        }
    }
}

/// An embedding that is the head as well, streamed: rows of it are read from disk.
#[test]
fn a_tied_head_is_streamed_and_its_rows_are_read() {
    let mut model = Catalogue::open(&oracle("olmoe")).unwrap();
    model.spec.tied_embeddings = true;
    model.tensors.retain(|tensor| tensor.role != Role::Head);
    let expected = tokens(&mut open(&model, &copies(&model)));
    let plan = streamed(&model, true);
    assert_eq!(plan.engine.embedding, EmbeddingResidency::RowRead);
    assert_eq!(tokens(&mut open(&model, &plan)), expected);
    if let Some(plan) = mapped_if_possible(&model) {
        assert_eq!(tokens(&mut open(&model, &plan)), expected);
    }
    let resident = Plan {
        engine: tierkeep_plans::plan::EngineSettings {
            embedding: EmbeddingResidency::Resident,
            ..plan.engine.clone()
        },
        ..plan
    };
    let refused = resident.check(&model).unwrap_err().to_string();
    assert!(refused.contains("engine.embedding"), "{refused}");
}

/// Each streamed layer is read once for a batch, the head once for a batch whose logits are wanted, and
/// what is read is what the plan says of a token.
#[test]
fn each_streamed_unit_is_read_once_for_a_batch() {
    for family in ["olmoe", "glm_moe_dsa-shared-indexer", "longcat_flash"] {
        let model = Catalogue::open(&oracle(family)).unwrap();
        let plan = streamed(&model, true);
        let sums = ModelBytes::of(&model, plan.engine.io);
        let a_token = streamed_bytes_per_token(&sums, &plan.placement.streamed);
        assert!(a_token > 0);
        let layers = Streamed { head: false, ..plan.placement.streamed.clone() };
        let layers = streamed_bytes_per_token(&sums, &layers);
        let mut engine = open(&model, &plan);
        let counter = engine.read_counter();
        let loaded = counter.now();
        let streamed = || counter.now().since(&loaded).dense.bytes;
        engine.run(&PROMPT, Phase::Prefill, &mut Unobserved).unwrap();
        // Batches of 4, 4 and 1; the head for the last.
        assert_eq!(streamed(), 2 * layers + a_token, "{family}");
        for token in 0..5 {
            engine.run(&[token], Phase::Decode, &mut Unobserved).unwrap();
        }
        assert_eq!(streamed(), 2 * layers + 6 * a_token, "{family}");
        assert_eq!(counter.now().since(&loaded).experts.bytes, 0, "experts are pinned");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn what_is_resident_or_mapped_is_not_read_again() {
    // Files that no other test of this program maps.
    let directory = copy_of("glm_moe_dsa");
    let model = Catalogue::open(directory.path()).unwrap();
    let files: Vec<PathBuf> = model.shards.iter().map(|shard| shard.path.clone()).collect();
    for plan in std::iter::once(copies(&model)).chain(mapped_if_possible(&model)) {
        let mut engine = open(&model, &plan);
        let loaded = engine.read_counter().bytes();
        tokens(&mut engine);
        assert_eq!(engine.read_counter().bytes(), loaded);
        let pages = Bytes(tierkeep_doctor::process::mapped_bytes(&files).into_value().unwrap());
        let line = plan.ledger.bytes(Line::DenseWeights);
        match plan.placement.dense {
            DenseResidency::Resident => assert_eq!(pages, Bytes(0)),
            // The machine may have taken pages back; it cannot have mapped more.
            DenseResidency::Mapped => {
                assert!(Bytes(0) < pages && pages <= line, "{pages} of {line}")
            }
        }
        assert_eq!(engine.bound(Line::DenseWeights), line);
    }
}

/// A disk that fails under the thread that reads ahead: the error arrives as any other, the sequence is what
/// it was, and with the disk back the same tokens come.
#[test]
fn a_disk_that_fails_while_streaming_is_an_error_and_not_the_end() {
    let model = Catalogue::open(&oracle("olmoe")).unwrap();
    let expected = tokens(&mut open(&model, &copies(&model)));
    let disk = FaultyDisk::sound();
    let plan = streamed(&model, true);
    let mut engine =
        Engine::open_on(&plan, &model, Arc::new(disk.clone()), &mut |_, _, _| {}).unwrap();
    engine.run(&PROMPT[..3], Phase::Prefill, &mut Unobserved).unwrap();
    for shard in 0..model.shards.len() {
        let name = format!("model-0000{}-of-00004.safetensors", shard + 1);
        let failing = name.clone();
        disk.fail(move |asked| (asked.file == failing).then_some(Fault::Failed));
        let error = engine.run(&PROMPT[3..], Phase::Prefill, &mut Unobserved).unwrap_err();
        let EngineError::Read(ReadError::Read { path, wanted, got, .. }) = &error else {
            panic!("{error}")
        };
        assert!(path.ends_with(&name) && *wanted > 0 && *got < *wanted, "{error}");
        disk.recover();
    }
    assert_eq!(engine.len(), 3, "tokens of a batch that failed are no part of the sequence");
    assert_eq!(tokens(&mut engine), expected);
}

/// An observer that ends a run between two batches.
struct Ends;

impl Observer for Ends {
    fn batch(&mut self, _: usize) -> ControlFlow<()> {
        ControlFlow::Break(())
    }
}

#[test]
fn an_interrupted_run_leaves_the_stream_usable() {
    let model = Catalogue::open(&oracle("olmoe")).unwrap();
    let mut engine = open(&model, &streamed(&model, true));
    let expected = tokens(&mut engine);
    engine.clear();
    let error = engine.run(&PROMPT, Phase::Prefill, &mut Ends).unwrap_err();
    assert!(matches!(error, EngineError::Interrupted));
    assert_eq!(tokens(&mut engine), expected);
}

/// The folder's shard of this number, open for writing.
fn shard(directory: &Path, model: &Catalogue, at: usize) -> (String, fs::File) {
    let name = model.shards[at].path.file_name().unwrap().to_string_lossy().into_owned();
    let file = fs::File::options().write(true).open(directory.join(&name)).unwrap();
    (name, file)
}

#[test]
fn a_mapped_shard_that_is_cut_off_is_an_error_with_its_place() {
    if !maps_files() {
        return;
    }
    let directory = copy_of("olmoe");
    let model = Catalogue::open(directory.path()).unwrap();
    let mut engine = open(&model, &mapped(&model));
    let before = tokens(&mut engine);
    assert_eq!(before.len(), 12);
    let (name, file) = shard(directory.path(), &model, 1);
    file.set_len(2 * MAP_PAGE_BYTES).unwrap();
    engine.clear();
    for _ in 0..2 {
        let error = engine.run(&PROMPT, Phase::Prefill, &mut Unobserved).unwrap_err();
        let EngineError::Read(ReadError::Read { path, offset, wanted, got, .. }) = &error else {
            panic!("{error}")
        };
        assert!(path.ends_with(&name), "{error}");
        assert!(*offset >= 2 * MAP_PAGE_BYTES && *offset < model.shards[1].bytes, "{error}");
        assert_eq!((*wanted as u64, *got), (MAP_PAGE_BYTES, 0), "{error}");
        assert!(error.to_string().contains("the file ended"), "{error}");
        assert!(engine.is_empty());
    }
    // Another engine, on files that are whole, is not disturbed by what this one lost.
    let whole = Catalogue::open(&oracle("olmoe")).unwrap();
    assert_eq!(tokens(&mut open(&whole, &mapped(&whole))), before);
}

/// A file that is cut off inside its last page, or written to in place, raises no signal.
#[test]
fn a_mapped_shard_that_is_written_to_is_an_error() {
    if !maps_files() {
        return;
    }
    let directory = copy_of("olmoe");
    let model = Catalogue::open(directory.path()).unwrap();
    for shrink in [0, 1] {
        let mut engine = open(&model, &mapped(&model));
        engine.run(&PROMPT, Phase::Prefill, &mut Unobserved).unwrap();
        let (name, file) = shard(directory.path(), &model, 3);
        file.set_len(model.shards[3].bytes - shrink).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1 + shrink)).unwrap();
        let error = engine.run(&[3], Phase::Decode, &mut Unobserved).unwrap_err();
        let EngineError::Read(ReadError::Overwritten { path, .. }) = &error else {
            panic!("{error}")
        };
        assert!(path.ends_with(&name), "{error}");
        assert_eq!(engine.len(), PROMPT.len());
    }
}

/// A shard that is replaced under its name is another file: the one that is mapped is still there.
#[test]
fn a_mapped_shard_that_is_replaced_goes_on() {
    if !maps_files() {
        return;
    }
    let directory = copy_of("olmoe");
    let model = Catalogue::open(directory.path()).unwrap();
    let mut engine = open(&model, &mapped(&model));
    let before = tokens(&mut engine);
    let path = directory.path().join(model.shards[0].path.file_name().unwrap());
    let other = directory.path().join("other");
    fs::write(&other, vec![0; model.shards[0].bytes as usize]).unwrap();
    fs::rename(other, path).unwrap();
    assert_eq!(tokens(&mut engine), before);
}

/// A shard that lacks its end when it is mapped is found while loading.
#[test]
fn pages_that_cannot_be_brought_in_fail_the_load() {
    if !maps_files() {
        return;
    }
    let directory = copy_of("olmoe");
    let model = Catalogue::open(directory.path()).unwrap();
    let plan = mapped(&model);
    // Cut off after the sizes were checked, at the first sign of progress.
    let (name, file) = shard(directory.path(), &model, 2);
    let mut cut = |_, _, _| file.set_len(MAP_PAGE_BYTES).unwrap();
    let error = Engine::open(&plan, &model, &mut cut).unwrap_err();
    let EngineError::Read(ReadError::Read { path, offset, .. }) = &error else { panic!("{error}") };
    assert!(path.ends_with(&name) && *offset < model.shards[2].bytes, "{error}");
    assert!(error.to_string().contains("the file ended"), "{error}");
}
