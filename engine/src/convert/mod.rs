//! Writes a model as a packed container: integers with a scale for each row or group of a row, each
//! expert one aligned read. Owns the order of work; the options are `options`'s, the arithmetic `quantise`'s
//! and `rows`'s, the placing of tensors `layout`'s, threads `work`'s, the files `output`'s and `writer`'s, what is
//! done already `journal`'s, deleting the source `consume`'s.
//!
//! It reads what the catalogue lists and nothing else, holds a few pieces of 4 MiB for each thread, and
//! writes the same bytes for the same model and options, whatever the threads and however often it was
//! stopped. It neither prints nor probes the disk: [`planned_bytes`] says what a caller should find free.

mod consume;
mod disk;
mod error;
#[cfg(test)]
mod fault_tests;
mod finished;
mod forecast;
mod journal;
mod layout;
mod manifest;
mod options;
mod output;
mod pieces;
mod quantise;
mod report;
mod rows;
mod scale;
mod source;
mod work;
mod writer;

use std::ops::ControlFlow;
use std::path::Path;

use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::catalogue::container::SOURCE_KEY;
use tierkeep_plans::catalogue::header::read_header;
use tierkeep_plans::units::Bytes;

pub use self::consume::open_consumed;
use self::disk::{OutputDisk, SystemOutput};
pub use self::error::ConvertError;
pub use self::finished::is_finished;
pub use self::forecast::{Forecast, forecast};
use self::journal::{Begun, Finished};
use self::layout::OutputPlan;
use self::manifest::Manifest;
pub use self::manifest::{checksummed_bytes, checksums};
pub use self::options::{
    Bits, Choices, ConvertOptions, DEFAULT_SHARD_BYTES, Form, OptionError, Packing,
    group_from_text, scale_from_text,
};
use self::output::OutputDirectory;
use self::report::Tally;
pub use self::report::{ClassReport, ConvertProgress, ConvertReport, TensorClass};
use self::source::SourceFiles;
use self::work::Teller;
use crate::disk::SystemDisk;

/// How a conversion is carried out; nothing of it changes what is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Execution {
    /// Threads that convert; `None` for as many as the system says can run at once.
    pub threads: Option<usize>,
    /// Reads each file back from the disk and compares it before it gets its name.
    pub read_back: bool,
    /// Deletes each source file once everything that needs anything of it is written and read back.
    pub consume: bool,
    /// Begins anew where an earlier try could go on.
    pub restart: bool,
}

/// Told where a conversion stands; stops it by [`ControlFlow::Break`].
pub type Progress<'a> = &'a mut dyn FnMut(ConvertProgress) -> ControlFlow<()>;

/// Bytes of all weight files that a conversion with these options writes, to the byte.
///
/// # Errors
/// [`ConvertError::Unsupported`], [`ConvertError::Requantise`] and [`ConvertError::HeaderTooLarge`].
pub fn planned_bytes(
    catalogue: &Catalogue,
    options: &ConvertOptions,
) -> Result<Bytes, ConvertError> {
    Ok(plan(catalogue, options, None)?.0.file_bytes())
}

