//! The files that disk reads are measured on.
//!
//! Owns the opening of files past the page cache, the finding of what of them is stored, and the
//! temporary file for where there is none. Refuses holes, filesystems that keep their files in memory,
//! and to leave a file behind: the temporary one never has a name.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, Mode, OFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};

/// Offsets, lengths and addresses of direct reads are multiples of this. Devices ask for 512 or 4096.
pub(crate) const ALIGNMENT_BYTES: u64 = 4096;

/// Of more files than this, so many are measured, evenly spread.
const MAX_FILES: usize = 64;

/// Files with more pieces than this are measured on their first ones.
const MAX_EXTENTS: usize = 4096;

/// Files of which less than this part is stored are holes: the headers of a model without its data.
const STORED_PART: u64 = 10;

/// Sizes of the temporary file.
const SCRATCH_BYTES: (u64, u64) = (64 << 20, 1 << 30);

/// A temporary file takes no more than this part of the free space.
const SCRATCH_PART_OF_FREE: u64 = 4;

/// It is written in steps of this size, each brought to disk, and for no longer than this.
const SCRATCH_STEP_BYTES: u64 = 16 << 20;
const SCRATCH_TIME: Duration = Duration::from_millis(1500);

/// How reads get past the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By `O_DIRECT`.
    Direct,
    /// Through the page cache, from which the pages are dropped before.
    Dropped,
}

/// A file to read from.
#[derive(Debug)]
pub(crate) struct DataFile {
    pub(crate) name: String,
    pub(crate) way: Way,
    file: File,
    /// Ranges that are stored, holes left out.
    pub(crate) ranges: Vec<(u64, u64)>,
    size_bytes: u64,
}

/// What became of one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// So many bytes from the disk.
    Fetched(u64),
    /// So many bytes, which were in the page cache in spite of having been dropped.
    Cached(u64),
}

/// Opens files, each given as what it is called and where it is. Those that cannot be measured are left
/// out as long as there are others.
pub(crate) fn open_all(paths: &[(String, PathBuf)]) -> Result<Vec<DataFile>, String> {
    let step = paths.len().div_ceil(MAX_FILES).max(1);
    let mut files = Vec::new();
    let mut problems = Vec::new();
    for (name, path) in paths.iter().step_by(step) {
        match open(name, path) {
            Ok(file) => files.push(file),
            Err(problem) => problems.push(problem),
        }
    }
    let (stored, size) = files.iter().fold((0_u64, 0_u64), |(stored, size), file| {
        (stored.saturating_add(file.stored_bytes()), size.saturating_add(file.size_bytes))
    });
    match problems.into_iter().next() {
        Some(problem) if files.is_empty() => return Err(problem),
        None if files.is_empty() => return Err("no file to measure with was given".to_owned()),
        Some(_) | None => {}
    }
    if stored < size / STORED_PART {
        return Err(format!(
            "not measurable: the files are holes, {stored} of their {size} bytes are stored"
        ));
    }
    Ok(files)
}

impl DataFile {
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.ranges.iter().map(|(start, end)| end.saturating_sub(*start)).sum()
    }

    /// One read of a whole buffer past the page cache; fewer bytes than asked for count as such.
    pub(crate) fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<Read, String> {
        let failed =
            |error: std::io::Error| format!("cannot read {} at {offset}: {error}", self.name);
        match self.way {
            Way::Direct => read_once(&self.file, buffer, offset).map(Read::Fetched).map_err(failed),
            Way::Dropped => {
                let length = std::num::NonZeroU64::new(buffer.len() as u64);
                // Advice is not binding, which is why it is checked; in the middle, for pages at the
                // ends may belong together with others that stay.
                let _ = rustix::fs::fadvise(&self.file, offset, length, Advice::DontNeed);
                let is_cached = self.is_cached(offset.saturating_add(buffer.len() as u64 / 2))?;
                let bytes = read_once(&self.file, buffer, offset).map_err(failed)?;
                Ok(if is_cached { Read::Cached(bytes) } else { Read::Fetched(bytes) })
            }
        }
    }

    /// Whether a byte is in the page cache: a read that must not wait returns it only then.
    fn is_cached(&self, offset: u64) -> Result<bool, String> {
        let mut byte = [0_u8];
        let mut buffers = [std::io::IoSliceMut::new(&mut byte)];
        match rustix::io::preadv2(&self.file, &mut buffers, offset, ReadWriteFlags::NOWAIT) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN) => Ok(false),
            Err(error) => Err(format!(
                "not measurable: the filesystem of {} refuses reads past the page cache and does not \
                 tell what it has cached: {error}",
                self.name
            )),
        }
    }
}

fn read_once(file: &File, buffer: &mut [u8], offset: u64) -> std::io::Result<u64> {
    loop {
        match file.read_at(buffer, offset) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            result => return result.map(|bytes| bytes as u64),
        }
    }
}

