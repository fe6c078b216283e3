//! The kernels in plain Rust: the definition of what the others must return, and the only ones on
//! processors other than x86-64.
//!
//! Owns: the decoding of each stored type and the order of sums. Refuses: processor-specific code;
//! it is written in blocks of 32 so that a compiler vectorises it for whatever it targets.

use super::{
    ACCUMULATE_ROWS, ElementKernels, Fp8Kernels, LANES, MAX_TILE, PackedKernels, Table, Tile,
};
use crate::convert::{bf16_to_f32, e2m1_to_f32, e4m3_to_f32, e8m0_to_f32, f16_to_f32};
use crate::matrix::Rows;

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
pub(super) struct Int2;
pub(super) struct Fp8;
pub(super) struct MxFp4;

/// Where the scale of a block comes from.
pub(super) trait Scale {
    /// Whether elements are scaled before they take part in a sum.
    const IS_GROUPED: bool;
    /// Whether scales have 16 bits, which vector code decodes in its own way.
    #[cfg(target_arch = "x86_64")]
    const IS_F16: bool;
    /// Scale `group` of those stored in `scales`; 1 where the caller scales the row.
    fn at(scales: &[u8], group: usize) -> f32;
}

/// The caller scales the row.
pub(super) struct ByRow;
/// Groups have f32 scales.
pub(super) struct ByF32;
/// Groups have f16 scales.
pub(super) struct ByF16;
/// Groups have bf16 scales.
pub(super) struct ByBf16;
/// Groups have powers of two.
pub(super) struct ByE8m0;

impl Scale for ByRow {
    const IS_GROUPED: bool = false;
    #[cfg(target_arch = "x86_64")]
    const IS_F16: bool = false;
    #[inline(always)]
    fn at(_: &[u8], _: usize) -> f32 {
        1.0
    }
}

impl Scale for ByF32 {
    const IS_GROUPED: bool = true;
    #[cfg(target_arch = "x86_64")]
    const IS_F16: bool = false;
    #[inline(always)]
    fn at(scales: &[u8], group: usize) -> f32 {
        f32::from_le_bytes(scales.as_chunks::<4>().0[group])
    }
}

impl Scale for ByF16 {
    const IS_GROUPED: bool = true;
    #[cfg(target_arch = "x86_64")]
    const IS_F16: bool = true;
    #[inline(always)]
    fn at(scales: &[u8], group: usize) -> f32 {
        f16_to_f32(u16::from_le_bytes(scales.as_chunks::<2>().0[group]))
    }
}

impl Scale for ByBf16 {
    const IS_GROUPED: bool = true;
    #[cfg(target_arch = "x86_64")]
    const IS_F16: bool = false;
    #[inline(always)]
    fn at(scales: &[u8], group: usize) -> f32 {
        bf16_to_f32(u16::from_le_bytes(scales.as_chunks::<2>().0[group]))
    }
}

impl Scale for ByE8m0 {
    const IS_GROUPED: bool = true;
    #[cfg(target_arch = "x86_64")]
    const IS_F16: bool = false;
    #[inline(always)]
    fn at(scales: &[u8], group: usize) -> f32 {
        e8m0_to_f32(scales[group])
    }
}

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

impl Element for Int2 {
    const BLOCK_BYTES: usize = 8;
    #[inline(always)]
    fn block(bytes: &[u8]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for (four, &byte) in out.as_chunks_mut::<4>().0.iter_mut().zip(bytes) {
            *four = [0, 2, 4, 6].map(|shift| f32::from((byte >> shift & 3) as i8 - 2));
        }
        out
    }
    #[inline(always)]
    fn element(bytes: &[u8], index: usize) -> f32 {
        f32::from((bytes[index / 4] >> (index % 4 * 2) & 3) as i8 - 2)
    }
}

impl Element for Fp8 {
    const BLOCK_BYTES: usize = 32;
    #[inline(always)]
    fn block(bytes: &[u8]) -> [f32; LANES] {
        block_of(bytes, |[byte]| e4m3_to_f32(byte))
    }
    #[inline(always)]
    fn element(bytes: &[u8], index: usize) -> f32 {
        e4m3_to_f32(bytes[index])
    }
}

impl Element for MxFp4 {
    const BLOCK_BYTES: usize = 16;
    #[inline(always)]
    fn block(bytes: &[u8]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
            *pair = [e2m1_to_f32(byte), e2m1_to_f32(byte >> 4)];
        }
        out
    }
    #[inline(always)]
    fn element(bytes: &[u8], index: usize) -> f32 {
        let byte = bytes[index / 2];
        e2m1_to_f32(if index.is_multiple_of(2) { byte } else { byte >> 4 })
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

/// The elements of a row past its last whole block: fewer than a block, so of one group.
pub(super) struct Tail<'a> {
    bytes: &'a [u8],
    scale: f32,
}

impl<'a> Tail<'a> {
    /// Those of row `row` after `blocks` blocks; `len` of them.
    #[inline(always)]
    pub(super) fn of<E: Element, S: Scale>(
        w: &Rows<'a>,
        row: usize,
        blocks: usize,
        len: usize,
    ) -> Self {
        // Where nothing is left there may be no scale either.
        let scale = if S::IS_GROUPED && len > 0 {
            S::at(w.scales_of(row), blocks >> w.blocks_shift)
        } else {
            1.0
        };
        Self { bytes: &w.bytes[row * w.stride + blocks * E::BLOCK_BYTES..], scale }
    }

    #[inline(always)]
    fn element<E: Element, S: Scale>(&self, index: usize) -> f32 {
        let value = E::element(self.bytes, index);
        if S::IS_GROUPED { value * self.scale } else { value }
    }

