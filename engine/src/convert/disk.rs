//! The system behind the output, as a trait that tests put faults behind. Owns what is asked of it and
//! the system's own answer.

use std::fmt::Debug;
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Where output goes.
pub(super) trait OutputDisk: Debug + Sync {
    /// Makes a file anew, to be read as well as written.
    fn create(&self, path: &Path) -> io::Result<Box<dyn OutputFile>>;

    /// Opens a file to be read.
    fn open(&self, path: &Path) -> io::Result<Box<dyn OutputFile>>;

    /// Gives a file another name in the same folder.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// One file of the output.
pub(super) trait OutputFile: Debug + Send + Sync {
    /// Takes room for so many bytes now, where the filesystem can; whatever else, the file is that long
    /// afterwards.
    fn reserve(&self, bytes: u64) -> io::Result<()>;

    /// Writes all of it at an offset.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// One read at an offset, as long as the system makes it; 0 at the end.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Brings what was written to the disk.
    fn sync(&self) -> io::Result<()>;

    /// Drops pages of a range that are on the disk.
    fn drop_pages(&self, offset: u64, bytes: u64);
}

/// The disk of this machine.
#[derive(Debug)]
pub(super) struct SystemOutput;

impl OutputDisk for SystemOutput {
    fn create(&self, path: &Path) -> io::Result<Box<dyn OutputFile>> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        Ok(Box::new(SystemFile(file)))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn OutputFile>> {
        Ok(Box::new(SystemFile(File::open(path)?)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

#[derive(Debug)]
struct SystemFile(File);

impl OutputFile for SystemFile {
    fn reserve(&self, bytes: u64) -> io::Result<()> {
        match take_room(&self.0, bytes) {
            Err(error) if is_unsupported(&error) => self.0.set_len(bytes),
            other => other,
        }
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        write_all_at(&self.0, bytes, offset)
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        crate::disk::read_at(&self.0, into, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }

    fn drop_pages(&self, offset: u64, bytes: u64) {
        crate::disk::drop_pages(&self.0, offset, bytes);
    }
}

#[cfg(target_os = "linux")]
fn take_room(file: &File, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes)?;
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn take_room(_file: &File, _bytes: u64) -> io::Result<()> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

fn is_unsupported(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
}

#[cfg(unix)]
fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
fn write_all_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !bytes.is_empty() {
        match file.seek_write(bytes, offset) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero)),
            Ok(n) => (bytes, offset) = (&bytes[n..], offset + n as u64),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
