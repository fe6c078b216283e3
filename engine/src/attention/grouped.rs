//! Grouped-query attention, with what families add to it: biases, norms of queries and keys, rotation
//! of a part of each head, sliding windows, sinks.

use std::ops::Range;

use tierkeep_kernels::{Kernels, Pool, ops};
use tierkeep_plans::spec::{GroupedAttention, QkNorm};

use super::Small;
use crate::compute::{Batch, Compute};
use crate::error::EngineError;
use crate::kv::GroupedCache;
use crate::weights::GroupedWeights;
use crate::workspace::GroupedBuffers;

/// What outputs are computed with: kernels and threads, the architecture and its sinks.
type Parts<'a> = ((Kernels, &'a Pool), (&'a GroupedAttention, Option<&'a [f32]>));

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
    project(compute, (spec, weights), batch, normed, buffers, small)?;
    let sinks = match weights.sinks {
        Some(sinks) => Some(compute.weights.vector(compute.kernels, sinks, small.norm)?),
        None => None,
    };
    let parts = ((compute.kernels, compute.pool), (spec, sinks));
    enter(parts, batch, cache, buffers)?;
    Ok(&buffers.output[..batch.len * spec.n_heads * spec.head_dim])
}

/// The batch enters the cache, and its outputs are computed.
///
/// A position that enters a full window takes the place of one that tokens before it still see, so that
/// this goes in steps: whole where the cache holds every position, by tokens where the window is full.
/// A token sees the same rows in the same order whatever the steps.
fn enter(
    ((kernels, pool), (spec, sinks)): Parts<'_>,
    batch: Batch,
    cache: &mut GroupedCache,
    buffers: &mut GroupedBuffers,
) -> Result<(), EngineError> {
    let mut done = 0;
    while done < batch.len {
        let end = batch.len.min(done + cache.room(batch.first + done));
        for token in done..end {
            put(kernels, spec, batch.first + token, token, cache, buffers);
        }
        heads(((kernels, pool), (spec, sinks)), (batch, done..end), cache, buffers)?;
        done = end;
    }
    Ok(())
}

/// Queries, keys and values of the batch, rotated.
fn project(
    compute: Compute<'_>,
    (spec, weights): (&GroupedAttention, &GroupedWeights),
    batch: Batch,
    normed: &[f32],
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
    if let Some([query_bias, key_bias, value_bias]) = weights.biases {
        compute.add_bias(Some(query_bias), query, small.norm)?;
        compute.add_bias(Some(key_bias), key, small.norm)?;
        compute.add_bias(Some(value_bias), value, small.norm)?;
    }
    if let Some((query_norm, key_norm, eps)) = weights.norms {
        let (q_stride, kv_stride) = match spec.qk_norm {
            QkNorm::PerHead => (head_dim, head_dim),
            QkNorm::FullWidth | QkNorm::None => (q_width, kv_width),
        };
        compute.rms_norm_rows(query_norm, eps, query, q_stride, small.norm)?;
        compute.rms_norm_rows(key_norm, eps, key, kv_stride, small.norm)?;
    }
    if let Some(clip) = spec.clip_qkv {
        for x in query.iter_mut().chain(key.iter_mut()).chain(value.iter_mut()) {
            *x = x.clamp(-clip, clip);
        }
    }
    for (token, (query, key)) in
        query.chunks_exact_mut(q_width).zip(key.chunks_exact_mut(kv_width)).enumerate()
    {
        compute.rope.angles(batch.first + token, small.rotation);
        for head in query.chunks_exact_mut(head_dim).chain(key.chunks_exact_mut(head_dim)) {
            compute.rope.rotate(&mut head[..compute.rope.dim()], small.rotation);
        }
    }
    Ok(())
}

/// Keys and values of one token of the batch go to the cache.
fn put(
    kernels: Kernels,
    spec: &GroupedAttention,
    position: usize,
    token: usize,
    cache: &mut GroupedCache,
    buffers: &GroupedBuffers,
) {
    let width = spec.n_kv_heads * spec.head_dim;
    let key = buffers.key[token * width..(token + 1) * width].chunks_exact(spec.head_dim);
    let value = buffers.value[token * width..(token + 1) * width].chunks_exact(spec.head_dim);
    for (head, pair) in key.zip(value).enumerate() {
        cache.put(kernels, head, position, pair);
    }
}

/// Each (token, head) of `tokens` on its own: scores, softmax, weighted values.
fn heads(
    ((kernels, pool), (spec, sinks)): Parts<'_>,
    (batch, tokens): (Batch, Range<usize>),
    cache: &GroupedCache,
    buffers: &mut GroupedBuffers,
) -> Result<(), EngineError> {
    let GroupedAttention { n_heads, n_kv_heads, head_dim, .. } = *spec;
    let GroupedBuffers { query, output, scratch, .. } = buffers;
    let (keys, values) = (cache.keys.matrix(0, cache.len())?, cache.values.matrix(0, cache.len())?);
    let score_scale = 1.0 / (head_dim as f32).sqrt();
    let scratch_len = scratch.len() / pool.threads();
    let width = n_heads * head_dim;
    let output = &mut output[tokens.start * width..tokens.end * width];
    let query = &query[tokens.start * width..tokens.end * width];
    pool.for_each_chunk_with_scratch(
        output,
        head_dim,
        scratch,
        scratch_len,
        |index, out, scratch| {
            let (token, head) = (tokens.start + index / n_heads, index % n_heads);
            let query = &query[index * head_dim..(index + 1) * head_dim];
            let kv_head = head / (n_heads / n_kv_heads);
            let [older, newer] = cache.visible(kv_head, batch.visible(token));
            let (old_scores, rest) = scratch.split_at_mut(older.len());
            let new_scores = &mut rest[..newer.len()];
            kernels.dot_rows(&keys, older.clone(), query, old_scores);
            kernels.dot_rows(&keys, newer.clone(), query, new_scores);
            let scores = &mut scratch[..older.len() + newer.len()];
            for score in scores.iter_mut() {
                *score *= score_scale;
            }
            match sinks {
                Some(sinks) => ops::softmax_with_sink_in_place(scores, sinks[head]),
                None => ops::softmax_in_place(scores),
            }
            out.fill(0.0);
            let (old_scores, new_scores) = scores.split_at(older.len());
            kernels.accumulate_rows(&values, older, old_scores, out);
            kernels.accumulate_rows(&values, newer, new_scores, out);
        },
    );
    Ok(())
}

#[cfg(test)]
#[path = "grouped_tests.rs"]
mod tests;
