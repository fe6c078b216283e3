//! Multi-head latent attention with absorbed projections (DeepSeek-V2, sections 2.1 and 2.1.2).
//!
//! The cache holds one latent and one rotary key a token. Keys and values are never expanded: the
//! query is taken into latent space instead (`W_UK^T q`), and the weighted latent back out of it
//! (`W_UV c`).

use tierkeep_kernels::ops;
use tierkeep_plans::spec::LatentAttention;

use super::{Small, indexer};
use crate::compute::{Batch, Compute};
use crate::error::EngineError;
use crate::kv::LatentCache;
use crate::weights::{LatentWeights, QueryWeights};
use crate::workspace::LatentBuffers;

/// See [`super::attend`].
pub(super) fn attend<'b>(
    compute: Compute<'_>,
    (spec, weights): (&LatentAttention, &LatentWeights),
    batch: Batch,
    normed: &[f32],
    cache: &mut LatentCache,
    buffers: &'b mut LatentBuffers,
    small: &mut Small<'_>,
) -> Result<&'b [f32], EngineError> {
    project(compute, (spec, weights), batch, normed, cache, buffers, small)?;
    if let (Some(indexer_spec), Some(indexer_buffers)) = (spec.indexer, &mut buffers.indexer) {
        // A layer without an indexer of its own keeps the selection of the last one that has.
        if let (Some(indexer_weights), Some(keys)) = (&weights.indexer, &mut cache.index_keys) {
            let width = batch.len * spec.q_lora_rank;
            let inputs = (&buffers.compressed_query[..width], normed);
            let rotary = spec.qk_rope_head_dim;
            indexer::select(
                compute,
                (indexer_spec, indexer_weights, rotary),
                batch,
                inputs,
                keys,
                indexer_buffers,
                small,
            )?;
        }
    }
    heads(compute, (spec, weights), batch, cache, buffers)
}

/// Queries, and the batch's latents and rotary keys, which go to the cache.
///
/// The query's scale is on both of its parts, the latent's on the latent and not on the rotary key
/// (LongCat-Flash, section 2.2).
fn project(
    compute: Compute<'_>,
    (spec, weights): (&LatentAttention, &LatentWeights),
    batch: Batch,
    normed: &[f32],
    cache: &mut LatentCache,
    buffers: &mut LatentBuffers,
    small: &mut Small<'_>,
) -> Result<(), EngineError> {
    let n = batch.len;
    let eps = spec.latent_norm_eps;
    let head = spec.qk_nope_head_dim + spec.qk_rope_head_dim;
    let query = &mut buffers.query[..n * spec.n_heads * head];
    match weights.query {
        QueryWeights::Compressed { down, norm, up } => {
            let rank = spec.q_lora_rank;
            let compressed = &mut buffers.compressed_query[..n * rank];
            compute.product(down, normed, n, compressed)?;
            compute.rms_norm_rows(norm, eps, compressed, rank, small.norm)?;
            compute.product(up, compressed, n, query)?;
        }
        QueryWeights::Direct(weight) => compute.product(weight, normed, n, query)?,
    }
    scale(query, spec.query_scale);

    let stride = spec.kv_lora_rank + spec.qk_rope_head_dim;
    let latent = &mut buffers.latent[..n * stride];
    compute.product(weights.latent_down, normed, n, latent)?;
    compute.rms_norm_rows(weights.latent_norm, eps, latent, stride, small.norm)?;
    for (token, (row, query)) in
        latent.chunks_exact_mut(stride).zip(query.chunks_exact_mut(spec.n_heads * head)).enumerate()
    {
        let position = batch.first + token;
        compute.rope.angles(position, small.rotation);
        for head in query.chunks_exact_mut(head) {
            compute.rope.rotate(&mut head[spec.qk_nope_head_dim..], small.rotation);
        }
        let (latent, rotary) = row.split_at_mut(spec.kv_lora_rank);
        scale(latent, spec.latent_scale);
        compute.rope.rotate(rotary, small.rotation);
        cache.latents.put(compute.kernels, position, latent);
        cache.rotary_keys.put(compute.kernels, position, rotary);
    }
    Ok(())
}

fn scale(x: &mut [f32], factor: f32) {
    // Most families have no such factor, and a product with one changes no bit.
    if factor.to_bits() != 1.0_f32.to_bits() {
        for value in x {
            *value *= factor;
        }
    }
}

/// Each (token, head) on its own: absorbed query, scores, softmax, weighted latent, values.
fn heads<'b>(
    compute: Compute<'_>,
    (spec, weights): (&LatentAttention, &LatentWeights),
    batch: Batch,
    cache: &LatentCache,
    buffers: &'b mut LatentBuffers,
) -> Result<&'b [f32], EngineError> {
    let LatentBuffers { query, output, scratch, indexer, .. } = buffers;
    let kernels = compute.kernels;
    let filled = batch.first + batch.len;
    let latents = cache.latents.matrix(0, filled)?;
    let rotary_keys = cache.rotary_keys.matrix(0, filled)?;
    let latent_up = compute.weights.matrix(weights.latent_up)?;
    let (nope, value, rank) = (spec.qk_nope_head_dim, spec.v_head_dim, spec.kv_lora_rank);
    let head_width = nope + spec.qk_rope_head_dim;
    let scratch_len = scratch.len() / compute.pool.threads();
    let indexer = indexer.as_ref();
    let output = &mut output[..batch.len * spec.n_heads * value];
    compute.pool.for_each_chunk_with_scratch(
        output,
        value,
        scratch,
        scratch_len,
        |index, out, scratch| {
            let (token, head) = (index / spec.n_heads, index % spec.n_heads);
            let query = &query[index * head_width..(index + 1) * head_width];
            let (query, rotary_query) = query.split_at(nope);
            let (absorbed, scratch) = scratch.split_at_mut(rank);
            let (weighted, scores) = scratch.split_at_mut(rank);
            let first_row = head * (nope + value);

            absorbed.fill(0.0);
            kernels.accumulate_rows(&latent_up, first_row..first_row + nope, query, absorbed);
            let selected = indexer.map(|i| i.selected(token));
            let visible = selected.map_or(batch.visible(token), <[u32]>::len);
            let position = |i: usize| selected.map_or(i, |s| s[i] as usize);
            let scores = &mut scores[..visible];
            for (i, score) in scores.iter_mut().enumerate() {
                let content = kernels.dot(&latents, position(i), absorbed);
                let rotary = kernels.dot(&rotary_keys, position(i), rotary_query);
                *score = (content + rotary) * spec.score_scale;
            }
            ops::softmax_in_place(scores);
            weighted.fill(0.0);
            for (i, score) in scores.iter().enumerate() {
                let row = position(i);
                kernels.accumulate_rows(&latents, row..row + 1, &[*score], weighted);
            }
            let values = first_row + nope..first_row + nope + value;
            kernels.dot_rows(&latent_up, values, weighted, out);
        },
    );
    Ok(output)
}
