//! Reads ranges of the source's shards. Owns the open files; knows no tensors.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};

use tierkeep_plans::catalogue::{Catalogue, Span};

use super::ConvertError;

/// Shards held open; one layer rarely lies in more.
const OPEN_FILES_CAP: usize = 16;

/// The source's shards, opened when first read.
pub(super) struct SourceFiles<'a> {
    catalogue: &'a Catalogue,
    open: Vec<(u32, File)>,
}

impl<'a> SourceFiles<'a> {
    pub(super) fn new(catalogue: &'a Catalogue) -> Self {
        Self { catalogue, open: Vec::new() }
    }

    /// Fills `buffer` with `bytes` bytes of `span`, from `skip` bytes into it.
    pub(super) fn read(
        &mut self,
        span: Span,
        skip: u64,
        bytes: u64,
        buffer: &mut Vec<u8>,
    ) -> Result<(), ConvertError> {
        let path = &self.catalogue.shards[span.shard as usize].path;
        let io = |doing| move |source| ConvertError::Io { path: path.clone(), doing, source };
        let at = match self.open.iter().position(|(shard, _)| *shard == span.shard) {
            Some(at) => at,
            None => {
                if self.open.len() == OPEN_FILES_CAP {
                    self.open.remove(0);
                }
                self.open.push((span.shard, File::open(path).map_err(io("open"))?));
                self.open.len() - 1
            }
        };
        let file = &mut self.open[at].1;
        file.seek(SeekFrom::Start(span.offset + skip)).map_err(io("seek"))?;
        buffer.resize(bytes as usize, 0);
        file.read_exact(buffer).map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => {
                ConvertError::SourceCut { path: path.clone(), end: span.offset + skip + bytes }
            }
            _ => io("read")(source),
        })
    }
}
