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
    // Anything that is no folder and is a file is a plan; what is neither is a model's name.
    match &args.model {
        Some(target) if target.is_file() => show::run(target, args, context),
        Some(target) => make::run(target, args, context),
        None => anyhow::bail!("name a model's folder or a plan file"),
    }
}
