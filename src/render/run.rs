//! The closing report of a run.

use std::fmt::Write as _;

use serde_json::{Value, json};
use tierkeep_doctor::Fact;
use tierkeep_engine::AccessCounts;
use tierkeep_engine::report::{PhaseReport, RunReport};
use tierkeep_plans::units::Bytes;

use super::{note, percent, speed, warning};
use crate::commands::memory::Memory;

/// Share by which actual may differ from predicted before it is a warning.
const TOLERANCE: f64 = 0.10;

fn rate(tokens_per_s: Option<f64>) -> String {
    tokens_per_s.map_or_else(|| "-".to_owned(), |s| format!("{} tokens/s", speed(s)))
}

fn known(fact: &Fact<u64>) -> String {
    match fact.value() {
        Some(&bytes) => Bytes(bytes).to_string(),
        None => format!("unknown ({})", fact.detail()),
    }
}

fn tiers(counts: &AccessCounts) -> String {
    let all = counts.accesses().max(1) as f64;
    let share = |n: u64| percent(n as f64 / all);
    format!(
        "pinned {}, cache {}, disk {} of {} accesses",
        share(counts.pinned_hits),
        share(counts.cache_hits),
        share(counts.misses),
        counts.accesses()
    )
}

/// The report on standard error, after the answer.
pub(crate) fn run_report(report: &RunReport, memory: &Memory) {
    let RunReport { prefill, decode, .. } = report;
    let mut text = String::new();
    let _ = writeln!(
        text,
        "\nprefill   {} tokens in {:.3} s, {}; union of experts: {}",
        prefill.tokens,
        prefill.seconds,
        rate(prefill.tokens_per_s),
        tiers(&prefill.accesses)
    );
    let steps = match (report.decode_ms_p50, report.decode_ms_p95) {
        (Some(p50), Some(p95)) => format!(", p50 {p50:.2} ms, p95 {p95:.2} ms"),
        _ => String::new(),
    };
    let _ = writeln!(
        text,
        "decode    {} tokens in {:.3} s, {}{steps}",
        decode.tokens,
        decode.seconds,
        rate(decode.tokens_per_s)
    );
    let _ = writeln!(text, "hits      {}", hits(decode));
    let _ = writeln!(
        text,
        "read      {} loading, {} in prefill, {} in decode",
        report.load_read_bytes, prefill.read_bytes, decode.read_bytes
    );
    let _ = writeln!(
        text,
        "memory    footprint {} of {} planned, peak resident {}{}; budget {}",
        known(&memory.footprint_bytes),
        report.planned_footprint_bytes,
        known(&memory.peak_rss_bytes),
        memory
            .group_peak_bytes
            .value()
            .map_or_else(String::new, |&b| format!(", peak of the group {}", Bytes(b))),
        report.budget_bytes
    );
    let predicted = report.predicted_tokens_per_s;
    let _ = write!(
        text,
        "expected  {} tokens/s ({} to {}), hit rate {}; got {}, {}",
        speed(predicted.p50),
        speed(predicted.p10),
        speed(predicted.p90),
        percent(report.predicted_hit_rate.p50),
        rate(decode.tokens_per_s),
        decode.hit_rate.map_or_else(|| "-".to_owned(), percent)
    );
    note(&text);
}

fn hits(decode: &PhaseReport) -> String {
    match decode.hit_rate {
        Some(rate) => format!("{} in decode: {}", percent(rate), tiers(&decode.accesses)),
        None => "no routed expert was asked for in decode".to_owned(),
    }
}

/// Warns of what differs from the plan by more than a tenth; returns whether anything does.
pub(crate) fn run_warnings(report: &RunReport, memory: &Memory) -> bool {
    let mut any = false;
    let mut warn = |text: String| {
        any = true;
        warning(&text);
    };
    if memory.is_over(report.budget_bytes) {
        warn(format!(
            "peak resident memory of {} is over the budget of {}: please report this",
            known(&memory.peak_rss_bytes),
            report.budget_bytes
        ));
    }
    for line in &report.ledger {
        if let Some(bound) = line.bound_bytes
            && bound != line.planned_bytes
        {
            warn(format!(
                "{} bound for \"{}\", {} planned: please report this",
                bound, line.line, line.planned_bytes
            ));
        }
    }
    let predicted = report.predicted_tokens_per_s;
    if let Some(actual) = report.decode.tokens_per_s
        && (actual < predicted.p10 * (1.0 - TOLERANCE)
            || actual > predicted.p90 * (1.0 + TOLERANCE))
    {
        warn(format!(
            "{} tokens/s is outside the predicted {} to {}; the next plan learns from it",
            speed(actual),
            speed(predicted.p10),
            speed(predicted.p90)
        ));
    }
    any
}

/// The report as JSON.
pub(crate) fn run_json(report: &RunReport, memory: &Memory, text: Option<&str>) -> Value {
    json!({ "text": text, "report": report, "memory": memory })
}
