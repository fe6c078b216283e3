//! Placement: what goes to graphics cards, which experts get a slot, where the embedding lives, which
//! dense weights are streamed, how large a prefill batch is. Pure; memory is added up by `budget`
//! alone.

mod cards;
mod slots;

pub use self::cards::{CardBudget, least_card_bytes};
use crate::budget::{
    self, CardPlacement, DenseResidency, EmbeddingResidency, Holding, KvElement, Ledger, Line,
    ModelBytes, Numerics, Reads, Slots, Streamed, Workload,
};
use crate::units::Bytes;

/// What the user asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The budget of main memory.
    pub budget: Bytes,
    /// What each graphics card that may be used can give.
    pub cards: Vec<CardBudget>,
    /// Tokens that a sequence may hold.
    pub context: u64,
    /// Sequences at once.
    pub sessions: u64,
    /// Threads that compute.
    pub threads: u64,
    /// How reads are made.
    pub reads: Reads,
    /// How activations are computed.
    pub numerics: Numerics,
    /// Type of the KV cache.
    pub kv: KvElement,
    /// Most tokens of a prefill batch; chosen from the budget where it is `None`.
    pub prefill_batch: Option<u64>,
    /// Slots of each layer in main memory; chosen from the budget where it is `None`.
    pub slots: Option<u32>,
    /// How dense weights may live in main memory.
    pub dense: DenseRule,
    /// Who keeps experts that have no place of their own.
    pub cache: CacheRule,
}

/// How the dense weights that are on no card live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DenseRule {
    /// In memory; as many layers as must be are streamed where they do not fit.
    #[default]
    Auto,
    /// In memory, or the model does not fit.
    Resident,
    /// As pages of the files, mapped, or the model does not fit.
    Mapped,
    /// Every layer and the head are streamed.
    Streamed,
}

impl DenseRule {
    /// How dense weights that stay are held.
    fn residency(self) -> DenseResidency {
        match self {
            Self::Auto | Self::Resident | Self::Streamed => DenseResidency::Resident,
            Self::Mapped => DenseResidency::Mapped,
        }
    }
}

/// Who keeps experts that have no place of their own: one cache, never two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheRule {
    /// The engine, in slots; what it reads is dropped from the page cache.
    #[default]
    Slots,
    /// The kernel, in its page cache; the engine has slots only if every expert has one, or where
    /// their number is given.
    PageCache,
}

/// Where everything goes, pins not yet chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// What the engine is asked for.
    pub workload: Workload,
    /// Slots of each layer.
    pub slots: Slots,
    /// How dense weights that stay are held.
    pub dense: DenseResidency,
    /// Dense weights that do not stay.
    pub streamed: Streamed,
    /// Left to the page cache for experts.
    pub page_cache_bytes: Bytes,
    /// What each card is given.
    pub cards: Vec<CardPlacement>,
    /// The lines of main memory, within the budget.
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

/// One way to live within main memory, slots for what is left not counted.
#[derive(Clone, Debug)]
struct Way {
    embedding: EmbeddingResidency,
    slots: Slots,
    streamed: Streamed,
}

/// What is the same for every way of one request at one context.
struct Frame<'a> {
    sums: &'a ModelBytes<'a>,
    request: &'a Request,
    context: u64,
    cards: Vec<CardPlacement>,
    /// Experts of each layer that are on a card.
    on_cards: Vec<u32>,
}

