//! How a weight is stored: told from its header's type, its bytes and its scales, and checked against
//! the shape that the config asks for.

use super::found::{FoundTensor, Parts};
use super::packed;
use crate::catalogue::container::SaidOf;
use crate::catalogue::header::DType;
use crate::catalogue::{BlockScale, CatalogueError, Scales, Span, StoredType};
use crate::spec::ArchSpec;

/// How a weight is stored and where its scales lie.
pub(super) type Stored = (StoredType, Option<Span>);

pub(super) fn wrong_shape(tensor: FoundTensor<'_>, expected: Vec<u64>) -> CatalogueError {
    CatalogueError::WrongShape {
        tensor: tensor.raw.name.to_owned(),
        found: tensor.raw.shape.to_owned(),
        expected,
    }
}

fn unsupported(tensor: FoundTensor<'_>, found: String) -> CatalogueError {
    CatalogueError::UnsupportedType { tensor: tensor.raw.name.to_owned(), found }
}

/// A type that is not read, by its name.
fn of_type(dtype: DType) -> String {
    if dtype.is_known() { dtype.to_string() } else { format!("{dtype}, an unknown type") }
}

/// What a header's type may be.
enum Kind {
    /// Floats of this type.
    Float(StoredType),
    /// Bytes that their scales give a meaning.
    Packed,
    /// e4m3 with a scale for each block.
    Fp8,
    /// Nothing that is read.
    Unread,
}

fn kind(dtype: DType) -> Kind {
    match dtype {
        DType::F32 => Kind::Float(StoredType::F32),
        DType::F16 => Kind::Float(StoredType::F16),
        DType::Bf16 => Kind::Float(StoredType::Bf16),
        DType::U8 | DType::I8 => Kind::Packed,
        DType::F8E4M3 => Kind::Fp8,
        DType::Bool
        | DType::F4
        | DType::F6E2M3
        | DType::F6E3M2
        | DType::F8E5M2
        | DType::F8E8M0
        | DType::I16
        | DType::U16
        | DType::I32
        | DType::U32
        | DType::C64
        | DType::F64
        | DType::I64
        | DType::U64
        | DType::Unknown(_) => Kind::Unread,
    }
}

/// Whether a weight is there, in a type that is read, with the scales that this type needs.
pub(super) fn is_whole(parts: &Parts<'_>) -> bool {
    parts.weight.is_some_and(|weight| match kind(weight.raw.dtype) {
        Kind::Float(_) => true,
        Kind::Unread => false,
        Kind::Packed => parts.row_scales.is_some() || parts.block_scales.is_some(),
        Kind::Fp8 => parts.block_scales.is_some(),
    })
}

/// How a matrix `(rows, cols)` or a vector `(1, cols)` is stored. `said` is what the metadata of its
/// file say of its class.
pub(super) fn stored(
    weight: FoundTensor<'_>,
    parts: &Parts<'_>,
    (rows, cols): (u64, u64),
    said: Option<SaidOf>,
) -> Result<Stored, CatalogueError> {
    let has_shape = || {
        let shape = &weight.raw.shape;
        if *shape == [rows, cols] || (rows == 1 && *shape == [cols]) {
            return Ok(());
        }
        let expected = if rows == 1 { vec![cols] } else { vec![rows, cols] };
        Err(wrong_shape(weight, expected))
    };
    match kind(weight.raw.dtype) {
        Kind::Float(stored) => has_shape().map(|()| (stored, None)),
        Kind::Packed => packed::packed(weight, parts, (rows, cols), said),
        Kind::Fp8 => {
            has_shape()?;
            let Some(scales) = parts.block_scales else {
                let found = format!("e4m3 without its {}_scale_inv", weight.raw.name);
                return Err(unsupported(weight, found));
            };
            block_scales(weight, scales, (rows, cols))
        }
        Kind::Unread => Err(unsupported(weight, of_type(weight.raw.dtype))),
    }
}

