//! From what happened to an exit code: 0 fits, works; 1 a verdict about model, machine or plan; 2
//! usage, I/O or internal; 3 warnings under --strict; 130 interrupted.

use tierkeep_engine::EngineError;
use tierkeep_engine::bench::products::ProductError;
use tierkeep_engine::bench::stream::TraceError;
use tierkeep_engine::compare::CompareError;
use tierkeep_engine::convert::ConvertError;
use tierkeep_engine::text::TextError;
use tierkeep_engine::verify::OracleError;
use tierkeep_hub::HubError;
use tierkeep_hub::local::LocalError;
use tierkeep_plans::catalogue::{CatalogueError, HeaderError};
use tierkeep_plans::plan::PlanError;
use tierkeep_plans::planner::{PairRefusal, PlanRefusal};

use crate::commands::model::NotDownloaded;
use crate::commands::run::PlanAgain;
use crate::commands::usage::Unusable;
use crate::render;
use tierkeep_plans::ready::{Obstacle, Standing};
use tierkeep_plans::usage::{ImportError, UsageError};

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
    /// It works and has been shown, but a file that was asked for could not be written; that has been
    /// said.
    NotWritten,
    /// The user interrupted it.
    Interrupted,
}

/// The exit code of a result; prints the error where there is one.
pub(crate) fn code(result: anyhow::Result<Outcome>, strict: bool, json: bool) -> u8 {
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
        Ok(Outcome::NotWritten) => 2,
        Ok(Outcome::Interrupted) => INTERRUPTED,
        Err(error) => {
            if is_interrupt(&error) {
                render::note("interrupted");
                return INTERRUPTED;
            }
            let class = class(&error);
            // A reader that went away, such as `head`, is no error of ours to talk about.
            let is_pipe = error
                .downcast_ref::<std::io::Error>()
                .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe);
            if !is_pipe {
                render::error(&error, json.then_some(class.kind), command(&error));
            }
            class.code()
        }
    }
}

/// Arguments that cannot be read, or a text that was asked for instead, such as the help.
pub(crate) fn usage(error: &clap::Error, json: bool) -> u8 {
    if !error.use_stderr() {
        render::usage(error);
        return 0;
    }
    if json {
        render::error(&anyhow::anyhow!("{}", render::usage_text(error)), Some("usage"), None);
    } else {
        render::usage(error);
    }
    2
}

/// What an error is to who runs the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Class {
    /// A stable name, for programs.
    kind: &'static str,
    /// About model, machine or plan; otherwise about usage, input or output, or a bug.
    is_verdict: bool,
}

impl Class {
    fn code(self) -> u8 {
        if self.is_verdict { 1 } else { 2 }
    }
}

fn verdict(kind: &'static str) -> Class {
    Class { kind, is_verdict: true }
}

fn failure(kind: &'static str) -> Class {
    Class { kind, is_verdict: false }
}

/// Whether it failed because the user interrupted it.
fn is_interrupt(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| matches!(cause.downcast_ref(), Some(HubError::Interrupted)))
}

/// The command that makes a plan which is not refused, where an error has one.
fn command(error: &anyhow::Error) -> Option<&str> {
    error.chain().find_map(|cause| {
        let of_plan = cause.downcast_ref::<PlanAgain>().map(PlanAgain::command);
        of_plan.or_else(|| Some(cause.downcast_ref::<Obstacle>()?.command.as_str()))
    })
}

/// The class of the first cause that has one.
fn class(error: &anyhow::Error) -> Class {
    for cause in error.chain() {
        let class = if let Some(e) = cause.downcast_ref::<CatalogueError>() {
            catalogue(e)
        } else if let Some(e) = cause.downcast_ref::<PlanRefusal>() {
            refusal(e)
        } else if let Some(e) = cause.downcast_ref::<PlanError>() {
            plan(e)
        } else if let Some(e) = cause.downcast_ref::<Obstacle>() {
            obstacle(e.standing)
        } else if let Some(e) = cause.downcast_ref::<EngineError>() {
            engine(e)
        } else if let Some(e) = cause.downcast_ref::<TextError>() {
            text(e)
        } else if let Some(e) = cause.downcast_ref::<ConvertError>() {
            convert(e)
        } else if let Some(e) = cause.downcast_ref::<ProductError>() {
            product(e)
        } else if cause.downcast_ref::<TraceError>().is_some() {
            failure("usage")
        } else if let Some(e) = cause.downcast_ref::<CompareError>() {
            compare(e)
        } else if let Some(e) = cause.downcast_ref::<PairRefusal>() {
            pair(e)
        } else if let Some(e) = cause.downcast_ref::<HubError>() {
            hub(e)
        } else if let Some(e) = cause.downcast_ref::<LocalError>() {
            local(e)
        } else if cause.downcast_ref::<NotDownloaded>().is_some() {
            verdict("model.not_downloaded")
        } else if let Some(e) = cause.downcast_ref::<UsageError>() {
            history(e)
        } else if cause.downcast_ref::<Unusable>().is_some() {
            verdict("history.unusable")
        } else if cause.downcast_ref::<ImportError>().is_some() {
            failure("history.import")
        } else if cause.downcast_ref::<OracleError>().is_some() {
            failure("oracle")
        } else if cause.downcast_ref::<std::io::Error>().is_some() {
            failure("io")
        } else {
            continue;
        };
        return class;
    }
    failure("other")
}

