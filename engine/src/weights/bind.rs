//! Which tensors the forward pass uses, and where the plan has each of them. Owns the binding of roles to
//! places; reads and allocates nothing.

use std::collections::HashMap;

use tierkeep_plans::budget::{DenseResidency, resident_tensors};
use tierkeep_plans::catalogue::{
    Catalogue, LayerTensor, Projection, Role, Span, TENSOR_ALIGN, Tensor,
};
use tierkeep_plans::spec::{
    AttentionSpec, FeedForward, GroupedAttention, IndexerKind, LayerSpec, QkNorm, RouterSpec,
};
use tierkeep_plans::units::round_up;

use super::resident::Copies;
use super::streamed::{Unit, Units};
use super::{
    AttentionWeights, BlockWeights, Bound, DensePlan, FeedForwardWeights, GroupedWeights,
    HeadPiece, Home, IndexerWeights, LatentWeights, LayerWeights, Place, QueryWeights,
    RouterWeights, SwiGlu, element_of,
};
use crate::error::EngineError;

/// A sub-block of a layer, by both their numbers; a layer without any is one.
type Part = (usize, usize);

/// Binds roles to places, as the plan has them.
pub(super) struct Homes<'a> {
    model: &'a Catalogue,
    plan: DensePlan<'a>,
    by_role: HashMap<Role, &'a Tensor>,
    /// Roles that stay in memory for the whole run, or pass through it.
    bindable: HashMap<Role, &'a Tensor>,
    copies: Copies,
    windows: Vec<Span>,
    /// The first unit of each layer that is streamed: one for each of its sub-blocks.
    first_units: Vec<Option<usize>>,
    units: Units,
}

impl<'a> Homes<'a> {
    pub(super) fn new(model: &'a Catalogue, plan: DensePlan<'a>) -> Self {
        let by_role = model.by_role();
        let bindable = resident_tensors(model, plan.embedding)
            .filter_map(|t| by_role.get_key_value(&t.role))
            .map(|(role, tensor)| (*role, *tensor))
            .collect();
        // A buffer for each layer, and one for what belongs to no layer.
        let copies = Copies::new(model.spec.n_layers + 1);
        let mut n_units = 0;
        let first_units = (0..model.spec.n_layers).map(|layer| {
            let is_streamed = plan.streamed.layers.binary_search(&(layer as u32)).is_ok();
            let first = n_units;
            n_units += if is_streamed { model.spec.layers[layer].n_attentions() } else { 0 };
            is_streamed.then_some(first)
        });
        let first_units = first_units.collect();
        let units = Units::new(n_units);
        Self { model, plan, by_role, bindable, copies, windows: Vec::new(), first_units, units }
    }

    /// What is copied, what is mapped, and what is streamed.
    pub(super) fn into_parts(self) -> (Copies, Vec<Span>, Units) {
        (self.copies, self.windows, self.units)
    }

    /// Whether each layer is streamed.
    pub(super) fn is_streamed(&self) -> Vec<bool> {
        self.first_units.iter().map(Option::is_some).collect()
    }

    /// The unit that a part of a layer is streamed in, if it is.
    fn unit_of(&self, (layer, block): Part) -> Option<usize> {
        Some((*self.first_units.get(layer)?)? + block)
    }

    fn unbound(&self, role: Role) -> EngineError {
        EngineError::Unbound { tensor: self.model.name_of(role) }
    }

    fn bind(&mut self, role: Role) -> Result<Bound, EngineError> {
        let tensor = *self.bindable.get(&role).ok_or_else(|| self.unbound(role))?;
        let part = match role {
            // Routers of layers with sub-blocks are the first one's.
            Role::Layer { layer, .. } => Some((layer as usize, 0)),
            Role::SubBlock { layer, block, .. } => Some((layer as usize, block as usize)),
            Role::Embedding | Role::Head | Role::FinalNorm => None,
            // Routed experts are `store`'s, and padding is nobody's.
            Role::Expert { .. } | Role::FusedExperts { .. } | Role::Padding => {
                return Err(self.unbound(role));
            }
        };
        Ok(Bound {
            weight: self.place(part, tensor.weight),
            scales: self.scales(part, tensor.scales),
            element: element_of(tensor.stored),
            first: 0,
            rows: tensor.rows as usize,
            cols: tensor.cols as usize,
        })
    }

    fn scales(&mut self, part: Option<Part>, scales: Option<Span>) -> Place {
        match scales {
            Some(span) => self.place(part, span),
            None => Place { home: Home::Buffer(self.model.spec.n_layers), start: 0, end: 0 },
        }
    }

