//! Finding and reading the files of a model. Owns which files belong to it and whether any is
//! missing; what the tensors mean is `assemble`'s.

use std::borrow::{Borrow, Cow};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use rayon::prelude::*;
use serde::Deserialize;
use serde_json::Value;

use super::header::{ShardHeader, read_header};
use super::roles::PADDING_PREFIX;
use super::{CatalogueError, Warning, config};

const INDEX_FILE: &str = "model.safetensors.index.json";
/// Most shards that a file name's numbering is believed to promise.
const SHARD_CAP: u32 = 100_000;

/// The headers of a model's files, by file name.
pub(super) struct ReadShards<'a> {
    pub(super) names: Vec<String>,
    pub(super) headers: Vec<ShardHeader>,
    /// Files that should exist by what is named here, and do not.
    absent: BTreeMap<String, String>,
    index: Option<Index<'a>>,
    warnings: Vec<Warning>,
}

/// The index: which file is said to hold which tensor.
#[derive(Deserialize)]
struct Index<'a> {
    #[serde(borrow)]
    weight_map: HashMap<Text<'a>, Text<'a>>,
}

/// A string of a JSON text, copied only where it is escaped: an index has 240,000 of them.
#[derive(Deserialize, PartialEq, Eq, Hash)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl Borrow<str> for Text<'_> {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// The bytes of the index; `None` where they cannot be had.
pub(super) fn index_bytes(directory: &Path) -> Option<Vec<u8>> {
    fs::read(directory.join(INDEX_FILE)).ok()
}

pub(super) fn read_config(directory: &Path) -> Result<Vec<u8>, CatalogueError> {
    let path = directory.join("config.json");
    fs::read(&path).map_err(|source| {
        // A folder without config.json and a path that is no folder call for different remedies.
        if directory.is_dir() && source.kind() == ErrorKind::NotFound {
            CatalogueError::NotAModel { directory: directory.to_owned() }
        } else {
            let path = if directory.is_dir() { path } else { directory.to_owned() };
            CatalogueError::Io { path, source }
        }
    })
}

