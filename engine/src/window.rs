//! The window between routing and experts: where a layer knows its experts before it needs them, their reads
//! are begun at once and run under what is computed in between.
//!
//! Owns which lookups are begun, and that each is what it would be without the window: the same experts in
//! the same order, answered the same way. So hits, misses, evictions and bytes read are those of a run
//! without it, whatever a disk does, and tokens are not touched at all. Where experts lie is the store's.

use std::collections::VecDeque;

use crate::error::EngineError;
use crate::feed_forward::{Experts, list_union};
use crate::store::{Hold, Lease};

/// Lookups of a layer that were begun, in the order in which they are used.
#[derive(Debug, Default)]
pub(crate) struct Window {
    begun: VecDeque<Lease>,
}

impl Window {
    /// For at most so many at once.
    pub(crate) fn new(n_experts: usize) -> Self {
        Self { begun: VecDeque::with_capacity(n_experts) }
    }

    /// Forgets what a failed step had begun; the store ends the leases.
    pub(crate) fn recover(&mut self) {
        self.begun.clear();
    }
}

impl Experts<'_> {
    /// The experts of `n` tokens are known, `chosen (n, n_experts_active)`: lists those of a batch, and begins
    /// the reads of what is not in memory. One token's experts are begun in the order of their weights, a
    /// batch's in ascending id, as many as find a place while those before them keep theirs.
    pub(crate) fn begin(&mut self, chosen: &[u32], n: usize) -> Result<(), EngineError> {
        if n == 1 {
            let spec = self.spec;
            let router = &spec.router;
            for &expert in chosen.iter().filter(|&&expert| !router.is_zero(expert)) {
                if !self.begin_one(expert, true, Hold::Together)? {
                    break;
                }
            }
            return Ok(());
        }
        list_union(chosen, self);
        for at in 0..self.lists.union.len() {
            let expert = self.lists.union[at];
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
        Ok(true)
    }

    /// Leases the next expert and waits for its bytes: those that were begun first, in their order.
    pub(crate) fn lease(&mut self, expert: u32, admit: bool) -> Result<Lease, EngineError> {
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
        Ok(lease)
    }
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
