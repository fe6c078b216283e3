//! Mappings of real files: what they hold, what happens when the file is cut off, and that nobody else's
//! fault is taken for ours.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test stops where something is wrong"
)]

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use tierkeep_mapping::{MapError, Mapping, faults, page_bytes};

/// What a child says that was sent an ignored signal.
const IGNORED: &str = "went on after the signal";

/// A file of `n_pages` and a half, every byte of a page being its number from 1.
fn file(directory: &tempfile::TempDir, n_pages: usize) -> File {
    let page = page_bytes() as usize;
    let bytes: Vec<u8> = (0..n_pages * page + page / 2).map(|at| (at / page + 1) as u8).collect();
    let path = directory.path().join("file");
    fs::write(&path, bytes).unwrap();
    File::options().read(true).write(true).open(path).unwrap()
}

#[test]
fn a_mapping_is_the_range_of_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let (file, page) = (file(&directory, 9), page_bytes());
    let mapping = Mapping::new(&file, 2 * page, 3 * page).unwrap();
    assert_eq!(mapping.bytes().len() as u64, 3 * page);
    for (at, page) in mapping.bytes().chunks(page as usize).enumerate() {
        assert!(page.iter().all(|&byte| usize::from(byte) == at + 3));
    }
    // The last page of a file is mapped whole; what is past the end is zeros.
    let last = Mapping::new(&file, 9 * page, page).unwrap();
    let (inside, past) = last.bytes().split_at(page as usize / 2);
    assert!(inside.iter().all(|&b| b == 10) && past.iter().all(|&b| b == 0));
    assert_eq!((mapping.lost(), last.lost()), (None, None));
}

#[test]
fn what_cannot_be_mapped_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (whole, page) = (file(&directory, 2), page_bytes());
    let refused = Mapping::new(&whole, 7, page).unwrap_err();
    assert!(matches!(refused, MapError::Misaligned { offset: 7, .. }), "{refused}");
    assert!(matches!(Mapping::new(&whole, 0, 0), Err(MapError::Length { bytes: 0 })));
    assert!(matches!(Mapping::new(&whole, 0, u64::MAX), Err(MapError::Length { .. })));
    let folder = File::open(directory.path()).unwrap();
    assert!(matches!(Mapping::new(&folder, 0, page), Err(MapError::System(_))));
}

#[test]
fn pages_are_brought_in() {
    let directory = tempfile::tempdir().unwrap();
    let (file, page) = (file(&directory, 2100), page_bytes());
    let mapping = Mapping::new(&file, page, 2000 * page).unwrap();
    mapping.will_need(0..mapping.bytes().len());
    mapping.populate(0..mapping.bytes().len()).unwrap();
    // Tests of this program run side by side on a machine that may be short of memory: none is as good
    // as all for a page that was just brought in, more than all is not.
    let resident = resident_bytes(&mapping);
    assert!(resident > 0 && resident <= 2000 * page, "{resident}");
    assert_eq!(resident % page, 0);
    let other = Mapping::new(&file, page, 2000 * page).unwrap();
    assert_eq!(resident_bytes(&other), 0, "nothing of it was touched");
}