/// Adds the stop tokens of generation_config.json; a file that cannot be read adds none.
pub(super) fn add_generation_stop_tokens(directory: &Path, stop_tokens: &mut Vec<u32>) {
    let value: Option<Value> = fs::read(directory.join("generation_config.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok());
    stop_tokens.extend(value.iter().flat_map(config::stop_tokens));
    stop_tokens.sort_unstable();
    stop_tokens.dedup();
}

/// Reads the header of every shard, in parallel. A promised file that is absent is no error yet:
/// whether anything in it is needed, only the headers can tell.
pub(super) fn read_shards<'a>(
    directory: &Path,
    index: Option<&'a [u8]>,
) -> Result<ReadShards<'a>, CatalogueError> {
    let mut warnings = Vec::new();
    let mut present = shard_files(directory)?;
    let index = parse_index(index, present.len(), &mut warnings);
    let mut absent = BTreeMap::new();
    for (name, named_by) in promised_files(&present, index.as_ref()) {
        if directory.join(&name).is_file() {
            present.insert(name);
        } else {
            absent.entry(name).or_insert(named_by);
        }
    }
    if present.is_empty() {
        return Err(match absent.pop_first() {
            Some((name, named_by)) => {
                CatalogueError::MissingShard { path: directory.join(name), named_by }
            }
            None => CatalogueError::NoShards { directory: directory.to_owned() },
        });
    }
    let names: Vec<String> = present.into_iter().collect();
    let headers = names
        .par_iter()
        .map(|name| {
            let path = directory.join(name);
            let header = read_header(&path)
                .map_err(|source| CatalogueError::Header { path: path.clone(), source })?;
            match unknown_container(&header) {
                Some(found) => Err(CatalogueError::UnknownContainer { path, found }),
                None => Ok(header),
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    Ok(ReadShards { names, headers, absent, index, warnings })
}

impl ReadShards<'_> {
    /// The absent file that explains why a tensor is missing: the one that the index says holds it,
    /// or, where the index does not know the tensor, the first.
    pub(super) fn blame(&self, directory: &Path, error: CatalogueError) -> CatalogueError {
        let CatalogueError::MissingTensor { tensor, .. } = &error else { return error };
        let holder = self.index.as_ref().and_then(|index| index.weight_map.get(tensor.as_str()));
        let absent = match holder {
            Some(file) => self.absent.get_key_value(file.0.as_ref()),
            None => self.absent.first_key_value(),
        };
        match absent {
            Some((name, named_by)) => CatalogueError::MissingShard {
                path: directory.join(name),
                named_by: named_by.clone(),
            },
            None => error,
        }
    }

    /// What a user should know of files of which every needed tensor was found.
    pub(super) fn into_warnings(mut self) -> Vec<Warning> {
        if let Some((name, named_by)) = self.absent.first_key_value() {
            self.warnings.push(Warning {
                finding: format!(
                    "{} files are absent, such as {name} ({named_by})",
                    self.absent.len()
                ),
                remedy: "nothing: every tensor that the model needs is in the others".to_owned(),
            });
        }
        self.warnings.extend(self.index_difference());
        self.warnings
    }

    /// How the index differs from the headers, absent files apart.
    fn index_difference(&self) -> Option<Warning> {
        let index = &self.index.as_ref()?.weight_map;
        let is_padding = |name: &str| name.starts_with(PADDING_PREFIX);
        let is_present = |file: &str| !self.absent.contains_key(file);
        let count = |header: &ShardHeader| {
            let (mut n_lacking, mut n_listed) = (0, 0);
            for tensor in header.tensors.iter().filter(|tensor| !is_padding(&tensor.name)) {
                match index.get(tensor.name.as_str()) {
                    Some(file) => n_listed += usize::from(is_present(&file.0)),
                    None => n_lacking += 1,
                }
            }
            (n_lacking, n_listed)
        };
        let (n_lacking, n_listed) = self
            .headers
            .par_iter()
            .map(count)
            .reduce(|| (0, 0), |a: (usize, usize), b| (a.0 + b.0, a.1 + b.1));
        let n_named =
            index.iter().filter(|(name, file)| !is_padding(&name.0) && is_present(&file.0)).count();
        let n_beyond = n_named.saturating_sub(n_listed);
        (n_lacking + n_beyond > 0).then(|| Warning {
            finding: format!(
                "{INDEX_FILE} lacks {n_lacking} tensors of the shards and names {n_beyond} that they do not hold"
            ),
            remedy: "nothing: the shard headers are used".to_owned(),
        })
    }
}

/// The first metadata entry of our own containers that this build does not know how to read: another
/// format, scales of another grouping or of another type. Other keys may be ignored.
fn unknown_container(header: &ShardHeader) -> Option<String> {
    let known = |key: &str| match key.rsplit('.').next() {
        Some("format") => Some("1"),
        Some("group") => Some("row"),
        Some("scale") => Some("F32"),
        _ => None,
    };
    header
        .metadata
        .iter()
        .filter(|(key, _)| key.starts_with("tierkeep."))
        .find(|(key, value)| known(key).is_some_and(|k| !value.eq_ignore_ascii_case(k)))
        .map(|(key, value)| format!("{key} = {value}"))
}

/// `model*.safetensors` files of the folder.
fn shard_files(directory: &Path) -> Result<BTreeSet<String>, CatalogueError> {
    let io = |source| CatalogueError::Io { path: directory.to_owned(), source };
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(directory).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        if let Some(name) = name.to_str()
            && name.starts_with("model")
            && name.ends_with(".safetensors")
        {
            names.insert(name.to_owned());
        }
    }
    Ok(names)
}

/// The index; `None` with a warning where there is none that can be read.
fn parse_index<'a>(
    bytes: Option<&'a [u8]>,
    n_present: usize,
    warnings: &mut Vec<Warning>,
) -> Option<Index<'a>> {
    let index = bytes.map(serde_json::from_slice);
    let finding = match index {
        Some(Ok(index)) => return Some(index),
        Some(Err(_)) => format!("{INDEX_FILE} cannot be read as an index"),
        // A model of one file needs none.
        None if n_present <= 1 => return None,
        None => format!("{INDEX_FILE} is absent"),
    };
    warnings.push(Warning { finding, remedy: "nothing: the shard headers are used".to_owned() });
    None
}

/// Files that the index or the numbering of the present files says must exist, with who says so. A
/// name in the index that leaves the folder is ignored.
fn promised_files(present: &BTreeSet<String>, index: Option<&Index<'_>>) -> Vec<(String, String)> {
    let inside = |name: &&str| !name.contains(['/', '\\']) && *name != ".." && !name.is_empty();
    let files: HashSet<&str> = index
        .iter()
        .flat_map(|index| index.weight_map.values())
        .map(|file| file.0.as_ref())
        .filter(inside)
        .collect();
    let mut promised: Vec<(String, String)> =
        files.into_iter().map(|f| (f.to_owned(), format!("named by {INDEX_FILE}"))).collect();
    // Two downloads in one folder may number differently; each is held to its own total.
    let totals: BTreeSet<(String, u32, usize)> =
        present.iter().filter_map(|name| parse_numbering(name)).collect();
    for (stem, total, width) in totals {
        promised.extend((1..=total).map(|n| {
            let name = format!("{stem}-{n:0width$}-of-{total:0width$}.safetensors");
            (name, format!("the other files are numbered to {total}"))
        }));
    }
    promised
}

/// `model-00003-of-00144.safetensors` to (`model`, 144, 5).
fn parse_numbering(name: &str) -> Option<(String, u32, usize)> {
    let stem = name.strip_suffix(".safetensors")?;
    let (stem, total) = stem.rsplit_once("-of-")?;
    let (stem, number) = stem.rsplit_once('-')?;
    let width = total.len();
    let total: u32 = total.parse().ok().filter(|t| *t <= SHARD_CAP)?;
    let number: u32 = number.parse().ok()?;
    (1..=total).contains(&number).then(|| (stem.to_owned(), total, width))
}
