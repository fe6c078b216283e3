//! One weight file in work, under its unfinished name. Owns the checksum of what is written, room taken
//! before, and how much of it the page cache may hold; the order of what is written is its caller's.

use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tierkeep_plans::units::Bytes;

use super::ConvertError;
use super::disk::{OutputDisk, OutputFile};
use super::output::failed;

/// Written bytes after which they are brought to the disk and their pages dropped: two of these, and
/// what the writer is ahead, are what the page cache holds of the output.
const FLUSH_BYTES: u64 = 32 << 20;
/// Bytes of one read when a file is read back.
const READ_BYTES: usize = 1 << 20;

/// One weight file in work.
pub(super) struct ShardWriter<'a> {
    disk: &'a dyn OutputDisk,
    file: Arc<dyn OutputFile>,
    partial: PathBuf,
    needed: Bytes,
    at: u64,
    hasher: blake3::Hasher,
    flusher: Option<Flusher>,
    flushed: u64,
}

/// Brings ranges to the disk while the writer goes on.
struct Flusher {
    ranges: SyncSender<(u64, u64)>,
    thread: JoinHandle<()>,
    fault: Arc<Mutex<Option<std::io::Error>>>,
}

impl Flusher {
    /// `None` where no thread can be started: the last sync then brings all of it.
    fn start(file: &Arc<dyn OutputFile>) -> Option<Self> {
        let (ranges, wanted) = sync_channel::<(u64, u64)>(0);
        let fault = Arc::new(Mutex::new(None));
        let (file, into) = (Arc::clone(file), Arc::clone(&fault));
        let run = move || {
            for (offset, bytes) in wanted {
                match file.sync() {
                    Ok(()) => file.drop_pages(offset, bytes),
                    Err(error) => {
                        *into.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                        return;
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("flush".to_owned()).spawn(run).ok()?;
        Some(Self { ranges, thread, fault })
    }

    /// Waits for it; what it failed with.
    fn end(self) -> std::io::Result<()> {
        drop(self.ranges);
        let _ = self.thread.join();
        let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner).take();
        fault.map_or(Ok(()), Err)
    }
}

impl<'a> ShardWriter<'a> {
    /// Makes the file and takes room for all of it.
    pub(super) fn create(
        disk: &'a dyn OutputDisk,
        partial: PathBuf,
        bytes: u64,
        needed: Bytes,
    ) -> Result<Self, ConvertError> {
        let file = disk.create(&partial).map_err(|e| failed(&partial, "create", needed, e))?;
        let file: Arc<dyn OutputFile> = Arc::from(file);
        let writer = Self {
            disk,
            flusher: Flusher::start(&file),
            file,
            partial,
            needed,
            at: 0,
            hasher: blake3::Hasher::new(),
            flushed: 0,
        };
        match writer.file.reserve(bytes) {
            Ok(()) => Ok(writer),
            Err(error) => {
                let error = writer.fault("take room", error);
                writer.abandon();
                Err(error)
            }
        }
    }

    fn fault(&self, doing: &'static str, error: std::io::Error) -> ConvertError {
        failed(&self.partial, doing, self.needed, error)
    }

    /// Bytes that are written and checksummed.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    /// Writes where the file stands.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), ConvertError> {
        self.file.write_at(bytes, self.at).map_err(|e| self.fault("write", e))?;
        self.hasher.update(bytes);
        self.at += bytes.len() as u64;
        self.flush_behind()
    }

    /// Writes further on, where [`ShardWriter::take_in`] will come by.
    pub(super) fn write_apart(&self, bytes: &[u8], at: u64) -> Result<(), ConvertError> {
        self.file.write_at(bytes, at).map_err(|e| self.fault("write", e))
    }

    /// Takes in what was written apart: reads it again, a run at a time, for its checksum.
    pub(super) fn take_in(&mut self, bytes: u64, run: u64) -> Result<(), ConvertError> {
        let end = self.at + bytes;
        let mut buffer = vec![0; run.min(bytes) as usize];
        while self.at < end {
            let wanted = buffer.len().min((end - self.at) as usize);
            let n = self
                .file
                .read_at(&mut buffer[..wanted], self.at)
                .map_err(|e| self.fault("read back", e))?;
            if n == 0 {
                return Err(self.fault("read back", std::io::ErrorKind::UnexpectedEof.into()));
            }
            self.hasher.update(&buffer[..n]);
            self.at += n as u64;
        }
        self.flush_behind()
    }

    fn flush_behind(&mut self) -> Result<(), ConvertError> {
        let bytes = self.at - self.flushed;
        if bytes < FLUSH_BYTES {
            return Ok(());
        }
        let sent = self.flusher.as_ref().map(|f| f.ranges.send((self.flushed, bytes)));
        self.flushed = self.at;
        match sent {
            Some(Err(_)) => self.end_flusher(),
            Some(Ok(())) | None => Ok(()),
        }
    }

    fn end_flusher(&mut self) -> Result<(), ConvertError> {
        let ended = self.flusher.take().map_or(Ok(()), Flusher::end);
        ended.map_err(|e| self.fault("write", e))
    }

    /// Brings the file to the disk; its size and checksum. With `read_back` it is read from there and
    /// compared.
    pub(super) fn finish(mut self, read_back: bool) -> Result<(u64, String), ConvertError> {
        let bytes = self.at;
        let result = self.end_flusher().and_then(|()| {
            self.file.sync().map_err(|e| self.fault("write", e))?;
            self.file.drop_pages(0, bytes);
            let hash = self.hasher.finalize();
            if read_back {
                let again = hash_file(self.file.as_ref(), bytes, &mut |_| true)
                    .map_err(|e| self.fault("read back", e))?;
                if again != Some(hash) {
                    return Err(ConvertError::NotAsWritten { path: self.partial.clone() });
                }
            }
            Ok((bytes, hash.to_hex().to_string()))
        });
        if result.is_err() {
            self.abandon();
        }
        result
    }

    /// Removes what there is of it: nobody goes on with half a file, and its room is wanted.
    pub(super) fn abandon(mut self) {
        let _ = self.end_flusher();
        let _ = self.disk.remove(&self.partial);
    }
}

/// The checksum of the first `bytes` bytes of a file, past the page cache as far as that goes. `None`
/// where `go_on`, which is told the bytes of each read, says to stop.
pub(super) fn hash_file(
    file: &dyn OutputFile,
    bytes: u64,
    go_on: &mut dyn FnMut(u64) -> bool,
) -> std::io::Result<Option<blake3::Hash>> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; READ_BYTES];
    let mut at = 0;
    while at < bytes {
        let wanted = buffer.len().min((bytes - at) as usize);
        let n = file.read_at(&mut buffer[..wanted], at)?;
        if n == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        hasher.update(&buffer[..n]);
        file.drop_pages(at, n as u64);
        at += n as u64;
        if !go_on(n as u64) {
            return Ok(None);
        }
    }
    Ok(Some(hasher.finalize()))
}
