//! Repeats of one measurement, summed up: owns which of them are medians, which are sums, and what is held
//! against what. Every field is described in docs/bench.md.

use serde::Serialize;
use tierkeep_plans::plan::{Plan, Range, TermSeconds};
use tierkeep_plans::units::Bytes;

use super::statistics::{Repeats, quantile};
use super::{Distinct, LEAST_SHARE_OF_EXPERTS, Sample, TouchedBytes, Work};
use crate::counters::AccessCounts;

/// What a plan expects, as it stands in the plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Expected {
    /// Tokens per second in decode.
    pub decode_tokens_per_s: Range,
    /// Hit rate in decode, 0 to 1.
    pub hit_rate: Range,
    /// Bytes of experts and of streamed dense weights that a token reads.
    pub read_bytes_per_token: Bytes,
    /// Seconds of a token by term, at the median.
    pub terms: Vec<TermSeconds>,
    /// The term that takes most of them.
    pub binding: String,
}

impl Expected {
    /// Of a plan.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        let prediction = &plan.prediction;
        Self {
            decode_tokens_per_s: prediction.decode_tokens_per_s,
            hit_rate: prediction.hit_rate,
            read_bytes_per_token: prediction.read_bytes_per_token
                + prediction.streamed_bytes_per_token,
            terms: prediction.terms.clone(),
            binding: prediction.binding.clone(),
        }
    }
}

/// What the process held beside what it may.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Held {
    /// Anonymous and shared pages and mapped pages of the model, the most that was seen after a repeat.
    pub footprint_bytes: Option<Bytes>,
    /// The most that was resident at once, of this configuration alone where the system lets the mark be
    /// set back, else of the process so far.
    pub peak_bytes: Option<Bytes>,
    /// Whether the peak is of this configuration alone.
    pub is_peak_own: bool,
    /// The budget.
    pub budget_bytes: Bytes,
}

/// A configuration at one context.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Tokens in the sequence when decoding begins.
    pub context: usize,
    /// Of these, timed as prefill: the last ones.
    pub prefill_tokens: usize,
    /// Tokens decoded in a repeat.
    pub decode_tokens: usize,
    /// Repeats.
    pub repeats: usize,
    /// Tokens per second of the prompt; `None` without one.
    pub prefill_tokens_per_s: Option<Repeats>,
    /// The same of what stood before the prompt; `None` where nothing did.
    pub fill_tokens_per_s: Option<Repeats>,
    /// Tokens per second in decode; `None` without decode.
    pub decode_tokens_per_s: Option<Repeats>,
    /// Median time of a decode step over all repeats, ms.
    pub decode_ms_p50: Option<f64>,
    /// The slowest step but one in twenty, over all repeats, ms.
    pub decode_ms_p95: Option<f64>,
    /// Bytes that a decoded token touches, computed.
    pub touched: TouchedBytes,
    /// These over the time of a step.
    pub touched_bytes_per_s: Option<f64>,
    /// The memory's bandwidth, measured in the same run: the largest of its figures.
    pub memory_bytes_per_s: Option<f64>,
    /// Touched over given, 0 to 1.
    pub memory_share: Option<f64>,
    /// Bytes that a decoded token read from the shards, counted; the median of repeats.
    pub read_bytes_per_token: f64,
    /// All bytes read in decode over the time of the reads; reads side by side count each. `None` without.
    pub read_bytes_per_s: Option<f64>,
    /// The disk's speed, as the plan has it measured: of reads of an expert's size, at its best depth.
    pub disk_bytes_per_s: Option<f64>,
    /// Tokens per second where a token takes what it reads over the disk's speed and what it touches over
    /// the memory's, one after the other. Reads that others compute under can exceed it.
    pub limit_tokens_per_s: Option<f64>,
    /// Actual over that.
    pub limit_share: Option<f64>,
    /// Bytes that the prompt read for each of its tokens, the median of repeats.
    pub prefill_read_bytes_per_token: f64,
    /// Accesses in decode, over all repeats.
    pub accesses: AccessCounts,
    /// Hits over accesses in decode, 0 to 1.
    pub hit_rate: Option<f64>,
    /// Different experts that were used, in the repeat with the fewest.
    pub distinct: Distinct,
    /// The same in decode alone.
    pub distinct_in_decode: Distinct,
    /// Whether too few experts were used for the figures to be compared with another engine's or model's.
    pub is_void: bool,
    /// What the plan expects.
    pub expected: Expected,
    /// Memory.
    pub held: Held,
}

