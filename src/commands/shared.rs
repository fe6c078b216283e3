//! What several verbs do: find facts, a history, a model's plan; load an engine with a progress bar.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use tierkeep_doctor::{DiskFacts, Facts, Measuring, Probe};
use tierkeep_engine::text::{Message, Text};
use tierkeep_engine::{Engine, Loading};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::{Need, Plan};
use tierkeep_plans::planner::{self, Options, PlanRefusal};
use tierkeep_plans::units::LayerId;
use tierkeep_plans::usage::{self, History, LoadOutcome, Session};

use super::Context;
use super::model::DownloadAnswer;
use crate::args::PlanningArgs;
use crate::exit::Outcome;
use crate::render::{self, Bar};

/// Opens a model by its folder, with an absolute path so that plans can be run from anywhere.
pub(crate) fn open_model(context: &Context, directory: &Path) -> Result<Catalogue> {
    let absolute = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    Ok(Catalogue::open_cached(&absolute, context.data_dir.as_deref())?)
}

/// Facts of this machine for a model, measured in this process or only read.
pub(crate) fn facts(
    context: &Context,
    model: Option<&Catalogue>,
    directory: Option<&Path>,
    measure: impl Into<Measuring>,
) -> Facts {
    let files = model.map_or_else(Vec::new, |m| m.shards.iter().map(|s| s.path.clone()).collect());
    probe(context, model, files, directory, measure.into())
}

/// The disk under a directory, only read.
pub(crate) fn disk(directory: Option<&Path>) -> DiskFacts {
    let probe = Probe::new().directory(directory.map(Path::to_owned)).measure(false);
    probe.run(&mut |_| {}).disk
}

/// The same for a model that is not here: of the disk that it would be on, its files not being there
/// to measure.
pub(crate) fn facts_elsewhere(
    context: &Context,
    model: &Catalogue,
    directory: &Path,
    measure: impl Into<Measuring>,
) -> Facts {
    probe(context, Some(model), Vec::new(), Some(directory), measure.into())
}

fn probe(
    context: &Context,
    model: Option<&Catalogue>,
    files: Vec<PathBuf>,
    directory: Option<&Path>,
    measure: Measuring,
) -> Facts {
    let bar = Bar::spinner("looking at the machine");
    let probe = Probe::new().directory(directory.map(Path::to_owned)).files(files).measure(measure);
    let probe = match &context.program {
        Some(program) => probe.trial(program.clone(), ["try-instructions"]),
        None => probe,
    };
    let probe = match model.and_then(expert_read_bytes) {
        Some(bytes) => probe.read_bytes(bytes),
        None => probe,
    };
    probe.run(&mut |what| bar.message(what))
}

/// The size of the read that brings an expert: what a disk is to be measured at.
fn expert_read_bytes(model: &Catalogue) -> Option<u64> {
    model.experts.first().map(tierkeep_plans::catalogue::ExpertLayout::read_bytes)
}

/// Measured facts from a child process. Measuring takes buffers that would count as this process's
/// peak memory, which a run compares with its budget.
pub(crate) fn facts_apart(context: &Context, model: &Catalogue, measure: bool) -> Facts {
    #[derive(Deserialize)]
    struct Report {
        facts: Facts,
    }
    let measured = || {
        let output = Command::new(context.program.as_ref()?)
            .args(["doctor", "--json"])
            .arg(&model.directory)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .ok()?;
        serde_json::from_slice::<Report>(&output.stdout).ok().map(|report| report.facts)
    };
    let bar = Bar::spinner("measuring the machine");
    let measured = if measure { measured() } else { None };
    drop(bar);
    measured.unwrap_or_else(|| facts(context, Some(model), Some(&model.directory), false))
}

/// Reads the history of a model; one that cannot be used is reported and set aside.
pub(crate) fn usage(context: &Context, model: &Catalogue, given: Option<&Path>) -> Option<History> {
    let path = given.map_or_else(
        || usage::default_path(&model.directory, context.data_dir.as_deref(), &model.fingerprint),
        Path::to_owned,
    );
    match usage::load(&path, &model.fingerprint) {
        LoadOutcome::Absent => None,
        LoadOutcome::Loaded(history) => Some(history),
        LoadOutcome::Unusable { reason, set_aside } => {
            let aside = set_aside
                .map_or_else(String::new, |to| format!("; it was moved to {}", to.display()));
            render::warning(&format!("{} {reason}{aside}; going on without it", path.display()));
            None
        }
    }
}

/// The planner's options from the arguments.
pub(crate) fn options(args: &PlanningArgs) -> Options {
    Options {
        ram: args.ram,
        vram: args.vram,
        slots: args.slots,
        policy: args.policy,
        sessions: args.sessions,
        dense: args.dense.map(Into::into).unwrap_or_default(),
        context: args.ctx,
        threads: args.threads,
        numerics: args.numerics,
        kv: args.kv.map(Into::into),
        prefill_batch: args.batch,
        isa: args.isa.map(crate::args::IsaName::name),
        io: args.io.map(Into::into),
        io_depth: args.io_depth,
        read_size: args.read_size,
        prefetch: args.prefetch.and_then(crate::args::PrefetchRule::asked),
        pins: args.pins,
        allow_overcommit: args.allow_overcommit,
        engine: tierkeep_engine::ABILITIES,
    }
}

