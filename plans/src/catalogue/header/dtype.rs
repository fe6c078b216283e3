//! Element types of the safetensors format, by the names that a header gives them. A name of
//! tomorrow is kept as it is: its tensor has bytes, and may be one that nothing needs.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, Visitor};

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are the format's own")]
pub enum DType {
    Bool,
    F4,
    F6E2M3,
    F6E3M2,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    F8E8M0,
    I16,
    U16,
    F16,
    Bf16,
    I32,
    U32,
    F32,
    C64,
    F64,
    I64,
    U64,
    /// None that this build knows.
    Unknown(TypeName),
}

impl DType {
    /// Every type that is known, with its name.
    const NAMES: [(Self, &'static str); 20] = [
        (Self::Bf16, "BF16"),
        (Self::F32, "F32"),
        (Self::U8, "U8"),
        (Self::F8E4M3, "F8_E4M3"),
        (Self::F16, "F16"),
        (Self::I8, "I8"),
        (Self::F8E5M2, "F8_E5M2"),
        (Self::F8E8M0, "F8_E8M0"),
        (Self::F4, "F4"),
        (Self::F6E2M3, "F6_E2M3"),
        (Self::F6E3M2, "F6_E3M2"),
        (Self::Bool, "BOOL"),
        (Self::I16, "I16"),
        (Self::U16, "U16"),
        (Self::I32, "I32"),
        (Self::U32, "U32"),
        (Self::C64, "C64"),
        (Self::F64, "F64"),
        (Self::I64, "I64"),
        (Self::U64, "U64"),
    ];

    /// The type of this name.
    #[must_use]
    pub fn of_name(name: &str) -> Self {
        let known = Self::NAMES.iter().find(|(_, known)| *known == name);
        known.map_or_else(|| Self::Unknown(TypeName::new(name)), |(dtype, _)| *dtype)
    }

    /// Bits of one element; `None` where nobody knows.
    #[must_use]
    pub fn bits(self) -> Option<u64> {
        Some(match self {
            Self::F4 => 4,
            Self::F6E2M3 | Self::F6E3M2 => 6,
            Self::Bool | Self::U8 | Self::I8 | Self::F8E5M2 | Self::F8E4M3 | Self::F8E8M0 => 8,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 16,
            Self::I32 | Self::U32 | Self::F32 => 32,
            Self::C64 | Self::F64 | Self::I64 | Self::U64 => 64,
            Self::Unknown(_) => return None,
        })
    }

    /// Whether this build knows the type.
    #[must_use]
    pub fn is_known(self) -> bool {
        self.bits().is_some()
    }
}

impl fmt::Display for DType {
    /// As headers write it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(name) => f.write_str(name.as_str()),
            known => {
                let name = Self::NAMES.iter().find(|(dtype, _)| dtype == known);
                f.write_str(name.map_or("", |(_, name)| name))
            }
        }
    }
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameVisitor;
        impl Visitor<'_> for NameVisitor {
            type Value = DType;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of an element type")
            }
            fn visit_str<E: Error>(self, name: &str) -> Result<DType, E> {
                Ok(DType::of_name(name))
            }
        }
        deserializer.deserialize_str(NameVisitor)
    }
}

/// Longest name of a type that is kept, bytes.
const NAME_CAP: usize = 15;

/// The name of an unknown type, or the beginning of a long one, in place: there is one for each
/// tensor, and a header may hold a million.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TypeName {
    bytes: [u8; NAME_CAP],
    len: u8,
}

impl TypeName {
    fn new(name: &str) -> Self {
        let most = NAME_CAP.min(name.len());
        let len = (0..=most).rev().find(|&at| name.is_char_boundary(at)).unwrap_or(0);
        let mut bytes = [0; NAME_CAP];
        bytes[..len].copy_from_slice(&name.as_bytes()[..len]);
        Self { bytes, len: len as u8 }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let bytes = self.bytes.get(..usize::from(self.len)).unwrap_or_default();
        std::str::from_utf8(bytes).unwrap_or_default()
    }
}

impl fmt::Debug for TypeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_as_it_is_written() {
        for (dtype, name) in DType::NAMES {
            assert_eq!((DType::of_name(name), dtype.to_string().as_str()), (dtype, name));
            assert!(dtype.is_known());
        }
        // Names are the format's, in its letters.
        assert!(!DType::of_name("bf16").is_known());
    }

    #[test]
    fn long_names_are_kept_as_far_as_there_is_room() {
        for (name, kept) in [
            ("", ""),
            ("F2_E1M0", "F2_E1M0"),
            ("OF_FIFTEEN_BYTE", "OF_FIFTEEN_BYTE"),
            ("OF_SIXTEEN_BYTES", "OF_SIXTEEN_BYTE"),
            ("OF_FOURTEEN_BY\u{e9}", "OF_FOURTEEN_BY"),
        ] {
            assert_eq!(DType::of_name(name).to_string(), kept);
        }
    }
}
