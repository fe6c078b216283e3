//! Writes a model as a packed container: integers with a scale for each row or group of a row, each
//! expert one aligned read. Owns the options, the order of work and the report; the arithmetic is `quantise`'s, the
//! placing of tensors `layout`'s, the files `output`'s.
//!
//! It reads what the catalogue lists and nothing else, holds one chunk of rows at a time, and
//! writes the same bytes for the same model and options. It neither prints nor probes the disk:
//! [`planned_bytes`] says what a caller should find free.

mod layout;
mod output;
mod quantise;
mod source;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Serialize;
use tierkeep_plans::catalogue::container::ContainerClass;
use tierkeep_plans::catalogue::{Catalogue, Group, Packed, PackedBits, ScaleType, StoredType};
use tierkeep_plans::units::Bytes;

use self::layout::{Entry, Job, OutputPlan};
use self::output::{OutputDirectory, ShardWriter};
use self::quantise::{RowFault, RowQuantiser};
use self::source::SourceFiles;
use crate::support::Unsupported;

/// Data bytes of one output file unless asked otherwise: what published checkpoints use.
pub const DEFAULT_SHARD_BYTES: Bytes = Bytes(5_000_000_000);

/// Source bytes that are held at a time; a row that is longer is held whole.
const CHUNK_BYTES: u64 = 4 << 20;

/// How many bits a class of weights is stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// Packed integers.
    Packed(PackedBits),
    /// As the source stores it.
    Keep,
}

impl Bits {
    /// The bits that are written, `None` where the source's own type is kept.
    #[must_use]
    pub fn packed(self) -> Option<PackedBits> {
        match self {
            Self::Packed(bits) => Some(bits),
            Self::Keep => None,
        }
    }
}

/// Why an option could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read {text:?} as {what}: write {choices}")]
pub struct OptionError {
    /// What was given.
    pub text: String,
    /// What it should say.
    pub what: &'static str,
    /// What can be written.
    pub choices: &'static str,
}

impl FromStr for Bits {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        match text {
            "8" => Ok(Self::Packed(PackedBits::Eight)),
            "4" => Ok(Self::Packed(PackedBits::Four)),
            "2" => Ok(Self::Packed(PackedBits::Two)),
            "keep" => Ok(Self::Keep),
            _ => Err(option_error(text, "bits", "8, 4, 2 or keep")),
        }
    }
}

fn option_error(text: &str, what: &'static str, choices: &'static str) -> OptionError {
    OptionError { text: text.to_owned(), what, choices }
}

/// Reads what shares a scale, as users write it.
///
/// # Errors
/// [`OptionError`] for what is none of the choices.
pub fn group_from_text(text: &str) -> Result<Group, OptionError> {
    let known = Group::ALL.into_iter().find(|group| group.name() == text);
    known.ok_or_else(|| option_error(text, "a group", "row, 128, 64 or 32"))
}

/// Reads the type of scales, as users write it.
///
/// # Errors
/// [`OptionError`] for what is none of the choices.
pub fn scale_from_text(text: &str) -> Result<ScaleType, OptionError> {
    let known = ScaleType::ALL.into_iter().find(|scale| scale.name() == text);
    known.ok_or_else(|| option_error(text, "a type of scales", "f32 or f16"))
}

/// How the scales of packed integers are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// What shares a scale. Rows that are no wider than a group have one scale.
    pub group: Group,
    /// How a scale is stored.
    pub scale: ScaleType,
}

impl Packing {
    /// The plain form, which others write and read too.
    pub const PLAIN: Self = Self { group: Group::Row, scale: ScaleType::F32 };
}

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertOptions {
    /// Routed experts of the decoder layers.
    pub expert_bits: Bits,
    /// Attention, dense and shared feed-forward, the indexer's queries and keys.
    pub dense_bits: Bits,
    /// Token embedding and output head.
    pub embedding_bits: Bits,
    /// Every matrix of the multi-token-prediction layers, their experts included.
    pub mtp_bits: Bits,
    /// Scales of all of these.
    pub packing: Packing,
    /// Most data bytes of one output file; one expert or one matrix is never split.
    pub shard_bytes: Bytes,
}

