//! `tierkeep plan ... --explain WHAT`: the last step of a plan that was made or read.

use anyhow::Result;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::explain::{self, Subject};
use tierkeep_plans::plan::Plan;
use tierkeep_plans::usage::History;

use crate::commands::Context;
use crate::exit::Outcome;
use crate::render;

pub(crate) fn run(
    what: &str,
    (model, plan): (&Catalogue, &Plan),
    history: Option<&History>,
    context: &Context,
) -> Result<Outcome> {
    let subject = Subject::find(model, what)?;
    let explanation = explain::explain(subject, model, plan, history);
    if context.json {
        render::json(&serde_json::json!({
            "schema_version": 1, "explanation": explanation,
        }))?;
    } else {
        render::data(&render::explanation(&explanation, context.style))?;
    }
    Ok(Outcome::Fine)
}
