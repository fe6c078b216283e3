//! `ArchSpec`: a model's architecture as data. Owns the vocabulary of mechanisms that the forward
//! pass knows; says nothing about files, bytes or placement.
//!
//! Names are the project's own; the names of published configs exist only in `catalogue::config`.

use serde::{Deserialize, Serialize};

/// Model families whose tensors and mechanisms are known. Known is what the catalogue reads and the
/// planner plans; what the engine runs is the engine's to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// GLM-5 and 5.2: latent attention with a sparse indexer, sigmoid router.
    GlmMoeDsa,
    /// OLMoE: grouped-query attention with full-width q/k norms, softmax router.
    Olmoe,
    /// DeepSeek-V2: latent attention with or without a compressed query, softmax router.
    DeepseekV2,
    /// DeepSeek-V3 and 3.1: latent attention, sigmoid router with grouped selection.
    DeepseekV3,
    /// Kimi-K2: the tensors of DeepSeek-V3, one group of more experts.
    KimiK2,
    /// LongCat-Flash: two sub-blocks a layer, experts by shortcut, experts that do nothing.
    LongcatFlash,
    /// Qwen3-MoE: grouped-query attention with q/k norms per head, softmax router.
    Qwen3Moe,
    /// GLM-4.5 to 4.7: grouped-query attention with partial rotation, sigmoid router.
    Glm4Moe,
    /// Mixtral: grouped-query attention, few large experts.
    Mixtral,
    /// gpt-oss: attention sinks and sliding windows, one tensor for all experts of a layer.
    GptOss,
}

impl Family {
    /// Every known family.
    pub const ALL: [Self; 10] = [
        Self::GlmMoeDsa,
        Self::Olmoe,
        Self::DeepseekV2,
        Self::DeepseekV3,
        Self::KimiK2,
        Self::LongcatFlash,
        Self::Qwen3Moe,
        Self::Glm4Moe,
        Self::Mixtral,
        Self::GptOss,
    ];

    /// The `model_type` that its published configs carry.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        match self {
            Self::GlmMoeDsa => "glm_moe_dsa",
            Self::Olmoe => "olmoe",
            Self::DeepseekV2 => "deepseek_v2",
            Self::DeepseekV3 => "deepseek_v3",
            Self::KimiK2 => "kimi_k2",
            Self::LongcatFlash => "longcat_flash",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Glm4Moe => "glm4_moe",
            Self::Mixtral => "mixtral",
            Self::GptOss => "gpt_oss",
        }
    }
}

/// Everything the forward pass and the planner need to know of a model's shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// What stands between gate and up in every feed-forward.
    pub activation: Activation,
    /// Routed experts add a bias after each matrix.
    pub expert_biases: bool,
    /// The head reuses the embedding's weights.
    pub tied_embeddings: bool,
    /// Multi-token-prediction layers that the config declares, `None` where the family's configs do
    /// not say; what counts is what is present.
    pub n_mtp_layers: Option<usize>,
    /// What a multi-token-prediction layer holds; `None` for a family that has none.
    pub mtp_layer: Option<LayerSpec>,
    /// Tokens that end generation: the union of config and generation config.
    pub stop_tokens: Vec<u32>,
    /// Values of the config that change the arithmetic in a way that nothing here describes. Sizes
    /// do not depend on them, so plans do not; whoever runs the model must refuse them.
    pub undescribed: Vec<Undescribed>,
}

/// A value of the config with a meaning that `ArchSpec` cannot say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undescribed {
    /// The field.
    pub field: String,
    /// What it asks for.
    pub value: String,
}

/// One decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSpec {
    /// Its feed-forward half.
    pub feed_forward: FeedForward,
    /// Where its sparse attention takes its selection from.
    pub indexer: IndexerKind,
    /// Its attention sees this many positions at most, the token's own included.
    pub window: Option<usize>,
}

