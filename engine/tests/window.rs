//! Experts that are read while others compute: with it and without it logits, counts and bytes read are the
//! same whatever the disk does, and the reads do run under the second attention of their layer.
#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::collections::BTreeSet;
use std::ops::{ControlFlow, Range};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use tierkeep_doctor::Facts;
use tierkeep_engine::disk::{Disk, SystemDisk};
use tierkeep_engine::{
    AccessCounts, Engine, EngineError, Observer, Phase, ReadError, Unobserved, WindowReads,
};
use tierkeep_plans::budget::Streamed;
use tierkeep_plans::catalogue::{Catalogue, Role};
use tierkeep_plans::plan::{IoMode, Plan, Policy, Prefetch};
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

#[path = "support/faults.rs"]
mod faults;
use faults::{Asked, Fault, FaultyDisk, takes_direct_reads};

/// Batches of 4, 4 and 1 tokens, then tokens one by one.
const PROMPT: [u32; 9] = [5, 17, 3, 250, 99, 31, 8, 77, 210];
const DECODED: [u32; 14] = [1, 44, 302, 5, 5, 91, 17, 260, 33, 4, 128, 3, 250, 66];

fn longcat() -> Catalogue {
    oracle("longcat_flash")
}

fn oracle(family: &str) -> Catalogue {
    let oracles = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles");
    Catalogue::open(&oracles.join(family)).unwrap()
}

/// How a plan is set.
#[derive(Clone, Debug)]
struct Setting {
    slots: u32,
    pins: Vec<u32>,
    batch: u64,
    io: IoMode,
    streams: bool,
}

const SETTING: Setting =
    Setting { slots: 3, pins: Vec::new(), batch: 4, io: IoMode::Buffered, streams: false };

/// `depth` reads at once under what is computed; 0 for none.
fn plan(model: &Catalogue, setting: &Setting, depth: u64) -> Plan {
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(1 << 30))),
        context: Some(64),
        threads: Some(1),
        prefill_batch: Some(setting.batch),
        slots: Some(setting.slots),
        policy: Some(Policy::Recency),
        io: Some(setting.io),
        prefetch: (depth == 0).then_some(Prefetch::Off),
        io_depth: Some(depth),
        ..Options::default()
    };
    let mut plan = planner::plan(model, &Facts::default(), &options, None).unwrap();
    for layer in model.spec.expert_layers() {
        plan.placement.slots.pins[layer].clone_from(&setting.pins);
    }
    if setting.streams {
        let layers = (0..model.spec.n_layers as u32).collect();
        plan.placement.streamed = Streamed { layers, head: true };
    }
    plan.settle(model);
    plan
}

fn open(model: &Catalogue, plan: &Plan, disk: impl Disk + 'static) -> Engine {
    Engine::open_on(plan, model, Arc::new(disk), &mut |_, _, _| {}).unwrap()
}

/// Everything that must not depend on when a read is begun.
#[derive(Debug, PartialEq)]
struct Outcome {
    logits: Vec<u32>,
    prefill: Vec<AccessCounts>,
    decode: Vec<AccessCounts>,
    /// Of experts: bytes, reads.
    read: (u64, u64),
    dense_bytes: u64,
    empty_slots: (u64, Bytes),
    routing: Vec<u32>,
}

fn logits(engine: &mut Engine) -> Result<Vec<u32>, EngineError> {
    engine.clear();
    let mut bits = Vec::new();
    let mut take = |engine: &Engine| bits.extend(engine.logits().iter().map(|l| l.to_bits()));
    engine.run(&PROMPT, Phase::Prefill, &mut Unobserved)?;
    take(engine);
    for token in DECODED {
        engine.run(&[token], Phase::Decode, &mut Unobserved)?;
        take(engine);
    }
    Ok(bits)
}

fn outcome(engine: &mut Engine) -> Outcome {
    let before = engine.read_counter().now();
    let logits = logits(engine).unwrap();
    let read = engine.read_counter().now().since(&before);
    Outcome {
        logits,
        prefill: engine.counters().prefill.clone(),
        decode: engine.counters().decode.clone(),
        read: (read.experts.bytes, read.experts.reads),
        dense_bytes: read.dense.bytes,
        empty_slots: engine.empty_slots(),
        routing: engine.last_routing().to_vec(),
    }
}

