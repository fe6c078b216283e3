//! Runs over a disk that fails: what survives gives the same tokens, what does not is an error that
//! names the place, and never is there text of anything but the model.
#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use tempfile::TempDir;
use tierkeep_doctor::Facts;
use tierkeep_engine::disk::{Disk, SystemDisk};
use tierkeep_engine::generate::greedy;
use tierkeep_engine::{Engine, EngineError, Phase, ReadError, Unobserved};
use tierkeep_plans::catalogue::{Catalogue, DIRECT_ALIGN, Role};
use tierkeep_plans::plan::{IoMode, Plan, Policy};
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

#[path = "support/faults.rs"]
mod faults;
use faults::{Asked, Fault, FaultyDisk, takes_direct_reads};

const PROMPT: [u32; 6] = [5, 17, 3, 250, 99, 31];
const N_TOKENS: usize = 12;

/// A copy of a small model of several shards, which a test may damage.
struct Copied {
    directory: TempDir,
    model: Catalogue,
}

fn oracle(family: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles").join(family)
}

impl Copied {
    fn new(family: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for file in fs::read_dir(oracle(family)).unwrap() {
            let path = file.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name == "config.json" || name.starts_with("model") {
                fs::copy(&path, directory.path().join(name)).unwrap();
            }
        }
        let model = Catalogue::open(directory.path()).unwrap();
        Self { directory, model }
    }

    fn shard(&self, shard: u32) -> &Path {
        &self.model.shards[shard as usize].path
    }
}

/// Two slots of each layer, one of them pinned, and the embedding read by rows: every way of reading.
fn plan(model: &Catalogue, io: IoMode) -> Plan {
    let options = |ram| Options {
        ram: Some(SizeRequest::Absolute(Bytes(ram))),
        context: Some(64),
        threads: Some(1),
        prefill_batch: Some(4),
        slots: Some(2),
        policy: Some(Policy::Recency),
        io: Some(io),
        ..Options::default()
    };
    let all = planner::plan(model, &Facts::default(), &options(1 << 30), None).unwrap();
    let by_rows = options(all.ledger.total().0 - 1);
    let mut plan = planner::plan(model, &Facts::default(), &by_rows, None).unwrap();
    for layer in model.spec.expert_layers() {
        plan.placement.slots.pins[layer] = vec![3];
    }
    plan.settle(model);
    plan
}

fn open(model: &Catalogue, io: IoMode, disk: impl Disk + 'static) -> Result<Engine, EngineError> {
    Engine::open_on(&plan(model, io), model, Arc::new(disk), &mut |_, _, _| {})
}

/// Greedy tokens after the prompt, from an empty sequence.
fn tokens(engine: &mut Engine) -> Result<Vec<u32>, EngineError> {
    engine.clear();
    engine.run(&PROMPT, Phase::Prefill, &mut Unobserved)?;
    let mut tokens = vec![greedy(engine.logits())?];
    while tokens.len() < N_TOKENS {
        engine.run(&tokens[tokens.len() - 1..], Phase::Decode, &mut Unobserved)?;
        tokens.push(greedy(engine.logits())?);
    }
    Ok(tokens)
}

fn modes(model: &Catalogue) -> Vec<IoMode> {
    let mut modes = vec![IoMode::Dropped, IoMode::Buffered];
    if takes_direct_reads(&model.shards[0].path) {
        modes.push(IoMode::Direct);
    }
    modes
}

fn expected(model: &Catalogue) -> Vec<u32> {
    tokens(&mut open(model, IoMode::Buffered, SystemDisk).unwrap()).unwrap()
}

#[test]
fn r2_short_and_interrupted_reads_change_no_token() {
    for family in ["olmoe", "glm_moe_dsa"] {
        let model = Catalogue::open(&oracle(family)).unwrap();
        let expected = expected(&model);
        for io in modes(&model) {
            let faults = FaultyDisk::sound();
            // Reads go on side by side: each place has its own misfortunes.
            let mut n_asked = HashMap::new();
            faults.fail(move |asked| {
                let place = (asked.file.clone(), asked.offset + asked.bytes as u64);
                let n: &mut usize = n_asked.entry(place).or_default();
                *n += 1;
                match *n % 3 {
                    0 => Some(Fault::Interrupted),
                    // Past the page cache a device answers in sectors.
                    1 => Some(Fault::Short((asked.bytes / 2).next_multiple_of(512))),
                    _ => None,
                }
            });
            let mut engine = open(&model, io, faults).unwrap();
            assert_eq!(tokens(&mut engine).unwrap(), expected, "{family}, {}", io.name());
            assert_eq!(engine.read_counter().retries(), 0);
        }
    }
}

