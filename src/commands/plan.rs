//! `tierkeep plan MODEL`.

use anyhow::{Result, bail};

use super::{Context, model, shared};
use crate::args::PlanVerbArgs;
use crate::exit::Outcome;
use crate::render;

pub(crate) fn run(args: &PlanVerbArgs, context: &Context) -> Result<Outcome> {
    let opened = model::open(&args.model, &args.remote, context)?;
    let model = &opened.catalogue;
    for warning in &model.warnings {
        render::warning(&format!("{}; remedy: {}", warning.finding, warning.remedy));
    }
    if let Some(output) = &args.output
        && output.is_dir()
    {
        bail!("{} is a folder: give a file name to write the plan to", output.display());
    }
    let facts = opened.facts(context, !args.no_measure);
    let usage = shared::usage(context, model, args.planning.usage.as_deref());
    let mut options = shared::options(&args.planning);
    // A plan may say what another engine would need; `run` refuses what this one lacks.
    options.engine.streamed_dense = true;
    let plan = match shared::plan(model, &facts, &options, usage.as_ref()) {
        Ok(plan) => plan,
        Err(error) => return shared::verdict(context, args.model.path(), error),
    };
    if let Some(output) = &args.output {
        plan.write(output)?;
    }
    if context.json {
        let mut json = serde_json::to_value(&plan)?;
        if let (Some(download), Some(json)) = (&opened.download, json.as_object_mut()) {
            json.insert("download".to_owned(), render::download_json(download));
        }
        render::json(&json)?;
    } else {
        render::data(&render::plan(&plan, model, context.style))?;
        if let Some(download) = &opened.download {
            render::data(&format!("{}\n", render::download(download, context.style)))?;
        }
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