#[test]
fn with_it_everything_is_as_without_it() {
    let model = longcat();
    let n_experts = model.spec.router.n_experts as u32;
    let mut settings: Vec<Setting> =
        [0, 1, 2, 5, 9, n_experts].map(|slots| Setting { slots, ..SETTING }).into();
    settings.push(Setting { slots: 6, pins: vec![0, 3, 7], ..SETTING });
    settings.push(Setting { slots: 3, pins: vec![2, 5, 11], ..SETTING });
    settings.extend([1, 2, 9].map(|batch| Setting { batch, ..SETTING }));
    settings.push(Setting { streams: true, ..SETTING });
    settings.push(Setting { io: IoMode::Dropped, ..SETTING });
    if takes_direct_reads(&model.shards[0].path) {
        settings.push(Setting { io: IoMode::Direct, streams: true, ..SETTING });
    }
    for setting in settings {
        let without = outcome(&mut open(&model, &plan(&model, &setting, 0), SystemDisk));
        for depth in [1, 3] {
            let mut engine = open(&model, &plan(&model, &setting, depth), SystemDisk);
            assert_eq!(outcome(&mut engine), without, "{setting:?}, {depth} at once");
        }
    }
}

/// Pieces of one expert that are read side by side are the expert, in every family, and their bytes are its
/// bytes.
#[test]
fn pieces_change_neither_tokens_nor_bytes() {
    for family in ["longcat_flash", "olmoe", "glm_moe_dsa", "gpt_oss"] {
        let model = oracle(family);
        for io in [IoMode::Buffered, IoMode::Dropped, IoMode::Direct] {
            if io == IoMode::Direct && !takes_direct_reads(&model.shards[0].path) {
                continue;
            }
            let setting = Setting { io, ..SETTING };
            let whole = outcome(&mut open(&model, &plan(&model, &setting, 0), SystemDisk));
            for depth in [1, 4] {
                let mut plan = plan(&model, &setting, depth);
                plan.engine.read_bytes = Some(Bytes(4096));
                plan.settle(&model);
                let mut found = outcome(&mut open(&model, &plan, SystemDisk));
                assert!(found.read.1 > whole.read.1, "{family}: nothing was cut");
                found.read.1 = whole.read.1;
                assert_eq!(found, whole, "{family}, {io:?}, {depth} at once");
            }
        }
    }
}

/// One of several pieces cannot be read: the error names its place, the slot is empty, and the next run is
/// as if nothing had been.
#[test]
fn a_piece_that_fails_fails_its_expert_alone() {
    let model = oracle("olmoe");
    let mut plan = plan(&model, &Setting { slots: 5, ..SETTING }, 4);
    plan.engine.read_bytes = Some(Bytes(4096));
    plan.settle(&model);
    let expected = logits(&mut open(&model, &plan, SystemDisk)).unwrap();
    let disk = FaultyDisk::sound();
    let mut engine = open(&model, &plan, disk.clone());
    // The last piece of whichever expert.
    let ends: BTreeSet<u64> = model
        .spec
        .expert_layers()
        .flat_map(|layer| model.layer_experts(layer))
        .flat_map(|expert| expert.extents())
        .map(|extent| extent.offset + extent.bytes)
        .collect();
    let is_last = move |asked: &Asked| ends.contains(&(asked.offset + asked.bytes as u64));
    for fault in [Fault::Failed, Fault::Ended] {
        let is_last = is_last.clone();
        disk.fail(move |asked| is_last(asked).then_some(fault));
        for _ in 0..3 {
            let error = logits(&mut engine).unwrap_err();
            assert!(matches!(error, EngineError::Read(_)), "{error}");
            assert!(error.to_string().contains("read of "), "{error}");
        }
        disk.recover();
        assert_eq!(logits(&mut engine).unwrap(), expected, "{fault:?}");
    }
    // Short reads go on where they ended.
    disk.fail(|asked| Some(Fault::Short(asked.bytes / 2 + 1)));
    assert_eq!(logits(&mut engine).unwrap(), expected);
}

#[test]
fn time_is_counted_where_there_are_such_reads_and_nowhere_else() {
    let model = longcat();
    let windows = [0, 1].map(|depth| {
        let mut engine = open(&model, &plan(&model, &SETTING, depth), SystemDisk);
        outcome(&mut engine);
        engine.read_counter().now().window
    });
    assert_eq!(windows[0], WindowReads::default());
    assert!(windows[1].time > Duration::ZERO);
    assert!(windows[1].hidden() <= windows[1].time);
}

