//! The files of a conversion. Owns when a folder may be written to, what each file is called
//! while it is unfinished, and the order in which files get their final names.
//!
//! A marker file is there from the first byte to the last rename. config.json gets its name last,
//! and a folder without it is not a model, so an interrupted conversion can be told from a whole
//! one by any reader and from a user's own folder by the next conversion.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use tierkeep_plans::units::Bytes;

use super::ConvertError;

const MARKER: &str = "tierkeep-convert.partial";
const PARTIAL: &str = ".partial";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
/// Copied where the source has them.
const OPTIONAL_FILES: [&str; 5] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "oracle.json",
];

/// A folder that a conversion may write to.
pub(super) struct OutputDirectory {
    path: PathBuf,
    /// Bytes of all weight files, for the message when the disk is full.
    needed: Bytes,
    /// Held so that its lock is: two conversions in one folder would remove each other's files.
    _marker: File,
}

impl OutputDirectory {
    /// Makes the folder, or clears it of an earlier interrupted conversion.
    pub(super) fn prepare(path: &Path, needed: Bytes) -> Result<Self, ConvertError> {
        fs::create_dir_all(path).map_err(|e| failed(path, "make the folder", needed, e))?;
        let entries = list(path, needed)?;
        let interrupted =
            entries.iter().any(|name| name == MARKER) && !entries.iter().any(|name| name == CONFIG);
        let foreign = entries.iter().find(|name| !interrupted || !is_ours(name));
        if let Some(found) = foreign {
            return Err(ConvertError::OutputNotEmpty {
                directory: path.to_owned(),
                found: found.clone(),
            });
        }
        let marker_path = path.join(MARKER);
        let marker = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&marker_path)
            .map_err(|e| failed(&marker_path, "create", needed, e))?;
        match marker.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(ConvertError::OutputBusy { directory: path.to_owned() });
            }
            // Some network file systems have no locks; the conversion itself needs none.
            Err(TryLockError::Error(_)) => {}
        }
        for name in entries.iter().filter(|name| *name != MARKER) {
            let file = path.join(name);
            fs::remove_file(&file).map_err(|e| failed(&file, "remove", needed, e))?;
        }
        Ok(Self { path: path.to_owned(), needed, _marker: marker })
    }

    /// Copies the small files to their unfinished names.
    pub(super) fn stage_small_files(&self, source: &Path) -> Result<(), ConvertError> {
        for name in OPTIONAL_FILES.into_iter().chain([CONFIG]) {
            let from = source.join(name);
            let bytes = match fs::read(&from) {
                Ok(bytes) => bytes,
                Err(e) if e.kind() == ErrorKind::NotFound && name != CONFIG => continue,
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    return Err(ConvertError::MissingFile { path: from });
                }
                Err(e) => return Err(failed(&from, "read", self.needed, e)),
            };
            self.write_partial(name, &bytes)?;
        }
        Ok(())
    }

    pub(super) fn create_shard(&self, name: &str) -> Result<ShardWriter, ConvertError> {
        let partial = self.partial(name);
        let file =
            File::create(&partial).map_err(|e| failed(&partial, "create", self.needed, e))?;
        Ok(ShardWriter { file, partial, path: self.path.join(name), needed: self.needed })
    }

    pub(super) fn write_index(&self, text: &str) -> Result<(), ConvertError> {
        self.write_partial(INDEX, text.as_bytes())?;
        self.rename(INDEX).map(|_| ())
    }

    /// Gives the small files their names, config.json last; returns their paths.
    pub(super) fn finish(self) -> Result<Vec<PathBuf>, ConvertError> {
        let mut copied = Vec::new();
        for name in OPTIONAL_FILES {
            if self.partial(name).exists() {
                copied.push(self.rename(name)?);
            }
        }
        sync_directory(&self.path);
        copied.push(self.rename(CONFIG)?);
        sync_directory(&self.path);
        let marker = self.path.join(MARKER);
        fs::remove_file(&marker).map_err(|e| failed(&marker, "remove", self.needed, e))?;
        Ok(copied)
    }

    fn partial(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}{PARTIAL}"))
    }

    fn write_partial(&self, name: &str, bytes: &[u8]) -> Result<(), ConvertError> {
        let partial = self.partial(name);
        File::create(&partial)
            .and_then(|mut file| {
                file.write_all(bytes)?;
                file.sync_all()
            })
            .map_err(|e| failed(&partial, "write", self.needed, e))
    }

    fn rename(&self, name: &str) -> Result<PathBuf, ConvertError> {
        let path = self.path.join(name);
        fs::rename(self.partial(name), &path)
            .map_err(|e| failed(&path, "rename to it", self.needed, e))?;
        Ok(path)
    }
}

/// One weight file in work, under its unfinished name.
///
/// Not buffered: it is handed whole chunks, and the few small ones do not matter beside them.
pub(super) struct ShardWriter {
    file: File,
    partial: PathBuf,
    path: PathBuf,
    needed: Bytes,
}

impl ShardWriter {
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), ConvertError> {
        self.file.write_all(bytes).map_err(|e| failed(&self.partial, "write", self.needed, e))
    }

    /// Brings the file to the disk, then gives it its name.
    pub(super) fn finish(self) -> Result<PathBuf, ConvertError> {
        self.file.sync_all().map_err(|e| failed(&self.partial, "write", self.needed, e))?;
        fs::rename(&self.partial, &self.path)
            .map_err(|e| failed(&self.path, "rename to it", self.needed, e))?;
        Ok(self.path)
    }
}

fn failed(path: &Path, doing: &'static str, needed: Bytes, source: io::Error) -> ConvertError {
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            ConvertError::NoSpace { path: path.to_owned(), needed }
        }
        _ => ConvertError::Io { path: path.to_owned(), doing, source },
    }
}

/// Entries of the folder, sorted.
fn list(path: &Path, needed: Bytes) -> Result<Vec<String>, ConvertError> {
    let io = |e| failed(path, "list", needed, e);
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(io)? {
        names.push(entry.map_err(io)?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

/// Whether a conversion writes files of that name.
fn is_ours(name: &str) -> bool {
    let base = name.strip_suffix(PARTIAL).unwrap_or(name);
    name == MARKER || base == INDEX || base == CONFIG || OPTIONAL_FILES.contains(&base) || {
        let numbers = base
            .strip_prefix("model-")
            .and_then(|rest| rest.strip_suffix(".safetensors"))
            .and_then(|rest| rest.split_once("-of-"));
        let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|b| b.is_ascii_digit());
        numbers.is_some_and(|(n, of)| is_number(n) && is_number(of))
    }
}

/// Makes renames durable where the system can; where it cannot, the files themselves still are.
fn sync_directory(path: &Path) {
    if let Ok(directory) = File::open(path) {
        let _ = directory.sync_all();
    }
}
