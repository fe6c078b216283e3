//! The budget ledger: the only place in the project that adds up memory.
//!
//! Pure arithmetic over a model's catalogue, a workload and a number of expert slots. It probes
//! nothing, reads nothing and never rounds a budget up. The engine allocates against these lines
//! and refuses to exceed one.

mod shape;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::shape::{activation_bytes, indexer_key_bytes, kv_cache_bytes, widest_norm};
use crate::catalogue::{Catalogue, Role, TENSOR_ALIGN, Tensor};
use crate::spec::{ArchSpec, FeedForward};
use crate::units::{Bytes, round_up};

/// A named line of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// Binary, stacks, heap, tokenizer, the catalogue itself.
    Runtime,
    /// Weights that every token touches, in their stored type.
    DenseWeights,
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
    /// Left to the kernel for pages that reads pass through.
    PageCacheReserve,
    /// Slots of experts that are never evicted.
    PinnedExperts,
    /// Slots of experts that come and go.
    ExpertCache,
}

impl Line {
    /// Every line, in the order in which it is shown.
    pub const ALL: [Self; 10] = [
        Self::Runtime,
        Self::DenseWeights,
        Self::KvCache,
        Self::IndexerKeys,
        Self::Activations,
        Self::ExpertsInFlight,
        Self::IoBuffers,
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
            Self::KvCache => "KV cache",
            Self::IndexerKeys => "indexer keys",
            Self::Activations => "activations",
            Self::ExpertsInFlight => "experts in flight",
            Self::IoBuffers => "I/O buffers",
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
    /// Type of the KV cache and the indexer keys.
    pub kv: KvElement,
    /// Where the embedding lives.
    pub embedding: EmbeddingResidency,
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

/// Pages of the binary and heap of the process before it holds any model, measured on x86-64 Linux
/// as peak resident memory less what was bound.
const RUNTIME_BASE_BYTES: u64 = 9_500_000;
/// Stack touched and thread-local state of one worker.
const RUNTIME_THREAD_BYTES: u64 = 100_000;
/// Catalogue entries of one tensor while a model is opened: name, shape, role.
const RUNTIME_TENSOR_BYTES: u64 = 400;
/// Heap of a tokenizer for each byte of its tokenizer.json.
const RUNTIME_TOKENIZER_FACTOR: u64 = 12;

/// The whole ledger of a model under a workload and a number of slots.
#[must_use]
pub fn ledger(model: &Catalogue, workload: &Workload, slots: &Slots) -> Ledger {
    let spec = &model.spec;
    let mut lines = Vec::new();
    let mut add = |line, bytes: u64, note: String| {
        lines.push(LedgerLine { line, bytes: Bytes(bytes), note });
    };
    let runtime = RUNTIME_BASE_BYTES
        + workload.threads.saturating_mul(RUNTIME_THREAD_BYTES)
        + model.n_tensors as u64 * RUNTIME_TENSOR_BYTES
        + model.tokenizer_bytes.0.saturating_mul(RUNTIME_TOKENIZER_FACTOR);
    add(
        Line::Runtime,
        runtime,
        format!(
            "binary and heap, {} threads, {} tensors, tokenizer of {}",
            workload.threads, model.n_tensors, model.tokenizer_bytes
        ),
    );
    let dense: u64 =
        resident_tensors(model, workload.embedding).map(|t| t.resident_bytes().0).sum();
    add(Line::DenseWeights, dense, dense_note(model, workload.embedding));
    add(
        Line::KvCache,
        kv_cache_bytes(spec, workload.context, workload.kv),
        format!("{} layers x {} tokens, {:?}", spec.n_layers, workload.context, workload.kv)
            .to_lowercase(),
    );
    add(
        Line::IndexerKeys,
        indexer_key_bytes(spec, workload.context, workload.kv),
        format!("{} layers with an indexer", shape::n_indexers(spec)),
    );
    add(
        Line::Activations,
        activation_bytes(spec, workload),
        format!("batches of {} tokens in prefill", workload.prefill_batch),
    );
    let flight_slots = flight_slots(spec, slots);
    add(
        Line::ExpertsInFlight,
        flight_slots.saturating_mul(largest_slot_bytes(model)),
        format!("{flight_slots} experts"),
    );
    add(
        Line::IoBuffers,
        io_buffer_bytes(model, workload.embedding),
        match workload.embedding {
            EmbeddingResidency::Resident => "none: reads go where the bytes are used".to_owned(),
            EmbeddingResidency::RowRead => "one row of the embedding".to_owned(),
        },
    );
    let reserve = if slots.hold_everything(spec) { 0 } else { largest_slot_bytes(model) };
    add(Line::PageCacheReserve, reserve, "pages of the read under way".to_owned());
    let (pinned, cached) = slot_line_bytes(model, slots);
    let n_pins: usize = slots.pins.iter().map(Vec::len).sum();
    let n_slots: u64 = slots.caps.iter().map(|&c| u64::from(c)).sum();
    add(Line::PinnedExperts, pinned, format!("{n_pins} experts"));
    add(
        Line::ExpertCache,
        cached,
        format!(
            "{} slots in {} layers",
            n_slots.saturating_sub(n_pins as u64),
            spec.expert_layers().count()
        ),
    );
    Ledger(lines)
}

fn dense_note(model: &Catalogue, embedding: EmbeddingResidency) -> String {
    let mut note = match embedding {
        EmbeddingResidency::Resident => "embedding resident".to_owned(),
        EmbeddingResidency::RowRead => "embedding rows read from disk".to_owned(),
    };
    if model.n_mtp_layers_present > 0 {
        note += &format!("; {} MTP layer present, not loaded", model.n_mtp_layers_present);
    }
    note
}

/// Weights held in memory for the whole run: all but routed experts, multi-token-prediction layers
/// and an embedding that is read by rows.
pub fn resident_tensors(
    model: &Catalogue,
    embedding: EmbeddingResidency,
) -> impl Iterator<Item = &Tensor> {
    model.tensors.iter().filter(move |t| {
        let row_read = t.role == Role::Embedding && embedding == EmbeddingResidency::RowRead;
        !row_read && !model.is_mtp(t.role)
    })
}

/// Experts that the flight buffer holds: one token's, unless every expert has a slot.
#[must_use]
pub fn flight_slots(spec: &ArchSpec, slots: &Slots) -> u64 {
    if slots.hold_everything(spec) { 0 } else { spec.router.n_experts_active as u64 }
}

/// Bytes of the largest expert slot of the decoder layers.
#[must_use]
pub fn largest_slot_bytes(model: &Catalogue) -> u64 {
    model.spec.expert_layers().map(|l| model.slot_bytes(l).0).max().unwrap_or(0)
}

fn io_buffer_bytes(model: &Catalogue, embedding: EmbeddingResidency) -> u64 {
    let table = model.tensors.iter().find(|t| t.role == Role::Embedding);
    match (embedding, table) {
        (EmbeddingResidency::RowRead, Some(table)) => {
            let scales = if table.scales.is_some() { TENSOR_ALIGN } else { 0 };
            round_up(table.stored.row_bytes(table.cols), TENSOR_ALIGN) + scales
        }
        _ => 0,
    }
}

/// Bytes of (pinned, other) slots.
fn slot_line_bytes(model: &Catalogue, slots: &Slots) -> (u64, u64) {
    let mut pinned = 0_u64;
    let mut cached = 0_u64;
    for (layer, &cap) in slots.caps.iter().enumerate() {
        let slot = model.slot_bytes(layer).0;
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
/// sent to). The KV cache and the one row of an embedding that is not the head are not counted.
#[must_use]
pub fn touched_bytes_per_token(model: &Catalogue) -> (Bytes, Bytes) {
    let dense = resident_tensors(model, touched_embedding(model)).map(Tensor::bytes).sum();
    let routed = model
        .spec
        .layers
        .iter()
        .enumerate()
        .filter(|(_, l)| l.feed_forward == FeedForward::Experts)
        .map(|(layer, _)| {
            let experts = model.layer_experts(layer);
            let mean =
                experts.iter().map(|e| e.read_bytes()).sum::<u64>() / experts.len().max(1) as u64;
            Bytes(mean * model.spec.router.n_experts_active as u64)
        })
        .sum();
    (dense, routed)
}
