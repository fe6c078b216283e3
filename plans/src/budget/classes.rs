//! What products touch, apart by how weights are stored: the kernels have a speed for each. Owns which stored
//! types share one; the speeds are the estimate's.

use crate::catalogue::{PackedBits, StoredType};

/// Stored types over which products run at one speed: what tells packed integers apart is their bits alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelClass {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an IEEE single.
    Bf16,
    /// e4m3 in blocks.
    Fp8,
    /// e2m1 nibbles in runs.
    MxFp4,
    /// Packed integers of 8 bits.
    Int8,
    /// Of 4 bits.
    Int4,
    /// Of 2 bits.
    Int2,
}

impl KernelClass {
    /// All, in the order of their declaration.
    pub const ALL: [Self; 8] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Fp8,
        Self::MxFp4,
        Self::Int8,
        Self::Int4,
        Self::Int2,
    ];

    /// The class of a stored type.
    #[must_use]
    pub fn of(stored: StoredType) -> Self {
        match stored {
            StoredType::F32 => Self::F32,
            StoredType::F16 => Self::F16,
            StoredType::Bf16 => Self::Bf16,
            StoredType::Fp8(_) => Self::Fp8,
            StoredType::MxFp4 => Self::MxFp4,
            StoredType::Packed(packed) => match packed.bits {
                PackedBits::Eight => Self::Int8,
                PackedBits::Four => Self::Int4,
                PackedBits::Two => Self::Int2,
            },
        }
    }

    /// Its name as users see it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::MxFp4 => "mxfp4",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Int2 => "int2",
        }
    }
}

/// Bytes as stored, scales included, and the elements in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Bytes.
    pub bytes: u64,
    /// Elements.
    pub weights: u64,
}

/// One value for each class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByClass<T>([T; KernelClass::ALL.len()]);

impl<T: Copy> ByClass<T> {
    /// What `value` says of each class.
    pub fn from_fn(value: impl FnMut(KernelClass) -> T) -> Self {
        Self(KernelClass::ALL.map(value))
    }

    /// The value of a class.
    #[must_use]
    pub fn get(&self, class: KernelClass) -> T {
        self.0[class as usize]
    }

    /// Every class with its value.
    pub fn each(&self) -> impl Iterator<Item = (KernelClass, T)> {
        KernelClass::ALL.into_iter().zip(self.0)
    }
}

impl ByClass<Touched> {
    /// Adds weights of a stored type.
    pub(super) fn add(&mut self, stored: StoredType, bytes: u64, weights: u64) {
        let sum = &mut self.0[KernelClass::of(stored) as usize];
        sum.bytes = sum.bytes.saturating_add(bytes);
        sum.weights = sum.weights.saturating_add(weights);
    }

    /// Both.
    pub(super) fn and(self, other: Self) -> Self {
        Self::from_fn(|class| {
            let (a, b) = (self.get(class), other.get(class));
            Touched {
                bytes: a.bytes.saturating_add(b.bytes),
                weights: a.weights.saturating_add(b.weights),
            }
        })
    }

    /// The share of one of `n`.
    pub(super) fn of_each(self, n: u64) -> Self {
        Self::from_fn(|class| {
            let sum = self.get(class);
            Touched { bytes: sum.bytes / n.max(1), weights: sum.weights / n.max(1) }
        })
    }

    /// Elements of all classes.
    #[must_use]
    pub fn weights(&self) -> u64 {
        self.each().fold(0, |sum, (_, one)| sum.saturating_add(one.weights))
    }

    /// Bytes of all classes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.each().fold(0, |sum, (_, one)| sum.saturating_add(one.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_has_a_place_and_a_name_of_its_own() {
        let by_class = ByClass::from_fn(|class| class);
        for (at, class) in KernelClass::ALL.into_iter().enumerate() {
            assert_eq!((class as usize, by_class.get(class)), (at, class));
            // The plain form of a class has the class's name.
            assert_eq!(StoredType::of_name(class.name()).map(KernelClass::of), Some(class));
        }
    }

    #[test]
    fn groups_and_types_of_scales_are_one_class() {
        for stored in StoredType::all() {
            let name = KernelClass::of(stored).name();
            assert_eq!(stored.name().split('-').next(), Some(name));
        }
    }
}
