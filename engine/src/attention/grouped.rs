//! Grouped-query attention, with norms over the full width of queries and keys where a family has
//! them.

use tierkeep_kernels::ops;
use tierkeep_plans::spec::GroupedAttention;

use super::Small;
use crate::compute::{Batch, Compute};
use crate::error::EngineError;
use crate::kv::GroupedCache;
use crate::weights::GroupedWeights;
use crate::workspace::GroupedBuffers;

/// See [`super::attend`].
pub(super) fn attend<'b>(
    compute: Compute<'_>,
    (spec, weights): (&GroupedAttention, &GroupedWeights),
    batch: Batch,
    normed: &[f32],
    cache: &mut GroupedCache,
    buffers: &'b mut GroupedBuffers,
    small: &mut Small<'_>,
) -> Result<&'b [f32], EngineError> {
    project(compute, (spec, weights), batch, normed, cache, buffers, small)?;
    heads(compute, spec, batch, cache, buffers)
}

/// Queries of the batch, and its keys and values, which go to the cache.
fn project(
    compute: Compute<'_>,
    (spec, weights): (&GroupedAttention, &GroupedWeights),
    batch: Batch,
    normed: &[f32],
    cache: &mut GroupedCache,
    buffers: &mut GroupedBuffers,
    small: &mut Small<'_>,
) -> Result<(), EngineError> {
    let n = batch.len;
    let GroupedAttention { n_heads, n_kv_heads, head_dim, .. } = *spec;
    let (q_width, kv_width) = (n_heads * head_dim, n_kv_heads * head_dim);
    let query = &mut buffers.query[..n * q_width];
    let key = &mut buffers.key[..n * kv_width];
    let value = &mut buffers.value[..n * kv_width];
    compute.product(weights.query, normed, n, query)?;
    compute.product(weights.key, normed, n, key)?;
    compute.product(weights.value, normed, n, value)?;
    if let Some((query_norm, key_norm, eps)) = weights.norms {
        compute.rms_norm_rows(query_norm, eps, query, q_width, small.norm)?;
        compute.rms_norm_rows(key_norm, eps, key, kv_width, small.norm)?;
    }
    if let Some(clip) = spec.clip_qkv {
        for x in query.iter_mut().chain(key.iter_mut()).chain(value.iter_mut()) {
            *x = x.clamp(-clip, clip);
        }
    }
    for token in 0..n {
        let position = batch.first + token;
        compute.rope.angles(position, small.rotation);
        for head in query[token * q_width..(token + 1) * q_width].chunks_exact_mut(head_dim) {
            compute.rope.rotate(head, small.rotation);
        }
        let key = &mut key[token * kv_width..(token + 1) * kv_width];
        let value = &value[token * kv_width..(token + 1) * kv_width];
        for (head, (key, value)) in
            key.chunks_exact_mut(head_dim).zip(value.chunks_exact(head_dim)).enumerate()
        {
            compute.rope.rotate(key, small.rotation);
            let row = head * batch.context + position;
            cache.keys.put(compute.kernels, row, key);
            cache.values.put(compute.kernels, row, value);
        }
    }
    Ok(())
}

/// Each (token, head) on its own: scores, softmax, weighted values.
fn heads<'b>(
    compute: Compute<'_>,
    spec: &GroupedAttention,
    batch: Batch,
    cache: &GroupedCache,
    buffers: &'b mut GroupedBuffers,
) -> Result<&'b [f32], EngineError> {
    let GroupedAttention { n_heads, n_kv_heads, head_dim, .. } = *spec;
    let GroupedBuffers { query, output, scratch, .. } = buffers;
    let kernels = compute.kernels;
    let all = n_kv_heads * batch.context;
    let (keys, values) = (cache.keys.matrix(0, all)?, cache.values.matrix(0, all)?);
    let score_scale = 1.0 / (head_dim as f32).sqrt();
    let scratch_len = scratch.len() / compute.pool.threads();
    let output = &mut output[..batch.len * n_heads * head_dim];
    compute.pool.for_each_chunk_with_scratch(
        output,
        head_dim,
        scratch,
        scratch_len,
        |index, out, scratch| {
            let (token, head) = (index / n_heads, index % n_heads);
            let query = &query[index * head_dim..(index + 1) * head_dim];
            let first = head / (n_heads / n_kv_heads) * batch.context;
            let visible = first..first + batch.visible(token);
            let scores = &mut scratch[..visible.len()];
            kernels.dot_rows(&keys, visible.clone(), query, scores);
            for score in scores.iter_mut() {
                *score *= score_scale;
            }
            ops::softmax_in_place(scores);
            out.fill(0.0);
            kernels.accumulate_rows(&values, visible, scores, out);
        },
    );
    Ok(output)
}
