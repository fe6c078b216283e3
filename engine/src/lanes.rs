//! Threads that read experts while others compute.
//!
//! Owns the threads, the order in which they read, and how long they read and were waited for. Each read
//! goes into a slot that is lent to the thread; which expert, which slot and what a failed read means is
//! the store's. Nothing is allocated once they run, and a thread without work sleeps.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use tierkeep_mapping::Lent;
use tierkeep_plans::catalogue::ExpertLayout;

use crate::error::EngineError;
use crate::shard_io::{ReadError, ShardFiles};

/// The expert of a read, by layer and number.
pub(crate) type Target = (u32, u32);

/// A read that is asked for.
#[derive(Debug)]
struct Job {
    target: Target,
    layout: ExpertLayout,
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

#[derive(Debug)]
struct State {
    /// Not begun, in the order in which they are to be.
    queue: VecDeque<Job>,
    /// Ended, and not asked for yet.
    ended: Vec<(Target, Outcome)>,
    /// Threads that read.
    n_reading: usize,
    /// Since when at least one does.
    reading_since: Option<Instant>,
    /// No more is to be read, ever.
    is_closed: bool,
}

impl State {
    fn has_ended(&self, target: Target) -> bool {
        self.ended.iter().any(|(ended, _)| *ended == target)
    }

    /// Nothing is read or to be read.
    fn is_idle(&self) -> bool {
        self.n_reading == 0 && self.queue.is_empty()
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
            let read = catch_unwind(AssertUnwindSafe(|| {
                read_expert(&self.files, &job.layout, &mut job.into)
            }));
            let outcome = match read {
                Ok(Ok(())) => Outcome::Read,
                Ok(Err(error)) => Outcome::Failed(error),
                Err(_) => Outcome::Panicked,
            };
            // The slot is back before anyone hears that the read ended.
            drop(job.into);
            state = self.state();
            state.n_reading -= 1;
            if state.n_reading == 0
                && let Some(since) = state.reading_since.take()
            {
                self.files.counter().add_window(since.elapsed());
            }
            state.ended.push((job.target, outcome));
            self.to_engine.notify_all();
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
    /// `n_lanes` threads for at most `n_jobs` reads that were begun and not waited for.
    ///
    /// # Errors
    /// [`EngineError::Threads`].
    pub(crate) fn new(
        n_lanes: usize,
        n_jobs: usize,
        files: &Arc<ShardFiles>,
    ) -> Result<Self, EngineError> {
        let state = State {
            queue: VecDeque::with_capacity(n_jobs),
            ended: Vec::with_capacity(n_jobs),
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

    /// Begins to read an expert, after those that were begun before it.
    pub(crate) fn begin(&self, target: Target, layout: ExpertLayout, into: Lent) {
        self.shared.state().queue.push_back(Job { target, layout, into });
        self.shared.to_lanes.notify_one();
    }

    /// Waits until an expert that was begun is read. Its slot is back whatever happened.
    ///
    /// # Errors
    /// That of the read; [`EngineError::LaneEnded`] where it did not come to an end, or was never begun.
    pub(crate) fn wait(&self, target: Target) -> Result<(), EngineError> {
        let mut state = self.shared.state();
        let mut waiting_since = None;
        let outcome = loop {
            if let Some(at) = state.ended.iter().position(|(ended, _)| *ended == target) {
                break state.ended.swap_remove(at).1;
            }
            // A read that nobody begun is a bug, and not to be waited for.
            if state.is_idle() {
                break Outcome::Panicked;
            }
            waiting_since.get_or_insert_with(Instant::now);
            state = self.shared.to_engine.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        if let Some(since) = waiting_since {
            self.shared.files.counter().add_waited(since.elapsed());
        }
        match outcome {
            Outcome::Read => Ok(()),
            Outcome::Failed(error) => Err(error.into()),
            Outcome::Panicked => Err(EngineError::LaneEnded),
        }
    }

    /// Whether the read of an expert has ended, however; one that there is not has.
    pub(crate) fn has_ended(&self, target: Target) -> bool {
        let state = self.shared.state();
        state.has_ended(target) || state.is_idle()
    }

    /// Waits until some read that was begun has ended and was not asked for yet; not for one that nobody
    /// begun.
    pub(crate) fn wait_for_any(&self) {
        let mut state = self.shared.state();
        let mut waiting_since = None;
        while state.ended.is_empty() && !state.is_idle() {
            waiting_since.get_or_insert_with(Instant::now);
            state = self.shared.to_engine.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        if let Some(since) = waiting_since {
            self.shared.files.counter().add_waited(since.elapsed());
        }
    }

    /// Gives up what was begun: nothing new is read, and what is under way has ended when this returns.
    /// `ended` is called for each read that was not waited for and did end well.
    pub(crate) fn give_up(&self, mut ended: impl FnMut(Target)) {
        let mut state = self.shared.state();
        state.queue.clear();
        while state.n_reading > 0 {
            state = self.shared.to_engine.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        for (target, outcome) in state.ended.drain(..) {
            match outcome {
                Outcome::Read => ended(target),
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

/// Brings an expert: one read for each run of adjacent tensors.
///
/// # Errors
/// As [`ShardFiles::read_extent`].
pub(crate) fn read_expert(
    files: &ShardFiles,
    layout: &ExpertLayout,
    slot: &mut [u8],
) -> Result<(), ReadError> {
    for extent in layout.extents() {
        files.read_extent(extent, slot)?;
    }
    Ok(())
}
