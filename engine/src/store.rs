//! The expert store: which routed experts are in memory, in which slot, and who may not be evicted.
//!
//! A layer has `cap` slots, some of them pinned. A lookup gives a lease; a leased slot is never
//! evicted. An expert that finds no slot passes through the flight buffer. Slots are recycled and
//! never freed. The store decides where an expert's bytes lie, never what they compute.

use tierkeep_kernels::Matrix;
use tierkeep_plans::budget::{self, Line, Slots};
use tierkeep_plans::catalogue::{Catalogue, ExpertLayout, PlacedMatrix, Projection};

use crate::counters::Tier;
use crate::error::EngineError;
use crate::memory::{Account, Buffer};
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
}

impl Lease {
    /// Where the expert was found.
    pub(crate) fn tier(&self) -> Tier {
        self.tier
    }
}

/// Slots of one layer. Slot numbers below `n_pinned` are pinned.
#[derive(Debug)]
struct LayerSlots {
    n_pinned: u32,
    slot_bytes: usize,
    pinned: Buffer,
    cached: Buffer,
    /// Slot of each expert, or NONE.
    slot_of: Vec<u32>,
    /// Expert of each slot, or NONE.
    expert_of: Vec<u32>,
    /// When each slot was last used.
    used: Vec<u64>,
    /// Leases on each slot.
    leases: Vec<u32>,
    /// Experts that a batch still needs or wants to keep.
    wanted: Vec<bool>,
}

impl LayerSlots {
    fn bytes(&self, slot: u32) -> &[u8] {
        let (buffer, at) = if slot < self.n_pinned {
            (&self.pinned, slot)
        } else {
            (&self.cached, slot - self.n_pinned)
        };
        let start = at as usize * self.slot_bytes;
        &buffer.bytes()[start..start + self.slot_bytes]
    }

    fn bytes_mut(&mut self, slot: u32) -> &mut [u8] {
        let (buffer, at) = if slot < self.n_pinned {
            (&mut self.pinned, slot)
        } else {
            (&mut self.cached, slot - self.n_pinned)
        };
        let start = at as usize * self.slot_bytes;
        &mut buffer.bytes_mut()[start..start + self.slot_bytes]
    }

    /// The slot to read an expert into: an empty one, else the least recently used that is neither
    /// pinned, leased nor wanted.
    fn victim(&self) -> Option<u32> {
        let free = |slot: &u32| {
            let slot = *slot as usize;
            let expert = self.expert_of[slot];
            self.leases[slot] == 0 && (expert == NONE || !self.wanted[expert as usize])
        };
        (self.n_pinned..self.expert_of.len() as u32)
            .filter(free)
            .min_by_key(|&slot| (self.expert_of[slot as usize] != NONE, self.used[slot as usize]))
    }
}

/// All routed experts of the decoder layers, in memory or within one read of it.
#[derive(Debug)]
pub(crate) struct Store {
    layers: Vec<LayerSlots>,
    layouts: Vec<ExpertLayout>,
    /// Where each layer's layouts begin.
    base: Vec<usize>,
    flight: Buffer,
    flight_slot_bytes: usize,
    flight_leases: Vec<bool>,
    hidden_size: usize,
    expert_ff_size: usize,
    clock: u64,
}

