//! `tierkeep plan --check PLAN`.

use std::path::Path;

use anyhow::{Context as _, Result};
use tierkeep_plans::plan::Plan;
use tierkeep_plans::stale;

use crate::args::PlanVerbArgs;
use crate::commands::{Context, shared};
use crate::exit::Outcome;
use crate::render;

pub(crate) fn run(path: &Path, args: &PlanVerbArgs, context: &Context) -> Result<Outcome> {
    let plan = Plan::read(path)?;
    let directory = args.model.as_deref().unwrap_or(&plan.model.directory);
    let model = shared::open_model(directory).with_context(|| {
        format!("the model of {} (name its folder before --check if it moved)", path.display())
    })?;
    // Nothing is measured: whether a plan holds is asked before a run, which is not to wait.
    let facts = match &args.machine {
        Some(file) => tierkeep_doctor::Facts::read(file)?,
        None => shared::facts(Some(&model), Some(&model.directory), false),
    };
    let findings = stale::check(&plan, &model, &facts);
    let is_stale = stale::is_stale(&findings);
    if context.json {
        render::json(&serde_json::json!({
            "schema_version": 1, "plan": path, "holds": !is_stale, "findings": findings,
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
