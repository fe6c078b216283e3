//! Fetching from servers that do what they should: byte counts, the cache, revisions, redirections,
//! and the settings that go with each request.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

mod support;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use support::{COMMIT, Response, Server, file, folder_server, hub_answer, hub_server};
use tierkeep_hub::{
    HubError, Settings, Snapshot, Timing, Wanted, fetch, fetch_file, fetch_head, parse_remote,
};

/// Settings that see only the server and the folder given.
fn settings(endpoint: &str, cache: &Path, more: &[(&str, &str)]) -> Settings {
    let cache = cache.to_str().unwrap();
    let base = [("HF_ENDPOINT", endpoint), ("XDG_CACHE_HOME", cache), ("HOME", cache)];
    let settings = Settings::from_env(|name| {
        let all = base.iter().chain(more);
        all.into_iter().find(|(n, _)| *n == name).map(|(_, value)| value.into())
    });
    let timing = Timing {
        connect: Duration::from_secs(5),
        stall: Duration::from_secs(5),
        backoff: Duration::from_millis(5),
        ..Timing::default()
    };
    Settings { timing, ..settings }
}

fn is_shard(name: &str) -> bool {
    name.starts_with("model") && name.ends_with(".safetensors")
}

const WANTED: Wanted<'_> = Wanted {
    is_shard: &is_shard,
    small: &["config.json", "generation_config.json"],
    sizes: &["tokenizer.json"],
};

fn look(settings: &Settings, text: &str) -> Result<Snapshot, HubError> {
    let reference = parse_remote(text)?.expect("it is remote");
    fetch(settings, &reference, &WANTED, &Arc::new(AtomicBool::new(false)), &mut |_| {})
}

