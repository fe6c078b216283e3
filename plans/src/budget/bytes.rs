//! What the parts of a model weigh, added up once: planning asks for the same sums again and again,
//! and a model has tens of thousands of experts.

use super::classes::{ByClass, Touched};
use super::io::bytes_in_slot;
use super::{EmbeddingResidency, IoMode};
use crate::catalogue::{
    Catalogue, ExpertForm, ExpertLayout, LayerTensor, PlacedMatrix, Role, Tensor,
};
use crate::spec::ArchSpec;

/// Weights that are held or streamed together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartBytes {
    /// Bytes in memory, each tensor aligned.
    pub resident: u64,
    /// Bytes as stored: what a token touches, and what a read brings.
    pub stored: u64,
    /// The same apart by how they are stored, with their elements.
    pub by_class: ByClass<Touched>,
}

impl PartBytes {
    fn add(&mut self, tensor: &Tensor) {
        self.resident = self.resident.saturating_add(tensor.resident_bytes().0);
        self.stored = self.stored.saturating_add(tensor.bytes().0);
        let weights = tensor.rows.saturating_mul(tensor.cols);
        self.by_class.add(tensor.stored, tensor.bytes().0, weights);
    }

    /// Elements.
    #[must_use]
    pub fn weights(&self) -> u64 {
        self.by_class.weights()
    }

    /// Both parts.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            resident: self.resident.saturating_add(other.resident),
            stored: self.stored.saturating_add(other.stored),
            by_class: self.by_class.and(other.by_class),
        }
    }
}

/// One decoder layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerBytes {
    /// Everything but routed experts.
    pub dense: PartBytes,
    /// Bytes in memory of each of its sub-blocks; a layer without any is the first.
    pub blocks: [u64; 2],
    /// What of it is touched between the layer's routing and its experts: the reads of these run under it.
    pub window: PartBytes,
    /// What of it every token computes beside its routed experts: those that are shared.
    pub shared: PartBytes,
    /// A slot that can hold any of its routed experts; 0 where it has none.
    pub slot: u64,
    /// Number of its routed experts.
    pub n_experts: u32,
    /// Bytes of one of its routed experts on the mean, as read from disk.
    pub expert_read: u64,
    /// What the products of one of them touch, on the mean, apart by how it is stored.
    pub expert: ByClass<Touched>,
}

impl LayerBytes {
    /// Bytes in memory of the largest part that is read at once where the layer is streamed.
    #[must_use]
    pub fn largest_block(&self) -> u64 {
        self.blocks.into_iter().max().unwrap_or(0)
    }
}

/// The parts of a model.
#[derive(Clone, Debug)]
pub struct ModelBytes<'a> {
    /// The model.
    pub model: &'a Catalogue,
    /// How its experts are read, on which the size of a slot depends.
    pub io: IoMode,
    /// Decoder layers.
    pub layers: Vec<LayerBytes>,
    /// The embedding.
    pub embedding: PartBytes,
    /// One row of it, and its scales, in a buffer.
    pub embedding_row: u64,
    /// The head where it has weights of its own, else nothing: the embedding is the head then.
    pub own_head: PartBytes,
    /// The final norm.
    pub final_norm: PartBytes,
    /// The largest slot of all layers.
    pub largest_slot: u64,
    /// Reads that bring one expert, on the mean; at least 1.
    pub reads_per_expert: f64,
}

/// Whether a tensor is touched after the layer's routing is known and before its experts are needed: the
/// feed-forward of the first of two sub-blocks, and all of the second.
fn is_in_window(role: Role) -> bool {
    match role {
        Role::SubBlock { block: 0, tensor, .. } => matches!(tensor, LayerTensor::Dense(_)),
        Role::SubBlock { .. } => true,
        Role::Embedding
        | Role::Head
        | Role::FinalNorm
        | Role::Layer { .. }
        | Role::Expert { .. }
        | Role::FusedExperts { .. }
        | Role::Padding => false,
    }
}

/// Whether a tensor is a shared expert's.
fn is_shared(role: Role) -> bool {
    match role {
        Role::Layer { tensor, .. } | Role::SubBlock { tensor, .. } => {
            matches!(tensor, LayerTensor::Shared(_))
        }
        Role::Embedding
        | Role::Head
        | Role::FinalNorm
        | Role::Expert { .. }
        | Role::FusedExperts { .. }
        | Role::Padding => false,
    }
}

/// Adds the matrices of a routed expert, each of `hidden_size x expert_ff_size`, or twice that where two are
/// one. Its biases take no time to speak of.
fn add_expert(sum: &mut ByClass<Touched>, expert: &ExpertLayout, spec: &ArchSpec) {
    let weights = (spec.hidden_size as u64).saturating_mul(spec.expert_ff_size as u64);
    let mut add = |matrix: &PlacedMatrix, n| {
        sum.add(matrix.stored, matrix.bytes, weights.saturating_mul(n));
    };
    match expert.form {
        ExpertForm::Separate => [&expert.gate, &expert.up].into_iter().for_each(|one| add(one, 1)),
        ExpertForm::Interleaved | ExpertForm::InterleavedTransposed => add(&expert.gate, 2),
    }
    add(&expert.down, 1);
}

