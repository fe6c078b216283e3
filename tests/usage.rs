//! The usage history as a user meets it: what runs leave while they go on, killed and interrupted ones
//! too, what `usage` says of it, and what the next plan makes of it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

#[path = "support/binary.rs"]
mod binary;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use binary::{NANO, Ran, command, copy_of, tierkeep};
use serde_json::Value;

/// A run without a tokenizer says each token as a number as soon as it is there.
const RUN: [&str; 9] =
    ["run", "model", "--ram", "60MB", "--ctx", "1024", "--no-measure", "--ids", "1,2,3"];

/// The folder of a test, with a copy of the small model, which has no tokenizer there.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let model = copy_of(NANO, folder.path());
    fs::remove_file(model.join("tokenizer.json")).unwrap();
    folder
}

fn run(folder: &Path, more: &[&str]) -> Ran {
    let ran = tierkeep(folder, &[&RUN[..], &["--ignore-stop"], more].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    ran
}

fn usage(folder: &Path, args: &[&str]) -> Ran {
    tierkeep(folder, &[&["usage"], args].concat())
}

/// What `usage show` says of the model's history.
fn shown(folder: &Path) -> Value {
    let ran = usage(folder, &["show", "model", "--json"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    ran.json()["history"].clone()
}

/// Sessions in the history, and tokens of the newest one.
fn newest(folder: &Path) -> (u64, u64) {
    let history = shown(folder);
    let tokens = history["newest_session_tokens"].as_array().and_then(|all| all.last());
    let n_sessions = history["n_sessions"].as_u64().unwrap_or(0);
    (n_sessions, tokens.and_then(Value::as_f64).unwrap_or(0.0) as u64)
}

fn usage_file(folder: &Path) -> PathBuf {
    folder.join("model/.usage")
}

fn refuses(ran: &Ran, code: i32, parts: &[&str]) {
    assert_eq!(ran.code, code, "{ran:?}");
    for part in parts {
        assert!(ran.err.contains(part), "{part:?} is not said: {ran:?}");
    }
}

/// A run of many tokens under way.
fn start(folder: &Path, more: &[&str]) -> Child {
    command(folder)
        .args(RUN)
        .args(["--ignore-stop", "-n", "1000"])
        .args(more)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for the output to have so many bytes: tokens are being decoded.
fn wait_for(child: &mut Child, bytes: usize) -> Vec<u8> {
    let mut said = vec![0; bytes];
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    said
}

/// Numbers that a run has said in all.
fn tokens_said(child: &mut Child, mut said: Vec<u8>) -> u64 {
    child.stdout.take().unwrap().read_to_end(&mut said).unwrap();
    let said = String::from_utf8(said).unwrap();
    said.split(|c: char| !c.is_ascii_digit()).filter(|number| !number.is_empty()).count() as u64
}

#[test]
fn a_history_is_shown_as_it_is() {
    let folder = folder();
    let folder = folder.path();
    let none = usage(folder, &["show", "model"]);
    assert_eq!(none.code, 0, "{none:?}");
    assert!(none.out.contains("no usage history yet"), "{none:?}");
    assert_eq!(shown(folder), Value::Null);

    run(folder, &["-n", "40"]);
    let bytes = fs::read(usage_file(folder)).unwrap();
    let history = shown(folder);
    // Of 40 tokens the first comes from the prompt; each of the others asks 5 layers for 4 experts.
    assert_eq!(
        (history["tokens"].as_f64(), history["accesses"].as_f64()),
        (Some(39.0), Some(780.0))
    );
    assert_eq!((&history["n_sessions"], &history["sample_tokens"]), (&1.into(), &39.into()));
    assert_eq!(history["layers"].as_array().unwrap().len(), 5);
    let record = &history["runs"][0];
    assert_eq!((&record["decoded_tokens"], &record["context_tokens"]), (&39.into(), &1024.into()));
    assert!(record["speed_error"].is_f64() && record["actual_hit_rate"].is_f64(), "{record}");

    let text = usage(folder, &["show", "model"]);
    for part in [".usage", "version 2", "1 session", "effective", "changed", "measured"] {
        assert!(text.out.contains(part), "{part}: {}", text.out);
    }
    let layer = usage(folder, &["show", "model", "--layer", "3", "--json"]).json();
    let experts = layer["layer"]["experts"].as_array().unwrap();
    let accesses: f64 = experts.iter().map(|e| e["accesses"].as_f64().unwrap()).sum();
    assert_eq!(accesses, 156.0);
    let dense = usage(folder, &["show", "model", "--layer", "0"]);
    refuses(&dense, 2, &["layer 0 has no routed experts"]);
    assert_eq!(fs::read(usage_file(folder)).unwrap(), bytes, "showing changes nothing");
}

/// R6: each is named, and left as it is.
#[test]
fn a_file_that_is_no_history_of_the_model_is_named_and_left() {
    let folder = folder();
    let folder = folder.path();
    run(folder, &["-n", "4"]);
    let good = fs::read_to_string(usage_file(folder)).unwrap();
    let cases = [
        (good[..good.len() / 2].to_owned(), "after its first line where"),
        (good.replacen("[0", "[1", 1), "does not match its checksum"),
        (good.replacen("usage 2", "usage 9", 1), "is of format version 9"),
        ("notes of mine".to_owned(), "does not begin with \"tierkeep-usage\""),
    ];
    for (content, part) in cases {
        fs::write(folder.join("other.usage"), &content).unwrap();
        let ran = usage(folder, &["show", "model", "--usage", "other.usage"]);
        refuses(&ran, 1, &["other.usage", part]);
        let json = usage(folder, &["show", "model", "--usage", "other.usage", "--json"]).json();
        assert_eq!(json["error"]["kind"], "history.unusable", "{json}");
        assert_eq!(fs::read_to_string(folder.join("other.usage")).unwrap(), content);
    }
    // Another model's.
    let other = folder.join("olmoe");
    binary::copy(binary::OLMOE, &other);
    let ran = usage(folder, &["show", "olmoe", "--usage", "model/.usage"]);
    refuses(&ran, 1, &["is the history of another model", "--usage FILE"]);
    let ran = usage(folder, &["reset", "olmoe", "--usage", "model/.usage"]);
    refuses(&ran, 1, &["is the history of another model", "left as it is"]);
    assert_eq!(fs::read_to_string(usage_file(folder)).unwrap(), good);
}

#[test]
fn counts_are_imported_as_one_session_and_come_back() {
    let folder = folder();
    let folder = folder.path();
    // Layer 0 is dense, layer 6 the one of multi-token prediction.
    let counts = "# layer expert count\n1 0 500\n1 31 20\n5 3 7\n0 1 9\n6 2 4\n";
    fs::write(folder.join("counts.txt"), counts).unwrap();
    let dry = usage(folder, &["import", "model", "counts.txt", "--dry-run"]);
    assert_eq!(dry.code, 0, "{dry:?}");
    for part in ["527 accesses of 3 experts in 2 layers", "layer 0: 9", "layer 6: 4", "dry run"] {
        assert!(dry.out.contains(part), "{part}: {}", dry.out);
    }
    assert!(!usage_file(folder).exists());

    let taken = usage(folder, &["import", "model", "counts.txt", "--json"]).json();
    assert_eq!((&taken["taken"]["accesses"], &taken["n_sessions"]), (&527.into(), &1.into()));
    let written = usage(folder, &["show", "model", "--counts"]);
    assert_eq!(written.out, "# layer expert count\n1 0 500\n1 31 20\n5 3 7\n");
    fs::write(folder.join("again.txt"), &written.out).unwrap();
    let mut import = command(folder);
    import.args(["usage", "import", "model", "-", "--usage", "copy.usage"]);
    import.stdin(fs::File::open(folder.join("again.txt")).unwrap());
    let ran = Ran::of(&mut import);
    assert_eq!(ran.code, 0, "{ran:?}");
    let copy = usage(folder, &["show", "model", "--counts", "--usage", "copy.usage"]);
    assert_eq!(copy.out, written.out);

    let before = fs::read(usage_file(folder)).unwrap();
    for (text, parts) in [
        ("1 0 5\n1 32 5\n", ["line 2", "expert 32 does not exist"]),
        ("1 0\n", ["line 1", "found 2 fields"]),
        ("7 0 1\n", ["line 1", "layer 7 does not exist"]),
        ("0 0 1\n", ["no counts in layers that route", "nothing was imported"]),
    ] {
        fs::write(folder.join("bad.txt"), text).unwrap();
        refuses(&usage(folder, &["import", "model", "bad.txt"]), 2, &parts);
    }
    refuses(&usage(folder, &["import", "model", "none.txt"]), 2, &["none.txt"]);
    assert_eq!(fs::read(usage_file(folder)).unwrap(), before);
}

#[test]
fn a_history_is_put_away_and_brought_back() {
    let folder = folder();
    let folder = folder.path();
    let nothing = usage(folder, &["reset", "model", "--json"]).json();
    assert_eq!(nothing["outcome"], "absent");
    fs::write(folder.join("counts.txt"), "1 0 5\n").unwrap();
    usage(folder, &["import", "model", "counts.txt"]);
    let good = fs::read(usage_file(folder)).unwrap();
    let reset = usage(folder, &["reset", "model"]);
    assert_eq!(reset.code, 0, "{reset:?}");
    assert!(
        reset.out.contains(".usage.reset-1") && reset.out.contains("renamed back"),
        "{reset:?}"
    );
    assert_eq!(shown(folder), Value::Null);
    let aside = folder.join("model/.usage.reset-1");
    assert_eq!(fs::read(&aside).unwrap(), good);
    // A damaged one, beside the first.
    fs::write(usage_file(folder), "tierkeep-usage 2 cut").unwrap();
    let reset = usage(folder, &["reset", "model", "--json"]).json();
    assert!(reset["moved_to"].as_str().unwrap().ends_with(".usage.reset-2"), "{reset}");
    fs::rename(&aside, usage_file(folder)).unwrap();
    assert_eq!(newest(folder).0, 1);
    let deleted = usage(folder, &["reset", "model", "--delete", "--json"]).json();
    assert_eq!((&deleted["outcome"], usage_file(folder).exists()), (&"deleted".into(), false));
    // What may be anything is nobody's to move.
    fs::write(folder.join("notes.txt"), "mine").unwrap();
    let ran = usage(folder, &["reset", "model", "--usage", "notes.txt", "--delete"]);
    refuses(&ran, 1, &["notes.txt", "left as it is"]);
    assert_eq!(fs::read_to_string(folder.join("notes.txt")).unwrap(), "mine");
}

/// Twenty moments of a run: whichever it is, the history is readable, and at most the tokens since the
/// last checkpoint are missing.
#[cfg(unix)]
#[test]
fn a_killed_run_loses_at_most_the_last_interval() {
    const EVERY: u64 = 8;
    let folder = folder();
    let folder = folder.path();
    let (mut sessions, mut random) = (0, 0x9e37_79b9_7f4a_7c15u64);
    for moment in 0..20 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let mut child = start(folder, &["--save-every", &EVERY.to_string()]);
        let said = wait_for(&mut child, 1 + (random >> 40) as usize % 250);
        std::thread::sleep(Duration::from_micros(random >> 32 & 0x7fff));
        child.kill().unwrap();
        child.wait().unwrap();
        let said = tokens_said(&mut child, said);
        let (now, saved) = newest(folder);
        let saved = if now > sessions { saved } else { 0 };
        assert!(now <= sessions + 1, "moment {moment}: {now} sessions after {sessions}");
        // The last token that was said has not been decoded on.
        assert!(saved <= said && saved + EVERY + 1 >= said, "moment {moment}: {saved} of {said}");
        assert_eq!(saved % EVERY, 0, "moment {moment}");
        sessions = now;
    }
    assert!(sessions >= 10, "{sessions} of 20 runs came as far as their first checkpoint");
    run(folder, &["-n", "4"]);
    assert_eq!(newest(folder), (sessions + 1, 3));
    let names = fs::read_dir(folder.join("model")).unwrap();
    let left = names.filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().contains("tmp"));
    assert_eq!(left.count(), 0, "temporary files of killed runs are removed");
}

/// Checkpoints and the end are one session, and an interrupted run has all of its tokens.
#[cfg(unix)]
#[test]
fn an_interrupted_run_saves_what_came_since_its_last_checkpoint() {
    let folder = folder();
    let folder = folder.path();
    let mut child = start(folder, &["--save-every", "7"]);
    let said = wait_for(&mut child, 60);
    let id = child.id().to_string();
    let kill = std::process::Command::new("kill").args(["-INT", &id]).status().unwrap();
    assert!(kill.success());
    let said = tokens_said(&mut child, said);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // Its last token has not been decoded on.
    assert_eq!(newest(folder), (1, said - 1));
    assert_eq!(shown(folder)["runs"].as_array().unwrap().len(), 1);
}

/// Two runs at the same time, their checkpoints in between each other: two sessions, every token once.
#[test]
fn two_runs_at_the_same_time_are_two_sessions() {
    let folder = folder();
    let folder = folder.path();
    let mut runs: Vec<Child> = [60, 90]
        .map(|n: u32| {
            let more = ["--ignore-stop", "--save-every", "3", "-n"];
            let mut run = command(folder);
            run.args(RUN).args(more).arg(n.to_string()).stdout(Stdio::null()).stderr(Stdio::null());
            run.spawn().unwrap()
        })
        .into();
    for run in &mut runs {
        assert!(run.wait().unwrap().success());
    }
    let history = shown(folder);
    let mut tokens: Vec<f64> = history["newest_session_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tokens| tokens.as_f64().unwrap())
        .collect();
    tokens.sort_by(f64::total_cmp);
    assert_eq!(tokens, [59.0, 89.0]);
    assert_eq!((&history["n_sessions"], &history["sample_tokens"]), (&2.into(), &148.into()));
    assert_eq!(history["runs"].as_array().unwrap().len(), 2);
}

/// A few tokens of a cold cache say nothing of the plan, and correct nothing.
#[test]
fn a_run_too_short_to_judge_corrects_no_later_plan() {
    let folder = folder();
    let folder = folder.path();
    let calibration = || {
        let args = ["plan", "model", "--ram", "60MB", "--ctx", "1024", "--no-measure", "--json"];
        tierkeep(folder, &args).json()["prediction"]["calibration"].clone()
    };
    run(folder, &["-n", "9"]);
    assert_eq!(calibration(), 1.0);
    assert!(shown(folder)["runs"][0]["actual_tok_per_s"].is_number(), "it is shown all the same");
    run(folder, &["-n", "400"]);
    assert_ne!(calibration(), 1.0, "a long run does");
}

/// A relative data folder would be another one wherever the program is called; the convention ignores it.
#[cfg(target_os = "linux")]
#[test]
fn a_relative_data_folder_is_ignored() {
    let folder = folder();
    let folder = folder.path();
    fs::create_dir_all(folder.join("hub/snapshots")).unwrap();
    fs::rename(folder.join("model"), folder.join("hub/snapshots/model")).unwrap();
    let mut command = command(folder);
    command.env("XDG_DATA_HOME", "data").args(["usage", "show", "hub/snapshots/model", "--json"]);
    let ran = Ran::of(&mut command);
    let file = ran.json()["file"].as_str().unwrap().to_owned();
    assert!(Path::new(&file).starts_with(folder.join(".local/share/tierkeep/usage")), "{ran:?}");
}

/// plan -> run -> killed -> plan: the second plan replays what the killed run had saved.
#[cfg(unix)]
#[test]
fn the_next_plan_uses_what_a_killed_run_had_saved() {
    let folder = folder();
    let folder = folder.path();
    let plan = |out: &str| {
        let args = ["--ram", "28MB", "--ctx", "1024", "--no-measure", "--json", "-o", out];
        let ran = tierkeep(folder, &[&["plan", "model"], &args[..]].concat());
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.json()
    };
    let first = plan("first.toml");
    assert!(first["placement"]["pins_evidence"].as_str().unwrap().contains("no usage history yet"));
    let mut child = command(folder)
        .args(["run", "first.toml", "--ids", "1,2,3", "-n", "1000", "--ignore-stop"])
        .args(["--save-every", "16"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for(&mut child, 600);
    child.kill().unwrap();
    child.wait().unwrap();
    let before = fs::read(usage_file(folder)).unwrap();
    let (_, saved) = newest(folder);
    let second = plan("second.toml");
    let evidence = second["prediction"]["evidence"].to_string();
    // A quarter of the tokens warms the cache of the replay.
    let replayed = format!("replayed: {} tokens of 1 session", saved - saved / 4);
    assert!(evidence.contains(&replayed), "{replayed}: {evidence}");
    assert_eq!(fs::read(usage_file(folder)).unwrap(), before, "planning changes no history");
}

/// A limit on file sizes is as a full disk: said, and nothing is left or lost.
#[cfg(unix)]
#[test]
fn a_limit_on_file_sizes_is_an_error_and_no_death() {
    let folder = folder();
    let folder = folder.path();
    fs::write(folder.join("counts.txt"), "1 0 5\n").unwrap();
    usage(folder, &["import", "model", "counts.txt"]);
    let before = fs::read(usage_file(folder)).unwrap();
    let mut limited = std::process::Command::new("sh");
    // At most 1 KiB, in any shell.
    limited.args(["-c", "ulimit -f 1; exec \"$0\" usage import model counts.txt"]);
    limited.arg(env!("CARGO_BIN_EXE_tierkeep")).current_dir(folder);
    limited.env("HOME", folder).stdin(Stdio::null());
    let ran = Ran::of(&mut limited);
    refuses(&ran, 2, &["cannot write", "File too large"]);
    assert_eq!(fs::read(usage_file(folder)).unwrap(), before);
    let names = fs::read_dir(folder.join("model")).unwrap();
    let left = names.filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().contains("tmp"));
    assert_eq!(left.count(), 0);
}

/// A lock that another process holds: one warning while the run goes on, one at its end, and the
/// answer all the same.
#[test]
fn a_history_that_cannot_be_saved_for_long_is_warned_of_twice() {
    let folder = folder();
    let folder = folder.path();
    let free = run(folder, &["-n", "30"]);
    let before = fs::read(usage_file(folder)).unwrap();
    let lock = fs::File::create(folder.join("model/.usage.lock")).unwrap();
    lock.lock().unwrap();
    let held = run(folder, &["-n", "30", "--save-every", "5"]);
    assert_eq!(held.out, free.out, "the same tokens");
    assert_eq!(held.err.matches("not saved yet, the run goes on").count(), 1, "{held:?}");
    assert_eq!(held.err.matches("the usage history was not saved:").count(), 1, "{held:?}");
    assert!(held.err.contains("locked by another process after 5 s"), "{held:?}");
    assert_eq!(fs::read(usage_file(folder)).unwrap(), before);
    drop(lock);
    run(folder, &["-n", "4"]);
    assert_eq!(newest(folder), (2, 3));
}
