//! Where a token's time goes, by stage of a pass.

use tierkeep_engine::{PhaseProfile, ProfileReport};
use tierkeep_plans::units::{Bytes, Rate};

use super::{Style, percent, plural, seconds, table};

/// A table for each phase that ran.
pub(crate) fn stages(profile: &ProfileReport, style: Style) -> String {
    let mut text = style.heading("where the time goes    measured by a clock around each stage");
    for (name, phase) in [("prefill", &profile.prefill), ("decode", &profile.decode)] {
        if phase.tokens > 0 {
            text.push_str(&of_phase(name, phase, style));
        }
    }
    text
}

fn of_phase(name: &str, phase: &PhaseProfile, style: Style) -> String {
    let tokens = phase.tokens as f64;
    let per_token = |seconds: f64| format!("{:.3}", seconds / tokens * 1e3);
    let mut table = table::table(style, &[name, "ms a token", "share", "bytes a token", "speed"]);
    for stage in phase.stages.iter().filter(|stage| stage.seconds > 0.0 || stage.bytes > 0) {
        table.add_row([
            stage.stage.name().to_owned(),
            per_token(stage.seconds),
            percent(stage.share),
            match stage.bytes {
                0 => String::new(),
                bytes => Bytes((bytes as f64 / tokens) as u64).to_string(),
            },
            stage.bytes_per_s.map_or_else(String::new, |speed| Rate(speed).to_string()),
        ]);
    }
    let bytes: u64 = phase.stages.iter().map(|stage| stage.bytes).sum();
    table.add_row([
        "all".to_owned(),
        per_token(phase.seconds),
        percent(1.0),
        Bytes((bytes as f64 / tokens) as u64).to_string(),
        Rate(bytes as f64 / phase.seconds.max(f64::MIN_POSITIVE)).to_string(),
    ]);
    for column in 1..5 {
        table::right(&mut table, column);
    }
    let whole =
        format!("  {} in {}\n", plural(phase.tokens, "token", "tokens"), seconds(phase.seconds));
    table::text(&table) + &whole
}
