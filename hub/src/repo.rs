//! A repository of a hub: its commit, its listing, and its files at that commit, so that all that is
//! read is of one version.

use std::path::Path;

use crate::cache::{Meta, Shelf, now_unix_s};
use crate::client::{Ask, Context, Whole, plain};
use crate::error::HubError;
use crate::fetch::{Fetch, small};
use crate::folder::{INDEX_CAP_BYTES, INDEX_FILE, index_names};
use crate::headers::{Job, Trust};
use crate::listing::{LISTING_CAP_BYTES, Listing, commit_of};
use crate::reference::{RepoReference, is_commit};
use crate::snapshot::{Base, Snapshot};
use crate::url::{encode_path, encode_segment};

const REF_RECORD: &str = "commit";
const LISTING_RECORD: &str = "listing";

/// Where one repository is and where it is kept.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    endpoint: String,
    reference: RepoReference,
    pub(crate) context: Context,
}

/// What the network, or the cache without it, says of a revision.
struct Found {
    listing: Listing,
    /// Why the network was not asked, and when it last was; seconds since 1970.
    offline: Option<(String, u64)>,
}

impl Place {
    fn host(&self) -> &str {
        self.endpoint.split_once("://").map_or(self.endpoint.as_str(), |(_, rest)| rest)
    }

    fn folder(&self) -> String {
        self.reference.repo.to_string().replace('/', "--")
    }

    fn prefix(&self) -> String {
        format!("{} {}", self.endpoint, self.reference.repo)
    }

    /// What is kept of a branch or tag: the commit that it was last.
    fn refs(&self, root: Option<&Path>) -> Shelf {
        let prefix = format!("{} ref {}", self.prefix(), self.reference.revision);
        Shelf::new(root, &[self.host(), &self.folder(), "refs"], prefix)
    }

    /// What is kept of a commit.
    pub(crate) fn commit(&self, root: Option<&Path>, commit: &str) -> Shelf {
        let prefix = format!("{} at {commit}", self.prefix());
        Shelf::new(root, &[self.host(), &self.folder(), commit], prefix)
    }

    fn api(&self, revision: &str, query: &str) -> String {
        let (endpoint, repo) = (&self.endpoint, &self.reference.repo);
        format!("{endpoint}/api/models/{repo}/revision/{}?{query}", encode_segment(revision))
    }

    pub(crate) fn file(&self, commit: &str, name: &str) -> String {
        let (endpoint, repo) = (&self.endpoint, &self.reference.repo);
        format!("{endpoint}/{repo}/resolve/{}/{}", encode_segment(commit), encode_path(name))
    }
}

pub(crate) fn snapshot(
    fetch: &mut Fetch<'_>,
    reference: &RepoReference,
) -> Result<Snapshot, HubError> {
    let endpoint = reference.endpoint.clone().unwrap_or_else(|| fetch.settings.endpoint.clone());
    let context = Context::Repo {
        repo: reference.repo.to_string(),
        revision: reference.revision.clone(),
        endpoint: endpoint.clone(),
    };
    let place = Place { endpoint, reference: reference.clone(), context };
    let found = find(fetch, &place)?;
    let Listing { commit, .. } = &found.listing;
    let name = format!("hf:{}@{commit}", reference.repo);
    if !found.listing.has("config.json") {
        // What has neither config nor safetensors, such as GGUF alone, is better told by what it has.
        let found = found.listing.weights_of_other_formats();
        return Err(match found {
            Some(found) => HubError::NoSafetensors { model: name, found },
            None => HubError::NoConfig { model: name },
        });
    }
    let shelf = place.commit(fetch.cache(), commit);
    let trust = if found.offline.is_some() { Trust::CacheOnly } else { Trust::Immutable };
    let mut names: Vec<&str> =
        found.listing.names().filter(|name| (fetch.wanted.is_shard)(name)).collect();
    let index;
    if names.is_empty() && found.listing.has(INDEX_FILE) {
        // Weights of other names: the index says which files they are.
        let address = place.file(commit, INDEX_FILE);
        let at = (INDEX_FILE, address.as_str());
        let bytes = small(&fetch.client, &shelf, &place.context, trust, at, INDEX_CAP_BYTES)?;
        index = index_names(&address, &bytes.unwrap_or_default())?;
        let is_there = |name: &&str| name.ends_with(".safetensors") && found.listing.has(name);
        names = index.iter().map(String::as_str).filter(is_there).collect();
    }
    let job = |name: &&str| Job {
        name: (*name).to_owned(),
        url: place.file(commit, name),
        total: found.listing.bytes_of(name),
        is_listed: true,
    };
    let jobs: Vec<Job> = names.iter().map(job).collect();
    if jobs.is_empty() {
        return Err(HubError::NoSafetensors { model: name, found: found.listing.other_formats() });
    }
    let n_jobs = jobs.len();
    let read = |fetch: &mut Fetch<'_>| {
        let small = fetch.all_small(
            &shelf,
            &place.context,
            trust,
            &|name| found.listing.has(name),
            &|name| place.file(commit, name),
        )?;
        let (heads, rate) = fetch.heads(&shelf, &place.context, trust, jobs)?;
        Ok((small, heads, rate))
    };
    let (small, heads, rate) = match (read(fetch), &found.offline) {
        // What is missing is named by the reason that the network was not asked.
        (Err(HubError::Missing { .. }), Some((reason, _))) => {
            return Err(in_part(fetch, &place, reason, n_jobs));
        }
        (other, _) => other?,
    };
    if !small.contains_key("config.json")
        && let Some((reason, _)) = &found.offline
    {
        return Err(in_part(fetch, &place, reason, n_jobs));
    }
    Ok(Snapshot {
        base: Base::Repo(place.clone()),
        page: format!("{}/{}", place.endpoint, reference.repo),
        repo: Some(reference.repo.to_string()),
        commit: Some(commit.clone()),
        files: found.listing.files(),
        is_listing_complete: true,
        transfer: fetch.transfer(&heads),
        small,
        absent: heads.absent,
        heads: heads.heads,
        rate,
        as_of_unix_s: found.offline.as_ref().map(|(_, at)| *at),
        offline_reason: found.offline.map(|(reason, _)| reason),
        name,
    })
}

