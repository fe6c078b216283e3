//! The little of URLs that is needed: encoding of path segments, whose server a URL is of, and where
//! a redirection leads.

use ureq::http::Uri;

/// Percent-encodes one path segment; a slash is encoded too.
pub(crate) fn encode_segment(text: &str) -> String {
    encode(text, false)
}

/// Percent-encodes a relative path; slashes stay.
pub(crate) fn encode_path(text: &str) -> String {
    encode(text, true)
}

fn encode(text: &str, keep_slash: bool) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        let is_plain =
            byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || keep_slash && byte == b'/';
        if is_plain {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Undoes percent-encoding; what is not valid stays as it is.
pub(crate) fn decode_path(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let hex = text.get(at + 1..at + 3).filter(|_| byte == b'%');
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(value) => {
                decoded.push(value);
                at += 3;
            }
            None => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8(decoded).unwrap_or_else(|_| text.to_owned())
}

/// Scheme, host and port: what may see a secret that was given for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) scheme: String,
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Server {
    /// The server of an absolute URL.
    pub(crate) fn of(uri: &Uri) -> Option<Self> {
        if !has_true_port(uri) {
            return None;
        }
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
        let host = uri.host()?.trim_matches(['[', ']']).to_ascii_lowercase();
        Some(Self { scheme, host, port })
    }
}

/// Whether the port of a URL, where it has one, is a number that ports have. The library drops any
/// other, and would ask at the usual port.
fn has_true_port(uri: &Uri) -> bool {
    let Some(authority) = uri.authority() else { return false };
    let host_and_port = authority.as_str().rsplit('@').next().unwrap_or_default();
    let port = match host_and_port.rsplit_once(']') {
        Some((_, after)) => after.strip_prefix(':'),
        None => host_and_port.split_once(':').map(|(_, port)| port),
    };
    port.is_none_or(|port| port.is_empty() || port.parse::<u16>().is_ok_and(|port| port > 0))
}

/// The scheme that a text begins with, where it is an absolute URL.
pub(crate) fn scheme_of(text: &str) -> Option<&str> {
    let (scheme, _) = text.split_once("://")?;
    let is_scheme = !scheme.is_empty()
        && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
    is_scheme.then_some(scheme)
}

/// Where a `Location` leads from a URL.
pub(crate) fn join(from: &Uri, location: &str) -> Option<Uri> {
    let scheme = from.scheme_str()?;
    let authority = from.authority()?.as_str();
    if location.is_empty() {
        return None;
    }
    let text = if scheme_of(location).is_some() {
        location.to_owned()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{scheme}://{rest}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{location}")
    };
    let uri: Uri = text.parse().ok()?;
    let has_server = uri.host().is_some_and(|host| !host.is_empty()) && has_true_port(&uri);
    has_server.then_some(uri)
}

/// A URL as it is shown: without its query, which may be a signature.
pub(crate) fn shown(url: &str) -> String {
    url.split('?').next().unwrap_or("").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_encoded_and_decoded() {
        assert_eq!(encode_segment("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(encode_path("a b/ü.json"), "a%20b/%C3%BC.json");
        assert_eq!(decode_path("refs%2Fpr%2F1"), "refs/pr/1");
        for odd in ["%", "%2", "%zz", "%FF", "ü%"] {
            assert_eq!(decode_path(odd), odd);
        }
    }

    #[test]
    fn redirections_lead_where_they_say() {
        let from: Uri = "https://h.org/a/b/c?x=1".parse().unwrap();
        for (location, to) in [
            ("https://cdn.org/f?s=1", "https://cdn.org/f?s=1"),
            ("//cdn.org/f", "https://cdn.org/f"),
            ("/f?y=2", "https://h.org/f?y=2"),
            ("d", "https://h.org/a/b/d"),
            ("/login?next=https://cdn.org/f", "https://h.org/login?next=https://cdn.org/f"),
        ] {
            assert_eq!(join(&from, location).unwrap().to_string(), to);
        }
        assert!(join(&from, "http://").is_none());
    }

    #[test]
    fn servers_differ_by_scheme_host_and_port() {
        let of = |text: &str| Server::of(&text.parse().unwrap()).unwrap();
        assert_eq!(of("https://H.org/a"), of("https://h.org:443/b"));
        assert_ne!(of("https://h.org"), of("http://h.org"));
        assert_ne!(of("http://h.org:81"), of("http://h.org"));
        assert_ne!(of("https://h.org"), of("https://h.org.evil.net"));
        for port in ["99999", "x", "0", "-1"] {
            for host in ["h.org", "[::1]"] {
                let uri = format!("http://{host}:{port}/a").parse::<Uri>();
                assert!(uri.ok().as_ref().and_then(Server::of).is_none(), "{host} {port}");
            }
        }
        assert_eq!(of("http://[::1]:81/a").port, 81);
        assert_eq!(of("http://[::1]/a").port, 80);
    }
}
