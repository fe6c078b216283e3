//! Whether a plan still holds: what of its model and its machine has changed since it was made, and
//! what each change does. Pure: the model and the facts of today are given.
//!
//! A plan is stale where it could no longer be executed as it stands, or where what it promises of
//! memory or speed has lost its ground. Anything else that changed is a note.

use serde::Serialize;
use tierkeep_doctor::{Fact, Facts, FilesystemKind};

use crate::catalogue::Catalogue;
use crate::estimate;
use crate::plan::Plan;
use crate::units::{Bytes, Rate};

/// A rate that fell below this part of the planned one takes the ground from the estimate.
const SLOWER: f64 = 0.8;
/// A rate that rose above this multiple is worth another plan.
const FASTER: f64 = 1.25;

/// What a change means for the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Weight {
    /// The plan holds.
    Note,
    /// It does not.
    Stale,
}

/// Something that has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable name.
    pub id: &'static str,
    /// What it means for the plan.
    pub weight: Weight,
    /// In the plan.
    pub was: String,
    /// Today.
    pub is: String,
    /// What that does, and what to do about it.
    pub effect: String,
}

impl Finding {
    fn new(
        id: &'static str,
        weight: Weight,
        (was, is): (impl Into<String>, impl Into<String>),
        effect: impl Into<String>,
    ) -> Self {
        Self { id, weight, was: was.into(), is: is.into(), effect: effect.into() }
    }
}

/// Whether any finding makes the plan stale.
#[must_use]
pub fn is_stale(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.weight == Weight::Stale)
}

/// Everything that has changed since a plan was made, the model first.
#[must_use]
pub fn check(plan: &Plan, model: &Catalogue, today: &Facts) -> Vec<Finding> {
    let mut found = of_model(plan, model);
    found.extend(memory(plan, today));
    found.extend(processor(plan, today));
    found.extend(disk(plan, today));
    found.extend(cards(plan, today));
    found
}

fn of_model(plan: &Plan, model: &Catalogue) -> Vec<Finding> {
    let mut found = Vec::new();
    if plan.model.fingerprint != model.fingerprint {
        found.push(Finding::new(
            "model.fingerprint",
            Weight::Stale,
            (plan.model.fingerprint.clone(), model.fingerprint.clone()),
            "sizes, slots and pins are of another model: plan again",
        ));
    } else if let Err(error) = plan.check(model) {
        found.push(Finding::new(
            "plan.consistent",
            Weight::Stale,
            ("", error.to_string()),
            "a run would refuse it",
        ));
    }
    if plan.model.directory != model.directory {
        found.push(Finding::new(
            "model.directory",
            Weight::Note,
            (plan.model.directory.display().to_string(), model.directory.display().to_string()),
            "give the new folder to run with --model",
        ));
    }
    found
}

fn memory(plan: &Plan, today: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    let budget = plan.request.budget_bytes;
    let (was, is) = (&plan.machine.memory, &today.memory);
    let size = |fact: &Fact<u64>| shown(fact, |&bytes| Bytes(bytes).to_string());
    let both = (size(&was.usable_bytes), size(&is.usable_bytes));
    match is.usable_bytes.value() {
        Some(&now) if now < budget.0 => {
            let effect = format!(
                "the budget of {budget} is not there ({}): free memory, or plan again with less",
                is.usable_bytes.detail()
            );
            // Who allowed a budget above what there was knows what that means.
            let allowed = plan.request.allow_overcommit;
            let weight = if allowed { Weight::Note } else { Weight::Stale };
            found.push(Finding::new("memory.available", weight, both, effect));
        }
        Some(_) => {}
        None => found.push(Finding::new(
            "memory.available",
            Weight::Note,
            both,
            format!("whether the budget of {budget} is there cannot be told"),
        )),
    }
    let group = |fact: &Fact<Option<tierkeep_doctor::CgroupLimit>>| match fact.value() {
        Some(Some(limit)) => format!("{} in {}", Bytes(limit.limit_bytes), limit.group),
        Some(None) => "no limit".to_owned(),
        None => "unknown".to_owned(),
    };
    let (before, now) = (group(&was.limit), group(&is.limit));
    if before != now && !was.limit.is_unknown() {
        let effect = "another control group limits this process";
        found.push(Finding::new("memory.limit", Weight::Note, (before, now), effect));
    }
    let rates = (&was.read_bandwidth_bytes_per_s, &is.read_bandwidth_bytes_per_s);
    found.extend(rate("memory.rate", rates, "reads of memory"));
    found
}

