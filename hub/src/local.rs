//! The cache of the hub's own client: `models--owner--name/snapshots/COMMIT` of symbolic links into
//! `blobs`, and `refs/REVISION` that says which commit a branch was. Only read, never written.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::reference::{RepoReference, is_commit};

/// A downloaded snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalSnapshot {
    /// Its folder.
    pub path: PathBuf,
    /// Its commit: the folder's name.
    pub commit: String,
    /// What a user should know of how it was chosen.
    pub note: Option<String>,
}

/// Why a model is not to be had from the hub client's cache.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// There is no such model.
    #[error("{repo} is no folder, and not in the hub cache at {}: hf:{repo} looks at it without downloading, \
             `hf download {repo}` downloads it", cache.display())]
    NotCached {
        /// Which.
        repo: String,
        /// Where it was looked for.
        cache: PathBuf,
    },
    /// There is no cache folder to look into.
    #[error(
        "{repo} is no folder, and there is no hub cache to look into: set HF_HOME or HF_HUB_CACHE, or write hf:{repo}"
    )]
    NoCache {
        /// Which.
        repo: String,
    },
    /// The model is there, but not at this revision.
    #[error(
        "{repo} is in the hub cache, but not at revision {revision:?} (there: {there}): \
             `hf download {repo} --revision {revision}` downloads it"
    )]
    OtherRevisions {
        /// Which.
        repo: String,
        /// What was asked for.
        revision: String,
        /// What is there.
        there: String,
    },
    /// A file of the snapshot leads nowhere.
    #[error("{} leads to {}, which is missing{}: `hf download {repo} --revision {commit}` fetches it again",
        link.display(), target.display(),
        if *n_broken > 1 { format!(", and {} other files do so too", n_broken - 1) } else { String::new() })]
    BrokenLink {
        /// Which.
        repo: String,
        /// At which commit.
        commit: String,
        /// The file.
        link: PathBuf,
        /// What it points to.
        target: PathBuf,
        /// How many files are broken in all.
        n_broken: usize,
    },
    /// Something of the cache cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// What.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// The folder of a repository in the client's cache.
#[must_use]
pub fn repo_folder(cache: &Path, reference: &RepoReference) -> PathBuf {
    cache.join(format!("models--{}", reference.repo.to_string().replace('/', "--")))
}

/// The downloaded snapshot of a repository at a revision.
///
/// Of a branch it is the commit that `refs` names. Without that, as after a download of a commit or
/// where `refs` was lost, the only snapshot is it, or the newest of several, with a note.
///
/// # Errors
/// [`LocalError`]: what is there instead, and the command that downloads it.
pub fn find(cache: Option<&Path>, reference: &RepoReference) -> Result<LocalSnapshot, LocalError> {
    let repo = reference.repo.to_string();
    let Some(cache) = cache else { return Err(LocalError::NoCache { repo }) };
    let folder = repo_folder(cache, reference);
    if !folder.is_dir() {
        return Err(LocalError::NotCached { repo, cache: cache.to_owned() });
    }
    let snapshots = snapshots(&folder.join("snapshots"))?;
    let (commit, note) = choose(&folder, reference, &snapshots)?;
    let path = folder.join("snapshots").join(&commit);
    check_links(&path, &repo, &commit)?;
    Ok(LocalSnapshot { path, commit, note })
}

/// Commits with a snapshot, the newest first.
fn snapshots(folder: &Path) -> Result<Vec<String>, LocalError> {
    let io = |source| LocalError::Io { path: folder.to_owned(), source };
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(io)?,
    };
    let mut found: Vec<(SystemTime, String)> = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io)?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if entry.path().is_dir() {
            let at = entry.metadata().and_then(|meta| meta.modified());
            found.push((at.unwrap_or(SystemTime::UNIX_EPOCH), name));
        }
    }
    found.sort_by(|a, b| b.cmp(a));
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

fn choose(
    folder: &Path,
    reference: &RepoReference,
    snapshots: &[String],
) -> Result<(String, Option<String>), LocalError> {
    let revision = &reference.revision;
    let other = || LocalError::OtherRevisions {
        repo: reference.repo.to_string(),
        revision: revision.clone(),
        there: if snapshots.is_empty() {
            "no whole snapshot".to_owned()
        } else {
            snapshots.join(", ")
        },
    };
    if is_commit(revision) {
        return match snapshots.contains(revision) {
            true => Ok((revision.clone(), None)),
            false => Err(other()),
        };
    }
    let named = fs::read_to_string(folder.join("refs").join(revision));
    if let Ok(named) = named {
        let named = named.trim();
        return match snapshots.iter().find(|commit| *commit == named) {
            Some(commit) => Ok((commit.clone(), None)),
            None => Err(other()),
        };
    }
    // Only of the branch that is meant without saying so may another commit be taken.
    match snapshots {
        [only] if revision == "main" => {
            let note = format!("refs/main is absent: the only snapshot, {only}, is used");
            Ok((only.clone(), Some(note)))
        }
        [newest, ..] if revision == "main" => {
            let note = format!(
                "refs/main is absent: of {} snapshots the newest, {newest}, is used; name another with @COMMIT",
                snapshots.len()
            );
            Ok((newest.clone(), Some(note)))
        }
        _ => Err(other()),
    }
}

