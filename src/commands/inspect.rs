//! `tierkeep inspect MODEL`.

use anyhow::Result;
use tierkeep_plans::catalogue::{Catalogue, CatalogueError, ConfigError, Folder, Outline, Source};
use tierkeep_plans::inspect::Inspection;

use super::Context;
use super::model::{self, Place, There};
use crate::args::InspectArgs;
use crate::exit::Outcome;
use crate::render;

pub(crate) fn run(args: &InspectArgs, context: &Context) -> Result<Outcome> {
    let (inspection, download) = match model::locate(&args.model, &context.hub)? {
        Place::Here(path) => match Catalogue::open_cached(&path, context.data_dir.as_deref()) {
            Ok(model) => (Inspection::of(&model), None),
            Err(error) => (outline(error, &Folder::new(&path))?, None),
        },
        Place::There(reference) => {
            let there = There::look(&reference, context)?;
            let inspection = match Catalogue::open_from(&there) {
                Ok(model) => Inspection::of(&model),
                Err(error) => outline(error, &there)?,
            };
            (inspection, Some(there.download(args.remote.bandwidth, context)))
        }
    };
    if context.json {
        let mut json = serde_json::json!({ "schema_version": 1, "inspection": inspection });
        if let (Some(download), Some(json)) = (&download, json.as_object_mut()) {
            json.insert("download".to_owned(), render::download_json(download));
        }
        render::json(&json)?;
    } else {
        render::data(&render::inspection(&inspection, context.style))?;
        if let Some(download) = &download {
            render::data(&format!("\n{}", render::download(download, context.style)))?;
        }
    }
    Ok(if inspection.caveat.is_none() && inspection.warnings.is_empty() {
        Outcome::Fine
    } else {
        Outcome::Warnings
    })
}

/// A model of a family that nobody knows has its sizes by role all the same.
fn outline(error: CatalogueError, source: &dyn Source) -> Result<Inspection, CatalogueError> {
    match error {
        CatalogueError::Config { source: ConfigError::UnknownFamily { .. }, .. } => {
            let outline = Outline::open_from(source)?;
            Ok(Inspection::outline(source.label(), &outline))
        }
        error => Err(error),
    }
}
