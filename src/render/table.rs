//! Tables that fit the width that they are given.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table};

use super::style::{Style, Tone};

/// A table without rules, which arranges itself to the width.
pub(crate) fn table(style: Style, header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    // Neither width nor colour is asked of the terminal here: the style says both.
    table.force_no_tty().set_width(style.width);
    if style.colour {
        table.enforce_styling().style_text_only();
    }
    if !header.is_empty() {
        // A title of nothing has no tone: its escapes would stand behind blanks.
        let tone = |title: &str| if title.is_empty() { Tone::Plain } else { Tone::Heading };
        table.set_header(header.iter().map(|title| tone(title).cell(title)));
    }
    table
}

/// Aligns a column to the right, for numbers.
pub(crate) fn right(table: &mut Table, column: usize) {
    if let Some(column) = table.column_mut(column) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// Keeps a column as wide as its text: names that are indented are not to be broken.
pub(crate) fn whole(table: &mut Table, column: usize) {
    if let Some(column) = table.column_mut(column) {
        column.set_constraint(ColumnConstraint::ContentWidth);
    }
}

/// The table as text, without trailing blanks.
pub(crate) fn text(table: &Table) -> String {
    let mut table = table.clone();
    // The text begins where the lines around the table do.
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
