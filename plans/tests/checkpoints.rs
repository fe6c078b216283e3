//! Checkpoints as they arrive in the field: cut off, mixed up, incomplete, or fine in an unusual
//! form. What is wrong is named with its remedy; what is merely odd is a warning and the model opens.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

mod support;

use std::fs;
use std::path::Path;

use serde_json::json;
use support::{Checkpoint, Form, TestTensor, read_index, write_index, write_shard};
use tempfile::{TempDir, tempdir};
use tierkeep_plans::catalogue::{Catalogue, CatalogueError, LayerTensor, Role, StoredType};

/// The error of a model that must not open, checked to contain all of `parts`.
fn refused(directory: &Path, parts: &[&str]) -> CatalogueError {
    let error = Catalogue::open(directory).expect_err("the model opened");
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
    error
}

/// The model, and its warnings as one text.
fn opened(directory: &Path) -> (Catalogue, String) {
    let model = Catalogue::open(directory).unwrap();
    let warnings: Vec<String> =
        model.warnings.iter().map(|w| format!("{} ({})", w.finding, w.remedy)).collect();
    (model, warnings.join("\n"))
}

fn written(checkpoint: &Checkpoint) -> TempDir {
    let dir = tempdir().unwrap();
    checkpoint.write(dir.path());
    dir
}

const FORMS: [(Form, StoredType); 6] = [
    (Form::F32, StoredType::F32),
    (Form::Bf16, StoredType::Bf16),
    (Form::INT8, StoredType::INT8),
    (Form::FLAT_INT8, StoredType::INT8),
    (Form::INT4, StoredType::INT4),
    (Form::FLAT_INT4, StoredType::INT4),
];

#[test]
fn every_stored_form_is_read_from_its_bytes() {
    for (form, stored) in FORMS {
        for checkpoint in [Checkpoint::olmoe(form), Checkpoint::glm(form)] {
            let dir = written(&checkpoint);
            let (model, warnings) = opened(dir.path());
            assert_eq!(warnings, "", "{form:?}");
            let experts = 2 * 6;
            assert_eq!(model.experts.len(), experts);
            assert!(model.experts.iter().all(|e| e.down.stored == stored), "{form:?}");
            let embedding = model.by_role()[&Role::Embedding];
            assert_eq!((embedding.stored, embedding.rows, embedding.cols), (stored, 40, 16));
            // All bytes are accounted for: dense tensors and experts are every tensor of the files.
            let dense: u64 = model.tensors.iter().map(|t| t.bytes().0).sum();
            let written: usize = checkpoint.tensors.iter().map(|t| t.bytes.len()).sum();
            assert_eq!(dense + model.routed_bytes().0, written as u64, "{form:?}");
        }
    }
}

#[test]
fn rows_of_odd_width_are_padded_to_whole_bytes_at_4_bits() {
    let mut checkpoint = Checkpoint::olmoe(Form::INT4);
    checkpoint.config["intermediate_size"] = json!(7);
    let checkpoint = Checkpoint::from_config(checkpoint.config, Form::INT4);
    let dir = written(&checkpoint);
    let (model, _) = opened(dir.path());
    // gate and up: 7 rows of 8 bytes and 7 scales; down: 16 rows of 4 bytes and 16 scales.
    assert_eq!(model.expert(0, 0).unwrap().read_bytes(), 2 * (7 * 8 + 7 * 4) + 16 * 4 + 16 * 4);
}

#[test]
fn a_missing_shard_is_named_whoever_promises_it() {
    let dir = tempdir().unwrap();
    let paths = Checkpoint::olmoe(Form::Bf16).write_sharded(dir.path(), 4);
    fs::remove_file(&paths[2]).unwrap();
    let parts = ["model-00003-of-00004.safetensors is missing", "named by", "fetch it again"];
    assert!(matches!(refused(dir.path(), &parts), CatalogueError::MissingShard { .. }));
    fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    let parts = ["model-00003-of-00004.safetensors is missing", "numbered to 4", "fetch it again"];
    assert!(matches!(refused(dir.path(), &parts), CatalogueError::MissingShard { .. }));
}

#[test]
fn of_two_missing_shards_the_one_that_holds_the_missing_tensor_is_named() {
    let dir = tempdir().unwrap();
    Checkpoint::olmoe(Form::Bf16).write_sharded(dir.path(), 4);
    // An unused file that the index names comes first by name, and is not to blame.
    let mut index = read_index(dir.path());
    index["weight_map"]["visual.patch.weight"] = json!("a-visual.safetensors");
    write_index(dir.path(), &index);
    fs::remove_file(dir.path().join("model-00004-of-00004.safetensors")).unwrap();
    refused(dir.path(), &["model-00004-of-00004.safetensors is missing", "fetch it again"]);
}

