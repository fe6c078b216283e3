//! How fast a disk answers random reads.
//!
//! Owns timed reads past the page cache (`O_DIRECT`) from existing files. Refuses to write, to read
//! holes, and to call a speed what a cache must have delivered.

use std::path::PathBuf;

use crate::fact::Fact;
use crate::facts::DiskReadSpeed;

/// How to read.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_os = "linux"), expect(dead_code))]
pub(crate) struct Settings {
    /// Size of one read.
    pub(crate) read_bytes: u64,
    /// Reads in flight at once.
    pub(crate) queue_depth: u32,
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn measure(_files: &[(String, PathBuf)], _settings: Settings) -> Fact<DiskReadSpeed> {
    Fact::unknown(crate::NOT_SUPPORTED)
}

/// Reads random parts of `files` (what each is called, and where it is) for about half a second.
#[cfg(target_os = "linux")]
pub(crate) fn measure(files: &[(String, PathBuf)], settings: Settings) -> Fact<DiskReadSpeed> {
    match linux::measure(files, settings) {
        Ok((speed, detail)) => Fact::measured(speed, detail),
        Err(reason) => Fact::unknown(reason),
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::collections::hash_map::RandomState;
    use std::fs::File;
    use std::hash::BuildHasher;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use rustix::fs::{Mode, OFlags, SeekFrom};
    use rustix::io::Errno;

    use super::Settings;
    use crate::facts::DiskReadSpeed;

    /// Offsets, lengths and addresses of direct reads are multiples of this. Devices ask for 512 or
    /// 4096.
    const ALIGNMENT_BYTES: u64 = 4096;

    /// Larger reads would only hold more memory.
    const MAX_READ_BYTES: u64 = 64 << 20;

    const READ_TIME: Duration = Duration::from_millis(500);

    /// No disk of this decade is faster; a cache of the host or the filesystem is.
    const IMPLAUSIBLE_BYTES_PER_S: f64 = 30e9;

    /// Fewer reads than this say nothing.
    const MIN_READS: u64 = 4;

    /// Files with more pieces than this are measured on their first ones.
    const MAX_EXTENTS: usize = 4096;

    /// Stored bytes of one file, cut into places for reads.
    struct Extent {
        file: usize,
        offset: u64,
        /// Number of the first place, counting through all extents.
        first_place: u64,
    }

    pub(super) fn measure(
        paths: &[(String, PathBuf)],
        settings: Settings,
    ) -> Result<(DiskReadSpeed, String), String> {
        let read_bytes = settings.read_bytes.clamp(ALIGNMENT_BYTES, MAX_READ_BYTES);
        let read_bytes = read_bytes.next_multiple_of(ALIGNMENT_BYTES);
        if paths.is_empty() {
            return Err("no file to measure with was given".to_owned());
        }
        let mut files = Vec::new();
        let mut extents = Vec::new();
        let mut places = 0_u64;
        for (name, path) in paths {
            let file = open(name, path)?;
            refuse_caches(name, &file)?;
            for (start, end) in stored_ranges(name, &file)? {
                let offset = start.next_multiple_of(ALIGNMENT_BYTES);
                let count = end.saturating_sub(offset) / read_bytes;
                if count > 0 {
                    extents.push(Extent { file: files.len(), offset, first_place: places });
                    places += count;
                }
            }
            files.push((name, file));
        }
        if places < MIN_READS {
            return Err(format!(
                "too small to measure: the files hold {places} reads of {read_bytes} bytes, \
                 {MIN_READS} are needed"
            ));
        }
        let threads = u64::from(settings.queue_depth.max(1)).min(places);
        let walk = Walk::new(places);
        let place = |number: u64| {
            let place = walk.place(number);
            let after = extents.partition_point(|extent| extent.first_place <= place);
            let extent = extents.get(after.checked_sub(1)?)?;
            let (name, file) = files.get(extent.file)?;
            Some((*name, file, extent.offset + (place - extent.first_place) * read_bytes))
        };
        let next = AtomicU64::new(0);
        let start = Instant::now();
        let read = || -> Result<u64, String> {
            let mut buffer = AlignedBuffer::new(read_bytes)?;
            let mut bytes = 0;
            while start.elapsed() < READ_TIME {
                // Each place is read once only: the device's own cache would answer a second time.
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= places {
                    break;
                }
                let Some((name, file, offset)) = place(number) else { break };
                let found = read_at(file, buffer.as_mut_slice(), offset)
                    .map_err(|error| format!("cannot read {name} at {offset}: {error}"))?;
                bytes += found as u64;
            }
            Ok(bytes)
        };
        let total_bytes = std::thread::scope(|scope| {
            let mut handles = Vec::new();
            for _ in 0..threads {
                let spawned = std::thread::Builder::new().spawn_scoped(scope, read);
                handles.push(spawned.map_err(|error| format!("no more threads: {error}"))?);
            }
            handles.into_iter().try_fold(0_u64, |sum, handle| {
                let bytes = handle.join().map_err(|_| "a reading thread failed".to_owned())??;
                Ok::<_, String>(sum + bytes)
            })
        })?;
        let elapsed = start.elapsed();
        // Whole bytes: a fraction is noise, and not every JSON reader keeps its last digit.
        let bytes_per_s = (total_bytes as f64 / elapsed.as_secs_f64()).round();
        if bytes_per_s > IMPLAUSIBLE_BYTES_PER_S {
            return Err(format!(
                "not measurable: {:.1} GB/s is no disk's speed, a cache answered",
                bytes_per_s / 1e9
            ));
        }
        let detail = format!(
            "{:.1} MB in {:.2} s, random direct reads of {read_bytes} bytes from {} file(s), \
             {threads} at once",
            total_bytes as f64 / 1e6,
            elapsed.as_secs_f64(),
            files.len(),
        );
        let queue_depth = u32::try_from(threads).unwrap_or(u32::MAX);
        Ok((DiskReadSpeed { bytes_per_s, read_bytes, queue_depth }, detail))
    }

    fn open(name: &str, path: &Path) -> Result<File, String> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(descriptor) => Ok(File::from(descriptor)),
            Err(Errno::INVAL) => {
                Err(format!("the filesystem of {name} refuses reads past the page cache"))
            }
            Err(error) => Err(format!("cannot open {name}: {error}")),
        }
    }

