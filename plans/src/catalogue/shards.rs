//! Finding and reading the files of a model. Owns which files belong to it and whether any is
//! missing; what the tensors mean is `assemble`'s.

use std::borrow::{Borrow, Cow};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::Deserialize;
use serde_json::Value;

use super::header::{HeaderError, ShardHeader};
use super::roles::PADDING_PREFIX;
use super::source::{Entry, Source};
use super::{CatalogueError, Warning, config, container};
use crate::spec::ArchSpec;

const INDEX_FILE: &str = "model.safetensors.index.json";
pub(super) const SHARD_SUFFIX: &str = ".safetensors";
/// What a model of one file is called.
const ONLY_SHARD: &str = "model.safetensors";
/// Most shards that the numbering of file names is believed to promise, all together.
const SHARD_CAP: u32 = 100_000;
/// Most digits of a number in a file name.
const NUMBER_WIDTH_CAP: usize = 20;

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

/// The files of a model, as its source lists them.
pub(super) struct Files<'s> {
    source: &'s dyn Source,
    /// `None` where the source cannot list them.
    entries: Option<BTreeMap<String, Entry>>,
}

/// Whether a file is there.
enum Presence {
    Here,
    Absent,
    /// A link to this place, where nothing is.
    Broken(PathBuf),
    /// Only reading it will tell.
    Unknown,
}

impl<'s> Files<'s> {
    pub(super) fn list(source: &'s dyn Source) -> Result<Self, CatalogueError> {
        let entries = source
            .list()
            .map_err(|error| CatalogueError::Io { path: source.label().to_owned(), source: error })?
            .map(|list| list.into_iter().map(|entry| (entry.name.clone(), entry)).collect());
        Ok(Self { source, entries })
    }

    fn presence(&self, name: &str) -> Presence {
        let Some(entries) = &self.entries else { return Presence::Unknown };
        match entries.get(name) {
            None => Presence::Absent,
            Some(Entry { broken_link: Some(target), .. }) => Presence::Broken(target.clone()),
            Some(_) => Presence::Here,
        }
    }

    fn small_file(&self, name: &str) -> Result<Option<Vec<u8>>, CatalogueError> {
        match self.presence(name) {
            Presence::Absent => Ok(None),
            Presence::Broken(target) => Err(broken_link(self.source.locate(name), &target)),
            Presence::Here | Presence::Unknown => self
                .source
                .small_file(name)
                .map_err(|source| CatalogueError::Io { path: self.source.locate(name), source }),
        }
    }

    pub(super) fn config(&self) -> Result<Vec<u8>, CatalogueError> {
        self.small_file("config.json")?
            .ok_or_else(|| CatalogueError::NotAModel { directory: self.source.label().to_owned() })
    }

    /// The architecture by config.json, with the stop tokens of generation_config.json added; and both
    /// files. Of a second one that cannot be read nothing is added.
    pub(super) fn spec(&self) -> Result<(ArchSpec, [Vec<u8>; 2]), CatalogueError> {
        let config = self.config()?;
        let mut spec = config::arch_spec(&config).map_err(|error| CatalogueError::Config {
            directory: self.source.label().to_owned(),
            source: error,
        })?;
        let generation =
            self.small_file("generation_config.json").ok().flatten().unwrap_or_default();
        let value: Option<Value> = serde_json::from_slice(&generation).ok();
        spec.stop_tokens.extend(value.iter().flat_map(config::stop_tokens));
        spec.stop_tokens.sort_unstable();
        spec.stop_tokens.dedup();
        Ok((spec, [config, generation]))
    }

    /// The entries of all that headers may be read of, and of the index, by name.
    pub(super) fn of_weights(&self) -> Vec<&Entry> {
        self.entries
            .iter()
            .flat_map(BTreeMap::values)
            .filter(|entry| entry.name.ends_with(SHARD_SUFFIX) || entry.name == INDEX_FILE)
            .collect()
    }

    pub(super) fn source(&self) -> &'s dyn Source {
        self.source
    }

    /// Files that belong to the model by their names alone, links that lead nowhere included.
    pub(super) fn shard_names(&self) -> BTreeSet<String> {
        let listed = self.entries.iter().flat_map(BTreeMap::keys);
        listed.filter(|name| is_shard_name(name)).cloned().collect()
    }

    /// Size of tokenizer.json, 0 where there is none.
    pub(super) fn tokenizer_bytes(&self) -> u64 {
        let name = "tokenizer.json";
        let listed = self.entries.as_ref().map(|entries| entries.get(name));
        match listed {
            Some(None) => 0,
            Some(Some(Entry { bytes: Some(bytes), .. })) => *bytes,
            Some(Some(Entry { broken_link: Some(_), .. })) => 0,
            Some(Some(_)) | None => self.source.file_bytes(name).ok().flatten().unwrap_or(0),
        }
    }

    /// Whether only the index can tell which files belong to the model: those whose names say that
    /// they do are then not listed, or others lie beside them that may.
    pub(super) fn needs_index(&self) -> bool {
        let Some(entries) = &self.entries else { return true };
        let mut shards = entries.keys().filter(|name| name.ends_with(SHARD_SUFFIX)).peekable();
        shards.peek().is_none() || shards.any(|name| !is_shard_name(name))
    }

    /// The bytes of the index.
    pub(super) fn index(&self) -> IndexBytes {
        match self.small_file(INDEX_FILE) {
            Ok(Some(bytes)) => IndexBytes::Read(bytes),
            Ok(None) => IndexBytes::Absent,
            Err(error) => IndexBytes::Unreadable(error),
        }
    }

    /// An index that is not read; whether there is one is known all the same.
    pub(super) fn index_unread(&self) -> IndexBytes {
        match self.presence(INDEX_FILE) {
            Presence::Absent => IndexBytes::Absent,
            Presence::Here | Presence::Broken(_) | Presence::Unknown => IndexBytes::NotRead,
        }
    }
}

