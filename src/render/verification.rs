//! What verification found.

use std::fmt::Write as _;
use std::path::Path;

use tierkeep_engine::verify::{CaseReport, LOGIT_TOLERANCE, MARGIN, OracleCase};
use tierkeep_plans::plan::Plan;

use super::{Style, table};

/// One row a case, then the verdict.
pub(crate) fn verification(
    model: &Path,
    plan: &Plan,
    oracle: &[OracleCase],
    reports: &[CaseReport],
    holds: bool,
    style: Style,
) -> String {
    let mut rows =
        table::table(style, &["case", "positions equal", "under margin", "greedy equal", "logits"]);
    for (at, (case, report)) in oracle.iter().zip(reports).enumerate() {
        let name = match &case.text {
            Some(text) => format!("{at} {:?}", text.chars().take(48).collect::<String>()),
            None => at.to_string(),
        };
        rows.add_row([
            name,
            format!("{} of {}", report.positions_equal, report.positions),
            format!("{} of {}", report.under_margin_equal, report.positions_under_margin),
            format!("{} of {}", report.greedy_equal, report.greedy),
            report.logit_difference.map_or_else(|| "-".to_owned(), |d| format!("{d:.1e}")),
        ]);
    }
    let mut text = table::text(&rows);
    for (at, report) in reports.iter().enumerate() {
        if !report.layer_differences.is_empty() {
            let _ = writeln!(text, "\nlargest difference after each layer, case {at}");
            for (layer, difference) in report.layer_differences.iter().enumerate() {
                let _ = writeln!(text, "  {layer:>3}  {difference:.1e}");
            }
        }
        if report.selection_ties > 0 {
            let _ = writeln!(
                text,
                "\ncase {at}: {} selections of the sparse indexer were ties, which the reference breaks by the\nlength of the sequence and computes anew for every token; so did verify. With the cache kept, as\na run does, {} of {} greedy tokens are equal.",
                report.selection_ties, report.streamed_equal, report.greedy
            );
        }
    }
    let _ = writeln!(
        text,
        "\n{}: {} ({} threads, {}, exact; margin {MARGIN}, logits within {LOGIT_TOLERANCE} of the largest)",
        model.display(),
        if holds { "equal to the reference" } else { "NOT equal to the reference" },
        plan.engine.threads,
        plan.engine.isa,
    );
    text
}
