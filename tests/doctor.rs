//! `tierkeep doctor` as a user runs it: what it says of damaged models, which exit code it gives, what
//! its options do, and that its documents know every check.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

#[path = "support/binary.rs"]
mod binary;

use std::fs;
use std::path::Path;

use binary::{NANO, OLMOE, Ran, command, copy_of, root};
use serde_json::Value;
use tierkeep_plans::catalogue::header::{DType, read_header};

/// Runs `doctor` in `folder` without measuring.
fn doctor(folder: &Path, args: &[&str]) -> Ran {
    let mut command = command(folder);
    Ran::of(command.env("COLUMNS", "120").args(["doctor", "--no-measure"]).args(args))
}

/// A check of a report by its id.
fn check(report: &Value, id: &str) -> Value {
    let all = report["checks"].as_array().unwrap();
    let found: Vec<&Value> = all.iter().filter(|check| check["id"] == id).collect();
    let [check] = found[..] else { panic!("{id} is there {} times: {report}", found.len()) };
    check.clone()
}

/// Runs `doctor model` with `args`, expects an exit code and of one check its status and parts of what
/// it says. Returns the report.
fn expect(
    folder: &Path,
    args: &[&str],
    code: i32,
    id: &str,
    status: &str,
    parts: &[&str],
) -> Value {
    let ran = doctor(folder, &[&["model", "--json"], args].concat());
    let report = ran.json();
    let check = check(&report, id);
    let said = format!("{} {} {}", check["finding"], check["remedy"], check["details"]);
    for part in parts {
        assert!(said.contains(part), "{id} does not say {part:?}: {said}");
    }
    assert_eq!(check["status"], status, "{said}");
    assert_eq!(ran.code, code, "{report}");
    report
}

/// Ids of the checks that came out as `status`.
fn ids(report: &Value, status: &str) -> Vec<String> {
    let all = report["checks"].as_array().unwrap().iter();
    let of_status = all.filter(|check| check["status"] == status);
    of_status.map(|check| check["id"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn f1_a_damaged_shard_fails_by_name_and_nothing_else_does() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = copy_of(OLMOE, folder);
    let short = model.join("model-00003-of-00004.safetensors");
    let bytes = fs::read(&short).unwrap();
    fs::write(&short, &bytes[..bytes.len() - 4096]).unwrap();
    fs::remove_file(model.join("model-00002-of-00004.safetensors")).unwrap();
    let expected = format!("{}", bytes.len());
    let parts = [
        "model-00002-of-00004.safetensors is missing",
        "model-00003-of-00004.safetensors",
        &expected,
        "2 others are whole",
    ];
    let report = expect(folder, &[], 1, "model.shards", "fail", &parts);
    assert_eq!(ids(&report, "fail"), ["model.shards"]);
    assert_eq!(check(&report, "model.budget")["status"], "skip");
}

#[test]
fn f6_a_tokenizer_that_is_none_is_found_by_using_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = copy_of(NANO, folder);
    let whole = fs::read_to_string(model.join("tokenizer.json")).unwrap();
    let report = expect(folder, &[], 0, "model.tokenizer", "ok", &["4096 tokens", "without loss"]);
    assert_eq!(ids(&report, "fail"), [] as [&str; 0]);
    assert_eq!(check(&report, "model.chat_template")["status"], "ok");
    assert_eq!(check(&report, "model.vocabulary")["status"], "ok");
    for broken in ["{}", "", "[1,2]"] {
        fs::write(model.join("tokenizer.json"), broken).unwrap();
        let parts = ["tokenizer.json is not a tokenizer", "--ids"];
        let report = expect(folder, &[], 0, "model.tokenizer", "warn", &parts);
        assert_eq!(check(&report, "model.chat_template")["status"], "skip");
    }
    expect(folder, &["--strict"], 3, "model.tokenizer", "warn", &[]);
    fs::remove_file(model.join("tokenizer.json")).unwrap();
    expect(folder, &[], 0, "model.tokenizer", "warn", &["is missing", "fetch tokenizer.json"]);
    fs::write(model.join("tokenizer.json"), whole).unwrap();
    // A tokenizer of another model makes ids that have no row.
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    let other = config.replace("\"vocab_size\": 4096", "\"vocab_size\": 4000");
    assert_ne!(other, config);
    fs::write(model.join("config.json"), other).unwrap();
    expect(folder, &[], 1, "model.vocabulary", "fail", &["ids up to 4095", "4000 rows"]);
}

#[test]
fn f6_a_chat_template_is_found_by_rendering_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = copy_of(NANO, folder);
    let jinja = model.join("chat_template.jinja");
    for (template, parts) in [
        ("{% for m in messages %}{{ m.content }", &["line 1", "--raw"][..]),
        ("{{ raise_exception('only with tools') }}", &["only with tools"]),
        ("hello", &["without what was said"]),
    ] {
        fs::write(&jinja, template).unwrap();
        expect(folder, &[], 0, "model.chat_template", "warn", parts);
    }
    fs::remove_file(&jinja).unwrap();
    fs::write(model.join("tokenizer_config.json"), "{}").unwrap();
    expect(folder, &[], 0, "model.chat_template", "warn", &["there is none"]);
    fs::write(model.join("tokenizer_config.json"), "{").unwrap();
    let report = expect(folder, &[], 0, "model.chat_template", "warn", &["tokenizer_config.json"]);
    assert_eq!(check(&report, "model.tokenizer")["status"], "skip");
}

