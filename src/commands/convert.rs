//! `tierkeep convert MODEL OUT`.

use anyhow::{Result, bail};
use tierkeep_engine::convert::{self, ConvertOptions, DEFAULT_SHARD_BYTES, Packing};
use tierkeep_plans::units::SizeRequest;

use super::{Context, model, shared};
use crate::args::ConvertArgs;
use crate::exit::Outcome;
use crate::render::{self, Bar};

pub(crate) fn run(args: &ConvertArgs, context: &Context) -> Result<Outcome> {
    let shard_bytes = match args.shard {
        None => DEFAULT_SHARD_BYTES,
        Some(SizeRequest::Absolute(bytes)) => bytes,
        Some(SizeRequest::Percent(_)) => bail!("--shard takes a size such as 5GB, not a share"),
    };
    let directory = model::folder_for(&args.model, "convert", context)?;
    let model = shared::open_model(context, &directory)?;
    let options = ConvertOptions {
        experts: args.experts,
        dense: args.dense,
        embedding: args.embedding,
        mtp: args.mtp,
        packing: Packing { group: args.group, scale: args.scales },
        shard_bytes,
    };
    let planned = convert::planned_bytes(&model, &options)?;
    if args.dry_run {
        if context.json {
            render::json(&serde_json::json!({ "schema_version": 1, "planned_bytes": planned }))?;
        } else {
            render::data(&render::dry_run(&args.out, planned, context.style))?;
        }
        return Ok(Outcome::Fine);
    }
    let disk = shared::disk(shared::existing_ancestor(&args.out).as_deref());
    if let Some(&free) = disk.free_bytes.value()
        && free < planned.0
    {
        bail!(
            "{} needs {planned}, its disk has {} free: make room or choose fewer bits",
            args.out.display(),
            tierkeep_plans::units::Bytes(free)
        );
    }
    let bar = Bar::bytes("converting");
    let report = convert::convert(&model, &args.out, &options, &mut |progress| {
        bar.set(progress.bytes_written.0, progress.bytes_written_total.0);
    })?;
    drop(bar);
    if context.json {
        render::json(&report)?;
    } else {
        render::data(&render::conversion(&args.out, &report, context.style))?;
    }
    Ok(Outcome::Fine)
}
