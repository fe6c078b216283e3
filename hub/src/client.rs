//! Requests: which proxy and which secret go with them, where redirections lead, how long is waited and
//! how often tried. What an answer must look like is `range`'s; what it means, `repo`'s and `folder`'s.
//!
//! A token goes to the server that it was given for and to no other, redirections included.

use std::collections::HashMap;
use std::io::{ErrorKind, Read as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ureq::http::{HeaderMap, Uri};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy};

use crate::error::HubError;
use crate::proxy::{Proxies, without_password};
use crate::range::ContentRange;
use crate::settings::{Settings, Timing, Token};
use crate::tries::{Failure, Passing};
use crate::url::{self, Server};

/// Redirections that are followed.
const MOST_REDIRECTS: usize = 8;
/// Longest part that is asked for in one request, bytes: the cap of the safetensors header.
pub(crate) const PART_CAP_BYTES: u64 = 100_000_008;
/// A server that drips never stalls: after so many stalls' time it must have sent this much a second.
pub(crate) const SLOW_STALLS: u32 = 3;
const LEAST_BYTES_PER_S: f64 = 1000.0;
/// Longest body of a redirection that is read, bytes.
const SHORT_BODY_BYTES: u64 = 16 * 1024;
/// Whose files are asked for: what a refusal is blamed on.
#[derive(Clone, Debug)]
pub(crate) enum Context {
    Repo { repo: String, revision: String, endpoint: String },
    Folder,
}

/// One thing that is asked for.
pub(crate) struct Ask<'a> {
    pub(crate) url: &'a str,
    pub(crate) context: &'a Context,
    /// Whether the answer is a file; else it is one of the hub's own.
    pub(crate) is_file: bool,
    /// Only if it is no longer this version.
    pub(crate) unless: Option<&'a str>,
}

/// A part of a file.
pub(crate) struct Part {
    pub(crate) bytes: Vec<u8>,
    /// Size of the whole file.
    pub(crate) total: Option<u64>,
    pub(crate) validator: Option<String>,
    /// Where it came from in the end.
    pub(crate) url: String,
}

/// A whole small file.
pub(crate) enum Whole {
    Changed { bytes: Vec<u8>, validator: Option<String> },
    Unchanged,
}

struct Reply {
    status: u16,
    /// Where the redirections ended.
    url: Uri,
    headers: HeaderMap,
    /// Sizes that the hub names on the way to its storage.
    linked_bytes: Option<u64>,
    body: Body,
}

/// Sends requests by the settings; shared by the threads that fetch.
pub(crate) struct Client {
    direct: Agent,
    by_proxy: HashMap<String, Agent>,
    proxies: Proxies,
    pub(crate) timing: Timing,
    pub(crate) token: Option<(Server, Token)>,
    stop: Arc<AtomicBool>,
    n_requests: AtomicU64,
    bytes: AtomicU64,
}

impl Client {
    pub(crate) fn new(settings: &Settings, stop: Arc<AtomicBool>) -> Result<Self, HubError> {
        let tls = tls_config(settings)?;
        let agent = |proxy: Option<Proxy>| {
            let timing = &settings.timing;
            let config = Agent::config_builder()
                .proxy(proxy)
                .tls_config(tls.clone())
                .http_status_as_error(false)
                .max_redirects(0)
                .max_redirects_will_error(false)
                .timeout_resolve(Some(timing.connect))
                .timeout_connect(Some(timing.connect))
                .timeout_recv_response(Some(timing.stall.saturating_mul(SLOW_STALLS)))
                .timeout_per_read(Some(timing.stall))
                .timeout_per_write(Some(timing.stall))
                .max_idle_connections(4 * timing.n_parallel)
                .max_idle_connections_per_host(timing.n_parallel)
                .user_agent(concat!("tierkeep/", env!("CARGO_PKG_VERSION")))
                .accept_encoding("identity")
                .build();
            Agent::new_with_config(config)
        };
        let mut by_proxy = HashMap::new();
        for (name, url) in
            [("HTTPS_PROXY", &settings.proxies.https), ("HTTP_PROXY", &settings.proxies.http)]
        {
            let Some(url) = url else { continue };
            let proxy = Proxy::new(url).map_err(|e| HubError::Setting {
                name,
                reason: format!("{}: {e}", without_password(url)),
            })?;
            by_proxy.insert(url.clone(), agent(Some(proxy)));
        }
        let server = endpoint_server(&settings.endpoint)?;
        Ok(Self {
            direct: agent(None),
            by_proxy,
            proxies: settings.proxies.clone(),
            timing: settings.timing.clone(),
            token: settings.token()?.map(|token| (server, token)),
            stop,
            n_requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })
    }

