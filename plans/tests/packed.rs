//! Packed integers of every kind, as headers show them: types told from bytes and numbers of scales,
//! the sizes that follow, and what is refused.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

mod support;

use serde_json::json;
use support::{Checkpoint, Form};
use tempfile::tempdir;
use tierkeep_plans::budget::{IoMode, slot_bytes};
use tierkeep_plans::catalogue::{
    Catalogue, CatalogueError, Group, LayerTensor, Packed, PackedBits, Role, ScaleType, StoredType,
    sidecar,
};
use tierkeep_plans::units::Bytes;

/// An olmoe whose rows are 160 columns wide, those of down 72: partial last groups of every size.
fn wide(form: Form) -> Checkpoint {
    let mut config = Checkpoint::olmoe(form).config;
    config["hidden_size"] = json!(160);
    config["intermediate_size"] = json!(72);
    Checkpoint::from_config(config, form)
}

fn opened(checkpoint: &Checkpoint) -> Catalogue {
    let dir = tempdir().unwrap();
    checkpoint.write(dir.path());
    Catalogue::open(dir.path()).unwrap()
}

/// The message of a model that must not open.
fn refused(checkpoint: &Checkpoint, metadata: &[(&str, &str)]) -> String {
    let dir = tempdir().unwrap();
    checkpoint.write_with_metadata(dir.path(), metadata);
    let error = Catalogue::open(dir.path()).expect_err("the model opened");
    assert!(matches!(error, CatalogueError::Packing { .. }), "{error:?}");
    error.to_string()
}

/// Weights and scales of a row of 160 and of 72 columns, by the definition.
fn row_bytes(packed: Packed) -> [(u64, u64); 2] {
    let weights = match packed.bits {
        PackedBits::Eight => [160, 72],
        PackedBits::Four => [80, 36],
        PackedBits::Two => [40, 18],
    };
    let scales = match packed.group {
        Group::Row => [1, 1],
        Group::Of128 => [2, 1],
        Group::Of64 => [3, 2],
        Group::Of32 => [5, 3],
    };
    let width = match packed.scale {
        ScaleType::F32 => 4,
        ScaleType::F16 => 2,
    };
    [(weights[0], scales[0] * width), (weights[1], scales[1] * width)]
}

#[test]
fn every_packed_type_is_told_from_its_bytes_and_sized_by_them() {
    for packed in Packed::all() {
        for form in [Form::Packed(packed), Form::Flat(packed)] {
            let checkpoint = wide(form);
            let model = opened(&checkpoint);
            assert!(model.warnings.is_empty(), "{:?}", model.warnings);
            let [row, down_row] = row_bytes(packed);
            let embedding = *model.by_role()[&Role::Embedding];
            assert_eq!(embedding.stored, StoredType::Packed(packed));
            assert_eq!(embedding.bytes(), Bytes(40 * (row.0 + row.1)));
            let aligned = |bytes: u64| bytes.next_multiple_of(64);
            assert_eq!(embedding.resident_bytes().0, aligned(40 * row.0) + aligned(40 * row.1));
            assert_eq!(embedding.row_scale_bytes(), row.1);
            assert_eq!(embedding.row_buffer_bytes(), aligned(row.0) + aligned(row.1));
            let expert = model.expert(1, 4).unwrap();
            assert_eq!(expert.gate.stored, StoredType::Packed(packed));
            assert_eq!(expert.down.stored, StoredType::Packed(packed.for_cols(72)));
            let bytes = 2 * 72 * (row.0 + row.1) + 160 * (down_row.0 + down_row.1);
            assert_eq!((expert.read_bytes(), expert.extents().len()), (bytes, 1));
            assert_eq!(slot_bytes(&model, 1, IoMode::Dropped), Bytes(aligned(bytes)));
            let dense: u64 = model.tensors.iter().map(|t| t.bytes().0).sum();
            let written: usize = checkpoint.tensors.iter().map(|t| t.bytes.len()).sum();
            assert_eq!(dense + model.routed_bytes().0, written as u64);

            let kept = sidecar::encode(&model).unwrap();
            let again = sidecar::decode(&kept, &model.spec, &model.directory).unwrap();
            assert_eq!((again.tensors, again.experts), (model.tensors, model.experts));
        }
    }
}

/// What a sidecar says is believed no more than a header: a type that the catalogue would not give is
/// none.
#[test]
fn a_sidecar_with_a_group_wider_than_its_rows_is_not_believed() {
    let mut model = opened(&Checkpoint::olmoe(Form::INT4));
    let grouped = Packed { group: Group::Of64, ..Packed::plain(PackedBits::Four) };
    model.tensors[0].stored = StoredType::Packed(grouped);
    let kept = sidecar::encode(&model).unwrap();
    assert!(sidecar::decode(&kept, &model.spec, &model.directory).is_none());
}

