//! Dense weights: bound by role once, then handed out as matrices from wherever the plan has them.
//!
//! Owns the weights that every token touches, in the type that they are stored in, and which of three ways
//! each of them is held: as a copy (`resident`), as pages of its file (`mapped`), or in a buffer through
//! which it is read for every batch (`streamed`). `bind` knows which tensors there are. Routed experts are
//! `store`'s.

mod bind;
mod mapped;
mod resident;
mod streamed;

use std::ops::Range;
use std::sync::Arc;

use tierkeep_kernels::{ElementType, Kernels, Matrix};
use tierkeep_plans::budget::{DenseResidency, EmbeddingResidency, Line, Streamed};
use tierkeep_plans::catalogue::{
    BlockScale, Catalogue, Group, Packed, PackedBits, ScaleType, StoredType, TENSOR_ALIGN, Tensor,
};
use tierkeep_plans::units::round_up;

use self::bind::Homes;
use self::mapped::Mapped;
use self::streamed::Stream;
use crate::error::EngineError;
use crate::memory::{Account, Buffer};
use crate::shard_io::{ReadFor, ShardFiles};

/// The kernels' name for a stored type.
pub(crate) fn element_of(stored: StoredType) -> ElementType {
    match stored {
        StoredType::F32 => ElementType::F32,
        StoredType::F16 => ElementType::F16,
        StoredType::Bf16 => ElementType::Bf16,
        StoredType::Packed(packed) => ElementType::Packed(packed_of(packed)),
        StoredType::Fp8(scale) => ElementType::Fp8(match scale {
            BlockScale::F32 => tierkeep_kernels::BlockScale::F32,
            BlockScale::F16 => tierkeep_kernels::BlockScale::F16,
            BlockScale::Bf16 => tierkeep_kernels::BlockScale::Bf16,
        }),
        StoredType::MxFp4 => ElementType::MxFp4,
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

/// Where bytes of a weight are.
#[derive(Clone, Copy, Debug)]
struct Place {
    home: Home,
    /// First byte there, and the one after the last.
    start: usize,
    end: usize,
}

/// Who holds bytes of a weight.
#[derive(Clone, Copy, Debug)]
enum Home {
    /// The buffer of this number: one for each layer, and one for what belongs to no layer.
    Buffer(usize),
    /// The window of this number on a mapped file.
    Window(usize),
    /// The stream buffer that is computed on now.
    Stream,
}

/// A weight by its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    weight: Place,
    /// Of no bytes for types without scales.
    scales: Place,
    element: ElementType,
    /// Row of its tensor that its first row is.
    first: usize,
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

/// From the normed state to the queries of latent attention.
#[derive(Clone, Copy, Debug)]
pub(crate) enum QueryWeights {
    /// By way of a compressed query, which is normed.
    Compressed { down: Bound, norm: Bound, up: Bound },
    /// In one product.
    Direct(Bound),
}

/// Weights of latent attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentWeights {
    pub(crate) query: QueryWeights,
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
    /// Biases of queries, keys and values.
    pub(crate) biases: Option<[Bound; 3]>,
    /// Norms of queries and keys, and their epsilon.
    pub(crate) norms: Option<(Bound, Bound, f32)>,
    /// One logit a head.
    pub(crate) sinks: Option<Bound>,
}

/// Weights of a layer's attention.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AttentionWeights {
    Latent(LatentWeights),
    Grouped(GroupedWeights),
}

/// Weights of a router.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouterWeights {
    pub(crate) weight: Bound,
    /// Bias of the product.
    pub(crate) logit_bias: Option<Bound>,
    /// Takes part in the choice and not in the weights.
    pub(crate) selection_bias: Option<Bound>,
}

/// Dense weights of a layer's feed-forward half.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one a layer")]
pub(crate) enum FeedForwardWeights {
    Dense(SwiGlu),
    Experts {
        router: RouterWeights,
        shared: Option<SwiGlu>,
    },
    /// A dense feed-forward in each sub-block, and experts that span both.
    Shortcut {
        router: RouterWeights,
        dense: [SwiGlu; 2],
    },
}

/// Attention of a sub-block between its norms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockWeights {
    pub(crate) input_norm: Bound,
    pub(crate) post_attention_norm: Bound,
    pub(crate) attention: AttentionWeights,
    pub(crate) attention_output: Bound,
    pub(crate) attention_output_bias: Option<Bound>,
}

/// Dense weights of one layer.
#[derive(Clone, Debug)]
pub(crate) struct LayerWeights {
    /// One, or those of each sub-block.
    pub(crate) blocks: Vec<BlockWeights>,
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

/// The head, by the rows that are there at once.
#[derive(Debug)]
enum Head {
    Whole(Bound),
    /// In pieces, each read when its turn comes.
    Pieces(Vec<HeadPiece>),
}

/// Rows of the head that are computed together.
#[derive(Clone, Debug)]
pub(crate) struct HeadPiece {
    /// Which.
    pub(crate) rows: Range<usize>,
    /// Their weights.
    pub(crate) weight: Bound,
}

/// How the plan has dense weights held.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DensePlan<'a> {
    pub(crate) embedding: EmbeddingResidency,
    pub(crate) residency: DenseResidency,
    pub(crate) streamed: &'a Streamed,
}

/// All dense weights of a model.
#[derive(Debug)]
pub(crate) struct Weights {
    buffers: Vec<Buffer>,
    mapped: Mapped,
    stream: Option<Stream>,
    /// Whether each layer passes through the stream.
    is_streamed: Vec<bool>,
    embedding: Embedding,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) final_norm: Bound,
    head: Head,
}

