//! The threads that compute, and where they are held. Owns what happens where a system refuses: a plan may
//! be from another machine, and where its threads run changes speed alone.

use tierkeep_kernels::{Held, Pool, hold_current_thread};

use crate::error::EngineError;

/// The pool, and the processor of the thread that calls it.
#[derive(Debug)]
pub(crate) struct Threads {
    pub(crate) pool: Pool,
    /// That of whoever calls [`crate::Engine::run`]; `None` where the system moves it.
    first: Option<usize>,
    /// The thread that was held to it last, which is given back when this is dropped.
    held: Option<Held>,
    /// Why threads are not where the plan wants them, in words.
    refused: Option<String>,
}

impl Threads {
    /// Starts all but the calling one, each held to its processor where `cpus` names one for each.
    pub(crate) fn start(threads: usize, cpus: &[u32]) -> Result<Self, EngineError> {
        let wanted: Vec<usize> = cpus.iter().map(|&cpu| cpu as usize).collect();
        let unheld = |refused| {
            let pool = Pool::new(threads, &[]).map_err(EngineError::Threads)?;
            Ok(Self { pool, first: None, held: None, refused })
        };
        if wanted.is_empty() {
            return unheld(None);
        }
        match Pool::new(threads, &wanted) {
            Ok(pool) => {
                Ok(Self { pool, first: wanted.first().copied(), held: None, refused: None })
            }
            // Where the threads themselves are refused, that is the answer of the second try.
            Err(error) => unheld(Some(format!("threads cannot be held to {cpus:?}: {error}"))),
        }
    }

    /// Holds the calling thread to the first processor. Threads that it starts from then on are held there
    /// too, so that those which read are started before, and an engine that is opened releases it first.
    pub(crate) fn enter(&mut self) {
        let Some(cpu) = self.first else { return };
        let result = match &self.held {
            Some(held) if held.is_current_thread() => held.renew(),
            // Another thread that was held is given back.
            Some(_) | None => hold_current_thread(cpu).map(|held| self.held = Some(held)),
        };
        if let Err(error) = result {
            self.first = None;
            self.held = None;
            self.refused = Some(format!("the thread cannot be held to {cpu}: {error}"));
        }
    }

    /// Why threads are not held where the plan wants them, if they are not.
    pub(crate) fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan from another machine names processors that this one does not have.
    #[test]
    fn threads_run_where_the_system_lets_them() {
        let mut threads = Threads::start(2, &[u32::MAX - 1, u32::MAX]).unwrap();
        assert!(threads.refused().is_some());
        threads.enter();
        assert_eq!(threads.pool.threads(), 2);
        let mut anywhere = Threads::start(2, &[]).unwrap();
        anywhere.enter();
        assert_eq!(anywhere.refused(), None);
    }
}
