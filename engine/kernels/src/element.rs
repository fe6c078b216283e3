//! The stored element types.
//!
//! Owns: the bytes that rows of each type and their scales take. Refuses: what the bits mean, which is
//! the business of `arch`, and borrowed bytes, which are `matrix`'s.

use std::fmt;

/// How the elements of a matrix are stored.
///
/// Matched exhaustively everywhere, so that a new type is a compile error at each place that has to
/// think about it.
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
    /// e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; subnormals, no infinities, and NaN
    /// where all bits but the sign are set. One scale for each block of 128 x 128 elements, in rows of
    /// blocks; blocks at the right and bottom edges are partial.
    Fp8(BlockScale),
    /// OCP MXFP4: e2m1 in nibbles, low nibble first, in runs of 32 elements of a row, and for each run
    /// a power of two in a byte (E8M0: 2^(byte - 127), NaN where all bits are set). A run takes 16
    /// bytes also where the row ends within it.
    MxFp4,
}

/// How the scale of a block is stored, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockScale {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

/// Rows, and columns, of a block of e4m3 elements that share a scale.
const FP8_BLOCK: usize = 128;
/// Elements of a row in MXFP4 that share a scale.
const MXFP4_RUN: usize = 32;

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

impl BlockScale {
    /// All, from the widest.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Bytes of a scale.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
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
        let floats = [Self::F32, Self::F16, Self::Bf16];
        let fp8 = BlockScale::ALL.map(Self::Fp8);
        floats.into_iter().chain(packed.map(Self::Packed)).chain(fp8).chain([Self::MxFp4])
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
            Self::Fp8(_) => cols,
            Self::MxFp4 => cols.div_ceil(MXFP4_RUN) * (MXFP4_RUN / 2),
        }
    }

    /// Bytes of the scales that a row of `cols` elements has, alone or together with the other rows of
    /// its block; 0 for float types.
    #[must_use]
    pub const fn row_scale_bytes(self, cols: usize) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 0,
            Self::Packed(packed) => packed.group.per_row(cols) * packed.scale.bytes(),
            Self::Fp8(scale) => cols.div_ceil(FP8_BLOCK) * scale.bytes(),
            Self::MxFp4 => cols.div_ceil(MXFP4_RUN),
        }
    }

    /// Rows that share their scales, a power of two.
    #[must_use]
    pub const fn rows_per_scale(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 | Self::Packed(_) | Self::MxFp4 => 1,
            Self::Fp8(_) => FP8_BLOCK,
        }
    }

    /// How many rows of scales `rows` rows need that begin at row `first` of their tensor, which need
    /// not be the first of a block.
    #[must_use]
    pub const fn scale_rows(self, first: usize, rows: usize) -> usize {
        if rows == 0 {
            return 0;
        }
        let per_scale = self.rows_per_scale();
        // At most one more than what whole blocks take, so that nothing overflows.
        let (whole, rest) = (rows / per_scale, rows % per_scale);
        whole + (first % per_scale + rest).div_ceil(per_scale)
    }

    /// Whether there are scales beside the elements.
    #[must_use]
    pub const fn has_scales(self) -> bool {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => false,
            Self::Packed(_) | Self::Fp8(_) | Self::MxFp4 => true,
        }
    }

    /// Whether a whole row shares a scale.
    pub(crate) const fn has_row_scales(self) -> bool {
        self.row_scale().is_some()
    }

    /// The type of a scale that a whole row shares, where there is one.
    pub(crate) const fn row_scale(self) -> Option<ScaleType> {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 | Self::Fp8(_) | Self::MxFp4 => None,
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
            Self::Fp8(BlockScale::F32) => return f.pad("fp8"),
            Self::Fp8(BlockScale::F16) => return f.pad("fp8-f16"),
            Self::Fp8(BlockScale::Bf16) => return f.pad("fp8-bf16"),
            Self::MxFp4 => return f.pad("mxfp4"),
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
        assert_eq!(E::all().count(), 3 + 3 * 4 * 2 + 3 + 1);
        let name =
            E::Packed(Packed { bits: PackedBits::Two, group: Group::Of64, scale: ScaleType::F16 });
        assert_eq!(name.to_string(), "int2-g64-f16");
    }

    #[test]
    fn blocks_at_the_edges_are_partial() {
        let [f32, f16, bf16] = BlockScale::ALL.map(ElementType::Fp8);
        assert_eq!([f32, f16, bf16].map(|e| e.row_bytes(257)), [257; 3]);
        assert_eq!([f32, f16, bf16].map(|e| e.row_scale_bytes(257)), [12, 6, 6]);
        assert_eq!([0, 1, 128, 129].map(|rows| f32.scale_rows(0, rows)), [0, 1, 1, 2]);
        // Rows that begin within a block reach into one more.
        assert_eq!([0, 1, 2, 128, 130].map(|rows| f32.scale_rows(127, rows)), [0, 1, 2, 2, 3]);
        assert_eq!(f32.scale_rows(usize::MAX, usize::MAX), usize::MAX / 128 + 2);
        let mxfp4 = ElementType::MxFp4;
        assert_eq!([32, 33, 1].map(|cols| mxfp4.row_bytes(cols)), [16, 32, 16]);
        assert_eq!([32, 33, 1].map(|cols| mxfp4.row_scale_bytes(cols)), [1, 2, 1]);
        assert_eq!(mxfp4.scale_rows(5, 7), 7);
    }
}
