//! `tierkeep run` as a user runs it: what is refused before anything is loaded, with the command that
//! plans again; prompts from everywhere; the report in a file; why a run ended.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

#[path = "support/binary.rs"]
mod binary;

use std::fs;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use binary::{NANO, OLMOE, Ran, command, copy_of, tierkeep};
use serde_json::Value;

/// A plan of a copy of glm-nano in `folder`, with further options; its text.
fn planned(folder: &Path, options: &[&str]) -> String {
    copy_of(NANO, folder);
    let base = ["plan", "model", "--ram", "26MB", "--no-measure", "-o", "plan.toml"];
    let ran = tierkeep(folder, &[&base[..], options].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    fs::read_to_string(folder.join("plan.toml")).unwrap()
}

/// Expects a refusal under `--json`: its code and kind, the same message for people, and nothing loaded.
fn refusal(folder: &Path, args: &[&str], (code, kind): (i32, &str)) -> Value {
    let ran = tierkeep(folder, &[args, &["--json"]].concat());
    assert_eq!(ran.code, code, "{args:?}: {ran:?}");
    let error = ran.json()["error"].clone();
    assert_eq!(error["kind"], kind, "{error}");
    assert!(ran.err.contains(error["message"].as_str().unwrap()), "{ran:?}");
    assert!(!folder.join("model/.usage").exists(), "{args:?} has run something");
    error
}

/// Runs a command as a user copies it from a message.
#[cfg(unix)]
fn pasted(folder: &Path, text: &str) -> Ran {
    let program = Path::new(env!("CARGO_BIN_EXE_tierkeep")).parent().unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", program.display());
    let mut shell = Command::new("sh");
    shell.args(["-c", text]).env("PATH", path).env("HOME", folder).current_dir(folder);
    Ran::of(&mut shell)
}

#[cfg(unix)]
#[test]
fn a_refused_plan_is_mended_by_the_command_that_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let plan = planned(folder, &["--ctx", "64"]);
    let run = ["run", "plan.toml", "-p", "What is 2+2?", "-n", "8", "--no-usage"];
    let isa = plan.lines().find(|line| line.starts_with("isa = ")).unwrap();
    // On a processor that can do all that there is, no plan can ask for more.
    if isa != "isa = \"avx512\"" {
        fs::write(folder.join("plan.toml"), plan.replace(isa, "isa = \"avx512\"")).unwrap();
        let error = refusal(folder, &run, (1, "engine.isa"));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("avx512") && message.contains("the best here is"), "{message}");
        let again = error["command"].as_str().unwrap();
        assert!(again.contains("--ram 26MB --ctx 64") && again.ends_with("-o plan.toml"));
        let ran = pasted(folder, &format!("{again} --no-measure"));
        assert_eq!(ran.code, 0, "{again}: {ran:?}");
    }
    let ran = tierkeep(folder, &run);
    assert_eq!((ran.code, ran.out.as_str()), (0, "2 + 2 = 4.\n"), "{ran:?}");

    // The prompt is longer than what was planned.
    let prompt = "What is 2+2? What is 3+3? ".repeat(9);
    let long = [&run[..2], &["-p", prompt.as_str()]].concat();
    let error = refusal(folder, &long, (1, "engine.context_full"));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("the plan has 64"), "{message}");
    let ran = pasted(folder, &format!("{} --no-measure", error["command"].as_str().unwrap()));
    assert_eq!(ran.code, 0, "{ran:?}");
    let ran = tierkeep(folder, &[&long[..], &["-n", "4", "--no-usage"]].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
}

#[test]
fn what_cannot_be_run_is_refused_before_anything_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let plan = planned(folder, &["--ctx", "64"]);
    let run = |args: &[&'static str]| [&["run", "plan.toml"], args].concat();
    refusal(folder, &run(&["--ids", "1,99999"]), (2, "engine.unknown_token"));
    refusal(folder, &run(&["--raw", "-p", ""]), (2, "engine.empty"));
    refusal(folder, &run(&["--ids", "@nowhere"]), (2, "io"));
    fs::write(folder.join("ids"), "1, 2\n3 x").unwrap();
    let error = refusal(folder, &run(&["--ids", "@ids"]), (2, "other"));
    assert!(error["message"].as_str().unwrap().contains("ids: \"x\", the token id number 4"));
    let fingerprint = plan.lines().find(|line| line.starts_with("fingerprint = ")).unwrap();
    fs::write(folder.join("plan.toml"), plan.replace(fingerprint, "fingerprint = \"00\"")).unwrap();
    let error = refusal(folder, &run(&["-p", "x"]), (1, "plan.other_model"));
    assert!(error["command"].as_str().unwrap().contains("--ram 26MB --ctx 64"), "{error}");
    fs::write(folder.join("plan.toml"), plan).unwrap();
    let args =
        ["plan", "model", "--ram", "60MB", "--sessions", "2", "--no-measure", "-o", "s.toml"];
    assert_eq!(tierkeep(folder, &args).code, 0);
    let error = refusal(folder, &["run", "s.toml", "-p", "x"], (1, "engine.lacking"));
    assert!(error["command"].as_str().unwrap().contains("--sessions 1"), "{error}");
}

