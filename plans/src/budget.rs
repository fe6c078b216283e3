//! The budget ledger: the only place in the project that adds up memory.
//!
//! Pure arithmetic over a model's catalogue, a workload and a number of expert slots. It probes
//! nothing, reads nothing and never rounds a budget up. The engine allocates against these lines
//! and refuses to exceed one.

mod bytes;
mod card;
mod classes;
mod dense;
mod io;
mod numerics;
mod shape;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::bytes::{LayerBytes, ModelBytes, PartBytes};
pub use self::card::{
    CardLedger, CardLedgerLine, CardLine, CardPlacement, ExpertList, ExpertListError, LayerExperts,
};
pub use self::classes::{ByClass, KernelClass, Touched};
pub use self::dense::{
    DenseResidency, MAP_PAGE_BYTES, Streamed, mapped_ranges, resident_tensors,
    streamed_bytes_per_token,
};
pub use self::io::{
    IoMode, Reads, bounce_bytes, direct_padding_share, largest_slot_bytes, n_bounces, slot_bytes,
    slot_layout,
};
pub use self::numerics::{Numerics, NumericsError};
pub use self::shape::{
    CachePerToken, INDEX_CHUNK, LATENT_BLOCK, activation_bytes, cache_per_token, indexer_key_bytes,
    kv_cache_bytes, layer_indexer_bytes, layer_kv_bytes, mtp_kv_cache_bytes, score_columns,
    widest_norm,
};
use crate::catalogue::{Catalogue, TENSOR_ALIGN};
use crate::spec::ArchSpec;
use crate::units::{Bytes, counted, round_up};

/// A named line of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// Binary, stacks, heap, tokenizer, the catalogue itself.
    Runtime,
    /// Weights that every token touches, in their stored type, as far as they stay.
    DenseWeights,
    /// Two buffers through which dense weights that do not fit are read for each token.
    StreamBuffers,
    /// Keys and values, or latents and rotary keys.
    KvCache,
    /// Keys of the sparse-attention indexer.
    IndexerKeys,
    /// Buffers of the forward pass.
    Activations,
    /// Experts that are read or used and have no slot.
    ExpertsInFlight,
    /// Buffers that reads go through.
    IoBuffers,
    /// Buffers through which graphics cards are filled and states come and go.
    TransferBuffers,
    /// Left to the kernel for pages that reads pass through.
    PageCacheReserve,
    /// Slots of experts that are never evicted.
    PinnedExperts,
    /// Slots of experts that come and go.
    ExpertCache,
}

impl Line {
    /// Every line, in the order in which it is shown.
    pub const ALL: [Self; 12] = [
        Self::Runtime,
        Self::DenseWeights,
        Self::StreamBuffers,
        Self::KvCache,
        Self::IndexerKeys,
        Self::Activations,
        Self::ExpertsInFlight,
        Self::IoBuffers,
        Self::TransferBuffers,
        Self::PageCacheReserve,
        Self::PinnedExperts,
        Self::ExpertCache,
    ];

    /// Its name as users see it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Runtime => "runtime",
            Self::DenseWeights => "dense weights",
            Self::StreamBuffers => "stream buffers",
            Self::KvCache => "KV cache",
            Self::IndexerKeys => "indexer keys",
            Self::Activations => "activations",
            Self::ExpertsInFlight => "experts in flight",
            Self::IoBuffers => "I/O buffers",
            Self::TransferBuffers => "transfer buffers",
            Self::PageCacheReserve => "page-cache reserve",
            Self::PinnedExperts => "pinned experts",
            Self::ExpertCache => "expert cache",
        }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One line with its bytes and, in words, what it is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LedgerLine {
    /// Which line.
    pub line: Line,
    /// How much it holds.
    pub bytes: Bytes,
    /// What that is made of.
    pub note: String,
}

/// Every line of a plan; they sum to its footprint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ledger(pub Vec<LedgerLine>);

impl Ledger {
    /// Bytes of a line, 0 where it is absent.
    #[must_use]
    pub fn bytes(&self, line: Line) -> Bytes {
        self.0.iter().filter(|l| l.line == line).map(|l| l.bytes).sum()
    }

    /// Sum of all lines.
    #[must_use]
    pub fn total(&self) -> Bytes {
        self.0.iter().map(|l| l.bytes).sum()
    }

    /// Sum of all lines but the page-cache reserve: what the process itself is to hold.
    #[must_use]
    pub fn footprint(&self) -> Bytes {
        self.total().saturating_sub(self.bytes(Line::PageCacheReserve))
    }
}

