//! Dense weights in main memory: what they take resident, mapped or streamed. Pure sums over a model;
//! which of the three it is, `place` decides.

use serde::{Deserialize, Serialize};

use super::{EmbeddingResidency, Holding, LayerBytes, ModelBytes, shape};
use crate::catalogue::{Catalogue, Role, Span, Tensor};
use crate::units::{Bytes, counted, round_up};

/// A page of memory and of the page cache, bytes: what a mapping begins and ends at. Engines refuse to map
/// where pages are of another size.
pub const MAP_PAGE_BYTES: u64 = 4096;

/// How dense weights that stay in main memory are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DenseResidency {
    /// As copies in memory of the process, each tensor aligned.
    #[default]
    Resident,
    /// As pages of the files, where they lie in the page cache.
    Mapped,
}

/// Dense weights that do not stay in memory: they are read for every token, unit by unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Streamed {
    /// Decoder layers whose dense weights are read for every token, ascending.
    pub layers: Vec<u32>,
    /// Whether the head is too, in pieces as large as the buffers.
    pub head: bool,
}

/// Dense weights that stay in main memory.
pub(super) fn bytes(
    sums: &ModelBytes<'_>,
    embedding: EmbeddingResidency,
    holding: &Holding<'_>,
) -> u64 {
    match holding.dense {
        DenseResidency::Resident => resident_bytes(sums, embedding, holding),
        DenseResidency::Mapped => mapped_bytes(sums.model, embedding, holding),
    }
}

fn resident_bytes(
    sums: &ModelBytes<'_>,
    embedding: EmbeddingResidency,
    holding: &Holding<'_>,
) -> u64 {
    let layers = sums.layers.iter().enumerate();
    let stays = |layer: usize| !holding.is_on_card(layer) && !holding.is_streamed(layer);
    let of_layers = layers.filter(|(layer, _)| stays(*layer)).map(|(_, l)| l.dense.resident);
    let on_card = holding.head_on_card();
    let head = if on_card || holding.streamed.head { 0 } else { sums.head().resident };
    let norm = if on_card { 0 } else { sums.final_norm.resident };
    let table = sums.resident_embedding(embedding).resident;
    [head, norm, table].into_iter().fold(shape::sum(of_layers), u64::saturating_add)
}

pub(super) fn note(
    sums: &ModelBytes<'_>,
    embedding: EmbeddingResidency,
    holding: &Holding<'_>,
) -> String {
    let mut note = match embedding {
        EmbeddingResidency::Resident => "embedding resident".to_owned(),
        EmbeddingResidency::RowRead => "embedding rows read from disk".to_owned(),
    };
    if holding.dense == DenseResidency::Mapped {
        note = format!("pages of the files, mapped; {note}");
    }
    let on_cards: usize = holding.cards.iter().map(|c| c.layers().len()).sum();
    if on_cards > 0 {
        note += &format!("; {} on graphics cards", counted(on_cards as u64, "layer"));
    }
    if sums.model.n_mtp_layers_present > 0 {
        let n_mtp = sums.model.n_mtp_layers_present as u64;
        note += &format!("; {} present, not loaded", counted(n_mtp, "MTP layer"));
    }
    note
}

/// Whole pages of the files: those that hold a byte of a dense weight that stays in main memory.
fn mapped_bytes(model: &Catalogue, embedding: EmbeddingResidency, holding: &Holding<'_>) -> u64 {
    let kept = model.tensors.iter().filter(|tensor| stays(model, embedding, holding, tensor.role));
    let spans = kept.flat_map(|tensor| [Some(tensor.weight), tensor.scales]).flatten();
    shape::sum(mapped_ranges(spans).iter().map(|range| range.bytes))
}

/// Whether a dense weight stays in main memory.
fn stays(
    model: &Catalogue,
    embedding: EmbeddingResidency,
    holding: &Holding<'_>,
    role: Role,
) -> bool {
    let is_head_here = !holding.head_on_card() && !holding.streamed.head;
    match role {
        Role::Embedding if model.spec.tied_embeddings => is_head_here,
        Role::Embedding => embedding == EmbeddingResidency::Resident,
        Role::Head => !model.spec.tied_embeddings && is_head_here,
        Role::FinalNorm => !holding.head_on_card(),
        // Multi-token-prediction layers lie past the last decoder layer and are not loaded.
        Role::Layer { layer, .. } | Role::SubBlock { layer, .. } => {
            let layer = layer as usize;
            layer < model.spec.n_layers && !holding.is_on_card(layer) && !holding.is_streamed(layer)
        }
        Role::Expert { .. } | Role::FusedExperts { .. } | Role::Padding => false,
    }
}

/// The ranges of whole pages that hold `spans`, by shard and place. Ranges of a shard that touch are one,
/// so that no page is counted or mapped twice; what lies between two that do not touch is in neither.
/// The last page of a file counts whole, as it does in memory.
#[must_use]
pub fn mapped_ranges(spans: impl IntoIterator<Item = Span>) -> Vec<Span> {
    let pages = |span: Span| {
        let first = span.offset - span.offset % MAP_PAGE_BYTES;
        let end = round_up(span.offset.saturating_add(span.bytes), MAP_PAGE_BYTES);
        Span { shard: span.shard, offset: first, bytes: end.saturating_sub(first) }
    };
    let whole = spans.into_iter().filter(|span| span.bytes > 0).map(pages);
    let mut ranges: Vec<Span> = whole.collect();
    ranges.sort_unstable_by_key(|range| (range.shard, range.offset));
    ranges.dedup_by(|next, range| {
        let end = range.offset.saturating_add(range.bytes);
        let touches = next.shard == range.shard && next.offset <= end;
        if touches {
            let longest = next.offset.saturating_add(next.bytes).max(end);
            range.bytes = longest - range.offset;
        }
        touches
    });
    ranges
}

/// Two buffers of the largest part that passes through them: a layer, or a sub-block of one.
pub(super) fn stream_buffer_bytes(sums: &ModelBytes<'_>, streamed: &Streamed) -> u64 {
    let layers = streamed.layers.iter().filter_map(|&l| sums.layers.get(l as usize));
    layers.map(LayerBytes::largest_block).max().unwrap_or(0).saturating_mul(2)
}

pub(super) fn stream_note(sums: &ModelBytes<'_>, streamed: &Streamed) -> String {
    let bytes = Bytes(streamed_bytes_per_token(sums, streamed));
    match (streamed.layers.len(), streamed.head) {
        (0, _) => "none: dense weights stay".to_owned(),
        (n, false) => format!("{}, {bytes}, read for every token", counted(n as u64, "layer")),
        (n, true) => {
            format!("{} and the head, {bytes}, read for every token", counted(n as u64, "layer"))
        }
    }
}

/// Bytes that are read for every token because dense weights do not stay.
#[must_use]
pub fn streamed_bytes_per_token(sums: &ModelBytes<'_>, streamed: &Streamed) -> u64 {
    let layers = streamed.layers.iter().filter_map(|&l| sums.layers.get(l as usize));
    let head = if streamed.head { sums.head().stored } else { 0 };
    shape::sum(layers.map(|l| l.dense.stored)).saturating_add(head)
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
