//! The sparse-attention indexer (DeepSeek-V3.2): small keys of its own score every cached position,
//! and attention sees the best `top_k` of them.
//!
//! Score of position t: `sum_h w_h / sqrt(n_heads) * relu(q_h . k_t / sqrt(head_dim))`.

use tierkeep_kernels::ops;
use tierkeep_plans::spec::IndexerSpec;

use super::Small;
use super::selection::best_positions;
use crate::compute::{Batch, Compute};
use crate::error::EngineError;
use crate::kv::Rows;
use crate::weights::IndexerWeights;
use crate::workspace::IndexerBuffers;

/// Positions that one task scores.
const CHUNK: usize = 64;

/// Appends the batch's index keys to `keys` and fills the selection of each token of the batch.
///
/// `inputs` are the compressed query `(batch, q_lora_rank)` and the normed states
/// `(batch, hidden)`.
pub(super) fn select(
    compute: Compute<'_>,
    (spec, weights, rotary_dim): (IndexerSpec, &IndexerWeights, usize),
    batch: Batch,
    (compressed_query, normed): (&[f32], &[f32]),
    keys: &mut Rows,
    buffers: &mut IndexerBuffers,
    small: &mut Small<'_>,
) -> Result<(), EngineError> {
    let n = batch.len;
    let IndexerSpec { n_heads, head_dim, top_k, key_norm_eps } = spec;
    let key = &mut buffers.key[..n * head_dim];
    compute.product(weights.key, normed, n, key)?;
    {
        let (norm, rest) = small.norm.split_at_mut(head_dim);
        let weight = compute.weights.vector(compute.kernels, weights.key_norm, norm)?;
        let bias = compute.weights.vector(compute.kernels, weights.key_norm_bias, rest)?;
        for (token, key) in key.chunks_exact_mut(head_dim).enumerate() {
            ops::layer_norm_in_place(key, weight, bias, key_norm_eps);
            compute.rope.angles(batch.first + token, small.rotation);
            compute.rope.rotate(&mut key[..rotary_dim], small.rotation);
            keys.put(compute.kernels, batch.first + token, key);
        }
    }
    let last_visible = batch.first + n;
    if last_visible > top_k {
        let query = &mut buffers.query[..n * n_heads * head_dim];
        compute.product(weights.query, compressed_query, n, query)?;
        for (token, query) in query.chunks_exact_mut(n_heads * head_dim).enumerate() {
            compute.rope.angles(batch.first + token, small.rotation);
            for head in query.chunks_exact_mut(head_dim) {
                compute.rope.rotate(&mut head[..rotary_dim], small.rotation);
            }
        }
        let head_weights = &mut buffers.head_weights[..n * n_heads];
        compute.product(weights.head_weights, normed, n, head_weights)?;
    }
    for token in 0..n {
        let visible = batch.visible(token);
        buffers.selected[token] = visible.min(top_k) as u32;
        if visible > top_k {
            score(compute, spec, token, visible, keys, buffers)?;
            let IndexerBuffers { scores, order, .. } = buffers;
            if best_positions(scores, visible, batch.row_len, top_k, order) {
                buffers.ties += 1;
            }
            let start = token * buffers.width();
            buffers.selection[start..start + top_k].copy_from_slice(&buffers.order[..top_k]);
        } else {
            let selection = buffers.selection_mut(token);
            for (position, slot) in selection[..visible].iter_mut().enumerate() {
                *slot = position as u32;
            }
        }
    }
    Ok(())
}

/// Scores every visible position for one token.
fn score(
    compute: Compute<'_>,
    spec: IndexerSpec,
    token: usize,
    visible: usize,
    keys: &Rows,
    buffers: &mut IndexerBuffers,
) -> Result<(), EngineError> {
    let IndexerSpec { n_heads, head_dim, .. } = spec;
    let keys = keys.matrix(0, visible)?;
    let query = &buffers.query[token * n_heads * head_dim..(token + 1) * n_heads * head_dim];
    let head_weights = &buffers.head_weights[token * n_heads..(token + 1) * n_heads];
    let score_scale = 1.0 / (head_dim as f32).sqrt();
    let weight_scale = 1.0 / (n_heads as f32).sqrt();
    let kernels = compute.kernels;
    compute.pool.for_each_chunk(&mut buffers.scores[..visible], CHUNK, |chunk, scores| {
        for (i, score) in scores.iter_mut().enumerate() {
            *score = 0.0;
            for (query, weight) in query.chunks_exact(head_dim).zip(head_weights) {
                let dot = kernels.dot(&keys, chunk * CHUNK + i, query) * score_scale;
                *score += weight * weight_scale * dot.max(0.0);
            }
        }
    });
    Ok(())
}
