//! Dense weights: bound by role once, read into memory once, then handed out as matrices.
//!
//! Owns the weights that every token touches, in the type that they are stored in. Routed experts
//! are `store`'s.

use std::collections::HashMap;

use tierkeep_kernels::{ElementType, Kernels, Matrix};
use tierkeep_plans::budget::{EmbeddingResidency, Line, resident_tensors};
use tierkeep_plans::catalogue::{
    Catalogue, Group, LayerTensor, Packed, PackedBits, Projection, Role, ScaleType, Span,
    StoredType, TENSOR_ALIGN, Tensor,
};
use tierkeep_plans::spec::{AttentionSpec, FeedForward, IndexerKind, QkNorm};
use tierkeep_plans::units::round_up;

use crate::error::EngineError;
use crate::memory::{Account, Buffer};
use crate::shard_io::{ReadFor, ShardFiles};

/// The kernels' name for a stored type.
pub(crate) fn element_of(stored: StoredType) -> Result<ElementType, EngineError> {
    match stored {
        StoredType::F32 => Ok(ElementType::F32),
        StoredType::F16 => Ok(ElementType::F16),
        StoredType::Bf16 => Ok(ElementType::Bf16),
        StoredType::Packed(packed) => Ok(ElementType::Packed(packed_of(packed))),
        StoredType::Fp8 | StoredType::MxFp4 => Err(EngineError::NoKernel { stored: stored.name() }),
    }
}

/// The kernels' name for packed integers.
fn packed_of(packed: Packed) -> tierkeep_kernels::Packed {
    use tierkeep_kernels as kernels;
    kernels::Packed {
        bits: match packed.bits {
            PackedBits::Eight => kernels::PackedBits::Eight,
            PackedBits::Four => kernels::PackedBits::Four,
            PackedBits::Two => kernels::PackedBits::Two,
        },
        group: match packed.group {
            Group::Row => kernels::Group::Row,
            Group::Of128 => kernels::Group::Of128,
            Group::Of64 => kernels::Group::Of64,
            Group::Of32 => kernels::Group::Of32,
        },
        scale: match packed.scale {
            ScaleType::F32 => kernels::ScaleType::F32,
            ScaleType::F16 => kernels::ScaleType::F16,
        },
    }
}

/// A weight by its place in the dense buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    buffer: usize,
    weight: (usize, usize),
    scales: (usize, usize),
    element: ElementType,
    rows: usize,
    pub(crate) cols: usize,
}

/// Weights of one SwiGLU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SwiGlu {
    pub(crate) gate: Bound,
    pub(crate) up: Bound,
    pub(crate) down: Bound,
}

/// Weights of a layer's indexer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndexerWeights {
    pub(crate) query: Bound,
    pub(crate) key: Bound,
    pub(crate) key_norm: Bound,
    pub(crate) key_norm_bias: Bound,
    pub(crate) head_weights: Bound,
}

/// Weights of latent attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentWeights {
    pub(crate) query_down: Bound,
    pub(crate) query_down_norm: Bound,
    pub(crate) query_up: Bound,
    pub(crate) latent_down: Bound,
    pub(crate) latent_norm: Bound,
    pub(crate) latent_up: Bound,
    pub(crate) indexer: Option<IndexerWeights>,
}

/// Weights of grouped-query attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupedWeights {
    pub(crate) query: Bound,
    pub(crate) key: Bound,
    pub(crate) value: Bound,
    /// Full-width norms of queries and keys, and their epsilon.
    pub(crate) norms: Option<(Bound, Bound, f32)>,
}

/// Weights of a layer's attention. A model has one kind in all its layers, so that nothing is saved
/// by keeping the larger one elsewhere.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one a layer, all of one kind")]
pub(crate) enum AttentionWeights {
    Latent(LatentWeights),
    Grouped(GroupedWeights),
}

/// Dense weights of a layer's feed-forward half.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FeedForwardWeights {
    Dense(SwiGlu),
    Experts { router: Bound, bias: Option<Bound>, shared: Option<SwiGlu> },
}

/// Dense weights of one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerWeights {
    pub(crate) input_norm: Bound,
    pub(crate) post_attention_norm: Bound,
    pub(crate) attention: AttentionWeights,
    pub(crate) attention_output: Bound,
    pub(crate) feed_forward: FeedForwardWeights,
}

/// Where embedding rows come from.
#[derive(Debug)]
enum Embedding {
    Resident(Bound),
    /// Row by row from disk, through one small buffer.
    Rows {
        table: Tensor,
        row: Buffer,
    },
}

/// All dense weights of a model.
#[derive(Debug)]
pub(crate) struct Weights {
    buffers: Vec<Buffer>,
    embedding: Embedding,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) final_norm: Bound,
    pub(crate) head: Bound,
}

