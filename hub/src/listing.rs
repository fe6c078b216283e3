//! The hub's listing of a repository: parsing what `/api/models/...` answers. Pure.

use serde::{Deserialize, Serialize};

use crate::snapshot::RemoteFile;

/// Longest listing that is read, bytes.
pub(crate) const LISTING_CAP_BYTES: u64 = 32_000_000;
/// Most files that a listing may name.
const FILES_CAP: usize = 200_000;

/// Largest file that is believed, bytes: a thousand times the largest that a hub takes.
const FILE_CAP_BYTES: u64 = 1_000_000_000_000_000;

/// What is wrong with a listing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListingError {
    /// It is not the JSON that it should be.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// It does not say which commit it is of.
    #[error("it names no commit (sha)")]
    NoCommit,
    /// A file of it is larger than any disk.
    #[error("it says that {name:?} has {bytes} bytes")]
    Size {
        /// The file.
        name: String,
        /// What is said of it.
        bytes: u64,
    },
    /// It is longer than any repository's.
    #[error("it lists {0} files")]
    TooMany(usize),
}

/// A repository at a commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Listing {
    pub(crate) commit: String,
    pub(crate) files: Vec<(String, Option<u64>)>,
}

#[derive(Deserialize)]
struct Raw {
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    size: Option<u64>,
}

/// The commit of an answer that may have nothing else.
pub(crate) fn commit_of(json: &[u8]) -> Result<String, ListingError> {
    let raw: Raw = serde_json::from_slice(json)?;
    let commit = raw.sha.unwrap_or_default();
    let is_commit =
        commit.len() >= 7 && commit.len() <= 64 && commit.bytes().all(|b| b.is_ascii_hexdigit());
    if is_commit { Ok(commit) } else { Err(ListingError::NoCommit) }
}

impl Listing {
    /// Parses the answer to `?blobs=true`. Sizes may be missing: some mirrors leave them out.
    pub(crate) fn parse(json: &[u8]) -> Result<Self, ListingError> {
        let commit = commit_of(json)?;
        let raw: Raw = serde_json::from_slice(json)?;
        if raw.siblings.len() > FILES_CAP {
            return Err(ListingError::TooMany(raw.siblings.len()));
        }
        // The size of a large file is that of its content, whatever the pointer's is.
        let size = |s: &Sibling| s.lfs.as_ref().and_then(|lfs| lfs.size).or(s.size);
        let files = raw.siblings.iter().map(|s| (s.rfilename.clone(), size(s))).collect();
        let listing = Self { commit, files }.sorted();
        let too_large =
            |(_, bytes): &&(String, Option<u64>)| bytes.is_some_and(|b| b > FILE_CAP_BYTES);
        match listing.files.iter().find(too_large) {
            Some((name, bytes)) => {
                Err(ListingError::Size { name: name.clone(), bytes: bytes.unwrap_or_default() })
            }
            None => Ok(listing),
        }
    }

    /// With its files by name, each once: what is looked up is found by halving, however many there are.
    pub(crate) fn sorted(mut self) -> Self {
        self.files.sort_by(|a, b| a.0.cmp(&b.0));
        self.files.dedup_by(|later, first| later.0 == first.0);
        self
    }

    pub(crate) fn files(&self) -> Vec<RemoteFile> {
        let file = |(name, bytes): &(String, Option<u64>)| RemoteFile {
            name: name.clone(),
            bytes: *bytes,
        };
        self.files.iter().map(file).collect()
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|(name, _)| name.as_str())
    }

    pub(crate) fn bytes_of(&self, name: &str) -> Option<u64> {
        self.files.get(self.at(name)?)?.1
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.at(name).is_some()
    }

    fn at(&self, name: &str) -> Option<usize> {
        self.files.binary_search_by(|(n, _)| n.as_str().cmp(name)).ok()
    }

    /// What a repository has instead of safetensors, in words; `None` where it has safetensors or no weights.
    pub(crate) fn weights_of_other_formats(&self) -> Option<String> {
        let ends = |end: &str| self.names().any(|name| name.ends_with(end));
        let has_other = [".gguf", ".bin", ".pth", ".onnx", ".h5", ".msgpack"].into_iter().any(ends);
        (has_other && !ends(".safetensors")).then(|| self.other_formats())
    }

    /// What a repository without safetensors has instead, in words.
    pub(crate) fn other_formats(&self) -> String {
        let forms = [
            (".gguf", "GGUF files, which this version does not read"),
            (".bin", "PyTorch .bin files, which are not read: they may run code"),
            (".pth", "PyTorch .pth files, which are not read: they may run code"),
            (".safetensors", "safetensors of other names, such as of adapters or another format"),
            (".onnx", "ONNX files"),
            (".h5", "TensorFlow files"),
            (".msgpack", "Flax files"),
        ];
        let found: Vec<String> = forms
            .iter()
            .filter_map(|(end, what)| {
                let n = self.files.iter().filter(|(name, _)| name.ends_with(end)).count();
                (n > 0).then(|| format!("{n} {what}"))
            })
            .collect();
        if found.is_empty() {
            format!("its {} files hold no weights", self.files.len())
        } else {
            format!("it has {}", found.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn a_listing_gives_commit_names_and_sizes_of_contents() {
        let json = format!(
            r#"{{"id":"a/b","sha":"{COMMIT}","gated":"auto","siblings":[
                {{"rfilename":"config.json","size":12,"blobId":"x"}},
                {{"rfilename":"model.safetensors","size":135,"lfs":{{"size":5000,"sha256":"y"}}}},
                {{"rfilename":"sub/x.gguf"}}]}}"#
        );
        let listing = Listing::parse(json.as_bytes()).unwrap();
        assert_eq!(listing.commit, COMMIT);
        assert_eq!(listing.bytes_of("config.json"), Some(12));
        assert_eq!(listing.bytes_of("model.safetensors"), Some(5000));
        assert_eq!(listing.bytes_of("sub/x.gguf"), None);
        assert!(listing.has("sub/x.gguf") && !listing.has("x.gguf"));
        assert!(listing.other_formats().contains("1 GGUF"), "{}", listing.other_formats());
    }

    #[test]
    fn what_is_no_listing_says_why() {
        for (json, part) in [
            ("<html>", "expected"),
            ("{}", "commit"),
            (r#"{"sha":"../../x"}"#, "commit"),
            (r#"{"sha":5}"#, "invalid type"),
        ] {
            let error = Listing::parse(json.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(part), "{json}: {error}");
        }
        let empty = Listing { commit: COMMIT.to_owned(), files: Vec::new() };
        assert!(empty.other_formats().contains("no weights"));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(json in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Listing::parse(&json);
        }
    }
}
