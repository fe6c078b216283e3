//! `tierkeep usage show MODEL`: reads, and leaves the file as it is even where it is damaged.

use anyhow::{Context as _, Result};
use serde_json::json;
use tierkeep_plans::units::LayerId;
use tierkeep_plans::usage::{self, Summary};

use super::Unusable;
use crate::args::UsageShowArgs;
use crate::commands::Context;
use crate::exit::Outcome;
use crate::render;

pub(super) fn run(args: &UsageShowArgs, context: &Context) -> Result<Outcome> {
    let (model, path) = super::history_of(&args.history, context)?;
    let found =
        usage::look(&path, &model.fingerprint).map_err(|reason| Unusable::new(&path, reason))?;
    let Some(found) = found else {
        if context.json {
            render::json(&json!({ "schema_version": 1, "file": path, "history": null }))?;
        } else if !args.counts {
            render::data(&render::no_history(&path, context.style))?;
        }
        return Ok(Outcome::Fine);
    };
    if args.counts {
        render::data(&usage::render_counts(&found.history))?;
        return Ok(Outcome::Fine);
    }
    let layer = args.layer.map(LayerId);
    let experts = match layer {
        None => None,
        Some(layer) => {
            let experts = usage::experts_of_layer(&found.history, layer);
            Some((
                layer,
                experts.with_context(|| format!("layer {} has no routed experts", layer.0))?,
            ))
        }
    };
    let summary = Summary::of(&found.history);
    if context.json {
        let mut json = json!({
            "schema_version": 1, "file": path, "file_bytes": found.bytes,
            "format_version": found.version, "history": summary,
        });
        if let (Some((layer, experts)), Some(json)) = (&experts, json.as_object_mut()) {
            let layer = json!({ "layer": layer, "experts": experts });
            json.insert("layer".to_owned(), layer);
        }
        render::json(&json)?;
    } else if let Some((layer, experts)) = &experts {
        let n_experts = summary.n_experts;
        render::data(&render::history_layer(layer.0, n_experts, experts, context.style))?;
    } else {
        let view = render::HistoryView {
            path: &path,
            version: found.version,
            bytes: found.bytes,
            summary: &summary,
        };
        render::data(&render::history(&view, context.style))?;
    }
    Ok(Outcome::Fine)
}