impl LayerSpec {
    /// A layer that sees every position and has no indexer.
    #[must_use]
    pub fn plain(feed_forward: FeedForward) -> Self {
        Self { feed_forward, indexer: IndexerKind::None, window: None }
    }

    /// Attentions of the layer, each with a cache of its own.
    #[must_use]
    pub fn n_attentions(&self) -> usize {
        self.feed_forward.n_sub_blocks().max(1)
    }

    /// Positions that a cache of the layer holds for a sequence of `context`.
    #[must_use]
    pub fn cached_positions(&self, context: u64) -> u64 {
        self.window.map_or(context, |window| context.min(window as u64))
    }
}

/// The feed-forward half of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeedForward {
    /// One SwiGLU for every token.
    Dense,
    /// Routed experts, plus shared ones where the family has them.
    Experts,
    /// Two sub-blocks, each an attention and a dense SwiGLU behind norms of their own. Routed experts
    /// take the first sub-block's normed state and are added after the second (LongCat-Flash,
    /// section 2.1: shortcut-connected experts).
    Shortcut,
}

impl FeedForward {
    /// Whether routed experts take part.
    #[must_use]
    pub fn routes(self) -> bool {
        match self {
            Self::Dense => false,
            Self::Experts | Self::Shortcut => true,
        }
    }

    /// Sub-blocks with tensors of their own; 0 where the layer itself is the block.
    #[must_use]
    pub fn n_sub_blocks(self) -> usize {
        match self {
            Self::Dense | Self::Experts => 0,
            Self::Shortcut => 2,
        }
    }
}

/// What stands between the gate and up products of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `silu(gate) * up`.
    SwiGlu,
    /// `(up + 1) * gate * sigmoid(alpha * gate)` with gate at most `limit` and up within plus or
    /// minus it (gpt-oss).
    ClampedSwiGlu {
        /// Factor inside the sigmoid.
        alpha: f32,
        /// The clamp.
        limit: f32,
    },
}

/// Where a layer's selection of past positions comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IndexerKind {
    /// No indexer: attention over every position.
    None,
    /// The layer has an indexer and its own key cache.
    Full,
    /// The layer reuses the selection of the last full layer before it.
    Shared,
}

/// Attention mechanisms.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionSpec {
    /// Multi-head latent attention (DeepSeek-V2, section 2.1).
    Latent(LatentAttention),
    /// Grouped-query attention.
    Grouped(GroupedAttention),
}

/// Sizes of multi-head latent attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatentAttention {
    /// Query heads.
    pub n_heads: usize,
    /// Width of the compressed query; 0 where queries come straight from the state.
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
    /// Factor on the scores before the softmax, that of a stretched rotary embedding included.
    pub score_scale: f32,
    /// Factor on the whole query; 1 where there is none.
    pub query_scale: f32,
    /// Factor on the normed latent before it is cached; 1 where there is none.
    pub latent_scale: f32,
    /// The sparse-attention indexer, if the family has one.
    pub indexer: Option<IndexerSpec>,
}

/// The sparse-attention indexer (DeepSeek-V3.2): scores every cached position with small keys of
/// its own and lets attention see the best `top_k`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedAttention {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// RMS norms of q and of k before they are rotated.
    pub qk_norm: QkNorm,
    /// q, k and v have biases.
    pub qkv_biases: bool,
    /// The output product has a bias.
    pub output_bias: bool,
    /// One learned logit a head takes part in the softmax and in nothing else.
    pub sinks: bool,
    /// q, k and v are clamped to plus or minus this.
    pub clip_qkv: Option<f32>,
}

/// RMS norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// None.
    None,
    /// Over the full width, before it is split into heads.
    FullWidth,
    /// Over each head, one weight for all heads.
    PerHead,
}

