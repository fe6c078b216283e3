//! F10: a disk that fails under one shard, and everything else that reading a model may find.

use std::fs;
use std::io;
use std::sync::Mutex;

use serde_json::json;
use tempfile::TempDir;
use tierkeep_plans::catalogue::header::read_header;

use super::*;

/// Writes a shard of bf16 matrices, each of `rows * 1024` elements of 1.0, and returns it.
fn shard(dir: &TempDir, name: &str, tensors: &[(&str, u64)]) -> PayloadFile {
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (tensor, rows) in tensors {
        let start = data.len();
        data.extend([0x80, 0x3f].repeat(*rows as usize * 1024));
        header.insert(
            (*tensor).to_owned(),
            json!({"dtype": "BF16", "shape": [rows, 1024], "data_offsets": [start, data.len()]}),
        );
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(data);
    let path = dir.path().join(name);
    fs::write(&path, &bytes).unwrap();
    PayloadFile { header: Some(read_header(&path).unwrap()), path, bytes: bytes.len() as u64 }
}

/// Two shards of 20 MB, five reads in all.
fn two_shards(dir: &TempDir) -> Vec<PayloadFile> {
    let first = shard(dir, "model-00001-of-00002.safetensors", &[("a", 5000), ("b", 5000)]);
    let second = shard(dir, "model-00002-of-00002.safetensors", &[("c", 100), ("d", 9000)]);
    vec![first, second]
}

/// The files, with a disk that fails on some bytes of one of them.
struct Failing {
    files: FileSource,
    file: usize,
    bad: std::ops::Range<u64>,
    reads: Mutex<Vec<(usize, u64, usize)>>,
}

impl Failing {
    fn new(files: &[PayloadFile], file: usize, bad: std::ops::Range<u64>) -> Self {
        Self { files: FileSource::new(files), file, bad, reads: Mutex::default() }
    }
}

impl PayloadSource for Failing {
    fn read_at(&self, file: usize, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        self.reads.lock().unwrap().push((file, offset, into.len()));
        let end = offset + into.len() as u64;
        if file == self.file && offset < self.bad.end && self.bad.start < end {
            return Err(io::Error::other("Input/output error (os error 5)"));
        }
        self.files.read_at(file, offset, into)
    }
}

fn read(files: &[PayloadFile], source: &dyn PayloadSource) -> PayloadReport {
    read_all(files, source, &mut |_, _| ControlFlow::Continue(()))
}

#[test]
fn whole_files_are_read_to_the_last_byte() {
    let dir = tempfile::tempdir().unwrap();
    let files = two_shards(&dir);
    let mut last = (0, 0);
    let report = read_all(&files, &FileSource::new(&files), &mut |done, total| {
        last = (done, total);
        ControlFlow::Continue(())
    });
    let bytes = files[0].bytes + files[1].bytes;
    assert_eq!((report.read_bytes, report.hole_bytes, report.n_files), (bytes, 0, 2));
    assert_eq!(last, (bytes, bytes));
    assert_eq!(report.unreadable, []);
    assert_eq!(report.odd_values, OddValues::default());
    assert!(!report.interrupted);
}

#[test]
fn f10_a_failing_sector_names_its_shard_offset_and_tensors_and_blames_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let files = two_shards(&dir);
    // One sector in the second tensor of the second shard, not at the beginning of a block.
    let source = Failing::new(&files, 1, 9_000_000..9_000_001);
    let report = read(&files, &source);
    let sector = 9_000_000 / 4096 * 4096;
    let [bad] = &report.unreadable[..] else { panic!("{report:?}") };
    assert_eq!((bad.path.as_path(), bad.offset), (files[1].path.as_path(), sector));
    assert_eq!((bad.bytes, bad.reason.as_str()), (4096, "Input/output error (os error 5)"));
    assert_eq!(bad.tensors, ["d"]);
    // Everything but the sector was read.
    assert_eq!(report.read_bytes, files[0].bytes + files[1].bytes - 4096);
    assert_eq!(report.odd_values, OddValues::default());
}

