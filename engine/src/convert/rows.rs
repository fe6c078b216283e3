//! Rows of floats: from any stored type to f32, exactly, and from f32 to bf16. Owns what each float type
//! means to the converter; reads nothing.

use half::{bf16, f16};
use tierkeep_plans::catalogue::{Span, StoredType};

use super::layout::Job;

/// Decodes rows of one weight, a run of them at a time.
pub(super) struct Decoder<'a> {
    job: &'a Job,
    /// The first row of the run.
    first: u64,
}

impl<'a> Decoder<'a> {
    /// A run that begins at row `first`.
    pub(super) fn new(job: &'a Job, first: u64) -> Self {
        Self { job, first }
    }

    /// Which of the scales a run of so many rows needs: the span, how many bytes of it to skip, and how
    /// many to take. `None` where the type has none.
    pub(super) fn scales(&mut self, _rows: u64) -> Option<(Span, u64, u64)> {
        None
    }

    /// Decodes one row; `scales` is what [`Decoder::scales`] asked for.
    pub(super) fn decode(&self, bytes: &[u8], _scales: &[u8], _row: u64, into: &mut [f32]) {
        let _ = self.first;
        decode(self.job.stored, bytes, into);
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
                *x = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        StoredType::Packed(_) | StoredType::Fp8(_) | StoredType::MxFp4 => {
            debug_assert!(false, "packed rows are copied");
        }
    }
}

/// Appends a row as bf16, rounded to nearest even; what is beyond its range becomes infinite. NaNs stay
/// NaNs. The first column that was finite and is not any more, if there is one.
pub(super) fn push_bf16(row: &[f32], out: &mut Vec<u8>) -> Option<usize> {
    let mut overflow = None;
    for (col, x) in row.iter().enumerate() {
        let rounded = bf16::from_f32(*x);
        if !rounded.is_finite() && x.is_finite() && overflow.is_none() {
            overflow = Some(col);
        }
        out.extend_from_slice(&rounded.to_le_bytes());
    }
    overflow
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_decode_exactly() {
        let mut row = [0.0; 2];
        decode(StoredType::Bf16, &[0x80, 0x3f, 0x00, 0xc0], &mut row);
        assert_eq!(row, [1.0, -2.0]);
        decode(StoredType::F16, &[0x00, 0x3c, 0x01, 0x00], &mut row);
        assert_eq!(row, [1.0, 2.0_f32.powi(-24)]);
    }

    #[test]
    fn singles_round_to_the_nearest_even_bf16() {
        let mut out = Vec::new();
        let exact = f32::from_bits(0x3f80_0000);
        let (tie_down, tie_up) = (f32::from_bits(0x3f80_8000), f32::from_bits(0x3f81_8000));
        assert_eq!(push_bf16(&[exact, tie_down, tie_up], &mut out), None);
        assert_eq!(out, [0x80, 0x3f, 0x80, 0x3f, 0x82, 0x3f]);
        assert_eq!(push_bf16(&[0.0, f32::MAX, f32::INFINITY], &mut out), Some(1));
        assert_eq!(push_bf16(&[f32::INFINITY, f32::NAN], &mut out), None);
    }
}