#[test]
fn weights_that_were_never_fetched_are_asked_for() {
    let dir = tempdir().unwrap();
    let checkpoint = Checkpoint::olmoe(Form::Bf16);
    for path in checkpoint.write_sharded(dir.path(), 2) {
        fs::remove_file(path).unwrap();
    }
    refused(dir.path(), &["model-00001-of-00002.safetensors is missing", "fetch it again"]);
    fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    let error = refused(dir.path(), &["no model*.safetensors", "fetch the weights"]);
    assert!(matches!(error, CatalogueError::NoShards { .. }));
}

#[test]
fn a_shard_of_another_length_than_its_header_says_is_named_with_both_sizes() {
    let dir = tempdir().unwrap();
    let paths = Checkpoint::glm(Form::F32).write_sharded(dir.path(), 3);
    let whole = fs::read(&paths[1]).unwrap();
    let (len, cut) = (whole.len(), whole.len() - 4096);
    fs::write(&paths[1], &whole[..cut]).unwrap();
    let expected =
        format!("is {cut} bytes long, its header accounts for {len}: the file was cut off");
    refused(dir.path(), &["model-00002-of-00003.safetensors", &expected, "fetch it again"]);

    let mut longer = whole.clone();
    longer.extend([0; 7]);
    fs::write(&paths[1], &longer).unwrap();
    let expected = format!("is {} bytes long, its header accounts for {len}", len + 7);
    refused(dir.path(), &["model-00002-of-00003.safetensors", &expected, "bytes follow"]);

    fs::write(&paths[1], &whole).unwrap();
    opened(dir.path());
}

#[test]
fn a_header_of_nonsense_is_named_and_costs_nothing() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let checkpoint = Checkpoint::olmoe(Form::F32);
    checkpoint.write(dir.path());
    let with_header = |json: &str, data: usize| {
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.extend(json.as_bytes());
        file.resize(file.len() + data, 0);
        file
    };
    let cases: &[(Vec<u8>, &str)] = &[
        (Vec::new(), "0 bytes long, too short"),
        ((1_u64 << 60).to_le_bytes().to_vec(), "more than the cap"),
        (50_000_000_u64.to_le_bytes().to_vec(), "only 8 bytes long"),
        (with_header("version https://git-lfs.github.com/spec/v1", 0), "header that is not valid"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n".to_vec(), "cap"),
        (with_header("{}\u{0}", 0), "header that is not valid"),
        (
            with_header(
                r#"{"model.norm.weight":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#,
                8,
            ),
            "tensor model.norm.weight of shape [3] and type F32 does not fill its 8 bytes",
        ),
        (
            with_header(
                r#"{"model.norm.weight":{"dtype":"F4","shape":[3],"data_offsets":[0,8]}}"#,
                8,
            ),
            "tensor model.norm.weight",
        ),
    ];
    for (bytes, expected) in cases {
        fs::write(&path, bytes).unwrap();
        refused(dir.path(), &["model.safetensors", expected, "fetch it again"]);
    }
}

#[test]
fn a_folder_that_is_no_model_says_what_a_model_is() {
    let dir = tempdir().unwrap();
    let error = refused(dir.path(), &["has no config.json", "a model is a folder with"]);
    assert!(matches!(error, CatalogueError::NotAModel { .. }));
    refused(&dir.path().join("nowhere"), &["nowhere"]);
    let file = dir.path().join("model.gguf");
    fs::write(&file, "x").unwrap();
    refused(&file, &["model.gguf"]);
}

#[test]
fn a_config_that_cannot_be_used_is_named() {
    let mut checkpoint = Checkpoint::olmoe(Form::F32);
    checkpoint.config["model_type"] = json!("mamba");
    let dir = written(&checkpoint);
    refused(dir.path(), &["unknown family \"mamba\"", "this build knows glm_moe_dsa, olmoe"]);
    fs::write(dir.path().join("config.json"), "{").unwrap();
    refused(dir.path(), &["config.json is not a JSON object"]);
}

