//! `tierkeep plan PLAN`: a plan file as people read it, or one weight of it explained.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use tierkeep_plans::plan::Plan;

use super::explain;
use crate::args::{ModelArg, PlanVerbArgs};
use crate::commands::{Context, model, shared};
use crate::exit::Outcome;
use crate::render::{self, PlanView};

pub(crate) fn run(path: &Path, args: &PlanVerbArgs, context: &Context) -> Result<Outcome> {
    let plan = Plan::read(path)?;
    // A plan is shown as it stands: a flag that asks for something else is not ignored.
    let others = [
        ("--no-measure", args.no_measure),
        ("--machine", args.machine.is_some()),
        ("--what-if", args.what_if.is_some()),
        ("--output", args.output.is_some()),
    ];
    let other = others.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag);
    if let Some(flag) = args.planning.given().or(other) {
        bail!(
            "{flag} belongs to planning, and {} is a plan already: plan its model again with it",
            path.display()
        );
    }
    let named = ModelArg::from(plan.model.directory.clone().into_os_string());
    let opened = model::open(&named, &args.remote, context)
        .with_context(|| format!("the model of {}", path.display()))?;
    let model = &opened.catalogue;
    plan.check(model)?;
    if let Some(what) = &args.explain {
        let history = shared::usage(context, model, args.planning.usage.as_deref());
        return explain::run(what, (model, &plan), history.as_ref(), context);
    }
    let lacks = shared::lacks(&plan, model);
    let view = PlanView { lacks: &lacks, ..PlanView::bare(&plan) };
    if context.json {
        render::json(&render::plan_json(&view)?)?;
    } else {
        render::data(&render::plan(&view, model, context.style))?;
    }
    Ok(Outcome::Fine)
}
