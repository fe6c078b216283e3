//! Every byte of a model's files, read once: which cannot be read, and which values no trained weight
//! has. Owns the walk over the files, several reads at once in bounded memory; knows no architecture.
//!
//! Headers say whether a file is whole; only reading says whether the disk still gives it back. What
//! fails is narrowed down to a range of a file, so that one range is blamed and not a model.

mod blocks;
mod checks;
mod holes;
mod source;
mod values;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use tierkeep_plans::catalogue::header::ShardHeader;

use self::blocks::{Block, blocks};
pub use self::checks::{hole_check, payload_checks};
pub use self::holes::{Holes, holes};
pub use self::source::{FileSource, PayloadSource};
pub use self::values::{OddValues, ValueFault};
use self::values::{Values, overlapping};

/// Bytes of one read: several megabytes keep any disk busy.
const READ_BYTES: u64 = 8 << 20;
/// Reads in flight; with `READ_BYTES` the memory that this takes.
const READS_IN_FLIGHT: usize = 8;
/// Smallest piece that a failing read is narrowed down to: a page, and a sector of today's disks.
const SECTOR_BYTES: u64 = 4096;
/// Failing reads of one block before the rest of it is given up: a dying disk takes seconds for each.
const FAILURES_PER_BLOCK: usize = 32;
/// Failing blocks of one file after which further ones are reported as they are.
const NARROWED_BLOCKS_PER_FILE: usize = 8;
/// How often progress is reported at least.
const TICK: Duration = Duration::from_millis(100);

/// One file to read, with its header if that is valid.
#[derive(Clone, Debug)]
pub struct PayloadFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Its header; values are looked at only where there is one.
    pub header: Option<ShardHeader>,
}

/// A range of a file that the disk did not give back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The file.
    pub path: PathBuf,
    /// First byte.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
    /// What the system said.
    pub reason: String,
    /// Tensors that lie in the range, in file order.
    pub tensors: Vec<String>,
}

/// What reading every byte found.
#[derive(Clone, Debug, Default)]
pub struct PayloadReport {
    /// Files that were looked at.
    pub n_files: usize,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that are holes of sparse files, which no disk holds.
    pub hole_bytes: u64,
    /// How long it took.
    pub elapsed: Duration,
    /// What could not be read, by file and offset; adjacent ranges are one.
    pub unreadable: Vec<Unreadable>,
    /// Values that no trained weight has.
    pub odd_values: OddValues,
    /// Whether it was stopped before the end.
    pub interrupted: bool,
}

/// Reads every byte of `files` through `source` and looks at every value.
///
/// `progress` is told the bytes done and the bytes in all, ten times a second and more; it stops the
/// reading by returning [`ControlFlow::Break`]. Memory is `READS_IN_FLIGHT` buffers of
/// `READ_BYTES`, whatever the size of the model. A read that fails is no error: it is a finding.
#[must_use]
pub fn read_all(
    files: &[PayloadFile],
    source: &dyn PayloadSource,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> PayloadReport {
    let started = Instant::now();
    let sizes: Vec<u64> = files.iter().map(|file| file.bytes).collect();
    let stored: Vec<Vec<(u64, u64)>> =
        files.iter().enumerate().map(|(at, file)| source.stored_ranges(at, file.bytes)).collect();
    let blocks = blocks(&stored, READ_BYTES);
    let total: u64 = blocks.iter().map(|block| block.bytes).sum();
    let work = Work {
        source,
        blocks: &blocks,
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        values: Values::new(files),
        failed_blocks: files.iter().map(|_| AtomicUsize::new(0)).collect(),
        unreadable: Mutex::new(Vec::new()),
    };
    let mut done = 0;
    let mut interrupted = false;
    std::thread::scope(|scope| {
        let (sender, receiver) = channel();
        for _ in 0..READS_IN_FLIGHT.min(blocks.len()) {
            let sender = sender.clone();
            let work = &work;
            // A thread that cannot be started leaves its share to the others.
            let _ = std::thread::Builder::new().spawn_scoped(scope, move || work.run(&sender));
        }
        drop(sender);
        loop {
            match receiver.recv_timeout(TICK) {
                Ok(bytes) => done += bytes,
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
            }
            if progress(done, total).is_break() {
                interrupted = true;
                work.stop.store(true, Relaxed);
            }
        }
    });
    let all_tried = work.next.load(Relaxed) >= blocks.len();
    let unreadable = work.unreadable.into_inner().unwrap_or_default();
    let unread: u64 = unreadable.iter().map(|piece| piece.bytes).sum();
    PayloadReport {
        n_files: files.len(),
        read_bytes: done.saturating_sub(unread),
        hole_bytes: sizes.iter().sum::<u64>().saturating_sub(total),
        elapsed: started.elapsed(),
        unreadable: merged(files, unreadable),
        // Half a reading says nothing of zeros: what was not read looks like them.
        odd_values: work.values.into_odd(files, all_tried && !interrupted),
        interrupted: interrupted || !all_tried,
    }
}

/// A range that failed, before it is named.
#[derive(Clone, Debug)]
struct Failed {
    file: usize,
    offset: u64,
    bytes: u64,
    reason: String,
}

/// What the reading threads share.
struct Work<'a> {
    source: &'a dyn PayloadSource,
    blocks: &'a [Block],
    next: AtomicUsize,
    stop: AtomicBool,
    values: Values,
    /// For each file, how many of its blocks failed.
    failed_blocks: Vec<AtomicUsize>,
    unreadable: Mutex<Vec<Failed>>,
}