#[test]
fn a_place_that_fails_once_is_asked_again_and_counted() {
    let model = Catalogue::open(&oracle("olmoe")).unwrap();
    let expected = expected(&model);
    for io in modes(&model) {
        let faults = FaultyDisk::sound();
        let mut failed = HashMap::new();
        faults.fail(move |asked| {
            let place = (asked.file.clone(), asked.offset, asked.bytes);
            let fails = failed.entry(place).or_insert(false);
            *fails = !*fails;
            fails.then_some(Fault::Failed)
        });
        let mut engine = open(&model, io, faults.clone()).unwrap();
        assert_eq!(tokens(&mut engine).unwrap(), expected);
        let n_asked = faults.take_asked().len() as u64;
        assert_eq!(engine.read_counter().retries(), n_asked / 2, "{}", io.name());
    }
}

/// F10 and R3: the place is named, nothing else is blamed, and the engine goes on with the disk.
#[test]
fn f10_a_failing_place_is_named_and_what_stays_is_whole() {
    let model = Catalogue::open(&oracle("glm_moe_dsa")).unwrap();
    let expected = expected(&model);
    for io in modes(&model) {
        let faults = FaultyDisk::sound();
        let mut engine = open(&model, io, faults.clone()).unwrap();
        // Each expert of the run in turn, found by what the run asks for.
        faults.take_asked();
        tokens(&mut engine).unwrap();
        let asked = faults.take_asked();
        for bad in asked.iter().step_by(7) {
            let bad = bad.clone();
            let rule = bad.clone();
            faults.fail(move |asked| (*asked == rule).then_some(Fault::Failed));
            let before = engine.read_counter().bytes();
            match tokens(&mut engine) {
                // It may be in a slot by now.
                Ok(found) => assert_eq!(found, expected),
                Err(error) => {
                    let EngineError::Read(ReadError::Read { path, offset, wanted, got, .. }) =
                        &error
                    else {
                        panic!("{error}");
                    };
                    assert!(path.ends_with(&bad.file));
                    assert!((bad.offset..bad.offset + bad.bytes as u64).contains(offset));
                    assert!(*wanted <= bad.bytes && *got < *wanted);
                    let text = error.to_string();
                    assert!(text.contains(&format!("at offset {offset} got {got}: ")), "{text}");
                    assert!(text.contains("need not be downloaded again"), "{text}");
                }
            }
            assert!(engine.read_counter().bytes() >= before);
            faults.recover();
            assert_eq!(tokens(&mut engine).unwrap(), expected, "{}: {bad:?}", io.name());
        }
    }
}

#[test]
fn loading_fails_by_name() {
    let model = Catalogue::open(&oracle("olmoe")).unwrap();
    let norm = model.tensors.iter().find(|t| t.role == Role::FinalNorm).unwrap().weight;
    let pin = model.expert(1, 3).unwrap().extents()[0];
    for io in modes(&model) {
        for (shard, offset) in [(norm.shard, norm.offset), (pin.shard, pin.offset)] {
            let name = model.shards[shard as usize].path.file_name().unwrap();
            let name = name.to_string_lossy().into_owned();
            let faults = FaultyDisk::sound();
            let bad = name.clone();
            faults.fail(move |asked| {
                let holds = asked.offset <= offset && offset < asked.offset + asked.bytes as u64;
                (asked.file == bad && holds).then_some(Fault::Failed)
            });
            let error = open(&model, io, faults).unwrap_err();
            let EngineError::Read(ReadError::Read { path, offset: start, wanted, .. }) = &error
            else {
                panic!("{error}");
            };
            assert!(path.ends_with(&name), "{error}");
            // Whole blocks are read, so that what shares one fails with it.
            let blocks = start / DIRECT_ALIGN..=(start + *wanted as u64) / DIRECT_ALIGN;
            assert!(blocks.contains(&(offset / DIRECT_ALIGN)), "{error}");
            assert_eq!(*start == offset, io != IoMode::Direct || offset == pin.offset, "{error}");
        }
    }
}

