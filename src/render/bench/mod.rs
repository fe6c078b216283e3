//! What `bench` shows: tables of speed, traffic, experts, predictions and memory. `rows` owns JSON and CSV,
//! `products` single products, `curve` the drawing.

mod curve;
mod products;
mod rows;
#[cfg(test)]
mod tests;

use std::path::Path;

use tierkeep_doctor::Fact;
use tierkeep_engine::bench::LEAST_SHARE_OF_EXPERTS;
use tierkeep_engine::bench::statistics::Repeats;
use tierkeep_engine::bench::summary::Summary;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::units::{Bytes, Rate};

pub(crate) use self::curve::CurveView;
pub(crate) use self::products::{
    KERNELS_CSV_HEADER, KernelView, kernels, kernels_csv, kernels_json,
};
pub(crate) use self::rows::{BENCH_CSV_HEADER, bench_csv, bench_json};
use super::style::Tone;
use super::{Style, percent, plural, speed, table};

/// What stands where there is no figure.
const NONE: &str = "-";

/// The memory's bandwidth, timed several times.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Bandwidth {
    /// Bytes per second, in the order of the timings.
    pub(crate) figures: Vec<f64>,
    /// Why there is none, of the last timing that gave none.
    pub(crate) unknown: Option<String>,
}

impl Bandwidth {
    pub(crate) fn add(&mut self, fact: &Fact<f64>) {
        match fact.value() {
            Some(&figure) if figure > 0.0 => self.figures.push(figure),
            _ => self.unknown = Some(fact.detail().to_owned()),
        }
    }

    /// The largest: what the memory can give, whatever else went on at other times.
    pub(crate) fn largest(&self) -> Option<f64> {
        self.figures.iter().copied().max_by(f64::total_cmp)
    }

    fn said(&self) -> String {
        let Some(repeats) = Repeats::of(self.figures.iter().copied()) else {
            let reason = self.unknown.as_deref().unwrap_or("--no-measure");
            return format!("the bandwidth of memory is unknown ({reason})");
        };
        format!(
            "memory read {} at best, measured in this run by a process beside it {} (least {}): that is what \
             shares are of",
            Rate(repeats.most),
            if repeats.count == 1 { "once".to_owned() } else { format!("{} times", repeats.count) },
            Rate(repeats.least),
        )
    }
}

/// A configuration at one context.
#[derive(Clone, Debug)]
pub(crate) struct BenchRow<'a> {
    /// The configuration's letter.
    pub(crate) name: &'a str,
    /// What it is.
    pub(crate) label: &'a str,
    /// Its place on the axis of a curve, where one is drawn over budgets or threads.
    pub(crate) value: Option<f64>,
    pub(crate) model: &'a Catalogue,
    pub(crate) plan: &'a Plan,
    pub(crate) summary: Summary,
}

/// Everything that is shown.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BenchView<'a> {
    pub(crate) rows: &'a [BenchRow<'a>],
    pub(crate) bandwidth: &'a Bandwidth,
    /// Where token ids come from, in words.
    pub(crate) stream: &'a str,
    /// Rounds that were asked for.
    pub(crate) rounds: u32,
    /// Steps before anything is counted.
    pub(crate) warm_up: usize,
    /// Whether the engine stayed loaded from one round to the next.
    pub(crate) is_kept: bool,
    /// Where the history was read and saved, if anywhere.
    pub(crate) usage: Option<&'a Path>,
    pub(crate) interrupted: bool,
}

/// Where a measurement is, for a bar.
pub(crate) fn progress_of_bench((round, of): (u64, u64), name: &str, context: usize) -> String {
    format!("round {round} of {of}, {name} at {context} tokens")
}

/// Tables, then how it was measured.
pub(crate) fn bench(view: &BenchView<'_>, style: Style) -> String {
    let mut text = String::new();
    if view.rows.is_empty() {
        return style.paragraph("", "interrupted before anything was measured");
    }
    text += &configurations(view, style);
    for table in [speeds, traffic, experts, predictions, memory] {
        text.push('\n');
        text += &table(view, style);
    }
    text.push('\n');
    text += &notes(view, style);
    text
}

/// The first row of each configuration.
fn firsts<'a, 'v>(view: &BenchView<'v>) -> impl Iterator<Item = &'v BenchRow<'v>> + use<'a, 'v> {
    let rows = view.rows;
    rows.iter()
        .enumerate()
        .filter(|(at, row)| *at == 0 || rows[at - 1].name != row.name)
        .map(|(_, row)| row)
}

/// A word as it stands in plans.
fn word(value: &impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        _ => NONE.to_owned(),
    }
}

