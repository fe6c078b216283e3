//! Prints the facts about this machine as JSON, and what this process holds.
//!
//! `cargo run --release -p tierkeep-doctor --example facts -- DIRECTORY FILE...`
#![expect(clippy::print_stdout, reason = "an example shows its result")]

use std::path::PathBuf;

use tierkeep_doctor::{Probe, process};

fn main() -> Result<(), serde_json::Error> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let directory = arguments.next();
    let files: Vec<PathBuf> = arguments.collect();
    let is_measuring = !files.is_empty();
    let probe = Probe::new().directory(directory).files(files).measure(is_measuring);
    let facts = probe.run(&mut |_| {});
    println!("{}", serde_json::to_string_pretty(&facts)?);
    println!("{}", serde_json::to_string_pretty(&process::memory())?);
    println!("{}", serde_json::to_string_pretty(&process::io())?);
    println!("{}", serde_json::to_string_pretty(&process::cgroup_peak())?);
    Ok(())
}
