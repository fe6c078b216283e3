//! Servers that refuse, stall, break and lie: each is told from the others, and none makes us download
//! what was not asked for.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use support::{COMMIT, Request, Response, Server, part};
use tierkeep_hub::{HubError, Settings, Snapshot, Timing, Wanted, fetch, parse_remote};

/// A file of one tensor of 5 GB that nobody should ever send whole.
const FILE_BYTES: u64 = 5_000_000_000;

fn head() -> Vec<u8> {
    let json =
        format!(r#"{{"a":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}{}}}"#, " ".repeat(5000));
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

/// The large file as a true server sends it: its header, then zeros.
fn shard(request: &Request) -> Response {
    part(request, FILE_BYTES, "v1", |start, end| {
        let head = head();
        (start..end.min(start + 10_000_000))
            .map(|at| head.get(at as usize).copied().unwrap_or(0))
            .collect()
    })
}

/// A hub with one repository of one large file; `fault` may answer instead.
fn hub(fault: impl Fn(&Request) -> Option<Response> + Send + Sync + 'static) -> Server {
    Server::start(move |request| {
        fault(request).unwrap_or_else(|| {
            let path = request.path();
            if path.starts_with("/api/models/o/n/") {
                let body = format!(
                    r#"{{"sha":"{COMMIT}","siblings":[{{"rfilename":"config.json","size":2}},
                    {{"rfilename":"model.safetensors","size":100,"lfs":{{"size":{FILE_BYTES}}}}}]}}"#
                );
                return Response::new(200, body);
            }
            if path.ends_with("/config.json") { Response::new(200, "{}") } else { shard(request) }
        })
    })
}

fn settings(server: &Server, token: Option<&str>) -> Settings {
    let url = server.url("");
    let settings = Settings::from_env(|name| match name {
        "HF_ENDPOINT" => Some((&url).into()),
        "HF_TOKEN" => token.map(Into::into),
        _ => None,
    });
    let timing = Timing {
        connect: Duration::from_secs(5),
        stall: Duration::from_secs(5),
        tries: 3,
        backoff: Duration::from_millis(2),
        longest_wait: Duration::from_millis(1500),
        n_parallel: 4,
    };
    Settings { timing, ..settings }
}

fn look(settings: &Settings, text: &str) -> Result<Snapshot, HubError> {
    let reference = parse_remote(text).unwrap().unwrap();
    let wanted = Wanted {
        is_shard: &|name| name.starts_with("model") && name.ends_with(".safetensors"),
        small: &["config.json"],
        sizes: &[],
    };
    fetch(settings, &reference, &wanted, &Arc::new(AtomicBool::new(false)), &mut |_| {})
}

/// The error that a fault comes to, and how many requests it took.
fn fault(answer: impl Fn(&Request) -> Option<Response> + Send + Sync + 'static) -> (HubError, u64) {
    let server = hub(answer);
    let error = look(&settings(&server, None), "hf:o/n").unwrap_err();
    assert!(server.sent() < 100_000, "{} bytes were sent", server.sent());
    (error, server.n_requests() as u64)
}

fn is_weights(request: &Request) -> bool {
    request.path().ends_with("/model.safetensors")
}

fn is_api(request: &Request) -> bool {
    request.path().starts_with("/api/")
}

fn coded(status: u16, code: &str, message: &str) -> Response {
    Response::new(status, "").header("X-Error-Code", code).header("X-Error-Message", message)
}

