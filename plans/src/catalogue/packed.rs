//! Packed integers: how many bits, what shares a scale, how scales are stored. Owns the sizes and the
//! rules by which headers tell them apart; the check of a real tensor is `assemble`'s.

/// Packed integers of some bits with their scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Packed {
    /// Bits of an element.
    pub bits: PackedBits,
    /// What shares a scale.
    pub group: Group,
    /// How a scale is stored.
    pub scale: ScaleType,
}

/// Bits of a packed integer. Rows are padded to whole bytes; of what a byte holds the first element is
/// in the low bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PackedBits {
    /// Two's complement.
    Eight,
    /// Value plus 8.
    Four,
    /// Value plus 2.
    Two,
}

/// The elements of a row that share a scale. The last group of a row is partial where they do not
/// divide it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// All of them.
    Row,
    /// 128 columns.
    Of128,
    /// 64 columns.
    Of64,
    /// 32 columns.
    Of32,
}

/// How a scale is stored, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ScaleType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
}

impl PackedBits {
    /// All, from the widest.
    pub const ALL: [Self; 3] = [Self::Eight, Self::Four, Self::Two];

    /// As a number.
    #[must_use]
    pub fn number(self) -> u64 {
        match self {
            Self::Eight => 8,
            Self::Four => 4,
            Self::Two => 2,
        }
    }

    /// Bytes of a row of `cols` elements, scales not counted.
    #[must_use]
    pub fn row_bytes(self, cols: u64) -> u64 {
        match self {
            Self::Eight => cols,
            Self::Four => cols.div_ceil(2),
            Self::Two => cols.div_ceil(4),
        }
    }

    /// Whether rows of `cols` elements have other bytes than with any other bits, so that a reader can
    /// tell. Not so for one column, which is a byte with any, nor for 4 and 2 bits of two columns.
    #[must_use]
    pub fn is_told_by_bytes(self, cols: u64) -> bool {
        let same = |other: &Self| other.row_bytes(cols) == self.row_bytes(cols);
        Self::ALL.iter().filter(|other| same(other)).count() == 1
    }
}

impl Group {
    /// All, from the widest.
    pub const ALL: [Self; 4] = [Self::Row, Self::Of128, Self::Of64, Self::Of32];

    /// Columns that share a scale; `None` where a whole row does.
    #[must_use]
    pub fn cols(self) -> Option<u64> {
        match self {
            Self::Row => None,
            Self::Of128 => Some(128),
            Self::Of64 => Some(64),
            Self::Of32 => Some(32),
        }
    }

    /// Scales of a row of `cols` elements.
    #[must_use]
    pub fn per_row(self, cols: u64) -> u64 {
        self.cols().map_or(1, |group| cols.div_ceil(group))
    }

    /// Its name in metadata and options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Row => "row",
            Self::Of128 => "128",
            Self::Of64 => "64",
            Self::Of32 => "32",
        }
    }

    /// The grouping of rows of `cols` elements that have so many scales each.
    ///
    /// One scale is a scale for the row, also where a group would be as wide or wider. More than one
    /// tell the group: of two sizes that differ by a factor of two or more, only rows of one group have
    /// as many of either.
    #[must_use]
    pub fn of_count(per_row: u64, cols: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|group| group.per_row(cols) == per_row)
    }
}

impl ScaleType {
    /// Both.
    pub const ALL: [Self; 2] = [Self::F32, Self::F16];

    /// Bytes of a scale.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }

    /// Its name in metadata and options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
        }
    }
}

impl Packed {
    /// The form that other converters write too: one F32 scale a row.
    #[must_use]
    pub const fn plain(bits: PackedBits) -> Self {
        Self { bits, group: Group::Row, scale: ScaleType::F32 }
    }

