//! The window between routing and experts: where a layer knows its experts before it needs them, their reads
//! are begun at once and run under what is computed in between.
//!
//! Owns which lookups are begun, and that each is what it would be without the window: the same experts in
//! the same order, answered the same way. So hits, misses, evictions and bytes read are those of a run
//! without it, whatever a disk does, and tokens are not touched at all. Where experts lie is the store's.

use std::collections::VecDeque;

use crate::error::EngineError;
use crate::feed_forward::{ExpertLists, Experts, list_union};
#[cfg(doc)]
use crate::store::Store;
use crate::store::{Hold, Lease};

/// Lookups of a layer that were begun, in the order in which they are used.
#[derive(Debug, Default)]
pub(crate) struct Window {
    begun: VecDeque<Lease>,
    /// How many of the layer's lookups were made: begun, or answered at once.
    n_made: usize,
    /// Whether the experts of the layer are known and listed.
    is_open: bool,
}

impl Window {
    /// For at most so many at once.
    pub(crate) fn new(n_experts: usize) -> Self {
        Self { begun: VecDeque::with_capacity(n_experts), ..Self::default() }
    }

    /// Forgets what a failed step had begun; the store ends the leases.
    pub(crate) fn recover(&mut self) {
        self.begun.clear();
        self.close();
    }

    /// The layer's experts have been used.
    fn close(&mut self) {
        (self.n_made, self.is_open) = (0, false);
    }
}

impl Experts<'_> {
    /// The experts of `n` tokens are known, `chosen (n, n_experts_active)`: lists those of a batch, and begins
    /// the reads of what is not in memory. One token's experts are begun in the order of their weights, a
    /// batch's in ascending id, as many as find a place while those before them keep theirs. Called again
    /// for the same layer, it begins those that find one by then.
    pub(crate) fn begin(&mut self, chosen: &[u32], n: usize) -> Result<(), EngineError> {
        if n > 1 && !self.lists.window.is_open {
            list_union(chosen, self);
        }
        self.lists.window.is_open = true;
        if n > 1 {
            return self.go_on();
        }
        let router = &self.spec.router;
        let weighty = chosen.iter().filter(|&&expert| !router.is_zero(expert));
        for &expert in weighty.skip(self.lists.window.n_made) {
            if !self.begin_one(expert, true, Hold::Together)? {
                break;
            }
        }
        Ok(())
    }

    /// Begins lookups of a batch that is listed while they find places.
    fn go_on(&mut self) -> Result<(), EngineError> {
        while let Some(&expert) = self.lists.union.get(self.lists.window.n_made) {
            let stays = self.lists.keep.contains(&expert);
            if !self.begin_one(expert, stays, Hold::Passing)? {
                break;
            }
            // Without the window it would have been used and given back by now.
            self.store.set_wanted(self.layer, expert, stays);
        }
        Ok(())
    }

    /// Begins one lookup; whether that could be.
    fn begin_one(&mut self, expert: u32, admit: bool, hold: Hold) -> Result<bool, EngineError> {
        let Some(lease) = self.store.begin(self.layer, expert, admit, hold)? else {
            return Ok(false);
        };
        self.counts.add(expert, lease.tier());
        self.lists.window.begun.push_back(lease);
        self.lists.window.n_made += 1;
        Ok(true)
    }

    /// Leases all experts of one token, `chosen (n_experts_active)`, in the order of their weights; those that
    /// are read while others compute may not be there yet: see [`Store::has_come`].
    pub(crate) fn lease_all(&mut self, chosen: &[u32]) -> Result<(), EngineError> {
        self.begin(chosen, 1)?;
        self.lists.leases.clear();
        let ExpertLists { leases, window, .. } = &mut *self.lists;
        leases.extend(window.begun.drain(..));
        let n_begun = leases.len();
        let router = &self.spec.router;
        for &expert in chosen.iter().filter(|&&e| !router.is_zero(e)).skip(n_begun) {
            let lease = self.store.lease(self.files, self.layer, expert, true)?;
            self.counts.add(expert, lease.tier());
            self.lists.leases.push(lease);
        }
        self.lists.window.close();
        Ok(())
    }

    /// Leases the next expert of a batch and waits for its bytes: those that were begun first, in their
    /// order. Those after it are begun as far as they find places.
    pub(crate) fn lease(&mut self, expert: u32, admit: bool) -> Result<Lease, EngineError> {
        self.go_on()?;
        if let Some(lease) = self.lists.window.begun.pop_front() {
            debug_assert!(
                lease.is_of(expert),
                "experts are used in the order in which they were begun"
            );
            self.store.finish(&lease)?;
            return Ok(lease);
        }
        let lease = self.store.lease(self.files, self.layer, expert, admit)?;
        self.counts.add(expert, lease.tier());
        self.lists.window.n_made += 1;
        Ok(lease)
    }

    /// The experts of a batch have been used: the most used stay.
    pub(crate) fn close(&mut self) {
        for &expert in &self.lists.keep {
            self.store.touch(self.layer, expert);
            self.store.set_wanted(self.layer, expert, false);
        }
        self.lists.window.close();
    }
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
