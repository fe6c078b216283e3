//! Placement: which experts get a slot, which are pinned, where the embedding lives, how large a
//! prefill batch is. Pure; memory is added up by `budget` alone.

use crate::budget::{self, EmbeddingResidency, KvElement, Ledger, Line, Slots, Workload};
use crate::catalogue::Catalogue;
use crate::units::Bytes;

/// What the user asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The budget.
    pub budget: Bytes,
    /// Tokens that a sequence may hold.
    pub context: u64,
    /// Threads that compute.
    pub threads: u64,
    /// Type of the KV cache.
    pub kv: KvElement,
    /// Most tokens of a prefill batch; chosen from the budget where it is `None`.
    pub prefill_batch: Option<u64>,
}

/// Where everything goes, pins not yet chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// What the engine is asked for.
    pub workload: Workload,
    /// Slots of each layer.
    pub slots: Slots,
    /// The lines, within the budget.
    pub ledger: Ledger,
}

/// The least that the request needs is over the budget. A result, not an error.
#[derive(Clone, Debug, PartialEq)]
pub struct DoesNotFit {
    /// What was asked for.
    pub budget: Bytes,
    /// The ledger of the smallest placement.
    pub ledger: Ledger,
    /// The smallest budget that would do.
    pub smallest_budget: Bytes,
    /// The longest context that would fit in the budget, if any does.
    pub context_that_fits: Option<u64>,
}

/// Largest prefill batch chosen by itself: beyond it a batch touches most experts of a layer, so
/// that a larger one saves few reads.
const PREFILL_BATCH_CAP: u64 = 512;
/// Share of the budget that activations may take when the batch is chosen here.
const ACTIVATION_SHARE: f64 = 0.03;

/// Places a model within a budget.
///
/// What every token touches is resident. If every expert fits, every expert has a slot. Otherwise
/// the embedding is read by rows, for a row is a few kilobytes a token and the table is many
/// experts' worth, and what is left is divided over the layers slot by slot.
///
/// # Errors
/// [`DoesNotFit`] with the ledger and the smallest change that would make it fit.
pub fn place(model: &Catalogue, request: &Request) -> Result<Placed, DoesNotFit> {
    let spec = &model.spec;
    let everything = with_batch(model, request, EmbeddingResidency::Resident);
    let all = Slots::all(spec);
    let ledger = budget::ledger(model, &everything, &all);
    if ledger.total() <= request.budget {
        return Ok(Placed { workload: everything, slots: all, ledger });
    }
    let workload = with_batch(model, request, sparing_embedding(model));
    let floor = budget::ledger(model, &workload, &Slots::none(spec.n_layers));
    if floor.total() > request.budget {
        return Err(does_not_fit(model, request));
    }
    let slots = divide(model, request.budget.saturating_sub(floor.total()));
    let ledger = budget::ledger(model, &workload, &slots);
    Ok(Placed { workload, slots, ledger })
}

/// Reading rows needs an embedding of its own: a head that shares it is read whole every token.
fn sparing_embedding(model: &Catalogue) -> EmbeddingResidency {
    if model.spec.tied_embeddings {
        EmbeddingResidency::Resident
    } else {
        EmbeddingResidency::RowRead
    }
}

/// The workload with the prefill batch that was asked for, or the largest power of two whose
/// activations stay under a small share of the budget.
fn with_batch(model: &Catalogue, request: &Request, embedding: EmbeddingResidency) -> Workload {
    let Request { context, threads, kv, .. } = *request;
    let workload = |prefill_batch| Workload { context, prefill_batch, threads, kv, embedding };
    let longest = context.max(1);
    if let Some(batch) = request.prefill_batch {
        return workload(batch.min(longest));
    }
    let cap = request.budget.as_f64() * ACTIVATION_SHARE;
    let mut batch = PREFILL_BATCH_CAP.min(longest);
    while batch > 1 && budget::activation_bytes(&model.spec, &workload(batch)) as f64 > cap {
        batch /= 2;
    }
    workload(batch)
}

/// Divides `left` bytes over the layers: the same number of slots for each, then one more for
/// layer after layer while it fits. Layers whose experts are larger get no more slots for it.
fn divide(model: &Catalogue, left: Bytes) -> Slots {
    let spec = &model.spec;
    let mut slots = Slots::none(spec.n_layers);
    let n_experts = spec.router.n_experts as u64;
    let round: u64 = spec.expert_layers().map(|l| model.slot_bytes(l).0).sum();
    let even = left.0.checked_div(round).unwrap_or(0).min(n_experts);
    let mut left = left.0 - even * round;
    for layer in spec.expert_layers() {
        slots.caps[layer] = even as u32;
    }
    if even < n_experts {
        for layer in spec.expert_layers() {
            let slot = model.slot_bytes(layer).0;
            if slot <= left {
                slots.caps[layer] += 1;
                left -= slot;
            }
        }
    }
    slots
}

/// The smallest placement of the request: one-token batches, no slots.
fn smallest(model: &Catalogue, request: &Request, context: u64) -> Ledger {
    let workload = Workload {
        context,
        prefill_batch: 1,
        threads: request.threads,
        kv: request.kv,
        embedding: sparing_embedding(model),
    };
    budget::ledger(model, &workload, &Slots::none(model.spec.n_layers))
}

fn does_not_fit(model: &Catalogue, request: &Request) -> DoesNotFit {
    // A batch chosen by the user may be what does not fit; the smallest placement has none.
    let request = Request { prefill_batch: Some(1), ..*request };
    let ledger = smallest(model, &request, request.context);
    let fits = |context| smallest(model, &request, context).total() <= request.budget;
    let context_that_fits = if fits(1) {
        let (mut low, mut high) = (1, request.context.max(1));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        Some(low)
    } else {
        None
    };
    DoesNotFit {
        budget: request.budget,
        smallest_budget: ledger.total(),
        ledger,
        context_that_fits,
    }
}

impl Placed {
    /// Turns some slots into pins; the ledger moves bytes from one line to the other.
    pub fn pin(&mut self, model: &Catalogue, pins: Vec<Vec<u32>>) {
        self.slots.pins = pins;
        self.ledger = budget::ledger(model, &self.workload, &self.slots);
    }

    /// Bytes of all expert slots.
    #[must_use]
    pub fn slot_bytes(&self) -> Bytes {
        self.ledger.bytes(Line::PinnedExperts) + self.ledger.bytes(Line::ExpertCache)
    }
}
