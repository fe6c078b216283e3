//! The usage file on disk: where it lies, how it is read, and how two writers and a kill at any
//! moment leave a readable one. Owns the lock, the atomic replacement and the setting aside of
//! damaged files; the bytes are `format`'s.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::folder;
use super::format::{self, FormatError, MAGIC, MAX_FILE_BYTES};
use super::history::{History, ShapeMismatch};
use super::session::Session;

/// How long a writer waits for another: a save holds the lock for tens of milliseconds.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// Damaged files that may lie beside each other before a person should look.
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
        /// Why, as a fragment that follows the path: "is of format version 2, ...".
        reason: FormatError,
        /// Where a damaged file has been moved. `None`: it lies where it was, because it is
        /// another model's or version's, no usage file at all, or cannot be moved.
        set_aside: Option<PathBuf>,
    },
}

/// What [`save`] did.
#[derive(Debug)]
pub struct Saved {
    /// What the file now holds.
    pub history: History,
    /// Where a file lies that turned out to be damaged: its history is not part of `history`.
    pub set_aside: Option<PathBuf>,
}

/// Why a session was not saved. What was at the path is still there, whole.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// Another process keeps the lock.
    #[error("{lock}: still locked by another process after {waited_s} s; end it, or name another file with --usage FILE", lock = lock.display())]
    Locked {
        /// The lock file.
        lock: PathBuf,
        /// How long was waited.
        waited_s: u64,
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
    let path = followed(path);
    match read(&path, fingerprint) {
        Ok(None) => LoadOutcome::Absent,
        Ok(Some(history)) => LoadOutcome::Loaded(history),
        Err(reason) if !is_set_aside(&path, &reason) => {
            LoadOutcome::Unusable { reason, set_aside: None }
        }
        Err(reason) => {
            // Under the lock and read again: a writer may just have put a good file there.
            let Ok(_lock) = lock(&path, LOCK_WAIT) else {
                return LoadOutcome::Unusable { reason, set_aside: None };
            };
            match read(&path, fingerprint) {
                Ok(Some(history)) => LoadOutcome::Loaded(history),
                // Another process has moved it, and will have said so.
                Ok(None) => LoadOutcome::Unusable { reason, set_aside: None },
                Err(reason) => {
                    let set_aside =
                        if is_set_aside(&path, &reason) { set_aside(&path).ok() } else { None };
                    LoadOutcome::Unusable { reason, set_aside }
                }
            }
        }
    }
}

/// Merges a session into the file at `path` and returns what it now holds. Creates the folder and
/// the file where there is none. Safe with other writers: the file is read again under an
/// advisory lock on `<path>.lock`, which stays behind, as removing a lock file is a race.
///
/// The new file is written beside the old one, brought to disk and renamed over it, so that a
/// kill or a power failure leaves one of the two.
///
/// # Errors
/// The lock is held by another for 5 s, the file is not this model's to replace, or the system
/// refuses.
pub fn save(path: &Path, session: &Session) -> Result<Saved, UsageError> {
    let path = followed(path);
    let folder = folder_of(&path);
    fs::create_dir_all(folder).map_err(io_error("create the folder", folder))?;
    let _lock = lock(&path, LOCK_WAIT)?;
    let (found, set_aside) = match read(&path, &session.shape().fingerprint) {
        Ok(found) => (found, None),
        Err(reason) if is_set_aside(&path, &reason) => {
            let aside = set_aside(&path).map_err(io_error("move the damaged file aside", &path))?;
            (None, Some(aside))
        }
        Err(reason) => return Err(UsageError::Refused { path, reason }),
    };
    let mut history = found.unwrap_or_else(|| History::new(session.shape().clone()));
    history.merge(session).map_err(|source| UsageError::Shape { path: path.clone(), source })?;
    let bytes = format::render(&history)
        .map_err(|source| UsageError::Render { path: path.clone(), source })?;
    replace(&path, &bytes)?;
    Ok(Saved { history, set_aside })
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

/// `None`: there is no file.
fn read(path: &Path, fingerprint: &str) -> Result<Option<History>, FormatError> {
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        metadata => metadata?,
    };
    if !metadata.is_file() {
        return Err(FormatError::NotAFile);
    }
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        // What is too large to be checked is told apart by its first bytes alone.
        return Err(if bytes.starts_with(MAGIC.as_bytes()) {
            FormatError::TooLarge { found: metadata.len(), limit: MAX_FILE_BYTES }
        } else {
            FormatError::NotUsage
        });
    }
    format::parse(&bytes, fingerprint).map(Some)
}

/// Whether a file with this defect is a damaged history, to be moved out of the way. A file that
/// neither begins nor is named like one may be anything that `--usage` was pointed at by mistake,
/// and stays.
fn is_set_aside(path: &Path, reason: &FormatError) -> bool {
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

/// Moves a file to the first free `<name>.damaged-N`. The lock must be held.
fn set_aside(path: &Path) -> io::Result<PathBuf> {
    for n in 1..=MAX_SET_ASIDE {
        let aside = with_suffix(path, &format!(".damaged-{n}"));
        // Creating the name reserves it, so that the rename can only replace our own empty file.
        match OpenOptions::new().write(true).create_new(true).open(&aside) {
            Ok(_) => {
                return match fs::rename(path, &aside) {
                    Ok(()) => Ok(aside),
                    Err(error) => {
                        let _ = fs::remove_file(&aside);
                        Err(error)
                    }
                };
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other(format!("there are {MAX_SET_ASIDE} damaged files beside it already")))
}

/// Holds the lock until dropped; the system drops it for a killed process.
pub(super) fn lock(path: &Path, wait: Duration) -> Result<File, UsageError> {
    let lock = with_suffix(path, ".lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&lock)
        .map_err(io_error("open", &lock))?;
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if start.elapsed() < wait => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(UsageError::Locked { lock, waited_s: wait.as_secs() });
            }
            Err(TryLockError::Error(source)) => {
                return Err(UsageError::Io { action: "lock", path: lock, source });
            }
        }
    }
}

/// Replaces the file by these bytes, or leaves it as it is. The lock must be held.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), UsageError> {
    remove_stale_temporaries(path);
    let temporary = with_suffix(path, &format!(".tmp-{}", std::process::id()));
    let written = File::create(&temporary)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .map_err(io_error("write", &temporary))
        .and_then(|()| fs::rename(&temporary, path).map_err(io_error("replace", path)));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
        return written;
    }
    // The rename is done whether or not the folder can be synced (some file systems refuse), and
    // either file that a power failure may leave is whole: not an error.
    #[cfg(unix)]
    let _ = File::open(folder_of(path)).and_then(|folder| folder.sync_all());
    Ok(())
}

/// Removes what killed writers left: while we hold the lock no other writer has one in use.
fn remove_stale_temporaries(path: &Path) {
    let Some(name) = path.file_name() else { return };
    let prefix = format!("{}.tmp-", name.to_string_lossy());
    let Ok(entries) = fs::read_dir(folder_of(path)) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(&prefix));
        if pid.is_some_and(|pid| !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit())) {
            let _ = fs::remove_file(entry.path());
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
