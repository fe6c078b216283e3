//! `inspect` as a user runs it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

fn inspect(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tierkeep"))
        .arg("inspect")
        .args(args)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("COLUMNS", "100")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}

#[test]
fn what_a_model_is_made_of() {
    let (code, out, err) = inspect(&["examples/glm-nano", "--json"]);
    assert_eq!(code, 0, "{err}");
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["schema_version"], 1);
    let inspection = &json["inspection"];
    assert_eq!(inspection["family"], "glm_moe_dsa");
    let bytes = |lines: &Value| -> u64 {
        lines.as_array().unwrap().iter().map(|line| line["bytes"].as_u64().unwrap()).sum()
    };
    let sum = bytes(&inspection["weights"]) + inspection["header_bytes"].as_u64().unwrap();
    assert_eq!(Some(sum), inspection["total_bytes"].as_u64(), "every byte is in one line");
    // 32 experts in each of 5 layers, and of the multi-token-prediction layer.
    let kinds = inspection["experts"].as_array().unwrap();
    let of = |mtp: bool| -> u64 {
        let of_kind = kinds.iter().filter(|kind| kind["is_mtp"] == mtp);
        of_kind.map(|kind| kind["n_experts"].as_u64().unwrap()).sum()
    };
    assert_eq!((of(false), of(true)), (160, 32));
    let (code, out, _) = inspect(&["examples/glm-nano"]);
    assert_eq!(code, 0);
    for part in ["routed experts", "a token touches", "KV cache", "indexer keys", "fingerprint"] {
        assert!(out.contains(part), "{part}: {out}");
    }
    assert!(!out.contains('\u{1b}'), "no colour where there is no terminal");
}

#[test]
fn an_unknown_family_has_sizes_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracles/olmoe");
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let config = folder.path().join("config.json");
    let other = fs::read_to_string(&config).unwrap().replace("\"olmoe\"", "\"of_tomorrow\"");
    fs::write(&config, other).unwrap();
    let path = folder.path().to_str().unwrap();
    let (code, out, err) = inspect(&[path]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("unknown family of_tomorrow: sizes by tensor role only"), "{out}");
    assert!(out.contains("routed experts"), "{out}");
    let (code, ..) = inspect(&[path, "--strict"]);
    assert_eq!(code, 3, "it works, with something to know");
    let (code, out, _) = inspect(&["nowhere", "--json"]);
    assert_eq!(code, 2);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["error"]["kind"], "model.io");
}
