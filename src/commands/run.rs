//! `tierkeep run PLAN|MODEL`.

use std::io::Read as _;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use tierkeep_engine::Phase;
use tierkeep_engine::generate::{Ended, Event, Generation, Mark, generate};
use tierkeep_engine::report::{Loaded, RunReport};
use tierkeep_engine::text::Text;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::usage::{self, Interval};
use tierkeep_plans::whole_file;

use super::memory::{self, Memory};
use super::saving::{self, Saving};
use super::{Context, model, shared};
use crate::args::RunArgs;
use crate::exit::Outcome;
use crate::render::{self, Answer, Bar};

/// What is run once a plan is there.
pub(super) struct Job<'a> {
    pub(super) plan: &'a Plan,
    pub(super) model: &'a Catalogue,
    pub(super) text: Option<&'a Text>,
    pub(super) prompt: &'a [u32],
    pub(super) max_tokens: usize,
    pub(super) ignore_stop: bool,
    /// Where the session's history goes.
    pub(super) usage: Option<&'a Path>,
    /// How often it goes there.
    pub(super) saves: Interval,
    /// The answer is shown while it comes.
    pub(super) stream: bool,
}

/// What came of it.
pub(super) struct Finished {
    pub(super) report: RunReport,
    pub(super) memory: Memory,
    pub(super) text: Option<String>,
    pub(super) has_warnings: bool,
    /// Whether the usage history took the session.
    pub(super) is_saved: bool,
}

pub(crate) fn run(args: &RunArgs, context: &Context) -> Result<Outcome> {
    let target = args.target.path();
    let planned = match model::folder_to_run(&args.target, context)? {
        Some(directory) => planned(args, &directory, context),
        None => read_plan(args, context),
    };
    let (plan, model) = match planned {
        Ok(planned) => planned,
        Err(error) => return shared::verdict(context, target, error),
    };
    let text = text(args, &model)?;
    let prompt = prompt(args, text.as_ref())?;
    let usage = (!args.no_usage).then(|| {
        args.planning.usage.clone().unwrap_or_else(|| {
            let data_dir = context.data_dir.as_deref();
            usage::default_path(&model.directory, data_dir, &model.fingerprint)
        })
    });
    let job = Job {
        plan: &plan,
        model: &model,
        text: text.as_ref(),
        prompt: &prompt,
        max_tokens: args.max_tokens,
        ignore_stop: args.ignore_stop,
        usage: usage.as_deref(),
        saves: args.save_every.map_or(Interval::Usual, Interval::Tokens),
        stream: !context.json,
    };
    let finished = execute(&job, context)?;
    let json = || render::run_json(&finished.report, &finished.memory, finished.text.as_deref());
    if let Some(path) = &args.report {
        let text = format!("{}\n", serde_json::to_string_pretty(&json())?);
        whole_file::write(path, &text)
            .with_context(|| format!("the report was not written to {}", path.display()))?;
    }
    if context.json {
        render::json(&json())?;
    } else {
        let style = render::error_style();
        let (report, memory) = (&finished.report, &finished.memory);
        let report = render::run_report(report, memory, args.layers, style);
        render::note(&format!("\n{}", report.trim_end()));
        if let (Some(path), true) = (&usage, finished.is_saved) {
            render::note(&format!("usage history: {}", path.display()));
        }
    }
    Ok(if finished.report.ended == Ended::Interrupted {
        Outcome::Interrupted
    } else if finished.has_warnings {
        Outcome::Warnings
    } else {
        Outcome::Fine
    })
}

/// Plans the model first; the plan is printed, so that it is known what is executed.
fn planned(args: &RunArgs, directory: &Path, context: &Context) -> Result<(Plan, Catalogue)> {
    let model = shared::open_model(context, directory)?;
    let facts = shared::facts_apart(context, &model, !args.no_measure);
    let history = if args.no_usage {
        None
    } else {
        shared::usage(context, &model, args.planning.usage.as_deref())
    };
    let options = shared::options(&args.planning);
    let plan = shared::plan(&model, &facts, &options, history.as_ref())?;
    render::note(render::plan_in_brief(&plan, render::error_style()).trim_end());
    Ok((plan, model))
}

fn read_plan(args: &RunArgs, context: &Context) -> Result<(Plan, Catalogue)> {
    let target = args.target.path();
    let plan = Plan::read(target)?;
    // A plan is executed as it stands: a flag that asks for something else is not ignored.
    if let Some(flag) = planning_flag(args) {
        bail!(
            "{flag} belongs to the plan, which {} already is: plan again with it, or edit the file",
            target.display()
        );
    }
    let planned = &plan.model.directory;
    let directory = model::folder_of_plan(target, planned, args.model.as_ref(), context)?;
    let model = shared::open_model(context, &directory).with_context(|| {
        format!("the model of {} (name its folder with --model if it moved)", target.display())
    })?;
    plan.check(&model)?;
    Ok((plan, model))
}

/// The first planning flag that was given.
fn planning_flag(run: &RunArgs) -> Option<&'static str> {
    run.planning.given().or(run.no_measure.then_some("--no-measure"))
}

