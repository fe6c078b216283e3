//! Panels for batches in AVX2: eight rows side by side.
//!
//! Owns: the way from packed rows to a panel, and products of a panel with some vectors; that nothing
//! saturates. Refuses: the order of sums, which is that of `fast`.
//!
//! As in AVX-512, but for 8 bits, which keep their sign: it goes over to the activation.
#![expect(
    unsafe_code,
    reason = "vector loads and stores by address, and calls of functions with target features"
)]

use std::{arch::x86_64::*, array};

use super::{
    fast::{Panel, PanelResults, panel_place},
    scalar::Scale,
};
use crate::{matrix::Rows, quantised::Batch};

/// Rows of a panel.
const ROWS: usize = 8;
/// Vectors of a tile, at most.
const COLUMNS: usize = 4;

pub(super) const fn panel<const BITS: usize, const UNIT: usize, S: Scale>() -> Panel {
    Panel {
        rows: ROWS,
        panels: 1,
        columns: COLUMNS,
        pack: run_pack::<BITS, UNIT, S>,
        multiply: run_multiply::<BITS, UNIT>,
    }
}

fn run_pack<const BITS: usize, const UNIT: usize, S: Scale>(
    w: &Rows<'_>,
    rows: usize,
    cols: usize,
    out: &mut [u8],
) {
    // SAFETY: the table of `avx2_fast` has found the features.
    unsafe { pack::<BITS, UNIT, S>(w, rows, cols, out) }
}

