//! The instruction sets and the products over matrices.
//!
//! Owns: the choice of an instruction set, made once; shapes, scales and tiling. Refuses: threads
//! (see [`crate::Pool`]) and the arithmetic of a tile (see `arch`).

use std::{fmt, ops::Range, str::FromStr};

use crate::{
    ElementType, Matrix,
    arch::{self, ACCUMULATE_ROWS, ElementKernels, FastTable, MAX_TILE, Table},
    convert::{f32_to_bf16, f32_to_f16},
    scale::ScaleSearch,
};

/// Weight bytes that stay in the first-level cache while several groups of columns pass over them.
pub(crate) const ROW_BLOCK_BYTES: usize = 16 << 10;

/// An instruction set that the kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, whatever the compiler makes of it.
    Scalar,
    /// AVX2 and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Isa {
    /// All that exist, from the slowest.
    pub const ALL: [Isa; 3] = [Isa::Scalar, Isa::Avx2, Isa::Avx512];

    /// Those that this processor has, from the slowest; never empty.
    #[must_use]
    pub fn supported() -> Vec<Isa> {
        Self::ALL.into_iter().filter(|&isa| arch::table(isa).is_some()).collect()
    }

    /// The fastest that this processor has.
    #[must_use]
    pub fn best() -> Isa {
        Self::ALL.into_iter().rev().find(|&isa| arch::table(isa).is_some()).unwrap_or(Isa::Scalar)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        })
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(name: &str) -> Result<Self, IsaError> {
        Self::ALL
            .into_iter()
            .find(|isa| isa.to_string() == name)
            .ok_or_else(|| IsaError::Unknown(name.to_owned()))
    }
}

/// An instruction set cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// The processor or its operating system lacks it.
    #[error("this processor does not support {0}")]
    Unsupported(Isa),
    /// There are no kernels of this name.
    #[error("unknown instruction set {0:?}, expected scalar, avx2 or avx512")]
    Unknown(String),
}

/// What activations are in products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// f32, in the order of sums of this crate.
    #[default]
    Exact,
    /// Integers of 8 bits with a scale for each 64, where the weights are packed integers and a
    /// [`Pool`](crate::Pool) multiplies; elsewhere as `Exact`.
    Fast,
}

/// The kernels of one instruction set; free to copy.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    arithmetic: Arithmetic,
    pub(crate) table: &'static Table,
    pub(crate) fast: &'static FastTable,
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernels")
            .field("isa", &self.isa)
            .field("arithmetic", &self.arithmetic)
            .finish_non_exhaustive()
    }
}

impl Kernels {
    /// The kernels of `isa`, with exact arithmetic.
    ///
    /// # Errors
    ///
    /// When this processor does not support it.
    pub fn new(isa: Isa) -> Result<Self, IsaError> {
        let table = arch::table(isa).ok_or(IsaError::Unsupported(isa))?;
        Ok(Self { isa, arithmetic: Arithmetic::Exact, table, fast: arch::fast_table(isa) })
    }

    /// The same kernels with another arithmetic.
    #[must_use]
    pub const fn with(self, arithmetic: Arithmetic) -> Self {
        Self { arithmetic, ..self }
    }

    /// What activations are in products.
    #[must_use]
    pub const fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// The instruction set chosen.
    #[must_use]
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    /// Row `row` of `w` times `x` (cols).
    ///
    /// # Panics
    ///
    /// When `row` is not a row or `x` is not `w.cols()` long.
    #[must_use]
    pub fn dot(&self, w: &Matrix<'_>, row: usize, x: &[f32]) -> f32 {
        assert_eq!(x.len(), w.cols(), "x against the columns of the matrix");
        let mut sum = [0.0];
        assert!(row < w.rows(), "row {row} of a matrix of {} rows", w.rows());
        (self.table.of(w.element()).single.run)(&w.rows_from(row, 1), x, &mut sum);
        sum[0] * w.scale(row)
    }

