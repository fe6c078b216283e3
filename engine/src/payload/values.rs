//! Values that no trained weight has: not a number, infinite, a whole matrix of zeros, a scale of
//! zero. Looked at while the bytes are in memory anyway; a finding, never a refusal.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use tierkeep_plans::catalogue::header::{DType, RawTensor, ShardHeader};

use super::PayloadFile;

/// Endings of names that hold the scales of another tensor.
const SCALE_ENDINGS: [&str; 2] = [".qs", "_scale_inv"];
/// Ending of the exponents of MXFP4, bytes like any others but for the tensor beside them.
const EXPONENTS_ENDING: &str = "_scales";
/// Ending of the elements that such exponents are of.
const BLOCKS_ENDING: &str = "_blocks";
/// Tensors of each kind that are named; the rest are counted.
const NAMED_CAP: usize = 20;

/// One tensor with such values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueFault {
    /// Its published name.
    pub tensor: String,
    /// The file that it lies in.
    pub path: PathBuf,
    /// How many such values it has.
    pub count: u64,
}

/// Tensors with values that no trained weight has. Lists are cut off; counts are not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OddValues {
    /// Tensors with values that are not numbers or are infinite.
    pub not_finite: Vec<ValueFault>,
    /// How many such tensors there are.
    pub n_not_finite: u64,
    /// Matrices of which every byte is zero.
    pub all_zero: Vec<ValueFault>,
    /// How many such matrices there are.
    pub n_all_zero: u64,
    /// Scales with zeros among them.
    pub zero_scales: Vec<ValueFault>,
    /// How many such tensors there are.
    pub n_zero_scales: u64,
}

/// What has been seen of one tensor.
#[derive(Debug, Default)]
struct Seen {
    is_nonzero: AtomicBool,
    not_finite: AtomicU64,
    zeros: AtomicU64,
}

/// What has been seen of every tensor of every file.
pub(super) struct Values(Vec<Vec<Looked>>);

/// One tensor: where it lies, what it is, and what has been seen of it.
struct Looked {
    /// First byte in the file.
    start: u64,
    /// One past the last.
    end: u64,
    dtype: DType,
    is_matrix: bool,
    is_scales: bool,
    /// Whether its bytes are powers of two, of which all ones is not a number.
    is_exponents: bool,
    seen: Seen,
}

impl Looked {
    /// Tensors of a file; `blocks` are the names of the model's MXFP4 elements, without their ending.
    fn all_of(header: &ShardHeader, blocks: &HashSet<&str>) -> Vec<Self> {
        let is_exponents = |tensor: &RawTensor<'_>| match tensor.dtype {
            DType::U8 => tensor
                .name
                .strip_suffix(EXPONENTS_ENDING)
                .is_some_and(|weight| blocks.contains(weight)),
            other => other == DType::F8E8M0,
        };
        header
            .tensors()
            .map(|tensor| Self {
                is_exponents: is_exponents(&tensor),
                start: header.data_start.saturating_add(tensor.start),
                end: header.data_start.saturating_add(tensor.end),
                dtype: tensor.dtype,
                is_matrix: tensor.shape.len() > 1,
                is_scales: is_scales(tensor.name),
                seen: Seen::default(),
            })
            .collect()
    }

    /// Looks at what of it lies in `bytes`, which begin at `offset` of the file.
    fn look(&self, offset: u64, bytes: &[u8]) {
        let from = self.start.max(offset);
        let to = self.end.min(offset + bytes.len() as u64);
        let part =
            bytes.get(from.saturating_sub(offset) as usize..to.saturating_sub(offset) as usize);
        let Some(part) = part else { return };
        if part.iter().any(|&byte| byte != 0) {
            self.seen.is_nonzero.store(true, Relaxed);
        }
        // An element that two blocks share is left out of counts; only headers that place elements at
        // odd offsets have any.
        // Of elements narrower than a byte, and of unknown ones, nothing is counted.
        let width = self.dtype.bits().map_or(1, |bits| bits.div_ceil(8));
        let skip = ((width - (from - self.start) % width) % width) as usize;
        let whole = part.get(skip..).unwrap_or_default();
        let not_finite = if self.is_exponents {
            whole.iter().filter(|byte| **byte == 0xff).count() as u64
        } else {
            not_finite(self.dtype, whole)
        };
        self.seen.not_finite.fetch_add(not_finite, Relaxed);
        if self.is_scales {
            self.seen.zeros.fetch_add(zeros(self.dtype, whole), Relaxed);
        }
    }
}

/// Tensors that lie in a range of the file, in file order.
pub(super) fn overlapping(
    header: &ShardHeader,
    offset: u64,
    bytes: u64,
) -> impl Iterator<Item = RawTensor<'_>> {
    let start = offset.saturating_sub(header.data_start);
    let end = offset.saturating_add(bytes).saturating_sub(header.data_start);
    header.tensors().filter(move |tensor| tensor.end > start && tensor.start < end)
}

impl Values {
    pub(super) fn new(files: &[PayloadFile]) -> Self {
        // Exponents may lie in another file than their elements.
        let names = files.iter().flat_map(|file| &file.header).flat_map(ShardHeader::tensors);
        let blocks = names.filter_map(|tensor| tensor.name.strip_suffix(BLOCKS_ENDING)).collect();
        let all_of = |file: &PayloadFile| match &file.header {
            Some(header) => Looked::all_of(header, &blocks),
            None => Vec::new(),
        };
        Self(files.iter().map(all_of).collect())
    }

