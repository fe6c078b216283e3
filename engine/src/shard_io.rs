//! Reads from shards. Owns the open files, what is done about short, interrupted and failing reads,
//! the watch for files that change, and the count of bytes by what they are read for; knows nothing of
//! what the bytes mean.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tierkeep_mapping::{MapError, Mapping};
use tierkeep_plans::catalogue::{Shard, Span};
use tierkeep_plans::plan::IoMode;

use crate::counters::{ReadCounts, Reads};
use crate::disk::{Access, Disk, ShardFile, Stamp, SystemDisk, is_out_of_handles};

/// How often a place that the disk fails to give back is asked for again: a device that recovers does
/// so at once, and one that does not has made us wait for its own retries already.
const RETRIES: u32 = 2;

/// Bytes that are copied elsewhere are read in pieces of this size, so that the pages of a large
/// tensor do not pile up before they are dropped.
const PIECE_BYTES: usize = 16 << 20;

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

/// An open shard.
#[derive(Debug)]
struct OpenShard {
    path: PathBuf,
    file: Box<dyn ShardFile>,
    /// What it was when it was opened.
    stamp: Stamp,
}

/// The open shards of a model.
#[derive(Debug)]
pub(crate) struct ShardFiles {
    disk: Arc<dyn Disk>,
    files: Vec<OpenShard>,
    mode: IoMode,
    counter: ReadCounter,
}

/// What a read is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadFor {
    /// Weights that every token touches: once while loading, or for each batch where they are streamed.
    Dense,
    /// The row of a token in an embedding that stays on disk.
    Embedding,
    /// A routed expert.
    Expert,
}

/// Reads of one kind.
#[derive(Debug, Default)]
struct KindCounts {
    bytes: AtomicU64,
    reads: AtomicU64,
    nanos: AtomicU64,
}

impl KindCounts {
    fn now(&self) -> Reads {
        Reads {
            bytes: self.bytes.load(Relaxed),
            reads: self.reads.load(Relaxed),
            time: Duration::from_nanos(self.nanos.load(Relaxed)),
        }
    }
}

/// A view of how much has been read, which can be kept while the engine works.
#[derive(Clone, Debug, Default)]
pub struct ReadCounter(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    kinds: [KindCounts; 3],
    retries: AtomicU64,
}

impl ReadCounter {
    /// Bytes read from shards since they were opened: those that were asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.now().all().bytes
    }

    /// Number of reads.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.now().all().reads
    }

    /// Everything that has been read since the shards were opened, by what it was read for.
    #[must_use]
    pub fn now(&self) -> ReadCounts {
        let of = |what: ReadFor| self.0.kinds[what as usize].now();
        ReadCounts {
            dense: of(ReadFor::Dense),
            embedding: of(ReadFor::Embedding),
            experts: of(ReadFor::Expert),
        }
    }

    /// How often a place was asked for again because the disk had failed to give it back.
    #[must_use]
    pub fn retries(&self) -> u64 {
        self.0.retries.load(Relaxed)
    }

    fn add(&self, what: ReadFor, bytes: u64, time: Duration) {
        let kind = &self.0.kinds[what as usize];
        kind.bytes.fetch_add(bytes, Relaxed);
        kind.reads.fetch_add(1, Relaxed);
        kind.nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }
}

impl ShardFiles {
    /// Opens every shard and checks that it still has its catalogued size.
    ///
    /// # Errors
    /// [`ReadError::Open`], [`ReadError::TooManyOpen`] or [`ReadError::Changed`].
    pub(crate) fn open(
        disk: Arc<dyn Disk>,
        shards: &[Shard],
        mode: IoMode,
    ) -> Result<Self, ReadError> {
        let files = shards.iter().map(|shard| {
            let path = shard.path.clone();
            let open = |source| match is_out_of_handles(&source) {
                true => ReadError::TooManyOpen { path: shard.path.clone(), n_shards: shards.len() },
                false => ReadError::Open { path: shard.path.clone(), source },
            };
            let file = disk.open(&path, Access::PageCache).map_err(open)?;
            let stamp = file.stamp().map_err(open)?;
            if stamp.bytes != shard.bytes {
                return Err(ReadError::Changed { path, expected: shard.bytes, found: stamp.bytes });
            }
            Ok(OpenShard { path, file, stamp })
        });
        let files = files.collect::<Result<_, _>>()?;
        Ok(Self { disk, files, mode, counter: ReadCounter::default() })
    }

