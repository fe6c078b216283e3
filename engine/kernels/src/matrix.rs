//! The stored element types and a borrowed matrix in one of them.
//!
//! Owns: how rows lie in memory, and the check that the bytes handed in are as long as the shape
//! says. Refuses: arithmetic, ownership of weights, alignment (rows lie inside file slabs).

use std::fmt;

use crate::convert::f16_to_f32;

/// How the elements of a matrix are stored.
///
/// Matched exhaustively everywhere, so that a new type (fp8, another float) is a compile error at
/// each place that has to think about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// IEEE binary32, little-endian.
    F32,
    /// IEEE binary16, little-endian.
    F16,
    /// bfloat16, little-endian.
    Bf16,
    /// Integers with scales beside them.
    Packed(Packed),
}

/// Packed integers of some bits with their scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Packed {
    /// Bits of an element.
    pub bits: PackedBits,
    /// What shares a scale.
    pub group: Group,
    /// How a scale is stored.
    pub scale: ScaleType,
}

/// Bits of a packed integer; rows are padded to whole bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackedBits {
    /// Two's complement bytes.
    Eight,
    /// Value plus 8 in four bits, low nibble first.
    Four,
    /// Value plus 2 in two bits, low bits first.
    Two,
}

/// The elements of a row that share a scale. Every group is a whole number of the blocks of 32 that
/// the kernels walk in, the last of a row apart, which may be partial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// All of them.
    Row,
    /// 128.
    Of128,
    /// 64.
    Of64,
    /// 32.
    Of32,
}

/// How a scale is stored, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
}

impl PackedBits {
    /// All, from the widest.
    pub const ALL: [Self; 3] = [Self::Eight, Self::Four, Self::Two];
}

impl Group {
    /// All, from the widest.
    pub const ALL: [Self; 4] = [Self::Row, Self::Of128, Self::Of64, Self::Of32];

    /// Elements that share a scale; `None` where a whole row does.
    #[must_use]
    pub const fn cols(self) -> Option<usize> {
        match self {
            Self::Row => None,
            Self::Of128 => Some(128),
            Self::Of64 => Some(64),
            Self::Of32 => Some(32),
        }
    }

    /// Scales of a row of `cols` elements.
    #[must_use]
    pub const fn per_row(self, cols: usize) -> usize {
        match self.cols() {
            None => 1,
            Some(group) => cols.div_ceil(group),
        }
    }
}

impl ScaleType {
    /// Both.
    pub const ALL: [Self; 2] = [Self::F32, Self::F16];

    /// Bytes of a scale.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }
}

impl ElementType {
    /// 8 bits with one f32 scale a row.
    pub const INT8: Self = Self::plain(PackedBits::Eight);
    /// 4 bits with one f32 scale a row.
    pub const INT4: Self = Self::plain(PackedBits::Four);
    /// 2 bits with one f32 scale a row.
    pub const INT2: Self = Self::plain(PackedBits::Two);

    const fn plain(bits: PackedBits) -> Self {
        Self::Packed(Packed { bits, group: Group::Row, scale: ScaleType::F32 })
    }

    /// All types, for tests and tables.
    pub fn all() -> impl Iterator<Item = Self> {
        let packed = PackedBits::ALL.into_iter().flat_map(|bits| {
            Group::ALL.into_iter().flat_map(move |group| {
                ScaleType::ALL.into_iter().map(move |scale| Packed { bits, group, scale })
            })
        });
        [Self::F32, Self::F16, Self::Bf16].into_iter().chain(packed.map(Self::Packed))
    }

    /// Bytes of one row of `cols` elements, without its scales.
    #[must_use]
    pub const fn row_bytes(self, cols: usize) -> usize {
        match self {
            Self::F32 => cols * 4,
            Self::F16 | Self::Bf16 => cols * 2,
            Self::Packed(packed) => match packed.bits {
                PackedBits::Eight => cols,
                PackedBits::Four => cols.div_ceil(2),
                PackedBits::Two => cols.div_ceil(4),
            },
        }
    }

