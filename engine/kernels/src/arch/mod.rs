//! The kernels of each instruction set, as tables of function pointers.
//!
//! Owns: what a kernel is handed and what it must return. Refuses: shapes and threads: the caller has
//! cut the rows and decides who runs what. A scale that a whole row shares is the caller's, too; those
//! of groups are applied here.

use crate::{
    Isa,
    element::{BlockScale, ElementType, Group, PackedBits, ScaleType},
    matrix::Rows,
    ops::OpsKernels,
    scale::ScaleKernels,
};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_fast;
#[cfg(target_arch = "x86_64")]
mod avx2_panel;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod fast;
pub(crate) mod scalar;
mod scalar_fast;
#[cfg(target_arch = "x86_64")]
mod simd;
#[cfg(target_arch = "x86_64")]
mod vnni512;
#[cfg(target_arch = "x86_64")]
mod vnni512_panel;

pub(crate) use fast::{FastTable, Panel, TILE_ROWS, fast_table, panel_bytes};

/// Lanes of a dot product; see the crate's documentation for the order of sums.
pub(crate) const LANES: usize = 32;

/// Rows that one call of `accumulate_tile` adds.
pub(crate) const ACCUMULATE_ROWS: usize = 4;

/// The most results that one tile gives.
pub(crate) const MAX_TILE: usize = 16;

/// Dot products of `rows` consecutive rows with `columns` consecutive vectors.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// `(w, x, out)`: `x` is `(columns, cols)`, `out` is `(rows, columns)`, not scaled by the row.
    pub(crate) run: fn(&Rows<'_>, &[f32], &mut [f32]),
}

/// The kernels for one stored type.
pub(crate) struct ElementKernels {
    /// One row, one vector.
    pub(crate) single: Tile,
    /// Some rows, one vector.
    pub(crate) tall: Tile,
    /// One or more rows, some vectors.
    pub(crate) wide: Tile,
    /// `(w, a, out)`: `out[c] += a * w[c]`, not scaled by the row.
    pub(crate) accumulate: fn(&Rows<'_>, f32, &mut [f32]),
    /// `(w, a, out)`: the same for four consecutive rows, in ascending order.
    pub(crate) accumulate_tile: fn(&Rows<'_>, &[f32; ACCUMULATE_ROWS], &mut [f32]),
    /// `(w, out)`: the row as f32, not scaled by the row.
    pub(crate) decode: fn(&Rows<'_>, &mut [f32]),
}

/// The kernels for integers of some bits.
pub(crate) struct PackedKernels {
    /// Where a whole row shares a scale, of whatever type.
    pub(crate) by_row: ElementKernels,
    /// Where groups have f32 scales.
    pub(crate) by_f32: ElementKernels,
    /// Where groups have f16 scales.
    pub(crate) by_f16: ElementKernels,
}

/// The kernels for e4m3 elements.
pub(crate) struct Fp8Kernels {
    pub(crate) by_f32: ElementKernels,
    pub(crate) by_f16: ElementKernels,
    pub(crate) by_bf16: ElementKernels,
}

/// The kernels of one instruction set.
pub(crate) struct Table {
    pub(crate) f32: ElementKernels,
    pub(crate) f16: ElementKernels,
    pub(crate) bf16: ElementKernels,
    pub(crate) int8: PackedKernels,
    pub(crate) int4: PackedKernels,
    pub(crate) int2: PackedKernels,
    pub(crate) fp8: Fp8Kernels,
    pub(crate) mxfp4: ElementKernels,
    pub(crate) scales: ScaleKernels,
    pub(crate) operations: OpsKernels,
}

impl Table {
    #[inline]
    pub(crate) fn of(&self, element: ElementType) -> &ElementKernels {
        let packed = match element {
            ElementType::F32 => return &self.f32,
            ElementType::F16 => return &self.f16,
            ElementType::Bf16 => return &self.bf16,
            ElementType::Fp8(BlockScale::F32) => return &self.fp8.by_f32,
            ElementType::Fp8(BlockScale::F16) => return &self.fp8.by_f16,
            ElementType::Fp8(BlockScale::Bf16) => return &self.fp8.by_bf16,
            ElementType::MxFp4 => return &self.mxfp4,
            ElementType::Packed(packed) => packed,
        };
        let kernels = match packed.bits {
            PackedBits::Eight => &self.int8,
            PackedBits::Four => &self.int4,
            PackedBits::Two => &self.int2,
        };
        match (packed.group, packed.scale) {
            (Group::Row, _) => &kernels.by_row,
            (Group::Of128 | Group::Of64 | Group::Of32, ScaleType::F32) => &kernels.by_f32,
            (Group::Of128 | Group::Of64 | Group::Of32, ScaleType::F16) => &kernels.by_f16,
        }
    }
}

/// The table of an instruction set, or none where this processor lacks it.
pub(crate) fn table(isa: Isa) -> Option<&'static Table> {
    match isa {
        Isa::Scalar => Some(&scalar::TABLE),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::table(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::table(),
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 => None,
    }
}