/// Bytes of a mapping that are in memory and mapped into this process.
fn resident_bytes(mapping: &Mapping) -> u64 {
    let start = format!("{:x}-", mapping.bytes().as_ptr() as usize);
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let ours = maps.lines().skip_while(|line| !line.starts_with(&start));
    let line = ours.into_iter().find(|line| line.starts_with("Rss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn a_file_that_is_cut_off_gives_zeros_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let (file, page) = (file(&directory, 40), page_bytes());
    let mapping = Mapping::new(&file, 2 * page, 30 * page).unwrap();
    let untouched = Mapping::new(&file, 0, 4 * page).unwrap();
    let before = faults();
    assert_eq!(mapping.bytes()[0], 3);
    file.set_len(8 * page).unwrap();
    let threads: Vec<u64> = std::thread::scope(|scope| {
        let sum = || mapping.bytes().iter().map(|&byte| u64::from(byte)).sum();
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(sum)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // Pages 3 to 8 are left.
    let left: u64 = (3..=8).map(|byte| byte * page).sum();
    assert!(threads.iter().all(|sum| *sum == left), "{threads:?}");
    assert_eq!(mapping.lost(), Some(6 * page));
    assert!(faults() > before);
    assert_eq!(untouched.lost(), None);
    assert!(untouched.bytes().contains(&4));
    // The page that the file ends in is no longer what it was, and no fault tells: sizes do.
    let cut = Mapping::new(&file, 0, 20 * page).unwrap();
    assert!(cut.populate(0..8 * page as usize).is_ok());
    assert!(cut.populate(0..20 * page as usize).is_err());
}

/// Of a child process: a fault in a mapping that is not ours.
#[test]
#[ignore = "ends the process; `a_fault_elsewhere_is_not_ours` runs it in a child"]
fn child_faults_elsewhere() {
    fault_elsewhere();
}

/// The same with a handler that was there before.
#[test]
#[ignore = "ends the process; `a_fault_elsewhere_is_not_ours` runs it in a child"]
#[expect(unsafe_code, reason = "a handler of the test's own is installed")]
fn child_faults_elsewhere_with_a_handler() {
    extern "C" fn leave(_: libc::c_int) {
        // SAFETY: `_exit` is async-signal-safe.
        unsafe { libc::_exit(42) }
    }
    let handler: extern "C" fn(libc::c_int) = leave;
    // SAFETY: the handler does nothing but leave.
    unsafe { libc::signal(libc::SIGBUS, handler as libc::sighandler_t) };
    fault_elsewhere();
}

/// The same where SIGBUS was ignored: one that is sent still is, a fault cannot be.
#[test]
#[ignore = "ends the process; `a_fault_elsewhere_is_not_ours` runs it in a child"]
#[expect(unsafe_code, reason = "a signal is ignored and sent")]
fn child_faults_elsewhere_where_it_was_ignored() {
    // SAFETY: to ignore a signal asks for nothing.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_IGN) };
    let directory = tempfile::tempdir().unwrap();
    let file = file(&directory, 1);
    let _ours = Mapping::new(&file, 0, page_bytes()).unwrap();
    // SAFETY: a signal to this thread, whose handler is ours.
    unsafe { libc::raise(libc::SIGBUS) };
    assert_eq!(faults(), 0, "a signal that was sent is no fault");
    eprintln!("{IGNORED}");
    fault_elsewhere();
}

/// A signal that is sent where nobody handled it ends the process as ever.
#[test]
#[ignore = "ends the process; `a_fault_elsewhere_is_not_ours` runs it in a child"]
#[expect(unsafe_code, reason = "a signal is sent")]
fn child_is_sent_the_signal() {
    // SAFETY: the default action may always be asked for.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    let directory = tempfile::tempdir().unwrap();
    let file = file(&directory, 1);
    let _ours = Mapping::new(&file, 0, page_bytes()).unwrap();
    // SAFETY: a signal to this thread, whose handler is ours.
    unsafe { libc::raise(libc::SIGBUS) };
}

#[expect(unsafe_code, reason = "a mapping of another library")]
fn fault_elsewhere() {
    let directory = tempfile::tempdir().unwrap();
    let (file, page) = (file(&directory, 4), page_bytes());
    let ours = Mapping::new(&file, 0, 4 * page).unwrap();
    // SAFETY: the file is cut off under it: the process is to end by that.
    let theirs = unsafe { memmap2::Mmap::map(&file).unwrap() };
    file.set_len(page).unwrap();
    // In ours it goes on, in theirs it ends.
    assert_eq!(ours.bytes()[2 * page as usize], 0);
    assert_eq!(ours.lost(), Some(2 * page));
    assert_ne!(std::hint::black_box(&theirs)[3 * page as usize], 4, "it went on");
}

#[test]
fn a_fault_elsewhere_is_not_ours() {
    let output = |name: &str| {
        let program = std::env::current_exe().unwrap();
        let mut command = Command::new(program);
        command.args(["--ignored", "--exact", name, "--test-threads", "1", "--nocapture"]);
        command.output().unwrap()
    };
    let child = |name: &str| output(name).status;
    assert_eq!(child("child_faults_elsewhere").signal(), Some(libc::SIGBUS));
    assert_eq!(child("child_faults_elsewhere_with_a_handler").code(), Some(42));
    // Both end by the signal; that the ignored one did not end where it was sent, its output says.
    let ignored = output("child_faults_elsewhere_where_it_was_ignored");
    assert_eq!(ignored.status.signal(), Some(libc::SIGBUS));
    assert!(String::from_utf8_lossy(&ignored.stderr).contains(IGNORED), "{ignored:?}");
    assert_eq!(child("child_is_sent_the_signal").signal(), Some(libc::SIGBUS));
}
