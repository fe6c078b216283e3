//! The file among other writers, damaged, foreign, and under kills.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::file::lock;
use super::operations::System;
use super::*;
use crate::units::LayerId;

const LAYERS: [LayerId; 2] = [LayerId(0), LayerId(1)];

fn session(expert: u16) -> Session {
    let mut session = Session::new("model", &LAYERS, 8, 2);
    session.record_token(&[expert, 7, expert, 7]);
    session.set_run(RunRecord { decoded_tokens: Some(1), ..RunRecord::default() });
    session
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn loaded(path: &Path) -> History {
    match load(path, "model") {
        LoadOutcome::Loaded(history) => history,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_saved_is_loaded_and_nothing_else_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new").join(".usage");
    assert!(matches!(load(&path, "model"), LoadOutcome::Absent));
    let saved = save(&path, &mut session(1)).unwrap();
    assert_eq!(loaded(&path), saved.history);
    let saved = save(&path, &mut session(2)).unwrap();
    assert_eq!((saved.history.n_sessions(), saved.set_aside), (2, None));
    assert_eq!(loaded(&path), saved.history);
    assert_eq!(names(path.parent().unwrap()), [".usage", ".usage.lock"]);
}

/// R6: each kind of damage is named, kept aside under a name of its own, and the next save works.
#[test]
fn damaged_files_are_set_aside_and_never_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".usage");
    save(&path, &mut session(1)).unwrap();
    let good = fs::read(&path).unwrap();
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let damaged = [good[..good.len() / 2].to_vec(), flipped, vec![0; 64], Vec::new()];
    for (index, bytes) in damaged.iter().enumerate() {
        fs::write(&path, bytes).unwrap();
        let LoadOutcome::Unusable { set_aside, .. } = load(&path, "model") else {
            panic!("damage {index} was not seen")
        };
        let aside =
            folder.path().canonicalize().unwrap().join(format!(".usage.damaged-{}", index + 1));
        assert_eq!(set_aside, Some(aside.clone()));
        assert_eq!(fs::read(aside).unwrap(), *bytes);
        assert!(matches!(load(&path, "model"), LoadOutcome::Absent));
    }
    fs::write(&path, &damaged[0]).unwrap();
    let saved = save(&path, &mut session(1)).unwrap();
    assert_eq!(saved.history.n_sessions(), 1);
    assert!(saved.set_aside.unwrap().ends_with(".usage.damaged-5"));
    assert_eq!(loaded(&path), saved.history);
}

#[test]
fn files_that_are_not_ours_to_replace_stay_and_saving_names_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".usage");
    save(&path, &mut session(1)).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    let cases = [
        ("newer.usage", text.replacen(" 2 ", " 3 ", 1), "is of format version 3"),
        ("other.usage", text, "is the history of another model"),
        ("notes.txt", "shopping".to_owned(), "does not begin with"),
    ];
    for (name, content, reason) in cases {
        let path = folder.path().join(name);
        fs::write(&path, &content).unwrap();
        let mut session = Session::new("mine", &LAYERS, 8, 2);
        let LoadOutcome::Unusable { reason: found, set_aside: None } = load(&path, "mine") else {
            panic!("{name} was moved or used")
        };
        assert!(found.to_string().starts_with(reason), "{found}");
        let error = save(&path, &mut session).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(reason), "{error}");
        assert!(error.contains("--usage FILE"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), content);
    }
    let LoadOutcome::Unusable { reason, set_aside: None } = load(folder.path(), "model") else {
        panic!("a folder is no history")
    };
    assert_eq!(reason.to_string(), "is not a regular file");
}

/// `--usage /dev/null`, a folder, a circle of links: refused, and no lock appears beside them.
#[cfg(unix)]
#[test]
fn nothing_appears_beside_what_is_no_regular_file() {
    let folder = tempfile::tempdir().unwrap();
    let (inner, circle) = (folder.path().join("folder"), folder.path().join("circle"));
    fs::create_dir(&inner).unwrap();
    std::os::unix::fs::symlink("circle", &circle).unwrap();
    for path in [inner, circle] {
        let error = save(&path, &mut session(1)).unwrap_err();
        assert!(matches!(error, UsageError::Refused { .. }), "{error}");
        let error = reset(&path, "model", false).unwrap_err();
        assert!(matches!(error, UsageError::Refused { .. }), "{error}");
    }
    assert_eq!(names(folder.path()), ["circle", "folder"]);
}

#[test]
fn a_held_lock_is_named_and_waited_for_no_longer_than_said() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".usage");
    let held = lock(&System, &path, Duration::ZERO).unwrap();
    let error = lock(&System, &path, Duration::from_millis(30)).unwrap_err().to_string();
    assert!(error.contains(".usage.lock: still locked by another process after 0.03 s"), "{error}");
    drop(held);
    lock(&System, &path, Duration::ZERO).unwrap();
}

