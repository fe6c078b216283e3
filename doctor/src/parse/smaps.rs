//! `/proc/self/smaps`: what of each mapped file is resident; and how many threads there are.

/// A mapping of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedFile<'a> {
    /// Its path, as the kernel writes it: line breaks as `\012`, the rest as it is.
    pub path: &'a str,
    /// Pages of it that are resident.
    pub rss_bytes: u64,
}

/// Mappings of files in `/proc/PID/smaps`; memory without a file and lines that make no sense are
/// skipped.
#[must_use]
pub fn parse_smaps(text: &str) -> Vec<MappedFile<'_>> {
    let mut files: Vec<MappedFile<'_>> = Vec::new();
    // Whether the lines below belong to the last of `files`.
    let mut is_file = false;
    for line in text.lines() {
        let first = line.split_ascii_whitespace().next().unwrap_or_default();
        if let Some(name) = first.strip_suffix(':') {
            if is_file
                && name == "Rss"
                && let Some(file) = files.last_mut()
            {
                let kib = line.split_ascii_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok());
                file.rss_bytes = kib.unwrap_or(0).saturating_mul(1024);
            }
            continue;
        }
        // "start-end perms offset device inode path": a path may have blanks in it.
        let path = line.find('/').map(|at| &line[at..]);
        let before =
            path.map_or(0, |path| line[..line.len() - path.len()].split_ascii_whitespace().count());
        is_file = before == 5;
        if let (true, Some(path)) = (is_file, path) {
            let path = path.strip_suffix(" (deleted)").unwrap_or(path);
            files.push(MappedFile { path, rss_bytes: 0 });
        }
    }
    files
}

/// `Threads:` of `/proc/PID/status`.
#[must_use]
pub fn parse_thread_count(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("Threads:")).and_then(|n| n.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f00-7f10 r--s 00000000 08:01 42                         /models/a b/model-00001.safetensors
Size:                 64 kB
Rss:                  48 kB
Pss:                  24 kB
7f10-7f20 rw-p 00000000 00:00 0
Rss:                  12 kB
7f20-7f30 rw-p 00000000 00:00 0                          [heap]
Rss:                   8 kB
7f30-7f40 r--s 00010000 08:01 42                         /models/a b/model-00001.safetensors (deleted)
Rss:                   4 kB
";

    #[test]
    fn resident_pages_of_files_are_found() {
        let path = "/models/a b/model-00001.safetensors";
        assert_eq!(
            parse_smaps(SMAPS),
            [MappedFile { path, rss_bytes: 48 << 10 }, MappedFile { path, rss_bytes: 4 << 10 }]
        );
        assert_eq!(parse_smaps("Rss: 4 kB\n/x\nRss: 9 kB"), []);
    }

    #[test]
    fn threads_are_counted() {
        assert_eq!(parse_thread_count("Name:\tx\nThreads:\t17\n"), Some(17));
        assert_eq!(parse_thread_count("Threads:\tmany\n"), None);
    }
}
