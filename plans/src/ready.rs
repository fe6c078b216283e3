//! Whether a plan can be executed here and now: what stands against it, before anything is allocated,
//! and the command that plans again without it. Pure: the facts of today are given.

use std::path::Path;

use tierkeep_doctor::Facts;

use crate::plan::{Abilities, Need, Plan};
use crate::planner::{again, best_isa, default_budget, has_isa};
use crate::units::{Bytes, SizeRequest};

/// What an engine and its user bring.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// What the engine can execute.
    pub abilities: Abilities,
    /// Instruction sets that the engine's kernels can use on this processor.
    pub isas: &'a [String],
    /// Whether the user insists on a plan that this machine has no memory for.
    pub allow_overcommit: bool,
    /// The model's folder, for the command.
    pub model: &'a Path,
    /// Where the plan is, or is to be written, for the command.
    pub plan_file: &'a Path,
}

/// What stands against a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It asks for what the engine does not have.
    Lacking,
    /// It asks for an instruction set that cannot be used here.
    Isa,
    /// It needs more memory than there is.
    Memory,
    /// It has more threads than this process may run at once.
    Threads,
}

impl Standing {
    /// Whether the plan cannot be executed; otherwise it can, and worse than planned.
    #[must_use]
    pub fn is_refusal(self) -> bool {
        match self {
            Self::Lacking | Self::Isa | Self::Memory => true,
            Self::Threads => false,
        }
    }
}

/// Something that stands against a plan, and how to plan without it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{finding}; plan again with: {command}")]
pub struct Obstacle {
    /// What kind of thing it is.
    pub standing: Standing,
    /// What is asked for and what there is.
    pub finding: String,
    /// The command that plans without it.
    pub command: String,
}

/// Everything that stands against executing a plan on a machine as it is today, refusals first.
#[must_use]
pub fn obstacles(plan: &Plan, today: &Facts, offer: &Offer<'_>) -> Vec<Obstacle> {
    let lacking = plan.needs_beyond(&offer.abilities);
    let found = lacking.into_iter().map(|need| lack(plan, need, offer));
    found
        .chain(isa(plan, today, offer))
        .chain(memory(plan, today, offer))
        .chain(threads(plan, today, offer))
        .collect()
}

fn lack(plan: &Plan, need: Need, offer: &Offer<'_>) -> Obstacle {
    Obstacle {
        standing: Standing::Lacking,
        finding: format!(
            "the plan asks for {need}, which this build's engine does not have yet: {}",
            need.remedy()
        ),
        command: offer.command(&again::options_without(plan, need)),
    }
}

fn isa(plan: &Plan, today: &Facts, offer: &Offer<'_>) -> Option<Obstacle> {
    let isa = &plan.engine.isa;
    let works = |name: &String| has_isa(today, name);
    if offer.isas.contains(isa) && works(isa) {
        return None;
    }
    // The fastest comes last.
    let best = offer.isas.iter().rev().find(|name| works(name));
    let best = best.cloned().unwrap_or_else(|| best_isa(today));
    let options = again::options_of(plan);
    Some(Obstacle {
        standing: Standing::Isa,
        finding: format!(
            "the plan asks for the instruction set {isa}, which this processor cannot use; the best \
             here is {best}"
        ),
        command: offer.command(&again::Options { isa: Some(best), ..options }),
    })
}

/// What the plan's footprint is against what the machine has available now. The page-cache reserve is
/// no part of it: the kernel makes do with less.
fn memory(plan: &Plan, today: &Facts, offer: &Offer<'_>) -> Option<Obstacle> {
    let fact = &today.memory.usable_bytes;
    let available = Bytes(*fact.value()?);
    let footprint = plan.ledger.footprint();
    if footprint <= available || plan.request.allow_overcommit || offer.allow_overcommit {
        return None;
    }
    // Where the group binds, its limit says how much is left, and which group that is.
    let why = match today.memory.limit.value() {
        Some(Some(limit)) if limit.headroom_bytes <= available.0 => {
            format!("the control group {} has a limit of {}", limit.group, Bytes(limit.limit_bytes))
        }
        Some(_) | None => fact.detail().to_owned(),
    };
    let smaller = smaller_budget(available);
    let options = again::options_of(plan);
    Some(Obstacle {
        standing: Standing::Memory,
        finding: format!(
            "the plan holds {footprint} and {available} is available now ({why}): free memory, or \
             insist with --allow-overcommit"
        ),
        command: offer
            .command(&again::Options { ram: Some(SizeRequest::Absolute(smaller)), ..options }),
    })
}

/// The budget of a plan that would do: what is chosen where none is given, or nine tenths of what is
/// available where that leaves nothing; in whole megabytes.
fn smaller_budget(available: Bytes) -> Bytes {
    let chosen = default_budget(available).0;
    let bytes = if chosen > 0 { chosen } else { available.0 / 10 * 9 };
    Bytes(bytes / 1_000_000 * 1_000_000)
}

fn threads(plan: &Plan, today: &Facts, offer: &Offer<'_>) -> Option<Obstacle> {
    let fact = &today.cpu.usable_threads;
    let usable = *fact.value()?;
    let planned = plan.engine.threads;
    if planned <= usable {
        return None;
    }
    let options = again::options_of(plan);
    Some(Obstacle {
        standing: Standing::Threads,
        finding: format!(
            "the plan has {planned} threads and this process may run {usable} at once ({}): they will \
             wait for each other, which is many times slower",
            fact.detail()
        ),
        command: offer.command(&again::Options { threads: Some(usable.max(1)), ..options }),
    })
}

impl Offer<'_> {
    fn command(&self, options: &again::Options) -> String {
        again::command(self.model, options, self.plan_file)
    }
}
