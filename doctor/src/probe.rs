//! The probe: what to look at, and the looking.
//!
//! Owns the order of the parts and what each may cost. Refuses to fail, to print and to read the
//! environment: settings come from the caller and progress goes back to it.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::disk_read::Reads;
use crate::fact::Fact;
use crate::facts::{Facts, GpuFacts, MemoryFacts, SCHEMA_VERSION};
use crate::topology::last_level_cache_bytes;
use crate::tree::Tree;
use crate::trial::TrialCommand;
use crate::{bandwidth, cpu, disk, disk_read, gpu, gpu_sysfs, memory, parse, platform};

const NOT_MEASURED: &str = "not measured (--no-measure)";
const NOT_ASKED_FOR: &str = "not measured: another figure stands for it";

/// Reads of this size where the caller names none.
const DEFAULT_READ_BYTES: u64 = 1 << 20;

/// Reads in flight at once where the caller names no numbers: one, as a rotating disk likes it, up to
/// what keeps an NVMe drive busy with parts of a megabyte.
const DEFAULT_QUEUE_DEPTHS: [u32; 4] = [1, 4, 8, 16];

/// Buffers for reading take no more than this part of the memory that may be used.
const BUFFERS_PART_OF_MEMORY: u64 = 8;

/// A load above this share of the CPUs takes a part of memory's and the disk's speed.
const BUSY_SHARE: f64 = 0.5;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measuring {
    /// Reading of memory.
    pub memory: bool,
    /// Reads of the disk.
    pub disk: bool,
}

impl Measuring {
    /// Everything.
    pub const ALL: Self = Self { memory: true, disk: true };
    /// Nothing.
    pub const NONE: Self = Self { memory: false, disk: false };

    /// Why one of the two is not timed.
    fn why_not(self) -> &'static str {
        if self == Self::NONE { NOT_MEASURED } else { NOT_ASKED_FOR }
    }
}

impl From<bool> for Measuring {
    fn from(is_measuring: bool) -> Self {
        if is_measuring { Self::ALL } else { Self::NONE }
    }
}

/// Finds out the facts about a machine.
///
/// ```
/// let facts = tierkeep_doctor::Probe::new().measure(false).run(&mut |_| {});
/// assert_eq!(facts.schema_version, tierkeep_doctor::SCHEMA_VERSION);
/// ```
#[derive(Clone, Debug)]
pub struct Probe {
    root: PathBuf,
    affinity: Option<Vec<usize>>,
    directory: Option<PathBuf>,
    files: Vec<PathBuf>,
    read_bytes: u64,
    queue_depths: Vec<u32>,
    scratch: Option<PathBuf>,
    measuring: Measuring,
    trial: Option<TrialCommand>,
    nvml_library: Option<PathBuf>,
}

impl Default for Probe {
    fn default() -> Self {
        Self::new()
    }
}

impl Probe {
    /// A probe of the running machine, with measurements, without a directory.
    pub fn new() -> Self {
        Self {
            root: PathBuf::from("/"),
            affinity: None,
            directory: None,
            files: Vec::new(),
            read_bytes: DEFAULT_READ_BYTES,
            queue_depths: DEFAULT_QUEUE_DEPTHS.to_vec(),
            scratch: None,
            measuring: Measuring::ALL,
            trial: None,
            nvml_library: None,
        }
    }

    /// Looks below another root than `/`, where the files of another machine are recorded. All paths
    /// given to the probe are below it too. What only system calls and drivers tell is then unknown.
    #[must_use]
    pub fn root(mut self, root: PathBuf) -> Self {
        self.root = root;
        self
    }

    /// Takes these CPU numbers for the affinity mask instead of asking for that of this process.
    #[must_use]
    pub fn affinity(mut self, cpus: Vec<usize>) -> Self {
        self.affinity = Some(cpus);
        self
    }

    /// The directory whose disk matters.
    #[must_use]
    pub fn directory(mut self, directory: Option<PathBuf>) -> Self {
        self.directory = directory;
        self
    }

    /// Existing files to measure reads from; none are written.
    #[must_use]
    pub fn files(mut self, files: Vec<PathBuf>) -> Self {
        self.files = files;
        self
    }

    /// Size of the reads that matter most, such as an expert's: 1 MiB unless set, rounded up to 4096
    /// bytes, at most 64 MiB. Reads of 64 KiB and 1 MiB are timed besides.
    #[must_use]
    pub fn read_bytes(mut self, read_bytes: u64) -> Self {
        self.read_bytes = read_bytes;
        self
    }

    /// Measured reads in flight at once, each number at least 1: 1, 4, 8 and 16 unless set.
    #[must_use]
    pub fn queue_depths(mut self, queue_depths: Vec<u32>) -> Self {
        self.queue_depths = queue_depths;
        self
    }

    /// A folder in which a temporary file of up to 1 GiB, and a quarter of the free space, may be
    /// written where [`Probe::files`] has none that can be measured. It has no name and is gone
    /// afterwards. Nothing is written unless this is set.
    #[must_use]
    pub fn scratch(mut self, folder: Option<PathBuf>) -> Self {
        self.scratch = folder;
        self
    }

    /// Whether to time memory and disk, or which of them; it takes three seconds or less. What is not
    /// timed is unknown.
    #[must_use]
    pub fn measure(mut self, measuring: impl Into<Measuring>) -> Self {
        self.measuring = measuring.into();
        self
    }

