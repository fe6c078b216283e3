//! From headers to a catalogue: every tensor gets its role, its logical shape and its stored type,
//! and what the architecture needs is checked to be there.

use std::collections::HashMap;

use super::header::{DType, RawTensor};
use super::layout::{ExpertLayout, ExpertPieces, projection_index};
use super::roles::{self, LayerTensor, Part, Projection, Role};
use super::shards::ReadShards;
use super::source::Source;
use super::{Catalogue, CatalogueError, Shard, Span, StoredType, Tensor, Warning};
use crate::spec::{ArchSpec, AttentionSpec, FeedForward, IndexerKind};
use crate::units::Bytes;

/// Multi-token-prediction layers looked for after the last decoder layer.
const MTP_LAYER_CAP: usize = 64;

/// Builds the catalogue of a model from its headers.
pub(super) fn assemble(
    source: &dyn Source,
    spec: ArchSpec,
    read: &ReadShards<'_>,
) -> Result<Catalogue, CatalogueError> {
    let shards: Vec<Shard> = read
        .names
        .iter()
        .zip(&read.headers)
        .map(|(name, header)| Shard { path: source.locate(name), bytes: header.file_bytes })
        .collect();
    let mut found = Found::collect(&spec, read, &shards)?;
    let n_layers_present = spec.n_layers + found.whole_mtp_layers(&spec);
    let mut tensors = Vec::new();
    for role in required_roles(&spec, n_layers_present) {
        match found.take(&spec, role)? {
            Some(tensor) => tensors.push(tensor),
            None => return Err(missing(&spec, role, &shards)),
        }
    }
    let (experts, expert_base) = found.experts(&spec, n_layers_present, &shards)?;
    let warnings = found.warnings(&spec, n_layers_present - spec.n_layers);
    Ok(Catalogue {
        directory: source.label().to_owned(),
        n_mtp_layers_present: n_layers_present - spec.n_layers,
        spec,
        shards,
        tensors,
        experts,
        fingerprint: fingerprint(read),
        unrecognised_bytes: found.unrecognised_bytes,
        n_tensors: read.headers.iter().map(|h| h.n_tensors()).sum(),
        tokenizer_bytes: Bytes(0),
        warnings,
        expert_base,
    })
}

fn missing(spec: &ArchSpec, role: Role, shards: &[Shard]) -> CatalogueError {
    CatalogueError::MissingTensor {
        tensor: roles::name_of(spec.family, role),
        shards: shards.len(),
    }
}

