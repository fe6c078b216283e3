//! The kernels in plain Rust: the definition of what the others must return, and the only ones on
//! processors other than x86-64.
//!
//! Owns: the decoding of each stored type and the order of sums. Refuses: processor-specific code;
//! it is written in blocks of 32 so that a compiler vectorises it for whatever it targets.

use super::{ACCUMULATE_ROWS, ElementKernels, LANES, MAX_TILE, Table, Tile};
use crate::convert::{bf16_to_f32, f16_to_f32};

/// How a stored type becomes f32.
pub(super) trait Element {
    /// Bytes of 32 elements.
    const BLOCK_BYTES: usize;
    /// The 32 elements stored in `bytes`.
    fn block(bytes: &[u8]) -> [f32; LANES];
    /// Element `index` of those stored in `bytes`.
    fn element(bytes: &[u8], index: usize) -> f32;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;
pub(super) struct Int8;
pub(super) struct Int4;

impl Element for F32 {
    const BLOCK_BYTES: usize = 128;
    #[inline(always)]
    fn block(bytes: &[u8]) -> [f32; LANES] {
        block_of(bytes, f32::from_le_bytes)
    }
    #[inline(always)]
    fn element(bytes: &[u8], index: usize) -> f32 {
        f32::from_le_bytes(bytes.as_chunks::<4>().0[index])
    }
}

impl Element for F16 {
    const BLOCK_BYTES: usize = 64;
    #[inline(always)]
    fn block(bytes: &[u8]) -> [f32; LANES] {
        block_of(bytes, |pair| f16_to_f32(u16::from_le_bytes(pair)))
    }
    #[inline(always)]
    fn element(bytes: &[u8], index: usize) -> f32 {
        f16_to_f32(u16::from_le_bytes(bytes.as_chunks::<2>().0[index]))
    }
}

impl Element for Bf16 {
    const BLOCK_BYTES: usize = 64;
    #[inline(always)]
    fn block(bytes: &[u8]) -> [f32; LANES] {
        block_of(bytes, |pair| bf16_to_f32(u16::from_le_bytes(pair)))
    }
    #[inline(always)]
    fn element(bytes: &[u8], index: usize) -> f32 {
        bf16_to_f32(u16::from_le_bytes(bytes.as_chunks::<2>().0[index]))
    }
}

impl Element for Int8 {
    const BLOCK_BYTES: usize = 32;
    #[inline(always)]
    fn block(bytes: &[u8]) -> [f32; LANES] {
        block_of(bytes, |[byte]| f32::from(byte.cast_signed()))
    }
    #[inline(always)]
    fn element(bytes: &[u8], index: usize) -> f32 {
        f32::from(bytes[index].cast_signed())
    }
}

impl Element for Int4 {
    const BLOCK_BYTES: usize = 16;
    #[inline(always)]
    fn block(bytes: &[u8]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
            *pair = [f32::from((byte & 15) as i8 - 8), f32::from((byte >> 4) as i8 - 8)];
        }
        out
    }
    #[inline(always)]
    fn element(bytes: &[u8], index: usize) -> f32 {
        let byte = bytes[index / 2];
        let nibble = if index.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
        f32::from(nibble as i8 - 8)
    }
}

#[inline(always)]
fn block_of<const N: usize>(bytes: &[u8], convert: impl Fn([u8; N]) -> f32) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for (value, &stored) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *value = convert(stored);
    }
    out
}

/// The fixed tree over the lanes: j and j + 16, then 8, 4, 2, 1.
#[inline(always)]
pub(crate) fn reduce(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for j in 0..half {
            lanes[j] += lanes[j + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Adds the elements past the last whole block, stored in `bytes`, and reduces.
#[inline(always)]
pub(super) fn finish<E: Element>(mut lanes: [f32; LANES], bytes: &[u8], x: &[f32]) -> f32 {
    for (index, (lane, &x)) in lanes.iter_mut().zip(x).enumerate() {
        *lane += E::element(bytes, index) * x;
    }
    reduce(lanes)
}

/// `out[c] += a * w[c]` for the elements past the last whole block.
#[inline(always)]
pub(super) fn accumulate_tail<E: Element>(bytes: &[u8], a: f32, out: &mut [f32]) {
    for (index, out) in out.iter_mut().enumerate() {
        *out += a * E::element(bytes, index);
    }
}

/// `out[c] = w[c]` for the elements past the last whole block.
#[inline(always)]
pub(super) fn decode_tail<E: Element>(bytes: &[u8], out: &mut [f32]) {
    for (index, out) in out.iter_mut().enumerate() {
        *out = E::element(bytes, index);
    }
}

fn tile<E: Element, const C: usize>(w: &[u8], _row_stride: usize, x: &[f32], out: &mut [f32]) {
    let cols = x.len() / C;
    let blocks = cols / LANES;
    let mut lanes = [[0.0_f32; LANES]; C];
    for (block, bytes) in w.chunks_exact(E::BLOCK_BYTES).take(blocks).enumerate() {
        let weights = E::block(bytes);
        for (column, lanes) in lanes.iter_mut().enumerate() {
            let start = column * cols + block * LANES;
            let x = &x[start..start + LANES];
            for j in 0..LANES {
                lanes[j] += weights[j] * x[j];
            }
        }
    }
    let tail = &w[blocks * E::BLOCK_BYTES..];
    for (column, out) in out[..C].iter_mut().enumerate() {
        let x = &x[column * cols + blocks * LANES..(column + 1) * cols];
        *out = finish::<E>(lanes[column], tail, x);
    }
}

fn accumulate<E: Element>(w: &[u8], a: f32, out: &mut [f32]) {
    let blocks = out.len() / LANES;
    let (whole, rest) = out.as_chunks_mut::<LANES>();
    for (out, bytes) in whole.iter_mut().zip(w.chunks_exact(E::BLOCK_BYTES)) {
        let weights = E::block(bytes);
        for j in 0..LANES {
            out[j] += a * weights[j];
        }
    }
    accumulate_tail::<E>(&w[blocks * E::BLOCK_BYTES..], a, rest);
}

fn accumulate_tile<E: Element>(
    w: &[u8],
    row_stride: usize,
    a: &[f32; ACCUMULATE_ROWS],
    out: &mut [f32],
) {
    for (row, &a) in a.iter().enumerate() {
        accumulate::<E>(&w[row * row_stride..], a, out);
    }
}

fn decode<E: Element>(w: &[u8], out: &mut [f32]) {
    let blocks = out.len() / LANES;
    let (whole, rest) = out.as_chunks_mut::<LANES>();
    for (out, bytes) in whole.iter_mut().zip(w.chunks_exact(E::BLOCK_BYTES)) {
        *out = E::block(bytes);
    }
    decode_tail::<E>(&w[blocks * E::BLOCK_BYTES..], rest);
}

const COLUMNS: usize = 4;
const _: () = assert!(COLUMNS <= MAX_TILE);

const fn kernels<E: Element>() -> ElementKernels {
    let single = Tile { rows: 1, columns: 1, run: tile::<E, 1> };
    ElementKernels {
        single,
        tall: single,
        wide: Tile { rows: 1, columns: COLUMNS, run: tile::<E, COLUMNS> },
        accumulate: accumulate::<E>,
        accumulate_tile: accumulate_tile::<E>,
        decode: decode::<E>,
    }
}

pub(super) static TABLE: Table = Table {
    f32: kernels::<F32>(),
    f16: kernels::<F16>(),
    bf16: kernels::<Bf16>(),
    int8: kernels::<Int8>(),
    int4: kernels::<Int4>(),
};
