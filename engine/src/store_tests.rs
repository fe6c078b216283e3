//! The store against a naive model of it, against the planner's replay of it, and under reads that
//! fail. After every step the bytes of every leased expert are those of the files.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::sync::Arc;

use proptest::prelude::*;
use tempfile::TempDir;
use tierkeep_plans::plan::IoMode;
use tierkeep_plans::simulate::LayerCache;

use super::*;
use crate::disk::SystemDisk;

#[path = "../../plans/tests/support/mod.rs"]
pub(crate) mod support;
use support::{Checkpoint, Form};
#[path = "../tests/support/faults.rs"]
pub(crate) mod faults;
use faults::{Asked, Fault, FaultyDisk, takes_direct_reads};

/// Experts of a layer and experts a token, as in the small checkpoints.
pub(crate) const N_EXPERTS: u32 = 6;
pub(crate) const K: usize = 2;
/// Threads that read what is begun.
const N_LANES: usize = 2;

const WORKLOAD: budget::Workload = budget::Workload {
    context: 16,
    prefill_batch: 4,
    threads: 1,
    numerics: budget::Numerics::Exact,
    kv: budget::KvElement::F32,
    embedding: budget::EmbeddingResidency::Resident,
    sessions: 1,
    reads: budget::Reads { depth: 0, bytes: None, begins_early: false },
};

/// A model on disk with its open files.
pub(crate) struct Disk {
    directory: TempDir,
    checkpoint: Checkpoint,
    pub(crate) model: Catalogue,
    pub(crate) files: Arc<ShardFiles>,
}

impl Disk {
    /// An olmoe of two layers in `n_shards` shards.
    pub(crate) fn new(form: Form, n_shards: usize) -> Self {
        Self::on(form, n_shards, SystemDisk, IoMode::Buffered)
    }

    pub(crate) fn on(
        form: Form,
        n_shards: usize,
        disk: impl crate::disk::Disk + 'static,
        io: IoMode,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::olmoe(form);
        checkpoint.write_sharded(directory.path(), n_shards);
        let model = Catalogue::open(directory.path()).unwrap();
        let files = ShardFiles::open(
            Arc::new(disk),
            &model.shards,
            (io, budget::Reads::default()),
            Vec::new(),
        );
        let files = Arc::new(files.unwrap());
        Self { directory, checkpoint, model, files }
    }

    /// A store whose memory comes from the ledger of its slots.
    pub(crate) fn store(&self, caps: [u32; 2], pins: [&[u32]; 2]) -> Result<Store, EngineError> {
        let slots = Slots { caps: caps.to_vec(), pins: pins.map(<[u32]>::to_vec).to_vec() };
        let ledger = budget::ledger(&self.model, self.files.mode(), &WORKLOAD, &slots);
        let mut account = Account::new(&ledger);
        let store =
            Store::open(&self.model, (&slots, N_LANES), &mut account, &self.files, &mut |_, _| {})?;
        for line in [Line::PinnedExperts, Line::ExpertCache, Line::ExpertsInFlight] {
            assert_eq!(account.bound(line), ledger.bytes(line), "{line}");
        }
        Ok(store)
    }

    /// Whether a leased expert's matrices and scales are those that the checkpoint was written with.
    pub(crate) fn check(&self, store: &Store, lease: &Lease) {
        let projections = [
            (Projection::Gate, "gate_proj"),
            (Projection::Up, "up_proj"),
            (Projection::Down, "down_proj"),
        ];
        for (projection, name) in projections {
            let name =
                format!("model.layers.{}.mlp.experts.{}.{name}.weight", lease.layer, lease.expert);
            let written = |name: &str| {
                let tensors = &self.checkpoint.tensors;
                tensors.iter().find(|t| t.name == name).map(|t| t.bytes.as_slice())
            };
            let matrix = store.matrix(lease, projection).unwrap();
            let n_rows = if projection == Projection::Down { 16 } else { 8 };
            let rows: Vec<u8> = (0..n_rows).flat_map(|row| matrix.row(row).to_vec()).collect();
            assert_eq!(Some(rows.as_slice()), written(&name), "{name}");
            if let Some(scales) = written(&format!("{name}.qs")) {
                let found: Vec<u8> =
                    (0..n_rows).flat_map(|row| matrix.scale(row).to_le_bytes()).collect();
                assert_eq!(found, scales, "{name}");
            }
        }
    }

