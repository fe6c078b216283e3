//! What this build runs. Owns the comparison of an architecture with the mechanisms that the forward
//! pass has, so that a model which is planned and cannot run is refused by name, before anything is
//! allocated.

use tierkeep_plans::catalogue::{Catalogue, ExpertForm, StoredType, Tensor};
use tierkeep_plans::spec::{
    Activation, ArchSpec, AttentionSpec, Family, FeedForward, GroupScore, GroupedAttention,
    LatentAttention, QkNorm, RopeScaling, RouterScoring,
};

/// Why a model that is planned is not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this build plans {family} and does not run it yet: {what}; `tierkeep plan` and `tierkeep inspect` work on it, running it needs a newer tierkeep"
)]
pub struct Unsupported {
    /// Its `model_type`.
    pub family: &'static str,
    /// The first mechanism that is lacking.
    pub what: String,
}

/// Whether this build runs a model.
///
/// # Errors
/// [`Unsupported`], with the first mechanism that the forward pass lacks.
pub fn supports(model: &Catalogue) -> Result<(), Unsupported> {
    check(model, model.spec.n_layers)
}

/// Whether this build knows what to do with every weight of a model, those of multi-token prediction
/// included, which are carried over into other containers and not run.
pub(crate) fn supports_whole(model: &Catalogue) -> Result<(), Unsupported> {
    check(model, model.spec.n_layers + model.n_mtp_layers_present)
}

fn check(model: &Catalogue, n_layers: usize) -> Result<(), Unsupported> {
    let lacking = mechanism(&model.spec).or_else(|| stored_type(model, n_layers));
    match lacking {
        Some(what) => Err(Unsupported { family: model.spec.family.model_type(), what }),
        None => Ok(()),
    }
}

/// The first mechanism of an architecture that the forward pass lacks.
fn mechanism(spec: &ArchSpec) -> Option<String> {
    let attention = match &spec.attention {
        AttentionSpec::Latent(latent) => latent_mechanism(latent),
        AttentionSpec::Grouped(grouped) => grouped_mechanism(grouped, spec.rope.dim),
    };
    attention
        .or_else(|| layers_mechanism(spec))
        .or_else(|| router_mechanism(spec))
        .map(str::to_owned)
        .or_else(|| {
            let first = spec.undescribed.first()?;
            Some(format!("{} = {}", first.field, first.value))
        })
        .or_else(|| compared(spec.family))
}

/// A family counts as run once its output has been compared with a reference's.
fn compared(family: Family) -> Option<String> {
    match family {
        Family::GlmMoeDsa | Family::Olmoe => None,
        Family::DeepseekV2
        | Family::DeepseekV3
        | Family::KimiK2
        | Family::LongcatFlash
        | Family::Qwen3Moe
        | Family::Glm4Moe
        | Family::Mixtral
        | Family::GptOss => Some("its output has not been compared with a reference's".to_owned()),
    }
}

fn latent_mechanism(latent: &LatentAttention) -> Option<&'static str> {
    let is_one = |scale: f32| scale.to_bits() == 1.0_f32.to_bits();
    if latent.q_lora_rank == 0 {
        Some("latent attention without a compressed query")
    } else if !is_one(latent.query_scale) || !is_one(latent.latent_scale) {
        Some("scaled queries and latents")
    } else {
        None
    }
}

fn grouped_mechanism(grouped: &GroupedAttention, rotary_dim: usize) -> Option<&'static str> {
    let norms = match grouped.qk_norm {
        QkNorm::None | QkNorm::FullWidth => None,
        QkNorm::PerHead => Some("norms of queries and keys per head"),
    };
    if norms.is_some() {
        norms
    } else if grouped.sinks {
        Some("attention sinks")
    } else if grouped.qkv_biases || grouped.output_bias {
        Some("biases of attention")
    } else if rotary_dim != grouped.head_dim {
        Some("rotation of a part of each head")
    } else {
        None
    }
}

fn layers_mechanism(spec: &ArchSpec) -> Option<&'static str> {
    let has = |kind| spec.layers.iter().any(|layer| layer.feed_forward == kind);
    let activation = match spec.activation {
        Activation::SwiGlu => None,
        Activation::ClampedSwiGlu { .. } => Some("clamped SwiGLU"),
    };
    let scaling = match spec.rope.scaling {
        RopeScaling::None => None,
        RopeScaling::Yarn { .. } => Some("YaRN, the stretched rotary embedding"),
    };
    if has(FeedForward::Shortcut) {
        Some("layers of two sub-blocks with experts by shortcut")
    } else if spec.layers.iter().any(|layer| layer.window.is_some()) {
        Some("sliding-window attention")
    } else if spec.expert_biases {
        Some("biases of experts")
    } else {
        scaling.or(activation)
    }
}

fn router_mechanism(spec: &ArchSpec) -> Option<&'static str> {
    let router = &spec.router;
    let scoring = match router.scoring {
        RouterScoring::Sigmoid | RouterScoring::Softmax => None,
        RouterScoring::SoftmaxOfChosen => Some("a softmax over the chosen experts"),
    };
    let by_best = match router.group_score {
        GroupScore::BestTwo => false,
        GroupScore::Best => true,
    };
    if router.n_zero_experts > 0 {
        Some("experts that return their input")
    } else if router.logit_bias {
        Some("a bias of the router's product")
    } else if by_best && router.n_groups_active < router.n_groups {
        Some("groups of experts by their best")
    } else {
        scoring
    }
}

/// A stored type or an expert form that the kernels do not compute on in the first `n_layers` layers,
/// with where it is found.
fn stored_type(model: &Catalogue, n_layers: usize) -> Option<String> {
    let runs = |stored: StoredType| match stored {
        StoredType::F32
        | StoredType::F16
        | StoredType::Bf16
        | StoredType::Int8
        | StoredType::Int4 => true,
        StoredType::Fp8 | StoredType::MxFp4 => false,
    };
    for expert in (0..n_layers).flat_map(|layer| model.layer_experts(layer)) {
        let form = match expert.form {
            ExpertForm::Separate => None,
            ExpertForm::Interleaved | ExpertForm::InterleavedTransposed => {
                Some("experts with gate and up in one".to_owned())
            }
        };
        let stored = expert.bytes_by_type().find(|(stored, ..)| !runs(*stored));
        let lacking =
            form.or_else(|| stored.map(|(stored, ..)| format!("experts in {}", stored.name())));
        if lacking.is_some() {
            return lacking;
        }
    }
    let without_mtp = n_layers == model.spec.n_layers;
    let counts = |tensor: &&Tensor| !(without_mtp && model.is_mtp(tensor.role));
    model
        .tensors
        .iter()
        .filter(counts)
        .find(|t| !runs(t.stored))
        .map(|t| format!("{} in {}", model.name_of(t.role), t.stored.name()))
}
