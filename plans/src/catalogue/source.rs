//! Where a model's files come from: a folder here, and elsewhere whatever can say which files there
//! are and give the first bytes of each. Owns the boundary; what the bytes mean is the catalogue's.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::header::{self, HeaderBytes, HeaderError};

/// A model's files, wherever they are. A catalogue made through it, its fingerprint included, does
/// not depend on which kind it was, nor on the order of the listing.
pub trait Source: Sync {
    /// What to call it in messages: a folder, or an address.
    fn label(&self) -> &Path;

    /// What to call one of its files, in messages and in [`super::Shard::path`].
    fn locate(&self, name: &str) -> PathBuf {
        self.label().join(name)
    }

    /// Every file directly in it, or `None` where it cannot be asked: then the index says which
    /// files there are.
    ///
    /// # Errors
    /// It does not exist or does not answer.
    fn list(&self) -> io::Result<Option<Vec<Entry>>>;

    /// A file that is read whole, such as config.json; `None` where there is none.
    ///
    /// # Errors
    /// There may be one, and it cannot be read.
    fn small_file(&self, name: &str) -> io::Result<Option<Vec<u8>>>;

    /// Size of a file, asked only for those that [`Source::list`] gives no size of; `None` where
    /// there is none.
    ///
    /// # Errors
    /// There may be one, and it cannot be said.
    fn file_bytes(&self, name: &str) -> io::Result<Option<u64>>;

    /// The header of a shard: its JSON, and the size of the whole file. The length field is to be
    /// judged by [`header::declared_bytes`] before anything is allocated or fetched by it.
    ///
    /// # Errors
    /// As [`header::declared_bytes`], or an I/O error; one of kind `NotFound` means that there is
    /// no such file.
    fn header(&self, name: &str) -> Result<HeaderBytes, HeaderError>;

    /// Whether the index may be read only to compare it with the headers. Of a model elsewhere its
    /// ten megabytes are as much as many headers: there it is read only if without it the files or
    /// the reason of a missing tensor stay unknown.
    fn index_is_cheap(&self) -> bool;

    /// How many headers to ask for at once; `None` for as many as there are cores.
    fn parallel_reads(&self) -> Option<usize> {
        None
    }
}

/// One file of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name, without a folder.
    pub name: String,
    /// Its size, if the listing says it; of a link, that of the file that it leads to.
    pub bytes: Option<u64>,
    /// Of a link that leads nowhere: where it should lead. There is no such file then.
    pub broken_link: Option<PathBuf>,
}

/// A model in a folder, which may be one of links into a store elsewhere, as hub clients make them.
#[derive(Clone, Debug)]
pub struct Folder {
    directory: PathBuf,
}

impl Folder {
    /// The model in `directory`.
    #[must_use]
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }
}

impl Source for Folder {
    fn label(&self) -> &Path {
        &self.directory
    }

    fn list(&self) -> io::Result<Option<Vec<Entry>>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let name = entry.file_name();
            // Names that are not text belong to nothing that is looked for.
            let Some(name) = name.to_str() else { continue };
            let path = entry.path();
            let mut entry = Entry { name: name.to_owned(), bytes: None, broken_link: None };
            match fs::metadata(&path) {
                Ok(metadata) if metadata.is_file() => entry.bytes = Some(metadata.len()),
                Ok(_) => continue,
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    // Gone since it was listed, or a link that leads nowhere.
                    let Ok(target) = fs::read_link(&path) else { continue };
                    entry.broken_link = Some(target);
                }
                // It is there, and reading it will say why it cannot be read.
                Err(_) => {}
            }
            entries.push(entry);
        }
        Ok(Some(entries))
    }

    fn small_file(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        let read = open_file(&self.directory.join(name))
            .and_then(|mut file| file.read_to_end(&mut bytes))
            .map(|_| bytes);
        absent_is_none(read)
    }

    fn file_bytes(&self, name: &str) -> io::Result<Option<u64>> {
        absent_is_none(fs::metadata(self.directory.join(name)).map(|m| m.len()))
    }

    fn header(&self, name: &str) -> Result<HeaderBytes, HeaderError> {
        header::read_header_bytes(&self.directory.join(name))
    }

    fn index_is_cheap(&self) -> bool {
        true
    }
}

/// Opens a file of a model to be read. A pipe or a socket in its place is refused: opening one waits
/// for somebody to write, perhaps for ever, and a device may have no end.
///
/// # Errors
/// What the system says, or `InvalidInput` for what is no file. A folder is left to the system,
/// which names it when it is read.
pub fn open_file(path: &Path) -> io::Result<File> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() && !metadata.is_dir() {
        return Err(io::Error::new(
            ErrorKind::InvalidInput,
            "it is a pipe, a socket or a device, not a file",
        ));
    }
    File::open(path)
}

fn absent_is_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