    /// Bytes of bodies received so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Requests sent so far.
    pub(crate) fn n_requests(&self) -> u64 {
        self.n_requests.load(Ordering::Relaxed)
    }

    pub(crate) fn n_parallel(&self) -> usize {
        self.timing.n_parallel.clamp(1, 64)
    }

    /// Bytes `start..end` of a file, fewer only where it ends before. `total` is its size as far as
    /// it is known; an answer that says otherwise is not believed.
    pub(crate) fn part(
        &self,
        ask: &Ask<'_>,
        start: u64,
        end: u64,
        total: Option<u64>,
    ) -> Result<Part, HubError> {
        self.with_tries(ask, || {
            let mut reply = self.send(ask, Some((start, end)))?;
            match reply.status {
                206 | 416 => self.read_part(ask, &mut reply, (start, end), total),
                200 => Err(Failure::Fatal(HubError::NoRanges {
                    url: url::shown(ask.url),
                    status: 200,
                    bytes: reply.length(),
                })),
                _ => Err(self.refusal(ask, &reply)),
            }
        })
    }

    fn read_part(
        &self,
        ask: &Ask<'_>,
        reply: &mut Reply,
        (start, end): (u64, u64),
        total: Option<u64>,
    ) -> Result<Part, Failure> {
        let lie = |what, expected: String, found: String| {
            let url = url::shown(ask.url);
            Failure::Fatal(HubError::Contradiction { url, what, expected, found })
        };
        let text = reply.header("content-range").unwrap_or_default();
        let Some(range) = ContentRange::parse(&text) else {
            let expected = format!("bytes {start}-{}/SIZE", end.saturating_sub(1));
            return Err(lie("its Content-Range", expected, format!("{text:?}")));
        };
        let known = [total, reply.linked_bytes, range.total];
        let mut totals = known.iter().flatten();
        if let Some(first) = totals.next()
            && let Some(other) = totals.find(|t| *t != first)
        {
            return Err(lie("its size", first.to_string(), other.to_string()));
        }
        let total = known.into_iter().flatten().next();
        let validator = reply.validator();
        let url = reply.url.to_string();
        if reply.status == 416 {
            // Nothing at or after `start`: true only of a file that ends there.
            return if range.total.is_some_and(|total| total <= start) {
                Ok(Part { bytes: Vec::new(), total, validator, url })
            } else {
                Err(lie(
                    "its answer",
                    "the bytes asked for".to_owned(),
                    "a refusal (416)".to_owned(),
                ))
            };
        }
        let Some((first, last)) = range.span.filter(|_| range.answers(start, end)) else {
            let expected = format!("bytes {start}-{}", end.saturating_sub(1));
            return Err(lie("the range sent", expected, text));
        };
        let length = last - first + 1;
        if let Some(declared) = reply.length()
            && declared != length
        {
            return Err(lie("its Content-Length", length.to_string(), declared.to_string()));
        }
        let bytes = self.read(&mut reply.body, length)?;
        match u64::try_from(bytes.len()) {
            Ok(got) if got == length => Ok(Part { bytes, total, validator, url }),
            Ok(got) if got > length => {
                Err(lie("the body", format!("{length} bytes"), "longer".to_owned()))
            }
            _ => Err(Failure::Passing(Passing::Broken(format!(
                "{} of {length} bytes came",
                bytes.len()
            )))),
        }
    }

