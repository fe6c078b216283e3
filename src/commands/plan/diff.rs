//! `tierkeep plan --diff A B`.

use std::path::Path;

use anyhow::Result;
use tierkeep_plans::compare;
use tierkeep_plans::plan::Plan;

use crate::commands::Context;
use crate::exit::Outcome;
use crate::render;

pub(crate) fn run(first: &Path, second: &Path, context: &Context) -> Result<Outcome> {
    let differences = compare::compare(&Plan::read(first)?, &Plan::read(second)?)?;
    if context.json {
        render::json(&serde_json::json!({
            "schema_version": 1, "first": first, "second": second, "differences": differences,
        }))?;
    } else {
        render::data(&render::differences(first, second, &differences, context.style))?;
    }
    Ok(Outcome::Fine)
}
