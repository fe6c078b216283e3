//! How packed integers are stored: told from bytes and scales, checked against each other and against
//! what the file says of itself.
//!
//! Bits follow from the bytes of a row, the type of scales from their tensor's, the group from how many
//! there are. Each of these has one answer, but for rows of one or two columns, where bytes do not tell
//! the bits; then the metadata do, or nobody does.

use super::found::{FoundTensor, Parts};
use super::stored::{Stored, wrong_shape};
use crate::catalogue::container::SaidOf;
use crate::catalogue::header::DType;
use crate::catalogue::{CatalogueError, Group, Packed, PackedBits, ScaleType, StoredType};

const FETCH: &str = "the file is damaged or config.json belongs to another model; fetch both again";
const CONVERT: &str = "fetch the file again, or convert the model again from its published weights";

/// How packed integers `(rows, cols)` are stored.
pub(super) fn packed(
    weight: FoundTensor<'_>,
    parts: &Parts<'_>,
    (rows, cols): (u64, u64),
    said: Option<SaidOf>,
) -> Result<Stored, CatalogueError> {
    let wrong = |found: String, expected: String, remedy| CatalogueError::Packing {
        tensor: weight.raw.name.to_owned(),
        found,
        expected,
        remedy,
    };
    let Some(scales) = parts.row_scales else {
        let found = "packed U8 without its .qs scales".to_owned();
        return Err(wrong(found, format!("them in {}.qs", weight.raw.name), FETCH));
    };
    let bits = bits(weight, (rows, cols), said.and_then(|said| said.bits()))?;
    let Some(scale) = scale_type(scales.raw.dtype) else {
        let found = format!("packed U8 with {} scales in {}", scales.raw.dtype, scales.raw.name);
        return Err(wrong(found, "F32 or F16 scales".to_owned(), CONVERT));
    };
    let packed = Packed { bits, group: group(scales, (rows, cols))?, scale };
    let contradiction = said.and_then(|said| said.contradicts(packed, cols));
    if let Some((said, shown)) = contradiction {
        let found = format!("{} by its bytes", packed.name());
        let expected = format!("what its file's metadata say ({said}, where bytes show {shown})");
        return Err(wrong(found, expected, CONVERT));
    }
    Ok((StoredType::Packed(packed), Some(scales.span)))
}

fn scale_type(dtype: DType) -> Option<ScaleType> {
    match dtype {
        DType::F32 => Some(ScaleType::F32),
        DType::F16 => Some(ScaleType::F16),
        DType::Bool
        | DType::F4
        | DType::F6E2M3
        | DType::F6E3M2
        | DType::U8
        | DType::I8
        | DType::F8E5M2
        | DType::F8E4M3
        | DType::F8E8M0
        | DType::I16
        | DType::U16
        | DType::Bf16
        | DType::I32
        | DType::U32
        | DType::C64
        | DType::F64
        | DType::I64
        | DType::U64
        | DType::Unknown(_) => None,
    }
}

/// The bits, from the bytes. Packed tensors may be flat.
fn bits(
    weight: FoundTensor<'_>,
    (rows, cols): (u64, u64),
    said: Option<u64>,
) -> Result<PackedBits, CatalogueError> {
    if weight.raw.shape.len() > 1 && weight.raw.shape.first() != Some(&rows) {
        return Err(wrong_shape(weight, vec![rows, cols]));
    }
    let of = |bits: PackedBits| bits.row_bytes(cols).checked_mul(rows);
    let bytes = weight.span.bytes;
    let wrong = |found: String, expected: String, remedy| CatalogueError::Packing {
        tensor: weight.raw.name.to_owned(),
        found,
        expected,
        remedy,
    };
    let fitting: Vec<PackedBits> =
        PackedBits::ALL.into_iter().filter(|bits| of(*bits) == Some(bytes)).collect();
    let bits = match fitting[..] {
        [] => {
            let sizes = PackedBits::ALL.map(|bits| {
                let bytes = of(bits).map_or_else(|| "too many".to_owned(), |b| b.to_string());
                format!("{bytes} ({} bits)", bits.number())
            });
            let found = format!("{bytes} packed bytes for {rows} x {cols}");
            return Err(wrong(found, sizes.join(" or "), FETCH));
        }
        [bits] => bits,
        // What is said is compared with what is found afterwards.
        [..] => {
            fitting.iter().copied().find(|bits| said == Some(bits.number())).ok_or_else(|| {
                let fitting: Vec<String> = fitting.iter().map(|b| b.number().to_string()).collect();
                let found = format!(
                    "{bytes} packed bytes for {rows} x {cols}, which {} bits explain alike",
                    fitting.join(" and ")
                );
                let expected = "metadata that say which, or floats".to_owned();
                wrong(found, expected, "keep matrices of one or two columns as floats")
            })?
        }
    };
    let shape = weight.raw.shape;
    if shape.len() > 1 && *shape != [rows, bits.row_bytes(cols)] {
        return Err(wrong_shape(weight, vec![rows, bits.row_bytes(cols)]));
    }
    Ok(bits)
}

/// What shares a scale, from how many there are: `(rows)`, `(rows, groups)` or flat.
fn group(scales: FoundTensor<'_>, (rows, cols): (u64, u64)) -> Result<Group, CatalogueError> {
    let shape = scales.raw.shape;
    let per_row = match *shape {
        [count] if count.is_multiple_of(rows) => count.checked_div(rows),
        [first, per_row] if first == rows => Some(per_row),
        _ => None,
    };
    per_row.and_then(|per_row| Group::of_count(per_row, cols)).ok_or_else(|| {
        let mut counts: Vec<(u64, Group)> = Vec::new();
        for group in Group::ALL {
            let count = group.per_row(cols);
            if counts.iter().all(|(known, _)| *known != count) {
                counts.push((count, group));
            }
        }
        let counts: Vec<String> = counts
            .into_iter()
            .map(|(count, group)| match group {
                Group::Row => format!("[{rows}] (one a row)"),
                _ => format!("[{rows}, {count}] (groups of {})", group.name()),
            })
            .collect();
        CatalogueError::Packing {
            tensor: scales.raw.name.to_owned(),
            found: format!("scales of shape {shape:?} for {rows} x {cols}"),
            expected: counts.join(" or "),
            remedy: CONVERT,
        }
    })
}
