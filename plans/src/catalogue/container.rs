//! What our own containers say of themselves in `__metadata__`: owns the classes of weights that are
//! packed apart, the keys, and their known values. docs/container-format.md is the definition.
//!
//! The bytes are the truth: metadata decide only where bytes can be read in two ways, and metadata that
//! contradict the bytes are an error, for one of the two is damaged.

use std::collections::BTreeMap;

use super::packed::{Group, Packed, ScaleType};
use super::{LayerTensor, Role};

/// How our keys begin.
const PREFIX: &str = "tierkeep.";
/// Every value of `bits`; floats are 16 or 32.
const BITS: [(&str, u64); 5] = [("8", 8), ("4", 4), ("2", 2), ("16", 16), ("32", 32)];
/// The value of a class that is not of one form.
pub const MIXED: &str = "mixed";

/// Classes of weights that a container packs apart. What is in none stays in the type of its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ContainerClass {
    /// Routed experts of the decoder layers.
    Experts,
    /// Attention, dense and shared feed-forward, the indexer's queries and keys.
    Dense,
    /// Token embedding and output head.
    Embedding,
    /// Every matrix of the multi-token-prediction layers.
    Mtp,
}

/// What kind of arithmetic a weight of a layer takes part in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightKind {
    /// Norms and biases: few bytes, and every element counts.
    Vector,
    /// Small matrices whose outputs are compared with each other, so that an error changes which
    /// experts or positions are chosen.
    Selecting,
    /// Everything else.
    Matrix,
}

impl LayerTensor {
    /// What kind of weight it is.
    #[must_use]
    pub fn kind(self) -> WeightKind {
        use LayerTensor as T;
        match self {
            T::InputNorm
            | T::PostAttentionNorm
            | T::QueryDownNorm
            | T::LatentNorm
            | T::QueryNorm
            | T::KeyNorm
            | T::IndexerKeyNorm
            | T::IndexerKeyNormBias
            | T::RouterBias
            | T::RouterLogitBias
            | T::QueryBias
            | T::KeyBias
            | T::ValueBias
            | T::Sinks
            | T::AttentionOutputBias
            | T::MtpEmbeddingNorm
            | T::MtpStateNorm
            | T::MtpHeadNorm => WeightKind::Vector,
            T::Router | T::IndexerHeadWeights => WeightKind::Selecting,
            T::QueryDown
            | T::QueryUp
            | T::LatentDown
            | T::LatentUp
            | T::Query
            | T::Key
            | T::Value
            | T::AttentionOutput
            | T::IndexerQuery
            | T::IndexerKey
            | T::Dense(_)
            | T::Shared(_)
            | T::MtpInput
            | T::MtpEmbedding
            | T::MtpHead => WeightKind::Matrix,
        }
    }
}

impl ContainerClass {
    /// All classes, in the order of reports.
    pub const ALL: [Self; 4] = [Self::Experts, Self::Dense, Self::Embedding, Self::Mtp];

    /// Its name in keys.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Experts => "experts",
            Self::Dense => "dense",
            Self::Embedding => "embedding",
            Self::Mtp => "mtp",
        }
    }

    /// The class of a weight in a model of `n_layers` decoder layers; `None` for what stays as it is.
    #[must_use]
    pub fn of(role: Role, n_layers: usize) -> Option<Self> {
        let in_layer =
            |layer: u32, class| Some(if layer as usize >= n_layers { Self::Mtp } else { class });
        match role {
            Role::Embedding | Role::Head => Some(Self::Embedding),
            Role::FinalNorm | Role::Padding => None,
            Role::Layer { layer, tensor } | Role::SubBlock { layer, tensor, .. } => {
                match tensor.kind() {
                    WeightKind::Vector | WeightKind::Selecting => None,
                    WeightKind::Matrix => in_layer(layer, Self::Dense),
                }
            }
            Role::Expert { layer, .. } | Role::FusedExperts { layer, .. } => {
                in_layer(layer, Self::Experts)
            }
        }
    }

    /// The key of a field of the class.
    #[must_use]
    pub fn key(self, field: &str) -> String {
        format!("{PREFIX}{}.{field}", self.name())
    }
}

/// What the metadata of a file say of one class; `None` where they say nothing, or that it is mixed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) bits: Option<u64>,
    group: Option<Group>,
    scale: Option<ScaleType>,
}

impl Said {
    /// The key and value that contradict what the bytes of rows of `cols` elements show, and what the
    /// value would have to be.
    pub(super) fn contradicts(
        &self,
        class: ContainerClass,
        found: Packed,
        cols: u64,
    ) -> Option<(String, String)> {
        let told = |field, said: String, is: &str| {
            Some((format!("{} = {said}", class.key(field)), is.to_owned()))
        };
        if let Some(bits) = self.bits
            && bits != found.bits.number()
        {
            return told("bits", bits.to_string(), &found.bits.number().to_string());
        }
        // Of rows that are no wider than a group, any group has one scale.
        if let Some(group) = self.group
            && group.per_row(cols) != found.group.per_row(cols)
        {
            return told("group", group.name().to_owned(), found.group.name());
        }
        if let Some(scale) = self.scale
            && scale != found.scale
        {
            return told("scale", scale.name().to_owned(), found.scale.name());
        }
        None
    }
}

/// What the metadata of a file say of all classes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Declared([Said; ContainerClass::ALL.len()]);

