//! From the MODEL that a user writes to a catalogue: a folder, a snapshot in the hub client's cache,
//! or headers fetched from a hub or a server. Owns this choice, and what a download would be.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result};
use tierkeep_doctor::{Fact, Facts, Measuring};
use tierkeep_hub::{
    Download, HubError, MeasuredRate, Rate, Reference, Settings, Snapshot, Wanted, local,
};
use tierkeep_plans::catalogue::header::{HeaderBytes, declared_bytes};
use tierkeep_plans::catalogue::{Catalogue, Entry, HeaderError, Source};

use super::{Context, shared};
use crate::args::{ModelArg, RemoteArgs};
use crate::render::{self, Bar};

/// Small files that the catalogue and the checks of a model read.
const SMALL_FILES: [&str; 3] = ["config.json", "generation_config.json", "tokenizer_config.json"];
/// Files of which the size alone matters before a download.
const SIZED_FILES: [&str; 2] = ["tokenizer.json", "chat_template.jinja"];
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Where a model is.
#[derive(Debug)]
pub(crate) enum Place {
    /// In a folder, with an absolute path so that plans can be run from anywhere.
    Here(PathBuf),
    /// Elsewhere.
    There(Reference),
}

/// A model that has been looked at.
pub(crate) struct Opened {
    pub(crate) catalogue: Catalogue,
    /// Of one that is not here: what a download would be.
    pub(crate) download: Option<DownloadAnswer>,
}

/// A verb needs the weights, and they are not here.
#[derive(Debug)]
pub(crate) struct NotDownloaded {
    name: String,
    verb: &'static str,
    size: String,
    time: String,
    how: String,
}

impl fmt::Display for NotDownloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, verb, size, time, how } = self;
        write!(f, "{name} is not downloaded: {verb} needs its weights, {size}{time}; {how}")
    }
}

impl std::error::Error for NotDownloaded {}

/// The speed of a download, and where the figure is from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DownloadRate {
    /// By the user.
    Given(Rate),
    /// While headers were fetched.
    Measured(MeasuredRate),
    /// Too little was fetched to tell.
    NotMeasured,
}

impl DownloadRate {
    /// The figure, whatever it is from.
    pub(crate) fn rate(self) -> Option<Rate> {
        match self {
            Self::Given(rate) => Some(rate),
            Self::Measured(measured) => Some(measured.rate),
            Self::NotMeasured => None,
        }
    }
}

/// What a download of a model is: how much, to where, how long.
#[derive(Clone, Debug)]
pub(crate) struct DownloadAnswer {
    /// What was looked at, and what of it came over the network.
    pub(crate) snapshot: SnapshotFacts,
    pub(crate) download: Download,
    /// The folder that it would be written to, or the nearest above it that exists.
    pub(crate) target: PathBuf,
    pub(crate) free_bytes: Fact<u64>,
    pub(crate) rate: DownloadRate,
}

/// What is told of a snapshot; its heads are the catalogue's.
#[derive(Clone, Debug)]
pub(crate) struct SnapshotFacts {
    pub(crate) name: String,
    pub(crate) page: String,
    pub(crate) repo: Option<String>,
    pub(crate) commit: Option<String>,
    pub(crate) transfer: tierkeep_hub::Transfer,
    pub(crate) as_of_unix_s: Option<u64>,
    pub(crate) offline_reason: Option<String>,
}

impl DownloadAnswer {
    /// The command that downloads it, or what to do where there is none.
    pub(crate) fn how(&self) -> String {
        match (&self.snapshot.repo, &self.snapshot.commit) {
            (Some(repo), Some(commit)) => {
                format!("hf download {repo} --revision {commit} --local-dir DIR")
            }
            _ => format!("download the files of {} into a folder", self.snapshot.page),
        }
    }
}

/// Finds where a model is, without asking anybody. What exists as a path is a folder; `owner/name` is
/// looked for in the hub client's cache.
pub(crate) fn locate(model: &ModelArg, settings: &Settings) -> Result<Place> {
    let path = model.path();
    let here = |path: &Path| Place::Here(path.canonicalize().unwrap_or_else(|_| path.to_owned()));
    let text = model.text().to_str();
    if path.as_os_str().is_empty() {
        anyhow::bail!(
            "no model is named: give a folder, OWNER/NAME in the hub client's cache, hf:OWNER/NAME or an https URL"
        );
    }
    if path.exists() {
        return Ok(here(path));
    }
    let Some(text) = text else { return Ok(here(path)) };
    if let Some(reference) = tierkeep_hub::parse_remote(text)? {
        return Ok(Place::There(reference));
    }
    let Some(reference) = tierkeep_hub::parse_local(text) else { return Ok(here(path)) };
    let found = local::find(settings.hub_cache.as_deref(), &reference)?;
    if let Some(note) = found.note {
        render::note(&format!("{text}: {note}"));
    }
    Ok(here(&found.path))
}

