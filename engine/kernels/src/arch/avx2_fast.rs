//! The kernels of `fast` numerics in AVX2 and F16C: sums of bytes by way of 16 bits.
//!
//! Owns: four rows at a time, unit by unit; that nothing saturates. Refuses: the order of sums, which is that
//! of `fast`.
//!
//! Pairs of products of 4 bits are at most 2 * 15 * 127, so that several fit 16 bits. Those of 8 bits take the
//! sign of the weight over to the activation: 2 * 128 * 127 fits.
#![expect(
    unsafe_code,
    reason = "vector loads by address, and calls of functions with target features"
)]

use std::{arch::x86_64::*, array};

use super::{
    avx2_panel::panel,
    fast::{FastKernels, FastPacked, FastTable, TILE_ROWS},
    scalar::{ByF16, ByF32, ByRow, Scale},
};
use crate::{
    matrix::Rows,
    quantised::{self, Column, Form},
};

/// The most bytes of a unit.
const MAX_UNIT: usize = 64;

/// The table, or none where this processor lacks a feature that it uses.
pub(super) fn table() -> Option<&'static FastTable> {
    (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(&TABLE)
}

static TABLE: FastTable = FastTable {
    int8: packed::<8>(),
    int4: packed::<4>(),
    int2: packed::<2>(),
    quantise: run_quantise,
};

const fn packed<const BITS: usize>() -> FastPacked {
    FastPacked {
        by_row: kernels::<BITS, 64, ByRow>(),
        by_f32: kernels::<BITS, 64, ByF32>(),
        by_f32_of_32: kernels::<BITS, 32, ByF32>(),
        by_f16: kernels::<BITS, 64, ByF16>(),
        by_f16_of_32: kernels::<BITS, 32, ByF16>(),
    }
}

const fn kernels<const BITS: usize, const UNIT: usize, S: Scale>() -> FastKernels {
    FastKernels { tile: run_tile::<BITS, UNIT, S>, panel: Some(panel::<BITS, UNIT, S>()) }
}

fn run_tile<const BITS: usize, const UNIT: usize, S: Scale>(
    w: &Rows<'_>,
    rows: usize,
    x: &Column<'_>,
    out: &mut [f32; TILE_ROWS],
) {
    // SAFETY: `table` has found the features.
    unsafe { tile::<BITS, UNIT, S>(w, rows, x, out) }
}

fn run_quantise(x: &[f32], form: Form, out: &mut [u8]) {
    // SAFETY: `table` has found the features.
    unsafe { quantise(x, form, out) }
}

#[target_feature(enable = "avx2,f16c")]
fn quantise(x: &[f32], form: Form, out: &mut [u8]) {
    quantised::quantise(x, form, out);
}

#[target_feature(enable = "avx2,f16c")]
fn tile<const BITS: usize, const UNIT: usize, S: Scale>(
    w: &Rows<'_>,
    rows: usize,
    x: &Column<'_>,
    out: &mut [f32; TILE_ROWS],
) {
    let unit_bytes = UNIT * BITS / 8;
    let units = x.cols / UNIT;
    // Rows that there are not are the last once more.
    let of = |row: usize| row.min(rows - 1);
    let bytes: [&[u8]; TILE_ROWS] = array::from_fn(|row| &w.bytes[of(row) * w.stride..]);
    let scales: [&[u8]; TILE_ROWS] =
        array::from_fn(|row| if S::IS_GROUPED { w.scales_of(of(row)) } else { &[][..] });
    for bytes in bytes {
        assert!(bytes.len() >= units * unit_bytes);
    }
    assert!(x.bytes.len() >= x.cols.next_multiple_of(256));
    let mut lanes = [_mm_setzero_ps(); 4];
    let mut add = |unit: usize, lane: usize, rows: [*const u8; TILE_ROWS]| {
        // SAFETY: a unit is at each of these addresses, and x is padded.
        let sums = unsafe { products::<BITS, UNIT>(rows, x.bytes.as_ptr().add(unit * UNIT)) };
        let correction = i32::from_le_bytes(x.corrections.as_chunks().0[unit]);
        let sums = match BITS {
            8 => sums,
            _ => _mm_add_epi32(sums, _mm_set1_epi32(correction)),
        };
        let mut scale = _mm_set1_ps(x.scale(unit));
        if S::IS_GROUPED {
            let group = (unit * UNIT / 32) >> w.blocks_shift;
            scale = _mm_mul_ps(row_scales::<S>(scales, group), scale);
        }
        lanes[lane] = _mm_add_ps(lanes[lane], _mm_mul_ps(_mm_cvtepi32_ps(sums), scale));
    };
    let ahead = TILE_ROWS * w.stride;
    for four in 0..units / 4 {
        for lane in 0..4 {
            let unit = four * 4 + lane;
            let rows = bytes.map(|row| row.as_ptr().wrapping_add(unit * unit_bytes));
            if lane % 2 == 0 || unit_bytes == 64 {
                for row in rows {
                    prefetch(row.wrapping_add(ahead));
                }
            }
            add(unit, lane, rows);
        }
    }
    for unit in units / 4 * 4..units {
        add(unit, unit % 4, bytes.map(|row| row.as_ptr().wrapping_add(unit * unit_bytes)));
    }
    if units * UNIT < x.cols {
        let row_bytes = (x.cols * BITS).div_ceil(8);
        let mut last = [[0_u8; MAX_UNIT]; TILE_ROWS];
        for (last, bytes) in last.iter_mut().zip(bytes) {
            let rest = &bytes[units * unit_bytes..row_bytes];
            last[..rest.len()].copy_from_slice(rest);
        }
        add(units, units % 4, array::from_fn(|row| last[row].as_ptr()));
    }
    let all = _mm_add_ps(_mm_add_ps(lanes[0], lanes[2]), _mm_add_ps(lanes[1], lanes[3]));
    // SAFETY: the reference is to 16 writable bytes.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), all) }
}