#[test]
fn a_shard_that_is_cut_while_it_is_in_use_is_an_error() {
    let copied = Copied::new("olmoe");
    for io in modes(&copied.model) {
        let copied = Copied::new("olmoe");
        let mut engine = open(&copied.model, io, SystemDisk).unwrap();
        for shard in &copied.model.shards {
            let file = OpenOptions::new().write(true).open(&shard.path).unwrap();
            file.set_len(shard.bytes / 3).unwrap();
        }
        let error = tokens(&mut engine).unwrap_err();
        let EngineError::Read(error) = error else { panic!("{error}") };
        match &error {
            ReadError::Read { wanted, got, .. } => {
                assert!(got < wanted, "{error}");
                assert!(error.to_string().contains("the file ended"), "{error}");
            }
            // What was read lay before the cut, and may be of another file all the same.
            ReadError::Overwritten { .. } => {
                assert!(error.to_string().contains("bytes long, it is"), "{error}");
            }
            other => panic!("{other}"),
        }
    }
}

/// What is read of a file that something wrote to reaches no token, even if its size is the same.
#[test]
fn a_shard_that_is_overwritten_while_it_is_in_use_gives_nothing_more() {
    let copied = Copied::new("olmoe");
    let expected = expected(&copied.model);
    for io in modes(&copied.model) {
        let copied = Copied::new("olmoe");
        let mut engine = open(&copied.model, io, SystemDisk).unwrap();
        assert_eq!(tokens(&mut engine).unwrap(), expected);
        for shard in 0..copied.model.shards.len() as u32 {
            let file = OpenOptions::new().write(true).open(copied.shard(shard)).unwrap();
            file.write_all_at(&[0x77; 4096], copied.model.shards[0].bytes / 2).unwrap();
            // Clocks of file times are coarse: what was written a moment ago may have the old time.
            file.set_modified(SystemTime::now() + Duration::from_secs(1)).unwrap();
        }
        let before = engine.counters().clone();
        let error = tokens(&mut engine).unwrap_err();
        assert!(matches!(error, EngineError::Read(ReadError::Overwritten { .. })), "{error}");
        assert!(error.to_string().contains("was written to while it was in use"), "{error}");
        let misses = engine.counters().total(Phase::Prefill).misses;
        assert_eq!(misses, before.total(Phase::Prefill).misses, "no read of it was a success");
    }
}

/// A shard that is replaced by a rename leaves the open file as it was.
#[test]
fn a_shard_that_is_replaced_changes_no_token_and_is_reported() {
    let copied = Copied::new("olmoe");
    let expected = expected(&copied.model);
    for io in modes(&copied.model) {
        let copied = Copied::new("olmoe");
        let mut engine = open(&copied.model, io, SystemDisk).unwrap();
        assert_eq!(engine.replaced_shards(), Vec::<PathBuf>::new());
        for shard in 0..2 {
            let path = copied.shard(shard);
            let new = copied.directory.path().join("new");
            File::create(&new).unwrap().write_all_at(&[0x77; 1000], 0).unwrap();
            fs::rename(&new, path).unwrap();
        }
        fs::remove_file(copied.shard(2)).unwrap();
        assert_eq!(tokens(&mut engine).unwrap(), expected);
        let replaced: Vec<PathBuf> = (0..3).map(|s| copied.shard(s).to_owned()).collect();
        assert_eq!(engine.replaced_shards(), replaced);
    }
}

