//! What `bench kernels` shows.

use serde_json::{Value, json};
use tierkeep_engine::bench::products::ProductSpeed;
use tierkeep_plans::units::{Bytes, Rate};

use super::rows::{build, figure, line};
use super::{Bandwidth, NONE};
use crate::render::{Style, date, percent, plural, table};

/// The header of a CSV file.
pub(crate) const KERNELS_CSV_HEADER: &str = "commit,date,type,rows,cols,batch,numerics,isa,threads,bytes,copies,passes,seconds,seconds_least,seconds_most,weights_per_s,bytes_per_s,memory_bytes_per_s,memory_share";

/// Everything that is shown.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelView<'a> {
    pub(crate) speeds: &'a [ProductSpeed],
    pub(crate) is_resident: bool,
    /// Passes that were asked for.
    pub(crate) passes: usize,
    pub(crate) bandwidth: &'a Bandwidth,
    pub(crate) interrupted: bool,
}

impl KernelView<'_> {
    /// Share of the memory's bandwidth; none where the caches are read.
    fn share(&self, speed: &ProductSpeed) -> Option<f64> {
        let given = self.bandwidth.largest().filter(|_| !self.is_resident)?;
        Some(speed.bytes_per_s() / given)
    }
}

/// A table, then how it was measured.
pub(crate) fn kernels(view: &KernelView<'_>, style: Style) -> String {
    if view.speeds.is_empty() {
        return style.paragraph("", "interrupted before anything was measured");
    }
    let header = [
        "type",
        "rows x cols",
        "batch",
        "numerics",
        "isa",
        "threads",
        "G weights/s",
        "read",
        "of memory",
        "spread",
    ];
    let mut rows = table::table(style, &header);
    for speed in view.speeds {
        let product = &speed.product;
        rows.add_row([
            product.element.clone(),
            format!("{} x {}", product.rows, product.cols),
            product.batch.to_string(),
            product.numerics.name().to_owned(),
            product.isa.clone(),
            product.threads.to_string(),
            format!("{:.2}", speed.weights_per_s() / 1e9),
            Rate(speed.bytes_per_s()).to_string(),
            view.share(speed).map_or_else(|| NONE.to_owned(), percent),
            percent(speed.seconds.spread()),
        ]);
    }
    for column in [2, 5, 6, 7, 8, 9] {
        table::right(&mut rows, column);
    }
    let mut text = table::text(&rows);
    text.push('\n');
    let most = view.speeds.iter().map(|speed| speed.bytes).max().unwrap_or(0);
    let over = if view.is_resident {
        format!("Of weights that the caches hold ({} at most)", Bytes(most))
    } else {
        format!("Over {} of weights, copies of a matrix one after another", Bytes(most))
    };
    let passes = view.speeds.first().map_or(view.passes, |speed| speed.seconds.count);
    text += &style.paragraph(
        "",
        &format!(
            "{over}; medians of {}, each of all products in turn, after one that does not count. Spread: slowest \
             less fastest, over the median. Bytes read are the weights' and their scales'.",
            plural(passes as u64, "pass", "passes")
        ),
    );
    let mut said = view.bandwidth.said();
    if let Some(first) = said.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    text += &style.paragraph("", &format!("{said}."));
    if view.interrupted {
        text +=
            &style.paragraph("", "Interrupted: the figures are of the passes that were finished.");
    }
    text
}

/// A line for each product, in the order of [`KERNELS_CSV_HEADER`].
pub(crate) fn kernels_csv(view: &KernelView<'_>, unix_s: u64) -> String {
    let row = |speed: &ProductSpeed| {
        let product = &speed.product;
        let seconds = |seconds: f64| format!("{seconds:.9}");
        line(&[
            build().to_owned(),
            date(unix_s),
            product.element.clone(),
            product.rows.to_string(),
            product.cols.to_string(),
            product.batch.to_string(),
            product.numerics.name().to_owned(),
            product.isa.clone(),
            product.threads.to_string(),
            speed.bytes.to_string(),
            speed.copies.to_string(),
            speed.seconds.count.to_string(),
            seconds(speed.seconds.median),
            seconds(speed.seconds.least),
            seconds(speed.seconds.most),
            figure(Some(speed.weights_per_s())),
            figure(Some(speed.bytes_per_s())),
            figure(view.bandwidth.largest()),
            figure(view.share(speed)),
        ])
    };
    view.speeds.iter().map(row).collect()
}

/// Everything, for programs.
pub(crate) fn kernels_json(view: &KernelView<'_>) -> Value {
    let row = |speed: &ProductSpeed| {
        json!({
            "product": speed.product,
            "copies": speed.copies,
            "bytes": speed.bytes,
            "seconds": speed.seconds,
            "weights_per_s": speed.weights_per_s(),
            "bytes_per_s": speed.bytes_per_s(),
            "memory_share": view.share(speed),
        })
    };
    json!({
        "schema_version": 1,
        "build": build(),
        "resident": view.is_resident,
        "memory": {
            "bytes_per_s": view.bandwidth.largest(),
            "timings": view.bandwidth.figures,
            "source": "measured in this run by a process beside it; the largest counts",
            "unknown": view.bandwidth.unknown,
        },
        "ended": if view.interrupted { "interrupted" } else { "done" },
        "products": view.speeds.iter().map(row).collect::<Vec<_>>(),
    })
}
