//! What a sequence and the forward pass need by the model's shape: caches and buffers. Pure
//! arithmetic over an `ArchSpec`; the lines that it becomes are the ledger's.

use super::numerics::quantised_bytes;
use super::{KvElement, Workload};
use crate::catalogue::TENSOR_ALIGN;
use crate::spec::{ArchSpec, AttentionSpec, IndexerKind, LayerSpec};
use crate::units::{Bytes, round_up};

/// Widths of the two things that a layer caches of each token: latent and rotary key, or keys and
/// values.
fn cached_widths(spec: &ArchSpec) -> [u64; 2] {
    match &spec.attention {
        AttentionSpec::Latent(a) => [a.kv_lora_rank as u64, a.qk_rope_head_dim as u64],
        AttentionSpec::Grouped(a) => [(a.n_kv_heads * a.head_dim) as u64; 2],
    }
}

/// Bytes of the KV cache of one sequence: of all its layers.
#[must_use]
pub fn kv_cache_bytes(spec: &ArchSpec, context: u64, kv: KvElement) -> u64 {
    sum((0..spec.n_layers).map(|layer| layer_kv_bytes(spec, layer, context, kv)))
}

/// Bytes of the KV cache of one layer of one sequence.
///
/// Latent attention: `kv_lora_rank + qk_rope_head_dim` elements a token and attention, one latent and
/// one rotary key shared by all heads (DeepSeek-V2, section 2.1). Grouped attention:
/// `2 * n_kv_heads * head_dim`. A layer with a sliding window caches `min(context, window)` tokens, one
/// with two attentions has two caches. Each buffer is aligned to [`TENSOR_ALIGN`].
#[must_use]
pub fn layer_kv_bytes(spec: &ArchSpec, layer: usize, context: u64, kv: KvElement) -> u64 {
    spec.layers.get(layer).map_or(0, |layer| cache_bytes(spec, *layer, context, kv))
}

/// Bytes of the KV cache of multi-token-prediction layers, were they to run: each caches as a decoder
/// layer does.
#[must_use]
pub fn mtp_kv_cache_bytes(spec: &ArchSpec, n_layers: usize, context: u64, kv: KvElement) -> u64 {
    let layer = spec.mtp_layer.map_or(0, |layer| cache_bytes(spec, layer, context, kv));
    layer.saturating_mul(n_layers as u64)
}

fn cache_bytes(spec: &ArchSpec, layer: LayerSpec, context: u64, kv: KvElement) -> u64 {
    let positions = layer.cached_positions(context);
    let buffer = |width: u64| {
        round_up(positions.saturating_mul(width).saturating_mul(kv.bytes()), TENSOR_ALIGN)
    };
    cached_widths(spec)
        .map(buffer)
        .into_iter()
        .fold(0, u64::saturating_add)
        .saturating_mul(layer.n_attentions() as u64)
}

/// What one more token adds to the caches of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachePerToken {
    /// KV cache of layers that see every position.
    pub kv: Bytes,
    /// KV cache of layers with a sliding window, until the window is full.
    pub kv_in_windows: Bytes,
    /// Keys of the sparse-attention indexer.
    pub indexer_keys: Bytes,
}

/// What one more token adds to the caches, alignment left out.
#[must_use]
pub fn cache_per_token(spec: &ArchSpec, kv: KvElement) -> CachePerToken {
    let attention = cached_widths(spec).iter().sum::<u64>() * kv.bytes();
    let bytes = |windowed: bool| {
        let layers = spec.layers.iter().filter(|layer| layer.window.is_some() == windowed);
        Bytes(layers.map(|layer| attention * layer.n_attentions() as u64).sum())
    };
    let index_key = spec.indexer().map_or(0, |i| i.head_dim as u64) * kv.bytes();
    let n_indexers = (0..spec.n_layers).filter(|&layer| has_indexer(spec, layer)).count();
    CachePerToken {
        kv: bytes(false),
        kv_in_windows: bytes(true),
        indexer_keys: Bytes(index_key * n_indexers as u64),
    }
}

/// Whether a layer has an indexer of its own, with keys of its own.
pub(super) fn has_indexer(spec: &ArchSpec, layer: usize) -> bool {
    spec.layers.get(layer).is_some_and(|l| l.indexer == IndexerKind::Full)
}

/// Bytes of the indexer's keys of one sequence: of all layers.
#[must_use]
pub fn indexer_key_bytes(spec: &ArchSpec, context: u64, kv: KvElement) -> u64 {
    sum((0..spec.n_layers).map(|layer| layer_indexer_bytes(spec, layer, context, kv)))
}

/// Bytes of the indexer's keys of one layer of one sequence: `context * head_dim` elements where it
/// has an indexer of its own.
#[must_use]
pub fn layer_indexer_bytes(spec: &ArchSpec, layer: usize, context: u64, kv: KvElement) -> u64 {
    match spec.indexer() {
        Some(indexer) if has_indexer(spec, layer) => round_up(
            context.saturating_mul(indexer.head_dim as u64).saturating_mul(kv.bytes()),
            TENSOR_ALIGN,
        ),
        _ => 0,
    }
}

/// A sum that stops at the largest number instead of wrapping.
pub(super) fn sum(parts: impl Iterator<Item = u64>) -> u64 {
    parts.fold(0, u64::saturating_add)
}