#[test]
fn a_config_of_another_shape_names_tensor_found_and_expected() {
    for form in [Form::F32, Form::INT8, Form::INT4, Form::FLAT_INT8] {
        let mut checkpoint = Checkpoint::olmoe(form);
        checkpoint.config["vocab_size"] = json!(48);
        let dir = written(&checkpoint);
        let error = refused(dir.path(), &["model.embed_tokens.weight", "config.json"]);
        if form == Form::FLAT_INT8 {
            let parts = ["640 packed bytes for 48 x 16", "768 (8 bits) or 384 (4 bits) or 192 (2"];
            refused(dir.path(), &parts);
            continue;
        }
        let CatalogueError::WrongShape { found, expected, .. } = error else {
            panic!("{form:?}: {error}")
        };
        assert_ne!(found, expected);
        assert!(expected[0] == 48, "{form:?}: {expected:?}");
    }
    let mut checkpoint = Checkpoint::olmoe(Form::Bf16);
    checkpoint.config["intermediate_size"] = json!(10);
    let dir = written(&checkpoint);
    let parts = [
        "tensor model.layers.0.mlp.experts.0.gate_proj.weight",
        "shape [8, 16], expected [10, 16] by config.json",
    ];
    refused(dir.path(), &parts);
}

/// A packed matrix of twice the width at 4 bits has as many bytes as one at 8 bits.
#[test]
fn packed_rows_are_not_taken_for_rows_of_another_shape() {
    let mut checkpoint = Checkpoint::olmoe(Form::INT8);
    // As many bytes as (8, 16) at 8 bits, and as many scales, but other rows.
    checkpoint.replace("model.layers.1.mlp.experts.2.up_proj.weight", "U8", &[16, 8]);
    let dir = written(&checkpoint);
    let parts = ["model.layers.1.mlp.experts.2.up_proj.weight", "[16, 8]", "expected [8, 16]"];
    refused(dir.path(), &parts);
}

#[test]
fn a_missing_tensor_is_named() {
    for name in [
        "model.layers.1.mlp.experts.5.down_proj.weight",
        "model.layers.0.self_attn.indexer.k_norm.bias",
        "lm_head.weight",
    ] {
        let mut checkpoint = Checkpoint::glm(Form::Bf16);
        checkpoint.remove(name);
        let dir = written(&checkpoint);
        let error = refused(dir.path(), &[name, "none of the 1 shards", "incomplete"]);
        assert!(matches!(error, CatalogueError::MissingTensor { .. }));
    }
}

#[test]
fn a_tensor_in_two_shards_names_both() {
    for name in ["model.norm.weight", "model.layers.0.mlp.experts.1.up_proj.weight"] {
        let checkpoint = Checkpoint::olmoe(Form::Bf16);
        let dir = written(&checkpoint);
        let copy = checkpoint.tensors[checkpoint.position(name)].clone();
        write_shard(&dir.path().join("model-old.safetensors"), &[copy]);
        let parts = [name, "model-old.safetensors", "model.safetensors", "remove the stale file"];
        refused(dir.path(), &parts);
    }
}

#[test]
fn packed_tensors_without_usable_scales_are_named() {
    let name = "model.layers.1.mlp.experts.3.gate_proj.weight";
    let scales = format!("{name}.qs");
    let mut checkpoint = Checkpoint::olmoe(Form::INT4);
    checkpoint.remove(&scales);
    refused(written(&checkpoint).path(), &[name, ".qs scales"]);

    let mut checkpoint = Checkpoint::olmoe(Form::INT4);
    checkpoint.replace(&scales, "F32", &[9]);
    let parts = [&scales, "scales of shape [9] for 8 x 16", "expected [8] (one a row): fetch"];
    refused(written(&checkpoint).path(), &parts);
    // Groups exchanged with rows.
    checkpoint.replace(&scales, "F32", &[1, 8]);
    refused(written(&checkpoint).path(), &[&scales, "[1, 8]", "expected [8]"]);

    for dtype in ["U8", "BF16", "F64"] {
        let mut checkpoint = Checkpoint::olmoe(Form::INT4);
        checkpoint.replace(&scales, dtype, &[8]);
        let found = format!("{dtype} scales in {scales}");
        refused(written(&checkpoint).path(), &[name, &found, "expected F32 or F16", "convert"]);
    }

    let mut checkpoint = Checkpoint::olmoe(Form::INT4);
    checkpoint.replace(name, "U8", &[100]);
    let parts = [name, "100 packed bytes for 8 x 16", "128 (8 bits) or 64 (4 bits) or 32 (2 bits)"];
    refused(written(&checkpoint).path(), &parts);
}

