//! Threads that are held to one processor, and where they may run again afterwards.
//!
//! A pool's own threads are held until they end. The one that calls belongs to somebody else: it is lent,
//! so what it was allowed before is remembered and given back by whoever held it last.

use std::{
    cell::OnceCell,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Where a thread may run.
#[derive(Debug)]
struct Place {
    /// Names the thread to the system while it lives: the name may be another's afterwards.
    thread: system::Id,
    is_alive: bool,
    /// How many [`Held`] there are of it.
    n_holders: usize,
    /// Where it was allowed to run before it was held.
    former: Option<system::Set>,
    /// The processor that it is held to now.
    at: Option<usize>,
}

impl Place {
    fn hold(&mut self, cpu: usize) -> io::Result<()> {
        if self.at == Some(cpu) {
            return Ok(());
        }
        let only = system::one(cpu)?;
        if self.at.is_none() {
            self.former = Some(system::allowed(self.thread)?);
        }
        system::allow(self.thread, &only)?;
        self.at = Some(cpu);
        Ok(())
    }

    /// Gives back what it was allowed before, unless it has ended.
    fn release(&mut self) {
        if self.at.take().is_some()
            && self.is_alive
            && let Some(former) = self.former.take()
        {
            // Where the system took those processors away meanwhile, there is nothing to give back.
            let _ = system::allow(self.thread, &former);
        }
    }
}

fn lock(place: &Mutex<Place>) -> MutexGuard<'_, Place> {
    // Nothing panics while holding it, so that poison would mean nothing.
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The place of a thread, which says when it ends: under the lock, so that nobody names it to the system
/// after that.
struct Own(Arc<Mutex<Place>>);

impl Drop for Own {
    fn drop(&mut self) {
        lock(&self.0).is_alive = false;
    }
}

thread_local! {
    static OWN: OnceCell<Own> = const { OnceCell::new() };
}

/// The calling thread's place; `None` where the thread is about to end.
fn own() -> Option<Arc<Mutex<Place>>> {
    let new = || {
        Own(Arc::new(Mutex::new(Place {
            thread: system::own(),
            is_alive: true,
            n_holders: 0,
            former: None,
            at: None,
        })))
    };
    OWN.try_with(|own| Arc::clone(&own.get_or_init(new).0)).ok()
}

/// A thread that is held to a processor while this lives.
///
/// Where several are of one thread, it is where the last one called wants it; when the last one is dropped,
/// on whatever thread, it may run again where it might before. Threads that it starts while it is held are
/// held as well, as the system has it: see [`release_current_thread`].
#[derive(Debug)]
pub struct Held {
    place: Arc<Mutex<Place>>,
    cpu: usize,
}

impl Held {
    /// Whether it is the calling thread that is held.
    #[must_use]
    pub fn is_current_thread(&self) -> bool {
        OWN.try_with(|own| own.get().is_some_and(|own| Arc::ptr_eq(&own.0, &self.place)))
            .unwrap_or(false)
    }

    /// Holds the thread again, after it was released or held elsewhere. Allocates nothing.
    ///
    /// # Errors
    ///
    /// When the system refuses.
    pub fn renew(&self) -> io::Result<()> {
        lock(&self.place).hold(self.cpu)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut place = lock(&self.place);
        place.n_holders = place.n_holders.saturating_sub(1);
        if place.n_holders == 0 {
            place.release();
        }
    }
}

/// Holds the calling thread to one processor.
///
/// # Errors
///
/// When the system refuses, or where this is not supported (it is on Linux).
pub fn hold_current_thread(cpu: usize) -> io::Result<Held> {
    let place = own().ok_or_else(|| io::Error::other("the thread is about to end"))?;
    {
        let mut place = lock(&place);
        place.hold(cpu)?;
        place.n_holders += 1;
    }
    Ok(Held { place, cpu })
}

/// Lets the calling thread run where it might before it was held, until the next [`Held::renew`]: for whoever
/// is about to start threads that are to be held nowhere.
pub fn release_current_thread() {
    // A thread that was never held has no place, and is not given one for this.
    let place = OWN.try_with(|own| own.get().map(|own| Arc::clone(&own.0)));
    if let Ok(Some(place)) = place {
        lock(&place).release();
    }
}

/// Holds the calling thread, and those that it starts afterwards, to one processor for good.
///
/// # Errors
///
/// When the system refuses, or where this is not supported (it is on Linux).
pub(crate) fn pin_current_thread(cpu: usize) -> io::Result<()> {
    system::allow(system::own(), &system::one(cpu)?)
}

#[cfg(target_os = "linux")]
mod system {
    use std::io;

    use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_setaffinity};

    pub(super) type Id = Pid;
    pub(super) type Set = CpuSet;

    pub(super) fn own() -> Id {
        gettid()
    }

    pub(super) fn one(cpu: usize) -> io::Result<Set> {
        if cpu >= CpuSet::MAX_CPU {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("processor {cpu}")));
        }
        let mut set = CpuSet::new();
        set.set(cpu);
        Ok(set)
    }

    pub(super) fn allowed(thread: Id) -> io::Result<Set> {
        Ok(sched_getaffinity(Some(thread))?)
    }

    pub(super) fn allow(thread: Id, set: &Set) -> io::Result<()> {
        Ok(sched_setaffinity(Some(thread), set)?)
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::io;

    pub(super) type Id = ();
    pub(super) type Set = ();

    pub(super) fn own() -> Id {}

    pub(super) fn one(cpu: usize) -> io::Result<Set> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("cannot hold a thread to processor {cpu} on this system"),
        ))
    }

    pub(super) fn allowed((): Id) -> io::Result<Set> {
        Ok(())
    }

    pub(super) fn allow((): Id, (): &Set) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]
