//! Servers and settings that mean harm or are broken: no hang, no secret told, nothing believed that
//! cannot be, and an interrupt that waits for nobody.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use support::{COMMIT, Request, Response, Server, part};
use tierkeep_hub::{HubError, Settings, Snapshot, Timing, Wanted, fetch, parse_remote};

/// A whole safetensors file without tensors.
const SHARD: &[u8] = b"\x02\0\0\0\0\0\0\0{}";

fn settings(endpoint: &str, more: &[(&str, &str)]) -> Settings {
    let settings = Settings::from_env(|name| {
        let all = [("HF_ENDPOINT", endpoint)];
        let found = all.iter().chain(more).find(|(n, _)| *n == name);
        found.map(|(_, value)| (*value).into())
    });
    let timing = Timing {
        connect: Duration::from_secs(5),
        stall: Duration::from_secs(5),
        tries: 5,
        backoff: Duration::from_millis(2),
        longest_wait: Duration::from_millis(1500),
        n_parallel: 4,
    };
    Settings { timing, ..settings }
}

/// Settings under which a server has to hurry.
fn hasty(server: &Server) -> Settings {
    let mut settings = settings(&server.url(""), &[]);
    settings.timing.stall = Duration::from_millis(150);
    settings
}

fn look_until(settings: &Settings, stop: &Arc<AtomicBool>) -> Result<Snapshot, HubError> {
    let reference = parse_remote("hf:o/n").unwrap().unwrap();
    let wanted = Wanted {
        is_shard: &|name| name.starts_with("model") && name.ends_with(".safetensors"),
        small: &["config.json"],
        sizes: &[],
    };
    fetch(settings, &reference, &wanted, stop, &mut |_| {})
}

fn look(settings: &Settings) -> Result<Snapshot, HubError> {
    look_until(settings, &Arc::new(AtomicBool::new(false)))
}

