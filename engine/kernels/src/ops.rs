//! The small operations between products: norms, softmax, activations, rotations.
//!
//! Owns: their arithmetic and its order, the same on every instruction set and processor (no fused
//! multiply-add, no library `exp`). Refuses: threads, stored types, choosing anything by model.

use crate::arch::{LANES, scalar::reduce};

/// These operations as an instruction set has them; the bits are the same in all.
pub(crate) struct OpsKernels {
    pub(crate) rms_norm: fn(&mut [f32], &[f32], f32),
    pub(crate) layer_norm: fn(&mut [f32], &[f32], &[f32], f32),
    pub(crate) softmax: fn(&mut [f32]),
    pub(crate) softmax_with_sink: fn(&mut [f32], f32),
    pub(crate) silu_multiply: fn(&mut [f32], &[f32]),
    pub(crate) clamped_swiglu: fn(&mut [f32], &[f32], f32, f32),
    pub(crate) add_scaled: fn(&mut [f32], f32, &[f32]),
    pub(crate) rotate_interleaved: fn(&mut [f32], &[f32], &[f32]),
    pub(crate) rotate_half: fn(&mut [f32], &[f32], &[f32]),
}

/// What the compiler makes of them without more.
pub(crate) const KERNELS: OpsKernels = OpsKernels {
    rms_norm: rms_norm_in_place,
    layer_norm: layer_norm_in_place,
    softmax: softmax_in_place,
    softmax_with_sink: softmax_with_sink_in_place,
    silu_multiply,
    clamped_swiglu,
    add_scaled,
    rotate_interleaved,
    rotate_half,
};

