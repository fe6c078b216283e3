//! Families with grouped-query attention: OLMoE, Qwen3-MoE, GLM-4.5, Mixtral, gpt-oss.

use serde_json::Value;

use super::{Config, ConfigError, dense_ff_size, dense_first, n_layers, plain_layers};
use crate::spec::{
    Activation, ArchSpec, AttentionSpec, Family, FeedForward, GroupScore, GroupedAttention,
    LayerSpec, QkNorm, RopePairing, RopeSpec, RouterScoring, RouterSpec,
};

/// Attention without norms, biases or sinks, and its rotary embedding; `rotated` is the share of a
/// head that rotates.
fn attention(
    config: &Config<'_>,
    default_theta: f64,
    rotated: f64,
) -> Result<(GroupedAttention, RopeSpec), ConfigError> {
    let hidden_size = config.dimension("hidden_size")?;
    let n_heads = config.dimension("num_attention_heads")?;
    let n_kv_heads = config.dimension_or("num_key_value_heads", n_heads)?;
    if !n_heads.is_multiple_of(n_kv_heads) {
        return Err(ConfigError::Invalid {
            field: "num_key_value_heads",
            found: n_kv_heads.to_string(),
            expected: format!("a divisor of num_attention_heads = {n_heads}"),
        });
    }
    let head_dim = config.dimension_or("head_dim", hidden_size / n_heads)?;
    if head_dim == 0 {
        return Err(ConfigError::Invalid {
            field: "num_attention_heads",
            found: n_heads.to_string(),
            expected: format!("at most hidden_size = {hidden_size}"),
        });
    }
    let rotary_dim = (head_dim as f64 * rotated) as usize;
    let rope = config.rope(rotary_dim, RopePairing::Halves, default_theta)?;
    let attention = GroupedAttention {
        n_heads,
        n_kv_heads,
        head_dim,
        qk_norm: QkNorm::None,
        qkv_biases: false,
        output_bias: false,
        sinks: false,
        clip_qkv: None,
    };
    Ok((attention, rope.spec))
}

/// What all of these configs say in the same words.
fn mixture(
    config: &Config<'_>,
    family: Family,
    (attention, rope): (GroupedAttention, RopeSpec),
    layers: Vec<LayerSpec>,
    (expert_ff, n_experts): (&'static str, &'static str),
) -> Result<ArchSpec, ConfigError> {
    Ok(ArchSpec {
        family,
        vocab_size: config.dimension("vocab_size")?,
        hidden_size: config.dimension("hidden_size")?,
        n_layers: layers.len(),
        max_context: config.dimension_or("max_position_embeddings", 4096)?,
        norm_eps: config.float_or("rms_norm_eps", 1e-5)? as f32,
        attention: AttentionSpec::Grouped(attention),
        rope,
        dense_ff_size: dense_ff_size(config, "intermediate_size", &layers)?,
        layers,
        expert_ff_size: config.dimension(expert_ff)?,
        shared_ff_size: 0,
        router: RouterSpec {
            n_experts: config.n_experts(n_experts)?,
            n_zero_experts: 0,
            n_experts_active: config.dimension("num_experts_per_tok")?,
            scoring: RouterScoring::Softmax,
            logit_bias: false,
            selection_bias: false,
            renormalise: false,
            scale: 1.0,
            n_groups: 1,
            n_groups_active: 1,
            group_score: GroupScore::BestTwo,
        },
        activation: Activation::SwiGlu,
        expert_biases: false,
        tied_embeddings: config.flag_or("tie_word_embeddings", false)?,
        n_mtp_layers: Some(0),
        mtp_layer: None,
        stop_tokens: Vec::new(),
        undescribed: Vec::new(),
    })
}

/// Experts in every layer, each of which sees `window` positions.
fn expert_layers(n_layers: usize, window: Option<usize>) -> Vec<LayerSpec> {
    vec![LayerSpec { window, ..LayerSpec::plain(FeedForward::Experts) }; n_layers]
}

pub(super) fn olmoe(config: &Config<'_>) -> Result<ArchSpec, ConfigError> {
    config.expect("hidden_act", "silu");
    let (mut attention, rope) = attention(config, 10_000.0, 1.0)?;
    attention.qk_norm = QkNorm::FullWidth;
    attention.qkv_biases = config.flag_or("attention_bias", false)?;
    attention.output_bias = attention.qkv_biases;
    attention.clip_qkv = match config.get("clip_qkv") {
        Some(_) => Some(config.float_or("clip_qkv", 1.0)? as f32),
        None => None,
    };
    let layers = expert_layers(n_layers(config, "num_hidden_layers")?, None);
    let names = ("intermediate_size", "num_experts");
    let mut spec = mixture(config, Family::Olmoe, (attention, rope), layers, names)?;
    spec.router.renormalise = config.flag_or("norm_topk_prob", false)?;
    Ok(spec)
}

