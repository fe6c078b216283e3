//! Plans, and what does not fit.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};
use tierkeep_plans::budget::{CardPlacement, DenseResidency, EmbeddingResidency, Line};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::place::DoesNotFit;
use tierkeep_plans::plan::{Abilities, Need, Plan, Prefetch, Range};
use tierkeep_plans::planner::{Advice, FittingChange, WouldFit};
use tierkeep_plans::units::{Bytes, runs};
use tierkeep_plans::what_if::Replaced;

use super::ledger::{ledger, lines};
use super::style::Tone;
use super::{Style, count, files, percent, plural, seconds, speed, table};
use crate::commands::shared::Lack;

/// A plan and what is told of it beside it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct PlanView<'a> {
    /// The plan.
    #[serde(flatten)]
    pub(crate) plan: &'a Plan,
    /// What was changed in the facts before planning.
    #[serde(rename = "what_if", skip_serializing_if = "<[_]>::is_empty")]
    pub(crate) replaced: &'a [Replaced],
    /// What would make it faster.
    pub(crate) advice: &'a [Advice],
    /// What the engine of this build cannot execute.
    pub(crate) lacks: &'a [Lack],
}

impl<'a> PlanView<'a> {
    /// A plan of which nothing more is told.
    pub(crate) fn bare(plan: &'a Plan) -> Self {
        Self { plan, replaced: &[], advice: &[], lacks: &[] }
    }
}

