//! The kernels in AVX2 and F16C: 32 lanes in four registers of eight.
//!
//! Owns: decoding of blocks into registers. Refuses: FMA, which would change results.
#![expect(
    unsafe_code,
    reason = "vector loads and stores, and calls of functions with target features"
)]

use std::arch::x86_64::*;

use super::{
    Table,
    scalar::{ByE8m0, ByRow},
    simd::{element_kernels, fp8_kernels, packed_kernels},
};
use crate::{
    ops::ops_kernels,
    scale::{Lanes, scale_kernels},
};

type Vector = __m256;
const WIDTH: usize = 8;
const REGISTERS: usize = 4;
type Block = [Vector; REGISTERS];

/// The table, or none where this processor lacks a feature that it uses.
pub(super) fn table() -> Option<&'static Table> {
    (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(&TABLE)
}

static TABLE: Table = Table {
    f32: f32::kernels::<ByRow>(),
    f16: f16::kernels::<ByRow>(),
    bf16: bf16::kernels::<ByRow>(),
    int8: packed_kernels!(int8),
    int4: packed_kernels!(int4),
    int2: packed_kernels!(int2),
    fp8: fp8_kernels!(fp8),
    mxfp4: mxfp4::kernels::<ByE8m0>(),
    scales: scales::KERNELS,
    operations: operations::KERNELS,
};

scale_kernels!("avx2,f16c");
ops_kernels!("avx2,f16c");

/// The lanes that scales are searched in.
#[derive(Clone, Copy)]
struct Sixteen([Vector; 2]);

impl Lanes for Sixteen {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: callers have the features.
        unsafe { Self([_mm256_set1_ps(x); 2]) }
    }
    #[inline(always)]
    fn load(from: &[f32; 16]) -> Self {
        // SAFETY: callers have the features; the reference is to 64 readable bytes.
        unsafe { Self([_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))]) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: callers have the features.
        unsafe {
            Self([_mm256_add_ps(self.0[0], other.0[0]), _mm256_add_ps(self.0[1], other.0[1])])
        }
    }
    #[inline(always)]
    fn subtract(self, other: Self) -> Self {
        // SAFETY: callers have the features.
        unsafe {
            Self([_mm256_sub_ps(self.0[0], other.0[0]), _mm256_sub_ps(self.0[1], other.0[1])])
        }
    }
    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        // SAFETY: callers have the features.
        unsafe {
            Self([_mm256_mul_ps(self.0[0], other.0[0]), _mm256_mul_ps(self.0[1], other.0[1])])
        }
    }
    #[inline(always)]
    fn lower(self, other: Self) -> Self {
        // SAFETY: callers have the features.
        unsafe {
            Self([_mm256_min_ps(self.0[0], other.0[0]), _mm256_min_ps(self.0[1], other.0[1])])
        }
    }
    #[inline(always)]
    fn higher(self, other: Self) -> Self {
        // SAFETY: callers have the features.
        unsafe {
            Self([_mm256_max_ps(self.0[0], other.0[0]), _mm256_max_ps(self.0[1], other.0[1])])
        }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        // SAFETY: callers have the features.
        unsafe {
            Self([
                _mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0[0]),
                _mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0[1]),
            ])
        }
    }
    #[inline(always)]
    fn store(self) -> [f32; 16] {
        let mut to = [0.0; 16];
        // SAFETY: callers have the features; `to` is 64 writable bytes.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), self.0[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), self.0[1]);
        }
        to
    }
}

