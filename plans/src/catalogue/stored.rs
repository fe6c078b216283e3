//! How weights are stored: owns the bytes that each stored type takes for a shape. What the bits mean
//! is the kernels'.

use serde::{Deserialize, Serialize};

/// How a weight is stored, and so how it is computed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoredType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an IEEE single.
    Bf16,
    /// Two's complement bytes, one F32 scale a row.
    Int8,
    /// Value plus 8 in a nibble, low nibble first, rows padded to whole bytes, one F32 scale a row.
    Int4,
    /// Sign, 4 bits of exponent, 3 of mantissa (e4m3, no infinities), one float scale for each block
    /// of 128 x 128 elements; blocks at the edges are partial.
    Fp8,
    /// OCP MXFP4: e2m1 nibbles, low nibble first, and one power of two (E8M0) for each 32 elements of
    /// a row.
    MxFp4,
}

/// How far one scale of a stored type reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// The type has none.
    None,
    /// One for each row.
    Row,
    /// One for each block of so many rows and columns; blocks at the edges are partial.
    Block {
        /// Rows of a block.
        rows: u64,
        /// Columns of a block.
        cols: u64,
    },
}

impl Scales {
    /// The shape of the scales of a matrix `(rows, cols)`; `None` where there are none.
    #[must_use]
    pub fn shape(self, rows: u64, cols: u64) -> Option<(u64, u64)> {
        match self {
            Self::None => None,
            Self::Row => Some((rows, 1)),
            Self::Block { rows: block_rows, cols: block_cols } => {
                Some((rows.div_ceil(block_rows), cols.div_ceil(block_cols)))
            }
        }
    }

    /// How many scales a matrix `(rows, cols)` has.
    #[must_use]
    pub fn count(self, rows: u64, cols: u64) -> u64 {
        self.shape(rows, cols).map_or(0, |(rows, cols)| rows * cols)
    }
}

impl StoredType {
    /// Every type that is read.
    pub const ALL: [Self; 7] =
        [Self::F32, Self::F16, Self::Bf16, Self::Int8, Self::Int4, Self::Fp8, Self::MxFp4];

    /// Bytes of one row of `cols` elements, scales not counted.
    #[must_use]
    pub fn row_bytes(self, cols: u64) -> u64 {
        match self {
            Self::F32 => cols * 4,
            Self::F16 | Self::Bf16 => cols * 2,
            Self::Int8 | Self::Fp8 => cols,
            Self::Int4 => cols.div_ceil(2),
            // Whole runs of 32: a run is 16 bytes also where the row ends within it.
            Self::MxFp4 => cols.div_ceil(32) * 16,
        }
    }

    /// How far one of its scales reaches.
    #[must_use]
    pub fn scales(self) -> Scales {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => Scales::None,
            Self::Int8 | Self::Int4 => Scales::Row,
            Self::Fp8 => Scales::Block { rows: 128, cols: 128 },
            Self::MxFp4 => Scales::Block { rows: 1, cols: 32 },
        }
    }

    /// Whether a row carries an F32 scale in a tensor of its own.
    #[must_use]
    pub fn has_row_scales(self) -> bool {
        self.scales() == Scales::Row
    }

    /// Its name as users see it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Fp8 => "fp8",
            Self::MxFp4 => "mxfp4",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_scales_are_padded_as_their_containers_pad_them() {
        use StoredType as S;
        let bytes = S::ALL.map(|stored| (stored.row_bytes(33), stored.scales().count(129, 257)));
        assert_eq!(
            bytes,
            [(132, 0), (66, 0), (66, 0), (33, 129), (17, 129), (33, 2 * 3), (32, 129 * 9)]
        );
        assert_eq!(S::Fp8.scales().shape(192, 160), Some((2, 2)));
    }
}
