//! From what happened to an exit code: 0 fits, works; 1 a verdict about model, machine or plan; 2
//! usage, I/O or internal; 3 warnings under --strict; 130 interrupted.

use tierkeep_engine::EngineError;
use tierkeep_engine::convert::ConvertError;
use tierkeep_engine::text::TextError;
use tierkeep_engine::verify::OracleError;
use tierkeep_plans::catalogue::{CatalogueError, HeaderError};
use tierkeep_plans::plan::PlanError;
use tierkeep_plans::planner::PlanRefusal;

use crate::render;

/// Exit code of an interrupted run.
pub(crate) const INTERRUPTED: u8 = 130;

/// How a verb ended that did what it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It works.
    Fine,
    /// It works, with warnings.
    Warnings,
    /// A verdict: a check failed, it does not fit.
    Verdict,
    /// The user interrupted it.
    Interrupted,
}

/// The exit code of a result; prints the error where there is one.
pub(crate) fn code(result: anyhow::Result<Outcome>, strict: bool) -> u8 {
    match result {
        Ok(Outcome::Fine) => 0,
        Ok(Outcome::Warnings) => {
            if strict {
                3
            } else {
                0
            }
        }
        Ok(Outcome::Verdict) => 1,
        Ok(Outcome::Interrupted) => INTERRUPTED,
        Err(error) => {
            // A reader that went away, such as `head`, is no error of ours to talk about.
            let is_pipe = error
                .downcast_ref::<std::io::Error>()
                .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe);
            if !is_pipe {
                render::error(&error);
            }
            class(&error)
        }
    }
}

fn class(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        let verdict = if let Some(e) = cause.downcast_ref::<CatalogueError>() {
            Some(catalogue_is_verdict(e))
        } else if let Some(e) = cause.downcast_ref::<PlanRefusal>() {
            Some(refusal_is_verdict(e))
        } else if let Some(e) = cause.downcast_ref::<PlanError>() {
            Some(plan_is_verdict(e))
        } else if let Some(e) = cause.downcast_ref::<EngineError>() {
            Some(engine_is_verdict(e))
        } else if let Some(e) = cause.downcast_ref::<TextError>() {
            Some(!matches!(e, TextError::Convert { .. }))
        } else if let Some(e) = cause.downcast_ref::<ConvertError>() {
            Some(matches!(e, ConvertError::Requantise { .. } | ConvertError::NotFinite { .. }))
        } else if cause.downcast_ref::<OracleError>().is_some() {
            Some(false)
        } else {
            None
        };
        if let Some(verdict) = verdict {
            return if verdict { 1 } else { 2 };
        }
    }
    2
}

fn catalogue_is_verdict(error: &CatalogueError) -> bool {
    match error {
        CatalogueError::Io { .. } | CatalogueError::NotAModel { .. } => false,
        CatalogueError::Header { source, .. } => !matches!(source, HeaderError::Io(_)),
        CatalogueError::Config { .. }
        | CatalogueError::NoShards { .. }
        | CatalogueError::MissingShard { .. }
        | CatalogueError::TensorTwice { .. }
        | CatalogueError::MissingTensor { .. }
        | CatalogueError::WrongShape { .. }
        | CatalogueError::UnknownContainer { .. }
        | CatalogueError::UnsupportedType { .. } => true,
    }
}

fn refusal_is_verdict(error: &PlanRefusal) -> bool {
    match error {
        PlanRefusal::DoesNotFit { .. }
        | PlanRefusal::OverMachine { .. }
        | PlanRefusal::UnknownMemory { .. } => true,
        PlanRefusal::BadOption { .. } => false,
    }
}

fn plan_is_verdict(error: &PlanError) -> bool {
    match error {
        PlanError::Io { .. } | PlanError::Serialize { .. } => false,
        PlanError::Parse { .. }
        | PlanError::Version { .. }
        | PlanError::OtherModel { .. }
        | PlanError::Invalid { .. }
        | PlanError::LedgerMismatch { .. }
        | PlanError::OverBudget { .. } => true,
    }
}

fn engine_is_verdict(error: &EngineError) -> bool {
    match error {
        EngineError::Plan(e) => plan_is_verdict(e),
        EngineError::Memory(_)
        | EngineError::Isa(_)
        | EngineError::TooManyActive { .. }
        | EngineError::NotANumber
        | EngineError::ContextFull { .. } => true,
        EngineError::Read(e) => matches!(e, tierkeep_engine::ReadError::Changed { .. }),
        EngineError::Threads(_)
        | EngineError::Matrix(_)
        | EngineError::Unbound { .. }
        | EngineError::MixedAttention
        | EngineError::Interrupted
        | EngineError::Empty
        | EngineError::UnknownToken { .. } => false,
    }
}
