//! The estimate: seconds per token from bytes, rates and an expected hit rate. Pure; every rate
//! that is not a measured fact is named as assumed in the prediction's evidence.

use tierkeep_doctor::{Fact, Facts};

use crate::budget::{self, Slots, Workload};
use crate::catalogue::Catalogue;
use crate::plan::{Prediction, Range};
use crate::units::Bytes;

/// Memory bandwidth assumed where none was measured, bytes/s: two channels of DDR4.
const ASSUMED_MEMORY_BYTES_PER_S: f64 = 20e9;
/// Disk bandwidth assumed where none was measured, bytes/s: a middling NVMe drive.
const ASSUMED_DISK_BYTES_PER_S: f64 = 1.5e9;
/// Seconds that a layer takes besides its products: norms, routing, waking the threads.
const LAYER_OVERHEAD_S: f64 = 40e-6;
/// Factors on the speed at the tenth and the ninetieth percentile, before any run has been seen.
const UNSEEN_SPREAD: (f64, f64) = (0.55, 1.5);
/// The same when earlier runs calibrate the estimate.
const CALIBRATED_SPREAD: (f64, f64) = (0.8, 1.25);

/// What an earlier run says about the estimate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PastRun {
    /// What was predicted, before calibration, tokens/s.
    pub uncalibrated_tokens_per_s: f64,
    /// What was measured, tokens/s.
    pub actual_tokens_per_s: f64,
}

/// Weights that one thread multiplies in a second under exact numerics, by instruction set.
///
/// Measured on one Xeon of 2023 at 2.3 GHz over packed weights in memory; assumed elsewhere
/// until a run calibrates the estimate.
fn weights_per_s(isa: &str) -> f64 {
    match isa {
        "avx512" => 14e9,
        "avx2" => 10e9,
        _ => 4e9,
    }
}

/// The factor that earlier runs put on the speed: the median of actual over predicted, 1 without
/// any.
#[must_use]
pub fn calibration(past: &[PastRun]) -> f64 {
    let mut ratios: Vec<f64> = past
        .iter()
        .map(|run| run.actual_tokens_per_s / run.uncalibrated_tokens_per_s)
        .filter(|ratio| ratio.is_finite() && *ratio > 0.0)
        .collect();
    ratios.sort_by(f64::total_cmp);
    ratios.get(ratios.len() / 2).copied().unwrap_or(1.0)
}

/// One term of a token's time.
struct Term {
    name: &'static str,
    seconds: f64,
}

/// Predicts a run.
///
/// Seconds per token: the larger of touched bytes over memory bandwidth and touched weights over the
/// kernel rate, plus missed bytes over disk bandwidth, plus per-layer overhead. Touched bytes are the
/// dense weights, the routed experts of one token, and the cache at half the context.
#[must_use]
pub fn estimate(
    model: &Catalogue,
    workload: &Workload,
    slots: &Slots,
    (hit_rate, hit_evidence): (Range, &str),
    (machine, isa): (&Facts, &str),
    past: &[PastRun],
) -> Prediction {
    let (dense, routed) = budget::touched_bytes_per_token(model);
    let kv = budget::kv_cache_bytes(&model.spec, workload.context / 2, workload.kv);
    let touched = dense + routed + Bytes(kv);
    let mut evidence = vec![format!("hit rate {hit_evidence}")];
    let memory = rate(
        &machine.memory.read_bandwidth_bytes_per_s,
        ASSUMED_MEMORY_BYTES_PER_S,
        "memory bandwidth",
        &mut evidence,
    );
    let disk_fact = machine.disk.read.clone().map(|r| r.bytes_per_s);
    let disk = rate(&disk_fact, ASSUMED_DISK_BYTES_PER_S, "disk bandwidth", &mut evidence);
    let kernels = weights_per_s(isa) * workload.threads as f64;
    evidence.push(format!("per-layer overhead {:.0} us a layer: assumed", LAYER_OVERHEAD_S * 1e6));
    evidence.push(format!(
        "kernel rate {:.1} G weights/s: assumed for {isa}, {} threads, exact numerics",
        kernels / 1e9,
        workload.threads
    ));
    let calibration = calibration(past);
    let (low, high) = if past.is_empty() {
        evidence.push("calibration none: no earlier run of this model here".to_owned());
        UNSEEN_SPREAD
    } else {
        evidence
            .push(format!("calibration x{calibration:.2}: median of {} earlier runs", past.len()));
        CALIBRATED_SPREAD
    };
    let cold_only = slots.hold_everything(&model.spec);
    let terms = |hit: f64| {
        let missed = if cold_only { 0.0 } else { routed.as_f64() * (1.0 - hit) };
        [
            Term { name: "memory bandwidth", seconds: touched.as_f64() / memory },
            Term { name: "kernels", seconds: touched_weights(model) as f64 / kernels },
            Term { name: "disk reads of missed experts", seconds: missed / disk },
            Term {
                name: "per-layer overhead",
                seconds: LAYER_OVERHEAD_S * model.spec.n_layers as f64,
            },
        ]
    };
    let speed = |hit: f64| {
        let [memory, kernels, disk, overhead] = terms(hit).map(|t| t.seconds);
        1.0 / (memory.max(kernels) + disk + overhead)
    };
    let binding = terms(hit_rate.p50)
        .into_iter()
        .max_by(|a, b| a.seconds.total_cmp(&b.seconds))
        .map_or("", |t| t.name);
    Prediction {
        decode_tokens_per_s: Range {
            p10: speed(hit_rate.p10) * calibration * low,
            p50: speed(hit_rate.p50) * calibration,
            p90: speed(hit_rate.p90) * calibration * high,
        },
        hit_rate,
        touched_bytes_per_token: touched,
        read_bytes_per_token: Bytes(if cold_only {
            0
        } else {
            (routed.as_f64() * (1.0 - hit_rate.p50)) as u64
        }),
        binding: binding.to_owned(),
        calibration,
        evidence,
    }
}

/// A rate from a fact, or the assumed one; either way the evidence says which.
fn rate(fact: &Fact<f64>, assumed: f64, name: &str, evidence: &mut Vec<String>) -> f64 {
    match fact.value() {
        Some(&value) if value > 0.0 => {
            evidence.push(format!(
                "{name} {:.1} GB/s: {}, {}",
                value / 1e9,
                fact.source().as_str(),
                fact.detail()
            ));
            value
        }
        _ => {
            evidence.push(format!("{name} {:.1} GB/s: assumed, {}", assumed / 1e9, fact.detail()));
            assumed
        }
    }
}

/// Weights that one token multiplies: every dense matrix and the routed experts it is sent to.
fn touched_weights(model: &Catalogue) -> u64 {
    let spec = &model.spec;
    let dense: u64 = budget::resident_tensors(model, budget::touched_embedding(model))
        .map(|t| t.rows * t.cols)
        .sum();
    let expert = 3 * spec.hidden_size * spec.expert_ff_size * spec.router.n_experts_active;
    dense + expert as u64 * spec.expert_layers().count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calibration_is_the_median_ratio() {
        let run = |predicted, actual| PastRun {
            uncalibrated_tokens_per_s: predicted,
            actual_tokens_per_s: actual,
        };
        assert_eq!(calibration(&[]), 1.0);
        assert_eq!(calibration(&[run(10.0, 5.0), run(10.0, 8.0), run(10.0, 20.0)]), 0.8);
        assert_eq!(calibration(&[run(0.0, 5.0)]), 1.0);
    }
}
