//! The kernels in AVX-512: 32 lanes in two registers of sixteen.
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

type Vector = __m512;
const WIDTH: usize = 16;
const REGISTERS: usize = 2;
type Block = [Vector; REGISTERS];

/// The table, or none where this processor lacks a feature that it uses.
pub(super) fn table() -> Option<&'static Table> {
    (is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl"))
    .then_some(&TABLE)
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

scale_kernels!("avx512f,avx512bw,avx512dq,avx512vl");
ops_kernels!("avx512f,avx512bw,avx512dq,avx512vl");

/// The lanes that scales are searched in.
#[derive(Clone, Copy)]
struct Sixteen([Vector; 1]);

impl Lanes for Sixteen {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: callers have the features.
        unsafe { Self([_mm512_set1_ps(x); 1]) }
    }
    #[inline(always)]
    fn load(from: &[f32; 16]) -> Self {
        // SAFETY: callers have the features; the reference is to 64 readable bytes.
        unsafe { Self([_mm512_loadu_ps(from.as_ptr())]) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: callers have the features.
        unsafe { Self([_mm512_add_ps(self.0[0], other.0[0])]) }
    }
    #[inline(always)]
    fn subtract(self, other: Self) -> Self {
        // SAFETY: callers have the features.
        unsafe { Self([_mm512_sub_ps(self.0[0], other.0[0])]) }
    }
    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        // SAFETY: callers have the features.
        unsafe { Self([_mm512_mul_ps(self.0[0], other.0[0])]) }
    }
    #[inline(always)]
    fn lower(self, other: Self) -> Self {
        // SAFETY: callers have the features.
        unsafe { Self([_mm512_min_ps(self.0[0], other.0[0])]) }
    }
    #[inline(always)]
    fn higher(self, other: Self) -> Self {
        // SAFETY: callers have the features.
        unsafe { Self([_mm512_max_ps(self.0[0], other.0[0])]) }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        // SAFETY: callers have the features.
        unsafe { Self([_mm512_abs_ps(self.0[0])]) }
    }
    #[inline(always)]
    fn store(self) -> [f32; 16] {
        let mut to = [0.0; 16];
        // SAFETY: callers have the features; `to` is 64 writable bytes.
        unsafe {
            _mm512_storeu_ps(to.as_mut_ptr(), self.0[0]);
        }
        to
    }
}