    fn lease(&self, store: &mut Store, layer: usize, expert: u32) -> Result<Lease, EngineError> {
        let lease = store.lease(&self.files, layer, expert, true)?;
        self.check(store, &lease);
        Ok(lease)
    }

    /// Leases and gives back; the tier that answered.
    fn access(&self, store: &mut Store, layer: usize, expert: u32) -> Tier {
        let lease = self.lease(store, layer, expert).unwrap();
        let tier = lease.tier();
        store.release(lease);
        tier
    }
}

#[test]
fn every_form_in_any_number_of_shards_is_read_to_the_byte() {
    for form in [Form::F32, Form::Bf16, Form::INT8, Form::FLAT_INT4] {
        let modes = [IoMode::Buffered, IoMode::Dropped, IoMode::Direct];
        for (n_shards, io) in [1, 5, 9].into_iter().flat_map(|n| modes.map(|io| (n, io))) {
            if io == IoMode::Direct && !takes_direct_reads(&Disk::new(form, 1).model.shards[0].path)
            {
                continue;
            }
            let disk = Disk::on(form, n_shards, SystemDisk, io);
            let mut store = disk.store([2, 0], [&[4], &[]]).unwrap();
            for layer in 0..2 {
                for expert in (0..N_EXPERTS).chain(0..N_EXPERTS) {
                    disk.access(&mut store, layer, expert);
                }
            }
        }
    }
}

#[test]
fn without_a_slot_every_access_is_read_and_the_flight_buffer_is_one_token_wide() {
    let disk = Disk::new(Form::INT8, 1);
    let mut store = disk.store([0, 0], [&[], &[]]).unwrap();
    for _ in 0..3 {
        let first = disk.lease(&mut store, 1, 0).unwrap();
        let second = disk.lease(&mut store, 1, 5).unwrap();
        disk.check(&store, &first);
        assert_eq!((first.tier(), second.tier()), (Tier::Disk, Tier::Disk));
        let error = disk.lease(&mut store, 1, 3).unwrap_err().to_string();
        assert!(error.contains("flight buffer"), "{error}");
        store.release(first);
        let third = disk.lease(&mut store, 0, 3).unwrap();
        disk.check(&store, &second);
        store.release(second);
        store.release(third);
    }
}

#[test]
fn the_surplus_over_the_cap_bypasses_the_cache() {
    let disk = Disk::new(Form::INT4, 1);
    let mut store = disk.store([1, 1], [&[], &[]]).unwrap();
    for round in 0..3 {
        let first = disk.lease(&mut store, 0, 2).unwrap();
        let second = disk.lease(&mut store, 0, 3).unwrap();
        let expected = if round == 0 { Tier::Disk } else { Tier::Cache };
        assert_eq!((first.tier(), second.tier()), (expected, Tier::Disk));
        store.release(first);
        store.release(second);
    }
}

#[test]
fn a_store_of_everything_reads_each_expert_once_and_has_no_flight_buffer() {
    let disk = Disk::new(Form::Bf16, 1);
    let mut store = disk.store([6, 6], [&[], &[]]).unwrap();
    assert_eq!(store.flight.n_slots(), 0);
    for round in 0..2 {
        for expert in 0..N_EXPERTS {
            let expected = if round == 0 { Tier::Disk } else { Tier::Cache };
            assert_eq!(disk.access(&mut store, 0, expert), expected);
        }
    }
    assert_eq!(disk.files.counter().reads(), u64::from(N_EXPERTS));
}

#[test]
fn pins_are_read_once_and_stay() {
    let disk = Disk::new(Form::INT8, 1);
    let mut store = disk.store([3, 2], [&[1, 5], &[0, 2]]).unwrap();
    assert_eq!(disk.files.counter().reads(), 4);
    for expert in (0..N_EXPERTS).cycle().take(30) {
        for layer in 0..2 {
            let pinned = [[1, 5], [0, 2]][layer].contains(&expert);
            assert_eq!(store.is_pinned(layer, expert), pinned);
            assert_eq!(disk.access(&mut store, layer, expert) == Tier::Pinned, pinned);
        }
    }
    assert_eq!((store.cache_slots(0), store.cache_slots(1)), (1, 0));
}