/// The float scales of blocks. Most checkpoints keep them as F32, some as the 16-bit type of the rest.
fn block_scales(
    weight: FoundTensor<'_>,
    scales: FoundTensor<'_>,
    (rows, cols): (u64, u64),
) -> Result<Stored, CatalogueError> {
    let scale = match kind(scales.raw.dtype) {
        Kind::Float(StoredType::F32) => BlockScale::F32,
        Kind::Float(StoredType::F16) => BlockScale::F16,
        Kind::Float(StoredType::Bf16) => BlockScale::Bf16,
        Kind::Float(_) | Kind::Packed | Kind::Fp8 | Kind::Unread => {
            return Err(unsupported(weight, format!("e4m3 with {} scales", scales.raw.dtype)));
        }
    };
    let stored = StoredType::Fp8(scale);
    let (scale_rows, scale_cols) = stored.scales().shape(rows, cols).unwrap_or((0, 0));
    if scales.raw.shape != [scale_rows, scale_cols] {
        return Err(wrong_shape(scales, vec![scale_rows, scale_cols]));
    }
    Ok((stored, Some(scales.span)))
}

/// How a tensor that holds one matrix of every expert is stored; outermost is the expert.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FusedForm {
    /// Floats, `(n_experts, inputs, outputs)`.
    Transposed(StoredType),
    /// MXFP4 as blocks of 32, `(n_experts, outputs, inputs / 32, 16)`, and scales without the last.
    Blocks,
}

/// How a fused matrix is stored: each expert's is `(outputs, inputs)`.
pub(super) fn fused(
    spec: &ArchSpec,
    weight: FoundTensor<'_>,
    parts: &Parts<'_>,
    (outputs, inputs): (u64, u64),
) -> Result<FusedForm, CatalogueError> {
    let n_experts = spec.router.n_experts as u64;
    match kind(weight.raw.dtype) {
        Kind::Float(stored) => {
            let expected = vec![n_experts, inputs, outputs];
            if weight.raw.shape != expected {
                return Err(wrong_shape(weight, expected));
            }
            Ok(FusedForm::Transposed(stored))
        }
        Kind::Packed => {
            let Scales::Block { cols: run, .. } = StoredType::MxFp4.scales() else {
                return Err(unsupported(weight, "MXFP4".to_owned()));
            };
            let runs = inputs.div_ceil(run);
            let expected = vec![n_experts, outputs, runs, run / 2];
            if weight.raw.shape != expected {
                return Err(wrong_shape(weight, expected));
            }
            let Some(scales) = parts.block_scales else {
                let base = weight.raw.name.trim_end_matches("_blocks");
                return Err(unsupported(weight, format!("blocks without {base}_scales")));
            };
            if !matches!(scales.raw.dtype, DType::U8 | DType::F8E8M0) {
                let found = format!("blocks with {} scales", scales.raw.dtype);
                return Err(unsupported(weight, found));
            }
            let expected = vec![n_experts, outputs, runs];
            if scales.raw.shape != expected {
                return Err(wrong_shape(scales, expected));
            }
            Ok(FusedForm::Blocks)
        }
        Kind::Fp8 | Kind::Unread => Err(unsupported(weight, of_type(weight.raw.dtype))),
    }
}

/// How the biases of all experts, `(n_experts, width)`, are stored.
pub(super) fn fused_bias(
    spec: &ArchSpec,
    bias: FoundTensor<'_>,
    width: u64,
) -> Result<StoredType, CatalogueError> {
    let Kind::Float(stored) = kind(bias.raw.dtype) else {
        return Err(unsupported(bias, of_type(bias.raw.dtype)));
    };
    let expected = vec![spec.router.n_experts as u64, width];
    if bias.raw.shape != expected {
        return Err(wrong_shape(bias, expected));
    }
    Ok(stored)
}

/// A fused tensor in a form that does not go with that of its layer's others.
pub(super) fn mixed(tensor: FoundTensor<'_>) -> CatalogueError {
    let dtype = tensor.raw.dtype;
    unsupported(tensor, format!("{dtype} beside expert tensors of its layer in another form"))
}
