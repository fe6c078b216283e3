//! Lookups that are begun against the same lookups made one after another: every answer, every read and
//! what stays in memory are the same, over slots, pins, batches and lanes; and what fails leaves nothing
//! behind.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use tierkeep_plans::catalogue::Projection;
use tierkeep_plans::plan::IoMode;

use super::*;
use crate::counters::{Counters, Phase, Tier};
use crate::disk::SystemDisk;
use crate::feed_forward::{ExpertLists, list_union};
use crate::store::Store;
use crate::store::tests::faults::{Asked, Fault, FaultyDisk};
use crate::store::tests::support::Form;
use crate::store::tests::{Disk, K, N_EXPERTS};

/// Nothing waits for longer in a test: what does has failed.
const TOO_LONG: Duration = Duration::from_secs(30);

/// One sequence's way through the store.
struct Run<'a> {
    disk: &'a Disk,
    store: Store,
    lists: ExpertLists,
    counters: Counters,
    is_begun: bool,
}

impl<'a> Run<'a> {
    fn new(disk: &'a Disk, caps: [u32; 2], pins: [&[u32]; 2], is_begun: bool) -> Self {
        Self {
            store: disk.store(caps, pins).unwrap(),
            lists: ExpertLists::new(&disk.model.spec, 64),
            counters: Counters::new(2, N_EXPERTS as usize),
            disk,
            is_begun,
        }
    }

    fn experts(&mut self, layer: usize) -> Experts<'_> {
        Experts {
            spec: &self.disk.model.spec,
            store: &mut self.store,
            files: &self.disk.files,
            lists: &mut self.lists,
            counts: self.counters.layer(Phase::Decode, layer),
            layer,
        }
    }

    /// The experts of one token or of a batch, as the feed-forward goes through them; how each was found.
    fn step(&mut self, layer: usize, chosen: &[u32]) -> Result<Vec<(u32, Tier)>, EngineError> {
        let (disk, is_begun) = (self.disk, self.is_begun);
        let experts = &mut self.experts(layer);
        let mut found = Vec::new();
        if is_begun {
            experts.begin(chosen, chosen.len() / K)?;
        } else if chosen.len() > K {
            list_union(chosen, experts);
        }
        if chosen.len() == K {
            let held = if is_begun {
                experts.lease_all(chosen)?;
                let mut held: Vec<Lease> = experts.lists.leases.drain(..).collect();
                for lease in &held {
                    while !experts.store.has_come(lease)? {
                        experts.store.wait_for_any();
                    }
                }
                held.sort_by_key(|lease| chosen.iter().position(|&expert| lease.is_of(expert)));
                held
            } else {
                let leased = chosen.iter().map(|&expert| plainly(experts, expert, true));
                leased.collect::<Result<_, _>>()?
            };
            for (lease, &expert) in held.into_iter().zip(chosen) {
                disk.check(experts.store, &lease);
                found.push((expert, lease.tier()));
                experts.store.release(lease);
            }
            return Ok(found);
        }
        for at in 0..experts.lists.union.len() {
            let expert = experts.lists.union[at];
            let stays = experts.lists.keep.contains(&expert);
            let lease = match is_begun {
                true => experts.lease(expert, stays)?,
                false => plainly(experts, expert, stays)?,
            };
            disk.check(experts.store, &lease);
            found.push((expert, lease.tier()));
            experts.store.release(lease);
            experts.store.set_wanted(layer, expert, stays);
        }
        experts.close();
        Ok(found)
    }

    fn recover(&mut self) {
        self.store.recover();
        self.lists.window.recover();
    }
}

/// One lookup made when it is needed.
fn plainly(experts: &mut Experts<'_>, expert: u32, admit: bool) -> Result<Lease, EngineError> {
    let lease = experts.store.lease(experts.files, experts.layer, expert, admit)?;
    experts.counts.add(expert, lease.tier());
    Ok(lease)
}

/// Tokens of one layer, each with distinct experts: alone or as a batch.
fn steps() -> impl Strategy<Value = Vec<(usize, Vec<u32>)>> {
    let token = prop::sample::subsequence((0..N_EXPERTS).collect::<Vec<_>>(), K).prop_shuffle();
    let tokens = proptest::collection::vec(token, 1..5).prop_map(|tokens| tokens.concat());
    proptest::collection::vec((0..2_usize, tokens), 1..25)
}

