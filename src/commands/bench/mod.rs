//! `tierkeep bench`. `settings` owns what is compared, `tokens` what it runs on, `rounds` the measuring,
//! `memory` the bandwidth beside it, `kernels` single products; `csv` appends rows to a file.

mod csv;
mod kernels;
pub(super) mod memory;
mod rounds;
mod settings;
mod tokens;

use anyhow::{Context as _, Result};
use tierkeep_engine::bench::Work;
use tierkeep_engine::bench::summary::{Circumstances, Summary};
use tierkeep_plans::planner::PlanRefusal;
use tierkeep_plans::whole_file;

use self::rounds::Measured;
use self::settings::Configuration;
use super::{Context, shared};
use crate::args::{BenchArgs, BenchModelArgs, BenchVerb};
use crate::exit::Outcome;
use crate::render::{self, BenchRow, BenchView, CurveView};

pub(crate) fn run(args: &BenchArgs, context: &Context) -> Result<Outcome> {
    match &args.what {
        Some(BenchVerb::Kernels(args)) => kernels::run(args, context),
        None => bench(&args.model, context),
    }
}

fn bench(args: &BenchModelArgs, context: &Context) -> Result<Outcome> {
    check_files(args)?;
    let found = match settings::configurations(args, context) {
        Ok(found) => found,
        Err(error) => {
            let target = args.targets.first().map_or("".as_ref(), |target| target.path());
            return shared::verdict(context, target, error);
        }
    };
    let settings::Found { configurations, contexts, is_warned } = found;
    let stream = tokens::stream(&args.stream, &configurations)?;
    let work: Vec<Work> = contexts
        .iter()
        .map(|&context| Work { context, prompt: args.prompt, decode: args.decode })
        .collect();
    let measured = rounds::measure_all(args, &configurations, &work, &stream, context)?;
    let rows = rows(&configurations, &work, &measured, stream.is_synthetic());
    let view = BenchView {
        rows: &rows,
        bandwidth: &measured.bandwidth,
        stream: &stream.describe(),
        rounds: args.repeat,
        warm_up: args.warm_up,
        is_kept: configurations.len() == 1,
        usage: args.planning.usage.as_deref(),
        interrupted: measured.interrupted,
    };
    let is_void = rows.iter().any(|row| row.summary.is_void);
    show(args, &view, context)?;
    Ok(if measured.interrupted {
        Outcome::Interrupted
    } else if is_void || is_warned {
        Outcome::Warnings
    } else {
        Outcome::Fine
    })
}

/// Refuses files that cannot be written before anything is measured.
fn check_files(args: &BenchModelArgs) -> Result<()> {
    for (option, path) in [("--csv", &args.csv), ("--svg", &args.svg)] {
        if let Some(path) = path {
            whole_file::check(path).with_context(|| format!("{option} {}", path.display()))?;
        }
    }
    Ok(())
}

/// A row for each configuration and context that has been measured at least once.
fn rows<'a>(
    configurations: &'a [Configuration],
    work: &[Work],
    measured: &Measured,
    is_synthetic: bool,
) -> Vec<BenchRow<'a>> {
    let memory_bytes_per_s = measured.bandwidth.largest();
    let mut rows = Vec::new();
    for (configuration, results) in configurations.iter().zip(&measured.results) {
        for (&work, (samples, touched)) in work.iter().zip(&results.by_context) {
            if samples.is_empty() {
                continue;
            }
            let at = Circumstances {
                plan: &configuration.plan,
                touched: *touched,
                memory_bytes_per_s,
                held: results.held,
                is_synthetic,
            };
            rows.push(BenchRow {
                name: &configuration.name,
                label: &configuration.label,
                value: configuration.value,
                model: &configuration.model,
                plan: &configuration.plan,
                summary: Summary::of(work, samples, at),
            });
        }
    }
    rows
}

/// Shows the result, then writes the files, so that one that fails takes nothing from what is shown.
fn show(args: &BenchModelArgs, view: &BenchView<'_>, context: &Context) -> Result<()> {
    if context.json {
        render::json(&render::bench_json(view))?;
    } else {
        render::data(&render::bench(view, context.style))?;
    }
    if let Some(path) = &args.csv {
        csv::append(path, render::BENCH_CSV_HEADER, &render::bench_csv(view, csv::now()))?;
        render::note(&format!("rows were appended to {}", path.display()));
    }
    let (Some(sweep), Some(path)) = (args.sweep, &args.svg) else { return Ok(()) };
    let curve = CurveView::of(sweep, view);
    whole_file::write(path, &curve.svg()).with_context(|| format!("--svg {}", path.display()))?;
    render::note(&format!("the curve was drawn to {}", path.display()));
    Ok(())
}

/// An option that makes no sense, as the planner says it.
fn bad_option(
    option: &'static str,
    found: impl Into<String>,
    expected: impl Into<String>,
) -> anyhow::Error {
    PlanRefusal::BadOption { option, found: found.into(), expected: expected.into() }.into()
}
