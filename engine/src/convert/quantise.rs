//! One row of floats to one row of integers and its scales. Owns the rounding and the bytes; which
//! scale a group gets is `scale`'s. Knows no files.

use half::f16;
use tierkeep_kernels::Kernels;
use tierkeep_plans::catalogue::{Packed, PackedBits, ScaleType};

use super::scale::{ScaleMethod, TooLarge, largest, scale_of};

/// Why a row cannot be quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowFault {
    /// An element is infinite or not a number.
    NotFinite {
        /// The first such column.
        col: usize,
    },
    /// A scale is beyond the largest f16.
    ScaleTooLarge,
}

/// Quantises rows of one weight.
pub(super) struct RowQuantiser<'a> {
    kernels: &'a Kernels,
    target: Packed,
    method: ScaleMethod,
    /// Elements that share a scale.
    group: usize,
    quantised: Vec<i8>,
}

impl<'a> RowQuantiser<'a> {
    pub(super) fn new(kernels: &'a Kernels, target: Packed, cols: usize) -> Self {
        let group = target.group.cols().map_or(cols, |group| group as usize).max(1);
        let method = ScaleMethod::of(target);
        Self { kernels, target, method, group, quantised: vec![0; cols] }
    }

    /// Appends one packed row to `packed` and its scales to `scales`. Returns `|x - scale * q| / |x|`,
    /// Euclidean; `None` for a row of zeros.
    ///
    /// Of each group `q = clamp(round-half-even(x / scale), -2^(b-1), 2^(b-1) - 1)` with the scale
    /// of [`ScaleMethod`], as its type holds it: it is rounded before anything is divided by it. A
    /// division, not a product with the reciprocal: that rounds differently, and the bytes of the plain
    /// form are to equal other writers'.
    pub(super) fn push(
        &mut self,
        row: &[f32],
        packed: &mut Vec<u8>,
        scales: &mut Vec<u8>,
    ) -> Result<Option<f64>, RowFault> {
        if let Some(col) = self.kernels.not_finite(row) {
            return Err(RowFault::NotFinite { col });
        }
        let Packed { bits, scale: stored, .. } = self.target;
        let (mut error, mut total) = (0.0_f64, 0.0_f64);
        let groups = row.chunks(self.group).zip(self.quantised.chunks_mut(self.group));
        for (group, quantised) in groups {
            let scale = scale_of(self.kernels, self.method, (bits, stored), group)
                .map_err(|TooLarge| RowFault::ScaleTooLarge)?;
            push_scale(stored, scale, scales);
            let [of_group, size] = self.kernels.round_group(group, scale, largest(bits), quantised);
            error += of_group;
            total += size;
        }
        pack(bits, &self.quantised, packed);
        Ok((total > 0.0).then(|| (error / total).sqrt()))
    }
}

/// Stores a scale that its type holds.
fn push_scale(stored: ScaleType, scale: f32, scales: &mut Vec<u8>) {
    match stored {
        ScaleType::F32 => scales.extend_from_slice(&scale.to_le_bytes()),
        ScaleType::F16 => scales.extend_from_slice(&f16::from_f32(scale).to_le_bytes()),
    }
}

/// Packs a row. The bits that fill its last byte are 0: no reader looks at them.
fn pack(bits: PackedBits, quantised: &[i8], packed: &mut Vec<u8>) {
    match bits {
        PackedBits::Eight => packed.extend(quantised.iter().map(|q| *q as u8)),
        PackedBits::Four => {
            let (pairs, rest) = quantised.as_chunks::<2>();
            packed.extend(pairs.iter().map(|pair| nibbles(*pair)));
            packed.extend(rest.iter().map(|q| nibbles([*q, -8])));
        }
        PackedBits::Two => {
            let (fours, rest) = quantised.as_chunks::<4>();
            packed.extend(fours.iter().map(|four| crumbs(*four)));
            if !rest.is_empty() {
                packed.push(crumbs(std::array::from_fn(|i| rest.get(i).copied().unwrap_or(-2))));
            }
        }
    }
}

/// Two integers of 4 bits in a byte, each 8 above itself, which is its lowest bits with the sign turned; the
/// first in the low bits.
fn nibbles(pair: [i8; 2]) -> u8 {
    let both = u16::from_le_bytes(pair.map(i8::cast_unsigned)) ^ 0x0808;
    ((both & 0x0f) | ((both >> 4) & 0xf0)) as u8
}