/// Type of cached keys, values and latents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvElement {
    /// IEEE single: what the reference keeps.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
}

impl KvElement {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Where the embedding lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmbeddingResidency {
    /// With the dense weights.
    Resident,
    /// On disk; the row of each token is read when it is needed.
    RowRead,
}

/// What is asked of the engine: everything besides slots that decides its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Tokens that a sequence may hold.
    pub context: u64,
    /// Most tokens of one prefill batch.
    pub prefill_batch: u64,
    /// Threads that compute.
    pub threads: u64,
    /// How activations are computed.
    pub numerics: Numerics,
    /// Type of the KV cache and the indexer keys.
    pub kv: KvElement,
    /// Where the embedding lives.
    pub embedding: EmbeddingResidency,
    /// Sequences of `context` tokens that are held at once, each with caches of its own.
    pub sessions: u64,
    /// How reads are made.
    pub reads: Reads,
}

/// Expert slots of every decoder layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slots {
    /// Slots a layer may hold, pinned ones included; 0 for a layer without experts.
    pub caps: Vec<u32>,
    /// Experts of a layer that are never evicted, ascending.
    pub pins: Vec<Vec<u32>>,
}

impl Slots {
    /// No slot anywhere: every expert passes through the flight buffer.
    #[must_use]
    pub fn none(n_layers: usize) -> Self {
        Self { caps: vec![0; n_layers], pins: vec![Vec::new(); n_layers] }
    }

    /// A slot for every expert.
    #[must_use]
    pub fn all(spec: &ArchSpec) -> Self {
        let cap =
            |layer| if spec.is_expert_layer(layer) { spec.router.n_experts as u32 } else { 0 };
        Self { caps: (0..spec.n_layers).map(cap).collect(), pins: vec![Vec::new(); spec.n_layers] }
    }

    /// Whether every expert has a slot, so that none is ever read twice.
    #[must_use]
    pub fn hold_everything(&self, spec: &ArchSpec) -> bool {
        spec.expert_layers().all(|l| self.caps.get(l) == Some(&(spec.router.n_experts as u32)))
    }
}

/// Where everything lives, as far as memory depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Holding<'a> {
    /// Slots in main memory.
    pub slots: &'a Slots,
    /// How dense weights that stay are held.
    pub dense: DenseResidency,
    /// Dense weights that do not stay.
    pub streamed: &'a Streamed,
    /// Left to the kernel to keep experts in its page cache; 0 where they have slots.
    pub page_cache_bytes: Bytes,
    /// What each graphics card is given.
    pub cards: &'a [CardPlacement],
}

/// Nothing is streamed.
static ALL_RESIDENT: Streamed = Streamed { layers: Vec::new(), head: false };

impl<'a> Holding<'a> {
    /// Slots in main memory and no more: all dense weights stay there, no cards.
    #[must_use]
    pub fn in_memory(slots: &'a Slots) -> Self {
        let dense = DenseResidency::Resident;
        Self { slots, dense, streamed: &ALL_RESIDENT, page_cache_bytes: Bytes(0), cards: &[] }
    }

    /// Number of experts of each layer that stay on some card.
    #[must_use]
    pub fn on_cards(&self, n_layers: usize) -> Vec<u32> {
        let mut counts = vec![0_u32; n_layers];
        for layer in self.cards.iter().flat_map(|c| &c.experts) {
            if let Some(count) = counts.get_mut(layer.layer as usize) {
                *count = count.saturating_add(layer.experts.0.len() as u32);
            }
        }
        counts
    }

    /// Whether every expert has a place of its own, so that none is ever read twice.
    #[must_use]
    pub fn hold_everything(&self, spec: &ArchSpec) -> bool {
        let n_experts = spec.router.n_experts as u64;
        let on_cards = self.on_cards(spec.n_layers);
        spec.expert_layers().all(|layer| {
            let cap = self.slots.caps.get(layer).copied().unwrap_or(0);
            u64::from(cap) + u64::from(on_cards[layer]) >= n_experts
        })
    }

    fn is_on_card(&self, layer: usize) -> bool {
        self.cards.iter().any(|c| c.layers().contains(&layer))
    }

    fn is_streamed(&self, layer: usize) -> bool {
        self.streamed.layers.binary_search(&(layer as u32)).is_ok()
    }

    fn head_on_card(&self) -> bool {
        self.cards.iter().any(|c| c.head)
    }
}