    /// Bytes of the scales of one row of `cols` elements; 0 for float types.
    #[must_use]
    pub const fn row_scale_bytes(self, cols: usize) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 0,
            Self::Packed(packed) => packed.group.per_row(cols) * packed.scale.bytes(),
        }
    }

    /// Whether there are scales beside the elements.
    #[must_use]
    pub const fn has_scales(self) -> bool {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => false,
            Self::Packed(_) => true,
        }
    }

    /// Whether a whole row shares a scale.
    pub(crate) const fn has_row_scales(self) -> bool {
        self.row_scale().is_some()
    }

    /// The type of a scale that a whole row shares, where there is one.
    const fn row_scale(self) -> Option<ScaleType> {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => None,
            Self::Packed(packed) => match packed.group {
                Group::Row => Some(packed.scale),
                Group::Of128 | Group::Of64 | Group::Of32 => None,
            },
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let packed = match self {
            Self::F32 => return f.pad("f32"),
            Self::F16 => return f.pad("f16"),
            Self::Bf16 => return f.pad("bf16"),
            Self::Packed(packed) => packed,
        };
        let bits = match packed.bits {
            PackedBits::Eight => "int8",
            PackedBits::Four => "int4",
            PackedBits::Two => "int2",
        };
        let group = match packed.group {
            Group::Row => "",
            Group::Of128 => "-g128",
            Group::Of64 => "-g64",
            Group::Of32 => "-g32",
        };
        let scale = match packed.scale {
            ScaleType::F32 => "",
            ScaleType::F16 => "-f16",
        };
        f.pad(&format!("{bits}{group}{scale}"))
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
    data: &'a [u8],
    scales: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// A matrix whose rows follow each other without gaps.
    ///
    /// `data`: `rows * element.row_bytes(cols)` bytes. `scales`: `rows *
    /// element.row_scale_bytes(cols)` bytes, those of a row after one another.
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
        let row_scale_bytes = element.row_scale_bytes(cols);
        let expected = rows.checked_mul(row_scale_bytes).ok_or(too_large)?;
        if scales.len() != expected {
            let found = scales.len();
            return Err(MatrixError::ScalesLength { element, rows, cols, expected, found });
        }
        Ok(Self { element, rows, cols, row_bytes, row_stride, row_scale_bytes, data, scales })
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

    /// Row `row` and the `count - 1` rows after it, as kernels read them.
    pub(crate) fn rows_from(&self, row: usize, count: usize) -> Rows<'a> {
        let start = row * self.row_stride;
        let (scales, blocks_shift) = match self.element {
            ElementType::F32 | ElementType::F16 | ElementType::Bf16 => (&[][..], 0),
            ElementType::Packed(packed) => {
                let scales = row * self.row_scale_bytes..(row + count) * self.row_scale_bytes;
                match packed.group {
                    Group::Row => (&[][..], 0),
                    Group::Of128 => (&self.scales[scales], 2),
                    Group::Of64 => (&self.scales[scales], 1),
                    Group::Of32 => (&self.scales[scales], 0),
                }
            }
        };
        Rows {
            bytes: &self.data[start..start + (count - 1) * self.row_stride + self.row_bytes],
            stride: self.row_stride,
            scales,
            scale_stride: self.row_scale_bytes,
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
    /// Bytes from the first scale of a row to that of the next.
    pub(crate) scale_stride: usize,
    /// A group is 2 to this power blocks of 32 elements.
    pub(crate) blocks_shift: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_bytes_by_type() {
        use ElementType as E;
        let types = [E::F32, E::F16, E::Bf16, E::INT8, E::INT4, E::INT2];
        assert_eq!(types.map(|e| e.row_bytes(7)), [28, 14, 14, 7, 4, 2]);
        assert_eq!(types.map(|e| e.row_scale_bytes(7)), [0, 0, 0, 4, 4, 4]);
        let grouped = |group, scale| {
            E::Packed(Packed { bits: PackedBits::Four, group, scale }).row_scale_bytes(129)
        };
        assert_eq!(grouped(Group::Of128, ScaleType::F32), 8);
        assert_eq!(grouped(Group::Of64, ScaleType::F16), 6);
        assert_eq!(grouped(Group::Of32, ScaleType::F16), 10);
        assert_eq!(E::all().count(), 3 + 3 * 4 * 2);
        let name =
            E::Packed(Packed { bits: PackedBits::Two, group: Group::Of64, scale: ScaleType::F16 });
        assert_eq!(name.to_string(), "int2-g64-f16");
    }

    #[test]
    fn lengths_are_checked_exactly() {
        for element in ElementType::all() {
            for cols in [5, 65, 129] {
                let bytes = 3 * element.row_bytes(cols);
                let scales = 3 * element.row_scale_bytes(cols);
                let data = vec![0_u8; bytes.max(scales) + 1];
                let new =
                    |d: usize, s: usize| Matrix::new(element, 3, cols, &data[..d], &data[..s]);
                assert!(new(bytes, scales).is_ok(), "{element}");
                assert!(matches!(new(bytes - 1, scales), Err(MatrixError::DataLength { .. })));
                assert!(matches!(new(bytes + 1, scales), Err(MatrixError::DataLength { .. })));
                assert!(matches!(new(bytes, scales + 1), Err(MatrixError::ScalesLength { .. })));
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
