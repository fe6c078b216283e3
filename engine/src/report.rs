//! What a run promised and what happened: owns the figures of the closing report and the record that
//! the usage history keeps of it. Renders nothing. Every field is described in docs/run-report.md.

mod judge;

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;
use tierkeep_plans::budget::{DenseResidency, Line, Numerics};
use tierkeep_plans::plan::{Plan, Range};
use tierkeep_plans::units::Bytes;
use tierkeep_plans::usage::RunRecord;

pub use self::judge::{
    Comparison, Figure, FootprintReport, MIN_DECODE_STEPS, TOLERANCE, Verdict, Warning,
};
use crate::counters::{AccessCounts, Phase, ReadCounts, Reads, WindowReads};
use crate::engine::Engine;
use crate::generate::{Ended, Generation, Mark};
use crate::profile::ProfileReport;

/// Version of the report's schema. A field that is removed or means something else raises it; a new
/// one does not.
pub const REPORT_VERSION: u32 = 3;

/// Lines that the engine allocates; the others are the process's and the kernel's.
pub const BOUND_LINES: [Line; 9] = [
    Line::DenseWeights,
    Line::StreamBuffers,
    Line::KvCache,
    Line::IndexerKeys,
    Line::Activations,
    Line::ExpertsInFlight,
    Line::IoBuffers,
    Line::PinnedExperts,
    Line::ExpertCache,
];

/// One line of the ledger, as planned and as it came to be.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LineReport {
    /// The line.
    pub line: Line,
    /// What the plan gives it.
    pub planned_bytes: Bytes,
    /// What the engine bound, counted at allocation; for the runtime line what the process held besides.
    /// `None` where it cannot be known.
    pub actual_bytes: Option<Bytes>,
    /// How the actual figure is known, or why it is not.
    pub source: String,
}

/// Reads of one kind in one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ReadReport {
    /// Bytes asked for and brought.
    pub bytes: Bytes,
    /// Number of reads.
    pub reads: u64,
    /// Time from call to return, summed over reads; reads side by side count each.
    pub seconds: f64,
    /// Time in which at least one of them was under way.
    pub busy_seconds: f64,
    /// Bytes over the time in which at least one was under way; `None` without reads.
    pub bytes_per_s: Option<f64>,
}

impl From<Reads> for ReadReport {
    fn from(reads: Reads) -> Self {
        let (seconds, busy) = (reads.time.as_secs_f64(), reads.busy.as_secs_f64());
        let is_known = reads.bytes > 0 && busy > 0.0;
        Self {
            bytes: Bytes(reads.bytes),
            reads: reads.reads,
            seconds,
            busy_seconds: busy,
            bytes_per_s: is_known.then(|| reads.bytes as f64 / busy),
        }
    }
}

/// Reads of experts by threads of their own, while others compute.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WindowReport {
    /// Time in which at least one of them was under way.
    pub seconds: f64,
    /// Time that was spent waiting for them.
    pub waited_seconds: f64,
    /// The rest of it: others computed.
    pub hidden_seconds: f64,
    /// That over the tokens; `None` without any.
    pub hidden_seconds_per_token: Option<f64>,
    /// Hidden over all of it, 0 to 1.
    pub hidden_share: f64,
}

impl WindowReport {
    /// `None` where nothing was read so.
    fn of(window: WindowReads, tokens: usize) -> Option<Self> {
        let (seconds, hidden) = (window.time.as_secs_f64(), window.hidden().as_secs_f64());
        (seconds > 0.0).then(|| Self {
            seconds,
            waited_seconds: window.waited.as_secs_f64(),
            hidden_seconds: hidden,
            hidden_seconds_per_token: (tokens > 0).then(|| hidden / tokens as f64),
            hidden_share: hidden / seconds,
        })
    }
}

/// Reads of one phase by what they were for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ReadsReport {
    /// All of them.
    pub total: ReadReport,
    /// Weights that every token touches; after loading, those that are streamed.
    pub dense: ReadReport,
    /// Rows of an embedding that stays on disk.
    pub embedding: ReadReport,
    /// Routed experts; while loading, the pinned ones.
    pub experts: ReadReport,
}

