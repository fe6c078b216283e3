//! Dense weights that are read for every batch, through two buffers: one is computed on while threads fill
//! the other, each a part of it at a time.
//!
//! Owns the order of what is read, the buffers, and the threads. Nothing is allocated once they run. An error
//! of a thread is handed over in the place of the unit that it could not read; whoever drops the stream
//! waits for the threads to end.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use tierkeep_mapping::{Arena, Lent};
use tierkeep_plans::budget::{Line, n_bounces};
use tierkeep_plans::catalogue::{Span, TENSOR_ALIGN};
use tierkeep_plans::units::round_up;

use crate::error::EngineError;
use crate::memory::Account;
use crate::shard_io::{ReadError, ReadFor, ShardFiles};

/// What one thread reads before it looks for more.
const PART_BYTES: usize = 4 << 20;

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

    /// Parts that it is read in.
    fn n_parts(&self) -> usize {
        self.reads.iter().map(|(_, span)| (span.bytes as usize).div_ceil(PART_BYTES)).sum()
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

/// A part of a unit that one thread reads.
#[derive(Debug)]
struct Part {
    position: usize,
    span: Span,
    /// Its place in the buffer, and bytes before it that are nobody's.
    into: Lent,
}

/// A unit whose buffer is being filled.
#[derive(Debug)]
struct Filling {
    position: usize,
    slot: usize,
    /// Parts that have not ended.
    n_left: usize,
    failed: Option<Failed>,
}

/// Why a part did not come.
#[derive(Debug)]
enum Failed {
    Read(ReadError),
    /// The disk's code panicked; what it said was told when it did.
    Panicked,
}

/// What all threads look at.
#[derive(Debug)]
struct State {
    /// Buffers that may be filled.
    empty: VecDeque<Lent>,
    /// Parts that nobody reads yet.
    parts: VecDeque<Part>,
    /// Units that are read or were and have not been asked for, in the order of the pass.
    filling: VecDeque<Filling>,
    /// The next position to be read, and where the pass ends.
    next: usize,
    end: usize,
    n_reading: usize,
    /// No more is to be read, ever.
    is_closed: bool,
}

impl State {
    /// Cuts the next unit of the pass into parts, if there is one and a buffer for it.
    fn begin_unit(&mut self, units: &Units) -> bool {
        if self.next >= self.end {
            return false;
        }
        let Some(mut rest) = self.empty.pop_front() else { return false };
        let position = self.next;
        self.next += 1;
        let slot = rest.slot();
        let unit = units.at(position);
        let mut at = 0;
        for &(start, span) in &unit.reads {
            let places = (span.offset..).step_by(PART_BYTES);
            let starts = (0..span.bytes as usize).step_by(PART_BYTES);
            for (inside, offset) in starts.zip(places) {
                let length = (span.bytes as usize - inside).min(PART_BYTES);
                let end = start + inside + length;
                let after = rest.split_off(end - at);
                let span = Span { offset, bytes: length as u64, ..span };
                self.parts.push_back(Part { position, span, into: rest });
                (rest, at) = (after, end);
            }
        }
        // What is behind the last part is nobody's.
        drop(rest);
        self.filling.push_back(Filling { position, slot, n_left: unit.n_parts(), failed: None });
        true
    }

    /// A part has ended; `failed` where it did not come.
    fn end_part(&mut self, position: usize, failed: Option<Failed>) {
        let is_its = |filling: &&mut Filling| filling.position == position;
        let Some(filling) = self.filling.iter_mut().find(is_its) else { return };
        filling.n_left = filling.n_left.saturating_sub(1);
        if failed.is_some() {
            filling.failed = filling.failed.take().or(failed);
            // What would follow is of no use to anyone.
            self.end = self.next;
        }
    }
}

#[derive(Debug)]
struct Shared {
    units: Units,
    files: Arc<ShardFiles>,
    state: Mutex<State>,
    /// There may be something to read, or the end.
    to_readers: Condvar,
    /// A part was read.
    to_engine: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a thread does: reads parts of units in the order of the pass, until it is closed.
    fn read_ahead(&self) {
        let mut state = self.state();
        loop {
            if state.is_closed {
                return;
            }
            let Some(mut part) = state.parts.pop_front() else {
                if state.begin_unit(&self.units) {
                    self.to_readers.notify_all();
                } else {
                    state = self.to_readers.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                continue;
            };
            state.n_reading += 1;
            drop(state);
            let Span { shard, offset, bytes } = part.span;
            let read = catch_unwind(AssertUnwindSafe(|| {
                let gap = part.into.len() - bytes as usize;
                self.files.read(ReadFor::Dense, shard, offset, &mut part.into[gap..])
            }));
            let failed = match read {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(Failed::Read(error)),
                Err(_) => Some(Failed::Panicked),
            };
            // Its part of the buffer is back before anyone hears of it.
            drop(part.into);
            state = self.state();
            state.n_reading -= 1;
            state.end_part(part.position, failed);
            self.to_engine.notify_one();
        }
    }
}

/// Weights that pass by.
#[derive(Debug)]
pub(super) struct Stream {
    shared: Arc<Shared>,
    buffers: Arena,
    /// The buffer that is computed on.
    current: Option<usize>,
    threads: Vec<JoinHandle<()>>,
}

/// Buffers: one is computed on, one is filled.
const N_BUFFERS: usize = 2;

impl Stream {
    /// Allocates both buffers and starts the threads; nothing is read yet.
    pub(super) fn new(
        units: Units,
        account: &mut Account,
        files: &Arc<ShardFiles>,
    ) -> Result<Self, EngineError> {
        let bytes = (round_up(units.buffer_bytes(), TENSOR_ALIGN), N_BUFFERS as u64);
        let buffers = account.arena(Line::StreamBuffers, bytes, false)?;
        let most_parts = units.all.iter().map(Unit::n_parts).max().unwrap_or(0);
        let state = State {
            empty: VecDeque::with_capacity(N_BUFFERS),
            parts: VecDeque::with_capacity(N_BUFFERS * most_parts),
            filling: VecDeque::with_capacity(N_BUFFERS),
            next: 0,
            end: 0,
            n_reading: 0,
            is_closed: false,
        };
        let shared = Arc::new(Shared {
            units,
            files: Arc::clone(files),
            state: Mutex::new(state),
            to_readers: Condvar::new(),
            to_engine: Condvar::new(),
        });
        let n_threads = n_bounces(files.how()) as usize;
        let mut stream =
            Self { shared, buffers, current: None, threads: Vec::with_capacity(n_threads) };
        for number in 0..n_threads {
            let shared = Arc::clone(&stream.shared);
            // An error drops the stream, which ends those that did start.
            let thread = thread::Builder::new()
                .name(format!("dense-stream-{number}"))
                .spawn(move || shared.read_ahead())
                .map_err(EngineError::Threads)?;
            stream.threads.push(thread);
        }
        Ok(stream)
    }

    /// Begins a pass over all layers that are streamed, and over the head so many times if it is.
    pub(super) fn begin(&mut self, n_heads: usize) {
        self.rest();
        let mut state = self.shared.state();
        state.empty.extend((0..N_BUFFERS).filter_map(|slot| self.buffers.lend(slot)));
        (state.next, state.end) = (0, self.shared.units.length(n_heads));
        self.shared.to_readers.notify_one();
    }

    /// Makes the next unit of the pass the current one; the buffer of the one before is filled again.
    pub(super) fn advance(&mut self) -> Result<(), EngineError> {
        let mut state = self.shared.state();
        if let Some(used) = self.current.take() {
            state.empty.extend(self.buffers.lend(used));
            self.shared.to_readers.notify_one();
        }
        loop {
            match state.filling.front() {
                // After a failure no more is begun, so that its buffer need not be filled again.
                Some(first) if first.n_left == 0 => {
                    let Some(Filling { slot, failed, .. }) = state.filling.pop_front() else {
                        continue;
                    };
                    return match failed {
                        None => {
                            self.current = Some(slot);
                            Ok(())
                        }
                        Some(Failed::Read(error)) => Err(error.into()),
                        Some(Failed::Panicked) => Err(EngineError::StreamEnded),
                    };
                }
                Some(_) => {}
                // A pass that was not begun, or is over: a bug, and not to be waited for.
                None if state.next >= state.end => return Err(EngineError::StreamEnded),
                None => {}
            }
            state = self.shared.to_engine.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends a pass, wherever it is: waits for the reads under way, and takes the buffers back.
    pub(super) fn rest(&mut self) {
        let mut state = self.shared.state();
        state.end = state.next;
        state.parts.clear();
        while state.n_reading > 0 {
            state = self.shared.to_engine.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.filling.clear();
        state.empty.clear();
        self.current = None;
    }

    /// The current unit.
    pub(super) fn current(&self) -> &[u8] {
        self.current.and_then(|slot| self.buffers.bytes(slot)).unwrap_or(&[])
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state();
            state.is_closed = true;
            state.parts.clear();
        }
        self.shared.to_readers.notify_all();
        for thread in self.threads.drain(..) {
            // Reads that panic are caught; what else could was told when it did.
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
        let files = Arc::new(
            ShardFiles::open(disk, &shards, (IoMode::Buffered, Default::default()), Vec::new())
                .unwrap(),
        );
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
        assert_eq!((read.all().bytes, read.all().reads), (1700, 17));
    }

    #[test]
    fn a_pass_that_is_given_up_leaves_nothing_behind() {
        let directory = tempfile::tempdir().unwrap();
        let mut stream = stream(&directory, 5);
        for n_taken in 0..5 {
            stream.begin(1);
            (0..n_taken).for_each(|_| _ = advance(&mut stream));
            stream.rest();
            assert_eq!((0..2).filter(|&slot| stream.buffers.bytes(slot).is_some()).count(), 2);
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