    /// Fills `into` from `offset` of a shard, and counts it as read for `what`. `into` is a copy, so
    /// that the pages are dropped.
    ///
    /// # Errors
    /// [`ReadError::Read`] with file, offset, wanted and got; [`ReadError::Overwritten`].
    pub(crate) fn read(
        &self,
        what: ReadFor,
        shard: u32,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), ReadError> {
        let shard = self.shard(shard)?;
        let wanted = into.len();
        let start_of_read = Instant::now();
        for (at, piece) in (0..).step_by(PIECE_BYTES).zip(into.chunks_mut(PIECE_BYTES)) {
            let start = offset.saturating_add(at as u64);
            self.fill(shard, start, piece).map_err(|failure| {
                let got = at + failure.got;
                failure.error(shard, offset, wanted, got)
            })?;
            shard.file.drop_pages(start, piece.len() as u64);
        }
        self.done(shard, (what, start_of_read.elapsed()), offset, wanted)
    }

    /// Fills `into` with a piece of an expert, from `offset` of a shard, as the plan's I/O mode says.
    ///
    /// # Errors
    /// As [`ShardFiles::read`].
    pub(crate) fn read_expert(
        &self,
        shard: u32,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), ReadError> {
        let shard = self.shard(shard)?;
        let wanted = into.len();
        let start = Instant::now();
        self.fill(shard, offset, into)
            .map_err(|failure| failure.error(shard, offset, wanted, failure.got))?;
        let time = start.elapsed();
        match self.mode {
            IoMode::Dropped => shard.file.drop_pages(offset, wanted as u64),
            IoMode::Buffered => {}
        }
        self.done(shard, (ReadFor::Expert, time), offset, wanted)
    }

    fn shard(&self, shard: u32) -> Result<&OpenShard, ReadError> {
        self.files.get(shard as usize).ok_or_else(|| ReadError::Open {
            path: PathBuf::from(format!("shard {shard}")),
            source: io::Error::from(ErrorKind::NotFound),
        })
    }

    fn fill(&self, shard: &OpenShard, offset: u64, into: &mut [u8]) -> Result<(), Failure> {
        let mut retries = 0;
        let read =
            |at: usize, rest: &mut [u8]| shard.file.read_at(rest, offset.saturating_add(at as u64));
        let filled = fill(read, into, &mut retries);
        if retries > 0 {
            self.counter.0.retries.fetch_add(u64::from(retries), Relaxed);
        }
        filled
    }

    /// Counts a read whose bytes have come, unless the file was written to meanwhile: then they may be
    /// of two files, and are no one's.
    fn done(
        &self,
        shard: &OpenShard,
        (what, time): (ReadFor, Duration),
        offset: u64,
        wanted: usize,
    ) -> Result<(), ReadError> {
        self.unwritten(shard, offset, wanted)?;
        self.counter.add(what, wanted as u64, time);
        Ok(())
    }

    /// Maps a range of pages of a shard; nothing is read yet.
    ///
    /// # Errors
    /// [`ReadError::Map`].
    pub(crate) fn map(&self, range: Span) -> Result<Mapping, ReadError> {
        let shard = self.shard(range.shard)?;
        let Span { offset, bytes, .. } = range;
        shard.file.map(offset, bytes).map_err(|source| {
            let path = shard.path.clone();
            ReadError::Map { path, offset, bytes, source }
        })
    }