/// Pages of the binary and heap of the process that no other line counts, measured on x86-64 Linux as
/// peak resident memory less what was bound and less the allowances below: 12.4 to 13.7 MB of a binary
/// of 22 MB, with text and with token ids, and a little for pages that another run maps.
const RUNTIME_BASE_BYTES: u64 = 14_000_000;
/// Stack touched and thread-local state of one worker.
const RUNTIME_THREAD_BYTES: u64 = 100_000;
/// Catalogue entries of one tensor while a model is opened: name, shape, role.
const RUNTIME_TENSOR_BYTES: u64 = 400;
/// Heap of a tokenizer for each byte of its tokenizer.json.
const RUNTIME_TOKENIZER_FACTOR: u64 = 12;

/// What a driver's context and the images of the kernels take of a card once a process uses it.
///
/// Assumed: a CUDA context with its modules is reported at 300 to 500 MB on cards of the last
/// three generations; the rest is for fragments of the allocator.
const DRIVER_RESERVE_BYTES: u64 = 600_000_000;
/// Most tokens that pass through a card at once; a longer batch passes in parts. So a card's buffers
/// depend on the context alone, and more main memory never takes an expert's place on a card.
const CARD_BATCH: u64 = 256;

/// The ledger of a model in main memory: no cards, all dense weights resident.
#[must_use]
pub fn ledger(model: &Catalogue, io: IoMode, workload: &Workload, slots: &Slots) -> Ledger {
    host_ledger(&ModelBytes::of(model, io), workload, &Holding::in_memory(slots))
}

/// The whole ledger of main memory.
#[must_use]
pub fn host_ledger(sums: &ModelBytes<'_>, workload: &Workload, holding: &Holding<'_>) -> Ledger {
    let model = sums.model;
    let spec = &model.spec;
    let mut lines = Vec::with_capacity(Line::ALL.len());
    let mut add = |line, bytes: u64, note: String| {
        lines.push(LedgerLine { line, bytes: Bytes(bytes), note });
    };
    let runtime = RUNTIME_BASE_BYTES
        .saturating_add(
            workload
                .threads
                .saturating_add(workload.reads.depth)
                .saturating_mul(RUNTIME_THREAD_BYTES),
        )
        .saturating_add((model.n_tensors as u64).saturating_mul(RUNTIME_TENSOR_BYTES))
        .saturating_add(model.tokenizer_bytes.0.saturating_mul(RUNTIME_TOKENIZER_FACTOR));
    add(
        Line::Runtime,
        runtime,
        format!(
            "binary and heap, {}, {}, tokenizer of {}",
            threads_note(workload),
            counted(model.n_tensors as u64, "tensor"),
            model.tokenizer_bytes
        ),
    );
    let embedding = workload.embedding;
    let dense = dense::bytes(sums, embedding, holding);
    add(Line::DenseWeights, dense, dense::note(sums, embedding, holding));
    let streamed = holding.streamed;
    let buffers = dense::stream_buffer_bytes(sums, streamed);
    add(Line::StreamBuffers, buffers, dense::stream_note(sums, streamed));
    let layers: Vec<usize> = (0..spec.n_layers).filter(|&l| !holding.is_on_card(l)).collect();
    add_caches(workload, spec, &layers, |kv, bytes, note| {
        add(if kv { Line::KvCache } else { Line::IndexerKeys }, bytes, note);
    });
    add(
        Line::Activations,
        activation_bytes(spec, workload),
        format!("batches of {} in prefill", counted(workload.prefill_batch, "token")),
    );
    let holds_everything = holding.hold_everything(spec);
    let flight = if holds_everything { 0 } else { spec.router.n_experts_active as u64 };
    add(
        Line::ExpertsInFlight,
        flight.saturating_mul(sums.largest_slot),
        match flight {
            0 => "none: every expert has a place of its own".to_owned(),
            n => counted(n, "expert"),
        },
    );
    let (bytes, note) = io_buffers(sums, embedding);
    add(Line::IoBuffers, bytes, note);
    add(
        Line::TransferBuffers,
        host_transfer_bytes(sums, workload, holding),
        match holding.cards.len() as u64 {
            0 => "none: no graphics card is used".to_owned(),
            n => format!("for {}", counted(n, "graphics card")),
        },
    );
    let leaves_pages = !holds_everything && sums.io.uses_page_cache();
    let n_reads = workload.reads.depth.max(1);
    let read = workload.reads.largest(sums.largest_slot);
    let under_way = if leaves_pages { read.saturating_mul(n_reads) } else { 0 };
    let reads = match n_reads {
        1 => "pages of the read under way".to_owned(),
        n => format!("pages of the {n} reads under way"),
    };
    let note = match holding.page_cache_bytes {
        Bytes(0) if holds_everything => "none: nothing is read while it runs".to_owned(),
        Bytes(0) if !leaves_pages => "none: experts are read past the page cache".to_owned(),
        Bytes(0) => reads,
        bytes => format!("{reads}, and {bytes} of experts that the kernel keeps"),
    };
    add(Line::PageCacheReserve, under_way.saturating_add(holding.page_cache_bytes.0), note);
    let (pinned, cached) = slot_line_bytes(sums, holding.slots);
    let n_pins: usize = holding.slots.pins.iter().map(Vec::len).sum();
    let n_slots: u64 = holding.slots.caps.iter().map(|&c| u64::from(c)).sum();
    let note = match n_pins as u64 {
        0 => "none".to_owned(),
        n => counted(n, "expert"),
    };
    add(Line::PinnedExperts, pinned, note);
    let n_layers = counted(spec.expert_layers().count() as u64, "layer");
    let note = match n_slots.saturating_sub(n_pins as u64) {
        0 => "none".to_owned(),
        n => format!("{} in {n_layers}", counted(n, "slot")),
    };
    add(Line::ExpertCache, cached, note);
    Ledger(lines)
}

