//! Settings of the hub's own client, as its documentation names them, so that what a user has set up
//! for it holds here too. A pure function of the environment: only `main` reads that.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::HubError;
use crate::proxy::Proxies;

/// Where repositories are looked for unless HF_ENDPOINT says otherwise.
pub(crate) const PUBLIC_ENDPOINT: &str = "https://huggingface.co";

/// A secret; never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(pub(crate) String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(...)")
    }
}

/// How long is waited for what. Tests shorten these.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// For a connection, name resolution and TLS included.
    pub connect: Duration,
    /// For the next bytes of an answer.
    pub stall: Duration,
    /// How often a request is tried in all.
    pub tries: u32,
    /// Before the second try; doubled for each further one.
    pub backoff: Duration,
    /// The longest that a server's wish to wait is granted, for one request in all.
    pub longest_wait: Duration,
    /// Requests in flight at a time.
    pub n_parallel: usize,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            // The default of HF_HUB_DOWNLOAD_TIMEOUT.
            stall: Duration::from_secs(10),
            tries: 5,
            backoff: Duration::from_millis(500),
            longest_wait: Duration::from_secs(30),
            n_parallel: 8,
        }
    }
}

/// Everything that is set from outside.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where repositories are, without a slash at the end.
    pub endpoint: String,
    /// A token given in the environment.
    pub token: Option<Token>,
    /// The file that the hub's client keeps its token in.
    pub token_file: Option<PathBuf>,
    /// The hub client's cache of repositories.
    pub hub_cache: Option<PathBuf>,
    /// Our own cache of configs and headers.
    pub cache: Option<PathBuf>,
    /// Proxies, and for whom they are not used.
    pub proxies: Proxies,
    /// Certificates to trust, as PEM, instead of the built-in ones.
    pub certificates: Option<PathBuf>,
    /// The network is not to be used.
    pub is_offline: bool,
    /// Waits.
    pub timing: Timing,
}

impl Settings {
    /// The settings of an environment. Empty variables count as unset.
    pub fn from_env(var: impl Fn(&str) -> Option<OsString>) -> Self {
        let os = |name: &str| var(name).filter(|value| !value.is_empty());
        let text = |name: &str| {
            let text = os(name)?.into_string().ok()?.trim().to_owned();
            (!text.is_empty()).then_some(text)
        };
        let home = os("HOME").or_else(|| os("USERPROFILE")).map(PathBuf::from);
        let path = |name: &str| os(name).map(|value| expanded(&value, home.as_deref()));
        let caches = path("XDG_CACHE_HOME").or_else(|| Some(home.as_ref()?.join(".cache")));
        let hf_home = path("HF_HOME").or_else(|| Some(caches.as_ref()?.join("huggingface")));
        let is_set = |name: &str| text(name).is_some_and(|value| is_true(&value));
        let given = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN"));
        let is_implicit_off = is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN");
        let defaults = Timing::default();
        let stall = text("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|s| s.parse::<u64>().ok());
        Self {
            endpoint: text("HF_ENDPOINT").map_or_else(
                || PUBLIC_ENDPOINT.to_owned(),
                |endpoint| endpoint.trim_end_matches('/').to_owned(),
            ),
            token: given.map(Token).filter(|_| !is_implicit_off),
            token_file: path("HF_TOKEN_PATH")
                .or_else(|| Some(hf_home.as_ref()?.join("token")))
                .filter(|_| !is_implicit_off),
            hub_cache: path("HF_HUB_CACHE")
                .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
                .or_else(|| Some(hf_home.as_ref()?.join("hub"))),
            cache: own_caches(&path, home.as_deref()).map(|folder| folder.join("tierkeep/hub")),
            proxies: Proxies::from_env(&text),
            certificates: ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"]
                .iter()
                .find_map(|name| path(name)),
            is_offline: is_set("HF_HUB_OFFLINE") || is_set("TRANSFORMERS_OFFLINE"),
            timing: Timing {
                stall: stall.filter(|s| *s > 0).map_or(defaults.stall, Duration::from_secs),
                ..defaults
            },
        }
    }

    /// The token, from the environment or the client's file; `None` where there is none.
    ///
    /// # Errors
    /// [`HubError::Setting`] for one that cannot be sent. A file that cannot be read is no token.
    pub fn token(&self) -> Result<Option<Token>, HubError> {
        let from_file = || {
            let text = std::fs::read_to_string(self.token_file.as_ref()?).ok()?;
            let text = text.trim().to_owned();
            (!text.is_empty()).then_some(Token(text))
        };
        let token = self.token.clone().or_else(from_file);
        match &token {
            Some(token) if !token.0.bytes().all(|b| b.is_ascii_graphic()) => {
                Err(HubError::Setting {
                    name: "HF_TOKEN",
                    reason: "it has characters that no token has".to_owned(),
                })
            }
            _ => Ok(token),
        }
    }
}

/// Where this user's caches are, by the custom of the system.
fn own_caches(path: &impl Fn(&str) -> Option<PathBuf>, home: Option<&Path>) -> Option<PathBuf> {
    if cfg!(windows) {
        return path("LOCALAPPDATA");
    }
    path("XDG_CACHE_HOME").or_else(|| {
        let in_home = if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" };
        Some(home?.join(in_home))
    })
}

/// A leading `~/` is the home folder, as the hub's client expands it.
fn expanded(value: &OsString, home: Option<&Path>) -> PathBuf {
    let in_home = value.to_str().and_then(|text| text.strip_prefix("~/"));
    match (in_home, home) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(value),
    }
}

