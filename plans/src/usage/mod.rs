//! Usage history: which experts a user's work asks for, kept from run to run beside the model.
//!
//! Owns what one run observed ([`Session`]), what is remembered of all runs ([`History`]), the
//! file that carries it (`docs/usage-format.md`) and the import of other engines' counts. Judges
//! nothing: what follows from a history for pins and hit rates is `simulate`'s business. Never
//! reads the environment; folders are given by the caller.

mod file;
pub(crate) mod folder;
mod format;
mod history;
mod import;
mod operations;
mod pace;
mod sample;
mod session;
mod summary;
mod version_1;

#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod file_tests;
#[cfg(test)]
mod history_tests;
#[cfg(test)]
mod savings_tests;

pub use self::file::{
    Found, LoadOutcome, Reset, Saved, UsageError, checkpoint, default_path, load, look, reset, save,
};
pub use self::format::{FORMAT_VERSION, FormatError, OLDEST_VERSION, parse, render};
pub use self::history::{
    DECAY_TOKENS, History, MAX_OLD_TOKENS, MAX_RUNS, MAX_SESSIONS_APART, Segment, ShapeMismatch,
};
pub use self::import::{ImportError, ImportedCounts, LeftOut, Taken, import_counts, render_counts};
pub use self::pace::{Interval, Pace};
pub use self::sample::MAX_SEGMENTS;
pub use self::session::{MAX_SAMPLE_ACCESSES, NO_ACCESS, RoutingShape, RunRecord, Session};
pub use self::summary::{ExpertUse, LayerSummary, RunSummary, Summary, experts_of_layer};
