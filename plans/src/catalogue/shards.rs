//! Finding and reading the files of a model. Owns which files belong to it and whether any is
//! missing; what the tensors mean is `assemble`'s.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use rayon::prelude::*;
use serde_json::Value;

use super::header::{ShardHeader, read_header};
use super::{CatalogueError, Warning, config};

const INDEX_FILE: &str = "model.safetensors.index.json";
/// Most shards that a file name's numbering is believed to promise.
const SHARD_CAP: u32 = 100_000;

/// The headers of a model's files, by file name.
pub(super) struct ReadShards {
    pub(super) names: Vec<String>,
    pub(super) headers: Vec<ShardHeader>,
    pub(super) warnings: Vec<Warning>,
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

/// Reads the header of every shard, in parallel.
pub(super) fn read_shards(directory: &Path) -> Result<ReadShards, CatalogueError> {
    let mut warnings = Vec::new();
    let present = shard_files(directory)?;
    let mut names = present.clone();
    for (name, named_by) in promised_files(directory, &present, &mut warnings) {
        if !present.contains(&name) && !directory.join(&name).is_file() {
            let path = directory.join(name);
            return Err(CatalogueError::MissingShard { path, named_by });
        }
        names.insert(name);
    }
    if names.is_empty() {
        return Err(CatalogueError::NoShards { directory: directory.to_owned() });
    }
    let names: Vec<String> = names.into_iter().collect();
    let headers = names
        .par_iter()
        .map(|name| {
            let path = directory.join(name);
            read_header(&path).map_err(|source| CatalogueError::Header { path, source })
        })
        .collect::<Result<Vec<_>, _>>()?;
    Ok(ReadShards { names, headers, warnings })
}

/// `model*.safetensors` files of the folder.
fn shard_files(directory: &Path) -> Result<BTreeSet<String>, CatalogueError> {
    let io = |source| CatalogueError::Io { path: directory.to_owned(), source };
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(directory).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        if let Some(name) = name.to_str() {
            if name.starts_with("model") && name.ends_with(".safetensors") {
                names.insert(name.to_owned());
            }
        }
    }
    Ok(names)
}

/// Files that the index or the numbering of the present files says must exist, with who says so.
fn promised_files(
    directory: &Path,
    present: &BTreeSet<String>,
    warnings: &mut Vec<Warning>,
) -> Vec<(String, String)> {
    let mut promised = Vec::new();
    match fs::read(directory.join(INDEX_FILE)) {
        Ok(bytes) => match index_files(&bytes) {
            Some(files) => {
                promised.extend(files.into_iter().map(|f| (f, format!("named by {INDEX_FILE}"))))
            }
            None => warnings.push(Warning {
                finding: format!("{INDEX_FILE} cannot be read as an index"),
                remedy: "nothing: the shard headers are used".to_owned(),
            }),
        },
        Err(_) if present.len() > 1 => warnings.push(Warning {
            finding: format!("{INDEX_FILE} is absent"),
            remedy: "nothing: the shard headers are used".to_owned(),
        }),
        Err(_) => {}
    }
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

/// File names of an index; `None` where it is not one. A name that leaves the folder is ignored.
fn index_files(bytes: &[u8]) -> Option<BTreeSet<String>> {
    let value: Value = serde_json::from_slice(bytes).ok()?;
    let map = value.get("weight_map")?.as_object()?;
    let inside = |name: &&str| !name.contains(['/', '\\']) && *name != ".." && !name.is_empty();
    Some(map.values().filter_map(Value::as_str).filter(inside).map(str::to_owned).collect())
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