#[test]
fn f6_stop_tokens_are_those_of_both_configs() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = copy_of(NANO, folder);
    fs::write(model.join("generation_config.json"), r#"{"eos_token_id": [0, 5]}"#).unwrap();
    let parts = ["0, 5 (config.json: 0; generation_config.json: 0, 5)"];
    expect(folder, &[], 0, "model.stop_tokens", "ok", &parts);
}

#[test]
fn deep_reads_every_byte_and_looks_at_every_value() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = copy_of(OLMOE, folder);
    let report = expect(folder, &["--deep"], 0, "model.read", "ok", &["4 files", "measured"]);
    assert_eq!(check(&report, "model.values")["status"], "ok");
    // Without --deep nothing is read and nothing is said of it.
    let shallow = doctor(folder, &["model", "--json"]).json();
    assert!(!ids(&shallow, "ok").contains(&"model.read".to_owned()));
    // The last weight of a shard becomes a NaN: bf16 or f32, all bits set is one.
    let shard = model.join("model-00004-of-00004.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let end = bytes.len();
    bytes[end - 4..].fill(0xff);
    fs::write(&shard, bytes).unwrap();
    let parts = ["1 tensor with values that are not finite", "model-00004-of-00004.safetensors"];
    let report = expect(folder, &["--deep"], 0, "model.values", "warn", &parts);
    assert_eq!(check(&report, "model.read")["status"], "ok");
    // A damaged model is read as far as it is there.
    fs::remove_file(model.join("model-00001-of-00004.safetensors")).unwrap();
    expect(folder, &["--deep"], 1, "model.read", "ok", &["3 files"]);
}

