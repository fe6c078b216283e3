//! What a user may write to name a model that is not a folder: `hf:owner/name[@revision]`, a URL of
//! a repository's page or of a folder of files, and `owner/name[@revision]` in the local cache.

use std::fmt;

use ureq::http::Uri;

use crate::error::HubError;
use crate::url::{self, Server};

/// The revision that is meant where none is given.
pub(crate) const DEFAULT_REVISION: &str = "main";
/// Hosts whose pages are repositories of the public hub.
const PUBLIC_HUB: [&str; 2] = ["huggingface.co", "hf.co"];
/// Longest name of a repository that the hub allows.
const REPO_NAME_CAP: usize = 96;

/// `owner/name`, or a name alone as a few old repositories have.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RepoId {
    /// The user or organisation.
    pub owner: Option<String>,
    /// The repository's name.
    pub name: String,
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.owner {
            Some(owner) => write!(f, "{owner}/{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

impl RepoId {
    /// Parses `owner/name` or `name` by the hub's own rules.
    fn parse(text: &str) -> Result<Self, &'static str> {
        let mut parts = text.split('/');
        let (first, second) = (parts.next().unwrap_or(""), parts.next());
        if parts.next().is_some() {
            return Err("a repository is OWNER/NAME, with one slash");
        }
        for part in [Some(first), second].into_iter().flatten() {
            check_name(part)?;
        }
        if text.len() > REPO_NAME_CAP {
            return Err("a repository's name has at most 96 characters");
        }
        Ok(match second {
            Some(name) => Self { owner: Some(first.to_owned()), name: name.to_owned() },
            None => Self { owner: None, name: first.to_owned() },
        })
    }
}

fn check_name(part: &str) -> Result<(), &'static str> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if part.is_empty() {
        return Err("owner or name is empty");
    }
    if !part.chars().all(is_allowed) {
        return Err("names of repositories have letters, digits, '-', '_' and '.' only");
    }
    if part.contains("..") || part.contains("--") || part.starts_with(['.', '-']) {
        return Err("names of repositories do not begin with '.' or '-', nor contain '..' or '--'");
    }
    if part.ends_with(['.', '-']) || part.ends_with(".git") {
        return Err("names of repositories do not end with '.', '-' or '.git'");
    }
    Ok(())
}

/// A repository at a revision.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RepoReference {
    /// Where, if the text says so; else the settings say.
    pub endpoint: Option<String>,
    /// Which.
    pub repo: RepoId,
    /// A branch, tag or commit.
    pub revision: String,
}

impl RepoReference {
    /// Whether the revision is a whole commit, which never changes.
    #[must_use]
    pub fn is_commit(&self) -> bool {
        is_commit(&self.revision)
    }
}

pub(crate) fn is_commit(revision: &str) -> bool {
    revision.len() == 40
        && revision.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

impl fmt::Display for RepoReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hf:{}@{}", self.repo, self.revision)
    }
}

/// A model that is not a local folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reference {
    /// A repository of a hub.
    Repo(RepoReference),
    /// A folder on a server.
    Folder(FolderUrl),
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Repo(repo) => repo.fmt(f),
            Self::Folder(folder) => folder.fmt(f),
        }
    }
}

/// A folder on a server. A query, such as a signature, goes with every file and is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct FolderUrl {
    /// Scheme, host and path, without a slash at the end.
    pub(crate) base: String,
    /// What follows the `?`.
    pub(crate) query: Option<String>,
}

impl fmt::Display for FolderUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.base)
    }
}

impl fmt::Debug for FolderUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FolderUrl({})", self.base)
    }
}

impl FolderUrl {
    /// The URL of one of its files.
    pub(crate) fn file(&self, name: &str) -> String {
        let name = url::encode_path(name);
        match &self.query {
            Some(query) => format!("{}/{name}?{query}", self.base),
            None => format!("{}/{name}", self.base),
        }
    }

    /// The repository whose page this may be, at a hub that we do not know by name.
    pub(crate) fn as_repo(&self) -> Option<RepoReference> {
        let uri: Uri = self.base.parse().ok()?;
        repo_of_page(&uri).filter(|repo| repo.repo.owner.is_some())
    }
}

