//! A folder of files on a server without a listing: its index names the weights, and without an index
//! there is one file of the usual name. Nothing says that a file stays the same, so each is asked about.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

use crate::cache::Shelf;
use crate::client::{Ask, Context, plain};
use crate::error::HubError;
use crate::fetch::{Fetch, small};
use crate::headers::{Job, Trust};
use crate::reference::FolderUrl;
use crate::snapshot::{Base, RemoteFile, Snapshot};
use crate::url;

/// The file that says which weights there are.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
/// The weights of a model without an index.
const SINGLE_FILE: &str = "model.safetensors";
/// Longest index and longest config that are fetched, bytes.
pub(crate) const INDEX_CAP_BYTES: u64 = 100_000_000;
const CONFIG_CAP_BYTES: u64 = 8_000_000;
/// Most files that an index may name.
const FILES_CAP: usize = 100_000;

/// Values of `weight_map`: the names of files.
#[derive(Deserialize)]
struct Index {
    weight_map: Files,
}

struct Files(BTreeSet<String>);

/// Only the file names are kept, of which there are few, not the tensors that map to them.
impl<'de> Deserialize<'de> for Files {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Files;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensor names and file names")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<Files, A::Error> {
                let mut files = BTreeSet::new();
                while let Some(serde::de::IgnoredAny) = map.next_key()? {
                    let file: String = map.next_value()?;
                    if !files.contains(&file) {
                        files.insert(file);
                    }
                    if files.len() > FILES_CAP {
                        return Err(serde::de::Error::custom("it names too many files"));
                    }
                }
                Ok(Files(files))
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}

pub(crate) fn snapshot(fetch: &mut Fetch<'_>, address: &FolderUrl) -> Result<Snapshot, HubError> {
    let shelf = shelf(fetch.cache(), address);
    let context = Context::Folder;
    let model = address.to_string();
    if fetch.settings.is_offline {
        let reason = "HF_HUB_OFFLINE is set".to_owned();
        return read(fetch, address, &shelf, &context, Trust::CacheOnly)
            .map(|snapshot| Snapshot { offline_reason: Some(reason), ..snapshot })
            .map_err(|_| HubError::OfflineMode { what: model, cached: cached_text(&shelf) });
    }
    match read(fetch, address, &shelf, &context, Trust::Ask) {
        Err(HubError::Unreachable { host, reason, .. }) => {
            let said = format!("{host} cannot be reached ({reason})");
            read(fetch, address, &shelf, &context, Trust::CacheOnly)
                .map(|snapshot| Snapshot { offline_reason: Some(said), ..snapshot })
                .map_err(|_| HubError::Unreachable { host, reason, cached: cached_text(&shelf) })
        }
        other => other,
    }
}

/// What is kept of a folder. Its query may be a secret: it is part of the key by its hash only.
pub(crate) fn shelf(root: Option<&Path>, address: &FolderUrl) -> Shelf {
    let full = format!("{}?{}", address.base, address.query.as_deref().unwrap_or_default());
    let host = address.base.split_once("://").map_or("", |(_, rest)| rest);
    let host = host.split('/').next().unwrap_or_default();
    let hash = blake3::hash(full.as_bytes()).to_hex();
    Shelf::new(root, &[host, hash.get(..24).unwrap_or_default()], hash.to_string())
}

fn cached_text(shelf: &Shelf) -> String {
    if shelf.is_empty() {
        "the cache has nothing of it".to_owned()
    } else {
        "the cache has a part of it only".to_owned()
    }
}

