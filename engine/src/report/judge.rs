//! Whether what happened is what was promised. Owns the tolerances, what is too short a run to judge,
//! and the words of each warning: what differs, what that means, what to do.

use serde::Serialize;
use tierkeep_plans::budget::Line;
use tierkeep_plans::plan::{Plan, Prediction, Range};
use tierkeep_plans::units::{Bytes, Rate, counted};

use super::{BOUND_LINES, MemorySeen, RunReport};

/// Share of a prediction by which actual may be outside it before that is a warning.
pub const TOLERANCE: f64 = 0.10;
/// Fewer decode steps than this say nothing of speed or hits.
pub const MIN_DECODE_STEPS: usize = 16;
/// Share of accesses in decode that may fill empty slots before the cache counts as still filling: a
/// prediction is of a cache that is full.
const MAX_COLD_SHARE: f64 = 0.10;
/// Share of a token's weights below which a difference of bytes read is too small to matter.
const MIN_BYTES_SHARE: f64 = 0.01;
/// Hit rates that differ by less than this (2 points) are not told apart.
const MIN_HIT_DIFFERENCE: f64 = 0.02;
/// A footprint is as planned within the larger of this and the share below.
const FOOTPRINT_BYTES: u64 = 16_000_000;
/// See [`FOOTPRINT_BYTES`].
const FOOTPRINT_SHARE: f64 = 0.02;
/// Reads slower than this part of the planned rate are named as the reason of a low speed.
const SLOW_READS: f64 = 0.8;
/// Reads are named as the reason only where they took more than this part of the time.
const MUCH_OF_THE_TIME: f64 = 1.0 / 3.0;

/// How the actual figure of the runtime line is known.
pub(super) const RUNTIME_SOURCE: &str = "resident before loading, or the peak less what is bound where that is more; \
     a lower bound, for pages of other lines that nothing has touched are not resident";

/// What is predicted and happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure {
    /// Tokens per second in decode.
    DecodeTokensPerS,
    /// Hits over accesses in decode, 0 to 1.
    HitRate,
    /// Bytes of routed experts read per decoded token.
    ReadBytesPerToken,
    /// Bytes of dense weights read per decoded token.
    StreamedBytesPerToken,
}

/// How a figure compares with what was predicted of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Inside the predicted range, or outside by at most the tolerance.
    AsPredicted,
    /// Below it.
    Below,
    /// Above it.
    Above,
    /// Not known.
    Unknown,
}

/// One figure, predicted beside actual.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Which.
    pub figure: Figure,
    /// What the plan predicted.
    pub predicted: Range,
    /// What happened.
    pub actual: Option<f64>,
    /// How the two compare. Of a run that is too short it is no reason for a warning.
    pub verdict: Verdict,
}

/// The footprint against the plan's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FootprintReport {
    /// Sum of the plan's lines without the page-cache reserve.
    pub planned_bytes: Bytes,
    /// Anonymous and shared pages and mapped pages of the model at the end; `None` where unknown.
    pub actual_bytes: Option<Bytes>,
    /// At most how much of what is bound has never been written to, and so is not resident.
    pub untouched_bytes: Bytes,
    /// The larger of 2 % of the plan's and 16 MB.
    pub tolerance_bytes: Bytes,
    /// Whether the actual is within that of the planned; less is as planned as far as memory that
    /// nothing has touched explains it.
    pub verdict: Verdict,
}

impl FootprintReport {
    pub(super) fn of(plan: &Plan, actual: Option<Bytes>, untouched: Bytes) -> Self {
        Self::new(plan.ledger.footprint(), actual, untouched)
    }

    /// Compares the two.
    #[must_use]
    pub fn new(planned: Bytes, actual: Option<Bytes>, untouched: Bytes) -> Self {
        let share = (planned.as_f64() * FOOTPRINT_SHARE) as u64;
        let tolerance = Bytes(share.max(FOOTPRINT_BYTES));
        let verdict = match actual {
            None => Verdict::Unknown,
            Some(actual) if actual > planned + tolerance => Verdict::Above,
            Some(actual) if actual + untouched + tolerance < planned => Verdict::Below,
            Some(_) => Verdict::AsPredicted,
        };
        Self {
            planned_bytes: planned,
            actual_bytes: actual,
            untouched_bytes: untouched,
            tolerance_bytes: tolerance,
            verdict,
        }
    }