    /// A whole file of at most `cap` bytes.
    pub(crate) fn whole(&self, ask: &Ask<'_>, cap_bytes: u64) -> Result<Whole, HubError> {
        self.with_tries(ask, || {
            let mut reply = self.send(ask, None)?;
            match reply.status {
                200 => {}
                304 if ask.unless.is_some() => return Ok(Whole::Unchanged),
                _ => return Err(self.refusal(ask, &reply)),
            }
            let length = reply.length();
            let too_large = |bytes| {
                let url = url::shown(ask.url);
                Failure::Fatal(HubError::TooLarge { url, bytes, cap_bytes })
            };
            if let Some(length) = length
                && length > cap_bytes
            {
                return Err(too_large(length));
            }
            let bytes = self.read(&mut reply.body, length.unwrap_or(cap_bytes))?;
            let got = bytes.len() as u64;
            if got > cap_bytes {
                return Err(too_large(got));
            }
            if let Some(length) = length
                && got != length
            {
                let said = format!("{got} of {length} bytes came");
                return Err(Failure::Passing(Passing::Broken(said)));
            }
            Ok(Whole::Changed { bytes, validator: reply.validator() })
        })
    }

    /// The size of a file, by asking for its first byte; `None` where the server does not say.
    pub(crate) fn size(&self, ask: &Ask<'_>) -> Result<Option<u64>, HubError> {
        self.with_tries(ask, || {
            let mut reply = self.send(ask, Some((0, 1)))?;
            match reply.status {
                200 => Ok(reply.linked_bytes.or_else(|| reply.length())),
                206 | 416 => {
                    let text = reply.header("content-range").unwrap_or_default();
                    // Read, so that the connection can be used again.
                    self.read(&mut reply.body, 1)?;
                    Ok(ContentRange::parse(&text).and_then(|range| range.total))
                }
                _ => Err(self.refusal(ask, &reply)),
            }
        })
    }

    /// Reads at most one byte more than `expected`.
    fn read(&self, body: &mut Body, expected: u64) -> Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        let mut reader = body.as_reader().take(expected.min(PART_CAP_BYTES).saturating_add(1));
        let mut chunk = [0; 16 * 1024];
        let start = Instant::now();
        loop {
            self.check_stop()?;
            let elapsed = start.elapsed();
            if elapsed > self.timing.stall.saturating_mul(SLOW_STALLS)
                && (bytes.len() as f64) < elapsed.as_secs_f64() * LEAST_BYTES_PER_S
            {
                return Err(Failure::Passing(Passing::Slow));
            }
            match reader.read(&mut chunk) {
                Ok(0) => return Ok(bytes),
                Ok(n) => {
                    bytes.extend_from_slice(chunk.get(..n).unwrap_or_default());
                    self.bytes.fetch_add(n as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(match ureq::Error::from(error) {
                        ureq::Error::Timeout(_) => Failure::Passing(Passing::Stalled),
                        other => Failure::Passing(Passing::Broken(plain(&other.to_string()))),
                    });
                }
            }
        }
    }