    /// Adds products of the elements to the lanes, and reduces them.
    #[inline(always)]
    pub(super) fn finish<E: Element, S: Scale>(&self, mut lanes: [f32; LANES], x: &[f32]) -> f32 {
        for (index, (lane, &x)) in lanes.iter_mut().zip(x).enumerate() {
            *lane += self.element::<E, S>(index) * x;
        }
        reduce(lanes)
    }

    /// `out[c] += a * w[c]`.
    #[inline(always)]
    pub(super) fn accumulate<E: Element, S: Scale>(&self, a: f32, out: &mut [f32]) {
        for (index, out) in out.iter_mut().enumerate() {
            *out += a * self.element::<E, S>(index);
        }
    }

    /// `out[c] = w[c]`.
    #[inline(always)]
    pub(super) fn decode<E: Element, S: Scale>(&self, out: &mut [f32]) {
        for (index, out) in out.iter_mut().enumerate() {
            *out = self.element::<E, S>(index);
        }
    }
}

/// The first `blocks` blocks of row `row`, each scaled where groups have scales.
#[inline(always)]
fn blocks<'a, E: Element, S: Scale>(
    w: &Rows<'a>,
    row: usize,
    blocks: usize,
) -> impl Iterator<Item = [f32; LANES]> + 'a {
    let bytes = w.bytes[row * w.stride..].chunks_exact(E::BLOCK_BYTES).take(blocks);
    let scales = if S::IS_GROUPED { w.scales_of(row) } else { &[] };
    let shift = w.blocks_shift;
    bytes.enumerate().map(move |(block, bytes)| {
        let mut weights = E::block(bytes);
        if S::IS_GROUPED {
            let scale = S::at(scales, block >> shift);
            for weight in &mut weights {
                *weight *= scale;
            }
        }
        weights
    })
}

fn tile<E: Element, S: Scale, const C: usize>(w: &Rows<'_>, x: &[f32], out: &mut [f32]) {
    let cols = x.len() / C;
    let n_blocks = cols / LANES;
    let mut lanes = [[0.0_f32; LANES]; C];
    for (block, weights) in blocks::<E, S>(w, 0, n_blocks).enumerate() {
        for (column, lanes) in lanes.iter_mut().enumerate() {
            let start = column * cols + block * LANES;
            let x = &x[start..start + LANES];
            for j in 0..LANES {
                lanes[j] += weights[j] * x[j];
            }
        }
    }
    let tail = Tail::of::<E, S>(w, 0, n_blocks, cols % LANES);
    for (column, out) in out[..C].iter_mut().enumerate() {
        let x = &x[column * cols + n_blocks * LANES..(column + 1) * cols];
        *out = tail.finish::<E, S>(lanes[column], x);
    }
}

fn accumulate_row<E: Element, S: Scale>(w: &Rows<'_>, row: usize, a: f32, out: &mut [f32]) {
    let (whole, rest) = out.as_chunks_mut::<LANES>();
    let n_blocks = whole.len();
    for (out, weights) in whole.iter_mut().zip(blocks::<E, S>(w, row, n_blocks)) {
        for j in 0..LANES {
            out[j] += a * weights[j];
        }
    }
    Tail::of::<E, S>(w, row, n_blocks, rest.len()).accumulate::<E, S>(a, rest);
}

fn accumulate<E: Element, S: Scale>(w: &Rows<'_>, a: f32, out: &mut [f32]) {
    accumulate_row::<E, S>(w, 0, a, out);
}

fn accumulate_tile<E: Element, S: Scale>(
    w: &Rows<'_>,
    a: &[f32; ACCUMULATE_ROWS],
    out: &mut [f32],
) {
    for (row, &a) in a.iter().enumerate() {
        accumulate_row::<E, S>(w, row, a, out);
    }
}

fn decode<E: Element, S: Scale>(w: &Rows<'_>, out: &mut [f32]) {
    let (whole, rest) = out.as_chunks_mut::<LANES>();
    let n_blocks = whole.len();
    for (out, weights) in whole.iter_mut().zip(blocks::<E, S>(w, 0, n_blocks)) {
        *out = weights;
    }
    Tail::of::<E, S>(w, 0, n_blocks, rest.len()).decode::<E, S>(rest);
}

const COLUMNS: usize = 4;
const _: () = assert!(COLUMNS <= MAX_TILE);

const fn kernels<E: Element, S: Scale>() -> ElementKernels {
    let single = Tile { rows: 1, columns: 1, run: tile::<E, S, 1> };
    ElementKernels {
        single,
        tall: single,
        wide: Tile { rows: 1, columns: COLUMNS, run: tile::<E, S, COLUMNS> },
        accumulate: accumulate::<E, S>,
        accumulate_tile: accumulate_tile::<E, S>,
        decode: decode::<E, S>,
    }
}

const fn packed<E: Element>() -> PackedKernels {
    PackedKernels {
        by_row: kernels::<E, ByRow>(),
        by_f32: kernels::<E, ByF32>(),
        by_f16: kernels::<E, ByF16>(),
    }
}

pub(super) static TABLE: Table = Table {
    f32: kernels::<F32, ByRow>(),
    f16: kernels::<F16, ByRow>(),
    bf16: kernels::<Bf16, ByRow>(),
    int8: packed::<Int8>(),
    int4: packed::<Int4>(),
    int2: packed::<Int2>(),
    fp8: Fp8Kernels {
        by_f32: kernels::<Fp8, ByF32>(),
        by_f16: kernels::<Fp8, ByF16>(),
        by_bf16: kernels::<Fp8, ByBf16>(),
    },
    mxfp4: kernels::<MxFp4, ByE8m0>(),
    scales: crate::scale::KERNELS,
    operations: crate::ops::KERNELS,
};
