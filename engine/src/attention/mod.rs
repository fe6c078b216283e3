//! Attention over cached positions: latent (absorbed, with the sparse indexer) and grouped.
//!
//! Owns the arithmetic between the normed states and the heads' outputs. A token's result depends
//! on its position and the cache alone, never on the batch that it came in or on who computed it.

mod grouped;
mod indexer;
mod latent;
mod selection;

use tierkeep_plans::spec::AttentionSpec;

use crate::compute::{Batch, Compute};
use crate::error::EngineError;
use crate::kv::LayerCache;
use crate::weights::AttentionWeights;
use crate::workspace::AttentionBuffers;

/// Small buffers that attention shares with the rest of the pass.
pub(crate) struct Small<'a> {
    /// Weights of a norm.
    pub(crate) norm: &'a mut [f32],
    /// Cosines and sines of each position of the batch, `(batch, rope dim)`.
    pub(crate) rotation: &'a [f32],
}

/// Cached rows that several columns of scores go over before the next ones: few enough to stay in the
/// second-level cache.
const ROWS_AT_ONCE: usize = 64;

/// The largest number up to `most` that divides `n`.
fn largest_divisor(n: usize, most: usize) -> usize {
    (1..=most.min(n)).rev().find(|&d| n.is_multiple_of(d)).unwrap_or(1)
}

/// Attention of one layer: reads `normed (batch, hidden)`, appends the batch to the cache, and
/// returns the heads' outputs `(batch, n_heads * value width)`.
pub(crate) fn attend<'b>(
    compute: Compute<'_>,
    (spec, weights): (&AttentionSpec, &AttentionWeights),
    batch: Batch,
    normed: &[f32],
    cache: &mut LayerCache,
    buffers: &'b mut AttentionBuffers,
    small: &mut Small<'_>,
) -> Result<&'b [f32], EngineError> {
    match (spec, weights, cache, buffers) {
        (
            AttentionSpec::Latent(spec),
            AttentionWeights::Latent(weights),
            LayerCache::Latent(cache),
            AttentionBuffers::Latent(buffers),
        ) => latent::attend(compute, (spec, weights), batch, normed, cache, buffers, small),
        (
            AttentionSpec::Grouped(spec),
            AttentionWeights::Grouped(weights),
            LayerCache::Grouped(cache),
            AttentionBuffers::Grouped(buffers),
        ) => grouped::attend(compute, (spec, weights), batch, normed, cache, buffers, small),
        // All four were built from one spec.
        _ => Err(EngineError::MixedAttention),
    }
}