fn threads_note(workload: &Workload) -> String {
    let threads = counted(workload.threads, "thread");
    match workload.reads.depth {
        0 => threads,
        n => format!("{threads} and {n} that read"),
    }
}

/// What reads pass through that do not go where their bytes are used.
fn io_buffers(sums: &ModelBytes<'_>, embedding: EmbeddingResidency) -> (u64, String) {
    let bounce = bounce_bytes(sums.io);
    let (row, mut note) = match embedding {
        EmbeddingResidency::Resident => (0, String::new()),
        EmbeddingResidency::RowRead => (sums.embedding_row, "one row of the embedding".to_owned()),
    };
    if bounce > 0 {
        note = [note, "what is read past the page cache and is no expert".to_owned()]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join(", ");
    }
    if note.is_empty() {
        note = "none: reads go where the bytes are used".to_owned();
    }
    (bounce.saturating_add(row), note)
}

/// The caches of some layers; `add(is KV, bytes, note)`.
fn add_caches(
    workload: &Workload,
    spec: &ArchSpec,
    layers: &[usize],
    mut add: impl FnMut(bool, u64, String),
) {
    let Workload { context, kv, sessions, .. } = *workload;
    let all = |bytes: u64| bytes.saturating_mul(sessions);
    let element = format!("{kv:?}").to_lowercase();
    let of_each = if sessions == 1 { String::new() } else { format!(", {sessions} sequences") };
    let bytes = shape::sum(layers.iter().map(|&l| layer_kv_bytes(spec, l, context, kv)));
    let n_layers = layers.len() as u64;
    let tokens = counted(context, "token");
    let note = match n_layers {
        0 => "none: no layer is held here".to_owned(),
        n => format!("{} x {tokens}, {element}{of_each}", counted(n, "layer")),
    };
    add(true, all(bytes), note);
    let bytes = shape::sum(layers.iter().map(|&l| layer_indexer_bytes(spec, l, context, kv)));
    let n_indexers = layers.iter().filter(|&&l| shape::has_indexer(spec, l)).count();
    let note = match n_indexers as u64 {
        0 if n_layers == 0 => "none: no layer is held here".to_owned(),
        0 => "none: no layer has an indexer".to_owned(),
        n => format!("{} with an indexer{of_each}", counted(n, "layer")),
    };
    add(false, all(bytes), note);
}

/// The ledger of one card's memory.
#[must_use]
pub fn card_ledger(sums: &ModelBytes<'_>, workload: &Workload, card: &CardPlacement) -> CardLedger {
    let experts = card.experts.iter().fold(0_u64, |sum, l| {
        let slot = sums.layers.get(l.layer as usize).map_or(0, |bytes| bytes.slot);
        sum.saturating_add(slot.saturating_mul(l.experts.0.len() as u64))
    });
    let mut ledger = card_ledger_without_experts(sums, workload, card.layers(), card.head);
    let note = match card.n_experts() {
        0 => "none".to_owned(),
        n => {
            let layers = counted(card.experts.len() as u64, "layer");
            format!("{} in {layers}", counted(n, "expert"))
        }
    };
    ledger.0.push(CardLedgerLine { line: CardLine::Experts, bytes: Bytes(experts), note });
    ledger
}

