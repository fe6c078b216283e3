//! The closing report of a run.

use std::time::Duration;

use serde_json::{Value, json};
use tierkeep_doctor::Fact;
use tierkeep_engine::AccessCounts;
use tierkeep_engine::generate::Ended;
use tierkeep_engine::report::{
    Comparison, Figure, LayerReport, ReadsReport, RunReport, Verdict, WindowReport,
};
use tierkeep_plans::plan::Range;
use tierkeep_plans::units::{Bytes, Rate};

use super::style::Tone;
use super::{Style, count, percent, plural, seconds, speed, table};
use crate::commands::memory::Memory;

/// What stands where there is no figure.
const NONE: &str = "-";

fn rate(tokens_per_s: Option<f64>) -> String {
    tokens_per_s.map_or_else(|| NONE.to_owned(), |s| format!("{} tokens/s", speed(s)))
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

fn tokens(number: usize) -> String {
    plural(number as u64, "token", "tokens")
}

/// The report, after the answer; `all_layers` adds a table of every layer.
pub(crate) fn run_report(
    report: &RunReport,
    memory: &Memory,
    all_layers: bool,
    style: Style,
) -> String {
    let mut text = String::new();
    let mut line = |label: &str, said: &str| {
        text += &style.paragraph(&format!("{label:10}"), said);
    };
    line("ended", &ended(report));
    line("load", &format!("{}; read {}", seconds(report.load.seconds), reads(&report.load.read)));
    line("prefill", &prefill(report));
    line("decode", &decode(report));
    line("hits", &hits(report));
    line("experts", &experts(report));
    line("read", &format!("{}; {}", decode_reads(report), fetched(memory)));
    if let Some(window) = &report.decode.window {
        line("hidden", &hidden(window));
    }
    line("weights", &weights(report));
    line("memory", &memory_line(report, memory));
    text.push('\n');
    text += &ledger(report, style);
    text.push('\n');
    text += &comparisons(report, style);
    if let Some(profile) = &report.profile {
        text.push('\n');
        text += &super::profile::stages(profile, style);
    }
    if all_layers {
        text.push('\n');
        text += &layers(&report.layers, style);
    }
    text
}

fn ended(report: &RunReport) -> String {
    match report.ended {
        Ended::StopToken => "the model said that it is done".to_owned(),
        Ended::Length => {
            let number = report.tokens.len();
            let verb = if number == 1 { "was" } else { "were" };
            format!("{} {verb} asked for (-n)", tokens(number))
        }
        Ended::ContextFull => {
            let context = report.context;
            let twice = context.saturating_mul(2);
            format!(
                "the planned context of {context} tokens is full: plan with --ctx {twice} for more"
            )
        }
        Ended::Interrupted => {
            "interrupted; what was not finished of a token was dropped".to_owned()
        }
    }
}

/// Bytes, how many reads, how fast.
fn reads(read: &ReadsReport) -> String {
    let total = read.total;
    if total.reads == 0 {
        return "nothing".to_owned();
    }
    let speed = total.bytes_per_s.map_or_else(String::new, |speed| format!(" at {}", Rate(speed)));
    format!("{} in {}{speed}", total.bytes, plural(total.reads, "read", "reads"))
}

fn prefill(report: &RunReport) -> String {
    let phase = &report.prefill;
    let first = report.first_token_seconds.map_or_else(String::new, |time| {
        let with_loading = time + report.load.seconds;
        let with_loading = seconds(with_loading);
        format!("; first token after {}, with loading {with_loading}", seconds(time))
    });
    format!(
        "{} in {}, {}{first}; union of experts: {}; read {}",
        tokens(phase.tokens),
        seconds(phase.seconds),
        rate(phase.tokens_per_s),
        tiers(&phase.accesses),
        reads(&phase.read)
    )
}

fn decode(report: &RunReport) -> String {
    let phase = &report.decode;
    let steps = match (report.decode_ms_p50, report.decode_ms_p95) {
        (Some(p50), Some(p95)) => format!("; a step p50 {p50:.2} ms, p95 {p95:.2} ms"),
        _ => String::new(),
    };
    let speed = rate(phase.tokens_per_s);
    format!("{} in {}, {speed}{steps}", tokens(phase.tokens), seconds(phase.seconds))
}

fn hits(report: &RunReport) -> String {
    let decode = &report.decode;
    let Some(hit_rate) = decode.hit_rate else {
        return "no routed expert was asked for in decode".to_owned();
    };
    let mut by_rate: Vec<(f64, usize)> =
        report.layers.iter().filter_map(|l| Some((l.decode_hit_rate?, l.layer))).collect();
    by_rate.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let layer = |&(rate, layer): &(f64, usize)| format!("layer {layer} {}", percent(rate));
    let spread = match (by_rate.first(), by_rate.get(by_rate.len() / 2), by_rate.last()) {
        (Some(worst), Some(median), Some(best)) => {
            format!("; worst {}, median {}, best {}", layer(worst), layer(median), layer(best))
        }
        _ => String::new(),
    };
    format!("{} in decode: {}{spread}", percent(hit_rate), tiers(&decode.accesses))
}

fn experts(report: &RunReport) -> String {
    let experts = &report.experts;
    let empty = match experts.empty_slots {
        0 => String::new(),
        empty => format!(", {} of them still empty", count(empty)),
    };
    format!(
        "{} different ones of {} were asked for, {} of them in decode; {}, {} pinned{empty}",
        count(experts.distinct),
        count(experts.total),
        count(experts.distinct_in_decode),
        plural(experts.slots, "slot", "slots"),
        count(experts.pinned)
    )
}

fn decode_reads(report: &RunReport) -> String {
    let read = &report.decode.read;
    let traffic = &report.traffic;
    // Over the time in which any was under way, beside what the plan reckons with.
    let speed = read.experts.bytes_per_s.map_or_else(String::new, |speed| {
        let at_once = match traffic.read_depth {
            0 => "one after another".to_owned(),
            n => format!("{n} at once"),
        };
        let planned = traffic
            .disk_bytes_per_s
            .map_or_else(String::new, |planned| format!(", planned {}", Rate(planned)));
        format!(" at {} ({at_once}{planned})", Rate(speed))
    });
    format!(
        "{} in decode: experts {}{speed}, streamed dense weights {}, embedding rows {}",
        reads(read),
        read.experts.bytes,
        read.dense.bytes,
        read.embedding.bytes
    )
}

/// How much of the time that experts were read others computed.
fn hidden(window: &WindowReport) -> String {
    let per_token = window
        .hidden_seconds_per_token
        .map_or_else(String::new, |time| format!(", {} a token", seconds(time)));
    format!(
        "{} of the {} that experts were read in decode ({}{per_token}): others computed meanwhile; {} were waited \
         for",
        seconds(window.hidden_seconds),
        seconds(window.seconds),
        percent(window.hidden_share),
        seconds(window.waited_seconds)
    )
}

/// The kernel's own count beside the engine's.
fn fetched(memory: &Memory) -> String {
    match memory.fetched_bytes.value() {
        Some(&bytes) => format!("the kernel fetched {} since loading", Bytes(bytes)),
        None => format!("the kernel's own count is unknown ({})", memory.fetched_bytes.detail()),
    }
}

fn weights(report: &RunReport) -> String {
    let traffic = &report.traffic;
    let touched = traffic.touched_bytes_per_token;
    let Some(per_s) = traffic.touched_bytes_per_s else {
        return format!("{touched} are touched by a token");
    };
    let share = match (traffic.share, traffic.memory_bytes_per_s) {
        (Some(share), Some(given)) => {
            format!("{} of {} ({})", percent(share), Rate(given), traffic.memory_source)
        }
        _ => format!("share of the bandwidth of memory unknown ({})", traffic.memory_source),
    };
    format!("{} touched in decode ({touched} a token, computed), {share}", Rate(per_s))
}

fn memory_line(report: &RunReport, memory: &Memory) -> String {
    let footprint = &report.footprint;
    let tolerance = footprint.tolerance_bytes;
    let verdict = match footprint.verdict {
        Verdict::AsPredicted => {
            let less = footprint
                .actual_bytes
                .is_some_and(|actual| actual + tolerance < footprint.planned_bytes);
            if less {
                format!(
                    "as planned: {} of it is not resident, slots not filled yet or mapped pages taken back",
                    footprint.untouched_bytes
                )
            } else {
                format!("as planned, within {tolerance}")
            }
        }
        Verdict::Above => format!("above by more than {tolerance}"),
        Verdict::Below => format!("below by more than {tolerance}"),
        Verdict::Unknown => "not compared".to_owned(),
    };
    let group = memory.group_peak_bytes.value();
    let group = group.map_or_else(String::new, |&b| format!(", peak of the group {}", Bytes(b)));
    format!(
        "footprint {} of {} planned ({verdict}); peak resident {}{group}; budget {}",
        known(&memory.footprint_bytes),
        footprint.planned_bytes,
        known(&memory.peak_rss_bytes),
        report.budget_bytes
    )
}

/// Every line that is planned or held, planned beside actual.
fn ledger(report: &RunReport, style: Style) -> String {
    let mut rows = table::table(style, &["ledger", "planned", "actual", "how it is known"]);
    for line in &report.ledger {
        if line.planned_bytes == Bytes(0) && line.actual_bytes.is_none_or(|b| b == Bytes(0)) {
            continue;
        }
        let actual = line.actual_bytes.map_or_else(|| NONE.to_owned(), |bytes| bytes.to_string());
        rows.add_row([
            line.line.name().to_owned(),
            line.planned_bytes.to_string(),
            actual,
            line.source.clone(),
        ]);
    }
    table::whole(&mut rows, 0);
    table::right(&mut rows, 1);
    table::right(&mut rows, 2);
    table::text(&rows)
}

/// Predicted beside actual.
fn comparisons(report: &RunReport, style: Style) -> String {
    let mut rows = table::table(style, &["expected", "predicted", "actual", ""]);
    for comparison in &report.comparisons {
        let name = match comparison.figure {
            Figure::DecodeTokensPerS => "tokens/s in decode",
            Figure::HitRate => "hit rate in decode",
            Figure::ReadBytesPerToken => "experts read for a token",
            Figure::StreamedBytesPerToken => "dense weights read for a token",
        };
        let shown = |value: f64| figure(comparison.figure, value);
        let Range { p10, p50, p90 } = comparison.predicted;
        let predicted = if p10 < p90 {
            format!("{} ({} to {})", shown(p50), shown(p10), shown(p90))
        } else {
            shown(p50)
        };
        let actual = comparison.actual.map_or_else(|| NONE.to_owned(), shown);
        rows.add_row(vec![
            Tone::Plain.cell(name),
            Tone::Plain.cell(predicted),
            Tone::Plain.cell(actual),
            verdict(comparison, report.not_judged.is_some()),
        ]);
    }
    for column in 0..3 {
        table::whole(&mut rows, column);
    }
    table::right(&mut rows, 2);
    let mut text = table::text(&rows);
    if let Some(reason) = &report.not_judged {
        text += &style.paragraph("", reason);
    }
    text
}

fn verdict(comparison: &Comparison, is_too_short: bool) -> comfy_table::Cell {
    if is_too_short {
        return Tone::Plain.cell("not judged");
    }
    match comparison.verdict {
        Verdict::AsPredicted => Tone::Ok.cell("as predicted"),
        Verdict::Below => Tone::Warn.cell("below"),
        Verdict::Above => Tone::Warn.cell("above"),
        Verdict::Unknown => Tone::Plain.cell("unknown"),
    }
}

fn figure(figure: Figure, value: f64) -> String {
    match figure {
        Figure::DecodeTokensPerS => speed(value),
        Figure::HitRate => percent(value),
        Figure::ReadBytesPerToken | Figure::StreamedBytesPerToken => {
            Bytes(value as u64).to_string()
        }
    }
}

/// Every layer that routes.
fn layers(layers: &[LayerReport], style: Style) -> String {
    let header = ["layer", "hit rate", "accesses", "pinned", "cache", "disk", "slots", "different"];
    let mut rows = table::table(style, &header);
    for layer in layers {
        let decode = &layer.decode;
        rows.add_row([
            layer.layer.to_string(),
            layer.decode_hit_rate.map_or_else(|| NONE.to_owned(), percent),
            count(decode.accesses()),
            count(decode.pinned_hits),
            count(decode.cache_hits),
            count(decode.misses),
            layer.slots.to_string(),
            layer.distinct.to_string(),
        ]);
    }
    for column in 0..header.len() {
        table::right(&mut rows, column);
    }
    table::text(&rows)
}

/// How a plan that was made for one run is kept.
pub(crate) fn keep_the_plan(command: &str, style: Style) -> String {
    style.paragraph("to keep this plan: ", command)
}

/// What stands before the bar of a token that is being generated, after `done` others.
pub(crate) fn progress_of_tokens(done: u64, since_first: Duration) -> String {
    let time = since_first.as_secs_f64();
    let speed = if done > 0 && time > 0.0 {
        format!(", {} tokens/s", speed(done as f64 / time))
    } else {
        String::new()
    };
    format!("token {}{speed}, layer", done + 1)
}

/// The report as JSON.
pub(crate) fn run_json(report: &RunReport, memory: &Memory, text: Option<&str>) -> Value {
    json!({
        "schema_version": report.schema_version, "text": text, "report": report, "memory": memory,
    })
}
