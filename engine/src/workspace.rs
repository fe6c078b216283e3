//! The buffers of the forward pass, allocated once against the activations line. Owns their shapes;
//! the arithmetic is in `attention` and `feed_forward`.

use tierkeep_kernels::{Pool, quantised_bytes};
use tierkeep_plans::budget::{self, Line, Numerics};
use tierkeep_plans::spec::{ArchSpec, AttentionSpec, GroupedAttention};

use crate::compute::add;
use crate::error::EngineError;
use crate::memory::Account;

/// Buffers of latent attention.
#[derive(Debug)]
pub(crate) struct LatentBuffers {
    /// `(batch, q_lora_rank)`.
    pub(crate) compressed_query: Vec<f32>,
    /// `(batch, n_heads, qk_nope_head_dim + qk_rope_head_dim)`.
    pub(crate) query: Vec<f32>,
    /// `(batch, kv_lora_rank + qk_rope_head_dim)`.
    pub(crate) latent: Vec<f32>,
    /// `(batch, n_heads, v_head_dim)`.
    pub(crate) output: Vec<f32>,
    /// `(n_heads, block, kv_lora_rank)`: absorbed queries; then the heads' values in their places.
    pub(crate) absorbed: Vec<f32>,
    /// `(block, n_heads, kv_lora_rank)`: weighted latents.
    pub(crate) weighted: Vec<f32>,
    /// Of each thread, for `columns` heads: queries, rotary queries and scores.
    pub(crate) scratch: Vec<f32>,
    /// Heads that go over the cache together, at most.
    pub(crate) columns: usize,
    /// Tokens that go through attention together, at most.
    pub(crate) block: usize,
    /// Present where the family has an indexer.
    pub(crate) indexer: Option<IndexerBuffers>,
}

/// Buffers of the indexer.
#[derive(Debug)]
pub(crate) struct IndexerBuffers {
    /// `(batch, index heads, index head_dim)`.
    pub(crate) query: Vec<f32>,
    /// `(batch, index head_dim)`.
    pub(crate) key: Vec<f32>,
    /// `(batch, index heads)`.
    pub(crate) head_weights: Vec<f32>,
    /// `(threads, positions of a task, index heads)`.
    pub(crate) scratch: Vec<f32>,
    /// `(context)`: scores of one token.
    pub(crate) scores: Vec<f32>,
    /// `(context)`: positions of one token, to be ordered.
    pub(crate) order: Vec<u32>,
    /// `(batch, visible)`: the positions that each token sees, ascending; outlives the layer.
    pub(crate) selection: Vec<u32>,
    /// `(batch)`: how many positions each token sees.
    pub(crate) selected: Vec<u32>,
    /// Selections that a tie decided, so far.
    pub(crate) ties: u64,
}

impl IndexerBuffers {
    /// Positions that a selection has room for.
    pub(crate) fn width(&self) -> usize {
        self.selection.len() / self.selected.len()
    }

    /// The positions that a token of the batch sees, ascending.
    pub(crate) fn selected(&self, token: usize) -> &[u32] {
        let start = token * self.width();
        &self.selection[start..start + self.selected[token] as usize]
    }

    /// Room for the positions that a token of the batch sees.
    pub(crate) fn selection_mut(&mut self, token: usize) -> &mut [u32] {
        let width = self.width();
        &mut self.selection[token * width..(token + 1) * width]
    }
}

/// Buffers of grouped-query attention.
#[derive(Debug)]
pub(crate) struct GroupedBuffers {
    /// `(batch, n_heads, head_dim)`, then twice `(batch, n_kv_heads, head_dim)`: queries, keys and values.
    /// The heads' outputs take the places of the queries.
    pub(crate) projected: Vec<f32>,
    /// `(batch, n_heads, head_dim)`: outputs in the order in which they are computed.
    pub(crate) output: Vec<f32>,
    /// Of each thread, for `columns` queries: themselves, and scores in the layer that sees most positions.
    pub(crate) scratch: Vec<f32>,
    /// Queries that go over the cache together, at most.
    pub(crate) columns: usize,
}

impl GroupedBuffers {
    /// Queries, keys and values of a batch of `n`.
    pub(crate) fn parts(&mut self, spec: &GroupedAttention, n: usize) -> [&mut [f32]; 3] {
        let (query, kv) = (n * spec.n_heads * spec.head_dim, n * spec.n_kv_heads * spec.head_dim);
        let (query, rest) = self.projected[..query + 2 * kv].split_at_mut(query);
        let (key, value) = rest.split_at_mut(kv);
        [query, key, value]
    }
}

