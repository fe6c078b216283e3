//! The shipped prior: what hit rates to expect of a family before there is any history. Owns the
//! exponents and where they come from.

use crate::spec::Family;

/// `hit = (cap / n_experts)^exponent`: 1 makes reuse worth what residency is, smaller is better.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Prior {
    /// The exponent of the hit rate that 9 in 10 exceed; the largest of the three.
    pub(super) p10: f64,
    /// Of the median.
    pub(super) p50: f64,
    /// Of the hit rate that 1 in 10 exceeds.
    pub(super) p90: f64,
    /// Where it comes from, for the evidence.
    pub(super) origin: &'static str,
}

/// For families of which no run has been published: from the worst of those measured, at 8 of 32
/// experts, to the best, at 75 of 407 GB, with a margin to both sides.
const UNMEASURED: Prior = Prior {
    p10: 0.80,
    p50: 0.45,
    p90: 0.28,
    origin: "fitted to no run of this family: its range is that of the families measured",
};

/// From this many experts on a GLM-5 model counts as one of full size.
const FULL_SIZE_EXPERTS: u32 = 128;

/// The prior of a family. Exponents are `ln(hit) / ln(cap / n_experts)` at each anchor; the median
/// is theirs, and the range covers them all with a margin that grows as anchors get fewer.
pub(super) fn prior(family: Family, n_experts: u32) -> Prior {
    match family {
        // One anchor: 24 of 64 hits 68 %, exponent 0.393.
        Family::Olmoe => Prior {
            p10: 0.55,
            p50: 0.39,
            p90: 0.30,
            origin: "fitted to one published replay: 24 of 64 experts hit 68 %",
        },
        // 20, 35, 60 and 75 of 407 GB hit 24, 44, 55 and 60 %: 0.474, 0.335, 0.312, 0.302.
        Family::GlmMoeDsa if n_experts >= FULL_SIZE_EXPERTS => Prior {
            p10: 0.50,
            p50: 0.33,
            p90: 0.28,
            origin: "fitted to published GLM-5.2 runs: 20 to 75 of 407 GB hit 24 to 60 %",
        },
        // glm-nano, LRU at 8, 12 and 16 of 32: 36.7, 55.6 and 68.2 %: 0.724, 0.598, 0.552.
        Family::GlmMoeDsa => Prior {
            p10: 0.76,
            p50: 0.60,
            p90: 0.48,
            origin: "fitted to replays of glm-nano: 8 to 16 of 32 experts hit 37 to 68 %",
        },
        // One anchor: 73 of 128 hit 74 %, exponent 0.536; the range is as wide as OLMoE's.
        Family::Qwen3Moe => Prior {
            p10: 0.75,
            p50: 0.54,
            p90: 0.42,
            origin: "fitted to one published replay: 73 of 128 experts hit 74 %",
        },
        Family::DeepseekV2
        | Family::DeepseekV3
        | Family::KimiK2
        | Family::LongcatFlash
        | Family::Glm4Moe
        | Family::Mixtral
        | Family::GptOss => UNMEASURED,
    }
}

/// The prior's hit rate of one layer. With fewer slots than a token's experts no more than the
/// slots can hit; with a slot for every expert all do, once warm.
pub(super) fn hit(exponent: f64, cap: u32, n_experts: u32, n_experts_active: u32) -> f64 {
    if cap >= n_experts {
        return 1.0;
    }
    let bound = f64::from(cap) / f64::from(n_experts_active.max(1));
    (f64::from(cap) / f64::from(n_experts)).powf(exponent).min(bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The anchors that the exponents were fitted to lie inside the range they give.
    #[test]
    fn anchors_lie_within_their_prior() {
        let cases = [
            (Family::Olmoe, 64, 24.0 / 64.0, 0.68),
            (Family::GlmMoeDsa, 32, 8.0 / 32.0, 1.0 - 0.35 * 1.81),
            (Family::GlmMoeDsa, 32, 12.0 / 32.0, 1.0 - 0.22 * 2.02),
            (Family::GlmMoeDsa, 32, 16.0 / 32.0, 1.0 - 0.14 * 2.27),
            (Family::GlmMoeDsa, 256, 20.0 / 407.0, 0.24),
            (Family::GlmMoeDsa, 256, 35.0 / 407.0, 0.44),
            (Family::GlmMoeDsa, 256, 60.0 / 407.0, 0.55),
            (Family::GlmMoeDsa, 256, 75.0 / 407.0, 0.60),
            (Family::Qwen3Moe, 128, 73.0 / 128.0, 0.74),
        ];
        for (family, n_experts, fraction, measured) in cases {
            let p = prior(family, n_experts);
            let [p10, p50, p90] = [p.p10, p.p50, p.p90].map(|e| f64::powf(fraction, e));
            assert!(p10 < p50 && p50 < p90);
            assert!(
                (p10..=p90).contains(&measured),
                "{family:?} {fraction}: {measured} outside {p10}..{p90}"
            );
        }
    }

    /// What is assumed of a family that nobody has measured covers what was measured of the others.
    #[test]
    fn the_widest_prior_is_that_of_families_without_a_measurement() {
        for family in Family::ALL {
            let p = prior(family, 256);
            assert!(p.p10 > p.p50 && p.p50 > p.p90, "{family:?}");
            assert!(UNMEASURED.p10 >= p.p10 && UNMEASURED.p90 <= p.p90, "{family:?}");
        }
    }

    #[test]
    fn a_prior_is_bounded_by_the_slots_and_whole_layers_hit() {
        assert_eq!(hit(0.3, 0, 64, 8), 0.0);
        assert_eq!(hit(0.3, 1, 64, 8), 0.125);
        assert_eq!(hit(0.3, 64, 64, 8), 1.0);
        assert!((hit(0.5, 16, 64, 8) - 0.5).abs() < 1e-12);
    }
}
