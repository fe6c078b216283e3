//! What must end, ends: an interrupt of work that looks for none, and files that are pipes or have no
//! end where a model's or a plan's files should be.
#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

#[path = "support/binary.rs"]
mod binary;

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use binary::{NANO, command, copy};

/// Far longer than any of this takes: a test that gets here would have hung.
const PATIENCE: Duration = Duration::from_secs(120);

fn start(folder: &Path, args: &[&str]) -> Child {
    command(folder).args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The exit code and what was said, once it has ended; killed if it does not.
fn ended(mut child: Child, what: &str) -> (i32, String) {
    let from = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if from.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("{what} does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap_or(-1), String::from_utf8(said).unwrap())
}

fn make_pipe(path: &Path) {
    let _ = fs::remove_file(path);
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

fn copy_of_nano(to: &Path) {
    copy(NANO, to);
}

#[test]
fn an_interrupt_ends_work_that_looks_for_none() {
    let folder = tempfile::tempdir().unwrap();
    for (signal, args) in [("INT", ["--check", "pipe"]), ("TERM", ["model", "--machine"])] {
        let pipe = folder.path().join("pipe");
        make_pipe(&pipe);
        copy_of_nano(&folder.path().join(format!("model-{signal}")));
        let model = format!("model-{signal}");
        let args = match args {
            ["model", machine] => vec!["plan", &model, machine, "pipe"],
            [check, pipe] => vec!["plan", check, pipe],
        };
        let child = start(folder.path(), &args);
        // Opens once the other end is opened: what it reads never comes.
        let held = OpenOptions::new().write(true).open(&pipe).unwrap();
        let id = child.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &id]).status().unwrap().success());
        let (code, said) = ended(child, "an interrupted plan");
        drop(held);
        assert_eq!(code, 130, "{said}");
        assert!(said.contains("interrupted"), "{said}");
    }
}

#[test]
fn a_pipe_in_the_place_of_a_file_of_a_model_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let names = [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00001.safetensors",
        ".tierkeep-index",
    ];
    for (at, name) in names.into_iter().enumerate() {
        let model = format!("model{at}");
        copy_of_nano(&folder.path().join(&model));
        make_pipe(&folder.path().join(&model).join(name));
        for args in [&["inspect", &model][..], &["doctor", "--no-measure", &model]] {
            let (code, said) = ended(start(folder.path(), args), name);
            assert!((0..=2).contains(&code), "{name}, {args:?}: {code}, {said}");
        }
    }
}

#[test]
fn an_endless_file_is_no_plan() {
    let folder = tempfile::tempdir().unwrap();
    for args in [&["plan", "--check", "/dev/zero"][..], &["plan", "--diff", "/dev/zero", "x"]] {
        let (code, said) = ended(start(folder.path(), args), "a plan of zeros");
        assert_eq!(code, 1, "{said}");
        assert!(said.contains("/dev/zero is not a plan"), "{said}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_folder_whose_name_is_no_text_breaks_nothing() {
    use std::os::unix::ffi::OsStrExt;

    let folder = tempfile::tempdir().unwrap();
    let name = std::ffi::OsStr::from_bytes(b"new\nline \xff");
    copy_of_nano(&folder.path().join(name));
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tierkeep"));
        command.args(args).arg(name).current_dir(folder.path()).env("HOME", folder.path());
        command.stdin(Stdio::null()).output().unwrap()
    };
    for args in [&["inspect", "--json"][..], &["doctor", "--no-measure", "--json"]] {
        let ran = run(args);
        assert_eq!(ran.status.code(), Some(0), "{ran:?}");
        serde_json::from_slice::<serde_json::Value>(&ran.stdout).unwrap();
    }
    let ran = run(&["plan", "--no-measure", "-o", "plan.toml"]);
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert_eq!((ran.status.code(), said.contains("another name")), (Some(2), true), "{said}");
}
