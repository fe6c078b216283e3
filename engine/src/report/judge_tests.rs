//! Each warning, and what is no reason for one.

use tierkeep_plans::plan::TermSeconds;

use super::super::{
    ExpertsReport, LineReport, LoadReport, PhaseReport, ReadReport, ReadsReport, TrafficReport,
};
use super::*;
use crate::counters::AccessCounts;
use crate::generate::Ended;

const GB: u64 = 1_000_000_000;

fn prediction() -> Prediction {
    Prediction {
        decode_tokens_per_s: Range { p10: 1.8, p50: 2.0, p90: 2.2 },
        hit_rate: Range { p10: 0.5, p50: 0.6, p90: 0.7 },
        touched_bytes_per_token: Bytes(20 * GB),
        read_bytes_per_token: Bytes(4 * GB),
        streamed_bytes_per_token: Bytes(0),
        hidden_read_seconds: 0.0,
        terms: vec![TermSeconds { name: "memory bandwidth".to_owned(), seconds: 0.5 }],
        binding: "memory bandwidth".to_owned(),
        calibration: 1.0,
        evidence: Vec::new(),
    }
}

/// 100 steps of 1,000 accesses each, as predicted: 400 misses a token of 10 MB each.
fn phase(tokens: usize, speed: f64, misses_per_token: u64) -> PhaseReport {
    let accesses = AccessCounts {
        cache_hits: tokens as u64 * (1000 - misses_per_token),
        misses: tokens as u64 * misses_per_token,
        ..AccessCounts::default()
    };
    let bytes = accesses.misses * 10_000_000;
    let experts = ReadReport {
        bytes: Bytes(bytes),
        reads: accesses.misses,
        seconds: bytes as f64 / 2e9,
        busy_seconds: bytes as f64 / 2e9,
        bytes_per_s: Some(2e9),
    };
    PhaseReport {
        tokens,
        seconds: tokens as f64 / speed,
        tokens_per_s: Some(speed),
        accesses,
        hit_rate: accesses.hit_rate(),
        read: ReadsReport { total: experts, experts, ..ReadsReport::default() },
        window: None,
    }
}

fn report(decode: PhaseReport) -> RunReport {
    RunReport {
        schema_version: 2,
        tokens: Vec::new(),
        ended: Ended::Length,
        load: LoadReport { seconds: 1.0, read: ReadsReport::default() },
        prefill: phase(8, 4.0, 400),
        decode,
        first_token_seconds: Some(2.0),
        decode_ms_p50: None,
        decode_ms_p95: None,
        experts: ExpertsReport::default(),
        layers: Vec::new(),
        traffic: TrafficReport { disk_bytes_per_s: Some(2e9), ..TrafficReport::default() },
        context: 4096,
        budget_bytes: Bytes(20 * GB),
        footprint: FootprintReport::new(Bytes(19 * GB), Some(Bytes(19 * GB)), Bytes(0)),
        ledger: Vec::new(),
        read_retries: 0,
        replaced_shards: Vec::new(),
        comparisons: Vec::new(),
        not_judged: None,
        profile: None,
        warnings: Vec::new(),
    }
}

fn judged(mut report: RunReport, memory: MemorySeen) -> RunReport {
    report.judge(&prediction(), memory);
    report
}

fn ids(report: &RunReport) -> Vec<&str> {
    report.warnings.iter().map(|warning| warning.id.as_str()).collect()
}

#[test]
fn what_is_as_predicted_is_no_reason_for_a_warning() {
    // The ends of the ranges and a tenth beyond them are as predicted.
    for (speed, misses) in [(2.0, 400), (1.63, 300), (2.41, 500), (2.0, 548), (2.0, 271)] {
        let report = judged(report(phase(100, speed, misses)), MemorySeen::default());
        assert_eq!(ids(&report), [""; 0], "{speed}, {misses}: {:?}", report.warnings);
        assert_eq!(report.not_judged, None);
    }
}

#[test]
fn each_figure_that_differs_by_more_than_a_tenth_is_a_warning() {
    let cases: [(f64, u64, &[&str]); 4] = [
        (1.61, 400, &["speed.decode"]),
        (2.43, 400, &["speed.decode"]),
        // 0.43 hits of 0.5 to 0.7; 5.7 GB of 3 to 5.
        (2.0, 570, &["hits.decode", "read.experts"]),
        (2.0, 200, &["hits.decode", "read.experts"]),
    ];
    for (speed, misses, expected) in cases {
        let report = judged(report(phase(100, speed, misses)), MemorySeen::default());
        assert_eq!(ids(&report), expected, "{speed}, {misses}: {:?}", report.warnings);
        for warning in &report.warnings {
            let told = [&warning.finding, &warning.meaning, &warning.remedy];
            assert!(told.iter().all(|text| !text.is_empty()), "{warning:?}");
        }
    }
    let mut streams = report(phase(100, 2.0, 400));
    streams.decode.read.dense.bytes = Bytes(100 * GB);
    assert_eq!(ids(&judged(streams, MemorySeen::default())), ["read.dense"]);
}