/// Slots of both layers and pins of the first.
fn placement() -> impl Strategy<Value = ([u32; 2], Vec<u32>)> {
    (0..=N_EXPERTS, 0..=N_EXPERTS).prop_flat_map(|(first, second)| {
        let pins =
            prop::sample::subsequence((0..N_EXPERTS).collect::<Vec<_>>(), 0..=first as usize);
        (Just([first, second]), pins)
    })
}

thread_local! {
    /// The same model behind two sets of open files, so that reads are counted apart.
    static DISKS: [Disk; 2] = [0, 1].map(|_| Disk::new(Form::INT8, 5));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn what_is_begun_is_answered_as_it_would_be_otherwise(
        (caps, pins) in placement(),
        steps in steps(),
    ) {
        DISKS.with(|disks| {
            let [mut plain, mut begun] =
                [(0, false), (1, true)].map(|(at, is_begun)| {
                    Run::new(&disks[at], caps, [&pins, &[]], is_begun)
                });
            let before = [0, 1].map(|at: usize| disks[at].files.counter().now().experts);
            for (layer, chosen) in &steps {
                let expected = plain.step(*layer, chosen).unwrap();
                assert_eq!(begun.step(*layer, chosen).unwrap(), expected, "{chosen:?}");
            }
            let read = [0, 1].map(|at: usize| {
                let now = disks[at].files.counter().now().experts;
                (now.bytes - before[at].bytes, now.reads - before[at].reads)
            });
            assert_eq!(read[0], read[1]);
            assert_eq!(plain.counters.decode, begun.counters.decode);
            assert_eq!(plain.store.empty_slots(), begun.store.empty_slots());
        });
    }

    /// Whatever fails, what is leased holds the bytes of the files, and the store goes on.
    #[test]
    fn whatever_fails_under_way_leaves_a_store_that_works(
        (caps, pins) in placement(),
        steps in steps(),
        faults in proptest::collection::vec((0..40_u32, 0..4_u8), 0..12),
    ) {
        let disk = FaultyDisk::sound();
        let on = Disk::on(Form::INT8, 1, disk.clone(), IoMode::Buffered);
        let mut run = Run::new(&on, caps, [&pins, &[]], true);
        let mut n_reads = 0;
        disk.fail(move |asked| {
            n_reads += 1;
            let (_, kind) = faults.iter().find(|(at, _)| *at == n_reads % 40)?;
            Some(match kind {
                0 => Fault::Short(asked.bytes / 3),
                1 => Fault::Interrupted,
                2 => Fault::Failed,
                _ => Fault::Ended,
            })
        });
        for (layer, chosen) in &steps {
            if run.step(*layer, chosen).is_err() {
                run.recover();
            }
        }
        disk.recover();
        for expert in (0..N_EXPERTS).chain(0..N_EXPERTS) {
            for layer in 0..2 {
                run.step(layer, &[expert, (expert + 1) % N_EXPERTS]).unwrap();
            }
        }
    }
}

/// Reads that do not come before the test says so.
fn held_up(disk: &FaultyDisk) -> mpsc::Sender<()> {
    let (let_go, told) = mpsc::channel();
    let told = Mutex::new(told);
    disk.slow(move |_: &Asked| {
        // A sender that is gone lets everything pass.
        let answer = told.lock().unwrap().recv_timeout(TOO_LONG);
        assert!(answer != Err(RecvTimeoutError::Timeout), "a read that nobody let go");
    });
    let_go
}

/// An expert that is in memory is computed on while another is being read: what was begun does not wait
/// for what was begun.
#[test]
fn residents_are_used_while_others_are_read() {
    let faults = FaultyDisk::sound();
    let disk = Disk::on(Form::INT8, 1, faults.clone(), IoMode::Buffered);
    let mut run = Run::new(&disk, [2, 0], [&[], &[]], true);
    run.step(0, &[1, 2]).unwrap();
    let let_go = held_up(&faults);
    let experts = &mut run.experts(0);
    // 1 is there, 4 takes the place of 2, and its read hangs.
    experts.begin(&[1, 4], 1).unwrap();
    let there = experts.lease(1, true).unwrap();
    disk.check(experts.store, &there);
    assert_eq!(there.tier(), Tier::Cache);
    drop(let_go);
    let read = experts.lease(4, true).unwrap();
    disk.check(experts.store, &read);
    disk.check(experts.store, &there);
    assert_eq!(read.tier(), Tier::Disk);
    for lease in [there, read] {
        experts.store.release(lease);
    }
    assert_eq!(run.step(0, &[4, 1]).unwrap(), [(4, Tier::Cache), (1, Tier::Cache)]);
}

