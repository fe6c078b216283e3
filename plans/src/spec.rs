//! `ArchSpec`: a model's architecture as data. Owns the vocabulary of mechanisms that the forward
//! pass knows; says nothing about files, bytes or placement.
//!
//! Names are the project's own; the names of published configs exist only in `catalogue::config`.

use serde::{Deserialize, Serialize};

/// Model families whose tensors and mechanisms are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// GLM-5 and 5.2: latent attention with a sparse indexer, sigmoid router.
    GlmMoeDsa,
    /// OLMoE: grouped-query attention with full-width q/k norms, softmax router.
    Olmoe,
}

impl Family {
    /// Every known family.
    pub const ALL: [Self; 2] = [Self::GlmMoeDsa, Self::Olmoe];

    /// The `model_type` that its published configs carry.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        match self {
            Self::GlmMoeDsa => "glm_moe_dsa",
            Self::Olmoe => "olmoe",
        }
    }
}

/// Everything the forward pass and the planner need to know of a model's shape.
#[derive(Clone, Debug, PartialEq)]
pub struct ArchSpec {
    /// Which family the checkpoint declares.
    pub family: Family,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers, multi-token-prediction layers not counted.
    pub n_layers: usize,
    /// Longest context that the checkpoint declares, tokens.
    pub max_context: usize,
    /// Epsilon of the norms of the residual stream (and of q/k norms where a family has them).
    pub norm_eps: f32,
    /// The attention mechanism, the same kind in every layer.
    pub attention: AttentionSpec,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// What each decoder layer holds; `n_layers` entries.
    pub layers: Vec<LayerSpec>,
    /// Inner width of a dense layer's feed-forward; 0 where no layer is dense.
    pub dense_ff_size: usize,
    /// Inner width of one routed expert.
    pub expert_ff_size: usize,
    /// Inner width of all shared experts of a layer together; 0 where there are none.
    pub shared_ff_size: usize,
    /// How tokens choose experts.
    pub router: RouterSpec,
    /// The head reuses the embedding's weights.
    pub tied_embeddings: bool,
    /// Multi-token-prediction layers that the config declares; what counts is what is present.
    pub n_mtp_layers: usize,
    /// Tokens that end generation: the union of config and generation config.
    pub stop_tokens: Vec<u32>,
}

/// One decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// Its feed-forward half.
    pub feed_forward: FeedForward,
    /// Where its sparse attention takes its selection from.
    pub indexer: IndexerKind,
}

/// The feed-forward half of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForward {
    /// One SwiGLU for every token.
    Dense,
    /// Routed experts, plus shared ones where the family has them.
    Experts,
}

/// Where a layer's selection of past positions comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexerKind {
    /// No indexer: attention over every position.
    None,
    /// The layer has an indexer and its own key cache.
    Full,
    /// The layer reuses the selection of the last full layer before it.
    Shared,
}

/// Attention mechanisms.
#[derive(Clone, Debug, PartialEq)]
pub enum AttentionSpec {
    /// Multi-head latent attention (DeepSeek-V2, section 2.1).
    Latent(LatentAttention),
    /// Grouped-query attention.
    Grouped(GroupedAttention),
}

/// Sizes of multi-head latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentAttention {
    /// Query heads.
    pub n_heads: usize,
    /// Width of the compressed query.
    pub q_lora_rank: usize,
    /// Width of the cached latent.
    pub kv_lora_rank: usize,
    /// Query and key width without position, per head.
    pub qk_nope_head_dim: usize,
    /// Rotary width; one rotary key is shared by all heads.
    pub qk_rope_head_dim: usize,
    /// Value width per head.
    pub v_head_dim: usize,
    /// Epsilon of the norms of the compressed query and of the latent.
    pub latent_norm_eps: f32,
    /// Factor on the scores before the softmax.
    pub score_scale: f32,
    /// The sparse-attention indexer, if the family has one.
    pub indexer: Option<IndexerSpec>,
}

/// The sparse-attention indexer (DeepSeek-V3.2): scores every cached position with small keys of
/// its own and lets attention see the best `top_k`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexerSpec {
    /// Index query heads.
    pub n_heads: usize,
    /// Width of an index key; its first `qk_rope_head_dim` are rotary.
    pub head_dim: usize,
    /// Positions that attention may see.
    pub top_k: usize,
    /// Epsilon of the layer norm on index keys.
    pub key_norm_eps: f32,
}

/// Sizes of grouped-query attention.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedAttention {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// RMS norms over the full width of q and of k before they are split into heads.
    pub full_width_qk_norm: bool,
    /// q, k and v are clamped to plus or minus this.
    pub clip_qkv: Option<f32>,
}

/// Rotary position embedding (RoFormer).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies: `theta^(-2i/dim)`.
    pub theta: f64,
    /// Rotated width.
    pub dim: usize,
    /// Which elements form a pair.
    pub pairing: RopePairing,
}

/// Which elements rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// (0, 1), (2, 3), ...
    Interleaved,
    /// (0, dim/2), (1, dim/2 + 1), ...
    Halves,
}

/// How tokens choose experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterSpec {
    /// Routed experts per layer.
    pub n_experts: usize,
    /// Routed experts per token.
    pub n_experts_active: usize,
    /// From router logits to scores.
    pub scoring: RouterScoring,
    /// A bias takes part in the selection (and never in the weights).
    pub selection_bias: bool,
    /// The chosen weights are divided by their sum.
    pub renormalise: bool,
    /// Factor on the chosen weights, applied last.
    pub scale: f32,
    /// Experts are selected from the best `n_groups_active` of `n_groups` groups only.
    pub n_groups: usize,
    /// See `n_groups`.
    pub n_groups_active: usize,
}

/// From router logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScoring {
    /// Each expert on its own.
    Sigmoid,
    /// Over all experts.
    Softmax,
}

impl ArchSpec {
    /// Whether any decoder layer routes to experts in `layer` (multi-token-prediction layers do).
    #[must_use]
    pub fn is_expert_layer(&self, layer: usize) -> bool {
        self.layers.get(layer).is_none_or(|l| l.feed_forward == FeedForward::Experts)
    }

    /// Decoder layers that route to experts, in order.
    pub fn expert_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.n_layers).filter(|&layer| self.is_expert_layer(layer))
    }

    /// Query heads.
    #[must_use]
    pub fn n_heads(&self) -> usize {
        match &self.attention {
            AttentionSpec::Latent(a) => a.n_heads,
            AttentionSpec::Grouped(a) => a.n_heads,
        }
    }

    /// The sparse-attention indexer, if there is one.
    #[must_use]
    pub fn indexer(&self) -> Option<IndexerSpec> {
        match &self.attention {
            AttentionSpec::Latent(a) => a.indexer,
            AttentionSpec::Grouped(_) => None,
        }
    }
}
