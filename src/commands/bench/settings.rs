//! What is compared: every target with every combination of the options that are varied, each as a plan
//! that can be executed here and now.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context as _, Result};
use tierkeep_doctor::Facts;
use tierkeep_engine::EngineError;
use tierkeep_engine::bench::sweep;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::PlanRefusal;
use tierkeep_plans::units::{Bytes, SizeRequest};

use super::bad_option;
use crate::args::{BenchModelArgs, ModelArg, PlanningArgs, Sweep, Vary};
use crate::commands::{Context, model, run, shared};

/// Tokens before decoding where nothing is asked for.
const DEFAULT_CONTEXT: usize = 128;
/// Contexts of a curve where none are given.
const SWEPT_CONTEXTS: [usize; 4] = [64, 256, 1024, 4096];
/// Budgets of a curve where none are given.
const SWEPT_BUDGETS: usize = 5;
/// Most configurations of one run.
const MOST_CONFIGURATIONS: usize = 256;

/// One of those that are compared.
pub(super) struct Configuration {
    /// A letter.
    pub(super) name: String,
    /// What it is: its target where there are several, and what is varied.
    pub(super) label: String,
    /// Its place on the axis of a curve over budgets or threads.
    pub(super) value: Option<f64>,
    pub(super) model: Rc<Catalogue>,
    pub(super) plan: Plan,
}

/// What is to be measured.
pub(super) struct Found {
    pub(super) configurations: Vec<Configuration>,
    /// Tokens in the sequence when decoding begins.
    pub(super) contexts: Vec<usize>,
    /// Whether a plan was warned of.
    pub(super) is_warned: bool,
}

/// A target as it was opened.
struct Target<'a> {
    argument: &'a ModelArg,
    model: Rc<Catalogue>,
    /// Of this machine: measured for a model, read for a plan.
    facts: Facts,
    /// Where it is a plan file.
    plan: Option<Plan>,
}

/// Everything that was asked for, planned.
pub(super) fn configurations(args: &BenchModelArgs, context: &Context) -> Result<Found> {
    if args.repeat == 0 || args.prompt == 0 {
        let option = if args.repeat == 0 { "--repeat" } else { "--prompt" };
        return Err(bad_option(option, "0", "at least 1"));
    }
    if args.sweep.is_some() && args.targets.len() > 1 {
        return Err(bad_option("--sweep", "over several models or plans", "one of them"));
    }
    let most = if args.sweep == Some(Sweep::Context) { 0 } else { 1 };
    if args.sweep.is_some() && args.contexts.len() > most {
        let expected = "--over for a curve over contexts, one context for another";
        return Err(bad_option(
            "--contexts",
            format!("has {} with --sweep", args.contexts.len()),
            expected,
        ));
    }
    let targets: Vec<Target<'_>> =
        args.targets.iter().map(|target| open(target, args, context)).collect::<Result<_>>()?;
    let contexts = contexts(args, &targets)?;
    let mut configurations = Vec::new();
    let mut is_warned = false;
    for target in &targets {
        let vary = vary(args, target, &contexts, context)?;
        for settings in combinations(&vary)? {
            let plan = plan(args, target, &settings, &contexts, context)?;
            is_warned |= run::ready::check(
                (&plan, &target.model),
                &target.facts,
                args.planning.allow_overcommit,
                Path::new("plan.toml"),
            )?;
            configurations.push(Configuration {
                name: letter(configurations.len()),
                label: label(target, targets.len() > 1, &settings),
                value: value(args.sweep, &plan),
                model: Rc::clone(&target.model),
                plan,
            });
            if configurations.len() > MOST_CONFIGURATIONS {
                let expected = format!("at most {MOST_CONFIGURATIONS} configurations");
                return Err(bad_option("--vary", "has too many combinations", expected));
            }
        }
    }
    Ok(Found { configurations, contexts, is_warned })
}

fn open<'a>(
    argument: &'a ModelArg,
    args: &BenchModelArgs,
    context: &Context,
) -> Result<Target<'a>> {
    if let Some(directory) = model::folder_to_run(argument, context)? {
        let model = Rc::new(shared::open_model(context, &directory)?);
        let facts = shared::facts_apart(context, &model, !args.no_measure);
        return Ok(Target { argument, model, facts, plan: None });
    }
    let path = argument.path();
    let plan = Plan::read(path)?;
    if let Some(flag) = args.planning.given() {
        let found = format!("belongs to the plan, which {} already is", path.display());
        return Err(bad_option(flag, found, "a model's folder, or the plan alone"));
    }
    let directory = model::folder_of_plan(path, &plan.model.directory, None, context)?;
    let model = shared::open_model(context, &directory)
        .with_context(|| format!("the model of {}", path.display()))?;
    plan.check(&model)?;
    let facts = shared::facts(context, Some(&model), Some(&model.directory), false);
    Ok(Target { argument, model: Rc::new(model), facts, plan: Some(plan) })
}