/// Buffers of the attention kind that the model has.
#[derive(Debug)]
pub(crate) enum AttentionBuffers {
    Latent(Box<LatentBuffers>),
    Grouped(GroupedBuffers),
}

/// Every buffer of the forward pass.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// `(batch, hidden)`: the residual stream.
    pub(crate) states: Vec<f32>,
    /// `(batch, hidden)`: its norm.
    pub(crate) normed: Vec<f32>,
    /// `(batch, hidden)`: the norm that experts take, while a second sub-block uses the other. Empty
    /// where no layer has one.
    pub(crate) waiting: Vec<f32>,
    /// `(batch, hidden)`: what a block adds to it.
    pub(crate) block: Vec<f32>,
    /// `(batch, hidden)`: the tokens of one expert, or the shared experts' output.
    pub(crate) gathered: Vec<f32>,
    /// `(2, batch, inner)`: gate and up of a dense or shared SwiGLU.
    pub(crate) inner: Vec<f32>,
    /// `(2, rows, expert_ff)`: gate and up of routed experts.
    pub(crate) expert_inner: Vec<f32>,
    /// `(rows, hidden)`: outputs of routed experts.
    pub(crate) expert_output: Vec<f32>,
    /// `(batch, n_outputs)`: of the router, experts without weights included.
    pub(crate) router_scores: Vec<f32>,
    /// `(batch, n_experts_active)`, in descending router weight, ties by lower id.
    pub(crate) chosen: Vec<u32>,
    /// `(batch, n_experts_active)`: their weights.
    pub(crate) chosen_weights: Vec<f32>,
    /// Weights of the norm, or of the bias, in use.
    pub(crate) norm: Vec<f32>,
    /// Cosines, then sines, of each position of the batch: `(batch, 2, rope dim / 2)`.
    pub(crate) rotation: Vec<f32>,
    /// `(vocab)`.
    pub(crate) logits: Vec<f32>,
    pub(crate) attention: AttentionBuffers,
}

impl Workspace {
    pub(crate) fn new(
        spec: &ArchSpec,
        batch: usize,
        context: usize,
        threads: usize,
        account: &mut Account,
    ) -> Result<Self, EngineError> {
        let mut floats = |count: usize| account.elements::<f32>(Line::Activations, count);
        let hidden = spec.hidden_size;
        let n_active = spec.router.n_experts_active;
        let rows = batch.max(n_active);
        let widest = match &spec.attention {
            AttentionSpec::Latent(a) => {
                a.q_lora_rank.max(a.kv_lora_rank).max(2 * a.indexer.map_or(0, |i| i.head_dim))
            }
            AttentionSpec::Grouped(a) => a.n_heads * a.head_dim,
        };
        let expert_bias = if spec.expert_biases { 2 * spec.expert_ff_size } else { 0 };
        Ok(Self {
            states: floats(batch * hidden)?,
            normed: floats(batch * hidden)?,
            waiting: floats(if spec.has_shortcut() { batch * hidden } else { 0 })?,
            block: floats(batch * hidden)?,
            gathered: floats(batch * hidden)?,
            inner: floats(2 * batch * spec.dense_ff_size.max(spec.shared_ff_size))?,
            expert_inner: floats(2 * rows * spec.expert_ff_size)?,
            expert_output: floats(rows * hidden)?,
            router_scores: floats(batch * spec.router.n_outputs())?,
            chosen_weights: floats(batch * n_active)?,
            norm: floats(widest.max(hidden).max(spec.router.n_outputs()).max(expert_bias))?,
            rotation: floats(batch * spec.rope.dim)?,
            logits: floats(spec.vocab_size)?,
            attention: AttentionBuffers::new(spec, batch, context, threads, account)?,
            chosen: account.elements(Line::Activations, batch * n_active)?,
        })
    }
}

impl Workspace {
    /// Adds the first `n` rows of what a block made to the stream.
    pub(crate) fn add_block(&mut self, pool: &Pool, n: usize, hidden: usize) {
        add(pool, &mut self.states[..n * hidden], &self.block[..n * hidden], hidden);
    }

    /// Keeps the first `n` elements of the norm for experts that take it after another sub-block.
    pub(crate) fn keep_normed(&mut self, n: usize) {
        self.waiting[..n].copy_from_slice(&self.normed[..n]);
    }