/// The tokenizer; with token ids it is only for showing text and may be absent.
fn text(args: &RunArgs, model: &Catalogue) -> Result<Option<Text>> {
    match Text::open(&model.directory) {
        Ok(text) => Ok(Some(text)),
        Err(_) if args.ids.is_some() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn prompt(args: &RunArgs, text: Option<&Text>) -> Result<Vec<u32>> {
    if let Some(ids) = &args.ids {
        return Ok(ids.clone());
    }
    let given = args.prompt.as_deref().unwrap_or_default();
    let mut from_input = String::new();
    let given = if given == "-" {
        std::io::stdin().read_to_string(&mut from_input).context("standard input")?;
        from_input.as_str()
    } else {
        given
    };
    let Some(text) = text else { bail!("there is no tokenizer: give token ids with --ids") };
    shared::encode(text, given, args.system.as_deref(), args.raw)
}

/// Loads, generates, saves the history, reports.
pub(super) fn execute(job: &Job<'_>, context: &Context) -> Result<Finished> {
    let before_loading = memory::resident();
    let start = Instant::now();
    let mut engine = shared::load(job.plan, job.model)?;
    let _heeding = context.heeding();
    let loaded = Loaded { time: start.elapsed(), mark: Mark::of(&engine) };
    let mut saving = Saving::new(shared::session(job.model), job.usage, job.saves);
    let spec = &job.model.spec;
    let stop_tokens: &[u32] = if job.ignore_stop { &[] } else { &spec.stop_tokens };
    let answer = Answer::new(job.text, stop_tokens, job.stream);
    let generated = step_through(job, context, &mut engine, &mut saving, stop_tokens, answer);
    // Whatever ended the run, what was learnt until then is kept.
    let (generation, text) = match generated {
        Ok(done) => done,
        Err(error) => {
            saving.finish(None);
            return Err(error);
        }
    };
    let memory = Memory::now(job.model, before_loading);
    let report = RunReport::new(&engine, job.plan, &generation, &loaded, memory.seen());
    let saved = saving.finish(Some(report.record(job.plan)));
    report.warnings.iter().for_each(|warning| render::warning(&warning.to_string()));
    let has_warnings = !report.warnings.is_empty() || saved == saving::Outcome::Failed;
    Ok(Finished { report, memory, text, has_warnings, is_saved: saved == saving::Outcome::Done })
}

/// The generation with its bar and its stream of text.
fn step_through(
    job: &Job<'_>,
    context: &Context,
    engine: &mut tierkeep_engine::Engine,
    saving: &mut Saving<'_>,
    stop_tokens: &[u32],
    mut answer: Answer<'_>,
) -> Result<(Generation, Option<String>)> {
    let mut progress = Progress::new(job.prompt.len(), job.stream);
    let mut failure = None;
    let generation =
        generate(engine, job.prompt, job.max_tokens, stop_tokens, Some(saving), &mut |event| {
            progress.tell(event);
            if let Event::Token(token) = event
                && let Err(error) = answer.push(token)
            {
                failure = Some(error);
                return ControlFlow::Break(());
            }
            if context.interrupted.load(Ordering::SeqCst) {
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        })?;
    if let Some(error) = failure {
        return Err(error);
    }
    let text = answer.finish()?;
    Ok((generation, text))
}

/// Where a run is, on a terminal: the layer of a batch of the prompt, for a batch of a large model
/// takes minutes; then the token, where the answer is not shown on the same terminal.
struct Progress {
    bar: Bar,
    n_prompt: usize,
    n_run: usize,
    n_tokens: u64,
    since: Instant,
    is_streamed: bool,
}

impl Progress {
    fn new(n_prompt: usize, is_streamed: bool) -> Self {
        let bar = Bar::count("reading the prompt");
        let since = Instant::now();
        Self { bar, n_prompt, n_run: 0, n_tokens: 0, since, is_streamed }
    }

    fn tell(&mut self, event: Event) {
        match event {
            Event::Layer { phase: Phase::Prefill, layer, n_layers } => {
                self.bar.message(&format!(
                    "reading the prompt, {} of {} tokens done, layer",
                    self.n_run, self.n_prompt
                ));
                self.bar.set(layer as u64 + 1, n_layers as u64);
            }
            Event::Layer { phase: Phase::Decode, layer, n_layers } => {
                if !self.is_streamed {
                    self.bar.set(layer as u64 + 1, n_layers as u64);
                }
            }
            Event::Prefill { done, .. } => self.n_run = done,
            Event::Token(_) => self.token(),
        }
    }

    fn token(&mut self) {
        if self.is_streamed {
            // What is written to standard error would stand in the answer.
            if self.n_tokens == 0 {
                self.bar.clear();
            }
        } else {
            self.bar.message(&render::progress_of_tokens(self.n_tokens, self.since.elapsed()));
        }
        if self.n_tokens == 0 {
            self.since = Instant::now();
        }
        self.n_tokens += 1;
    }
}