#[test]
fn a_type_that_is_not_read_is_named_with_those_that_are() {
    let types = ["F64", "I32", "BOOL", "F4", "C64"].map(|dtype| (dtype, dtype));
    let others = [("F8_E4M3", "e4m3 without"), ("F99", "F99, an unknown type")];
    for (dtype, found) in types.into_iter().chain(others) {
        let mut checkpoint = Checkpoint::olmoe(Form::Bf16);
        let name = "model.layers.0.self_attn.q_proj.weight";
        checkpoint.replace(name, dtype, &[16, 16]);
        let reads = "reads bf16, f16, f32, e4m3 with scales";
        let error = refused(written(&checkpoint).path(), &[name, found, reads]);
        assert!(matches!(error, CatalogueError::UnsupportedType { .. }));
    }
}

#[test]
fn an_absent_index_is_a_warning() {
    let dir = tempdir().unwrap();
    Checkpoint::olmoe(Form::Bf16).write_sharded(dir.path(), 3);
    let (with_index, warnings) = opened(dir.path());
    assert_eq!(warnings, "");
    fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    let (without, warnings) = opened(dir.path());
    assert!(warnings.contains("index.json is absent (nothing: "), "{warnings}");
    assert_eq!(with_index.fingerprint, without.fingerprint);
    assert_eq!(with_index.experts, without.experts);
    // One file needs no index.
    assert_eq!(opened(written(&Checkpoint::olmoe(Form::Bf16)).path()).1, "");
}

#[test]
fn an_index_that_is_none_is_a_warning() {
    let dir = written(&Checkpoint::olmoe(Form::Bf16));
    for text in ["", "[]", "{\"weight_map\": 3}", "{\"weight_map\": {\"a\": 1}}", "{}"] {
        fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        let (_, warnings) = opened(dir.path());
        assert!(warnings.contains("cannot be read as an index"), "{text}: {warnings}");
    }
}

#[test]
fn an_index_that_names_absent_files_is_a_warning_where_nothing_needed_is_in_them() {
    // The index of the published shards, left beside a conversion into one file.
    let dir = tempdir().unwrap();
    let checkpoint = Checkpoint::olmoe(Form::Bf16);
    for path in checkpoint.write_sharded(dir.path(), 3) {
        fs::remove_file(path).unwrap();
    }
    checkpoint.write(dir.path());
    let (model, warnings) = opened(dir.path());
    assert_eq!(model.shards.len(), 1);
    assert!(warnings.contains("3 files are absent"), "{warnings}");
    assert!(warnings.contains("model-00001-of-00003.safetensors (named by "), "{warnings}");
}

#[test]
fn an_index_that_leads_out_of_the_folder_is_not_followed() {
    let outer = tempdir().unwrap();
    let dir = outer.path().join("model");
    fs::create_dir(&dir).unwrap();
    let checkpoint = Checkpoint::olmoe(Form::Bf16);
    checkpoint.write(&dir);
    write_shard(&outer.path().join("x.safetensors"), &[TestTensor::new("a", "U8", &[1])]);
    let path = outer.path().join("x.safetensors");
    for outside in ["../x.safetensors", "..", path.to_str().unwrap()] {
        write_index(&dir, &json!({ "weight_map": { "a": outside } }));
        assert_eq!(opened(&dir).0.shards.len(), 1, "{outside}");
    }
}

#[test]
fn an_index_that_lacks_tensors_is_a_warning() {
    let dir = tempdir().unwrap();
    Checkpoint::olmoe(Form::INT8).write_sharded(dir.path(), 2);
    let mut index = read_index(dir.path());
    index["weight_map"].as_object_mut().unwrap().retain(|name, _| !name.ends_with(".qs"));
    index["weight_map"]["model.rotary.inv_freq"] = json!("model-00001-of-00002.safetensors");
    write_index(dir.path(), &index);
    let (model, warnings) = opened(dir.path());
    let n_scales = model.experts.len() * 3 + 2 + 2 * 4;
    let expected = format!("lacks {n_scales} tensors of the shards and names 1 that they do not");
    assert!(warnings.contains(&expected), "{warnings}");
    assert!(model.expert(1, 5).unwrap().up.stored == StoredType::INT8);
}

#[test]
fn a_promised_mtp_layer_that_is_absent_is_not_counted() {
    let mut checkpoint = Checkpoint::glm(Form::Bf16);
    let without = opened(written(&checkpoint).path()).0;
    assert_eq!(without.n_mtp_layers_present, 0);
    checkpoint.config["num_nextn_predict_layers"] = json!(1);
    let (model, warnings) = opened(written(&checkpoint).path());
    assert_eq!(model.n_mtp_layers_present, 0);
    assert!(warnings.contains("declares 1 multi-token-prediction layer"), "{warnings}");
    assert!(warnings.contains("the shards hold 0"), "{warnings}");
    assert_eq!(model.tensors, without.tensors);
}