impl Default for ConvertOptions {
    /// 8 bits everywhere: the plain form's error is then well below that of bf16 activations.
    fn default() -> Self {
        Self {
            expert_bits: Bits::Packed(PackedBits::Eight),
            dense_bits: Bits::Packed(PackedBits::Eight),
            embedding_bits: Bits::Packed(PackedBits::Eight),
            mtp_bits: Bits::Packed(PackedBits::Eight),
            packing: Packing::PLAIN,
            shard_bytes: DEFAULT_SHARD_BYTES,
        }
    }
}

/// Classes of weights that are given bits apart from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorClass {
    /// Routed experts of the decoder layers.
    Experts,
    /// Attention, dense and shared feed-forward, the indexer's queries and keys.
    Dense,
    /// Token embedding and output head.
    Embedding,
    /// Matrices of the multi-token-prediction layers.
    Mtp,
    /// Router, norms, biases and the indexer's head weights: always as stored.
    Kept,
}

impl From<ContainerClass> for TensorClass {
    fn from(class: ContainerClass) -> Self {
        match class {
            ContainerClass::Experts => Self::Experts,
            ContainerClass::Dense => Self::Dense,
            ContainerClass::Embedding => Self::Embedding,
            ContainerClass::Mtp => Self::Mtp,
        }
    }
}

impl TensorClass {
    /// All classes, in the order of reports.
    pub const ALL: [Self; 5] = [Self::Experts, Self::Dense, Self::Embedding, Self::Mtp, Self::Kept];

    /// Its name in reports, for classes of the container that of its metadata.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Experts => ContainerClass::Experts.name(),
            Self::Dense => ContainerClass::Dense.name(),
            Self::Embedding => ContainerClass::Embedding.name(),
            Self::Mtp => ContainerClass::Mtp.name(),
            Self::Kept => "kept",
        }
    }

    fn bits(self, options: &ConvertOptions) -> Bits {
        match self {
            Self::Experts => options.expert_bits,
            Self::Dense => options.dense_bits,
            Self::Embedding => options.embedding_bits,
            Self::Mtp => options.mtp_bits,
            Self::Kept => Bits::Keep,
        }
    }
}

impl fmt::Display for TensorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Where a conversion stands; handed out after every chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertProgress {
    /// The output file in work, counted from 1.
    pub file: usize,
    /// Output files in all.
    pub files: usize,
    /// Source bytes read.
    pub bytes_read: Bytes,
    /// Source bytes to read.
    pub bytes_read_total: Bytes,
    /// Bytes written to output files of weights.
    pub bytes_written: Bytes,
    /// Bytes of all output files of weights.
    pub bytes_written_total: Bytes,
}

/// What became of one class.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassReport {
    /// Which.
    pub class: TensorClass,
    /// Weights, scales not counted apart.
    pub n_weights: usize,
    /// Source bytes.
    pub bytes_in: Bytes,
    /// Bytes written, scales included.
    pub bytes_out: Bytes,
    /// Largest of the rows' relative errors `|x - scale * q| / |x|` (Euclidean norms); `None`
    /// where nothing was quantised.
    pub worst_relative_error: Option<f64>,
    /// The weight with that row.
    pub worst_weight: Option<String>,
    /// Mean of the rows' relative errors; rows of zeros have none and do not count.
    pub mean_relative_error: Option<f64>,
}

