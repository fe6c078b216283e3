//! Deleting a source while it is converted. Owns which source file may go when, the refusals, and the
//! headers that are kept so that a conversion goes on when a part of its source is gone.
//!
//! Only weight files are ever deleted, each after everything that needs anything of it is written, read
//! back and noted in the journal.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tierkeep_plans::catalogue::header::{HeaderBytes, read_header_bytes};
use tierkeep_plans::catalogue::{Catalogue, CatalogueError, Entry, Folder, HeaderError, Source};
use tierkeep_plans::units::Bytes;

use super::ConvertError;
use super::journal::peek;
use super::layout::{self, OutputPlan};
use super::output::HEADERS;

/// For each output file, the source files that nothing is needed of once it and those before it are
/// written. Files that no output needs are in none.
pub(super) fn freed_after(plan: &OutputPlan, n_sources: usize) -> Vec<Vec<u32>> {
    let mut last: Vec<Option<usize>> = vec![None; n_sources];
    for (index, shard) in plan.shards.iter().enumerate() {
        for entry in &shard.entries {
            let layout::Entry::Job(job) = entry else { continue };
            for span in plan.jobs[*job].spans() {
                if let Some(last) = last.get_mut(span.shard as usize) {
                    *last = Some(index);
                }
            }
        }
    }
    let mut freed = vec![Vec::new(); plan.shards.len()];
    for (source, last) in last.into_iter().enumerate() {
        if let Some(freed) = last.and_then(|last| freed.get_mut(last)) {
            freed.push(source as u32);
        }
    }
    freed
}

/// The most bytes that the disk holds over what it held before, where source files go as soon as they
/// may and both are on one disk.
pub(super) fn peak_bytes(plan: &OutputPlan, catalogue: &Catalogue) -> Bytes {
    let (mut now, mut peak) = (0_i128, 0_i128);
    for (shard, freed) in plan.shards.iter().zip(freed_after(plan, catalogue.shards.len())) {
        now += i128::from(shard.file_bytes());
        peak = peak.max(now);
        let bytes = |source: &u32| catalogue.shards.get(*source as usize).map_or(0, |s| s.bytes);
        now -= freed.iter().map(|source| i128::from(bytes(source))).sum::<i128>();
    }
    Bytes(u64::try_from(peak).unwrap_or(0))
}

/// Whether the source may be deleted at all.
pub(super) fn check(
    catalogue: &Catalogue,
    out: &Path,
    consumed: &[String],
) -> Result<(), ConvertError> {
    let refused = |path: &Path, why: &'static str| {
        Err(ConvertError::CannotConsume { path: path.to_owned(), why })
    };
    let directory = &catalogue.directory;
    if real(out).starts_with(real(directory)) {
        return refused(out, "it lies inside the model that would be deleted");
    }
    for shard in &catalogue.shards {
        let name = shard.path.file_name().map(|n| n.to_string_lossy()).unwrap_or_default();
        if consumed.iter().any(|gone| *gone == name) {
            continue;
        }
        let found = fs::symlink_metadata(&shard.path).map_err(|source| ConvertError::Io {
            path: shard.path.clone(),
            doing: "look at",
            source,
        })?;
        if found.is_symlink() {
            return refused(
                &shard.path,
                "it is a link, such as those into a hub client's cache, whose files others may use",
            );
        }
        if found.permissions().readonly() {
            return refused(&shard.path, "it is read-only");
        }
        if n_links(&found) > 1 {
            return refused(&shard.path, "it has other names, so that deleting it frees nothing");
        }
    }
    if !is_writable(directory) {
        return refused(directory, "nothing can be deleted in it");
    }
    Ok(())
}

/// A path without links, of a folder too that is not there yet.
fn real(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = absolute.ancestors().find_map(|ancestor| {
        let rest = absolute.strip_prefix(ancestor).ok()?;
        Some(ancestor.canonicalize().ok()?.join(rest))
    });
    there.unwrap_or(absolute)
}

#[cfg(unix)]
fn n_links(found: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::nlink(found)
}