/// A hub with one repository; `fault` may answer instead, and `files` is what its listing names.
fn hub(
    files: &'static str,
    fault: impl Fn(&Request) -> Option<Response> + Send + Sync + 'static,
) -> Server {
    Server::start(move |request| {
        fault(request).unwrap_or_else(|| {
            if is_api(request) {
                let body = format!(r#"{{"sha":"{COMMIT}","siblings":[{files}]}}"#);
                return Response::new(200, body);
            }
            if request.path().ends_with("/config.json") {
                return Response::new(200, "{}");
            }
            true_part(request)
        })
    })
}

fn true_part(request: &Request) -> Response {
    part(request, SHARD.len() as u64, "v", |start, end| {
        SHARD[start as usize..end as usize].to_vec()
    })
}

const FILES: &str = r#"{"rfilename":"model.safetensors"},{"rfilename":"config.json"}"#;

fn is_api(request: &Request) -> bool {
    request.path().starts_with("/api/")
}

fn is_weights(request: &Request) -> bool {
    request.path().ends_with(".safetensors")
}

#[track_caller]
fn says(error: &HubError, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

/// At one byte each tenth of a second these bodies would take hours.
#[test]
fn what_drips_is_left_after_a_few_stalls_time() {
    let drip = Some(Duration::from_millis(100));
    let server = hub(FILES, move |r| {
        is_weights(r).then(|| Response {
            drip,
            ..Response::new(302, vec![b'x'; 16_000]).header("Location", "/o/model.safetensors")
        })
    });
    let error = look(&hasty(&server)).unwrap_err();
    assert!(matches!(error, HubError::Stalled { .. }), "{error}");
    let server = hub(FILES, move |r| {
        is_api(r).then(|| Response { drip, ..Response::new(200, vec![b' '; 100_000]) })
    });
    let error = look(&hasty(&server)).unwrap_err();
    // Not five times: a little for three stalls is as bad as nothing three times.
    says(&error, &["less than 1 kB a second came", "2 times in a row", "HF_HUB_DOWNLOAD_TIMEOUT"]);
}

#[test]
fn an_interrupt_waits_for_no_answer() {
    for is_late in [is_api, |r: &Request| r.path().ends_with("/config.json"), is_weights] {
        let stop = Arc::new(AtomicBool::new(false));
        let of_server = Arc::clone(&stop);
        let server = hub(FILES, move |r| {
            is_late(r).then(|| {
                of_server.store(true, Ordering::SeqCst);
                let stall = Some(Duration::from_secs(3600));
                let answer = true_part(r);
                Response { stall, ..answer }
            })
        });
        let mut patient = settings(&server.url(""), &[]);
        patient.timing.stall = Duration::from_secs(3600);
        let error = look_until(&patient, &stop).unwrap_err();
        assert!(matches!(error, HubError::Interrupted), "{error}");
    }
}

#[test]
fn waits_that_a_server_asks_for_are_told_as_they_are() {
    let limited = |wait: &'static str, more: &[(&str, &str)]| {
        let answer = move |r: &Request| {
            is_api(r).then(|| Response::new(429, "").header("Retry-After", wait))
        };
        let server = hub(FILES, answer);
        look(&settings(&server.url(""), more)).unwrap_err()
    };
    // No pause at all would be five requests at once.
    let error = limited("0", &[]);
    says(&error, &["try again in some minutes", "HF_TOKEN"]);
    let error = limited("99999", &[("HF_TOKEN", "t")]);
    says(&error, &["try again in 99999 s"]);
    assert!(!error.to_string().contains("HF_TOKEN"), "a token was sent: {error}");
    let server =
        hub(FILES, |r| is_api(r).then(|| Response::new(503, "").header("Retry-After", "120")));
    let error = look(&settings(&server.url(""), &[])).unwrap_err();
    says(&error, &["status 503 and asks to wait for 120 s: try again later"]);
}

#[test]
fn refusals_of_a_file_are_not_blamed_on_the_repository() {
    let server = hub(FILES, |r| is_weights(r).then(|| Response::new(401, "")));
    let error = look(&settings(&server.url(""), &[])).unwrap_err();
    says(&error, &["model.safetensors was refused with status 401", "set HF_TOKEN"]);
    let server = hub(FILES, |r| is_weights(r).then(|| Response::new(404, "")));
    let error = look(&settings(&server.url(""), &[])).unwrap_err();
    says(&error, &["does not exist (the listing names it)"]);
}

#[test]
fn a_token_that_a_server_repeats_is_not_shown() {
    let server = hub(FILES, |r| {
        is_api(r).then(|| {
            let said = format!("{} is wrong", r.token().unwrap_or_default());
            Response::new(401, "").header("X-Error-Message", said)
        })
    });
    let error = look(&settings(&server.url(""), &[("HF_TOKEN", "hf_secret")])).unwrap_err();
    says(&error, &["does not accept the token (Bearer ... is wrong)"]);
}

#[test]
fn settings_that_cannot_be_used_are_told_without_their_secrets() {
    for (endpoint, part) in [
        ("http://me:hidden@127.0.0.1:9", "not sent"),
        ("http://127.0.0.1:9?key=hidden", "query"),
        ("ftp://127.0.0.1", "not a URL such as"),
        ("http://127.0.0.1:99999", "not a URL such as"),
    ] {
        let error = look(&settings(endpoint, &[])).unwrap_err();
        assert!(matches!(error, HubError::Setting { name: "HF_ENDPOINT", .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
        assert!(!error.to_string().contains("hidden"), "{error}");
    }
    let missing = [("SSL_CERT_FILE", "/no/such/file.pem")];
    says(&look(&settings("http://127.0.0.1:9", &missing)).unwrap_err(), &["SSL_CERT_FILE", "/no/"]);
    let proxy = [("HTTP_PROXY", "http://me:hidden@127.0.0.1:9")];
    let error = look(&settings("http://127.0.0.1:1", &proxy)).unwrap_err();
    says(&error, &["cannot reach", "by the proxy http://...@127.0.0.1:9"]);
}

/// A machine without a network resolves no names: that is as unreachable as a closed port. A label of
/// 64 letters is refused by the resolver itself.
#[test]
fn a_name_that_is_not_known_is_unreachable() {
    let folder = tempfile::tempdir().unwrap();
    let cache = [("XDG_CACHE_HOME", folder.path().to_str().unwrap())];
    let nowhere = format!("http://{}.invalid", "a".repeat(64));
    let error = look(&settings(&nowhere, &cache)).unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    says(&error, &["is not known", "HTTPS_PROXY", "the cache has nothing of it"]);
}

#[test]
fn listings_are_believed_as_far_as_they_can_be_true() {
    // Of what is named twice the first counts, and it is fetched once.
    let twice = r#"{"rfilename":"model.safetensors","size":10},{"rfilename":"config.json","size":2},
        {"rfilename":"model.safetensors","size":7}"#;
    let server = hub(twice, |_| None);
    let snapshot = look(&settings(&server.url(""), &[])).unwrap();
    let files: Vec<&str> = snapshot.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(files, ["config.json", "model.safetensors"]);
    assert_eq!(snapshot.file_bytes("model.safetensors"), Some(10));
    assert_eq!(server.requests().iter().filter(|r| is_weights(r)).count(), 2);
    let huge = r#"{"rfilename":"tokenizer.json","size":18446744073709551615}"#;
    let error = look(&settings(&hub(huge, |_| None).url(""), &[])).unwrap_err();
    says(&error, &["it says that \"tokenizer.json\" has 18446744073709551615 bytes"]);
    let gguf = r#"{"rfilename":"README.md"},{"rfilename":"a.gguf"}"#;
    let error = look(&settings(&hub(gguf, |_| None).url(""), &[])).unwrap_err();
    says(&error, &["no model*.safetensors", "1 GGUF files"]);
    let none = r#"{"rfilename":"README.md"}"#;
    let error = look(&settings(&hub(none, |_| None).url(""), &[])).unwrap_err();
    says(&error, &["no config.json"]);
}

/// A pipe in place of a record would be waited for for ever.
#[cfg(unix)]
#[test]
fn a_pipe_in_the_cache_is_no_record() {
    let folder = tempfile::tempdir().unwrap();
    let server = hub(FILES, |_| None);
    let cache = [("XDG_CACHE_HOME", folder.path().to_str().unwrap())];
    let settings = settings(&server.url(""), &cache);
    look(&settings).unwrap();
    let records = files_below(folder.path());
    assert!(records.len() >= 4, "{records:?}");
    for record in &records {
        std::fs::remove_file(record).unwrap();
        let made = std::process::Command::new("mkfifo").arg(record).status().unwrap();
        assert!(made.success());
    }
    assert_eq!(look(&settings).unwrap().heads["model.safetensors"].bytes, SHARD);
}

fn files_below(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files_below(&path)) } else { found.push(path) }
    }
    found
}
