//! What a person sees of `bench`, and what programs read. Every figure is written here.
#![allow(clippy::unwrap_used, reason = "a test stops where something is wrong")]

use std::time::Duration;

use tierkeep_engine::bench::products::{Product, ProductNumerics, ProductSpeed};
use tierkeep_engine::bench::statistics::Repeats;
use tierkeep_engine::bench::summary::{Circumstances, Held, Summary};
use tierkeep_engine::bench::{Distinct, Sample, TouchedBytes, Work};
use tierkeep_engine::{AccessCounts, ReadCounts, Reads};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

use super::*;
use crate::args::Sweep;
use crate::render::testing::{machine, nano, snapshot};

const WORK: Work = Work { context: 512, prompt: 128, decode: 4 };

fn planned(model: &Catalogue, megabytes: u64) -> Plan {
    let ram = Some(SizeRequest::Absolute(Bytes(megabytes * 1_000_000)));
    // Reads by the threads that compute, so that no other thread takes of the budget.
    let options = Options { ram, context: Some(600), io_depth: Some(0), ..Options::default() };
    planner::plan(model, &machine(), &options, None).unwrap()
}

/// A repeat whose steps take `ms` each, the last one twice as long, with `misses` of 96 accesses and `used` of 32
/// experts in each layer.
fn sample(ms: u64, misses: u64, used: u32) -> Sample {
    let step = Duration::from_millis(ms);
    let distinct = Distinct { least: used, median: used, of: 32, share: f64::from(used) / 32.0 };
    let experts = {
        let time = Duration::from_millis(misses);
        Reads { bytes: misses * 100_000, reads: misses, time, busy: time }
    };
    Sample {
        work: WORK,
        fill: Duration::from_secs(4),
        prefill: Duration::from_secs(2),
        steps: vec![step, step, step, step * 2],
        prefill_accesses: AccessCounts::default(),
        accesses: AccessCounts { pinned_hits: 24, cache_hits: 72 - misses, misses },
        prefill_reads: ReadCounts::default(),
        reads: ReadCounts { experts, busy: experts.busy, ..ReadCounts::default() },
        distinct,
        distinct_in_decode: Distinct { share: distinct.share / 2.0, ..distinct },
    }
}

fn summary(plan: &Plan, samples: &[Sample]) -> Summary {
    let touched = TouchedBytes { weights: Bytes(9_000_000), caches: Bytes(1_000_000) };
    let held = Held {
        footprint_bytes: Some(Bytes(17_500_000)),
        peak_bytes: Some(Bytes(19_250_000)),
        is_peak_own: true,
        budget_bytes: plan.request.budget_bytes,
    };
    let memory_bytes_per_s = Some(25e9);
    let at = Circumstances { plan, touched, memory_bytes_per_s, held, is_synthetic: true };
    Summary::of(WORK, samples, at)
}

fn bandwidth() -> Bandwidth {
    Bandwidth { figures: vec![24e9, 25e9, 22.5e9], unknown: None }
}

