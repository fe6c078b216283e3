//! The kernels of `fast` numerics in AVX-512 with VNNI.
//!
//! Owns: four rows at a time over four units at a time, so that sums of integers are transposed once for
//! 16 units. Refuses: the order of sums, which is that of `fast`.
#![expect(
    unsafe_code,
    reason = "vector loads and prefetches by address, and calls of functions with target features"
)]

use std::{arch::x86_64::*, array};

use super::{
    fast::{FastKernels, FastPacked, FastTable, TILE_ROWS},
    scalar::{ByF16, ByF32, ByRow, Scale},
    vnni512_panel::panel,
};
use crate::{
    matrix::Rows,
    quantised::{self, Column, Form},
};

/// Units that one step takes: as many as there are lanes in the order of sums.
const STEP_UNITS: usize = 4;
/// How far ahead of what is read lines are asked for, at least: some hundred nanoseconds of memory.
const AHEAD: usize = 6 << 10;
/// The most bytes of a row that one step takes: 256 elements of 8 bits.
const MAX_STEP: usize = 256;
/// The most bytes of scales of a row that one step takes.
const MAX_SCALES: usize = 16;

/// The table, or none where this processor lacks a feature that it uses.
pub(super) fn table() -> Option<&'static FastTable> {
    (is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni"))
    .then_some(&TABLE)
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

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn quantise(x: &[f32], form: Form, out: &mut [u8]) {
    quantised::quantise(x, form, out);
}

/// Bytes of a row in one step.
const fn step_bytes(bits: usize, unit: usize) -> usize {
    STEP_UNITS * unit * bits / 8
}

/// Vectors of activations for each vector of weights.
const fn planes(bits: usize, unit: usize) -> usize {
    match (bits, unit) {
        (8, _) => 1,
        (4, _) | (2, 32) => 2,
        _ => 4,
    }
}

/// Bytes of weights that fill a vector: 64, or 32 whose fields are spread over twice as many.
const fn vector_bytes(bits: usize, unit: usize) -> usize {
    if bits == 2 && unit == 32 { 32 } else { 64 }
}

/// Where each of four rows begins, and its scales; or copies of what is left of them.
#[derive(Clone, Copy)]
struct Places {
    rows: [*const u8; TILE_ROWS],
    scales: [*const u8; TILE_ROWS],
}

/// How the scales of one step lie.
#[derive(Clone, Copy)]
struct ScaleStep {
    /// Whether a scale is that of two units, so that a step has two and not four.
    is_shared: bool,
    /// From scales row by row to units by rows.
    order: __m512i,
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn tile<const BITS: usize, const UNIT: usize, S: Scale>(
    w: &Rows<'_>,
    rows: usize,
    x: &Column<'_>,
    out: &mut [f32; TILE_ROWS],
) {
    let step = step_bytes(BITS, UNIT);
    let steps = x.cols / (STEP_UNITS * UNIT);
    let is_shared = S::IS_GROUPED && (UNIT / 32) >> w.blocks_shift == 0;
    let scale_bytes = if !S::IS_GROUPED {
        0
    } else {
        STEP_UNITS / if is_shared { 2 } else { 1 } * if S::IS_F16 { 2 } else { 4 }
    };
    let how = ScaleStep { is_shared, order: scale_order(is_shared) };
    // Rows that there are not are the last once more.
    let of = |row: usize| row.min(rows - 1);
    let bytes: [&[u8]; TILE_ROWS] = array::from_fn(|row| &w.bytes[of(row) * w.stride..]);
    let scales: [&[u8]; TILE_ROWS] =
        array::from_fn(|row| if S::IS_GROUPED { w.scales_of(of(row)) } else { &[][..] });
    for row in 0..TILE_ROWS {
        assert!(bytes[row].len() >= steps * step && scales[row].len() >= steps * scale_bytes);
    }
    let x_step = STEP_UNITS * UNIT;
    assert!(x.bytes.len() >= x.cols.next_multiple_of(MAX_STEP));
    assert!(x.scales.len() >= x.cols.div_ceil(x_step) * 16);
    assert!(x.corrections.len() >= x.cols.div_ceil(x_step) * 16);
    // The same place some tiles on: rows lie one after another, and short ones are over before a line comes.
    let tiles = AHEAD.div_ceil((TILE_ROWS * w.stride).max(1));
    let ahead = tiles * TILE_ROWS * w.stride;
    let scales_ahead = tiles * TILE_ROWS * w.scale_stride;
    let mut places = Places { rows: bytes.map(<[u8]>::as_ptr), scales: scales.map(<[u8]>::as_ptr) };
    let mut sums = _mm512_setzero_ps();
    for index in 0..steps {
        for row in 0..TILE_ROWS {
            for line in (0..step).step_by(64) {
                prefetch(places.rows[row].wrapping_add(ahead + line));
            }
        }
        if S::IS_GROUPED {
            prefetch(places.scales[index % TILE_ROWS].wrapping_add(scales_ahead));
        }
        // SAFETY: there are `steps` whole steps of each row and its scales, and x is padded.
        sums = unsafe { add_step::<BITS, UNIT, S>(&places, how, x, index, !0, sums) };
        for row in 0..TILE_ROWS {
            places.rows[row] = places.rows[row].wrapping_add(step);
            places.scales[row] = places.scales[row].wrapping_add(scale_bytes);
        }
    }
    if steps * x_step < x.cols {
        let row_bytes = (x.cols * BITS).div_ceil(8);
        let row_scales = if S::IS_GROUPED { w.scale_stride } else { 0 };
        let mut last = ([[0_u8; MAX_STEP]; TILE_ROWS], [[0_u8; MAX_SCALES]; TILE_ROWS]);
        for row in 0..TILE_ROWS {
            let rest = &bytes[row][steps * step..row_bytes];
            last.0[row][..rest.len()].copy_from_slice(rest);
            let rest = &scales[row][steps * scale_bytes..row_scales];
            last.1[row][..rest.len()].copy_from_slice(rest);
        }
        let places = Places {
            rows: array::from_fn(|row| last.0[row].as_ptr()),
            scales: array::from_fn(|row| last.1[row].as_ptr()),
        };
        // A unit that there is not may share an infinite scale with one that there is.
        let units = (x.cols - steps * x_step).div_ceil(UNIT);
        let present = !0 >> (16 - units * TILE_ROWS);
        // SAFETY: the copies are as long as the longest step, and x is padded.
        sums = unsafe { add_step::<BITS, UNIT, S>(&places, how, x, steps, present, sums) };
    }
    // [0 + 2, 1 + 3] by rows.
    let pairs = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps::<1>(sums));
    let all = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
    // SAFETY: the reference is to 16 writable bytes.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), all) }
}

/// Adds four units of each of four rows; `sums` are units by rows, and so is `present`.
///
/// # Safety
///
/// At the places there are the bytes and scales of one step, and `x` holds that of number `index`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_step<const BITS: usize, const UNIT: usize, S: Scale>(
    places: &Places,
    how: ScaleStep,
    x: &Column<'_>,
    index: usize,
    present: __mmask16,
    sums: __m512,
) -> __m512 {
    // SAFETY: as promised by the caller.
    unsafe {
        let x_bytes = x.bytes.as_ptr().add(index * STEP_UNITS * UNIT);
        let quad = |vector| products::<BITS, UNIT>(places, x_bytes, vector);
        let integers = match step_bytes(BITS, UNIT) / vector_bytes(BITS, UNIT) {
            1 => quad(0),
            2 => halve(quad(0), quad(1)),
            _ => halve(halve(quad(0), quad(1)), halve(quad(2), quad(3))),
        };
        let by_row = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        let corrections = _mm_loadu_si128(x.corrections.as_ptr().add(index * 16).cast());
        let corrections = _mm512_permutexvar_epi32(by_row, _mm512_castsi128_si512(corrections));
        let x_scales = _mm_loadu_ps(x.scales.as_ptr().add(index * 16).cast());
        let mut scales = _mm512_permutexvar_ps(by_row, _mm512_castps128_ps512(x_scales));
        if S::IS_GROUPED {
            scales = _mm512_maskz_mul_ps(present, row_scales::<S>(places, how), scales);
        }
        let values = _mm512_cvtepi32_ps(_mm512_add_epi32(integers, corrections));
        _mm512_add_ps(sums, _mm512_mul_ps(values, scales))
    }
}

