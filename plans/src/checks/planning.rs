//! Whether the machine can run the model: the plan that would be made without any option, in two lines.

use std::path::Path;

use tierkeep_doctor::{Fact, Facts};

use super::Check;
use crate::budget::Line;
use crate::catalogue::Catalogue;
use crate::plan::Plan;
use crate::planner::{self, FittingChange, Options, PlanRefusal};
use crate::units::Bytes;

/// Less free space than this under the model leaves no room for what is written beside it.
const LITTLE_SPACE_BYTES: u64 = 1_000_000_000;

/// Checks `model.budget` and `model.placement`; `options` say what the engine can do, and
/// otherwise are those of a user who gives none.
#[must_use]
pub fn plan_checks(model: &Catalogue, facts: &Facts, options: &Options) -> Vec<Check> {
    let mut checks = Vec::new();
    let (budget, placement) = ("model.budget", "model.placement");
    match planner::plan(model, facts, options, None) {
        Ok(plan) => {
            checks.push(Check::ok(
                budget,
                format!(
                    "fits: {} of a budget of {} ({}), for {} tokens of context",
                    plan.ledger.total(),
                    plan.request.budget_bytes,
                    plan.request.budget_source,
                    plan.request.context
                ),
            ));
            checks.push(Check::ok(placement, placed(model, &plan)));
        }
        Err(PlanRefusal::DoesNotFit { result, would_fit, .. }) => {
            let can =
                |change: &&FittingChange| change.needs.is_none_or(|need| options.engine.has(need));
            let flags: Vec<&str> =
                would_fit.changes.iter().filter(can).map(|change| change.flag.as_str()).collect();
            let smaller = match flags.as_slice() {
                [] => String::new(),
                [one] => format!("{one} makes it fit; otherwise "),
                several => format!("one of {} makes it fit; otherwise ", several.join(", ")),
            };
            checks.push(Check::fail(
                budget,
                format!(
                    "needs {} at least, {} can be given",
                    result.smallest_budget, result.budget
                ),
                format!(
                    "{smaller}a machine or a limit with more memory, or a container of fewer bits; see \
                     `tierkeep plan` for every line"
                ),
            ));
            checks.push(Check::skip_because(placement, "it does not fit"));
        }
        Err(other) => {
            checks.push(Check::warn(budget, other.to_string(), "give a budget with --ram SIZE"));
            checks.push(Check::skip_because(placement, "there is no plan"));
        }
    }
    checks
}

/// How much of the model is resident, and how fast it is expected to be.
fn placed(model: &Catalogue, plan: &Plan) -> String {
    let caps = model.spec.expert_layers().filter_map(|layer| plan.placement.slots.caps.get(layer));
    let slots: u64 = caps.map(|&cap| u64::from(cap)).sum();
    let n_experts = (model.spec.expert_layers().count() * model.spec.router.n_experts) as u64;
    let share = 100.0 * slots as f64 / (n_experts as f64).max(1.0);
    let speed = plan.prediction.decode_tokens_per_s;
    let assumed = plan.prediction.evidence.iter().filter(|line| line.contains("assumed")).count();
    let rests = if assumed > 0 { ", partly from assumed rates" } else { "" };
    format!(
        "{} dense resident, slots for {slots} of {n_experts} experts ({share:.0} %); about {} tokens/s \
         ({} to {}), estimated{rests}; what binds: {}",
        plan.ledger.bytes(Line::DenseWeights),
        digits(speed.p50),
        digits(speed.p10),
        digits(speed.p90),
        plan.prediction.binding
    )
}

fn digits(speed: f64) -> String {
    if speed < 10.0 { format!("{speed:.2}") } else { format!("{speed:.1}") }
}

/// Check `model.disk` of a model that is not here: whether its download has room.
#[must_use]
pub fn download_check(remaining_bytes: u64, free: &Fact<u64>, target: &Path) -> Check {
    let id = "model.disk";
    let needed = format!("{} to download to {}", Bytes(remaining_bytes), target.display());
    match free.value() {
        None => Check::skip_because(id, format!("{needed}; free space: {}", free.detail())),
        Some(&free) if free < remaining_bytes => Check::fail(
            id,
            format!("{needed}, {} free", Bytes(free)),
            "make room, or download to another disk",
        ),
        Some(&free) => Check::ok(id, format!("{needed}, {} free", Bytes(free))),
    }
}

/// Check `model.disk` of a model that is here: space for what is written beside it, its usage history
/// and a conversion of it.
#[must_use]
pub fn disk_check(model: &Catalogue, facts: &Facts) -> Check {
    let id = "model.disk";
    let free = &facts.disk.free_bytes;
    match free.value() {
        None => Check::skip_because(id, free.detail()),
        Some(&bytes) if bytes < LITTLE_SPACE_BYTES => Check::warn(
            id,
            format!("{} free where the model is", Bytes(bytes)),
            "the usage history may not be saved there: name a place with --usage FILE",
        ),
        Some(&bytes) => Check::ok(
            id,
            format!(
                "{} free where the model is, which takes {}",
                Bytes(bytes),
                model.total_bytes()
            ),
        ),
    }
}