#[test]
fn an_mtp_layer_that_nobody_promised_is_counted_and_kept_apart() {
    let mut checkpoint = Checkpoint::glm(Form::INT8);
    checkpoint.add_mtp_layer(Form::INT8);
    let (model, warnings) = opened(written(&checkpoint).path());
    assert_eq!((model.n_mtp_layers_present, model.experts.len()), (1, 3 * 6));
    assert!(warnings.contains("declares 0") && warnings.contains("hold 1"), "{warnings}");
    let mtp: Vec<Role> =
        model.tensors.iter().map(|t| t.role).filter(|r| model.is_mtp(*r)).collect();
    assert!(mtp.contains(&Role::Layer { layer: 3, tensor: LayerTensor::MtpInput }));
    // It is on disk and in no resident set and no routed bytes.
    assert_eq!(model.layer_experts(3).len(), 6);
    assert_eq!(model.routed_bytes().0, 12 * model.experts[0].read_bytes());
    let resident = tierkeep_plans::budget::resident_tensors(
        &model,
        tierkeep_plans::budget::EmbeddingResidency::Resident,
    );
    assert_eq!(resident.count(), model.tensors.len() - mtp.len());
    checkpoint.config["num_nextn_predict_layers"] = json!(1);
    assert_eq!(opened(written(&checkpoint).path()).1, "");
}

#[test]
fn an_incomplete_mtp_layer_is_not_counted() {
    let mut checkpoint = Checkpoint::glm(Form::INT8);
    checkpoint.config["num_nextn_predict_layers"] = json!(1);
    checkpoint.add_mtp_layer(Form::INT8);
    for name in [
        "model.layers.3.eh_proj.weight",
        "model.layers.3.eh_proj.weight.qs",
        "model.layers.3.mlp.experts.4.up_proj.weight",
        "model.layers.3.mlp.experts.4.up_proj.weight.qs",
        "model.layers.3.enorm.weight",
    ] {
        let mut checkpoint = checkpoint.clone();
        checkpoint.remove(name);
        let (model, warnings) = opened(written(&checkpoint).path());
        assert_eq!((model.n_mtp_layers_present, model.experts.len()), (0, 12), "{name}");
        assert!(warnings.contains("declares 1") && warnings.contains("hold 0"), "{warnings}");
        assert!(warnings.contains("have no role"), "{warnings}");
    }
}

#[test]
fn a_missing_shard_that_held_only_the_mtp_layer_does_not_stop_the_model() {
    let mut checkpoint = Checkpoint::glm(Form::Bf16);
    checkpoint.config["num_nextn_predict_layers"] = json!(1);
    let dir = tempdir().unwrap();
    write_shard(&dir.path().join("model-00001-of-00002.safetensors"), &checkpoint.tensors);
    checkpoint.write_config(dir.path());
    let (model, warnings) = opened(dir.path());
    assert_eq!(model.n_mtp_layers_present, 0);
    assert!(warnings.contains("model-00002-of-00002.safetensors"), "{warnings}");
}