    /// Sends one request and follows where it is sent.
    fn send(&self, ask: &Ask<'_>, range: Option<(u64, u64)>) -> Result<Reply, Failure> {
        let not_followed = |to: &str, reason| HubError::Redirect {
            url: url::shown(ask.url),
            to: plain(&url::shown(to)),
            reason,
        };
        let mut at: Uri = ask.url.parse().map_err(|_| not_followed(ask.url, "it is not a URL"))?;
        let mut linked_bytes = None;
        let start = Instant::now();
        for _ in 0..=MOST_REDIRECTS {
            self.check_stop()?;
            if start.elapsed() > self.timing.stall.saturating_mul(SLOW_STALLS) {
                return Err(Failure::Passing(Passing::Slow));
            }
            let mut response = self.request(&at, ask, range)?;
            let status = response.status().as_u16();
            let headers = response.headers().clone();
            linked_bytes = linked_bytes.or_else(|| {
                text_of(&headers, "x-linked-size").and_then(|text| text.parse::<u64>().ok())
            });
            let encoding = text_of(&headers, "content-encoding");
            if let Some(found) = encoding.filter(|e| !e.eq_ignore_ascii_case("identity")) {
                return Err(Failure::Fatal(HubError::Contradiction {
                    url: url::shown(ask.url),
                    what: "its Content-Encoding",
                    expected: "identity".to_owned(),
                    found: plain(&found),
                }));
            }
            if !matches!(status, 301 | 302 | 303 | 307 | 308) {
                let body = response.into_body();
                return Ok(Reply { status, url: at, headers, linked_bytes, body });
            }
            let location = text_of(&headers, "location").unwrap_or_default();
            let to =
                redirected(&at, &location).map_err(|reason| not_followed(&location, reason))?;
            let length = text_of(&headers, "content-length").and_then(|l| l.parse::<u64>().ok());
            if let Some(length) = length.filter(|length| *length <= SHORT_BODY_BYTES) {
                // Read, so that the connection can be used again; without it there is another.
                match self.read(response.body_mut(), length) {
                    Err(Failure::Fatal(error)) => return Err(error.into()),
                    Ok(_) | Err(Failure::Passing(_)) => {}
                }
            }
            at = to;
        }
        Err(not_followed(&at.to_string(), "there are too many redirections").into())
    }

    fn request(
        &self,
        uri: &Uri,
        ask: &Ask<'_>,
        range: Option<(u64, u64)>,
    ) -> Result<ureq::http::Response<Body>, Failure> {
        let server = Server::of(uri);
        let proxy = server.as_ref().and_then(|server| self.proxies.of(server));
        let agent = proxy.and_then(|proxy| self.by_proxy.get(proxy)).unwrap_or(&self.direct);
        let mut request = agent.get(uri);
        if let Some((server_of_token, token)) = &self.token
            && server.as_ref() == Some(server_of_token)
        {
            request = request.header("authorization", format!("Bearer {}", token.0));
        }
        if let Some((start, end)) = range {
            request = request.header("range", format!("bytes={start}-{}", end.saturating_sub(1)));
        }
        match ask.unless.map(|validator| validator.split_once(' ')) {
            Some(Some(("etag", etag))) => request = request.header("if-none-match", etag),
            Some(Some(("date", date))) => request = request.header("if-modified-since", date),
            _ => {}
        }
        self.n_requests.fetch_add(1, Ordering::Relaxed);
        request.call().map_err(|error| self.failure(uri, proxy, error))
    }