#[test]
fn f10_a_dying_disk_is_not_asked_for_every_sector() {
    let dir = tempfile::tempdir().unwrap();
    let files = two_shards(&dir);
    let source = Failing::new(&files, 0, 0..files[0].bytes);
    let report = read(&files, &source);
    // The pieces are joined again: the file from end to end.
    let [bad] = &report.unreadable[..] else { panic!("{:?}", report.unreadable) };
    assert_eq!((bad.offset, bad.bytes), (0, files[0].bytes));
    assert_eq!(bad.tensors, ["a", "b"]);
    assert_eq!(report.read_bytes, files[1].bytes, "the other shard was read");
    let tries = source.reads.lock().unwrap().iter().filter(|read| read.0 == 0).count();
    // Three blocks, each a tree of at most so many failing leaves.
    assert!(
        tries <= 3 * (2 * FAILURES_PER_BLOCK + 1),
        "{tries} reads of a file that cannot be read"
    );
}

#[test]
fn a_file_that_became_shorter_is_unreadable_from_there() {
    let dir = tempfile::tempdir().unwrap();
    let files = two_shards(&dir);
    let cut = 10_000_000_u64;
    fs::OpenOptions::new().write(true).open(&files[0].path).unwrap().set_len(cut).unwrap();
    let report = read(&files, &FileSource::new(&files));
    let [bad] = &report.unreadable[..] else { panic!("{:?}", report.unreadable) };
    assert_eq!((bad.offset, bad.reason.as_str()), (cut, "the file ended"));
    assert_eq!(bad.offset + bad.bytes, files[0].bytes);
}

#[test]
fn a_file_that_is_gone_is_unreadable_and_the_others_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let files = two_shards(&dir);
    fs::remove_file(&files[0].path).unwrap();
    let report = read(&files, &FileSource::new(&files));
    let [bad] = &report.unreadable[..] else { panic!("{:?}", report.unreadable) };
    assert_eq!((bad.path.as_path(), bad.bytes), (files[0].path.as_path(), files[0].bytes));
    assert!(bad.reason.contains("No such file"), "{bad:?}");
    assert_eq!(report.read_bytes, files[1].bytes);
}

#[test]
fn an_interrupt_stops_the_reading() {
    let dir = tempfile::tempdir().unwrap();
    let files = two_shards(&dir);
    let report = read_all(&files, &FileSource::new(&files), &mut |_, _| ControlFlow::Break(()));
    assert!(report.interrupted);
    assert_eq!(report.unreadable, []);
    assert_eq!(report.odd_values, OddValues::default(), "what was not read is not called zero");
}

#[test]
fn reads_are_of_bounded_size_and_cover_the_files_once() {
    let dir = tempfile::tempdir().unwrap();
    let files = two_shards(&dir);
    // No byte fails: the range is empty.
    let source = Failing::new(&files, 0, 0..0);
    read(&files, &source);
    let mut reads = source.reads.lock().unwrap().clone();
    reads.sort_unstable();
    assert!(reads.iter().all(|read| read.2 as u64 <= READ_BYTES));
    for (at, file) in files.iter().enumerate() {
        let mut position = 0;
        for (_, offset, length) in reads.iter().filter(|read| read.0 == at) {
            // A read that came short is asked for the rest.
            assert!(*offset <= position, "{at}: nothing read from {position} to {offset}");
            position = position.max(offset + *length as u64);
        }
        assert_eq!(position, file.bytes);
    }
}

