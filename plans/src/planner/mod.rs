//! From a model, a machine's facts, a request and a history to a plan. Puts the parts of this crate
//! together and decides nothing that they decide; pure, so that any plan can be made anywhere.

mod advice;
pub mod again;
mod fitting;
mod io;
mod machine;
mod pair;
mod policy;

use std::str::FromStr;

use tierkeep_doctor::Facts;

pub use self::advice::{Advice, Change, what_would_help};
pub use self::fitting::{FittingChange, FittingChangeKind, WouldFit};
use self::machine::Vram;
pub use self::machine::{best_isa, default_budget, has_isa};
pub use self::pair::{PairRefusal, budget, plan_pair};
use crate::budget::{DenseResidency, Holding, KvElement, ModelBytes, Workload};
use crate::catalogue::Catalogue;
use crate::estimate::{self, Compute, ExpectedHits, PastRun, Rates, View};
use crate::place::{self, CacheRule, DenseRule, DoesNotFit, Placed, Request};
use crate::plan::{
    Abilities, EngineSettings, ExpertTier, IoMode, ModelRef, Numerics, PLAN_VERSION, Placement,
    Plan, PlanRequest, Policy, Prediction, Prefetch, Range, TierShare, tiers,
};
use crate::simulate::{self, PlannedCache};
use crate::units::{Bytes, LayerId, SizeRequest};
use crate::usage::History;

/// Context planned when none is asked for, tokens, if the model has as much.
const DEFAULT_CONTEXT: u64 = 4096;

/// Most threads that a plan may have.
pub(crate) const MAX_THREADS: u64 = 1024;
/// Most sequences that a plan may hold at once.
pub(crate) const MAX_SESSIONS: u64 = 1024;
/// Most reads that a plan may have under way at once: twice what any disk was seen to need.
pub(crate) const MAX_READ_DEPTH: u64 = 64;

/// What a user may set; the rest is solved around it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// `--ram`.
    pub ram: Option<SizeRequest>,
    /// `--vram`: the most that all usable graphics cards may give together, split over them as their
    /// free memory is; 0 for none. Without it all free memory of the cards is planned with, if
    /// [`Options::engine`] can use cards.
    pub vram: Option<SizeRequest>,
    /// `--slots`: experts of each layer that have a slot in main memory.
    pub slots: Option<u32>,
    /// `--policy`.
    pub policy: Option<Policy>,
    /// `--sessions`: sequences that are held at once; 1 if `None`.
    pub sessions: Option<u64>,
    /// `--dense`: how dense weights may live in main memory.
    pub dense: DenseRule,
    /// `--ctx`, tokens.
    pub context: Option<u64>,
    /// `--threads`.
    pub threads: Option<u64>,
    /// `--numerics`: exact, if `None`.
    pub numerics: Option<Numerics>,
    /// `--kv`: what the numerics usually keep, if `None`.
    pub kv: Option<KvElement>,
    /// `--batch`, tokens of a prefill batch.
    pub prefill_batch: Option<u64>,
    /// `--isa`.
    pub isa: Option<String>,
    /// `--io`.
    pub io: Option<IoMode>,
    /// `--io-depth`: reads that are under way at once; as measured best, if `None`.
    pub io_depth: Option<u64>,
    /// `--read-size`: about how much one read brings; as measured best, if `None`.
    pub read_size: Option<SizeRequest>,
    /// `--prefetch`: exact where a layer knows its experts early, if `None`.
    pub prefetch: Option<Prefetch>,
    /// `--pins`.
    pub pins: PinRule,
    /// `--allow-overcommit`.
    pub allow_overcommit: bool,
    /// What the engine that is to execute the plan can do. What it cannot is planned only where it is
    /// asked for by name.
    pub engine: Abilities,
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
        /// The ledger and the smallest budget.
        result: Box<DoesNotFit>,
        /// Every change that would make it fit.
        would_fit: Box<WouldFit>,
    },
    /// The budget is above what the machine can give.
    #[error(
        "a budget of {budget} is above the {available} that this machine has available ({source_of}): ask for less, plan for a machine that has it with --what-if ram=SIZE, or insist with --allow-overcommit"
    )]
    OverMachine {
        /// What was asked for.
        budget: Bytes,
        /// What there is.
        available: Bytes,
        /// Where that figure comes from.
        source_of: String,
    },
    /// No graphics card can hold anything, though some were asked for.
    #[error(
        "--vram asks for graphics memory, and no card can give any: {reason}; plan without it: --vram 0"
    )]
    NoVram {
        /// Why.
        reason: String,
    },
    /// More graphics memory than the cards have free.
    #[error(
        "--vram asks for {asked}, above the {free} that the graphics cards have free: ask for less, or insist with --allow-overcommit"
    )]
    OverCards {
        /// What was asked for.
        asked: Bytes,
        /// What is free on all usable cards.
        free: Bytes,
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
    let (io, mut io_evidence) = io::choose(model, machine, options);
    let sums = ModelBytes::of(model, io);
    let (_, how) = io::reads(&sums, machine, options)?;
    io_evidence = format!("{io_evidence}; {how}");
    match Solved::of(&sums, machine, options, history) {
        Ok(solved) => Ok(solved.into_plan(&sums, machine, options, io_evidence)),
        Err(PlanRefusal::DoesNotFit { model, result, .. }) => {
            let would_fit = fitting::would_fit(&sums, machine, options, history, &result);
            Err(PlanRefusal::DoesNotFit { model, result, would_fit: Box::new(would_fit) })
        }
        Err(other) => Err(other),
    }
}

