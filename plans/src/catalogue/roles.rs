//! What each tensor is for. Owns the tables that turn published tensor names into roles, one per
//! family; opens no file.

use crate::spec::Family;

/// One of the three matrices of a SwiGLU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Projection {
    /// `(ff_size, hidden_size)`, goes through the activation.
    Gate,
    /// `(ff_size, hidden_size)`, multiplies it.
    Up,
    /// `(hidden_size, ff_size)`.
    Down,
}

/// A tensor that every token of a layer touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerTensor {
    /// RMS norm before attention.
    InputNorm,
    /// RMS norm before the feed-forward half.
    PostAttentionNorm,
    /// Latent attention: hidden to compressed query.
    QueryDown,
    /// Latent attention: norm of the compressed query.
    QueryDownNorm,
    /// Latent attention: compressed query to heads.
    QueryUp,
    /// Latent attention: hidden to latent and rotary key.
    LatentDown,
    /// Latent attention: norm of the latent.
    LatentNorm,
    /// Latent attention: latent to keys without position and values, per head.
    LatentUp,
    /// Grouped attention: queries.
    Query,
    /// Grouped attention: keys.
    Key,
    /// Grouped attention: values.
    Value,
    /// Grouped attention: norm of the queries.
    QueryNorm,
    /// Grouped attention: norm of the keys.
    KeyNorm,
    /// Heads to hidden.
    AttentionOutput,
    /// Indexer: compressed query to index queries.
    IndexerQuery,
    /// Indexer: hidden to index key.
    IndexerKey,
    /// Indexer: layer norm of the key, weight.
    IndexerKeyNorm,
    /// Indexer: layer norm of the key, bias.
    IndexerKeyNormBias,
    /// Indexer: hidden to head weights.
    IndexerHeadWeights,
    /// Router: hidden to one logit an expert.
    Router,
    /// Router: the bias that selects and does not weigh.
    RouterBias,
    /// Dense feed-forward.
    Dense(Projection),
    /// Shared experts.
    Shared(Projection),
    /// MTP: norm of the next token's embedding.
    MtpEmbeddingNorm,
    /// MTP: norm of the main model's state.
    MtpStateNorm,
    /// MTP: both, concatenated, to hidden.
    MtpInput,
    /// MTP: norm before the head.
    MtpHeadNorm,
}

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Token embedding `(vocab_size, hidden_size)`.
    Embedding,
    /// Output head `(vocab_size, hidden_size)`.
    Head,
    /// Norm before the head.
    FinalNorm,
    /// Touched by every token of a layer.
    Layer {
        /// The layer.
        layer: u32,
        /// Which of its tensors.
        tensor: LayerTensor,
    },
    /// One matrix of a routed expert.
    Expert {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
        /// Which of its matrices.
        projection: Projection,
    },
    /// Alignment filler of our own containers.
    Padding,
}

/// Which of the tensors that store one weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// The weight itself.
    Weight,
    /// Its F32 scales, one a row (`<name>.qs`).
    RowScales,
}

const COMMON: &[(&str, LayerTensor)] = &[
    ("input_layernorm.weight", LayerTensor::InputNorm),
    ("post_attention_layernorm.weight", LayerTensor::PostAttentionNorm),
    ("self_attn.o_proj.weight", LayerTensor::AttentionOutput),
    ("mlp.gate.weight", LayerTensor::Router),
];

const OLMOE: &[(&str, LayerTensor)] = &[
    ("self_attn.q_proj.weight", LayerTensor::Query),
    ("self_attn.k_proj.weight", LayerTensor::Key),
    ("self_attn.v_proj.weight", LayerTensor::Value),
    ("self_attn.q_norm.weight", LayerTensor::QueryNorm),
    ("self_attn.k_norm.weight", LayerTensor::KeyNorm),
];

const GLM_MOE_DSA: &[(&str, LayerTensor)] = &[
    ("self_attn.q_a_proj.weight", LayerTensor::QueryDown),
    ("self_attn.q_a_layernorm.weight", LayerTensor::QueryDownNorm),
    ("self_attn.q_b_proj.weight", LayerTensor::QueryUp),
    ("self_attn.kv_a_proj_with_mqa.weight", LayerTensor::LatentDown),
    ("self_attn.kv_a_layernorm.weight", LayerTensor::LatentNorm),
    ("self_attn.kv_b_proj.weight", LayerTensor::LatentUp),
    ("self_attn.indexer.wq_b.weight", LayerTensor::IndexerQuery),
    ("self_attn.indexer.wk.weight", LayerTensor::IndexerKey),
    ("self_attn.indexer.k_norm.weight", LayerTensor::IndexerKeyNorm),
    ("self_attn.indexer.k_norm.bias", LayerTensor::IndexerKeyNormBias),
    ("self_attn.indexer.weights_proj.weight", LayerTensor::IndexerHeadWeights),
    ("mlp.gate.e_score_correction_bias", LayerTensor::RouterBias),
    ("mlp.gate_proj.weight", LayerTensor::Dense(Projection::Gate)),
    ("mlp.up_proj.weight", LayerTensor::Dense(Projection::Up)),
    ("mlp.down_proj.weight", LayerTensor::Dense(Projection::Down)),
    ("mlp.shared_experts.gate_proj.weight", LayerTensor::Shared(Projection::Gate)),
    ("mlp.shared_experts.up_proj.weight", LayerTensor::Shared(Projection::Up)),
    ("mlp.shared_experts.down_proj.weight", LayerTensor::Shared(Projection::Down)),
    ("enorm.weight", LayerTensor::MtpEmbeddingNorm),
    ("hnorm.weight", LayerTensor::MtpStateNorm),
    ("eh_proj.weight", LayerTensor::MtpInput),
    ("shared_head.norm.weight", LayerTensor::MtpHeadNorm),
];

