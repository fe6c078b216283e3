//! Families with latent attention: GLM-5, DeepSeek-V2 and V3, Kimi-K2, LongCat-Flash.

use serde_json::Value;

use super::{Config, ConfigError, LAYER_CAP, dense_ff_size, dense_first, n_layers, plain_layers};
use crate::spec::{
    Activation, ArchSpec, AttentionSpec, Family, FeedForward, GroupScore, IndexerKind, IndexerSpec,
    LatentAttention, LayerSpec, RopePairing, RopeSpec, RouterScoring, RouterSpec,
};

/// Epsilon of the norms of the compressed query and of the latent: the references build them without
/// the config's.
const LATENT_NORM_EPS: f32 = 1e-6;

/// Latent attention and its rotary embedding, which share a width.
fn attention(
    config: &Config<'_>,
    pairing: RopePairing,
    default_theta: f64,
) -> Result<(LatentAttention, RopeSpec), ConfigError> {
    config.refuse_flag("attention_bias")?;
    let qk_nope_head_dim = config.dimension("qk_nope_head_dim")?;
    let qk_rope_head_dim = config.dimension("qk_rope_head_dim")?;
    let rope = config.rope(qk_rope_head_dim, pairing, default_theta)?;
    let width = (qk_nope_head_dim + qk_rope_head_dim) as f64;
    let attention = LatentAttention {
        n_heads: config.dimension("num_attention_heads")?,
        q_lora_rank: config.dimension_or("q_lora_rank", 0)?,
        kv_lora_rank: config.dimension("kv_lora_rank")?,
        qk_nope_head_dim,
        qk_rope_head_dim,
        v_head_dim: config.dimension("v_head_dim")?,
        latent_norm_eps: LATENT_NORM_EPS,
        score_scale: ((1.0 / (width as f32).sqrt()) as f64 * rope.score_factor) as f32,
        query_scale: 1.0,
        latent_scale: 1.0,
        indexer: None,
    };
    Ok((attention, rope.spec))
}

pub(super) fn glm_moe_dsa(config: &Config<'_>) -> Result<ArchSpec, ConfigError> {
    config.expect("hidden_act", "silu");
    config.expect("scoring_func", "sigmoid");
    config.expect("topk_method", "noaux_tc");
    config.refuse_flag("mlp_bias")?;
    let n_layers = n_layers(config, "num_hidden_layers")?;
    let (mut attention, rope) = attention(config, RopePairing::Interleaved, 10_000.0)?;
    // The indexer's queries come from the compressed one.
    attention.q_lora_rank = config.dimension("q_lora_rank")?;
    let indexer = IndexerSpec {
        n_heads: config.dimension("index_n_heads")?,
        head_dim: config.dimension("index_head_dim")?,
        top_k: config.dimension("index_topk")?,
        key_norm_eps: 1e-6,
    };
    if indexer.head_dim < attention.qk_rope_head_dim {
        return Err(ConfigError::Invalid {
            field: "index_head_dim",
            found: indexer.head_dim.to_string(),
            expected: format!("at least qk_rope_head_dim = {}", attention.qk_rope_head_dim),
        });
    }
    attention.indexer = Some(indexer);
    let layers = glm_layers(config, n_layers)?;
    let mtp = LayerSpec { indexer: IndexerKind::Full, ..LayerSpec::plain(FeedForward::Experts) };
    let mut spec = mixture(config, Family::GlmMoeDsa, (attention, rope), layers, 1)?;
    spec.mtp_layer = Some(mtp);
    Ok(spec)
}

pub(super) fn deepseek(config: &Config<'_>, family: Family) -> Result<ArchSpec, ConfigError> {
    config.expect("hidden_act", "silu");
    config.refuse_flag("mlp_bias")?;
    let n_layers = n_layers(config, "num_hidden_layers")?;
    let pairing = if config.flag_or("rope_interleave", true)? {
        RopePairing::Interleaved
    } else {
        RopePairing::Halves
    };
    let (attention, rope) = attention(config, pairing, 10_000.0)?;
    let is_v2 = family == Family::DeepseekV2;
    let layers = plain_layers(dense_first(config, n_layers, if is_v2 { 0 } else { 3 })?);
    let n_shared = if is_v2 { 2 } else { 1 };
    let mut spec = mixture(config, family, (attention, rope), layers, n_shared)?;
    if is_v2 {
        config.expect("scoring_func", "softmax");
        spec.mtp_layer = None;
        let router = &mut spec.router;
        router.scoring = RouterScoring::Softmax;
        router.selection_bias = false;
        router.renormalise = config.flag_or("norm_topk_prob", false)?;
        router.group_score = GroupScore::Best;
        match config.get("topk_method").and_then(Value::as_str) {
            // Groups are then declared and not used.
            None | Some("greedy") => (router.n_groups, router.n_groups_active) = (1, 1),
            Some("group_limited_greedy") => {}
            Some(other) => config.note("topk_method", other),
        }
    } else {
        config.expect("scoring_func", "sigmoid");
        config.expect("topk_method", "noaux_tc");
    }
    Ok(spec)
}

