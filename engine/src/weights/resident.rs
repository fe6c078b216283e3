//! Dense weights as copies: what goes into which buffer, and the reads that fill them, several at once.

use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

use tierkeep_plans::budget::Line;
use tierkeep_plans::catalogue::{Span, TENSOR_ALIGN};
use tierkeep_plans::units::round_up;

use crate::error::EngineError;
use crate::memory::{Account, Buffer};
use crate::shard_io::{ReadError, ReadFor, ShardFiles};

/// What one thread reads before it looks for more.
const PART_BYTES: usize = 8 << 20;

/// A part of a buffer and where its bytes are.
type Part<'a> = (&'a mut [u8], Span);

/// Buffers that are to be allocated and filled.
pub(super) struct Copies {
    /// Length of each buffer so far.
    lengths: Vec<u64>,
    /// What is to be read: buffer, place in it, place on disk.
    reads: Vec<(usize, usize, Span)>,
}

impl Copies {
    /// So many buffers, each empty.
    pub(super) fn new(n_buffers: usize) -> Self {
        Self { lengths: vec![0; n_buffers], reads: Vec::new() }
    }

    /// Makes room for a part of a weight in a buffer; returns where it begins.
    pub(super) fn add(&mut self, buffer: usize, span: Span) -> usize {
        let start = self.lengths[buffer];
        self.lengths[buffer] = round_up(start + span.bytes, TENSOR_ALIGN);
        self.reads.push((buffer, start as usize, span));
        start as usize
    }

    /// Bytes that are to be read.
    pub(super) fn bytes(&self) -> u64 {
        self.reads.iter().map(|(_, _, span)| span.bytes).sum()
    }

    /// Allocates the buffers and reads what was bound; `progress` of each read's bytes.
    pub(super) fn read(
        self,
        account: &mut Account,
        files: &ShardFiles,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Vec<Buffer>, EngineError> {
        let mut buffers = self
            .lengths
            .iter()
            .map(|&bytes| account.buffer(Line::DenseWeights, bytes))
            .collect::<Result<Vec<_>, _>>()?;
        let total = self.bytes();
        let jobs = parts(&mut buffers, self.reads);
        let n_threads = (files.how().depth.max(1) as usize).min(jobs.len());
        let jobs = Mutex::new(jobs.into_iter());
        let (to_engine, brought) = mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..n_threads {
                let (jobs, to_engine) = (&jobs, to_engine.clone());
                thread::Builder::new()
                    .name("load".to_owned())
                    .spawn_scoped(scope, move || read_all(files, jobs, &to_engine))
                    .map_err(EngineError::Threads)?;
            }
            drop(to_engine);
            let mut left = total;
            let mut failed = None;
            // Ends when all threads have: after an error they find nothing more to do.
            for answer in brought {
                match answer {
                    Ok(bytes) => {
                        left -= bytes;
                        progress(bytes);
                    }
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
            match failed {
                Some(error) => Err(EngineError::from(error)),
                // A thread that panicked said so; what it held is not there.
                None if left > 0 => Err(EngineError::LaneEnded),
                None => Ok(()),
            }
        })?;
        Ok(buffers)
    }
}

/// What is to be read, cut into parts that threads can take one after another.
fn parts(buffers: &mut [Buffer], reads: Vec<(usize, usize, Span)>) -> Vec<Part<'_>> {
    let mut all = Vec::new();
    // Of each buffer: what has not been given away, and where it begins.
    let mut rests: Vec<(&mut [u8], usize)> =
        buffers.iter_mut().map(|buffer| (buffer.bytes_mut(), 0)).collect();
    for (buffer, start, span) in reads {
        // Within a buffer reads follow each other.
        let (rest, at) = std::mem::take(&mut rests[buffer]);
        let (_, rest) = rest.split_at_mut(start - at);
        let (into, rest) = rest.split_at_mut(span.bytes as usize);
        rests[buffer] = (rest, start + span.bytes as usize);
        let places = (span.offset..).step_by(PART_BYTES);
        all.extend(into.chunks_mut(PART_BYTES).zip(places).map(|(into, offset)| {
            let bytes = into.len() as u64;
            (into, Span { offset, bytes, ..span })
        }));
    }
    all
}

/// What a thread does: one part after another, until there are none, or one cannot be read.
fn read_all<'a>(
    files: &ShardFiles,
    parts: &Mutex<impl Iterator<Item = Part<'a>>>,
    to_engine: &mpsc::Sender<Result<u64, ReadError>>,
) {
    loop {
        let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some((into, span)) = next else { return };
        let read = files.read(ReadFor::Dense, span.shard, span.offset, into);
        let failed = read.is_err();
        // Whoever listens is there until all threads have ended.
        let _ = to_engine.send(read.map(|()| span.bytes));
        if failed {
            // The others need not go on either.
            parts.lock().unwrap_or_else(PoisonError::into_inner).by_ref().for_each(drop);
            return;
        }
    }
}