/// Looks at a model, wherever it is. Of one elsewhere only the config and the headers are fetched.
pub(crate) fn open(model: &ModelArg, remote: &RemoteArgs, context: &Context) -> Result<Opened> {
    match locate(model, &context.hub)? {
        Place::Here(path) => {
            let catalogue = Catalogue::open_cached(&path, context.data_dir.as_deref())?;
            Ok(Opened { catalogue, download: None })
        }
        Place::There(reference) => {
            let there = There::look(&reference, context)?;
            let catalogue = Catalogue::open_from(&there)?;
            let download = there.download(remote.bandwidth, context);
            Ok(Opened { catalogue, download: Some(download) })
        }
    }
}

/// The folder of a model whose weights `verb` needs; of one elsewhere, what it would take to have them.
pub(crate) fn folder_for(
    model: &ModelArg,
    verb: &'static str,
    context: &Context,
) -> Result<PathBuf> {
    match locate(model, &context.hub)? {
        Place::Here(path) => Ok(path),
        Place::There(reference) => {
            let there = There::look(&reference, context)?;
            let answer = there.download(None, context);
            Err(not_downloaded(&answer, verb, &format!("{verb} DIR")).into())
        }
    }
}

/// The folder of a model to run, where `target` names one and no plan file.
pub(crate) fn folder_to_run(target: &ModelArg, context: &Context) -> Result<Option<PathBuf>> {
    let path = target.path();
    if path.is_file() {
        return Ok(None);
    }
    let text = target.text().to_str().unwrap_or_default();
    let is_elsewhere = tierkeep_hub::parse_remote(text)?.is_some();
    let is_plan_name = path.extension().is_some_and(|end| end == "toml");
    if is_plan_name && !is_elsewhere && !path.exists() {
        return Ok(None);
    }
    // What is no folder is read as a plan, which says that it does not exist.
    Ok(Some(folder_for(target, "run", context)?).filter(|folder| folder.is_dir()))
}

/// The folder of a plan's model, which `given` may name after a move or a download.
///
/// # Errors
/// [`NotDownloaded`]: the plan was made before the download, and no folder is given.
pub(crate) fn folder_of_plan(
    plan: &Path,
    planned: &Path,
    given: Option<&ModelArg>,
    context: &Context,
) -> Result<PathBuf> {
    if let Some(given) = given {
        return folder_for(given, "run", context);
    }
    let text = planned.to_string_lossy();
    let download = match tierkeep_hub::parse_remote(&text) {
        Ok(Some(Reference::Repo(repo))) => {
            format!("`hf download {} --revision {} --local-dir DIR`", repo.repo, repo.revision)
        }
        Ok(Some(Reference::Folder(_))) => format!("download the files of {text} into DIR"),
        Ok(None) | Err(_) => return Ok(planned.to_owned()),
    };
    Err(NotDownloaded {
        name: text.into_owned(),
        verb: "run",
        size: "which were not here when it was planned".to_owned(),
        time: String::new(),
        how: format!("{download}, then `tierkeep run {} --model DIR`", plan.display()),
    }
    .into())
}

fn not_downloaded(answer: &DownloadAnswer, verb: &'static str, then: &str) -> NotDownloaded {
    let how = answer.how();
    let how = if answer.snapshot.repo.is_some() { format!("`{how}`") } else { how };
    NotDownloaded {
        name: answer.snapshot.name.clone(),
        verb,
        size: render::download_size(answer),
        time: render::download_time(answer).map_or_else(String::new, |time| format!(", {time}")),
        how: format!("{how}, then `tierkeep {then}`"),
    }
}

impl Opened {
    /// Facts of this machine for the model: measured on its own files where they are here, and on the
    /// disk that it would be downloaded to where they are not.
    pub(crate) fn facts(&self, context: &Context, measure: impl Into<Measuring>) -> Facts {
        match &self.download {
            None => {
                let directory = Some(self.catalogue.directory.as_path());
                shared::facts(context, Some(&self.catalogue), directory, measure)
            }
            Some(download) => {
                shared::facts_elsewhere(context, &self.catalogue, &download.target, measure)
            }
        }
    }
}

/// A model elsewhere, as the catalogue reads it.
pub(crate) struct There<'a> {
    settings: &'a Settings,
    snapshot: Snapshot,
    label: PathBuf,
    stop: Arc<AtomicBool>,
}

