//! The heads of safetensors files: several at a time, each by one or two ranged requests, the cache
//! asked first. Knows of the format that a file begins with 8 bytes that say how long its header is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cache::{Meta, Shelf, now_unix_s};
use crate::client::{Ask, Client, Context, Part};
use crate::error::HubError;
use crate::fetch::Progress;
use crate::guess::{Guess, LENGTH_BYTES};
use crate::snapshot::HeadOfFile;
use crate::url;

/// Longest header that is fetched, bytes: the cap of the safetensors library.
const HEADER_CAP_BYTES: u64 = 100_000_000;
/// Most bytes of all headers together: ten times those of the largest models.
const ALL_HEADERS_CAP_BYTES: u64 = 400_000_000;
/// How often progress is told and an interrupt looked for.
const TICK: Duration = Duration::from_millis(50);

/// One file whose head is wanted.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) name: String,
    pub(crate) url: String,
    /// Its size, where a listing says.
    pub(crate) total: Option<u64>,
    /// Whether a listing names it: then it has to be there.
    pub(crate) is_listed: bool,
}

/// How far the cache is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    /// What is kept of a commit cannot change.
    Immutable,
    /// What is kept is asked about.
    Ask,
    /// The network is not there: what is kept is all there is.
    CacheOnly,
}

/// What the threads share.
struct Shared {
    client: Arc<Client>,
    context: Context,
    shelf: Shelf,
    trust: Trust,
    jobs: Mutex<Vec<Job>>,
    guess: Mutex<Guess>,
    /// Set when one has failed, or the user interrupted.
    is_over: AtomicBool,
    all_bytes: AtomicU64,
}

/// What came of one file.
enum Got {
    Cached(HeadOfFile),
    Fetched(HeadOfFile),
    Absent,
}

/// The heads of all files.
#[derive(Debug, Default)]
pub(crate) struct Heads {
    pub(crate) heads: BTreeMap<String, HeadOfFile>,
    pub(crate) absent: BTreeSet<String>,
    pub(crate) n_cached: usize,
    pub(crate) n_fetched: usize,
    /// When the oldest of those from the cache was confirmed; seconds since 1970.
    pub(crate) oldest_unix_s: Option<u64>,
}

