//! The kernels of `fast` numerics in plain Rust: the definition of what the others must return.
//!
//! Owns: integers out of packed bytes, and the order of sums. Refuses: processor-specific code.

use super::{
    fast::{FastKernels, FastPacked, FastTable, TILE_ROWS},
    scalar::{ByF16, ByF32, ByRow, Scale},
};
use crate::{
    element::PackedBits,
    matrix::Rows,
    quantised::{self, Column, Form},
};

/// How bytes hold integers.
trait Integer {
    const BITS: PackedBits;
    fn integer(bytes: &[u8], index: usize) -> i32;
}

struct Int8;
struct Int4;
struct Int2;

impl Integer for Int8 {
    const BITS: PackedBits = PackedBits::Eight;
    #[inline(always)]
    fn integer(bytes: &[u8], index: usize) -> i32 {
        i32::from(bytes[index].cast_signed())
    }
}

impl Integer for Int4 {
    const BITS: PackedBits = PackedBits::Four;
    #[inline(always)]
    fn integer(bytes: &[u8], index: usize) -> i32 {
        i32::from(bytes[index / 2] >> (index % 2 * 4) & 15) - 8
    }
}

impl Integer for Int2 {
    const BITS: PackedBits = PackedBits::Two;
    #[inline(always)]
    fn integer(bytes: &[u8], index: usize) -> i32 {
        i32::from(bytes[index / 4] >> (index % 4 * 2) & 3) - 2
    }
}

fn tile<I: Integer, S: Scale, const UNIT: usize>(
    w: &Rows<'_>,
    rows: usize,
    x: &Column<'_>,
    out: &mut [f32; TILE_ROWS],
) {
    let form = Form { bits: I::BITS, unit: UNIT };
    for (row, out) in out.iter_mut().enumerate().take(rows) {
        let bytes = &w.bytes[row * w.stride..];
        let scales = if S::IS_GROUPED { w.scales_of(row) } else { &[] };
        let mut lanes = [0.0_f32; 4];
        for unit in 0..x.cols.div_ceil(UNIT) {
            let mut sum = 0;
            for index in unit * UNIT..((unit + 1) * UNIT).min(x.cols) {
                let x = i32::from(x.bytes[form.place(index)].cast_signed());
                sum += I::integer(bytes, index) * x;
            }
            let mut scale = x.scale(unit);
            if S::IS_GROUPED {
                scale *= S::at(scales, (unit * UNIT / 32) >> w.blocks_shift);
            }
            lanes[unit % 4] += sum as f32 * scale;
        }
        *out = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    }
}

const fn kernels<I: Integer, S: Scale, const UNIT: usize>() -> FastKernels {
    FastKernels { tile: tile::<I, S, UNIT>, panel: None }
}

const fn packed<I: Integer>() -> FastPacked {
    FastPacked {
        by_row: kernels::<I, ByRow, 64>(),
        by_f32: kernels::<I, ByF32, 64>(),
        by_f32_of_32: kernels::<I, ByF32, 32>(),
        by_f16: kernels::<I, ByF16, 64>(),
        by_f16_of_32: kernels::<I, ByF16, 32>(),
    }
}

pub(super) static TABLE: FastTable = FastTable {
    int8: packed::<Int8>(),
    int4: packed::<Int4>(),
    int2: packed::<Int2>(),
    quantise: quantised::quantise,
};