/// What the hub's client takes for yes.
fn is_true(value: &str) -> bool {
    ["1", "ON", "YES", "TRUE"].contains(&value.to_ascii_uppercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(vars: &[(&str, &str)]) -> Settings {
        Settings::from_env(|name| {
            vars.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn defaults_are_those_of_the_hubs_client() {
        let settings = of(&[("HOME", "/h"), ("USERPROFILE", "/h")]);
        assert_eq!(settings.endpoint, "https://huggingface.co");
        assert_eq!(settings.token, None);
        assert_eq!(settings.token_file, Some("/h/.cache/huggingface/token".into()));
        assert_eq!(settings.hub_cache, Some("/h/.cache/huggingface/hub".into()));
        assert!(!settings.is_offline);
        assert_eq!(settings.timing, Timing::default());
        assert_eq!(of(&[]).hub_cache, None, "without a home there is no cache");
    }

    #[test]
    fn each_variable_is_heeded_and_the_nearer_wins() {
        let base = [("HOME", "/h"), ("XDG_CACHE_HOME", "/c")];
        let with = |more: &[(&str, &str)]| of(&[&base[..], more].concat());
        assert_eq!(with(&[]).hub_cache, Some("/c/huggingface/hub".into()));
        let hf = with(&[("HF_HOME", "~/x")]);
        assert_eq!(hf.hub_cache, Some("/h/x/hub".into()));
        assert_eq!(hf.token_file, Some("/h/x/token".into()));
        assert_eq!(
            with(&[("HF_HOME", "/x"), ("HUGGINGFACE_HUB_CACHE", "/y")]).hub_cache,
            Some("/y".into())
        );
        let nearest = with(&[("HUGGINGFACE_HUB_CACHE", "/y"), ("HF_HUB_CACHE", "/z")]);
        assert_eq!(nearest.hub_cache, Some("/z".into()));
        assert_eq!(with(&[("HF_TOKEN_PATH", "/t")]).token_file, Some("/t".into()));
        assert_eq!(with(&[("HF_ENDPOINT", "http://m.org/")]).endpoint, "http://m.org");
        assert_eq!(with(&[("HF_ENDPOINT", "")]).endpoint, PUBLIC_ENDPOINT);
        for yes in ["1", "on", "Yes", "TRUE"] {
            assert!(with(&[("HF_HUB_OFFLINE", yes)]).is_offline, "{yes}");
        }
        assert!(!with(&[("HF_HUB_OFFLINE", "0")]).is_offline);
        assert!(with(&[("TRANSFORMERS_OFFLINE", "1")]).is_offline);
        let slow = with(&[("HF_HUB_DOWNLOAD_TIMEOUT", "77")]);
        assert_eq!(slow.timing.stall, Duration::from_secs(77));
        assert_eq!(
            with(&[("CURL_CA_BUNDLE", "/a"), ("SSL_CERT_FILE", "/b")]).certificates,
            Some("/b".into())
        );
    }

    #[test]
    fn tokens_come_from_the_environment_or_the_file_and_are_never_shown() {
        let settings = of(&[("HUGGING_FACE_HUB_TOKEN", "old"), ("HF_TOKEN", " new\n")]);
        assert_eq!(settings.token().unwrap(), Some(Token("new".to_owned())));
        assert!(!format!("{settings:?}").contains("new"));
        let old = of(&[("HUGGING_FACE_HUB_TOKEN", "old")]);
        assert_eq!(old.token().unwrap(), Some(Token("old".to_owned())));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let vars = [("HF_TOKEN_PATH", file.to_str().unwrap())];
        assert_eq!(of(&vars).token().unwrap(), None);
        std::fs::write(&file, "from-file\n").unwrap();
        assert_eq!(of(&vars).token().unwrap(), Some(Token("from-file".to_owned())));
        let off = [vars[0], ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")];
        assert_eq!(of(&off).token().unwrap(), None);
        let odd = of(&[("HF_TOKEN", "a b")]).token().unwrap_err().to_string();
        assert!(odd.contains("HF_TOKEN") && !odd.contains("a b"), "{odd}");
    }
}