/// Bytes that have not come are not handed out.
#[test]
fn what_is_being_read_cannot_be_looked_at() {
    let faults = FaultyDisk::sound();
    let disk = Disk::on(Form::INT8, 1, faults.clone(), IoMode::Buffered);
    let mut run = Run::new(&disk, [2, 0], [&[], &[]], true);
    let let_go = held_up(&faults);
    let store = &mut run.store;
    let lease = store.begin(0, 3, true, Hold::Together).unwrap().unwrap();
    let error = store.matrix(&lease, Projection::Gate).unwrap_err();
    assert!(matches!(error, EngineError::LaneEnded), "{error}");
    drop(let_go);
    store.finish(&lease).unwrap();
    disk.check(store, &lease);
    store.release(lease);
}

/// A step that is given up waits for the read under way alone, and what it had begun is gone or whole.
#[test]
fn a_step_that_is_given_up_leaves_no_read_behind() {
    let faults = FaultyDisk::sound();
    let disk = Disk::on(Form::INT8, 1, faults.clone(), IoMode::Buffered);
    for n_let_go in 0..4 {
        let mut run = Run::new(&disk, [4, 0], [&[], &[]], true);
        let let_go = held_up(&faults);
        let experts = &mut run.experts(0);
        experts.begin(&[0, 1, 2, 3], 2).unwrap();
        (0..n_let_go).for_each(|_| let_go.send(()).unwrap());
        drop(let_go);
        run.recover();
        let read = disk.files.counter().reads();
        faults.slow(|_| ());
        let found = [[0, 1], [2, 3]].map(|pair| run.step(0, &pair).unwrap()).concat();
        // What is found in memory was not read again.
        let n_missed = found.iter().filter(|(_, tier)| *tier == Tier::Disk).count() as u64;
        assert_eq!(disk.files.counter().reads() - read, n_missed);
    }
}

/// A read that fails names file and offset; its slot is free, and what was begun with it stands.
#[test]
fn a_read_that_fails_under_way_names_its_place() {
    let faults = FaultyDisk::sound();
    let disk = Disk::on(Form::INT8, 1, faults.clone(), IoMode::Buffered);
    let bad = disk.model.expert(0, 2).unwrap().extents()[0];
    let mut run = Run::new(&disk, [2, 1], [&[], &[]], true);
    run.step(0, &[0, 1]).unwrap();
    faults.fail(move |asked| (asked.offset == bad.offset).then_some(Fault::Failed));
    for _ in 0..3 {
        let error = run.step(0, &[5, 2]).unwrap_err().to_string();
        let wanted = format!("read of {} bytes at offset {} got 0", bad.bytes, bad.offset);
        assert!(error.contains("model-00001-of-00001.safetensors"), "{error}");
        assert!(error.contains(&wanted) && error.contains("(os error 5)"), "{error}");
        run.recover();
    }
    faults.recover();
    assert_eq!(run.step(0, &[5, 2]).unwrap(), [(5, Tier::Cache), (2, Tier::Disk)]);
    assert_eq!(run.step(0, &[5, 2]).unwrap(), [(5, Tier::Cache), (2, Tier::Cache)]);
}

/// A thread that panics in the disk's code is an error of the step, not one that is waited for.
#[test]
fn a_read_that_panics_is_an_error_and_the_lanes_go_on() {
    let faults = FaultyDisk::sound();
    let disk = Disk::on(Form::INT8, 1, faults.clone(), IoMode::Buffered);
    let mut run = Run::new(&disk, [2, 0], [&[], &[]], true);
    faults.slow(|_| std::panic::resume_unwind(Box::new("of the disk")));
    for _ in 0..5 {
        assert!(matches!(run.step(0, &[3, 4]), Err(EngineError::LaneEnded)));
        run.recover();
    }
    faults.slow(|_| ());
    assert_eq!(run.step(0, &[3, 4]).unwrap(), [(3, Tier::Disk), (4, Tier::Disk)]);
    assert_eq!(run.step(0, &[3, 4]).unwrap(), [(3, Tier::Cache), (4, Tier::Cache)]);
}

/// The threads hold the files: when nobody else does any more, they are gone.
#[test]
fn the_threads_never_outlive_their_store() {
    let disk = Disk::on(Form::INT8, 1, SystemDisk, IoMode::Buffered);
    for n_begun in 0..3 {
        let mut run = Run::new(&disk, [3, 0], [&[], &[]], true);
        for expert in 0..n_begun {
            let _ = run.store.begin(0, expert, true, Hold::Together).unwrap().unwrap();
        }
        drop(run);
        assert_eq!(Arc::strong_count(&disk.files), 1);
    }
}
