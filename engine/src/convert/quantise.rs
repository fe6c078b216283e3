//! One row of floats to one row of integers and its scale. Owns the arithmetic of the plain form;
//! knows no files.

use half::{bf16, f16};
use tierkeep_plans::catalogue::StoredType;

/// What quantising a row gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RowOutcome {
    /// What the stored integers are multiplied by.
    pub(super) scale: f32,
    /// `|x - scale * q| / |x|`, Euclidean; `None` for a row of zeros.
    pub(super) relative_error: Option<f64>,
}

/// Quantises rows of one weight.
pub(super) struct RowQuantiser {
    stored: StoredType,
    target: StoredType,
    row: Vec<f32>,
    quantised: Vec<i8>,
}

impl RowQuantiser {
    pub(super) fn new(stored: StoredType, target: StoredType, cols: usize) -> Self {
        Self { stored, target, row: vec![0.0; cols], quantised: vec![0; cols] }
    }

    /// Appends one packed row to `packed`; `None` where an element is not finite.
    ///
    /// `scale = absmax / (2^(b-1) - 1)` in f32, 1 for a row of zeros;
    /// `q = clamp(round-half-even(x / scale), -2^(b-1), 2^(b-1) - 1)`. A division, not a product
    /// with the reciprocal: that rounds differently, and bytes are to equal other writers'.
    pub(super) fn push(&mut self, bytes: &[u8], packed: &mut Vec<u8>) -> Option<RowOutcome> {
        decode(self.stored, bytes, &mut self.row);
        if !self.row.iter().all(|x| x.is_finite()) {
            return None;
        }
        let absmax = self.row.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
        let largest = if self.target == StoredType::Int4 { 7.0_f32 } else { 127.0 };
        let scale = match absmax / largest {
            // Also where the quotient underflows: no scale of f32 could hold such a row.
            0.0 => 1.0,
            scale => scale,
        };
        let (mut error, mut total) = (0.0_f64, 0.0_f64);
        for (x, q) in self.row.iter().zip(&mut self.quantised) {
            let rounded = (x / scale).round_ties_even().clamp(-largest - 1.0, largest);
            *q = rounded as i8;
            let exact = f64::from(*x);
            let difference = exact - f64::from(scale * rounded);
            error += difference * difference;
            total += exact * exact;
        }
        pack(self.target, &self.quantised, packed);
        let relative_error = (total > 0.0).then(|| (error / total).sqrt());
        Some(RowOutcome { scale, relative_error })
    }
}

fn pack(target: StoredType, quantised: &[i8], packed: &mut Vec<u8>) {
    if target == StoredType::Int4 {
        // The nibble that fills an odd row is 0: no reader looks at it.
        packed.extend(quantised.chunks(2).map(|pair| {
            let nibble = |q: i8| (q + 8) as u8;
            nibble(pair[0]) | pair.get(1).map_or(0, |q| nibble(*q) << 4)
        }));
    } else {
        packed.extend(quantised.iter().map(|q| *q as u8));
    }
}

/// Floats as stored to f32, exactly. Packed rows are never decoded here: they are copied.
fn decode(stored: StoredType, bytes: &[u8], row: &mut [f32]) {
    match stored {
        StoredType::F32 => {
            for (x, b) in row.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *x = f32::from_le_bytes(*b);
            }
        }
        StoredType::F16 => {
            for (x, b) in row.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *x = f16::from_le_bytes(*b).to_f32();
            }
        }
        StoredType::Bf16 => {
            for (x, b) in row.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *x = bf16::from_le_bytes(*b).to_f32();
            }
        }
        StoredType::Int8 | StoredType::Int4 | StoredType::Fp8 | StoredType::MxFp4 => {
            debug_assert!(false, "packed rows are copied");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantise(target: StoredType, row: &[f32]) -> Option<(Vec<u8>, RowOutcome)> {
        let bytes: Vec<u8> = row.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut packed = Vec::new();
        let outcome =
            RowQuantiser::new(StoredType::F32, target, row.len()).push(&bytes, &mut packed)?;
        Some((packed, outcome))
    }

    #[test]
    fn ties_go_to_even_and_the_largest_is_exact() {
        let (packed, outcome) =
            quantise(StoredType::Int8, &[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5]).unwrap();
        assert_eq!(outcome.scale, 1.0);
        assert_eq!(packed, [127, 129, 0, 2, 2, 0, 254]);
    }

    #[test]
    fn nibbles_are_low_first_and_odd_rows_are_filled() {
        let (packed, outcome) = quantise(StoredType::Int4, &[7.0, -7.0, 1.0]).unwrap();
        assert_eq!(outcome.scale, 1.0);
        assert_eq!(packed, [0x1f, 0x09]);
        assert_eq!(outcome.relative_error, Some(0.0));
    }

    #[test]
    fn rows_of_zeros_have_the_scale_one() {
        let (packed, outcome) = quantise(StoredType::Int4, &[0.0, -0.0]).unwrap();
        assert_eq!((packed, outcome.scale, outcome.relative_error), (vec![0x88], 1.0, None));
        // A smallest subnormal over 127 is zero in f32.
        let (packed, outcome) = quantise(StoredType::Int8, &[f32::from_bits(1)]).unwrap();
        assert_eq!((packed, outcome.scale), (vec![0], 1.0));
        assert_eq!(outcome.relative_error, Some(1.0));
    }

    #[test]
    fn what_is_not_finite_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(quantise(StoredType::Int8, &[1.0, bad]).is_none());
        }
    }

    #[test]
    fn halves_decode_exactly() {
        let mut row = [0.0; 2];
        decode(StoredType::Bf16, &[0x80, 0x3f, 0x00, 0xc0], &mut row);
        assert_eq!(row, [1.0, -2.0]);
        decode(StoredType::F16, &[0x00, 0x3c, 0x01, 0x00], &mut row);
        assert_eq!(row, [1.0, 2.0_f32.powi(-24)]);
    }
}
