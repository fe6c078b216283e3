//! A small HTTP server for tests, one thread a connection, that answers as it is told: truly, wrongly,
//! slowly or not at all. It remembers what was asked of it and how many bytes it sent.
#![allow(dead_code, reason = "each test that includes this uses a part of it")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What was asked.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Path and query.
    pub(crate) target: String,
    /// Headers, names in lower case.
    pub(crate) headers: BTreeMap<String, String>,
    /// First byte and one past the last of a Range.
    pub(crate) range: Option<(u64, u64)>,
}

impl Request {
    /// The path without its query.
    pub(crate) fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or("")
    }

    pub(crate) fn token(&self) -> Option<&str> {
        self.headers.get("authorization").map(String::as_str)
    }
}

/// What is answered.
#[derive(Clone, Debug, Default)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Instead of the true one.
    pub(crate) content_length: Option<u64>,
    /// Bytes of the body after which the connection is closed.
    pub(crate) cut_after: Option<usize>,
    /// How long nothing comes before the body.
    pub(crate) stall: Option<Duration>,
    /// How long nothing comes before each byte of the body.
    pub(crate) drip: Option<Duration>,
}

impl Response {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, body: body.into(), ..Self::default() }
    }

    pub(crate) fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }
}

type Handler = dyn Fn(&Request) -> Response + Send + Sync;

/// A server on a port of its own, until it is dropped.
pub(crate) struct Server {
    pub(crate) port: u16,
    log: Arc<Mutex<Vec<Request>>>,
    sent: Arc<Mutex<u64>>,
}

impl Server {
    pub(crate) fn start(handler: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        Self::start_at(0, handler)
    }

    /// At a port of one's own choice; 0 is any.
    pub(crate) fn start_at(
        port: u16,
        handler: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (log, sent) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(0)));
        let handler: Arc<Handler> = Arc::new(handler);
        let (log_of_thread, sent_of_thread) = (Arc::clone(&log), Arc::clone(&sent));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let handler = Arc::clone(&handler);
                let (log, sent) = (Arc::clone(&log_of_thread), Arc::clone(&sent_of_thread));
                std::thread::spawn(move || {
                    let _ = serve(&stream, &*handler, &log, &sent);
                });
            }
        });
        Self { port, log, sent }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn n_requests(&self) -> usize {
        self.log.lock().unwrap().len()
    }

    /// Bytes of bodies sent so far.
    pub(crate) fn sent(&self) -> u64 {
        *self.sent.lock().unwrap()
    }
}

fn serve(
    stream: &TcpStream,
    handler: &Handler,
    log: &Mutex<Vec<Request>>,
    sent: &Mutex<u64>,
) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut writer = stream.try_clone()?;
    loop {
        let Some(request) = read_request(&mut reader)? else { return Ok(()) };
        log.lock().unwrap().push(request.clone());
        let response = handler(&request);
        let length = response.content_length.unwrap_or(response.body.len() as u64);
        let mut head = format!("HTTP/1.1 {} X\r\nContent-Length: {length}\r\n", response.status);
        for (name, value) in &response.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "\r\n";
        writer.write_all(head.as_bytes())?;
        if let Some(stall) = response.stall {
            writer.flush()?;
            std::thread::sleep(stall);
        }
        let end = response.cut_after.unwrap_or(response.body.len()).min(response.body.len());
        let body = &response.body[..end];
        *sent.lock().unwrap() += body.len() as u64;
        if let Some(drip) = response.drip {
            for byte in body {
                std::thread::sleep(drip);
                writer.write_all(&[*byte])?;
                writer.flush()?;
            }
        } else {
            writer.write_all(body)?;
        }
        writer.flush()?;
        if response.cut_after.is_some() || length != response.body.len() as u64 {
            return stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

fn read_request(reader: &mut impl BufRead) -> std::io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let target = line.split(' ').nth(1).unwrap_or("/").to_owned();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':') {
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    let range = headers.get("range").and_then(|range: &String| {
        let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, last.parse::<u64>().ok()? + 1))
    });
    Ok(Some(Request { target, headers, range }))
}

/// A part of something of `total` bytes that `read` gives, or all of it, as a true server answers.
pub(crate) fn part(
    request: &Request,
    total: u64,
    etag: &str,
    read: impl FnOnce(u64, u64) -> Vec<u8>,
) -> Response {
    let etag = format!("\"{etag}\"");
    if request.headers.get("if-none-match") == Some(&etag) {
        return Response::new(304, "").header("ETag", etag);
    }
    let Some((start, end)) = request.range else {
        return Response::new(200, read(0, total)).header("ETag", etag);
    };
    if start >= total {
        return Response::new(416, "").header("Content-Range", format!("bytes */{total}"));
    }
    let end = end.min(total);
    Response::new(206, read(start, end))
        .header("ETag", etag)
        .header("Content-Range", format!("bytes {start}-{}/{total}", end - 1))
}

/// Answers with a file, or 404.
pub(crate) fn file(request: &Request, path: &Path) -> Response {
    let Ok(mut file) = File::open(path) else {
        return Response::new(404, "");
    };
    let total = file.metadata().unwrap().len();
    part(request, total, &format!("v{total}"), |start, end| {
        let mut bytes = vec![0; usize::try_from(end - start).unwrap()];
        file.seek(SeekFrom::Start(start)).unwrap();
        file.read_exact(&mut bytes).unwrap();
        bytes
    })
}

/// A server of the files of a folder.
pub(crate) fn folder_server(folder: &Path) -> Server {
    let folder = folder.to_owned();
    Server::start(move |request| file(request, &folder.join(&request.path()[1..])))
}

/// A commit as the hub names them.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The hub's listing of a folder.
pub(crate) fn listing(folder: &Path, commit: &str) -> String {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let files: Vec<String> = files
        .iter()
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            let bytes = path.metadata().unwrap().len();
            format!(r#"{{"rfilename":"{name}","size":{bytes}}}"#)
        })
        .collect();
    format!(r#"{{"sha":"{commit}","gated":false,"siblings":[{}]}}"#, files.join(","))
}

/// Answers as the hub does for the repository `o/n` with the files of a folder.
pub(crate) fn hub_answer(request: &Request, folder: &Path) -> Response {
    let path = request.path();
    if path.starts_with("/api/models/o/n/revision/") {
        let is_short = request.target.contains("expand");
        let body =
            if is_short { format!(r#"{{"sha":"{COMMIT}"}}"#) } else { listing(folder, COMMIT) };
        return Response::new(200, body);
    }
    match path.strip_prefix(&format!("/o/n/resolve/{COMMIT}/")) {
        Some(name) => file(request, &folder.join(name)),
        None => Response::new(404, "").header("X-Error-Code", "RepoNotFound"),
    }
}

/// A hub with one repository, `o/n`.
pub(crate) fn hub_server(folder: &Path) -> Server {
    let folder = folder.to_owned();
    Server::start(move |request| hub_answer(request, &folder))
}
