//! Mapped ranges on Linux: made, filled and unmapped. What happens when a page is lost is
//! `signal`'s.
#![expect(unsafe_code, reason = "memory is mapped, lent as a slice and unmapped")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};

use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::MapError;
use crate::signal::{self, Node};

/// A mapped range of a file, read-only and private to this process.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    length: usize,
    node: &'static Node,
}

// SAFETY: the memory is only ever read, and belongs to the mapping until it is dropped.
unsafe impl Send for Mapping {}
// SAFETY: as above: shared references read alone.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` from `offset`, which is a multiple of [`page_bytes`]. Nothing is read yet. The last page
    /// is mapped whole; what it has past the end of the file is zeros.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn new(file: &File, offset: u64, bytes: u64) -> Result<Self, MapError> {
        let page_bytes = page_bytes();
        if !offset.is_multiple_of(page_bytes) {
            return Err(MapError::Misaligned { offset, page_bytes });
        }
        let length = usize::try_from(bytes).ok().filter(|&n| n > 0 && n <= isize::MAX as usize);
        let length = length.ok_or(MapError::Length { bytes })?;
        signal::install()?;
        // SAFETY: no address is asked for, so that no memory in use is replaced, and the file is only read:
        // what is mapped is this value's own until it unmaps it.
        let start = unsafe {
            mm::mmap(ptr::null_mut(), length, ProtFlags::READ, MapFlags::PRIVATE, file, offset)
        };
        let start = NonNull::new(start.map_err(io::Error::from)?.cast::<u8>())
            .ok_or(MapError::Length { bytes })?;
        let whole = length.next_multiple_of(page_bytes as usize);
        let node = signal::register(start.as_ptr() as usize, whole);
        Ok(Self { start, length, node })
    }

    /// Its bytes, as the file has them now; zeros from [`Mapping::lost`] on.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `length` bytes from `start` are mapped readable until `self` is dropped, and at most
        // `isize::MAX` (`new`). A page that cannot be brought in is replaced by zeros. Nobody in this process
        // writes to them. That other processes may write to the file is what no program can exclude: see the
        // crate's documentation, and what it asks of callers.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    /// Asks the system to begin bringing pages in. Advice: it fails silently, and `populate` tells.
    pub fn will_need(&self, range: Range<usize>) {
        let _ = self.advise(range, Advice::WillNeed);
    }

    /// Brings in all pages of a range and maps them, so that the first use does not wait for a disk. Under
    /// memory pressure they may be gone again by then.
    ///
    /// # Errors
    /// What the system says when a page cannot be brought in: the file ends before it, or the disk failed.
    pub fn populate(&self, range: Range<usize>) -> io::Result<()> {
        loop {
            return match self.advise(range.clone(), Advice::LinuxPopulateRead) {
                Err(rustix::io::Errno::INTR) => continue,
                // Kernels before 5.14 do not know the advice.
                Err(rustix::io::Errno::INVAL) => self.touch(range),
                other => other.map_err(io::Error::from),
            };
        }
    }

    fn advise(&self, range: Range<usize>, advice: Advice) -> rustix::io::Result<()> {
        let page = page_bytes() as usize;
        let start = range.start.min(self.length) / page * page;
        let length = range.end.min(self.length).saturating_sub(start);
        if length == 0 {
            return Ok(());
        }
        // SAFETY: the range is inside the mapping, and neither advice changes what its bytes are.
        unsafe { mm::madvise(self.start.as_ptr().add(start).cast(), length, advice) }
    }

    /// One byte of each page is read.
    fn touch(&self, range: Range<usize>) -> io::Result<()> {
        let bytes = &self.bytes()[range.start.min(self.length)..range.end.min(self.length)];
        for page in bytes.chunks(page_bytes() as usize) {
            // SAFETY: a reference to a byte is valid to be read; volatile, so that it is read.
            let _ = page.first().map(|byte| unsafe { ptr::from_ref(byte).read_volatile() });
        }
        match self.lost() {
            Some(at) if at < range.end as u64 => {
                Err(io::Error::other("a page could not be brought in"))
            }
            _ => Ok(()),
        }
    }

    /// The first byte, counted from the mapping's own beginning, from which on zeros stand for what could
    /// not be brought in; `None` while nothing was lost. It never recovers.
    #[must_use]
    pub fn lost(&self) -> Option<u64> {
        self.node.lost().map(|at| at as u64)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.node.retire();
        // SAFETY: the memory was mapped by `new` and nobody borrows it any more. What failing would leave
        // behind is address space.
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// Times that a page of some mapping of this process could not be brought in. A rise says that
/// [`Mapping::lost`] is to be asked.
#[must_use]
pub fn faults() -> u64 {
    signal::faults()
}

/// The size of a page of this system.
#[must_use]
pub fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}
