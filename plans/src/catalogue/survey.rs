//! A damaged model, looked at whole: every file that is missing, cut off or has a header that lies, and
//! every tensor that is nowhere. A catalogue stops at the first of them, for it needs none; who has to
//! fetch files again needs all.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::ErrorKind;
use std::path::PathBuf;

use rayon::prelude::*;
use serde::Deserialize;
use serde_json::Value;

use super::header::{HeaderBytes, HeaderError, ShardHeader};
use super::roles::{self, FusedTensor, Part, Projection, Role};
use super::shards::{self, Files, IndexBytes};
use super::source::Source;
use super::{CatalogueError, assemble, config, container};
use crate::spec::ArchSpec;
use crate::units::Bytes;

/// Missing tensors that are listed; the figures of a config may promise hundreds of millions.
const MISSING_CAP: usize = 200_000;

/// What is known of a model that cannot be catalogued.
#[derive(Debug)]
pub struct Survey {
    /// What config.json says, or why it says nothing.
    pub spec: Result<ArchSpec, CatalogueError>,
    /// Every file that is there or should be, by name.
    pub shards: Vec<SurveyedShard>,
    /// Why the folder could not be listed at all.
    pub list_error: Option<CatalogueError>,
    /// Bytes of tensors that the index promises and no header accounts for, where it tells.
    pub unaccounted_bytes: Option<Bytes>,
    /// Tensors that the architecture needs and no valid header has, in layer order; empty where the
    /// architecture is not known.
    pub missing: Vec<Missing>,
    /// Tensors that are in two files: name, one file, the other.
    pub twice: Vec<(String, String, String)>,
}

/// One file of the model.
#[derive(Debug)]
pub struct SurveyedShard {
    /// Its name.
    pub name: String,
    /// Where it is or should be.
    pub path: PathBuf,
    /// How it is.
    pub state: ShardState,
}

/// How a file is.
#[derive(Debug)]
pub enum ShardState {
    /// As long as its header says, and the header is valid.
    Whole {
        /// Its size.
        bytes: u64,
    },
    /// It is not there.
    Missing {
        /// Who says that it should be.
        named_by: String,
    },
    /// Its header or its length is wrong, or it cannot be read.
    Damaged {
        /// What is wrong.
        error: HeaderError,
    },
    /// A container of ours in a form that this build does not read.
    UnknownContainer {
        /// The metadata entry.
        found: String,
    },
}

/// A tensor that is nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// What it is for.
    pub role: Role,
    /// Its published name.
    pub name: String,
    /// The missing or damaged file that explains it: the one that the index names, or, without an
    /// index, any.
    pub explained_by: Option<String>,
}

/// The tokens that end generation, by the file that names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopTokens {
    /// By config.json.
    pub config: Vec<u32>,
    /// By generation_config.json; `None` where there is none that can be read.
    pub generation: Option<Vec<u32>>,
}

impl StopTokens {
    /// Those of both, ascending, each once.
    #[must_use]
    pub fn union(&self) -> Vec<u32> {
        let both = self.config.iter().chain(self.generation.iter().flatten());
        let union: BTreeSet<u32> = both.copied().collect();
        union.into_iter().collect()
    }
}

/// Reads the tokens that end generation; files that cannot be read name none.
#[must_use]
pub fn stop_tokens(source: &dyn Source) -> StopTokens {
    let named = |file| {
        let bytes = source.small_file(file).ok()??;
        let json: Value = serde_json::from_slice(&bytes).ok()?;
        Some(config::stop_tokens(&json))
    };
    StopTokens {
        config: named("config.json").unwrap_or_default(),
        generation: named("generation_config.json"),
    }
}

/// What of an index a survey needs.
#[derive(Default, Deserialize)]
struct SurveyIndex {
    #[serde(default)]
    weight_map: HashMap<String, String>,
    #[serde(default)]
    metadata: IndexMetadata,
}

#[derive(Default, Deserialize)]
struct IndexMetadata {
    #[serde(default)]
    total_size: Option<f64>,
}

/// Looks at everything that the model at `source` is made of, and stops at nothing.
#[must_use]
pub fn survey(source: &dyn Source) -> Survey {
    let files = match Files::list(source) {
        Ok(files) => files,
        Err(error) => {
            let directory = source.label().to_owned();
            return Survey {
                spec: Err(CatalogueError::NotAModel { directory }),
                shards: Vec::new(),
                list_error: Some(error),
                unaccounted_bytes: None,
                missing: Vec::new(),
                twice: Vec::new(),
            };
        }
    };
    let spec = files.config().and_then(|config| {
        config::arch_spec(&config).map_err(|error| CatalogueError::Config {
            directory: source.label().to_owned(),
            source: error,
        })
    });
    let index = match files.index() {
        IndexBytes::Read(bytes) => serde_json::from_slice(&bytes).unwrap_or_default(),
        IndexBytes::Absent | IndexBytes::Unreadable(_) | IndexBytes::NotRead => {
            SurveyIndex::default()
        }
    };
    let looked = look_at_shards(source, &files, &index);
    let headers: Vec<(&str, &ShardHeader)> = looked
        .iter()
        .filter_map(|(shard, header)| Some((shard.name.as_str(), header.as_ref()?)))
        .collect();
    let (names, twice) = names_in(&headers);
    let broken: BTreeSet<&str> = looked
        .iter()
        .filter(|(shard, _)| !matches!(shard.state, ShardState::Whole { .. }))
        .map(|(shard, _)| shard.name.as_str())
        .collect();
    let missing = match &spec {
        Ok(spec) => missing(spec, &names, &index, &broken),
        Err(_) => Vec::new(),
    };
    let unaccounted_bytes = unaccounted(&headers, &index);
    Survey {
        spec,
        list_error: None,
        unaccounted_bytes,
        missing,
        twice,
        shards: looked.into_iter().map(|(shard, _)| shard).collect(),
    }
}

