//! The published tensor names of each family: tables, and nothing else. A layer's names follow
//! `model.layers.N.`; a family's table is put together from the parts that it shares with others.

use super::{FusedTensor, LayerTensor as T, Part, Projection as P};
use crate::spec::Family;

/// Names of tensors and what they are.
pub(super) type Table = &'static [(&'static str, T)];

/// The names of one family.
pub(super) struct Names {
    /// Tensors of a layer.
    pub(super) layer: &'static [Table],
    /// Tensors of a sub-block: what comes before its number, what comes after.
    pub(super) sub_block: &'static [(&'static str, &'static str, T)],
    /// What comes before an expert's number, or before the name of a fused tensor.
    pub(super) expert_prefix: &'static str,
    /// What comes after an expert's number.
    pub(super) expert: &'static [(&'static str, P)],
    /// Tensors that hold all experts of a layer.
    pub(super) fused: &'static [(&'static str, FusedTensor, Part)],
    /// How the layers of multi-token prediction are named.
    pub(super) mtp: MtpNames,
}

/// How the layers of multi-token prediction are named.
#[derive(Clone, Copy)]
pub(super) enum MtpNames {
    /// There are none.
    None,
    /// As decoder layers after the last.
    InLayers,
    /// By names of their own.
    Apart {
        /// What comes before the layer's number, counted from 0.
        layers: &'static str,
        /// Tensors of a layer.
        in_layer: Table,
        /// Whole names of tensors that the first layer has.
        shared: Table,
    },
}

impl Names {
    /// The tensor of a layer that goes by `suffix`.
    pub(super) fn layer_tensor(&self, suffix: &str) -> Option<T> {
        self.layer.iter().copied().flatten().find(|(s, _)| *s == suffix).map(|(_, tensor)| *tensor)
    }

    /// What a tensor of a layer goes by.
    pub(super) fn layer_suffix(&self, tensor: T) -> Option<&'static str> {
        self.layer.iter().copied().flatten().find(|(_, t)| *t == tensor).map(|(suffix, _)| *suffix)
    }
}

const BLOCK: Table = &[
    ("input_layernorm.weight", T::InputNorm),
    ("post_attention_layernorm.weight", T::PostAttentionNorm),
    ("self_attn.o_proj.weight", T::AttentionOutput),
];

const ROUTER: Table = &[("mlp.gate.weight", T::Router)];

const ROUTER_SELECTION_BIAS: Table = &[("mlp.gate.e_score_correction_bias", T::RouterBias)];

const GROUPED: Table = &[
    ("self_attn.q_proj.weight", T::Query),
    ("self_attn.k_proj.weight", T::Key),
    ("self_attn.v_proj.weight", T::Value),
];

const GROUPED_BIASES: Table = &[
    ("self_attn.q_proj.bias", T::QueryBias),
    ("self_attn.k_proj.bias", T::KeyBias),
    ("self_attn.v_proj.bias", T::ValueBias),
    ("self_attn.o_proj.bias", T::AttentionOutputBias),
];

const GROUPED_NORMS: Table =
    &[("self_attn.q_norm.weight", T::QueryNorm), ("self_attn.k_norm.weight", T::KeyNorm)];

const LATENT: Table = &[
    ("self_attn.q_proj.weight", T::Query),
    ("self_attn.q_a_proj.weight", T::QueryDown),
    ("self_attn.q_a_layernorm.weight", T::QueryDownNorm),
    ("self_attn.q_b_proj.weight", T::QueryUp),
    ("self_attn.kv_a_proj_with_mqa.weight", T::LatentDown),
    ("self_attn.kv_a_layernorm.weight", T::LatentNorm),
    ("self_attn.kv_b_proj.weight", T::LatentUp),
];