mod tests {
    use std::{sync::mpsc, thread};

    use rustix::thread::{CpuSet, sched_getaffinity};

    use super::*;

    fn allowed() -> CpuSet {
        sched_getaffinity(None).unwrap()
    }

    fn only(cpu: usize) -> CpuSet {
        system::one(cpu).unwrap()
    }

    /// Processors that this process may use: the first and the last one.
    fn two() -> (usize, usize) {
        let set = allowed();
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
        let first = cpus.next().unwrap();
        (first, cpus.next_back().unwrap_or(first))
    }

    /// Runs on a thread of its own, so that tests hold nobody else.
    fn apart(test: impl FnOnce() + Send + 'static) {
        thread::spawn(test).join().unwrap();
    }

    #[test]
    fn the_last_who_held_a_thread_gives_it_back() {
        apart(|| {
            let (before, (first, last)) = (allowed(), two());
            let one = hold_current_thread(first).unwrap();
            assert_eq!(allowed(), only(first));
            let other = hold_current_thread(last).unwrap();
            assert_eq!(allowed(), only(last));
            one.renew().unwrap();
            assert_eq!(allowed(), only(first));
            drop(one);
            assert_eq!(allowed(), only(first));
            other.renew().unwrap();
            assert_eq!(allowed(), only(last));
            drop(other);
            assert_eq!(allowed(), before);
            // And once more, for what is remembered is of this time.
            drop(hold_current_thread(last).unwrap());
            assert_eq!(allowed(), before);
        });
    }

    #[test]
    fn threads_that_are_started_while_it_is_released_run_anywhere() {
        apart(|| {
            let (before, (first, _)) = (allowed(), two());
            release_current_thread();
            let held = hold_current_thread(first).unwrap();
            release_current_thread();
            assert_eq!(thread::spawn(allowed).join().unwrap(), before);
            held.renew().unwrap();
            assert_eq!(thread::spawn(allowed).join().unwrap(), only(first));
            assert!(held.is_current_thread());
        });
    }

    /// An engine may be dropped by another thread than the one that ran it.
    #[test]
    fn another_thread_gives_it_back_while_it_lives() {
        let (send, receive) = mpsc::channel();
        let (ask, asked) = mpsc::channel();
        let before = allowed();
        let runner = thread::spawn(move || {
            send.send(hold_current_thread(two().0).unwrap()).unwrap();
            asked.recv().unwrap();
            allowed()
        });
        let held = receive.recv().unwrap();
        assert!(!held.is_current_thread());
        drop(held);
        ask.send(()).unwrap();
        assert_eq!(runner.join().unwrap(), before);
        // One that has ended is left alone.
        let held = thread::spawn(|| hold_current_thread(two().0).unwrap()).join().unwrap();
        assert!(!lock(&held.place).is_alive);
        drop(held);
        assert_eq!(allowed(), before);
    }

    #[test]
    fn a_processor_that_there_is_not_is_refused() {
        apart(|| {
            let before = allowed();
            for cpu in [CpuSet::MAX_CPU, usize::MAX] {
                assert!(hold_current_thread(cpu).is_err());
                assert!(pin_current_thread(cpu).is_err());
            }
            assert_eq!(allowed(), before);
        });
    }
}
