//! F1-F6: what is said of models that are damaged, incomplete or odd, of checkpoints made here.
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
use tempfile::tempdir;
use tierkeep_plans::catalogue::{self, Catalogue, Folder, Group, Packed, PackedBits, ScaleType};
use tierkeep_plans::checks::{self, Check, Status};

/// Every check of the model in a folder, whole or not.
fn checked(directory: &Path) -> Vec<Check> {
    let source = Folder::new(directory);
    let stop_tokens = catalogue::stop_tokens(&source);
    match Catalogue::open_from(&source) {
        Ok(model) => checks::whole_model_checks(&model, &stop_tokens, None),
        Err(error) => {
            let survey = catalogue::survey(&source);
            checks::damaged_model_checks(&error, &survey, &stop_tokens)
        }
    }
}

fn find<'a>(checks: &'a [Check], id: &str) -> &'a Check {
    let found: Vec<&Check> = checks.iter().filter(|check| check.id == id).collect();
    let [check] = found[..] else { panic!("{id} is there {} times: {checks:#?}", found.len()) };
    check
}

/// The check of an id, which must say all of `parts` in its finding, details or remedy.
fn says<'a>(checks: &'a [Check], id: &str, status: Status, parts: &[&str]) -> &'a Check {
    let check = find(checks, id);
    let said = format!("{}\n{}\n{}", check.finding, check.details.join("\n"), check.remedy);
    for part in parts {
        assert!(said.contains(part), "{id} does not say {part:?}: {said}");
    }
    assert_eq!(check.status, status, "{said}");
    check
}

/// The ids that failed.
fn failed(checks: &[Check]) -> Vec<&str> {
    checks.iter().filter(|check| check.status == Status::Fail).map(|check| check.id).collect()
}

#[test]
fn a_whole_model_has_nothing_wrong() {
    for form in [Form::Bf16, Form::INT8] {
        let dir = tempdir().unwrap();
        Checkpoint::olmoe(form).write_sharded(dir.path(), 4);
        let checks = checked(dir.path());
        assert_eq!(checks::worst(&checks), Status::Ok, "{checks:#?}");
        says(&checks, "model.shards", Status::Ok, &["4 files"]);
        says(&checks, "model.family", Status::Ok, &["olmoe", "2 of 6 experts"]);
        let mut sorted = checks.clone();
        checks::sort(&mut sorted);
        assert_eq!(sorted, checks, "in the order of the table");
    }
}

#[test]
fn f1_a_missing_and_a_short_shard_are_named_and_nothing_else_is_blamed() {
    let dir = tempdir().unwrap();
    let paths = Checkpoint::glm(Form::F32).write_sharded(dir.path(), 4);
    let mut index = read_index(dir.path());
    let data: usize = Checkpoint::glm(Form::F32).tensors.iter().map(|t| t.bytes.len()).sum();
    index["metadata"] = json!({ "total_size": data });
    write_index(dir.path(), &index);
    let lost = fs::metadata(&paths[1]).unwrap().len();
    fs::remove_file(&paths[1]).unwrap();
    let whole = fs::read(&paths[2]).unwrap();
    fs::write(&paths[2], &whole[..whole.len() - 4096]).unwrap();

    let checks = checked(dir.path());
    assert_eq!(failed(&checks), ["model.shards"], "{checks:#?}");
    let short = format!(
        "model-00003-of-00004.safetensors is {} bytes long, its header accounts for {}",
        whole.len() - 4096,
        whole.len()
    );
    let parts = [
        "model-00002-of-00004.safetensors is missing (named by model.safetensors.index.json)",
        &short,
        "of tensors are in what is missing",
        "fetch them again; 2 others are whole",
    ];
    let shards = says(&checks, "model.shards", Status::Fail, &parts);
    assert!(!shards.finding.contains("00001-of"), "{shards:?}");
    assert!(lost > 0);
    // A header that was cut off further down is still a valid one: what it holds is not missing.
    says(&checks, "model.headers", Status::Ok, &["2 headers valid"]);
    says(&checks, "model.tensors", Status::Skip, &["in the files named above"]);
    says(&checks, "model.config", Status::Ok, &["3 layers"]);
    says(&checks, "model.stop_tokens", Status::Ok, &["3, 4"]);
    for id in ["model.types", "model.mtp", "model.index", "model.container"] {
        says(&checks, id, Status::Skip, &["the failures come first"]);
    }
}

