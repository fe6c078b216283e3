//! `tierkeep plan MODEL`.

use anyhow::{Result, bail};

use super::{Context, shared};
use crate::args::PlanVerbArgs;
use crate::exit::Outcome;
use crate::render;

pub(crate) fn run(args: &PlanVerbArgs, context: &Context) -> Result<Outcome> {
    let model = shared::open_model(&args.model)?;
    for warning in &model.warnings {
        render::warning(&format!("{}; remedy: {}", warning.finding, warning.remedy));
    }
    if let Some(output) = &args.output
        && output.is_dir()
    {
        bail!("{} is a folder: give a file name to write the plan to", output.display());
    }
    let facts = shared::facts(Some(&model), Some(&model.directory), !args.no_measure);
    let usage = shared::usage(context, &model, args.planning.usage.as_deref());
    let mut options = shared::options(&args.planning);
    // A plan may say what another engine would need; `run` refuses what this one lacks.
    options.engine.streamed_dense = true;
    let plan = match shared::plan(&model, &facts, &options, usage.as_ref()) {
        Ok(plan) => plan,
        Err(error) => return shared::verdict(context, &args.model, error),
    };
    if let Some(output) = &args.output {
        plan.write(output)?;
    }
    if context.json {
        render::json(&plan)?;
    } else {
        render::data(&render::plan(&plan, &model, context.style))?;
        if let Some(output) = &args.output {
            render::next(&format!(
                "written to {0}; next: tierkeep run {0} -p \"...\"",
                output.display()
            ))?;
        } else {
            render::next("not written; give -o plan.toml to keep it")?;
        }
    }
    Ok(if model.warnings.is_empty() { Outcome::Fine } else { Outcome::Warnings })
}
