//! `tierkeep usage import MODEL FILE`: counts of another engine, taken in as one session.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::json;
use tierkeep_plans::usage;

use crate::args::UsageImportArgs;
use crate::commands::{Context, shared};
use crate::exit::Outcome;
use crate::render;

/// Longest text: 65,536 experts with counts of twenty digits take a twentieth of it.
const MAX_TEXT_BYTES: u64 = 64 << 20;

pub(super) fn run(args: &UsageImportArgs, context: &Context) -> Result<Outcome> {
    let (model, path) = super::history_of(&args.history, context)?;
    let name = args.file.display();
    let text = read(&args.file)?;
    let spec = &model.spec;
    // Other engines number a layer of multi-token prediction after the others.
    let n_layers = spec.n_layers + spec.n_mtp_layers.unwrap_or(0).max(1);
    let n_experts = spec.router.n_experts as u32;
    let counts = usage::import_counts(&text, n_layers as u32, n_experts)
        .with_context(|| format!("{name}"))?;
    let mut session = shared::session(&model);
    let taken = counts.taken(session.shape());
    if taken.accesses == 0 {
        bail!("{name} has no counts in layers that route to experts: nothing was imported");
    }
    let mut n_sessions = None;
    if !args.dry_run {
        session.record_counts(&counts);
        let saved = usage::save(&path, &mut session)?;
        if let Some(aside) = &saved.set_aside {
            let (path, aside) = (path.display(), aside.display());
            render::warning(&format!("{path} was damaged and has been moved to {aside}"));
        }
        n_sessions = Some(saved.history.n_sessions());
    }
    if context.json {
        render::json(&json!({
            "schema_version": 1, "file": path, "taken": taken,
            "is_dry_run": args.dry_run, "n_sessions": n_sessions,
        }))?;
    } else {
        let n_mtp_from = spec.n_layers as u32;
        render::data(&render::imported(&path, &taken, n_mtp_from, n_sessions, context.style))?;
    }
    Ok(Outcome::Fine)
}

fn read(file: &Path) -> Result<String> {
    let mut text = String::new();
    let name = file.display();
    let n = if file == Path::new("-") {
        io::stdin().lock().take(MAX_TEXT_BYTES + 1).read_to_string(&mut text)
    } else {
        File::open(file).and_then(|file| file.take(MAX_TEXT_BYTES + 1).read_to_string(&mut text))
    };
    let n = n.with_context(|| format!("cannot read {name}"))?;
    if n as u64 > MAX_TEXT_BYTES {
        bail!("{name} has more than {MAX_TEXT_BYTES} bytes: no list of counts is as long");
    }
    Ok(text)
}
