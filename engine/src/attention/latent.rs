//! Multi-head latent attention with absorbed projections (DeepSeek-V2, sections 2.1 and 2.1.2).
//!
//! The cache holds one latent and one rotary key a token. Keys and values are never expanded: the
//! query is taken into latent space instead (`W_UK^T q`), and the weighted latent back out of it
//! (`W_UV c`). All heads see the same latents, so that several go over them together.

use std::ops::Range;

use tierkeep_kernels::{Kernels, Matrix};
use tierkeep_plans::spec::LatentAttention;

use super::{ROWS_AT_ONCE, Small, indexer, largest_divisor};
use crate::compute::{Batch, Compute, each_row};
use crate::error::EngineError;
use crate::kv::LatentCache;
use crate::profile::Stage;
use crate::weights::{LatentWeights, QueryWeights};
use crate::workspace::{IndexerBuffers, LatentBuffers};

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
    compute.profile.lap(Stage::Projections);
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
    heads(compute, (spec, weights), batch, cache, buffers)?;
    compute.profile.lap(Stage::Attention);
    Ok(&buffers.output[..batch.len * spec.n_heads * spec.v_head_dim])
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
    let (nope, rank) = (spec.qk_nope_head_dim, spec.kv_lora_rank);
    let head = nope + spec.qk_rope_head_dim;
    let stride = rank + spec.qk_rope_head_dim;
    let query = &mut buffers.query[..n * spec.n_heads * head];
    let latent = &mut buffers.latent[..n * stride];
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
    compute.product(weights.latent_down, normed, n, latent)?;
    compute.rms_norm_rows(weights.latent_norm, eps, latent, stride, small.norm)?;
    let (rope, rotation) = (compute.rope, small.rotation);
    each_row(compute.pool, query, spec.n_heads * head, |token, row| {
        scale(row, spec.query_scale);
        for head in row.chunks_exact_mut(head) {
            rope.rotate(&mut head[nope..], rope.of(rotation, token));
        }
    });
    each_row(compute.pool, latent, stride, |token, row| {
        let (latent, rotary) = row.split_at_mut(rank);
        scale(latent, spec.latent_scale);
        rope.rotate(rotary, rope.of(rotation, token));
    });
    let (parts, rows) = ((compute.kernels, compute.pool), (batch.first, n));
    let row = |token: usize| &latent[token * stride..(token + 1) * stride];
    cache.latents.put(parts, rows, |token| &row(token)[..rank]);
    cache.rotary_keys.put(parts, rows, |token| &row(token)[rank..]);
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

/// Absorbed queries, scores, softmax, weighted latents and values of every (token, head), some tokens at a
/// time. Each has the order of sums that it would have alone.
fn heads(
    compute: Compute<'_>,
    (spec, weights): (&LatentAttention, &LatentWeights),
    batch: Batch,
    cache: &LatentCache,
    buffers: &mut LatentBuffers,
) -> Result<(), EngineError> {
    let filled = batch.first + batch.len;
    let latent_up = compute.weights.matrix(weights.latent_up)?;
    compute.profile.touch_matrix(&latent_up);
    let most = buffers.indexer.as_ref().map_or(filled, |i| filled.min(i.width()));
    compute.profile.touch(|| cache.latents.bytes_of(most) + cache.rotary_keys.bytes_of(most));
    let (nope, value, rank) = (spec.qk_nope_head_dim, spec.v_head_dim, spec.kv_lora_rank);
    let LatentBuffers {
        query, output, absorbed, weighted, scratch, indexer, columns, block, ..
    } = buffers;
    let kernels = compute.kernels;
    let head_width = nope + spec.qk_rope_head_dim;
    let n_heads = spec.n_heads;
    let scratch_len = scratch.len() / compute.pool.threads();
    let shared = Shared {
        kernels,
        spec,
        latents: cache.latents.matrix(0, filled)?,
        rotary_keys: cache.rotary_keys.matrix(0, filled)?,
        indexer: indexer.as_ref(),
        heads: largest_divisor(n_heads, (*columns).min(n_heads.div_ceil(compute.pool.threads()))),
    };
    for first in (0..batch.len).step_by(*block) {
        let n = (*block).min(batch.len - first);
        let query = &query[first * n_heads * head_width..(first + n) * n_heads * head_width];
        // `(head, token, rank)`: a head's weights are gone over for all tokens while they are near.
        let absorbed_queries = &mut absorbed[..n_heads * n * rank];
        compute.pool.for_each_chunk(absorbed_queries, n * rank, |head, out| {
            let rows = head * (nope + value)..head * (nope + value) + nope;
            for (token, out) in out.chunks_exact_mut(rank).enumerate() {
                let start = (token * n_heads + head) * head_width;
                out.fill(0.0);
                let query = &query[start..start + nope];
                kernels.accumulate_rows(&latent_up, rows.clone(), query, out);
            }
        });
        let weighted = &mut weighted[..n * n_heads * rank];
        let piece = shared.heads * rank;
        compute.pool.for_each_chunk_with_scratch(
            weighted,
            piece,
            scratch,
            scratch_len,
            |index, out, scratch| {
                let (token, index) =
                    (index / (n_heads / shared.heads), index % (n_heads / shared.heads));
                let visible = batch.visible(first + token);
                let at = (token, n, first + token, index * shared.heads);
                shared.weigh(at, visible, (absorbed_queries, query), out, scratch);
            },
        );
        // `(head, token, value)`, in place of the absorbed queries.
        let values = &mut absorbed[..n_heads * n * value];
        compute.pool.for_each_chunk_with_scratch(
            values,
            n * value,
            scratch,
            scratch_len,
            |head, out, scratch| {
                let x = &mut scratch[..n * rank];
                for (token, x) in x.chunks_exact_mut(rank).enumerate() {
                    let start = (token * n_heads + head) * rank;
                    x.copy_from_slice(&weighted[start..start + rank]);
                }
                let first_row = head * (nope + value) + nope;
                let rows = first_row..first_row + value;
                kernels.matmul_rows(&latent_up, rows, x, n, |row, token, sum| {
                    out[token * value + row - first_row] = sum;
                });
            },
        );
        let output = &mut output[first * n_heads * value..(first + n) * n_heads * value];
        each_row(compute.pool, output, n_heads * value, |token, row| {
            for (head, out) in row.chunks_exact_mut(value).enumerate() {
                let start = (head * n + token) * value;
                out.copy_from_slice(&values[start..start + value]);
            }
        });
    }
    Ok(())
}