fn open(name: &str, path: &Path) -> Result<DataFile, String> {
    let plain = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let open = |flags| rustix::fs::open(path, flags, Mode::empty()).map(File::from);
    let cannot = |error: Errno| format!("cannot open {name}: {error}");
    let (file, mut way) = match open(plain | OFlags::DIRECT) {
        Ok(file) => (file, Way::Direct),
        Err(Errno::INVAL) => (open(plain).map_err(cannot)?, Way::Dropped),
        Err(error) => return Err(cannot(error)),
    };
    refuse_caches(name, &file)?;
    let (ranges, size_bytes) = stored_ranges(name, &file)?;
    let mut file = file;
    // Some filesystems take the flag and refuse the reads.
    if way == Way::Direct && refuses_direct_reads(&file, &ranges) {
        (file, way) = (open(plain).map_err(cannot)?, Way::Dropped);
    }
    if way == Way::Dropped {
        forget(&file);
    }
    Ok(DataFile { name: name.to_owned(), way, file, ranges, size_bytes })
}

/// Drops what the page cache has of a file, and keeps reads from bringing their neighbours along.
fn forget(file: &File) {
    // A filesystem that takes no advice is found out when its reads are.
    let _ = rustix::fs::fadvise(file, 0, None, Advice::DontNeed);
    let _ = rustix::fs::fadvise(file, 0, None, Advice::Random);
}

fn refuses_direct_reads(file: &File, ranges: &[(u64, u64)]) -> bool {
    let Some(&(start, _)) = ranges.first() else { return false };
    let Ok(mut buffer) = AlignedBuffer::new(ALIGNMENT_BYTES) else { return false };
    let offset = start / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
    let result = read_once(file, buffer.as_mut_slice(), offset);
    result.is_err_and(|error| error.kind() == std::io::ErrorKind::InvalidInput)
}

/// Refuses filesystems that take a direct read and answer it from memory. `tmpfs` takes them since
/// Linux 6.6; ZFS had no direct reads before 2.3 and answered from its own cache. The numbers are
/// those of statfs(2).
fn refuse_caches(name: &str, file: &File) -> Result<(), String> {
    let filesystem = rustix::fs::fstatfs(file)
        .map_err(|error| format!("cannot find the filesystem of {name}: {error}"))?;
    // The type's width and sign differ between architectures; all these numbers fit 32 bits.
    let keeper = match filesystem.f_type as u32 {
        0x0102_1994 => "tmpfs keeps it in memory",
        0x8584_58f6 => "ramfs keeps it in memory",
        0x2fc1_2fc1 => "zfs may answer direct reads from its own cache",
        _ => return Ok(()),
    };
    Err(format!("not measurable: {name}: {keeper}"))
}

/// The ranges of a file that are stored, holes left out, and its size.
fn stored_ranges(name: &str, file: &File) -> Result<(Vec<(u64, u64)>, u64), String> {
    let failed = |error: std::io::Error| format!("cannot examine {name}: {error}");
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(format!("{name} is not a regular file"));
    }
    let size = metadata.len();
    let mut ranges = Vec::new();
    let mut position = 0;
    while position < size && ranges.len() < MAX_EXTENTS {
        let data = match rustix::fs::seek(file, SeekFrom::Data(position)) {
            Ok(data) => data,
            // Nothing but a hole up to the end.
            Err(Errno::NXIO) => break,
            Err(error) => return Err(failed(error.into())),
        };
        let hole =
            rustix::fs::seek(file, SeekFrom::Hole(data)).map_err(|error| failed(error.into()))?;
        ranges.push((data, hole.min(size)));
        position = hole.max(position + 1);
    }
    let ranges_bytes: u64 = ranges.iter().map(|(start, end)| end.saturating_sub(*start)).sum();
    if size > 0 && ranges_bytes == 0 {
        return Err(format!("not measurable: {name} is one hole, nothing of it is stored"));
    }
    // Filesystems that cannot tell holes call everything data. What takes much less room than that
    // is sparse, compressed or not written out yet.
    let on_disk_bytes = metadata.blocks().saturating_mul(512);
    if ranges.len() < MAX_EXTENTS && on_disk_bytes < ranges_bytes / 10 * 9 {
        return Err(format!(
            "not measurable: {name} has {ranges_bytes} bytes of data in {on_disk_bytes} bytes on \
             disk; it is sparse, compressed or not written out yet"
        ));
    }
    Ok((ranges, size))
}

