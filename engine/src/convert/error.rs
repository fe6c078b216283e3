//! Why a conversion stops: every message names the file or the weight and what to do.

use std::path::PathBuf;

use tierkeep_plans::catalogue::StoredType;
use tierkeep_plans::units::Bytes;

use crate::support::Unsupported;

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
    /// OUT holds an unfinished conversion that cannot go on as asked.
    #[error("{} {how}: {remedy}", directory.display())]
    OtherConversion {
        /// The folder.
        directory: PathBuf,
        /// What differs.
        how: String,
        /// What to do.
        remedy: String,
    },
    /// A file that was written is not what the disk gives back.
    #[error(
        "{}: the disk gives back other bytes than were written: check the disk, remove the file and convert to the same folder again", path.display()
    )]
    NotAsWritten {
        /// The file.
        path: PathBuf,
    },
    /// The source may not be deleted.
    #[error("{} cannot be consumed: {why}; convert without --consume", path.display())]
    CannotConsume {
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        why: &'static str,
    },
    /// Gate and up of the experts are one tensor.
    #[error(
        "{weight} holds gate and up of all experts in one, and containers keep them apart: run the published weights as they are, in {}", stored.name()
    )]
    Fused {
        /// Its published name.
        weight: String,
        /// What the source holds.
        stored: StoredType,
    },
    /// Bytes of a weight that are not those of its shape.
    #[error("{weight}: {source}: a fault of this program, please report it")]
    Shape {
        /// Its published name.
        weight: String,
        /// What does not go together.
        source: tierkeep_kernels::MatrixError,
    },
    /// The processor lacks what it says it has.
    #[error(transparent)]
    Isa(#[from] tierkeep_kernels::IsaError),
    /// No thread could be started.
    #[error("cannot start a thread: {source}")]
    Threads {
        /// Why.
        source: std::io::Error,
    },
    /// The caller stopped it.
    #[error("interrupted: convert to the same folder again to go on")]
    Interrupted,
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
        "{weight} row {row} column {col} holds an infinity or NaN: the checkpoint is damaged; fetch it again or keep these bits"
    )]
    NotFinite {
        /// Its published name.
        weight: String,
        /// The row.
        row: u64,
        /// The column.
        col: u64,
    },
    /// A weight of 32 bits is beyond bf16.
    #[error(
        "{weight} row {row} column {col} is beyond the largest bf16, about 3.39e38: keep these bits"
    )]
    TooLargeForBf16 {
        /// Its published name.
        weight: String,
        /// The row.
        row: u64,
        /// The column.
        col: u64,
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