/// Of a model of 144 files of which most are missing, all are listed, and a few in the finding.
#[test]
fn f1_every_damaged_shard_is_listed() {
    let dir = tempdir().unwrap();
    let paths = Checkpoint::olmoe(Form::Bf16).write_sharded(dir.path(), 8);
    for path in &paths[2..7] {
        fs::remove_file(path).unwrap();
    }
    let checks = checked(dir.path());
    let shards = says(&checks, "model.shards", Status::Fail, &["5 of 8 files", "and 2 more"]);
    assert_eq!(shards.details.len(), 5);
    for n in 3..=7 {
        let name = format!("model-0000{n}-of-00008.safetensors is missing");
        assert!(shards.details.iter().any(|detail| detail.contains(&name)), "{shards:?}");
    }
    assert_eq!(failed(&checks), ["model.shards"]);
}

#[test]
fn f1_without_weights_the_weights_are_asked_for() {
    let dir = tempdir().unwrap();
    Checkpoint::olmoe(Form::Bf16).write_config(dir.path());
    let checks = checked(dir.path());
    says(&checks, "model.shards", Status::Fail, &["no model*.safetensors", "fetch the weights"]);
    says(&checks, "model.config", Status::Ok, &["2 layers"]);
}

#[test]
fn f2_mtp_layers_are_counted_by_what_is_present() {
    let mut checkpoint = Checkpoint::glm(Form::INT8);
    let dir = tempdir().unwrap();
    checkpoint.write(dir.path());
    says(&checked(dir.path()), "model.mtp", Status::Ok, &["none"]);
    checkpoint.config["num_nextn_predict_layers"] = json!(1);
    checkpoint.write(dir.path());
    let parts = ["declares 1 multi-token-prediction layer", "hold 0"];
    let checks = checked(dir.path());
    says(&checks, "model.mtp", Status::Warn, &parts);
    assert_eq!(failed(&checks), [] as [&str; 0]);

    let before: usize = checkpoint.tensors.iter().map(|t| t.bytes.len()).sum();
    checkpoint.add_mtp_layer(Form::INT8);
    let bytes = checkpoint.tensors.iter().map(|t| t.bytes.len()).sum::<usize>() - before;
    checkpoint.write(dir.path());
    let size = tierkeep_plans::units::Bytes(bytes as u64).to_string();
    says(&checked(dir.path()), "model.mtp", Status::Ok, &["1 multi-token-prediction layer", &size]);
    checkpoint.config["num_nextn_predict_layers"] = json!(0);
    checkpoint.write(dir.path());
    says(&checked(dir.path()), "model.mtp", Status::Warn, &["declares 0", "hold 1", &size]);
}

#[test]
fn f3_sizes_come_from_bytes_whatever_the_name_says() {
    let outer = tempdir().unwrap();
    let dir = outer.path().join("Model-72B-instruct-int4");
    fs::create_dir(&dir).unwrap();
    Checkpoint::olmoe(Form::INT4).write(&dir);
    let file = fs::metadata(dir.join("model.safetensors")).unwrap().len();
    let size = tierkeep_plans::units::Bytes(file).to_string();
    says(&checked(&dir), "model.shards", Status::Ok, &["1 file", &size]);
}

/// The headers of every kind of lie, each in a file of its own; all of them are named.
#[test]
fn f4_every_lie_of_a_header_names_file_and_tensor() {
    let dir = tempdir().unwrap();
    Checkpoint::olmoe(Form::Bf16).write(dir.path());
    let tensor = |rest: &str| format!("{{\"t\":{{\"dtype\":\"U8\",{rest}}}}}");
    let two = |first: &str, second: &str| {
        format!(
            "{{\"a\":{{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":{first}}},\
             \"b\":{{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":{second}}}}}"
        )
    };
    let twice = two("[0,4]", "[4,8]").replace("\"b\"", "\"a\"");
    let lies: [(&str, String, u64, &str, &str); 9] = [
        ("model-a", "not json".to_owned(), 0, "model.headers", "not valid"),
        ("model-b", two("[0,4]", "[2,6]"), 6, "model.headers", "b starts at 2, expected 4"),
        ("model-c", two("[0,4]", "[5,9]"), 9, "model.headers", "b starts at 5, expected 4"),
        ("model-d", tensor("\"shape\":[8],\"data_offsets\":[0,4]"), 4, "model.headers", "tensor t"),
        ("model-e", twice, 8, "model.headers", "tensor a twice"),
        (
            "model-f",
            tensor("\"shape\":[0],\"data_offsets\":[0,0]"),
            0,
            "model.headers",
            "tensor t has no",
        ),
        (
            "model-g",
            tensor("\"shape\":[4],\"data_offsets\":[8,4]"),
            4,
            "model.headers",
            "before its start",
        ),
        ("model-h", tensor("\"shape\":[4],\"data_offsets\":[0,4]"), 2, "model.shards", "cut off"),
        (
            "model-i",
            tensor("\"shape\":[4],\"data_offsets\":[0,4]").replace("\"t\"", "\"u\""),
            9,
            "model.shards",
            "bytes follow",
        ),
    ];
    for (name, json, data_bytes, ..) in &lies {
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(json.as_bytes());
        file.extend(vec![0; *data_bytes as usize]);
        fs::write(dir.path().join(format!("{name}.safetensors")), file).unwrap();
    }
    let huge = (1_u64 << 60).to_le_bytes();
    fs::write(dir.path().join("model-j.safetensors"), huge).unwrap();
    fs::write(dir.path().join("model-k.safetensors"), 1000_u64.to_le_bytes()).unwrap();
    fs::write(dir.path().join("model-l.safetensors"), [1, 2, 3]).unwrap();
    let checks = checked(dir.path());
    for (name, _, _, id, expect) in &lies {
        let check = find(&checks, id);
        let named = |detail: &&String| detail.contains(name) && detail.contains(expect);
        assert!(check.details.iter().any(|detail| named(&detail)), "{name} {expect}: {check:#?}");
    }
    says(
        &checks,
        "model.headers",
        Status::Fail,
        &["8 of 13 headers", "model-j", "1152921504606846976"],
    );
    says(
        &checks,
        "model.shards",
        Status::Fail,
        &["model-k", "only 8 bytes", "model-l", "too short"],
    );
    says(&checks, "model.tensors", Status::Ok, &["every tensor"]);
}

