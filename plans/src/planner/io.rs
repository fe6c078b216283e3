//! How experts are read: past the page cache where the machine's facts and the model's files speak for
//! it, so many at once and in such pieces as its disk was fastest at. Owns the choices and their reasons.

use tierkeep_doctor::{DiskReadSpeed, Facts};

use super::{MAX_READ_DEPTH, Options, PlanRefusal};
use crate::budget::{IoMode, ModelBytes, Reads, direct_padding_share};
use crate::catalogue::{Catalogue, DIRECT_ALIGN};
use crate::plan::Prefetch;
use crate::units::{Bytes, SizeRequest, counted};

/// Most that whole blocks may add to the slots: what they take is slots that others do not get.
const PADDING_SHARE: f64 = 0.02;

/// The mode and, in words, why.
pub(super) fn choose(model: &Catalogue, machine: &Facts, options: &Options) -> (IoMode, String) {
    let padding = direct_padding_share(model);
    let blocks = format!(
        "whole blocks of {DIRECT_ALIGN} bytes add {:.2} % to the slots (computed)",
        padding * 100.0
    );
    match (options.io, machine.disk.direct_reads.value()) {
        (Some(IoMode::Direct), _) => {
            (IoMode::Direct, format!("past the page cache: given with --io direct; {blocks}"))
        }
        (Some(io @ IoMode::Dropped), _) => (
            io,
            "through the page cache, pages dropped after each read: given with --io dropped"
                .to_owned(),
        ),
        (Some(io @ IoMode::Buffered), _) => (
            io,
            "through the page cache, which keeps what it likes: given with --io buffered"
                .to_owned(),
        ),
        (None, Some(true)) if padding <= PADDING_SHARE => (
            IoMode::Direct,
            format!("past the page cache: measured, this disk takes direct reads; {blocks}"),
        ),
        (None, known) => {
            let why = match known {
                Some(true) => format!("this disk takes direct reads, but {blocks}"),
                Some(false) => {
                    "this disk was measured through the page cache, for it takes no direct reads"
                        .to_owned()
                }
                None => "whether this disk takes direct reads is unknown (no measurement says so)"
                    .to_owned(),
            };
            (
                IoMode::Dropped,
                format!("through the page cache, pages dropped after each read: {why}"),
            )
        }
    }
}

/// In the evidence where the depth was asked for; by it a plan is made again as it was.
pub(super) const DEPTH_GIVEN: &str = "given with --io-depth";
/// The same for the size of reads.
pub(super) const SIZE_GIVEN: &str = "given with --read-size";

/// Reads at once where no measurement says how many a disk wants: what an NVMe drive needs at reads of
/// megabytes, and no more threads than a small machine has cores.
const ASSUMED_DEPTH: u64 = 4;
/// What experts are cut into where nothing was measured and they are larger than two of these.
const ASSUMED_BYTES: u64 = 4 << 20;
/// What reaches this part of the best is as good: fewer threads and larger reads cost less.
const AS_GOOD: f64 = 0.95;
/// The smallest size of reads that can be asked for: below it any disk is slow.
const MIN_READ_BYTES: u64 = 64 << 10;

/// How many reads are made at once and how large they are, and in words why.
pub(super) fn reads(
    sums: &ModelBytes<'_>,
    machine: &Facts,
    options: &Options,
) -> Result<(Reads, String), PlanRefusal> {
    let begins_early = early(sums.model, options)?;
    let expert = sums.expert_read_size();
    let (depth, bytes, why) = best(machine, expert);
    let (depth, mut why) = match options.io_depth {
        Some(depth) => (asked_depth(depth, begins_early)?, DEPTH_GIVEN.to_owned()),
        None => (depth, why),
    };
    let bytes = match options.read_size {
        Some(size) => {
            why = format!("{why}, {SIZE_GIVEN}");
            Some(asked_size(size, expert)?)
        }
        // Pieces are for threads that read side by side.
        None => bytes.filter(|_| depth > 1),
    };
    let reads = Reads { depth, bytes, begins_early };
    let how = match (depth, bytes) {
        (0, _) => "read one after another by the threads that compute".to_owned(),
        (_, Some(bytes)) => format!("{} at once, of about {bytes} each", counted(depth, "read")),
        (_, None) => format!("{} at once", counted(depth, "read")),
    };
    Ok((reads, format!("{how}: {why}")))
}

/// Whether experts that are known early are begun then.
fn early(model: &Catalogue, options: &Options) -> Result<bool, PlanRefusal> {
    match options.prefetch {
        Some(Prefetch::Off) => Ok(false),
        Some(Prefetch::Exact) if !model.spec.has_window() => Err(PlanRefusal::BadOption {
            option: "--prefetch",
            found: "exact".to_owned(),
            expected: "auto or off: no layer of this model knows its experts early".to_owned(),
        }),
        Some(Prefetch::Exact) => Ok(true),
        None => Ok(model.spec.has_window()
            && options.engine.prefetch
            && options.io_depth.is_none_or(|depth| depth > 0)),
    }
}

