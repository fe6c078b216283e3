//! `tierkeep plan --check PLAN`.

use std::path::Path;

use anyhow::{Context as _, Result};
use tierkeep_plans::plan::Plan;
use tierkeep_plans::stale;

use crate::args::{ModelArg, PlanVerbArgs};
use crate::commands::{Context, model};
use crate::exit::Outcome;
use crate::render;

pub(crate) fn run(path: &Path, args: &PlanVerbArgs, context: &Context) -> Result<Outcome> {
    let plan = Plan::read(path)?;
    let of_plan = ModelArg::from(plan.model.directory.clone().into_os_string());
    let named = args.model.as_ref().unwrap_or(&of_plan);
    let opened = model::open(named, &args.remote, context).with_context(|| {
        format!("the model of {} (name it before --check if it moved)", path.display())
    })?;
    let model = &opened.catalogue;
    // Nothing is measured: whether a plan holds is asked before a run, which is not to wait.
    let facts = match &args.machine {
        Some(file) => tierkeep_doctor::Facts::read(file)?,
        None => opened.facts(context, false),
    };
    let findings = stale::check(&plan, model, &facts);
    let is_stale = stale::is_stale(&findings);
    if context.json {
        render::json(&serde_json::json!({
            "schema_version": 1, "plan": path.to_string_lossy(), "holds": !is_stale, "findings": findings,
        }))?;
    } else {
        render::data(&render::staleness(path, &findings, context.style))?;
    }
    Ok(if is_stale {
        Outcome::Verdict
    } else if findings.is_empty() {
        Outcome::Fine
    } else {
        Outcome::Warnings
    })
}
