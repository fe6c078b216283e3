//! Plans, and what does not fit.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Value, json};
use tierkeep_plans::budget::Ledger;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::place::DoesNotFit;
use tierkeep_plans::plan::{Plan, Range};
use tierkeep_plans::units::Bytes;

use super::style::Tone;
use super::{Style, note, percent, speed, table};

/// The ledger with its sum, line by line.
fn ledger(ledger: &Ledger, budget: Bytes, style: Style) -> String {
    let mut rows = table::table(style, &["ledger", "bytes", "", "what it is"]);
    for line in &ledger.0 {
        rows.add_row([
            line.line.name().to_owned(),
            line.bytes.0.to_string(),
            line.bytes.to_string(),
            line.note.clone(),
        ]);
    }
    let total = ledger.total();
    rows.add_row(["sum".to_owned(), total.0.to_string(), total.to_string(), String::new()]);
    rows.add_row(["budget".to_owned(), budget.0.to_string(), budget.to_string(), String::new()]);
    table::right(&mut rows, 1);
    table::right(&mut rows, 2);
    table::text(&rows)
}

/// Slots as runs of layers with the same cap: `layers 3-77: 5`.
fn caps(caps: &[u32], is_expert_layer: impl Fn(usize) -> bool) -> String {
    let mut runs: Vec<(usize, usize, u32)> = Vec::new();
    for (layer, &cap) in caps.iter().enumerate().filter(|(layer, _)| is_expert_layer(*layer)) {
        match runs.last_mut() {
            Some((_, end, same)) if *same == cap && *end + 1 == layer => *end = layer,
            _ => runs.push((layer, layer, cap)),
        }
    }
    let run = |(start, end, cap): &(usize, usize, u32)| {
        if start == end {
            format!("layer {start}: {cap}")
        } else {
            format!("layers {start}-{end}: {cap}")
        }
    };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}

fn range(range: Range, show: fn(f64) -> String) -> String {
    format!("{} - {} - {}", show(range.p10), show(range.p50), show(range.p90))
}

/// A plan for people.
pub(crate) fn plan(plan: &Plan, model: &Catalogue, style: Style) -> String {
    let spec = &model.spec;
    let n_experts: usize = spec.expert_layers().map(|l| model.layer_experts(l).len()).sum();
    let slots = &plan.placement.slots;
    let n_slots: u64 = slots.caps.iter().map(|&c| u64::from(c)).sum();
    let title = format!("{}: ", plan.model.directory.display());
    let mut text = style.paragraph(
        "",
        &format!(
            "{title}{}, {} in {} files, {n_experts} routed experts in {} layers",
            plan.model.family,
            plan.model.total_bytes,
            model.shards.len(),
            spec.expert_layers().count(),
        ),
    );
    let request = &plan.request;
    let budget = format!("{} ({})", request.budget_bytes, request.budget_source);
    text += &style.paragraph("budget ", &budget);
    text.push('\n');
    text += &ledger(&plan.ledger, request.budget_bytes, style);
    text.push('\n');
    let caps = caps(&slots.caps, |l| spec.is_expert_layer(l));
    text += &style.paragraph("slots   ", &format!("{n_slots} of {n_experts} experts: {caps}"));
    let n_pins: usize = slots.pins.iter().map(Vec::len).sum();
    text += &style.paragraph("pins    ", &format!("{n_pins}; {}", plan.placement.pins_evidence));
    let settings = &plan.engine;
    let settings = format!(
        "{} threads, {}, exact numerics, context {}, batches of {}",
        settings.threads, settings.isa, request.context, settings.prefill_batch
    );
    text += &style.paragraph("engine  ", &settings);
    text.push('\n');
    text += &expected(plan, style);
    text
}

/// The prediction and what it rests on.
fn expected(plan: &Plan, style: Style) -> String {
    let prediction = &plan.prediction;
    let mut text = style.heading("expected    p10 - p50 - p90");
    let _ = writeln!(text, "  decode    {} tokens/s", range(prediction.decode_tokens_per_s, speed));
    let _ = writeln!(text, "  hit rate  {}", range(prediction.hit_rate, percent));
    let _ = writeln!(
        text,
        "  a token   touches {}, reads {} from disk\n  bound by  {}",
        prediction.touched_bytes_per_token,
        prediction.read_bytes_per_token,
        style.paint(Tone::Strong, &prediction.binding)
    );
    text += &style.heading("rests on");
    for evidence in &prediction.evidence {
        text += &style.paragraph("  ", evidence);
    }
    text.push('\n');
    text
}

/// A plan in a few lines on standard error, before it is executed.
pub(crate) fn plan_in_brief(plan: &Plan) {
    let slots: u64 = plan.placement.slots.caps.iter().map(|&c| u64::from(c)).sum();
    let pins: usize = plan.placement.slots.pins.iter().map(Vec::len).sum();
    note(&format!(
        "planned: {} of a budget of {}; {slots} expert slots, {pins} pinned ({}); expected {} tokens/s, hit rate {} (p10 - p50 - p90)",
        plan.ledger.total(),
        plan.request.budget_bytes,
        plan.placement.pins_evidence,
        range(plan.prediction.decode_tokens_per_s, speed),
        range(plan.prediction.hit_rate, percent),
    ));
}

/// The verdict that a model does not fit, with its ledger and the smallest change.
pub(crate) fn does_not_fit(model: &Path, result: &DoesNotFit, style: Style) -> String {
    let mut text = format!("{} does not fit in {}\n\n", model.display(), result.budget);
    text += &ledger(&result.ledger, result.budget, style);
    let _ = writeln!(
        text,
        "\nthe smallest budget that would do: --ram {} ({}); this ledger has no expert slot",
        result.smallest_budget.0, result.smallest_budget
    );
    match result.context_that_fits {
        Some(context) => {
            let _ = writeln!(text, "or a shorter context: --ctx {context}");
        }
        None => text += "no context is short enough for this budget\n",
    }
    text
}

/// The same as JSON; `message` is the verdict in a line.
pub(crate) fn does_not_fit_json(model: &Path, message: &str, result: &DoesNotFit) -> Value {
    json!({
        "schema_version": 1,
        "error": { "kind": "plan.does_not_fit", "message": message },
        "fits": false,
        "model": model,
        "budget_bytes": result.budget,
        "smallest_budget_bytes": result.smallest_budget,
        "context_that_fits": result.context_that_fits,
        "ledger": result.ledger,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caps_are_shown_as_runs() {
        assert_eq!(caps(&[0, 5, 5, 4, 5], |l| l > 0), "layers 1-2: 5, layer 3: 4, layer 4: 5");
        assert_eq!(caps(&[], |_| true), "");
    }
}
