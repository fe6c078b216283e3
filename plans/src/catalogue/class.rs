//! What weights are for, in the few words that a person reads: owns the classes of roles and the bytes
//! of each, by stored type.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Catalogue, LayerTensor, Role, StoredType};
use crate::units::Bytes;

/// What a weight is for. Multi-token-prediction layers are a class of their own, whatever is in them,
/// for they are loaded or left as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoleClass {
    /// Token embedding.
    Embedding,
    /// Attention, its norms left out.
    Attention,
    /// The sparse-attention indexer.
    Indexer,
    /// Norms of every kind.
    Norm,
    /// Routers and their biases.
    Router,
    /// Dense feed-forward.
    DenseFeedForward,
    /// Shared experts.
    SharedExperts,
    /// Routed experts.
    RoutedExperts,
    /// Output head.
    Head,
    /// Multi-token prediction.
    Mtp,
    /// Nothing that is known.
    Other,
}

impl RoleClass {
    /// Every class, in the order in which they are shown.
    pub const ALL: [Self; 11] = [
        Self::Embedding,
        Self::Attention,
        Self::Indexer,
        Self::Norm,
        Self::Router,
        Self::DenseFeedForward,
        Self::SharedExperts,
        Self::RoutedExperts,
        Self::Head,
        Self::Mtp,
        Self::Other,
    ];

    /// Its name as users see it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::Indexer => "indexer",
            Self::Norm => "norms",
            Self::Router => "routers",
            Self::DenseFeedForward => "dense feed-forward",
            Self::SharedExperts => "shared experts",
            Self::RoutedExperts => "routed experts",
            Self::Head => "head",
            Self::Mtp => "multi-token prediction",
            Self::Other => "other",
        }
    }
}

/// Bytes on disk of one class in one stored type, scales included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassBytes {
    /// What the weights are for.
    pub class: RoleClass,
    /// How they are stored.
    pub stored: StoredType,
    /// Matrices and vectors; an expert has three, or two where gate and up are one.
    pub n_weights: u64,
    /// Their bytes.
    pub bytes: Bytes,
}

fn class_of_tensor(tensor: LayerTensor) -> RoleClass {
    use LayerTensor as T;
    match tensor {
        T::InputNorm
        | T::PostAttentionNorm
        | T::QueryDownNorm
        | T::LatentNorm
        | T::QueryNorm
        | T::KeyNorm => RoleClass::Norm,
        T::QueryDown
        | T::QueryUp
        | T::LatentDown
        | T::LatentUp
        | T::Query
        | T::Key
        | T::Value
        | T::QueryBias
        | T::KeyBias
        | T::ValueBias
        | T::Sinks
        | T::AttentionOutput
        | T::AttentionOutputBias => RoleClass::Attention,
        T::IndexerQuery
        | T::IndexerKey
        | T::IndexerKeyNorm
        | T::IndexerKeyNormBias
        | T::IndexerHeadWeights => RoleClass::Indexer,
        T::Router | T::RouterLogitBias | T::RouterBias => RoleClass::Router,
        T::Dense(_) => RoleClass::DenseFeedForward,
        T::Shared(_) => RoleClass::SharedExperts,
        T::MtpEmbeddingNorm
        | T::MtpStateNorm
        | T::MtpInput
        | T::MtpHeadNorm
        | T::MtpEmbedding
        | T::MtpHead => RoleClass::Mtp,
    }
}

impl Role {
    /// What it is for, layers of multi-token prediction not told apart.
    #[must_use]
    pub fn class(self) -> RoleClass {
        match self {
            Self::Embedding => RoleClass::Embedding,
            Self::Head => RoleClass::Head,
            Self::FinalNorm => RoleClass::Norm,
            Self::Layer { tensor, .. } | Self::SubBlock { tensor, .. } => class_of_tensor(tensor),
            Self::Expert { .. } | Self::FusedExperts { .. } => RoleClass::RoutedExperts,
            Self::Padding => RoleClass::Other,
        }
    }
}

impl Catalogue {
    /// Bytes by class and stored type, in the order of [`RoleClass::ALL`]. With
    /// [`Catalogue::unrecognised_bytes`] and [`Catalogue::ignored_bytes`] they are all tensor bytes of
    /// the shards.
    #[must_use]
    pub fn bytes_by_class(&self) -> Vec<ClassBytes> {
        let mut sums: BTreeMap<(RoleClass, StoredType), (u64, u64)> = BTreeMap::new();
        let mut add = |class, stored, n_weights, bytes| {
            let sum = sums.entry((class, stored)).or_default();
            *sum = (sum.0 + n_weights, sum.1 + bytes);
        };
        for tensor in &self.tensors {
            let is_mtp = self.is_mtp(tensor.role);
            let class = if is_mtp { RoleClass::Mtp } else { tensor.role.class() };
            add(class, tensor.stored, 1, tensor.bytes().0);
        }
        for layer in 0..self.spec.n_layers + self.n_mtp_layers_present {
            let is_mtp = layer >= self.spec.n_layers;
            let class = if is_mtp { RoleClass::Mtp } else { RoleClass::RoutedExperts };
            for expert in self.layer_experts(layer) {
                for (stored, n_weights, bytes) in expert.bytes_by_type() {
                    add(class, stored, n_weights, bytes);
                }
            }
        }
        sums.into_iter()
            .map(|((class, stored), (n_weights, bytes))| ClassBytes {
                class,
                stored,
                n_weights,
                bytes: Bytes(bytes),
            })
            .collect()
    }
}