/// Bytes read are those of the misses, to the byte, in every mode.
#[test]
fn bytes_read_are_misses_times_an_experts_size() {
    let model = Catalogue::open(&oracle("glm_moe_dsa")).unwrap();
    let expert = model.experts[0].read_bytes();
    assert!(model.experts.iter().all(|e| e.read_bytes() == expert));
    for io in modes(&model) {
        let mut engine = open(&model, io, SystemDisk).unwrap();
        tokens(&mut engine).unwrap();
        let (counter, counts) = (engine.read_counter(), engine.counters().clone());
        let (before, brought) = (counter.bytes(), counter.brought_bytes());
        let misses = counts.total(Phase::Prefill).misses + counts.total(Phase::Decode).misses;
        tokens(&mut engine).unwrap();
        let counts = engine.counters();
        let misses =
            counts.total(Phase::Prefill).misses + counts.total(Phase::Decode).misses - misses;
        let table = model.tensors.iter().find(|t| t.role == Role::Embedding).unwrap();
        let row = table.stored.row_bytes(table.cols) + if table.scales.is_some() { 4 } else { 0 };
        let rows = (PROMPT.len() + N_TOKENS - 1) as u64 * row;
        assert!(misses > 20, "{misses}");
        assert_eq!(counter.bytes() - before, misses * expert + rows, "{}", io.name());
        let brought = counter.brought_bytes() - brought;
        assert_eq!(brought == misses * expert + rows, io != IoMode::Direct);
        assert!(brought >= misses * expert + rows);
    }
}

/// Direct reads where there are none: the file and the remedy are named, and nothing falls back.
#[test]
fn a_filesystem_without_direct_reads_is_named() {
    #[derive(Debug)]
    struct None;
    impl Disk for None {
        fn open(
            &self,
            path: &Path,
            access: tierkeep_engine::disk::Access,
        ) -> std::io::Result<Box<dyn tierkeep_engine::disk::ShardFile>> {
            match access {
                tierkeep_engine::disk::Access::PageCache => SystemDisk.open(path, access),
                tierkeep_engine::disk::Access::Direct => Err(std::io::Error::from_raw_os_error(22)),
            }
        }
        fn stamp(&self, path: &Path) -> std::io::Result<tierkeep_engine::disk::Stamp> {
            SystemDisk.stamp(path)
        }
    }
    let model = Catalogue::open(&oracle("olmoe")).unwrap();
    open(&model, IoMode::Dropped, None).unwrap();
    let error = open(&model, IoMode::Direct, None).unwrap_err();
    assert!(matches!(error, EngineError::Read(ReadError::NotDirect { .. })), "{error}");
    let error = error.to_string();
    assert!(error.contains("model-00001-of-00004.safetensors"), "{error}");
    assert!(error.contains("plan again with `--io dropped`"), "{error}");
}

/// A fault for one read in so many, by a generator that a case seeds.
fn schedule(seed: u64, one_in: u64) -> impl FnMut(&Asked) -> Option<Fault> + Send {
    let mut state = seed | 1;
    move |asked| {
        // xorshift64*: a schedule needs no more.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let drawn = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16;
        if !drawn.is_multiple_of(one_in) {
            return None;
        }
        Some(match drawn / one_in % 8 {
            0..=2 => Fault::Short((drawn / 1024) as usize % asked.bytes.max(1)),
            3 | 4 => Fault::Interrupted,
            5 | 6 => Fault::Failed,
            _ => Fault::Ended,
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Never garbage: whatever fails, tokens are those of a sound disk or there is an error.
    #[test]
    fn whatever_fails_tokens_are_the_models_or_there_is_an_error(
        seed in any::<u64>(),
        one_in in prop::sample::select(vec![2_u64, 5, 20, 100]),
        mode in any::<prop::sample::Index>(),
    ) {
        thread_local! {
            static MODEL: (Catalogue, Vec<u32>) = {
                let model = Catalogue::open(&oracle("olmoe")).unwrap();
                let expected = expected(&model);
                (model, expected)
            };
        }
        MODEL.with(|(model, expected)| {
            let modes = modes(model);
            let io = modes[mode.index(modes.len())];
            let faults = FaultyDisk::sound();
            let mut engine = open(model, io, faults.clone()).unwrap();
            faults.fail(schedule(seed, one_in));
            for _ in 0..3 {
                if let Ok(found) = tokens(&mut engine) {
                    assert_eq!(&found, expected);
                }
            }
            faults.recover();
            assert_eq!(&tokens(&mut engine).unwrap(), expected, "after {}", io.name());
            // Loading under the same faults.
            faults.fail(schedule(seed, one_in * 10));
            if let Ok(mut engine) = open(model, io, faults.clone()) {
                faults.recover();
                assert_eq!(&tokens(&mut engine).unwrap(), expected, "loaded by {}", io.name());
            }
        });
    }
}
