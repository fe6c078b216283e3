//! The kernels of each instruction set, as tables of function pointers.
//!
//! Owns: what a kernel is handed and what it must return. Refuses: shapes, scales and threads: the
//! caller has cut the rows, applies the scale and decides who runs what.

use crate::{Isa, matrix::ElementType};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod scalar;
#[cfg(target_arch = "x86_64")]
mod simd;

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
    /// `(w, row_stride, x, out)`: `w` begins at the first row, `x` is `(columns, cols)`, `out` is
    /// `(rows, columns)`, unscaled.
    pub(crate) run: fn(&[u8], usize, &[f32], &mut [f32]),
}

/// The kernels for one stored type.
pub(crate) struct ElementKernels {
    /// One row, one vector.
    pub(crate) single: Tile,
    /// Some rows, one vector.
    pub(crate) tall: Tile,
    /// One or more rows, some vectors.
    pub(crate) wide: Tile,
    /// `(w, a, out)`: `out[c] += a * w[c]`, unscaled.
    pub(crate) accumulate: fn(&[u8], f32, &mut [f32]),
    /// `(w, row_stride, a, out)`: the same for four consecutive rows, in ascending order.
    pub(crate) accumulate_tile: fn(&[u8], usize, &[f32; ACCUMULATE_ROWS], &mut [f32]),
    /// `(w, out)`: the row as f32, unscaled.
    pub(crate) decode: fn(&[u8], &mut [f32]),
}

/// The kernels of one instruction set.
pub(crate) struct Table {
    pub(crate) f32: ElementKernels,
    pub(crate) f16: ElementKernels,
    pub(crate) bf16: ElementKernels,
    pub(crate) int8: ElementKernels,
    pub(crate) int4: ElementKernels,
}

impl Table {
    #[inline]
    pub(crate) fn of(&self, element: ElementType) -> &ElementKernels {
        match element {
            ElementType::F32 => &self.f32,
            ElementType::F16 => &self.f16,
            ElementType::Bf16 => &self.bf16,
            ElementType::Int8 => &self.int8,
            ElementType::Int4 => &self.int4,
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
