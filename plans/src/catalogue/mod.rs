//! The model catalogue: which tensors a checkpoint holds, what each is for, how it is stored and
//! where it lies. Built from config.json and shard headers; tensor data are never read.
//!
//! What is counted is what is present: sizes come from byte ranges, never from names, parameter
//! counts or the config. The index file is only a hint; the headers are the truth.

mod assemble;
mod class;
pub mod config;
pub mod container;
pub mod header;
mod layout;
pub mod outline;
mod packed;
mod part;
pub mod roles;
mod shards;
pub mod sidecar;
pub mod source;
mod stored;
mod survey;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

pub use self::class::{ClassBytes, RoleClass};
pub use self::config::ConfigError;
pub use self::header::HeaderError;
pub use self::layout::{
    DIRECT_ALIGN, ExpertBiases, ExpertForm, ExpertLayout, Extent, PlacedMatrix,
};
pub use self::outline::{Outline, OutlineLine};
pub use self::roles::{FusedTensor, LayerTensor, Part, Projection, Role};
use self::shards::Files;
use self::sidecar::Sidecar;
pub use self::source::{Entry, Folder, Source, open_file};
pub use self::stored::{BlockScale, Group, Packed, PackedBits, ScaleType, Scales, StoredType};
pub use self::survey::{
    Missing, ShardState, StopTokens, Survey, SurveyedShard, stop_tokens, survey,
};
use crate::spec::ArchSpec;
use crate::units::{Bytes, round_up};

/// Alignment of every tensor in memory, bytes: a cache line, and wide enough for any vector load.
pub const TENSOR_ALIGN: u64 = 64;

/// A range of bytes of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index into [`Catalogue::shards`].
    pub shard: u32,
    /// First byte in the file.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// One weight: a matrix `(rows, cols)`, or a vector as `(1, cols)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// What it is for.
    pub role: Role,
    /// Output rows.
    pub rows: u64,
    /// Elements of a row.
    pub cols: u64,
    /// How it is stored.
    pub stored: StoredType,
    /// Where it lies.
    pub weight: Span,
    /// Where its scales lie, if its type has any: how far one reaches is the type's to say.
    pub scales: Option<Span>,
}

impl Tensor {
    /// Bytes on disk, scales included.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.weight.bytes + self.scales.map_or(0, |s| s.bytes))
    }

    /// Bytes in memory when resident: weight and scales, each aligned to [`TENSOR_ALIGN`].
    #[must_use]
    pub fn resident_bytes(&self) -> Bytes {
        let aligned = |span: Span| round_up(span.bytes, TENSOR_ALIGN);
        Bytes(aligned(self.weight) + self.scales.map_or(0, aligned))
    }

    /// Bytes of the scales that one row needs: all of its blocks', where a scale is for a block.
    #[must_use]
    pub fn row_scale_bytes(&self) -> u64 {
        let per_row = self.stored.scales().shape(self.rows, self.cols).map_or(0, |s| s.1);
        per_row.saturating_mul(self.stored.scale_bytes())
    }

    /// Bytes of a buffer that holds one row and its scales, each aligned to [`TENSOR_ALIGN`].
    #[must_use]
    pub fn row_buffer_bytes(&self) -> u64 {
        let weights = round_up(self.stored.row_bytes(self.cols), TENSOR_ALIGN);
        weights.saturating_add(round_up(self.row_scale_bytes(), TENSOR_ALIGN))
    }
}

/// One file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Where it is.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
}

/// Something about the model that a user should know and that does not stop it from running.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Id of the check that it belongs to, one of [`crate::checks::IDS`].
    pub check: &'static str,
    /// What was found.
    pub finding: String,
    /// What to do about it.
    pub remedy: String,
}

/// Everything known of a model without reading its weights.
#[derive(Clone, Debug)]
pub struct Catalogue {
    /// The model's folder.
    pub directory: PathBuf,
    /// Its architecture.
    pub spec: ArchSpec,
    /// Its files, by name.
    pub shards: Vec<Shard>,
    /// Every weight that is not a routed expert's, in layer order; padding is left out.
    pub tensors: Vec<Tensor>,
    /// Routed experts, by [`Catalogue::expert_index`].
    pub experts: Vec<ExpertLayout>,
    /// Multi-token-prediction layers that are present and whole.
    pub n_mtp_layers_present: usize,
    /// Hash of all headers and sizes; the same wherever the model lies.
    pub fingerprint: String,
    /// Bytes of tensors that have no role in a model of this config; they are not loaded.
    pub unrecognised_bytes: Bytes,
    /// Bytes of tensors that are known to serve nothing: alignment filler, weights of experts that
    /// return their input.
    pub ignored_bytes: Bytes,
    /// Number of tensors in all headers.
    pub n_tensors: usize,
    /// Size of tokenizer.json, 0 where there is none.
    pub tokenizer_bytes: Bytes,
    /// What a user should know.
    pub warnings: Vec<Warning>,
    /// For each layer, where its experts start in `experts`.
    expert_base: Vec<Option<usize>>,
}

