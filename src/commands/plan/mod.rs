//! `tierkeep plan`: makes a plan, or answers a question about plans.

mod check;
mod diff;
mod explain;
mod make;
mod show;

use anyhow::Result;

use super::Context;
use crate::args::PlanVerbArgs;
use crate::exit::Outcome;

pub(crate) fn run(args: &PlanVerbArgs, context: &Context) -> Result<Outcome> {
    if let Some(plan) = &args.check {
        return check::run(plan, args, context);
    }
    if let Some([first, second]) = args.diff.as_deref() {
        return diff::run(first, second, context);
    }
    // What exists as a file is a plan; anything else names a model.
    match &args.model {
        Some(target) if target.path().is_file() => show::run(target.path(), args, context),
        Some(target) => make::run(target, args, context),
        None => anyhow::bail!("name a model or a plan file"),
    }
}
