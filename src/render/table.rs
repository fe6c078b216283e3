//! Tables that fit the terminal.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};

/// Width where standard output is no terminal.
const PLAIN_WIDTH: u16 = 100;

/// A table without rules, which arranges itself to the width of the terminal.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if table.width().is_none() {
        table.set_width(PLAIN_WIDTH);
    }
    if !header.is_empty() {
        table.set_header(header.to_vec());
    }
    table
}

/// Aligns a column to the right, for numbers.
pub(crate) fn right(table: &mut Table, column: usize) {
    if let Some(column) = table.column_mut(column) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// The table as text, without trailing blanks.
pub(crate) fn text(table: &Table) -> String {
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