#[test]
fn what_is_wanted_is_not_evicted_until_it_no_longer_is() {
    let disk = Disk::new(Form::Bf16, 1);
    let mut store = disk.store([2, 2], [&[], &[]]).unwrap();
    disk.access(&mut store, 0, 0);
    disk.access(&mut store, 0, 1);
    store.set_wanted(0, 0, true);
    disk.access(&mut store, 0, 2);
    assert_eq!(disk.access(&mut store, 0, 0), Tier::Cache);
    store.set_wanted(0, 2, true);
    disk.access(&mut store, 0, 3);
    assert_eq!(disk.access(&mut store, 0, 0), Tier::Cache);
    assert_eq!(disk.access(&mut store, 0, 2), Tier::Cache);
    store.set_wanted(0, 0, false);
    store.touch(0, 2);
    disk.access(&mut store, 0, 4);
    assert_eq!(disk.access(&mut store, 0, 4), Tier::Cache);
    assert_eq!(disk.access(&mut store, 0, 2), Tier::Cache);
}

#[test]
fn not_to_be_admitted_means_no_slot() {
    let disk = Disk::new(Form::Bf16, 1);
    let mut store = disk.store([2, 2], [&[], &[]]).unwrap();
    for _ in 0..2 {
        let lease = store.lease(&disk.files, 0, 1, false).unwrap();
        disk.check(&store, &lease);
        assert_eq!(lease.tier(), Tier::Disk);
        store.release(lease);
    }
}

#[test]
fn recovery_ends_leases_and_wishes_and_keeps_residents() {
    let disk = Disk::new(Form::Bf16, 1);
    let mut store = disk.store([1, 1], [&[], &[]]).unwrap();
    store.set_wanted(0, 0, true);
    // Leases that a failed step never gave back: a slot and, with it held, the whole flight buffer.
    for expert in 0..=K as u32 {
        let _ = disk.lease(&mut store, 0, expert).unwrap();
    }
    assert!(disk.lease(&mut store, 0, 5).is_err());
    store.recover();
    assert_eq!(disk.access(&mut store, 0, 0), Tier::Cache);
    assert_eq!(disk.access(&mut store, 0, 5), Tier::Disk);
    assert_eq!(disk.access(&mut store, 0, 5), Tier::Cache);
}

#[test]
fn a_failed_read_leaves_a_store_that_works_again_with_the_disk() {
    let faults = FaultyDisk::sound();
    let disk = Disk::on(Form::INT8, 1, faults.clone(), IoMode::Buffered);
    let mut store = disk.store([2, 1], [&[4], &[]]).unwrap();
    assert_eq!(disk.access(&mut store, 0, 0), Tier::Disk);
    assert_eq!(disk.access(&mut store, 1, 0), Tier::Disk);
    let held = disk.lease(&mut store, 1, 0).unwrap();
    let read = disk.files.counter().bytes();

    // A place inside expert 2 of the first layer and one inside expert 3 of the second.
    let bad = [(0, 2), (1, 3)].map(|(l, e)| disk.model.expert(l, e).unwrap().extents()[0]);
    let covers = move |asked: &Asked| {
        let end = asked.offset + asked.bytes as u64;
        bad.iter().any(|e| asked.offset <= e.offset + 100 && e.offset + 100 < end)
    };
    faults.fail(move |asked| match covers(asked) {
        true if bad.iter().any(|e| e.offset == asked.offset) => Some(Fault::Short(60)),
        true => Some(Fault::Failed),
        false => None,
    });
    let fail = |store: &mut Store, layer, expert| {
        let error = store.lease(&disk.files, layer, expert, true).unwrap_err().to_string();
        let extent = disk.model.expert(layer, expert as usize).unwrap().extents()[0];
        let wanted = format!("read of {} bytes at offset {} got 60", extent.bytes, extent.offset);
        assert!(error.contains("model-00001-of-00001.safetensors"), "{error}");
        assert!(error.contains(&wanted) && error.contains("(os error 5)"), "{error}");
        assert!(error.contains("need not be downloaded again"), "{error}");
    };
    for _ in 0..4 {
        // Into the slot of expert 0, and into the flight buffer, for the slot is leased.
        fail(&mut store, 0, 2);
        fail(&mut store, 1, 3);
    }
    assert_eq!(disk.files.counter().retries(), 2 * 8);
    assert_eq!(disk.files.counter().bytes(), read, "what did not come whole is not counted");
    // What gave way is gone, not damaged; pins and leases stand; whole experts are still had.
    assert_eq!(disk.access(&mut store, 0, 4), Tier::Pinned);
    assert_eq!(disk.access(&mut store, 0, 0), Tier::Disk);
    assert_eq!(disk.access(&mut store, 0, 0), Tier::Cache);
    disk.check(&store, &held);
    fail(&mut store, 0, 2);

    faults.recover();
    assert_eq!(disk.access(&mut store, 0, 2), Tier::Disk);
    assert_eq!(disk.access(&mut store, 0, 2), Tier::Cache);
    assert_eq!(disk.access(&mut store, 1, 3), Tier::Disk);
    store.release(held);
    assert_eq!(disk.access(&mut store, 1, 0), Tier::Cache);
}

