//! From a model, a machine's facts, a request and a history to a plan. Puts the parts of this crate
//! together and decides nothing that they decide; pure, so that any plan can be made anywhere.

use std::str::FromStr;

use tierkeep_doctor::Facts;

use crate::budget::{KvElement, Slots, Workload};
use crate::catalogue::Catalogue;
use crate::estimate::{self, PastRun};
use crate::place::{self, DoesNotFit, Placed, Request};
use crate::plan::{
    EngineSettings, IoMode, ModelRef, Numerics, PLAN_VERSION, Placement, Plan, PlanRequest, Policy,
    Range,
};
use crate::simulate::{self, PlannedCache};
use crate::units::{Bytes, LayerId, SizeRequest};
use crate::usage::History;

/// Left to the rest of the machine when no budget is given: this or the share below.
const SPARED_BYTES: u64 = 1_000_000_000;
/// See [`SPARED_BYTES`].
const SPARED_SHARE: f64 = 0.08;
/// Context planned when none is asked for, tokens, if the model has as much.
const DEFAULT_CONTEXT: u64 = 4096;

/// Most threads that a plan may have.
pub(crate) const MAX_THREADS: u64 = 1024;

/// What a user may set; the rest is solved around it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// `--ram`.
    pub ram: Option<SizeRequest>,
    /// `--ctx`, tokens.
    pub context: Option<u64>,
    /// `--threads`.
    pub threads: Option<u64>,
    /// `--kv`.
    pub kv: Option<KvElement>,
    /// `--batch`, tokens of a prefill batch.
    pub prefill_batch: Option<u64>,
    /// `--isa`.
    pub isa: Option<String>,
    /// `--io`.
    pub io: Option<IoMode>,
    /// `--pins`.
    pub pins: PinRule,
    /// `--allow-overcommit`.
    pub allow_overcommit: bool,
}

/// How many experts are pinned.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum PinRule {
    /// As many as the replay of held-out history supports.
    #[default]
    Judged,
    /// None.
    None,
    /// The most used ones in this share (0 to 1) of every layer's slots.
    Share(f64),
}

impl FromStr for PinRule {
    type Err = PinRuleError;

    /// Reads `auto`, `none` or a share such as `50%`.
    fn from_str(text: &str) -> Result<Self, PinRuleError> {
        match text {
            "auto" => Ok(Self::Judged),
            "none" => Ok(Self::None),
            _ => match text.parse() {
                Ok(SizeRequest::Percent(percent)) => Ok(Self::Share(percent / 100.0)),
                _ => Err(PinRuleError { text: text.to_owned() }),
            },
        }
    }
}

/// Why a rule for pins could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot read {text:?} as a rule for pins: write auto, none or a share of the slots such as 50%"
)]
pub struct PinRuleError {
    /// What was given.
    pub text: String,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanRefusal {
    /// The model does not fit in the budget: a result, with its ledger.
    #[error("{} does not fit in {}: the smallest budget that would do is {}", model, .result.budget, .result.smallest_budget)]
    DoesNotFit {
        /// The model's folder.
        model: String,
        /// The ledger and the smallest change.
        result: Box<DoesNotFit>,
    },
    /// The budget is above what the machine can give.
    #[error(
        "a budget of {budget} is above the {available} that this machine has available ({source_of}): ask for less, or insist with --allow-overcommit"
    )]
    OverMachine {
        /// What was asked for.
        budget: Bytes,
        /// What there is.
        available: Bytes,
        /// Where that figure comes from.
        source_of: String,
    },
    /// Available memory is not known, so that no budget follows from it.
    #[error("how much memory is available is unknown ({reason}): give a budget with --ram SIZE")]
    UnknownMemory {
        /// Why.
        reason: String,
    },
    /// An option that makes no sense.
    #[error("{option} {found}: expected {expected}")]
    BadOption {
        /// The option.
        option: &'static str,
        /// What was given.
        found: String,
        /// What would do.
        expected: String,
    },
}