/// Every part of the message.
#[track_caller]
fn says(error: &HubError, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

#[test]
fn the_true_server_is_believed() {
    let server = hub(|_| None);
    let snapshot = look(&settings(&server, None), "hf:o/n").unwrap();
    let found = &snapshot.heads["model.safetensors"];
    assert_eq!((found.bytes.clone(), found.file_bytes), (head(), FILE_BYTES));
}

#[test]
fn gated_missing_and_private_are_told_apart() {
    let (error, _) = fault(|r| is_weights(r).then(|| coded(403, "GatedRepo", "Access ...")));
    says(&error, &["o/n is gated", "accept its licence at http://", "/o/n", "HF_TOKEN"]);
    let server = hub(|r| is_weights(r).then(|| coded(403, "GatedRepo", "")));
    let error = look(&settings(&server, Some("t")), "hf:o/n").unwrap_err();
    says(&error, &["check that the token is of that account"]);
    let (error, n) = fault(|r| is_api(r).then(|| coded(404, "RepoNotFound", "")));
    says(&error, &["o/n was not found", "if it is private, set HF_TOKEN"]);
    assert_eq!(n, 1, "it is not tried again");
    // Strangers are told 401 of what does not exist.
    let (error, _) = fault(|r| is_api(r).then(|| Response::new(401, "")));
    assert!(matches!(error, HubError::RepoNotFound { has_token: false, .. }), "{error}");
    let (error, _) = fault(|r| is_api(r).then(|| coded(404, "RevisionNotFound", "")));
    says(&error, &["no revision \"main\"", "branches"]);
    let server =
        hub(|r| is_api(r).then(|| coded(401, "", "Invalid credentials in Authorization header")));
    let error = look(&settings(&server, Some("wrong")), "hf:o/n").unwrap_err();
    says(&error, &["does not accept the token", "Invalid credentials"]);
    assert!(!error.to_string().contains("wrong"));
    let (error, _) = fault(|r| is_weights(r).then(|| coded(404, "EntryNotFound", "gone")));
    says(&error, &["model.safetensors does not exist", "listing"]);
    let (error, _) = fault(|r| is_weights(r).then(|| Response::new(403, "")));
    says(&error, &["refused with status 403"]);
}

#[test]
fn a_rate_limit_is_waited_for_up_to_a_limit() {
    let count = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&count);
    let server = hub(move |r| {
        let is_first = is_weights(r) && seen.fetch_add(1, Ordering::SeqCst) == 0;
        is_first.then(|| Response::new(429, "").header("Retry-After", "1"))
    });
    look(&settings(&server, None), "hf:o/n").unwrap();
    assert!(count.load(Ordering::SeqCst) >= 2);
    let (error, n) =
        fault(|r| is_api(r).then(|| Response::new(429, "").header("Retry-After", "300")));
    says(&error, &["limits the rate", "try again in 300 s"]);
    assert_eq!(n, 1, "so long is not waited");
    let limited = || Response::new(429, "").header("RateLimit", "\"api\";r=0;t=77");
    let (error, _) = fault(move |r| is_api(r).then(limited));
    says(&error, &["try again in 77 s"]);
}

#[test]
fn passing_failures_are_tried_again() {
    for status in [500, 502, 503, 504, 408] {
        let count = Arc::new(AtomicUsize::new(0));
        let server = hub(move |_| {
            let n = count.fetch_add(1, Ordering::SeqCst);
            n.is_multiple_of(2).then(|| Response::new(status, "later"))
        });
        look(&settings(&server, None), "hf:o/n").unwrap();
    }
    let (error, n) = fault(|r| is_api(r).then(|| Response::new(500, "")));
    says(&error, &["status 500", "3 times in a row"]);
    assert_eq!(n, 3);
    // Broken connections: in the middle of a body, and before any answer.
    let cut = |r: &Request| is_weights(r).then(|| Response { cut_after: Some(3), ..shard(r) });
    let (error, _) = fault(cut);
    says(&error, &["3 times in a row", "what came is kept"]);
    let count = Arc::new(AtomicUsize::new(0));
    let server = hub(move |r| {
        let is_first = is_weights(r) && count.fetch_add(1, Ordering::SeqCst) == 0;
        is_first.then(|| Response { cut_after: Some(3), ..shard(r) })
    });
    look(&settings(&server, None), "hf:o/n").unwrap();
}