/// A file that is cut while it is in use gives nothing: not the part that is gone, and not what is
/// still there, for it may be of another file.
#[test]
fn a_file_cut_in_place_gives_nothing_more() {
    let disk = Disk::new(Form::INT8, 1);
    let path = disk.directory.path().join("model-00001-of-00001.safetensors");
    let mut store = disk.store([2, 0], [&[4], &[]]).unwrap();
    assert_eq!(disk.access(&mut store, 0, 0), Tier::Disk);
    let extent = disk.model.expert(0, 2).unwrap().extents()[0];
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(extent.offset + 100).unwrap();
    let fail = |store: &mut Store, expert| {
        store.lease(&disk.files, 0, expert, true).unwrap_err().to_string()
    };
    let error = fail(&mut store, 2);
    let wanted = format!("read of {} bytes at offset {} got 100", extent.bytes, extent.offset);
    assert!(error.contains(&wanted) && error.contains("the file ended"), "{error}");
    let error = fail(&mut store, 0);
    assert!(error.contains("was written to while it was in use (it was"), "{error}");
    assert_eq!(disk.access(&mut store, 0, 4), Tier::Pinned);
}

#[test]
fn pins_that_cannot_be_read_stop_the_start() {
    let disk = Disk::new(Form::INT8, 1);
    let path = disk.directory.path().join("model-00001-of-00001.safetensors");
    OpenOptions::new().write(true).open(&path).unwrap().set_len(2000).unwrap();
    let error = disk.store([2, 2], [&[], &[1]]).unwrap_err().to_string();
    assert!(error.contains("model-00001-of-00001.safetensors"), "{error}");
}

#[test]
fn memory_beyond_the_ledger_is_refused() {
    let disk = Disk::new(Form::INT8, 1);
    let slots = Slots { caps: vec![2, 2], pins: vec![vec![1], vec![]] };
    let ledger = budget::ledger(&disk.model, IoMode::Buffered, &WORKLOAD, &slots);
    for line in [Line::PinnedExperts, Line::ExpertCache, Line::ExpertsInFlight] {
        let mut short = ledger.clone();
        short.0.iter_mut().find(|l| l.line == line).unwrap().bytes.0 -= 1;
        let mut account = Account::new(&short);
        let error =
            Store::open(&disk.model, (&slots, 0), &mut account, &disk.files, &mut |_, _| {});
        let error = error.unwrap_err().to_string();
        assert!(error.contains(&format!("line \"{line}\"")), "{error}");
    }
}

/// One layer of the store as lists: experts from the least to the most recently used.
#[derive(Default)]
struct Naive {
    cap: usize,
    pins: Vec<u32>,
    recency: Vec<u32>,
    leases: BTreeMap<u32, u32>,
    wanted: Vec<u32>,
    n_flying: usize,
}

impl Naive {
    /// The tier of an access and whether it has a slot; `None` if nothing can hold it.
    fn lease(&mut self, expert: u32, admit: bool) -> Option<(Tier, bool)> {
        if self.pins.contains(&expert) {
            *self.leases.entry(expert).or_default() += 1;
            return Some((Tier::Pinned, true));
        }
        let is_hit = self.recency.contains(&expert);
        if !is_hit {
            let is_free =
                |e: &u32| self.leases.get(e).is_none_or(|n| *n == 0) && !self.wanted.contains(e);
            let has_room = self.recency.len() < self.cap - self.pins.len();
            let victim = self.recency.iter().copied().find(is_free);
            if !admit || (!has_room && victim.is_none()) {
                let fits = self.n_flying < K;
                self.n_flying += usize::from(fits);
                return fits.then_some((Tier::Disk, false));
            }
            if !has_room {
                self.recency.retain(|e| Some(*e) != victim);
            }
        }
        self.recency.retain(|e| *e != expert);
        self.recency.push(expert);
        *self.leases.entry(expert).or_default() += 1;
        Some((if is_hit { Tier::Cache } else { Tier::Disk }, true))
    }