impl Work<'_> {
    /// Takes blocks until there are none, or until it is told to stop.
    fn run(&self, done: &Sender<u64>) {
        let Ok(mut buffer) = MmapMut::map_anon(READ_BYTES as usize) else { return };
        while !self.stop.load(Relaxed) {
            let Some(block) = self.blocks.get(self.next.fetch_add(1, Relaxed)) else { return };
            let mut failed = Vec::new();
            self.read(*block, &mut buffer, &mut failed);
            if !failed.is_empty()
                && let Ok(mut all) = self.unreadable.lock()
            {
                all.append(&mut failed);
            }
            if done.send(block.bytes).is_err() {
                return;
            }
        }
    }

    /// Reads one block; what fails is halved until the failing pieces are as small as they get.
    fn read(&self, block: Block, buffer: &mut [u8], failed: &mut Vec<Failed>) {
        let failed_blocks = self.failed_blocks.get(block.file);
        let narrow = failed_blocks.is_some_and(|n| n.load(Relaxed) < NARROWED_BLOCKS_PER_FILE);
        let mut pieces = vec![block];
        while let Some(piece) = pieces.pop() {
            let Some(into) = buffer.get_mut(..piece.bytes as usize) else { continue };
            match self.fill(piece, into) {
                Ok(()) => self.values.look(piece.file, piece.offset, into),
                Err(_)
                    if narrow
                        && piece.bytes > SECTOR_BYTES
                        && failed.len() + pieces.len() < FAILURES_PER_BLOCK
                        && !self.stop.load(Relaxed) =>
                {
                    let half = (piece.bytes / 2).next_multiple_of(SECTOR_BYTES);
                    let (first, second) = piece.split(half);
                    pieces.extend([second, first]);
                }
                Err(reason) => failed.push(Failed {
                    file: piece.file,
                    offset: piece.offset,
                    bytes: piece.bytes,
                    reason,
                }),
            }
        }
        if let Some(count) = failed_blocks.filter(|_| !failed.is_empty()) {
            count.fetch_add(1, Relaxed);
        }
    }

    /// One range, as the engine reads it: short and interrupted reads go on.
    fn fill(&self, piece: Block, into: &mut [u8]) -> Result<(), String> {
        let mut got = 0;
        while let Some(rest) = into.get_mut(got..).filter(|rest| !rest.is_empty()) {
            match self.source.read_at(piece.file, piece.offset + got as u64, rest) {
                Ok(0) => return Err("the file ended".to_owned()),
                Ok(n) => got += n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }
}

/// Failed ranges by file and offset, adjacent ones joined, with the tensors that lie in them.
fn merged(files: &[PayloadFile], mut failed: Vec<Failed>) -> Vec<Unreadable> {
    failed.sort_by_key(|piece| (piece.file, piece.offset));
    let mut joined: Vec<Failed> = Vec::new();
    for piece in failed {
        match joined.last_mut() {
            Some(last)
                if last.file == piece.file
                    && last.offset + last.bytes == piece.offset
                    && last.reason == piece.reason =>
            {
                last.bytes += piece.bytes;
            }
            _ => joined.push(piece),
        }
    }
    joined
        .into_iter()
        .filter_map(|piece| {
            let file = files.get(piece.file)?;
            let header = file.header.as_ref();
            let tensors = header.map_or_else(Vec::new, |header| {
                overlapping(header, piece.offset, piece.bytes)
                    .map(|tensor| tensor.name.to_owned())
                    .collect()
            });
            Some(Unreadable {
                path: file.path.clone(),
                offset: piece.offset,
                bytes: piece.bytes,
                reason: piece.reason,
                tensors,
            })
        })
        .collect()
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
