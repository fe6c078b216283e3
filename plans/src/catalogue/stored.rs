//! How weights are stored: owns the bytes that each stored type takes for a shape, and the names that
//! users see. What the bits mean is the kernels'; the types of packed integers are `packed`'s.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use serde::{Serialize, Serializer};

pub use super::packed::{Group, Packed, PackedBits, ScaleType};

/// How a weight is stored, and so how it is computed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StoredType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an IEEE single.
    Bf16,
    /// Integers of 8, 4 or 2 bits with scales.
    Packed(Packed),
    /// Sign, 4 bits of exponent, 3 of mantissa (e4m3, no infinities), one float scale for each block
    /// of 128 x 128 elements; blocks at the edges are partial.
    Fp8(BlockScale),
    /// OCP MXFP4: e2m1 nibbles, low nibble first, and one power of two (E8M0) for each 32 elements of
    /// a row.
    MxFp4,
}

/// How the scale of a block of e4m3 elements is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockScale {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an IEEE single.
    Bf16,
}

impl BlockScale {
    /// All, from the widest.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Bytes of a scale.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
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
    /// 8 bits in the plain form: one F32 scale a row.
    pub const INT8: Self = Self::Packed(Packed::plain(PackedBits::Eight));
    /// 4 bits in the plain form.
    pub const INT4: Self = Self::Packed(Packed::plain(PackedBits::Four));
    /// 2 bits in the plain form.
    pub const INT2: Self = Self::Packed(Packed::plain(PackedBits::Two));
    /// e4m3 with F32 scales.
    pub const FP8: Self = Self::Fp8(BlockScale::F32);

    /// Every type that is read.
    pub fn all() -> impl Iterator<Item = Self> {
        let floats = [Self::F32, Self::F16, Self::Bf16];
        let packed = Packed::all().map(Self::Packed);
        let fp8 = BlockScale::ALL.map(Self::Fp8);
        floats.into_iter().chain(packed).chain(fp8).chain([Self::MxFp4])
    }

    /// Bytes of one row of `cols` elements, scales not counted.
    #[must_use]
    pub fn row_bytes(self, cols: u64) -> u64 {
        match self {
            Self::F32 => cols * 4,
            Self::F16 | Self::Bf16 => cols * 2,
            Self::Packed(packed) => packed.bits.row_bytes(cols),
            Self::Fp8(_) => cols,
            // Whole runs of 32: a run is 16 bytes also where the row ends within it.
            Self::MxFp4 => cols.div_ceil(32) * 16,
        }
    }

    /// Bytes of one of its scales; 0 where it has none.
    #[must_use]
    pub fn scale_bytes(self) -> u64 {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 0,
            Self::Packed(packed) => packed.scale.bytes(),
            Self::Fp8(scale) => scale.bytes(),
            Self::MxFp4 => 1,
        }
    }

    /// How far one of its scales reaches.
    #[must_use]
    pub fn scales(self) -> Scales {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => Scales::None,
            Self::Packed(packed) => match packed.group.cols() {
                None => Scales::Row,
                Some(cols) => Scales::Block { rows: 1, cols },
            },
            Self::Fp8(_) => Scales::Block { rows: 128, cols: 128 },
            Self::MxFp4 => Scales::Block { rows: 1, cols: 32 },
        }
    }

    /// The packed integers that it is.
    #[must_use]
    pub fn packed(self) -> Option<Packed> {
        match self {
            Self::Packed(packed) => Some(packed),
            Self::F32 | Self::F16 | Self::Bf16 | Self::Fp8(_) | Self::MxFp4 => None,
        }
    }

    /// Its name as users see it, such as `int4-g64-f16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Packed(packed) => packed.name(),
            Self::Fp8(BlockScale::F32) => "fp8",
            Self::Fp8(BlockScale::F16) => "fp8-f16",
            Self::Fp8(BlockScale::Bf16) => "fp8-bf16",
            Self::MxFp4 => "mxfp4",
        }
    }

    /// The type of this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::all().find(|stored| stored.name() == name)
    }
}

impl Serialize for StoredType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for StoredType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameVisitor;
        impl Visitor<'_> for NameVisitor {
            type Value = StoredType;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a stored type")
            }
            fn visit_str<E: Error>(self, name: &str) -> Result<StoredType, E> {
                StoredType::of_name(name).ok_or_else(|| E::custom("an unknown stored type"))
            }
        }
        deserializer.deserialize_str(NameVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_scales_are_padded_as_their_containers_pad_them() {
        use StoredType as S;
        let types = [S::F32, S::F16, S::Bf16, S::INT8, S::INT4, S::INT2, S::FP8, S::MxFp4];
        let bytes = types.map(|stored| (stored.row_bytes(33), stored.scales().count(129, 257)));
        assert_eq!(
            bytes,
            [
                (132, 0),
                (66, 0),
                (66, 0),
                (33, 129),
                (17, 129),
                (9, 129),
                (33, 2 * 3),
                (32, 129 * 9)
            ]
        );
        assert_eq!(S::FP8.scales().shape(192, 160), Some((2, 2)));
    }

    #[test]
    fn every_type_has_a_name_of_its_own() {
        let names: Vec<&str> = StoredType::all().map(StoredType::name).collect();
        assert_eq!(names.len(), 3 + 3 * 4 * 2 + 3 + 1);
        for stored in StoredType::all() {
            assert_eq!(StoredType::of_name(stored.name()), Some(stored));
        }
        assert_eq!(StoredType::INT4.name(), "int4");
        for name in ["int8-f16", "int4-g64", "int4-g128-f16", "int2-g32-f16", "fp8", "fp8-bf16"] {
            assert!(names.contains(&name), "{name}");
        }
    }
}