/// What every task between absorbed queries and weighted latents shares.
struct Shared<'a> {
    kernels: Kernels,
    spec: &'a LatentAttention,
    latents: Matrix<'a>,
    rotary_keys: Matrix<'a>,
    indexer: Option<&'a IndexerBuffers>,
    /// Heads of a task.
    heads: usize,
}

impl Shared<'_> {
    /// Fills `out (heads, rank)` for the heads from `head` on of one token: its place in the block of `n`, in
    /// the batch, and the positions that it sees.
    fn weigh(
        &self,
        (token, n, in_batch, head): (usize, usize, usize, usize),
        visible: usize,
        (absorbed, query): (&[f32], &[f32]),
        out: &mut [f32],
        scratch: &mut [f32],
    ) {
        let LatentAttention { qk_nope_head_dim: nope, qk_rope_head_dim: rotary, .. } = *self.spec;
        let rank = self.spec.kv_lora_rank;
        let (x, scratch) = scratch.split_at_mut(self.heads * rank);
        let (rotary_x, scores) = scratch.split_at_mut(self.heads * rotary);
        for (i, x) in x.chunks_exact_mut(rank).enumerate() {
            let start = ((head + i) * n + token) * rank;
            x.copy_from_slice(&absorbed[start..start + rank]);
        }
        for (i, x) in rotary_x.chunks_exact_mut(rotary).enumerate() {
            let start = (token * self.spec.n_heads + head + i) * (nope + rotary) + nope;
            x.copy_from_slice(&query[start..start + rotary]);
        }
        let selected = self.indexer.map(|indexer| indexer.selected(in_batch));
        let seen = selected.map_or(visible, <[u32]>::len);
        let scores = &mut scores[..self.heads * seen];
        let score_scale = self.spec.score_scale;
        let mut before = 0;
        for rows in Runs::of(selected, visible) {
            let place = |row: usize, column: usize| column * seen + before + row - rows.start;
            let heads = self.heads;
            self.kernels.matmul_rows(
                &self.latents,
                rows.clone(),
                x,
                heads,
                |row, column, content| {
                    scores[place(row, column)] = content;
                },
            );
            self.kernels.matmul_rows(
                &self.rotary_keys,
                rows.clone(),
                rotary_x,
                heads,
                |row, column, rotary| {
                    let score = &mut scores[place(row, column)];
                    *score = (*score + rotary) * score_scale;
                },
            );
            before += rows.len();
        }
        scores.chunks_exact_mut(seen).for_each(|scores| self.kernels.softmax_in_place(scores));
        out.fill(0.0);
        let mut before = 0;
        for rows in Runs::of(selected, visible) {
            let mut start = rows.start;
            while start < rows.end {
                let end = rows.end.min(start + ROWS_AT_ONCE);
                let at = before + start - rows.start;
                for (column, out) in out.chunks_exact_mut(rank).enumerate() {
                    let scores = &scores[column * seen + at..column * seen + at + end - start];
                    self.kernels.accumulate_rows(&self.latents, start..end, scores, out);
                }
                start = end;
            }
            before += rows.len();
        }
    }
}

/// Runs of positions that follow each other, ascending.
struct Runs<'a> {
    /// What is left of a selection; `None` where every position is seen.
    selected: Option<&'a [u32]>,
    /// Positions that are left where there is none.
    rest: Range<usize>,
}

impl<'a> Runs<'a> {
    fn of(selected: Option<&'a [u32]>, visible: usize) -> Self {
        Self { selected, rest: 0..visible }
    }
}

impl Iterator for Runs<'_> {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        let Some(selected) = &mut self.selected else {
            let rest = std::mem::take(&mut self.rest);
            return (!rest.is_empty()).then_some(rest);
        };
        let first = *selected.first()?;
        let follows = |(i, &position): (usize, &u32)| position as usize == first as usize + i;
        let count = selected.iter().enumerate().take_while(|&pair| follows(pair)).count();
        *selected = &selected[count..];
        Some(first as usize..first as usize + count)
    }
}

#[cfg(test)]
mod tests {
    use super::Runs;

    #[test]
    fn runs_are_of_positions_that_follow_each_other() {
        let runs =
            |selected: Option<&[u32]>, visible| Runs::of(selected, visible).collect::<Vec<_>>();
        assert_eq!(runs(None, 5).first(), Some(&(0..5)));
        assert!(runs(None, 0).is_empty());
        assert!(runs(Some(&[]), 9).is_empty());
        assert_eq!(runs(Some(&[0, 1, 2, 5, 7, 8]), 9), [0..3, 5..6, 7..9]);
    }
}