element_kernels!(f32, "avx2,f16c", F32, 128, decode_f32, tall: 2, wide: 1 x 3);
element_kernels!(f16, "avx2,f16c", F16, 64, decode_f16, tall: 2, wide: 1 x 3);
element_kernels!(bf16, "avx2,f16c", Bf16, 64, decode_bf16, tall: 2, wide: 1 x 3);
element_kernels!(int8, "avx2,f16c", Int8, 32, decode_int8, tall: 2, wide: 1 x 3);
element_kernels!(int4, "avx2,f16c", Int4, 16, decode_int4, tall: 2, wide: 1 x 3);
element_kernels!(int2, "avx2,f16c", Int2, 8, decode_int2, tall: 2, wide: 1 x 3);
element_kernels!(fp8, "avx2,f16c", Fp8, 32, decode_fp8, tall: 2, wide: 1 x 3);
element_kernels!(mxfp4, "avx2,f16c", MxFp4, 16, decode_mxfp4, tall: 2, wide: 1 x 3);

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn splat(value: f32) -> Vector {
    _mm256_set1_ps(value)
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn add(a: Vector, b: Vector) -> Vector {
    _mm256_add_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn multiply(a: Vector, b: Vector) -> Vector {
    _mm256_mul_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load(from: &[f32; WIDTH]) -> Vector {
    // SAFETY: the reference is to 32 readable bytes, and the load needs no alignment.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn store(to: &mut [f32; WIDTH], value: Vector) {
    // SAFETY: the reference is to 32 writable bytes, and the store needs no alignment.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) }
}

/// A scale of 16 bits, exact.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn half_scale(bytes: [u8; 2]) -> f32 {
    let half = _mm_cvtsi32_si128(i32::from(u16::from_le_bytes(bytes)));
    _mm_cvtss_f32(_mm_cvtph_ps(half))
}

/// Asks for the cache lines of a block `ahead` bytes after `block`, which may be past everything.
#[inline]
#[target_feature(enable = "avx2,f16c")]
#[allow(unused_unsafe, reason = "the intrinsic became safe after the oldest compiler we support")]
fn prefetch<const N: usize>(block: &[u8; N], ahead: usize) {
    for line in (0..N).step_by(64) {
        let address = block.as_ptr().wrapping_add(ahead + line);
        // SAFETY: a prefetch accesses nothing, so that any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_bytes(from: &[u8; 16]) -> __m128i {
    // SAFETY: the reference is to 16 readable bytes, and the load needs no alignment.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn decode_f32(bytes: &[u8; 128]) -> Block {
    let mut out = [splat(0.0); REGISTERS];
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<32>().0) {
        let [low, high] = [0, 1].map(|half| load_bytes(&bytes.as_chunks().0[half]));
        *out = _mm256_castsi256_ps(_mm256_set_m128i(high, low));
    }
    out
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn decode_f16(bytes: &[u8; 64]) -> Block {
    let mut out = [splat(0.0); REGISTERS];
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *out = _mm256_cvtph_ps(load_bytes(bytes));
    }
    out
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn decode_bf16(bytes: &[u8; 64]) -> Block {
    let mut out = [splat(0.0); REGISTERS];
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        let wide = _mm256_cvtepu16_epi32(load_bytes(bytes));
        *out = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide));
    }
    out
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn decode_int8(bytes: &[u8; 32]) -> Block {
    let mut out = [splat(0.0); REGISTERS];
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<8>().0) {
        let narrow = _mm_cvtsi64_si128(i64::from_le_bytes(*bytes));
        *out = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(narrow));
    }
    out
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn decode_int4(bytes: &[u8; 16]) -> Block {
    let bytes = load_bytes(bytes);
    let mask = _mm_set1_epi8(15);
    let even = _mm_and_si128(bytes, mask);
    let odd = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
    let eight = _mm_set1_epi8(8);
    let low = _mm_sub_epi8(_mm_unpacklo_epi8(even, odd), eight);
    let high = _mm_sub_epi8(_mm_unpackhi_epi8(even, odd), eight);
    [
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)),
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(low))),
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)),
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(high))),
    ]
}

/// Eight elements at once: two bytes in every lane, each lane shifted to its element, whose low bits
/// index a table of the four values, held twice (which ignores the bits above the third).
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn decode_int2(bytes: &[u8; 8]) -> Block {
    let shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    let values = _mm256_setr_ps(-2.0, -1.0, 0.0, 1.0, -2.0, -1.0, 0.0, 1.0);
    let mut out = [splat(0.0); REGISTERS];
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        let word = _mm256_set1_epi32(i32::from(u16::from_le_bytes(*bytes)));
        *out = _mm256_permutevar8x32_ps(values, _mm256_srlv_epi32(word, shifts));
    }
    out
}

/// Each byte shifted to where an f16 keeps exponent and mantissa: 2^-8 of the value, subnormals included,
/// for the bias of f16 is 15 and not 7. The sign, which widening repeats, ends in bits 15 and 14. Of what
/// is not a number, and of nothing else, the sum below carries into bit 14: that bit says so, and with
/// it the exponent is all ones, as f16 has it.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn decode_fp8(bytes: &[u8; 32]) -> Block {
    let mut out = [splat(0.0); REGISTERS];
    for (out, bytes) in out.as_chunks_mut::<2>().0.iter_mut().zip(bytes.as_chunks().0) {
        let shifted = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(load_bytes(bytes)));
        let carried = _mm256_add_epi16(shifted, _mm256_set1_epi16(0x80));
        let is_nan = _mm256_and_si256(carried, _mm256_set1_epi16(0x4000));
        let halves = _mm256_xor_si256(shifted, is_nan);
        let unit = splat(256.0);
        out[0] = multiply(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), unit);
        out[1] = multiply(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)), unit);
    }
    out
}

/// The upper bytes of the f16 that the nibbles stand for, whose lower bytes are all zero.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn decode_mxfp4(bytes: &[u8; 16]) -> Block {
    // 0, 0.5, 1, 1.5, 2, 3, 4, 6, then the same with the sign.
    let values = _mm_setr_epi8(
        0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, -0x80, -0x48, -0x44, -0x42, -0x40, -0x3e,
        -0x3c, -0x3a,
    );
    let bytes = load_bytes(bytes);
    let mask = _mm_set1_epi8(15);
    let even = _mm_shuffle_epi8(values, _mm_and_si128(bytes, mask));
    let odd = _mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask));
    let (low, high) = (_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd));
    let zero = _mm_setzero_si128();
    [
        _mm256_cvtph_ps(_mm_unpacklo_epi8(zero, low)),
        _mm256_cvtph_ps(_mm_unpackhi_epi8(zero, low)),
        _mm256_cvtph_ps(_mm_unpacklo_epi8(zero, high)),
        _mm256_cvtph_ps(_mm_unpackhi_epi8(zero, high)),
    ]
}