impl Weights {
    /// Binds every role that the forward pass uses and reads or maps what stays; `progress(done, total)`.
    pub(crate) fn load(
        model: &Catalogue,
        plan: DensePlan<'_>,
        account: &mut Account,
        files: &Arc<ShardFiles>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let mut homes = Homes::new(model, plan);
        let layers =
            (0..model.spec.n_layers).map(|l| homes.layer(l)).collect::<Result<Vec<_>, _>>()?;
        let table = match plan.embedding {
            EmbeddingResidency::Resident => Some(homes.embedding()?),
            EmbeddingResidency::RowRead => None,
        };
        let final_norm = homes.final_norm()?;
        let head = match table {
            _ if plan.streamed.head => Head::Pieces(homes.head_pieces()?),
            Some(table) if model.spec.tied_embeddings => Head::Whole(table),
            Some(_) | None => Head::Whole(homes.head()?),
        };
        let embedding = match table {
            Some(table) => Embedding::Resident(table),
            None => {
                let table = homes.embedding_table()?;
                let row = account.buffer(Line::IoBuffers, table.row_buffer_bytes())?;
                Embedding::Rows { table, row }
            }
        };
        let is_streamed = homes.is_streamed();
        let (copies, windows, units) = homes.into_parts();
        let mut done = 0;
        let total = copies.bytes() + windows.iter().map(|span| span.bytes).sum::<u64>();
        let mut progress = |bytes: u64| {
            done += bytes;
            progress(done, total);
        };
        progress(0);
        let buffers = copies.read(account, files, &mut progress)?;
        let mapped = Mapped::new(windows, account, files, &mut progress)?;
        let stream = match units.is_empty() {
            true => None,
            false => Some(Stream::new(units, account, files)?),
        };
        Ok(Self { buffers, mapped, stream, is_streamed, embedding, layers, final_norm, head })
    }

    /// Bytes of a place.
    fn bytes(&self, Place { home, start, end }: Place) -> &[u8] {
        let bytes = match home {
            Home::Buffer(buffer) => self.buffers[buffer].bytes(),
            Home::Window(window) => self.mapped.window(window),
            Home::Stream => self.stream.as_ref().map_or(&[][..], Stream::current),
        };
        &bytes[start..end]
    }

    /// A bound weight as a matrix.
    pub(crate) fn matrix(&self, bound: Bound) -> Result<Matrix<'_>, EngineError> {
        let (data, scales) = (self.bytes(bound.weight), self.bytes(bound.scales));
        let Bound { element, first, rows, cols, .. } = bound;
        Ok(Matrix::part(element, first, rows, cols, data, scales)?)
    }

    /// Begins a batch after which the head is computed `n_heads` times: what is streamed is read from now
    /// on, one buffer ahead.
    pub(crate) fn begin(&mut self, n_heads: usize) {
        if let Some(stream) = &mut self.stream {
            stream.begin(n_heads);
        }
    }

    /// Makes the weights of a sub-block of a layer available, and no longer those of the one before. They
    /// are entered in ascending order; a layer without sub-blocks is one.
    pub(crate) fn enter(&mut self, layer: usize, block: usize) -> Result<(), EngineError> {
        debug_assert!(block < self.layers[layer].blocks.len());
        match &mut self.stream {
            Some(stream) if self.is_streamed[layer] => stream.advance(),
            Some(_) | None => Ok(()),
        }
    }

    /// Makes the next rows of the head available: piece number `at`; `None` after the last.
    pub(crate) fn enter_head(&mut self, at: usize) -> Result<Option<HeadPiece>, EngineError> {
        match &self.head {
            Head::Whole(weight) => {
                let piece = HeadPiece { rows: 0..weight.rows, weight: *weight };
                Ok((at == 0).then_some(piece))
            }
            Head::Pieces(pieces) => {
                let Some(piece) = pieces.get(at).cloned() else { return Ok(None) };
                if let Some(stream) = &mut self.stream {
                    stream.advance()?;
                }
                Ok(Some(piece))
            }
        }
    }

    /// Ends what a failed batch left behind.
    pub(crate) fn recover(&mut self) {
        if let Some(stream) = &mut self.stream {
            stream.rest();
        }
    }

    /// Whether what was computed since the last call was computed on the weights: no page of a mapping was
    /// lost. Cheap, for it is asked after every layer.
    pub(crate) fn check_pages(&self, files: &ShardFiles) -> Result<(), EngineError> {
        self.mapped.check_pages(files)
    }

    /// Whether the mapped files are still what they were when they were mapped.
    pub(crate) fn check_files(&self, files: &ShardFiles) -> Result<(), EngineError> {
        self.mapped.check_files(files)
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
                let element = element_of(table.stored);
                let mut scale: &[u8] = &[];
                if let Some(span) = table.scales {
                    let row_bytes = table.row_scale_bytes();
                    let into = &mut scales[..row_bytes as usize];
                    // One row of scales, which other tokens may have as well.
                    let row = u64::from(token) / element.rows_per_scale() as u64;
                    let at = span.offset + row * row_bytes;
                    files.read(ReadFor::Embedding, span.shard, at, into)?;
                    scale = into;
                }
                let matrix = Matrix::new(element, 1, table.cols as usize, weights, scale)?;
                kernels.decode_row(&matrix, 0, out);
            }
        }
        Ok(())
    }
}
