//! The usage file on disk: where it lies, how it is read, and how two writers and a kill at any
//! moment leave a readable one. Owns the lock, the atomic replacement, the setting aside of damaged
//! files and of those that a user no longer wants; the bytes are `format`'s.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::folder;
use super::format::{self, FormatError, MAGIC, MAX_FILE_BYTES};
use super::history::{History, ShapeMismatch};
use super::operations::{Content, Operations, System, write_all};
use super::session::Session;

/// How long a writer waits for another: a save holds the lock for tens of milliseconds.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// The same between two tokens: as long as one other writer takes, and not so long that it shows.
const CHECKPOINT_LOCK_WAIT: Duration = Duration::from_millis(100);

/// Files that may be set aside beside each other before a person should look.
const MAX_SET_ASIDE: u32 = 1000;

/// What was found where the history should be.
#[derive(Debug)]
pub enum LoadOutcome {
    /// No file yet.
    Absent,
    /// The history.
    Loaded(History),
    /// A file that is not used. The caller reports it.
    Unusable {
        /// Why, as a fragment that follows the path: "is of format version 3, ...".
        reason: FormatError,
        /// Where a damaged file has been moved. `None`: it lies where it was, because it is
        /// another model's or version's, no usage file at all, or cannot be moved.
        set_aside: Option<PathBuf>,
    },
}

/// A history and the file that it is in.
#[derive(Debug)]
pub struct Found {
    /// The history.
    pub history: History,
    /// The version of the file's format.
    pub version: u32,
    /// The size of the file.
    pub bytes: u64,
}

/// What [`save`] did.
#[derive(Debug)]
pub struct Saved {
    /// What the file now holds.
    pub history: History,
    /// Where a file lies that turned out to be damaged: its history is not part of `history`.
    pub set_aside: Option<PathBuf>,
}

/// What [`reset`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reset {
    /// There was no history.
    Absent,
    /// It lies here now.
    MovedTo(PathBuf),
    /// It is gone.
    Deleted,
}

/// Why a session was not saved, or a history not reset. What was at the path is still there, whole.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// Another process keeps the lock.
    #[error("{lock}: still locked by another process after {waited_s} s; end it, or name another file with --usage FILE", lock = lock.display())]
    Locked {
        /// The lock file.
        lock: PathBuf,
        /// How long was waited.
        waited_s: f64,
    },
    /// A file that must not be replaced.
    #[error("{path}: {reason}; it was left as it is, name another file with --usage FILE", path = path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why it is not this model's history.
        reason: FormatError,
    },
    /// The operating system refused.
    #[error("{path}: cannot {action}: {source}; a file elsewhere can be named with --usage FILE", path = path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The session's shape is not the file's although the fingerprint is.
    #[error("{path}: {source}; it was left as it is, name another file with --usage FILE", path = path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// Both fingerprints.
        source: ShapeMismatch,
    },
    /// The history could not be written as bytes.
    #[error("{path}: {source}", path = path.display())]
    Render {
        /// The file.
        path: PathBuf,
        /// Why.
        source: FormatError,
    },
}

/// Reads the history of the model with this fingerprint. Never fails: whatever is wrong with the
/// file is an outcome, and a damaged file is moved aside to `<name>.damaged-N`.
#[must_use]
pub fn load(path: &Path, fingerprint: &str) -> LoadOutcome {
    load_with(&System, path, fingerprint)
}

pub(super) fn load_with(
    operations: &dyn Operations,
    path: &Path,
    fingerprint: &str,
) -> LoadOutcome {
    let path = followed(path);
    match read(operations, &path, fingerprint) {
        Ok(None) => LoadOutcome::Absent,
        Ok(Some(history)) => LoadOutcome::Loaded(history),
        Err(reason) if !is_damaged(&path, &reason) => {
            LoadOutcome::Unusable { reason, set_aside: None }
        }
        Err(reason) => {
            // Under the lock and read again: a writer may just have put a good file there.
            let Ok(_lock) = lock(operations, &path, LOCK_WAIT) else {
                return LoadOutcome::Unusable { reason, set_aside: None };
            };
            match read(operations, &path, fingerprint) {
                Ok(Some(history)) => LoadOutcome::Loaded(history),
                // Another process has moved it, and will have said so.
                Ok(None) => LoadOutcome::Unusable { reason, set_aside: None },
                Err(reason) => {
                    let moves = is_damaged(&path, &reason);
                    let aside =
                        moves.then(|| set_aside(operations, &path, "damaged").ok()).flatten();
                    LoadOutcome::Unusable { reason, set_aside: aside }
                }
            }
        }
    }
}

/// Reads the history and leaves whatever is there as it is.
///
/// # Errors
/// Why the file is not used.
pub fn look(path: &Path, fingerprint: &str) -> Result<Option<Found>, FormatError> {
    let Some(content) = content(&System, &followed(path))? else { return Ok(None) };
    let (version, history) = format::parse_any(&content.bytes, fingerprint)?;
    Ok(Some(Found { history, version, bytes: content.file_bytes }))
}

