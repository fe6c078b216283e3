//! How fast a disk answers random reads.
//!
//! Owns which sizes and queue depths are timed and for how long. Refuses to call a speed what a cache
//! must have delivered, to wait for slow disks longer than planned by more than one round of reads, and
//! to write, but for the temporary file where the caller allows one.

#[cfg(target_os = "linux")]
use std::path::Path;
use std::path::PathBuf;

use crate::fact::Fact;
use crate::facts::DiskReadSpeed;

/// What to measure with and how.
#[derive(Clone, Debug)]
#[cfg_attr(not(target_os = "linux"), expect(dead_code))]
pub(crate) struct Settings {
    /// The size of reads that matters most.
    pub(crate) read_bytes: u64,
    /// Reads in flight at once; each is timed.
    pub(crate) queue_depths: Vec<u32>,
    /// Memory that buffers may take.
    pub(crate) memory_bytes: u64,
    /// What the disk's link carries, if it is known.
    pub(crate) link_bytes_per_s: Option<f64>,
    /// Where a temporary file may be written if there are no files that can be measured.
    pub(crate) scratch: Option<PathBuf>,
}

/// The speed at the size that matters most, and at every size and depth that was timed.
pub(crate) struct Reads {
    pub(crate) read: Fact<DiskReadSpeed>,
    pub(crate) reads: Fact<Vec<DiskReadSpeed>>,
    /// Whether they were direct.
    pub(crate) direct: Fact<bool>,
}