const INDEXER: Table = &[
    ("self_attn.indexer.wq_b.weight", T::IndexerQuery),
    ("self_attn.indexer.wk.weight", T::IndexerKey),
    ("self_attn.indexer.k_norm.weight", T::IndexerKeyNorm),
    ("self_attn.indexer.k_norm.bias", T::IndexerKeyNormBias),
    ("self_attn.indexer.weights_proj.weight", T::IndexerHeadWeights),
];

const DENSE: Table = &[
    ("mlp.gate_proj.weight", T::Dense(P::Gate)),
    ("mlp.up_proj.weight", T::Dense(P::Up)),
    ("mlp.down_proj.weight", T::Dense(P::Down)),
];

const SHARED: Table = &[
    ("mlp.shared_experts.gate_proj.weight", T::Shared(P::Gate)),
    ("mlp.shared_experts.up_proj.weight", T::Shared(P::Up)),
    ("mlp.shared_experts.down_proj.weight", T::Shared(P::Down)),
];

const MTP: Table = &[
    ("enorm.weight", T::MtpEmbeddingNorm),
    ("hnorm.weight", T::MtpStateNorm),
    ("eh_proj.weight", T::MtpInput),
    ("shared_head.norm.weight", T::MtpHeadNorm),
    ("embed_tokens.weight", T::MtpEmbedding),
    ("shared_head.head.weight", T::MtpHead),
];

const EXPERT_PREFIX: &str = "mlp.experts.";
const EXPERT: &[(&str, P)] =
    &[("gate_proj.weight", P::Gate), ("up_proj.weight", P::Up), ("down_proj.weight", P::Down)];

/// Families of one expert a tensor and no sub-blocks.
const fn plain(layer: &'static [Table], mtp: MtpNames) -> Names {
    Names { layer, sub_block: &[], expert_prefix: EXPERT_PREFIX, expert: EXPERT, fused: &[], mtp }
}

static GLM_MOE_DSA: Names = plain(
    &[BLOCK, LATENT, INDEXER, ROUTER, ROUTER_SELECTION_BIAS, SHARED, DENSE, MTP],
    MtpNames::InLayers,
);

static DEEPSEEK: Names =
    plain(&[BLOCK, LATENT, ROUTER, ROUTER_SELECTION_BIAS, SHARED, DENSE, MTP], MtpNames::InLayers);

static OLMOE: Names =
    plain(&[BLOCK, GROUPED, GROUPED_NORMS, ROUTER, GROUPED_BIASES], MtpNames::None);

static QWEN3_MOE: Names =
    plain(&[BLOCK, GROUPED, GROUPED_NORMS, ROUTER, GROUPED_BIASES, DENSE], MtpNames::None);

static GLM4_MOE: Names = plain(
    &[
        BLOCK,
        GROUPED,
        GROUPED_NORMS,
        GROUPED_BIASES,
        ROUTER,
        ROUTER_SELECTION_BIAS,
        SHARED,
        DENSE,
        MTP,
    ],
    MtpNames::InLayers,
);

static MIXTRAL: Names = Names {
    layer: &[BLOCK, GROUPED, &[("block_sparse_moe.gate.weight", T::Router)]],
    sub_block: &[],
    expert_prefix: "block_sparse_moe.experts.",
    expert: &[("w1.weight", P::Gate), ("w3.weight", P::Up), ("w2.weight", P::Down)],
    fused: &[],
    mtp: MtpNames::None,
};

static GPT_OSS: Names = Names {
    layer: &[
        BLOCK,
        GROUPED,
        GROUPED_BIASES,
        &[
            ("self_attn.sinks", T::Sinks),
            ("mlp.router.weight", T::Router),
            ("mlp.router.bias", T::RouterLogitBias),
        ],
    ],
    sub_block: &[],
    expert_prefix: EXPERT_PREFIX,
    expert: &[],
    fused: &[
        ("gate_up_proj", FusedTensor::GateUp, Part::Weight),
        ("gate_up_proj_blocks", FusedTensor::GateUp, Part::Weight),
        ("gate_up_proj_scales", FusedTensor::GateUp, Part::BlockScales),
        ("gate_up_proj_bias", FusedTensor::GateUpBias, Part::Weight),
        ("down_proj", FusedTensor::Down, Part::Weight),
        ("down_proj_blocks", FusedTensor::Down, Part::Weight),
        ("down_proj_scales", FusedTensor::Down, Part::BlockScales),
        ("down_proj_bias", FusedTensor::DownBias, Part::Weight),
    ],
    mtp: MtpNames::None,
};