    /// The command that executes instructions, so that a set counts only if it works. It is run in a
    /// child process and given the names of sets, by Rust's names, as further arguments. For each it
    /// prints the line `NAME begins`, executes instructions of it, and prints `NAME right`,
    /// `NAME wrong` or `NAME refused`. Without it, sets are only advertised, and said to be.
    #[must_use]
    pub fn trial<A: Into<OsString>>(
        mut self,
        program: PathBuf,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        let arguments = arguments.into_iter().map(Into::into).collect();
        self.trial = Some(TrialCommand { program, arguments });
        self
    }

    /// Where NVIDIA's management library is, instead of its usual name; it is then loaded for a
    /// recorded tree too.
    #[must_use]
    pub fn nvml_library(mut self, path: PathBuf) -> Self {
        self.nvml_library = Some(path);
        self
    }

    /// Finds everything out, telling `progress` before each part what it is. Cannot fail: what cannot
    /// be learnt is unknown, with the reason.
    pub fn run(&self, progress: &mut dyn FnMut(&str)) -> Facts {
        let tree = Tree::new(self.root.clone());
        progress("reading processor and memory");
        let cpu = cpu::probe(&tree, self.affinity.as_deref(), self.trial.as_ref());
        let mut memory = memory::probe(&tree);
        progress("reading disk and platform");
        let (mut disk, link_bytes_per_s) = disk::probe(&tree, self.directory.as_deref());
        let platform = platform::probe(&tree);
        progress("asking the GPU driver");
        let host_total_bytes = memory.total_bytes.value().copied();
        let gpus = GpuFacts {
            nvidia: gpu::probe(&tree, self.nvml_library.as_deref(), host_total_bytes),
            others: gpu_sysfs::probe(&tree),
        };
        // Of before any measurement, which is a load itself.
        let busy = busy(&tree, cpu.logical_cores.value().copied());
        if self.measuring.memory {
            progress("measuring memory bandwidth");
            let cache = cpu.caches.value().and_then(|caches| last_level_cache_bytes(caches));
            measure_memory(&tree, cpu.usable_threads.value().copied(), cache, &mut memory);
            memory.read_bandwidth_bytes_per_s = noted(memory.read_bandwidth_bytes_per_s, &busy);
            memory.read_bandwidth_one_thread_bytes_per_s =
                noted(memory.read_bandwidth_one_thread_bytes_per_s, &busy);
        } else {
            let reason = self.measuring.why_not();
            memory.read_bandwidth_bytes_per_s = Fact::unknown(reason);
            memory.read_bandwidth_one_thread_bytes_per_s = Fact::unknown(reason);
        }
        if self.measuring.disk {
            progress("measuring disk reads");
            let usable_bytes = memory.usable_bytes.value().copied();
            let reads = self.measure_disk(&tree, usable_bytes, link_bytes_per_s);
            (disk.read, disk.reads) = (noted(reads.read, &busy), noted(reads.reads, &busy));
            disk.direct_reads = reads.direct;
        } else {
            let reason = self.measuring.why_not();
            (disk.read, disk.reads) = (Fact::unknown(reason), Fact::unknown(reason));
            disk.direct_reads = Fact::unknown(reason);
        }
        Facts { schema_version: SCHEMA_VERSION, cpu, memory, disk, gpus, platform }
    }

    fn measure_disk(
        &self,
        tree: &Tree,
        usable_bytes: Option<u64>,
        link_bytes_per_s: Option<f64>,
    ) -> Reads {
        let files: Vec<(String, PathBuf)> =
            self.files.iter().map(|file| (file.display().to_string(), tree.path(file))).collect();
        let settings = disk_read::Settings {
            read_bytes: self.read_bytes,
            queue_depths: self.queue_depths.clone(),
            memory_bytes: usable_bytes.map_or(u64::MAX, |bytes| bytes / BUFFERS_PART_OF_MEMORY),
            link_bytes_per_s,
            scratch: self.scratch.as_ref().map(|folder| tree.path(folder)),
        };
        disk_read::measure(&files, &settings)
    }
}

/// What is to be said of measurements on a machine that others keep busy; nothing if it is idle.
fn busy(tree: &Tree, cpus: Option<u64>) -> String {
    let load = tree.read("/proc/loadavg").ok().and_then(|text| parse::parse_load(&text));
    match (load, cpus) {
        (Some(load), Some(cpus)) if load > BUSY_SHARE * cpus as f64 => {
            format!("measured while others worked: a load of {load:.1} on {cpus} CPUs")
        }
        (Some(_) | None, Some(_) | None) => String::new(),
    }
}

/// What was measured, with a note; what was not needs none.
fn noted<T>(fact: Fact<T>, note: &str) -> Fact<T> {
    if fact.is_unknown() { fact } else { fact.with_note(note) }
}

fn measure_memory(
    tree: &Tree,
    threads: Option<u64>,
    last_level_cache_bytes: Option<u64>,
    memory: &mut MemoryFacts,
) {
    let (all, one) = match memory.usable_bytes.value() {
        Some(&usable) if tree.is_live() => {
            bandwidth::measure(threads.unwrap_or(1), usable, last_level_cache_bytes)
        }
        Some(_) => {
            let reason = "a recorded tree has no memory to measure";
            (Fact::unknown(reason), Fact::unknown(reason))
        }
        None => {
            let reason = "not measured: how much memory may be used is unknown";
            (Fact::unknown(reason), Fact::unknown(reason))
        }
    };
    memory.read_bandwidth_bytes_per_s = all;
    memory.read_bandwidth_one_thread_bytes_per_s = one;
}