fn configurations(view: &BenchView<'_>, style: Style) -> String {
    let mut rows = table::table(style, &["", "configuration", "as planned"]);
    for row in firsts(view) {
        let engine = &row.plan.engine;
        let slots: u64 = row.plan.placement.slots.caps.iter().copied().map(u64::from).sum();
        let planned = format!(
            "{}, {}, {}, kv {}, reads {}, prefetch {}, batch {}, {} in {}",
            plural(engine.threads, "thread", "threads"),
            engine.isa,
            word(&engine.numerics),
            word(&engine.kv),
            word(&engine.io),
            engine.prefetch.name(),
            engine.prefill_batch,
            plural(slots, "slot", "slots"),
            row.plan.request.budget_bytes
        );
        rows.add_row([row.name.to_owned(), row.label.to_owned(), planned]);
    }
    table::whole(&mut rows, 0);
    table::text(&rows)
}

fn rate(figure: Option<&Repeats>) -> String {
    figure.map_or_else(|| NONE.to_owned(), |figure| speed(figure.median))
}

fn range(figure: Option<&Repeats>) -> String {
    match figure {
        Some(figure) if figure.count > 1 => {
            format!("{} to {}", speed(figure.least), speed(figure.most))
        }
        Some(_) | None => NONE.to_owned(),
    }
}

fn share(figure: Option<f64>) -> String {
    figure.map_or_else(|| NONE.to_owned(), percent)
}

/// Columns after the first two stand at the right.
fn numbers(rows: &mut comfy_table::Table, columns: std::ops::Range<usize>) {
    table::whole(rows, 0);
    for column in columns {
        table::right(rows, column);
    }
}

fn speeds(view: &BenchView<'_>, style: Style) -> String {
    let header =
        ["", "context", "prefill tokens/s", "decode tokens/s", "of rounds", "p50 ms", "p95 ms"];
    let mut rows = table::table(style, &header);
    for BenchRow { name, summary, .. } in view.rows {
        let ms = |ms: Option<f64>| ms.map_or_else(|| NONE.to_owned(), |ms| format!("{ms:.2}"));
        rows.add_row(vec![
            Tone::Plain.cell(name),
            Tone::Plain.cell(summary.context),
            Tone::Plain.cell(rate(summary.prefill_tokens_per_s.as_ref())),
            Tone::Strong.cell(rate(summary.decode_tokens_per_s.as_ref())),
            Tone::Plain.cell(range(summary.decode_tokens_per_s.as_ref())),
            Tone::Plain.cell(ms(summary.decode_ms_p50)),
            Tone::Plain.cell(ms(summary.decode_ms_p95)),
        ]);
    }
    numbers(&mut rows, 1..7);
    table::text(&rows)
}

fn traffic(view: &BenchView<'_>, style: Style) -> String {
    let header = [
        "",
        "context",
        "touched a token",
        "caches of it",
        "a second",
        "of memory",
        "read a token",
        "reads at",
    ];
    let mut rows = table::table(style, &header);
    for BenchRow { name, summary, .. } in view.rows {
        let rate =
            |rate: Option<f64>| rate.map_or_else(|| NONE.to_owned(), |r| Rate(r).to_string());
        rows.add_row([
            (*name).to_owned(),
            summary.context.to_string(),
            summary.touched.all().to_string(),
            summary.touched.caches.to_string(),
            rate(summary.touched_bytes_per_s),
            share(summary.memory_share),
            Bytes(summary.read_bytes_per_token.round() as u64).to_string(),
            rate(summary.read_bytes_per_s),
        ]);
    }
    numbers(&mut rows, 1..8);
    table::text(&rows)
}

fn experts(view: &BenchView<'_>, style: Style) -> String {
    let header = [
        "",
        "context",
        "hits in decode",
        "pinned",
        "cache",
        "disk",
        "experts used",
        "in decode",
        "",
    ];
    let mut rows = table::table(style, &header);
    for BenchRow { name, summary, .. } in view.rows {
        let counts = &summary.accesses;
        let all = counts.accesses().max(1) as f64;
        let part = |n: u64| percent(n as f64 / all);
        let used = |d: &tierkeep_engine::bench::Distinct| {
            format!("{}, {} of {}: {}", d.least, d.median, d.of, percent(d.share))
        };
        let verdict = if summary.is_void { Tone::Fail.cell("void") } else { Tone::Plain.cell("") };
        rows.add_row(vec![
            Tone::Plain.cell(name),
            Tone::Plain.cell(summary.context),
            Tone::Strong.cell(share(summary.hit_rate)),
            Tone::Plain.cell(part(counts.pinned_hits)),
            Tone::Plain.cell(part(counts.cache_hits)),
            Tone::Plain.cell(part(counts.misses)),
            Tone::Plain.cell(used(&summary.distinct)),
            Tone::Plain.cell(used(&summary.distinct_in_decode)),
            verdict,
        ]);
    }
    numbers(&mut rows, 1..8);
    table::text(&rows)
}