/// Parses what names a model elsewhere: `hf:...` or a URL; `None` for any other text.
///
/// # Errors
/// [`HubError::BadReference`]: it is meant as one and is none.
pub fn parse_remote(text: &str) -> Result<Option<Reference>, HubError> {
    let bad = |reason| HubError::BadReference { text: redacted(text), reason };
    if let Some(rest) = text.strip_prefix("hf://").or_else(|| text.strip_prefix("hf:")) {
        return Ok(Some(Reference::Repo(repo_at_revision(rest).map_err(bad)?)));
    }
    let scheme = text.split("://").next().unwrap_or("").to_ascii_lowercase();
    if !text.contains("://") {
        return Ok(None);
    }
    if scheme != "https" && scheme != "http" {
        return Err(bad("only https:// and http:// are spoken"));
    }
    let uri: Uri = text.parse().map_err(|_| bad("it is not a URL"))?;
    let host = uri.host().unwrap_or_default().to_ascii_lowercase();
    if host.is_empty() {
        return Err(bad("the URL has no host"));
    }
    if Server::of(&uri).is_none() {
        return Err(bad("the port of the URL is no port"));
    }
    if uri.authority().is_some_and(|a| a.as_str().contains('@')) {
        return Err(bad("a name and password in a URL are not sent"));
    }
    if PUBLIC_HUB.contains(&host.as_str()) {
        let repo = repo_of_page(&uri).ok_or_else(|| bad("the URL is of no model's page"))?;
        return Ok(Some(Reference::Repo(repo)));
    }
    Ok(Some(Reference::Folder(folder_of(&uri))))
}

/// Parses `owner/name` or `owner/name@revision`, as the hub client's local cache is asked; `None`
/// for any other text.
#[must_use]
pub fn parse_local(text: &str) -> Option<RepoReference> {
    repo_at_revision(text).ok().filter(|reference| reference.repo.owner.is_some())
}

fn repo_at_revision(text: &str) -> Result<RepoReference, &'static str> {
    let (repo, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
    check_revision(revision)?;
    Ok(RepoReference { endpoint: None, repo: RepoId::parse(repo)?, revision: revision.to_owned() })
}

/// A revision becomes part of paths and of URLs.
fn check_revision(revision: &str) -> Result<(), &'static str> {
    let is_allowed = |c: char| c.is_ascii_graphic() && !"\\:?*[~^".contains(c);
    if revision.is_empty() || !revision.chars().all(is_allowed) || revision.len() > 255 {
        return Err("the revision is no branch, tag or commit");
    }
    if revision.split('/').any(|part| part.is_empty() || part.starts_with('.')) {
        return Err("the revision is no branch, tag or commit");
    }
    Ok(())
}

/// `https://host/owner/name[/(tree|blob|resolve)/revision[/...]]` to a repository.
fn repo_of_page(uri: &Uri) -> Option<RepoReference> {
    let path = url::decode_path(uri.path());
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let (name, revision) = match parts.as_slice() {
        [name] => ((*name).to_owned(), DEFAULT_REVISION),
        [owner, name] => (format!("{owner}/{name}"), DEFAULT_REVISION),
        [owner, name, "tree" | "blob" | "resolve" | "raw", revision, ..] => {
            (format!("{owner}/{name}"), *revision)
        }
        _ => return None,
    };
    check_revision(revision).ok()?;
    let endpoint = format!("{}://{}", uri.scheme_str()?, uri.authority()?);
    Some(RepoReference {
        endpoint: Some(endpoint),
        repo: RepoId::parse(&name).ok()?,
        revision: revision.to_owned(),
    })
}

/// The folder of a URL: of a folder itself, or of a file in it.
fn folder_of(uri: &Uri) -> FolderUrl {
    let path = uri.path().trim_end_matches('/');
    let is_file = |name: &str| name.ends_with(".json") || name.ends_with(".safetensors");
    let path = match path.rsplit_once('/') {
        Some((folder, name)) if is_file(name) => folder,
        _ => path,
    };
    let authority = uri.authority().map_or("", |a| a.as_str());
    let scheme = uri.scheme_str().unwrap_or("https");
    // A browser's own hint is no part of the address.
    let query = uri.query().filter(|q| !q.is_empty() && *q != "download=true");
    FolderUrl {
        base: format!("{scheme}://{authority}{}", path.trim_end_matches('/')),
        query: query.map(str::to_owned),
    }
}

