//! Saving what a run learns of routing, while it goes on and at its end. Owns the session, where it
//! goes, and what is said when that fails: a run whose history cannot be saved goes on.

use std::path::Path;
use std::time::Instant;

use tierkeep_engine::generate::Recorder;
use tierkeep_plans::usage::{self, Interval, Pace, RunRecord, Saved, Session, UsageError};

use crate::render;

/// What became of a session's history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is in the file.
    Done,
    /// There was nowhere to save it, or nothing to save.
    NotAsked,
    /// It is not, or not all of it; that has been said.
    Failed,
}

/// A session and the file that it is saved to.
#[derive(Debug)]
pub(super) struct Saving<'a> {
    session: Session,
    path: Option<&'a Path>,
    pace: Pace,
    has_failed: bool,
}

impl<'a> Saving<'a> {
    /// A session that begins now. Without a path nothing is saved.
    pub(super) fn new(session: Session, path: Option<&'a Path>, interval: Interval) -> Self {
        Self { session, path, pace: Pace::new(interval, Instant::now()), has_failed: false }
    }

    /// Saves what there is. Failures of a checkpoint are said once: later ones try again, and the end
    /// of the run says what came of it.
    fn checkpoint(&mut self, path: &Path) {
        let began = Instant::now();
        match usage::checkpoint(path, &mut self.session) {
            Ok(saved) => report_damage(path, &saved),
            Err(error) if !self.has_failed => {
                self.has_failed = true;
                warn(&error, "the usage history was not saved yet, the run goes on");
            }
            Err(_) => {}
        }
        self.pace.set_done(began, Instant::now());
    }

    /// Saves the session at its end, with what its run came to. A failure is a warning, for the
    /// answer has been given.
    pub(super) fn finish(mut self, run: Option<RunRecord>) -> Outcome {
        let Some(path) = self.path else { return Outcome::NotAsked };
        if self.session.n_tokens() == 0 {
            return Outcome::NotAsked;
        }
        if let Some(run) = run {
            self.session.set_run(run);
        }
        match usage::save(path, &mut self.session) {
            Ok(saved) => {
                report_damage(path, &saved);
                Outcome::Done
            }
            Err(error) => {
                warn(&error, "the usage history was not saved");
                Outcome::Failed
            }
        }
    }
}

impl Recorder for Saving<'_> {
    fn record_token(&mut self, experts: &[u16]) {
        self.session.record_token(experts);
        if let Some(path) = self.path
            && self.pace.is_due(Instant::now())
        {
            self.checkpoint(path);
        }
    }
}

fn warn(error: &UsageError, what: &str) {
    render::warning(&format!("{what}: {error}"));
}

fn report_damage(path: &Path, saved: &Saved) {
    if let Some(aside) = &saved.set_aside {
        let (path, aside) = (path.display(), aside.display());
        render::warning(&format!("{path} was damaged and has been moved to {aside}"));
    }
}