#[test]
fn a_number_of_scales_that_no_group_has_is_refused_with_those_that_are() {
    let packed = Packed { group: Group::Of64, ..Packed::plain(PackedBits::Four) };
    let name = "model.layers.1.mlp.experts.2.up_proj.weight.qs";
    for shape in [&[72, 4][..], &[3, 72], &[72 * 4], &[72 * 3 - 1], &[72, 3, 1]] {
        let mut checkpoint = wide(Form::Packed(packed));
        checkpoint.replace(name, "F32", shape);
        let message = refused(&checkpoint, &[]);
        assert_eq!(
            message,
            format!(
                "tensor {name} holds scales of shape {shape:?} for 72 x 160, expected [72] (one a \
                 row) or [72, 2] (groups of 128) or [72, 3] (groups of 64) or [72, 5] (groups of \
                 32): fetch the file again, or convert the model again from its published weights"
            )
        );
    }
}

#[test]
fn rows_of_2_bits_that_were_cut_are_refused() {
    let mut checkpoint = wide(Form::Packed(Packed::plain(PackedBits::Two)));
    let name = "model.layers.0.mlp.experts.0.down_proj.weight";
    checkpoint.replace(name, "U8", &[160 * 17]);
    let message = refused(&checkpoint, &[]);
    for part in [name, "2720 packed bytes for 160 x 72", "2880 (2 bits): ", "fetch both again"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn metadata_that_contradict_the_bytes_are_refused() {
    let packed = Packed { bits: PackedBits::Four, group: Group::Of64, scale: ScaleType::F16 };
    let checkpoint = wide(Form::Packed(packed));
    let right = [
        ("tierkeep.format", "1"),
        ("tierkeep.experts.bits", "4"),
        ("tierkeep.experts.group", "64"),
        ("tierkeep.experts.scale", "f16"),
        ("tierkeep.dense.bits", "mixed"),
    ];
    let dir = tempdir().unwrap();
    checkpoint.write_with_metadata(dir.path(), &right);
    let model = Catalogue::open(dir.path()).unwrap();
    assert_eq!(model.expert(0, 0).unwrap().up.stored, StoredType::Packed(packed));
    let experts = "model.layers.0.mlp.experts.0.gate_proj.weight";
    for (key, value, tensor, shown) in [
        ("tierkeep.experts.bits", "8", experts, "4"),
        ("tierkeep.experts.bits", "16", experts, "4"),
        ("tierkeep.experts.group", "32", experts, "64"),
        ("tierkeep.experts.group", "row", experts, "64"),
        ("tierkeep.experts.scale", "f32", experts, "f16"),
        ("tierkeep.embedding.group", "128", "model.embed_tokens.weight", "64"),
        ("tierkeep.dense.bits", "2", "model.layers.0.self_attn.q_proj.weight", "4"),
    ] {
        let mut metadata = right.to_vec();
        metadata.retain(|(known, _)| *known != key);
        metadata.push((key, value));
        assert_eq!(
            refused(&checkpoint, &metadata),
            format!(
                "tensor {tensor} holds int4-g64-f16 by its bytes, expected what its file's metadata \
                 say ({key} = {value}, where bytes show {shown}): fetch the file again, or convert \
                 the model again from its published weights"
            )
        );
    }
}

#[test]
fn metadata_of_tomorrow_are_refused() {
    let checkpoint = Checkpoint::olmoe(Form::INT4);
    let dir = tempdir().unwrap();
    for (key, value) in [
        ("tierkeep.experts.bits", "3"),
        ("tierkeep.experts.group", "16"),
        ("tierkeep.dense.scale", "bf16"),
        ("tierkeep.format", "2"),
    ] {
        checkpoint.write_with_metadata(dir.path(), &[(key, value)]);
        let error = Catalogue::open(dir.path()).unwrap_err();
        assert!(matches!(error, CatalogueError::UnknownContainer { .. }), "{error}");
        assert!(error.to_string().contains(&format!("{key} = {value}")), "{error}");
    }
}

/// Two columns are one byte at 4 bits and at 2: metadata decide, or nobody does.
#[test]
fn bits_that_bytes_do_not_tell_are_asked_of_the_metadata() {
    let mut config = Checkpoint::glm(Form::INT4).config;
    config["v_head_dim"] = json!(1);
    let checkpoint = Checkpoint::from_config(config, Form::INT4);
    let name = "model.layers.0.self_attn.o_proj.weight";
    for metadata in [&[][..], &[("tierkeep.dense.bits", "mixed")]] {
        let message = refused(&checkpoint, metadata);
        for part in [name, "16 packed bytes for 16 x 2, which 4 and 2 bits explain alike", "floats"]
        {
            assert!(message.contains(part), "{message}");
        }
    }
    let dir = tempdir().unwrap();
    checkpoint.write_with_metadata(dir.path(), &[("tierkeep.dense.bits", "4")]);
    let model = Catalogue::open(dir.path()).unwrap();
    let role = Role::Layer { layer: 0, tensor: LayerTensor::AttentionOutput };
    assert_eq!(model.by_role()[&role].stored, StoredType::INT4);
}
