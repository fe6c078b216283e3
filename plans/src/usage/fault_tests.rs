//! A writer that fails or is killed at any of its operations: the file is whole, holds everything up to
//! the last completed saving, and the next saving works.
#![allow(clippy::panic, reason = "a test stops where something is wrong")]

use std::cell::Cell;
use std::ffi::OsString;
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::file::save_with;
use super::operations::{Content, Operations, System};
use super::*;
use crate::units::LayerId;

/// What happens at an operation.
#[derive(Clone, Copy)]
enum Fault {
    /// The process dies as by SIGKILL: nothing is unwound, nothing cleaned up.
    Kill,
    /// The system refuses with this number.
    Refused(i32),
}

/// The system, with a fault at one operation, counted from 0, and at all after it if it is lasting.
struct Faulty {
    at: usize,
    fault: Fault,
    is_lasting: bool,
    done: Cell<usize>,
    is_locking: Cell<bool>,
    /// The operation at which it happened first.
    happened: Cell<Option<&'static str>>,
}

impl Faulty {
    fn new(at: usize, fault: Fault, is_lasting: bool) -> Self {
        let (done, is_locking) = (Cell::new(0), Cell::new(false));
        Self { at, fault, is_lasting, done, is_locking, happened: Cell::new(None) }
    }

    fn step(&self, name: &'static str) -> io::Result<()> {
        let now = self.done.replace(self.done.get() + 1);
        if now < self.at || now > self.at && !self.is_lasting {
            return Ok(());
        }
        if self.happened.get().is_none() {
            self.happened.set(Some(name));
        }
        match self.fault {
            Fault::Kill => std::process::abort(),
            Fault::Refused(number) => Err(io::Error::from_raw_os_error(number)),
        }
    }
}

impl Operations for Faulty {
    fn create_folder(&self, folder: &Path) -> io::Result<()> {
        self.step("create the folder")?;
        System.create_folder(folder)
    }

    fn open_lock(&self, lock: &Path) -> io::Result<File> {
        self.step("open the lock")?;
        System.open_lock(lock)
    }

    fn try_lock(&self, lock: &File) -> Result<(), TryLockError> {
        // Other tests start processes, which hold every open file for a moment: waiting for that is no
        // further operation.
        if !self.is_locking.replace(true) {
            self.step("lock").map_err(TryLockError::Error)?;
        }
        System.try_lock(lock)
    }

    fn read(&self, path: &Path, limit: u64) -> io::Result<Option<Content>> {
        self.step("read")?;
        System.read(path, limit)
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        self.step("list")?;
        System.list(folder)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        self.step("create")?;
        System.create(path)
    }

    fn reserve(&self, path: &Path) -> io::Result<()> {
        self.step("reserve")?;
        System.reserve(path)
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<usize> {
        self.step("write")?;
        // Short, so that there are several.
        System.write(file, bytes.get(..400).unwrap_or(bytes))
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        self.step("sync")?;
        System.sync(file)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step("rename")?;
        System.rename(from, to)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.step("sync the folder")?;
        System.sync_folder(folder)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.step("remove")?;
        System.remove(path)
    }
}

fn session(tokens: usize) -> Session {
    let mut session = Session::new("model", &[LayerId(0), LayerId(1)], 8, 2);
    for _ in 0..tokens {
        session.record_token(&[1, 7, 2, 6]);
    }
    session
}

/// Tokens of the newest session in the file.
fn tokens(path: &Path) -> Option<u64> {
    let history = look(path, "model").unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    history.map(|found| found.history.accesses_of_newest_sessions().last().map_or(0, |n| n / 4))
}

const CHILD_PATH: &str = "TIERKEEP_TEST_KILLED_PATH";
const CHILD_AT: &str = "TIERKEEP_TEST_KILLED_AT";

/// What a child does: a checkpoint that completes, then one during which it is killed.
#[test]
#[ignore = "the other process of the test below"]
fn killed_process() {
    let Some(path) = std::env::var_os(CHILD_PATH).map(PathBuf::from) else { return };
    let at: usize = std::env::var(CHILD_AT).unwrap().parse().unwrap();
    let mut session = session(10);
    save(&path, &mut session).unwrap();
    for _ in 0..5 {
        session.record_token(&[1, 7, 2, 6]);
    }
    let operations = Faulty::new(at, Fault::Kill, false);
    save_with(&operations, &path, &mut session, Duration::from_secs(5)).unwrap();
}

/// The child with a file as `prepare` leaves it; whether it ended by itself, and what the file holds.
fn killed_at(at: usize, prepare: impl Fn(&Path)) -> (bool, Option<u64>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".usage");
    prepare(&path);
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "usage::fault_tests::killed_process", "--ignored"])
        .env(CHILD_PATH, &path)
        .env(CHILD_AT, at.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    let held = tokens(&path);
    // The next saving works, and leaves nothing of the killed one.
    save(&path, &mut session(3)).unwrap();
    assert_eq!(tokens(&path), Some(3), "operation {at}");
    let names: Vec<OsString> =
        std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().contains("tmp")), "{names:?}");
    (status.success(), held)
}