    /// `rows` of `w` times each of `batch` vectors; calls `put(row, column, value)` once for each
    /// row in `rows` and each column below `batch`, in no promised order.
    ///
    /// `x` is `(batch, cols)`. A row is read and decoded once for several columns; each value is
    /// equal bit for bit to that of [`Kernels::dot`].
    ///
    /// # Panics
    ///
    /// When `rows` is not within the matrix or `x` is not `batch * w.cols()` long.
    pub fn matmul_rows(
        &self,
        w: &Matrix<'_>,
        rows: Range<usize>,
        x: &[f32],
        batch: usize,
        mut put: impl FnMut(usize, usize, f32),
    ) {
        check_rows(w, &rows);
        assert_eq!(x.len(), batch * w.cols(), "x against batch times the columns of the matrix");
        let kernels = self.table.of(w.element());
        let tall = kernels.tall.rows;
        let block = (ROW_BLOCK_BYTES / w.row_bytes().max(1)).max(1).next_multiple_of(tall);
        let mut start = rows.start;
        while start < rows.end {
            let end = rows.end.min(start.saturating_add(block));
            matmul_block(kernels, w, start..end, x, batch, &mut put);
            start = end;
        }
    }

    /// `out[i] =` row `rows.start + i` of `w` times `x` (cols): a product with one vector, or the
    /// scores of cached keys.
    ///
    /// # Panics
    ///
    /// When `rows` is not within the matrix, `x` is not `w.cols()` long, or `out` is not as long
    /// as `rows`.
    pub fn dot_rows(&self, w: &Matrix<'_>, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
        assert_eq!(out.len(), rows.len(), "out against the rows asked for");
        let first = rows.start;
        self.matmul_rows(w, rows, x, 1, |row, _, value| out[row - first] = value);
    }

    /// `out[c] += (coefficients[i] * scale[row]) * w[row, c]` for `row = rows.start + i`, rows
    /// ascending, multiplied and added separately. Where groups or blocks have scales, `w` is scaled
    /// and rounded first, and there is no other scale.
    ///
    /// The transposed product: for the absorbed projection of latent attention, and for the
    /// weighted sum of cached values. `out` is (cols).
    ///
    /// # Panics
    ///
    /// When `rows` is not within the matrix, `coefficients` is not as long as `rows`, or `out` is
    /// not `w.cols()` long.
    pub fn accumulate_rows(
        &self,
        w: &Matrix<'_>,
        rows: Range<usize>,
        coefficients: &[f32],
        out: &mut [f32],
    ) {
        check_rows(w, &rows);
        assert_eq!(coefficients.len(), rows.len(), "coefficients against the rows asked for");
        assert_eq!(out.len(), w.cols(), "out against the columns of the matrix");
        let kernels = self.table.of(w.element());
        let (tiles, rest) = coefficients.as_chunks::<ACCUMULATE_ROWS>();
        let mut row = rows.start;
        for tile in tiles {
            let scaled = std::array::from_fn(|i| tile[i] * w.scale(row + i));
            (kernels.accumulate_tile)(&w.rows_from(row, ACCUMULATE_ROWS), &scaled, out);
            row += ACCUMULATE_ROWS;
        }
        for coefficient in rest {
            (kernels.accumulate)(&w.rows_from(row, 1), coefficient * w.scale(row), out);
            row += 1;
        }
    }

    /// As [`Kernels::accumulate_rows`] for all rows and the columns `columns` alone: a part of the product
    /// `coefficients * w`, for weights that are stored with rows and columns exchanged.
    ///
    /// # Panics
    ///
    /// When `columns` is not within the matrix, `coefficients` is not as long as it has rows, `out` is not as
    /// long as `columns`, or the type has scales, which no such weight has.
    pub fn accumulate_columns(
        &self,
        w: &Matrix<'_>,
        columns: Range<usize>,
        coefficients: &[f32],
        out: &mut [f32],
    ) {
        self.accumulate_rows(&w.columns(columns), 0..w.rows(), coefficients, out);
    }

    /// `out[c] = w[row, c] * scale`, that of the row, the group or the block: for rows that are looked up,
    /// such as embeddings.
    ///
    /// # Panics
    ///
    /// When `row` is not a row or `out` is not `w.cols()` long.
    pub fn decode_row(&self, w: &Matrix<'_>, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), w.cols(), "out against the columns of the matrix");
        assert!(row < w.rows(), "row {row} of a matrix of {} rows", w.rows());
        (self.table.of(w.element()).decode)(&w.rows_from(row, 1), out);
        let scale = w.scale(row);
        if w.element().has_row_scales() {
            for value in out {
                *value *= scale;
            }
        }
    }