    /// What a failed request is to be called.
    fn failure(&self, uri: &Uri, proxy: Option<&str>, error: ureq::Error) -> Failure {
        let host = uri.host().unwrap_or_default().to_owned();
        let reason = plain(&error.to_string());
        let by = proxy.map_or_else(String::new, |proxy| {
            format!(", by the proxy {}", without_password(proxy))
        });
        let unreachable =
            |reason: String| Failure::Passing(Passing::Unreachable(format!("{reason}{by}")));
        match error {
            ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                unreachable(format!("no connection within {:?}", self.timing.connect))
            }
            // The headers as a whole, of which a part may have come.
            ureq::Error::Timeout(ureq::Timeout::RecvResponse) => Failure::Passing(Passing::Slow),
            ureq::Error::Timeout(_) => Failure::Passing(Passing::Stalled),
            ureq::Error::HostNotFound => unreachable("its name is not known".to_owned()),
            ureq::Error::ConnectionFailed => unreachable(reason),
            ureq::Error::Io(error) if is_unknown_name(&error) => unreachable(format!(
                "a name on the way is not known: {}",
                plain(&error.to_string())
            )),
            ureq::Error::Io(error) => match error.kind() {
                ErrorKind::ConnectionRefused
                | ErrorKind::NetworkUnreachable
                | ErrorKind::HostUnreachable
                | ErrorKind::NotFound
                | ErrorKind::AddrNotAvailable => unreachable(plain(&error.to_string())),
                ErrorKind::TimedOut | ErrorKind::WouldBlock => Failure::Passing(Passing::Stalled),
                ErrorKind::InvalidData if reason.contains("certificate") => {
                    Failure::Fatal(HubError::Tls { host, reason })
                }
                _ => Failure::Passing(Passing::Broken(plain(&error.to_string()))),
            },
            ureq::Error::Tls(_) | ureq::Error::Rustls(_) | ureq::Error::Pem(_) => {
                Failure::Fatal(HubError::Tls { host, reason })
            }
            ureq::Error::ConnectProxyFailed(_) | ureq::Error::InvalidProxyUrl => {
                unreachable(format!("the proxy says: {reason}"))
            }
            _ => Failure::Passing(Passing::Broken(reason)),
        }
    }

    /// What a status that is no success means, by the words that the hub adds to it.
    fn refusal(&self, ask: &Ask<'_>, reply: &Reply) -> Failure {
        let status = reply.status;
        let said = reply.header("x-error-message").map_or_else(String::new, |text| {
            // A server that repeats the token is not repeated.
            let token = self.token.as_ref().map(|(_, token)| token.0.as_str());
            plain(&token.map_or_else(|| text.clone(), |token| text.replace(token, "...")))
        });
        let code = reply.header("x-error-code").unwrap_or_default();
        if status == 429 || status == 408 || status >= 500 {
            return Failure::Passing(Passing::Busy { status, wait: reply.asked_to_wait() });
        }
        let url = url::shown(ask.url);
        let has_token = self.token.is_some();
        let refused = |said| HubError::Refused { url: url.clone(), status, said };
        let Context::Repo { repo, revision, endpoint } = ask.context else {
            return Failure::Fatal(match status {
                404 | 410 => HubError::Missing { url, said },
                _ => refused(said),
            });
        };
        let page = format!("{endpoint}/{repo}");
        let not_found =
            || HubError::RepoNotFound { repo: repo.clone(), endpoint: endpoint.clone(), has_token };
        Failure::Fatal(match (status, code.as_str()) {
            (_, "GatedRepo") => HubError::Gated { repo: repo.clone(), page, has_token },
            (_, "RepoNotFound") => not_found(),
            (_, "RevisionNotFound") => {
                HubError::RevisionNotFound { repo: repo.clone(), revision: revision.clone(), page }
            }
            (_, "EntryNotFound") => HubError::Missing { url, said },
            (401, _) if said.contains("Invalid credentials") || has_token => HubError::BadToken {
                host: reply.url.host().unwrap_or_default().to_owned(),
                said: if said.is_empty() { "status 401".to_owned() } else { said },
            },
            // The repository is there, as its listing was.
            (401, _) if ask.is_file => refused("it asks for a token: set HF_TOKEN".to_owned()),
            // The hub does not tell strangers whether a private repository exists.
            (401, _) => not_found(),
            (404 | 410, _) if ask.is_file => HubError::Missing { url, said },
            (404 | 410, _) => not_found(),
            _ => refused(said),
        })
    }

    pub(crate) fn check_stop(&self) -> Result<(), HubError> {
        if self.stop.load(Ordering::SeqCst) { Err(HubError::Interrupted) } else { Ok(()) }
    }
}

impl Reply {
    fn header(&self, name: &str) -> Option<String> {
        text_of(&self.headers, name)
    }