/// Places a model within a budget.
///
/// Cards come first and do not depend on main memory: what every token touches, then experts. In
/// main memory what every token touches is resident. If every expert fits, every expert has a slot.
/// Otherwise the embedding is read by rows, for a row is a few kilobytes a token and the table is many
/// experts' worth, and what is left is divided over the layers slot by slot. Where not even that fits
/// without a slot, as few dense layers as do are streamed, and no expert has a slot: what every token
/// touches goes before what some do. Where all are streamed because that is asked for, the rest of the
/// budget is for slots. A larger budget never gives a layer fewer slots and never streams
/// more.
///
/// `uses` are how often each expert of each decoder layer was used, for what goes to a card; without
/// them experts go there evenly over the layers.
///
/// # Errors
/// [`DoesNotFit`] with the ledger and the smallest change that would make it fit.
pub fn place(
    sums: &ModelBytes<'_>,
    request: &Request,
    uses: Option<&[Vec<f64>]>,
) -> Result<Placed, DoesNotFit> {
    let frame = Frame::new(sums, request, request.context, uses);
    let placed = match request.dense {
        DenseRule::Resident | DenseRule::Mapped => frame.in_memory(),
        DenseRule::Auto => frame.in_memory().or_else(|| frame.streamed_as_must_be()),
        DenseRule::Streamed => frame.streamed().find_map(|way| frame.with_slots(way.clone(), way)),
    };
    placed.ok_or_else(|| does_not_fit(&frame, uses))
}

/// The ledger of the smallest placement that a request allows, whatever its budget: a request fits
/// where this does.
#[must_use]
pub fn smallest(sums: &ModelBytes<'_>, request: &Request, uses: Option<&[Vec<f64>]>) -> Ledger {
    Frame::new(sums, request, request.context, uses).smallest()
}

impl<'a> Frame<'a> {
    fn new(
        sums: &'a ModelBytes<'a>,
        request: &'a Request,
        context: u64,
        uses: Option<&[Vec<f64>]>,
    ) -> Self {
        let smallest = workload(request, context, EmbeddingResidency::Resident, 1);
        let cards = cards::place(sums, &smallest, &request.cards, uses);
        let none = Slots::default();
        let on_cards =
            Holding { cards: &cards, ..Holding::in_memory(&none) }.on_cards(sums.layers.len());
        Self { sums, request, context, cards, on_cards }
    }

    /// All dense weights in memory.
    fn in_memory(&self) -> Option<Placed> {
        let way = |embedding| Way {
            embedding,
            slots: Slots::none(self.sums.layers.len()),
            streamed: Streamed::default(),
        };
        let by_rows = budget::touched_embedding(self.sums.model);
        self.with_slots(way(EmbeddingResidency::Resident), way(by_rows))
    }

    /// As few dense layers streamed as must be, and no expert has a slot unless some are asked for.
    fn streamed_as_must_be(&self) -> Option<Placed> {
        self.streamed().find_map(|way| {
            let (workload, _) = self.fit(&way)?;
            Some(self.placed(workload, way, Bytes(0)))
        })
    }

    /// Dense weights as in `everything` if that and a slot for every expert fit; else as in `way`, with slots
    /// for what is left, or the page cache with what is left.
    fn with_slots(&self, mut everything: Way, mut way: Way) -> Option<Placed> {
        let given = self.given_slots();
        everything.slots = given.clone().unwrap_or_else(|| self.all_slots());
        if let Some((workload, _)) = self.fit(&everything) {
            return Some(self.placed(workload, everything, Bytes(0)));
        }
        if let Some(given) = &given {
            way.slots.clone_from(given);
        }
        let (workload, left) = self.fit(&way)?;
        let mut page_cache = Bytes(0);
        match (given, self.request.cache) {
            // What the page cache kept beside slots would be kept twice.
            (Some(_), _) => {}
            (None, CacheRule::Slots) => way.slots = slots::divide(self.sums, &self.on_cards, left),
            (None, CacheRule::PageCache) => page_cache = Bytes(left.0.min(self.routed_elsewhere())),
        }
        Some(self.placed(workload, way, page_cache))
    }