/// Tokens in the sequence at which is measured: each with the decoded ones within every model and plan.
fn contexts(args: &BenchModelArgs, targets: &[Target<'_>]) -> Result<Vec<usize>> {
    let of_plan = targets.iter().filter_map(|target| target.plan.as_ref());
    let planned = of_plan.map(|plan| plan.request.context).chain(args.planning.ctx).min();
    let planned = planned.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX));
    let most = targets.iter().map(|target| target.model.spec.max_context).min().unwrap_or(1);
    let room = most.min(planned).saturating_sub(args.decode);
    let asked: Vec<usize> = match args.sweep {
        Some(Sweep::Context) if !args.over.is_empty() => {
            let number = |text: &String| {
                text.parse()
                    .map_err(|_| bad_option("--over", format!("{text:?}"), "a number of tokens"))
            };
            args.over.iter().map(number).collect::<Result<_>>()?
        }
        Some(Sweep::Context) => SWEPT_CONTEXTS.into_iter().filter(|&n| n <= room).collect(),
        _ => args.contexts.clone(),
    };
    if asked.is_empty() {
        if room == 0 {
            let found = args.decode.to_string();
            let expected =
                format!("less than the {} tokens that there is room for", most.min(planned));
            return Err(bad_option("--decode", found, expected));
        }
        return Ok(vec![DEFAULT_CONTEXT.min(room)]);
    }
    if asked.contains(&0) {
        return Err(bad_option("--contexts", "0", "at least 1 token"));
    }
    let longest = asked.iter().copied().max().unwrap_or(1);
    let wanted = longest.saturating_add(args.decode);
    if wanted > most {
        let found = format!("{longest} with {} decoded tokens", args.decode);
        return Err(bad_option("--contexts", found, format!("at most the model's {most}")));
    }
    if wanted > planned {
        return Err(EngineError::ContextFull { wanted, context: planned })
            .context("--contexts (plan with a larger --ctx)");
    }
    Ok(asked)
}

/// What is varied for a target, the values of a curve included.
fn vary(
    args: &BenchModelArgs,
    target: &Target<'_>,
    contexts: &[usize],
    context: &Context,
) -> Result<Vec<Vary>> {
    let mut vary = args.vary.clone();
    let is_planned = target.plan.is_some();
    if let Some(first) = vary.first().filter(|_| is_planned) {
        let found = format!(
            "{} would change the plan that {} already is",
            first.option,
            target.argument.path().display()
        );
        return Err(bad_option("--vary", found, "a model's folder, or several plans"));
    }
    let texts = |values: &[u64]| values.iter().map(u64::to_string).collect();
    if !args.threads_list.is_empty() {
        vary.push(Vary { option: "threads".to_owned(), values: texts(&args.threads_list) });
    }
    let swept = match args.sweep {
        None | Some(Sweep::Context) => return Ok(vary),
        Some(Sweep::Threads) => "threads",
        Some(Sweep::Ram) if is_planned => {
            return Err(bad_option("--sweep", "ram of a plan file", "a model's folder"));
        }
        Some(Sweep::Ram) => "ram",
    };
    if vary.iter().any(|vary| vary.option == swept) {
        return Err(bad_option("--sweep", format!("{swept}, which is varied too"), "one of both"));
    }
    let values = if !args.over.is_empty() {
        args.over.clone()
    } else if swept == "threads" {
        let usable = target.facts.cpu.usable_threads.value().copied().unwrap_or(1);
        texts(&sweep::threads(usable))
    } else {
        let budgets = budgets(args, target, contexts, context)?;
        budgets.iter().map(|budget| budget.0.to_string()).collect()
    };
    vary.push(Vary { option: swept.to_owned(), values });
    Ok(vary)
}

/// Budgets from the least that does to what all experts take, or to what is available.
fn budgets(
    args: &BenchModelArgs,
    target: &Target<'_>,
    contexts: &[usize],
    context: &Context,
) -> Result<Vec<Bytes>> {
    let with_budget = |bytes: Bytes, insists: bool| PlanningArgs {
        ram: Some(SizeRequest::Absolute(bytes)),
        allow_overcommit: insists || args.planning.allow_overcommit,
        ..args.planning.clone()
    };
    let least = match planned(args, &with_budget(Bytes(1), false), target, contexts, context) {
        Ok(plan) => plan.ledger.total(),
        Err(error) => match error.downcast_ref() {
            Some(PlanRefusal::DoesNotFit { result, .. }) => result.smallest_budget,
            _ => return Err(error),
        },
    };
    let all = least + target.model.total_bytes() + target.model.total_bytes();
    let most = planned(args, &with_budget(all, true), target, contexts, context)?.ledger.total();
    let usable = target.facts.memory.usable_bytes.value().copied().map_or(most, Bytes);
    Ok(sweep::budgets(least, most.min(usable), SWEPT_BUDGETS))
}

