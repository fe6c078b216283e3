//! The stored element types and a borrowed matrix in one of them.
//!
//! Owns: how rows lie in memory, and the check that the bytes handed in are as long as the shape
//! says. Refuses: arithmetic, ownership of weights, alignment (rows lie inside file slabs).

use std::fmt;

/// How one element of a matrix is stored.
///
/// Matched exhaustively everywhere, so that a new type (2-bit, group scales, fp8) is a compile
/// error at each place that has to think about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// IEEE binary32, little-endian.
    F32,
    /// IEEE binary16, little-endian.
    F16,
    /// bfloat16, little-endian.
    Bf16,
    /// Two's complement bytes with one f32 scale a row.
    Int8,
    /// Value plus 8 in four bits, low nibble first, rows padded to whole bytes, one f32 scale a row.
    Int4,
}

impl ElementType {
    /// All types, for tests and tables.
    pub const ALL: [ElementType; 5] = [
        ElementType::F32,
        ElementType::F16,
        ElementType::Bf16,
        ElementType::Int8,
        ElementType::Int4,
    ];

    /// Bytes of one row of `cols` elements, without its scale.
    #[must_use]
    pub const fn row_bytes(self, cols: usize) -> usize {
        match self {
            ElementType::F32 => cols * 4,
            ElementType::F16 | ElementType::Bf16 => cols * 2,
            ElementType::Int8 => cols,
            ElementType::Int4 => cols.div_ceil(2),
        }
    }

    /// Whether each row has an f32 scale beside it.
    #[must_use]
    pub const fn has_scales(self) -> bool {
        match self {
            ElementType::F32 | ElementType::F16 | ElementType::Bf16 => false,
            ElementType::Int8 | ElementType::Int4 => true,
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ElementType::F32 => "f32",
            ElementType::F16 => "f16",
            ElementType::Bf16 => "bf16",
            ElementType::Int8 => "int8",
            ElementType::Int4 => "int4",
        })
    }
}

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
    /// The scales are shorter or longer than one f32 a row (none for float types).
    #[error("{element} matrix of {rows} rows needs {expected} bytes of scales, found {found}")]
    ScalesLength {
        /// Stored type.
        element: ElementType,
        /// Rows asked for.
        rows: usize,
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
    data: &'a [u8],
    scales: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// A matrix whose rows follow each other without gaps.
    ///
    /// `data`: `rows * element.row_bytes(cols)` bytes. `scales`: `rows` little-endian f32 for
    /// integer types, empty for float types.
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
        let too_large = MatrixError::TooLarge { element, rows, cols };
        cols.checked_mul(4).ok_or(too_large)?;
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
        let expected =
            if element.has_scales() { rows.checked_mul(4).ok_or(too_large)? } else { 0 };
        if scales.len() != expected {
            let found = scales.len();
            return Err(MatrixError::ScalesLength { element, rows, expected, found });
        }
        Ok(Self { element, rows, cols, row_bytes, row_stride, data, scales })
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

    /// The stored bytes from the beginning of row `row` to the end of row `row + count - 1`.
    pub(crate) fn row_span(&self, row: usize, count: usize) -> &'a [u8] {
        let start = row * self.row_stride;
        &self.data[start..start + (count - 1) * self.row_stride + self.row_bytes]
    }

    /// The scale of row `row`; 1 for float types.
    ///
    /// # Panics
    ///
    /// When `row` is not below `rows()`.
    #[must_use]
    pub fn scale(&self, row: usize) -> f32 {
        if self.element.has_scales() {
            let bytes = self.scales.as_chunks::<4>().0[row];
            f32::from_le_bytes(bytes)
        } else {
            1.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_bytes_by_type() {
        let bytes: Vec<_> = ElementType::ALL.iter().map(|e| e.row_bytes(7)).collect();
        assert_eq!(bytes, [28, 14, 14, 7, 4]);
    }

    #[test]
    fn lengths_are_checked_exactly() {
        let data = [0_u8; 64];
        for element in ElementType::ALL {
            let bytes = 3 * element.row_bytes(5);
            let scales = if element.has_scales() { 12 } else { 0 };
            let new = |d: usize, s: usize| Matrix::new(element, 3, 5, &data[..d], &data[..s]);
            assert!(new(bytes, scales).is_ok(), "{element}");
            assert!(matches!(new(bytes - 1, scales), Err(MatrixError::DataLength { .. })));
            assert!(matches!(new(bytes + 1, scales), Err(MatrixError::DataLength { .. })));
            assert!(matches!(new(bytes, scales + 1), Err(MatrixError::ScalesLength { .. })));
            assert!(matches!(
                Matrix::new(element, usize::MAX / 2, 5, &data, &[]),
                Err(MatrixError::TooLarge { .. })
            ));
        }
    }

    #[test]
    fn strided_rows_begin_where_the_stride_says() {
        let data: Vec<u8> = (0..24).collect();
        let w = Matrix::with_row_stride(ElementType::Int8, 3, 4, 10, &data, &[0; 12]).unwrap();
        assert_eq!(w.row(0), [0, 1, 2, 3]);
        assert_eq!(w.row(2), [20, 21, 22, 23]);
        assert_eq!(
            Matrix::with_row_stride(ElementType::Int8, 3, 4, 3, &data, &[0; 12]).unwrap_err(),
            MatrixError::Stride { row_stride: 3, row_bytes: 4 }
        );
    }

    #[test]
    fn no_rows_need_no_bytes() {
        assert!(Matrix::new(ElementType::F32, 0, 9, &[], &[]).is_ok());
        assert!(Matrix::new(ElementType::Int4, 0, 9, &[], &[]).is_ok());
    }
}