/// What is known besides the samples.
#[derive(Clone, Copy, Debug)]
pub struct Circumstances<'a> {
    /// The plan that was executed.
    pub plan: &'a Plan,
    /// What a decoded token touches.
    pub touched: TouchedBytes,
    /// The memory's bandwidth, bytes/s.
    pub memory_bytes_per_s: Option<f64>,
    /// What was held.
    pub held: Held,
    /// Whether the tokens were made rather than taken from a text.
    pub is_synthetic: bool,
}

impl Summary {
    /// Sums up repeats of `work`; without any there are no figures.
    #[must_use]
    pub fn of(work: Work, samples: &[Sample], at: Circumstances<'_>) -> Self {
        let repeats =
            |figure: fn(&Sample) -> Option<f64>| Repeats::of(samples.iter().filter_map(figure));
        let median = |figure: &dyn Fn(&Sample) -> f64| {
            Repeats::of(samples.iter().map(figure)).map_or(0.0, |r| r.median)
        };
        let steps: Vec<f64> =
            samples.iter().flat_map(|s| &s.steps).map(|step| step.as_secs_f64() * 1e3).collect();
        let decode = repeats(Sample::decode_tokens_per_s);
        let per_s = decode.as_ref().map(|speed| speed.median * at.touched.all().as_f64());
        let accesses = samples.iter().fold(AccessCounts::default(), |sum, s| sum + s.accesses);
        let fewest = |distinct: fn(&Sample) -> Distinct| {
            let all = samples.iter().map(distinct);
            all.min_by(|a, b| a.share.total_cmp(&b.share)).unwrap_or_default()
        };
        let distinct = fewest(|s| s.distinct);
        let reads = samples.iter().map(|s| s.reads.all());
        let (bytes, seconds) =
            reads.fold((0_u64, 0.0), |(b, t), r| (b + r.bytes, t + r.busy.as_secs_f64()));
        let prompt = work.prefilled().max(1) as f64;
        let read_bytes_per_token = median(&Sample::read_bytes_per_token);
        let disk = at.plan.machine.disk.read.value().map(|read| read.bytes_per_s);
        let limit = limit(at, read_bytes_per_token, disk);
        Self {
            context: work.context,
            prefill_tokens: work.prefilled(),
            decode_tokens: work.decode,
            repeats: samples.len(),
            prefill_tokens_per_s: repeats(Sample::prefill_tokens_per_s),
            fill_tokens_per_s: repeats(Sample::fill_tokens_per_s),
            decode_ms_p50: quantile(&steps, 0.5),
            decode_ms_p95: quantile(&steps, 0.95),
            touched: at.touched,
            touched_bytes_per_s: per_s,
            memory_bytes_per_s: at.memory_bytes_per_s,
            memory_share: per_s.zip(at.memory_bytes_per_s).map(|(touched, given)| touched / given),
            read_bytes_per_token,
            disk_bytes_per_s: disk,
            limit_tokens_per_s: limit,
            limit_share: decode.as_ref().zip(limit).map(|(speed, limit)| speed.median / limit),
            read_bytes_per_s: (bytes > 0 && seconds > 0.0).then(|| bytes as f64 / seconds),
            prefill_read_bytes_per_token: median(&|s| s.prefill_reads.all().bytes as f64 / prompt),
            accesses,
            hit_rate: accesses.hit_rate(),
            is_void: at.is_synthetic && distinct.of > 0 && distinct.share < LEAST_SHARE_OF_EXPERTS,
            distinct,
            distinct_in_decode: fewest(|s| s.distinct_in_decode),
            decode_tokens_per_s: decode,
            expected: Expected::of(at.plan),
            held: at.held,
        }
    }

    /// Actual over predicted speed, less one; `None` without either.
    #[must_use]
    pub fn off_by(&self) -> Option<f64> {
        let actual = self.decode_tokens_per_s.as_ref()?.median;
        let expected = self.expected.decode_tokens_per_s.p50;
        (expected > 0.0).then(|| actual / expected - 1.0)
    }
}

/// The speed that memory and disk allow one after the other; `None` where one that is needed is unknown.
fn limit(at: Circumstances<'_>, read_bytes: f64, disk_bytes_per_s: Option<f64>) -> Option<f64> {
    let memory = at.touched.all().as_f64() / at.memory_bytes_per_s?;
    let disk = if read_bytes > 0.0 { read_bytes / disk_bytes_per_s? } else { 0.0 };
    let seconds = memory + disk;
    (seconds > 0.0).then(|| 1.0 / seconds)
}
