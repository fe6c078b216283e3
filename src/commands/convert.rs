//! `tierkeep convert MODEL OUT`.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Result, bail};
use tierkeep_engine::convert::{
    self, ConvertError, ConvertOptions, DEFAULT_SHARD_BYTES, Execution, Forecast, Packing,
};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

use super::{Context, model, shared};
use crate::args::ConvertArgs;
use crate::exit::Outcome;
use crate::render::{self, Bar, Cost, DryRun, PlanAfter};

pub(crate) fn run(args: &ConvertArgs, context: &Context) -> Result<Outcome> {
    let options = options(args)?;
    let directory = model::folder_for(&args.model, "convert", context)?;
    let model = match open(&directory, &args.out, context) {
        Err(_) if args.consume && !args.dry_run && convert::is_finished(&args.out, &options) => {
            return all_is_done(args, context);
        }
        other => other?,
    };
    let forecast = convert::forecast(&model, &args.out, &options)?;
    if args.dry_run {
        return dry_run(args, (&forecast, Cost::of(&options)), context);
    }
    let needed = if args.consume { forecast.peak_consuming } else { forecast.bytes_out };
    check_room(&args.out, needed, args.consume)?;
    if args.consume {
        let n = model.shards.len();
        render::note(&format!(
            "--consume: the {n} weight files of {} ({}) are deleted one after the other as they become \
             unnecessary; config, tokenizer and all else stay",
            directory.display(),
            model.total_bytes()
        ));
        if forecast.unrecognised_bytes > Bytes(0) {
            render::warning(&format!(
                "{} of tensors that no table knows are deleted with them and are in no output",
                forecast.unrecognised_bytes
            ));
        }
    }
    let execution = Execution {
        threads: args.threads.map(std::num::NonZeroUsize::get),
        read_back: args.read_back,
        consume: args.consume,
        restart: args.restart,
    };
    let cost = Cost::of(&options);
    let started = Instant::now();
    let heeding = context.heeding();
    let bar = Bar::bytes("converting");
    let mut files = (0, 0);
    let mut read_before = None;
    let mut read = Bytes(0);
    let result = convert::convert(&model, &args.out, &options, &execution, &mut |progress| {
        if files.0 != progress.file {
            bar.message(&format!("converting, file {} of {}", progress.file, progress.files));
        }
        files = (progress.file, progress.files);
        read_before.get_or_insert(progress.bytes_read);
        read = progress.bytes_read;
        bar.set(progress.bytes_read.0, progress.bytes_read_total.0);
        if context.interrupted.load(Ordering::SeqCst) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    drop(bar);
    drop(heeding);
    let report = match result {
        Err(ConvertError::Interrupted) => {
            let (file, files) = files;
            render::note(&format!(
                "interrupted: {} of {files} files are finished in {}; the same command goes on from there",
                file.saturating_sub(1),
                args.out.display()
            ));
            return Ok(Outcome::Interrupted);
        }
        other => other?,
    };
    let elapsed = started.elapsed();
    if context.json {
        let mut json = serde_json::to_value(&report)?;
        if let Some(object) = json.as_object_mut() {
            object.insert("quality".to_owned(), Cost::json(cost.as_ref()));
            object.insert("schema_version".to_owned(), 2.into());
            object.insert("seconds".to_owned(), elapsed.as_secs_f64().into());
        }
        render::json(&json)?;
    } else {
        render::data(&render::conversion(
            (&args.out, &report, cost.as_ref()),
            elapsed,
            context.style,
        ))?;
    }
    Ok(Outcome::Fine)
}

/// The source is consumed and the output is whole: the same command was given again, or the one that did
/// the work was killed at its very end.
fn all_is_done(args: &ConvertArgs, context: &Context) -> Result<Outcome> {
    if context.json {
        render::json(&serde_json::json!({ "schema_version": 2, "was_finished": true }))?;
    } else {
        render::data(&render::was_finished(&args.out))?;
    }
    Ok(Outcome::Fine)
}

fn options(args: &ConvertArgs) -> Result<ConvertOptions> {
    let shard_bytes = match args.shard {
        None => DEFAULT_SHARD_BYTES,
        Some(SizeRequest::Absolute(bytes)) => bytes,
        Some(SizeRequest::Percent(_)) => bail!("--shard takes a size such as 5GB, not a share"),
    };
    Ok(ConvertOptions {
        experts: args.experts,
        dense: args.dense,
        embedding: args.embedding,
        mtp: args.mtp,
        packing: Packing { group: args.group, scale: args.scales },
        shard_bytes,
    })
}

/// The model, a part of which an earlier try with `--consume` may have deleted.
fn open(directory: &Path, out: &Path, context: &Context) -> Result<Catalogue> {
    let absolute = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    match convert::open_consumed(&absolute, out) {
        Some(model) => Ok(model?),
        None => shared::open_model(context, &absolute),
    }
}

/// Free bytes of the disk that OUT is or will be on.
fn free_bytes(out: &Path) -> Option<Bytes> {
    let disk = shared::disk(shared::existing_ancestor(out).as_deref());
    disk.free_bytes.value().copied().map(Bytes)
}

/// Whether the disk has room, what an earlier try wrote counted as room.
fn check_room(out: &Path, needed: Bytes, consumes: bool) -> Result<()> {
    let there = written(out);
    let Some(free) = free_bytes(out) else { return Ok(()) };
    let missing = needed.saturating_sub(there);
    if free >= missing {
        return Ok(());
    }
    let help = if consumes { "" } else { ", or --consume the source" };
    bail!(
        "{} needs {missing} more, its disk has {free} free: make room or choose fewer bits{help}",
        out.display()
    );
}

/// Bytes of weight files in a folder.
fn written(out: &Path) -> Bytes {
    let entries = std::fs::read_dir(out).into_iter().flatten().flatten();
    let of_weights = |path: &PathBuf| {
        path.file_name().is_some_and(|n| n.to_string_lossy().contains(".safetensors"))
    };
    let paths = entries.map(|entry| entry.path()).filter(of_weights);
    paths.filter_map(|path| Some(Bytes(std::fs::metadata(path).ok()?.len()))).sum()
}

fn dry_run(
    args: &ConvertArgs,
    (forecast, cost): (&Forecast, Option<Cost>),
    context: &Context,
) -> Result<Outcome> {
    let target = shared::existing_ancestor(&args.out).unwrap_or_default();
    let after = match &forecast.catalogue {
        Err(error) => PlanAfter::Unreadable(error.to_string()),
        Ok(output) => {
            let facts = shared::facts_elsewhere(context, output, &target, true);
            let options = Options { engine: tierkeep_engine::ABILITIES, ..Options::default() };
            let read = facts.disk.read.value().map(|read| read.bytes_per_s);
            match planner::plan(output, &facts, &options, None) {
                Ok(plan) => PlanAfter::Fits { plan: Box::new(plan), read },
                Err(error) => PlanAfter::Refused { why: error.to_string(), read },
            }
        }
    };
    let view = DryRun {
        out: &args.out,
        forecast,
        cost,
        free: free_bytes(&args.out),
        consumes: args.consume,
        after: &after,
        lacking: forecast.catalogue.as_ref().ok().and_then(|m| tierkeep_engine::supports(m).err()),
    };
    if context.json {
        render::json(&view.json())?;
    } else {
        render::data(&view.text(context.style))?;
    }
    Ok(Outcome::Fine)
}
