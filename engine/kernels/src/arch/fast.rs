//! The kernels of `fast` numerics, as tables of function pointers.
//!
//! Owns: what such a kernel is handed and what it must return. Refuses: shapes, threads, and how
//! activations become integers (see `quantised`).
//!
//! A product of a row with a quantised vector is a sum over units, of 64 elements or of 32 where weights
//! have a scale for every 32. The products of a unit are summed as integers, exactly; the sum `s` becomes
//! f32, also exactly, and counts `s * (w * x)`, `w` being the scale of the weights (1 where the row has
//! one) and `x` that of the activations. Unit `u` is added to lane `u % 4`, in ascending order, each
//! operation rounded; lanes begin at +0, and the result is `(lane 0 + lane 2) + (lane 1 + lane 3)`.

use super::scalar_fast;
#[cfg(target_arch = "x86_64")]
use super::{avx2_fast, vnni512};
use crate::{
    Isa,
    element::{Group, Packed, PackedBits, ScaleType},
    matrix::Rows,
    quantised::{Batch, Column, Form},
};

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 4;

/// The kernels for integers of some bits and scales of some kind.
pub(crate) struct FastKernels {
    /// `(w, rows, x, out)`: the first `rows` results, of as many consecutive rows, at most four; not scaled
    /// by the row. The others of `out` are anything.
    pub(crate) tile: fn(&Rows<'_>, usize, &Column<'_>, &mut [f32; TILE_ROWS]),
    /// For batches, where there is something faster for them.
    pub(crate) panel: Option<Panel>,
}

/// The most results of panels: by panel, by vector, by row.
pub(crate) type PanelResults = [[[f32; 16]; 12]; 2];

/// Rows side by side, unpacked once for a batch.
pub(crate) struct Panel {
    /// Rows of a panel.
    pub(crate) rows: usize,
    /// Panels that are multiplied together, at most.
    pub(crate) panels: usize,
    /// Vectors that they are multiplied with at once, at most.
    pub(crate) columns: usize,
    /// `(w, rows, cols, out)`: makes a panel of as many consecutive rows, of which there may be fewer than
    /// a panel has; `out` is [`panel_bytes`] of one row times the rows of a panel.
    pub(crate) pack: fn(&Rows<'_>, usize, usize, &mut [u8]),
    /// `(panels, x, first, columns, out)`: results with vectors from number `first` on; not scaled by the row.
    pub(crate) multiply: fn(&[&[u8]], &Batch<'_>, usize, usize, &mut PanelResults),
}

/// Bytes of a row of `cols` elements in a panel: one for each element, and scales.
pub(crate) const fn panel_bytes(cols: usize, unit: usize) -> usize {
    let padded = cols.next_multiple_of(256);
    padded + padded / unit * 4
}

/// Where the weights go that field `field` of the 32 bits of number `word` of a row, or of a whole
/// number of its units, holds, counted in 32 bits of each row.
pub(super) const fn panel_place(bits: usize, unit: usize, word: usize, field: usize) -> usize {
    // Words of weights for a unit, and fields of their bytes.
    let (words, fields) = (unit * bits / 32, 8 / bits);
    let field = match (fields, unit) {
        (4, 32) => [0, 2, 1, 3][field],
        _ => field,
    };
    word / words * (unit / 4) + field * (unit / 4 / fields) + word % words
}

/// The kernels for integers of some bits.
pub(crate) struct FastPacked {
    /// Where a whole row shares a scale.
    pub(crate) by_row: FastKernels,
    /// f32 scales of 64 or 128.
    pub(crate) by_f32: FastKernels,
    /// f32 scales of 32.
    pub(crate) by_f32_of_32: FastKernels,
    /// f16 scales of 64 or 128.
    pub(crate) by_f16: FastKernels,
    /// f16 scales of 32.
    pub(crate) by_f16_of_32: FastKernels,
}

/// The kernels of one instruction set.
pub(crate) struct FastTable {
    pub(crate) int8: FastPacked,
    pub(crate) int4: FastPacked,
    pub(crate) int2: FastPacked,
    /// As [`crate::quantised::quantise`].
    pub(crate) quantise: fn(&[f32], Form, &mut [u8]),
}

impl FastTable {
    #[inline]
    pub(crate) fn of(&self, packed: Packed) -> &FastKernels {
        let kernels = match packed.bits {
            PackedBits::Eight => &self.int8,
            PackedBits::Four => &self.int4,
            PackedBits::Two => &self.int2,
        };
        match (packed.group, packed.scale) {
            (Group::Row, _) => &kernels.by_row,
            (Group::Of128 | Group::Of64, ScaleType::F32) => &kernels.by_f32,
            (Group::Of128 | Group::Of64, ScaleType::F16) => &kernels.by_f16,
            (Group::Of32, ScaleType::F32) => &kernels.by_f32_of_32,
            (Group::Of32, ScaleType::F16) => &kernels.by_f16_of_32,
        }
    }
}

/// The table that an instruction set uses on this processor, which has it.
pub(crate) fn fast_table(isa: Isa) -> &'static FastTable {
    match isa {
        Isa::Scalar => &scalar_fast::TABLE,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2_fast::table().unwrap_or(&scalar_fast::TABLE),
        // Without VNNI, which came later, as AVX2 does it.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => vnni512::table().or_else(avx2_fast::table).unwrap_or(&scalar_fast::TABLE),
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 => &scalar_fast::TABLE,
    }
}