impl From<ReadCounts> for ReadsReport {
    fn from(counts: ReadCounts) -> Self {
        Self {
            total: counts.all().into(),
            dense: counts.dense.into(),
            embedding: counts.embedding.into(),
            experts: counts.experts.into(),
        }
    }
}

/// Loading.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LoadReport {
    /// Time.
    pub seconds: f64,
    /// Reads.
    pub read: ReadsReport,
}

/// Accesses of one phase and the reads that they caused.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PhaseReport {
    /// Tokens.
    pub tokens: usize,
    /// Time, without what was printed or saved meanwhile.
    pub seconds: f64,
    /// Tokens over time; `None` without both.
    pub tokens_per_s: Option<f64>,
    /// Accesses by tier: in decode one for each (token, layer, expert), in prefill one for each
    /// expert of a batch's union.
    pub accesses: AccessCounts,
    /// Hits over accesses, 0 to 1; `None` without any.
    pub hit_rate: Option<f64>,
    /// Reads from the shards.
    pub read: ReadsReport,
    /// How much of the time that experts were read others computed; `None` where none was read by a thread of
    /// its own.
    pub window: Option<WindowReport>,
}

/// One layer that routes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayerReport {
    /// The layer, from 0.
    pub layer: usize,
    /// Its routed experts.
    pub experts: u32,
    /// Its slots, pinned ones included.
    pub slots: u32,
    /// Its pinned slots.
    pub pinned: u32,
    /// Accesses in prefill.
    pub prefill: AccessCounts,
    /// Accesses in decode.
    pub decode: AccessCounts,
    /// Hits over accesses in decode, 0 to 1; `None` without any.
    pub decode_hit_rate: Option<f64>,
    /// Different experts that were asked for, in either phase.
    pub distinct: u32,
    /// Different experts that were asked for in decode.
    pub distinct_in_decode: u32,
}

/// Routed experts over all layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ExpertsReport {
    /// Experts of the model.
    pub total: u64,
    /// Slots, pinned ones included.
    pub slots: u64,
    /// Pinned slots.
    pub pinned: u64,
    /// Different experts that were asked for, in either phase.
    pub distinct: u64,
    /// Different experts that were asked for in decode.
    pub distinct_in_decode: u64,
    /// Misses in decode that filled a slot which had held nothing.
    pub cold_misses_in_decode: u64,
    /// Slots that hold nothing at the end.
    pub empty_slots: u64,
}

/// Weights that decode touched, against what memory can give.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TrafficReport {
    /// Weight bytes that a token touches, computed by the plan from the model's tensors.
    pub touched_bytes_per_token: Bytes,
    /// The same over the time of a decode step.
    pub touched_bytes_per_s: Option<f64>,
    /// Reads of memory that the machine gives, as the plan has it; `None` where it is not known.
    pub memory_bytes_per_s: Option<f64>,
    /// Where that comes from, or why it is not known.
    pub memory_source: String,
    /// Touched over given, 0 to 1.
    pub share: Option<f64>,
    /// Reads of experts that the disk gives, as the plan has it; `None` where it is not known.
    pub disk_bytes_per_s: Option<f64>,
    /// Where that comes from, or why it is not known.
    pub disk_source: String,
    /// Reads at once, as the plan has it; 0 where the threads that compute read one after another.
    pub read_depth: u64,
    /// About how much one read brings, as the plan has it; `None` where nothing is cut.
    pub read_bytes: Option<Bytes>,
}

/// What the process held, as the system counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemorySeen {
    /// Resident of any kind before anything was loaded.
    pub before_loading: Option<Bytes>,
    /// Anonymous and shared pages and mapped pages of the model, at the end.
    pub footprint: Option<Bytes>,
    /// Mapped pages of the model, at the end.
    pub mapped: Option<Bytes>,
    /// The most that was resident (`VmHWM`).
    pub peak: Option<Bytes>,
}