/// Fetches the heads of files. Returns at once when interrupted: requests in flight are abandoned.
pub(crate) fn fetch(
    client: &Arc<Client>,
    context: &Context,
    shelf: &Shelf,
    trust: Trust,
    mut jobs: Vec<Job>,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<Heads, HubError> {
    let n_jobs = jobs.len();
    let n_threads = client.n_parallel().min(n_jobs);
    // Taken from the end.
    jobs.reverse();
    let shared = Arc::new(Shared {
        client: Arc::clone(client),
        context: context.clone(),
        shelf: shelf.clone(),
        trust,
        jobs: Mutex::new(jobs),
        guess: Mutex::new(Guess::default()),
        is_over: AtomicBool::new(false),
        all_bytes: AtomicU64::new(0),
    });
    let (sender, receiver) = mpsc::channel();
    for _ in 0..n_threads {
        let (shared, sender) = (Arc::clone(&shared), sender.clone());
        let work = move || {
            while let Some(job) = shared.next() {
                let got = shared.head(&job);
                if sender.send((job.name, got)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("tierkeep-hub".to_owned())
            .spawn(work)
            .map_err(|source| HubError::Io { path: "a thread".into(), source })?;
    }
    drop(sender);
    let mut heads = Heads::default();
    let result = collect(&receiver, n_jobs, client, stop, &mut heads, progress);
    shared.is_over.store(true, Ordering::SeqCst);
    result.map(|()| heads)
}

type Answer = (String, Result<(Got, u64), HubError>);

fn collect(
    receiver: &mpsc::Receiver<Answer>,
    n_jobs: usize,
    client: &Client,
    stop: &AtomicBool,
    heads: &mut Heads,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), HubError> {
    let mut n_done = 0;
    while n_done < n_jobs {
        if stop.load(Ordering::SeqCst) {
            return Err(HubError::Interrupted);
        }
        progress(Progress { files_done: n_done, files_total: n_jobs, bytes: client.bytes() });
        let (name, got) = match receiver.recv_timeout(TICK) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => {
                let source = std::io::Error::other("it ended before its work was done");
                return Err(HubError::Io { path: "a thread".into(), source });
            }
        };
        n_done += 1;
        let (got, at) = got?;
        match got {
            Got::Cached(head) => {
                heads.n_cached += 1;
                heads.oldest_unix_s = Some(heads.oldest_unix_s.map_or(at, |oldest| oldest.min(at)));
                heads.heads.insert(name, head);
            }
            Got::Fetched(head) => {
                heads.n_fetched += 1;
                heads.heads.insert(name, head);
            }
            Got::Absent => {
                heads.absent.insert(name);
            }
        }
    }
    progress(Progress { files_done: n_done, files_total: n_jobs, bytes: client.bytes() });
    Ok(())
}

/// A lock whose holder panicked holds data that are still whole.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn next(&self) -> Option<Job> {
        if self.is_over.load(Ordering::SeqCst) {
            return None;
        }
        locked(&self.jobs).pop()
    }

    /// The head of one file, from the cache or the server, and when it was confirmed.
    fn head(&self, job: &Job) -> Result<(Got, u64), HubError> {
        let record = format!("head {}", job.name);
        let kept = self.shelf.get(&record).and_then(|(meta, bytes)| {
            let head = HeadOfFile { bytes, file_bytes: meta.file_bytes? };
            let is_of_size = job.total.is_none_or(|total| total == head.file_bytes);
            is_of_size.then_some((meta, head))
        });
        match (self.trust, kept) {
            (Trust::Immutable | Trust::CacheOnly, Some((meta, head))) => {
                Ok((Got::Cached(head), meta.at_unix_s))
            }
            (Trust::CacheOnly, None) => Err(HubError::Missing {
                url: url::shown(&job.url),
                said: "it is not in the cache".to_owned(),
            }),
            (Trust::Ask, Some(kept)) => self.revalidated(job, &record, kept),
            (Trust::Immutable | Trust::Ask, None) => self.fetched(job, &record, None),
        }
    }

    /// Eight bytes tell whether what is kept is still so: by the size, the server's word for the
    /// version, and the bytes themselves.
    fn revalidated(
        &self,
        job: &Job,
        record: &str,
        (meta, head): (Meta, HeadOfFile),
    ) -> Result<(Got, u64), HubError> {
        let ask = self.ask(&job.url);
        let part = match self.client.part(&ask, 0, LENGTH_BYTES, job.total) {
            Err(HubError::Missing { .. }) => return absent(job),
            other => other?,
        };
        let is_same = meta.validator.is_some()
            && meta.validator == part.validator
            && part.total == Some(head.file_bytes)
            && head.bytes.get(..8) == part.bytes.get(..8);
        if !is_same {
            return self.fetched(job, record, Some(part));
        }
        let meta = Meta { at_unix_s: now_unix_s(), ..meta };
        self.shelf.put(record, &meta, &head.bytes);
        Ok((Got::Cached(head), meta.at_unix_s))
    }

    /// Fetches a head; `first` is its beginning where that is there already.
    fn fetched(
        &self,
        job: &Job,
        record: &str,
        first: Option<Part>,
    ) -> Result<(Got, u64), HubError> {
        let (asked, answer) = match first {
            Some(part) => (LENGTH_BYTES, Ok(part)),
            None => {
                let asked = locked(&self.guess).first_bytes();
                (asked, self.client.part(&self.ask(&job.url), 0, asked, job.total))
            }
        };
        let needed = answer.as_ref().ok().and_then(|part| needed_bytes(part, job));
        locked(&self.guess).settle(asked, needed);
        let mut part = match answer {
            Err(HubError::Missing { .. }) => return absent(job),
            other => other?,
        };
        let Some(file_bytes) = part.total.or(job.total) else {
            return Err(HubError::Contradiction {
                url: url::shown(&job.url),
                what: "the size of the whole file",
                expected: "a number in Content-Range".to_owned(),
                found: "*".to_owned(),
            });
        };
        let Some(needed) = needed else {
            // What the length field says cannot be; the catalogue names what is wrong with it.
            part.bytes.truncate(8);
            return Ok((Got::Fetched(HeadOfFile { bytes: part.bytes, file_bytes }), 0));
        };
        let all = self.all_bytes.fetch_add(needed, Ordering::SeqCst).saturating_add(needed);
        if all > ALL_HEADERS_CAP_BYTES {
            return Err(HubError::HeadersTooLarge {
                url: url::shown(&job.url),
                bytes: all,
                cap_bytes: ALL_HEADERS_CAP_BYTES,
            });
        }
        let got = part.bytes.len() as u64;
        if got < needed {
            let rest = self.rest(job, &part, got, needed, file_bytes)?;
            part.bytes.extend_from_slice(&rest.bytes);
        }
        part.bytes.truncate(usize::try_from(needed).unwrap_or(usize::MAX));
        let meta = Meta {
            at_unix_s: now_unix_s(),
            validator: part.validator,
            file_bytes: Some(file_bytes),
        };
        self.shelf.put(record, &meta, &part.bytes);
        Ok((Got::Fetched(HeadOfFile { bytes: part.bytes, file_bytes }), meta.at_unix_s))
    }

    /// The bytes that the first answer lacks, of the same version of the file. The server that the
    /// first request was sent on to is asked directly; its address may have expired.
    fn rest(
        &self,
        job: &Job,
        first: &Part,
        got: u64,
        needed: u64,
        file_bytes: u64,
    ) -> Result<Part, HubError> {
        let direct = self.client.part(&self.ask(&first.url), got, needed, Some(file_bytes));
        let rest = match direct {
            Err(
                HubError::Missing { .. } | HubError::Refused { .. } | HubError::BadToken { .. },
            ) if first.url != job.url => {
                self.client.part(&self.ask(&job.url), got, needed, Some(file_bytes))?
            }
            other => other?,
        };
        // Two storages may tag one version of a file differently; one does not.
        let is_comparable = first.url == rest.url && first.validator.is_some();
        if is_comparable && first.validator != rest.validator {
            return Err(HubError::Contradiction {
                url: url::shown(&job.url),
                what: "its version (ETag or date)",
                expected: first.validator.clone().unwrap_or_default(),
                found: rest.validator.unwrap_or_default(),
            });
        }
        Ok(rest)
    }

    fn ask<'a>(&'a self, url: &'a str) -> Ask<'a> {
        Ask { url, context: &self.context, is_file: true, unless: None }
    }
}

/// What it means that the server does not have a file.
fn absent(job: &Job) -> Result<(Got, u64), HubError> {
    if job.is_listed {
        let said = "the listing names it".to_owned();
        return Err(HubError::Missing { url: url::shown(&job.url), said });
    }
    Ok((Got::Absent, 0))
}

/// How many bytes the head has by its first 8; `None` where they are not there or cannot be true.
fn needed_bytes(part: &Part, job: &Job) -> Option<u64> {
    let length: [u8; 8] = part.bytes.get(..8)?.try_into().ok()?;
    let header_bytes = u64::from_le_bytes(length);
    let file_bytes = part.total.or(job.total)?;
    (header_bytes <= HEADER_CAP_BYTES && header_bytes <= file_bytes.checked_sub(LENGTH_BYTES)?)
        .then(|| header_bytes + LENGTH_BYTES)
}
