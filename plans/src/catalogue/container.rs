//! What our own containers say of themselves in `__metadata__`: owns the classes of weights that are
//! packed apart, the keys, and their known values. The parts of a class are `part`'s.
//! docs/container-format.md is the definition.
//!
//! The bytes are the truth: metadata decide only where bytes can be read in two ways, and metadata that
//! contradict the bytes are an error, for one of the two is damaged.

use std::collections::BTreeMap;

use super::packed::{Group, Packed, ScaleType};
pub use super::part::ContainerPart;
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

    /// The key of a field of one part of the class, written where the class is mixed.
    #[must_use]
    pub fn part_key(self, part: ContainerPart, field: &str) -> String {
        format!("{PREFIX}{}.{}.{field}", self.name(), part.name_in(self))
    }
}

/// A weight by class and part: what metadata speak of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Subject {
    class: ContainerClass,
    part: Option<ContainerPart>,
}

impl Subject {
    /// The subject that a weight belongs to; `None` for what stays as it is.
    pub(super) fn of(role: Role, n_layers: usize) -> Option<Self> {
        let class = ContainerClass::of(role, n_layers)?;
        Some(Self { class, part: ContainerPart::of(role) })
    }
}

/// The source that a container was made of, as a fingerprint.
pub const SOURCE_KEY: &str = "tierkeep.source";

/// What the metadata of a file say of one class or part; `None` where they say nothing, or that it is
/// mixed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) bits: Option<u64>,
    group: Option<Group>,
    scale: Option<ScaleType>,
}

impl Said {
    fn of(get: impl Fn(&str) -> Option<String>) -> Self {
        let get = |field: &str| get(field);
        Self {
            bits: get("bits").as_deref().and_then(bits_of),
            group: get("group").as_deref().and_then(group_of),
            scale: get("scale").as_deref().and_then(scale_of),
        }
    }
}

/// What is said of one weight: by its part where the metadata speak of that, by its class otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SaidOf {
    subject: Subject,
    of_part: Said,
    of_class: Said,
}

impl SaidOf {
    /// The bits of packed integers.
    pub(super) fn bits(&self) -> Option<u64> {
        self.of_part.bits.or(self.of_class.bits)
    }

    /// The key and value that contradict what the bytes of rows of `cols` elements show, and what the
    /// value would have to be.
    pub(super) fn contradicts(&self, found: Packed, cols: u64) -> Option<(String, String)> {
        let Subject { class, part } = self.subject;
        let of_part = part
            .and_then(|part| self.of_part.contradicts(found, cols, |f| class.part_key(part, f)));
        of_part.or_else(|| self.of_class.contradicts(found, cols, |field| class.key(field)))
    }
}

impl Said {
    fn contradicts(
        &self,
        found: Packed,
        cols: u64,
        key: impl Fn(&str) -> String,
    ) -> Option<(String, String)> {
        let told = |field, said: String, is: &str| {
            Some((format!("{} = {said}", key(field)), is.to_owned()))
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

/// What the metadata of a file say of all classes and of their parts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Declared {
    classes: [Said; ContainerClass::ALL.len()],
    parts: [[Said; ContainerPart::ALL.len()]; ContainerClass::ALL.len()],
}

impl Declared {
    /// Reads what is said; values that are not known count as nothing, for [`unknown`] refuses them.
    pub(super) fn of(metadata: &BTreeMap<String, String>) -> Self {
        if !metadata.keys().any(|key| key.starts_with(PREFIX)) {
            return Self::default();
        }
        let get = |key: String| metadata.get(&key).cloned();
        Self {
            classes: ContainerClass::ALL.map(|class| Said::of(|field| get(class.key(field)))),
            parts: ContainerClass::ALL.map(|class| {
                ContainerPart::ALL.map(|part| Said::of(|field| get(class.part_key(part, field))))
            }),
        }
    }

    /// What is said of a weight.
    pub(super) fn said(&self, subject: Subject) -> SaidOf {
        let at = |index: usize| self.classes.get(index).copied().unwrap_or_default();
        let class = subject.class as usize;
        let of_part = subject.part.and_then(|part| self.parts.get(class)?.get(part as usize));
        SaidOf { subject, of_part: of_part.copied().unwrap_or_default(), of_class: at(class) }
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
        let of = |class| said.said(Subject { class, part: None });
        let experts = of(ContainerClass::Experts);
        let found = Packed { bits: PackedBits::Four, group: Group::Of64, scale: ScaleType::F16 };
        let told = |found: Packed, cols| experts.contradicts(found.for_cols(cols), cols);
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
        let dense = of(ContainerClass::Dense);
        assert_eq!(dense.contradicts(found, 256), None);
        assert_eq!(of(ContainerClass::Mtp).of_class, Said::default());
    }

    #[test]
    fn a_part_is_told_apart_from_its_class() {
        let said = Declared::of(&metadata(&[
            ("tierkeep.experts.bits", "mixed"),
            ("tierkeep.experts.down.bits", "8"),
            ("tierkeep.mtp.experts.down.bits", "2"),
            ("tierkeep.dense.shared.down.bits", "8"),
        ]));
        let down = |class| {
            let part = Some(ContainerPart::ExpertDown);
            said.said(Subject { class, part })
        };
        assert_eq!(down(ContainerClass::Experts).bits(), Some(8));
        assert_eq!(down(ContainerClass::Mtp).bits(), Some(2));
        assert_eq!(down(ContainerClass::Dense).bits(), None);
        let gate =
            Subject { class: ContainerClass::Experts, part: Some(ContainerPart::ExpertGate) };
        assert_eq!(said.said(gate).bits(), None);
        let four = Packed::plain(PackedBits::Four);
        let (key, shown) = down(ContainerClass::Experts).contradicts(four, 64).unwrap_or_default();
        assert_eq!((key.as_str(), shown.as_str()), ("tierkeep.experts.down.bits = 8", "4"));
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