#[test]
fn odd_values_are_named_with_their_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let file = shard(&dir, "model.safetensors", &[("a", 3), ("b", 6000), ("c", 2)]);
    let header = file.header.clone().unwrap();
    let mut bytes = fs::read(&file.path).unwrap();
    let at =
        |tensor: usize| (header.data_start + header.tensors().nth(tensor).unwrap().start) as usize;
    // A NaN in each of two blocks of b; c is zero throughout.
    for offset in [4096, 9_000_000] {
        bytes[at(1) + offset..][..2].copy_from_slice(&[0xc0, 0x7f]);
    }
    bytes[at(2)..].fill(0);
    fs::write(&file.path, &bytes).unwrap();
    let report = read(std::slice::from_ref(&file), &FileSource::new(std::slice::from_ref(&file)));
    let odd = report.odd_values;
    let named =
        |list: &[ValueFault]| list.iter().map(|f| (f.tensor.clone(), f.count)).collect::<Vec<_>>();
    assert_eq!((named(&odd.not_finite), odd.n_not_finite), (vec![("b".to_owned(), 2)], 1));
    assert_eq!((named(&odd.all_zero), odd.n_all_zero), (vec![("c".to_owned(), 1)], 1));
    assert_eq!(odd.n_zero_scales, 0);
}

/// A shard of tensors with all their bytes.
fn shard_of(dir: &TempDir, name: &str, tensors: &[(&str, &str, &[u8])]) -> PayloadFile {
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (tensor, dtype, bytes) in tensors {
        let start = data.len();
        data.extend(*bytes);
        header.insert(
            (*tensor).to_owned(),
            json!({"dtype": dtype, "shape": [1, bytes.len()], "data_offsets": [start, data.len()]}),
        );
    }
    let header = serde_json::to_vec(&header).unwrap();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    let path = dir.path().join(name);
    fs::write(&path, &bytes).unwrap();
    PayloadFile { header: Some(read_header(&path).unwrap()), path, bytes: bytes.len() as u64 }
}

/// Scales of MXFP4 are plain bytes: those beside elements are exponents, wherever the elements lie, and
/// 255 is none. In e4m3 two codes are no numbers, in e8m0 one.
#[test]
fn codes_that_are_no_numbers_are_found_in_every_narrow_type() {
    let dir = tempfile::tempdir().unwrap();
    let codes: &[u8] = &[0x00, 0xff, 0x7e, 0x7f, 0xfe, 0xff];
    let files = [
        shard_of(
            &dir,
            "model-00001-of-00002.safetensors",
            &[
                ("e4m3", "F8_E4M3", codes),
                ("e8m0", "F8_E8M0", codes),
                ("gate_up_proj_scales", "U8", codes),
                ("packed", "U8", codes),
                ("wide_scales", "U8", codes),
            ],
        ),
        shard_of(
            &dir,
            "model-00002-of-00002.safetensors",
            &[("gate_up_proj_blocks", "U8", codes), ("other_blocks", "U8", codes)],
        ),
    ];
    let odd = read(&files, &FileSource::new(&files)).odd_values;
    let named: Vec<(&str, u64)> =
        odd.not_finite.iter().map(|fault| (fault.tensor.as_str(), fault.count)).collect();
    assert_eq!(named, [("e4m3", 3), ("e8m0", 2), ("gate_up_proj_scales", 2)]);
    assert_eq!((odd.n_not_finite, odd.n_all_zero, odd.n_zero_scales), (3, 0, 0));
}

/// A download that stopped after its file was laid out at full length.
#[cfg(target_os = "linux")]
#[test]
fn holes_are_counted_and_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = shard(&dir, "model.safetensors", &[("a", 4000), ("b", 4000)]);
    assert_eq!(holes([file.path.as_path()]), [], "a file that was written has none");
    let kept = 1 << 20;
    let handle = fs::OpenOptions::new().write(true).open(&file.path).unwrap();
    handle.set_len(kept).unwrap();
    handle.set_len(file.bytes).unwrap();
    drop(handle);
    let found = holes([file.path.as_path()]);
    let [hole] = &found[..] else { panic!("{found:?}: does this filesystem tell holes?") };
    assert_eq!((hole.bytes, hole.file_bytes), (file.bytes - kept, file.bytes));
    let report = read(std::slice::from_ref(&file), &FileSource::new(std::slice::from_ref(&file)));
    assert_eq!((report.read_bytes, report.hole_bytes), (kept, file.bytes - kept));
    // `a` begins in what is stored and b does not.
    let zero: Vec<&str> = report.odd_values.all_zero.iter().map(|f| f.tensor.as_str()).collect();
    assert_eq!(zero, ["b"]);
}