/// Every file that is there or should be, with its header where that can be believed. A file that was
/// cut off has a header that can: which tensors it should hold is known.
fn look_at_shards(
    source: &dyn Source,
    files: &Files<'_>,
    index: &SurveyIndex,
) -> Vec<(SurveyedShard, Option<ShardHeader>)> {
    let present = files.shard_names();
    let mut expected: BTreeMap<String, Option<String>> =
        present.iter().map(|name| (name.clone(), None)).collect();
    let named: HashSet<&str> = index.weight_map.values().map(String::as_str).collect();
    for (name, named_by) in shards::promised(&present, named.into_iter()) {
        if name.ends_with(shards::SHARD_SUFFIX) {
            expected.entry(name).or_insert(Some(named_by));
        }
    }
    let expected: Vec<(String, Option<String>)> = expected.into_iter().collect();
    expected
        .into_par_iter()
        .map(|(name, named_by)| {
            let (state, header) = state_of(source, &name, named_by);
            (SurveyedShard { path: source.locate(&name), name, state }, header)
        })
        .collect()
}

fn state_of(
    source: &dyn Source,
    name: &str,
    named_by: Option<String>,
) -> (ShardState, Option<ShardHeader>) {
    let bytes = match source.header(name) {
        Ok(bytes) => bytes,
        Err(HeaderError::Io(error)) if error.kind() == ErrorKind::NotFound => {
            let named_by = named_by.unwrap_or_else(|| "its link leads nowhere".to_owned());
            return (ShardState::Missing { named_by }, None);
        }
        Err(error) => return (ShardState::Damaged { error }, None),
    };
    match bytes.parse() {
        Ok(header) => match container::unknown(&header.metadata) {
            Some(found) => (ShardState::UnknownContainer { found }, None),
            None => (ShardState::Whole { bytes: header.file_bytes }, Some(header)),
        },
        Err(error) => {
            let header = match &error {
                HeaderError::WrongLength { expected_bytes, .. } => {
                    let expected = HeaderBytes { file_bytes: *expected_bytes, ..bytes };
                    expected.parse().ok()
                }
                _ => None,
            };
            (ShardState::Damaged { error }, header)
        }
    }
}

/// The names of all tensors, and those that are in two files.
fn names_in<'a>(
    headers: &[(&'a str, &'a ShardHeader)],
) -> (HashSet<&'a str>, Vec<(String, String, String)>) {
    let mut holders: HashMap<&str, &str> = HashMap::new();
    let mut twice = Vec::new();
    for (file, header) in headers {
        let names = header.tensors().map(|tensor| tensor.name);
        for name in names.filter(|name| !name.starts_with(roles::PADDING_PREFIX)) {
            if let Some(first) = holders.insert(name, file) {
                twice.push((name.to_owned(), first.to_owned(), (*file).to_owned()));
            }
        }
    }
    (holders.into_keys().collect(), twice)
}

/// Tensors that the architecture needs and no header has.
fn missing(
    spec: &ArchSpec,
    names: &HashSet<&str>,
    index: &SurveyIndex,
    broken: &BTreeSet<&str>,
) -> Vec<Missing> {
    let explain = |name: &str| match index.weight_map.get(name) {
        Some(file) => broken.get(file.as_str()).map(|file| (*file).to_owned()),
        // A file that no index describes may hold anything.
        None => broken.first().map(|file| (*file).to_owned()),
    };
    let held: HashSet<(Role, Part)> =
        names.iter().filter_map(|name| roles::role_of(spec.family, spec.n_layers, name)).collect();
    let is_absent = |role: &Role| !held.contains(&(*role, Part::Weight));
    let experts = spec.expert_layers().flat_map(|layer| expert_roles(spec, layer as u32));
    assemble::required_roles(spec, spec.n_layers)
        .into_iter()
        .chain(experts)
        .filter(is_absent)
        .take(MISSING_CAP)
        .map(|role| {
            let name = roles::name_of(spec.family, spec.n_layers, role);
            Missing { role, explained_by: explain(&name), name }
        })
        .collect()
}

/// The tensors that hold the routed experts of a layer.
fn expert_roles(spec: &ArchSpec, layer: u32) -> Box<dyn Iterator<Item = Role>> {
    if roles::has_fused_experts(spec.family) {
        let has_biases = spec.expert_biases;
        let biases = [FusedTensor::GateUpBias, FusedTensor::DownBias];
        let biases = biases.into_iter().filter(move |_| has_biases);
        let fused = [FusedTensor::GateUp, FusedTensor::Down].into_iter().chain(biases);
        return Box::new(fused.map(move |tensor| Role::FusedExperts { layer, tensor }));
    }
    let projections = [Projection::Gate, Projection::Up, Projection::Down];
    Box::new((0..spec.router.n_experts as u32).flat_map(move |expert| {
        projections.map(|projection| Role::Expert { layer, expert, projection })
    }))
}

/// Bytes of tensors that the index's total has and no header accounts for.
fn unaccounted(headers: &[(&str, &ShardHeader)], index: &SurveyIndex) -> Option<Bytes> {
    let total = index.metadata.total_size.filter(|total| *total >= 1.0 && *total < 1e18)?;
    let counted: u64 =
        headers.iter().flat_map(|(_, header)| header.tensors()).map(|t| t.end - t.start).sum();
    Some(Bytes((total as u64).saturating_sub(counted)))
}