/// Everything that is decided, before it is written down.
struct Solved {
    budget: Bytes,
    budget_source: String,
    vram: Vram,
    placed: Placed,
    isa: String,
    policy: policy::Choice,
    cache_evidence: String,
    hits: ExpectedHits,
    rates: Rates,
    prediction: Prediction,
}

impl Solved {
    fn of(
        sums: &ModelBytes<'_>,
        machine: &Facts,
        options: &Options,
        history: Option<&History>,
    ) -> Result<Self, PlanRefusal> {
        let (budget, budget_source) = machine::budget(machine, options)?;
        let mut request = request(sums, machine, options, budget)?;
        let vram = machine::vram(machine, options)?;
        request.cards.clone_from(&vram.cards);
        let uses = policy::uses(sums.model, history);
        let mut placed = place::place(sums, &request, uses.as_deref()).map_err(|result| {
            PlanRefusal::DoesNotFit {
                model: sums.model.directory.display().to_string(),
                result: Box::new(result),
                would_fit: Box::default(),
            }
        })?;
        if options.vram.is_some() && !vram.cards.is_empty() && placed.cards.is_empty() {
            let least = place::least_card_bytes(sums, &placed.workload);
            let reason = format!("one layer, its buffers and the driver need {least} on one card");
            return Err(PlanRefusal::NoVram { reason });
        }
        let policy = policy::choose(sums, options, history, &mut placed);
        let isa = machine::isa(machine, options);
        let (hits, evidence) = expected_hits(sums, &placed.holding(), history);
        let read_size = sums.expert_read_size();
        let layer_size = sums.layers.iter().map(|l| l.dense.stored).max().unwrap_or(0);
        let Workload { threads, numerics, reads, .. } = placed.workload;
        let compute = Compute { isa: &isa, threads, numerics };
        let rates = Rates::of(machine, compute, (read_size, reads), layer_size);
        let view = View { sums, workload: &placed.workload, holding: placed.holding(), hits };
        let past = past_runs(history, &placed.workload, budget);
        let prediction = estimate::estimate(&view, &rates, &evidence, &past);
        let cache_evidence = cache_evidence(sums, &request, &placed);
        Ok(Self {
            budget,
            budget_source,
            vram,
            placed,
            isa,
            policy,
            cache_evidence,
            hits,
            rates,
            prediction,
        })
    }

