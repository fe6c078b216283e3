//! What a machine's facts allow: the budget of main memory, what each graphics card can give, the
//! instruction set. Counts memory that is shared once.

use tierkeep_doctor::{Fact, Facts, GpuFact};

use super::{Options, PlanRefusal};
use crate::budget::ExpertList;
use crate::estimate;
use crate::place::CardBudget;
use crate::units::{Bytes, SizeRequest, counted};

/// Left to the rest of the machine when no budget is given: this or the share below.
const SPARED_BYTES: u64 = 1_000_000_000;
/// See [`SPARED_BYTES`].
const SPARED_SHARE: f64 = 0.08;

/// What graphics cards may give.
#[derive(Clone, Debug)]
pub(super) struct Vram {
    pub(super) cards: Vec<CardBudget>,
    /// Where that comes from, in words.
    pub(super) source: String,
}

/// The budget of main memory and where it comes from.
pub(super) fn budget(machine: &Facts, options: &Options) -> Result<(Bytes, String), PlanRefusal> {
    let fact = &machine.memory.usable_bytes;
    let available = fact.value().copied().map(Bytes);
    let unknown = || PlanRefusal::UnknownMemory { reason: fact.detail().to_owned() };
    match options.ram {
        Some(SizeRequest::Absolute(budget)) => {
            if let Some(available) = available
                && budget > available
                && !options.allow_overcommit
            {
                let source_of = source_of(fact).to_owned();
                return Err(PlanRefusal::OverMachine { budget, available, source_of });
            }
            Ok((budget, "given with --ram".to_owned()))
        }
        Some(share @ SizeRequest::Percent(percent)) => {
            let budget = share.resolve(available.ok_or_else(unknown)?);
            Ok((budget, format!("{percent} % of available: {}", source_of(fact))))
        }
        None => {
            let available = available.ok_or_else(unknown)?;
            let budget = default_budget(available);
            let spared = available.saturating_sub(budget);
            Ok((budget, format!("{available} available less {spared}: {}", source_of(fact))))
        }
    }
}

/// The budget where none is given: what is available less what is left to the rest of the machine.
#[must_use]
pub fn default_budget(available: Bytes) -> Bytes {
    let spared = Bytes(SPARED_BYTES.max((available.as_f64() * SPARED_SHARE) as u64));
    available.saturating_sub(spared)
}

/// Where a fact comes from: its detail, or its source where one written by hand has none.
fn source_of(fact: &Fact<u64>) -> &str {
    if fact.detail().is_empty() { fact.source().as_str() } else { fact.detail() }
}

/// What each card can give: its free memory, or its part of what was asked for.
pub(super) fn vram(machine: &Facts, options: &Options) -> Result<Vram, PlanRefusal> {
    let none = |source: String| Ok(Vram { cards: Vec::new(), source });
    if matches!(options.vram, Some(SizeRequest::Absolute(Bytes(0))))
        || options.vram == Some(SizeRequest::Percent(0.0))
    {
        return none("none: --vram 0".to_owned());
    }
    let (usable, why_not) = usable_cards(machine);
    let free: Bytes = usable.iter().map(|c| c.budget).sum();
    let Some(asked) = options.vram else {
        return match (usable.is_empty(), options.engine.vram) {
            (true, _) => none(format!("none: {why_not}")),
            (false, false) => none(format!(
                "none: {} of graphics memory is free, this build's engine does not use it yet; \
                 --vram SIZE plans with it",
                free
            )),
            (false, true) => {
                let n = usable.len();
                let cards = counted(n as u64, "graphics card");
                let source = format!("free memory of {cards}{}", beside(&why_not));
                Ok(Vram { cards: usable, source })
            }
        };
    };
    if usable.is_empty() {
        return Err(PlanRefusal::NoVram { reason: why_not });
    }
    let bytes = asked.resolve(free);
    if bytes > free && !options.allow_overcommit {
        return Err(PlanRefusal::OverCards { asked: bytes, free });
    }
    let part = |card: CardBudget| {
        let share = u128::from(card.budget.0) * u128::from(bytes.0);
        let budget = Bytes(u64::try_from(share / u128::from(free.0.max(1))).unwrap_or(u64::MAX));
        CardBudget { budget, ..card }
    };
    let source = format!("given with --vram, split as the cards' free memory{}", beside(&why_not));
    Ok(Vram { cards: usable.into_iter().map(part).collect(), source })
}