/// What GLM-5 and DeepSeek configs say in the same words.
fn mixture(
    config: &Config<'_>,
    family: Family,
    (attention, rope): (LatentAttention, RopeSpec),
    layers: Vec<LayerSpec>,
    default_shared: usize,
) -> Result<ArchSpec, ConfigError> {
    let expert_ff_size = config.dimension("moe_intermediate_size")?;
    let n_shared = config.uint("n_shared_experts", 0, 1024)?.unwrap_or(default_shared);
    Ok(ArchSpec {
        family,
        vocab_size: config.dimension("vocab_size")?,
        hidden_size: config.dimension("hidden_size")?,
        n_layers: layers.len(),
        max_context: config.dimension_or("max_position_embeddings", 4096)?,
        norm_eps: config.float_or("rms_norm_eps", default_norm_eps(family))? as f32,
        attention: AttentionSpec::Latent(attention),
        rope,
        dense_ff_size: dense_ff_size(config, "intermediate_size", &layers)?,
        layers,
        expert_ff_size,
        shared_ff_size: expert_ff_size * n_shared,
        router: RouterSpec {
            n_experts: config.n_experts("n_routed_experts")?,
            n_zero_experts: 0,
            n_experts_active: config.dimension("num_experts_per_tok")?,
            scoring: RouterScoring::Sigmoid,
            logit_bias: false,
            selection_bias: true,
            renormalise: config.flag_or("norm_topk_prob", true)?,
            scale: config.float_or("routed_scaling_factor", 1.0)? as f32,
            n_groups: config.dimension_or("n_group", 1)?,
            n_groups_active: config.dimension_or("topk_group", 1)?,
            group_score: GroupScore::BestTwo,
        },
        activation: Activation::SwiGlu,
        expert_biases: false,
        tied_embeddings: config.flag_or("tie_word_embeddings", false)?,
        n_mtp_layers: Some(config.n_mtp_layers()?.unwrap_or(0)),
        mtp_layer: Some(LayerSpec::plain(FeedForward::Experts)),
        stop_tokens: Vec::new(),
        undescribed: Vec::new(),
    })
}

fn default_norm_eps(family: Family) -> f64 {
    match family {
        Family::DeepseekV2 | Family::DeepseekV3 | Family::KimiK2 => 1e-6,
        Family::GlmMoeDsa
        | Family::Olmoe
        | Family::LongcatFlash
        | Family::Qwen3Moe
        | Family::Glm4Moe
        | Family::Mixtral
        | Family::GptOss => 1e-5,
    }
}

