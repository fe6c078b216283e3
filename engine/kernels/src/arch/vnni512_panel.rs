//! Panels for batches in AVX-512 with VNNI: sixteen rows side by side, so that what is summed in a lane is
//! that of a row and scales are applied once for a unit of sixteen rows.
//!
//! Owns: the way from packed rows to a panel, and products of panels with some vectors. Refuses: the order
//! of sums, which is that of `fast`: a lane adds units as a row does.
//!
//! A panel has, for each four bytes of a quantised vector, the four weights that they meet of each row, with
//! the offset that leaves no sign; and then for each unit the scale of each row, f32.
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
const ROWS: usize = 16;
/// Panels that are multiplied together.
const PANELS: usize = 2;
/// Vectors of a tile, at most.
const COLUMNS: usize = 12;

pub(super) const fn panel<const BITS: usize, const UNIT: usize, S: Scale>() -> Panel {
    Panel {
        rows: ROWS,
        panels: PANELS,
        columns: COLUMNS,
        pack: run_pack::<BITS, UNIT, S>,
        multiply: run_multiply::<UNIT>,
    }
}

fn run_pack<const BITS: usize, const UNIT: usize, S: Scale>(
    w: &Rows<'_>,
    rows: usize,
    cols: usize,
    out: &mut [u8],
) {
    // SAFETY: the parent's `table` has found the features.
    unsafe { pack::<BITS, UNIT, S>(w, rows, cols, out) }
}

fn run_multiply<const UNIT: usize>(
    panels: &[&[u8]],
    x: &Batch<'_>,
    first: usize,
    columns: usize,
    out: &mut PanelResults,
) {
    // SAFETY: the parent's `table` has found the features.
    unsafe {
        match panels {
            [a, b] => by_columns::<UNIT, 2>([a, b], x, first, columns, out),
            [a] => by_columns::<UNIT, 1>([a], x, first, columns, out),
            _ => {}
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn pack<const BITS: usize, const UNIT: usize, S: Scale>(
    w: &Rows<'_>,
    rows: usize,
    cols: usize,
    out: &mut [u8],
) {
    let padded = cols.next_multiple_of(256);
    let row_bytes = (cols * BITS).div_ceil(8);
    let (weights, scales) = out.split_at_mut(padded * ROWS);
    let per_vector = 64 * 8 / BITS;
    let lines = weights.as_chunks_mut::<64>().0;
    // Rows that there are not are the last once more.
    let bytes: [&[u8]; ROWS] =
        array::from_fn(|row| &w.bytes[row.min(rows - 1) * w.stride..][..row_bytes]);
    for (vector, lines) in lines.chunks_exact_mut(per_vector / 4).enumerate() {
        let start = vector * 64;
        if start >= row_bytes {
            break;
        }
        let mut words = [_mm512_setzero_si512(); ROWS];
        for (words, row) in words.iter_mut().zip(bytes) {
            let mut rest = [0_u8; 64];
            let at = match row[start..].first_chunk::<64>() {
                Some(bytes) => bytes,
                None => {
                    rest[..row_bytes - start].copy_from_slice(&row[start..]);
                    &rest
                }
            };
            // SAFETY: the reference is to 64 readable bytes.
            *words = unsafe { _mm512_loadu_si512(at.as_ptr().cast()) };
        }
        for row in bytes {
            prefetch(row.as_ptr().wrapping_add(start + 256));
        }
        for (word, rows) in transpose(words).into_iter().enumerate() {
            for field in 0..8 / BITS {
                let fields = match (BITS, field) {
                    (8, _) => _mm512_xor_si512(rows, _mm512_set1_epi8(-128)),
                    (4, 0) => _mm512_and_si512(rows, _mm512_set1_epi8(15)),
                    (4, _) => _mm512_and_si512(_mm512_srli_epi16::<4>(rows), _mm512_set1_epi8(15)),
                    (_, 0) => _mm512_and_si512(rows, _mm512_set1_epi8(3)),
                    (_, 1) => _mm512_and_si512(_mm512_srli_epi16::<2>(rows), _mm512_set1_epi8(3)),
                    (_, 2) => _mm512_and_si512(_mm512_srli_epi16::<4>(rows), _mm512_set1_epi8(3)),
                    _ => _mm512_and_si512(_mm512_srli_epi16::<6>(rows), _mm512_set1_epi8(3)),
                };
                let line = &mut lines[panel_place(BITS, UNIT, word, field)];
                // SAFETY: the reference is to 64 writable bytes.
                unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), fields) }
            }
        }
    }
    pack_scales::<UNIT, S>(w, rows, cols, scales);
}