    /// Refuses filesystems that take a direct read and answer it from memory. `tmpfs` takes them since
    /// Linux 6.6; ZFS had no direct reads before 2.3 and answered from its own cache. The numbers are
    /// those of statfs(2).
    fn refuse_caches(name: &str, file: &File) -> Result<(), String> {
        let filesystem = rustix::fs::fstatfs(file)
            .map_err(|error| format!("cannot find the filesystem of {name}: {error}"))?;
        // The type's width and sign differ between architectures; all these numbers fit 32 bits.
        let keeper = match filesystem.f_type as u32 {
            0x0102_1994 => "tmpfs keeps it in memory",
            0x8584_58f6 => "ramfs keeps it in memory",
            0x2fc1_2fc1 => "zfs may answer direct reads from its own cache",
            _ => return Ok(()),
        };
        Err(format!("not measurable: {name}: {keeper}"))
    }

    /// The ranges of a file that are stored, holes left out.
    fn stored_ranges(name: &str, file: &File) -> Result<Vec<(u64, u64)>, String> {
        let failed = |error: std::io::Error| format!("cannot examine {name}: {error}");
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(format!("{name} is not a regular file"));
        }
        let size = metadata.len();
        let mut ranges = Vec::new();
        let mut position = 0;
        while position < size && ranges.len() < MAX_EXTENTS {
            let data = match rustix::fs::seek(file, SeekFrom::Data(position)) {
                Ok(data) => data,
                // Nothing but a hole up to the end.
                Err(Errno::NXIO) => break,
                Err(error) => return Err(failed(error.into())),
            };
            let hole = rustix::fs::seek(file, SeekFrom::Hole(data))
                .map_err(|error| failed(error.into()))?;
            ranges.push((data, hole.min(size)));
            position = hole.max(position + 1);
        }
        let ranges_bytes: u64 = ranges.iter().map(|(start, end)| end.saturating_sub(*start)).sum();
        if size > 0 && ranges_bytes == 0 {
            return Err(format!("not measurable: {name} is one hole, nothing of it is stored"));
        }
        // Filesystems that cannot tell holes call everything data. What takes much less room than
        // that is sparse, compressed or not written out yet.
        let on_disk_bytes = metadata.blocks().saturating_mul(512);
        if ranges.len() < MAX_EXTENTS && on_disk_bytes < ranges_bytes / 10 * 9 {
            return Err(format!(
                "not measurable: {name} has {ranges_bytes} bytes of data in {on_disk_bytes} bytes \
                 on disk; it is sparse, compressed or not written out yet"
            ));
        }
        Ok(ranges)
    }

    /// One direct read; fewer bytes than asked for are returned as they are, for they count as such.
    fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
        loop {
            match file.read_at(buffer, offset) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                result => return result,
            }
        }
    }

    /// An order of places that looks random and repeats none: steps of about the golden section of
    /// their number, from a start that differs from run to run, so that what an earlier run left in
    /// caches is not met in the same order.
    struct Walk {
        places: u64,
        start: u64,
        step: u64,
    }

    impl Walk {
        fn new(places: u64) -> Self {
            let places = places.max(1);
            let golden = (places as f64 * 0.618_033_988_749_894_9) as u64;
            let step = (golden.max(1)..).find(|&step| greatest_common_divisor(step, places) == 1);
            let start = RandomState::new().hash_one(places) % places;
            Self { places, start, step: step.unwrap_or(1) }
        }

        fn place(&self, number: u64) -> u64 {
            let steps = u128::from(number) * u128::from(self.step) + u128::from(self.start);
            u64::try_from(steps % u128::from(self.places)).unwrap_or(0)
        }
    }

    fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    }

    /// A buffer whose address suits direct reads.
    struct AlignedBuffer {
        bytes: Vec<u8>,
        start: usize,
        length: usize,
    }

    impl AlignedBuffer {
        fn new(length: u64) -> Result<Self, String> {
            let (Ok(length), Ok(alignment)) =
                (usize::try_from(length), usize::try_from(ALIGNMENT_BYTES))
            else {
                return Err(format!("a read of {length} bytes is too large for this machine"));
            };
            let mut bytes = Vec::new();
            bytes
                .try_reserve_exact(length + alignment)
                .map_err(|error| format!("no memory for a read of {length} bytes: {error}"))?;
            bytes.resize(length + alignment, 0);
            let start = bytes.as_ptr().align_offset(alignment).min(alignment);
            Ok(Self { bytes, start, length })
        }

        fn as_mut_slice(&mut self) -> &mut [u8] {
            self.bytes.get_mut(self.start..self.start + self.length).unwrap_or_default()
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_walk_visits_every_place_once() {
            for places in [1, 2, 3, 4, 10, 97, 1000, 4096] {
                let walk = Walk::new(places);
                let mut visited: Vec<u64> = (0..places).map(|number| walk.place(number)).collect();
                visited.sort_unstable();
                assert_eq!(visited, (0..places).collect::<Vec<_>>(), "{places}");
            }
        }

        #[test]
        fn buffers_are_aligned() {
            for length in [4096, 1 << 20] {
                let mut buffer = AlignedBuffer::new(length).unwrap();
                let slice = buffer.as_mut_slice();
                assert_eq!(slice.len() as u64, length);
                assert_eq!(slice.as_ptr() as usize % 4096, 0);
            }
        }
    }
}