/// A safetensors file with a header of about `names` tensors and as many bytes of data.
fn shard(n_tensors: usize) -> Vec<u8> {
    let entries: Vec<String> = (0..n_tensors)
        .map(|i| {
            let end = i + 1;
            format!(r#""tensor.{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{end}]}}"#)
        })
        .collect();
    let json = format!("{{{}}}", entries.join(","));
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.extend(vec![7; n_tensors]);
    bytes
}

fn head_of(file: &[u8]) -> &[u8] {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    &file[..8 + length]
}

/// A model of `n_shards` files with an index.
fn model(folder: &Path, n_shards: usize) -> u64 {
    fs::write(folder.join("config.json"), r#"{"model_type":"x"}"#).unwrap();
    fs::write(folder.join("tokenizer.json"), vec![b' '; 999]).unwrap();
    let mut head_bytes = 0;
    let mut map = Vec::new();
    for i in 1..=n_shards {
        let name = format!("model-{i:05}-of-{n_shards:05}.safetensors");
        // Alike but for the last, as published models are.
        let bytes = shard(if i == n_shards { 1 } else { 300 + i % 7 });
        head_bytes += head_of(&bytes).len() as u64;
        fs::write(folder.join(&name), bytes).unwrap();
        map.push(format!(r#""tensor.{i}":"{name}""#));
    }
    let index = format!(r#"{{"weight_map":{{{}}}}}"#, map.join(","));
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    head_bytes
}

fn check_heads(snapshot: &Snapshot, folder: &Path) {
    for (name, head) in &snapshot.heads {
        let bytes = fs::read(folder.join(name)).unwrap();
        assert_eq!(head.bytes, head_of(&bytes), "{name}");
        assert_eq!(head.file_bytes, bytes.len() as u64, "{name}");
    }
}

#[test]
fn a_repository_costs_its_headers_and_little_more() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let head_bytes = model(folder.path(), 60);
    let server = hub_server(folder.path());
    let settings = settings(&server.url(""), cache.path(), &[]);
    let snapshot = look(&settings, "hf:o/n").unwrap();
    assert_eq!(snapshot.name, format!("hf:o/n@{COMMIT}"));
    assert_eq!(snapshot.heads.len(), 60);
    check_heads(&snapshot, folder.path());
    assert_eq!(snapshot.small["config.json"], br#"{"model_type":"x"}"#);
    assert_eq!(snapshot.file_bytes("tokenizer.json"), Some(999));
    assert!(!snapshot.has_file("generation_config.json"));
    assert_eq!(snapshot.transfer.head_bytes, head_bytes);
    assert_eq!(snapshot.transfer.bytes, server.sent());
    let of_heads: u64 = server.sent() - support::listing(folder.path(), COMMIT).len() as u64 - 18;
    assert!(of_heads as f64 <= head_bytes as f64 * 1.08, "{of_heads} of {head_bytes}");
    let index = |r: &support::Request| r.path().ends_with(".index.json");
    assert!(!server.requests().iter().any(index), "the listing names the files");
    // The second time only asks which commit the branch is.
    let before = server.n_requests();
    let again = look(&settings, "hf:o/n@main").unwrap();
    assert_eq!(server.n_requests() - before, 1);
    assert_eq!((again.heads, again.small), (snapshot.heads, snapshot.small));
    assert_eq!((again.transfer.n_cached, again.as_of_unix_s), (60, None));
    // A commit needs not even that.
    look(&settings, &format!("hf:o/n@{COMMIT}")).unwrap();
    assert_eq!(server.n_requests() - before, 1);
}

#[test]
fn a_folder_is_read_by_its_index_and_asked_about_again() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    model(folder.path(), 5);
    let server = folder_server(folder.path());
    let settings = settings("http://127.0.0.1:1", cache.path(), &[]);
    let url = server.url("/config.json");
    let snapshot = look(&settings, &url).unwrap();
    assert_eq!((snapshot.heads.len(), snapshot.name.as_str()), (5, server.url("").as_str()));
    check_heads(&snapshot, folder.path());
    assert!(snapshot.small.contains_key("model.safetensors.index.json"));
    assert_eq!(snapshot.file_bytes("tokenizer.json"), Some(999));
    let sent = server.sent();
    let again = look(&settings, &url).unwrap();
    assert_eq!(again.heads, snapshot.heads);
    assert_eq!(again.transfer.n_cached, 5);
    // Eight bytes of each file and one of the tokenizer; the rest did not change.
    assert_eq!(server.sent() - sent, 5 * 8 + 1);
    // One file is another now, of another size.
    fs::write(folder.path().join("model-00002-of-00005.safetensors"), shard(77)).unwrap();
    let changed = look(&settings, &url).unwrap();
    assert_eq!((changed.transfer.n_cached, changed.transfer.n_fetched), (4, 1));
    check_heads(&changed, folder.path());
    // And one is gone.
    fs::remove_file(folder.path().join("model-00003-of-00005.safetensors")).unwrap();
    let less = look(&settings, &url).unwrap();
    assert!(less.absent.contains("model-00003-of-00005.safetensors") && less.heads.len() == 4);
}

#[test]
fn a_single_file_needs_no_index() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    let server = folder_server(folder.path());
    let settings = settings("http://127.0.0.1:1", cache.path(), &[]);
    let error = look(&settings, &server.url("")).unwrap_err();
    assert!(matches!(error, HubError::NoSafetensors { .. }), "{error}");
    fs::write(folder.path().join("model.safetensors"), shard(3)).unwrap();
    let snapshot = look(&settings, &server.url("")).unwrap();
    check_heads(&snapshot, folder.path());
    assert_eq!(snapshot.heads.len(), 1);
}

#[test]
fn the_page_of_a_repository_at_another_hub_is_found() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    model(folder.path(), 2);
    let server = hub_server(folder.path());
    let settings = settings("http://127.0.0.1:1", cache.path(), &[("HF_TOKEN", "secret")]);
    let snapshot = look(&settings, &server.url("/o/n/tree/main")).unwrap();
    assert_eq!((snapshot.heads.len(), snapshot.repo.as_deref()), (2, Some("o/n")));
    assert!(server.requests().iter().all(|r| r.token().is_none()), "it is not the token's server");
}

#[test]
fn more_of_a_model_can_be_fetched_later() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    model(folder.path(), 2);
    fs::write(folder.path().join("mtp.safetensors"), shard(4)).unwrap();
    let server = hub_server(folder.path());
    let settings = settings(&server.url(""), cache.path(), &[]);
    let snapshot = look(&settings, "hf:o/n").unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let name = "model.safetensors.index.json";
    let index = fetch_file(&settings, &snapshot, name, &stop).unwrap().unwrap();
    assert_eq!(index, fs::read(folder.path().join(name)).unwrap());
    assert_eq!(fetch_file(&settings, &snapshot, "nothing.json", &stop).unwrap(), None);
    let head = fetch_head(&settings, &snapshot, "mtp.safetensors", &stop).unwrap().unwrap();
    assert_eq!(head.bytes, head_of(&shard(4)));
    assert!(fetch_head(&settings, &snapshot, "no.safetensors", &stop).unwrap().is_none());
}

#[test]
fn weights_of_other_names_are_found_by_the_index() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    fs::write(folder.path().join("weights-1.safetensors"), shard(4)).unwrap();
    let index = r#"{"weight_map":{"a":"weights-1.safetensors","b":"../x.safetensors"}}"#;
    fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    let server = hub_server(folder.path());
    let snapshot = look(&settings(&server.url(""), cache.path(), &[]), "hf:o/n").unwrap();
    assert_eq!(snapshot.heads.keys().collect::<Vec<_>>(), ["weights-1.safetensors"]);
}

