//! Two models side by side within one budget: how it is divided between them. Pure.

use tierkeep_doctor::Facts;

use super::{Options, PlanRefusal, io, machine, plan, request};
use crate::budget::ModelBytes;
use crate::catalogue::Catalogue;
use crate::place;
use crate::plan::Plan;
use crate::units::{Bytes, SizeRequest};

/// Why there are no two plans.
#[derive(Debug, thiserror::Error)]
pub enum PairRefusal {
    /// One of the models cannot be planned even with what the other leaves at its least.
    #[error(transparent)]
    Plan(#[from] PlanRefusal),
    /// Both together are too large.
    #[error(
        "both models at once do not fit in {budget}: {first} needs {} at least, {second} {}, and {held} are needed beside them, {needed} together; give a larger --ram, a shorter --ctx or --dense streamed",
        .least[0], .least[1]
    )]
    DoesNotFit {
        /// The budget of both.
        budget: Bytes,
        /// The first model's folder.
        first: String,
        /// The second model's folder.
        second: String,
        /// The least that each needs.
        least: [Bytes; 2],
        /// What is needed beside them.
        held: Bytes,
        /// The sum.
        needed: Bytes,
    },
}

/// The budget of main memory that options ask for on a machine, and where it comes from.
///
/// # Errors
/// [`PlanRefusal::OverMachine`] and [`PlanRefusal::UnknownMemory`].
pub fn budget(machine: &Facts, options: &Options) -> Result<(Bytes, String), PlanRefusal> {
    machine::budget(machine, options)
}

/// Plans two models that are in memory at once within one budget, that of the first one's options, of
/// which `held` bytes are needed beside them.
///
/// Each has its least; of what is then left each has the part that its want is of both wants. The want
/// is what a plan takes that has everything but the other's least, beyond the model's own least. So the
/// budgets of both plans and `held` are at most the whole, and two models that fit without slots being
/// short have all of theirs.
///
/// # Errors
/// [`PairRefusal`].
pub fn plan_pair(
    models: [&Catalogue; 2],
    machine: &Facts,
    options: [&Options; 2],
    held: Bytes,
) -> Result<[Plan; 2], PairRefusal> {
    let (budget, source) = machine::budget(machine, options[0])?;
    let least = [
        least(models[0], machine, options[0], budget)?,
        least(models[1], machine, options[1], budget)?,
    ];
    let needed = Bytes(held.0.saturating_add(least[0].0).saturating_add(least[1].0));
    if needed > budget {
        let folder = |model: &Catalogue| model.directory.display().to_string();
        let (first, second) = (folder(models[0]), folder(models[1]));
        return Err(PairRefusal::DoesNotFit { budget, first, second, least, held, needed });
    }
    let spare = budget.0 - needed.0;
    let within = |side: usize, bytes: u64| -> Result<Plan, PlanRefusal> {
        let ram = Some(SizeRequest::Absolute(Bytes(bytes)));
        let options = Options { ram, ..options[side].clone() };
        let mut plan = plan(models[side], machine, &options, None)?;
        let part = ["the first", "the second"][side];
        plan.request.budget_source = format!("{part} model's part of {budget} for two: {source}");
        Ok(plan)
    };
    let mut wants = [0_u64; 2];
    for side in 0..2 {
        let most = within(side, least[side].0 + spare)?;
        wants[side] = most.ledger.total().saturating_sub(least[side]).0;
    }
    let first = part(spare, wants);
    Ok([within(0, least[0].0 + first)?, within(1, least[1].0 + (spare - first))?])
}

/// The first one's part of what is to be divided.
fn part(spare: u64, wants: [u64; 2]) -> u64 {
    let [a, b] = wants.map(u128::from);
    let sum = a + b;
    if sum == 0 {
        return spare / 2;
    }
    u64::try_from(u128::from(spare) * a / sum).unwrap_or(spare)
}

/// The least memory that a model needs with these options.
fn least(
    model: &Catalogue,
    machine: &Facts,
    options: &Options,
    budget: Bytes,
) -> Result<Bytes, PlanRefusal> {
    let sums = ModelBytes::of(model, io::choose(model, machine, options).0);
    let request = request(&sums, machine, options, budget)?;
    Ok(place::smallest(&sums, &request, None).total())
}

#[cfg(test)]
mod tests {
    use super::part;

    #[test]
    fn what_is_left_is_divided_as_it_is_wanted() {
        assert_eq!(part(100, [0, 0]), 50);
        assert_eq!(part(100, [30, 10]), 75);
        assert_eq!(part(100, [0, 7]), 0);
        // Of much more than both want each has its own.
        assert!(part(1000, [30, 10]) >= 30 && 1000 - part(1000, [30, 10]) >= 10);
        assert_eq!(part(u64::MAX, [u64::MAX, 0]), u64::MAX);
    }
}
