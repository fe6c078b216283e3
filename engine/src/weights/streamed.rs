//! Dense weights that are read for every batch, through two buffers: one is computed on while a thread fills
//! the other.
//!
//! Owns the order of what is read, the buffers, and the thread. Nothing is allocated once it runs. An error
//! of the thread is handed over in the place of the unit that it could not read; whoever drops the stream
//! waits for the thread to end.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use tierkeep_plans::budget::Line;
use tierkeep_plans::catalogue::{Span, TENSOR_ALIGN};
use tierkeep_plans::units::round_up;

use crate::error::EngineError;
use crate::memory::{Account, Buffer};
use crate::shard_io::{ReadError, ReadFor, ShardFiles};

/// What is read together: a layer or a sub-block of one, or some rows of the head.
#[derive(Clone, Debug, Default)]
pub(super) struct Unit {
    /// Place in the buffer, place on disk.
    reads: Vec<(usize, Span)>,
    bytes: u64,
}

impl Unit {
    /// Makes room for a part of a weight; returns where it begins in the buffer.
    pub(super) fn add(&mut self, span: Span) -> usize {
        let start = self.bytes;
        self.bytes = round_up(start + span.bytes, TENSOR_ALIGN);
        self.reads.push((start as usize, span));
        start as usize
    }
}

/// Everything that is streamed: layers in ascending order, sub-block by sub-block where they have any, then
/// the head piece by piece.
#[derive(Debug)]
pub(super) struct Units {
    all: Vec<Unit>,
    /// How many are of layers.
    n_parts: usize,
}

impl Units {
    /// So many parts of layers, each empty, and no head.
    pub(super) fn new(n_parts: usize) -> Self {
        Self { all: vec![Unit::default(); n_parts], n_parts }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn part_mut(&mut self, at: usize) -> &mut Unit {
        &mut self.all[at]
    }

    pub(super) fn add_head(&mut self, piece: Unit) {
        self.all.push(piece);
    }

    /// What a buffer must hold: the largest part of a layer. Pieces of the head are made to fit.
    pub(super) fn buffer_bytes(&self) -> u64 {
        self.all[..self.n_parts].iter().map(|unit| unit.bytes).max().unwrap_or(0)
    }

    /// The unit at a position of a pass: the head's pieces follow the layers as often as it is computed.
    fn at(&self, position: usize) -> &Unit {
        let n_pieces = (self.all.len() - self.n_parts).max(1);
        match position.checked_sub(self.n_parts) {
            None => &self.all[position],
            Some(past) => &self.all[self.n_parts + past % n_pieces],
        }
    }

    /// Positions of a pass in which the head is computed `n_heads` times.
    fn length(&self, n_heads: usize) -> usize {
        self.n_parts + n_heads * (self.all.len() - self.n_parts)
    }
}

/// What both threads look at.
#[derive(Debug)]
struct State {
    /// Buffers that may be filled.
    empty: Vec<Buffer>,
    /// Buffers that were filled, in the order of the pass, and whether that worked.
    filled: VecDeque<(Buffer, Result<(), ReadError>)>,
    /// The next position to be read, and where the pass ends.
    next: usize,
    end: usize,
    is_reading: bool,
    /// No more is to be read, ever.
    is_closed: bool,
    /// The thread has left.
    is_gone: bool,
}

#[derive(Debug)]
struct Shared {
    units: Units,
    files: Arc<ShardFiles>,
    state: Mutex<State>,
    /// There may be something to read, or the end.
    to_reader: Condvar,
    /// Something was read.
    to_engine: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the thread does: fills empty buffers in the order of the pass, until it is closed.
    fn read_ahead(&self) {
        let _leaving = Leaving(self);
        let mut state = self.state();
        loop {
            if state.is_closed {
                return;
            }
            let buffer = if state.next < state.end { state.empty.pop() } else { None };
            let Some(mut buffer) = buffer else {
                state = self.to_reader.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let position = state.next;
            state.next += 1;
            state.is_reading = true;
            drop(state);
            let result = self.fill(position, &mut buffer);
            state = self.state();
            state.is_reading = false;
            if result.is_err() {
                // What would follow is of no use to anyone.
                state.end = state.next;
            }
            state.filled.push_back((buffer, result));
            self.to_engine.notify_one();
        }
    }

    fn fill(&self, position: usize, buffer: &mut Buffer) -> Result<(), ReadError> {
        for (start, span) in &self.units.at(position).reads {
            let into = &mut buffer.bytes_mut()[*start..*start + span.bytes as usize];
            self.files.read(ReadFor::Dense, span.shard, span.offset, into)?;
        }
        Ok(())
    }
}

/// Says that the thread is gone, however it went: nobody waits for it for ever.
struct Leaving<'a>(&'a Shared);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        (state.is_gone, state.is_reading) = (true, false);
        self.0.to_engine.notify_one();
    }
}

