//! The system behind the shards: how a file is opened, read at a place, and told from what it was.
//!
//! Owns the two traits behind which tests put a disk that fails, and the system's own disk. Retries
//! nothing and counts nothing: that is `shard_io`'s.

use std::fmt::Debug;
use std::fs::{File, Metadata};
use std::io;
use std::path::Path;

pub use tierkeep_mapping::{MapError, Mapping};

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Through the page cache.
    PageCache,
    /// Past it: offsets, lengths and memory in whole blocks. Not every filesystem and no other system
    /// than Linux has this.
    Direct,
}

/// What tells a file from another one, and from itself before it was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Its size.
    pub bytes: u64,
    /// When its bytes last changed, in nanoseconds since 1970.
    pub modified_ns: i128,
    /// The device that it is on; 0 where the system has no such number.
    pub device: u64,
    /// Its number there; 0 where the system has no such number.
    pub inode: u64,
    /// How many names it has; 0 for an open file that has none left.
    pub n_links: u64,
}

impl Stamp {
    /// Whether both are one file, whatever has been written to it.
    #[must_use]
    pub fn is_same_file(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// Whether nothing was written between the two, as far as size and time tell.
    #[must_use]
    pub fn is_unwritten_since(&self, earlier: &Self) -> bool {
        (self.bytes, self.modified_ns) == (earlier.bytes, earlier.modified_ns)
    }
}

/// Where shards are. [`SystemDisk`] is the one that there is; tests give one that fails.
pub trait Disk: Debug + Send + Sync {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// What the system says.
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn ShardFile>>;

    /// What is at `path` now: after a rename another file than the one that is open.
    ///
    /// # Errors
    /// What the system says.
    fn stamp(&self, path: &Path) -> io::Result<Stamp>;
}

/// One open file.
pub trait ShardFile: Debug + Send + Sync {
    /// One read at an offset, as long as the system makes it; 0 at the end of the file.
    ///
    /// # Errors
    /// What the system says.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// What the open file is now.
    ///
    /// # Errors
    /// What the system says.
    fn stamp(&self) -> io::Result<Stamp>;

    /// Maps a range of pages.
    ///
    /// # Errors
    /// [`MapError`]: the platform, the range or the system.
    fn map(&self, offset: u64, bytes: u64) -> Result<Mapping, MapError>;

    /// Tells the system that the pages of a range will not be needed. Nothing follows if it does not
    /// listen.
    fn drop_pages(&self, offset: u64, bytes: u64);
}

/// The disk of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemDisk;

impl Disk for SystemDisk {
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn ShardFile>> {
        let file = match open(path, access) {
            Err(error) if is_out_of_handles(&error) && raise_handle_limit() => open(path, access)?,
            other => other?,
        };
        Ok(Box::new(SystemFile(file)))
    }

    fn stamp(&self, path: &Path) -> io::Result<Stamp> {
        std::fs::metadata(path).map(|metadata| stamp_of(&metadata))
    }
}

fn open(path: &Path, access: Access) -> io::Result<File> {
    match access {
        Access::PageCache => File::open(path),
        Access::Direct => open_direct(path),
    }
}

#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    // The flag is a bit that the system's own constant is made of, the same in both types.
    let flag = rustix::fs::OFlags::DIRECT.bits() as i32;
    File::options().read(true).custom_flags(flag).open(path)
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_path: &Path) -> io::Result<File> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

/// Whether an error of a file that was opened or read past the page cache means that its filesystem or
/// this system has no such reads.
pub(crate) fn has_no_direct_reads(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
}

#[derive(Debug)]
struct SystemFile(File);

impl ShardFile for SystemFile {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        read_at(&self.0, into, offset)
    }

    fn stamp(&self) -> io::Result<Stamp> {
        self.0.metadata().map(|metadata| stamp_of(&metadata))
    }

    fn map(&self, offset: u64, bytes: u64) -> Result<Mapping, MapError> {
        Mapping::new(&self.0, offset, bytes)
    }

    fn drop_pages(&self, offset: u64, bytes: u64) {
        drop_pages(&self.0, offset, bytes);
    }
}

