//! What a model is made of.

use tierkeep_plans::inspect::{CacheBytes, ExpertKind, Inspection, Part, Reads, Shape, Sums};
use tierkeep_plans::units::{Bytes, runs};

use super::style::Tone;
use super::{Style, count, files, percent, plural, table};

/// A model for people.
pub(crate) fn inspection(model: &Inspection, style: Style) -> String {
    let mut text = style.paragraph("", &model.directory.display().to_string());
    if let Some(caveat) = &model.caveat {
        text += &format!("{}\n", style.paint(Tone::Warn, caveat));
    }
    text.push('\n');
    let mut line = |label: &str, value: &str| text += &style.paragraph(label, value);
    line("family       ", if model.family.is_empty() { "not named" } else { &model.family });
    line(
        "files        ",
        &format!(
            "{} in {}, {} tensors",
            model.total_bytes,
            files(model.n_shards),
            count(model.n_tensors as u64)
        ),
    );
    if let Some(shape) = &model.shape {
        of_shape(shape, &mut line);
    }
    if let Some(fingerprint) = &model.fingerprint {
        line("fingerprint  ", fingerprint);
    }
    text.push('\n');
    text += &weights(model, style);
    if !model.experts.is_empty() {
        text.push('\n');
        text += &experts(model, style);
    }
    if let Some(sums) = &model.sums {
        text.push('\n');
        text += &of_sums(sums, &model.experts, model.shape.as_ref(), style);
    }
    if let Some(touched) = model.touched {
        let all = touched.dense_bytes + touched.routed_bytes;
        text.push('\n');
        text += &style.heading("a token touches");
        let line = |label: &str, bytes: Bytes| {
            format!("  {label:<16} {:>18}  {bytes:>9}\n", count(bytes.0))
        };
        text += &line("dense weights", touched.dense_bytes);
        text += &line("routed experts", touched.routed_bytes);
        text += &line("sum", all);
    }
    if !model.caches.is_empty() {
        text.push('\n');
        text += &caches(&model.caches, style);
    }
    for warning in &model.warnings {
        text.push('\n');
        let label = "warning: ";
        let warning = format!("{}; {}", warning.finding, warning.remedy);
        text += &style.toned_paragraph(Tone::Warn, label, &warning);
    }
    text
}

fn of_shape(shape: &Shape, line: &mut impl FnMut(&str, &str)) {
    let mtp = match shape.n_mtp_layers {
        0 => String::new(),
        1 => "; 1 multi-token-prediction layer".to_owned(),
        n => format!("; {n} multi-token-prediction layers"),
    };
    line(
        "layers       ",
        &format!("{}, {} with routed experts{mtp}", shape.n_layers, shape.n_expert_layers),
    );
    let zero = match shape.n_zero_experts {
        0 => String::new(),
        n => format!(" and {n} without weights"),
    };
    line(
        "experts      ",
        &format!("{}{zero} a layer, {} a token", shape.n_experts, shape.n_experts_active),
    );
    line("attention    ", &shape.attention);
    line(
        "widths       ",
        &format!(
            "hidden {}, vocabulary {}",
            count(shape.hidden_size as u64),
            count(shape.vocab_size as u64)
        ),
    );
    line("context      ", &format!("{} tokens at most", count(shape.max_context as u64)));
}

fn weights(model: &Inspection, style: Style) -> String {
    let mut rows = table::table(style, &["weights", "stored", "count", "bytes", "", "share"]);
    let all = model.total_bytes.as_f64().max(1.0);
    let mut before: Option<Part> = None;
    for line in &model.weights {
        let name = if before == Some(line.part) { "" } else { line.part.name() };
        before = Some(line.part);
        let tone = match line.part {
            Part::Unrecognised => Tone::Warn,
            _ => Tone::Plain,
        };
        rows.add_row([
            tone.cell(name),
            tone.cell(&line.stored),
            tone.cell(if line.n_weights > 0 { count(line.n_weights) } else { String::new() }),
            tone.cell(count(line.bytes.0)),
            tone.cell(line.bytes),
            tone.cell(percent(line.bytes.as_f64() / all)),
        ]);
    }
    let mut total = |name: &str, bytes: Bytes, tone: Tone| {
        let blank = Tone::Plain.cell("");
        rows.add_row([
            tone.cell(name),
            blank.clone(),
            blank,
            tone.cell(count(bytes.0)),
            tone.cell(bytes),
            tone.cell(percent(bytes.as_f64() / all)),
        ]);
    };
    total("headers", model.header_bytes, Tone::Plain);
    total("sum", model.total_bytes, Tone::Heading);
    for column in 2..=5 {
        table::right(&mut rows, column);
    }
    table::text(&rows)
}