/// Links to blobs that are gone, as after a blob was deleted by hand.
fn check_links(path: &Path, repo: &str, commit: &str) -> Result<(), LocalError> {
    let io = |source| LocalError::Io { path: path.to_owned(), source };
    let mut broken = Vec::new();
    for entry in fs::read_dir(path).map_err(io)? {
        let link = entry.map_err(io)?.path();
        if link.is_symlink() && !link.exists() {
            broken.push(link);
        }
    }
    broken.sort();
    let n_broken = broken.len();
    match broken.into_iter().next() {
        None => Ok(()),
        Some(link) => Err(LocalError::BrokenLink {
            repo: repo.to_owned(),
            commit: commit.to_owned(),
            target: fs::read_link(&link).unwrap_or_default(),
            link,
            n_broken,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::parse_local;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    fn cache_with(commits: &[&str]) -> (tempfile::TempDir, PathBuf) {
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("models--o--n");
        for commit in commits {
            fs::create_dir_all(folder.join("snapshots").join(commit)).unwrap();
        }
        (cache, folder)
    }

    fn found(cache: &Path, text: &str) -> Result<LocalSnapshot, String> {
        find(Some(cache), &parse_local(text).unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_ref_chooses_and_a_commit_names_itself() {
        let (cache, folder) = cache_with(&[A, B]);
        fs::create_dir_all(folder.join("refs/refs/pr")).unwrap();
        fs::write(folder.join("refs/main"), B).unwrap();
        fs::write(folder.join("refs/refs/pr/1"), format!("{A}\n")).unwrap();
        for (text, commit) in
            [("o/n".to_owned(), B), ("o/n@refs/pr/1".to_owned(), A), (format!("o/n@{A}"), A)]
        {
            let snapshot = found(cache.path(), &text).unwrap();
            assert_eq!((snapshot.commit.as_str(), snapshot.note), (commit, None), "{text}");
            assert_eq!(snapshot.path, folder.join("snapshots").join(commit));
        }
        let error = found(cache.path(), "o/n@v2").unwrap_err();
        assert!(error.contains("\"v2\"") && error.contains(A) && error.contains(B), "{error}");
        fs::write(folder.join("refs/main"), "c".repeat(40)).unwrap();
        let error = found(cache.path(), "o/n").unwrap_err();
        assert!(error.contains("not at revision \"main\""), "{error}");
    }

    #[test]
    fn without_refs_the_only_or_the_newest_is_taken_and_told() {
        let (cache, folder) = cache_with(&[A]);
        let only = found(cache.path(), "o/n").unwrap();
        assert!(only.commit == A && only.note.unwrap().contains("only snapshot"));
        fs::create_dir_all(folder.join("snapshots").join(B)).unwrap();
        let old = fs::File::open(folder.join("snapshots").join(A)).unwrap();
        old.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let newest = found(cache.path(), "o/n").unwrap();
        assert!(newest.commit == B && newest.note.unwrap().contains("2 snapshots"));
        assert!(found(cache.path(), "o/n@v1").is_err(), "another branch is not guessed");
    }

    #[test]
    fn what_is_not_there_is_told_with_the_command() {
        let cache = tempfile::tempdir().unwrap();
        let error = found(cache.path(), "o/n").unwrap_err();
        assert!(error.contains("hf download o/n") && error.contains("hf:o/n"), "{error}");
        let none = find(None, &parse_local("o/n").unwrap()).unwrap_err().to_string();
        assert!(none.contains("HF_HOME"), "{none}");
        let (cache, _) = cache_with(&[]);
        fs::create_dir_all(cache.path().join("models--o--n/blobs")).unwrap();
        let error = found(cache.path(), "o/n").unwrap_err();
        assert!(error.contains("no whole snapshot"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn broken_links_are_named() {
        let (cache, folder) = cache_with(&[A]);
        let snapshot = folder.join("snapshots").join(A);
        fs::create_dir_all(folder.join("blobs")).unwrap();
        fs::write(folder.join("blobs/1"), "x").unwrap();
        for (name, blob) in [("a", "1"), ("b", "2"), ("c", "3")] {
            std::os::unix::fs::symlink(format!("../../blobs/{blob}"), snapshot.join(name)).unwrap();
        }
        let error = found(cache.path(), "o/n").unwrap_err();
        assert!(error.contains("/b leads to ../../blobs/2"), "{error}");
        assert!(error.contains("1 other files") && error.contains("hf download"), "{error}");
    }
}