/// The scale of each unit for each row; 1 where the row has one.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn pack_scales<const UNIT: usize, S: Scale>(
    w: &Rows<'_>,
    rows: usize,
    cols: usize,
    out: &mut [u8],
) {
    let lines = out.as_chunks_mut::<64>().0;
    let n_units = cols.div_ceil(UNIT);
    if !S::IS_GROUPED {
        for line in &mut lines[..n_units] {
            // SAFETY: the reference is to 64 writable bytes.
            unsafe { _mm512_storeu_ps(line.as_mut_ptr().cast(), _mm512_set1_ps(1.0)) }
        }
        return;
    }
    // A group is 2 to this power units.
    let shift = w.blocks_shift - (UNIT / 32).trailing_zeros();
    let groups = n_units.div_ceil(1 << shift);
    let scale_bytes = if S::IS_F16 { 2 } else { 4 };
    let all: [&[u8]; ROWS] =
        array::from_fn(|row| &w.scales_of(row.min(rows - 1))[..groups * scale_bytes]);
    for start in (0..groups).step_by(16) {
        let count = (groups - start).min(16);
        let mut by_row = [_mm512_setzero_si512(); ROWS];
        for (all, by_row) in all.iter().zip(&mut by_row) {
            let mut some = [0_u8; 64];
            let own = &all[start * scale_bytes..(start + count) * scale_bytes];
            let at = if count == 16 {
                own.as_ptr()
            } else {
                some[..own.len()].copy_from_slice(own);
                some.as_ptr()
            };
            // SAFETY: 16 scales are there, or a copy of some and zeros.
            *by_row = unsafe {
                if S::IS_F16 {
                    _mm512_castps_si512(_mm512_cvtph_ps(_mm256_loadu_si256(at.cast())))
                } else {
                    _mm512_loadu_si512(at.cast())
                }
            };
        }
        let by_group = transpose(by_row);
        for (group, scales) in by_group.into_iter().enumerate().take(count) {
            let first = (start + group) << shift;
            for line in &mut lines[first..(first + (1 << shift)).min(n_units)] {
                // SAFETY: the reference is to 64 writable bytes.
                unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), scales) }
            }
        }
    }
}