#[test]
fn a_server_that_stalls_is_left() {
    let stalled = |r: &Request| {
        let stall = Some(Duration::from_secs(600));
        is_weights(r).then(|| Response { stall, ..shard(r) })
    };
    let server = hub(stalled);
    let mut short = settings(&server, None);
    short.timing.stall = Duration::from_millis(150);
    let error = look(&short, "hf:o/n").unwrap_err();
    says(&error, &["nothing", "came", "3 times in a row", "HF_HUB_DOWNLOAD_TIMEOUT"]);
    // A byte now and then is no better: 5000 would take minutes.
    let dripping = |r: &Request| {
        let drip = Some(Duration::from_millis(100));
        is_weights(r).then(|| Response { drip, ..shard(r) })
    };
    let server = hub(dripping);
    let mut short = settings(&server, None);
    short.timing.stall = Duration::from_millis(150);
    let error = look(&short, "hf:o/n").unwrap_err();
    assert!(matches!(error, HubError::Stalled { .. }), "{error}");
}

#[test]
fn compressed_parts_are_not_believed() {
    let (error, _) = fault(|r| is_weights(r).then(|| shard(r).header("Content-Encoding", "gzip")));
    says(&error, &["Content-Encoding is gzip, expected identity"]);
}

#[test]
fn a_server_without_ranges_is_not_made_to_send_everything() {
    let (error, n) = fault(|r| {
        is_weights(r).then(|| Response {
            content_length: Some(FILE_BYTES),
            ..Response::new(200, vec![0; 1000])
        })
    });
    says(&error, &["does not send parts", "status 200", "5000000000 bytes"]);
    assert_eq!(n, 3, "listing, config, and once the file");
}

#[test]
fn lies_about_lengths_are_noticed() {
    // A total that changes between the answers.
    let (error, _) = fault(|r| {
        is_weights(r).then(|| {
            let (start, end) = r.range.unwrap();
            let total = FILE_BYTES + start;
            let bytes = head()[start as usize..end as usize].to_vec();
            Response::new(206, bytes)
                .header("Content-Range", format!("bytes {start}-{}/{total}", end - 1))
        })
    });
    says(&error, &["its size is 5000000008, expected 5000000000", "replaced meanwhile"]);
    // Another range than the one asked for.
    let (error, _) = fault(|r| {
        is_weights(r).then(|| {
            Response::new(206, vec![0; 8])
                .header("Content-Range", format!("bytes 8-15/{FILE_BYTES}"))
        })
    });
    says(&error, &["the range sent is bytes 8-15", "expected bytes 0-7"]);
    // More than was asked for.
    let (error, _) = fault(|r| {
        is_weights(r).then(|| {
            Response::new(206, vec![0; 900])
                .header("Content-Range", format!("bytes 0-7/{FILE_BYTES}"))
        })
    });
    says(&error, &["its Content-Length is 900, expected 8"]);
    // Less than its own length.
    let (error, n) = fault(|r| {
        is_weights(r).then(|| Response {
            content_length: Some(8),
            ..part(r, FILE_BYTES, "e", |_, _| vec![1; 3])
        })
    });
    says(&error, &["3 times in a row"]);
    assert_eq!(n, 5);
    // No Content-Range, or one that is none.
    for text in ["", "bytes 0-7", "bytes 7-0/9"] {
        let (error, _) = fault(move |r| {
            is_weights(r).then(|| Response::new(206, vec![0; 8]).header("Content-Range", text))
        });
        says(&error, &["Content-Range", "expected bytes 0-7/SIZE"]);
    }
    // The hub names another size on the way to its storage.
    let (error, _) = fault(|r| {
        (is_weights(r) && !r.target.contains("moved")).then(|| {
            Response::new(302, "")
                .header("Location", "/x/model.safetensors?moved=1")
                .header("X-Linked-Size", "17")
        })
    });
    says(&error, &["its size is 17"]);
    // The second part is of another version.
    let (error, _) = fault(|r| {
        is_weights(r).then(|| {
            let etag = format!("v{}", r.range.unwrap().0);
            part(r, FILE_BYTES, &etag, |s, e| head()[s as usize..e as usize].to_vec())
        })
    });
    says(&error, &["its version (ETag or date)", "replaced meanwhile"]);
}