/// Which reads of a streamed model were asked for, and who waits for which.
#[derive(Default)]
struct Gate {
    /// (layer, whether it is of an expert, else of the second sub-block).
    asked: Mutex<BTreeSet<(u32, Kind)>>,
    more: Condvar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// Dense weights of the first sub-block; after the last layer, of the head.
    First,
    /// Dense weights of the second sub-block.
    Second,
    Expert,
}

impl Gate {
    fn was_asked(&self, what: (u32, Kind)) {
        self.asked.lock().unwrap().insert(what);
        self.more.notify_all();
    }

    /// Waits until that was asked for; what never is ends the read with a panic, which is an error of the step.
    fn wait_for(&self, what: (u32, Kind), too_long: Duration) {
        let asked = self.asked.lock().unwrap();
        let (asked, timeout) =
            self.more.wait_timeout_while(asked, too_long, |asked| !asked.contains(&what)).unwrap();
        drop(asked);
        if timeout.timed_out() {
            std::panic::resume_unwind(Box::new("a read that waits for what never comes"));
        }
    }
}

/// Every span of the model, with what it is of.
fn places(model: &Catalogue) -> Vec<(String, Range<u64>, (u32, Kind))> {
    let file = |shard: u32| {
        let path = &model.shards[shard as usize].path;
        path.file_name().unwrap().to_string_lossy().into_owned()
    };
    let n_layers = model.spec.n_layers as u32;
    let mut places = Vec::new();
    for tensor in &model.tensors {
        let what = match tensor.role {
            Role::SubBlock { layer, block: 0, .. } | Role::Layer { layer, .. } => {
                (layer, Kind::First)
            }
            Role::SubBlock { layer, .. } => (layer, Kind::Second),
            Role::Head => (n_layers, Kind::First),
            _ => continue,
        };
        let span = tensor.weight;
        places.push((file(span.shard), span.offset..span.offset + span.bytes, what));
    }
    for layer in model.spec.expert_layers() {
        for expert in model.layer_experts(layer) {
            for extent in expert.extents() {
                let range = extent.offset..extent.offset + extent.bytes;
                places.push((file(extent.shard), range, (layer as u32, Kind::Expert)));
            }
        }
    }
    places
}

/// A disk on which the second sub-block of a layer is not read before an expert of the layer is asked for,
/// and no expert comes before the second attention has begun: the buffer that the next layer, or the head, is
/// read into is given up when it does.
fn gate(disk: &FaultyDisk, model: &Catalogue, too_long: Duration) -> Arc<Gate> {
    let gate = Arc::new(Gate::default());
    let (of_disk, places) = (Arc::clone(&gate), places(model));
    disk.slow(move |asked: &Asked| {
        let is_of = |(file, range, _): &&(String, Range<u64>, (u32, Kind))| {
            *file == asked.file && range.contains(&asked.offset)
        };
        let Some(&(_, _, (layer, kind))) = places.iter().find(is_of) else { return };
        of_disk.was_asked((layer, kind));
        match kind {
            Kind::First => {}
            Kind::Second => of_disk.wait_for((layer, Kind::Expert), too_long),
            Kind::Expert => of_disk.wait_for((layer + 1, Kind::First), too_long),
        }
    });
    gate
}

/// Reads begin before the second attention and end after it has begun. Without the window nothing would ask
/// for an expert until the second sub-block is there, which waits for that: an error after a while.
#[test]
fn reads_run_under_the_second_attention() {
    let model = longcat();
    let setting = Setting { slots: 0, streams: true, batch: 9, ..SETTING };
    let expected = outcome(&mut open(&model, &plan(&model, &setting, 0), SystemDisk));
    for depth in [1, 2] {
        let disk = FaultyDisk::sound();
        let mut engine = open(&model, &plan(&model, &setting, depth), disk.clone());
        let gate = gate(&disk, &model, Duration::from_secs(60));
        engine.run(&PROMPT, Phase::Prefill, &mut Unobserved).unwrap();
        let bits: Vec<u32> = engine.logits().iter().map(|l| l.to_bits()).collect();
        assert_eq!(bits, expected.logits[..bits.len()]);
        let asked = gate.asked.lock().unwrap();
        let n_layers = model.spec.n_layers as u32;
        let all = (0..n_layers).map(|layer| (layer, Kind::Expert)).all(|e| asked.contains(&e));
        assert!(all && asked.contains(&(n_layers, Kind::First)), "{asked:?}");
        let window = engine.read_counter().now().window;
        assert!(window.time > Duration::ZERO);
    }
    // The test can fail: what asks for nothing early waits for ever.
    let disk = FaultyDisk::sound();
    let mut engine = open(&model, &plan(&model, &setting, 0), disk.clone());
    gate(&disk, &model, Duration::from_millis(300));
    assert!(engine.run(&PROMPT, Phase::Prefill, &mut Unobserved).is_err());
}

