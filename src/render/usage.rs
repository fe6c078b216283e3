//! The usage history: what it holds, what was imported, where it went.

use std::path::Path;

use tierkeep_plans::units::Bytes;
use tierkeep_plans::usage::{ExpertUse, FORMAT_VERSION, Reset, RunSummary, Summary, Taken};

use super::{Style, count, percent, plural, speed, table};

/// A history and its file.
pub(crate) struct HistoryView<'a> {
    pub(crate) path: &'a Path,
    pub(crate) version: u32,
    pub(crate) bytes: u64,
    pub(crate) summary: &'a Summary,
}

/// Where there is none yet.
pub(crate) fn no_history(path: &Path, style: Style) -> String {
    let mut text = style.paragraph("file      ", &path.display().to_string());
    text += &style.paragraph("", "no usage history yet: tierkeep run writes one as it decodes");
    text
}

/// All of a history.
pub(crate) fn history(view: &HistoryView<'_>, style: Style) -> String {
    let HistoryView { path, version, bytes, summary } = *view;
    let mut text = style.paragraph("file      ", &path.display().to_string());
    let mut line = |label: &str, said: &str| text += &style.paragraph(label, said);
    let becomes = match version {
        FORMAT_VERSION => String::new(),
        _ => format!("; the next run writes version {FORMAT_VERSION}"),
    };
    line("format    ", &format!("version {version}, {}{becomes}", Bytes(bytes)));
    line("sessions  ", &sessions(summary));
    line(
        "accesses  ",
        &format!(
            "{} counted in decode, older ones faded: {}",
            whole(summary.accesses),
            tokens(summary.tokens)
        ),
    );
    line(
        "sample    ",
        &format!(
            "{} of recorded routing, of {}",
            plural(summary.sample_tokens as u64, "token", "tokens"),
            plural(summary.sample_sessions as u64, "session", "sessions")
        ),
    );
    text.push('\n');
    text += &layers(summary, style);
    if !summary.runs.is_empty() {
        text.push('\n');
        text += &runs(&summary.runs, style);
    }
    text
}

fn sessions(summary: &Summary) -> String {
    let all = plural(summary.n_sessions, "session", "sessions");
    let length =
        |&tokens: &f64| if tokens < 0.5 { "less than 1".to_owned() } else { whole(tokens) };
    let lengths: Vec<String> = summary.newest_session_tokens.iter().map(length).collect();
    match lengths.len() {
        0 => all,
        _ => format!("{all}; the newest, oldest first, of {} tokens", lengths.join(", ")),
    }
}

/// A number of tokens that may be a part of one.
fn tokens(number: f64) -> String {
    plural(number.round() as u64, "token's worth", "tokens' worth")
}

fn whole(number: f64) -> String {
    count(number.round() as u64)
}

fn layers(summary: &Summary, style: Style) -> String {
    let busiest = format!("busiest {}", summary.n_busiest);
    let header = ["layer", "experts", "accesses", &busiest, "effective", "changed"];
    let mut rows = table::table(style, &header);
    let known = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), percent);
    for layer in &summary.layers {
        rows.add_row([
            layer.layer.0.to_string(),
            format!("{} of {}", layer.n_asked, summary.n_experts),
            whole(layer.accesses),
            known(layer.busiest_tenth),
            layer.effective_experts.map_or_else(|| "-".to_owned(), |n| format!("{n:.1}")),
            known(layer.change),
        ]);
    }
    for column in 0..6 {
        table::right(&mut rows, column);
    }
    let mut text = table::text(&rows);
    text += &style.paragraph(
        "",
        "experts: asked for; busiest: share of accesses of the busiest tenth; effective: as hard to \
         guess as so many experts asked for equally often; changed: what of the newest session's \
         accesses older ones do not lead to expect",
    );
    text
}

fn runs(runs: &[RunSummary], style: Style) -> String {
    let header = ["run", "tokens", "budget", "expected", "measured", "error", "hits", "measured"];
    let mut rows = table::table(style, &header);
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for (at, run) in runs.iter().enumerate() {
        let record = &run.record;
        rows.add_row([
            (at + 1).to_string(),
            known(record.decoded_tokens.map(count)),
            known(record.budget_bytes.map(|bytes| bytes.to_string())),
            known(record.predicted_tok_per_s_p50.map(speed)),
            known(record.actual_tok_per_s.map(speed)),
            known(run.speed_error.map(|error| format!("{:+.0} %", error * 100.0))),
            known(record.predicted_hit_rate.map(percent)),
            known(record.actual_hit_rate.map(percent)),
        ]);
    }
    for column in 0..8 {
        table::right(&mut rows, column);
    }
    let mut text = table::text(&rows);
    text +=
        &style.paragraph("", "expected: by the plan, tokens/s and hits in decode; oldest first");
    text
}

/// The experts of a layer.
pub(crate) fn history_layer(
    layer: u32,
    n_experts: u32,
    experts: &[ExpertUse],
    style: Style,
) -> String {
    let mut text = style
        .heading(&format!("layer {layer}: {} of {n_experts} experts asked for", experts.len()));
    let mut rows = table::table(style, &["expert", "accesses", "share", "of them newest"]);
    for expert in experts {
        rows.add_row([
            expert.expert.to_string(),
            format!("{:.1}", expert.accesses),
            percent(expert.share),
            whole(expert.newest_accesses),
        ]);
    }
    for column in 0..4 {
        table::right(&mut rows, column);
    }
    text += &table::text(&rows);
    text
}

/// What was taken of imported counts; without sessions it was only tried.
pub(crate) fn imported(
    path: &Path,
    taken: &Taken,
    n_layers: u32,
    n_sessions: Option<u64>,
    style: Style,
) -> String {
    let of = |accesses: u64, experts: u64| {
        format!(
            "{} of {}",
            plural(accesses, "access", "accesses"),
            plural(experts, "expert", "experts")
        )
    };
    let layers = plural(taken.layers, "layer", "layers");
    let mut text = style.paragraph(
        "taken     ",
        &format!("{} in {layers}, as one session", of(taken.accesses, taken.experts)),
    );
    for left in &taken.left_out {
        let why = if left.layer.0 >= n_layers {
            "a layer of multi-token prediction"
        } else {
            "a layer without routed experts"
        };
        let what = of(left.accesses, left.experts);
        text += &style.paragraph("left out  ", &format!("layer {}: {what}; {why}", left.layer.0));
    }
    let file = path.display();
    text += &match n_sessions {
        Some(n) => style.paragraph(
            "history   ",
            &format!("{file}, now of {}", plural(n, "session", "sessions")),
        ),
        None => style.paragraph("history   ", &format!("{file}, unchanged: this was a dry run")),
    };
    text
}

/// Where a history went.
pub(crate) fn reset(path: &Path, reset: &Reset, style: Style) -> String {
    let file = path.display();
    match reset {
        Reset::Absent => style.paragraph("", &format!("{file}: there is no usage history")),
        Reset::Deleted => style.paragraph("", &format!("{file} is deleted")),
        Reset::MovedTo(to) => {
            let mut text = style.paragraph("moved to  ", &to.display().to_string());
            text += &style
                .paragraph("", "the next run begins a new one; renamed back, it is used again");
            text
        }
    }
}
