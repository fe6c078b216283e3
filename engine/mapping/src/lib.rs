//! Mapped memory that is borrowed in ways the language does not know: read-only ranges of files, whose pages lie
//! in the page cache, and slots of our own memory that are lent to threads ([`Arena`]).
//!
//! Owns, of files: mapping, bringing pages in, and what happens when one cannot be: a file that is cut off under a
//! mapping, or a disk that fails, raises SIGBUS, which would end the process. Here zeros take the place of
//! what is lost, [`Mapping::lost`] says from where on, and [`faults`] that anything was lost at all. Whoever
//! computes on a mapping asks before it uses a result. Refuses: what the bytes mean, which ranges are
//! mapped, messages for users.
//!
//! # What others may do to the file
//!
//! Bytes of a mapping are those of the file now: they change when somebody writes to it, under a shared
//! slice that the language takes to be constant. No platform gives a mapping that cannot change, and the
//! language defines nothing for it; what is relied on is that a read gives some byte, maybe another one
//! the next time. So [`Mapping::bytes`] asks of callers what its signature cannot: they treat a byte as a
//! number that may be any, and decide nothing about memory by it: no index, length or pointer is read from
//! a mapping, and no value is looked at twice and expected to be one. That the file is still what it
//! was is for the caller to check, by its size and times, before a result is used.
//!
//! # The signal
//!
//! The handler is installed when the first range is mapped and stays. It acts on addresses inside live
//! mappings of this crate alone; every other SIGBUS goes to the handler that was there before, or to the
//! system's default. It takes no lock, allocates nothing, makes one system call, and runs on the alternate
//! stack where a thread has one. Of a handler that was there before, its function is called as its flags
//! say; its mask, and that it wanted to be called once, are not kept. Whoever installs another handler
//! later takes our place, and has to pass on in turn. A process that is forked off has mappings and
//! handler as they were.

mod arena;
#[cfg(target_os = "linux")]
#[path = "linux.rs"]
mod mapping;
#[cfg(target_os = "linux")]
mod signal;

#[cfg(not(target_os = "linux"))]
#[path = "elsewhere.rs"]
mod mapping;

pub use arena::{Arena, Lent};
pub use mapping::{Mapping, faults, page_bytes};

/// Whether this platform has mappings; where it has none, [`Mapping::new`] refuses.
pub const IS_AVAILABLE: bool = cfg!(target_os = "linux");

/// Why a range of a file is not mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// This platform is not Linux.
    #[error("files are mapped on Linux alone")]
    Unavailable,
    /// The range does not begin at a page.
    #[error("a mapping begins at a page of {page_bytes} bytes, {offset} is inside one")]
    Misaligned {
        /// Where it was to begin.
        offset: u64,
        /// The system's pages.
        page_bytes: u64,
    },
    /// The range is empty, or longer than addresses count.
    #[error("a mapping of {bytes} bytes cannot be")]
    Length {
        /// How long it was to be.
        bytes: u64,
    },
    /// The system refused.
    #[error("{0}")]
    System(#[from] std::io::Error),
}
