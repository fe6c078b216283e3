//! Time in which at least one of several things is under way, however many are. Owns the union of their
//! intervals; knows no read.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The union of intervals so far.
#[derive(Debug, Default)]
pub(super) struct Busy(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    under_way: u32,
    since: Option<Instant>,
    total: Duration,
}

impl Busy {
    /// Something begins; it ends when what is returned is dropped.
    pub(super) fn begin(&self) -> UnderWay<'_> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.under_way += 1;
        state.since.get_or_insert_with(Instant::now);
        UnderWay(self)
    }

    /// Time in which at least one was under way, up to now.
    pub(super) fn time(&self) -> Duration {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.total + state.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// One thing that is under way.
#[derive(Debug)]
pub(super) struct UnderWay<'a>(&'a Busy);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut state = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.under_way -= 1;
        if state.under_way == 0
            && let Some(since) = state.since.take()
        {
            state.total += since.elapsed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_is_counted_once_and_what_lies_between_is_not() {
        let busy = Busy::default();
        assert_eq!(busy.time(), Duration::ZERO);
        let first = busy.begin();
        let second = busy.begin();
        drop(first);
        assert!(busy.0.lock().unwrap().since.is_some(), "one is still under way");
        drop(second);
        let total = busy.time();
        // Nothing is under way: time stands still.
        assert_eq!((busy.time(), busy.0.lock().unwrap().since), (total, None));
        drop(busy.begin());
        assert!(busy.time() >= total);
    }
}