    fn release(&mut self, expert: u32, has_slot: bool) {
        match self.leases.get_mut(&expert) {
            Some(leases) if has_slot => *leases -= 1,
            _ => self.n_flying -= 1,
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Lease(u32, bool),
    Release(prop::sample::Index),
    Want(u32, bool),
    Touch(u32),
    Recover,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..N_EXPERTS, prop::bool::weighted(0.8)).prop_map(|(e, admit)| Step::Lease(e, admit)),
        7 => any::<prop::sample::Index>().prop_map(Step::Release),
        2 => (0..N_EXPERTS, any::<bool>()).prop_map(|(e, wanted)| Step::Want(e, wanted)),
        1 => (0..N_EXPERTS).prop_map(Step::Touch),
        1 => Just(Step::Recover),
    ]
}

/// A cap and pins that fit in it.
fn cap_and_pins() -> impl Strategy<Value = (u32, Vec<u32>)> {
    let experts: Vec<u32> = (0..N_EXPERTS).collect();
    (0..=N_EXPERTS).prop_flat_map(move |cap| {
        (Just(cap), prop::sample::subsequence(experts.clone(), 0..=cap as usize))
    })
}

thread_local! {
    static DISK: Disk = Disk::new(Form::INT8, 5);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn the_store_is_its_naive_model(
        (cap, pins) in cap_and_pins(),
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        DISK.with(|disk| {
            // The other layer keeps the flight buffer in being.
            let mut store = disk.store([cap, 0], [&pins, &[]]).unwrap();
            let mut naive = Naive { cap: cap as usize, pins: pins.clone(), ..Naive::default() };
            let mut held: Vec<Lease> = Vec::new();
            for step in &steps {
                match step {
                    Step::Lease(expert, admit) => {
                        let lease = store.lease(&disk.files, 0, *expert, *admit).ok();
                        let found = lease.as_ref().map(|l| (l.tier(), matches!(l.place, Place::Slot(_))));
                        assert_eq!(found, naive.lease(*expert, *admit), "{step:?}");
                        held.extend(lease);
                    }
                    Step::Release(_) if held.is_empty() => {}
                    Step::Release(at) => {
                        let lease = held.remove(at.index(held.len()));
                        naive.release(lease.expert, matches!(lease.place, Place::Slot(_)));
                        store.release(lease);
                    }
                    Step::Want(expert, wanted) => {
                        store.set_wanted(0, *expert, *wanted);
                        naive.wanted.retain(|e| e != expert);
                        naive.wanted.extend(wanted.then_some(*expert));
                    }
                    Step::Touch(expert) => {
                        store.touch(0, *expert);
                        if naive.recency.contains(expert) {
                            naive.recency.retain(|e| e != expert);
                            naive.recency.push(*expert);
                        }
                    }
                    Step::Recover => {
                        held.clear();
                        store.recover();
                        naive.leases.clear();
                        naive.wanted.clear();
                        naive.n_flying = 0;
                    }
                }
                for lease in &held {
                    disk.check(&store, lease);
                }
            }
        });
    }

    #[test]
    fn the_planner_replays_what_the_store_does(
        (cap, pins) in cap_and_pins(),
        tokens in proptest::collection::vec(
            prop::sample::subsequence((0..N_EXPERTS as u16).collect::<Vec<_>>(), K).prop_shuffle(),
            1..50,
        ),
    ) {
        DISK.with(|disk| {
            let mut store = disk.store([cap, 0], [&pins, &[]]).unwrap();
            let mut replayed = LayerCache::new(N_EXPERTS as usize, cap as usize, &pins);
            for token in &tokens {
                let leases: Vec<Lease> = token
                    .iter()
                    .map(|&expert| disk.lease(&mut store, 0, u32::from(expert)).unwrap())
                    .collect();
                let hits = leases.iter().filter(|l| l.tier() != Tier::Disk).count() as u64;
                assert_eq!(hits, replayed.access_token(token), "{token:?}");
                for lease in leases {
                    disk.check(&store, &lease);
                    store.release(lease);
                }
            }
        });
    }
}