    /// Brings back what was kept.
    pub(crate) fn restore_normed(&mut self) {
        std::mem::swap(&mut self.normed, &mut self.waiting);
    }
}

/// Bytes of the vectors that one call of the kernels rounds at most, and the elements of the widest; `None` where
/// none are.
pub(crate) fn rounded_bytes(
    spec: &ArchSpec,
    numerics: Numerics,
    batch: usize,
) -> Option<(usize, usize)> {
    match numerics {
        Numerics::Exact => return None,
        Numerics::Fast => {}
    }
    let of = |count: usize, width: usize| count * quantised_bytes(width);
    let rows = batch.max(spec.router.n_experts_active);
    let attention = match &spec.attention {
        AttentionSpec::Latent(a) => (a.n_heads * a.v_head_dim).max(a.q_lora_rank),
        AttentionSpec::Grouped(a) => a.n_heads * a.head_dim,
    };
    let inner = spec.dense_ff_size.max(spec.shared_ff_size);
    let widest = spec.hidden_size.max(inner).max(attention).max(spec.expert_ff_size);
    // Products of one vector with weights of several stored types round it once for each.
    let bytes = [
        of(3 * batch, spec.hidden_size),
        of(2 * rows, spec.hidden_size),
        of(rows, spec.expert_ff_size),
        of(batch, inner),
        of(batch, attention),
    ];
    bytes.into_iter().max().map(|bytes| (bytes, widest))
}

/// Positions that the layer which sees most of them sees in a sequence of `context`.
fn most_visible(spec: &ArchSpec, context: usize) -> usize {
    let visible = spec.layers.iter().map(|layer| layer.cached_positions(context as u64) as usize);
    visible.max().unwrap_or(context)
}

impl AttentionBuffers {
    fn new(
        spec: &ArchSpec,
        batch: usize,
        context: usize,
        threads: usize,
        account: &mut Account,
    ) -> Result<Self, EngineError> {
        let line = Line::Activations;
        let mut floats = |count: usize| account.elements::<f32>(line, count);
        match &spec.attention {
            AttentionSpec::Latent(a) => {
                let visible = a.indexer.map_or(context, |i| context.min(i.top_k));
                let compressed_query = floats(batch * a.q_lora_rank)?;
                let query = floats(batch * a.n_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim))?;
                let latent = floats(batch * (a.kv_lora_rank + a.qk_rope_head_dim))?;
                let output = floats(batch * a.n_heads * a.v_head_dim)?;
                let columns = budget::score_columns(visible as u64) as usize;
                let block = batch.min(budget::LATENT_BLOCK as usize);
                let rank = a.kv_lora_rank;
                let absorbed = floats(block * a.n_heads * rank.max(a.v_head_dim))?;
                let weighted = floats(block * a.n_heads * rank)?;
                let of_columns = columns * (rank + a.qk_rope_head_dim + visible);
                let scratch = floats(threads * of_columns.max(block * rank))?;
                let indexer = match a.indexer {
                    None => None,
                    Some(i) => Some(IndexerBuffers {
                        query: floats(batch * i.n_heads * i.head_dim)?,
                        key: floats(batch * i.head_dim)?,
                        head_weights: floats(batch * i.n_heads)?,
                        scratch: floats(threads * budget::INDEX_CHUNK as usize * i.n_heads)?,
                        scores: floats(context)?,
                        order: account.elements(line, context)?,
                        selection: account.elements(line, batch * visible)?,
                        selected: account.elements(line, batch)?,
                        ties: 0,
                    }),
                };
                Ok(Self::Latent(Box::new(LatentBuffers {
                    compressed_query,
                    query,
                    latent,
                    output,
                    absorbed,
                    weighted,
                    scratch,
                    columns,
                    block,
                    indexer,
                })))
            }
            AttentionSpec::Grouped(a) => {
                let visible = most_visible(spec, context);
                let columns = budget::score_columns(visible as u64) as usize;
                Ok(Self::Grouped(GroupedBuffers {
                    projected: floats(batch * (a.n_heads + 2 * a.n_kv_heads) * a.head_dim)?,
                    output: floats(batch * a.n_heads * a.head_dim)?,
                    scratch: floats(threads * columns * (a.head_dim + visible))?,
                    columns,
                }))
            }
        }
    }
}
