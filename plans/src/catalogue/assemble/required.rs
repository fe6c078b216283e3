//! What a model of an architecture must have: its roles in layer order and the shape of each.

use crate::catalogue::roles::{LayerTensor, Projection, Role};
use crate::spec::{
    ArchSpec, AttentionSpec, FeedForward, GroupedAttention, IndexerKind, LatentAttention,
    LayerSpec, QkNorm,
};

const SWIGLU: [Projection; 3] = [Projection::Gate, Projection::Up, Projection::Down];

/// Every weight but the experts' that a model of this architecture must have, in layer order.
pub(in crate::catalogue) fn required_roles(spec: &ArchSpec, n_layers_present: usize) -> Vec<Role> {
    let mut roles = vec![Role::Embedding];
    for layer in 0..n_layers_present {
        roles.extend(layer_roles(spec, layer));
    }
    roles.push(Role::FinalNorm);
    if !spec.tied_embeddings {
        roles.push(Role::Head);
    }
    roles
}

/// Weights that a model may have besides: the copies of embedding and head that some checkpoints
/// carry for their multi-token-prediction layers.
pub(super) fn optional_roles(spec: &ArchSpec, n_layers_present: usize) -> Vec<Role> {
    (spec.n_layers..n_layers_present)
        .flat_map(|layer| {
            [LayerTensor::MtpEmbedding, LayerTensor::MtpHead]
                .map(|tensor| Role::Layer { layer: layer as u32, tensor })
        })
        .collect()
}

/// The weights of one layer, its routed experts left out; layers past the last decoder layer are
/// multi-token-prediction ones.
pub(super) fn layer_roles(spec: &ArchSpec, layer: usize) -> Vec<Role> {
    let Some(kind) = spec.layer(layer) else { return Vec::new() };
    let is_mtp = layer >= spec.n_layers;
    let layer = layer as u32;
    let role = |tensor| Role::Layer { layer, tensor };
    let mut roles = Vec::new();
    match kind.feed_forward {
        FeedForward::Dense => {
            roles.extend(block_tensors(spec, kind).into_iter().map(role));
            roles.extend(SWIGLU.map(LayerTensor::Dense).map(role));
        }
        FeedForward::Experts => {
            roles.extend(block_tensors(spec, kind).into_iter().map(role));
            roles.extend(router_tensors(spec).into_iter().map(role));
            if spec.shared_ff_size > 0 {
                roles.extend(SWIGLU.map(LayerTensor::Shared).map(role));
            }
        }
        FeedForward::Shortcut => {
            for block in 0..kind.feed_forward.n_sub_blocks() {
                let in_block = |tensor| Role::SubBlock { layer, block: block as u8, tensor };
                roles.extend(block_tensors(spec, kind).into_iter().map(in_block));
                roles.extend(SWIGLU.map(LayerTensor::Dense).map(in_block));
            }
            roles.extend(router_tensors(spec).into_iter().map(role));
        }
    }
    if is_mtp {
        use LayerTensor as T;
        let mtp = [T::MtpEmbeddingNorm, T::MtpStateNorm, T::MtpInput, T::MtpHeadNorm];
        roles.extend(mtp.map(role));
    }
    roles
}

fn router_tensors(spec: &ArchSpec) -> Vec<LayerTensor> {
    let mut tensors = vec![LayerTensor::Router];
    if spec.router.logit_bias {
        tensors.push(LayerTensor::RouterLogitBias);
    }
    if spec.router.selection_bias {
        tensors.push(LayerTensor::RouterBias);
    }
    tensors
}

/// Norms and attention of a block.
fn block_tensors(spec: &ArchSpec, layer: LayerSpec) -> Vec<LayerTensor> {
    use LayerTensor as T;
    let mut tensors = vec![T::InputNorm, T::PostAttentionNorm];
    match &spec.attention {
        AttentionSpec::Latent(latent) => {
            if latent.q_lora_rank > 0 {
                tensors.extend([T::QueryDown, T::QueryDownNorm, T::QueryUp]);
            } else {
                tensors.push(T::Query);
            }
            tensors.extend([T::LatentDown, T::LatentNorm, T::LatentUp]);
            if latent.indexer.is_some() && layer.indexer == IndexerKind::Full {
                tensors.extend([
                    T::IndexerQuery,
                    T::IndexerKey,
                    T::IndexerKeyNorm,
                    T::IndexerKeyNormBias,
                    T::IndexerHeadWeights,
                ]);
            }
            tensors.push(T::AttentionOutput);
        }
        AttentionSpec::Grouped(grouped) => {
            tensors.extend([T::Query, T::Key, T::Value]);
            if grouped.qkv_biases {
                tensors.extend([T::QueryBias, T::KeyBias, T::ValueBias]);
            }
            match grouped.qk_norm {
                QkNorm::None => {}
                QkNorm::FullWidth | QkNorm::PerHead => {
                    tensors.extend([T::QueryNorm, T::KeyNorm]);
                }
            }
            if grouped.sinks {
                tensors.push(T::Sinks);
            }
            tensors.push(T::AttentionOutput);
            if grouped.output_bias {
                tensors.push(T::AttentionOutputBias);
            }
        }
    }
    tensors
}