    /// Whether it is more than a tenth and more than the tolerance off.
    fn is_far_off(&self) -> bool {
        let far = self.planned_bytes.as_f64() * TOLERANCE;
        let off = |actual: Bytes| match self.verdict {
            Verdict::Above => actual.saturating_sub(self.planned_bytes).as_f64() > far,
            Verdict::Below => {
                let held = actual + self.untouched_bytes;
                self.planned_bytes.saturating_sub(held).as_f64() > far
            }
            Verdict::AsPredicted | Verdict::Unknown => false,
        };
        self.actual_bytes.is_some_and(off)
    }
}

/// Something that was not as planned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Stable name.
    pub id: String,
    /// What differs, with both figures.
    pub finding: String,
    /// What that means.
    pub meaning: String,
    /// What to do about it.
    pub remedy: String,
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}; {}", self.finding, self.meaning, self.remedy)
    }
}

/// What the process held besides the lines that are bound.
pub(super) fn runtime(bound: Bytes, memory: MemorySeen) -> Option<Bytes> {
    let beside = memory.peak.map(|peak| peak.saturating_sub(bound));
    memory.before_loading.max(beside)
}

/// Compares with a range, letting it be passed by the tolerance and by at least `floor`.
fn compare(figure: Figure, predicted: Range, actual: Option<f64>, floor: f64) -> Comparison {
    let beyond = |bound: f64| (bound * TOLERANCE).max(floor);
    let verdict = match actual {
        None => Verdict::Unknown,
        Some(actual) if actual < predicted.p10 - beyond(predicted.p10) => Verdict::Below,
        Some(actual) if actual > predicted.p90 + beyond(predicted.p90) => Verdict::Above,
        Some(_) => Verdict::AsPredicted,
    };
    Comparison { figure, predicted, actual, verdict }
}

/// The range of bytes read per token that follows from the range of hit rates.
///
/// Misses bring bytes in proportion, so at hit rate `h` it is `median * (1 - h) / (1 - h50)`.
fn read_range(median: Bytes, hits: Range) -> Range {
    let missed = 1.0 - hits.p50;
    let at = |hit: f64| if missed > 0.0 { median.as_f64() * (1.0 - hit) / missed } else { 0.0 };
    Range { p10: at(hits.p90), p50: median.as_f64(), p90: at(hits.p10) }
}

impl RunReport {
    /// Fills in comparisons, whether they mean anything, and warnings.
    pub(super) fn judge(&mut self, predicted: &Prediction, memory: MemorySeen) {
        self.comparisons = self.compare(predicted);
        self.not_judged = self.too_short();
        let mut warnings = self.memory_warnings(memory);
        warnings.extend(self.file_warnings());
        if self.not_judged.is_none() {
            warnings.extend(self.speed_warnings(predicted));
        }
        self.warnings = warnings;
    }

    fn compare(&self, predicted: &Prediction) -> Vec<Comparison> {
        let decode = &self.decode;
        let per_token =
            |bytes: Bytes| (decode.tokens > 0).then(|| bytes.as_f64() / decode.tokens as f64);
        let floor = predicted.touched_bytes_per_token.as_f64() * MIN_BYTES_SHARE;
        let streamed = predicted.streamed_bytes_per_token.as_f64();
        let streamed = Range { p10: streamed, p50: streamed, p90: streamed };
        let reads = read_range(predicted.read_bytes_per_token, predicted.hit_rate);
        let read = per_token(decode.read.experts.bytes);
        let dense = per_token(decode.read.dense.bytes);
        vec![
            compare(
                Figure::DecodeTokensPerS,
                predicted.decode_tokens_per_s,
                decode.tokens_per_s,
                0.0,
            ),
            compare(Figure::HitRate, predicted.hit_rate, decode.hit_rate, MIN_HIT_DIFFERENCE),
            compare(Figure::ReadBytesPerToken, reads, read, floor),
            compare(Figure::StreamedBytesPerToken, streamed, dense, floor),
        ]
    }