/// The text of a reference without what may be secret in it.
fn redacted(text: &str) -> String {
    let text = text.split('?').next().unwrap_or("");
    match (text.split_once("://"), text.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, rest))) if !rest.contains("://") => {
            format!("{scheme}://...@{rest}")
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shown(text: &str) -> String {
        match parse_remote(text) {
            Ok(Some(Reference::Repo(r))) => {
                format!("{r} at {}", r.endpoint.as_deref().unwrap_or("-"))
            }
            Ok(Some(Reference::Folder(f))) => format!("folder {f} {:?}", f.query),
            Ok(None) => "none".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn references_are_told_apart() {
        let cases = [
            ("hf:zai-org/GLM-5.2", "hf:zai-org/GLM-5.2@main at -"),
            ("hf://zai-org/GLM-5.2@refs/pr/3", "hf:zai-org/GLM-5.2@refs/pr/3 at -"),
            ("hf:gpt2", "hf:gpt2@main at -"),
            ("https://huggingface.co/a/b", "hf:a/b@main at https://huggingface.co"),
            ("https://huggingface.co/a/b/", "hf:a/b@main at https://huggingface.co"),
            ("https://hf.co/a/b/tree/v1", "hf:a/b@v1 at https://hf.co"),
            (
                "https://huggingface.co/a/b/blob/main/config.json?download=true",
                "hf:a/b@main at https://huggingface.co",
            ),
            ("https://x.org/m/", "folder https://x.org/m None"),
            ("http://127.0.0.1:80/config.json", "folder http://127.0.0.1:80 None"),
            ("https://x.org/m/config.json?sig=s", "folder https://x.org/m Some(\"sig=s\")"),
            ("https://x.org/a/b.safetensors", "folder https://x.org/a None"),
            ("owner/name", "none"),
            ("./folder", "none"),
        ];
        for (text, expected) in cases {
            assert_eq!(shown(text), expected, "{text}");
        }
        for (text, part) in [
            ("hf:", "empty"),
            ("hf:a/b/c", "one slash"),
            ("hf:a/../b", "one slash"),
            ("hf:../b", "begin with"),
            ("hf:a/b@", "no branch"),
            ("hf:a/b@../x", "no branch"),
            ("hf:a b/c", "letters"),
            ("ftp://x.org/m", "https://"),
            ("https://", "not a URL"),
            ("https://x.org:99999/m", "no port"),
            ("https://huggingface.co/docs/a/b", "no model's page"),
        ] {
            assert!(shown(text).contains(part), "{text}: {}", shown(text));
        }
    }

    #[test]
    fn secrets_of_a_url_are_not_shown() {
        let said = shown("https://me:secret@x.org/m?sig=hidden");
        assert!(said.contains("not sent") && !said.contains("secret") && !said.contains("hidden"));
        let folder = parse_remote("https://x.org/m?sig=hidden").unwrap().unwrap();
        assert!(!format!("{folder} {folder:?}").contains("hidden"));
    }

    #[test]
    fn commits_are_whole() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        assert!(is_commit(commit));
        assert!(!is_commit(&commit[1..]) && !is_commit("main"));
        assert!(!is_commit(&commit.to_uppercase()));
    }

    #[test]
    fn local_names_have_an_owner() {
        assert_eq!(parse_local("a/b@v1").unwrap().to_string(), "hf:a/b@v1");
        for text in ["b", "./b", "/b", "a/b/c", "a/b@.."] {
            assert_eq!(parse_local(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "\\PC{0,60}") {
            let _ = parse_local(&text);
            for prefix in ["", "hf:", "https://", "https://huggingface.co/", "http://h/"] {
                let _ = parse_remote(&format!("{prefix}{text}"));
            }
        }
    }
}
