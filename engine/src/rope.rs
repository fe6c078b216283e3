//! Rotary position embedding: owns the angles. The rotation itself is the kernels'.

use tierkeep_kernels::ops;
use tierkeep_plans::spec::{RopePairing, RopeSpec};

/// Frequencies of a model, computed once.
#[derive(Debug)]
pub(crate) struct Rope {
    /// `theta^(-2i/dim)` for i below `dim / 2`, rounded to f32 as the reference does.
    frequencies: Vec<f32>,
    pairing: RopePairing,
}

impl Rope {
    pub(crate) fn new(spec: &RopeSpec) -> Self {
        let frequency = |i: usize| {
            let exponent = (2 * i) as f32 / spec.dim as f32;
            (1.0 / (spec.theta as f32).powf(exponent) as f64) as f32
        };
        Self { frequencies: (0..spec.dim / 2).map(frequency).collect(), pairing: spec.pairing }
    }

    /// Fills `rotation` `(2, dim / 2)` with the cosines and sines of a position. The angle is
    /// rounded to f32 first, as in the reference.
    pub(crate) fn angles(&self, position: usize, rotation: &mut [f32]) {
        let (cos, sin) = rotation.split_at_mut(self.frequencies.len());
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
            let angle = f64::from(position as f32 * frequency);
            *cos = angle.cos() as f32;
            *sin = angle.sin() as f32;
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
