//! The verbs: each calls the crates and hands what they return to `render`. No arithmetic on models
//! or memory, no hardware access, no printing.

mod convert;
pub(crate) mod demo;
mod doctor;
mod inspect;
pub(crate) mod memory;
pub(crate) mod model;
mod plan;
mod run;
pub(crate) mod shared;
mod trial;
mod verify;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

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
    /// Set by an interrupt.
    pub(crate) interrupted: Arc<AtomicBool>,
    /// The user's data folder.
    pub(crate) data_dir: Option<PathBuf>,
    /// Settings of the hub's client, and where what is fetched is kept.
    pub(crate) hub: tierkeep_hub::Settings,
    /// This binary.
    pub(crate) program: Option<PathBuf>,
    /// Where it was started.
    pub(crate) work_dir: Option<PathBuf>,
}

/// Runs a verb.
pub(crate) fn run(verb: &Verb, context: &Context) -> Result<Outcome> {
    match verb {
        Verb::Doctor(args) => doctor::run(args, context),
        Verb::Inspect(args) => inspect::run(args, context),
        Verb::Plan(args) => plan::run(args, context),
        Verb::Run(args) => run::run(args, context),
        Verb::Verify(args) => verify::run(args, context),
        Verb::Convert(args) => convert::run(args, context),
        Verb::Demo(args) => demo::run(args, context),
        Verb::TryInstructions(args) => trial::run(args),
    }
}
