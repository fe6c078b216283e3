//! A borrowed matrix in one of the stored types.
//!
//! Owns: how rows lie in memory, and the check that the bytes handed in are as long as the shape
//! says. Refuses: arithmetic, ownership of weights, alignment (rows lie inside file slabs).

use crate::convert::f16_to_f32;
use crate::element::{ElementType, Group, ScaleType};

/// A shape and the bytes handed in for it do not agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatrixError {
    /// The bytes of the shape exceed what an address can count.
    #[error("{element} matrix of {rows} x {cols} is larger than memory can be")]
    TooLarge {
        /// Stored type.
        element: ElementType,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// The data is shorter or longer than the shape says.
    #[error("{element} matrix of {rows} x {cols} needs {expected} bytes of data, found {found}")]
    DataLength {
        /// Stored type.
        element: ElementType,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
        /// Bytes that the shape needs.
        expected: usize,
        /// Bytes handed in.
        found: usize,
    },
    /// The scales are shorter or longer than the type says (none for float types).
    #[error("{element} matrix of {rows} x {cols} needs {expected} bytes of scales, found {found}")]
    ScalesLength {
        /// Stored type.
        element: ElementType,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
        /// Bytes that the shape needs.
        expected: usize,
        /// Bytes handed in.
        found: usize,
    },
    /// Rows would overlap.
    #[error("row stride of {row_stride} bytes is less than the {row_bytes} bytes of a row")]
    Stride {
        /// Bytes from one row to the next, as asked for.
        row_stride: usize,
        /// Bytes of a row.
        row_bytes: usize,
    },
}

