//! What verification found.

use std::path::Path;

use tierkeep_engine::verify::{CaseReport, LOGIT_TOLERANCE, MARGIN, OracleCase};

use super::style::Tone;
use super::{Style, plural, table};

/// Most characters of a prompt that are shown.
const PROMPT_SHOWN: usize = 48;

/// What was verified, and what came of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Verified<'a> {
    /// The model as it was asked for.
    pub(crate) model: &'a Path,
    /// Threads that computed.
    pub(crate) threads: u64,
    /// The instruction set that computed.
    pub(crate) isa: &'a str,
    /// The reference's answers.
    pub(crate) oracle: &'a [OracleCase],
    /// Ours, one for each case.
    pub(crate) reports: &'a [CaseReport],
    /// Whether all are equal.
    pub(crate) holds: bool,
}

/// One row a case, then the verdict.
pub(crate) fn verification(verified: &Verified<'_>, style: Style) -> String {
    let Verified { model, threads, isa, oracle, reports, holds } = *verified;
    let mut rows =
        table::table(style, &["case", "positions equal", "under margin", "greedy equal", "logits"]);
    for (at, (case, report)) in oracle.iter().zip(reports).enumerate() {
        let name = match &case.text {
            Some(text) => format!("{at} {:?}", text.chars().take(PROMPT_SHOWN).collect::<String>()),
            None => at.to_string(),
        };
        let tone = if report.holds() { Tone::Plain } else { Tone::Fail };
        rows.add_row([
            tone.cell(name),
            tone.cell(format!("{} of {}", report.positions_equal, report.positions)),
            tone.cell(format!(
                "{} of {}",
                report.under_margin_equal, report.positions_under_margin
            )),
            tone.cell(format!("{} of {}", report.greedy_equal, report.greedy)),
            tone.cell(
                report.logit_difference.map_or_else(|| "-".to_owned(), |d| format!("{d:.1e}")),
            ),
        ]);
    }
    let mut text = table::text(&rows);
    for (at, report) in reports.iter().enumerate() {
        if !report.layer_differences.is_empty() {
            text.push('\n');
            text += &style.heading(&format!("largest difference after each layer, case {at}"));
            for (layer, difference) in report.layer_differences.iter().enumerate() {
                text += &format!("  {layer:>3}  {difference:.1e}\n");
            }
        }
        if report.selection_ties > 0 {
            let ties = format!(
                "{} of the sparse indexer, which the reference breaks by the length of the sequence \
                 and computes anew for every token; so did verify. With the cache kept, as a run does, \
                 {} of {} greedy tokens are equal.",
                plural(report.selection_ties, "selection was a tie", "selections were ties"),
                report.streamed_equal,
                report.greedy
            );
            text.push('\n');
            text += &style.paragraph(&format!("case {at}: "), &ties);
        }
    }
    let (tone, verdict) = if holds {
        (Tone::Ok, "equal to the reference")
    } else {
        (Tone::Fail, "NOT equal to the reference")
    };
    let how = format!(
        "{}, {isa}, exact; margin {MARGIN}, logits within {LOGIT_TOLERANCE} of the largest",
        plural(threads, "thread", "threads")
    );
    text + &format!("\n{}: {}\n", model.display(), style.paint(tone, verdict))
        + &style.paragraph("", &format!("({how})"))
}
