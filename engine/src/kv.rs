//! What a sequence leaves behind: cached latents or keys and values, and the indexer's keys.
//!
//! Owns the layout of the caches. Rows are stored in the plan's KV type and read back by the same
//! kernels that read weights.

use std::ops::Range;

use tierkeep_kernels::{ElementType, Kernels, Matrix, MatrixError, Pool};
use tierkeep_plans::budget::{KvElement, Line};
use tierkeep_plans::spec::{ArchSpec, AttentionSpec, IndexerKind, LayerSpec};

use crate::compute::SERIAL_ELEMENTS;
use crate::error::EngineError;
use crate::memory::{Account, Buffer};

/// Rows of equal width: row `r` is at `r * width` elements.
#[derive(Debug)]
pub(crate) struct Rows {
    buffer: Buffer,
    element: ElementType,
    width: usize,
}

impl Rows {
    fn new(
        account: &mut Account,
        line: Line,
        element: ElementType,
        rows: usize,
        width: usize,
    ) -> Result<Self, EngineError> {
        let bytes = (rows as u64) * element.row_bytes(width) as u64;
        Ok(Self { buffer: account.committed(line, bytes)?, element, width })
    }

    /// Stores `n` rows from `first` on; `values(i)` is the one of them.
    pub(crate) fn put<'v>(
        &mut self,
        (kernels, pool): (Kernels, &Pool),
        (first, n): (usize, usize),
        values: impl Fn(usize) -> &'v [f32] + Sync,
    ) {
        let element = self.element;
        let bytes = element.row_bytes(self.width);
        let into = &mut self.buffer.bytes_mut()[first * bytes..(first + n) * bytes];
        each_part(pool, n * self.width, into, bytes, |i, into| {
            kernels.encode_row(element, values(i), into);
        });
    }

    /// Bytes of a row.
    fn row_bytes(&self) -> usize {
        self.element.row_bytes(self.width)
    }

    /// Bytes of so many rows.
    pub(crate) fn bytes_of(&self, rows: usize) -> usize {
        rows * self.row_bytes()
    }

    /// `count` rows from `first` as a matrix `(count, width)`.
    pub(crate) fn matrix(&self, first: usize, count: usize) -> Result<Matrix<'_>, MatrixError> {
        let bytes = self.element.row_bytes(self.width);
        let data = &self.buffer.bytes()[first * bytes..(first + count) * bytes];
        Matrix::new(self.element, count, self.width, data, &[])
    }
}

/// Calls `f(i, part)` for each part of `bytes`, side by side where as many elements as `n` are worth it.
fn each_part(
    pool: &Pool,
    n: usize,
    bytes: &mut [u8],
    part: usize,
    f: impl Fn(usize, &mut [u8]) + Sync,
) {
    if n < SERIAL_ELEMENTS {
        bytes.chunks_exact_mut(part.max(1)).enumerate().for_each(|(i, part)| f(i, part));
    } else {
        pool.for_each_chunk(bytes, part, f);
    }
}

/// One latent and one rotary key a token, and an index key where the layer has an indexer.
#[derive(Debug)]
pub(crate) struct LatentCache {
    pub(crate) latents: Rows,
    pub(crate) rotary_keys: Rows,
    pub(crate) index_keys: Option<Rows>,
}

/// Keys and values, head after head. Each head has a row for each position that its layer sees: those
/// of a layer with a sliding window are a ring, in which a position takes the place of the one that
/// left the window.
#[derive(Debug)]
pub(crate) struct GroupedCache {
    pub(crate) keys: Rows,
    pub(crate) values: Rows,
    n_heads: usize,
    /// Rows of a head: `min(context, window)`.
    n_rows: usize,
}

impl GroupedCache {
    /// Rows of all heads.
    pub(crate) fn len(&self) -> usize {
        self.n_heads * self.n_rows
    }

    /// Stores the tokens `tokens` of a batch that begins at position `first`: keys and values
    /// `(batch, heads, width)`.
    pub(crate) fn put(
        &mut self,
        (kernels, pool): (Kernels, &Pool),
        (first, tokens): (usize, Range<usize>),
        [keys, values]: [&[f32]; 2],
    ) {
        let (n_heads, n_rows) = (self.n_heads, self.n_rows);
        for (rows, from) in [(&mut self.keys, keys), (&mut self.values, values)] {
            let (element, width, bytes) = (rows.element, rows.width, rows.row_bytes());
            let n = tokens.len() * n_heads * width;
            let into = &mut rows.buffer.bytes_mut()[..n_heads * n_rows * bytes];
            each_part(pool, n, into, n_rows * bytes, |head, into| {
                for token in tokens.clone() {
                    let row = (first + token) % n_rows;
                    let start = (token * n_heads + head) * width;
                    let into = &mut into[row * bytes..(row + 1) * bytes];
                    kernels.encode_row(element, &from[start..start + width], into);
                }
            });
        }
    }

