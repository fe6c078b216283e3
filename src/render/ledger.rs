//! Ledgers: every line with its bytes, their sum, and what no line takes.

use tierkeep_plans::budget::Ledger;
use tierkeep_plans::units::Bytes;

use super::style::Tone;
use super::{Style, count, table};

/// Lines as (name, bytes, what they are made of) under a title, then sum, rest and limit.
pub(super) fn lines<'a>(
    title: &str,
    lines: impl IntoIterator<Item = (&'a str, Bytes, &'a str)>,
    budget: Bytes,
    style: Style,
) -> String {
    let mut rows = table::table(style, &[title, "bytes", "", "what it is"]);
    let mut sum = Bytes(0);
    for (name, bytes, note) in lines {
        sum = sum + bytes;
        rows.add_row([name.to_owned(), count(bytes.0), bytes.to_string(), note.to_owned()]);
    }
    let mut total = |name: &str, bytes: Bytes, tone: Tone| {
        rows.add_row([
            tone.cell(name),
            tone.cell(count(bytes.0)),
            tone.cell(bytes),
            Tone::Plain.cell(""),
        ]);
    };
    total("sum", sum, Tone::Heading);
    if sum > budget {
        total("over the budget by", sum.saturating_sub(budget), Tone::Fail);
    } else {
        total("unused", budget.saturating_sub(sum), Tone::Plain);
    }
    total("budget", budget, Tone::Heading);
    table::right(&mut rows, 1);
    table::right(&mut rows, 2);
    table::text(&rows)
}

/// The ledger of main memory.
pub(super) fn ledger(ledger: &Ledger, budget: Bytes, style: Style) -> String {
    let all = ledger.0.iter().map(|l| (l.line.name(), l.bytes, l.note.as_str()));
    lines("ledger", all, budget, style)
}
