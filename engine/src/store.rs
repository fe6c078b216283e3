//! The expert store: which routed experts are in memory, in which slot, and who may not be evicted.
//!
//! A layer has `cap` slots, some of them pinned. A lookup gives a lease; a leased slot is never
//! evicted. An expert that finds no slot passes through the flight buffer. Slots are recycled and
//! never freed. The store decides where an expert's bytes lie, never what they compute.
//!
//! A lookup that is begun decides all of this at once, and its read is done by a thread while others
//! compute; it is finished before its bytes are used. Whether an access is a hit is decided when the expert
//! is asked for, that is when its routing is known, so that no count depends on how fast a disk is.

use std::sync::Arc;

use tierkeep_kernels::Matrix;
use tierkeep_mapping::Arena;
use tierkeep_plans::budget::{self, Line, Slots};
use tierkeep_plans::catalogue::{Catalogue, ExpertForm, ExpertLayout, PlacedMatrix, Projection};

use crate::counters::Tier;
use crate::error::EngineError;
use crate::lanes::{Lanes, n_pieces, read_expert};
use crate::memory::Account;
use crate::shard_io::{ReadError, ShardFiles};
use crate::weights::element_of;

const NONE: u32 = u32::MAX;

/// Where a leased expert's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Slot(u32),
    Flight(u32),
}

/// A borrowed resident expert. It must be given back with [`Store::release`]; until then its bytes
/// stay where they are.
#[derive(Debug)]
#[must_use = "a lease that is not released keeps its slot for ever"]
pub(crate) struct Lease {
    layer: u32,
    expert: u32,
    place: Place,
    tier: Tier,
    /// It is held for longer than one that is not begun would be; see [`Store::begin`].
    passes: bool,
}

/// How long a lookup that is begun is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// Together with those after it, as a token holds all its experts.
    Together,
    /// Until those after it are begun and it has been used: without the window it would have been given
    /// back before the next was asked for, as a batch does. What is decided is what would be then.
    Passing,
}

impl Lease {
    /// Where the expert was found.
    pub(crate) fn tier(&self) -> Tier {
        self.tier
    }

    /// Whether it is of this expert.
    pub(crate) fn is_of(&self, expert: u32) -> bool {
        self.expert == expert
    }
}

/// Slots of one layer. Slot numbers below `n_pinned` are pinned.
#[derive(Debug)]
struct LayerSlots {
    n_pinned: u32,
    slot_bytes: usize,
    pinned: Arena,
    cached: Arena,
    /// Slot of each expert, or NONE.
    slot_of: Vec<u32>,
    /// Expert of each slot, or NONE.
    expert_of: Vec<u32>,
    /// When each slot was last used.
    used: Vec<u64>,
    /// Leases on each slot.
    leases: Vec<u32>,
    /// Those of them that are held for longer than without the window.
    passing: Vec<u32>,
    /// Experts that a batch still needs or wants to keep.
    wanted: Vec<bool>,
}

impl LayerSlots {
    fn arena(&self, slot: u32) -> (&Arena, usize) {
        match slot.checked_sub(self.n_pinned) {
            None => (&self.pinned, slot as usize),
            Some(at) => (&self.cached, at as usize),
        }
    }

    fn arena_mut(&mut self, slot: u32) -> (&mut Arena, usize) {
        match slot.checked_sub(self.n_pinned) {
            None => (&mut self.pinned, slot as usize),
            Some(at) => (&mut self.cached, at as usize),
        }
    }

    /// The slot to read an expert into: an empty one, else the least recently used that is neither
    /// pinned, leased nor wanted. Leases that only pass are not looked at.
    fn victim(&self) -> Option<u32> {
        let free = |slot: &u32| {
            let slot = *slot as usize;
            let expert = self.expert_of[slot];
            self.leases[slot] == self.passing[slot]
                && (expert == NONE || !self.wanted[expert as usize])
        };
        (self.n_pinned..self.expert_of.len() as u32)
            .filter(free)
            .min_by_key(|&slot| (self.expert_of[slot as usize] != NONE, self.used[slot as usize]))
    }

    /// Puts an expert into a slot in the place of what was there.
    fn seat(&mut self, slot: u32, expert: u32) {
        self.empty(slot);
        self.slot_of[expert as usize] = slot;
        self.expert_of[slot as usize] = expert;
    }

