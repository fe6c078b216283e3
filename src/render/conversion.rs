//! What a conversion wrote, or would write.

use std::path::Path;

use tierkeep_engine::convert::ConvertReport;
use tierkeep_plans::units::Bytes;

use super::{Style, count, files, table};

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
            count(class.n_weights as u64),
            class.bytes_in.to_string(),
            class.bytes_out.to_string(),
            error(class.mean_relative_error),
            error(class.worst_relative_error),
        ]);
    }
    for column in 1..=5 {
        table::right(&mut rows, column);
    }
    let out = out.display();
    let wrote = format!(
        "{} written to {out} in {}, {} of it padding; read {}",
        report.bytes_out,
        files(report.files.len()),
        report.padding_bytes,
        report.bytes_in,
    );
    let next = format!("next: tierkeep doctor {out}\n");
    format!("{}\n{}{next}", table::text(&rows), style.paragraph("", &wrote))
}

/// What a conversion would write.
pub(crate) fn dry_run(out: &Path, planned: Bytes, style: Style) -> String {
    let out = out.display();
    style.paragraph("", &format!("{planned} of weights would be written to {out}"))
}
