//! How fast memory can be read.
//!
//! Owns the timing of sequential reads over buffers well past the last-level cache, in large pages where the
//! system gives them, as the engine holds weights in. Refuses to take
//! more than an eighth of the usable memory or two seconds (half a one on an idle machine), and to report a speed
//! that the caches may have made.

use std::hint::black_box;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use memmap2::MmapMut;

use crate::fact::Fact;

/// A line of the caches, which memory gives whole.
type Line = [u8; 64];

/// Places that a thread reads from in turn: more lines are on their way at once than from one.
const STREAMS: usize = 4;

const MIB: u64 = 1 << 20;

/// The buffer is at least this large where memory allows.
const MIN_BUFFER_BYTES: u64 = 512 * MIB;

/// And never larger than this, because filling it takes time.
const MAX_BUFFER_BYTES: u64 = 2048 * MIB;

/// A thread fills its part in steps of this size and looks at the clock in between.
const FILL_STEP_BYTES: u64 = 16 * MIB;

const FILL_TIME: Duration = Duration::from_millis(1200);
const ALL_THREADS_TIME: Duration = Duration::from_millis(220);
const ONE_THREAD_TIME: Duration = Duration::from_millis(160);

/// The single thread is timed over pieces of this size, each read once before any is read again.
const PIECE_BYTES: u64 = 32 * MIB;

/// Read bandwidths in bytes per second: of `threads` threads together, and of one.
pub(crate) fn measure(
    threads: u64,
    usable_bytes: u64,
    last_level_cache_bytes: Option<u64>,
) -> (Fact<f64>, Fact<f64>) {
    let wanted = last_level_cache_bytes.unwrap_or(0).saturating_mul(4);
    let wanted = wanted.clamp(MIN_BUFFER_BYTES, MAX_BUFFER_BYTES).min(usable_bytes / 8);
    let parts = match fill(threads.max(1), wanted) {
        Ok(parts) => parts,
        Err(reason) => return (Fact::unknown(reason), Fact::unknown(reason)),
    };
    let parts: Vec<&[Line]> =
        parts.iter().map(|(part, filled)| part[..*filled].as_chunks().0).collect();
    let buffer_bytes: u64 = parts.iter().map(|part| bytes_of(part)).sum();
    if buffer_bytes < last_level_cache_bytes.unwrap_or(0).max(32 * MIB) {
        let reason = format!(
            "a buffer of {} MiB, all that memory or time allowed, does not go past the caches",
            buffer_bytes / MIB
        );
        return (Fact::unknown(reason.clone()), Fact::unknown(reason));
    }
    let mut note = String::new();
    if last_level_cache_bytes.is_some_and(|cache| buffer_bytes < 2 * cache) {
        note.push_str("; under twice the last-level cache, which may have helped");
    }
    if cfg!(debug_assertions) {
        note.push_str("; a build for debugging, which may read slower than memory allows");
    }
    let fact = |speeds: Vec<f64>, threads: usize| match middle_and_best(speeds) {
        Some((median, best)) => Fact::measured(
            // Whole bytes: a fraction is noise, and not every JSON reader keeps its last digit.
            median.round(),
            format!(
                "median sum over {} MiB by {threads} thread(s), best {:.1} GB/s{note}",
                buffer_bytes / MIB,
                best / 1e9
            ),
        ),
        None => Fact::unknown("memory is too slow to time"),
    };
    let all = match time_all(&parts) {
        Ok(speeds) => fact(speeds, parts.len()),
        Err(reason) => Fact::unknown(reason),
    };
    (all, fact(time_one(&parts), 1))
}

fn bytes_of(part: &[Line]) -> u64 {
    size_of_val(part) as u64
}

/// One part per thread and how much of it is filled, touched by that thread, so that it lies in that thread's
/// memory node.
fn fill(threads: u64, total_bytes: u64) -> Result<Vec<(MmapMut, usize)>, &'static str> {
    let part_bytes = total_bytes / threads;
    let deadline = Instant::now() + FILL_TIME;
    let fill_part = move || -> Option<(MmapMut, usize)> {
        let bytes = usize::try_from(part_bytes / 64 * 64).ok().filter(|bytes| *bytes > 0)?;
        let step = usize::try_from(FILL_STEP_BYTES).ok()?;
        let mut part = MmapMut::map_anon(bytes).ok()?;
        #[cfg(target_os = "linux")]
        {
            // Where there are none, small pages are what the engine has, too.
            let _ = part.advise(memmap2::Advice::HugePage);
        }
        let mut filled = 0;
        for step in part.chunks_mut(step) {
            if Instant::now() >= deadline {
                break;
            }
            // Not zero: pages of zeros could all be one page.
            step.fill(1);
            filled += step.len();
        }
        Some((part, filled))
    };
    std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for _ in 0..threads {
            let spawned = std::thread::Builder::new().spawn_scoped(scope, fill_part);
            handles.push(spawned.map_err(|_| "no more threads could be started")?);
        }
        let mut parts = Vec::new();
        for handle in handles {
            let part = handle.join().map_err(|_| "a measuring thread failed")?;
            parts.push(part.ok_or("no memory for a buffer to measure with")?);
        }
        Ok(parts)
    })
}

