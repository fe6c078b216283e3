//! What a model is made of.

use tierkeep_plans::inspect::{CacheBytes, Inspection, Part, Shape};
use tierkeep_plans::units::{Bytes, runs};

use super::style::Tone;
use super::{Style, count, files, percent, table};

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
        text += &style.paragraph(label, &format!("{}; {}", warning.finding, warning.remedy));
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
            kind.n_reads.to_string(),
            format!("{} ({})", kind.layers.len(), runs(kind.layers.iter().copied())),
            if kind.is_mtp { "multi-token prediction".to_owned() } else { String::new() },
        ]);
    }
    for column in [0, 1, 2, 4] {
        table::right(&mut rows, column);
    }
    table::text(&rows)
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