#[test]
fn hostile_header_lengths_are_handed_on_and_not_fetched() {
    for length in [1u64 << 60, u64::MAX, 200_000_000, FILE_BYTES] {
        let server = hub(move |r| {
            is_weights(r).then(|| part(r, FILE_BYTES, "e", |_, _| length.to_le_bytes().to_vec()))
        });
        let snapshot = look(&settings(&server, None), "hf:o/n").unwrap();
        let found = &snapshot.heads["model.safetensors"];
        assert_eq!(found.bytes, length.to_le_bytes(), "the catalogue says what is wrong");
        assert_eq!(found.file_bytes, FILE_BYTES);
        assert!(server.sent() < 1000);
    }
    // A file that is too short for a length.
    let server = hub(|r| {
        if is_api(r) {
            let body = format!(
                r#"{{"sha":"{COMMIT}","siblings":[{{"rfilename":"config.json"}},{{"rfilename":"model.safetensors"}}]}}"#
            );
            return Some(Response::new(200, body));
        }
        is_weights(r).then(|| part(r, 3, "e", |_, _| vec![1, 2, 3]))
    });
    let snapshot = look(&settings(&server, None), "hf:o/n").unwrap();
    assert_eq!(snapshot.heads["model.safetensors"].file_bytes, 3);
}

#[test]
fn large_answers_are_not_read() {
    let (error, _) = fault(|r| {
        r.path().ends_with("/config.json").then(|| Response {
            content_length: Some(1 << 40),
            ..Response::new(200, vec![b' '; 100])
        })
    });
    says(&error, &["config.json has 1099511627776 bytes, more than the cap"]);
}

#[test]
fn what_is_no_hub_and_no_model_says_so() {
    let (error, _) = fault(|r| is_api(r).then(|| Response::new(200, "<html>\u{1b}[31m")));
    says(&error, &["something else than the hub's listing", "HF_ENDPOINT"]);
    let listing = |files: &str| {
        let body = format!(r#"{{"sha":"{COMMIT}","siblings":[{files}]}}"#);
        move |r: &Request| is_api(r).then(|| Response::new(200, body.clone()))
    };
    let (error, _) = fault(listing(r#"{"rfilename":"x.gguf"}"#));
    says(&error, &["no model*.safetensors: it has 1 GGUF files"]);
    let (error, _) = fault(listing(
        r#"{"rfilename":"config.json"},{"rfilename":"x-Q4.gguf"},{"rfilename":"pytorch_model.bin"}"#,
    ));
    says(&error, &["no model*.safetensors", "1 GGUF", "1 PyTorch"]);
}

#[test]
fn redirections_are_not_followed_anywhere() {
    for (location, part) in [
        ("file:///etc/passwd", "only https and http"),
        ("ftp://h/x", "only https and http"),
        ("/loop/model.safetensors", "too many"),
        ("", "it does not say where to"),
        ("http://h:99999/x", "not a URL"),
    ] {
        let (error, _) = fault(move |r| {
            is_weights(r).then(|| Response::new(302, "").header("Location", location))
        });
        says(&error, &["not followed", part]);
    }
}

#[test]
fn no_connection_is_told_with_what_the_cache_has() {
    let server = hub(|_| None);
    let mut nowhere = settings(&server, None);
    nowhere.endpoint = "http://127.0.0.1:9".to_owned();
    let error = look(&nowhere, "hf:o/n").unwrap_err();
    says(&error, &["cannot reach 127.0.0.1:9", "HTTPS_PROXY", "the cache has nothing of it"]);
    nowhere.endpoint = "nonsense".to_owned();
    says(&look(&nowhere, "hf:o/n").unwrap_err(), &["HF_ENDPOINT", "nonsense"]);
    // Words of a server reach no terminal as they are.
    let (error, _) = fault(|r| is_weights(r).then(|| coded(403, "X", "a\u{1b}[31mred")));
    assert!(!error.to_string().contains('\u{1b}'));
}
