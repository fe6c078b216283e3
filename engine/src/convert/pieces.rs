//! One output file as pieces: what each takes of the source and what it gives, in the order of the file.
//! Owns the cut into pieces and the way of one piece from source bytes to output bytes.

use tierkeep_kernels::Kernels;
use tierkeep_plans::catalogue::Span;

use super::ConvertError;
use super::layout::{Entry, Job, ShardPlan};
use super::quantise::{RowFault, RowQuantiser};
use super::rows;
use super::source::SourceFiles;

/// Source bytes of a piece; a row that is longer is a piece.
const PIECE_BYTES: u64 = 4 << 20;

/// A part of an output file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Piece {
    /// So many zeros.
    Zeros(u64),
    /// Bytes of a span as they are: how many to skip, and how many to take.
    Copy { span: Span, skip: u64, bytes: u64 },
    /// Rows of a job, converted. Their scales go to a place of their own, after all weights.
    Rows { job: usize, first: u64, rows: u64 },
    /// The scales of a job that came with its rows.
    Scales { job: usize },
}

/// What came of a piece.
#[derive(Default)]
pub(super) struct Made {
    /// Bytes for where the file stands.
    pub(super) weights: Vec<u8>,
    /// Scales of rows.
    pub(super) scales: Vec<u8>,
    /// Relative errors of rows that were quantised: how many, their sum, the largest.
    pub(super) errors: RowErrors,
    /// Source bytes read.
    pub(super) bytes_read: u64,
}

/// Sums of the relative errors of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct RowErrors {
    pub(super) rows: u64,
    pub(super) sum: f64,
    pub(super) worst: f64,
}

impl RowErrors {
    fn add(&mut self, error: Option<f64>) {
        let Some(error) = error else { return };
        self.rows += 1;
        self.sum += error;
        self.worst = self.worst.max(error);
    }
}

/// Cuts a file into pieces.
pub(super) fn pieces(shard: &ShardPlan, jobs: &[Job]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for entry in &shard.entries {
        match *entry {
            Entry::Pad(bytes) => pieces.push(Piece::Zeros(bytes)),
            Entry::Job(index) => {
                let Some(job) = jobs.get(index) else { continue };
                if job.is_copied() {
                    for span in [Some(job.weight), job.scales].into_iter().flatten() {
                        pieces.extend(
                            cut(span.bytes, PIECE_BYTES).map(|(skip, bytes)| Piece::Copy {
                                span,
                                skip,
                                bytes,
                            }),
                        );
                    }
                    continue;
                }
                let per_piece = (PIECE_BYTES / job.stored.row_bytes(job.cols).max(1)).max(1);
                pieces.extend(cut(job.rows, per_piece).map(|(first, rows)| Piece::Rows {
                    job: index,
                    first,
                    rows,
                }));
                if job.scale_bytes_out() > 0 {
                    pieces.push(Piece::Scales { job: index });
                }
            }
        }
    }
    pieces
}

/// `total` in runs of at most `each`, as (first, length).
fn cut(total: u64, each: u64) -> impl Iterator<Item = (u64, u64)> {
    let each = each.max(1);
    (0..total.div_ceil(each)).map(move |index| (index * each, each.min(total - index * each)))
}

/// What a thread needs to make pieces, kept from one to the next.
pub(super) struct Maker<'a> {
    source: &'a SourceFiles<'a>,
    jobs: &'a [Job],
    buffer: Vec<u8>,
    scales: Vec<u8>,
    row: Vec<f32>,
    kernels: &'a Kernels,
}

impl<'a> Maker<'a> {
    pub(super) fn new(source: &'a SourceFiles<'a>, jobs: &'a [Job], kernels: &'a Kernels) -> Self {
        Self { source, jobs, buffer: Vec::new(), scales: Vec::new(), row: Vec::new(), kernels }
    }

    /// Makes a piece into `made`, whose buffers are used again.
    pub(super) fn make(&mut self, piece: Piece, made: &mut Made) -> Result<(), ConvertError> {
        made.weights.clear();
        made.scales.clear();
        (made.errors, made.bytes_read) = (RowErrors::default(), 0);
        match piece {
            Piece::Zeros(bytes) => made.weights.resize(bytes as usize, 0),
            Piece::Copy { span, skip, bytes } => {
                self.source.read(span, skip, bytes, &mut made.weights)?;
                made.bytes_read = bytes;
            }
            Piece::Rows { job, first, rows } => {
                let jobs = self.jobs;
                let Some(job) = jobs.get(job) else { return Ok(()) };
                self.rows(job, first, rows, made)?;
            }
            Piece::Scales { .. } => {}
        }
        Ok(())
    }

    fn rows(
        &mut self,
        job: &Job,
        first: u64,
        rows: u64,
        made: &mut Made,
    ) -> Result<(), ConvertError> {
        let row_bytes = job.stored.row_bytes(job.cols);
        self.source.read(job.weight, first * row_bytes, rows * row_bytes, &mut self.buffer)?;
        made.bytes_read = rows * row_bytes;
        self.scales.clear();
        if let Some((span, skip, bytes)) = rows::scales_of(job, first, rows) {
            self.source.read(span, skip, bytes, &mut self.scales)?;
            made.bytes_read += bytes;
        }
        let matrix = rows::matrix(job, (first, rows), &self.buffer, &self.scales)?;
        let cols = job.cols as usize;
        self.row.resize(cols, 0.0);
        let kernels = self.kernels;
        let packed = job.target.packed();
        let mut quantiser = packed.map(|target| RowQuantiser::new(kernels, target, cols));
        for index in 0..rows {
            let row = first + index;
            kernels.decode_row(&matrix, index as usize, &mut self.row);
            let weight = || job.name.clone();
            match &mut quantiser {
                Some(quantiser) => {
                    let error = quantiser
                        .push(&self.row, &mut made.weights, &mut made.scales)
                        .map_err(|fault| match fault {
                            RowFault::NotFinite { col } => {
                                let col = col as u64;
                                ConvertError::NotFinite { weight: weight(), row, col }
                            }
                            RowFault::ScaleTooLarge => {
                                ConvertError::ScaleTooLarge { weight: weight(), row }
                            }
                        })?;
                    made.errors.add(error);
                }
                None => {
                    if let Some(col) = self.row.iter().position(|x| !x.is_finite()) {
                        let col = col as u64;
                        return Err(ConvertError::NotFinite { weight: weight(), row, col });
                    }
                    if let Some(col) = rows::push_bf16(&self.row, &mut made.weights) {
                        let col = col as u64;
                        return Err(ConvertError::TooLargeForBf16 { weight: weight(), row, col });
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_what_they_cut() {
        let of = |total, each| cut(total, each).collect::<Vec<_>>();
        assert_eq!(of(10, 4), [(0, 4), (4, 4), (8, 2)]);
        assert_eq!(of(8, 4), [(0, 4), (4, 4)]);
        assert_eq!(of(0, 4), []);
        assert_eq!(of(3, 0), [(0, 1), (1, 1), (2, 1)]);
    }
}