fn experts(model: &Inspection, style: Style) -> String {
    let mut rows = table::table(style, &["experts", "of", "", "stored", "reads", "in layers", ""]);
    for kind in &model.experts {
        rows.add_row([
            count(kind.n_experts),
            count(kind.bytes.0),
            kind.bytes.to_string(),
            kind.stored.clone(),
            reads(&kind.reads),
            format!("{} ({})", kind.layers.len(), runs(kind.layers.iter().copied())),
            if kind.is_mtp { "multi-token prediction".to_owned() } else { String::new() },
        ]);
    }
    for column in [0, 1, 2, 4] {
        table::right(&mut rows, column);
    }
    table::text(&rows)
}

/// `1`, or `1 (22 of them 2)`.
fn reads(reads: &[Reads]) -> String {
    let Some((most, rest)) = reads.split_first() else { return String::new() };
    if rest.is_empty() {
        return most.n_reads.to_string();
    }
    let other = |of: &Reads| format!("{} of them {}", count(of.n_experts), of.n_reads);
    format!("{} ({})", most.n_reads, rest.iter().map(other).collect::<Vec<_>>().join(", "))
}

fn of_sums(sums: &Sums, kinds: &[ExpertKind], shape: Option<&Shape>, style: Style) -> String {
    let mut rows = table::table(style, &["in all", "bytes", "", ""]);
    let mut row = |name: &str, bytes: Bytes, what: String| {
        rows.add_row([name.to_owned(), count(bytes.0), bytes.to_string(), what]);
    };
    row("dense weights", sums.dense_bytes, "everything but routed experts".to_owned());
    let n_mtp = shape.map_or(0, |shape| shape.n_mtp_layers as u64);
    if n_mtp > 0 {
        let layers = plural(n_mtp, "the MTP layer", "MTP layers");
        let name = format!("with {}", layers.trim_start_matches("1 "));
        row(&name, sums.dense_with_mtp_bytes, "the same and multi-token prediction".to_owned());
    }
    if sums.n_routed_experts > 0 {
        row("routed experts", sums.routed_bytes, experts_in_words(sums.n_routed_experts, kinds));
    }
    table::whole(&mut rows, 0);
    table::right(&mut rows, 1);
    table::right(&mut rows, 2);
    table::text(&rows)
}

/// `19,456: 19,200 of 18.92 MB in 75 layers, 256 of 37.79 MB in the MTP layer`.
fn experts_in_words(all: u64, kinds: &[ExpertKind]) -> String {
    let kind = |kind: &ExpertKind| {
        let layers = match (kind.is_mtp, kind.layers.len() as u64) {
            (true, 1) => "the MTP layer".to_owned(),
            (true, n) => format!("{n} MTP layers"),
            (false, n) => plural(n, "layer", "layers"),
        };
        format!("{} of {} in {layers}", count(kind.n_experts), kind.bytes)
    };
    let kinds: Vec<String> = kinds.iter().map(kind).collect();
    format!("{}: {}", count(all), kinds.join(", "))
}

fn caches(caches: &[CacheBytes], style: Style) -> String {
    let context = caches.first().map_or(0, |cache| cache.context);
    let at = format!("at {} tokens", count(context));
    let mut rows = table::table(style, &["a sequence", "bits", "bytes a token", &at, ""]);
    for cache in caches {
        let mut row = |name: &str, per_token: Bytes, bytes: Bytes| {
            rows.add_row([
                name.to_owned(),
                cache.bits.to_string(),
                count(per_token.0),
                bytes.to_string(),
                format!("{:.2} GiB", bytes.as_f64() / f64::from(1 << 30)),
            ]);
        };
        if cache.window_bytes_per_token.0 > 0 {
            row("KV cache, all positions", cache.kv_bytes_per_token, cache.kv_bytes);
            row("  more in windows", cache.window_bytes_per_token, Bytes(0));
        } else {
            row("KV cache", cache.kv_bytes_per_token, cache.kv_bytes);
        }
        if cache.indexer_bytes_per_token.0 > 0 {
            row("indexer keys", cache.indexer_bytes_per_token, cache.indexer_bytes);
        }
    }
    for column in 1..=4 {
        table::right(&mut rows, column);
    }
    table::text(&rows)
}