    /// Ways with more and more dense layers streamed, the fewest first.
    fn streamed(&self) -> impl Iterator<Item = Way> + '_ {
        let order = self.stream_order();
        let with_head = !self.cards.iter().any(|c| c.head) && !order.is_empty();
        let n = order.len();
        let last = n + usize::from(with_head);
        let counts = match self.request.dense {
            DenseRule::Auto => 1..last + 1,
            DenseRule::Streamed => last..last + 1,
            DenseRule::Resident | DenseRule::Mapped => 0..0,
        };
        counts.filter(move |_| n > 0).map(move |count| {
            let mut layers = order[..count.min(n)].to_vec();
            layers.sort_unstable();
            let head = count > n;
            Way {
                // Where the table is the head and passes through the buffers, a token's row is read.
                embedding: match budget::touched_embedding(self.sums.model) {
                    EmbeddingResidency::Resident if !head => EmbeddingResidency::Resident,
                    EmbeddingResidency::Resident | EmbeddingResidency::RowRead => {
                        EmbeddingResidency::RowRead
                    }
                },
                slots: self.given_slots().unwrap_or_else(|| Slots::none(self.sums.layers.len())),
                streamed: Streamed { layers, head },
            }
        })
    }

    /// Layers in the order in which they are streamed: small ones first, for the buffers must hold the
    /// largest; of equal ones the last first.
    fn stream_order(&self) -> Vec<u32> {
        let on_card = |layer: usize| self.cards.iter().any(|c| c.layers().contains(&layer));
        let layers = self.sums.layers.iter().enumerate().filter(|(layer, _)| !on_card(*layer));
        let mut order: Vec<(u64, std::cmp::Reverse<u32>)> = layers
            .map(|(layer, bytes)| (bytes.largest_block(), std::cmp::Reverse(layer as u32)))
            .collect();
        order.sort_unstable();
        order.into_iter().map(|(_, layer)| layer.0).collect()
    }

    /// A slot for every expert that is on no card.
    fn all_slots(&self) -> Slots {
        let n_layers = self.sums.layers.len();
        let caps = self.sums.layers.iter().zip(&self.on_cards);
        let caps = caps.map(|(bytes, &on_cards)| bytes.n_experts.saturating_sub(on_cards));
        Slots { caps: caps.collect(), pins: vec![Vec::new(); n_layers] }
    }

    /// The slots that were asked for, as far as there are experts for them.
    fn given_slots(&self) -> Option<Slots> {
        let given = self.request.slots?;
        let mut slots = self.all_slots();
        slots.caps.iter_mut().for_each(|cap| *cap = given.min(*cap));
        Some(slots)
    }

    /// Bytes of all experts that are on no card.
    fn routed_elsewhere(&self) -> u64 {
        let layers = self.sums.layers.iter().zip(&self.on_cards);
        layers.fold(0, |sum: u64, (bytes, &on_cards)| {
            let n = u64::from(bytes.n_experts.saturating_sub(on_cards));
            sum.saturating_add(bytes.slot.saturating_mul(n))
        })
    }

    fn holding<'b>(&'b self, way: &'b Way) -> Holding<'b> {
        let (slots, streamed) = (&way.slots, &way.streamed);
        let dense = self.request.dense.residency();
        Holding { slots, dense, streamed, page_cache_bytes: Bytes(0), cards: &self.cards }
    }

    fn workload(&self, embedding: EmbeddingResidency, prefill_batch: u64) -> Workload {
        workload(self.request, self.context, embedding, prefill_batch)
    }

    /// The smallest and the largest prefill batch that may be planned: the one asked for, if one is.
    fn batches(&self) -> (u64, u64) {
        let longest = self.context.max(1);
        match self.request.prefill_batch {
            Some(batch) => (batch.min(longest), batch.min(longest)),
            None => (1, PREFILL_BATCH_CAP.min(longest)),
        }
    }

    /// The ledger of a way at its smallest prefill batch.
    fn least(&self, way: &Way) -> Ledger {
        let workload = self.workload(way.embedding, self.batches().0);
        budget::host_ledger(self.sums, &workload, &self.holding(way))
    }

    /// The workload of a way and the bytes that it leaves for more slots; `None` if even its smallest
    /// prefill batch is over the budget.
    ///
    /// A batch that is not asked for is the largest whose activations stay within their part of the
    /// budget. That part is set aside whole: what is left then grows with the budget, where the
    /// activations themselves grow in steps.
    fn fit(&self, way: &Way) -> Option<(Workload, Bytes)> {
        let workload = |batch| self.workload(way.embedding, batch);
        let spec = &self.sums.model.spec;
        let activations = |batch| budget::activation_bytes(spec, &workload(batch));
        let (smallest, largest) = self.batches();
        let least = self.least(way).total();
        let budget = self.request.budget;
        if least > budget {
            return None;
        }
        let left = budget.saturating_sub(least).0;
        let base = activations(smallest);
        let set_aside = (budget.0 / ACTIVATION_PART)
            .clamp(base, activations(largest).max(base))
            .min(base.saturating_add(left));
        let (mut low, mut high) = (smallest, largest);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if activations(middle) <= set_aside { low = middle } else { high = middle - 1 }
        }
        Some((workload(low), Bytes(left - (set_aside - base))))
    }

    fn placed(&self, workload: Workload, way: Way, page_cache_bytes: Bytes) -> Placed {
        let holding = Holding { page_cache_bytes, ..self.holding(&way) };
        let ledger = budget::host_ledger(self.sums, &workload, &holding);
        let Way { slots, streamed, .. } = way;
        let (dense, cards) = (self.request.dense.residency(), self.cards.clone());
        Placed { workload, slots, dense, streamed, page_cache_bytes, cards, ledger }
    }

    /// The smallest placement: the smallest batch, and no slots unless a model is so small that slots
    /// for all its experts take less than a flight buffer does.
    fn smallest(&self) -> Ledger {
        let n_layers = self.sums.layers.len();
        let given = self.given_slots();
        let way = |embedding, slots: Slots| Way {
            embedding,
            slots: given.clone().unwrap_or(slots),
            streamed: Streamed::default(),
        };
        let resident = (self.request.dense != DenseRule::Streamed).then(|| {
            [
                way(budget::touched_embedding(self.sums.model), Slots::none(n_layers)),
                way(EmbeddingResidency::Resident, self.all_slots()),
            ]
        });
        let ways = resident.into_iter().flatten().chain(self.streamed());
        ways.map(|way| self.least(&way)).min_by_key(Ledger::total).unwrap_or_default()
    }
}