/// Products of one vector of each row, summed to one integer for each 128 bits: those by rows.
///
/// # Safety
///
/// At the places there are the bytes of one step, and at `x` its activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn products<const BITS: usize, const UNIT: usize>(
    places: &Places,
    x: *const u8,
    vector: usize,
) -> __m512i {
    let planes = planes(BITS, UNIT);
    // SAFETY: as promised by the caller.
    let x = unsafe { gather::<BITS, UNIT>(x.add(vector * planes * 64)) };
    let mut sums = [_mm512_setzero_si512(); TILE_ROWS];
    for (sum, row) in sums.iter_mut().zip(places.rows) {
        // SAFETY: as promised by the caller.
        let bytes = unsafe {
            let at = row.add(vector * vector_bytes(BITS, UNIT));
            if vector_bytes(BITS, UNIT) == 64 {
                _mm512_loadu_si512(at.cast())
            } else {
                spread(_mm256_loadu_si256(at.cast()))
            }
        };
        for (plane, &x) in x.iter().enumerate().take(planes) {
            let fields = match (BITS, plane) {
                (8, _) => _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)),
                (4, 0) => _mm512_and_si512(bytes, _mm512_set1_epi8(15)),
                (4, _) => _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), _mm512_set1_epi8(15)),
                (_, 0) => _mm512_and_si512(bytes, _mm512_set1_epi8(3)),
                (_, 1) => _mm512_and_si512(_mm512_srli_epi16::<2>(bytes), _mm512_set1_epi8(3)),
                (_, 2) => _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), _mm512_set1_epi8(3)),
                _ => _mm512_and_si512(_mm512_srli_epi16::<6>(bytes), _mm512_set1_epi8(3)),
            };
            *sum = _mm512_dpbusd_epi32(*sum, fields, x);
        }
    }
    let [a, b, c, d] = sums;
    let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
}

