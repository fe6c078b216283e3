//! The verbs: each calls the crates and hands what they return to `render`. No arithmetic on models
//! or memory, no hardware access, no printing.

mod bench;
mod compare;
mod convert;
pub(crate) mod demo;
mod doctor;
mod input;
mod inspect;
pub(crate) mod memory;
pub(crate) mod model;
mod plan;
pub(crate) mod run;
mod saving;
pub(crate) mod shared;
mod trial;
pub(crate) mod usage;
mod verify;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::Result;

use crate::args::Verb;
use crate::exit::Outcome;
use crate::render::Style;

/// What every verb may need of the world.
#[derive(Debug)]
pub(crate) struct Context {
    /// JSON on standard output.
    pub(crate) json: bool,
    /// How text is set on standard output.
    pub(crate) style: Style,
    /// Set by an interrupt. Looked at only by work that holds [`Context::heeding`].
    pub(crate) interrupted: Arc<AtomicBool>,
    /// How much of the work under way looks at it; without any, an interrupt ends the program.
    pub(crate) n_heeding: Arc<AtomicUsize>,
    /// The user's data folder.
    pub(crate) data_dir: Option<PathBuf>,
    /// Settings of the hub's client, and where what is fetched is kept.
    pub(crate) hub: tierkeep_hub::Settings,
    /// This binary.
    pub(crate) program: Option<PathBuf>,
    /// Where it was started.
    pub(crate) work_dir: Option<PathBuf>,
}

impl Context {
    /// While this is held, an interrupt only sets the flag: whoever holds it looks at the flag often
    /// and has something to finish, such as a report of what was read or a history to save.
    pub(crate) fn heeding(&self) -> Heeding {
        self.n_heeding.fetch_add(1, Ordering::SeqCst);
        Heeding(Arc::clone(&self.n_heeding))
    }
}

/// Work that looks at the flag of an interrupt by itself.
#[derive(Debug)]
#[must_use]
pub(crate) struct Heeding(Arc<AtomicUsize>);

impl Drop for Heeding {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs a verb.
pub(crate) fn run(verb: &Verb, context: &Context) -> Result<Outcome> {
    match verb {
        Verb::Doctor(args) => doctor::run(args, context),
        Verb::Inspect(args) => inspect::run(args, context),
        Verb::Plan(args) => plan::run(args, context),
        Verb::Run(args) => run::run(args, context),
        Verb::Bench(args) => bench::run(args, context),
        Verb::Verify(args) => verify::run(args, context),
        Verb::Compare(args) => compare::run(args, context),
        Verb::Convert(args) => convert::run(args, context),
        Verb::Usage(args) => usage::run(args, context),
        Verb::Demo(args) => demo::run(args, context),
        Verb::TryInstructions(args) => trial::run(args),
        Verb::MeasureMemory => bench::memory::run(),
    }
}
