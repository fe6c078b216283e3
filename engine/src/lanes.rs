//! Threads that read experts while others compute.
//!
//! Owns the threads, the order in which they read, and how long they read and were waited for. An expert is
//! read in pieces, each into a part of its slot that is lent to the thread; which expert, which slot and what a failed read means is
//! the store's. Nothing is allocated once they run, and a thread without work sleeps.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use tierkeep_mapping::Lent;
use tierkeep_plans::catalogue::ExpertLayout;

use crate::error::EngineError;
use crate::shard_io::{Piece, ReadError, ShardFiles, pieces};

/// The expert of a read, by layer and number.
pub(crate) type Target = (u32, u32);

/// A read that is asked for: a piece of an expert.
#[derive(Debug)]
struct Job {
    target: Target,
    piece: Piece,
    /// Its place in the slot, and bytes before it that are nobody's.
    into: Lent,
}

/// How a read ended.
#[derive(Debug)]
enum Outcome {
    Read,
    Failed(ReadError),
    /// The disk's code panicked; what it said was told when it did.
    Panicked,
}

/// An expert that was begun and not asked for yet.
#[derive(Debug)]
struct Begun {
    target: Target,
    /// Pieces that have not ended.
    n_left: usize,
    /// What became of those that have; of several that failed the first in the file.
    outcome: Outcome,
    failed_at: u64,
}

#[derive(Debug)]
struct State {
    /// Not begun, in the order in which they are to be.
    queue: VecDeque<Job>,
    begun: Vec<Begun>,
    /// Threads that read.
    n_reading: usize,
    /// Since when at least one does.
    reading_since: Option<Instant>,
    /// No more is to be read, ever.
    is_closed: bool,
}

impl State {
    /// Position of an expert that was begun.
    fn position(&self, target: Target) -> Option<usize> {
        self.begun.iter().position(|begun| begun.target == target)
    }

    fn has_ended(&self, target: Target) -> bool {
        self.position(target).is_some_and(|at| self.begun[at].n_left == 0)
    }

    /// Nothing is read or to be read.
    fn is_idle(&self) -> bool {
        self.n_reading == 0 && self.queue.is_empty()
    }

    /// A piece has ended. Those of its expert that are not begun are of no use once one has failed.
    fn end(&mut self, target: Target, offset: u64, outcome: Outcome) {
        let Some(at) = self.position(target) else { return };
        let begun = &mut self.begun[at];
        begun.n_left = begun.n_left.saturating_sub(1);
        match outcome {
            Outcome::Read => {}
            Outcome::Failed(_) | Outcome::Panicked => {
                if offset < begun.failed_at {
                    (begun.outcome, begun.failed_at) = (outcome, offset);
                }
                let before = self.queue.len();
                self.queue.retain(|job| job.target != target);
                begun.n_left = begun.n_left.saturating_sub(before - self.queue.len());
            }
        }
    }
}

#[derive(Debug)]
struct Shared {
    files: Arc<ShardFiles>,
    state: Mutex<State>,
    /// There is something to read, or the end.
    to_lanes: Condvar,
    /// A read ended.
    to_engine: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a thread does until it is closed.
    fn read_all(&self) {
        let mut state = self.state();
        loop {
            if state.is_closed {
                return;
            }
            let Some(mut job) = state.queue.pop_front() else {
                state = self.to_lanes.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.n_reading += 1;
            state.reading_since.get_or_insert_with(Instant::now);
            drop(state);
            let Piece { place, bytes, offset, .. } = job.piece;
            let read = catch_unwind(AssertUnwindSafe(|| {
                // What comes before its place is a gap between two reads of the slot.
                let gap = job.into.len() - bytes as usize;
                debug_assert!(gap as u64 <= place);
                self.files.read_piece(&job.piece, &mut job.into[gap..])
            }));
            let outcome = match read {
                Ok(Ok(())) => Outcome::Read,
                Ok(Err(error)) => Outcome::Failed(error),
                Err(_) => Outcome::Panicked,
            };
            // Its part of the slot is back before anyone hears that the read ended.
            drop(job.into);
            state = self.state();
            state.n_reading -= 1;
            if state.n_reading == 0
                && let Some(since) = state.reading_since.take()
            {
                self.files.counter().add_window(since.elapsed());
            }
            state.end(job.target, offset, outcome);
            if state.has_ended(job.target) || state.is_idle() {
                self.to_engine.notify_all();
            }
        }
    }
}

/// The threads.
#[derive(Debug)]
pub(crate) struct Lanes {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Lanes {
    /// `n_lanes` threads for at most `n_experts` that were begun and not waited for, each of at most
    /// `n_pieces`.
    ///
    /// # Errors
    /// [`EngineError::Threads`].
    pub(crate) fn new(
        n_lanes: usize,
        (n_experts, n_pieces): (usize, usize),
        files: &Arc<ShardFiles>,
    ) -> Result<Self, EngineError> {
        let state = State {
            queue: VecDeque::with_capacity(n_experts.saturating_mul(n_pieces)),
            begun: Vec::with_capacity(n_experts),
            n_reading: 0,
            reading_since: None,
            is_closed: false,
        };
        let shared = Arc::new(Shared {
            files: Arc::clone(files),
            state: Mutex::new(state),
            to_lanes: Condvar::new(),
            to_engine: Condvar::new(),
        });
        let mut lanes = Self { shared, threads: Vec::with_capacity(n_lanes) };
        for lane in 0..n_lanes {
            let shared = Arc::clone(&lanes.shared);
            // An error drops the lanes, which ends those that did start.
            let thread = thread::Builder::new()
                .name(format!("expert-reads-{lane}"))
                .spawn(move || shared.read_all())
                .map_err(EngineError::Threads)?;
            lanes.threads.push(thread);
        }
        Ok(lanes)
    }

