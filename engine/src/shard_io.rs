//! Reads from shards. Owns the open files, what is done about short, interrupted and failing reads,
//! the watch for files that change, and the count of bytes by what they are read for; knows nothing of
//! what the bytes mean.

mod busy;
mod failure;
mod fill;
mod piece;

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use tierkeep_mapping::Mapping;
use tierkeep_plans::budget::Reads as HowToRead;
use tierkeep_plans::catalogue::{DIRECT_ALIGN, Shard, Span};
use tierkeep_plans::plan::IoMode;

use self::busy::Busy;
pub use self::failure::ReadError;
use self::failure::{Failure, Why};
use self::fill::fill;
pub(crate) use self::piece::{Piece, pieces};
use crate::counters::{ReadCounts, Reads, WindowReads};
use crate::disk::{
    Access, Disk, ShardFile, Stamp, SystemDisk, has_no_direct_reads, is_out_of_handles,
};
use crate::memory::Buffer;

/// Bytes that are copied elsewhere are read in pieces of this size, so that the pages of a large
/// tensor do not pile up before they are dropped.
const PIECE_BYTES: usize = 16 << 20;

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
    /// How many reads are made at once, and into what they are cut.
    how: HowToRead,
    /// What direct reads pass through whose bytes do not belong where a block begins, in equal parts.
    bounces: Vec<Mutex<Buffer>>,
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
    busy: Busy,
}

impl KindCounts {
    fn now(&self) -> Reads {
        Reads {
            bytes: self.bytes.load(Relaxed),
            reads: self.reads.load(Relaxed),
            time: Duration::from_nanos(self.nanos.load(Relaxed)),
            busy: self.busy.time(),
        }
    }
}

/// A view of how much has been read, which can be kept while the engine works.
#[derive(Clone, Debug, Default)]
pub struct ReadCounter(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    kinds: [KindCounts; 3],
    busy: Busy,
    brought: AtomicU64,
    retries: AtomicU64,
    window_nanos: AtomicU64,
    waited_nanos: AtomicU64,
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl ReadCounter {
    /// Bytes read from shards since they were opened: those that were asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.now().all().bytes
    }

    /// Bytes that the reads brought. More than [`ReadCounter::bytes`] where whole blocks are read for
    /// parts of them.
    #[must_use]
    pub fn brought_bytes(&self) -> u64 {
        self.0.brought.load(Relaxed)
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
            busy: self.0.busy.time(),
            window: WindowReads {
                time: Duration::from_nanos(self.0.window_nanos.load(Relaxed)),
                waited: Duration::from_nanos(self.0.waited_nanos.load(Relaxed)),
            },
        }
    }

    /// Counts time in which experts were read that others compute under.
    pub(crate) fn add_window(&self, time: Duration) {
        self.0.window_nanos.fetch_add(nanos(time), Relaxed);
    }

    /// Counts time that was spent waiting for them.
    pub(crate) fn add_waited(&self, time: Duration) {
        self.0.waited_nanos.fetch_add(nanos(time), Relaxed);
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
        kind.nanos.fetch_add(nanos(time), Relaxed);
    }
}

impl ShardFiles {
    /// Opens every shard and checks that it still has its catalogued size. `bounces` are for direct reads
    /// of anything but experts: whole blocks, page-aligned.
    ///
    /// # Errors
    /// [`ReadError::Open`], [`ReadError::TooManyOpen`], [`ReadError::NotDirect`] or
    /// [`ReadError::Changed`].
    pub(crate) fn open(
        disk: Arc<dyn Disk>,
        shards: &[Shard],
        (mode, how): (IoMode, HowToRead),
        bounces: Vec<Buffer>,
    ) -> Result<Self, ReadError> {
        let access = if mode.uses_page_cache() { Access::PageCache } else { Access::Direct };
        let files = shards.iter().map(|shard| {
            let path = shard.path.clone();
            let open = |source| {
                let path = shard.path.clone();
                if is_out_of_handles(&source) {
                    ReadError::TooManyOpen { path, n_shards: shards.len() }
                } else if access == Access::Direct && has_no_direct_reads(&source) {
                    ReadError::NotDirect { path }
                } else {
                    ReadError::Open { path, source }
                }
            };
            let file = disk.open(&path, access).map_err(open)?;
            let stamp = file.stamp().map_err(open)?;
            if stamp.bytes != shard.bytes {
                return Err(ReadError::Changed { path, expected: shard.bytes, found: stamp.bytes });
            }
            Ok(OpenShard { path, file, stamp })
        });
        let files = files.collect::<Result<_, _>>()?;
        let counter = ReadCounter::default();
        let bounces = bounces.into_iter().map(Mutex::new).collect();
        Ok(Self { disk, files, mode, how, bounces, counter })
    }

    /// Fills `into` from `offset` of a shard, and counts it as read for `what`. `into` is a copy, so
    /// that no pages are kept.
    ///
    /// # Errors
    /// [`ReadError::Read`] with file, offset, wanted and got; [`ReadError::Overwritten`];
    /// [`ReadError::NotDirect`].
    pub(crate) fn read(
        &self,
        what: ReadFor,
        shard: u32,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), ReadError> {
        let shard = self.shard(shard)?;
        let wanted = into.len();
        let _all = self.counter.0.busy.begin();
        let _kind = self.counter.0.kinds[what as usize].busy.begin();
        let start_of_read = Instant::now();
        if self.mode.uses_page_cache() {
            for (at, piece) in (0..).step_by(PIECE_BYTES).zip(into.chunks_mut(PIECE_BYTES)) {
                let start = offset.saturating_add(at as u64);
                let whole = piece.len();
                self.fill(shard, start, piece, whole).map_err(|failure| {
                    failure.error(&shard.path, offset, wanted, at + failure.got)
                })?;
                shard.file.drop_pages(start, whole as u64);
            }
        } else {
            self.read_by_blocks(shard, offset, into)?;
        }
        self.done(shard, (what, start_of_read.elapsed()), offset, wanted)
    }