/// Bytes of the forward pass's buffers, all f32 or u32 but for what fast numerics round.
///
/// With B tokens in a batch, R = max(B, experts per token), T threads:
/// residual, normed, block output and gathered inputs `4 B hidden`; expert inner `2 R expert_ff` and
/// outputs `R hidden`; dense or shared inner `2 B ff`; router `B (outputs + 2 k)`; the buffers of
/// the attention kind and the angles of its positions; a norm's weights; logits `vocab`. Where experts are added after a second
/// sub-block, the state that they take waits for it: `B hidden` more.
#[must_use]
pub fn activation_bytes(spec: &ArchSpec, workload: &Workload) -> u64 {
    let hidden = spec.hidden_size as u64;
    let batch = workload.prefill_batch;
    let n_active = spec.router.n_experts_active as u64;
    let rows = batch.max(n_active);
    let inner = spec.dense_ff_size.max(spec.shared_ff_size) as u64;
    let waiting = if spec.has_shortcut() { hidden } else { 0 };
    let per_token =
        4 * hidden + waiting + 2 * inner + spec.router.n_outputs() as u64 + 2 * n_active;
    let per_row = 2 * spec.expert_ff_size as u64 + hidden;
    let (attention_per_token, per_thread, fixed) = attention_elements(spec, workload);
    let vectors = widest_norm(spec) as u64 + spec.vocab_size as u64;
    let elements = [
        per_token.saturating_add(attention_per_token).saturating_mul(batch),
        per_row.saturating_mul(rows),
        per_thread.saturating_mul(workload.threads),
        fixed,
        vectors,
    ];
    let elements = elements.iter().fold(0, |sum: u64, e| sum.saturating_add(*e));
    elements.saturating_mul(4).saturating_add(quantised_bytes(spec, workload))
}

/// Scores that a thread holds at once, unless a single row is longer: 512 KB.
const SCORES: u64 = 1 << 17;
/// Queries that go over cached rows together, at most: as many as a row is worth decoding once for.
const SCORE_COLUMNS: u64 = 16;
/// Tokens of latent attention that go over a head's weights together, at most.
pub const LATENT_BLOCK: u64 = 16;
/// Positions that a task of the indexer scores.
pub const INDEX_CHUNK: u64 = 64;

/// Queries that go over the same cached rows together where each sees up to `visible` of them, so that what
/// a thread holds of scores is bounded.
#[must_use]
pub fn score_columns(visible: u64) -> u64 {
    (SCORES / visible.max(1)).clamp(1, SCORE_COLUMNS)
}

/// Elements that attention needs (per token of a batch, per thread, once), C being [`score_columns`] and V the
/// positions that a token sees at most.
///
/// Latent: queries, latents and outputs of a token; `max(C (rank + rotary + V), b rank)` of a thread, and
/// `b heads (rank + max(rank, value))` for blocks of b = min(B, 16) tokens. An indexer: queries, keys and
/// weights of a token and its selection `V + 1`; `64 heads` of a thread; scores and order of one token
/// `2 context`. Grouped: queries, keys, values and outputs of a token, `C (head_dim + V)` of a thread. Both: the
/// angles of each position.
fn attention_elements(spec: &ArchSpec, workload: &Workload) -> (u64, u64, u64) {
    let context = workload.context;
    match &spec.attention {
        AttentionSpec::Latent(a) => {
            let heads = a.n_heads;
            let mut per_token = a.q_lora_rank
                + heads * (a.qk_nope_head_dim + a.qk_rope_head_dim)
                + a.kv_lora_rank
                + a.qk_rope_head_dim
                + heads * a.v_head_dim;
            let mut visible = context;
            let (mut fixed, mut per_thread) = (0, 0);
            let mut selection = 0;
            let rotary = a.qk_rope_head_dim as u64;
            per_token += spec.rope.dim;
            if let Some(indexer) = a.indexer {
                per_token +=
                    indexer.n_heads * indexer.head_dim + indexer.head_dim + indexer.n_heads;
                visible = context.min(indexer.top_k as u64);
                // The selection of a batch, one count a token, and the scores and order of one token.
                selection = visible + 1;
                fixed += 2 * context;
                per_thread += INDEX_CHUNK * indexer.n_heads as u64;
            }
            let (rank, heads) = (a.kv_lora_rank as u64, heads as u64);
            let block = workload.prefill_batch.min(LATENT_BLOCK);
            let of_columns =
                score_columns(visible).saturating_mul(visible.saturating_add(rank + rotary));
            per_thread += of_columns.max(block * rank);
            fixed += block * heads * (rank + rank.max(a.v_head_dim as u64));
            (per_token as u64 + selection, per_thread, fixed)
        }
        AttentionSpec::Grouped(a) => {
            let heads = 2 * a.n_heads + 2 * a.n_kv_heads;
            let visible = spec.layers.iter().map(|l| l.cached_positions(context)).max();
            let visible = visible.unwrap_or(context);
            let of_column = visible.saturating_add(a.head_dim as u64);
            let per_thread = score_columns(visible).saturating_mul(of_column);
            ((heads * a.head_dim + spec.rope.dim) as u64, per_thread, 0)
        }
    }
}

/// Width of the widest norm or bias, whose weights are decoded into one shared buffer (layer norms
/// hold a weight and a bias at once).
#[must_use]
pub fn widest_norm(spec: &ArchSpec) -> usize {
    let attention = match &spec.attention {
        AttentionSpec::Latent(a) => {
            a.q_lora_rank.max(a.kv_lora_rank).max(2 * a.indexer.map_or(0, |i| i.head_dim))
        }
        AttentionSpec::Grouped(a) => a.n_heads * a.head_dim,
    };
    let expert = if spec.expert_biases { 2 * spec.expert_ff_size } else { 0 };
    spec.hidden_size.max(attention).max(spec.router.n_outputs()).max(expert)
}