    fn into_plan(
        self,
        sums: &ModelBytes<'_>,
        machine: &Facts,
        options: &Options,
        io_evidence: String,
    ) -> Plan {
        let model = sums.model;
        let tiers = tier_shares(sums, &self.placed.holding(), &self.hits);
        let Workload { context, prefill_batch, threads, numerics, kv, embedding, sessions, reads } =
            self.placed.workload;
        let total = self.placed.ledger.total();
        Plan {
            version: PLAN_VERSION,
            unused_bytes: self.budget.saturating_sub(total),
            model: ModelRef {
                directory: model.directory.clone(),
                fingerprint: model.fingerprint.clone(),
                family: model.spec.family.model_type().to_owned(),
                total_bytes: model.total_bytes(),
            },
            request: PlanRequest {
                budget_bytes: self.budget,
                budget_source: self.budget_source,
                vram_bytes: self.vram.cards.iter().map(|c| c.budget).sum(),
                vram_source: self.vram.source,
                context,
                sessions,
                allow_overcommit: options.allow_overcommit,
            },
            engine: EngineSettings {
                threads,
                cpus: machine::cpus(machine, threads),
                isa: self.isa,
                numerics,
                kv,
                prefill_batch,
                embedding,
                io: sums.io,
                io_evidence,
                prefetch: if reads.begins_early { Prefetch::Exact } else { Prefetch::Off },
                read_depth: reads.depth,
                read_bytes: reads.bytes,
            },
            placement: Placement {
                policy: self.policy.policy,
                policy_evidence: self.policy.policy_evidence,
                pins_evidence: self.policy.pins_evidence,
                cache_evidence: self.cache_evidence,
                page_cache_bytes: self.placed.page_cache_bytes,
                slots: self.placed.slots,
                dense: self.placed.dense,
                streamed: self.placed.streamed,
                cards: self.placed.cards,
            },
            prediction: self.prediction,
            ledger: self.placed.ledger,
            tiers,
            machine: machine.clone(),
        }
    }
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
    let sums = ModelBytes::of(model, io::choose(model, machine, options).0);
    let cards = machine::vram(machine, options).ok()?.cards;
    let slots = |budget: u64| -> Option<u64> {
        let request = request(&sums, machine, options, Bytes(budget)).ok()?;
        let placed = place::place(&sums, &Request { cards: cards.clone(), ..request }, None).ok();
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

fn request(
    sums: &ModelBytes<'_>,
    machine: &Facts,
    options: &Options,
    budget: Bytes,
) -> Result<Request, PlanRefusal> {
    let model = sums.model;
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
    let sessions = options.sessions.unwrap_or(1);
    if !(1..=MAX_SESSIONS).contains(&sessions) {
        return bad("--sessions", sessions, format!("1 to {MAX_SESSIONS}"));
    }
    if options.prefill_batch == Some(0) {
        return bad("--batch", 0, "at least 1".to_owned());
    }
    let n_experts = model.spec.router.n_experts as u64;
    if let Some(slots) = options.slots.filter(|&slots| u64::from(slots) > n_experts) {
        let expected = format!("0 to {n_experts}, the experts of a layer");
        return bad("--slots", u64::from(slots), expected);
    }
    // What the engine cannot stream must fit, unless streaming is asked for by name.
    let dense = match options.dense {
        DenseRule::Auto if !options.engine.streamed_dense => DenseRule::Resident,
        rule => rule,
    };
    let cache = match options.io {
        Some(IoMode::Buffered) => CacheRule::PageCache,
        Some(IoMode::Direct | IoMode::Dropped) | None => CacheRule::Slots,
    };
    let numerics = options.numerics.unwrap_or_default();
    Ok(Request {
        budget,
        cards: Vec::new(),
        context,
        sessions,
        threads,
        reads: io::reads(sums, machine, options)?.0,
        numerics,
        kv: options.kv.unwrap_or(numerics.usual_kv()),
        prefill_batch: options.prefill_batch,
        slots: options.slots,
        dense,
        cache,
    })
}

/// Why experts are kept where they are: one cache, never two.
fn cache_evidence(sums: &ModelBytes<'_>, request: &Request, placed: &Placed) -> String {
    if placed.holding().hold_everything(&sums.model.spec) {
        return "every expert has a place of its own and is read once: no cache is needed, and what \
                the budget leaves is not taken"
            .to_owned();
    }
    match (request.cache, request.slots) {
        (CacheRule::Slots, _) => {
            let dense = match placed.dense {
                DenseResidency::Resident => {
                    "dense weights are copies in memory, so that no page cache is starved"
                }
                DenseResidency::Mapped => {
                    "dense weights are in the page cache alone, and the budget counts them there"
                }
            };
            let reads = if sums.io.uses_page_cache() {
                "the pages that they were read through are dropped"
            } else {
                "they are read past the page cache"
            };
            format!("one cache: experts are kept in slots, and {reads}; {dense}")
        }
        (CacheRule::PageCache, None) => format!(
            "one cache: --io buffered leaves experts to the kernel, with {} of the budget; they have \
             no slots",
            placed.page_cache_bytes
        ),
        (CacheRule::PageCache, Some(_)) => {
            "two caches were asked for: --slots keeps experts and --io buffered lets the kernel keep \
             them again; nothing of the budget is left to it"
                .to_owned()
        }
    }
}

/// The share of accesses that each tier is expected to serve at the median.
fn tier_shares(
    sums: &ModelBytes<'_>,
    holding: &Holding<'_>,
    hits: &ExpectedHits,
) -> Vec<TierShare> {
    let mut tiers = tiers(sums, holding);
    let experts = |tier: ExpertTier| tiers[tier as usize].experts as f64;
    let (pinned, cached) = (experts(ExpertTier::Pinned), experts(ExpertTier::Cache));
    let in_memory = (hits.hit_rate.p50 - hits.vram).max(0.0);
    // Pins and other slots are told apart by their number alone.
    let pinned = if pinned > 0.0 { in_memory * pinned / (pinned + cached) } else { 0.0 };
    for tier in &mut tiers {
        tier.access_share = match tier.tier {
            ExpertTier::Vram => hits.vram,
            ExpertTier::Pinned => pinned,
            ExpertTier::Cache => in_memory - pinned,
            ExpertTier::PageCache => hits.page_cache,
            ExpertTier::Disk => 1.0 - hits.vram.max(hits.hit_rate.p50) - hits.page_cache,
        }
        .clamp(0.0, 1.0);
    }
    tiers
}

/// What share of accesses is expected where, and what that rests on.
fn expected_hits(
    sums: &ModelBytes<'_>,
    holding: &Holding<'_>,
    history: Option<&History>,
) -> (ExpectedHits, Vec<String>) {
    let spec = &sums.model.spec;
    let on_cards = holding.on_cards(spec.n_layers);
    let routing: Vec<usize> = spec.expert_layers().collect();
    let n_experts = spec.router.n_experts as u32;
    let kept = |layer: usize| {
        let slot = sums.layers[layer].slot.max(1) * routing.len().max(1) as u64;
        u32::try_from(holding.page_cache_bytes.0 / slot).unwrap_or(u32::MAX)
    };
    let expected = |page_cache: bool| {
        let at_hand = |layer: usize| {
            let kept = if page_cache { kept(layer) } else { 0 };
            let slots = holding.slots.caps[layer].saturating_add(on_cards[layer]);
            slots.saturating_add(kept).min(n_experts)
        };
        let caps: Vec<(LayerId, u32)> =
            routing.iter().map(|&l| (LayerId(l as u32), at_hand(l))).collect();
        let mut pins: Vec<Vec<u32>> =
            routing.iter().map(|&l| holding.slots.pins[l].clone()).collect();
        for layer in holding.cards.iter().flat_map(|c| &c.experts) {
            if let Ok(place) = routing.binary_search(&(layer.layer as usize)) {
                pins[place].extend(&layer.experts.0);
            }
        }
        let fixed: Vec<u32> = routing.iter().map(|&l| on_cards[l]).collect();
        let planned = PlannedCache {
            n_experts,
            n_experts_active: spec.router.n_experts_active as u32,
            caps: &caps,
            pins: &pins,
            fixed: &fixed,
        };
        simulate::expected_hit_rate(history, spec.family, &planned)
    };
    let resident = expected(false);
    let hit_rate = Range { p10: resident.p10, p50: resident.p50, p90: resident.p90 };
    let mut evidence = vec![format!("hit rate {}", resident.evidence)];
    let mut hits = ExpectedHits { vram: 0.0, hit_rate, page_cache: 0.0 };
    if !holding.cards.is_empty() {
        let (share, why) = policy::share_on_cards(sums, holding, history);
        hits.vram = share.min(hit_rate.p50);
        evidence.push(why);
    }
    if holding.page_cache_bytes > Bytes(0) {
        hits.page_cache = (expected(true).p50 - hit_rate.p50).max(0.0);
        evidence.push(format!(
            "page cache {:.0} % of accesses: assumed, as if the kernel kept whole experts by recency",
            hits.page_cache * 100.0
        ));
    }
    (hits, evidence)
}

/// Earlier runs that speak for this one: the same numerics, as many threads, a budget within a factor of two.
fn past_runs(history: Option<&History>, workload: &Workload, budget: Bytes) -> Vec<PastRun> {
    let similar = |bytes: Bytes| {
        let ratio = bytes.as_f64() / budget.as_f64().max(1.0);
        (0.5..=2.0).contains(&ratio)
    };
    history
        .into_iter()
        .flat_map(History::runs)
        .filter(|run| run.numerics.unwrap_or_default() == workload.numerics)
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
