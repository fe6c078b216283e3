//! `tierkeep usage reset MODEL`: the history is moved aside, or deleted where that is asked for.

use anyhow::Result;
use serde_json::json;
use tierkeep_plans::usage::{self, Reset};

use crate::args::UsageResetArgs;
use crate::commands::Context;
use crate::exit::Outcome;
use crate::render;

pub(super) fn run(args: &UsageResetArgs, context: &Context) -> Result<Outcome> {
    let (model, path) = super::history_of(&args.history, context)?;
    let reset = usage::reset(&path, &model.fingerprint, args.delete)?;
    if context.json {
        let (what, to) = match &reset {
            Reset::Absent => ("absent", None),
            Reset::MovedTo(to) => ("moved", Some(to)),
            Reset::Deleted => ("deleted", None),
        };
        render::json(&json!({
            "schema_version": 1, "file": path, "outcome": what, "moved_to": to,
        }))?;
    } else {
        render::data(&render::reset(&path, &reset, context.style))?;
    }
    Ok(Outcome::Fine)
}