    /// Leaves a slot without an expert.
    fn empty(&mut self, slot: u32) {
        let old = std::mem::replace(&mut self.expert_of[slot as usize], NONE);
        if old != NONE {
            self.slot_of[old as usize] = NONE;
        }
    }
}

/// A read that was begun and not finished.
#[derive(Clone, Copy, Debug)]
struct Begun {
    layer: u32,
    expert: u32,
    place: Place,
}

/// All routed experts of the decoder layers, in memory or within one read of it.
#[derive(Debug)]
pub(crate) struct Store {
    layers: Vec<LayerSlots>,
    layouts: Vec<ExpertLayout>,
    /// Where each layer's layouts begin.
    base: Vec<usize>,
    flight: Arena,
    flight_leases: Vec<bool>,
    /// What reads experts while others compute, where the plan has it.
    lanes: Option<Lanes>,
    /// Reads that were begun and not finished.
    begun: Vec<Begun>,
    hidden_size: usize,
    expert_ff_size: usize,
    clock: u64,
}

impl Store {
    /// Allocates every slot and reads the pinned experts; `progress(done, total)` in bytes. `n_lanes`
    /// threads read what is begun; without any nothing is.
    pub(crate) fn open(
        model: &Catalogue,
        (slots, n_lanes): (&Slots, usize),
        account: &mut Account,
        files: &Arc<ShardFiles>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let (spec, io) = (&model.spec, files.mode());
        let mut layouts = Vec::new();
        let mut base = Vec::with_capacity(spec.n_layers);
        let mut layers = Vec::with_capacity(spec.n_layers);
        for (layer, (&cap, pins)) in slots.caps.iter().zip(&slots.pins).enumerate() {
            base.push(layouts.len());
            let experts = model.layer_experts(layer).iter();
            layouts.extend(experts.map(|expert| budget::slot_layout(expert, io)));
            let slot_bytes = budget::slot_bytes(model, layer, io).0;
            let n_pinned = pins.len() as u32;
            let cached = u64::from(cap.saturating_sub(n_pinned));
            let n_experts = model.layer_experts(layer).len();
            layers.push(LayerSlots {
                n_pinned,
                slot_bytes: slot_bytes as usize,
                pinned: account.arena(
                    Line::PinnedExperts,
                    (slot_bytes, u64::from(n_pinned)),
                    false,
                )?,
                cached: account.arena(Line::ExpertCache, (slot_bytes, cached), false)?,
                slot_of: vec![NONE; n_experts],
                expert_of: vec![NONE; cap as usize],
                used: vec![0; cap as usize],
                leases: vec![0; cap as usize],
                passing: vec![0; cap as usize],
                wanted: vec![false; n_experts],
            });
        }
        let flight_slots = budget::flight_slots(spec, slots);
        let flight_slot_bytes = budget::largest_slot_bytes(model, io);
        let widest = slots.caps.iter().max().map_or(0, |&cap| cap as usize);
        let n_begun = (widest + flight_slots as usize).min(spec.router.n_experts);
        let lanes = match n_lanes {
            0 => None,
            n => {
                let most = layouts.iter().map(|layout| n_pieces(files, layout)).max().unwrap_or(0);
                Some(Lanes::new(n, (n_begun, most), files)?)
            }
        };
        let mut store = Self {
            layers,
            layouts,
            base,
            flight: account.arena(
                Line::ExpertsInFlight,
                (flight_slot_bytes, flight_slots),
                true,
            )?,
            flight_leases: vec![false; flight_slots as usize],
            lanes,
            begun: Vec::with_capacity(n_begun),
            hidden_size: spec.hidden_size,
            expert_ff_size: spec.expert_ff_size,
            clock: 0,
        };
        store.load_pins(slots, files, progress)?;
        Ok(store)
    }

    fn load_pins(
        &mut self,
        slots: &Slots,
        files: &ShardFiles,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), EngineError> {
        let all = slots.pins.iter().enumerate().flat_map(|(l, pins)| {
            pins.iter().enumerate().map(move |(slot, &expert)| (l, slot as u32, expert))
        });
        let bytes = |layer: usize, expert: u32| {
            self.layouts[self.base[layer] + expert as usize].read_bytes()
        };
        let total: u64 = all.clone().map(|(l, _, e)| bytes(l, e)).sum();
        let mut done = 0;
        // As many as were made room for are read side by side.
        let mut ahead = all.clone();
        for (layer, slot, expert) in all {
            while self.begun.len() < self.begun.capacity()
                && let Some((layer, slot, expert)) = ahead.next()
            {
                self.begin_pin(layer, slot, expert)?;
            }
            let (lease_layer, place) = (layer as u32, Place::Slot(slot));
            if self.lanes.is_some() {
                self.finish_at(lease_layer, expert, place)?;
            } else {
                self.read(files, layer, expert, place)?;
            }
            self.layers[layer].seat(slot, expert);
            done += self.layout(layer, expert).read_bytes();
            progress(done, total);
        }
        Ok(())
    }

