//! Where a conversion stands and what it did: progress, sums of rounding errors, bytes by class.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::catalogue::container::ContainerClass;
use tierkeep_plans::units::Bytes;

use super::layout::{Job, OutputPlan};

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
}

impl fmt::Display for TensorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Where a conversion stands; handed out after every piece. Files of an earlier try count as done.
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

impl ConvertProgress {
    pub(super) fn start(plan: &OutputPlan) -> Self {
        Self {
            file: 0,
            files: plan.shards.len(),
            bytes_read: Bytes(0),
            bytes_read_total: Bytes(plan.jobs.iter().map(Job::bytes_in).sum()),
            bytes_written: Bytes(0),
            bytes_written_total: plan.file_bytes(),
        }
    }
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
    /// The output was there, whole, and nothing was read or written.
    pub was_finished: bool,
    /// Weight files written.
    pub files: Vec<PathBuf>,
    /// Of these, files that an earlier try of the same conversion had finished.
    pub files_of_earlier: usize,
    /// Source files that were deleted, those of earlier tries included.
    pub consumed: Vec<PathBuf>,
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

impl ConvertReport {
    /// Of an output that was there, whole. Errors are those of weights that are read, so there are none.
    pub(super) fn of_finished(catalogue: &Catalogue, out: &Path, plan: &OutputPlan) -> Self {
        let classes = class_bytes(plan);
        Self {
            was_finished: true,
            files: plan.shards.iter().map(|shard| out.join(&shard.file_name)).collect(),
            files_of_earlier: plan.shards.len(),
            consumed: Vec::new(),
            copied: Vec::new(),
            bytes_in: classes.iter().map(|class| class.bytes_in).sum(),
            bytes_out: plan.file_bytes(),
            padding_bytes: plan.padding_bytes(),
            header_bytes: plan.header_bytes(),
            classes,
            unrecognised_bytes: catalogue.unrecognised_bytes,
        }
    }
}

/// Running error sums of one class. Those of a file are kept in the journal, so that a conversion that
/// went on reports what one without a break does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct ErrorSums {
    rows: u64,
    sum: f64,
    worst: f64,
    worst_job: usize,
}

impl ErrorSums {
    fn add(&mut self, other: &Self) {
        if other.rows > 0 && (self.rows == 0 || other.worst > self.worst) {
            (self.worst, self.worst_job) = (other.worst, other.worst_job);
        }
        self.rows += other.rows;
        self.sum += other.sum;
    }
}

/// Error sums of all classes, in the order of [`TensorClass::ALL`].
#[derive(Clone, Debug, Default)]
pub(super) struct Tally([ErrorSums; TensorClass::ALL.len()]);

impl Tally {
    /// Adds rows of a job.
    pub(super) fn add_rows(
        &mut self,
        class: TensorClass,
        job: usize,
        (rows, sum, worst): (u64, f64, f64),
    ) {
        if let Some(sums) = self.0.get_mut(class as usize) {
            sums.add(&ErrorSums { rows, sum, worst, worst_job: job });
        }
    }

    /// Adds what was counted of a file.
    pub(super) fn add_file(&mut self, sums: &[ErrorSums]) {
        for (sum, of_file) in self.0.iter_mut().zip(sums) {
            sum.add(of_file);
        }
    }

    /// The sums.
    pub(super) fn sums(&self) -> Vec<ErrorSums> {
        self.0.to_vec()
    }

    /// By class; classes that the model lacks are left out.
    pub(super) fn classes(&self, plan: &OutputPlan) -> Vec<ClassReport> {
        let mut classes = class_bytes(plan);
        for class in &mut classes {
            let sums = self.0.get(class.class as usize).filter(|sums| sums.rows > 0);
            let Some(sums) = sums else { continue };
            class.worst_relative_error = Some(sums.worst);
            class.worst_weight = plan.jobs.get(sums.worst_job).map(|job| job.name.clone());
            class.mean_relative_error = Some(sums.sum / sums.rows as f64);
        }
        classes
    }
}

/// Bytes by class, errors not known yet; classes that the model lacks are left out.
pub(super) fn class_bytes(plan: &OutputPlan) -> Vec<ClassReport> {
    let of_class = |class| {
        let jobs = || plan.jobs.iter().filter(move |job| job.class == class);
        ClassReport {
            class,
            n_weights: jobs().count(),
            bytes_in: Bytes(jobs().map(Job::bytes_in).sum()),
            bytes_out: Bytes(jobs().map(Job::bytes_out).sum()),
            worst_relative_error: None,
            worst_weight: None,
            mean_relative_error: None,
        }
    };
    TensorClass::ALL.into_iter().map(of_class).filter(|class| class.n_weights > 0).collect()
}