    /// Why bytes of a mapping could not be brought in: what reading them says, or else `reason`. Bytes past
    /// the end that the shard had when it was opened are not asked for.
    pub(crate) fn why_lost(&self, lost: Span, reason: &io::Error) -> ReadError {
        let shard = match self.shard(lost.shard) {
            Ok(shard) => shard,
            Err(error) => return error,
        };
        let wanted = shard.stamp.bytes.saturating_sub(lost.offset).min(lost.bytes) as usize;
        let failure = match self.read(ReadFor::Dense, lost.shard, lost.offset, &mut vec![0; wanted])
        {
            Err(error) => return error,
            Ok(()) => Failure { got: 0, why: Why::Disk(io::Error::other(reason.to_string())) },
        };
        failure.error(shard, lost.offset, wanted, 0)
    }

    /// Whether a shard is still as it was when it was opened.
    ///
    /// # Errors
    /// [`ReadError::Overwritten`], or what the system says of the file.
    pub(crate) fn check_unwritten(&self, shard: u32) -> Result<(), ReadError> {
        self.shard(shard).and_then(|shard| self.unwritten(shard, 0, 0))
    }

    fn unwritten(&self, shard: &OpenShard, offset: u64, wanted: usize) -> Result<(), ReadError> {
        let now = shard.file.stamp().map_err(|error| {
            Failure { got: 0, why: Why::Disk(error) }.error(shard, offset, wanted, 0)
        })?;
        if now.is_unwritten_since(&shard.stamp) {
            return Ok(());
        }
        let stamps = Box::new([shard.stamp, now]);
        Err(ReadError::Overwritten { path: shard.path.clone(), stamps })
    }

    /// Shards whose path leads to another file by now, or to none. What is open is what was opened, so
    /// that nothing is wrong with this run; the next one will have another model.
    pub(crate) fn replaced(&self) -> Vec<PathBuf> {
        let is_replaced = |shard: &&OpenShard| {
            self.disk.stamp(&shard.path).map_or(true, |there| !there.is_same_file(&shard.stamp))
        };
        self.files.iter().filter(is_replaced).map(|shard| shard.path.clone()).collect()
    }

    /// How much has been read.
    pub(crate) fn counter(&self) -> &ReadCounter {
        &self.counter
    }
}

/// Reads a range of a file that is not kept open.
///
/// # Errors
/// [`ReadError`].
pub(crate) fn read_range(path: &Path, offset: u64, bytes: u64) -> Result<Vec<u8>, ReadError> {
    let open = |source| ReadError::Open { path: path.to_owned(), source };
    let bytes_found = std::fs::metadata(path).map_err(open)?.len();
    let shard = Shard { path: path.to_owned(), bytes: bytes_found };
    let mut into = vec![0; bytes as usize];
    ShardFiles::open(Arc::new(SystemDisk), &[shard], IoMode::Dropped)?.read(
        ReadFor::Dense,
        0,
        offset,
        &mut into,
    )?;
    Ok(into)
}

/// Why a read did not fill its buffer.
#[derive(Debug)]
struct Failure {
    got: usize,
    why: Why,
}

#[derive(Debug)]
enum Why {
    Ended,
    Disk(io::Error),
}

impl Failure {
    fn error(&self, shard: &OpenShard, offset: u64, wanted: usize, got: usize) -> ReadError {
        let (reason, remedy) = match &self.why {
            Why::Ended => ("the file ended".to_owned(), ENDED_REMEDY),
            Why::Disk(error) => (error.to_string(), DISK_REMEDY),
        };
        ReadError::Read { path: shard.path.clone(), offset, wanted, got, reason, remedy }
    }
}

