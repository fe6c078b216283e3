//! Holes of sparse files: ranges that the filesystem never stored and answers with zeros. A download
//! that was cut off after its file was laid out at full length looks whole by its size.

use std::path::{Path, PathBuf};

use tierkeep_plans::catalogue::open_file;

/// Ranges of one file that are looked at; a file in more pieces is taken as it is after that.
#[cfg(target_os = "linux")]
const MAX_RANGES: usize = 100_000;

/// The holes of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holes {
    /// The file.
    pub path: PathBuf,
    /// Bytes that are not stored.
    pub bytes: u64,
    /// Size of the file.
    pub file_bytes: u64,
}

/// Files of which a part is not stored. Files that cannot be opened are left to other checks, and
/// systems that cannot tell a hole report none.
#[must_use]
pub fn holes<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Vec<Holes> {
    paths
        .into_iter()
        .filter_map(|path| {
            let file = open_file(path).ok()?;
            let file_bytes = file.metadata().ok()?.len();
            let stored: u64 =
                stored_ranges(&file, file_bytes).iter().map(|(start, end)| end - start).sum();
            let bytes = file_bytes.saturating_sub(stored);
            (bytes > 0).then(|| Holes { path: path.to_owned(), bytes, file_bytes })
        })
        .collect()
}

/// The ranges of a file that are stored; the whole file where the system cannot tell.
#[cfg(target_os = "linux")]
pub(super) fn stored_ranges(file: &std::fs::File, file_bytes: u64) -> Vec<(u64, u64)> {
    use rustix::fs::{SeekFrom, seek};
    use rustix::io::Errno;
    let mut ranges = Vec::new();
    let mut position = 0;
    // A file that became shorter has no hole at its end: its end is to be asked for and missed.
    let end = file.metadata().map_or(file_bytes, |metadata| metadata.len().min(file_bytes));
    let missing = (end < file_bytes).then_some((end, file_bytes));
    while position < end {
        if ranges.len() == MAX_RANGES {
            ranges.push((position, end));
            break;
        }
        let data = match seek(file, SeekFrom::Data(position)) {
            Ok(data) if data < end => data,
            // Nothing but a hole up to the end.
            Ok(_) | Err(Errno::NXIO) => break,
            Err(_) => return vec![(0, file_bytes)],
        };
        let Ok(hole) = seek(file, SeekFrom::Hole(data)) else { return vec![(0, file_bytes)] };
        let hole = hole.clamp(data + 1, end);
        ranges.push((data, hole));
        position = hole;
    }
    ranges.extend(missing);
    ranges
}

#[cfg(not(target_os = "linux"))]
pub(super) fn stored_ranges(_file: &std::fs::File, file_bytes: u64) -> Vec<(u64, u64)> {
    vec![(0, file_bytes)]
}