    /// Begins to read a pinned expert to its slot; nothing without lanes.
    fn begin_pin(&mut self, layer: usize, slot: u32, expert: u32) -> Result<(), EngineError> {
        match self.lanes {
            Some(_) => self.begin_at(layer as u32, expert, Place::Slot(slot)),
            None => Ok(()),
        }
    }

    /// Has an expert read to a place while others compute.
    fn begin_at(&mut self, layer: u32, expert: u32, place: Place) -> Result<(), EngineError> {
        let layout = *self.layout(layer as usize, expert);
        let (arena, slot) = self.memory(layer as usize, place);
        let into = arena.lend(slot).ok_or(EngineError::LaneEnded)?;
        if let Some(lanes) = &self.lanes {
            lanes.begin((layer, expert), &layout, into);
        }
        self.begun.push(Begun { layer, expert, place });
        Ok(())
    }

    fn layout(&self, layer: usize, expert: u32) -> &ExpertLayout {
        &self.layouts[self.base[layer] + expert as usize]
    }

    /// The memory that a place is in, and its number there.
    fn memory(&mut self, layer: usize, place: Place) -> (&mut Arena, usize) {
        match place {
            Place::Slot(slot) => self.layers[layer].arena_mut(slot),
            Place::Flight(slot) => (&mut self.flight, slot as usize),
        }
    }

    /// Reads an expert to its place.
    fn read(
        &mut self,
        files: &ShardFiles,
        layer: usize,
        expert: u32,
        place: Place,
    ) -> Result<(), EngineError> {
        let layout = *self.layout(layer, expert);
        let (arena, slot) = self.memory(layer, place);
        let into = arena.bytes_mut(slot).ok_or(EngineError::LaneEnded)?;
        Ok(read_expert(files, &layout, into)?)
    }

    /// Decides where an expert is or is to be read to, and leases the place; `None` where that is a place
    /// which is still held.
    fn place(&mut self, layer: usize, expert: u32, admit: bool, hold: Hold) -> Option<Lease> {
        let slots = &mut self.layers[layer];
        let resident = slots.slot_of[expert as usize];
        let (place, tier) = if resident != NONE {
            let tier = if resident < slots.n_pinned { Tier::Pinned } else { Tier::Cache };
            (Place::Slot(resident), tier)
        } else if let Some(slot) = if admit { slots.victim() } else { None } {
            if slots.passing[slot as usize] > 0 {
                return None;
            }
            (Place::Slot(slot), Tier::Disk)
        } else {
            // The planner gives the flight buffer one token's experts, and no token leases more.
            let slot = self.flight_leases.iter().position(|leased| !leased)?;
            (Place::Flight(slot as u32), Tier::Disk)
        };
        self.clock += 1;
        let passes = hold == Hold::Passing;
        match place {
            Place::Slot(slot) => {
                if tier == Tier::Disk {
                    // The old expert is gone before the read, so that a failed read leaves an empty slot.
                    slots.seat(slot, expert);
                }
                slots.used[slot as usize] = self.clock;
                slots.leases[slot as usize] += 1;
                slots.passing[slot as usize] += u32::from(passes);
            }
            Place::Flight(slot) => self.flight_leases[slot as usize] = true,
        }
        Some(Lease { layer: layer as u32, expert, place, tier, passes })
    }

    /// Leases one expert, reading it if it is not in memory: into a slot if `admit` and one can be
    /// had, else into the flight buffer.
    pub(crate) fn lease(
        &mut self,
        files: &ShardFiles,
        layer: usize,
        expert: u32,
        admit: bool,
    ) -> Result<Lease, EngineError> {
        let lease = self.place(layer, expert, admit, Hold::Together).ok_or_else(|| {
            let source = std::io::Error::other("every slot is leased");
            ReadError::Open { path: "flight buffer".into(), source }
        })?;
        if lease.tier == Tier::Disk
            && let Err(error) = self.read(files, layer, expert, lease.place)
        {
            self.unseat(layer, lease.place);
            self.release(lease);
            return Err(error);
        }
        Ok(lease)
    }