/// Makes a plan.
///
/// # Errors
/// [`PlanRefusal`]; nothing is written by anyone.
pub fn plan(
    model: &Catalogue,
    machine: &Facts,
    options: &Options,
    history: Option<&History>,
) -> Result<Plan, PlanRefusal> {
    let (budget, budget_source) = budget(machine, options)?;
    let request = request(model, machine, options, budget)?;
    let mut placed = place::place(model, &request).map_err(|result| PlanRefusal::DoesNotFit {
        model: model.directory.display().to_string(),
        result: Box::new(result),
    })?;
    let pins_evidence = pin(model, options, history, &mut placed);
    let isa = isa(machine, options);
    let hit = expected_hits(model, &placed.slots, history);
    let prediction = estimate::estimate(
        model,
        &placed.workload,
        &placed.slots,
        (Range { p10: hit.p10, p50: hit.p50, p90: hit.p90 }, &hit.evidence),
        (machine, &isa),
        &past_runs(history, &placed.workload, budget),
    );
    let Workload { context, prefill_batch, threads, kv, embedding } = placed.workload;
    Ok(Plan {
        version: PLAN_VERSION,
        model: ModelRef {
            directory: model.directory.clone(),
            fingerprint: model.fingerprint.clone(),
            family: model.spec.family.model_type().to_owned(),
            total_bytes: model.total_bytes(),
        },
        request: PlanRequest {
            budget_bytes: budget,
            budget_source,
            context,
            allow_overcommit: options.allow_overcommit,
        },
        engine: EngineSettings {
            threads,
            isa,
            numerics: Numerics::Exact,
            kv,
            prefill_batch,
            embedding,
            io: options.io.unwrap_or(IoMode::Dropped),
        },
        placement: Placement { policy: Policy::Recency, pins_evidence, slots: placed.slots },
        prediction,
        ledger: placed.ledger,
        machine: machine.clone(),
    })
}

/// The smallest budget under which at least `share` (0 to 1) of all experts have a slot; `None` where
/// the options make no sense.
///
/// Slots grow with the budget, so that halving finds it.
#[must_use]
pub fn budget_for_share(
    model: &Catalogue,
    machine: &Facts,
    options: &Options,
    share: f64,
) -> Option<Bytes> {
    let slots = |budget: u64| -> Option<u64> {
        let request = request(model, machine, options, Bytes(budget)).ok()?;
        let placed = place::place(model, &request).ok();
        Some(placed.map_or(0, |p| p.slots.caps.iter().map(|&cap| u64::from(cap)).sum()))
    };
    let n_experts = model.spec.expert_layers().count() * model.spec.router.n_experts;
    let wanted = (n_experts as f64 * share.clamp(0.0, 1.0)).ceil().max(1.0) as u64;
    let (mut low, mut high) = (0, 1);
    while slots(high)? < wanted {
        low = high;
        high = high.checked_mul(2)?;
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if slots(middle)? < wanted { low = middle } else { high = middle }
    }
    Some(Bytes(high))
}

/// The budget and where it comes from.
fn budget(machine: &Facts, options: &Options) -> Result<(Bytes, String), PlanRefusal> {
    let fact = &machine.memory.usable_bytes;
    let available = fact.value().copied().map(Bytes);
    let unknown = || PlanRefusal::UnknownMemory { reason: fact.detail().to_owned() };
    match options.ram {
        Some(SizeRequest::Absolute(budget)) => {
            if let Some(available) = available
                && budget > available
                && !options.allow_overcommit
            {
                let source_of = fact.detail().to_owned();
                return Err(PlanRefusal::OverMachine { budget, available, source_of });
            }
            Ok((budget, "given with --ram".to_owned()))
        }
        Some(share @ SizeRequest::Percent(percent)) => {
            let budget = share.resolve(available.ok_or_else(unknown)?);
            Ok((budget, format!("{percent} % of available: {}", fact.detail())))
        }
        None => {
            let available = available.ok_or_else(unknown)?;
            let spared = Bytes(SPARED_BYTES.max((available.as_f64() * SPARED_SHARE) as u64));
            let budget = available.saturating_sub(spared);
            Ok((budget, format!("{available} available less {spared}: {}", fact.detail())))
        }
    }
}