/// Every combination of values, the last option's changing fastest.
fn combinations(vary: &[Vary]) -> Result<Vec<Vec<(String, String)>>> {
    let mut all: Vec<Vec<(String, String)>> = vec![Vec::new()];
    for Vary { option, values } in vary {
        if vary.iter().filter(|other| other.option == *option).count() > 1 {
            return Err(bad_option("--vary", format!("{option} twice"), "each option once"));
        }
        let longer = all.iter().flat_map(|settings| {
            values.iter().map(move |value| {
                let mut settings = settings.clone();
                settings.push((option.clone(), value.clone()));
                settings
            })
        });
        all = longer.collect();
        if all.len() > MOST_CONFIGURATIONS {
            let expected = format!("at most {MOST_CONFIGURATIONS} configurations");
            return Err(bad_option("--vary", "has too many combinations", expected));
        }
    }
    Ok(all)
}

/// The plan of a combination. Of a plan file only threads can be another number: all else would be
/// another plan.
fn plan(
    args: &BenchModelArgs,
    target: &Target<'_>,
    settings: &[(String, String)],
    contexts: &[usize],
    context: &Context,
) -> Result<Plan> {
    let varied = args.planning.with(settings).map_err(|error| {
        let said = error.to_string();
        let said = said.trim_start_matches("error: ").lines().next().unwrap_or_default();
        bad_option("--vary", said, "an option of `tierkeep plan` with values that it takes")
    })?;
    let Some(plan) = &target.plan else {
        return planned(args, &varied, target, contexts, context);
    };
    let mut plan = plan.clone();
    if let Some(threads) = varied.threads {
        plan.engine.threads = threads;
        // As the planner has it: fewer threads than cores are held nowhere.
        if plan.engine.cpus.len() as u64 != threads {
            plan.engine.cpus.clear();
        }
        plan.settle(&target.model);
        plan.check(&target.model)?;
    }
    Ok(plan)
}

fn planned(
    args: &BenchModelArgs,
    planning: &PlanningArgs,
    target: &Target<'_>,
    contexts: &[usize],
    context: &Context,
) -> Result<Plan> {
    let longest = contexts.iter().copied().max().unwrap_or(1).saturating_add(args.decode);
    // The warm-up is a sequence too.
    let warm_up = args.prompt.saturating_add(args.warm_up);
    let least = longest.max(warm_up.min(target.model.spec.max_context)) as u64;
    let mut options = shared::options(planning);
    options.context = Some(options.context.unwrap_or(least));
    // Without a file of its own a measurement neither learns nor is taught.
    let history = planning
        .usage
        .as_deref()
        .and_then(|path| shared::usage(context, &target.model, Some(path)));
    shared::plan(&target.model, &target.facts, &options, history.as_ref())
}

fn value(sweep: Option<Sweep>, plan: &Plan) -> Option<f64> {
    match sweep? {
        Sweep::Ram => Some(plan.request.budget_bytes.as_f64()),
        Sweep::Threads => Some(plan.engine.threads as f64),
        Sweep::Context => None,
    }
}

fn label(target: &Target<'_>, is_one_of_many: bool, settings: &[(String, String)]) -> String {
    let path: PathBuf = target.argument.path().to_owned();
    let mut parts = Vec::new();
    if is_one_of_many || settings.is_empty() {
        parts.push(path.display().to_string());
    }
    parts.extend(settings.iter().map(|(option, value)| match value.parse::<u64>() {
        Ok(bytes) if option == "ram" => format!("ram={}", Bytes(bytes)),
        _ => format!("{option}={value}"),
    }));
    parts.join(" ")
}

/// A, B, ..., Z, AA, AB, ...
fn letter(at: usize) -> String {
    let last = char::from(b'A' + (at % 26) as u8);
    match at / 26 {
        0 => last.to_string(),
        more => format!("{}{last}", letter(more - 1)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops where something is wrong")]
mod tests {
    use super::*;

    #[test]
    fn combinations_are_all_pairs_in_order() {
        let vary: Vec<Vary> = ["a=1,2", "b=x,y"].map(|text| text.parse().unwrap()).into();
        let all: Vec<String> = combinations(&vary)
            .unwrap()
            .iter()
            .map(|settings| settings.iter().map(|(o, v)| format!("{o}{v}")).collect())
            .collect();
        assert_eq!(all, ["a1bx", "a1by", "a2bx", "a2by"]);
        assert_eq!(combinations(&[]).unwrap(), [Vec::new()]);
        assert!(combinations(&[vary[0].clone(), vary[0].clone()]).is_err());
    }

    #[test]
    fn letters_go_on_after_z() {
        let names: Vec<String> = [0, 25, 26, 27, 51, 52].map(letter).into();
        assert_eq!(names, ["A", "Z", "AA", "AB", "AZ", "BA"]);
    }
}