/// Calls `read(position, rest)` until `into` is full. Interrupted and short reads go on; a place that
/// fails is asked for [`RETRIES`] times more, which `retries` counts.
fn fill(
    mut read: impl FnMut(usize, &mut [u8]) -> io::Result<usize>,
    into: &mut [u8],
    retries: &mut u32,
) -> Result<(), Failure> {
    let mut got = 0;
    let mut left = RETRIES;
    while got < into.len() {
        match read(got, &mut into[got..]) {
            Ok(0) => return Err(Failure { got, why: Why::Ended }),
            Ok(n) => {
                got += n;
                left = RETRIES;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) if left > 0 => {
                left -= 1;
                *retries += 1;
            }
            Err(e) => return Err(Failure { got, why: Why::Disk(e) }),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_fill(
        read: impl FnMut(usize, &mut [u8]) -> io::Result<usize>,
        into: &mut [u8],
    ) -> (Result<(), (usize, String)>, u32) {
        let mut retries = 0;
        let filled = fill(read, into, &mut retries);
        (filled.map_err(|failure| (failure.got, format!("{:?}", failure.why))), retries)
    }

    #[test]
    fn short_and_interrupted_reads_go_on() {
        let data: Vec<u8> = (0..100).collect();
        let mut calls = 0;
        let mut into = vec![0; 100];
        let read = |at: usize, rest: &mut [u8]| {
            calls += 1;
            if calls % 2 == 0 {
                return Err(io::Error::from(ErrorKind::Interrupted));
            }
            let n = rest.len().min(7);
            rest[..n].copy_from_slice(&data[at..at + n]);
            Ok(n)
        };
        assert_eq!(check_fill(read, &mut into), (Ok(()), 0));
        assert_eq!(into, data);
    }

    #[test]
    fn a_disk_that_recovers_is_asked_again_and_one_that_does_not_is_given_up() {
        let mut into = [0; 10];
        let mut calls = 0;
        // Every place fails twice.
        let read = |_: usize, rest: &mut [u8]| {
            calls += 1;
            if calls % 3 == 0 { Ok(rest.len().min(5)) } else { Err(io::Error::other("EIO")) }
        };
        assert_eq!(check_fill(read, &mut into), (Ok(()), 4));
        let mut calls = 0;
        let (failed, retries) = check_fill(
            |_, _| {
                calls += 1;
                Err(io::Error::other("EIO"))
            },
            &mut into,
        );
        let (got, why) = failed.unwrap_err();
        assert_eq!((got, retries, calls), (0, RETRIES, RETRIES + 1));
        assert!(why.contains("EIO"));
    }

    #[test]
    fn the_end_of_a_file_says_how_far_it_got_and_is_not_tried_again() {
        let mut into = [0; 10];
        let (ended, retries) = check_fill(|at, _| Ok(if at == 0 { 4 } else { 0 }), &mut into);
        assert_eq!((ended, retries), (Err((4, "Ended".to_owned())), 0));
    }

    #[test]
    fn errors_name_file_offset_wanted_and_got() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        std::fs::write(&path, [7; 64]).unwrap();
        let shards = [Shard { path: path.clone(), bytes: 64 }];
        let open = || ShardFiles::open(Arc::new(SystemDisk), &shards, IoMode::Dropped);
        let files = open().unwrap();
        let mut into = [0; 16];
        files.read(ReadFor::Embedding, 0, 48, &mut into).unwrap();
        assert_eq!((into, files.counter().bytes(), files.counter().reads()), ([7; 16], 16, 1));
        let counts = files.counter().now();
        assert_eq!((counts.embedding.bytes, counts.dense.reads), (16, 0));
        let error = files.read(ReadFor::Dense, 0, 56, &mut into).unwrap_err().to_string();
        assert!(error.contains("read of 16 bytes at offset 56 got 8: the file ended"), "{error}");
        assert!(error.contains("the rest of the model need not be downloaded again"), "{error}");
        assert!(files.read(ReadFor::Dense, 9, 0, &mut into).is_err());
        std::fs::write(&path, [7; 60]).unwrap();
        assert!(matches!(open(), Err(ReadError::Changed { expected: 64, found: 60, .. })));
        let error = files.read(ReadFor::Dense, 0, 0, &mut into).unwrap_err();
        assert!(matches!(error, ReadError::Overwritten { .. }));
        assert!(error.to_string().contains("it was 64 bytes long, it is 60"), "{error}");
        assert_eq!(files.replaced(), Vec::<PathBuf>::new());
        std::fs::remove_file(&path).unwrap();
        assert_eq!(files.replaced(), [path]);
    }
}