    fn length(&self) -> Option<u64> {
        self.header("content-length")?.trim().parse().ok()
    }

    /// What the server calls this version of the file: its entity tag, or its date.
    fn validator(&self) -> Option<String> {
        let etag = self.header("etag").map(|etag| format!("etag {etag}"));
        etag.or_else(|| self.header("last-modified").map(|date| format!("date {date}")))
    }

    /// How long the server asks to wait: Retry-After in seconds, or the reset of its rate limit.
    fn asked_to_wait(&self) -> Option<Duration> {
        let seconds = |text: &str| text.trim().parse::<u64>().ok();
        let reset = || {
            let text = self.header("ratelimit")?;
            text.split(';').find_map(|part| seconds(part.trim().strip_prefix("t=")?))
        };
        let asked = self.header("retry-after").and_then(|text| seconds(&text));
        asked.or_else(reset).map(Duration::from_secs)
    }
}

fn text_of(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// The server of HF_ENDPOINT, which is part of what is shown and of the cache's names: so it must hold
/// no secret.
fn endpoint_server(endpoint: &str) -> Result<Server, HubError> {
    let bad = |reason| HubError::Setting { name: "HF_ENDPOINT", reason };
    let uri: Option<Uri> = endpoint.parse().ok();
    if uri.as_ref().and_then(Uri::authority).is_some_and(|a| a.as_str().contains('@')) {
        return Err(bad("a name and password in a URL are not sent".to_owned()));
    }
    if endpoint.contains(['?', '#']) {
        return Err(bad("it ends where its query would begin: leave out '?' and '#'".to_owned()));
    }
    let server = uri.as_ref().and_then(Server::of);
    server
        .filter(|server| ["http", "https"].contains(&server.scheme.as_str()))
        .ok_or_else(|| bad(format!("{endpoint:?} is not a URL such as https://huggingface.co")))
}

/// Where a redirection leads.
///
/// # Errors
/// Why it is not followed.
fn redirected(at: &Uri, location: &str) -> Result<Uri, &'static str> {
    if location.is_empty() {
        return Err("it does not say where to");
    }
    let is_spoken =
        |scheme: &str| ["http", "https"].contains(&scheme.to_ascii_lowercase().as_str());
    if url::scheme_of(location).is_some_and(|scheme| !is_spoken(scheme)) {
        return Err("only https and http are spoken");
    }
    let to = url::join(at, location).ok_or("it is not a URL")?;
    if at.scheme_str() == Some("https") && to.scheme_str() != Some("https") {
        return Err("it would leave TLS");
    }
    Ok(to)
}

/// Whether the name of a host could not be resolved, of which the standard library makes no kind of
/// its own: the resolver's words, or the codes of Windows (WSAHOST_NOT_FOUND and its neighbours).
fn is_unknown_name(error: &std::io::Error) -> bool {
    let is_code = cfg!(windows) && matches!(error.raw_os_error(), Some(11_001..=11_004));
    is_code || error.to_string().contains("failed to lookup address information")
}

/// A server's words as they may be shown: one short line without control characters.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}

fn tls_config(settings: &Settings) -> Result<TlsConfig, HubError> {
    let builder = TlsConfig::builder();
    let Some(path) = &settings.certificates else { return Ok(builder.build()) };
    // The same variable may name a folder of certificates, which is for other libraries.
    if path.is_dir() {
        return Ok(builder.build());
    }
    let name = "SSL_CERT_FILE, REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE";
    let pem = std::fs::read(path).map_err(|error| HubError::Setting {
        name,
        reason: format!("{}: {error}", path.display()),
    })?;
    let certificates: Vec<Certificate<'static>> = parse_pem(&pem)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        return Err(HubError::Setting {
            name,
            reason: format!("{} holds no PEM certificates", path.display()),
        });
    }
    Ok(builder.root_certs(RootCerts::new_with_certs(&certificates)).build())
}
