//! Dense weights as pages of their files: the ranges that are mapped, bringing them in, and whether what
//! was computed on them can be believed.
//!
//! The kernels read the bytes as numbers and nothing else, as `tierkeep-mapping` asks of those who compute on
//! a file that others may write to.

use std::collections::BTreeSet;

use tierkeep_mapping::{Mapping, faults, page_bytes};
use tierkeep_plans::budget::{Line, MAP_PAGE_BYTES, mapped_ranges};
use tierkeep_plans::catalogue::Span;

use crate::error::EngineError;
use crate::memory::Account;
use crate::shard_io::ShardFiles;

/// Pages are brought in by so many bytes at once, so that progress shows.
const CHUNK_BYTES: usize = 16 << 20;

/// Mapped ranges and the weights in them.
#[derive(Debug)]
pub(super) struct Mapped {
    /// Each range of pages with the place that it has on disk.
    ranges: Vec<(Mapping, Span)>,
    /// Weights: which range, where in it, how long.
    windows: Vec<(usize, usize, usize)>,
    /// Shards that have a range.
    shards: BTreeSet<u32>,
    /// Pages that had been lost, in whatever mapping of this process, before these were made.
    faults_before: u64,
}

impl Mapped {
    /// Maps the pages that hold `windows`, against the line of dense weights, and brings them in; `progress` of
    /// the windows' bytes as they are.
    pub(super) fn new(
        windows: Vec<Span>,
        account: &mut Account,
        files: &ShardFiles,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, EngineError> {
        let found = page_bytes();
        if !windows.is_empty() && found != MAP_PAGE_BYTES {
            return Err(EngineError::PageSize { found });
        }
        let faults_before = faults();
        let mut ranges = Vec::new();
        for range in mapped_ranges(windows.iter().copied()) {
            account.bind_elsewhere(Line::DenseWeights, range.bytes)?;
            ranges.push((files.map(range)?, range));
        }
        let shards = ranges.iter().map(|(_, range)| range.shard).collect();
        let total: u64 = windows.iter().map(|window| window.bytes).sum();
        let windows = windows.into_iter().map(|window| {
            // The last range that does not begin after it: ranges are in order and hold every window.
            let after = ranges
                .partition_point(|(_, r)| (r.shard, r.offset) <= (window.shard, window.offset));
            let range = after.saturating_sub(1);
            let start = window.offset - ranges.get(range).map_or(0, |(_, r)| r.offset);
            (range, start as usize, window.bytes as usize)
        });
        let windows = windows.collect();
        let mapped = Self { ranges, windows, shards, faults_before };
        mapped.populate(files, total, progress)?;
        Ok(mapped)
    }

    /// Brings every page in. The share of the pages that are there is the share of `total` that is told.
    fn populate(
        &self,
        files: &ShardFiles,
        total: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), EngineError> {
        let in_pages: u64 = self.ranges.iter().map(|(_, range)| range.bytes).sum();
        let (mut done, mut told) = (0_u64, 0_u64);
        for (mapping, range) in &self.ranges {
            let length = mapping.bytes().len();
            mapping.will_need(0..CHUNK_BYTES);
            for start in (0..length).step_by(CHUNK_BYTES) {
                let end = length.min(start + CHUNK_BYTES);
                // The next is on its way while this one is waited for.
                mapping.will_need(end..end.saturating_add(CHUNK_BYTES));
                mapping.populate(start..end).map_err(|error| {
                    files.why_lost(part(range, start as u64, (end - start) as u64), &error)
                })?;
                done += (end - start) as u64;
                let now = (total as f64 * (done as f64 / in_pages as f64)) as u64;
                progress(now.min(total) - told);
                told = now.min(total);
            }
        }
        Ok(())
    }

    /// Bytes of a weight.
    pub(super) fn window(&self, window: usize) -> &[u8] {
        let (range, start, length) = self.windows[window];
        &self.ranges[range].0.bytes()[start..start + length]
    }

    /// See [`super::Weights::check_pages`].
    pub(super) fn check_pages(&self, files: &ShardFiles) -> Result<(), EngineError> {
        if faults() == self.faults_before {
            return Ok(());
        }
        for (mapping, range) in &self.ranges {
            if let Some(lost) = mapping.lost() {
                let error = std::io::Error::other(
                    "the page could not be brought into memory, though it can be read by now",
                );
                let page = range.bytes.saturating_sub(lost).min(MAP_PAGE_BYTES);
                return Err(files.why_lost(part(range, lost, page), &error).into());
            }
        }
        Ok(())
    }

    /// See [`super::Weights::check_files`].
    pub(super) fn check_files(&self, files: &ShardFiles) -> Result<(), EngineError> {
        for &shard in &self.shards {
            files.check_unwritten(shard)?;
        }
        Ok(())
    }
}

/// A part of a range, as a place on disk.
fn part(range: &Span, from_start: u64, bytes: u64) -> Span {
    Span { shard: range.shard, offset: range.offset + from_start, bytes }
}