impl Declared {
    /// Reads what is said; values that are not known count as nothing, for [`unknown`] refuses them.
    pub(super) fn of(metadata: &BTreeMap<String, String>) -> Self {
        Self(ContainerClass::ALL.map(|class| {
            let get = |field| metadata.get(&class.key(field)).map(String::as_str);
            Said {
                bits: get("bits").and_then(bits_of),
                group: get("group").and_then(group_of),
                scale: get("scale").and_then(scale_of),
            }
        }))
    }

    /// What is said of a class.
    pub(super) fn class(&self, class: ContainerClass) -> Said {
        let [experts, dense, embedding, mtp] = self.0;
        match class {
            ContainerClass::Experts => experts,
            ContainerClass::Dense => dense,
            ContainerClass::Embedding => embedding,
            ContainerClass::Mtp => mtp,
        }
    }
}

fn bits_of(value: &str) -> Option<u64> {
    BITS.iter().find(|(name, _)| *name == value).map(|(_, bits)| *bits)
}

fn group_of(value: &str) -> Option<Group> {
    Group::ALL.into_iter().find(|group| value.eq_ignore_ascii_case(group.name()))
}

fn scale_of(value: &str) -> Option<ScaleType> {
    ScaleType::ALL.into_iter().find(|scale| value.eq_ignore_ascii_case(scale.name()))
}

/// The first entry that this build does not know how to read: another format, bits, grouping or type of
/// scales. Other keys may be ignored.
pub(super) fn unknown(metadata: &BTreeMap<String, String>) -> Option<String> {
    let is_known = |key: &str, value: &str| {
        let is_mixed = value.eq_ignore_ascii_case(MIXED);
        match key.rsplit('.').next() {
            Some("format") => value == "1",
            Some("bits") => is_mixed || bits_of(value).is_some(),
            Some("group") => is_mixed || group_of(value).is_some(),
            Some("scale") => is_mixed || scale_of(value).is_some(),
            _ => true,
        }
    };
    metadata
        .iter()
        .filter(|(key, _)| key.starts_with(PREFIX))
        .find(|(key, value)| !is_known(key, value))
        .map(|(key, value)| format!("{key} = {value}"))
}

#[cfg(test)]
mod tests {
    use super::super::packed::PackedBits;
    use super::*;

    fn metadata(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        entries.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn unknown_values_are_found_and_unknown_keys_are_not() {
        let known = [
            ("tierkeep.format", "1"),
            ("tierkeep.experts.bits", "2"),
            ("tierkeep.experts.group", "64"),
            ("tierkeep.experts.scale", "F16"),
            ("tierkeep.dense.bits", "mixed"),
            ("tierkeep.dense.group", "mixed"),
            ("tierkeep.made_by", "somebody"),
            ("format", "pt"),
        ];
        assert_eq!(unknown(&metadata(&known)), None);
        for (key, value) in [
            ("tierkeep.format", "2"),
            ("tierkeep.experts.bits", "3"),
            ("tierkeep.experts.group", "16"),
            ("tierkeep.experts.scale", "bf16"),
            ("tierkeep.embedding.group", "column"),
        ] {
            assert_eq!(unknown(&metadata(&[(key, value)])), Some(format!("{key} = {value}")));
        }
    }

    #[test]
    fn what_is_said_is_compared_with_what_is_found() {
        let said = Declared::of(&metadata(&[
            ("tierkeep.experts.bits", "4"),
            ("tierkeep.experts.group", "64"),
            ("tierkeep.experts.scale", "f16"),
            ("tierkeep.dense.bits", "mixed"),
        ]));
        let experts = said.class(ContainerClass::Experts);
        let found = Packed { bits: PackedBits::Four, group: Group::Of64, scale: ScaleType::F16 };
        let told = |found: Packed, cols| {
            experts.contradicts(ContainerClass::Experts, found.for_cols(cols), cols)
        };
        assert_eq!(told(found, 256), None);
        // A row of one group.
        assert_eq!(told(found, 40), None);
        let key = |field: &str| Some((format!("tierkeep.experts.{field}"), ()));
        let differs = |found, cols| {
            told(found, cols)
                .map(|(said, _)| (said.split(" = ").next().unwrap_or_default().to_owned(), ()))
        };
        assert_eq!(differs(Packed { bits: PackedBits::Two, ..found }, 256), key("bits"));
        assert_eq!(differs(Packed { group: Group::Row, ..found }, 256), key("group"));
        assert_eq!(differs(Packed { scale: ScaleType::F32, ..found }, 256), key("scale"));
        let dense = said.class(ContainerClass::Dense);
        assert_eq!(dense.contradicts(ContainerClass::Dense, found, 256), None);
        assert_eq!(said.class(ContainerClass::Mtp), Said::default());
    }

    #[test]
    fn selecting_weights_and_vectors_are_of_no_class() {
        let layer = |layer, tensor| ContainerClass::of(Role::Layer { layer, tensor }, 4);
        assert_eq!(layer(1, LayerTensor::Router), None);
        assert_eq!(layer(1, LayerTensor::IndexerHeadWeights), None);
        assert_eq!(layer(5, LayerTensor::MtpStateNorm), None);
        assert_eq!(layer(1, LayerTensor::IndexerKey), Some(ContainerClass::Dense));
        assert_eq!(layer(4, LayerTensor::MtpInput), Some(ContainerClass::Mtp));
        assert_eq!(ContainerClass::of(Role::Head, 4), Some(ContainerClass::Embedding));
    }
}
