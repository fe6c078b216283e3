//! Models that are not on this disk, or only in the hub client's cache: which files they have, their
//! configs and the headers of their weights, by ranged requests. Owns the network, its settings and
//! the cache of what was fetched. Knows nothing of architectures or machines: what is read here means
//! something in `plans` only. Prints nothing and reads no environment: see [`Settings::from_env`].
#![forbid(unsafe_code)]

mod cache;
mod client;
mod download;
mod error;
mod fetch;
mod folder;
#[doc(hidden)]
pub mod fuzzing;
mod guess;
mod headers;
mod listing;
pub mod local;
mod proxy;
mod range;
mod rate;
mod reference;
mod repo;
mod settings;
mod snapshot;
mod tries;
mod url;

pub use self::download::{Download, Part};
pub use self::error::HubError;
pub use self::fetch::{Progress, Wanted, fetch, fetch_file, fetch_head};
pub use self::proxy::Proxies;
pub use self::rate::{BadRate, MeasuredRate, Rate};
pub use self::reference::{Reference, RepoId, RepoReference, parse_local, parse_remote};
pub use self::settings::{Settings, Timing, Token};
pub use self::snapshot::{HeadOfFile, RemoteFile, Snapshot, Transfer};
