//! `/proc/meminfo` and the memory and I/O figures of `/proc/<pid>`.
//!
//! Owns the translation of the kernel's `kB` (which are KiB) to bytes. Refuses to fill in what a file
//! lacks: absent lines are `None`.

/// Figures of `/proc/meminfo`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemInfo {
    /// `MemTotal`.
    pub total_bytes: Option<u64>,
    /// `MemFree`.
    pub free_bytes: Option<u64>,
    /// `MemAvailable`, absent before Linux 3.14.
    pub available_bytes: Option<u64>,
    /// `Buffers`.
    pub buffers_bytes: Option<u64>,
    /// `Cached`, shared memory included.
    pub cached_bytes: Option<u64>,
    /// `Shmem`.
    pub shmem_bytes: Option<u64>,
    /// `SwapTotal`.
    pub swap_total_bytes: Option<u64>,
    /// `SwapFree`.
    pub swap_free_bytes: Option<u64>,
}

/// Memory figures of `/proc/<pid>/status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatusMemory {
    /// `RssAnon`.
    pub rss_anon_bytes: Option<u64>,
    /// `RssFile`.
    pub rss_file_bytes: Option<u64>,
    /// `RssShmem`.
    pub rss_shmem_bytes: Option<u64>,
    /// `VmHWM`.
    pub peak_rss_bytes: Option<u64>,
    /// `VmSwap`.
    pub swap_bytes: Option<u64>,
    /// `VmLck`.
    pub locked_bytes: Option<u64>,
}

/// Figures of `/proc/<pid>/io`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounters {
    /// `rchar`: asked for by read calls, wherever it came from.
    pub rchar_bytes: Option<u64>,
    /// `read_bytes`: fetched from storage.
    pub read_bytes: Option<u64>,
}

/// `name: value` lines.
fn lines(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| line.split_once(':')).map(|(name, value)| (name.trim(), value))
}

/// A value such as `24684084 kB` in bytes.
fn kib(value: &str) -> Option<u64> {
    let mut words = value.split_whitespace();
    let amount: u64 = words.next()?.parse().ok()?;
    match words.next() {
        Some("kB") => amount.checked_mul(1024),
        Some(_) | None => None,
    }
}

/// Reads `/proc/meminfo`.
pub fn parse_meminfo(text: &str) -> MemInfo {
    let mut info = MemInfo::default();
    for (name, value) in lines(text) {
        let field = match name {
            "MemTotal" => &mut info.total_bytes,
            "MemFree" => &mut info.free_bytes,
            "MemAvailable" => &mut info.available_bytes,
            "Buffers" => &mut info.buffers_bytes,
            "Cached" => &mut info.cached_bytes,
            "Shmem" => &mut info.shmem_bytes,
            "SwapTotal" => &mut info.swap_total_bytes,
            "SwapFree" => &mut info.swap_free_bytes,
            _ => continue,
        };
        *field = kib(value);
    }
    info
}

/// Memory of one node, by its own `meminfo`: `Node 0 MemTotal: 33554432 kB`.
pub fn parse_node_total(text: &str) -> Option<u64> {
    let value = |line: &str| {
        let (name, value) = line.split_once(':')?;
        (name.split_whitespace().last() == Some("MemTotal")).then(|| kib(value))?
    };
    text.lines().find_map(value)
}

/// Reads the memory figures of `/proc/<pid>/status`.
pub fn parse_process_status(text: &str) -> StatusMemory {
    let mut status = StatusMemory::default();
    for (name, value) in lines(text) {
        let field = match name {
            "RssAnon" => &mut status.rss_anon_bytes,
            "RssFile" => &mut status.rss_file_bytes,
            "RssShmem" => &mut status.rss_shmem_bytes,
            "VmHWM" => &mut status.peak_rss_bytes,
            "VmSwap" => &mut status.swap_bytes,
            "VmLck" => &mut status.locked_bytes,
            _ => continue,
        };
        *field = kib(value);
    }
    status
}

/// The list of CPUs in `/proc/<pid>/status`, to be read by [`super::parse_cpu_list`].
pub fn parse_cpus_allowed_list(text: &str) -> Option<&str> {
    lines(text).find(|(name, _)| *name == "Cpus_allowed_list").map(|(_, value)| value.trim())
}

/// The first figure of `/proc/loadavg`: tasks that ran or waited to, on average of the last minute.
pub fn parse_load(text: &str) -> Option<f64> {
    let load: f64 = text.split_whitespace().next()?.parse().ok()?;
    (load.is_finite() && load >= 0.0).then_some(load)
}

/// Reads `/proc/<pid>/io`.
pub fn parse_process_io(text: &str) -> IoCounters {
    let mut counters = IoCounters::default();
    for (name, value) in lines(text) {
        match name {
            "rchar" => counters.rchar_bytes = value.trim().parse().ok(),
            "read_bytes" => counters.read_bytes = value.trim().parse().ok(),
            _ => {}
        }
    }
    counters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_in_bytes() {
        let info =
            parse_meminfo("MemTotal:       33554432 kB\nMemAvailable: 3 kB\nSwapTotal: 0 kB\n");
        assert_eq!(info.total_bytes, Some(32 << 30));
        assert_eq!(info.available_bytes, Some(3072));
        assert_eq!(info.swap_total_bytes, Some(0));
        assert_eq!(info.swap_free_bytes, None);
    }

    #[test]
    fn nonsense_is_absent() {
        let info = parse_meminfo("MemTotal: 18446744073709551615 kB\nMemFree: -1 kB\nCached: 3 MB");
        assert_eq!(info, MemInfo::default());
    }

    #[test]
    fn load() {
        assert_eq!(parse_load("15.97 16.30 14.91 3/512 4711\n"), Some(15.97));
        assert_eq!([parse_load(""), parse_load("-1 0"), parse_load("nan")], [None; 3]);
    }

    #[test]
    fn io_counts_apart() {
        let counters = parse_process_io("rchar: 323934931\nwchar: 3\nread_bytes: 4096\n");
        assert_eq!(counters.rchar_bytes, Some(323_934_931));
        assert_eq!(counters.read_bytes, Some(4096));
    }
}