impl Weights {
    /// Binds every role that the forward pass uses and reads the bytes; `progress(done, total)`.
    pub(crate) fn load(
        model: &Catalogue,
        embedding: EmbeddingResidency,
        account: &mut Account,
        files: &ShardFiles,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let by_role = model.by_role();
        let mut loader = Loader::new(model, &by_role, embedding);
        let layers =
            (0..model.spec.n_layers).map(|l| loader.layer(l)).collect::<Result<Vec<_>, _>>()?;
        let embedding = match embedding {
            EmbeddingResidency::Resident => Embedding::Resident(loader.bind(Role::Embedding)?),
            EmbeddingResidency::RowRead => embedding_rows(model, &by_role, account)?,
        };
        let final_norm = loader.bind(Role::FinalNorm)?;
        let head = match (model.spec.tied_embeddings, &embedding) {
            (true, Embedding::Resident(table)) => *table,
            _ => loader.bind(Role::Head)?,
        };
        let buffers = loader.read(account, files, progress)?;
        Ok(Self { buffers, embedding, layers, final_norm, head })
    }

    /// A bound weight as a matrix.
    pub(crate) fn matrix(&self, bound: Bound) -> Result<Matrix<'_>, EngineError> {
        let bytes = self.buffers[bound.buffer].bytes();
        let data = &bytes[bound.weight.0..bound.weight.1];
        let scales = &bytes[bound.scales.0..bound.scales.1];
        Ok(Matrix::new(bound.element, bound.rows, bound.cols, data, scales)?)
    }

    /// Decodes a vector (a norm, a bias) into `out`, which is cut to its length.
    pub(crate) fn vector<'o>(
        &self,
        kernels: Kernels,
        bound: Bound,
        out: &'o mut [f32],
    ) -> Result<&'o [f32], EngineError> {
        let out = &mut out[..bound.cols];
        kernels.decode_row(&self.matrix(bound)?, 0, out);
        Ok(out)
    }

    /// Decodes the embedding of `token` into `out` (hidden_size).
    pub(crate) fn embed(
        &mut self,
        kernels: Kernels,
        files: &ShardFiles,
        token: u32,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        match &mut self.embedding {
            Embedding::Resident(table) => {
                let table = *table;
                kernels.decode_row(&self.matrix(table)?, token as usize, out);
            }
            Embedding::Rows { table, row } => {
                let row_bytes = table.stored.row_bytes(table.cols) as usize;
                let (weights, scales) =
                    row.bytes_mut().split_at_mut(round_up(row_bytes as u64, TENSOR_ALIGN) as usize);
                let weights = &mut weights[..row_bytes];
                let at = table.weight.offset + u64::from(token) * row_bytes as u64;
                files.read(ReadFor::Embedding, table.weight.shard, at, weights)?;
                let mut scale: &[u8] = &[];
                if let Some(span) = table.scales {
                    let row_bytes = table.row_scale_bytes();
                    let into = &mut scales[..row_bytes as usize];
                    let at = span.offset + u64::from(token) * row_bytes;
                    files.read(ReadFor::Embedding, span.shard, at, into)?;
                    scale = into;
                }
                let element = element_of(table.stored)?;
                let matrix = Matrix::new(element, 1, table.cols as usize, weights, scale)?;
                kernels.decode_row(&matrix, 0, out);
            }
        }
        Ok(())
    }
}

fn embedding_rows(
    model: &Catalogue,
    by_role: &HashMap<Role, &Tensor>,
    account: &mut Account,
) -> Result<Embedding, EngineError> {
    let table = **by_role
        .get(&Role::Embedding)
        .ok_or_else(|| EngineError::Unbound { tensor: model.name_of(Role::Embedding) })?;
    let row = account.buffer(Line::IoBuffers, table.row_buffer_bytes())?;
    Ok(Embedding::Rows { table, row })
}

/// Binds roles to places in one buffer a layer, and one for what belongs to no layer.
struct Loader<'a> {
    model: &'a Catalogue,
    resident: HashMap<Role, &'a Tensor>,
    /// Length of each buffer so far.
    lengths: Vec<u64>,
    /// What is to be read: buffer, place in it, place on disk.
    reads: Vec<(usize, usize, Span)>,
}

impl<'a> Loader<'a> {
    fn new(
        model: &'a Catalogue,
        by_role: &HashMap<Role, &'a Tensor>,
        embedding: EmbeddingResidency,
    ) -> Self {
        let resident = resident_tensors(model, embedding)
            .filter_map(|t| by_role.get_key_value(&t.role))
            .map(|(role, tensor)| (*role, *tensor))
            .collect();
        Self { model, resident, lengths: vec![0; model.spec.n_layers + 1], reads: Vec::new() }
    }