/// Hash of every header and file size in order of file name; names and places do not count.
fn fingerprint(read: &ReadShards<'_>) -> String {
    let mut hasher = blake3::Hasher::new();
    for header in &read.headers {
        hasher.update(&header.hash);
        hasher.update(&header.file_bytes.to_le_bytes());
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

/// A tensor as found, before its role gives it a logical shape.
#[derive(Clone, Copy)]
struct FoundTensor<'a> {
    raw: RawTensor<'a>,
    span: Span,
}

/// All tensors of all shards by role.
struct Found<'a> {
    dense: HashMap<(Role, Part), FoundTensor<'a>>,
    expert_tensors: HashMap<(u32, u32), [[Option<FoundTensor<'a>>; 2]; 3]>,
    unrecognised: Vec<&'a str>,
    unrecognised_bytes: Bytes,
}

impl<'a> Found<'a> {
    fn collect(
        spec: &ArchSpec,
        read: &'a ReadShards<'_>,
        shards: &[Shard],
    ) -> Result<Self, CatalogueError> {
        let mut found = Self {
            dense: HashMap::new(),
            expert_tensors: HashMap::new(),
            unrecognised: Vec::new(),
            unrecognised_bytes: Bytes(0),
        };
        for (index, header) in read.headers.iter().enumerate() {
            for raw in header.tensors() {
                let bytes = raw.end - raw.start;
                let span =
                    Span { shard: index as u32, offset: header.data_start + raw.start, bytes };
                let tensor = FoundTensor { raw, span };
                let previous = match roles::role_of(spec.family, raw.name) {
                    Some((Role::Padding, _)) => None,
                    Some((Role::Expert { layer, expert, projection }, part)) => {
                        let pieces = found.expert_tensors.entry((layer, expert)).or_default();
                        let part = usize::from(part == Part::RowScales);
                        pieces[projection_index(projection)][part].replace(tensor)
                    }
                    Some(key) => found.dense.insert(key, tensor),
                    None => {
                        found.unrecognised.push(raw.name);
                        found.unrecognised_bytes = found.unrecognised_bytes + Bytes(bytes);
                        None
                    }
                };
                if let Some(previous) = previous {
                    return Err(CatalogueError::TensorTwice {
                        tensor: raw.name.to_owned(),
                        first: shards[previous.span.shard as usize].path.clone(),
                        second: shards[index].path.clone(),
                    });
                }
            }
        }
        Ok(found)
    }

    /// Takes one weight out, with its logical shape and stored type.
    fn take(&mut self, spec: &ArchSpec, role: Role) -> Result<Option<Tensor>, CatalogueError> {
        let Some(weight) = self.dense.remove(&(role, Part::Weight)) else { return Ok(None) };
        let scales = self.dense.remove(&(role, Part::RowScales));
        let (rows, cols) = expected_shape(spec, role);
        let stored = stored_type(weight, scales, rows, cols)?;
        Ok(Some(Tensor {
            role,
            rows,
            cols,
            stored,
            weight: weight.span,
            scales: scales.map(|s| s.span),
        }))
    }

    /// How many multi-token-prediction layers are present and whole.
    fn whole_mtp_layers(&self, spec: &ArchSpec) -> usize {
        (0..MTP_LAYER_CAP)
            .take_while(|extra| {
                let layer = spec.n_layers + extra;
                let dense = layer_tensors(spec, layer).into_iter().all(|tensor| {
                    let role = Role::Layer { layer: layer as u32, tensor };
                    let part = |part| self.dense.get(&(role, part)).copied();
                    is_whole([part(Part::Weight), part(Part::RowScales)])
                });
                dense
                    && (0..spec.router.n_experts).all(|expert| {
                        self.expert_tensors
                            .get(&(layer as u32, expert as u32))
                            .is_some_and(|pieces| pieces.iter().copied().all(is_whole))
                    })
            })
            .count()
    }

    fn experts(
        &mut self,
        spec: &ArchSpec,
        n_layers_present: usize,
        shards: &[Shard],
    ) -> Result<(Vec<ExpertLayout>, Vec<Option<usize>>), CatalogueError> {
        let mut experts = Vec::new();
        let mut expert_base = vec![None; n_layers_present];
        for (layer, base) in expert_base.iter_mut().enumerate() {
            if !spec.is_expert_layer(layer) {
                continue;
            }
            *base = Some(experts.len());
            for expert in 0..spec.router.n_experts {
                let key = (layer as u32, expert as u32);
                let pieces = self.expert_tensors.remove(&key).unwrap_or_default();
                experts.push(lay_out(spec, key, &pieces, shards)?);
            }
        }
        Ok((experts, expert_base))
    }

    fn warnings(&self, spec: &ArchSpec, n_mtp_present: usize) -> Vec<Warning> {
        let mut warnings = Vec::new();
        if n_mtp_present != spec.n_mtp_layers {
            warnings.push(Warning {
                finding: format!(
                    "config.json declares {} multi-token-prediction layers, the shards hold {n_mtp_present}",
                    spec.n_mtp_layers
                ),
                remedy: "nothing: what is present is counted".to_owned(),
            });
        }
        let mut left: Vec<String> =
            self.unrecognised.iter().map(|name| (*name).to_owned()).collect();
        left.extend(self.dense.values().map(|t| t.raw.name.to_owned()));
        left.extend(
            self.expert_tensors
                .values()
                .flatten()
                .flatten()
                .flatten()
                .map(|t| t.raw.name.to_owned()),
        );
        left.sort_unstable();
        if let Some(first) = left.first() {
            warnings.push(Warning {
                finding: format!(
                    "{} tensors have no role in a {} of this config, such as {first}",
                    left.len(),
                    spec.family.model_type()
                ),
                remedy: "nothing: they are not loaded".to_owned(),
            });
        }
        warnings
    }
}

/// Whether a weight is there, with its scales if it is packed.
fn is_whole([weight, scales]: [Option<FoundTensor<'_>>; 2]) -> bool {
    weight.is_some_and(|weight| {
        let is_packed = matches!(weight.raw.dtype, DType::U8 | DType::I8);
        !is_packed || scales.is_some()
    })
}

fn lay_out(
    spec: &ArchSpec,
    (layer, expert): (u32, u32),
    found: &[[Option<FoundTensor<'_>>; 2]; 3],
    shards: &[Shard],
) -> Result<ExpertLayout, CatalogueError> {
    let mut pieces = ExpertPieces::default();
    for projection in [Projection::Gate, Projection::Up, Projection::Down] {
        let role = Role::Expert { layer, expert, projection };
        let index = projection_index(projection);
        let [weight, scales] = found[index];
        let weight = weight.ok_or_else(|| missing(spec, role, shards))?;
        let (rows, cols) = expected_shape(spec, role);
        let stored = stored_type(weight, scales, rows, cols)?;
        pieces.weights[index] = Some((stored, weight.span));
        pieces.scales[index] = scales.map(|s| s.span);
    }
    let any = Role::Expert { layer, expert, projection: Projection::Gate };
    pieces.lay_out().ok_or_else(|| missing(spec, any, shards))
}

/// Every weight but the experts' that a model of this architecture must have, in layer order.
fn required_roles(spec: &ArchSpec, n_layers_present: usize) -> Vec<Role> {
    let mut roles = vec![Role::Embedding];
    for layer in 0..n_layers_present {
        roles.extend(
            layer_tensors(spec, layer)
                .into_iter()
                .map(|tensor| Role::Layer { layer: layer as u32, tensor }),
        );
    }
    roles.push(Role::FinalNorm);
    if !spec.tied_embeddings {
        roles.push(Role::Head);
    }
    roles
}

/// The tensors of one layer; layers past the last decoder layer are multi-token-prediction ones.
fn layer_tensors(spec: &ArchSpec, layer: usize) -> Vec<LayerTensor> {
    use LayerTensor as T;
    let is_mtp = layer >= spec.n_layers;
    let mut tensors = vec![T::InputNorm, T::PostAttentionNorm];
    match &spec.attention {
        AttentionSpec::Latent(latent) => {
            tensors.extend([
                T::QueryDown,
                T::QueryDownNorm,
                T::QueryUp,
                T::LatentDown,
                T::LatentNorm,
                T::LatentUp,
            ]);
            let full = spec.layers.get(layer).is_none_or(|l| l.indexer == IndexerKind::Full);
            if latent.indexer.is_some() && full {
                tensors.extend([
                    T::IndexerQuery,
                    T::IndexerKey,
                    T::IndexerKeyNorm,
                    T::IndexerKeyNormBias,
                    T::IndexerHeadWeights,
                ]);
            }
        }
        AttentionSpec::Grouped(grouped) => {
            tensors.extend([T::Query, T::Key, T::Value]);
            if grouped.full_width_qk_norm {
                tensors.extend([T::QueryNorm, T::KeyNorm]);
            }
        }
    }
    tensors.push(T::AttentionOutput);
    let three = [Projection::Gate, Projection::Up, Projection::Down];
    let feed_forward = spec.layers.get(layer).map_or(FeedForward::Experts, |l| l.feed_forward);
    match feed_forward {
        FeedForward::Dense => tensors.extend(three.map(T::Dense)),
        FeedForward::Experts => {
            tensors.push(T::Router);
            if spec.router.selection_bias {
                tensors.push(T::RouterBias);
            }
            if spec.shared_ff_size > 0 {
                tensors.extend(three.map(T::Shared));
            }
        }
    }
    if is_mtp {
        tensors.extend([T::MtpEmbeddingNorm, T::MtpStateNorm, T::MtpInput, T::MtpHeadNorm]);
    }
    tensors
}

/// The logical shape of a weight; vectors are one row.
fn expected_shape(spec: &ArchSpec, role: Role) -> (u64, u64) {
    let (rows, cols) = match role {
        Role::Embedding | Role::Head => (spec.vocab_size, spec.hidden_size),
        Role::FinalNorm => (1, spec.hidden_size),
        Role::Padding => (1, 1),
        Role::Expert { projection, .. } => swiglu_shape(spec, projection, spec.expert_ff_size),
        Role::Layer { tensor, .. } => layer_shape(spec, tensor),
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
        T::Router => return (spec.router.n_experts, hidden),
        T::RouterBias => return (1, spec.router.n_experts),
        T::Dense(projection) => return swiglu_shape(spec, projection, spec.dense_ff_size),
        T::Shared(projection) => return swiglu_shape(spec, projection, spec.shared_ff_size),
        _ => {}
    }
    match &spec.attention {
        AttentionSpec::Latent(a) => {
            let indexer = a.indexer.map_or((0, 0), |i| (i.n_heads, i.head_dim));
            match tensor {
                T::QueryDown => (a.q_lora_rank, hidden),
                T::QueryDownNorm => (1, a.q_lora_rank),
                T::QueryUp => {
                    (a.n_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim), a.q_lora_rank)
                }
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
        AttentionSpec::Grouped(a) => {
            let (q, kv) = (a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim);
            match tensor {
                T::Query => (q, hidden),
                T::Key | T::Value => (kv, hidden),
                T::QueryNorm => (1, q),
                T::KeyNorm => (1, kv),
                T::AttentionOutput => (hidden, q),
                _ => (0, 0),
            }
        }
    }
}

/// How a weight is stored, by its header's type, its size and the presence of scales.
fn stored_type(
    weight: FoundTensor<'_>,
    scales: Option<FoundTensor<'_>>,
    rows: u64,
    cols: u64,
) -> Result<StoredType, CatalogueError> {
    let wrong_shape = |tensor: FoundTensor<'_>, expected: Vec<u64>| CatalogueError::WrongShape {
        tensor: tensor.raw.name.to_owned(),
        found: tensor.raw.shape.to_owned(),
        expected,
    };
    let unsupported = |found: String| CatalogueError::UnsupportedType {
        tensor: weight.raw.name.to_owned(),
        found,
    };
    let float = match weight.raw.dtype {
        DType::F32 => Some(StoredType::F32),
        DType::F16 => Some(StoredType::F16),
        DType::Bf16 => Some(StoredType::Bf16),
        DType::U8 | DType::I8 => None,
        DType::Bool
        | DType::F8E5M2
        | DType::F8E4M3
        | DType::F8E8M0
        | DType::I16
        | DType::U16
        | DType::I32
        | DType::U32
        | DType::F64
        | DType::I64
        | DType::U64 => return Err(unsupported(format!("{:?}", weight.raw.dtype))),
    };
    if let Some(stored) = float {
        let shape = &weight.raw.shape;
        let fits = *shape == [rows, cols] || (rows == 1 && *shape == [cols]);
        return if fits {
            Ok(stored)
        } else {
            let expected = if rows == 1 { vec![cols] } else { vec![rows, cols] };
            Err(wrong_shape(weight, expected))
        };
    }
    let Some(scales) = scales else {
        return Err(unsupported(format!("U8 without its {}.qs scales", weight.raw.name)));
    };
    if scales.raw.dtype != DType::F32 {
        let found = format!("U8 with {:?} scales, which are to be F32", scales.raw.dtype);
        return Err(unsupported(found));
    }
    if scales.raw.shape.iter().product::<u64>() != rows {
        return Err(wrong_shape(scales, vec![rows]));
    }
    if weight.raw.shape.len() > 1 && weight.raw.shape[0] != rows {
        return Err(wrong_shape(weight, vec![rows, cols]));
    }
    // Packed tensors may be flat, so the bits follow from the bytes of a row.
    let bytes = weight.span.bytes;
    [StoredType::Int8, StoredType::Int4]
        .into_iter()
        .find(|stored| stored.row_bytes(cols) * rows == bytes)
        .ok_or_else(|| unsupported(format!("{bytes} packed bytes for {rows} x {cols}")))
}
