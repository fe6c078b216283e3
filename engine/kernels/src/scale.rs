//! Scales of groups of weights and the integers that they give: what a converter does to each weight.
//!
//! Owns: the search for a scale, the rounding, and the order of their sums. Refuses: which candidates are
//! tried and why (the converter's), bytes of files.
//!
//! Everything is written once, in blocks that a compiler makes vectors of, and is compiled for each
//! instruction set (`arch`). Sums have one order and products are never fused, so that the bits are the same
//! on all of them: element `i` goes to lane `i` modulo 16, in ascending `i`; lanes are added from the first to
//! the last, but those of reported errors, in f64, in a tree.

use crate::convert::{f16_to_f32, f32_to_f16};

/// Sums run in so many lanes.
pub(crate) const LANES: usize = 16;
/// Candidates that are tried in one pass over a group: as many sums as registers hold.
const AT_ONCE: usize = 3;
/// Adding and taking off 1.5 * 2^23 rounds numbers below 2^22 as the processor rounds sums: to nearest, ties
/// to even. In between, the low bits are the integer in two's complement.
const SHIFT: f32 = 12_582_912.0;

/// How a scale is searched for.
#[derive(Clone, Copy, Debug)]
pub struct ScaleSearch<'a> {
    /// The largest integer; the least is one below its negative.
    pub largest: f32,
    /// Candidates are `-extreme / divisor`.
    pub divisors: &'a [f32],
    /// How often the best scale is bettered by least squares: with the integers that it gives, the scale
    /// that fits them best, and the integers of that.
    pub rounds: usize,
    /// Whether an element counts by its size; if not, all count alike.
    pub is_weighted: bool,
    /// Whether scales are rounded to f16 before they are judged.
    pub is_f16: bool,
}

/// 16 numbers in registers. Methods are to be inlined into a function that has the processor features.
pub(crate) trait Lanes: Copy {
    fn splat(x: f32) -> Self;
    fn load(from: &[f32; LANES]) -> Self;
    fn add(self, other: Self) -> Self;
    fn subtract(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn lower(self, other: Self) -> Self;
    fn higher(self, other: Self) -> Self;
    fn abs(self) -> Self;
    fn store(self) -> [f32; LANES];

    /// The nearest integers, ties to even, of numbers that are clamped first, which is the same.
    #[inline(always)]
    fn nearest(self, largest: f32) -> Self {
        let clamped = self.lower(Self::splat(largest)).higher(Self::splat(-largest - 1.0));
        clamped.add(Self::splat(SHIFT)).subtract(Self::splat(SHIFT))
    }

    /// The sum, from the first lane to the last.
    #[inline(always)]
    fn sum(self) -> f32 {
        let lanes = self.store();
        let mut sum = lanes[0];
        for lane in &lanes[1..] {
            sum += lane;
        }
        sum
    }
}

/// Without registers of their own.
#[derive(Clone, Copy)]
pub(crate) struct Plain([f32; LANES]);

impl Plain {
    #[inline(always)]
    fn with(mut self, other: Self, of: impl Fn(f32, f32) -> f32) -> Self {
        for lane in 0..LANES {
            self.0[lane] = of(self.0[lane], other.0[lane]);
        }
        self
    }
}

impl Lanes for Plain {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        Self(*from)
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.with(other, |a, b| a + b)
    }
    #[inline(always)]
    fn subtract(self, other: Self) -> Self {
        self.with(other, |a, b| a - b)
    }
    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        self.with(other, |a, b| a * b)
    }
    #[inline(always)]
    fn lower(self, other: Self) -> Self {
        self.with(other, lower)
    }
    #[inline(always)]
    fn higher(self, other: Self) -> Self {
        self.with(other, higher)
    }
    #[inline(always)]
    fn abs(self) -> Self {
        self.with(self, |a, _| a.abs())
    }
    #[inline(always)]
    fn store(self) -> [f32; LANES] {
        self.0
    }
}