    /// As [`Store::lease`], but an expert that is not in memory is read while others compute; it must be
    /// finished before its bytes are used. Lookups are begun in the order in which they would be made
    /// otherwise, and each is answered as it would be then; `None` where that takes a place which is still
    /// held, and without lanes: this one and those after it are made when they are needed.
    pub(crate) fn begin(
        &mut self,
        layer: usize,
        expert: u32,
        admit: bool,
        hold: Hold,
    ) -> Result<Option<Lease>, EngineError> {
        if self.lanes.is_none() || self.begun.len() == self.begun.capacity() {
            return Ok(None);
        }
        let Some(lease) = self.place(layer, expert, admit, hold) else { return Ok(None) };
        if lease.tier == Tier::Disk {
            self.begin_at(lease.layer, expert, lease.place)?;
        }
        Ok(Some(lease))
    }

    /// Waits for the bytes of a lookup that was begun.
    ///
    /// # Errors
    /// That of its read. Its slot is empty then.
    pub(crate) fn finish(&mut self, lease: &Lease) -> Result<(), EngineError> {
        self.finish_at(lease.layer, lease.expert, lease.place)
    }

    fn finish_at(&mut self, layer: u32, expert: u32, place: Place) -> Result<(), EngineError> {
        let is_its = |begun: &Begun| (begun.layer, begun.expert) == (layer, expert);
        let Some(at) = self.begun.iter().position(is_its) else { return Ok(()) };
        self.begun.swap_remove(at);
        let Some(lanes) = &self.lanes else { return Err(EngineError::LaneEnded) };
        let read = lanes.wait((layer, expert));
        if read.is_err() {
            self.unseat(layer as usize, place);
        }
        read
    }

    /// Whether the bytes of a leased expert are there. Does not wait.
    ///
    /// # Errors
    /// As [`Store::finish`].
    pub(crate) fn has_come(&mut self, lease: &Lease) -> Result<bool, EngineError> {
        let target = (lease.layer, lease.expert);
        if self.begun.iter().all(|begun| (begun.layer, begun.expert) != target) {
            return Ok(true);
        }
        match &self.lanes {
            Some(lanes) if !lanes.has_ended(target) => Ok(false),
            Some(_) | None => self.finish(lease).map(|()| true),
        }
    }

    /// Waits until one of the reads that were begun has ended.
    pub(crate) fn wait_for_any(&self) {
        if let Some(lanes) = &self.lanes {
            lanes.wait_for_any();
        }
    }

    /// Nothing came to a place that was to be read to.
    fn unseat(&mut self, layer: usize, place: Place) {
        match place {
            Place::Slot(slot) => self.layers[layer].empty(slot),
            Place::Flight(_) => {}
        }
    }

    /// Gives a lease back.
    #[expect(clippy::needless_pass_by_value, reason = "the lease ends here")]
    pub(crate) fn release(&mut self, lease: Lease) {
        match lease.place {
            Place::Slot(slot) => {
                let slots = &mut self.layers[lease.layer as usize];
                slots.leases[slot as usize] -= 1;
                slots.passing[slot as usize] -= u32::from(lease.passes);
            }
            Place::Flight(slot) => self.flight_leases[slot as usize] = false,
        }
    }

