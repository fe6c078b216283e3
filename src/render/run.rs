//! The closing report of a run.

use serde_json::{Value, json};
use tierkeep_doctor::Fact;
use tierkeep_engine::AccessCounts;
use tierkeep_engine::report::{PhaseReport, RunReport};
use tierkeep_plans::units::Bytes;

use super::{Style, count, percent, plural, speed};
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
        count(counts.accesses())
    )
}

/// The report, after the answer.
pub(crate) fn run_report(report: &RunReport, memory: &Memory, style: Style) -> String {
    let RunReport { prefill, decode, .. } = report;
    let mut text = String::new();
    let mut line = |label: &str, said: &str| text += &style.paragraph(label, said);
    let tokens = |n: usize| plural(n as u64, "token", "tokens");
    line(
        "prefill   ",
        &format!(
            "{} in {:.3} s, {}; union of experts: {}",
            tokens(prefill.tokens),
            prefill.seconds,
            rate(prefill.tokens_per_s),
            tiers(&prefill.accesses)
        ),
    );
    let steps = match (report.decode_ms_p50, report.decode_ms_p95) {
        (Some(p50), Some(p95)) => format!(", p50 {p50:.2} ms, p95 {p95:.2} ms"),
        _ => String::new(),
    };
    let rate_of_decode = rate(decode.tokens_per_s);
    line(
        "decode    ",
        &format!("{} in {:.3} s, {rate_of_decode}{steps}", tokens(decode.tokens), decode.seconds),
    );
    line("hits      ", &hits(decode));
    line(
        "read      ",
        &format!(
            "{} loading, {} in prefill, {} in decode",
            report.load_read_bytes, prefill.read_bytes, decode.read_bytes
        ),
    );
    let group = memory.group_peak_bytes.value();
    let group = group.map_or_else(String::new, |&b| format!(", peak of the group {}", Bytes(b)));
    line(
        "memory    ",
        &format!(
            "footprint {} of {} planned, peak resident {}{group}; budget {}",
            known(&memory.footprint_bytes),
            report.planned_footprint_bytes,
            known(&memory.peak_rss_bytes),
            report.budget_bytes
        ),
    );
    let predicted = report.predicted_tokens_per_s;
    line(
        "expected  ",
        &format!(
            "{} tokens/s ({} to {}), hit rate {}; got {rate_of_decode}, {}",
            speed(predicted.p50),
            speed(predicted.p10),
            speed(predicted.p90),
            percent(report.predicted_hit_rate.p50),
            decode.hit_rate.map_or_else(|| "-".to_owned(), percent)
        ),
    );
    text
}

fn hits(decode: &PhaseReport) -> String {
    match decode.hit_rate {
        Some(rate) => format!("{} in decode: {}", percent(rate), tiers(&decode.accesses)),
        None => "no routed expert was asked for in decode".to_owned(),
    }
}

/// What differs from the plan by more than a tenth.
pub(crate) fn run_warnings(report: &RunReport, memory: &Memory) -> Vec<String> {
    let mut warnings = Vec::new();
    let mut warn = |text: String| warnings.push(text);
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
                "{} bytes bound for \"{}\", {} planned: please report this",
                count(bound.0),
                line.line,
                count(line.planned_bytes.0)
            ));
        }
    }
    let predicted = report.predicted_tokens_per_s;
    if let Some(actual) = report.decode.tokens_per_s
        && (actual < predicted.p10 * (1.0 - TOLERANCE)
            || actual > predicted.p90 * (1.0 + TOLERANCE))
    {
        warn(format!(
            "{} tokens/s is outside the predicted {} to {}; a plan learns from runs that are recorded",
            speed(actual),
            speed(predicted.p10),
            speed(predicted.p90)
        ));
    }
    if report.read_retries > 0 {
        warn(format!(
            "the disk failed {} and gave the bytes when asked again: look at its health",
            plural(report.read_retries, "time", "times")
        ));
    }
    if let Some(first) = report.replaced_shards.first() {
        let more = match report.replaced_shards.len() as u64 - 1 {
            0 => String::new(),
            n => format!(" and {} of the model", plural(n, "other file", "other files")),
        };
        warn(format!(
            "{}{more} was replaced or removed during the run: what is above is of the model as it \
             was when the run began",
            first.display()
        ));
    }
    warnings
}

/// The report as JSON.
pub(crate) fn run_json(report: &RunReport, memory: &Memory, text: Option<&str>) -> Value {
    json!({ "text": text, "report": report, "memory": memory })
}