#[cfg(unix)]
#[test]
fn a_linked_file_is_replaced_where_it_lies() {
    let folder = tempfile::tempdir().unwrap();
    let (real, link) = (folder.path().join("real.usage"), folder.path().join("link.usage"));
    save(&real, &mut session(1)).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    save(&link, &mut session(2)).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(loaded(&real).n_sessions(), 2);
}

#[test]
fn temporaries_of_killed_writers_are_removed_and_nothing_like_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".usage");
    for name in [".usage.tmp-123", ".usage.tmp-12x", ".usage.tmp-", "other.tmp-1"] {
        fs::write(folder.path().join(name), "x").unwrap();
    }
    save(&path, &mut session(1)).unwrap();
    assert_eq!(
        names(folder.path()),
        [".usage", ".usage.lock", ".usage.tmp-", ".usage.tmp-12x", "other.tmp-1"]
    );
}

#[test]
fn two_threads_lose_no_session() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".usage");
    std::thread::scope(|scope| {
        for expert in 0..2 {
            let path = &path;
            scope.spawn(move || {
                for _ in 0..20 {
                    save(path, &mut session(expert)).unwrap();
                }
            });
        }
    });
    let history = loaded(&path);
    assert_eq!(history.n_sessions(), 40);
    assert!(history.counts()[0] > 1.0 && history.counts()[1] > 1.0);
    assert_eq!(names(folder.path()), [".usage", ".usage.lock"]);
}

const CHILD_PATH: &str = "TIERKEEP_TEST_USAGE_PATH";
const CHILD_SAVES: &str = "TIERKEEP_TEST_USAGE_SAVES";

/// This test binary again, as another process that saves `n` sessions.
fn spawn_writer(path: &Path, n: u32) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "usage::file_tests::writer_process", "--ignored"])
        .env(CHILD_PATH, path)
        .env(CHILD_SAVES, n.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "the other process of the tests below"]
fn writer_process() {
    let Some(path) = std::env::var_os(CHILD_PATH).map(PathBuf::from) else { return };
    let n: u32 = std::env::var(CHILD_SAVES).unwrap().parse().unwrap();
    for _ in 0..n {
        save(&path, &mut session(3)).unwrap();
    }
}

#[test]
fn two_processes_lose_no_session() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".usage");
    let mut writers = [spawn_writer(&path, 15), spawn_writer(&path, 15)];
    for writer in &mut writers {
        assert!(writer.wait().unwrap().success());
    }
    assert_eq!(loaded(&path).n_sessions(), 30);
}

#[test]
fn a_killed_writer_leaves_a_readable_file_and_no_lock() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".usage");
    let mut n_sessions = save(&path, &mut session(1)).unwrap().history.n_sessions();
    for kill_after_us in (0..12_000).step_by(1000) {
        let mut writer = spawn_writer(&path, 1_000_000);
        // Once it has saved, it is killed at one moment or another of a later save.
        while loaded(&path).n_sessions() == n_sessions {
            assert!(writer.try_wait().unwrap().is_none(), "the writer has ended by itself");
        }
        std::thread::sleep(Duration::from_micros(kill_after_us));
        writer.kill().unwrap();
        writer.wait().unwrap();
        let n_after = loaded(&path).n_sessions();
        assert!(n_after > n_sessions, "no session is lost");
        n_sessions = save(&path, &mut session(2)).unwrap().history.n_sessions();
        assert_eq!(n_sessions, n_after + 1);
    }
    assert_eq!(names(folder.path()), [".usage", ".usage.lock"]);
}

#[test]
fn the_history_lies_beside_the_model_or_in_the_data_folder() {
    let root = tempfile::tempdir().unwrap();
    let make = |name: &str| {
        let folder = root.path().join(name);
        fs::create_dir_all(&folder).unwrap();
        folder
    };
    let data = make("data");
    let in_data = data.join("tierkeep/usage/ab-1_.usage");
    let model = make("models/glm");
    assert_eq!(default_path(&model, Some(&data), "ab-1/"), model.join(".usage"));
    for cached in ["models--zai--GLM/snapshots/1f", "hub/x/snapshots/1f/q4"] {
        let cached = make(cached);
        assert_eq!(default_path(&cached, Some(&data), "ab-1/"), in_data);
        assert_eq!(default_path(&cached, None, "ab-1/"), cached.join(".usage"));
    }
    let snapshots = make("snapshots/hub");
    assert_eq!(default_path(&snapshots, Some(&data), "ab-1/"), snapshots.join(".usage"));
    assert_eq!(default_path(&root.path().join("gone"), Some(&data), "ab-1/"), in_data);
}