/// The sum of the first word of each line. One addition for a line, so that memory and not the adder is the
/// limit: a build for every processor adds 16 bytes at once, which is slower than memory.
fn sum(lines: &[Line]) -> u64 {
    let stream = lines.len() / STREAMS;
    let (streams, rest) = lines.split_at(stream * STREAMS);
    let streams: [&[Line]; STREAMS] =
        std::array::from_fn(|index| &streams[index * stream..(index + 1) * stream]);
    let word = |line: &Line| {
        let [word, ..] = line.as_chunks().0 else { return 0 };
        u64::from_ne_bytes(*word)
    };
    let mut sums = [0_u64; STREAMS];
    for at in 0..stream {
        for (sum, lines) in sums.iter_mut().zip(streams) {
            *sum = sum.wrapping_add(word(&lines[at]));
        }
    }
    sums.into_iter().chain(rest.iter().map(word)).fold(0, u64::wrapping_add)
}

/// Speeds of passes in which every thread reads its part once.
fn time_all(parts: &[&[Line]]) -> Result<Vec<f64>, &'static str> {
    let total_bytes: u64 = parts.iter().map(|part| bytes_of(part)).sum();
    let (own, others) = parts.split_first().ok_or("no buffer to measure with")?;
    let (done, all_done) = mpsc::channel();
    std::thread::scope(|scope| {
        // Threads end when their sender is dropped, also on the way out of an error.
        let mut starters = Vec::new();
        for part in others {
            let (starter, started) = mpsc::channel::<()>();
            let done = done.clone();
            let pass = move || {
                while started.recv().is_ok() {
                    if done.send(black_box(sum(black_box(part)))).is_err() {
                        break;
                    }
                }
            };
            let spawned = std::thread::Builder::new().spawn_scoped(scope, pass);
            spawned.map_err(|_| "no more threads could be started")?;
            starters.push(starter);
        }
        // Only the threads hold it now, so that waiting ends if all of them fail.
        drop(done);
        let deadline = Instant::now() + ALL_THREADS_TIME;
        let mut speeds = Vec::new();
        while speeds.len() < 2 || Instant::now() < deadline {
            let start = Instant::now();
            for starter in &starters {
                starter.send(()).map_err(|_| "a measuring thread failed")?;
            }
            black_box(sum(black_box(own)));
            for _ in &starters {
                all_done.recv().map_err(|_| "a measuring thread failed")?;
            }
            speeds.push(total_bytes as f64 / start.elapsed().as_secs_f64());
        }
        Ok(speeds)
    })
}

/// Speeds of one thread over consecutive pieces of all parts.
fn time_one(parts: &[&[Line]]) -> Vec<f64> {
    let piece_lines = usize::try_from(PIECE_BYTES / 64).unwrap_or(usize::MAX);
    let deadline = Instant::now() + ONE_THREAD_TIME;
    let mut speeds = Vec::new();
    let (mut piece_bytes, mut piece_time) = (0, Duration::ZERO);
    for part in parts.iter().cycle() {
        for piece in part.chunks(piece_lines) {
            let start = Instant::now();
            black_box(sum(black_box(piece)));
            piece_time += start.elapsed();
            piece_bytes += bytes_of(piece);
            // Parts of many threads are smaller than a piece and are timed together.
            if piece_bytes >= PIECE_BYTES {
                speeds.push(piece_bytes as f64 / piece_time.as_secs_f64());
                (piece_bytes, piece_time) = (0, Duration::ZERO);
            }
            if Instant::now() >= deadline {
                return speeds;
            }
        }
    }
    speeds
}

/// The median and the highest of the speeds that are finite.
fn middle_and_best(mut speeds: Vec<f64>) -> Option<(f64, f64)> {
    speeds.retain(|speed| speed.is_finite());
    speeds.sort_by(f64::total_cmp);
    Some((*speeds.get(speeds.len() / 2)?, *speeds.last()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_agree_with_the_plain_sum() {
        for count in [0_u64, 1, 7, 8, 9, 1000] {
            let line = |word: u64| {
                let mut line = [7; 64];
                line[..8].copy_from_slice(&word.to_ne_bytes());
                line
            };
            let lines: Vec<Line> = (0..count).map(line).collect();
            assert_eq!(sum(&lines), (0..count).sum::<u64>(), "{count}");
        }
    }

    #[test]
    fn too_little_memory_is_unknown() {
        let (all, one) = measure(2, 8 * MIB, None);
        assert!(all.is_unknown() && one.is_unknown());
        assert!(all.detail().contains("does not go past the caches"));
    }
}