/// Merges a session into the file at `path` and returns what it now holds. Creates the folder and
/// the file where there is none. A session that is saved again replaces what it left before. Safe
/// with other writers: the file is read again under an advisory lock on `<path>.lock`, which stays
/// behind, as removing a lock file is a race.
///
/// The new file is written beside the old one, brought to disk and renamed over it, so that a
/// kill or a power failure leaves one of the two.
///
/// # Errors
/// The lock is held by another for 5 s, the file is not this model's to replace, or the system
/// refuses. The session can be saved again.
pub fn save(path: &Path, session: &mut Session) -> Result<Saved, UsageError> {
    save_with(&System, path, session, LOCK_WAIT)
}

/// The same between two tokens: a lock that another holds is waited for 0.1 s.
///
/// # Errors
/// As of [`save`].
pub fn checkpoint(path: &Path, session: &mut Session) -> Result<Saved, UsageError> {
    save_with(&System, path, session, CHECKPOINT_LOCK_WAIT)
}

pub(super) fn save_with(
    operations: &dyn Operations,
    path: &Path,
    session: &mut Session,
    lock_wait: Duration,
) -> Result<Saved, UsageError> {
    let path = followed(path);
    is_there(&path)?;
    let folder = folder_of(&path);
    operations.create_folder(folder).map_err(io_error("create the folder", folder))?;
    let _lock = lock(operations, &path, lock_wait)?;
    let (found, set_aside) = match read(operations, &path, &session.shape().fingerprint) {
        Ok(found) => (found, None),
        Err(reason) if is_damaged(&path, &reason) => {
            let aside = set_aside(operations, &path, "damaged")
                .map_err(io_error("move the damaged file aside", &path))?;
            (None, Some(aside))
        }
        Err(reason) => return Err(UsageError::Refused { path, reason }),
    };
    let mut history = found.unwrap_or_else(|| History::new(session.shape().clone()));
    let part = history
        .take_in(session)
        .map_err(|source| UsageError::Shape { path: path.clone(), source })?;
    let bytes = format::render(&history)
        .map_err(|source| UsageError::Render { path: path.clone(), source })?;
    replace(operations, &path, &bytes)?;
    session.set_saved(history.id, part.id, part.origin);
    Ok(Saved { history, set_aside })
}

/// Puts a history out of the way, to the first free `<name>.reset-N`, or deletes it. One that is
/// damaged or of another version too; a file that is no history, or another model's, is left.
///
/// # Errors
/// As of [`save`].
pub fn reset(path: &Path, fingerprint: &str, delete: bool) -> Result<Reset, UsageError> {
    let operations = &System;
    let path = followed(path);
    // Without a folder there is nothing, and a lock would have to make one.
    if !is_there(&path)? {
        return Ok(Reset::Absent);
    }
    let _lock = lock(operations, &path, LOCK_WAIT)?;
    match read(operations, &path, fingerprint) {
        Ok(None) => return Ok(Reset::Absent),
        Ok(Some(_)) | Err(FormatError::Version { .. }) => {}
        Err(reason) if is_damaged(&path, &reason) => {}
        Err(reason) => return Err(UsageError::Refused { path, reason }),
    }
    if delete {
        operations.remove(&path).map_err(io_error("delete", &path))?;
        let _ = operations.sync_folder(folder_of(&path));
        return Ok(Reset::Deleted);
    }
    let aside =
        set_aside(operations, &path, "reset").map_err(io_error("move the history aside", &path))?;
    let _ = operations.sync_folder(folder_of(&path));
    Ok(Reset::MovedTo(aside))
}

/// Where a model's history lies when the user names no file: `.usage` in the model's folder, or,
/// where that cannot be written or is a hub cache (whose folders are other programs' to clean up),
/// `tierkeep/usage/<fingerprint>.usage` in the user's data folder. Without a data folder it is the
/// model's folder in any case, and [`save`] will say what is wrong with it.
#[must_use]
pub fn default_path(model_dir: &Path, data_dir: Option<&Path>, fingerprint: &str) -> PathBuf {
    let beside = model_dir.join(".usage");
    let Some(data_dir) = data_dir else { return beside };
    if folder::takes_files(model_dir) {
        return beside;
    }
    let safe = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    let name: String = fingerprint.chars().map(safe).collect();
    data_dir.join("tierkeep").join("usage").join(format!("{name}.usage"))
}

/// Whether there is a file, asked before a lock is put beside it: next to a device, a pipe or a folder
/// that `--usage` was pointed at by mistake nothing is to appear.
fn is_there(path: &Path) -> Result<bool, UsageError> {
    let refused = |reason| UsageError::Refused { path: path.to_owned(), reason };
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(true),
        Ok(_) => Err(refused(FormatError::NotAFile)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(refused(error.into())),
    }
}