#[test]
fn more_threads_than_the_process_may_run_are_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let facts = tierkeep(folder, &["doctor", "--no-measure", "--json"]).json();
    let Some(usable) = facts["facts"]["cpu"]["usable_threads"]["value"].as_u64() else { return };
    let threads = (usable + 1).to_string();
    planned(folder, &["--ctx", "64", "--threads", &threads]);
    let run = ["run", "plan.toml", "--ids", "1,2,3", "-n", "2", "--strict", "--no-usage"];
    let ran = tierkeep(folder, &run);
    assert_eq!(ran.code, 3, "{ran:?}");
    assert!(ran.err.contains(&format!("the plan has {threads} threads")), "{ran:?}");
    assert!(ran.err.contains(&format!("--threads {usable} -o plan.toml")), "{ran:?}");
}

#[test]
fn token_ids_come_from_a_list_a_file_or_standard_input() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(OLMOE, folder);
    fs::write(folder.join("ids"), "177 223,\n187\n").unwrap();
    let run = ["run", "model", "--ram", "100MB", "--no-measure", "--no-usage", "-n", "3", "--ids"];
    let expected = tierkeep(folder, &[&run[..], &["177,223,187"]].concat());
    assert_eq!((expected.code, expected.out.trim().split(',').count()), (0, 3), "{expected:?}");
    assert_eq!(tierkeep(folder, &[&run[..], &["@ids"]].concat()).out, expected.out);
    let mut child = command(folder);
    child.args(run).arg("-").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"177,223 187").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected.out);
}

#[test]
fn a_report_that_cannot_be_written_is_said_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder, &["--ctx", "64"]);
    let run = ["run", "plan.toml", "-p", "What is 2+2?", "--report"];
    for (path, reason) in [("none/report.json", "No such file"), ("model", "is a directory")] {
        let ran = tierkeep(folder, &[&run[..], &[path]].concat());
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{ran:?}");
        assert!(ran.err.contains(path) && ran.err.contains(reason), "{ran:?}");
        assert!(!folder.join("model/.usage").exists());
    }
    let empty = tierkeep(folder, &["run", "plan.toml", "--ids", "@"]);
    assert_eq!(empty.code, 2, "{empty:?}");
    assert!(empty.err.contains("the name of a file"), "{empty:?}");
}

/// What can only be seen when it happens costs the file, and not the result.
#[cfg(target_os = "linux")]
#[test]
fn a_report_that_was_not_written_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder, &["--ctx", "64"]);
    let run = ["run", "plan.toml", "-p", "What is 2+2?", "--no-usage", "--report", "/dev/full"];
    let ran = tierkeep(folder, &run);
    assert_eq!((ran.code, ran.out.as_str()), (2, "2 + 2 = 4.\n"), "{ran:?}");
    assert!(ran.err.contains("the report was not written to /dev/full"), "{ran:?}");
    assert!(ran.err.contains("the model said that it is done"), "{ran:?}");
    let ran = tierkeep(folder, &[&run[..], &["--json"]].concat());
    assert_eq!((ran.code, &ran.json()["text"]), (2, &"2 + 2 = 4.".into()), "{ran:?}");
}

#[test]
fn a_full_context_is_said_and_the_report_goes_to_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder, &["--ctx", "64"]);
    let run = ["run", "plan.toml", "--raw", "-p", "Call me Ishmael.", "-n", "200", "--no-usage"];
    let extra = ["--report", "report.json", "--layers", "--ignore-stop"];
    let ran = tierkeep(folder, &[&run[..], &extra].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.err.contains("the planned context of 64 tokens is full"), "{ran:?}");
    assert!(ran.err.contains("layer  hit rate"), "{ran:?}");
    let json: Value =
        serde_json::from_slice(&fs::read(folder.join("report.json")).unwrap()).unwrap();
    let report = &json["report"];
    assert_eq!((&json["schema_version"], &report["ended"]), (&3.into(), &"context_full".into()));
    assert_eq!(json["text"].as_str().unwrap(), ran.out.trim_end_matches('\n'));
    // The last token is not run: the context holds the prompt and all the others.
    let tokens = report["tokens"].as_array().unwrap().len() as u64;
    assert_eq!(report["prefill"]["tokens"].as_u64().unwrap() + tokens - 1, 64);
    assert_eq!(report["footprint"]["verdict"], "as_predicted");
}

#[test]
fn a_plan_made_for_one_run_can_be_kept() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(NANO, folder);
    let run = ["run", "model", "--ram", "26MB", "--ctx", "128", "--batch", "7", "--no-measure"];
    let ran = tierkeep(folder, &[&run[..], &["-p", "What is 2+2?"]].concat());
    assert_eq!((ran.code, ran.out.as_str()), (0, "2 + 2 = 4.\n"), "{ran:?}");
    let line = ran.err.lines().find(|line| line.starts_with("to keep this plan: ")).unwrap();
    assert!(line.contains("--ram 26MB --ctx 128 --batch 7 -o plan.toml"), "{line}");
}

/// A reader that goes away, such as `head`, ends the run without a word, and what was learnt is kept.
#[cfg(unix)]
#[test]
fn a_closed_output_ends_quietly_and_saves_the_history() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder, &["--ctx", "512"]);
    let mut child = command(folder);
    child.args(["run", "plan.toml", "--raw", "-p", "Call me Ishmael.", "-n", "400"]);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0; 20]).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    assert_eq!(output.status.code(), Some(2));
    assert!(folder.join("model/.usage").is_file());
}