/// The lines of a card that depend on the layers that are there alone.
#[must_use]
pub fn card_ledger_without_experts(
    sums: &ModelBytes<'_>,
    workload: &Workload,
    layers: std::ops::Range<usize>,
    head: bool,
) -> CardLedger {
    let spec = &sums.model.spec;
    let mut lines = Vec::with_capacity(CardLine::ALL.len());
    let mut add = |line, bytes: u64, note: String| {
        lines.push(CardLedgerLine { line, bytes: Bytes(bytes), note });
    };
    let layers: Vec<usize> = layers.collect();
    add(
        CardLine::DriverReserve,
        DRIVER_RESERVE_BYTES,
        "assumed: context, kernels and fragments".to_owned(),
    );
    let of_layers = layers.iter().filter_map(|&l| sums.layers.get(l)).map(|l| l.dense.resident);
    let of_head = if head { sums.head().and(sums.final_norm).resident } else { 0 };
    let note = match (layers.first(), layers.last()) {
        (Some(first), Some(last)) if first == last => format!("layer {first}"),
        (Some(first), Some(last)) => format!("layers {first}-{last}"),
        _ => "no layers".to_owned(),
    };
    let note = if head { note + ", head" } else { note };
    add(CardLine::DenseWeights, shape::sum(of_layers).saturating_add(of_head), note);
    add_caches(workload, spec, &layers, |kv, bytes, note| {
        add(if kv { CardLine::KvCache } else { CardLine::IndexerKeys }, bytes, note);
    });
    let batch = card_batch(workload);
    let card_workload = Workload { prefill_batch: batch, threads: 1, ..*workload };
    add(
        CardLine::Activations,
        activation_bytes(spec, &card_workload),
        format!("parts of {} in prefill", counted(batch, "token")),
    );
    add(
        CardLine::TransferBuffers,
        state_buffer_bytes(sums, workload),
        format!("states of {}, two each way", counted(batch, "token")),
    );
    CardLedger(lines)
}

fn card_batch(workload: &Workload) -> u64 {
    CARD_BATCH.min(workload.context).max(1)
}

/// Two buffers of states each way.
fn state_buffer_bytes(sums: &ModelBytes<'_>, workload: &Workload) -> u64 {
    let states = card_batch(workload).saturating_mul(sums.model.spec.hidden_size as u64);
    round_up(states.saturating_mul(4), TENSOR_ALIGN).saturating_mul(4)
}

/// Main memory that cards are filled through, an expert while another is under way, and their states.
fn host_transfer_bytes(sums: &ModelBytes<'_>, workload: &Workload, holding: &Holding<'_>) -> u64 {
    let n_cards = holding.cards.len() as u64;
    if n_cards == 0 {
        return 0;
    }
    let states = state_buffer_bytes(sums, workload).saturating_mul(n_cards);
    states.saturating_add(sums.largest_slot.saturating_mul(2))
}

/// Experts that the flight buffer holds: one token's, unless every expert has a slot.
#[must_use]
pub fn flight_slots(spec: &ArchSpec, slots: &Slots) -> u64 {
    if slots.hold_everything(spec) { 0 } else { spec.router.n_experts_active as u64 }
}

/// Bytes of (pinned, other) slots.
fn slot_line_bytes(sums: &ModelBytes<'_>, slots: &Slots) -> (u64, u64) {
    let mut pinned = 0_u64;
    let mut cached = 0_u64;
    for (layer, &cap) in slots.caps.iter().enumerate() {
        let slot = sums.layers.get(layer).map_or(0, |l| l.slot);
        let pins = slots.pins.get(layer).map_or(0, Vec::len) as u64;
        pinned = pinned.saturating_add(slot.saturating_mul(pins));
        cached = cached.saturating_add(slot.saturating_mul(u64::from(cap).saturating_sub(pins)));
    }
    (pinned, cached)
}

/// An embedding that is also the head is touched whole by every token; another one by a row.
#[must_use]
pub fn touched_embedding(model: &Catalogue) -> EmbeddingResidency {
    if model.spec.tied_embeddings {
        EmbeddingResidency::Resident
    } else {
        EmbeddingResidency::RowRead
    }
}

/// Bytes that one token touches: (the weights that every token uses, the routed experts that it is
/// expected to use). The KV cache and the one row of an embedding that is not the head are not
/// counted.
#[must_use]
pub fn touched_bytes_per_token(sums: &ModelBytes<'_>) -> (Bytes, Bytes) {
    let layers = shape::sum(sums.layers.iter().map(|l| l.dense.stored));
    let head = sums.head().and(sums.final_norm).stored;
    (Bytes(layers.saturating_add(head)), Bytes(sums.routed_per_token()))
}