pub(super) fn qwen3_moe(config: &Config<'_>) -> Result<ArchSpec, ConfigError> {
    config.expect("hidden_act", "silu");
    let (mut attention, rope) = attention(config, 10_000.0, 1.0)?;
    attention.qk_norm = QkNorm::PerHead;
    attention.qkv_biases = config.flag_or("attention_bias", false)?;
    attention.output_bias = attention.qkv_biases;
    let window = match config.flag_or("use_sliding_window", false)? {
        true => Some(config.dimension_or("sliding_window", 4096)?),
        false => None,
    };
    let n_layers = n_layers(config, "num_hidden_layers")?;
    let every = config.dimension_or("decoder_sparse_step", 1)?;
    let dense: Vec<u64> = match config.get("mlp_only_layers") {
        None => Vec::new(),
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_u64).collect(),
        Some(other) => {
            return Err(ConfigError::Invalid {
                field: "mlp_only_layers",
                found: other.to_string(),
                expected: "a list of layers".to_owned(),
            });
        }
    };
    let layers = (0..n_layers)
        .map(|layer| {
            let routes = (layer + 1).is_multiple_of(every) && !dense.contains(&(layer as u64));
            let feed_forward = if routes { FeedForward::Experts } else { FeedForward::Dense };
            LayerSpec { window, ..LayerSpec::plain(feed_forward) }
        })
        .collect();
    let names = ("moe_intermediate_size", "num_experts");
    let mut spec = mixture(config, Family::Qwen3Moe, (attention, rope), layers, names)?;
    spec.norm_eps = config.float_or("rms_norm_eps", 1e-6)? as f32;
    spec.router.renormalise = config.flag_or("norm_topk_prob", false)?;
    Ok(spec)
}

pub(super) fn glm4_moe(config: &Config<'_>) -> Result<ArchSpec, ConfigError> {
    config.expect("hidden_act", "silu");
    config.expect("scoring_func", "sigmoid");
    config.expect("topk_method", "noaux_tc");
    let rotated = config.partial_rotary_factor(0.5)?;
    let (mut attention, rope) = attention(config, 10_000.0, rotated)?;
    if config.flag_or("use_qk_norm", false)? {
        attention.qk_norm = QkNorm::PerHead;
    }
    attention.qkv_biases = config.flag_or("attention_bias", false)?;
    let n_layers = n_layers(config, "num_hidden_layers")?;
    let layers = plain_layers(dense_first(config, n_layers, 1)?);
    let names = ("moe_intermediate_size", "n_routed_experts");
    let mut spec = mixture(config, Family::Glm4Moe, (attention, rope), layers, names)?;
    spec.shared_ff_size =
        spec.expert_ff_size * config.uint("n_shared_experts", 0, 1024)?.unwrap_or(1);
    spec.n_mtp_layers = Some(config.n_mtp_layers()?.unwrap_or(0));
    spec.mtp_layer = Some(LayerSpec::plain(FeedForward::Experts));
    let router = &mut spec.router;
    router.scoring = RouterScoring::Sigmoid;
    router.selection_bias = true;
    router.renormalise = config.flag_or("norm_topk_prob", true)?;
    router.scale = config.float_or("routed_scaling_factor", 1.0)? as f32;
    router.n_groups = config.dimension_or("n_group", 1)?;
    router.n_groups_active = config.dimension_or("topk_group", 1)?;
    Ok(spec)
}

pub(super) fn mixtral(config: &Config<'_>) -> Result<ArchSpec, ConfigError> {
    config.expect("hidden_act", "silu");
    let attention = attention(config, 1_000_000.0, 1.0)?;
    let window = match config.get("sliding_window") {
        Some(_) => Some(config.dimension("sliding_window")?),
        None => None,
    };
    let layers = expert_layers(n_layers(config, "num_hidden_layers")?, window);
    let names = ("intermediate_size", "num_local_experts");
    let mut spec = mixture(config, Family::Mixtral, attention, layers, names)?;
    spec.router.renormalise = true;
    Ok(spec)
}

pub(super) fn gpt_oss(config: &Config<'_>) -> Result<ArchSpec, ConfigError> {
    config.expect("hidden_act", "silu");
    let (mut attention, rope) = attention(config, 150_000.0, 1.0)?;
    attention.qkv_biases = config.flag_or("attention_bias", true)?;
    attention.output_bias = attention.qkv_biases;
    attention.sinks = true;
    let layers = gpt_oss_layers(config)?;
    let names = ("intermediate_size", "num_local_experts");
    let mut spec = mixture(config, Family::GptOss, (attention, rope), layers, names)?;
    spec.router.scoring = RouterScoring::SoftmaxOfChosen;
    spec.router.logit_bias = true;
    spec.activation = Activation::ClampedSwiGlu {
        alpha: config.float_or("swiglu_alpha", 1.702)? as f32,
        limit: config.float_or("swiglu_limit", 7.0)? as f32,
    };
    spec.expert_biases = true;
    Ok(spec)
}

/// Sliding and full attention in turn, unless the config lists them.
fn gpt_oss_layers(config: &Config<'_>) -> Result<Vec<LayerSpec>, ConfigError> {
    let n_layers = n_layers(config, "num_hidden_layers")?;
    let window = config.dimension_or("sliding_window", 128)?;
    let layer = |window| LayerSpec { window, ..LayerSpec::plain(FeedForward::Experts) };
    match config.per_layer("layer_types", n_layers)? {
        None => Ok((0..n_layers)
            .map(|l| layer(if l.is_multiple_of(2) { Some(window) } else { None }))
            .collect()),
        Some(kinds) => kinds
            .into_iter()
            .map(|kind| match kind {
                "sliding_attention" => Ok(layer(Some(window))),
                "full_attention" => Ok(layer(None)),
                other => {
                    Err(ConfigError::Unsupported { field: "layer_types", found: other.to_owned() })
                }
            })
            .collect(),
    }
}
