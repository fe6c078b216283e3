//! What a user means: `3:17`, or a tensor by its published name, with or without its ending. Owns the
//! messages for what is not there.

use crate::catalogue::{Catalogue, Role, roles};
use crate::units::{ExpertId, ExpertKey, LayerId, runs};

/// Endings that may be left out of a name.
const ENDINGS: [&str; 3] = ["", ".weight", ".bias"];
/// Words for tensors whose names nobody remembers.
const WORDS: [(&str, Role); 5] = [
    ("embedding", Role::Embedding),
    ("embed_tokens", Role::Embedding),
    ("head", Role::Head),
    ("lm_head", Role::Head),
    ("norm", Role::FinalNorm),
];

/// What is explained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A routed expert.
    Expert(ExpertKey),
    /// A weight that is not a routed expert's, by its place in the catalogue's tensors.
    Tensor(usize),
}

/// Why nothing is explained.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExplainError {
    /// No such name.
    #[error(
        "the model has no {text:?}: write LAYER:EXPERT such as {example}, or a tensor's published name such as {name}"
    )]
    Unknown {
        /// What was given.
        text: String,
        /// An expert that there is.
        example: String,
        /// A tensor that there is.
        name: String,
    },
    /// The layer is not there, or has no routed experts.
    #[error("layer {layer} has no routed experts: layers {layers} have")]
    NoExperts {
        /// The layer.
        layer: u64,
        /// Layers that have, as runs.
        layers: String,
    },
    /// The layer has fewer experts.
    #[error("layer {layer} has no expert {expert}: its experts are 0 to {last}")]
    NoExpert {
        /// The layer.
        layer: u64,
        /// The expert.
        expert: u64,
        /// The last one that there is.
        last: usize,
    },
    /// The weight serves as another one.
    #[error("the model has no head of its own: the embedding is the head, explain \"embedding\"")]
    TiedHead,
}

impl Subject {
    /// Finds what `text` means in `model`.
    ///
    /// # Errors
    /// [`ExplainError`], which says what there is instead.
    pub fn find(model: &Catalogue, text: &str) -> Result<Self, ExplainError> {
        let text = text.trim();
        if let Some((layer, expert)) = text.split_once(':')
            && let (Ok(layer), Ok(expert)) = (layer.trim().parse(), expert.trim().parse())
        {
            return expert_of(model, layer, expert);
        }
        let role = role_of(model, text).ok_or_else(|| unknown(model, text))?;
        match role {
            Role::Expert { layer, expert, .. } => expert_of(model, layer.into(), expert.into()),
            Role::Head if model.spec.tied_embeddings => Err(ExplainError::TiedHead),
            // One tensor holds all experts of the layer: the first one stands for them.
            Role::FusedExperts { layer, .. } => expert_of(model, layer.into(), 0),
            _ => {
                let place = model.tensors.iter().position(|tensor| tensor.role == role);
                place.map(Self::Tensor).ok_or_else(|| unknown(model, text))
            }
        }
    }
}

fn role_of(model: &Catalogue, text: &str) -> Option<Role> {
    if let Some((_, role)) = WORDS.iter().find(|(word, _)| *word == text) {
        return Some(*role);
    }
    let spec = &model.spec;
    ENDINGS.iter().find_map(|ending| {
        let (role, _) = roles::role_of(spec.family, spec.n_layers, &format!("{text}{ending}"))?;
        (role != Role::Padding).then_some(role)
    })
}

fn expert_of(model: &Catalogue, layer: u64, expert: u64) -> Result<Subject, ExplainError> {
    let at = usize::try_from(layer).unwrap_or(usize::MAX);
    let n_experts = model.layer_experts(at).len();
    if n_experts == 0 {
        let with = (0..model.spec.n_layers.saturating_add(model.n_mtp_layers_present))
            .filter(|&layer| !model.layer_experts(layer).is_empty());
        return Err(ExplainError::NoExperts { layer, layers: runs(with) });
    }
    match (u32::try_from(layer), u32::try_from(expert)) {
        (Ok(layer), Ok(expert)) if (expert as usize) < n_experts => {
            Ok(Subject::Expert(ExpertKey { layer: LayerId(layer), expert: ExpertId(expert) }))
        }
        _ => Err(ExplainError::NoExpert { layer, expert, last: n_experts - 1 }),
    }
}

fn unknown(model: &Catalogue, text: &str) -> ExplainError {
    let layer = model.spec.expert_layers().next().unwrap_or(0);
    let name = model.tensors.iter().find(|tensor| matches!(tensor.role, Role::Layer { .. }));
    ExplainError::Unknown {
        text: text.chars().take(120).collect(),
        example: format!("{layer}:0"),
        name: name.map_or_else(|| "lm_head.weight".to_owned(), |t| model.name_of(t.role)),
    }
}
