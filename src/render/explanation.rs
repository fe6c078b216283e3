//! Where one weight lives, and why.

use std::fmt::Write as _;

use tierkeep_plans::explain::{Explanation, Tier};
use tierkeep_plans::units::Bytes;

use super::style::Tone;
use super::{Style, count, percent, seconds, table};

/// One weight of a plan.
pub(crate) fn explanation(explanation: &Explanation, style: Style) -> String {
    let Explanation { subject, names, stored, bytes, tier, lives, why, places, usage, cost } =
        explanation;
    let mut text = style.paint(Tone::Heading, subject);
    let _ = writeln!(text, ": {stored}, {bytes}");
    for name in names {
        let _ = writeln!(text, "  {name}");
    }
    let tone = match tier {
        Tier::Vram | Tier::Resident | Tier::Pinned => Tone::Ok,
        Tier::Cache | Tier::PageCache => Tone::Strong,
        Tier::Disk | Tier::NotLoaded => Tone::Warn,
    };
    let _ = writeln!(text, "\ntier   {}", style.paint(tone, tier.name()));
    text += &style.paragraph("lives  ", lives);
    for (at, reason) in why.iter().enumerate() {
        text += &style.paragraph(if at == 0 { "why    " } else { "       " }, reason);
    }
    if let Some(usage) = usage {
        let used = format!(
            "{} of the accesses of its layer, rank {} of {}; {} sessions in the history",
            percent(usage.share_of_layer),
            usage.rank,
            usage.n_experts,
            usage.n_sessions
        );
        text += &style.paragraph("used   ", &used);
    }
    if let Some(cost) = cost {
        let reads = match cost.n_reads {
            1 => "in one read".to_owned(),
            n => format!("in {n} reads"),
        };
        let read = format!("{} {reads}, {}, {}", cost.bytes, seconds(cost.seconds), cost.when);
        text += &style.paragraph("costs  ", &read);
        text += &style.paragraph("       ", &format!("at {}", cost.evidence));
    }
    text.push('\n');
    text += &table_of(places, style);
    text
}

fn table_of(places: &[tierkeep_plans::explain::Place], style: Style) -> String {
    let mut rows = table::table(style, &["on disk", "from byte", "bytes", ""]);
    for place in places {
        rows.add_row([
            place.file.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            count(place.offset),
            count(place.bytes.0),
            Bytes(place.bytes.0).to_string(),
        ]);
    }
    for column in 1..=3 {
        table::right(&mut rows, column);
    }
    table::text(&rows)
}
