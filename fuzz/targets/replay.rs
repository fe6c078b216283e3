//! How ordinary tests use the corpus: every file as it is, and with seeded damage. Owns the reading
//! of `fuzz/corpus` and the damaging; what is expected of a file is the test's.

use std::fs;
use std::path::PathBuf;

/// What is given every file.
pub(crate) type Target<'a> = &'a mut dyn FnMut(&[u8]);

/// The files of one target's corpus by name.
pub(crate) fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, fs::read(path).unwrap())
        })
        .collect();
    files.sort();
    files
}

/// Gives a target every file of its corpus, and of each some damaged copies: the same ones in every
/// run. A panic names the file by being printed after it.
pub(crate) fn with_damage(name: &str, n_copies: usize, target: Target<'_>) {
    let files = corpus(name);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for (at, (_, bytes)) in files.iter().enumerate() {
        target(bytes);
        for _ in 0..n_copies {
            let other = &files[random.below(files.len())].1;
            let mut copy = files[at].1.clone();
            for _ in 0..=random.below(3) {
                damage(&mut copy, other, &mut random);
            }
            target(&copy);
        }
    }
}

/// A sequence that is the same everywhere (Steele and Vigna, `splitmix64`).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// What turns up where a number, a name or an end is expected.
const WORDS: [&[u8]; 14] = [
    b"0",
    b"-1",
    b"18446744073709551615",
    b"18446744073709551616",
    b"9223372036854775808",
    b"4294967296",
    b"1e308",
    b"nan",
    b"null",
    b"\"",
    b"[",
    b"}",
    b"\n",
    b"\xff\xfe",
];

fn damage(bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    let end = (at + random.below(12)).min(bytes.len());
    match random.below(7) {
        0 => bytes.truncate(at),
        1 => drop(bytes.drain(at..end)),
        2 => {
            let again = bytes[at..end].to_vec();
            drop(bytes.splice(at..at, again));
        }
        3 => drop(bytes.splice(at..end, WORDS[random.below(WORDS.len())].iter().copied())),
        4 => {
            let from = random.below(other.len() + 1);
            let to = (from + random.below(40)).min(other.len());
            drop(bytes.splice(at..end, other[from..to].iter().copied()));
        }
        5 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
        _ => {
            // A run of digits becomes another number.
            let start = bytes.iter().skip(at).position(u8::is_ascii_digit).map(|n| at + n);
            let Some(start) = start else { return };
            let n = bytes[start..].iter().take_while(|b| b.is_ascii_digit()).count();
            let number = (random.next() >> random.below(64)).to_string();
            drop(bytes.splice(start..start + n, number.into_bytes()));
        }
    }
}
