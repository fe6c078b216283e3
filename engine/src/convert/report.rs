//! Where a conversion stands and what it did: progress, sums of rounding errors, bytes by class.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;
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

/// Running error sums of one class.
#[derive(Clone, Copy, Default)]
struct ErrorSums {
    rows: u64,
    sum: f64,
    worst: f64,
    worst_job: usize,
}

pub(super) struct Tally {
    errors: [ErrorSums; TensorClass::ALL.len()],
    classes: Vec<ClassReport>,
}

impl Tally {
    pub(super) fn new(plan: &OutputPlan) -> Self {
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

    pub(super) fn add_row(&mut self, class: TensorClass, job: usize, relative_error: Option<f64>) {
        let Some(error) = relative_error else { return };
        let sums = &mut self.errors[class as usize];
        if sums.rows == 0 || error > sums.worst {
            sums.worst = error;
            sums.worst_job = job;
        }
        sums.rows += 1;
        sums.sum += error;
    }

    pub(super) fn report(
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
