//! What a conversion wrote.

use std::path::Path;

use tierkeep_engine::convert::ConvertReport;

use super::{Style, table};

/// Bytes and error by class.
pub(crate) fn conversion(out: &Path, report: &ConvertReport, style: Style) -> String {
    let mut rows = table::table(
        style,
        &["class", "weights", "in", "out", "mean row error", "worst row error"],
    );
    for class in &report.classes {
        let error = |e: Option<f64>| e.map_or_else(|| "-".to_owned(), super::percent);
        rows.add_row([
            class.class.to_string(),
            class.n_weights.to_string(),
            class.bytes_in.to_string(),
            class.bytes_out.to_string(),
            error(class.mean_relative_error),
            error(class.worst_relative_error),
        ]);
    }
    for column in 1..=5 {
        table::right(&mut rows, column);
    }
    format!(
        "{}\n{} written to {} in {} files, {} of it padding; read {}\nnext: tierkeep doctor {}\n",
        table::text(&rows),
        report.bytes_out,
        out.display(),
        report.files.len(),
        report.padding_bytes,
        report.bytes_in,
        out.display()
    )
}