    /// Why the run says nothing of speed and hits, if it does not.
    fn too_short(&self) -> Option<String> {
        let steps = self.decode.tokens;
        if steps < MIN_DECODE_STEPS {
            return Some(format!(
                "too short to judge: {steps} decode steps, fewer than {MIN_DECODE_STEPS}"
            ));
        }
        let accesses = self.decode.accesses.accesses();
        let cold = self.experts.cold_misses_in_decode as f64 / accesses.max(1) as f64;
        (cold > MAX_COLD_SHARE).then(|| {
            format!(
                "too early to judge: {:.0} % of the accesses in decode filled slots that had been \
                 empty, and a prediction is of slots that are full",
                cold * 100.0
            )
        })
    }

    fn memory_warnings(&self, memory: MemorySeen) -> Vec<Warning> {
        const REPORT: &str = "please report it with the output of --json";
        let mut warnings = Vec::new();
        let mut warn = |id: &str, finding: String, meaning: &str, remedy: &str| {
            warnings.push(Warning {
                id: id.to_owned(),
                finding,
                meaning: meaning.to_owned(),
                remedy: remedy.to_owned(),
            });
        };
        if let Some(peak) = memory.peak
            && peak > self.budget_bytes
        {
            warn(
                "memory.over_budget",
                format!(
                    "peak resident memory of {peak} is over the budget of {}",
                    self.budget_bytes
                ),
                "the system may reclaim from others or kill this process",
                REPORT,
            );
        }
        let footprint = &self.footprint;
        if footprint.is_far_off()
            && let Some(actual) = footprint.actual_bytes
        {
            let planned = footprint.planned_bytes;
            let (meaning, remedy) = if footprint.verdict == Verdict::Above {
                ("something holds memory that no line knows", REPORT)
            } else {
                ("the plan set memory aside that the run did not take", REPORT)
            };
            let finding = format!("a footprint of {actual} where {planned} was planned");
            warn("memory.footprint", finding, meaning, remedy);
        }
        for line in &self.ledger {
            let Some(actual) = line.actual_bytes else { continue };
            let planned = line.planned_bytes;
            let is_bound = BOUND_LINES.contains(&line.line);
            // What is bound is exact; what the process holds besides is as coarse as its pages.
            let floor = (planned.as_f64() * TOLERANCE).max(FOOTPRINT_BYTES as f64);
            let over =
                line.line == Line::Runtime && actual.saturating_sub(planned).as_f64() > floor;
            if (is_bound && actual != planned) || over {
                let finding =
                    format!("{} bytes held for \"{}\", {} planned", actual.0, line.line, planned.0);
                let meaning = "the ledger is not what the run holds";
                warn(&format!("ledger.{}", line_id(line.line)), finding, meaning, REPORT);
            }
        }
        warnings
    }

    /// What the files of the model did meanwhile.
    fn file_warnings(&self) -> Vec<Warning> {
        let mut warnings = Vec::new();
        if self.read_retries > 0 {
            warnings.push(Warning {
                id: "disk.retries".to_owned(),
                finding: format!(
                    "reads of the model failed {}",
                    counted(self.read_retries, "time")
                ),
                meaning: "the disk gave the bytes when it was asked again".to_owned(),
                remedy: "look at its health".to_owned(),
            });
        }
        if let Some(first) = self.replaced_shards.first() {
            let more = match self.replaced_shards.len() - 1 {
                0 => String::new(),
                n => format!(" and {} of the model", counted(n as u64, "other file")),
            };
            warnings.push(Warning {
                id: "model.replaced".to_owned(),
                finding: format!(
                    "{}{more} was replaced or removed during the run",
                    first.display()
                ),
                meaning: "what is above is of the model as it was when the run began".to_owned(),
                remedy: "plan again for the model as it is now".to_owned(),
            });
        }
        warnings
    }