    /// Bytes of keys and values that a token which sees `visible` positions goes over.
    pub(crate) fn visible_bytes(&self, visible: usize) -> usize {
        let rows = self.n_heads * visible.min(self.n_rows);
        self.keys.bytes_of(rows) + self.values.bytes_of(rows)
    }

    /// How many positions from `first` can be stored before one takes the place of another that the
    /// first of them sees: all, until the ring is full, and one at a time from then on.
    pub(crate) fn room(&self, first: usize) -> usize {
        self.n_rows.saturating_sub(first).max(1)
    }

    /// The rows of a head that the newest position, `visible - 1`, sees, in ascending position: to the
    /// end of the ring, and from its beginning.
    pub(crate) fn visible(&self, head: usize, visible: usize) -> [Range<usize>; 2] {
        let (base, end) = (head * self.n_rows, (head + 1) * self.n_rows);
        if visible <= self.n_rows {
            return [base..base + visible, base..base];
        }
        let oldest = base + visible % self.n_rows;
        [oldest..end, base..oldest]
    }
}

/// The cache of one attention.
#[derive(Debug)]
pub(crate) enum LayerCache {
    Latent(LatentCache),
    Grouped(GroupedCache),
}

/// The caches of one sequence.
#[derive(Debug)]
pub(crate) struct KvCache {
    /// One for each attention: those of a layer follow each other.
    pub(crate) caches: Vec<LayerCache>,
    /// Where each layer's begin.
    first: Vec<usize>,
    /// Positions filled.
    pub(crate) len: usize,
    /// Positions that there is room for.
    pub(crate) context: usize,
    /// A batch that failed took the places of positions that the sequence still sees.
    pub(crate) is_lost: bool,
}

impl KvCache {
    pub(crate) fn new(
        spec: &ArchSpec,
        context: usize,
        kv: KvElement,
        account: &mut Account,
    ) -> Result<Self, EngineError> {
        let element = match kv {
            KvElement::F32 => ElementType::F32,
            KvElement::F16 => ElementType::F16,
            KvElement::Bf16 => ElementType::Bf16,
        };
        let mut rows = |line, rows, width| Rows::new(account, line, element, rows, width);
        let mut first = Vec::with_capacity(spec.n_layers);
        let mut attentions: Vec<&LayerSpec> = Vec::new();
        for layer in &spec.layers {
            first.push(attentions.len());
            attentions.extend(std::iter::repeat_n(layer, layer.n_attentions()));
        }
        let caches = attentions
            .into_iter()
            .map(|layer| match &spec.attention {
                AttentionSpec::Latent(a) => Ok(LayerCache::Latent(LatentCache {
                    latents: rows(Line::KvCache, context, a.kv_lora_rank)?,
                    rotary_keys: rows(Line::KvCache, context, a.qk_rope_head_dim)?,
                    index_keys: match (a.indexer, layer.indexer) {
                        (Some(indexer), IndexerKind::Full) => {
                            Some(rows(Line::IndexerKeys, context, indexer.head_dim)?)
                        }
                        _ => None,
                    },
                })),
                AttentionSpec::Grouped(a) => {
                    let n_rows = layer.cached_positions(context as u64) as usize;
                    Ok(LayerCache::Grouped(GroupedCache {
                        keys: rows(Line::KvCache, a.n_kv_heads * n_rows, a.head_dim)?,
                        values: rows(Line::KvCache, a.n_kv_heads * n_rows, a.head_dim)?,
                        n_heads: a.n_kv_heads,
                        n_rows,
                    }))
                }
            })
            .collect::<Result<_, EngineError>>()?;
        Ok(Self { caches, first, len: 0, context, is_lost: false })
    }

    /// The cache of a layer's attention, by its sub-block.
    pub(crate) fn cache(&mut self, layer: usize, block: usize) -> &mut LayerCache {
        &mut self.caches[self.first[layer] + block]
    }

    /// Forgets the sequence.
    pub(crate) fn clear(&mut self) {
        self.len = 0;
        self.is_lost = false;
    }

    /// Ends a batch that failed. The next position sees the last `n_rows - 1`; a full window has lost some
    /// of them where the batch stored more than one.
    pub(crate) fn abandon(&mut self, batch: usize) {
        let overwrites = |layer: &LayerCache| match layer {
            LayerCache::Latent(_) => false,
            LayerCache::Grouped(cache) => self.len + batch > cache.n_rows,
        };
        self.is_lost |= self.len > 0 && batch > 1 && self.caches.iter().any(overwrites);
    }
}