fn catalogue(error: &CatalogueError) -> Class {
    match error {
        CatalogueError::Io { .. } => failure("model.io"),
        CatalogueError::NotAModel { .. } => failure("model.not_a_model"),
        CatalogueError::Header { source: HeaderError::Io(_), .. } => failure("model.io"),
        CatalogueError::Header { .. } => verdict("model.header"),
        CatalogueError::Config { .. } => verdict("model.config"),
        CatalogueError::NoShards { .. } => verdict("model.no_shards"),
        CatalogueError::MissingShard { .. } => verdict("model.missing_shard"),
        CatalogueError::TensorTwice { .. } => verdict("model.tensor_twice"),
        CatalogueError::MissingTensor { .. } => verdict("model.missing_tensor"),
        CatalogueError::WrongShape { .. } => verdict("model.wrong_shape"),
        CatalogueError::Packing { .. } => verdict("model.packing"),
        CatalogueError::UnknownContainer { .. } => verdict("model.unknown_container"),
        CatalogueError::UnsupportedType { .. } => verdict("model.unsupported_type"),
    }
}

fn refusal(error: &PlanRefusal) -> Class {
    match error {
        PlanRefusal::DoesNotFit { .. } => verdict("plan.does_not_fit"),
        PlanRefusal::OverMachine { .. } => verdict("plan.over_machine"),
        PlanRefusal::UnknownMemory { .. } => verdict("plan.unknown_memory"),
        PlanRefusal::NoVram { .. } => verdict("plan.no_vram"),
        PlanRefusal::OverCards { .. } => verdict("plan.over_cards"),
        PlanRefusal::BadOption { .. } => failure("usage"),
    }
}

fn plan(error: &PlanError) -> Class {
    match error {
        PlanError::Io { .. } => failure("plan.io"),
        PlanError::Serialize { .. } => failure("plan.serialize"),
        PlanError::Parse { .. } => verdict("plan.parse"),
        PlanError::Version { .. } => verdict("plan.version"),
        PlanError::OtherModel { .. } => verdict("plan.other_model"),
        PlanError::Invalid { .. } => verdict("plan.invalid"),
        PlanError::LedgerMismatch { .. } => verdict("plan.ledger_mismatch"),
        PlanError::OverBudget { .. } => verdict("plan.over_budget"),
        PlanError::CardLedgerMismatch { .. } => verdict("plan.card_ledger_mismatch"),
        PlanError::OverCardBudget { .. } => verdict("plan.over_card_budget"),
    }
}

fn obstacle(standing: Standing) -> Class {
    match standing {
        Standing::Lacking => verdict("engine.lacking"),
        Standing::Isa => verdict("engine.isa"),
        Standing::Memory => verdict("run.memory"),
        Standing::Threads => verdict("run.threads"),
    }
}

fn engine(error: &EngineError) -> Class {
    match error {
        EngineError::Plan(e) => plan(e),
        EngineError::Lacking { .. } => verdict("engine.lacking"),
        EngineError::Unsupported(_) => verdict("engine.unsupported"),
        EngineError::Memory(_) => verdict("engine.memory"),
        EngineError::PageSize { .. } => verdict("engine.page_size"),
        EngineError::HeadRow { .. } => verdict("engine.head_row"),
        EngineError::StreamEnded => failure("engine.stream_ended"),
        EngineError::LaneEnded => failure("engine.lane_ended"),
        EngineError::Isa(_) => verdict("engine.isa"),
        EngineError::TooManyActive { .. } => verdict("engine.too_many_active"),
        EngineError::NotANumber => verdict("engine.not_a_number"),
        EngineError::ContextFull { .. } => verdict("engine.context_full"),
        EngineError::Read(
            tierkeep_engine::ReadError::Changed { .. }
            | tierkeep_engine::ReadError::Overwritten { .. },
        ) => verdict("engine.changed"),
        EngineError::Read(tierkeep_engine::ReadError::NotDirect { .. }) => {
            verdict("engine.not_direct")
        }
        EngineError::Read(_) => failure("engine.read"),
        EngineError::Threads(_) => failure("engine.threads"),
        EngineError::Matrix(_) => failure("engine.matrix"),
        EngineError::Unbound { .. } => failure("engine.unbound"),
        EngineError::MixedAttention => failure("engine.mixed_attention"),
        EngineError::Interrupted => failure("engine.interrupted"),
        EngineError::WindowLost => failure("engine.window_lost"),
        EngineError::Empty => failure("engine.empty"),
        EngineError::UnknownToken { .. } => failure("engine.unknown_token"),
    }
}

