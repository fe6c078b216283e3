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
    text.push('\n');
    let rows: Vec<Row> = differences.iter().map(Row::of).collect();
    let columns = Columns::of(&rows, style);
    text += &columns.title(style);
    let mut group: Option<Group> = None;
    for (row, difference) in rows.iter().zip(differences) {
        if group != Some(difference.group) {
            group = Some(difference.group);
            text += &style.heading(difference.group.name());
        }
        text += &columns.row(row, style);
    }
    text
}

/// One difference as it is shown.
struct Row {
    name: String,
    was: String,
    is: String,
    change: String,
}

impl Row {
    fn of(difference: &Difference) -> Self {
        let shown = |quantity: &Option<Quantity>| {
            quantity.as_ref().map_or_else(|| "-".to_owned(), Quantity::to_string)
        };
        Self {
            name: format!("  {}", difference.name),
            was: shown(&difference.was),
            is: shown(&difference.is),
            change: difference.delta().unwrap_or_default(),
        }
    }

    /// Words have lines of their own; figures stand side by side.
    fn is_prose(&self) -> bool {
        self.was.len().max(self.is.len()) > FIGURE_WIDTH
    }

    /// The change, or only its share where that is all that there is room for.
    fn change(&self, is_narrow: bool) -> &str {
        let share = self.change.split_once(" (").and_then(|(_, share)| share.strip_suffix(')'));
        share.filter(|_| is_narrow).unwrap_or(&self.change)
    }
}

/// Longest value that counts as a figure.
const FIGURE_WIDTH: usize = 24;
/// Narrower than this, a change is only its share.
const NARROW_WIDTH: u16 = 100;
/// Between two columns.
const GAP: usize = 2;

/// How wide the columns of figures are.
struct Columns {
    name: usize,
    was: usize,
    is: usize,
    is_narrow: bool,
}

impl Columns {
    fn of(rows: &[Row], style: Style) -> Self {
        let is_narrow = style.width < NARROW_WIDTH;
        let figures = || rows.iter().filter(|row| !row.is_prose());
        let widest = |of: fn(&Row) -> usize| figures().map(of).max().unwrap_or(0);
        let (was, is) = (widest(|row| row.was.len()).max(3), widest(|row| row.is.len()).max(2));
        let change = figures().map(|row| row.change(is_narrow).len()).max().unwrap_or(0);
        let rest = usize::from(style.width).saturating_sub(was + is + change + 3 * GAP);
        Self { name: widest(|row| row.name.len()).min(rest), was, is, is_narrow }
    }

    fn title(&self, style: Style) -> String {
        let line = self.line("", "was", "is", "change");
        let titles = line.trim_start();
        let blanks = " ".repeat(line.len() - titles.len());
        format!("{blanks}{}", style.heading(titles.trim_end()))
    }

    fn line(&self, name: &str, was: &str, is: &str, change: &str) -> String {
        let Self { name: name_width, was: was_width, is: is_width, .. } = self;
        let gap = " ".repeat(GAP);
        let line =
            format!("{name:name_width$}{gap}{was:>was_width$}{gap}{is:>is_width$}{gap}{change}");
        format!("{}\n", line.trim_end())
    }

    fn row(&self, row: &Row, style: Style) -> String {
        if row.is_prose() {
            return format!("{}\n", row.name)
                + &style.paragraph("    was  ", &row.was)
                + &style.paragraph("    is   ", &row.is);
        }
        let change = row.change(self.is_narrow);
        if row.name.len() <= self.name {
            return self.line(&row.name, &row.was, &row.is, change);
        }
        format!("{}\n{}", row.name, self.line("", &row.was, &row.is, change))
    }
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