/// Defines a module with the operations compiled for some features.
#[cfg(target_arch = "x86_64")]
macro_rules! ops_kernels {
    ($features:literal) => {
        mod operations {
            use crate::ops::{self, OpsKernels};

            #[target_feature(enable = $features)]
            fn rms_norm(x: &mut [f32], weight: &[f32], eps: f32) {
                ops::rms_norm_in_place(x, weight, eps);
            }
            #[target_feature(enable = $features)]
            fn layer_norm(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
                ops::layer_norm_in_place(x, weight, bias, eps);
            }
            #[target_feature(enable = $features)]
            fn softmax(x: &mut [f32]) {
                ops::softmax_in_place(x);
            }
            #[target_feature(enable = $features)]
            fn softmax_with_sink(x: &mut [f32], sink: f32) {
                ops::softmax_with_sink_in_place(x, sink);
            }
            #[target_feature(enable = $features)]
            fn silu_multiply(gate: &mut [f32], up: &[f32]) {
                ops::silu_multiply(gate, up);
            }
            #[target_feature(enable = $features)]
            fn clamped_swiglu(gate: &mut [f32], up: &[f32], alpha: f32, limit: f32) {
                ops::clamped_swiglu(gate, up, alpha, limit);
            }
            #[target_feature(enable = $features)]
            fn add_scaled(out: &mut [f32], a: f32, x: &[f32]) {
                ops::add_scaled(out, a, x);
            }
            #[target_feature(enable = $features)]
            fn rotate_interleaved(x: &mut [f32], cos: &[f32], sin: &[f32]) {
                ops::rotate_interleaved(x, cos, sin);
            }
            #[target_feature(enable = $features)]
            fn rotate_half(x: &mut [f32], cos: &[f32], sin: &[f32]) {
                ops::rotate_half(x, cos, sin);
            }

            // This table is handed out only where the processor has the features.
            pub(super) const KERNELS: OpsKernels = OpsKernels {
                // SAFETY: the features are there.
                rms_norm: |x, weight, eps| unsafe { rms_norm(x, weight, eps) },
                // SAFETY: the features are there.
                layer_norm: |x, weight, bias, eps| unsafe { layer_norm(x, weight, bias, eps) },
                // SAFETY: the features are there.
                softmax: |x| unsafe { softmax(x) },
                // SAFETY: the features are there.
                softmax_with_sink: |x, sink| unsafe { softmax_with_sink(x, sink) },
                // SAFETY: the features are there.
                silu_multiply: |gate, up| unsafe { silu_multiply(gate, up) },
                // SAFETY: the features are there.
                clamped_swiglu: |gate, up, a, limit| unsafe { clamped_swiglu(gate, up, a, limit) },
                // SAFETY: the features are there.
                add_scaled: |out, a, x| unsafe { add_scaled(out, a, x) },
                // SAFETY: the features are there.
                rotate_interleaved: |x, cos, sin| unsafe { rotate_interleaved(x, cos, sin) },
                // SAFETY: the features are there.
                rotate_half: |x, cos, sin| unsafe { rotate_half(x, cos, sin) },
            };
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use ops_kernels;

/// Sum of `term(x[i])` in the crate's order of sums.
#[inline(always)]
fn sum_of(x: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for j in 0..LANES {
            lanes[j] += term(block[j]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += term(x);
    }
    reduce(lanes)
}

/// The largest, passing over what is not a number; minus infinity of none.
#[inline(always)]
fn max_of(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            *lane = lane.max(x);
        }
    }
    lanes.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, f32::max)
}

/// e^x, within one unit in the last place, equal on every processor.
///
/// `exp(x) = 2^k * exp(r)` with `k = round(x / ln 2)`, the series of `exp(r)` in f64 to the ninth
/// power (relative error below 1e-11 for |r| <= ln 2 / 2), rounded to f32 once. The library's
/// `expf` differs between processors with and without fused multiply-add.
#[inline(always)]
#[must_use]
pub fn exp(x: f32) -> f32 {
    // Adding this leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    // Outside of this the result is 0 or infinity in f32 already.
    let x = f64::from(x).clamp(-110.0, 90.0);
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let k = shifted - ROUND;
    let r = x - k * std::f64::consts::LN_2;
    let mut series = 1.0 / 362_880.0;
    for factorial in [40_320.0, 5_040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0] {
        series = series * r + 1.0 / factorial;
    }
    // The low 12 bits of `shifted` hold k; as an exponent they make 2^k.
    let power = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    (series * power) as f32
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `out = weight * (x / sqrt(mean(x^2) + eps))`, all of one length.
///
/// # Panics
///
/// When lengths differ.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "x against out");
    out.copy_from_slice(x);
    rms_norm_in_place(out, weight, eps);
}

/// As [`rms_norm`], in place.
///
/// # Panics
///
/// When lengths differ.
#[inline(always)]
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len(), "x against weight");
    let mean = sum_of(x, |x| x * x) / x.len() as f32;
    let inverse = 1.0 / (mean + eps).sqrt();
    for (x, &weight) in x.iter_mut().zip(weight) {
        *x = weight * (*x * inverse);
    }
}

/// `out = (x - mean) / sqrt(variance + eps) * weight + bias`, all of one length; the variance is
/// that of the population, from the centred values.
///
/// # Panics
///
/// When lengths differ.
pub fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "x against out");
    out.copy_from_slice(x);
    layer_norm_in_place(out, weight, bias, eps);
}

/// As [`layer_norm`], in place.
///
/// # Panics
///
/// When lengths differ.
#[inline(always)]
pub fn layer_norm_in_place(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len(), "x against weight");
    assert_eq!(x.len(), bias.len(), "x against bias");
    let mean = sum_of(x, |x| x) / x.len() as f32;
    let variance = sum_of(x, |x| (x - mean) * (x - mean)) / x.len() as f32;
    let inverse = 1.0 / (variance + eps).sqrt();
    for ((x, &weight), &bias) in x.iter_mut().zip(weight).zip(bias) {
        *x = (*x - mean) * inverse * weight + bias;
    }
}

/// `x[i] = e^(x[i] - max) / sum`; nothing for an empty slice, NaN where all are minus infinity.
#[inline(always)]
pub fn softmax_in_place(x: &mut [f32]) {
    let max = max_of(x);
    for value in x.iter_mut() {
        *value = exp(*value - max);
    }
    let inverse = 1.0 / sum_of(x, |x| x);
    for value in x {
        *value *= inverse;
    }
}