/// One byte of a narrow type makes its weight, or a run of 32 of them, no number.
#[test]
fn deep_finds_codes_that_are_no_numbers_in_fp8_and_mxfp4() {
    for (family, ending, dtype) in [
        ("glm_moe_dsa-fp8", "o_proj.weight", DType::F8E4M3),
        ("gpt_oss-mxfp4", "gate_up_proj_scales", DType::U8),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let model = copy_of(&format!("tests/oracles/{family}"), folder);
        let report = expect(folder, &["--deep"], 0, "model.values", "ok", &["all finite"]);
        assert_eq!(check(&report, "model.read")["status"], "ok", "{family}");
        let mut shards = fs::read_dir(&model).unwrap().map(|entry| entry.unwrap().path());
        let (shard, name, at) = shards
            .find_map(|path| {
                let header = read_header(&path).ok()?;
                let mut tensors = header.tensors();
                let tensor = tensors.find(|t| t.name.ends_with(ending) && t.dtype == dtype)?;
                let at = header.data_start + tensor.start;
                Some((path, tensor.name.to_owned(), at as usize))
            })
            .unwrap();
        let mut bytes = fs::read(&shard).unwrap();
        bytes[at] = 0xff;
        fs::write(&shard, bytes).unwrap();
        let parts = ["1 tensor with values that are not finite", &name];
        expect(folder, &["--deep"], 0, "model.values", "warn", &parts);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_file_of_holes_is_taken_for_an_unfinished_download() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = copy_of(NANO, folder);
    let shard = model.join("model-00001-of-00001.safetensors");
    let file = fs::OpenOptions::new().write(true).open(&shard).unwrap();
    let bytes = file.metadata().unwrap().len();
    file.set_len(8 << 20).unwrap();
    file.set_len(bytes).unwrap();
    drop(file);
    let parts = ["model-00001-of-00001.safetensors has", "holes", "unfinished download"];
    let report = expect(folder, &["--deep"], 0, "model.holes", "warn", &parts);
    let values = check(&report, "model.values");
    assert!(values["finding"].as_str().unwrap().contains("nothing but zeros"), "{values}");
    assert!(check(&report, "model.read")["finding"].as_str().unwrap().contains("holes left out"));
}

#[test]
fn save_writes_facts_that_can_be_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let ran = doctor(folder, &["--save", "machine.toml", "--json"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let saved = tierkeep_doctor::Facts::read(&folder.join("machine.toml")).unwrap();
    let json: tierkeep_doctor::Facts = serde_json::from_value(ran.json()["facts"].clone()).unwrap();
    assert_eq!(saved, json);
    let ran = doctor(folder, &["--save", "no/such/folder/machine.toml"]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.err.contains("machine.toml"), "{ran:?}");
}

#[test]
fn what_is_no_model_is_no_verdict() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::create_dir(folder.join("empty")).unwrap();
    for (model, part) in [("empty", "has no config.json"), ("nowhere", "nowhere")] {
        let ran = doctor(folder, &[model]);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(part), "{ran:?}");
    }
    let ran = doctor(folder, &["--deep"]);
    assert_eq!(ran.code, 2, "--deep is about a model: {ran:?}");
}

#[test]
fn text_has_every_check_with_its_remedy_under_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = copy_of(OLMOE, folder);
    fs::remove_file(model.join("model-00002-of-00004.safetensors")).unwrap();
    let ran = doctor(folder, &["model"]);
    assert_eq!(ran.code, 1);
    let report = doctor(folder, &["model", "--json"]).json();
    for check in report["checks"].as_array().unwrap() {
        assert!(ran.out.contains(check["id"].as_str().unwrap()), "{check}");
    }
    let lines: Vec<&str> = ran.out.lines().collect();
    let at = lines.iter().position(|line| line.starts_with("  FAIL  model.shards")).unwrap();
    let remedy = lines[at..].iter().find(|line| line.trim_start().starts_with("-> ")).unwrap();
    assert!(remedy.contains("fetch it again; 3 others are whole"), "{remedy}");
    assert!(ran.out.contains("1 FAIL"), "{}", ran.out);
    assert!(!ran.out.contains("next: tierkeep plan"), "no plan of a model that is not whole");
}

#[test]
fn the_document_knows_every_check() {
    let document = fs::read_to_string(root().join("docs/doctor.md")).unwrap();
    for id in tierkeep_plans::checks::IDS {
        assert!(document.contains(&format!("`{id}`")), "docs/doctor.md does not explain {id}");
    }
    let named = document.split('`').filter(|word| {
        word.starts_with("machine.") || word.starts_with("model.") && !word.contains("safetensors")
    });
    for id in named {
        assert!(tierkeep_plans::checks::IDS.contains(&id), "docs/doctor.md explains {id}");
    }
}
