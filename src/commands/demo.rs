//! `tierkeep demo`: the whole motion on the small model in `examples/`: look at the machine, plan
//! under a budget that does not hold every expert, run, learn, plan again, run again.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use tierkeep_engine::generate::{Event, generate};
use tierkeep_engine::text::Text;
use tierkeep_engine::{Engine, Phase};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::{self, Options, PinRule};
use tierkeep_plans::units::SizeRequest;
use tierkeep_plans::usage::{self, History, Interval, RunRecord};

use super::saving::Saving;
use super::{Context, shared};
use crate::args::DemoArgs;
use crate::exit::Outcome;
use crate::render::{self, Answer};

/// Share of the expert slots that the demo's budget holds.
const SLOT_SHARE: f64 = 0.25;
/// Share of the slots that is pinned where the planner would pin nothing.
const PIN_SHARE: f64 = 0.5;
/// Context of the demo, tokens.
const CONTEXT: u64 = 256;
/// Tokens of prose that are asked for.
const PROSE_TOKENS: usize = 64;

/// A prompt: a question through the chat template, or the beginning of some prose.
struct Prompt {
    text: &'static str,
    is_prose: bool,
}

const fn question(text: &'static str) -> Prompt {
    Prompt { text, is_prose: false }
}

const fn prose(text: &'static str) -> Prompt {
    Prompt { text, is_prose: true }
}

/// Sums, counting, a person as JSON, and two kinds of prose; each kind twice, for the planner judges
/// pins from the first half of a session on its second half.
const FIRST: [Prompt; 10] = [
    question("What is 2+2?"),
    question("Count from 3 to 14."),
    question("Give the person as JSON: Ada is a 34 year old pilot from Lima."),
    prose("Call me Ishmael. Some years ago"),
    prose("The foreign relations of the United States"),
    question("What is 9+4?"),
    question("Write 18 in words."),
    question("Vera, 51, works as a baker in Oslo. Where does Vera live?"),
    prose("The whale rose out of the sea"),
    prose("The Congress of the United States"),
];

/// Others of the same kinds.
const SECOND: [Prompt; 5] = [
    question("What is 5+3?"),
    question("Count from 6 to 15."),
    question("Give the person as JSON: Hugo, 52, works as a doctor in Milan."),
    prose("It was a clear steel-blue day."),
    prose("During the past year the revenues of the Government"),
];

/// What one run of prompts came to.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DemoRun {
    /// Decoded tokens.
    pub(crate) tokens: usize,
    /// Decode speed.
    pub(crate) tokens_per_s: Option<f64>,
    /// Hits over accesses in decode.
    pub(crate) hit_rate: Option<f64>,
    /// Share of accesses that pins answered.
    pub(crate) pinned_share: f64,
    /// Bytes read after loading.
    pub(crate) read_bytes: u64,
    /// Pinned experts.
    pub(crate) pins: usize,
    /// Why there are these pins, or none.
    pub(crate) pins_evidence: String,
    /// What the plan expected of the hit rate.
    pub(crate) expected_hit_rate: f64,
    /// Prompts and answers.
    pub(crate) answers: Vec<(String, String)>,
}

pub(crate) fn run(args: &DemoArgs, context: &Context) -> Result<Outcome> {
    let directory = match &args.model {
        Some(model) => model.clone(),
        None => find_model(context)?,
    };
    let model = shared::open_model(context, &directory)?;
    let text = Text::open(&model.directory)?;
    let show = !context.json;
    let style = context.style;
    let title = |title: &str| render::data(&render::demo_title(title, style));

    let facts = shared::facts_apart(context, &model, true);
    let _heeding = context.heeding();
    if show {
        render::data(&render::demo_machine(&facts, &model, style))?;
    }
    let options = Options {
        context: Some(CONTEXT.min(model.spec.max_context as u64)),
        engine: tierkeep_engine::ABILITIES,
        ..Options::default()
    };
    let budget = planner::budget_for_share(&model, &facts, &options, SLOT_SHARE)
        .context("no budget holds a share of this model's experts")?;
    let options = Options { ram: Some(SizeRequest::Absolute(budget)), ..options };
    let make = |history: Option<&History>, pins: PinRule| {
        let options = Options { pins, ..options.clone() };
        let mut plan = shared::plan(&model, &facts, &options, history)?;
        plan.request.budget_source =
            format!("chosen for the demo: {:.0} % of the experts have a slot", SLOT_SHARE * 100.0);
        Ok::<_, anyhow::Error>(plan)
    };
    let first_plan = make(None, PinRule::None)?;
    if show {
        title("2. plan, for a budget that does not hold every expert")?;
        let view = render::PlanView::bare(&first_plan);
        render::data(&render::plan(&view, &model, style))?;
        title("3. run it: an answer, a count, a person as JSON, some prose")?;
    }

    // The history of a demo is nobody's work: it goes to a folder that goes away.
    let folder = tempfile::tempdir().context("a temporary folder for the usage history")?;
    let file = folder.path().join("glm-nano.usage");
    let demo = Demo { model: &model, text: &text, context, show };
    let first = demo.session(&first_plan, &FIRST, Some(&file))?;
    let history = match usage::load(&file, &model.fingerprint) {
        usage::LoadOutcome::Loaded(history) => Some(history),
        _ => None,
    };
    let judged = make(history.as_ref(), PinRule::Judged)?;
    // The demo shows pins even where the planner would leave them out, and says so.
    let would_pin = judged.placement.slots.pins.iter().any(|pins| !pins.is_empty());
    let second_plan =
        if would_pin { judged.clone() } else { make(history.as_ref(), PinRule::Share(PIN_SHARE))? };
    let unpinned = make(history.as_ref(), PinRule::None)?;
    if show {
        render::data(&render::demo_run(&first, style))?;
        title("4. run again on other prompts of the same kinds, with what was learned")?;
    }
    let second = demo.session(&second_plan, &SECOND, None)?;
    // The same prompts without pins, so that the comparison is of pins and not of prompts.
    let quiet = Demo { show: false, ..demo };
    let without = quiet.session(&unpinned, &SECOND, None)?;
    let same = second.answers == without.answers;
    if context.json {
        render::json(&serde_json::json!({
            "schema_version": 1, "first": first, "second": second,
            "second_without_pins": without, "same_answers": same,
        }))?;
    } else {
        render::data(&render::demo_run(&second, style))?;
        let judgement = &judged.placement.pins_evidence;
        let runs = (&first, &second, &without);
        render::data(&render::demo_close(runs, (judgement, same), &directory, style))?;
    }
    if !same {
        bail!("the same prompts gave other answers with other pins: please report this");
    }
    Ok(if context.interrupted.load(Ordering::SeqCst) {
        Outcome::Interrupted
    } else {
        Outcome::Fine
    })
}