    /// Begins to read an expert, after those that were begun before it: its pieces side by side.
    pub(crate) fn begin(&self, target: Target, layout: &ExpertLayout, into: Lent) {
        let (files, mut rest, mut at) = (&self.shared.files, into, 0);
        let (mode, how) = (files.mode(), files.how());
        let mut state = self.shared.state();
        let mut n_pieces = 0;
        for piece in layout.extents().iter().flat_map(|extent| pieces(extent, mode, how)) {
            let end = (piece.place + piece.bytes) as usize;
            let after = rest.split_off(end - at);
            state.queue.push_back(Job { target, piece, into: rest });
            (rest, at) = (after, end);
            n_pieces += 1;
        }
        // What is behind the last piece is nobody's.
        drop(rest);
        state.begun.push(Begun {
            target,
            n_left: n_pieces,
            outcome: Outcome::Read,
            failed_at: u64::MAX,
        });
        drop(state);
        match n_pieces {
            1 => self.shared.to_lanes.notify_one(),
            _ => self.shared.to_lanes.notify_all(),
        }
    }

    /// Waits until an expert that was begun is read. Its slot is back whatever happened.
    ///
    /// # Errors
    /// That of the read; [`EngineError::LaneEnded`] where it did not come to an end, or was never begun.
    pub(crate) fn wait(&self, target: Target) -> Result<(), EngineError> {
        let mut state = self.shared.state();
        let mut waiting_since = None;
        let outcome = loop {
            match state.position(target) {
                Some(at) if state.begun[at].n_left == 0 => {
                    break state.begun.swap_remove(at).outcome;
                }
                // A read that nobody begun is a bug, and not to be waited for.
                None => break Outcome::Panicked,
                Some(_) => {}
            }
            waiting_since.get_or_insert_with(Instant::now);
            state = self.shared.to_engine.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        self.add_waited(waiting_since);
        match outcome {
            Outcome::Read => Ok(()),
            Outcome::Failed(error) => Err(error.into()),
            Outcome::Panicked => Err(EngineError::LaneEnded),
        }
    }

    fn add_waited(&self, since: Option<Instant>) {
        if let Some(since) = since {
            self.shared.files.counter().add_waited(since.elapsed());
        }
    }

    /// Whether the read of an expert has ended, however; one that there is not has.
    pub(crate) fn has_ended(&self, target: Target) -> bool {
        let state = self.shared.state();
        state.position(target).is_none() || state.has_ended(target)
    }

    /// Waits until some read that was begun has ended and was not asked for yet; not for one that nobody
    /// begun.
    pub(crate) fn wait_for_any(&self) {
        let mut state = self.shared.state();
        let mut waiting_since = None;
        while state.begun.iter().all(|begun| begun.n_left > 0) && !state.is_idle() {
            waiting_since.get_or_insert_with(Instant::now);
            state = self.shared.to_engine.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        self.add_waited(waiting_since);
    }

    /// Gives up what was begun: nothing new is read, and what is under way has ended when this returns.
    /// `ended` is called for each read that was not waited for and did end well.
    pub(crate) fn give_up(&self, mut ended: impl FnMut(Target)) {
        let mut state = self.shared.state();
        let State { queue, begun, .. } = &mut *state;
        for job in queue.drain(..) {
            // What lacks a piece never ends well.
            if let Some(begun) = begun.iter_mut().find(|begun| begun.target == job.target) {
                begun.outcome = Outcome::Panicked;
            }
        }
        while state.n_reading > 0 {
            state = self.shared.to_engine.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        for begun in state.begun.drain(..) {
            match begun.outcome {
                Outcome::Read => ended(begun.target),
                Outcome::Failed(_) | Outcome::Panicked => {}
            }
        }
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state();
            state.is_closed = true;
            state.queue.clear();
        }
        self.shared.to_lanes.notify_all();
        for thread in self.threads.drain(..) {
            // Reads that panic are caught; what else could was told when it did.
            let _ = thread.join();
        }
    }
}

/// Brings an expert, piece after piece.
///
/// # Errors
/// As [`ShardFiles::read_piece`].
pub(crate) fn read_expert(
    files: &ShardFiles,
    layout: &ExpertLayout,
    slot: &mut [u8],
) -> Result<(), ReadError> {
    let (mode, how) = (files.mode(), files.how());
    for piece in layout.extents().iter().flat_map(|extent| pieces(extent, mode, how)) {
        let start = piece.place as usize;
        files.read_piece(&piece, &mut slot[start..start + piece.bytes as usize])?;
    }
    Ok(())
}

/// Reads that bring an expert.
pub(crate) fn n_pieces(files: &ShardFiles, layout: &ExpertLayout) -> usize {
    let (mode, how) = (files.mode(), files.how());
    layout.extents().iter().map(|extent| pieces(extent, mode, how).count()).sum()
}