    /// The first element of a row that is infinite or not a number.
    #[must_use]
    pub fn not_finite(&self, row: &[f32]) -> Option<usize> {
        (self.table.scales.not_finite)(row)
    }

    /// The first of the elements that are furthest from zero; 0 of none.
    #[must_use]
    pub fn extreme(&self, group: &[f32]) -> f32 {
        (self.table.scales.extreme)(group)
    }

    /// The scale with the least error of those that are tried, for a group of which
    /// [`Kernels::extreme`] gave `extreme`; the first of equals. `None` where neither a scale and its
    /// reciprocal nor its error are finite.
    #[must_use]
    pub fn search_scale(&self, how: &ScaleSearch<'_>, group: &[f32], extreme: f32) -> Option<f32> {
        (self.table.scales.search)(how, group, extreme)
    }

    /// `out[i] = clamp(round(group[i] / scale), -largest - 1, largest)`, ties to even, `largest` being 127 at
    /// most. Returns the sums of `(x - scale * q)^2` and of `x^2`.
    ///
    /// # Panics
    ///
    /// When `out` is not as long as `group`.
    pub fn round_group(&self, group: &[f32], scale: f32, largest: f32, out: &mut [i8]) -> [f64; 2] {
        assert_eq!(out.len(), group.len(), "integers against elements");
        (self.table.scales.round)(group, scale, largest, out)
    }

    /// Stores `x` in a float type, to nearest, ties to even: for rows of a cache.
    ///
    /// # Panics
    ///
    /// When `element` has scales (they belong to a converter, not here) or `dst` is not
    /// `element.row_bytes(x.len())` long.
    pub fn encode_row(&self, element: ElementType, x: &[f32], dst: &mut [u8]) {
        assert!(!element.has_scales(), "cannot encode a row as {element}");
        assert_eq!(dst.len(), element.row_bytes(x.len()), "bytes against the length of the row");
        match element {
            ElementType::F32 => {
                for (bytes, value) in dst.as_chunks_mut::<4>().0.iter_mut().zip(x) {
                    *bytes = value.to_le_bytes();
                }
            }
            ElementType::F16 => {
                for (bytes, &value) in dst.as_chunks_mut::<2>().0.iter_mut().zip(x) {
                    *bytes = f32_to_f16(value).to_le_bytes();
                }
            }
            ElementType::Bf16 => {
                for (bytes, &value) in dst.as_chunks_mut::<2>().0.iter_mut().zip(x) {
                    *bytes = f32_to_bf16(value).to_le_bytes();
                }
            }
            ElementType::Packed(_) | ElementType::Fp8(_) | ElementType::MxFp4 => {}
        }
    }
}

pub(crate) fn check_rows(w: &Matrix<'_>, rows: &Range<usize>) {
    assert!(
        rows.start <= rows.end && rows.end <= w.rows(),
        "rows {rows:?} of a matrix of {}",
        w.rows()
    );
}

/// Rows that fit the first-level cache times all columns, a tile at a time.
fn matmul_block(
    kernels: &ElementKernels,
    w: &Matrix<'_>,
    rows: Range<usize>,
    x: &[f32],
    batch: usize,
    put: &mut impl FnMut(usize, usize, f32),
) {
    let cols = w.cols();
    let mut out = [0.0; MAX_TILE];
    let mut column = 0;
    while column < batch {
        let tile = if batch - column >= kernels.wide.columns { kernels.wide } else { kernels.tall };
        let columns = tile.columns;
        let mut row = rows.start;
        while row < rows.end {
            let mut step = |tile: arch::Tile, first: usize| {
                let w_rows = w.rows_from(row, tile.rows);
                let x = &x[first * cols..(first + tile.columns) * cols];
                (tile.run)(&w_rows, x, &mut out);
                for r in 0..tile.rows {
                    let scale = w.scale(row + r);
                    for c in 0..tile.columns {
                        put(row + r, first + c, out[r * tile.columns + c] * scale);
                    }
                }
            };
            if rows.end - row >= tile.rows {
                step(tile, column);
                row += tile.rows;
            } else {
                for c in 0..columns {
                    step(kernels.single, column + c);
                }
                row += 1;
            }
        }
        column += columns;
    }
}

#[cfg(test)]
#[path = "kernels_tests.rs"]
mod tests;
