//! From a reference to a snapshot: the one entry of the crate that uses the network.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::cache::{Meta, Shelf, now_unix_s};
use crate::client::{Ask, Client, Context, Whole};
use crate::error::HubError;
use crate::folder::INDEX_CAP_BYTES;
use crate::headers::{self, Heads, Job, Trust};
use crate::rate::MeasuredRate;
use crate::reference::Reference;
use crate::settings::Settings;
use crate::snapshot::{Base, HeadOfFile, Snapshot, Transfer};
use crate::{folder, repo, url};

/// The record of the speed that was measured for a model.
const RATE_RECORD: &str = "rate";
/// Longest small file that is fetched, bytes.
const SMALL_CAP_BYTES: u64 = 8_000_000;

/// What of a model is wanted. What the files are for, the caller knows.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// Which files are safetensors whose heads are wanted.
    pub is_shard: &'a dyn Fn(&str) -> bool,
    /// Small files that are wanted whole, where they exist. config.json always is.
    pub small: &'a [&'a str],
    /// Files of which only the size is wanted, where a listing does not say.
    pub sizes: &'a [&'a str],
}

/// How far a fetch has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Heads that are there.
    pub files_done: usize,
    /// Heads that are wanted.
    pub files_total: usize,
    /// Bytes received, of everything.
    pub bytes: u64,
}

/// What the parts of a fetch share.
pub(crate) struct Fetch<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) wanted: &'a Wanted<'a>,
    pub(crate) client: Arc<Client>,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) progress: &'a mut dyn FnMut(Progress),
}

/// Looks at a model that is not on this disk: its listing, its small files and the heads of its
/// weights, from the cache as far as that is still true. `stop` interrupts it within a moment.
///
/// # Errors
/// [`HubError`]: each variant names what was asked for, what came, and what to do.
pub fn fetch(
    settings: &Settings,
    reference: &Reference,
    wanted: &Wanted<'_>,
    stop: &Arc<AtomicBool>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Snapshot, HubError> {
    let client = Arc::new(Client::new(settings, Arc::clone(stop))?);
    let mut fetch = Fetch { settings, wanted, client, stop: Arc::clone(stop), progress };
    match reference {
        Reference::Repo(reference) => repo::snapshot(&mut fetch, reference),
        Reference::Folder(address) => match folder::snapshot(&mut fetch, address) {
            // The page of a repository at a hub that is not known by its name.
            Err(error @ HubError::NoConfig { .. }) => match address.as_repo() {
                Some(reference) => repo::snapshot(&mut fetch, &reference)
                    .map_err(|of_repo| if is_nothing_there(&of_repo) { error } else { of_repo }),
                None => Err(error),
            },
            other => other,
        },
    }
}

/// Whether an error says no more than that there is no such repository.
fn is_nothing_there(error: &HubError) -> bool {
    matches!(
        error,
        HubError::RepoNotFound { .. }
            | HubError::Missing { .. }
            | HubError::BadAnswer { .. }
            | HubError::Refused { .. }
    )
}

/// One more whole file of a model that was looked at, such as its index; `None` where there is none.
///
/// # Errors
/// As [`fetch`].
pub fn fetch_file(
    settings: &Settings,
    snapshot: &Snapshot,
    name: &str,
    stop: &Arc<AtomicBool>,
) -> Result<Option<Vec<u8>>, HubError> {
    if let Some(bytes) = snapshot.small.get(name) {
        return Ok(Some(bytes.clone()));
    }
    let client = Arc::new(Client::new(settings, Arc::clone(stop))?);
    let (shelf, context, trust, address) = place(settings, snapshot, name);
    small(&client, &shelf, &context, trust, (name, &address), INDEX_CAP_BYTES)
}

/// One more head of a model that was looked at; `None` where there is no such file.
///
/// # Errors
/// As [`fetch`].
pub fn fetch_head(
    settings: &Settings,
    snapshot: &Snapshot,
    name: &str,
    stop: &Arc<AtomicBool>,
) -> Result<Option<HeadOfFile>, HubError> {
    if let Some(head) = snapshot.heads.get(name) {
        return Ok(Some(head.clone()));
    }
    let client = Arc::new(Client::new(settings, Arc::clone(stop))?);
    let (shelf, context, trust, url) = place(settings, snapshot, name);
    let job =
        Job { name: name.to_owned(), url, total: snapshot.file_bytes(name), is_listed: false };
    let mut heads = headers::fetch(&client, &context, &shelf, trust, vec![job], stop, &mut |_| {})?;
    Ok(heads.heads.remove(name))
}

/// Where a file of a snapshot is kept and fetched from.
fn place(settings: &Settings, snapshot: &Snapshot, name: &str) -> (Shelf, Context, Trust, String) {
    let root = settings.cache.as_deref();
    let commit = snapshot.commit.as_deref().unwrap_or_default();
    let (shelf, context, trust, address) = match &snapshot.base {
        Base::Repo(place) => (
            place.commit(root, commit),
            place.context.clone(),
            Trust::Immutable,
            place.file(commit, name),
        ),
        Base::Folder(folder) => {
            (folder::shelf(root, folder), Context::Folder, Trust::Ask, folder.file(name))
        }
    };
    let trust = if snapshot.offline_reason.is_some() { Trust::CacheOnly } else { trust };
    (shelf, context, trust, address)
}

impl Fetch<'_> {
    /// Where answers are kept.
    pub(crate) fn cache(&self) -> Option<&Path> {
        self.settings.cache.as_deref()
    }

    /// All small files that are wanted and exist, config.json first.
    pub(crate) fn all_small(
        &self,
        shelf: &Shelf,
        context: &Context,
        trust: Trust,
        exists: &dyn Fn(&str) -> bool,
        address: &dyn Fn(&str) -> String,
    ) -> Result<BTreeMap<String, Vec<u8>>, HubError> {
        let mut found = BTreeMap::new();
        for name in self.wanted.small.iter().copied().filter(|name| exists(name)) {
            let place = (name, &*address(name));
            if let Some(bytes) = small(&self.client, shelf, context, trust, place, SMALL_CAP_BYTES)?
            {
                found.insert(name.to_owned(), bytes);
            }
        }
        Ok(found)
    }

    /// The heads of files, with what it took; the speed is measured where it can be.
    pub(crate) fn heads(
        &mut self,
        shelf: &Shelf,
        context: &Context,
        trust: Trust,
        jobs: Vec<Job>,
    ) -> Result<(Heads, Option<MeasuredRate>), HubError> {
        let (start, before) = (Instant::now(), self.client.bytes());
        let heads =
            headers::fetch(&self.client, context, shelf, trust, jobs, &self.stop, self.progress)?;
        let bytes = self.client.bytes().saturating_sub(before);
        let now = MeasuredRate::of(bytes, start.elapsed().as_secs_f64(), now_unix_s());
        let rate = match now {
            Some(rate) => {
                let meta = Meta { at_unix_s: now_unix_s(), ..Meta::default() };
                if let Ok(json) = serde_json::to_vec(&rate) {
                    shelf.put(RATE_RECORD, &meta, &json);
                }
                Some(rate)
            }
            None => shelf.get(RATE_RECORD).and_then(|(_, json)| serde_json::from_slice(&json).ok()),
        };
        Ok((heads, rate))
    }

    pub(crate) fn transfer(&self, heads: &Heads) -> Transfer {
        Transfer {
            bytes: self.client.bytes(),
            head_bytes: heads.heads.values().map(|head| head.bytes.len() as u64).sum(),
            n_requests: self.client.n_requests(),
            n_cached: heads.n_cached,
            n_fetched: heads.n_fetched,
        }
    }

    pub(crate) fn check_stop(&self) -> Result<(), HubError> {
        if self.stop.load(Ordering::SeqCst) { Err(HubError::Interrupted) } else { Ok(()) }
    }
}