    /// Looks at bytes from `offset` of a file.
    pub(super) fn look(&self, file: usize, offset: u64, bytes: &[u8]) {
        let Some(tensors) = self.0.get(file) else { return };
        let end = offset.saturating_add(bytes.len() as u64);
        let first = tensors.partition_point(|tensor| tensor.end <= offset);
        let after = tensors.partition_point(|tensor| tensor.start < end);
        for tensor in tensors.get(first..after).unwrap_or_default() {
            tensor.look(offset, bytes);
        }
    }

    /// What is odd; zeros only where everything was looked at.
    pub(super) fn into_odd(self, files: &[PayloadFile], is_complete: bool) -> OddValues {
        let mut odd = OddValues::default();
        for (file, looked) in files.iter().zip(&self.0) {
            let tensors = file.header.iter().flat_map(ShardHeader::tensors);
            for (tensor, looked) in tensors.zip(looked) {
                let note = |count: u64, list: &mut Vec<ValueFault>, total: &mut u64| {
                    if count == 0 {
                        return;
                    }
                    *total += 1;
                    if list.len() < NAMED_CAP {
                        let (tensor, path) = (tensor.name.to_owned(), file.path.clone());
                        list.push(ValueFault { tensor, path, count });
                    }
                };
                let seen = &looked.seen;
                note(seen.not_finite.load(Relaxed), &mut odd.not_finite, &mut odd.n_not_finite);
                // Vectors may be zero: biases that were never trained, padding of containers.
                let is_zero = is_complete && looked.is_matrix && !seen.is_nonzero.load(Relaxed);
                note(u64::from(is_zero), &mut odd.all_zero, &mut odd.n_all_zero);
                note(seen.zeros.load(Relaxed), &mut odd.zero_scales, &mut odd.n_zero_scales);
            }
        }
        odd
    }
}

fn is_scales(name: &str) -> bool {
    SCALE_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// How many values are not numbers or are infinite: every bit of the exponent set, or, in the type
/// that has no infinity, every bit but the sign.
fn not_finite(dtype: DType, bytes: &[u8]) -> u64 {
    let wide = |mask: u32| {
        let words = bytes.as_chunks::<4>().0;
        words.iter().filter(|word| u32::from_le_bytes(**word) & mask == mask).count()
    };
    let half = |mask: u16| {
        let words = bytes.as_chunks::<2>().0;
        words.iter().filter(|word| u16::from_le_bytes(**word) & mask == mask).count()
    };
    let narrow = |mask: u8| bytes.iter().filter(|byte| **byte & mask == mask).count();
    let count = match dtype {
        DType::F32 => wide(0x7f80_0000),
        DType::Bf16 => half(0x7f80),
        DType::F16 => half(0x7c00),
        DType::F8E4M3 => narrow(0x7f),
        DType::F8E5M2 => narrow(0x7c),
        DType::F64 => {
            let mask = 0x7ff0_0000_0000_0000_u64;
            let words = bytes.as_chunks::<8>().0;
            words.iter().filter(|word| u64::from_le_bytes(**word) & mask == mask).count()
        }
        // Whole numbers are always numbers. Powers of two are told apart before, for they are
        // mostly kept as U8.
        DType::Bool
        | DType::U8
        | DType::I8
        | DType::F8E8M0
        | DType::I16
        | DType::U16
        | DType::I32
        | DType::U32
        | DType::I64
        | DType::U64
        // No container of these is read.
        | DType::F4
        | DType::F6E2M3
        | DType::F6E3M2
        | DType::C64
        | DType::Unknown(_) => 0,
    };
    count as u64
}

/// How many values are zero, of either sign.
fn zeros(dtype: DType, bytes: &[u8]) -> u64 {
    let count = match dtype {
        DType::F32 => {
            let words = bytes.as_chunks::<4>().0;
            words.iter().filter(|word| u32::from_le_bytes(**word) << 1 == 0).count()
        }
        DType::F16 | DType::Bf16 => {
            let words = bytes.as_chunks::<2>().0;
            words.iter().filter(|word| u16::from_le_bytes(**word) << 1 == 0).count()
        }
        // No container keeps scales in these.
        DType::Bool
        | DType::U8
        | DType::I8
        | DType::F8E5M2
        | DType::F8E4M3
        | DType::F8E8M0
        | DType::I16
        | DType::U16
        | DType::I32
        | DType::U32
        | DType::F64
        | DType::I64
        | DType::U64
        | DType::F4
        | DType::F6E2M3
        | DType::F6E3M2
        | DType::C64
        | DType::Unknown(_) => 0,
    };
    count as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_finite_is_told_by_its_bits() {
        let f32s = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        let singles = f32s(&[0.0, f32::MAX, f32::NAN, -f32::INFINITY, f32::MIN_POSITIVE, -0.0]);
        assert_eq!(not_finite(DType::F32, &singles), 2);
        assert_eq!(zeros(DType::F32, &singles), 2);
        let halves =
            |values: &[u16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        // bf16: one, infinity, a NaN, the largest number; f16 the same.
        assert_eq!(not_finite(DType::Bf16, &halves(&[0x3f80, 0x7f80, 0xffc1, 0x7f7f])), 2);
        assert_eq!(not_finite(DType::F16, &halves(&[0x3c00, 0x7c00, 0xfe00, 0x7bff])), 2);
        // e4m3 has no infinity: 0x7e is 448, its largest number.
        assert_eq!(not_finite(DType::F8E4M3, &[0x00, 0x7e, 0x7f, 0xff, 0x80]), 2);
        assert_eq!(not_finite(DType::F8E5M2, &[0x7b, 0x7c, 0xfd]), 2);
        assert_eq!(not_finite(DType::F64, &f64::NAN.to_le_bytes()), 1);
        assert_eq!(not_finite(DType::U8, &[0xff; 8]), 0);
    }
}