/// Storage on another host must not see the token, and gets no first request of the hub's.
#[test]
fn redirections_lead_elsewhere_without_the_token() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    model(folder.path(), 4);
    let storage = folder_server(folder.path());
    let (port, path) = (storage.port, folder.path().to_owned());
    let hub = Server::start(move |request| {
        // Large files lie in the storage, small ones behind a relative redirection.
        let name = request.path().rsplit('/').next().unwrap();
        if request.path().starts_with("/o/n/resolve/") && name.ends_with(".safetensors") {
            let bytes = path.join(name).metadata().unwrap().len();
            return Response::new(302, "moved")
                .header("Location", format!("http://127.0.0.1:{port}/{name}?signature=1"))
                .header("X-Linked-Size", bytes.to_string());
        }
        if request.path().starts_with("/o/n/resolve/") {
            return Response::new(307, "").header("Location", format!("/cached/{name}"));
        }
        match request.path().strip_prefix("/cached/") {
            Some(name) => file(request, &path.join(name)),
            None => hub_answer(request, &path),
        }
    });
    let settings = settings(&hub.url(""), cache.path(), &[("HF_TOKEN", "secret")]);
    let snapshot = look(&settings, "hf:o/n").unwrap();
    check_heads(&snapshot, folder.path());
    assert!(hub.requests().iter().all(|r| r.token() == Some("Bearer secret")));
    assert!(storage.requests().iter().all(|r| r.token().is_none()));
    // The rest of a header is asked of the storage, not of the hub again.
    let resolved = hub.requests().iter().filter(|r| r.path().ends_with(".safetensors")).count();
    assert_eq!(resolved, 4);
    assert!(storage.n_requests() > 4, "{}", storage.n_requests());
}

#[test]
fn requests_go_through_the_proxy_unless_it_is_not_for_them() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    model(folder.path(), 1);
    let server = hub_server(folder.path());
    // Nobody listens there.
    let proxy = [("HTTP_PROXY", "http://127.0.0.1:9")];
    let error = look(&settings(&server.url(""), cache.path(), &proxy), "hf:o/n").unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    assert_eq!(server.n_requests(), 0);
    let direct = [proxy[0], ("no_proxy", "127.0.0.1,localhost")];
    look(&settings(&server.url(""), cache.path(), &direct), "hf:o/n").unwrap();
    let odd = [("HTTP_PROXY", "ftp://127.0.0.1:9")];
    let error = look(&settings(&server.url(""), cache.path(), &odd), "hf:o/n").unwrap_err();
    assert!(error.to_string().contains("HTTP_PROXY"), "{error}");
}