impl Reads {
    fn unknown(reason: &str) -> Self {
        let (read, reads, direct) =
            (Fact::unknown(reason), Fact::unknown(reason), Fact::unknown(reason));
        Self { read, reads, direct }
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn measure(_files: &[(String, PathBuf)], _settings: &Settings) -> Reads {
    Reads::unknown(crate::NOT_SUPPORTED)
}

/// Reads random parts of `files` (what each is called, and where it is), for about two seconds.
#[cfg(target_os = "linux")]
pub(crate) fn measure(files: &[(String, PathBuf)], settings: &Settings) -> Reads {
    use crate::disk_files;

    let files = match (disk_files::open_all(files), &settings.scratch) {
        (Ok(files), _) => Ok(files),
        (Err(reason), None) => Err(reason),
        (Err(reason), Some(folder)) => {
            let folder: &Path = folder;
            let scratch = disk_files::scratch(folder, settings.read_bytes);
            scratch.map(|file| vec![file]).map_err(|other| format!("{reason}; {other}"))
        }
    };
    match files {
        Ok(files) => linux::measure(&files, settings),
        Err(reason) => Reads::unknown(&reason),
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::collections::hash_map::RandomState;
    use std::hash::BuildHasher;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use super::{Reads, Settings};
    use crate::disk_files::{ALIGNMENT_BYTES, AlignedBuffer, DataFile, Read, Way};
    use crate::fact::Fact;
    use crate::facts::DiskReadSpeed;

    /// Larger reads would only hold more memory.
    const MAX_READ_BYTES: u64 = 64 << 20;

    /// Sizes that are timed besides the one that matters most, and how long each depth of them takes.
    const OTHER_SIZES: [(u64, Duration); 2] =
        [(1 << 20, Duration::from_millis(110)), (64 << 10, Duration::from_millis(80))];

    /// How long each depth of the size that matters most takes.
    const MAIN_TIME: Duration = Duration::from_millis(220);

    /// A depth whose first round alone would take longer than this many times its time is left out.
    const PATIENCE: f64 = 2.0;

    /// Buffers of all reads in flight together.
    const MAX_BUFFER_BYTES: u64 = 256 << 20;

    /// No disk of this decade is faster; a cache of the host or the filesystem is.
    const IMPLAUSIBLE_BYTES_PER_S: f64 = 30e9;

    /// Clocks and counts are not exact: so much above its link is no cache yet.
    const LINK_TOLERANCE: f64 = 1.1;

    /// Fewer reads than this say nothing.
    const MIN_READS: u64 = 4;

    /// A depth that reaches this part of the best is as good, and holds less memory.
    const GOOD_ENOUGH: f64 = 0.95;

    /// The parts of all files that reads of one size can bring.
    struct Places<'files> {
        files: &'files [DataFile],
        extents: Vec<Extent>,
        count: u64,
        read_bytes: u64,
    }

    /// Stored bytes of one file, cut into places for reads.
    struct Extent {
        file: usize,
        offset: u64,
        /// Number of the first place, counting through all extents.
        first_place: u64,
    }

    impl<'files> Places<'files> {
        fn new(files: &'files [DataFile], read_bytes: u64) -> Self {
            let mut extents = Vec::new();
            let mut count = 0_u64;
            for (file, data) in files.iter().enumerate() {
                for &(start, end) in &data.ranges {
                    let offset = start.next_multiple_of(ALIGNMENT_BYTES);
                    let places = end.saturating_sub(offset) / read_bytes;
                    if places > 0 {
                        extents.push(Extent { file, offset, first_place: count });
                        count += places;
                    }
                }
            }
            Self { files, extents, count, read_bytes }
        }

        fn get(&self, place: u64) -> Option<(&DataFile, u64)> {
            let after = self.extents.partition_point(|extent| extent.first_place <= place);
            let extent = self.extents.get(after.checked_sub(1)?)?;
            let file = self.files.get(extent.file)?;
            Some((file, extent.offset + (place - extent.first_place) * self.read_bytes))
        }
    }

    pub(super) fn measure(files: &[DataFile], settings: &Settings) -> Reads {
        let main_bytes = settings.read_bytes.clamp(ALIGNMENT_BYTES, MAX_READ_BYTES);
        let main_bytes = main_bytes.next_multiple_of(ALIGNMENT_BYTES);
        let others = OTHER_SIZES.into_iter().filter(|(size, _)| *size != main_bytes);
        let mut reads = Vec::new();
        let mut notes = Vec::new();
        let read = match measure_size(files, main_bytes, MAIN_TIME, settings) {
            Ok(points) => {
                let read = best(&points).map_or_else(
                    || Fact::unknown("no queue depth was given"),
                    |best| Fact::measured(best, detail(files, &points, settings)),
                );
                reads.extend(points);
                read
            }
            Err(reason) => {
                notes.push(format!("at {main_bytes} bytes: {reason}"));
                Fact::unknown(reason)
            }
        };
        for (size, time) in others {
            match measure_size(files, size, time, settings) {
                Ok(points) => reads.extend(points),
                Err(reason) => notes.push(format!("at {size} bytes: {reason}")),
            }
        }
        let reads = match (reads.is_empty(), read.is_unknown()) {
            (true, true) => Fact::unknown(read.detail()),
            (true, false) => Fact::unknown(notes.join("; ")),
            (false, _) => {
                let mut detail = way(files).to_owned();
                for note in &notes {
                    detail.push_str(&format!("; {note}"));
                }
                Fact::measured(reads, detail)
            }
        };
        let direct = match reads.is_unknown() {
            true => Fact::unknown(reads.detail()),
            false => Fact::measured(is_direct(files), ""),
        };
        Reads { read, reads, direct }
    }

    /// How the reads were done, of what.
    fn detail(files: &[DataFile], points: &[DiskReadSpeed], settings: &Settings) -> String {
        let depths: Vec<String> =
            points.iter().map(|point| point.queue_depth.to_string()).collect();
        let of = match files {
            [one] => one.name.clone(),
            many => format!("{} files", many.len()),
        };
        let mut detail = format!("{}, of {of}; best of {} at once", way(files), depths.join(", "));
        if points.len() < settings.queue_depths.len() {
            detail.push_str("; more would take too long or too much memory");
        }
        detail
    }

    fn is_direct(files: &[DataFile]) -> bool {
        files.iter().all(|file| file.way == Way::Direct)
    }

    fn way(files: &[DataFile]) -> &'static str {
        if is_direct(files) {
            "random direct reads"
        } else {
            "random reads, pages dropped from the page cache before"
        }
    }

    /// The smallest depth that is about as fast as the fastest.
    fn best(points: &[DiskReadSpeed]) -> Option<DiskReadSpeed> {
        let most = points.iter().map(|point| point.bytes_per_s).max_by(f64::total_cmp)?;
        let good = points.iter().filter(|point| point.bytes_per_s >= GOOD_ENOUGH * most);
        good.min_by_key(|point| point.queue_depth).cloned()
    }

    /// Times one size at each depth, shallow ones first: what they show tells how long more would take.
    fn measure_size(
        files: &[DataFile],
        read_bytes: u64,
        time: Duration,
        settings: &Settings,
    ) -> Result<Vec<DiskReadSpeed>, String> {
        let places = Places::new(files, read_bytes);
        if places.count < MIN_READS {
            return Err(format!(
                "too small to measure: the files hold {} reads of {read_bytes} bytes, {MIN_READS} are \
                 needed",
                places.count
            ));
        }
        let mut depths: Vec<u64> =
            settings.queue_depths.iter().map(|depth| u64::from(*depth).max(1)).collect();
        depths.sort_unstable();
        depths.dedup();
        let most_buffers = MAX_BUFFER_BYTES.min(settings.memory_bytes) / read_bytes;
        let walk = Walk::new(places.count);
        let next = AtomicU64::new(0);
        let mut buffers = Vec::new();
        let mut points: Vec<DiskReadSpeed> = Vec::new();
        for depth in depths {
            if depth > most_buffers {
                if points.is_empty() {
                    return Err(format!(
                        "not measured: {depth} reads of {read_bytes} bytes take more memory than the \
                         {} bytes that measuring may",
                        MAX_BUFFER_BYTES.min(settings.memory_bytes)
                    ));
                }
                break;
            }
            let round_s = |point: &DiskReadSpeed| (depth * read_bytes) as f64 / point.bytes_per_s;
            let is_slow = points.last().is_some_and(|p| round_s(p) > PATIENCE * time.as_secs_f64());
            if is_slow || depth > places.count / 2 && !points.is_empty() {
                break;
            }
            let depth = depth.min(places.count);
            while (buffers.len() as u64) < depth {
                buffers.push(AlignedBuffer::new(read_bytes)?);
            }
            let bytes_per_s = time_reads(&places, &walk, &next, &mut buffers, time)?;
            plausible(bytes_per_s, settings.link_bytes_per_s)?;
            let queue_depth = u32::try_from(depth).unwrap_or(u32::MAX);
            points.push(DiskReadSpeed { bytes_per_s, read_bytes, queue_depth });
        }
        Ok(points)
    }

    /// Refuses a speed that a cache must have delivered.
    pub(super) fn plausible(bytes_per_s: f64, link_bytes_per_s: Option<f64>) -> Result<(), String> {
        let said = format!("not measurable: {:.1} GB/s", bytes_per_s / 1e9);
        if bytes_per_s > IMPLAUSIBLE_BYTES_PER_S {
            return Err(format!("{said} is no disk's speed, a cache answered"));
        }
        match link_bytes_per_s {
            Some(link) if bytes_per_s > link * LINK_TOLERANCE => Err(format!(
                "{said} is more than the disk's link carries ({:.1} GB/s), a cache answered",
                link / 1e9
            )),
            Some(_) | None => Ok(()),
        }
    }

    /// Bytes per second of one thread for each buffer. Reads go on along the walk from where the last
    /// ended, and bring each place once at most: the device's own cache would answer a second time.
    fn time_reads(
        places: &Places<'_>,
        walk: &Walk,
        next: &AtomicU64,
        buffers: &mut [AlignedBuffer],
        time: Duration,
    ) -> Result<f64, String> {
        let first = next.load(Ordering::Relaxed);
        let start = Instant::now();
        let read = |buffer: &mut AlignedBuffer| -> Result<(u64, u64), String> {
            let (mut fetched, mut cached) = (0, 0);
            while start.elapsed() < time {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number - first >= places.count {
                    break;
                }
                let Some((file, offset)) = places.get(walk.place(number)) else { break };
                match file.read_at(buffer.as_mut_slice(), offset)? {
                    Read::Fetched(bytes) => fetched += bytes,
                    Read::Cached(bytes) => cached += bytes,
                }
            }
            Ok((fetched, cached))
        };
        let (fetched, cached) = std::thread::scope(|scope| {
            let mut handles = Vec::new();
            for buffer in buffers {
                let spawned = std::thread::Builder::new().spawn_scoped(scope, || read(buffer));
                handles.push(spawned.map_err(|error| format!("no more threads: {error}"))?);
            }
            handles.into_iter().try_fold((0_u64, 0_u64), |(fetched, cached), handle| {
                let one = handle.join().map_err(|_| "a reading thread failed".to_owned())??;
                Ok::<_, String>((fetched + one.0, cached + one.1))
            })
        })?;
        if cached > fetched / 20 {
            return Err(
                "not measurable: the page cache answered, and does not let go of its pages"
                    .to_owned(),
            );
        }
        // Whole bytes: a fraction is noise, and not every JSON reader keeps its last digit.
        Ok((fetched as f64 / start.elapsed().as_secs_f64()).round().max(1.0))
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
        fn m10_a_speed_that_no_disk_has_is_not_one() {
            let refusal = plausible(65e9, None).unwrap_err();
            assert!(refusal.starts_with("not measurable: 65.0 GB/s"), "{refusal}");
            // PCIe 3.0 x4 carries 3.94 GB/s.
            let link = Some(3_938_461_538.0);
            assert!(plausible(6e9, link).unwrap_err().contains("link carries (3.9 GB/s)"));
            assert_eq!(plausible(3.5e9, link), Ok(()));
            assert_eq!(plausible(14e9, None), Ok(()));
        }

        #[test]
        fn the_shallowest_depth_that_is_about_as_fast_is_the_best() {
            let point = |queue_depth, bytes_per_s| DiskReadSpeed {
                bytes_per_s,
                read_bytes: 4096,
                queue_depth,
            };
            let points = [point(1, 1.0e9), point(4, 2.95e9), point(8, 3.0e9), point(16, 2.9e9)];
            assert_eq!(best(&points).map(|point| point.queue_depth), Some(4));
            assert_eq!(best(&[]), None);
        }
    }
}