/// The same for programs: the plan's own fields, and the rest beside them.
pub(crate) fn plan_json(view: &PlanView<'_>) -> anyhow::Result<Value> {
    let mut value = serde_json::to_value(view)?;
    if let Some(object) = value.as_object_mut() {
        object.insert("schema_version".to_owned(), json!(1));
    }
    Ok(value)
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
pub(crate) fn plan(view: &PlanView<'_>, model: &Catalogue, style: Style) -> String {
    let plan = view.plan;
    let mut text = title(plan, model, style);
    for replaced in view.replaced {
        let was = match replaced.was.as_str() {
            "unknown" => "the facts do not say".to_owned(),
            was => format!("the facts say {was}"),
        };
        let change = format!("{} {} ({was})", replaced.key, replaced.is);
        text += &style.paragraph("what if  ", &change);
    }
    let request = &plan.request;
    let budget = format!("{} ({})", request.budget_bytes, request.budget_source);
    text += &style.paragraph("budget   ", &budget);
    if !plan.placement.cards.is_empty() {
        let vram = format!("{} ({})", request.vram_bytes, request.vram_source);
        text += &style.paragraph("vram     ", &vram);
    }
    text.push('\n');
    text += &ledger(&plan.ledger, request.budget_bytes, style);
    for card in &plan.placement.cards {
        text.push('\n');
        text += &card_ledger(card, style);
    }
    text.push('\n');
    text += &tiers(plan, style);
    text.push('\n');
    text += &placement(plan, model, style);
    text.push('\n');
    text += &expected(plan, style);
    if !view.advice.is_empty() {
        text.push('\n');
        text += &advice(view.advice, style);
    }
    for lack in view.lacks {
        let finding = format!("the engine of this build cannot execute {}", lack.what);
        text.push('\n');
        let warning = format!("{finding}; {}", lack.remedy);
        text += &style.toned_paragraph(Tone::Warn, "warning: ", &warning);
    }
    text.push('\n');
    text
}

fn title(plan: &Plan, model: &Catalogue, style: Style) -> String {
    let spec = &model.spec;
    let n_experts: usize = spec.expert_layers().map(|l| model.layer_experts(l).len()).sum();
    let mtp = if model.n_mtp_layers_present > 0 {
        "; the multi-token-prediction layer is not loaded"
    } else {
        ""
    };
    let about = format!(
        "{}, {} in {}, {} in {}{mtp}",
        plan.model.family,
        plan.model.total_bytes,
        files(model.shards.len()),
        plural(n_experts as u64, "routed expert", "routed experts"),
        plural(spec.expert_layers().count() as u64, "layer", "layers"),
    );
    style.paragraph("", &plan.model.directory.display().to_string())
        + &style.paragraph("", &about)
        + "\n"
}

fn card_ledger(card: &CardPlacement, style: Style) -> String {
    let title = format!("card {}: {}", card.card, card.name);
    let all = card.ledger.0.iter().map(|l| (l.line.name(), l.bytes, l.note.as_str()));
    lines(&title, all, card.budget_bytes, style)
}

fn tiers(plan: &Plan, style: Style) -> String {
    let mut rows = table::table(style, &["experts in", "number", "bytes", "accesses expected"]);
    for tier in plan.tiers.iter().filter(|tier| tier.experts > 0) {
        rows.add_row([
            tier.tier.name().to_owned(),
            count(tier.experts),
            tier.bytes.to_string(),
            percent(tier.access_share),
        ]);
    }
    for column in 1..=3 {
        table::right(&mut rows, column);
    }
    table::text(&rows)
}

/// Slots, pins, what is streamed, and how the engine is set.
fn placement(plan: &Plan, model: &Catalogue, style: Style) -> String {
    let spec = &model.spec;
    let placement = &plan.placement;
    let slots = &placement.slots;
    let n_slots: u64 = slots.caps.iter().map(|&c| u64::from(c)).sum();
    let caps = caps(&slots.caps, |l| spec.is_expert_layer(l));
    let held = match n_slots {
        0 => "none in main memory".to_owned(),
        n => format!("{}; {caps}", count(n)),
    };
    let mut text = style.paragraph("slots    ", &held);
    let n_pins: usize = slots.pins.iter().map(Vec::len).sum();
    let pins = match n_pins {
        0 => placement.pins_evidence.clone(),
        n => format!("{}; {}", count(n as u64), placement.pins_evidence),
    };
    text += &style.paragraph("pins     ", &pins);
    text += &style.paragraph("policy   ", &placement.policy_evidence);
    text += &style.paragraph("cache    ", &placement.cache_evidence);
    let reads = format!("{}: {}", plan.engine.io.name(), plan.engine.io_evidence);
    text += &style.paragraph("reads    ", &reads);
    match plan.engine.prefetch {
        Prefetch::Off => {}
        Prefetch::Exact => {
            let hidden = seconds(plan.prediction.hidden_read_seconds);
            let what = format!(
                "exact: a layer knows its experts a sub-block early, and reads those that are missing \
                 while it computes; {hidden} a token are hidden so (computed)"
            );
            text += &style.paragraph("prefetch ", &what);
        }
    }
    match placement.dense {
        DenseResidency::Resident => {}
        DenseResidency::Mapped => {
            let what = "dense weights are computed on where they lie in the page cache; under memory \
                        pressure the system takes pages back and reads them again";
            text += &style.paragraph("mapped   ", what);
        }
    }
    let streamed = &placement.streamed;
    if !streamed.layers.is_empty() || streamed.head {
        let layers = runs(streamed.layers.iter().map(|&layer| layer as usize));
        let head = if streamed.head { " and the head" } else { "" };
        let bytes = plan.prediction.streamed_bytes_per_token;
        let what = format!(
            "dense weights of {} ({layers}){head}: {bytes} are read for every token",
            plural(streamed.layers.len() as u64, "layer", "layers")
        );
        text += &style.paragraph("streamed ", &what);
    }
    let engine = &plan.engine;
    let embedding = match engine.embedding {
        EmbeddingResidency::Resident => "resident",
        EmbeddingResidency::RowRead => "read by rows",
    };
    let sessions = match plan.request.sessions {
        1 => String::new(),
        n => format!("{n} sequences of "),
    };
    let settings = format!(
        "{}, {}, {} numerics, {sessions}{} of context, KV cache in {}, batches of {}, embedding \
         {embedding}",
        plural(engine.threads, "thread", "threads"),
        engine.isa,
        engine.numerics.name(),
        plural(plan.request.context, "token", "tokens"),
        format!("{:?}", engine.kv).to_lowercase(),
        plural(engine.prefill_batch, "token", "tokens")
    );
    text += &style.paragraph("engine   ", &settings);
    text
}

/// The prediction and what it rests on.
fn expected(plan: &Plan, style: Style) -> String {
    let prediction = &plan.prediction;
    let mut text = style.heading("expected    p10 - p50 - p90");
    let _ = writeln!(text, "  decode    {} tokens/s", range(prediction.decode_tokens_per_s, speed));
    let _ = writeln!(text, "  hit rate  {}", range(prediction.hit_rate, percent));
    let streamed = match prediction.streamed_bytes_per_token {
        Bytes(0) => String::new(),
        bytes => format!(" and {bytes} of dense weights"),
    };
    let touched = format!(
        "touches {}, reads {} of missed experts{streamed} from disk",
        prediction.touched_bytes_per_token, prediction.read_bytes_per_token
    );
    text += &style.paragraph("  a token   ", &touched);
    text.push('\n');
    let all: f64 = prediction.terms.iter().map(|term| term.seconds).sum();
    let mut rows = table::table(style, &["time of a token", "", "share"]);
    for term in &prediction.terms {
        let binds = term.name == prediction.binding;
        let tone = if binds { Tone::Strong } else { Tone::Plain };
        rows.add_row([
            tone.cell(&term.name),
            tone.cell(seconds(term.seconds)),
            tone.cell(percent(term.seconds / all.max(f64::MIN_POSITIVE))),
            tone.cell(if binds { "binds" } else { "" }),
        ]);
    }
    table::right(&mut rows, 1);
    table::right(&mut rows, 2);
    text += &table::text(&rows);
    text.push('\n');
    text += &style.heading("rests on");
    for evidence in &prediction.evidence {
        text += &style.paragraph("  ", evidence);
    }
    text
}

/// What would make it faster, and by how much.
fn advice(advice: &[Advice], style: Style) -> String {
    let mut rows = table::table(style, &["what would help", "tokens/s", "", ""]);
    for one in advice {
        rows.add_row([
            one.what.clone(),
            format!("{} to {}", speed(one.tokens_per_s_before), speed(one.tokens_per_s_after)),
            format!("x{:.2}", one.ratio),
            one.note.clone(),
        ]);
    }
    table::right(&mut rows, 1);
    table::right(&mut rows, 2);
    table::text(&rows)
}

/// A plan in a few lines, before it is executed.
pub(crate) fn plan_in_brief(plan: &Plan, style: Style) -> String {
    let slots: u64 = plan.placement.slots.caps.iter().map(|&c| u64::from(c)).sum();
    let pins: usize = plan.placement.slots.pins.iter().map(Vec::len).sum();
    let brief = format!(
        "{} of a budget of {}; {}, {} pinned ({}); expected {} tokens/s, hit rate {} (p10 - p50 - p90)",
        plan.ledger.total(),
        plan.request.budget_bytes,
        plural(slots, "expert slot", "expert slots"),
        count(pins as u64),
        plan.placement.pins_evidence,
        range(plan.prediction.decode_tokens_per_s, speed),
        range(plan.prediction.hit_rate, percent),
    );
    style.paragraph("planned: ", &brief)
}

/// A model that does not fit, and what would make it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Misfit<'a> {
    /// The model as it was asked for.
    pub(crate) model: &'a Path,
    /// Its ledger.
    pub(crate) result: &'a DoesNotFit,
    /// What would make it fit.
    pub(crate) would_fit: &'a WouldFit,
    /// What the engine of this build can do.
    pub(crate) engine: Abilities,
}

