//! What reading every byte found, as checks: which file and offset the disk does not give back, and
//! that the rest is whole, so that nobody fetches 400 GB for one sector.

use std::path::Path;

use tierkeep_plans::checks::Check;
use tierkeep_plans::units::Bytes;

use super::{Holes, OddValues, PayloadReport, Unreadable, ValueFault};

/// Things that a finding names before it only counts.
const NAMED_CAP: usize = 3;

/// Check `model.holes`: files of which a part was never written.
#[must_use]
pub fn hole_check(holes: &[Holes]) -> Check {
    let id = "model.holes";
    if holes.is_empty() {
        return Check::ok(id, "no file has a range that was never written");
    }
    let one = |hole: &Holes| {
        format!(
            "{} has {} of holes in {}",
            file_name(&hole.path),
            Bytes(hole.bytes),
            Bytes(hole.file_bytes)
        )
    };
    let (finding, details) = listed(holes.iter().map(one).collect());
    Check::warn(
        id,
        format!(
            "{finding}: ranges that were never written and read as zeros, an unfinished download?"
        ),
        "fetch these files again, unless they were made so",
    )
    .with_details(details)
}

/// Checks `model.read` and `model.values`, from a reading of every byte.
#[must_use]
pub fn payload_checks(report: &PayloadReport) -> Vec<Check> {
    vec![read_check(report), values_check(report)]
}

fn read_check(report: &PayloadReport) -> Check {
    let id = "model.read";
    let files = match report.n_files {
        1 => "1 file".to_owned(),
        n => format!("{n} files"),
    };
    let seconds = report.elapsed.as_secs_f64();
    let speed = report.read_bytes as f64 / seconds.max(1e-9) / 1e9;
    let read = format!(
        "{} of {files} read in {seconds:.1} s, {speed:.2} GB/s measured{}",
        Bytes(report.read_bytes),
        match report.hole_bytes {
            0 => String::new(),
            holes => format!(", {} of holes left out", Bytes(holes)),
        }
    );
    if !report.unreadable.is_empty() {
        let (finding, details) = listed(report.unreadable.iter().map(unreadable).collect());
        let mut names: Vec<String> =
            report.unreadable.iter().map(|piece| file_name(&piece.path)).collect();
        names.dedup();
        let (names, _) = listed(names);
        return Check::fail(
            id,
            format!("{finding}; {read}: the rest is fine"),
            format!(
                "check the disk (dmesg, smartctl), then fetch {names} again; no other file is concerned"
            ),
        )
        .with_details(details);
    }
    if report.interrupted {
        return Check::skip_because(id, format!("interrupted after {read}"));
    }
    Check::ok(id, format!("{read}: every byte came back"))
}

fn unreadable(piece: &Unreadable) -> String {
    let tensors = match &piece.tensors[..] {
        [] => String::new(),
        [one] => format!(", in tensor {one}"),
        [first, rest @ ..] => format!(", in tensor {first} and {} more", rest.len()),
    };
    format!(
        "{}: {} at offset {} cannot be read: {}{tensors}",
        file_name(&piece.path),
        Bytes(piece.bytes),
        piece.offset,
        piece.reason
    )
}

fn values_check(report: &PayloadReport) -> Check {
    let id = "model.values";
    let OddValues { not_finite, n_not_finite, all_zero, n_all_zero, zero_scales, n_zero_scales } =
        &report.odd_values;
    let kinds = [
        (*n_not_finite, "with values that are not finite", not_finite),
        (*n_all_zero, "of nothing but zeros", all_zero),
        (*n_zero_scales, "of scales with zeros among them", zero_scales),
    ];
    let mut findings = Vec::new();
    let mut details = Vec::new();
    for (n, what, faults) in kinds.iter().filter(|(n, ..)| *n > 0) {
        let tensors = if *n == 1 { "tensor" } else { "tensors" };
        let first = faults.first().map_or("", |fault| &fault.tensor);
        findings.push(format!("{n} {tensors} {what}, such as {first}"));
        details.extend(faults.iter().map(|fault| value_fault(fault, what)));
    }
    if !findings.is_empty() {
        return Check::warn(
            id,
            findings.join("; "),
            "no trained weight looks so: fetch their files again, or compare with where they are from",
        )
        .with_details(details);
    }
    if report.interrupted {
        return Check::skip_because(id, "the reading was interrupted");
    }
    Check::ok(id, "all finite; no matrix is zero throughout, and no scale is zero")
}

fn value_fault(fault: &ValueFault, what: &str) -> String {
    let file = file_name(&fault.path);
    match fault.count {
        1 => format!("{file}: {}: {what}", fault.tensor),
        n => format!("{file}: {}: {what} ({n})", fault.tensor),
    }
}

/// A few things in one line; all of them in lines of their own where they are more than a few.
fn listed(items: Vec<String>) -> (String, Vec<String>) {
    let few = items.iter().take(NAMED_CAP).cloned().collect::<Vec<_>>().join("; ");
    match items.len().saturating_sub(NAMED_CAP) {
        0 => (few, Vec::new()),
        more => (format!("{few} and {more} more"), items),
    }
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}