fn beside(why_not: &str) -> String {
    if why_not.is_empty() { String::new() } else { format!("; {why_not}") }
}

/// Cards whose free memory is known and their own, and in words why others are not among them.
fn usable_cards(machine: &Facts) -> (Vec<CardBudget>, String) {
    let mut usable = Vec::new();
    let mut why_not = Vec::new();
    for (number, card) in estimate::cards(machine).enumerate() {
        let name = card.name.value().map_or("a graphics card", String::as_str);
        match own_free_bytes(card) {
            Ok(budget) => {
                usable.push(CardBudget { card: number as u32, name: name.to_owned(), budget });
            }
            Err(reason) => why_not.push(format!("{name}: {reason}")),
        }
    }
    if usable.is_empty() && why_not.is_empty() {
        why_not.push(match machine.gpus.nvidia.value() {
            Some(_) => "there is no graphics card".to_owned(),
            None => machine.gpus.nvidia.detail().to_owned(),
        });
    }
    (usable, why_not.join("; "))
}

/// What a card has free, in memory of its own.
fn own_free_bytes(card: &GpuFact) -> Result<Bytes, String> {
    if card.is_unified.value() == Some(&true) {
        return Err("its memory is the machine's, and counted there once".to_owned());
    }
    match card.memory_free_bytes.value() {
        Some(&free) => Ok(Bytes(free)),
        None => Err(format!("free memory unknown: {}", card.memory_free_bytes.detail())),
    }
}

/// The processor of each thread, where there are as many threads as physical cores. Fewer are left to the
/// system: two runs side by side would be held to the same cores.
pub(super) fn cpus(machine: &Facts, threads: u64) -> Vec<u32> {
    let list = machine.cpu.usable_cpus.value().and_then(|text| text.parse::<ExpertList>().ok());
    list.map(|list| list.0).filter(|cpus| cpus.len() as u64 == threads).unwrap_or_default()
}

/// The instruction set that the machine's facts allow, unless one is asked for.
pub(super) fn isa(machine: &Facts, options: &Options) -> String {
    if let Some(isa) = &options.isa {
        return isa.clone();
    }
    best_isa(machine)
}

/// What the kernels of each name need, the fastest first; plain code needs nothing.
const ISAS: [(&str, &[&str]); 3] = [
    ("avx512", &["avx512f", "avx512bw", "avx512dq", "avx512vl"]),
    ("avx2", &["avx2", "f16c"]),
    ("scalar", &[]),
];

/// The fastest instruction set that a machine's facts allow.
#[must_use]
pub fn best_isa(machine: &Facts) -> String {
    let allowed = ISAS.into_iter().find(|(_, needs)| has_all(machine, needs));
    allowed.map_or("scalar", |(name, _)| name).to_owned()
}

/// Whether a machine's facts allow the kernels of a name, or say nothing of it.
#[must_use]
pub fn has_isa(machine: &Facts, isa: &str) -> bool {
    let known = machine.cpu.instruction_sets.value().is_some();
    let needs = ISAS.into_iter().find(|(name, _)| *name == isa);
    needs.is_some_and(|(_, needs)| !known || has_all(machine, needs))
}

fn has_all(machine: &Facts, needs: &[&str]) -> bool {
    let sets = machine.cpu.instruction_sets.value().map(Vec::as_slice).unwrap_or_default();
    needs.iter().all(|name| sets.iter().any(|set| set == name))
}