static LONGCAT_FLASH: Names = Names {
    layer: &[&[
        ("mlp.router.classifier.weight", T::Router),
        ("mlp.router.classifier.bias", T::RouterLogitBias),
        ("mlp.router.e_score_correction_bias", T::RouterBias),
    ]],
    sub_block: &[
        ("input_layernorm.", ".weight", T::InputNorm),
        ("post_attention_layernorm.", ".weight", T::PostAttentionNorm),
        ("self_attn.", ".q_a_proj.weight", T::QueryDown),
        ("self_attn.", ".q_a_layernorm.weight", T::QueryDownNorm),
        ("self_attn.", ".q_b_proj.weight", T::QueryUp),
        ("self_attn.", ".kv_a_proj_with_mqa.weight", T::LatentDown),
        ("self_attn.", ".kv_a_layernorm.weight", T::LatentNorm),
        ("self_attn.", ".kv_b_proj.weight", T::LatentUp),
        ("self_attn.", ".o_proj.weight", T::AttentionOutput),
        ("mlps.", ".gate_proj.weight", T::Dense(P::Gate)),
        ("mlps.", ".up_proj.weight", T::Dense(P::Up)),
        ("mlps.", ".down_proj.weight", T::Dense(P::Down)),
    ],
    expert_prefix: EXPERT_PREFIX,
    expert: EXPERT,
    fused: &[],
    // One layer without experts (LongCat-Flash, section 2.3).
    mtp: MtpNames::Apart {
        layers: "model.mtp.layers.",
        in_layer: &[
            ("input_layernorm.weight", T::InputNorm),
            ("post_attention_layernorm.weight", T::PostAttentionNorm),
            ("self_attn.q_a_proj.weight", T::QueryDown),
            ("self_attn.q_a_layernorm.weight", T::QueryDownNorm),
            ("self_attn.q_b_proj.weight", T::QueryUp),
            ("self_attn.kv_a_proj_with_mqa.weight", T::LatentDown),
            ("self_attn.kv_a_layernorm.weight", T::LatentNorm),
            ("self_attn.kv_b_proj.weight", T::LatentUp),
            ("self_attn.o_proj.weight", T::AttentionOutput),
            ("transformer_layer.mlp.gate_proj.weight", T::Dense(P::Gate)),
            ("transformer_layer.mlp.up_proj.weight", T::Dense(P::Up)),
            ("transformer_layer.mlp.down_proj.weight", T::Dense(P::Down)),
            ("enorm.m.weight", T::MtpEmbeddingNorm),
            ("hnorm.m.weight", T::MtpStateNorm),
            ("eh_proj.weight", T::MtpInput),
        ],
        shared: &[
            ("model.mtp.norm.weight", T::MtpHeadNorm),
            ("model.mtp.embed_tokens.weight", T::MtpEmbedding),
        ],
    },
};

/// The names of a family.
pub(super) fn of(family: Family) -> &'static Names {
    match family {
        Family::GlmMoeDsa => &GLM_MOE_DSA,
        Family::Olmoe => &OLMOE,
        Family::DeepseekV2 | Family::DeepseekV3 | Family::KimiK2 => &DEEPSEEK,
        Family::LongcatFlash => &LONGCAT_FLASH,
        Family::Qwen3Moe => &QWEN3_MOE,
        Family::Glm4Moe => &GLM4_MOE,
        Family::Mixtral => &MIXTRAL,
        Family::GptOss => &GPT_OSS,
    }
}
