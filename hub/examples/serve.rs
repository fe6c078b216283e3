//! Serves a folder as a hub and as plain files, for measuring how models elsewhere are looked at:
//! `cargo run --release -p tierkeep-hub --example serve -- DIR PORT [DELAY_MS]`. Each answer waits so
//! long as a distant server's would. Says what it sent when its standard input ends.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a tool for measurements"
)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

fn main() {
    let mut args = std::env::args().skip(1);
    let folder = PathBuf::from(args.next().expect("a folder"));
    let port = args.next().expect("a port").parse().expect("a port");
    let delay = Duration::from_millis(args.next().map_or(0, |ms| ms.parse().expect("ms")));
    let server = support::Server::start_at(port, move |request| {
        std::thread::sleep(delay);
        let path = request.path();
        if path.starts_with("/api/") || path.starts_with("/o/n/") {
            support::hub_answer(request, &folder)
        } else {
            support::file(request, &folder.join(&path[1..]))
        }
    });
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    println!("{} requests, {} bytes of bodies", server.n_requests(), server.sent());
}
