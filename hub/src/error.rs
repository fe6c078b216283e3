//! Everything that can go wrong between a reference to a model and its headers, each with its remedy.

use std::path::PathBuf;

/// Why a model that is not on this disk could not be looked at.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The text names no model.
    #[error(
        "{text:?} names no model: {reason}; write hf:OWNER/NAME, hf:OWNER/NAME@REVISION or an https URL"
    )]
    BadReference {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A setting that the hub's client knows has a value that cannot be used.
    #[error("the setting {name} cannot be used: {reason}")]
    Setting {
        /// Its name, as an environment variable.
        name: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The licence of the model has not been accepted, or not with this token.
    #[error("{repo} is gated: accept its licence at {page}, then {}",
        if *has_token { "check that the token is of that account and may read gated repositories" }
        else { "set HF_TOKEN to a token of that account (or log in with `hf auth login`)" })]
    Gated {
        /// The repository.
        repo: String,
        /// Where its licence is.
        page: String,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// There is no such repository, or it is private.
    #[error("{repo} was not found at {endpoint}: check the spelling; {}",
        if *has_token { "if it is private, the token's account has no access to it" }
        else { "if it is private, set HF_TOKEN to a token that may read it" })]
    RepoNotFound {
        /// The repository.
        repo: String,
        /// Where it was looked for.
        endpoint: String,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// The repository has no such branch, tag or commit.
    #[error("{repo} has no revision {revision:?}: see the branches and tags at {page}")]
    RevisionNotFound {
        /// The repository.
        repo: String,
        /// What was asked for.
        revision: String,
        /// The repository's page.
        page: String,
    },
    /// The hub does not know the token.
    #[error(
        "{host} does not accept the token ({said}): renew HF_TOKEN, or unset it for public models"
    )]
    BadToken {
        /// Who said so.
        host: String,
        /// In its words.
        said: String,
    },
    /// A file that must be there is not.
    #[error("{url} does not exist{}", if said.is_empty() { String::new() } else { format!(" ({said})") })]
    Missing {
        /// What was asked for.
        url: String,
        /// The server's words.
        said: String,
    },
    /// Any other refusal.
    #[error("{url} was refused with status {status}{}: see whether a browser or proxy may open it",
        if said.is_empty() { String::new() } else { format!(" ({said})") })]
    Refused {
        /// What was asked for.
        url: String,
        /// The status.
        status: u16,
        /// The server's words.
        said: String,
    },
    /// Too many requests, and the wait is longer than is waited here.
    #[error("{host} limits the rate of requests: {}{}",
        wait_s.map_or_else(|| "try again in some minutes".to_owned(), |s| format!("try again in {s} s")),
        if *token_helps { "; a token (HF_TOKEN) has higher limits" } else { "" })]
    RateLimited {
        /// Who limits it.
        host: String,
        /// For how long, where it was said.
        wait_s: Option<u64>,
        /// Whether it is a hub that no token was sent to.
        token_helps: bool,
    },
    /// No connection.
    #[error(
        "cannot reach {host} ({reason}): check the network, HTTPS_PROXY and HF_ENDPOINT; {cached}"
    )]
    Unreachable {
        /// Whom.
        host: String,
        /// The system's words.
        reason: String,
        /// What the cache has instead.
        cached: String,
    },
    /// The user asked for no network, and the cache does not have it.
    #[error(
        "HF_HUB_OFFLINE is set and {what} is not in the cache: unset it to look at the hub; {cached}"
    )]
    OfflineMode {
        /// What is missing.
        what: String,
        /// What the cache has instead.
        cached: String,
    },
    /// The repository holds no safetensors that could be catalogued.
    #[error("{model} has no model*.safetensors: {found}; look for a repository of safetensors")]
    NoSafetensors {
        /// The model.
        model: String,
        /// What it has instead.
        found: String,
    },
    /// There is no config.json.
    #[error(
        "{model} has no config.json: a model is a repository or folder with config.json and *.safetensors"
    )]
    NoConfig {
        /// The model.
        model: String,
    },
    /// The server sends whole files where a part was asked for.
    #[error("{url}: the server does not send parts of files (status {status} to a ranged request{}): \
             use a server that does, or download the model",
        bytes.map_or_else(String::new, |b| format!(", {b} bytes")))]
    NoRanges {
        /// What was asked for.
        url: String,
        /// The status.
        status: u16,
        /// What it would have sent.
        bytes: Option<u64>,
    },
    /// Nothing, or hardly anything, came for longer than is waited.
    #[error(
        "{url}: {what}{}: try again later (what came is kept), or raise HF_HUB_DOWNLOAD_TIMEOUT",
        in_a_row(*tries)
    )]
    Stalled {
        /// What was asked for.
        url: String,
        /// What came, and how long was waited each time.
        what: String,
        /// How often.
        tries: u32,
    },
    /// The connection broke again and again.
    #[error("{url}: {reason}{}: try again later (what came is kept)", in_a_row(*tries))]
    Broken {
        /// What was asked for.
        url: String,
        /// The last reason.
        reason: String,
        /// How often.
        tries: u32,
    },
    /// The server contradicts itself, or the listing.
    #[error(
        "{url}: {what} is {found}, expected {expected}: the server or a proxy on the way is not to be \
             trusted, or the file was replaced meanwhile; try again, or another endpoint"
    )]
    Contradiction {
        /// What was asked for.
        url: String,
        /// Of what.
        what: &'static str,
        /// What was expected.
        expected: String,
        /// What came.
        found: String,
    },
    /// More than is believed of such a file.
    #[error(
        "{url} has {bytes} bytes, more than the cap of {cap_bytes} for such a file: it is not what it should be"
    )]
    TooLarge {
        /// What was asked for.
        url: String,
        /// Its size, or the least that it is.
        bytes: u64,
        /// The cap.
        cap_bytes: u64,
    },
    /// Headers that are each short enough, and too long together.
    #[error(
        "the headers of this model have {bytes} bytes with that of {url}, more than the cap of {cap_bytes}: \
             it is not what it should be"
    )]
    HeadersTooLarge {
        /// The file whose header was one too many.
        url: String,
        /// The sum so far.
        bytes: u64,
        /// The cap.
        cap_bytes: u64,
    },
    /// An answer that is not in the form that it should have.
    #[error(
        "{url} answered with something else than {expected} ({reason}): check the address and HF_ENDPOINT"
    )]
    BadAnswer {
        /// What was asked for.
        url: String,
        /// What was expected.
        expected: &'static str,
        /// Why it is not that.
        reason: String,
    },
    /// A redirection that is not followed.
    #[error("{url} redirects to {to}, which is not followed: {reason}")]
    Redirect {
        /// From where.
        url: String,
        /// To where.
        to: String,
        /// Why not.
        reason: &'static str,
    },
    /// TLS failed.
    #[error(
        "no trusted connection to {host} ({reason}): behind a proxy that inspects TLS, set SSL_CERT_FILE to a PEM \
             file with its authority"
    )]
    Tls {
        /// With whom.
        host: String,
        /// The library's words.
        reason: String,
    },
    /// A local file of the settings cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The user interrupted it.
    #[error("interrupted; what came is kept")]
    Interrupted,
}

/// How often it was tried, where that was more than once.
fn in_a_row(tries: u32) -> String {
    if tries > 1 { format!(", {tries} times in a row") } else { String::new() }
}
