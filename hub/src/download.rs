//! How much there is to download, and what of it is on this disk already.

use std::path::Path;

use serde::Serialize;

use crate::local::repo_folder;
use crate::rate::Rate;
use crate::reference::parse_local;
use crate::snapshot::Snapshot;

/// A number of files and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Files.
    pub n_files: usize,
    /// Their bytes, as far as they are known.
    pub bytes: u64,
    /// Files whose size nobody says; the bytes are then a lower bound.
    pub n_unknown: usize,
}

impl Part {
    fn add(&mut self, bytes: Option<u64>) {
        self.n_files += 1;
        match bytes {
            Some(bytes) => self.bytes = self.bytes.saturating_add(bytes),
            None => self.n_unknown += 1,
        }
    }
}

/// What a download of a model is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Download {
    /// Everything in the repository; of a folder without a listing, what was asked about.
    pub all: Part,
    /// What is needed to run the model: weights, configs, tokenizer.
    pub needed: Part,
    /// What of that is in the hub client's cache already.
    pub present: Part,
    /// Whether `all` is everything that there is.
    pub is_listing_complete: bool,
}

impl Download {
    /// Sums up a snapshot. `is_shard` tells weights; other files in the first level that configure the
    /// model or its tokenizer are needed too. `hub_cache` is looked into for what is there already.
    #[must_use]
    pub fn of(
        snapshot: &Snapshot,
        is_shard: &dyn Fn(&str) -> bool,
        hub_cache: Option<&Path>,
    ) -> Self {
        let mut download =
            Self { is_listing_complete: snapshot.is_listing_complete, ..Self::default() };
        let local = local_folder(snapshot, hub_cache);
        for file in &snapshot.files {
            download.all.add(file.bytes);
            if !(is_shard(&file.name) || is_config(&file.name)) {
                continue;
            }
            download.needed.add(file.bytes);
            let on_disk = local.as_ref().and_then(|folder| folder.join(&file.name).metadata().ok());
            if let (Some(on_disk), Some(bytes)) = (on_disk, file.bytes)
                && on_disk.len() == bytes
            {
                download.present.add(Some(bytes));
            }
        }
        download
    }

    /// Bytes that are still to come of what is needed.
    #[must_use]
    pub fn remaining_bytes(&self) -> u64 {
        self.needed.bytes.saturating_sub(self.present.bytes)
    }

    /// Seconds that they take at a rate.
    #[must_use]
    pub fn seconds_at(&self, rate: Rate) -> f64 {
        self.remaining_bytes() as f64 / rate.bytes_per_s
    }

    /// Bytes by which a disk with so much free space is too small for them; 0 where it is not.
    #[must_use]
    pub fn short_bytes(&self, free_bytes: u64) -> u64 {
        self.remaining_bytes().saturating_sub(free_bytes)
    }
}

/// Where the hub's client keeps this commit, if it has any of it.
fn local_folder(snapshot: &Snapshot, hub_cache: Option<&Path>) -> Option<std::path::PathBuf> {
    let reference = parse_local(snapshot.repo.as_deref()?)?;
    let folder = repo_folder(hub_cache?, &reference).join("snapshots");
    Some(folder.join(snapshot.commit.as_deref()?)).filter(|folder| folder.is_dir())
}

/// Files beside the weights that loading a model or its tokenizer may read.
fn is_config(name: &str) -> bool {
    let is_kind =
        [".json", ".jinja", ".model", ".txt", ".tiktoken"].iter().any(|end| name.ends_with(end));
    !name.contains('/') && is_kind
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{RemoteFile, Transfer};

    fn snapshot(files: &[(&str, Option<u64>)]) -> Snapshot {
        let file = |(name, bytes): &(&str, Option<u64>)| RemoteFile {
            name: (*name).to_owned(),
            bytes: *bytes,
        };
        let base = match crate::reference::parse_remote("http://h/m").unwrap().unwrap() {
            crate::Reference::Folder(folder) => crate::snapshot::Base::Folder(folder),
            crate::Reference::Repo(_) => unreachable!(),
        };
        Snapshot {
            base,
            name: "hf:o/n@c".to_owned(),
            page: String::new(),
            repo: Some("o/n".to_owned()),
            commit: Some("c".to_owned()),
            files: files.iter().map(file).collect(),
            is_listing_complete: true,
            small: Default::default(),
            heads: Default::default(),
            absent: Default::default(),
            transfer: Transfer::default(),
            rate: None,
            as_of_unix_s: None,
            offline_reason: None,
        }
    }

    #[test]
    fn what_is_needed_and_what_is_there_is_told_apart() {
        let snapshot = snapshot(&[
            ("model-1.safetensors", Some(1000)),
            ("model-2.safetensors", Some(2000)),
            ("tokenizer.json", Some(30)),
            ("config.json", None),
            ("README.md", Some(7)),
            ("original/x.pth", Some(5000)),
        ]);
        let is_shard = |name: &str| name.ends_with(".safetensors");
        let cache = tempfile::tempdir().unwrap();
        let nothing = Download::of(&snapshot, &is_shard, Some(cache.path()));
        assert_eq!(nothing.all, Part { n_files: 6, bytes: 8037, n_unknown: 1 });
        assert_eq!(nothing.needed, Part { n_files: 4, bytes: 3030, n_unknown: 1 });
        assert_eq!(nothing.present, Part::default());
        let folder = cache.path().join("models--o--n/snapshots/c");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("model-1.safetensors"), vec![0; 1000]).unwrap();
        std::fs::write(folder.join("model-2.safetensors"), vec![0; 3]).unwrap();
        let some = Download::of(&snapshot, &is_shard, Some(cache.path()));
        assert_eq!(some.present, Part { n_files: 1, bytes: 1000, n_unknown: 0 });
        assert_eq!(some.remaining_bytes(), 2030);
        assert_eq!(some.seconds_at(Rate { bytes_per_s: 203.0 }), 10.0);
        assert_eq!((some.short_bytes(2029), some.short_bytes(2030)), (1, 0));
    }
}
