//! `tierkeep doctor [MODEL]`.

use anyhow::Result;
use tierkeep_engine::text::Text;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::checks::{self, Check, Status};
use tierkeep_plans::planner::{self, Options, PlanRefusal};

use super::{Context, shared};
use crate::args::DoctorArgs;
use crate::exit::Outcome;
use crate::render;

pub(crate) fn run(args: &DoctorArgs, context: &Context) -> Result<Outcome> {
    let absolute = args.model.as_ref().map(|m| m.canonicalize().unwrap_or_else(|_| m.clone()));
    let catalogue = absolute.as_deref().map(Catalogue::open);
    let model = catalogue.as_ref().and_then(|c| c.as_ref().ok());
    // Without a model, the disk that is looked at is that of the current folder.
    let directory = absolute.as_deref().or(context.work_dir.as_deref());
    let facts = shared::facts(context, model, directory, !args.no_measure);
    let mut all = checks::machine_checks(&facts);
    if let Some(catalogue) = &catalogue {
        all.extend(checks::model_checks(catalogue));
        if let Ok(model) = catalogue {
            all.push(engine_check(model));
            all.extend(text_checks(model));
            all.push(budget_check(model, &facts));
        }
    }
    if context.json {
        render::json(&serde_json::json!({
            "schema_version": 1, "facts": facts, "checks": all,
        }))?;
    } else {
        render::data(&render::facts(&facts, context.style))?;
        render::data(&render::checks(args.model.as_deref(), &all, context.style))?;
    }
    let any = |status| all.iter().any(|c: &Check| c.status == status);
    Ok(if any(Status::Fail) {
        Outcome::Verdict
    } else if any(Status::Warn) {
        Outcome::Warnings
    } else {
        Outcome::Fine
    })
}

/// Whether this build runs the model, or only plans it.
fn engine_check(model: &Catalogue) -> Check {
    let id = "model.engine";
    match tierkeep_engine::supports(model) {
        Ok(()) => Check::ok(id, "this build runs it"),
        Err(lacking) => Check::warn(
            id,
            format!(
                "this build plans {} and does not run it yet: {}",
                lacking.family, lacking.what
            ),
            "plan it with this build, run it with a newer one",
        ),
    }
}

fn text_checks(model: &Catalogue) -> Vec<Check> {
    match Text::open(&model.directory) {
        Err(error) => vec![
            Check::warn("model.tokenizer", error.to_string(), "give token ids with --ids"),
            Check::skip("model.chat_template"),
        ],
        Ok(text) => {
            let tokenizer = Check::ok("model.tokenizer", format!("{} tokens", text.vocab_size()));
            let template = if text.has_chat_template() {
                Check::ok("model.chat_template", "present")
            } else {
                Check::warn("model.chat_template", "there is none", "prompts are given as they are")
            };
            vec![tokenizer, template]
        }
    }
}

/// Whether the model fits in the budget that would be chosen without any option.
fn budget_check(model: &Catalogue, facts: &tierkeep_doctor::Facts) -> Check {
    let id = "model.budget";
    let options = Options { engine: tierkeep_engine::ABILITIES, ..Options::default() };
    match planner::plan(model, facts, &options, None) {
        Ok(plan) => Check::ok(
            id,
            format!("fits: {} of a budget of {}", plan.ledger.total(), plan.request.budget_bytes),
        ),
        Err(PlanRefusal::DoesNotFit { result, .. }) => Check::fail(
            id,
            format!("needs {}, {} to give", result.smallest_budget, result.budget),
            "see `tierkeep plan` for the ledger",
        ),
        Err(other) => Check::warn(id, other.to_string(), "give a budget with --ram"),
    }
}