/// Rows of sixteen times 32 bits become columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = [_mm512_setzero_si512(); 16];
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // Number 4 * i + j: of rows 4 * i to 4 * i + 3, words j of each 128 bits.
    let mut fours = [_mm512_setzero_si512(); 16];
    for i in 0..4 {
        let [a, b, c, d] = [pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]];
        fours[4 * i] = _mm512_unpacklo_epi64(a, c);
        fours[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
        fours[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
        fours[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    let mut out = [_mm512_setzero_si512(); 16];
    for j in 0..4 {
        let [a, b, c, d] = [fours[j], fours[4 + j], fours[8 + j], fours[12 + j]];
        let even = [
            _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b),
            _mm512_shuffle_i32x4::<0b10_00_10_00>(c, d),
        ];
        let odd = [
            _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b),
            _mm512_shuffle_i32x4::<0b11_01_11_01>(c, d),
        ];
        out[j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even[0], even[1]);
        out[4 + j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd[0], odd[1]);
        out[8 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even[0], even[1]);
        out[12 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd[0], odd[1]);
    }
    out
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn by_columns<const UNIT: usize, const R: usize>(
    panels: [&[u8]; R],
    x: &Batch<'_>,
    first: usize,
    columns: usize,
    out: &mut PanelResults,
) {
    match columns {
        1 => multiply::<UNIT, R, 1>(panels, x, first, out),
        2 => multiply::<UNIT, R, 2>(panels, x, first, out),
        3 => multiply::<UNIT, R, 3>(panels, x, first, out),
        4 => multiply::<UNIT, R, 4>(panels, x, first, out),
        5 => multiply::<UNIT, R, 5>(panels, x, first, out),
        6 => multiply::<UNIT, R, 6>(panels, x, first, out),
        7 => multiply::<UNIT, R, 7>(panels, x, first, out),
        8 => multiply::<UNIT, R, 8>(panels, x, first, out),
        9 => multiply::<UNIT, R, 9>(panels, x, first, out),
        10 => multiply::<UNIT, R, 10>(panels, x, first, out),
        11 => multiply::<UNIT, R, 11>(panels, x, first, out),
        12 => multiply::<UNIT, R, 12>(panels, x, first, out),
        _ => {}
    }
}

/// `R` panels times `C` vectors from number `first` on.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn multiply<const UNIT: usize, const R: usize, const C: usize>(
    panels: [&[u8]; R],
    x: &Batch<'_>,
    first: usize,
    out: &mut PanelResults,
) {
    let padded = x.cols.next_multiple_of(256);
    let n_units = x.cols.div_ceil(UNIT);
    let vectors: [&[u8]; C] = array::from_fn(|c| x.column(first + c));
    for panel in panels {
        assert!(panel.len() >= padded * ROWS + n_units * 64);
    }
    for vector in vectors {
        assert!(vector.len() >= padded + padded / UNIT * 8);
    }
    let mut lanes = [[[_mm512_setzero_ps(); C]; R]; 4];
    for unit in 0..n_units {
        // SAFETY: units are within the lengths that were looked at above.
        unsafe {
            let number = |c: usize, at: usize| {
                vectors[c].as_ptr().add(at + unit * 4).cast::<i32>().read_unaligned()
            };
            let mut sums = [[_mm512_setzero_si512(); C]; R];
            for c in 0..C {
                let correction = _mm512_set1_epi32(number(c, padded + padded / UNIT * 4));
                for sums in &mut sums {
                    sums[c] = correction;
                }
            }
            for word in unit * (UNIT / 4)..(unit + 1) * (UNIT / 4) {
                let mut weights = [_mm512_setzero_si512(); R];
                for r in 0..R {
                    weights[r] = _mm512_loadu_si512(panels[r].as_ptr().add(word * 64).cast());
                }
                for c in 0..C {
                    let x = vectors[c].as_ptr().add(word * 4).cast::<i32>().read_unaligned();
                    let x = _mm512_set1_epi32(x);
                    for r in 0..R {
                        sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], weights[r], x);
                    }
                }
            }
            let mut scales = [_mm512_setzero_ps(); R];
            for r in 0..R {
                scales[r] =
                    _mm512_loadu_ps(panels[r].as_ptr().add(padded * ROWS + unit * 64).cast());
            }
            let lanes = &mut lanes[unit % 4];
            for c in 0..C {
                let x = _mm512_castsi512_ps(_mm512_set1_epi32(number(c, padded)));
                for r in 0..R {
                    let scale = _mm512_mul_ps(scales[r], x);
                    let value = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][c]), scale);
                    lanes[r][c] = _mm512_add_ps(lanes[r][c], value);
                }
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            let even = _mm512_add_ps(lanes[0][r][c], lanes[2][r][c]);
            let odd = _mm512_add_ps(lanes[1][r][c], lanes[3][r][c]);
            // SAFETY: the reference is to 64 writable bytes.
            unsafe { _mm512_storeu_ps(out[r][c].as_mut_ptr(), _mm512_add_ps(even, odd)) }
        }
    }
}

/// Asks for a line of a cache, which may be past everything.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[allow(unused_unsafe, reason = "the intrinsic became safe after the oldest compiler we support")]
fn prefetch(at: *const u8) {
    // SAFETY: a prefetch accesses nothing, so that any address is allowed.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
}
