//! What bits cost: makes docs/benchmarks/quality.csv, the table that docs/numerics.md shows. Run on request,
//! in a release build:
//!
//!     cargo test --release --test quality -- --ignored --nocapture
//!
//! It converts glm-nano's bf16 weights, which are beside the tree (../shared/models/glm-nano), and the oracles,
//! with every choice of bits, and compares each container with the model it is made from.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops where something is wrong")]

#[path = "support/binary.rs"]
mod binary;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use binary::{root, tierkeep};
use serde_json::Value;
use tempfile::TempDir;

/// Kinds of held-out text of glm-nano, and how many texts of each are compared over: the first ones.
const KINDS: [(&str, usize); 4] =
    [("novel", 5), ("speech", 2), ("arithmetic", 20), ("extract", 15)];
/// Test models of families that run and that bits can be chosen for.
const ORACLES: [&str; 11] = [
    "olmoe",
    "glm_moe_dsa",
    "glm_moe_dsa-shared-indexer",
    "glm_moe_dsa-fp8",
    "deepseek_v3",
    "deepseek_v3-no-q-lora",
    "longcat_flash",
    "longcat_flash-fp8",
    "qwen3_moe",
    "glm4_moe",
    "mixtral",
];
const HEAD: &str = "model,experts,dense,group,scales,bytes,text,positions,mean_kl,kl_standard_error,\
                    kl_p99,agreement,perplexity_reference,perplexity";

/// One choice of what a container is made with.
#[derive(Clone, Copy, Debug)]
struct Choice {
    experts: &'static str,
    dense: &'static str,
    group: &'static str,
    scales: &'static str,
}

/// All bits in groups of 64 with F16 scales; and rows with F32 scales, which is what others write.
fn choices() -> Vec<Choice> {
    let mut choices = Vec::new();
    for dense in ["16", "8", "4"] {
        for experts in ["16", "8", "4", "2"] {
            choices.push(Choice { experts, dense, group: "64", scales: "f16" });
        }
    }
    for experts in ["4", "2"] {
        choices.push(Choice { experts, dense: "8", group: "row", scales: "f32" });
    }
    choices
}

/// A container of a model, and its bytes.
fn container(model: &Path, choice: Choice, folder: &Path) -> (PathBuf, u64) {
    let out = folder.join("out");
    let _ = fs::remove_dir_all(&out);
    let Choice { experts, dense, group, scales } = choice;
    // The embedding and the MTP layers go with the dense weights.
    let args = ["--experts", experts, "--dense", dense, "--embedding", dense, "--mtp", dense];
    let packing = ["--group", group, "--scales", scales];
    let paths = ["convert", model.to_str().unwrap(), out.to_str().unwrap()];
    let ran = tierkeep(folder, &[&paths[..], &args, &packing].concat());
    assert_eq!(ran.code, 0, "{choice:?}: {ran:?}");
    let shards = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap());
    let shards = shards.filter(|e| e.path().extension().is_some_and(|e| e == "safetensors"));
    (out.clone(), shards.map(|e| e.metadata().unwrap().len()).sum())
}

/// Rows of the table for one container: a text a row.
fn rows(table: &mut String, name: &str, (choice, bytes): (Choice, u64), texts: &[(String, Value)]) {
    let Choice { experts, dense, group, scales } = choice;
    for (text, summary) in texts {
        let kl = &summary["kl"];
        let number = |value: &Value| format!("{:.4e}", value.as_f64().unwrap());
        writeln!(
            table,
            "{name},{experts},{dense},{group},{scales},{bytes},{text},{},{},{},{},{:.4},{:.3},{:.3}",
            summary["positions"],
            number(&kl["mean"]),
            number(&kl["standard_error"]),
            number(&kl["p99"]),
            summary["agreement"].as_f64().unwrap(),
            summary["perplexity"][0].as_f64().unwrap(),
            summary["perplexity"][1].as_f64().unwrap(),
        )
        .unwrap();
    }
}

fn compare(folder: &Path, a: &Path, b: &Path, over: &[&str]) -> Value {
    let paths = ["compare", a.to_str().unwrap(), b.to_str().unwrap()];
    let rest = ["--ram", "600MB", "--json"];
    let ran = tierkeep(folder, &[&paths[..], &rest, over].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    ran.json()
}

#[test]
#[ignore = "minutes of work on weights that are not in the tree"]
fn quality_table() {
    let mut table = format!("{HEAD}\n");
    let folder = TempDir::new().unwrap();
    let nano = root().join("../shared/models/glm-nano");
    assert!(nano.is_dir(), "{} is missing", nano.display());
    let files = KINDS.map(|(kind, n)| {
        let texts = fs::read(nano.join(format!("heldout/{kind}.json"))).unwrap();
        let texts: Vec<String> = serde_json::from_slice(&texts).unwrap();
        let file = folder.path().join(format!("{kind}.json"));
        fs::write(&file, serde_json::to_string(&texts[..n]).unwrap()).unwrap();
        file
    });
    for choice in choices() {
        let (out, bytes) = container(&nano, choice, folder.path());
        let mut over = vec!["--ctx", "512", "--text"];
        over.extend(files.iter().map(|file| file.to_str().unwrap()));
        let json = compare(folder.path(), &nano, &out, &over);
        let by_file = json["by_file"].as_array().unwrap();
        let texts =
            KINDS.iter().zip(by_file).map(|((k, _), f)| ((*k).to_owned(), f["summary"].clone()));
        let mut texts: Vec<_> = texts.collect();
        texts.push(("all".to_owned(), json["summary"].clone()));
        rows(&mut table, "glm-nano", (choice, bytes), &texts);
        println!("{choice:?}: novel {}", texts[0].1["kl"]["mean"]);
    }
    let csv = root().join("docs/benchmarks/quality.csv");
    fs::write(&csv, &table).unwrap();
    for family in ORACLES {
        let model = root().join("tests/oracles").join(family);
        let oracle = fs::read(model.join("oracle.json")).unwrap();
        let oracle: Value = serde_json::from_slice(&oracle).unwrap();
        let list = |name: &str| oracle[name].as_array().unwrap().clone();
        let ids = Value::from([list("prompt"), list("greedy")].concat());
        fs::write(folder.path().join("oracle.json"), ids.to_string()).unwrap();
        for choice in choices() {
            let (out, bytes) = container(&model, choice, folder.path());
            let json = compare(folder.path(), &model, &out, &["--ids", "oracle.json"]);
            let texts = [("oracle".to_owned(), json["summary"].clone())];
            rows(&mut table, family, (choice, bytes), &texts);
        }
        fs::write(&csv, &table).unwrap();
    }
}
