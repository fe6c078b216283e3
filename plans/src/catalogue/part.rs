//! The parts of a container's classes that can be packed apart, one for each kind of projection. Owns
//! their names in metadata and options.

use super::container::ContainerClass;
use super::{FusedTensor, LayerTensor, Projection, Role};

/// One kind of matrix. Which class it is in depends on its layer: those of multi-token prediction are
/// a class with all of these parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ContainerPart {
    /// Gate of a routed expert.
    ExpertGate,
    /// Up of a routed expert.
    ExpertUp,
    /// Down of a routed expert.
    ExpertDown,
    /// Hidden to queries, the compression before included.
    Query,
    /// Keys of grouped attention.
    Key,
    /// Values of grouped attention.
    Value,
    /// Hidden to latent, and latent to keys and values.
    Latent,
    /// Heads to hidden.
    Output,
    /// Queries and keys of the sparse-attention indexer.
    Indexer,
    /// Gate of a dense feed-forward.
    FeedForwardGate,
    /// Up of a dense feed-forward.
    FeedForwardUp,
    /// Down of a dense feed-forward.
    FeedForwardDown,
    /// Gate of shared experts.
    SharedGate,
    /// Up of shared experts.
    SharedUp,
    /// Down of shared experts.
    SharedDown,
    /// Token embedding.
    Embedding,
    /// Output head.
    Head,
    /// Multi-token prediction: embedding and state, concatenated, to hidden.
    Input,
}

impl ContainerPart {
    /// All, in the order of reports, which is that of their numbers.
    pub const ALL: [Self; 18] = [
        Self::ExpertGate,
        Self::ExpertUp,
        Self::ExpertDown,
        Self::Query,
        Self::Key,
        Self::Value,
        Self::Latent,
        Self::Output,
        Self::Indexer,
        Self::FeedForwardGate,
        Self::FeedForwardUp,
        Self::FeedForwardDown,
        Self::SharedGate,
        Self::SharedUp,
        Self::SharedDown,
        Self::Embedding,
        Self::Head,
        Self::Input,
    ];

    /// The part that a weight is; `None` for what no class holds.
    #[must_use]
    pub fn of(role: Role) -> Option<Self> {
        match role {
            Role::Embedding => Some(Self::Embedding),
            Role::Head => Some(Self::Head),
            Role::FinalNorm | Role::Padding => None,
            Role::Layer { tensor, .. } | Role::SubBlock { tensor, .. } => Self::of_tensor(tensor),
            Role::Expert { projection, .. } => Some(match projection {
                Projection::Gate => Self::ExpertGate,
                Projection::Up => Self::ExpertUp,
                Projection::Down => Self::ExpertDown,
            }),
            Role::FusedExperts { tensor, .. } => Some(match tensor {
                FusedTensor::GateUp | FusedTensor::GateUpBias => Self::ExpertGate,
                FusedTensor::Down | FusedTensor::DownBias => Self::ExpertDown,
            }),
        }
    }

    fn of_tensor(tensor: LayerTensor) -> Option<Self> {
        use LayerTensor as T;
        match tensor {
            T::QueryDown | T::QueryUp | T::Query => Some(Self::Query),
            T::Key => Some(Self::Key),
            T::Value => Some(Self::Value),
            T::LatentDown | T::LatentUp => Some(Self::Latent),
            T::AttentionOutput => Some(Self::Output),
            T::IndexerQuery | T::IndexerKey => Some(Self::Indexer),
            T::Dense(Projection::Gate) => Some(Self::FeedForwardGate),
            T::Dense(Projection::Up) => Some(Self::FeedForwardUp),
            T::Dense(Projection::Down) => Some(Self::FeedForwardDown),
            T::Shared(Projection::Gate) => Some(Self::SharedGate),
            T::Shared(Projection::Up) => Some(Self::SharedUp),
            T::Shared(Projection::Down) => Some(Self::SharedDown),
            T::MtpInput => Some(Self::Input),
            T::MtpEmbedding => Some(Self::Embedding),
            T::MtpHead => Some(Self::Head),
            T::InputNorm
            | T::PostAttentionNorm
            | T::QueryDownNorm
            | T::LatentNorm
            | T::QueryNorm
            | T::KeyNorm
            | T::QueryBias
            | T::KeyBias
            | T::ValueBias
            | T::Sinks
            | T::AttentionOutputBias
            | T::IndexerKeyNorm
            | T::IndexerKeyNormBias
            | T::IndexerHeadWeights
            | T::Router
            | T::RouterLogitBias
            | T::RouterBias
            | T::MtpEmbeddingNorm
            | T::MtpStateNorm
            | T::MtpHeadNorm => None,
        }
    }

