//! The safetensors header: owns its parsing and every way it can lie. Reads no tensor data.
//!
//! Format: 8 bytes little-endian header length, that many bytes of JSON, then the data, which the
//! header must account for exactly: no gaps, no overlaps, nothing past the end.

mod dtype;
mod table;

use std::collections::{BTreeMap, HashSet};
use std::io::Read;
use std::path::Path;

pub use self::dtype::{DType, TypeName};
use self::table::TensorTable;
use super::source::open_file;

/// Longest header that is read, bytes: the cap of the safetensors library.
pub const HEADER_CAP_BYTES: u64 = 100_000_000;

/// One tensor as the header describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawTensor<'h> {
    /// Its published name.
    pub name: &'h str,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: &'h [u64],
    /// First byte, counted from the start of the data.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
}

/// A whole, validated header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardHeader {
    /// Where the data begin in the file.
    pub data_start: u64,
    /// Size of the file.
    pub file_bytes: u64,
    /// The `__metadata__` strings.
    pub metadata: BTreeMap<String, String>,
    /// BLAKE3 of the header's JSON.
    pub hash: [u8; 32],
    tensors: TensorTable,
}

impl ShardHeader {
    /// Its tensors in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = RawTensor<'_>> {
        self.tensors.iter()
    }

    /// How many there are.
    #[must_use]
    pub fn n_tensors(&self) -> usize {
        self.tensors.len()
    }
}

/// Every way in which a header can be wrong.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The file could not be read.
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// Fewer than the 8 bytes of the length field.
    #[error("is {file_bytes} bytes long, too short for a safetensors file")]
    TooShort {
        /// Size of the file.
        file_bytes: u64,
    },
    /// The length field asks for more than the cap.
    #[error("declares a header of {header_bytes} bytes, more than the cap of {HEADER_CAP_BYTES}")]
    HeaderTooLarge {
        /// The declared length.
        header_bytes: u64,
    },
    /// The length field points past the end of the file.
    #[error("declares a header of {header_bytes} bytes but is only {file_bytes} bytes long")]
    HeaderPastEnd {
        /// The declared length.
        header_bytes: u64,
        /// Size of the file.
        file_bytes: u64,
    },
    /// The header is not the JSON object of the format.
    #[error("has a header that is not valid: {reason}")]
    NotJson {
        /// What the parser said.
        reason: String,
    },
    /// A name occurs twice.
    #[error("lists tensor {tensor} twice")]
    Duplicate {
        /// The name.
        tensor: String,
    },
    /// A dimension is zero.
    #[error("tensor {tensor} has no elements (shape {shape:?})")]
    ZeroLength {
        /// The name.
        tensor: String,
        /// Its declared shape.
        shape: Vec<u64>,
    },
    /// Shape times element size overflows or is not the byte range; of a known type alone.
    #[error(
        "tensor {tensor} of shape {shape:?} and type {dtype} does not fill its {range_bytes} bytes"
    )]
    ShapeMismatch {
        /// The name.
        tensor: String,
        /// Its declared shape.
        shape: Vec<u64>,
        /// Its declared type.
        dtype: DType,
        /// The bytes between its offsets.
        range_bytes: u64,
    },
    /// End before start.
    #[error("tensor {tensor} ends at {end}, before its start at {start}")]
    Reversed {
        /// The name.
        tensor: String,
        /// First byte.
        start: u64,
        /// One past the last.
        end: u64,
    },
    /// A gap before, or an overlap with, the tensor before.
    #[error("tensor {tensor} starts at {start}, expected {expected} (a gap or an overlap)")]
    NotContiguous {
        /// The name.
        tensor: String,
        /// Its first byte.
        start: u64,
        /// Where the tensor before ended.
        expected: u64,
    },
    /// The file is not as long as its header says.
    #[error("is {actual_bytes} bytes long, its header accounts for {expected_bytes}: {}",
        if actual_bytes < expected_bytes { "the file was cut off" }
        else { "bytes follow the last tensor" })]
    WrongLength {
        /// Bytes that the header accounts for.
        expected_bytes: u64,
        /// Size of the file.
        actual_bytes: u64,
    },
}

impl HeaderError {
    /// What to do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            // What the disk or the system refuses is not mended by a download.
            Self::Io(_) => "check the disk and the file's permissions",
            Self::TooShort { .. }
            | Self::HeaderTooLarge { .. }
            | Self::HeaderPastEnd { .. }
            | Self::NotJson { .. }
            | Self::Duplicate { .. }
            | Self::ZeroLength { .. }
            | Self::ShapeMismatch { .. }
            | Self::Reversed { .. }
            | Self::NotContiguous { .. }
            | Self::WrongLength { .. } => "fetch it again",
        }
    }
}