    fn bind(&mut self, role: Role) -> Result<Bound, EngineError> {
        let tensor = *self
            .resident
            .get(&role)
            .ok_or_else(|| EngineError::Unbound { tensor: self.model.name_of(role) })?;
        let buffer = match role {
            Role::Layer { layer, .. } => layer as usize,
            _ => self.model.spec.n_layers,
        };
        let mut place = |span: Span| {
            let start = self.lengths[buffer];
            self.lengths[buffer] = round_up(start + span.bytes, TENSOR_ALIGN);
            self.reads.push((buffer, start as usize, span));
            (start as usize, (start + span.bytes) as usize)
        };
        Ok(Bound {
            buffer,
            weight: place(tensor.weight),
            scales: tensor.scales.map_or((0, 0), place),
            element: element_of(tensor.stored)?,
            rows: tensor.rows as usize,
            cols: tensor.cols as usize,
        })
    }

    fn swiglu(
        &mut self,
        layer: usize,
        of: fn(Projection) -> LayerTensor,
    ) -> Result<SwiGlu, EngineError> {
        let mut bind =
            |projection| self.bind(Role::Layer { layer: layer as u32, tensor: of(projection) });
        Ok(SwiGlu {
            gate: bind(Projection::Gate)?,
            up: bind(Projection::Up)?,
            down: bind(Projection::Down)?,
        })
    }

    fn layer(&mut self, layer: usize) -> Result<LayerWeights, EngineError> {
        use LayerTensor as T;
        let spec = &self.model.spec;
        let mut bind = |tensor| self.bind(Role::Layer { layer: layer as u32, tensor });
        let input_norm = bind(T::InputNorm)?;
        let post_attention_norm = bind(T::PostAttentionNorm)?;
        let attention = match &spec.attention {
            AttentionSpec::Latent(_) => AttentionWeights::Latent(LatentWeights {
                query_down: bind(T::QueryDown)?,
                query_down_norm: bind(T::QueryDownNorm)?,
                query_up: bind(T::QueryUp)?,
                latent_down: bind(T::LatentDown)?,
                latent_norm: bind(T::LatentNorm)?,
                latent_up: bind(T::LatentUp)?,
                indexer: match spec.layers[layer].indexer {
                    IndexerKind::None | IndexerKind::Shared => None,
                    IndexerKind::Full => Some(IndexerWeights {
                        query: bind(T::IndexerQuery)?,
                        key: bind(T::IndexerKey)?,
                        key_norm: bind(T::IndexerKeyNorm)?,
                        key_norm_bias: bind(T::IndexerKeyNormBias)?,
                        head_weights: bind(T::IndexerHeadWeights)?,
                    }),
                },
            }),
            AttentionSpec::Grouped(grouped) => AttentionWeights::Grouped(GroupedWeights {
                query: bind(T::Query)?,
                key: bind(T::Key)?,
                value: bind(T::Value)?,
                norms: match grouped.qk_norm {
                    QkNorm::FullWidth => {
                        Some((bind(T::QueryNorm)?, bind(T::KeyNorm)?, spec.norm_eps))
                    }
                    // `supports` refuses norms per head.
                    QkNorm::None | QkNorm::PerHead => None,
                },
            }),
        };
        let attention_output = bind(T::AttentionOutput)?;
        let feed_forward = match spec.layers[layer].feed_forward {
            FeedForward::Dense => FeedForwardWeights::Dense(self.swiglu(layer, T::Dense)?),
            // `supports` refuses the shortcut.
            FeedForward::Experts | FeedForward::Shortcut => FeedForwardWeights::Experts {
                router: bind(T::Router)?,
                bias: if spec.router.selection_bias { Some(bind(T::RouterBias)?) } else { None },
                shared: if spec.shared_ff_size > 0 {
                    Some(self.swiglu(layer, T::Shared)?)
                } else {
                    None
                },
            },
        };
        Ok(LayerWeights {
            input_norm,
            post_attention_norm,
            attention,
            attention_output,
            feed_forward,
        })
    }

    /// Allocates the buffers and reads what was bound.
    fn read(
        self,
        account: &mut Account,
        files: &ShardFiles,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<Buffer>, EngineError> {
        let mut buffers = self
            .lengths
            .iter()
            .map(|&bytes| account.buffer(Line::DenseWeights, bytes))
            .collect::<Result<Vec<_>, _>>()?;
        let total: u64 = self.reads.iter().map(|(_, _, span)| span.bytes).sum();
        let mut done = 0;
        progress(0, total);
        for (buffer, start, span) in self.reads {
            let into = &mut buffers[buffer].bytes_mut()[start..start + span.bytes as usize];
            files.read(ReadFor::Dense, span.shard, span.offset, into)?;
            done += span.bytes;
            progress(done, total);
        }
        Ok(buffers)
    }
}
