//! What a sequence and the forward pass need by the model's shape: caches and buffers. Pure
//! arithmetic over an `ArchSpec`; the lines that it becomes are the ledger's.

use super::{KvElement, Workload};
use crate::catalogue::TENSOR_ALIGN;
use crate::spec::{ArchSpec, AttentionSpec, IndexerKind};
use crate::units::round_up;

/// Bytes of the KV cache of one sequence: of all its layers.
#[must_use]
pub fn kv_cache_bytes(spec: &ArchSpec, context: u64, kv: KvElement) -> u64 {
    sum((0..spec.n_layers).map(|layer| layer_kv_bytes(spec, layer, context, kv)))
}

/// Bytes of the KV cache of one layer of one sequence.
///
/// Latent attention: `context * (kv_lora_rank + qk_rope_head_dim)` elements a layer, one latent and
/// one rotary key a token, shared by all heads (DeepSeek-V2, section 2.1). Grouped attention:
/// `2 * n_kv_heads * head_dim` a token. Each buffer is aligned to [`TENSOR_ALIGN`].
#[must_use]
pub fn layer_kv_bytes(spec: &ArchSpec, layer: usize, context: u64, kv: KvElement) -> u64 {
    if layer >= spec.n_layers {
        return 0;
    }
    let buffer = |width: usize| {
        round_up(context.saturating_mul(width as u64).saturating_mul(kv.bytes()), TENSOR_ALIGN)
    };
    match &spec.attention {
        AttentionSpec::Latent(a) => {
            buffer(a.kv_lora_rank).saturating_add(buffer(a.qk_rope_head_dim))
        }
        AttentionSpec::Grouped(a) => buffer(a.n_kv_heads * a.head_dim).saturating_mul(2),
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

/// Bytes of the forward pass's buffers, all f32 or u32.
///
/// With B tokens in a batch, R = max(B, experts per token), T threads:
/// residual, normed, block output and gathered inputs `4 B hidden`; expert inner `2 R expert_ff` and
/// outputs `R hidden`; dense or shared inner `2 B ff`; router `B (n_experts + 2 k)`; the buffers of
/// the attention kind; a norm's weights; logits `vocab`.
#[must_use]
pub fn activation_bytes(spec: &ArchSpec, workload: &Workload) -> u64 {
    let hidden = spec.hidden_size as u64;
    let batch = workload.prefill_batch;
    let n_active = spec.router.n_experts_active as u64;
    let rows = batch.max(n_active);
    let inner = spec.dense_ff_size.max(spec.shared_ff_size) as u64;
    let per_token = 4 * hidden + 2 * inner + spec.router.n_experts as u64 + 2 * n_active;
    let per_row = 2 * spec.expert_ff_size as u64 + hidden;
    let (attention_per_token, per_thread, fixed) = attention_elements(spec, workload.context);
    let vectors = widest_norm(spec) as u64 + spec.vocab_size as u64;
    let elements = [
        per_token.saturating_add(attention_per_token).saturating_mul(batch),
        per_row.saturating_mul(rows),
        per_thread.saturating_mul(workload.threads),
        fixed,
        vectors,
    ];
    elements.iter().fold(0, |sum: u64, e| sum.saturating_add(*e)).saturating_mul(4)
}

/// Elements that attention needs (per token of a batch, per thread, once).
fn attention_elements(spec: &ArchSpec, context: u64) -> (u64, u64, u64) {
    match &spec.attention {
        AttentionSpec::Latent(a) => {
            let heads = a.n_heads;
            let mut per_token = a.q_lora_rank
                + heads * (a.qk_nope_head_dim + a.qk_rope_head_dim)
                + a.kv_lora_rank
                + a.qk_rope_head_dim
                + heads * a.v_head_dim;
            let mut visible = context;
            let mut fixed = a.qk_rope_head_dim as u64;
            let mut selection = 0;
            if let Some(indexer) = a.indexer {
                per_token +=
                    indexer.n_heads * indexer.head_dim + indexer.head_dim + indexer.n_heads;
                visible = context.min(indexer.top_k as u64);
                // The selection of a batch, one count a token, and the scores and order of one token.
                selection = visible + 1;
                fixed += 2 * context;
            }
            let per_thread = 2 * a.kv_lora_rank as u64 + visible;
            (per_token as u64 + selection, per_thread, fixed)
        }
        AttentionSpec::Grouped(a) => {
            let per_token = 2 * a.n_heads * a.head_dim + 2 * a.n_kv_heads * a.head_dim;
            (per_token as u64, context, a.head_dim as u64)
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
    spec.hidden_size.max(attention).max(spec.router.n_experts)
}
