//! The memory's bandwidth beside a measurement: timed by a child process, whose buffers are not this
//! one's peak, before, between and after what is measured.

use std::process::{Command, Stdio};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use tierkeep_doctor::{Fact, Measuring, Probe};

use crate::commands::Context;
use crate::exit::Outcome;
use crate::render::{self, Bandwidth, Bar};

/// What the child says.
#[derive(Serialize, Deserialize)]
struct Said {
    read_bandwidth_bytes_per_s: Fact<f64>,
}

/// `tierkeep measure-memory`: what is run in the child. Not shown in the help.
pub(crate) fn run() -> Result<Outcome> {
    let measuring = Measuring { memory: true, disk: false };
    let memory = Probe::new().measure(measuring).run(&mut |_| {}).memory;
    let read_bandwidth_bytes_per_s = memory.read_bandwidth_bytes_per_s;
    render::json(&Said { read_bandwidth_bytes_per_s })?;
    Ok(Outcome::Fine)
}

/// Times memory once more.
pub(super) fn measure(bandwidth: &mut Bandwidth, context: &Context) {
    let bar = Bar::spinner("timing memory");
    let child = || {
        let program = context.program.as_ref()?;
        let child = Command::new(program)
            .arg("measure-memory")
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .ok()?;
        serde_json::from_slice::<Said>(&child.stdout).ok()
    };
    let fact = match child() {
        Some(said) => said.read_bandwidth_bytes_per_s,
        None => Fact::unknown("the child process that times memory gave no answer"),
    };
    drop(bar);
    bandwidth.add(&fact);
}