/// The whole output, and the fingerprint of the weights that were published.
fn plan(
    catalogue: &Catalogue,
    options: &ConvertOptions,
    out: Option<&Path>,
) -> Result<(OutputPlan, String), ConvertError> {
    let begun = out.and_then(journal::peek).map(|(begun, _)| begun);
    let begun = begun.filter(|begun| begun.is_of(&catalogue.fingerprint));
    let published = match begun {
        Some(begun) => begun.published,
        None => published_fingerprint(catalogue),
    };
    Ok((layout::plan(catalogue, options, &published)?, published))
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
/// `out` is made if need be. It must be empty or hold an earlier try of the same conversion, which then
/// goes on after the last file that it finished; if all is finished, nothing is left to do. config.json gets its name last, so what is unfinished
/// is not a model.
///
/// # Errors
/// [`ConvertError`]: every variant names the file or the weight and what to do.
pub fn convert(
    catalogue: &Catalogue,
    out: &Path,
    options: &ConvertOptions,
    execution: &Execution,
    progress: Progress<'_>,
) -> Result<ConvertReport, ConvertError> {
    convert_on(&SystemOutput, catalogue, out, (options, execution), progress)
}

/// The same on any disk.
fn convert_on(
    disk: &dyn OutputDisk,
    catalogue: &Catalogue,
    out: &Path,
    (options, execution): (&ConvertOptions, &Execution),
    progress: Progress<'_>,
) -> Result<ConvertReport, ConvertError> {
    let (plan, published) = plan(catalogue, options, Some(out))?;
    if !execution.restart && finished::is_done(catalogue, out, options, (&plan, &published)) {
        finished::tidy_up(out);
        return Ok(ConvertReport::of_finished(catalogue, out, &plan));
    }
    let begun = Begun::of(catalogue, options, &plan, &published);
    if execution.consume {
        let consumed = journal::peek(out).map_or_else(Vec::new, |(_, consumed)| consumed);
        consume::check(catalogue, out, &consumed)?;
    }
    let mut directory =
        OutputDirectory::prepare(out, disk, plan.file_bytes(), begun, execution.restart)?;
    if execution.consume && directory.journal.consumed.is_empty() {
        directory.keep_headers(&consume::headers_text(catalogue)?)?;
    }
    directory.stage_small_files(&catalogue.directory)?;
    let source = SourceFiles::new(catalogue, &SystemDisk);
    let mut work = Work {
        catalogue,
        plan: &plan,
        execution,
        freed: consume::freed_after(&plan, catalogue.shards.len()),
        source: &source,
        teller: Teller { state: ConvertProgress::start(&plan), progress },
        tally: Tally::default(),
        finished: Vec::new(),
        n_earlier: 0,
    };
    for index in 0..plan.shards.len() {
        work.shard(index, &mut directory)?;
    }
    let files: Vec<&Finished> = work.finished.iter().collect();
    let manifest = Manifest::new(&published, options.in_words(), &files).text();
    directory.write_index(&plan.index())?;
    directory.write_manifest(&manifest)?;
    let consumed = &directory.journal.consumed;
    let consumed = consumed.iter().map(|name| catalogue.directory.join(name)).collect();
    let classes = work.tally.classes(&plan);
    let report = ConvertReport {
        was_finished: false,
        files: plan.shards.iter().map(|shard| out.join(&shard.file_name)).collect(),
        files_of_earlier: work.n_earlier,
        consumed,
        copied: Vec::new(),
        bytes_in: classes.iter().map(|class| class.bytes_in).sum(),
        bytes_out: plan.file_bytes(),
        padding_bytes: plan.padding_bytes(),
        header_bytes: plan.header_bytes(),
        classes,
        unrecognised_bytes: catalogue.unrecognised_bytes,
    };
    Ok(ConvertReport { copied: directory.finish()?, ..report })
}

/// A conversion in work.
struct Work<'a> {
    catalogue: &'a Catalogue,
    plan: &'a OutputPlan,
    execution: &'a Execution,
    /// For each output file the source files that may go after it.
    freed: Vec<Vec<u32>>,
    source: &'a SourceFiles<'a>,
    teller: Teller<'a>,
    tally: Tally,
    finished: Vec<Finished>,
    n_earlier: usize,
}

impl Work<'_> {
    /// Writes one file unless an earlier try has, and gives up what of the source was for it.
    fn shard(
        &mut self,
        index: usize,
        directory: &mut OutputDirectory<'_>,
    ) -> Result<(), ConvertError> {
        let Some(shard) = self.plan.shards.get(index) else { return Ok(()) };
        self.teller.state.file = index + 1;
        let read_back = self.execution.read_back || self.execution.consume;
        let finished = match directory.earlier(&shard.file_name)? {
            Some(finished) => {
                self.n_earlier += 1;
                if read_back && !finished.read_back {
                    directory.read_back(&finished)?;
                }
                let read: u64 = self.plan.jobs_of(shard).map(layout::Job::bytes_in).sum();
                if self.teller.add(read, shard.file_bytes()).is_break() {
                    return Err(ConvertError::Interrupted);
                }
                finished
            }
            None => self.write(shard, read_back, directory)?,
        };
        self.tally.add_file(&finished.errors);
        self.finished.push(finished);
        if self.execution.consume {
            let freed = self.freed.get(index).cloned().unwrap_or_default();
            self.give_up(&freed, directory)?;
        }
        Ok(())
    }

    fn write(
        &mut self,
        shard: &layout::ShardPlan,
        read_back: bool,
        directory: &mut OutputDirectory<'_>,
    ) -> Result<Finished, ConvertError> {
        let threads = self.execution.threads.unwrap_or_else(|| {
            std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
        });
        let mut writer = directory.create_shard(&shard.file_name, shard.file_bytes())?;
        let mut tally = Tally::default();
        let teller = &mut self.teller;
        let told = teller.add(0, shard.header.len() as u64);
        let result = if told.is_break() {
            Err(ConvertError::Interrupted)
        } else {
            work::write_shard(
                (shard, &self.plan.jobs),
                self.source,
                threads,
                &mut writer,
                &mut tally,
                &mut |read, written| teller.add(read, written),
            )
        };
        match result {
            Ok(()) => {
                let written = writer.finish(read_back)?;
                directory.finish_shard(&shard.file_name, written, read_back, tally.sums())
            }
            Err(error) => {
                writer.abandon();
                Err(error)
            }
        }
    }

    /// Deletes source files of which everything is written and read back.
    fn give_up(
        &self,
        shards: &[u32],
        directory: &mut OutputDirectory<'_>,
    ) -> Result<(), ConvertError> {
        for &shard in shards {
            let Some(path) = self.catalogue.shards.get(shard as usize).map(|s| &s.path) else {
                continue;
            };
            self.source.close(shard);
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            let name = name.unwrap_or_default();
            if !directory.journal.consumed.contains(&name) {
                directory.journal.note_consumed(&name)?;
            }
            match std::fs::remove_file(path) {
                Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                    return Err(ConvertError::Io { path: path.clone(), doing: "delete", source });
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }
}