/// Four integers of 2 bits in a byte, each 2 above itself.
fn crumbs(four: [i8; 4]) -> u8 {
    let all = u32::from_le_bytes(four.map(i8::cast_unsigned)) ^ 0x0202_0202;
    ((all & 3) | ((all >> 6) & 0x0c) | ((all >> 12) & 0x30) | ((all >> 18) & 0xc0)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierkeep_kernels::Isa;
    use tierkeep_plans::catalogue::Group;

    const INT8: Packed = Packed::plain(PackedBits::Eight);
    const INT4: Packed = Packed::plain(PackedBits::Four);
    const INT2: Packed = Packed::plain(PackedBits::Two);

    /// Packed bytes, scales as stored, and the relative error.
    type Outcome = (Vec<u8>, Vec<u8>, Option<f64>);

    fn quantise(target: Packed, row: &[f32]) -> Result<Outcome, RowFault> {
        let (mut packed, mut scales) = (Vec::new(), Vec::new());
        let kernels = Kernels::new(Isa::best()).unwrap();
        let mut quantiser = RowQuantiser::new(&kernels, target, row.len());
        let error = quantiser.push(row, &mut packed, &mut scales)?;
        Ok((packed, scales, error))
    }

    fn one() -> Vec<u8> {
        1.0_f32.to_le_bytes().to_vec()
    }

    #[test]
    fn ties_go_to_even_and_the_largest_is_exact() {
        let row = [127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5];
        let (packed, scales, _) = quantise(INT8, &row).unwrap();
        assert_eq!((packed, scales), (vec![127, 129, 0, 2, 2, 0, 254], one()));
    }

    #[test]
    fn low_bits_come_first_and_short_rows_are_filled() {
        let (packed, scales, error) = quantise(INT4, &[7.0, -7.0, 1.0]).unwrap();
        assert_eq!((packed, scales, error), (vec![0x1f, 0x09], one(), Some(0.0)));
        // 3, 1, 2, 3; 1 in the low bits of the second byte.
        let (packed, scales, error) = quantise(INT2, &[1.0, -1.0, 0.0, 1.0, -1.0]).unwrap();
        assert_eq!((packed, scales, error), (vec![0b_11_10_01_11, 0b_01], one(), Some(0.0)));
    }

    #[test]
    fn rows_of_zeros_have_the_scale_one() {
        assert_eq!(quantise(INT4, &[0.0, -0.0]).unwrap(), (vec![0x88], one(), None));
        // A smallest subnormal over 127 is zero in f32.
        let tiny = quantise(INT8, &[f32::from_bits(1)]).unwrap();
        assert_eq!(tiny, (vec![0], one(), Some(1.0)));
        // And what f16 cannot hold is zero in f16: 2^-25 rounds to even.
        let half = Packed { scale: ScaleType::F16, ..INT8 };
        let (packed, scales, _) = quantise(half, &[127.0 * 2.0_f32.powi(-25)]).unwrap();
        assert_eq!((packed, scales), (vec![0], vec![0x00, 0x3c]));
    }

    #[test]
    fn groups_have_scales_of_their_own() {
        let target = Packed { group: Group::Of32, ..INT8 };
        let row: Vec<f32> = (0..40).map(|i| if i < 32 { 127.0 } else { 254.0 }).collect();
        let (packed, scales, error) = quantise(target, &row).unwrap();
        assert_eq!((packed, error), (vec![127; 40], Some(0.0)));
        assert_eq!(scales, [1.0_f32.to_le_bytes(), 2.0_f32.to_le_bytes()].concat());
    }

    #[test]
    fn scales_of_16_bits_are_rounded_before_they_divide() {
        let target = Packed { scale: ScaleType::F16, ..INT8 };
        // 0.1 over 127 in f16 is above it, so that the largest is 126.98 steps.
        let scale = f16::from_f32(0.1 / 127.0);
        let row = [0.1, 63.5 * scale.to_f32(), 64.5 * scale.to_f32()];
        let (packed, scales, _) = quantise(target, &row).unwrap();
        assert_eq!((packed, scales), (vec![127, 64, 64], scale.to_le_bytes().to_vec()));
        // One that is rounded down: the largest is clamped.
        let half_max = f16::MAX.to_f32();
        assert_eq!(quantise(target, &[half_max * 127.0]).unwrap().0, [127]);
        let fault = quantise(target, &[65520.0 * 127.0]).unwrap_err();
        assert_eq!(fault, RowFault::ScaleTooLarge);
    }

    #[test]
    fn what_is_not_finite_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(quantise(INT8, &[1.0, bad]).unwrap_err(), RowFault::NotFinite { col: 1 });
        }
    }
}
