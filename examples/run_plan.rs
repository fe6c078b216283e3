//! Runs a plan on a prompt and reads the report of what happened:
//!
//! ```text
//! cargo run -- plan examples/glm-nano --ram 32MB --ctx 512 -o plan.toml
//! cargo run --example run_plan -- plan.toml "Count from 3 to 14."
//! ```
#![allow(clippy::print_stdout, reason = "an example shows its result")]

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use tierkeep_doctor::process;
use tierkeep_engine::Engine;
use tierkeep_engine::generate::{Mark, generate};
use tierkeep_engine::report::{Loaded, MemorySeen, RunReport};
use tierkeep_engine::text::{Message, Text};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::units::Bytes;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [plan, prompt] = arguments.as_slice() else {
        return Err("give two arguments: PLAN.toml PROMPT".into());
    };

    // A plan names its model, and holds the fingerprint of what it was made for.
    let plan = Plan::read(Path::new(plan))?;
    let model = Catalogue::open(&plan.model.directory)?;

    // Everything is allocated here, each buffer against its line of the plan's ledger. A plan that
    // asks for what this build or this machine lacks is refused before that.
    let start = Instant::now();
    let mut engine = Engine::open(&plan, &model, &mut |_what, _done, _total| {})?;
    let loaded = Loaded { time: start.elapsed(), mark: Mark::of(&engine) };

    // Text becomes tokens through the model's own tokenizer and chat template. Token ids would do too.
    let text = Text::open(&model.directory)?;
    let tokens = text.encode_chat(&[Message::user(prompt)])?;

    // Tokens come one by one through the closure, which may end it by breaking. A usage history would
    // take the routing in the place of `None`, and the next plan would learn from it.
    let stop = &model.spec.stop_tokens;
    let go_on = &mut |_event| ControlFlow::Continue(());
    let generation = generate(&mut engine, &tokens, 64, stop, None, go_on)?;
    println!("{}", text.decode(&generation.tokens)?);

    // The report puts what happened beside what the plan promised.
    let held = process::memory();
    let memory = MemorySeen {
        footprint: held.value().map(|m| Bytes(m.rss_anon_bytes + m.rss_shmem_bytes)),
        peak: held.value().map(|m| Bytes(m.peak_rss_bytes)),
        ..MemorySeen::default()
    };
    let report = RunReport::new(&engine, &plan, &generation, &loaded, memory);
    let decode = &report.decode;
    println!("{} decode steps, ended by {:?}", decode.tokens, report.ended);
    println!("hit rate: {:?}, predicted {:.3}", decode.hit_rate, plan.prediction.hit_rate.p50);
    println!("experts read: {} in {} reads", decode.read.experts.bytes, decode.read.experts.reads);
    println!("different experts: {} of {}", report.experts.distinct, report.experts.total);
    println!("footprint planned: {}", report.footprint.planned_bytes);
    println!("footprint held: {:?}", report.footprint.actual_bytes.map(|bytes| bytes.to_string()));
    for warning in &report.warnings {
        println!("warning: {warning}");
    }
    Ok(())
}