/// What a conversion did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ConvertReport {
    /// Weight files written.
    pub files: Vec<PathBuf>,
    /// Small files copied beside them.
    pub copied: Vec<PathBuf>,
    /// By class; classes that the model lacks are left out.
    pub classes: Vec<ClassReport>,
    /// Source bytes of all weights.
    pub bytes_in: Bytes,
    /// Bytes of all weight files.
    pub bytes_out: Bytes,
    /// Of these, padding that brings experts to multiples of 4096 bytes.
    pub padding_bytes: Bytes,
    /// Of these, headers.
    pub header_bytes: Bytes,
    /// Source bytes that were left out because no table knows their names.
    pub unrecognised_bytes: Bytes,
}

/// Why a conversion stopped.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// A file could not be read or written.
    #[error("{}: cannot {doing}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The disk filled up.
    #[error(
        "{}: no space left, the whole output needs {needed}: free space and convert to the same folder again", path.display()
    )]
    NoSpace {
        /// The file that could not grow.
        path: PathBuf,
        /// Bytes of all weight files.
        needed: Bytes,
    },
    /// A source file ended early.
    #[error("{}: ends before byte {end}: the file changed since its header was read; fetch it again", path.display())]
    SourceCut {
        /// The shard.
        path: PathBuf,
        /// One past the last byte wanted.
        end: u64,
    },
    /// A small file that every model has is absent.
    #[error("{} is missing: a model needs it", path.display())]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// OUT holds something else.
    #[error(
        "{} is not empty (it holds {found}): give a folder that is new or empty", directory.display()
    )]
    OutputNotEmpty {
        /// The folder.
        directory: PathBuf,
        /// One of its entries.
        found: String,
    },
    /// OUT is being written to.
    #[error("{} is being written by another conversion: wait for it or give another folder", directory.display())]
    OutputBusy {
        /// The folder.
        directory: PathBuf,
    },
    /// The model is planned and cannot be run by this build; what it would become could not either.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The source is packed already.
    #[error(
        "{weight} is stored as {} and cannot become {}: quantising twice adds error; convert from the published weights or keep these bits",
        stored.name(), wanted.name()
    )]
    Requantise {
        /// Its published name.
        weight: String,
        /// What the source holds.
        stored: StoredType,
        /// What was asked for.
        wanted: StoredType,
    },
    /// A weight is infinite or not a number.
    #[error(
        "{weight} row {row} holds an infinity or NaN: the checkpoint is damaged; fetch it again or keep these bits"
    )]
    NotFinite {
        /// Its published name.
        weight: String,
        /// The row.
        row: u64,
    },
    /// A weight is too large for scales of 16 bits.
    #[error(
        "{weight} row {row} needs a scale beyond 65504, the largest of f16: use --scales f32 or keep these bits"
    )]
    ScaleTooLarge {
        /// Its published name.
        weight: String,
        /// The row.
        row: u64,
    },
    /// A piece of an expert lies in none of the reads that bring the expert.
    #[error(
        "{weight} lies outside the reads that bring its expert: a fault of this program, please report it"
    )]
    Misplaced {
        /// Its published name.
        weight: String,
    },
    /// A header would be longer than readers accept.
    #[error("{} would need a header of {header_bytes} bytes, more than readers accept: ask for smaller files", path.display())]
    HeaderTooLarge {
        /// The output file.
        path: PathBuf,
        /// Its header.
        header_bytes: u64,
    },
}