/// Why a model cannot be catalogued.
#[derive(Debug, thiserror::Error)]
pub enum CatalogueError {
    /// The folder or one of its small files cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// What was being read.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// There is no config.json.
    #[error("{} has no config.json: a model is a folder with config.json and *.safetensors", directory.display())]
    NotAModel {
        /// The folder.
        directory: PathBuf,
    },
    /// The config cannot be used.
    #[error("{}: {source}", directory.display())]
    Config {
        /// The folder.
        directory: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
    /// No weights.
    #[error("{} has no model*.safetensors files: fetch the weights", directory.display())]
    NoShards {
        /// The folder.
        directory: PathBuf,
    },
    /// A shard that the index or the numbering names is absent.
    #[error("{} is missing ({named_by}): fetch it again", path.display())]
    MissingShard {
        /// Where it should be.
        path: PathBuf,
        /// Who says that it should exist.
        named_by: String,
    },
    /// A header is not to be trusted.
    #[error("{} {source}: {}", path.display(), source.remedy())]
    Header {
        /// The shard.
        path: PathBuf,
        /// What is wrong.
        source: HeaderError,
    },
    /// The same tensor lies in two shards.
    #[error("tensor {tensor} is in both {} and {}: remove the stale file", first.display(), second.display())]
    TensorTwice {
        /// The name.
        tensor: String,
        /// One shard.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// A tensor that the architecture needs is nowhere.
    #[error(
        "tensor {tensor} is in none of the {shards} shards: the download is incomplete or config.json belongs to another model"
    )]
    MissingTensor {
        /// Its published name.
        tensor: String,
        /// How many shards were read.
        shards: usize,
    },
    /// A tensor has another shape than the config asks for.
    #[error("tensor {tensor} has shape {found:?}, expected {expected:?} by config.json")]
    WrongShape {
        /// Its published name.
        tensor: String,
        /// The shape in the header.
        found: Vec<u64>,
        /// The shape that the config asks for.
        expected: Vec<u64>,
    },
    /// Packed integers whose bytes, scales and metadata do not go together.
    #[error("tensor {tensor} holds {found}, expected {expected}: {remedy}")]
    Packing {
        /// Its published name.
        tensor: String,
        /// What was found.
        found: String,
        /// What would be right.
        expected: String,
        /// What to do about it.
        remedy: &'static str,
    },
    /// A container of ours in a form that this build does not read.
    #[error("{} is packed in a form that this build does not read ({found}): use a newer tierkeep, or convert the model again", path.display())]
    UnknownContainer {
        /// The shard.
        path: PathBuf,
        /// The metadata entry.
        found: String,
    },
    /// A tensor that the model needs is stored in a type that this build does not read.
    #[error(
        "tensor {tensor} is stored as {found}: this build reads bf16, f16, f32, e4m3 with scales of 128x128 blocks (_scale_inv), MXFP4 and packed U8 of 8, 4 or 2 bits with .qs scales"
    )]
    UnsupportedType {
        /// Its published name.
        tensor: String,
        /// What was found.
        found: String,
    },
}

impl Catalogue {
    /// Reads the model in the folder `directory` from its config and shard headers.
    ///
    /// # Errors
    /// [`CatalogueError`]: every variant names the file or the tensor and what to do.
    pub fn open(directory: &Path) -> Result<Self, CatalogueError> {
        Self::open_from(&Folder::new(directory))
    }