/// What loading came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Loaded {
    /// Its time.
    pub time: Duration,
    /// The counts when it was done.
    pub mark: Mark,
}

/// The closing report of a run.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// Version of this schema.
    pub schema_version: u32,
    /// Generated tokens, a stop token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub ended: Ended,
    /// Loading.
    pub load: LoadReport,
    /// The prompt.
    pub prefill: PhaseReport,
    /// The tokens after the first.
    pub decode: PhaseReport,
    /// From the start of the prompt until the first token was chosen; loading is apart.
    pub first_token_seconds: Option<f64>,
    /// Median time of a decode step.
    pub decode_ms_p50: Option<f64>,
    /// Slowest step but one in twenty.
    pub decode_ms_p95: Option<f64>,
    /// Routed experts over all layers.
    pub experts: ExpertsReport,
    /// Every layer that routes.
    pub layers: Vec<LayerReport>,
    /// Weights touched in decode.
    pub traffic: TrafficReport,
    /// The context that is planned, tokens.
    pub context: u64,
    /// The budget.
    pub budget_bytes: Bytes,
    /// What the process was to hold and what it held.
    pub footprint: FootprintReport,
    /// Every line.
    pub ledger: Vec<LineReport>,
    /// How often a place was read again because the disk had failed to give it back.
    pub read_retries: u64,
    /// Shards that were replaced while the engine worked; the run is of the files that it had opened.
    pub replaced_shards: Vec<PathBuf>,
    /// Predicted beside actual.
    pub comparisons: Vec<Comparison>,
    /// Why speed and hits are not judged; `None` where they are.
    pub not_judged: Option<String>,
    /// Where time went, by stage of a pass; `None` where it was not measured.
    pub profile: Option<ProfileReport>,
    /// What was not as planned.
    pub warnings: Vec<Warning>,
}

impl RunReport {
    /// Puts together what a run left in the engine, the generation and the plan, and judges it.
    #[must_use]
    pub fn new(
        engine: &Engine,
        plan: &Plan,
        generation: &Generation,
        loaded: &Loaded,
        memory: MemorySeen,
    ) -> Self {
        let now = Mark::of(engine);
        let prefilled = generation.prefilled;
        let experts = experts(engine, plan, prefilled, now);
        let decode = phase(
            (engine, Phase::Decode),
            (generation.steps.len(), generation.steps.iter().sum()),
            now.reads.since(&prefilled.reads),
        );
        let mut report = Self {
            schema_version: REPORT_VERSION,
            tokens: generation.tokens.clone(),
            ended: generation.ended,
            load: LoadReport { seconds: loaded.time.as_secs_f64(), read: loaded.mark.reads.into() },
            prefill: phase(
                (engine, Phase::Prefill),
                (generation.prompt_tokens, generation.prefill),
                prefilled.reads.since(&loaded.mark.reads),
            ),
            decode,
            first_token_seconds: generation.first_token.map(|time| time.as_secs_f64()),
            decode_ms_p50: quantile_ms(&generation.steps, 0.5),
            decode_ms_p95: quantile_ms(&generation.steps, 0.95),
            experts,
            layers: layers(engine, plan),
            traffic: traffic(plan, &decode),
            context: plan.request.context,
            budget_bytes: plan.request.budget_bytes,
            footprint: FootprintReport::of(plan, memory.footprint, untouched(engine, plan, memory)),
            ledger: ledger(engine, plan, memory),
            read_retries: engine.read_counter().retries(),
            replaced_shards: engine.replaced_shards(),
            comparisons: Vec::new(),
            not_judged: None,
            profile: engine.profile(),
            warnings: Vec::new(),
        };
        report.judge(&plan.prediction, memory);
        report
    }

    /// A figure of [`RunReport::comparisons`].
    #[must_use]
    pub fn comparison(&self, figure: Figure) -> Option<&Comparison> {
        self.comparisons.iter().find(|comparison| comparison.figure == figure)
    }