/// The verdict that a model does not fit, with its ledger and every change with which it does.
pub(crate) fn does_not_fit(misfit: &Misfit<'_>, style: Style) -> String {
    let Misfit { model, result, would_fit, engine } = *misfit;
    let verdict = style.paint(Tone::Fail, &format!("does not fit in {}", result.budget));
    let mut text = format!("{} {verdict}\n\n", model.display());
    text += &ledger(&result.ledger, result.budget, style);
    text.push('\n');
    let slots = result.ledger.bytes(Line::PinnedExperts) + result.ledger.bytes(Line::ExpertCache);
    let none = if slots == Bytes(0) { ": no expert has a slot" } else { "" };
    text += &style.paragraph("", &format!("this is the smallest placement{none}"));
    text.push('\n');
    let mut rows = table::table(style, &["what would make it fit", "needs", ""]);
    let mut row = |flag: String, needs: Bytes, what: &str, lack: Option<Need>| {
        let is_beyond = lack.is_some_and(|need| !engine.has(need));
        let lack = if is_beyond { "; not with the engine of this build" } else { "" };
        rows.add_row([flag, needs.to_string(), format!("{what}{lack}")]);
    };
    if let Some(budget) = would_fit.resident_budget {
        let what = "the smallest budget with all dense weights in memory";
        row(format!("--ram {}", budget.0), budget, what, None);
    }
    if let Some(budget) = would_fit.streamed_budget {
        let what = "the smallest budget with dense weights read for every token";
        row(format!("--ram {}", budget.0), budget, what, Some(Need::StreamedDense));
    }
    for change in &would_fit.changes {
        row(change.flag.clone(), change.needs_bytes, &change.what, change.needs);
    }
    table::whole(&mut rows, 0);
    table::whole(&mut rows, 1);
    table::right(&mut rows, 1);
    text += &table::text(&rows);
    if would_fit.changes.is_empty() {
        text.push('\n');
        let none =
            "within this budget no other single change is enough, a shorter context included";
        text += &style.paragraph("", none);
    }
    text
}

/// The same as JSON; `message` is the verdict in a line.
pub(crate) fn does_not_fit_json(misfit: &Misfit<'_>, message: &str) -> Value {
    let Misfit { model, result, would_fit, engine } = *misfit;
    let change = |change: &FittingChange| {
        json!({
            "change": change.change,
            "flag": change.flag,
            "what": change.what,
            "needs_bytes": change.needs_bytes,
            "can_execute": change.needs.is_none_or(|need| engine.has(need)),
        })
    };
    json!({
        "schema_version": 1,
        "error": { "kind": "plan.does_not_fit", "message": message },
        "fits": false,
        "model": model,
        "budget_bytes": result.budget,
        "smallest_budget_bytes": result.smallest_budget,
        "resident_budget_bytes": would_fit.resident_budget,
        "streamed_budget_bytes": would_fit.streamed_budget,
        "can_stream": engine.has(Need::StreamedDense),
        "context_that_fits": result.context_that_fits,
        "changes_that_fit": would_fit.changes.iter().map(change).collect::<Vec<_>>(),
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
