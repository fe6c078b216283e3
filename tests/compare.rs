//! `compare` as a user meets it: two containers over texts and token files, limits and exit codes, and
//! what it refuses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops where something is wrong")]

#[path = "support/binary.rs"]
mod binary;

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use binary::{NANO, OLMOE, command, copy_of, root, tierkeep};
use tempfile::TempDir;

/// Runs `compare` on committed models or folders, within a small budget.
fn compare(folder: &Path, a: &Path, b: &Path, args: &[&str]) -> binary::Ran {
    let (a, b) = (a.to_str().unwrap(), b.to_str().unwrap());
    let both = ["compare", a, b, "--ram", "400MB", "--threads", "1"];
    tierkeep(folder, &[&both[..], args].concat())
}

/// A container of olmoe with experts of 2 bits, as `packed` in the folder.
fn packed(folder: &Path) -> std::path::PathBuf {
    let out = folder.join("packed");
    let (model, to) = (root().join(OLMOE), out.to_str().unwrap().to_owned());
    let args = ["convert", model.to_str().unwrap(), &to, "--experts", "2", "--group", "32"];
    let ran = tierkeep(folder, &args);
    assert_eq!(ran.code, 0, "{ran:?}");
    out
}

#[test]
fn a_container_and_itself_over_texts_are_equal() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("prose.txt"), "Call me Ishmael. Some years ago").unwrap();
    let list = r#"["What is 2+2?", "Count from 3 to 14."]"#;
    fs::write(folder.path().join("chats.json"), list).unwrap();
    let nano = root().join(NANO);
    let limits = ["--min-agreement", "100%", "--max-kl", "0"];
    let args = [&["--text", "prose.txt", "chats.json"][..], &limits].concat();
    let ran = compare(folder.path(), &nano, &nano, &args);
    assert_eq!(ran.code, 0, "{ran:?}");
    for part in ["prose.txt", "chats.json", "all", "100.00 %", "holds agreement", "holds mean KL"] {
        assert!(ran.out.contains(part), "{part}: {ran:?}");
    }
    let ran = compare(folder.path(), &nano, &nano, &[&args[..], &["--json"]].concat());
    let json = ran.json();
    assert_eq!((json["schema_version"].as_u64(), json["ended"].as_str()), (Some(1), Some("done")));
    let summary = &json["summary"];
    assert_eq!((&summary["kl"]["mean"], &summary["agreement"]), (&0.0.into(), &1.0.into()));
    assert_eq!(summary["perplexity"][0], summary["perplexity"][1]);
    assert_eq!(json["by_file"][1]["texts"], 2);
    let positions = |at: usize| json["by_file"][at]["summary"]["positions"].as_u64().unwrap();
    assert_eq!(positions(0) + positions(1), summary["positions"].as_u64().unwrap());
    let budgets = ["a", "b"].map(|side| json[side]["budget_bytes"].as_u64().unwrap());
    assert!(budgets[0] + budgets[1] <= 400_000_000, "{budgets:?}");
    assert!(!nano.join(".usage.new").exists());
}

#[test]
fn limits_give_a_verdict_and_token_files_need_no_tokenizer() {
    let folder = TempDir::new().unwrap();
    let (olmoe, packed) = (root().join(OLMOE), packed(folder.path()));
    let ids: Vec<String> = (0..48).map(|i| (i * 37 % 320).to_string()).collect();
    fs::write(folder.path().join("tokens.ids"), ids.join(" ")).unwrap();
    fs::write(folder.path().join("tokens.json"), format!("[{}]", ids.join(","))).unwrap();
    let args = ["--ids", "tokens.ids", "--ctx", "16", "--max-kl", "1e-9", "--json"];
    let ran = compare(folder.path(), &olmoe, &packed, &args);
    let json = ran.json();
    assert_eq!((ran.code, &json["limits"]["hold"]), (1, &false.into()), "{ran:?}");
    assert_eq!(json["windows"], serde_json::json!({ "context": 16, "stride": 16 }));
    let summary = &json["summary"];
    assert_eq!((&summary["positions"], &summary["predicted"]), (&48.into(), &47.into()));
    let kl = &summary["kl"];
    let [p50, p95, p99, max] = ["p50", "p95", "p99", "max"].map(|name| kl[name].as_f64().unwrap());
    assert!(0.0 < p50 && p50 <= p95 && p95 <= p99 && p99 <= max, "{kl}");
    // The same tokens from elsewhere.
    let mut child = command(folder.path())
        .args(["compare", olmoe.to_str().unwrap(), packed.to_str().unwrap(), "--ram", "400MB"])
        .args(["--threads", "1", "--ctx", "16", "--ids", "-", "tokens.json", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(ids.join(",").as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let again: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(again["by_file"][0]["name"], "standard input");
    for at in 0..2 {
        assert_eq!(again["by_file"][at]["summary"]["kl"]["mean"], kl["mean"]);
    }
}

/// Two models, options; exit code, what the message says.
type Refused<'a> = (&'a Path, &'a Path, &'a [&'a str], i32, &'a [&'a str]);

#[test]
fn what_cannot_be_compared_is_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let (olmoe, nano) = (root().join(OLMOE), root().join(NANO));
    fs::write(folder.path().join("t.txt"), "a text").unwrap();
    fs::write(folder.path().join("empty.txt"), "").unwrap();
    fs::write(folder.path().join("t.json"), r#"{"text":"a"}"#).unwrap();
    fs::write(folder.path().join("t.ids"), "1 9999").unwrap();
    let other = copy_of(NANO, folder.path());
    let tokenizer = fs::read_to_string(other.join("tokenizer.json")).unwrap();
    let renamed = tokenizer.replacen("<|endoftext|>", "<|endofteXt|>", usize::MAX);
    assert_ne!(renamed, tokenizer);
    fs::write(other.join("tokenizer.json"), renamed).unwrap();
    let cases: [Refused<'_>; 9] = [
        (&olmoe, &nano, &["--ids", "t.ids"], 1, &["not one model", "attention", "more"]),
        (&nano, &other, &["--text", "t.txt"], 1, &["tokenizer: token 0", "<|endofteXt|>"]),
        (&nano, &nano, &["--text", "empty.txt"], 2, &["the text is empty"]),
        (&nano, &nano, &["--text", "t.json"], 2, &["t.json", "a list of strings"]),
        (&nano, &nano, &["--text", "-", "-"], 2, &["standard input can be read once"]),
        (&olmoe, &olmoe, &["--ids", "t.ids"], 2, &["token id 9999", "320"]),
        (&nano, &nano, &["--text", "t.txt", "--stride", "9", "--ctx", "8"], 2, &["1 to 8"]),
        (&nano, &nano, &["--text", "t.txt", "--ctx", "4097"], 2, &["--ctx 4097", "1024"]),
        (&nano, &nano, &["--text", "gone.txt"], 2, &["gone.txt"]),
    ];
    for (a, b, args, code, parts) in cases {
        let ran = compare(folder.path(), a, b, args);
        assert_eq!(ran.code, code, "{args:?}: {ran:?}");
        for part in parts {
            assert!(ran.err.contains(part), "{args:?} does not say {part:?}: {ran:?}");
        }
    }
    let (a, text) = (nano.to_str().unwrap(), ["--text", "t.txt", "--ram", "20MB"]);
    let ran = tierkeep(folder.path(), &[&["compare", a, a][..], &text].concat());
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("both models at once do not fit in 20"), "{ran:?}");
    let ran = tierkeep(folder.path(), &["compare", a, a]);
    assert_eq!(ran.code, 2, "{ran:?}");
}
