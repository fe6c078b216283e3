//! Reads ranges of the source's shards for several threads. Owns the open files; knows no tensors.

use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError};

use tierkeep_plans::catalogue::{Catalogue, Span};

use super::ConvertError;
use crate::disk::{Access, Disk, ShardFile};

/// Shards held open; one layer rarely lies in more.
const OPEN_FILES_CAP: usize = 16;
/// How often a place that the disk fails to give back is asked for again.
const RETRIES: u32 = 2;

type Open = (u32, Arc<dyn ShardFile>);

/// The source's shards, opened when first read.
pub(super) struct SourceFiles<'a> {
    catalogue: &'a Catalogue,
    disk: &'a dyn Disk,
    open: Mutex<Vec<Open>>,
}

impl<'a> SourceFiles<'a> {
    pub(super) fn new(catalogue: &'a Catalogue, disk: &'a dyn Disk) -> Self {
        Self { catalogue, disk, open: Mutex::new(Vec::new()) }
    }

    /// Fills `buffer` with `bytes` bytes of `span`, from `skip` bytes into it. Pages are dropped behind
    /// it: each byte is read once.
    pub(super) fn read(
        &self,
        span: Span,
        skip: u64,
        bytes: u64,
        buffer: &mut Vec<u8>,
    ) -> Result<(), ConvertError> {
        let file = self.file(span.shard)?;
        let path = || self.path(span.shard);
        let start = span.offset + skip;
        buffer.resize(bytes as usize, 0);
        let (mut got, mut failures) = (0_usize, 0);
        while got < buffer.len() {
            match file.read_at(&mut buffer[got..], start + got as u64) {
                Ok(0) => return Err(ConvertError::SourceCut { path: path(), end: start + bytes }),
                Ok(n) => got += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) if failures < RETRIES => failures += 1,
                Err(source) => {
                    return Err(ConvertError::Io { path: path(), doing: "read", source });
                }
            }
        }
        file.drop_pages(start, bytes);
        Ok(())
    }

    /// Closes a shard that nothing more is needed of.
    pub(super) fn close(&self, shard: u32) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).retain(|(open, _)| *open != shard);
    }

    fn path(&self, shard: u32) -> std::path::PathBuf {
        self.catalogue.shards.get(shard as usize).map(|s| s.path.clone()).unwrap_or_default()
    }

    fn file(&self, shard: u32) -> Result<Arc<dyn ShardFile>, ConvertError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, file)) = open.iter().find(|(of, _)| *of == shard) {
            return Ok(Arc::clone(file));
        }
        let path = self.path(shard);
        let file = self.disk.open(&path, Access::PageCache).map_err(|source| ConvertError::Io {
            path,
            doing: "open",
            source,
        })?;
        let file: Arc<dyn ShardFile> = Arc::from(file);
        if open.len() == OPEN_FILES_CAP {
            open.remove(0);
        }
        open.push((shard, Arc::clone(&file)));
        Ok(file)
    }
}