fn predictions(view: &BenchView<'_>, style: Style) -> String {
    let header = [
        "",
        "context",
        "predicted tokens/s",
        "actual",
        "off by",
        "limit",
        "of it",
        "predicted to take most",
    ];
    let mut rows = table::table(style, &header);
    for row in view.rows {
        let summary = &row.summary;
        let expected = &summary.expected;
        let range = expected.decode_tokens_per_s;
        let off = summary
            .off_by()
            .map_or_else(|| NONE.to_owned(), |off| format!("{:+.1} %", off * 100.0));
        let all: f64 = expected.terms.iter().map(|term| term.seconds).sum();
        let binding = expected.terms.iter().find(|term| term.name == expected.binding);
        let binding = match binding {
            Some(term) if all > 0.0 => {
                format!("{} ({})", expected.binding, percent(term.seconds / all))
            }
            Some(_) | None => expected.binding.clone(),
        };
        rows.add_row([
            row.name.to_owned(),
            summary.context.to_string(),
            format!("{} ({} to {})", speed(range.p50), speed(range.p10), speed(range.p90)),
            rate(summary.decode_tokens_per_s.as_ref()),
            off,
            summary.limit_tokens_per_s.map_or_else(|| NONE.to_owned(), speed),
            share(summary.limit_share),
            binding,
        ]);
    }
    numbers(&mut rows, 1..7);
    table::text(&rows)
}

fn memory(view: &BenchView<'_>, style: Style) -> String {
    let mut rows = table::table(style, &["", "budget", "footprint", "peak resident", ""]);
    for row in firsts(view) {
        let held = row.summary.held;
        let known = |bytes: Option<Bytes>| bytes.map_or_else(|| NONE.to_owned(), |b| b.to_string());
        let is_over = held.peak_bytes.is_some_and(|peak| peak > held.budget_bytes);
        let said = match (is_over, held.is_peak_own) {
            (true, true) => Tone::Fail.cell("over the budget"),
            (false, true) => Tone::Ok.cell("within it"),
            (_, false) => Tone::Plain.cell("peak of all so far"),
        };
        rows.add_row(vec![
            Tone::Plain.cell(row.name),
            Tone::Plain.cell(held.budget_bytes),
            Tone::Plain.cell(known(held.footprint_bytes)),
            Tone::Plain.cell(known(held.peak_bytes)),
            said,
        ]);
    }
    numbers(&mut rows, 1..4);
    table::text(&rows)
}

/// How it was measured, and what is not to be made of it.
fn notes(view: &BenchView<'_>, style: Style) -> String {
    let mut text = String::new();
    let mut say = |said: &str| text += &style.paragraph("", said);
    let loaded = if view.is_kept {
        "loaded once"
    } else {
        "in each round every configuration was loaded and measured once, one after another"
    };
    let rounds = plural(u64::from(view.rounds), "round", "rounds");
    say(&format!(
        "Medians of {rounds}; {loaded}. After loading, a prompt and {} were run that count nowhere.",
        plural(view.warm_up as u64, "token", "tokens")
    ));
    say(&format!("Tokens: {}; every configuration ran the same ones.", view.stream));
    let mut bandwidth = view.bandwidth.said();
    if let Some(first) = bandwidth.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    say(&format!(
        "{bandwidth}. Bytes touched are computed from the model's tensors and the caches' shape, bytes read and \
         hits are counted, predictions are the plan's."
    ));
    let disk = view.rows.iter().find_map(|row| row.summary.disk_bytes_per_s);
    let disk = disk.map_or_else(|| "unknown".to_owned(), |disk| Rate(disk).to_string());
    say(&format!(
        "Limit: what a token reads at the disk's speed ({disk}, the plan's measurement) and what it touches at the \
         memory's, one after the other; reads under compute can exceed it."
    ));
    if view.rows.iter().any(|row| row.summary.is_void) {
        say(&format!(
            "Void: under {} of the experts were used. Such a figure is of a smaller model, and no comparison with \
             others: decode or prefill more tokens.",
            percent(LEAST_SHARE_OF_EXPERTS)
        ));
    }
    match view.usage {
        Some(path) => {
            say(&format!("What was asked for went to the usage history {}.", path.display()))
        }
        None => say("No usage history was read or written (--usage FILE does both)."),
    }
    if view.interrupted {
        say("Interrupted: the figures are of what was finished.");
    }
    text
}
