//! What was fetched, kept for the next time: one record a file, each with a checksum and its own key.
//! A record that is damaged, of another key or of another version is as good as absent. Safe to delete
//! at any time; written aside and renamed, so that two processes may share it.

use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// First word of a record and its version.
const MAGIC: &str = "tierkeep-hub 1";
/// Longest record that is read, bytes.
const RECORD_CAP_BYTES: u64 = 200_000_000;

/// What a record says of its payload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Meta {
    /// When it was fetched, or last found to be unchanged; seconds since 1970.
    pub(crate) at_unix_s: u64,
    /// The server's own word for this version of the file.
    pub(crate) validator: Option<String>,
    /// Size of the whole file that the payload is the beginning of.
    pub(crate) file_bytes: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct Line {
    key: String,
    #[serde(flatten)]
    meta: Meta,
}

/// The records of one model at one revision, or nothing where there is no cache folder.
#[derive(Clone, Debug)]
pub(crate) struct Shelf {
    folder: Option<PathBuf>,
    /// What every key of this shelf begins with: which model, from where.
    prefix: String,
}

impl Shelf {
    /// A shelf below `root`; the parts become folders that a person can read.
    pub(crate) fn new(root: Option<&Path>, parts: &[&str], prefix: String) -> Self {
        let folder = root.map(|root| parts.iter().fold(root.to_owned(), |f, p| f.join(tame(p))));
        Self { folder, prefix }
    }

    fn key(&self, name: &str) -> String {
        format!("{} {name}", self.prefix)
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        let hash = blake3::hash(self.key(name).as_bytes()).to_hex();
        Some(self.folder.as_ref()?.join(hash.get(..24)?))
    }

    /// A record that is whole and of this key.
    pub(crate) fn get(&self, name: &str) -> Option<(Meta, Vec<u8>)> {
        let path = self.path(name)?;
        // What is no file, such as a pipe, might never answer.
        let meta = fs::metadata(&path).ok()?;
        if !meta.is_file() || meta.len() > RECORD_CAP_BYTES {
            return None;
        }
        let mut file = fs::File::open(path).ok()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        let (head, body) = split_line(&bytes)?;
        let expected = format!("{MAGIC} {}", blake3::hash(body).to_hex());
        if head != expected.as_bytes() {
            return None;
        }
        let (line, payload) = split_line(body)?;
        let line: Line = serde_json::from_slice(line).ok()?;
        (line.key == self.key(name)).then(|| (line.meta, payload.to_vec()))
    }

    /// Keeps a payload. What cannot be kept is fetched again another time.
    pub(crate) fn put(&self, name: &str, meta: &Meta, payload: &[u8]) {
        let _ = self.try_put(name, meta, payload);
    }

    fn try_put(&self, name: &str, meta: &Meta, payload: &[u8]) -> Option<()> {
        let path = self.path(name)?;
        let folder = path.parent()?;
        fs::create_dir_all(folder).ok()?;
        let line = Line { key: self.key(name), meta: meta.clone() };
        let mut body = serde_json::to_vec(&line).ok()?;
        body.push(b'\n');
        body.extend_from_slice(payload);
        let mut file = tempfile::NamedTempFile::new_in(folder).ok()?;
        let head = format!("{MAGIC} {}\n", blake3::hash(&body).to_hex());
        file.write_all(head.as_bytes()).ok()?;
        file.write_all(&body).ok()?;
        file.persist(path).ok()?;
        Some(())
    }

    /// Whether nothing was kept here yet.
    pub(crate) fn is_empty(&self) -> bool {
        let entries = self.folder.as_ref().and_then(|folder| fs::read_dir(folder).ok());
        entries.is_none_or(|mut entries| entries.next().is_none())
    }
}

fn split_line(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|b| *b == b'\n')?;
    Some((bytes.get(..at)?, bytes.get(at + 1..)?))
}

/// A name that every filesystem takes as one folder.
fn tame(part: &str) -> String {
    let tame: String = part
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' })
        .take(100)
        .collect();
    if tame.trim_matches('.').is_empty() { "_".to_owned() } else { tame }
}

/// Now, in seconds since 1970.
pub(crate) fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_and_damaged_ones_do_not() {
        let root = tempfile::tempdir().unwrap();
        let shelf = Shelf::new(Some(root.path()), &["h:1", "..", "a/b"], "p".to_owned());
        let meta = Meta { at_unix_s: 5, validator: Some("v".to_owned()), file_bytes: Some(9) };
        assert!(shelf.is_empty());
        assert_eq!(shelf.get("n"), None);
        shelf.put("n", &meta, b"pay\nload");
        assert_eq!(shelf.get("n"), Some((meta, b"pay\nload".to_vec())));
        assert_eq!(shelf.get("other"), None);
        let path = shelf.path("n").unwrap();
        assert!(path.starts_with(root.path().join("h_1").join("_").join("a_b")));
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, damaged).unwrap();
            assert_eq!(shelf.get("n"), None, "byte {at}");
        }
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(shelf.get("n"), None, "cut to {length}");
        }
        // A record under another's name.
        let other = Shelf::new(Some(root.path()), &["h:1", "..", "a/b"], "q".to_owned());
        fs::write(other.path("n").unwrap(), &whole).unwrap();
        assert_eq!(other.get("n"), None);
    }

    #[test]
    fn without_a_folder_nothing_is_kept() {
        let shelf = Shelf::new(None, &["a"], "p".to_owned());
        shelf.put("n", &Meta::default(), b"x");
        assert_eq!(shelf.get("n"), None);
        assert!(shelf.is_empty());
    }
}
