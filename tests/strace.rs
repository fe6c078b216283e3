//! A writer of the usage history killed by the kernel at each of its system calls, one after the other.
//! Needs strace and some minutes: run it by hand with `cargo test --test strace -- --ignored`.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test stops where something is wrong"
)]

#[path = "support/binary.rs"]
mod binary;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use binary::{NANO, copy_of, tierkeep};

/// Calls that a writer makes, or might.
const CALLS: [&str; 17] = [
    "openat",
    "flock",
    "fcntl",
    "statx",
    "fstat",
    "newfstatat",
    "read",
    "pread64",
    "write",
    "lseek",
    "getdents64",
    "fsync",
    "fdatasync",
    "rename",
    "unlink",
    "mkdir",
    "close",
];

/// Counts of the usage files of `folder`: the history, and what was put aside.
fn counts(folder: &Path) -> String {
    let ran = tierkeep(folder, &["usage", "show", "model", "--counts"]);
    assert_eq!(ran.code, 0, "the history is not readable: {ran:?}");
    ran.out
}

#[test]
#[ignore = "needs strace, and minutes"]
fn a_kill_at_any_system_call_leaves_the_old_history_or_the_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(NANO, folder);
    fs::write(folder.join("first.txt"), "1 0 5\n").unwrap();
    fs::write(folder.join("second.txt"), "2 1 1000000\n").unwrap();
    let file = folder.join("model/.usage");
    let mut n_kills = 0;
    let mut seen = [0, 0];
    for call in CALLS {
        for at in 1.. {
            let _ = fs::remove_file(&file);
            let first = tierkeep(folder, &["usage", "import", "model", "first.txt"]);
            assert_eq!(first.code, 0, "{first:?}");
            let old = counts(folder);
            let status = Command::new("strace")
                .args(["-f", "-o", "/dev/null", "-e", &format!("trace={call}")])
                .args(["-e", &format!("inject={call}:signal=KILL:when={at}")])
                .arg(env!("CARGO_BIN_EXE_tierkeep"))
                .args(["usage", "import", "model", "second.txt"])
                .current_dir(folder)
                .env("XDG_DATA_HOME", folder.join("data"))
                .env("HOME", folder)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .expect("strace");
            let now = counts(folder);
            let is_new = now.contains("2 1 1000000");
            assert!(is_new || now == old, "{call} {at}: {now}");
            if status.success() {
                assert!(is_new, "{call} {at}");
                break;
            }
            n_kills += 1;
            seen[usize::from(is_new)] += 1;
            let again = tierkeep(folder, &["usage", "import", "model", "second.txt"]);
            assert_eq!(again.code, 0, "{call} {at}: {again:?}");
        }
    }
    // Whoever runs it by hand wants to know.
    eprintln!("{n_kills} kills: {} left the old history, {} the new one", seen[0], seen[1]);
    assert!(n_kills > 50 && seen.iter().all(|&n| n > 0), "{n_kills} kills, {seen:?} old and new");
    let left = fs::read_dir(folder.join("model")).unwrap();
    let left: Vec<_> = left.map(|e| e.unwrap().file_name()).collect();
    let is_whole = |name: &std::ffi::OsString| !name.to_string_lossy().contains(".usage.tmp");
    assert!(left.iter().all(is_whole), "{left:?}");
}