/// A token alone as well, and whatever else is read for it.
#[test]
fn a_read_that_fails_meanwhile_names_its_place_and_the_engine_goes_on() {
    let model = longcat();
    for (slots, streams) in [(0, false), (3, true)] {
        let setting = Setting { slots, streams, ..SETTING };
        let expected = outcome(&mut open(&model, &plan(&model, &setting, 0), SystemDisk)).logits;
        let faults = FaultyDisk::sound();
        let mut engine = open(&model, &plan(&model, &setting, 2), faults.clone());
        let experts: Vec<(String, Range<u64>, u32)> = places(&model)
            .into_iter()
            .filter(|place| place.2.1 == Kind::Expert)
            .map(|(file, range, (layer, _))| (file, range, layer))
            .collect();
        for fault in [Fault::Failed, Fault::Ended] {
            for failing in 0..model.spec.n_layers as u32 {
                let experts = experts.clone();
                faults.fail(move |asked| {
                    let is_bad = |(file, range, layer): &(String, Range<u64>, u32)| {
                        *file == asked.file && range.contains(&asked.offset) && *layer == failing
                    };
                    experts.iter().any(is_bad).then_some(fault)
                });
                let error = logits(&mut engine).unwrap_err();
                assert!(matches!(error, EngineError::Read(ReadError::Read { .. })), "{error}");
                let error = error.to_string();
                assert!(error.contains("model-0") && error.contains("at offset"), "{error}");
                faults.recover();
            }
            // Short and interrupted reads go on.
            let mut n = 0_usize;
            faults.fail(move |asked| {
                n += 1;
                [None, Some(Fault::Interrupted), Some(Fault::Short(asked.bytes / 2))][n % 3]
            });
            assert_eq!(logits(&mut engine).unwrap(), expected);
            faults.recover();
            assert_eq!(logits(&mut engine).unwrap(), expected);
        }
    }
}

/// An interrupt after any layer leaves nothing under way, and the same tokens follow.
#[test]
fn an_interrupt_is_heeded_and_nothing_stays_under_way() {
    struct Stop(usize);
    impl Observer for Stop {
        fn layer(&mut self, layer: usize, _: usize, _: &[f32]) -> ControlFlow<()> {
            if layer == self.0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }
    }
    let model = longcat();
    let setting = Setting { streams: true, ..SETTING };
    let expected = outcome(&mut open(&model, &plan(&model, &setting, 0), SystemDisk)).logits;
    let mut engine = open(&model, &plan(&model, &setting, 1), SystemDisk);
    for layer in 0..model.spec.n_layers {
        engine.clear();
        let error = engine.run(&PROMPT, Phase::Prefill, &mut Stop(layer)).unwrap_err();
        assert!(matches!(error, EngineError::Interrupted), "{error}");
        let read = engine.read_counter().now();
        assert_eq!(logits(&mut engine).unwrap(), expected);
        assert!(engine.read_counter().now().all().bytes > read.all().bytes);
    }
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
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Never garbage: whatever fails on whichever thread, logits are those of a sound disk or there is an
    /// error.
    #[test]
    fn whatever_fails_under_compute_logits_are_the_models_or_there_is_an_error(
        seed in any::<u64>(),
        one_in in prop::sample::select(vec![3_u64, 20, 100, 400]),
        slots in 0..6_u32,
        depth in 1..4_u64,
        streams in any::<bool>(),
        io in prop::sample::select(vec![IoMode::Buffered, IoMode::Dropped]),
    ) {
        thread_local! {
            static MODEL: (Catalogue, Vec<u32>) = {
                let model = longcat();
                let mut engine = open(&model, &plan(&model, &SETTING, 0), SystemDisk);
                let expected = logits(&mut engine).unwrap();
                (model, expected)
            };
        }
        MODEL.with(|(model, expected)| {
            let setting = Setting { slots, streams, io, ..SETTING };
            let faults = FaultyDisk::sound();
            let mut engine = open(model, &plan(model, &setting, depth), faults.clone());
            for round in 0..3 {
                faults.fail(schedule(seed.wrapping_add(round), one_in));
                if let Ok(found) = logits(&mut engine) {
                    assert_eq!(&found, expected);
                }
            }
            faults.recover();
            assert_eq!(&logits(&mut engine).unwrap(), expected);
        });
    }
}
