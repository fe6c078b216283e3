//! Two plans side by side, and a plan beside the machine of today.

use std::path::Path;

use tierkeep_plans::compare::{Difference, Group, Quantity};
use tierkeep_plans::stale::{self, Finding, Weight};

use super::style::Tone;
use super::{Style, table};

/// In what two plans differ, group by group.
pub(crate) fn differences(
    first: &Path,
    second: &Path,
    differences: &[Difference],
    style: Style,
) -> String {
    let mut text = style.paragraph("was  ", &first.display().to_string());
    text += &style.paragraph("is   ", &second.display().to_string());
    if differences.is_empty() {
        return text + "\nno difference\n";
    }
    let mut rows = table::table(style, &["", "was", "is", "change"]);
    let mut group: Option<Group> = None;
    for difference in differences {
        if group != Some(difference.group) {
            group = Some(difference.group);
            rows.add_row([Tone::Heading.cell(difference.group.name())]);
        }
        let shown = |quantity: &Option<Quantity>| {
            quantity.as_ref().map_or_else(|| "-".to_owned(), Quantity::to_string)
        };
        rows.add_row([
            format!("  {}", difference.name),
            shown(&difference.was),
            shown(&difference.is),
            difference.delta().unwrap_or_default(),
        ]);
    }
    table::whole(&mut rows, 0);
    format!("{text}\n{}", table::text(&rows))
}

/// Whether a plan still holds, and everything that has changed.
pub(crate) fn staleness(plan: &Path, findings: &[Finding], style: Style) -> String {
    let (tone, verdict) = match (stale::is_stale(findings), findings.is_empty()) {
        (true, _) => (Tone::Fail, "STALE"),
        (false, false) => (Tone::Ok, "still holds, with changes to know of"),
        (false, true) => (Tone::Ok, "still holds: nothing has changed"),
    };
    let verdict = format!("{}: {}\n", plan.display(), style.paint(tone, verdict));
    if findings.is_empty() {
        return verdict;
    }
    let mut rows = table::table(style, &["", "changed", "was", "is", "effect"]);
    for finding in findings {
        let weight = match finding.weight {
            Weight::Note => Tone::Warn.cell("note"),
            Weight::Stale => Tone::Fail.cell("STALE"),
        };
        let plain = |text: &str| Tone::Plain.cell(text);
        rows.add_row([
            weight,
            plain(finding.id),
            plain(&finding.was),
            plain(&finding.is),
            plain(&finding.effect),
        ]);
    }
    format!("{verdict}\n{}", table::text(&rows))
}