/// Parses the JSON of a header and checks it against the size of the file that it came from.
///
/// # Errors
/// Every variant of [`HeaderError`] but the I/O ones.
pub fn parse_header(json: &[u8], file_bytes: u64) -> Result<ShardHeader, HeaderError> {
    let header_bytes = json.len() as u64;
    if header_bytes > HEADER_CAP_BYTES {
        return Err(HeaderError::HeaderTooLarge { header_bytes });
    }
    let (mut tensors, metadata) = table::parse(json)?;
    check_names(&tensors)?;
    tensors.sort_by_place();
    let mut expected = 0;
    for tensor in tensors.iter() {
        check_tensor(tensor)?;
        if tensor.start != expected {
            return Err(HeaderError::NotContiguous {
                tensor: tensor.name.to_owned(),
                start: tensor.start,
                expected,
            });
        }
        expected = tensor.end;
    }
    let data_start = 8 + header_bytes;
    let expected_bytes = data_start.saturating_add(expected);
    if expected_bytes != file_bytes {
        return Err(HeaderError::WrongLength { expected_bytes, actual_bytes: file_bytes });
    }
    let hash = *blake3::hash(json).as_bytes();
    Ok(ShardHeader { data_start, file_bytes, metadata, hash, tensors })
}

fn check_names(tensors: &TensorTable) -> Result<(), HeaderError> {
    let mut seen = HashSet::with_capacity(tensors.len());
    match tensors.iter().find(|t| !seen.insert(t.name)) {
        Some(twice) => Err(HeaderError::Duplicate { tensor: twice.name.to_owned() }),
        None => Ok(()),
    }
}

fn check_tensor(tensor: RawTensor<'_>) -> Result<(), HeaderError> {
    let RawTensor { name, dtype, shape, start, end } = tensor;
    let (tensor, of_shape) = (|| name.to_owned(), || shape.to_owned());
    if shape.contains(&0) {
        return Err(HeaderError::ZeroLength { tensor: tensor(), shape: of_shape() });
    }
    let Some(range_bytes) = end.checked_sub(start) else {
        return Err(HeaderError::Reversed { tensor: tensor(), start, end });
    };
    // Of a type that nobody knows the byte range is believed: it is checked against its neighbours.
    let Some(element_bits) = dtype.bits() else { return Ok(()) };
    // Counted in bits, for elements of 4 and 6 fill whole bytes only together.
    let want = shape
        .iter()
        .try_fold(u128::from(element_bits), |bits, &dim| bits.checked_mul(u128::from(dim)));
    if want != Some(u128::from(range_bytes) * 8) {
        return Err(HeaderError::ShapeMismatch {
            tensor: tensor(),
            shape: of_shape(),
            dtype,
            range_bytes,
        });
    }
    Ok(())
}

/// A header as it lies in its file, not parsed yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderBytes {
    /// The JSON, without the length field before it.
    pub json: Vec<u8>,
    /// Size of the whole file.
    pub file_bytes: u64,
}

impl HeaderBytes {
    /// Parses it and checks it against the size of its file.
    ///
    /// # Errors
    /// As [`parse_header`].
    pub fn parse(&self) -> Result<ShardHeader, HeaderError> {
        parse_header(&self.json, self.file_bytes)
    }
}

/// How long the JSON is that follows the length field, judged before anything is allocated by it.
///
/// # Errors
/// The file is too short for it, or the length is more than [`HEADER_CAP_BYTES`].
pub fn declared_bytes(length_field: [u8; 8], file_bytes: u64) -> Result<u64, HeaderError> {
    let Some(room) = file_bytes.checked_sub(8) else {
        return Err(HeaderError::TooShort { file_bytes });
    };
    let header_bytes = u64::from_le_bytes(length_field);
    if header_bytes > HEADER_CAP_BYTES {
        return Err(HeaderError::HeaderTooLarge { header_bytes });
    }
    if header_bytes > room {
        return Err(HeaderError::HeaderPastEnd { header_bytes, file_bytes });
    }
    Ok(header_bytes)
}

/// Reads the header of one file; the data are not touched.
///
/// # Errors
/// As [`declared_bytes`], or what the system says.
pub fn read_header_bytes(path: &Path) -> Result<HeaderBytes, HeaderError> {
    let mut file = open_file(path)?;
    let file_bytes = file.metadata()?.len();
    if file_bytes < 8 {
        return Err(HeaderError::TooShort { file_bytes });
    }
    let mut length_field = [0; 8];
    file.read_exact(&mut length_field)?;
    let mut json = vec![0; declared_bytes(length_field, file_bytes)? as usize];
    file.read_exact(&mut json)?;
    Ok(HeaderBytes { json, file_bytes })
}