#[cfg(unix)]
fn stamp_of(metadata: &Metadata) -> Stamp {
    use std::os::unix::fs::MetadataExt;
    Stamp {
        bytes: metadata.len(),
        modified_ns: i128::from(metadata.mtime()) * 1_000_000_000
            + i128::from(metadata.mtime_nsec()),
        device: metadata.dev(),
        inode: metadata.ino(),
        n_links: metadata.nlink(),
    }
}

#[cfg(not(unix))]
fn stamp_of(metadata: &Metadata) -> Stamp {
    let since_1970 =
        metadata.modified().ok().and_then(|m| m.duration_since(std::time::UNIX_EPOCH).ok());
    Stamp {
        bytes: metadata.len(),
        modified_ns: since_1970.map_or(0, |d| d.as_nanos() as i128),
        device: 0,
        inode: 0,
        n_links: 1,
    }
}

/// Whether this process may open no more files.
#[cfg(unix)]
pub(crate) fn is_out_of_handles(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error())
}

#[cfg(not(unix))]
pub(crate) fn is_out_of_handles(_error: &io::Error) -> bool {
    false
}

/// Raises the number of files that this process may open to what the system allows it; whether that
/// is more than before. A model of hundreds of shards is above the usual limit of some systems.
#[cfg(unix)]
fn raise_handle_limit() -> bool {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // `None` is no limit.
    let is_more = current.is_some() && maximum.is_none_or(|maximum| current < Some(maximum));
    is_more && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok()
}

#[cfg(not(unix))]
fn raise_handle_limit() -> bool {
    false
}

/// One read at an offset, as long as the system makes it.
#[cfg(unix)]
pub(crate) fn read_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, into, offset)
}

/// One read at an offset, as long as the system makes it.
#[cfg(windows)]
pub(crate) fn read_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, into, offset)
}

/// Pages of the page cache, as the kernel drops them: a part of one stays.
#[cfg(target_os = "linux")]
const PAGE_BYTES: u64 = 4096;

/// Tells the kernel that the pages will not be needed: whoever read them has a copy of its own. The
/// pages at both ends are dropped whole.
#[cfg(target_os = "linux")]
pub(crate) fn drop_pages(file: &File, offset: u64, bytes: u64) {
    use rustix::fs::{Advice, fadvise};
    let start = offset / PAGE_BYTES * PAGE_BYTES;
    let end = offset.saturating_add(bytes).div_ceil(PAGE_BYTES).saturating_mul(PAGE_BYTES);
    // Advice that is not taken costs memory that the kernel reclaims anyway; it is no error.
    let _ = fadvise(file, start, std::num::NonZeroU64::new(end - start), Advice::DontNeed);
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn drop_pages(_file: &File, _offset: u64, _bytes: u64) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_tells_what_was_written_from_what_was_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard");
        std::fs::write(&path, [1; 100]).unwrap();
        let open = SystemDisk.open(&path, Access::PageCache).unwrap();
        let first = open.stamp().unwrap();
        assert_eq!((first, first.bytes, first.n_links), (SystemDisk.stamp(&path).unwrap(), 100, 1));

        let file = File::options().write(true).open(&path).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        let written = open.stamp().unwrap();
        assert!(written.is_same_file(&first) && !written.is_unwritten_since(&first));

        let other = dir.path().join("other");
        std::fs::write(&other, [2; 100]).unwrap();
        std::fs::rename(&other, &path).unwrap();
        let (open, there) = (open.stamp().unwrap(), SystemDisk.stamp(&path).unwrap());
        assert!(open.is_unwritten_since(&written), "the open file is the old one");
        assert_eq!(open.n_links, 0);
        assert!(!there.is_same_file(&open));
    }
}