fn text(error: &TextError) -> Class {
    match error {
        TextError::Convert { .. } => failure("text.convert"),
        _ => verdict("text"),
    }
}

fn convert(error: &ConvertError) -> Class {
    match error {
        ConvertError::Unsupported(_) => verdict("convert.unsupported"),
        ConvertError::Requantise { .. } => verdict("convert.requantise"),
        ConvertError::NotFinite { .. } => verdict("convert.not_finite"),
        ConvertError::Fused { .. } => verdict("convert.fused"),
        ConvertError::ScaleTooLarge { .. } | ConvertError::TooLargeForBf16 { .. } => {
            verdict("convert.too_large")
        }
        ConvertError::SourceCut { .. } => verdict("convert.source_cut"),
        ConvertError::NotAsWritten { .. } => verdict("convert.not_as_written"),
        ConvertError::NoSpace { .. } => failure("convert.no_space"),
        ConvertError::OtherConversion { .. } => failure("convert.other_conversion"),
        ConvertError::CannotConsume { .. } => failure("convert.cannot_consume"),
        ConvertError::OutputNotEmpty { .. } => failure("convert.output_not_empty"),
        ConvertError::OutputBusy { .. } => failure("convert.output_busy"),
        ConvertError::Io { .. }
        | ConvertError::MissingFile { .. }
        | ConvertError::Misplaced { .. }
        | ConvertError::Shape { .. }
        | ConvertError::Isa(_)
        | ConvertError::HeaderTooLarge { .. }
        | ConvertError::Threads { .. }
        | ConvertError::Interrupted => failure("convert"),
    }
}

fn product(error: &ProductError) -> Class {
    match error {
        ProductError::Element { .. } | ProductError::Shape { .. } => failure("usage"),
        ProductError::Memory { .. } => verdict("engine.memory"),
        ProductError::Engine(e) => engine(e),
    }
}

fn compare(error: &CompareError) -> Class {
    match error {
        CompareError::NotOneModel(_) => verdict("compare.not_one_model"),
        CompareError::Engine { source, .. } => engine(source),
        CompareError::NotFinite { .. } => verdict("engine.not_a_number"),
        CompareError::Stride { .. } => failure("usage"),
        CompareError::Empty => failure("engine.empty"),
    }
}

fn pair(error: &PairRefusal) -> Class {
    match error {
        PairRefusal::Plan(e) => refusal(e),
        PairRefusal::DoesNotFit { .. } => verdict("plan.does_not_fit"),
    }
}

/// Only what is known of the model itself is a verdict about it: what a server refuses or lacks may be
/// the fault of the address, the token or the network.
fn hub(error: &HubError) -> Class {
    match error {
        HubError::NoSafetensors { .. } => verdict("model.no_shards"),
        HubError::BadReference { .. } => failure("usage"),
        HubError::Setting { .. } => failure("hub.setting"),
        HubError::Gated { .. } => failure("hub.gated"),
        HubError::RepoNotFound { .. } => failure("hub.repo_not_found"),
        HubError::RevisionNotFound { .. } => failure("hub.revision_not_found"),
        HubError::BadToken { .. } => failure("hub.bad_token"),
        HubError::Missing { .. } => failure("hub.missing"),
        HubError::Refused { .. } => failure("hub.refused"),
        HubError::RateLimited { .. } => failure("hub.rate_limited"),
        HubError::Unreachable { .. } => failure("hub.unreachable"),
        HubError::OfflineMode { .. } => failure("hub.offline"),
        HubError::NoConfig { .. } => failure("model.not_a_model"),
        HubError::NoRanges { .. } => failure("hub.no_ranges"),
        HubError::Stalled { .. } => failure("hub.stalled"),
        HubError::Broken { .. } => failure("hub.broken"),
        HubError::Contradiction { .. } => failure("hub.contradiction"),
        HubError::TooLarge { .. } | HubError::HeadersTooLarge { .. } => failure("hub.too_large"),
        HubError::BadAnswer { .. } => failure("hub.bad_answer"),
        HubError::Redirect { .. } => failure("hub.redirect"),
        HubError::Tls { .. } => failure("hub.tls"),
        HubError::Io { .. } => failure("hub.io"),
        HubError::Interrupted => failure("hub.interrupted"),
    }
}

fn history(error: &UsageError) -> Class {
    match error {
        UsageError::Locked { .. } => failure("history.locked"),
        UsageError::Refused { .. } | UsageError::Shape { .. } => verdict("history.refused"),
        UsageError::Io { .. } | UsageError::Render { .. } => failure("history.io"),
    }
}

fn local(error: &LocalError) -> Class {
    match error {
        LocalError::NotCached { .. } | LocalError::NoCache { .. } => failure("hub.not_cached"),
        LocalError::OtherRevisions { .. } => failure("hub.revision_not_cached"),
        LocalError::BrokenLink { .. } => verdict("model.missing_shard"),
        LocalError::Io { .. } => failure("hub.io"),
    }
}
