//! Conversions on a disk that runs full, fails or gives other bytes back, at every operation in turn.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail as tests do")]

use std::fs;
use std::io::{self, ErrorKind};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use tierkeep_plans::catalogue::{Catalogue, PackedBits};
use tierkeep_plans::units::Bytes;

use super::disk::{OutputDisk, OutputFile, SystemOutput};
use super::{Bits, ConvertError, ConvertOptions, Execution, convert_on};

/// What is wrong with the disk.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The operation with this number, and every one after it, finds no space.
    FullFrom(u64),
    /// The disk has no room for this many bytes at a time.
    NoRoomOver(u64),
    /// Writes of this offset are changed.
    Flipped(u64),
    None,
}

#[derive(Debug)]
struct FaultyDisk {
    fault: Fault,
    n_operations: Arc<AtomicU64>,
}

impl FaultyDisk {
    fn new(fault: Fault) -> Self {
        Self { fault, n_operations: Arc::default() }
    }

    fn file(&self, file: Box<dyn OutputFile>) -> Box<dyn OutputFile> {
        let n_operations = Arc::clone(&self.n_operations);
        Box::new(FaultyFile { file, fault: self.fault, n_operations })
    }

    fn count(&self) -> io::Result<()> {
        count(self.fault, &self.n_operations)
    }
}

fn count(fault: Fault, n_operations: &AtomicU64) -> io::Result<()> {
    let number = n_operations.fetch_add(1, SeqCst);
    match fault {
        Fault::FullFrom(first) if number >= first => Err(ErrorKind::StorageFull.into()),
        Fault::FullFrom(_) | Fault::NoRoomOver(_) | Fault::Flipped(_) | Fault::None => Ok(()),
    }
}

impl OutputDisk for FaultyDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn OutputFile>> {
        self.count()?;
        Ok(self.file(SystemOutput.create(path)?))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn OutputFile>> {
        Ok(self.file(SystemOutput.open(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.count()?;
        SystemOutput.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        SystemOutput.remove(path)
    }
}

#[derive(Debug)]
struct FaultyFile {
    file: Box<dyn OutputFile>,
    fault: Fault,
    n_operations: Arc<AtomicU64>,
}

impl OutputFile for FaultyFile {
    fn reserve(&self, bytes: u64) -> io::Result<()> {
        if let Fault::NoRoomOver(room) = self.fault
            && bytes > room
        {
            return Err(ErrorKind::StorageFull.into());
        }
        count(self.fault, &self.n_operations)?;
        self.file.reserve(bytes)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        count(self.fault, &self.n_operations)?;
        match self.fault {
            Fault::Flipped(at) if (offset..offset + bytes.len() as u64).contains(&at) => {
                let mut bytes = bytes.to_vec();
                bytes[(at - offset) as usize] ^= 1;
                self.file.write_at(&bytes, offset)
            }
            _ => self.file.write_at(bytes, offset),
        }
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(into, offset)
    }

    fn sync(&self) -> io::Result<()> {
        count(self.fault, &self.n_operations)?;
        self.file.sync()
    }

    fn drop_pages(&self, offset: u64, bytes: u64) {
        self.file.drop_pages(offset, bytes);
    }
}

fn oracle() -> Catalogue {
    let tests = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles");
    Catalogue::open(&tests.join("olmoe")).unwrap()
}

fn attempt(disk: &FaultyDisk, out: &Path, execution: &Execution) -> Result<(), ConvertError> {
    let options = ConvertOptions {
        experts: Bits::Packed(PackedBits::Four).into(),
        shard_bytes: Bytes(200_000),
        ..ConvertOptions::default()
    };
    let mut go_on = |_| ControlFlow::Continue(());
    convert_on(disk, &oracle(), out, (&options, execution), &mut go_on).map(|_| ())
}

fn files(out: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(out)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap()))
        .collect();
    files.sort();
    files
}

#[test]
fn a_disk_that_runs_full_anywhere_leaves_whole_files_and_goes_on_with_room() {
    let whole = tempfile::tempdir().unwrap();
    let counted = FaultyDisk::new(Fault::None);
    let execution = Execution { threads: Some(2), ..Execution::default() };
    attempt(&counted, whole.path(), &execution).unwrap();
    let expected = files(whole.path());
    let n_operations = counted.n_operations.load(SeqCst);
    assert!(n_operations > 50, "{n_operations} operations");
    let out = tempfile::tempdir().unwrap();
    for first in (0..n_operations).step_by(7) {
        let error = attempt(&FaultyDisk::new(Fault::FullFrom(first)), out.path(), &execution);
        if let Err(error) = error {
            assert!(matches!(error, ConvertError::NoSpace { .. }), "operation {first}: {error}");
        }
        for (name, bytes) in files(out.path()) {
            if name.ends_with(".safetensors") {
                assert!(expected.contains(&(name.clone(), bytes)), "{name} after {first}");
            }
            assert!(!name.ends_with(".safetensors.partial") || first > 0, "{name} after {first}");
        }
        if out.path().join("config.json").exists() {
            break;
        }
    }
    if out.path().join("tierkeep-convert.partial").exists() {
        attempt(&FaultyDisk::new(Fault::None), out.path(), &execution).unwrap();
    }
    assert!(files(out.path()) == expected);
}

#[test]
fn room_is_taken_before_anything_is_written() {
    let out = tempfile::tempdir().unwrap();
    let error =
        attempt(&FaultyDisk::new(Fault::NoRoomOver(1000)), out.path(), &Execution::default());
    assert!(matches!(error, Err(ConvertError::NoSpace { .. })));
    assert!(files(out.path()).iter().all(|(name, _)| !name.contains(".safetensors")));
}

#[test]
fn a_byte_that_changes_on_its_way_is_found_where_files_are_read_back() {
    for at in [100, 150_000] {
        let disk = FaultyDisk::new(Fault::Flipped(at));
        let out = tempfile::tempdir().unwrap();
        let execution = Execution { read_back: true, ..Execution::default() };
        let error = attempt(&disk, out.path(), &execution);
        assert!(matches!(error, Err(ConvertError::NotAsWritten { .. })), "{error:?}");
        let out = tempfile::tempdir().unwrap();
        attempt(&disk, out.path(), &Execution::default()).unwrap();
    }
}