/// `None`: there is no file.
fn read(
    operations: &dyn Operations,
    path: &Path,
    fingerprint: &str,
) -> Result<Option<History>, FormatError> {
    content(operations, path)?.map(|content| format::parse(&content.bytes, fingerprint)).transpose()
}

/// The bytes of a file that is not too large. `None`: there is no file.
fn content(operations: &dyn Operations, path: &Path) -> Result<Option<Content>, FormatError> {
    let content = match operations.read(path, MAX_FILE_BYTES + 1) {
        Ok(Some(content)) => content,
        Ok(None) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            return Err(FormatError::NotAFile);
        }
        Err(error) => return Err(error.into()),
    };
    if content.bytes.len() as u64 > MAX_FILE_BYTES {
        // What is too large to be checked is told apart by its first bytes alone.
        return Err(if content.bytes.starts_with(MAGIC.as_bytes()) {
            FormatError::TooLarge { found: content.file_bytes, limit: MAX_FILE_BYTES }
        } else {
            FormatError::NotUsage
        });
    }
    Ok(Some(content))
}

/// Whether a file with this defect is a damaged history, to be moved out of the way. A file that
/// neither begins nor is named like one may be anything that `--usage` was pointed at by mistake,
/// and stays.
fn is_damaged(path: &Path, reason: &FormatError) -> bool {
    match reason {
        FormatError::TooLarge { .. }
        | FormatError::Header
        | FormatError::Length { .. }
        | FormatError::Checksum
        | FormatError::Body(_)
        | FormatError::Inconsistent { .. } => true,
        FormatError::NotUsage => {
            path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(".usage"))
        }
        FormatError::Read(_)
        | FormatError::NotAFile
        | FormatError::Version { .. }
        | FormatError::OtherModel { .. } => false,
    }
}

/// Moves a file to the first free `<name>.<why>-N`. The lock must be held.
fn set_aside(operations: &dyn Operations, path: &Path, why: &str) -> io::Result<PathBuf> {
    for n in 1..=MAX_SET_ASIDE {
        let aside = with_suffix(path, &format!(".{why}-{n}"));
        // Creating the name reserves it, so that the rename can only replace our own empty file.
        match operations.reserve(&aside) {
            Ok(()) => {
                return match operations.rename(path, &aside) {
                    Ok(()) => Ok(aside),
                    Err(error) => {
                        let _ = operations.remove(&aside);
                        Err(error)
                    }
                };
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other(format!("there are {MAX_SET_ASIDE} such files beside it already")))
}

/// Holds the lock until dropped; the system drops it for a killed process.
pub(super) fn lock(
    operations: &dyn Operations,
    path: &Path,
    wait: Duration,
) -> Result<File, UsageError> {
    let lock = with_suffix(path, ".lock");
    let file = operations.open_lock(&lock).map_err(io_error("open", &lock))?;
    let start = Instant::now();
    loop {
        match operations.try_lock(&file) {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if start.elapsed() < wait => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(UsageError::Locked { lock, waited_s: wait.as_secs_f64() });
            }
            Err(TryLockError::Error(source)) => {
                return Err(UsageError::Io { action: "lock", path: lock, source });
            }
        }
    }
}

/// Replaces the file by these bytes, or leaves it as it is. The lock must be held.
fn replace(operations: &dyn Operations, path: &Path, bytes: &[u8]) -> Result<(), UsageError> {
    remove_stale_temporaries(operations, path);
    let temporary = with_suffix(path, &format!(".tmp-{}", std::process::id()));
    let written = operations
        .create(&temporary)
        .and_then(|mut file| {
            write_all(operations, &mut file, bytes)?;
            operations.sync(&file)
        })
        .map_err(io_error("write", &temporary))
        .and_then(|()| operations.rename(&temporary, path).map_err(io_error("replace", path)));
    if written.is_err() {
        let _ = operations.remove(&temporary);
        return written;
    }
    // The rename is done whether or not the folder can be synced (some file systems refuse), and
    // either file that a power failure may leave is whole: not an error.
    let _ = operations.sync_folder(folder_of(path));
    Ok(())
}

/// Removes what killed writers left: while we hold the lock no other writer has one in use.
fn remove_stale_temporaries(operations: &dyn Operations, path: &Path) {
    let Some(name) = path.file_name() else { return };
    let prefix = format!("{}.tmp-", name.to_string_lossy());
    let Ok(names) = operations.list(folder_of(path)) else { return };
    for name in names {
        let pid = name.to_str().and_then(|name| name.strip_prefix(&prefix));
        if pid.is_some_and(|pid| !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit())) {
            let _ = operations.remove(&folder_of(path).join(&name));
        }
    }
}

/// The file that a link names, so that the file is replaced and not the link, and one file has one
/// lock.
fn followed(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> UsageError {
    let path = path.to_owned();
    move |source| UsageError::Io { action, path, source }
}