/// Weights that pass by.
#[derive(Debug)]
pub(super) struct Stream {
    shared: Arc<Shared>,
    /// The buffer that is computed on.
    current: Option<Buffer>,
    thread: Option<JoinHandle<()>>,
}

impl Stream {
    /// Allocates both buffers and starts the thread; nothing is read yet.
    pub(super) fn new(
        units: Units,
        account: &mut Account,
        files: &Arc<ShardFiles>,
    ) -> Result<Self, EngineError> {
        let bytes = units.buffer_bytes();
        let mut empty = Vec::with_capacity(2);
        for _ in 0..2 {
            empty.push(account.buffer(Line::StreamBuffers, bytes)?);
        }
        let state = State {
            empty,
            filled: VecDeque::with_capacity(2),
            next: 0,
            end: 0,
            is_reading: false,
            is_closed: false,
            is_gone: false,
        };
        let shared = Arc::new(Shared {
            units,
            files: Arc::clone(files),
            state: Mutex::new(state),
            to_reader: Condvar::new(),
            to_engine: Condvar::new(),
        });
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("dense-stream".to_owned())
            .spawn(move || of_thread.read_ahead())
            .map_err(EngineError::Threads)?;
        Ok(Self { shared, current: None, thread: Some(thread) })
    }

    /// Begins a pass over all layers that are streamed, and over the head so many times if it is.
    pub(super) fn begin(&mut self, n_heads: usize) {
        self.rest();
        let mut state = self.shared.state();
        (state.next, state.end) = (0, self.shared.units.length(n_heads));
        self.shared.to_reader.notify_one();
    }

