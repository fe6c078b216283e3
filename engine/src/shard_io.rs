//! Reads from shards. Owns the open files, the handling of short and interrupted reads, and the
//! count of bytes; knows nothing of what the bytes mean.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tierkeep_plans::catalogue::Shard;
use tierkeep_plans::plan::IoMode;

/// Why bytes of a shard could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be opened.
    #[error("{}: {source}", path.display())]
    Open {
        /// The shard.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not the one that was catalogued.
    #[error("{} is {found} bytes long, it was {expected} when the model was read: it changed; plan again", path.display())]
    Changed {
        /// The shard.
        path: PathBuf,
        /// Its size in the catalogue.
        expected: u64,
        /// Its size now.
        found: u64,
    },
    /// The file ended or the disk failed.
    #[error("{}: read of {wanted} bytes at offset {offset} got {got}: {reason}", path.display())]
    Read {
        /// The shard.
        path: PathBuf,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        wanted: usize,
        /// Bytes that came.
        got: usize,
        /// What the system said, or that the file ended.
        reason: String,
    },
}

/// The open shards of a model.
#[derive(Debug)]
pub(crate) struct ShardFiles {
    files: Vec<(PathBuf, File)>,
    mode: IoMode,
    counter: ReadCounter,
}

/// A view of how much has been read, which can be kept while the engine works.
#[derive(Clone, Debug, Default)]
pub struct ReadCounter(Arc<[AtomicU64; 2]>);

impl ReadCounter {
    /// Bytes read from shards since they were opened.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0[0].load(Relaxed)
    }

    /// Number of reads.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.0[1].load(Relaxed)
    }

    fn add(&self, bytes: u64) {
        self.0[0].fetch_add(bytes, Relaxed);
        self.0[1].fetch_add(1, Relaxed);
    }
}

impl ShardFiles {
    /// Opens every shard and checks that it still has its catalogued size.
    ///
    /// # Errors
    /// [`ReadError::Open`] or [`ReadError::Changed`].
    pub(crate) fn open(shards: &[Shard], mode: IoMode) -> Result<Self, ReadError> {
        let files = shards
            .iter()
            .map(|shard| {
                let open = |source| ReadError::Open { path: shard.path.clone(), source };
                let file = File::open(&shard.path).map_err(open)?;
                let found = file.metadata().map_err(open)?.len();
                if found != shard.bytes {
                    let path = shard.path.clone();
                    return Err(ReadError::Changed { path, expected: shard.bytes, found });
                }
                Ok((shard.path.clone(), file))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { files, mode, counter: ReadCounter::default() })
    }

    /// Fills `into` from `offset` of a shard.
    ///
    /// # Errors
    /// [`ReadError::Read`] with file, offset, wanted and got.
    pub(crate) fn read(&self, shard: u32, offset: u64, into: &mut [u8]) -> Result<(), ReadError> {
        let Some((path, file)) = self.files.get(shard as usize) else {
            return Err(ReadError::Open {
                path: PathBuf::from(format!("shard {shard}")),
                source: io::Error::from(ErrorKind::NotFound),
            });
        };
        let wanted = into.len();
        fill(|at, rest| read_at(file, rest, offset + at as u64), into).map_err(
            |(got, reason)| ReadError::Read { path: path.clone(), offset, wanted, got, reason },
        )?;
        if self.mode == IoMode::Dropped {
            drop_pages(file, offset, wanted as u64);
        }
        self.counter.add(wanted as u64);
        Ok(())
    }

    /// How much has been read.
    pub(crate) fn counter(&self) -> &ReadCounter {
        &self.counter
    }
}

/// Reads a range of a file that is not kept open.
///
/// # Errors
/// [`ReadError`].
pub(crate) fn read_range(path: &Path, offset: u64, bytes: u64) -> Result<Vec<u8>, ReadError> {
    let open = |source| ReadError::Open { path: path.to_owned(), source };
    let bytes_found = std::fs::metadata(path).map_err(open)?.len();
    let shard = Shard { path: path.to_owned(), bytes: bytes_found };
    let mut into = vec![0; bytes as usize];
    ShardFiles::open(&[shard], IoMode::Buffered)?.read(0, offset, &mut into)?;
    Ok(into)
}

/// Calls `read(position, rest)` until `into` is full; interrupted and short reads go on.
fn fill(
    mut read: impl FnMut(usize, &mut [u8]) -> io::Result<usize>,
    into: &mut [u8],
) -> Result<(), (usize, String)> {
    let mut got = 0;
    while got < into.len() {
        match read(got, &mut into[got..]) {
            Ok(0) => return Err((got, "the file ended".to_owned())),
            Ok(n) => got += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err((got, e.to_string())),
        }
    }
    Ok(())
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

/// Tells the kernel that the pages will not be needed: whoever read them has a copy of its own.
#[cfg(target_os = "linux")]
pub(crate) fn drop_pages(file: &File, offset: u64, bytes: u64) {
    use rustix::fs::{Advice, fadvise};
    // Advice that is not taken costs memory that the kernel reclaims anyway; it is no error.
    let _ = fadvise(file, offset, std::num::NonZeroU64::new(bytes), Advice::DontNeed);
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn drop_pages(_file: &File, _offset: u64, _bytes: u64) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_interrupted_reads_go_on() {
        let data: Vec<u8> = (0..100).collect();
        let mut calls = 0;
        let mut into = vec![0; 100];
        fill(
            |at, rest| {
                calls += 1;
                if calls % 2 == 0 {
                    return Err(io::Error::from(ErrorKind::Interrupted));
                }
                let n = rest.len().min(7);
                rest[..n].copy_from_slice(&data[at..at + n]);
                Ok(n)
            },
            &mut into,
        )
        .unwrap();
        assert_eq!(into, data);
    }

    #[test]
    fn the_end_of_a_file_and_a_failing_disk_say_how_far_they_got() {
        let mut into = vec![0; 10];
        let ended = fill(|at, _| Ok(if at == 0 { 4 } else { 0 }), &mut into).unwrap_err();
        assert_eq!(ended, (4, "the file ended".to_owned()));
        let failed = fill(|_, _| Err(io::Error::other("EIO")), &mut into).unwrap_err();
        assert_eq!(failed, (0, "EIO".to_owned()));
    }

    #[test]
    fn errors_name_file_offset_wanted_and_got() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        std::fs::write(&path, [7; 64]).unwrap();
        let shards = [Shard { path: path.clone(), bytes: 64 }];
        let files = ShardFiles::open(&shards, IoMode::Dropped).unwrap();
        let mut into = [0; 16];
        files.read(0, 48, &mut into).unwrap();
        assert_eq!((into, files.counter().bytes(), files.counter().reads()), ([7; 16], 16, 1));
        let error = files.read(0, 56, &mut into).unwrap_err().to_string();
        assert!(error.contains("read of 16 bytes at offset 56 got 8: the file ended"), "{error}");
        assert!(files.read(9, 0, &mut into).is_err());
        std::fs::write(&path, [7; 60]).unwrap();
        assert!(matches!(
            ShardFiles::open(&shards, IoMode::Dropped),
            Err(ReadError::Changed { expected: 64, found: 60, .. })
        ));
    }
}
