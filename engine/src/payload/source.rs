//! Where payload bytes come from: files past the page cache, or what a test puts in their place.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use tierkeep_plans::catalogue::open_file;

use super::PayloadFile;
use super::holes::stored_ranges;
use crate::disk::{drop_pages, read_at};

/// Files that can be read at an offset, by their position in the list.
pub trait PayloadSource: Sync {
    /// Fills the beginning of `into` from `offset` of a file; fewer bytes are no fault, none is the
    /// end.
    ///
    /// # Errors
    /// What the system says.
    fn read_at(&self, file: usize, offset: u64, into: &mut [u8]) -> io::Result<usize>;

    /// The ranges of a file that are stored, in order; all of it unless the source knows better.
    fn stored_ranges(&self, _file: usize, file_bytes: u64) -> Vec<(u64, u64)> {
        vec![(0, file_bytes)]
    }
}

/// The files themselves. Reads go past the page cache where the filesystem allows it, for a page in
/// memory says nothing about the disk; elsewhere pages are dropped before each read and after it.
#[derive(Debug)]
pub struct FileSource {
    files: Vec<OneFile>,
}

#[derive(Debug)]
struct OneFile {
    path: PathBuf,
    /// Opened at the first read: a model may have more files than a process may keep open at once
    /// elsewhere, and one that cannot be opened is a finding about that file.
    direct: OnceLock<Option<File>>,
    buffered: OnceLock<Result<File, (io::ErrorKind, String)>>,
    direct_refused: AtomicBool,
}

impl FileSource {
    /// Of these files, in this order.
    #[must_use]
    pub fn new(files: &[PayloadFile]) -> Self {
        let files = files
            .iter()
            .map(|file| OneFile {
                path: file.path.clone(),
                direct: OnceLock::new(),
                buffered: OnceLock::new(),
                direct_refused: AtomicBool::new(false),
            })
            .collect();
        Self { files }
    }

    fn file(&self, at: usize) -> io::Result<&OneFile> {
        self.files.get(at).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl OneFile {
    fn buffered(&self) -> io::Result<&File> {
        self.buffered
            .get_or_init(|| open_file(&self.path).map_err(|e| (e.kind(), e.to_string())))
            .as_ref()
            .map_err(|(kind, message)| io::Error::new(*kind, message.clone()))
    }

    fn direct(&self) -> Option<&File> {
        if self.direct_refused.load(Relaxed) {
            return None;
        }
        self.direct.get_or_init(|| open_direct(&self.path)).as_ref()
    }
}

impl PayloadSource for FileSource {
    fn read_at(&self, file: usize, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let file = self.file(file)?;
        // The unaligned end of a file, and what follows a short read, go through the page cache.
        if let Some(aligned) = aligned_part(offset, into)
            && let Some(direct) = file.direct()
        {
            match read_at(direct, aligned, offset) {
                // Some filesystems take the flag and refuse the reads.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    file.direct_refused.store(true, Relaxed);
                }
                result => return result,
            }
        }
        let buffered = file.buffered()?;
        drop_pages(buffered, offset, into.len() as u64);
        let found = read_at(buffered, into, offset)?;
        drop_pages(buffered, offset, found as u64);
        Ok(found)
    }

    fn stored_ranges(&self, file: usize, file_bytes: u64) -> Vec<(u64, u64)> {
        match self.file(file).and_then(OneFile::buffered) {
            Ok(file) => stored_ranges(file, file_bytes),
            // Its reads will say what is wrong.
            Err(_) => vec![(0, file_bytes)],
        }
    }
}

/// Alignment of direct reads in the file and in memory, bytes.
const ALIGN: u64 = 4096;

/// What a direct read can fill of a buffer from an offset; `None` where it can fill nothing.
fn aligned_part(offset: u64, into: &mut [u8]) -> Option<&mut [u8]> {
    let align = ALIGN as usize;
    let length = into.len() - into.len() % align;
    let starts = offset.is_multiple_of(ALIGN) && (into.as_ptr() as usize).is_multiple_of(align);
    into.get_mut(..length).filter(|part| starts && !part.is_empty())
}

#[cfg(target_os = "linux")]
fn open_direct(path: &std::path::Path) -> Option<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT;
    rustix::fs::open(path, flags, Mode::empty()).ok().map(File::from)
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_path: &std::path::Path) -> Option<File> {
    None
}
