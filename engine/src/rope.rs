//! Rotary position embedding: owns the angles, stretched ones included. The rotation itself is the kernels'.

use tierkeep_kernels::ops;
use tierkeep_plans::spec::{RopePairing, RopeScaling, RopeSpec};

/// Frequencies of a model, computed once.
#[derive(Debug)]
pub(crate) struct Rope {
    /// Angle of each pair at position 1, `(dim / 2)`.
    frequencies: Vec<f32>,
    /// Factor on cosines and sines; 1 where nothing is stretched.
    scale: f32,
    pairing: RopePairing,
}

impl Rope {
    pub(crate) fn new(spec: &RopeSpec) -> Self {
        let scale = match spec.scaling {
            RopeScaling::None => 1.0,
            RopeScaling::Yarn { attention_factor, .. } => attention_factor as f32,
        };
        Self { frequencies: frequencies(spec), scale, pairing: spec.pairing }
    }

    /// The rotated width.
    pub(crate) fn dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// The part of `rotation` `(batch, dim)` that belongs to a token of the batch.
    pub(crate) fn of<'a>(&self, rotation: &'a [f32], token: usize) -> &'a [f32] {
        &rotation[token * self.dim()..(token + 1) * self.dim()]
    }

    /// Fills `rotation` `(2, dim / 2)` with the cosines and sines of a position. The angle is rounded to f32
    /// first and the cosine before it is scaled, as in the reference.
    pub(crate) fn angles(&self, position: usize, rotation: &mut [f32]) {
        let (cos, sin) = rotation.split_at_mut(self.frequencies.len());
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
            let angle = f64::from(position as f32 * frequency);
            *cos = angle.cos() as f32 * self.scale;
            *sin = angle.sin() as f32 * self.scale;
        }
    }

    /// Rotates one head in place by the angles in `rotation`.
    pub(crate) fn rotate(&self, head: &mut [f32], rotation: &[f32]) {
        let (cos, sin) = rotation.split_at(self.frequencies.len());
        match self.pairing {
            RopePairing::Interleaved => ops::rotate_interleaved(head, cos, sin),
            RopePairing::Halves => ops::rotate_half(head, cos, sin),
        }
    }
}

/// `theta^(-2i/dim)` for i below `dim / 2`, stretched as the spec says. Every step is rounded to f32 where
/// the reference rounds it (`_compute_yarn_parameters` of transformers): angles at large positions differ
/// by whole turns otherwise.
fn frequencies(spec: &RopeSpec) -> Vec<f32> {
    let powers = (0..spec.dim / 2).map(|i| {
        let exponent = (2 * i) as f32 / spec.dim as f32;
        (spec.theta as f32).powf(exponent)
    });
    match spec.scaling {
        RopeScaling::None => powers.map(|power| 1.0 / power).collect(),
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor: _,
        } => {
            // The dimension that turns so many times in the context of the training (Peng et al., section 3.2).
            let dimension_of = |turns: f64| {
                let ratio = original_context as f64 / (turns * 2.0 * std::f64::consts::PI);
                spec.dim as f64 * ratio.ln() / (2.0 * spec.theta.ln())
            };
            let (mut first, mut last) = (dimension_of(beta_fast), dimension_of(beta_slow));
            if truncate {
                (first, last) = (first.floor(), last.ceil());
            }
            let (first, mut last) = (first.max(0.0), last.min(spec.dim as f64 - 1.0));
            if first.total_cmp(&last).is_eq() {
                // A ramp of no length would divide by zero; the reference's is so long.
                last += 0.001;
            }
            let ramp =
                |i: usize| ((i as f32 - first as f32) / (last - first) as f32).clamp(0.0, 1.0);
            let stretch = |(i, power): (usize, f32)| {
                let (kept, divided) = (1.0 / power, 1.0 / (factor as f32 * power));
                let share_kept = 1.0 - ramp(i);
                divided * (1.0 - share_kept) + kept * share_kept
            };
            powers.enumerate().map(stretch).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn(dim: usize, theta: f64, scaling: RopeScaling) -> Rope {
        Rope::new(&RopeSpec { theta, dim, pairing: RopePairing::Interleaved, scaling })
    }

    fn scaling(
        factor: f64,
        original_context: usize,
        (beta_fast, beta_slow): (f64, f64),
        truncate: bool,
        attention_factor: f64,
    ) -> RopeScaling {
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor,
        }
    }

    /// The frequencies that the reference makes of published configs, within one unit in the last place of
    /// what `powf` of two systems may give.
    #[test]
    fn stretched_frequencies_are_the_references() {
        let deepseek = scaling(40.0, 4096, (32.0, 1.0), true, 1.0);
        let kimi = scaling(32.0, 4096, (1.0, 1.0), true, 1.0);
        let gpt_oss = scaling(32.0, 4096, (32.0, 1.0), false, 1.0);
        let no_ramp = scaling(4.0, 7, (1.0, 1.0), false, 1.0);
        let cases: [(Rope, [f32; 8]); 4] = [
            (
                yarn(64, 1e4, deepseek),
                [
                    1.0,
                    0.316_227_76,
                    0.1,
                    0.026_879_36,
                    0.005_5,
                    7.905_694e-4,
                    2.5e-5,
                    7.905_694_5e-6,
                ],
            ),
            (
                yarn(64, 5e4, kimi),
                [
                    1.0,
                    0.258_600_15,
                    0.066_874_035,
                    0.017_293_634,
                    0.004_472_136,
                    3.614_046_7e-5,
                    9.345_93e-6,
                    2.416_858_7e-6,
                ],
            ),
            (
                yarn(64, 1.5e5, gpt_oss),
                [
                    1.0,
                    0.225_418,
                    0.050_813_273,
                    0.006_794_959_3,
                    4.564_839_2e-4,
                    1.818_833_7e-5,
                    4.099_978_5e-6,
                    9.242_089_6e-7,
                ],
            ),
            (
                yarn(16, 100.0, no_ramp),
                [
                    1.0,
                    0.140_585_33,
                    0.079_056_94,
                    0.044_456_985,
                    0.025,
                    0.014_058_532,
                    0.007_905_695,
                    0.004_445_698_6,
                ],
            ),
        ];
        for (rope, expected) in cases {
            let step = rope.frequencies.len() / 8;
            for (at, expected) in expected.iter().enumerate() {
                let found = rope.frequencies[at * step];
                assert!((found / expected - 1.0).abs() < 2e-7, "{at}: {found} for {expected}");
            }
        }
    }

    #[test]
    fn the_attention_factor_is_on_cosines_and_sines() {
        let plain = yarn(8, 1e4, scaling(4.0, 64, (32.0, 1.0), true, 1.0));
        let scaled = yarn(8, 1e4, scaling(4.0, 64, (32.0, 1.0), true, 1.25));
        let (mut once, mut more) = ([0.0; 8], [0.0; 8]);
        plain.angles(11, &mut once);
        scaled.angles(11, &mut more);
        assert_eq!(once.map(|x| x * 1.25), more);
        assert!(once.iter().all(|x| *x != 0.0));
    }

    /// A factor of one stretches nothing, whatever the ramp.
    #[test]
    fn a_factor_of_one_gives_the_plain_angles() {
        let plain = yarn(16, 1e4, RopeScaling::None);
        let by_one = yarn(16, 1e4, scaling(1.0, 64, (32.0, 1.0), false, 1.0));
        for (a, b) in plain.frequencies.iter().zip(&by_one.frequencies) {
            assert!((a / b - 1.0).abs() < 2e-7);
        }
    }
}