/// Rotary position embedding (RoFormer).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeSpec {
    /// Base of the frequencies: `theta^(-2i/dim)`.
    pub theta: f64,
    /// Rotated width; the first elements of a head, where it is less than the head's.
    pub dim: usize,
    /// Which elements form a pair.
    pub pairing: RopePairing,
    /// How it is stretched to contexts beyond those of its training.
    pub scaling: RopeScaling,
}

/// How a rotary embedding is stretched.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// It is not.
    None,
    /// YaRN (Peng et al., section 3.4): low frequencies are divided by `factor`, high ones stay, with
    /// a ramp between the dimensions that turn `beta_fast` and `beta_slow` times in `original_context`.
    Yarn {
        /// By how much.
        factor: f64,
        /// Context of the training, tokens.
        original_context: usize,
        /// Turns above which a frequency stays.
        beta_fast: f64,
        /// Turns below which it is divided.
        beta_slow: f64,
        /// The ramp's ends are rounded outwards to whole dimensions.
        truncate: bool,
        /// Factor on cosines and sines.
        attention_factor: f64,
    },
}

/// Which elements rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopePairing {
    /// (0, 1), (2, 3), ...
    Interleaved,
    /// (0, dim/2), (1, dim/2 + 1), ...
    Halves,
}

/// How tokens choose experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterSpec {
    /// Routed experts per layer.
    pub n_experts: usize,
    /// Experts after those that return their input and have no weights (LongCat-Flash).
    pub n_zero_experts: usize,
    /// Experts per token, those without weights included.
    pub n_experts_active: usize,
    /// From router logits to scores.
    pub scoring: RouterScoring,
    /// The product has a bias.
    pub logit_bias: bool,
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
    /// What a group is worth.
    pub group_score: GroupScore,
}

impl RouterSpec {
    /// Rows of the router: experts with weights, then those without.
    #[must_use]
    pub fn n_outputs(&self) -> usize {
        self.n_experts + self.n_zero_experts
    }

    /// Whether an output of the router is an expert without weights.
    #[must_use]
    pub fn is_zero(&self, output: u32) -> bool {
        output as usize >= self.n_experts
    }

    /// Experts with weights that a token is expected to use: all of the chosen, or, where some
    /// experts have no weights, their share. LongCat-Flash is trained to that share: 8 of its 12 on
    /// average.
    #[must_use]
    pub fn expected_active(&self) -> f64 {
        self.n_experts_active as f64 * self.n_experts as f64 / self.n_outputs().max(1) as f64
    }
}

/// What a group of experts is worth in the selection of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// The sum of its two best (DeepSeek-V3).
    BestTwo,
    /// Its best (DeepSeek-V2).
    Best,
}

/// From router logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterScoring {
    /// Each expert on its own.
    Sigmoid,
    /// Over all experts.
    Softmax,
    /// Over the chosen alone; the selection is by logit.
    SoftmaxOfChosen,
}

impl ArchSpec {
    /// Whether experts of some layer are added after a second sub-block.
    #[must_use]
    pub fn has_shortcut(&self) -> bool {
        self.layers.iter().any(|layer| layer.feed_forward == FeedForward::Shortcut)
    }

    /// What a layer holds; layers after the last decoder layer are multi-token-prediction ones.
    #[must_use]
    pub fn layer(&self, layer: usize) -> Option<LayerSpec> {
        self.layers.get(layer).copied().or(self.mtp_layer)
    }

    /// Whether `layer` routes to experts; layers after the last decoder layer are
    /// multi-token-prediction ones.
    #[must_use]
    pub fn is_expert_layer(&self, layer: usize) -> bool {
        self.layer(layer).is_some_and(|l| l.feed_forward.routes())
    }

    /// Whether a layer knows its experts before it needs them, with something to compute in between.
    #[must_use]
    pub fn has_window(&self) -> bool {
        self.layers.iter().any(|layer| match layer.feed_forward {
            FeedForward::Dense | FeedForward::Experts => false,
            FeedForward::Shortcut => true,
        })
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
