//! Refusals before anything is allocated: the plan against this machine as it is now, each with the
//! command that plans again.

use std::fmt;
use std::path::Path;

use anyhow::Result;
use tierkeep_doctor::{Facts, process};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::ready::{Offer, obstacles};

use crate::render;

/// Why a plan is not executed, and the command that makes one that is.
#[derive(Debug)]
pub(crate) struct PlanAgain {
    source: Box<dyn std::error::Error + Send + Sync>,
    command: String,
}

impl PlanAgain {
    pub(super) fn new(
        source: impl std::error::Error + Send + Sync + 'static,
        command: String,
    ) -> Self {
        Self { source: Box::new(source), command }
    }

    /// The command.
    pub(crate) fn command(&self) -> &str {
        &self.command
    }
}

impl fmt::Display for PlanAgain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; plan again with: {}", self.source, self.command)
    }
}

impl std::error::Error for PlanAgain {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(self.source.as_ref())
    }
}

/// Refuses a plan that cannot be executed here and now; warns of what will be worse than planned.
/// Returns whether it warned.
pub(crate) fn check(
    (plan, model): (&Plan, &Catalogue),
    today: &Facts,
    allow_overcommit: bool,
    plan_file: &Path,
) -> Result<bool> {
    tierkeep_engine::supports(model).map_err(tierkeep_engine::EngineError::from)?;
    let isas = tierkeep_engine::instruction_sets();
    let offer = Offer {
        abilities: tierkeep_engine::ABILITIES,
        isas: &isas,
        allow_overcommit,
        model: &model.directory,
        plan_file,
    };
    let found = obstacles(plan, today, &offer);
    let (refusals, warnings): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|obstacle| obstacle.standing.is_refusal());
    if let Some(first) = refusals.into_iter().next() {
        return Err(first.into());
    }
    warnings.iter().for_each(|obstacle| render::warning(&obstacle.to_string()));
    Ok(!warnings.is_empty())
}

/// Warns where fewer threads run than the plan has; returns whether it did.
pub(crate) fn check_threads(plan: &Plan) -> bool {
    let Some(&running) = process::threads().value() else { return false };
    let planned = plan.engine.threads;
    if running < planned {
        render::warning(&format!(
            "{running} threads run in this process, and the plan has {planned}: the system did not \
             start them all; plan again with --threads {running}"
        ));
    }
    running < planned
}
