//! Rows of `bench` for programs. Every column and field is described in docs/bench.md.

use serde_json::{Value, json};
use tierkeep_engine::bench::statistics::Repeats;
use tierkeep_plans::plan::Plan;

use super::{BenchRow, BenchView, word};
use crate::render::date;

/// Version of the JSON. A field that is removed or means something else raises it; a new one does not.
const SCHEMA_VERSION: u32 = 1;

/// The header of a CSV file.
pub(crate) const BENCH_CSV_HEADER: &str = "commit,date,machine,model,fingerprint,configuration,threads,isa,numerics,kv,io,prefetch,prefill_batch,slots,pinned,budget_bytes,planned_context,context,prefill_tokens,decode_tokens,rounds,stream,prefill_tokens_per_s,fill_tokens_per_s,decode_tokens_per_s,decode_least,decode_most,decode_ms_p50,decode_ms_p95,touched_weight_bytes,touched_cache_bytes,touched_bytes_per_s,memory_bytes_per_s,memory_share,read_bytes_per_token,read_bytes_per_s,disk_bytes_per_s,limit_tokens_per_s,limit_share,hit_rate,experts_least,experts_median,experts_of,experts_share,experts_share_in_decode,void,predicted_p10,predicted_p50,predicted_p90,predicted_binding,footprint_bytes,peak_bytes";

/// What was built: the commit where the build was told (TIERKEEP_COMMIT), else the version.
pub(super) fn build() -> &'static str {
    option_env!("TIERKEEP_COMMIT").unwrap_or(concat!("v", env!("CARGO_PKG_VERSION")))
}

/// The machine of a plan in a few words.
fn machine(plan: &Plan) -> String {
    let facts = &plan.machine;
    let name = facts.cpu.model_name.value().map_or("unknown processor", String::as_str);
    let threads = facts.cpu.usable_threads.value();
    let threads = threads.map_or_else(|| "?".to_owned(), u64::to_string);
    let memory = facts.memory.usable_bytes.value();
    let memory = memory.map_or_else(|| "?".to_owned(), |&b| format!("{:.0}", b as f64 / 1e9));
    format!("{name}; {threads} threads; {memory} GB available")
}

/// A field of a CSV row, in quotes where it needs them (RFC 4180).
pub(super) fn field(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

/// A line of fields.
pub(super) fn line(fields: &[String]) -> String {
    let fields: Vec<String> = fields.iter().map(|text| field(text)).collect();
    format!("{}\n", fields.join(","))
}

/// A figure with the digits that a measurement has; nothing where there is none.
pub(super) fn figure(value: Option<f64>) -> String {
    match value {
        None => String::new(),
        Some(value) if value.abs() >= 1e6 => format!("{value:.0}"),
        Some(value) => format!("{value:.4}"),
    }
}

/// A line for each row, in the order of [`BENCH_CSV_HEADER`].
pub(crate) fn bench_csv(view: &BenchView<'_>, unix_s: u64) -> String {
    view.rows.iter().map(|row| line(&csv_fields(row, view.stream, unix_s))).collect()
}

fn csv_fields(row: &BenchRow<'_>, stream: &str, unix_s: u64) -> Vec<String> {
    let BenchRow { label, model, plan, summary, .. } = row;
    let engine = &plan.engine;
    let slots = &plan.placement.slots;
    let sum = |counts: &mut dyn Iterator<Item = u64>| counts.sum::<u64>().to_string();
    let median = |repeats: Option<&Repeats>| figure(repeats.map(|r| r.median));
    let decode = summary.decode_tokens_per_s.as_ref();
    let name = model.directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let bytes = |bytes: Option<tierkeep_plans::units::Bytes>| {
        bytes.map_or_else(String::new, |bytes| bytes.0.to_string())
    };
    let expected = &summary.expected;
    vec![
        build().to_owned(),
        date(unix_s),
        machine(plan),
        name,
        model.fingerprint.clone(),
        (*label).to_owned(),
        engine.threads.to_string(),
        engine.isa.clone(),
        word(&engine.numerics),
        word(&engine.kv),
        word(&engine.io),
        engine.prefetch.name().to_owned(),
        engine.prefill_batch.to_string(),
        sum(&mut slots.caps.iter().copied().map(u64::from)),
        sum(&mut slots.pins.iter().map(|pins| pins.len() as u64)),
        plan.request.budget_bytes.0.to_string(),
        plan.request.context.to_string(),
        summary.context.to_string(),
        summary.prefill_tokens.to_string(),
        summary.decode_tokens.to_string(),
        summary.repeats.to_string(),
        stream.to_owned(),
        median(summary.prefill_tokens_per_s.as_ref()),
        median(summary.fill_tokens_per_s.as_ref()),
        median(decode),
        figure(decode.map(|r| r.least)),
        figure(decode.map(|r| r.most)),
        figure(summary.decode_ms_p50),
        figure(summary.decode_ms_p95),
        summary.touched.weights.0.to_string(),
        summary.touched.caches.0.to_string(),
        figure(summary.touched_bytes_per_s),
        figure(summary.memory_bytes_per_s),
        figure(summary.memory_share),
        format!("{:.0}", summary.read_bytes_per_token),
        figure(summary.read_bytes_per_s),
        figure(summary.disk_bytes_per_s),
        figure(summary.limit_tokens_per_s),
        figure(summary.limit_share),
        figure(summary.hit_rate),
        summary.distinct.least.to_string(),
        summary.distinct.median.to_string(),
        summary.distinct.of.to_string(),
        figure(Some(summary.distinct.share)),
        figure(Some(summary.distinct_in_decode.share)),
        summary.is_void.to_string(),
        figure(Some(expected.decode_tokens_per_s.p10)),
        figure(Some(expected.decode_tokens_per_s.p50)),
        figure(Some(expected.decode_tokens_per_s.p90)),
        expected.binding.clone(),
        bytes(summary.held.footprint_bytes),
        bytes(summary.held.peak_bytes),
    ]
}

/// Everything, for programs.
pub(crate) fn bench_json(view: &BenchView<'_>) -> Value {
    let row = |row: &BenchRow<'_>| {
        let BenchRow { name, label, value, model, plan, summary } = row;
        json!({
            "configuration": name,
            "label": label,
            "swept_value": value,
            "model": { "directory": model.directory, "fingerprint": model.fingerprint },
            "machine": machine(plan),
            "engine": plan.engine,
            "budget_bytes": plan.request.budget_bytes,
            "planned_context": plan.request.context,
            "slots": plan.placement.slots.caps,
            "pinned": plan.placement.slots.pins.iter().map(Vec::len).collect::<Vec<_>>(),
            "figures": summary,
            "off_by": summary.off_by(),
        })
    };
    json!({
        "schema_version": SCHEMA_VERSION,
        "build": build(),
        "rounds": view.rounds,
        "warm_up_tokens": view.warm_up,
        "loaded_once": view.is_kept,
        "stream": view.stream,
        "memory": {
            "bytes_per_s": view.bandwidth.largest(),
            "timings": view.bandwidth.figures,
            "source": "measured in this run by a process beside it; the largest counts",
            "unknown": view.bandwidth.unknown,
        },
        "usage_history": view.usage,
        "ended": if view.interrupted { "interrupted" } else { "done" },
        "rows": view.rows.iter().map(row).collect::<Vec<_>>(),
    })
}