    /// What the usage history keeps of it.
    #[must_use]
    pub fn record(&self, plan: &Plan) -> RunRecord {
        let speed: Range = plan.prediction.decode_tokens_per_s;
        RunRecord {
            predicted_tok_per_s_p10: Some(speed.p10),
            predicted_tok_per_s_p50: Some(speed.p50),
            predicted_tok_per_s_p90: Some(speed.p90),
            // A run that says nothing of the prediction does not correct the next one either.
            uncalibrated_tok_per_s: self
                .not_judged
                .is_none()
                .then_some(speed.p50 / plan.prediction.calibration),
            predicted_hit_rate: Some(plan.prediction.hit_rate.p50),
            actual_tok_per_s: self.decode.tokens_per_s,
            actual_hit_rate: self.decode.hit_rate,
            decoded_tokens: Some(self.decode.tokens as u64),
            budget_bytes: Some(plan.request.budget_bytes),
            context_tokens: Some(plan.request.context),
            n_threads: u32::try_from(plan.engine.threads).ok(),
            numerics: Some(plan.engine.numerics).filter(|&n| n != Numerics::default()),
        }
    }
}

fn phase(
    (engine, phase): (&Engine, Phase),
    (tokens, time): (usize, Duration),
    reads: ReadCounts,
) -> PhaseReport {
    let accesses = engine.counters().total(phase);
    let seconds = time.as_secs_f64();
    PhaseReport {
        tokens,
        seconds,
        tokens_per_s: (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds),
        accesses,
        hit_rate: accesses.hit_rate(),
        read: reads.into(),
        window: WindowReport::of(reads.window, tokens),
    }
}

fn layers(engine: &Engine, plan: &Plan) -> Vec<LayerReport> {
    let counters = engine.counters();
    let slots = &plan.placement.slots;
    let of = |layer: usize| {
        let decode = counters.decode.get(layer).copied().unwrap_or_default();
        LayerReport {
            layer,
            experts: engine.spec().router.n_experts as u32,
            slots: slots.caps.get(layer).copied().unwrap_or(0),
            pinned: slots.pins.get(layer).map_or(0, |pins| pins.len() as u32),
            prefill: counters.prefill.get(layer).copied().unwrap_or_default(),
            decode,
            decode_hit_rate: decode.hit_rate(),
            distinct: counters.distinct(layer),
            distinct_in_decode: counters.distinct_in_decode(layer),
        }
    };
    engine.spec().expert_layers().map(of).collect()
}

fn experts(engine: &Engine, plan: &Plan, prefilled: Mark, now: Mark) -> ExpertsReport {
    let mut sums = ExpertsReport {
        cold_misses_in_decode: prefilled.empty_slots.saturating_sub(now.empty_slots),
        empty_slots: now.empty_slots,
        ..ExpertsReport::default()
    };
    for layer in layers(engine, plan) {
        sums.total += u64::from(layer.experts);
        sums.slots += u64::from(layer.slots);
        sums.pinned += u64::from(layer.pinned);
        sums.distinct += u64::from(layer.distinct);
        sums.distinct_in_decode += u64::from(layer.distinct_in_decode);
    }
    sums
}

fn traffic(plan: &Plan, decode: &PhaseReport) -> TrafficReport {
    let touched = plan.prediction.touched_bytes_per_token;
    let fact = &plan.machine.memory.read_bandwidth_bytes_per_s;
    let given = fact.value().copied().filter(|rate| *rate > 0.0);
    let per_s = decode.tokens_per_s.map(|speed| speed * touched.as_f64());
    let memory_source = source_of(fact.source().as_str(), fact.detail(), given.is_some());
    let reckoned = plan.prediction.expert_read_bytes_per_s();
    TrafficReport {
        touched_bytes_per_token: touched,
        touched_bytes_per_s: per_s,
        memory_bytes_per_s: given,
        memory_source,
        share: per_s.zip(given).map(|(touched, given)| touched / given),
        disk_bytes_per_s: reckoned,
        disk_source: match reckoned {
            Some(_) => "the plan's estimate: bytes of missed experts over their time",
            None => "the plan expects no reads of experts",
        }
        .to_owned(),
        read_depth: plan.engine.read_depth,
        read_bytes: plan.engine.read_bytes,
    }
}