/// A borrowed matrix `(rows, cols)` in its stored type, at any alignment.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    element: ElementType,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    row_stride: usize,
    row_scale_bytes: usize,
    /// Rows that share their scales: 2 to this power.
    scale_rows_shift: u32,
    /// Rows of the first block before the first row.
    rows_before: usize,
    data: &'a [u8],
    scales: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// A matrix whose rows follow each other without gaps.
    ///
    /// `data`: `rows * element.row_bytes(cols)` bytes. `scales`: `element.scale_rows(0, rows) *
    /// element.row_scale_bytes(cols)` bytes, those of a row, or of a row of blocks, after one another.
    ///
    /// # Errors
    ///
    /// When a length is not exactly what the shape says.
    pub fn new(
        element: ElementType,
        rows: usize,
        cols: usize,
        data: &'a [u8],
        scales: &'a [u8],
    ) -> Result<Self, MatrixError> {
        let too_large = MatrixError::TooLarge { element, rows, cols };
        // Four bytes is the widest element: past this no size below can overflow.
        cols.checked_mul(4).and_then(|bytes| bytes.checked_mul(rows)).ok_or(too_large)?;
        let row_bytes = element.row_bytes(cols);
        Self::with_row_stride(element, rows, cols, row_bytes, data, scales)
    }

    /// Rows of a larger matrix, from its row `first` on: as [`Matrix::new`], with the scales from those
    /// of that row on. Where rows share scales, the first of them may be shared with rows before.
    ///
    /// `scales`: `element.scale_rows(first, rows) * element.row_scale_bytes(cols)` bytes.
    ///
    /// # Errors
    ///
    /// When a length is not exactly what the shape says.
    pub fn part(
        element: ElementType,
        first: usize,
        rows: usize,
        cols: usize,
        data: &'a [u8],
        scales: &'a [u8],
    ) -> Result<Self, MatrixError> {
        let too_large = MatrixError::TooLarge { element, rows, cols };
        cols.checked_mul(4).and_then(|bytes| bytes.checked_mul(rows)).ok_or(too_large)?;
        let row_bytes = element.row_bytes(cols);
        Self::placed(element, first, (rows, cols), row_bytes, data, scales)
    }

    /// A matrix whose rows begin `row_stride` bytes apart, such as one head's keys in a cache of
    /// all heads.
    ///
    /// `data` runs from the first byte of the first row to the last byte of the last row:
    /// `(rows - 1) * row_stride + element.row_bytes(cols)` bytes, or none when there are no rows.
    ///
    /// # Errors
    ///
    /// When a length is not exactly what the shape says, or rows would overlap.
    pub fn with_row_stride(
        element: ElementType,
        rows: usize,
        cols: usize,
        row_stride: usize,
        data: &'a [u8],
        scales: &'a [u8],
    ) -> Result<Self, MatrixError> {
        Self::placed(element, 0, (rows, cols), row_stride, data, scales)
    }

    fn placed(
        element: ElementType,
        first: usize,
        (rows, cols): (usize, usize),
        row_stride: usize,
        data: &'a [u8],
        scales: &'a [u8],
    ) -> Result<Self, MatrixError> {
        let too_large = MatrixError::TooLarge { element, rows, cols };
        // Room for a run of 32 that is not whole.
        cols.checked_add(31).and_then(|cols| cols.checked_mul(4)).ok_or(too_large)?;
        let row_bytes = element.row_bytes(cols);
        if row_stride < row_bytes {
            return Err(MatrixError::Stride { row_stride, row_bytes });
        }
        let expected = match rows.checked_sub(1) {
            None => 0,
            Some(before) => before
                .checked_mul(row_stride)
                .and_then(|bytes| bytes.checked_add(row_bytes))
                .ok_or(too_large)?,
        };
        if data.len() != expected {
            let found = data.len();
            return Err(MatrixError::DataLength { element, rows, cols, expected, found });
        }
        let row_scale_bytes = element.row_scale_bytes(cols);
        let scale_rows = element.scale_rows(first, rows);
        let expected = scale_rows.checked_mul(row_scale_bytes).ok_or(too_large)?;
        if scales.len() != expected {
            let found = scales.len();
            return Err(MatrixError::ScalesLength { element, rows, cols, expected, found });
        }
        let per_scale = element.rows_per_scale();
        Ok(Self {
            element,
            rows,
            cols,
            row_bytes,
            row_stride,
            row_scale_bytes,
            scale_rows_shift: per_scale.trailing_zeros(),
            rows_before: first % per_scale,
            data,
            scales,
        })
    }

    /// Stored type.
    #[must_use]
    pub const fn element(&self) -> ElementType {
        self.element
    }

    /// Number of rows: outputs of a product.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns: inputs of a product.
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of one row, without its scale and without what lies between rows.
    #[must_use]
    pub const fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes from the beginning of a row to that of the next.
    #[must_use]
    pub const fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// The columns `columns` of all rows.
    pub(crate) fn columns(&self, columns: std::ops::Range<usize>) -> Self {
        assert!(!self.element.has_scales(), "columns of {}", self.element);
        assert!(
            columns.start <= columns.end && columns.end <= self.cols,
            "columns {columns:?} of a matrix of {}",
            self.cols
        );
        let start = self.element.row_bytes(columns.start);
        let row_bytes = self.element.row_bytes(columns.len());
        let end = match self.rows {
            0 => start,
            rows => start + (rows - 1) * self.row_stride + row_bytes,
        };
        let data = if self.rows == 0 { &[][..] } else { &self.data[start..end] };
        Self { cols: columns.len(), row_bytes, data, ..*self }
    }

    /// The stored bytes of row `row`.
    ///
    /// # Panics
    ///
    /// When `row` is not below `rows()`.
    #[must_use]
    pub fn row(&self, row: usize) -> &'a [u8] {
        assert!(row < self.rows, "row {row} of a matrix of {} rows", self.rows);
        let start = row * self.row_stride;
        &self.data[start..start + self.row_bytes]
    }

    /// Row `row` and the `count - 1` rows after it, as kernels read them.
    pub(crate) fn rows_from(&self, row: usize, count: usize) -> Rows<'a> {
        let start = row * self.row_stride;
        let placed = self.rows_before + row;
        let first_scale = placed >> self.scale_rows_shift;
        let end_scale = ((placed + count - 1) >> self.scale_rows_shift) + 1;
        let scales = first_scale * self.row_scale_bytes..end_scale * self.row_scale_bytes;
        let (scales, blocks_shift) = match self.element {
            ElementType::F32 | ElementType::F16 | ElementType::Bf16 => (&[][..], 0),
            ElementType::Packed(packed) => match packed.group {
                Group::Row => (&[][..], 0),
                Group::Of128 => (&self.scales[scales], 2),
                Group::Of64 => (&self.scales[scales], 1),
                Group::Of32 => (&self.scales[scales], 0),
            },
            ElementType::Fp8(_) => (&self.scales[scales], 2),
            ElementType::MxFp4 => (&self.scales[scales], 0),
        };
        Rows {
            bytes: &self.data[start..start + (count - 1) * self.row_stride + self.row_bytes],
            stride: self.row_stride,
            scales,
            scale_stride: self.row_scale_bytes,
            scale_rows_shift: self.scale_rows_shift,
            rows_before: placed - (first_scale << self.scale_rows_shift),
            blocks_shift,
        }
    }

    /// The scale that all of row `row` shares; 1 for float types and where groups have scales of
    /// their own.
    ///
    /// # Panics
    ///
    /// When `row` is not below `rows()`.
    #[must_use]
    pub fn scale(&self, row: usize) -> f32 {
        match self.element.row_scale() {
            None => 1.0,
            Some(ScaleType::F32) => f32::from_le_bytes(self.scales.as_chunks::<4>().0[row]),
            Some(ScaleType::F16) => {
                f16_to_f32(u16::from_le_bytes(self.scales.as_chunks::<2>().0[row]))
            }
        }
    }
}

