//! The small operations of [`crate::ops`] in the instruction set of some kernels: the same bits, sooner.
//!
//! Owns: the way to them. Refuses: their arithmetic.

use crate::Kernels;

impl Kernels {
    /// As [`crate::ops::rms_norm`].
    ///
    /// # Panics
    ///
    /// When lengths differ.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "x against out");
        out.copy_from_slice(x);
        self.rms_norm_in_place(out, weight, eps);
    }

    /// As [`crate::ops::rms_norm_in_place`].
    ///
    /// # Panics
    ///
    /// When lengths differ.
    pub fn rms_norm_in_place(&self, x: &mut [f32], weight: &[f32], eps: f32) {
        (self.table.operations.rms_norm)(x, weight, eps);
    }

    /// As [`crate::ops::layer_norm`].
    ///
    /// # Panics
    ///
    /// When lengths differ.
    pub fn layer_norm(&self, x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "x against out");
        out.copy_from_slice(x);
        self.layer_norm_in_place(out, weight, bias, eps);
    }

    /// As [`crate::ops::layer_norm_in_place`].
    ///
    /// # Panics
    ///
    /// When lengths differ.
    pub fn layer_norm_in_place(&self, x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
        (self.table.operations.layer_norm)(x, weight, bias, eps);
    }

    /// As [`crate::ops::softmax_in_place`].
    pub fn softmax_in_place(&self, x: &mut [f32]) {
        (self.table.operations.softmax)(x);
    }

    /// As [`crate::ops::softmax_with_sink_in_place`].
    pub fn softmax_with_sink_in_place(&self, x: &mut [f32], sink: f32) {
        (self.table.operations.softmax_with_sink)(x, sink);
    }

    /// As [`crate::ops::silu_multiply`].
    ///
    /// # Panics
    ///
    /// When lengths differ.
    pub fn silu_multiply(&self, gate: &mut [f32], up: &[f32]) {
        (self.table.operations.silu_multiply)(gate, up);
    }

    /// As [`crate::ops::clamped_swiglu`].
    ///
    /// # Panics
    ///
    /// When lengths differ.
    pub fn clamped_swiglu(&self, gate: &mut [f32], up: &[f32], alpha: f32, limit: f32) {
        (self.table.operations.clamped_swiglu)(gate, up, alpha, limit);
    }

    /// As [`crate::ops::add_scaled`].
    ///
    /// # Panics
    ///
    /// When lengths differ.
    pub fn add_scaled(&self, out: &mut [f32], a: f32, x: &[f32]) {
        (self.table.operations.add_scaled)(out, a, x);
    }

    /// As [`crate::ops::rotate_interleaved`].
    ///
    /// # Panics
    ///
    /// When lengths do not agree.
    pub fn rotate_interleaved(&self, x: &mut [f32], cos: &[f32], sin: &[f32]) {
        (self.table.operations.rotate_interleaved)(x, cos, sin);
    }

    /// As [`crate::ops::rotate_half`].
    ///
    /// # Panics
    ///
    /// When lengths do not agree.
    pub fn rotate_half(&self, x: &mut [f32], cos: &[f32], sin: &[f32]) {
        (self.table.operations.rotate_half)(x, cos, sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, ops};

    /// Numbers of all sizes and what is none, so that lanes, tails and clamps are all met.
    fn values(len: usize, seed: usize) -> Vec<f32> {
        const ODD: [f32; 8] =
            [0.0, -0.0, 1e-40, -3e38, 88.5, -104.0, f32::INFINITY, f32::NEG_INFINITY];
        let of = |i: usize| match (i * 7 + seed) % 29 {
            at @ 0..8 if seed % 2 == 1 => ODD[at],
            _ => ((i + seed * 31) as f32 * 0.37).sin() * 6.0,
        };
        (0..len).map(of).collect()
    }

    #[test]
    fn every_instruction_set_gives_the_bits_of_plain_code() {
        type Run<'a> = &'a dyn Fn(Option<Kernels>, &mut [f32], &[f32], &[f32]);
        let (a, b) = (1.702, 7.0);
        let runs: [Run<'_>; 9] = [
            &|k, x, y, _| match k {
                None => ops::rms_norm_in_place(x, y, 1e-5),
                Some(k) => k.rms_norm_in_place(x, y, 1e-5),
            },
            &|k, x, y, z| match k {
                None => ops::layer_norm_in_place(x, y, z, 1e-5),
                Some(k) => k.layer_norm_in_place(x, y, z, 1e-5),
            },
            &|k, x, _, _| match k {
                None => ops::softmax_in_place(x),
                Some(k) => k.softmax_in_place(x),
            },
            &|k, x, _, _| match k {
                None => ops::softmax_with_sink_in_place(x, a),
                Some(k) => k.softmax_with_sink_in_place(x, a),
            },
            &|k, x, y, _| match k {
                None => ops::silu_multiply(x, y),
                Some(k) => k.silu_multiply(x, y),
            },
            &|k, x, y, _| match k {
                None => ops::clamped_swiglu(x, y, a, b),
                Some(k) => k.clamped_swiglu(x, y, a, b),
            },
            &|k, x, y, _| match k {
                None => ops::add_scaled(x, a, y),
                Some(k) => k.add_scaled(x, a, y),
            },
            &|k, x, y, z| {
                let half = x.len() / 2;
                let (x, y, z) = (&mut x[..2 * half], &y[..half], &z[..half]);
                match k {
                    None => ops::rotate_interleaved(x, y, z),
                    Some(k) => k.rotate_interleaved(x, y, z),
                }
            },
            &|k, x, y, z| {
                let half = x.len() / 2;
                let (x, y, z) = (&mut x[..2 * half], &y[..half], &z[..half]);
                match k {
                    None => ops::rotate_half(x, y, z),
                    Some(k) => k.rotate_half(x, y, z),
                }
            },
        ];
        for (at, run) in runs.iter().enumerate() {
            for len in [0, 1, 2, 15, 31, 32, 33, 64, 100, 1027] {
                for seed in 0..4 {
                    let (x, y, z) = (values(len, seed), values(len, 2 * seed), values(len, 5));
                    let mut expected = x.clone();
                    run(None, &mut expected, &y, &z);
                    for isa in Isa::supported() {
                        let mut found = x.clone();
                        run(Some(Kernels::new(isa).unwrap()), &mut found, &y, &z);
                        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                            let is_same = found.to_bits() == expected.to_bits()
                                || found.is_nan() && expected.is_nan();
                            assert!(is_same, "{isa} {at} of {len}, {i}: {found:e}, {expected:e}");
                        }
                    }
                }
            }
        }
    }
}
