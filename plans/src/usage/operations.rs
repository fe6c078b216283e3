//! What the usage file asks of the file system, one function for each operation, so that tests can
//! fail or kill a writer at every one of them. Owns the operations, not their order.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::Path;

/// The first bytes of a file, and how long it is.
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    pub(super) file_bytes: u64,
}

/// The operations of a reader and a writer.
pub(super) trait Operations {
    /// Creates a folder and those above it, if they are not there.
    fn create_folder(&self, folder: &Path) -> io::Result<()>;
    /// Opens a lock file; creates it if it is not there.
    fn open_lock(&self, lock: &Path) -> io::Result<File>;
    /// Takes the lock, or says at once that another has it.
    fn try_lock(&self, lock: &File) -> Result<(), TryLockError>;
    /// At most `limit` bytes of a file. `None`: there is no such file.
    ///
    /// # Errors
    /// What the system says; [`io::ErrorKind::InvalidInput`] for what is no regular file.
    fn read(&self, path: &Path, limit: u64) -> io::Result<Option<Content>>;
    /// Names in a folder.
    fn list(&self, folder: &Path) -> io::Result<Vec<OsString>>;
    /// Creates a file, or empties the one that is there.
    fn create(&self, path: &Path) -> io::Result<File>;
    /// Creates an empty file where there is none.
    fn reserve(&self, path: &Path) -> io::Result<()>;
    /// Writes some of the bytes; returns how many.
    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<usize>;
    /// Brings a file to disk.
    fn sync(&self, file: &File) -> io::Result<()>;
    /// Renames over what is there.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Brings the names in a folder to disk.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// The operating system's.
pub(super) struct System;

impl Operations for System {
    fn create_folder(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)
    }

    fn open_lock(&self, lock: &Path) -> io::Result<File> {
        OpenOptions::new().create(true).truncate(false).write(true).open(lock)
    }

    fn try_lock(&self, lock: &File) -> Result<(), TryLockError> {
        lock.try_lock()
    }

    fn read(&self, path: &Path, limit: u64) -> io::Result<Option<Content>> {
        let metadata = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata?,
        };
        // Opening a pipe would wait for whoever writes to it.
        if !metadata.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(limit).read_to_end(&mut bytes)?;
        Ok(Some(Content { bytes, file_bytes: metadata.len() }))
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        Ok(fs::read_dir(folder)?.flatten().map(|entry| entry.file_name()).collect())
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        File::create(path)
    }

    fn reserve(&self, path: &Path) -> io::Result<()> {
        OpenOptions::new().write(true).create_new(true).open(path).map(drop)
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<usize> {
        file.write(bytes)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    #[cfg(unix)]
    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        File::open(folder)?.sync_all()
    }

    #[cfg(not(unix))]
    fn sync_folder(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

/// Writes all bytes, however many each write takes.
pub(super) fn write_all(
    operations: &dyn Operations,
    file: &mut File,
    mut bytes: &[u8],
) -> io::Result<()> {
    while !bytes.is_empty() {
        match operations.write(file, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
