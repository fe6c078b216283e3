//! What a run promised and what happened: owns the figures of the closing report and the record that
//! the usage history keeps of it. Renders nothing.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;
use tierkeep_plans::budget::Line;
use tierkeep_plans::plan::{Plan, Range};
use tierkeep_plans::units::Bytes;
use tierkeep_plans::usage::RunRecord;

use crate::counters::{AccessCounts, Phase};
use crate::engine::Engine;
use crate::generate::{Ended, Generation};

/// Lines that the engine allocates; the others are the process's and the kernel's.
pub const BOUND_LINES: [Line; 8] = [
    Line::DenseWeights,
    Line::KvCache,
    Line::IndexerKeys,
    Line::Activations,
    Line::ExpertsInFlight,
    Line::IoBuffers,
    Line::PinnedExperts,
    Line::ExpertCache,
];

/// One line of the ledger, as planned and as bound.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LineReport {
    /// The line.
    pub line: Line,
    /// What the plan gives it.
    pub planned_bytes: Bytes,
    /// What the engine bound, counted at allocation; `None` for lines that are not the engine's.
    pub bound_bytes: Option<Bytes>,
}

/// Accesses of one phase and the reads that they caused.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PhaseReport {
    /// Tokens.
    pub tokens: usize,
    /// Time.
    pub seconds: f64,
    /// Tokens over time; `None` without both.
    pub tokens_per_s: Option<f64>,
    /// Accesses by tier: in decode one for each (token, layer, expert), in prefill one for each
    /// expert of a batch's union.
    pub accesses: AccessCounts,
    /// Hits over accesses, 0 to 1; `None` without any.
    pub hit_rate: Option<f64>,
    /// Bytes read from the shards.
    pub read_bytes: Bytes,
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
    /// Bytes read while loading.
    pub load_read_bytes: Bytes,
    /// Time to load.
    pub load_seconds: f64,
    /// The prompt. Its time is the time to the first token.
    pub prefill: PhaseReport,
    /// The tokens after the first.
    pub decode: PhaseReport,
    /// Median time of a decode step.
    pub decode_ms_p50: Option<f64>,
    /// Slowest step but one in twenty.
    pub decode_ms_p95: Option<f64>,
    /// Decode accesses of each layer.
    pub decode_by_layer: Vec<AccessCounts>,
    /// The budget.
    pub budget_bytes: Bytes,
    /// Sum of the plan's lines without the page-cache reserve.
    pub planned_footprint_bytes: Bytes,
    /// Every line.
    pub ledger: Vec<LineReport>,
    /// What the plan predicted for decode, tokens/s.
    pub predicted_tokens_per_s: Range,
    /// What the plan predicted for the hit rate in decode, 0 to 1.
    pub predicted_hit_rate: Range,
    /// How often a place was read again because the disk had failed to give it back.
    pub read_retries: u64,
    /// Shards that were replaced while the engine worked; the run is of the files that it had opened.
    pub replaced_shards: Vec<PathBuf>,
}

/// Reads at the moments that phases meet.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadMarks {
    /// Bytes read when loading was done.
    pub loaded: u64,
    /// Bytes read when the prompt was done.
    pub prefilled: u64,
}

impl RunReport {
    /// Puts together what a run left in the engine, the generation and the plan.
    #[must_use]
    pub fn new(
        engine: &Engine,
        plan: &Plan,
        generation: &Generation,
        marks: ReadMarks,
        load: Duration,
    ) -> Self {
        let read = engine.read_counter().bytes();
        let phase = |phase, tokens: usize, time: Duration, read_bytes: u64| {
            let accesses = engine.counters().total(phase);
            let seconds = time.as_secs_f64();
            PhaseReport {
                tokens,
                seconds,
                tokens_per_s: (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds),
                accesses,
                hit_rate: accesses.hit_rate(),
                read_bytes: Bytes(read_bytes),
            }
        };
        let decode_time = generation.steps.iter().sum();
        let prefilled = marks.prefilled.max(marks.loaded);
        let ledger = Line::ALL.map(|line| LineReport {
            line,
            planned_bytes: plan.ledger.bytes(line),
            bound_bytes: BOUND_LINES.contains(&line).then(|| engine.bound(line)),
        });
        Self {
            schema_version: 1,
            tokens: generation.tokens.clone(),
            ended: generation.ended,
            load_read_bytes: Bytes(marks.loaded),
            load_seconds: load.as_secs_f64(),
            prefill: phase(
                Phase::Prefill,
                generation.prompt_tokens,
                generation.prefill,
                prefilled - marks.loaded,
            ),
            decode: phase(
                Phase::Decode,
                generation.steps.len(),
                decode_time,
                read.saturating_sub(prefilled),
            ),
            decode_ms_p50: quantile_ms(&generation.steps, 0.5),
            decode_ms_p95: quantile_ms(&generation.steps, 0.95),
            decode_by_layer: engine.counters().decode.clone(),
            budget_bytes: plan.request.budget_bytes,
            planned_footprint_bytes: plan.ledger.footprint(),
            ledger: ledger.into(),
            predicted_tokens_per_s: plan.prediction.decode_tokens_per_s,
            predicted_hit_rate: plan.prediction.hit_rate,
            read_retries: engine.read_counter().retries(),
            replaced_shards: engine.replaced_shards(),
        }
    }

    /// What the usage history keeps of it.
    #[must_use]
    pub fn record(&self, plan: &Plan) -> RunRecord {
        let speed = plan.prediction.decode_tokens_per_s;
        RunRecord {
            predicted_tok_per_s_p10: Some(speed.p10),
            predicted_tok_per_s_p50: Some(speed.p50),
            predicted_tok_per_s_p90: Some(speed.p90),
            uncalibrated_tok_per_s: Some(speed.p50 / plan.prediction.calibration),
            predicted_hit_rate: Some(plan.prediction.hit_rate.p50),
            actual_tok_per_s: self.decode.tokens_per_s,
            actual_hit_rate: self.decode.hit_rate,
            decoded_tokens: Some(self.decode.tokens as u64),
            budget_bytes: Some(plan.request.budget_bytes),
            context_tokens: Some(plan.request.context),
            n_threads: u32::try_from(plan.engine.threads).ok(),
        }
    }
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
}