/// Consecutive rows as kernels read them.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    /// From the first byte of the first row.
    pub(crate) bytes: &'a [u8],
    /// Bytes from the beginning of a row to that of the next.
    pub(crate) stride: usize,
    /// The scales of groups, from the first of the first row; empty for types without.
    pub(crate) scales: &'a [u8],
    /// Bytes from the first scale of a row, or of a row of blocks, to that of the next.
    pub(crate) scale_stride: usize,
    /// Rows that share their scales: 2 to this power.
    pub(crate) scale_rows_shift: u32,
    /// Of these, those before the first row.
    pub(crate) rows_before: usize,
    /// A group is 2 to this power blocks of 32 elements.
    pub(crate) blocks_shift: u32,
}

impl<'a> Rows<'a> {
    /// The scales of row `row` of these, and what follows.
    #[inline(always)]
    pub(crate) fn scales_of(&self, row: usize) -> &'a [u8] {
        &self.scales[((self.rows_before + row) >> self.scale_rows_shift) * self.scale_stride..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_checked_exactly() {
        for element in ElementType::all() {
            for cols in [5, 65, 129] {
                let bytes = 3 * element.row_bytes(cols);
                let scales = element.scale_rows(0, 3) * element.row_scale_bytes(cols);
                let data = vec![0_u8; bytes.max(2 * scales) + 1];
                let new =
                    |d: usize, s: usize| Matrix::new(element, 3, cols, &data[..d], &data[..s]);
                assert!(new(bytes, scales).is_ok(), "{element}");
                assert!(matches!(new(bytes - 1, scales), Err(MatrixError::DataLength { .. })));
                assert!(matches!(new(bytes + 1, scales), Err(MatrixError::DataLength { .. })));
                assert!(matches!(new(bytes, scales + 1), Err(MatrixError::ScalesLength { .. })));
                // Rows on both sides of the end of a block.
                let part =
                    |s: usize| Matrix::part(element, 127, 3, cols, &data[..bytes], &data[..s]);
                let both = element.scale_rows(127, 3) * element.row_scale_bytes(cols);
                assert!(part(both).is_ok(), "{element}");
                assert!(matches!(part(both + 1), Err(MatrixError::ScalesLength { .. })));
                assert!(matches!(
                    Matrix::new(element, usize::MAX / 2, cols, &data, &[]),
                    Err(MatrixError::TooLarge { .. })
                ));
            }
        }
    }

    #[test]
    fn strided_rows_begin_where_the_stride_says() {
        let data: Vec<u8> = (0..24).collect();
        let w = Matrix::with_row_stride(ElementType::INT8, 3, 4, 10, &data, &[0; 12]).unwrap();
        assert_eq!(w.row(0), [0, 1, 2, 3]);
        assert_eq!(w.row(2), [20, 21, 22, 23]);
        assert_eq!(
            Matrix::with_row_stride(ElementType::INT8, 3, 4, 3, &data, &[0; 12]).unwrap_err(),
            MatrixError::Stride { row_stride: 3, row_bytes: 4 }
        );
    }

    #[test]
    fn no_rows_need_no_bytes() {
        assert!(Matrix::new(ElementType::F32, 0, 9, &[], &[]).is_ok());
        assert!(Matrix::new(ElementType::INT4, 0, 9, &[], &[]).is_ok());
    }
}