/// A temporary file in `folder` for reads of `read_bytes`, written with bytes that do not compress
/// and brought to disk. It never has a name, so nothing is left of it whatever happens.
pub(crate) fn scratch(folder: &Path, read_bytes: u64) -> Result<DataFile, String> {
    let cannot = |what: &str, error: std::io::Error| {
        format!("cannot {what} a temporary file in {}: {error}", folder.display())
    };
    let space = rustix::fs::statvfs(folder).map_err(|error| cannot("make", error.into()))?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    let (least, most) = SCRATCH_BYTES;
    let wanted = read_bytes.saturating_mul(32).clamp(4 * least, most);
    let bytes = wanted.min(free / SCRATCH_PART_OF_FREE);
    if bytes < least {
        return Err(format!(
            "not measured: {} has {free} bytes free, a temporary file takes {} and no more than a \
             quarter of that",
            folder.display(),
            least
        ));
    }
    let file = tempfile::tempfile_in(folder).map_err(|error| cannot("make", error))?;
    let name = format!("a temporary file in {}", folder.display());
    // Before anything is written: memory is no disk, and writing there would take it.
    refuse_caches(&name, &file)?;
    fill(&file, bytes).map_err(|error| cannot("write", error))?;
    let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
    // The name that the kernel keeps for an open file opens it again with another way of reading.
    open(&name, Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())))
}

fn fill(mut file: &File, bytes: u64) -> std::io::Result<()> {
    let deadline = Instant::now() + SCRATCH_TIME;
    let step = usize::try_from(SCRATCH_STEP_BYTES).unwrap_or(1 << 20);
    let mut block = vec![0_u8; step];
    // Xorshift (Marsaglia, 2003): no disk makes less of it.
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut written = 0;
    let (least, _) = SCRATCH_BYTES;
    while written < bytes && (written < least || Instant::now() < deadline) {
        for word in block.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        file.write_all(&block)?;
        // So that the clock counts what reaches the disk, and little waits to be written at the end.
        file.sync_data()?;
        written += block.len() as u64;
    }
    file.sync_all()
}

/// A buffer whose address suits direct reads.
pub(crate) struct AlignedBuffer {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl AlignedBuffer {
    pub(crate) fn new(length: u64) -> Result<Self, String> {
        let (Ok(length), Ok(alignment)) =
            (usize::try_from(length), usize::try_from(ALIGNMENT_BYTES))
        else {
            return Err(format!("a read of {length} bytes is too large for this machine"));
        };
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(length + alignment)
            .map_err(|error| format!("no memory for a read of {length} bytes: {error}"))?;
        bytes.resize(length + alignment, 0);
        let start = bytes.as_ptr().align_offset(alignment).min(alignment);
        Ok(Self { bytes, start, length })
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..self.start + self.length).unwrap_or_default()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned() {
        for length in [4096, 1 << 20] {
            let mut buffer = AlignedBuffer::new(length).unwrap();
            let slice = buffer.as_mut_slice();
            assert_eq!(slice.len() as u64, length);
            assert_eq!(slice.as_ptr() as usize % 4096, 0);
        }
    }

    /// A folder in the build directory: the usual one for temporary files may lie in memory.
    fn folder() -> tempfile::TempDir {
        let beside = std::env::current_exe().unwrap();
        tempfile::TempDir::new_in(beside.parent().unwrap()).unwrap()
    }

    /// A file as if direct reads were refused.
    fn dropped(path: &Path) -> DataFile {
        let file = File::open(path).unwrap();
        let (ranges, size_bytes) = stored_ranges("x", &file).unwrap();
        DataFile { name: "x".to_owned(), way: Way::Dropped, file, ranges, size_bytes }
    }

    #[test]
    fn what_the_page_cache_answers_is_recognised() {
        let folder = folder();
        let path = folder.path().join("x");
        let mut file = File::create(&path).unwrap();
        file.write_all(&vec![7; 1 << 20]).unwrap();
        file.sync_all().unwrap();
        let data = dropped(&path);
        let mut buffer = vec![0; 4096];
        // Just written, so it is cached; some filesystems (overlays of old kernels) cannot tell.
        let Ok(is_cached) = data.is_cached(0) else { return };
        assert!(is_cached);
        // Dropped before it is read, it is fetched. Pages that another process maps or writes would
        // stay; nobody else knows this file.
        forget(&data.file);
        assert_eq!(data.read_at(&mut buffer, 0), Ok(Read::Fetched(4096)));
        assert!(buffer.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn a_temporary_file_leaves_nothing_behind() {
        let folder = folder();
        let free = rustix::fs::statvfs(folder.path()).unwrap();
        if free.f_bavail * free.f_frsize < 4 * SCRATCH_BYTES.0 {
            let refusal = scratch(folder.path(), 4096).unwrap_err();
            assert!(refusal.contains("bytes free"), "{refusal}");
            return;
        }
        let data = scratch(folder.path(), 4096).unwrap();
        assert!(data.stored_bytes() >= SCRATCH_BYTES.0, "{}", data.stored_bytes());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let mut buffer = AlignedBuffer::new(4096).unwrap();
        assert!(matches!(data.read_at(buffer.as_mut_slice(), 4096), Ok(Read::Fetched(4096))));
        assert!(scratch(&folder.path().join("none"), 4096).unwrap_err().contains("cannot make"));
    }
}