fn request(
    model: &Catalogue,
    machine: &Facts,
    options: &Options,
    budget: Bytes,
) -> Result<Request, PlanRefusal> {
    let max_context = model.spec.max_context as u64;
    let bad = |option, found: u64, expected: String| {
        Err(PlanRefusal::BadOption { option, found: found.to_string(), expected })
    };
    let context = options.context.unwrap_or(DEFAULT_CONTEXT.min(max_context));
    if !(1..=max_context).contains(&context) {
        return bad("--ctx", context, format!("1 to {max_context}, the model's own limit"));
    }
    let usable = machine.cpu.usable_threads.value().copied().unwrap_or(1);
    let threads = options.threads.unwrap_or(usable.clamp(1, MAX_THREADS));
    if !(1..=MAX_THREADS).contains(&threads) {
        return bad("--threads", threads, format!("1 to {MAX_THREADS}"));
    }
    if options.prefill_batch == Some(0) {
        return bad("--batch", 0, "at least 1".to_owned());
    }
    Ok(Request {
        budget,
        context,
        threads,
        kv: options.kv.unwrap_or(KvElement::F32),
        prefill_batch: options.prefill_batch,
    })
}

/// The instruction set that the machine's facts allow, unless one is asked for.
fn isa(machine: &Facts, options: &Options) -> String {
    if let Some(isa) = &options.isa {
        return isa.clone();
    }
    let sets = machine.cpu.instruction_sets.value().map(Vec::as_slice).unwrap_or_default();
    let has = |names: &[&str]| names.iter().all(|name| sets.iter().any(|set| set == name));
    if has(&["avx512f", "avx512bw", "avx512dq", "avx512vl"]) {
        "avx512"
    } else if has(&["avx2", "f16c"]) {
        "avx2"
    } else {
        "scalar"
    }
    .to_owned()
}

/// Caps of the layers that route, as the replay takes them.
fn caps(model: &Catalogue, slots: &Slots) -> Vec<(LayerId, u32)> {
    model.spec.expert_layers().map(|l| (LayerId(l as u32), slots.caps[l])).collect()
}

/// Pins from history where its replay supports them; returns why.
fn pin(
    model: &Catalogue,
    options: &Options,
    history: Option<&History>,
    placed: &mut Placed,
) -> String {
    let router = &model.spec.router;
    let (n_experts, n_active) = (router.n_experts as u32, router.n_experts_active as u32);
    let caps = caps(model, &placed.slots);
    let choice = match options.pins {
        PinRule::None => return "no pins: --pins none".to_owned(),
        PinRule::Judged => simulate::choose_pins(history, &caps, n_experts, n_active),
        PinRule::Share(share) => {
            simulate::pins_of_share(history, &caps, n_experts, n_active, share)
        }
    };
    let mut pins = vec![Vec::new(); model.spec.n_layers];
    for (layer, chosen) in model.spec.expert_layers().zip(choice.pins) {
        pins[layer] = chosen;
    }
    placed.pin(model, pins);
    choice.evidence
}

fn expected_hits(model: &Catalogue, slots: &Slots, history: Option<&History>) -> simulate::HitRate {
    let router = &model.spec.router;
    let caps = caps(model, slots);
    let pins: Vec<Vec<u32>> = model.spec.expert_layers().map(|l| slots.pins[l].clone()).collect();
    let planned = PlannedCache {
        n_experts: router.n_experts as u32,
        n_experts_active: router.n_experts_active as u32,
        caps: &caps,
        pins: &pins,
    };
    simulate::expected_hit_rate(history, model.spec.family, &planned)
}

/// Earlier runs that speak for this one: as many threads, a budget within a factor of two.
fn past_runs(history: Option<&History>, workload: &Workload, budget: Bytes) -> Vec<PastRun> {
    let similar = |bytes: Bytes| {
        let ratio = bytes.as_f64() / budget.as_f64().max(1.0);
        (0.5..=2.0).contains(&ratio)
    };
    history
        .into_iter()
        .flat_map(History::runs)
        .filter(|run| run.n_threads.is_none_or(|n| u64::from(n) == workload.threads))
        .filter(|run| run.budget_bytes.is_none_or(similar))
        .filter_map(|run| {
            Some(PastRun {
                uncalibrated_tokens_per_s: run.uncalibrated_tok_per_s?,
                actual_tokens_per_s: run.actual_tok_per_s?,
            })
        })
        .collect()
}
