//! Plans a model for a machine that is described in a file. Nothing of this machine is looked at, so the
//! plan is the same wherever it is made:
//!
//! ```text
//! cargo run --example plan_for_machine -- examples/machines/laptop-32gb.toml examples/glm-nano 32MB
//! ```
#![allow(clippy::print_stdout, reason = "an example shows its result")]

use std::error::Error;
use std::path::Path;

use tierkeep_doctor::Facts;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::planner::{self, Options};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [machine, model, ram] = arguments.as_slice() else {
        return Err("give three arguments: MACHINE.toml MODEL RAM".into());
    };

    // Facts say what a machine has, each with its source. `tierkeep doctor --save FILE` writes such a
    // file on another machine; `tierkeep_doctor::Probe` finds them on this one.
    let facts = Facts::read(Path::new(machine))?;

    // The catalogue is what a model is made of. Only config.json and the headers of its files are read.
    let model = Catalogue::open(Path::new(model))?;
    println!("{} with {} tensors", model.spec.family.model_type(), model.n_tensors);

    // Whatever is not asked for is chosen; what is asked for is kept, or refused with a reason.
    let options = Options { ram: Some(ram.parse()?), context: Some(512), ..Options::default() };

    // "Does not fit" is among the errors: it carries the ledger and every change that would help.
    // The history of earlier runs would be the last argument.
    let plan = planner::plan(&model, &facts, &options, None)?;

    // The ledger: every byte of the budget has a line, and with what is unused they sum to it.
    println!("\nwhere {} go:", plan.request.budget_bytes);
    for line in &plan.ledger.0 {
        println!("{:>20}  {:>10}  {}", line.line.name(), line.bytes.to_string(), line.note);
    }
    println!("{:>20}  {:>10}", "unused", plan.unused_bytes.to_string());

    // The prediction: ranges, because nobody knows the text yet, and what the figures rest on.
    let speed = plan.prediction.decode_tokens_per_s;
    let hits = plan.prediction.hit_rate;
    println!("\nexpected: {:.0} tokens/s ({:.0} to {:.0})", speed.p50, speed.p10, speed.p90);
    println!("experts found in memory: {:.0} %", hits.p50 * 100.0);
    println!("bound by: {}", plan.prediction.binding);
    for source in &plan.prediction.evidence {
        println!("  {source}");
    }

    // As a file it can be read, edited, compared, committed and run.
    println!("\nthe plan file has {} lines", plan.to_toml()?.lines().count());
    Ok(())
}
