//! What this process holds and has read.
//!
//! Owns figures that change while a program runs. Refuses to add up or judge them: the caller
//! compares them with its budget.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cgroup;
use crate::fact::Fact;
use crate::parse;
use crate::tree::Tree;

/// Memory of this process, as the kernel counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessMemory {
    /// Resident anonymous memory.
    pub rss_anon_bytes: u64,
    /// Resident pages of mapped files.
    pub rss_file_bytes: u64,
    /// Resident shared memory.
    pub rss_shmem_bytes: u64,
    /// The most that was resident at once (`VmHWM`).
    pub peak_rss_bytes: u64,
    /// Anonymous memory in swap.
    pub swap_bytes: u64,
    /// Memory locked against swapping.
    pub locked_bytes: u64,
}

/// What this process has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessIo {
    /// Bytes fetched from storage for this process, page faults and read-ahead included.
    pub read_bytes: u64,
    /// Bytes returned by read calls, wherever they came from.
    pub rchar_bytes: u64,
}

/// Memory of this process now.
pub fn memory() -> Fact<ProcessMemory> {
    memory_in(&Tree::live())
}

/// Sets the mark of the most that was resident (`VmHWM`) back to what is resident now. Returns whether
/// the system let it: Linux does, unless `/proc` is read-only.
pub fn restart_peak() -> bool {
    cfg!(target_os = "linux") && std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// What this process has read since it began.
pub fn io() -> Fact<ProcessIo> {
    io_in(&Tree::live())
}

/// The most bytes that this process's own control group has held, page cache and its other processes
/// included. The root group, and kernels before 5.19 in version 2, do not count it.
pub fn cgroup_peak() -> Fact<u64> {
    cgroup_peak_in(&Tree::live())
}

/// Resident pages of mapped files among `files`, which are compared by their resolved paths. 0 where
/// none of them is mapped.
pub fn mapped_bytes(files: &[PathBuf]) -> Fact<u64> {
    let resolved: Vec<PathBuf> = files.iter().filter_map(|path| path.canonicalize().ok()).collect();
    mapped_bytes_in(&Tree::live(), &resolved)
}

/// Threads of this process now.
pub fn threads() -> Fact<u64> {
    const FILE: &str = "/proc/self/status";
    match Tree::live().read(FILE) {
        Ok(text) => match parse::parse_thread_count(&text) {
            Some(threads) => Fact::read(threads, FILE),
            None => Fact::unknown(format!("{FILE} has no count of threads")),
        },
        Err(error) => Fact::unknown(error.to_string()),
    }
}

fn mapped_bytes_in(tree: &Tree, files: &[PathBuf]) -> Fact<u64> {
    const FILE: &str = "/proc/self/smaps";
    let text = match tree.read(FILE) {
        Ok(text) => text,
        Err(error) => return Fact::unknown(error.to_string()),
    };
    let is_ours = |path: &str| files.iter().any(|file| file == Path::new(path));
    let mapped = parse::parse_smaps(&text).into_iter().filter(|file| is_ours(file.path));
    Fact::read(mapped.map(|file| file.rss_bytes).fold(0, u64::saturating_add), FILE)
}

fn memory_in(tree: &Tree) -> Fact<ProcessMemory> {
    const FILE: &str = "/proc/self/status";
    let status = match tree.read(FILE) {
        Ok(text) => parse::parse_process_status(&text),
        Err(error) => return Fact::unknown(error.to_string()),
    };
    let all = || {
        Some(ProcessMemory {
            rss_anon_bytes: status.rss_anon_bytes?,
            rss_file_bytes: status.rss_file_bytes?,
            rss_shmem_bytes: status.rss_shmem_bytes?,
            peak_rss_bytes: status.peak_rss_bytes?,
            swap_bytes: status.swap_bytes?,
            locked_bytes: status.locked_bytes?,
        })
    };
    match all() {
        Some(memory) => Fact::read(memory, FILE),
        None => Fact::unknown(format!("{FILE} lacks some of its memory figures")),
    }
}

fn io_in(tree: &Tree) -> Fact<ProcessIo> {
    const FILE: &str = "/proc/self/io";
    let counters = match tree.read(FILE) {
        Ok(text) => parse::parse_process_io(&text),
        Err(error) => return Fact::unknown(error.to_string()),
    };
    match (counters.read_bytes, counters.rchar_bytes) {
        (Some(read_bytes), Some(rchar_bytes)) => {
            Fact::read(ProcessIo { read_bytes, rchar_bytes }, FILE)
        }
        _ => Fact::unknown(format!("{FILE} lacks read_bytes or rchar")),
    }
}

fn cgroup_peak_in(tree: &Tree) -> Fact<u64> {
    match cgroup::memory_peak(tree) {
        Ok((bytes, detail)) => Fact::read(bytes, detail),
        Err(reason) => Fact::unknown(reason),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn this_process_holds_and_reads_something() {
        let memory = memory().into_value().unwrap();
        assert!(memory.rss_anon_bytes > 0);
        assert!(memory.peak_rss_bytes >= memory.rss_anon_bytes / 2);
        let io = io().into_value().unwrap();
        assert!(io.rchar_bytes > 0);
        assert!(threads().into_value().unwrap() > 0);
        // This binary is mapped, and some of it is being executed.
        let program = std::env::current_exe().unwrap();
        assert!(mapped_bytes(&[program]).into_value().unwrap() > 0);
        assert_eq!(mapped_bytes(&["/proc/self/maps".into()]).into_value(), Some(0));
    }

    #[test]
    fn what_cannot_be_read_is_unknown() {
        let empty = tempfile::tempdir().unwrap();
        let tree = Tree::new(empty.path().to_path_buf());
        assert!(memory_in(&tree).detail().contains("/proc/self/status"));
        assert!(io_in(&tree).detail().contains("/proc/self/io"));
        assert!(mapped_bytes_in(&tree, &[]).detail().contains("/proc/self/smaps"));
        assert!(cgroup_peak_in(&tree).detail().contains("/proc/self/cgroup"));
    }
}
