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
/// Part of the budget that activations may take when the batch is chosen here: one in so many.
const ACTIVATION_PART: u64 = 32;

/// Places a model within a budget.
///
/// What every token touches is resident. If every expert fits, every expert has a slot. Otherwise
/// the embedding is read by rows, for a row is a few kilobytes a token and the table is many
/// experts' worth, and what is left is divided over the layers slot by slot. A larger budget never
/// gives a layer fewer slots.
///
/// # Errors
/// [`DoesNotFit`] with the ledger and the smallest change that would make it fit.
pub fn place(model: &Catalogue, request: &Request) -> Result<Placed, DoesNotFit> {
    let spec = &model.spec;
    let all = Slots::all(spec);
    if let Some((workload, _)) = fit(model, request, EmbeddingResidency::Resident, &all) {
        let ledger = budget::ledger(model, &workload, &all);
        return Ok(Placed { workload, slots: all, ledger });
    }
    let none = Slots::none(spec.n_layers);
    let Some((workload, left)) = fit(model, request, budget::touched_embedding(model), &none)
    else {
        return Err(does_not_fit(model, request));
    };
    let slots = divide(model, left);
    let ledger = budget::ledger(model, &workload, &slots);
    Ok(Placed { workload, slots, ledger })
}

/// The workload of a placement and the bytes that it leaves for more slots; `None` if even its
/// smallest prefill batch is over the budget.
///
/// A batch that is not asked for is the largest whose activations stay within their part of the
/// budget. That part is set aside whole: what is left then grows with the budget, where the
/// activations themselves grow in steps.
fn fit(
    model: &Catalogue,
    request: &Request,
    embedding: EmbeddingResidency,
    slots: &Slots,
) -> Option<(Workload, Bytes)> {
    let workload = |prefill_batch| workload(request, request.context, embedding, prefill_batch);
    let activations = |batch| budget::activation_bytes(&model.spec, &workload(batch));
    let (smallest, largest) = batches(request, request.context);
    let least = budget::ledger(model, &workload(smallest), slots).total();
    if least > request.budget {
        return None;
    }
    let left = request.budget.saturating_sub(least).0;
    let base = activations(smallest);
    let set_aside = (request.budget.0 / ACTIVATION_PART)
        .clamp(base, activations(largest).max(base))
        .min(base.saturating_add(left));
    let (mut low, mut high) = (smallest, largest);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if activations(middle) <= set_aside { low = middle } else { high = middle - 1 }
    }
    Some((workload(low), Bytes(left - (set_aside - base))))
}

fn workload(
    request: &Request,
    context: u64,
    embedding: EmbeddingResidency,
    prefill_batch: u64,
) -> Workload {
    let Request { threads, kv, .. } = *request;
    Workload { context, prefill_batch, threads, kv, embedding }
}

/// The smallest and the largest prefill batch that may be planned: the one asked for, if one is.
fn batches(request: &Request, context: u64) -> (u64, u64) {
    let longest = context.max(1);
    match request.prefill_batch {
        Some(batch) => (batch.min(longest), batch.min(longest)),
        None => (1, PREFILL_BATCH_CAP.min(longest)),
    }
}

/// Divides `left` bytes over the layers: the same number of slots for each, then one more for
/// layer after layer, the ones with the smallest experts first. The first that does not fit ends
/// it: were it passed over, a larger budget could give it a slot and take others' away.
fn divide(model: &Catalogue, left: Bytes) -> Slots {
    let spec = &model.spec;
    let mut slots = Slots::none(spec.n_layers);
    let mut layers: Vec<(u64, usize)> =
        spec.expert_layers().map(|layer| (model.slot_bytes(layer).0, layer)).collect();
    layers.sort_unstable();
    let n_experts = spec.router.n_experts as u64;
    let round: u64 = layers.iter().map(|(slot, _)| slot).sum();
    let even = left.0.checked_div(round).unwrap_or(0).min(n_experts);
    for (_, layer) in &layers {
        slots.caps[*layer] = even as u32;
    }
    let mut left = left.0 - even * round;
    if even < n_experts {
        for (slot, layer) in layers {
            if slot > left {
                break;
            }
            left -= slot;
            slots.caps[layer] += 1;
        }
    }
    slots
}

/// The smallest placement at a context: the smallest batch, and no slots unless a model is so small
/// that slots for all its experts take less than a flight buffer does.
fn smallest(model: &Catalogue, request: &Request, context: u64) -> Ledger {
    let ledger = |embedding, slots| {
        let workload = workload(request, context, embedding, batches(request, context).0);
        budget::ledger(model, &workload, &slots)
    };
    let none = ledger(budget::touched_embedding(model), Slots::none(model.spec.n_layers));
    let all = ledger(EmbeddingResidency::Resident, Slots::all(&model.spec));
    if all.total() < none.total() { all } else { none }
}

fn does_not_fit(model: &Catalogue, request: &Request) -> DoesNotFit {
    let ledger = smallest(model, request, request.context);
    let fits = |context| smallest(model, request, context).total() <= request.budget;
    let context_that_fits = fits(1).then(|| {
        let (mut low, mut high) = (1, request.context.max(1));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        low
    });
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
