//! A pool of persistent threads that run one task together.
//!
//! Owns: waking and waiting, the split of outputs over threads, the propagation of panics. Refuses:
//! queues, futures and I/O: a call returns when its task is done, and allocates nothing.
//!
//! A task is run as `f(worker)` for each worker in `0..threads`, worker 0 being the thread that
//! calls. Workers spin for some tens of microseconds after a task, since the next product of a
//! layer follows at once, and then sleep, since a read from disk may take milliseconds.
#![expect(
    unsafe_code,
    reason = "a borrowed task is lent to threads, which write disjoint parts of a slice"
)]

use std::{
    any::Any,
    cell::Cell,
    hint, io,
    marker::PhantomData,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicPtr, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::{affinity::pin_current_thread, products::Scratch};

/// How long a thread spins before it sleeps: longer than the gaps between the products of a layer,
/// shorter than a read from disk.
const SPIN: Duration = Duration::from_micros(50);

type Task<'a> = &'a (dyn Fn(usize) + Sync);
type Payload = Box<dyn Any + Send>;

thread_local! {
    /// Whether this thread is inside a task, of any pool.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// Alone on its lines of caches, which processors fetch in pairs: what the caller writes while workers watch
/// something else would take the line from them.
#[repr(align(128))]
struct Alone<T>(T);

struct Shared {
    /// Counts tasks; a change is the signal to begin one.
    generation: Alone<AtomicUsize>,
    /// The task, valid from the change of `generation` until `remaining` is zero; null asks the
    /// workers to end.
    task: AtomicPtr<Task<'static>>,
    /// Workers that have not finished the task.
    remaining: Alone<AtomicUsize>,
    /// Workers asleep, or about to sleep, on `wake`.
    sleepers: AtomicUsize,
    /// Whether the caller is asleep, or about to sleep, on `done` (0 or 1).
    waiting: AtomicUsize,
    /// The first panic of a worker; also what both sides hold while they decide to sleep.
    panic: Mutex<Option<Payload>>,
    wake: Condvar,
    done: Condvar,
}

impl Shared {
    fn panic(&self) -> MutexGuard<'_, Option<Payload>> {
        // Nothing panics while holding it, so that poison would mean nothing.
        self.panic.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Persistent threads that run products together.
///
/// Calls from several threads take turns. A call from within a task runs on the thread that makes
/// it, alone; it is correct, but tasks should not be nested.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller whose task is running.
    turn: Mutex<()>,
    /// Where products keep what they make of activations.
    pub(crate) scratch: Mutex<Scratch>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool of `threads` workers, the calling thread included; so `threads - 1` are started.
    ///
    /// `cpus` is empty, or names the processor that each worker is pinned to. The first is that
    /// of the calling thread, which is *not* pinned here, because threads that it starts later,
    /// such as for I/O, would inherit this; see [`crate::hold_current_thread`].
    ///
    /// # Errors
    ///
    /// When `threads` is 0, `cpus` is of another length, or the system refuses a thread or a
    /// processor.
    pub fn new(threads: usize, cpus: &[usize]) -> io::Result<Self> {
        if threads == 0 || !(cpus.is_empty() || cpus.len() == threads) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{threads} threads on {} processors", cpus.len()),
            ));
        }
        let shared = Arc::new(Shared {
            generation: Alone(AtomicUsize::new(0)),
            task: AtomicPtr::new(ptr::null_mut()),
            remaining: Alone(AtomicUsize::new(0)),
            sleepers: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            panic: Mutex::new(None),
            wake: Condvar::new(),
            done: Condvar::new(),
        });
        let mut pool = Self {
            shared,
            workers: Vec::with_capacity(threads - 1),
            turn: Mutex::new(()),
            scratch: Mutex::default(),
        };
        let (started, starts) = mpsc::channel();
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let started = started.clone();
            let cpu = cpus.get(worker).copied();
            let handle =
                thread::Builder::new().name(format!("kernels-{worker}")).spawn(move || {
                    let pinned = cpu.map_or(Ok(()), pin_current_thread);
                    // The receiver is gone only when an earlier worker failed to start.
                    let _ = started.send(pinned);
                    drop(started);
                    work(&shared, worker);
                })?;
            pool.workers.push(handle);
        }
        drop(started);
        for _ in 1..threads {
            // An error drops the pool, which stops the workers that did start.
            starts.recv().map_err(io::Error::other)??;
        }
        Ok(pool)
    }

    /// Number of workers, the calling thread included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(worker)` once for each worker in `0..threads()`, on its own thread, and returns
    /// when all have returned.
    ///
    /// # Panics
    ///
    /// When `f` does on any thread, after all have ended, with the same payload.
    pub fn run(&self, f: impl Fn(usize) + Sync) {
        if self.workers.is_empty() || IN_TASK.get() {
            (0..self.threads()).for_each(f);
            return;
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        let task: Task<'_> = &f;
        // Workers read both after they have seen the change of `generation`.
        shared.remaining.0.store(self.workers.len(), Relaxed);
        shared.task.store(ptr::from_ref(&task).cast::<Task<'static>>().cast_mut(), Relaxed);
        shared.generation.0.fetch_add(1, SeqCst);
        // A worker adds itself to `sleepers` before it looks at `generation` for the last time, so
        // that one of the two sides sees the other.
        if shared.sleepers.load(SeqCst) > 0 {
            drop(shared.panic());
            shared.wake.notify_all();
        }
        let own = run_task(task, 0);
        // Whatever happened here, `f` must outlive its use by the others.
        if !spin_until(|| shared.remaining.0.load(SeqCst) == 0) {
            let mut guard = shared.panic();
            shared.waiting.store(1, SeqCst);
            while shared.remaining.0.load(SeqCst) != 0 {
                guard = shared.done.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            shared.waiting.store(0, SeqCst);
        }
        let others = shared.panic().take();
        if let Some(payload) = own.err().or(others) {
            resume_unwind(payload);
        }
    }

    /// Calls `f(index, chunk)` for each chunk of `chunk_len` of `out`, the last one perhaps
    /// shorter; each worker has a contiguous range of chunks, in ascending order.
    ///
    /// # Panics
    ///
    /// When `chunk_len` is 0, or `f` does.
    pub fn for_each_chunk<T: Send>(
        &self,
        out: &mut [T],
        chunk_len: usize,
        f: impl Fn(usize, &mut [T]) + Sync,
    ) {
        self.for_each_chunk_with_scratch(out, chunk_len, &mut [], 0, |index, chunk, _| {
            f(index, chunk);
        });
    }

    /// As [`Pool::for_each_chunk`], with `scratch_len` elements of `scratch` that belong to the
    /// worker: `f(index, chunk, scratch)`. What a chunk leaves there the worker's next one finds.
    ///
    /// # Panics
    ///
    /// When `chunk_len` is 0, `scratch` is shorter than `threads() * scratch_len`, or `f` does.
    pub fn for_each_chunk_with_scratch<T: Send>(
        &self,
        out: &mut [T],
        chunk_len: usize,
        scratch: &mut [f32],
        scratch_len: usize,
        f: impl Fn(usize, &mut [T], &mut [f32]) + Sync,
    ) {
        assert!(chunk_len > 0, "chunks of no length");
        let threads = self.threads();
        assert!(scratch.len() >= threads * scratch_len, "scratch for {threads} workers");
        let chunks = out.len().div_ceil(chunk_len);
        let (out, scratch) = (Disjoint::new(out), Disjoint::new(scratch));
        let task = |worker: usize| {
            let own = share(chunks, threads, worker);
            if own.is_empty() {
                return;
            }
            let elements = own.start * chunk_len..(own.end * chunk_len).min(out.len);
            // SAFETY: `run` calls each worker number once, and the ranges of different workers do
            // not overlap: `share` cuts the chunks, and scratch is cut by the worker's number.
            let (mine, scratch) = unsafe {
                (
                    out.slice(elements),
                    scratch.slice(worker * scratch_len..(worker + 1) * scratch_len),
                )
            };
            for (index, chunk) in own.zip(mine.chunks_mut(chunk_len)) {
                f(index, chunk, scratch);
            }
        };
        if chunks == 1 { task(share_of_one(threads)) } else { self.run(task) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.task.store(ptr::null_mut(), SeqCst);
        self.shared.generation.0.fetch_add(1, SeqCst);
        drop(self.shared.panic());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of tasks, so there is none to report here.
            let _ = worker.join();
        }
    }
}

/// The body of a worker's thread.
fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        if !spin_until(|| shared.generation.0.load(SeqCst) != seen) {
            let mut guard = shared.panic();
            shared.sleepers.fetch_add(1, SeqCst);
            while shared.generation.0.load(SeqCst) == seen {
                guard = shared.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            shared.sleepers.fetch_sub(1, SeqCst);
        }
        seen = shared.generation.0.load(SeqCst);
        let task = shared.task.load(SeqCst);
        if task.is_null() {
            return;
        }
        // SAFETY: `Pool::run` stored the address of a task on its stack before it changed
        // `generation`, and stays in that call until `remaining`, which counts this worker, is 0.
        let task: Task<'_> = unsafe { *task };
        if let Err(payload) = run_task(task, worker) {
            shared.panic().get_or_insert(payload);
        }
        // From here on the task may be gone. `waiting` is set before the caller looks at
        // `remaining` for the last time, so that one of the two sides sees the other.
        if shared.remaining.0.fetch_sub(1, SeqCst) == 1 && shared.waiting.load(SeqCst) != 0 {
            drop(shared.panic());
            shared.done.notify_all();
        }
    }
}

fn run_task(task: Task<'_>, worker: usize) -> thread::Result<()> {
    IN_TASK.set(true);
    // The caller resumes the panic, so that nothing goes on with what the task left half done.
    let result = catch_unwind(AssertUnwindSafe(|| task(worker)));
    IN_TASK.set(false);
    result
}

/// Spins for [`SPIN`] at most; whether `condition` became true.
fn spin_until(condition: impl Fn() -> bool) -> bool {
    let mut start = None;
    loop {
        for _ in 0..16 {
            if condition() {
                return true;
            }
            hint::spin_loop();
        }
        // The clock is read only now and then: it costs more than the check.
        if start.get_or_insert_with(Instant::now).elapsed() >= SPIN {
            return false;
        }
    }
}

/// The contiguous part of `0..count` that worker `worker` of `threads` has.
fn share(count: usize, threads: usize, worker: usize) -> Range<usize> {
    count * worker / threads..count * (worker + 1) / threads
}

/// The worker whose share of one chunk is that chunk.
fn share_of_one(threads: usize) -> usize {
    threads - 1
}

/// A mutable slice that several threads write disjoint parts of.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it gives access to `T` only through unsafe functions, whose callers promise that parts
// do not overlap; elements are thereby sent to other threads, for which `T: Send` suffices.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// # Safety
    ///
    /// While the result lives nothing else may access this range through `self`.
    #[expect(clippy::mut_from_ref, reason = "callers promise that ranges are disjoint")]
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part of a slice");
        // SAFETY: within the slice that `new` borrowed, and the caller promises no overlap.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// # Safety
    ///
    /// Nothing else may access this element through `self` at the same time.
    pub(crate) unsafe fn write(&self, index: usize, value: T)
    where
        T: Copy,
    {
        assert!(index < self.len, "element of a slice");
        // SAFETY: within the slice that `new` borrowed, and the caller promises no overlap.
        unsafe { self.start.add(index).write(value) }
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