fn read(
    fetch: &mut Fetch<'_>,
    address: &FolderUrl,
    shelf: &Shelf,
    context: &Context,
    trust: Trust,
) -> Result<Snapshot, HubError> {
    let whole = |fetch: &Fetch<'_>, name: &str, cap| {
        small(&fetch.client, shelf, context, trust, (name, &address.file(name)), cap)
    };
    let Some(config) = whole(fetch, "config.json", CONFIG_CAP_BYTES)? else {
        return Err(HubError::NoConfig { model: address.to_string() });
    };
    let index = whole(fetch, INDEX_FILE, INDEX_CAP_BYTES)?;
    let names = match &index {
        Some(index) => {
            let mut names = index_names(&address.file(INDEX_FILE), index)?;
            names.retain(|name| name.ends_with(".safetensors"));
            names
        }
        None => vec![SINGLE_FILE.to_owned()],
    };
    let mut files = all_small(fetch, address, shelf, context, trust)?;
    files.insert("config.json".to_owned(), config);
    let has_index = index.is_some();
    files.extend(index.map(|index| (INDEX_FILE.to_owned(), index)));
    let mut sizes = Vec::new();
    if trust != Trust::CacheOnly {
        for name in fetch.wanted.sizes.iter().filter(|name| !files.contains_key(**name)) {
            let (place, context) = (address.file(name), context.clone());
            let size = fetch.client.apart(move |client| {
                client.size(&Ask { url: &place, context: &context, is_file: true, unless: None })
            });
            match size {
                Ok(bytes) => sizes.push(RemoteFile { name: (*name).to_owned(), bytes }),
                Err(HubError::Missing { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        keep_sizes(shelf, &sizes);
    } else {
        sizes = kept_sizes(shelf);
    }
    let job = |name: &String| Job {
        name: name.clone(),
        url: address.file(name),
        total: None,
        is_listed: false,
    };
    let (heads, rate) = fetch.heads(shelf, context, trust, names.iter().map(job).collect())?;
    if heads.heads.is_empty() {
        let found = if has_index {
            format!("none of the {} files that {INDEX_FILE} names exists", names.len())
        } else {
            format!("neither {INDEX_FILE} nor {SINGLE_FILE} exists")
        };
        return Err(HubError::NoSafetensors { model: address.to_string(), found });
    }
    let file =
        |(name, bytes): (&String, u64)| RemoteFile { name: name.clone(), bytes: Some(bytes) };
    let listed = files.iter().map(|(name, bytes)| (name, bytes.len() as u64));
    let listed = listed.chain(heads.heads.iter().map(|(name, head)| (name, head.file_bytes)));
    let mut all: Vec<RemoteFile> = listed.map(file).chain(sizes).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Snapshot {
        base: Base::Folder(address.clone()),
        name: address.to_string(),
        page: address.to_string(),
        repo: None,
        commit: None,
        files: all,
        is_listing_complete: false,
        transfer: fetch.transfer(&heads),
        small: files,
        absent: heads.absent,
        heads: heads.heads,
        rate,
        as_of_unix_s: heads.oldest_unix_s.filter(|_| trust == Trust::CacheOnly),
        offline_reason: None,
    })
}

fn all_small(
    fetch: &Fetch<'_>,
    address: &FolderUrl,
    shelf: &Shelf,
    context: &Context,
    trust: Trust,
) -> Result<BTreeMap<String, Vec<u8>>, HubError> {
    let is_left = |name: &str| name != "config.json" && name != INDEX_FILE;
    fetch.all_small(shelf, context, trust, &is_left, &|name| address.file(name))
}

/// The files that an index names and that are in its own folder.
///
/// # Errors
/// [`HubError::BadAnswer`]: it is no index.
pub(crate) fn index_names(address: &str, index: &[u8]) -> Result<Vec<String>, HubError> {
    let index: Index = serde_json::from_slice(index).map_err(|e| HubError::BadAnswer {
        url: url::shown(address),
        expected: "an index of tensors and files",
        reason: plain(&e.to_string()),
    })?;
    let stays_inside = |name: &String| !name.contains(['/', '\\']) && !name.starts_with('.');
    Ok(index.weight_map.0.into_iter().filter(stays_inside).collect())
}

const SIZES_RECORD: &str = "sizes";

fn keep_sizes(shelf: &Shelf, sizes: &[RemoteFile]) {
    let pairs: Vec<(&str, Option<u64>)> =
        sizes.iter().map(|file| (file.name.as_str(), file.bytes)).collect();
    let meta = crate::cache::Meta { at_unix_s: crate::cache::now_unix_s(), ..Default::default() };
    if let Ok(json) = serde_json::to_vec(&pairs) {
        shelf.put(SIZES_RECORD, &meta, &json);
    }
}

fn kept_sizes(shelf: &Shelf) -> Vec<RemoteFile> {
    let kept = shelf.get(SIZES_RECORD).map(|(_, json)| json).unwrap_or_default();
    let pairs: Vec<(String, Option<u64>)> = serde_json::from_slice(&kept).unwrap_or_default();
    pairs.into_iter().map(|(name, bytes)| RemoteFile { name, bytes }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_gives_its_file_names_once() {
        let json = r#"{"metadata":{"total_size":5},"weight_map":{"a":"m-1","b":"m-1","c":"m-2"}}"#;
        let index: Index = serde_json::from_str(json).unwrap();
        assert_eq!(index.weight_map.0.into_iter().collect::<Vec<_>>(), ["m-1", "m-2"]);
        for wrong in ["{}", "[]", r#"{"weight_map":{"a":1}}"#] {
            assert!(serde_json::from_str::<Index>(wrong).is_err(), "{wrong}");
        }
    }
}
