//! Which proxy a request goes through: HTTPS_PROXY, HTTP_PROXY and ALL_PROXY, in either case, less what
//! NO_PROXY names, by the rules of the libraries that the hub's own client uses.

use std::net::IpAddr;

use crate::url::Server;

/// Proxies by scheme, and the hosts that are asked directly.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Proxies {
    /// For https.
    pub https: Option<String>,
    /// For http.
    pub http: Option<String>,
    /// Hosts, domains or networks that no proxy is used for.
    pub direct: Vec<String>,
}

/// A proxy's URL may hold a password.
impl std::fmt::Debug for Proxies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = |proxy: &Option<String>| proxy.as_deref().map(without_password);
        f.debug_struct("Proxies")
            .field("https", &shown(&self.https))
            .field("http", &shown(&self.http))
            .field("direct", &self.direct)
            .finish()
    }
}

/// A proxy's URL as it may be shown.
pub(crate) fn without_password(proxy: &str) -> String {
    match (proxy.split_once("://"), proxy.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://...@{host}"),
        (None, Some((_, host))) => format!("...@{host}"),
        (_, None) => proxy.to_owned(),
    }
}

impl Proxies {
    pub(crate) fn from_env(text: &impl Fn(&str) -> Option<String>) -> Self {
        // The lower case is the older custom, and curl's only one for http.
        let either = |name: &str| text(&name.to_lowercase()).or_else(|| text(name));
        let all = either("ALL_PROXY");
        Self {
            https: either("HTTPS_PROXY").or_else(|| all.clone()),
            http: either("HTTP_PROXY").or(all),
            direct: either("NO_PROXY")
                .unwrap_or_default()
                .split([',', ' '])
                .map(|entry| entry.trim().to_ascii_lowercase())
                .filter(|entry| !entry.is_empty())
                .collect(),
        }
    }

    /// The proxy for requests to a server; `None` where it is asked directly.
    pub(crate) fn of(&self, server: &Server) -> Option<&str> {
        if self.direct.iter().any(|entry| names(entry, server)) {
            return None;
        }
        if server.scheme == "https" { self.https.as_deref() } else { self.http.as_deref() }
    }
}

/// Whether an entry of NO_PROXY names a server: `*`, a host, a domain with its subdomains (a leading
/// dot or `*.` changes nothing), an address, a network such as 10.0.0.0/8; each also with a port.
fn names(entry: &str, server: &Server) -> bool {
    if entry == "*" {
        return true;
    }
    let address: Option<IpAddr> = server.host.parse().ok();
    if let (Some(address), Some((network, bits))) = (address, entry.split_once('/')) {
        return in_network(address, network, bits);
    }
    let (host, port) = match entry.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, Some(port)),
        _ => (entry, None),
    };
    if port.is_some_and(|port| port.parse() != Ok(server.port)) {
        return false;
    }
    let host = host.trim_matches(['[', ']']);
    let domain = host.trim_start_matches("*.").trim_start_matches('.');
    let is_below = || {
        let front = server.host.strip_suffix(domain);
        address.is_none() && front.is_some_and(|front| front.ends_with('.'))
    };
    !domain.is_empty() && (server.host == domain || is_below())
}

fn in_network(address: IpAddr, network: &str, bits: &str) -> bool {
    let (Ok(network), Ok(bits)) = (network.parse::<IpAddr>(), bits.parse::<u32>()) else {
        return false;
    };
    match (address, network) {
        (IpAddr::V4(a), IpAddr::V4(n)) if bits <= 32 => {
            let shift = 32 - bits;
            u32::from(a).checked_shr(shift).unwrap_or(0)
                == u32::from(n).checked_shr(shift).unwrap_or(0)
        }
        (IpAddr::V6(a), IpAddr::V6(n)) if bits <= 128 => {
            let shift = 128 - bits;
            u128::from(a).checked_shr(shift).unwrap_or(0)
                == u128::from(n).checked_shr(shift).unwrap_or(0)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(vars: &[(&str, &str)], url: &str) -> Option<String> {
        let text = |name: &str| {
            vars.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())
        };
        let server = Server::of(&url.parse().unwrap()).unwrap();
        Proxies::from_env(&text).of(&server).map(str::to_owned)
    }

    #[test]
    fn the_scheme_chooses_and_the_lower_case_wins() {
        let vars = [("HTTPS_PROXY", "http://s:1"), ("http_proxy", "http://p:2")];
        assert_eq!(of(&vars, "https://h.org"), Some("http://s:1".to_owned()));
        assert_eq!(of(&vars, "http://h.org"), Some("http://p:2".to_owned()));
        let both = [("HTTP_PROXY", "http://upper:1"), ("http_proxy", "http://lower:2")];
        assert_eq!(of(&both, "http://h.org"), Some("http://lower:2".to_owned()));
        let all = [("ALL_PROXY", "socks5://a:3"), ("HTTPS_PROXY", "http://s:1")];
        assert_eq!(of(&all, "https://h.org"), Some("http://s:1".to_owned()));
        assert_eq!(of(&all, "http://h.org"), Some("socks5://a:3".to_owned()));
        assert_eq!(of(&[], "http://h.org"), None);
    }

    #[test]
    fn no_proxy_names_hosts_domains_networks_and_ports() {
        let is_direct = |no: &str, url: &str| {
            of(&[("ALL_PROXY", "http://a:1"), ("NO_PROXY", no)], url).is_none()
        };
        for (no, url, expected) in [
            ("*", "https://h.org", true),
            ("h.org", "https://h.org", true),
            ("h.org", "https://a.h.org", true),
            (".h.org", "https://a.h.org", true),
            ("*.h.org", "https://a.h.org", true),
            ("h.org", "https://bad-h.org", false),
            ("other.org, H.org", "https://h.org", true),
            ("h.org:8080", "http://h.org:8080", true),
            ("h.org:8080", "http://h.org", false),
            ("localhost,127.0.0.1", "http://127.0.0.1:99", true),
            ("10.0.0.0/8", "http://10.1.2.3", true),
            ("10.0.0.0/8", "http://11.1.2.3", false),
            ("0.0.0.0/0", "http://11.1.2.3", true),
            ("10.0.0.0/99", "http://10.1.2.3", false),
            ("::1", "http://[::1]:80", true),
            ("fd00::/8", "http://[fd12::1]", true),
            ("0.1", "http://10.0.0.1", false),
            (",", "https://h.org", false),
        ] {
            assert_eq!(is_direct(no, url), expected, "{no} {url}");
        }
    }

    #[test]
    fn passwords_of_proxies_are_not_shown() {
        let proxies =
            Proxies { https: Some("http://me:secret@p:1".to_owned()), ..Proxies::default() };
        let shown = format!("{proxies:?}");
        assert!(!shown.contains("secret") && shown.contains("p:1"), "{shown}");
    }
}
