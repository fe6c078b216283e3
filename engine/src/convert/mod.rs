//! Writes a model as a packed container: integers with a scale for each row or group of a row, each
//! expert one aligned read. Owns the options, the order of work and the report; the arithmetic is `quantise`'s, the
//! placing of tensors `layout`'s, the files `output`'s.
//!
//! It reads what the catalogue lists and nothing else, holds one chunk of rows at a time, and
//! writes the same bytes for the same model and options. It neither prints nor probes the disk:
//! [`planned_bytes`] says what a caller should find free.

mod error;
mod layout;
mod options;
mod output;
mod quantise;
mod report;
mod rows;
mod source;

use std::path::Path;

use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::catalogue::container::SOURCE_KEY;
use tierkeep_plans::catalogue::header::read_header;
use tierkeep_plans::units::Bytes;

pub use self::error::ConvertError;
use self::layout::{Entry, Job, OutputPlan};
pub use self::options::{
    Bits, Choices, ConvertOptions, DEFAULT_SHARD_BYTES, Form, OptionError, Packing,
    group_from_text, scale_from_text,
};
use self::output::{OutputDirectory, ShardWriter};
use self::quantise::{RowFault, RowQuantiser};
use self::report::Tally;
pub use self::report::{ClassReport, ConvertProgress, ConvertReport, TensorClass};
use self::source::SourceFiles;

/// Source bytes that are held at a time; a row that is longer is held whole.
const CHUNK_BYTES: u64 = 4 << 20;

/// Bytes of all weight files that a conversion with these options writes, to the byte.
///
/// # Errors
/// [`ConvertError::Unsupported`], [`ConvertError::Requantise`] and [`ConvertError::HeaderTooLarge`].
pub fn planned_bytes(
    catalogue: &Catalogue,
    options: &ConvertOptions,
) -> Result<Bytes, ConvertError> {
    Ok(plan(catalogue, options)?.file_bytes())
}

fn plan(catalogue: &Catalogue, options: &ConvertOptions) -> Result<OutputPlan, ConvertError> {
    layout::plan(catalogue, options, &published_fingerprint(catalogue))
}

/// The fingerprint of the weights that a model was made of: what its container says, or its own.
fn published_fingerprint(catalogue: &Catalogue) -> String {
    let said = catalogue.shards.first().and_then(|shard| {
        // What cannot be read here cannot be read later either, and is an error then.
        read_header(&shard.path).ok()?.metadata.get(SOURCE_KEY).cloned()
    });
    said.unwrap_or_else(|| catalogue.fingerprint.clone())
}

/// Writes the model of `catalogue` to the folder `out`.
///
/// `out` is made if need be. It must be empty or hold an earlier conversion that was interrupted,
/// which is then done anew. config.json gets its name last, so what is unfinished is not a model.
///
/// # Errors
/// [`ConvertError`]: every variant names the file or the weight and what to do.
pub fn convert(
    catalogue: &Catalogue,
    out: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(ConvertProgress),
) -> Result<ConvertReport, ConvertError> {
    let plan = plan(catalogue, options)?;
    let directory = OutputDirectory::prepare(out, plan.file_bytes())?;
    directory.stage_small_files(&catalogue.directory)?;
    let mut work = Work {
        source: SourceFiles::new(catalogue),
        tally: Tally::new(&plan),
        state: ConvertProgress {
            file: 0,
            files: plan.shards.len(),
            bytes_read: Bytes(0),
            bytes_read_total: Bytes(plan.jobs.iter().map(Job::bytes_in).sum()),
            bytes_written: Bytes(0),
            bytes_written_total: plan.file_bytes(),
        },
        progress,
    };
    let mut files = Vec::new();
    for (index, shard) in plan.shards.iter().enumerate() {
        work.state.file = index + 1;
        let mut writer = directory.create_shard(&shard.file_name)?;
        work.write(&mut writer, &shard.header)?;
        for entry in &shard.entries {
            match entry {
                Entry::Pad(bytes) => work.write(&mut writer, &vec![0; *bytes as usize])?,
                Entry::Job(job) => work.write_job(&mut writer, *job, &plan.jobs[*job])?,
            }
        }
        files.push(writer.finish()?);
    }
    directory.write_index(&plan.index())?;
    let report = work.tally.report(files, &plan, catalogue.unrecognised_bytes);
    let copied = directory.finish()?;
    Ok(ConvertReport { copied, ..report })
}

