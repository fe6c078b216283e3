//! The files of a conversion. Owns when a folder may be written to, what each file is called
//! while it is unfinished, and the order in which files get their final names.
//!
//! The journal is there from the first byte to the last rename. config.json gets its name last,
//! and a folder without it is not a model, so an interrupted conversion can be told from a whole
//! one by any reader and from a user's own folder by the next conversion.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use tierkeep_plans::units::Bytes;

use super::ConvertError;
use super::disk::OutputDisk;
use super::journal::{Begun, Finished, Journal};
use super::manifest::MANIFEST;
use super::report::ErrorSums;
use super::writer::{ShardWriter, hash_file};

/// The journal and lock of a conversion.
pub(super) const MARKER: &str = "tierkeep-convert.partial";
/// Headers of a source that is deleted while it is converted.
pub(super) const HEADERS: &str = "tierkeep-convert.headers.partial";
const PARTIAL: &str = ".partial";
const INDEX: &str = "model.safetensors.index.json";
pub(super) const CONFIG: &str = "config.json";
/// Copied where the source has them.
const OPTIONAL_FILES: [&str; 5] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "oracle.json",
];

/// A folder that a conversion may write to.
pub(super) struct OutputDirectory<'a> {
    path: PathBuf,
    disk: &'a dyn OutputDisk,
    /// Bytes of all weight files, for the message when the disk is full.
    needed: Bytes,
    /// What has been done; two conversions in one folder would remove each other's files, so it is
    /// locked.
    pub(super) journal: Journal,
}

impl<'a> OutputDirectory<'a> {
    /// Makes the folder, or goes on in that of an earlier interrupted conversion; removes what is of no
    /// use in it.
    pub(super) fn prepare(
        path: &Path,
        disk: &'a dyn OutputDisk,
        needed: Bytes,
        begun: Begun,
        restart: bool,
    ) -> Result<Self, ConvertError> {
        fs::create_dir_all(path).map_err(|e| failed(path, "make the folder", needed, e))?;
        let entries = list(path, needed)?;
        let interrupted = entries.iter().any(|name| name == MARKER);
        let foreign = entries.iter().find(|name| !interrupted || !is_ours(name));
        if let Some(found) = foreign {
            return Err(ConvertError::OutputNotEmpty {
                directory: path.to_owned(),
                found: found.clone(),
            });
        }
        let journal = Journal::open(path, needed, begun, restart)?;
        let directory = Self { path: path.to_owned(), disk, needed, journal };
        for name in entries.iter().filter(|name| ![MARKER, HEADERS].contains(&name.as_str())) {
            if !directory.is_of_use(name) {
                let file = path.join(name);
                disk.remove(&file).map_err(|e| failed(&file, "remove", needed, e))?;
            }
        }
        Ok(directory)
    }

    /// Whether a file of an earlier try is a finished one, or one that was about to become it.
    fn is_of_use(&self, name: &str) -> bool {
        let finished = self.journal.of(name.strip_suffix(PARTIAL).unwrap_or(name));
        let found = fs::metadata(self.path.join(name)).map_or(0, |found| found.len());
        finished.is_some_and(|finished| finished.bytes == found)
    }

