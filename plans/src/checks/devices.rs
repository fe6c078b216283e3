//! Checks of disks and graphics processors.

use tierkeep_doctor::{DiskReadSpeed, Facts, FilesystemKind, GpuFact, GpuVendor};

use super::Check;
use super::text::{count, rate};
use crate::units::Bytes;

/// A disk that reads slower than this is what a run will wait for, whatever else is done.
const SLOW_DISK_BYTES_PER_S: f64 = 500e6;
/// Of a card with less than this share of its memory free, someone else holds most.
const BUSY_SHARE: f64 = 0.5;
/// How the reason begins where nobody asked for a measurement.
const NOT_ASKED: &str = "not measured";

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    vec![disk(facts), disk_speed(facts), rotational(facts), gpu(facts)]
}

/// What stands between the files and their bytes.
fn disk(facts: &Facts) -> Check {
    let id = "machine.disk";
    let disk = &facts.disk;
    let Some(kind) = disk.kind.value() else {
        return Check::skip_because(id, disk.kind.detail());
    };
    let name = disk.filesystem.value().map_or("an unknown filesystem", String::as_str);
    let mount = disk.mount_point.value().map_or("an unknown mount", String::as_str);
    let free = match disk.free_bytes.value() {
        Some(&free) => format!(", {} free", Bytes(free)),
        None => String::new(),
    };
    let speed = match disk.read.value() {
        Some(read) => said(read),
        None => format!("its speed is unknown ({})", disk.read.detail()),
    };
    let is_windows_drive =
        facts.platform.wsl.value() == Some(&true) && matches!(kind, FilesystemKind::Network);
    match kind {
        FilesystemKind::Network | FilesystemKind::Fuse if is_windows_drive => Check::warn(
            id,
            format!("{name} on {mount} is a drive of Windows seen from WSL; {speed}"),
            "missed experts are read through it: copy the model into WSL's own filesystem",
        ),
        FilesystemKind::Network => Check::warn(
            id,
            format!("{name} on {mount} is a share of another machine; {speed}"),
            "missed experts are read through it: copy the model to a local disk",
        ),
        FilesystemKind::Fuse => Check::warn(
            id,
            format!("{name} on {mount} is a filesystem run by a program (FUSE); {speed}"),
            "missed experts are read through it: copy the model to a local disk",
        ),
        FilesystemKind::Memory => Check::warn(
            id,
            format!("{name} on {mount} keeps its files in memory{free}"),
            "the model takes RAM twice: copy it to a disk",
        ),
        FilesystemKind::Overlay => Check::ok(
            id,
            format!(
                "{name} on {mount}: layers of a container{free}; a volume would be read directly"
            ),
        ),
        FilesystemKind::Local => {
            let device = disk.device.value().map_or_else(String::new, |d| format!(", {d}"));
            let link = disk.link.value().map_or_else(String::new, |link| format!(", {link}"));
            Check::ok(id, format!("{name} on {mount}{device}{link}{free}"))
        }
        FilesystemKind::Unknown => Check::ok(
            id,
            format!("{name} on {mount}{free}; whether that is a local disk is not known here"),
        ),
    }
}

fn said(read: &DiskReadSpeed) -> String {
    format!(
        "{} measured in reads of {}, {} at once",
        rate(read.bytes_per_s),
        Bytes(read.read_bytes),
        read.queue_depth
    )
}

/// How fast missed experts come.
fn disk_speed(facts: &Facts) -> Check {
    let id = "machine.disk_speed";
    let disk = &facts.disk;
    let each: Vec<String> = disk.reads.value().into_iter().flatten().map(said).collect();
    match disk.read.value() {
        None if disk.read.detail().starts_with(NOT_ASKED) => {
            Check::skip_because(id, disk.read.detail())
        }
        None => Check::warn(
            id,
            format!("the disk's speed is unknown: {}", disk.read.detail()),
            "plans assume one and say so: give it with `tierkeep plan --what-if disk=SPEED`",
        ),
        Some(read) if read.bytes_per_s < SLOW_DISK_BYTES_PER_S => Check::warn(
            id,
            said(read),
            "missed experts will be waited for: an NVMe drive reads 2 to 7 GB/s",
        )
        .with_details(each),
        Some(read) => Check::ok(id, said(read)).with_details(each),
    }
}