fn processor(plan: &Plan, today: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    let (was, is) = (&plan.machine.cpu, &today.cpu);
    if differ(&was.model_name, &is.model_name) {
        found.push(Finding::new(
            "cpu.model",
            Weight::Note,
            (text(&was.model_name), text(&is.model_name)),
            "the estimate is for another processor",
        ));
    }
    let planned = plan.engine.threads;
    if let Some(&now) = is.usable_threads.value() {
        let both = (planned.to_string(), now.to_string());
        if now < planned {
            let effect = format!(
                "threads would wait for each other ({}): plan again",
                is.usable_threads.detail()
            );
            found.push(Finding::new("cpu.threads", Weight::Stale, both, effect));
        } else if was.usable_threads.value().is_some_and(|&before| before < now) {
            let effect = "more threads than there were: another plan could use them";
            found.push(Finding::new("cpu.threads", Weight::Note, both, effect));
        }
    }
    if let (Some(before), Some(now)) = (was.instruction_sets.value(), is.instruction_sets.value()) {
        let lost: Vec<&str> =
            before.iter().filter(|set| !now.contains(set)).map(String::as_str).collect();
        if !lost.is_empty() {
            let isa = plan.engine.isa.as_str();
            let needed = |set: &&str| set.starts_with(isa) || isa == "avx2" && *set == "f16c";
            let (weight, effect) = if lost.iter().any(needed) {
                (Weight::Stale, format!("the kernels of {isa} cannot run: plan again"))
            } else {
                (Weight::Note, format!("{isa}, which the plan uses, is still there"))
            };
            let both = (lost.join(" "), "not there");
            found.push(Finding::new("cpu.instruction_sets", weight, both, effect));
        }
    }
    found
}

fn disk(plan: &Plan, today: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    let (was, is) = (&plan.machine.disk, &today.disk);
    let prediction = &plan.prediction;
    let reads = prediction.read_bytes_per_token + prediction.streamed_bytes_per_token;
    // A plan that reads nothing while it decodes loses nothing to another disk.
    let weight = if reads.0 > 0 { Weight::Stale } else { Weight::Note };
    let place = |disk: &tierkeep_doctor::DiskFacts| {
        format!("{} ({})", text(&disk.device), text(&disk.filesystem))
    };
    if differ(&was.device, &is.device) || differ(&was.filesystem, &is.filesystem) {
        let slow = matches!(is.kind.value(), Some(FilesystemKind::Network | FilesystemKind::Fuse));
        let effect = if slow {
            "missed experts come from a disk that is not local: copy the model, or plan again"
        } else {
            "the estimate rests on the rate of another disk: plan again"
        };
        found.push(Finding::new("disk.device", weight, (place(was), place(is)), effect));
    }
    let of = |disk: &tierkeep_doctor::DiskFacts| disk.read.clone().map(|read| read.bytes_per_s);
    found.extend(
        rate("disk.rate", (&of(was), &of(is)), "reads of missed experts")
            .map(|finding| Finding { weight: finding.weight.min(weight), ..finding }),
    );
    found
}

/// The graphics cards that the plan uses; others are nobody's concern.
fn cards(plan: &Plan, today: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    for planned in &plan.placement.cards {
        let at = planned.card as usize;
        let was = estimate::cards(&plan.machine).nth(at);
        let Some(now) = estimate::cards(today).nth(at) else {
            let effect = format!("what is planned for card {at} has no place: plan again");
            let both = (planned.name.clone(), "not there");
            found.push(Finding::new("gpu.card", Weight::Stale, both, effect));
            continue;
        };
        if now.name.value().is_some_and(|name| *name != planned.name) {
            let effect =
                format!("card {at} is another one: the estimate is not for it, plan again");
            let both = (planned.name.clone(), text(&now.name));
            found.push(Finding::new("gpu.card", Weight::Stale, both, effect));
        }
        let size = |fact: &Fact<u64>| shown(fact, |&bytes| Bytes(bytes).to_string());
        let free = &now.memory_free_bytes;
        let both = (
            was.map_or_else(|| "unknown".to_owned(), |card| size(&card.memory_free_bytes)),
            size(free),
        );
        match free.value() {
            Some(&bytes) if bytes < planned.budget_bytes.0 => {
                let effect = format!(
                    "card {at} has not the {} that are planned: free its memory, or plan again",
                    planned.budget_bytes
                );
                found.push(Finding::new("gpu.free", Weight::Stale, both, effect));
            }
            Some(_) => {}
            None => {
                let effect = format!("whether card {at} has what is planned cannot be told");
                found.push(Finding::new("gpu.free", Weight::Note, both, effect));
            }
        }
        let driver = was.map(|card| &card.driver_version);
        if let Some(before) = driver.filter(|before| differ(before, &now.driver_version)) {
            let both = (text(before), text(&now.driver_version));
            let effect = "another driver may keep more or less of the card for itself";
            found.push(Finding::new("gpu.driver", Weight::Note, both, effect));
        }
    }
    found
}

/// A rate that is another one now; nothing where one of the two is not known.
fn rate(id: &'static str, (was, is): (&Fact<f64>, &Fact<f64>), of: &str) -> Option<Finding> {
    let (&before, &now) = (was.value()?, is.value()?);
    let both = (Rate(before).to_string(), Rate(now).to_string());
    if now < before * SLOWER {
        let effect = format!("{of} are slower than planned: the estimate is too high, plan again");
        Some(Finding::new(id, Weight::Stale, both, effect))
    } else if now > before * FASTER {
        let effect = format!("{of} are faster than planned: another plan could use that");
        Some(Finding::new(id, Weight::Note, both, effect))
    } else {
        None
    }
}

/// Whether two facts are known and not the same.
fn differ<T: PartialEq>(was: &Fact<T>, is: &Fact<T>) -> bool {
    matches!((was.value(), is.value()), (Some(before), Some(now)) if before != now)
}

fn text(fact: &Fact<String>) -> String {
    shown(fact, String::clone)
}

fn shown<T>(fact: &Fact<T>, show: impl Fn(&T) -> String) -> String {
    fact.value().map_or_else(|| "unknown".to_owned(), show)
}
