//! Grouped-query attention, with what families add to it: biases, norms of queries and keys, rotation
//! of a part of each head, sliding windows, sinks.

use std::ops::Range;

use tierkeep_kernels::{Kernels, Matrix, Pool};
use tierkeep_plans::spec::{GroupedAttention, QkNorm};

use super::{ROWS_AT_ONCE, Small, largest_divisor};
use crate::compute::{Batch, Compute, each_row};
use crate::error::EngineError;
use crate::kv::GroupedCache;
use crate::profile::Stage;
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
    compute.profile.lap(Stage::Projections);
    compute.profile.touch(|| cache.visible_bytes(batch.visible(batch.len - 1)));
    let parts = ((compute.kernels, compute.pool), (spec, sinks));
    enter(parts, batch, cache, buffers)?;
    compute.profile.lap(Stage::Attention);
    Ok(&buffers.projected[..batch.len * spec.n_heads * spec.head_dim])
}

/// The batch enters the cache, and its outputs take the places of its queries.
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
        let [_, key, value] = buffers.parts(spec, batch.len);
        cache.put((kernels, pool), (batch.first, done..end), [key, value]);
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
    let all = &mut buffers.projected[..n * (q_width + 2 * kv_width)];
    compute.products([weights.query, weights.key, weights.value], normed, n, all)?;
    let [query, key, value] = buffers.parts(spec, n);
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
    let rope = compute.rope;
    let rotation = small.rotation;
    for (rows, width) in [(&mut *query, q_width), (&mut *key, kv_width)] {
        each_row(compute.pool, rows, width, |token, row| {
            clip(spec, row);
            for head in row.chunks_exact_mut(head_dim) {
                rope.rotate(&mut head[..rope.dim()], rope.of(rotation, token));
            }
        });
    }
    clip(spec, value);
    Ok(())
}

fn clip(spec: &GroupedAttention, x: &mut [f32]) {
    if let Some(clip) = spec.clip_qkv {
        for x in x {
            *x = x.clamp(-clip, clip);
        }
    }
}

/// Scores, softmax and weighted values of every (token, head) of `tokens`. Heads that share keys and
/// tokens that follow each other go over the cached rows together; each has the order of sums that it
/// would have alone.
fn heads(
    ((kernels, pool), (spec, sinks)): Parts<'_>,
    (batch, tokens): (Batch, Range<usize>),
    cache: &GroupedCache,
    buffers: &mut GroupedBuffers,
) -> Result<(), EngineError> {
    let GroupedAttention { n_heads, n_kv_heads, head_dim, .. } = *spec;
    let n = tokens.len();
    let width = n_heads * head_dim;
    let group = n_heads / n_kv_heads;
    let GroupedBuffers { projected, output, scratch, columns } = buffers;
    let heads = largest_divisor(group, (*columns).min(n_heads.div_ceil(pool.threads())));
    let block = (*columns / heads).clamp(1, n);
    let scratch_len = scratch.len() / pool.threads();
    let query = &mut projected[tokens.start * width..tokens.end * width];
    let task = Task {
        kernels,
        spec,
        sinks,
        cache,
        keys: cache.keys.matrix(0, cache.len())?,
        values: cache.values.matrix(0, cache.len())?,
        query,
        heads,
        visible: batch.visible(tokens.start),
    };
    // Some heads of all whole blocks of tokens, then the next heads; then what is left of the tokens.
    let (n_blocks, piece) = (n / block, heads * head_dim);
    let (whole, rest) = output[..n * width].split_at_mut(n_blocks * block * width);
    pool.for_each_chunk_with_scratch(
        whole,
        block * piece,
        scratch,
        scratch_len,
        |index, out, scratch| {
            task.run((index / n_blocks, index % n_blocks * block, block), out, scratch);
        },
    );
    let left = n % block;
    if left > 0 {
        pool.for_each_chunk_with_scratch(
            rest,
            left * piece,
            scratch,
            scratch_len,
            |index, out, scratch| task.run((index, n - left, left), out, scratch),
        );
    }
    let output = &output[..n * width];
    each_row(pool, query, width, |token, row| {
        for (index, own) in row.chunks_exact_mut(piece).enumerate() {
            let start = if token < n - left {
                ((index * n_blocks + token / block) * block + token % block) * piece
            } else {
                (n - left) * width + (index * left + token - (n - left)) * piece
            };
            own.copy_from_slice(&output[start..start + piece]);
        }
    });
    Ok(())
}

/// What every task of [`heads`] shares.
struct Task<'a> {
    kernels: Kernels,
    spec: &'a GroupedAttention,
    sinks: Option<&'a [f32]>,
    cache: &'a GroupedCache,
    keys: Matrix<'a>,
    values: Matrix<'a>,
    /// `(tokens, n_heads, head_dim)`.
    query: &'a [f32],
    /// Heads of a task, which share their keys.
    heads: usize,
    /// Positions that the first token sees.
    visible: usize,
}

impl Task<'_> {
    /// The heads from `index * heads` on of `n` tokens from `first`: `out (n, heads, head_dim)`.
    fn run(&self, (index, first, n): (usize, usize, usize), out: &mut [f32], scratch: &mut [f32]) {
        let GroupedAttention { n_heads, n_kv_heads, head_dim, .. } = *self.spec;
        let (heads, width) = (self.heads, n_heads * head_dim);
        let columns = n * heads;
        let (x, scores) = scratch.split_at_mut(columns * head_dim);
        for (token, x) in x.chunks_exact_mut(heads * head_dim).enumerate() {
            let start = (first + token) * width + index * heads * head_dim;
            x.copy_from_slice(&self.query[start..start + heads * head_dim]);
        }
        let kv_head = index * heads / (n_heads / n_kv_heads);
        // Where tokens are several, none of their positions has taken another's place.
        let parts = self.cache.visible(kv_head, self.visible + first + n - 1);
        let seen = parts[0].len() + parts[1].len();
        let score_scale = 1.0 / (head_dim as f32).sqrt();
        let mut before = 0;
        for rows in parts.clone() {
            let place = |row: usize| before + row - rows.start;
            self.kernels.matmul_rows(&self.keys, rows.clone(), x, columns, |row, column, score| {
                scores[column * seen + place(row)] = score * score_scale;
            });
            before += rows.len();
        }
        let own = |column: usize| seen - (n - 1 - column / heads);
        for column in 0..columns {
            let scores = &mut scores[column * seen..column * seen + own(column)];
            match self.sinks {
                Some(sinks) => {
                    let head = index * heads + column % heads;
                    self.kernels.softmax_with_sink_in_place(scores, sinks[head]);
                }
                None => self.kernels.softmax_in_place(scores),
            }
        }
        out.fill(0.0);
        let mut before = 0;
        for rows in parts {
            let mut start = rows.start;
            while start < rows.end {
                let end = rows.end.min(start + ROWS_AT_ONCE);
                let at = before + start - rows.start;
                for (column, out) in out.chunks_exact_mut(head_dim).enumerate() {
                    let count = (end - start).min(own(column).saturating_sub(at));
                    let scores = &scores[column * seen + at..column * seen + at + count];
                    self.kernels.accumulate_rows(&self.values, start..start + count, scores, out);
                }
                start = end;
            }
            before += rows.len();
        }
    }
}

#[cfg(test)]
#[path = "grouped_tests.rs"]
mod tests;