/// Killed at each operation: before the rename the file holds the last completed checkpoint, after
/// it the new one, at no moment anything else.
#[test]
fn a_kill_at_any_operation_leaves_the_last_checkpoint_or_the_new_one() {
    let mut held = Vec::new();
    for at in 0.. {
        let (is_whole, tokens) = killed_at(at, |_| {});
        held.push(tokens.unwrap_or_else(|| panic!("operation {at}: the file is gone")));
        if is_whole {
            break;
        }
    }
    // Folder, lock twice, read, list, create, writes, sync, rename, sync of the folder.
    assert!(held.len() > 10, "{held:?}");
    let n_old = held.iter().take_while(|&&tokens| tokens == 10).count();
    assert!(n_old >= 9 && held[n_old..].iter().all(|&tokens| tokens == 15), "{held:?}");
    assert_eq!(held.len() - n_old, 2, "after the rename only the folder is synced: {held:?}");
}

/// A full disk, one that became read-only, and one that fails, at each operation, for one operation
/// and for good.
#[cfg(unix)]
#[test]
fn a_refusal_at_any_operation_is_an_error_and_loses_nothing() {
    const EIO: i32 = 5;
    const ENOSPC: i32 = 28;
    const EROFS: i32 = 30;
    for (number, is_lasting) in
        [EIO, ENOSPC, EROFS].into_iter().flat_map(|n| [(n, false), (n, true)])
    {
        let mut seen = Vec::new();
        for at in 0.. {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join(".usage");
            let mut session = session(10);
            save(&path, &mut session).unwrap();
            session.record_token(&[1, 7, 2, 6]);
            let operations = Faulty::new(at, Fault::Refused(number), is_lasting);
            let wait = Duration::from_secs(5);
            let saved = save_with(&operations, &path, &mut session, wait);
            let Some(name) = operations.happened.get() else {
                saved.unwrap();
                break;
            };
            seen.push(name);
            match saved {
                Ok(_) => assert_eq!(tokens(&path), Some(11), "{name}"),
                Err(error) => {
                    assert_eq!(tokens(&path), Some(10), "{name}");
                    let said = error.to_string();
                    assert!(said.contains(&format!("os error {number}")), "{name}: {said}");
                }
            }
            // The same session, once it works again, is there once.
            session.record_token(&[1, 7, 2, 6]);
            let history = save(&path, &mut session).unwrap().history;
            assert_eq!(history.accesses_of_newest_sessions(), [12 * 4], "{name}");
        }
        for name in ["lock", "read", "create", "write", "sync", "rename", "sync the folder"] {
            assert!(seen.contains(&name), "{name} was never refused: {seen:?}");
        }
    }
}

/// The same while a damaged file is put aside: it is never lost, whichever operation fails.
#[cfg(unix)]
#[test]
fn a_damaged_file_is_never_lost() {
    for at in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".usage");
        std::fs::write(&path, "tierkeep-usage 2 cut off").unwrap();
        let operations = Faulty::new(at, Fault::Refused(28), false);
        let _ = file::load_with(&operations, &path, "model");
        let _ = save_with(&operations, &path, &mut session(1), Duration::from_secs(5));
        let is_there = std::fs::read_dir(folder.path()).unwrap().any(|entry| {
            std::fs::read(entry.unwrap().path()).unwrap() == b"tierkeep-usage 2 cut off"
        });
        assert!(is_there, "operation {at}");
        if operations.happened.get().is_none() {
            break;
        }
    }
}