    /// A file that an earlier try finished, with its name given if that try did not come to it.
    pub(super) fn earlier(&self, name: &str) -> Result<Option<Finished>, ConvertError> {
        let Some(finished) = self.journal.of(name) else { return Ok(None) };
        let has = |path: &Path| fs::metadata(path).is_ok_and(|f| f.len() == finished.bytes);
        if !has(&self.path.join(name)) {
            if !has(&self.partial(name)) {
                return Ok(None);
            }
            self.rename(name)?;
        }
        Ok(Some(finished.clone()))
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
            self.write_small(&self.partial(name), &bytes)?;
        }
        Ok(())
    }

    pub(super) fn create_shard(
        &self,
        name: &str,
        bytes: u64,
    ) -> Result<ShardWriter<'a>, ConvertError> {
        ShardWriter::create(self.disk, self.partial(name), bytes, self.needed)
    }

    /// Notes a file that is on the disk, then gives it its name; returns its path.
    pub(super) fn finish_shard(
        &mut self,
        name: &str,
        (bytes, blake3): (u64, String),
        read_back: bool,
        errors: Vec<ErrorSums>,
    ) -> Result<Finished, ConvertError> {
        let finished = Finished { file: name.to_owned(), bytes, blake3, read_back, errors };
        self.journal.note_finished(finished.clone())?;
        self.rename(name)?;
        sync_directory(&self.path);
        Ok(finished)
    }

    /// Reads a finished file back and compares it with what was written.
    pub(super) fn read_back(&mut self, finished: &Finished) -> Result<(), ConvertError> {
        let path = self.path(&finished.file);
        let hash = self
            .disk
            .open(&path)
            .and_then(|file| hash_file(file.as_ref(), finished.bytes, &mut |_| true))
            .map_err(|e| failed(&path, "read back", self.needed, e))?;
        if hash.is_none_or(|hash| hash.to_hex().as_str() != finished.blake3) {
            return Err(ConvertError::NotAsWritten { path });
        }
        self.journal.note_finished(Finished { read_back: true, ..finished.clone() })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Keeps the headers of the source, on the disk before anything of it is deleted.
    pub(super) fn keep_headers(&self, text: &[u8]) -> Result<(), ConvertError> {
        let path = self.path(HEADERS);
        self.write_small(&path, text)?;
        sync_directory(&self.path);
        Ok(())
    }

    pub(super) fn write_index(&self, text: &str) -> Result<(), ConvertError> {
        self.write_small(&self.partial(INDEX), text.as_bytes())?;
        self.rename(INDEX).map(|_| ())
    }

    pub(super) fn write_manifest(&self, text: &str) -> Result<(), ConvertError> {
        self.write_small(&self.partial(MANIFEST), text.as_bytes())?;
        self.rename(MANIFEST).map(|_| ())
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
        for name in [HEADERS, MARKER] {
            let path = self.path.join(name);
            match self.disk.remove(&path) {
                Err(e) if e.kind() != ErrorKind::NotFound => {
                    return Err(failed(&path, "remove", self.needed, e));
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(copied)
    }

    fn partial(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}{PARTIAL}"))
    }

    fn write_small(&self, path: &Path, bytes: &[u8]) -> Result<(), ConvertError> {
        File::create(path)
            .and_then(|mut file| {
                file.write_all(bytes)?;
                file.sync_all()
            })
            .map_err(|e| failed(path, "write", self.needed, e))
    }

    fn rename(&self, name: &str) -> Result<PathBuf, ConvertError> {
        let path = self.path.join(name);
        self.disk
            .rename(&self.partial(name), &path)
            .map_err(|e| failed(&path, "rename to it", self.needed, e))?;
        Ok(path)
    }
}

pub(super) fn failed(
    path: &Path,
    doing: &'static str,
    needed: Bytes,
    source: io::Error,
) -> ConvertError {
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
    let small = [INDEX, CONFIG, MANIFEST];
    [MARKER, HEADERS].contains(&name)
        || small.contains(&base)
        || OPTIONAL_FILES.contains(&base)
        || {
            let numbers = base
                .strip_prefix("model-")
                .and_then(|rest| rest.strip_suffix(".safetensors"))
                .and_then(|rest| rest.split_once("-of-"));
            let is_number =
                |text: &str| text.len() >= 5 && text.bytes().all(|b| b.is_ascii_digit());
            numbers.is_some_and(|(n, of)| is_number(n) && is_number(of))
        }
}

/// Makes renames durable where the system can; where it cannot, the files themselves still are.
pub(super) fn sync_directory(path: &Path) {
    if let Ok(directory) = File::open(path) {
        let _ = directory.sync_all();
    }
}