fn run_multiply<const BITS: usize, const UNIT: usize>(
    panels: &[&[u8]],
    x: &Batch<'_>,
    first: usize,
    columns: usize,
    out: &mut PanelResults,
) {
    let Some(panel) = panels.first() else { return };
    // SAFETY: the table of `avx2_fast` has found the features.
    unsafe {
        match columns {
            1 => multiply::<BITS, UNIT, 1>(panel, x, first, out),
            2 => multiply::<BITS, UNIT, 2>(panel, x, first, out),
            3 => multiply::<BITS, UNIT, 3>(panel, x, first, out),
            4 => multiply::<BITS, UNIT, 4>(panel, x, first, out),
            _ => {}
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
fn pack<const BITS: usize, const UNIT: usize, S: Scale>(
    w: &Rows<'_>,
    rows: usize,
    cols: usize,
    out: &mut [u8],
) {
    let padded = cols.next_multiple_of(256);
    let row_bytes = (cols * BITS).div_ceil(8);
    let (weights, scales) = out.split_at_mut(padded * ROWS);
    let lines = weights.as_chunks_mut::<32>().0;
    // Rows that there are not are the last once more.
    let bytes: [&[u8]; ROWS] =
        array::from_fn(|row| &w.bytes[row.min(rows - 1) * w.stride..][..row_bytes]);
    for start in (0..row_bytes).step_by(32) {
        let mut words = [_mm256_setzero_si256(); ROWS];
        for (words, row) in words.iter_mut().zip(bytes) {
            let mut rest = [0_u8; 32];
            let at = match row[start..].first_chunk::<32>() {
                Some(bytes) => bytes,
                None => {
                    rest[..row_bytes - start].copy_from_slice(&row[start..]);
                    &rest
                }
            };
            // SAFETY: the reference is to 32 readable bytes.
            *words = unsafe { _mm256_loadu_si256(at.as_ptr().cast()) };
        }
        for (word, rows) in transpose(words).into_iter().enumerate() {
            for field in 0..8 / BITS {
                let fields = match (BITS, field) {
                    (8, _) => rows,
                    (4, 0) => _mm256_and_si256(rows, _mm256_set1_epi8(15)),
                    (4, _) => _mm256_and_si256(_mm256_srli_epi16::<4>(rows), _mm256_set1_epi8(15)),
                    (_, 0) => _mm256_and_si256(rows, _mm256_set1_epi8(3)),
                    (_, 1) => _mm256_and_si256(_mm256_srli_epi16::<2>(rows), _mm256_set1_epi8(3)),
                    (_, 2) => _mm256_and_si256(_mm256_srli_epi16::<4>(rows), _mm256_set1_epi8(3)),
                    _ => _mm256_and_si256(_mm256_srli_epi16::<6>(rows), _mm256_set1_epi8(3)),
                };
                let line = &mut lines[panel_place(BITS, UNIT, start / 4 + word, field)];
                // SAFETY: the reference is to 32 writable bytes.
                unsafe { _mm256_storeu_si256(line.as_mut_ptr().cast(), fields) }
            }
        }
    }
    let all: [&[u8]; ROWS] =
        array::from_fn(|row| if S::IS_GROUPED { w.scales_of(row.min(rows - 1)) } else { &[][..] });
    for (unit, line) in scales.as_chunks_mut::<32>().0[..cols.div_ceil(UNIT)].iter_mut().enumerate()
    {
        let group = (unit * UNIT / 32) >> w.blocks_shift;
        for (scale, all) in line.as_chunks_mut::<4>().0.iter_mut().zip(all) {
            *scale = if S::IS_GROUPED { S::at(all, group) } else { 1.0 }.to_le_bytes();
        }
    }
}

/// Rows of eight times 32 bits become columns.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn transpose(rows: [__m256i; 8]) -> [__m256i; 8] {
    let mut pairs = [_mm256_setzero_si256(); 8];
    for i in 0..4 {
        pairs[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // Number 4 * i + j: of rows 4 * i to 4 * i + 3, words j of each 128 bits.
    let mut fours = [_mm256_setzero_si256(); 8];
    for i in 0..2 {
        let [a, b, c, d] = [pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]];
        fours[4 * i] = _mm256_unpacklo_epi64(a, c);
        fours[4 * i + 1] = _mm256_unpackhi_epi64(a, c);
        fours[4 * i + 2] = _mm256_unpacklo_epi64(b, d);
        fours[4 * i + 3] = _mm256_unpackhi_epi64(b, d);
    }
    let mut out = [_mm256_setzero_si256(); 8];
    for j in 0..4 {
        out[j] = _mm256_permute2x128_si256::<0x20>(fours[j], fours[4 + j]);
        out[4 + j] = _mm256_permute2x128_si256::<0x31>(fours[j], fours[4 + j]);
    }
    out
}

/// A panel times `C` vectors from number `first` on.
#[target_feature(enable = "avx2,f16c")]
fn multiply<const BITS: usize, const UNIT: usize, const C: usize>(
    panel: &[u8],
    x: &Batch<'_>,
    first: usize,
    out: &mut PanelResults,
) {
    let padded = x.cols.next_multiple_of(256);
    let n_units = x.cols.div_ceil(UNIT);
    let vectors: [&[u8]; C] = array::from_fn(|c| x.column(first + c));
    assert!(panel.len() >= padded * ROWS + n_units * 32);
    for vector in vectors {
        assert!(vector.len() >= padded + padded / UNIT * 8);
    }
    let ones = _mm256_set1_epi16(1);
    let mut lanes = [[_mm256_setzero_ps(); C]; 4];
    for unit in 0..n_units {
        // SAFETY: units are within the lengths that were looked at above.
        unsafe {
            let number = |c: usize, at: usize| {
                vectors[c].as_ptr().add(at + unit * 4).cast::<i32>().read_unaligned()
            };
            let mut sums = [_mm256_setzero_si256(); C];
            if BITS != 8 {
                for (c, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm256_set1_epi32(number(c, padded + padded / UNIT * 4));
                }
            }
            // Eight sums of two products of 4 bits fit 16 bits: 8 * 2 * 15 * 127.
            for eight in unit * (UNIT / 32)..(unit + 1) * (UNIT / 32) {
                let mut pairs = [_mm256_setzero_si256(); C];
                for word in eight * 8..(eight + 1) * 8 {
                    let w = _mm256_loadu_si256(panel.as_ptr().add(word * 32).cast());
                    let magnitudes = _mm256_abs_epi8(w);
                    for c in 0..C {
                        let x = vectors[c].as_ptr().add(word * 4).cast::<i32>().read_unaligned();
                        let x = _mm256_set1_epi32(x);
                        if BITS == 8 {
                            let products = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x, w));
                            sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(products, ones));
                        } else {
                            pairs[c] = _mm256_add_epi16(pairs[c], _mm256_maddubs_epi16(w, x));
                        }
                    }
                }
                if BITS != 8 {
                    for c in 0..C {
                        sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(pairs[c], ones));
                    }
                }
            }
            let scales = _mm256_loadu_ps(panel.as_ptr().add(padded * ROWS + unit * 32).cast());
            let lanes = &mut lanes[unit % 4];
            for c in 0..C {
                let x = _mm256_castsi256_ps(_mm256_set1_epi32(number(c, padded)));
                let value = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[c]), _mm256_mul_ps(scales, x));
                lanes[c] = _mm256_add_ps(lanes[c], value);
            }
        }
    }
    for (c, out) in out[0].iter_mut().enumerate().take(C) {
        let even = _mm256_add_ps(lanes[0][c], lanes[2][c]);
        let odd = _mm256_add_ps(lanes[1][c], lanes[3][c]);
        // SAFETY: the reference is to more than 32 writable bytes.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), _mm256_add_ps(even, odd)) }
    }
}
