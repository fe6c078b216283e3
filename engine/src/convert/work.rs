//! One output file, made by several threads and written in order. Owns the threads, the bound on what
//! is made and not yet written, and the checksum.
//!
//! Threads take pieces in the order of the file and hand over what they made; the calling thread writes
//! it in that order, so that bytes and checksum depend on no thread. A thread that is ahead of the
//! writer by more than the window waits: memory is window times a piece, whatever the model.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use tierkeep_kernels::{Isa, Kernels};

use super::layout::{Job, ShardPlan};
use super::pieces::{Made, Maker, Piece, RowErrors, pieces};
use super::report::Tally;
use super::source::SourceFiles;
use super::writer::ShardWriter;
use super::{ConvertError, ConvertProgress};

/// Pieces that may be made and not yet written, besides one for each thread.
const WINDOW: usize = 2;
/// Scales are read back to be hashed in runs of this.
const READ_BACK_BYTES: u64 = 1 << 20;

/// What the threads share.
struct Shared {
    state: Mutex<State>,
    /// Something was made, or a thread ended.
    made: Condvar,
    /// Something was written, or the work stops.
    room: Condvar,
}

struct State {
    next_to_make: usize,
    n_written: usize,
    made: BTreeMap<usize, Result<Made, ConvertError>>,
    /// Buffers to be used again.
    spare: Vec<Made>,
    stop: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next piece to make and buffers for it, once there is room.
    fn take(&self, n_pieces: usize, window: usize) -> Option<(usize, Made)> {
        let mut state = self.lock();
        while !state.stop
            && state.next_to_make < n_pieces
            && state.next_to_make >= state.n_written + window
        {
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.stop || state.next_to_make >= n_pieces {
            return None;
        }
        let index = state.next_to_make;
        state.next_to_make += 1;
        Some((index, state.spare.pop().unwrap_or_default()))
    }

    fn hand_over(&self, index: usize, made: Result<Made, ConvertError>) {
        self.lock().made.insert(index, made);
        self.made.notify_one();
    }

    fn wait_for(&self, index: usize) -> Result<Made, ConvertError> {
        let mut state = self.lock();
        loop {
            if let Some(made) = state.made.remove(&index) {
                return made;
            }
            state = self.made.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn give_back(&self, made: Made) {
        let mut state = self.lock();
        state.spare.push(made);
        state.n_written += 1;
        self.room.notify_all();
    }

    fn stop(&self) {
        self.lock().stop = true;
        self.room.notify_all();
    }
}

/// Stops the threads however the writer leaves.
struct StopOnDrop<'a>(&'a Shared);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Makes one file and writes it, checksummed.
pub(super) fn write_shard(
    (shard, jobs): (&ShardPlan, &[Job]),
    source: &SourceFiles<'_>,
    threads: usize,
    writer: &mut ShardWriter<'_>,
    tally: &mut Tally,
    tell: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<(), ConvertError> {
    writer.write(&shard.header)?;
    let pieces = pieces(shard, jobs);
    let kernels = Kernels::new(Isa::best())?;
    let shared = Shared {
        state: Mutex::new(State {
            next_to_make: 0,
            n_written: 0,
            made: BTreeMap::new(),
            spare: Vec::new(),
            stop: false,
        }),
        made: Condvar::new(),
        room: Condvar::new(),
    };
    let threads = threads.clamp(1, pieces.len().max(1));
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&shared);
        let mut n_started = 0;
        for _ in 0..threads {
            let (shared, pieces, kernels) = (&shared, &pieces, &kernels);
            let run = move || {
                let mut maker = Maker::new(source, jobs, kernels);
                while let Some((index, mut made)) = shared.take(pieces.len(), threads + WINDOW) {
                    let result = maker.make(pieces[index], &mut made).map(|()| made);
                    shared.hand_over(index, result);
                }
            };
            // A thread that cannot be started leaves its share to the others.
            match std::thread::Builder::new().spawn_scoped(scope, run) {
                Ok(_) => n_started += 1,
                Err(source) if n_started == 0 => return Err(ConvertError::Threads { source }),
                Err(_) => break,
            }
        }
        let mut scales = Scales::default();
        for (index, piece) in pieces.iter().enumerate() {
            let made = shared.wait_for(index)?;
            scales.write(*piece, jobs, &made, writer)?;
            if let Piece::Rows { job, .. } = piece {
                let RowErrors { rows, sum, worst } = made.errors;
                tally.add_rows(jobs[*job].class, *job, (rows, sum, worst));
            }
            let told = tell(made.bytes_read, (made.weights.len() + made.scales.len()) as u64);
            shared.give_back(made);
            if told.is_break() {
                return Err(ConvertError::Interrupted);
            }
        }
        Ok(())
    })
}

/// Where the scales of the job in work go.
#[derive(Default)]
struct Scales {
    /// Where the next ones go, once the first rows have said where they all begin.
    next: Option<u64>,
}

impl Scales {
    fn write(
        &mut self,
        piece: Piece,
        jobs: &[Job],
        made: &Made,
        writer: &mut ShardWriter<'_>,
    ) -> Result<(), ConvertError> {
        match piece {
            Piece::Zeros(_) | Piece::Copy { .. } => writer.write(&made.weights),
            Piece::Rows { job, first, .. } => {
                let at = match self.next.filter(|_| first > 0) {
                    Some(at) => at,
                    None => writer.position() + jobs[job].weight_bytes_out(),
                };
                writer.write(&made.weights)?;
                writer.write_apart(&made.scales, at)?;
                self.next = Some(at + made.scales.len() as u64);
                Ok(())
            }
            Piece::Scales { job } => {
                self.next = None;
                writer.take_in(jobs[job].scale_bytes_out(), READ_BACK_BYTES)
            }
        }
    }
}

/// Where a conversion stands, as it is told.
pub(super) struct Teller<'a> {
    pub(super) state: ConvertProgress,
    pub(super) progress: &'a mut dyn FnMut(ConvertProgress) -> ControlFlow<()>,
}

impl Teller<'_> {
    /// Adds what was read and written.
    pub(super) fn add(&mut self, read: u64, written: u64) -> ControlFlow<()> {
        self.state.bytes_read.0 += read;
        self.state.bytes_written.0 += written;
        (self.progress)(self.state)
    }
}