#[test]
fn without_a_network_the_cache_answers_and_says_so() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    model(folder.path(), 3);
    let server = hub_server(folder.path());
    let online = settings(&server.url(""), cache.path(), &[]);
    let offline = settings(&server.url(""), cache.path(), &[("HF_HUB_OFFLINE", "1")]);
    let error = look(&offline, "hf:o/n").unwrap_err();
    assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
    assert_eq!(server.n_requests(), 0);
    let first = look(&online, "hf:o/n").unwrap();
    let n_requests = server.n_requests();
    let again = look(&offline, "hf:o/n").unwrap();
    assert_eq!(server.n_requests(), n_requests);
    assert_eq!(again.heads, first.heads);
    assert!(again.as_of_unix_s.is_some_and(|at| at > 1_700_000_000));
    assert!(again.offline_reason.unwrap().contains("HF_HUB_OFFLINE"));
    let error = look(&offline, "hf:o/n@v2").unwrap_err().to_string();
    assert!(error.contains("hf:o/n@v2") && error.contains("other revisions"), "{error}");
    // A folder's server that is gone.
    let files = folder_server(folder.path());
    let url = files.url("");
    let whole = look(&online, &url).unwrap();
    assert!(whole.as_of_unix_s.is_none() && whole.offline_reason.is_none());
    let kept = look(&offline, &url).unwrap();
    assert_eq!((kept.heads, kept.small), (whole.heads, whole.small));
    assert!(kept.as_of_unix_s.is_some());
    assert_eq!(kept.files.iter().find(|f| f.name == "tokenizer.json").unwrap().bytes, Some(999));
}

#[test]
fn damaged_records_are_fetched_again() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    model(folder.path(), 6);
    let server = hub_server(folder.path());
    let settings = settings(&server.url(""), cache.path(), &[]);
    look(&settings, "hf:o/n").unwrap();
    let mut n_damaged = 0;
    let mut folders = vec![settings.cache.clone().unwrap()];
    while let Some(at) = folders.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let mut bytes = fs::read(&path).unwrap();
                let middle = bytes.len() / 2;
                bytes[middle] ^= 0x10;
                fs::write(path, bytes).unwrap();
                n_damaged += 1;
            }
        }
    }
    assert!(n_damaged >= 8, "{n_damaged}");
    let again = look(&settings, "hf:o/n").unwrap();
    assert_eq!((again.transfer.n_cached, again.transfer.n_fetched), (0, 6));
    check_heads(&again, folder.path());
}

#[test]
fn an_interrupt_ends_it_at_once_and_keeps_what_came() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    model(folder.path(), 3);
    let path = folder.path().to_owned();
    let server = Server::start(move |request| {
        let stall = request.path().contains("model-00002").then(|| Duration::from_secs(600));
        Response { stall, ..hub_answer(request, &path) }
    });
    let mut settings = settings(&server.url(""), cache.path(), &[]);
    settings.timing.stall = Duration::from_secs(500);
    let stop = Arc::new(AtomicBool::new(false));
    let reference = parse_remote("hf:o/n").unwrap().unwrap();
    let error = fetch(&settings, &reference, &WANTED, &stop, &mut |progress| {
        assert_eq!(progress.files_total, 3);
        stop.store(progress.files_done == 2, Ordering::SeqCst);
    });
    assert!(matches!(error, Err(HubError::Interrupted)), "{error:?}");
    // Another server with the same address would not be asked for the first file again; here the
    // records show it.
    let n_kept = walk(&settings.cache.unwrap());
    assert!(n_kept >= 5, "two heads, config, listing, commit: {n_kept}");
}

fn walk(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { walk(&path) } else { 1 }).sum()
}

/// The address that a hub redirects to may expire between the two parts of a header.
#[test]
fn an_address_that_expired_is_asked_for_again() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    model(folder.path(), 1);
    let path = folder.path().to_owned();
    let storage = Server::start(move |request| {
        let is_rest = request.range.is_some_and(|(start, _)| start > 0);
        if is_rest && request.target.ends_with("signature=0") {
            return Response::new(403, "expired");
        }
        // Another storage tags the same file differently.
        let mut answer = file(request, &path.join(request.path().rsplit('/').next().unwrap()));
        answer.headers.retain(|(name, _)| name != "ETag");
        answer.header("ETag", format!("\"{}\"", request.target))
    });
    let (port, path) = (storage.port, folder.path().to_owned());
    let hub = Server::start(move |request| {
        let name = request.path().rsplit('/').next().unwrap();
        if request.path().starts_with("/o/n/resolve/") && name.ends_with(".safetensors") {
            let start = request.range.map_or(0, |(start, _)| start);
            let to = format!("http://127.0.0.1:{port}/{name}?signature={start}");
            return Response::new(302, "").header("Location", to);
        }
        hub_answer(request, &path)
    });
    let snapshot = look(&settings(&hub.url(""), cache.path(), &[]), "hf:o/n").unwrap();
    check_heads(&snapshot, folder.path());
    assert_eq!((snapshot.heads.len(), storage.n_requests()), (1, 3));
}