/// As [`softmax_in_place`], with one more logit that takes part in the maximum and in the sum and gets
/// no place in the result: an attention sink (gpt-oss). With a sink of minus infinity the same bits.
#[inline(always)]
pub fn softmax_with_sink_in_place(x: &mut [f32], sink: f32) {
    let max = sink.max(max_of(x));
    for value in x.iter_mut() {
        *value = exp(*value - max);
    }
    let inverse = 1.0 / (sum_of(x, |x| x) + exp(sink - max));
    for value in x {
        *value *= inverse;
    }
}

/// `gate[i] = gate[i] * sigmoid(gate[i]) * up[i]`: the activation of SwiGLU.
///
/// # Panics
///
/// When lengths differ.
#[inline(always)]
pub fn silu_multiply(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate against up");
    for (gate, &up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

/// `gate[i] = (u + 1) * (g * sigmoid(alpha * g))`, where g is `gate[i]` but at most `limit`, and u is
/// `up[i]` within plus or minus `limit`: the activation of gpt-oss.
///
/// # Panics
///
/// When lengths differ.
#[inline(always)]
pub fn clamped_swiglu(gate: &mut [f32], up: &[f32], alpha: f32, limit: f32) {
    assert_eq!(gate.len(), up.len(), "gate against up");
    for (gate, &up) in gate.iter_mut().zip(up) {
        // Not `f32::min`, which would make a number of what is none.
        let clamped = if *gate > limit { limit } else { *gate };
        *gate = (up.clamp(-limit, limit) + 1.0) * (clamped * sigmoid(clamped * alpha));
    }
}

/// `out[i] += a * x[i]`.
///
/// # Panics
///
/// When lengths differ.
#[inline(always)]
pub fn add_scaled(out: &mut [f32], a: f32, x: &[f32]) {
    assert_eq!(out.len(), x.len(), "out against x");
    for (out, &x) in out.iter_mut().zip(x) {
        *out += a * x;
    }
}

/// Rotates the pairs `(x[2i], x[2i + 1])` by angle `i`, in place, as in RoPE with interleaved
/// pairs (RoFormer, section 3.4).
///
/// `x` is twice as long as `cos` and `sin`.
///
/// # Panics
///
/// When lengths do not agree.
#[inline(always)]
pub fn rotate_interleaved(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    assert_eq!(cos.len(), sin.len(), "cos against sin");
    assert_eq!(x.len(), 2 * cos.len(), "x against twice the angles");
    for ((pair, &cos), &sin) in x.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
        let [a, b] = *pair;
        *pair = [a * cos - b * sin, b * cos + a * sin];
    }
}

/// Rotates the pairs `(x[i], x[i + n])` by angle `i`, in place, `n` being half of the length of
/// `x`: RoPE as GPT-NeoX lays it out.
///
/// # Panics
///
/// When lengths do not agree.
#[inline(always)]
pub fn rotate_half(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    assert_eq!(cos.len(), sin.len(), "cos against sin");
    assert_eq!(x.len(), 2 * cos.len(), "x against twice the angles");
    let (first, second) = x.split_at_mut(cos.len());
    for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f32, expected: f64, relative: f64) {
        let error = (f64::from(found) - expected).abs();
        assert!(error <= relative * expected.abs() + 1e-45, "{found:e} against {expected:e}");
    }

    #[test]
    fn exp_is_within_one_unit_everywhere() {
        for step in -1_050_000..=887_000 {
            let x = step as f32 / 10_000.0;
            let expected = f64::from(x).exp();
            // Half a unit of the f32 result, subnormals included, and a little.
            let unit = (expected * f64::from(f32::EPSILON)).max(f64::from(f32::from_bits(1)));
            assert!((f64::from(exp(x)) - expected).abs() <= 0.51 * unit, "exp({x})");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(f32::MIN), 0.0);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn norms_agree_with_f64() {
        for n in [1, 7, 32, 33, 100, 512] {
            let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin() * 3.0 + 0.5).collect();
            let weight: Vec<f32> = (0..n).map(|i| 1.0 + i as f32 * 0.01).collect();
            let bias: Vec<f32> = (0..n).map(|i| i as f32 * 0.02).collect();
            let mut out = vec![0.0; n];
            let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
            let count = n as f64;

            rms_norm(&x, &weight, 1e-5, &mut out);
            let mean = wide.iter().map(|x| x * x).sum::<f64>() / count;
            for i in 0..n {
                let expected = wide[i] / (mean + 1e-5).sqrt() * f64::from(weight[i]);
                close(out[i], expected, 1e-6);
            }

            layer_norm(&x, &weight, &bias, 1e-5, &mut out);
            let mean = wide.iter().sum::<f64>() / count;
            let variance = wide.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count;
            for i in 0..n {
                let expected = (wide[i] - mean) / (variance + 1e-5).sqrt() * f64::from(weight[i])
                    + f64::from(bias[i]);
                assert!((f64::from(out[i]) - expected).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn softmax_sums_to_one_and_survives_masks() {
        let mut x = [1000.0, 999.0, f32::NEG_INFINITY, 998.0];
        softmax_in_place(&mut x);
        let total = 1.0 + (-1.0_f64).exp() + (-2.0_f64).exp();
        close(x[0], 1.0 / total, 1e-6);
        close(x[1], (-1.0_f64).exp() / total, 1e-6);
        assert_eq!(x[2], 0.0);
        softmax_in_place(&mut []);
    }

    #[test]
    fn a_sink_takes_its_share_and_no_place() {
        let x = [0.5, -1.0, 2.0];
        for sink in [-3.0_f32, 0.0, 50.0] {
            let mut found = x;
            softmax_with_sink_in_place(&mut found, sink);
            let total: f64 = x.iter().chain([&sink]).map(|x| f64::from(*x).exp()).sum();
            for (found, x) in found.iter().zip(x) {
                close(*found, f64::from(x).exp() / total, 1e-6);
            }
        }
        let (mut with, mut without) = (x, x);
        softmax_with_sink_in_place(&mut with, f32::NEG_INFINITY);
        softmax_in_place(&mut without);
        assert_eq!(with.map(f32::to_bits), without.map(f32::to_bits));
        softmax_with_sink_in_place(&mut [], 0.0);
    }

    #[test]
    fn activations() {
        let mut gate = [0.0, 1.0, -2.0, 90.0, -200.0];
        silu_multiply(&mut gate, &[5.0, 2.0, 3.0, 1.0, 1.0]);
        assert_eq!(gate[0], 0.0);
        close(gate[1], 2.0 / (1.0 + (-1.0_f64).exp()), 1e-6);
        close(gate[2], -6.0 / (1.0 + 2.0_f64.exp()), 1e-6);
        assert_eq!(gate[3], 90.0);
        assert_eq!(gate[4], 0.0);
        assert_eq!(sigmoid(0.0), 0.5);
        let mut gate = [9.0, -9.0, 1.0, f32::NAN];
        clamped_swiglu(&mut gate, &[0.5, 9.0, -9.0, 1.0], 1.702, 7.0);
        let glu = |g: f64| g / (1.0 + (-f64::from(1.702_f32) * g).exp());
        close(gate[0], 1.5 * glu(7.0), 1e-6);
        close(gate[1], 8.0 * glu(-9.0), 1e-6);
        close(gate[2], -6.0 * glu(1.0), 1e-6);
        assert!(gate[3].is_nan());
        let mut out = [1.0, 2.0];
        add_scaled(&mut out, 0.5, &[4.0, -4.0]);
        assert_eq!(out, [3.0, 0.0]);
    }

    #[test]
    fn both_rotations_turn_the_pairs_they_name() {
        let (cos, sin) = ([0.0, 1.0], [1.0, 0.0]);
        let mut x = [1.0, 2.0, 3.0, 4.0];
        rotate_interleaved(&mut x, &cos, &sin);
        assert_eq!(x, [-2.0, 1.0, 3.0, 4.0]);
        let mut x = [1.0, 2.0, 3.0, 4.0];
        rotate_half(&mut x, &cos, &sin);
        assert_eq!(x, [-3.0, 2.0, 1.0, 4.0]);
    }
}
