//! What each tensor is for. Owns the way from published tensor names to roles and back; the tables of
//! the families are `names`'s. Opens no file and allocates nothing on the way to a role: a model has
//! 120,000 names.

mod names;

use self::names::{MtpNames, Names};
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

/// A tensor that holds a part of all routed experts of a layer, outermost by expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FusedTensor {
    /// Gate and up, interleaved.
    GateUp,
    /// Their biases.
    GateUpBias,
    /// Down.
    Down,
    /// Its bias.
    DownBias,
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
    /// Queries of grouped attention, or of latent attention that does not compress them.
    Query,
    /// Grouped attention: keys.
    Key,
    /// Grouped attention: values.
    Value,
    /// Grouped attention: norm of the queries.
    QueryNorm,
    /// Grouped attention: norm of the keys.
    KeyNorm,
    /// Grouped attention: bias of the queries.
    QueryBias,
    /// Grouped attention: bias of the keys.
    KeyBias,
    /// Grouped attention: bias of the values.
    ValueBias,
    /// Grouped attention: one logit a head that takes part in the softmax alone.
    Sinks,
    /// Heads to hidden.
    AttentionOutput,
    /// Its bias.
    AttentionOutputBias,
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
    /// Router: the bias of the product.
    RouterLogitBias,
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
    /// MTP: a copy of the embedding that some checkpoints carry.
    MtpEmbedding,
    /// MTP: a copy of the head that some checkpoints carry.
    MtpHead,
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
    /// Touched by every token, in one of the sub-blocks of a layer that has several.
    SubBlock {
        /// The layer.
        layer: u32,
        /// Which of its sub-blocks.
        block: u8,
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
    /// A part of all routed experts of a layer.
    FusedExperts {
        /// The layer.
        layer: u32,
        /// Which part.
        tensor: FusedTensor,
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
    /// Its scales, one a block (`<name>_scale_inv`, `<name>_scales`).
    BlockScales,
}

/// How the names of alignment filler begin.
pub(super) const PADDING_PREFIX: &str = "__pad.";

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const FINAL_NORM: &str = "model.norm.weight";
const LAYERS: &str = "model.layers.";
const ROW_SCALES: &str = ".qs";
const BLOCK_SCALES: &str = "_scale_inv";

/// The role of a published tensor name in a model of `n_layers` decoder layers, and which part of it
/// this is; `None` where the family's tables do not know the name.
#[must_use]
pub fn role_of(family: Family, n_layers: usize, name: &str) -> Option<(Role, Part)> {
    if name.starts_with(PADDING_PREFIX) {
        return Some((Role::Padding, Part::Weight));
    }
    let names = names::of(family);
    if let Some(fused) = fused_role(names, name) {
        return Some(fused);
    }
    let (base, part) = if let Some(base) = name.strip_suffix(ROW_SCALES) {
        (base, Part::RowScales)
    } else if let Some(base) = name.strip_suffix(BLOCK_SCALES) {
        (base, Part::BlockScales)
    } else {
        (name, Part::Weight)
    };
    let role = match base {
        EMBEDDING => Role::Embedding,
        HEAD => Role::Head,
        FINAL_NORM => Role::FinalNorm,
        _ => layer_role(names, base).or_else(|| mtp_role(names, n_layers, base))?,
    };
    Some((role, part))
}

/// Whether a family keeps all experts of a layer in one tensor.
pub(super) fn has_fused_experts(family: Family) -> bool {
    !names::of(family).fused.is_empty()
}

fn layer_role(names: &Names, base: &str) -> Option<Role> {
    let (layer, rest) = split_layer(base)?;
    if let Some(rest) = rest.strip_prefix(names.expert_prefix) {
        let (expert, rest) = rest.split_once('.')?;
        let expert = parse_number(expert)?;
        let projection = names.expert.iter().find(|(suffix, _)| *suffix == rest)?.1;
        return Some(Role::Expert { layer, expert, projection });
    }
    if let Some(tensor) = names.layer_tensor(rest) {
        return Some(Role::Layer { layer, tensor });
    }
    names.sub_block.iter().find_map(|&(before, after, tensor)| {
        let digit = rest.strip_prefix(before)?.strip_suffix(after)?;
        let block = match digit {
            "0" => 0,
            "1" => 1,
            _ => return None,
        };
        Some(Role::SubBlock { layer, block, tensor })
    })
}

fn fused_role(names: &Names, name: &str) -> Option<(Role, Part)> {
    if names.fused.is_empty() {
        return None;
    }
    let (layer, rest) = split_layer(name)?;
    let rest = rest.strip_prefix(names.expert_prefix)?;
    let (_, tensor, part) = names.fused.iter().find(|(suffix, ..)| *suffix == rest)?;
    Some((Role::FusedExperts { layer, tensor: *tensor }, *part))
}

/// Multi-token prediction by names of its own, which count its layers from 0.
fn mtp_role(names: &Names, n_layers: usize, base: &str) -> Option<Role> {
    let MtpNames::Apart { layers, in_layer, shared } = names.mtp else { return None };
    let first = u32::try_from(n_layers).ok()?;
    if let Some((_, tensor)) = shared.iter().find(|(name, _)| *name == base) {
        return Some(Role::Layer { layer: first, tensor: *tensor });
    }
    let (layer, rest) = base.strip_prefix(layers)?.split_once('.')?;
    let layer = first.checked_add(parse_number(layer)?)?;
    let tensor = in_layer.iter().find(|(suffix, _)| *suffix == rest)?.1;
    Some(Role::Layer { layer, tensor })
}

/// `model.layers.7.rest` to (7, `rest`).
fn split_layer(base: &str) -> Option<(u32, &str)> {
    let (layer, rest) = base.strip_prefix(LAYERS)?.split_once('.')?;
    Some((parse_number(layer)?, rest))
}

/// A number as published names write it: digits only, no sign, no leading zero.
fn parse_number(text: &str) -> Option<u32> {
    let canonical = text == "0" || !text.starts_with('0');
    if canonical && text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}

/// The published name of a role in a model of `n_layers` decoder layers, for messages and for writing
/// containers.
#[must_use]
pub fn name_of(family: Family, n_layers: usize, role: Role) -> String {
    let names = names::of(family);
    match role {
        Role::Embedding => EMBEDDING.to_owned(),
        Role::Head => HEAD.to_owned(),
        Role::FinalNorm => FINAL_NORM.to_owned(),
        Role::Padding => "__pad".to_owned(),
        Role::Layer { layer, tensor } => match names.mtp {
            MtpNames::Apart { layers, in_layer, shared } if layer as usize >= n_layers => {
                let name = |table: &'static [(&str, LayerTensor)]| {
                    table.iter().find(|(_, t)| *t == tensor).map(|(name, _)| *name)
                };
                name(shared).map_or_else(
                    || {
                        let suffix = name(in_layer).unwrap_or("?");
                        format!("{layers}{}.{suffix}", layer as usize - n_layers)
                    },
                    str::to_owned,
                )
            }
            MtpNames::None | MtpNames::InLayers | MtpNames::Apart { .. } => {
                let suffix = names.layer_suffix(tensor).unwrap_or("?");
                format!("{LAYERS}{layer}.{suffix}")
            }
        },
        Role::SubBlock { layer, block, tensor } => {
            let (before, after) = names
                .sub_block
                .iter()
                .find(|(.., t)| *t == tensor)
                .map_or(("?", "?"), |(before, after, _)| (*before, *after));
            format!("{LAYERS}{layer}.{before}{block}{after}")
        }
        Role::Expert { layer, expert, projection } => {
            let suffix = names
                .expert
                .iter()
                .find(|(_, p)| *p == projection)
                .map_or("?", |(suffix, _)| suffix);
            format!("{LAYERS}{layer}.{}{expert}.{suffix}", names.expert_prefix)
        }
        Role::FusedExperts { layer, tensor } => {
            let suffix = names
                .fused
                .iter()
                .find(|(_, t, part)| *t == tensor && *part == Part::Weight)
                .map_or("?", |(suffix, ..)| suffix);
            format!("{LAYERS}{layer}.{}{suffix}", names.expert_prefix)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_roles_round_trip() {
        for family in Family::ALL {
            let names = names::of(family);
            let mut roles: Vec<Role> = names
                .layer
                .iter()
                .flat_map(|table| table.iter())
                .map(|(_, tensor)| Role::Layer { layer: 7, tensor: *tensor })
                .collect();
            if let MtpNames::Apart { in_layer, shared, .. } = names.mtp {
                let tables = in_layer.iter().chain(shared);
                roles.extend(tables.map(|(_, tensor)| Role::Layer { layer: 9, tensor: *tensor }));
            }
            for block in [0, 1] {
                let tables = names.sub_block.iter();
                roles.extend(tables.map(|(.., t)| Role::SubBlock { layer: 0, block, tensor: *t }));
            }
            roles.extend([Role::Embedding, Role::Head, Role::FinalNorm]);
            let expert = |(_, projection): &(_, Projection)| Role::Expert {
                layer: 77,
                expert: 255,
                projection: *projection,
            };
            roles.extend(names.expert.iter().map(expert));
            for role in roles {
                let name = name_of(family, 9, role);
                assert!(!name.contains('?'), "{family:?} {role:?}");
                let parts = [
                    ("", Part::Weight),
                    (".qs", Part::RowScales),
                    ("_scale_inv", Part::BlockScales),
                ];
                for (suffix, part) in parts {
                    let found = role_of(family, 9, &format!("{name}{suffix}"));
                    assert_eq!(found, Some((role, part)), "{family:?} {name}{suffix}");
                }
            }
            for (suffix, tensor, part) in names.fused {
                let role = Role::FusedExperts { layer: 3, tensor: *tensor };
                let name = format!("model.layers.3.mlp.experts.{suffix}");
                assert_eq!(role_of(family, 9, &name), Some((role, *part)), "{name}");
                assert!(name.starts_with(&name_of(family, 9, role)), "{name}");
            }
        }
    }

    #[test]
    fn published_names_of_each_family_have_roles() {
        use LayerTensor as T;
        let layer = |layer, tensor| Role::Layer { layer, tensor };
        let expert = |layer, expert, projection| Role::Expert { layer, expert, projection };
        let cases = [
            (
                Family::GlmMoeDsa,
                "model.layers.77.mlp.experts.255.down_proj.weight",
                expert(77, 255, Projection::Down),
            ),
            (Family::DeepseekV3, "model.layers.61.shared_head.head.weight", layer(61, T::MtpHead)),
            (Family::DeepseekV2, "model.layers.0.self_attn.q_proj.weight", layer(0, T::Query)),
            (
                Family::LongcatFlash,
                "model.layers.3.self_attn.1.q_b_proj.weight",
                Role::SubBlock { layer: 3, block: 1, tensor: T::QueryUp },
            ),
            (
                Family::LongcatFlash,
                "model.mtp.layers.0.transformer_layer.mlp.up_proj.weight",
                layer(28, T::Dense(Projection::Up)),
            ),
            (Family::LongcatFlash, "model.mtp.norm.weight", layer(28, T::MtpHeadNorm)),
            (
                Family::Mixtral,
                "model.layers.31.block_sparse_moe.experts.7.w2.weight",
                expert(31, 7, Projection::Down),
            ),
            (Family::GptOss, "model.layers.0.mlp.router.bias", layer(0, T::RouterLogitBias)),
        ];
        for (family, name, role) in cases {
            assert_eq!(role_of(family, 28, name), Some((role, Part::Weight)), "{name}");
        }
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
            "model.layers.1.self_attn.2.o_proj.weight",
            "model.mtp.layers.4294967295.enorm.m.weight",
            "_scale_inv",
            ".qs",
        ] {
            for family in Family::ALL {
                assert_eq!(role_of(family, 28, name), None, "{family:?} {name}");
            }
        }
    }
}