    /// Every combination.
    pub fn all() -> impl Iterator<Item = Self> {
        let combinations = PackedBits::ALL
            .into_iter()
            .flat_map(|bits| Group::ALL.into_iter().map(move |group| (bits, group)));
        combinations.flat_map(|(bits, group)| {
            ScaleType::ALL.into_iter().map(move |scale| Self { bits, group, scale })
        })
    }

    /// The same for rows of `cols` elements: a group that holds a whole row is the row.
    #[must_use]
    pub fn for_cols(self, cols: u64) -> Self {
        let group = if self.group.per_row(cols) == 1 { Group::Row } else { self.group };
        Self { group, ..self }
    }

    /// Bytes of the scales of one row of `cols` elements.
    #[must_use]
    pub fn row_scale_bytes(self, cols: u64) -> u64 {
        self.group.per_row(cols) * self.scale.bytes()
    }

    /// Its name: the bits, then what differs from the plain form.
    #[must_use]
    pub fn name(self) -> &'static str {
        use Group as G;
        let of_scale: [&str; 2] = match (self.bits, self.group) {
            (PackedBits::Eight, G::Row) => ["int8", "int8-f16"],
            (PackedBits::Eight, G::Of128) => ["int8-g128", "int8-g128-f16"],
            (PackedBits::Eight, G::Of64) => ["int8-g64", "int8-g64-f16"],
            (PackedBits::Eight, G::Of32) => ["int8-g32", "int8-g32-f16"],
            (PackedBits::Four, G::Row) => ["int4", "int4-f16"],
            (PackedBits::Four, G::Of128) => ["int4-g128", "int4-g128-f16"],
            (PackedBits::Four, G::Of64) => ["int4-g64", "int4-g64-f16"],
            (PackedBits::Four, G::Of32) => ["int4-g32", "int4-g32-f16"],
            (PackedBits::Two, G::Row) => ["int2", "int2-f16"],
            (PackedBits::Two, G::Of128) => ["int2-g128", "int2-g128-f16"],
            (PackedBits::Two, G::Of64) => ["int2-g64", "int2-g64-f16"],
            (PackedBits::Two, G::Of32) => ["int2-g32", "int2-g32-f16"],
        };
        match self.scale {
            ScaleType::F32 => of_scale[0],
            ScaleType::F16 => of_scale[1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No number of scales has two meanings: two groups give as many only where a row is one group.
    #[test]
    fn the_number_of_scales_tells_the_group() {
        for cols in 1..=4096 {
            for group in Group::ALL {
                let packed = Packed { group, ..Packed::plain(PackedBits::Four) };
                let told = Group::of_count(group.per_row(cols), cols);
                assert_eq!(told, Some(packed.for_cols(cols).group), "{cols} columns, {group:?}");
            }
            assert_eq!(Group::of_count(0, cols), None);
            assert_eq!(Group::of_count(cols.div_ceil(32) + 1, cols), None);
        }
    }

    #[test]
    fn bytes_tell_the_bits_from_three_columns_on() {
        let told = |cols| PackedBits::ALL.map(|bits| bits.is_told_by_bytes(cols));
        assert_eq!(told(1), [false; 3]);
        assert_eq!(told(2), [true, false, false]);
        assert!((3..=1000).all(|cols| told(cols) == [true; 3]));
    }

    #[test]
    fn scales_of_a_partial_group_are_whole() {
        let packed = |group, scale| Packed { bits: PackedBits::Two, group, scale };
        assert_eq!(packed(Group::Row, ScaleType::F16).row_scale_bytes(129), 2);
        assert_eq!(packed(Group::Of128, ScaleType::F16).row_scale_bytes(129), 4);
        assert_eq!(packed(Group::Of64, ScaleType::F32).row_scale_bytes(129), 12);
        assert_eq!(packed(Group::Of32, ScaleType::F32).row_scale_bytes(96), 12);
        assert_eq!(packed(Group::Of64, ScaleType::F32).for_cols(64).group, Group::Row);
        assert_eq!(packed(Group::Of64, ScaleType::F32).for_cols(65).group, Group::Of64);
    }
}