/// The sum of the products of a unit, for each row; of 4 and of 2 bits with the offset that leaves no sign.
///
/// # Safety
///
/// A unit is at each of `rows` and at `x`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn products<const BITS: usize, const UNIT: usize>(
    rows: [*const u8; TILE_ROWS],
    x: *const u8,
) -> __m128i {
    let ones = _mm256_set1_epi16(1);
    let mut sums = [_mm256_setzero_si256(); TILE_ROWS];
    for (sum, row) in sums.iter_mut().zip(rows) {
        let mut pairs = _mm256_setzero_si256();
        for part in 0..UNIT / 32 {
            // SAFETY: as promised by the caller.
            let (w, x) = unsafe {
                (fields::<BITS, UNIT>(row, part), _mm256_loadu_si256(x.add(part * 32).cast()))
            };
            if BITS == 8 {
                let products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(products, ones));
            } else {
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w, x));
            }
        }
        if BITS != 8 {
            *sum = _mm256_madd_epi16(pairs, ones);
        }
    }
    let [a, b, c, d] = sums;
    let all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256::<1>(all))
}

/// The weights that meet part `part` of a unit of activations.
///
/// # Safety
///
/// A unit is at `row`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn fields<const BITS: usize, const UNIT: usize>(row: *const u8, part: usize) -> __m256i {
    // SAFETY: as promised by the caller.
    unsafe {
        let twice = || _mm256_broadcastsi128_si256(_mm_loadu_si128(row.cast()));
        let (nibble, field) = (_mm256_set1_epi8(15), _mm256_set1_epi8(3));
        match (BITS, UNIT, part) {
            (8, _, _) => _mm256_loadu_si256(row.add(part * 32).cast()),
            (4, 64, 0) => _mm256_and_si256(_mm256_loadu_si256(row.cast()), nibble),
            (4, 64, _) => {
                let bytes = _mm256_loadu_si256(row.cast());
                _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), nibble)
            }
            (4, _, _) => {
                let shifts = _mm256_setr_epi64x(0, 0, 4, 4);
                _mm256_and_si256(_mm256_srlv_epi64(twice(), shifts), nibble)
            }
            (_, 64, 0) => {
                let shifts = _mm256_setr_epi64x(0, 0, 2, 2);
                _mm256_and_si256(_mm256_srlv_epi64(twice(), shifts), field)
            }
            (_, 64, _) => {
                let shifts = _mm256_setr_epi64x(4, 4, 6, 6);
                _mm256_and_si256(_mm256_srlv_epi64(twice(), shifts), field)
            }
            _ => {
                let bytes = _mm256_set1_epi64x(row.cast::<i64>().read_unaligned());
                let shifts = _mm256_setr_epi64x(0, 4, 2, 6);
                _mm256_and_si256(_mm256_srlv_epi64(bytes, shifts), field)
            }
        }
    }
}

/// Scale `group` of each row.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn row_scales<S: Scale>(scales: [&[u8]; TILE_ROWS], group: usize) -> __m128 {
    if S::IS_F16 {
        let [a, b, c, d] = scales.map(|row| i16::from_le_bytes(row.as_chunks().0[group]));
        _mm_cvtph_ps(_mm_setr_epi16(a, b, c, d, 0, 0, 0, 0))
    } else {
        let [a, b, c, d] = scales.map(|row| S::at(row, group));
        _mm_setr_ps(a, b, c, d)
    }
}

/// Asks for a line of a cache, which may be past everything.
#[inline]
#[target_feature(enable = "avx2,f16c")]
#[allow(unused_unsafe, reason = "the intrinsic became safe after the oldest compiler we support")]
fn prefetch(at: *const u8) {
    // SAFETY: a prefetch accesses nothing, so that any address is allowed.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
}