    /// Its name where every part has one.
    fn name(self) -> &'static str {
        match self {
            Self::ExpertGate => "experts.gate",
            Self::ExpertUp => "experts.up",
            Self::ExpertDown => "experts.down",
            Self::Query => "attention.query",
            Self::Key => "attention.key",
            Self::Value => "attention.value",
            Self::Latent => "attention.latent",
            Self::Output => "attention.output",
            Self::Indexer => "indexer",
            Self::FeedForwardGate => "ffn.gate",
            Self::FeedForwardUp => "ffn.up",
            Self::FeedForwardDown => "ffn.down",
            Self::SharedGate => "shared.gate",
            Self::SharedUp => "shared.up",
            Self::SharedDown => "shared.down",
            Self::Embedding => "embedding",
            Self::Head => "head",
            Self::Input => "input",
        }
    }

    /// Its name within a class: that of experts says nothing twice.
    #[must_use]
    pub fn name_in(self, class: ContainerClass) -> &'static str {
        let name = self.name();
        match class {
            ContainerClass::Experts => name.strip_prefix("experts.").unwrap_or(name),
            ContainerClass::Dense | ContainerClass::Embedding | ContainerClass::Mtp => name,
        }
    }

    /// Whether a class can hold it.
    #[must_use]
    pub fn is_in(self, class: ContainerClass) -> bool {
        let is_expert = matches!(self, Self::ExpertGate | Self::ExpertUp | Self::ExpertDown);
        let is_table = matches!(self, Self::Embedding | Self::Head);
        match class {
            ContainerClass::Experts => is_expert,
            ContainerClass::Embedding => is_table,
            ContainerClass::Dense => !is_expert && !is_table && self != Self::Input,
            ContainerClass::Mtp => true,
        }
    }

    /// The parts of a class that a name means: one by its name, several by what their names begin or
    /// end with, such as `attention` or `down`.
    #[must_use]
    pub fn named(class: ContainerClass, name: &str) -> Vec<Self> {
        let means = |part: &Self| {
            let whole = part.name_in(class);
            let ends = whole.split_once('.');
            whole == name || ends.is_some_and(|(first, last)| first == name || last == name)
        };
        Self::ALL.into_iter().filter(|part| part.is_in(class)).filter(means).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_mean_one_part_or_several() {
        use ContainerPart as P;
        let experts = |name| P::named(ContainerClass::Experts, name);
        assert_eq!(experts("down"), [P::ExpertDown]);
        assert_eq!(experts("experts.down"), []);
        let dense = |name| P::named(ContainerClass::Dense, name);
        assert_eq!(dense("attention"), [P::Query, P::Key, P::Value, P::Latent, P::Output]);
        assert_eq!(dense("down"), [P::FeedForwardDown, P::SharedDown]);
        assert_eq!(dense("shared.up"), [P::SharedUp]);
        assert_eq!(dense("head"), []);
        let mtp = |name| P::named(ContainerClass::Mtp, name);
        assert_eq!(mtp("experts"), [P::ExpertGate, P::ExpertUp, P::ExpertDown]);
        assert_eq!(mtp("down"), [P::ExpertDown, P::FeedForwardDown, P::SharedDown]);
    }

    #[test]
    fn numbers_are_places_in_the_list_and_names_are_unique() {
        for (index, part) in ContainerPart::ALL.into_iter().enumerate() {
            assert_eq!(part as usize, index);
            let same = ContainerPart::named(ContainerClass::Mtp, part.name());
            assert_eq!(same, [part]);
        }
    }
}