    /// A place for a part of a layer's weight, or of one that belongs to no layer.
    fn place(&mut self, part: Option<Part>, span: Span) -> Place {
        let bytes = span.bytes as usize;
        if let Some(unit) = part.and_then(|part| self.unit_of(part)) {
            let start = self.units.part_mut(unit).add(span);
            return Place { home: Home::Stream, start, end: start + bytes };
        }
        match self.plan.residency {
            DenseResidency::Resident => {
                let buffer = part.map_or(self.model.spec.n_layers, |(layer, _)| layer);
                let start = self.copies.add(buffer, span);
                Place { home: Home::Buffer(buffer), start, end: start + bytes }
            }
            DenseResidency::Mapped => {
                self.windows.push(span);
                Place { home: Home::Window(self.windows.len() - 1), start: 0, end: bytes }
            }
        }
    }

    /// The embedding, whole.
    pub(super) fn embedding(&mut self) -> Result<Bound, EngineError> {
        self.bind(Role::Embedding)
    }

    /// The embedding, to be read by rows.
    pub(super) fn embedding_table(&self) -> Result<Tensor, EngineError> {
        let role = Role::Embedding;
        self.by_role.get(&role).map(|table| **table).ok_or_else(|| self.unbound(role))
    }

    pub(super) fn final_norm(&mut self) -> Result<Bound, EngineError> {
        self.bind(Role::FinalNorm)
    }

    /// The head, whole.
    pub(super) fn head(&mut self) -> Result<Bound, EngineError> {
        self.bind(Role::Head)
    }

    /// The head in pieces, each as large as a stream buffer; every layer is bound before.
    pub(super) fn head_pieces(&mut self) -> Result<Vec<HeadPiece>, EngineError> {
        let role = if self.model.spec.tied_embeddings { Role::Embedding } else { Role::Head };
        let tensor = **self.by_role.get(&role).ok_or_else(|| self.unbound(role))?;
        let element = element_of(tensor.stored);
        let room = self.units.buffer_bytes();
        let row_bytes = (tensor.stored.row_bytes(tensor.cols), tensor.row_scale_bytes());
        let scale_rows =
            |first: u64, rows: u64| element.scale_rows(first as usize, rows as usize) as u64;
        let per_scale = element.rows_per_scale() as u64;
        // Of rows that begin within a block, which takes the most scales.
        let piece_bytes = |rows: u64| {
            let part = |bytes: u64, rows: u64| round_up(bytes.saturating_mul(rows), TENSOR_ALIGN);
            part(row_bytes.0, rows)
                .saturating_add(part(row_bytes.1, scale_rows(per_scale - 1, rows)))
        };
        let block_bytes = row_bytes.0.saturating_mul(per_scale).saturating_add(row_bytes.1);
        let most = room.saturating_mul(per_scale).checked_div(block_bytes).unwrap_or(0);
        let mut most = most.min(tensor.rows);
        while most > 0 && piece_bytes(most) > room {
            most -= 1;
        }
        // Whole blocks where there is room for one, so that no scale is read twice.
        if most >= per_scale && most < tensor.rows {
            most -= most % per_scale;
        }
        if most == 0 {
            return Err(EngineError::HeadRow { row_bytes: piece_bytes(1), buffer_bytes: room });
        }
        let mut pieces = Vec::new();
        for first in (0..tensor.rows).step_by(most as usize) {
            let rows = first..tensor.rows.min(first + most);
            let n_rows = rows.end - rows.start;
            let mut unit = Unit::default();
            let mut place = |span: Span, each: u64, first: u64, n_rows: u64| {
                let (offset, bytes) = (span.offset + first * each, n_rows * each);
                let start = unit.add(Span { offset, bytes, ..span });
                Place { home: Home::Stream, start, end: start + bytes as usize }
            };
            let weight = place(tensor.weight, row_bytes.0, first, n_rows);
            let none = Place { home: Home::Stream, start: 0, end: 0 };
            let scales = tensor.scales.map_or(none, |span| {
                place(span, row_bytes.1, first / per_scale, scale_rows(first, n_rows))
            });
            self.units.add_head(unit);
            let (n_rows, cols) = (n_rows as usize, tensor.cols as usize);
            let first = first as usize;
            let weight = Bound { weight, scales, element, first, rows: n_rows, cols };
            pieces.push(HeadPiece { rows: rows.start as usize..rows.end as usize, weight });
        }
        Ok(pieces)
    }

    fn swiglu(
        &mut self,
        role: impl Fn(LayerTensor) -> Role,
        of: fn(Projection) -> LayerTensor,
    ) -> Result<SwiGlu, EngineError> {
        let mut bind = |projection| self.bind(role(of(projection)));
        Ok(SwiGlu {
            gate: bind(Projection::Gate)?,
            up: bind(Projection::Up)?,
            down: bind(Projection::Down)?,
        })
    }