/// The kernels of one instruction set.
pub(crate) struct ScaleKernels {
    pub(crate) not_finite: fn(&[f32]) -> Option<usize>,
    pub(crate) extreme: fn(&[f32]) -> f32,
    pub(crate) search: fn(&ScaleSearch<'_>, &[f32], f32) -> Option<f32>,
    pub(crate) round: fn(&[f32], f32, f32, &mut [i8]) -> [f64; 2],
}

/// Compiles the kernels for an instruction set.
#[cfg(target_arch = "x86_64")]
macro_rules! scale_kernels {
    ($features:literal) => {
        mod scales {
            use crate::scale::{self, ScaleKernels, ScaleSearch};

            #[target_feature(enable = $features)]
            fn not_finite(row: &[f32]) -> Option<usize> {
                scale::not_finite(row)
            }

            #[target_feature(enable = $features)]
            fn extreme(group: &[f32]) -> f32 {
                scale::extreme(group)
            }

            #[target_feature(enable = $features)]
            fn search(search: &ScaleSearch<'_>, group: &[f32], extreme: f32) -> Option<f32> {
                scale::search::<super::Sixteen>(search, group, extreme)
            }

            #[target_feature(enable = $features)]
            fn round(group: &[f32], scale: f32, largest: f32, out: &mut [i8]) -> [f64; 2] {
                scale::round(group, scale, largest, out)
            }

            pub(super) const KERNELS: ScaleKernels = ScaleKernels {
                // SAFETY: this table is handed out only where the processor has the features.
                not_finite: |row| unsafe { not_finite(row) },
                // SAFETY: this table is handed out only where the processor has the features.
                extreme: |group| unsafe { extreme(group) },
                // SAFETY: this table is handed out only where the processor has the features.
                search: |how, group, extreme| unsafe { search(how, group, extreme) },
                // SAFETY: this table is handed out only where the processor has the features.
                round: |group, scale, largest, out| unsafe { round(group, scale, largest, out) },
            };
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use scale_kernels;

/// What the compiler makes of it without more.
pub(crate) const KERNELS: ScaleKernels =
    ScaleKernels { not_finite, extreme, search: search::<Plain>, round };

/// The first element that is infinite or not a number.
#[inline(always)]
pub(crate) fn not_finite(row: &[f32]) -> Option<usize> {
    // Without its sign, a larger number has larger bits.
    let size = |x: &f32| (x.to_bits() & 0x7fff_ffff).cast_signed();
    let most = row.iter().map(size).fold(0, |most, size| if size > most { size } else { most });
    if most < 0x7f80_0000 {
        return None;
    }
    row.iter().position(|x| !x.is_finite())
}

/// The first of the elements that are furthest from zero.
#[inline(always)]
pub(crate) fn extreme(group: &[f32]) -> f32 {
    let (mut low, mut high) = ([0.0_f32; LANES], [0.0_f32; LANES]);
    let (whole, rest) = group.as_chunks::<LANES>();
    let last = filled(rest);
    for part in [whole, of_use(&last, rest)] {
        for x in part {
            for lane in 0..LANES {
                low[lane] = lower(x[lane], low[lane]);
                high[lane] = higher(x[lane], high[lane]);
            }
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            low[lane] = lower(low[lane + half], low[lane]);
            high[lane] = higher(high[lane + half], high[lane]);
        }
        half /= 2;
    }
    let (low, high) = (low[0], high[0]);
    if high > -low {
        high
    } else if high < -low {
        low
    } else {
        group.iter().copied().find(|x| x.abs() == high).unwrap_or(0.0)
    }
}

/// The scale with the least error of what is tried, the first of equals; `None` where none is finite.
#[inline(always)]
pub(crate) fn search<L: Lanes>(how: &ScaleSearch<'_>, group: &[f32], extreme: f32) -> Option<f32> {
    if how.is_weighted {
        search_by::<L, true>(how, group, extreme)
    } else {
        search_by::<L, false>(how, group, extreme)
    }
}

#[inline(always)]
fn search_by<L: Lanes, const WEIGHTED: bool>(
    how: &ScaleSearch<'_>,
    group: &[f32],
    extreme: f32,
) -> Option<f32> {
    let mut best = Best { error: f32::INFINITY, scale: f32::NAN };
    for divisors in how.divisors.chunks(AT_ONCE) {
        let mut scales = [[f32::NAN; 2]; AT_ONCE];
        for (scale, divisor) in scales.iter_mut().zip(divisors) {
            *scale = candidate(how, -extreme / divisor);
        }
        best.consider::<L, WEIGHTED, AT_ONCE>(how.largest, group, scales);
    }
    // Where one round betters nothing, the next tries the same again: no branch is worth its cost here.
    for _ in 0..how.rounds {
        // Nothing fits what no scale of the type reaches.
        if !best.scale.is_finite() {
            return None;
        }
        let next = least_squares::<L, WEIGHTED>(how.largest, group, 1.0 / best.scale);
        best.consider::<L, WEIGHTED, 1>(how.largest, group, [candidate(how, next)]);
    }
    best.scale.is_finite().then_some(best.scale)
}

/// A scale as its type holds it and its reciprocal; NaNs where one of them is not finite.
#[inline(always)]
fn candidate(how: &ScaleSearch<'_>, scale: f32) -> [f32; 2] {
    let scale = if how.is_f16 { f16_to_f32(f32_to_f16(scale)) } else { scale };
    let inverse = 1.0 / scale;
    if scale.is_finite() && inverse.is_finite() { [scale, inverse] } else { [f32::NAN; 2] }
}

struct Best {
    error: f32,
    /// Not a number until one was taken.
    scale: f32,
}

impl Best {
    /// Takes the first scale that is better than all before it, one after the other.
    #[inline(always)]
    fn consider<L: Lanes, const WEIGHTED: bool, const N: usize>(
        &mut self,
        largest: f32,
        group: &[f32],
        scales: [[f32; 2]; N],
    ) {
        let errors = errors::<L, WEIGHTED, N>(largest, group, scales);
        for n in 0..N {
            let is_better = (scales[n][0].is_finite()) & (errors[n] < self.error);
            self.error = if is_better { errors[n] } else { self.error };
            self.scale = if is_better { scales[n][0] } else { self.scale };
        }
    }
}

/// `sum of w * (x - scale * q)^2` of some scales, `w` being 1 or `|x|`.
#[inline(always)]
fn errors<L: Lanes, const WEIGHTED: bool, const N: usize>(
    largest: f32,
    group: &[f32],
    scales: [[f32; 2]; N],
) -> [f32; N] {
    let mut sums = [L::splat(0.0); N];
    let (whole, rest) = group.as_chunks::<LANES>();
    let last = filled(rest);
    for part in [whole, of_use(&last, rest)] {
        for x in part {
            let x = L::load(x);
            for n in 0..N {
                let [scale, inverse] = scales[n];
                let q = x.multiply(L::splat(inverse)).nearest(largest);
                let difference = x.subtract(q.multiply(L::splat(scale)));
                let square = difference.multiply(difference);
                let term = if WEIGHTED { square.multiply(x.abs()) } else { square };
                sums[n] = sums[n].add(term);
            }
        }
    }
    let mut errors = [0.0; N];
    for n in 0..N {
        errors[n] = sums[n].sum();
    }
    errors
}

/// The scale that fits the integers of another scale best: `sum of w q x / sum of w q q`.
#[inline(always)]
fn least_squares<L: Lanes, const WEIGHTED: bool>(largest: f32, group: &[f32], inverse: f32) -> f32 {
    let (mut qx, mut qq) = (L::splat(0.0), L::splat(0.0));
    let (whole, rest) = group.as_chunks::<LANES>();
    let last = filled(rest);
    for part in [whole, of_use(&last, rest)] {
        for x in part {
            let x = L::load(x);
            let q = x.multiply(L::splat(inverse)).nearest(largest);
            let weighted = if WEIGHTED { q.multiply(x.abs()) } else { q };
            qx = qx.add(weighted.multiply(x));
            qq = qq.add(weighted.multiply(q));
        }
    }
    qx.sum() / qq.sum()
}

/// The nearest integer of a number, clamped, above [`SHIFT`].
#[inline(always)]
fn shifted(x: f32, largest: f32) -> f32 {
    let low = -largest - 1.0;
    let x = if x < largest { x } else { largest };
    let x = if x > low { x } else { low };
    x + SHIFT
}

/// The integers of a group by its scale, `clamp(round(x / scale))`. Returns the sums of
/// `(x - scale * q)^2` and of `x^2`.
#[inline(always)]
pub(crate) fn round(group: &[f32], scale: f32, largest: f32, out: &mut [i8]) -> [f64; 2] {
    let (mut errors, mut squares) = ([0.0_f64; LANES], [0.0_f64; LANES]);
    let (whole, rest) = group.as_chunks::<LANES>();
    let (whole_out, rest_out) = out.as_chunks_mut::<LANES>();
    let (last, mut last_out) = (filled(rest), [[0; LANES]; 1]);
    let n_last = usize::from(!rest.is_empty());
    for (part, out) in [(whole, whole_out), (of_use(&last, rest), &mut last_out[..n_last])] {
        for (x, out) in part.iter().zip(out) {
            for lane in 0..LANES {
                let shifted = shifted(x[lane] / scale, largest);
                out[lane] = shifted.to_bits() as i8;
                let exact = f64::from(x[lane]);
                let difference = exact - f64::from(scale * (shifted - SHIFT));
                errors[lane] += difference * difference;
                squares[lane] += exact * exact;
            }
        }
    }
    for (q, last) in rest_out.iter_mut().zip(last_out[0]) {
        *q = last;
    }
    [added(errors), added(squares)]
}

#[inline(always)]
fn lower(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

#[inline(always)]
fn higher(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The last elements of a group, filled up with zeros, which add nothing to any sum.
#[inline(always)]
fn filled(rest: &[f32]) -> [[f32; LANES]; 1] {
    let mut last = [[0.0; LANES]];
    last[0][..rest.len()].copy_from_slice(rest);
    last
}

/// What was filled up, if there was anything to.
#[inline(always)]
fn of_use<'a>(last: &'a [[f32; LANES]; 1], rest: &[f32]) -> &'a [[f32; LANES]] {
    if rest.is_empty() { &[] } else { last }
}

/// Lanes as one, in a tree.
#[inline(always)]
fn added<T: Copy + std::ops::Add<Output = T>>(mut lanes: [T; LANES]) -> T {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = lanes[lane] + lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::{Isa, Kernels};

    const DIVISORS: [f32; 7] = [8.0, 7.25, 8.75, 6.5, -7.25, 1.0, 0.0];

    #[test]
    fn rounding_is_to_even_and_clamped() {
        let x: Vec<f32> = (-2000_i16..=2000).map(|i| f32::from(i) / 8.0).collect();
        for isa in Isa::supported() {
            let mut out = vec![0; x.len()];
            let [error, size] = Kernels::new(isa).unwrap().round_group(&x, 1.0, 127.0, &mut out);
            let expected = x.iter().map(|x| x.round_ties_even().clamp(-128.0, 127.0));
            assert!(out.iter().map(|q| f32::from(*q)).eq(expected.clone()), "{isa}");
            let square = |x: f32| f64::from(x).powi(2);
            let errors = x.iter().zip(expected).map(|(x, q)| square(x - q));
            assert!((error / errors.sum::<f64>() - 1.0).abs() < 1e-12);
            assert!((size / x.iter().copied().map(square).sum::<f64>() - 1.0).abs() < 1e-12);
            let mut far = [0; 2];
            let _ = Kernels::new(isa).unwrap().round_group(&[3e38, -3e38], 1e-3, 7.0, &mut far);
            assert_eq!(far, [7, -8], "{isa}");
        }
    }

    #[test]
    fn the_extreme_keeps_its_sign_and_is_the_first() {
        for isa in Isa::supported() {
            let kernels = Kernels::new(isa).unwrap();
            let mut group = vec![0.5; 41];
            (group[20], group[37], group[40]) = (-2.0, 2.0, -2.0);
            assert_eq!(kernels.extreme(&group), -2.0);
            group[3] = 2.0;
            assert_eq!(kernels.extreme(&group), 2.0);
            group[40] = -2.5;
            assert_eq!(kernels.extreme(&group), -2.5);
            assert_eq!((kernels.extreme(&[]), kernels.extreme(&[-0.0])), (0.0, 0.0));
            assert_eq!(kernels.not_finite(&group), None);
            group[40] = f32::NEG_INFINITY;
            assert_eq!(kernels.not_finite(&group), Some(40));
            group[7] = f32::NAN;
            assert_eq!(kernels.not_finite(&group), Some(7));
            assert_eq!(kernels.not_finite(&[f32::MAX, f32::MIN]), None);
        }
    }

    proptest! {
        #[test]
        fn every_instruction_set_gives_the_same_bits(
            group in vec(prop_oneof![
                20 => -1.0_f32..1.0,
                1 => Just(0.0),
                1 => -3e38_f32..3e38,
                1 => -1e-38_f32..1e-38,
            ], 0..200),
            bits in 0_usize..3,
            is_weighted: bool,
            is_f16: bool,
        ) {
            let largest = [1.0, 7.0, 127.0][bits];
            let how = ScaleSearch { largest, divisors: &DIVISORS, rounds: 2, is_weighted, is_f16 };
            let of = |isa| {
                let kernels = Kernels::new(isa).unwrap();
                let extreme = kernels.extreme(&group);
                let scale = kernels.search_scale(&how, &group, extreme);
                let mut out = vec![0; group.len()];
                let by = scale.unwrap_or(1.0);
                let sums = kernels.round_group(&group, by, largest, &mut out);
                (extreme.to_bits(), scale.map(f32::to_bits), out, sums.map(f64::to_bits))
            };
            for isa in Isa::supported() {
                prop_assert_eq!(of(isa), of(Isa::Scalar), "{}", isa);
            }
        }
    }
}
