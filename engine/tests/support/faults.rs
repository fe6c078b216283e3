//! A disk that fails when it is told to, in front of the system's own.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "each test uses its part, stops where something is wrong, and says what it leaves out"
)]

use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, Mutex};

use tierkeep_engine::disk::{Access, Disk, MapError, Mapping, ShardFile, Stamp, SystemDisk};

/// What becomes of one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// At most so many bytes come.
    Short(usize),
    /// A signal comes first.
    Interrupted,
    /// EIO.
    Failed,
    /// The file is taken to end here.
    Ended,
}

/// A read that is asked for: the file, the offset, how many bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub file: String,
    pub offset: u64,
    pub bytes: usize,
}

/// Whether `file` can be read past the page cache. Where not, what needs it is left out, and standard
/// error says so.
pub fn takes_direct_reads(file: &Path) -> bool {
    let opened = SystemDisk.open(file, Access::Direct);
    if let Err(error) = &opened {
        eprintln!("no direct reads of {}: {error}; left out", file.display());
    }
    opened.is_ok()
}

/// Whether files are mapped on this system. Where not, what needs it is left out, and standard error
/// says so.
pub fn maps_files() -> bool {
    let page = tierkeep_mapping::page_bytes();
    let maps = tierkeep_mapping::IS_AVAILABLE && page == tierkeep_plans::budget::MAP_PAGE_BYTES;
    if !maps {
        eprintln!("no mappings of files here (pages of {page} bytes); left out");
    }
    maps
}

type Rule = Box<dyn FnMut(&Asked) -> Option<Fault> + Send>;
type Before = Arc<dyn Fn(&Asked) + Send + Sync>;

/// Which reads fail, and which were asked for.
#[derive(Clone)]
pub struct FaultyDisk(Arc<Mutex<State>>);

struct State {
    rule: Rule,
    before: Before,
    asked: Vec<Asked>,
}

impl std::fmt::Debug for FaultyDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FaultyDisk")
    }
}

impl FaultyDisk {
    /// A disk without faults.
    pub fn sound() -> Self {
        let (rule, before): (Rule, Before) = (Box::new(|_| None), Arc::new(|_| ()));
        Self(Arc::new(Mutex::new(State { rule, before, asked: Vec::new() })))
    }

    /// From now on reads are judged by `rule`.
    pub fn fail(&self, rule: impl FnMut(&Asked) -> Option<Fault> + Send + 'static) {
        self.0.lock().unwrap().rule = Box::new(rule);
    }

    /// From now on `before` is called ahead of each read, on the thread that reads: it may take its time,
    /// and others read meanwhile.
    pub fn slow(&self, before: impl Fn(&Asked) + Send + Sync + 'static) {
        self.0.lock().unwrap().before = Arc::new(before);
    }

    /// From now on every read succeeds.
    pub fn recover(&self) {
        self.fail(|_| None);
    }

    /// The reads since the last call.
    pub fn take_asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.0.lock().unwrap().asked)
    }

    fn judge(&self, asked: Asked) -> Option<Fault> {
        let mut state = self.0.lock().unwrap();
        let fault = (state.rule)(&asked);
        state.asked.push(asked);
        fault
    }
}

impl Disk for FaultyDisk {
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn ShardFile>> {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let file = SystemDisk.open(path, access)?;
        Ok(Box::new(FaultyFile { disk: self.clone(), name, file }))
    }

    fn stamp(&self, path: &Path) -> io::Result<Stamp> {
        SystemDisk.stamp(path)
    }
}

#[derive(Debug)]
struct FaultyFile {
    disk: FaultyDisk,
    name: String,
    file: Box<dyn ShardFile>,
}

impl ShardFile for FaultyFile {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let asked = Asked { file: self.name.clone(), offset, bytes: into.len() };
        let before = Arc::clone(&self.disk.0.lock().unwrap().before);
        before(&asked);
        match self.disk.judge(asked) {
            None => self.file.read_at(into, offset),
            Some(Fault::Short(bytes)) => {
                // Whole reads of the file, for one past the page cache may not be cut anywhere.
                let found = self.file.read_at(into, offset)?.min(bytes.max(1));
                // What has not come is whatever the memory held.
                into[found..].fill(0xa5);
                Ok(found)
            }
            Some(Fault::Interrupted) => Err(io::Error::from(ErrorKind::Interrupted)),
            Some(Fault::Failed) => {
                into.fill(0x5a);
                Err(io::Error::from_raw_os_error(5))
            }
            Some(Fault::Ended) => Ok(0),
        }
    }

    fn stamp(&self) -> io::Result<Stamp> {
        self.file.stamp()
    }

    fn map(&self, offset: u64, bytes: u64) -> Result<Mapping, MapError> {
        self.file.map(offset, bytes)
    }

    fn drop_pages(&self, offset: u64, bytes: u64) {
        self.file.drop_pages(offset, bytes);
    }
}