impl Store {
    /// Allocates every slot and reads the pinned experts; `progress(done, total)` in bytes.
    pub(crate) fn open(
        model: &Catalogue,
        slots: &Slots,
        account: &mut Account,
        files: &ShardFiles,
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
                pinned: account.buffer(Line::PinnedExperts, slot_bytes * u64::from(n_pinned))?,
                cached: account.buffer(Line::ExpertCache, slot_bytes * cached)?,
                slot_of: vec![NONE; n_experts],
                expert_of: vec![NONE; cap as usize],
                used: vec![0; cap as usize],
                leases: vec![0; cap as usize],
                wanted: vec![false; n_experts],
            });
        }
        let flight_slots = budget::flight_slots(spec, slots);
        let flight_slot_bytes = budget::largest_slot_bytes(model, io);
        let mut store = Self {
            layers,
            layouts,
            base,
            flight: account.committed(Line::ExpertsInFlight, flight_slots * flight_slot_bytes)?,
            flight_slot_bytes: flight_slot_bytes as usize,
            flight_leases: vec![false; flight_slots as usize],
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
        for (layer, slot, expert) in all {
            let layout = self.layouts[self.base[layer] + expert as usize];
            let slots = &mut self.layers[layer];
            read_expert(files, &layout, slots.bytes_mut(slot))?;
            slots.slot_of[expert as usize] = slot;
            slots.expert_of[slot as usize] = expert;
            done += layout.read_bytes();
            progress(done, total);
        }
        Ok(())
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
        self.clock += 1;
        let layout = self.layouts[self.base[layer] + expert as usize];
        let slots = &mut self.layers[layer];
        let lease = |place, tier| Lease { layer: layer as u32, expert, place, tier };
        let resident = slots.slot_of[expert as usize];
        if resident != NONE {
            slots.used[resident as usize] = self.clock;
            slots.leases[resident as usize] += 1;
            let tier = if resident < slots.n_pinned { Tier::Pinned } else { Tier::Cache };
            return Ok(lease(Place::Slot(resident), tier));
        }
        let victim = if admit { slots.victim() } else { None };
        if let Some(slot) = victim {
            // The old expert is gone before the read, so that a failed read leaves an empty slot.
            let old = std::mem::replace(&mut slots.expert_of[slot as usize], NONE);
            if old != NONE {
                slots.slot_of[old as usize] = NONE;
            }
            read_expert(files, &layout, slots.bytes_mut(slot))?;
            slots.slot_of[expert as usize] = slot;
            slots.expert_of[slot as usize] = expert;
            slots.used[slot as usize] = self.clock;
            slots.leases[slot as usize] += 1;
            return Ok(lease(Place::Slot(slot), Tier::Disk));
        }
        // The planner gives the flight buffer one token's experts, and no caller leases more.
        let slot = self.flight_leases.iter().position(|leased| !leased).ok_or_else(|| {
            ReadError::Open {
                path: "flight buffer".into(),
                source: std::io::Error::other("every slot is leased"),
            }
        })?;
        let start = slot * self.flight_slot_bytes;
        let into = &mut self.flight.bytes_mut()[start..start + self.flight_slot_bytes];
        read_expert(files, &layout, into)?;
        self.flight_leases[slot] = true;
        Ok(lease(Place::Flight(slot as u32), Tier::Disk))
    }

    /// Gives a lease back.
    #[expect(clippy::needless_pass_by_value, reason = "the lease ends here")]
    pub(crate) fn release(&mut self, lease: Lease) {
        match lease.place {
            Place::Slot(slot) => self.layers[lease.layer as usize].leases[slot as usize] -= 1,
            Place::Flight(slot) => self.flight_leases[slot as usize] = false,
        }
    }

    /// One matrix of a leased expert.
    pub(crate) fn matrix(
        &self,
        lease: &Lease,
        projection: Projection,
    ) -> Result<Matrix<'_>, EngineError> {
        let layer = lease.layer as usize;
        let layout = &self.layouts[self.base[layer] + lease.expert as usize];
        let slab = match lease.place {
            Place::Slot(slot) => self.layers[layer].bytes(slot),
            Place::Flight(slot) => {
                let start = slot as usize * self.flight_slot_bytes;
                &self.flight.bytes()[start..start + self.flight_slot_bytes]
            }
        };
        let (rows, cols) = match projection {
            Projection::Gate | Projection::Up => (self.expert_ff_size, self.hidden_size),
            Projection::Down => (self.hidden_size, self.expert_ff_size),
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

    /// Whether an expert is pinned.
    pub(crate) fn is_pinned(&self, layer: usize, expert: u32) -> bool {
        let slots = &self.layers[layer];
        slots.slot_of[expert as usize] < slots.n_pinned
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

    /// Ends what a failed step left behind: leases and wishes. Residents stay.
    pub(crate) fn recover(&mut self) {
        self.flight_leases.fill(false);
        for slots in &mut self.layers {
            slots.leases.fill(0);
            slots.wanted.fill(false);
        }
    }
}

/// Brings an expert: one read for each run of adjacent tensors.
fn read_expert(
    files: &ShardFiles,
    layout: &ExpertLayout,
    slab: &mut [u8],
) -> Result<(), ReadError> {
    for extent in layout.extents() {
        files.read_extent(extent, slab)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