#[test]
fn a_slow_disk_is_named_as_the_reason() {
    let mut slow = report(phase(100, 1.0, 400));
    slow.decode.read.experts.bytes_per_s = Some(0.5e9);
    let report = judged(slow, MemorySeen::default());
    let meaning = &report.warnings[0].meaning;
    assert_eq!(meaning, "reads of experts came at 500 MB/s, the plan reckons with 2.0 GB/s");
}

#[test]
fn a_run_too_short_or_too_cold_is_not_judged() {
    let short = judged(report(phase(15, 0.1, 1000)), MemorySeen::default());
    assert_eq!(ids(&short), [""; 0]);
    assert!(short.not_judged.unwrap().contains("15 decode steps, fewer than 16"));
    let mut cold = report(phase(16, 0.1, 1000));
    cold.experts.cold_misses_in_decode = 1_601;
    let cold = judged(cold, MemorySeen::default());
    assert_eq!(ids(&cold), [""; 0]);
    assert!(cold.not_judged.unwrap().contains("10 % of the accesses"));
    let mut warm = report(phase(16, 0.1, 1000));
    warm.experts.cold_misses_in_decode = 1_600;
    assert_eq!(ids(&judged(warm, MemorySeen::default())).len(), 3);
}

#[test]
fn memory_is_judged_however_short_the_run() {
    let short = || report(phase(1, 1.0, 0));
    let memory = MemorySeen { peak: Some(Bytes(20 * GB + 1)), ..MemorySeen::default() };
    assert_eq!(ids(&judged(short(), memory)), ["memory.over_budget"]);
    let mut far = short();
    far.footprint = FootprintReport::new(Bytes(10 * GB), Some(Bytes(12 * GB)), Bytes(0));
    assert_eq!(ids(&judged(far, MemorySeen::default())), ["memory.footprint"]);
    let mut lines = short();
    let line = |line, planned_bytes, actual| LineReport {
        line,
        planned_bytes: Bytes(planned_bytes),
        actual_bytes: Some(Bytes(actual)),
        source: String::new(),
    };
    lines.ledger = vec![
        line(Line::KvCache, GB, GB + 1),
        line(Line::IoBuffers, 0, 64),
        line(Line::DenseWeights, GB, GB),
        // A process is as coarse as its pages: 16 MB over are none of the ledger's doing.
        line(Line::Runtime, 20_000_000, 36_000_000),
    ];
    assert_eq!(
        ids(&judged(lines, MemorySeen::default())),
        ["ledger.kv_cache", "ledger.io_buffers"]
    );
    let mut runtime = short();
    runtime.ledger = vec![line(Line::Runtime, 20_000_000, 37_000_000)];
    assert_eq!(ids(&judged(runtime, MemorySeen::default())), ["ledger.runtime"]);
}

#[test]
fn what_the_files_did_is_told() {
    let mut files = report(phase(1, 1.0, 0));
    files.read_retries = 2;
    files.replaced_shards = ["a.safetensors", "b.safetensors"].map(Into::into).into();
    let files = judged(files, MemorySeen::default());
    assert_eq!(ids(&files), ["disk.retries", "model.replaced"]);
    assert!(files.warnings[1].finding.starts_with("a.safetensors and 1 other file of the model"));
}

#[test]
fn a_footprint_is_within_the_larger_of_two_per_cent_and_16_mb() {
    let verdict = |planned, actual, untouched| {
        FootprintReport::new(Bytes(planned), Some(Bytes(actual)), Bytes(untouched)).verdict
    };
    let small = 100_000_000;
    assert_eq!(verdict(small, small + 16_000_000, 0), Verdict::AsPredicted);
    assert_eq!(verdict(small, small + 16_000_001, 0), Verdict::Above);
    assert_eq!(verdict(small, small - 16_000_001, 0), Verdict::Below);
    assert_eq!(verdict(small, small - 16_000_001, 1), Verdict::AsPredicted);
    let large = 20 * GB;
    assert_eq!(verdict(large, large + 400_000_000, 0), Verdict::AsPredicted);
    assert_eq!(verdict(large, large + 400_000_001, 0), Verdict::Above);
    assert_eq!(FootprintReport::new(Bytes(1), None, Bytes(0)).verdict, Verdict::Unknown);
}

#[test]
fn the_runtime_line_is_what_is_held_besides() {
    let seen = |before: u64, peak: u64| MemorySeen {
        before_loading: Some(Bytes(before)),
        peak: Some(Bytes(peak)),
        ..MemorySeen::default()
    };
    assert_eq!(runtime(Bytes(100), seen(10, 130)), Some(Bytes(30)));
    // Not everything that is bound has been touched.
    assert_eq!(runtime(Bytes(100), seen(10, 70)), Some(Bytes(10)));
    assert_eq!(runtime(Bytes(100), MemorySeen::default()), None);
}