/// Three budgets, the least of them of a run that used too few experts.
fn with_view(test: impl Fn(&BenchView<'_>)) {
    let model = nano();
    let plans = [23, 26, 32].map(|megabytes| planned(&model, megabytes));
    let samples = [
        vec![sample(4, 48, 20), sample(5, 48, 24), sample(6, 40, 28)],
        vec![sample(2, 24, 32), sample(2, 20, 32), sample(3, 24, 30)],
        vec![sample(1, 0, 32), sample(1, 0, 32), sample(1, 0, 32)],
    ];
    let labels = ["ram=23.00 MB", "ram=26.00 MB", "ram=32.00 MB"];
    let rows: Vec<BenchRow<'_>> = plans
        .iter()
        .zip(&samples)
        .enumerate()
        .map(|(at, (plan, samples))| BenchRow {
            name: ["A", "B", "C"][at],
            label: labels[at],
            value: Some(plan.request.budget_bytes.as_f64()),
            model: &model,
            plan,
            summary: summary(plan, samples),
        })
        .collect();
    let bandwidth = bandwidth();
    test(&BenchView {
        rows: &rows,
        bandwidth: &bandwidth,
        stream: "uniformly random token ids, seed 0",
        rounds: 3,
        warm_up: 4,
        is_kept: false,
        usage: None,
        interrupted: false,
    });
}

#[test]
fn bench_views() {
    with_view(|view| snapshot("bench", |style| bench(view, style)));
    with_view(|view| {
        let rows = &view.rows[2..];
        let bandwidth = Bandwidth { figures: Vec::new(), unknown: None };
        let usage = Some(Path::new("/history"));
        let view = BenchView {
            rows,
            bandwidth: &bandwidth,
            is_kept: true,
            rounds: 1,
            usage,
            interrupted: true,
            ..*view
        };
        snapshot("bench-interrupted", |style| bench(&view, style));
    });
}

#[test]
fn figures_are_those_of_the_samples() {
    let model = nano();
    let plan = planned(&model, 26);
    let samples = [sample(4, 48, 20), sample(5, 48, 24), sample(6, 40, 28)];
    let summary = summary(&plan, &samples);
    // 4 steps in 20, 25 and 30 ms.
    let decode = summary.decode_tokens_per_s.clone().unwrap();
    assert!((decode.median - 160.0).abs() < 1e-9 && (decode.most - 200.0).abs() < 1e-9);
    // Steps of all rounds: 4 4 4 5 5 5 6 6 6 8 10 12.
    assert_eq!((summary.decode_ms_p50, summary.decode_ms_p95), (Some(5.0), Some(12.0)));
    // 10 MB a token at 160 tokens/s, of 25 GB/s.
    assert!((summary.touched_bytes_per_s.unwrap() - 1.6e9).abs() < 1.0);
    assert!((summary.memory_share.unwrap() - 0.064).abs() < 1e-9);
    // 48, 48 and 40 misses of 100 kB over 4 tokens, each read taking 1 ms.
    assert_eq!(summary.read_bytes_per_token, 1_200_000.0);
    assert!((summary.read_bytes_per_s.unwrap() - 1e8).abs() < 1.0);
    // 10 MB at 25 GB/s are 0.4 ms, 1.2 MB at the disk's 2.5 GB/s 0.48 ms.
    assert!((summary.limit_tokens_per_s.unwrap() - 1000.0 / 0.88).abs() < 1e-6);
    assert!((summary.limit_share.unwrap() - 160.0 * 0.88e-3).abs() < 1e-9);
    assert_eq!(summary.hit_rate, Some((288.0 - 136.0) / 288.0));
    // The repeat with the fewest: 20 of 32 is under 80 %.
    assert_eq!((summary.distinct.least, summary.is_void), (20, true));
    let enough = [sample(4, 0, 26)];
    assert!(!self::summary(&plan, &enough).is_void, "26 of 32 are 81 %");
    assert_eq!(summary.fill_tokens_per_s.unwrap().median, 96.0);
    assert_eq!(summary.prefill_tokens_per_s.unwrap().median, 64.0);
}

#[test]
fn rows_for_programs_have_a_field_for_each_column() {
    with_view(|view| {
        let csv = bench_csv(view, 1_800_000_000);
        let columns = BENCH_CSV_HEADER.split(',').count();
        assert_eq!(csv.lines().count(), 3);
        for line in csv.lines() {
            // The one field with a comma stands in quotes.
            let outside: Vec<&str> = line.split('"').step_by(2).collect();
            let commas: usize = outside.iter().map(|part| part.matches(',').count()).sum();
            assert_eq!(commas + 1, columns, "{line}");
        }
        assert!(
            csv.lines().next().unwrap().contains(",true,") && csv.contains("2027-01-15 08:00 UTC")
        );
        let json = bench_json(view);
        assert_eq!(json["rows"][0]["figures"]["is_void"], true);
        assert_eq!(json["rows"][2]["swept_value"], 32e6);
        assert_eq!(json["memory"]["bytes_per_s"], 25e9);
    });
}

#[test]
fn a_curve_ascends_and_is_the_same_each_time() {
    with_view(|view| {
        let backwards: Vec<BenchRow<'_>> = view.rows.iter().rev().cloned().collect();
        let svg = CurveView::of(Sweep::Ram, view).svg();
        let other = CurveView::of(Sweep::Ram, &BenchView { rows: &backwards, ..*view }).svg();
        assert_eq!(svg, other);
        let at: Vec<f64> = svg
            .lines()
            .filter(|line| line.starts_with("<circle"))
            .map(|line| line.split('"').nth(3).unwrap().parse().unwrap())
            .collect();
        assert_eq!(at.len(), 3);
        assert!(at.is_sorted() && at[0] < at[2], "{at:?}");
        insta::with_settings!({ prepend_module_to_snapshot => false, omit_expression => true,
            snapshot_path => "../snapshots" }, {
            insta::assert_snapshot!("bench-curve", svg);
        });
        // One point alone, and none.
        for rows in [&view.rows[..1], &[]] {
            let svg = CurveView::of(Sweep::Context, &BenchView { rows, ..*view }).svg();
            assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
        }
    });
}

fn speeds() -> Vec<ProductSpeed> {
    let product = Product {
        element: "int4-g64-f16".to_owned(),
        rows: 1024,
        cols: 2048,
        batch: 1,
        numerics: ProductNumerics::Fast,
        isa: "avx512".to_owned(),
        threads: 2,
    };
    // 1 MiB of nibbles and 64 KiB of scales.
    let bytes = (1 << 20) + (1 << 16);
    let speed = |product: &Product, seconds: [f64; 3]| ProductSpeed {
        product: product.clone(),
        copies: 200,
        bytes: bytes * 200,
        seconds: Repeats::of(seconds).unwrap(),
    };
    let batch = Product { batch: 8, ..product.clone() };
    vec![speed(&product, [50e-6, 52e-6, 49e-6]), speed(&batch, [100e-6, 100e-6, 110e-6])]
}

#[test]
fn kernel_views() {
    let (speeds, bandwidth) = (speeds(), bandwidth());
    let view = KernelView {
        speeds: &speeds,
        is_resident: false,
        passes: 3,
        bandwidth: &bandwidth,
        interrupted: false,
    };
    snapshot("bench-kernels", |style| kernels(&view, style));
    let json = kernels_json(&view);
    // 2,097,152 weights in 50 us; 1,114,112 bytes.
    let close =
        |value: &serde_json::Value, to: f64| (value.as_f64().unwrap() / to - 1.0).abs() < 1e-9;
    assert!(close(&json["products"][0]["weights_per_s"], 41.943_04e9), "{json}");
    assert!(close(&json["products"][0]["memory_share"], 22.282_24 / 25.0), "{json}");
    let csv = kernels_csv(&view, 0);
    assert_eq!(
        csv.lines().next().unwrap().split(',').count(),
        KERNELS_CSV_HEADER.split(',').count()
    );
    let resident = KernelView { is_resident: true, ..view };
    assert!(kernels_json(&resident)["products"][0]["memory_share"].is_null());
}