/// What meets the first fields of a vector of weights, and so on: units are one after another at `x`, and in
/// each what meets one field is.
///
/// # Safety
///
/// There are `planes` vectors at `x`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn gather<const BITS: usize, const UNIT: usize>(x: *const u8) -> [__m512i; 4] {
    let mut at = [_mm512_setzero_si512(); 4];
    for (plane, at) in at.iter_mut().enumerate().take(planes(BITS, UNIT)) {
        // SAFETY: as promised by the caller.
        *at = unsafe { _mm512_loadu_si512(x.add(plane * 64).cast()) };
    }
    match (BITS, UNIT) {
        (8, _) => at,
        (4, 64) => [
            _mm512_shuffle_i32x4::<0b01_00_01_00>(at[0], at[1]),
            _mm512_shuffle_i32x4::<0b11_10_11_10>(at[0], at[1]),
            at[2],
            at[3],
        ],
        (_, 32) => [
            _mm512_shuffle_i32x4::<0b10_00_10_00>(at[0], at[1]),
            _mm512_shuffle_i32x4::<0b11_01_11_01>(at[0], at[1]),
            at[2],
            at[3],
        ],
        _ => {
            let even = [
                _mm512_shuffle_i32x4::<0b10_00_10_00>(at[0], at[1]),
                _mm512_shuffle_i32x4::<0b10_00_10_00>(at[2], at[3]),
            ];
            let odd = [
                _mm512_shuffle_i32x4::<0b11_01_11_01>(at[0], at[1]),
                _mm512_shuffle_i32x4::<0b11_01_11_01>(at[2], at[3]),
            ];
            [
                _mm512_shuffle_i32x4::<0b10_00_10_00>(even[0], even[1]),
                _mm512_shuffle_i32x4::<0b10_00_10_00>(odd[0], odd[1]),
                _mm512_shuffle_i32x4::<0b11_01_11_01>(even[0], even[1]),
                _mm512_shuffle_i32x4::<0b11_01_11_01>(odd[0], odd[1]),
            ]
        }
    }
}

/// Of each 8 bytes first those, then those shifted right by four, which leaves bits of neighbours above.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn spread(bytes: __m256i) -> __m512i {
    let bytes = _mm512_castsi256_si512(bytes);
    let low = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), bytes);
    _mm512_mask_srli_epi16::<4>(low, 0xf0f0_f0f0, low)
}

/// Sums of neighbouring 128 bits: those of `a`, then those of `b`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn halve(a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi32(
        _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b),
    )
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn scale_order(is_shared: bool) -> __m512i {
    if is_shared {
        _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 1, 5, 9, 13, 1, 5, 9, 13)
    } else {
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
    }
}

/// The scales of four units by four rows.
///
/// # Safety
///
/// At the places there are the scales of one step.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn row_scales<S: Scale>(places: &Places, how: ScaleStep) -> __m512 {
    let [a, b, c, d] = places.scales;
    // SAFETY: as promised by the caller; two or four scales of each row are read.
    let by_row = unsafe {
        if S::IS_F16 {
            let load = |at: *const u8| {
                if how.is_shared {
                    i64::from(at.cast::<i32>().read_unaligned())
                } else {
                    at.cast::<i64>().read_unaligned()
                }
            };
            let halves = _mm256_setr_epi64x(load(a), load(b), load(c), load(d));
            _mm512_cvtph_ps(halves)
        } else {
            let load = |at: *const u8| {
                if how.is_shared {
                    _mm_castpd_ps(_mm_load_sd(at.cast()))
                } else {
                    _mm_loadu_ps(at.cast())
                }
            };
            let ab = _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(load(a)), load(b));
            let cd = _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(load(c)), load(d));
            _mm512_insertf32x8::<1>(_mm512_castps256_ps512(ab), cd)
        }
    };
    _mm512_permutexvar_ps(how.order, by_row)
}

/// Asks for a line of a cache, which may be past everything.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[allow(unused_unsafe, reason = "the intrinsic became safe after the oldest compiler we support")]
fn prefetch(at: *const u8) {
    // SAFETY: a prefetch accesses nothing, so that any address is allowed.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
}