/// Bytes of all weight files that a conversion with these options writes, to the byte.
///
/// # Errors
/// [`ConvertError::Unsupported`], [`ConvertError::Requantise`] and [`ConvertError::HeaderTooLarge`].
pub fn planned_bytes(
    catalogue: &Catalogue,
    options: &ConvertOptions,
) -> Result<Bytes, ConvertError> {
    Ok(layout::plan(catalogue, options)?.file_bytes())
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
    let plan = layout::plan(catalogue, options)?;
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
        match job.target.packed() {
            Some(target) if job.target != job.stored => self.quantise(writer, index, job, target),
            _ => self.copy(writer, job),
        }
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

    /// Quantises a weight by chunks of rows, then writes the scales that came of it.
    fn quantise(
        &mut self,
        writer: &mut ShardWriter,
        index: usize,
        job: &Job,
        target: Packed,
    ) -> Result<(), ConvertError> {
        let row_bytes = job.stored.row_bytes(job.cols);
        let rows_per_chunk = (CHUNK_BYTES / row_bytes).max(1);
        let mut quantiser = RowQuantiser::new(job.stored, target, job.cols as usize);
        let (mut buffer, mut packed) = (Vec::new(), Vec::new());
        let mut scales = Vec::with_capacity((job.rows * target.row_scale_bytes(job.cols)) as usize);
        let mut first = 0;
        while first < job.rows {
            let rows = rows_per_chunk.min(job.rows - first);
            self.source.read(job.weight, first * row_bytes, rows * row_bytes, &mut buffer)?;
            packed.clear();
            for (row, bytes) in buffer.chunks_exact(row_bytes as usize).enumerate() {
                let relative_error =
                    quantiser.push(bytes, &mut packed, &mut scales).map_err(|fault| {
                        let (weight, row) = (job.name.clone(), first + row as u64);
                        match fault {
                            RowFault::NotFinite => ConvertError::NotFinite { weight, row },
                            RowFault::ScaleTooLarge => ConvertError::ScaleTooLarge { weight, row },
                        }
                    })?;
                self.tally.add_row(job.class, index, relative_error);
            }
            self.state.bytes_read = self.state.bytes_read + Bytes(rows * row_bytes);
            self.write(writer, &packed)?;
            first += rows;
        }
        self.write(writer, &scales)
    }
}

/// Running error sums of one class.
#[derive(Clone, Copy, Default)]
struct ErrorSums {
    rows: u64,
    sum: f64,
    worst: f64,
    worst_job: usize,
}

struct Tally {
    errors: [ErrorSums; TensorClass::ALL.len()],
    classes: Vec<ClassReport>,
}

impl Tally {
    fn new(plan: &OutputPlan) -> Self {
        let classes = TensorClass::ALL
            .into_iter()
            .map(|class| {
                let of_class = || plan.jobs.iter().filter(move |job| job.class == class);
                ClassReport {
                    class,
                    n_weights: of_class().count(),
                    bytes_in: Bytes(of_class().map(Job::bytes_in).sum()),
                    bytes_out: Bytes(of_class().map(Job::bytes_out).sum()),
                    worst_relative_error: None,
                    worst_weight: None,
                    mean_relative_error: None,
                }
            })
            .collect();
        Self { errors: Default::default(), classes }
    }

    fn add_row(&mut self, class: TensorClass, job: usize, relative_error: Option<f64>) {
        let Some(error) = relative_error else { return };
        let sums = &mut self.errors[class as usize];
        if sums.rows == 0 || error > sums.worst {
            sums.worst = error;
            sums.worst_job = job;
        }
        sums.rows += 1;
        sums.sum += error;
    }

    fn report(
        mut self,
        files: Vec<PathBuf>,
        plan: &OutputPlan,
        unrecognised_bytes: Bytes,
    ) -> ConvertReport {
        for (class, sums) in self.classes.iter_mut().zip(&self.errors) {
            if sums.rows > 0 {
                class.worst_relative_error = Some(sums.worst);
                class.worst_weight = Some(plan.jobs[sums.worst_job].name.clone());
                class.mean_relative_error = Some(sums.sum / sums.rows as f64);
            }
        }
        self.classes.retain(|class| class.n_weights > 0);
        ConvertReport {
            files,
            copied: Vec::new(),
            bytes_in: self.classes.iter().map(|c| c.bytes_in).sum(),
            bytes_out: plan.file_bytes(),
            padding_bytes: plan.padding_bytes(),
            header_bytes: plan.header_bytes(),
            classes: self.classes,
            unrecognised_bytes,
        }
    }
}