#[test]
fn f5_an_index_that_differs_is_a_warning() {
    let dir = tempdir().unwrap();
    Checkpoint::olmoe(Form::INT8).write_sharded(dir.path(), 2);
    let whole = read_index(dir.path());
    let mut index = whole.clone();
    index["weight_map"].as_object_mut().unwrap().retain(|name, _| !name.ends_with(".qs"));
    write_index(dir.path(), &index);
    let checks = checked(dir.path());
    says(&checks, "model.index", Status::Warn, &["lacks", "headers are used"]);
    assert_eq!(failed(&checks), [] as [&str; 0]);

    let mut index = whole;
    index["weight_map"]["visual.weight"] = json!("model-visual.safetensors");
    write_index(dir.path(), &index);
    let checks = checked(dir.path());
    says(&checks, "model.shards", Status::Warn, &["model-visual.safetensors", "in the others"]);
    assert_eq!(failed(&checks), [] as [&str; 0]);

    fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    says(&checked(dir.path()), "model.index", Status::Warn, &["absent"]);
}

#[test]
fn f6_stop_tokens_are_the_union_and_those_beyond_the_vocabulary_are_named() {
    let dir = tempdir().unwrap();
    Checkpoint::glm(Form::Bf16).write(dir.path());
    let generation = dir.path().join("generation_config.json");
    let parts = ["3, 4", "there is no generation_config.json"];
    says(&checked(dir.path()), "model.stop_tokens", Status::Ok, &parts);
    fs::write(&generation, r#"{"eos_token_id": [9, 4]}"#).unwrap();
    let parts = ["3, 4, 9 (config.json: 3, 4; generation_config.json: 9, 4)"];
    says(&checked(dir.path()), "model.stop_tokens", Status::Ok, &parts);
    // The vocabulary has 40 entries.
    fs::write(&generation, r#"{"eos_token_id": [40]}"#).unwrap();
    let parts = ["the vocabulary ends before 40", "from where the weights are from"];
    says(&checked(dir.path()), "model.stop_tokens", Status::Warn, &parts);
    let mut checkpoint = Checkpoint::glm(Form::Bf16);
    checkpoint.config.as_object_mut().unwrap().remove("eos_token_id");
    checkpoint.write(dir.path());
    fs::remove_file(&generation).unwrap();
    says(&checked(dir.path()), "model.stop_tokens", Status::Warn, &["neither", "-n"]);
}

#[test]
fn what_each_layer_lacks_is_said_by_role() {
    let mut checkpoint = Checkpoint::glm(Form::Bf16);
    for expert in [1, 2, 4] {
        for projection in ["gate_proj", "up_proj", "down_proj"] {
            checkpoint.remove(&format!("model.layers.1.mlp.experts.{expert}.{projection}.weight"));
        }
    }
    checkpoint.remove("model.layers.2.self_attn.o_proj.weight");
    checkpoint.remove("model.layers.2.mlp.experts.5.up_proj.weight");
    checkpoint.remove("lm_head.weight");
    let dir = tempdir().unwrap();
    checkpoint.write(dir.path());
    let checks = checked(dir.path());
    let parts = [
        "12 tensors in none of the files",
        "lm_head.weight",
        "layer 1: experts 1-2,4",
        "layer 2: expert 5; self_attn.o_proj.weight",
    ];
    says(&checks, "model.tensors", Status::Fail, &parts);
    assert_eq!(failed(&checks), ["model.tensors"], "{checks:#?}");
}

#[test]
fn a_tensor_in_two_files_names_both() {
    let checkpoint = Checkpoint::olmoe(Form::Bf16);
    let dir = tempdir().unwrap();
    checkpoint.write(dir.path());
    let copies: Vec<TestTensor> = checkpoint.tensors[3..8].to_vec();
    write_shard(&dir.path().join("model-old.safetensors"), &copies);
    let checks = checked(dir.path());
    let name = copies[0].name.as_str();
    let parts = [name, "model-old.safetensors", "model.safetensors", "remove the stale file"];
    let check = says(&checks, "model.tensors", Status::Fail, &parts);
    assert_eq!(check.details.len(), 5, "all of them: {check:?}");
    assert_eq!(failed(&checks), ["model.tensors"]);
}

#[test]
fn a_config_that_cannot_be_used_is_told_from_one_that_is_not_run() {
    let dir = tempdir().unwrap();
    let mut checkpoint = Checkpoint::olmoe(Form::Bf16);
    checkpoint.write(dir.path());
    fs::write(dir.path().join("config.json"), "{\"model_type\": \"ol").unwrap();
    let checks = checked(dir.path());
    assert_eq!(failed(&checks), ["model.config"]);
    says(&checks, "model.shards", Status::Ok, &["1 file"]);
    says(&checks, "model.tensors", Status::Skip, &["without config.json"]);
    checkpoint.config["num_experts"] = json!("many");
    checkpoint.write(dir.path());
    says(&checked(dir.path()), "model.config", Status::Fail, &["num_experts"]);
}

#[test]
fn a_type_that_is_not_computed_on_is_its_own_failure() {
    let mut checkpoint = Checkpoint::olmoe(Form::Bf16);
    checkpoint.replace("model.layers.0.self_attn.q_proj.weight", "F64", &[16, 16]);
    let dir = tempdir().unwrap();
    checkpoint.write(dir.path());
    let checks = checked(dir.path());
    assert_eq!(failed(&checks), ["model.types"], "{checks:#?}");
    says(&checks, "model.types", Status::Fail, &["q_proj", "F64"]);
}

#[test]
fn r7_experts_of_4_bits_with_one_scale_a_row_are_a_warning() {
    let dir = tempdir().unwrap();
    Checkpoint::olmoe(Form::INT4).write(dir.path());
    let parts = ["all 12 routed experts", "4 bits with one scale a row", "48.8", "57.0", "54.0"];
    says(&checked(dir.path()), "model.container", Status::Warn, &parts);
    Checkpoint::olmoe(Form::INT8).write(dir.path());
    says(&checked(dir.path()), "model.container", Status::Ok, &[]);
    // 16 columns are one group of 32, and so a row.
    let grouped = |bits| Packed { bits, group: Group::Of32, scale: ScaleType::F16 };
    Checkpoint::olmoe(Form::Packed(grouped(PackedBits::Four))).write(dir.path());
    says(&checked(dir.path()), "model.container", Status::Warn, &["4 bits with one scale a row"]);
    let mut checkpoint = Checkpoint::olmoe(Form::INT8);
    checkpoint.config["hidden_size"] = json!(64);
    for (bits, status) in [(PackedBits::Four, Status::Ok), (PackedBits::Two, Status::Warn)] {
        let form = Form::Packed(grouped(bits));
        Checkpoint::from_config(checkpoint.config.clone(), form).write(dir.path());
        let parts: &[&str] = if status == Status::Ok { &[] } else { &["all 12", "at 2 bits"] };
        says(&checked(dir.path()), "model.container", status, parts);
    }
}

/// What is packed in a way that does not go together is a failure of its types, with what to do.
#[test]
fn scales_that_fit_no_group_fail_the_types() {
    let mut checkpoint = Checkpoint::olmoe(Form::INT4);
    checkpoint.replace("model.layers.1.mlp.experts.3.up_proj.weight.qs", "F32", &[24]);
    let dir = tempdir().unwrap();
    checkpoint.write(dir.path());
    let parts = ["experts.3.up_proj.weight.qs holds scales of shape [24] for 8 x 16", "[8] (one"];
    says(&checked(dir.path()), "model.types", Status::Fail, &parts);
}

/// A config that promises 655 million experts takes neither the time nor the memory for them.
#[test]
fn a_config_of_huge_figures_is_surveyed_quickly() {
    let mut checkpoint = Checkpoint::olmoe(Form::Bf16);
    checkpoint.config["num_experts"] = json!(65_535);
    checkpoint.config["num_hidden_layers"] = json!(10_000);
    let dir = tempdir().unwrap();
    checkpoint.write(dir.path());
    let survey = catalogue::survey(&Folder::new(dir.path()));
    assert_eq!(survey.missing.len(), 200_000);
    assert_eq!(failed(&checked(dir.path())), ["model.tensors"]);
}
