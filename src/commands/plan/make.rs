//! `tierkeep plan MODEL`: for this machine, for another one, or for one that does not exist.

use std::path::Path;

use anyhow::{Result, bail};
use tierkeep_doctor::{Facts, Measuring};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::{self, Advice, Change};
use tierkeep_plans::what_if::{Replaced, WhatIf};

use super::explain;
use crate::args::{ModelArg, PlanVerbArgs};
use crate::commands::model::{self, Opened};
use crate::commands::{Context, shared};
use crate::exit::Outcome;
use crate::render::{self, PlanView};

/// The file name that stands for standard output.
const STANDARD_OUTPUT: &str = "-";

pub(crate) fn run(target: &ModelArg, args: &PlanVerbArgs, context: &Context) -> Result<Outcome> {
    let output = args.output.as_deref();
    let is_streamed = output.is_some_and(|output| output.as_os_str() == STANDARD_OUTPUT);
    if is_streamed && context.json {
        bail!("-o - and --json both want standard output: write the plan to a file");
    }
    if let Some(output) = output.filter(|output| output.is_dir()) {
        bail!("{} is a folder: give a file name to write the plan to", output.display());
    }
    let opened = model::open(target, &args.remote, context)?;
    let model = &opened.catalogue;
    if (output.is_some() || context.json) && model.directory.to_str().is_none() {
        bail!(
            "a plan is text, and the name of the folder {} is not: give the folder another name, or a \
             link to it that has one and plan that",
            model.directory.display()
        );
    }
    for warning in &model.warnings {
        render::warning(&format!("{}; remedy: {}", warning.finding, warning.remedy));
    }
    let (facts, replaced) = machine(&opened, args, context)?;
    let history = shared::usage(context, model, args.planning.usage.as_deref());
    let mut options = shared::options(&args.planning);
    // A plan may say what another engine would need; `run` refuses what this one lacks. Cards are
    // planned with where a machine is described for that, or by name.
    options.engine.vram |=
        args.machine.is_some() || args.what_if.as_ref().is_some_and(WhatIf::is_of_cards);
    let plan = match shared::plan(model, &facts, &options, history.as_ref()) {
        Ok(plan) => plan,
        Err(error) => {
            let download = opened.download.as_ref();
            return shared::verdict_before(context, target.path(), download, error);
        }
    };
    if let Some(what) = &args.explain {
        return explain::run(what, (model, &plan), history.as_ref(), context);
    }
    let lacks = shared::lacks(&plan, model);
    let is_crowded = warn_of_threads(&plan);
    let outcome = if model.warnings.is_empty() && lacks.is_empty() && !is_crowded {
        Outcome::Fine
    } else {
        Outcome::Warnings
    };
    if is_streamed {
        for lack in &lacks {
            render::warning(&format!("{}; {}", lack.what, lack.remedy));
        }
        render::data(&plan.to_toml()?)?;
        return Ok(outcome);
    }
    if let Some(output) = output {
        plan.write(output)?;
    }
    let mut advice = planner::what_would_help(model, &plan, &options, history.as_ref());
    mark_advice(&mut advice, model);
    let view = PlanView { plan: &plan, replaced: &replaced, advice: &advice, lacks: &lacks };
    if context.json {
        let json = render::plan_json(&view)?;
        render::json(&render::with_download(json, opened.download.as_ref()))?;
    } else {
        render::data(&render::plan(&view, model, context.style))?;
        if let Some(download) = &opened.download {
            render::data(&format!("{}\n", render::download(download, context.style)))?;
        }
        render::next(&next(args, &opened, output, !lacks.is_empty()))?;
    }
    Ok(outcome)
}

/// Says of each change what this build cannot do about it, whatever engine was planned for.
fn mark_advice(advice: &mut [Advice], model: &Catalogue) {
    for one in advice {
        match one.change {
            Change::FewerBits if tierkeep_engine::supports(model).is_err() => {
                one.note =
                    "converting this model needs a newer tierkeep; it costs quality".to_owned();
            }
            Change::MoreVram if !tierkeep_engine::ABILITIES.vram && one.note.is_empty() => {
                one.note = "this build's engine does not use graphics cards yet".to_owned();
            }
            Change::FewerBits
            | Change::MoreVram
            | Change::MoreRam
            | Change::FasterDisk
            | Change::HalfContext => {}
        }
    }
}

/// Says so where more threads are asked for than the hardware runs at once; whether it did.
fn warn_of_threads(plan: &Plan) -> bool {
    let threads = plan.engine.threads;
    match plan.machine.cpu.usable_threads.value() {
        Some(&usable) if usable < threads => {
            render::warning(&format!(
                "{threads} threads on {usable} hardware threads wait for each other at every step and \
                 compute no faster; plan with --threads {usable}"
            ));
            true
        }
        Some(_) | None => false,
    }
}

/// The facts that are planned with, and what was changed in them.
fn machine(
    opened: &Opened,
    args: &PlanVerbArgs,
    context: &Context,
) -> Result<(Facts, Vec<Replaced>)> {
    let mut facts = match &args.machine {
        // Another machine's facts are all that is known of it: nothing here is looked at.
        Some(file) => Facts::read(file)?,
        None => opened.facts(context, measuring(args)),
    };
    let replaced = args.what_if.as_ref().map_or_else(Vec::new, |changes| changes.apply(&mut facts));
    Ok((facts, replaced))
}

/// What is to be measured: nothing that the user's own figures replace.
fn measuring(args: &PlanVerbArgs) -> Measuring {
    let replaces = |of: fn(&WhatIf) -> bool| args.what_if.as_ref().is_some_and(of);
    Measuring {
        memory: !args.no_measure && !replaces(WhatIf::replaces_memory_speed),
        disk: !args.no_measure && !replaces(WhatIf::replaces_disk),
    }
}

/// What to do with the plan.
fn next(args: &PlanVerbArgs, opened: &Opened, output: Option<&Path>, is_beyond: bool) -> String {
    let elsewhere = args.machine.is_some() || args.what_if.is_some();
    match output {
        Some(output) if elsewhere || is_beyond => format!("written to {}", output.display()),
        Some(output) if opened.download.is_some() => format!(
            "written to {0}; after the download: tierkeep run {0} --model DIR -p \"...\"",
            output.display()
        ),
        Some(output) => {
            format!("written to {0}; next: tierkeep run {0} -p \"...\"", output.display())
        }
        None => "not written; give -o plan.toml to keep it".to_owned(),
    }
}