fn workload(
    request: &Request,
    context: u64,
    embedding: EmbeddingResidency,
    prefill_batch: u64,
) -> Workload {
    let Request { threads, numerics, kv, sessions, reads, .. } = *request;
    Workload { context, prefill_batch, threads, numerics, kv, embedding, sessions, reads }
}

fn does_not_fit(frame: &Frame<'_>, uses: Option<&[Vec<f64>]>) -> DoesNotFit {
    let request = frame.request;
    let ledger = frame.smallest();
    let fits = |context| {
        Frame::new(frame.sums, request, context, uses).smallest().total() <= request.budget
    };
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
    /// Where everything lives.
    #[must_use]
    pub fn holding(&self) -> Holding<'_> {
        Holding {
            slots: &self.slots,
            dense: self.dense,
            streamed: &self.streamed,
            page_cache_bytes: self.page_cache_bytes,
            cards: &self.cards,
        }
    }

    /// Turns some slots into pins; the ledger moves bytes from one line to the other.
    pub fn pin(&mut self, sums: &ModelBytes<'_>, pins: Vec<Vec<u32>>) {
        self.slots.pins = pins;
        self.ledger = budget::host_ledger(sums, &self.workload, &self.holding());
    }

    /// Bytes of all expert slots in main memory.
    #[must_use]
    pub fn slot_bytes(&self) -> Bytes {
        self.ledger.bytes(Line::PinnedExperts) + self.ledger.bytes(Line::ExpertCache)
    }
}