    /// Reads the model in a folder, from its sidecar index if it has one that can be believed, and
    /// leaves one where it is worth it. For those who want what is in the model and not what is odd
    /// about it: its index file is not compared with its headers. `data_dir` is the user's data
    /// folder, for models beside which nothing can or should be written.
    ///
    /// # Errors
    /// As [`Catalogue::open`].
    pub fn open_cached(directory: &Path, data_dir: Option<&Path>) -> Result<Self, CatalogueError> {
        let folder = Folder::new(directory);
        let files = Files::list(&folder)?;
        let (spec, configs) = files.spec()?;
        let sidecar = Sidecar::of(directory, data_dir, &files.of_weights(), &configs);
        let kept = sidecar.as_ref().and_then(|sidecar| sidecar.load(directory, &spec));
        if let Some(mut catalogue) = kept {
            catalogue.tokenizer_bytes = Bytes(files.tokenizer_bytes());
            return Ok(catalogue);
        }
        let catalogue = Self::read(&files, spec, false)?;
        if let Some(sidecar) = sidecar {
            sidecar.save(&catalogue);
        }
        Ok(catalogue)
    }

    /// Reads a model from wherever it is. Its fingerprint, and all else but the paths, are the same
    /// whatever kind of source the bytes come from.
    ///
    /// # Errors
    /// As [`Catalogue::open`].
    pub fn open_from(source: &dyn Source) -> Result<Self, CatalogueError> {
        let files = Files::list(source)?;
        let (spec, _) = files.spec()?;
        Self::read(&files, spec, source.index_is_cheap())
    }

    /// Reads the headers, with the index compared with them or read only where it must be.
    fn read(
        files: &Files<'_>,
        spec: ArchSpec,
        compares_index: bool,
    ) -> Result<Self, CatalogueError> {
        let source = files.source();
        let reads_index = compares_index || files.needs_index();
        let index = if reads_index { files.index() } else { files.index_unread() };
        let late_index;
        let mut read = shards::read_shards(files, &index)?;
        let mut catalogue = match assemble::assemble(source, spec, &read) {
            Ok(catalogue) => catalogue,
            Err(error) => {
                // Which file holds what is missing, only the index can tell.
                if !reads_index && matches!(error, CatalogueError::MissingTensor { .. }) {
                    late_index = files.index();
                    read.consult(files, &late_index);
                }
                return Err(read.blame(source, error));
            }
        };
        catalogue.tokenizer_bytes = Bytes(files.tokenizer_bytes());
        catalogue.warnings.extend(read.into_warnings());
        Ok(catalogue)
    }

    /// The position of a routed expert in [`Catalogue::experts`]; `None` where the layer has none.
    #[must_use]
    pub fn expert_index(&self, layer: usize, expert: usize) -> Option<usize> {
        let base = (*self.expert_base.get(layer)?)?;
        (expert < self.spec.router.n_experts).then_some(base + expert)
    }

    /// The layout of one routed expert.
    #[must_use]
    pub fn expert(&self, layer: usize, expert: usize) -> Option<&ExpertLayout> {
        self.experts.get(self.expert_index(layer, expert)?)
    }

    /// All routed experts of a layer; empty where it has none.
    #[must_use]
    pub fn layer_experts(&self, layer: usize) -> &[ExpertLayout] {
        match self.expert_base.get(layer) {
            Some(Some(base)) => &self.experts[*base..base + self.spec.router.n_experts],
            _ => &[],
        }
    }

    /// Every weight by role, for binding.
    #[must_use]
    pub fn by_role(&self) -> HashMap<Role, &Tensor> {
        self.tensors.iter().map(|t| (t.role, t)).collect()
    }

    /// Whether a tensor belongs to a multi-token-prediction layer.
    #[must_use]
    pub fn is_mtp(&self, role: Role) -> bool {
        match role {
            Role::Layer { layer, .. }
            | Role::SubBlock { layer, .. }
            | Role::Expert { layer, .. }
            | Role::FusedExperts { layer, .. } => layer as usize >= self.spec.n_layers,
            Role::Embedding | Role::Head | Role::FinalNorm | Role::Padding => false,
        }
    }

    /// The published name of a role in this model.
    #[must_use]
    pub fn name_of(&self, role: Role) -> String {
        roles::name_of(self.spec.family, self.spec.n_layers, role)
    }

    /// Bytes of all shards.
    #[must_use]
    pub fn total_bytes(&self) -> Bytes {
        self.shards.iter().map(|s| Bytes(s.bytes)).sum()
    }

    /// Bytes of every routed expert of the decoder layers, as read from disk.
    #[must_use]
    pub fn routed_bytes(&self) -> Bytes {
        self.spec
            .expert_layers()
            .flat_map(|layer| self.layer_experts(layer))
            .map(|e| Bytes(e.read_bytes()))
            .sum()
    }
}