    /// A buffer that reads pass through: one that nobody uses, or the next that somebody is done with.
    fn bounce(&self) -> Option<MutexGuard<'_, Buffer>> {
        for bounce in &self.bounces {
            match bounce.try_lock() {
                Ok(bounce) => return Some(bounce),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        let first = self.bounces.first()?;
        Some(first.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Fills `into` by direct reads through a bounce buffer.
    fn read_by_blocks(
        &self,
        shard: &OpenShard,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), ReadError> {
        let wanted = into.len();
        let mut at = 0;
        while at < wanted {
            // For one piece at a time: others read as well, and need not wait for all of a layer.
            let mut bounce = self.bounce();
            let bounce = bounce.as_deref_mut().map_or(&mut [][..], Buffer::bytes_mut);
            let start = offset.saturating_add(at as u64);
            let shift = (start % DIRECT_ALIGN) as usize;
            let n = (wanted - at).min(bounce.len().saturating_sub(shift));
            if n == 0 {
                let why = Why::Disk(io::Error::from(ErrorKind::OutOfMemory));
                return Err(Failure { got: 0, why }.error(&shard.path, offset, wanted, at));
            }
            let blocks = (shift + n).next_multiple_of(DIRECT_ALIGN as usize).min(bounce.len());
            self.fill(shard, start - shift as u64, &mut bounce[..blocks], shift + n).map_err(
                |failure| {
                    let got = at + failure.got.saturating_sub(shift).min(n);
                    failure.error(&shard.path, offset, wanted, got)
                },
            )?;
            into[at..at + n].copy_from_slice(&bounce[shift..shift + n]);
            at += n;
        }
        Ok(())
    }

    /// Brings a piece of an expert to its place in a slot that was laid out for this I/O mode: `into` is
    /// that place.
    ///
    /// # Errors
    /// As [`ShardFiles::read`].
    pub(crate) fn read_piece(&self, piece: &Piece, into: &mut [u8]) -> Result<(), ReadError> {
        let shard = self.shard(piece.shard)?;
        let (skip, wanted) = (piece.skip as usize, piece.wanted as usize);
        let _all = self.counter.0.busy.begin();
        let _kind = self.counter.0.kinds[ReadFor::Expert as usize].busy.begin();
        let start = Instant::now();
        let first = piece.offset.saturating_add(piece.skip);
        self.fill(shard, piece.offset, into, skip + wanted).map_err(|failure| {
            let got = failure.got.saturating_sub(skip).min(wanted);
            failure.error(&shard.path, first, wanted, got)
        })?;
        let time = start.elapsed();
        match self.mode {
            IoMode::Dropped => shard.file.drop_pages(first, piece.wanted),
            IoMode::Direct | IoMode::Buffered => {}
        }
        self.done(shard, (ReadFor::Expert, time), first, wanted)
    }

    fn shard(&self, shard: u32) -> Result<&OpenShard, ReadError> {
        self.files.get(shard as usize).ok_or_else(|| ReadError::Open {
            path: PathBuf::from(format!("shard {shard}")),
            source: io::Error::from(ErrorKind::NotFound),
        })
    }

    /// At least the first `needed` bytes of `into`, from `offset`.
    fn fill(
        &self,
        shard: &OpenShard,
        offset: u64,
        into: &mut [u8],
        needed: usize,
    ) -> Result<(), Failure> {
        let read =
            |at: usize, rest: &mut [u8]| shard.file.read_at(rest, offset.saturating_add(at as u64));
        let block = if self.mode.uses_page_cache() { 1 } else { DIRECT_ALIGN as usize };
        let mut retries = 0;
        let filled = fill(read, into, needed, block, &mut retries);
        if retries > 0 {
            self.counter.0.retries.fetch_add(u64::from(retries), Relaxed);
        }
        self.counter.0.brought.fetch_add(filled? as u64, Relaxed);
        Ok(())
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
        failure.error(&shard.path, lost.offset, wanted, 0)
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
            Failure { got: 0, why: Why::Disk(error) }.error(&shard.path, offset, wanted, 0)
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

    /// How experts are read.
    pub(crate) fn mode(&self) -> IoMode {
        self.mode
    }

    /// How many reads are made at once, and into what they are cut.
    pub(crate) fn how(&self) -> HowToRead {
        self.how
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
    let disk = Arc::new(SystemDisk);
    let files =
        ShardFiles::open(disk, &[shard], (IoMode::Dropped, HowToRead::default()), Vec::new())?;
    files.read(ReadFor::Dense, 0, offset, &mut into)?;
    Ok(into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_file_offset_wanted_and_got() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        std::fs::write(&path, [7; 64]).unwrap();
        let shards = [Shard { path: path.clone(), bytes: 64 }];
        let open = || {
            let disk = Arc::new(SystemDisk);
            ShardFiles::open(disk, &shards, (IoMode::Dropped, HowToRead::default()), Vec::new())
        };
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
