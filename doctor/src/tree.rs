//! Reading files below a root.
//!
//! Owns the joining of paths to the probe's root, so that recorded `/proc` and `/sys` trees replay.
//! Refuses to follow `..`, which could leave a recorded tree. Errors name the path as the machine
//! calls it, without the root.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use thiserror::Error;

/// Kernel text files are small; `/proc/cpuinfo` of the largest machines is about 8 MiB.
const MAX_FILE_BYTES: u64 = 32 << 20;

/// Folders of devices hold hundreds of names at most.
const MAX_NAMES: usize = 65_536;

/// A file of the tree could not be read.
#[derive(Debug, Error)]
#[error("cannot read {path}: {error}")]
pub(crate) struct ReadError {
    path: String,
    pub(crate) error: io::Error,
}

impl ReadError {
    /// Whether the file merely does not exist.
    pub(crate) fn is_missing(&self) -> bool {
        self.error.kind() == io::ErrorKind::NotFound
    }
}

/// A file tree that paths are looked up in.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// The running system itself.
    pub(crate) fn live() -> Self {
        Self::new(PathBuf::from("/"))
    }

    /// Whether this is the running system, so that system calls may be asked too.
    pub(crate) fn is_live(&self) -> bool {
        self.root == Path::new("/")
    }

    /// Where `path` lies on disk. Components other than plain names are dropped, but for relative
    /// paths of the running system: the kernel's are absolute, so those are the caller's own.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        if self.is_live() && path.as_ref().is_relative() {
            return path.as_ref().to_path_buf();
        }
        let mut joined = self.root.clone();
        for component in path.as_ref().components() {
            if let Component::Normal(name) = component {
                joined.push(name);
            }
        }
        joined
    }

    /// What the machine calls a path that lies on disk below the root.
    pub(crate) fn logical(&self, on_disk: &Path) -> PathBuf {
        let root = self.root.canonicalize().unwrap_or_else(|_| self.root.clone());
        match on_disk.strip_prefix(&root) {
            Ok(rest) => Path::new("/").join(rest),
            Err(_) => on_disk.to_path_buf(),
        }
    }

    pub(crate) fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).exists()
    }

    /// Names of what a folder holds, sorted; names that are not UTF-8 are left out.
    pub(crate) fn list(&self, path: impl AsRef<Path>) -> Result<Vec<String>, ReadError> {
        let path = path.as_ref();
        let read = || {
            if cfg!(not(target_os = "linux")) && self.is_live() {
                return Err(io::Error::new(io::ErrorKind::Unsupported, crate::NOT_SUPPORTED));
            }
            let mut names = Vec::new();
            for entry in std::fs::read_dir(self.path(path))?.take(MAX_NAMES) {
                names.extend(entry?.file_name().into_string());
            }
            names.sort_unstable();
            Ok(names)
        };
        read().map_err(|error| ReadError { path: path.display().to_string(), error })
    }

    /// The text of a file; bytes that are not UTF-8 become replacement characters.
    pub(crate) fn read(&self, path: impl AsRef<Path>) -> Result<String, ReadError> {
        let path = path.as_ref();
        let read = || {
            if cfg!(not(target_os = "linux")) && self.is_live() {
                return Err(io::Error::new(io::ErrorKind::Unsupported, crate::NOT_SUPPORTED));
            }
            let mut bytes = Vec::new();
            File::open(self.path(path))?.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        read().map_err(|error| ReadError { path: path.display().to_string(), error })
    }

    /// The text of a file of one value, without the white space around it.
    pub(crate) fn read_value(&self, path: impl AsRef<Path>) -> Result<String, ReadError> {
        self.read(path).map(|text| text.trim_matches([' ', '\t', '\n', '\r', '\0']).to_owned())
    }
}
