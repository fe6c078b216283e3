//! The sidecar index: a catalogue kept beside its model, so that the second look at 120,000 tensors
//! reads one small file. Owns where it lies, when it is believed, and its replacement.
//!
//! It is believed only if nothing that the catalogue was made of has changed: the config by content,
//! every other file by size, time of change and identity. It is safe to delete; one that is damaged,
//! foreign or stale is as good as none, and writing one may fail without anybody being told.

mod body;
mod experts;

use std::fs::{self, File, Metadata};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::Catalogue;
use super::source::{Entry, open_file};
use crate::spec::ArchSpec;
use crate::usage::folder;

pub use self::body::{decode, encode};

/// What it is called in a model's folder.
pub const FILE_NAME: &str = ".tierkeep-index";
/// How it begins. The number rises with every change of the body, or of what the catalogue makes of
/// the same headers.
const MAGIC: &[u8; 16] = b"tierkeep-index3\n";
const HASH_BYTES: usize = 32;
/// Longest that is read: GLM-5.2's is 0.3 MB.
const FILE_CAP_BYTES: u64 = 64 << 20;
/// Fewest tensors that are worth a file: reading as many headers takes 5 ms.
const MIN_TENSORS: usize = 2_000;
/// How long a file must have been left alone to be told by its time. As in git's index: two changes
/// within the granularity of a file system's clock (2 s on FAT) have one time.
const RACY_MARGIN: Duration = Duration::from_secs(2);

/// Where a model's sidecar is, and what it must say to be believed.
pub(super) struct Sidecar {
    path: PathBuf,
    key: [u8; HASH_BYTES],
    /// When the newest of the model's files was written.
    newest: SystemTime,
    /// Before any of them was read.
    started: SystemTime,
}

impl Sidecar {
    /// That of the model in `directory`, of which these files are known. `None` where it has no place
    /// or the age of a file cannot be told.
    pub(super) fn of(
        directory: &Path,
        data_dir: Option<&Path>,
        entries: &[&Entry],
        configs: &[Vec<u8>],
    ) -> Option<Self> {
        let started = SystemTime::now();
        let path = place(directory, data_dir)?;
        let mut hasher = blake3::Hasher::new();
        let mut field = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        field(MAGIC);
        field(env!("CARGO_PKG_VERSION").as_bytes());
        configs.iter().for_each(|config| field(config));
        let mut newest = SystemTime::UNIX_EPOCH;
        for entry in entries {
            field(entry.name.as_bytes());
            if let Some(target) = &entry.broken_link {
                field(target.as_os_str().as_encoded_bytes());
                continue;
            }
            let metadata = fs::metadata(directory.join(&entry.name)).ok()?;
            let modified = metadata.modified().ok()?;
            newest = newest.max(modified);
            field(&stamp(&metadata, modified));
        }
        Some(Self { path, key: *hasher.finalize().as_bytes(), newest, started })
    }

    /// The catalogue that it keeps, if it can be believed.
    pub(super) fn load(&self, directory: &Path, spec: &ArchSpec) -> Option<Catalogue> {
        let file = open_file(&self.path).ok()?;
        let metadata = file.metadata().ok()?;
        let written = metadata.modified().ok()?;
        // Whatever was written about when it was may have changed after it was looked at.
        if !metadata.is_file()
            || metadata.len() > FILE_CAP_BYTES
            || written < self.newest.checked_add(RACY_MARGIN)?
        {
            return None;
        }
        let mut bytes = Vec::with_capacity(metadata.len() as usize);
        file.take(FILE_CAP_BYTES).read_to_end(&mut bytes).ok()?;
        let rest = bytes.strip_prefix(MAGIC)?;
        let (key, rest) = rest.split_at_checked(HASH_BYTES)?;
        let (hash, body) = rest.split_at_checked(HASH_BYTES)?;
        if key != self.key || hash != blake3::hash(body).as_bytes() {
            return None;
        }
        decode(body, spec, directory)
    }

    /// Keeps a catalogue, if it is worth a file and the model's files have been left alone for long
    /// enough to be told by their times.
    pub(super) fn save(&self, catalogue: &Catalogue) {
        let settled = self.newest.checked_add(RACY_MARGIN);
        if catalogue.n_tensors < MIN_TENSORS || settled.is_none_or(|at| at > self.started) {
            return;
        }
        let Some(body) = body::encode(catalogue) else { return };
        let hash = blake3::hash(&body);
        let neighbour = self.path.with_extension(format!("tmp-{}", std::process::id()));
        let write = || {
            if let Some(folder) = self.path.parent() {
                fs::create_dir_all(folder)?;
            }
            let mut file = File::create_new(&neighbour)?;
            for part in [&MAGIC[..], &self.key, hash.as_bytes(), &body] {
                file.write_all(part)?;
            }
            drop(file);
            // A reader sees the old file or the new one.
            fs::rename(&neighbour, &self.path)
        };
        if write().is_err() {
            let _ = fs::remove_file(&neighbour);
        }
    }
}

/// In the model's folder, or, where that cannot be written or is a hub cache, in the user's data
/// folder by the folder's real path.
fn place(directory: &Path, data_dir: Option<&Path>) -> Option<PathBuf> {
    let real = fs::canonicalize(directory).ok()?;
    if folder::takes_files(directory) {
        return Some(real.join(FILE_NAME));
    }
    let hash = blake3::hash(real.as_os_str().as_encoded_bytes()).to_hex();
    Some(data_dir?.join("tierkeep").join("index").join(format!("{}.index", &hash[..32])))
}

/// Size, time of change and identity of a file.
fn stamp(metadata: &Metadata, modified: SystemTime) -> Vec<u8> {
    let since = modified.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut stamp = metadata.len().to_le_bytes().to_vec();
    stamp.extend(since.as_nanos().to_le_bytes());
    // A file put in the place of another may have its size and its time, but is another file.
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        stamp.extend(metadata.dev().to_le_bytes());
        stamp.extend(metadata.ino().to_le_bytes());
        stamp.extend(metadata.ctime().to_le_bytes());
        stamp.extend(metadata.ctime_nsec().to_le_bytes());
    }
    stamp
}
