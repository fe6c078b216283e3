//! The sparse-attention indexer (DeepSeek-V3.2): small keys of its own score every cached position,
//! and attention sees the best `top_k` of them.
//!
//! Score of position t: `sum_h w_h / sqrt(n_heads) * relu(q_h . k_t / sqrt(head_dim))`.

use tierkeep_kernels::ops;
use tierkeep_plans::budget::INDEX_CHUNK;
use tierkeep_plans::spec::IndexerSpec;

use super::Small;
use super::selection::best_positions;
use crate::compute::{Batch, Compute};
use crate::error::EngineError;
use crate::kv::Rows;
use crate::weights::IndexerWeights;
use crate::workspace::IndexerBuffers;

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
            compute.rope.rotate(&mut key[..rotary_dim], compute.rope.of(small.rotation, token));
        }
        let row = |token: usize| &key[token * head_dim..(token + 1) * head_dim];
        keys.put((compute.kernels, compute.pool), (batch.first, n), row);
    }
    let last_visible = batch.first + n;
    if last_visible > top_k {
        let query = &mut buffers.query[..n * n_heads * head_dim];
        compute.product(weights.query, compressed_query, n, query)?;
        for (token, query) in query.chunks_exact_mut(n_heads * head_dim).enumerate() {
            for head in query.chunks_exact_mut(head_dim) {
                compute
                    .rope
                    .rotate(&mut head[..rotary_dim], compute.rope.of(small.rotation, token));
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
    compute.profile.touch(|| keys.bytes_of(visible));
    let keys = keys.matrix(0, visible)?;
    let IndexerBuffers { query, head_weights, scores, scratch, .. } = buffers;
    let query = &query[token * n_heads * head_dim..(token + 1) * n_heads * head_dim];
    let head_weights = &head_weights[token * n_heads..(token + 1) * n_heads];
    let score_scale = 1.0 / (head_dim as f32).sqrt();
    let weight_scale = 1.0 / (n_heads as f32).sqrt();
    let kernels = compute.kernels;
    let chunk = INDEX_CHUNK as usize;
    compute.pool.for_each_chunk_with_scratch(
        &mut scores[..visible],
        chunk,
        scratch,
        chunk * n_heads,
        |index, scores, products| {
            let first = index * chunk;
            let rows = first..first + scores.len();
            kernels.matmul_rows(&keys, rows, query, n_heads, |row, head, product| {
                products[(row - first) * n_heads + head] = product;
            });
            for (score, products) in scores.iter_mut().zip(products.chunks_exact(n_heads)) {
                *score = 0.0;
                for (product, weight) in products.iter().zip(head_weights) {
                    *score += weight * weight_scale * (product * score_scale).max(0.0);
                }
            }
        },
    );
    Ok(())
}