    /// Binds a layer.
    pub(super) fn layer(&mut self, layer: usize) -> Result<LayerWeights, EngineError> {
        use LayerTensor as T;
        let spec = &self.model.spec;
        let kind = spec.layers[layer];
        let number = layer as u32;
        let whole = |tensor| Role::Layer { layer: number, tensor };
        match kind.feed_forward {
            FeedForward::Dense => Ok(LayerWeights {
                blocks: vec![self.block(kind, whole)?],
                feed_forward: FeedForwardWeights::Dense(self.swiglu(whole, T::Dense)?),
            }),
            FeedForward::Experts => {
                let blocks = vec![self.block(kind, whole)?];
                let router = self.router(whole)?;
                let shared = match spec.shared_ff_size {
                    0 => None,
                    _ => Some(self.swiglu(whole, T::Shared)?),
                };
                let feed_forward = FeedForwardWeights::Experts { router, shared };
                Ok(LayerWeights { blocks, feed_forward })
            }
            FeedForward::Shortcut => {
                let first = |tensor| Role::SubBlock { layer: number, block: 0, tensor };
                let second = |tensor| Role::SubBlock { layer: number, block: 1, tensor };
                let blocks = vec![self.block(kind, first)?, self.block(kind, second)?];
                let router = self.router(whole)?;
                let dense = [self.swiglu(first, T::Dense)?, self.swiglu(second, T::Dense)?];
                let feed_forward = FeedForwardWeights::Shortcut { router, dense };
                Ok(LayerWeights { blocks, feed_forward })
            }
        }
    }

    fn router(&mut self, role: impl Fn(LayerTensor) -> Role) -> Result<RouterWeights, EngineError> {
        let RouterSpec { logit_bias: has_logit_bias, selection_bias: has_bias, .. } =
            self.model.spec.router;
        Ok(RouterWeights {
            weight: self.bind(role(LayerTensor::Router))?,
            logit_bias: match has_logit_bias {
                true => Some(self.bind(role(LayerTensor::RouterLogitBias))?),
                false => None,
            },
            selection_bias: match has_bias {
                true => Some(self.bind(role(LayerTensor::RouterBias))?),
                false => None,
            },
        })
    }

    /// Binds the norms and the attention of a layer, or of one of its sub-blocks.
    fn block(
        &mut self,
        layer: LayerSpec,
        role: impl Fn(LayerTensor) -> Role,
    ) -> Result<BlockWeights, EngineError> {
        use LayerTensor as T;
        let spec = &self.model.spec;
        let mut bind = |tensor| self.bind(role(tensor));
        let input_norm = bind(T::InputNorm)?;
        let post_attention_norm = bind(T::PostAttentionNorm)?;
        let attention = match &spec.attention {
            AttentionSpec::Latent(latent) => AttentionWeights::Latent(LatentWeights {
                query: if latent.q_lora_rank > 0 {
                    QueryWeights::Compressed {
                        down: bind(T::QueryDown)?,
                        norm: bind(T::QueryDownNorm)?,
                        up: bind(T::QueryUp)?,
                    }
                } else {
                    QueryWeights::Direct(bind(T::Query)?)
                },
                latent_down: bind(T::LatentDown)?,
                latent_norm: bind(T::LatentNorm)?,
                latent_up: bind(T::LatentUp)?,
                indexer: match layer.indexer {
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
                biases: match grouped.qkv_biases {
                    true => Some([bind(T::QueryBias)?, bind(T::KeyBias)?, bind(T::ValueBias)?]),
                    false => None,
                },
                norms: match grouped.qk_norm {
                    QkNorm::FullWidth | QkNorm::PerHead => {
                        Some((bind(T::QueryNorm)?, bind(T::KeyNorm)?, spec.norm_eps))
                    }
                    QkNorm::None => None,
                },
                sinks: if grouped.sinks { Some(bind(T::Sinks)?) } else { None },
            }),
        };
        let attention_output = bind(T::AttentionOutput)?;
        let attention_output_bias = match &spec.attention {
            AttentionSpec::Grouped(GroupedAttention { output_bias: true, .. }) => {
                Some(bind(T::AttentionOutputBias)?)
            }
            AttentionSpec::Grouped(_) | AttentionSpec::Latent(_) => None,
        };
        Ok(BlockWeights {
            input_norm,
            post_attention_norm,
            attention,
            attention_output,
            attention_output_bias,
        })
    }
}