pub(super) fn longcat_flash(config: &Config<'_>) -> Result<ArchSpec, ConfigError> {
    config.expect("hidden_act", "silu");
    config.expect("attention_method", "MLA");
    config.expect("zero_expert_type", "identity");
    let n_layers = n_layers(config, "num_layers")?;
    let hidden_size = config.dimension("hidden_size")?;
    let (mut attention, rope) = attention(config, RopePairing::Interleaved, 10_000_000.0)?;
    attention.q_lora_rank = config.dimension("q_lora_rank")?;
    // Both make up for the narrower inputs of the products after them (section 2.2).
    let scale = |rank: usize| (hidden_size as f64 / rank as f64).sqrt() as f32;
    if config.flag_or("mla_scale_q_lora", true)? {
        attention.query_scale = scale(attention.q_lora_rank);
    }
    if config.flag_or("mla_scale_kv_lora", true)? {
        attention.latent_scale = scale(attention.kv_lora_rank);
    }
    let active = config.name_of(&["moe_topk", "num_experts_per_tok"]);
    let dense = config.name_of(&["ffn_hidden_size", "intermediate_size"]);
    let expert = config.name_of(&["expert_ffn_hidden_size", "moe_intermediate_size"]);
    Ok(ArchSpec {
        family: Family::LongcatFlash,
        vocab_size: config.dimension("vocab_size")?,
        hidden_size,
        n_layers,
        max_context: config.dimension_or("max_position_embeddings", 131_072)?,
        norm_eps: config.float_or("rms_norm_eps", 1e-5)? as f32,
        attention: AttentionSpec::Latent(attention),
        rope,
        layers: vec![LayerSpec::plain(FeedForward::Shortcut); n_layers],
        dense_ff_size: config.dimension(dense)?,
        expert_ff_size: config.dimension(expert)?,
        shared_ff_size: 0,
        router: RouterSpec {
            n_experts: config.n_experts("n_routed_experts")?,
            n_zero_experts: config.uint("zero_expert_num", 0, super::EXPERT_CAP)?.unwrap_or(0),
            n_experts_active: config.dimension(active)?,
            scoring: RouterScoring::Softmax,
            logit_bias: config.flag_or("router_bias", false)?,
            selection_bias: true,
            renormalise: config.flag_or("norm_topk_prob", false)?,
            scale: config.float_or("routed_scaling_factor", 1.0)? as f32,
            n_groups: 1,
            n_groups_active: 1,
            group_score: GroupScore::BestTwo,
        },
        activation: Activation::SwiGlu,
        expert_biases: false,
        tied_embeddings: config.flag_or("tie_word_embeddings", false)?,
        n_mtp_layers: config.n_mtp_layers()?,
        mtp_layer: Some(LayerSpec::plain(FeedForward::Dense)),
        stop_tokens: Vec::new(),
        undescribed: Vec::new(),
    })
}

/// Which layers are dense and which have an indexer. Without explicit lists: the first
/// `first_k_dense_replace` are dense, and `index_topk_freq`, `index_skip_topk_offset` or
/// `index_topk_pattern` say which layers share a selection.
fn glm_layers(config: &Config<'_>, n_layers: usize) -> Result<Vec<LayerSpec>, ConfigError> {
    let feed_forward = match config.per_layer("mlp_layer_types", n_layers)? {
        None => dense_first(config, n_layers, 3)?,
        Some(list) => list
            .iter()
            .map(|kind| match *kind {
                "dense" => Ok(FeedForward::Dense),
                "sparse" => Ok(FeedForward::Experts),
                other => Err(ConfigError::Unsupported {
                    field: "mlp_layer_types",
                    found: other.to_owned(),
                }),
            })
            .collect::<Result<_, _>>()?,
    };
    let indexers = match config.per_layer("indexer_types", n_layers)? {
        Some(list) => list.iter().map(|kind| indexer_kind(kind)).collect::<Result<Vec<_>, _>>()?,
        None => match config.get("index_topk_pattern").and_then(Value::as_str) {
            Some(pattern) if pattern.len() >= n_layers => pattern
                .chars()
                .take(n_layers)
                .map(|c| indexer_kind(if c == 'F' { "full" } else { "shared" }))
                .collect::<Result<_, _>>()?,
            Some(pattern) => {
                return Err(ConfigError::Invalid {
                    field: "index_topk_pattern",
                    found: pattern.to_owned(),
                    expected: format!("{n_layers} letters"),
                });
            }
            None => {
                let every = config.dimension_or("index_topk_freq", 1)?;
                let offset = config.uint("index_skip_topk_offset", 0, LAYER_CAP)?.unwrap_or(2);
                (0..n_layers)
                    .map(|l| {
                        let full = (l + 1).saturating_sub(offset).is_multiple_of(every);
                        if full { IndexerKind::Full } else { IndexerKind::Shared }
                    })
                    .collect()
            }
        },
    };
    if indexers.first() == Some(&IndexerKind::Shared) {
        return Err(ConfigError::Invalid {
            field: "indexer_types",
            found: "a first layer that shares".to_owned(),
            expected: "a first layer with an indexer of its own".to_owned(),
        });
    }
    Ok(feed_forward
        .into_iter()
        .zip(indexers)
        .map(|(feed_forward, indexer)| LayerSpec { indexer, ..LayerSpec::plain(feed_forward) })
        .collect())
}

fn indexer_kind(kind: &str) -> Result<IndexerKind, ConfigError> {
    match kind {
        "full" => Ok(IndexerKind::Full),
        "shared" => Ok(IndexerKind::Shared),
        other => Err(ConfigError::Unsupported { field: "indexer_types", found: other.to_owned() }),
    }
}