fn asked_depth(depth: u64, begins_early: bool) -> Result<u64, PlanRefusal> {
    let least = u64::from(begins_early);
    if (least..=MAX_READ_DEPTH).contains(&depth) {
        return Ok(depth);
    }
    let why = if depth == 0 { ", for --prefetch exact reads while others compute" } else { "" };
    Err(PlanRefusal::BadOption {
        option: "--io-depth",
        found: depth.to_string(),
        expected: format!("{least} to {MAX_READ_DEPTH}{why}"),
    })
}

fn asked_size(size: SizeRequest, expert: u64) -> Result<Bytes, PlanRefusal> {
    let SizeRequest::Absolute(Bytes(bytes)) = size else {
        return Err(PlanRefusal::BadOption {
            option: "--read-size",
            found: "is a share".to_owned(),
            expected: "a size such as 1MiB".to_owned(),
        });
    };
    let most = expert.max(MIN_READ_BYTES);
    if (MIN_READ_BYTES..=most).contains(&bytes) {
        return Ok(Bytes(bytes - bytes % DIRECT_ALIGN));
    }
    Err(PlanRefusal::BadOption {
        option: "--read-size",
        found: bytes.to_string(),
        expected: format!(
            "{MIN_READ_BYTES} to {most} bytes: one read of an expert of this model brings {expert}"
        ),
    })
}

/// The depth and the size of reads at which the disk was measured fastest for parts of experts of so many
/// bytes, and why.
///
/// Of sizes that reach nearly the best rate at some depth that one is taken at which a single missing
/// expert, cut into such pieces, comes soonest; whole experts where that is as good. The depth is the
/// least that reaches nearly the best rate at that size.
fn best(machine: &Facts, expert: u64) -> (u64, Option<Bytes>, String) {
    let reads = &machine.disk.reads;
    let points: Vec<&DiskReadSpeed> =
        reads.value().into_iter().flatten().filter(|p| is_usable(p, expert)).collect();
    let fastest =
        |points: &[&DiskReadSpeed]| points.iter().map(|p| p.bytes_per_s).fold(0.0, f64::max);
    let mut sizes: Vec<u64> = points.iter().map(|p| p.read_bytes).collect();
    // The largest first: it is kept where a smaller one is no better.
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes.dedup();
    let of = |size: u64| -> Vec<&DiskReadSpeed> {
        points.iter().copied().filter(|p| p.read_bytes == size).collect()
    };
    let top = fastest(&points);
    // The rate at which one expert comes in pieces of a size, as many at once as there are.
    let alone = |size: u64| {
        let n = Reads { bytes: Some(Bytes(size)), ..Reads::default() }.n_pieces(expert);
        let at = of(size).into_iter().filter(|p| u64::from(p.queue_depth) <= n);
        at.map(|p| p.bytes_per_s).fold(0.0, f64::max)
    };
    let good = sizes.into_iter().filter(|&size| fastest(&of(size)) >= AS_GOOD * top);
    let best = good.fold(None, |best: Option<u64>, size| match best {
        Some(best) if alone(size) * AS_GOOD <= alone(best) => Some(best),
        _ => Some(size),
    });
    let Some(size) = best else {
        let why = "assumed: no measurement of this disk is at reads of this size".to_owned();
        let pieces = (expert > 2 * ASSUMED_BYTES).then_some(Bytes(ASSUMED_BYTES));
        return (ASSUMED_DEPTH, pieces, why);
    };
    let at_size = of(size);
    let enough = fastest(&at_size) * AS_GOOD;
    let chosen = at_size.iter().filter(|p| p.bytes_per_s >= enough).min_by_key(|p| p.queue_depth);
    let depth = chosen.map_or(ASSUMED_DEPTH, |p| u64::from(p.queue_depth)).clamp(1, MAX_READ_DEPTH);
    let reads_of = Reads { bytes: Some(Bytes(size)), ..Reads::default() };
    let pieces = (reads_of.n_pieces(expert) > 1).then_some(Bytes(size - size % DIRECT_ALIGN));
    let why = format!(
        "{}, {:.1} GB/s at reads of {}, {} under way, within {:.0} % of the best",
        reads.source().as_str(),
        chosen.map_or(0.0, |p| p.bytes_per_s) / 1e9,
        Bytes(size),
        depth,
        (1.0 - AS_GOOD) * 100.0
    );
    (depth, pieces.filter(|bytes| bytes.0 > 0), why)
}

/// Whether a measured point is of reads as experts of so many bytes can be read: not much larger.
fn is_usable(point: &DiskReadSpeed, expert: u64) -> bool {
    point.bytes_per_s > 0.0
        && point.bytes_per_s.is_finite()
        && point.queue_depth > 0
        && point.read_bytes > 0
        && point.read_bytes <= expert.saturating_add(expert / 2)
}