/// The listing of the revision: of a commit that is kept without any request, of anything else after
/// one that asks which commit it is now, and from the cache where there is no network.
fn find(fetch: &Fetch<'_>, place: &Place) -> Result<Found, HubError> {
    let revision = &place.reference.revision;
    let kept_of_commit = |commit: &str| {
        let (meta, json) = place.commit(fetch.cache(), commit).get(LISTING_RECORD)?;
        let listing: Listing = serde_json::from_slice(&json).ok()?;
        (listing.commit == commit).then(|| (listing.sorted(), meta.at_unix_s))
    };
    if is_commit(revision)
        && let Some((listing, _)) = kept_of_commit(revision)
    {
        return Ok(Found { listing, offline: None });
    }
    // Of a branch: the commit that it was when it was last asked about.
    let kept = place.refs(fetch.cache()).get(REF_RECORD).and_then(|(meta, commit)| {
        let commit = String::from_utf8(commit).ok()?;
        Some((kept_of_commit(&commit)?.0, meta.at_unix_s))
    });
    if fetch.settings.is_offline {
        let reason = "HF_HUB_OFFLINE is set".to_owned();
        return match kept {
            Some((listing, at)) => Ok(Found { listing, offline: Some((reason, at)) }),
            None => Err(HubError::OfflineMode {
                what: place.reference.to_string(),
                cached: cached_text(fetch, place),
            }),
        };
    }
    match (ask(fetch, place, kept.as_ref().map(|(listing, _)| listing)), kept) {
        (Ok(listing), _) => Ok(Found { listing, offline: None }),
        (Err(HubError::Unreachable { host, reason, .. }), Some((listing, at))) => {
            let reason = format!("{host} cannot be reached ({reason})");
            Ok(Found { listing, offline: Some((reason, at)) })
        }
        (Err(HubError::Unreachable { host, reason, .. }), None) => {
            Err(HubError::Unreachable { host, reason, cached: cached_text(fetch, place) })
        }
        (Err(error), _) => Err(error),
    }
}

/// Asks the hub, and keeps what it says.
fn ask(fetch: &Fetch<'_>, place: &Place, kept: Option<&Listing>) -> Result<Listing, HubError> {
    let revision = &place.reference.revision;
    let get = |address: &str| {
        let (context, address) = (place.context.clone(), address.to_owned());
        let whole = fetch.client.apart(move |client| {
            let ask = Ask { url: &address, context: &context, is_file: false, unless: None };
            client.whole(&ask, LISTING_CAP_BYTES)
        });
        match whole? {
            Whole::Changed { bytes, .. } => Ok(bytes),
            Whole::Unchanged => Ok(Vec::new()),
        }
    };
    let bad = |address: &str, error: crate::listing::ListingError| HubError::BadAnswer {
        url: crate::url::shown(address),
        expected: "the hub's listing of a model",
        reason: plain(&error.to_string()),
    };
    let confirm = |listing: &Listing| {
        let meta = Meta { at_unix_s: now_unix_s(), ..Meta::default() };
        place.refs(fetch.cache()).put(REF_RECORD, &meta, listing.commit.as_bytes());
        meta
    };
    if let Some(kept) = kept {
        // A short answer: which commit it is now.
        let address = place.api(revision, "expand[]=sha");
        let commit = commit_of(&get(&address)?).map_err(|e| bad(&address, e))?;
        if commit == kept.commit {
            confirm(kept);
            return Ok(kept.clone());
        }
    }
    fetch.check_stop()?;
    let address = place.api(revision, "blobs=true");
    let listing = Listing::parse(&get(&address)?).map_err(|e| bad(&address, e))?;
    if is_commit(revision) && listing.commit != *revision {
        return Err(HubError::Contradiction {
            url: crate::url::shown(&address),
            what: "its commit",
            expected: revision.clone(),
            found: listing.commit,
        });
    }
    let meta = confirm(&listing);
    if let Ok(json) = serde_json::to_vec(&listing) {
        place.commit(fetch.cache(), &listing.commit).put(LISTING_RECORD, &meta, &json);
    }
    Ok(listing)
}

/// What the cache has of the repository, in words.
fn cached_text(fetch: &Fetch<'_>, place: &Place) -> String {
    if place.refs(fetch.cache()).is_empty() {
        "the cache has nothing of it".to_owned()
    } else {
        "the cache has other revisions of it, or this one in part".to_owned()
    }
}

fn in_part(fetch: &Fetch<'_>, place: &Place, reason: &str, n_files: usize) -> HubError {
    let cached = format!("the cache has not all of its config and {n_files} headers");
    if fetch.settings.is_offline {
        return HubError::OfflineMode { what: place.reference.to_string(), cached };
    }
    let host = place.host().to_owned();
    HubError::Unreachable { host, reason: reason.to_owned(), cached }
}