impl<'a> There<'a> {
    /// Fetches what can be known before a download, with a bar.
    pub(crate) fn look(reference: &Reference, context: &'a Context) -> Result<Self> {
        let _heeding = context.heeding();
        let bar = Bar::count(&format!("headers of {reference}"));
        let wanted = Wanted { is_shard: &is_shard, small: &SMALL_FILES, sizes: &SIZED_FILES };
        let stop = Arc::clone(&context.interrupted);
        let snapshot =
            tierkeep_hub::fetch(&context.hub, reference, &wanted, &stop, &mut |progress| {
                bar.set(progress.files_done as u64, progress.files_total as u64);
            })
            .with_context(|| format!("cannot look at {reference}"))?;
        drop(bar);
        if let (Some(reason), Some(at)) = (&snapshot.offline_reason, snapshot.as_of_unix_s) {
            let at = render::date(at);
            render::note(&format!("{reference} as it was on {at}, from the cache: {reason}"));
        }
        let label = PathBuf::from(&snapshot.name);
        Ok(Self { settings: &context.hub, snapshot, label, stop })
    }

    /// What a download would be, to where the hub's client puts it.
    pub(crate) fn download(&self, given: Option<Rate>, context: &Context) -> DownloadAnswer {
        let snapshot = &self.snapshot;
        let hub_cache = self.settings.hub_cache.as_deref();
        // Files of a plain server go wherever the user is; a repository's to the client's cache.
        let wanted = hub_cache.filter(|_| snapshot.repo.is_some());
        let target = wanted
            .and_then(shared::existing_ancestor)
            .or_else(|| context.work_dir.clone())
            .unwrap_or_default();
        let rate = match (given, snapshot.rate) {
            (Some(rate), _) => DownloadRate::Given(rate),
            (None, Some(measured)) => DownloadRate::Measured(measured),
            (None, None) => DownloadRate::NotMeasured,
        };
        DownloadAnswer {
            download: Download::of(snapshot, &|name| snapshot.heads.contains_key(name), hub_cache),
            free_bytes: shared::disk(Some(&target)).free_bytes,
            target,
            rate,
            snapshot: SnapshotFacts {
                name: snapshot.name.clone(),
                page: snapshot.page.clone(),
                repo: snapshot.repo.clone(),
                commit: snapshot.commit.clone(),
                transfer: snapshot.transfer,
                as_of_unix_s: snapshot.as_of_unix_s,
                offline_reason: snapshot.offline_reason.clone(),
            },
        }
    }

    /// A head that the snapshot has, or that is fetched now.
    fn head(&self, name: &str) -> Result<Option<tierkeep_hub::HeadOfFile>, HubError> {
        match self.snapshot.heads.get(name) {
            Some(head) => Ok(Some(head.clone())),
            None if self.snapshot.absent.contains(name) => Ok(None),
            None => tierkeep_hub::fetch_head(self.settings, &self.snapshot, name, &self.stop),
        }
    }
}

/// Names of files whose heads are fetched at once; any other that the index names is fetched when the
/// catalogue asks for it.
fn is_shard(name: &str) -> bool {
    name.starts_with("model") && name.ends_with(".safetensors") && !name.contains('/')
}

impl Source for There<'_> {
    fn label(&self) -> &Path {
        &self.label
    }

    fn locate(&self, name: &str) -> PathBuf {
        // A URL stays one on every system.
        PathBuf::from(format!("{}/{name}", self.snapshot.name))
    }

    fn list(&self) -> io::Result<Option<Vec<Entry>>> {
        if !self.snapshot.is_listing_complete {
            return Ok(None);
        }
        let in_first_level = self.snapshot.files.iter().filter(|file| !file.name.contains('/'));
        let entry = |file: &tierkeep_hub::RemoteFile| Entry {
            name: file.name.clone(),
            bytes: self.snapshot.file_bytes(&file.name),
            broken_link: None,
        };
        Ok(Some(in_first_level.map(entry).collect()))
    }

    fn small_file(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        if let Some(bytes) = self.snapshot.small.get(name) {
            return Ok(Some(bytes.clone()));
        }
        // Of a folder without a listing these have been asked for already.
        let is_known = SMALL_FILES.contains(&name) || name == INDEX_FILE;
        if !self.snapshot.is_listing_complete && is_known {
            return Ok(None);
        }
        tierkeep_hub::fetch_file(self.settings, &self.snapshot, name, &self.stop)
            .map_err(io::Error::other)
    }

    fn file_bytes(&self, name: &str) -> io::Result<Option<u64>> {
        Ok(self.snapshot.file_bytes(name))
    }

    fn header(&self, name: &str) -> Result<HeaderBytes, HeaderError> {
        let Some(head) = self.head(name).map_err(io::Error::other)? else {
            return Err(io::Error::from(ErrorKind::NotFound).into());
        };
        let file_bytes = head.file_bytes;
        let field = head.bytes.get(..8).and_then(|field| <[u8; 8]>::try_from(field).ok());
        let Some(field) = field else { return Err(HeaderError::TooShort { file_bytes }) };
        let declared = declared_bytes(field, file_bytes)?;
        let json = head.bytes.get(8..).unwrap_or_default().to_vec();
        if json.len() as u64 != declared {
            return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
        }
        Ok(HeaderBytes { json, file_bytes })
    }

    fn index_is_cheap(&self) -> bool {
        self.snapshot.small.contains_key(INDEX_FILE)
    }
}