#[cfg(not(unix))]
fn n_links(_found: &fs::Metadata) -> u64 {
    1
}

#[cfg(unix)]
fn is_writable(directory: &Path) -> bool {
    rustix::fs::access(directory, rustix::fs::Access::WRITE_OK).is_ok()
}

#[cfg(not(unix))]
fn is_writable(directory: &Path) -> bool {
    fs::metadata(directory).is_ok_and(|found| !found.permissions().readonly())
}

/// The headers of a source, as they are kept beside the output.
#[derive(Serialize, Deserialize)]
struct Kept {
    shards: BTreeMap<String, KeptHeader>,
}

#[derive(Serialize, Deserialize)]
struct KeptHeader {
    bytes: u64,
    json: String,
}

/// The headers of all source files, as text to be kept.
pub(super) fn headers_text(catalogue: &Catalogue) -> Result<Vec<u8>, ConvertError> {
    let mut shards = BTreeMap::new();
    for shard in &catalogue.shards {
        let io = |source| ConvertError::Io { path: shard.path.clone(), doing: "read", source };
        let header = read_header_bytes(&shard.path).map_err(|e| io(io::Error::other(e)))?;
        let json = String::from_utf8(header.json).map_err(|e| io(io::Error::other(e)))?;
        let name = shard.path.file_name().map(|n| n.to_string_lossy().into_owned());
        shards.insert(name.unwrap_or_default(), KeptHeader { bytes: header.file_bytes, json });
    }
    serde_json::to_vec(&Kept { shards }).map_err(|e| ConvertError::Io {
        path: catalogue.directory.clone(),
        doing: "keep the headers of",
        source: e.into(),
    })
}

/// Reads the model in `directory` that is being converted to `out`, of which `--consume` may have
/// deleted a part: headers of what is gone are those that were kept. `None` where nothing is gone.
///
/// # Errors
/// [`CatalogueError`], as of any model.
pub fn open_consumed(directory: &Path, out: &Path) -> Option<Result<Catalogue, CatalogueError>> {
    let (_, consumed) = peek(out)?;
    if consumed.is_empty() {
        return None;
    }
    let kept: Kept = serde_json::from_slice(&fs::read(out.join(HEADERS)).ok()?).ok()?;
    let consumed: BTreeSet<String> = consumed.into_iter().collect();
    Some(Catalogue::open_from(&PartlyGone { folder: Folder::new(directory), kept, consumed }))
}

/// A folder of which some files are gone whose headers are known.
struct PartlyGone {
    folder: Folder,
    kept: Kept,
    consumed: BTreeSet<String>,
}

impl PartlyGone {
    fn gone(&self, name: &str) -> Option<&KeptHeader> {
        self.kept.shards.get(name).filter(|_| self.consumed.contains(name))
    }
}

impl Source for PartlyGone {
    fn label(&self) -> &Path {
        self.folder.label()
    }

    fn locate(&self, name: &str) -> PathBuf {
        self.folder.locate(name)
    }

    fn list(&self) -> io::Result<Option<Vec<Entry>>> {
        let mut entries = self.folder.list()?.unwrap_or_default();
        entries.retain(|entry| self.gone(&entry.name).is_none());
        let gone = self.kept.shards.iter().filter(|(name, _)| self.consumed.contains(*name));
        entries.extend(gone.map(|(name, header)| Entry {
            name: name.clone(),
            bytes: Some(header.bytes),
            broken_link: None,
        }));
        Ok(Some(entries))
    }

    fn small_file(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        self.folder.small_file(name)
    }

    fn file_bytes(&self, name: &str) -> io::Result<Option<u64>> {
        match self.gone(name) {
            Some(header) => Ok(Some(header.bytes)),
            None => self.folder.file_bytes(name),
        }
    }

    fn header(&self, name: &str) -> Result<HeaderBytes, HeaderError> {
        match self.gone(name) {
            Some(header) => {
                Ok(HeaderBytes { json: header.json.clone().into_bytes(), file_bytes: header.bytes })
            }
            None => self.folder.header(name),
        }
    }

    fn index_is_cheap(&self) -> bool {
        true
    }
}