/// The index as its source gives it.
pub(super) enum IndexBytes {
    Read(Vec<u8>),
    Absent,
    Unreadable(CatalogueError),
    /// It was not asked for.
    NotRead,
}

fn broken_link(path: PathBuf, target: &Path) -> CatalogueError {
    CatalogueError::MissingShard { path, named_by: link_text(target) }
}

fn link_text(target: &Path) -> String {
    format!("a link to {}, where nothing is", target.display())
}

/// Reads the header of every shard, in parallel. A promised file that is absent is no error yet:
/// whether anything in it is needed, only the headers can tell.
pub(super) fn read_shards<'a>(
    files: &Files<'_>,
    index: &'a IndexBytes,
) -> Result<ReadShards<'a>, CatalogueError> {
    let source = files.source;
    let mut present = BTreeSet::new();
    let mut absent = BTreeMap::new();
    for name in files.entries.iter().flat_map(BTreeMap::keys).filter(|name| is_shard_name(name)) {
        match files.presence(name) {
            Presence::Broken(target) => {
                absent.insert(name.clone(), link_text(&target));
            }
            Presence::Here | Presence::Absent | Presence::Unknown => {
                present.insert(name.clone());
            }
        }
    }
    let mut warnings = Vec::new();
    let index = parse_index(index, present.len(), &mut warnings);
    if files.entries.is_none() && index.is_none() {
        present.insert(ONLY_SHARD.to_owned());
    }
    // Who says that a file should exist which turns out not to when it is read.
    let mut promises: HashMap<String, String> = HashMap::new();
    for (name, named_by) in promised_files(&present, index.as_ref()) {
        match files.presence(&name) {
            Presence::Here if name.ends_with(SHARD_SUFFIX) => {
                present.insert(name);
            }
            Presence::Here => {}
            Presence::Unknown => {
                present.insert(name.clone());
                promises.entry(name).or_insert(named_by);
            }
            Presence::Broken(target) => {
                absent.entry(name).or_insert_with(|| link_text(&target));
            }
            Presence::Absent => {
                absent.entry(name).or_insert(named_by);
            }
        }
    }
    let mut names = Vec::with_capacity(present.len());
    let mut headers = Vec::with_capacity(present.len());
    for (name, header) in read_headers(source, present)? {
        if let Some(header) = header {
            names.push(name);
            headers.push(header);
        } else if let Some(named_by) = promises.remove(&name) {
            absent.entry(name).or_insert(named_by);
        } else if files.entries.is_some() {
            absent.insert(name, "it was listed, and gone when it was to be read".to_owned());
        }
    }
    if names.is_empty() {
        return Err(match absent.pop_first() {
            Some((name, named_by)) => {
                CatalogueError::MissingShard { path: source.locate(&name), named_by }
            }
            None => CatalogueError::NoShards { directory: source.label().to_owned() },
        });
    }
    Ok(ReadShards { names, headers, absent, index, warnings })
}

/// The headers of these files, several at a time, in the order of their names; `None` for one that
/// turns out not to exist. Of several errors the first by name is returned.
fn read_headers(
    source: &dyn Source,
    names: BTreeSet<String>,
) -> Result<Vec<(String, Option<ShardHeader>)>, CatalogueError> {
    let read = |name: String| {
        let header = match source.header(&name).and_then(|bytes| bytes.parse()) {
            Ok(header) => header,
            Err(HeaderError::Io(error)) if error.kind() == ErrorKind::NotFound => {
                return Ok((name, None));
            }
            Err(error) => {
                return Err(CatalogueError::Header { path: source.locate(&name), source: error });
            }
        };
        match container::unknown(&header.metadata) {
            Some(found) => {
                Err(CatalogueError::UnknownContainer { path: source.locate(&name), found })
            }
            None => Ok((name, Some(header))),
        }
    };
    let names: Vec<String> = names.into_iter().collect();
    let all = || -> Vec<Result<_, _>> { names.into_par_iter().with_max_len(1).map(read).collect() };
    let own_pool = source
        .parallel_reads()
        .and_then(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().ok());
    let results = match own_pool {
        Some(pool) => pool.install(all),
        None => all(),
    };
    results.into_iter().collect()
}

