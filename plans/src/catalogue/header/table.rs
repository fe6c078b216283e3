//! From a header's JSON to a table of its tensors: owns how they are kept. A model of today has
//! 120,000; their names and dimensions lie end to end in one buffer each, so that a header costs a
//! few allocations and not three for each tensor.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::{DType, HeaderError, RawTensor};

/// Most dimensions of a tensor that are believed. A header of the longest allowed kind could hold
/// 50 million of them, and published tensors have at most 5.
const RANK_CAP: usize = 32;
/// Most entries of `__metadata__` that are read, for the same reason.
const METADATA_CAP: usize = 10_000;
const METADATA: &str = "__metadata__";

/// Tensors, their names and dimensions kept apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TensorTable {
    names: String,
    dimensions: Vec<u64>,
    tensors: Vec<Entry>,
}

/// One tensor: ranges of the buffers, and its place in the file. A header has at most
/// [`super::HEADER_CAP_BYTES`], so 32 bits count everything in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    name: (u32, u32),
    shape: (u32, u32),
    dtype: DType,
    start: u64,
    end: u64,
}

impl TensorTable {
    pub(super) fn len(&self) -> usize {
        self.tensors.len()
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = RawTensor<'_>> {
        self.tensors.iter().map(|entry| RawTensor {
            name: &self.names[entry.name.0 as usize..entry.name.1 as usize],
            dtype: entry.dtype,
            shape: &self.dimensions[entry.shape.0 as usize..entry.shape.1 as usize],
            start: entry.start,
            end: entry.end,
        })
    }

    /// Puts the tensors into file order.
    pub(super) fn sort_by_place(&mut self) {
        self.tensors.sort_by_key(|t| (t.start, t.end));
    }

    fn name_of(&self, (start, end): (u32, u32)) -> &str {
        &self.names[start as usize..end as usize]
    }
}

/// The tensors of a header in the order in which they are listed, repeated names included, and its
/// metadata.
pub(super) fn parse(json: &[u8]) -> Result<(TensorTable, BTreeMap<String, String>), HeaderError> {
    let mut header = Header::default();
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    HeaderSeed(&mut header)
        .deserialize(&mut deserializer)
        .and_then(|()| deserializer.end())
        .map_err(|e| HeaderError::NotJson { reason: e.to_string() })?;
    if header.metadata_twice {
        return Err(HeaderError::Duplicate { tensor: METADATA.to_owned() });
    }
    Ok((header.table, header.metadata.unwrap_or_default()))
}

#[derive(Default)]
struct Header {
    table: TensorTable,
    metadata: Option<BTreeMap<String, String>>,
    metadata_twice: bool,
}

/// The object of the whole header.
struct HeaderSeed<'h>(&'h mut Header);

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let header = self.0;
        while let Some(name) = map.next_key_seed(NameSeed(&mut header.table.names))? {
            if header.table.name_of(name) == METADATA {
                header.table.names.truncate(name.0 as usize);
                header.metadata_twice |= header.metadata.is_some();
                header.metadata = Some(map.next_value::<Metadata>()?.0);
                continue;
            }
            let table = &mut header.table;
            let entry = EntrySeed { dimensions: &mut table.dimensions, name };
            match map.next_value_seed(entry) {
                Ok(entry) => table.tensors.push(entry),
                Err(error) => {
                    let name = table.name_of(name);
                    return Err(A::Error::custom(format_args!("tensor {name}: {error}")));
                }
            }
        }
        Ok(())
    }
}

/// A string appended to a buffer; its range there.
struct NameSeed<'h>(&'h mut String);

impl<'de> DeserializeSeed<'de> for NameSeed<'_> {
    type Value = (u32, u32);
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(u32, u32), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for NameSeed<'_> {
    type Value = (u32, u32);
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }
    fn visit_str<E: Error>(self, name: &str) -> Result<(u32, u32), E> {
        let start = self.0.len();
        self.0.push_str(name);
        Ok((start as u32, self.0.len() as u32))
    }
}

/// What a header says of one tensor.
struct EntrySeed<'h> {
    dimensions: &'h mut Vec<u64>,
    name: (u32, u32),
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Dtype,
    Shape,
    DataOffsets,
    #[serde(other)]
    Other,
}

impl<'de> DeserializeSeed<'de> for EntrySeed<'_> {
    type Value = Entry;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Entry, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = Entry;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entry, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key()? {
            let twice = match field {
                Field::Dtype => dtype.replace(map.next_value()?).is_some(),
                Field::Shape => {
                    shape.replace(map.next_value_seed(ShapeSeed(self.dimensions))?).is_some()
                }
                Field::DataOffsets => offsets.replace(map.next_value::<(u64, u64)>()?).is_some(),
                Field::Other => {
                    map.next_value::<serde::de::IgnoredAny>()?;
                    false
                }
            };
            if twice {
                return Err(A::Error::custom("a field is listed twice"));
            }
        }
        let missing = A::Error::missing_field;
        let (start, end) = offsets.ok_or_else(|| missing("data_offsets"))?;
        Ok(Entry {
            name: self.name,
            shape: shape.ok_or_else(|| missing("shape"))?,
            dtype: dtype.ok_or_else(|| missing("dtype"))?,
            start,
            end,
        })
    }
}

/// Dimensions appended to a buffer; their range there.
struct ShapeSeed<'h>(&'h mut Vec<u64>);

impl<'de> DeserializeSeed<'de> for ShapeSeed<'_> {
    type Value = (u32, u32);
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(u32, u32), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ShapeSeed<'_> {
    type Value = (u32, u32);
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of dimensions")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(u32, u32), A::Error> {
        let start = self.0.len();
        while let Some(dimension) = seq.next_element()? {
            if self.0.len() - start == RANK_CAP {
                return Err(A::Error::custom(format_args!("more than {RANK_CAP} dimensions")));
            }
            self.0.push(dimension);
        }
        Ok((start as u32, self.0.len() as u32))
    }
}

/// The metadata, as many as are believed.
struct Metadata(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MetadataVisitor;
        impl<'de> Visitor<'de> for MetadataVisitor {
            type Value = Metadata;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut metadata = BTreeMap::new();
                while let Some((key, value)) = map.next_entry()? {
                    if metadata.len() == METADATA_CAP {
                        let reason = format_args!("more than {METADATA_CAP} entries of metadata");
                        return Err(A::Error::custom(reason));
                    }
                    metadata.insert(key, value);
                }
                Ok(Metadata(metadata))
            }
        }
        deserializer.deserialize_map(MetadataVisitor)
    }
}
