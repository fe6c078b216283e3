//! Plans, and what does not fit.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;
use tierkeep_plans::budget::Ledger;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::place::DoesNotFit;
use tierkeep_plans::plan::{Plan, Range};
use tierkeep_plans::units::Bytes;

use super::{data, note, percent, speed, table};

/// The ledger with its sum, line by line.
fn ledger(ledger: &Ledger, budget: Bytes) -> String {
    let mut rows = table::table(&["ledger", "bytes", "", "what it is"]);
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
pub(crate) fn plan(plan: &Plan, model: &Catalogue) -> Result<()> {
    let spec = &model.spec;
    let n_experts: usize = spec.expert_layers().map(|l| model.layer_experts(l).len()).sum();
    let slots = &plan.placement.slots;
    let n_slots: u64 = slots.caps.iter().map(|&c| u64::from(c)).sum();
    let mut text = format!(
        "{}: {}, {} in {} files, {} routed experts in {} layers\n",
        plan.model.directory.display(),
        plan.model.family,
        plan.model.total_bytes,
        model.shards.len(),
        n_experts,
        spec.expert_layers().count(),
    );
    let _ =
        writeln!(text, "budget {} ({})\n", plan.request.budget_bytes, plan.request.budget_source);
    text += &ledger(&plan.ledger, plan.request.budget_bytes);
    let _ = writeln!(
        text,
        "\nslots       {n_slots} of {n_experts} experts: {}",
        caps(&slots.caps, |l| spec.is_expert_layer(l))
    );
    let n_pins: usize = slots.pins.iter().map(Vec::len).sum();
    let _ = writeln!(text, "pins        {n_pins}; {}", plan.placement.pins_evidence);
    let settings = &plan.engine;
    let _ = writeln!(
        text,
        "engine      {} threads, {}, exact numerics, context {}, batches of {}",
        settings.threads, settings.isa, plan.request.context, settings.prefill_batch
    );
    text += "\nexpected    p10 - p50 - p90\n";
    let prediction = &plan.prediction;
    let _ = writeln!(text, "  decode    {} tokens/s", range(prediction.decode_tokens_per_s, speed));
    let _ = writeln!(text, "  hit rate  {}", range(prediction.hit_rate, percent));
    let _ = writeln!(
        text,
        "  a token   touches {}, reads {} from disk; bound by {}",
        prediction.touched_bytes_per_token, prediction.read_bytes_per_token, prediction.binding
    );
    text += "rests on\n";
    for evidence in &prediction.evidence {
        let _ = writeln!(text, "  {evidence}");
    }
    text.push('\n');
    data(&text)
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
pub(crate) fn does_not_fit(model: &Path, result: &DoesNotFit) -> Result<()> {
    let mut text = format!("{} does not fit in {}\n\n", model.display(), result.budget);
    text += &ledger(&result.ledger, result.budget);
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
    data(&text)
}

/// The same as JSON.
pub(crate) fn does_not_fit_json(model: &Path, result: &DoesNotFit) -> serde_json::Value {
    serde_json::json!({
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