/// What every session of the demo shares.
#[derive(Clone, Copy)]
struct Demo<'a> {
    model: &'a Catalogue,
    text: &'a Text,
    context: &'a Context,
    show: bool,
}

impl Demo<'_> {
    /// Runs prompts one after another in one engine; the history goes to `file`.
    fn session(&self, plan: &Plan, prompts: &[Prompt], file: Option<&Path>) -> Result<DemoRun> {
        let mut engine = shared::load(plan, self.model)?;
        let loaded = engine.read_counter().bytes();
        let mut saving = Saving::new(shared::session(self.model), file, Interval::Usual);
        let mut answers = Vec::with_capacity(prompts.len());
        let mut steps = Vec::new();
        for prompt in prompts {
            if self.context.interrupted.load(Ordering::SeqCst) {
                break;
            }
            let (answer, mut times) = self.answer(&mut engine, prompt, &mut saving)?;
            answers.push((prompt.text.to_owned(), answer));
            steps.append(&mut times);
        }
        let counts = engine.counters().total(Phase::Decode);
        let time: std::time::Duration = steps.iter().sum();
        let tokens_per_s = (!time.is_zero()).then(|| steps.len() as f64 / time.as_secs_f64());
        saving.finish(Some(RunRecord {
            uncalibrated_tok_per_s: Some(
                plan.prediction.decode_tokens_per_s.p50 / plan.prediction.calibration,
            ),
            actual_tok_per_s: tokens_per_s,
            ..RunRecord::default()
        }));
        Ok(DemoRun {
            tokens: steps.len(),
            tokens_per_s,
            hit_rate: counts.hit_rate(),
            pinned_share: counts.pinned_hits as f64 / counts.accesses().max(1) as f64,
            read_bytes: engine.read_counter().bytes() - loaded,
            pins: plan.placement.slots.pins.iter().map(Vec::len).sum(),
            pins_evidence: plan.placement.pins_evidence.clone(),
            expected_hit_rate: plan.prediction.hit_rate.p50,
            answers,
        })
    }

    fn answer(
        &self,
        engine: &mut Engine,
        prompt: &Prompt,
        saving: &mut Saving<'_>,
    ) -> Result<(String, Vec<std::time::Duration>)> {
        let tokens = shared::encode(self.text, prompt.text, None, prompt.is_prose)?;
        let stop_tokens = &self.model.spec.stop_tokens;
        let mut answer = Answer::new(Some(self.text), stop_tokens, self.show);
        if self.show {
            render::data(&render::demo_prompt(prompt.text, prompt.is_prose))?;
        }
        let mut failure = None;
        engine.clear();
        let generation =
            generate(engine, &tokens, PROSE_TOKENS, stop_tokens, Some(saving), &mut |event| {
                if let Event::Token(token) = event
                    && let Err(error) = answer.push(token)
                {
                    failure = Some(error);
                    return ControlFlow::Break(());
                }
                if self.context.interrupted.load(Ordering::SeqCst) {
                    return ControlFlow::Break(());
                }
                ControlFlow::Continue(())
            })?;
        if let Some(error) = failure {
            return Err(error);
        }
        Ok((answer.finish()?.unwrap_or_default(), generation.steps))
    }
}

/// The demo's model: beside the binary, above it (as in a checkout), or where it was built.
fn find_model(context: &Context) -> Result<PathBuf> {
    const PLACE: &str = "examples/glm-nano";
    let mut roots: Vec<PathBuf> = Vec::new();
    if let Some(program) = &context.program {
        let program = program.canonicalize().unwrap_or_else(|_| program.clone());
        roots.extend(program.ancestors().skip(1).take(4).map(Path::to_owned));
        roots.extend(program.ancestors().nth(2).map(|p| p.join("share/tierkeep")));
    }
    roots.extend(context.work_dir.clone());
    roots.push(PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    let found = roots.iter().map(|r| r.join(PLACE)).find(|p| p.join("config.json").is_file());
    found.with_context(|| {
        format!("{PLACE} is neither near this binary nor here: name its folder with --model DIR")
    })
}
