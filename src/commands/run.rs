//! `tierkeep run PLAN|MODEL`. `ready` owns what is refused before anything is loaded, `prompt` what the
//! run goes on with.

mod prompt;
pub(super) mod ready;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use tierkeep_doctor::Facts;
use tierkeep_engine::Phase;
use tierkeep_engine::generate::{Ended, Event, Generation, Mark, generate};
use tierkeep_engine::report::{Loaded, RunReport};
use tierkeep_engine::text::Text;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::{Plan, PlanError};
use tierkeep_plans::planner::Options;
use tierkeep_plans::planner::again;
use tierkeep_plans::units::SizeRequest;
use tierkeep_plans::usage::{self, Interval};
use tierkeep_plans::whole_file;

pub(crate) use self::ready::PlanAgain;
use super::memory::{self, Memory};
use super::saving::{self, Saving};
use super::{Context, model, shared};
use crate::args::{PlanningArgs, RunArgs};
use crate::exit::Outcome;
use crate::render::{self, Answer, Bar};

/// What a plan that was made for one run would be called.
const PLAN_NAME: &str = "plan.toml";

/// What is run once a plan is there.
pub(super) struct Job<'a> {
    pub(super) plan: &'a Plan,
    pub(super) model: &'a Catalogue,
    pub(super) text: Option<&'a Text>,
    pub(super) prompt: &'a [u32],
    pub(super) max_tokens: usize,
    pub(super) ignore_stop: bool,
    /// Where time goes is measured.
    pub(super) profile: bool,
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

/// A plan with its model, and what is known of this machine now.
struct Ready {
    plan: Plan,
    model: Catalogue,
    today: Facts,
    /// Where the plan is, or would be written to.
    file: PathBuf,
}

pub(crate) fn run(args: &RunArgs, context: &Context) -> Result<Outcome> {
    let target = args.target.path();
    let planned = match model::folder_to_run(&args.target, context)? {
        Some(directory) => planned(args, &directory, context),
        None => read_plan(args, context),
    };
    let ready = match planned {
        Ok(planned) => planned,
        Err(error) => return shared::verdict(context, target, error),
    };
    let Ready { plan, model, today, file } = &ready;
    let allow_overcommit = args.planning.allow_overcommit;
    let is_warned = ready::check((plan, model), today, allow_overcommit, file)?;
    let text = prompt::text(args, model)?;
    let prompt = prompt::tokens(args, text.as_ref())?;
    prompt::check(&prompt, args.max_tokens, (plan, model), file)?;
    if let Some(path) = &args.report {
        // Before hours of work, not after them.
        whole_file::check(path)
            .with_context(|| format!("the report cannot be written to {}", path.display()))?;
    }
    let usage = (!args.no_usage).then(|| {
        args.planning.usage.clone().unwrap_or_else(|| {
            let data_dir = context.data_dir.as_deref();
            usage::default_path(&model.directory, data_dir, &model.fingerprint)
        })
    });
    let job = Job {
        plan,
        model,
        text: text.as_ref(),
        prompt: &prompt,
        max_tokens: args.max_tokens,
        ignore_stop: args.ignore_stop,
        profile: args.profile,
        usage: usage.as_deref(),
        saves: args.save_every.map_or(Interval::Usual, Interval::Tokens),
        stream: !context.json,
    };
    let finished = execute(&job, context)?;
    let json = || render::run_json(&finished.report, &finished.memory, finished.text.as_deref());
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
    // Last, so that a file that cannot be written takes nothing from what is shown.
    let mut is_unwritten = false;
    if let Some(path) = &args.report {
        let text = format!("{}\n", serde_json::to_string_pretty(&json())?);
        if let Err(error) = whole_file::write(path, &text) {
            is_unwritten = true;
            let path = path.display();
            render::warning(&format!("the report was not written to {path}: {error}"));
        }
    }
    Ok(if finished.report.ended == Ended::Interrupted {
        Outcome::Interrupted
    } else if is_unwritten {
        Outcome::NotWritten
    } else if finished.has_warnings || is_warned {
        Outcome::Warnings
    } else {
        Outcome::Fine
    })
}

/// Plans the model first; the plan is printed, so that it is known what is executed.
fn planned(args: &RunArgs, directory: &Path, context: &Context) -> Result<Ready> {
    let model = shared::open_model(context, directory)?;
    let facts = shared::facts_apart(context, &model, !args.no_measure);
    let history = if args.no_usage {
        None
    } else {
        shared::usage(context, &model, args.planning.usage.as_deref())
    };
    let options = shared::options(&args.planning);
    let plan = shared::plan(&model, &facts, &options, history.as_ref())?;
    let style = render::error_style();
    render::note(render::plan_in_brief(&plan, style).trim_end());
    let file = PathBuf::from(PLAN_NAME);
    let kept = Options {
        ram: Some(SizeRequest::Absolute(plan.request.budget_bytes)),
        context: Some(plan.request.context),
        ..options
    };
    let command = again::command(&model.directory, &kept, &file);
    render::note(render::keep_the_plan(&command, style).trim_end());
    Ok(Ready { plan, model, today: facts, file })
}

fn read_plan(args: &RunArgs, context: &Context) -> Result<Ready> {
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
    if let Err(error) = plan.check(&model) {
        // A plan that contradicts itself says nothing of what it was made with.
        if let PlanError::OtherModel { .. } = error {
            let options = again::options_of(&plan);
            let command = again::command(&model.directory, &options, target);
            return Err(PlanAgain::new(error, command).into());
        }
        return Err(error.into());
    }
    // Nothing is measured: a run is not to wait for that.
    let today = shared::facts(context, Some(&model), Some(&model.directory), false);
    Ok(Ready { plan, model, today, file: target.to_owned() })
}

/// The first planning flag that was given. To insist on a plan that there is no memory for is no part
/// of the plan.
fn planning_flag(run: &RunArgs) -> Option<&'static str> {
    let planning = PlanningArgs { allow_overcommit: false, ..run.planning.clone() };
    planning.given().or(run.no_measure.then_some("--no-measure"))
}

/// Loads, generates, saves the history, reports.
pub(super) fn execute(job: &Job<'_>, context: &Context) -> Result<Finished> {
    let before = memory::resident();
    let start = Instant::now();
    let mut engine = shared::load(job.plan, job.model)?;
    engine.set_profile(job.profile);
    let _heeding = context.heeding();
    let is_short_of_threads = ready::check_threads(job.plan);
    let loaded = Loaded { time: start.elapsed(), mark: Mark::of(&engine) };
    let before = memory::Before { loading: before, fetched: memory::fetched() };
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
    let memory = Memory::now(job.model, before);
    let report = RunReport::new(&engine, job.plan, &generation, &loaded, memory.seen());
    let saved = saving.finish(Some(report.record(job.plan)));
    report.warnings.iter().for_each(|warning| render::warning(&warning.to_string()));
    let has_warnings =
        is_short_of_threads || !report.warnings.is_empty() || saved == saving::Outcome::Failed;
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
        let bar = Bar::layers("reading the prompt, layer");
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
