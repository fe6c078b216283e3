//! What the doctor found.

use std::fmt::Display;
use std::path::Path;

use tierkeep_doctor::{Fact, Facts};
use tierkeep_plans::checks::{Check, Status};
use tierkeep_plans::units::Bytes;

use super::style::Tone;
use super::{Style, table};

/// The machine, one fact a row, each with its source.
pub(crate) fn facts(facts: &Facts, style: Style) -> String {
    let mut rows = table::table(style, &["machine", "", "source"]);
    let mut row = |name: &str, (value, source): (String, String)| {
        rows.add_row([name.to_owned(), value, source]);
    };
    let cpu = &facts.cpu;
    row("CPU", shown(&cpu.model_name));
    row("physical cores", shown(&cpu.physical_cores));
    row("logical cores", shown(&cpu.logical_cores));
    row("usable threads", shown(&cpu.usable_threads));
    row("instruction sets", shown(&cpu.instruction_sets.clone().map(|sets| sets.join(" "))));
    let memory = &facts.memory;
    row("memory, total", bytes(&memory.total_bytes));
    row("memory, available", bytes(&memory.available_bytes));
    row(
        "memory, group limit",
        shown(&memory.limit.clone().map(|limit| match limit {
            None => "none".to_owned(),
            Some(l) => format!(
                "{} in group {}, {} left",
                Bytes(l.limit_bytes),
                l.group,
                Bytes(l.headroom_bytes)
            ),
        })),
    );
    row("memory, usable", bytes(&memory.usable_bytes));
    row("memory read, all threads", rate(&memory.read_bandwidth_bytes_per_s));
    row("memory read, one thread", rate(&memory.read_bandwidth_one_thread_bytes_per_s));
    let disk = &facts.disk;
    row("disk, folder", shown(&disk.path));
    row("disk, filesystem", shown(&disk.filesystem));
    row("disk, free", bytes(&disk.free_bytes));
    row("disk read", rate(&disk.read.clone().map(|r| r.bytes_per_s)));
    row("kernel", shown(&facts.platform.kernel));
    row("container", shown(&facts.platform.container));
    row("virtual machine", shown(&facts.platform.virtual_machine));
    match facts.gpus.nvidia.value() {
        None => row("NVIDIA GPUs", shown(&facts.gpus.nvidia.clone().map(|_| ""))),
        Some(gpus) if gpus.is_empty() => row("NVIDIA GPUs", ("none".to_owned(), String::new())),
        Some(gpus) => {
            for gpu in gpus {
                row(&format!("GPU {}", gpu.index), shown(&gpu.name));
                row("  memory, total", bytes(&gpu.memory_total_bytes));
                row("  memory, free", bytes(&gpu.memory_free_bytes));
            }
        }
    }
    table::text(&rows)
}

/// A fact's value and its source.
fn shown<T: Display>(fact: &Fact<T>) -> (String, String) {
    match fact.value() {
        Some(value) => {
            let source = match fact.detail() {
                "" => fact.source().to_string(),
                detail => format!("{}: {detail}", fact.source()),
            };
            (value.to_string(), source)
        }
        None => ("unknown".to_owned(), fact.detail().to_owned()),
    }
}

fn bytes(fact: &Fact<u64>) -> (String, String) {
    shown(&fact.clone().map(Bytes))
}

fn rate(fact: &Fact<f64>) -> (String, String) {
    shown(&fact.clone().map(|bytes_per_s| format!("{:.1} GB/s", bytes_per_s / 1e9)))
}

/// The checks, one a row.
pub(crate) fn checks(model: Option<&Path>, checks: &[Check], style: Style) -> String {
    let mut rows = table::table(style, &["check", "", "finding", "remedy"]);
    for check in checks {
        let status = match check.status {
            Status::Ok => Tone::Ok.cell("ok"),
            Status::Warn => Tone::Warn.cell("warn"),
            Status::Fail => Tone::Fail.cell("FAIL"),
            Status::Skip => Tone::Plain.cell("skip"),
        };
        let plain = |text: &str| Tone::Plain.cell(text);
        rows.add_row([plain(check.id), status, plain(&check.finding), plain(&check.remedy)]);
    }
    let next = match model {
        Some(model) if checks.iter().all(|c| c.status != Status::Fail) => {
            format!("\nnext: tierkeep plan {} --ram SIZE -o plan.toml\n", model.display())
        }
        Some(_) => String::new(),
        None => "\nnext: tierkeep doctor MODEL\n".to_owned(),
    };
    format!("\n{}{next}", table::text(&rows))
}