#[test]
fn stop_tokens_are_the_union_of_both_configs() {
    let dir = written(&Checkpoint::glm(Form::Bf16));
    let generation = dir.path().join("generation_config.json");
    assert_eq!(opened(dir.path()).0.spec.stop_tokens, [3, 4]);
    fs::write(&generation, r#"{"eos_token_id": [9, 4]}"#).unwrap();
    assert_eq!(opened(dir.path()).0.spec.stop_tokens, [3, 4, 9]);
    fs::write(&generation, r#"{"eos_token_id": 7}"#).unwrap();
    assert_eq!(opened(dir.path()).0.spec.stop_tokens, [3, 4, 7]);
    for odd in ["{", "{}", "[]", r#"{"eos_token_id": ["</s>", -1, null]}"#] {
        fs::write(&generation, odd).unwrap();
        assert_eq!(opened(dir.path()).0.spec.stop_tokens, [3, 4], "{odd}");
    }
}

#[test]
fn other_safetensors_beside_the_model_are_not_part_of_it() {
    let checkpoint = Checkpoint::olmoe(Form::Bf16);
    let dir = written(&checkpoint);
    let before = opened(dir.path()).0.fingerprint;
    write_shard(&dir.path().join("oracle.safetensors"), &checkpoint.tensors);
    fs::write(dir.path().join("adapter.safetensors"), "nonsense").unwrap();
    let (model, warnings) = opened(dir.path());
    assert_eq!((model.fingerprint, warnings.as_str(), model.shards.len()), (before, "", 1));
}

/// The largest figures that a config may hold ask for 655 million experts; the first that is absent
/// ends it.
#[test]
fn a_config_of_huge_figures_allocates_nothing() {
    let mut checkpoint = Checkpoint::olmoe(Form::Bf16);
    checkpoint.config["num_experts"] = json!(1_u64 << 40);
    refused(written(&checkpoint).path(), &["num_experts = 1099511627776"]);
    checkpoint.config["num_experts"] = json!(65_535);
    checkpoint.config["num_hidden_layers"] = json!(10_000);
    refused(written(&checkpoint).path(), &["model.layers.0.mlp.gate.weight", "[65535, 16]"]);
    checkpoint.replace("model.layers.0.mlp.gate.weight", "BF16", &[65_535, 16]);
    refused(written(&checkpoint).path(), &["model.layers.1.mlp.gate.weight", "[65535, 16]"]);
}

#[test]
fn experts_split_over_shards_take_one_read_for_each_run() {
    for n_shards in [1, 2, 3, 7] {
        let checkpoint = Checkpoint::olmoe(Form::INT8);
        let dir = tempdir().unwrap();
        checkpoint.write_sharded(dir.path(), n_shards);
        let (model, _) = opened(dir.path());
        let n_reads: usize = model.experts.iter().map(|e| e.extents().len()).sum();
        // Each border of two shards splits at most one expert.
        assert!(n_reads >= model.experts.len());
        assert!(n_reads < model.experts.len() + n_shards, "{n_shards}: {n_reads}");
    }
    // One whose matrices all lie apart.
    let mut checkpoint = Checkpoint::olmoe(Form::Bf16);
    let prefix = "model.layers.1.mlp.experts.2";
    let down = checkpoint.remove(&format!("{prefix}.down_proj.weight"));
    let gate = checkpoint.remove(&format!("{prefix}.gate_proj.weight"));
    checkpoint.tensors.insert(0, down);
    let dir = written(&checkpoint);
    write_shard(&dir.path().join("model-more.safetensors"), &[gate]);
    let (model, _) = opened(dir.path());
    let expert = model.expert(1, 2).unwrap();
    assert_eq!((expert.extents().len(), expert.read_bytes()), (3, 3 * 8 * 16 * 2));
    assert!(expert.extents().windows(2).all(|e| e[0].slab_offset + e[0].bytes <= e[1].slab_offset));
}

#[test]
fn padding_is_neither_counted_nor_warned_of() {
    let mut checkpoint = Checkpoint::olmoe(Form::INT8);
    let before = opened(written(&checkpoint).path()).0;
    for n in 0..3 {
        checkpoint.tensors.insert(n * 9, TestTensor::new(&format!("__pad.{n}"), "U8", &[100]));
    }
    let (model, warnings) = opened(written(&checkpoint).path());
    assert_eq!(warnings, "");
    assert_eq!(model.unrecognised_bytes.0, 0);
    let bytes = |m: &Catalogue| m.tensors.iter().map(|t| t.bytes().0).sum::<u64>();
    assert_eq!((bytes(&model), model.routed_bytes()), (bytes(&before), before.routed_bytes()));
}

#[test]
fn tensors_without_a_role_are_a_warning_and_counted() {
    let mut checkpoint = Checkpoint::olmoe(Form::Bf16);
    let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
    checkpoint.tensors.push(TestTensor::new(name, "F32", &[8]));
    let (model, warnings) = opened(written(&checkpoint).path());
    assert_eq!(model.unrecognised_bytes.0, 32);
    assert!(warnings.contains("1 tensors have no role") && warnings.contains(name), "{warnings}");
}

#[test]
fn the_fingerprint_is_of_contents_and_not_of_places() {
    let checkpoint = Checkpoint::olmoe(Form::Bf16);
    let (one, two) = (written(&checkpoint), written(&checkpoint));
    let fingerprint = opened(one.path()).0.fingerprint;
    assert_eq!(fingerprint, opened(two.path()).0.fingerprint);
    let other = Checkpoint::olmoe(Form::F32);
    assert_ne!(fingerprint, opened(written(&other).path()).0.fingerprint);
}