/// The logical shape of a weight; vectors are one row.
pub(super) fn expected_shape(spec: &ArchSpec, role: Role) -> (u64, u64) {
    let (rows, cols) = match role {
        Role::Embedding | Role::Head => (spec.vocab_size, spec.hidden_size),
        Role::FinalNorm => (1, spec.hidden_size),
        Role::Padding => (1, 1),
        Role::Expert { projection, .. } => swiglu_shape(spec, projection, spec.expert_ff_size),
        Role::Layer { tensor, .. } | Role::SubBlock { tensor, .. } => layer_shape(spec, tensor),
        // Shapes of three dimensions are `stored`'s.
        Role::FusedExperts { .. } => (0, 0),
    };
    (rows as u64, cols as u64)
}

fn swiglu_shape(spec: &ArchSpec, projection: Projection, ff_size: usize) -> (usize, usize) {
    match projection {
        Projection::Gate | Projection::Up => (ff_size, spec.hidden_size),
        Projection::Down => (spec.hidden_size, ff_size),
    }
}

fn layer_shape(spec: &ArchSpec, tensor: LayerTensor) -> (usize, usize) {
    use LayerTensor as T;
    let hidden = spec.hidden_size;
    match tensor {
        T::InputNorm
        | T::PostAttentionNorm
        | T::MtpEmbeddingNorm
        | T::MtpStateNorm
        | T::MtpHeadNorm => return (1, hidden),
        T::MtpInput => return (hidden, 2 * hidden),
        T::MtpEmbedding | T::MtpHead => return (spec.vocab_size, hidden),
        T::Router => return (spec.router.n_outputs(), hidden),
        T::RouterBias | T::RouterLogitBias => return (1, spec.router.n_outputs()),
        T::Dense(projection) => return swiglu_shape(spec, projection, spec.dense_ff_size),
        T::Shared(projection) => return swiglu_shape(spec, projection, spec.shared_ff_size),
        _ => {}
    }
    match &spec.attention {
        AttentionSpec::Latent(a) => latent_shape(a, tensor, hidden),
        AttentionSpec::Grouped(a) => grouped_shape(a, tensor, hidden),
    }
}

fn latent_shape(a: &LatentAttention, tensor: LayerTensor, hidden: usize) -> (usize, usize) {
    use LayerTensor as T;
    let indexer = a.indexer.map_or((0, 0), |i| (i.n_heads, i.head_dim));
    let query = a.n_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim);
    match tensor {
        T::Query => (query, hidden),
        T::QueryDown => (a.q_lora_rank, hidden),
        T::QueryDownNorm => (1, a.q_lora_rank),
        T::QueryUp => (query, a.q_lora_rank),
        T::LatentDown => (a.kv_lora_rank + a.qk_rope_head_dim, hidden),
        T::LatentNorm => (1, a.kv_lora_rank),
        T::LatentUp => (a.n_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank),
        T::AttentionOutput => (hidden, a.n_heads * a.v_head_dim),
        T::IndexerQuery => (indexer.0 * indexer.1, a.q_lora_rank),
        T::IndexerKey => (indexer.1, hidden),
        T::IndexerKeyNorm | T::IndexerKeyNormBias => (1, indexer.1),
        T::IndexerHeadWeights => (indexer.0, hidden),
        _ => (0, 0),
    }
}

fn grouped_shape(a: &GroupedAttention, tensor: LayerTensor, hidden: usize) -> (usize, usize) {
    use LayerTensor as T;
    let (q, kv) = (a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim);
    let norm = |full_width| match a.qk_norm {
        QkNorm::None => 0,
        QkNorm::FullWidth => full_width,
        QkNorm::PerHead => a.head_dim,
    };
    match tensor {
        T::Query => (q, hidden),
        T::Key | T::Value => (kv, hidden),
        T::QueryBias => (1, q),
        T::KeyBias | T::ValueBias => (1, kv),
        T::QueryNorm => (1, norm(q)),
        T::KeyNorm => (1, norm(kv)),
        T::Sinks => (1, a.n_heads),
        T::AttentionOutput => (hidden, q),
        T::AttentionOutputBias => (1, hidden),
        _ => (0, 0),
    }
}
