//! What was found of a model: its files, its small files whole, and the heads of its weights.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use crate::rate::MeasuredRate;
use crate::reference::FolderUrl;
use crate::repo::Place;

/// A file that the model has, as the listing or the server says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RemoteFile {
    /// Its path in the repository or folder.
    pub name: String,
    /// Its size; `None` where nobody said.
    pub bytes: Option<u64>,
}

/// The beginning of a safetensors file.
#[derive(Clone, PartialEq, Eq)]
pub struct HeadOfFile {
    /// The 8 bytes of the length and the header that they announce. Only what there is of the first 8
    /// bytes where the announced length is more than the file or the cap has.
    pub bytes: Vec<u8>,
    /// Size of the whole file.
    pub file_bytes: u64,
}

/// Without the bytes, of which there may be millions.
impl fmt::Debug for HeadOfFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes", self.bytes.len(), self.file_bytes)
    }
}

/// What went over the network, and what did not have to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Transfer {
    /// Bytes of bodies received, all requests together.
    pub bytes: u64,
    /// Bytes of headers, length fields included; the least that could have been transferred.
    pub head_bytes: u64,
    /// Requests, redirections included.
    pub n_requests: u64,
    /// Heads that came from the cache.
    pub n_cached: usize,
    /// Heads that were fetched.
    pub n_fetched: usize,
}

/// Where more of a model can be had.
#[derive(Clone, Debug)]
pub(crate) enum Base {
    Repo(Place),
    Folder(FolderUrl),
}

/// A model as it is known from its listing, configs and headers.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub(crate) base: Base,
    /// What names it again, exactly: `hf:owner/name@commit`, or the folder's URL.
    pub name: String,
    /// Its page, for a person.
    pub page: String,
    /// The repository without revision, where it is one: `owner/name`.
    pub repo: Option<String>,
    /// The commit, where it is a repository.
    pub commit: Option<String>,
    /// All files of a repository; of a folder, those that were asked for. Sorted by name, each once.
    pub files: Vec<RemoteFile>,
    /// Whether `files` are all that there are.
    pub is_listing_complete: bool,
    /// Whole small files by name.
    pub small: BTreeMap<String, Vec<u8>>,
    /// Heads of safetensors files by name.
    pub heads: BTreeMap<String, HeadOfFile>,
    /// Files that the index names and the server does not have.
    pub absent: BTreeSet<String>,
    /// What was transferred.
    pub transfer: Transfer,
    /// The speed of it, if there was enough to tell, or that of an earlier time.
    pub rate: Option<MeasuredRate>,
    /// Where the network was not asked: when it last was, in seconds since 1970.
    pub as_of_unix_s: Option<u64>,
    /// Why the network was not asked, in words for a person.
    pub offline_reason: Option<String>,
}

impl Snapshot {
    /// The size of a file, where it is known.
    #[must_use]
    pub fn file_bytes(&self, name: &str) -> Option<u64> {
        let listed = || self.files.get(self.at(name)?)?.bytes;
        self.heads.get(name).map(|head| head.file_bytes).or_else(listed)
    }

    /// Whether the model has a file of this name.
    #[must_use]
    pub fn has_file(&self, name: &str) -> bool {
        self.heads.contains_key(name) || self.small.contains_key(name) || self.at(name).is_some()
    }

    fn at(&self, name: &str) -> Option<usize> {
        self.files.binary_search_by(|file| file.name.as_str().cmp(name)).ok()
    }
}
