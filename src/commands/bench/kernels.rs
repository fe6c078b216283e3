//! `tierkeep bench kernels`: single products.

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use anyhow::{Context as _, Result};
use tierkeep_doctor::Probe;
use tierkeep_engine::bench::products::{
    Product, ProductNumerics, element_names, has_fast, time_products,
};
use tierkeep_plans::units::{Bytes, SizeRequest};
use tierkeep_plans::whole_file;

use super::{bad_option, csv, memory};
use crate::args::KernelArgs;
use crate::commands::Context;
use crate::exit::Outcome;
use crate::render::{self, Bandwidth, Bar, KernelView};

/// What the second-level cache of a core holds besides a vector, bytes.
const RESIDENT_BYTES: u64 = 256 << 10;

/// Passes between two timings of memory.
const ROUNDS_PER_MEASUREMENT: usize = 7;

pub(super) fn run(args: &KernelArgs, context: &Context) -> Result<Outcome> {
    if let Some(path) = &args.csv {
        whole_file::check(path).with_context(|| format!("--csv {}", path.display()))?;
    }
    let bytes = match args.bytes {
        _ if args.resident => Bytes(RESIDENT_BYTES),
        SizeRequest::Absolute(bytes) => bytes,
        SizeRequest::Percent(_) => {
            return Err(bad_option("--bytes", "is a share", "a size such as 256MiB"));
        }
    };
    let bytes = usize::try_from(bytes.0).unwrap_or(usize::MAX);
    let passes = args.repeat as usize;
    if passes == 0 || bytes == 0 {
        let option = if passes == 0 { "--repeat" } else { "--bytes" };
        return Err(bad_option(option, "0", "at least 1"));
    }
    let products = products(args)?;
    let mut bandwidth = Bandwidth::default();
    let mut measure_memory = || {
        if !args.no_measure && !context.interrupted.load(Ordering::SeqCst) {
            memory::measure(&mut bandwidth, context);
        }
    };
    measure_memory();
    let _heeding = context.heeding();
    let bar = Bar::count("timing products, pass");
    let speeds = time_products(&products, bytes, passes, &mut |done, of| {
        if done > 1 && (done - 1).is_multiple_of(ROUNDS_PER_MEASUREMENT) {
            measure_memory();
        }
        bar.set(done as u64, of as u64);
        if context.interrupted.load(Ordering::SeqCst) {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    })?;
    drop(bar);
    measure_memory();
    let interrupted = context.interrupted.load(Ordering::SeqCst);
    let view = KernelView {
        speeds: &speeds,
        is_resident: args.resident,
        passes,
        bandwidth: &bandwidth,
        interrupted,
    };
    if context.json {
        render::json(&render::kernels_json(&view))?;
    } else {
        render::data(&render::kernels(&view, context.style))?;
    }
    if let Some(path) = &args.csv {
        csv::append(path, render::KERNELS_CSV_HEADER, &render::kernels_csv(&view, csv::now()))?;
        render::note(&format!("rows were appended to {}", path.display()));
    }
    Ok(if interrupted { Outcome::Interrupted } else { Outcome::Fine })
}

/// Every combination that was asked for.
fn products(args: &KernelArgs) -> Result<Vec<Product>> {
    let types = if args.types.iter().any(|name| name == "all") {
        element_names()
    } else {
        args.types.clone()
    };
    let isas = if args.isa.is_empty() {
        tierkeep_engine::instruction_sets().pop().into_iter().collect()
    } else {
        args.isa.iter().map(|isa| isa.name()).collect::<Vec<String>>()
    };
    let threads = if args.threads.is_empty() {
        let usable = Probe::new().measure(false).run(&mut |_| {}).cpu.usable_threads;
        vec![usable.value().map_or(1, |&n| usize::try_from(n).unwrap_or(1))]
    } else {
        args.threads.clone()
    };
    if threads.contains(&0) || args.batch.contains(&0) {
        let option = if threads.contains(&0) { "--threads" } else { "--batch" };
        return Err(bad_option(option, "0", "at least 1"));
    }
    let mut products = Vec::new();
    for element in &types {
        for shape in &args.shapes {
            for &batch in &args.batch {
                for isa in &isas {
                    for &threads in &threads {
                        products.extend(numerics(args, element).map(|numerics| Product {
                            element: element.clone(),
                            rows: shape.rows,
                            cols: shape.cols,
                            batch,
                            numerics,
                            isa: isa.clone(),
                            threads,
                        }));
                    }
                }
            }
        }
    }
    Ok(products)
}

/// Those that were asked for and that differ for a stored type.
fn numerics<'a>(
    args: &'a KernelArgs,
    element: &'a str,
) -> impl Iterator<Item = ProductNumerics> + use<'a> {
    let all = args.numerics.iter().map(|&numerics| ProductNumerics::from(numerics));
    all.filter(|numerics| *numerics == ProductNumerics::Exact || has_fast(element))
}
