//! Rows of floats: from any stored type to f32, exactly, and from f32 to bf16. Owns which scales a run of
//! rows needs; what the bytes mean is the kernels'.

use half::bf16;
use tierkeep_kernels::Matrix;
use tierkeep_plans::catalogue::Span;

use super::ConvertError;
use super::layout::Job;
use crate::weights::element_of;

/// Which of its scales a run of rows of a weight needs: the span, how many bytes of it to skip, and how
/// many to take. `None` where its type has none.
pub(super) fn scales_of(job: &Job, first: u64, rows: u64) -> Option<(Span, u64, u64)> {
    let span = job.scales?;
    let element = element_of(job.stored);
    let row_bytes = element.row_scale_bytes(job.cols as usize) as u64;
    let before = first / (element.rows_per_scale() as u64).max(1);
    let n = element.scale_rows(first as usize, rows as usize) as u64;
    Some((span, before * row_bytes, n * row_bytes))
}

/// A run of rows, as the kernels decode them.
pub(super) fn matrix<'a>(
    job: &Job,
    (first, rows): (u64, u64),
    weights: &'a [u8],
    scales: &'a [u8],
) -> Result<Matrix<'a>, ConvertError> {
    let (rows, cols) = (rows as usize, job.cols as usize);
    Matrix::part(element_of(job.stored), first as usize, rows, cols, weights, scales)
        .map_err(|source| ConvertError::Shape { weight: job.name.clone(), source })
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