element_kernels!(f32, "avx512f,avx512bw,avx512dq,avx512vl", F32, 128, decode_f32, tall: 4, wide: 2 x 4);
element_kernels!(f16, "avx512f,avx512bw,avx512dq,avx512vl", F16, 64, decode_f16, tall: 4, wide: 2 x 4);
element_kernels!(bf16, "avx512f,avx512bw,avx512dq,avx512vl", Bf16, 64, decode_bf16, tall: 4, wide: 2 x 4);
element_kernels!(int8, "avx512f,avx512bw,avx512dq,avx512vl", Int8, 32, decode_int8, tall: 4, wide: 2 x 4);
element_kernels!(int4, "avx512f,avx512bw,avx512dq,avx512vl", Int4, 16, decode_int4, tall: 4, wide: 2 x 4);
element_kernels!(int2, "avx512f,avx512bw,avx512dq,avx512vl", Int2, 8, decode_int2, tall: 4, wide: 2 x 4);
element_kernels!(fp8, "avx512f,avx512bw,avx512dq,avx512vl", Fp8, 32, decode_fp8, tall: 4, wide: 2 x 4);
element_kernels!(mxfp4, "avx512f,avx512bw,avx512dq,avx512vl", MxFp4, 16, decode_mxfp4, tall: 4, wide: 2 x 4);

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn splat(value: f32) -> Vector {
    _mm512_set1_ps(value)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn add(a: Vector, b: Vector) -> Vector {
    _mm512_add_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn multiply(a: Vector, b: Vector) -> Vector {
    _mm512_mul_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn load(from: &[f32; WIDTH]) -> Vector {
    // SAFETY: the reference is to 64 readable bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn store(to: &mut [f32; WIDTH], value: Vector) {
    // SAFETY: the reference is to 64 writable bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
}

/// A scale of 16 bits, exact.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn half_scale(bytes: [u8; 2]) -> f32 {
    let half = _mm_cvtsi32_si128(i32::from(u16::from_le_bytes(bytes)));
    _mm_cvtss_f32(_mm_cvtph_ps(half))
}

/// Asks for the cache lines of a block `ahead` bytes after `block`, which may be past everything.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[allow(unused_unsafe, reason = "the intrinsic became safe after the oldest compiler we support")]
fn prefetch<const N: usize>(block: &[u8; N], ahead: usize) {
    for line in (0..N).step_by(64) {
        let address = block.as_ptr().wrapping_add(ahead + line);
        // SAFETY: a prefetch accesses nothing, so that any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn load_512(from: &[u8; 64]) -> __m512i {
    // SAFETY: the reference is to 64 readable bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn load_256(from: &[u8; 32]) -> __m256i {
    // SAFETY: the reference is to 32 readable bytes, and the load needs no alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn load_128(from: &[u8; 16]) -> __m128i {
    // SAFETY: the reference is to 16 readable bytes, and the load needs no alignment.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_f32(bytes: &[u8; 128]) -> Block {
    let [low, high] = halves(bytes);
    [_mm512_castsi512_ps(load_512(low)), _mm512_castsi512_ps(load_512(high))]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_f16(bytes: &[u8; 64]) -> Block {
    let [low, high] = halves(bytes);
    [_mm512_cvtph_ps(load_256(low)), _mm512_cvtph_ps(load_256(high))]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_bf16(bytes: &[u8; 64]) -> Block {
    let mut out = [splat(0.0); REGISTERS];
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        let wide = _mm512_cvtepu16_epi32(load_256(bytes));
        *out = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide));
    }
    out
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_int8(bytes: &[u8; 32]) -> Block {
    let mut out = [splat(0.0); REGISTERS];
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *out = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(bytes)));
    }
    out
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_int4(bytes: &[u8; 16]) -> Block {
    let values = _mm512_setr_ps(
        -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
    );
    decode_nibbles(bytes, values)
}

/// Sixteen nibbles at once: the first eight in the low lanes, each shifted to the low bits of its
/// lane, where they index a table of the sixteen values (which ignores the bits above).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_nibbles(bytes: &[u8; 16], values: Vector) -> Block {
    let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    let mut out = [splat(0.0); REGISTERS];
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<8>().0) {
        let [low, high] = halves(bytes).map(|word: &[u8; 4]| i32::from_le_bytes(*word));
        let words = _mm512_mask_set1_epi32(_mm512_set1_epi32(low), 0xff00, high);
        *out = _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), values);
    }
    out
}

/// Sixteen elements at once, as nibbles are: the four values are in the table four times, for the two
/// bits above an element.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_int2(bytes: &[u8; 8]) -> Block {
    let shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let values = _mm512_setr4_ps(-2.0, -1.0, 0.0, 1.0);
    let mut out = [splat(0.0); REGISTERS];
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
        let word = _mm512_set1_epi32(i32::from_le_bytes(*bytes));
        *out = _mm512_permutexvar_ps(_mm512_srlv_epi32(word, shifts), values);
    }
    out
}

/// Each byte shifted to where an f16 keeps exponent and mantissa: 2^-8 of the value, subnormals included,
/// for the bias of f16 is 15 and not 7. The sign, which widening repeats, ends in bits 15 and 14. Of what
/// is not a number, and of nothing else, the sum below carries into bit 14: that bit says so, and with
/// it the exponent is all ones, as f16 has it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_fp8(bytes: &[u8; 32]) -> Block {
    let shifted = _mm512_slli_epi16::<7>(_mm512_cvtepi8_epi16(load_256(bytes)));
    let carried = _mm512_add_epi16(shifted, _mm512_set1_epi16(0x80));
    // shifted ^ (carried & bit 14)
    let halves = _mm512_ternarylogic_epi32::<0x78>(shifted, carried, _mm512_set1_epi16(0x4000));
    let unit = splat(256.0);
    [
        multiply(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), unit),
        multiply(_mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(halves)), unit),
    ]
}

/// Sixteen nibbles at once, as [`decode_int4`] does with another table.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_mxfp4(bytes: &[u8; 16]) -> Block {
    decode_nibbles(
        bytes,
        _mm512_setr_ps(
            0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
        ),
    )
}

/// Both halves of a block.
#[inline(always)]
fn halves<const N: usize, const H: usize>(bytes: &[u8; N]) -> [&[u8; H]; 2] {
    const { assert!(N == 2 * H) };
    let chunks = bytes.as_chunks().0;
    [&chunks[0], &chunks[1]]
}