    /// One matrix of a leased expert.
    pub(crate) fn matrix(
        &self,
        lease: &Lease,
        projection: Projection,
    ) -> Result<Matrix<'_>, EngineError> {
        let (layout, slab) = self.slab(lease)?;
        let (hidden, ff_size) = (self.hidden_size, self.expert_ff_size);
        let is_down = projection == Projection::Down;
        let (rows, cols) = match layout.form {
            ExpertForm::Separate | ExpertForm::Interleaved if is_down => (hidden, ff_size),
            ExpertForm::Separate => (ff_size, hidden),
            ExpertForm::Interleaved => (2 * ff_size, hidden),
            ExpertForm::InterleavedTransposed if is_down => (ff_size, hidden),
            ExpertForm::InterleavedTransposed => (hidden, 2 * ff_size),
        };
        let PlacedMatrix { stored, weight_offset, scales_offset, bytes } =
            *layout.matrix(projection);
        let part = |offset: u64, bytes: usize| &slab[offset as usize..offset as usize + bytes];
        let weight_bytes = stored.row_bytes(cols as u64) as usize * rows;
        let data = part(weight_offset, weight_bytes);
        // What is not weights is scales.
        let scales = match bytes as usize - weight_bytes {
            0 => &[],
            bytes => part(scales_offset, bytes),
        };
        Ok(Matrix::new(element_of(stored), rows, cols, data, scales)?)
    }

    /// Biases of a leased expert, each a row: of gate and up, `(2 * expert_ff_size)` in the order of the
    /// matrix, and of down, `(hidden_size)`.
    pub(crate) fn biases(&self, lease: &Lease) -> Result<Option<[Matrix<'_>; 2]>, EngineError> {
        let (layout, slab) = self.slab(lease)?;
        let Some(biases) = layout.biases else { return Ok(None) };
        let element = element_of(biases.stored);
        let vector = |offset: u64, cols: usize| {
            let start = offset as usize;
            let data = &slab[start..start + element.row_bytes(cols)];
            Matrix::new(element, 1, cols, data, &[])
        };
        let gate_up = vector(biases.gate_up_offset, 2 * self.expert_ff_size)?;
        Ok(Some([gate_up, vector(biases.down_offset, self.hidden_size)?]))
    }

    /// How the matrices of a leased expert are told apart.
    pub(crate) fn form(&self, lease: &Lease) -> ExpertForm {
        self.layout(lease.layer as usize, lease.expert).form
    }

    /// A leased expert's layout and bytes.
    fn slab(&self, lease: &Lease) -> Result<(&ExpertLayout, &[u8]), EngineError> {
        let layer = lease.layer as usize;
        let (arena, slot) = match lease.place {
            Place::Slot(slot) => self.layers[layer].arena(slot),
            Place::Flight(slot) => (&self.flight, slot as usize),
        };
        let slab = arena.bytes(slot).ok_or(EngineError::LaneEnded)?;
        Ok((self.layout(layer, lease.expert), slab))
    }

    /// Whether an expert is pinned.
    pub(crate) fn is_pinned(&self, layer: usize, expert: u32) -> bool {
        let slots = &self.layers[layer];
        slots.slot_of[expert as usize] < slots.n_pinned
    }

    /// Whether all these experts are in slots and nothing is being read.
    pub(crate) fn are_at_hand(&self, layer: usize, experts: &[u32]) -> bool {
        let slots = &self.layers[layer];
        self.begun.is_empty() && experts.iter().all(|&e| slots.slot_of[e as usize] != NONE)
    }

    /// Unpinned slots of a layer.
    pub(crate) fn cache_slots(&self, layer: usize) -> usize {
        let slots = &self.layers[layer];
        slots.expert_of.len() - slots.n_pinned as usize
    }

    /// Marks whether an expert must not be evicted for now, leased or not.
    pub(crate) fn set_wanted(&mut self, layer: usize, expert: u32, wanted: bool) {
        self.layers[layer].wanted[expert as usize] = wanted;
    }

    /// Makes a resident expert the most recently used of its layer.
    pub(crate) fn touch(&mut self, layer: usize, expert: u32) {
        self.clock += 1;
        let slots = &mut self.layers[layer];
        let slot = slots.slot_of[expert as usize];
        if slot != NONE {
            slots.used[slot as usize] = self.clock;
        }
    }

    /// Slots that hold no expert yet, with their bytes.
    pub(crate) fn empty_slots(&self) -> (u64, u64) {
        self.layers.iter().fold((0, 0), |(slots, bytes), layer| {
            let empty = layer.expert_of.iter().filter(|&&expert| expert == NONE).count() as u64;
            (slots + empty, bytes + empty * layer.slot_bytes as u64)
        })
    }

    /// Ends what a failed step left behind: reads that were begun, leases and wishes. Residents stay.
    pub(crate) fn recover(&mut self) {
        if let Some(lanes) = &self.lanes {
            let begun = &mut self.begun;
            lanes.give_up(|ended| begun.retain(|b| (b.layer, b.expert) != ended));
        }
        // What is left was not read.
        for at in 0..self.begun.len() {
            let Begun { layer, place, .. } = self.begun[at];
            self.unseat(layer as usize, place);
        }
        self.begun.clear();
        self.flight_leases.fill(false);
        for slots in &mut self.layers {
            slots.leases.fill(0);
            slots.passing.fill(0);
            slots.wanted.fill(false);
        }
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
pub(crate) mod tests;
