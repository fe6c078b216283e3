//! What can go wrong with a read, as users see it. Owns the messages and their remedies.

use std::io;
use std::path::{Path, PathBuf};

use tierkeep_mapping::MapError;

use crate::disk::Stamp;

/// Why bytes of a shard could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be opened.
    #[error("{}: {source}", path.display())]
    Open {
        /// The shard.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// More shards than the process may open files.
    #[error(
        "{}: this process may not open more files, and the model has {n_shards}: raise the limit with `ulimit -n {}` and run again", path.display(), n_shards + 64
    )]
    TooManyOpen {
        /// The shard at which the limit was met.
        path: PathBuf,
        /// Shards of the model.
        n_shards: usize,
    },
    /// The plan wants reads past the page cache, and there are none here.
    #[error("{}: the filesystem it is on takes no reads past the page cache, which the plan asks for (io = \"direct\"): plan again with `--io dropped`", path.display())]
    NotDirect {
        /// The shard.
        path: PathBuf,
    },
    /// The file is not the one that was catalogued.
    #[error("{} is {found} bytes long, it was {expected} when the model was read: it changed; plan again", path.display())]
    Changed {
        /// The shard.
        path: PathBuf,
        /// Its size in the catalogue.
        expected: u64,
        /// Its size now.
        found: u64,
    },
    /// Something wrote to the file while it was in use.
    #[error(
        "{} was written to while it was in use ({}): what was read from it is not used; run again when the file is whole", path.display(), written(stamps)
    )]
    Overwritten {
        /// The shard.
        path: PathBuf,
        /// What it was when it was opened, and what it is now.
        stamps: Box<[Stamp; 2]>,
    },
    /// A range cannot be mapped.
    #[error("{}: {bytes} bytes at offset {offset} cannot be mapped: {source}; plan with --dense resident", path.display())]
    Map {
        /// The shard.
        path: PathBuf,
        /// Where the range begins.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// Why.
        source: MapError,
    },
    /// The file ended or the disk failed.
    #[error("{}: read of {wanted} bytes at offset {offset} got {got}: {reason}; {remedy}", path.display())]
    Read {
        /// The shard.
        path: PathBuf,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        wanted: usize,
        /// Bytes that came.
        got: usize,
        /// What the system said, or that the file ended.
        reason: String,
        /// What can be done.
        remedy: &'static str,
    },
}

/// What a file that was written to shows of it.
fn written([was, now]: &[Stamp; 2]) -> String {
    if was.bytes == now.bytes {
        "its time of change is another".to_owned()
    } else {
        format!("it was {} bytes long, it is {}", was.bytes, now.bytes)
    }
}

const DISK_REMEDY: &str = "the disk does not give this place of this file back: check the disk, and bring this one file \
     again; the rest of the model need not be downloaded again";
const ENDED_REMEDY: &str = "it was longer when the model was read: bring this one file again; the rest of the model need \
     not be downloaded again";

/// Why a read did not fill its buffer.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) got: usize,
    pub(super) why: Why,
}

#[derive(Debug)]
pub(super) enum Why {
    Ended,
    /// Reads of whole blocks are refused.
    NotDirect,
    Disk(io::Error),
}

impl Failure {
    /// The error for a reader who wanted `wanted` bytes from `offset` and has `got`.
    pub(super) fn error(&self, path: &Path, offset: u64, wanted: usize, got: usize) -> ReadError {
        let (reason, remedy) = match &self.why {
            Why::NotDirect => return ReadError::NotDirect { path: path.to_owned() },
            Why::Ended => ("the file ended".to_owned(), ENDED_REMEDY),
            Why::Disk(error) => (error.to_string(), DISK_REMEDY),
        };
        ReadError::Read { path: path.to_owned(), offset, wanted, got, reason, remedy }
    }
}