/// Something that a plan asks for and the engine of this build cannot do.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Lack {
    /// What.
    pub(crate) what: String,
    /// What makes a plan without it.
    pub(crate) remedy: String,
}

/// Everything that the engine of this build cannot execute. Of a model that it cannot run at all that
/// is one thing: another plan would not mend it.
pub(crate) fn lacks(plan: &Plan, model: &Catalogue) -> Vec<Lack> {
    let needs = plan.needs_beyond(&tierkeep_engine::ABILITIES);
    let Err(unsupported) = tierkeep_engine::supports(model) else {
        let lack = |need: &Need| Lack { what: need.to_string(), remedy: need.remedy().to_owned() };
        return needs.iter().map(lack).collect();
    };
    let mut what = format!("{}: {}", unsupported.family, unsupported.what);
    for need in needs {
        what += &format!(", nor {need}");
    }
    vec![Lack { what, remedy: "running it needs a newer tierkeep".to_owned() }]
}

/// Plans a model.
pub(crate) fn plan(
    model: &Catalogue,
    facts: &Facts,
    options: &Options,
    history: Option<&History>,
) -> Result<Plan> {
    Ok(planner::plan(model, facts, options, history)?)
}

/// "Does not fit" is a result: it is printed with its ledger. Any other refusal stays an error.
pub(crate) fn verdict(context: &Context, model: &Path, error: anyhow::Error) -> Result<Outcome> {
    verdict_before(context, model, None, error)
}

/// The same of a model that may not be here: what its download would be is part of the answer.
pub(crate) fn verdict_before(
    context: &Context,
    model: &Path,
    download: Option<&DownloadAnswer>,
    error: anyhow::Error,
) -> Result<Outcome> {
    let Some(PlanRefusal::DoesNotFit { result, would_fit, .. }) = error.downcast_ref() else {
        return Err(error);
    };
    let engine = tierkeep_engine::ABILITIES;
    let misfit = render::Misfit { model, result, would_fit, engine };
    if context.json {
        let message = error.to_string();
        render::note(&format!("error: {message}"));
        let json = render::does_not_fit_json(&misfit, &message);
        render::json(&render::with_download(json, download))?;
    } else {
        render::data(&render::does_not_fit(&misfit, context.style))?;
        if let Some(download) = download {
            render::data(&format!("\n{}", render::download(download, context.style)))?;
        }
    }
    Ok(Outcome::Verdict)
}

/// Loads a model as planned, with a progress bar.
pub(crate) fn load(plan: &Plan, model: &Catalogue) -> Result<Engine> {
    let bar = Bar::bytes("loading weights");
    let engine = Engine::open(plan, model, &mut |what, done, total| {
        bar.message(match what {
            Loading::DenseWeights => "loading weights",
            Loading::Pins => "loading pinned experts",
        });
        bar.set(done, total);
    })
    .with_context(|| format!("cannot load {}", model.directory.display()))?;
    if let Some(refused) = engine.threads_refused() {
        render::warning(&format!("{refused}; the system moves them, which changes speed alone"));
    }
    Ok(engine)
}

/// Tokens of a prompt: through the chat template, or as it is.
pub(crate) fn encode(
    text: &Text,
    prompt: &str,
    system: Option<&str>,
    raw: bool,
) -> Result<Vec<u32>> {
    if raw || !text.has_chat_template() {
        if !raw {
            render::warning("the model has no chat template: the prompt is given as it is");
        }
        if system.is_some() {
            bail!("--system needs a chat template, which the model does not have");
        }
        return Ok(text.encode_raw(prompt)?);
    }
    let mut messages = Vec::new();
    if let Some(system) = system {
        messages.push(Message { role: "system".to_owned(), content: system.to_owned() });
    }
    messages.push(Message::user(prompt));
    Ok(text.encode_chat(&messages)?)
}

/// An empty session of a model.
pub(crate) fn session(model: &Catalogue) -> Session {
    let spec = &model.spec;
    let layers: Vec<LayerId> = spec.expert_layers().map(|l| LayerId(l as u32)).collect();
    let router = &spec.router;
    let (n_experts, n_active) = (router.n_experts as u32, router.n_experts_active as u32);
    Session::new(&model.fingerprint, &layers, n_experts, n_active)
}

/// The nearest folder that exists at or above a path: the disk that it will be written to.
pub(crate) fn existing_ancestor(path: &Path) -> Option<PathBuf> {
    let absolute = std::path::absolute(path).ok()?;
    absolute.ancestors().find(|p| p.is_dir()).map(Path::to_owned)
}