    fn speed_warnings(&self, predicted: &Prediction) -> Vec<Warning> {
        let of = |comparison: &Comparison| {
            let actual = comparison.actual?;
            let is_above = match comparison.verdict {
                Verdict::Above => true,
                Verdict::Below => false,
                Verdict::AsPredicted | Verdict::Unknown => return None,
            };
            Some(match comparison.figure {
                Figure::DecodeTokensPerS => self.speed(comparison.predicted, actual, is_above),
                Figure::HitRate => hits(comparison.predicted, actual, is_above),
                Figure::ReadBytesPerToken => read(comparison.predicted, actual, is_above),
                Figure::StreamedBytesPerToken => streamed(predicted, actual),
            })
        };
        self.comparisons.iter().filter_map(of).collect()
    }

    fn speed(&self, predicted: Range, actual: f64, is_faster: bool) -> Warning {
        let Range { p10, p90, .. } = predicted;
        let finding = format!("{actual:.3} tokens/s is outside the predicted {p10:.3} to {p90:.3}");
        let learns = "the next plan is calibrated by runs that are recorded";
        let (meaning, remedy) = if is_faster {
            ("the machine gives more than the plan's rates say".to_owned(), learns.to_owned())
        } else if let Some((got, expected)) = self.slow_reads() {
            let meaning = format!(
                "reads of experts came at {}, the plan reckons with {}",
                Rate(got),
                Rate(expected)
            );
            let remedy = "see whether something else uses the disk, measure it with \
                          `tierkeep doctor MODEL`, and plan again";
            (meaning, remedy.to_owned())
        } else {
            let meaning = "something else used the machine, or rates of the plan are assumed";
            let remedy = format!("measure it with `tierkeep doctor` and plan again; {learns}");
            (meaning.to_owned(), remedy)
        };
        Warning { id: "speed.decode".to_owned(), finding, meaning, remedy }
    }

    /// The speed of reads of experts in decode and the planned one, where they are much slower and took
    /// a good part of the time.
    fn slow_reads(&self) -> Option<(f64, f64)> {
        let expected = self.traffic.disk_bytes_per_s?;
        let got = self.decode.read.experts.bytes_per_s?;
        let is_much =
            self.decode.read.experts.busy_seconds > self.decode.seconds * MUCH_OF_THE_TIME;
        (is_much && got < expected * SLOW_READS).then_some((got, expected))
    }
}

/// A line's name in ids.
fn line_id(line: Line) -> String {
    line.name().to_lowercase().replace('/', "").replace([' ', '-'], "_")
}

fn hits(predicted: Range, actual: f64, is_above: bool) -> Warning {
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let finding = format!(
        "{} of the experts were found in memory, predicted {} to {}",
        percent(actual),
        percent(predicted.p10),
        percent(predicted.p90)
    );
    let meaning = if is_above {
        "this text uses fewer different experts than the history or the prior"
    } else {
        "this text uses other experts than the history or the prior"
    };
    let remedy = "plan again once more runs are recorded: pins and the estimate follow the history";
    Warning {
        id: "hits.decode".to_owned(),
        finding,
        meaning: meaning.to_owned(),
        remedy: remedy.to_owned(),
    }
}

fn read(predicted: Range, actual: f64, is_above: bool) -> Warning {
    let size = |bytes: f64| Bytes(bytes as u64);
    let finding = format!(
        "{} of experts were read for a token, predicted {} to {}",
        size(actual),
        size(predicted.p10),
        size(predicted.p90)
    );
    let (meaning, remedy) = if is_above {
        (
            "each of these bytes takes time",
            "plan again once more runs are recorded, or with a larger --ram",
        )
    } else {
        ("the plan is too careful", "plan again once more runs are recorded")
    };
    Warning {
        id: "read.experts".to_owned(),
        finding,
        meaning: meaning.to_owned(),
        remedy: remedy.to_owned(),
    }
}

fn streamed(predicted: &Prediction, actual: f64) -> Warning {
    Warning {
        id: "read.dense".to_owned(),
        finding: format!(
            "{} of dense weights were read for a token, predicted {}",
            Bytes(actual as u64),
            predicted.streamed_bytes_per_token
        ),
        meaning: "what the plan streams is not what the run streamed".to_owned(),
        remedy: "please report it with the output of --json".to_owned(),
    }
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;