/// A conversion in work.
struct Work<'a> {
    source: SourceFiles<'a>,
    tally: Tally,
    state: ConvertProgress,
    progress: &'a mut dyn FnMut(ConvertProgress),
}

impl Work<'_> {
    fn write(&mut self, writer: &mut ShardWriter, bytes: &[u8]) -> Result<(), ConvertError> {
        writer.write(bytes)?;
        self.state.bytes_written = self.state.bytes_written + Bytes(bytes.len() as u64);
        (self.progress)(self.state);
        Ok(())
    }

    fn write_job(
        &mut self,
        writer: &mut ShardWriter,
        index: usize,
        job: &Job,
    ) -> Result<(), ConvertError> {
        if job.target == job.stored {
            return self.copy(writer, job);
        }
        let mut scales = Vec::new();
        let mut rows = Rows::new(job);
        let row_bytes = job.stored.row_bytes(job.cols);
        let rows_per_chunk = (CHUNK_BYTES / row_bytes).max(1);
        let (mut buffer, mut weights) = (Vec::new(), Vec::new());
        let mut first = 0;
        while first < job.rows {
            let n_rows = rows_per_chunk.min(job.rows - first);
            self.source.read(job.weight, first * row_bytes, n_rows * row_bytes, &mut buffer)?;
            weights.clear();
            for (row, bytes) in buffer.chunks_exact(row_bytes as usize).enumerate() {
                let error = rows.push(bytes, first + row as u64, &mut weights, &mut scales)?;
                self.tally.add_row(job.class, index, error);
            }
            self.state.bytes_read = self.state.bytes_read + Bytes(n_rows * row_bytes);
            self.write(writer, &weights)?;
            first += n_rows;
        }
        self.write(writer, &scales)
    }

    /// Copies a weight, then its scales if it has any.
    fn copy(&mut self, writer: &mut ShardWriter, job: &Job) -> Result<(), ConvertError> {
        let mut buffer = Vec::new();
        for span in [Some(job.weight), job.scales].into_iter().flatten() {
            let mut done = 0;
            while done < span.bytes {
                let bytes = CHUNK_BYTES.min(span.bytes - done);
                self.source.read(span, done, bytes, &mut buffer)?;
                self.state.bytes_read = self.state.bytes_read + Bytes(bytes);
                self.write(writer, &buffer)?;
                done += bytes;
            }
        }
        Ok(())
    }
}

/// Rows of one weight on their way to another type.
struct Rows<'a> {
    job: &'a Job,
    quantiser: Option<RowQuantiser>,
    row: Vec<f32>,
}

impl<'a> Rows<'a> {
    fn new(job: &'a Job) -> Self {
        let cols = job.cols as usize;
        let quantiser = job.target.packed().map(|target| RowQuantiser::new(target, cols));
        Self { job, quantiser, row: vec![0.0; cols] }
    }

    /// Appends one row; its relative error, where it is quantised.
    fn push(
        &mut self,
        bytes: &[u8],
        row: u64,
        weights: &mut Vec<u8>,
        scales: &mut Vec<u8>,
    ) -> Result<Option<f64>, ConvertError> {
        rows::decode(self.job.stored, bytes, &mut self.row);
        let weight = || self.job.name.clone();
        match &mut self.quantiser {
            Some(quantiser) => {
                quantiser.push(&self.row, weights, scales).map_err(|fault| match fault {
                    RowFault::NotFinite { col } => {
                        ConvertError::NotFinite { weight: weight(), row, col: col as u64 }
                    }
                    RowFault::ScaleTooLarge => {
                        ConvertError::ScaleTooLarge { weight: weight(), row }
                    }
                })
            }
            None => match rows::push_bf16(&self.row, weights) {
                Some(col) => {
                    Err(ConvertError::TooLargeForBf16 { weight: weight(), row, col: col as u64 })
                }
                None => Ok(None),
            },
        }
    }
}