const EXPERT_PREFIX: &str = "mlp.experts.";
const EXPERT: &[(&str, Projection)] = &[
    ("gate_proj.weight", Projection::Gate),
    ("up_proj.weight", Projection::Up),
    ("down_proj.weight", Projection::Down),
];

fn family_table(family: Family) -> &'static [(&'static str, LayerTensor)] {
    match family {
        Family::GlmMoeDsa => GLM_MOE_DSA,
        Family::Olmoe => OLMOE,
    }
}

/// How the names of alignment filler begin.
pub(super) const PADDING_PREFIX: &str = "__pad.";

/// The role of a published tensor name and which part of it this is; `None` where the family's
/// tables do not know the name.
#[must_use]
pub fn role_of(family: Family, name: &str) -> Option<(Role, Part)> {
    if name.starts_with(PADDING_PREFIX) {
        return Some((Role::Padding, Part::Weight));
    }
    let (base, part) = match name.strip_suffix(".qs") {
        Some(base) => (base, Part::RowScales),
        None => (name, Part::Weight),
    };
    let role = match base {
        "model.embed_tokens.weight" => Role::Embedding,
        "lm_head.weight" => Role::Head,
        "model.norm.weight" => Role::FinalNorm,
        _ => layer_role(family, base)?,
    };
    Some((role, part))
}

fn layer_role(family: Family, base: &str) -> Option<Role> {
    let (layer, rest) = base.strip_prefix("model.layers.")?.split_once('.')?;
    let layer = parse_number(layer)?;
    if let Some(rest) = rest.strip_prefix(EXPERT_PREFIX) {
        let (expert, rest) = rest.split_once('.')?;
        let expert = parse_number(expert)?;
        let projection = EXPERT.iter().find(|(suffix, _)| *suffix == rest)?.1;
        return Some(Role::Expert { layer, expert, projection });
    }
    let tensor = COMMON.iter().chain(family_table(family)).find(|(suffix, _)| *suffix == rest)?.1;
    Some(Role::Layer { layer, tensor })
}

/// A number as published names write it: digits only, no sign, no leading zero.
fn parse_number(text: &str) -> Option<u32> {
    let canonical = text == "0" || !text.starts_with('0');
    if canonical && text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}

/// The published name of a role in `family`, for messages and for writing containers.
#[must_use]
pub fn name_of(family: Family, role: Role) -> String {
    match role {
        Role::Embedding => "model.embed_tokens.weight".to_owned(),
        Role::Head => "lm_head.weight".to_owned(),
        Role::FinalNorm => "model.norm.weight".to_owned(),
        Role::Padding => "__pad".to_owned(),
        Role::Layer { layer, tensor } => {
            let suffix = COMMON
                .iter()
                .chain(family_table(family))
                .find(|(_, t)| *t == tensor)
                .map_or("?", |(suffix, _)| suffix);
            format!("model.layers.{layer}.{suffix}")
        }
        Role::Expert { layer, expert, projection } => {
            let suffix =
                EXPERT.iter().find(|(_, p)| *p == projection).map_or("?", |(suffix, _)| suffix);
            format!("model.layers.{layer}.{EXPERT_PREFIX}{expert}.{suffix}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_roles_round_trip() {
        for family in Family::ALL {
            for (_, tensor) in COMMON.iter().chain(family_table(family)) {
                let role = Role::Layer { layer: 7, tensor: *tensor };
                let name = name_of(family, role);
                assert_eq!(role_of(family, &name), Some((role, Part::Weight)), "{name}");
                assert_eq!(
                    role_of(family, &format!("{name}.qs")),
                    Some((role, Part::RowScales)),
                    "{name}"
                );
            }
        }
        let expert = Role::Expert { layer: 77, expert: 255, projection: Projection::Down };
        assert_eq!(
            name_of(Family::GlmMoeDsa, expert),
            "model.layers.77.mlp.experts.255.down_proj.weight"
        );
    }

    #[test]
    fn what_the_tables_do_not_know_has_no_role() {
        for name in [
            "",
            "model.layers.",
            "model.layers.x.input_layernorm.weight",
            "model.layers.01.input_layernorm.weight",
            "model.layers.99999999999.input_layernorm.weight",
            "model.layers.1.mlp.experts.-1.up_proj.weight",
            "model.layers.1.self_attn.rotary_emb.inv_freq",
        ] {
            assert_eq!(role_of(Family::Olmoe, name), None, "{name}");
        }
    }
}
