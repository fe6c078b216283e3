//! How activations are computed, and what of memory depends on it.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{KvElement, Workload};
use crate::spec::{ArchSpec, AttentionSpec};

/// How activations are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Numerics {
    /// Float activations on stored weights: tokens equal the reference's.
    #[default]
    Exact,
    /// What packed integers are multiplied with is rounded to 8 bits, with a scale for each group of 64;
    /// sums over positions go by blocks. Faster, and not the reference's logits.
    Fast,
}

impl Numerics {
    /// Its name in plans and options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Fast => "fast",
        }
    }

    /// The type of caches where none is asked for.
    #[must_use]
    pub fn usual_kv(self) -> KvElement {
        match self {
            Self::Exact => KvElement::F32,
            Self::Fast => KvElement::F16,
        }
    }
}

impl FromStr for Numerics {
    type Err = NumericsError;

    fn from_str(text: &str) -> Result<Self, NumericsError> {
        [Self::Exact, Self::Fast]
            .into_iter()
            .find(|numerics| numerics.name() == text)
            .ok_or_else(|| NumericsError { text: text.to_owned() })
    }
}

/// Rows of weights that a thread unpacks at once.
const PANEL_ROWS: u64 = 32;

/// Bytes of the activations that fast numerics round for one call of the kernels; 0 with exact ones.
///
/// A vector of n elements is continued to a multiple of 256 and takes 5/4 bytes an element: 8 bits and, for
/// each 32, a scale and a correction of 32 bits. With B tokens in a batch and R = max(B, experts per
/// token) the largest of: the state `B hidden` for queries, keys and values, of up to three stored types; `2 R
/// hidden` and `R expert_ff` for routed experts; B of the inner width of dense and shared ones, of the heads'
/// outputs, and of the compressed query. Each thread unpacks 32 rows of weights for a batch, of the widest of
/// these: a byte an element and 4 for each 32. 64 bytes more to begin at a line of the processor's cache.
#[must_use]
pub(super) fn quantised_bytes(spec: &ArchSpec, workload: &Workload) -> u64 {
    match workload.numerics {
        Numerics::Exact => return 0,
        Numerics::Fast => {}
    }
    let of = |n: usize| (n as u64).next_multiple_of(256).max(256) / 4 * 5;
    let batch = workload.prefill_batch;
    let rows = batch.max(spec.router.n_experts_active as u64);
    let (heads, compressed) = match &spec.attention {
        AttentionSpec::Latent(a) => (a.n_heads * a.v_head_dim, a.q_lora_rank),
        AttentionSpec::Grouped(a) => (a.n_heads * a.head_dim, 0),
    };
    let inner = spec.dense_ff_size.max(spec.shared_ff_size);
    let of_batch = [3 * of(spec.hidden_size), of(inner), of(heads), of(compressed)];
    let of_rows = [2 * of(spec.hidden_size), of(spec.expert_ff_size)];
    let most = |widths: &[u64]| widths.iter().copied().max().unwrap_or(0);
    let bytes = most(&of_batch).saturating_mul(batch).max(most(&of_rows).saturating_mul(rows));
    let widest = [spec.hidden_size, inner, heads, compressed, spec.expert_ff_size];
    let padded = (widest.into_iter().max().unwrap_or(0) as u64).next_multiple_of(256);
    let panel = PANEL_ROWS * (padded + padded / 32 * 4);
    bytes.saturating_add(panel.saturating_mul(workload.threads)).saturating_add(64)
}

/// Why numerics could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read {text:?} as numerics: write exact or fast")]
pub struct NumericsError {
    /// What was given.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::EmbeddingResidency;

    #[test]
    fn names_are_read_back_and_caches_follow() {
        for (numerics, kv) in [(Numerics::Exact, KvElement::F32), (Numerics::Fast, KvElement::F16)]
        {
            assert_eq!(numerics.name().parse(), Ok(numerics));
            assert_eq!(numerics.usual_kv(), kv);
        }
        assert!("loose".parse::<Numerics>().is_err());
        assert_eq!(Numerics::default(), Numerics::Exact);
    }

    /// OLMoE's oracle: hidden 64 and expert_ff 32 are continued to 256, which takes 320 bytes.
    #[test]
    fn rounded_activations_are_counted_with_fast_numerics_alone() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/oracles/olmoe");
        let model = crate::catalogue::Catalogue::open(directory.as_ref()).unwrap();
        let workload = |numerics| Workload {
            context: 64,
            prefill_batch: 10,
            threads: 2,
            numerics,
            kv: KvElement::F32,
            embedding: EmbeddingResidency::Resident,
            sessions: 1,
            reads: crate::budget::Reads { depth: 0, bytes: None, begins_early: false },
        };
        assert_eq!(quantised_bytes(&model.spec, &workload(Numerics::Exact)), 0);
        let widest = model.spec.hidden_size.max(256) as u64;
        assert_eq!(widest, 256, "the oracle is smaller than what a vector is continued to");
        let bytes = quantised_bytes(&model.spec, &workload(Numerics::Fast));
        assert_eq!(bytes, 3 * 320 * 10 + 2 * PANEL_ROWS * (256 + 32) + 64);
    }
}
