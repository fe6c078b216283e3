//! What this build runs. Owns the comparison of an architecture with the mechanisms that the forward
//! pass has, so that a model which is planned and cannot run is refused by name, before anything is
//! allocated.

use tierkeep_plans::catalogue::{Catalogue, ExpertForm};
use tierkeep_plans::spec::{ArchSpec, AttentionSpec, Family, LatentAttention};

use crate::weights::element_of;

/// Why a model that is planned is not run, or not converted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this build plans {family} and does not {doing} it yet: {what}; `tierkeep plan` and `tierkeep inspect` work on it, a newer tierkeep is needed to {doing} it"
)]
pub struct Unsupported {
    /// Its `model_type`.
    pub family: &'static str,
    /// `run` or `convert`.
    pub doing: &'static str,
    /// The first mechanism that is lacking.
    pub what: String,
}

/// Instruction sets that the kernels can use on this processor, the fastest last.
#[must_use]
pub fn instruction_sets() -> Vec<String> {
    tierkeep_kernels::Isa::supported().iter().map(ToString::to_string).collect()
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
    check(model, model.spec.n_layers + model.n_mtp_layers_present)?;
    match model.experts.iter().all(|expert| expert.form == ExpertForm::Separate) {
        true => Ok(()),
        false => Err(Unsupported {
            family: model.spec.family.model_type(),
            doing: "convert",
            what: "experts with gate and up in one".to_owned(),
        }),
    }
}

fn check(model: &Catalogue, n_layers: usize) -> Result<(), Unsupported> {
    let lacking = mechanism(&model.spec).or_else(|| expert_form(model, n_layers));
    match lacking {
        Some(what) => {
            Err(Unsupported { family: model.spec.family.model_type(), doing: "run", what })
        }
        None => Ok(()),
    }
}

/// The first mechanism of an architecture that the forward pass lacks.
fn mechanism(spec: &ArchSpec) -> Option<String> {
    let attention = match &spec.attention {
        AttentionSpec::Latent(latent) => latent_mechanism(latent),
        // The forward pass has all of its mechanisms.
        AttentionSpec::Grouped(_) => None,
    };
    attention
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
        Family::GlmMoeDsa
        | Family::Olmoe
        | Family::DeepseekV3
        | Family::KimiK2
        | Family::LongcatFlash
        | Family::Qwen3Moe
        | Family::Glm4Moe
        | Family::Mixtral
        | Family::GptOss => None,
        Family::DeepseekV2 => {
            Some("its output has not been compared with a reference's".to_owned())
        }
    }
}

fn latent_mechanism(latent: &LatentAttention) -> Option<&'static str> {
    // Its queries come from the compressed one.
    let indexer_without_query = latent.indexer.is_some() && latent.q_lora_rank == 0;
    indexer_without_query.then_some("an indexer without a compressed query")
}

fn router_mechanism(spec: &ArchSpec) -> Option<&'static str> {
    let router = &spec.router;
    if router.n_zero_experts > 0 && router.n_groups > 1 {
        Some("groups of experts that have some without weights")
    } else {
        None
    }
}

/// A form and type of experts that the forward pass does not compute on in the first `n_layers` layers. Stored
/// types by themselves are no question: the kernels compute on each.
fn expert_form(model: &Catalogue, n_layers: usize) -> Option<String> {
    (0..n_layers).flat_map(|layer| model.layer_experts(layer)).find_map(|expert| {
        match expert.form {
            ExpertForm::Separate | ExpertForm::Interleaved => None,
            // A matrix whose rows are its columns is summed by rows, which no type with scales is ready for.
            ExpertForm::InterleavedTransposed => expert
                .bytes_by_type()
                .find(|(stored, ..)| element_of(*stored).has_scales())
                .map(|(stored, ..)| format!("transposed experts in {}", stored.name())),
        }
    })
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use tierkeep_plans::catalogue::StoredType;
    use tierkeep_plans::spec::Undescribed;

    fn oracle(family: &str) -> Catalogue {
        let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles");
        Catalogue::open(&directory.join(family)).unwrap()
    }

    fn latent(model: &mut Catalogue) -> &mut LatentAttention {
        match &mut model.spec.attention {
            AttentionSpec::Latent(latent) => latent,
            AttentionSpec::Grouped(_) => panic!("grouped"),
        }
    }

    #[test]
    fn what_has_an_oracle_here_is_supported() {
        let families = [
            "olmoe",
            "glm_moe_dsa",
            "glm_moe_dsa-shared-indexer",
            "glm_moe_dsa-fp8",
            "deepseek_v3",
            "deepseek_v3-no-q-lora",
            "longcat_flash",
            "qwen3_moe",
            "glm4_moe",
            "mixtral",
            "gpt_oss",
        ];
        for family in families {
            assert_eq!(supports(&oracle(family)), Ok(()), "{family}");
        }
    }

    /// Every mechanism of the spec that the forward pass lacks is refused by its name.
    #[test]
    fn each_mechanism_that_is_lacking_is_named() {
        type Case = (&'static str, fn(&mut Catalogue), &'static str);
        let cases: [Case; 3] = [
            ("glm_moe_dsa", |m| latent(m).q_lora_rank = 0, "without a compressed query"),
            (
                "deepseek_v3",
                |m| m.spec.router.n_zero_experts = 2,
                "groups of experts that have some without weights",
            ),
            (
                "olmoe",
                |m| {
                    let (field, value) = ("hidden_act".to_owned(), "gelu".to_owned());
                    m.spec.undescribed.push(Undescribed { field, value });
                },
                "hidden_act = gelu",
            ),
        ];
        for (family, change, expected) in cases {
            let mut model = oracle(family);
            change(&mut model);
            let refused = supports(&model).expect_err(expected);
            assert!(refused.what.contains(expected), "{expected}: {refused}");
            let message = refused.to_string();
            assert!(message.contains(family) && message.contains("tierkeep plan"), "{message}");
        }
    }

    #[test]
    fn families_without_a_comparison_and_forms_without_a_kernel_are_refused() {
        let mut model = oracle("olmoe");
        model.spec.family = Family::DeepseekV2;
        assert!(supports(&model).unwrap_err().what.contains("has not been compared"));
        let mut model = oracle("olmoe");
        model.experts[3].form = ExpertForm::InterleavedTransposed;
        assert_eq!(supports(&model), Ok(()));
        model.experts[3].down.stored = StoredType::INT8;
        assert_eq!(supports(&model).unwrap_err().what, "transposed experts in int8");
        let refused = supports_whole(&oracle("gpt_oss")).unwrap_err().to_string();
        assert!(refused.contains("does not convert it yet: experts with gate and up"), "{refused}");
    }

    #[test]
    fn every_stored_type_is_computed_on() {
        for stored in StoredType::all() {
            let mut model = oracle("olmoe");
            (model.experts[3].down.stored, model.tensors[0].stored) = (stored, stored);
            assert_eq!(supports(&model), Ok(()), "{}", stored.name());
            assert_eq!(supports_whole(&model), Ok(()), "{}", stored.name());
        }
    }
}