fn rotational(facts: &Facts) -> Check {
    let id = "machine.rotational";
    let fact = &facts.disk.rotational;
    match fact.value() {
        None => Check::skip_because(id, fact.detail()),
        Some(false) => Check::ok(id, "the disk has no moving parts, as it says"),
        // Virtual machines and network stores often say so of disks that have none.
        Some(true) => {
            let finding = "the disk says that it has moving parts";
            match facts.disk.read.value() {
                Some(read) if read.bytes_per_s >= SLOW_DISK_BYTES_PER_S => {
                    Check::ok(id, format!("{finding}, and it is faster than any that has"))
                }
                None if facts.platform.virtual_machine.value().is_some_and(|vm| vm != "none") => {
                    Check::ok(id, format!("{finding}, as virtual disks do whatever they are"))
                }
                _ => Check::warn(
                    id,
                    format!("{finding}: each read waits for them"),
                    "keep the model on a solid-state disk",
                ),
            }
        }
    }
}

/// Which graphics processors there are and how much of their memory is free.
fn gpu(facts: &Facts) -> Check {
    let id = "machine.gpu";
    let nvidia = facts.gpus.nvidia.value().map(Vec::as_slice).unwrap_or_default();
    let others = facts.gpus.others.value().map(Vec::as_slice).unwrap_or_default();
    let all: Vec<&GpuFact> = nvidia.iter().chain(others).collect();
    if all.is_empty() {
        return match facts.gpus.nvidia.value() {
            None => Check::skip_because(id, facts.gpus.nvidia.detail()),
            Some(_) => Check::ok(id, "none found"),
        };
    }
    let each: Vec<String> = all.iter().map(|gpu| one(gpu)).collect();
    let busy: Vec<String> = all.iter().filter(|gpu| is_busy(gpu)).map(|gpu| name(gpu)).collect();
    let finding = match &each[..] {
        [only] => only.clone(),
        several => count(several.len(), "graphics processor"),
    };
    let details = if each.len() > 1 { each } else { Vec::new() };
    if busy.is_empty() {
        return Check::ok(id, finding).with_details(details);
    }
    Check::warn(
        id,
        format!("{finding}; most of the memory of {} is in use", busy.join(" and of ")),
        "only what is free is planned with: end what holds the rest",
    )
    .with_details(details)
}

fn name(gpu: &GpuFact) -> String {
    let vendor = match gpu.vendor {
        GpuVendor::Nvidia => "NVIDIA",
        GpuVendor::Amd => "AMD",
        GpuVendor::Intel => "Intel",
    };
    match gpu.name.value() {
        Some(name) => format!("{vendor} GPU {} ({name})", gpu.index),
        None => format!("{vendor} GPU {}", gpu.index),
    }
}

fn is_busy(gpu: &GpuFact) -> bool {
    let is_unified = gpu.is_unified.value() == Some(&true);
    match (gpu.memory_free_bytes.value(), gpu.memory_total_bytes.value()) {
        (Some(&free), Some(&total)) if !is_unified => (free as f64) < total as f64 * BUSY_SHARE,
        _ => false,
    }
}

fn one(gpu: &GpuFact) -> String {
    let name = name(gpu);
    if gpu.is_unified.value() == Some(&true) {
        return format!("{name}: its memory is the system's, and is counted once, as RAM");
    }
    let memory = match (gpu.memory_free_bytes.value(), gpu.memory_total_bytes.value()) {
        (Some(&free), Some(&total)) => format!("{} of {} free", Bytes(free), Bytes(total)),
        (None, Some(&total)) => {
            format!(
                "{}, how much is free is unknown: {}",
                Bytes(total),
                gpu.memory_free_bytes.detail()
            )
        }
        (Some(&free), None) => format!("{} free, of an unknown total", Bytes(free)),
        (None, None) => format!("memory unknown: {}", gpu.memory_total_bytes.detail()),
    };
    let mig = match gpu.mig.value() {
        Some(mode) if mode == "enabled" => "; divided (MIG), the figures are of the whole",
        _ => "",
    };
    format!("{name}: {memory}{mig}")
}