/// Reads and validates the header of one file.
///
/// # Errors
/// Every variant of [`HeaderError`]. A hostile length field causes no allocation: it is checked
/// against the cap and the size of the file first.
pub fn read_header(path: &Path) -> Result<ShardHeader, HeaderError> {
    read_header_bytes(path)?.parse()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(json: &str, data_bytes: u64) -> Result<ShardHeader, HeaderError> {
        parse_header(json.as_bytes(), 8 + json.len() as u64 + data_bytes)
    }

    #[test]
    fn a_good_header_is_read_in_file_order() {
        let json = r#"{"__metadata__":{"format":"pt"},
            "b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},
            "a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        let header = parse(json, 16).unwrap();
        assert_eq!(header.tensors().map(|t| t.name).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(header.metadata["format"], "pt");
    }

    #[test]
    fn every_lie_has_its_own_error() {
        let cases: &[(&str, u64, &str)] = &[
            ("[]", 0, "not valid"),
            (r#"{"a":{"dtype":7,"shape":[1],"data_offsets":[0,4]}}"#, 4, "tensor a"),
            (r#"{"a":{"dtype":"F99","shape":[0],"data_offsets":[0,0]}}"#, 0, "no elements"),
            (r#"{"a":{"dtype":"F99","shape":[1],"data_offsets":[4,0]}}"#, 4, "before its start"),
            (
                r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#,
                2,
                "type F4 does not fill",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#,
                8,
                "tensor a twice",
            ),
            (r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#, 0, "no elements"),
            (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4, "does not fill"),
            (
                r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,4]}}"#,
                4,
                "does not fill",
            ),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[8,4]}}"#, 4, "before its start"),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#, 6, "gap or an overlap"),
            (
                r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
                6,
                "tensor b starts at 2, expected 4",
            ),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 3, "cut off"),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 5, "bytes follow"),
            (r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,4]}}"#, 4, "not valid"),
        ];
        for (json, data_bytes, expect) in cases {
            let error = parse(json, *data_bytes).unwrap_err().to_string();
            assert!(error.contains(expect), "{json}: {error}");
        }
    }

    #[test]
    fn more_than_any_model_has_is_refused_before_it_takes_memory() {
        let shape = vec!["1"; 33].join(",");
        let entry = |shape: &str| {
            format!(r#"{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}}}"#)
        };
        let error = parse(&entry(&shape), 1).unwrap_err().to_string();
        assert!(error.contains("tensor a: more than 32 dimensions"), "{error}");
        let header = parse(&entry(&shape[2..]), 1).unwrap();
        assert_eq!(header.tensors().next().unwrap().shape.len(), 32);

        let metadata: Vec<String> = (0..10_001).map(|n| format!("\"{n}\":\"\"")).collect();
        let json = format!(r#"{{"__metadata__":{{{}}}}}"#, metadata.join(","));
        let error = parse(&json, 0).unwrap_err().to_string();
        assert!(error.contains("more than 10000 entries of metadata"), "{error}");
    }

    #[test]
    fn what_is_said_twice_is_refused() {
        let field = r#"{"a":{"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4]}}"#;
        let error = parse(field, 4).unwrap_err().to_string();
        assert!(error.contains("tensor a: a field is listed twice"), "{error}");
        let error = parse(r#"{"__metadata__":{},"__metadata__":{}}"#, 0).unwrap_err().to_string();
        assert!(error.contains("__metadata__ twice"), "{error}");
    }

    #[test]
    fn narrow_types_are_counted_in_bits_and_unknown_ones_by_their_range() {
        for (dtype, shape, bytes) in
            [("F4", "4,8", 16), ("F6_E2M3", "4", 3), ("F6_E3M2", "8", 6), ("C64", "2", 16)]
        {
            let entry = |bytes: u64| {
                format!(
                    r#"{{"a":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[0,{bytes}]}}}}"#
                )
            };
            let header = parse(&entry(bytes), bytes).unwrap();
            assert_eq!(header.tensors().next().unwrap().dtype.to_string(), dtype);
            assert!(parse(&entry(bytes + 1), bytes + 1).is_err(), "{dtype}");
        }
        let json = r#"{"a":{"dtype":"F99","shape":[7],"data_offsets":[0,5]}}"#;
        let header = parse(json, 5).unwrap();
        let tensor = header.tensors().next().unwrap();
        assert_eq!((tensor.dtype.bits(), tensor.dtype.to_string().as_str()), (None, "F99"));
    }

    #[test]
    fn escaped_names_and_fields_nobody_knows_are_read() {
        let json = r#"{"\u0061\n":{"x":[[{}]],"data_offsets":[0,4],"shape":[],"dtype":"F32"}}"#;
        let header = parse(json, 4).unwrap();
        let tensor = header.tensors().next().unwrap();
        assert_eq!((tensor.name, tensor.shape, tensor.dtype), ("a\n", &[][..], DType::F32));
    }

    #[test]
    fn hostile_lengths_allocate_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        for (bytes, expect) in [
            (vec![0; 3], "too short"),
            ((1u64 << 60).to_le_bytes().to_vec(), "more than the cap"),
            (1000u64.to_le_bytes().to_vec(), "only 8 bytes long"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = read_header(&path).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(json in proptest::collection::vec(any::<u8>(), 0..200), size: u64) {
            let _ = parse_header(&json, size);
        }

        #[test]
        fn mutated_headers_never_panic(at in 0usize..120, with: u8, size in 0u64..400) {
            let mut json = br#"{"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}}"#.to_vec();
            let at = at % json.len();
            json[at] = with;
            let _ = parse_header(&json, size);
        }
    }
}