    /// Makes the next unit of the pass the current one; the buffer of the one before is filled again.
    pub(super) fn advance(&mut self) -> Result<(), EngineError> {
        let mut state = self.shared.state();
        if let Some(used) = self.current.take() {
            state.empty.push(used);
            self.shared.to_reader.notify_one();
        }
        loop {
            if let Some((buffer, result)) = state.filled.pop_front() {
                return match result {
                    Ok(()) => {
                        self.current = Some(buffer);
                        Ok(())
                    }
                    Err(error) => {
                        state.empty.push(buffer);
                        Err(error.into())
                    }
                };
            }
            // A pass that was not begun, or a thread that panicked: bugs, and not to be waited for.
            if state.is_gone || !state.is_reading && state.next >= state.end {
                return Err(EngineError::StreamEnded);
            }
            state = self.shared.to_engine.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends a pass, wherever it is: waits for the read under way, and takes the buffers back.
    pub(super) fn rest(&mut self) {
        let mut state = self.shared.state();
        state.end = state.next;
        while state.is_reading {
            state = self.shared.to_engine.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        while let Some((buffer, _)) = state.filled.pop_front() {
            state.empty.push(buffer);
        }
        state.empty.extend(self.current.take());
    }

    /// The current unit.
    pub(super) fn current(&self) -> &[u8] {
        self.current.as_ref().map_or(&[], Buffer::bytes)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.shared.state().is_closed = true;
        self.shared.to_reader.notify_one();
        if let Some(thread) = self.thread.take() {
            // What it panicked with was told when it did.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test stops where something is wrong")]
mod tests {
    use super::*;
    use crate::disk::SystemDisk;
    use tierkeep_plans::budget::{Ledger, LedgerLine};
    use tierkeep_plans::catalogue::Shard;
    use tierkeep_plans::plan::IoMode;
    use tierkeep_plans::units::Bytes;

    /// Three layers and a head in two pieces, each of 100 bytes that are its number.
    fn stream(directory: &tempfile::TempDir, n_units: usize) -> Stream {
        let path = directory.path().join("shard");
        let bytes: Vec<u8> = (0..n_units * 100).map(|at| (at / 100) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let shards = [Shard { path, bytes: bytes.len() as u64 }];
        let disk = Arc::new(SystemDisk);
        let files =
            Arc::new(ShardFiles::open(disk, &shards, IoMode::Buffered, Buffer::default()).unwrap());
        let line = Line::StreamBuffers;
        let ledger = Ledger(vec![LedgerLine { line, bytes: Bytes(256), note: String::new() }]);
        let mut units = Units::new(3);
        let span = |at: u64| Span { shard: 0, offset: at * 100, bytes: 100 };
        (0..3).for_each(|at| _ = units.part_mut(at).add(span(at as u64)));
        for at in 3..5 {
            let mut piece = Unit::default();
            piece.add(span(at));
            units.add_head(piece);
        }
        let mut account = Account::new(&ledger);
        let stream = Stream::new(units, &mut account, &files).unwrap();
        assert_eq!(account.bound(line), Bytes(256));
        stream
    }

    fn advance(stream: &mut Stream) -> u8 {
        stream.advance().unwrap();
        stream.current()[99]
    }

    #[test]
    fn a_pass_is_every_layer_and_the_head_as_often_as_it_is_computed() {
        let directory = tempfile::tempdir().unwrap();
        let mut stream = stream(&directory, 5);
        for n_heads in [0, 1, 3] {
            stream.begin(n_heads);
            let passed: Vec<u8> = (0..3 + 2 * n_heads).map(|_| advance(&mut stream)).collect();
            let head = [3, 4].repeat(n_heads);
            assert_eq!(passed, [vec![0, 1, 2], head].concat());
            // One too many is an error, and nobody waits for what never comes.
            assert!(matches!(stream.advance(), Err(EngineError::StreamEnded)));
        }
        let read = stream.shared.files.counter().now();
        assert_eq!((read.dense.bytes, read.dense.reads), (1700, 17));
        assert_eq!(read.all(), read.dense);
    }

    #[test]
    fn a_pass_that_is_given_up_leaves_nothing_behind() {
        let directory = tempfile::tempdir().unwrap();
        let mut stream = stream(&directory, 5);
        for n_taken in 0..5 {
            stream.begin(1);
            (0..n_taken).for_each(|_| _ = advance(&mut stream));
            stream.rest();
            assert_eq!(stream.shared.state().empty.len(), 2);
            stream.begin(0);
            assert_eq!(advance(&mut stream), 0, "a pass begins with the first layer");
        }
    }

    #[test]
    fn an_error_comes_in_the_place_of_what_could_not_be_read() {
        let directory = tempfile::tempdir().unwrap();
        // The file ends before the head's last piece.
        let mut stream = stream(&directory, 4);
        for _ in 0..2 {
            stream.begin(1);
            (0..4).for_each(|at| assert_eq!(advance(&mut stream), at));
            let error = stream.advance().unwrap_err().to_string();
            assert!(error.contains("at offset 400 got 0: the file ended"), "{error}");
            assert!(matches!(stream.advance(), Err(EngineError::StreamEnded)));
        }
    }

    /// The thread holds what both share: when nobody does any more, it is gone.
    #[test]
    fn the_thread_never_outlives_its_stream() {
        let directory = tempfile::tempdir().unwrap();
        for n_taken in 0..4 {
            let mut stream = stream(&directory, 5);
            let shared = Arc::downgrade(&stream.shared);
            stream.begin(1);
            (0..n_taken).for_each(|_| _ = advance(&mut stream));
            drop(stream);
            assert!(shared.upgrade().is_none());
        }
        let mut failed = stream(&directory, 0);
        let shared = Arc::downgrade(&failed.shared);
        failed.begin(1);
        assert!(failed.advance().is_err());
        drop(failed);
        assert!(shared.upgrade().is_none());
    }
}