/// A whole small file, from the cache where that is trusted or still true; `None` where there is
/// no such file.
pub(crate) fn small(
    client: &Arc<Client>,
    shelf: &Shelf,
    context: &Context,
    trust: Trust,
    (name, address): (&str, &str),
    cap_bytes: u64,
) -> Result<Option<Vec<u8>>, HubError> {
    let record = format!("file {name}");
    let kept = shelf.get(&record);
    let unless = match (trust, &kept) {
        (Trust::Immutable | Trust::CacheOnly, Some((_, bytes))) => {
            return Ok(Some(bytes.clone()));
        }
        (Trust::CacheOnly, None) => return Ok(None),
        (Trust::Ask, Some((meta, _))) => meta.validator.clone(),
        (Trust::Immutable | Trust::Ask, None) => None,
    };
    let (of_request, url) = (context.clone(), address.to_owned());
    let whole = client.apart(move |client| {
        let ask = Ask { url: &url, context: &of_request, is_file: true, unless: unless.as_deref() };
        client.whole(&ask, cap_bytes)
    });
    let answer = match whole {
        Err(HubError::Missing { .. }) => return Ok(None),
        other => other?,
    };
    let (bytes, validator) = match (answer, kept) {
        (Whole::Changed { bytes, validator }, _) => (bytes, validator),
        (Whole::Unchanged, Some((meta, bytes))) => (bytes, meta.validator),
        (Whole::Unchanged, None) => {
            return Err(HubError::BadAnswer {
                url: url::shown(address),
                expected: "the file",
                reason: "it says that the file did not change".to_owned(),
            });
        }
    };
    let file_bytes = Some(bytes.len() as u64);
    shelf.put(&record, &Meta { at_unix_s: now_unix_s(), validator, file_bytes }, &bytes);
    Ok(Some(bytes))
}