/// Where a fact of the plan comes from, with its detail where it has one; of what is not known, why.
fn source_of(source: &str, detail: &str, is_known: bool) -> String {
    match (detail.is_empty(), is_known) {
        (true, _) => source.to_owned(),
        (false, true) => format!("{source}: {detail}"),
        (false, false) => detail.to_owned(),
    }
}

/// How much of what is bound has never been written to, and so is not resident yet: empty slots, for
/// everything else is taken at the start. Or it was and is not any more: pages of mapped weights that
/// the system took back.
fn untouched(engine: &Engine, plan: &Plan, memory: MemorySeen) -> Bytes {
    let taken_back = match (plan.placement.dense, memory.mapped) {
        (DenseResidency::Mapped, Some(mapped)) => {
            engine.bound(Line::DenseWeights).saturating_sub(mapped)
        }
        (DenseResidency::Mapped, None) | (DenseResidency::Resident, _) => Bytes(0),
    };
    engine.empty_slots().1 + taken_back
}

fn ledger(engine: &Engine, plan: &Plan, memory: MemorySeen) -> Vec<LineReport> {
    let bound: Bytes = BOUND_LINES.into_iter().map(|line| engine.bound(line)).sum();
    let of = |line: Line| {
        let planned_bytes = plan.ledger.bytes(line);
        let (actual_bytes, source) = if BOUND_LINES.contains(&line) {
            (Some(engine.bound(line)), "bound, counted at allocation")
        } else if line == Line::Runtime {
            (judge::runtime(bound, memory), judge::RUNTIME_SOURCE)
        } else if planned_bytes == Bytes(0) {
            (Some(Bytes(0)), "not used by this plan")
        } else {
            (None, "the kernel's: its pages are not counted for one process")
        };
        LineReport { line, planned_bytes, actual_bytes, source: source.to_owned() }
    };
    Line::ALL.map(of).into()
}

/// A quantile of step times by nearest rank, milliseconds.
fn quantile_ms(steps: &[Duration], quantile: f64) -> Option<f64> {
    let mut sorted = steps.to_vec();
    sorted.sort_unstable();
    let rank = (quantile * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).map(|d| d.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_by_nearest_rank() {
        let steps: Vec<Duration> = (1..=20).rev().map(Duration::from_millis).collect();
        assert_eq!(quantile_ms(&steps, 0.5), Some(10.0));
        assert_eq!(quantile_ms(&steps, 0.95), Some(19.0));
        assert_eq!(quantile_ms(&steps[..1], 0.5), Some(20.0));
        assert_eq!(quantile_ms(&[], 0.5), None);
    }

    #[test]
    fn what_was_not_waited_for_was_hidden() {
        let ms = Duration::from_millis;
        let window = |time, waited| WindowReads { time: ms(time), waited: ms(waited) };
        let report = WindowReport::of(window(4000, 1000), 6).unwrap();
        assert_eq!((report.seconds, report.waited_seconds), (4.0, 1.0));
        assert_eq!((report.hidden_seconds, report.hidden_share), (3.0, 0.75));
        assert_eq!(report.hidden_seconds_per_token, Some(0.5));
        // A wait may be longer than the read: the thread has to wake up.
        assert_eq!(WindowReport::of(window(10, 11), 0).unwrap().hidden_share, 0.0);
        assert_eq!(WindowReport::of(window(0, 0), 6), None);
    }

    #[test]
    fn a_read_speed_is_bytes_over_the_time_of_the_reads() {
        let ms = Duration::from_millis;
        let reads = Reads { bytes: 3_000, reads: 2, time: ms(2400), busy: ms(1500) };
        let report = ReadReport::from(reads);
        assert_eq!((report.bytes_per_s, report.seconds), (Some(2_000.0), 2.4));
        assert_eq!(ReadReport::from(Reads::default()).bytes_per_s, None);
    }
}