impl<'a> ModelBytes<'a> {
    /// Adds up a model.
    #[must_use]
    pub fn of(model: &'a Catalogue, io: IoMode) -> Self {
        let spec = &model.spec;
        let mut layers = vec![LayerBytes::default(); spec.n_layers];
        let (mut n_reads, mut n_experts) = (0_usize, 0_usize);
        for (layer, bytes) in layers.iter_mut().enumerate() {
            if !spec.is_expert_layer(layer) {
                continue;
            }
            let experts = model.layer_experts(layer);
            let mut read = 0_u64;
            for expert in experts {
                bytes.slot = bytes.slot.max(bytes_in_slot(expert, io));
                read = read.saturating_add(expert.read_bytes());
                n_reads += expert.extents().len();
                add_expert(&mut bytes.expert, expert, spec);
            }
            n_experts += experts.len();
            bytes.n_experts = experts.len() as u32;
            bytes.expert_read = read / experts.len().max(1) as u64;
            bytes.expert = bytes.expert.of_each(experts.len() as u64);
        }
        let largest_slot = layers.iter().map(|l| l.slot).max().unwrap_or(0);
        let mut sums = Self {
            model,
            io,
            layers,
            embedding: PartBytes::default(),
            embedding_row: 0,
            own_head: PartBytes::default(),
            final_norm: PartBytes::default(),
            largest_slot,
            reads_per_expert: (n_reads as f64 / n_experts.max(1) as f64).max(1.0),
        };
        for tensor in &model.tensors {
            sums.add(tensor);
        }
        sums
    }

    fn add(&mut self, tensor: &Tensor) {
        match tensor.role {
            Role::Embedding => {
                self.embedding.add(tensor);
                self.embedding_row = tensor.row_buffer_bytes();
            }
            Role::Head => self.own_head.add(tensor),
            Role::FinalNorm => self.final_norm.add(tensor),
            // Multi-token-prediction layers lie past the last decoder layer and are not loaded.
            // The router of a layer with sub-blocks is the first one's.
            Role::Layer { layer, .. } => self.add_to_layer(layer, 0, tensor),
            Role::SubBlock { layer, block, .. } => self.add_to_layer(layer, block, tensor),
            Role::Expert { .. } | Role::FusedExperts { .. } | Role::Padding => {}
        }
    }

    fn add_to_layer(&mut self, layer: u32, block: u8, tensor: &Tensor) {
        let Some(bytes) = self.layers.get_mut(layer as usize) else { return };
        bytes.dense.add(tensor);
        if is_in_window(tensor.role) {
            bytes.window.add(tensor);
        }
        if is_shared(tensor.role) {
            bytes.shared.add(tensor);
        }
        if let Some(block) = bytes.blocks.get_mut(usize::from(block)) {
            *block = block.saturating_add(tensor.resident_bytes().0);
        }
    }

    /// What the last product reads: the head's own weights, or the embedding that it shares.
    #[must_use]
    pub fn head(&self) -> PartBytes {
        if self.model.spec.tied_embeddings { self.embedding } else { self.own_head }
    }

    /// The embedding where it is held beside a head of its own.
    #[must_use]
    pub fn resident_embedding(&self, embedding: EmbeddingResidency) -> PartBytes {
        match embedding {
            EmbeddingResidency::Resident if !self.model.spec.tied_embeddings => self.embedding,
            EmbeddingResidency::Resident | EmbeddingResidency::RowRead => PartBytes::default(),
        }
    }

    /// The size of one of the reads that bring an expert.
    #[must_use]
    pub fn expert_read_size(&self) -> u64 {
        let expert_layers = self.layers.iter().filter(|l| l.n_experts > 0);
        let (sum, n) = expert_layers
            .fold((0_u64, 0_u64), |(sum, n), l| (sum.saturating_add(l.expert_read), n + 1));
        (sum as f64 / n.max(1) as f64 / self.reads_per_expert) as u64
    }

    /// Routed experts of all decoder layers.
    #[must_use]
    pub fn n_experts(&self) -> u64 {
        self.layers.iter().map(|l| u64::from(l.n_experts)).sum()
    }

    /// Bytes of the routed experts that one token is expected to use.
    #[must_use]
    pub fn routed_per_token(&self) -> u64 {
        self.layers.iter().map(|layer| self.routed_per_layer(layer)).sum::<f64>().round() as u64
    }

    /// The same in one layer.
    #[must_use]
    pub fn routed_per_layer(&self, layer: &LayerBytes) -> f64 {
        layer.expert_read as f64 * self.active_per_layer(layer)
    }

    /// Routed experts with weights that one token is expected to use in a layer.
    #[must_use]
    pub fn active_per_layer(&self, layer: &LayerBytes) -> f64 {
        self.model.spec.router.expected_active().min(f64::from(layer.n_experts))
    }
}
