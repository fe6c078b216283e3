//! Every packed type, whole models at a time: the oracles are packed here by code that shares nothing
//! with the converter, and must give, bit for bit, what the same values give in another type.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use half::f16;
use tempfile::TempDir;
use tierkeep_engine::verify::read_oracle;
use tierkeep_kernels::Isa;
use tierkeep_plans::budget::EmbeddingResidency;
use tierkeep_plans::catalogue::{
    Catalogue, Group, Packed, PackedBits, Role, ScaleType, StoredType,
};

#[path = "support/models.rs"]
mod models;
use models::{Values, Written, embedding, floats, logits, oracle, read, write};

/// A matrix in a packed type, and the same values in a type that needs none of it: f32 where groups
/// have scales; bytes with f32 scales where rows have, for the order of sums is another.
fn packed_and_twin(tensor: &Values, packed: Packed, out: &mut [Vec<Written>; 2]) {
    let cols = tensor.shape[1] as usize;
    let bits: usize = match packed.bits {
        PackedBits::Eight => 8,
        PackedBits::Four => 4,
        PackedBits::Two => 2,
    };
    let width = match packed.group {
        Group::Row => cols,
        Group::Of128 => 128,
        Group::Of64 => 64,
        Group::Of32 => 32,
    };
    let is_grouped = cols > width;
    let half_range = f32::from(1_i16 << (bits - 1));
    let (mut weights, mut scales) = (Vec::new(), Vec::new());
    let (mut values, mut integers, mut row_scales) = (Vec::new(), Vec::new(), Vec::new());
    for row in tensor.values.chunks(cols) {
        let mut bytes = vec![0_u8; (cols * bits).div_ceil(8)];
        for (group, members) in row.chunks(width).enumerate() {
            let absmax = members.iter().fold(1e-6_f32, |max, x| max.max(x.abs()));
            let mut scale = absmax / (half_range - 1.0);
            if packed.scale == ScaleType::F16 {
                let rounded = f16::from_f32(scale);
                scales.extend(rounded.to_le_bytes());
                scale = rounded.to_f32();
            } else {
                scales.extend(scale.to_le_bytes());
            }
            row_scales.extend(scale.to_le_bytes());
            for (i, x) in members.iter().enumerate() {
                let q = (x / scale).round().clamp(-half_range, half_range - 1.0) as i8;
                let stored = if bits == 8 { q as u8 } else { (q + half_range as i8) as u8 };
                let at = (group * width + i) * bits;
                bytes[at / 8] |= stored << (at % 8);
                integers.push(q as u8);
                values.push(f32::from(q) * scale);
            }
        }
        weights.extend(bytes);
    }
    let rows = tensor.shape[0] as usize;
    let row_bytes = weights.len() / rows;
    let written =
        |name: String, dtype, shape: Vec<usize>, bytes| Written { name, dtype, shape, bytes };
    let scale_type = if packed.scale == ScaleType::F16 { "F16" } else { "F32" };
    let scales_name = || format!("{}.qs", tensor.name);
    let shape = if is_grouped { vec![rows, cols.div_ceil(width)] } else { vec![rows] };
    out[0].push(written(tensor.name.clone(), "U8", vec![rows, row_bytes], weights));
    out[0].push(written(scales_name(), scale_type, shape, scales));
    if is_grouped {
        out[1].push(floats(tensor, &values));
    } else {
        out[1].push(written(tensor.name.clone(), "U8", vec![rows, cols], integers));
        out[1].push(written(scales_name(), "F32", vec![rows], row_scales));
    }
}

/// The model in a packed type and its twin. What `packs` leaves out stays as it is in both.
fn model_and_twin(family: &str, packed: Packed) -> [TempDir; 2] {
    let directory = oracle(family);
    let mut out = [Vec::new(), Vec::new()];
    for tensor in read(&directory) {
        let is_router = tensor.name.contains("mlp.gate.") || tensor.name.contains("weights_proj");
        if tensor.shape.len() == 2 && !is_router {
            packed_and_twin(&tensor, packed, &mut out);
        } else {
            out.iter_mut().for_each(|tensors| tensors.push(floats(&tensor, &tensor.values)));
        }
    }
    out.map(|tensors| write(&directory, &tensors))
}

#[test]
fn a_packed_model_and_the_same_values_in_another_type_give_the_same_bits() {
    use EmbeddingResidency::{Resident, RowRead};
    for family in ["olmoe", "glm_moe_dsa"] {
        let tokens: Vec<u32> =
            read_oracle(&oracle(family)).unwrap().remove(0).prompt.into_iter().take(16).collect();
        for packed in Packed::all() {
            let directories = model_and_twin(family, packed);
            let [model, twin] = directories.each_ref().map(|d| Catalogue::open(d.path()).unwrap());
            let what = format!("{family} {}", packed.name());
            let cols = model.spec.hidden_size as u64;
            let table = model.by_role()[&Role::Embedding].stored;
            assert_eq!(table, StoredType::Packed(packed.for_cols(cols)), "{what}");
            assert!(model.total_bytes() < twin.total_bytes() || packed.bits == PackedBits::Eight);
            let expected = logits(&twin, &tokens, Isa::Scalar, embedding(Resident));
            assert_eq!(expected.len(), tokens.len() * model.spec.vocab_size);
            for isa in Isa::supported() {
                assert!(
                    logits(&model, &tokens, isa, embedding(Resident)) == expected,
                    "{what} {isa}"
                );
            }
            assert!(
                logits(&model, &tokens, Isa::best(), embedding(RowRead)) == expected,
                "{what} by rows"
            );
        }
    }
}