impl<'a> ReadShards<'a> {
    /// Adds what an index says that was not read at first: which files are absent, and which tensor
    /// should be in which file.
    pub(super) fn consult(&mut self, files: &Files<'_>, index: &'a IndexBytes) {
        let present: BTreeSet<String> = self.names.iter().cloned().collect();
        let index = parse_index(index, present.len(), &mut self.warnings);
        // Backwards, so that of two who promise a file the index is named.
        for (name, named_by) in promised_files(&present, index.as_ref()).into_iter().rev() {
            match files.presence(&name) {
                Presence::Here | Presence::Unknown => {}
                Presence::Broken(target) => {
                    self.absent.insert(name, link_text(&target));
                }
                Presence::Absent => {
                    self.absent.insert(name, named_by);
                }
            }
        }
        self.index = index;
    }

    /// The absent file that explains why a tensor is missing: the one that the index says holds it,
    /// or, where the index does not know the tensor, the first.
    pub(super) fn blame(&self, source: &dyn Source, error: CatalogueError) -> CatalogueError {
        let CatalogueError::MissingTensor { tensor, .. } = &error else { return error };
        let holder = self.index.as_ref().and_then(|index| index.weight_map.get(tensor.as_str()));
        let absent = match holder {
            Some(file) => self.absent.get_key_value(file.0.as_ref()),
            None => self.absent.first_key_value(),
        };
        match absent {
            Some((name, named_by)) => CatalogueError::MissingShard {
                path: source.locate(name),
                named_by: named_by.clone(),
            },
            None => error,
        }
    }

    /// What a user should know of files of which every needed tensor was found.
    pub(super) fn into_warnings(mut self) -> Vec<Warning> {
        if let Some((name, named_by)) = self.absent.first_key_value() {
            self.warnings.push(Warning {
                check: "model.shards",
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
            for tensor in header.tensors().filter(|tensor| !is_padding(tensor.name)) {
                match index.get(tensor.name) {
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
            check: "model.index",
            finding: format!(
                "{INDEX_FILE} lacks {n_lacking} tensors of the shards and names {n_beyond} that they do not hold"
            ),
            remedy: "nothing: the shard headers are used".to_owned(),
        })
    }
}

/// Whether a file belongs to the model by its name alone.
fn is_shard_name(name: &str) -> bool {
    name.starts_with("model") && name.ends_with(SHARD_SUFFIX)
}

/// The index; `None` with a warning where there is none that can be read.
fn parse_index<'a>(
    bytes: &'a IndexBytes,
    n_present: usize,
    warnings: &mut Vec<Warning>,
) -> Option<Index<'a>> {
    let finding = match bytes {
        IndexBytes::Read(bytes) => match serde_json::from_slice(bytes) {
            Ok(index) => return Some(index),
            Err(_) => format!("{INDEX_FILE} cannot be read as an index"),
        },
        IndexBytes::Unreadable(error) => format!("{INDEX_FILE} cannot be read ({error})"),
        // A model of one file needs none.
        IndexBytes::Absent if n_present <= 1 => return None,
        IndexBytes::Absent => format!("{INDEX_FILE} is absent"),
        IndexBytes::NotRead => return None,
    };
    let remedy = "nothing: the shard headers are used".to_owned();
    warnings.push(Warning { check: "model.index", finding, remedy });
    None
}

fn promised_files(present: &BTreeSet<String>, index: Option<&Index<'_>>) -> Vec<(String, String)> {
    let named = index.iter().flat_map(|index| index.weight_map.values());
    promised(present, named.map(|file| file.0.as_ref()))
}

/// Files that the index or the numbering of the present files says must exist, with who says so. A
/// name in the index that leaves the folder is ignored.
pub(super) fn promised<'n>(
    present: &BTreeSet<String>,
    named_by_index: impl Iterator<Item = &'n str>,
) -> Vec<(String, String)> {
    let inside = |name: &&str| !name.contains(['/', '\\']) && *name != ".." && !name.is_empty();
    let files: HashSet<&str> = named_by_index.filter(inside).collect();
    let mut promised: Vec<(String, String)> =
        files.into_iter().map(|f| (f.to_owned(), format!("named by {INDEX_FILE}"))).collect();
    // Two downloads in one folder may number differently; each is held to its own total.
    let totals: BTreeSet<(String, u32, usize)> =
        present.iter().filter_map(|name| parse_numbering(name)).collect();
    let mut n_left = SHARD_CAP;
    for (stem, total, width) in totals {
        let Some(left) = n_left.checked_sub(total) else { continue };
        n_left = left;
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
    if width > NUMBER_WIDTH_CAP {
        return None;
    }
    let total: u32 = total.parse().ok().filter(|t| *t <= SHARD_CAP)?;
    let number: u32 = number.parse().ok()?;
    (1..=total).contains(&number).then(|| (stem.to_owned(), total, width))
}
